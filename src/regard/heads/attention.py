"""One attention that a model computes, as those see it who look at it or change it; and the words of others for it.

Letters: B batch, H query heads, G kv heads, N queries, M keys, D head width of q and k, E head width of v,
W model width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from regard.attention import Gathered, prepare
from regard.kernels import Call
from regard.masks import Causal, Keep, Mask

__all__ = [
    "Attention",
    "evened",
    "from_huggingface",
    "from_sdpa",
    "output_projection",
    "output_weight",
    "whole_parameter",
    "with_additive_mask",
]


@dataclass
class Attention:
    """What is known of it. Either a `call` (q, k, v and everything that decides the weights), or, where the model wrote
    attention by hand, the `weights` (B, H, N, M) themselves, before dropout."""

    layer: str
    module: nn.Module
    forward: int  # in which outermost call of the model
    kind: Literal["self", "cross"]
    call: Call | None = None
    weights: Tensor | None = None
    ids: Tensor | None = None  # (1|B, N)
    out_weight: Tensor | None = None  # (W, H * E)
    out_bias: Tensor | None = None  # (W,)
    input: Tensor | None = None  # (B, N, W): what queries are made of, where it is known
    output: Tensor | None = None  # (B, H, N, E), where it is known
    values: Tensor | None = None  # (..., M, E) of attention by hand, where they are known, in its own order of axes
    cache: Any = None  # the object that holds its keys, where it is known
    numbers: Tensor | None = None  # (M,) which tokens its keys are, where it is known
    # Where heads or tokens are spread over processes: the call is of this one's heads, what all find is put together
    together: Gathered | None = None
    everything: Callable[[], Call] | None = None  # all heads, for those who must have them

    @property
    def device(self) -> torch.device:
        """Where its tensors are."""
        tensor = self.weights if self.call is None else self.call.q
        assert tensor is not None
        return tensor.device

    @property
    def keys(self) -> Tensor | None:
        """(..., M, D): keys (or values, of attention by hand) of all texts and heads: by them texts are known again."""
        return self.values if self.call is None else self.call.k

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B, H, N, M)"""
        if self.call is not None:
            batch, heads, n, m = self.call.shape
            return batch, heads if self.together is None else self.together.heads, n, m
        assert self.weights is not None
        batch, heads, n, m = self.weights.shape
        return batch, heads, n, m


def evened(attention: Attention) -> Attention:
    """The same with one head, whose weights are equal on all keys that may be seen: what a head without a mind does."""
    if attention.call is None:
        assert attention.weights is not None
        seen = (attention.weights > 0).any(1, keepdim=True).float()
        return replace(attention, weights=seen / seen.sum(-1, keepdim=True).clamp(min=1))
    call = attention.call
    mask = call.mask
    if mask is not None and not mask.shared_by_heads():
        mask = Keep(mask.block(call.whole())[:, :1])
    q, k = (x.new_zeros(x.shape[0], 1, x.shape[2], 1, dtype=call.dtype) for x in (call.q, call.k))
    even = replace(call, q=q, k=k, v=k, scale=1.0, softcap=None, biases=(), sinks=None, dropout=None, mask=mask)
    return replace(attention, call=even, together=None, everything=None)


def with_additive_mask(mask: Tensor) -> dict[str, Any]:
    """`mask` and `bias` of `attend` for a mask that is boolean (True sees), or added to the scores. What adds -inf, or
    numbers as low as -1e4, hides; a row that would add it everywhere sees nothing.

    >>> with_additive_mask(torch.tensor([[0.0, float("-inf")]]))
    {'mask': Keep([[[True, False]]]), 'bias': None}
    """
    while mask.dim() > 4 and mask.shape[0] == 1:
        mask = mask[0]
    while mask.dim() < 4:
        mask = mask[None]
    if mask.dtype is torch.bool:
        return {"mask": Keep(mask), "bias": None}
    visible = mask > -9e3  # -1e4, -1e9, -inf and the lowest number are all in use; no bias is so low where it matters
    added = mask.masked_fill(~visible, 0.0)
    return {
        "mask": None if visible.all() else Keep(visible),
        "bias": added if added.any() else None,
    }


