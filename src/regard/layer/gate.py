"""A gate on the heads' outputs: what the query's own token lets through of what its heads found.

      heads (B, N, H, E)      query (B, N, W)
          │                       │ gate_proj
          │                   (B, N, H * E), or (B, N, H)     a gate for each element, or for each head
          │                       │ sigmoid or softplus
          └────── times ──────────┘
                   │ out_proj

Letters: B batch, H query heads, N queries, E head width of v, W model width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch.nn.functional as F
from torch import Tensor

from regard.errors import bad_value

__all__ = ["Gate"]

Per = Literal["element", "head"]
Activation = Literal["sigmoid", "softplus"]


@dataclass(frozen=True)
class Gate:
    """How a layer gates its heads' outputs before `out_proj`; the layer has the weights, as its child `gate_proj`.

    Args:
        per: "element" (Qwen3-Next, AFMoE) or "head" (Step 3.7, LFM3).
        activation: "sigmoid", or "softplus" (Laguna).
        bias: whether gate_proj has one.

    >>> import torch, regard
    >>> layer = regard.MultiHeadAttention(16, 4, gate=Gate("head"))
    >>> layer.gate_proj
    Linear(in_features=16, out_features=4, bias=False)
    >>> layer(torch.randn(2, 5, 16)).shape
    torch.Size([2, 5, 16])
    """

    per: Per = "element"
    activation: Activation = "sigmoid"
    bias: bool = False

    def __post_init__(self) -> None:
        for what, value, allowed in (("per", self.per, Per), ("activation", self.activation, Activation)):
            if value not in get_args(allowed):
                expected = " or ".join(map(repr, get_args(allowed)))
                raise bad_value(f"Gate: {what}", expected=expected, received=repr(value))

    def width(self, heads: int, value_head_dim: int) -> int:
        """The rows of gate_proj."""
        return heads * value_head_dim if self.per == "element" else heads

    def __call__(self, heads: Tensor, projected: Tensor) -> Tensor:
        """Heads (B, N, H, E) times the gate that gate_proj gave, (B, N, H * E) or (B, N, H), activated."""
        gate = projected.sigmoid() if self.activation == "sigmoid" else F.softplus(projected)
        return heads * gate.unflatten(-1, (heads.shape[2], -1)).to(heads.dtype)
