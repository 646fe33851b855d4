"""Pictures of the plane: pooled to any resolution, a region in full, the strongest links.

Letters: B batch, H query heads, G kv heads, N queries, M keys, E head width of v, W model width;
c, h, n, m the same within one strip.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.checks import whole_number
from regard.errors import bad_value
from regard.measures.base import Measure, Plane, Strip, ranks

__all__ = ["Crop", "Heatmap", "Links", "TopLinks"]


class Heatmap(Measure):
    """The map at any resolution: each cell is the exact sum of its weights, (B, H, rows, cols). Row i of N falls
    into cell i * rows // N. Where there are fewer queries or keys than cells, each has a cell of its own. Of a padded
    batch each map is that of its text, without padding: shorter texts leave the last cells at 0."""

    gives = {"heatmap": "map"}
    shareable = True

    def __init__(self, rows: int = 64, cols: int | None = None) -> None:
        self.rows = whole_number("rows", rows, at_least=1)
        self.cols = self.rows if cols is None else whole_number("cols", cols, at_least=1)

    def prepare(self, plane: Plane) -> tuple[Tensor, Tensor]:
        """The cell of each query (1|B, N) and of each key (1|B, M); padding, whose weights are 0, is in the first."""
        device = plane.k_positions.device
        sides = (self.rows, plane.queries, plane.padding), (self.cols, plane.keys, plane.key_padding)
        cells_of = []
        for cells, size, padding in sides:
            rank, tokens = ranks(padding, size, device)
            cells_of.append(rank.clamp(min=0) * tokens.clamp(max=cells) // tokens.clamp(min=1))
        return cells_of[0], cells_of[1]

    def begin(self, plane: Plane) -> Tensor:
        n, m = plane.longest
        return plane.new(min(self.rows, n), min(self.cols, m))

    def add(self, state: Tensor, strip: Strip, prepared: tuple[Tensor, Tensor]) -> None:
        rows, cols = strip.of_queries(prepared[0]), strip.of_keys(prepared[1])
        if max(rows.shape[0], cols.shape[0]) > 1:  # texts of several lengths
            into = state[strip.batch, strip.heads]
            for item, weights in enumerate(strip.weights):
                cells = cols[item if cols.shape[0] > 1 else 0].expand(*weights.shape[:2], -1)
                wide = weights.new_zeros(*weights.shape[:2], into.shape[-1]).scatter_add_(-1, cells, weights)
                into[item].index_add_(1, rows[item if rows.shape[0] > 1 else 0], wide)
            return
        rows, cols = rows[0], cols[0]
        first, last = int(cols[0]), int(cols[-1]) + 1
        if strip.plane.keys <= self.cols and last - first == cols.numel():  # each key has a cell of its own, no gap
            weights = strip.weights
        else:
            weights = _summed(strip.weights, cols, first, last)
        state[strip.batch, strip.heads, :, first:last].index_add_(2, rows, weights)


def _summed(weights: Tensor, cells: Tensor, first: int, last: int) -> Tensor:
    """Sums of weights (..., m) over the columns of each cell from `first` to `last`; columns are of `cells` (m,), which
    rise. By products with ones, for some cells at a time: one product for all would be mostly zeros."""
    parts = []
    for cell in range(first, last, _TOGETHER):
        count = min(_TOGETHER, last - cell)
        a, b = torch.searchsorted(cells, torch.tensor([cell, cell + count], device=cells.device)).tolist()
        ones = torch.nn.functional.one_hot(cells[a:b] - cell, count).to(weights.dtype)
        parts.append(weights[..., a:b] @ ones)
    return torch.cat(parts, -1)


_TOGETHER = 16


class Crop(Measure):
    """A region of the map in full: queries r0 to r1 against keys c0 to c1 (as slices), (B, H, r1 - r0, c1 - c0).
    What lies beyond the map is cut off. Of a padded batch tokens are counted from each text's own first."""

    gives = {"crop": "map"}
    shareable = True

    def __init__(self, r0: int, r1: int, c0: int, c1: int) -> None:
        for what, first, last in (("rows", r0, r1), ("cols", c0, c1)):
            whole_number(what, first, at_least=0)
            if not whole_number(what, last, at_least=0) > first:
                raise bad_value(f"Crop {what}", expected="a first before the last", received=f"{first} and {last}")
        self.r0, self.r1, self.c0, self.c1 = r0, r1, c0, c1

    def begin(self, plane: Plane) -> Tensor:
        n, m = plane.longest
        rows, cols = min(self.r1, n) - self.r0, min(self.c1, m) - self.c0
        return plane.new(max(rows, 0), max(cols, 0))

    def prepare(self, plane: Plane) -> tuple[Tensor, Tensor] | None:
        """Which token of its text each query (B, N) and each key (B, M) is, -1 for padding; None without padding."""
        if plane.padding is None and plane.key_padding is None:
            return None
        device = plane.k_positions.device
        rows, cols = ranks(plane.padding, plane.queries, device)[0], ranks(plane.key_padding, plane.keys, device)[0]
        return rows.expand(plane.batch, -1), cols.expand(plane.batch, -1)

    def add(self, state: Tensor, strip: Strip, prepared: tuple[Tensor, Tensor] | None) -> None:
        if prepared is not None:
            rows, cols = strip.of_queries(prepared[0]), strip.of_keys(prepared[1])
            inside = (rows >= self.r0) & (rows < self.r1), (cols >= self.c0) & (cols < self.c1)
            into = state[strip.batch, strip.heads]
            for item, weights in enumerate(strip.weights):
                r, c = inside[0][item], inside[1][item]
                at = rows[item][r][:, None] - self.r0, cols[item][c][None] - self.c0
                into[item][:, at[0], at[1]] = weights[:, r][:, :, c]
            return
        r0, r1 = max(strip.rows.start, self.r0), min(strip.rows.stop, self.r1)
        if r0 >= r1:
            return
        rows = strip.weights[:, :, r0 - strip.rows.start : r1 - strip.rows.start]
        inside = (strip.columns >= self.c0) & (strip.columns < self.c1)
        columns = strip.columns[inside] - self.c0
        state[strip.batch, strip.heads, r0 - self.r0 : r1 - self.r0, columns] = rows[..., inside]


class TopLinks(NamedTuple):
    """The strongest links of each query, strongest first. Where there are fewer keys: key -1, weight 0."""

    keys: Tensor  # (B, H, N, k) integers
    weights: Tensor  # (B, H, N, k)


class Links(Measure):
    """The `k` keys that each query looks at most, with their weights: a `TopLinks` of two (B, H, N, k)."""

    gives = {"links": "choice"}
    shareable = True

    def __init__(self, k: int = 8) -> None:
        self.k = whole_number("k", k, at_least=1)

    def begin(self, plane: Plane) -> TopLinks:
        k = min(self.k, plane.keys)
        return TopLinks(plane.new(plane.queries, k, dtype=torch.int64).fill_(-1), plane.new(plane.queries, k))

    def add(self, state: TopLinks, strip: Strip, prepared: Any) -> None:
        k = min(self.k, strip.weights.shape[-1])
        weights, columns = strip.weights.topk(k, -1)
        state.keys[strip.where][..., :k] = strip.numbers[columns].masked_fill_(weights == 0, -1)
        state.weights[strip.where][..., :k] = weights
