"""A bar for long work: on a terminal, where rich is installed; silent elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from typing import Any, TypeVar

__all__ = ["told", "track"]

T = TypeVar("T")

PATIENCE = 1.0  # seconds that go by before there is a bar


def track(things: Iterable[T], what: str, progress: bool = True) -> Iterator[T]:
    """The things one after another; where that takes more than a second, with a bar that says `what` is being done.

    >>> list(track([1, 2], "counting"))
    [1, 2]
    """
    bar, begun = None, time.monotonic()
    wanted = progress and sys.stderr.isatty()
    try:
        for done, thing in enumerate(things):
            if wanted and time.monotonic() - begun > PATIENCE:
                wanted, bar = False, _bar(what, len(things) if isinstance(things, Sized) else None)
            if bar is not None:
                bar.update(bar.task_ids[0], completed=done)
            yield thing
    finally:
        if bar is not None:
            bar.stop()


@contextmanager
def told(what: str) -> Iterator[Callable[[float], None]]:
    """Within it, a function that is told how far something is, from 0 to 1; after a second there is a bar for it.

    >>> with told("counting") as far:
    ...     far(0.5)
    """
    bar, begun = None, time.monotonic()
    wanted = sys.stderr.isatty()

    def far(share: float) -> None:
        nonlocal bar, wanted
        if wanted and time.monotonic() - begun > PATIENCE:
            wanted, bar = False, _bar(what, 1)
        if bar is not None:
            bar.update(bar.task_ids[0], completed=share)

    try:
        yield far
    finally:
        if bar is not None:
            bar.stop()


def _bar(what: str, total: int | None) -> Any:
    """A bar on the terminal, or None without rich."""
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ImportError:
        return None
    bar = Progress(console=Console(stderr=True), transient=True)
    bar.add_task(what, total=total)
    bar.start()
    return bar
