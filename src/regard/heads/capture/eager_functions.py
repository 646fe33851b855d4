"""Eager attention functions of transformers: does one compute what its arguments say?

Each family of models has an eager function of its own. Most compute softmax(softcap(q k^T * scaling) + mask) v, perhaps
with sinks, and may be replaced by one pass of ours; a few compute something else. So a function is tried first: on a
few random tokens, called with the module and the options of the model's own call, its output is compared with what the
arguments say. What was found holds for that module, those options, and as long as the module's own tensors do not
change.

Letters: B batch, H query heads, G kv heads, N queries, M keys, D head width of q and k, E head width of v.
"""

from __future__ import annotations

import dis
import functools
import inspect
import weakref
from collections.abc import Callable, Hashable
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.utils.weak import WeakIdRef

from regard.heads.capture.model_tree import has_foreign_hooks

if TYPE_CHECKING:
    from regard.heads.capture.capture import AttentionCapture
    from regard.heads.capture.module_stack import Frame
    from regard.heads.capture.transformers_functions import Arguments

__all__ = ["agrees", "may_be_tried", "weights_are_wanted"]

_HOME = "transformers.models."
_PLAIN = (bool, int, float, str, type(None))
_TENSORS = ("position_bias", "s_aux")  # options that may be tensors: what they do is known
_READ_BY_US = ("scaling", "softcap", *_TENSORS)  # whether the function reads them or not
_QUERIES, _KEYS, _BATCH = 5, 7, 2  # of a trial
_SPREAD = 10.0  # of its scores: so large that a softcap shows
_TOLERANCE = 1e-4

_FOUND: weakref.WeakKeyDictionary[nn.Module, dict[Hashable, bool]] = weakref.WeakKeyDictionary()


def weights_are_wanted(capture: AttentionCapture, options: dict[str, Any]) -> bool:
    """Whether somebody asked for the weights that an eager function returns: by an argument of the model or of one of
    its modules, or by a configuration."""
    asked = [options, *(frame.kwargs for frame in capture.frames.stack)]
    if any(x for given in asked for name, x in given.items() if name.startswith("output_") and "attentions" in name):
        return True
    configs = [frame.module.__dict__.get("config") for frame in capture.frames.stack]
    return any(getattr(config, "output_attentions", False) for config in configs)


def may_be_tried(capture: AttentionCapture, function: Any, arguments: Arguments) -> bool:
    """Whether a function is a model's own, of transformers, for which others can stand in, and nobody reads the weights
    that it returns."""
    # (A wrapper has the globals of its author, and by `functools.wraps` the `__module__` of what it wraps.)
    if not isinstance(function, FunctionType) or not str(function.__globals__.get("__name__")).startswith(_HOME):
        return False
    if arguments.more or not (arguments.mask is None or _is_added(arguments.mask)):
        return False
    read = _options(function, arguments)
    if not all(type(x) in _PLAIN or (name in _TENSORS and isinstance(x, Tensor)) for name, x in read.items()):
        return False
    return _can_do_without_weights(capture.frames.stack) and not weights_are_wanted(capture, arguments.options)


def agrees(function: FunctionType, arguments: Arguments, error: Callable[[Arguments, Tensor], float]) -> bool:
    """Whether a function computes what its arguments say, found by a trial. `error`: how far an output (B, N, H, E) is
    from that, relative to the largest value."""
    found = _FOUND.setdefault(arguments.module, {})
    key = _key(function, arguments)
    if key not in found:
        found[key] = _try(function, arguments, error)
    return found[key]


def _is_added(mask: Any) -> bool:
    """(A boolean one would be added, too.)"""
    return isinstance(mask, Tensor) and mask.is_floating_point()


def _can_do_without_weights(stack: list[Frame]) -> bool:
    """Whether all that runs around an attention takes None for its weights: the model knows sdpa, flash or flex
    attention, too, which return none; what is between the two is transformers' own; and no hook is given them."""
    if torch_module._has_any_global_hook() or any(has_foreign_hooks(frame.module.__dict__) for frame in stack):
        return False
    for frame in reversed(stack):
        kind = type(frame.module)
        if not kind.__module__.startswith(_HOME) or "forward" in frame.module.__dict__:
            return False
        known = [getattr(kind, f"_supports_{name}", None) for name in ("sdpa", "flash_attn", "flex_attn")]
        if known != [None] * len(known):
            return any(known)
    return False


