"""One call of a layer that is sharded over processes: where its tokens and heads are (`ShardedCall`), and the function
that computes it (`attend_sharded`).

Letters: B batch, H query heads, G kv heads, N queries, M keys, n, m those of one rank, D head width of q and k, E of v.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.overrides import handle_torch_function, has_torch_function

from regard import kernels
from regard.attention import attention_weights, prepare
from regard.kernels.precision import casts_to, fixed_precision
from regard.masks import Mask, as_mask
from regard.parallel import alltoall, ring
from regard.parallel.collectives import Ranks
from regard.parallel.global_call import GlobalCall, GlobalDropout
from regard.parallel.token_layout import Tokens, gather_parts
from regard.positions import Bias, as_biases

if TYPE_CHECKING:
    from regard.parallel.agreement import HeadSharding, Sharding

__all__ = ["Positions", "ShardedCall", "attend_sharded"]


class Positions(NamedTuple):
    """The positions of some tokens, (n,) or (B, n), and the length of the whole text."""

    positions: Tensor
    length: int


def attend_sharded(q: Tensor, k: Tensor, v: Tensor, *, call: ShardedCall, **options: Any) -> Tensor:
    """As `regard.attend`, for the heads and tokens of this rank: (B, H, n, E) from q (B, H, n, D), k (B, G, m, D) and
    v (B, G, m, E). Torch function modes see it as they see `regard.attend`."""
    if has_torch_function((q, k, v)):
        return handle_torch_function(attend_sharded, (q, k, v), q, k, v, call=call, **options)
    return call.attend(q, k, v, **options)


@dataclass(frozen=True)
class ShardedCall:
    """One call of a sharded layer: which tokens are where, and how they attend."""

    sharding: Sharding
    queries: Tokens | None = None  # None where tokens are whole on every rank
    keys: Tokens | None = None
    positions: Tensor | None = None  # the whole's, where the caller gave them
    own: bool = True  # whether the keys are the queries' own tokens
    seed: Tensor | None = None

    def positions_of_queries(self, device: torch.device) -> Positions:
        """The positions of this rank's queries."""
        assert self.queries is not None and self.keys is not None and self.sharding.sequence is not None
        rank, n, m = self.sharding.sequence.ranks.rank, self.queries.total, self.keys.total
        if self.positions is None:
            return Positions(self.queries.numbers(rank, device) + (m - n), m)
        own = self.queries.part(self.positions, rank, self.positions.dim() - 1)
        return Positions(own, int(self.positions.max()) + 1 if self.positions.numel() else 0)

    def key_positions(self, device: torch.device) -> Positions:
        """The positions of this rank's keys."""
        assert self.keys is not None and self.sharding.sequence is not None
        if self.own and self.positions is not None:
            return self.positions_of_queries(device)
        return Positions(self.keys.numbers(self.sharding.sequence.ranks.rank, device), self.keys.total)

    def replicate(self, *inputs: Tensor) -> list[Tensor]:
        """The layer's inputs as its projections take them: where heads are sharded, a replicated DTensor, so that the
        gradients of one input are summed over the ranks once, and not once for each projection."""
        heads = self.sharding.heads
        if heads is None:
            return list(inputs)
        replicated: dict[int, Tensor] = {}
        for x in inputs:
            if id(x) not in replicated:
                replicated[id(x)] = heads.ranks.replicate(x, heads.mesh)
        return [replicated[id(x)] for x in inputs]

    def wait(self, out: Tensor) -> Tensor:
        """The layer's output, as soon as the sum over the ranks' heads is there."""
        return out if self.sharding.heads is None else self.sharding.heads.ranks.wait(out)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, kernel: str, dropout: float, **options: Any) -> Tensor:
        """(B, H, n, E) from this rank's q (B, H, n, D), k (B, G, m, D), v (B, G, m, E)."""
        dtype = casts_to(q.device, q.dtype)
        if dtype is not None:
            q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
        with fixed_precision(q):
            drop = self._drop(q, dropout)
            sequence = self.sharding.sequence
            options = self.of_heads(q, k, **options)
            if sequence is None:
                call = prepare(q, k, v, **options)
                if drop is not None:
                    batch, heads, n, m = call.shape
                    call = replace(call, dropout=drop.part(batch, slice(0, heads), slice(0, n), slice(0, m)))
                return kernels.choose(kernel, call).output(call)
            method = ring.attend if sequence.method == "ring" else alltoall.attend
            return method(self.global_call(q, k, v, drop, **options), sequence.ranks, q, k, v, kernel)

    def weights(self, q: Tensor, k: Tensor, **options: Any) -> Tensor:
        """The weights of this rank's queries: (B, h, n, M), h the heads here."""
        options = self.of_heads(q, k, **options)
        sequence = self.sharding.sequence
        if sequence is None:
            return attention_weights(q, k, **options)
        assert self.queries is not None and self.keys is not None
        global_call = self.global_call(q, k, k, None, **options)
        k = cast("Tensor", _AllKeys.apply(k, sequence.ranks, self.keys))
        rows = []
        at = 0
        for run in self.queries.runs[sequence.ranks.rank]:
            own = q[:, :, at : at + run.stop - run.start]
            at += run.stop - run.start
            call = global_call.part(own, k, k, slice(0, q.shape[1]), run, slice(0, self.keys.total))
            rows.append(kernels.reference.weights(call)[0].to(q.dtype))
        return torch.cat(rows, 2) if rows else q.new_zeros(*q.shape[:3], self.keys.total)

    def _drop(self, q: Tensor, dropout: float) -> GlobalDropout | None:
        if not dropout:
            return None
        assert self.seed is not None
        heads = self.sharding.heads
        return GlobalDropout(
            dropout, self.seed, *((0, q.shape[1]) if heads is None else (heads.own.start, heads.total))
        )

    def global_call(self, q: Tensor, k: Tensor, v: Tensor, drop: GlobalDropout | None, **options: Any) -> GlobalCall:
        """The call of all tokens, of which this rank computes a part."""
        assert self.queries is not None and self.keys is not None
        options = {**options, "positions": self.positions, "key_positions": self.positions if self.own else None}
        return GlobalCall.of(q, k, v, self.queries, self.keys, drop, **options)

    def of_heads(
        self, q: Tensor, k: Tensor, *, mask: Any, bias: Any, sinks: Tensor | None, **options: Any
    ) -> dict[str, Any]:
        """Options for all heads, cut to the heads of this rank."""
        heads = self.sharding.heads
        if heads is not None:
            if mask is not None and not as_mask(mask).shared_by_heads():
                mask = self._mask_of_heads(as_mask(mask), q, k, options)
            bias = tuple(_bias_of_heads(each, heads) for each in as_biases(bias)) or None
            sinks = sinks.to_local() if isinstance(sinks, DTensor) else sinks
        return {"mask": mask, "bias": bias, "sinks": sinks, **options}

    def _mask_of_heads(self, mask: Mask, q: Tensor, k: Tensor, options: dict[str, Any]) -> Mask | None:
        """A mask that differs between heads, cut to the heads of this rank; for all tokens."""
        heads = self.sharding.heads
        assert heads is not None
        every = q.detach()[:, :1].expand(-1, heads.total, -1, -1)  # (as many heads as the mask is of)
        if self.queries is not None and self.keys is not None:
            call = self.global_call(every, k[:, :1], k[:, :1], None, mask=mask).call
        else:
            place = {name: options[name] for name in ("positions", "key_positions")}
            call = prepare(every, k.detach()[:, :1], k.detach()[:, :1], mask=mask, **place)
        return None if call.mask is None else call.mask.part(call.whole(), heads.own, 0)


