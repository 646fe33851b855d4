"""Measures of equal weights on all keys that a query may see, in closed form: no attention, no plane of pairs.

Each query sees the key slots from `low` up to `high` (without it), so each of its weights is 1 / (high - low), and what
a measure asks is a count of keys between two slots. Counts are sums of integers; they are divided in float64.

Letters: B batch, N queries, M keys, K classes of tokens, or offsets.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from regard.masks.runs import KeySlots
from regard.measures.base import Measure, Plane
from regard.measures.distribution import (
    Distance,
    Entropy,
    Itself,
    Local,
    Next,
    Offset,
    Offsets,
    OnFirst,
    Peak,
    Previous,
    Received,
)
from regard.measures.run import Measurements
from regard.measures.tokens import CopiesWanted, Duplicate, Induction, Tokens, ids_of_keys, ids_of_queries

__all__ = ["EqualWeights", "closed_forms", "measure_uniform"]

SUMS = 2**62  # what sums of positions must not exceed


class EqualWeights:
    """One head whose weights are equal on the key slots `low` to `high` (1|B, N), and what measures ask of it."""

    def __init__(self, plane: Plane, low: Tensor, high: Tensor) -> None:
        self.plane, self.low, self.high = plane, low, high
        self.count = high - low  # (1|B, N)
        self.sees = self.count > 0
        self.weight = self.count.clamp(min=1).to(torch.float64).reciprocal().where(self.sees, 0.0)

    @functools.cached_property
    def slots(self) -> KeySlots:
        """Finds keys by their positions."""
        return KeySlots(self.plane.k_positions)

    @functools.cached_property
    def numbers(self) -> Tensor:
        """(M,) which tokens of the text the keys are."""
        plane = self.plane
        return torch.arange(plane.keys, device=plane.k_positions.device) if plane.numbers is None else plane.numbers

    @functools.cached_property
    def first(self) -> Tensor:
        """The slot of the text's first token, (1|B, 1); -1 where it is not among the keys."""
        first = self.plane.first
        wanted = self.numbers.new_zeros(1, 1) if first is None else first[:, None]
        here = self.numbers == wanted  # (1|B, M)
        return torch.where(here.any(1), here.view(torch.uint8).argmax(1), -1)[:, None]

    @functools.cached_property
    def position_sums(self) -> Tensor:
        """The sums of the positions of the first 0, 1, ..., M keys, (1|B, M + 1), counted from the first key's."""
        positions = self.plane.k_positions
        return torch.nn.functional.pad((positions - positions[:, :1]).cumsum(1), (1, 0))

    @functools.cached_property
    def weight_of_tokens(self) -> Tensor:
        """The weight of each query, (1|B, N), 0 for padding: what is summed over queries is summed over this."""
        padding = self.plane.padding
        return self.weight if padding is None else self.weight.masked_fill(padding, 0.0)

    def on(self, start: Tensor, end: Tensor) -> Tensor:
        """The mass on key slots from `start` up to `end`, (1|B, N)."""
        return (torch.minimum(end, self.high) - torch.maximum(start, self.low)).clamp_(min=0) * self.weight

    def on_slot(self, slot: Tensor) -> Tensor:
        """The mass on one slot, (1|B, 1|N); 0 where it is -1."""
        return ((slot >= self.low) & (slot < self.high)) * self.weight

    def within(self, before: int, after: int) -> tuple[Tensor, Tensor]:
        """The key slots at most `before` before and `after` after each query, from one up to another: (1|B, N)."""
        queries = self.plane.q_positions
        return self.slots.before(queries - before), self.slots.before(queries + after + 1)


def closed_forms(measures: list[Measure], plane: Plane) -> list[Measure]:
    """Those of some measures that have a closed form: of this package's own, all that give a number per query, key or
    offset, if positions do not fall from slot to slot and their sums fit int64. A subclass is another measure."""
    known = [measure for measure in measures if type(measure) in _FORMULAS]
    if not plane.keys or not plane.queries or plane.k_positions.device.type == "mps":  # (which has no float64)
        return []
    keys, queries = plane.k_positions, plane.q_positions
    first = int(keys.min())
    apart = max(int(keys.max()), int(queries.max())) - min(first, int(queries.min()))
    if (apart + 1) * plane.keys > SUMS or not KeySlots(keys).rising:
        return [measure for measure in known if isinstance(measure, _WITHOUT_POSITIONS)]
    # (induction takes what stands before the first key to be at 0)
    return [measure for measure in known if first >= 0 or not isinstance(measure, Induction)]


