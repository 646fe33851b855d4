"""What the classes of transformers can call in their forward, read from its code: whether it computes attention in no
other way than by `AttentionInterface`, which `huggingface.py` intercepts.

The code of a forward, and of the methods and functions that it names, is read without running it. It is known to
compute no attention by itself if it names no softmax and no attention function, and nothing whose code cannot be read.
"""

from __future__ import annotations

import builtins
import dis
import functools
import inspect
import logging
import re
import sys
from dataclasses import dataclass, field
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

__all__ = ["ForwardCode", "forward_code", "is_other_function_of_torch", "is_plain"]

_ATTENTION = re.compile(
    r"softmax|softmin|scaled_dot_product|flash_att|efficient_att|varlen|flex_att|multi_?head|^attend$", re.IGNORECASE
)
_UNREADABLE = frozenset({"eval", "exec", "compile", "globals", "locals", "vars", "ops", "_C", "__import__"})
_MODULES = frozenset({"math", "inspect", "warnings", "logging"})
_NUMBERS = (bool, int, float, str, torch.dtype, torch.device, torch.Size, type(None))
_MISSING = object()


@dataclass
class ForwardCode:
    """What is known of the forward of a class."""

    kind: type
    closed: bool = True  # it computes no attention, but by asking transformers' interface
    asks: bool = False  # it asks the interface for an attention function
    writes: bool = False  # it may write over a tensor: by a method in place (`add_`), `x += y` or `x[i] = y`
    attributes: set[str] = field(default_factory=set)  # names of all attributes in it, also of other objects
    _read: set[CodeType] = field(default_factory=set)
    _globals: list[tuple[dict[str, Any], str, Any]] = field(default_factory=list)  # what names stood for
    _methods: list[tuple[str, Any]] = field(default_factory=list)

    def is_valid(self) -> bool:
        """Whether names stand for what they stood for when the code was read."""
        kind, nothing = self.kind, _MISSING
        return all(names.get(name, nothing) is value for names, name, value in self._globals) and all(
            getattr(kind, name, nothing) is value for name, value in self._methods
        )

    def read_method(self, name: str) -> bool:
        """Read a method of the class, or what else it has by a name."""
        value = inspect.getattr_static(self.kind, name, _MISSING)
        self._methods.append((name, getattr(self.kind, name, _MISSING)))
        if isinstance(value, property):
            value = value.fget
        if isinstance(value, staticmethod):
            value = value.__func__
        if isinstance(value, FunctionType):
            return _is_of(value.__module__, "torch") or self.read(value)
        return is_plain(value) or inspect.isgetsetdescriptor(value) or inspect.ismemberdescriptor(value)

    def read(self, function: FunctionType) -> bool:
        """Read a function and what it calls; returns whether it computes no attention by itself."""
        if function.__code__ in self._read:
            return True
        self._read.add(function.__code__)
        home = function.__globals__.get("__name__")
        if not _is_of(home, "transformers") and not _is_of(home, "torch"):
            return False
        try:
            enclosed = [cell.cell_contents for cell in function.__closure__ or ()]
        except ValueError:  # not set yet
            return False
        if not all(self._may_name(value) for value in enclosed):
            return False
        return _is_of(home, "torch") or self._read_code(function.__code__, function.__globals__)

    def _read_code(self, code: CodeType, names: dict[str, Any]) -> bool:
        steps = [step for step in dis.get_instructions(code) if step.opname not in _NO_STEPS]
        asking = reading = False  # between `get_interface` or `getattr` and its call
        for at, step in enumerate(steps):
            name = step.argval
            self.writes |= _writes(step)
            if step.opname.startswith("IMPORT") or (reading and step.opname.startswith("CALL")):
                return False
            if step.opname.startswith("CALL"):
                asking = False
            elif "ATTR" in step.opname or "METHOD" in step.opname:
                asking = asking or name == "get_interface"
                if not self._may_have(name):
                    return False
            elif step.opname == "LOAD_CONST" and reading and (_called(steps, at + 1, 2) or _called(steps, at + 2, 3)):
                reading = False
                if not isinstance(name, str) or not self._may_have(name):
                    return False
            elif step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                if name == "getattr":
                    reading = True
                elif asking and _called(steps, at + 1, 2):  # what is called, by our wrapper, if the interface has none
                    self.asks = True
                elif not self._may_load(name, names):
                    return False
        inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
        return all(self._read_code(part, names) for part in inner)

    def _may_have(self, name: str) -> bool:
        """Whether an attribute of this name, of any object, is known to compute no attention."""
        if name in self.attributes:
            return True
        self.attributes.add(name)
        if name in _UNREADABLE or _ATTENTION.search(name):
            return False
        known = hasattr(self.kind, name) and not name.startswith("__")
        return not known or self.read_method(name)

    def _may_load(self, name: str, names: dict[str, Any]) -> bool:
        if name in _UNREADABLE or _ATTENTION.search(name):
            return False
        value = names.get(name, getattr(builtins, name, _MISSING))
        if not any(known is names and other == name for known, other, _ in self._globals):
            self._globals.append((names, name, names.get(name, _MISSING)))
        return self._may_name(value)

    def _may_name(self, value: Any) -> bool:
        """Whether a value that the code has by a name can be used without computing attention."""
        if isinstance(value, FunctionType) and not _is_of(value.__module__, "torch"):
            return self.read(value)
        if isinstance(value, ModuleType):
            return _is_of(value.__name__, "torch") or value.__name__ in _MODULES
        if isinstance(value, type):
            return value in self.kind.__mro__ or _is_harmless_class(value)
        if is_other_function_of_torch(value):
            return True
        return is_plain(value) or isinstance(value, logging.Logger) or type(value) is _interface()


