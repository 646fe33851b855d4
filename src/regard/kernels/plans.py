"""A plan is a call that passed all checks, packed as the native kernel reads it. Repeated with other tensors of the
same shapes and strides, only addresses are written into it: a small call would spend most of its time on checks.

    out, key = repeat(q, k, v, kernel, options)     the output, where there is a plan for such a call
    keep(key, call, out, kernel)                    else make one, of the call as it was computed

The key is everything that the result depends on, but for numbers in memory. A plan holds no tensor of the caller's.
Tensors that the kernel reads where they are (lengths, boolean masks, sinks) are in the key by their addresses, so that
a change of their numbers is seen. Masks whose tensors would be read or converted before the kernel runs have no plan,
and neither has a call that anyone but the kernel must see: observers (which may have plans of their own), modes,
compilers, torch.func, autocast, subclasses.

Letters: B batch, H query heads, N queries, M keys, E head width of v.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, is_grad_enabled, nn
from torch import get_num_threads as num_threads
from torch._C import _is_any_autocast_enabled as any_autocast  # pyright: ignore[reportAttributeAccessIssue]
from torch._C import _is_tracing as is_tracing
from torch._C import _len_torch_dispatch_stack as dispatch_modes
from torch._C import _len_torch_function_stack as function_modes
from torch._C._functorch import peek_interpreter_stack as transformation  # pyright: ignore[reportMissingModuleSource]
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from regard.kernels import native, run
from regard.kernels import native_library as library
from regard.kernels.call import Call
from regard.kernels.lowering import gradient_like, in_rows, lower_mask
from regard.kernels.operators import first_derivatives_only
from regard.kernels.precision import fixed_precision
from regard.masks import And, Causal, Keep, Mask, Padding, Window

__all__ = ["clear", "keep", "may_repeat", "options_key", "repeat"]

MOST = 512  # plans; when there are more, all are forgotten: one is made again in microseconds

_PLAIN = frozenset({Tensor, nn.Parameter})
_POINTERS = struct.Struct("5P")  # q, k, v, out, lse
_FIRST = struct.calcsize("Qiiii7q")  # where they begin in `native_library.CALL`
_LAST = _FIRST + _POINTERS.size
pack = _POINTERS.pack


@dataclass(frozen=True, slots=True)
class Plan:
    """A call as C reads it, without its addresses. Threads share it: C, which runs without the GIL, reads a new object
    each time, put together of the two pieces and the addresses."""

    found: tuple[library.Library | None, str | None] | None  # the library that was in use
    function: Callable[[bytes], int]
    before: bytes  # what stands before the addresses
    after: bytes
    shape: tuple[int, ...]  # of the output
    strides: tuple[int, ...]
    learning: Call | None  # where a gradient is wanted: the call without its mask, with placeholders for q, k and v


class _Differentiable(torch.autograd.Function):
    """The output of a plan, with gradients of q, k and v, and of the sinks (H,) if there are any."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, mask: Mask | None, q: Tensor, k: Tensor, v: Tensor, *sinks: Tensor) -> Tensor:
        out = q.new_empty_strided(plan.shape, plan.strides)
        lse = q.new_empty(plan.shape[:3], dtype=torch.float32)
        addresses = pack(q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), lse.data_ptr())
        library.raise_for(plan.function(plan.before + addresses + plan.after))
        # As `operators` saves them: a checkpoint may compare them.
        ctx.save_for_backward(out, lse, q, k, v, *(x[None] for x in sinks))
        ctx.plan, ctx.mask, ctx.threads = plan, mask, num_threads()  # (C reads the mask's tensors again)
        ctx.layout = _layout(out, lse, q, k, v, *sinks)
        return out

    @staticmethod
    def backward(ctx: Any, *d_output: Tensor) -> tuple[Any, ...]:
        out, lse, *learned = ctx.saved_tensors
        wanted, plan = list(ctx.needs_input_grad[2:]), ctx.plan
        as_packed = ctx.threads == num_threads() and ctx.layout == _layout(out, lse, *learned)
        if as_packed and plan.found is library._found and _is_plain(out, *d_output):
            return None, None, *_gradients(plan, out, lse, learned, d_output[0], wanted)
        call = replace(plan.learning, mask=ctx.mask).with_learned(learned)
        with fixed_precision(out), torch.no_grad():
            gradients = native.backward(call, out, lse, d_output[0], wanted)
        gradients = iter(first_derivatives_only(native.name, gradients, *d_output, *learned))
        q, k, v, *sinks = [next(gradients) if want else None for want in wanted]
        return None, None, q, k, v, *(None if x is None else x[0] for x in sinks)


