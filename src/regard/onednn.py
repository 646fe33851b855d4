"""A projection, as fast as the machine has it: `project(linear, x)` is `linear(x)`, to rounding.

On CPU, torch gives float32 products to MKL, one operation at a time. Where nobody can tell the difference (no gradient,
no hook, no compiler, no mode, a plain `nn.Linear`), oneDNN does the same product here, together with what follows it::

    project(linear, x)                      linear(x)
    project(linear, x, activation="gelu")   gelu(linear(x))
    project(linear, x, add=y)               linear(x) + y
    project(linear, x, times=y)             linear(x) * y
    project_each((a, b), x)                 a(x), b(x)

Everywhere else it is just these formulas in torch. The weights stay where they are: nothing is copied, so nothing can
be out of date. Work that uses the same weights many times, a few rows at a time (generation), may say
`with packed(...)` around it: oneDNN then has a copy of them in its own order, for as long as they do not change.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules import module as torch_module

from regard.errors import bad_value
from regard.tracing import in_torch_func, traced

__all__ = ["ACTIVATIONS", "packed", "project", "project_each"]


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

# What oneDNN calls those that it does together with a product: attribute and algorithm. (Not relu: its relu(NaN) is 0.)
_ONEDNN = {
    None: ("none", ""),
    "gelu": ("gelu", "none"),
    "gelu_tanh": ("gelu", "tanh"),
    "silu": ("swish", ""),
    "tanh": ("tanh", ""),
}
# Below this many multiply-adds, and with few rows for a weight that is not large, MKL is as fast or faster.
_WORTHWHILE = 1 << 18
_FEW_ROWS, _LARGE = 32, 1 << 20


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
    other = add if times is None else times
    weight = _weight_for_onednn(linear, x, other)
    if weight is None:
        out = linear(x)
        if activation is not None:
            return _named(activation)(out)
        return out + add if add is not None else out * times if times is not None else out
    rows, bias = x if x.dim() == 2 else x.reshape(-1, x.shape[-1]), linear._parameters["bias"]
    product = torch.ops.mkldnn._linear_pointwise
    if other is not None:
        other = other.reshape(rows.shape[0], other.shape[-1])
        out = product.binary(rows, other, weight, bias, "mul" if add is None else "add")
    else:
        attribute, algorithm = _ONEDNN.get(activation, _ONEDNN[None])
        out = product.default(rows, weight, bias, attribute, [], algorithm)
    if x.dim() != 2:  # not a view for autograd, which would refuse that someone writes to it
        out = torch.ops.aten._unsafe_view.default(out, (*x.shape[:-1], out.shape[-1]))
    return out if activation is None or activation in _ONEDNN else _named(activation)(out)


def project_each(linears: tuple[nn.Module, ...], x: Tensor) -> tuple[Tensor, ...]:
    """`linear(x)` for each of them: one product where they were `packed` together.

    >>> a, b, x = nn.Linear(3, 5), nn.Linear(3, 7), torch.randn(2, 3)
    >>> [out.shape[-1] for out in project_each((a, b), x)]
    [5, 7]
    """
    copy = _joint_copy(linears, x) if _USED[0] else None
    if copy is None:
        return tuple(project(linear, x) for linear in linears)
    biases = [linear._parameters["bias"] for linear in linears]
    out = torch.ops.mkldnn._linear_pointwise.default(
        x if x.dim() == 2 else x.reshape(-1, x.shape[-1]),
        copy.packed,
        None if biases[0] is None else torch.cat(biases),  # type: ignore[arg-type]
        "none",
        [],
        "",
    )
    return torch.ops.aten._unsafe_view.default(out, (*x.shape[:-1], out.shape[-1])).split_with_sizes(copy.rows, -1)


def _joint_copy(linears: tuple[nn.Module, ...], x: Tensor) -> _Copy | None:
    """The copy of their weights one above the other, where oneDNN may use it and nobody can tell."""
    copy = _COPIES.get(linears[0])  # type: ignore[arg-type]
    if copy is None or not copy.users or len(copy.seals) != len(linears):
        return None
    if type(x) not in _PLAIN or _world_looks_on():
        return None
    without = linears[0]._parameters.get("bias") is None
    for linear, seal in zip(linears, copy.seals, strict=True):
        weight = _weight_if_plain(linear, x, None)
        if weight is None or not seal.is_of(weight) or (linear._parameters["bias"] is None) is not without:
            return None
    return copy if x.numel() else None


def _named(activation: str) -> Callable[[Tensor], Tensor]:
    try:
        return ACTIVATIONS[activation]
    except KeyError:
        raise bad_value("activation", expected=f"one of {', '.join(ACTIVATIONS)}", received=repr(activation)) from None


def _weight_for_onednn(linear: nn.Module, x: Tensor, other: Tensor | None) -> Tensor | None:
    """The weight to multiply by where oneDNN may do it, nobody can tell, and it is worth it; else None. (Asked before
    every product, so the order is by price.)"""
    if type(linear) is not nn.Linear or type(x) not in _PLAIN or torch.compiler.is_compiling():
        return None
    if not _USED[0] and x.numel() * linear.out_features < _WORTHWHILE:  # the most, and soon told
        return None
    weight = None if _world_looks_on() else _weight_if_plain(linear, x, other)
    if weight is None:
        return None
    copy = _COPIES.get(linear) if _USED[0] else None  # type: ignore[arg-type]
    if copy is not None and copy.users and len(copy.seals) == 1 and copy.seals[0].is_of(weight):
        return copy.packed if x.numel() else None
    small = weight.numel() < _LARGE and x.numel() < _FEW_ROWS * weight.shape[1]
    worthwhile = x.numel() * weight.shape[0] >= _WORTHWHILE and not small
    return weight if worthwhile and weight.is_contiguous() else None


def _weight_if_plain(linear: nn.Module, x: Tensor, other: Tensor | None) -> Tensor | None:
    """The weight where oneDNN may multiply by it and nobody looks on at this module or these tensors, else None."""
    if (
        type(linear) is not nn.Linear
        or linear._forward_hooks
        or linear._forward_pre_hooks
        or linear._backward_hooks
        or linear._backward_pre_hooks
        or "forward" in linear.__dict__
    ):
        return None
    parameters = linear._parameters
    if "weight" not in parameters or "bias" not in parameters:  # plain tensors may stand in their place
        return None
    weight, bias = parameters["weight"], parameters["bias"]
    if weight is None or type(weight) not in _PLAIN or weight.dtype not in _dtypes():
        return None
    dtype, grad = weight.dtype, torch.is_grad_enabled()
    if not (_plain(x, dtype, grad) and _plain(weight, dtype, grad)):
        return None
    if bias is not None and not (_plain(bias, dtype, grad) and bias.dim() == 1 and bias.is_contiguous()):
        return None
    if x.dim() == 0 or weight.dim() != 2 or x.shape[-1] != weight.shape[1]:
        return None
    out = weight.shape[0]
    if bias is not None and bias.shape[0] != out:
        return None
    if other is not None and not (_plain(other, dtype, grad) and other.shape == (*x.shape[:-1], out)):
        return None
    return weight


_PLAIN = frozenset({Tensor, nn.Parameter})


def _plain(x: Tensor, dtype: torch.dtype, grad: bool) -> bool:
    """Whether x is a tensor like most: dense, on the CPU, and (where gradients are computed) without any."""
    return (
        type(x) in _PLAIN
        and x.dtype is dtype
        and x.is_cpu
        and x.layout is torch.strided
        and not x.is_nested
        and not (grad and x.requires_grad)
    )


@functools.cache
def _dtypes() -> frozenset[torch.dtype]:
    """What oneDNN multiplies well on this machine."""
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return frozenset()
    narrow = {torch.bfloat16} if torch.ops.mkldnn._is_mkldnn_bf16_supported() else set()
    return frozenset({torch.float32, *narrow})


def _world_looks_on() -> bool:
    """Whether a compiler, a tracer, a mode, a global hook, autocast, torch.func or a forward gradient would miss the
    call of a module; or someone has put something else in the place of `nn.Linear`, or switched oneDNN off."""
    return bool(
        torch.compiler.is_compiling()
        or torch._C._is_tracing()
        or nn.Linear.forward is not _FORWARD
        or nn.Linear.__call__ is not _CALL
        or F.linear is not _F_LINEAR
        or torch_module._has_any_global_hook()
        or torch._C._len_torch_function_stack()
        or torch._C._len_torch_dispatch_stack()
        or in_torch_func()
        or forward_ad._current_level >= 0
        or torch.is_autocast_enabled("cpu")
        or not torch._C._get_mkldnn_enabled()
    )


_FORWARD, _CALL, _F_LINEAR = nn.Linear.forward, nn.Linear.__call__, F.linear


# ----------------------------------------------------------------------------------------------------
# Copies of weights in oneDNN's own order


class _Seal:
    """How to know whether a weight is still the one that was copied."""

    def __init__(self, weight: Tensor) -> None:
        # (An address may be given out again; what a weak reference is to is not.)
        self.storage = StorageWeakRef(weight.untyped_storage())
        self.version, self.form, self.sums = weight._version, _form(weight), _sums(weight)

    def is_of(self, weight: Tensor) -> bool:
        """Whether this is that weight, unless someone wrote to it behind torch's back. Asked at each product."""
        return (
            not weight.is_inference()  # which has no version
            and self.version == weight._version
            and self.storage.cdata == weight.untyped_storage()._cdata
            and self.form == _form(weight)
        )

    def is_still(self, weight: Tensor) -> bool:
        """Whether the numbers themselves are the same: `weight.data` can be changed and no version tells."""
        return self.is_of(weight) and all(map(torch.equal, self.sums, _sums(weight)))


