"""The attention modules of transformers that `test_transformers_modules.py` compares the layer with: one `Module` each.

Letters: B batch, H query heads, G kv heads, N tokens, A axes of positions, D head width, W model width.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from regard.layer import Gate, Norm
from regard.masks import Causal, Keep, Mask, Window
from regard.positions import MultiAxisRotary, Rotary, Temperature, YaRN

H, G, D, W = 6, 3, 10, 42
SIZES: dict[str, Any] = {"hidden_size": W, "num_attention_heads": H, "num_key_value_heads": G, "head_dim": D}
SQUARE: dict[str, Any] = {"hidden_size": H * 12, "num_attention_heads": H, "num_key_value_heads": G}  # D = W / H
SLIDING, FULL = "sliding_attention", "full_attention"
THETA = 100.0  # so that a few tokens turn far


@dataclass
class Module:
    """One attention module, and what our layer has to be told besides its weights.

    Attributes:
        source: (folder in transformers, class of the attention, class of the config).
        config: arguments of the config.
        layout: of its weights; `found`: whether "auto" finds it.
        options: of the layer, which no weight tells.
        rotary: the class of the rotary embedding.
        kind: the layer's type, where the rotary embedding asks for it.
        layer: the number of the layer.
        arguments: of the attention, after config and layer.
        mask: which key a query may see.
        axes: how many axes positions have; 1 for text.
        causal: False for encoders, which have no cache.
    """

    source: tuple[str, str, str]
    config: dict[str, Any]
    layout: str
    options: Callable[[], dict[str, Any]]
    rotary: str
    found: bool = True
    kind: str | None = None
    layer: int = 0
    arguments: tuple[Any, ...] = ()
    mask: Mask | int = field(default_factory=Causal)  # a number: chunks of so many tokens
    axes: int = 1
    causal: bool = True
    heads: int = H
    batch: int = 2

    @cached_property
    def code(self) -> Any:
        """The modeling file, imported when it is needed."""
        return importlib.import_module(f"transformers.models.{self.source[0]}.modeling_{self.source[0]}")

    @cached_property
    def embedding(self) -> Any:
        """The rotary embedding."""
        return getattr(self.code, self.rotary)(self.settings())

    def settings(self) -> Any:
        """Their config."""
        folder, _, config = self.source
        made = getattr(importlib.import_module(f"transformers.models.{folder}"), config)(**self.config)
        made._attn_implementation = "eager"
        return made

    def make(self, settings: Any = None, layer: int | None = None) -> nn.Module:
        """The module, every parameter drawn anew: none may be lost unseen."""
        settings = self.settings() if settings is None else settings
        module = getattr(self.code, self.source[1])(settings, self.layer if layer is None else layer, *self.arguments)
        generator = torch.Generator().manual_seed(7)
        for parameter in module.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.25
        return module.eval()

    def angles(self, x: Tensor, positions: Tensor) -> Any:
        """What the module is given as `position_embeddings`, for positions (B, N) or (B, N, A)."""
        ids = positions.movedim(-1, 0) if self.axes > 1 else positions
        return self.embedding(x, ids) if self.kind is None else self.embedding(x, ids, self.kind)

    def run(self, module: nn.Module, x: Tensor, positions: Tensor, allowed: Tensor, cache: Any = None, **more: Any):
        """(output (B, N, W), weights (B, H, N, M))."""
        hidden = torch.zeros(allowed.shape).masked_fill(~allowed, -torch.inf)[None, None]
        angles = self.angles(x, positions)
        options = {"position_embeddings": angles, "attention_mask": hidden, "past_key_values": cache, **more}
        return module(x, **options)[:2]

    def allowed(self, first: int, tokens: int) -> Tensor:
        """(N, M): which keys queries `first`, ... may see."""
        end = first + tokens
        if isinstance(self.mask, int):
            chunk = torch.arange(end) // self.mask
            return (torch.ones(end, end).tril().bool() & (chunk[:, None] == chunk))[first:]
        return self.mask.dense(end)[0, 0][first:]

    def our_mask(self, first: int, tokens: int) -> Mask:
        return Keep(self.allowed(first, tokens)) if isinstance(self.mask, int) else self.mask


class VisionTower(Module):
    """Of Qwen-VL: it is given patches (N, W) without a batch, and where pictures begin."""

    def make(self, settings: Any = None, layer: int | None = None) -> nn.Module:
        settings = self.settings()
        module = getattr(self.code, self.source[1])(settings)
        generator = torch.Generator().manual_seed(7)
        for parameter in module.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.25
        return module.eval()

    def angles(self, x: Tensor, positions: Tensor) -> Any:
        return self.embedding(x, positions)

    def run(self, module: nn.Module, x: Tensor, positions: Tensor, allowed: Tensor, cache: Any = None, **more: Any):
        pictures = torch.tensor([0, len(positions)])
        return module(x[0], pictures, position_embeddings=self.angles(x, positions))[None], None


class Pixtral(VisionTower):
    def run(self, module: nn.Module, x: Tensor, positions: Tensor, allowed: Tensor, cache: Any = None, **more: Any):
        return module(x, None, self.angles(x, positions))


class Llama4Vision(VisionTower):
    """Its positions count from 1; the class token, the last one, stands at 0."""

    def run(self, module: nn.Module, x: Tensor, positions: Tensor, allowed: Tensor, cache: Any = None, **more: Any):
        return module(x, self.embedding(x))


def rope(**more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": THETA, **more}}


def rope_by_type(**more: Any) -> dict[str, Any]:
    both = {"rope_type": "default", "rope_theta": THETA, **more}
    return {"rope_parameters": {FULL: dict(both), SLIDING: dict(both)}}


def rotary(head_dim: int = D, **options: Any) -> dict[str, Any]:
    return {"position_encoding": Rotary(head_dim, base=THETA, **options)}


def axes(head_dim: int, sections: tuple[int, ...], **options: Any) -> dict[str, Any]:
    return {"position_encoding": MultiAxisRotary(head_dim, sections, base=THETA, **options)}


def _laguna(gating: str) -> Module:
    return Module(
        ("laguna", "LagunaAttention", "LagunaConfig"),
        {**SIZES, **rope_by_type(), "gating": gating, "num_hidden_layers": 1, "layer_types": [SLIDING]},
        "g_proj",
        lambda: {**rotary(), "gate": Gate(activation="softplus"), "qk_norm": "rms"},
        "LagunaRotaryEmbedding",
        kind=SLIDING,
        arguments=(H,),
        mask=Window(3),
    )


def _afmoe(kind: str) -> Module:
    return Module(
        ("afmoe", "AfmoeAttention", "AfmoeConfig"),
        {**SIZES, **rope(), "layer_types": [kind], "num_hidden_layers": 1, "sliding_window": 3, "rms_norm_eps": 1e-5},
        "llama",
        lambda: {"qk_norm": Norm(eps=1e-5), **(rotary() if kind == SLIDING else {})},  # full attention has no positions
        "AfmoeRotaryEmbedding",
        mask=Window(3) if kind == SLIDING else Causal(),
    )


def _llama4(use_rope: int) -> Module:
    with_rope = {**rotary(interleaved=True), "qk_norm": Norm(weight="none", eps=1e-5)}
    return Module(
        ("llama4", "Llama4TextAttention", "Llama4TextConfig"),
        {**SIZES, **rope(), "no_rope_layers": [use_rope], "num_hidden_layers": 1, "floor_scale": 3, "attn_scale": 0.7},
        "llama4",
        lambda: with_rope if use_rope else {"query_scale": Temperature(3, 0.7)},
        "Llama4TextRotaryEmbedding",
        found=False,
        mask=5 if use_rope else Causal(),
    )


def _smollm3(use_rope: int) -> Module:
    return Module(
        ("smollm3", "SmolLM3Attention", "SmolLM3Config"),
        {**SIZES, **rope(), "no_rope_layers": [use_rope], "num_hidden_layers": 1, "pad_token_id": 0},
        "llama",
        lambda: rotary() if use_rope else {},
        "SmolLM3RotaryEmbedding",
    )


def _cohere2(kind: str) -> Module:
    return Module(
        ("cohere2", "Cohere2Attention", "Cohere2Config"),
        {**SIZES, **rope(), "layer_types": [kind], "num_hidden_layers": 1, "sliding_window": 3},
        "llama4",
        lambda: rotary(interleaved=True) if kind == SLIDING else {},
        "Cohere2RotaryEmbedding",
        found=False,
        mask=Window(3) if kind == SLIDING else Causal(),
    )


def _multi_axis(folder: str, attention: str, rotary_class: str, config: str, order: Any, **more: Any) -> Module:
    sections = (3, 2, 1)
    return Module(
        (folder, attention, config),
        {**SQUARE, **rope(mrope_section=list(sections)), **more},
        "llama",
        lambda: {**axes(12, sections, order=order), **({"qk_norm": "rms"} if order == "interleaved" else {})},
        rotary_class,
        axes=3,
    )


def _vision(folder: str, attention: str, rotary_class: str, config: str, **sizes: Any) -> Module:
    return VisionTower(
        (folder, attention, config),
        {**sizes, "rope_parameters": {"rope_type": "axial", "rope_theta": THETA}},
        "timm",
        lambda: axes(12, (3, 3), order="separate"),
        rotary_class,
        mask=Window(before=99, after=99),
        axes=2,
        causal=False,
        batch=1,
    )


MODULES: dict[str, Module] = {
    "qwen3-next": Module(
        ("qwen3_next", "Qwen3NextAttention", "Qwen3NextConfig"),
        {**SIZES, **rope(partial_rotary_factor=0.4)},
        "qwen3_next",
        lambda: rotary(width=4),
        "Qwen3NextRotaryEmbedding",
    ),
    "qwen3-next with biases": Module(
        ("qwen3_next", "Qwen3NextAttention", "Qwen3NextConfig"),
        {**SIZES, **rope(partial_rotary_factor=0.4), "attention_bias": True},
        "qwen3_next",
        lambda: rotary(width=4),
        "Qwen3NextRotaryEmbedding",
    ),
    "qwen3.5": Module(
        ("qwen3_5", "Qwen3_5Attention", "Qwen3_5TextConfig"),
        {**SIZES, **rope(partial_rotary_factor=0.8, mrope_section=[2, 1, 1])},
        "qwen3_next",
        lambda: axes(D, (2, 1, 1), order="interleaved", width=8),
        "Qwen3_5TextRotaryEmbedding",
        axes=3,
    ),
    "afmoe, sliding": _afmoe(SLIDING),
    "afmoe, full, without positions": _afmoe(FULL),
    "laguna, gate per head": _laguna("per-head"),
    "laguna, gate per element": _laguna("per-element"),
    "lfm3": Module(
        ("lfm3", "Lfm3Attention", "Lfm3Config"),
        {**SIZES, **rope_by_type(), "num_hidden_layers": 1, "layer_types": [FULL], "norm_eps": 1e-6},
        "g_proj",
        lambda: {**rotary(), "gate": Gate(), "qk_norm": "rms"},
        "Lfm3RotaryEmbedding",
        kind=FULL,
    ),
    "step 3.7": Module(
        ("step3p7", "Step3p7Attention", "Step3p7TextConfig"),
        {**SIZES, **rope_by_type(), "num_hidden_layers": 1, "layer_types": [FULL], "rms_norm_eps": 1e-5},
        "g_proj",
        lambda: {**rotary(), "gate": Gate(), "qk_norm": Norm(weight="zero-centred", eps=1e-5)},
        "Step3p7RotaryEmbedding",
        kind=FULL,
    ),
    "gemma 3": Module(
        ("gemma3", "Gemma3Attention", "Gemma3TextConfig"),
        {**SIZES, **rope_by_type(), "num_hidden_layers": 1, "layer_types": [SLIDING], "query_pre_attn_scalar": 7},
        "gemma",
        lambda: {**rotary(), "scale": 7**-0.5},
        "Gemma3RotaryEmbedding",
        found=False,
        kind=SLIDING,
        mask=Window(3),
    ),
    "llama 4, chunks": _llama4(1),
    "llama 4, without positions, temperature": _llama4(0),
    "smollm3": _smollm3(1),
    "smollm3, without positions": _smollm3(0),
    "cohere 2, sliding": _cohere2(SLIDING),
    "cohere 2, full, without positions": _cohere2(FULL),
    "ministral 3, temperature": Module(
        ("ministral3", "Ministral3Attention", "Ministral3Config"),
        {**SIZES, **rope(llama_4_scaling_beta=0.7, original_max_position_embeddings=3)},
        "llama",
        lambda: {**rotary(), "query_scale": Temperature(3, 0.7, shift=0)},
        "Ministral3RotaryEmbedding",
    ),
    "olmo 2, norm over all heads": Module(
        ("olmo2", "Olmo2Attention", "Olmo2Config"),
        {**SIZES, **rope(), "rms_norm_eps": 1e-5},
        "llama",
        lambda: {**rotary(), "qk_norm": Norm(eps=1e-5)},
        "Olmo2RotaryEmbedding",
    ),
    "gpt-oss, sinks": Module(
        ("gpt_oss", "GptOssAttention", "GptOssConfig"),
        {
            **SIZES,
            **rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=8, truncate=False),
            "num_hidden_layers": 1,
            "layer_types": [SLIDING],
            "max_position_embeddings": 32,
        },
        "llama",
        lambda: rotary(scaling=YaRN(4.0, 8, truncate=False)),
        "GptOssRotaryEmbedding",
        mask=Window(3),
    ),
    "mistral": Module(
        ("mistral", "MistralAttention", "MistralConfig"),
        {**SIZES, **rope(), "sliding_window": 3},
        "llama",
        rotary,
        "MistralRotaryEmbedding",
        mask=Window(3),
    ),
    "modernbert": Module(
        ("modernbert", "ModernBertAttention", "ModernBertConfig"),
        {
            "hidden_size": H * D,
            "num_attention_heads": H,
            **rope_by_type(),
            "num_hidden_layers": 1,
            "layer_types": [SLIDING],
            "attention_bias": True,
        },
        "modernbert",
        rotary,
        "ModernBertRotaryEmbedding",
        kind=SLIDING,
        mask=Window(before=2, after=2),
        causal=False,
    ),
    "qwen2-vl": _multi_axis(
        "qwen2_vl", "Qwen2VLAttention", "Qwen2VLRotaryEmbedding", "Qwen2VLTextConfig", "contiguous"
    ),
    "qwen2.5-vl": _multi_axis(
        "qwen2_5_vl", "Qwen2_5_VLAttention", "Qwen2_5_VLRotaryEmbedding", "Qwen2_5_VLTextConfig", "contiguous"
    ),
    "qwen3-vl": _multi_axis(
        "qwen3_vl",
        "Qwen3VLTextAttention",
        "Qwen3VLTextRotaryEmbedding",
        "Qwen3VLTextConfig",
        "interleaved",
        head_dim=12,
    ),
    "qwen2-vl, vision": _vision(
        "qwen2_vl",
        "VisionAttention",
        "Qwen2VLVisionRotaryEmbedding",
        "Qwen2VLVisionConfig",
        embed_dim=H * 12,
        num_heads=H,
    ),
    "qwen2.5-vl, vision": _vision(
        "qwen2_5_vl",
        "Qwen2_5_VLVisionAttention",
        "Qwen2_5_VLVisionRotaryEmbedding",
        "Qwen2_5_VLVisionConfig",
        hidden_size=H * 12,
        num_heads=H,
    ),
    "qwen3-vl, vision": _vision(
        "qwen3_vl",
        "Qwen3VLVisionAttention",
        "Qwen3VLVisionRotaryEmbedding",
        "Qwen3VLVisionConfig",
        hidden_size=H * 12,
        num_heads=H,
    ),
    "pixtral, vision": Pixtral(
        ("pixtral", "PixtralAttention", "PixtralVisionConfig"),
        {
            "hidden_size": H * 12,
            "num_attention_heads": H,
            "rope_parameters": {"rope_type": "axial", "rope_theta": THETA},
        },
        "llama",
        lambda: axes(12, (3, 3), order="grouped"),
        "PixtralVisionRotaryEmbedding",
        mask=Window(before=99, after=99),
        axes=2,
        causal=False,
    ),
    "llama 4, vision": Llama4Vision(
        ("llama4", "Llama4VisionAttention", "Llama4VisionConfig"),
        {
            "hidden_size": H * 12,
            "num_attention_heads": H,
            "image_size": 9,
            "patch_size": 3,
            "rope_parameters": {"rope_type": "default", "rope_theta": THETA},
        },
        "llama4",
        lambda: axes(12, (3, 3), order="separate", interleaved=True),
        "Llama4VisionRotaryEmbedding",
        found=False,
        mask=Window(before=99, after=99),
        axes=2,
        causal=False,
    ),
}
