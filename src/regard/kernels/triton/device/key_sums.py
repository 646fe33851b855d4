"""Sums of weights over many pairs, computed once more from the log-sum-exp: what each key received from some queries,
and sums over keys by factors. A number is summed by one program, in one order.
"""

import triton
import triton.language as tl

from regard.kernels.triton.device.scores import exponent_of, scored
from regard.kernels.triton.device.visibility import key_range, middle, query_range, visible


@triton.jit
def received_from(
    first, last, end, sums, key, j, there, b, h, q, lse, counted, sizes, seen, bias, numbers,
    D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, MASKED: tl.constexpr, CAPPED: tl.constexpr,
    SCALED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds what a block of keys receives from the queries [first, last)."""
    d, step = tl.arange(0, WIDTH), tl.arange(0, ROWS)
    queries_at = q.at + b.to(tl.int64) * q.b + h.to(tl.int64) * q.h
    rows_at = (b.to(tl.int64) * sizes.heads + h) * sizes.n
    for start in range(first, last, ROWS):
        i = start + step
        known = i < end
        if MASKED:
            i = tl.minimum(i, sizes.n - 1)
        query = tl.load(queries_at + i.to(tl.int64)[:, None] * q.n + d[None, :], mask=(d < D)[None, :], other=0.0)
        log = exponent_of(tl.load(lse + rows_at + i))
        product = tl.dot(query, key, input_precision=PRECISION)
        inside = there[None, :]
        score, _ = scored(product, i[:, None], j[None, :], b, h, inside, numbers, bias, MASKED, CAPPED, SCALED)
        weight = tl.exp2(score * numbers.unit - log[:, None])
        if MASKED:
            low, high = key_range(i, b, sizes, seen)
            high = tl.where(known, high, 0)
            pairs = visible(i[:, None], j[None, :], low[:, None], high[:, None], b, h, seen, inside)
            weight = tl.where(pairs, weight, 0.0)
        if counted is not None:
            count = tl.load(counted + b.to(tl.int64) * sizes.n + i)
            weight = tl.where((count != 0)[:, None], weight, 0.0)
        sums += tl.sum(weight, 0)
    return sums


@triton.jit(do_not_specialize=["sizes", "bands"])
def received(
    q, k, lse, counted, to, sizes, seen, bias, numbers, bands,
    ROWS: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, EDGES: tl.constexpr,
    CAPPED: tl.constexpr, SCALED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What a block of keys receives from each band of queries: `to` (B, H, bands, M). Query i is in band i * bands //
    N. `counted` (B, N): 0 for queries that are left out."""
    blocks = tl.cdiv(sizes.m, KEYS)
    block, rest = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    band, unit = rest % bands, rest // bands
    b, h = unit // sizes.heads, unit % sizes.heads
    g = h // sizes.shared
    start = block * KEYS
    stop = tl.minimum(start + KEYS, sizes.m)
    j = start + tl.arange(0, KEYS)
    there = j < sizes.m
    if seen.key_start is not None:
        there = there & (j >= tl.load(seen.key_start + b))
    if seen.key_end is not None:
        there = there & (j < tl.load(seen.key_end + b))
    d = tl.arange(0, WIDTH)
    from_key = b.to(tl.int64) * k.b + g.to(tl.int64) * k.h + j.to(tl.int64) * k.n
    key = tl.load(k.at + from_key[None, :] + d[:, None], mask=there[None, :] & (d < D)[:, None], other=0.0)
    begin, end, all_begin, all_end = query_range(start, stop, b, sizes, seen, KEYS)
    begin = tl.maximum(begin, ((band.to(tl.int64) * sizes.n + bands - 1) // bands).to(tl.int32))
    end = tl.minimum(end, (((band + 1).to(tl.int64) * sizes.n + bands - 1) // bands).to(tl.int32))
    end = tl.maximum(begin, end)
    all_end = tl.where(start + KEYS > sizes.m, all_begin, all_end)
    first, last = begin, begin
    if EDGES:
        first, last = middle(begin, end, all_begin, all_end, ROWS)
    sums = tl.zeros((KEYS,), tl.float32)
    if EDGES:
        sums = received_from(
            begin, first, end, sums, key, j, there, b, h, q, lse, counted, sizes, seen, bias, numbers,
            D, WIDTH, ROWS, True, CAPPED, SCALED, PRECISION,
        )  # fmt: skip
        sums = received_from(
            first, last, end, sums, key, j, there, b, h, q, lse, counted, sizes, seen, bias, numbers,
            D, WIDTH, ROWS, False, CAPPED, SCALED, PRECISION,
        )  # fmt: skip
    sums = received_from(
        last, end, end, sums, key, j, there, b, h, q, lse, counted, sizes, seen, bias, numbers,
        D, WIDTH, ROWS, True, CAPPED, SCALED, PRECISION,
    )  # fmt: skip
    tl.store(to + (unit.to(tl.int64) * bands + band) * sizes.m + j, sums, mask=j < sizes.m)


@triton.jit
def by_factors(
    first, last, begin, end, sums, query, log, i, low, high, b, g, h, k, factors, factor, count, sizes, seen, bias,
    numbers, D: tl.constexpr, WIDTH: tl.constexpr, KEYS: tl.constexpr, MASKED: tl.constexpr, CAPPED: tl.constexpr,
    SCALED: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Adds the weights of the keys [first, last), multiplied by the factors of each sum."""
    d, step = tl.arange(0, WIDTH), tl.arange(0, KEYS)
    keys_at = k.at + b.to(tl.int64) * k.b + g.to(tl.int64) * k.h + first.to(tl.int64) * k.n
    for start in range(first, last, KEYS):
        j = start + step
        there = (j >= begin) & (j < end)
        key_mask = (d < D)[:, None]
        if MASKED:
            key_mask = key_mask & there[None, :]
        key = tl.load(keys_at + (d[:, None] + step[None, :] * k.n), mask=key_mask, other=0.0)
        product = tl.dot(query, key, input_precision=PRECISION)
        inside = there[None, :]
        score, _ = scored(product, i[:, None], j[None, :], b, h, inside, numbers, bias, MASKED, CAPPED, SCALED)
        weight = tl.exp2(score * numbers.unit - log[:, None])
        if MASKED:
            pairs = visible(i[:, None], j[None, :], low[:, None], high[:, None], b, h, seen, inside)
            weight = tl.where(pairs, weight, 0.0)
        at = factors.at + b.to(tl.int64) * factors.b + h.to(tl.int64) * factors.h
        of_key = tl.load(
            at + factor[None, :].to(tl.int64) * factors.n + j[:, None],
            mask=there[:, None] & (factor < count)[None, :],
            other=0.0,
        )
        sums = tl.dot(weight, of_key, sums, input_precision=EXACT)
        keys_at += KEYS * k.n
    return sums


@triton.jit(do_not_specialize=["sizes", "count"])
def columns(
    q, k, lse, factors, to, sizes, seen, bias, numbers, count,
    ROWS: tl.constexpr, KEYS: tl.constexpr, SUMS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    EDGES: tl.constexpr, CAPPED: tl.constexpr, SCALED: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """For a block of queries sum_j P_ij f_kj: `factors` (1|B, 1|H, count, M), `to` (B, H, N, count)."""
    blocks, groups = tl.cdiv(sizes.n, ROWS), tl.cdiv(count, SUMS)
    block, rest = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    factor, unit = rest % groups * SUMS + tl.arange(0, SUMS), rest // groups
    b, h = unit // sizes.heads, unit % sizes.heads
    g = h // sizes.shared
    i = block * ROWS + tl.arange(0, ROWS)
    inside = i < sizes.n
    i = tl.minimum(i, sizes.n - 1)
    d = tl.arange(0, WIDTH)
    from_query = b.to(tl.int64) * q.b + h.to(tl.int64) * q.h + i.to(tl.int64) * q.n
    query = tl.load(q.at + from_query[:, None] + d[None, :], mask=(d < D)[None, :], other=0.0)
    at = unit.to(tl.int64) * sizes.n + i
    log = exponent_of(tl.load(lse + at))
    low, high = key_range(i, b, sizes, seen)
    begin = tl.min(low, 0)
    end = tl.maximum(begin, tl.max(high, 0))
    first, last = begin, begin
    if EDGES:
        first, last = middle(begin, end, tl.max(low, 0), tl.min(high, 0), KEYS)
    sums = tl.zeros((ROWS, SUMS), tl.float32)
    if EDGES == 2:
        sums = by_factors(
            begin, first, begin, end, sums, query, log, i, low, high, b, g, h, k, factors, factor, count, sizes, seen,
            bias, numbers, D, WIDTH, KEYS, True, CAPPED, SCALED, PRECISION, EXACT,
        )  # fmt: skip
    if EDGES:
        sums = by_factors(
            first, last, begin, end, sums, query, log, i, low, high, b, g, h, k, factors, factor, count, sizes, seen,
            bias, numbers, D, WIDTH, KEYS, False, CAPPED, SCALED, PRECISION, EXACT,
        )  # fmt: skip
    sums = by_factors(
        last, end, begin, end, sums, query, log, i, low, high, b, g, h, k, factors, factor, count, sizes, seen,
        bias, numbers, D, WIDTH, KEYS, True, CAPPED, SCALED, PRECISION, EXACT,
    )  # fmt: skip
    tl.store(to + at[:, None] * count + factor[None, :], sums, mask=inside[:, None] & (factor < count)[None, :])
