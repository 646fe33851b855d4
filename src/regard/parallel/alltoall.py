"""All-to-all attention (Ulysses): every rank trades its tokens of all heads for all tokens of its heads, attends, and
trades back.

    rank 0: tokens 0-4 of heads 0-7          rank 0: tokens 0-9 of heads 0-3
    rank 1: tokens 5-9 of heads 0-7    ->    rank 1: tokens 0-9 of heads 4-7

Letters: B batch, H query heads, G kv heads, N queries, M keys, n, m those of one rank, h, g heads of one rank,
D head width of q and k, E head width of v, P ranks.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from regard import kernels
from regard.parallel.tokens import Tokens
from regard.parallel.whole import Whole
from regard.parallel.wire import Ranks

__all__ = ["attend", "heads_of", "kv_heads_of", "to_heads"]


def heads_of(heads: int, size: int) -> list[slice]:
    """Which heads each rank computes: as equal as can be. Where there are more ranks than heads, some share one."""
    if heads < size:
        return [slice(rank % heads, rank % heads + 1) for rank in range(size)]
    ends = [heads * rank // size for rank in range(size + 1)]
    return [slice(a, b) for a, b in pairwise(ends)]


def kv_heads_of(own: slice, heads: int, groups: int) -> list[int]:
    """The kv heads that some query heads need; one for each query head where they do not share them evenly.

    >>> kv_heads_of(slice(0, 4), 8, 4), kv_heads_of(slice(2, 3), 8, 2), kv_heads_of(slice(0, 4), 12, 4)
    ([0, 1], [0], [0, 0, 0, 1])
    """
    shared = heads // groups
    each = [head // shared for head in range(own.start, own.stop)]
    once = sorted(set(each))
    count = len(each) // len(once)
    return once if each == [one for one in once for _ in range(count)] else each


class _Exchange(torch.autograd.Function):
    """Part i to rank i; the gradients go back."""

    @staticmethod
    def forward(ctx: Any, ranks: Ranks, sizes: list[int], *parts: Tensor) -> tuple[Tensor, ...]:
        ctx.ranks, ctx.sizes = ranks, [part.numel() for part in parts]
        return tuple(part.clone() for part in ranks.exchanged(list(parts), sizes))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        made = ctx.ranks.exchanged([grad.contiguous() for grad in grads], ctx.sizes)
        return None, None, *made


def _exchanged(ranks: Ranks, parts: list[list[Tensor]], shapes: list[list[tuple[int, ...]]]) -> list[list[Tensor]]:
    """Several tensors to each rank, in one message; and those that come, of these shapes."""
    sizes = [[torch.Size(shape).numel() for shape in some] for some in shapes]
    flat = [torch.cat([x.reshape(-1) for x in some]) for some in parts]
    came = _Exchange.apply(ranks, [sum(some) for some in sizes], *flat)
    return [
        [x.view(shape) for x, shape in zip(message.split(counts), some, strict=True)]
        for message, counts, some in zip(came, sizes, shapes, strict=True)  # type: ignore[arg-type]
    ]


def to_heads(
    ranks: Ranks, queries: Tokens, keys: Tokens, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """From this rank's tokens of all heads, q (B, H, n, D), k (B, G, m, D), v (B, G, m, E), to all tokens of its heads:
    q (B, h, N, D), k (B, g, M, D), v (B, g, M, E)."""
    (batch, heads, _, d), (groups, e) = q.shape, (v.shape[1], v.shape[3])
    own = heads_of(heads, ranks.size)
    theirs = [kv_heads_of(some, heads, groups) for some in own]
    h, g = own[ranks.rank].stop - own[ranks.rank].start, len(theirs[ranks.rank])
    parts = [[q[:, some], k[:, kv], v[:, kv]] for some, kv in zip(own, theirs, strict=True)]
    shapes = [
        [(batch, h, n, d), (batch, g, m, d), (batch, g, m, e)]
        for n, m in zip(queries.lengths, keys.lengths, strict=True)
    ]
    came = _exchanged(ranks, parts, shapes)
    q, k, v = (
        tokens.whole([some[i] for some in came], 2) for i, tokens in enumerate((queries, keys, keys))
    )  # by tokens, in the order of the whole
    return q, k, v


def to_tokens(ranks: Ranks, queries: Tokens, heads: int, out: Tensor) -> Tensor:
    """From all tokens of this rank's heads, (B, h, N, E), to this rank's tokens of all heads, (B, H, n, E)."""
    batch, _, _, e = out.shape
    own, n = heads_of(heads, ranks.size), queries.lengths[ranks.rank]
    parts = [[queries.part(out, rank, 2)] for rank in range(ranks.size)]
    shapes = [[(batch, some.stop - some.start, n, e)] for some in own]
    return torch.cat([some[0] for some in _exchanged(ranks, parts, shapes)], 1)


def attend(whole: Whole, ranks: Ranks, q: Tensor, k: Tensor, v: Tensor, kernel: str) -> Tensor:
    """(B, H, n, E): this rank's queries against the keys of all."""
    heads = q.shape[1]
    own = heads_of(heads, ranks.size)[ranks.rank]
    q, k, v = to_heads(ranks, whole.queries, whole.keys, q, k, v)
    call = whole.part(q, k, v, own, slice(0, whole.queries.total), slice(0, whole.keys.total))
    return to_tokens(ranks, whole.queries, heads, kernels.choose(kernel, call).output(call))
