"""`Layout`: a table from our tensor names to those of another library, and how q, k and v are packed in one tensor.

All layouts convert to and from one *canonical* form: the keys of `MultiHeadAttention`'s own state dict, and "norm." for
the LayerNorm of a block::

    their state dict  --Layout.to_canonical-->  canonical  --canonical.build-->  MultiHeadAttention
    their state dict  <-Layout.from_canonical-  canonical  <-canonical.take----  MultiHeadAttention

To add a layout, write a file with a `Layout(...)`, and add it to `convert.LAYOUTS`.

Letters: H query heads, G kv heads, D head width of q and k, E head width of v, W model width.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from regard.errors import bad_value, shape_of

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

# Which of q, k, v and out ("o") have a bias: the combinations that a layout allows. None allows all sixteen.
ALWAYS, NEVER, ALL_OR_NONE, IN_AND_OUT = ("qkvo",), ("",), ("", "qkvo"), ("", "o", "qkv", "qkvo")

# Features beyond H equal heads of width W / H. A layout lists those that the original implementations support.
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
        "kind of q and k norm",
        "v norm",
        "gate per head",
        "gate activation",
        "query scale",
    }
)


class Packing(NamedTuple):
    """How the rows of q, k and v are arranged in one tensor: a weight (rows, in) or a bias (rows,)."""

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
            remedy="check num_heads; grouped kv heads have another layout",
        )
    return tuple(rows.flatten(0, 1) for rows in packed.unflatten(0, (heads, 3, -1)).unbind(1))


def _join_by_head(q: Tensor, k: Tensor, v: Tensor, heads: int) -> Tensor:
    return torch.stack([rows.unflatten(0, (heads, -1)) for rows in (q, k, v)], dim=1).flatten(0, 2)


def _join_stacked(q: Tensor, k: Tensor, v: Tensor, heads: int) -> Tensor:
    return torch.cat([q, k, v])


stacked = Packing(_split_stacked, _join_stacked)  # all of q, then all of k, then all of v
by_head = Packing(_split_by_head, _join_by_head)  # q, k, v of the first head, then of the second, ...


def linear(**names: str) -> dict[str, str]:
    """The names of weights and biases from the names of modules, ours = theirs.

    >>> linear(q_proj="W_q")
    {'q_proj.weight': 'W_q.weight', 'q_proj.bias': 'W_q.bias'}
    """
    return {f"{ours}.{part}": f"{theirs}.{part}" for ours, theirs in names.items() for part in ("weight", "bias")}


@dataclass(frozen=True)
class Layout:
    """One way of naming and packing the weights of an attention layer.

    Attributes:
        name: its name for `layouts.load(..., layout=name)`.
        origin: the libraries or models that use it.
        keys: canonical key -> their key; "qkv.weight" and "qkv.bias" if q, k and v are packed.
        packing: how q, k and v are packed, `stacked` or `by_head`.
        transposed: whether their weights are (in, out).
        biases: the allowed combinations of biases; None for any.
        can: the features of `EVERYTHING` that the original implementations support.
        pairs: the order of rotary pairs in the rows of q and k; None if the originals have no rotary.
        options: arguments of `MultiHeadAttention` that the originals imply.
        norm_eps: the epsilon of the block's LayerNorm.
        ignored: keys of buffers, which are not weights.
        refused: key -> the feature it stands for, which our layer does not have.
        requires: canonical keys beyond q, k, v and out that the originals always have.
        named_only: whether other layouts have the same keys, so that it must be asked for by name.
        gate_in_q: whether the rows of each head in q_proj are those of its query, then those of its gate.
        shares_kv: whether there are no keys and values: they are another layer's.
        asks: option -> why the weights do not tell it: it must be given to `load`.
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
    requires: tuple[str, ...] = ()
    named_only: bool = False
    gate_in_q: bool = False
    shares_kv: bool = False
    asks: Mapping[str, str] = field(default_factory=dict)

    @property
    def has_norm(self) -> bool:
        """Whether the layout includes the LayerNorm of a block."""
        return "norm.weight" in self.keys

    def missing(self, keys: Collection[str]) -> list[str]:
        """The required keys of this layout that are absent."""
        inputs = (("qkv",), _IN[:1] if self.shares_kv else _IN)
        extra = [self.keys[key] for key in self.requires if key in self.keys]
        variants = [[*(self.keys.get(f"{stem}.weight") for stem in (*stems, "out_proj")), *extra] for stems in inputs]
        return min(([key for key in names if key and key not in keys] for names in variants if all(names)), key=len)

    def unknown(self, keys: Collection[str]) -> list[str]:
        """The keys that do not belong to this layout."""
        return [key for key in keys if key not in self.keys.values() and key not in self.ignored]

    def matches(self, tensors: Mapping[str, Tensor]) -> bool:
        """Whether all required keys are present, and a packed projection has more rows than out_proj has inputs."""
        if self.missing(tensors):
            return False
        q, out = (tensors.get(self.keys.get(f"{stem}.weight", "")) for stem in ("q_proj", "out_proj"))
        if q is not None and out is not None and "value head width" not in self.can:
            with_gate = q.dim() == out.dim() == 2 and q.shape[0] == 2 * out.shape[1]
            return with_gate == self.gate_in_q
        packed, out = (tensors.get(self.keys.get(f"{stem}.weight", "")) for stem in ("qkv", "out_proj"))
        if packed is None or out is None or packed.dim() != 2 or out.dim() != 2:
            return True
        rows, inner = (packed.shape[1], out.shape[0]) if self.transposed else (packed.shape[0], out.shape[1])
        return rows > inner

    def to_canonical(self, tensors: Mapping[str, Tensor], num_heads: int) -> Tensors:
        """Their tensors by our names, with q, k and v split."""
        renamed = {ours: tensors[theirs] for ours, theirs in self.keys.items() if theirs in tensors}
        if self.transposed:
            renamed = {key: tensor.T if tensor.dim() == 2 else tensor for key, tensor in renamed.items()}
        inner = renamed["out_proj.weight"].shape[1]
        for kind in ("weight", "bias"):
            if f"qkv.{kind}" in renamed:
                split = self.packing.split(renamed.pop(f"qkv.{kind}"), num_heads, inner)
                renamed |= {f"{stem}.{kind}": tensor for stem, tensor in zip(_IN, split, strict=True)}
            if self.gate_in_q and f"q_proj.{kind}" in renamed:
                packed = renamed[f"q_proj.{kind}"].unflatten(0, (num_heads, 2, -1))
                for i, stem in enumerate(("q_proj", "gate_proj")):
                    renamed[f"{stem}.{kind}"] = packed[:, i].flatten(0, 1)
        return renamed

    def from_canonical(self, tensors: Tensors, num_heads: int) -> Tensors:
        """Our tensors by their names; the reverse of `to_canonical`."""
        ours = dict(tensors)
        for key in self.requires:
            if key not in ours:
                raise bad_value(
                    f"export as {self.name!r}",
                    expected=f"{key}, as {self.origin} always have it",
                    received="none",
                    remedy="export as 'separate', which has names for all weights",
                )
        for kind in ("weight", "bias"):
            separate = [ours.get(f"{stem}.{kind}") for stem in _IN]
            if f"qkv.{kind}" in self.keys and len({t.shape[1:] for t in separate if t is not None}) == 1:
                q, k, v = (ours.pop(f"{stem}.{kind}") for stem in _IN)
                ours[f"qkv.{kind}"] = self.packing.join(q, k, v, num_heads)
            if self.gate_in_q and f"q_proj.{kind}" in ours:
                ours[f"q_proj.{kind}"] = self._with_gate(ours, kind, num_heads)
        if self.transposed:
            ours = {key: tensor.T if tensor.dim() == 2 else tensor for key, tensor in ours.items()}
        for key in ours:
            if key not in self.keys:
                raise bad_value(
                    f"export as {self.name!r}",
                    expected=f"weights that have a name in {self.origin}",
                    received=key,
                    remedy="export as 'separate', which has names for all weights",
                )
        return {self.keys[key]: tensor.detach().clone().contiguous() for key, tensor in ours.items()}

    def _with_gate(self, ours: Tensors, kind: str, num_heads: int) -> Tensor:
        """The rows of q_proj with those of gate_proj, head by head; gate_proj is taken out."""
        q, gate = ours[f"q_proj.{kind}"], ours.pop(f"gate_proj.{kind}", None)
        if gate is None or gate.shape != q.shape:
            raise bad_value(
                f"export as {self.name!r}",
                expected=f"gate_proj.{kind} of the shape of q_proj's, {shape_of(q)}",
                received="none" if gate is None else shape_of(gate),
                remedy="export as 'separate', which has names for all weights",
            )
        return torch.stack([rows.unflatten(0, (num_heads, -1)) for rows in (q, gate)], dim=1).flatten(0, 2)
