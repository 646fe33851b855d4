"""Attention that sharpens with the position of the query: far into a text its scores are scaled up.

Letters: B batch, H query heads, N queries, D head width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from regard.checks import whole_number
from regard.errors import bad_type

__all__ = ["Temperature"]


class Temperature(nn.Module):
    """Multiplies a query at position p by 1 + scale * log(1 + floor((p + shift) / every)).

    The softmax of a long text flattens as keys become more; this keeps it sharp, in layers without rotary positions
    (Llama 4: Nakanishi 2025, https://arxiv.org/abs/2501.19399). It has no weights.

    Args:
        every: the factor grows each `every` positions (Llama 4: 8192).
        scale: how much (0.1).
        shift: 1 in Llama 4; 0 in Ministral 3.

    >>> Temperature(every=4).factors(torch.tensor([0, 2, 3, 7, 11]))
    tensor([1.0000, 1.0000, 1.0693, 1.1099, 1.1386])
    """

    def __init__(self, every: int = 8192, scale: float = 0.1, *, shift: int = 1) -> None:
        super().__init__()
        if isinstance(scale, bool) or not isinstance(scale, (int, float)):
            raise bad_type("Temperature: scale", expected="a number", received=f"{type(scale).__name__} {scale!r}")
        self.every = whole_number("Temperature: every", every, at_least=1)
        self.shift = whole_number("Temperature: shift", shift, at_least=0)
        self.scale = float(scale)

    def factors(self, positions: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """The factor of each of these positions (...), (...). Those before the first count as the first."""
        steps = (positions.clamp(min=0) + self.shift) // self.every
        return torch.log1p(steps.to(dtype)) * self.scale + 1

    def forward(self, q: Tensor, positions: Tensor | int) -> Tensor:
        """Queries (B, H, N, D) times their factors; `positions` (N,) or (B, N), or where the first of them stands."""
        if not isinstance(positions, Tensor):
            positions = torch.arange(positions, positions + q.shape[2], device=q.device)
        dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        factors = self.factors(positions.to(q.device), dtype)[..., None]  # (N, 1) or (B, N, 1)
        return (q * (factors[:, None] if factors.dim() == 3 else factors)).to(q.dtype)

    def extra_repr(self) -> str:
        return f"every={self.every}, scale={self.scale:g}" + ("" if self.shift == 1 else f", shift={self.shift}")
