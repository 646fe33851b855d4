"""How a capture handles the functions that compute attention: torch's, regard's, and those in the registry.

`handler_of(func)` gives a handler, called as handler(capture, frame, func, args, kwargs). A handler calls the function,
hands `capture.report` the `Call` that it computes, and returns the result, with the heads' outputs replaced if the
capture changes them.

Letters: B batch, H query heads, N queries, M keys, D head width of q and k, E head width of v.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.attention import attend
from regard.cache import RollingCache
from regard.errors import bad_value
from regard.heads.capture import large_calls, layer_plans, registry
from regard.heads.capture.flash import from_varlen
from regard.heads.capture.flex import from_flex, learned_by
from regard.heads.capture.head_axes import HeadAxes, reorder_mask
from regard.heads.capture.module_stack import Frame
from regard.heads.capture.multi_head_attention import multi_head_attention_forward
from regard.heads.capture.observed import Subtracted
from regard.heads.capture.sdpa import from_sdpa
from regard.kernels import Call, observed_by
from regard.variants.difference import attend_difference

if TYPE_CHECKING:
    from regard.heads.capture.capture import AttentionCapture

__all__ = ["HANDLERS", "handler_of", "operator_name"]

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Handler = Callable[["AttentionCapture", Frame, Any, Args, Kwargs], Any]


def handler_of(func: Any) -> Handler | None:
    """The handler of a function; None if it is not known to compute attention."""
    handler = HANDLERS.get(func)
    if handler is None and isinstance(func, _OPERATOR_TYPES):
        handler = OPERATOR_HANDLERS.get(operator_name(func))
    if handler is None and registry.handler_of(func) is not None:
        return _registered
    return handler


def operator_name(func: Any) -> str:
    """The name of a torch operator, without its overload."""
    return str(getattr(func, "__name__", func)).partition(".")[0]


def _scaled_dot_product_attention(
    capture: AttentionCapture, frame: Frame, func: Any, args: Args, kwargs: Kwargs
) -> Tensor:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    options = dict(zip(names, args, strict=False)) | kwargs
    query, key, value = (options.pop(name) for name in names[:3])
    mask = options.pop("attn_mask", None)
    if _may_compute_sdpa(capture, query, key, value, mask, options):
        with torch.no_grad(), torch._C.DisableTorchFunction():
            call = _call_if_valid(query, key, value, mask, options)
        if call is not None:
            attention = capture.describe(frame, call.shape, capture.streams.of(query), call=call)
            computed = capture.compute(frame, attention)
            if computed is None:
                computed = func(*args, **kwargs)
                capture.computed_by_model(frame, attention, computed)
            return computed
    out = func(*args, **kwargs)
    if query.is_nested:
        raise bad_value(
            "watch",
            expected="padded tensors",
            received="nested tensors in attention",
            remedy="turn them off: nn.TransformerEncoder(..., enable_nested_tensor=False)",
        )
    axes = HeadAxes.of(query, key, capture.frames.sizes())
    if not capture.changes and axes.is_ambiguous(key):  # the axis of heads will be known from what the module does next

        def call_in_order(order: Tensor) -> Call:
            q, k, v = (x.detach().flatten(0, -3)[order] for x in (query, key, value))
            return from_sdpa(q, k, v, reorder_mask(mask, query, key, order), **options)

        capture.handwritten.wait_for_axes(frame, query, key, out, call_in_order)
        return out
    call = from_sdpa(axes(query), axes(key), axes(value), None if mask is None else axes.mask(mask), **options)
    attention = capture.describe(frame, call.shape, capture.streams.of(query), call=call)
    if dropout := options.get("dropout_p"):
        attention.unsure = f"dropout {dropout}"
    heads = capture.report(frame, attention, axes(out))
    return axes.restore(heads, out) if capture.changes else out


def _may_compute_sdpa(
    capture: AttentionCapture, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: Kwargs
) -> bool:
    """Whether a call of `F.scaled_dot_product_attention` may be computed in one pass with what is measured: as
    `capture.may_compute`, and with axes (B, H, N, D) beyond doubt."""
    if query.dim() != 4 or options.get("dropout_p") or query.is_nested:
        return False
    if not capture.may_compute(query, key, value, *(() if mask is None else (mask,))):
        return False
    axes = HeadAxes.of(query, key, capture.frames.sizes())
    return axes.order == "standard" and not axes.is_ambiguous(key)


def _call_if_valid(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: Kwargs) -> Call | None:
    """The call of some arguments; None if they are wrong, which torch then says in its own words."""
    try:
        return from_sdpa(query, key, value, mask, **options)
    except (ValueError, TypeError, RuntimeError):
        return None


def _flex_attention(capture: AttentionCapture, frame: Frame, func: Any, args: Args, kwargs: Kwargs) -> Any:
    with capture.graph(), torch._C.DisableTorchFunction():
        call = from_flex(*args, **kwargs)
    score_mod, _, _, options, *_ = args[3:]
    if torch.is_grad_enabled() and (learned := learned_by(score_mod)):
        raise bad_value(
            "flex_attention",
            expected="a score_mod that learns nothing, while the model is watched",
            received=f"one that reads {learned}, whose gradient only compiled code computes",
            remedy="watch with torch.no_grad()",
        )
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in args[:3])
    if not large_calls.is_large(call) or needs_grad or options.get("OUTPUT_MAX"):
        result = func(*args, **kwargs)  # uncompiled it builds all scores
    else:
        result = large_calls.flex_result(call)
    attention = capture.describe(frame, call.shape, capture.streams.of(args[:1]), call=call)
    out, *rest = result
    heads = capture.report(frame, attention, out)
    return (heads, *rest) if capture.changes else result


def _varlen_attn(capture: AttentionCapture, frame: Frame, func: Any, args: Args, kwargs: Kwargs) -> Any:
    writes_into_out = operator_name(func) == "_varlen_attn_out"
    inputs = args[1:] if writes_into_out else args
    call = from_varlen(*inputs, **{name: x for name, x in kwargs.items() if name != "out"})
    result = func(*args, **kwargs)
    out: Tensor = (kwargs["out"] if "out" in kwargs else args[0]) if writes_into_out else result[0]  # (N, H, E)
    attention = capture.describe(frame, call.shape, capture.streams.of(inputs), call=call)
    heads = capture.report(frame, attention, out.transpose(0, 1)[None])[0].transpose(0, 1)
    if not capture.changes:
        return result
    if not writes_into_out:
        return heads, *result[1:]
    out.copy_(heads)
    return result


def _attend(capture: AttentionCapture, frame: Frame, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """`regard.attend` hands over the call itself, where it runs: see `kernels/run.py`."""
    with observed_by(AttendObserver(capture, frame, capture.streams.of(args[0]))):
        return func(*args, **kwargs)


@dataclass
class AttendObserver:
    """Observes one `regard.attend`, or all in a module that calls nothing else."""

    capture: AttentionCapture
    frame: Frame | None = None  # the innermost that is running, if it is not given
    stream: Tensor | None = None  # the token ids of the queries, if they are followed
    # Between `repeat` and `attention`: the key of a plan, and q, k and v
    pending: tuple[Hashable, tuple[Tensor, Tensor, Tensor]] | None = None

    def attention(self, call: Call, compute: Callable[[], Tensor], kernel: str) -> Tensor:
        pending, self.pending = self.pending, None
        # (another call's, if that was refused in between)
        key, given = pending if pending is not None and pending[1][0] is call.q else (None, (call.q, call.k, call.v))
        frame = self.frame or self.capture.frames.current()
        if frame is None or self.capture.inside_attention:
            return compute()
        plain = call.dropout is None and not call.needs_lse
        one_pass = kernel == "auto" and plain and self.capture.may_compute(*call.learned())
        out = None if one_pass else compute()
        attention = self.capture.describe(frame, call.shape, self.stream, call=call)
        if call.dropout is not None:
            attention.unsure = "dropout in training"
        cache = frame.given("cache")
        if isinstance(cache, RollingCache):  # it holds the first tokens of the sequence, then the last ones
            length, first = call.shape[3], cache.keep_first
            attention.cache = cache
            attention.numbers = torch.arange(length, device=call.q.device)
            attention.numbers[first:] += cache.seen - length
        if out is not None:
            return self.capture.report(frame, attention, out)
        computed = self.capture.compute(frame, attention, any_row=True)
        if computed is None:
            return compute()  # the layer was not asked for
        layer_plans.keep(self.capture, key, attention, given)
        return computed

    def repeat(self, q: Tensor, k: Tensor, v: Tensor, kernel: str, options: Mapping[str, Any]) -> Tensor | None:
        """A layer like one before."""
        frame = self.capture.frames.current() if self.frame is None and kernel == "auto" else None
        if frame is None:
            return None
        key = layer_plans.attend_key(self.capture, frame, (q, k, v), options)
        out = layer_plans.by_plan(self.capture, frame, key, q, k, v)
        self.pending = (key, (q, k, v)) if key is not None and out is None else None
        return out

    def difference(self, first: Call, second: Call, factor: Tensor, compute: Callable[[], Tensor]) -> Tensor:
        """Two attentions to the same values, one subtracted from the other: observed as one."""
        frame, out = self.frame or self.capture.frames.current(), compute()
        if frame is None or self.capture.inside_attention:
            return out
        both: dict[str, Any] = {"call": first, "subtracted": Subtracted(second, factor)}
        return self.capture.report(frame, self.capture.describe(frame, first.shape, self.stream, **both), out)


def _attend_difference(capture: AttentionCapture, frame: Frame, func: Any, args: Args, kwargs: Kwargs) -> Tensor:
    """As `_attend`: `regard.variants.difference` hands over both calls, where they run."""
    with observed_by(AttendObserver(capture, frame, capture.streams.of(args[0]))):
        return func(*args, **kwargs)


def _registered(capture: AttentionCapture, frame: Frame, func: Any, args: Args, kwargs: Kwargs) -> Tensor:
    """Attention of which other processes compute other heads or tokens. All processes observe it at the same time,
    each all tokens of some heads."""
    partial_call_of = registry.handler_of(func)
    assert partial_call_of is not None
    out = func(*args, **kwargs)
    if capture.changes:
        raise bad_value(
            "heads",
            expected="a model on one process, where heads are changed",
            received="one whose heads or tokens are sharded over several",
            remedy="change them before regard.parallel, or prune",
        )
    q, k, v = (x.detach() for x in args)
    with torch.no_grad():
        partial_call = partial_call_of(q, k, v, **kwargs)
        shape = (*q.shape[:3], k.shape[2])
        attention = capture.describe(frame, shape, capture.streams.of(args[0]), call=partial_call.call)
        attention.gather_heads, attention.global_call = partial_call.gather_heads, partial_call.global_call
        for name in ("ids", "input"):
            of_tokens = getattr(attention, name)
            setattr(attention, name, None if of_tokens is None else partial_call.gather_tokens(of_tokens, 1))
        capture.projections.find(attention, frame, check=False)
        with torch._C.DisableTorchFunction():
            if capture.needs_output:
                attention.output = partial_call.gather_output(out.detach())
            capture.see(attention)
    return out


HANDLERS: dict[Any, Handler] = {
    F.scaled_dot_product_attention: _scaled_dot_product_attention,
    F.multi_head_attention_forward: multi_head_attention_forward,
    attend: _attend,
    attend_difference: _attend_difference,
}
OPERATOR_HANDLERS: dict[str, Handler] = {  # by name: the operators exist only once their modules are imported
    "flex_attention": _flex_attention,
    "_varlen_attn": _varlen_attn,
    "_varlen_attn_out": _varlen_attn,
}
_OPERATOR_TYPES = (torch._ops.OpOverloadPacket, torch._ops.OpOverload, torch._ops.HigherOrderOperator)
