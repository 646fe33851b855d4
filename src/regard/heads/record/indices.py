"""Indices and slices that a caller gave, checked."""

from __future__ import annotations

from regard.errors import bad_type, bad_value

__all__ = ["index_of", "slice_of"]


def slice_of(what: str, which: slice | int | None, size: int) -> slice:
    """A slice without a step; an index becomes one of a single element."""
    if which is None:
        return slice(0, size)
    if not isinstance(which, slice):
        index = index_of(what, which, size)
        return slice(index, index + 1)
    if which.step not in (None, 1):
        raise bad_value(what, expected="a slice without a step", received=f"{which}")
    return which


def index_of(what: str, which: object, size: int) -> int:
    """An index from 0; negative indices count from the end."""
    if isinstance(which, bool) or not isinstance(which, int):
        raise bad_type(what, expected="a number or a slice", received=repr(which))
    if not -size <= which < size:
        raise IndexError(f"{what} {which}: there are {size}")
    return which % size
