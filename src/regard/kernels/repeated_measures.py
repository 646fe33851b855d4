"""Plans of `regard.measure`: what `plans.py` does for `attend`. A call of the same sizes, options and measures as an
earlier one goes straight to the native kernel, with other tensors.

    found, key = repeat(q, k, v, measures, kernel, options)     the results, where there is a plan for such a call
    keep(key, call, plane, measures, output)                    else make one, of the call as it was prepared

There are none where a tensor beside q, k and v decides what is visible or measured (token ids, masks, sinks,
positions), for gradients, and for measures whose settings are not plain numbers. A plan holds no tensor of the caller's
and none of the caller's measures, which may be changed.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import get_num_threads as num_threads
from torch import is_grad_enabled

from regard.kernels import measured_plans, native, operators, plans
from regard.kernels import native_library as library
from regard.kernels import run as kernel_run
from regard.kernels.call import Call
from regard.measures import DEFAULT, Measure, Measurements, MeasureRun, Plane, as_measures
from regard.measures.run import measures_key

__all__ = ["clear", "keep", "repeat"]

MOST = 128  # plans; when there are more, all are forgotten


@dataclass(frozen=True, slots=True)
class _Plan:
    measured: measured_plans.MeasuredPlan
    measures: list[Measure]
    plane: Plane


_plans: dict[Hashable, _Plan | None] = {}  # None: such calls have no plan


def clear() -> None:
    """Forget all plans."""
    _plans.clear()


def repeat(
    q: Any, k: Any, v: Any, measures: Any, kernel: Any, options: Mapping[str, Any]
) -> tuple[Measurements, None] | tuple[None, Hashable | None]:
    """The results of a call that has a plan, with the output if v is not None; else None and the key for `keep`, which
    is None where the call has to take the usual way."""
    output = v is not None
    values = v if output else k
    if not plans.may_repeat(q, k, values) or kernel not in ("auto", native.name):
        return None, None
    if output and is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return None, None
    others, asked = plans.options_key(options, learns=False), _asked(measures)
    if others is None or asked is None:
        return None, None
    try:
        tensors = q.shape, k.shape, values.shape, q.stride(), k.stride(), values.stride()
    except RuntimeError:  # nested and sparse tensors have no such thing
        return None, None
    dtypes = q.dtype, k.dtype, values.dtype
    key = tensors, dtypes, output, kernel, num_threads(), library.instruction_set, others, asked
    plan = _plans.get(key)
    if plan is None:
        return None, None if key in _plans else key
    if kernel_run.MEASURING[0] is not native or not plan.measured.is_valid():
        return None, key
    with torch.no_grad():
        out, lse, block = plan.measured.compute(q, k, values, output)
        run = MeasureRun(plan.measures, plan.plane)
        native.hand_over(plan.measured.statistics, block, run)
        results = run.result(lse)
    results.output = out
    return results, None


def _asked(measures: Any) -> Hashable | None:
    """The measures by their names, or by their classes and settings; None where there is no plan."""
    if measures is None:
        return DEFAULT
    if type(measures) is str:
        return (measures,)
    if isinstance(measures, Measure):
        return measures_key([measures])
    if type(measures) not in (list, tuple):  # (an iterator can be read once only)
        return None
    if all(type(measure) is str for measure in measures):
        return tuple(measures)
    return measures_key(as_measures(measures))


def keep(key: Hashable, call: Call, plane: Plane, measures: list[Measure], output: bool) -> None:
    """Make a plan of a call that was measured on this plane, for the next one with this key."""
    if len(_plans) >= MOST:
        _plans.clear()
    _plans[key] = _plan_of(call, plane, measures, output)


def _plan_of(call: Call, plane: Plane, measures: list[Measure], output: bool) -> _Plan | None:
    if kernel_run.MEASURING[0] is not native or native.why_not(call) is not None or not native.worth(call):
        return None
    of_mask = () if call.mask is None else call.mask.tensors()
    if not call.contiguous or call.sinks is not None or any(True for _ in of_mask):
        return None
    own = [copy(measure) for measure in measures]
    out, lse = operators.new_output(call.q, call.v)
    with torch.no_grad():
        measured = measured_plans.planned(call, MeasureRun(own, plane), out if output else None, lse)
    if measured is None or not measured.statistics.may_wait:
        return None
    return _Plan(measured, own, plane)
