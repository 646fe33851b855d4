"""The uniform baseline of a layer: what is measured of one head whose weights are equal on all visible keys.

Letters: B batch, H query heads, N queries, M keys.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from regard.heads.capture.observed import ObservedCall, with_uniform_weights
from regard.heads.record.chunk_plane import usable
from regard.heads.record.sequences import measured
from regard.masks.runs import key_runs, runs_of_pairs
from regard.measures import Measure, Measurements, Plane
from regard.measures.uniform import closed_forms, measure_uniform

__all__ = ["uniform_measurements"]


def uniform_measurements(attention: ObservedCall, measures: list[Measure], plane: Plane) -> Measurements:
    """The results of some measures for equal weights on all keys that each query of an attention call may see. `plane`:
    what is known of the call.

    In closed form where each query sees one run of keys: without a mask, and with `Causal`, `Window`, `Prefix`,
    `Padding`, `Documents`, boolean tensors and what `&` and `|` make of them, as far as no key between two visible ones
    is hidden. All else is measured of weights that are built: masks with gaps, positions that fall from slot to slot,
    measures that are not of this package.
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


def _runs(attention: ObservedCall) -> tuple[Tensor, Tensor] | None:
    """The run of key slots that each query may see; None where it is no run."""
    n, m = attention.shape[2:]
    if not n or not m:
        return None
    call = attention.call
    if call is None:
        assert attention.weights is not None
        return runs_of_pairs((attention.weights > 0).any(1))
    mask = call.mask
    if mask is not None and not mask.shared_by_heads():
        mask = mask.part(call.whole(), slice(0, 1), 0)
    return key_runs(mask, call.whole()._replace(heads=1))
