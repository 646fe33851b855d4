"""What our own kernels, native and triton, share: which calls they serve, and masks and biases as they take them: a
range of keys per query, documents, and what is left dense.

    Causal, Window, Padding   numbers: each query sees one run of keys, found without looking at a single pair
    Documents, Chunk          two rows of integers, for all of them together
    Keep, Hide                the caller's boolean tensor
    Alibi, RelativeBias       one number per head and *distance*: each row of (N, M) is the same vector, shifted by one,
                              so a view with a row stride of -1 says it all in O(N + M) memory
    anything else             evaluated in full, up to `tuning.DENSE_LIMIT` pairs

Letters: B batch, H query heads, N queries, M keys.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from regard import tuning
from regard.kernels.call import Call
from regard.masks import Causal, Chunk, Documents, Hide, Keep, Mask, Padding, Tile, Window

__all__ = [
    "Added",
    "Visible",
    "bias_gradients",
    "broadcast_strides",
    "by_distance",
    "gradient_like",
    "in_rows",
    "lower_biases",
    "lower_mask",
    "new_gradient",
    "pairs_to_evaluate",
    "why_not_lowered",
]

MOST = (2**31 - 1) // 2  # queries, and keys
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def why_not_lowered(call: Call, widest: int) -> str | None:
    """In words, where a kernel of our own cannot serve a call, whatever it computes on; heads may be so wide."""
    if call.q.dtype not in DTYPES:
        return f"it accumulates in float32, too little for {call.q.dtype}"
    if torch.compiler.is_exporting() or torch.onnx.is_in_onnx_export():
        return "what is exported must not need this library"
    if call.q.numel() == 0 or call.v.numel() == 0:
        return "a size is zero"
    if max(call.shape[2:]) > MOST:
        return f"there are more than {MOST} queries or keys, which it counts in 32 bits"
    if call.q.shape[3] > widest or call.v.shape[3] > widest:
        return f"heads are wider than {widest}"
    if call.changes_scores:
        return "it adds to scores, and cannot change them by a function (positions.ScoreMod)"
    if (call.mask is not None or call.biases) and call.derive(pairs_to_evaluate) > tuning.DENSE_LIMIT:
        return "it would need the mask or the bias as a dense tensor, a large one"
    return None


def in_rows(x: Tensor) -> Tensor:
    """A tensor (B, heads, rows, width) as it is where the numbers of a row lie side by side, else a copy."""
    x = x.resolve_neg() if x.is_neg() else x  # (a view may have its signs changed by a mark, which kernels do not see)
    return x if x.stride(3) == 1 or x.shape[3] == 1 else x.contiguous()


def gradient_like(x: Tensor) -> Tensor:
    """Memory for a gradient, laid out as what it belongs to, where that lies in rows."""
    grad = torch.empty_like(x)
    return grad if grad.stride(3) == 1 or grad.shape[3] == 1 else torch.empty(x.shape, dtype=x.dtype, device=x.device)


@dataclass
class Visible:
    """Who sees whom. Key j is visible to a query at position p where all of this agrees."""

    causal: bool = False  # j <= p
    before: int = -1  # p - before <= j; -1: no limit
    after: int = -1  # j <= p + after
    key_start: Tensor | None = None  # (B,) int64
    key_end: Tensor | None = None  # (B,) int64, exclusive
    documents: tuple[Tensor, Tensor] | None = None  # (1|B, N) and (1|B, M) int32, equal sees equal
    dense: Tensor | None = None  # (1|B, 1|H, 1|N, 1|M) bool


class Added(NamedTuple):
    """What is added to the scores, float32: that of (b, h, i, j) lies at `first` + (b, h, i, j) . `strides`."""

    tensor: Tensor
    first: int
    strides: tuple[int, ...]  # of four axes


def pairs_to_evaluate(call: Call) -> int:
    """How many pairs of a mask or a bias would have to be evaluated in full (the larger of the two)."""
    if not call.biases and call.contiguous and all(type(part) is Causal for part in call.mask_parts):
        return 0  # the common case, quickly
    batch, heads, n, m = call.shape
    mask = 0
    if call.mask is not None:
        parts = call.mask_parts
        planes = [part for part in parts if not _as_numbers(part, call)]
        rows = [part for part in parts if isinstance(part, Padding) and part.keep is not None]  # maybe with holes
        if any(type(part) not in (Keep, Hide) for part in planes) or (planes and len(planes) + len(rows) > 1):
            mask = batch * n * m * (1 if call.mask.shared_by_heads() else heads)
    if all(bias.is_dense for bias in call.biases) and len(call.biases) <= 1:
        return mask
    return mask if by_distance(call) else max(mask, batch * heads * n * m)


def _as_numbers(part: Mask, call: Call) -> bool:
    """Whether a part of a mask is told by a few numbers, without a tensor of pairs."""
    if type(part) in (Causal, Window):
        return call.contiguous
    return type(part) in (Padding, Documents, Chunk)


def lower_mask(call: Call) -> Visible:
    """The mask of a call, taken apart."""
    seen = Visible()
    batch, _, n, _ = call.shape
    rest: list[Mask] = []
    ids: list[tuple[Tensor, Tensor]] = []
    for part in call.mask_parts:
        if not _as_numbers(part, call):
            rest.append(part)
        elif type(part) is Causal:
            seen.causal = True
        elif type(part) is Window:
            seen.before = part.before if seen.before < 0 else min(seen.before, part.before)
            seen.after = part.after if seen.after < 0 else min(seen.after, part.after)
        elif isinstance(part, Padding) and part.lengths is not None:
            seen.key_end = _least(seen.key_end, part.lengths.to(torch.int64).expand(batch))
        elif isinstance(part, Padding):
            assert part.keep is not None
            start, end, whole = _run_of(part.keep)
            seen.key_end = _least(seen.key_end, end.expand(batch))
            seen.key_start = start.expand(batch) if seen.key_start is None else torch.maximum(seen.key_start, start)
            if not whole:
                rest.append(part)
        elif isinstance(part, Documents):
            ids.append(part.sides(n))
        elif isinstance(part, Chunk):
            tile = call.whole()
            ids.append((part.numbers(tile.q_positions), part.numbers(tile.k_positions)))
    if ids:
        seen.documents = _small_numbers(*functools.reduce(_both, ids))
    tile = call.whole() if rest else None
    for part in rest:
        assert tile is not None
        visible = part.block(tile)
        seen.dense = visible if seen.dense is None else seen.dense & visible
    seen.key_start, seen.key_end = (None if x is None else x.contiguous() for x in (seen.key_start, seen.key_end))
    return seen


def _least(a: Tensor | None, b: Tensor) -> Tensor:
    return b if a is None else torch.minimum(a, b)


def _run_of(keep: Tensor) -> tuple[Tensor, Tensor, bool]:
    """The first and the last key that is kept, as (start, end); and whether nothing between them is left out."""
    numbers = keep.to(torch.uint8)
    start, back = numbers.argmax(1), numbers.flip(1).argmax(1)
    end = torch.where(keep.any(1), keep.shape[1] - back, start)
    return start, end, bool((keep.sum(1) == end - start).all())


def _both(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Ids of queries and keys that are equal where two kinds of ids both are, and rise where both do."""
    items = max(x.shape[0] for x in (*a, *b))
    sides = (torch.cat([x.to(torch.int64).expand(items, -1) for x in side], 1) for side in (a, b))
    (_, first), (kinds, second) = (side.unique(return_inverse=True) for side in sides)
    pairs = first * kinds.numel() + second
    return pairs[:, : a[0].shape[1]], pairs[:, a[0].shape[1] :]


