"""The torch functions of which attention is written by hand, by what they do to a tensor."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def _named(names: str) -> set[Any]:
    """The functions of these names in torch, torch.Tensor and torch.nn.functional."""
    functions = (getattr(owner, name, None) for name in names.split() for owner in (torch, Tensor, F))
    return {function for function in functions if callable(function)}


SOFTMAXES, LOG_SOFTMAXES = _named("softmax"), _named("log_softmax")
DROPOUTS = _named("dropout dropout1d dropout2d feature_dropout")
CASTS = _named("detach cpu cuda to type type_as float half bfloat16 double") | DROPOUTS
PERMUTATIONS = _named("transpose permute swapaxes swapdims movedim moveaxis") | {Tensor.mT.__get__}  # type: ignore
ELEMENTWISE = _named("contiguous masked_fill nan_to_num clone")  # shape and strides stay
RESHAPES = ELEMENTWISE | _named(
    "view view_as reshape flatten unflatten squeeze unsqueeze expand __getitem__ narrow split chunk unbind"
)
DIVISIONS = _named("div div_ divide true_divide __truediv__")
ADDED_PRODUCTS = _named("baddbmm addmm")
PRODUCTS = _named("matmul __matmul__ bmm mm einsum") | ADDED_PRODUCTS
OVERWRITES = _named("masked_fill_ zero_ copy_ fill_")
IN_PLACE = OVERWRITES | _named("mul_ div_")

# The method of `HandwrittenTracer` that handles each function.
FUNCTIONS: dict[Any, str] = {
    **dict.fromkeys(SOFTMAXES, "_softmax"),
    **dict.fromkeys(LOG_SOFTMAXES, "_log_softmax"),
    **dict.fromkeys(_named("exp"), "_exp"),
    **dict.fromkeys(CASTS, "_cast"),
    **dict.fromkeys(PERMUTATIONS | RESHAPES, "_shape"),
    **dict.fromkeys(_named("mul mul_ multiply __mul__ __rmul__") | DIVISIONS, "_times"),
    **dict.fromkeys(PRODUCTS, "_product"),
    **dict.fromkeys(OVERWRITES, "_written_over"),
    torch.cdist: "_distances",
    F.linear: "_linear",
    torch.einsum: "_einsum",
}


def permutation(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
    """The axis that each axis of the result of a permuting function comes from, tried on a tensor whose strides differ.

    >>> permutation(torch.transpose, (torch.zeros(2, 3, 5), 0, 1), {})
    [1, 0, 2]
    """
    strides = [2**i for i in range(args[0].dim())]
    with torch.no_grad():
        moved = func(torch.empty(1, device="cpu").as_strided([1] * len(strides), strides), *args[1:], **kwargs)
    return [strides.index(stride) for stride in moved.stride()]


def product_axes(left: int, right: int) -> tuple[list[int], list[int]]:
    """Which axes of a matrix product come from the left factor alone, and which from the right, by their dimensions.

    >>> product_axes(3, 3), product_axes(3, 2)
    (([1], [2]), ([0, 1], [2]))
    """
    n = max(left, right) if min(left, right) > 1 else max(left, right) - 1
    rows, columns = ([n - 1] if right == 1 else [n - 2]) if left > 1 else [], [n - 1] if right > 1 else []
    lead = [i for i in range(n) if i not in (*rows, *columns)]
    return (lead if right < 3 else []) + rows, (lead if left < 3 else []) + columns


def splits_leading_axes_only(x: Tensor, out: Tensor) -> bool:
    """Whether only axes before the last two were split: (B * H, N, M) to (B, H, N, M), also for one query."""
    return x.dim() > 2 and out.shape[-2:] == x.shape[-2:] and out.shape[:-2] != (*x.shape[:-2], 1)
