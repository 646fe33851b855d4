"""Attention over all keys from attention over parts of them: the mean of the parts' outputs, weighted by exp(lse).

Letters: B batch, H query heads, N queries, E head width of v.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from regard.errors import bad_type, bad_value, shape_of

__all__ = ["merge", "shares"]


def merge(outs: Sequence[Tensor] | Tensor, lses: Sequence[Tensor] | Tensor) -> tuple[Tensor, Tensor]:
    """Combine attention that was computed in parts, each over other keys, to attention over all of them: exact.

    Args:
        outs: the parts' outputs, (B, H, N, E) each, in a list or stacked along a first axis.
        lses: their log-sum-exps, (B, H, N) each, as `attend(..., return_lse=True)` gives them, in the same order.

    Returns:
        The output (B, H, N, E), in the dtype to which those of the parts promote, and its log-sum-exp (B, H, N), in
        float32 or wider. Both are differentiable, and may be merged again. Sums are computed in float32 or wider.

    A part in which a query sees nothing (lse -inf) does not count for it, whatever its output holds; a query that sees
    nothing in any part gets 0 and -inf. Each key must be in one part only. So must sinks: give them to one of the
    calls, for each part with sinks adds them to the denominator. Dropout may differ from part to part: it drops
    weights of each part before they are merged, and the log-sum-exp is taken before it.

    >>> import regard
    >>> q, k, v = (torch.randn(2, 3, 5, 7) for _ in range(3))
    >>> near = regard.attend(q, k[:, :, :2], v[:, :, :2], return_lse=True)
    >>> far = regard.attend(q, k[:, :, 2:], v[:, :, 2:], return_lse=True)
    >>> out, lse = merge(*zip(near, far))
    >>> torch.allclose(out, regard.attend(q, k, v), atol=1e-5), lse.shape
    (True, torch.Size([2, 3, 5]))
    """
    parts, logs = _parts("outs", outs), _parts("lses", lses)
    _check(parts, logs)
    out_dtype = functools.reduce(torch.promote_types, [x.dtype for x in parts])
    dtype = functools.reduce(
        torch.promote_types, [x.dtype for x in logs], torch.promote_types(out_dtype, torch.float32)
    )
    weights, lse = shares([x.to(dtype) for x in logs])
    out = None
    for part, log, weight in zip(parts, logs, weights, strict=True):
        counted = part.to(dtype).masked_fill(log.isneginf()[..., None], 0.0) * weight[..., None]
        out = counted if out is None else out + counted
    assert out is not None
    return out.to(out_dtype), lse


def shares(lses: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
    """Which share of the whole each part has, exp(lse of the part - lse of all), and the lse of all. Where no part has
    seen a key, shares are 0 and lse is -inf."""
    top = functools.reduce(torch.maximum, [x.detach() for x in lses])
    top = top.masked_fill(top.isneginf(), 0.0)  # exp(-inf - 0) is 0
    weights = [(x - top).exp() for x in lses]
    total = functools.reduce(torch.add, weights)
    empty = total == 0
    total = total.masked_fill(empty, 1.0)  # (before the logarithm, whose gradient at 0 would be NaN)
    return [x / total for x in weights], (total.log() + top).masked_fill(empty, float("-inf"))


def _parts(what: str, given: Any) -> list[Tensor]:
    parts = list(given) if isinstance(given, (Tensor, Sequence)) and not isinstance(given, str) else [given]
    for x in parts:
        if not isinstance(x, Tensor) or not x.is_floating_point():
            raise bad_type(
                what,
                expected="floating-point tensors, in a list or stacked along a first axis",
                received=f"dtype {x.dtype}" if isinstance(x, Tensor) else type(x).__name__,
            )
    if not parts:
        raise bad_value(what, expected="at least one part", received="none")
    return cast("list[Tensor]", parts)


def _check(outs: list[Tensor], lses: list[Tensor]) -> None:
    if len(outs) != len(lses):
        raise bad_value(
            "outs, lses",
            expected="one log-sum-exp for each output",
            received=f"{len(outs)} outputs and {len(lses)} log-sum-exps",
            remedy="merge(*zip(*parts)) of parts that attend(..., return_lse=True) gave",
        )
    shape = outs[0].shape
    for out, lse in zip(outs, lses, strict=True):
        if out.dim() < 1 or out.shape != shape or lse.shape != shape[:-1]:
            raise bad_value(
                "outs, lses",
                expected="outputs (B, H, N, E) of one shape, and log-sum-exps (B, H, N)",
                received=f"{shape_of(out)} and {shape_of(lse)}, the first output {shape_of(outs[0])}",
            )
        if out.device != outs[0].device or lse.device != outs[0].device:
            raise bad_value("outs, lses", expected=f"device {outs[0].device}", received=f"{out.device}, {lse.device}")
