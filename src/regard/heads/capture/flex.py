"""Arguments of torch's `flex_attention` as arguments of `regard.attend`: `mask_mod` as a mask, `score_mod` as a bias.
Both are functions of one query and one key; they are evaluated for one tile after another.

Letters: B batch, H query heads, G kv heads, N queries, M keys, D head width of q and k, E head width of v; n, m the
sides of one tile.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from copy import copy
from typing import Any

import torch
from torch import Tensor

from regard.attention import prepare
from regard.kernels import Call
from regard.masks import Mask, Tile
from regard.positions import Bias

__all__ = ["FlexBias", "FlexMask", "from_flex", "learned_by"]

BLOCK_COUNTS, MASK_MOD = 2, -1  # indices in a block mask as a tuple: a tensor (1|B, 1|H, ...), and the function


def _each_pair(function: Callable[..., Tensor], *indices: Tensor, scores: Tensor | None = None) -> Tensor:
    """A function of (score,) batch, head, query and key indices, evaluated for all combinations: (b, h, n, m)."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex  # allows tensors as indices

    first = () if scores is None else (0,)
    for axis in reversed(range(4)):
        function = torch.vmap(function, in_dims=(*first, *(0 if i == axis else None for i in range(4))))
    with torch.no_grad(), torch._C._EnableTorchFunction(), TransformGetItemToIndex():  # pyright: ignore
        return function(*(() if scores is None else (scores,)), *indices)


class FlexMask(Mask):
    """A `mask_mod` as a mask, for `items` items of the batch and some `heads`; one of either is broadcast. Queries and
    keys are counted from (`row`, `col`)."""

    fields = ("mask_mod", "items", "heads", "row", "col")

    def __init__(self, mask_mod: Any, items: int, heads: Tensor, row: int = 0, col: int = 0) -> None:
        self.mask_mod, self.items, self.heads, self.row, self.col = mask_mod, items, heads, row, col

    @staticmethod
    def of(block_mask: tuple[Any, ...]) -> FlexMask:
        """From a `BlockMask` as a tuple."""
        counts = block_mask[BLOCK_COUNTS]
        return FlexMask(block_mask[MASK_MOD], counts.shape[0], torch.arange(counts.shape[1], device=counts.device))

    def block(self, tile: Tile) -> Tensor:
        device = tile.q_positions.device
        items = torch.arange(self.items, device=device)
        rows = torch.arange(tile.rows.start, tile.rows.stop, device=device) + self.row
        cols = torch.arange(tile.cols.start, tile.cols.stop, device=device) + self.col
        items = items[tile.batch] if self.items > 1 else items
        return _each_pair(self.mask_mod, items, self.heads.to(device), rows, cols)

    def part(self, tile: Tile, heads: slice, shift: int) -> Mask:
        own = self.heads[heads] if self.heads.numel() > 1 else self.heads
        return FlexMask(self.mask_mod, self.items, own, self.row + tile.rows.start, self.col + tile.cols.start)

    def shared_by_heads(self) -> bool:
        return self.heads.numel() == 1

    def __repr__(self) -> str:
        return f"FlexMask({getattr(self.mask_mod, '__name__', 'mask_mod')}, {id(self.mask_mod)})"


class FlexBias(Bias):
    """What a `score_mod` adds to each score. It may depend on the score, so queries and keys are kept here. `weight`
    (B, H) holds indices of batch and head, so that a slice of it tells which part it is."""

    def __init__(self, score_mod: Any, q: Tensor, k: Tensor, scale: float, start: int) -> None:
        self.score_mod, self.q, self.k, self.scale, self.start = score_mod, q, k, scale, start
        batch, heads = q.shape[:2]
        self.weight = torch.arange(batch * heads, device=q.device).view(batch, heads)

    def starting(self, start: int) -> FlexBias:
        """The same with the first query at position `start`."""
        other = copy(self)
        other.start = start
        return other

    def block(self, tile: Tile) -> Tensor:
        heads = self.q.shape[1]
        items, own = self.weight[:, 0] // heads, self.weight[0] % heads
        rows, cols = tile.q_positions[0] - self.start, tile.k_positions[0]
        q = self.q[items[:, None, None], own[:, None], rows]  # (b, h, n, D)
        k = self.k[items[:, None, None], own[:, None] // (heads // self.k.shape[1]), cols]  # (b, h, m, D)
        dtype = torch.promote_types(q.dtype, torch.float32)
        scores = q.to(dtype) @ k.to(dtype).mT * self.scale
        return _each_pair(self.score_mod, items, own, rows, cols, scores=scores) - scores


def from_flex(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Any,
    block_mask: tuple[Any, ...],
    scale: float,
    kernel_options: dict[str, Any] | None = None,
    score_mod_other_buffers: tuple[Any, ...] = (),
    mask_mod_other_buffers: tuple[Any, ...] = (),
) -> Call:
    """A `Call` from the arguments of the operator that `flex_attention` calls: q (B, H, N, D), k (1|B, G, M, D),
    v (1|B, G, M, E)."""
    q, (k, v) = query, (x.expand(query.shape[0], -1, -1, -1) for x in (key, value))
    start = k.shape[2] - q.shape[2]
    bias = None
    if score_mod is not getattr(sys.modules.get("torch.nn.attention.flex_attention"), "_identity", None):
        bias = FlexBias(
            _with_buffers(score_mod, score_mod_other_buffers), q.detach().clone(), k.detach().clone(), scale, start
        )
    mask_mod = _with_buffers(block_mask[MASK_MOD], mask_mod_other_buffers)
    mask = FlexMask.of((*block_mask[:MASK_MOD], mask_mod))
    return prepare(q, k, v, scale=scale, mask=mask, bias=bias)


def learned_by(score_mod: Any) -> str:
    """The name of a tensor with `requires_grad` that a `score_mod` captures; "" if there is none."""
    code, cells = getattr(score_mod, "__code__", None), getattr(score_mod, "__closure__", None) or ()
    if code is None:
        return ""
    for name, cell in zip(code.co_freevars, cells, strict=True):
        captured = cell.cell_contents
        read = {f"{name}.{part}": getattr(captured, part, None) for part in code.co_names} | {name: captured}
        for which, x in read.items():
            if isinstance(x, Tensor) and x.requires_grad:
                return which
    return ""


def _with_buffers(function: Any, buffers: tuple[Any, ...]) -> Any:
    """A function with its captured tensors bound, which compilers pass as further arguments."""
    return (lambda *indices: function(*indices, *buffers)) if buffers else function
