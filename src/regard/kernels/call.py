"""The contract of kernels: a `Call` says what to compute, a `Kernel` is one way to compute it.

A kernel is a module (or object) with

    name                                  what `kernel="..."` names
    why_not(call) -> str | None           None where it can serve the call, else why not, in words
    forward(call) -> (out, lse)           out (B, H, N, E) in q's dtype; lse (B, H, N) in `accumulation_dtype`, with a
                                          gradient where `why_not` gives no reason for a call that `needs_lse`
    backward(call, out, lse, d_out, wanted)
                                          the gradients of `call.learned()` that are wanted; out and lse may cover more
                                          keys than the call (ring attention merges partial results)
    output(call) -> out                   as `forward`, without lse, where that is cheaper
    forward_measured(call, measuring) -> (out, lse)
                                          as `forward`, while the weights are shown to measures; without gradient
    worth(call) -> bool                   whether "auto" should take it rather than ask the next one

`forward` and `output` are differentiable in q, k, v, the biases' weights and the sinks. All kernels give the answer of
`reference`.

Letters: B batch, H query heads, G kv heads, N queries, M keys, D head width of q and k, E head width of v.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor

from regard.cache import Stored
from regard.kernels.dropout import Dropout
from regard.masks import And, Grid, Mask, Tile, conjuncts
from regard.measures import MeasureRun
from regard.positions import Bias

__all__ = ["Call", "Kernel", "accumulation_dtype"]

_T = TypeVar("_T")


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """What softmax and sums are computed in: float32, or float64 for float64."""
    return torch.float64 if dtype is torch.float64 else torch.float32


@dataclass(frozen=True)
class Call:
    """One attention, its arguments checked and converted: what a kernel needs and nothing else. Order of the steps:

    scores = q k^T * scale; softcap * tanh(scores / softcap); + biases; mask; softmax (sinks in denominator); dropout

    A bias may be a function of the scores (`positions.ScoreMod`), in its place among the others.

    Positions are None where they are contiguous: keys 0..M-1, queries `q_start`, `q_start` + 1, ...
    Every tensor but q, k, v leads with a batch axis of 1 or B, so that vmap can fold its axis into the batch.

    What kernels derive of a call (its mask taken apart, lowered biases, ...) goes through `derive` and is kept on it.
    """

    q: Tensor  # (B, H, N, D)
    k: Tensor  # (B, G, M, D)
    v: Tensor  # (B, G, M, E)
    scale: float
    q_start: int = 0
    softcap: float | None = None
    mask: Mask | None = None
    biases: tuple[Bias, ...] = ()
    positions: Tensor | None = None  # (1|B, N)
    key_positions: Tensor | None = None  # (1|B, M)
    sinks: Tensor | None = None  # (1|B, H)
    dropout: Dropout | None = None
    needs_lse: bool = False  # whether the caller asked for the log-sum-exp, too

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B, H, N, M)"""
        batch, heads, queries, _ = self.q.shape
        return batch, heads, queries, self.k.shape[2]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype to accumulate in."""
        return accumulation_dtype(self.q.dtype)

    @property
    def changes_scores(self) -> bool:
        """Whether a bias is a function of the scores (`positions.ScoreMod`)."""
        return any(bias.changes_scores for bias in self.biases)

    @property
    def contiguous(self) -> bool:
        """Whether queries and keys stand one after another, and `q_start` says where."""
        return self.positions is None and self.key_positions is None

    def derive(self, compute: Callable[[Call], _T]) -> _T:
        """`compute(self)`, kept for whoever asks next. `replace` gives a call of which nothing is derived yet."""
        if torch.compiler.is_compiling():
            return compute(self)
        kept: dict[Any, Any] = self.__dict__.setdefault("_derived", {})
        if compute not in kept:
            kept[compute] = compute(self)
        return cast("_T", kept[compute])

    @property
    def mask_parts(self) -> tuple[Mask, ...]:
        """The parts of the mask that must all agree, without those that hide nothing."""
        return () if self.mask is None else self.derive(_parts)

    @property
    def keys_are_finite(self) -> bool:
        """Whether no key and no value is NaN or inf (False also if a sum overflows). Synchronises with the device."""
        return self.derive(_keys_are_finite)

    @property
    def queries_are_finite(self) -> bool:
        """The same of the queries."""
        return self.derive(_queries_are_finite)

    def simplified(self) -> Call:
        """The same call without the parts of its mask that hide nothing."""
        parts = self.mask_parts
        if len(parts) == len(self.derive(_conjuncts)):
            return self
        simple = replace(self, mask=functools.reduce(And, parts) if parts else None)
        simple.__dict__["_derived"] = {_parts: parts}
        return simple

    @property
    def stored(self) -> bool:
        """Whether keys and values are given as a cache stores them: in several places, or as int8."""
        return isinstance(self.k, Stored) or isinstance(self.v, Stored)

    def plain(self) -> Call:
        """The same call of plain tensors, which are built where a cache gave keys and values as it stores them."""
        if not self.stored:
            return self
        k, v = (x.plain() if isinstance(x, Stored) else x for x in (self.k, self.v))
        return replace(self, k=k, v=v)

    def detached(self) -> Call:
        """The same call without gradients and dropout, for observers. What was derived of it stays."""
        if self.dropout is None and not any(x.requires_grad for x in self.learned()):
            return self
        plain = replace(self.with_learned([x.detach() for x in self.learned()]), dropout=None)
        plain.__dict__["_derived"] = self.__dict__.setdefault("_derived", {})
        return plain

    def learned(self) -> list[Tensor]:
        """What may have a gradient: q, k, v, the sinks (where there are any), the biases' weights."""
        return [self.q, self.k, self.v, *([] if self.sinks is None else [self.sinks]), *(b.weight for b in self.biases)]

    def with_learned(self, tensors: list[Tensor]) -> Call:
        """The same call with others in the place of `learned()`."""
        q, k, v, *others = tensors
        sinks = None if self.sinks is None else others.pop(0)
        biases = tuple(bias.with_weight(weight) for bias, weight in zip(self.biases, others, strict=True))
        return replace(self, q=q, k=k, v=v, sinks=sinks, biases=biases)

    def of(self, q: Tensor, k: Tensor, v: Tensor) -> Call:
        """The same call of other tensors, without dropout. (As `replace`, in a fraction of the time.)"""
        other = object.__new__(Call)
        other.__dict__.update(self.__dict__, q=q, k=k, v=v, dropout=None)
        other.__dict__.pop("_derived", None)
        return other

    def positions_of_queries(self, rows: slice, batch: slice = slice(None)) -> Tensor:
        """Where the queries of some slots stand: (1|B, n)."""
        if self.positions is not None:
            positions = self.positions if self.positions.shape[0] == 1 else self.positions[batch]
            return positions[:, rows]
        return torch.arange(self.q_start + rows.start, self.q_start + rows.stop, device=self.q.device)[None]

    def positions_of_keys(self, cols: slice, batch: slice = slice(None)) -> Tensor:
        """Where the keys of some slots stand: (1|B, m)."""
        if self.key_positions is not None:
            positions = self.key_positions if self.key_positions.shape[0] == 1 else self.key_positions[batch]
            return positions[:, cols]
        return torch.arange(cols.start, cols.stop, device=self.q.device)[None]

    def tile(self, batch: slice, rows: slice, cols: slice) -> Tile:
        """A rectangle of the plane, as masks want it."""
        items = self.q.shape[0] if batch.stop is None else batch.stop - (batch.start or 0)
        positions = self.positions_of_queries(rows, batch), self.positions_of_keys(cols, batch)
        return Tile(self.q.shape[2], batch, rows, cols, *positions, items, self.q.shape[1], self.k.shape[2])

    def whole(self) -> Tile:
        """The whole plane as one tile."""
        return self.derive(_whole)

    def part(self, q: Tensor, k: Tensor, v: Tensor, heads: slice, rows: slice, cols: slice) -> Call:
        """The same attention for some heads, queries and keys alone, which are given (B, h, n, D), (B, g, m, D) and
        (B, g, m, E): mask, biases and positions are sliced to match. Without dropout, whose random numbers belong to
        the whole call."""
        tile = self.tile(slice(None), rows, cols)
        # Keys count from 0 again, unless a bias may ask where they stand.
        contiguous = self.contiguous and (not cols.start or all(b.by_distance or b.is_dense for b in self.biases))
        return replace(
            self,
            q=q,
            k=k,
            v=v,
            q_start=self.q_start + rows.start - cols.start if contiguous else self.q_start,
            mask=None if self.mask is None else self.mask.part(tile, heads, cols.start if contiguous else 0),
            biases=tuple(bias.part(tile, heads) for bias in self.biases),
            positions=None if contiguous else tile.q_positions,
            key_positions=None if contiguous else tile.k_positions,
            sinks=None if self.sinks is None else self.sinks[:, heads],
            dropout=None,
        )

    def grid(self, height: int, width: int) -> Grid:
        """The whole plane cut into tiles, as masks want it."""
        tile = self.whole()
        return Grid(self.q.shape[2], self.k.shape[2], height, width, tile.q_positions, tile.k_positions)