def _layout(out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, *sinks: Tensor) -> tuple[Any, ...]:
    """What a packed call says of these tensors, whose addresses are not written anew. Hooks on saved tensors, such as
    a checkpoint's, may give others for the backward pass."""
    dtypes = out.dtype, lse.dtype, q.dtype, k.dtype, v.dtype
    return dtypes, out.stride(), lse.stride(), q.stride(), k.stride(), v.stride(), *[x.data_ptr() for x in sinks]


def _is_plain(out: Tensor, d_out: Tensor) -> bool:
    """Whether the backward pass may be packed as the forward pass was: no one differentiates or traces it."""
    return (
        type(d_out) is Tensor
        and d_out.dtype is out.dtype
        and not is_grad_enabled()
        and not is_compiling()
        and not dispatch_modes()
        and transformation() is None
    )


def _gradients(
    plan: Plan, out: Tensor, lse: Tensor, learned: list[Tensor], d_out: Tensor, wanted: list[bool]
) -> list[Tensor | None]:
    """The wanted gradients of q, k, v and the sinks (H,)."""
    q, k, v = learned[:3]
    d_out = in_rows(d_out)
    addresses = pack(q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), lse.data_ptr())
    grads = [gradient_like(x) if want else None for x, want in zip((q, k, v), wanted, strict=False)]
    d_sinks = lse.new_empty(lse.shape[:2]) if any(wanted[3:]) else None
    assert plan.found is not None and plan.found[0] is not None
    gradients = native._packed_gradients(d_out, None, grads, d_sinks=d_sinks)
    plan.found[0].backward(plan.before + addresses + plan.after, gradients)
    return grads + [None if d_sinks is None else d_sinks.sum(0)] * len(learned[3:])


_plans: dict[Hashable, Plan | None] = {}  # None: such calls have no plan


def clear() -> None:
    """Forget all plans."""
    _plans.clear()


def may_repeat(q: Any, k: Any, v: Any) -> bool:
    """Whether a call of these may be computed by a plan, as far as its options allow it: plain tensors on the CPU, and
    nobody but the kernel must see the call (modes, compilers, torch.func, autocast, forward gradients)."""
    return not (
        is_compiling()
        or type(q) not in _PLAIN
        or type(k) not in _PLAIN
        or type(v) not in _PLAIN
        or function_modes()
        or dispatch_modes()
        or transformation() is not None
        or is_tracing()
        or any_autocast()
        or forward_ad._current_level >= 0
        or not (q.is_cpu and k.is_cpu and v.is_cpu)
        or q.is_neg()
        or k.is_neg()
        or v.is_neg()
    )


def repeat(
    q: Any, k: Any, v: Any, kernel: Any, options: Mapping[str, Any]
) -> tuple[Tensor, None] | tuple[None, Hashable | None]:
    """The output (B, H, N, E) of a call that has a plan; else None and the key for `keep`, which is None where the call
    has to take the usual way. Runs before every call."""
    if not may_repeat(q, k, v) or type(kernel) is not str:
        return None, None
    if run.observers.stack:
        return run.repeat_observed(q, k, v, kernel, options), None  # type: ignore[return-value]
    learns = is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    others = options_key(options, learns) if options else ()
    if others is None:
        return None, None
    try:
        addresses = q.data_ptr(), k.data_ptr(), v.data_ptr()
        tensors = q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype, v.dtype
    except RuntimeError:  # nested and sparse tensors have no such thing
        return None, None
    key = tensors, kernel, num_threads(), library.instruction_set, learns, others
    plan = _plans.get(key)
    if plan is None:
        return None, None if key in _plans else key
    if plan.found is not library._found:
        return None, key
    if plan.learning is not None:
        sinks = options.get("sinks")
        learned = (q, k, v) if sinks is None else (q, k, v, sinks)
        return _Differentiable.apply(plan, options.get("mask"), *learned), None  # type: ignore[return-value]
    out = q.new_empty_strided(plan.shape, plan.strides)
    status = plan.function(plan.before + pack(*addresses, out.data_ptr(), 0) + plan.after)
    if status:
        library.raise_for(status)
    return out, None


