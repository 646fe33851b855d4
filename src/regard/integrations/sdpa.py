"""`F.scaled_dot_product_attention` on regard's kernels: for code that calls it, and cannot be told to call another.

Letters: B batch, H query heads, G kv heads, N queries, M keys, D head width of q and k, E head width of v.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from regard.attention import attend
from regard.errors import bad_value, shape_of
from regard.heads.capture.sdpa import MASKED, split_additive_mask
from regard.masks import Causal

__all__ = ["RedirectSdpa", "scaled_dot_product_attention"]


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    return_lse: bool = False,
) -> Any:
    """torch's function of this name, computed by `attend`.

    Args:
        query: (B, H, N, D); key: (B, G, M, D); value: (B, G, M, E). Or all of them without heads, (B, N, D), or without
            a batch, (N, D). H is a multiple of G, with or without `enable_gqa`.
        attn_mask: as many axes or fewer, each of full size or 1, the last two N and M: boolean (True = may attend), or
            added to the scores, with gradient.
        dropout_p, scale: as `dropout` and `scale` of `attend`.
        is_causal: query i sees keys 0 to i, however many keys there are; not with `attn_mask`.
        return_lse: also give the log-sum-exp of the scores, (B, H, N).

    Returns:
        The output (B, H, N, E), and the log-sum-exp if asked. A query that may see nothing gets 0.

    >>> import regard
    >>> x = torch.randn(2, 3, 5, 8)
    >>> torch.equal(scaled_dot_product_attention(x, x, x, is_causal=True), regard.attend(x, x, x, mask=Causal()))
    True
    """
    if attn_mask is not None and is_causal:
        raise bad_value(
            "scaled_dot_product_attention", expected="attn_mask or is_causal", received="both", remedy="one mask"
        )
    axes = query.dim()
    if axes not in (2, 3, 4) or key.dim() != axes or value.dim() != axes:
        received = ", ".join(shape_of(x) for x in (query, key, value))
        raise bad_value(
            "scaled_dot_product_attention",
            expected="query, key and value of 2 to 4 axes, as many each",
            received=f"shapes {received}",
            remedy="flatten the first axes to one",
        )
    if axes < 4:  # a batch, a head or both of one
        add, drop = ((None, None), (0, 0)) if axes == 2 else ((slice(None), None), (slice(None), 0))
        query, key, value = (x[add] for x in (query, key, value))
        attn_mask = attn_mask[:, None] if attn_mask is not None and attn_mask.dim() == 3 else attn_mask
    else:
        drop = ()
    batch = max(x.shape[0] for x in (query, key, value))
    query, key, value = (x if x.shape[0] == batch else x.expand(batch, -1, -1, -1) for x in (query, key, value))
    options: dict[str, Any] = {} if attn_mask is None else _visible(attn_mask)
    if is_causal:
        options = {"mask": _CAUSAL, "positions": 0}
    options |= {"scale": scale, "dropout": dropout_p}
    if not return_lse:
        return attend(query, key, value, **options)[drop]
    out, lse = attend(query, key, value, return_lse=True, **options)
    return out[drop], lse[drop]


_CAUSAL = Causal()


def _visible(mask: Tensor) -> dict[str, Any]:
    """`mask` and `bias` of `attend`. What is added stays so where a compiler must not ask for numbers, where it has a
    gradient, and where it would hide every key from a query: with -10000 on all keys softmax is as without it."""
    if mask.dtype is torch.bool:
        return split_additive_mask(mask)
    if mask.requires_grad or torch.compiler.is_compiling() or not bool((mask > MASKED).any(-1).all()):
        return {"bias": mask}
    return split_additive_mask(mask)


class RedirectSdpa(TorchFunctionMode):
    """While it is on, `F.scaled_dot_product_attention` is computed by regard, whoever calls it.

    >>> x = torch.randn(2, 3, 5, 8)
    >>> with RedirectSdpa():
    ...     out = F.scaled_dot_product_attention(x, x, x)
    >>> torch.allclose(out, F.scaled_dot_product_attention(x, x, x), atol=1e-6)
    True

    In this thread only, and where the function is called as such: code that a compiler has compiled before, or that
    calls torch's operators themselves, is not changed.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.scaled_dot_product_attention:
            func = scaled_dot_product_attention
        return func(*args, **(kwargs or {}))
