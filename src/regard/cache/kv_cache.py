"""`KVCache`: keeps the keys and values of all tokens.

Letters: B batch, G kv heads, N new tokens, M slots after appending, D head width of keys, E head width of values.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from regard.cache.checks import check_alike, check_positions, check_shapes
from regard.cache.cross_memory import CrossMemory
from regard.cache.slots import Rotate, Slots, together
from regard.cache.stored import Segment, Stored, joined, quantize
from regard.errors import bad_type, bad_value, shape_of
from regard.masks import Padding

__all__ = ["KVCache"]

MOST_SEGMENTS = 8  # a fork of a fork of a fork ... copies all to one place when it would have more


class KVCache:
    """Keys and values that grow as tokens come, by doubling: a token costs O(1) on average, never a copy of all.

    Args:
        capacity: room to start with, in tokens (it grows all the same).
        limit: the most tokens it may hold; one more raises. No limit by default.
        once: True keeps the first keys and values for good: those of cross attention are computed in the first call
            only. False appends what cross attention is given in each call: a memory that comes in pieces. By default
            as False, but the same memory once more is refused.
        dtype: "int8" stores keys and values as int8 with one float32 scale per token and head: about half the bytes of
            bfloat16 (`nbytes` counts them). An element is off by at most half of 1/127 of the largest of its row. By
            default they are stored as they come.

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

    def __init__(
        self, capacity: int = 0, *, limit: int | None = None, once: bool | None = None, dtype: str | None = None
    ) -> None:
        if capacity < 0 or (limit is not None and limit < max(capacity, 1)):
            raise bad_value(
                "KVCache",
                expected="a capacity of at least 0 and a limit not below it",
                received=f"capacity={capacity}, limit={limit}",
            )
        if dtype not in (None, "int8"):
            raise bad_value(
                "dtype",
                expected='"int8", or None for that of the keys',
                received=repr(dtype),
                remedy="a model in another dtype has keys of that dtype: model.to(torch.bfloat16)",
            )
        self.capacity, self.limit, self.once, self.dtype = capacity, limit, once, dtype
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        # Memory of this cache alone, with room to grow: after the tokens of the prefix.
        self._keys: Tensor | None = None  # (B, G, room, D)
        self._values: Tensor | None = None
        self._key_scales: Tensor | None = None  # (B, G, room), of int8
        self._value_scales: Tensor | None = None
        self._read_by_forks = [0]  # tokens of that memory which forks read, too: they are never written over
        self._prefix: tuple[tuple[Segment, Segment], ...] = ()  # keys and values of the cache that it was forked from
        self._prefix_length = 0
        self._batch: int | None = None
        self._given: torch.dtype | None = None  # that of the keys and values that came
        self._length = 0
        self._lengths: Tensor | None = None  # (B,), only where rows differ
        self._positions: Tensor | None = None  # (1|B, M), only where the caller gave positions
        self._layer: weakref.ref[object] | None = None  # that filled it
        self._memory: CrossMemory | None = None  # that cross attention was given last
        self._own = False  # whether keys were last made of the queries' own tokens

    def __getstate__(self) -> dict[str, Any]:  # a copy may be another layer's
        return {**vars(self), "_layer": None}

    def __len__(self) -> int:
        return self._length

    @property
    def lengths(self) -> Tensor | None:
        """Tokens held per row, (B,); None before the first."""
        if self._batch is None:
            return None
        if self._lengths is not None:
            return self._lengths
        return torch.full((self._batch,), self._length, device=self._segments()[0][0].numbers.device)

    @property
    def ragged(self) -> bool:
        """Whether rows may differ in length."""
        return self._lengths is not None

    @property
    def keys(self) -> Tensor | None:
        """(B, G, M, D)"""
        return None if self._batch is None else self._held()[0]

    @property
    def values(self) -> Tensor | None:
        """(B, G, M, E)"""
        return None if self._batch is None else self._held()[1]

    @property
    def nbytes(self) -> int:
        """Bytes of the tokens that it holds: keys, values and scales, without room to grow, and without those that it
        shares with forks or with the cache that it was forked from."""
        own = self._segments()[len(self._prefix) :]
        return sum(part.nbytes for pair in own for part in pair)

    @property
    def shared_nbytes(self) -> int:
        """Bytes of the tokens that it shares: they lie in memory once."""
        return sum(part.nbytes for pair in self._prefix for part in pair)

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
                self._memory = CrossMemory(key, value)
            return
        self._own = own
        self._memory = None if own or self.once is False else CrossMemory(key, value)

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
        batch, given = keys.shape[0], keys.dtype
        stored = [keys, values]
        if self.dtype is not None:
            if keys.shape == values.shape:  # (at once: a token costs as many operators as a text)
                numbers, scales = quantize(torch.stack([keys, values]))
            else:
                numbers, scales = zip(quantize(keys), quantize(values), strict=True)
            stored = [*numbers, *scales]
        self._reserve(stored, end)
        self._batch, self._given = batch, given
        at = self._length - self._prefix_length
        for memory, x in zip(self._memories(), stored, strict=True):
            if self._lengths is None:
                memory[:, :, at : at + new] = x
            else:  # each row goes on where it ends
                slots = self._lengths[:, None] + torch.arange(new, device=x.device)  # (B, N)
                row = torch.arange(x.shape[0], device=x.device)[:, None]
                memory[row, :, slots] = x.transpose(1, 2)
        if self._lengths is not None:
            self._lengths = self._lengths + new
        self._length = end
        return self._held()

    def _memories(self) -> list[Tensor]:
        """The memory of this cache alone: keys, values, and the scales of int8."""
        return [x for x in (self._keys, self._values, self._key_scales, self._value_scales) if x is not None]

    def _segments(self) -> list[tuple[Segment, Segment]]:
        """All that is held: first what is shared, then what is its own."""
        own, pairs = self._length - self._prefix_length, list(self._prefix)
        if self._keys is not None and self._values is not None and (own or not pairs):
            whole = Segment(self._keys, self._key_scales), Segment(self._values, self._value_scales)
            pairs.append((whole[0].first(own), whole[1].first(own)))
        return pairs

    def _held(self) -> tuple[Tensor, Tensor]:
        """All keys and values: views where they lie in one place as they are, else `Stored`."""
        if not self._prefix and self.dtype is None and self._keys is not None and self._values is not None:
            return self._keys[:, :, : self._length], self._values[:, :, : self._length]  # (the usual case, at once)
        pairs, batch = self._segments(), self._batch
        assert batch is not None and self._given is not None
        (keys, values), dtype = pairs[0], self._given
        if len(pairs) == 1 and self.dtype is None:
            return keys.numbers.expand(batch, -1, -1, -1), values.numbers.expand(batch, -1, -1, -1)
        stored = joined if torch.compiler.is_compiling() else Stored
        all_keys, all_values = [keys for keys, _ in pairs], [values for _, values in pairs]
        return stored(all_keys, batch, dtype), stored(all_values, batch, dtype)

    def fork(self, rows: int | None = None) -> KVCache:
        """Another cache that begins with the same tokens, of which nothing is copied; each then goes its own way.

        `rows` makes a cache of one row one of several: to continue a prompt in several ways at once. Its tokens stay
        in memory once, and `reorder` leaves them there. (Rows of different lengths are copied.)

        >>> cache = KVCache()
        >>> _ = cache.append(torch.ones(1, 2, 300, 5), torch.ones(1, 2, 300, 5))
        >>> several = cache.fork(rows=4)
        >>> keys, _ = several.append(torch.ones(4, 2, 1, 5), torch.ones(4, 2, 1, 5))
        >>> keys.shape, several.nbytes, len(cache)
        (torch.Size([4, 2, 301, 5]), 320, 300)
        """
        if rows is not None and (type(rows) is not int or rows < 1 or self._batch not in (1, None)):
            raise bad_value(
                "rows",
                expected="a positive number, of a cache of one row",
                received=f"{rows!r}, of a cache of {self._batch} rows",
                remedy="reorder(rows) repeats rows of a batch",
            )
        other = copy.copy(self)
        other._layer, other._read_by_forks = self._layer, [0]
        if self._lengths is not None:  # each row is written where it ends, which may be within what would be shared
            other._move([memory.clone() for memory in self._memories()])
            if rows is not None:
                other.reorder(torch.zeros(rows, dtype=torch.long, device=self._lengths.device))
            return other
        own = self._length - self._prefix_length
        self._read_by_forks[0] = max(self._read_by_forks[0], own)
        other._prefix, other._prefix_length = tuple(self._segments()), self._length
        other._move([])
        if len(other._prefix) > MOST_SEGMENTS:
            other._gather()
        if rows is not None and self._batch is not None:
            other._batch = rows
            other._memory = None if self._memory is None else self._memory.repeated(rows)
        return other

    def _move(self, memories: list[Tensor]) -> None:
        """Take other memory in the place of its own."""
        self._keys, self._values, self._key_scales, self._value_scales = (*memories, *[None] * (4 - len(memories)))
        self._read_by_forks = [0]

    def _gather(self) -> None:
        """Copy all tokens to memory of its own."""
        pairs, batch = self._segments(), self._batch
        assert batch is not None
        columns = [[keys.numbers for keys, _ in pairs], [values.numbers for _, values in pairs]]
        scales = [[x for pair in pairs if (x := pair[i].scales) is not None] for i in (0, 1)]
        columns += scales if self.dtype is not None else []
        self._move([torch.cat([x.expand(batch, *x.shape[1:]) for x in column], dim=2) for column in columns])
        self._prefix, self._prefix_length = (), 0

    def number(self, new: int, positions: Tensor | None = None) -> Slots:
        """The positions of the `new` tokens of a call and of all M keys; called before `append`.

        Given positions (N,) or (B, N) are remembered, so that later queries know the positions of these keys.
        """
        if positions is not None:
            check_positions(positions, new, self._batch)
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
        mask = None if self._lengths is None else Padding(lengths=self._lengths)
        return *self._held(), Slots(mask, positions)

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
            length = length.to(held)
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
            self._lengths = length
            self._shorten_prefix()
            return
        if not 0 <= length <= self._length:
            raise bad_value("truncate", expected=f"a length from 0 to {self._length}", received=length)
        self._length = length
        if self._lengths is not None:
            self._lengths = self._lengths.clamp(max=length)
            self._length = int(self._lengths.max())
        if self._positions is not None:
            self._positions = self._positions[:, :length]
        self._shorten_prefix()

    def _shorten_prefix(self) -> None:
        """Let go of what is shared beyond the length."""
        if self._length >= self._prefix_length:
            return
        kept, first = [], 0
        for keys, values in self._prefix:
            count = min(keys.numbers.shape[2], self._length - first)
            if count > 0 or not kept:
                kept.append((keys.first(max(count, 0)), values.first(max(count, 0))))
            first += keys.numbers.shape[2]
        self._prefix, self._prefix_length = tuple(kept), self._length
        if self._read_by_forks[0]:  # its own memory holds what came after, which a fork still reads
            self._move([])

    def reorder(self, rows: Tensor) -> None:
        """Take rows (B',) of the batch in this order: beam search continues row `rows[b]` as row b."""
        if self._batch is None:
            return
        self._batch = len(rows)
        self._move([memory.index_select(0, rows) for memory in self._memories()])
        self._prefix = tuple((keys.reorder(rows), values.reorder(rows)) for keys, values in self._prefix)
        if self._lengths is not None:
            self._lengths = self._lengths.index_select(0, rows)
        if self._positions is not None and self._positions.shape[0] > 1:
            self._positions = self._positions.index_select(0, rows)
        if self._memory is not None:
            self._memory = self._memory.reorder(rows)

    def _check(self, keys: Tensor, values: Tensor) -> None:
        check_shapes(keys, values)
        if self._batch is None:
            return
        held_keys, held_values = self._keys, self._values
        if held_keys is None or held_values is None:
            held_keys, held_values = (part.numbers for part in self._prefix[0])
        check_alike("keys", held_keys, keys, self._batch, self._given)
        check_alike("values", held_values, values, self._batch, self._given)

    def _reserve(self, stored: list[Tensor], length: int) -> None:
        """Room for `length` tokens: twice as much as now, where it has to grow. What forks read stays where it is, and
        is not written over."""
        if self._lengths is not None and (self._prefix or self._read_by_forks[0]):
            self._gather()  # rows are written where they end, which may be within what is shared
        held, read = self._length - self._prefix_length, self._read_by_forks[0]
        if read and self._keys is not None and (held < read or length - self._prefix_length > self._keys.shape[2]):
            self._prefix, self._prefix_length = tuple(self._segments()), self._length
            self._move([])
            if len(self._prefix) > MOST_SEGMENTS:
                self._gather()
        memories, held = self._memories(), self._length - self._prefix_length
        room = memories[0].shape[2] if memories else 0
        wanted = length - self._prefix_length
        if memories and wanted <= room:
            return
        room = max(wanted, 2 * room, self.capacity - self._prefix_length)
        room = room if self.limit is None else min(room, self.limit - self._prefix_length)
        # Zeros: rows of different lengths leave gaps, and a NaN in them would pass through torch's fused attention.
        grown = [like.new_zeros(*like.shape[:2], room, *like.shape[3:]) for like in stored]
        for old, new in zip(memories, grown, strict=False):
            new[:, :, :held] = old[:, :, :held]
        self._move(grown)

    def __repr__(self) -> str:
        room = self._prefix_length + (0 if self._keys is None else self._keys.shape[2])
        held = "" if self._batch is None else f", batch {self._batch}, room {room}"
        shared = f", {self._prefix_length} shared" if self._prefix_length else ""
        kind = "" if self.dtype is None else f", {self.dtype}"
        return f"{type(self).__name__}({self._length} tokens{held}{shared}{kind})"
