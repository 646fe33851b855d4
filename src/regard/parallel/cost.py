"""What attention over several devices costs, by calculation: multiply-adds, bytes and messages of each method.
`docs/scaling.md` derives the formulas; `regard bench --distributed` compares them with what is sent.

Letters: B batch, N tokens, H query heads, G kv heads, D head width of q and k, E of v, W model width, P ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from regard.errors import bad_value
from regard.parallel.alltoall import heads_of, kv_heads_of

__all__ = ["METHODS", "Cost", "Sizes", "cost", "why_not"]

Way = Literal["heads", "ring", "alltoall"]
METHODS: tuple[Way, ...] = ("heads", "ring", "alltoall")


@dataclass(frozen=True)
class Sizes:
    """One attention layer, and a text."""

    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    width: int
    batch: int = 1
    value_dim: int | None = None  # E, D by default
    number: int = 2  # bytes of a number: 2 for bfloat16, 4 for float32
    causal: bool = True
    balanced: bool = True  # whether a ring's ranks have tokens from the head and the tail, or neighbours

    @property
    def e(self) -> int:
        """E"""
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def sum(self) -> int:
        """Bytes of a number that sums travel in."""
        return max(self.number, 4)


@dataclass(frozen=True)
class Cost:
    """What the busiest rank does for one attention, forward and backward."""

    flops: tuple[float, float]
    bytes: tuple[int, int]
    messages: tuple[int, int]
    overlaps: bool  # whether sending and computing go on at the same time


def cost(way: Way, sizes: Sizes, ranks: int) -> Cost:
    """Attention alone, between the projections; of "heads", the sums around it, too.

    >>> ring = cost("ring", Sizes(tokens=8192, heads=32, kv_heads=8, head_dim=128, width=4096), 4)
    >>> ring.bytes  # three blocks of 2,048 tokens x 8 kv heads x 256 numbers; and back, with gradients in float32
    (25165824, 75497472)
    """
    s, p = sizes, ranks
    why = why_not(way, sizes, ranks)
    if why is not None:
        raise bad_value(f"{way} over {ranks} ranks", expected="sizes that it can do", received=why)
    pairs = s.tokens * s.tokens / (2 if s.causal else 1)
    forward = 2.0 * s.batch * s.heads * pairs * (s.head_dim + s.e) / p
    flops = (forward, 2.5 * forward)  # backward: the scores again, dV, dP, dQ, dK
    if p == 1:
        return Cost(flops, (0, 0), (0, 0), False)
    most = -(-s.tokens // p)  # of a rank
    if way == "heads":
        summed = 2 * s.batch * s.tokens * s.width * s.number * (p - 1) // p
        return Cost(flops, (summed, summed), (2 * (p - 1), 2 * (p - 1)), False)
    if way == "ring":
        block = s.batch * s.kv_heads * most * (s.head_dim + s.e)
        steps = p - 1
        if s.causal and not s.balanced:  # the last rank sees all that the others see, and more
            flops = (flops[0] * (2 * p - 1) / p, flops[1] * (2 * p - 1) / p)
        return Cost(flops, (steps * block * s.number, steps * block * (s.number + s.sum)), (steps, 2 * steps), True)
    own = heads_of(s.heads, p)
    h = own[0].stop - own[0].start
    g = len(kv_heads_of(own[0], s.heads, s.kv_heads))
    there = h * s.head_dim + g * (s.head_dim + s.e)
    each = s.batch * most * (there + h * s.e) * s.number
    return Cost(flops, ((p - 1) * each, (p - 1) * each), (2 * (p - 1), 2 * (p - 1)), False)


def why_not(way: Way, sizes: Sizes, ranks: int) -> str | None:
    """In words, where a method stops; None where it goes."""
    if way not in METHODS:
        raise bad_value("way", expected=f"one of {METHODS}", received=repr(way))
    if way != "ring" and sizes.heads % ranks:
        return f"{sizes.heads} heads do not divide by {ranks}"
    if way != "heads" and sizes.tokens < ranks:
        return f"{sizes.tokens} tokens are fewer than {ranks} ranks"
    return None
