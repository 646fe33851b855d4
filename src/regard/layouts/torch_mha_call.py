"""Translate a call of `nn.MultiheadAttention` to the arguments of `regard.attend`; used by `swap` and `watch`.

torch: True hides, float masks are added, masks may be (B * H, N, M), the sequence comes first unless `batch_first`,
causal masks start at the top left, and extra keys are visible to all. Ours: heads (B, H, N, D), mask, bias, positions.

Letters: B batch, H heads, N queries, M keys, D head width, W model width.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import reduce
from operator import and_
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.errors import also, bad_type, bad_value, refuse_trace, shape_of
from regard.masks import Causal, Hide, Keep, Mask, Padding

__all__ = [
    "Operands",
    "batch_first",
    "functional_operands",
    "is_causal_mask",
    "mask_options",
    "operands",
    "project",
    "with_torch_errors",
]


class Operands(NamedTuple):
    """Arguments of `attend`: q (B, H, N, D), k and v (B, H, M, D), and options `mask`, `bias`, `positions`."""

    q: Tensor
    k: Tensor
    v: Tensor
    options: dict[str, Any]


def mask_options(
    shape: tuple[int, int, int, int],
    *,
    key_padding_mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    extra: int = 0,
) -> dict[str, Any]:
    """`mask`, `bias` and `positions` of `attend`, for shape (B, H, N, M) plus `extra` keys that every query sees.

    Without an `attn_mask`, `is_causal` means the causal mask. With one, it is a hint that this is the causal mask,
    which is checked: if they differ, the mask counts.

    >>> mask_options((1, 1, 2, 2), is_causal=True)
    {'mask': Causal(), 'bias': None, 'positions': 0}
    """
    batch, heads, n, m = shape
    masks: list[Mask] = []
    biases: list[Tensor] = []
    device = attn_mask.device if attn_mask is not None else None
    is_causal = is_causal and (attn_mask is None or is_causal_mask(attn_mask, n, m))
    if is_causal:
        masks.append(Causal() | Keep(torch.arange(m + extra, device=device)[None] >= m) if extra else Causal())
    elif attn_mask is not None:
        if tuple(attn_mask.shape) == (n, m):
            attn_mask = attn_mask[None, None]
        elif tuple(attn_mask.shape) == (batch * heads, n, m):
            attn_mask = attn_mask.unflatten(0, (batch, heads))
        else:
            raise bad_value(
                "attn_mask",
                expected=f"shape (N, M) = {(n, m)} or (B * H, N, M) = {(batch * heads, n, m)}",
                received=shape_of(attn_mask),
            )
        if _is_boolean("attn_mask", attn_mask):
            masks.append(Hide(_padded(attn_mask, extra)))
        else:
            biases.append(_padded(attn_mask, extra))
    if key_padding_mask is not None:
        if tuple(key_padding_mask.shape) != (batch, m):
            raise bad_value(
                "key_padding_mask", expected=f"shape (B, M) = {(batch, m)}", received=shape_of(key_padding_mask)
            )
        if _is_boolean("key_padding_mask", key_padding_mask):
            masks.append(Padding(keep=~_padded(key_padding_mask, extra)))
        else:
            biases.append(_padded(key_padding_mask, extra)[:, None, None])
    return {
        "mask": reduce(and_, masks) if masks else None,
        "bias": biases or None,
        "positions": 0 if is_causal else None,
    }


def _is_boolean(what: str, mask: Tensor) -> bool:
    """True for a boolean mask, False for a float one; raises for others."""
    if mask.dtype is not torch.bool and not mask.is_floating_point():
        raise bad_type(
            what,
            expected="a boolean tensor (True hides) or a floating-point one (added to the scores)",
            received=mask.dtype,
            remedy="mask.bool(), if nonzero means hidden",
        )
    return mask.dtype is torch.bool


def is_causal_mask(mask: Tensor, n: int, m: int) -> bool:
    """Whether a mask is exactly the causal one, from the top left. False if its values cannot be read now."""
    if torch.compiler.is_compiling() or mask.is_meta or tuple(mask.shape[-2:]) != (n, m):
        return False
    after = torch.ones(n, m, dtype=torch.bool, device=mask.device).triu(1)
    if mask.dtype is torch.bool:
        return bool((mask == after).all())
    return bool((mask.detach() == torch.zeros_like(after, dtype=mask.dtype).masked_fill(after, -torch.inf)).all())


def _padded(mask: Tensor, extra: int) -> Tensor:
    """The mask with `extra` more columns, which hide nothing."""
    return F.pad(mask, (0, extra)) if extra else mask


def project(
    query: Tensor, key: Tensor, value: Tensor, weight: Tensor | tuple[Tensor, Tensor, Tensor], bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Project by the packed weight (3 W, W), in one product for self attention, or by three weights. A bias of another
    dtype is converted first, as torch does."""
    bias = None if bias is None else bias.to(query.dtype)
    if isinstance(weight, Tensor) and key is query and value is key:
        q, k, v = F.linear(query, weight, bias).chunk(3, dim=-1)
        return q, k, v
    weights = weight.chunk(3) if isinstance(weight, Tensor) else weight
    biases = (None, None, None) if bias is None else bias.chunk(3)
    q, k, v = (F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True))
    return q, k, v


