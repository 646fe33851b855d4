"""Canonical tensors to a layer and back. Sizes are read from the shapes, and checked before anything is built.

Letters: H query heads, G kv heads, D head width of q and k, E head width of v, W model width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from regard.errors import bad_value, shape_of
from regard.layer import AttentionBlock, Gate, MultiHeadAttention, Norm, ValueMix
from regard.layer.norm import as_norm
from regard.layouts.base import Layout, Tensors
from regard.norms import ZeroCentredRMSNorm
from regard.positions import Alibi, RelativeBias, Rotary

__all__ = ["build", "build_block", "check_biases", "check_expressible", "divide", "relative_bias", "sizes", "take"]

_STEMS = ("q_proj", "k_proj", "v_proj", "out_proj")
_NOT_STORED = ("position_encoding.", "value_mix.")  # parts that the caller makes, where the weights do not have them


def sizes(tensors: Tensors, num_heads: int, layout: Layout) -> dict[str, Any]:
    """The arguments of `MultiHeadAttention` that follow from the shapes. Raises if the shapes contradict each other."""

    def check_shape(key: str, *shape: int) -> None:
        if key in tensors and tuple(tensors[key].shape) != shape:
            raise bad_value(
                layout.keys.get(key, key),
                expected=f"shape {shape}, for {num_heads} heads and the other tensors",
                received=shape_of(tensors[key]),
                remedy="check num_heads and layout",
            )

    if layout.shares_kv:
        return _sizes_without_keys(tensors, num_heads, check_shape)
    weights = [_matrix(tensors, stem) for stem in _STEMS]
    (q_rows, query_dim), (k_rows, key_dim), (v_rows, value_dim), (embed_dim, _) = (tuple(w.shape) for w in weights)
    divide("num_heads", num_heads, q_rows, "rows of q")
    head_dim = q_rows // num_heads
    if k_rows % head_dim or num_heads % (kv_heads := k_rows // head_dim):
        raise bad_value(
            layout.keys.get("k_proj.weight", "k"),
            expected=f"G * {head_dim} rows, with G a divisor of num_heads = {num_heads}",
            received=f"{k_rows} rows",
            remedy="check num_heads",
        )
    divide("kv heads", kv_heads, v_rows, "rows of v")
    value_head_dim = v_rows // kv_heads
    check_shape("out_proj.weight", embed_dim, num_heads * value_head_dim)
    for stem, weight in zip(_STEMS, weights, strict=True):
        check_shape(f"{stem}.bias", weight.shape[0])
    over_width = _norm_over(tensors, num_heads * head_dim, head_dim) == "width"
    for key, rows in (("q_norm", q_rows), ("k_norm", k_rows), ("v_norm", v_rows)):
        width = value_head_dim if key == "v_norm" else head_dim
        for kind in ("weight", "bias"):
            check_shape(f"{key}.{kind}", rows if over_width and key != "v_norm" else width)
    if "gate_proj.weight" in tensors and tensors["gate_proj.weight"].shape[0] != num_heads:
        check_shape("gate_proj.weight", num_heads * value_head_dim, query_dim)
    check_shape("sinks", num_heads)
    check_shape("norm.weight", embed_dim)
    check_shape("norm.bias", embed_dim)
    return {
        "embed_dim": embed_dim,
        "num_heads": num_heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "value_head_dim": value_head_dim,
        "query_dim": query_dim,
        "key_dim": key_dim,
        "value_dim": value_dim,
    }


def _matrix(tensors: Tensors, stem: str) -> Tensor:
    weight = tensors[f"{stem}.weight"]
    if weight.dim() != 2:
        raise bad_value(f"{stem}.weight", expected="shape (out, in)", received=shape_of(weight))
    return weight


def _sizes_without_keys(tensors: Tensors, num_heads: int, check_shape: Callable[..., None]) -> dict[str, Any]:
    """`sizes` of a layer that attends to another one's keys and values; the caller says how many heads these have."""
    (rows, width), (embed_dim, columns) = (tuple(_matrix(tensors, stem).shape) for stem in ("q_proj", "out_proj"))
    divide("num_heads", num_heads, rows, "rows of q")
    divide("num_heads", num_heads, columns, "columns of out")
    head_dim = rows // num_heads
    check_shape("q_norm.weight", head_dim)
    return {
        "embed_dim": embed_dim,
        "num_heads": num_heads,
        "head_dim": head_dim,
        "value_head_dim": columns // num_heads,
        "query_dim": width,
        "key_dim": width,
        "shares_kv": True,
    }


def _norm_over(tensors: Tensors, width: int, head_dim: int) -> Literal["head", "width"]:
    """Whether the norm of q is one of each head, or of all heads together."""
    weight = tensors.get("q_norm.weight")
    return "width" if weight is not None and tuple(weight.shape) == (width,) != (head_dim,) else "head"


