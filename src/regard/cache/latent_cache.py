"""`LatentCache`: what latent attention keeps of each token: its latent, and the rotary key that all heads share.

Both stand side by side in one tensor, (B, 1, M, R + P): that is the one key head of the absorbed form, and its values
are the first R numbers of the same rows, a view.

Letters: B batch, N new tokens, M tokens after appending, R rank of the latent, P width of the shared rotary key.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from regard.cache.kv_cache import KVCache
from regard.cache.slots import Rotate, Slots, together
from regard.errors import bad_value, shape_of

__all__ = ["LatentCache"]


class LatentCache:
    """Latents and shared rotary keys of all tokens: R + P numbers for each, and none for each head. It grows by
    doubling, so that a token costs O(1) on average.

    Args:
        capacity: room to start with, in tokens (it grows all the same).
        limit: the most tokens it may hold; one more raises. No limit by default.

    It belongs to the layer that filled it, until `clear()`: another layer raises. A copy belongs to no layer yet.

    Rows of different lengths: append padded on the right, then `truncate(lengths)`; each row goes on at its own length.

    >>> cache = LatentCache()
    >>> tokens = cache.append(torch.ones(2, 3, 8), torch.ones(2, 3, 4))  # latents of width 8, rotary keys of width 4
    >>> tokens = cache.append(torch.ones(2, 1, 8), torch.ones(2, 1, 4))
    >>> len(cache), tokens.shape, cache.bytes_per_token
    (4, torch.Size([2, 1, 4, 12]), 48)
    """

    def __init__(self, capacity: int = 0, *, limit: int | None = None) -> None:
        if capacity < 0 or (limit is not None and limit < max(capacity, 1)):
            raise bad_value(
                "LatentCache",
                expected="a capacity of at least 0 and a limit not below it",
                received=f"capacity={capacity}, limit={limit}",
            )
        self.capacity, self.limit = capacity, limit
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        # The rows are the keys of a KVCache, whose values have width 0: room, lengths and positions are its work.
        self._rows = KVCache(self.capacity, limit=self.limit)
        self._rank = 0
        self._layer: weakref.ref[object] | None = None  # that filled it

    def __getstate__(self) -> dict[str, Any]:  # a copy may be another layer's
        return {**vars(self), "_layer": None}

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def lengths(self) -> Tensor | None:
        """Tokens held per row, (B,); None before the first."""
        return self._rows.lengths

    @property
    def ragged(self) -> bool:
        """Whether rows may differ in length."""
        return self._rows.ragged

    @property
    def tokens(self) -> Tensor | None:
        """(B, 1, M, R + P): the latents and the rotary keys, side by side."""
        return self._rows.keys

    @property
    def latents(self) -> Tensor | None:
        """(B, 1, M, R), a view."""
        return None if self.tokens is None else self.tokens[..., : self._rank]

    @property
    def rotary_keys(self) -> Tensor | None:
        """(B, 1, M, P), a view: rotated to their positions."""
        return None if self.tokens is None else self.tokens[..., self._rank :]

    @property
    def bytes_per_token(self) -> int:
        """Of one row of the batch; 0 before the first token."""
        return 0 if self.tokens is None else self.tokens.shape[-1] * self.tokens.element_size()

    @property
    def nbytes(self) -> int:
        """All memory that it has reserved, in bytes."""
        room = self._rows._keys
        return 0 if room is None else room.numel() * room.element_size()

    def check_source(self, layer: object) -> None:
        """Raise where what is held is not of this layer."""
        filled_by = None if self._layer is None else self._layer()
        if len(self) and filled_by is not None and filled_by is not layer:
            raise bad_value(
                "cache",
                expected="one for each layer",
                received=f"one with {len(self)} tokens of another layer",
                remedy="[LatentCache() for _ in layers]; clear() it to give it to another layer",
            )

    def set_source(self, layer: object) -> None:
        """Remember the layer."""
        self._layer = weakref.ref(layer)

    def append(self, latents: Tensor, rotary_keys: Tensor) -> Tensor:
        """Add latents (B, N, R) and rotary keys (B, N, P); returns all of them side by side, (B, 1, M, R + P).

        What is returned is a view: valid until the cache next changes.
        """
        if latents.dim() != 3 or rotary_keys.dim() != 3 or latents.shape[:2] != rotary_keys.shape[:2]:
            raise bad_value(
                "cache",
                expected="latents (B, N, R) and rotary keys (B, N, P)",
                received=f"{shape_of(latents)} and {shape_of(rotary_keys)}",
            )
        held, new = len(self), latents.shape[1]
        if held and latents.shape[2] != self._rank:
            raise bad_value(
                "cache",
                expected=f"latents of rank {self._rank}",
                received=f"rank {latents.shape[2]}",
                remedy="one cache per layer and batch",
            )
        if self.limit is not None and held + new > self.limit:
            raise bad_value(
                "cache",
                expected=f"at most {self.limit} tokens",
                received=f"{held} held and {new} new",
                remedy="a larger limit, or truncate()",
            )
        rows = torch.cat([latents, rotary_keys], -1)[:, None]
        tokens, _ = self._rows.append(rows, rows[..., :0])
        self._rank = latents.shape[2]
        return tokens

    def extend(
        self, latents: Tensor, rotary_keys: Tensor, rotate: Rotate, positions: Tensor | None = None
    ) -> tuple[Tensor, Slots]:
        """As `append`, with the rotary keys rotated to their positions; returns the tokens, and their positions."""
        held, new = len(self), latents.shape[1]
        slots = self._rows.number(new, positions)
        stand = (held, held + new) if slots.positions is None else (slots.positions, None)
        return self.append(latents, rotate(rotary_keys[:, None], *stand)[:, 0]), slots

    @contextmanager
    def attending(self) -> Iterator[None]:
        """Around one call of a layer: where it fails, the cache is as it was before."""
        with together([self]):
            yield

    def _state(self) -> dict[str, Any]:
        return {**vars(self), "_state_of_rows": self._rows._state()}

    def _restore(self, state: dict[str, Any]) -> None:
        vars(self).update({name: value for name, value in state.items() if name != "_state_of_rows"})
        self._rows._restore(state["_state_of_rows"])

    def truncate(self, length: int | Tensor) -> None:
        """Forget all but the first `length` tokens; with a tensor (B,), of each row its own number."""
        self._rows.truncate(length)

    def reorder(self, rows: Tensor) -> None:
        """Take rows (B',) of the batch in this order: beam search continues row `rows[b]` as row b."""
        self._rows.reorder(rows)

    def __repr__(self) -> str:
        tokens = self.tokens
        held = "" if tokens is None else f", batch {tokens.shape[0]}, {self.bytes_per_token} bytes per token"
        return f"LatentCache({len(self)} tokens{held})"
