"""A projection, as fast as the machine has it: `project(linear, x)` is `linear(x)`, to rounding.

On CPU, torch gives float32 products to MKL, one operation at a time. Where nobody can tell the difference (no gradient,
no hook, no compiler, no mode, a plain `nn.Linear`), oneDNN does the same product here, together with what follows it::

    project(linear, x)                      linear(x)
    project(linear, x, activation="gelu")   gelu(linear(x))
    project(linear, x, add=y)               linear(x) + y
    project(linear, x, times=y)             linear(x) * y

Everywhere else it is just these formulas in torch. The weights stay where they are: nothing is copied, so nothing can
be out of date. Work that uses the same weights many times, a few rows at a time (generation), may say
`with packed(...)` around it: oneDNN then has a copy of them in its own order, for as long as they do not change.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules import module as torch_module

from regard.errors import bad_value
from regard.kernels.tracing import traced

__all__ = ["ACTIVATIONS", "packed", "project"]


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick_gelu": _quick_gelu,
    "relu": F.relu,
    "silu": F.silu,
    "tanh": torch.tanh,
}

# What oneDNN calls those that it does together with a product: attribute and algorithm.
_ONEDNN = {"gelu": ("gelu", "none"), "gelu_tanh": ("gelu", "tanh"), "relu": ("relu", ""), "silu": ("swish", ""),
           "tanh": ("tanh", "")}  # fmt: skip
# Below this many multiply-adds the two are as fast as each other, or MKL is the faster.
_WORTHWHILE = 1 << 18


def project(
    linear: nn.Module,
    x: Tensor,
    *,
    activation: str | None = None,
    add: Tensor | None = None,
    times: Tensor | None = None,
) -> Tensor:
    """`linear(x)`, then one of: an activation by name, a sum with `add`, a product with `times`.

    Args:
        linear: an `nn.Linear`, or any module that stands for one (a quantised one, one with adapters).
        x: (..., in).
        activation: one of `ACTIVATIONS`.
        add, times: (..., out).

    >>> linear, x = nn.Linear(3, 5), torch.randn(2, 3)
    >>> torch.allclose(project(linear, x, activation="relu"), linear(x).relu(), atol=1e-6)
    True
    """
    assert (activation is not None) + (add is not None) + (times is not None) <= 1, "one thing may follow"
    weight = _weight_for_onednn(linear, x, add if times is None else times)
    if weight is None or (activation is not None and activation not in _ONEDNN):
        out = linear(x)
        if activation is not None:
            return _named(activation)(out)
        return out + add if add is not None else out * times if times is not None else out
    rows = x.reshape(-1, x.shape[-1])
    product, bias = torch.ops.mkldnn._linear_pointwise, linear.bias
    other = add if times is None else times
    if other is not None:
        other = other.reshape(-1, weight.shape[0])
        out = product.binary(rows, other, weight, bias, "mul" if add is None else "add")
    else:
        attribute, algorithm = ("none", "") if activation is None else _ONEDNN[activation]
        out = product(rows, weight, bias, attribute, [], algorithm)
    return out.view(*x.shape[:-1], out.shape[-1])


def _named(activation: str) -> Callable[[Tensor], Tensor]:
    try:
        return ACTIVATIONS[activation]
    except KeyError:
        raise bad_value("activation", expected=f"one of {', '.join(ACTIVATIONS)}", received=repr(activation)) from None


def _weight_for_onednn(linear: nn.Module, x: Tensor, other: Tensor | None) -> Tensor | None:
    """The weight to multiply by where oneDNN may do it and nobody can tell, else None. (Asked before every product, so
    the order is by price.)"""
    if type(linear) is not nn.Linear or not x.is_cpu or _watched(linear):
        return None
    weight, bias = linear._parameters["weight"], linear._parameters["bias"]
    if weight is None or weight.dtype not in _dtypes() or x.shape[-1] != weight.shape[1]:
        return None
    operands = [t for t in (x, weight, bias, other) if t is not None]
    if torch.is_grad_enabled() and any(t.requires_grad for t in operands):
        return None
    if any(t.dtype != weight.dtype for t in operands) or traced(*operands):
        return None
    if other is not None and other.shape != (*x.shape[:-1], weight.shape[0]):
        return None
    copy = _COPIES.get(linear) if _COPIES else None
    if copy is not None and copy.users and copy.is_of(weight):
        return copy.packed
    return weight if x.numel() * weight.shape[0] >= _WORTHWHILE and weight.is_contiguous() else None


@functools.cache
def _dtypes() -> frozenset[torch.dtype]:
    """What oneDNN multiplies well on this machine."""
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return frozenset()
    narrow = {torch.bfloat16} if torch.ops.mkldnn._is_mkldnn_bf16_supported() else set()
    return frozenset({torch.float32, *narrow})


def _watched(linear: nn.Linear) -> bool:
    """Whether a hook, a mode, autocast, a tracer or a forward gradient would miss the call of the module."""
    return bool(
        linear._forward_hooks
        or linear._forward_pre_hooks
        or linear._backward_hooks
        or linear._backward_pre_hooks
        or "forward" in linear.__dict__
        or torch_module._has_any_global_hook()
        or torch._C._len_torch_function_stack()
        or torch.is_autocast_enabled("cpu")
        or torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage]
        or forward_ad._current_level >= 0
    )


# ----------------------------------------------------------------------------------------------------
# Copies of weights in oneDNN's own order


class _Copy:
    """One weight in oneDNN's order, and how to know whether it is still the same."""

    def __init__(self, weight: Tensor) -> None:
        self.users = 0
        self.version, self.place = weight._version, weight.data_ptr()
        self.sums = _sums(weight)
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _FEW)

    def is_of(self, weight: Tensor) -> bool:
        """Whether this is that weight, unless someone wrote to it behind torch's back. Asked at each product."""
        return self.version == weight._version and self.place == weight.data_ptr()

    def is_still(self, weight: Tensor) -> bool:
        """Whether the numbers themselves are the same: `weight.data` can be changed and no version tells."""
        return self.is_of(weight) and all(map(torch.equal, self.sums, _sums(weight)))


