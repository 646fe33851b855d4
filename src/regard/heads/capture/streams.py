"""Which token ids a tensor was computed from, for models that are called with several: ids of a source and a target.

Ids are followed from the arguments of a call through slicing and concatenation to `F.embedding`, and the embeddings
from function to function: a result belongs to the ids of the first argument that belongs to any.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.heads.capture.tensor_notes import TensorNotes, tensors_in

__all__ = ["Streams"]


class Streams:
    """Follows the token ids of one model in one thread, once a call is handed several."""

    def __init__(self) -> None:
        self.on = False
        self._ids_of: TensorNotes[Tensor | None] = TensorNotes()  # None for a tensor of ids itself

    def begin(self, several_ids: Iterable[Tensor]) -> None:
        """A call was handed several tensors of ids (B, N)."""
        self.on = True
        for ids in several_ids:
            self._ids_of.put(ids, None)

    def clear(self) -> None:
        """Stop following."""
        self.on = False
        self._ids_of.clear()

    def of(self, *values: Any) -> Tensor | None:
        """The ids (B, N) of the first tensor that was computed from any."""
        if not self.on:
            return None
        for x in tensors_in(values):
            ids = self._ids_of.get(x)
            if ids is not None:
                return ids
        return None

    def follow(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Follow one torch function."""
        if func is F.embedding:
            ids = kwargs.get("input", args[0] if args else None)
            if isinstance(ids, Tensor) and ids in self._ids_of:
                self._ids_of.put(out, ids.detach())
            return
        if isinstance(out, Tensor) and not out.is_floating_point():  # sliced, joined or moved ids are still ids
            integers = out.dtype in (torch.int64, torch.int32) and out.dim() == 2
            if integers and any(x in self._ids_of for x in tensors_in(args)):
                self._ids_of.put(out, None)
            return
        self.hand_on((args, *kwargs.values()), out)

    def hand_on(self, inputs: Iterable[Any], out: Any) -> None:
        """What was computed from some inputs belongs to the ids of the first of them, unless its ids are known."""
        if not self.on:
            return
        results = [x for x in tensors_in((out,)) if x.is_floating_point() and self.of(x) is None]
        ids = self.of(*inputs) if results else None
        for x in results if ids is not None else ():
            self._ids_of.put(x, ids)