def divide(what: str, number: int, rows: int, of: str) -> None:
    """Raise if `number` does not divide the rows."""
    if not isinstance(number, int) or number < 1 or rows % number:
        raise bad_value(what, expected=f"a divisor of the {rows} {of}", received=repr(number))


def build(tensors: Tensors, size: Mapping[str, Any], options: Mapping[str, Any]) -> MultiHeadAttention:
    """A layer of these sizes that holds copies of these tensors, in their dtype and on their device."""
    options = dict(options)
    options["qk_norm"] = _norm_option(tensors, size, options)
    if "v_norm.weight" in tensors:
        options.setdefault("v_norm", "layer" if "v_norm.bias" in tensors else "rms")
    if "gate_proj.weight" in tensors or options.get("gate") is not None:
        options["gate"] = _gate_option(tensors, size["num_heads"], options.get("gate"))
    if "value_mix.weight" in tensors and "value_mix" not in options:
        options["value_mix"] = ValueMix()
    with torch.device("meta"):  # no random initialisation, which would be overwritten
        layer = MultiHeadAttention(**size, sinks="sinks" in tensors, **options)
    for stem in (*_STEMS, "q_norm", "k_norm", "v_norm"):
        if f"{stem}.bias" not in tensors and getattr(getattr(layer, stem), "bias", None) is not None:
            getattr(layer, stem).bias = None
    assign(layer, tensors)
    return layer


def _norm_option(tensors: Tensors, size: Mapping[str, Any], options: Mapping[str, Any]) -> Norm | None:
    """The norm of q and k: as the caller or the layout says, over what the shapes say."""
    given = as_norm("qk_norm", options.get("qk_norm"))
    expected = ["q_norm.weight"] if size.get("shares_kv") else ["q_norm.weight", "k_norm.weight"]
    stored = [key for key in ("q_norm.weight", "k_norm.weight") if key in tensors]
    if given is None and stored:
        given = as_norm("qk_norm", "layer" if "q_norm.bias" in tensors else "rms")
    wanted = [] if given is None or given.weight == "none" else expected
    if stored != wanted:
        raise bad_value(
            "qk_norm",
            expected="weights of a norm of q and of k, or of neither",
            received=f"qk_norm={options.get('qk_norm')!r} with {stored or 'no such keys'}",
        )
    if given is None or not stored:
        return given
    return replace(given, over=_norm_over(tensors, size["num_heads"] * size["head_dim"], size["head_dim"]))


def _gate_option(tensors: Tensors, num_heads: int, given: Gate | None) -> Gate:
    """The gate: its activation as the caller says (a sigmoid by default), for what the shapes say."""
    weight = tensors.get("gate_proj.weight")
    if weight is None:
        raise bad_value("gate", expected="None: the weights have no gate", received=repr(given))
    gate = Gate() if given is None else given
    per = "head" if weight.shape[0] == num_heads else "element"
    return replace(gate, per=per, bias="gate_proj.bias" in tensors)


def build_block(
    tensors: Tensors, size: Mapping[str, Any], options: Mapping[str, Any], **block_options: Any
) -> AttentionBlock:
    """As `build`, with the LayerNorm of a block."""
    layer = build({key: t for key, t in tensors.items() if not key.startswith("norm.")}, size, options)
    block = AttentionBlock(layer, **block_options)
    if "norm.bias" not in tensors:
        block.norm.bias = None  # type: ignore[assignment]
    assign(block.norm, {key.removeprefix("norm."): t for key, t in tensors.items() if key.startswith("norm.")})
    return block


def assign(module: nn.Module, tensors: Tensors) -> None:
    """Set the module's parameters to copies of the tensors."""
    copies = {key: tensor.detach().clone(memory_format=torch.contiguous_format) for key, tensor in tensors.items()}
    keys = module.load_state_dict(copies, strict=False, assign=True)
    assert not keys.unexpected_keys and all(key.startswith(_NOT_STORED) for key in keys.missing_keys), keys


def take(module: MultiHeadAttention | AttentionBlock) -> tuple[MultiHeadAttention, Tensors]:
    """The layer, and its canonical tensors."""
    layer = module.layer if isinstance(module, AttentionBlock) else module
    tensors = layer.state_dict()
    if isinstance(module, AttentionBlock):
        tensors |= {f"norm.{key}": tensor for key, tensor in module.norm.state_dict().items()}
    return layer, dict(tensors)


