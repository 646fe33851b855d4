"""Shared by the tests of latent attention: the attention modules of transformers' model types, tiny, as they are run.

An `Original` knows how to make the module and its rotary positions, and what our layer has to be told besides the
weights.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regard.masks import Causal
from regard.positions import Rotary
from regard.positions.scalings import YaRN

pytestmark = pytest.mark.on_device

# Heads divide the width, and those that are rotated as complex numbers begin at an even place: some of them want it.
HEADS, WIDTH, RANK, NOPE, ROPE, VALUE, Q_RANK = 3, 21, 10, 6, 4, 7, 13
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 0.7,
    "mscale_all_dim": 1.3,
}


@dataclass
class Original:
    family: str  # the package in transformers.models
    attention: str
    config: str
    rotary: str | None
    layout: str = "deepseek"
    settings: dict[str, Any] = field(default_factory=dict)
    options: Callable[[], dict[str, Any]] = dict  # of our layer, which no weight tells, beside the positions
    interleaved: bool = True

    def make(self, seed: int = 1) -> tuple[nn.Module, nn.Module | None]:
        """The attention and its rotary embedding, with every parameter drawn."""
        models = importlib.import_module(f"transformers.models.{self.family}.modeling_{self.family}")
        configs = importlib.import_module(f"transformers.models.{self.family}.configuration_{self.family}")
        sizes: dict[str, Any] = {
            "hidden_size": WIDTH,
            "num_attention_heads": HEADS,
            "num_key_value_heads": HEADS,
            "num_hidden_layers": 2,
            "kv_lora_rank": RANK,
            "q_lora_rank": Q_RANK,
            "qk_nope_head_dim": NOPE,
            "qk_rope_head_dim": ROPE,
            "v_head_dim": VALUE,
            "max_position_embeddings": 128,
            "attn_implementation": "eager",
            "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
        }
        config = getattr(configs, self.config)(**{**sizes, **self.settings})
        module = getattr(models, self.attention)(config, layer_idx=0)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.normal_(generator=generator).mul_(0.5)
        rotary = None if self.rotary is None else getattr(models, self.rotary)(config)
        return module.eval(), rotary

    def position_encoding(self) -> Rotary | None:
        rope = self.settings.get("rope_parameters", {"rope_type": "default"})
        if self.rotary is None:
            return None
        scaling = None
        if rope["rope_type"] == "yarn":
            known = {name: rope[name] for name in ("mscale", "mscale_all_dim") if name in rope}
            scaling = YaRN(rope["factor"], rope["original_max_position_embeddings"], **known)
        return Rotary(ROPE, base=100.0, interleaved=self.interleaved, scaling=scaling)


def run(
    module: nn.Module, rotary: nn.Module | None, x: Tensor, cache: Any = None, start: int = 0
) -> tuple[Tensor, Tensor]:
    """What their module gives for x (B, N, W) of tokens that stand at `start` and after, and its weights."""
    n, m = x.shape[1], start + x.shape[1]
    positions = torch.arange(start, m)[None]
    visible = Causal().dense(n, m)[0, 0]
    mask = torch.zeros(n, m).masked_fill(~visible, float("-inf"))[None, None].to(x.dtype)
    options: dict[str, Any] = {"attention_mask": mask, "past_key_values": cache, "position_ids": positions}
    if rotary is not None:
        options["position_embeddings"] = rotary(x, positions)
    return module(x, **options)[:2]  # type: ignore[return-value]


ORIGINALS = {
    "deepseek_v2": Original("deepseek_v2", "DeepseekV2Attention", "DeepseekV2Config", "DeepseekV2RotaryEmbedding"),
    "deepseek_v2, plain q": Original(
        "deepseek_v2",
        "DeepseekV2Attention",
        "DeepseekV2Config",
        "DeepseekV2RotaryEmbedding",
        settings={"q_lora_rank": None},
    ),
    "deepseek_v2, yarn": Original(
        "deepseek_v2",
        "DeepseekV2Attention",
        "DeepseekV2Config",
        "DeepseekV2RotaryEmbedding",
        settings={"rope_parameters": YARN},
    ),
    "deepseek_v3": Original("deepseek_v3", "DeepseekV3Attention", "DeepseekV3Config", "DeepseekV3RotaryEmbedding"),
    "deepseek_v3, yarn and biases": Original(
        "deepseek_v3",
        "DeepseekV3Attention",
        "DeepseekV3Config",
        "DeepseekV3RotaryEmbedding",
        settings={"rope_parameters": YARN, "attention_bias": True},
    ),
    "deepseek_v3, halves": Original(
        "deepseek_v3",
        "DeepseekV3Attention",
        "DeepseekV3Config",
        "DeepseekV3RotaryEmbedding",
        layout="minicpm3",
        settings={"rope_interleave": False},
        interleaved=False,
    ),
    "minicpm3": Original(
        "minicpm3",
        "MiniCPM3Attention",
        "MiniCPM3Config",
        "MiniCPM3RotaryEmbedding",
        layout="minicpm3",
        interleaved=False,
    ),
    "glm4_moe_lite": Original(
        "glm4_moe_lite", "Glm4MoeLiteAttention", "Glm4MoeLiteConfig", "Glm4MoeLiteRotaryEmbedding"
    ),
    "youtu": Original("youtu", "YoutuAttention", "YoutuConfig", "YoutuRotaryEmbedding"),
    "axk1": Original("axk1", "AXK1Attention", "AXK1Config", "AXK1RotaryEmbedding"),
    "longcat_flash": Original(
        "longcat_flash",
        "LongcatFlashMLA",
        "LongcatFlashConfig",
        "LongcatFlashRotaryEmbedding",
        settings={"num_layers": 1, "head_dim": ROPE},
        options=lambda: {
            "latent_scale": (WIDTH / RANK) ** 0.5,
            "scale": (NOPE + ROPE) ** -0.5 * (WIDTH / Q_RANK) ** 0.5,
        },
    ),
    "kimi_linear": Original("kimi_linear", "KimiLinearAttention", "KimiLinearConfig", None),
    "mistral4, within its length": Original(
        "mistral4",
        "Mistral4Attention",
        "Mistral4Config",
        "Mistral4RotaryEmbedding",
        settings={"rope_parameters": {**YARN, "llama_4_scaling_beta": 0.1}},
    ),
}
