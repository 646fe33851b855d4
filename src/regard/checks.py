"""Checks of arguments that several rooms take: whole numbers, integer tensors, positions."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.errors import bad_type, bad_value, shape_of

__all__ = ["FARTHEST", "check_integers", "check_positions", "integer_tensor", "not_positions", "whole_number"]

FARTHEST = 2**61  # of a position from 0. Differences are up to twice that, and what is added to these still fits int64


def whole_number(what: str, value: object, *, at_least: int) -> int:
    """The number, if it is an integer (or a compiler's symbol for one) and not too small.

    >>> whole_number("Window size", 3, at_least=1)
    3
    """
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise bad_type(what, expected="an integer", received=f"{type(value).__name__} {value!r}")
    if value < at_least:
        raise bad_value(what, expected=f"at least {at_least}", received=value)
    return value  # pyright: ignore[reportReturnType]


def integer_tensor(what: str, tensor: object, *, dims: int, expected: str) -> Tensor:
    """An integer tensor of `dims` axes, the batch first; one axis fewer is taken as a batch of one."""
    if not isinstance(tensor, Tensor):
        try:
            tensor = torch.as_tensor(tensor)
        except (TypeError, ValueError, RuntimeError):
            raise bad_type(what, expected=expected, received=type(tensor).__name__) from None
    if tensor.dtype not in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8):
        raise bad_type(what, expected=expected, received=f"dtype {tensor.dtype}")
    if tensor.dim() == dims - 1:
        tensor = tensor[None]
    if tensor.dim() != dims:
        raise bad_value(what, expected=expected, received=f"shape {shape_of(tensor)}")
    return tensor


def check_integers(what: str, tensor: Tensor) -> None:
    """Raise unless a tensor holds integers."""
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool:
        received = f"dtype {tensor.dtype}"
        raise bad_type(what, expected="an integer tensor", received=received, remedy=f"{what}.long()")


def check_positions(what: str, positions: object, batch: int, length: int) -> Tensor:
    """The positions, if they are integers (length,) or (1|batch, length)."""
    if not isinstance(positions, Tensor):
        raise not_positions(what, positions)
    check_integers(what, positions)
    fits = positions.dim() in (1, 2) and positions.shape[-1] == length
    if not fits or (positions.dim() == 2 and positions.shape[0] not in (1, batch)):
        raise bad_value(
            what,
            expected=f"shape ({length},) or ({batch}, {length})",
            received=f"shape {shape_of(positions)}",
            remedy="one position per token, or the first one's as an int" if what == "positions" else "",
        )
    return positions


def not_positions(what: str, value: object) -> TypeError:
    """The error for positions that are neither a tensor nor an int."""
    expected = "an int or an integer tensor" if what == "positions" else "an integer tensor"
    remedy = "torch.tensor([...]) with one number per token"
    return bad_type(what, expected=expected, received=type(value).__name__, remedy=remedy)
