"""Which statistics of the native kernel give a measure, and where C writes them.

    by name        entropy, peak and target, distance, offset, offsets, on_first, received, heatmap, links, crop:
                   C writes into the measure's own memory
    by reduction   anything that is a sum over lists of keys or over weighted columns (`Measure.reduction`): induction,
                   duplicate, token classes, contribution, local, previous, ...
    by strips      the rest: it is shown the weights afterwards (`blockwise.replay`)

Letters: B batch, H query heads, N queries, M keys, K sums for each query.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from regard.kernels.call import Call
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
    Offsets,
    OnFirst,
    Peak,
    Plane,
    Received,
    Reduction,
    Sums,
)

__all__ = ["NO_STATISTICS", "Statistics"]

_BY_NAME: dict[type[Measure], str] = {
    Entropy: "entropy",
    Peak: "peak",
    MaxLogit: "max_peak",
    Distance: "distance",
    Offset: "offset",
    OnFirst: "on_first",
    Received: "received",
    Offsets: "offsets",
    Heatmap: "heatmap",
    Links: "links",
    Crop: "crop",
}


@dataclass
class Statistics:
    """The statistics of one call: what C is asked for, and after it ran, the measures' results."""

    call: Call
    run: MeasureRun
    places: dict[str, Any] = field(default_factory=dict)  # by the names in args.h: a tensor to write to, or a size
    reductions: list[tuple[int, Reduction]] = field(default_factory=list)  # with the measure's number
    in_strips: list[bool] = field(default_factory=list)  # which measures need strips

    @staticmethod
    def of(call: Call, run: MeasureRun) -> Statistics:
        """Ask for what the measures of a run need."""
        asked = Statistics(call, run)
        plane = run.plane
        contiguous = _contiguous(call, plane)
        for number, (measure, state, reduction) in enumerate(
            zip(run.measures, run.states, run.reductions(), strict=True)
        ):
            by_name = _serves(measure, plane, contiguous)
            if by_name:
                asked._place(measure, state)
            elif reduction is not None:
                asked.reductions.append((number, reduction))
            asked.in_strips.append(not by_name and reduction is None)
        asked._place_sums()
        if not contiguous and ("distance" in asked.places or "offset" in asked.places):
            asked.places |= {
                "q_positions": plane.q_positions.contiguous(),
                "k_positions": plane.k_positions.contiguous(),
            }
        if plane.padding is not None:
            asked.places["uncounted"] = plane.padding.expand(plane.batch, -1).contiguous()
        asked.places["target"] = torch.empty(plane.batch, plane.heads, plane.queries, dtype=torch.int64)
        return asked

    def _place(self, measure: Measure, state: Any) -> None:
        """Let C write into a measure's own memory."""
        plane = self.run.plane
        if isinstance(measure, OnFirst) and plane.numbers is not None and int(plane.numbers[0]) != 0:
            return  # the text's first token is not among the keys: 0, as it is
        name = _BY_NAME[type(measure)]
        if isinstance(measure, MaxLogit):
            self.places.setdefault("peak", state)
        elif isinstance(measure, Peak):
            self.places["peak"] = state[0]
        elif isinstance(measure, Links):
            self.places |= {"link_weights": state.weights, "link_keys": state.keys}
        elif state.numel():
            self.places[name] = state
        if isinstance(measure, Offsets):
            self.places["reach"] = (measure.before, measure.after)
        if isinstance(measure, Crop):
            self.places["corner"] = (measure.r0, measure.c0)

    def _place_sums(self) -> None:
        """Memory for the sums of all reductions, each kind in one tensor."""
        plane = self.run.plane
        columns = [reduction.columns for _, reduction in self.reductions if reduction.columns is not None]
        if columns:
            lead = [max(x.shape[axis] for x in columns) for axis in (0, 1)]
            factors = torch.cat([x.to(torch.float32).expand(*lead, -1, -1) for x in columns], 2).contiguous()
            self.places |= {"column_factors": factors, "columns": plane.new(plane.queries, factors.shape[2])}
        lists = [reduction.lists for _, reduction in self.reductions if reduction.lists is not None]
        if lists:
            owners = [self.run.measures[i] for i, reduction in self.reductions if reduction.lists is not None]
            if all(measure.shareable for measure in owners):
                flat = plane.once(("lists", *owners), lambda: _flat(KeyLists.joined(lists)))
            else:
                flat = _flat(KeyLists.joined(lists))
            self.places |= {"key_lists": flat, "lists": plane.new(plane.queries, flat.count)}
        if any(reduction.received for _, reduction in self.reductions) and "received" not in self.places:
            self.places["received"] = plane.new(plane.keys)

    def finish(self) -> None:
        """C has run: hand the measures what was found."""
        run, plane, target = self.run, self.run.plane, self.places["target"]
        torch.ge(target, 0, out=run.seen)
        column = first = 0
        for number, reduction in self.reductions:
            columns = lists = None
            if reduction.columns is not None:
                columns = self.places["columns"][..., column : column + reduction.columns.shape[2]]
                column += reduction.columns.shape[2]
            if reduction.lists is not None:
                lists = self.places["lists"][..., first : first + reduction.lists.count]
                first += reduction.lists.count
            received = self.places["received"] if reduction.received else None
            sums = Sums(columns, lists, received)
            run.measures[number].take(run.states[number], sums, plane, run.prepared[number])
        for measure, state in zip(run.measures, run.states, strict=True):
            if isinstance(measure, MaxLogit) and self.places["peak"] is not state:
                state.copy_(self.places["peak"])
            elif isinstance(measure, Peak):
                state[1].copy_(_numbered(target, plane))
            elif isinstance(measure, Links) and plane.numbers is not None:
                state.keys.copy_(_numbered(state.keys, plane))

    def packed(self) -> tuple[Any, ...]:
        """The fields of args.h from `entropy` on."""
        get, places = self.places.get, self.places
        heatmap, crop = get("heatmap"), get("crop")
        return (
            *[_address(get(name)) for name in _ADDRESSES],
            *get("reach", (0, 0)),
            _address(heatmap),
            *((0, 0) if heatmap is None else heatmap.shape[2:]),
            _address(get("uncounted")),
            *((0,) * 4 if "q_positions" not in places else _positions(places["q_positions"], places["k_positions"])),
            *((0,) * 5 if "columns" not in places else _columns(places["columns"], places["column_factors"])),
            *((0,) * 6 if "lists" not in places else _lists(places["lists"], places["key_lists"])),
            *((0,) * 3 if "link_keys" not in places else _links(places["link_weights"], places["link_keys"])),
            _address(crop),
            *((0,) * 4 if crop is None else _corner(crop, *places["corner"])),
        )


