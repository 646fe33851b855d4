"""A call of `nn.MultiheadAttention` in the words of `regard.attend`: one translation for all who need it.

Theirs: True hides, float masks are added, (B * H, N, M) masks, sequence first unless `batch_first`, causal masks from
the top left, extra keys that every query sees. Ours: heads (B, H, N, D), a mask, a bias, positions.

Letters: B batch, H heads, N queries, M keys, D head width, W model width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
    "operands",
    "project",
    "refused_as_by_torch",
    "said_in_masks",
]


class Operands(NamedTuple):
    """What `attend` takes: q (B, H, N, D), k and v (B, H, M, D), and options `mask`, `bias`, `positions`."""

    q: Tensor
    k: Tensor
    v: Tensor
    options: dict[str, Any]


def said_in_masks(
    shape: tuple[int, int, int, int],
    *,
    key_padding_mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    extra: int = 0,
) -> dict[str, Any]:
    """`mask`, `bias` and `positions` of `attend`, for (B, H, N, M) and `extra` keys more, which all may see.

    `is_causal` stands for the causal mask. Beside an `attn_mask` it is a hint that this is the causal one, and looked
    after: the mask is what counts.

    >>> said_in_masks((1, 1, 2, 2), is_causal=True)
    {'mask': Causal(), 'bias': None, 'positions': 0}
    """
    batch, heads, n, m = shape
    parts: list[Mask] = []
    biases: list[Tensor] = []
    device = attn_mask.device if attn_mask is not None else None
    is_causal = is_causal and (attn_mask is None or is_causal_mask(attn_mask, n, m))
    if is_causal:
        parts.append(Causal() | Keep(torch.arange(m + extra, device=device)[None] >= m) if extra else Causal())
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
            parts.append(Hide(_padded(attn_mask, extra)))
        else:
            biases.append(_padded(attn_mask, extra))
    if key_padding_mask is not None:
        if tuple(key_padding_mask.shape) != (batch, m):
            raise bad_value(
                "key_padding_mask", expected=f"shape (B, M) = {(batch, m)}", received=shape_of(key_padding_mask)
            )
        if _is_boolean("key_padding_mask", key_padding_mask):
            parts.append(Padding(keep=~_padded(key_padding_mask, extra)))
        else:
            biases.append(_padded(key_padding_mask, extra)[:, None, None])
    mask = parts[0] if parts else None
    for part in parts[1:]:
        mask = part if mask is None else mask & part
    return {"mask": mask, "bias": biases or None, "positions": 0 if is_causal else None}


def _is_boolean(what: str, mask: Tensor) -> bool:
    if mask.dtype is not torch.bool and not mask.is_floating_point():
        raise bad_type(
            what,
            expected="a boolean tensor (True hides) or a floating-point one (added to the scores)",
            received=mask.dtype,
            remedy="mask.bool() where nonzero hides",
        )
    return mask.dtype is torch.bool


def is_causal_mask(mask: Tensor, n: int, m: int) -> bool:
    """Whether a mask is known to hide what is after the query, from the top left, and to do nothing else."""
    if torch.compiler.is_compiling() or mask.is_meta or tuple(mask.shape[-2:]) != (n, m):
        return False  # it is read as it is
    after = torch.ones(n, m, dtype=torch.bool, device=mask.device).triu(1)
    if mask.dtype is torch.bool:
        return bool((mask == after).all())
    return bool((mask.detach() == torch.zeros_like(after, dtype=mask.dtype).masked_fill(after, -torch.inf)).all())


def _padded(mask: Tensor, extra: int) -> Tensor:
    """More columns at the end that hide nothing."""
    return F.pad(mask, (0, extra)) if extra else mask


def project(
    query: Tensor, key: Tensor, value: Tensor, weight: Tensor | tuple[Tensor, Tensor, Tensor], bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Through the packed weight (3 W, W), in one product for self attention; or through three of them. A bias of
    another dtype is added as torch adds it: in that of the product."""
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
    """From projected q (B, N, W), k and v (B, M, W) to heads; `bias_k`, `bias_v` and zeros come as keys at the end."""
    batch, n, m = q.shape[0], q.shape[1], k.shape[1]
    more_k, more_v = [], []
    if bias_k is not None and bias_v is not None:
        more_k.append(bias_k.expand(batch, 1, -1))
        more_v.append(bias_v.expand(batch, 1, -1))
    if add_zero_attn:
        more_k.append(k.new_zeros(batch, 1, k.shape[2]))
        more_v.append(v.new_zeros(batch, 1, v.shape[2]))
    extra = len(more_k)
    if extra:
        k, v = torch.cat([k, *(x.to(k.dtype) for x in more_k)], 1), torch.cat([v, *(x.to(v.dtype) for x in more_v)], 1)
    options = said_in_masks(
        (batch, num_heads, n, m),
        key_padding_mask=key_padding_mask,
        attn_mask=attn_mask,
        is_causal=is_causal,
        extra=extra,
    )
    q, k, v = (x.unflatten(-1, (num_heads, -1)).transpose(1, 2) for x in (q, k, v))
    return Operands(q, k, v, options)


