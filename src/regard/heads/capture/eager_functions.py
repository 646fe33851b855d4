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

from regard.heads.capture.model_tree import has_foreign_hooks

if TYPE_CHECKING:
    from regard.heads.capture.capture import AttentionCapture
    from regard.heads.capture.transformers_functions import Arguments

__all__ = ["agrees", "is_known", "may_be_tried", "weights_are_wanted"]

_PLAIN = (bool, int, float, str, type(None))
_TENSORS = ("position_bias", "s_aux")  # options that are known
_QUERIES, _KEYS, _BATCH = 5, 7, 2  # of a trial
_SPREAD = 10.0  # of its scores: so large that a softcap shows

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
    module, options = arguments.module, arguments.options
    if not isinstance(function, FunctionType) or not function.__module__.startswith("transformers.models."):
        return False
    if not type(module).__module__.startswith("transformers.models.") or arguments.more:
        return False
    if arguments.mask is not None and not (isinstance(arguments.mask, Tensor) and arguments.mask.is_floating_point()):
        return False  # (a boolean one would be added, too)
    named = _options_read(function.__code__)
    read = options if named is None else {name: x for name, x in options.items() if name in named}
    if not all(type(x) in _PLAIN or (name in _TENSORS and isinstance(x, Tensor)) for name, x in read.items()):
        return False
    if weights_are_wanted(capture, options) or any(has_foreign_hooks(f.module.__dict__) for f in capture.frames.stack):
        return False
    return _has_other_functions(capture)


def is_known(function: Any, arguments: Arguments) -> bool:
    """Whether a trial has found that it agrees."""
    found = _FOUND.get(arguments.module)
    return found is not None and found.get(_key(function, arguments), False)


def agrees(function: Callable[..., Any], arguments: Arguments, error: Callable[[Arguments, Tensor], float]) -> bool:
    """Whether a function computes what its arguments say, found by a trial. `error`: how far an output (B, N, H, E) is
    from that, relative to the largest value."""
    found = _FOUND.setdefault(arguments.module, {})
    key = _key(function, arguments)
    if key not in found:
        found[key] = _try(function, arguments, error)
    return found[key]


def _has_other_functions(capture: AttentionCapture) -> bool:
    """Whether the model can do without weights: it knows sdpa, flash or flex attention, too, which return none."""
    names = ("_supports_sdpa", "_supports_flash_attn", "_supports_flex_attn")
    for frame in reversed(capture.frames.stack):
        known = [getattr(type(frame.module), name, None) for name in names]
        if known != [None] * len(names):
            return any(known)
    return False


@functools.lru_cache(maxsize=1024)
def _options_read(code: CodeType) -> frozenset[str] | None:
    """The names of the options that a function reads; None if it may read any (`**kwargs`)."""
    count = code.co_argcount + code.co_kwonlyargcount
    named, others = code.co_varnames[:count], code.co_varnames[count:]
    takes_more = bool(code.co_flags & inspect.CO_VARKEYWORDS)
    more = others[bool(code.co_flags & inspect.CO_VARARGS)] if takes_more else None
    reads = any(step.opname.startswith("LOAD") and step.argval == more for step in dis.get_instructions(code))
    return None if takes_more and (reads or more in code.co_cellvars) else frozenset(named)


def _key(function: Any, arguments: Arguments) -> Hashable:
    """What the result of a trial depends on."""
    module, q, k, v, mask, _, options = arguments
    own = [x for x in (*module._parameters.values(), *module._buffers.values()) if x is not None]
    states = tuple([(id(x), None if x.is_inference() else x._version) for x in own])
    plain = tuple([(name, x if type(x) in _PLAIN else getattr(x, "shape", None)) for name, x in options.items()])
    sizes = q.shape[1], k.shape[1], q.shape[3], v.shape[3], q.shape[2] == k.shape[2], q.shape[2] == 1
    kinds = q.dtype, k.dtype, v.dtype, q.device, module.training, None if mask is None else (mask.dtype, mask.shape)
    return function, sizes, kinds, plain, states


def _try(function: Callable[..., Any], arguments: Arguments, error: Callable[[Arguments, Tensor], float]) -> bool:
    """Compare a function with its arguments on a few tokens."""
    trial = _trial(arguments)
    try:
        out, *_ = trial.run(function)
        close = error(trial, out)
    except Exception:  # it needs more than these arguments, or they say nothing that could be compared
        return False
    half = trial.query.dtype in (torch.float16, torch.bfloat16) or trial.query.device.type != "cpu"
    return close <= (5e-2 if half else 1e-4)  # (a GPU may multiply in TF32)


def _trial(arguments: Arguments) -> Arguments:
    """The same call for a few random tokens."""
    _, q, k, v, mask, _, options = arguments
    numbers = torch.Generator().manual_seed(0)
    queries = 1 if q.shape[2] == 1 else _QUERIES
    keys = queries if q.shape[2] == k.shape[2] else _KEYS

    def like(x: Tensor, *shape: int) -> Tensor:
        return torch.randn(shape, generator=numbers, device="cpu").to(x.device, x.dtype)

    def plane(x: Tensor) -> Tensor:  # with the same axes of size 1
        full = (_BATCH, q.shape[1], queries, keys)[4 - x.dim() :]
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
