"""How a capture handles `F.multi_head_attention_forward`, the function of `nn.MultiheadAttention`.

The output projection is inside that function. If heads are changed, it is computed again from the changed heads.

Letters: B batch, H heads, N queries, M keys, E head width, W model width.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.attention import attend, prepare
from regard.errors import bad_value
from regard.heads.capture import huggingface
from regard.heads.capture.module_stack import Frame, same_input
from regard.heads.capture.observed import ObservedCall
from regard.heads.capture.output_projection import Projection
from regard.heads.capture.sdpa import split_additive_biases
from regard.heads.capture.tensor_notes import tensors_in
from regard.kernels import Call
from regard.layouts.torch_mha_call import Operands, functional_operands, is_causal_mask

if TYPE_CHECKING:
    from regard.heads.capture.capture import AttentionCapture

__all__ = ["multi_head_attention_forward"]

Args = tuple[Any, ...]
Kwargs = dict[str, Any]

# Positions of arguments
DROPOUT, OUT_WEIGHT, OUT_BIAS, TRAINING = 10, 11, 12, 13


def multi_head_attention_forward(
    capture: AttentionCapture, frame: Frame, func: Any, args: Args, kwargs: Kwargs
) -> tuple[Tensor, Tensor | None]:
    """Report one call of the function, and return its result, with the heads' outputs replaced if they are changed."""
    # Heads may be changed here, or by an outer capture whose changes are to be seen. Then the heads' outputs are
    # computed by `attend`, which outer captures see; this call itself is hidden from them.
    computed = _computed(capture, frame, args, kwargs)
    if computed is not None:
        return computed
    recompute = capture.changes or (capture.needs_output and any(x.changes for x in huggingface.observers()))
    with torch._C.DisableTorchFunction() if recompute else nullcontext():
        out, weights = _call_as_uncaptured(frame, args, kwargs)
    with capture.graph():
        operands = functional_operands(*args, **kwargs)
        if not recompute and _has_wrong_causal_hint(frame.module, operands, kwargs) and not _gives(operands, out, args):
            operands = functional_operands(*args, **kwargs | {"is_causal": False})
        q, k, v = operands[:3]
        call = prepare(q, k, v, **split_additive_biases(**operands.options))
    attention = _described(capture, frame, call, args, kwargs)
    heads = _heads(args, kwargs) if recompute else None
    with torch.no_grad(), torch._C.DisableTorchFunction():
        if capture.needs_output:
            attention.output = attend(q, k, v, **operands.options) if heads is None else heads.detach()
        capture.see(attention)
    if heads is None:
        return out, weights
    return _projected(capture.change(attention, heads) if capture.changes else heads, args, kwargs), weights


def _described(capture: AttentionCapture, frame: Frame, call: Call, args: Args, kwargs: Kwargs) -> ObservedCall:
    query, key = args[0], args[1]
    is_self = same_input(query, key)
    if is_self and call.contiguous:
        call = replace(call, q_start=0)  # keys that are added (add_bias_kv, add_zero_attn) stand at the end
    attention = capture.describe(frame, call.shape, capture.streams.of(query), call=call)
    attention.kind = "self" if is_self else "cross"
    weight, bias = _output_projection(args, kwargs)
    attention.out_weight = weight.detach()
    attention.projection = Projection.of_heads(weight.detach(), None if bias is None else bias.detach())
    attention.input = query.detach()[None] if query.dim() == 2 else query.detach().transpose(0, 1)
    return attention


def _output_projection(args: Args, kwargs: Kwargs) -> tuple[Tensor, Tensor | None]:
    weight = _argument("out_proj_weight", OUT_WEIGHT, args, kwargs)
    return weight, _argument("out_proj_bias", OUT_BIAS, args, kwargs)


def _projected(heads: Tensor, args: Args, kwargs: Kwargs) -> Tensor:
    """The function's output (N, B, W), or (N, W), from the heads' outputs (B, H, N, E)."""
    out = F.linear(heads.transpose(1, 2).flatten(2), *_output_projection(args, kwargs))
    return out[0] if args[0].dim() == 2 else out.transpose(0, 1)


