"""`AttentionCapture`: observe every attention that a running model computes. The base of `watch` and `ablate`.

The way from a running model to `see(ObservedCall)`:

    1. `module_stack.py`: hooks tell which module is running (a `Frame`); `model_tree.py` says which modules need them.
    2. `function_modes.py`: a torch function mode hands every torch function to `AttentionCapture.function`, which asks
       `torch_functions.py` (with `multi_head_attention.py`, `registry.py`) for a handler of attention functions,
       and hands steps of handwritten attention (softmax, product with values) to `handwritten_calls.py`.
    3. `huggingface.py` intercepts the attention functions of transformers, for `transformers_functions.py`.
    4. Each of them turns what it was called with into a `Call` (`sdpa.py`, `flash.py`, `flex.py`, `head_axes.py`), or
       has the weights, and asks `AttentionCapture.describe` for an `ObservedCall` (`observed.py`), with the token ids
       (`streams.py`) and the output projection (`output_projection.py`).
    5. `AttentionCapture.report` calls `see`, and `change` if the capture replaces the heads' outputs.

Layers that are like one before, in this forward or an earlier one, go from 2 or 3 to `see_by_plan` (`layer_plans.py`).

`unseen.py` names layers whose attention could not be read; `eager_mode.py` runs compiled models eagerly meanwhile.

Letters: B batch, H query heads, N queries, M keys, E head width of v.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from regard.errors import bad_type
from regard.heads.capture import huggingface, unseen, windows
from regard.heads.capture.closed_modules import ClosedModules
from regard.heads.capture.eager_mode import eager_mode
from regard.heads.capture.function_modes import CaptureMode, follow_other_thread
from regard.heads.capture.handwritten import FUNCTIONS
from regard.heads.capture.handwritten_calls import HandwrittenCalls
from regard.heads.capture.module_stack import Frame, ModuleStack
from regard.heads.capture.observed import ObservedCall, Subtracted
from regard.heads.capture.output_projection import ProjectionTracker
from regard.heads.capture.streams import Streams
from regard.heads.capture.torch_functions import AttendObserver, handler_of
from regard.heads.capture.transformers_functions import capture_function
from regard.kernels import Call
from regard.kernels.run import run_unobserved
from regard.tracing import is_eager, traced

__all__ = ["AttentionCapture"]

LARGE = 2**14  # numbers of q from which on it is worth to know whether copies are needed


class AttentionCapture:
    """A context manager that observes a model while it runs. Everything is put back when the block ends."""

    changes = False  # whether `change` may replace outputs
    needs_output = False  # whether `see` needs `attention.output`, even if it has to be computed for it
    needs_projection = False  # whether inputs of output projections are to be observed
    computes = False  # whether `see` may compute the attention, in one pass with what it measures
    plans_layers = False  # whether `layer_plan` may give a plan

    def __init__(self, model: nn.Module) -> None:
        if not isinstance(model, nn.Module):
            raise bad_type("model", expected="a torch.nn.Module", received=type(model).__name__)
        self.frames = ModuleStack(model)
        self.frames.on_enter = self._module_began
        self.frames.on_exit = self._module_ended
        self.frames.on_failure = self._failed
        self.frames.on_elsewhere = partial(follow_other_thread, self)
        # Re-entrancy guard: ignore torch functions called inside an attention that is being recorded.
        self.inside_attention = False
        self.closed = ClosedModules(self.frames.tree.closed)
        self.attend_observer = AttendObserver(self)
        self.handwritten = HandwrittenCalls(self, self.frames.modules)
        self.streams = Streams()
        self.projections = ProjectionTracker(self)
        self.calls_without_mask: dict[Any, Any] = {}  # by shapes: scale, first position, softcap and mask of a `Call`
        self.layer_plans: dict[Any, Any] = {}  # of the running call of the model, by key; None: there is none
        self.reported: set[str] = set()  # names of modules whose attention was reported
        self.unseen: dict[str, str] = {}  # layers whose attention could not be read, with the reason
        self._unseen_since: dict[str, int] = {}  # the outermost call of the model in which each was first met

    # For subclasses

    def see(self, attention: ObservedCall) -> Callable[[], bool] | None:
        """Called with every attention that was computed, or is to be computed (`to_compute`): then it sets `output` and
        returns a function that tells whether each query sees a key."""

    def change(self, attention: ObservedCall, output: Tensor) -> Tensor:
        """Called after `see` if `changes`: the outputs (B, H, N, E) of the heads, or others to replace them."""
        return output

    def layer_plan(self, key: Hashable, attention: ObservedCall, mask: Tensor | None) -> Any:
        """Called after `see` if `plans_layers`: what `see_by_plan` needs for layers with this key; None if each of them
        has to be described. `mask`: the one that was given as a tensor, which must live as long as the plan."""

    def earlier_plan(self, key: Hashable, frame: Frame, ids: Tensor | None) -> Any:
        """Called in place of `see` for the first layer of a forward with this key, in a text with these token ids: what
        `see_by_plan` needs, if an earlier forward had such a layer; else None."""

    def see_by_plan(self, plan: Any, frame: Frame, q: Tensor, k: Tensor, v: Tensor) -> Tensor | None:
        """Called in place of `see` for a layer like one before: its output (B, H, N, E); None if it is not wanted."""

    def not_seen(self, name: str, reason: str) -> None:
        """Called for a layer whose attention could not be read. The first reason for a layer is kept."""
        if name not in self.unseen:
            self.unseen[name] = reason
            self._unseen_since[name] = self.frames.forwards

    # Begin and end

    def __enter__(self) -> Any:
        with ExitStack() as stack:  # if a step raises, those before it are undone
            stack.callback(self.frames.remove)
            self.frames.install()
            huggingface.start(self)
            stack.callback(huggingface.stop, self)
            eager_mode.start(self.frames.modules)
            stack.callback(eager_mode.stop)
            self.function_mode = CaptureMode(self)
            self.function_mode.__enter__()
            stack.callback(self.function_mode.end)
            stack.callback(self.closed.leave)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
        unseen.check_scripted_modules(self)
        self.projections.expected.clear()
        self.handwritten.clear()
        self.streams.clear()
        self.layer_plans.clear()
        self.frames.forget_callbacks()  # else a cycle keeps what was recorded in memory until garbage is collected
        del self.attend_observer.capture, self.projections.capture, self.handwritten.capture

    # Functions that the model calls

    def function(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a torch function for the model: attention, a step of handwritten attention, or any other function."""
        frame = None if self.inside_attention else self.frames.current()
        if frame is None:
            return func(*args, **kwargs)
        out = self._dispatch(frame, func, args, kwargs)
        if self.streams.on:
            self.streams.follow(func, args, kwargs, out)
        return out

    def _dispatch(self, frame: Frame, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func in FUNCTIONS:
            return self.handwritten.follow(frame, func, args, kwargs)
        handler = handler_of(func)
        if handler is not None:
            return handler(self, frame, func, args, kwargs)
        out = func(*args, **kwargs)
        self.handwritten.tracer.pass_by(func, args, out)
        unseen.check_function(self, frame, func)
        return out

    def owns(self, module: nn.Module) -> bool:
        """Whether a module is part of the model and runs in the captured thread."""
        return self.frames.current(module) is not None and not self.inside_attention

    def through(
        self, compute: Any, how: huggingface.Implementation, module: nn.Module, *args: Any, **kwargs: Any
    ) -> Any:
        """Call an attention function of transformers for a module of the model."""
        return capture_function(self, compute, how, module, args, kwargs)

    # For handlers of attention functions

    def graph(self) -> torch.set_grad_enabled:
        """A context in which gradients are on if heads are changed and the caller has them on: what is computed of the
        model's tensors in it is then differentiable."""
        return torch.set_grad_enabled(self.changes and torch.is_grad_enabled())

    def describe(
        self, frame: Frame, shape: tuple[int, ...], stream: Tensor | None = None, **known: Any
    ) -> ObservedCall:
        """The description of an attention (B, H, N, M) that a module call computes. `stream`: the token ids of its
        queries, if they are followed; `known`: fields of `ObservedCall`."""
        frame.tell()
        self.reported.add(frame.name)
        if not self.changes:
            known = {name: x if x is None else _detached(x) for name, x in known.items()}
        attention = ObservedCall(frame.name, frame.module, self.frames.forwards, _kind(frame, shape), **known)
        ids = self.frames.ids(shape[0], shape[2], sure=self.streams.on) if stream is None else stream.to(torch.int64)
        fits = ids is not None and ids.shape[0] in (1, shape[0]) and ids.shape[1] == shape[2]
        attention.ids = ids.to(attention.device) if ids is not None and fits else None
        attention.input = frame.input(shape[0], shape[2]) if self.needs_output else None
        call = attention.call
        if self.computes and call is not None:
            attention.steady = self.is_steady(frame, call.q, call.k, call.v)
        return attention

    def is_steady(self, frame: Frame, q: Tensor, k: Tensor, v: Tensor) -> bool:
        """Whether nobody will write over q, k and v, as far as it is known. Small ones are not asked about: it is
        quicker to copy them."""
        return q.numel() >= LARGE and id(frame.module) in self.frames.tree.steady and frame.made(q, k, v)

    def report(self, frame: Frame, attention: ObservedCall, output: Tensor) -> Tensor:
        """Call `see` for an attention with the output (B, H, N, E). Returns the output, perhaps changed."""
        if not self.changes and windows.is_window(frame, attention):
            windows.collect(self, frame, attention, output.detach())
            return output
        with torch.no_grad(), torch._C.DisableTorchFunction():
            attention.output = output.detach()
            self.projections.find(attention, frame)
            self.projections.expect(attention, frame)
            self.see(attention)
        return self.change(attention, output) if self.changes else output

    def may_compute(self, *inputs: Tensor, modes: int = 0) -> bool:
        """Whether an attention of these inputs may be computed by `see`: nobody wants its gradient, and nobody else (an
        outer capture or mode, a compiler, torch.func) must see the function that the model calls. `modes`: how many
        torch function modes of this capture are on (none inside the handler of its own, and in closed modules)."""
        return (
            self.computes
            and not (torch.is_grad_enabled() and any(x.requires_grad for x in inputs))
            and torch._C._len_torch_function_stack() == modes
            and not traced(*inputs)
            and is_eager()
            and huggingface.number_of_observers() == 1
        )

    def compute(self, frame: Frame, attention: ObservedCall, *, any_row: bool = False) -> Tensor | None:
        """Call `see` for an attention that it shall compute. Returns the output (B, H, N, E); None if the function that
        the model calls has to give it: because the layer was not asked for, or because a query sees nothing. (What such
        a query gets is for each function to say: 0, NaN or a mean of values. With `any_row` it is 0, as in `attend`.)
        """
        if windows.is_window(frame, attention):
            assert attention.call is not None
            with torch.no_grad(), torch._C.DisableTorchFunction():
                output = run_unobserved(attention.call)
                windows.collect(self, frame, attention, output)
            return output
        attention.to_compute = True
        with torch.no_grad(), torch._C.DisableTorchFunction():
            self.projections.find(attention, frame)
            sees_all = self.see(attention)
            if attention.output is None or not (any_row or sees_all is None or sees_all()):
                return None
            self.projections.expect(attention, frame)
        return attention.output

    def computed_by_model(self, frame: Frame, attention: ObservedCall, output: Tensor) -> None:
        """`compute` gave None, and the model's own function gave this output (B, H, N, E)."""
        with torch.no_grad(), torch._C.DisableTorchFunction():
            attention.output = output.detach()
            self.projections.expect(attention, frame)

    # Modules that begin and end

    def _module_began(self, frame: Frame) -> None:
        if frame.parent is None:
            self.layer_plans.clear()
        with torch._C.DisableTorchFunction():
            ids = frame.token_ids()
        if len(ids) > 1:  # of a source and a target, for example
            self.streams.begin(ids)
        if self.closed.is_running:  # (torch functions are not followed in it)
            return
        followed = self.streams.on or self.handwritten.waiting or self.handwritten.tracer.origins
        if not followed and not self.inside_attention:
            self.closed.began(frame, self.function_mode, self.attend_observer)

    def _module_ended(self, frame: Frame, output: Any) -> None:
        if self.closed.ended(frame):
            self.handwritten.tracer.computed(output)
        if self.projections.expected:
            self.projections.module_ended(frame)
        if self.streams.on:  # (the module may have computed its output without torch functions)
            self.streams.hand_on((frame.args, *frame.kwargs.values()), output)
        if self.handwritten.tracer.origins:
            unseen.check_softmaxes(self, frame)
        if self.handwritten.waiting:
            self.handwritten.module_ended(frame)
        if not frame.told:
            unseen.check_unreported_module(self, frame)
        if frame.parent is None:
            self.streams.clear()

    def _failed(self) -> None:
        """An outermost call raised: forget what it began."""
        self.handwritten.waiting.clear()
        for name in [name for name, forward in self._unseen_since.items() if forward == self.frames.forwards]:
            del self.unseen[name], self._unseen_since[name]
        self.projections.expected.clear()


def _detached(x: Call | Tensor | Subtracted) -> Call | Tensor | Subtracted:
    return x.detached() if isinstance(x, Call) else x.detach()


def _kind(frame: Frame, shape: tuple[int, ...]) -> Literal["self", "cross"]:
    """Self or cross attention, by the arguments of the module call; else cross if there are more queries than keys.
    Joint attention, where all inputs are one sequence, is self attention."""
    cross = frame.looks_elsewhere()
    if cross and shape[2] == shape[3] and frame.joins(shape[2]):
        return "self"
    if cross is None and frame.is_handed_heads() and frame.parent is not None:
        cross = frame.parent.looks_elsewhere()
    if cross is None:
        cross = shape[2] > shape[3]
    return "cross" if cross else "self"
