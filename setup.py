"""Compile the native kernel if there is a C++17 compiler; install without it otherwise.

It is a plain C library that Python loads by ctypes, without Python or torch headers. The same source is compiled once
per instruction set, each in its own namespace, and `dispatch.cpp` selects one at run time, so that a wheel built on one
CPU runs on another.

    CXX               the compiler                          CXX=clang++ pip install .
    CXXFLAGS          more flags, appended to ours
    REGARD_SANITIZE   the sanitizers, as for -fsanitize=    REGARD_SANITIZE=address,undefined
"""

from __future__ import annotations

import os
import platform
import re
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
    "-falign-loops=64 "  # (Zen 3: an inner loop that begins within a cache line of code takes up to 9 % longer)
    "-Wall -Wextra -Wno-psabi -Wno-unknown-pragmas "
    "-Wno-uninitialized -Wno-maybe-uninitialized"  # (false alarms of GCC 12 in its own headers)
)
AVX512 = "-mavx512f -mavx512dq -mavx512bw -mavx512vl -mfma -mf16c -mprefer-vector-width=512"
INSTRUCTION_SETS = {"portable": ""}
if platform.machine().lower() in ("x86_64", "amd64"):
    INSTRUCTION_SETS |= {"avx2": "-mavx2 -mfma -mf16c", "avx512": AVX512, "avx512_bf16": f"{AVX512} -mavx512bf16"}
    INSTRUCTION_SETS["amx"] = f"{INSTRUCTION_SETS['avx512_bf16']} -mamx-tile -mamx-bf16"  # (attention alone)


def compiler() -> str | None:
    """$CXX, or the first C++ compiler found; None if there is none."""
    return os.environ.get("CXX") or next((name for name in ("g++", "c++", "clang++") if shutil.which(name)), None)


def build_library(target: Path, objects: Path) -> None:
    """Compile and link the library to `target`. Raises OSError if that fails."""
    cxx = compiler()
    if cxx is None:
        raise FileNotFoundError("no C++ compiler (g++, c++, clang++) was found")
    sanitize = os.environ.get("REGARD_SANITIZE")
    extra_flags = shlex.split(os.environ.get("CXXFLAGS", "")) + (
        [f"-fsanitize={sanitize}", "-fno-sanitize-recover=undefined", "-g1"] if sanitize else []
    )
    objects.mkdir(parents=True, exist_ok=True)

    def run(*arguments: str) -> None:
        done = subprocess.run([*shlex.split(cxx), *arguments], capture_output=True, text=True)
        if done.returncode:
            raise OSError(f"{cxx} failed: {done.stderr[-2000:]}")

    def compile_object(source: str, name: str, *flags: str) -> str:
        output = str(objects / f"{name}.o")
        run(*shlex.split(FLAGS), *flags, *extra_flags, "-c", str(SOURCE / source), "-o", output)
        return output

    def supports(flags: str) -> bool:
        command = [*shlex.split(cxx), *flags.split(), "-E", "-x", "c++", os.devnull]
        return subprocess.run(command, capture_output=True).returncode == 0

    sets = {name: flags for name, flags in INSTRUCTION_SETS.items() if supports(flags)}  # (old compilers lack some)
    jobs = [("dispatch.cpp", "dispatch", *(f"-DREGARD_HAS_{name.upper()}" for name in sets)), ("copies.cpp", "copies")]
    jobs += [
        (f"{source}.cpp", f"{source}_{name}", f"-DREGARD_NAMESPACE=regard_{name}", *flags.split())
        for name, flags in sets.items()
        for source in ("kernel", "products")
        if (source, name) != ("products", "amx")
    ]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        object_files = list(pool.map(lambda job: compile_object(*job), jobs))
    target.parent.mkdir(parents=True, exist_ok=True)
    # Of functions defined in several objects (templates of the standard library) the linker takes the first: so the
    # portable instruction set comes first, and functions compiled for AVX-512 are not called on other CPUs.
    # OpenMP is not linked: torch has loaded its runtime before this library, and there must be only one.
    run("-shared", "-o", str(target), *object_files, *([f"-fsanitize={sanitize}"] if sanitize else []))


def built_before() -> Path | None:
    """The library in the source tree, from an editable installation, if no source has changed since."""
    built = SOURCE.with_name(LIBRARY)
    customised = any(os.environ.get(name) for name in ("CXX", "CXXFLAGS", "REGARD_SANITIZE"))
    if customised or not built.exists():
        return None
    newest = max(path.stat().st_mtime for path in [Path(__file__), *SOURCE.iterdir()])
    return built if built.stat().st_mtime > newest else None


class BuildNative(build_ext):
    """Builds the library instead of a Python extension. If that fails, the installation goes on without it."""

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
            print(f"regard: installed without its native kernel, which is optional but faster: {error}")

    def get_outputs(self) -> list[str]:
        return [path for path in super().get_outputs() if os.path.exists(path)]

    def copy_extensions_to_source(self) -> None:
        if os.path.exists(os.path.join(self.build_lib, self.get_ext_filename(self.extensions[0].name))):
            super().copy_extensions_to_source()


class AnyPython(bdist_wheel):
    """A wheel for one platform and any version of Python, since the library does not use Python."""

    def get_tag(self) -> tuple[str, str, str]:
        build = self.get_finalized_command("build_ext")
        library = Path(build.get_ext_fullpath(build.extensions[0].name))
        platform_tag = super().get_tag()[2]
        oldest = oldest_glibc(library) if platform_tag.startswith("linux_") else None
        return "py3", "none", platform_tag.replace("linux_", f"manylinux_{oldest}_", 1) if oldest else platform_tag


def oldest_glibc(library: Path) -> str | None:
    """The oldest glibc that has all that the library asks for, as in "2_29"; None if it is not known.

    Versioned symbols are named in the library: `exp@GLIBC_2.29`. A system with glibc 2.27 or newer has a libstdc++ of
    GCC 7 or newer, which is 3.4.24; a library that asks for more than that is known to run where it was built alone.
    """
    content = library.read_bytes() if library.exists() else b""
    glibc = [int(minor) for minor in re.findall(rb"\0GLIBC_2\.(\d+)", content)]
    libstdcxx = [int(patch) for patch in re.findall(rb"\0GLIBCXX_3\.4\.(\d+)", content)]
    if not glibc or max(libstdcxx, default=0) > 24 or os.environ.get("REGARD_SANITIZE"):
        return None
    return f"2_{max(glibc + [27])}"


setup(
    ext_modules=[Extension("regard.kernels.native_library", [str(SOURCE / "dispatch.cpp")])],
    cmdclass={"build_ext": BuildNative, "bdist_wheel": AnyPython},
)
