"""Who else looks on while torch computes."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["in_torch_func", "traced"]


def in_torch_func() -> bool:
    """Whether a transformation of torch.func (vmap, grad, ...) is at work."""
    return torch._C._functorch.peek_interpreter_stack() is not None  # pyright: ignore[reportAttributeAccessIssue]


def traced(*tensors: Tensor) -> bool:
    """Whether something other than plain eager torch looks on: a compiler, torch.func, a mode, fake tensors."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() or in_torch_func():
        return True
    return any(x.is_meta or type(x) not in (Tensor, torch.nn.Parameter) for x in tensors)
