"""Masks that compare positions: `Causal`, `Window`, `Prefix`."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.checks import FARTHEST, integer_tensor, whole_number
from regard.errors import bad_value
from regard.masks.base import Mask, check_sizes, of_batch, short
from regard.masks.tiles import Grid, Survey, Tile

__all__ = ["Causal", "Prefix", "Window"]


class Causal(Mask):
    """A query sees the keys at its own position and before. By default the last query stands at the last key."""

    def block(self, tile: Tile) -> Tensor:
        return (tile.k_positions[:, None, :] <= tile.q_positions[:, :, None])[:, None]

    def part(self, tile: Tile, heads: slice, shift: int) -> Mask:
        return self

    def sees_all(self, first: int, queries: int, keys: int) -> bool:
        return first >= keys - 1  # every query stands at or after the last key, as in decoding

    def survey(self, grid: Grid) -> Survey:
        q_low, q_high = grid.rows(grid.q_positions)
        k_low, k_high = grid.cols(grid.k_positions)
        return Survey(k_low <= q_high, k_high <= q_low)


class Window(Mask):
    """A query sees its neighbours. `Window(size)`: the `size` keys that end at its own, itself included.
    `Window(before=b, after=a)`: b before, itself, a after (either is 0 where it is not given).

    >>> print((Window(3)).draw(4))
    █···
    ██··
    ███·
    ·███
    >>> print(Window(before=1, after=1).draw(4))
    ██··
    ███·
    ·███
    ··██
    """

    fields = ("before", "after")

    def __init__(self, size: int | None = None, *, before: int | None = None, after: int | None = None) -> None:
        if (size is None) == (before is None and after is None):
            raise bad_value(
                "Window",
                expected="either a size, or before= and after=",
                received=f"size={size}, before={before}, after={after}",
                remedy="Window(128), or Window(before=127, after=0)",
            )
        if size is not None:
            before, after = _distance("Window size", size, at_least=1) - 1, 0
        self.before = _distance("Window before", 0 if before is None else before, at_least=0)
        self.after = _distance("Window after", 0 if after is None else after, at_least=0)

    def block(self, tile: Tile) -> Tensor:
        ahead = tile.k_positions[:, None, :] - tile.q_positions[:, :, None]  # (B|1, n, m)
        return ((ahead >= -self.before) & (ahead <= self.after))[:, None]

    def part(self, tile: Tile, heads: slice, shift: int) -> Mask:
        return self

    def sees_all(self, first: int, queries: int, keys: int) -> bool:
        return first + queries - 1 <= self.before and keys - 1 - first <= self.after  # wider than the plane

    def survey(self, grid: Grid) -> Survey:
        q_low, q_high = grid.rows(grid.q_positions)
        k_low, k_high = grid.cols(grid.k_positions)
        least, most = k_low - q_high, k_high - q_low  # how far ahead the tile's keys can be
        return Survey((most >= -self.before) & (least <= self.after), (least >= -self.before) & (most <= self.after))

    def __repr__(self) -> str:
        return f"Window(before={self.before}, after={self.after})" if self.after else f"Window({self.before + 1})"


class Prefix(Mask):
    """Every query sees the keys whose position is below `n` (one number, or one per batch item).

    Alone it hides all that comes after; the mask of a prefix language model is `Causal() | Prefix(n)`.
    """

    fields = ("n",)

    def __init__(self, n: int | Tensor) -> None:
        if isinstance(n, Tensor):
            self.n = integer_tensor("Prefix", n, dims=1, expected="an integer, or an integer tensor (B,)").to(
                torch.int64
            )
        else:
            self.n = _distance("Prefix", n, at_least=0)

    def _n(self, batch: slice) -> Tensor | int:
        return of_batch(self.n, batch)[:, None] if isinstance(self.n, Tensor) else self.n

    def block(self, tile: Tile) -> Tensor:
        return (tile.k_positions < self._n(tile.batch))[:, None, None, :]

    def part(self, tile: Tile, heads: slice, shift: int) -> Mask:
        return Prefix(self.n.clamp(min=shift) - shift if isinstance(self.n, Tensor) else max(self.n - shift, 0))

    def survey(self, grid: Grid) -> Survey:
        low, high = grid.cols(grid.k_positions)
        n = self.n[:, None, None] if isinstance(self.n, Tensor) else self.n
        return Survey(low < n, high < n)

    def check(self, batch: int, heads: int, queries: int, keys: int) -> None:
        if isinstance(self.n, Tensor):
            check_sizes("Prefix", self.n, ("B", batch))

    def __repr__(self) -> str:
        return f"Prefix({short(self.n)})"


def _distance(what: str, value: object, *, at_least: int) -> int:
    """The number itself; or the largest distance of two positions, where it is larger."""
    number = whole_number(what, value, at_least=at_least)
    return number if isinstance(number, torch.SymInt) else min(number, 2 * FARTHEST)
