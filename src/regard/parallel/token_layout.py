"""Which tokens of a sequence are where: a rank's part of it, and the whole again.

    contiguous   rank 0: [0, a)   rank 1: [a, b)   rank 2: [b, N)           any lengths
    balanced     2 P chunks; rank r has chunk r and chunk 2 P - 1 - r       under a causal mask all have as much to do

Letters: B batch, N tokens of the whole, n those of one rank, P ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from regard.errors import bad_type, bad_value, shape_of
from regard.parallel.collectives import Ranks, digest

__all__ = ["Method", "SequenceSharding", "Tokens", "gather", "gather_parts", "shard"]

Method = Literal["ring", "alltoall"]


@dataclass(frozen=True)
class Tokens:
    """Which tokens of a sequence each rank has: runs of neighbours, in the order in which they lie in its part."""

    lengths: tuple[int, ...]  # tokens of each rank
    balanced: bool

    @staticmethod
    def of(total: int, ranks: int, balanced: bool) -> Tokens:
        """A sequence split as evenly as can be."""
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
        ends = torch.tensor([0, *chunks], device="cpu").cumsum(0).tolist()
        runs = [tuple(slice(ends[i], ends[i + 1]) for i in own if chunks[i]) for own in order]
        return tuple(runs)

    def check(self) -> None:
        """Raise where parts should be balanced and their lengths are not those of a balanced sequence."""
        if self.balanced and self.lengths != Tokens.of(self.total, len(self.lengths), True).lengths:
            raise bad_value(
                "balance",
                expected="parts as SequenceSharding(mesh, balance=True).shard makes them, of lengths "
                f"{Tokens.of(self.total, len(self.lengths), True).lengths}",
                received=f"{self.lengths}",
                remedy="shard the sequence with it, or balance=False everywhere",
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


@dataclass(frozen=True)
class SequenceSharding:
    """How a sequence is split over the ranks of a mesh: the one object that cuts it, gathers it, and tells a model.

    Args:
        mesh: of one dimension.
        method: "ring": keys and values travel from rank to rank; any number of heads. "alltoall": ranks trade tokens
            for heads; the heads must divide by the ranks.
        balance: give each rank a chunk from the head and one from the tail of the sequence, so that under a causal mask
            all have the same to do; else neighbouring tokens.

    >>> from torch.distributed import init_device_mesh  # within torchrun:
    >>> sequence = SequenceSharding(init_device_mesh("cpu", (2,)), balance=True)  # doctest: +SKIP
    >>> shard_sequence(model, sequence)  # doctest: +SKIP
    >>> out = sequence.gather(model(sequence.shard(ids)))  # doctest: +SKIP
    """

    mesh: DeviceMesh
    method: Method = "ring"
    balance: bool = False

    def __post_init__(self) -> None:
        if self.method not in ("ring", "alltoall"):
            raise bad_value("method", expected='"ring" or "alltoall"', received=repr(self.method))
        if not isinstance(self.balance, bool):
            raise bad_type("balance", expected="True or False", received=repr(self.balance))
        _ = self.ranks  # a mesh of one dimension, that this process is part of

    @cached_property
    def ranks(self) -> Ranks:
        """The processes of the mesh."""
        return Ranks.of(self.mesh)

    def __deepcopy__(self, memo: Any) -> SequenceSharding:
        return self

    def tokens(self, lengths: Sequence[int]) -> Tokens:
        """The layout of a sequence of which each rank has so many tokens. Raises where it cannot be a balanced one."""
        tokens = Tokens(tuple(lengths), self.balance)
        tokens.check()
        return tokens

    def shard(self, x: Tensor, dim: int | None = None) -> Tensor:
        """This rank's part of a sequence that all ranks have whole.

        Args:
            x: (B, N, ...), such as token ids (B, N) or states (B, N, W); or (N,).
            dim: the axis of tokens; 1 by default (0 where there is one axis only).

        Returns:
            (B, n, ...): as equal as can be; the first ranks have one more. Differentiable: the gradient of x is whole.

        >>> sequence.shard(torch.arange(5))  # on rank 0 of 2  # doctest: +SKIP
        tensor([0, 1, 2])
        """
        _check("x", x)
        dim = _dim(x, dim)
        tokens = Tokens.of(x.shape[dim], self.ranks.size, self.balance)
        return _Shard.apply(x, self.ranks, tokens, dim)  # type: ignore[return-value]

    def gather(self, y: Tensor, dim: int | None = None) -> Tensor:
        """The whole sequence on every rank, from every rank's part.

        Args:
            y: (B, n, ...) or (n,): this rank's part; the ranks' may differ in length, unless they are balanced.
            dim: the axis of tokens; 1 by default (0 where there is one axis only).

        Returns:
            (B, N, ...). Differentiable, for a loss that all ranks compute alike: each part gets its gradient.

        >>> sequence.gather(sequence.shard(torch.arange(5)))  # doctest: +SKIP
        tensor([0, 1, 2, 3, 4])
        """

        def facts() -> dict[str, int]:
            _check("y", y)
            axis = _dim(y, dim)
            others = (*y.shape[:axis], *y.shape[axis + 1 :])
            return {"length": y.shape[axis], "balance": self.balance, "shape": digest(others, y.dtype)}

        rows = self.ranks.agree("gather", ("length", "balance", "shape"), facts, differ=("length",))
        tokens = self.tokens([row["length"] for row in rows])
        return _Gather.apply(y, self.ranks, tokens, _dim(y, dim))  # type: ignore[return-value]


def shard(x: Tensor, mesh: DeviceMesh, balance: bool = False, *, dim: int | None = None) -> Tensor:
    """`SequenceSharding(mesh).shard(x, dim)`: this rank's part of a sequence, neighbouring tokens."""
    return SequenceSharding(mesh, balance=_refuse_balance(balance)).shard(x, dim)


