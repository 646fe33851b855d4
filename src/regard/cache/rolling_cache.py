"""`RollingCache`: keeps the first few tokens and the last `window`.

Letters: B batch, G kv heads, N new tokens, M slots after appending, D head width of keys, E head width of values.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from torch import Tensor

from regard.cache.kv_cache import KVCache
from regard.cache.slots import PastWindow, Rotate, Slots, together
from regard.errors import bad_value
from regard.masks import Causal, Prefix, Window

__all__ = ["RollingCache", "tokens_read"]


class RollingCache:
    """Bounded: the first `keep_first` tokens and the last `window` (Xiao et al. 2023), for generation without end.

    Keys are stored *before* rotary and slots are numbered 0, 1, 2, ..., so positions never pass `keep_first + window`
    however long the text. A query sees the first `keep_first` tokens and the `window` tokens that end at itself,
    whether tokens come one by one or many at once: a chunk attends before it evicts.
    """

    complete: ClassVar[bool] = False

    def __init__(self, window: int, keep_first: int = 4) -> None:
        if window < 1 or keep_first < 0:
            raise bad_value(
                "RollingCache",
                expected="a window of at least 1 and keep_first of at least 0",
                received=f"window={window}, keep_first={keep_first}",
            )
        self.window, self.keep_first = window, keep_first
        self._store = KVCache()
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self._store.clear()
        self.seen = 0  # tokens ever appended

    def __len__(self) -> int:
        return len(self._store)

    @property
    def keys(self) -> Tensor | None:
        """(B, G, M, D), before rotary"""
        return self._store.keys

    @property
    def values(self) -> Tensor | None:
        """(B, G, M, E)"""
        return self._store.values

    def number(self, new: int, positions: Tensor | None = None) -> Slots:
        """The positions of the `new` tokens and of all slots; called before `append`."""
        if positions is not None:
            raise bad_value(
                "positions",
                expected="none: a RollingCache numbers its slots itself",
                received="a tensor",
                remedy="KVCache takes positions",
            )
        if new == 1 and len(self) < self.keep_first + self.window:
            return Slots()  # one token sees all that is held: that is what is held
        # Slots are contiguous numbers, and so are the queries: the window between them is right as it is. Only the
        # distance to the first tokens is not: it stays what it would be had the tokens come one by one.
        mask = Window(self.window) | (Causal() & Prefix(self.keep_first)) if self.keep_first else Window(self.window)
        last = self.keep_first + self.window - 1
        if not self.keep_first or len(self) + new - 1 <= last:
            return Slots(mask=mask)
        return PastWindow(mask=mask, keep_first=self.keep_first, last=last)

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add keys (B, G, N, D) before rotary and values (B, G, N, E); returns all that are held."""
        held = self._store.append(keys, values)
        self.seen += keys.shape[2]
        return held

    def extend(
        self, keys: Tensor, values: Tensor, rotate: Rotate, positions: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Slots]:
        """Add new keys and values; returns all of both, the keys rotated to their slots, and their positions."""
        slots = self.number(keys.shape[2], positions)
        keys, values = self.append(keys, values)
        return rotate(keys, 0, keys.shape[2]), values, slots

    def check_source(self, layer: object, key: Tensor, value: Tensor, *, own: bool) -> None:
        """Raise where what is held is not of this layer, or is the memory (B, M, W) that is given once more."""
        self._store.check_source(layer, key, value, own=own)

    def set_source(self, layer: object, key: Tensor, value: Tensor, *, own: bool) -> None:
        """Remember the layer, and what its keys are made of."""
        self._store.set_source(layer, key, value, own=own)

    @contextmanager
    def attending(self) -> Iterator[None]:
        """Around one call of a layer: a chunk attends before it evicts. Where it fails, all is as it was before."""
        with together([self]):
            yield
            self._settle()

    def _state(self) -> dict[str, Any]:
        """What `_restore` takes back."""
        return {"seen": self.seen, "store": self._store._state()}

    def _restore(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]
        self._store._restore(state["store"])

    def _settle(self) -> None:
        """Forget what no later query can see. The next one sees itself and `window - 1` before it."""
        first, last = self.keep_first, self.keep_first + self.window - 1
        spare = len(self) - last
        if spare <= 0:
            return
        settled = {}
        for name in ("_keys", "_values"):  # to new memory: whoever undoes a call goes back to the old
            held = getattr(self._store, name)
            room = last if spare > last else held.shape[2]  # after a long chunk: let go of the room that it took
            kept = held.new_empty(*held.shape[:2], room, held.shape[3])
            kept[:, :, :first] = held[:, :, :first]
            kept[:, :, first:last] = held[:, :, first + spare : last + spare]
            settled[name] = kept
        vars(self._store).update(settled, _length=last)

    def recall(self, positions: Tensor | None = None) -> tuple[Tensor, Tensor, Slots]:
        """Never asked: a rolling cache is never complete."""
        raise AssertionError("a RollingCache is never complete")

    def reorder(self, rows: Tensor) -> None:
        """Take rows (B',) of the batch in this order, for beam search."""
        self._store.reorder(rows)

    def __repr__(self) -> str:
        return (
            f"RollingCache(window={self.window}, keep_first={self.keep_first}, holds {len(self)} of {self.seen} tokens)"
        )


def tokens_read(cache: KVCache | RollingCache) -> int:
    """How many tokens a cache has been given and not told to forget; a `RollingCache` holds the last of them."""
    return cache.seen if isinstance(cache, RollingCache) else len(cache)