_COPIES: WeakKeyDictionary[nn.Linear, _Copy] = WeakKeyDictionary()
_FEW = 16  # rows for which the order is chosen


def _sums(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Sums of the bits, by row and by column: reading the weights once, about the time of one product with them."""
    bits = weight.detach().view({2: torch.int16, 4: torch.int32}[weight.element_size()])
    if weight.shape[1] * weight.element_size() % 8 == 0:
        bits = bits.view(torch.int64)
    return bits.sum(0), bits.sum(1)


@contextmanager
def packed(linears: Iterable[nn.Module]) -> Iterator[None]:
    """Within it, `project` through one of these modules uses a copy of its weight that suits oneDNN.

    The copies are made once and kept as long as the modules live. On entry each weight is compared with what was copied
    (by sums over rows and columns), and copied anew if it is another; within, a change made in any way but through
    `.data` is noticed. Where the copies would take more than an eighth of the machine's memory, none are made.
    """
    chosen = [linear for linear in linears if type(linear) is nn.Linear and _can_copy(linear.weight)]
    size = sum(linear.weight.numel() * linear.weight.element_size() for linear in chosen)
    if size > _memory() // 8:
        chosen = []
    copies: list[_Copy] = []
    with torch.no_grad():
        for linear in chosen:
            copy = _COPIES.get(linear)
            if copy is None or not copy.is_still(linear.weight):
                copy = _COPIES[linear] = _Copy(linear.weight)
            copies.append(copy)
    for copy in copies:
        copy.users += 1
    try:
        yield
    finally:
        for copy in copies:
            copy.users -= 1


def _can_copy(weight: Tensor) -> bool:
    return (
        weight.device.type == "cpu"
        and weight.dtype in _dtypes()
        and weight.is_contiguous()
        and not weight.is_inference()  # such a tensor has no version
        and not traced(weight)
    )


def _memory() -> int:
    """Bytes of the machine."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not every system tells
        return 8 << 30
