"""Whether Triton can compute here: installed, and a GPU, or the interpreter.

Compilers ask `why_not_on` and take the answer for a constant, as with `native_library.why_not`.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util

from regard.kernels.triton.interpreter import interpreting

__all__ = ["installed", "version", "why_not_on"]


@functools.cache
def installed() -> bool:
    """Whether there is a package `triton`. It is not imported."""
    return importlib.util.find_spec("triton") is not None


def version() -> str | None:
    """Triton's version; None where it is not installed."""
    try:
        return importlib.metadata.version("triton") if installed() else None
    except importlib.metadata.PackageNotFoundError:
        return None


def why_not_on(device: str) -> str | None:
    """In words, where it cannot compute on devices of a type."""
    if device == "cpu" and not interpreting():
        return "it is for GPUs, and the tensors are on cpu (slowly, for tests: TRITON_INTERPRET=1 before Python starts)"
    if device not in ("cpu", "cuda"):
        return f"Triton has no compiler for {device}"
    if not installed():
        return "Triton is not installed; remedy: pip install 'regard[gpu]'"
    if device == "cuda" and interpreting():
        return "TRITON_INTERPRET=1 is set, and the interpreter is for CPUs"
    return None


why_not_on._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]
