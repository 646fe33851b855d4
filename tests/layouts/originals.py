"""Shared by the tests of layouts: the modules that the weights come from, as their authors compute them.

An `Original` knows how to make the module, how to run it, and what our layer has to be told besides the weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    BertConfig,
    DistilBertConfig,
    GPT2Config,
    GPTNeoXConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    ModernBertConfig,
    Qwen2Config,
    Qwen3Config,
    T5Config,
    WhisperConfig,
)
from transformers.models.bert.modeling_bert import BertAttention
from transformers.models.distilbert.modeling_distilbert import DistilBertSelfAttention
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXAttention
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention
from transformers.models.llama.modeling_llama import LlamaAttention
from transformers.models.mistral.modeling_mistral import MistralAttention
from transformers.models.modernbert.modeling_modernbert import ModernBertAttention
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention
from transformers.models.t5.modeling_t5 import T5Attention
from transformers.models.whisper.modeling_whisper import WhisperAttention

from regard.masks import Causal
from regard.positions import Rotary


@dataclass
class Original:
    layout: str
    num_heads: int
    make: Callable[[], nn.Module]
    run: Callable[[Any, Tensor], Tensor]
    width: int  # of the input
    options: Callable[[], dict[str, Any]] = dict  # of the layer, which no weight tells
    call: dict[str, Any] = field(default_factory=dict)
    block: bool = False
    tolerance: float = 1e-10  # in float64; larger where the original computes a part in float32


def randomised(module: nn.Module, seed: int) -> nn.Module:
    """In float64, with every parameter drawn anew, biases and norms too: none of them may be lost unseen."""
    generator = torch.Generator().manual_seed(seed)
    module = module.double().eval()
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.6
    return module


def angles(n: int, width: int, base: float = 10000.0, *, twice: bool = True) -> tuple[Tensor, Tensor]:
    """cos and sin (1, n, width) of the halves convention, in float64."""
    turns = torch.outer(torch.arange(n).double(), base ** (-torch.arange(0, width, 2, dtype=torch.float64) / width))
    turns = torch.cat([turns, turns], -1) if twice else turns
    return turns.cos()[None], turns.sin()[None]


def heads(x: Tensor, h: int) -> Tensor:
    return x.view(*x.shape[:2], h, -1).transpose(1, 2)


def merge(x: Tensor) -> Tensor:
    return x.transpose(1, 2).reshape(x.shape[0], x.shape[2], -1)


class PaperNames(nn.Module):
    """W_q W_k W_v W_o."""

    def __init__(self, width: int, h: int, bias: bool) -> None:
        super().__init__()
        self.W_q, self.W_k, self.W_v, self.W_o = (nn.Linear(width, width, bias=bias) for _ in range(4))
        self.h = h

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (heads(f(x), self.h) for f in (self.W_q, self.W_k, self.W_v))
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        return self.W_o(merge(torch.softmax(scores, -1) @ v))


class WithResidual(nn.Module):
    """w_qs w_ks w_vs fc layer_norm, with d_k and d_v: the norm comes after the residual."""

    def __init__(self, width: int, h: int, d_k: int, d_v: int, norm: bool) -> None:
        super().__init__()
        self.w_qs = nn.Linear(width, h * d_k, bias=False)
        self.w_ks = nn.Linear(width, h * d_k, bias=False)
        self.w_vs = nn.Linear(width, h * d_v, bias=False)
        self.fc = nn.Linear(h * d_v, width, bias=False)
        self.layer_norm = nn.LayerNorm(width, eps=1e-6) if norm else None
        self.h, self.d_k = h, d_k

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (heads(f(x), self.h) for f in (self.w_qs, self.w_ks, self.w_vs))
        out = self.fc(merge(torch.softmax(q / self.d_k**0.5 @ k.mT, -1) @ v))
        return out if self.layer_norm is None else self.layer_norm(out + x)


class OneProjection(nn.Module):
    """qkv_layer linear_layer, with the transpose that the copied snippet leaves out before it merges."""

    def __init__(self, input_dim: int, width: int, h: int) -> None:
        super().__init__()
        self.qkv_layer = nn.Linear(input_dim, 3 * width)
        self.linear_layer = nn.Linear(width, width)
        self.h = h

    def forward(self, x: Tensor) -> Tensor:
        batch, n, _ = x.shape
        qkv = self.qkv_layer(x).reshape(batch, n, self.h, -1).permute(0, 2, 1, 3)
        q, k, v = qkv.chunk(3, dim=-1)
        values = F.scaled_dot_product_attention(q, k, v)
        return self.linear_layer(values.permute(0, 2, 1, 3).reshape(batch, n, -1))


class VisionAttention(nn.Module):
    """qkv proj, perhaps with q_norm and k_norm, as in timm."""

    def __init__(self, width: int, h: int, norm: type[nn.Module] | None = None, bias: bool = True) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width, bias=bias)
        self.proj = nn.Linear(width, width)
        if norm is not None:
            eps: dict[str, Any] = {"eps": 1e-6} if norm is nn.RMSNorm else {}
            self.q_norm, self.k_norm = norm(width // h, **eps), norm(width // h, **eps)
        self.h, self.norm = h, norm is not None

    def forward(self, x: Tensor) -> Tensor:
        batch, n, width = x.shape
        q, k, v = self.qkv(x).reshape(batch, n, 3, self.h, width // self.h).permute(2, 0, 3, 1, 4).unbind(0)
        if self.norm:
            q, k = self.q_norm(q), self.k_norm(k)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, n, width))


class Wqkv(nn.Module):
    """Wqkv out_proj, kv heads shared, as in MPT and flash-attn."""

    def __init__(self, width: int, h: int, g: int, bias: bool) -> None:
        super().__init__()
        self.d = width // h
        self.Wqkv = nn.Linear(width, (h + 2 * g) * self.d, bias=bias)
        self.out_proj = nn.Linear(width, width, bias=bias)
        self.h, self.g = h, g

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.Wqkv(x).split([self.h * self.d, self.g * self.d, self.g * self.d], -1)
        q, k, v = heads(q, self.h), heads(k, self.g), heads(v, self.g)
        k, v = (t.repeat_interleave(self.h // self.g, 1) for t in (k, v))
        return self.out_proj(merge(F.scaled_dot_product_attention(q, k, v, is_causal=True)))


class LinearGPT(nn.Module):
    """c_attn c_proj as nn.Linear, as in nanoGPT."""

    def __init__(self, width: int, h: int, bias: bool) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width, bias=bias), nn.Linear(width, width, bias=bias)
        self.h = h

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (heads(t, self.h) for t in self.c_attn(x).split(x.shape[-1], dim=2))
        return self.c_proj(merge(F.scaled_dot_product_attention(q, k, v, is_causal=True)))


class MetaLlama(nn.Module):
    """wq wk wv wo, with pairs of neighbours turned as complex numbers."""

    def __init__(self, width: int, h: int, g: int, d: int) -> None:
        super().__init__()
        self.wq, self.wk = nn.Linear(width, h * d, bias=False), nn.Linear(width, g * d, bias=False)
        self.wv, self.wo = nn.Linear(width, g * d, bias=False), nn.Linear(h * d, width, bias=False)
        self.h, self.g, self.d = h, g, d

    def forward(self, x: Tensor) -> Tensor:
        cos, sin = angles(x.shape[1], self.d, twice=False)
        turn = torch.complex(cos, sin)[0]  # (n, d / 2)
        q, k, v = heads(self.wq(x), self.h), heads(self.wk(x), self.g), heads(self.wv(x), self.g)
        q, k = (
            torch.view_as_real(torch.view_as_complex(t.unflatten(-1, (-1, 2)).contiguous()) * turn).flatten(-2)
            for t in (q, k)
        )
        return self.wo(merge(F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)))


HF: dict[str, Any] = {"attn_implementation": "sdpa"}
CAUSAL = {"mask": Causal()}


def causal(n: int) -> Tensor:
    """The (1, 1, n, n) mask to add."""
    return torch.full((n, n), -torch.inf, dtype=torch.float64).triu(1)[None, None]


def rotated(width: int) -> Callable[[Any, Tensor], Tensor]:
    def run(module: Any, x: Tensor) -> Tensor:
        return module(x, position_embeddings=angles(x.shape[1], width), attention_mask=None)[0]

    return run


def rotary(head_dim: int, **options: Any) -> Callable[[], dict[str, Any]]:
    return lambda: {"position_encoding": Rotary(head_dim, **options)}


SIZES: dict[str, Any] = {"hidden_size": 42, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 10}


def _t5(decoder: bool, bias: bool) -> T5Attention:
    config = T5Config(
        d_model=11,
        d_kv=5,
        num_heads=3,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=13,
        is_decoder=decoder,
        dropout_rate=0.0,
        **HF,
    )
    return T5Attention(config, has_relative_attention_bias=bias, layer_idx=0)


ORIGINALS: dict[str, Original] = {
    "torch": Original(
        "torch", 5, lambda: nn.MultiheadAttention(35, 5, batch_first=True), lambda m, x: m(x, x, x)[0], 35
    ),
    "torch without bias": Original(
        "torch", 5, lambda: nn.MultiheadAttention(35, 5, bias=False, batch_first=True), lambda m, x: m(x, x, x)[0], 35
    ),
    "gpt2": Original(
        "gpt2",
        3,
        lambda: GPT2Attention(GPT2Config(n_embd=33, n_head=3, **HF), layer_idx=0),
        lambda m, x: m(x)[0],
        33,
        call=CAUSAL,
    ),
    "nanogpt": Original("nanogpt", 3, lambda: LinearGPT(33, 3, True), lambda m, x: m(x), 33, call=CAUSAL),
    "nanogpt without bias": Original("nanogpt", 3, lambda: LinearGPT(33, 3, False), lambda m, x: m(x), 33, call=CAUSAL),
    "bert": Original(
        "bert",
        3,
        lambda: BertAttention(BertConfig(hidden_size=33, num_attention_heads=3, **HF)),
        lambda m, x: m(x)[0],
        33,
        block=True,
    ),
    "distilbert": Original(
        "distilbert",
        3,
        lambda: DistilBertSelfAttention(DistilBertConfig(dim=33, n_heads=3, **HF)),
        lambda m, x: m(x)[0],
        33,
    ),
    "neox": Original(
        "neox",
        3,
        lambda: GPTNeoXAttention(GPTNeoXConfig(hidden_size=30, num_attention_heads=3, **HF), 0),
        rotated(2),
        30,
        rotary(10, width=2),
        CAUSAL,
    ),
    "t5": Original("t5", 3, lambda: _t5(False, False), lambda m, x: m(x)[0], 11),
    "t5 encoder": Original("t5", 3, lambda: _t5(False, True), lambda m, x: m(x)[0], 11, lambda: {"max_distance": 13}),
    "t5 decoder": Original(
        "t5",
        3,
        lambda: _t5(True, True),
        lambda m, x: m(x, mask=causal(x.shape[1]))[0],
        11,
        lambda: {"max_distance": 13, "bidirectional": False},
        CAUSAL,
    ),
    "llama": Original(
        "llama", 6, lambda: LlamaAttention(LlamaConfig(**SIZES, **HF), 0), rotated(10), 42, rotary(10), CAUSAL
    ),
    "llama with bias": Original(
        "llama",
        6,
        lambda: LlamaAttention(LlamaConfig(**SIZES, attention_bias=True, **HF), 0),
        rotated(10),
        42,
        rotary(10),
        CAUSAL,
    ),
    "mistral": Original(
        "llama",
        6,
        lambda: MistralAttention(MistralConfig(**SIZES, sliding_window=None, **HF), 0),
        rotated(10),
        42,
        rotary(10),
        CAUSAL,
    ),
    "qwen2": Original(
        "llama", 6, lambda: Qwen2Attention(Qwen2Config(**SIZES, **HF), 0), rotated(10), 42, rotary(10), CAUSAL
    ),
    "qwen3": Original(
        "llama",
        6,
        lambda: Qwen3Attention(Qwen3Config(**SIZES, **HF), 0),
        rotated(10),
        42,
        rotary(10),
        CAUSAL,
        tolerance=3e-5,
    ),
    "gpt-oss": Original(
        "llama",
        6,
        lambda: GptOssAttention(GptOssConfig(**SIZES, attn_implementation="eager"), 0),
        lambda m, x: m(x, angles(x.shape[1], 10, twice=False), causal(x.shape[1]))[0],
        42,
        rotary(10),
        CAUSAL,
    ),
    "meta llama": Original("meta_llama", 6, lambda: MetaLlama(42, 6, 3, 10), lambda m, x: m(x), 42, rotary(10), CAUSAL),
    "whisper": Original(
        "separate", 3, lambda: WhisperAttention(33, 3, config=WhisperConfig(**HF)), lambda m, x: m(x)[0], 33
    ),
    "w_q": Original("w_q", 3, lambda: PaperNames(21, 3, True), lambda m, x: m(x), 21),
    "w_q without bias": Original("w_q", 3, lambda: PaperNames(21, 3, False), lambda m, x: m(x), 21),
    "w_qs": Original("w_qs", 3, lambda: WithResidual(11, 3, 5, 7, False), lambda m, x: m(x), 11),
    "w_qs with norm": Original("w_qs", 3, lambda: WithResidual(11, 3, 5, 7, True), lambda m, x: m(x), 11, block=True),
    "qkv_layer": Original("qkv_layer", 3, lambda: OneProjection(11, 21, 3), lambda m, x: m(x), 11),
    "timm": Original("timm", 3, lambda: VisionAttention(21, 3), lambda m, x: m(x), 21),
    "timm with LayerNorm": Original(
        "timm", 3, lambda: VisionAttention(21, 3, nn.LayerNorm, False), lambda m, x: m(x), 21
    ),
    "timm with RMSNorm": Original("timm", 3, lambda: VisionAttention(21, 3, nn.RMSNorm), lambda m, x: m(x), 21),
    "wqkv": Original("wqkv", 6, lambda: Wqkv(30, 6, 3, True), lambda m, x: m(x), 30, call=CAUSAL),
    "wqkv, one kv head": Original("wqkv", 3, lambda: Wqkv(33, 3, 1, False), lambda m, x: m(x), 33, call=CAUSAL),
    "modernbert": Original(
        "modernbert",
        3,
        lambda: ModernBertAttention(ModernBertConfig(hidden_size=30, num_attention_heads=3, pad_token_id=0, **HF), 0),
        rotated(10),
        30,
        rotary(10),
        tolerance=3e-5,
    ),
}
