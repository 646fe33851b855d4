"""Which tokens of a sequence are where: a rank's part of it, and the whole again.

    contiguous   rank 0: [0, a)   rank 1: [a, b)   rank 2: [b, N)           any lengths
    balanced     2 P chunks; rank r has chunk r and chunk 2 P - 1 - r       under a causal mask all have as much to do

Letters: B batch, N tokens of the whole, n those of one rank, P ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from regard.errors import bad_type, bad_value, shape_of
from regard.parallel.collectives import Ranks, digest

__all__ = ["Tokens", "balance_of", "gather", "mark", "shard"]


@dataclass(frozen=True)
class Tokens:
    """Which tokens of a sequence each rank has: runs of neighbours, in the order in which they lie in its part."""

    lengths: tuple[int, ...]  # tokens of each rank
    balanced: bool

    @staticmethod
    def of(total: int, ranks: int, balanced: bool) -> Tokens:
        """A sequence spread as evenly as can be."""
        if not balanced:
            return Tokens(tuple(_even(total, ranks)), False)
        chunks = _even(total, 2 * ranks)
        return Tokens(tuple(chunks[r] + chunks[-1 - r] for r in range(ranks)), True)

    @property
    def total(self) -> int:
        """N"""
        return sum(self.lengths)

    @cached_property
    def runs(self) -> tuple[tuple[slice, ...], ...]:
        """The runs of each rank, as slices of the whole. (An empty one is left out.)"""
        if not self.balanced:
            chunks, order = self.lengths, [(r,) for r in range(len(self.lengths))]
        else:
            chunks = _even(self.total, 2 * len(self.lengths))
            order = [(r, 2 * len(self.lengths) - 1 - r) for r in range(len(self.lengths))]
        ends = torch.tensor([0, *chunks]).cumsum(0).tolist()
        runs = [tuple(slice(ends[i], ends[i + 1]) for i in own if chunks[i]) for own in order]
        return tuple(runs)

    def check(self) -> None:
        """Raise where parts are said to be balanced and their lengths are not those of a balanced sequence."""
        if self.balanced and self.lengths != Tokens.of(self.total, len(self.lengths), True).lengths:
            raise bad_value(
                "balance",
                expected="parts as parallel.shard(x, mesh, balance=True) makes them, of lengths "
                f"{Tokens.of(self.total, len(self.lengths), True).lengths}",
                received=f"{self.lengths}",
                remedy="shard the sequence with it, or say balance=False",
            )

    def numbers(self, rank: int, device: torch.device | None = None) -> Tensor:
        """Which tokens a rank has: (n,)"""
        runs = self.runs[rank] or (slice(0, 0),)
        return torch.cat([torch.arange(run.start, run.stop, device=device) for run in runs])

    def part(self, x: Tensor, rank: int, dim: int) -> Tensor:
        """A rank's part of the whole along an axis. A view where it is one run."""
        runs = [x.narrow(dim, run.start, run.stop - run.start) for run in self.runs[rank]]
        return runs[0] if len(runs) == 1 else torch.cat(runs, dim) if runs else x.narrow(dim, 0, 0)

    def whole(self, parts: Sequence[Tensor], dim: int) -> Tensor:
        """The whole of all ranks' parts."""
        pieces: list[tuple[int, Tensor]] = []
        for own, part in zip(self.runs, parts, strict=True):
            lengths = [run.stop - run.start for run in own]
            pieces += zip((run.start for run in own), part.split(lengths, dim) if lengths else (), strict=True)
        ordered = [piece for _, piece in sorted(pieces, key=lambda pair: pair[0])]
        return torch.cat(ordered, dim) if ordered else parts[0]