def operands(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    num_heads: int,
    *,
    bias_k: Tensor | None = None,
    bias_v: Tensor | None = None,
    add_zero_attn: bool = False,
    key_padding_mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
) -> Operands:
    """Split projected q (B, N, W), k, v (B, M, W) into heads; `bias_k`, `bias_v` and zeros become keys at the end."""
    batch, n, m = q.shape[0], q.shape[1], k.shape[1]
    extra_k, extra_v = [], []
    if bias_k is not None and bias_v is not None:
        extra_k.append(bias_k.expand(batch, 1, -1))
        extra_v.append(bias_v.expand(batch, 1, -1))
    if add_zero_attn:
        extra_k.append(k.new_zeros(batch, 1, k.shape[2]))
        extra_v.append(v.new_zeros(batch, 1, v.shape[2]))
    extra = len(extra_k)
    if extra:
        k, v = (
            torch.cat([k, *(x.to(k.dtype) for x in extra_k)], 1),
            torch.cat([v, *(x.to(v.dtype) for x in extra_v)], 1),
        )
    options = mask_options(
        (batch, num_heads, n, m),
        key_padding_mask=key_padding_mask,
        attn_mask=attn_mask,
        is_causal=is_causal,
        extra=extra,
    )
    q, k, v = (x.unflatten(-1, (num_heads, -1)).transpose(1, 2) for x in (q, k, v))
    return Operands(q, k, v, options)


_SIGNATURE = inspect.signature(F.multi_head_attention_forward)


def functional_operands(*args: Any, **kwargs: Any) -> Operands:
    """The operands of a call of `F.multi_head_attention_forward`: inputs (N, B, W), or (N, W) without a batch.

    Like torch, it trusts `is_causal` and ignores `attn_mask` if neither weights nor a padding mask are given.
    """
    bound = _SIGNATURE.bind(*args, **kwargs)
    bound.apply_defaults()
    call = SimpleNamespace(**bound.arguments)
    unbatched = call.query.dim() == 2
    q, k, v = (x[None] if unbatched else x.transpose(0, 1) for x in (call.query, call.key, call.value))
    k = q if call.key is call.query else k
    v = k if call.value is call.key else v
    separate = (call.q_proj_weight, call.k_proj_weight, call.v_proj_weight)
    q, k, v = project(q, k, v, separate if call.use_separate_proj_weight else call.in_proj_weight, call.in_proj_bias)
    if call.static_k is not None:  # (B * H, M, D), replaces the projected keys
        k = call.static_k.unflatten(0, (-1, call.num_heads)).transpose(1, 2).flatten(2)
    if call.static_v is not None:
        v = call.static_v.unflatten(0, (-1, call.num_heads)).transpose(1, 2).flatten(2)
    padding = call.key_padding_mask
    trusted = call.is_causal and call.attn_mask is not None and not call.need_weights and padding is None
    result = operands(
        q,
        k,
        v,
        call.num_heads,
        bias_k=call.bias_k,
        bias_v=call.bias_v,
        add_zero_attn=call.add_zero_attn,
        key_padding_mask=padding[None] if unbatched and padding is not None else padding,
        attn_mask=None if trusted else call.attn_mask,
        is_causal=call.is_causal,
    )
    return result._replace(options=result.options | {"mask": Causal()}) if trusted else result  # (hides extra keys)


Compute = Callable[[Tensor, Tensor, Tensor, "Tensor | None"], tuple[Tensor, "Tensor | None"]]


def batch_first(
    compute: Compute,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None,
    *,
    already: bool,
    average: bool,
) -> tuple[Tensor, Tensor | None]:
    """Call `compute` on batch-first inputs (B, N, W), (B, M, W), (B, M, W) and padding (B, M); return its output and
    weights in the form of the inputs: sequence first, without a batch, or nested.

    Inputs that are the same object stay the same object, which marks self attention.
    """
    for what, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, Tensor):
            raise bad_type(what, expected="a tensor", received=type(x).__name__)
    if query.is_nested or key.is_nested or value.is_nested:
        return _nested(compute, query, key, value, key_padding_mask, average=average)

    def to_batch_first(x: Tensor) -> Tensor:
        return x[None] if x.dim() == 2 else x if already else x.transpose(0, 1)

    if {query.dim(), key.dim(), value.dim()} not in ({2}, {3}):
        raise bad_value(
            "query, key, value",
            expected="all three with 3 axes, or with 2 axes if there is no batch",
            received=f"{shape_of(query)}, {shape_of(key)}, {shape_of(value)}",
        )
    unbatched = query.dim() == 2
    q = to_batch_first(query)
    k = q if key is query else to_batch_first(key)
    v = k if value is key else to_batch_first(value)
    if unbatched and key_padding_mask is not None:
        key_padding_mask = key_padding_mask[None]
    out, weights = compute(q, k, v, key_padding_mask)
    if weights is not None:
        weights = weights.mean(1) if average else weights
        weights = weights[0] if unbatched else weights
    return (out[0] if unbatched else out if already else out.transpose(0, 1)), weights


