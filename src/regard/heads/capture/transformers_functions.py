"""How a capture handles the attention functions of transformers, which `huggingface.py` intercepts.

The masks of such a function can be read in several ways (as sdpa, eager or flash functions read them). The arguments
are turned into a `Call` in the likeliest way; unless the function is transformers' own sdpa, its output is compared
with what that call gives, and other ways are tried until one agrees.

Letters: B batch, H query heads, N queries, M keys, D head width of q and k, E head width of v.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from regard.attention import prepare
from regard.errors import bad_value
from regard.heads.capture import eager_functions, huggingface, large_calls, layer_plans
from regard.heads.capture.flash import from_flash, paged
from regard.heads.capture.flex import FlexMask
from regard.heads.capture.huggingface import Implementation
from regard.heads.capture.module_stack import Frame
from regard.heads.capture.observed import ObservedCall
from regard.heads.capture.sdpa import added_band, split_additive_mask
from regard.kernels import Call, reference
from regard.kernels.precision import fixed_precision
from regard.masks import Causal, Mask

if TYPE_CHECKING:
    from regard.heads.capture.capture import AttentionCapture

__all__ = ["Arguments", "capture_function"]

_ARGUMENTS = ("query", "key", "value", "attention_mask")


class Arguments(NamedTuple):
    """What transformers passes to an attention function: q (B, H, N, D), k and v (B, G, M, D), and a mask."""

    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Any
    more: tuple[Any, ...]  # further positional arguments
    options: dict[str, Any]

    @staticmethod
    def of(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        given = dict(zip(_ARGUMENTS, args, strict=False)) | {n: kwargs[n] for n in _ARGUMENTS if n in kwargs}
        options = {name: x for name, x in kwargs.items() if name not in _ARGUMENTS}
        query, key, value, mask = (given.get(name) for name in _ARGUMENTS)
        assert isinstance(query, Tensor) and isinstance(key, Tensor) and isinstance(value, Tensor)
        return Arguments(module, query, key, value, mask, args[4:], options)

    def check(self, how: Implementation) -> None:
        """Refuse masks that are not known, and paged caches."""
        if self.mask is not None and not isinstance(self.mask, Tensor) and not hasattr(self.mask, "mask_mod"):
            raise bad_value(
                "attention of transformers",
                expected="masks as tensors, or block masks",
                received=f"a {type(self.mask).__name__} of {how.name!r}",
                remedy='model.set_attn_implementation("sdpa")',
            )
        if how.name.startswith("paged|") or type(self.options.get("cache")).__name__ == "PagedAttentionCache":
            raise paged(f"{how.name!r} with continuous batching")

    def mask_to_read(self) -> Any:
        """The mask as a tensor or a `Mask`; None if there is none."""
        return self.mask if self.mask is None or isinstance(self.mask, Tensor) else FlexMask.of(self.mask.as_tuple())

    def run(self, compute: Any) -> Any:
        """The result of a function called with these arguments."""
        return compute(self.module, self.query, self.key, self.value, self.mask, *self.more, **self.options)


def capture_function(
    capture: AttentionCapture,
    compute: Any,
    how: Implementation,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Compute the attention of a module of transformers, and report it."""
    frame = capture.frames.current(module) if capture.closed.is_running else None
    arguments = one_pass = key = None
    if not how.trusted:  # (of transformers' own sdpa they are looked at only if there is no plan)
        arguments = Arguments.of(module, args, kwargs)
        with torch._C.DisableTorchFunction():
            one_pass = _may_compute(capture, compute, how, arguments)
    if frame is not None and (how.trusted or one_pass):
        key = layer_plans.transformers_key(capture, frame, args, kwargs, eager=not how.trusted)
        heads = layer_plans.by_plan(capture, frame, key, *args[:3])
        if heads is not None:
            return heads.transpose(1, 2).contiguous(), None
    return _described(capture, compute, how, arguments or Arguments.of(module, args, kwargs), key, one_pass)


