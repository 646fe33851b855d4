"""All-to-all attention (Ulysses): every rank trades its tokens of all heads for all tokens of its heads, attends, and
trades back.

    rank 0: tokens 0-4 of heads 0-7          rank 0: tokens 0-9 of heads 0-3
    rank 1: tokens 5-9 of heads 0-7    ->    rank 1: tokens 0-9 of heads 4-7

Letters: B batch, H query heads, G kv heads, N queries, M keys, n, m those of one rank, h, g heads of one rank,
D head width of q and k, E head width of v, P ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from torch import Tensor

from regard import kernels
from regard.parallel.collectives import Ranks
from regard.parallel.global_call import GlobalCall
from regard.parallel.token_layout import Tokens

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
    return once if each == [head for head in once for _ in range(count)] else each


class _Exchange(torch.autograd.Function):
    """Several tensors to each rank, in one message to each; the gradients go back the same way."""

    @staticmethod
    def forward(ctx: Any, ranks: Ranks, going: Shapes, coming: Shapes, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.ranks, ctx.going, ctx.coming = ranks, going, coming
        return _exchanged(ranks, going, coming, tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, None, None, *_exchanged(ctx.ranks, ctx.coming, ctx.going, grads)


Shapes: TypeAlias = list[list[tuple[int, ...]]]  # of what goes to, or comes from, each rank


def _exchanged(ranks: Ranks, going: Shapes, coming: Shapes, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Tensors of the shapes that go, rank after rank; gives those that come."""
    sent, came = (tensors[0].new_empty(sum(_counts(shapes))) for shapes in (going, coming))
    for place, tensor in zip(_opened(sent, going), tensors, strict=True):
        place.copy_(tensor)
    ranks.all_to_all(sent, _counts(going), came, _counts(coming))
    return tuple(_opened(came, coming))


def _counts(shapes: Shapes) -> list[int]:
    """Numbers of each rank's message."""
    return [sum(math.prod(shape) for shape in some) for some in shapes]


def _opened(flat: Tensor, shapes: Shapes) -> Iterator[Tensor]:
    """Messages of all ranks as the tensors that they hold."""
    every = [shape for some in shapes for shape in some]
    for piece, shape in zip(flat.split([math.prod(shape) for shape in every]), every, strict=True):
        yield piece.view(shape)


def to_heads(
    ranks: Ranks, queries: Tokens, keys: Tokens, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """From this rank's tokens of all heads, q (B, H, n, D), k (B, G, m, D), v (B, G, m, E), to all tokens of its heads:
    q (B, h, N, D), k (B, g, M, D), v (B, g, M, E)."""
    (batch, heads, _, d), (groups, e) = q.shape, (v.shape[1], v.shape[3])
    own = heads_of(heads, ranks.size)
    theirs = [kv_heads_of(some, heads, groups) for some in own]
    h, g = own[ranks.rank].stop - own[ranks.rank].start, len(theirs[ranks.rank])
    parts = [x for some, kv in zip(own, theirs, strict=True) for x in (q[:, some], k[:, kv], v[:, kv])]
    going = [[tuple(x.shape) for x in parts[i : i + 3]] for i in range(0, len(parts), 3)]
    coming: Shapes = [
        [(batch, h, n, d), (batch, g, m, d), (batch, g, m, e)]
        for n, m in zip(queries.lengths, keys.lengths, strict=True)
    ]
    came = _Exchange.apply(ranks, going, coming, *parts)
    q, k, v = (tokens.whole(came[i::3], 2) for i, tokens in enumerate((queries, keys, keys)))  # type: ignore[index]
    return q, k, v


def to_tokens(ranks: Ranks, queries: Tokens, heads: int, out: Tensor) -> Tensor:
    """From all tokens of this rank's heads, (B, h, N, E), to this rank's tokens of all heads, (B, H, n, E)."""
    batch, _, _, e = out.shape
    own, n = heads_of(heads, ranks.size), queries.lengths[ranks.rank]
    parts = [queries.part(out, rank, 2) for rank in range(ranks.size)]
    coming: Shapes = [[(batch, some.stop - some.start, n, e)] for some in own]
    came = _Exchange.apply(ranks, [[tuple(part.shape)] for part in parts], coming, *parts)
    return torch.cat(came, 1)  # type: ignore[arg-type]


def attend(whole: GlobalCall, ranks: Ranks, q: Tensor, k: Tensor, v: Tensor, kernel: str) -> Tensor:
    """(B, H, n, E): this rank's queries against the keys of all."""
    heads = q.shape[1]
    own = heads_of(heads, ranks.size)[ranks.rank]
    q, k, v = to_heads(ranks, whole.queries, whole.keys, q, k, v)
    call = whole.part(q, k, v, own, slice(0, whole.queries.total), slice(0, whole.keys.total))
    return to_tokens(ranks, whole.queries, heads, kernels.choose(kernel, call).output(call))
