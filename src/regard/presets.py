"""Well-known models as a table of sizes: what their attention layers are made of, nothing more.

To add one: one line. `regard.MultiHeadAttention.from_config(name)` builds the layer.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from regard.errors import bad_value
from regard.positions import Llama3, RelativeBias, Rotary
from regard.positions.scalings import Scaling

__all__ = ["CONFIGURATIONS", "Configuration", "configuration"]


@dataclass(frozen=True)
class Configuration:
    """The attention of one model. `positions`: "learned" (added to the tokens before), "rotary" or "relative"."""

    layers: int
    embed_dim: int
    num_heads: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    bias: bool = True
    out_bias: bool | None = None
    scale: float | None = None
    qk_norm: str | None = None
    positions: str = "learned"
    rotary_base: float = 10000.0
    rotary_width: int | None = None
    rotary_scaling: Scaling | None = None
    causal: bool = False
    window: int | None = None
    context: int | None = None  # tokens it was trained on; None where nothing limits it

    def position_encoding(self) -> Rotary | RelativeBias | None:
        """A fresh position encoding for one layer, or None where positions are added to the tokens."""
        head_dim = self.head_dim or self.embed_dim // self.num_heads
        if self.positions == "rotary":
            return Rotary(head_dim, base=self.rotary_base, width=self.rotary_width, scaling=self.rotary_scaling)
        if self.positions == "relative":
            return RelativeBias(self.num_heads, bidirectional=not self.causal)
        return None


def _bert(layers: int, width: int, heads: int, context: int = 512) -> Configuration:
    return Configuration(layers, width, heads, context=context)


def _gpt(layers: int, width: int, heads: int, context: int = 1024) -> Configuration:
    return Configuration(layers, width, heads, causal=True, context=context)


def _t5(layers: int, width: int, heads: int) -> Configuration:
    return Configuration(layers, width, heads, head_dim=64, bias=False, scale=1.0, positions="relative")


def _llama(
    layers: int,
    width: int,
    heads: int,
    kv_heads: int,
    base: float,
    context: int,
    *,
    head_dim: int | None = None,
    window: int | None = None,
    bias: bool = False,
    qk_norm: str | None = None,
    scaling: Scaling | None = None,
) -> Configuration:
    return Configuration(
        layers,
        width,
        heads,
        kv_heads,
        head_dim,
        bias=bias,
        out_bias=False,
        qk_norm=qk_norm,
        positions="rotary",
        rotary_base=base,
        rotary_scaling=scaling,
        causal=True,
        window=window,
        context=context,
    )


CONFIGURATIONS: dict[str, Configuration] = {
    "bert-base": _bert(12, 768, 12),
    "bert-large": _bert(24, 1024, 16),
    "minilm": _bert(6, 384, 12),
    "vit-b16": _bert(12, 768, 12, context=197),
    "gpt2": _gpt(12, 768, 12),
    "gpt2-medium": _gpt(24, 1024, 16),
    "gpt2-large": _gpt(36, 1280, 20),
    "gpt2-xl": _gpt(48, 1600, 25),
    "gpt3": _gpt(96, 12288, 96, context=2048),
    "t5-small": _t5(6, 512, 8),
    "t5-base": _t5(12, 768, 12),
    "pythia-160m": Configuration(12, 768, 12, positions="rotary", rotary_width=16, causal=True, context=2048),
    "llama2-7b": _llama(32, 4096, 32, 32, 1e4, 4096),
    "llama3-8b": _llama(32, 4096, 32, 8, 5e5, 8192),
    "llama3.1-8b": _llama(32, 4096, 32, 8, 5e5, 131072, scaling=Llama3(8.0, 1.0, 4.0, 8192)),
    "mistral-7b": _llama(32, 4096, 32, 8, 1e4, 32768, window=4096),
    "smollm2-135m": _llama(30, 576, 9, 3, 1e5, 8192),
    "qwen2.5-0.5b": _llama(24, 896, 14, 2, 1e6, 32768, bias=True),
    "qwen3-0.6b": _llama(28, 1024, 16, 8, 1e6, 40960, head_dim=128, qk_norm="rms"),
}


def configuration(name: str) -> Configuration:
    """The configuration of a model by name.

    >>> configuration("llama3-8b").num_kv_heads
    8
    """
    try:
        return CONFIGURATIONS[name]
    except KeyError:
        near = difflib.get_close_matches(str(name), CONFIGURATIONS, n=1)
        raise bad_value(
            "configuration",
            expected=f"one of {', '.join(CONFIGURATIONS)}",
            received=repr(name),
            remedy=f"did you mean {near[0]!r}?" if near else "",
        ) from None
