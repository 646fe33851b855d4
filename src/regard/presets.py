"""Well-known models as a table: what their attention layers are made of, when they came, and what they keep in a cache.

To add one: one line. `regard.MultiHeadAttention.from_config(name)` builds the layer, or says what it lacks.
`docs/variants.md` shows the table.

Letters: H query heads, G kv heads, D head width of q and k.
"""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from regard.errors import bad_value
from regard.positions import LinearScaling, Llama3, MultiAxisRotary, RelativeBias, Rotary, YaRN
from regard.positions.scalings import Scaling

__all__ = ["CONFIGURATIONS", "Configuration", "Latent", "Parts", "configuration"]

LayerKind: TypeAlias = Literal["full", "window", "chunk", "linear"]


@dataclass(frozen=True)
class Latent:
    """Keys and values of all heads are made of one small vector per token. It is kept, with one rotated key for all
    heads."""

    kv_rank: int  # width of that vector
    rotary_dim: int  # width of the rotated key; that of a head's query and key beside `head_dim`
    head_dim: int  # of queries and keys, without rotation
    value_head_dim: int
    query_rank: int | None = None  # queries are made of a vector of this width; None: of the token itself


@dataclass(frozen=True)
class Parts:
    """What the attention of a model has beside its sizes."""

    pattern: tuple[LayerKind, ...] = ()  # kinds of the layers, over and over; (): all alike, by `window`
    chunk: int | None = None  # positions of a chunk, in layers of that kind
    no_rotary_every: int | None = None  # each such layer, counted from 1, has no position encoding
    local_rotary_base: float | None = None  # of layers with a window
    softcap: float | None = None
    sinks: bool = False
    gate: bool = False  # a sigmoid of the input multiplies the heads' outputs
    v_norm: bool = False
    norm_after_rotary: bool = False  # of queries and keys, without a weight
    temperature: bool = False  # queries grow with the logarithm of their position, in layers without rotary
    latent: Latent | None = None
    sections: tuple[int, ...] = ()  # pairs of rotary for time, height and width
    shared_kv_layers: int = 0  # so many of the last layers use keys and values of earlier ones


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
    window: int | None = None  # tokens, the query included; of an encoder half of them on either side
    context: int | None = None  # tokens it was trained on; None where nothing limits it
    year: int = 0
    parts: Parts = field(default_factory=Parts)

    def position_encoding(self) -> Rotary | RelativeBias | None:
        """A fresh position encoding for one layer, or None where positions are added to the tokens."""
        return self.encoding_of(None)

    def encoding_of(self, layer: int | None) -> Rotary | RelativeBias | None:
        """A fresh position encoding for the layer of a number; None: of one that sees everything, where they differ."""
        head_dim = self.head_dim or self.embed_dim // self.num_heads
        if self.positions == "relative":
            return RelativeBias(self.num_heads, bidirectional=not self.causal)
        every = self.parts.no_rotary_every
        if self.positions != "rotary" or (layer is not None and every is not None and (layer + 1) % every == 0):
            return None
        local = self.parts.local_rotary_base
        if layer is not None and local is not None and self.kinds[layer] == "window":
            return Rotary(head_dim, base=local, width=self.rotary_width)
        options: dict[str, Any] = {"base": self.rotary_base, "width": self.rotary_width, "scaling": self.rotary_scaling}
        sections = self.parts.sections
        return MultiAxisRotary(head_dim, sections, **options) if sections else Rotary(head_dim, **options)

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """What each layer sees: "full", "window", "chunk", or "linear" for one that keeps a state and no keys.

        >>> configuration("gpt-oss-20b").kinds[:3]
        ('window', 'full', 'window')
        """
        pattern = self.parts.pattern or (("full",) if self.window is None else ("window",))
        return tuple(pattern[i % len(pattern)] for i in range(self.layers))

    def kept(self, layer: int) -> int:
        """How many numbers a token leaves in the cache of a layer.

        >>> deepseek = configuration("deepseek-v3")
        >>> deepseek.kept(0), 2 * 61 * deepseek.kept(0)  # 512 + 64 of them; bytes of all layers, in bfloat16
        (576, 70272)
        """
        if not self.causal or self.kinds[layer] == "linear" or layer >= self.layers - self.parts.shared_kv_layers:
            return 0
        if self.parts.latent is not None:
            return self.parts.latent.kv_rank + self.parts.latent.rotary_dim
        return 2 * (self.num_kv_heads or self.num_heads) * (self.head_dim or self.embed_dim // self.num_heads)

    def kept_by_all_heads(self) -> int:
        """How many it would be if each query head of every layer kept keys and values of its own: D numbers each."""
        latent = self.parts.latent
        if latent is not None:
            return self.num_heads * (latent.head_dim + latent.rotary_dim + latent.value_head_dim)
        return 2 * self.num_heads * (self.head_dim or self.embed_dim // self.num_heads)


def _bert(layers: int, width: int, heads: int, year: int, context: int = 512) -> Configuration:
    return Configuration(layers, width, heads, context=context, year=year)


def _gpt(layers: int, width: int, heads: int, year: int = 2019, context: int = 1024) -> Configuration:
    return Configuration(layers, width, heads, causal=True, context=context, year=year)


def _t5(layers: int, width: int, heads: int) -> Configuration:
    return Configuration(layers, width, heads, head_dim=64, bias=False, scale=1.0, positions="relative", year=2019)


def _llama(
    year: int, layers: int, width: int, heads: int, kv_heads: int, base: float, context: int, **more: Any
) -> Configuration:
    """A decoder with grouped kv heads and rotary, without biases; `more` are fields of `Configuration`."""
    fields: dict[str, Any] = {"bias": False, "out_bias": False, "positions": "rotary", "causal": True} | more
    return Configuration(layers, width, heads, kv_heads, rotary_base=base, context=context, year=year, **fields)


def _then_full(kind: LayerKind, count: int) -> tuple[LayerKind, ...]:
    """So many layers of a kind, then one that sees everything."""
    return (kind,) * count + ("full",)


CONFIGURATIONS: dict[str, Configuration] = {
    "bert-base": _bert(12, 768, 12, 2018),
    "bert-large": _bert(24, 1024, 16, 2018),
    "minilm": _bert(6, 384, 12, 2020),
    "vit-b16": _bert(12, 768, 12, 2020, context=197),
    "gpt2": _gpt(12, 768, 12),
    "gpt2-medium": _gpt(24, 1024, 16),
    "gpt2-large": _gpt(36, 1280, 20),
    "gpt2-xl": _gpt(48, 1600, 25),
    "gpt3": _gpt(96, 12288, 96, 2020, context=2048),
    "t5-small": _t5(6, 512, 8),
    "t5-base": _t5(12, 768, 12),
    "pythia-160m": Configuration(
        12, 768, 12, positions="rotary", rotary_width=16, causal=True, context=2048, year=2023
    ),
    "llama2-7b": _llama(2023, 32, 4096, 32, 32, 1e4, 4096),
    "llama3-8b": _llama(2024, 32, 4096, 32, 8, 5e5, 8192),
    "llama3.1-8b": _llama(2024, 32, 4096, 32, 8, 5e5, 131072, rotary_scaling=Llama3(8.0, 1.0, 4.0, 8192)),
    "mistral-7b": _llama(2023, 32, 4096, 32, 8, 1e4, 32768, window=4096),
    "smollm2-135m": _llama(2024, 30, 576, 9, 3, 1e5, 8192),
    "qwen2.5-0.5b": _llama(2024, 24, 896, 14, 2, 1e6, 32768, bias=True),
    "qwen3-0.6b": _llama(2025, 28, 1024, 16, 8, 1e6, 40960, head_dim=128, qk_norm="rms"),
    "gemma2-2b": _llama(
        2024, 26, 2304, 8, 4, 1e4, 8192, head_dim=256, window=4096, parts=Parts(("window", "full"), softcap=50.0)
    ),
    "modernbert-base": Configuration(
        22,
        768,
        12,
        bias=False,
        positions="rotary",
        rotary_base=160000.0,
        window=128,
        context=8192,
        year=2024,
        parts=Parts(("full", "window", "window"), local_rotary_base=1e4),
    ),
    "deepseek-v3": _llama(
        2024,
        61,
        7168,
        128,
        128,
        1e4,
        163840,
        head_dim=192,
        scale=192**-0.5 * (0.1 * math.log(40.0) + 1) ** 2,
        rotary_width=64,
        rotary_scaling=YaRN(40.0, 4096, mscale=1.0, mscale_all_dim=1.0),
        parts=Parts(latent=Latent(512, 64, 128, 128, query_rank=1536)),
    ),
    "mistral-small-24b": _llama(2025, 40, 5120, 32, 8, 1e8, 32768, head_dim=128),
    "qwen2.5-vl-72b": _llama(2025, 80, 8192, 64, 8, 1e6, 32768, bias=True, parts=Parts(sections=(16, 24, 24))),
    "gemma3-4b": _llama(
        2025,
        34,
        2560,
        8,
        4,
        1e6,
        131072,
        head_dim=256,
        qk_norm="rms",
        rotary_scaling=LinearScaling(8.0),
        window=1024,
        parts=Parts(_then_full("window", 5), local_rotary_base=1e4),
    ),
    "llama4-scout": _llama(
        2025,
        48,
        5120,
        40,
        8,
        5e5,
        10485760,
        head_dim=128,
        parts=Parts(_then_full("chunk", 3), chunk=8192, no_rotary_every=4, norm_after_rotary=True, temperature=True),
    ),
    "gemma3n-e4b": _llama(
        2025,
        35,
        2048,
        8,
        2,
        1e6,
        32768,
        head_dim=256,
        scale=1.0,
        qk_norm="rms",
        window=512,
        parts=Parts(_then_full("window", 4), local_rotary_base=1e4, v_norm=True, shared_kv_layers=15),
    ),
    "smollm3-3b": _llama(2025, 36, 2048, 16, 4, 5e6, 65536, parts=Parts(no_rotary_every=4)),
    "gpt-oss-20b": _llama(
        2025,
        24,
        2880,
        64,
        8,
        1.5e5,
        131072,
        head_dim=64,
        bias=True,
        out_bias=True,
        rotary_scaling=YaRN(32.0, 4096, truncate=False),
        window=128,
        parts=Parts(("window", "full"), sinks=True),
    ),
    "qwen3-next-80b": _llama(
        2025,
        48,
        2048,
        16,
        2,
        1e7,
        262144,
        head_dim=256,
        rotary_width=64,
        qk_norm="rms",
        parts=Parts(_then_full("linear", 3), gate=True),
    ),
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
