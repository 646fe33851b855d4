"""Small rectangles of a head's weights, without the rows that they are cut from.

Letters: B batch, H query heads, G kv heads, N queries, M keys, D head width of q and k; n, m of a rectangle.
"""

from __future__ import annotations

import torch
from torch import Tensor

from regard.heads.record.sequences import SequenceRecord
from regard.kernels.precision import fixed_precision
from regard.kernels.reference import scores

__all__ = ["crop"]


def crop(text: SequenceRecord, item: int, head: int, rows: slice, cols: slice) -> Tensor | None:
    """The weights (n, m) of one head in a rectangle: exp(score - lse), by the log-sum-exp (B, H, N) that was measured.
    None where that is not known: the text came in chunks or from a file, or its attention was written by hand."""
    piece = text.pieces[0]
    call, lse = piece.call, piece.found.lse
    if len(text.pieces) != 1 or call is None or lse is None or not text.keys:
        return None
    keys = text.keys[0]
    group = head * keys.shape[1] // text.shape[1]
    q = call.q[:, head : head + 1, rows]
    k = keys[:, group : group + 1, cols]
    with torch.no_grad(), fixed_precision(call.q):
        part = call.part(q, k, k, slice(head, head + 1), rows, cols)
        score = scores(part)[item, 0]
        sums = lse[item, head, rows, None].to(score)
        return (score - sums).exp().masked_fill(sums.isneginf(), 0.0)  # (a query that sees nothing)
