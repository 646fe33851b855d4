"""What this machine has: versions, what the CPU can do, which kernels there are and why not the others."""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from regard import kernels
from regard.errors import bad_value
from regard.kernels import native_library as library
from regard.kernels import native_products
from regard.kernels.triton import availability, self_check

__all__ = ["check_gpus", "cpu_features", "examine"]

# What kernels ask for, of all that a CPU may have.
_FEATURES = (
    "sse2",
    "avx2",
    "fma",
    "f16c",
    "avx512f",
    "avx512bw",
    "avx512dq",
    "avx512vl",
    "avx512_bf16",
    "amx_tile",
    "amx_bf16",
)
# Which packages each extra brings: what is missing is named by the extra that installs it.
_EXTRAS = {
    "models": ("safetensors", "tokenizers", "gguf"),
    "cli": ("typer", "rich"),
    "draw": ("matplotlib",),
    "diffusers": ("diffusers",),
    "serve": ("starlette", "uvicorn"),
    "tables": ("pandas",),
    "gpu": ("triton",),
}


def examine() -> dict[str, dict[str, str]]:
    """Everything, in sections of lines.

    >>> list(examine())
    ['versions', 'CPU', 'kernels', 'extras']
    """
    return {"versions": _versions(), "CPU": _cpu(), "kernels": _kernels(), "extras": _extras()}


def cpu_features() -> list[str] | None:
    """Which of the instruction sets that matter here this CPU has; None where the system does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return None
    flags = next((line.split(":", 1)[1].split() for line in lines if line.startswith("flags")), None)
    return None if flags is None else [feature for feature in _FEATURES if feature in flags]


def _versions() -> dict[str, str]:
    return {
        "regard": _version("regard") or "not installed as a package",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": f"{platform.system()} {platform.machine()}",
    }


def _cpu() -> dict[str, str]:
    features = cpu_features()
    return {
        "features": "this system does not tell" if features is None else ", ".join(features) or "none of note",
        "torch uses": torch.backends.cpu.get_cpu_capability(),
        "threads": f"{torch.get_num_threads()} (torch.set_num_threads)",
        "projections": _projections(),
    }


def _projections() -> str:
    """Who multiplies in regard's layers and models without gradients."""
    ours = []
    for dtype in library.DTYPES:
        rows = native_products.rows_served(dtype)
        some = f" ({rows[0]} to {rows[-1]} rows)" if rows and rows.stop < sys.maxsize else ""
        ours += [str(dtype).removeprefix("torch.") + some] if rows else []
    return f"our own kernel in {', '.join(ours)}" if ours else "torch's own, and oneDNN"


def _kernels() -> dict[str, str]:
    loaded = library.load()
    lines = dict.fromkeys(kernels.available(), "available") | {"triton": _triton()}
    if loaded is None:
        return {"native": f"no: {library.why_not()}", **lines}
    return {**lines, "native": f"available, with {loaded.best} (of {', '.join(loaded.usable)})"}


def _triton() -> str:
    """Whether the GPU kernels are taken, on each GPU; or why there are none."""
    if not torch.cuda.is_available():
        if availability.why_not_on("cpu") is None:
            return "in the interpreter, by its name alone"
        return "no: torch finds no GPU" + ("" if availability.installed() else ", and Triton is not installed")
    missing = availability.why_not_on("cuda")
    if missing is not None:
        return f"no: {missing}"
    lines = []
    for index in range(torch.cuda.device_count()):
        verdict = self_check.remembered(torch.device("cuda", index))
        taken = f"available ({verdict})" if verdict is not None and verdict.passed else "by its name alone"
        doubt = self_check.doubt(torch.device("cuda", index))
        lines.append(f"{torch.cuda.get_device_name(index)}: {taken}{'' if doubt is None else f'; {doubt}'}")
    return "; ".join(lines)


def check_gpus(report: Callable[[str], None] | None = None) -> dict[str, str]:
    """Run the self-check of the GPU kernels on each GPU, or in Triton's interpreter: a verdict for each, in words."""
    if availability.why_not_on("cuda") is None and torch.cuda.is_available():
        devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    elif availability.why_not_on("cpu") is None:
        devices = [torch.device("cpu")]
    else:
        why = availability.why_not_on("cuda") or f"torch {torch.__version__} finds no GPU"
        raise bad_value("GPU kernels", expected="a GPU that Triton compiles for", received=f"none: {why}")
    return {self_check.device_key(device): str(self_check.check(device, report)) for device in devices}


def _extras() -> dict[str, str]:
    lines = {}
    for extra, packages in _EXTRAS.items():
        versions = {package: _version(package) for package in packages}
        missing = [package for package, version in versions.items() if version is None]
        lines[extra] = ", ".join(f"{package} {version}" for package, version in versions.items() if version is not None)
        if missing:
            lines[extra] = f"{', '.join(missing)} missing; remedy: pip install 'regard[{extra}]'"
    return lines


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return sys.modules[package].__version__ if package == "regard" and package in sys.modules else None
