"""Models of transformers as small as they can be, with random weights: two layers of six heads."""

from __future__ import annotations

from typing import Any

import torch
import transformers

SIZES: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 24,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 4,
    "intermediate_size": 13,
    "vocab_size": 23,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 7,
    "shared_expert_intermediate_size": 7,
}
HYBRID: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 4,
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 6,
    "head_dim": 2,
    "kv_lora_rank": 5,
    "q_lora_rank": 7,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 2,
    "v_head_dim": 3,
    "n_routed_experts": 3,
    "n_group": 1,
    "topk_group": 1,
}


def tiny(kind: str, sizes: dict[str, Any]) -> Any:
    """A small model of transformers with random weights."""
    made = getattr(transformers, kind)
    config = made.config_class(**SIZES | sizes)
    config._experts_implementation = "eager"  # (others ask for sizes that are not prime)
    model = made(config).float().eval()
    generator = torch.Generator().manual_seed(7)
    for parameter in model.parameters():
        drawn = torch.randn(parameter.shape, generator=generator)
        parameter.data = parameter.data + 0.2 * drawn if parameter.dim() == 1 else 0.2 * drawn
    return model
