"""How a page writes numbers: integers in planes of bytes, weights and vectors as codes with a scale (docs/page.md).

Letters: H query heads.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any

import torch
from torch import Tensor

__all__ = ["Blob", "codes", "decoded", "round_to", "rounded", "step"]


def codes(values: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Non-negative values (H, ...) as integers of `bits` bits, and the scale (H,) of each head:
    value = scale * (code / levels)^2, so that small weights keep their digits."""
    levels = 2**bits - 1
    tiny = torch.finfo(torch.float32).tiny
    scale = values.flatten(1).amax(1).clamp(min=tiny) if values.numel() else values.new_ones(len(values))
    share = values / scale.view(-1, *[1] * (values.dim() - 1))
    return (share.clamp(0, 1).sqrt() * levels).round().to(torch.int32), scale


def decoded(code: Tensor, scale: Tensor, bits: int) -> Tensor:
    """The values that codes stand for."""
    return scale.view(-1, *[1] * (code.dim() - 1)) * (code / (2**bits - 1)) ** 2


def step(code: Tensor, scale: Tensor, bits: int) -> Tensor:
    """The distance to the next code: the precision of a value."""
    return scale.view(-1, *[1] * (code.dim() - 1)) * (2 * code + 1) / (2**bits - 1) ** 2


class Blob:
    """Binary data under construction. Each method appends values, and returns where they begin and how to read them."""

    def __init__(self) -> None:
        self.data = bytearray()

    def integers(self, values: Tensor, bits: int) -> dict[str, Any]:
        """Integers from 0: the low bytes of all first, then the next bytes, which compresses better."""
        at = len(self.data)
        flat = values.flatten().cpu()
        if bits == 8:
            self.data += _bytes(flat.to(torch.uint8))
        else:
            planes = flat.to(torch.int32).view(torch.uint8).view(-1, 4)  # (low bytes first, as in memory)
            self.data += _bytes(planes[:, : bits // 8].T)
        return {"at": at, "shape": list(values.shape), "bits": bits}

    def weights(self, values: Tensor, bits: int) -> dict[str, Any]:
        """Non-negative values, with a scale for each head."""
        code, scale = codes(values.cpu(), bits)
        return {**self.integers(code, bits), "scale": [round_to(x, 8) for x in scale.tolist()]}

    def signed(self, values: Tensor, bits: int) -> dict[str, Any]:
        """Values of both signs (..., width), each row with a scale: value = scale * code / half, code - half >= 0."""
        half = 2 ** (bits - 1) - 1
        values = values.cpu()
        scale = values.abs().amax(-1).clamp(min=torch.finfo(torch.float32).tiny)
        meta = self.integers((values / scale[..., None] * half).round() + half, bits)
        at = len(self.data)
        self.data += _bytes(scale.float())
        return {**meta, "scales": at}


def _bytes(x: Tensor) -> bytes:
    """The memory of a tensor. (torch comes without numpy, which has a method for it.)"""
    x = x.contiguous()
    return ctypes.string_at(x.data_ptr(), x.numel() * x.element_size()) if x.numel() else b""


def round_to(x: float | None, digits: int = 6) -> float | None:
    """Rounded to significant digits; None for infinity and NaN."""
    return float(f"{x:.{digits}g}") if x is not None and math.isfinite(x) else None


def rounded(values: Tensor) -> list[float | None]:
    """Numbers for JSON."""
    return [round_to(x) for x in values.tolist()]