def forward_code(kind: type) -> ForwardCode | None:
    """What is known of the forward of a class of transformers; None of other classes."""
    if not _is_of(kind.__module__, "transformers") or _interface() is None:
        return None
    known = _forward_code(kind)
    return known if known.is_valid() else _read_class(kind)


@functools.lru_cache(maxsize=4096)
def _forward_code(kind: type) -> ForwardCode:
    return _read_class(kind)


def _read_class(kind: type) -> ForwardCode:
    code = ForwardCode(kind)
    own_call = [] if kind.__call__ is nn.Module.__call__ else ["__call__"]
    code.closed = all(code.read_method(name) for name in ("forward", *own_call))
    return code


def is_other_function_of_torch(value: Any) -> bool:
    """Whether a value is a function of torch or Python, and none that computes attention: `F.gelu`, for example."""
    built_in = isinstance(value, BuiltinFunctionType)
    if not built_in and not (isinstance(value, FunctionType) and _is_of(value.__module__, "torch.nn.functional")):
        return False
    return value.__name__ not in _UNREADABLE and not _ATTENTION.search(value.__name__)


def is_plain(value: Any) -> bool:
    """Whether a value is made of numbers, words and the like, and cannot be called; or a configuration."""
    if isinstance(value, _NUMBERS):
        return True
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(is_plain(item) for item in value)
    if isinstance(value, dict):
        return all(is_plain(item) for item in value.values())
    return _is_of(type(value).__module__, "transformers") and hasattr(value, "_attn_implementation")


def _is_harmless_class(kind: type) -> bool:
    """Whether objects of a class compute no attention: outputs and caches of models, errors, torch's own but layers."""
    if issubclass(kind, (nn.Module, torch.autograd.Function)):
        return False
    known = kind.__module__ in ("builtins", "functools", "transformers.cache_utils") or _is_of(kind.__module__, "torch")
    return known or issubclass(kind, (dict, tuple, BaseException))


def _writes(step: dis.Instruction) -> bool:
    """Whether a step may be one in place."""
    if "ATTR" in step.opname or "METHOD" in step.opname:
        return str(step.argval).endswith("_") and not str(step.argval).endswith("__")
    in_place = step.opname.startswith("INPLACE") or step.opname in ("STORE_SUBSCR", "STORE_SLICE")
    return in_place or (step.opname == "BINARY_OP" and step.argrepr.endswith("="))


def _called(steps: list[dis.Instruction], at: int, arguments: int) -> bool:
    """Whether a step is a call with so many arguments."""
    return at < len(steps) and steps[at].opname.startswith("CALL") and steps[at].arg == arguments


def _is_of(module: object, package: str) -> bool:
    return isinstance(module, str) and (module == package or module.startswith(f"{package}."))


def _interface() -> Any:
    interface = getattr(sys.modules.get("transformers.modeling_utils"), "AttentionInterface", None)
    return interface if hasattr(interface, "get_interface") else None


_NO_STEPS = frozenset({"PRECALL", "CACHE", "EXTENDED_ARG", "NOT_TAKEN", "RESUME", "NOP", "PUSH_NULL"})