def _conjuncts(call: Call) -> tuple[Mask, ...]:
    return tuple(conjuncts(call.mask))


def _parts(call: Call) -> tuple[Mask, ...]:
    parts = call.derive(_conjuncts)
    if not call.contiguous or torch.compiler.is_exporting():
        return parts
    n, m = call.q.shape[2], call.k.shape[2]
    return tuple([part for part in parts if not part.sees_all(call.q_start, n, m)])


def _whole(call: Call) -> Tile:
    return call.tile(slice(None), slice(0, call.q.shape[2]), slice(0, call.k.shape[2]))


def _keys_are_finite(call: Call) -> bool:
    return _sums_are_finite(call.k, call.v)


def _queries_are_finite(call: Call) -> bool:
    return _sums_are_finite(call.q)


def _sums_are_finite(*tensors: Tensor) -> bool:
    """bfloat16 has float32's range, so its sum does not overflow earlier; float16 is summed in float32."""
    wide = {torch.float16: torch.float32}
    return all(math.isfinite(x.detach().sum(dtype=wide.get(x.dtype)).item()) for x in tensors)


class Kernel(Protocol):
    """One way to compute a `Call`."""

    @property
    def name(self) -> str: ...

    def why_not(self, call: Call) -> str | None: ...

    def worth(self, call: Call) -> bool: ...

    def forward(self, call: Call) -> tuple[Tensor, Tensor]: ...

    def backward(self, call: Call, out: Tensor, lse: Tensor, d_out: Tensor, wanted: list[bool]) -> list[Tensor]: ...

    def output(self, call: Call) -> Tensor: ...

    def forward_measured(
        self, call: Call, measuring: MeasureRun, *, output: bool = True
    ) -> tuple[Tensor | None, Tensor]: ...
