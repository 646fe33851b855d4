"""The base of everything that changes the outputs of heads while a model runs.

Letters: B batch, H query heads, N queries, M keys, E head width of v.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from regard.errors import bad_value
from regard.heads.capture.cache_tracking import SequenceTracker, trimmed
from regard.heads.capture.capture import AttentionCapture
from regard.heads.capture.observed import ObservedCall

__all__ = ["Changes", "TokenNumbers", "refuse_checkpoints"]


@dataclass(frozen=True)
class TokenNumbers:
    """Which tokens of a sequence the queries and keys of an attention call are, counted from 0."""

    first_row: int  # the number of the first query among those of the sequence that were seen
    queries: Tensor  # (N,)
    keys: Tensor  # (M,)
    totals: tuple[int, int]  # how many tokens the sequences of queries and keys have so far

    @staticmethod
    def of(attention: ObservedCall, placed: ObservedCall, total: int, goes_on: bool, first_row: int) -> TokenNumbers:
        """Of an attention call, which is `placed` after `trimmed`, in a sequence that has `total` keys now."""
        n, m = attention.shape[2:]
        device, call = attention.device, placed.call
        if attention.kind == "cross":
            first, keys, totals = first_row, torch.arange(m, device=device), (first_row + n, m)
        else:
            is_start = call is not None and call.contiguous and not goes_on and attention.numbers is None
            first = max(0, call.q_start if is_start and call is not None else total - n)
            start = total - placed.shape[3]
            keys = torch.arange(start, start + m, device=device) if attention.numbers is None else attention.numbers
            totals = first + n, total
        return TokenNumbers(first_row, torch.arange(first, first + n, device=device), keys, totals)


class Changes(AttentionCapture):
    """Base class for changing heads' outputs. Layers are named as `watch` names them, or numbered in call order.
    Attention calls are given with their gradients."""

    changes = True

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.order: list[str] = []  # layers, in the order in which they were first called
        self.tracker = SequenceTracker(strict=False)
        self.goes_on = False  # whether the last attention call continued its layer's sequence from a cache
        self.tokens: TokenNumbers | None = None  # of the last attention call
        self.changed: tuple[nn.Module, list[int]] | None = None  # its heads that were changed, if any
        self.rows_seen: dict[str, int] = {}  # queries of the last sequence so far, by layer
        self.rows_before: tuple[int, dict[str, int]] = (-1, {})  # an outermost call, and `rows_seen` before it
        self.inside = False

    def __enter__(self) -> Any:
        if self.inside:
            raise bad_value(
                type(self).__name__,
                expected="one block",
                received="the same one entered twice",
                remedy="a new one for each block",
            )
        self.inside = True
        return super().__enter__()

    def see(self, attention: ObservedCall) -> None:
        """Name the attention's layer as `watch` does."""
        placed = trimmed(attention)
        attention.layer, self.goes_on, _, total = self.tracker.place(placed)
        if attention.layer not in self.order:
            self.order.append(attention.layer)
        if self.rows_before[0] != attention.forward:
            self.rows_before = attention.forward, dict(self.rows_seen)
        first_row = self.rows_seen.get(attention.layer, 0) if self.goes_on else 0
        self.rows_seen[attention.layer] = first_row + attention.shape[2]
        self.tokens = TokenNumbers.of(attention, placed, total, self.goes_on, first_row)

    def _failed(self) -> None:
        super()._failed()
        self.tracker.failed(self.frames.forwards)
        if self.rows_before[0] == self.frames.forwards:
            self.rows_seen = self.rows_before[1]


def refuse_checkpoints(layer: str) -> None:
    """Raise in a checkpointed layer: it is recomputed in backward, where our hooks are off; gradients would ignore the
    ablation."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch.utils.checkpoint":
            raise bad_value(
                layer,
                expected="no checkpointing where heads are changed",
                received="a checkpointed layer",
                remedy="turn it off: model.gradient_checkpointing_disable()",
            )
        frame = frame.f_back