def _options(function: FunctionType, arguments: Arguments) -> dict[str, Any]:
    """The options that a function may read, or that say what it computes."""
    named = _options_read(function.__code__)
    return {name: x for name, x in arguments.options.items() if named is None or name in named or name in _READ_BY_US}


@functools.lru_cache(maxsize=1024)
def _options_read(code: CodeType) -> frozenset[str] | None:
    """The names of the options that a function reads; None if it may read any (`**kwargs`)."""
    count = code.co_argcount + code.co_kwonlyargcount
    named, others = code.co_varnames[:count], code.co_varnames[count:]
    takes_more = bool(code.co_flags & inspect.CO_VARKEYWORDS)
    more = others[bool(code.co_flags & inspect.CO_VARARGS)] if takes_more else None
    reads = any(step.opname.startswith("LOAD") and step.argval == more for step in dis.get_instructions(code))
    return None if takes_more and (reads or more in code.co_cellvars) else frozenset(named)


def _key(function: FunctionType, arguments: Arguments) -> Hashable:
    """What the result of a trial depends on."""
    module, q, k, v, mask, *_ = arguments

    def kind(x: Any) -> Hashable:
        return (x.dtype, *map((1).__eq__, x.shape)) if isinstance(x, Tensor) else x

    own = [x for x in (*module._parameters.values(), *module._buffers.values()) if x is not None]
    states = tuple([(WeakIdRef(x), None if x.is_inference() else x._version) for x in own])
    options = tuple([(name, kind(x)) for name, x in _options(function, arguments).items()])
    sizes = q.shape[1], k.shape[1], q.shape[3], v.shape[3], q.shape[2] == k.shape[2], q.shape[2] == 1
    wide = mask is not None and mask.shape[-1] > k.shape[2]
    return function, sizes, q.dtype, k.dtype, v.dtype, q.device, module.training, kind(mask), wide, options, states


def _try(function: FunctionType, arguments: Arguments, error: Callable[[Arguments, Tensor], float]) -> bool:
    """Compare a function with its arguments on a few tokens."""
    try:
        trial = _trial(arguments)
        out, *_ = trial.run(function)
        batch, heads, queries, _ = trial.query.shape
        if out.shape != (batch, queries, heads, trial.value.shape[3]) or out.dtype != trial.query.dtype:
            return False
        return error(trial, out) <= _TOLERANCE
    except Exception:  # it needs more than these arguments, or they say nothing that could be compared
        return False


def _trial(arguments: Arguments) -> Arguments:
    """The same call for a few random tokens, at least in float32: the rounding of 16 bits would hide a difference."""
    _, q, k, v, mask, _, options = arguments
    numbers = torch.Generator().manual_seed(0)
    queries = 1 if q.shape[2] == 1 else _QUERIES
    keys = queries if q.shape[2] == k.shape[2] else _KEYS

    def like(x: Tensor, *shape: int) -> Tensor:
        dtype = torch.promote_types(x.dtype, torch.float32)
        return torch.randn(shape, generator=numbers, device="cpu").to(x.device, dtype)

    def plane(x: Tensor) -> Tensor:  # with the same axes of size 1, and more keys where there are more
        full = (_BATCH, q.shape[1], queries, keys + (x.shape[-1] > k.shape[2]))[4 - x.dim() :]
        return like(x, *(1 if size == 1 else new for size, new in zip(x.shape, full, strict=True)))

    if mask is not None:
        mask = plane(mask)
        hidden = torch.rand(mask.shape, generator=numbers, device="cpu") < 0.3
        hidden[..., :1] = False
        mask = mask.masked_fill(hidden.to(mask.device), torch.finfo(mask.dtype).min)
    if isinstance(bias := options.get("position_bias"), Tensor):
        options = options | {"position_bias": plane(bias)}
    return arguments._replace(
        query=_SPREAD * like(q, _BATCH, q.shape[1], queries, q.shape[3]),
        key=like(k, _BATCH, k.shape[1], keys, k.shape[3]),
        value=like(v, _BATCH, v.shape[1], keys, v.shape[3]),
        mask=mask,
        options=options,
    )