def _described(
    capture: AttentionCapture,
    compute: Any,
    how: Implementation,
    arguments: Arguments,
    key: Hashable | None,
    one_pass: bool | None,
) -> Any:
    """The same for a layer that is like none before. `key`: of its plan. `one_pass`: what `_may_compute` said."""
    with torch._C.DisableTorchFunction():
        arguments.check(how)
        if one_pass is None:
            one_pass = _may_compute(capture, compute, how, arguments)
        candidates = _candidate_calls(how, arguments)
        if one_pass and how.trusted and arguments.mask is None:  # (nobody wants gradients)
            call = _call_without_mask(capture, arguments)
        else:
            with capture.graph():
                call = next(candidates)
        attention = _compute(capture, call, arguments) if one_pass else None
    if attention is not None:
        if attention.result is not None:
            given = arguments.query, arguments.key, arguments.value
            tensors = () if call.mask is None else call.mask.tensors()
            layer_plans.keep(
                capture, key, attention.attention, given, arguments.mask if any(True for _ in tensors) else None
            )
        return _result(capture, attention, arguments, compute)
    return _by_its_own_function(capture, compute, how, arguments, call, candidates)


def _by_its_own_function(
    capture: AttentionCapture,
    compute: Any,
    how: Implementation,
    arguments: Arguments,
    call: Call,
    others: Iterator[Call],
) -> Any:
    """The result of the function itself, measured beside it as the call that it agrees with. `others`: candidates
    after `call`."""
    certain = how.trusted or bool(arguments.options.get("dropout"))
    if how.masks == "eager" and _can_skip_weights(capture, call, arguments.options):
        compute, certain = large_calls.eager_function(call), True
    with _inside_attention(capture):
        result = arguments.run(compute)
    frame = capture.frames.current(arguments.module)
    assert frame is not None
    query = arguments.query
    capture.streams.hand_on((query,), result)
    out, *rest = result
    output = _heads(out, query)
    computed: Call | Tensor | None = call
    # An outer capture may have changed the output: then it cannot be compared.
    if not certain and not any(x.changes for x in huggingface.observers() if x is not capture):
        with capture.graph(), torch._C.DisableTorchFunction():
            computed = _matching(call, others, output.detach(), rest[0] if rest else None)
    if computed is None and not capture.changes:
        capture.not_seen(
            frame.name, f'{_other_function(how)}; model.set_attn_implementation("sdpa") or "eager" can be seen'
        )
        return result
    if isinstance(computed, Tensor):
        known: dict[str, Any] = {"weights": computed, "values": arguments.value}
        attention = capture.describe(frame, tuple(computed.shape), capture.streams.of(query), **known)
    else:
        call = computed or call
        attention = capture.describe(frame, call.shape, capture.streams.of(query), call=call)
        if computed is None:
            attention.unsure = _other_function(how)
    if dropout := arguments.options.get("dropout"):
        attention.unsure = f"dropout {dropout} in training"
    heads = capture.report(frame, attention, output).transpose(1, 2).reshape(out.shape)
    return (heads, *rest) if capture.changes else result


def _other_function(how: Implementation) -> str:
    return f"the function {how.name!r} computed other than what its arguments say"


def _heads(out: Tensor, query: Tensor) -> Tensor:
    """The heads' outputs (B, H, N, E) from the result of a function: (B, N, H, E), or with merged heads."""
    return (out if out.dim() == 4 else out.unflatten(-1, (query.shape[1], -1))).transpose(1, 2)


class _Computed(NamedTuple):
    """An attention that was measured, and the result (B, N, H, E) if it was computed in the same pass."""

    frame: Frame
    attention: ObservedCall
    result: Tensor | None


def _compute(capture: AttentionCapture, call: Call, arguments: Arguments) -> _Computed:
    """Compute an attention in one pass with what is measured, unless a query sees nothing."""
    frame = capture.frames.current(arguments.module)
    assert frame is not None
    attention = capture.describe(frame, call.shape, capture.streams.of(arguments.query), call=call)
    heads = capture.compute(frame, attention)
    return _Computed(frame, attention, None if heads is None else heads.transpose(1, 2).contiguous())


def _result(
    capture: AttentionCapture, computed: _Computed, arguments: Arguments, own_function: Any
) -> tuple[Tensor, Any]:
    """The result of an attention function that was measured; of the function itself where it was not computed."""
    if computed.result is not None:
        result = computed.result, None
    else:
        with _inside_attention(capture):
            result = arguments.run(own_function)
        capture.computed_by_model(computed.frame, computed.attention, _heads(result[0], arguments.query))
    capture.streams.hand_on((arguments.query,), result)
    return result


