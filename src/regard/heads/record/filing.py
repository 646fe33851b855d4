"""From attention calls to the layers of a record: each is measured when it is seen, and filed as a chunk of a sequence.

Filing takes longer than measuring a short text. So a call that begins a new sequence, like others of the same forward,
waits with its measurements until the record is read. What it is filed with are copies, where the model may write over
its own tensors meanwhile.

Letters: B batch, H query heads, N queries, M keys, E head width of v.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from regard.heads.capture.cache_tracking import SequenceTracker, trimmed
from regard.heads.capture.observed import ObservedCall, Subtracted
from regard.heads.module_names import applies_rotary
from regard.heads.record import lasting_plans
from regard.heads.record.chunk_plane import usable
from regard.heads.record.layer_record import LayerRecord
from regard.heads.record.sequences import Chunk, Difference, MeasuredLater, SequenceRecord, measured_later, sees_all
from regard.heads.record.shared_planes import SharedPlane, SharedPlanes
from regard.kernels import Call, measured_plans, native
from regard.measures import Measure, Measurements, MeasureRun, Plane
from regard.measures.run import measures_key

__all__ = ["Filing", "LayerPlan"]

MOST_FOR_ROLES = 2**23  # numbers of q, k and v of a text in a layer that are kept for `roles` if nothing is to be kept


@dataclass(slots=True)
class LayerPlan:
    """A call that was seen, as others of the same forward are that differ in their layer and numbers alone."""

    attention: ObservedCall  # without q, k and v
    shared: SharedPlane
    measures: list[Measure]
    measured: measured_plans.MeasuredPlan
    mask: Tensor | None  # the one that was given as a tensor: its key has it by its id

    def is_valid(self) -> bool:
        """Whether it can be computed."""
        return self.measured.is_valid()


@dataclass(slots=True)
class _Waiting:
    """A call that was measured, and is to be filed: with tensors of its own."""

    attention: ObservedCall
    shared: SharedPlane
    measurements: MeasuredLater
    forward: int


@dataclass(slots=True)
class _WaitingByPlan:
    """The same of a call that is like another one."""

    plan: LayerPlan
    layer: str
    module: nn.Module
    forward: int
    tensors: tuple[Tensor, Tensor, Tensor]  # q, k, v
    lse: Tensor
    block: Tensor  # its statistics

    def described(self) -> _Waiting:
        """It as if it had been described when it was seen."""
        plan, like = self.plan, self.plan.attention
        assert like.call is not None
        call, ids = like.call.of(*self.tensors), plan.shared.own_ids(like.ids)
        attention = ObservedCall(self.layer, self.module, self.forward, like.kind, call, ids=ids)
        attention.padding = like.padding
        run = MeasureRun(plan.measures, _whole_plane(attention, plan.shared))
        plane = run.plane
        native.hand_over(plan.measured.statistics, self.block, run)
        run.plane = plane  # (that of the statistics may be of another text)
        return _Waiting(attention, plan.shared, MeasuredLater(run, self.lse), self.forward)


class Filing:
    """Files what a watch sees. It knows neither the watch nor the record, only its layers by name."""

    def __init__(
        self, measures: list[Measure], keep: Literal["qk", "qkv"] | None, is_wanted: Callable[[str], bool]
    ) -> None:
        self.measures, self.keep, self.is_wanted = measures, keep, is_wanted
        # The uniform baseline is one head without values; maps and choices of it mean nothing.
        of_weights = [
            measure
            for measure in measures
            if not (measure.needs_out_weight or measure.needs_all_heads or measure.needs_scores)
        ]
        self.baselines = [measure for measure in of_weights if not {"map", "choice"} >= set(measure.gives.values())]
        self.needs_values = any(_may_need_values(measure) for measure in measures)
        self.keeps = keep is not None or any("map" in measure.gives.values() for measure in measures)
        self.by_name: dict[str, LayerRecord] = {}
        self.unwanted: set[str] = set()  # layers that ran and were not asked for
        self.tracker = SequenceTracker()
        self.planes = SharedPlanes()
        self.saved: dict[str, Any] = {}  # snapshots of layers before the outermost call `saved_in`
        self.saved_in = -1
        self.waiting: list[_Waiting | _WaitingByPlan] = []
        self.lock = threading.RLock()  # several threads may read a record
        self.over = False  # whether the watch has ended
        self.most_for_roles = MOST_FOR_ROLES

    @property
    def is_empty(self) -> bool:
        """Whether nothing was seen."""
        return not self.by_name and not self.waiting

    def end(self) -> None:
        """The watch has ended: let go of the model's tensors."""
        self.planes.end()
        self.planes, self.over = SharedPlanes(), True

    def see(self, attention: ObservedCall) -> Callable[[], bool] | None:
        """Measure a call, as the next chunk of a sequence or as a new sequence. If it is `to_compute` sets its output,
        and returns a function that tells whether each query sees a key."""
        given, attention = attention, trimmed(attention)
        shared = self.planes.of(attention)
        attention.padding = shared.padding
        measurements = self._measure_to_file_later(attention, shared)
        if measurements is None:
            self.file_waiting()
            measurements = self._file(attention, shared)
        if measurements is None:
            return None
        given.output = attention.output
        return partial(sees_all, measurements)

    def file_waiting(self) -> None:
        """File the calls that wait."""
        if not self.waiting:
            return
        with self.lock, torch.no_grad(), torch._C.DisableTorchFunction():
            waiting, self.waiting = self.waiting, []
            for one in waiting:
                call = one.described() if isinstance(one, _WaitingByPlan) else one
                self._file(call.attention, call.shared, call.measurements, own=True)

    def failed(self, forward: int) -> None:
        """An outermost call raised: forget what it read."""
        self.waiting = [one for one in self.waiting if one.forward != forward]
        self.file_waiting()
        self.tracker.failed(forward)
        if self.saved_in != forward:
            return
        for name, snapshot in self.saved.items():
            if snapshot is None:
                self.by_name.pop(name, None)
            else:
                self.by_name[name].restore(snapshot)

    def _measure_to_file_later(
        self, attention: ObservedCall, shared: SharedPlane
    ) -> Measurements | MeasuredLater | None:
        """Measure a call that may be filed later; None if it may not."""
        call = attention.call
        if call is None or not self._may_wait(attention):
            return None
        fresh = shared.fresh.get(call.q.shape[1]) or self._fresh_plane(attention, shared)
        if fresh is None:
            return None
        if self.waiting and self.waiting[-1].forward != attention.forward:
            self.file_waiting()  # one forward waits at most
        measurements = measured_later(attention, self.measures, fresh)
        if not isinstance(measurements, MeasuredLater):
            self.file_waiting()
            return self._file(attention, shared, measurements)
        own = call if attention.steady else call.of(call.q.clone(), call.k.clone(), call.v.clone())
        ids = shared.own_ids(attention.ids)
        later = ObservedCall(attention.layer, attention.module, attention.forward, attention.kind, own, ids=ids)
        later.padding = shared.padding
        self.waiting.append(_Waiting(later, shared, measurements, attention.forward))
        return measurements

    def plan(self, key: Hashable, attention: ObservedCall, mask: Tensor | None) -> LayerPlan | None:
        """After `see`: a plan for layers like this one, which may be filed later; None if each has to be described."""
        call, shared = attention.call, self.planes.of(attention)
        fresh = None if call is None else shared.fresh.get(call.q.shape[1])
        if call is None or fresh is None or not self._may_wait(attention):
            return None
        measures = usable(self.measures, fresh)
        run = MeasureRun(measures, fresh)
        measured = measured_plans.plan_of(call, run, output=True)
        if measured is None:
            return None
        like = ObservedCall(attention.layer, attention.module, attention.forward, attention.kind)
        like.ids, like.padding = attention.ids, shared.padding
        nothing = call.q.new_empty(0)
        like.call = call.of(nothing, nothing, nothing)
        lasting_key = self._lasting_key(key) if mask is None else None
        if lasting_key is not None:
            numbers = [i for i, measure in enumerate(self.measures) if measure in measures]
            lasting_plans.keep(lasting_key, like, shared, numbers, measured, run)
        return LayerPlan(like, shared, measures, measured, mask)

    def plan_of_earlier(
        self, key: Hashable, layer: str, module: nn.Module, forward: int, ids: Tensor | None
    ) -> LayerPlan | None:
        """A plan for a layer like one of another forward or another watch, in a text with these ids (1|B, N)."""
        lasting_key = self._lasting_key(key) if ids is None or (type(ids) is Tensor and ids.is_cpu) else None
        lasting = None if lasting_key is None else lasting_plans.find(lasting_key, ids)
        if lasting is None:
            return None
        if self.waiting and self.waiting[-1].forward != forward:
            self.file_waiting()  # one forward waits at most
        like = ObservedCall(layer, module, forward, lasting.kind, lasting.call)
        like.ids = ids
        shared = SharedPlane(None, None)
        own_ids = shared.own_ids(ids)
        measures = [self.measures[i] for i in lasting.numbers]
        return LayerPlan(like, shared, measures, lasting.measured.of(own_ids), None)

    def _lasting_key(self, key: Hashable) -> Hashable | None:
        """What a plan that lasts depends on; None if there is none. (Measures may be changed until they are used.)"""
        measures = measures_key(self.measures)
        return None if measures is None else (key, measures, self.keep, self.most_for_roles)

    def see_by_plan(
        self, plan: LayerPlan, layer: str, module: nn.Module, forward: int, q: Tensor, k: Tensor, v: Tensor, own: bool
    ) -> Tensor | None:
        """Measure and compute a call like another one, to be filed later: its output. None if it is not wanted, or if a
        query sees nothing by a mask that was given as a tensor. `own`: nobody writes over its tensors."""
        if not self.is_wanted(layer):
            return None
        out, lse, block = plan.measured.compute(q, k, v)
        if plan.mask is not None and not plan.measured.statistics.sees_all(block):
            return None  # it was written over since: the model's own function says what such queries get
        tensors = (q, k, v) if own else (q.clone(), k.clone(), v.clone())
        self.waiting.append(_WaitingByPlan(plan, layer, module, forward, tensors, lse, block))
        return out

    def _file(
        self,
        attention: ObservedCall,
        shared: SharedPlane,
        measurements: Measurements | MeasuredLater | None = None,
        own: bool = False,
    ) -> Measurements | MeasuredLater | None:
        """File a call, and measure it if it was not measured before. `own`: its tensors are not the model's. Returns
        the measurements; None if the layer is not wanted."""
        name, goes_on, again, total = self.tracker.place(attention, copy=not own)
        own = own or (attention.steady and not goes_on)
        if not (self.is_wanted(attention.layer) or self.is_wanted(name)):
            self.unwanted.add(name)
            return None
        layer = self.by_name.get(name)
        self._save(name, layer, attention.forward)
        if layer is None:
            layer = self.by_name[name] = LayerRecord(name, attention.kind, self.measures)
        n = attention.shape[2]
        text = self._sequence(layer, attention, shared, goes_on)
        text.total = total
        numbers = shared.numbers(attention, total)
        text.place_padding(attention, attention.padding)
        plane = shared.plane(attention, text, numbers, self.needs_values)
        if measurements is None:
            measurements = measured_later(attention, self.measures, plane)
            if isinstance(measurements, MeasuredLater) and self._others_may_wait(attention, goes_on, total):
                shared.fresh[attention.shape[1]] = plane
        piece = Chunk(
            n, shared.runs(attention, total), measurements, attention.padding, projection=attention.projection
        )
        piece.signed = attention.subtracted is not None
        self._keep(text, piece, attention, goes_on, own)
        if layer.uniform is None:
            layer.uniform = LayerRecord(name, attention.kind, self.baselines)
        baseline = shared.baseline(attention, self.baselines, text, plane)
        uniform = Chunk(n, piece.runs, baseline, attention.padding)
        _add(layer.uniform, _uniform_sequence(layer.uniform, text, goes_on), uniform, goes_on, again)
        _add(layer, text, piece, goes_on, again)
        return measurements

    def _may_wait(self, attention: ObservedCall) -> bool:
        """Whether a call may be filed later, if others like it may."""
        plain = attention.cache is None and attention.gather_heads is None and attention.subtracted is None
        return plain and _numbers(attention) <= self.most_for_roles and self.is_wanted(attention.layer)

    def _fresh_plane(self, attention: ObservedCall, shared: SharedPlane) -> Plane | None:
        """The plane of a call that may be filed later, the first of its kind, as if it were the only one: whole texts
        go on with nothing. None if it has to be filed at once: because others would have to, or because the baseline
        reads tensors of its mask or positions, which may be written over."""
        call, total = attention.call, attention.shape[3]
        assert call is not None
        if not call.contiguous or not self._others_may_wait(attention, False, total):
            return None
        if call.mask is not None and next(call.mask.tensors(), None) is not None:
            return None
        plane = shared.fresh[attention.shape[1]] = _whole_plane(attention, shared)
        return plane

    def _others_may_wait(self, attention: ObservedCall, goes_on: bool, total: int) -> bool:
        """Whether calls like this one may be filed later: each is a whole text, and is kept for `roles` alone."""
        _, _, n, m = attention.shape
        plain = attention.numbers is None and attention.cache is None and attention.projection is None
        alone = attention.gather_heads is None and attention.global_call is None
        whole = attention.kind == "self" and n == m == total and not goes_on
        return whole and plain and alone and not self.keeps and not self.needs_values

    def _sequence(
        self, layer: LayerRecord, attention: ObservedCall, shared: SharedPlane, goes_on: bool
    ) -> SequenceRecord:
        """The sequence that a call goes on with, or a new one, with its token ids."""
        _, _, n, m = attention.shape
        text, ids = layer.text, attention.ids
        if text is None or not goes_on:
            text = SequenceRecord(attention.shape[:2])
            text.ids = shared.own_ids(ids) if attention.kind == "self" and n == m else None
        elif attention.kind == "self" and text.ids is not None:
            fits = ids is not None and ids.shape[0] == text.ids.shape[0]
            text.ids = torch.cat([text.ids, ids], 1) if fits else None  # type: ignore[list-item]
        return text

    def _save(self, name: str, layer: LayerRecord | None, forward: int) -> None:
        """Keep a snapshot of a layer as it was before this outermost call, in case the call raises."""
        if self.saved_in != forward:
            self.saved_in, self.saved = forward, {}
        if name not in self.saved:
            self.saved[name] = None if layer is None else layer.snapshot()

    def _keep(self, text: SequenceRecord, piece: Chunk, attention: ObservedCall, goes_on: bool, own: bool) -> None:
        """Store copies of q, k, v and the output, as far as they are to be kept; its tensors, if they are its `own`."""
        call, (_, _, n, m) = attention.call, attention.shape
        if self.keep == "qkv" and attention.output is not None:
            piece.output = attention.output.clone()
            piece.input = None if attention.input is None else attention.input.clone()
            piece.rotary = applies_rotary(attention.module)
        if not self.keeps and not self._keeps_for_roles(text, attention):
            return
        if call is None:
            piece.weights = None if attention.weights is None else attention.weights.clone()
            return
        if attention.global_call is not None:
            call = attention.global_call()
        if attention.subtracted is not None:
            new = slice(m - n if goes_on else 0, m)
            _keep_difference(text, piece, call, attention.subtracted, new)
            text.values += [call.v[:, :, new].clone()] if self.keep == "qkv" else []
            return
        # Copies: what a model has in memory it may write over, a cache most of all.
        if attention.cache is not None:  # rotary is applied anew to its keys for every chunk
            piece.call = replace(call, q=call.q.clone(), k=call.k.clone(), v=call.v[:, :, :0], dropout=None)
            return
        if attention.kind == "self" or not goes_on:  # (the keys of cross attention are the same in every chunk)
            new = slice(m - n if goes_on else 0, m)
            text.keys.append(call.k if own else call.k[:, :, new].clone())
            if self.keep == "qkv" or text.for_roles:
                text.values.append(call.v if own else call.v[:, :, new].clone())
        nothing = call.k[:, :, :0].clone()  # (a view would keep the model's tensor in memory)
        piece.call = call.of(call.q if own else call.q.clone(), nothing, nothing)

    def _keeps_for_roles(self, text: SequenceRecord, attention: ObservedCall) -> bool:
        """Whether a chunk is kept for `roles`: self attention that is not too long, and not sharded over processes."""
        if (text.pieces and not text.keeps_calls()) or attention.subtracted is not None:
            return False
        text.for_roles, text.kept = True, text.kept + _numbers(attention)
        whole = attention.cache is None and attention.global_call is None and attention.gather_heads is None
        if attention.kind == "self" and whole and text.kept <= self.most_for_roles:
            return True
        text.drop_calls()
        text.kept = 0
        return False