def measure_uniform(measures: list[Measure], plane: Plane, low: Tensor, high: Tensor) -> Measurements:
    """What measures find where each query's weights are equal on the key slots `low` to `high` (1|B, N), and there is
    one head. `closed_forms` must have all the measures.

    >>> from regard.measures import as_measures
    >>> places = torch.arange(3)[None]
    >>> plane = Plane(1, 1, 3, 3, places, places, torch.float32)
    >>> measure_uniform(as_measures("peak"), plane, places * 0, places + 1).peak  # causal: 1, 1/2, 1/3
    tensor([[[1.0000, 0.5000, 0.3333]]])
    """
    weights = EqualWeights(plane, low, high)
    values: dict[str, Any] = {}
    counts: dict[str, Tensor] = {}
    seen = weights.sees.expand(plane.batch, -1)[:, None].clone()
    for measure in measures:
        prepared = measure.prepare(plane)
        results = _FORMULAS[type(measure)](measure, weights, prepared)
        for name, result in results.items():
            dtype = result.dtype if result.dtype is torch.int64 else plane.dtype
            values[name] = result.to(dtype).expand(plane.batch, *result.shape[1:])[:, None].contiguous()
        counted = measure.counted(plane, prepared)
        if counted is not None:
            by_name = counted if isinstance(counted, dict) else dict.fromkeys(results, counted)
            counts |= {name: seen & which[:, None] for name, which in by_name.items()}
    return Measurements(values, seen, counts)


def _entropy(measure: Entropy, equal: EqualWeights, prepared: None) -> dict[str, Tensor]:
    return {"entropy": equal.count.clamp(min=1).to(torch.float64).log()}


def _peak(measure: Peak, equal: EqualWeights, prepared: None) -> dict[str, Tensor]:
    first = equal.numbers[equal.low.clamp(max=equal.plane.keys - 1)]
    return {"peak": equal.weight, "target": first.where(equal.sees, -1)}


def _offset(measure: Offset, equal: EqualWeights, prepared: None) -> dict[str, Tensor]:
    ahead = _ahead(equal, equal.low, equal.high)
    return {"offset": ahead * equal.weight}


def _distance(measure: Distance, equal: EqualWeights, prepared: None) -> dict[str, Tensor]:
    itself = equal.slots.before(equal.plane.q_positions)  # keys from here on stand at the query or after it
    between = torch.minimum(torch.maximum(itself, equal.low), equal.high)
    after, before = _ahead(equal, between, equal.high), _ahead(equal, equal.low, between)
    return {"distance": (after - before) * equal.weight}


def _ahead(equal: EqualWeights, start: Tensor, end: Tensor) -> Tensor:
    """By how much the keys in slots `start` to `end` are ahead of the query, summed: integers (1|B, N)."""
    sums, origin = equal.position_sums, equal.plane.k_positions[:, :1]
    items = max(x.shape[0] for x in (sums, start, end))
    sums, start, end = (x.expand(items, -1) for x in (sums, start, end))
    return sums.gather(1, end) - sums.gather(1, start) - (end - start) * (equal.plane.q_positions - origin)


def _offsets(measure: Offsets, equal: EqualWeights, prepared: None) -> dict[str, Tensor]:
    offsets = torch.arange(-measure.before, measure.after + 2, device=equal.low.device)
    edges = equal.slots.before(equal.plane.q_positions[..., None] + offsets)  # (1|B, N, K + 1)
    edges = torch.minimum(torch.maximum(edges, equal.low[..., None]), equal.high[..., None])
    mass = (edges.diff(dim=-1) * equal.weight_of_tokens[..., None]).sum(1)  # (1|B, K)
    queries = (equal.weight_of_tokens > 0).sum(1, keepdim=True).clamp(min=1)
    return {"offsets": mass / queries}


def _at_offset(measure: Previous | Itself | Next, equal: EqualWeights, prepared: None) -> dict[str, Tensor]:
    start, end = equal.within(-measure.offset, measure.offset)
    return {next(iter(measure.gives)): equal.on(start, end)}


def _local(measure: Local, equal: EqualWeights, prepared: None) -> dict[str, Tensor]:
    return {"local": equal.on(*equal.within(measure.width, measure.width))}


def _on_first(measure: OnFirst, equal: EqualWeights, prepared: None) -> dict[str, Tensor]:
    return {"on_first": equal.on_slot(equal.first)}


def _received(measure: Received, equal: EqualWeights, prepared: None) -> dict[str, Tensor]:
    """Runs that end after a key give to it, but for those that begin after it: sums from the last key down."""
    weight = equal.weight_of_tokens
    low, high = (x.expand(weight.shape[0], -1) for x in (equal.low, equal.high))

    def given(amount: Tensor) -> Tensor:
        steps = amount.new_zeros(amount.shape[0], equal.plane.keys + 1)
        steps.scatter_add_(1, high, amount).scatter_add_(1, low, -amount)
        return steps.flip(1).cumsum(1).flip(1)[:, 1:]

    seen = given((weight > 0).to(torch.int64)) > 0  # where nobody looks the sum is 0, to the last bit
    return {"received": given(weight).where(seen, 0.0)}


