"""From a preset to the arguments of `MultiHeadAttention`: which parts the layers of a well-known model have."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from regard.errors import bad_value
from regard.layer.gate import Gate
from regard.layer.norm import Norm
from regard.positions import Temperature
from regard.presets import Configuration

__all__ = ["layer_options"]

_SIZES = ("embed_dim", "num_heads", "num_kv_heads", "head_dim", "bias", "out_bias", "scale", "qk_norm")


def layer_options(config: Configuration, layer: int | None = None, **changes: Any) -> dict[str, Any]:
    """The arguments of `MultiHeadAttention` for the layer of a number (None: of one that sees everything, where layers
    differ), with `changes`. Raises, in words, if that class has no such layer.

    >>> from regard.presets import configuration
    >>> layer_options(configuration("gpt-oss-20b"))["sinks"]
    True
    """
    config = replace(config, **{name: changes[name] for name in _SIZES if name in changes})
    parts = config.parts
    _check(config, layer)
    options: dict[str, Any] = {name: getattr(config, name) for name in _SIZES}
    options |= {"softcap": parts.softcap, "sinks": parts.sinks}
    encoding = config.encoding_of(layer)
    if "position_encoding" not in changes:
        options["position_encoding"] = encoding
    if parts.gate:
        options["gate"] = Gate()
    if layer is not None and layer >= config.layers - parts.shared_kv_layers:
        options["shares_kv"] = True
    elif parts.v_norm:
        options["v_norm"] = Norm(weight="none")
    if parts.norm_after_rotary and encoding is not None:  # (without weights the same before and after)
        options["qk_norm"] = Norm(weight="none")
    if parts.temperature and encoding is None:
        options["query_scale"] = Temperature()
    return options | changes


def _check(config: Configuration, layer: int | None) -> None:
    latent = config.parts.latent
    if latent is not None:
        raise bad_value(
            "configuration",
            expected="a layer that MultiHeadAttention can be",
            received=f"keys and values of one latent vector of {latent.kv_rank} per token",
            remedy="regard.LatentAttention",
        )
    if layer is not None and not 0 <= layer < config.layers:
        raise bad_value("layer", expected=f"a number from 0 to {config.layers - 1}", received=layer)
    if layer is not None and config.kinds[layer] == "linear":
        others = [str(i) for i, kind in enumerate(config.kinds) if kind != "linear"]
        raise bad_value(
            "configuration",
            expected="a layer of attention",
            received=f"layer {layer}, of linear attention",
            remedy=f"one of {', '.join(others[:3])}, ...",
        )
