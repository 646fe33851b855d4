"""The way of a tensor through a layer, step by step: what happens, the shape after it, and what it costs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

__all__ = ["Step", "table"]


class Step(NamedTuple):
    """One step. `products` are multiply-adds; what does not apply is None."""

    step: str
    what: str
    shape: tuple[int, ...] | None = None
    parameters: int | None = None
    products: int | None = None


def table(steps: Iterable[Step]) -> str:
    """The steps in columns, with a total.

    >>> print(table([Step("project", "q_proj", (1, 5, 16), 256, 1280)]))
    step     what    shape       parameters  multiply-adds
    project  q_proj  (1, 5, 16)         256          1,280
    total                               256          1,280
    """
    steps = list(steps)
    total = Step("total", "", None, sum(s.parameters or 0 for s in steps), sum(s.products or 0 for s in steps))
    cells: list[tuple[str, ...]] = [("step", "what", "shape", "parameters", "multiply-adds")]
    for step, what, shape, *counts in (*steps, total):
        cells.append((step, what, str(shape or ""), *("" if x is None else f"{x:,}" for x in counts)))
    wide = [max(len(row[i]) for row in cells) for i in range(5)]
    lines = [
        "  ".join(
            (*(cell.ljust(w) for cell, w in zip(row[:3], wide, strict=False)), *map(str.rjust, row[3:], wide[3:]))
        )
        for row in cells
    ]
    return "\n".join(line.rstrip() for line in lines)
