"""Notes on tensors: a mapping by identity that keeps no tensor alive and sets no attribute on it."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any, Generic, TypeVar

from torch import Tensor

__all__ = ["TensorNotes", "tensors_in"]

Note = TypeVar("Note")


class TensorNotes(Generic[Note]):
    """A note for each of some tensors, dropped when the tensor is.

    >>> import torch
    >>> notes, x = TensorNotes[str](), torch.zeros(3)
    >>> notes.put(x, "scores")
    >>> notes.get(x), notes.get(x.clone())
    ('scores', None)
    """

    def __init__(self) -> None:
        self._by_id: dict[int, tuple[weakref.ref[Tensor], Note]] = {}

    def __contains__(self, x: object) -> bool:
        entry = self._by_id.get(id(x))
        return entry is not None and entry[0]() is x

    def get(self, x: object) -> Note | None:
        """The note on a tensor; None if there is none."""
        entry = self._by_id.get(id(x))
        return entry[1] if entry is not None and entry[0]() is x else None

    def put(self, x: object, note: Note) -> None:
        """Set the note on a tensor; on anything else nothing happens."""
        if isinstance(x, Tensor):
            key, by_id = id(x), self._by_id
            by_id[key] = weakref.ref(x, lambda dead: _drop(by_id, key, dead)), note

    def drop(self, x: object) -> None:
        """Remove the note on a tensor, if there is one."""
        self._by_id.pop(id(x), None)

    def clear(self) -> None:
        """Remove all notes."""
        self._by_id.clear()


def _drop(by_id: dict[int, Any], key: int, dead: weakref.ref[Tensor]) -> None:
    """Remove the entry of a tensor that was freed, unless a new tensor has its id by now."""
    if key in by_id and by_id[key][0] is dead:
        del by_id[key]


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among some values, and in lists, tuples and dicts among them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)
        elif isinstance(value, dict):
            yield from tensors_in(value.values())
