"""Weights that a model built by hand, measured by a kernel.

The native kernel measures while it computes a softmax. It gives weights P again for scores ln P: of a call whose q
and k are 0, with ln P as its bias. That takes a third of the time of reading P measure by measure.

Letters: B batch, H query heads, N queries, M keys.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from regard.kernels import Call, native
from regard.masks import Mask
from regard.positions import DenseBias

__all__ = ["call_of_weights", "is_softmax"]

_ROUNDING = 1e-5  # by which the sum of a softmax in float32 may differ from 1
_LEAST = torch.finfo(torch.float32).tiny


def call_of_weights(weights: Tensor, band: Mask | None = None) -> Call | None:
    """A call with these weights (B, H, N, M) for the native kernel, if they are a softmax; None if it does not serve
    it. (Negative weights count as 0.) `band`: a mask that hides nothing but weights of 0.

    >>> call = call_of_weights(torch.tensor([[[[0.25, 0.75], [1.0, 0.0]]]]))
    >>> None if call is None else call.shape
    (1, 1, 2, 2)
    """
    if weights.dtype is not torch.float32 or not weights.is_cpu or not weights.numel():
        return None
    batch, heads, n, m = weights.shape
    nothing = weights.new_zeros(1)
    q, k = nothing.expand(batch, heads, n, 1), nothing.expand(batch, heads, m, 1)
    # ln 0 takes torch five times as long as ln of a number, so the least number stands for it, and becomes -inf.
    logs = torch.threshold_(weights.clamp_min(_LEAST).log_(), math.log(_LEAST) + 1e-3, -math.inf)
    call = Call(q, k, k, scale=1.0, q_start=m - n, mask=band, biases=(DenseBias(logs),))
    return call if native.why_not(call) is None else None


def is_softmax(lse: Tensor) -> bool:
    """Whether the weights of such a call, with this log-sum-exp (B, H, N), were a softmax: rows sum to 1, or to 0 where
    a query sees nothing.

    >>> is_softmax(torch.tensor([0.0, float("-inf")]))
    True
    """
    return bool((lse.abs() <= _ROUNDING).logical_or_(lse == -math.inf).all())
