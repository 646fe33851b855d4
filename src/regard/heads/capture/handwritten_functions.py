"""The torch functions of which attention is written by hand, by what they do to a tensor."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = [
    "ADDED_PRODUCTS",
    "DIVISIONS",
    "DROPOUTS",
    "ELEMENTWISE",
    "FUNCTIONS",
    "IN_PLACE",
    "PERMUTATIONS",
    "PRODUCTS",
    "SOFTMAXES",
    "permutation",
    "product_axes",
    "splits_leading_axes_only",
]

PERMUTATIONS = {
    torch.transpose,
    Tensor.transpose,
    Tensor.permute,
    torch.permute,
    torch.swapaxes,
    Tensor.swapaxes,
    torch.movedim,
    Tensor.movedim,
    Tensor.moveaxis,
    torch.moveaxis,
    torch.swapdims,
    Tensor.swapdims,
    Tensor.mT.__get__,  # type: ignore
}
RESHAPES = {
    Tensor.view,
    Tensor.reshape,
    torch.reshape,
    Tensor.flatten,
    torch.flatten,
    Tensor.unflatten,
    Tensor.contiguous,
    Tensor.__getitem__,
    Tensor.masked_fill,
    torch.masked_fill,
    Tensor.nan_to_num,
    torch.nan_to_num,
    Tensor.squeeze,
    Tensor.unsqueeze,
    torch.squeeze,
    torch.unsqueeze,
    Tensor.expand,
    Tensor.clone,
    torch.clone,
    torch.split,
    Tensor.split,
    torch.chunk,
    Tensor.chunk,
    Tensor.narrow,
    Tensor.unbind,
    torch.unbind,
    Tensor.view_as,
}
ELEMENTWISE = {  # the shape stays, and so do strides
    Tensor.contiguous,
    Tensor.masked_fill,
    torch.masked_fill,
    Tensor.nan_to_num,
    torch.nan_to_num,
    Tensor.clone,
    torch.clone,
}
CASTS = {
    Tensor.detach,
    torch.detach,
    Tensor.cpu,
    Tensor.cuda,
    F.dropout,
    torch.dropout,
    Tensor.to,
    Tensor.type_as,
    Tensor.type,
    Tensor.float,
    Tensor.half,
    Tensor.bfloat16,
    Tensor.double,
    torch.feature_dropout,
    F.dropout1d,
    F.dropout2d,
}

DROPOUTS = {F.dropout, torch.dropout, F.dropout1d, F.dropout2d}
IN_PLACE = {Tensor.mul_, Tensor.masked_fill_, Tensor.zero_, Tensor.div_, Tensor.copy_, Tensor.fill_}
DIVISIONS = {torch.div, Tensor.div, Tensor.__truediv__, Tensor.div_, torch.true_divide, torch.divide}
SOFTMAXES = {torch.softmax, Tensor.softmax, F.softmax}
ADDED_PRODUCTS = {torch.baddbmm, Tensor.baddbmm, torch.addmm, Tensor.addmm}
PRODUCTS = {
    torch.matmul,
    Tensor.matmul,
    Tensor.__matmul__,
    torch.bmm,
    Tensor.bmm,
    torch.mm,
    Tensor.mm,
    torch.einsum,
    *ADDED_PRODUCTS,
}

# The method of `HandwrittenTracer` that handles each function.
FUNCTIONS: dict[Any, str] = {
    **dict.fromkeys(SOFTMAXES, "_softmax"),
    **dict.fromkeys((torch.log_softmax, Tensor.log_softmax, F.log_softmax), "_log_softmax"),
    **dict.fromkeys((torch.exp, Tensor.exp), "_exp"),
    **dict.fromkeys(CASTS, "_cast"),
    **dict.fromkeys(PERMUTATIONS | RESHAPES, "_shape"),
    **dict.fromkeys((torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__, Tensor.mul_, torch.multiply), "_times"),
    **dict.fromkeys(DIVISIONS, "_times"),
    **dict.fromkeys(PRODUCTS, "_product"),
    **dict.fromkeys((Tensor.masked_fill_, Tensor.zero_, Tensor.copy_, Tensor.fill_), "_written_over"),
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
        moved = func(torch.empty(1).as_strided([1] * len(strides), strides), *args[1:], **kwargs)
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
