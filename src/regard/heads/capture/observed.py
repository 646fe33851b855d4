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

from regard.attention import prepare
from regard.heads.capture.registry import GatherHeads
from regard.kernels import Call, reference
from regard.kernels.precision import fixed_precision
from regard.masks import Causal, Keep, Mask

__all__ = [
    "ObservedCall",
    "Projection",
    "error_of",
    "evened",
    "from_huggingface",
    "from_sdpa",
    "output_projection",
    "output_weight",
    "whole_parameter",
    "with_additive_mask",
]


@dataclass
class Projection:
    """The output projection of one attention, and what was seen of it when it ran.

    The heads' outputs enter it side by side, (B, N, H * E); or, in between, a gate or a norm made something else of
    them. Either way each head has its slice of what enters, and what the slices add sums to what comes out."""

    weight: Tensor  # (W, H * E)
    bias: Tensor | None = None  # (W,)
    unknown: str = "one that was not seen to run"  # why it is not known what each head adds; "" where it is
    plain: bool = False  # whether the heads' outputs entered as they are
    entered: Tensor | None = None  # (B, H, N, E): what entered, where it is something else and `keep` was asked for
    heads: Tensor | None = None  # (B, H, N, E): the heads' outputs, until it has run

    @staticmethod
    def inside(weight: Tensor, bias: Tensor | None) -> Projection:
        """One that the attention function itself applies to the heads' outputs."""
        return Projection(weight, bias, unknown="", plain=True)

    def ran(self, entered: object, result: object, *, alone: bool, keep: bool) -> None:
        """It was given `entered` and gave `result`; `alone`: no other attention's heads entered with these."""
        heads, self.heads = self.heads, None
        if not alone:
            self.unknown = "one that several attentions enter together"
            return
        if heads is None or not isinstance(entered, Tensor) or not isinstance(result, Tensor):
            return
        parts = _in_heads(entered.detach(), heads)
        if parts is None:
            self.unknown = f"one that was given {tuple(entered.shape)} after heads of {tuple(heads.shape)}"
            return
        if not _is_linear(entered.detach(), result.detach(), self.weight, self.bias):
            self.unknown = "one whose result is not its weight times what it was given"
            return
        self.unknown, self.plain = "", _same_numbers(parts, heads)
        if keep and not self.plain:
            self.entered = parts.clone()


def _in_heads(entered: Tensor, heads: Tensor) -> Tensor | None:
    """What entered a projection, (B, N, H * E) or flatter, as (B, H, N, E); None where it is not made of these."""
    batch, count, n, width = heads.shape
    if entered.shape[-1] != count * width or entered.numel() != heads.numel():
        return None
    if entered.shape[:-1] == (n, batch) and n != batch:  # the batch second
        return entered.unflatten(-1, (count, width)).permute(1, 2, 0, 3)
    return entered.reshape(batch, n, count, width).transpose(1, 2)


def _same_numbers(entered: Tensor, heads: Tensor) -> bool:
    close = 4 * torch.finfo(entered.dtype).eps
    return torch.allclose(entered, heads.to(entered.dtype), rtol=close, atol=0.0, equal_nan=True)


