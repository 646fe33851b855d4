"""Arguments of flash attention as arguments of `regard.attend`: masks are given as lengths, not as N x M.

Texts are packed one after another, and a query sees the keys of its own text. The last query of a text is at its last
key (causal masks and windows are aligned to the bottom right), whatever the number of its queries. Padding is removed
before: distances count real tokens, and a padding query sees nothing.

Letters: B batch, H query heads, G kv heads, N queries, M keys, D head width of q and k, E head width of v.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regard.attention import prepare
from regard.errors import bad_value, shape_of
from regard.kernels import Call
from regard.masks import And, Causal, Documents, Mask, Padding, Window

__all__ = ["from_flash", "from_varlen", "paged"]


class _Tokens(NamedTuple):
    """The queries or the keys, L tokens in each row of the batch."""

    text: Tensor  # (B, L): the text that a token belongs to; -1 for none
    number: Tensor  # (B, L): the index of the token in its text
    counts: Tensor  # (texts,): tokens of each text

    @staticmethod
    def kept(keep: Tensor) -> _Tokens:
        """One text in each row: the tokens where `keep` (B, L) is True."""
        rows = torch.arange(keep.shape[0], device=keep.device)[:, None]
        return _Tokens(torch.where(keep, rows, -1), keep.cumsum(1) - 1, keep.sum(1))

    @staticmethod
    def between(starts: Tensor, batch: int, length: int) -> _Tokens:
        """Text i has the tokens from `starts[i]` to before `starts[i + 1]`, counted through all rows of the batch."""
        starts = starts.to(torch.int64)
        at = torch.arange(batch * length, device=starts.device)
        text = torch.searchsorted(starts, at, right=True) - 1
        text = text.masked_fill(at >= starts[-1], -1)
        return _Tokens(text.view(batch, length), (at - starts[text]).view(batch, length), starts.diff())


def _visible(q: _Tokens, k: _Tokens, causal: bool, before: int | None, after: int | None) -> dict[str, Any]:
    """`mask`, `positions` and `key_positions` of `attend` for packed texts: a query sees the keys of its own text,
    causal or not, at most so many `before` and `after` it (None: all)."""
    batch, m, device = len(q.text), k.text.shape[1], q.text.device
    real, held = q.text >= 0, k.text >= 0
    rows = torch.arange(batch, device=device)[:, None]
    row_of_text = torch.full((k.counts.numel() + 1,), -1, device=device)  # the row that has a text's keys; -1: none
    row_of_text[k.text[held]] = rows.expand(batch, m)[held]
    row_of_query = row_of_text[q.text]
    if (row_of_text[k.text] != rows)[held].any() or ((row_of_query != rows) & (row_of_query >= 0) & real).any():
        raise bad_value(
            "attention of flash kernels",
            expected="texts that lie in one row of the batch",
            received="a text that goes on in the next row",
            remedy="flatten to a batch of 1",
        )
    parts: list[Mask] = [Causal()] if causal else []
    if before is not None or after is not None:
        parts.append(Window(before=m if before is None else before, after=m if after is None else after))
    positions = _positions(q, k) if parts else {}
    one_text_per_row = bool((k.text == rows)[held].all() and (q.text == rows)[real].all())
    if one_text_per_row and not held.all():
        parts.append(Padding(keep=held))
    if not one_text_per_row:
        parts.append(Documents(q.text, torch.where(held, k.text, -2)))
    elif not real.all():
        parts.append(Documents(real.long(), torch.ones_like(k.text)))
    return {"mask": functools.reduce(And, parts) if parts else None, **positions}


def _positions(q: _Tokens, k: _Tokens) -> dict[str, Tensor]:
    """`positions` and `key_positions` of `attend`, if they are not the default: indices within a text, or slots, which
    are equivalent if a text's keys are neighbours."""
    batch, m = k.text.shape
    real, held = q.text >= 0, k.text >= 0
    at = q.number + (k.counts - q.counts)[q.text]
    slots = torch.arange(m, device=at.device).expand(batch, m)
    first = slots.new_zeros(k.counts.numel() + 1)  # the slot in which a text begins
    first[k.text.masked_fill(k.number != 0, -1)] = slots
    if (first[k.text] + k.number != slots)[held].any():
        return {"positions": torch.where(real, at, 0), "key_positions": torch.where(held, k.number, 0)}
    at = at + first[q.text]
    if (at == torch.arange(m - q.text.shape[1], m, device=at.device))[real].all():
        return {}
    return {"positions": torch.where(real, at, m - 1)}


