"""Which module is running: the stack of forward calls below a root module, kept by hooks.

A layer is named by the module whose forward computes the attention. If one module is called several times within one
forward of the root (ALBERT), its k-th call, counted from 0, is `name#k`; the first keeps the plain name.

Hooks stay with the modules that they were registered on: a copy or a pickle of a module made meanwhile has none.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache, partial
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from regard.heads.capture.model_tree import tree_of
from regard.heads.module_names import CROSS_ATTENTION_INPUTS, NOT_TOKEN_IDS
from regard.masks import Mask

if TYPE_CHECKING:
    from regard.kernels import Call

__all__ = ["Frame", "ModuleStack"]


@dataclass
class Frame:
    """One forward call in progress."""

    module: nn.Module
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    parent: Frame | None = None  # the call that made this one
    output: Any = None  # once it has ended
    told: bool = False  # attention inside it was reported, or named as unreadable
    unseen: bool = False  # it computed attention that could not be read
    changed: bool = False  # heads of handwritten attention were changed in it
    silent: list[str] = field(default_factory=list)  # modules with an attention-like name in it, of which none was seen
    windows: list[tuple[Call, Tensor]] = field(default_factory=list)  # of an attention in windows, with their outputs
    _ids: list[Tensor] | None = None  # what `token_ids` gives, once it was asked

    def tell(self) -> None:
        """Mark this call, and those around it, as reported."""
        frame: Frame | None = self
        while frame is not None and not frame.told:
            frame.told, frame = True, frame.parent

    def given(self, name: str) -> Any:
        """An argument of the call by its name, positional or keyword; None if it was not given."""
        if name in self.kwargs:
            return self.kwargs[name]
        names = _parameters(type(self.module).forward)
        at = names.index(name) if name in names else len(self.args)
        return self.args[at] if at < len(self.args) else None

    def named(self) -> dict[str, Any]:
        """The arguments of the call by their names; those of `*args` by their indices."""
        names = _parameters(type(self.module).forward)
        names += tuple(f"*{i}" for i in range(len(names), len(self.args)))
        return dict(zip(names, self.args, strict=False)) | self.kwargs

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """The leading sizes of the first floating-point input with three axes: (B, N) or (N, B). If there is none,
        those of an image (B, C, ..., ...) or (B, ..., ..., C), with as many tokens as it has pixels."""
        given = [x for x in (*self.args, *self.kwargs.values()) if isinstance(x, Tensor) and x.is_floating_point()]
        for x in given:
            if x.dim() == 3:
                return [(x.shape[0], x.shape[1])]
        for x in given:
            if x.dim() in (4, 5) and not self.is_handed_heads():
                return [(x.shape[0], x.shape[2:].numel()), (x.shape[0], x.shape[1:-1].numel())]
        return []

    def lengths(self) -> set[int]:
        """How many tokens its inputs may have."""
        found: set[int] = set()
        for name, x in self.named().items():
            if isinstance(x, Tensor) and x.dim() > 1 and "mask" not in name and "bias" not in name:
                found |= set(x.shape[:-1]) if x.is_floating_point() else {x.shape[-1]}
                found |= {x.shape[2:].numel(), x.shape[1:-1].numel()} if x.dim() > 3 else set()
        return found

    def input(self, batch: int, length: int) -> Tensor | None:
        """The first floating-point input (batch, length, W); of the call around it, if this one takes heads."""
        for value in (*self.args, *self.kwargs.values()):
            if isinstance(value, Tensor) and value.is_floating_point() and value.shape[:-1] == (batch, length):
                return value.detach()
        return self.parent.input(batch, length) if self.parent is not None and self.is_handed_heads() else None

    def made(self, *tensors: Tensor) -> bool:
        """Whether tensors are known to be made within this call and held by nobody else: they are no parts of its
        inputs, among which is no cache, and they fill the memory that they are in."""
        memory: dict[int, int] = {}  # bytes by the address of each storage
        used = 0
        for x in tensors:
            storage = x.untyped_storage()
            memory[storage.data_ptr()] = storage.nbytes()
            used += x.nbytes
        if sum(memory.values()) != used:
            return False
        for x in (*self.args, *self.kwargs.values()):
            if isinstance(x, Tensor):
                if x.untyped_storage().data_ptr() in memory:
                    return False
            elif x is not None and not isinstance(x, (bool, int, float, str, tuple, Mask)):
                return False
        return True

    def looks_elsewhere(self) -> bool | None:
        """Whether this is cross attention, by the arguments of the call; None if they do not tell."""
        if not _other_inputs(type(self.module).forward):
            return None
        first, others = self._inputs()
        return any(not same_input(first, other) for other in others)

    def has_one_input(self) -> bool:
        """Whether the call is known to be given one input alone, so that it is self attention: no parameter that keys
        and values could be made of has a value, and heads are not among its arguments."""
        forward = type(self.module).forward
        names = _other_inputs(forward)
        if not names and "hidden_states" not in _parameters(forward):
            return not self.is_handed_heads()
        if names and len(self.args) > 1:
            return False
        return all(self.kwargs.get(name) is None for name in names)

    def joins(self, length: int) -> bool:
        """Whether so many tokens are those of all inputs (B, n, W) together: text and image as one sequence."""
        first, others = self._inputs()
        inputs = [x for x in (first, *others) if isinstance(x, Tensor) and x.dim() == 3]
        return len(inputs) == 1 + len(others) > 1 and sum(x.shape[1] for x in inputs) == length

    def _inputs(self) -> tuple[Any, list[Tensor]]:
        """The first input, and those that keys and values of cross attention are made of."""
        first = self.args[0] if self.args else next(iter(self.kwargs.values()), None)
        names = _other_inputs(type(self.module).forward)
        return first, [other for name in names if isinstance(other := self.given(name), Tensor)]

    def is_handed_heads(self) -> bool:
        """Whether its inputs are queries, keys and values of heads, so that the input (B, N, W) is not among them."""
        given = [x for x in (*self.args, *self.kwargs.values()) if isinstance(x, Tensor) and x.is_floating_point()]
        return sum(x.dim() == 4 for x in given) >= 3

    def token_ids(self) -> list[Tensor]:
        """Integer inputs (B, n) that may be token ids."""
        if self._ids is None:
            by_name = self.named() if any(map(_is_ids, self.args)) else self.kwargs
            self._ids = [x for name, x in by_name.items() if _is_ids(x) and _may_name_ids(name)]
        return self._ids


def same_input(a: object, b: object) -> bool:
    """Whether two inputs are one tensor, or equal: self attention may be called with the same input twice."""
    if a is b:
        return True
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return False
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)


def _is_ids(x: object) -> bool:
    return isinstance(x, Tensor) and x.dtype in _INTEGERS and x.dim() == 2


_INTEGERS = (torch.int64, torch.int32)


@lru_cache(maxsize=1024)
def _may_name_ids(name: str) -> bool:
    return not any(word in name for word in NOT_TOKEN_IDS)


def in_backward() -> bool:
    """Whether autograd runs a backward pass: a forward in it recomputes a checkpointed layer."""
    return torch._C._current_graph_task_id() != -1  # pyright: ignore[reportAttributeAccessIssue]


def _parameters(forward: Callable[..., Any]) -> tuple[str, ...]:
    """The names of a forward's parameters, without self."""
    if forward not in _SIGNATURES:
        _SIGNATURES[forward] = tuple(inspect.signature(forward).parameters)[1:]
    return _SIGNATURES[forward]


