"""Dropout that every kernel, block size and sharding agrees on: whether a weight is dropped is a hash of where it is.

Each query row (b, h, i) and each key column j gets a well-mixed 32-bit number once, in O(N + M). A weight is dropped by
mixing the two with two multiplications, so a block of any shape is found on demand and never stored:

    x = row ^ col;  x *= A;  x ^= x >> 15;  x *= C;  keep = x >= threshold    (wrapping signed 32-bit, arithmetic shift)

The numbers that are hashed are global ones: a sharded run asks for its part of them (`Dropout.at`).

Letters: B batch, H query heads, N queries, M keys; n, m the sides of one block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from regard.tracing import traced

__all__ = ["Dropout", "new_seed", "threshold_of"]

_A, _C = 0x2C1B3C6D, 0x297A2D39  # odd multipliers with good avalanche
_GOLDEN = 0x1E3779B9


def new_seed(generator: torch.Generator | None, device: torch.device) -> Tensor:
    """One random number for one call, from `generator` or torch's default: an integer tensor (1,).

    It is drawn on the generator's own device, and stays a tensor so that compilers can trace it.
    """
    source = device if generator is None else generator.device
    seed = torch.randint(-(2**31), 2**31, (1,), generator=generator, device=source)
    return seed.to(device)


@dataclass(frozen=True)
class Dropout:
    """Which weights are dropped: probability `p`, and one number per query row (1|B, H, N) and key column (1|B, M)."""

    p: float
    rows: Tensor
    cols: Tensor

    fields: ClassVar[tuple[str, ...]] = ("p", "rows", "cols")

    @staticmethod
    def of(p: float, seed: Tensor, batch: int, heads: int, queries: int, keys: int) -> Dropout:
        """The dropout of a whole call: head h of item b is number b * heads + h; rows and columns count from 0."""
        head, row, col = (
            torch.arange(count, device=seed.device, dtype=torch.int32) for count in (batch * heads, queries, keys)
        )
        return Dropout.at(p, seed, head.view(batch, heads), row, col)

    @staticmethod
    def at(p: float, seed: Tensor, head: Tensor, row: Tensor, col: Tensor) -> Dropout:
        """The dropout of a part of a call: its heads (B, H), rows (N,) and columns (M,), int32, by their numbers in
        the whole."""
        seed = seed.to(torch.int32)
        rows = _mix(_mix(seed + head * _GOLDEN)[:, :, None] + row * _GOLDEN)
        return Dropout(p, rows, _mix(~seed + col * _GOLDEN)[None])

    @property
    def kept(self) -> float:
        """What a kept weight is multiplied by: 1 / (1 - p), and 0 where everything is dropped."""
        return 0.0 if self.p >= 1.0 else 1.0 / (1.0 - self.p)

    def block(self, batch: slice, heads: slice, rows: slice, cols: slice | Tensor, dtype: torch.dtype) -> Tensor:
        """1 where a weight of the block stays and 0 where it is dropped: (1|B, H, n, m)."""
        row, col = (x if x.shape[0] == 1 else x[batch] for x in (self.rows, self.cols))
        x = torch.bitwise_xor(row[:, heads, rows, None], col[:, None, None, cols])
        x.mul_(_A)
        folded = x >> 15
        x.bitwise_xor_(folded).mul_(_C)
        threshold = threshold_of(self.p)
        # x >= threshold as a number. On a CPU a boolean in between takes several times as long, so compare straight
        # into floats, in memory that is at hand; where that cannot be traced, clamp.
        if dtype is torch.float32 and not traced(x):
            return torch.ge(x, threshold, out=folded.view(torch.float32))
        return x.clamp_(threshold - 1, threshold).sub_(threshold - 1).to(dtype)


def threshold_of(p: float) -> int:
    """The least signed 32-bit number that stays."""
    return min(max(round(p * 2**32), 1), 2**32 - 1) - 2**31


def _mix(x: Tensor) -> Tensor:
    """All 32 bits of each number depend on all of them (two rounds of multiply and fold). In place."""
    for multiplier in (_C, _A):
        x = x.mul_(multiplier)
        x = x.bitwise_xor_(x >> 15)
    return x