def _computed(
    capture: AttentionCapture, frame: Frame, args: Args, kwargs: Kwargs
) -> tuple[Tensor, Tensor | None] | None:
    """The result of the function, computed in one pass with what is measured, if the capture may do so and nobody asked
    for the weights; else None."""
    if not capture.computes or kwargs.get("need_weights", True) or len(args) > TRAINING:
        return None
    if _drops(args, kwargs) or not capture.may_compute(*tensors_in((args, kwargs.values()))):
        return None
    try:
        with torch.no_grad():
            operands = functional_operands(*args, **kwargs)
            if _has_wrong_causal_hint(frame.module, operands, kwargs):
                return None
            call = prepare(*operands[:3], **split_additive_biases(**operands.options))
    except (ValueError, TypeError, RuntimeError):
        return None  # torch says in its own words what is wrong
    attention = _described(capture, frame, call, args, kwargs)
    with torch._C.DisableTorchFunction():
        heads = capture.compute(frame, attention)
        return _call_as_uncaptured(frame, args, kwargs) if heads is None else (_projected(heads, args, kwargs), None)


def _argument(name: str, position: int, args: Args, kwargs: Kwargs, default: Any = None) -> Any:
    return kwargs.get(name, args[position] if len(args) > position else default)


def _call_as_uncaptured(frame: Frame, args: Args, kwargs: Kwargs) -> tuple[Tensor, Tensor | None]:
    """The result as the calling module computes it without a capture: perhaps by the fast path of
    `nn.MultiheadAttention`, which torch disables under a mode. (There, rows that may see nothing are NaN.)"""
    module, query = frame.module, frame.given("query")
    is_torch_forward = getattr(module.forward, "__func__", None) is nn.MultiheadAttention.forward
    if not is_torch_forward or not isinstance(query, Tensor) or query.data_ptr() != args[0].data_ptr():
        return F.multi_head_attention_forward(*args, **kwargs)
    out, weights = module.forward(*frame.args, **frame.kwargs)
    return (out.transpose(0, 1) if module.batch_first and out.dim() == 3 else out), weights


def _has_wrong_causal_hint(module: nn.Module, operands: Operands, kwargs: Kwargs) -> bool:
    """Whether `is_causal` was given with a mask that is not causal, and the fast path, which reads the mask, may have
    run."""
    mask = kwargs.get("attn_mask")
    if not kwargs.get("is_causal") or mask is None or module.training or not isinstance(module, nn.MultiheadAttention):
        return False
    return not is_causal_mask(mask, operands.q.shape[2], mask.shape[-1])


def _gives(operands: Operands, out: Tensor, args: Args) -> bool:
    """Whether the heads of these operands give the output (N, B, W), up to rounding."""
    heads = attend(operands.q, operands.k, operands.v, **operands.options).transpose(1, 2).flatten(2)
    expected = F.linear(heads, args[OUT_WEIGHT], args[OUT_BIAS]).transpose(0, 1).reshape(out.shape)
    largest = float(expected.abs().amax())
    return torch.allclose(out, expected.to(out.dtype), rtol=1e-2, atol=1e-3 * largest, equal_nan=True)


def _drops(args: Args, kwargs: Kwargs) -> float:
    """The probability of dropout, 0 in evaluation."""
    training = _argument("training", TRAINING, args, kwargs, True)
    return _argument("dropout_p", DROPOUT, args, kwargs, 0.0) if training else 0.0


def _heads(args: Args, kwargs: Kwargs) -> Tensor:
    """The heads' outputs (B, H, N, E), with gradients."""
    dropout = _drops(args, kwargs)
    if dropout:
        raise bad_value(
            "nn.MultiheadAttention",
            expected="no dropout where heads are changed",
            received=f"dropout {dropout} in training",
            remedy="model.eval(), or dropout=0",
        )
    operands = functional_operands(*args, **kwargs)
    return attend(operands.q, operands.k, operands.v, **operands.options)
