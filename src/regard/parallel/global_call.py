"""One attention over a whole sequence (and all heads), of which each rank computes a part.

Letters: B batch, H query heads, G kv heads, N queries, M keys, D head width of q and k, E head width of v.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from regard.attention import prepare
from regard.kernels import Call
from regard.kernels.dropout import Dropout
from regard.masks import Grid
from regard.parallel.collectives import fingerprint
from regard.parallel.token_layout import Tokens

__all__ = ["GlobalCall", "GlobalDropout", "describe"]


@dataclass(frozen=True)
class GlobalDropout:
    """Dropout of a whole attention: one seed for all ranks, and which heads of the layer are here."""

    p: float
    seed: Tensor  # (1,)
    first: int = 0  # the first head here
    heads: int = 0  # of the whole layer

    def part(self, batch: int, heads: slice, rows: slice, cols: slice) -> Dropout:
        """That of some heads (counted from `first`), queries and keys."""
        device = self.seed.device
        items = torch.arange(batch, dtype=torch.int32, device=device)[:, None] * self.heads
        head, row, col = (
            torch.arange(which.start, which.stop, dtype=torch.int32, device=device) for which in (heads, rows, cols)
        )
        return Dropout.at(self.p, self.seed, items + (head + self.first), row, col)


@dataclass(frozen=True)
class GlobalCall:
    """A call whose q, k and v have the sizes of the whole and hold nothing; and what of it is where."""

    call: Call
    queries: Tokens
    keys: Tokens
    drop: GlobalDropout | None

    @staticmethod
    def of(
        q: Tensor, k: Tensor, v: Tensor, queries: Tokens, keys: Tokens, drop: GlobalDropout | None, **options: Any
    ) -> GlobalCall:
        """Checked and lowered as `attend` does it, from one rank's q (B, H, n, D), k (B, G, m, D) and v (B, G, m, E);
        the options are the whole's."""

        def sized(x: Tensor, length: int) -> Tensor:
            return x.detach().new_zeros(()).expand(*x.shape[:2], length, x.shape[3])  # no memory

        return GlobalCall(
            prepare(sized(q, queries.total), sized(k, keys.total), sized(v, keys.total), **options), queries, keys, drop
        )

    def part(self, q: Tensor, k: Tensor, v: Tensor, heads: slice, rows: slice, cols: slice) -> Call:
        """The call of some heads, queries and keys."""
        call = self.call.part(q, k, v, heads, rows, cols)
        return call if self.drop is None else replace(call, dropout=self.drop.part(q.shape[0], heads, rows, cols))

    def survey(self) -> tuple[list[list[bool]], list[list[bool]]]:
        """Of each run of queries and of keys, of all ranks in order: whether some, and every, pair is visible."""
        q_runs, k_runs = (_all_runs(tokens) for tokens in (self.queries, self.keys))
        shape = (len(q_runs), len(k_runs))
        if self.call.mask is None or 0 in shape:
            return [[True] * shape[1] for _ in q_runs], [[True] * shape[1] for _ in q_runs]
        tile = self.call.whole()
        some, every = (x.expand(x.shape[0], *shape) for x in self.call.mask.survey(_Runs(tile, q_runs, k_runs)))
        return some.any(0).tolist(), every.all(0).tolist()


def _all_runs(tokens: Tokens) -> list[slice]:
    return [run for own in tokens.runs for run in own]


class _Runs(Grid):
    """The plane cut along the ranks' runs, which may differ in length."""

    def __init__(self, tile: Any, rows: list[slice], cols: list[slice]) -> None:
        queries, keys = rows_of(rows), rows_of(cols)
        super().__init__(queries, keys, 0, 0, tile.q_positions, tile.k_positions)
        object.__setattr__(self, "runs", (rows, cols))

    def rows(self, per_query: Tensor) -> tuple[Tensor, Tensor]:
        low, high = _extremes(per_query, self.runs[0], -1)  # type: ignore[attr-defined]
        return low[:, :, None], high[:, :, None]

    def cols(self, per_key: Tensor) -> tuple[Tensor, Tensor]:
        low, high = _extremes(per_key, self.runs[1], -1)  # type: ignore[attr-defined]
        return low[:, None, :], high[:, None, :]

    def tiles(self, plane: Tensor) -> tuple[Tensor, Tensor]:
        low = high = plane
        for axis, runs in ((1, self.runs[0]), (2, self.runs[1])):  # type: ignore[attr-defined]
            if plane.shape[axis] > 1:
                low, high = _extremes(low, runs, axis)[0], _extremes(high, runs, axis)[1]
        return low, high


def rows_of(runs: list[slice]) -> int:
    """How many there are in some runs."""
    return sum(run.stop - run.start for run in runs)


def _extremes(values: Tensor, runs: list[slice], axis: int) -> tuple[Tensor, Tensor]:
    """Least and greatest of each run along an axis."""
    parts = [values.narrow(axis, run.start, run.stop - run.start) for run in runs]
    low, high = [part.amin(axis) for part in parts], [part.amax(axis) for part in parts]
    return torch.stack(low, axis), torch.stack(high, axis)


def describe(*things: Any) -> tuple[Any, ...]:
    """What the ranks must agree on, of masks and biases: their kinds, shapes and (on the CPU) sums."""
    facts: list[Any] = []
    for thing in things:
        if isinstance(thing, Tensor):
            facts.append((tuple(thing.shape), str(thing.dtype)))
            if thing.device.type == "cpu" and not thing.is_floating_point():
                facts.append(fingerprint(thing))
        elif hasattr(thing, "fields"):
            facts.append((type(thing).__name__, describe(*(getattr(thing, name) for name in thing.fields))))
        elif isinstance(thing, (list, tuple)):
            facts.append(describe(*thing))
        elif isinstance(thing, (int, float, str, bool)) or thing is None:
            facts.append(thing)
        else:
            facts.append(type(thing).__name__)
    return tuple(facts)
