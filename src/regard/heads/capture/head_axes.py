"""Between the leading axes that callers of `F.scaled_dot_product_attention` use and (B, H).

Torch takes any leading axes: (B, H, N, D), (H, B, N, D), (B * H, N, D), (H, N, D), and others.

Letters: B batch, H query heads, N queries, M keys, D head width of q and k.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from regard.heads.capture.handwritten import batch_of, folded

__all__ = ["HeadAxes", "reorder_mask"]


class HeadAxes:
    """The leading axes of one call: `axes(x)` brings q, k, v or the output to (B, H, N, D), and `restore` back."""

    def __init__(
        self, order: Literal["standard", "swapped", "folded", "other"], shape: tuple[int, ...], batch: int = 1
    ) -> None:
        self.order, self.shape, self.batch = order, shape, batch  # shape: of the queries

    @staticmethod
    def of(query: Tensor, key: Tensor, sizes: Sequence[tuple[int, int]]) -> HeadAxes:
        """The axes of a call, by the `sizes` (B, N) of the inputs of the modules in progress."""
        shape = tuple(query.shape)
        batch = batch_of(shape[-2], key.shape[-2], sizes)
        if len(shape) == 4:  # (H, B, N, D), if the module's input says so
            return HeadAxes("swapped" if shape[0] != batch and shape[1] == batch else "standard", shape)
        if len(shape) == 3:  # (B * H, N, D), or (H, N, D) without a batch
            return HeadAxes("folded", shape, folded(shape[0], batch, sizes))
        return HeadAxes("other", shape)

    def is_ambiguous(self, key: Tensor) -> bool:
        """Whether sizes cannot tell heads from the batch."""
        if len(self.shape) == 3:
            return 1 < self.batch < self.shape[0]
        return len(self.shape) == 4 and self.shape[0] == self.shape[1] > 1 and key.shape[:2] == self.shape[:2]

    def __call__(self, x: Tensor) -> Tensor:
        if self.order == "swapped":
            return x.transpose(0, 1)
        if self.order == "folded":
            return x.unflatten(0, (self.batch, -1))
        if self.order == "other":
            return x.flatten(0, x.dim() - 4) if x.dim() > 4 else x[(None,) * (4 - x.dim())]
        return x

    def mask(self, mask: Tensor) -> Tensor:
        """A mask that broadcasts to the caller's weights, made to broadcast to (B, H, N, M)."""
        if mask.dim() <= 2 or self.order == "standard":
            return mask
        if self.order == "folded":
            return mask.unflatten(0, (self.batch, -1)) if mask.shape[0] > 1 else mask[None]
        full = (*self.shape[:-2], *mask.shape[-2:])
        return self(mask.expand(*full)) if self.order == "other" or mask.dim() == 4 else mask

    def restore(self, x: Tensor, like: Tensor) -> Tensor:
        """(B, H, N, E) in the axes of the caller's output `like`."""
        return x.transpose(0, 1) if self.order == "swapped" else x.reshape(like.shape)


def reorder_mask(mask: Tensor | None, q: Tensor, k: Tensor, order: Tensor) -> Tensor | None:
    """A mask that broadcasts to the weights, with its flattened leading axes indexed by `order`."""
    if mask is None or mask.dim() <= 2:
        return mask
    return mask.expand(*q.shape[:-1], k.shape[-2]).flatten(0, -3)[order]
