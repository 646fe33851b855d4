"""One block of queries against the keys that they see: online softmax, and statistics of rows in the same loop.

    top      the largest score so far             total   sum of weights, relative to it
    logs     sum of weight * its exponent         ahead, apart   sums of weight * (j - i) and weight * |j - i|

A block holds queries of one head, or with PACKED those of all heads that share a kv head, so that keys and values are
read once for all of them. With a `partial` the keys are split among programs, and `finish.combine` joins what they
give.
"""

import triton
import triton.language as tl

from regard.kernels.triton.device.finish import store_rows
from regard.kernels.triton.device.scores import FLOOR, HIDDEN, scored, stays
from regard.kernels.triton.device.visibility import key_range, middle, visible


@triton.jit
def over_keys(
    first, last, begin, end, acc, top, total, logs, ahead, apart, target,
    query, i, low, high, b, g, h, row, place, k, v, seen, bias, drop, moments, numbers,
    D: tl.constexpr, E: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr, KEYS: tl.constexpr,
    MASKED: tl.constexpr, CAPPED: tl.constexpr, SCALED: tl.constexpr, PRECISION: tl.constexpr,
    OUTPUT: tl.constexpr, LOGS: tl.constexpr, AHEAD: tl.constexpr, APART: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """Adds the keys [first, last), some at a time. `row`: dropout's numbers of the rows; `place`: their positions."""
    d, e, step = tl.arange(0, WIDTH), tl.arange(0, VALUES), tl.arange(0, KEYS)
    # 64-bit addresses of a block's first row, 32-bit offsets within a block
    keys_at = k.at + b.to(tl.int64) * k.b + g.to(tl.int64) * k.h + first.to(tl.int64) * k.n
    values_at = v.at + b.to(tl.int64) * v.b + g.to(tl.int64) * v.h + first.to(tl.int64) * v.n
    for start in range(first, last, KEYS):
        j = start + step
        there = (j >= begin) & (j < end)  # what no row sees is not read: it may hold anything
        from_key = keys_at + (d[:, None] + step[None, :] * k.n)
        if MASKED:
            key = tl.load(from_key, mask=(d < D)[:, None] & there[None, :], other=0.0)
        elif D == WIDTH:
            key = tl.load(from_key)
        else:
            key = tl.load(from_key, mask=(d < D)[:, None], other=0.0)
        product = tl.dot(query, key, input_precision=PRECISION)
        inside = there[None, :]
        score, _ = scored(product, i[:, None], j[None, :], b, h, inside, numbers, bias, MASKED, CAPPED, SCALED)
        if MASKED:
            pairs = visible(i[:, None], j[None, :], low[:, None], high[:, None], b, h, seen, inside)
            score = tl.where(pairs, score, HIDDEN)
        largest = tl.max(score, 1)
        higher = tl.maximum(top, largest)
        base = tl.maximum(higher, FLOOR) * numbers.unit
        fall = tl.maximum(top, FLOOR) * numbers.unit - base
        shrunk = tl.exp2(fall)
        exponent = score * numbers.unit - base[:, None]
        weight = tl.exp2(exponent)
        if LOGS:
            logs = (logs + total * fall) * shrunk + tl.sum(weight * exponent, 1)
        if AHEAD or APART:
            if moments is not None:
                position = tl.load(moments.keys + b.to(tl.int64) * moments.key_stride + j, mask=there, other=0)
            else:
                position = j
            gap = weight * (position[None, :] - place[:, None]).to(tl.float32)
            if AHEAD:
                ahead = ahead * shrunk + tl.sum(gap, 1)
            if APART:
                apart = apart * shrunk + tl.sum(tl.abs(gap), 1)
        if TARGET:  # the first key whose score is the largest; compared before scores are scaled, which may round
            where = tl.min(tl.where(score == largest[:, None], j[None, :], 2147483647), 1)
            target = tl.where(largest > top, where, target)
        total = total * shrunk + tl.sum(weight, 1)
        if OUTPUT:
            if drop is not None:
                column = tl.load(drop.cols + b.to(tl.int64) * drop.col_b + j, mask=there, other=0)
                weight = tl.where(stays(row[:, None], column[None, :], drop.threshold), weight, 0.0)
            from_value = values_at + (step[:, None] * v.n + e[None, :])
            if MASKED:
                value = tl.load(from_value, mask=there[:, None] & (e < E)[None, :], other=0.0)
            elif E == VALUES:
                value = tl.load(from_value)
            else:
                value = tl.load(from_value, mask=(e < E)[None, :], other=0.0)
            acc = acc * shrunk[:, None]
            acc = tl.dot(weight.to(value.dtype), value, acc, input_precision=PRECISION)
            values_at += KEYS * v.n
        keys_at += KEYS * k.n
        top = higher
    return acc, top, total, logs, ahead, apart, target


@triton.jit(do_not_specialize=["sizes", "per_part"])
def forward(
    q, k, v, out, lse, look, partial, sizes, seen, bias, numbers, sinks, drop, moments, per_part,
    ROWS: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr, E: tl.constexpr, WIDTH: tl.constexpr,
    VALUES: tl.constexpr, PACKED: tl.constexpr, EDGES: tl.constexpr, CAPPED: tl.constexpr, SCALED: tl.constexpr,
    PRECISION: tl.constexpr, OUTPUT: tl.constexpr, LOGS: tl.constexpr, AHEAD: tl.constexpr, APART: tl.constexpr,
    BEHIND: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """EDGES: 0 where every block is masked, 1 where ranges of a block's rows end in different places, 2 where they also
    begin in different ones. `per_part`: keys for each program of the second axis."""
    rows = sizes.n * sizes.shared if PACKED else sizes.n
    units = sizes.heads // sizes.shared if PACKED else sizes.heads
    blocks = tl.cdiv(rows, ROWS)
    unit = tl.program_id(0) // blocks
    block = blocks - 1 - tl.program_id(0) % blocks  # with a causal mask the last ones are the longest
    b = unit // units
    x = block * ROWS + tl.arange(0, ROWS)
    inside = x < rows
    x = tl.minimum(x, rows - 1)  # (rows beyond the last one repeat it)
    if PACKED:
        g = unit % units
        i, h = x % sizes.n, g * sizes.shared + x // sizes.n
        h_pair = h[:, None]
    else:
        i, h = x, unit % units
        g = h // sizes.shared
        h_pair = h
    d = tl.arange(0, WIDTH)
    from_query = b.to(tl.int64) * q.b + h.to(tl.int64) * q.h + i.to(tl.int64) * q.n
    query = tl.load(q.at + from_query[:, None] + d[None, :], mask=(d < D)[None, :], other=0.0)
    row, place = i, i + sizes.q_start
    kept = 1.0
    if drop is not None:
        row = tl.load(drop.rows + b.to(tl.int64) * drop.row_b + h * drop.row_h + i)
        kept = drop.kept
    if moments is not None:
        place = tl.load(moments.queries + b.to(tl.int64) * moments.query_stride + i)

    low, high = key_range(i, b, sizes, seen)
    begin, end = tl.min(low, 0), tl.max(high, 0)
    if partial is not None:
        begin = tl.maximum(begin, tl.program_id(1) * per_part)
        end = tl.minimum(end, (tl.program_id(1) + 1) * per_part)
    end = tl.maximum(begin, end)
    top = tl.full((ROWS,), HIDDEN, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    logs, ahead, apart = total, total, total
    target = tl.full((ROWS,), -1, tl.int32)
    acc = tl.zeros((ROWS, VALUES), tl.float32)
    first, last = begin, begin
    if EDGES:
        first, last = middle(begin, end, tl.max(low, 0), tl.min(high, 0), KEYS)
    if EDGES == 2:
        acc, top, total, logs, ahead, apart, target = over_keys(
            begin, first, begin, end, acc, top, total, logs, ahead, apart, target,
            query, i, low, high, b, g, h_pair, row, place, k, v, seen, bias, drop, moments, numbers,
            D, E, WIDTH, VALUES, KEYS, True, CAPPED, SCALED, PRECISION, OUTPUT, LOGS, AHEAD, APART, TARGET,
        )  # fmt: skip
    if EDGES:
        acc, top, total, logs, ahead, apart, target = over_keys(
            first, last, begin, end, acc, top, total, logs, ahead, apart, target,
            query, i, low, high, b, g, h_pair, row, place, k, v, seen, bias, drop, moments, numbers,
            D, E, WIDTH, VALUES, KEYS, False, CAPPED, SCALED, PRECISION, OUTPUT, LOGS, AHEAD, APART, TARGET,
        )  # fmt: skip
    acc, top, total, logs, ahead, apart, target = over_keys(
        last, end, begin, end, acc, top, total, logs, ahead, apart, target,
        query, i, low, high, b, g, h_pair, row, place, k, v, seen, bias, drop, moments, numbers,
        D, E, WIDTH, VALUES, KEYS, True, CAPPED, SCALED, PRECISION, OUTPUT, LOGS, AHEAD, APART, TARGET,
    )  # fmt: skip
    if partial is None:
        store_rows(
            out, lse, look, acc, top, total, logs, ahead, apart, target, sinks, kept, b, h, i, inside, sizes, numbers,
            E, VALUES, BEHIND,
        )  # fmt: skip
    else:
        batch = tl.num_programs(0) // blocks // units
        at = tl.program_id(1).to(tl.int64) * batch * sizes.heads * sizes.n
        at += (b.to(tl.int64) * sizes.heads + h) * sizes.n + i
        store_partial(partial, at, inside, acc, top, total, logs, ahead, apart, target, OUTPUT, E, VALUES)


@triton.jit
def store_partial(
    partial, at, inside, acc, top, total, logs, ahead, apart, target, OUTPUT: tl.constexpr, E: tl.constexpr,
    VALUES: tl.constexpr,
):  # fmt: skip
    """The sums of a part of the keys."""
    tl.store(partial.top + at, top, mask=inside)
    tl.store(partial.total + at, total, mask=inside)
    if partial.logs is not None:
        tl.store(partial.logs + at, logs, mask=inside)
    if partial.ahead is not None:
        tl.store(partial.ahead + at, ahead, mask=inside)
    if partial.apart is not None:
        tl.store(partial.apart + at, apart, mask=inside)
    if partial.target is not None:
        tl.store(partial.target + at, target, mask=inside)
    if OUTPUT:
        e = tl.arange(0, VALUES)
        tl.store(partial.acc + at[:, None] * E + e[None, :], acc, mask=inside[:, None] & (e < E)[None, :])
