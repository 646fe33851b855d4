"""The result of a probe: a score for each head, beside a baseline, with its spread over the runs of the probe.

Letters: R runs, H heads.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from regard.errors import bad_value
from regard.heads.record.record import LayerRecord, Record
from regard.heads.record.table import PerHead, Table

__all__ = ["ProbeResult", "layer_means", "self_attention"]

SHOWN = 10  # rows that are printed

Columns = Mapping[str, Tensor]  # for each layer a number per head, (H,)


@dataclass(repr=False)
class ProbeResult(PerHead):
    """Scores of all heads: `scores[layer]` (H,) is the mean over the runs of a probe. `print` it.

    Attributes:
        baseline: for each layer the score (H,) that needs no such head; each probe says which.
        by_run: for each layer the scores (R, H) of each run.
        runs: what each run was, in words.
        more: further numbers, by name: for each layer (H,).
    """

    baseline: dict[str, Tensor]
    by_run: dict[str, Tensor]
    runs: tuple[str, ...]
    more: dict[str, dict[str, Tensor]]

    title: ClassVar[str] = "score"
    lowest_first: ClassVar[bool] = False

    @property
    def spread(self) -> dict[str, Tensor]:
        """The standard deviation (H,) of each layer's scores over the runs; 0 for a single run."""
        return {layer: scores.std(0, correction=0) for layer, scores in self.by_run.items()}

    def table(self) -> Table:
        """A row for each head, the best first; heads without a score (NaN) last."""
        columns: dict[str, Columns] = {"baseline": self.baseline, "spread": self.spread, **self.more}
        values = {name: {layer: x.tolist() for layer, x in column.items()} for name, column in columns.items()}
        sign = 1 if self.lowest_first else -1
        order = sorted(self.rows(), key=lambda row: (math.isnan(row[2]), sign * row[2]))
        rows: list[dict[str, Any]] = []
        for layer, head, score in order:
            row: dict[str, Any] = {"layer": layer, "head": head, self.title: score}
            rows.append(row | {name: column[layer][head] for name, column in values.items()})
        return Table(rows, self.scores)

    def best(self, count: int = 1) -> list[tuple[str, int]]:
        """The `count` best heads, as (layer, head)."""
        return [(row["layer"], row["head"]) for row in self.table()[:count]]

    def caption(self) -> str:
        """What was run."""
        return f"{self.title}: mean over {len(self.runs)} runs"

    def __str__(self) -> str:
        return f"{self.caption()}\n{Table(self.table()[:SHOWN])}"


def layer_means(runs: Sequence[Mapping[str, Tensor]]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """From a dict of (H,) for each run: for each layer the mean (H,) and all runs (R, H).

    >>> means, by_run = layer_means([{"a": torch.tensor([0.0, 1.0])}, {"a": torch.tensor([0.5, 1.0])}])
    >>> means["a"], by_run["a"].shape
    (tensor([0.2500, 1.0000]), torch.Size([2, 2]))
    """
    by_run = {layer: torch.stack([run[layer].float().cpu() for run in runs]) for layer in runs[0]}
    return {layer: scores.mean(0) for layer, scores in by_run.items()}, by_run


def self_attention(seen: Record) -> list[LayerRecord]:
    """The layers of self-attention in a record; an error if there are none."""
    layers = [layer for layer in seen if layer.kind == "self"]
    if not layers:
        raise bad_value("model", expected="self-attention over the tokens of a text", received="none that was seen")
    return layers