class _Copy:
    """One weight in oneDNN's order, or several one above the other."""

    def __init__(self, weights: list[Tensor]) -> None:
        self.users, self.size = 0, sum(weight.nbytes for weight in weights)
        self.seals, self.rows = [_Seal(weight) for weight in weights], [weight.shape[0] for weight in weights]
        joined = weights[0].detach() if len(weights) == 1 else torch.cat([weight.detach() for weight in weights])
        self.packed = torch.ops.mkldnn._reorder_linear_weight(joined, _FEW)

    def is_still(self, weights: list[Tensor]) -> bool:
        """Whether it is a copy of these, number by number."""
        return len(weights) == len(self.seals) and all(s.is_still(w) for s, w in zip(self.seals, weights, strict=True))


_COPIES: WeakKeyDictionary[nn.Linear, _Copy] = WeakKeyDictionary()
_FEW = 16  # rows for which the order is chosen
_LARGEST = 1 << 24  # numbers of a float32 matrix: with a larger one, such as a head, one row is as fast without a copy


def _form(weight: Tensor) -> tuple[object, ...]:
    return weight.data_ptr(), weight.shape, weight.stride(), weight.dtype


def _sums(weight: Tensor) -> tuple[Tensor, ...]:
    """Sums of the bits, by row, by column and along diagonals: about the time of a few products with one row."""
    width, size = weight.shape[1], weight.element_size()
    bits = weight.detach().view({2: torch.int16, 4: torch.int32}[size]).view(-1)
    if width * size % 8 == 0 and weight.storage_offset() * size % 8 == 0:
        bits = bits.view(torch.int64)
        width = width * size // 8
    rows = bits.view(-1, width)
    steps = len(bits) // (width + 1) * (width + 1)  # rows that are one longer: what is below stands one to the left
    return rows.sum(0), rows.sum(1), bits[:steps].view(-1, width + 1).sum(0), bits[steps:].clone()


