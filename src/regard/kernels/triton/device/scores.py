"""From products to scores, and which weights dropout keeps.

Scores are kept in units of their own, and exponents of 2 are `score * unit`: in plain attention the score is the
product itself, and scale and log2(e) are one multiplication, fused with the subtraction of the maximum. `HIDDEN` is
finite, so that no difference of two of them is NaN; `FLOOR` lies above it, so that an empty row's weights are 2 **
(HIDDEN - FLOOR) = 0. A bias may hold -inf, which hides, or the lowest number of its dtype, which does not: `LOWEST`
stands for the latter.
"""

import triton
import triton.language as tl

HIDDEN = tl.constexpr(-1e30)
FLOOR = tl.constexpr(-1e29)
LOWEST = tl.constexpr(-1e28)
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def tanh(x):
    """Exact to some roundings of its own size: (1 - t) / (1 + t) with t = e^(-2|x|) loses digits near 0, where a
    polynomial takes over."""
    size = tl.abs(x)
    t = tl.exp2(size * (-2.0 * 1.4426950408889634))
    far = (1.0 - t) / (1.0 + t)
    y = x * x
    near = size * (1.0 + y * (-1.0 / 3 + y * (2.0 / 15 + y * (-17.0 / 315 + y * (62.0 / 2835)))))
    result = tl.where(size < 0.3, near, far)
    return tl.where(x < 0, -result, result)


@triton.jit
def scored(
    product, i, j, b, h, inside, numbers, bias, MASKED: tl.constexpr, CAPPED: tl.constexpr, SCALED: tl.constexpr
):
    """Scores of pairs (i, j) from q k^T; and tanh of the softcap, which the backward pass needs (else the scores)."""
    if CAPPED:
        curved = tanh(product * numbers.inner)
        score = curved * numbers.cap
    else:
        score = product
        if SCALED:
            score = product * numbers.inner
        curved = score
    if bias is not None:
        at = bias.at + bias.first + b.to(tl.int64) * bias.b + h.to(tl.int64) * bias.h
        at += i.to(tl.int64) * bias.i + j.to(tl.int64) * bias.j
        if MASKED:
            score += tl.load(at, mask=inside, other=0.0)
        else:
            score += tl.load(at)
        score = tl.where(score < LOWEST, tl.where(score == float("-inf"), HIDDEN, LOWEST), score)
    return score, curved


@triton.jit
def stays(row, column, threshold):
    """Whether dropout keeps a weight, by the numbers of its row and column: wrapping signed 32-bit, arithmetic shift.
    The multipliers are those of `kernels/dropout.py`."""
    x = (row ^ column) * 0x2C1B3C6D
    x = (x ^ (x >> 15)) * 0x297A2D39
    return x >= threshold


@triton.jit
def exponent_of(lse):
    """The log-sum-exp of rows as an exponent of 2; so large for an empty row that all its weights are 0."""
    return tl.where(lse == float("-inf"), 1e30, lse * 1.4426950408889634)