def _nested(
    compute: Compute, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None, *, average: bool
) -> tuple[Tensor, Tensor | None]:
    """`batch_first` for nested tensors (B, n, W): pad them, compute, and nest the output like the query. The weights,
    (B, N, M), stay padded."""
    if not (query.is_nested and key.is_nested and value.is_nested) or key_padding_mask is not None:
        raise bad_value(
            "nested query, key, value",
            expected="all three nested, and no key_padding_mask",
            received=", ".join("nested" if x.is_nested else "not nested" for x in (query, key, value))
            + ("" if key_padding_mask is None else ", a key_padding_mask"),
            remedy="torch.nested.to_padded_tensor(x, 0.0)",
        )
    if not query.dim() == key.dim() == value.dim() == 3:
        raise bad_value(
            "nested query, key, value",
            expected="texts of shape (n, W)",
            received=f"{query.dim()}, {key.dim()}, {value.dim()} axes, the batch included",
        )
    lengths, key_lengths, value_lengths = ([item.shape[0] for item in x.unbind()] for x in (query, key, value))
    if key_lengths != value_lengths or len(key_lengths) != len(lengths):
        raise bad_value(
            "nested query, key, value",
            expected="equal numbers of texts, and keys as long as their values",
            received=f"lengths {lengths}, {key_lengths} and {value_lengths}",
        )
    q = torch.nested.to_padded_tensor(query, 0.0)
    k = q if key is query else torch.nested.to_padded_tensor(key, 0.0)
    v = k if value is key else torch.nested.to_padded_tensor(value, 0.0)
    hidden = torch.arange(k.shape[1], device=k.device) >= torch.tensor(key_lengths, device=k.device)[:, None]
    out, weights = compute(q, k, v, hidden)
    rows = [row[:length] for row, length in zip(out, lengths, strict=True)]
    if query.layout is torch.jagged and query.lengths() is None:  # type: ignore[attr-defined]
        nested = torch.nested.nested_tensor_from_jagged(torch.cat(rows), query.offsets())  # type: ignore[attr-defined]
    else:
        nested = torch.nested.as_nested_tensor(rows, layout=query.layout)
    return nested, weights.mean(1) if average and weights is not None else weights


@contextmanager
def with_torch_errors(
    module: Any, query: Tensor, key: Tensor, value: Tensor, separate: tuple[Tensor | None, ...], **call: Any
) -> Iterator[None]:
    """If the body raises, make the same call of torch's own attention; if that raises too, the error has both types.

    Args:
        module: what replaces an `nn.MultiheadAttention`, with its attributes.
        separate: the weights of q, k and v, used if `module.in_proj_weight` is None.
        call: the other arguments of `nn.MultiheadAttention.forward`.
    """
    refuse_trace("attention")
    try:
        yield
    except Exception as error:
        torch_error = _torch_error(module, query, key, value, separate, call)
        if torch_error is None or isinstance(error, type(torch_error)):
            raise
        raise also(error, torch_error) from None


def _torch_error(
    module: Any, query: Tensor, key: Tensor, value: Tensor, separate: tuple[Tensor | None, ...], call: dict[str, Any]
) -> Exception | None:
    """The error that torch's own attention raises for a call, or None."""
    packed = module.in_proj_weight
    try:
        if module.batch_first and query.dim() == 3:
            query, key, value = (x.transpose(0, 1) if x.dim() == 3 else x for x in (query, key, value))
        F.multi_head_attention_forward(
            query,
            key,
            value,
            module.embed_dim,
            module.num_heads,
            packed,
            module.in_proj_bias,
            getattr(module, "bias_k", None),
            getattr(module, "bias_v", None),
            getattr(module, "add_zero_attn", False),
            0.0,
            module.out_proj.weight,
            module.out_proj.bias,
            training=False,
            use_separate_proj_weight=packed is None,
            **dict(zip(("q_proj_weight", "k_proj_weight", "v_proj_weight"), separate, strict=True)),
            **call,
        )
    except Exception as error:
        return error
    return None