_SIGNATURES: dict[Callable[..., Any], tuple[str, ...]] = {}


def _other_inputs(forward: Callable[..., Any]) -> tuple[str, ...]:
    """The parameters of a forward that keys and values of cross attention are made of."""
    if forward not in _OTHER_INPUTS:
        names = _parameters(forward)
        _OTHER_INPUTS[forward] = tuple(name for name in CROSS_ATTENTION_INPUTS if name in names)
    return _OTHER_INPUTS[forward]


_OTHER_INPUTS: dict[Callable[..., Any], tuple[str, ...]] = {}


@dataclass
class ModuleStack:
    """The forward calls in progress below `root`, outermost first. Calls of other threads are not on the stack."""

    root: nn.Module
    stack: list[Frame] = field(default_factory=list)
    forwards: int = 0  # outermost calls so far
    elsewhere: bool = False  # whether another thread ran the model
    on_enter: Callable[[Frame], None] | None = None
    on_exit: Callable[[Frame, Any], None] | None = None  # with its output, if it returned
    on_failure: Callable[[], None] | None = None  # an outermost call raised
    # Called with the names of the modules in progress in another thread, when one starts or ends during a call of ours
    on_elsewhere: Callable[[list[str]], None] | None = None

    def __post_init__(self) -> None:
        self.tree = tree_of(self.root)
        self.modules, self.names = self.tree.modules, self.tree.names
        self.leaves = False  # whether modules that attention cannot be computed in are followed, too
        self.root_has_hooks = True  # else its owner calls `enter` and `leave` for it
        self.thread = 0
        self.hooked: list[nn.Module] = []
        self.number = -1  # of our hooks, the same on all modules
        self.entered: set[str] = set()  # names of the modules that were called
        self.others = threading.local()  # `names`: the modules in progress in that thread

    def install(self) -> None:
        """Register hooks on the modules below the root that attention may be computed in; calls of the current thread
        will be followed."""
        self.thread = get_ident()
        enter, leave = self.enter, self.leave
        self.number = RemovableHandle(OrderedDict()).id  # (no other hook will have it)
        for module in self.tree.can_be_hooked if self.leaves else self.tree.with_hooks:
            if module is self.root and not self.root_has_hooks:
                continue
            # As `register_forward_pre_hook(enter, with_kwargs=True)` and `register_forward_hook(leave,
            # always_call=True)` do, for all modules at once.
            module._forward_pre_hooks[self.number] = enter
            module._forward_pre_hooks_with_kwargs[self.number] = True
            module._forward_hooks[self.number] = leave
            module._forward_hooks_always_called[self.number] = True
            self.hooked.append(module)
            if _is_copied_by_state(type(module)):
                module.__dict__["__getstate__"] = partial(_state_without_hooks, module)

    def remove(self) -> None:
        """Remove the hooks."""
        names = (*_HOOKS, *_ABOUT_HOOKS)
        for module in self.hooked:
            attributes = module.__dict__
            for name in names:
                attributes[name].pop(self.number, None)
            if "__getstate__" in attributes:
                _restore_copying(module)
        self.hooked.clear()
        self.stack.clear()

    def forget_callbacks(self) -> None:
        """Let go of whoever was told of calls."""
        self.on_enter = self.on_exit = self.on_failure = self.on_elsewhere = None

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleStack:
        """For modules that copy their hooks with them by their own `__deepcopy__`: the hooks do nothing there."""
        return ModuleStack(nn.Identity())

    def __reduce__(self) -> Any:
        return ModuleStack, (nn.Identity(),)

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A hook before a module runs: it is now the innermost call in progress."""
        name = self.names.get(id(module._forward_hooks))
        if name is None:  # a copy
            return
        if get_ident() != self.thread:
            self.elsewhere = True
            self._elsewhere(name, entered=True)
            return
        if in_backward():
            return
        stack = self.stack
        if module is self.root:
            stack.clear()  # an interrupt may have left frames behind
        if not stack:
            self.forwards += 1
        frame = Frame(module, name, args, kwargs, stack[-1] if stack else None)
        self.entered.add(name)
        stack.append(frame)
        if self.on_enter is not None:
            self.on_enter(frame)

    def leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """A hook after it ran, or raised."""
        name = self.names.get(id(module._forward_hooks))
        if name is None:
            return
        if get_ident() != self.thread:
            self._elsewhere(name, entered=False)
            return
        if in_backward():
            return
        raised = output is None and sys.exc_info()[0] is not None
        # A module that raised before its exit hook ran leaves its frame behind: drop all frames above this one.
        while self.stack:
            frame = self.stack.pop()
            if frame.module is module:
                frame.output = output
            if self.on_exit is not None:
                self.on_exit(frame, output if frame.module is module else None)
            if frame.module is module:
                break
        if raised and not self.stack and self.on_failure is not None:
            self.on_failure()

    def _elsewhere(self, name: str, entered: bool) -> None:
        """Another thread runs a part of the model while this one runs the model. (A call of the whole model in another
        thread is independent.)"""
        names: list[str] = self.others.__dict__.setdefault("names", [])
        if entered and not names and (not self.stack or name == self.names[id(self.root._forward_hooks)]):
            return
        if entered:
            names.append(name)
        elif name in names:
            del names[len(names) - 1 - names[::-1].index(name) :]
        else:
            return
        if self.on_elsewhere is not None:
            self.on_elsewhere(names)

    def current(self, module: nn.Module | None = None) -> Frame | None:
        """The innermost call in progress, or that of a module; None outside the root, in another thread, and while a
        checkpointed layer is recomputed in the backward pass."""
        if not self.stack or get_ident() != self.thread or in_backward():
            return None
        if module is None or self.stack[-1].module is module:
            return self.stack[-1]
        return next((frame for frame in reversed(self.stack) if frame.module is module), None)

    def scripted(self) -> list[tuple[str, torch.jit.ScriptModule]]:
        """The outermost torch.jit modules, by name, in modules that were called: hooks do not see into them."""
        scripted: list[tuple[str, torch.jit.ScriptModule]] = []
        if len(self.tree.can_be_hooked) == len(self.modules):
            return scripted
        for name, module in self.root.named_modules():
            if not isinstance(module, torch.jit.ScriptModule):
                continue
            if any(name.startswith(f"{outer}.") for outer, _ in scripted):
                continue
            around = name.rpartition(".")[0]
            while around and isinstance(self.root.get_submodule(around), (nn.ModuleList, nn.ModuleDict)):
                around = around.rpartition(".")[0]
            if (around or type(self.root).__name__) in self.entered:
                scripted.append((name, module))
        return scripted

    def sizes(self) -> list[tuple[int, int]]:
        """`Frame.sizes` of the calls in progress, innermost first."""
        return [size for frame in reversed(self.stack) for size in frame.sizes]

    def ids(self, batch: int, length: int, sure: bool = False) -> Tensor | None:
        """Token ids (1|B, length) among the inputs of the calls in progress, innermost first. `sure`: only of calls
        with one tensor of ids."""
        for frame in reversed(self.stack):
            given = frame.token_ids()
            for ids in given if len(given) < 2 or not sure else ():
                if ids.shape[0] in (1, batch) and ids.shape[1] == length:
                    return ids if ids.dtype is torch.int64 else ids.to(torch.int64)
        return None


# Modules are copied and pickled by their state: `__getstate__` on the instance leaves our hooks out of it.

_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_ABOUT_HOOKS = ("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")


@lru_cache(maxsize=4096)
def _is_copied_by_state(kind: type) -> bool:
    by_state = kind.__reduce_ex__ is object.__reduce_ex__ and kind.__reduce__ is object.__reduce__
    return by_state and not hasattr(kind, "__deepcopy__")


def _restore_copying(module: nn.Module) -> None:
    """Remove our `__getstate__` with the last of our hooks."""
    if not any(_is_ours(hook) for name in _HOOKS for hook in module.__dict__[name].values()):
        module.__dict__.pop("__getstate__", None)


def _is_ours(hook: object) -> bool:
    return isinstance(getattr(hook, "__self__", None), ModuleStack)


def _state_without_hooks(module: nn.Module) -> Any:
    get_state = getattr(type(module), "__getstate__", None)
    default = get_state is None or get_state is getattr(object, "__getstate__", None)
    state = module.__dict__ if default else get_state(module)  # type: ignore[misc]
    if not isinstance(state, dict):
        return state
    state = {name: value for name, value in state.items() if name != "__getstate__"}
    ours = {number for name in _HOOKS for number, hook in module.__dict__[name].items() if _is_ours(hook)}
    for name in _HOOKS + _ABOUT_HOOKS:
        if name in state:
            state[name] = OrderedDict((number, x) for number, x in state[name].items() if number not in ours)
    return state
