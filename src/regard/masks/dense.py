"""Masks as boolean tensors: `Keep`, `Hide`; and what to write instead of tensors that are not boolean."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from regard.errors import bad_type, bad_value, shape_of
from regard.masks.base import Mask, of_batch, short
from regard.masks.tiles import Grid, Survey, Tile

__all__ = ["Hide", "Keep", "as_mask", "boolean_tensor"]


class Keep(Mask):
    """A boolean tensor, True = may attend: (N, M), (B, N, M) or (B, H, N, M); any axis may be 1."""

    fields = ("tensor",)
    sense: ClassVar[bool] = True

    def __init__(self, tensor: Tensor) -> None:
        name = type(self).__name__
        tensor = boolean_tensor(name, tensor)
        if not 2 <= tensor.dim() <= 4:
            raise bad_value(
                name,
                expected="shape (N, M), (B, N, M) or (B, H, N, M)",
                received=f"shape {shape_of(tensor)}",
                remedy=f"padding is masks.Padding(keep={'' if self.sense else '~'}t[None]), for one of keys (M,)",
            )
        if tensor.dim() == 3:
            tensor = tensor[:, None]
        self.tensor = tensor if tensor.dim() == 4 else tensor[None, None]

    def block(self, tile: Tile) -> Tensor:
        part = of_batch(self.tensor, tile.batch)
        part = part[:, :, tile.rows] if part.shape[2] > 1 else part
        part = part[..., tile.cols] if part.shape[3] > 1 else part
        return part if self.sense else ~part

    def part(self, tile: Tile, heads: slice, shift: int) -> Mask:
        part = self.tensor[:, heads] if self.tensor.shape[1] > 1 else self.tensor
        part = part[:, :, tile.rows] if part.shape[2] > 1 else part
        return type(self)(part[..., tile.cols] if part.shape[3] > 1 else part)

    def of_heads(self, heads: slice) -> Mask:
        return type(self)(self.tensor[:, heads]) if self.tensor.shape[1] > 1 else self

    def survey(self, grid: Grid) -> Survey:
        seen = self.tensor.to(torch.uint8)
        low, high = seen.amin(1), seen.amax(1)  # over heads: (B|1, N|1, M|1)
        low, high = grid.tiles(low)[0], grid.tiles(high)[1]
        some, every = high > 0, low > 0
        return Survey(some, every) if self.sense else Survey(~every, ~some)

    def check(self, batch: int, heads: int, queries: int, keys: int) -> None:
        name, shape = type(self).__name__, tuple(self.tensor.shape)
        if any(got not in (1, want) for got, want in zip(shape, (batch, heads, queries, keys), strict=True)):
            remedy = "give the mask one of the shapes (N, M), (B, N, M), (B, H, N, M)"
            if shape[:2] == (1, 1) and shape[2:] == (batch, keys):
                keep, what = ("t", "real tokens") if self.sense else ("~t", "padding")
                remedy = f"a (B, M) mask of {what} is masks.Padding(keep={keep})"
            elif shape[1] == 1 and shape[0] == heads:
                remedy = f"a mask per head is (1, H, N, M): masks.{name}(t[None])"
            elif shape[1] == 1 and shape[0] == batch * heads:
                remedy = f"a mask per text and head is (B, H, N, M): masks.{name}(t.unflatten(0, ({batch}, {heads})))"
            raise bad_value(
                name,
                expected=f"a mask that broadcasts to (B, H, N, M) = {(batch, heads, queries, keys)}",
                received=f"{shape}",
                remedy=remedy,
            )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({short(self.tensor)})"


class Hide(Keep):
    """The opposite of `Keep`, by name: a boolean tensor, True = may *not* attend (as `nn.MultiheadAttention`)."""

    sense = False


def as_mask(mask: Mask | Tensor, sizes: tuple[int, int, int] | None = None) -> Mask:
    """A mask as it is; a boolean tensor as `Keep`; anything else is an error that says what to write, the better if the
    `sizes` of the attention, B, N, M, are told."""
    if isinstance(mask, Mask):
        return mask
    if isinstance(mask, Tensor):
        return Keep(boolean_tensor("Keep", mask, sizes))
    raise bad_type(
        "mask",
        expected="a regard.masks.Mask or a boolean tensor (True = may attend)",
        received=type(mask).__name__,
        remedy="masks.Causal(), masks.Padding(lengths=...), or masks.Keep(torch.as_tensor(mask)) of booleans",
    )


def boolean_tensor(what: str, tensor: object, sizes: tuple[int, int, int] | None = None) -> Tensor:
    """The tensor of a mask, or an error that says what to write instead."""
    if not isinstance(tensor, Tensor):
        raise bad_type(what, expected="a boolean tensor", received=type(tensor).__name__)
    if tensor.dtype is not torch.bool:
        raise bad_type(
            "mask" if what == "Keep" else what,
            expected=f"a boolean tensor (True = may {'not ' if what == 'Hide' else ''}attend)",
            received=f"dtype {tensor.dtype}",
            remedy=_as_booleans(what, tensor, sizes),
        )
    return tensor


def _as_booleans(what: str, tensor: Tensor, sizes: tuple[int, int, int] | None) -> str:
    """What to write instead of numbers, for attention of `sizes` B, N, M, where they are known. Where all numbers are 0
    or hugely negative, 0 is what may be seen."""
    added = tensor.is_floating_point() and _is_added(tensor)
    if what == "Padding keep":
        return "Padding(keep=t == 0), for it is 0 at real tokens" if added else "Padding(keep=t.bool())"
    if added:
        other = "masks.Hide(t != 0)" if what == "Hide" else "masks.Keep(t == 0)"
        return f"bias=t, which adds it to the scores, or {other}, for it is 0 where a query may attend"
    remedy, keep, of = "masks.Keep(t != 0) where nonzero means visible, ", "t.bool()", "real tokens"
    if what == "Hide":
        remedy, keep, of = "", "t == 0", "padding"
    added = "t" if tensor.is_floating_point() else "t.to(q.dtype)"
    remedy += "masks.Hide(t != 0) where it means hidden (masks.Keep(t) and masks.Hide(t) for booleans), "
    remedy += f"bias={added} to add it to the scores"
    if tensor.dim() != 2 or tensor.is_floating_point():
        return remedy
    padding = f"masks.Padding(keep={keep}) for a (B, M) mask of {of}"  # what tokenizers give
    if sizes is None:
        return f"{padding}; for one (N, M) {remedy}"
    batch, queries, keys = sizes
    of_keys, of_queries = (tensor.shape[1] == keys and tensor.shape[0] in (1, size) for size in (batch, queries))
    return f"{padding}; for one (N, M) {remedy}" if of_keys == of_queries else padding if of_keys else remedy


def _is_added(tensor: Tensor) -> bool:
    """Whether a mask is one that is added to scores: 0, or so little that nothing is left of a weight."""
    try:
        little = tensor <= -1e4
        return bool(little.any()) and bool((little | (tensor == 0)).all())
    except RuntimeError:  # no numbers to look at: a compiler's, or of torch.func
        return False
