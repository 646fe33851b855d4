"""The way of a tensor through a layer, step by step: what happens, the shape after it, and what it costs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

__all__ = ["Step", "in_columns", "table"]


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
    return in_columns(cells, left=range(3))


def in_columns(rows: Sequence[Sequence[str]], left: Collection[int]) -> str:
    """Rows of cells as lines of text. Columns `left` are aligned to the left, the others to the right.

    >>> print(in_columns([("head", "score"), ("0", "0.5")], left=[0]))
    head  score
    0       0.5
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = (
            cell.ljust(w) if i in left else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
