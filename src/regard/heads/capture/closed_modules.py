"""Parts of a model whose attention is seen without torch functions: while they run, these are not observed.

A torch function mode costs a microsecond or more for every function and every attribute of a tensor. In regard's own
models and layers nothing but `attend` computes attention, and `kernels/run.py` reports each call to observers; in many
modules of transformers nothing but functions of its interface, which `huggingface.py` intercepts. So the mode of a
capture is off while such a module runs (`model_tree.py` finds them), and an observer is registered in its place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode

from regard.heads.capture.module_stack import Frame
from regard.kernels.run import observers

if TYPE_CHECKING:
    from regard.kernels.run import Observer

__all__ = ["ClosedModules"]


class ClosedModules:
    """The closed modules of a capture (by their ids), and whether one of them is running."""

    def __init__(self, ids: frozenset[int]) -> None:
        self._ids = ids
        # The outermost closed call, the mode that is off, and who observed `attend` before
        self._running: tuple[Frame, TorchFunctionMode, tuple[Observer, ...]] | None = None

    @property
    def is_running(self) -> bool:
        """Whether the capture's mode is off."""
        return self._running is not None

    def began(self, frame: Frame, mode: TorchFunctionMode, observer: Observer) -> None:
        """A module call began: if the module is closed, switch the capture's mode off, unless other modes are on."""
        if self._running is not None or id(frame.module) not in self._ids:
            return
        if torch._C._len_torch_function_stack() != 1 or torch._C._get_function_stack_at(0) is not mode:
            return
        _pop_mode()
        before = observers.stack
        observers.stack = (*before, observer)
        self._running = frame, mode, before

    def ended(self, frame: Frame) -> bool:
        """A module call ended: switch the mode on again, if it was switched off for it. Returns whether it was."""
        if self._running is None or self._running[0] is not frame:
            return False
        self.leave()
        return True

    def leave(self) -> None:
        """Switch the mode on again."""
        if self._running is not None:
            _, mode, before = self._running
            self._running, observers.stack = None, before
            _push_mode(mode)
