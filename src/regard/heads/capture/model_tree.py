"""The modules of a model as a capture needs them: their names, which of them need hooks, and which are closed.

A module is closed if attention inside it is computed in no other way than by `regard.attend`, or by transformers'
`AttentionInterface`: then torch functions need not be followed while it runs (`closed_modules.py`). Closed are modules
of regard, and those of transformers whose code says so (`forward_code.py`), if all below them are.

What was found of a model is kept, and used again as long as the model has the same modules, with the same classes,
hooks and attributes. No module is kept alive by it.
"""

from __future__ import annotations

import functools
import inspect
import re
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from torch import nn

from regard.heads.capture.forward_code import forward_code, is_other_function_of_torch, is_plain

__all__ = ["ModelTree", "has_foreign_hooks", "is_named_for_attention", "tree_of"]

_ATTENTION_CLASS = re.compile(r"(Attention|Attn)(V?\d+[dD]?|Layer|Block|Module|Pool|Pooling)?$")
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


@dataclass(frozen=True, slots=True)
class ModelTree:
    """The modules of a model, outermost first, each once."""

    modules: list[nn.Module]
    names: dict[int, str]  # by the id of their dict of hooks, which replicas made by `nn.DataParallel` share with them
    can_be_hooked: list[nn.Module]  # all but those of torch.jit
    with_hooks: list[nn.Module]  # those that attention may be computed in, or below, but for parts of blocks
    closed: frozenset[int]  # ids of the closed ones among them
    steady: frozenset[int]  # ids of those that compute attention, and write over no tensor


@dataclass(frozen=True, slots=True)
class _Known:
    """What a module was like, to see whether it still is."""

    module: weakref.ref[nn.Module]
    kind: type
    children: tuple[str, ...]
    ids: tuple[int, ...]  # of the children
    hooks: int  # the id of its dict of hooks
    replaced: bool  # whether it has a forward of its own
    foreign: bool  # whether it has hooks that are not known
    attributes: tuple[str, ...]  # those that its code names, if it is closed
    values: tuple[Any, ...]
    is_bare: bool  # whether it has neither children nor hooks, nor anything else that could change but these

    def still(self) -> nn.Module | None:
        """The module, if it is what it was."""
        module = self.module()
        if module is None or type(module) is not self.kind:
            return None
        own = module.__dict__
        children, hooks = own["_modules"], own["_forward_hooks"]
        if id(hooks) != self.hooks or ("forward" in own) is not self.replaced:
            return None
        if tuple(children) != self.children or tuple(map(id, children.values())) != self.ids:
            return None
        if self.attributes and not all(map(is_, map(own.get, self.attributes), self.values)):
            return None
        foreign = bool(hooks or own["_forward_pre_hooks"]) and has_foreign_hooks(own)
        return module if foreign is self.foreign else None


@dataclass(frozen=True, slots=True)
class _Entry:
    root: weakref.ref[nn.Module]
    modules: list[_Known]
    names: dict[int, str]
    can_be_hooked: list[int]
    with_hooks: list[int]
    closed: frozenset[int]
    steady: frozenset[int]
    codes: list[Any]  # of `forward_code`

    def tree(self) -> ModelTree | None:
        """The tree, if nothing has changed."""
        modules: list[nn.Module] = []
        for known in self.modules:
            module: Any = known.module()
            if known.is_bare and module is not None:  # as most are: written out, for there are hundreds of them
                own = module.__dict__
                hooks = own["_forward_hooks"]
                if own["_modules"] or hooks or own["_forward_pre_hooks"] or "forward" in own:
                    return None
                if type(module) is not known.kind or id(hooks) != known.hooks:
                    return None
            elif module is None or known.still() is None:
                return None
            modules.append(module)
        if not all(code.is_valid() for code in self.codes) or _global_hooks():
            return None
        hooked, few = [modules[i] for i in self.can_be_hooked], [modules[i] for i in self.with_hooks]
        return ModelTree(modules, self.names, hooked, few, self.closed, self.steady)


_LOCK = threading.RLock()  # guards the dict (a weak reference may end while it is held)
_KNOWN: dict[int, _Entry] = {}  # by the id of the root