def from_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: list[int] | tuple[int, int] | None = None,
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> Call:
    """A `Call` from the arguments of torch's `varlen_attn`: q (N, H, D), k and v (M, G, D), all texts packed; its batch
    size is 1."""
    if block_table is not None:
        raise paged("a block_table of varlen_attn")
    if cu_seq_k is None:
        raise bad_value("varlen_attn", expected="cu_seq_k, where the keys of each text begin", received="None")
    q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))  # (1, H|G, N|M, D)
    keys = _Tokens.between(cu_seq_k, 1, k.shape[2])
    if seqused_k is not None:  # only the first keys of each text are used
        used = keys.number < seqused_k[keys.text]
        keys = _Tokens(keys.text.masked_fill(~used, -1), keys.number, seqused_k.to(torch.int64))
    left, right = (-1, -1) if window_size is None else window_size
    before, after = (None if size < 0 else size for size in (left, right))
    seen = _visible(_Tokens.between(cu_seq_q, 1, q.shape[2]), keys, is_causal, before, after)
    return prepare(q, k, v, scale=scale, **seen)


def from_flash(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, keep: Tensor | None, **options: Any
) -> Call:
    """A `Call` from the arguments of transformers' flash attention: q (B, H, N, D), k (B, G, M, D), v (B, G, M, E),
    `keep` (B, M), True for keys that are no padding, and where packed texts begin: `cu_seq_lens_q`, `cu_seq_lens_k`, or
    `position_ids` that start again."""
    if any(options.get(name) is not None for name in ("block_table", "k_cache", "v_cache")):
        raise paged("a block table")
    q, k, v = query, key, value
    batch, n = q.shape[0], q.shape[2]
    starts = options.get("cu_seq_lens_q"), options.get("cu_seq_lens_k")
    if keep is not None:
        keep = keep.detach() != 0
        if keep.dim() != 2 or keep.shape[0] != batch or keep.shape[1] > k.shape[2]:
            raise bad_value(
                "attention_mask of flash attention",
                expected=f"(B, M) = {(batch, k.shape[2])} at most",
                received=shape_of(keep),
            )
        k, v = (x[:, :, : keep.shape[1]] for x in (k, v))  # a cache of fixed size is longer than the sequence
        keys = _Tokens.kept(keep)
        last = torch.ones_like(keep[:, :1]) if n == 1 else keep[:, -n:]
        queries = _Tokens.kept(last)
        if last.shape[1] < n:  # more queries than keys: the first ones, counted through all rows, are used
            text, number = (x.new_full((batch * n,), -1) for x in queries[:2])
            text[: last.numel()], number[: last.numel()] = (x.flatten() for x in queries[:2])
            queries = _Tokens(text.view(batch, n), number.view(batch, n), queries.counts)
    elif isinstance(starts[0], Tensor) and isinstance(starts[1], Tensor):
        queries = _Tokens.between(starts[0], batch, n)
        keys = _Tokens.between(starts[1], batch, k.shape[2])
    elif (packed := _packed_starts(options.get("position_ids"), batch)) is not None:
        queries, keys = _Tokens.between(packed, batch, n), _Tokens.between(packed, batch, k.shape[2])
    else:
        queries, keys = (_Tokens.kept(torch.ones(batch, x.shape[2], dtype=torch.bool, device=q.device)) for x in (q, k))
    causal = options.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    window = options.get("sliding_window")
    far = window - 1 if window else None  # the window counts the token itself; an encoder's extends to both sides
    sinks = options.get("s_aux")
    return prepare(
        q,
        k,
        v,
        scale=options.get("scaling"),
        softcap=options.get("softcap"),
        sinks=None if sinks is None else sinks.flatten().to(q.dtype),
        **_visible(queries, keys, bool(causal), far, None if causal else far),
    )


def _packed_starts(position_ids: Any, batch: int) -> Tensor | None:
    """Where texts packed in one row begin: where positions are at their minimum again. None if it is one text."""
    if not isinstance(position_ids, Tensor) or batch != 1 or position_ids.numel() <= 1:
        return None
    positions = position_ids.detach().reshape(-1)
    if torch.equal(positions, positions.min() + torch.arange(positions.numel(), device=positions.device)):
        return None
    begin = (positions == positions.min()).nonzero().flatten()
    return torch.cat([begin, begin.new_tensor([positions.numel()])])


def paged(received: str) -> ValueError:
    """The error for a paged cache."""
    return bad_value(
        "attention",
        expected="keys as one tensor",
        received=f"a paged cache ({received})",
        remedy="generate in a plain way, without continuous batching",
    )
