"""Rectangles of the weights, without the rows that they are cut from.

Letters: B batch, H query heads, G kv heads, N queries, M keys, D head width of q and k; h, n, m of a rectangle.
"""

from __future__ import annotations

import torch
from torch import Tensor

from regard.heads.record.sequences import SequenceRecord
from regard.kernels.precision import fixed_precision
from regard.kernels.reference import scores

__all__ = ["crop"]


def crop(text: SequenceRecord, item: int, head: int | None, rows: slice, cols: slice) -> Tensor | None:
    """The weights (h, n, m) of one head, or of all, in a rectangle: exp(score - lse), by the log-sum-exp (B, H, N) that
    was measured. None where that is not known: the text came in chunks or from a file, or its attention was written by
    hand."""
    piece = text.pieces[0]
    call, lse = piece.call, piece.found.lse
    if len(text.pieces) != 1 or call is None or lse is None or not text.keys:
        return None
    keys, heads, groups = text.keys[0], slice(None), slice(None)
    if head is not None:
        group = head * keys.shape[1] // text.shape[1]
        heads, groups = slice(head, head + 1), slice(group, group + 1)
    with torch.no_grad(), fixed_precision(call.q):
        k = keys[:, groups, cols]
        part = call.part(call.q[:, heads, rows], k, k, heads, rows, cols)
        score = scores(part)[item]
        sums = lse[item, heads, rows, None].to(score)
        return (score - sums).exp_().masked_fill_(sums.isneginf(), 0.0)  # (a query that sees nothing)
