"""What a page carries of the way from scores to weights: scale, softcap, sinks, masks and biases (docs/page.md).

Letters: H query heads, N queries, M keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from regard.draw.page.numbers import Blob, round_to
from regard.draw.scene import Panel
from regard.heads.record.cuts import cut
from regard.kernels import Call
from regard.kernels.reference import scores as exact_scores

__all__ = ["has_mask_or_bias", "scores"]


def has_mask_or_bias(panel: Panel) -> bool:
    """Whether a layer hides keys, or adds to scores."""
    return any(call.biases or call.mask is not None for call in _calls(panel))


def scores(panel: Panel, room: int, blob: Blob) -> dict[str, Any]:
    """How the scores of a layer become weights. `room`: bytes for a mask that is not a range of keys, and for a bias,
    each. What has no room is named in "missing". Empty if the chunks of a text had different scales."""
    calls = _calls(panel)
    if len({(call.scale, call.softcap) for call in calls}) != 1:
        return {}
    call = calls[0]
    meta: dict[str, Any] = {"scale": round_to(call.scale, 9), "rotary": _rotary(panel)}
    if call.softcap is not None:
        meta["softcap"] = round_to(call.softcap, 9)
    if call.sinks is not None:
        sinks = call.sinks[panel.item if len(call.sinks) > 1 else 0]
        meta["sinks"] = [round_to(x, 9) for x in sinks.tolist()]
    visible, bias = _visible_and_bias(panel)
    missing = []
    if not visible.all():
        mask = _mask(visible, room, blob)
        meta |= mask
        missing += [] if mask else ["mask"]
    if bias is not None:
        written = _bias(bias, visible, room, blob)
        meta |= {"bias": written} if written else {}
        missing += [] if written else ["bias"]
    return meta | ({"missing": missing} if missing else {})


def _calls(panel: Panel) -> list[Call]:
    text = panel.layer.text
    return [] if text is None else [piece.call for piece in text.pieces if piece.call is not None]


def _rotary(panel: Panel) -> bool:
    text = panel.layer.text
    return text is not None and any(piece.rotary for piece in text.pieces)


def _visible_and_bias(panel: Panel) -> tuple[Tensor, Tensor | None]:
    """Which keys each query may see, (H|1, N, M), and what is added to its scores, (H|1, N, M), 0 for hidden keys."""
    sequence = panel.layer.text
    assert sequence is not None
    shape = panel.heads, sequence.queries, sequence.total
    visible = torch.zeros(shape, dtype=torch.bool, device="cpu")
    bias = torch.zeros(shape, device="cpu") if any(call.biases for call in _calls(panel)) else None
    first = 0
    for call, columns in _cut_calls(panel):
        tile, rows = call.whole(), slice(first, first + call.shape[2])
        first, block = rows.stop, (panel.heads, call.shape[2], len(columns))
        seen = (
            torch.ones(1, 1, 1, 1, dtype=torch.bool, device="cpu") if call.mask is None else call.mask.block(tile).cpu()
        )
        if bias is not None:
            added = torch.zeros(1, 1, 1, 1, device="cpu")
            if call.changes_scores:  # shown as what it comes to
                shown = replace(call, mask=None)
                added = (exact_scores(shown, "biased") - exact_scores(shown, "capped")).float().cpu()
            for part in () if call.changes_scores else call.biases:
                added = added + part.evaluate(tile).float().cpu()
            seen = seen & ~added.isneginf()
            bias[:, rows, columns] = added[0].expand(block)
        visible[:, rows, columns] = seen[0].expand(block)
    inside = (slice(None), slice(panel.rows.start, panel.rows.stop), slice(panel.cols.start, panel.cols.stop))
    visible = visible[inside]
    bias = None if bias is None else bias[inside].masked_fill(~visible, 0.0)
    return _shared(visible), _shared(bias) if bias is not None and bias.any() else None


def _cut_calls(panel: Panel) -> Iterator[tuple[Call, Tensor]]:
    """The calls of the chunks of a text, of this item of the batch alone, each with the keys of the text it has."""
    sequence = panel.layer.text
    assert sequence is not None
    keys = torch.cat(sequence.keys, 2)
    for piece in sequence.pieces:
        assert piece.call is not None
        k = keys[:, :, piece.numbers]
        call = replace(piece.call, k=k, v=k)
        items, rows = slice(panel.item, panel.item + 1), slice(0, piece.queries)
        yield cut(call, items, list(range(panel.heads)), rows), piece.numbers.cpu()


def _shared(x: Tensor) -> Tensor:
    """(1, N, M) of (H, N, M) if all heads have the same."""
    return x[:1] if bool((x == x[:1]).all()) else x


def _mask(visible: Tensor, room: int, blob: Blob) -> dict[str, Any]:
    """The first visible key of each query, and the one after the last; or, where hidden keys are between them, a bit
    for each key, the lowest first."""
    m = visible.shape[2]
    count = visible.sum(2)
    first = visible.to(torch.uint8).argmax(2)
    if bool((visible == _ranges(first, count, m)).all()):
        bits = 16 if m < 65536 else 32
        return {"first": blob.integers(first, bits), "count": blob.integers(count, bits)}
    bytes_ = torch.nn.functional.pad(visible, (0, -m % 8)).unflatten(2, (-1, 8))
    if bytes_.numel() // 8 > room:
        return {}
    return {"visible": blob.integers((bytes_ * 2 ** torch.arange(8, device="cpu")).sum(3), 8)}


def _ranges(first: Tensor, count: Tensor, m: int) -> Tensor:
    """Which of m keys are among the `count` that begin at `first`."""
    keys = torch.arange(m, device="cpu")
    return (keys >= first[..., None]) & (keys < (first + count)[..., None])


def _bias(bias: Tensor, visible: Tensor, room: int, blob: Blob) -> dict[str, Any]:
    """A bias that depends on nothing but the distance j - i from query i to key j as a table (H|1, N + M - 1) of it,
    the distance 1 - N first; another one in full, (H|1, N, M)."""
    heads, n, m = bias.shape
    index = (torch.arange(m, device="cpu") - torch.arange(n, device="cpu")[:, None] + n - 1).expand(heads, n, m)
    visible = visible.expand(heads, n, m)
    table = torch.zeros(heads, n + m - 1, device="cpu")
    table[torch.arange(heads, device="cpu")[:, None, None].expand(heads, n, m)[visible], index[visible]] = bias[visible]
    by_distance = table.gather(1, index.flatten(1)).unflatten(1, (n, m)).masked_fill(~visible, 0.0)
    if bool((by_distance == bias).all()) and 2 * table.numel() <= room:
        return {"distances": blob.signed(table, 16)}
    return {"values": blob.signed(bias, 16)} if 2 * bias.numel() <= room else {}
