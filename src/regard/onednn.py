"""oneDNN: what it multiplies on this machine, and copies of weights in its own order.

`regard.projections` multiplies by it. Work that uses the same weights many times, a few rows at a time (generation),
may use `with packed(...)`, which holds copies of them for as long as it lives.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Iterable, Sequence
from types import TracebackType

import torch
from torch import Tensor, nn

from regard.kernels.native_library import is_intel
from regard.kernels.native_products import rows_served
from regard.tracing import traced

__all__ = ["PLAIN", "Copy", "active_copy", "dtypes", "is_plain", "packed", "packs"]

PLAIN = frozenset({Tensor, nn.Parameter})


def is_plain(x: Tensor, dtype: torch.dtype, grad: bool) -> bool:
    """Whether x is a dense tensor on the CPU that needs no gradient now."""
    return (
        type(x) in PLAIN
        and x.dtype is dtype
        and x.is_cpu
        and x.layout is torch.strided
        and not x.is_nested
        and not (grad and x.requires_grad)
    )


@functools.cache
def dtypes() -> frozenset[torch.dtype]:
    """What oneDNN multiplies well on this machine."""
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return frozenset()
    narrow = {torch.bfloat16} if torch.ops.mkldnn._is_mkldnn_bf16_supported() else set()
    return frozenset({torch.float32, *narrow})


@functools.cache
def packs(dtype: torch.dtype) -> bool:
    """Whether one row is multiplied faster by a copy of a weight in oneDNN's order. In bfloat16 wherever oneDNN does
    it, unless our own products are used at any number of rows. In float32 not on Intel's CPUs, where MKL takes 0.8 of
    the time with the weight as it lies, nor where our own products are used."""
    if dtype is torch.float32:
        return dtype in dtypes() and not is_intel() and not rows_served(dtype)
    return dtype in dtypes() and _MANY_ROWS not in rows_served(dtype)


_MANY_ROWS = 1 << 20  # so many are ours where oneDNN has no instructions for the dtype


class Copy:
    """One weight in oneDNN's order, or several one above the other."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self.weights, self.states = weights, [_state(weight) for weight in weights]
        self.rows = [weight.shape[0] for weight in weights]
        joined = weights[0].detach() if len(weights) == 1 else torch.cat([weight.detach() for weight in weights])
        self.packed = torch.ops.mkldnn._reorder_linear_weight(joined, _FEW)

    def is_of(self, weights: Sequence[Tensor | None]) -> bool:
        """Whether these are the weights that were copied, unchanged as far as torch counts."""
        for weight, copied, state in zip(weights, self.weights, self.states, strict=True):
            if weight is None or weight is not copied or weight.is_inference() or _state(weight) != state:
                return False
        return True


_FEW = 16  # rows for which the order is chosen
_LARGEST = 1 << 24  # numbers of a float32 matrix: with a larger one, such as a head, one row is as fast without a copy
Copies = dict[tuple[nn.Module, ...], Copy]


class _Active(threading.local):
    """The copies in use in this thread, the innermost `packed` last."""

    def __init__(self) -> None:
        self.stack: list[Copies] = []


_ACTIVE = _Active()


def active_copy(linears: tuple[nn.Module, ...]) -> Copy | None:
    """The copy of the weights of these modules that this thread uses now, if there is one."""
    return _ACTIVE.stack[-1].get(linears) if _ACTIVE.stack else None


def _state(weight: Tensor) -> tuple[object, ...]:
    """Changes whenever torch counts a change of a weight, or it is given other memory."""
    return weight._version, weight.data_ptr(), weight.dtype


class packed:
    """Within it, `project` through one of these modules uses a copy of its weight in oneDNN's own order, and so does
    `project_each` through a tuple of modules that is given here as a tuple, where `projections.uses_copies`.

    The copies are made at once and live as long as this object; making them costs about as much as a few products with
    one row. It may be entered again and again, in any thread; the copies are used by the thread that entered. After a
    change of a weight its copy is not used any more. A change through `.data`, by a fused optimiser or by another
    process that shares the memory is not noticed: make another `packed` after it. Where the copies would take more than
    an eighth of the machine's memory, there are none.
    """

    def __init__(self, linears: Iterable[nn.Module | tuple[nn.Module, ...]]) -> None:
        groups = [entry if isinstance(entry, tuple) else (entry,) for entry in dict.fromkeys(linears)]
        chosen: dict[tuple[nn.Module, ...], Sequence[Tensor]] = {}
        for group in groups:
            weights = [linear._parameters.get("weight") for linear in group if type(linear) is nn.Linear]
            plain = [weight for weight in weights if weight is not None and _can_copy(weight, weights[0])]
            if plain and len(plain) == len(group):
                chosen[group] = plain
        fits = sum(weight.nbytes for weights in chosen.values() for weight in weights) <= _memory() // 8
        with torch.no_grad():
            self._copies = {group: Copy(weights) for group, weights in chosen.items()} if fits else {}

    def __enter__(self) -> None:
        _ACTIVE.stack.append(self._copies)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _ACTIVE.stack.pop()


def _can_copy(weight: Tensor, first: Tensor | None) -> bool:
    """Whether a weight is a plain matrix that may be packed, together with the first of its group."""
    return (
        first is not None
        and type(weight) in PLAIN
        and packs(weight.dtype)
        and is_plain(weight, first.dtype, grad=False)
        and weight.dim() == 2
        and weight.shape[1:] == first.shape[1:]
        and 0 < weight.numel() <= (_LARGEST if weight.dtype is torch.float32 else weight.numel())
        and weight.is_contiguous()
        and not weight.is_neg()
        and not weight.is_inference()  # such a tensor has no version
        and not traced(weight)
    )


def _memory() -> int:
    """Bytes of the machine."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not every system tells
        return 8 << 30