def _is_linear(entered: Tensor, result: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether a result is `weight` times what was given, and `bias`, but for rounding."""
    if result.shape != (*entered.shape[:-1], weight.shape[0]) or not result.is_floating_point():
        return False
    wide = torch.promote_types(torch.promote_types(entered.dtype, weight.dtype), torch.float32)
    with fixed_precision(entered):
        x, w = entered.to(wide), weight.to(wide)
        expected = x @ w.mT
        size = x.norm(dim=-1, keepdim=True) * w.norm(dim=1)  # no product is larger
        if bias is not None:
            expected, size = expected + bias.to(wide), size + bias.to(wide).abs()
        eps = max(torch.finfo(x.dtype).eps for x in (entered, result))
        off = (result.to(wide) - expected).abs() > 32 * eps * size
        return not bool((off & expected.isfinite()).any())


@dataclass
class ObservedCall:
    """What is known of it. Either a `call` (q, k, v and everything that decides the weights), or, where the model wrote
    attention by hand, the `weights` (B, H, N, M) themselves, before dropout."""

    layer: str
    module: nn.Module
    forward: int  # in which outermost call of the model
    kind: Literal["self", "cross"]
    call: Call | None = None
    weights: Tensor | None = None
    ids: Tensor | None = None  # (1|B, N)
    padding: Tensor | None = None  # (B, 1, N) True for padding queries; None if there is no padding
    out_weight: Tensor | None = None  # (W, H * E)
    projection: Projection | None = None  # the output projection, where it is known
    input: Tensor | None = None  # (B, N, W): what queries are made of, where it is known
    output: Tensor | None = None  # (B, H, N, E), where it is known
    values: Tensor | None = None  # (..., M, E) of attention by hand, where they are known, in its own order of axes
    cache: Any = None  # the object that holds its keys, where it is known
    numbers: Tensor | None = None  # (M,) which tokens its keys are, where it is known
    # Where other processes compute other heads: `call` has this process's, `gather_heads` gathers results per head
    gather_heads: GatherHeads | None = None
    global_call: Callable[[], Call] | None = None  # all tokens of all heads

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
            return batch, heads if self.gather_heads is None else self.gather_heads.heads, n, m
        assert self.weights is not None
        batch, heads, n, m = self.weights.shape
        return batch, heads, n, m


def evened(attention: ObservedCall) -> ObservedCall:
    """The same with one head, whose weights are equal on all keys that may be seen: what a head without a mind does."""
    if attention.call is None:
        assert attention.weights is not None
        seen = (attention.weights > 0).any(1, keepdim=True).float()
        return replace(attention, weights=seen / seen.sum(-1, keepdim=True).clamp(min=1))
    call = attention.call
    mask = call.mask
    if mask is not None and not mask.shared_by_heads():
        mask = mask.part(call.whole(), slice(0, 1), 0)
    q, k = (x.new_zeros(x.shape[0], 1, x.shape[2], 1, dtype=call.dtype) for x in (call.q, call.k))
    even = replace(call, q=q, k=k, v=k, scale=1.0, softcap=None, biases=(), sinks=None, dropout=None, mask=mask)
    return replace(attention, call=even, gather_heads=None, global_call=None)


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
    return {"mask": None if visible.all() else Keep(visible), "bias": added if added.any() else None}


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
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | Mask | None,
    *,
    masks: Literal["eager", "sdpa"],
    **options: Any,
) -> Call:
    """From what transformers hands to an attention function that reads planes: kv heads as they are, softcap, sinks, a
    bias of positions.

    "eager" adds the mask, booleans too (True is 1, and hides nothing), and hides nothing without one. To "sdpa" True is
    what is seen, and a mask that is missing means causal from the top left, by the module's own word.
    """
    q, k, v = (x.detach() for x in (query, key, value))
    said: dict[str, Any] = {"mask": None, "bias": None}
    if isinstance(attention_mask, Mask):
        said["mask"] = attention_mask
    elif attention_mask is not None:
        mask = attention_mask[..., : k.shape[2]].detach()
        plane = masks == "sdpa" and mask.dtype is torch.bool
        said = with_additive_mask(mask if plane or mask.is_floating_point() else mask.to(q.dtype))
    elif masks == "sdpa" and q.shape[2] > 1:
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


def error_of(call: Call, output: Tensor) -> float:
    """How far outputs (B, H, N, E) are from those of a call, in parts of the largest value: compared in a few rows, the
    first, the middle and the last ones. Rows that see nothing do not count."""
    n, m = call.shape[2:]
    worst = torch.zeros((), dtype=call.dtype, device=output.device)
    with fixed_precision(call.q):
        for first in sorted({0, max(0, n // 2 - 2), max(0, n - 4)}):
            rows = slice(first, min(first + 4, n))
            part = call.part(call.q[:, :, rows], call.k, call.v, slice(None), rows, slice(0, m))
            right, lse = reference.forward(part)
            off = (output[:, :, rows].to(call.dtype) - right.to(call.dtype)).abs().amax(-1)
            off = off.masked_fill(lse.isneginf() | right.isnan().any(-1), 0.0)
            worst = torch.maximum(worst, off.amax()) if off.numel() else worst
    largest = call.v.abs().nan_to_num(0.0).amax() if call.v.numel() else worst
    return float(worst.nan_to_num(torch.inf) / largest.clamp(min=1e-30))


PROJECTIONS = ("out_proj", "o_proj", "c_proj", "dense", "out_lin", "o", "proj", "Wo", "wo", "attention_out")  # names


def output_projection(
    module: nn.Module, heads: int, width: int, *, parent: nn.Module | None = None
) -> nn.Module | None:
    """The output projection of an attention, by the names that are common for it: of the module itself, or, where that
    has none (BERT), of `output` beside it in its parent; None where it is not known."""
    for owner in (module, getattr(parent, "output", None)):
        for name in PROJECTIONS:
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
    """A parameter without its gradient; a DTensor in full."""
    return (parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter).detach()  # type: ignore[operator]


def output_weight(module: nn.Module, heads: int, width: int, *, parent: nn.Module | None = None) -> Tensor | None:
    """The weight (W, H * E) of the output projection; None where it is not known."""
    projection = output_projection(module, heads, width, parent=parent)
    if projection is None:
        return None
    weight = whole_parameter(projection.weight)  # type: ignore[arg-type]
    return weight.mT if type(projection).__name__ == "Conv1D" else weight
