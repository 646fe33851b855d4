"""What `regard.watch` sees of sharded attention: each rank looks at all tokens of some heads, and the results are
gathered. Importing `regard.parallel` registers it.

Letters: B batch, H query heads, h those of one rank, G kv heads, N queries, M keys, D head width of q and k, E of v.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from regard.attention import prepare
from regard.heads.capture.registry import GatherHeads, PartialCall, register
from regard.kernels import Call
from regard.parallel import alltoall
from regard.parallel.agreement import HeadSharding
from regard.parallel.alltoall import heads_of, kv_heads_of
from regard.parallel.collectives import Ranks
from regard.parallel.sharded_call import ShardedCall, attend_sharded
from regard.parallel.token_layout import Tokens, gather_parts
from regard.positions import as_biases

__all__ = ["observe"]

HeadGroup = tuple[Ranks, list[slice], int]  # ranks, the heads of each, and how many heads they have together


def observe(
    q: Tensor, k: Tensor, v: Tensor, *, call: ShardedCall, kernel: str, dropout: float, **options: Any
) -> PartialCall:
    """What `attend_sharded` computes with these arguments. Ranks trade tokens for heads, so each sees whole rows."""
    sequence, heads, sharded_heads = call.sharding.sequence, q.shape[1], call.sharding.heads
    groups: list[HeadGroup] = []
    here = call.of_heads(q, k, **options)
    if sequence is None:
        seen = prepare(q, k, v, **here)
    else:
        assert call.queries is not None and call.keys is not None
        ranks, own = sequence.ranks, heads_of(heads, sequence.ranks.size)
        global_call = call.global_call(q, k, v, None, **here)
        of_heads = alltoall.to_heads(ranks, call.queries, call.keys, q, k, v)
        seen = global_call.part(*of_heads, own[ranks.rank], slice(0, call.queries.total), slice(0, call.keys.total))
        groups.append((ranks, own, heads))
    if sharded_heads is not None:
        groups.append((sharded_heads.ranks, sharded_heads.each, sharded_heads.total))
    return PartialCall(
        seen,
        GatherHeads(groups[-1][2], _own_heads(groups), partial(_gather_heads, groups)),
        partial(_global_call, call, q, k, v, options),
        partial(_gather_output, call),
        partial(_gather_tokens, call),
    )


def _own_heads(groups: list[HeadGroup]) -> slice:
    """Which of all heads are this rank's."""
    start, stop = 0, 0
    for ranks, heads, _ in reversed(groups):
        here = heads[ranks.rank]
        start, stop = start + here.start, start + here.stop
    return slice(start, stop)


def _gather_heads(groups: list[HeadGroup], x: Tensor) -> Tensor:
    """(B, h, ...) of this rank's heads to (B, H, ...) of all, over the ranks of each mesh dimension in turn."""
    for ranks, heads, total in groups:
        lengths = tuple(each.stop - each.start for each in heads)
        parts = gather_parts(x, ranks, Tokens(lengths, False), 1)
        first = [i for i, each in enumerate(heads) if each not in heads[:i]]  # (where ranks share a head)
        x = torch.cat([parts[i] for i in first], 1)
        assert x.shape[1] == total
    return x


def _global_call(call: ShardedCall, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Call:
    """All tokens of all heads, as one call: what one process would have."""
    sequence, heads, options = call.sharding.sequence, call.sharding.heads, dict(options)
    if sequence is not None:
        assert call.queries is not None and call.keys is not None
        tokens = (call.queries, call.keys, call.keys)
        q, k, v = (t.whole(gather_parts(x, sequence.ranks, t, 2), 2) for x, t in zip((q, k, v), tokens, strict=True))
        options |= {"positions": call.positions, "key_positions": call.positions if call.own else None}
    if heads is not None:
        q = _all_heads(q, heads)
        k, v = (_all_kv_heads(x, heads) for x in (k, v))
        options["bias"] = tuple(b.with_weight(_full(b.weight)) for b in as_biases(options["bias"])) or None
        options["sinks"] = None if options["sinks"] is None else _full(options["sinks"])
    return prepare(q, k, v, **options)


def _gather_output(call: ShardedCall, out: Tensor) -> Tensor:
    """The outputs (B, H, N, E) of all heads and tokens, from this rank's."""
    out, heads = _gather_tokens(call, out, 2), call.sharding.heads
    return out if heads is None else _all_heads(out, heads)


def _gather_tokens(call: ShardedCall, x: Tensor, dim: int) -> Tensor:
    """What this rank has for each of its queries, for all queries."""
    if call.queries is None or call.sharding.sequence is None:
        return x
    return call.queries.whole(gather_parts(x, call.sharding.sequence.ranks, call.queries, dim), dim)


def _full(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def _all_heads(x: Tensor, heads: HeadSharding) -> Tensor:
    """(B, H, ...) of all query heads, from (B, h, ...) of this rank's."""
    layout = Tokens((x.shape[1],) * heads.ranks.size, False)
    return layout.whole(gather_parts(x, heads.ranks, layout, 1), 1)


def _all_kv_heads(x: Tensor, heads: HeadSharding) -> Tensor:
    """Keys or values (B, G, M, D) of all kv heads, from those that each rank has (some may be on several)."""
    of_each_rank = [kv_heads_of(own, heads.total, heads.groups) for own in heads.each]
    layout = Tokens(tuple(map(len, of_each_rank)), False)
    gathered = layout.whole(gather_parts(x, heads.ranks, layout, 1), 1)
    numbers = [head for own in of_each_rank for head in own]
    return gathered[:, [numbers.index(head) for head in range(heads.groups)]]


register(attend_sharded, observe)
