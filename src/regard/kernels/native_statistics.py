"""Which statistics of the native kernel give a measure, and where C writes them.

    by name        entropy, peak and target, distance, offset, offsets, on_first, received, heatmap, links, crop:
                   C writes into the measure's own memory
    by reduction   anything that is a sum over lists of keys or over weighted columns (`Measure.reduction`): induction,
                   duplicate, token classes, contribution, local, previous, ...
    by strips      the rest: it is shown the weights afterwards (`blockwise.replay`)

Letters: B batch, H query heads, N queries, M keys, K sums for each query.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from regard.kernels.call import Call
from regard.kernels.copies import earlier_copies
from regard.kernels.reductions import flat_lists, is_contiguous, is_unpadded, item_stride, joined_columns, numbered
from regard.measures import (
    Crop,
    Distance,
    Duplicate,
    Entropy,
    Heatmap,
    Induction,
    KeyLists,
    Links,
    MaxLogit,
    Measure,
    MeasureRun,
    Offset,
    Offsets,
    OnFirst,
    Peak,
    Plane,
    Received,
    Reduction,
    Sums,
    TopLinks,
)

__all__ = ["NO_STATISTICS", "LastingStatistics", "Statistics"]

_BY_NAME: dict[type[Measure], str] = {
    Entropy: "entropy",
    Peak: "peak",
    MaxLogit: "peak",
    Distance: "distance",
    Offset: "offset",
    OnFirst: "on_first",
    Received: "received",
    Offsets: "offsets",
    Heatmap: "heatmap",
    Links: "links",
    Crop: "crop",
}


class Statistics:
    """What C is asked for by the measures of a run, and where it writes the results: into one block of memory, which
    is cut up when they are read. The same for all calls of one size on planes that share, such as a model's layers."""

    def __init__(self, call: Call, run: MeasureRun) -> None:
        self.plane = plane = run.plane.without_values()
        self.fields = [0] * len(NO_STATISTICS)  # of args.h from `entropy` on; 0 where an address of the block goes
        self.places: dict[str, tuple[int, torch.Size, torch.dtype]] = {}  # results: first byte, shape, dtype
        self.strides: dict[str, tuple[int, ...]] = {}
        self.size = 0  # bytes of the block
        self.inputs: list[Any] = []  # what C reads: as long as this lives
        self.reductions: list[tuple[int, Reduction]] = []  # with the measure's number
        self._add("target", (plane.queries,), torch.int64)  # (the first: see `sees_all`)
        contiguous = is_contiguous(call, plane)
        self.by_name = [_serves(measure, plane, contiguous) for measure in run.measures]
        for number, measure in enumerate(run.measures):
            if self.by_name[number]:
                self._place(measure)
            elif (reduction := run.reduction(number)) is not None:
                self.reductions.append((number, reduction))
        of_sums = {number for number, _ in self.reductions}
        self.in_strips = [not known and number not in of_sums for number, known in enumerate(self.by_name)]
        self._place_columns()
        self._place_lists(run)
        if any(reduction.received for _, reduction in self.reductions):
            self._add("received", (plane.keys,))
        if not contiguous and ("distance" in self.places or "offset" in self.places):
            self._put(_POSITIONS, *_positions(self._input(plane.q_positions), self._input(plane.k_positions)))
        if plane.padding is not None:
            self._put(_UNCOUNTED, self._input(plane.padding.expand(plane.batch, -1)).data_ptr())
        self.results = [(_FIELDS[name], first) for name, (first, shape, _) in self.places.items() if shape.numel()]
        if isinstance(plane.numbers, Tensor) and "on_first" in self.places and int(plane.numbers[0]) != 0:
            self.results.remove((_FIELDS["on_first"], self.places["on_first"][0]))  # it is not among the keys: 0
        # Whether C writes all of it. (Of a region it writes what queries see.)
        self.is_filled = len(self.results) == len(self.places) and "crop" not in self.places
        # Results may be computed later, if measures are known to read no more then than what they prepared.
        self.may_wait = not any(self.in_strips) and all(_reads_nothing_later(measure) for measure in run.measures)
        if self.may_wait:
            _ = [work.counted for work in run.work]  # computed now

    @staticmethod
    def of(call: Call, run: MeasureRun) -> Statistics:
        """The statistics that the measures of a run need."""
        if run.kept is None:
            return Statistics(call, run)
        key = ("statistics", run.plane.heads, call.contiguous, call.q_start)
        known = run.kept.get(key)
        if known is None:
            known = run.kept[key] = Statistics(call, run)
        return known

    def lasting(self, run: MeasureRun) -> LastingStatistics | None:
        """What of these statistics holds for other texts of the same size, whose token ids alone are new; None if C
        reads more of a text than where its tokens were before."""
        owners = [run.measures[number] for number, _ in self.reductions]
        copies = [x for x in owners if isinstance(x, (Induction, Duplicate)) and x.ids is None]
        reads_only_copies = len(copies) == len(owners) and len(self.inputs) == (1 if owners else 0)
        if not (self.may_wait and reads_only_copies) or (owners and not self.plane.in_order):
            return None
        return LastingStatistics(self, tuple(measure.after for measure in copies))

    def _place(self, measure: Measure) -> None:
        """Let C write what a measure keeps in memory."""
        name = _BY_NAME[type(measure)]
        if isinstance(measure, (Heatmap, Crop)):
            rows, columns = measure.begin(self.plane).shape[2:]
            self._add(name, (rows, columns))
            crops = isinstance(measure, Crop)
            self._put(_FIELDS[name] + 1, *((measure.r0, rows, measure.c0, columns) if crops else (rows, columns)))
        elif isinstance(measure, Links):
            shape = self.plane.queries, min(measure.k, self.plane.keys)
            self._add("link_weights", shape)
            self._add("link_keys", shape, torch.int64)
            self._put(_FIELDS["link_keys"] + 1, shape[1])
        elif isinstance(measure, Offsets):
            self._add(name, (measure.before + 1 + measure.after,))
            self._put(_FIELDS[name] + 1, measure.before, measure.after)
        else:
            self._add(name, (self.plane.keys if isinstance(measure, Received) else self.plane.queries,))

    def _place_columns(self) -> None:
        """One tensor for the columns of all reductions."""
        columns = [reduction.columns for _, reduction in self.reductions if reduction.columns is not None]
        if not columns:
            return
        factors = self._input(joined_columns(columns))
        self._add("columns", (self.plane.queries, factors.shape[2]))
        strides = item_stride(factors), item_stride(factors, 1)
        self._put(_FIELDS["columns"] + 1, factors.data_ptr(), factors.shape[2], *strides)

    def _place_lists(self, run: MeasureRun) -> None:
        """One tensor for the lists of all reductions."""
        lists = [reduction.lists for _, reduction in self.reductions if reduction.lists is not None]
        if not lists:
            return
        owners = [run.measures[i] for i, reduction in self.reductions if reduction.lists is not None]
        if all(measure.shareable for measure in owners):
            flat = self.plane.once(("lists", *owners), lambda: flat_lists(KeyLists.joined(lists)))
        else:
            flat = flat_lists(KeyLists.joined(lists))
        self._add("lists", (self.plane.queries, flat.count))
        self._put_lists(flat)

    def _put_lists(self, flat: KeyLists) -> None:
        self.inputs.append(flat)
        addresses = [x.data_ptr() for x in (flat.keys, flat.begin, flat.end)]
        self._put(_FIELDS["lists"] + 1, *addresses, flat.count, item_stride(flat.begin))

    def _add(self, name: str, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> None:
        """Reserve a part of the block for (B, H, *shape)."""
        if name not in self.places:
            full = torch.Size((self.plane.batch, self.plane.heads, *shape))
            self.places[name] = self.size, full, dtype
            self.strides[name] = tuple(math.prod(full[axis + 1 :]) for axis in range(len(full)))
            self.size += -(full.numel() * dtype.itemsize // -64) * 64

    def _put(self, field: int, *values: int) -> None:
        self.fields[field : field + len(values)] = values

    def _input(self, x: Tensor) -> Tensor:
        """A tensor as C reads it."""
        self.inputs.append(x.contiguous())
        return self.inputs[-1]

    def new_block(self) -> Tensor:
        """Memory for the results of one call."""
        if self.is_filled:
            return torch.empty(self.size // 8, dtype=torch.int64, device="cpu")
        return torch.zeros(self.size // 8, dtype=torch.int64, device="cpu")

    def packed(self, block: Tensor) -> list[int]:
        """The fields of args.h from `entropy` on."""
        fields, address = self.fields.copy(), block.data_ptr()
        for field, first in self.results:
            fields[field] = address + first
        return fields

    def sees_all(self, block: Tensor) -> bool:
        """Whether each query of a call saw a key."""
        return int(block[: self.places["target"][1].numel()].min()) >= 0

    def result(self, name: str, block: Tensor) -> Tensor:
        """A result of a call, (B, H, ...)."""
        first, shape, dtype = self.places[name]
        numbers = block if dtype is block.dtype else block.view(dtype)
        return numbers.as_strided(shape, self.strides[name], first // dtype.itemsize)

    def finish(self, block: Tensor, run: MeasureRun) -> None:
        """Hand the measures what a call gave."""
        run.seen = self.result("target", block) >= 0
        run.states = [
            self._state(measure, block) if by_name else measure.begin(run.plane)
            for measure, by_name in zip(run.measures, self.by_name, strict=True)
        ]
        column = first = 0
        for number, reduction in self.reductions:
            columns = lists = None
            if reduction.columns is not None:
                columns = self.result("columns", block)[..., column : column + reduction.columns.shape[2]]
                column += reduction.columns.shape[2]
            if reduction.lists is not None:
                lists = self.result("lists", block)[..., first : first + reduction.lists.count]
                first += reduction.lists.count
            received = self.result("received", block) if reduction.received else None
            sums = Sums(columns, lists, received)
            run.measures[number].take(run.states[number], sums, run.plane, run.prepared[number])

    def _state(self, measure: Measure, block: Tensor) -> Any:
        """The memory of a measure that C has by its name, filled."""
        if isinstance(measure, Peak):
            return self.result("peak", block), numbered(self.result("target", block), self.plane)
        if isinstance(measure, Links):
            keys = numbered(self.result("link_keys", block), self.plane)
            return TopLinks(keys, self.result("link_weights", block))
        return self.result(_BY_NAME[type(measure)], block)


class LastingStatistics:
    """`Statistics` without a text: for others of the same size."""

    def __init__(self, statistics: Statistics, after: tuple[int, ...]) -> None:
        self.after = after  # of each measure of earlier copies: which token after them
        self.like = copy(statistics)
        # (a plane of its own, which shares nothing: no tensor of the text lives on)
        self.like.plane = replace(statistics.plane, ids=None, key_ids=None, text_ids=None)
        self.like.inputs = []
        self.like.reductions = [(number, Reduction(lists=_TWO_LISTS)) for number, _ in statistics.reductions]

    def of(self, ids: Tensor | None) -> Statistics:
        """Those of a text with these token ids (1|B, N)."""
        statistics = copy(self.like)
        statistics.fields, statistics.inputs = self.like.fields.copy(), []
        if self.after:
            assert ids is not None
            statistics._put_lists(earlier_copies(ids, self.after))
        return statistics


_FIELDS = {  # where results stand among the fields of args.h from `entropy` on
    "entropy": 0,
    "peak": 1,
    "target": 2,
    "distance": 3,
    "offset": 4,
    "on_first": 5,
    "received": 6,
    "offsets": 7,  # before, after
    "heatmap": 10,  # rows, columns
    "columns": 18,  # their factors, count, strides
    "lists": 23,  # keys, begin, end, count, stride
    "link_weights": 29,
    "link_keys": 30,  # their count
    "crop": 32,  # first row, rows, first column, columns
}
_UNCOUNTED, _POSITIONS = 13, 14
_NOTHING = torch.empty(1, 0, 2, dtype=torch.int64, device="cpu")
_TWO_LISTS = KeyLists(_NOTHING[..., 0], _NOTHING, _NOTHING)  # for each query, as earlier copies have; without keys
NO_STATISTICS = (0,) * 37


def _reads_nothing_later(measure: Measure) -> bool:
    """Whether a measure's `take` and `end` read no values, no ids and nothing else that a model may write over: known
    of the package's own measures."""
    return measure.shareable and type(measure).__module__.startswith("regard.measures.")


def _serves(measure: Measure, plane: Plane, contiguous: bool) -> bool:
    """Whether C has the measure by its name."""
    kind = type(measure)
    if kind is OnFirst:
        return plane.first is None  # (C looks at slot 0)
    if kind in (Heatmap, Crop):
        return is_unpadded(plane)
    if kind is Offsets:
        return contiguous
    return kind in _BY_NAME


def _positions(queries: Tensor, keys: Tensor) -> tuple[int, ...]:
    return queries.data_ptr(), keys.data_ptr(), item_stride(queries), item_stride(keys)
