"""Parts of the N x M plane of (query, key) pairs: one `Tile`, the whole as a `Grid` of
tiles, and the `Survey` that a mask gives of a grid.

Letters: B batch, H query heads, N queries, M keys; n, m the sides of one tile; R, C the number of tiles down, across.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Grid", "Survey", "Tile", "whole"]


class Tile(NamedTuple):
    """A rectangle of (query, key) pairs: its slots, and the positions that stand there."""

    queries: int  # N, of the whole plane
    batch: slice
    rows: slice
    cols: slice
    q_positions: Tensor  # (B|1, n)
    k_positions: Tensor  # (B|1, m)
    items: int = 0  # batch items and query heads, where they are known; else 0
    heads: int = 0
    keys: int = 0  # M, of the whole plane

    @property
    def shape(self) -> tuple[int, int]:
        """(n, m)"""
        return self.rows.stop - self.rows.start, self.cols.stop - self.cols.start

    @staticmethod
    def at(q_positions: Tensor, k_positions: Tensor) -> Tile:
        """The plane of queries at (B|1, n) and keys at (B|1, m)."""
        n, m = q_positions.shape[1], k_positions.shape[1]
        return Tile(n, slice(None), slice(0, n), slice(0, m), q_positions, k_positions, keys=m)


class Survey(NamedTuple):
    """What is known of each tile of a grid without looking inside: Kleene's three values as two booleans.

    `some`: a pair of the tile may be visible (False: all are hidden). `every`: all pairs are visible.
    Both (B|1, R, C). Saying `some=True, every=False` is always right: it means "look inside".
    """

    some: Tensor
    every: Tensor


@dataclass(frozen=True)
class Grid:
    """The whole N x M plane cut into tiles of `height` x `width`; what a mask is asked to survey."""

    queries: int
    keys: int
    height: int
    width: int
    q_positions: Tensor  # (B|1, N)
    k_positions: Tensor  # (B|1, M)

    def rows(self, per_query: Tensor) -> tuple[Tensor, Tensor]:
        """The least and the greatest of (B|1, N) within each row of tiles: two of (B|1, R, 1)."""
        low, high = _extremes(per_query, self.height)
        return low[:, :, None], high[:, :, None]

    def cols(self, per_key: Tensor) -> tuple[Tensor, Tensor]:
        """The least and the greatest of (B|1, M) within each column of tiles: two of (B|1, 1, C)."""
        low, high = _extremes(per_key, self.width)
        return low[:, None, :], high[:, None, :]

    def tiles(self, plane: Tensor) -> tuple[Tensor, Tensor]:
        """The least and the greatest of (B|1, N|1, M|1), numbers from 0 to 1, within each tile: two of
        (B|1, R|1, C|1)."""
        low = high = plane
        for axis, size in ((1, self.height), (2, self.width)):
            if plane.shape[axis] > 1:
                short = -plane.shape[axis] % size
                pad = [0, 0, 0, short] if axis == 1 else [0, short]
                low = torch.nn.functional.pad(low, pad, value=1).unflatten(axis, (-1, size)).amin(axis + 1)
                high = torch.nn.functional.pad(high, pad, value=0).unflatten(axis, (-1, size)).amax(axis + 1)
        return low, high


def _extremes(values: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Least and greatest of each run of `size` values: (B, L) -> two (B, ceil(L / size))."""
    short = -values.shape[-1] % size
    if short:  # repeat the last value: it changes neither extreme
        values = torch.cat([values, values[:, -1:].expand(-1, short)], dim=-1)
    runs = values.unflatten(-1, (-1, size))
    return runs.amin(-1), runs.amax(-1)


def whole(
    queries: int,
    keys: int,
    *,
    positions: Tensor | None = None,
    key_positions: Tensor | None = None,
    device: torch.device | None = None,
) -> Tile:
    """The tile that is the whole plane. Without positions the last query stands at the last key."""
    if key_positions is None:
        key_positions = torch.arange(keys, device=device)
    if positions is None:
        positions = (
            key_positions[..., keys - queries :]
            if queries <= keys
            else torch.arange(keys - queries, keys, device=device)
        )
    # as int64: differences of narrow or unsigned integers would wrap around
    q_positions, k_positions = (
        p.to(torch.int64).view(1, -1) if p.dim() == 1 else p.to(torch.int64) for p in (positions, key_positions)
    )
    return Tile(queries, slice(None), slice(0, queries), slice(0, keys), q_positions, k_positions, keys=keys)
