"""What the caller got wrong: expected, received, remedy.

Every error that a caller can cause is raised through the two functions here, so that all of them read alike::

    mask: expected a boolean tensor, received dtype torch.int64; remedy: masks.Keep(t != 0) ...

A broken invariant of our own is an `assert`, never one of these.
"""

from __future__ import annotations

from torch import Tensor

__all__ = ["bad_type", "bad_value", "is_panic", "missing_extra", "shape_of"]


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
