"""Which keys each strip of query rows sees: what is wholly hidden is left out, what is partly hidden is noted."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from regard import tuning
from regard.kernels.call import Call
from regard.masks import Survey
from regard.masks.base import of_batch

__all__ = ["StripPlan", "keys_seen", "plan_strips", "rows_per_strip", "sides"]


@dataclass
class StripPlan:
    """Rows, the runs of keys that they may see, and where among those some pairs are hidden."""

    rows: slice
    runs: list[slice]
    partly: list[tuple[slice, slice]] = field(default_factory=list)  # (in the strip, in the key tensor)

    @property
    def width(self) -> int:
        return sum(run.stop - run.start for run in self.runs)

    def places(self) -> Iterator[tuple[slice, slice]]:
        """Where each run is, in the strip and in the key tensor."""
        at = 0
        for run in self.runs:
            yield slice(at, at + run.stop - run.start), run
            at += run.stop - run.start


def plan_strips(call: Call, rows: int, width: int) -> Callable[[slice, slice], list[StripPlan]]:
    """For some batch items and heads the strips of `rows` rows each; what is hidden is found in tiles of `width`
    keys."""
    _, _, queries, keys = call.shape
    bands = [slice(i, min(i + rows, queries)) for i in range(0, queries, rows)]
    tiles = [slice(j, min(j + width, keys)) for j in range(0, keys, width)]
    if call.mask is None or len(bands) * len(tiles) <= 1:
        every = call.mask is None
        return lambda items, heads: [_plan(band, [(tile, True, every) for tile in tiles]) for band in bands]
    mask, shared, grid = call.mask, call.mask.shared_by_heads(), call.grid(rows, width)

    @functools.cache
    def survey(first: int, last: int) -> Survey:
        found = (mask if shared else mask.of_heads(slice(first, last))).survey(grid)
        return Survey(*(x.expand(x.shape[0], len(bands), len(tiles)) for x in found))

    def of_part(items: slice, heads: slice) -> list[StripPlan]:
        some, every = survey(0, 0) if shared else survey(heads.start, heads.stop)
        a, b = of_batch(some, items).any(0).tolist(), of_batch(every, items).all(0).tolist()
        return [_plan(band, list(zip(tiles, a[i], b[i], strict=True))) for i, band in enumerate(bands)]

    return of_part


def _plan(rows: slice, tiles: list[tuple[slice, bool, bool]]) -> StripPlan:
    """Join neighbouring tiles: the visible ones into runs, the partly visible ones into places to mask."""
    plan = StripPlan(rows, [])
    at = 0
    for cols, some, every in tiles:
        if not some:
            continue
        size = cols.stop - cols.start
        if plan.runs and plan.runs[-1].stop == cols.start:
            plan.runs[-1] = slice(plan.runs[-1].start, cols.stop)
        else:
            plan.runs.append(cols)
        if not every:
            last = plan.partly[-1] if plan.partly else None
            if last and last[0].stop == at and last[1].stop == cols.start:
                plan.partly[-1] = (slice(last[0].start, at + size), slice(last[1].start, cols.stop))
            else:
                plan.partly.append((slice(at, at + size), cols))
        at += size
    return plan


def sides(call: Call) -> tuple[int, int]:
    """The rows and keys of the tiles in which hidden ones are looked for; those of the mask, where it is made of
    blocks, or a few of them together, where they are small."""
    grain = None if call.mask is None else call.mask.grain()
    if grain is None:
        return tuning.MANY_ROWS, tuning.TILE
    rows, keys = (side * -(-tuning.BLOCK_SIDE // side) for side in grain)
    return min(rows, tuning.MANY_ROWS), min(keys, tuning.TILE)


def keys_seen(call: Call) -> int:
    """How many keys a strip sees at most: in a long text with a window few of them all."""
    _, _, queries, keys = call.shape
    if call.mask is None or queries * keys < 8 * tuning.STRIP:
        return keys
    height, width = sides(call)
    some = call.mask.survey(call.grid(height, width)).some
    tiles = some.any(0).expand(-1, -(-keys // width)).sum(-1).max()
    return min(keys, int(tiles) * width)


def rows_per_strip(scores: int, groups: int) -> int:
    """Rows of a strip, where a row has `scores` scores per kv head: many, for the sake of the matrix products; but the
    longer the text the fewer, for memory's sake."""
    if scores * groups * tuning.MANY_ROWS <= tuning.STRIP:
        return tuning.STRIP // (scores * groups)
    return min(
        tuning.MANY_ROWS,
        max(2 * tuning.STRIP // scores, tuning.FEW_ROWS if tuning.FEW_ROWS * scores <= 8 * tuning.STRIP else 1),
    )
