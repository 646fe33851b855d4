"""Weights that may be below 0: the difference of two softmaxes. How they are kept, computed and measured.

A query's weights are no shares of a whole then: what needs probabilities (`Measure.needs_probabilities`) is left out.

Letters: B batch, H query heads, G kv heads, N queries, M keys, D head width of q and k.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from regard.errors import bad_value
from regard.heads.capture.observed import ObservedCall
from regard.heads.record.chunk_plane import usable
from regard.heads.record.cuts import STRIP, cut
from regard.kernels import Call
from regard.kernels.precision import fixed_precision
from regard.kernels.run import weights as exact_weights
from regard.measures import Measure, Measurements, MeasureRun, Plane, Strip

__all__ = ["Difference", "check_term", "measured_difference", "refuse_signed", "why_not_signed"]


@dataclass
class Difference:
    """Two calls that were kept, without k and v: the keys of both are in `SequenceRecord.keys`, side by side."""

    first: Call
    second: Call
    factor: Tensor  # a number

    def weights(self, keys: Tensor, items: slice, heads: list[int], rows: slice, term: int | None = None) -> Tensor:
        """The difference for some rows of some heads of some texts, (b, h, n, m), or one of its two `term`s; of keys
        (B, G, m, 2 D)."""
        pairs = zip((self.first, self.second), keys.chunk(2, -1), strict=True)
        calls = [replace(call, k=k, v=k) for call, k in pairs]
        if term is not None:
            return exact_weights(cut(calls[term], items, heads, rows))
        first, second = (exact_weights(cut(call, items, heads, rows)) for call in calls)
        return first - self.factor.to(first) * second


def measured_difference(attention: ObservedCall, measures: list[Measure], plane: Plane) -> Measurements:
    """The results of some measures for the difference of two softmaxes, some rows at a time: of the measures that are
    defined for weights below 0. A query sees a key if the first softmax gives it any weight."""
    call, subtracted = attention.call, attention.subtracted
    assert call is not None and subtracted is not None
    batch, heads, n, m = attention.shape
    able = [measure for measure in usable(measures, plane) if not measure.needs_probabilities]
    survey = MeasureRun([measure for measure in able if not measure.needs_scores], plane)
    step = max(1, STRIP // max(1, batch * heads * m))
    every = slice(None), list(range(heads))
    with fixed_precision(call.q):
        for row in range(0, n, step):
            rows = slice(row, min(row + step, n))
            first, second = (exact_weights(cut(one, *every, rows)).to(plane.dtype) for one in (call, subtracted.call))
            weights = first - subtracted.factor.to(plane.dtype) * second
            place = slice(0, batch), slice(0, heads), rows, [slice(0, m)]
            survey.add(Strip(plane, *place, weights=weights, mass=first.sum(-1)))
    return survey.result()


def why_not_signed(measure: Measure) -> str:
    """Why a measure is not taken of signed weights, in words; "" if it is."""
    if measure.needs_probabilities:
        return "probabilities, and these weights are the difference of two softmaxes, which may be below 0"
    return "the scores of one softmax, and these weights are the difference of two" if measure.needs_scores else ""


def refuse_signed(what: str, layer: str, signed: bool) -> None:
    """Raise for what a layer whose weights are a difference has twice, or has not."""
    if signed:
        received = f"{layer}, whose weights are the difference of two softmaxes, which may be below 0"
        remedy = f"seen[{layer!r}].weights(...), with term=0 or 1 for one of the two"
        raise bad_value(what, expected="a layer with one softmax", received=received, remedy=remedy)


def check_term(term: object, layer: str, signed: bool) -> None:
    """Raise unless a layer has this term: 0 or 1 of a difference, or None for its weights."""
    if term is None:
        return
    if not signed:
        expected = "a layer whose weights are the difference of two softmaxes"
        raise bad_value("term", expected=expected, received=f"term={term!r} of {layer}, which has one")
    if isinstance(term, bool) or term not in (0, 1):
        raise bad_value("term", expected="0, 1 or None", received=repr(term))
