"""From sums over keys to output, log-sum-exp and statistics; and keys that were split among programs, joined."""

import triton
import triton.language as tl

from regard.kernels.triton.device.scores import FLOOR, HIDDEN, LN_2, LOG2_E


@triton.jit
def finished(top, total, sinks, b, h, sizes, numbers):
    """Of rows with a maximum score and a sum of weights relative to it: the log-sum-exp as an exponent of 2, and what
    such a weight is multiplied by to be one of the softmax. 0 for rows that see nothing."""
    base = tl.maximum(top, FLOOR) * numbers.unit
    most, rest = base, tl.zeros_like(base)
    if sinks is not None:
        sink = tl.load(sinks.at + b * sinks.b + h * sinks.h).to(tl.float32) * LOG2_E
        most = tl.maximum(base, sink)
        rest = tl.exp2(sink - most)
    shrunk = tl.exp2(base - most)
    whole = total * shrunk + rest
    filled = tl.where(whole == 0, 1.0, whole)  # (compared so that NaN stays NaN)
    factor = tl.where(total == 0, 0.0, shrunk / filled)
    log = tl.where(whole == 0, float("-inf"), most + tl.log2(filled))
    return log, factor


@triton.jit
def store_look(look, at, inside, top, total, logs, ahead, apart, target, log, factor, numbers, BEHIND: tl.constexpr):
    """Statistics of rows, from their sums. `log`: the log-sum-exp as an exponent of 2."""
    some = factor != 0  # (0 too where a sink leaves nothing for the keys)
    whole = tl.where(total == 0, 1.0, total)
    if look.entropy is not None:
        # log2 of a weight is its exponent above the row's base, and base - log for all of them: no cancellation.
        below = tl.where(some, tl.maximum(top, FLOOR) * numbers.unit - log, 0.0)
        tl.store(look.entropy + at, -(logs + total * below) * factor * LN_2, mask=inside)
    if look.peak is not None:
        tl.store(look.peak + at, factor, mask=inside)
    if look.target is not None:
        tl.store(look.target + at, tl.where(some, target, -1), mask=inside)
    if look.offset is not None:
        tl.store(look.offset + at, tl.where(some, ahead / whole, 0.0), mask=inside)
    if look.distance is not None:
        if BEHIND:  # no key stands ahead of its query
            apart = -ahead
        tl.store(look.distance + at, tl.where(some, apart / whole, 0.0), mask=inside)


@triton.jit
def store_rows(
    out, lse, look, acc, top, total, logs, ahead, apart, target, sinks, kept, b, h, i, inside, sizes, numbers,
    E: tl.constexpr, VALUES: tl.constexpr, BEHIND: tl.constexpr,
):  # fmt: skip
    """Output, log-sum-exp and statistics of rows (b, h, i). `kept`: dropout's factor."""
    log, factor = finished(top, total, sinks, b, h, sizes, numbers)
    at = (b.to(tl.int64) * sizes.heads + h) * sizes.n + i
    tl.store(lse + at, log * LN_2, mask=inside)
    if out is not None:
        e = tl.arange(0, VALUES)
        to = b.to(tl.int64) * out.b + h.to(tl.int64) * out.h + i.to(tl.int64) * out.n
        values = acc * (factor * kept)[:, None]
        tl.store(out.at + to[:, None] + e, values.to(out.at.dtype.element_ty), mask=inside[:, None] & (e < E))
    if look is not None:
        store_look(look, at, inside, top, total, logs, ahead, apart, target, log, factor, numbers, BEHIND)


@triton.jit(do_not_specialize=["sizes", "batch", "parts"])
def combine(
    out, lse, look, partial, sinks, kept, sizes, numbers, batch, parts,
    ROWS: tl.constexpr, E: tl.constexpr, VALUES: tl.constexpr, BEHIND: tl.constexpr,
):  # fmt: skip
    """Joins what parts of the keys gave to some rows, in the order of the keys."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    count = batch * sizes.heads * sizes.n
    inside = row < count
    row = tl.minimum(row, count - 1)
    e = tl.arange(0, VALUES)
    top = tl.full((ROWS,), HIDDEN, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    logs, ahead, apart = total, total, total
    target = tl.full((ROWS,), -1, tl.int32)
    acc = tl.zeros((ROWS, VALUES), tl.float32)
    at = row.to(tl.int64)
    for _ in range(parts):
        more = tl.load(partial.total + at)
        part_top = tl.load(partial.top + at)
        higher = tl.maximum(top, part_top)
        base = tl.maximum(higher, FLOOR) * numbers.unit
        fall = tl.maximum(top, FLOOR) * numbers.unit - base
        part_fall = tl.maximum(part_top, FLOOR) * numbers.unit - base
        shrunk, part_shrunk = tl.exp2(fall), tl.exp2(part_fall)
        if partial.logs is not None:
            logs = (logs + total * fall) * shrunk
            logs += (tl.load(partial.logs + at) + more * part_fall) * part_shrunk
        if partial.ahead is not None:
            ahead = ahead * shrunk + tl.load(partial.ahead + at) * part_shrunk
        if partial.apart is not None:
            apart = apart * shrunk + tl.load(partial.apart + at) * part_shrunk
        if partial.target is not None:
            target = tl.where(part_top > top, tl.load(partial.target + at), target)  # (the first of equals stays)
        if out is not None:
            values = tl.load(partial.acc + at[:, None] * E + e, mask=e < E, other=0.0)
            acc = acc * shrunk[:, None] + values * part_shrunk[:, None]
        total = total * shrunk + more * part_shrunk
        top = higher
        at += count
    i, h = row % sizes.n, row // sizes.n % sizes.heads
    b = row // sizes.n // sizes.heads
    store_rows(
        out, lse, look, acc, top, total, logs, ahead, apart, target, sinks, kept, b, h, i, inside, sizes, numbers,
        E, VALUES, BEHIND,
    )  # fmt: skip