def _tokens(measure: Tokens, equal: EqualWeights, members: Tensor) -> dict[str, Tensor]:
    items = max(members.shape[0], equal.low.shape[0], equal.first.shape[0])
    sums = torch.nn.functional.pad(members.cumsum(-1), (1, 0)).expand(items, -1, -1)  # (items, K, M + 1)
    start, end = (x.expand(items, -1)[:, None].expand(-1, sums.shape[1], -1) for x in (equal.low, equal.high))
    counts = (sums.gather(-1, end) - sums.gather(-1, start)).mT  # (items, N, K)
    place = equal.first.clamp(min=0).expand(items, -1)[:, None].expand(-1, sums.shape[1], -1)
    is_first = members.expand(items, -1, -1).gather(-1, place).mT.expand(-1, counts.shape[1], -1)
    masses = list((counts * equal.weight[..., None]).unbind(-1))
    firsts = list((is_first * equal.on_slot(equal.first)[..., None]).unbind(-1))
    for number, which in enumerate(measure.kinds.values()):
        if which is None:  # the query's own token
            ids, key_ids = ids_of_queries(equal.plane, measure), ids_of_keys(equal.plane, measure)
            copies = _Copies(equal, ids, key_ids)
            masses[number] = copies.between(equal.low, equal.high) * equal.weight
            firsts[number] = copies.on_first * equal.weight
    widest = max(x.shape[0] for x in (*masses, *firsts))
    tokens, first = (torch.stack([x.expand(widest, -1) for x in side], -1) for side in (masses, firsts))
    return {"tokens": tokens, "tokens_first": first}


def _copied(measure: Induction | Duplicate, equal: EqualWeights, prepared: CopiesWanted) -> dict[str, Tensor]:
    key_ids, positions = prepared.copies
    copies = _Copies(equal, prepared.ids, key_ids)
    end = torch.minimum(KeySlots(positions).before(equal.plane.q_positions), equal.high)  # where copies stand earlier
    end = torch.maximum(end, equal.low)
    pairs = copies.between(equal.low, end)
    near, after = (torch.minimum(torch.maximum(x, equal.low), end) for x in equal.within(1, 1))
    first = copies.on_first & (equal.first < end) & ~((equal.first >= near) & (equal.first < after))
    apart = pairs - copies.between(near, after) - first.to(torch.int64)
    return dict(zip(measure.gives, (pairs * equal.weight, apart * equal.weight), strict=True))


class _Copies:
    """Which keys have the id of each query: found by sorting, in O(M log M)."""

    def __init__(self, equal: EqualWeights, ids: Tensor, key_ids: Tensor) -> None:
        plane = equal.plane
        sides = ids, key_ids, equal.low, equal.first, plane.q_positions, plane.k_positions
        items = max(x.shape[0] for x in sides)
        ids, key_ids, first = (x.expand(items, -1) for x in (ids, key_ids, equal.first))
        _, number = torch.cat([ids, key_ids], 1).unique(return_inverse=True)
        slots = torch.arange(plane.keys, device=ids.device)
        # Ids first, then slots: the copies of an id lie side by side, in the order of their slots.
        self.ordered = (number[:, ids.shape[1] :] * (plane.keys + 1) + slots).sort(1).values
        self.own = number[:, : ids.shape[1]] * (plane.keys + 1)
        self.on_first = (key_ids.gather(1, first.clamp(min=0)) == ids) & (equal.on_slot(first) > 0)  # (1|B, N)

    def between(self, start: Tensor, end: Tensor) -> Tensor:
        """How many of them lie in the slots from `start` up to `end`, which is not less: (1|B, N)."""
        start, end = (self.own + x for x in (start, end))
        return torch.searchsorted(self.ordered, end) - torch.searchsorted(self.ordered, start)


# (Annotated loosely: each function takes its own kind of measure, and what that one's `prepare` gives.)
_FORMULAS: dict[type[Measure], Callable[[Any, EqualWeights, Any], dict[str, Tensor]]] = {
    Entropy: _entropy,
    Peak: _peak,
    Offset: _offset,
    Distance: _distance,
    Offsets: _offsets,
    Previous: _at_offset,
    Itself: _at_offset,
    Next: _at_offset,
    Local: _local,
    OnFirst: _on_first,
    Received: _received,
    Tokens: _tokens,
    Induction: _copied,
    Duplicate: _copied,
}
_WITHOUT_POSITIONS = (Entropy, Peak, Received, OnFirst, Tokens)
