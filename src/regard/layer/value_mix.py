"""Value residual: a layer's values mixed with those of an earlier layer (Zhou et al. 2024, https://arxiv.org/abs/2410.17897).

Letters: B batch, G kv heads, N tokens, E head width of values.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from regard.errors import bad_type, bad_value, shape_of

__all__ = ["ValueMix"]


class ValueMix(nn.Module):
    """values * weight[0] + residual * weight[1], two learned numbers; both start at one half.

    >>> import regard
    >>> first = regard.MultiHeadAttention(16, 4)
    >>> later = regard.MultiHeadAttention(16, 4, value_mix=ValueMix())
    >>> x, shared = torch.randn(2, 5, 16), regard.layer.KeyValues()
    >>> y = first(x, share=shared)
    >>> later(y, value_residual=shared.new_values).shape
    torch.Size([2, 5, 16])
    """

    def __init__(self, own: float = 0.5, residual: float = 0.5) -> None:
        super().__init__()
        self.start = (float(own), float(residual))
        self.weight = nn.Parameter(torch.empty(2))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Back to the start."""
        with torch.no_grad():
            for number, start in zip(self.weight, self.start, strict=True):
                number.fill_(start)

    def forward(self, values: Tensor, residual: Tensor | None) -> Tensor:
        """Values (B, G, N, E) of a layer and of an earlier one, mixed."""
        if residual is None:
            raise bad_value(
                "value_residual",
                expected="the values of an earlier layer: this layer has a value_mix",
                received="none",
                remedy="kv = KeyValues(); first(x, share=kv); layer(x, value_residual=kv.new_values)",
            )
        if not isinstance(residual, Tensor):
            raise bad_type(
                "value_residual",
                expected="a tensor (B, G, N, E)",
                received=type(residual).__name__,
                remedy="kv.new_values of a KeyValues",
            )
        if residual.shape != values.shape:
            raise bad_value(
                "value_residual",
                expected=f"{shape_of(values)}, as the layer's own values of these tokens",
                received=shape_of(residual),
                remedy="new_values, not values, where there is a cache",
            )
        own, other = self.weight.to(values.dtype)
        return values * own + residual * other

    def extra_repr(self) -> str:
        return f"start={self.start}"
