"""What a caller of the layer got wrong, in words.

Letters: B batch, N queries, M keys, W model width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from regard.cache import KVCache, RollingCache
from regard.errors import bad_type, bad_value, shape_of
from regard.kernels.precision import mixed_precision
from regard.layer.gate import Gate
from regard.layer.key_values import KeyValues
from regard.layer.value_mix import ValueMix
from regard.positions import MultiAxisRotary, Rotary, Temperature

if TYPE_CHECKING:
    from regard.layer.multi_head_attention import MultiHeadAttention

__all__ = [
    "SIZES",
    "check_axes_given",
    "check_inputs",
    "check_parts",
    "check_settings",
    "check_shared",
    "check_sizes",
    "check_types",
]

# The arguments of the layer that are sizes
SIZES = ("embed_dim", "num_heads", "num_kv_heads", "head_dim", "value_head_dim", "query_dim", "key_dim", "value_dim")


def check_sizes(sizes: dict[str, int | None]) -> None:
    """Raise unless the sizes are positive integers that divide each other as they must."""
    for name, size in sizes.items():
        if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
            raise bad_value(name, expected="an integer of at least 1", received=repr(size))
    embed_dim, num_heads, num_kv_heads = (sizes[name] or 1 for name in ("embed_dim", "num_heads", "num_kv_heads"))
    if sizes["head_dim"] is None and embed_dim % num_heads:
        raise bad_value(
            "num_heads",
            expected=f"a divisor of embed_dim = {embed_dim}",
            received=num_heads,
            remedy="pass head_dim, which frees the head's width",
        )
    if num_heads % num_kv_heads:
        raise bad_value("num_kv_heads", expected=f"a divisor of num_heads = {num_heads}", received=num_kv_heads)


def check_settings(dropout: object, position_encoding: object, init: object, head_dim: int) -> None:
    """Raise unless these arguments of the layer are what they should be."""
    if isinstance(dropout, bool) or not isinstance(dropout, (int, float)):
        raise bad_type("dropout", expected="a number", received=f"{type(dropout).__name__} {dropout!r}")
    if not 0.0 <= dropout <= 1.0:
        raise bad_value("dropout", expected="a probability from 0 to 1", received=dropout)
    if isinstance(position_encoding, Rotary) and position_encoding.head_dim != head_dim:
        raise bad_value(
            "position_encoding", expected=f"Rotary of head width {head_dim}", received=f"{position_encoding.head_dim}"
        )
    if position_encoding is not None and not isinstance(position_encoding, nn.Module):
        raise bad_type(
            "position_encoding",
            expected="Rotary, Alibi, RelativeBias or None",
            received=type(position_encoding).__name__,
            remedy=f"regard.positions.Rotary({head_dim})",
        )
    if init not in ("xavier", "normal"):
        raise bad_value("init", expected='"xavier" or "normal"', received=repr(init))


def check_parts(gate: object, query_scale: object, value_mix: object, *, shares_kv: object, v_norm: object) -> None:
    """Raise unless the parts of the layer are of their kinds, and fit each other."""
    for what, part, kind, remedy in (
        ("gate", gate, Gate, 'regard.layer.Gate("element")'),
        ("query_scale", query_scale, Temperature, "regard.positions.Temperature(8192)"),
        ("value_mix", value_mix, ValueMix, "regard.layer.ValueMix()"),
    ):
        if part is not None and not isinstance(part, kind):
            raise bad_type(
                what, expected=f"a {kind.__name__} or None", received=f"{type(part).__name__} {part!r}", remedy=remedy
            )
    if not isinstance(shares_kv, bool):
        raise bad_type("shares_kv", expected="True or False", received=f"{type(shares_kv).__name__} {shares_kv!r}")
    for what, part in (("v_norm", v_norm), ("value_mix", value_mix)):
        if shares_kv and part is not None:
            raise bad_value(
                what,
                expected="None: with shares_kv the values are another layer's",
                received=repr(part),
                remedy=f"give the {what} to the layer that computes them",
            )


def check_shared(
    layer: MultiHeadAttention,
    cache: KVCache | RollingCache | None,
    self_attention: bool,
    value_residual: object,
    share: object,
    source: object,
) -> None:
    """Raise where what layers share, or a cache, does not fit this layer's parts."""
    if isinstance(cache, RollingCache):
        for what, part in (
            ("query_scale", layer.query_scale),
            ("MultiAxisRotary", layer.position_encoding if _has_axes(layer) else None),
        ):
            if part is not None:
                raise bad_type(
                    "cache",
                    expected=f"a KVCache: a RollingCache numbers its tokens anew, which {what} cannot follow",
                    received="a RollingCache",
                    remedy="KVCache(), and masks.Window where a window is meant",
                )
    if share is not None and not isinstance(share, KeyValues):
        raise bad_type("share", expected="an empty KeyValues", received=type(share).__name__, remedy="KeyValues()")
    if share is not None and cache is not None and cache.complete:
        raise bad_value("share", expected="new keys and values", received="a KVCache(once=True) that has them already")
    if value_residual is not None and layer.value_mix is None:
        raise bad_value(
            "value_residual",
            expected="none: this layer has no value_mix",
            received=type(value_residual).__name__,
            remedy="MultiHeadAttention(..., value_mix=ValueMix())",
        )
    if not layer.shares_kv:
        if source is not None:
            raise bad_value(
                "source",
                expected="none: this layer has keys and values of its own",
                received=type(source).__name__,
                remedy="MultiHeadAttention(..., shares_kv=True)",
            )
        return
    for what, given, why in (
        ("cache", cache is not None, "the keys and values are in the other layer's"),
        ("share", share is not None, "share those of the layer that computes them"),
        ("key", not self_attention, "the keys and values are those of `source`"),
    ):
        if given:
            raise bad_value(what, expected=f"none: this layer has shares_kv=True, {why}", received=f"{what}=")