def check_biases(tensors: Tensors, layout: Layout, *, remedy: str) -> None:
    """Raise if the layout does not allow this combination of biases of q, k, v and out."""
    present = "".join(letter for letter, stem in zip("qkvo", _STEMS, strict=True) if f"{stem}.bias" in tensors)
    if layout.biases is not None and present not in layout.biases:
        raise bad_value(
            f"biases of layout {layout.name!r}",
            expected=" or ".join(map(_in_words, layout.biases)),
            received=_in_words(present),
            remedy=remedy,
        )


def _in_words(pattern: str) -> str:
    return "on " + ", ".join("out" if letter == "o" else letter for letter in pattern) if pattern else "none"


def check_expressible(module: MultiHeadAttention | AttentionBlock, layout: Layout) -> None:
    """Raise if the layer has a feature that the layout's originals do not support."""
    layer = module.layer if isinstance(module, AttentionBlock) else module
    if isinstance(module, AttentionBlock) and not (layout.has_norm and module.order == "post"):
        expected = "a LayerNorm after the residual" if layout.has_norm else "a layer without a LayerNorm"
        raise bad_value(
            f"export as {layout.name!r}",
            expected=expected,
            received=f"an AttentionBlock with norm={module.order!r}",
            remedy="export block.layer, and store block.norm separately",
        )
    for feature, received in _features(layer, layout).items():
        if feature not in layout.can:
            raise bad_value(
                f"export as {layout.name!r}",
                expected=f"no {feature} that differs from {layout.origin}",
                received=received,
                remedy="export as 'separate', which has names for all weights",
            )


def _features(layer: MultiHeadAttention, layout: Layout) -> dict[str, str]:
    """The features of `EVERYTHING` that a layer has, each with the arguments that show it."""
    width, heads, head_dim = layer.embed_dim, layer.num_heads, layer.head_dim
    default_scale = layout.options.get("scale", head_dim**-0.5)
    encoding = layer.position_encoding
    features = {
        "kv heads": (layer.num_kv_heads != heads, f"num_kv_heads={layer.num_kv_heads}, num_heads={heads}"),
        "value head width": (
            layer.value_head_dim != head_dim,
            f"value_head_dim={layer.value_head_dim}, head_dim={head_dim}",
        ),
        "inner width": (heads * head_dim != width, f"{heads} heads of {head_dim}, embed_dim={width}"),
        "query width": (layer.query_dim != width, f"query_dim={layer.query_dim}, embed_dim={width}"),
        "key and value widths": (
            {layer.key_dim, layer.value_dim} != {width},
            f"key_dim={layer.key_dim}, value_dim={layer.value_dim}, embed_dim={width}",
        ),
        "rotary": (isinstance(encoding, Rotary), "position_encoding=Rotary"),
        "alibi": (isinstance(encoding, Alibi), "position_encoding=Alibi"),
        "scale": (
            (head_dim**-0.5 if layer.scale is None else layer.scale) != default_scale,
            f"scale={layer.scale or f'{head_dim} ** -0.5'}",
        ),
        "softcap": (layer.softcap is not None, f"softcap={layer.softcap}"),
        **_features_of_parts(layer, layout),
    }
    return {feature: received for feature, (present, received) in features.items() if present}


def _features_of_parts(layer: MultiHeadAttention, layout: Layout) -> dict[str, tuple[bool, str]]:
    """The same of norms, gate and query scale: whether they are others than the layout's originals have."""
    implied = as_norm("qk_norm", layout.options.get("qk_norm")) or Norm()
    weight, gate = _weight_of(layer.q_norm), layer.gate
    return {
        "kind of q and k norm": (weight not in (None, implied.weight), f"qk_norm=Norm(weight={weight!r})"),
        "v norm": ((layer.v_norm is None) != (layout.options.get("v_norm") is None), f"v_norm: {layer.v_norm}"),
        "gate per head": (gate is not None and gate.per == "head", f"gate={gate}"),
        "gate activation": (gate is not None and gate.activation != "sigmoid", f"gate={gate}"),
        "query scale": (layer.query_scale is not None, f"query_scale={layer.query_scale}"),
    }


def _weight_of(norm: nn.Module | None) -> str | None:
    """The `Norm.weight` that a norm was made with."""
    if norm is None:
        return None
    if isinstance(norm, ZeroCentredRMSNorm):
        return "zero-centred"
    return "none" if next(norm.parameters(), None) is None else "plain"


def relative_bias(weight: Tensor, num_heads: int, **options: Any) -> RelativeBias:
    """A `RelativeBias` for a weight (buckets, heads)."""
    if weight.dim() != 2 or weight.shape[1] != num_heads:
        raise bad_value("relative position bias", expected=f"shape (buckets, {num_heads})", received=shape_of(weight))
    with torch.device("meta"):  # `assign` sets the weight
        return RelativeBias(num_heads, num_buckets=weight.shape[0], **options)