def options_key(options: Mapping[str, Any], learns: bool) -> tuple[Any, ...] | None:
    """All options of a call but q, k and v, by their values and addresses; None where there is no plan."""
    parts: list[Any] = []
    for name, value in options.items():
        kind = type(value)
        if value is None:
            parts.append(name)
            continue
        if kind is float or kind is int:  # (the kind too: 1 equals 1.0, which is no position)
            part = None if name == "dropout" and value else (kind, value)
        elif name == "mask":
            part = _mask_key(value, learns)
        else:
            part = _tensor_key(value, learns) if name == "sinks" else None
        if part is None:
            return None
        parts += (name, part)
    return tuple(parts)


def _mask_key(mask: Any, learns: bool) -> tuple[Any, ...] | None:
    kind = type(mask)
    if kind is Causal:
        return (Causal,)
    if kind is Window:
        return Window, mask.before, mask.after
    if kind is And:
        left, right = _mask_key(mask.left, learns), _mask_key(mask.right, learns)
        return None if left is None or right is None else (And, left, right)
    if learns and kind is not Padding and kind is not Keep:
        return None  # (a tensor is made a mask of, which has to live until the backward pass)
    tensor = _tensor_key(mask.lengths if kind is Padding else mask.tensor if kind is Keep else mask)
    return None if tensor is None else (kind, tensor)


def _tensor_key(x: Any, learns: bool = False) -> tuple[Any, ...] | None:
    """Of a tensor that C reads where it is. `learns`: its gradient is computed, if it wants one."""
    if type(x) not in _PLAIN or not x.is_cpu or x.layout is not torch.strided or x.is_nested or x.is_neg():
        return None
    if x.requires_grad and is_grad_enabled() and not learns:
        return None
    return x.data_ptr(), x.shape, x.stride(), x.dtype


def keep(key: Hashable, call: Call, out: Tensor, kernel: str) -> None:
    """Make a plan of a call that was computed, for the next one with this key."""
    if len(_plans) >= MOST:
        _plans.clear()
    _plans[key] = _plan_of(call, out) if run.choose(kernel, call) is native else None


def _plan_of(call: Call, out: Tensor) -> Plan | None:
    found, loaded = library._found, library.load()
    if loaded is None or any(in_rows(x) is not x for x in (call.q, call.k, call.v)) or not _in_place(call):
        return None
    learns = torch.is_grad_enabled() and any(x.requires_grad for x in call.learned())
    packed = native._packed(call, out, out.new_empty(out.shape[:3], dtype=torch.float32)).call
    learning = replace(call, mask=None).with_learned([_NOTHING] * len(call.learned())) if learns else None
    before, after = packed[:_FIRST], packed[_LAST:]
    return Plan(found, loaded.handle.regard_attention, before, after, tuple(out.shape), out.stride(), learning)


def _in_place(call: Call) -> bool:
    """Whether C reads the tensors of the mask and the sinks where they are."""
    if call.sinks is not None and call.sinks.dtype is not torch.float32:
        return False
    if call.mask is None:
        return True
    seen = call.derive(lower_mask)
    given = {x.data_ptr() for x in call.mask.tensors()}
    read = [x.data_ptr() for x in (seen.key_start, seen.key_end, seen.dense, *(seen.documents or ())) if x is not None]
    return given.issuperset(read)


_NOTHING = torch.empty(0, device="cpu")  # stands for a tensor that autograd keeps
