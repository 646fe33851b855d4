"""Shared by the tests of circuits: small random models, and their circuits as dense matrices, written out."""

from __future__ import annotations

from typing import Any

import torch
from heads.oracle_hands import drawn
from torch import Tensor, nn

from regard.models import Decoder, Encoder, ModelConfig
from regard.models.blocks import Block

W, V, LAYERS = 17, 23, 3
_LLAMA: dict[str, Any] = {
    "kind": "decoder",
    "layers": LAYERS,
    "embed_dim": W,
    "num_heads": 6,
    "num_kv_heads": 3,
    "head_dim": 4,
    "vocabulary": V,
    "inner": 7,
    "context": 29,
    "causal": True,
    "positions": "rotary",
    "rotary_base": 11.0,
    "norm": "rms",
    "norm_eps": 1e-30,
    "bias": False,
    "mlp_bias": False,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "as SmolLM2": _LLAMA | {"tied": True},
    "as Llama": _LLAMA,
    "as GPT-2": _LLAMA | {"norm": "layer", "positions": "learned", "head_dim": 5, "bias": True, "tied": True},
    "as NeoX": _LLAMA | {"norm": "layer", "order": "parallel", "rotary_width": 2, "num_kv_heads": 6, "bias": True},
    "as BERT": _LLAMA | {"norm": "layer", "positions": "learned", "order": "post", "kind": "encoder", "causal": False},
}


def made(kind: str, **changes: Any) -> Any:
    """A model in float64 with normal random weights."""
    config = ModelConfig(**CONFIGS[kind] | changes)
    model = drawn((Encoder if config.kind == "encoder" else Decoder)(config))
    if isinstance(model, Decoder):
        model.tie()
    return model


def norm_matrix(norm: nn.Module | None) -> Tensor:
    """(W, W), for rows: subtract the mean (LayerNorm), multiply by the weight."""
    identity = torch.eye(W, dtype=torch.float64)
    if norm is None:
        return identity
    centred = identity - 1 / W if isinstance(norm, nn.LayerNorm) else identity
    return centred @ torch.diag(norm.weight.detach())  # type: ignore[arg-type]


def ov_matrices(block: Block) -> list[Tensor]:
    """W_OV of each head, (W, W) for rows, the norm before it included."""
    layer = block.attention
    e, group = layer.value_head_dim, layer.num_heads // layer.num_kv_heads
    found = []
    for head in range(layer.num_heads):
        kv = head // group
        value = layer.v_proj.weight.detach()[kv * e : (kv + 1) * e]
        out = layer.out_proj.weight.detach()[:, head * e : (head + 1) * e]
        found.append(read_matrix(block) @ value.T @ out.T)
    return found


def qk_matrices(block: Block, offset: int = 0) -> list[Tensor]:
    """W_QK of each head, (W, W): query times it times key, turned for a key `offset` tokens before the query."""
    layer = block.attention
    d, group = layer.head_dim, layer.num_heads // layer.num_kv_heads
    found = []
    for head in range(layer.num_heads):
        kv = head // group
        query = layer.q_proj.weight.detach()[head * d : (head + 1) * d] @ read_matrix(block).T
        key = layer.k_proj.weight.detach()[kv * d : (kv + 1) * d] @ read_matrix(block).T
        found.append(d**-0.5 * query.T @ turned(layer.position_encoding, d, -offset) @ key)
    return found


def turned(rotary: Any, d: int, position: int) -> Tensor:
    """The rotation (D, D) of columns by a position, written out for halves."""
    matrix = torch.eye(d, dtype=torch.float64)
    if rotary is None:
        return matrix
    half = rotary.width // 2
    for i in range(half):
        angle = torch.tensor(position * rotary.base ** (-2 * i / rotary.width), dtype=torch.float64)
        matrix[i, i] = matrix[i + half, i + half] = angle.cos()
        matrix[i + half, i], matrix[i, i + half] = angle.sin(), -angle.sin()
    return matrix


def read_matrix(block: Block) -> Tensor:
    """The norm between the stream and q, k and v."""
    return norm_matrix(None if block.order == "post" else block.attention_norm)


def leave_matrix(blocks: Any) -> Tensor:
    """The norms that the stream passes in some blocks of a post-norm model."""
    matrix = torch.eye(W, dtype=torch.float64)
    for block in blocks:
        if block.order == "post":
            matrix = matrix @ norm_matrix(block.attention_norm) @ norm_matrix(block.mlp_norm)
    return matrix


def score_of(matrix: Tensor) -> Tensor:
    """The sum of all eigenvalues over the sum of their moduli."""
    eigenvalues = torch.linalg.eigvals(matrix)
    return eigenvalues.sum().real / eigenvalues.abs().sum()
