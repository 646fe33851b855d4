"""A `Call` as device code takes it: tuples of tensors and numbers, and what a kernel is compiled for.

Letters: B batch, H query heads, G kv heads, N queries, M keys, D head width of q and k, E head width of v.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard.kernels.call import Call
from regard.kernels.dropout import Dropout, threshold_of
from regard.kernels.lowering import Added, Visible, broadcast_strides, in_rows, lower_biases, lower_mask
from regard.kernels.triton.arguments import Bias, Dense, Documents, Drop, Heads, Numbers, Seen, Sinks, Sizes

__all__ = ["Lowered", "heads_of", "lower"]

LOG2_E = math.log2(math.e)


@dataclass(frozen=True)
class Lowered:
    """All that the kernels of one call share."""

    call: Call
    q: Heads
    k: Heads
    v: Heads
    sizes: Sizes
    seen: Seen
    bias: Bias | None
    numbers: Numbers
    sinks: Sinks | None
    drop: Drop | None

    @property
    def edges(self) -> int:
        """Which blocks of keys need no mask: 0 none of them, 1 all but the last of a row, 2 all but the first and
        last."""
        if self.seen.documents is not None or self.seen.dense is not None:
            return 0
        return 1 if self.seen.before is None else 2

    @property
    def plain(self) -> bool:
        """Whether nothing is read or computed pair by pair beside the product: then larger blocks fit."""
        return self.edges > 0 and self.bias is None and self.drop is None and self.call.softcap is None

    @property
    def compiled_for(self) -> dict[str, Any]:
        """What every kernel is compiled for."""
        width, values = self.call.q.shape[3], self.call.v.shape[3]
        return {
            "D": width,
            "WIDTH": power_of_two(width),
            "CAPPED": self.call.softcap is not None,
            "SCALED": self.numbers.inner != 1.0 or self.call.softcap is not None,
            "E": values,
            "VALUES": power_of_two(values),
        }


def lower(call: Call) -> Lowered:
    """A call as device code takes it; what can be computed once is kept on the call."""
    _, heads, n, m = call.shape
    q, k, v = (heads_of(x) for x in (call.q, call.k, call.v))
    sizes = Sizes(heads, heads // call.k.shape[1], n, m, call.q_start)
    seen = Seen(None, None, None, None, None, None) if call.mask is None else call.derive(_seen)
    added = call.derive(lower_biases) if call.biases else None
    drop = None if call.dropout is None else _drop(call.dropout)
    return Lowered(call, q, k, v, sizes, seen, _bias(added), _numbers(call), _sinks(call.sinks), drop)


def power_of_two(size: int) -> int:
    """The sides of a block: a power of two, and 16 at least."""
    return max(16, 1 << (size - 1).bit_length())


def heads_of(x: Tensor) -> Heads:
    """A tensor as device code reads it, copied where the numbers of a row do not lie side by side."""
    x = in_rows(x.detach())
    return Heads(x, x.stride(0), x.stride(1), x.stride(2))


def _numbers(call: Call) -> Numbers:
    """Scale and log2(e) are one multiplication, where nothing stands between them and the order of scores is kept."""
    if call.softcap is not None:
        return Numbers(call.scale / call.softcap, LOG2_E, call.softcap, call.scale)
    if call.biases or call.scale <= 0 or call.scale < 1e-20:
        return Numbers(call.scale, LOG2_E, 1.0, call.scale)
    return Numbers(1.0, call.scale * LOG2_E, 1.0, call.scale)


def _seen(call: Call) -> Seen:
    visible: Visible = call.derive(lower_mask)
    after = 0 if visible.causal else visible.after
    start, end = (None if x is None else x.to(torch.int32) for x in (visible.key_start, visible.key_end))
    return Seen(
        visible.before if visible.before >= 0 else None,
        after if after >= 0 else None,
        start,
        end,
        None if visible.documents is None else _documents(*visible.documents),
        None if visible.dense is None else _dense(visible.dense),
    )


def _documents(ids: Tensor, key_ids: Tensor) -> Documents:
    """Also between which keys each query's document lies, and between which queries each key's: blocks beyond are
    skipped."""
    ids, key_ids = ids.contiguous(), key_ids.contiguous()
    first_key, last_key = _where_equal(ids, key_ids)
    first_query, last_query = _where_equal(key_ids, ids)
    items = max(ids.shape[0], key_ids.shape[0])
    ids, key_ids = (x.expand(items, -1).contiguous() for x in (ids, key_ids))
    strides = (0, 0) if items == 1 else (ids.shape[1], key_ids.shape[1])
    return Documents(ids, key_ids, first_key, last_key, first_query, last_query, *strides)


def _where_equal(ids: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    """For each of `ids` (1|B, n) the first of `others` (1|B, m) that is equal to it and the one after the last; 0 and 0
    where there is none: (1|B, n) int32 each."""
    items, m = max(ids.shape[0], others.shape[0]), others.shape[1]
    ids = ids.expand(items, -1).contiguous()
    others, order = others.expand(items, -1).sort(dim=1, stable=True)
    others = others.contiguous()
    begin, end = torch.searchsorted(others, ids), torch.searchsorted(others, ids, right=True)
    first = order.gather(1, begin.clamp(max=m - 1))
    last = order.gather(1, (end - 1).clamp(min=0)) + 1
    none = end <= begin
    return tuple(x.masked_fill(none, 0).to(torch.int32) for x in (first, last))  # type: ignore[return-value]


def _dense(visible: Tensor) -> Dense:
    return Dense(visible.view(torch.uint8), *broadcast_strides(visible))


def _bias(added: Added | None) -> Bias | None:
    return None if added is None else Bias(added.tensor, added.first, *added.strides)


def _sinks(sinks: Tensor | None) -> Sinks | None:
    if sinks is None:
        return None
    sinks = sinks.detach().resolve_neg().to(torch.float32)
    return Sinks(sinks, *broadcast_strides(sinks))


def _drop(dropout: Dropout) -> Drop:
    rows, cols = dropout.rows.contiguous(), dropout.cols.contiguous()
    b, h, _ = broadcast_strides(rows)
    return Drop(rows, cols, b, h, broadcast_strides(cols)[0], threshold_of(dropout.p), dropout.kept)
