"""Residual and normalisation around an attention layer."""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor, nn

from regard.errors import bad_value
from regard.layer.multi_head_attention import MultiHeadAttention

__all__ = ["AttentionBlock"]


class AttentionBlock(nn.Module):
    """Residual and LayerNorm around an attention layer.

    `norm="post"`: norm(x + dropout(layer(x))), as in the first transformer and BERT. `norm="pre"`:
    x + dropout(layer(norm(x))), as in GPT-2. Arguments beyond the first go to the layer as they are: the memory of
    cross attention is not normalised.

    >>> import torch
    >>> block = AttentionBlock(MultiHeadAttention(16, 4), norm="pre")
    >>> block(torch.randn(2, 5, 16)).shape
    torch.Size([2, 5, 16])
    """

    def __init__(
        self,
        layer: MultiHeadAttention,
        norm: Literal["post", "pre"] = "post",
        dropout: float = 0.0,
        *,
        eps: float = 1e-5,
    ) -> None:
        super().__init__()
        if norm not in ("post", "pre"):
            raise bad_value("norm", expected='"post" or "pre"', received=repr(norm))
        if layer.query_dim != layer.embed_dim:
            raise bad_value(
                "layer",
                expected="queries as wide as the output, for the residual adds them",
                received=f"query_dim={layer.query_dim}, embed_dim={layer.embed_dim}",
            )
        self.layer = layer
        weight = layer.out_proj.weight
        self.norm = nn.LayerNorm(layer.embed_dim, eps=eps, device=weight.device, dtype=weight.dtype)
        self.dropout = nn.Dropout(dropout)
        self.order = norm

    def forward(
        self, query: Tensor, key: Tensor | None = None, value: Tensor | None = None, **options: Any
    ) -> Tensor | tuple[Tensor, Tensor]:
        """As the layer's: (B, N, W) to (B, N, W), with the weights beside it where `need_weights`."""
        pre = self.order == "pre"
        result = self.layer(self.norm(query) if pre else query, key, value, **options)
        out, weights = result if isinstance(result, tuple) else (result, None)
        out = query + self.dropout(out)
        out = out if pre else self.norm(out)
        return out if weights is None else (out, weights)

    def extra_repr(self) -> str:
        return f"norm={self.order!r}"
