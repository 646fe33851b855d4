"""Masks as runs of keys: where each query sees the keys from one slot up to another and none between is hidden, two
numbers per query say it all.

Letters: B batch, N queries, M keys; n the rows of one strip.
"""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor

from regard.masks.algebra import And, Or
from regard.masks.base import Mask
from regard.masks.causal import Causal, Prefix, Window
from regard.masks.chunk import Chunk
from regard.masks.padding import Documents, Padding
from regard.masks.tiles import Tile

__all__ = ["KeySlots", "key_runs", "runs_of_pairs"]

Runs: TypeAlias = tuple[Tensor, Tensor]  # the first slot and the one after the last, (1|B, 1|N) each
PAIRS = 2**24  # of a mask that are evaluated at once


class KeySlots:
    """Finds keys by their positions (1|B, M), where these do not fall from slot to slot.

    >>> KeySlots(torch.tensor([[3, 5, 8]])).before(torch.tensor([[5, 9]]))
    tensor([[1, 3]])
    """

    def __init__(self, positions: Tensor) -> None:
        steps = positions[:, 1:] - positions[:, :-1]
        self.positions = positions
        least, most = (int(x) for x in steps.aminmax()) if steps.numel() else (1, 1)
        self.rising, self.consecutive = least >= 0, least == most == 1

    def before(self, positions: Tensor) -> Tensor:
        """How many keys stand before each position, (1|B, ...): the slot of the first key at or after it."""
        keys = self.positions
        if self.consecutive:
            first = keys[:, 0].view(-1, *[1] * (positions.dim() - 1))
            return (positions - first).clamp_(0, keys.shape[1])
        items = max(keys.shape[0], positions.shape[0])
        wanted = positions.expand(items, *positions.shape[1:])
        slots = torch.searchsorted(keys.expand(items, -1).contiguous(), wanted.flatten(1).contiguous())
        return slots.view(wanted.shape)


def key_runs(mask: Mask | None, tile: Tile) -> Runs | None:
    """Of each query of the whole plane the slot of the first key that it sees, and the slot after the last: (1|B, N)
    each, equal where it sees nothing. None if keys between them are hidden from some query.

    `Causal`, `Window`, `Prefix`, `Chunk`, `Padding`, `Documents` and what `&` and `|` make of them are told without
    looking at a pair; other masks are evaluated, some rows at a time. A mask must be the same for all heads.

    >>> from regard.masks.tiles import whole
    >>> [x.tolist() for x in key_runs(Causal() & Window(2), whole(3, 3))]
    [[[0, 0, 1]], [[1, 2, 3]]]
    """
    runs = _told(mask, tile, KeySlots(tile.k_positions))
    if runs is None:
        assert mask is not None
        runs = _looked_up(mask, tile)
    if runs is None:
        return None
    low, high = torch.broadcast_tensors(*runs)
    items, queries = low.shape[0], tile.shape[0]
    return low.expand(items, queries), high.expand(items, queries)


def runs_of_pairs(visible: Tensor) -> Runs | None:
    """The same of booleans (1|B, 1|N, M), True = may attend."""
    if visible.stride(1) == 0:  # one row for all queries, expanded
        visible = visible[:, :1]
    low = visible.view(torch.uint8).argmax(-1)
    some = visible.gather(-1, low[..., None])[..., 0]
    rises = visible[..., 1:] > visible[..., :-1]
    # A run rises once, if it does not begin at slot 0, and what is no run rises more often: the sum tells for all rows.
    if int(torch.count_nonzero(rises)) != int(torch.count_nonzero(some & ~visible[..., 0])):
        return None
    falls = torch.nn.functional.pad(
        visible[..., :-1] > visible[..., 1:], (0, 1), value=True
    )  # at the end, at the latest
    high = falls.view(torch.uint8).argmax(-1) + 1
    return low, high.where(some, low)