def tree_of(root: nn.Module) -> ModelTree:
    """The modules of a model."""
    with _LOCK:
        entry = _KNOWN.get(id(root))
    tree = None if entry is None or entry.root() is not root else entry.tree()
    if tree is not None:
        return tree
    named = list(_named_modules(root))
    modules = [module for _, module in named]
    names = {id(module._forward_hooks): name or type(module).__name__ for name, module in named}
    found = _Finder()
    found.find(root)
    found.find_between(root)
    can_be_hooked = [i for i, module in enumerate(modules) if not isinstance(module, torch.jit.ScriptModule)]
    needed = [i for i in can_be_hooked if i == 0 or found.needs_hooks(modules[i])]
    closed, steady = frozenset(found.closed & found.attend), frozenset(found.steady)
    if len(can_be_hooked) == len(modules) and not _global_hooks():  # (torch.jit's have no plain dict of children)
        known = [_known(module, found) for module in modules]
        reference = weakref.ref(root, functools.partial(_forget, id(root)))
        codes = list(found.codes.values())
        with _LOCK:
            _KNOWN[id(root)] = _Entry(reference, known, names, can_be_hooked, needed, closed, steady, codes)
    return ModelTree(modules, names, [modules[i] for i in can_be_hooked], [modules[i] for i in needed], closed, steady)


def _forget(key: int, dead: weakref.ref[nn.Module]) -> None:
    with _LOCK:
        if key in _KNOWN and _KNOWN[key].root is dead:
            del _KNOWN[key]


def _known(module: nn.Module, found: _Finder) -> _Known:
    own = module.__dict__
    code = found.codes.get(type(module)) if id(module) in found.closed else None
    attributes = () if code is None else tuple(sorted(code.attributes))
    hooks = module._forward_hooks or module._forward_pre_hooks
    return _Known(
        weakref.ref(module),
        type(module),
        tuple(module._modules),
        tuple(map(id, module._modules.values())),
        id(module._forward_hooks),
        "forward" in own,
        has_foreign_hooks(own),
        attributes,
        tuple([own.get(name) for name in attributes]),
        not (module._modules or hooks or attributes or "forward" in own),
    )


class _Finder:
    """Finds which modules are closed, and which of these compute attention or have any below that does."""

    def __init__(self) -> None:
        self.closed: set[int] = set()
        self.attend: set[int] = set()
        self.asking: set[int] = set()  # closed modules that compute attention themselves
        self.steady: set[int] = set()  # of these, those that write over no tensor
        self.between: set[int] = set()  # closed modules that need no hooks: around those that compute, in closed ones
        self.heads_are_passed = False  # whether a module may be handed queries, keys and values by the one around it
        self.codes: dict[type, Any] = {}
        self.searched: dict[int, bool] = {}
        self.walked: set[int] = set()  # by `find_between`
        self.anything_closed = not _global_hooks()

    def find(self, module: nn.Module) -> bool:
        """Note a module and those below it, if they are closed; returns whether it is."""
        known = self.searched.get(id(module))
        if known is not None:
            return known
        self.searched[id(module)] = False  # (a module may be below itself)
        children = [child for child in module._modules.values() if child is not None]
        closed = [self.find(child) for child in children]
        is_closed = self.anything_closed and all(closed) and self._is_closed(module)
        if is_closed:
            self.closed.add(id(module))
            around = any(id(child) in self.attend for child in children)
            if self._asks(module, around):
                self.asking.add(id(module))
                if type(module) not in self.codes or not self.codes[type(module)].writes:
                    self.steady.add(id(module))
                self.heads_are_passed |= type(module) in self.codes and not _takes_hidden_states(type(module))
            if around or id(module) in self.asking:
                self.attend.add(id(module))
        self.searched[id(module)] = is_closed
        return is_closed

    def find_between(self, module: nn.Module, inside: bool = False, in_block: bool = False) -> None:
        """Note which parts of the blocks of closed modules (those in a list of modules) need no hooks: they are given
        no token ids, and tell nothing that the module inside them which computes attention does not tell. To be called
        after `find`."""
        if id(module) in self.walked or self.heads_are_passed:
            return
        self.walked.add(id(module))
        if inside and in_block and id(module) in self.attend - self.asking:
            self.between.add(id(module))
        is_list = type(module) is nn.ModuleList
        inside = inside or (id(module) in self.closed and not is_list)
        for child in module._modules.values():
            if child is not None:
                self.find_between(child, inside, in_block or is_list)

    def needs_hooks(self, module: nn.Module) -> bool:
        """Whether attention may be computed in a module or below it, and its hooks tell something."""
        if _is_leaf_of_torch(module) or id(module) in self.between or type(module) is nn.ModuleList:
            return False  # (a list is never called)
        return id(module) not in self.closed or id(module) in self.attend

    def _is_closed(self, module: nn.Module) -> bool:
        kind = type(module)
        if "forward" in module.__dict__:
            return False
        if _is_class_of_regard(kind) or kind in _CONTAINERS:
            return True
        if has_foreign_hooks(module.__dict__):
            return False
        if _is_leaf_of_torch(module):
            return not _computes_softmax(kind)
        if kind not in self.codes:
            code = forward_code(kind)
            if code is None:
                return False
            self.codes[kind] = code
        code = self.codes[kind]
        return code.closed and all(
            _may_hold(module.__dict__[name]) for name in code.attributes & module.__dict__.keys()
        )

    def _asks(self, module: nn.Module, around: bool) -> bool:
        """Whether a closed module computes attention itself, by its code or by its name; by its code alone if it is
        `around` others that do."""
        kind = type(module)
        if kind in self.codes and (self.codes[kind].asks or around):
            return self.codes[kind].asks
        return is_named_for_attention(kind)


