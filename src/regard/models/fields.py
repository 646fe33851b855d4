"""Check values read from a file, one function per kind of value, before anything is built from them.

Each function takes the value's name (for the error) and the value, and returns the value. It raises `TypeError` for a
wrong type and `ValueError` for a value out of bounds.
"""

from __future__ import annotations

from collections.abc import Callable
from reprlib import repr as short
from typing import Any

from regard.errors import bad_type, bad_value

__all__ = ["LAYERS", "ROWS", "WIDTH", "flag", "integer", "number", "several", "word"]

# Upper bounds, far above any known model.
LAYERS = 1 << 14  # layers of a model
WIDTH = 1 << 24  # length of a row of a weight
ROWS = (1 << 31) - 1  # tokens of a vocabulary or of a text


def integer(what: str, value: Any, *, least: int = 1, most: int = ROWS) -> int:
    """An integer within bounds; neither a float nor a bool."""
    expected = {0: "an integer from 0 on", 1: "a positive integer"}.get(least, f"an integer from {least} on")
    if type(value) is not int:
        raise bad_type(what, expected=expected, received=short(value))
    if not least <= value <= most:
        raise bad_value(what, expected=f"{expected}, at most {most}", received=short(value))
    return value


def number(what: str, value: Any, *, above: float | None = None, least: float = -1e30, most: float = 1e30) -> float:
    """A finite number within bounds: greater than `above` or at least `least`, and at most `most`."""
    low = f"above {above:g}" if above is not None else f"from {least:g} on" if least > -1e30 else ""
    expected = " ".join(filter(None, ("a finite number", low)))
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise bad_type(what, expected=expected, received=short(value))
    if not least <= value <= most or (above is not None and value <= above):  # (NaN and infinity fail the first)
        raise bad_value(what, expected=f"{expected}, at most {most:g}", received=short(value))
    return float(value)


def flag(what: str, value: Any) -> bool:
    """A bool."""
    if not isinstance(value, bool):
        raise bad_type(what, expected="true or false", received=short(value))
    return value


def word(what: str, value: Any) -> str:
    """A string."""
    if not isinstance(value, str):
        raise bad_type(what, expected="a string", received=short(value))
    return value


def several(what: str, value: Any, kind: Callable[[str, Any], Any], count: int | None = None) -> tuple[Any, ...]:
    """A list whose items are all of one kind. If `count` is given, the length is checked before the items."""
    if not isinstance(value, (list, tuple)):
        raise bad_type(what, expected="a list", received=short(value))
    if count is not None and len(value) != count:
        raise bad_value(what, expected=f"a list of {count}", received=f"one of {len(value)}")
    return tuple(kind(f"{what}[{i}]", item) for i, item in enumerate(value))
