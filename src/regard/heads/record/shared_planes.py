"""What is known of an attention call besides its tensors, computed once for all layers that agree in it.

The layers of a model mostly have the same tokens, positions and mask; then padding, the lists of keys of a measure and
the uniform baseline are the same, too. Layers agree if they are of one outermost call and have equal sizes, the same
tensors of ids, positions and masks, and equally many tokens so far.

Letters: B batch, N queries, M keys.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from regard.heads.capture.observed import ObservedCall
from regard.heads.record.chunk_plane import chunk_plane
from regard.heads.record.sequences import SequenceRecord, padding, runs
from regard.heads.record.uniform import UniformBaseline
from regard.masks import Mask
from regard.measures import Measure, Plane

__all__ = ["SharedPlane", "SharedPlanes", "mask_key"]

MOST = 8  # that are kept: layers take turns with few masks


@dataclass
class SharedPlane:
    """What layers that agree share. The attention keeps its tensors alive, so that no others have their addresses."""

    attention: ObservedCall | None  # None once the watch has ended
    padding: Tensor | None  # (B, 1, N), as `sequences.padding` gives it
    by_total: dict[int, Tensor] = field(default_factory=dict)
    planes: dict[Any, Plane] = field(default_factory=dict)
    baselines: dict[Any, Any] = field(default_factory=dict)
    ids: Tensor | None = None  # a copy
    fresh: dict[int, Plane] = field(default_factory=dict)  # by H: of layers that may be filed later (`filing.py`)

    def own_ids(self, ids: Tensor | None) -> Tensor | None:
        """A copy of the token ids (1|B, N), which a model or its caller may write over: one for all these layers."""
        if ids is not None and self.ids is None:
            self.ids = ids.clone()
        return None if ids is None else self.ids

    def numbers(self, attention: ObservedCall, total: int) -> Tensor:
        """Which tokens of a sequence, of `total` so far, the keys of one of these layers are: (M,)"""
        if attention.numbers is not None:
            return attention.numbers
        if total not in self.by_total:
            self.by_total[total] = torch.arange(total - attention.shape[3], total, device=attention.device)
        return self.by_total[total]

    def runs(self, attention: ObservedCall, total: int) -> list[slice]:
        """The same as runs of numbers."""
        if attention.numbers is not None:
            return runs(attention.numbers)
        m = attention.shape[3]
        return [slice(total - m, total)] if m else []

    def plane(self, attention: ObservedCall, text: SequenceRecord, numbers: Tensor, with_values: bool) -> Plane:
        """`chunk_plane` of one of these layers, with its values and output projection if they are needed."""
        heads = attention.shape[1]
        key = (*_history(text), heads)
        plane = self.planes.get(key)
        if plane is None:
            plane = self.planes[key] = chunk_plane(attention, text, numbers)
        call = attention.call
        if call is None or not with_values:
            return plane
        return replace(plane, values=call.v, out_weight=attention.out_weight).sharing(plane.shared)

    def baseline(self, attention: ObservedCall, measures: list[Measure], text: SequenceRecord, plane: Plane) -> Any:
        """`UniformBaseline` of one of these layers."""
        key = _history(text)
        if key not in self.baselines:
            self.baselines[key] = UniformBaseline.of(attention, measures, plane)
        return self.baselines[key]


class SharedPlanes:
    """The planes of the layers of one watch."""

    def __init__(self) -> None:
        self._known: dict[Any, SharedPlane] = {}

    def end(self) -> None:
        """Keep no tensors alive."""
        for known in self._known.values():
            known.attention = None

    def of(self, attention: ObservedCall) -> SharedPlane:
        """What is known of an attention and of those before it that agree with it."""
        call, weights = attention.call, attention.weights
        batch, _, n, m = attention.shape
        if call is not None:
            of_call = call.q_start, call.dtype, mask_key(call.mask), call.positions, call.key_positions
        else:  # weights that were built by hand: what they hide has to be looked at
            assert weights is not None
            if attention.band is None and not attention.visible.all():
                return SharedPlane(attention, padding(attention))
            of_call = m - n, weights.dtype, mask_key(attention.band), None, None
        start, dtype, mask, *positions = of_call
        ids = tuple([None if x is None else x.data_ptr() for x in (attention.ids, *positions, attention.numbers)])
        key = (attention.forward, attention.kind, batch, n, m, start, dtype, ids, mask, call is None)
        known = self._known.get(key)
        if known is None:
            if len(self._known) >= MOST:
                self._known.clear()
            alive = attention if call is not None else replace(attention, weights=None, values=None, output=None)
            known = self._known[key] = SharedPlane(alive, padding(attention))
        return known


def _history(text: SequenceRecord) -> tuple[Any, ...]:
    """What a plane takes from the chunks before."""
    hidden = text.key_padding
    return (
        text.total,
        bool(text.pieces),
        None if text.ids is None else tuple(text.ids.shape),
        None if hidden is None else (*hidden.shape, int(hidden.sum())),
    )


def mask_key(mask: Mask | None) -> Any:
    """A key that equal masks share: their kinds, numbers, and the addresses of their tensors."""
    if mask is None:
        return None
    return (type(mask), *(_field_key(getattr(mask, name)) for name in mask.fields))


def _field_key(value: Any) -> Any:
    if isinstance(value, Mask):
        return mask_key(value)
    if isinstance(value, torch.Tensor):
        return value.data_ptr(), value.shape, value.stride()
    try:
        hash(value)
    except TypeError:
        return id(value)
    return value
