"""A scene as a page carries it: a description in JSON, and numbers in compressed binary (docs/page.md).

A page is as exact as fits into its limit: every weight in 16 bits, every weight in 8, or a pooled map with exact crops
of where the mass is and the strongest links of each query.

Letters: H query heads, G kv heads, N queries, M keys, D head width of q and k, E head width of v, W model width.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.draw.page.changes import changes
from regard.draw.page.flow import flow, output_width, score_numbers, vector_numbers
from regard.draw.page.image_content import MOST, grid_content, image_content
from regard.draw.page.numbers import Blob, round_to, rounded
from regard.draw.page.scores import has_mask_or_bias
from regard.draw.page.story_content import story_content
from regard.draw.progress import part_of
from regard.draw.scene import Panel, Scene
from regard.heads import Role
from regard.heads.analysis.labels import Labels
from regard.heads.record.table import scalars

__all__ = ["Packed", "Plan", "packed", "plan"]

VERSION = 1
LEAST_COMPONENTS = 8  # of what each head adds to a token
CROP, CROPS = 64, 3  # tokens to each side of an exact crop; how many of them a pooled head has, at most
LETTERS = 400  # of a token, at most


class Plan(NamedTuple):
    """How much of everything a page carries."""

    bits: int  # of a weight
    cells: int | None  # to each side of a pooled map; None: every weight
    links: int  # for each query of a pooled map that has links
    linked: int | None  # how many queries of each head have links, those with the strongest; None: all
    crops: int  # for each head of a pooled map
    added: int  # tokens, counted from the last, for which it is stored what each head adds
    vectors: int  # tokens, counted from the last, whose vectors (q, k, v ...) are stored
    vector_bits: int
    score_bits: int  # of q and k, which are then stored of all tokens; 0: as the other vectors
    parts: int  # tokens, counted from the last, for which it is stored what each head adds to single components
    components: int  # how many of them, those where the result is largest
    extra: int  # bytes for the bias of a layer, and as many for a mask that is not a range of keys for each query


def plan(scenes: list[Scene], limit: int) -> Plan:
    """What fits into `limit` bytes, even if nothing can be compressed (base64 makes 4 of 3)."""
    panels = [panel for scene in scenes for panel in scene if panel.drawable]
    room = max(limit - _description_bytes(scenes), limit // 10) * 3 // 4
    weights = sum(panel.heads * math.prod(panel.shape) for panel in panels)
    tokens = max((max(panel.shape) for panel in panels), default=1)
    bits = 16 if 2 * weights <= room // 4 else 8
    full = weights * bits // 8 <= room * 3 // 4
    maps = sum(panel.heads for panel in panels)
    fine = full and bits == 16
    vectors, vector_bits, score_bits = _vectors(panels, room // (4 if fine else 8), tokens)
    added = min(tokens, room // 12 // max(2 * maps * vector_bits // 8, 1))
    more = _parts(panels, room, tokens) if fine else (0, 0, 0)
    if full or not panels:
        return Plan(bits, None, 0, None, 0, added, vectors, vector_bits, score_bits, *more)
    cells = max(16, min(512, 2 ** int(math.log2(max(math.sqrt(room * 0.45 / maps), 1)))))
    wide = 4 if tokens > 65535 else 2
    link_bytes = sum((wide + 1) * panel.heads * panel.shape[0] for panel in panels)
    links, linked = min(int(room * 0.25 / max(link_bytes, 1)), 8), None
    if not links:  # no room for one of each query: one for some queries
        links, linked = 1, int(room * 0.25 / (maps * (2 * wide + 1)))
        link_bytes = sum((2 * wide + 1) * panel.heads * min(linked, panel.shape[0]) for panel in panels)
    left = room * 0.78 - maps * cells**2 - links * link_bytes  # (vectors and contributions have the rest)
    crops = max(0, min(CROPS, int(left / (maps * CROP**2))))
    return Plan(8, cells, links, linked, crops, added, vectors, vector_bits, score_bits, *more)


def _vectors(panels: list[Panel], room: int, tokens: int) -> tuple[int, int, int]:
    """`vectors`, `vector_bits` and `score_bits` of the plan. Scores need more than 8 bits: where there is no room for
    16 bits of everything, q and k of all tokens come first."""
    per_token = sum(vector_numbers(panel) for panel in panels)
    of_scores = sum(score_numbers(panel) for panel in panels)
    if 2 * (per_token + 2 * sum(panel.heads for panel in panels)) * tokens <= room:
        return tokens, 16, 16
    scores = 2 * of_scores * tokens
    if scores <= room * 3 // 4:
        return min(tokens, (room - scores) // max(per_token - of_scores, 1)), 8, 16
    return min(tokens, room // max(per_token, 1)), 8, 0


def _parts(panels: list[Panel], room: int, tokens: int) -> tuple[int, int, int]:
    """`parts`, `components` and `extra` of the plan for panels whose every weight is written in 16 bits: up to a
    sixteenth of the room for what heads add to components, as much for masks, and as much for biases."""
    extra = room // 16 // max(sum(has_mask_or_bias(panel) for panel in panels), 1)
    projected = [panel for panel in panels if panel.layer.keeps_values and output_width(panel)]
    numbers = sum(panel.heads + 1 for panel in projected)  # of a component of a token: what heads add, and its index
    if not numbers:
        return 0, 0, extra
    room //= 16
    parts = min(tokens, room // (numbers * (2 * LEAST_COMPONENTS + 4)))  # (with 4 bytes for a scale)
    widest = max(output_width(panel) for panel in projected)
    return parts, min(widest, (room // numbers // max(parts, 1) - 4) // 2), extra


def _description_bytes(scenes: list[Scene]) -> int:
    """About how many bytes the description takes: the tokens, and the measures and roles of the heads."""
    texts = {id(labels): labels for scene in scenes for panel in scene for labels in (panel.queries, panel.keys)}
    tokens = sum(
        len(text.encode("utf-8", "replace")) + 12 for labels in texts.values() for text in _text(labels)["tokens"]
    )
    pictures = sum(4 * MOST // 3 for scene in scenes if scene.record.image is not None)
    return tokens + pictures + 450 * sum(panel.heads for scene in scenes for panel in scene)


@dataclass
class Packed:
    """A page's content: `meta` for JSON; `blobs` by name, each compressed with zlib."""

    meta: dict[str, Any] = field(default_factory=dict)
    blobs: dict[str, bytes] = field(default_factory=dict)