@contextmanager
def _inside_attention(capture: AttentionCapture) -> Iterator[None]:
    capture.inside_attention = True
    try:
        yield
    finally:
        capture.inside_attention = False


def _may_compute(capture: AttentionCapture, function: Any, how: Implementation, arguments: Arguments) -> bool:
    """Whether the attention may be computed in one pass with what is measured: if its function is transformers' own
    sdpa, whose arguments say what it computes, or an eager one that was found to compute what they say."""
    options = arguments.options
    if options.get("dropout") or (how.trusted and options.get("softcap") is not None):  # (sdpa refuses a softcap)
        return False
    if not how.trusted and how.masks != "eager":
        return False
    given = [*arguments[1:5], options.get("position_bias")]
    if not how.trusted:  # (an eager function may read all of them, and its module's own, as sinks)
        given += [*options.values(), *arguments.module._parameters.values()]
    # (This is no handler of torch functions: the capture's own mode is on, but in closed modules.)
    modes = 0 if capture.closed.is_running else 1
    if not capture.may_compute(*(x for x in given if isinstance(x, Tensor)), modes=modes):
        return False
    if how.trusted:
        return True
    error = partial(_trial_error, how)
    tried = eager_functions.may_be_tried(capture, function, arguments)
    return tried and eager_functions.agrees(function, arguments, error)


def _trial_error(how: Implementation, trial: Arguments, out: Tensor) -> float:
    """How far an output is from what its arguments say."""
    return _error(next(_candidate_calls(how, trial)), _heads(out, trial.query))


def _can_skip_weights(capture: AttentionCapture, call: Call, options: dict[str, Any]) -> bool:
    """Whether large weights need not be built: the model has a softcap or sinks, which only eager functions of
    transformers serve, and nobody asked for the weights."""
    if not large_calls.is_large(call) or (call.softcap is None and call.sinks is None):
        return False
    if options.get("dropout") or options.get("position_bias") is not None:
        return False
    return not eager_functions.weights_are_wanted(capture, options)


def _candidate_calls(how: Implementation, arguments: Arguments) -> Iterator[Call]:
    """The calls that a function may compute, the likeliest first: its masks read as they were built, then in other
    ways; each with sinks (if there are any) and without."""
    ways = {
        "eager": ("eager", "sdpa"),
        "flex": ("eager",),  # it adds masks that are tensors
        "unknown": ("flash", "sdpa", "eager"),
        "sdpa": ("sdpa", "flash", "eager"),
        "flash": ("flash", "sdpa", "eager"),
    }[how.masks]
    if how.masks == "flash" and arguments.mask is not None and arguments.mask.dim() != 2:
        ways = ("sdpa", "flash", "eager")
    options = arguments.options
    without_sinks = {name: x for name, x in options.items() if name != "s_aux"}
    only_without = how.trusted or options.get("s_aux") is None  # sdpa ignores sinks
    sinks_or_not = [without_sinks] if only_without else [options, without_sinks]
    tensors = arguments.module, arguments.query, arguments.key, arguments.value, arguments.mask_to_read()
    for number, (way, given) in enumerate((way, given) for way in ways for given in sinks_or_not):
        try:
            if way == "flash":
                yield from_flash(*tensors, **given)
            else:
                yield _from_dense(*tensors, masks="eager" if way == "eager" else "sdpa", **given)
        except (ValueError, TypeError, RuntimeError):
            if not number:
                raise


def _call_without_mask(capture: AttentionCapture, arguments: Arguments) -> Call:
    """The call of transformers' own sdpa without a mask, whose arguments are checked once for all layers of a shape."""
    module, q, k, v, _, _, options = arguments
    causal = options.get("is_causal")
    causal = bool(getattr(module, "is_causal", True) if causal is None else causal) and q.shape[2] > 1
    without_sinks = {name: x for name, x in options.items() if name != "s_aux"}  # (sdpa ignores them)
    scale = options.get("scaling")
    known_kind = scale is None or type(scale) is float
    if not known_kind or options.get("position_bias") is not None or (causal and q.shape[2] != k.shape[2]):
        return _from_dense(module, q, k, v, None, masks="sdpa", **without_sinks)
    kinds = q.dtype, k.dtype, v.dtype, q.device, k.device, v.device, torch.is_autocast_enabled(q.device.type)
    key = q.shape, k.shape, v.shape, kinds, scale, causal
    known = capture.calls_without_mask.get(key)
    if known is None:
        call = _from_dense(module, q, k, v, None, masks="sdpa", **without_sinks)
        if call.q.dtype is q.dtype:
            capture.calls_without_mask[key] = call.scale, call.q_start, None, call.mask
        return call
    q, k, v = (x.detach() if x.requires_grad else x for x in (q, k, v))
    return Call(q, k, v, *known)


