"""Which token ids a tensor was made of, where a model is handed several: those of a source and those of a target.

Ids are followed from the arguments of a call through whatever cuts or joins them to `F.embedding`, and what comes of it
from function to function: the result belongs to the ids of the first argument that belongs to any.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["Streams"]


class Streams:
    """Follows the ids of one model, in one thread, from the moment that a call is handed several."""

    def __init__(self) -> None:
        self.on = False
        self._known: dict[int, tuple[weakref.ref[Tensor], Tensor | None]] = {}

    def begin(self, ids: Iterable[Tensor]) -> None:
        """A call was handed several ids (B, N)."""
        self.on = True
        for one in ids:
            self._put(one, None)

    def clear(self) -> None:
        """Follow nothing any more."""
        self.on = False
        self._known.clear()

    def of(self, *given: Any) -> Tensor | None:
        """The ids (B, N) that the first of some tensors that is made of any is made of."""
        for x in _tensors(given):
            entry = self._known.get(id(x))
            if entry is not None and entry[0]() is x and entry[1] is not None:
                return entry[1]
        return None

    def follow(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """One torch function."""
        if func is F.embedding:
            ids = kwargs.get("input", args[0] if args else None)
            if isinstance(ids, Tensor) and id(ids) in self._known:
                self._put(out, ids.detach())
            return
        if isinstance(out, Tensor) and not out.is_floating_point():  # cut, joined or moved, they are ids still
            numbers = out.dtype in (torch.int64, torch.int32) and out.dim() == 2
            if numbers and any(id(x) in self._known for x in _tensors(args)):
                self._put(out, None)
            return
        self.hand_on((args, *kwargs.values()), out)

    def hand_on(self, given: Iterable[Any], out: Any) -> None:
        """What came of some arguments belongs to the ids of the first of them; unless it is known better."""
        results = [x for x in _tensors((out,)) if x.is_floating_point() and self.of(x) is None]
        ids = self.of(*given) if results else None
        for x in results if ids is not None else ():
            self._put(x, ids)

    def _put(self, x: Any, ids: Tensor | None) -> None:
        if isinstance(x, Tensor):
            number, known = id(x), self._known
            known[number] = weakref.ref(x, lambda gone: _forget(known, number, gone)), ids


def _forget(known: dict[int, Any], number: int, gone: weakref.ref[Tensor]) -> None:
    """A tensor is gone, and another may have its number by now."""
    if number in known and known[number][0] is gone:
        del known[number]


def _tensors(given: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among arguments, and among those of lists, tuples and mappings."""
    for x in given:
        if isinstance(x, Tensor):
            yield x
        elif isinstance(x, (list, tuple)):
            yield from _tensors(x)
        elif isinstance(x, dict):
            yield from _tensors(x.values())
