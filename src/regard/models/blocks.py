"""The parts of encoders and decoders: embeddings, norms, the feed-forward part, and the block around attention.

      post (BERT)                       pre (GPT-2, Llama)                parallel (GPT-NeoX)
      x = norm(x + attention(x))        x = x + attention(norm(x))        x = x + attention(norm(x))
      x = norm(x + mlp(x))              x = x + mlp(norm(x))                    + mlp(norm(x))

Letters: B batch, N tokens, W model width, F width of the feed-forward part.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from regard.errors import bad_value
from regard.layer import MultiHeadAttention
from regard.models.config import ModelConfig
from regard.norms import RMSNorm
from regard.positions import RelativeBias, Rotary
from regard.projections import ACTIVATIONS, by_rows, project, project_each

__all__ = ["Block", "Embedding", "FeedForward", "new_norm", "read_together"]


def new_norm(config: ModelConfig) -> nn.Module:
    """The norm that the configuration names, over W."""
    kind = nn.LayerNorm if config.norm == "layer" else RMSNorm
    return kind(config.embed_dim, eps=config.norm_eps)


class Embedding(nn.Module):
    """Token ids (B, N) to vectors (B, N, W): the sum of learned token, position and type embeddings."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width = config.embed_dim
        self.context, self.first_position = config.context, config.first_position
        self.tokens = _table(config.vocabulary, width)
        learned = config.positions == "learned"
        self.places = _table(config.first_position + (config.context or 0), width) if learned else None
        self.types = _table(config.token_types, width) if config.token_types else None
        self.norm = new_norm(config) if config.order == "post" else None

    def forward(self, ids: Tensor, positions: Tensor | int = 0, token_types: Tensor | None = None) -> Tensor:
        """`positions`: of the tokens, (N,) or (B, N), or the position of the first token."""
        x = self.tokens(ids)
        if self.types is not None:
            x = x + (self.types.weight[0] if token_types is None else self.types(token_types))
        if self.places is not None:
            first, end = self.first_position, self.check(positions, ids.shape[-1])
            if isinstance(positions, int):
                x = x + self.places.weight[first + positions : first + end]
            else:
                x = x + self.places(first + positions)
        return x if self.norm is None else self.norm(x)

    def check(self, positions: Tensor | int, count: int) -> int:
        """The position after the last of `count` tokens. Raises if it is beyond the learned positions."""
        end = positions + count if isinstance(positions, int) else int(positions.max()) + 1 if count else 0
        if self.places is not None and self.context is not None and end > self.context:
            raise bad_value(
                "ids",
                expected=f"at most {self.context} tokens, the number of learned positions",
                received=f"{end} tokens",
                remedy="truncate the text",
            )
        return end


def _table(rows: int, width: int) -> nn.Embedding:
    """An `nn.Embedding`, on the meta device without random initialisation, which costs torch 1.7 s the first time."""
    if torch.get_default_device().type == "meta":
        return nn.Embedding(rows, width, _weight=torch.empty(rows, width))
    return nn.Embedding(rows, width)


class FeedForward(nn.Module):
    """W -> F -> W: down(activation(up(x))), or down(activation(gate(x)) * up(x)) if gated."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width, inner, bias = config.embed_dim, config.inner, config.mlp_bias
        self.activation = config.activation
        self.gate = nn.Linear(width, inner, bias=bias) if config.gated else None
        self.up = nn.Linear(width, inner, bias=bias)
        self.down = nn.Linear(inner, width, bias=bias)

    def forward(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        """(B, N, W) -> (B, N, W); `add` is added to the result."""
        linears = (self.up, self.down) if self.gate is None else (self.gate, self.up, self.down)
        return by_rows(self._of_rows, linears, x, add)

    def _of_rows(self, x: Tensor, add: Tensor | None) -> Tensor:
        if self.gate is None:
            inner = project(self.up, x, activation=self.activation)
        elif x.shape[1] > _FEW_TOKENS:
            inner = project(self.up, x, times=project(self.gate, x, activation=self.activation))
        else:
            gate, up = project_each((self.gate, self.up), x)
            inner = ACTIVATIONS[self.activation](gate) * up
        return project(self.down, inner, add=add)


_FEW_TOKENS = 8  # up to here one product for gate and up is faster than two with fused activation and product


class Block(nn.Module):
    """Attention and the feed-forward part, each with its norm and its residual."""

    def __init__(self, config: ModelConfig, layer: int, rotary: Rotary | RelativeBias | None) -> None:
        super().__init__()
        self.order = config.order
        config = replace(config, scale=config.scale_of(layer))
        encoding = rotary if config.has_positions(layer) else None
        self.attention = MultiHeadAttention.from_config(config, position_encoding=encoding)
        for norm in (self.attention.q_norm, self.attention.k_norm):
            if norm is not None:
                norm.eps = config.norm_eps  # type: ignore[assignment]
        self.attention_norm = new_norm(config)
        self.mlp = FeedForward(config)
        self.mlp_norm = new_norm(config)

    def forward(self, x: Tensor, **attention_options: Any) -> Tensor:
        """(B, N, W) -> (B, N, W); the options are those of `MultiHeadAttention.forward`."""
        if self.order == "post":
            attended = self.attention_norm(x + self.attention(x, **attention_options))
            return self.mlp_norm(self.mlp(attended, add=attended))
        attended = x + self.attention(self.attention_norm(x), **attention_options)
        return self.mlp(self.mlp_norm(attended if self.order == "pre" else x), add=attended)


def read_together(module: nn.Module) -> list[tuple[nn.Module, ...]]:
    """The projections of a module that have the same input, and so can be computed as one product."""
    if isinstance(module, MultiHeadAttention) and not module.shares_kv:
        return [(module.q_proj, module.k_proj, module.v_proj)]
    if isinstance(module, FeedForward) and module.gate is not None:
        return [(module.gate, module.up)]
    return []
