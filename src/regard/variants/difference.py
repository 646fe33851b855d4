"""`attend_difference`: the difference of two attentions to the same values, as one call that observers see.

    (softmax(q1 k1^T) - factor * softmax(q2 k2^T)) v

Each term is an `attend` of its own, so no N x M matrix is built. `watch` and `ablate` are shown both terms together.

Letters: B batch, H query heads, G kv heads, N queries, M keys, D head width of q and k, E head width of v.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from regard.attention import Options, attend, prepare
from regard.kernels import Call
from regard.kernels.run import observers

if TYPE_CHECKING:
    from typing_extensions import Unpack  # (in `typing` from Python 3.11 on)

__all__ = ["DifferenceObserver", "attend_difference"]


class DifferenceObserver(Protocol):
    """An observer of `kernels/run.py` that is shown both terms together. Others are shown one after the other."""

    def difference(self, first: Call, second: Call, factor: Tensor, compute: Callable[[], Tensor]) -> Tensor:
        """The output (B, H, N, E). `compute()` calls the next observer; the last one's computes."""
        ...


def attend_difference(
    q1: Tensor,
    k1: Tensor,
    q2: Tensor,
    k2: Tensor,
    v: Tensor,
    factor: Tensor,
    *,
    kernel: str = "auto",
    **options: Unpack[Options],
) -> Tensor:
    """The attention of q1 (B, H, N, D) to k1 (B, G, M, D), minus `factor` (a number) times that of q2 to k2, of the
    same values v (B, G, M, E): (B, H, N, E). The options are those of `attend`, for both.

    >>> q, k, v = torch.zeros(1, 1, 2, 3), torch.zeros(1, 1, 5, 3), torch.ones(1, 1, 5, 1)
    >>> attend_difference(q, k, q, k, v, torch.tensor(0.25)).flatten()
    tensor([0.7500, 0.7500])
    """
    tensors = (q1, k1, q2, k2, v, factor)
    if has_torch_function(tensors):
        return handle_torch_function(attend_difference, tensors, *tensors, kernel=kernel, **options)

    def compute() -> Tensor:
        return attend(q1, k1, v, kernel=kernel, **options) - factor * attend(q2, k2, v, kernel=kernel, **options)

    stack = () if torch.compiler.is_compiling() else observers.stack
    if not stack or not all(hasattr(observer, "difference") for observer in stack):
        return compute()
    calls = prepare(q1, k1, v, **options), prepare(q2, k2, v, **options)
    observed: Callable[[], Tensor] = compute
    for observer in reversed(stack):
        observed = functools.partial(observer.difference, *calls, factor, observed)  # type: ignore[attr-defined]
    observers.stack = ()  # attention that an observer computes is not observed
    try:
        return observed()
    finally:
        observers.stack = stack
