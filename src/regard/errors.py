"""What the caller got wrong: expected, received, remedy.

Every error that a caller can cause is raised through the two functions here, so that all of them read alike::

    mask: expected a boolean tensor, received dtype torch.int64; remedy: masks.Keep(t != 0) ...

A broken invariant of our own is an `assert`, never one of these.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NoReturn

import torch
from torch import Tensor

__all__ = ["also", "bad_type", "bad_value", "is_panic", "missing_extra", "no_torchscript", "refuse_trace", "shape_of"]


def _sentence(what: str, expected: str, received: object, remedy: str) -> str:
    return f"{what}: expected {expected}, received {received}" + (f"; remedy: {remedy}" if remedy else "")


def bad_value(what: str, *, expected: str, received: object, remedy: str = "") -> ValueError:
    """A `ValueError` that says expected, received, remedy.

    >>> str(bad_value("num_heads", expected="a divisor of 64", received=5, remedy="pass head_dim"))
    'num_heads: expected a divisor of 64, received 5; remedy: pass head_dim'
    """
    return ValueError(_sentence(what, expected, received, remedy))


def bad_type(what: str, *, expected: str, received: object, remedy: str = "") -> TypeError:
    """A `TypeError` that says expected, received, remedy."""
    return TypeError(_sentence(what, expected, received, remedy))


def missing_extra(package: str, extra: str) -> ImportError:
    """The error for an optional dependency that is not installed, naming the extra that brings it."""
    return ImportError(f"{package} is not installed; it comes with: pip install 'regard[{extra}]'")


def is_panic(error: BaseException) -> bool:
    """Whether it is a panic of a library written in Rust (tokenizers, safetensors), which `except Exception` lets
    through: pyo3 makes it a `BaseException`, of a class that cannot be imported."""
    return type(error).__name__ == "PanicException"


def shape_of(tensor: Tensor) -> str:
    """A shape as a plain tuple, for messages: `(2, 3, 5)`."""
    return str(tuple(tensor.shape))


def also(error: Exception, other: Exception) -> Exception:
    """`error` as an instance of the other's type, too, and with its words: who replaces a function of torch's is caught by
    whoever caught that function's errors.

    >>> both = also(bad_value("mask", expected="2 axes", received="1"), AssertionError("expected 2-D"))
    >>> isinstance(both, ValueError), isinstance(both, AssertionError)
    (True, True)
    >>> str(both)
    'mask: expected 2 axes, received 1; torch says: expected 2-D'
    """
    words = f"{error}; torch says: {other}"
    return _made(type(error), type(other), words)


def _made(first: type[Exception], second: type[Exception], words: str) -> Exception:
    return _both(first, second)(words)


@cache
def _both(first: type[Exception], second: type[Exception]) -> type[Exception]:
    def reduce(self: Exception) -> tuple[Any, ...]:  # a class made here is not found by its name
        return _made, (first, second, str(self))

    bases = (first,) if issubclass(first, second) else (second,) if issubclass(second, first) else (first, second)
    return type(first.__name__, bases, {"__reduce__": reduce, "__module__": first.__module__})


def no_torchscript(module: object) -> NoReturn:
    """Raise for `torch.jit.script` of a module."""
    raise bad_type(
        "torch.jit.script",
        expected="modules that TorchScript can compile",
        received=type(module).__name__,
        remedy="torch.compile(model), or torch.export.export(model, args) for use without Python",
    )


def refuse_trace(what: str) -> None:
    """Raise under `torch.jit.trace`: it would not record our kernels, nor what depends on sizes."""
    if not torch.compiler.is_compiling() and torch.jit.is_tracing():
        raise bad_type(
            what,
            expected="plain calls, torch.compile or torch.export",
            received="a call under torch.jit.trace, which does not record our kernels",
            remedy="torch.export.export(model, args); for ONNX torch.onnx.export(model, args, dynamo=True)",
        )
