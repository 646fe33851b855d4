"""`RMSNorm`: `nn.RMSNorm`, to rounding, in one pass where nobody can tell the difference.

torch computes it on CPU as six operations, one after another. Without gradient, compiler or mode the native library
does it at once (`kernels/native/norms.h`).

Letters: W model width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C import _is_any_autocast_enabled as any_autocast  # pyright: ignore[reportAttributeAccessIssue]
from torch._C import _is_tracing as is_tracing
from torch._C import _len_torch_dispatch_stack as dispatch_modes
from torch._C import _len_torch_function_stack as function_modes
from torch._C._functorch import peek_interpreter_stack as transformation  # pyright: ignore[reportMissingModuleSource]
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from regard.kernels import native_library
from regard.kernels.native_library import DTYPES, NORM
from regard.tracing import has_foreign_function_mode

__all__ = ["RMSNorm", "ZeroCentredRMSNorm"]

_PLAIN = frozenset({Tensor, nn.Parameter})


class RMSNorm(nn.RMSNorm):
    """x (..., W) divided by its root mean square, times the weight; computed in float32 or wider.

    >>> norm, x = RMSNorm(4), torch.tensor([1.0, -1.0, 1.0, -1.0])
    >>> torch.allclose(norm(3 * x), x)
    True
    """

    def forward(self, x: Tensor) -> Tensor:
        """(..., W) -> (..., W)"""
        if _is_native(x, self.weight, self.normalized_shape):
            return _by_native_library(x, self.weight, self.eps)
        return super().forward(x)


class ZeroCentredRMSNorm(nn.RMSNorm):
    """RMSNorm that multiplies by 1 + weight, as Gemma and Qwen3-Next store it: weight decay pulls it towards 1."""

    def reset_parameters(self) -> None:
        """Back to a factor of 1."""
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """(..., W) -> (..., W)"""
        if _is_native(x, self.weight, self.normalized_shape):
            return _by_native_library(x, self.weight, self.eps, more=1.0)
        return F.rms_norm(x, self.normalized_shape, 1 + self.weight, self.eps)


def _is_native(x: Tensor, weight: Tensor | None, shape: tuple[int, ...]) -> bool:
    """Whether the native library may compute it. Runs before every norm: written out, for calling a function costs as
    much as a check."""
    if (
        is_compiling()
        or type(x) not in _PLAIN
        or dispatch_modes()
        or transformation() is not None
        or is_tracing()
        or any_autocast()
        or forward_ad._current_level >= 0
        or (function_modes() and has_foreign_function_mode())
        or x.dtype not in DTYPES
        or not x.is_cpu
        or x.layout is not torch.strided
        or x.is_nested
        or x.is_neg()
        or native_library.load() is None
    ):
        return False
    learns = torch.is_grad_enabled()
    if weight is not None:
        if type(weight) not in _PLAIN or weight.dtype is not x.dtype or not weight.is_cpu or weight.is_neg():
            return False
        if not weight.is_contiguous() or (learns and weight.requires_grad):
            return False
    return not (learns and x.requires_grad) and len(shape) == 1 and x.shape[-1:] == shape and x.numel() > 0


def _by_native_library(x: Tensor, weight: Tensor | None, eps: float | None, more: float = 0.0) -> Tensor:
    """x (..., W) divided by its root mean square, times weight + more."""
    width = x.shape[-1]
    x = x if x.is_contiguous() or (x.dim() == 2 and x.stride(1) == 1) else x.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    library = native_library.load()
    assert library is not None
    library.rms_norm(
        NORM.pack(
            NORM.size,
            native_library.isa(),
            torch.get_num_threads(),
            DTYPES[x.dtype],
            torch.finfo(x.dtype).eps if eps is None else eps,
            more,
            x.numel() // width,
            width,
            x.data_ptr(),
            0 if weight is None else weight.data_ptr(),
            out.data_ptr(),
            x.stride(0) if x.dim() == 2 else width,
        )
    )
    return out
