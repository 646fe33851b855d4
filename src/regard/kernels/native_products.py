"""Projections by the native library: x times one or more weights that share it, and what follows.

`native/products.h` computes them, on weights as they lie in memory. It knows nothing of gradients, hooks or modes:
`regard.projections` decides where it may be used.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from regard.kernels import native_library
from regard.kernels.native_library import FACTOR, PRODUCT

__all__ = ["AFTER", "multiply", "rows_served"]

# As `regard_after`.
AFTER = {
    name: i for i, name in enumerate(("gelu", "gelu_tanh", "quick_gelu", "relu", "silu", "tanh", "add", "times"), 1)
}


@functools.cache
def rows_served(dtype: torch.dtype) -> range:
    """The numbers of rows of x for which products of a dtype are ours; empty where torch's libraries are faster.

    All, where these have no instructions of this CPU made for the dtype. Where they have (float32 with AVX-512, and
    bfloat16 with its products), a few: they pack the weight for every product, which pays from some hundred rows on.
    """
    nothing, everything = range(0), range(1, sys.maxsize)
    library = native_library.load()
    if library is None or "portable" in (isa := _isa(library), library.best) or dtype not in native_library.DTYPES:
        return nothing
    if dtype is torch.float32:
        if torch.backends.cpu.get_cpu_capability() != "AVX512":
            return everything
        return _few_rows(dtype) if isa.startswith("avx512") else nothing
    if dtype is torch.bfloat16:
        if native_library.has_amx():
            return nothing
        if "avx512_bf16" in library.usable:
            return _few_rows(dtype) if isa == "avx512_bf16" else nothing
        return everything
    ask = getattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", None)
    return nothing if ask is None or ask() else everything


def _few_rows(dtype: torch.dtype) -> range:
    """For as many rows as ours take at most oneDNN's time (docs/decisions.md)."""
    most = {torch.float32: 1024, torch.bfloat16: 256} if native_library.is_zen5() else _MOST_ROWS
    return range(1, most[dtype] + 1)


_MOST_ROWS = {torch.float32: 256, torch.bfloat16: 128}


def _isa(library: native_library.Library) -> str:
    """The instruction set in use, which for products is never that of tiles."""
    name = native_library.INSTRUCTION_SETS[native_library.isa()]
    return {"auto": library.best, "amx": "avx512_bf16"}.get(name, name)


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
    assert library is not None, "asked only for `rows_served`"
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