def with_additive_masks(mask: Mask | None, bias: list[Tensor] | None, **options: Any) -> dict[str, Any]:
    """The options of `attend` with what biases hide said in the mask: `nn.MultiheadAttention` makes its masks additive
    before it hands them on."""
    rest = []
    for one in bias or ():
        said = with_additive_mask(one.detach())
        if said["mask"] is not None:
            mask = said["mask"] if mask is None else mask & said["mask"]
        if said["bias"] is not None:
            rest.append(said["bias"])
    return {"mask": mask, "bias": rest or None, **options}


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
    """From the arguments of `F.scaled_dot_product_attention`, with four axes: True sees, causal from the top left."""
    options: dict[str, Any] = {"mask": None, "bias": None}
    if attn_mask is not None:
        options = with_additive_mask(attn_mask.detach())
    if is_causal:
        causal = Causal()
        options |= {"mask": causal if options["mask"] is None else causal & options["mask"], "positions": 0}
    q, k, v = (x.detach() for x in (query, key, value))
    if not enable_gqa and k.shape[1] != q.shape[1]:
        k, v = (x.expand(-1, q.shape[1], -1, -1) for x in (k, v))
    batch = max(x.shape[0] for x in (q, k, v))
    q, k, v = (x.expand(batch, -1, -1, -1) for x in (q, k, v))
    return prepare(q, k, v, scale=scale, **options)


def from_huggingface(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *, eager: bool, **options: Any
) -> Call:
    """From what transformers hands to an attention function: kv heads as they are, softcap, sinks, a bias of positions.

    A mask that is missing means causal to all of its functions but the eager one, by the module's own word.
    """
    q, k, v = (x.detach() for x in (query, key, value))
    said: dict[str, Any] = {"mask": None, "bias": None}
    if attention_mask is not None:
        said = with_additive_mask(attention_mask[..., : k.shape[2]].detach())
    elif not eager and q.shape[2] > 1:
        causal = options.get("is_causal")
        if causal if causal is not None else getattr(module, "is_causal", True):
            k, v = k[:, :, : q.shape[2]], v[:, :, : q.shape[2]]
            said = {"mask": Causal(), "bias": None, "positions": 0}
    bias = options.get("position_bias")
    if bias is not None:
        bias = bias.detach()[..., : k.shape[2]]
        said["bias"] = bias if said["bias"] is None else [bias, said["bias"]]
    sinks = options.get("s_aux")
    return prepare(
        q,
        k,
        v,
        scale=options.get("scaling"),
        softcap=options.get("softcap"),
        sinks=None if sinks is None else sinks.detach().flatten().to(q.dtype),
        **said,
    )


def output_projection(
    module: nn.Module, heads: int, width: int, *, parent: nn.Module | None = None
) -> nn.Module | None:
    """The output projection of an attention, by the names that are common for it: of the module itself, or, where that
    has none (BERT), of `output` beside it in its parent; None where it is not known."""
    for owner in (module, getattr(parent, "output", None)):
        for name in ("out_proj", "o_proj", "c_proj", "dense", "out_lin", "o"):
            projection = getattr(owner, name, None)
            weight = getattr(projection, "weight", None)
            if not isinstance(weight, Tensor) or weight.dim() != 2 or not weight.is_floating_point():
                continue
            assert isinstance(projection, nn.Module)
            turned = type(projection).__name__ == "Conv1D"
            if not turned and (not isinstance(projection, nn.Linear) or list(projection.children())):
                return None  # adapters, quantisation: what it computes is not its weight
            if weight.shape[0 if turned else 1] == heads * width:
                return projection
    return None


def whole_parameter(parameter: Tensor) -> Tensor:
    """A parameter without its gradient; one that is spread over processes, put together."""
    return (parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter).detach()  # type: ignore[operator]


def output_weight(module: nn.Module, heads: int, width: int, *, parent: nn.Module | None = None) -> Tensor | None:
    """The weight (W, H * E) of the output projection; None where it is not known."""
    projection = output_projection(module, heads, width, parent=parent)
    if projection is None:
        return None
    weight = whole_parameter(projection.weight)  # type: ignore[arg-type]
    return weight.mT if type(projection).__name__ == "Conv1D" else weight
