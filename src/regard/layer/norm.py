"""Norms of queries, keys and values inside a layer.

Letters: B batch, N tokens, D head width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from regard.errors import bad_type, bad_value
from regard.norms import RMSNorm, ZeroCentredRMSNorm

__all__ = ["Norm", "as_norm", "normalise"]

Kind = Literal["rms", "layer"]
Over = Literal["head", "width"]
Weight = Literal["plain", "zero-centred", "none"]


@dataclass(frozen=True)
class Norm:
    """A norm of q and k, or of v, in `MultiHeadAttention`.

    Args:
        kind: "rms" or "layer".
        over: "head", each head by itself; or "width", all heads together, before they are split (OLMo 2).
        weight: "plain", "zero-centred" (1 + weight multiplies: Gemma 3, Qwen3-Next), or "none" (Llama 4's q and k,
            Gemma 3n's v).
        eps: added to the mean square.

    >>> import regard
    >>> layer = regard.MultiHeadAttention(16, 4, num_kv_heads=2, qk_norm=Norm(over="width"), v_norm=Norm(weight="none"))
    >>> layer.q_norm, layer.v_norm
    (RMSNorm((16,), eps=1e-06, elementwise_affine=True), RMSNorm((4,), eps=1e-06, elementwise_affine=False))
    """

    kind: Kind = "rms"
    over: Over = "head"
    weight: Weight = "plain"
    eps: float = 1e-6

    def __post_init__(self) -> None:
        for what, allowed in (("kind", Kind), ("over", Over), ("weight", Weight)):
            if (value := getattr(self, what)) not in get_args(allowed):
                expected = ", ".join(map(repr, get_args(allowed)))
                raise bad_value(f"Norm: {what}", expected=f"one of {expected}", received=repr(value))
        if self.kind == "layer" and self.weight == "zero-centred":
            raise bad_value("Norm", expected='kind="rms" where the weight is zero-centred', received='kind="layer"')

    def module(self, heads: int, width: int) -> nn.Module:
        """The norm of `heads` heads of this width."""
        size = width if self.over == "head" else heads * width
        if self.weight == "zero-centred":
            return ZeroCentredRMSNorm(size, eps=self.eps)
        norm = RMSNorm if self.kind == "rms" else nn.LayerNorm
        return norm(size, eps=self.eps, elementwise_affine=self.weight == "plain")


def as_norm(what: str, norm: Any) -> Norm | None:
    """A `Norm` from what a caller wrote: "rms", "layer", a `Norm`, or None."""
    if norm is None or isinstance(norm, Norm):
        return norm
    if not isinstance(norm, str):
        raise bad_type(what, expected='"rms", "layer", a layer.Norm or None', received=type(norm).__name__)
    if norm not in get_args(Kind):
        raise bad_value(what, expected='"rms", "layer" or None', received=repr(norm), remedy="layer.Norm(...)")
    return Norm(norm, eps=1e-6 if norm == "rms" else 1e-5)  # type: ignore[arg-type]


def normalise(norm: nn.Module, x: Tensor) -> Tensor:
    """norm(x), computed in the dtype of its weights, which may be wider than x."""
    weight = next(norm.parameters(), None)
    if weight is None:
        wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
        return norm(wide).to(x.dtype)
    return norm(x.to(weight.dtype)).to(x.dtype)
