"""Gradients, from the output's gradient and the log-sum-exp; no weight was kept, and nothing is added atomically: each
number is summed by one program, in one order.

    p = 2 ^ (score * unit - lse)      dp = d_out v^T      ds = p (dp - delta),  delta = rowsum(d_out out) - d_lse
    d_queries   a block of queries goes through its keys          dq += ds k
    d_keys      a block of keys goes through all query heads      dk += ds^T q,  dv += p^T d_out
                of its kv head, and their queries
    d_scores    ds itself, of some queries: biases sum it up
"""

import triton
import triton.language as tl

from regard.kernels.triton.device.scores import exponent_of, scored, stays
from regard.kernels.triton.device.visibility import key_range, middle, query_range, visible


@triton.jit
def score_gradients(
    product, d_weight, i, j, low, high, b, h, log, delta, row, column, inside, seen, bias, drop, numbers,
    MASKED: tl.constexpr, CAPPED: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Of pairs (i, j), in any orientation: the weights that the values get; the gradients of scores, before and after
    the softcap's slope."""
    score, curved = scored(product, i, j, b, h, inside, numbers, bias, MASKED, CAPPED, SCALED)
    weight = tl.exp2(score * numbers.unit - log)
    if drop is not None:
        stay = stays(row, column, drop.threshold)
        d_weight = tl.where(stay, d_weight * drop.kept, 0.0)
    ds = weight * (d_weight - delta)
    if MASKED:
        pairs = visible(i, j, low, high, b, h, seen, inside)
        weight, ds = tl.where(pairs, weight, 0.0), tl.where(pairs, ds, 0.0)
    if drop is not None:
        weight = tl.where(stay, weight, 0.0)
    if CAPPED:
        return weight, ds, ds * (1.0 - curved * curved)
    return weight, ds, ds


@triton.jit
def queries_over_keys(
    first, last, begin, end, dq, query, d_out, log, delta, i, low, high, b, g, h, row, k, v, seen, bias, drop, numbers,
    D: tl.constexpr, E: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr, KEYS: tl.constexpr,
    MASKED: tl.constexpr, CAPPED: tl.constexpr, SCALED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds what the keys [first, last) give to the gradient of a block of queries."""
    d, e, step = tl.arange(0, WIDTH), tl.arange(0, VALUES), tl.arange(0, KEYS)
    keys_at = k.at + b.to(tl.int64) * k.b + g.to(tl.int64) * k.h + first.to(tl.int64) * k.n
    values_at = v.at + b.to(tl.int64) * v.b + g.to(tl.int64) * v.h + first.to(tl.int64) * v.n
    for start in range(first, last, KEYS):
        j = start + step
        there = (j >= begin) & (j < end)
        key_mask, value_mask = (d < D)[None, :], (e < E)[:, None]
        if MASKED:
            key_mask, value_mask = key_mask & there[:, None], value_mask & there[None, :]
        key = tl.load(keys_at + (step[:, None] * k.n + d[None, :]), mask=key_mask, other=0.0)
        value = tl.load(values_at + (e[:, None] + step[None, :] * v.n), mask=value_mask, other=0.0)
        product = tl.dot(query, tl.trans(key), input_precision=PRECISION)
        d_weight = tl.dot(d_out, value, input_precision=PRECISION)
        column = j
        if drop is not None:
            column = tl.load(drop.cols + b.to(tl.int64) * drop.col_b + j, mask=there, other=0)
        _, _, ds = score_gradients(
            product, d_weight, i[:, None], j[None, :], low[:, None], high[:, None], b, h, log[:, None], delta[:, None],
            row[:, None], column[None, :], there[None, :], seen, bias, drop, numbers, MASKED, CAPPED, SCALED,
        )  # fmt: skip
        dq = tl.dot(ds.to(key.dtype), key, dq, input_precision=PRECISION)
        keys_at += KEYS * k.n
        values_at += KEYS * v.n
    return dq


@triton.jit(do_not_specialize=["sizes"])
def d_queries(
    q, k, v, d_out, dq, lse, delta, sizes, seen, bias, numbers, drop,
    ROWS: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr, E: tl.constexpr, WIDTH: tl.constexpr,
    VALUES: tl.constexpr, EDGES: tl.constexpr, CAPPED: tl.constexpr, SCALED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of one block of queries. EDGES: as in `forward`."""
    blocks = tl.cdiv(sizes.n, ROWS)
    unit = tl.program_id(0) // blocks
    block = blocks - 1 - tl.program_id(0) % blocks
    b, h = unit // sizes.heads, unit % sizes.heads
    g = h // sizes.shared
    i = block * ROWS + tl.arange(0, ROWS)
    inside = i < sizes.n
    i = tl.minimum(i, sizes.n - 1)
    d, e = tl.arange(0, WIDTH), tl.arange(0, VALUES)
    from_query = b.to(tl.int64) * q.b + h.to(tl.int64) * q.h + i.to(tl.int64) * q.n
    query = tl.load(q.at + from_query[:, None] + d[None, :], mask=(d < D)[None, :], other=0.0)
    from_out = b.to(tl.int64) * d_out.b + h.to(tl.int64) * d_out.h + i.to(tl.int64) * d_out.n
    gradient = tl.load(d_out.at + from_out[:, None] + e[None, :], mask=(e < E)[None, :], other=0.0)
    at = unit.to(tl.int64) * sizes.n + i
    log, less = exponent_of(tl.load(lse + at)), tl.load(delta + at)
    row = i
    if drop is not None:
        row = tl.load(drop.rows + b.to(tl.int64) * drop.row_b + h * drop.row_h + i)

    low, high = key_range(i, b, sizes, seen)
    begin = tl.min(low, 0)
    end = tl.maximum(begin, tl.max(high, 0))
    sums = tl.zeros((ROWS, WIDTH), tl.float32)
    first, last = begin, begin
    if EDGES:
        first, last = middle(begin, end, tl.max(low, 0), tl.min(high, 0), KEYS)
    if EDGES == 2:
        sums = queries_over_keys(
            begin, first, begin, end, sums, query, gradient, log, less, i, low, high, b, g, h, row, k, v, seen, bias,
            drop, numbers, D, E, WIDTH, VALUES, KEYS, True, CAPPED, SCALED, PRECISION,
        )  # fmt: skip
    if EDGES:
        sums = queries_over_keys(
            first, last, begin, end, sums, query, gradient, log, less, i, low, high, b, g, h, row, k, v, seen, bias,
            drop, numbers, D, E, WIDTH, VALUES, KEYS, False, CAPPED, SCALED, PRECISION,
        )  # fmt: skip
    sums = queries_over_keys(
        last, end, begin, end, sums, query, gradient, log, less, i, low, high, b, g, h, row, k, v, seen, bias,
        drop, numbers, D, E, WIDTH, VALUES, KEYS, True, CAPPED, SCALED, PRECISION,
    )  # fmt: skip
    to = b.to(tl.int64) * dq.b + h.to(tl.int64) * dq.h + i.to(tl.int64) * dq.n
    result = (sums * numbers.slope).to(dq.at.dtype.element_ty)
    tl.store(dq.at + to[:, None] + d[None, :], result, mask=inside[:, None] & (d < D)[None, :])


@triton.jit
def keys_over_queries(
    first, last, dk, dv, key, value, j, there, b, h, q, d_out, lse, delta, sizes, seen, bias, drop, numbers,
    D: tl.constexpr, E: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr, ROWS: tl.constexpr,
    MASKED: tl.constexpr, CAPPED: tl.constexpr, SCALED: tl.constexpr, PRECISION: tl.constexpr,
    WANT_K: tl.constexpr, WANT_V: tl.constexpr,
):  # fmt: skip
    """Adds what the queries [first, last) of head `h` give to the gradients of a block of keys. Keys are rows here."""
    d, e, step = tl.arange(0, WIDTH), tl.arange(0, VALUES), tl.arange(0, ROWS)
    queries_at = q.at + b.to(tl.int64) * q.b + h.to(tl.int64) * q.h
    outs_at = d_out.at + b.to(tl.int64) * d_out.b + h.to(tl.int64) * d_out.h
    rows_at = (b.to(tl.int64) * sizes.heads + h) * sizes.n
    for start in range(first, last, ROWS):
        i = start + step
        known = i < sizes.n
        if MASKED:
            i = tl.minimum(i, sizes.n - 1)
        at = i.to(tl.int64)
        query = tl.load(queries_at + at[:, None] * q.n + d[None, :], mask=(d < D)[None, :], other=0.0)
        gradient = tl.load(outs_at + at[:, None] * d_out.n + e[None, :], mask=(e < E)[None, :], other=0.0)
        log, less = exponent_of(tl.load(lse + rows_at + i)), tl.load(delta + rows_at + i)
        row, column = i, j
        if drop is not None:
            row = tl.load(drop.rows + b.to(tl.int64) * drop.row_b + h * drop.row_h + i)
            column = tl.load(drop.cols + b.to(tl.int64) * drop.col_b + j, mask=there, other=0)
        product = tl.dot(key, tl.trans(query), input_precision=PRECISION)
        d_weight = tl.dot(value, tl.trans(gradient), input_precision=PRECISION)
        low, high = i, i
        if MASKED:
            low, high = key_range(i, b, sizes, seen)
            high = tl.where(known, high, 0)
        weight, _, ds = score_gradients(
            product, d_weight, i[None, :], j[:, None], low[None, :], high[None, :], b, h, log[None, :], less[None, :],
            row[None, :], column[:, None], there[:, None], seen, bias, drop, numbers, MASKED, CAPPED, SCALED,
        )  # fmt: skip
        if WANT_V:
            dv = tl.dot(weight.to(gradient.dtype), gradient, dv, input_precision=PRECISION)
        if WANT_K:
            dk = tl.dot(ds.to(query.dtype), query, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=["sizes"])
def d_keys(
    q, k, v, d_out, dk, dv, lse, delta, sizes, seen, bias, numbers, drop,
    ROWS: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr, E: tl.constexpr, WIDTH: tl.constexpr,
    VALUES: tl.constexpr, EDGES: tl.constexpr, CAPPED: tl.constexpr, SCALED: tl.constexpr, PRECISION: tl.constexpr,
    WANT_K: tl.constexpr, WANT_V: tl.constexpr,
):  # fmt: skip
    """The gradients of one block of keys and its values. EDGES: 0 where every block of queries is masked."""
    blocks = tl.cdiv(sizes.m, KEYS)
    groups = sizes.heads // sizes.shared
    unit, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    b, g = unit // groups, unit % groups
    start = block * KEYS
    stop = tl.minimum(start + KEYS, sizes.m)
    j = start + tl.arange(0, KEYS)
    there = j < sizes.m
    if seen.key_start is not None:
        there = there & (j >= tl.load(seen.key_start + b))
    if seen.key_end is not None:
        there = there & (j < tl.load(seen.key_end + b))
    d, e = tl.arange(0, WIDTH), tl.arange(0, VALUES)
    from_key = b.to(tl.int64) * k.b + g.to(tl.int64) * k.h + j.to(tl.int64) * k.n
    key = tl.load(k.at + from_key[:, None] + d[None, :], mask=there[:, None] & (d < D)[None, :], other=0.0)
    from_value = b.to(tl.int64) * v.b + g.to(tl.int64) * v.h + j.to(tl.int64) * v.n
    value = tl.load(v.at + from_value[:, None] + e[None, :], mask=there[:, None] & (e < E)[None, :], other=0.0)

    begin, end, all_begin, all_end = query_range(start, stop, b, sizes, seen, KEYS)
    end = tl.maximum(begin, end)
    all_end = tl.where(start + KEYS > sizes.m, all_begin, all_end)  # (a block that is not full is masked)
    first, last = begin, begin
    if EDGES:
        first, last = middle(begin, end, all_begin, all_end, ROWS)
    k_sums, v_sums = tl.zeros((KEYS, WIDTH), tl.float32), tl.zeros((KEYS, VALUES), tl.float32)
    for head in range(sizes.shared):
        h = g * sizes.shared + head
        if EDGES:
            k_sums, v_sums = keys_over_queries(
                begin, first, k_sums, v_sums, key, value, j, there, b, h, q, d_out, lse, delta, sizes, seen, bias, drop,
                numbers, D, E, WIDTH, VALUES, ROWS, True, CAPPED, SCALED, PRECISION, WANT_K, WANT_V,
            )  # fmt: skip
            k_sums, v_sums = keys_over_queries(
                first, last, k_sums, v_sums, key, value, j, there, b, h, q, d_out, lse, delta, sizes, seen, bias, drop,
                numbers, D, E, WIDTH, VALUES, ROWS, False, CAPPED, SCALED, PRECISION, WANT_K, WANT_V,
            )  # fmt: skip
        k_sums, v_sums = keys_over_queries(
            last, end, k_sums, v_sums, key, value, j, there, b, h, q, d_out, lse, delta, sizes, seen, bias, drop,
            numbers, D, E, WIDTH, VALUES, ROWS, True, CAPPED, SCALED, PRECISION, WANT_K, WANT_V,
        )  # fmt: skip
    there = j < sizes.m
    if WANT_K:
        to = b.to(tl.int64) * dk.b + g.to(tl.int64) * dk.h + j.to(tl.int64) * dk.n
        result = (k_sums * numbers.slope).to(dk.at.dtype.element_ty)
        tl.store(dk.at + to[:, None] + d[None, :], result, mask=there[:, None] & (d < D)[None, :])
    if WANT_V:
        kept = 1.0
        if drop is not None:
            kept = drop.kept
        to = b.to(tl.int64) * dv.b + g.to(tl.int64) * dv.h + j.to(tl.int64) * dv.n
        result = (v_sums * kept).to(dv.at.dtype.element_ty)
        tl.store(dv.at + to[:, None] + e[None, :], result, mask=there[:, None] & (e < E)[None, :])


@triton.jit(do_not_specialize=["sizes", "row", "count"])
def d_scores(
    q, k, v, d_out, ds, lse, delta, sizes, seen, bias, numbers, drop, row, count,
    ROWS: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr, E: tl.constexpr, WIDTH: tl.constexpr,
    VALUES: tl.constexpr, CAPPED: tl.constexpr, SCALED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradients of scores (after the softcap) of `count` queries from `row` on, to `ds`. It holds zeros
    before: blocks that nobody sees are left out."""
    blocks, columns = tl.cdiv(count, ROWS), tl.cdiv(sizes.m, KEYS)
    unit, rest = tl.program_id(0) // (blocks * columns), tl.program_id(0) % (blocks * columns)
    b, h = unit // sizes.heads, unit % sizes.heads
    g = h // sizes.shared
    x = rest // columns * ROWS + tl.arange(0, ROWS)
    inside = x < count
    i = row + tl.minimum(x, count - 1)
    j = rest % columns * KEYS + tl.arange(0, KEYS)
    there = j < sizes.m
    to = ds.at + ds.first + unit.to(tl.int64) * ds.unit + (x.to(tl.int64) * ds.row)[:, None] + j[None, :]
    low, high = key_range(i, b, sizes, seen)
    begin, end = tl.min(low, 0), tl.max(high, 0)
    if begin < rest % columns * KEYS + KEYS and end > rest % columns * KEYS:
        d, e = tl.arange(0, WIDTH), tl.arange(0, VALUES)
        there = (j >= begin) & (j < end)
        from_query = b.to(tl.int64) * q.b + h.to(tl.int64) * q.h + i.to(tl.int64) * q.n
        query = tl.load(q.at + from_query[:, None] + d[None, :], mask=(d < D)[None, :], other=0.0)
        from_out = b.to(tl.int64) * d_out.b + h.to(tl.int64) * d_out.h + i.to(tl.int64) * d_out.n
        gradient = tl.load(d_out.at + from_out[:, None] + e[None, :], mask=(e < E)[None, :], other=0.0)
        from_key = b.to(tl.int64) * k.b + g.to(tl.int64) * k.h + j.to(tl.int64) * k.n
        key = tl.load(k.at + from_key[None, :] + d[:, None], mask=there[None, :] & (d < D)[:, None], other=0.0)
        from_value = b.to(tl.int64) * v.b + g.to(tl.int64) * v.h + j.to(tl.int64) * v.n
        value = tl.load(v.at + from_value[None, :] + e[:, None], mask=there[None, :] & (e < E)[:, None], other=0.0)
        at = unit.to(tl.int64) * sizes.n + i
        log, less = exponent_of(tl.load(lse + at)), tl.load(delta + at)
        hashes, column = i, j
        if drop is not None:
            hashes = tl.load(drop.rows + b.to(tl.int64) * drop.row_b + h * drop.row_h + i)
            column = tl.load(drop.cols + b.to(tl.int64) * drop.col_b + j, mask=there, other=0)
        _, gradients, _ = score_gradients(
            tl.dot(query, key, input_precision=PRECISION), tl.dot(gradient, value, input_precision=PRECISION),
            i[:, None], j[None, :], low[:, None], high[:, None], b, h, log[:, None], less[:, None],
            hashes[:, None], column[None, :], there[None, :], seen, bias, drop, numbers, True, CAPPED, SCALED,
        )  # fmt: skip
        tl.store(to, gradients, mask=inside[:, None] & there[None, :])
