"""One sequence as a layer saw it: chunks that continue each other, joined.

A sequence may come in chunks: a prompt, then token after token from a cache. Here an attention call is measured as a
chunk of its sequence, and the measurements of chunks are joined as if the sequence had been read at once.

Letters: B batch, H query heads, G kv heads, N queries, M keys, D head width of q and k, E head width of v.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from regard.attention import measure_call, plane_of
from regard.heads.capture.observed import ObservedCall
from regard.heads.capture.output_projection import Projection
from regard.heads.record.built_weights import call_of_weights, is_softmax
from regard.heads.record.chunk_plane import known_of_padding, usable
from regard.heads.record.cuts import STRIP, cut
from regard.heads.record.signed_weights import Difference, measured_difference
from regard.kernels import Call, measured_plans
from regard.kernels.precision import fixed_precision
from regard.kernels.run import run_measured
from regard.kernels.run import weights as exact_weights
from regard.masks import Blocks, Causal, Documents, Keep, Padding, Prefix, Tree, Window
from regard.masks import Chunk as ChunkMask
from regard.measures import Measure, Measurements, MeasureRun, Plane, Strip, TopLinks

__all__ = [
    "Chunk",
    "SequenceRecord",
    "joined",
    "kept_call",
    "measured",
    "measured_later",
    "padding",
    "plus",
    "remeasured",
    "runs",
    "sees_all",
    "sums",
    "weights_of",
]

DENSE = 2**24  # pairs of a user's own mask up to which it is evaluated to find padding


@dataclass
class Chunk:
    """One attention call of a sequence: its number of queries, which tokens of the sequence its keys are, and what was
    measured."""

    queries: int
    runs: list[slice]  # of `numbers`
    measurements: Measurements | Callable[[], Measurements]  # or what gives them, when they are first asked for
    padding: Tensor | None = None  # (B, 1, N) True for padding queries; None if there is no padding
    call: Call | None = None  # if it was kept; without k and v if `SequenceRecord.keys` has them
    weights: Tensor | None = None  # (B, H, N, M) of handwritten attention, if they were kept
    difference: Difference | None = None  # in place of a call, if the weights are the difference of two and were kept
    signed: bool = False  # whether weights may be below 0
    output: Tensor | None = None  # (B, H, N, E) if it was kept
    input: Tensor | None = None  # (B, N, W) if it was kept and known
    projection: Projection | None = None  # where it is known
    rotary: bool = False  # whether q and k were rotated by their positions, as far as it is known

    @property
    def found(self) -> Measurements:
        """What was measured."""
        if not isinstance(self.measurements, Measurements):
            self.measurements = self.measurements()
        return self.measurements

    @found.setter
    def found(self, measurements: Measurements) -> None:
        self.measurements = measurements

    @property
    def numbers(self) -> Tensor:
        """Which tokens of the sequence its keys are: (M,)"""
        device = self.found.seen.device
        return torch.cat([torch.arange(run.start, run.stop, device=device) for run in self.runs or [slice(0, 0)]])

    @property
    def counted(self) -> Tensor:
        """Which queries count in means, (B, H, N): those that see a key and are no padding."""
        return self.found.seen if self.padding is None else self.found.seen & ~self.padding


@dataclass
class SequenceRecord:
    """One sequence: chunks that continue each other."""

    shape: tuple[int, int]  # (B, H)
    pieces: list[Chunk] = field(default_factory=list)
    total: int = 0  # keys so far, including those that a cache has dropped
    ids: Tensor | None = None  # (1|B, total)
    key_padding: Tensor | None = None  # (B, total) True for padding keys; None if there is no padding
    keys: list[Tensor] = field(default_factory=list)  # kept: (B, G, m, D), each key once
    values: list[Tensor] = field(default_factory=list)  # kept: (B, G, m, E), each value once
    by_key: dict[str, Tensor] = field(default_factory=dict)  # measures per key, summed over chunks if there are several
    for_roles: bool = False  # whether q, k and v are kept for `roles` alone: nobody asked for weights
    kept: int = 0  # how many numbers of q, k and v are kept for roles

    def add(self, piece: Chunk, axes: dict[str, str]) -> None:
        """Add a chunk. Measures per key are summed now: kept for each chunk they would take quadratic memory."""
        self.pieces.append(piece)
        if len(self.pieces) == 1:
            return
        for name in [name for name, axis in axes.items() if axis == "key" and name in piece.found.values]:
            for chunk in self.pieces if len(self.pieces) == 2 else [piece]:
                value = chunk.found.values[name]
                total = value.new_zeros(*value.shape[:2], self.total)
                if name in self.by_key:
                    total[..., : self.by_key[name].shape[-1]] = self.by_key[name]
                total[..., chunk.numbers] += value
                self.by_key[name] = total
            piece.found = replace(piece.found, values={k: v for k, v in piece.found.values.items() if k != name})

    def keeps_calls(self) -> bool:
        """Whether q and k of all chunks, or their weights, were kept."""
        kept = [p.call is not None or p.weights is not None or p.difference is not None for p in self.pieces]
        return bool(kept) and all(kept)

    @property
    def signed(self) -> bool:
        """Whether weights may be below 0: of a difference of two softmaxes."""
        return any(piece.signed for piece in self.pieces)

    def drop_calls(self) -> None:
        """Free what was kept."""
        self.keys, self.values = [], []
        for piece in self.pieces:
            piece.call = piece.weights = piece.difference = None

    @property
    def queries(self) -> int:
        """N of all chunks together."""
        return sum(piece.queries for piece in self.pieces)

    @property
    def padding(self) -> Tensor | None:
        """True for padding queries, (B, N) of all chunks; None if there is no padding."""
        if all(piece.padding is None for piece in self.pieces):
            return None
        none = [piece.found.seen.new_zeros(self.shape[0], 1, piece.queries) for piece in self.pieces]
        pairs = zip(self.pieces, none, strict=True)
        return torch.cat([n if p.padding is None else p.padding.expand_as(n) for p, n in pairs], 2)[:, 0]

    def place_padding(self, attention: ObservedCall, padding: Tensor | None) -> None:
        """Update which keys are padding from the next chunk, whose padding queries (B, 1, N) are given."""
        batch, _, n, m = attention.shape
        if attention.kind == "cross" or (not self.pieces and n < m):
            if not self.pieces:
                hidden = _hidden_keys(attention)
                self.key_padding = hidden if hidden is not None and self.total == m else None
            return
        if padding is None and self.key_padding is None:
            return
        key_padding = torch.zeros(batch, self.total, dtype=torch.bool, device=attention.device)
        if self.key_padding is not None:
            key_padding[:, : self.key_padding.shape[1]] = self.key_padding
        if padding is not None:
            key_padding[:, self.total - n :] = padding[:, 0]
        self.key_padding = key_padding


def padding(attention: ObservedCall) -> Tensor | None:
    """True for padding queries, (B, 1, N): those whose own key neither they nor any token may see. None if there is no
    padding."""
    batch, _, n, m = attention.shape
    if attention.kind != "self" or n > m or not n:
        return None
    hidden = None
    for visible in _padding_masks(attention):
        of_queries = visible[..., m - n :]  # the keys of the queries' own tokens
        if visible.shape[2] > 1:
            by_itself = visible.diagonal(m - n, 2, 3)[:, :, None]  # (1|B, 1|H, 1, N)
            if by_itself.all():  # (as of most masks)
                continue
            by_tokens = of_queries & by_itself.any(1, keepdim=True).mT  # by queries that see themselves
            of_queries = by_itself | by_tokens.any(2, keepdim=True)
        never_seen = ~of_queries.any(1)[:, 0]
        hidden = never_seen if hidden is None else hidden | never_seen
    if hidden is None or not hidden.any() or hidden.all():
        return None
    return hidden.expand(batch, -1)[:, None]


def _padding_masks(attention: ObservedCall) -> Iterator[Tensor]:
    """The parts of a mask that padding can be found by: which pairs are visible, (1|B, 1|H, 1|N, M)."""
    call = attention.call
    if call is None:
        yield attention.visible[:, None]
        return
    for part in call.mask_parts:
        if isinstance(part, (Causal, Window, Prefix, ChunkMask, Documents, Blocks, Tree)):
            continue  # what they hide depends on where tokens stand
        if not isinstance(part, (Padding, Keep)) and math.prod((call.shape[0], *call.shape[2:])) > DENSE:
            continue
        visible = part.block(call.whole())
        yield visible.expand(*visible.shape[:3], call.shape[3])


def _hidden_keys(attention: ObservedCall) -> Tensor | None:
    """True for padding keys, (B, M): in cross attention those that no query may see; in the last tokens of a text that
    was read before, those that a `Padding` hides. None if there are none."""
    batch, call, hidden = attention.shape[0], attention.call, None
    if attention.kind == "cross":
        found = [~visible.any(2).any(1) for visible in _padding_masks(attention)]
    else:  # (what another mask hides from the last tokens may be too far away)
        parts = [] if call is None else [part for part in call.mask_parts if isinstance(part, Padding)]
        found = [] if call is None else [~part.block(call.whole())[:, 0, 0] for part in parts]
    for own in found:
        hidden = own if hidden is None else hidden | own
    return None if hidden is None or not hidden.any() else hidden.expand(batch, -1)


class MeasuredLater:
    """The measurements of a run whose results were not asked for yet. They are in memory, as a kernel wrote them."""

    def __init__(self, run: MeasureRun, lse: Tensor) -> None:
        self.run, self.lse = run, lse

    def __call__(self) -> Measurements:
        """The measurements."""
        with torch.no_grad():
            return self.run.result(self.lse)

    def sees_all(self) -> bool:
        """Whether each query sees a key."""
        assert self.run.sees_all is not None
        return self.run.sees_all()


def measured_later(attention: ObservedCall, measures: list[Measure], plane: Plane) -> Measurements | MeasuredLater:
    """The results of some measures for one attention call, by what is known of it (`chunk_plane`), or what gives them
    when they are asked for. If the attention is `to_compute`, its output is set, too."""
    call = attention.call
    if call is None or attention.gather_heads is not None or attention.subtracted is not None:
        return measured(attention, measures, plane)
    with fixed_precision(call.q):
        run = MeasureRun(usable(measures, plane), plane)
        repeated = measured_plans.repeat(call, run, attention.to_compute)
        out, lse = repeated or run_measured(call, run, output=attention.to_compute)
        if repeated is None:
            measured_plans.keep(call, run, out, lse)
        if attention.to_compute:
            attention.output = out
        return run.result(lse) if run.sees_all is None else MeasuredLater(run, lse)


def sees_all(measurements: Measurements | MeasuredLater) -> bool:
    """Whether each query sees a key."""
    return bool(measurements.seen.all()) if isinstance(measurements, Measurements) else measurements.sees_all()


def measured(attention: ObservedCall, measures: list[Measure], plane: Plane) -> Measurements:
    """The same, now."""
    if attention.subtracted is not None:
        return measured_difference(attention, measures, plane)
    if attention.call is not None and attention.gather_heads is None:
        measurements = measured_later(attention, measures, plane)
        return measurements() if isinstance(measurements, MeasuredLater) else measurements
    able = usable(measures, plane)
    weights = attention.weights
    if attention.call is not None:
        return _measured_over_processes(attention, able, plane)
    assert weights is not None
    batch, heads, n, m = attention.shape
    weights = weights.to(plane.dtype)
    # A model that wrote it by hand named no projection, and its scores are not known.
    able = [measure for measure in able if not measure.needs_out_weight and not measure.needs_scores]
    everything = (slice(0, batch), slice(0, heads), slice(0, n), [slice(0, m)])
    with fixed_precision(weights):
        call = call_of_weights(weights, attention.band)
        if call is not None:
            survey = MeasureRun(able, plane)
            _, lse = run_measured(call, survey, output=False)
            if is_softmax(lse):
                return survey.result()
        survey = MeasureRun(able, plane)
        survey.add(Strip(plane, *everything, weights=weights, mass=weights.sum(-1)))
    return survey.result()


def _measured_over_processes(attention: ObservedCall, measures: list[Measure], plane: Plane) -> Measurements:
    """The same where each process has some heads: each measures its own, and the results are gathered. (A measure that
    needs all heads at once is computed by every process.)"""
    gather, weight, call = attention.gather_heads, attention.out_weight, attention.call
    assert gather is not None and call is not None and attention.global_call is not None
    own, width = gather.own, call.v.shape[3]
    own_weight = None if weight is None else weight[:, own.start * width : own.stop * width]
    here = replace(attention, gather_heads=None, global_call=None)
    of_own = replace(plane, heads=call.shape[1], values=call.v, out_weight=own_weight)
    results = measured(here, [one for one in measures if not one.needs_all_heads], of_own)
    values, counts = tree_map_only(Tensor, gather, (results.values, results.counts))
    of_all = [one for one in measures if one.needs_all_heads]
    if of_all:
        whole = attention.global_call()
        of_every = replace(plane, heads=whole.shape[1], values=whole.v)
        values |= measured(replace(here, call=whole), of_all, of_every).values
    return Measurements(values, gather(results.seen), counts)


def joined(text: SequenceRecord, measures: list[Measure]) -> dict[str, Any]:
    """The measurements of all chunks, joined to those of the sequence."""
    pieces = text.pieces
    if len(pieces) == 1:
        return pieces[0].found.values
    result: dict[str, Any] = {}
    for one in measures:
        for name, axis in one.gives.items():
            if axis == "key":
                result |= {name: text.by_key[name]} if name in text.by_key else {}
                continue
            parts: list[Any] = [piece.found.values.get(name) for piece in pieces]
            if any(part is None for part in parts):
                continue
            if axis in ("query", "choice"):
                result[name] = _joined_links(parts) if isinstance(parts[0], TopLinks) else torch.cat(parts, 2)
            elif axis == "mean":
                counts = [piece.counted.sum(2) for piece in pieces]
                total = sum(part * count[..., None] for part, count in zip(parts, counts, strict=True))
                result[name] = total / torch.stack(counts).sum(0).clamp(min=1)[..., None]
            elif axis == "sum":
                result[name] = torch.stack(parts).sum(0)
    maps = [one for one in measures if "map" in one.gives.values()]
    if maps:
        result |= remeasured(text, maps)
    return result


def remeasured(text: SequenceRecord, measures: list[Measure], *, slots: bool = False) -> dict[str, Any]:
    """Measures of the sequence, computed now from the chunks that were kept. With `slots` padding is measured like any
    token."""
    only = text.pieces[0] if len(text.pieces) == 1 else None
    device = text.pieces[0].found.seen.device
    known = {} if slots else known_of_padding(text, text.padding, torch.arange(text.total, device=device))
    if only is not None and only.call is not None and text.keys:  # as it was measured when it was seen
        call = replace(only.call, k=text.keys[0], v=text.keys[0])
        return measure_call(call, measures, plane=replace(plane_of(call), **known)).values
    batch, heads = text.shape
    keys = torch.cat(text.keys, 2) if text.keys else None
    dtype = _dtype(text.pieces[0])
    columns = torch.arange(text.total, device=device)[None]
    start = text.total - text.queries if text.total >= text.queries else 0
    rows = torch.arange(start, start + text.queries, device=device)[None]
    plane = Plane(batch, heads, text.queries, text.total, rows, columns, dtype, **known)
    survey = MeasureRun(measures, plane)
    at = 0
    for piece in text.pieces:
        step = max(1, STRIP // max(1, batch * heads * piece.numbers.numel()))
        for row in range(0, piece.queries, step):
            of_piece = slice(row, min(row + step, piece.queries))
            weights = weights_of(piece, keys, slice(None), list(range(heads)), of_piece).to(dtype)
            of_sequence = slice(at + of_piece.start, at + of_piece.stop)
            sides = slice(0, batch), slice(0, heads), of_sequence
            mass = piece.found.seen[:, :, of_piece].to(dtype) if piece.signed else weights.sum(-1)
            survey.add(Strip(plane, *sides, piece.runs, weights, mass))
        at += piece.queries
    return survey.result().values


def _dtype(piece: Chunk) -> torch.dtype:
    """The dtype that a chunk was measured in."""
    call = piece.call if piece.difference is None else piece.difference.first
    if call is not None:
        return call.dtype
    assert piece.weights is not None
    return torch.promote_types(piece.weights.dtype, torch.float32)


def weights_of(
    piece: Chunk, keys: Tensor | None, items: slice, heads: list[int], rows: slice, term: int | None = None
) -> Tensor:
    """Some rows of some heads of some texts of a piece: (b, h, n, m). `term`: one of the two of a difference."""
    if piece.weights is not None:
        return piece.weights[items][:, heads, rows]
    if piece.difference is not None:
        assert keys is not None
        with torch.no_grad():
            return piece.difference.weights(keys[:, :, piece.numbers], items, heads, rows, term)
    call = piece.call
    assert call is not None
    k = call.k if keys is None or call.k.shape[2] else keys[:, :, piece.numbers]
    with torch.no_grad():
        return exact_weights(cut(replace(call, k=k, v=k), items, heads, rows))


def kept_call(text: SequenceRecord) -> Call | None:
    """The attention call of a sequence that was read at once, with the keys and values that were kept; None if the
    sequence came in several chunks, its attention was written by hand, or values were not kept."""
    call = text.pieces[0].call if len(text.pieces) == 1 else None
    if call is None or not text.keys or not text.values:
        return None
    return replace(call, k=text.keys[0], v=text.values[0])


def runs(numbers: Tensor) -> list[slice]:
    """Increasing integers as slices of consecutive ones."""
    breaks = ((numbers[1:] - numbers[:-1]) != 1).nonzero().flatten().add(1).tolist()
    ends = [0, *breaks, numbers.numel()]
    return [slice(int(numbers[a]), int(numbers[b - 1]) + 1) for a, b in pairwise(ends) if b > a]


def _joined_links(parts: list[TopLinks]) -> TopLinks:
    """Links of all chunks; early chunks may have fewer keys than links are asked for."""
    k = max(part.keys.shape[-1] for part in parts)
    pad = torch.nn.functional.pad
    keys = [pad(part.keys, (0, k - part.keys.shape[-1]), value=-1) for part in parts]
    weights = [pad(part.weights, (0, k - part.weights.shape[-1])) for part in parts]
    return TopLinks(torch.cat(keys, 2), torch.cat(weights, 2))


def sums(text: SequenceRecord, measures: list[Measure], values: dict[str, Any]) -> dict[str, tuple[Tensor, Tensor]]:
    """The sum (H, ...) and the count (H,) of each measure over one sequence, for means over several."""
    real = torch.cat([piece.counted for piece in text.pieces], 2)
    queries, items = real.sum((0, 2)), torch.full((text.shape[1],), text.shape[0], device=real.device)
    result = {}
    for one in measures:
        for name, axis in one.gives.items():
            if name not in values or axis == "choice":
                continue
            value = values[name]
            if axis == "query":
                counted = real
                if name in text.pieces[0].found.counts:
                    counted = real & torch.cat([piece.found.counts[name] for piece in text.pieces], 2)
                weight = counted.view(*counted.shape, *[1] * (value.dim() - 3))
                result[name] = (value * weight).sum((0, 2)), counted.sum((0, 2))
            elif axis == "mean":
                result[name] = (value * real.sum(2)[..., None]).sum(0), queries
            elif axis == "key":
                result[name] = _from_first_token(value, text.key_padding).sum(0), queries
            elif axis == "sum":
                result[name] = value.sum(0), queries
            else:
                result[name] = value.sum(0), items
    return result


def _from_first_token(value: Tensor, padding: Tensor | None) -> Tensor:
    """A measure per key, (B, H, M), with padding (B, M) removed: the first token of each text comes first, up to the
    length of the longest text."""
    if padding is None:
        return value
    order = padding.to(torch.uint8).argsort(dim=1, stable=True)  # tokens, then padding
    order = order[:, : int((~padding).sum(1).max())]
    value = value.masked_fill(padding[:, None], 0.0)
    return value.gather(2, order[:, None].expand(-1, value.shape[1], -1))


def plus(a: Tensor, b: Tensor | None) -> Tensor:
    """a + b, each padded with zeros at the end of each axis: texts differ in length."""
    if b is None or a.shape == b.shape:
        return a if b is None else a + b
    shape = [max(x, y) for x, y in zip(a.shape, b.shape, strict=True)]
    total = a.new_zeros(shape)
    total[tuple(slice(0, size) for size in a.shape)] += a
    total[tuple(slice(0, size) for size in b.shape)] += b
    return total
