"""`HeadCache`: some kv heads keep all tokens, the others the first few and the last `window`.

Letters: B batch, G kv heads, H query heads, N new tokens, M tokens of the text so far, D head width; n, m the sides of
one tile of a mask.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.cache.checks import check_shapes
from regard.cache.kv_cache import KVCache
from regard.cache.slots import Rotate, Slots, together
from regard.cache.stored import Segment, Stored, joined
from regard.errors import bad_type, bad_value
from regard.masks import Mask, Tile

__all__ = ["HeadCache", "HeadPart", "StoredHeads", "StreamingHeads"]


class StreamingHeads(Mask):
    """Queries of streaming kv heads see the first `keep_first` keys, the `window` keys that end at their own, and what
    comes after it; those of the other heads see all. (Causality is another mask's.)

    Args:
        heads: which kv heads are streaming, boolean (1, G, 1, 1).
    """

    fields = ("heads", "window", "keep_first")

    def __init__(self, heads: Tensor, window: int, keep_first: int) -> None:
        self.heads, self.window, self.keep_first = heads, window, keep_first

    def block(self, tile: Tile) -> Tensor:
        behind = tile.q_positions[:, :, None] - tile.k_positions[:, None, :]  # (1|B, n, m)
        near = (behind < self.window) | (tile.k_positions < self.keep_first)[:, None, :]
        groups = self.heads.shape[1]
        per_group = 1 if groups == 1 else (tile.heads or groups) // groups
        return near[:, None] | ~self.heads.repeat_interleave(per_group, dim=1)

    def sees_all(self, first: int, queries: int, keys: int) -> bool:
        return first + queries - 1 - self.keep_first < self.window


class HeadPart(NamedTuple):
    """The keys or values of some kv heads."""

    heads: list[int]
    tensor: Tensor  # (B, g, m, D), maybe `Stored`
    positions: Tensor | None  # (m,) where they stand in the text; None: it has all of them


class StoredHeads(Stored):
    """Keys or values (B, G, M, D) of which heads hold different tokens. To torch it is the plain tensor, with 0 for
    tokens that a head has forgotten."""

    parts: tuple[HeadPart, ...]

    @staticmethod
    def __new__(cls, parts: Sequence[HeadPart], groups: int, keys: int) -> StoredHeads:
        like = parts[0].tensor
        shape = (like.shape[0], groups, keys, like.shape[3])
        stored = Tensor._make_wrapper_subclass(cls, shape, dtype=like.dtype, device=like.device)  # type: ignore[attr-defined]
        stored.parts = tuple(parts)
        return stored

    def __init__(self, parts: Sequence[HeadPart], groups: int, keys: int) -> None:
        Tensor.__init__(self)

    def plain(self) -> Tensor:
        return joined_heads(self.parts, self.shape[1], self.shape[2])

    def __repr__(self, **_: Any) -> str:
        held = ", ".join(f"{len(part.heads)} heads with {part.tensor.shape[2]} tokens" for part in self.parts)
        return f"StoredHeads({tuple(self.shape)}, {held})"


def joined_heads(parts: Sequence[HeadPart], groups: int, keys: int) -> Tensor:
    """The plain tensor (B, G, M, D) of some parts."""
    like = parts[0].tensor
    whole = torch.zeros(like.shape[0], groups, keys, like.shape[3], dtype=like.dtype, device=like.device)
    for heads, tensor, positions in parts:
        tensor = tensor.plain() if isinstance(tensor, Stored) else tensor
        at = torch.tensor(heads, device=like.device)
        if positions is None:
            whole[:, at] = tensor
        else:
            whole[:, at[:, None], positions] = tensor
    return whole


class HeadCache(KVCache):
    """A budget for each kv head: the `streaming` ones keep the first `keep_first` tokens and the last `window`, the
    others keep all (Xiao et al. 2024, DuoAttention). The probe
    `regard.heads.probes.streaming` says which ones may: `.kv_heads(G)`.

    Keys keep the positions at which they stood. Attention is that over all tokens with the mask `StreamingHeads`; that
    mask with the caller's own is what `watch` and the weights show. One cache for each layer.

    Args:
        streaming: the kv heads that forget, of 0 .. G-1.
        window: how many tokens these see, the query's own included.
        keep_first: how many of the first tokens they see.
        limit: the most tokens that the text may have.

    It takes no positions, no rows of different lengths, no int8.

    >>> cache = HeadCache([1], window=8, keep_first=2)
    >>> for _ in range(100):
    ...     keys, values = cache.append(torch.ones(1, 2, 1, 5), torch.ones(1, 2, 1, 5))
    >>> keys
    StoredHeads((1, 2, 100, 5), 1 heads with 100 tokens, 1 heads with 10 tokens)
    """

    def __init__(self, streaming: Sequence[int], window: int, keep_first: int = 4, *, limit: int | None = None) -> None:
        if window < 1 or keep_first < 0:
            raise bad_value(
                "HeadCache",
                expected="a window of at least 1 and keep_first of at least 0",
                received=f"window={window}, keep_first={keep_first}",
            )
        if any(type(head) is not int for head in streaming):
            raise bad_type("streaming", expected="numbers of kv heads", received=repr(streaming))
        if len(set(streaming)) != len(streaming) or any(head < 0 for head in streaming):
            raise bad_value("streaming", expected="each kv head once, from 0 on", received=list(streaming))
        self.streaming, self.window, self.keep_first = sorted(streaming), window, keep_first
        super().__init__(limit=limit)

    def clear(self) -> None:
        """Forget everything."""
        super().clear()
        self._groups: int | None = None
        self._first: tuple[Tensor, Tensor] | None = None  # (B, g, keep_first, D), (.., E): of the streaming heads
        self._recent = KVCache()  # what came after them, at least the last window - 1 tokens

    @property
    def nbytes(self) -> int:
        """Bytes of the tokens that it holds. (Streaming heads hold up to two windows, and let one go at a time.)"""
        first = 0 if self._first is None else sum(x.nbytes for x in self._first)
        return super().nbytes + first + self._recent.nbytes

    @property
    def shared_nbytes(self) -> int:
        return super().shared_nbytes + self._recent.shared_nbytes

    @property
    def keys(self) -> Tensor | None:
        """(B, G, M, D): those that the last token may see; 0 for those that a head has forgotten."""
        return None if self._batch is None else self._seen_by(1)[0]

    @property
    def values(self) -> Tensor | None:
        """(B, G, M, E)"""
        return None if self._batch is None else self._seen_by(1)[1]

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add keys (B, G, N, D) and values (B, G, N, E); returns those that the new tokens may see, as `StoredHeads`
        (B, G, M, D) and (B, G, M, E)."""
        self._check_heads(keys, values)
        groups, new, before = keys.shape[1], keys.shape[2], len(self)
        super().append(keys[:, self._retrieval(groups)], values[:, self._retrieval(groups)])
        self._groups = groups
        if self.streaming:
            keys, values = keys[:, self.streaming], values[:, self.streaming]
            first = max(0, min(self.keep_first - before, new))
            if first or self._first is None:
                began = keys[:, :, :first], values[:, :, :first]
                if self._first is not None:
                    began = [torch.cat(pair, dim=2) for pair in zip(self._first, began, strict=True)]
                self._first = began[0].clone(), began[1].clone()
            self._settle()
            self._recent.append(keys[:, :, first:], values[:, :, first:])
        return self._seen_by(new)

    def _retrieval(self, groups: int) -> list[int]:
        """The kv heads that keep all."""
        return [head for head in range(groups) if head not in self.streaming]

    def _seen_by(self, new: int) -> tuple[Tensor, Tensor]:
        """The keys and values that the last `new` tokens may see."""
        assert self._groups is not None
        retrieval, parts = self._retrieval(self._groups), []
        if retrieval:
            parts.append([HeadPart(retrieval, x, None) for x in self._held()])
        if self._first is not None and self._batch is not None:
            seen = min(len(self._recent), self.window - 1 + new)
            positions = self._positions_held(seen)
            stored = joined if torch.compiler.is_compiling() else Stored
            late = self._recent._segments()
            pair = []
            for i in (0, 1):
                segments = [Segment(self._first[i]), *_last([each[i] for each in late], seen)]
                segments = [x for x in segments if x.numbers.shape[2]] or segments[:1]
                pair.append(HeadPart(self.streaming, stored(segments, self._batch, self._first[i].dtype), positions))
            parts.append(pair)
        stored = joined_heads if torch.compiler.is_compiling() else StoredHeads
        return tuple(stored([pair[i] for pair in parts], self._groups, len(self)) for i in (0, 1))  # type: ignore[return-value]

    def _check_heads(self, keys: Tensor, values: Tensor) -> None:
        check_shapes(keys, values)
        groups = keys.shape[1]
        if groups <= max(self.streaming, default=-1):
            raise bad_value("streaming", expected=f"kv heads below {groups}", received=self.streaming)
        if self._groups not in (None, groups):
            raise bad_value("cached keys", expected=f"{self._groups} kv heads", received=groups)

    def _settle(self) -> None:
        """Forget what no later query can see, when it is a window: on average a token copies one token. To new memory:
        whoever undoes a call goes back to the old."""
        spare = len(self._recent) - self.window + 1
        if spare > self.window:
            kept = [x[:, :, spare:].clone() for x in self._recent._held()]
            self._recent = KVCache(capacity=2 * self.window)
            self._recent.append(kept[0], kept[1])

    @contextmanager
    def attending(self) -> Iterator[None]:
        """Around one call of a layer: a chunk attends before it is forgotten. Where it fails, all is as it was."""
        with together([self]):
            yield
            self._settle()

    def _positions_held(self, seen: int) -> Tensor:
        """Where the tokens stand that the streaming heads hold: the first ones and the last `seen`, (m,)."""
        assert self._first is not None
        first, length, device = self._first[0].shape[2], len(self), self._first[0].device
        return torch.cat([torch.arange(first, device=device), torch.arange(length - seen, length, device=device)])

    def extend(
        self, keys: Tensor, values: Tensor, rotate: Rotate, positions: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Slots]:
        """Add new keys, rotated to their positions, and values; returns what is seen of both, and the mask."""
        keys, values, _ = super().extend(keys, values, rotate, positions)
        heads = torch.zeros(1, keys.shape[1], 1, 1, dtype=torch.bool, device=keys.device)
        heads[:, self.streaming] = True
        return keys, values, Slots(mask=StreamingHeads(heads, self.window, self.keep_first))

    def number(self, new: int, positions: Tensor | None = None) -> Slots:
        """Contiguous: it takes no positions."""
        if positions is not None:
            raise bad_value(
                "positions",
                expected="none: a HeadCache numbers its tokens itself",
                received="a tensor",
                remedy="KVCache takes positions",
            )
        return super().number(new)

    def truncate(self, length: int | Tensor) -> None:
        """Forget all but the first `length` tokens, where the streaming heads still hold the window before them."""
        if isinstance(length, Tensor):
            raise bad_value(
                "truncate",
                expected="one length: a HeadCache has rows of one length",
                received="a length per row",
                remedy="KVCache, or texts of one length",
            )
        held = len(self) - len(self._recent)  # tokens before those that are held one after another
        if self.streaming and type(length) is int and held + self.window - 1 > length > 0 and held > self.keep_first:
            raise bad_value(
                "truncate",
                expected=f"0, or at least {held + self.window - 1}: streaming heads forgot what came before",
                received=length,
            )
        super().truncate(length)
        if length == 0:
            self._first, self._recent = None, KVCache()
            return
        self._recent.truncate(max(0, len(self._recent) - (held + len(self._recent) - length)))
        if self._first is not None:
            self._first = tuple(x[:, :, :length] for x in self._first)  # type: ignore[assignment]

    def reorder(self, rows: Tensor) -> None:
        """Take rows (B',) of the batch in this order, for beam search."""
        super().reorder(rows)
        self._recent.reorder(rows)
        if self._first is not None and self._first[0].shape[0] > 1:
            self._first = tuple(x.index_select(0, rows) for x in self._first)  # type: ignore[assignment]

    def fork(self, rows: int | None = None) -> HeadCache:
        """Another cache that begins with the same tokens, as `KVCache.fork`."""
        other = super().fork(rows)
        assert isinstance(other, HeadCache)
        other._recent = self._recent.fork(rows)
        return other

    def _state(self) -> dict[str, Any]:
        return {**super()._state(), "_recent": (self._recent, self._recent._state())}

    def _restore(self, state: dict[str, Any]) -> None:
        recent, before = state["_recent"]
        recent._restore(before)
        super()._restore({**state, "_recent": recent})

    def __repr__(self) -> str:
        kept = 0 if self._first is None else self._first[0].shape[2] + min(len(self._recent), self.window)
        return f"HeadCache({len(self)} tokens, of which heads {self.streaming} hold {kept})"


def _last(segments: Sequence[Segment], count: int) -> list[Segment]:
    """The last `count` tokens of some segments."""
    skip, kept = sum(segment.numbers.shape[2] for segment in segments) - count, []
    for segment in segments:
        size = segment.numbers.shape[2]
        if skip < size:
            kept.append(Segment(segment.numbers[:, :, max(skip, 0) :]))
        skip -= size
    return kept