def packed(
    scenes: Mapping[str, Scene], *, title: str, limit: int, progress: Callable[[float], None] | None = None
) -> Packed:
    """The content of a page for some scenes by name. `progress` is called with numbers from 0 to 1, and may raise."""
    how = plan(list(scenes.values()), limit)
    result = Packed({"version": VERSION, "title": title, "runs": []})
    share = 0.5 if len(scenes) > 1 else 1.0  # of the time, to write the runs; then they are compared
    for number, (name, scene) in enumerate(scenes.items()):
        texts: list[Labels] = []
        layers = []
        for panel in scene:
            blob = Blob()
            meta = _layer(panel, how, blob) | grid_content(panel, scene)
            for which, labels in (("queries", panel.queries), ("keys", panel.keys)):
                if not any(labels is text for text in texts):
                    texts.append(labels)
                meta[which] = next(i for i, text in enumerate(texts) if text is labels)
            if blob.data:
                meta["blob"] = f"{number}.{panel.number}"
                result.blobs[meta["blob"]] = zlib.compress(bytes(blob.data), 6)
            layers.append(meta)
            if progress is not None:
                progress(share * (number + len(layers) / len(scene)) / len(scenes))
        run = {"name": name, "texts": [_text(labels) for labels in texts], "layers": layers} | image_content(scene)
        result.meta["runs"].append(run | story_content(scene))
    if len(scenes) > 1:
        result.meta["changes"] = changes(list(scenes.values()), part_of(progress, share, 1.0))
    return result


def _text(labels: Labels) -> dict[str, Any]:
    tokens = [text if len(text) <= LETTERS else text[: LETTERS - 1] + "…" for text in labels.text]
    return {
        "tokens": tokens,
        "special": [i for i, special in enumerate(labels.special) if special],
        "word": labels.word,
    }


