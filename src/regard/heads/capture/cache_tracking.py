"""Which layer an attention call belongs to, and whether it continues the layer's last sequence from a cache.

A call continues a sequence if the key before its new ones equals the last key that was seen, bit for bit. That holds
for caches that grow, caches of fixed size and sliding ones. For handwritten attention, values are compared instead of
keys. Beam search is detected in the same way (every key is found, but at another item of the batch), and so is a cache
that was cropped (the key is one before the last).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.errors import bad_value
from regard.heads.capture.flex import FlexBias, FlexMask
from regard.heads.capture.observed import ObservedCall
from regard.kernels import Call
from regard.masks import Keep

__all__ = ["Place", "SequenceTracker", "trimmed"]

RECENT = 64  # last keys that are remembered: to compare with, and to detect a cropped cache


class Place(NamedTuple):
    """The layer's name; whether the call continues its sequence (`goes_on`), or reads it again with one more token
    (`again`); and how many tokens the sequence has now."""

    name: str
    goes_on: bool
    again: bool
    total: int


@dataclass
class _Trail:
    """What a layer's last sequence is recognised by."""

    kind: str
    shape: tuple[int, int]  # (B, H)
    total: int
    cache: Any = None
    last_keys: Tensor | None = None  # (..., RECENT, D) at most
    first_key: Tensor | None = None  # (..., D)
    ids: Tensor | None = None


class SequenceTracker:
    """Tracks the sequences of all layers of a model. `strict`: a cache that is reordered or cropped is refused; else it
    counts as continued."""

    def __init__(self, strict: bool = True) -> None:
        self.strict = strict
        self.rereads = True  # a sequence that starts like the last one is the last one, read again
        self.trails: dict[str, _Trail] = {}
        self.forward = -1
        self.counts: dict[str, int] = {}  # attention calls of each module within this outermost call
        self.continued = False  # whether self attention continued a sequence in this outermost call
        self.again: bool | None = None  # whether this outermost call reads a sequence again, once a layer has told
        self._before: tuple[int, dict[str, _Trail]] = (-1, {})

    def place(self, attention: ObservedCall, copy: bool = True) -> Place:
        """Find the layer and sequence of the next attention call, after `trimmed`. Without `copy` its tensors are not
        the model's, and are kept as they are."""
        if self.forward != attention.forward:
            self.forward, self.counts, self.continued, self.again = attention.forward, {}, False, None
            self._before = self.forward, dict(self.trails)
        base, (batch, heads, n, m) = attention.layer, attention.shape
        number = self.counts.get(base, 0)
        # Within one outermost call a module may be called again: to continue from a cache, or as another layer.
        for k in range(number, -1, -1):
            trail = self.trails.get(_named(base, k))
            if trail is not None and self._goes_on(_named(base, k), trail, attention):
                self.counts[base] = max(number, k + 1)
                total = trail.total + (n if attention.kind == "self" else 0)
                self.trails[_named(base, k)] = self._trail(attention, total, replace(trail), copy)
                return Place(_named(base, k), True, False, total)
        self.counts[base] = number + 1
        name = _named(base, number)
        again = self.rereads and name in self.trails and self._reads_again(self.trails[name], attention)
        total = m if attention.numbers is None else int(attention.numbers[-1]) + 1
        trail = _Trail(attention.kind, (batch, heads), total, attention.cache)
        self.trails[name] = self._trail(attention, total, trail, copy)
        return Place(name, False, again, total)

    def failed(self, forward: int) -> None:
        """An outermost call raised: forget what it read."""
        if self._before[0] == forward:
            self.trails = self._before[1]

    def _reads_again(self, trail: _Trail, attention: ObservedCall) -> bool:
        """Whether a causal model reads the same sequence again with one more token: generation without a cache. The
        first layer decides for all layers of a call, because rounding differs in later ones."""
        _, _, n, m = attention.shape
        if attention.kind != "self" or n != m or m != trail.total + 1 or trail.shape != attention.shape[:2]:
            return False
        if self.again is None:
            self.again = _reads_again(trail, attention)
        return self.again

    def _trail(self, attention: ObservedCall, total: int, trail: _Trail, copy: bool) -> _Trail:
        n, m = attention.shape[2:]
        trail.total, trail.ids, keys = total, attention.ids, attention.keys
        if keys is not None and m and attention.cache is None:
            count = min(n, RECENT, m)
            new = keys if count == m else keys.narrow(-2, m - count, count)
            if trail.last_keys is not None and n < RECENT:
                new = torch.cat([trail.last_keys[..., n - RECENT :, :], new], -2)
            trail.last_keys = new.clone() if copy else new
            trail.first_key = keys[..., 0, :].clone() if attention.kind == "cross" else None
        return trail

    def _goes_on(self, name: str, trail: _Trail, attention: ObservedCall) -> bool:
        """Whether the keys of a call extend those that the layer has seen."""
        batch, heads, n, m = attention.shape
        if trail.kind != attention.kind or trail.shape != (batch, heads):
            return False
        if attention.kind == "cross":
            first = None if attention.keys is None or not m else attention.keys[..., 0, :]
            return self.continued and trail.total == m and _same(first, trail.first_key)
        if n >= m:
            return False
        if attention.cache is not None or trail.cache is not None:  # a cache that applies rotary anew to all its keys
            numbers = attention.numbers
            goes_on = attention.cache is trail.cache and numbers is not None
            goes_on = goes_on and int(numbers[-1]) + 1 == trail.total + n  # type: ignore[index]
        else:
            before = None if attention.keys is None else attention.keys[..., m - n - 1, :]
            if before is None or trail.last_keys is None:
                return False
            goes_on = _same(before, trail.last_keys[..., -1, :])
            if not goes_on:
                why = _other_than_added(before, trail.last_keys)
                if why is not None and self.strict:
                    raise bad_value(
                        name,
                        expected="a cache that is added to",
                        received=why,
                        remedy="generate in a plain way, or look at model(ids) on the text that came out",
                    )
                goes_on = why is not None
        self.continued |= goes_on
        return goes_on


