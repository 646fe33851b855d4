"""A scene as a page carries it: a description in JSON, and numbers in compressed binary (docs/page.md).

A page is as exact as fits into its limit: every weight in 16 bits, every weight in 8, or a pooled map with exact crops
of where the mass is and the strongest links of each query.

Letters: H query heads, G kv heads, N queries, M keys, D head width of q and k, E head width of v, W model width.
"""

from __future__ import annotations

import ctypes
import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.draw.labels import Labels
from regard.draw.scene import Panel, Scene
from regard.heads.record.table import scalars

__all__ = ["Packed", "Plan", "codes", "decoded", "packed", "plan", "step"]

VERSION = 1
CROP, CROPS = 64, 3  # tokens to each side of an exact crop; how many of them a pooled head has, at most
LETTERS = 400  # of a token; more are not shown anywhere
ROWS = 256  # queries whose contributions are computed at once


class Plan(NamedTuple):
    """How much of everything a page carries."""

    bits: int  # of a weight
    cells: int | None  # to each side of a pooled map; None: every weight
    links: int  # for each query of a pooled map that has some
    linked: int | None  # how many queries of each head have some, those with the strongest; None: all
    crops: int  # for each head of a pooled map
    added: int  # tokens, counted from the last, of which it is known what each head adds
    vectors: int  # tokens, counted from the last, whose vectors (q, k, v ...) are there
    vector_bits: int


