"""What a caller of the layer got wrong, in words.

Letters: B batch, N queries, M keys, W model width.
"""

from __future__ import annotations

from torch import Tensor, nn

from regard.cache import KVCache, RollingCache
from regard.errors import bad_type, bad_value, shape_of
from regard.kernels.precision import mixed_precision
from regard.positions import Rotary

__all__ = ["SIZES", "check_inputs", "check_settings", "check_sizes", "check_types"]

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