def _named(base: str, number: int) -> str:
    return f"{base}#{number}" if number else base


def _other_than_added(before: Tensor, last_keys: Tensor) -> str | None:
    """How a cache was changed other than by appending, in words; None if it was not."""
    if before.shape != last_keys.shape[:-2] + last_keys.shape[-1:]:
        return None
    same = (before[:, None] == last_keys[None, ..., -1, :]).flatten(2).all(-1)  # (items now, items before)
    if same.any(1).all():
        return "one whose texts changed places, as in beam search (num_beams > 1)"
    if (before[..., None, :] == last_keys[..., :-1, :]).movedim(-2, 0).flatten(1).all(1).any():
        return "one that was cut, as in assisted generation and prompt lookup"
    return None


def _reads_again(trail: _Trail, attention: ObservedCall) -> bool:
    """Whether a sequence starts with the last one and attention is causal; by its ids, or else by its keys."""
    call, ids, m = attention.call, attention.ids, attention.shape[3]
    known = trail.ids is not None and ids is not None and ids[:, :-1].shape == trail.ids.shape
    if known and not torch.equal(ids[:, :-1], trail.ids):  # type: ignore[index,arg-type]
        return False
    if call is None:
        return known
    if call.mask is None or (trail.last_keys is None and not known):
        return False
    if not known:
        rounding = max(1e-3, 4 * torch.finfo(call.k.dtype).eps)  # rounding depends on the size
        last = trail.last_keys[..., -1, :]  # type: ignore[index]
        if not torch.allclose(call.k[:, :, m - 2], last, rtol=rounding, atol=rounding / 10):
            return False
    return not call.mask.block(call.tile(slice(None), slice(0, 1), slice(m - 1, m))).any()


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    return a is not None and b is not None and a.shape == b.shape and torch.equal(a, b)


def trimmed(attention: ObservedCall) -> ObservedCall:
    """The call without trailing keys that no query may see: a cache of fixed size is longer than the sequence."""
    _, _, n, m = attention.shape
    call = attention.call
    if attention.kind != "self" or n >= m or attention.cache is not None or attention.subtracted is not None:
        return attention
    if call is None:
        assert attention.weights is not None
        last = _last(attention.weights != 0)
        if last == m or last < n:
            return attention
        values = None if attention.values is None else attention.values[..., :last, :]
        return replace(attention, weights=attention.weights[..., :last], values=values)
    if call.mask is None or call.key_positions is not None or call.q_start != m - n:
        return attention
    if not any(isinstance(part, (Keep, FlexMask)) for part in call.mask_parts):
        return attention  # a cache of fixed size comes with a tensor that says how far it is filled
    visible = call.mask.block(call.whole())  # (1|B, 1|H, 1|N, 1|M)
    last = _last(visible.expand(*visible.shape[:3], m))
    return attention if last == m or last < n else replace(attention, call=_first_keys(call, visible, last))


def _last(used: Tensor) -> int:
    """The number of columns up to the last used one; all, if none is used."""
    columns = used.flatten(0, -2).any(0).nonzero()
    return int(columns.max()) + 1 if columns.numel() else used.shape[-1]


def _first_keys(call: Call, visible: Tensor, count: int) -> Call:
    """The same call with its first keys alone; the last query stands at the last of them."""
    start = count - call.shape[2]
    tile = call.tile(slice(None), slice(0, call.shape[2]), slice(0, count))
    parts = (bias.part(tile) for bias in call.biases)
    biases = tuple(bias.starting(start) if isinstance(bias, FlexBias) else bias for bias in parts)
    mask = Keep(visible[..., :count])
    k, v = call.k[:, :, :count], call.v[:, :, :count]
    return replace(call, k=k, v=v, mask=mask, biases=biases, q_start=start)
