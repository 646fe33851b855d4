"""A progress bar on the terminal, drawn by rich where it is installed; silent elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from typing import Any, TypeVar

__all__ = ["progress_bar", "track"]

T = TypeVar("T")

DELAY = 1.0  # seconds before a bar is shown


def track(things: Iterable[T], what: str, progress: bool = True) -> Iterator[T]:
    """Iterate over things, with a progress bar labelled `what` if that takes more than a second.

    >>> list(track([1, 2], "counting"))
    [1, 2]
    """
    total = len(things) if isinstance(things, Sized) else None
    with progress_bar(what, total, progress) as update:
        for done, thing in enumerate(things):
            update(done)
            yield thing


@contextmanager
def progress_bar(what: str, total: int | None = 1, show: bool = True) -> Iterator[Callable[[float], None]]:
    """A function to report how much of `total` is done; after a second there is a progress bar.

    >>> with progress_bar("counting") as update:
    ...     update(0.5)
    """
    bar: Any = None
    pending, started = show and sys.stderr.isatty(), time.monotonic()

    def update(done: float) -> None:
        nonlocal bar, pending
        if pending and time.monotonic() - started > DELAY:
            pending, bar = False, _started_bar(what, total)
        if bar is not None:
            bar.update(bar.task_ids[0], completed=done)

    try:
        yield update
    finally:
        if bar is not None:
            bar.stop()


def _started_bar(what: str, total: int | None) -> Any:
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
