"""A bar for long work: on a terminal, where rich is installed; silent elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sized
from typing import TypeVar

__all__ = ["track"]

T = TypeVar("T")


def track(things: Iterable[T], what: str, progress: bool = True, total: int | None = None) -> Iterator[T]:
    """The things one after another, with a bar that says `what` is being done.

    >>> list(track([1, 2], "counting"))
    [1, 2]
    """
    if progress and sys.stderr.isatty():
        try:
            from rich.console import Console
            from rich.progress import track as bar
        except ImportError:
            pass
        else:
            total = len(things) if total is None and isinstance(things, Sized) else total
            yield from bar(things, what, total=total, console=Console(stderr=True), transient=True)
            return
    yield from things
