"""Detect torch.compile, torch.func, dispatch modes, fake tensors and forward gradients."""

from __future__ import annotations

import threading

import torch
from torch import Tensor
from torch.autograd import forward_ad

__all__ = ["capture_modes", "has_foreign_function_mode", "in_torch_func", "is_eager", "traced"]


_PLAIN = (Tensor, torch.nn.Parameter)


class _CaptureModes(threading.local):
    """How many torch function modes of this thread are captures of regard, which need not see plain projections."""

    count = 0


capture_modes = _CaptureModes()


def has_foreign_function_mode() -> bool:
    """Whether a torch function mode other than a capture of regard is on in this thread."""
    return torch._C._len_torch_function_stack() > capture_modes.count


def in_torch_func() -> bool:
    """Whether a transformation of torch.func (vmap, grad, ...) is at work."""
    return torch._C._functorch.peek_interpreter_stack() is not None  # pyright: ignore[reportAttributeAccessIssue]


def traced(*tensors: Tensor) -> bool:
    """Whether a compiler, torch.func or a dispatch mode is at work, or a tensor is fake or of a subclass."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() or in_torch_func():
        return True
    for x in tensors:  # noqa: SIM110 (it runs at every attention, and `any` takes twice as long)
        if type(x) not in _PLAIN or x.is_meta:
            return True
    return False


def is_eager() -> bool:
    """Whether operations run as they are called, under no compiler, tracer, torch.func or forward gradient.

    Only then may a result be kept for later calls, and only then is backward all that a gradient needs.
    """
    return not (
        torch.compiler.is_compiling()
        or torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage]
        or in_torch_func()
        or forward_ad._current_level >= 0
    )
