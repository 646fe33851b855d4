"""`Patching`: how much each head of one run brings a metric back when it is put into another run.

Letters: H heads, N tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard.errors import bad_type, bad_value
from regard.heads.record.table import PerHead, Table

__all__ = ["Patching", "check_metrics", "metric_value"]


@dataclass(repr=False)
class Patching(PerHead):
    """The metric with one head patched at a time. `raw[layer]` (H,), or (H, N) by token, is the metric itself;
    `scores[layer]` the share of the way from the corrupted run (0) to the clean one (1). Heads that were not asked for
    are NaN."""

    raw: dict[str, Tensor]
    clean: float  # the metric of the clean run
    corrupt: float  # the metric of the corrupted run
    what: str = "output"
    estimated: bool = False  # by gradients
    tokens: list[str] | None = None  # of the corrupted run, if it is a text

    @staticmethod
    def of(raw: dict[str, Tensor], clean: float, corrupt: float, **known: Any) -> Patching:
        """From the metric of each patched run."""
        scores = {layer: (value - corrupt) / (clean - corrupt) for layer, value in raw.items()}
        return Patching(scores, raw, clean, corrupt, **known)

    @property
    def by_token(self) -> bool:
        """Whether heads were patched at one token at a time."""
        return any(score.dim() == 2 for score in self.scores.values())

    def table(self) -> Table:
        """A row for each head, or for each head and token, those that bring back most first."""
        rows = []
        for layer, scores in self.scores.items():
            for at in (~scores.isnan()).nonzero().tolist():
                row: dict[str, Any] = {"layer": layer, "head": at[0]}
                if len(at) == 2:
                    row["position"] = at[1]
                    row |= {} if self.tokens is None or at[1] >= len(self.tokens) else {"token": self.tokens[at[1]]}
                rows.append(row | {"restored": scores[tuple(at)].item(), "metric": self.raw[layer][tuple(at)].item()})
        return Table(sorted(rows, key=lambda row: -row["restored"]), self.scores)

    def matrix(self) -> Tensor:
        """The scores as (layers, H), or (layers, H, N); NaN where there is no such head or token."""
        values = list(self.scores.values())
        shape = [max(value.shape[axis] for value in values) for axis in range(values[0].dim())]
        matrix = torch.full((len(values), *shape), float("nan"), device="cpu")
        for row, value in zip(matrix, values, strict=True):
            row[tuple(slice(0, size) for size in value.shape)] = value
        return matrix

    def caption(self) -> str:
        """What was patched, and the metric of both runs."""
        how = "estimated by gradients" if self.estimated else f"{self.what} of one head at a time"
        return f"{how}; metric {self.corrupt:.3f} (corrupt, restored 0) to {self.clean:.3f} (clean, restored 1)"

    def __str__(self) -> str:
        return f"{self.caption()}\n{Table(self.table()[:10])}"


def metric_value(value: object) -> Tensor:
    """What a metric gave, if it is one number with a value."""
    if not isinstance(value, Tensor) or value.numel() != 1 or not value.is_floating_point():
        received = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise bad_type("metric", expected="a function of the output that gives one number, a tensor", received=received)
    if not value.isfinite():
        raise bad_value("metric", expected="a finite number", received=value.item())
    return value.reshape(())


def check_metrics(clean: float, corrupt: float) -> None:
    """Raise if the two runs differ in nothing but rounding."""
    if math.isclose(clean, corrupt, rel_tol=1e-6):
        raise bad_value(
            "metric", expected="another value for the clean run than for the corrupted one", received=f"{clean:g} twice"
        )