def _layer(panel: Panel, how: Plan, blob: Blob) -> dict[str, Any]:
    n, m = panel.shape
    meta: dict[str, Any] = {
        "name": panel.name,
        "kind": panel.layer.kind,
        "heads": panel.heads,
        "n": n,
        "m": m,
        "measures": {name: rounded(value) for name, value in panel.measures.items()},
        "roles": [_role(role) for role in panel.roles],
    }
    if panel.roles:
        meta["rest"] = _rest(panel)
    if panel.layer.uniform is not None:
        meta["baseline"] = {name: rounded(value)[0] for name, value in scalars(panel.layer.uniform).items()}
    if panel.layer.has("offsets"):
        mass, before = panel.offsets()
        meta["offsets"] = {"before": before, "mass": [rounded(x) for x in mass]}
    if not panel.drawable:
        return meta
    full = how.cells is None and panel.layer.exact
    rows, cols = (max(n, 1), max(m, 1)) if full else (how.cells or 256, how.cells or 256)
    pooled = panel.layer.exact and (rows < n or cols < m)
    links: Any = None
    if pooled and how.linked != 0:
        cells, links = panel.drawn(rows, cols, how.links)
    else:
        cells = panel.pooled(rows, cols)
    meta["map"] = blob.weights(cells, how.bits)
    if pooled:
        meta["crops"] = [
            _crop(panel, head, r, c, blob)
            for head in range(panel.heads)
            for r, c in _heaviest_crops(cells[head], n, m, how.crops)
        ]
        if links is not None:
            meta["links"] = _links(links, panel, how, blob)
    vectors = flow(panel, how, blob)
    return meta | ({"flow": vectors} if vectors else {})


def _links(links: tuple[Tensor, Tensor], panel: Panel, how: Plan, blob: Blob) -> dict[str, Any]:
    """The keys and weights (H, N, links) of the strongest links of each query; or (H, linked, 1) of some queries, with
    their positions in rising order."""
    (n, m), (keys, strongest) = panel.shape, links
    meta = {}
    if how.linked is not None and how.linked < n:
        queries = strongest[..., 0].nan_to_num(0.0).topk(how.linked, dim=1).indices.sort(1).values  # (H, linked)
        keys, strongest = (x.gather(1, queries[..., None].expand(-1, -1, x.shape[2])) for x in (keys, strongest))
        meta["queries"] = blob.integers(queries, 16 if n <= 65536 else 32)
    return meta | {
        "keys": blob.integers(keys, 16 if m <= 65536 else 32),
        "weights": blob.weights(strongest.float().cpu(), 8),
    }


def _role(role: Role) -> dict[str, Any] | None:
    if role.role is None:
        return None
    return {
        "role": role.role,
        "score": round_to(role.score),
        "baseline": round_to(role.baseline),
        "least": round_to(role.least),
        "also": role.also,
        "words": role.describe(),
        "origin": role.origin,
    }


def _rest(panel: Panel) -> dict[str, Any]:
    """Of each head the share of its mass on its resting place, where that is, and the share of its output from there;
    and which keys these are: of all heads, and of single heads besides."""
    meta: dict[str, Any] = {
        "share": [round_to(1 - role.rest, 4) for role in panel.roles],
        "place": [role.rests_on for role in panel.roles],
        "output": [round_to(role.output, 4) for role in panel.roles],
    }
    if panel.aside is not None:
        common = panel.aside.all(0)
        meta["keys"] = common.nonzero().flatten().tolist()
        more = (panel.aside & ~common).nonzero().tolist()
        meta["more"] = {str(head): [key for at, key in more if at == head] for head in sorted({at for at, _ in more})}
    return meta


def _heaviest_crops(cells: Tensor, n: int, m: int, crops: int = CROPS) -> Iterator[tuple[int, int]]:
    """The first query and key of crops that do not overlap, those with the most attention in a pooled map."""
    rows, cols = cells.shape
    tall, wide = (min(max(size * CROP // count, 1), size) for size, count in ((rows, n), (cols, m)))
    sums = torch.nn.functional.pad(cells.double().cumsum(0).cumsum(1), (1, 0, 1, 0))  # (integral image)
    mass = sums[tall:, wide:] - sums[:-tall, wide:] - sums[tall:, :-wide] + sums[:-tall, :-wide]
    for _ in range(crops):
        r, c = divmod(int(mass.argmax()), mass.shape[1])
        if mass[r, c] < 1e-6:  # (0, to rounding)
            return
        yield min(r * n // rows, max(n - CROP, 0)), min(c * m // cols, max(m - CROP, 0))
        mass[max(r - tall + 1, 0) : r + tall, max(c - wide + 1, 0) : c + wide] = 0


def _crop(panel: Panel, head: int, r: int, c: int, blob: Blob) -> dict[str, Any]:
    n, m = panel.shape
    exact = panel.crop(head, slice(r, min(r + CROP, n)), slice(c, min(c + CROP, m)))
    return {"head": head, "row": r, "col": c, **blob.weights(exact[None], 8)}
