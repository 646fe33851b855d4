"""Detect torch.compile, torch.func, dispatch modes, fake tensors and forward gradients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.autograd import forward_ad

__all__ = ["has_foreign_function_mode", "in_torch_func", "is_eager", "recording", "traced"]


_PLAIN = (Tensor, torch.nn.Parameter)


def has_foreign_function_mode() -> bool:
    """Whether a torch function mode is on in this thread that must see plain projections: any but those whose
    `sees_projections` is False, as captures of regard have it."""
    count: int = torch._C._len_torch_function_stack()  # pyright: ignore[reportAttributeAccessIssue]
    return count > 0 and any(
        getattr(torch._C._get_function_stack_at(i), "sees_projections", True)  # pyright: ignore[reportAttributeAccessIssue]
        for i in range(count)
    )


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


@contextmanager
def recording() -> Iterator[None]:
    """Autograd records within the block, also inside of an operator of ours, where torch's dispatcher leaves it out."""
    include, exclude = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    for name in ("AutogradOther", "AutogradNestedTensor", "ADInplaceOrView"):  # (the first stands for all of them)
        exclude = exclude.remove(getattr(torch._C.DispatchKey, name))
    with torch._C._ForceDispatchKeyGuard(include, exclude), torch.inference_mode(False), torch.enable_grad():
        yield
