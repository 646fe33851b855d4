"""From the arguments of `F.scaled_dot_product_attention` to a `Call`; additive masks as masks and biases.

Letters: B batch, H query heads, N queries, M keys.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from regard.attention import prepare
from regard.kernels import Call
from regard.masks import Causal, Keep, Mask, Window

__all__ = ["MASKED", "added_band", "band_of", "from_sdpa", "split_additive_biases", "split_additive_mask"]

MASKED = -9e3  # -1e4, -1e9, -inf and the lowest number are all in use to mask; no bias that matters is so low


def split_additive_mask(mask: Tensor) -> dict[str, Any]:
    """`mask` and `bias` of `attend` for a mask that is boolean (True = may attend) or added to the scores. Numbers
    below -9e3 mask; a row of only such numbers sees nothing.

    >>> split_additive_mask(torch.tensor([[0.0, float("-inf")]]))
    {'mask': Keep([[[True, False]]]), 'bias': None}
    """
    while mask.dim() > 4 and mask.shape[0] == 1:
        mask = mask[0]
    while mask.dim() < 4:
        mask = mask[None]
    if mask.dtype is torch.bool:
        return {"mask": Keep(mask), "bias": None}
    visible = mask > MASKED
    bias = mask.masked_fill(~visible, 0.0)
    return {"mask": None if visible.all() else Keep(visible), "bias": bias if bias.any() else None}


def band_of(visible: Tensor) -> Mask | None:
    """`Causal` or a causal `Window`, if booleans (B, N, N), True = may attend, are nothing else. They have no tensors:
    they are known to be the same in the next layer, and kernels skip what they hide.

    >>> band_of(torch.ones(1, 3, 3, dtype=torch.bool).tril())
    Causal()
    """
    n = visible.shape[1]
    if visible.shape[2] != n or n < 2 or not visible.shape[0]:
        return None
    first, size = (int(row.sum()) for row in (visible[0, 0], visible[0, -1]))
    if first != 1 or not size:  # (as of most other masks)
        return None
    band = torch.ones(n, n, dtype=torch.bool, device=visible.device).tril_().triu_(1 - size)
    if not (visible == band).all():
        return None
    return Causal() if size == n else Window(size)


def added_band(mask: Tensor) -> Mask | None:
    """The same of a mask (B, 1, N, N) that is added to the scores, and adds nothing where it hides nothing."""
    if mask.dim() != 4 or mask.shape[1] != 1:
        return None
    nothing = mask[:, 0] == 0
    band = band_of(nothing)
    return band if band is not None and torch.equal(nothing, ~(mask[:, 0] <= MASKED)) else None  # (NaN is neither)


def split_additive_biases(mask: Mask | None, bias: list[Tensor] | None, **options: Any) -> dict[str, Any]:
    """The options of `attend` with what biases mask moved to the mask: `nn.MultiheadAttention` makes its masks
    additive before it passes them on."""
    biases = []
    for additive in bias or ():
        split = split_additive_mask(additive)
        if split["mask"] is not None:
            mask = split["mask"] if mask is None else mask & split["mask"]
        if split["bias"] is not None:
            biases.append(split["bias"])
    return {"mask": mask, "bias": biases or None, **options}


def from_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Call:
    """The call for tensors with four axes. In a boolean mask True = may attend; causal is aligned to the top left."""
    options: dict[str, Any] = {"mask": None, "bias": None}
    if attn_mask is not None:
        options = split_additive_mask(attn_mask)
    if is_causal:
        causal = Causal()
        options |= {"mask": causal if options["mask"] is None else causal & options["mask"], "positions": 0}
    q, k, v = query, key, value
    if not enable_gqa and k.shape[1] != q.shape[1]:
        k, v = (x.expand(-1, q.shape[1], -1, -1) for x in (k, v))
    batch = max(x.shape[0] for x in (q, k, v))
    q, k, v = (x.expand(batch, -1, -1, -1) for x in (q, k, v))
    return prepare(q, k, v, scale=scale, **options)
