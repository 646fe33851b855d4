"""Which kernels give what the measures of a run need.

    in the forward pass   entropy, peak and target, distance, offset
    from its lse          received and heatmap (`key_sums.received`), sums over weighted columns (`key_sums.columns`),
                          sums over lists of keys (`selected.lists`: offsets, the first token, pairs, induction, ...),
                          links, crop
    by strips             the rest: it is shown the weights afterwards (`blockwise.replay`)

Letters: B batch, H query heads, N queries, M keys, K sums for each query.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from regard.kernels import blockwise, operators
from regard.kernels.call import Call
from regard.kernels.reductions import flat_lists, is_contiguous, is_unpadded, item_stride, joined_columns, numbered
from regard.kernels.triton import launch
from regard.kernels.triton.arguments import Heads, Look, Moments
from regard.kernels.triton.blocks import Blocks, parts_of
from regard.kernels.triton.lowered import lower, power_of_two
from regard.measures import (
    Crop,
    Distance,
    Entropy,
    Heatmap,
    KeyLists,
    Links,
    MaxLogit,
    Measure,
    MeasureRun,
    Offset,
    OnFirst,
    Peak,
    Plane,
    Received,
    Reduction,
    Sums,
    TopLinks,
)

__all__ = ["forward_measured"]

_OF_ROWS = (Entropy, Peak, MaxLogit, Distance, Offset)
_BY_NAME = (*_OF_ROWS, OnFirst, Received, Heatmap, Links, Crop)


def forward_measured(call: Call, measuring: MeasureRun, output: bool) -> tuple[Tensor | None, Tensor]:
    """Output (B, H, N, E) where it is asked for, and log-sum-exp (B, H, N); the run is handed what its measures
    need."""
    plane, measures = measuring.plane, measuring.measures
    out, lse = operators.new_output(call.q, call.v if output else call.v[..., :0])
    look, moments = _look(call, measures, plane)
    launch.attention(call, out if output else None, lse, look, moments)
    weights = _Weights(call, lse, plane)
    by_name = [_serves(measure, plane) for measure in measures]
    reductions = {
        number: reduction
        for number, known in enumerate(by_name)
        if not known and (reduction := measuring.reduction(number)) is not None
    }
    assert look.target is not None
    measuring.seen = look.target >= 0
    sums = _sums(weights, measures, by_name, reductions)
    measuring.states = [
        _state(measure, look, weights, sums.get(number)) if known else measure.begin(plane)
        for number, (measure, known) in enumerate(zip(measures, by_name, strict=True))
    ]
    for number in reductions:
        measures[number].take(measuring.states[number], sums[number], plane, measuring.prepared[number])
    in_strips = [not known and number not in reductions for number, known in enumerate(by_name)]
    if any(in_strips):
        blockwise.replay(call, lse, measuring.only(in_strips))
    return (out if output else None), lse


def _serves(measure: Measure, plane: Plane) -> bool:
    """Whether a measure is known by its name."""
    if type(measure) in (Heatmap, Crop):
        return is_unpadded(plane)
    return type(measure) in _BY_NAME


def _look(call: Call, measures: list[Measure], plane: Plane) -> tuple[Look, Moments | None]:
    """Memory for the statistics of rows, and positions where they are not contiguous."""
    kinds = {type(measure) for measure in measures}

    def new(*wanted: type[Measure]) -> Tensor | None:
        return call.q.new_empty(call.shape[:3], dtype=torch.float32) if kinds & set(wanted) else None

    target = call.q.new_empty(call.shape[:3], dtype=torch.int32)
    look = Look(new(Entropy), new(Peak, MaxLogit), target, new(Distance), new(Offset))
    if (look.distance is None and look.offset is None) or is_contiguous(call, plane):
        return look, None
    queries, keys = plane.q_positions, plane.k_positions
    origin = torch.minimum(queries.min(), keys.min())
    queries, keys = ((x - origin).to(torch.int32).contiguous() for x in (queries, keys))
    return look, Moments(queries, keys, item_stride(queries), item_stride(keys))


def _sums(
    weights: _Weights, measures: list[Measure], by_name: list[bool], reductions: dict[int, Reduction]
) -> dict[int, Sums]:
    """What the reductions ask for, by the measure's number; and the sum over the first token for those that have it by
    name. One launch for all lists, one for all columns."""
    asked = dict(reductions)
    for number, measure in enumerate(measures):
        if by_name[number] and isinstance(measure, OnFirst):
            asked[number] = Reduction(lists=_first_token(weights.plane))
    lists = {number: reduction.lists for number, reduction in asked.items() if reduction.lists is not None}
    columns = {number: reduction.columns for number, reduction in asked.items() if reduction.columns is not None}
    in_lists = dict(zip(lists, _split(weights.lists, lists.values(), "count"), strict=True))
    in_columns = dict(zip(columns, _split(weights.columns, columns.values(), None), strict=True))
    return {
        number: Sums(in_columns.get(number), in_lists.get(number), weights.received() if reduction.received else None)
        for number, reduction in asked.items()
    }


def _split(compute: Any, parts: Any, count: str | None) -> list[Tensor]:
    """One result for each of several parts, computed together along the last axis."""
    parts = list(parts)
    if not parts:
        return []
    sizes = [part.shape[2] if count is None else getattr(part, count) for part in parts]
    return list(compute(parts).split(sizes, -1))


def _first_token(plane: Plane) -> KeyLists:
    """A list with the key that is the text's first token, the same for all queries; empty where it is not among
    them."""
    first = plane.is_first  # (1|B, M)
    keys = first.to(torch.uint8).argmax(1, keepdim=True).to(torch.int32)
    end = first.any(1).to(torch.int64)[:, None, None].expand(-1, plane.queries, 1)
    return KeyLists(keys, torch.zeros_like(end), end)


def _state(measure: Measure, look: Look, weights: _Weights, sums: Sums | None) -> Any:
    """The memory of a measure that is known by its name, filled."""
    if isinstance(measure, Peak):
        assert look.target is not None
        return look.peak, numbered(look.target.to(torch.int64), weights.plane)
    if isinstance(measure, OnFirst):
        assert sums is not None and sums.lists is not None
        return sums.lists[..., 0]
    if isinstance(measure, Links):
        keys, values = weights.links(min(measure.k, weights.plane.keys))
        return TopLinks(numbered(keys, weights.plane), values)
    if isinstance(measure, Heatmap):
        return weights.heatmap(*measure.begin(weights.plane).shape[2:])
    if isinstance(measure, Crop):
        return weights.region(measure.r0, measure.c0, *measure.begin(weights.plane).shape[2:])
    if isinstance(measure, Received):
        return weights.received()
    of_rows = {Entropy: look.entropy, MaxLogit: look.peak, Distance: look.distance, Offset: look.offset}
    return of_rows[type(measure)]


class _Weights:
    """The weights of a call, computed again from its log-sum-exp by whichever kernel sums or selects them."""

    def __init__(self, call: Call, lse: Tensor, plane: Plane) -> None:
        self.call, self.lse, self.plane = call, lse, plane
        self.low, self.target = lower(call), launch.target_of(call.q.device)
        self.precision = launch.precision_for(self.low, self.target)
        self.counted = None
        if plane.padding is not None:
            self.counted = (~plane.padding).to(torch.uint8).expand(plane.batch, -1).contiguous()
        self._received: Tensor | None = None
        named = self.low.compiled_for
        self.compiled_for = {name: named[name] for name in ("D", "WIDTH", "CAPPED", "SCALED")}

    def _launch(self, kernel: Any, programs: int, blocks: Blocks, *args: Any, **options: Any) -> None:
        """`args`: first what is read beside q, k and lse and where results go, then the call's own, then the rest."""
        low = self.low
        results, rest = args
        launch.launch(
            kernel, (programs * self.call.shape[0] * self.call.shape[1],), blocks, self.call.q, low.q, low.k, self.lse,
            *results, low.sizes, low.seen, low.bias, low.numbers, *rest, ROWS=blocks.rows, **options,
            **self.compiled_for,
        )  # fmt: skip

    def _new(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(*self.call.shape[:2], *shape, dtype=dtype, device=self.call.q.device)

    def _bands(self, bands: int) -> Tensor:
        """What each key received from each band of queries: (B, H, bands, M)."""
        from regard.kernels.triton.device import key_sums

        m = self.call.shape[3]
        blocks = launch.chosen_blocks("received", self.low, self.target)
        to = self._new(bands, m)
        self._launch(
            key_sums.received, -(-m // blocks.keys) * bands, blocks, (self.counted, to), (bands,),
            KEYS=blocks.keys, EDGES=self.low.edges, PRECISION=self.precision,
        )  # fmt: skip
        return to

    def received(self) -> Tensor:
        """What each key received from all queries that count: (B, H, M)."""
        if self._received is None:
            batch, heads, n, m = self.call.shape
            blocks = launch.chosen_blocks("received", self.low, self.target)
            programs = -(-m // blocks.keys) * batch * heads
            self._received = self._bands(parts_of(programs, n, blocks.rows, self.target.processors)).sum(2)
        return self._received

    def heatmap(self, rows: int, columns: int) -> Tensor:
        """(B, H, rows, columns)"""
        m = self.call.shape[3]
        bands = self._bands(rows)
        self._received = bands.sum(2) if self._received is None else self._received
        if columns == m:
            return bands
        return _sums_between(bands, [-(-cell * m // columns) for cell in range(columns + 1)])

    def lists(self, several: list[KeyLists]) -> Tensor:
        """Sums over lists of keys: (B, H, N, K)."""
        from regard.kernels.triton.device import selected

        flat = flat_lists(KeyLists.joined(several))
        n, blocks = self.call.shape[2], launch.chosen_blocks("lists", self.low, self.target)
        to = self._new(n, flat.count)
        self._launch(
            selected.lists, -(-n // blocks.rows), blocks, (flat.keys, flat.begin, flat.end, to),
            (flat.count, item_stride(flat.begin)),
        )  # fmt: skip
        return to

    def columns(self, several: list[Tensor]) -> Tensor:
        """Sums over keys by factors: (B, H, N, K)."""
        from regard.kernels.triton.device import key_sums

        factors = joined_columns(several).contiguous()
        count, n = factors.shape[2], self.call.shape[2]
        blocks = launch.chosen_blocks("columns", self.low, self.target)
        to, together = self._new(n, count), min(power_of_two(count), 32)
        place = Heads(factors, item_stride(factors), item_stride(factors, 1), factors.stride(2))
        self._launch(
            key_sums.columns, -(-n // blocks.rows) * -(-count // together), blocks, (place, to), (count,),
            KEYS=blocks.keys, SUMS=together, EDGES=self.low.edges, PRECISION=self.precision,
            EXACT=self.precision,
        )  # fmt: skip
        return to

    def links(self, count: int) -> tuple[Tensor, Tensor]:
        """The largest weights of each row and their keys, the largest first: keys and weights (B, H, N, count)."""
        from regard.kernels.triton.device import selected

        n, blocks = self.call.shape[2], launch.chosen_blocks("links", self.low, self.target)
        weights, keys = self._new(n, count), self._new(n, count, dtype=torch.int32)
        slots = max(2, 1 << (count - 1).bit_length())
        self._launch(
            selected.links, -(-n // blocks.rows), blocks, (weights, keys), (count,),
            KEYS=blocks.keys, SLOTS=slots, PRECISION=self.precision,
        )  # fmt: skip
        keys, order = keys.to(torch.int64).sort(-1)  # of equal weights the first key comes first
        weights, largest = weights.gather(-1, order).sort(dim=-1, descending=True, stable=True)
        return keys.gather(-1, largest), weights

    def region(self, row: int, column: int, rows: int, columns: int) -> Tensor:
        """Some queries against some keys: (B, H, rows, columns)."""
        from regard.kernels.triton.device import selected

        to = self._new(rows, columns)
        if rows and columns:
            blocks = launch.chosen_blocks("region", self.low, self.target)
            self._launch(
                selected.region, -(-rows // blocks.rows) * -(-columns // blocks.keys), blocks, (to,),
                (row, rows, column, columns), KEYS=blocks.keys, PRECISION=self.precision,
            )  # fmt: skip
        return to


def _sums_between(x: Tensor, edges: list[int]) -> Tensor:
    """Sums over the last axis from each edge to the next."""
    return torch.stack([x[..., a:b].sum(-1) for a, b in itertools.pairwise(edges)], -1)
