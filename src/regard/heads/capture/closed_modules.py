"""Parts of a model that compute attention by `regard.attend` alone: while they run, torch functions are not observed.

A torch function mode costs a microsecond or more for every function and every attribute of a tensor. In regard's own
models and layers nothing but `attend` computes attention, and `kernels/run.py` reports each call to observers. So the
mode of a capture is off while such a module runs, and an observer is registered in its place.
"""

from __future__ import annotations

import functools
from contextlib import ExitStack
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode

from regard.heads.capture.module_stack import Frame, is_leaf_of_torch
from regard.kernels import observed_by

if TYPE_CHECKING:
    from regard.kernels.run import Observer

__all__ = ["ClosedModules"]

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


class ClosedModules:
    """The closed modules of a capture, and whether one of them is running."""

    def __init__(self, root: nn.Module) -> None:
        self._ids: set[int] = set()
        self._find(root)
        self._running: tuple[Frame, ExitStack] | None = None

    def _find(self, module: nn.Module) -> bool:
        """Note a module and those below it, if they are closed; returns whether it is."""
        closed = [self._find(child) for child in module._modules.values() if child is not None]
        if not all(closed) or not _is_of_regard(module):
            return False
        if not is_leaf_of_torch(module) and type(module) not in _CONTAINERS:
            self._ids.add(id(module))
        return True

    def began(self, frame: Frame, mode: TorchFunctionMode, observer: Observer) -> None:
        """A module call began: if the module is closed, switch the capture's mode off, unless other modes are on."""
        if self._running is not None or id(frame.module) not in self._ids:
            return
        if torch._C._len_torch_function_stack() != 1 or torch._C._get_function_stack_at(0) is not mode:
            return
        stack = ExitStack()
        _pop_mode()
        stack.callback(_push_mode, mode)
        stack.enter_context(observed_by(observer))
        self._running = frame, stack

    def ended(self, frame: Frame) -> None:
        """A module call ended: switch the mode on again, if it was switched off for it."""
        if self._running is not None and self._running[0] is frame:
            self.leave()

    def leave(self) -> None:
        """Switch the mode on again."""
        if self._running is not None:
            stack, self._running = self._running[1], None
            stack.close()


def _is_of_regard(module: nn.Module) -> bool:
    """Whether a module's class is regard's (but for sharded ones, which call other functions) or a layer of torch
    without children, and nobody has replaced its forward."""
    known = _is_class_of_regard(type(module)) or is_leaf_of_torch(module) or type(module) in _CONTAINERS
    return known and "forward" not in module.__dict__


@functools.lru_cache(maxsize=4096)
def _is_class_of_regard(kind: type) -> bool:
    name = kind.__module__
    return name.startswith("regard.") and not name.startswith("regard.parallel.")
