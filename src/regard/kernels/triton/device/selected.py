"""Single weights, computed once more from the log-sum-exp: of lists of keys, the largest of each row, those of a
region."""

import triton
import triton.language as tl

from regard.kernels.triton.device.scores import HIDDEN, exponent_of, scored
from regard.kernels.triton.device.visibility import key_range, visible


@triton.jit(do_not_specialize=["sizes", "count", "list_stride"])
def lists(
    q, k, lse, keys, begin, end, to, sizes, seen, bias, numbers, count, list_stride,
    ROWS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, CAPPED: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Sums of weights over lists of keys: list x of query i is `keys[begin[i, x] : end[i, x]]`. Key by key, for all
    rows of a block: products are of single rows. `to` (B, H, N, count)."""
    blocks = tl.cdiv(sizes.n, ROWS)
    block, unit = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    b, h = unit // sizes.heads, unit % sizes.heads
    g = h // sizes.shared
    i = block * ROWS + tl.arange(0, ROWS)
    inside = i < sizes.n
    i = tl.minimum(i, sizes.n - 1)
    d = tl.arange(0, WIDTH)
    from_query = b.to(tl.int64) * q.b + h.to(tl.int64) * q.h + i.to(tl.int64) * q.n
    query = tl.load(q.at + from_query[:, None] + d[None, :], mask=(d < D)[None, :], other=0.0).to(tl.float32)
    at = unit.to(tl.int64) * sizes.n + i
    log = exponent_of(tl.load(lse + at))
    low, high = key_range(i, b, sizes, seen)
    which = b.to(tl.int64) * list_stride + i.to(tl.int64) * count
    keys_at = k.at + b.to(tl.int64) * k.b + g.to(tl.int64) * k.h
    for number in range(count):
        first, last = tl.load(begin + which + number), tl.load(end + which + number)
        length = tl.where(inside, last - first, 0)
        sums = tl.zeros((ROWS,), tl.float32)
        for step in range(tl.max(length, 0)):
            some = step < length
            j = tl.load(keys + first + step, mask=some, other=0)
            pairs = visible(i, j, low, high, b, h, seen, some)
            key = tl.load(
                keys_at + j.to(tl.int64)[:, None] * k.n + d[None, :], mask=pairs[:, None] & (d < D)[None, :], other=0.0
            )
            product = tl.sum(query * key.to(tl.float32), 1)
            score, _ = scored(product, i, j, b, h, pairs, numbers, bias, True, CAPPED, SCALED)
            sums += tl.where(pairs, tl.exp2(score * numbers.unit - log), 0.0)
        tl.store(to + at * count + number, sums, mask=inside)


@triton.jit(do_not_specialize=["sizes", "count"])
def links(
    q, k, lse, to_weights, to_keys, sizes, seen, bias, numbers, count,
    ROWS: tl.constexpr, KEYS: tl.constexpr, SLOTS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    CAPPED: tl.constexpr, SCALED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The `count` largest weights of each row and their keys, in any order: (B, H, N, count) each; -1 and 0 where there
    are fewer. A row's slots hold the largest so far; as long as a block has a larger one for some row, it takes the
    place of the row's least, of equals of the last key's."""
    blocks = tl.cdiv(sizes.n, ROWS)
    block, unit = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    b, h = unit // sizes.heads, unit % sizes.heads
    g = h // sizes.shared
    i = block * ROWS + tl.arange(0, ROWS)
    inside = i < sizes.n
    i = tl.minimum(i, sizes.n - 1)
    d, step, slot = tl.arange(0, WIDTH), tl.arange(0, KEYS), tl.arange(0, SLOTS)
    from_query = b.to(tl.int64) * q.b + h.to(tl.int64) * q.h + i.to(tl.int64) * q.n
    query = tl.load(q.at + from_query[:, None] + d[None, :], mask=(d < D)[None, :], other=0.0)
    low, high = key_range(i, b, sizes, seen)
    begin, end = tl.min(low, 0), tl.max(high, 0)
    # Slots beyond `count` are never the least; empty ones have numbers of their own, so that one is taken at a time.
    best = tl.where((slot < count)[None, :], tl.full((ROWS, SLOTS), HIDDEN, tl.float32), 3e38)
    keys = tl.zeros((ROWS, SLOTS), tl.int32) - 1 - slot[None, :]
    keys_at = k.at + b.to(tl.int64) * k.b + g.to(tl.int64) * k.h + begin.to(tl.int64) * k.n
    for start in range(begin, end, KEYS):
        j = start + step
        there = j < end
        key = tl.load(keys_at + (d[:, None] + step[None, :] * k.n), mask=(d < D)[:, None] & there[None, :], other=0.0)
        product = tl.dot(query, key, input_precision=PRECISION)
        score, _ = scored(product, i[:, None], j[None, :], b, h, there[None, :], numbers, bias, True, CAPPED, SCALED)
        pairs = visible(i[:, None], j[None, :], low[:, None], high[:, None], b, h, seen, there[None, :])
        score = tl.where(pairs, score, HIDDEN)
        least, largest = tl.min(best, 1), tl.max(score, 1)
        while tl.max((largest > least).to(tl.int32), 0) > 0:
            new = tl.min(tl.where(score == largest[:, None], j[None, :], 2147483647), 1)
            lowest = best == least[:, None]
            last = tl.max(tl.where(lowest, keys, -2147483647), 1)
            replaced = lowest & (keys == last[:, None]) & (largest > least)[:, None]
            best = tl.where(replaced, largest[:, None], best)
            keys = tl.where(replaced, new[:, None], keys)
            score = tl.where(j[None, :] == new[:, None], HIDDEN, score)
            least, largest = tl.min(best, 1), tl.max(score, 1)
        keys_at += KEYS * k.n
    at = unit.to(tl.int64) * sizes.n + i
    log = exponent_of(tl.load(lse + at))
    full = (keys >= 0) & (slot < count)[None, :]
    weight = tl.where(full, tl.exp2(tl.where(full, best, 0.0) * numbers.unit - log[:, None]), 0.0)
    to = at[:, None] * count + slot[None, :]
    mask = inside[:, None] & (slot < count)[None, :]
    tl.store(to_weights + to, weight, mask=mask)
    tl.store(to_keys + to, tl.where(weight > 0, keys, -1), mask=mask)


@triton.jit(do_not_specialize=["sizes", "row", "rows", "column", "columns"])
def region(
    q, k, lse, to, sizes, seen, bias, numbers, row, rows, column, columns,
    ROWS: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, CAPPED: tl.constexpr,
    SCALED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The weights of `rows` queries from `row` on against `columns` keys from `column` on: `to` (B, H, rows,
    columns)."""
    across, down = tl.cdiv(columns, KEYS), tl.cdiv(rows, ROWS)
    rest, unit = tl.program_id(0) % (across * down), tl.program_id(0) // (across * down)
    b, h = unit // sizes.heads, unit % sizes.heads
    g = h // sizes.shared
    x, y = rest // across * ROWS + tl.arange(0, ROWS), rest % across * KEYS + tl.arange(0, KEYS)
    i, j = row + tl.minimum(x, rows - 1), column + tl.minimum(y, columns - 1)
    d = tl.arange(0, WIDTH)
    from_query = b.to(tl.int64) * q.b + h.to(tl.int64) * q.h + i.to(tl.int64) * q.n
    query = tl.load(q.at + from_query[:, None] + d[None, :], mask=(d < D)[None, :], other=0.0)
    low, high = key_range(i, b, sizes, seen)
    there = (j >= tl.min(low, 0)) & (j < tl.max(high, 0))
    from_key = b.to(tl.int64) * k.b + g.to(tl.int64) * k.h + j.to(tl.int64) * k.n
    key = tl.load(k.at + from_key[None, :] + d[:, None], mask=(d < D)[:, None] & there[None, :], other=0.0)
    product = tl.dot(query, key, input_precision=PRECISION)
    score, _ = scored(product, i[:, None], j[None, :], b, h, there[None, :], numbers, bias, True, CAPPED, SCALED)
    pairs = visible(i[:, None], j[None, :], low[:, None], high[:, None], b, h, seen, there[None, :])
    log = exponent_of(tl.load(lse + unit.to(tl.int64) * sizes.n + i))
    weight = tl.where(pairs, tl.exp2(score * numbers.unit - log[:, None]), 0.0)
    at = (unit.to(tl.int64) * rows + x)[:, None] * columns + y[None, :]
    tl.store(to + at, weight, mask=(x < rows)[:, None] & (y < columns)[None, :])