_ADDRESSES = ("entropy", "peak", "target", "distance", "offset", "on_first", "received", "offsets")
NO_STATISTICS = (0,) * 37


def _serves(measure: Measure, plane: Plane, contiguous: bool) -> bool:
    """Whether C has the measure by its name."""
    kind = type(measure)
    if kind is OnFirst:
        return plane.first is None  # (C looks at slot 0)
    if kind in (Heatmap, Crop):  # texts of several lengths have cells of several sizes
        return plane.padding is None and plane.key_padding is None
    if kind is Offsets:
        return contiguous
    return kind in _BY_NAME


def _contiguous(call: Call, plane: Plane) -> bool:
    """Whether the plane's positions are those of the call, one after another, up to where they begin."""
    return call.contiguous and plane.once(("contiguous", call.q_start), lambda: _in_steps(call, plane))


def _in_steps(call: Call, plane: Plane) -> bool:
    keys, queries = plane.k_positions, plane.q_positions
    rows = torch.arange(queries.shape[1], device=queries.device) + call.q_start
    slots = torch.arange(keys.shape[1], device=keys.device)
    return torch.equal(queries - keys[:, :1], rows[None].expand(queries.shape)) and torch.equal(
        keys - keys[:, :1], slots[None].expand(keys.shape)
    )


def _flat(lists: KeyLists) -> KeyLists:
    """With indices into the keys of all items in a row, as C reads them."""
    keys, begin, end = lists.keys.contiguous(), lists.begin, lists.end
    if keys.shape[0] > 1:
        first = torch.arange(keys.shape[0])[:, None, None] * keys.shape[1]
        begin, end = begin + first, end + first
    return KeyLists(keys, begin.contiguous(), end.contiguous())


def _numbered(slots: Tensor, plane: Plane) -> Tensor:
    """The numbers in the whole text of keys in some slots; -1 stays -1."""
    if plane.numbers is None:
        return slots
    return plane.numbers[slots.clamp(min=0)].where(slots >= 0, -1)


def _positions(queries: Tensor, keys: Tensor) -> tuple[int, ...]:
    return queries.data_ptr(), keys.data_ptr(), _item_stride(queries), _item_stride(keys)


def _columns(sums: Tensor, factors: Tensor) -> tuple[int, ...]:
    return sums.data_ptr(), factors.data_ptr(), factors.shape[2], _item_stride(factors), _item_stride(factors, 1)


def _lists(sums: Tensor, lists: KeyLists) -> tuple[int, ...]:
    addresses = [x.data_ptr() for x in (sums, lists.keys, lists.begin, lists.end)]
    return *addresses, lists.count, _item_stride(lists.begin)


def _links(weights: Tensor, keys: Tensor) -> tuple[int, ...]:
    return weights.data_ptr(), keys.data_ptr(), weights.shape[3]


def _corner(crop: Tensor, row: int, column: int) -> tuple[int, int, int, int]:
    return row, crop.shape[2], column, crop.shape[3]


def _address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def _item_stride(x: Tensor, axis: int = 0) -> int:
    return 0 if x.shape[axis] == 1 else x.stride(axis)
