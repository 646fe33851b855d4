"""What `regard.watch` sees of sharded attention: each rank looks at all tokens of some heads, and the results are
gathered. Importing `regard.parallel` registers it.

Letters: B batch, H query heads, h those of one rank, G kv heads, N queries, M keys, D head width of q and k, E of v.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from regard.attention import prepare
from regard.heads.capture.registry import register
from regard.kernels import Call
from regard.parallel import alltoall
from regard.parallel.agreement import HeadSharding
from regard.parallel.alltoall import heads_of, kv_heads_of
from regard.parallel.collectives import Ranks
from regard.parallel.sharded_call import ShardedCall, attend_sharded
from regard.parallel.token_layout import Tokens, parts_of
from regard.positions import as_biases

__all__ = ["GatherHeads", "PartialCall"]


@dataclass(frozen=True)
class GatherHeads:
    """Gathers results of each rank's heads, over the ranks of each mesh dimension in turn."""

    groups: list[tuple[Ranks, list[slice], int]]  # ranks, the heads of each, and how many heads they have together

    @property
    def heads(self) -> int:
        """H of all ranks."""
        return self.groups[-1][2]

    @property
    def own(self) -> slice:
        """Which of all heads are this rank's."""
        start, stop = 0, None
        for ranks, heads, _ in reversed(self.groups):
            here = heads[ranks.rank]
            start, stop = start + here.start, start + here.stop
        assert stop is not None
        return slice(start, stop)

    def __call__(self, x: Tensor) -> Tensor:
        """(B, h, ...) of this rank's heads to (B, H, ...) of all."""
        for ranks, heads, total in self.groups:
            lengths = tuple(each.stop - each.start for each in heads)
            parts = parts_of(x, ranks, Tokens(lengths, False), 1)
            first = [i for i, each in enumerate(heads) if each not in heads[:i]]  # (where ranks share a head)
            x = torch.cat([parts[i] for i in first], 1)
            assert x.shape[1] == total
        return x


@dataclass(frozen=True)
class PartialCall:
    """Sharded attention as a watch sees it (the protocol of `regard.heads.capture.registry`)."""

    call: Call  # all tokens of some heads
    gather_heads: GatherHeads
    sharded: ShardedCall
    tensors: tuple[Tensor, Tensor, Tensor]  # this rank's q, k and v
    options: dict[str, Any]

    @staticmethod
    def of(
        q: Tensor, k: Tensor, v: Tensor, *, call: ShardedCall, kernel: str, dropout: float, **options: Any
    ) -> PartialCall:
        """From the arguments of `attend_sharded`: ranks trade tokens for heads, so that each sees whole rows."""
        sequence, heads, sharded_heads = call.sharding.sequence, q.shape[1], call.sharding.heads
        groups: list[tuple[Ranks, list[slice], int]] = []
        here = call.of_heads(q, k, **options)
        if sequence is None:
            seen = prepare(q, k, v, **here)
        else:
            assert call.queries is not None and call.keys is not None
            ranks, own = sequence.ranks, heads_of(heads, sequence.ranks.size)
            whole = call.whole(q, k, v, None, **here)
            of_heads = alltoall.to_heads(ranks, call.queries, call.keys, q, k, v)
            seen = whole.part(*of_heads, own[ranks.rank], slice(0, call.queries.total), slice(0, call.keys.total))
            groups.append((ranks, own, heads))
        if sharded_heads is not None:
            groups.append((sharded_heads.ranks, sharded_heads.each, sharded_heads.total))
        return PartialCall(seen, GatherHeads(groups), call, (q, k, v), options)

    def global_call(self) -> Call:
        """All tokens of all heads, as one call: what one process would have."""
        (q, k, v), options, sharded = self.tensors, dict(self.options), self.sharded
        sequence, heads = sharded.sharding.sequence, sharded.sharding.heads
        if sequence is not None:
            assert sharded.queries is not None and sharded.keys is not None
            tokens = (sharded.queries, sharded.keys, sharded.keys)
            q, k, v = (t.whole(parts_of(x, sequence.ranks, t, 2), 2) for x, t in zip((q, k, v), tokens, strict=True))
            options |= {"positions": sharded.positions, "key_positions": sharded.positions if sharded.own else None}
        if heads is not None:
            size = heads.ranks.size
            even = Tokens((heads.total // size,) * size, False)
            q = even.whole(parts_of(q, heads.ranks, even, 1), 1)
            k, v = (_all_kv_heads(x, heads) for x in (k, v))
            options["bias"] = tuple(b.with_weight(_full(b.weight)) for b in as_biases(options["bias"])) or None
            options["sinks"] = None if options["sinks"] is None else _full(options["sinks"])
        return prepare(q, k, v, **options)

    def gather_output(self, out: Tensor) -> Tensor:
        """The outputs (B, H, N, E) of all heads and tokens, from this rank's."""
        out, heads = self.gather_tokens(out, 2), self.sharded.sharding.heads
        if heads is None:
            return out
        even = Tokens((out.shape[1],) * heads.ranks.size, False)
        return even.whole(parts_of(out, heads.ranks, even, 1), 1)

    def gather_tokens(self, x: Tensor, dim: int) -> Tensor:
        """What this rank has for each of its queries, for all queries."""
        queries, sequence = self.sharded.queries, self.sharded.sharding.sequence
        if queries is None or sequence is None:
            return x
        return queries.whole(parts_of(x, sequence.ranks, queries, dim), dim)


def _full(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def _all_kv_heads(x: Tensor, heads: HeadSharding) -> Tensor:
    """Keys or values (B, G, M, D) of all kv heads, from those that each rank has (some may be on several)."""
    of_each_rank = [kv_heads_of(own, heads.total, heads.groups) for own in heads.each]
    layout = Tokens(tuple(map(len, of_each_rank)), False)
    gathered = layout.whole(parts_of(x, heads.ranks, layout, 1), 1)
    numbers = [head for own in of_each_rank for head in own]
    return gathered[:, [numbers.index(head) for head in range(heads.groups)]]


register(attend_sharded, PartialCall.of)
