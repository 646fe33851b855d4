"""The outputs of some heads computed again: with edges cut, or with queries, keys, values or weights of another run.

Each function returns outputs (B, H, N, E) of which the heads and queries that were asked for are filled in, with
gradients; the rest is 0. Everything else of the attention (mask, biases, softcap, sinks) is the model's.

Letters: B batch, H query heads, G kv heads, N queries, M keys, D head width of q and k, E head width of v; n, h some of
the queries and heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from regard.errors import bad_value
from regard.heads.capture.flex import FlexBias
from regard.heads.capture.observed import ObservedCall
from regard.kernels import Call
from regard.kernels.run import run_unobserved
from regard.masks import Keep

__all__ = ["check_inputs", "with_other_inputs", "with_other_weights", "without_edges"]

Hidden = list[tuple[Tensor, Tensor]]  # edges from rows (N,) to columns (M,), as boolean tensors

GAP = 16  # rows between two chosen ones up to which they are computed together
PAIRS = 2**24  # pairs of queries and keys in one block of a mask or of weights
ROUNDING = 1e-4  # how far the sum of a row of weights may be from 1 without a sink


def without_edges(attention: ObservedCall, output: Tensor, heads: list[int], hidden: Hidden) -> Tensor:
    """The outputs where some edges are masked. A query that has nothing left to see gets 0."""
    _check(attention)
    call, m = attention.call, attention.shape[3]
    rows = torch.stack([of_rows for of_rows, _ in hidden]).any(0)
    # One mask (1, M) serves all rows of one pair; the rows that are not asked for are left out afterwards.
    step = PAIRS // max(1, m) if len(hidden) > 1 or call is None else None
    other = torch.zeros_like(output)
    for block in _blocks(rows, step):
        visible = _visible(hidden, block, m)
        if call is None:
            weights, values = _weights_and_values(attention, output, heads, block)
            other[:, heads, block] = (_renormalised(weights, visible) @ values).to(other.dtype)
        else:
            _fill(other, call, heads, block, _with_mask(Keep(visible)))
    return other


def with_other_inputs(
    attention: ObservedCall,
    output: Tensor,
    heads: list[int],
    what: Literal["q", "k", "v"],
    source: Tensor,
    chosen: Tensor,
) -> Tensor:
    """The outputs with the queries (B, H, N, D), keys (B, G, M, D) or values (B, G, M, E) of another run at the
    `chosen` tokens (N,) or (M,)."""
    _check(attention)
    call = attention.call
    assert call is not None
    other = torch.zeros_like(output)
    at = chosen[:, None]

    def change(part: Call, of_heads: slice, of_groups: slice, rows: slice) -> Call:
        if what == "q":
            return replace(part, q=torch.where(at[rows], source[:, of_heads, rows].to(part.q), part.q))
        old = part.k if what == "k" else part.v
        new = torch.where(at, source[:, of_groups].to(old), old)
        return replace(part, k=new) if what == "k" else replace(part, v=new)

    every = torch.ones_like(chosen[:1]).expand(output.shape[2])
    for rows in _blocks(chosen if what == "q" else every, None):
        _fill(other, call, heads, rows, change)
    return other


def with_other_weights(
    attention: ObservedCall, output: Tensor, heads: list[int], source: Callable[[slice], Tensor], rows: Tensor
) -> Tensor:
    """The outputs at some queries (N,) with the weights of another run, which `source` gives for any rows as
    (B, h, n, M)."""
    _check(attention)
    other = torch.zeros_like(output)
    for block in _blocks(rows, PAIRS // max(1, attention.shape[3])):
        values = _values(attention, heads)
        weights = source(block).to(torch.promote_types(values.dtype, torch.float32))
        other[:, heads, block] = (weights @ values.to(weights.dtype)).to(other.dtype)
    return other


def check_inputs(attention: ObservedCall, what: str) -> None:
    """Raise if an attention has no queries, keys and values that could be replaced."""
    call = attention.call
    if call is None or (what != "v" and any(isinstance(bias, FlexBias) for bias in call.biases)):
        raise bad_value(
            attention.layer,
            expected=f'attention with q, k and v of its own, for what="{what}"',
            received="attention by hand" if call is None else "flex_attention, whose score_mod reads q and k",
            remedy='what="output" or what="pattern"',
        )
    if what == "k" and attention.cache is not None:
        received = "a cache that rotates its keys anew"
        raise bad_value(attention.layer, expected='keys that stay, for what="k"', received=received)


def _check(attention: ObservedCall) -> None:
    """Raise if the output of an attention does not follow from what is known of it."""
    call, unsure, remedy = attention.call, attention.unsure, ""
    if attention.subtracted is not None:
        unsure, remedy = "the difference of two softmaxes", 'mode="zero", "mean", or "patch" with what="output"'
    learns = torch.is_grad_enabled() and call is not None and any(x.requires_grad for x in (call.q, call.k))
    if learns and call is not None and any(isinstance(bias, FlexBias) for bias in call.biases):
        unsure, remedy = "a score_mod of flex_attention, with gradients", "torch.no_grad()"
    if call is not None and call.needs_lse:  # which would be that of the unchanged weights
        unsure, remedy = "a part of attention, of which the log-sum-exp is used (return_lse=True)", ""
    if unsure:
        raise bad_value(
            attention.layer,
            expected="attention that can be computed again from its q, k and v",
            received=unsure,
            remedy="model.eval()" if "dropout" in unsure else remedy,
        )


# Of a call


def _fill(
    other: Tensor, call: Call, heads: list[int], rows: slice, change: Callable[[Call, slice, slice, slice], Call]
) -> None:
    """Compute some heads and rows of a call after a change of it, and put them into `other` (B, H, N, E)."""
    for of_heads, of_groups in _head_runs(heads, call.shape[1] // call.k.shape[1]):
        q, k, v = call.q[:, of_heads, rows], call.k[:, of_groups], call.v[:, of_groups]
        part = call.part(q, k, v, of_heads, rows, slice(0, call.shape[3]))
        other[:, of_heads, rows] = run_unobserved(change(part, of_heads, of_groups, rows)).to(other.dtype)


def _with_mask(mask: Keep) -> Callable[[Call, slice, slice, slice], Call]:
    def change(part: Call, *_: slice) -> Call:
        return replace(part, mask=mask if part.mask is None else part.mask & mask)

    return change


def _head_runs(heads: list[int], shared: int) -> Iterator[tuple[slice, slice]]:
    """Runs of heads that can be computed as one call, and their kv heads, each of which `shared` query heads use."""
    start = 0
    for i, head in enumerate(heads):
        last = i + 1 == len(heads)
        if last or heads[i + 1] != head + 1 or (shared > 1 and heads[i + 1] // shared != head // shared):
            yield slice(heads[start], head + 1), slice(heads[start] // shared, head // shared + 1)
            start = i + 1


def _blocks(rows: Tensor, step: int | None) -> Iterator[slice]:
    """Slices that cover the chosen rows (N,), and few others; of at most `step` rows."""
    numbers: list[int] = rows.nonzero().flatten().tolist()
    start = 0
    for i, number in enumerate(numbers):
        if i + 1 == len(numbers) or numbers[i + 1] - number > GAP:
            size = max(1, step or number + 1)
            for first in range(numbers[start], number + 1, size):
                yield slice(first, min(first + size, number + 1))
            start = i + 1


def _visible(hidden: Hidden, rows: slice, m: int) -> Tensor:
    """Which keys may be seen apart from hidden edges: (n, M), or (1, M) if all rows of `hidden` hide the same."""
    if len(hidden) == 1:
        return ~hidden[0][1][None]
    visible = hidden[0][0].new_ones(rows.stop - rows.start, m)
    for of_rows, of_keys in hidden:
        visible[of_rows[rows]] &= ~of_keys
    return visible


# Of weights, or of attention written by hand


def _weights_and_values(
    attention: ObservedCall, output: Tensor, heads: list[int], rows: slice
) -> tuple[Tensor, Tensor]:
    """The weights (B, h, n, M) of attention by hand and its values (B, h, M, E), if they give its output."""
    assert attention.weights is not None
    values = _values(attention, heads)
    weights = attention.weights[:, heads, rows].to(values.dtype)
    with torch.no_grad():
        wanted = output[:, heads, rows].to(values.dtype)
        largest = float(values.abs().amax()) if values.numel() else 0.0
        half = attention.weights.dtype in (torch.float16, torch.bfloat16) or output.dtype != values.dtype
        if not torch.allclose(weights @ values, wanted, rtol=0.0, atol=(5e-2 if half else 1e-4) * largest):
            raise bad_value(
                attention.layer,
                expected="attention by hand that multiplies its weights into its values",
                received="an output that is not their product",
                remedy="model.eval(), if it is dropout",
            )
    return weights, values


def _renormalised(weights: Tensor, visible: Tensor) -> Tensor:
    """Weights (..., M) as they are if what is not visible is masked before their softmax. What a row's sum lacks to 1
    is a sink's, which stays."""
    kept = weights.masked_fill(~visible, 0.0)
    total, sink = kept.sum(-1, keepdim=True), 1 - weights.sum(-1, keepdim=True)
    nothing = total == 0
    return kept / torch.where(sink > ROUNDING, total + sink, total).masked_fill(nothing, 1.0)


def _values(attention: ObservedCall, heads: list[int]) -> Tensor:
    """The values (B, h, M, E) of some heads."""
    values = attention.values if attention.call is None else attention.call.v
    assert values is not None
    shared = attention.shape[1] // values.shape[1]
    return values[:, [head // shared for head in heads]]
