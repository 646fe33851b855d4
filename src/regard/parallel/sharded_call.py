"""One call of a layer that is spread over processes: where its tokens and heads are, and how `regard.attend`, to which
it is given as `spread=`, computes it.

Letters: B batch, H query heads, G kv heads, N queries, M keys, n, m those of one rank, D head width of q and k, E of v.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from regard import kernels
from regard.attention import attention_weights, prepare
from regard.kernels import Call
from regard.masks import Mask, as_mask
from regard.parallel import alltoall, ring
from regard.parallel.alltoall import heads_of, kv_heads_of
from regard.parallel.collectives import Ranks
from regard.parallel.global_call import Drop, Whole
from regard.parallel.token_layout import Tokens, mark, parts_of
from regard.positions import Bias, DenseBias, as_biases

if TYPE_CHECKING:
    from regard.parallel.agreement import Heads, Sharding

__all__ = ["Gathered", "Spread", "Stand"]


class Stand(NamedTuple):
    """Where some tokens stand, (n,) or (B, n), and how long the whole text is."""

    positions: Tensor
    length: int


@dataclass(frozen=True)
class Spread:
    """One call of a layer that is spread over processes: where its tokens are, and how `attend` computes it."""

    sharding: Sharding
    queries: Tokens | None = None
    keys: Tokens | None = None
    positions: Tensor | None = None  # the whole's, where the caller gave them
    own: bool = True  # whether the keys are the queries' own tokens
    seed: Tensor | None = None

    @property
    def parts(self) -> bool:
        """Whether tokens are spread: else the layer has them all."""
        return self.queries is not None

    def of_queries(self, device: torch.device) -> Stand:
        """Where this rank's queries stand."""
        assert self.queries is not None and self.keys is not None and self.sharding.sequence is not None
        rank, n, m = self.sharding.sequence.ranks.rank, self.queries.total, self.keys.total
        if self.positions is None:
            return Stand(self.queries.numbers(rank, device) + (m - n), m)
        own = self.queries.part(self.positions, rank, self.positions.dim() - 1)
        return Stand(own, int(self.positions.max()) + 1 if self.positions.numel() else 0)

    def of_keys(self, device: torch.device) -> Stand:
        """Where this rank's keys stand."""
        assert self.keys is not None and self.sharding.sequence is not None
        if self.own and self.positions is not None:
            return self.of_queries(device)
        return Stand(self.keys.numbers(self.sharding.sequence.ranks.rank, device), self.keys.total)

    def marked(self, out: Tensor) -> Tensor:
        """The layer's output: the sum over the ranks of their heads; a part, where its input was one."""
        if self.sharding.heads is not None:
            out = self.sharding.heads.ranks.wait(out)
        return out if self.queries is None else mark(out, self.queries.balanced)

    def entered(self, *inputs: Tensor) -> list[Tensor]:
        """The layer's inputs as its projections take them: where heads are spread, a replicated DTensor, so that the
        gradients of one input are summed over the ranks once, and not once for each projection."""
        heads = self.sharding.heads
        if heads is None:
            return list(inputs)
        made: dict[int, Tensor] = {}
        for x in inputs:
            if id(x) not in made:
                made[id(x)] = heads.ranks.entered(x, heads.mesh)
        return [made[id(x)] for x in inputs]

    # What `attend` does

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, kernel: str, dropout: float, **options: Any) -> Tensor:
        """(B, H, n, E) from this rank's q (B, H, n, D), k (B, G, m, D), v (B, G, m, E)."""
        device = q.device.type
        if torch.is_autocast_enabled(device) and q.dtype is not torch.float64:
            q, k, v = (x.to(torch.get_autocast_dtype(device)) for x in (q, k, v))
        with torch.autocast(device, enabled=False):
            drop = self._drop(q, dropout)
            sequence = self.sharding.sequence
            options = self._of_heads(q, k, **options)
            if sequence is None:
                call = prepare(q, k, v, **options)
                if drop is not None:
                    batch, heads, n, m = call.shape
                    call = replace(call, dropout=drop.part(batch, slice(0, heads), slice(0, n), slice(0, m)))
                return kernels.choose(kernel, call).output(call)
            method = ring.attend if sequence.method == "ring" else alltoall.attend
            whole = self._whole(q, k, v, drop, **options)
            return method(whole, sequence.ranks, q, k, v, kernel)

    def weights(self, q: Tensor, k: Tensor, **options: Any) -> Tensor:
        """The weights of this rank's queries: (B, h, n, M), h the heads here."""
        options = self._of_heads(q, k, **options)
        sequence = self.sharding.sequence
        if sequence is None:
            return attention_weights(q, k, **options)
        assert self.queries is not None and self.keys is not None
        whole = self._whole(q, k, k, None, **options)
        k = cast("Tensor", _AllKeys.apply(k, sequence.ranks, self.keys))
        rows = []
        at = 0
        for run in self.queries.runs[sequence.ranks.rank]:
            own = q[:, :, at : at + run.stop - run.start]
            at += run.stop - run.start
            call = whole.part(own, k, k, slice(0, q.shape[1]), run, slice(0, self.keys.total))
            rows.append(kernels.reference.weights(call)[0].to(q.dtype))
        return torch.cat(rows, 2) if rows else q.new_zeros(*q.shape[:3], self.keys.total)

    # What those need who look

    def seen(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Call, Gathered]:
        """All tokens of some heads, as one call; and how to put together what each rank finds of its heads."""
        options = self._of_heads(q, k, **options)
        sequence, heads = self.sharding.sequence, q.shape[1]
        groups: list[tuple[Ranks, list[slice], int]] = []
        if sequence is None:
            call = prepare(q, k, v, **options)
        else:
            assert self.queries is not None and self.keys is not None
            ranks = sequence.ranks
            whole = self._whole(q, k, v, None, **options)
            own = heads_of(heads, ranks.size)
            q, k, v = alltoall.to_heads(ranks, self.queries, self.keys, q, k, v)
            every = (slice(0, self.queries.total), slice(0, self.keys.total))
            call = whole.part(q, k, v, own[ranks.rank], *every)
            groups.append((ranks, own, heads))
        if self.sharding.heads is not None:
            spread = self.sharding.heads
            groups.append((spread.ranks, spread.each, spread.total))
        return call, Gathered(groups)

    def everything(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Call:
        """All tokens of all heads, as one call: what one process would have."""
        mask, bias, sinks = options.pop("mask"), options.pop("bias"), options.pop("sinks")
        sequence, heads = self.sharding.sequence, self.sharding.heads
        if sequence is not None:
            assert self.queries is not None and self.keys is not None
            tokens = (self.queries, self.keys, self.keys)
            q, k, v = (t.whole(parts_of(x, sequence.ranks, t, 2), 2) for x, t in zip((q, k, v), tokens, strict=True))
            options |= {"positions": self.positions, "key_positions": self.positions if self.own else None}
        if heads is not None:
            size = heads.ranks.size
            even = Tokens((heads.total // size,) * size, False)
            q = even.whole(parts_of(q, heads.ranks, even, 1), 1)
            k, v = (_of_all_kv_heads(x, heads) for x in (k, v))
            bias = tuple(one.with_weight(_full(one.weight)) for one in as_biases(bias)) or None
            sinks = None if sinks is None else _full(sinks)
        return prepare(q, k, v, mask=mask, bias=bias, sinks=sinks, **options)

    def outputs(self, out: Tensor) -> Tensor:
        """The outputs (B, H, N, E) of all heads and tokens, from this rank's."""
        out, heads = self.whole_of(out, 2), self.sharding.heads
        if heads is None:
            return out
        even = Tokens((out.shape[1],) * heads.ranks.size, False)
        return even.whole(parts_of(out, heads.ranks, even, 1), 1)

    def whole_of(self, x: Tensor, dim: int) -> Tensor:
        """This rank's part of something that the queries have, as the whole."""
        if self.queries is None or self.sharding.sequence is None:
            return x
        return self.queries.whole(parts_of(x, self.sharding.sequence.ranks, self.queries, dim), dim)

    # Options of the whole

    def _drop(self, q: Tensor, dropout: float) -> Drop | None:
        if not dropout:
            return None
        assert self.seed is not None
        heads = self.sharding.heads
        return Drop(dropout, self.seed, *((0, q.shape[1]) if heads is None else (heads.own.start, heads.total)))

    def _whole(self, q: Tensor, k: Tensor, v: Tensor, drop: Drop | None, **options: Any) -> Whole:
        assert self.queries is not None and self.keys is not None
        options = {**options, "positions": self.positions, "key_positions": self.positions if self.own else None}
        return Whole.of(q, k, v, self.queries, self.keys, drop, **options)

    def _of_heads(
        self, q: Tensor, k: Tensor, *, mask: Any, bias: Any, sinks: Tensor | None, **options: Any
    ) -> dict[str, Any]:
        """What is said of all heads, for those that are here."""
        heads = self.sharding.heads
        if heads is not None:
            if mask is not None and not as_mask(mask).shared_by_heads():
                mask = self._mask_of_heads(as_mask(mask), q, k, options)
            bias = tuple(_bias_of_heads(one, heads) for one in as_biases(bias)) or None
            sinks = sinks.to_local() if isinstance(sinks, DTensor) else sinks
        return {"mask": mask, "bias": bias, "sinks": sinks, **options}

    def _mask_of_heads(self, mask: Mask, q: Tensor, k: Tensor, options: dict[str, Any]) -> Mask | None:
        """A mask that is said of each head, for the heads here and all tokens."""
        heads = self.sharding.heads
        assert heads is not None
        every = q.detach()[:, :1].expand(-1, heads.total, -1, -1)  # (as many heads as the mask is of)
        if self.queries is not None and self.keys is not None:
            call = self._whole(every, k[:, :1], k[:, :1], None, mask=mask).call
        else:
            place = {name: options[name] for name in ("positions", "key_positions")}
            call = prepare(every, k.detach()[:, :1], k.detach()[:, :1], mask=mask, **place)
        return None if call.mask is None else call.mask.part(call.whole(), heads.own, 0)


class _AllKeys(torch.autograd.Function):
    """The keys (B, G, M, D) of all ranks; each rank looks at them all, so their gradients are summed."""

    @staticmethod
    def forward(ctx: Any, k: Tensor, ranks: Ranks, keys: Tokens) -> Tensor:
        ctx.ranks, ctx.keys = ranks, keys
        return keys.whole(parts_of(k, ranks, keys, 2), 2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.keys.part(ctx.ranks.summed(grads[0].clone()), ctx.ranks.rank, 2).clone(), None, None


def _full(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def _of_all_kv_heads(x: Tensor, heads: Heads) -> Tensor:
    """Keys or values (B, G, M, D) of all kv heads, from those that each rank has (some may be on several)."""
    here = [kv_heads_of(own, heads.total, heads.groups) for own in heads.each]
    there = Tokens(tuple(map(len, here)), False)
    every = there.whole(parts_of(x, heads.ranks, there, 1), 1)
    numbers = [one for some in here for one in some]
    return every[:, [numbers.index(one) for one in range(heads.groups)]]


def _bias_of_heads(bias: Bias, heads: Heads) -> Bias:
    """Its part for the heads here. A weight that is whole on every rank gets the gradient of all of them."""
    weight = bias.weight
    if isinstance(weight, DTensor):
        return bias.with_weight(weight.to_local())
    axis = 1 if isinstance(bias, DenseBias) else weight.dim() - 1
    if not weight.requires_grad:
        return bias if weight.shape[axis] != heads.total else bias.with_weight(_narrow(weight, axis, heads.own))
    return bias.with_weight(cast("Tensor", _OwnHeads.apply(weight, heads, axis)))


def _narrow(x: Tensor, axis: int, which: slice) -> Tensor:
    return x.narrow(axis, which.start, which.stop - which.start)


class _OwnHeads(torch.autograd.Function):
    """The part for the heads here of something that every rank has whole (or all of it, where it is one for all heads);
    its gradient is whole again, on every rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, heads: Heads, axis: int) -> Tensor:
        own = heads.own if x.shape[axis] == heads.total else slice(0, x.shape[axis])
        ctx.ranks, ctx.axis, ctx.own, ctx.shape = heads.ranks, axis, own, x.shape
        return _narrow(x, axis, own).clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        total = grads[0].new_zeros(ctx.shape)
        _narrow(total, ctx.axis, ctx.own).copy_(grads[0])
        return ctx.ranks.summed(total), None, None


@dataclass(frozen=True)
class Gathered:
    """How results of this rank's heads become those of all: over the ranks of each mesh dimension in turn."""

    groups: list[tuple[Ranks, list[slice], int]]

    @property
    def heads(self) -> int:
        """H of the whole."""
        return self.groups[-1][2]

    @property
    def own(self) -> slice:
        """Which heads of the whole are here."""
        start, stop = 0, None
        for ranks, own, _ in reversed(self.groups):
            piece = own[ranks.rank]
            start, stop = start + piece.start, start + piece.stop
        assert stop is not None
        return slice(start, stop)

    def __call__(self, x: Tensor, dim: int = 1) -> Tensor:
        """(B, h, ...) of this rank's heads to (B, H, ...) of all."""
        for ranks, own, total in self.groups:
            lengths = tuple(piece.stop - piece.start for piece in own)
            parts = parts_of(x, ranks, Tokens(lengths, False), dim)
            first = [i for i, piece in enumerate(own) if piece not in own[:i]]  # (where ranks share a head)
            x = torch.cat([parts[i] for i in first], dim)
            assert x.shape[dim] == total
        return x
