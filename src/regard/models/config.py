"""The sizes and choices that define a model: `ModelConfig`. `families.py` makes one from a config.json.

Letters: W model width, H query heads, G kv heads, D head width, F width of the feed-forward part, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal, get_args, get_type_hints

from regard.errors import bad_value
from regard.models.fields import WIDTH
from regard.presets import Configuration
from regard.projections import ACTIVATIONS

__all__ = ["ModelConfig"]


@dataclass(frozen=True)
class ModelConfig(Configuration):
    """The sizes and choices of a whole model; those of its attention layers are the fields of `Configuration`.

    Attributes:
        family: config.json's `model_type`.
        kind: "encoder" (each token sees all) or "decoder" (each token sees those before it).
        vocabulary: V, rows of the token embedding.
        inner: F.
        norm: "layer" (LayerNorm) or "rms" (RMSNorm), with `norm_eps`.
        order: where the norms are: "post" (after the residual), "pre" (before each part), or "parallel" (before each
            part, and both parts read the same residual).
        activation: one of `regard.projections.ACTIVATIONS`; `gated`: whether it is multiplied by a second projection.
        mlp_bias: whether the feed-forward projections have a bias.
        first_position: index of the first learned position that is used (RoBERTa: 2).
        token_types: rows of the token type embedding; 0 for none.
        windows: the sliding window of each layer, in tokens, the query included; None for no window.
        scales: the scale of each layer, if they differ.
        placed: whether each layer has the position encoding, if some have none (SmolLM3).
        tied: whether the head's weight is the token embedding's.
        bos, eos, pad: token ids; generation ends at any of `eos`.
        pooling: how `Encoder.embed` pools token vectors: "mean" or "cls"; `normalised`: whether to length 1.
        not_pooled: why `Encoder.embed` cannot pool as the model was trained; empty if it can.
        embed_length: `Encoder.embed` truncates texts to so many tokens. None: the context.
    """

    family: str = ""
    kind: Literal["encoder", "decoder"] = "encoder"
    vocabulary: int = 0
    inner: int = 0
    norm: Literal["layer", "rms"] = "layer"
    norm_eps: float = 1e-5
    order: Literal["pre", "post", "parallel"] = "pre"
    activation: str = "gelu"
    gated: bool = False
    mlp_bias: bool = True
    first_position: int = 0
    token_types: int = 0
    windows: tuple[int | None, ...] | None = None
    scales: tuple[float, ...] | None = None
    placed: tuple[bool, ...] | None = None
    tied: bool = False
    bos: int | None = None
    eos: tuple[int, ...] = ()
    pad: int | None = None
    pooling: Literal["mean", "cls"] = "mean"
    normalised: bool = True
    embed_length: int | None = None
    not_pooled: str = ""

    def __post_init__(self) -> None:
        for what in ("layers", "embed_dim", "num_heads", "vocabulary", "inner"):
            if type(value := getattr(self, what)) is not int or value < 1:
                raise bad_value(what, expected="a positive integer", received=repr(value))
        kv_heads = self.num_heads if self.num_kv_heads is None else self.num_kv_heads
        if type(kv_heads) is not int or kv_heads < 1 or self.num_heads % kv_heads:
            raise bad_value("num_kv_heads", expected=f"a divisor of num_heads = {self.num_heads}", received=kv_heads)
        if self.head_dim is None and self.embed_dim % self.num_heads:
            raise bad_value("num_heads", expected=f"a divisor of the width {self.embed_dim}", received=self.num_heads)
        for what, given in (
            ("head_dim", self.head_dim),
            ("context", self.context or None),
            ("window", self.window),
            *(("windows", window) for window in self.windows or ()),
        ):
            if given is not None and (type(given) is not int or given < 1):
                raise bad_value(what, expected="a positive integer, or None", received=repr(given))
        if (self.head_dim or 0) * self.num_heads > WIDTH:
            raise bad_value(
                "head_dim",
                expected=f"a total width of all heads of at most {WIDTH}",
                received=f"{self.num_heads} heads of width {self.head_dim}",
            )
        for what in ("windows", "scales", "placed"):
            if (given := getattr(self, what)) is not None and len(given) != self.layers:
                raise bad_value(what, expected=f"one for each of {self.layers} layers", received=len(given))
        for what, allowed in _choices().items():
            if (given := getattr(self, what)) not in allowed:
                raise bad_value(what, expected=" or ".join(map(repr, allowed)), received=repr(given))
        if self.activation not in ACTIVATIONS:
            raise bad_value("activation", expected=f"one of {', '.join(ACTIVATIONS)}", received=repr(self.activation))
        numbers = {"norm_eps": self.norm_eps, "rotary_base": self.rotary_base, "scale": self.scale}
        for what, given in (*numbers.items(), *(("scales", scale) for scale in self.scales or ())):
            if given is not None and not (isinstance(given, (int, float)) and 0 < given <= 1e30):
                raise bad_value(what, expected="a positive finite number", received=repr(given))
        if self.positions == "learned" and not self.context:
            raise bad_value("context", expected="the number of learned positions", received=self.context)

    def window_of(self, layer: int) -> int | None:
        """The sliding window of a layer, in tokens, the query included; None for no window."""
        return self.window if self.windows is None else self.windows[layer]

    def scale_of(self, layer: int) -> float | None:
        """The scale of a layer's scores; None for D ** -0.5."""
        return self.scale if self.scales is None else self.scales[layer]

    def has_positions(self, layer: int) -> bool:
        """Whether a layer has the position encoding."""
        return self.placed is None or self.placed[layer]


@cache
def _choices() -> dict[str, tuple[str, ...]]:
    """The fields with a fixed set of values, and those values. (Cached, since every block makes a config.)"""
    hints = get_type_hints(ModelConfig)
    return {what: get_args(hints[what]) for what in ("kind", "norm", "order", "pooling")}