def functional_operands(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> Operands:
    """The same from the arguments of `F.multi_head_attention_forward`: inputs (N, B, W), or (N, W) without a batch.

    As it computes: where neither weights are needed nor keys are padding, it believes `is_causal` and reads no mask.
    """
    one = query.dim() == 2
    q, k, v = (x[None] if one else x.transpose(0, 1) for x in (query, key, value))
    k = q if key is query else k
    v = k if value is key else v
    weight = (q_proj_weight, k_proj_weight, v_proj_weight) if use_separate_proj_weight else in_proj_weight
    q, k, v = project(q, k, v, weight, in_proj_bias)  # type: ignore[arg-type]
    if static_k is not None:  # (B * H, M, D), in the place of what was projected
        k = static_k.unflatten(0, (-1, num_heads)).transpose(1, 2).flatten(2)
    if static_v is not None:
        v = static_v.unflatten(0, (-1, num_heads)).transpose(1, 2).flatten(2)
    if one and key_padding_mask is not None:
        key_padding_mask = key_padding_mask[None]
    believed = is_causal and attn_mask is not None and not need_weights and key_padding_mask is None
    found = operands(
        q,
        k,
        v,
        num_heads,
        bias_k=bias_k,
        bias_v=bias_v,
        add_zero_attn=add_zero_attn,
        key_padding_mask=key_padding_mask,
        attn_mask=None if believed else attn_mask,
        is_causal=is_causal,
    )
    return found._replace(options=found.options | {"mask": Causal()}) if believed else found  # (extra keys are hidden)


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
    """Call `compute` on (B, N, W), (B, M, W), (B, M, W) and (B, M), whatever way the tensors came; and give back its
    output (B, N, W) and weights (B, H, N, M), if any, the way they came: sequence first, without a batch, nested.

    Tensors that were one object stay one, so that self attention is known by it.
    """
    for what, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, Tensor):
            raise bad_type(what, expected="a tensor", received=type(x).__name__)
    if query.is_nested or key.is_nested or value.is_nested:
        return _nested(compute, query, key, value, key_padding_mask, average=average)

    def turn(x: Tensor) -> Tensor:
        return x[None] if x.dim() == 2 else x if already else x.transpose(0, 1)

    if {query.dim(), key.dim(), value.dim()} not in ({2}, {3}):
        raise bad_value(
            "query, key, value",
            expected="three of 3 axes, or three of 2 without a batch",
            received=f"{shape_of(query)}, {shape_of(key)}, {shape_of(value)}",
        )
    alone = query.dim() == 2
    q = turn(query)
    k = q if key is query else turn(key)
    v = k if value is key else turn(value)
    if alone and key_padding_mask is not None:
        key_padding_mask = key_padding_mask[None]
    out, weights = compute(q, k, v, key_padding_mask)
    if weights is not None:
        weights = weights.mean(1) if average else weights
        weights = weights[0] if alone else weights
    return (out[0] if alone else out if already else out.transpose(0, 1)), weights


def _nested(
    compute: Compute, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None, *, average: bool
) -> tuple[Tensor, Tensor | None]:
    """Texts of different lengths as nested tensors, (B, n, W) each: pad them, and nest the output as the query is. The
    weights, (B, N, M), stay padded."""
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
            received=f"{query.dim()}, {key.dim()}, {value.dim()} axes with that of texts",
        )
    lengths, of_keys, of_values = ([item.shape[0] for item in x.unbind()] for x in (query, key, value))
    if of_keys != of_values or len(of_keys) != len(lengths):
        raise bad_value(
            "nested query, key, value",
            expected="as many texts in each, keys as long as their values",
            received=f"lengths {lengths}, {of_keys} and {of_values}",
        )
    q = torch.nested.to_padded_tensor(query, 0.0)
    k = q if key is query else torch.nested.to_padded_tensor(key, 0.0)
    v = k if value is key else torch.nested.to_padded_tensor(value, 0.0)
    hidden = torch.arange(k.shape[1], device=k.device) >= torch.tensor(of_keys, device=k.device)[:, None]
    out, weights = compute(q, k, v, hidden)
    rows = [row[:length] for row, length in zip(out, lengths, strict=True)]
    if query.layout is torch.jagged and query.lengths() is None:  # type: ignore[attr-defined]
        nested = torch.nested.nested_tensor_from_jagged(torch.cat(rows), query.offsets())  # type: ignore[attr-defined]
    else:
        nested = torch.nested.as_nested_tensor(rows, layout=query.layout)
    return nested, weights.mean(1) if average and weights is not None else weights


@contextmanager
def refused_as_by_torch(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    separate: tuple[Tensor | None, Tensor | None, Tensor | None],
    bias_k: Tensor | None = None,
    bias_v: Tensor | None = None,
    add_zero_attn: bool = False,
    **call: Any,
) -> Iterator[None]:
    """Where a call of what replaces an `nn.MultiheadAttention` raises, ask torch for the same; where it raises as well,
    the error is of both types."""
    refuse_trace("attention")
    try:
        yield
    except Exception as error:
        refusal = _refusal(module, query, key, value, separate, bias_k, bias_v, add_zero_attn, call)
        if refusal is None or isinstance(error, type(refusal)):
            raise
        raise also(error, refusal) from None


def _refusal(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    separate: tuple[Tensor | None, Tensor | None, Tensor | None],
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    call: dict[str, Any],
) -> Exception | None:
    """What torch raises for a call, if it does."""
    packed = module.in_proj_weight
    names = dict(zip(("q_proj_weight", "k_proj_weight", "v_proj_weight"), separate, strict=True))
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
            bias_k,
            bias_v,
            add_zero_attn,
            0.0,
            module.out_proj.weight,
            module.out_proj.bias,
            training=False,
            use_separate_proj_weight=packed is None,
            **names,
            **call,
        )
    except Exception as refusal:
        return refusal
    return None
