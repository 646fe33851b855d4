"""`Blocks`: each block of queries sees a few blocks of keys, given by their numbers.

Letters: B batch, H query heads, N queries, M keys, Q blocks of queries, K chosen blocks of keys for each of them.
"""

from __future__ import annotations

from copy import copy

import torch
from torch import Tensor

from regard.checks import whole_number
from regard.errors import bad_type, bad_value, shape_of
from regard.masks.base import Mask, check_axes, of_batch, short
from regard.masks.tiles import Grid, Survey, Tile
from regard.tracing import traced

__all__ = ["Blocks"]


class Blocks(Mask):
    """Block-sparse attention: each block of queries sees the blocks of keys that are chosen for it.

    Args:
        indices: which ones: integers (Q, K), (B, Q, K) or (B, H, Q, K); an axis of B or H may be 1.
            `indices[..., i, :]` are the key blocks that query block i sees, by number, in any order; -1 for none.
        size: keys per block. Key block j holds the slots `j * size` up to `(j + 1) * size` of the key tensor; the last
            one may be shorter.
        query_size: queries per block, `size` by default; 1 where each query has a list of its own.

    Queries and keys are counted by slots, whatever their positions: Q is N / query_size, rounded up. With a cache,
    lists are for the queries of that call. What is hidden from whole blocks is not computed.

    >>> from regard.masks import Causal
    >>> print((Causal() & Blocks(torch.tensor([[0, -1], [1, -1], [0, 2]]), 2)).draw(6))
    █·····
    ██····
    ··█···
    ··██··
    ██··█·
    ██··██
    """

    fields = ("indices", "size", "query_size", "first_query", "first_key")

    def __init__(self, indices: Tensor, size: int, query_size: int | None = None) -> None:
        expected = "an integer tensor (Q, K), (B, Q, K) or (B, H, Q, K)"
        if not isinstance(indices, Tensor):
            raise bad_type("Blocks indices", expected=expected, received=type(indices).__name__)
        if indices.is_floating_point() or indices.is_complex() or indices.dtype is torch.bool:
            remedy = "masks.Keep(t) for a boolean mask of pairs" if indices.dtype is torch.bool else "indices.long()"
            raise bad_type("Blocks indices", expected=expected, received=f"dtype {indices.dtype}", remedy=remedy)
        if not 2 <= indices.dim() <= 4:
            raise bad_value("Blocks indices", expected=expected, received=f"shape {shape_of(indices)}")
        indices = indices[:, None] if indices.dim() == 3 else indices
        self.indices = (indices if indices.dim() == 4 else indices[None, None]).to(torch.int64)
        self.size = whole_number("Blocks size", size, at_least=1)
        self.query_size = self.size if query_size is None else whole_number("Blocks query_size", query_size, at_least=1)
        self.first_query = self.first_key = 0  # where a part of the plane begins

    def chosen(self, batch: slice, of_queries: slice, of_keys: slice) -> Tensor:
        """Which of some key blocks some query blocks see: (1|B, 1|H, q, k)."""
        indices, count = of_batch(self.indices, batch)[:, :, of_queries], of_keys.stop - of_keys.start
        column = indices - of_keys.start
        column = column.masked_fill((column < 0) | (column >= count), count)  # one more, which is cut off
        nothing = torch.zeros(*indices.shape[:3], count + 1, dtype=torch.bool, device=indices.device)
        return nothing.scatter(3, column, True)[..., :count]

    def block(self, tile: Tile) -> Tensor:
        rows, of_queries = _blocks(tile.rows, self.first_query, self.query_size)
        cols, of_keys = _blocks(tile.cols, self.first_key, self.size)
        seen = self.chosen(tile.batch, of_queries, of_keys)[:, :, :, None, :, None]
        seen = seen.expand(-1, -1, -1, self.query_size, -1, self.size).flatten(4).flatten(2, 3)
        return seen[:, :, rows, cols]

    def grain(self) -> tuple[int, int] | None:
        return self.query_size, self.size

    def of_heads(self, heads: slice) -> Blocks:
        part = copy(self)
        part.indices = self.indices[:, heads] if self.indices.shape[1] > 1 else self.indices
        return part

    def part(self, tile: Tile, heads: slice, shift: int) -> Mask:
        part = self.of_heads(heads)
        part.first_query, part.first_key = self.first_query + tile.rows.start, self.first_key + tile.cols.start
        return part

    def survey(self, grid: Grid) -> Survey:
        """Exact: visible blocks are counted in the rectangle of blocks that each tile touches."""
        device = self.indices.device
        rows = (torch.arange(grid.queries, device=device) + self.first_query) // self.query_size
        cols = (torch.arange(grid.keys, device=device) + self.first_key) // self.size
        count = (self.first_key + grid.keys - 1) // self.size + 1
        chosen = self.chosen(slice(None), slice(None), slice(0, count))
        (top, bottom), (left, right) = grid.rows(rows[None]), grid.cols(cols[None])  # (1, R, 1) and (1, 1, C)

        def visible(plane: Tensor) -> Tensor:
            sums = torch.nn.functional.pad(plane.to(torch.int32).cumsum(1).cumsum(2), (1, 0, 1, 0))
            ends = ((bottom[0] + 1, right[0] + 1), (top[0], right[0] + 1), (bottom[0] + 1, left[0]), (top[0], left[0]))
            corners = [sums[:, i, j] for i, j in ends]  # (1|B, R, C) each
            return corners[0] - corners[1] - corners[2] + corners[3]

        area = (bottom - top + 1) * (right - left + 1)
        return Survey(visible(chosen.any(1)) > 0, visible(chosen.all(1)) == area)

    def check(self, batch: int, heads: int, queries: int, keys: int) -> None:
        of_queries, count = -(-queries // self.query_size), self.indices.shape[2]
        if count != of_queries:
            raise bad_value(
                "Blocks indices",
                expected=f"Q = {of_queries} blocks of queries, for {queries} of them, {self.query_size} per block",
                received=f"Q = {count}, shape {shape_of(self.indices)}",
                remedy="query_size=1 for a list per query",
            )
        check_axes("Blocks indices", self.indices, ("B", "H", "Q", "K"), (batch, heads, count, 0))
        if traced(self.indices) or self.indices.device.type != "cpu" or not self.indices.numel():
            return  # (on other devices the answer would have to be waited for)
        least, most = (int(x) for x in self.indices.aminmax())
        of_keys = -(-keys // self.size)
        if least < -1 or most >= of_keys:
            raise bad_value(
                "Blocks indices",
                expected=f"numbers of {of_keys} key blocks ({keys} keys, {self.size} per block), or -1 for none",
                received=least if least < -1 else most,
            )

    def __repr__(self) -> str:
        queries = "" if self.query_size == self.size else f", query_size={self.query_size}"
        begin = "" if not (self.first_query or self.first_key) else f", from {(self.first_query, self.first_key)}"
        return f"Blocks({short(self.indices)}, {self.size}{queries}{begin})"


def _blocks(slots: slice, first: int, size: int) -> tuple[slice, slice]:
    """Some slots, counted from the first block that they touch; and the blocks that they touch."""
    start, stop = slots.start + first, slots.stop + first
    blocks = slice(start // size, -(-stop // size))
    return slice(start - blocks.start * size, stop - blocks.start * size), blocks