def _whole_plane(attention: ObservedCall, shared: SharedPlane) -> Plane:
    """The plane of a whole text that goes on with nothing."""
    total = attention.shape[3]
    text = SequenceRecord(attention.shape[:2])
    text.ids, text.total = shared.own_ids(attention.ids), total
    text.place_padding(attention, attention.padding)
    return shared.plane(attention, text, shared.numbers(attention, total), with_values=False)


def _keep_difference(text: SequenceRecord, piece: Chunk, first: Call, subtracted: Subtracted, new: slice) -> None:
    """Store copies of both calls of a difference, and of the keys of both side by side."""
    second = subtracted.call
    text.keys.append(torch.cat([first.k[:, :, new], second.k[:, :, new]], -1))
    nothing = first.k[:, :, :0].clone()
    kept = [call.of(call.q.clone(), nothing, nothing) for call in (first, second)]
    piece.difference = Difference(*kept, factor=subtracted.factor.clone())


def _numbers(attention: ObservedCall) -> int:
    """How many numbers of q, and of k and v for as many tokens, there are to keep; or of the weights."""
    call, weights = attention.call, attention.weights
    if call is not None:
        return call.q.numel() + (call.k.numel() + call.v.numel()) * call.q.shape[2] // max(call.k.shape[2], 1)
    return 0 if weights is None else weights.numel()


def _add(layer: LayerRecord, text: SequenceRecord, piece: Chunk, goes_on: bool, again: bool) -> None:
    """Add a chunk to a layer's sequence, or begin a new one with it."""
    text.add(piece, layer.axes if text.pieces else {})
    if goes_on and layer.text is text:
        layer.changed()
    elif again:
        layer.replace(text)
    else:
        layer.begin(text)


def _uniform_sequence(uniform: LayerRecord, text: SequenceRecord, goes_on: bool) -> SequenceRecord:
    """The sequence of the uniform baseline, which has one head, beside that of a layer."""
    sequence = uniform.text if goes_on else None
    if sequence is None:
        sequence = SequenceRecord((text.shape[0], 1))
    sequence.total, sequence.key_padding = text.total, text.key_padding
    return sequence


def _may_need_values(measure: Measure) -> bool:
    """Whether a measure may read the values or the output projection: known of the package's own measures."""
    return not measure.shareable or not type(measure).__module__.startswith("regard.measures.")
