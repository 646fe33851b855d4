"""Three senses for attention, whoever computes it; for those who look (`watch`) and those who change it (`ablate`).

    1. `F.scaled_dot_product_attention`, `F.multi_head_attention_forward` (nn.MultiheadAttention), `flex_attention`,
       `varlen_attn` and `regard.attend`
    2. models of transformers, through the functions that compute their attention
    3. attention written by hand: softmax, then a product with values

The first and the third come by a `TorchFunctionMode`, which torch asks at every function; the second by
`huggingface.py`.
Subclass `AttentionCapture`: `see` is told of every attention, `change` may replace the heads' outputs.

Letters: B batch, H query heads, G kv heads, N queries, M keys, D head width of q and k, E head width of v.
"""

from __future__ import annotations

import functools
import math
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from itertools import chain
from types import TracebackType
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode

from regard.attention import attend, measure_call, prepare
from regard.cache import RollingCache
from regard.errors import bad_type, bad_value
from regard.heads.capture import huggingface
from regard.heads.capture.flash import from_flash, from_varlen, paged
from regard.heads.capture.flex import FlexMask, from_flex, learned_by
from regard.heads.capture.handwritten import FUNCTIONS, SOFTMAXES, HandwrittenTracer, Weighed, batch_of, folded
from regard.heads.capture.module_stack import Frame, ModuleStack, same_input
from regard.heads.capture.observed import (
    ObservedCall,
    Projection,
    error_of,
    from_huggingface,
    from_sdpa,
    output_projection,
    output_weight,
    whole_parameter,
    with_additive_masks,
)
from regard.heads.capture.registry import Handler, handler_of
from regard.heads.capture.streams import Streams
from regard.kernels import Call, observed_by
from regard.layouts.torch_mha_call import Operands, functional_operands, is_causal_mask

__all__ = ["AttentionCapture"]

LARGE = 2**24  # weights: from so many on, attention that transformers would compute eagerly is computed without them


