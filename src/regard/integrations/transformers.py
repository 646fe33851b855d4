"""`attn_implementation="regard"`: models of transformers on regard's kernels.

    import regard.integrations.transformers
    model = AutoModel.from_pretrained(..., attn_implementation="regard")    # or
    model.set_attn_implementation("regard")

The import registers two functions with transformers: one that computes attention (`attention`), and one that says which
query may see which key (`mask`). Grouped kv heads are not expanded; softcap and sinks, which "sdpa" refuses or ignores,
are served; dropout takes O(N) memory; windows, chunks, padding and packed texts are masks of regard, not dense tensors.
A query that may see nothing (one of padding) gets 0.

Letters: B batch, H query heads, G kv heads, N queries, M keys, D head width of q and k, E head width of v.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from regard.attention import attend, attention_weights
from regard.errors import bad_value
from regard.heads.capture.sdpa import split_additive_mask
from regard.masks import Causal, Keep, Mask

try:
    from transformers import AttentionInterface, AttentionMaskInterface  # pyright: ignore[reportMissingImports]
except ImportError as error:
    raise ImportError(
        "regard.integrations.transformers: expected transformers 5 or newer, which lets others compute its attention; "
        f"received: {error}; remedy: pip install 'transformers>=5'"
    ) from error

from regard.integrations.transformers_masks import LazyMask, mask

__all__ = ["attention", "mask"]


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    indices: Tensor | None = None,
    output_attentions: bool | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """What transformers calls: attention of one layer.

    Args:
        module: the layer; its `is_causal` counts if there is no mask.
        query: (B, H, N, D); key: (B, G, M, D); value: (B, G, M, E).
        attention_mask: what `mask` made; or (1|B, 1|H, N, M), boolean (True = may attend) or added to the scores.
        dropout, scaling, softcap: as `dropout`, `scale` and `softcap` of `regard.attend`.
        s_aux: sinks, (H,).
        position_bias: (1|B, H, N, M), added to the scores, with gradient.
        indices: (B, N, chosen) keys that each query may see, of those that the mask shows it (sparse attention).
        output_attentions: also return the weights, (B, H, N, M), built in full.
        others: what only other implementations need. What would change the result is refused.

    Returns:
        (B, N, H, E), and the weights or None.
    """
    if others:
        _refuse(module, others)
    if attention_mask is None and is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    if attention_mask is None and is_causal and query.shape[2] > 1:
        # Aligned to the first key, as "sdpa" has it: in a static cache the rest is empty.
        n = query.shape[2]
        key, value, visible = key[:, :, :n], value[:, :, :n], {"mask": _CAUSAL, "bias": None, "positions": 0}
    else:
        visible = _visible(attention_mask, key.shape[2])
    if indices is not None:
        chosen = indices.new_zeros(*indices.shape[:2], key.shape[2], dtype=torch.bool)
        chosen = Keep(chosen.scatter_(-1, indices.long(), True))
        visible["mask"] = chosen if visible["mask"] is None else visible["mask"] & chosen
    if position_bias is not None:
        bias = position_bias[..., : key.shape[2]]
        visible["bias"] = bias if visible["bias"] is None else [bias, visible["bias"]]
    sinks = None if s_aux is None else s_aux.flatten().to(query.dtype)
    options = {**visible, "scale": scaling, "softcap": softcap, "sinks": sinks}
    out = attend(query, key, value, dropout=dropout, **options)
    weights = attention_weights(query, key, **options) if output_attentions else None
    return out.transpose(1, 2).contiguous(), weights


_CAUSAL = Causal()


def _visible(attention_mask: Tensor | None, keys: int) -> dict[str, Any]:
    """`mask`, `bias` and `positions` of `attend` for what a layer was given as its mask."""
    if attention_mask is None:
        return {"mask": None, "bias": None}
    if isinstance(attention_mask, LazyMask) and attention_mask.shape[3] == keys:
        found: Mask = attention_mask.mask
        return {"mask": found, "bias": None, "positions": attention_mask.positions()}
    return split_additive_mask(attention_mask[..., :keys])


def _refuse(module: nn.Module, others: dict[str, Any]) -> None:
    """Refuse arguments that would change the result: those known to, and tensors of numbers that are not known."""
    for name, x in others.items():
        if x is None:
            continue
        if name in _CHANGES_RESULT or (isinstance(x, Tensor) and x.is_floating_point()):
            raise bad_value(
                'attn_implementation="regard"',
                expected=_CHANGES_RESULT.get(name, "arguments of attention that it knows"),
                received=f"{name}={type(x).__name__} from {type(module).__name__}",
                remedy='model.set_attn_implementation("sdpa"), or "eager"',
            )


_CHANGES_RESULT = {
    "cache": "no paged cache (continuous batching)",
    "block_indices": "no choice of blocks of keys",
    "sinks": "sinks (H,) as s_aux, the same for all queries",
}

AttentionInterface.register("regard", attention)
AttentionMaskInterface.register("regard", mask)