def _may_hold(value: Any) -> bool:
    """Whether an attribute of a module of transformers computes no attention."""
    return is_plain(value) or isinstance(value, torch.Tensor) or is_other_function_of_torch(value)


def has_foreign_hooks(own: dict[str, Any]) -> bool:
    """Whether a module has hooks that are neither a capture's nor those by which transformers collects outputs."""
    if not own["_forward_hooks"] and not own["_forward_pre_hooks"]:
        return False
    hooks = (*own["_forward_hooks"].values(), *own["_forward_pre_hooks"].values())
    known = ("transformers.", "regard.heads.capture.")
    return not all(str(getattr(hook, "__module__", "")).startswith(known) for hook in hooks)


def _global_hooks() -> bool:
    """Whether anyone has hooks on the modules of all models."""
    module = torch.nn.modules.module
    return bool(module._global_forward_hooks or module._global_forward_pre_hooks)


@functools.lru_cache(maxsize=4096)
def is_named_for_attention(kind: type) -> bool:
    """Whether a class is named for attention."""
    return _ATTENTION_CLASS.search(kind.__name__) is not None


def _is_leaf_of_torch(module: nn.Module) -> bool:
    """Whether a module is a layer of torch without children (`nn.Linear`, `nn.LayerNorm`, ...), which computes no
    attention. Hooks would cost more than many of these layers, and keep `regard.projections` from fusing them."""
    return not module._modules and _is_class_of_torch(type(module))


@functools.lru_cache(maxsize=4096)
def _takes_hidden_states(kind: type) -> bool:
    """Whether the input of a module of transformers is known to be hidden states, not the heads' queries and keys."""
    return "hidden_states" in inspect.signature(kind.forward).parameters


@functools.lru_cache(maxsize=4096)
def _is_class_of_torch(kind: type) -> bool:
    return kind.__module__.startswith("torch.nn.modules.")


@functools.lru_cache(maxsize=4096)
def _is_class_of_regard(kind: type) -> bool:
    """(but for sharded ones, which call other functions)"""
    name = kind.__module__
    return name.startswith("regard.") and not name.startswith("regard.parallel.")


@functools.lru_cache(maxsize=4096)
def _computes_softmax(kind: type) -> bool:
    return "oftm" in kind.__name__  # Softmax, LogSoftmax, Softmin, AdaptiveLogSoftmaxWithLoss


def _named_modules(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """`root.named_modules()`: each module once, by the first of its names."""
    seen: set[int] = set()
    waiting: list[tuple[str, nn.Module]] = [("", root)]
    while waiting:
        name, module = waiting.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        yield name, module
        prefix = f"{name}." if name else ""
        waiting += [(prefix + child, x) for child, x in reversed([*module._modules.items()]) if x is not None]
