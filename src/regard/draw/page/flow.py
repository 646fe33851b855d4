"""What a page carries of a layer's computation: vectors (q, k, v, outputs) and what each head adds.

Letters: H query heads, G kv heads, N queries, M keys, D head width of q and k, E head width of v, W model width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from regard.draw.page.numbers import Blob
from regard.draw.scene import Panel

if TYPE_CHECKING:
    from regard.draw.page.pack import Plan

__all__ = ["flow", "vector_numbers"]

ROWS = 256  # queries whose contributions are computed at once


def vector_numbers(panel: Panel) -> int:
    """How many numbers one token has: q, k, v, heads' outputs, input and result."""
    layer = panel.layer
    if not layer.keeps_values:
        return 0
    h, d, e = layer.q.shape[1], layer.q.shape[3], layer.v.shape[3]
    width = 0 if layer.projection is None else layer.projection[0].shape[0]
    return h * d + h * e + layer.k.shape[1] * (d + e) + 2 * width


def flow(panel: Panel, how: Plan, blob: Blob) -> dict[str, Any]:
    """Vectors of the layer's computation: q, k, v, outputs, and what each head adds to the result."""
    layer, (n, m) = panel.layer, panel.shape
    if not layer.keeps_values:
        return {}
    rows, cols = (slice(tokens.start, tokens.stop) for tokens in (panel.rows, panel.cols))
    q, output = (x[panel.item, :, rows].float() for x in (layer.q, layer.output))
    k, v = (x[panel.item, :, cols].float() for x in (layer.k, layer.v))
    meta: dict[str, Any] = {"head_dim": q.shape[2], "value_dim": v.shape[2], "kv_heads": k.shape[0]}
    result = None
    if layer.projection is not None:
        added, first = (max(0, n - tokens) for tokens in (how.added, how.vectors))
        begin = min(added, first)  # (of a long text only the last tokens are stored)
        norms, cosines, result = _contributions(panel, begin)
        meta["width"] = result.shape[1]
        if how.added:
            meta |= {
                "added": added,
                "norms": blob.weights(norms[:, added - begin :], how.vector_bits),
                "cosines": blob.signed(cosines[:, added - begin :], how.vector_bits),
            }
    if not how.vectors:
        return meta
    first = max(0, n - how.vectors)
    meta["first"] = first
    vectors: dict[str, Tensor] = {"q": q[:, first:], "output": output[:, first:]}
    if how.vectors >= max(n, m):
        vectors |= {"k": k, "v": v}
    if layer.has_input:
        vectors["input"] = layer.input[panel.item, rows][first:].float()
    if result is not None:
        vectors["result"] = result[-how.vectors :]
    return meta | {name: blob.signed(x, how.vector_bits) for name, x in vectors.items()}


def _contributions(panel: Panel, begin: int) -> tuple[Tensor, Tensor, Tensor]:
    """What each head adds to the layer's output, from query `begin` on: its norm and its cosine with the sum of all
    heads, (H, N) each; and the output, (N, W)."""
    assert panel.layer.projection is not None
    bias = panel.layer.projection[1]
    norms, cosines, outputs = [], [], []
    for first in range(begin, max(len(panel.rows), begin + 1), ROWS):
        rows = panel.rows[first : first + ROWS]
        added = panel.layer.projected(slice(rows.start, rows.stop))[panel.item].float()  # (H, n, W)
        total = added.sum(0)
        norms.append(added.norm(dim=-1))
        lengths = norms[-1].clamp(min=1e-8) * total.norm(dim=-1).clamp(min=1e-8)
        cosines.append((added * total).sum(-1) / lengths)
        outputs.append(total if bias is None else total + bias.float())
    return torch.cat(norms, 1), torch.cat(cosines, 1), torch.cat(outputs)
