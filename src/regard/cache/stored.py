"""Keys and values as a cache stores them: in several places, or as int8 with a scale per token and head.

`Stored` stands for the whole tensor (B, G, M, D) without building it: the native kernel reads the parts where they are.
Any other operation sees the plain tensor, which is then built for that operation.

Letters: B batch, G kv heads, M keys, D head width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from regard.errors import bad_value

__all__ = ["Segment", "Stored", "joined", "quantize"]

LEAST = 2.0**-100  # of a scale: a row of zeros has one, too


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """x (..., D) as int8 and a float32 scale for each row, (...): x is int8 * scale, within half a scale.

    >>> numbers, scales = quantize(torch.tensor([[[[254.0, -127.0, 1.0]]]]))
    >>> numbers, scales
    (tensor([[[[127, -64,   0]]]], dtype=torch.int8), tensor([[[2.]]]))
    """
    x = x.float()
    largest = torch.linalg.vector_norm(x, ord=math.inf, dim=-1) if x.numel() else x.new_zeros(x.shape[:-1])
    if not (torch.compiler.is_compiling() or x.is_meta) and x.numel() and not math.isfinite(largest.max().item()):
        raise bad_value(
            'KVCache(dtype="int8")',
            expected="finite keys and values",
            received="some that are inf or NaN",
            remedy="KVCache(), which keeps them as they are",
        )
    scales = (largest / 127).clamp_min_(LEAST)
    return (x / scales[..., None]).round_().to(torch.int8), scales


class Segment(NamedTuple):
    """Some tokens, one after another, of the keys or of the values."""

    numbers: Tensor  # (1|B, G, m, D): floating point, or int8
    scales: Tensor | None = None  # (1|B, G, m), of int8

    @property
    def nbytes(self) -> int:
        return self.numbers.nbytes + (0 if self.scales is None else self.scales.nbytes)

    def first(self, count: int) -> Segment:
        """The first `count` tokens."""
        return Segment(self.numbers[:, :, :count], None if self.scales is None else self.scales[:, :, :count])

    def reorder(self, rows: Tensor) -> Segment:
        """These rows of the batch. What is one for the whole batch stays so."""
        if self.numbers.shape[0] == 1:
            return self
        scales = None if self.scales is None else self.scales.index_select(0, rows)
        return Segment(self.numbers.index_select(0, rows), scales)

    def widened(self, dtype: torch.dtype) -> Tensor:
        """The plain tensor (1|B, G, m, D)."""
        return self.numbers if self.scales is None else (self.numbers.float() * self.scales[..., None]).to(dtype)


def joined(segments: Sequence[Segment], batch: int, dtype: torch.dtype) -> Tensor:
    """The plain tensor (B, G, M, D) of some segments, in new memory."""
    parts = [part.widened(dtype) for part in segments]
    return torch.cat([part.expand(batch, *part.shape[1:]) for part in parts], dim=2)


class Stored(Tensor):
    """Keys or values (B, G, M, D) that a cache holds in segments. To torch it is the plain tensor of their numbers.

    >>> numbers, scales = quantize(torch.ones(1, 2, 3, 5))
    >>> keys = Stored([Segment(numbers, scales)], 1, torch.float32)
    >>> keys.shape, keys.dtype, (keys * 2).sum()
    (torch.Size([1, 2, 3, 5]), torch.float32, tensor(60.))
    """

    segments: tuple[Segment, ...]

    @staticmethod
    def __new__(cls, segments: Sequence[Segment], batch: int, dtype: torch.dtype) -> Stored:
        first = segments[0].numbers
        keys = sum(segment.numbers.shape[2] for segment in segments)
        shape = (batch, first.shape[1], keys, first.shape[3])
        stored = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=first.device)  # type: ignore[attr-defined]
        stored.segments = tuple(segments)
        return stored

    def __init__(self, segments: Sequence[Segment], batch: int, dtype: torch.dtype) -> None:
        super().__init__()

    def plain(self) -> Tensor:
        """The whole tensor, built."""
        return joined(self.segments, self.shape[0], self.dtype)

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(Stored, lambda stored: stored.plain(), (args, kwargs or {}))
        return func(*args, **kwargs)

    def __repr__(self, **_: Any) -> str:
        kind = "int8" if self.segments[0].scales is not None else str(self.dtype)
        return f"Stored({tuple(self.shape)}, {kind} in {len(self.segments)} segments)"
