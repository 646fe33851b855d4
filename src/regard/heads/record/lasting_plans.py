"""Plans of layers that hold for other forwards and other watches: all but the token ids of a text was found before.

The first layer of a forward is described at length: its positions, what there is to measure, what C is to be asked for.
For a model that is run again on texts of the same size all of it is the same but for the token ids, if no tensor
besides q, k and v decides what is visible. So what was found is kept here, by everything that it depends on: the key of
the layer (`capture/layer_plans.py`), the measures, and the size of the ids. No tensor of a model or text is kept.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from regard.heads.capture.observed import ObservedCall
from regard.heads.record.shared_planes import SharedPlane
from regard.kernels import Call, measured_plans
from regard.measures import MeasureRun

__all__ = ["LastingLayerPlan", "find", "forget_all", "keep"]

MOST = 64  # that are kept; when there are more, all are forgotten


@dataclass(frozen=True, slots=True)
class LastingLayerPlan:
    """A layer that was seen, without its text."""

    kind: Literal["self", "cross"]
    call: Call  # without q, k and v
    numbers: list[int]  # of the measures that are usable
    measured: measured_plans.LastingPlan


_plans: dict[Hashable, LastingLayerPlan] = {}


def forget_all() -> None:
    """Forget all plans."""
    _plans.clear()


def find(key: Hashable, ids: Tensor | None) -> LastingLayerPlan | None:
    """The plan for a layer with this key in a text with such token ids (1|B, N)."""
    plan = _plans.get((key, None if ids is None else ids.shape))
    return plan if plan is not None and plan.measured.is_valid() else None


def keep(
    key: Hashable,
    attention: ObservedCall,
    shared: SharedPlane,
    numbers: list[int],
    measured: measured_plans.MeasuredPlan,
    run: MeasureRun,
) -> None:
    """Keep what lasts of a plan: nothing if tensors beside q, k and v, or padding, are part of what it depends on."""
    call, ids = attention.call, attention.ids
    assert call is not None
    others = (shared.padding, call.positions, call.key_positions, attention.numbers)
    if any(x is not None for x in others) or (call.mask is not None and next(call.mask.tensors(), None) is not None):
        return
    lasting = measured_plans.lasting(measured, run)
    if lasting is None:
        return
    if len(_plans) >= MOST:
        _plans.clear()
    _plans[key, None if ids is None else ids.shape] = LastingLayerPlan(attention.kind, call, numbers, lasting)
