"""Rotary positions rotate pairs of a head's dimensions. Stored weights have these pairs in one of two orders:

    halves        0 1 2 | 3 4 5    pairs (0, 3) (1, 4) (2, 5)    Llama in transformers, GPT-NeoX; ours
    interleaved   0 1 | 2 3 | 4 5  pairs (0, 1) (2, 3) (4, 5)    Llama as Meta stores it, GGUF

Permuting the rows of q_proj and k_proj within each head converts one to the other.
"""

from __future__ import annotations

from typing import Literal, TypeVar

import torch
from torch import Tensor

from regard.errors import bad_value, shape_of
from regard.layer import MultiHeadAttention
from regard.positions import Rotary

__all__ = ["convert_pairs", "rotary_pairs"]

Convertible = TypeVar("Convertible", Tensor, MultiHeadAttention)


def rotary_pairs(
    what: Convertible,
    num_heads: int | None = None,
    *,
    to: Literal["halves", "interleaved"] = "halves",
    width: int | None = None,
) -> Convertible:
    """Permute the rows of q and k from one order of rotary pairs to the other.

    Args:
        what: a weight (heads * D, in) or bias (heads * D,) of q or k, of which a permuted copy is returned; or a
            `MultiHeadAttention`, whose q and k are changed in place (its position encoding is not changed).
        num_heads: the heads of a weight: H for q, G for k.
        to: the order to convert to, from the other one.
        width: how many dimensions of a head are rotated; by default all (for a layer: the width of its `Rotary`).

    >>> rotary_pairs(torch.arange(6), num_heads=1, to="interleaved").tolist()
    [0, 3, 1, 4, 2, 5]
    >>> rotary_pairs(torch.tensor([0, 3, 1, 4, 2, 5]), num_heads=1, to="halves").tolist()
    [0, 1, 2, 3, 4, 5]
    """
    if to not in ("halves", "interleaved"):
        raise bad_value("to", expected='"halves" or "interleaved"', received=repr(to))
    if isinstance(what, Tensor):
        if num_heads is None or num_heads < 1 or what.shape[0] % num_heads:
            raise bad_value("num_heads", expected=f"a divisor of the {what.shape[0]} rows", received=num_heads)
        return _permuted(what, num_heads, to, width)
    if width is None and isinstance(what.position_encoding, Rotary):
        width = what.position_encoding.width
    state = {key: parameter.data for key, parameter in what.named_parameters()}
    for key, tensor in convert_pairs(state, what.num_heads, what.num_kv_heads, to, width).items():
        state[key].copy_(tensor)
    return what


def convert_pairs(
    tensors: dict[str, Tensor], heads: int, kv_heads: int, to: str, width: int | None = None
) -> dict[str, Tensor]:
    """As `rotary_pairs`, for the canonical tensors of a layer: q_proj, k_proj, q_norm and k_norm."""
    stems = {"q_proj": heads, "k_proj": kv_heads}
    head_dim = tensors["q_proj.weight"].shape[0] // heads
    for stem in ("q_norm", "k_norm"):
        if f"{stem}.weight" in tensors:
            stems[stem] = tensors[f"{stem}.weight"].shape[0] // head_dim  # 1, or all heads where the norm is over them
    return {
        key: _permuted(tensor, stems[key.split(".")[0]], to, width) if key.split(".")[0] in stems else tensor
        for key, tensor in tensors.items()
    }


def _permuted(tensor: Tensor, heads: int, to: str, width: int | None) -> Tensor:
    """The rows of one tensor, permuted within each head."""
    head_dim = tensor.shape[0] // heads
    width = head_dim if width is None else width
    if width % 2 or not 0 < width <= head_dim:
        raise bad_value(
            "width",
            expected=f"an even number up to the head's width {head_dim}",
            received=f"{width}, for {heads} heads in {shape_of(tensor)}",
        )
    pairs = torch.arange(width, device=tensor.device).view((-1, 2) if to == "halves" else (2, -1)).T.flatten()
    order = torch.cat([pairs, torch.arange(width, head_dim, device=tensor.device)])
    return tensor.unflatten(0, (heads, head_dim))[:, order].flatten(0, 1)