def plan(scenes: list[Scene], limit: int) -> Plan:
    """What fits into `limit` bytes, even if nothing can be compressed (base64 makes 4 of 3)."""
    panels = [panel for scene in scenes for panel in scene if panel.drawable]
    room = max(limit - _described(scenes), limit // 10) * 3 // 4
    weights = sum(panel.heads * math.prod(panel.shape) for panel in panels)
    per_token = sum(_vector_numbers(panel) for panel in panels)
    tokens = max((max(panel.shape) for panel in panels), default=1)
    bits = 16 if 2 * weights <= room // 4 else 8
    full = weights * bits // 8 <= room * 3 // 4
    maps = sum(panel.heads for panel in panels)
    vector_bits = 16 if 2 * (per_token + 2 * maps) * tokens <= room // 8 else 8
    vectors = min(tokens, room // 8 // max(per_token * vector_bits // 8, 1))
    added = min(tokens, room // 12 // max(2 * maps * vector_bits // 8, 1))
    if full or not panels:
        return Plan(bits, None, 0, None, 0, added, vectors, vector_bits)
    cells = max(16, min(512, 2 ** int(math.log2(max(math.sqrt(room * 0.45 / maps), 1)))))
    wide = 4 if tokens > 65535 else 2
    a_link = sum((wide + 1) * panel.heads * panel.shape[0] for panel in panels)
    links, linked = min(int(room * 0.25 / max(a_link, 1)), 8), None
    if not links:  # not one for each query: one for some
        links, linked = 1, int(room * 0.25 / (maps * (2 * wide + 1)))
        a_link = sum((2 * wide + 1) * panel.heads * min(linked, panel.shape[0]) for panel in panels)
    left = room * 0.78 - maps * cells**2 - links * a_link  # (vectors and what is added have the rest)
    crops = max(0, min(CROPS, int(left / (maps * CROP**2))))
    return Plan(8, cells, links, linked, crops, added, vectors, vector_bits)


def _described(scenes: list[Scene]) -> int:
    """About how many bytes the description takes: each token, and what is known of each head."""
    texts = {id(labels): labels for scene in scenes for panel in scene for labels in (panel.queries, panel.keys)}
    tokens = sum(
        len(text.encode("utf-8", "replace")) + 12 for labels in texts.values() for text in _text(labels)["tokens"]
    )
    return tokens + 450 * sum(panel.heads for scene in scenes for panel in scene)


@dataclass
class Packed:
    """A page's content: `meta` for JSON; `blobs` by name, each compressed with zlib."""

    meta: dict[str, Any] = field(default_factory=dict)
    blobs: dict[str, bytes] = field(default_factory=dict)


def packed(
    scenes: Mapping[str, Scene], *, title: str, limit: int, progress: Callable[[float], None] | None = None
) -> Packed:
    """Everything that a page shows of some runs. `progress` is told how far it is, from 0 to 1, and may raise."""
    how = plan(list(scenes.values()), limit)
    result = Packed({"version": VERSION, "title": title, "runs": []})
    for number, (name, scene) in enumerate(scenes.items()):
        texts: list[Labels] = []
        layers = []
        for panel in scene:
            blob = _Blob()
            said = _layer(panel, how, blob)
            for which, labels in (("queries", panel.queries), ("keys", panel.keys)):
                if not any(labels is text for text in texts):
                    texts.append(labels)
                said[which] = next(i for i, text in enumerate(texts) if text is labels)
            if blob.data:
                said["blob"] = f"{number}.{panel.number}"
                result.blobs[said["blob"]] = zlib.compress(bytes(blob.data), 6)
            layers.append(said)
            if progress is not None:
                progress((number + len(layers) / len(scene)) / len(scenes))
        result.meta["runs"].append({"name": name, "texts": [_text(labels) for labels in texts], "layers": layers})
    return result


def _text(labels: Labels) -> dict[str, Any]:
    tokens = [text if len(text) <= LETTERS else text[: LETTERS - 1] + "…" for text in labels.text]
    return {"tokens": tokens, "special": [i for i, yes in enumerate(labels.special) if yes], "word": labels.word}


def _layer(panel: Panel, how: Plan, blob: _Blob) -> dict[str, Any]:
    n, m = panel.shape
    said: dict[str, Any] = {
        "name": panel.name,
        "kind": panel.layer.kind,
        "heads": panel.heads,
        "n": n,
        "m": m,
        "measures": {name: _rounded(value) for name, value in panel.measures.items()},
        "roles": [_role(one) for one in panel.roles],
    }
    if panel.layer.uniform is not None:
        said["baseline"] = {name: _rounded(value)[0] for name, value in scalars(panel.layer.uniform).items()}
    if panel.layer.has("offsets"):
        mass, before = panel.offsets()
        said["offsets"] = {"before": before, "mass": [_rounded(x) for x in mass]}
    if not panel.drawable:
        return said
    full = how.cells is None and panel.layer.exact
    cells = panel.pooled(*((max(n, 1), max(m, 1)) if full else (how.cells or 256,) * 2))
    said["map"] = blob.weights(cells, how.bits)
    exact = full or cells.shape[1:] == (n, m)
    if not exact and panel.layer.exact:
        said["crops"] = [
            _crop(panel, head, r, c, blob)
            for head in range(panel.heads)
            for r, c in _where(cells[head], n, m, how.crops)
        ]
        if how.linked != 0:
            said["links"] = _links(panel, how, blob)
    flow = _flow(panel, how, blob)
    return said | ({"flow": flow} if flow else {})


def _links(panel: Panel, how: Plan, blob: _Blob) -> dict[str, Any]:
    """The keys and weights (H, N, links) of the strongest links of each query; or (H, linked, 1) of some, with their
    numbers in rising order."""
    n, m = panel.shape
    keys, strongest = panel.links(how.links)
    said = {}
    if how.linked is not None and how.linked < n:
        queries = strongest[..., 0].nan_to_num(0.0).topk(how.linked, dim=1).indices.sort(1).values  # (H, linked)
        keys, strongest = (x.gather(1, queries[..., None].expand(-1, -1, x.shape[2])) for x in (keys, strongest))
        said["queries"] = blob.whole(queries, 16 if n <= 65536 else 32)
    return said | {
        "keys": blob.whole(keys, 16 if m <= 65536 else 32),
        "weights": blob.weights(strongest.float().cpu(), 8),
    }


def _role(one: Any) -> dict[str, Any] | None:
    if one.role is None:
        return None
    return {
        "role": one.role,
        "score": _round(one.score),
        "baseline": _round(one.baseline),
        "least": _round(one.least),
        "also": one.also,
    }


def _where(cells: Tensor, n: int, m: int, crops: int = CROPS) -> Iterator[tuple[int, int]]:
    """The first query and key of the crops with the most mass in a pooled map (rows, cols), which do not overlap."""
    rows, cols = cells.shape
    tall, wide = (_within(size * CROP // count, size) for size, count in ((rows, n), (cols, m)))
    sums = torch.nn.functional.pad(cells.double().cumsum(0).cumsum(1), (1, 0, 1, 0))  # of all above and to the left
    mass = sums[tall:, wide:] - sums[:-tall, wide:] - sums[tall:, :-wide] + sums[:-tall, :-wide]
    for _ in range(crops):
        at = int(mass.argmax())
        r, c = divmod(at, mass.shape[1])
        if mass[r, c] < 1e-6:  # (sums leave a rest)
            return
        yield min(r * n // rows, max(n - CROP, 0)), min(c * m // cols, max(m - CROP, 0))
        mass[max(r - tall + 1, 0) : r + tall, max(c - wide + 1, 0) : c + wide] = 0


def _within(size: int, most: int) -> int:
    return min(max(size, 1), most)


def _crop(panel: Panel, head: int, r: int, c: int, blob: _Blob) -> dict[str, Any]:
    exact = panel.weights(head, slice(r, r + CROP), slice(c, c + CROP))
    return {"head": head, "row": r, "col": c, **blob.weights(exact[None], 8)}


def _vector_numbers(panel: Panel) -> int:
    """How many numbers the vectors of one token take: q, k, v, heads' outputs, input and result."""
    layer = panel.layer
    if not layer.keeps_values:
        return 0
    h, d, e = layer.q.shape[1], layer.q.shape[3], layer.v.shape[3]
    width = 0 if layer.projection is None else layer.projection[0].shape[0]
    return h * d + h * e + layer.k.shape[1] * (d + e) + 2 * width


def _flow(panel: Panel, how: Plan, blob: _Blob) -> dict[str, Any]:
    """What is known of the layer's computation: vectors of tokens, and what each head adds to the result."""
    layer, (n, m) = panel.layer, panel.shape
    if not layer.keeps_values:
        return {}
    own, others = (slice(inside.start, inside.stop) for inside in (panel.rows, panel.cols))
    q, output = (x[panel.item, :, own].float() for x in (layer.q, layer.output))
    k, v = (x[panel.item, :, others].float() for x in (layer.k, layer.v))
    said: dict[str, Any] = {"head_dim": q.shape[2], "value_dim": v.shape[2], "kv_heads": k.shape[0]}
    result = None
    if layer.projection is not None:
        norms, cosines = q.new_zeros(q.shape[:2]), q.new_zeros(q.shape[:2])
        weight, bias = layer.projection
        said["width"] = weight.shape[0]
        results = []
        for first in range(0, n, ROWS):
            rows = slice(first, first + ROWS)
            inside = panel.rows[rows]
            added = layer.projected(slice(inside.start, inside.stop))[panel.item].float()  # (H, n, W)
            whole = added.sum(0)
            norms[:, rows] = added.norm(dim=-1)
            cosines[:, rows] = torch.nn.functional.cosine_similarity(added, whole, dim=-1)
            results.append(whole if bias is None else whole + bias.float())
        result = torch.cat(results)
        known_from = max(0, n - how.added)
        if how.added:
            said |= {
                "added": known_from,
                "norms": blob.weights(norms[:, known_from:], how.vector_bits),
                "cosines": blob.signed(cosines[:, known_from:], how.vector_bits),
            }
    if not how.vectors:
        return said
    first = max(0, n - how.vectors)
    said["first"] = first
    known: dict[str, Tensor] = {"q": q[:, first:], "output": output[:, first:]}
    if how.vectors >= max(n, m):
        known |= {"k": k, "v": v}
    for name, x in known.items():
        said[name] = blob.signed(x, how.vector_bits)
    if layer.has_input:
        said["input"] = blob.signed(layer.input[panel.item, own][first:].float(), how.vector_bits)
    if result is not None:
        said["result"] = blob.signed(result[first:], how.vector_bits)
    return said


def codes(values: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Non-negative values (H, ...) as whole numbers of so many bits, and the scale (H,) of each head:
    value = scale * (code / levels)^2, so that small weights keep their digits."""
    levels = 2**bits - 1
    scale = (
        values.flatten(1).amax(1).clamp(min=torch.finfo(torch.float32).tiny)
        if values.numel()
        else values.new_ones(len(values))
    )
    share = values / scale.view(-1, *[1] * (values.dim() - 1))
    return (share.clamp(0, 1).sqrt() * levels).round().to(torch.int32), scale


def decoded(code: Tensor, scale: Tensor, bits: int) -> Tensor:
    """The values that codes stand for."""
    return scale.view(-1, *[1] * (code.dim() - 1)) * (code / (2**bits - 1)) ** 2


def step(code: Tensor, scale: Tensor, bits: int) -> Tensor:
    """How far the next code is away: a value is known to within this much."""
    return scale.view(-1, *[1] * (code.dim() - 1)) * (2 * code + 1) / (2**bits - 1) ** 2


class _Blob:
    """Binary under construction. Each piece says where it begins, its shape and how to read it."""

    def __init__(self) -> None:
        self.data = bytearray()

    def whole(self, values: Tensor, bits: int) -> dict[str, Any]:
        """Whole numbers from 0, low bytes of all first, then the next: like goes with like, and compresses."""
        at = len(self.data)
        flat = values.to(torch.int64).flatten().cpu()
        for shift in range(0, bits, 8):
            self.data += _bytes(((flat >> shift) & 255).to(torch.uint8))
        return {"at": at, "shape": list(values.shape), "bits": bits}

    def weights(self, values: Tensor, bits: int) -> dict[str, Any]:
        """Values from 0 on, with a scale for each head."""
        code, scale = codes(values.cpu(), bits)
        return {**self.whole(code, bits), "scale": [_round(x, 8) for x in scale.tolist()]}

    def signed(self, values: Tensor, bits: int) -> dict[str, Any]:
        """Values of both signs (..., width), each row with a scale: value = scale * code / half, code - half >= 0."""
        half = 2 ** (bits - 1) - 1
        values = values.cpu()
        scale = values.abs().amax(-1).clamp(min=torch.finfo(torch.float32).tiny)
        said = self.whole((values / scale[..., None] * half).round() + half, bits)
        at = len(self.data)
        self.data += _bytes(scale.float())
        return {**said, "scales": at}


def _bytes(x: Tensor) -> bytes:
    """What is in its memory. (By way of numpy it would be a method; torch comes without.)"""
    x = x.contiguous()
    return ctypes.string_at(x.data_ptr(), x.numel() * x.element_size()) if x.numel() else b""


def _round(x: float, digits: int = 6) -> float | None:
    """With so many digits; what is no number is not known."""
    return float(f"{x:.{digits}g}") if math.isfinite(x) else None


def _rounded(values: Tensor) -> list[float | None]:
    return [_round(x) for x in values.tolist()]
