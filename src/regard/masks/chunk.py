"""`Chunk`: attention within runs of positions, as Llama 4 has it in three of four layers."""

from __future__ import annotations

from torch import Tensor

from regard.checks import FARTHEST, whole_number
from regard.masks.base import Mask
from regard.masks.tiles import Grid, Survey, Tile

__all__ = ["Chunk"]


class Chunk(Mask):
    """A query sees the keys whose positions are in its own chunk: chunks are runs of `size` positions, counted from
    `start`. Positions are compared, so it is right with caches; a decoder's is `Causal() & Chunk(size)`.

    >>> from regard.masks import Causal
    >>> print((Causal() & Chunk(3)).draw(7))
    █······
    ██·····
    ███····
    ···█···
    ···██··
    ···███·
    ······█
    """

    fields = ("size", "start")

    def __init__(self, size: int, start: int = 0) -> None:
        self.size = min(whole_number("Chunk size", size, at_least=1), 2 * FARTHEST)
        self.start = whole_number("Chunk start", start, at_least=-FARTHEST)

    def numbers(self, positions: Tensor) -> Tensor:
        """Which chunk each position is in."""
        return (positions - self.start) // self.size

    def block(self, tile: Tile) -> Tensor:
        return (self.numbers(tile.q_positions)[:, :, None] == self.numbers(tile.k_positions)[:, None, :])[:, None]

    def part(self, tile: Tile, heads: slice, shift: int) -> Mask:
        return Chunk(self.size, self.start - shift)

    def sees_all(self, first: int, queries: int, keys: int) -> bool:
        least, most = min(first, 0) - self.start, max(first + queries, keys) - 1 - self.start
        return least // self.size == most // self.size  # one chunk holds the plane

    def survey(self, grid: Grid) -> Survey:
        q_low, q_high = (self.numbers(x) for x in grid.rows(grid.q_positions))
        k_low, k_high = (self.numbers(x) for x in grid.cols(grid.k_positions))
        same = (q_low == q_high) & (k_low == k_high) & (q_low == k_low)
        return Survey((q_low <= k_high) & (k_low <= q_high), same)

    def __repr__(self) -> str:
        return f"Chunk({self.size}, start={self.start})" if self.start else f"Chunk({self.size})"