def _from_dense(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | Mask | None,
    *,
    masks: Literal["eager", "sdpa"],
    **options: Any,
) -> Call:
    """The call of a function that takes masks (B, 1, N, M): unexpanded kv heads, softcap, sinks, position bias.

    "eager" functions add the mask, also a boolean one (True adds 1 and masks nothing); without a mask all is visible.
    For "sdpa" ones True = may attend, and no mask means causal from the top left, if the module says so."""
    q, k, v = query, key, value
    visible: dict[str, Any] = {"mask": None, "bias": None}
    if isinstance(attention_mask, Mask):
        visible["mask"] = attention_mask
    elif attention_mask is not None:
        mask = attention_mask[..., : k.shape[2]]
        keep_dtype = mask.is_floating_point() or (masks == "sdpa" and mask.dtype is torch.bool)
        mask = mask if keep_dtype else mask.to(q.dtype)
        band = added_band(mask) if mask.is_floating_point() else None
        visible = split_additive_mask(mask) if band is None else {"mask": band, "bias": None}
    elif masks == "sdpa" and q.shape[2] > 1:
        causal = options.get("is_causal")
        if causal if causal is not None else getattr(module, "is_causal", True):
            k, v = k[:, :, : q.shape[2]], v[:, :, : q.shape[2]]
            visible = {"mask": Causal(), "bias": None, "positions": 0}
    bias = options.get("position_bias")
    if bias is not None:
        bias = bias[..., : k.shape[2]]
        visible["bias"] = bias if visible["bias"] is None else [bias, visible["bias"]]
    sinks = options.get("s_aux")
    return prepare(
        q,
        k,
        v,
        scale=options.get("scaling"),
        softcap=options.get("softcap"),
        sinks=None if sinks is None else sinks.flatten().to(q.dtype),
        **visible,
    )


def _matching(call: Call, others: Iterator[Call], output: Tensor, weights: Any) -> Call | Tensor | None:
    """The first candidate that gives the output (B, H, N, E); else the weights (B, H, N, M) that the function
    returned, if they give it; else None."""
    half = call.q.dtype in (torch.float16, torch.bfloat16) or call.q.device.type != "cpu"
    tolerance = 5e-2 if half else 1e-3  # (a GPU may multiply in TF32)
    for candidate in chain([call], others):
        if _error(candidate, output) <= tolerance:
            return candidate
    if isinstance(weights, Tensor) and weights.shape == call.shape:
        v = call.v.repeat_interleave(call.shape[1] // call.v.shape[1], 1)
        if weights.shape[3] == v.shape[2] and torch.allclose(
            weights.to(v.dtype) @ v,
            output.to(v.dtype),
            rtol=0.0,
            atol=tolerance * float(v.abs().nan_to_num(0.0).amax()),
        ):
            return weights
    return None


def _error(call: Call, output: Tensor) -> float:
    """The largest difference between an output (B, H, N, E) and that of a call, relative to the largest value. Only the
    first, middle and last four rows are compared; rows that may see nothing are ignored."""
    n, m = call.shape[2:]
    worst = torch.zeros((), dtype=call.dtype, device=output.device)
    with torch.no_grad(), fixed_precision(call.q):
        for first in sorted({0, max(0, n // 2 - 2), max(0, n - 4)}):
            rows = slice(first, min(first + 4, n))
            few_rows = call.part(call.q[:, :, rows], call.k, call.v, slice(None), rows, slice(0, m))
            expected, lse = reference.forward(few_rows)
            difference = (output[:, :, rows].to(call.dtype) - expected.to(call.dtype)).abs().amax(-1)
            difference = difference.masked_fill(lse.isneginf() | expected.isnan().any(-1), 0.0)
            worst = torch.maximum(worst, difference.amax()) if difference.numel() else worst
    largest = call.v.detach().abs().nan_to_num(0.0).amax() if call.v.numel() else worst
    return float(worst.nan_to_num(torch.inf) / largest.clamp(min=1e-30))
