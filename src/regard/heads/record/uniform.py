"""The uniform baseline of a layer: what is measured of one head whose weights are equal on all visible keys.

Letters: B batch, H query heads, N queries, M keys.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from regard.heads.capture.observed import ObservedCall, with_uniform_weights
from regard.heads.record.chunk_plane import usable
from regard.heads.record.sequences import measured
from regard.masks.runs import key_runs, runs_of_pairs
from regard.measures import Measure, Measurements, Plane
from regard.measures.uniform import closed_forms, measure_uniform

__all__ = ["UniformBaseline", "uniform_measurements"]


def uniform_measurements(attention: ObservedCall, measures: list[Measure], plane: Plane) -> Measurements:
    """The results of some measures for equal weights on all keys that each query of an attention call may see. `plane`:
    what is known of the call.

    In closed form where each query sees one run of keys: without a mask, and with `Causal`, `Window`, `Prefix`,
    `Chunk`, `Padding`, `Documents`, boolean tensors and what `&` and `|` make of them, as far as no key between two
    visible ones is hidden. All else is measured of weights that are built: masks with gaps, positions that fall from
    slot to slot, measures that are not of this package.
    """
    runs = _runs(attention)
    plane = replace(plane, heads=1, values=None, out_weight=None)
    if runs is None:
        return measured(with_uniform_weights(attention), measures, plane)
    able = usable(measures, plane)
    closed = closed_forms(able, plane)
    with torch.no_grad():
        found = measure_uniform(closed, plane, *runs)
    if len(closed) == len(able):
        return found
    others = [measure for measure in able if measure not in closed]
    rest = measured(with_uniform_weights(attention), others, plane)
    values = found.values | rest.values
    in_order = {name: values[name] for measure in able for name in measure.gives if name in values}
    return Measurements(in_order, found.seen, found.counts | rest.counts)


@dataclass
class UniformBaseline:
    """The uniform measurements of an attention call, computed when they are first asked for, which is rare. Only for
    masks that are made of numbers; tensors might be large, or be written over meanwhile."""

    attention: ObservedCall
    measures: list[Measure]
    plane: Plane
    found: Measurements | None = None

    @staticmethod
    def of(attention: ObservedCall, measures: list[Measure], plane: Plane) -> Callable[[], Measurements] | Measurements:
        """Deferred if that is possible; else the measurements."""
        call = attention.call
        made_of_numbers = call is not None and (call.mask is None or not list(call.mask.tensors()))
        if call is None or not made_of_numbers or not call.contiguous:
            return uniform_measurements(attention, measures, plane)
        batch, _, n, m = call.shape
        nothing = call.q.new_empty(1).detach()  # no tensor of the model stays alive
        q, k = nothing.expand(batch, 1, n, 1), nothing.expand(batch, 1, m, 1)
        uniform = replace(call, q=q, k=k, v=k, sinks=None, biases=())
        light = ObservedCall("", attention.module, attention.forward, attention.kind, uniform)
        light.padding, light.numbers = attention.padding, attention.numbers
        ids = _copy(plane.ids)
        text_ids = ids if plane.text_ids is plane.ids else _copy(plane.text_ids)
        # (the keys' ids were cut out of them by an index, which copies)
        return UniformBaseline(
            light, measures, replace(plane, values=None, out_weight=None, ids=ids, text_ids=text_ids)
        )

    def __call__(self) -> Measurements:
        """The measurements."""
        if self.found is None:
            self.found = uniform_measurements(self.attention, self.measures, self.plane)
        return self.found


def _copy(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.clone()


def _runs(attention: ObservedCall) -> tuple[Tensor, Tensor] | None:
    """The run of key slots that each query may see; None where it is no run."""
    n, m = attention.shape[2:]
    if not n or not m:
        return None
    call = attention.call
    if call is None:
        return runs_of_pairs(attention.visible)
    mask = call.mask
    if mask is not None and not mask.shared_by_heads():
        mask = mask.part(call.whole(), slice(0, 1), 0)
    return key_runs(mask, call.whole()._replace(heads=1))