class AttentionCapture:
    """Looks at a model while it runs: a context manager. Nothing of the model is changed for longer than that."""

    changes = False  # whether `change` has something to say
    needs_output = False  # whether `see` asks for `attention.output` even where it has to be computed for it
    needs_projection = False  # whether it is to be seen what enters the output projections

    def __init__(self, model: nn.Module) -> None:
        if not isinstance(model, nn.Module):
            raise bad_type("model", expected="a torch.nn.Module", received=type(model).__name__)
        self.frames = ModuleStack(model)
        self.frames.on_enter = self._entered
        self.frames.on_exit = self._left
        self.frames.on_failure = self._failed
        self.frames.on_elsewhere = self._ran_elsewhere
        self.busy = False  # one attention is being computed: what it is made of is not another one
        self.hands = HandwrittenTracer(model)
        self.streams = Streams()
        self.pending: list[Weighed] = []
        self.unseen: dict[str, str] = {}  # layers that computed attention which could not be read: why, in words
        self._seen: set[str] = set()  # names of modules whose attention was told of
        self._unseen_in: dict[str, int] = {}  # in which outermost call of the model each was first met
        self.awaited: dict[int, list[tuple[Projection, Frame]]] = {}  # by id: modules that shall run before a call ends

    # What subclasses do

    def see(self, attention: ObservedCall) -> None:
        """One attention was computed."""

    def change(self, attention: ObservedCall, output: Tensor) -> Tensor:
        """The outputs (B, H, N, E) of its heads, or others in their place."""
        return output

    def not_seen(self, name: str, reason: str) -> None:
        """A layer computed attention that could not be read. The first reason given for a layer is kept."""
        if name not in self.unseen:
            self.unseen[name] = reason
            self._unseen_in[name] = self.frames.forwards

    # Beginning and end

    def __enter__(self) -> Any:
        with ExitStack() as stack:  # if a step raises, those before it are taken back
            stack.callback(self.frames.remove)
            self.frames.install()
            huggingface.start(self)
            stack.callback(huggingface.stop, self)
            _eagerly.start(self.frames.root)
            stack.callback(_eagerly.stop)
            mode = _Mode(self)
            mode.__enter__()
            stack.callback(mode.end)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
        for name, module in self.frames.scripted():
            if _COMPUTES_ATTENTION.search(str(module.inlined_graph)):
                self.not_seen(name, "it was traced or scripted by torch.jit, which shows nothing")
        self.pending.clear()
        self.awaited.clear()
        self.hands.clear()
        self.streams.clear()

    # Names

    def _describe(
        self, frame: Frame, shape: tuple[int, ...], stream: Tensor | None = None, **known: Any
    ) -> ObservedCall:
        """An attention (B, H, N, M), whose queries are made of the ids `stream`, if these are known."""
        frame.tell()
        self._seen.add(frame.name)
        kind = _kind(frame, shape)
        attention = ObservedCall(frame.name, frame.module, self.frames.forwards, kind, **known)
        ids = self.frames.ids(shape[0], shape[2], sure=self.streams.on) if stream is None else stream.to(torch.int64)
        fits = ids is not None and ids.shape[0] in (1, shape[0]) and ids.shape[1] == shape[2]
        attention.ids = ids.to(attention.device) if ids is not None and fits else None
        attention.input = frame.input(shape[0], shape[2])
        return attention

    # Sense 1: torch's own functions, and ours

    def function(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One torch function: attention, a step of attention written by hand, or nothing of interest."""
        frame = None if self.busy else self.frames.current()
        if frame is None:
            return func(*args, **kwargs)
        out = self._function(frame, func, args, kwargs)
        if self.streams.on:
            self.streams.follow(func, args, kwargs, out)
        return out

    def _function(self, frame: Frame, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func not in _INTERESTING:
            handler = handler_of(func)
            if handler is not None:
                return self._registered(frame, func, handler, *args, **kwargs)
            if isinstance(func, _OPERATORS) and operator_name(func) in _OPERATORS_SEEN:
                return self._operator(frame, func, args, kwargs)
            out = func(*args, **kwargs)
            self.hands.pass_by(func, args, out)
            if is_attention(func):
                self._unread(frame, f"it calls {func}, which shows nothing; F.scaled_dot_product_attention is seen")
            return out
        if func is F.scaled_dot_product_attention:
            return self._sdpa(frame, *args, **kwargs)
        if func is attend:
            return self._attend(frame, *args, **kwargs)
        if func is F.multi_head_attention_forward:
            return self._multi_head(frame, args, kwargs)
        self.hands.where = frame.parent if _is_part(frame.module) and frame.parent is not None else frame
        self.hands.before(func, args, kwargs)
        out = func(*args, **kwargs)
        note = self.hands.see(func, args, kwargs, out)
        if note is not None and note.stream is None:
            note.stream = self.streams.of(args)
        return out if note is None else self._by_hand(frame, note, out)

    def _told(self, frame: Frame, attention: ObservedCall, output: Tensor) -> Tensor:
        """See it, and perhaps change its output (B, H, N, E)."""
        with torch.no_grad(), torch._C.DisableTorchFunction():
            attention.output = output.detach()
            self._find_projection(attention, frame)
            self.see(attention)
        return self.change(attention, output) if self.changes else output

    def _sdpa(self, frame: Frame, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        out = F.scaled_dot_product_attention(query, key, value, *args, **kwargs)
        if query.is_nested:
            raise bad_value(
                "watch",
                expected="padded tensors",
                received="nested tensors in attention",
                remedy="turn them off: nn.TransformerEncoder(..., enable_nested_tensor=False)",
            )
        turn = _Turn.of(query, key, self.frames.sizes())
        mask = kwargs.pop("attn_mask", args[0] if args else None)
        options = dict(zip(("dropout_p", "is_causal"), args[1:], strict=False)) | kwargs
        if not self.changes and _unclear(query, key, turn):  # (B, H) or (H, B)? What the module does next will tell.
            note = self.hands.follow(out, query.shape[-2], key.shape[-2])
            note.where, note.sizes = frame, self.frames.sizes()

            def in_order(order: Tensor) -> Call:
                q, k, v = (x.detach().flatten(0, -3)[order] for x in (query, key, value))
                return from_sdpa(q, k, v, _in_order(mask, query, key, order), **options)

            note.about, note.stream = in_order, self.streams.of(query)
            self.pending.append(note)
            return out
        call = from_sdpa(turn(query), turn(key), turn(value), None if mask is None else turn.mask(mask), **options)
        attention = self._describe(frame, call.shape, self.streams.of(query), call=call)
        told = self._told(frame, attention, turn(out))
        return turn.back(told, out) if self.changes else out

    def _operator(self, frame: Frame, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An operator of attention that is called by itself: `flex_attention`, `varlen_attn`."""
        name = operator_name(func)
        if name == "flex_attention":
            return self._flex(frame, func, args, kwargs)
        inplace = name == "_varlen_attn_out"
        given = args[1:] if inplace else args
        call = from_varlen(*given, **{n: x for n, x in kwargs.items() if n != "out"})
        result = func(*args, **kwargs)
        out: Tensor = (kwargs["out"] if "out" in kwargs else args[0]) if inplace else result[0]  # (N, H, E)
        attention = self._describe(frame, call.shape, self.streams.of(given), call=call)
        told = self._told(frame, attention, out.transpose(0, 1)[None])[0].transpose(0, 1)
        if not self.changes:
            return result
        if not inplace:
            return told, *result[1:]
        out.copy_(told)
        return result

    def _flex(self, frame: Frame, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with torch.no_grad(), torch._C.DisableTorchFunction():
            call = from_flex(*args, **kwargs)
        score_mod, _, _, options, *_ = args[3:]
        if torch.is_grad_enabled() and (learned := learned_by(score_mod)):
            raise bad_value(
                "flex_attention",
                expected="a score_mod that learns nothing, where somebody looks",
                received=f"one that reads {learned}, whose gradient only compiled code finds",
                remedy="look with torch.no_grad()",
            )
        learns = torch.is_grad_enabled() and any(x.requires_grad for x in args[:3])
        if math.prod(call.shape) < LARGE or learns or options.get("OUTPUT_MAX"):
            result = func(*args, **kwargs)  # as it was written, with all scores at once
        else:
            found = measure_call(call, [], output=True)
            assert found.output is not None and found.lse is not None
            result = found.output, found.lse / math.log(2), found.lse.new_empty(0)  # (that operator's unit)
        attention = self._describe(frame, call.shape, self.streams.of(args[:1]), call=call)
        out, *rest = result
        told = self._told(frame, attention, out)
        return (told, *rest) if self.changes else result

    def _attend(self, frame: Frame, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        """`regard.attend`, whose call is handed over where it runs: see `_attended`."""
        with observed_by(_AttendObserver(self, frame, self.streams.of(q))):
            return attend(q, k, v, **options)

    def _attended(self, frame: Frame, stream: Tensor | None, call: Call, out: Tensor) -> Tensor:
        """The output of a call of `regard.attend`, seen and perhaps changed."""
        attention = self._describe(frame, call.shape, stream, call=call)
        cache = frame.given("cache")
        if isinstance(cache, RollingCache):  # the first few tokens, then the last ones
            held, first = call.shape[3], cache.keep_first
            attention.cache = cache
            attention.numbers = torch.arange(held, device=call.q.device)
            attention.numbers[first:] += cache.seen - held
        return self._told(frame, attention, out)

    def _registered(
        self, frame: Frame, func: Any, handler: Handler, q: Tensor, k: Tensor, v: Tensor, **options: Any
    ) -> Tensor:
        """Attention of which other processes have other heads or tokens: all look at the same time, each at all tokens
        of some heads."""
        out = func(q, k, v, **options)
        if self.changes:
            raise bad_value(
                "heads",
                expected="a model on one process, where heads are changed",
                received="one whose heads or tokens are sharded over several",
                remedy="change them before regard.parallel, or prune",
            )
        with torch.no_grad():
            part = handler(q.detach(), k.detach(), v.detach(), **options)
            attention = self._describe(frame, (*q.shape[:3], k.shape[2]), self.streams.of(q), call=part.call)
            attention.gather_heads, attention.global_call = part.gather_heads, part.global_call
            for name in ("ids", "input"):
                of_tokens = getattr(attention, name)
                setattr(attention, name, None if of_tokens is None else part.gather_tokens(of_tokens, 1))
            self._find_projection(attention, frame, awaited=False)
            with torch._C.DisableTorchFunction():
                if self.needs_output:
                    attention.output = part.gather_output(out.detach())
                self.see(attention)
        return out

    def _multi_head(self, frame: Frame, args: Any, kwargs: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
        # The output projection is inside. Where heads are changed, here or by somebody further out whose changes are to
        # be seen, its work is done again with the heads' outputs between; and those further out see `attend` alone.
        again = self.changes or (self.needs_output and any(one.changes for one in huggingface.observers()))
        with torch._C.DisableTorchFunction() if again else nullcontext():
            out, weights = _multi_head_unwatched(frame, args, kwargs)
        with torch.no_grad():
            operands = functional_operands(*args, **kwargs)
            if not again and _may_disbelieve(frame.module, operands, kwargs) and not _came_of(operands, out, args):
                operands = functional_operands(*args, **kwargs | {"is_causal": False})
            q, k, v = (x.detach() for x in operands[:3])
            call = prepare(q, k, v, **with_additive_masks(**operands.options))
        query, key = args[0], args[1]
        attention = self._describe(frame, call.shape, self.streams.of(query), call=call)
        attention.kind = "self" if same_input(query, key) else "cross"
        out_weight = kwargs.get("out_proj_weight", args[11] if len(args) > 11 else None)
        bias = kwargs.get("out_proj_bias", args[12] if len(args) > 12 else None)
        if out_weight is not None:
            attention.out_weight = out_weight.detach()
            attention.projection = Projection.inside(out_weight.detach(), None if bias is None else bias.detach())
        attention.input = query.detach()[None] if query.dim() == 2 else query.detach().transpose(0, 1)
        heads = None
        if again:
            training = kwargs.get("training", args[13] if len(args) > 13 else True)
            dropout = kwargs.get("dropout_p", args[10] if len(args) > 10 else 0.0)
            if training and dropout:
                raise bad_value(
                    "nn.MultiheadAttention",
                    expected="no dropout where heads are changed",
                    received=f"dropout {dropout} in training",
                    remedy="model.eval(), or dropout=0",
                )
            operands = functional_operands(*args, **kwargs)
            heads = attend(operands.q, operands.k, operands.v, **operands.options)
        with torch.no_grad(), torch._C.DisableTorchFunction():
            if self.needs_output:
                attention.output = attend(q, k, v, **operands.options) if heads is None else heads.detach()
            self.see(attention)
        if heads is None:
            return out, weights
        heads = self.change(attention, heads) if self.changes else heads
        merged = heads.transpose(1, 2).flatten(2)
        new = F.linear(merged, out_weight if out_weight is not None else args[11], bias)
        return (new[0] if query.dim() == 2 else new.transpose(0, 1)), weights

    # Sense 2: transformers

    def owns(self, module: nn.Module) -> bool:
        """Whether a module is of the model, running in the thread that looks."""
        return self.frames.current(module) is not None and not self.busy

    def through(
        self, compute: Any, how: huggingface.Implementation, module: nn.Module, *args: Any, **kwargs: Any
    ) -> Any:
        """Compute the attention of a module of transformers, and look."""
        given = dict(zip(_HF_NAMES, args, strict=False))
        given |= {n: kwargs.pop(n) for n in _HF_NAMES if n in kwargs}
        query, key, value, mask = (given.get(n) for n in _HF_NAMES)
        assert isinstance(query, Tensor) and isinstance(key, Tensor) and isinstance(value, Tensor)
        if mask is not None and not isinstance(mask, Tensor) and not hasattr(mask, "mask_mod"):
            raise bad_value(
                "attention of transformers",
                expected="masks as tensors, or block masks",
                received=f"a {type(mask).__name__} of {how.name!r}",
                remedy='model.set_attn_implementation("sdpa")',
            )
        if how.name.startswith("paged|") or type(kwargs.get("cache")).__name__ == "PagedAttentionCache":
            raise paged(f"{how.name!r} with continuous batching")
        with torch.no_grad(), torch._C.DisableTorchFunction():
            readings = _readings(how, module, query, key, value, mask, kwargs)
            call = next(readings)
        certain = how.trusted or bool(kwargs.get("dropout"))
        if how.masks == "eager" and self._may_skip_weights(call, kwargs):
            compute, certain = _without_weights(call), True
        self.busy = True  # what it is made of is not told of
        try:
            result = compute(module, query, key, value, mask, *args[4:], **kwargs)
        finally:
            self.busy = False
        frame = self.frames.current(module)
        assert frame is not None
        self.streams.hand_on((query,), result)
        out, *rest = result  # out (B, N, H, E), or with its heads merged already
        output = (out if out.dim() == 4 else out.unflatten(-1, (query.shape[1], -1))).transpose(1, 2)
        # Whoever is further out may have changed what comes out: then there is nothing to compare with.
        others = any(one.changes for one in huggingface.observers() if one is not self)
        found: Call | Tensor | None = call
        if not (certain or others):
            with torch.no_grad(), torch._C.DisableTorchFunction():
                found = _best(call, readings, output.detach(), rest[0] if rest else None)
        if found is None and not self.changes:
            self.not_seen(
                frame.name,
                f"the function {how.name!r} computed other than what its arguments say; "
                'model.set_attn_implementation("sdpa") or "eager" can be seen',
            )
            return result
        if isinstance(found, Tensor):
            attention = self._describe(frame, tuple(found.shape), self.streams.of(query), weights=found)
            attention.values = value.detach()
        else:
            call = found or call
            attention = self._describe(frame, call.shape, self.streams.of(query), call=call)
        changed = self._told(frame, attention, output).transpose(1, 2).reshape(out.shape)
        return (changed, *rest) if self.changes else result

    def _may_skip_weights(self, call: Call, kwargs: dict[str, Any]) -> bool:
        """Whether a large plane of weights need not be built: by a model that no function of transformers but the eager
        one can serve (softcap, sinks), where nobody asked for the weights."""
        if math.prod(call.shape) < LARGE or (call.softcap is None and call.sinks is None):
            return False
        if kwargs.get("dropout") or kwargs.get("position_bias") is not None:
            return False
        asked = any(frame.kwargs.get("output_attentions") for frame in self.frames.stack)
        config = getattr(self.frames.root, "config", None)
        return not (asked or kwargs.get("output_attentions") or getattr(config, "output_attentions", False))

    # Sense 3: by hand

    def _by_hand(self, frame: Frame, note: Weighed, out: Any) -> Any:
        """A product of weights and values, or more that became known of one."""
        if note.where is None:
            if not self._is_new(note):
                return out
            note.where, note.sizes = frame, self.frames.sizes()
            frame.tell()
            if self.changes and (frame.unseen or not note.whole or _routes(note)):
                self._unread(frame, _IN_PARTS)
                return out
            self.pending.append(note)
        if note.done:
            return out
        if note.heads is None and self.changes:
            note.settle(frame.sizes)
        if note.heads is None:
            return out
        whole, axes = note.opened(out)
        known = sorted(axes) == ["e", "n", "x", "y"]
        order = [axes.index(a) for a in ("y" if note.heads == "x" else "x", note.heads, "n", "e")] if known else []
        note.output = whole.permute(order).detach() if known else None
        if not self.changes:
            if not _may_be_a_part(note):
                self._finish(note)
            return out
        attention = self._finish(note)
        if not known:
            raise _untold(attention.layer, note)
        given = whole.permute(order)
        changed = self.change(attention, given)
        note.where.changed |= changed is not given
        changed = changed.permute([order.index(i) for i in range(4)])
        return tuple(changed.unbind()) if isinstance(out, (tuple, list)) else changed.reshape(out.shape)

    def _is_new(self, note: Weighed) -> bool:
        """Whether these weights were not multiplied into other values before: that would be one attention."""
        if note.origin is None:
            return True
        known_by = note.weights.data_ptr(), note.weights.numel()
        if note.origin.told is None or note.origin.told[0] != known_by:
            note.origin.told = [known_by, None]
            return True
        return self.changes  # all that comes of a head is changed

    def _finish(self, note: Weighed) -> ObservedCall:
        """Tell of an attention by hand, now that its axes are known (or will never be)."""
        note.done = True
        self.pending.remove(note)
        frame, told = note.where, None if note.origin is None else note.origin.told
        if told is not None and told[1] is not None and told[0] == (note.weights.data_ptr(), note.weights.numel()):
            return told[1]
        with torch.no_grad(), torch._C.DisableTorchFunction():
            weights = note.ordered()
            if note.about is not None:
                call = note.about(weights[..., 0, 0])
                attention = self._describe(frame, call.shape, note.stream, call=call, output=note.output)
            else:
                attention = self._describe(
                    frame, tuple(weights.shape), note.stream, weights=weights, output=note.output
                )
                attention.values = note.values
            self._find_projection(attention, frame)
            self.see(attention)
        if told is not None:
            told[1] = attention
        return attention

    # What becomes of the heads' outputs

    def _find_projection(self, attention: ObservedCall, frame: Frame, *, awaited: bool = True) -> None:
        """The output projection, where the module that runs, or the one that called it, has one by a known name.
        `awaited`: what enters it is seen when it runs; else the heads' outputs are known to."""
        given = attention.output if attention.call is None else attention.call.v
        if self.changes or given is None:
            return
        heads, width = attention.shape[1], given.shape[3]
        parent = None if frame.parent is None else frame.parent.module
        module = output_projection(frame.module, heads, width, parent=parent)
        weight = output_weight(frame.module, heads, width, parent=parent)
        if module is None or weight is None:
            return
        bias = getattr(module, "bias", None)
        bias = whole_parameter(bias) if isinstance(bias, Tensor) else None
        attention.out_weight = weight
        attention.projection = Projection(weight, bias) if awaited else Projection.inside(weight, bias)
        if awaited and self.needs_projection and attention.output is not None:
            attention.projection.heads = attention.output.clone()  # (a gate may be applied in place)
            self.awaited.setdefault(id(module), []).append((attention.projection, frame.parent or frame))

    def _projected(self, frame: Frame) -> None:
        """A module ends: it may be a projection that heads' outputs were to enter, or the last call in which it could
        have run."""
        with torch.no_grad(), torch._C.DisableTorchFunction():
            several = self.awaited.pop(id(frame.module), [])
            for projection, _ in several:
                entered = next(iter((*frame.args, *frame.kwargs.values())), None)
                projection.ran(entered, frame.output, alone=len(several) == 1, keep=self.needs_output)
        for number, several in list(self.awaited.items()):
            if any(within is frame for _, within in several):
                del self.awaited[number]

    # What could not be read

    def _unread(self, frame: Frame, reason: str) -> None:
        """A module computed attention that cannot be told of."""
        if frame.changed:
            raise bad_value(
                frame.name, expected="attention that can be read as a whole, where heads are changed", received=reason
            )
        frame.tell()
        frame.unseen = True
        self.not_seen(frame.name, reason)

    def _look_back(self, frame: Frame) -> None:
        """A module ends: what became of its softmaxes?"""
        for origin in [one for one in self.hands.origins if one.where is frame]:
            lost = origin.scored and not origin.used and origin.lost
            if lost or (origin.parts and (origin.lost or origin.parts > 1)):
                self._unread(origin.home, _IN_PARTS if origin.parts else _lost_in(origin.lost))
                frame.unseen = True
            elif not (origin.used or origin.parts or origin.lost) and frame.parent is not None:
                origin.where = frame.parent  # to which it may have been handed
                continue
            self.hands.origins.remove(origin)

    def _was_silent(self, frame: Frame) -> None:
        """A module named for attention ends: did anything in it tell? The innermost of several is named."""
        if frame.told or not is_named_for_attention(frame.module):
            return
        around = frame.parent
        while around is not None and not is_named_for_attention(around.module):
            around = around.parent
        silent = frame.silent or [frame.name]
        if around is not None:
            around.silent += silent
            return
        for name in silent:
            if name not in self._seen:
                self.not_seen(
                    name,
                    "its class is named for attention, and no softmax over keys that could be followed "
                    "to values was computed in it",
                )

    def _ran_elsewhere(self, names: list[str]) -> None:
        """Another thread entered or left a part of the model: attend to what it computes there."""
        mode = getattr(self.frames.others, "mode", None)
        if names and mode is None:
            mode = self.frames.others.mode = _Elsewhere(self, names)
            mode.__enter__()
        elif not names and mode is not None:
            self.frames.others.mode = None
            take_out(mode)

    def _failed(self) -> None:
        """An outermost call raised: what it began is not told of."""
        self.pending.clear()
        for name in [name for name, forward in self._unseen_in.items() if forward == self.frames.forwards]:
            del self.unseen[name], self._unseen_in[name]
        self.awaited.clear()

    def _entered(self, frame: Frame) -> None:
        """A module begins: is it handed several kinds of ids?"""
        ids = frame.token_ids()
        if len(ids) > 1:
            self.streams.begin(ids)

    def _left(self, frame: Frame, output: Any) -> None:
        """A module ends: what was not told by then is told by the best that is known."""
        if self.awaited:
            self._projected(frame)
        if self.streams.on:  # (what is computed by no torch function cannot be followed)
            self.streams.hand_on((frame.args, *frame.kwargs.values()), output)
        self._look_back(frame)
        for note in list(self.pending):
            if self.changes and note.where.parent is not None:  # whoever called it may tell yet
                if note.where.parent is frame:
                    raise _untold(note.where.name, note)
            elif note.where is frame:
                if self.changes:
                    raise _untold(frame.name, note)
                if _routes(note) or (frame.unseen and _may_be_a_part(note) and not _is_square(note)):
                    self.pending.remove(note)
                else:
                    self._finish(note)
        self._was_silent(frame)
        if frame.parent is None:
            self.streams.clear()


_IN_PARTS = "its attention is computed in parts, of some queries or keys each, which are not put together"


def _lost_in(function: str) -> str:
    return f"its softmax over keys could not be followed to a product with values (lost in {function})"


def _may_be_a_part(note: Weighed) -> bool:
    """Whether attention may not be all that its module computes: unless all tokens of an input look at all of them."""
    if note.about is not None or note.origin is None:
        return False
    lengths = note.where.lengths()
    return not _is_square(note) or note.origin.routed is not None or note.weights.shape[-1] not in lengths


def _routes(note: Weighed) -> bool:
    """Whether the same scores route tokens to learned slots: a mixture of experts, not attention."""
    return note.origin is not None and bool(note.origin.routed)


def _is_square(note: Weighed) -> bool:
    return note.whole and note.weights.shape[-2] == note.weights.shape[-1]


def _is_part(module: nn.Module) -> bool:
    """Whether a module is a function in the shape of a module, such as nn.Softmax."""
    return isinstance(module, (nn.Softmax, nn.LogSoftmax, nn.Dropout, nn.Identity))


_NAMED_FOR_ATTENTION = re.compile(r"(Attention|Attn)(V?\d+[dD]?|Layer|Block|Module|Pool|Pooling)?$")
_CALLS_ATTENTION = re.compile(r"scaled_dot_product|flash_att|efficient_att|varlen_att|flex_att|native_multi_head")

_COMPUTES_ATTENTION = re.compile(r"aten::(softmax|_softmax|scaled_dot_product|_native_multi_head|\w*flash_att)")


def is_named_for_attention(module: nn.Module) -> bool:
    """Whether a module's class says that it computes attention."""
    return _NAMED_FOR_ATTENTION.search(type(module).__name__) is not None


def operator_name(func: Any) -> str:
    """The name of a torch operator, without its overload."""
    return str(getattr(func, "__name__", func)).partition(".")[0]


@functools.lru_cache(maxsize=4096)
def is_attention(func: Any) -> bool:
    """Whether a torch function or operator, which is not one that is seen, computes attention; by its name."""
    return _CALLS_ATTENTION.search(str(getattr(func, "__name__", func))) is not None


def _multi_head_unwatched(frame: Frame, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
    """`F.multi_head_attention_forward` as the module that called it would have computed it unwatched: perhaps by the
    fast path of `nn.MultiheadAttention`, which is off while a mode is on. (Rows that see nothing are NaN there.)"""
    module, query = frame.module, frame.given("query")
    own = getattr(module.forward, "__func__", None) is nn.MultiheadAttention.forward
    if not own or not isinstance(query, Tensor) or query.data_ptr() != args[0].data_ptr():
        return F.multi_head_attention_forward(*args, **kwargs)
    out, weights = module.forward(*frame.args, **frame.kwargs)
    return (out.transpose(0, 1) if module.batch_first and out.dim() == 3 else out), weights


def _may_disbelieve(module: nn.Module, operands: Operands, kwargs: dict[str, Any]) -> bool:
    """Whether a hint that a mask is causal is wrong, and may have gone the fast path, which reads the mask."""
    mask = kwargs.get("attn_mask")
    if not kwargs.get("is_causal") or mask is None or module.training or not isinstance(module, nn.MultiheadAttention):
        return False
    return not is_causal_mask(mask, operands.q.shape[2], mask.shape[-1])


def _came_of(operands: Operands, out: Tensor, args: tuple[Any, ...]) -> bool:
    """Whether an output (N, B, W) of `F.multi_head_attention_forward` is what these heads give."""
    heads = attend(operands.q, operands.k, operands.v, **operands.options).transpose(1, 2).flatten(2)
    right = F.linear(heads, args[11], args[12]).transpose(0, 1).reshape(out.shape)
    return torch.allclose(out, right.to(out.dtype), rtol=1e-2, atol=1e-3 * float(right.abs().amax()), equal_nan=True)


def _readings(
    how: huggingface.Implementation,
    module: nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Any,
    options: dict[str, Any],
) -> Iterator[Call]:
    """What a function of transformers may compute, the likeliest first: as its masks are made, then as others read
    them, each with sinks (if there are any) and without."""
    flash = how.masks == "flash" and (mask is None or mask.dim() == 2)
    if mask is not None and not isinstance(
        mask, Tensor
    ):  # (to `flex_attention` a tensor is what is added, as to eager)
        mask = FlexMask.of(mask.as_tuple())
    likely = {"eager": ("eager", "sdpa"), "flex": ("eager",), "unknown": ("flash", "sdpa", "eager")}.get(how.masks)
    ways = likely or (("flash", "sdpa", "eager") if flash else ("sdpa", "flash", "eager"))
    plain = {name: x for name, x in options.items() if name != "s_aux"}
    several = [plain] if how.trusted or options.get("s_aux") is None else [options, plain]  # sdpa knows no sinks
    for number, (way, given) in enumerate((way, given) for way in ways for given in several):
        try:
            if way == "flash":
                yield from_flash(module, q, k, v, mask, **given)
            else:
                yield from_huggingface(module, q, k, v, mask, masks="eager" if way == "eager" else "sdpa", **given)
        except (ValueError, TypeError, RuntimeError):
            if not number:
                raise


def _best(call: Call, others: Iterator[Call], output: Tensor, weights: Any) -> Call | Tensor | None:
    """Of several readings the first whose outputs are those that came out, (B, H, N, E); else weights (B, H, N, M) that
    came with them, if they give them; else None."""
    half = call.q.dtype in (torch.float16, torch.bfloat16) or call.q.device.type != "cpu"
    allowed = 5e-2 if half else 1e-3  # (on a GPU products may be of TF32)
    for one in chain([call], others):
        if error_of(one, output) <= allowed:
            return one
    if isinstance(weights, Tensor) and weights.shape == call.shape:
        v = call.v.repeat_interleave(call.shape[1] // call.v.shape[1], 1)
        if weights.shape[3] == v.shape[2] and torch.allclose(
            weights.to(v.dtype) @ v, output.to(v.dtype), rtol=0.0, atol=allowed * float(v.abs().amax())
        ):
            return weights.detach()
    return None


def _without_weights(call: Call) -> Any:
    """A function as transformers wants it, that computes what an eager one would: with gradients, in O(N) memory."""

    def compute(_: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> tuple[Tensor, None]:
        sinks = options.get("s_aux")
        sinks = None if sinks is None else sinks.flatten().to(q.dtype)
        out = attend(
            q,
            k,
            v,
            mask=call.mask,
            bias=[b.weight for b in call.biases] or None,
            positions=call.q_start,
            scale=call.scale,
            softcap=call.softcap,
            sinks=sinks,
        )
        return out.transpose(1, 2).contiguous(), None

    return compute


def _untold(layer: str, note: Weighed) -> ValueError:
    return bad_value(
        layer,
        expected="attention by hand whose heads can be told from the batch",
        received=f"weights of shape {tuple(note.weights.shape)}",
    )


class _Eagerly:
    """What was compiled runs as it was written, for as long as somebody looks: compiled code shows nothing. So does
    `flex_attention`, which compiles itself. Both are for the whole process, so those who look are counted."""

    def __init__(self) -> None:
        self.lock, self.count, self.undo = threading.Lock(), 0, ExitStack()
        self.stance = False

    def start(self, model: nn.Module) -> None:
        with self.lock:
            self.count += 1
            flex = sys.modules.get("torch.nn.attention.flex_attention")
            if self.count == 1 and hasattr(flex, _UNCOMPILED):
                self.undo.callback(setattr, flex, _UNCOMPILED, getattr(flex, _UNCOMPILED))
                setattr(flex, _UNCOMPILED, True)
            # Where nothing was compiled yet, and will not be, the compiler is not imported.
            if not self.stance and ("torch._dynamo" in sys.modules or huggingface.uses_flex_attention(model)):
                self.undo.enter_context(torch.compiler.set_stance("force_eager"))
                self.stance = True

    def stop(self) -> None:
        with self.lock:
            self.count -= 1
            if not self.count:
                self.undo.close()
                self.stance = False


_UNCOMPILED = "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG"
_eagerly = _Eagerly()


class _Mode(TorchFunctionMode):
    """Hands every torch function to the senses. (Within its own handler it is off.)"""

    def __init__(self, senses: AttentionCapture) -> None:
        super().__init__()
        self.senses: AttentionCapture | None = senses

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self.senses is None:
            return func(*args, **(kwargs or {}))
        return self.senses.function(func, args, kwargs or {})

    def end(self) -> None:
        """Take this mode out of the stack of modes, wherever it is: what began later may end later."""
        self.senses = None
        take_out(self)


def take_out(mode: TorchFunctionMode) -> None:
    """Take one mode out of this thread's stack, and leave the others as they are."""
    if not any(one is mode for one in _get_current_function_mode_stack()):
        return  # it began in another thread, whose stack nobody else can reach
    above = []
    while (top := _pop_mode()) is not mode:
        above.append(top)
    for one in reversed(above):
        _push_mode(one)


@dataclass
class _AttendObserver:
    """Told of one `regard.attend` by `kernels.run`."""

    capture: AttentionCapture
    frame: Frame
    stream: Tensor | None  # the ids that the queries are made of, if these are known

    def attention(self, call: Call, compute: Callable[[], Tensor]) -> Tensor:
        out = compute()
        return self.capture._attended(self.frame, self.stream, call.detached(), out)


class _Elsewhere(TorchFunctionMode):
    """In another thread than the one that looks: tells which modules compute attention there."""

    def __init__(self, senses: AttentionCapture, names: list[str]) -> None:
        super().__init__()
        self.senses, self.names = senses, names

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _ATTENTION or (func in SOFTMAXES and args and isinstance(args[0], Tensor) and args[0].dim() > 2):
            why = "it ran in another thread, and a watch sees the thread that began it"
            self.senses.not_seen(self.names[-1], why)
        return func(*args, **(kwargs or {}))


_ATTENTION = {F.scaled_dot_product_attention, F.multi_head_attention_forward, attend}
_INTERESTING = {*FUNCTIONS, *_ATTENTION}
_OPERATORS = (torch._ops.OpOverloadPacket, torch._ops.OpOverload, torch._ops.HigherOrderOperator)
_OPERATORS_SEEN = ("flex_attention", "_varlen_attn", "_varlen_attn_out")
_HF_NAMES = ("query", "key", "value", "attention_mask")


def _kind(frame: Frame, shape: tuple[int, ...]) -> Literal["self", "cross"]:
    elsewhere = frame.looks_elsewhere()
    if elsewhere is None and frame.is_handed_heads() and frame.parent is not None:
        elsewhere = frame.parent.looks_elsewhere()
    if elsewhere is not None:
        return "cross" if elsewhere else "self"
    return "self" if shape[2] <= shape[3] else "cross"


def _unclear(query: Tensor, key: Tensor, turn: _Turn) -> bool:
    """Whether sizes cannot tell heads from the batch."""
    if query.dim() == 3:
        return turn.batch > 1 and turn.batch < query.shape[0]
    return query.dim() == 4 and query.shape[0] == query.shape[1] > 1 and key.shape[:2] == query.shape[:2]


def _in_order(mask: Tensor | None, q: Tensor, k: Tensor, order: Tensor) -> Tensor | None:
    """A mask that broadcasts to the weights, with its leading axes in another order."""
    if mask is None or mask.dim() <= 2:
        return mask
    return mask.expand(*q.shape[:-1], k.shape[-2]).flatten(0, -3)[order]


class _Turn:
    """Between the axes that a caller of torch's attention uses and (B, H, N, D)."""

    def __init__(self, how: str, shape: tuple[int, ...], batch: int = 1) -> None:
        self.how, self.shape, self.batch = how, shape, batch

    @staticmethod
    def of(query: Tensor, key: Tensor, sizes: list[tuple[int, int]]) -> _Turn:
        shape = tuple(query.shape)
        batch = batch_of(shape[-2], key.shape[-2], sizes)
        if len(shape) == 4:  # (H, B, N, D), where the input of the module says so
            return _Turn("swapped" if shape[0] != batch and shape[1] == batch else "plain", shape)
        if len(shape) == 3:  # (B * H, N, D), or (H, N, D) without a batch
            return _Turn("folded", shape, folded(shape[0], batch, sizes))
        return _Turn("more", shape)

    def __call__(self, x: Tensor) -> Tensor:
        if self.how == "swapped":
            return x.transpose(0, 1)
        if self.how == "folded":
            return x.unflatten(0, (self.batch, -1))
        if self.how == "more":
            return x.flatten(0, x.dim() - 4) if x.dim() > 4 else x[(None,) * (4 - x.dim())]
        return x

    def mask(self, mask: Tensor) -> Tensor:
        """A mask that broadcasts to the weights, with four axes."""
        if mask.dim() <= 2 or self.how == "plain":
            return mask
        if self.how == "folded":
            return mask.unflatten(0, (self.batch, -1)) if mask.shape[0] > 1 else mask[None]
        lead = (*self.shape[:-2], *mask.shape[-2:])
        return self(mask.expand(*lead)) if self.how == "more" or mask.dim() == 4 else mask

    def back(self, x: Tensor, like: Tensor) -> Tensor:
        return x.transpose(0, 1) if self.how == "swapped" else x.reshape(like.shape)