def _looked_up(mask: Mask, tile: Tile) -> Runs | None:
    """From the pairs themselves, some rows at a time."""
    queries, keys = tile.shape
    step = max(1, PAIRS // max(1, keys * max(1, tile.items)))
    parts: list[Runs] = []
    for start in range(0, queries, step):
        rows = slice(start, min(start + step, queries))
        visible = mask.block(tile._replace(rows=rows, q_positions=tile.q_positions[:, rows]))[:, 0]
        runs = runs_of_pairs(visible.expand(*visible.shape[:2], keys))
        if runs is None:
            return None
        parts.append(runs)
    counts = [min(step, queries - start) for start in range(0, queries, step)]
    low, high = ([x.expand(-1, n) for x, n in zip(side, counts, strict=True)] for side in zip(*parts, strict=True))
    return torch.cat(low, 1), torch.cat(high, 1)


def _told(mask: Mask | None, tile: Tile, slots: KeySlots) -> Runs | None:
    """From what a mask is made of; None where that does not tell."""
    kind, keys, queries = type(mask), tile.shape[1], tile.q_positions
    zero = queries.new_zeros(1, 1)
    if mask is None:
        return zero, zero + keys
    if isinstance(mask, And) and kind in (And, Or):
        left, right = (_told(part, tile, slots) for part in (mask.left, mask.right))
        if left is None or right is None:
            return None
        return _both(left, right) if kind is And else _either(left, right)
    if kind in (Causal, Window, Prefix, Chunk) and not slots.rising:
        return None
    if kind is Causal:
        return zero, slots.before(queries + 1)
    if isinstance(mask, Window) and kind is Window:
        return slots.before(queries - mask.before), slots.before(queries + mask.after + 1)
    if isinstance(mask, Prefix) and kind is Prefix:
        n = mask.n[:, None] if isinstance(mask.n, Tensor) else zero + mask.n
        return zero, slots.before(n.to(zero.device))
    if isinstance(mask, Chunk) and kind is Chunk:
        first = mask.numbers(queries) * mask.size + mask.start
        return slots.before(first), slots.before(first + mask.size)
    if isinstance(mask, Padding) and kind is Padding:
        if mask.lengths is not None:
            return zero, mask.lengths.clamp(0, keys)[:, None]
        assert mask.keep is not None
        return runs_of_pairs(mask.keep[:, None])
    if isinstance(mask, Documents) and kind is Documents:
        return _documents(*mask.sides(tile.queries))
    return None


def _both(a: Runs, b: Runs) -> Runs:
    low = torch.maximum(a[0], b[0])
    return low, torch.maximum(torch.minimum(a[1], b[1]), low)


def _either(a: Runs, b: Runs) -> Runs | None:
    """None where there is a gap between two runs."""
    no_a, no_b = a[0] == a[1], b[0] == b[1]
    gap = torch.maximum(a[0], b[0]) > torch.minimum(a[1], b[1])
    if bool((gap & ~no_a & ~no_b).any()):
        return None
    low, high = torch.minimum(a[0], b[0]), torch.maximum(a[1], b[1])
    low, high = (torch.where(no_a, y, x) for x, y in ((low, b[0]), (high, b[1])))
    return torch.where(no_b, a[0], low), torch.where(no_b, a[1], high)


def _documents(ids: Tensor, key_ids: Tensor) -> Runs | None:
    """Where the keys of each query's document lie; None where a document lies in several pieces."""
    items, m = max(ids.shape[0], key_ids.shape[0]), key_ids.shape[1]
    both = torch.cat([x.to(torch.int64).expand(items, -1) for x in (ids, key_ids)], 1)
    kinds, number = both.unique(return_inverse=True)
    of_queries, of_keys = number[:, : ids.shape[1]], number[:, ids.shape[1] :]
    slots = torch.arange(m, device=ids.device).expand(items, -1)
    empty = slots.new_zeros(items, kinds.numel())
    first = (empty + m).scatter_reduce(1, of_keys, slots, "amin")
    end = empty.scatter_reduce(1, of_keys, slots + 1, "amax")
    count = empty.scatter_add(1, of_keys, torch.ones_like(slots))
    if bool(((end - first != count) & (count > 0)).any()):
        return None
    low = first.gather(1, of_queries)
    return low, low + count.gather(1, of_queries)