class _AllKeys(torch.autograd.Function):
    """The keys (B, G, M, D) of all ranks; each rank looks at them all, so their gradients are summed."""

    @staticmethod
    def forward(ctx: Any, k: Tensor, ranks: Ranks, keys: Tokens) -> Tensor:
        ctx.ranks, ctx.keys = ranks, keys
        return keys.whole(gather_parts(k, ranks, keys, 2), 2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.keys.part(ctx.ranks.all_reduce(grads[0].clone()), ctx.ranks.rank, 2).clone(), None, None


def _bias_of_heads(bias: Bias, heads: HeadSharding) -> Bias:
    """Its part for the heads here. A weight that is whole on every rank gets the gradient of all of them."""
    weight = bias.weight
    if isinstance(weight, DTensor):
        return bias.with_weight(weight.to_local())
    axis = bias.heads_axis
    if not weight.requires_grad:
        return bias if weight.shape[axis] != heads.total else bias.with_weight(_narrow(weight, axis, heads.own))
    return bias.with_weight(cast("Tensor", _OwnHeads.apply(weight, heads, axis)))


def _narrow(x: Tensor, axis: int, which: slice) -> Tensor:
    return x.narrow(axis, which.start, which.stop - which.start)


class _OwnHeads(torch.autograd.Function):
    """The part for the heads here of something that every rank has whole (or all of it, where it is one for all heads);
    its gradient is whole again, on every rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, heads: HeadSharding, axis: int) -> Tensor:
        own = heads.own if x.shape[axis] == heads.total else slice(0, x.shape[axis])
        ctx.ranks, ctx.axis, ctx.own, ctx.shape = heads.ranks, axis, own, x.shape
        return _narrow(x, axis, own).clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        total = grads[0].new_zeros(ctx.shape)
        _narrow(total, ctx.axis, ctx.own).copy_(grads[0])
        return ctx.ranks.all_reduce(total), None, None