def _even(total: int, parts: int) -> list[int]:
    """The sizes of so many parts, the larger ones first."""
    return [total // parts + (i < total % parts) for i in range(parts)]


# A part remembers whether it is one of a balanced sequence: on the tensor itself, for nothing else travels with it.


def mark(x: Tensor, balanced: bool) -> Tensor:
    """Say of a tensor that it is a part, and of what kind."""
    x._regard_balanced = balanced  # type: ignore[attr-defined]
    if balanced:
        _BALANCED[0] = True
    return x


def balance_of(what: str, x: Tensor, said: bool | None) -> bool:
    """Whether a part is one of a balanced sequence: as it was marked, or as the caller says."""
    marked: bool | None = getattr(x, "_regard_balanced", None)
    if marked is None and said is None:
        if _BALANCED[0]:
            raise bad_value(
                "balance",
                expected=f"to know whether {what} is a part of a balanced sequence",
                received="a tensor that came from neither parallel.shard nor a sharded layer or model, "
                "where others are balanced",
                remedy="say balance=True or balance=False to shard_sequence and gather",
            )
        return False
    if marked is not None and said is not None and marked is not said:
        raise bad_value(
            "balance", expected=f"{said}, as was said", received=f"{what}, which was sharded with balance={marked}"
        )
    return bool(said if marked is None else marked)


_BALANCED = [False]  # whether any sequence was balanced in this process: from then on a part must tell


def shard(x: Tensor, mesh: DeviceMesh, balance: bool = False, *, dim: int | None = None) -> Tensor:
    """This rank's part of a sequence that all ranks have whole.

    Args:
        x: (B, N, ...), such as token ids (B, N) or states (B, N, W); or (N,).
        mesh: of one dimension.
        balance: give each rank a chunk from the head and one from the tail, so that under a causal mask all have the
            same to do; else neighbours. Sharded layers and models and `gather` know of it: the part is marked.
        dim: the axis of tokens; 1 by default (0 where there is one axis only).

    Returns:
        (B, n, ...): as equal as can be; the first ranks have one more. Differentiable: the gradient of x is whole.

    >>> from torch.distributed import init_device_mesh  # within torchrun:
    >>> mesh = init_device_mesh("cpu", (2,))  # doctest: +SKIP
    >>> shard(torch.arange(5), mesh)  # on rank 0  # doctest: +SKIP
    tensor([0, 1, 2])
    """
    _check("x", x)
    ranks, dim = Ranks.of(mesh), _dim(x, dim)
    tokens = Tokens.of(x.shape[dim], ranks.size, balance)
    return mark(_Shard.apply(x, ranks, tokens, dim), balance)  # type: ignore[arg-type]


def gather(y: Tensor, mesh: DeviceMesh, balance: bool | None = None, *, dim: int | None = None) -> Tensor:
    """The whole sequence on every rank, from every rank's part.

    Args:
        y: (B, n, ...) or (n,): this rank's part; the ranks' may differ in length.
        mesh: of one dimension.
        balance: whether they are parts of a balanced sequence; by default as `shard`, a sharded layer or model says.
        dim: the axis of tokens; 1 by default (0 where there is one axis only).

    Returns:
        (B, N, ...). Differentiable, for a loss that all ranks compute alike: each part gets its part of the gradient.
    """
    ranks = Ranks.of(mesh)

    def facts() -> dict[str, int]:
        _check("y", y)
        axis = _dim(y, dim)
        others = (*y.shape[:axis], *y.shape[axis + 1 :])
        return {"length": y.shape[axis], "balance": balance_of("y", y, balance), "shape": digest(others, y.dtype)}

    rows = ranks.agreed("gather", ("length", "balance", "shape"), facts, differ=("length",))
    tokens = Tokens(tuple(row["length"] for row in rows), bool(rows[0]["balance"]))
    tokens.check()
    return _Gather.apply(y, ranks, tokens, _dim(y, dim))  # type: ignore[return-value]


def _check(what: str, x: object) -> None:
    if not isinstance(x, Tensor):
        raise bad_type(what, expected="a tensor", received=type(x).__name__)
    if not x.dim():
        raise bad_value(what, expected="(B, N, ...) or (N,)", received=shape_of(x))


def _dim(x: Tensor, dim: int | None) -> int:
    if dim is None:
        return min(1, x.dim() - 1)
    if not -x.dim() <= dim < x.dim():
        raise bad_value("dim", expected=f"an axis of {shape_of(x)}", received=dim)
    return dim % x.dim()


def parts_of(x: Tensor, ranks: Ranks, tokens: Tokens, dim: int) -> list[Tensor]:
    """Every rank's part. They travel filled up to the longest."""
    longest = max(tokens.lengths)
    x = x.detach().movedim(dim, 0)
    padded = x.new_zeros(longest, *x.shape[1:])
    padded[: x.shape[0]] = x
    together = ranks.gathered(padded)
    return [part[:length].movedim(0, dim) for part, length in zip(together, tokens.lengths, strict=True)]


class _Shard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks, tokens: Tokens, dim: int) -> Tensor:
        ctx.ranks, ctx.tokens, ctx.dim = ranks, tokens, dim
        return tokens.part(x, ranks.rank, dim).clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        parts = parts_of(grads[0], ctx.ranks, ctx.tokens, ctx.dim)
        return ctx.tokens.whole(parts, ctx.dim), None, None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, ranks: Ranks, tokens: Tokens, dim: int) -> Tensor:
        ctx.ranks, ctx.tokens, ctx.dim = ranks, tokens, dim
        return tokens.whole(parts_of(y, ranks, tokens, dim), dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.tokens.part(grads[0], ctx.ranks.rank, ctx.dim).clone(), None, None, None