def _has_axes(layer: MultiHeadAttention) -> bool:
    return isinstance(layer.position_encoding, MultiAxisRotary)


def check_axes_given(continues: bool) -> None:
    """Raise where positions of several axes are left out although the keys there are may have been anywhere."""
    if continues:
        raise bad_value(
            "positions",
            expected="(N, A) or (B, N, A): with a MultiAxisRotary only the caller knows where earlier keys stand",
            received="none",
            remedy="torch.arange(len(cache), len(cache) + N), where all tokens were text",
        )


def check_types(query: object, key: object, value: object, cache: object) -> None:
    """Raise unless the arguments of a call are tensors and a cache."""
    for what, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, Tensor) and (x is not None or what == "query"):
            raise bad_type(what, expected="a tensor", received=type(x).__name__, remedy="torch.as_tensor(...)")
    if cache is not None and not isinstance(cache, (KVCache, RollingCache)):
        raise bad_type(
            "cache",
            expected="a KVCache or a RollingCache",
            received=type(cache).__name__,
            remedy="cache=regard.KVCache(), one for each layer",
        )


def check_inputs(query: Tensor, key: Tensor, value: Tensor, widths: tuple[int, int, int], weight: object) -> None:
    """Raise unless query (B, N, W), key (B, M, W) and value (B, M, W) fit each other and the layer's weight."""
    inputs = ("query", query, widths[0]), ("key", key, widths[1]), ("value", value, widths[2])
    if key is query and value is query and widths[0] == widths[1] == widths[2]:
        inputs = inputs[:1]  # the others are the same
    for what, x, width in inputs:
        if x.dim() != 3 or x.shape[-1] != width:
            raise bad_value(
                what,
                expected=f"shape (B, length, {width}) or (length, {width})",
                received=shape_of(x),
                remedy="inputs are batch first; widths are set by query_dim, key_dim, value_dim",
            )
        if x.shape[0] != query.shape[0]:
            raise bad_value(what, expected=f"a batch of {query.shape[0]}, as the query's", received=shape_of(x))
    if key.shape[1] != value.shape[1]:
        raise bad_value("key, value", expected="the same length", received=f"{shape_of(key)}, {shape_of(value)}")
    if not isinstance(weight, Tensor):  # a quantised projection's is a method
        return
    device, dtype = weight.device, weight.dtype
    for what, x, _ in inputs:
        if x.device != device:
            raise bad_value(
                what,
                expected=f"device {device}, as the layer's weights",
                received=x.device,
                remedy=f"layer.to(device) or {what}.to(device)",
            )
        if x.dtype != dtype and not mixed_precision(device.type):
            raise bad_type(
                what,
                expected=f"{dtype}, as the layer's weights",
                received=x.dtype,
                remedy=f"layer.to(dtype), {what}.to(dtype) or torch.autocast",
            )
