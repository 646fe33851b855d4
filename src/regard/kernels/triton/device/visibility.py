"""Which keys a query sees: a range [low, high) by causality, window, padding and documents; then documents and a dense
mask, pair by pair. From the ranges of a block's queries follow the keys that none of them sees (never visited) and
those that all of them see (never masked).

`i` and `j` are numbers of queries and keys, of any shapes that broadcast.
"""

import triton
import triton.language as tl


@triton.jit
def key_range(i, b, sizes, seen):
    """The keys [low, high) that query `i` of item `b` sees, at most."""
    position = sizes.q_start + i
    low = tl.zeros_like(position)
    high = low + sizes.m
    if seen.before is not None:
        low = tl.maximum(low, position - seen.before)
    if seen.after is not None:
        high = tl.minimum(high, position + seen.after + 1)
    if seen.key_start is not None:
        low = tl.maximum(low, tl.load(seen.key_start + b))
    if seen.key_end is not None:
        high = tl.minimum(high, tl.load(seen.key_end + b))
    if seen.documents is not None:
        at = b.to(tl.int64) * seen.documents.query_stride + i
        low = tl.maximum(low, tl.load(seen.documents.first_key + at))
        high = tl.minimum(high, tl.load(seen.documents.last_key + at))
    return low, high


@triton.jit
def query_range(first, last, b, sizes, seen, KEYS: tl.constexpr):
    """The queries that see some of the keys [first, last) of item `b`, and those that see all of them, as
    (begin, end, all_begin, all_end)."""
    begin, end = 0, sizes.n
    all_begin, all_end = 0, sizes.n
    if seen.after is not None:
        begin = tl.maximum(begin, first - seen.after - sizes.q_start)
        all_begin = tl.maximum(all_begin, last - 1 - seen.after - sizes.q_start)
    if seen.before is not None:
        end = tl.minimum(end, last + seen.before - sizes.q_start)
        all_end = tl.minimum(all_end, first + seen.before + 1 - sizes.q_start)
    if seen.key_start is not None:
        start = tl.load(seen.key_start + b)
        end = tl.where(last <= start, begin, end)
        all_end = tl.where(first < start, all_begin, all_end)
    if seen.key_end is not None:
        stop = tl.load(seen.key_end + b)
        end = tl.where(first >= stop, begin, end)
        all_end = tl.where(last > stop, all_begin, all_end)
    if seen.documents is not None:
        j = first + tl.arange(0, KEYS)
        at = b.to(tl.int64) * seen.documents.key_stride + tl.minimum(j, sizes.m - 1)
        begin = tl.maximum(begin, tl.min(tl.load(seen.documents.first_query + at), 0))
        end = tl.minimum(end, tl.max(tl.load(seen.documents.last_query + at), 0))
    return begin, end, all_begin, all_end


@triton.jit
def middle(begin, end, all_begin, all_end, STEP: tl.constexpr):
    """The whole steps from `begin` on that lie in [all_begin, all_end): what is before and after them needs a mask."""
    first = tl.minimum(begin + tl.cdiv(tl.maximum(all_begin - begin, 0), STEP) * STEP, end)
    last = first + tl.maximum(tl.minimum(all_end, end) - first, 0) // STEP * STEP
    return first, last


@triton.jit
def visible(i, j, low, high, b, h, seen, inside):
    """Which pairs are. `inside`, of the shape of `j`: which keys there are."""
    result = (j >= low) & (j < high) & inside
    if seen.documents is not None:
        documents = seen.documents
        of_query = tl.load(documents.of_queries + b.to(tl.int64) * documents.query_stride + i)
        of_key = tl.load(documents.of_keys + b.to(tl.int64) * documents.key_stride + j, mask=inside, other=0)
        result = result & (of_query == of_key)
    if seen.dense is not None:
        dense = seen.dense
        at = dense.at + b.to(tl.int64) * dense.b + h.to(tl.int64) * dense.h
        pair = tl.load(at + i.to(tl.int64) * dense.i + j.to(tl.int64) * dense.j, mask=result, other=0)
        result = result & (pair != 0)
    return result
