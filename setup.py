"""Compiles the native kernel where a C++17 compiler is found; installs without it where none is.

It is a plain C library that Python loads by ctypes: no Python and no torch headers are needed. The same source is
compiled once for each instruction set, in a namespace of its own, and `dispatch.cpp` picks one by what the CPU has, so
that a wheel built on one CPU runs on another.

    CXX               the compiler                                            CXX=clang++ pip install .
    CXXFLAGS          more flags for it, after ours
    REGARD_SANITIZE   what to look for at run time, as -fsanitize= wants it   REGARD_SANITIZE=address,undefined
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

SOURCE = Path("src/regard/kernels/native")
LIBRARY = "libregard_native.so"
FLAGS = (
    "-std=c++17 -O3 -fPIC -fopenmp -fvisibility=hidden -fno-math-errno -fno-trapping-math -ffp-contract=fast "
    "-Wall -Wextra -Wno-psabi -Wno-unknown-pragmas "
    "-Wno-uninitialized -Wno-maybe-uninitialized"  # (GCC 12 on its own headers)
)
AVX512 = "-mavx512f -mavx512dq -mavx512bw -mavx512vl -mfma -mf16c -mprefer-vector-width=512"
INSTRUCTION_SETS = {"portable": ""}
if platform.machine().lower() in ("x86_64", "amd64"):
    INSTRUCTION_SETS |= {"avx2": "-mavx2 -mfma -mf16c", "avx512": AVX512, "avx512_bf16": f"{AVX512} -mavx512bf16"}


def compiler() -> str | None:
    """The first C++ compiler that there is; $CXX if it names one."""
    named = os.environ.get("CXX")
    return named or next((name for name in ("g++", "c++", "clang++") if shutil.which(name)), None)


def build_library(target: Path, objects: Path) -> None:
    """Compile and link the library to `target`. Raises OSError or subprocess.CalledProcessError where that fails."""
    cxx = compiler()
    if cxx is None:
        raise FileNotFoundError("no C++ compiler (g++, c++, clang++) was found")
    sanitize = os.environ.get("REGARD_SANITIZE")
    more = shlex.split(os.environ.get("CXXFLAGS", "")) + (
        [f"-fsanitize={sanitize}", "-fno-sanitize-recover=undefined", "-g1"] if sanitize else []
    )
    objects.mkdir(parents=True, exist_ok=True)

    def run(*arguments: str) -> None:
        done = subprocess.run([*shlex.split(cxx), *arguments], capture_output=True, text=True)
        if done.returncode:
            raise OSError(f"{cxx} failed: {done.stderr[-2000:]}")

    def compiled(source: str, name: str, *flags: str) -> str:
        to = str(objects / f"{name}.o")
        run(*shlex.split(FLAGS), *flags, *more, "-c", str(SOURCE / source), "-o", to)
        return to

    def knows(flags: str) -> bool:
        return subprocess.run([*shlex.split(cxx), *flags.split(), "-E", "-x", "c++", os.devnull],
                              capture_output=True).returncode == 0  # fmt: skip

    sets = {name: flags for name, flags in INSTRUCTION_SETS.items() if knows(flags)}  # (older compilers: not all)
    jobs = [("dispatch.cpp", "dispatch", *(f"-DREGARD_HAS_{name.upper()}" for name in sets))]
    jobs += [("kernel.cpp", name, f"-DREGARD_NAMESPACE=regard_{name}", *flags.split()) for name, flags in sets.items()]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        parts = list(pool.map(lambda job: compiled(*job), jobs))
    target.parent.mkdir(parents=True, exist_ok=True)
    # Of functions that several parts hold (templates of the standard library) the linker takes the first one: so the
    # most modest instruction set comes first, and what was compiled for AVX-512 serves nobody else.
    # OpenMP's functions are left open: torch has loaded a runtime by the time this is, and there must be only one.
    run("-shared", "-o", str(target), *parts, *([f"-fsanitize={sanitize}"] if sanitize else []))


def built_before() -> Path | None:
    """The library that lies in the source tree from an editable installation, if nothing has changed since."""
    built = SOURCE.with_name(LIBRARY)
    asked = any(os.environ.get(name) for name in ("CXX", "CXXFLAGS", "REGARD_SANITIZE"))
    if asked or not built.exists():
        return None
    newest = max(path.stat().st_mtime for path in [Path(__file__), *SOURCE.iterdir()])
    return built if built.stat().st_mtime > newest else None


class BuildNative(build_ext):
    """The library instead of a Python extension; and no library, rather than no installation."""

    def get_ext_filename(self, fullname: str) -> str:
        return os.path.join(*fullname.split(".")[:-1], LIBRARY)

    def build_extension(self, ext: Extension) -> None:
        target, before = Path(self.get_ext_fullpath(ext.name)), built_before()
        if before is not None:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(before, target)
            return
        try:
            build_library(target, Path(self.build_temp) / "native")
        except OSError as error:
            target.unlink(missing_ok=True)
            print(f"regard: installed without its native kernel, which is not needed but faster: {error}")

    def get_outputs(self) -> list[str]:
        return [path for path in super().get_outputs() if os.path.exists(path)]

    def copy_extensions_to_source(self) -> None:
        if os.path.exists(os.path.join(self.build_lib, self.get_ext_filename(self.extensions[0].name))):
            super().copy_extensions_to_source()


class AnyPython(bdist_wheel):
    """The library knows nothing of Python: a wheel is for a platform, and for any version."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[Extension("regard.kernels.native_library", [str(SOURCE / "dispatch.cpp")])],
    cmdclass={"build_ext": BuildNative, "bdist_wheel": AnyPython},
)
