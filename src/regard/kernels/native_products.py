"""Projections by the native library: x times one or more weights that share it, and what follows.

`native/products.h` computes them, on weights as they lie in memory. It knows nothing of gradients, hooks or modes:
`regard.projections` decides where it may be used.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from regard.kernels import native_library
from regard.kernels.native_library import FACTOR, PRODUCT

__all__ = ["AFTER", "multiply", "serves"]

# As `regard_after`.
AFTER = {
    name: i for i, name in enumerate(("gelu", "gelu_tanh", "quick_gelu", "relu", "silu", "tanh", "add", "times"), 1)
}


@functools.cache
def serves(dtype: torch.dtype) -> bool:
    """Whether products of a dtype are ours: where torch's libraries do not use instructions of this CPU made for it.
    With AVX-512 they do so for float32 and bfloat16."""
    library = native_library.load()
    if library is None or "portable" in (library.best, native_library.INSTRUCTION_SETS[native_library.isa()]):
        return False
    if dtype is torch.float32:
        return torch.backends.cpu.get_cpu_capability() != "AVX512"
    supported = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
    ask = getattr(torch.ops.mkldnn, supported[dtype], None) if dtype in supported else None
    return ask is not None and not ask()


def multiply(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    after: str | None = None,
    other: Tensor | None = None,
) -> list[Tensor]:
    """after(x weight^T + bias) for each weight, each (..., out).

    Args:
        x: (..., in), on the CPU.
        weights, biases: (out, in) and (out), of the dtype of x; rows of a weight may be apart.
        after: one of `AFTER`.
        other: (..., out) of the only weight, what is added or multiplied.
    """
    x, x_stride = _rows(x)
    other_pointer = other_stride = 0
    if other is not None:
        other, other_stride = _rows(other)
        other_pointer = other.data_ptr()
    before, width = x.shape[:-1], x.shape[-1]
    outs: list[Tensor] = []
    factors = b""
    for weight, bias in zip(weights, biases, strict=True):
        count = weight.shape[0]
        out = x.new_empty((*before, count))
        outs.append(out)
        factors += FACTOR.pack(
            weight.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            out.data_ptr(),
            other_pointer,
            count,
            weight.stride(0),
            count,
            other_stride,
        )
    library = native_library.load()
    assert library is not None, "asked only where `serves`"
    library.multiply(
        PRODUCT.pack(
            PRODUCT.size,
            native_library.isa(),
            torch.get_num_threads(),
            native_library.DTYPES[x.dtype],
            0 if after is None else AFTER[after],
            x.numel() // width,
            width,
            len(outs),
            x.data_ptr(),
            x_stride,
        ),
        factors,
    )
    return outs


def _rows(x: Tensor) -> tuple[Tensor, int]:
    """x such that its last axis is contiguous and its rows are equally far apart, and how far."""
    if x.is_contiguous():
        return x, x.shape[-1]
    if x.dim() == 2 and x.stride(1) == 1:
        return x, x.stride(0)
    return x.contiguous(), x.shape[-1]
