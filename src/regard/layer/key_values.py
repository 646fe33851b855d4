"""What one layer attended to, for other layers of the same forward pass: to attend to it too, or to add its values.

Letters: B batch, G kv heads, N new tokens, M keys, D head width of keys, E head width of values.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from regard.cache import KVCache, RollingCache, Slots
from regard.errors import bad_type, bad_value, shape_of

if TYPE_CHECKING:
    from regard.layer.multi_head_attention import MultiHeadAttention

__all__ = ["KeyValues", "read_source"]


class KeyValues:
    """Keys and values of one call of a layer, filled by `layer(x, share=...)`. Make a new one in each forward pass.

    A layer with `shares_kv=True` attends to them (`source=`), one with a `value_mix` mixes its own values with those of
    the new tokens (`value_residual=`). They carry gradients. With a cache, `keys` and `values` are views into it, valid
    until it next changes.

    Attributes:
        keys: (B, G, M, D), normalised and rotated, cached ones first.
        values: (B, G, M, E).
        new_values: (B, G, N, E), of this call's tokens alone.

    >>> import regard
    >>> first = regard.MultiHeadAttention(16, 4, num_kv_heads=2)
    >>> second = regard.MultiHeadAttention(16, 4, num_kv_heads=2, shares_kv=True)
    >>> x, shared = torch.randn(2, 5, 16), KeyValues()
    >>> y = first(x, mask=regard.masks.Causal(), share=shared)
    >>> second(y, mask=regard.masks.Causal(), source=shared).shape
    torch.Size([2, 5, 16])
    >>> shared
    KeyValues(keys (2, 2, 5, 4), values (2, 2, 5, 4))
    """

    def __init__(self) -> None:
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.new_values: Tensor | None = None
        self.slots: Slots | None = None

    def fill(self, keys: Tensor, values: Tensor, new_values: Tensor, slots: Slots) -> None:
        """Called by the layer."""
        if self.keys is not None:
            raise bad_value(
                "share", expected="an empty KeyValues", received="one that is filled", remedy="KeyValues(), each time"
            )
        self.keys, self.values, self.new_values, self.slots = keys, values, new_values, slots

    def __repr__(self) -> str:
        if self.keys is None or self.values is None:
            return "KeyValues(empty)"
        return f"KeyValues(keys {shape_of(self.keys)}, values {shape_of(self.values)})"


def read_source(
    layer: MultiHeadAttention, source: KeyValues | KVCache | None, q: Tensor
) -> tuple[Tensor, Tensor, Slots]:
    """Keys (B, G, M, D), values (B, G, M, E) and slots that queries (B, H, N, D) of a sharing layer attend to."""
    if source is None:
        raise bad_value(
            "source",
            expected="keys and values of another layer: this layer has shares_kv=True",
            received="none",
            remedy="kv = KeyValues(); first(x, share=kv); layer(x, source=kv)",
        )
    if isinstance(source, RollingCache):
        raise bad_type(
            "source",
            expected="a KeyValues or a KVCache",
            received="a RollingCache, which has forgotten tokens after the call, and keeps keys without their rotation",
            remedy="kv = KeyValues(); first(x, cache=rolling, share=kv); layer(x, source=kv)",
        )
    if not isinstance(source, (KeyValues, KVCache)):
        raise bad_type("source", expected="a KeyValues or a KVCache", received=type(source).__name__)
    keys, values = source.keys, source.values
    if keys is None or values is None or not keys.shape[2]:
        raise bad_value(
            "source",
            expected="one that is filled: the layer that it is of runs first",
            received=f"an empty {type(source).__name__}",
        )
    batch, n = q.shape[0], q.shape[2]
    expected = (batch, layer.num_kv_heads, layer.head_dim, layer.value_head_dim)
    if (*keys.shape[:2], keys.shape[3], values.shape[3]) != expected:
        raise bad_value(
            "source",
            expected="batch {}, {} kv heads, keys of width {} and values of width {}".format(*expected),
            received=f"keys {shape_of(keys)} and values {shape_of(values)}",
        )
    if n > keys.shape[2]:
        raise bad_value("source", expected=f"at least {n} tokens, as the query has", received=keys.shape[2])
    if isinstance(source, KeyValues):
        assert source.slots is not None
        return keys, values, source.slots
    return keys, values, _slots_of(source, n)


def _slots_of(cache: KVCache, n: int) -> Slots:
    """Where the last `n` tokens of a cache and all of its keys stand."""
    slots = cache.number(0)  # no new tokens: the positions of those that are held
    if slots.key_positions is not None:
        return replace(slots, positions=slots.key_positions[:, -n:])
    if slots.positions is not None:  # rows of different lengths
        assert cache.lengths is not None
        return replace(slots, positions=cache.lengths[:, None] - n + torch.arange(n, device=cache.lengths.device))
    return slots
