"""What a cache tells the layer (`Slots`), and undoing a call that fails (`together`).

Letters: B batch, G kv heads, N queries, M keys, D head width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from regard.masks import Mask
from regard.positions import Bias, Saturated

__all__ = ["PastWindow", "Rotate", "Slots", "together"]

# (x (B, heads, N, D), positions or the first of them, length of the whole text if known) -> x, rotated
Rotate: TypeAlias = Callable[[Tensor, "Tensor | int", "int | None"], Tensor]


@dataclass(frozen=True)
class Slots:
    """The positions of the queries and keys of one call, and the cache's own mask.

    Positions are None where they are contiguous: keys 0..M-1, the last query at the last key.
    """

    mask: Mask | None = None
    positions: Tensor | None = None  # (N,) or (B, N)
    key_positions: Tensor | None = None  # (M,) or (B, M)

    def rotate_queries(self, q: Tensor, k: Tensor, rotate: Rotate) -> tuple[Tensor, Tensor]:
        """Queries (B, H, N, D) rotated to their positions; and the rotated keys to compare them with."""
        n, m = q.shape[2], k.shape[2]
        return (rotate(q, m - n, m) if self.positions is None else rotate(q, self.positions, None)), k

    def clamp_biases(self, biases: tuple[Bias, ...]) -> tuple[Bias, ...]:
        """Biases of positions, as they hold for these slots."""
        return biases


@dataclass(frozen=True)
class PastWindow(Slots):
    """A chunk that runs past the window of a `RollingCache`. Had its tokens come one by one, the distance to the first
    `keep_first` keys would have stopped growing: for these keys the query position is clamped to `last`."""

    keep_first: int = 0
    last: int = 0

    def rotate_queries(self, q: Tensor, k: Tensor, rotate: Rotate) -> tuple[Tensor, Tensor]:
        """One product serves both distances: a query (B, H, N, 2 D) carries both rotations side by side, and each key
        is zero in the half that is not for it."""
        rotated, _ = super().rotate_queries(q, k, rotate)
        n, m, width = q.shape[2], k.shape[2], q.shape[3]
        clamped = rotate(q, torch.arange(m - n, m, device=q.device).clamp(max=self.last), None)
        both = k.new_zeros(*k.shape[:3], 2 * width)
        both[:, :, self.keep_first :, :width] = k[:, :, self.keep_first :]
        both[:, :, : self.keep_first, width:] = k[:, :, : self.keep_first]
        return torch.cat([rotated, clamped], dim=-1), both

    def clamp_biases(self, biases: tuple[Bias, ...]) -> tuple[Bias, ...]:
        return tuple(Saturated(bias, self.keep_first, self.last) for bias in biases)


class _Restorable(Protocol):
    def _state(self) -> dict[str, Any]: ...

    def _restore(self, state: dict[str, Any]) -> None: ...


@contextmanager
def together(caches: Iterable[_Restorable]) -> Iterator[None]:
    """Around one call of several layers: where it fails or is interrupted, all of their caches are as they were before.

    Without it a call that ends between two layers leaves one cache longer than the next.

    >>> from regard import KVCache
    >>> caches = [KVCache(), KVCache()]
    >>> token = torch.ones(1, 2, 1, 5)
    >>> try:
    ...     with together(caches):
    ...         _ = caches[0].append(token, token)
    ...         raise KeyboardInterrupt
    ... except KeyboardInterrupt:
    ...     [len(cache) for cache in caches]
    [0, 0]
    """
    caches = list(caches)
    states = [cache._state() for cache in caches]
    try:
        yield
    except BaseException:
        for cache, state in zip(caches, states, strict=True):
            cache._restore(state)
        raise
