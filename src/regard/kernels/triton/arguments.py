"""What device code is given: tuples of tensors and numbers, by name. None where a call has no such thing; device code
that asks `is None` is compiled without it.

Letters: B batch, H query heads, G kv heads, N queries, M keys, D head width of q and k, E head width of v.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

__all__ = [
    "Bias",
    "Dense",
    "Documents",
    "Drop",
    "Heads",
    "Look",
    "Moments",
    "Numbers",
    "Partial",
    "Plane",
    "Seen",
    "Sinks",
    "Sizes",
]


class Heads(NamedTuple):
    """A tensor (B, heads, rows, width) whose last stride is 1."""

    at: Tensor
    b: int
    h: int
    n: int


class Sizes(NamedTuple):
    """Of the whole call."""

    heads: int  # H
    shared: int  # query heads of a kv head
    n: int
    m: int
    q_start: int  # the position of the first query


class Documents(NamedTuple):
    """Numbers of documents, equal sees equal; and the range of keys (queries) in which a query's (key's) own lie."""

    of_queries: Tensor  # (1|B, N) int32
    of_keys: Tensor  # (1|B, M)
    first_key: Tensor  # (1|B, N)
    last_key: Tensor  # (1|B, N), exclusive
    first_query: Tensor  # (1|B, M)
    last_query: Tensor  # (1|B, M), exclusive
    query_stride: int  # from item to item; 0 where one row is for all
    key_stride: int


class Dense(NamedTuple):
    """A mask (1|B, 1|H, 1|N, 1|M) of bytes, 0 for what is hidden."""

    at: Tensor
    b: int
    h: int
    i: int
    j: int


class Seen(NamedTuple):
    """Who sees whom. A query at position p sees key j where p - before <= j <= p + after, and all the rest agrees."""

    before: int | None
    after: int | None
    key_start: Tensor | None  # (B,) int32
    key_end: Tensor | None  # (B,) int32, exclusive
    documents: Documents | None
    dense: Dense | None


class Bias(NamedTuple):
    """What is added to the scores, float32: that of (b, h, i, j) lies at `first` + (b, h, i, j) . strides."""

    at: Tensor
    first: int
    b: int
    h: int
    i: int
    j: int


class Numbers(NamedTuple):
    """How products become scores, and scores exponents of 2: score = cap * tanh(product * inner), or product * inner,
    or the product itself; exponent = score * unit."""

    inner: float
    unit: float
    cap: float
    slope: float  # the derivative of a score by its product, where tanh is 0


class Sinks(NamedTuple):
    """One logit per head, (1|B, H) float32."""

    at: Tensor
    b: int
    h: int


class Drop(NamedTuple):
    """Dropout's hash: one number per row and column."""

    rows: Tensor  # (1|B, H, N) int32
    cols: Tensor  # (1|B, M) int32
    row_b: int
    row_h: int
    col_b: int
    threshold: int
    kept: float


class Moments(NamedTuple):
    """Where queries (1|B, N) and keys (1|B, M) stand, where they do not stand one after another."""

    queries: Tensor  # int32
    keys: Tensor
    query_stride: int
    key_stride: int


class Look(NamedTuple):
    """Where statistics of rows go, (B, H, N) each."""

    entropy: Tensor | None
    peak: Tensor | None
    target: Tensor | None  # int32; -1 where a query sees nothing
    distance: Tensor | None
    offset: Tensor | None


class Plane(NamedTuple):
    """Where numbers of pairs go: that of head and item `u`, query x, key j to `first` + u * unit + x * row + j."""

    at: Tensor
    first: int
    unit: int
    row: int


class Partial(NamedTuple):
    """What a part of the keys gave, (parts, B, H, N) each, and `acc` (parts, B, H, N, E)."""

    acc: Tensor
    top: Tensor
    total: Tensor
    logs: Tensor | None
    ahead: Tensor | None
    apart: Tensor | None
    target: Tensor | None
