"""Which heads change between the runs of a page (`heads.analysis.difference`), as its description has it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from regard.draw.page.numbers import round_to
from regard.draw.scene import Scene
from regard.heads.analysis.difference import difference

__all__ = ["changes"]

MOST = 40  # heads of a pair of runs that are listed


def changes(scenes: Sequence[Scene], progress: Callable[[float], None] | None = None) -> list[dict[str, Any]]:
    """For each run but the first, the heads that change most from the first run to it; or why the two cannot be
    compared."""
    found = []
    for number, scene in enumerate(scenes[1:], 1):

        def share(done: float, number: int = number) -> None:
            if progress is not None:
                progress((number - 1 + done) / (len(scenes) - 1))

        found.append({"runs": [0, number]} | _changes(scenes[0], scene, share))
    return found


def _changes(first: Scene, second: Scene, progress: Callable[[float], None]) -> dict[str, Any]:
    tokens = first.tokens, second.tokens
    try:
        change = difference(first.record, second.record, tokens=tokens, item=first.item, progress=progress)
    except ValueError as error:  # (two models of different sizes, two texts that share no word)
        progress(1.0)
        return {"why": str(error)}
    heads = []
    for head in change.heads[:MOST]:
        panels = first[head.number], second[head.number]
        heads.append(
            {
                "layer": head.number,
                "head": head.head,
                "change": round_to(head.change, 4),
                "query": [slot - panel.rows.start for slot, panel in zip(head.query, panels, strict=True)],
                "key": [slot - panel.cols.start for slot, panel in zip(head.key, panels, strict=True)],
                "before": round_to(head.before, 4),
                "after": round_to(head.after, 4),
                "elsewhere": [round_to(share, 4) for share in head.elsewhere],
            }
        )
    return {"shared": change.shared, "of": list(change.of), "heads": heads}