def gather(y: Tensor, mesh: DeviceMesh, balance: bool = False, *, dim: int | None = None) -> Tensor:
    """`SequenceSharding(mesh).gather(y, dim)`: the whole sequence, from parts of neighbouring tokens."""
    return SequenceSharding(mesh, balance=_refuse_balance(balance)).gather(y, dim)


def _refuse_balance(balance: bool) -> bool:
    """A part does not say how it was cut. If one of three calls forgot `balance`, tokens would be permuted silently."""
    if balance is True:
        raise bad_value(
            "balance",
            expected="a SequenceSharding, which shards, gathers and is given to shard_sequence",
            received="balance=True for one call",
            remedy="sequence = SequenceSharding(mesh, balance=True); shard_sequence(model, sequence)",
        )
    return balance


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


def gather_parts(x: Tensor, ranks: Ranks, tokens: Tokens, dim: int) -> list[Tensor]:
    """Every rank's part. They travel filled up to the longest."""
    longest = max(tokens.lengths)
    x = x.detach().movedim(dim, 0)
    padded = x.new_zeros(longest, *x.shape[1:])
    padded[: x.shape[0]] = x
    together = ranks.all_gather(padded)
    return [part[:length].movedim(0, dim) for part, length in zip(together, tokens.lengths, strict=True)]


class _Shard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks, tokens: Tokens, dim: int) -> Tensor:
        ctx.ranks, ctx.tokens, ctx.dim = ranks, tokens, dim
        return tokens.part(x, ranks.rank, dim).clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        parts = gather_parts(grads[0], ctx.ranks, ctx.tokens, ctx.dim)
        return ctx.tokens.whole(parts, ctx.dim), None, None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, ranks: Ranks, tokens: Tokens, dim: int) -> Tensor:
        ctx.ranks, ctx.tokens, ctx.dim = ranks, tokens, dim
        return tokens.whole(gather_parts(y, ranks, tokens, dim), dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.tokens.part(grads[0], ctx.ranks.rank, ctx.dim).clone(), None, None, None
