"""Attention whose N x M weights the model would build, computed without them if they are large.

Letters: B batch, H query heads, N queries, M keys, E head width of v.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, nn

from regard.attention import attend, measure_call
from regard.kernels import Call

__all__ = ["eager_function", "flex_result", "is_large"]

LARGE = 2**24  # weights: from this number on they are not built, unless somebody needs them


def is_large(call: Call) -> bool:
    """Whether a call has so many weights that they should not be built."""
    return math.prod(call.shape) >= LARGE


def flex_result(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """What the operator of `flex_attention` returns for a call: the output (B, H, N, E), the log-sum-exp in base 2, and
    no maxima."""
    measured = measure_call(call, [], output=True)
    assert measured.output is not None and measured.lse is not None
    return measured.output, measured.lse / math.log(2), measured.lse.new_empty(0)


def eager_function(call: Call) -> Any:
    """An attention function for transformers that computes what its eager one would, with gradients, in O(N) memory."""

    def compute(_: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> tuple[Tensor, None]:
        sinks = options.get("s_aux")
        sinks = None if sinks is None else sinks.flatten().to(q.dtype)
        out = attend(
            q,
            k,
            v,
            mask=call.mask,
            bias=[b.weight for b in call.biases] or None,
            positions=call.q_start,
            scale=call.scale,
            softcap=call.softcap,
            sinks=sinks,
        )
        return out.transpose(1, 2).contiguous(), None

    return compute