def _small_numbers(q_ids: Tensor, k_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Documents numbered within 32 bits: as they are, or by their ranks."""
    if q_ids.dtype is torch.int64 or k_ids.dtype is torch.int64:
        both = torch.cat([q_ids.reshape(-1), k_ids.reshape(-1)])
        if both.numel() and not (int(both.min()) >= -(2**31) and int(both.max()) < 2**31):
            _, both = both.unique(return_inverse=True)
        ids, key_ids = both.to(torch.int32).split([q_ids.numel(), k_ids.numel()])
        return ids.view(q_ids.shape), key_ids.view(k_ids.shape)
    return q_ids.to(torch.int32).contiguous(), k_ids.to(torch.int32).contiguous()


def lower_biases(call: Call) -> Added | None:
    """The sum of the biases of a call."""
    _, _, n, _ = call.shape
    if not call.biases:
        return None
    if by_distance(call):
        tile = _distances(call)
        total = _sum([bias.evaluate(tile) for bias in call.biases]).contiguous()  # (1|B, H, 1, N + M - 1)
        strides = broadcast_strides(total)
        return Added(total, n - 1, (strides[0], strides[1], -1, 1))
    tile = call.whole()
    total = _sum([bias.evaluate(tile) for bias in call.biases])
    return Added(total, 0, broadcast_strides(total))


def new_gradient(added: Added) -> Added:
    """Zeros for the gradient of what is added, one for each number that it has."""
    grad = torch.zeros_like(added.tensor, memory_format=torch.contiguous_format)
    return Added(grad, added.first, added.strides if added.strides[2] < 0 else broadcast_strides(grad))


def bias_gradients(call: Call, gradient: Tensor, wanted: list[bool]) -> list[Tensor]:
    """From the gradient of what `lower_biases` gave to those of the biases' weights, the unwanted left out."""
    tile = _distances(call) if by_distance(call) else call.whole()
    results = []
    for bias, want in zip(call.biases, wanted, strict=True):
        if want:
            into = torch.zeros_like(bias.weight, dtype=gradient.dtype)
            bias.add_gradient(gradient, tile, into)
            results.append(into.to(bias.weight.dtype))
    return results


def by_distance(call: Call) -> bool:
    """Whether the biases depend on nothing but how far a key is ahead of its query."""
    return call.contiguous and all(bias.by_distance for bias in call.biases)


def _distances(call: Call) -> Tile:
    """One query at 0 against keys at every distance that occurs, N + M - 1 of them."""
    _, _, n, m = call.shape
    first = -(call.q_start + n - 1)
    query = torch.zeros(1, 1, dtype=torch.int64, device=call.q.device)
    return Tile.at(query, torch.arange(first, first + n + m - 1, device=call.q.device)[None])


def _sum(blocks: list[Tensor]) -> Tensor:
    total = blocks[0].detach().to(torch.float32)
    for block in blocks[1:]:
        total = total + block.detach()
    return total


def broadcast_strides(x: Tensor) -> tuple[int, ...]:
    """With 0 for axes that broadcast."""
    return tuple(0 if size == 1 else stride for size, stride in zip(x.shape, x.stride(), strict=True))
