"""How far a model's forward passes are, and what is made of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

__all__ = ["ForwardProgress", "part_of"]


def part_of(progress: Callable[[float], None] | None, first: float, last: float) -> Callable[[float], None] | None:
    """A callback for a part of some work: its numbers from 0 to 1 become those from `first` to `last`.

    >>> part_of(print, 0.5, 0.75)(0.5)
    0.625
    """
    return None if progress is None else lambda share: progress(first + (last - first) * share)


class ForwardProgress:
    """Calls `progress` with numbers from 0 to 1 as modules finish; the callback may raise, to stop. A model that
    generates first uses half of the range for that. 1 is reported by `done` alone."""

    def __init__(self, model: nn.Module, progress: Callable[[float], None] | None, generates: bool) -> None:
        self.model, self.callback = model, progress
        self.phases, self.finished, self.last = 1 + generates, 0, 0.0

    @contextmanager
    def forwards(self, count: int) -> Iterator[None]:
        """One phase, in which the model runs at most `count` times."""
        if self.callback is None:
            yield
            return
        modules = [module for module in self.model.modules() if not isinstance(module, torch.jit.ScriptModule)]
        calls, runs, expected = 0, 0, float(max(len(modules), 1))

        def done(module: nn.Module, *_: Any) -> None:
            nonlocal calls, runs, expected
            calls += 1
            if module is self.model:
                calls, runs, expected = 0, runs + 1, float(calls)  # (some modules run twice, some never)
            share = (runs + min(calls / expected, 1.0)) / count
            self._report((self.finished + min(share, 0.99)) / self.phases)

        handles = [module.register_forward_hook(done) for module in modules]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        self.finished += 1

    def _report(self, share: float) -> None:
        if share > self.last and self.callback is not None:
            self.last = share
            self.callback(share)

    def done(self) -> None:
        """All phases are finished."""
        self._report(1.0)
