"""What a page carries of a layer's computation: vectors (q, k, v, outputs), how scores become weights, and what each
head adds.

Letters: H query heads, G kv heads, N queries, M keys, D head width of q and k, E head width of v, W model width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from regard.draw.page.numbers import Blob
from regard.draw.page.scores import scores
from regard.draw.scene import Panel

if TYPE_CHECKING:
    from regard.draw.page.pack import Plan

__all__ = ["flow", "output_width", "score_numbers", "vector_numbers"]

ROWS = 256  # queries whose contributions are computed at once


def score_numbers(panel: Panel) -> int:
    """How many numbers of one token its scores are made of: q and k."""
    layer = panel.layer
    return layer.q.shape[3] * (layer.q.shape[1] + layer.k.shape[1]) if layer.keeps_values else 0


def vector_numbers(panel: Panel) -> int:
    """How many numbers one token has: q, k, v, heads' outputs, input and result, and 8 bytes for the keys it sees."""
    layer = panel.layer
    if not layer.keeps_values:
        return 0
    values = layer.v.shape[3] * (layer.q.shape[1] + layer.v.shape[1])
    return score_numbers(panel) + values + 2 * output_width(panel) + 8


def output_width(panel: Panel) -> int:
    """W, the width of the layer's result; 0 if its output projection is not known."""
    return 0 if panel.layer.projection is None else panel.layer.projection[0].shape[0]


def flow(panel: Panel, how: Plan, blob: Blob) -> dict[str, Any]:
    """Vectors of the layer's computation: q, k, v, outputs, and what each head adds to the result."""
    layer = panel.layer
    if not layer.keeps_values:
        return {}
    meta: dict[str, Any] = {"head_dim": layer.q.shape[3], "value_dim": layer.v.shape[3], "kv_heads": layer.k.shape[1]}
    result = None
    if layer.projection is not None:
        written, result = _contributions(panel, how, blob)
        meta |= {"width": result.shape[1], **written}
    return meta | _vectors(panel, how, blob, result)


def _vectors(panel: Panel, how: Plan, blob: Blob, result: Tensor | None) -> dict[str, Any]:
    """q and k of all tokens, if there is room, and how scores become weights; outputs, input and result of the last
    tokens, and v if these are all."""
    layer, (n, m) = panel.layer, panel.shape
    rows, cols = (slice(tokens.start, tokens.stop) for tokens in (panel.rows, panel.cols))
    everything = how.vectors >= max(n, m)
    first = max(0, n - how.vectors)
    meta: dict[str, Any] = {}
    if how.score_bits or everything:
        bits = how.score_bits or how.vector_bits
        meta["q"] = blob.signed(layer.q[panel.item, :, rows].float(), bits)
        meta["k"] = blob.signed(layer.k[panel.item, :, cols].float(), bits)
        meta["scores"] = scores(panel, how.extra, blob)
    if not how.vectors:
        return meta
    vectors: dict[str, Tensor] = {"output": layer.output[panel.item, :, rows][:, first:]}
    if "q" not in meta:
        vectors["q"] = layer.q[panel.item, :, rows][:, first:]
    if everything:
        vectors["v"] = layer.v[panel.item, :, cols]
    if layer.has_input:
        vectors["input"] = layer.input[panel.item, rows][first:]
    if result is not None:
        vectors["result"] = result[first - n :]
    return meta | {"first": first} | {name: blob.signed(x.float(), how.vector_bits) for name, x in vectors.items()}


def _contributions(panel: Panel, how: Plan, blob: Blob) -> tuple[dict[str, Any], Tensor]:
    """What is written of what each head adds to the layer's output, and the output of the last tokens, (n, W): of each
    head the norm and the cosine with the sum of all heads, (H, n) each; the bias of the projection, and parts."""
    assert panel.layer.projection is not None
    bias = panel.layer.projection[1]
    norms, cosines, sums, n = [], [], [], len(panel.rows)
    begin = max(0, n - max(how.added, how.vectors, how.parts, 1))  # (of a long text only the last tokens are stored)
    for first in range(begin, n, ROWS):
        added = _added(panel, panel.rows[first : first + ROWS])
        total = added.sum(0)
        sums.append(total)
        norms.append(added.norm(dim=-1))
        lengths = norms[-1].clamp(min=1e-8) * total.norm(dim=-1).clamp(min=1e-8)
        cosines.append((added * total).sum(-1) / lengths)
    result = torch.cat(sums) if bias is None else torch.cat(sums) + bias.float()
    meta: dict[str, Any] = {}
    if how.added:
        meta["added"] = max(0, n - how.added)
        meta["norms"] = blob.weights(torch.cat(norms, 1)[:, meta["added"] - begin :], how.vector_bits)
        meta["cosines"] = blob.signed(torch.cat(cosines, 1)[:, meta["added"] - begin :], how.vector_bits)
    if how.vectors and bias is not None:
        meta["bias"] = blob.signed(bias.float()[None], 16)
    if how.parts and how.components:
        meta["parts"] = _parts(panel, how, result, blob)
    if panel.layer.gated:
        meta["gated"] = True
    return meta, result


def _added(panel: Panel, rows: range) -> Tensor:
    """What each head adds to the output of some queries, (H, n, W)."""
    return panel.layer.projected(slice(rows.start, rows.stop))[panel.item].float()


def _parts(panel: Panel, how: Plan, result: Tensor, blob: Blob) -> dict[str, Any]:
    """What each head adds to single components of the output, (H, n, components), for the last n tokens: to all
    components, or to those (n, components), in rising order, that are the largest of the token's output."""
    first = max(0, len(panel.rows) - how.parts)
    added = _added(panel, panel.rows[first:])
    meta: dict[str, Any] = {"first": first}
    if how.components < added.shape[2]:
        largest = (
            result[first - len(panel.rows) :].abs().nan_to_num(0.0).topk(how.components, dim=1).indices.sort(1).values
        )
        added = added.gather(2, largest.expand(len(added), -1, -1))
        meta["components"] = blob.integers(largest, 16 if result.shape[1] <= 65536 else 32)
    return meta | {"values": blob.signed(added, 16)}
