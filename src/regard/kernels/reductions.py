"""What the kernels that compute statistics themselves, native and triton, share: lists of keys and weighted columns as
they read them, and what they ask of a plane.

Letters: B batch, H query heads, M keys, K sums for each query.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from regard.kernels.call import Call
from regard.measures import KeyLists, Plane

__all__ = ["flat_lists", "is_contiguous", "is_unpadded", "item_stride", "joined_columns", "numbered"]


def is_contiguous(call: Call, plane: Plane) -> bool:
    """Whether the plane's positions are those of the call, one after another, up to where they begin."""
    return call.contiguous and plane.once(("contiguous", call.q_start), lambda: _in_steps(call, plane))


def _in_steps(call: Call, plane: Plane) -> bool:
    keys, queries = plane.k_positions, plane.q_positions
    if keys is call.whole().k_positions and queries is call.whole().q_positions:
        return True
    rows = torch.arange(queries.shape[1], device=queries.device) + call.q_start
    slots = torch.arange(keys.shape[1], device=keys.device)
    return torch.equal(queries - keys[:, :1], rows[None].expand(queries.shape)) and torch.equal(
        keys - keys[:, :1], slots[None].expand(keys.shape)
    )


def flat_lists(lists: KeyLists) -> KeyLists:
    """With indices into the keys of all items in a row, as kernels read them."""
    keys, begin, end = lists.keys.contiguous(), lists.begin, lists.end
    if keys.shape[0] > 1:
        first = torch.arange(keys.shape[0], device=keys.device)[:, None, None] * keys.shape[1]
        begin, end = begin + first, end + first
    return KeyLists(keys, begin.contiguous(), end.contiguous())


def numbered(slots: Tensor, plane: Plane) -> Tensor:
    """The numbers in the whole text of keys in some slots; -1 stays -1."""
    if plane.numbers is None:
        return slots
    return plane.numbers[slots.clamp(min=0)].where(slots >= 0, -1)


def joined_columns(several: Sequence[Tensor]) -> Tensor:
    """The columns of several reductions, (1|B, 1|H, k, M) each, as one tensor (1|B, 1|H, K, M), float32."""
    lead = [max(x.shape[axis] for x in several) for axis in (0, 1)]
    return torch.cat([x.to(torch.float32).expand(*lead, -1, -1) for x in several], 2)


def is_unpadded(plane: Plane) -> bool:
    """Whether no text is padded: texts of several lengths have cells of several sizes in a heatmap."""
    return plane.padding is None and plane.key_padding is None


def item_stride(x: Tensor, axis: int = 0) -> int:
    """From item to item; 0 where one is for all."""
    return 0 if x.shape[axis] == 1 else x.stride(axis)
