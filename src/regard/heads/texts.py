"""One text as a layer saw it: pieces that continue each other, joined to one.

A text may come in pieces: a prompt, then token after token from a cache. Here an attention is measured as a piece of
its text, and what was measured of the pieces is joined, as if the whole had been read at once.

Letters: B batch, H query heads, G kv heads, N queries, M keys, D head width of q and k, E head width of v.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from regard.attention import look, plane_of
from regard.heads.attention import Attention, Projection
from regard.kernels import Call, reference
from regard.masks import Keep, Padding, conjuncts
from regard.measures import Measure, Measurements, Plane, Strip, Survey, TopLinks
from regard.positions import DenseBias

__all__ = ["Piece", "Text", "joined", "measured", "padding", "plus", "remeasured", "runs", "sums", "weights_of"]


@dataclass
class Piece:
    """One call of attention within a sequence: how many queries it has, which tokens of the whole text its keys are,
    and what was measured."""

    queries: int
    runs: list[slice]  # of numbers
    found: Measurements
    padding: Tensor | None = None  # (B, 1, N): queries that are none, where there are some
    call: Call | None = None  # with neither k nor v, if it was kept and `Text.keys` have them
    weights: Tensor | None = None  # (B, H, N, M) if it was kept and the model wrote attention by hand
    output: Tensor | None = None  # (B, H, N, E) if it was kept
    input: Tensor | None = None  # (B, N, W) if it was kept and known
    projection: Projection | None = None  # where it is known

    @property
    def numbers(self) -> Tensor:
        """Which tokens of the whole text its keys are: (M,)"""
        device = self.found.seen.device
        return torch.cat([torch.arange(run.start, run.stop, device=device) for run in self.runs or [slice(0, 0)]])

    @property
    def counted(self) -> Tensor:
        """Which queries count in means, (B, H, N): those that see a key, but for padding."""
        return self.found.seen if self.padding is None else self.found.seen & ~self.padding


@dataclass
class Text:
    """One sequence: pieces that continue each other."""

    shape: tuple[int, int]  # (B, H)
    pieces: list[Piece] = field(default_factory=list)
    total: int = 0  # keys so far, those that were dropped from a cache included
    ids: Tensor | None = None  # (1|B, total)
    keys: list[Tensor] = field(default_factory=list)  # kept: (B, G, m, D), each key once
    values: list[Tensor] = field(default_factory=list)  # kept: (B, G, m, E), each value once
    by_key: dict[str, Tensor] = field(default_factory=dict)  # sums of all pieces so far, where there are several

    def add(self, piece: Piece, axes: dict[str, str]) -> None:
        """One more piece. What it gave to each key is added up at once: kept by pieces it would grow by the square."""
        self.pieces.append(piece)
        if len(self.pieces) == 1:
            return
        for name in [name for name, axis in axes.items() if axis == "key" and name in piece.found.values]:
            for one in self.pieces if len(self.pieces) == 2 else [piece]:
                total = one.found.values[name].new_zeros(*one.found.values[name].shape[:2], self.total)
                if name in self.by_key:
                    total[..., : self.by_key[name].shape[-1]] = self.by_key[name]
                total[..., one.numbers] += one.found.values[name]
                self.by_key[name] = total
            piece.found = replace(piece.found, values={k: v for k, v in piece.found.values.items() if k != name})

    @property
    def queries(self) -> int:
        """N of all pieces together."""
        return sum(piece.queries for piece in self.pieces)


def padding(attention: Attention) -> Tensor | None:
    """Which queries (B, 1, N) are padding: those that may not see themselves, where others may; None where all may."""
    _, _, n, m = attention.shape
    if attention.kind != "self" or n > m or not n:
        return None
    if attention.call is None:
        assert attention.weights is not None
        hidden = (attention.weights != 0).any(2).any(1)[:, None, m - n :].logical_not() if n == m else None
    else:
        hidden = None
        for part in conjuncts(attention.call.mask):
            if isinstance(part, Padding):
                own = ~part.block(attention.call.tile(slice(None), slice(0, 1), slice(m - n, m)))[:, :, 0]
            elif isinstance(part, Keep):
                own = part.tensor if part.sense else ~part.tensor
                own = ~own.expand(*own.shape[:2], n, m).diagonal(m - n, 2, 3).any(1, keepdim=True)
            else:
                continue
            hidden = own if hidden is None else hidden | own
    if hidden is None or not hidden.any() or hidden.all():
        return None
    return hidden


def measured(attention: Attention, measures: list[Measure], text: Text, numbers: Tensor) -> Measurements:
    """What some measures find in one attention, whose keys are tokens `numbers` (M,) of the whole text."""
    batch, heads, n, m = attention.shape
    ids = None
    if text.ids is not None and attention.kind == "self" and text.ids.shape[1] > int(numbers[-1]):
        ids = text.ids
    key_ids = None if ids is None else ids[:, numbers]
    usable = [
        one
        for one in measures
        if not (one.needs_ids and getattr(one, "ids", None) is None and key_ids is None)
        and not (one.needs_out_weight and getattr(one, "out_weight", None) is None and attention.out_weight is None)
    ]
    known: dict[str, Any] = {"key_ids": key_ids, "ids": attention.ids, "text_ids": ids}
    call, weights = attention.call, attention.weights
    if call is not None and attention.together is not None:
        return _measured_together(attention, usable, text, numbers)
    if call is not None:
        plane = replace(plane_of(call), values=call.v, out_weight=attention.out_weight, **known)
        if attention.kind == "self" and (text.pieces or attention.numbers is not None):
            # positions of a call's own are right where it has some (texts of several lengths), unless it renumbers
            own = call.positions is not None and attention.numbers is None
            queries = plane.q_positions if own else numbers[None, m - n :]
            plane = replace(plane, numbers=numbers, k_positions=numbers[None], q_positions=queries)
        return look(call, usable, plane=plane)
    assert weights is not None
    weights = weights.to(torch.promote_types(weights.dtype, torch.float32))
    first = int(numbers[-1]) + 1 - n if m else 0
    queries = torch.arange(first, first + n, device=weights.device)[None]
    plane = Plane(batch, heads, n, m, queries, numbers[None], weights.dtype, numbers=numbers, **known)
    usable = [one for one in usable if not one.needs_out_weight]  # a model that wrote it by hand named no projection
    everything = (slice(0, batch), slice(0, heads), slice(0, n), [slice(0, m)])
    with torch.autocast(weights.device.type, enabled=False):
        survey = Survey(usable, plane)
        survey.add(Strip(plane, *everything, weights=weights, mass=weights.sum(-1)))
    return survey.result()


def _measured_together(attention: Attention, measures: list[Measure], text: Text, numbers: Tensor) -> Measurements:
    """The same where each process has some heads: each measures its own, and what they find is put together. (What
    needs all heads at once is measured by all of them.)"""
    together, weight = attention.together, attention.out_weight
    assert together is not None and attention.call is not None and attention.everything is not None
    own, width = together.own, attention.call.v.shape[3]
    part = None if weight is None else weight[:, own.start * width : own.stop * width]
    here = replace(attention, together=None, everything=None, out_weight=part)
    found = measured(here, [one for one in measures if not one.needs_all_heads], text, numbers)
    values, counts = tree_map_only(Tensor, together, (found.values, found.counts))
    of_all = [one for one in measures if one.needs_all_heads]
    if of_all:
        there = replace(here, call=attention.everything(), out_weight=weight)
        values |= measured(there, of_all, text, numbers).values
    return Measurements(values, together(found.seen), counts)


def joined(text: Text, measures: list[Measure]) -> dict[str, Any]:
    """What was measured piece by piece, of the whole text."""
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
                counts = [piece.found.seen.sum(2) for piece in pieces]
                total = sum(part * count[..., None] for part, count in zip(parts, counts, strict=True))
                result[name] = total / torch.stack(counts).sum(0).clamp(min=1)[..., None]
            elif axis == "sum":
                result[name] = torch.stack(parts).sum(0)
    maps = [one for one in measures if "map" in one.gives.values()]
    if maps:
        result |= remeasured(text, maps)
    return result


def remeasured(text: Text, measures: list[Measure]) -> dict[str, Any]:
    """Measures of the whole text, taken now of the pieces that were kept: a piece is a strip, or several."""
    alone = text.pieces[0] if len(text.pieces) == 1 else None
    if alone is not None and alone.call is not None and text.keys:  # as it was measured when it was seen
        keys = text.keys[0]
        return look(replace(alone.call, k=keys, v=keys), measures).values
    batch, heads = text.shape
    keys = torch.cat(text.keys, 2) if text.keys else None
    dtype, device = _dtype(text.pieces[0]), text.pieces[0].found.seen.device
    columns = torch.arange(text.total, device=device)[None]
    start = text.total - text.queries if text.total >= text.queries else 0
    rows = torch.arange(start, start + text.queries, device=device)[None]
    plane = Plane(batch, heads, text.queries, text.total, rows, columns, dtype)
    survey = Survey(measures, plane)
    at = 0
    for piece in text.pieces:
        step = max(1, 2**22 // max(1, batch * heads * piece.numbers.numel()))
        for row in range(0, piece.queries, step):
            own = slice(row, min(row + step, piece.queries))
            weights = weights_of(piece, keys, slice(None), list(range(heads)), own).to(dtype)
            where = slice(at + own.start, at + own.stop)
            strip = Strip(plane, slice(0, batch), slice(0, heads), where, piece.runs, weights, weights.sum(-1))
            survey.add(strip)
        at += piece.queries
    return survey.result().values


def _dtype(piece: Piece) -> torch.dtype:
    """What a piece was measured in."""
    if piece.call is not None:
        return piece.call.dtype
    assert piece.weights is not None
    return torch.promote_types(piece.weights.dtype, torch.float32)


def weights_of(piece: Piece, keys: Tensor | None, items: slice, heads: list[int], rows: slice) -> Tensor:
    """Some rows of some heads of some texts of a piece: (b, h, n, m)."""
    if piece.weights is not None:
        return piece.weights[items][:, heads, rows]
    call = piece.call
    assert call is not None
    k = call.k if keys is None or call.k.shape[2] else keys[:, :, piece.numbers]
    with torch.no_grad(), torch.autocast(k.device.type, enabled=False):
        return reference.weights(cut(replace(call, k=k, v=k), items, heads, rows))[0]


def runs(numbers: Tensor) -> list[slice]:
    """Rising numbers as runs of neighbours."""
    breaks = ((numbers[1:] - numbers[:-1]) != 1).nonzero().flatten().add(1).tolist()
    ends = [0, *breaks, numbers.numel()]
    return [slice(int(numbers[a]), int(numbers[b - 1]) + 1) for a, b in pairwise(ends) if b > a]


def cut(call: Call, items: slice, heads: list[int], rows: slice) -> Call:
    """The part of a call that some texts, heads and rows need: exact, for a row's weights depend on its own scores."""
    shared = call.shape[1] // call.k.shape[1]
    index = torch.tensor(heads, device=call.q.device)

    def of_heads(x: Tensor) -> Tensor:
        return x[:, index] if x.shape[1] > 1 else x

    def of_items(x: Tensor) -> Tensor:
        return x[items] if x.shape[0] > 1 else x

    mask = None
    if call.mask is not None:
        batch = slice(*items.indices(call.shape[0]))
        mask = Keep(of_heads(call.mask.block(call.tile(batch, rows, slice(0, call.shape[3])))))
    biases = []
    for bias in call.biases:
        if isinstance(bias, DenseBias):
            weight = of_heads(of_items(bias.weight))
            biases.append(DenseBias(weight[:, :, rows] if weight.shape[2] > 1 else weight))
        else:
            biases.append(bias.with_weight(of_items(bias.weight)[..., index]))
    return replace(
        call,
        q=call.q[items][:, index, rows],
        k=call.k[items][:, index // shared],
        v=call.v[items][:, index // shared],
        mask=mask,
        biases=tuple(biases),
        positions=of_items(call.query_positions(rows)),
        key_positions=None if call.key_positions is None else of_items(call.key_positions),
        sinks=None if call.sinks is None else of_items(call.sinks)[:, index],
        dropout=None,
    )


def _joined_links(parts: list[TopLinks]) -> TopLinks:
    """Early pieces may have fewer keys than links."""
    k = max(part.keys.shape[-1] for part in parts)
    pad = torch.nn.functional.pad
    keys = [pad(part.keys, (0, k - part.keys.shape[-1]), value=-1) for part in parts]
    weights = [pad(part.weights, (0, k - part.weights.shape[-1])) for part in parts]
    return TopLinks(torch.cat(keys, 2), torch.cat(weights, 2))


def sums(text: Text, measures: list[Measure], values: dict[str, Any]) -> dict[str, tuple[Tensor, Tensor]]:
    """Of one text, what means over several are made of: the sum (H, ...) and the count (H,) of each measure."""
    seen = torch.cat([piece.found.seen for piece in text.pieces], 2)
    real = torch.cat([piece.counted for piece in text.pieces], 2)
    queries, items = seen.sum((0, 2)), torch.full((text.shape[1],), text.shape[0], device=seen.device)
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
                result[name] = (value * seen.sum(2)[..., None]).sum(0), queries
            elif axis == "key" or axis == "sum":
                result[name] = value.sum(0), queries
            else:
                result[name] = value.sum(0), items
    return result


def plus(a: Tensor, b: Tensor | None) -> Tensor:
    """a + b, the shorter one padded with 0 at the end of each axis: texts differ in length."""
    if b is None or a.shape == b.shape:
        return a if b is None else a + b
    shape = [max(x, y) for x, y in zip(a.shape, b.shape, strict=True)]
    total = a.new_zeros(shape)
    total[tuple(slice(0, size) for size in a.shape)] += a
    total[tuple(slice(0, size) for size in b.shape)] += b
    return total
