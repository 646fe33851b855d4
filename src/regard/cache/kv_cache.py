"""`KVCache`: keeps the keys and values of all tokens.

Letters: B batch, G kv heads, N new tokens, M slots after appending, D head width of keys, E head width of values.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from regard.cache.slots import Rotate, Slots, together
from regard.cache.source import Memory
from regard.errors import bad_type, bad_value, shape_of
from regard.masks import Padding

__all__ = ["KVCache"]


class KVCache:
    """Keys and values that grow as tokens come, by doubling: a token costs O(1) on average, never a copy of all.

    Args:
        capacity: room to start with, in tokens (it grows all the same).
        limit: the most tokens it may hold; one more raises. No limit by default.
        once: True keeps the first keys and values for good: those of cross attention are computed in the first call
            only. False appends what cross attention is given in each call: a memory that comes in pieces. By default
            as False, but the same memory once more is refused.

    It belongs to the layer that filled it, until `clear()`: another layer raises. A copy belongs to no layer yet. With
    `once=True` another memory raises, too, until `clear()`: the same tensor is known by its identity (in inference mode
    torch does not tell whether it was changed in place), others are compared by their numbers. Compiled code checks
    neither.

    Rows of different lengths: append padded on the right, then `truncate(lengths)`; each row goes on at its own length.

    >>> cache = KVCache()
    >>> keys, values = cache.append(torch.ones(1, 2, 3, 5), torch.ones(1, 2, 3, 5))
    >>> keys, values = cache.append(torch.ones(1, 2, 1, 5), torch.ones(1, 2, 1, 5))
    >>> len(cache), keys.shape
    (4, torch.Size([1, 2, 4, 5]))
    """

    def __init__(self, capacity: int = 0, *, limit: int | None = None, once: bool | None = None) -> None:
        if capacity < 0 or (limit is not None and limit < max(capacity, 1)):
            raise bad_value(
                "KVCache",
                expected="a capacity of at least 0 and a limit not below it",
                received=f"capacity={capacity}, limit={limit}",
            )
        self.capacity, self.limit, self.once = capacity, limit, once
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self._keys: Tensor | None = None
        self._values: Tensor | None = None
        self._length = 0
        self._lengths: Tensor | None = None  # (B,), only where rows differ
        self._positions: Tensor | None = None  # (1|B, M), only where the caller gave positions
        self._layer: weakref.ref[object] | None = None  # that filled it
        self._memory: Memory | None = None  # that cross attention was given last
        self._own = False  # whether keys were last made of the queries' own tokens

    def __getstate__(self) -> dict[str, Any]:  # a copy may be another layer's
        return {**vars(self), "_layer": None}

    def __len__(self) -> int:
        return self._length

    @property
    def lengths(self) -> Tensor | None:
        """Tokens held per row, (B,); None before the first."""
        if self._keys is None:
            return None
        if self._lengths is not None:
            return self._lengths
        return torch.full((self._keys.shape[0],), self._length, device=self._keys.device)

    @property
    def ragged(self) -> bool:
        """Whether rows may differ in length."""
        return self._lengths is not None

    @property
    def keys(self) -> Tensor | None:
        """(B, G, M, D)"""
        return None if self._keys is None else self._keys[:, :, : self._length]

    @property
    def values(self) -> Tensor | None:
        """(B, G, M, E)"""
        return None if self._values is None else self._values[:, :, : self._length]

    @property
    def complete(self) -> bool:
        """Whether keys and values are there for good and need not be computed again."""
        return bool(self.once) and self._length > 0

    def check_source(self, layer: object, key: Tensor, value: Tensor, *, own: bool) -> None:
        """Raise where what is held is not of this layer, or not of these inputs (B, M, W); `own`: of self attention."""
        if not self._length:
            return
        filled_by = None if self._layer is None else self._layer()
        if filled_by is not None and filled_by is not layer:
            raise bad_value(
                "cache",
                expected="one for each layer",
                received=f"one with {self._length} tokens of another layer",
                remedy="[KVCache() for _ in layers]; clear() it to give it to another layer",
            )
        if self.complete and own and self._own:
            raise bad_value(
                "KVCache(once=True)",
                expected="cross attention: it takes no more tokens",
                received="self attention, a second time",
                remedy="KVCache()",
            )
        if own or self._memory is None:
            return
        if self.complete and not self._memory.is_same(key, value):
            raise bad_value(
                "key, value",
                expected="the memory that the cache was filled with, or none",
                received=f"another one, {shape_of(key)}",
                remedy="clear() the cache before another memory",
            )
        if self.once is None and not self.complete and self._memory.is_same(key, value):
            raise bad_value(
                "cache",
                expected="new keys",
                received=f"the memory that it holds already, {shape_of(key)}, which would be appended again",
                remedy="KVCache(once=True), which computes its keys once; KVCache(once=False) appends whatever comes",
            )

    def set_source(self, layer: object, key: Tensor, value: Tensor, *, own: bool) -> None:
        """Remember the layer, and what its keys are made of."""
        self._layer = weakref.ref(layer)
        if self.complete:
            if self._memory is None and not own:
                self._memory = Memory(key, value)
            return
        self._own = own
        self._memory = None if own or self.once is False else Memory(key, value)

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add keys (B, G, N, D) and values (B, G, N, E); returns all of them, (B, G, M, D) and (B, G, M, E).

        What is returned is a view: valid until the cache next changes.
        """
        if self.complete:
            raise bad_value(
                "KVCache(once=True)",
                expected="one append",
                received="a second one",
                remedy="clear() it, or use KVCache()",
            )
        new = keys.shape[2]
        self._check(keys, values)
        if torch.is_grad_enabled() and (keys.requires_grad or values.requires_grad):
            raise bad_value(
                "cache",
                expected="keys and values without gradient",
                received="some that require it",
                remedy="a cache is for inference: use torch.no_grad() or torch.inference_mode()",
            )
        end = self._length + new
        if self.limit is not None and end > self.limit:
            raise bad_value(
                "cache",
                expected=f"at most {self.limit} tokens",
                received=f"{self._length} held and {new} new",
                remedy="a larger limit, truncate(), or RollingCache, which forgets",
            )
        self._reserve(keys, values, end)
        assert self._keys is not None and self._values is not None
        if self._lengths is None:
            self._keys[:, :, self._length : end] = keys
            self._values[:, :, self._length : end] = values
        else:  # each row goes on where it ends
            slots = self._lengths[:, None] + torch.arange(new, device=keys.device)  # (B, N)
            row = torch.arange(keys.shape[0], device=keys.device)[:, None]
            self._keys[row, :, slots] = keys.transpose(1, 2)
            self._values[row, :, slots] = values.transpose(1, 2)
            self._lengths = self._lengths + new
        self._length = end
        return self._keys[:, :, :end], self._values[:, :, :end]

    def number(self, new: int, positions: Tensor | None = None) -> Slots:
        """The positions of the `new` tokens of a call and of all M keys; called before `append`.

        Given positions (N,) or (B, N) are remembered, so that later queries know the positions of these keys.
        """
        if positions is not None:
            self._check_positions(positions, new)
        if positions is not None or (self._positions is not None and self._length):
            if self._lengths is not None:
                raise bad_value(
                    "positions",
                    expected="none: rows of different lengths are numbered by the cache",
                    received="positions for a cache after truncate(lengths)",
                )
            before = self._positions
            if before is None:
                device = None if positions is None else positions.device
                before = torch.arange(self._length, device=device)[None]
            before = before[:, : self._length]  # a call that failed before it appended left its own behind
            if positions is None:
                positions = before[:, -1:] + 1 + torch.arange(new, device=before.device)
            rows = positions if positions.dim() == 2 else positions[None]
            batch = max(before.shape[0], rows.shape[0])
            self._positions = torch.cat([before.expand(batch, -1), rows.expand(batch, -1)], dim=1)
            return Slots(positions=rows, key_positions=self._positions)
        self._positions = None
        if self._lengths is None:
            return Slots()
        positions = self._lengths[:, None] + torch.arange(new, device=self._lengths.device)
        return Slots(mask=Padding(lengths=self._lengths + new), positions=positions)

    def extend(
        self, keys: Tensor, values: Tensor, rotate: Rotate, positions: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Slots]:
        """Add new keys, rotated to their positions, and values; returns all of both, and their positions."""
        held, new = len(self), keys.shape[2]
        slots = self.number(new, positions)
        stand = (held, held + new) if slots.positions is None else (slots.positions, None)
        keys = rotate(keys, *stand)
        return *self.append(keys, values), slots

    def recall(self, positions: Tensor | None = None) -> tuple[Tensor, Tensor, Slots]:
        """All keys and values as they are, for queries at `positions`; and their positions."""
        assert self._keys is not None and self._values is not None
        mask = None if self._lengths is None else Padding(lengths=self._lengths)
        return self._keys[:, :, : self._length], self._values[:, :, : self._length], Slots(mask, positions)

    @contextmanager
    def attending(self) -> Iterator[None]:
        """Around one call of a layer: where it fails, the cache is as it was before."""
        with together([self]):
            yield

    def _state(self) -> dict[str, Any]:
        """What `_restore` takes back. No tensor in it is written to where it holds tokens."""
        return dict(vars(self))

    def _restore(self, state: dict[str, Any]) -> None:
        vars(self).update(state)

    def truncate(self, length: int | Tensor) -> None:
        """Forget all but the first `length` tokens; with a tensor (B,), of each row its own number.

        >>> cache = KVCache()
        >>> _ = cache.append(torch.ones(2, 1, 4, 3), torch.ones(2, 1, 4, 3))
        >>> cache.truncate(torch.tensor([4, 2]))
        >>> cache.lengths.tolist()
        [4, 2]
        """
        whole = not (length.is_floating_point() or length.dtype is torch.bool) if isinstance(length, Tensor) else None
        if whole is False or (whole is None and type(length) is not int):
            raise bad_type("truncate", expected="an integer, or an integer tensor (B,)", received=repr(length))
        if isinstance(length, Tensor):
            held = self.lengths
            if held is None or length.shape != held.shape:
                raise bad_value("truncate", expected="a length per row, (B,)", received=f"shape {shape_of(length)}")
            if bool(((length < 0) | (length > held)).any()):
                raise bad_value(
                    "truncate", expected=f"lengths from 0 to those held, {held.tolist()}", received=length.tolist()
                )
            if self._positions is not None:
                raise bad_value(
                    "truncate",
                    expected="one length: this cache was given positions",
                    received="a length per row",
                    remedy="hide slots with masks.Padding(keep=...)",
                )
            self._length = int(length.max()) if length.numel() else 0
            self._lengths = length.to(held)
            return
        if not 0 <= length <= self._length:
            raise bad_value("truncate", expected=f"a length from 0 to {self._length}", received=length)
        self._length = length
        if self._lengths is not None:
            self._lengths = self._lengths.clamp(max=length)
            self._length = int(self._lengths.max())
        if self._positions is not None:
            self._positions = self._positions[:, :length]

    def reorder(self, rows: Tensor) -> None:
        """Take rows (B',) of the batch in this order: beam search continues row `rows[b]` as row b."""
        if self._keys is None or self._values is None:
            return
        self._keys, self._values = self._keys.index_select(0, rows), self._values.index_select(0, rows)
        if self._lengths is not None:
            self._lengths = self._lengths.index_select(0, rows)
        if self._positions is not None and self._positions.shape[0] > 1:
            self._positions = self._positions.index_select(0, rows)
        if self._memory is not None:
            self._memory = self._memory.reorder(rows)

    def _check(self, keys: Tensor, values: Tensor) -> None:
        if keys.dim() != 4 or values.dim() != 4 or keys.shape[:3] != values.shape[:3]:
            raise bad_value(
                "cache",
                expected="keys (B, G, N, D) and values (B, G, N, E)",
                received=f"{shape_of(keys)} and {shape_of(values)}",
            )
        for what, held, new in (("keys", self._keys, keys), ("values", self._values, values)):
            if held is None:
                continue
            if held.shape[:2] != new.shape[:2] or held.shape[3] != new.shape[3]:
                raise bad_value(
                    f"cached {what}",
                    expected=f"batch, heads and width {(*held.shape[:2], held.shape[3])}",
                    received=f"{(*new.shape[:2], new.shape[3])}",
                    remedy="one cache per layer and batch",
                )
            if held.dtype != new.dtype or held.device != new.device:
                raise bad_type(
                    f"cached {what}",
                    expected=f"{held.dtype} on {held.device}",
                    received=f"{new.dtype} on {new.device}",
                    remedy="clear() the cache",
                )

    def _check_positions(self, positions: object, new: int) -> None:
        expected = f"integers (N,) or (B, N) for {new} new tokens"
        if not isinstance(positions, Tensor):
            raise bad_type("positions", expected=expected, received=type(positions).__name__)
        if positions.is_floating_point() or positions.dtype is torch.bool:
            raise bad_type("positions", expected=expected, received=f"dtype {positions.dtype}")
        batch = None if self._keys is None else self._keys.shape[0]
        rows = positions.shape[0] if positions.dim() == 2 else 1
        if (
            positions.dim() not in (1, 2)
            or positions.shape[-1] != new
            or (batch is not None and rows not in (1, batch))
        ):
            raise bad_value("positions", expected=expected, received=f"shape {shape_of(positions)}")

    def _reserve(self, keys: Tensor, values: Tensor, length: int) -> None:
        """Room for `length` tokens: twice as much as now, where it has to grow."""
        room = 0 if self._keys is None else self._keys.shape[2]
        if self._keys is not None and length <= room:
            return
        room = max(length, 2 * room, self.capacity)
        room = room if self.limit is None else min(room, self.limit)
        held = self._length
        # Zeros: rows of different lengths leave gaps, and a NaN in them would pass through torch's fused attention.
        grown = [like.new_zeros(*like.shape[:2], room, like.shape[3]) for like in (keys, values)]
        if self._keys is not None and self._values is not None:
            grown[0][:, :, :held] = self._keys[:, :, :held]
            grown[1][:, :, :held] = self._values[:, :, :held]
        self._keys, self._values = grown

    def __repr__(self) -> str:
        held = "" if self._keys is None else f", batch {self._keys.shape[0]}, room {self._keys.shape[2]}"
        return f"{type(self).__name__}({self._length} tokens{held})"