class packed:
    """Within it, `project` through one of these modules uses a copy of its weight that suits oneDNN; and so does
    `project_each` through a tuple of them that is given here as a tuple.

    The copies are made once and kept as long as the modules live. When it is made, each weight is compared with what
    was copied (by sums over rows, columns and diagonals), and copied anew if it is another; within, a change is noticed
    that torch counts: any but through `.data`, by a fused optimiser, or by others who share the memory. Where all the
    copies together would take more than an eighth of the machine's memory, no more are made. It can be entered again
    and again, which compares nothing.
    """

    def __init__(self, linears: Iterable[nn.Module | tuple[nn.Module, ...]]) -> None:
        chosen: dict[nn.Module, list[Tensor]] = {}
        for one in dict.fromkeys(linears):
            group = one if isinstance(one, tuple) else (one,)
            weights = [linear._parameters.get("weight") for linear in group if type(linear) is nn.Linear]
            if weights and len(weights) == len(group) and _can_copy(weights):
                chosen[group[0]] = weights  # type: ignore[assignment]
            elif _COPIES and type(group[0]) is nn.Linear:
                _COPIES.pop(group[0], None)
        self._copies: list[_Copy] = []
        with _LOCK, torch.no_grad():
            size = sum(weight.nbytes for weights in chosen.values() for weight in weights)
            size += sum(copy.size for linear, copy in _COPIES.items() if linear not in chosen)
            if size > _memory() // 8:
                return
            for linear, weights in chosen.items():
                assert isinstance(linear, nn.Linear)
                copy = _COPIES.get(linear)
                if copy is None or not copy.is_still(weights):
                    copy = None
                    _COPIES.pop(linear, None)
                    copy = _COPIES[linear] = _Copy(weights)
                self._copies.append(copy)

    def __enter__(self) -> None:
        with _LOCK:
            _USED[0] += len(self._copies)
            for copy in self._copies:
                copy.users += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with _LOCK:
            _USED[0] -= len(self._copies)
            for copy in self._copies:
                copy.users -= 1


_LOCK = threading.RLock()
_USED = [0]  # copies in use, counted as often as they are


def _can_copy(weights: Sequence[Tensor | None]) -> bool:
    """Whether there is one copy for them all: plain matrices that read the same x."""
    first = weights[0]
    return all(
        weight is not None
        and first is not None
        and type(weight) in _PLAIN
        and weight.dtype in _dtypes()
        and _plain(weight, first.dtype, grad=False)
        and weight.dim() == 2
        and weight.shape[1:] == first.shape[1:]
        and 0 < weight.numel() <= (_LARGEST if weight.dtype is torch.float32 else weight.numel())
        and weight.is_contiguous()
        and not weight.is_neg()
        and not weight.is_inference()  # such a tensor has no version
        and not traced(weight)
        for weight in weights
    )


def _memory() -> int:
    """Bytes of the machine."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not every system tells
        return 8 << 30
