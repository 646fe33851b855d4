"""Plans of measured calls: what `plans.py` does for `attend`, for the layers of a model that is watched.

    measured = repeat(call, run, output)     output and log-sum-exp, where there is a plan for such a call
    keep(call, run, out)                     else make one, of the call as it was computed
    plan_of(call, run, output)               the plan itself, for whoever knows that the next call is like this one
    lasting(plan, run)                       what of it holds for other texts of the same size

A plan is kept with what the run shares (`MeasureRun.kept`): other layers of the same forward, with the same tokens and
mask. Only addresses differ between them.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch import get_num_threads as num_threads

from regard.kernels import native, plans
from regard.kernels import native_library as library
from regard.kernels import run as kernel_run
from regard.kernels.call import Call
from regard.kernels.lowering import in_rows
from regard.kernels.native_statistics import NO_STATISTICS, LastingStatistics, Statistics
from regard.measures import MeasureRun

__all__ = ["LastingPlan", "MeasuredPlan", "keep", "lasting", "plan_of", "planned", "repeat"]

_STATISTICS = struct.Struct(f"{len(NO_STATISTICS)}q")  # the last fields of `native_library.CALL`


@dataclass(frozen=True, slots=True)
class MeasuredPlan:
    """A measured call as C reads it, without the addresses of q, k, v and of what it writes."""

    found: tuple[library.Library | None, str | None] | None  # the library that was in use
    function: Callable[[bytes], int]
    before: bytes  # what stands before the addresses of q, k, v, out and lse
    after: bytes  # from there to the statistics
    statistics: Statistics
    strides: tuple[int, ...]  # of the output

    def is_valid(self) -> bool:
        """Whether the library is the one that it was made for."""
        return self.found is library._found

    def compute(self, q: Tensor, k: Tensor, v: Tensor, output: bool = True) -> tuple[Tensor | None, Tensor, Tensor]:
        """Output (B, H, N, E), log-sum-exp (B, H, N) and the block of statistics of a call with these tensors."""
        batch, heads, n, _ = q.shape
        out = q.new_empty_strided((batch, heads, n, v.shape[3]), self.strides) if output else None
        lse = q.new_empty((batch, heads, n), dtype=torch.float32)
        block = self.statistics.new_block()
        addresses = plans.pack(
            q.data_ptr(), k.data_ptr(), v.data_ptr(), 0 if out is None else out.data_ptr(), lse.data_ptr()
        )
        fields = _STATISTICS.pack(*self.statistics.packed(block))
        library.raise_for(self.function(self.before + addresses + self.after + fields))
        return out, lse, block


@dataclass(frozen=True, slots=True)
class LastingPlan:
    """A plan without its text."""

    plan: MeasuredPlan
    statistics: LastingStatistics

    def is_valid(self) -> bool:
        """Whether the library is the one that it was made for, and the native kernel is still the first to be asked."""
        return kernel_run.MEASURING[0] is native and self.plan.is_valid()

    def of(self, ids: Tensor | None) -> MeasuredPlan:
        """The plan for a text with these token ids (1|B, N)."""
        return replace(self.plan, statistics=self.statistics.of(ids))


def lasting(plan: MeasuredPlan, run: MeasureRun) -> LastingPlan | None:
    """What of a plan holds for other texts of the same size, whose calls differ in token ids and numbers alone."""
    statistics = plan.statistics.lasting(run)
    return None if statistics is None else LastingPlan(replace(plan, statistics=statistics.like), statistics)


def plan_of(call: Call, run: MeasureRun, output: bool) -> MeasuredPlan | None:
    """The plan for such a call, if there is one."""
    key = _key(call, run, output)
    plan = None if key is None or run.kept is None else run.kept.get(key)
    return plan if plan is not None and plan.is_valid() else None


def repeat(call: Call, run: MeasureRun, output: bool) -> tuple[Tensor | None, Tensor] | None:
    """Output and log-sum-exp of a call that has a plan, with its statistics handed to the run; else None."""
    plan = plan_of(call, run, output)
    if plan is None:
        return None
    out, lse, block = plan.compute(call.q, call.k, call.v, output)
    native.hand_over(plan.statistics, block, run)
    return out, lse


def keep(call: Call, run: MeasureRun, out: Tensor | None, lse: Tensor) -> None:
    """Make a plan of a call that was computed, for the next one like it; if the native kernel computed it, and reads
    all tensors of the call where they are."""
    key = _key(call, run, out is not None)
    if key is None or run.kept is None or run.sees_all is None:
        return
    plan = planned(call, run, out, lse)
    if plan is not None:
        run.kept[key] = plan


def planned(call: Call, run: MeasureRun, out: Tensor | None, lse: Tensor) -> MeasuredPlan | None:
    """A plan of a call that the native kernel serves, with such an output and log-sum-exp; None if C does not read all
    its tensors where they are."""
    loaded = library.load()
    if loaded is None or any(in_rows(x) is not x for x in (call.q, call.k, call.v)) or not plans._in_place(call):
        return None
    packed = native._packed(call, out, lse).call
    before, after = packed[: plans._FIRST], packed[plans._LAST : -_STATISTICS.size]
    strides = () if out is None else out.stride()
    statistics = Statistics.of(call, run)
    return MeasuredPlan(library._found, loaded.handle.regard_attention, before, after, statistics, strides)


def _key(call: Call, run: MeasureRun, output: bool) -> Hashable | None:
    """Everything that the result depends on, but for numbers in memory; None where there is no plan."""
    if run.kept is None or call.biases or call.sinks is not None or call.dropout is not None:
        return None
    q, k, v = call.q, call.k, call.v
    if not q.is_cpu or q.is_neg() or k.is_neg() or v.is_neg() or not call.contiguous:
        return None
    mask = None if call.mask is None else plans._mask_key(call.mask, learns=False)
    if mask is None and call.mask is not None:
        return None
    shapes = q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype
    return shapes, call.scale, call.softcap, call.q_start, mask, output, num_threads(), library.instruction_set
