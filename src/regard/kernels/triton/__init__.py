"""Our own kernels for GPUs, in Triton: what torch's fused attention cannot serve, and all looking. `docs/kernel.md` explains
them. The device code is in `device/`; this package imports Triton where it is first used.

Letters: B batch, H query heads, G kv heads, N queries, M keys, D head width of q and k, E head width of v.
"""

from __future__ import annotations

import torch
from torch import Tensor

from regard import tuning
from regard.kernels import operators
from regard.kernels.call import Call
from regard.kernels.lowering import pairs_to_evaluate
from regard.measures import MeasureRun

__all__ = ["backward", "forward", "forward_measured", "name", "output", "why_not"]

name = "triton"

WIDEST = 256  # numbers of a head
MOST = (2**31 - 1) // 2  # queries, and keys
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def why_not(call: Call) -> str | None:
    """In words, where it cannot serve."""
    return None


def worth(call: Call) -> bool:
    return False


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
    raise NotImplementedError


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
