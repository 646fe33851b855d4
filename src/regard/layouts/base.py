"""What a layout is: a table from our names to theirs, and how q, k and v are packed where they are one tensor.

Between any two layouts stands one form, the *canonical* one: the keys of `MultiHeadAttention`'s own state dict, with
"norm." for a LayerNorm beside it::

    their state dict  --Layout.to_canonical-->  canonical  --canonical.build-->  MultiHeadAttention
    their state dict  <-Layout.from_canonical-  canonical  <-canonical.take----  MultiHeadAttention

To add a layout: one file with one `Layout(...)`, and one line in `convert.LAYOUTS`.

Letters: H query heads, G kv heads, D head width of q and k, E head width of v, W model width.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from regard.errors import bad_value

__all__ = [
    "ALL_OR_NONE",
    "ALWAYS",
    "EVERYTHING",
    "IN_AND_OUT",
    "NEVER",
    "Layout",
    "Packing",
    "Tensors",
    "by_head",
    "linear",
    "stacked",
]

_IN = ("q_proj", "k_proj", "v_proj")

Tensors = dict[str, Tensor]

# Which of q, k, v and out ("o") have a bias: the patterns that a layout allows. None allows all sixteen.
ALWAYS, NEVER, ALL_OR_NONE, IN_AND_OUT = ("qkvo",), ("",), ("", "qkvo"), ("", "o", "qkv", "qkvo")

# What a layer may have beyond H equal heads of W / H: a layout names those that its originals can be built with.
EVERYTHING = frozenset(
    {
        "kv heads",
        "value head width",
        "inner width",
        "query width",
        "key and value widths",
        "rotary",
        "alibi",
        "scale",
        "softcap",
    }
)


class Packing(NamedTuple):
    """How the rows of q, k and v lie in one tensor; the same for weights (rows, in) and biases (rows,)."""

    split: Callable[[Tensor, int, int], tuple[Tensor, ...]]  # (packed, H, H * D) -> q, k, v
    join: Callable[[Tensor, Tensor, Tensor, int], Tensor]  # (q, k, v, H) -> packed


def _split_stacked(packed: Tensor, heads: int, inner: int) -> tuple[Tensor, ...]:
    rest = packed.shape[0] - inner
    if rest <= 0 or rest % (2 * (inner // heads)):
        raise bad_value(
            "packed q, k, v",
            expected=f"(H + 2 G) * D rows, with H = {heads}, D = {inner // heads}",
            received=f"{packed.shape[0]} rows",
            remedy="check num_heads",
        )
    return packed.split([inner, rest // 2, rest // 2])


def _split_by_head(packed: Tensor, heads: int, inner: int) -> tuple[Tensor, ...]:
    if packed.shape[0] != 3 * inner:
        raise bad_value(
            "packed q, k, v",
            expected=f"H * 3 * D = {3 * inner} rows, head by head",
            received=f"{packed.shape[0]} rows",
            remedy="shared kv heads are packed otherwise",
        )
    return tuple(part.flatten(0, 1) for part in packed.unflatten(0, (heads, 3, -1)).unbind(1))


def _join_by_head(q: Tensor, k: Tensor, v: Tensor, heads: int) -> Tensor:
    return torch.stack([part.unflatten(0, (heads, -1)) for part in (q, k, v)], dim=1).flatten(0, 2)


def _join_stacked(q: Tensor, k: Tensor, v: Tensor, heads: int) -> Tensor:
    return torch.cat([q, k, v])


stacked = Packing(_split_stacked, _join_stacked)  # all of q, then all of k, then all of v
by_head = Packing(_split_by_head, _join_by_head)  # q, k, v of the first head, then of the second, ...


def linear(**names: str) -> dict[str, str]:
    """The table of modules with a weight and a bias, ours = theirs.

    >>> linear(q_proj="W_q")
    {'q_proj.weight': 'W_q.weight', 'q_proj.bias': 'W_q.bias'}
    """
    return {f"{ours}.{part}": f"{theirs}.{part}" for ours, theirs in names.items() for part in ("weight", "bias")}


@dataclass(frozen=True)
class Layout:
    """One way of naming and packing the weights of an attention layer.

    Attributes:
        name: what `layouts.load(..., layout=name)` calls it.
        origin: whose it is, in words.
        keys: canonical key -> their key; "qkv.weight" and "qkv.bias" where q, k and v are one tensor.
        packing: how they are one, `stacked` or `by_head`.
        transposed: whether their weights are (in, out).
        biases: which patterns of biases it has; None for any.
        can: what of `EVERYTHING` its originals can be built with.
        pairs: how rotary pairs lie in the rows of q and k; None where the originals have no rotary.
        options: arguments of the layer that the originals imply.
        norm_eps: the epsilon of the LayerNorm beside it.
        ignored: keys of buffers that hold no weights.
        refused: keys that mean something the layer does not have, and what.
    """

    name: str
    origin: str
    keys: Mapping[str, str]
    packing: Packing = stacked
    transposed: bool = False
    biases: tuple[str, ...] | None = None
    can: frozenset[str] = frozenset()
    pairs: Literal["halves", "interleaved"] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    norm_eps: float = 1e-5
    ignored: frozenset[str] = frozenset()
    refused: Mapping[str, str] = field(default_factory=dict)

    @property
    def has_norm(self) -> bool:
        """Whether a LayerNorm lies beside the layer."""
        return "norm.weight" in self.keys

    def missing(self, keys: Collection[str]) -> list[str]:
        """Which of their keys it takes to be this layout, and are not there."""
        ways = [[self.keys.get(f"{stem}.weight") for stem in (*way, "out_proj")] for way in (("qkv",), _IN)]
        return min(([key for key in way if key and key not in keys] for way in ways if all(way)), key=len)

    def unknown(self, keys: Collection[str]) -> list[str]:
        """Which keys are not of this layout."""
        return [key for key in keys if key not in self.keys.values() and key not in self.ignored]

    def matches(self, tensors: Mapping[str, Tensor]) -> bool:
        """Whether the keys are there, and the packed projection has more rows than out_proj reads."""
        if self.missing(tensors):
            return False
        packed, out = (tensors.get(self.keys.get(f"{stem}.weight", "")) for stem in ("qkv", "out_proj"))
        if packed is None or out is None or packed.dim() != 2 or out.dim() != 2:
            return True
        rows, inner = (packed.shape[1], out.shape[0]) if self.transposed else (packed.shape[0], out.shape[1])
        return rows > inner

    def to_canonical(self, tensors: Mapping[str, Tensor], num_heads: int) -> Tensors:
        """Their tensors by our names, q, k and v apart."""
        found = {ours: tensors[theirs] for ours, theirs in self.keys.items() if theirs in tensors}
        if self.transposed:
            found = {key: tensor.T if tensor.dim() == 2 else tensor for key, tensor in found.items()}
        inner = found["out_proj.weight"].shape[1]
        for part in ("weight", "bias"):
            if f"qkv.{part}" in found:
                split = self.packing.split(found.pop(f"qkv.{part}"), num_heads, inner)
                found |= {f"{stem}.{part}": tensor for stem, tensor in zip(_IN, split, strict=True)}
        return found

    def from_canonical(self, tensors: Tensors, num_heads: int) -> Tensors:
        """Our tensors by their names; the reverse of `to_canonical`."""
        found = dict(tensors)
        for part in ("weight", "bias"):
            parts = [found.get(f"{stem}.{part}") for stem in _IN]
            if f"qkv.{part}" in self.keys and len({p.shape[1:] for p in parts if p is not None}) == 1:
                q, k, v = (found.pop(f"{stem}.{part}") for stem in _IN)
                found[f"qkv.{part}"] = self.packing.join(q, k, v, num_heads)
        if self.transposed:
            found = {key: tensor.T if tensor.dim() == 2 else tensor for key, tensor in found.items()}
        for key in found:
            if key not in self.keys:
                raise bad_value(
                    f"export as {self.name!r}",
                    expected=f"weights that have a name in {self.origin}",
                    received=key,
                    remedy="export as 'separate', which has names for all",
                )
        return {self.keys[key]: tensor.detach().clone().contiguous() for key, tensor in found.items()}
