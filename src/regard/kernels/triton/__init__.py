"""Our own kernels for GPUs, in Triton: what torch's fused attention cannot serve, and all looking. `docs/kernel.md`
explains them. The device code is in `device/`; this package imports Triton where it is first used.

Letters: B batch, H query heads, G kv heads, N queries, M keys, D head width of q and k, E head width of v.
"""

from __future__ import annotations

import torch
from torch import Tensor

from regard.kernels import operators
from regard.kernels.call import Call
from regard.kernels.lowering import why_not_lowered
from regard.kernels.triton import self_check
from regard.kernels.triton.availability import why_not_on
from regard.measures import MeasureRun
from regard.tracing import traced

__all__ = ["backward", "forward", "forward_measured", "name", "output", "why_not"]

name = "triton"

WIDEST = 256  # numbers of a head


def why_not(call: Call) -> str | None:
    """In words, where it cannot serve."""
    missing = why_not_on(call.q.device.type)
    if missing is not None:
        return missing
    reason = why_not_lowered(call, WIDEST)
    if reason is not None:
        return reason
    if call.mask is not None and _may_leak(call):
        return "keys or values hold NaN or inf, which it would let through where they are hidden"
    return None


def _may_leak(call: Call) -> bool:
    """A hidden value of NaN in a block that is visible in part is multiplied by 0. Looked at on CPU only: on a GPU the
    answer would have to be waited for. (What padding hides is never read.)"""
    if call.q.device.type != "cpu" or traced(call.q, call.k, call.v):
        return False
    return not call.keys_are_finite


def worth(call: Call) -> bool:
    """On GPUs where the self-check has passed; never in the interpreter."""
    if call.q.device.type != "cuda":
        return False
    if traced(call.q) or torch.cuda.is_current_stream_capturing():  # no time for a self-check
        return self_check.passed(call.q.device)
    return self_check.trusted(call.q.device)


def doubt(call: Call) -> str | None:
    """In words, why "auto" does not take it where it could serve."""
    if call.q.device.type != "cuda":
        return "the interpreter is for tests"
    return self_check.doubt(call.q.device)


def forward(call: Call) -> tuple[Tensor, Tensor]:
    """Output (B, H, N, E) and log-sum-exp (B, H, N)."""
    return differentiable_forward(call)


def backward(call: Call, out: Tensor, lse: Tensor, d_out: Tensor, wanted: list[bool]) -> list[Tensor]:
    """The wanted gradients of `call.learned()`, where out and lse may be of more keys than the call has."""
    return _Loops().backward(call, out, lse, d_out, torch.zeros_like(lse), wanted, 0, 0)


def output(call: Call) -> Tensor:
    """(B, H, N, E)"""
    return differentiable_forward(call)[0]


def forward_measured(call: Call, measuring: MeasureRun, *, output: bool = True) -> tuple[Tensor | None, Tensor]:
    """The same, with statistics: those of rows from the same pass, the others from its log-sum-exp."""
    from regard.kernels.triton import statistics

    return statistics.forward_measured(call, measuring, output)


class _Loops:
    """The launches, for `operators`. `height` and `width` are powers of two, 16 at least; 0 where a table decides."""

    def forward(self, call: Call, height: int, width: int) -> tuple[Tensor, Tensor]:
        from regard.kernels.triton import launch

        out, lse = operators.new_output(call.q, call.v)
        launch.attention(call, out, lse, height=height, width=width)
        return out, lse

    def backward(
        self,
        call: Call,
        out: Tensor,
        lse: Tensor,
        d_out: Tensor,
        d_lse: Tensor,
        wanted: list[bool],
        height: int,
        width: int,
    ) -> list[Tensor]:
        from regard.kernels.triton import launch

        return launch.gradients(call, out, lse, d_out, d_lse, wanted, height, width)


differentiable_forward = operators.register(name, _Loops())
