"""Projections by oneDNN: `project(linear, x)` is `linear(x)`, to rounding.

On CPU, torch gives float32 products to MKL, one operation at a time. Where nothing can tell the difference (no
gradient, hook, compiler or mode; a plain `nn.Linear`), oneDNN computes the same product here, fused with what
follows it::

    project(linear, x)                      linear(x)
    project(linear, x, activation="gelu")   gelu(linear(x))
    project(linear, x, add=y)               linear(x) + y
    project(linear, x, times=y)             linear(x) * y
    project_each((a, b), x)                 a(x), b(x)

Everywhere else it is just these formulas in torch. The weights are used where they are: nothing is copied. Work that
uses the same weights many times, a few rows at a time (generation), may use `with packed(...)`, which holds copies of
them in oneDNN's own order for as long as it lives.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules import module as torch_module

from regard.errors import bad_value
from regard.kernels.precision import mixed_precision
from regard.tracing import has_foreign_function_mode, in_torch_func, traced

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
_FEW_ROWS, _LARGE, _VERY_LARGE = 32, 1 << 20, 1 << 21


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
    other = add if times is None else times
    assert other is None or (activation is None and (add is None or times is None)), "one thing may follow"
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
    if x.dim() != 2:
        out = _with_axes(out, x)
    return out if activation is None or activation in _ONEDNN else _named(activation)(out)


def project_each(linears: tuple[nn.Module, ...], x: Tensor) -> tuple[Tensor, ...]:
    """`linear(x)` for each of them: one product where they were `packed` together.

    >>> a, b, x = nn.Linear(3, 5), nn.Linear(3, 7), torch.randn(2, 3)
    >>> [out.shape[-1] for out in project_each((a, b), x)]
    [5, 7]
    """
    copy = None if torch.compiler.is_compiling() else _active_copy(linears)
    if copy is None or not _is_plain_group(linears, x, copy):
        return tuple([project(linear, x) for linear in linears])
    biases = [linear._parameters["bias"] for linear in linears]
    out = torch.ops.mkldnn._linear_pointwise.default(
        x if x.dim() == 2 else x.reshape(-1, x.shape[-1]),
        copy.packed,
        None if biases[0] is None else torch.cat(biases),  # type: ignore[arg-type]
        "none",
        [],
        "",
    )
    return _with_axes(out, x).split_with_sizes(copy.rows, -1)


def _with_axes(out: Tensor, x: Tensor) -> Tensor:
    """Rows (..., out) with the axes of x. Not a view for autograd, which would refuse that someone writes to it; in
    inference mode there is none, and a view takes half the time."""
    shape = (*x.shape[:-1], out.shape[-1])
    return out.view(shape) if torch.is_inference_mode_enabled() else torch.ops.aten._unsafe_view.default(out, shape)


def _is_plain_group(linears: tuple[nn.Module, ...], x: Tensor, copy: _Copy) -> bool:
    """Whether oneDNN may multiply x by the weights of all of them at once, from their copy."""
    if type(x) not in _PLAIN or _is_observed() or not x.numel():
        return False
    weights = [_weight_if_plain(linear, x, None) for linear in linears]
    without_bias = {linear._parameters.get("bias") is None for linear in linears}
    return len(without_bias) == 1 and copy.is_of(weights)


def _named(activation: str) -> Callable[[Tensor], Tensor]:
    try:
        return ACTIVATIONS[activation]
    except KeyError:
        raise bad_value("activation", expected=f"one of {', '.join(ACTIVATIONS)}", received=repr(activation)) from None


def _weight_for_onednn(linear: nn.Module, x: Tensor, other: Tensor | None) -> Tensor | None:
    """The weight to multiply by where oneDNN may do it and it is worthwhile; else None. Runs before every product: the
    cheapest checks come first."""
    if type(linear) is not nn.Linear or type(x) not in _PLAIN:
        return None
    if torch.compiler.is_compiling() or torch._C._is_tracing():
        return None
    copy = _active_copy((linear,))
    if copy is None and _is_for_mkl(x, linear.out_features, linear.in_features):  # most products are
        return None
    weight = None if _is_observed() else _weight_if_plain(linear, x, other)
    if weight is None:
        return None
    if copy is not None and copy.is_of([weight]):
        return copy.packed if x.numel() else None
    return None if _is_for_mkl(x, *weight.shape) or not weight.is_contiguous() else weight


def _is_for_mkl(x: Tensor, wide: int, deep: int) -> bool:
    """Whether MKL is as fast for the product of x with a weight (wide, deep)."""
    numbers = x.numel()
    if numbers * wide < _WORTHWHILE or (wide * deep < _LARGE and numbers < _FEW_ROWS * deep):
        return True
    few = wide * deep >= _VERY_LARGE and numbers <= 2 * _FEW_ROWS * deep
    return x.dtype is torch.float32 and not few and _mkl_is_fast()


@functools.cache
def _mkl_is_fast() -> bool:
    """Whether MKL has the widest instructions of this CPU in float32: it has none of AVX-512 on some."""
    return torch.backends.mkl.is_available() and torch.backends.cpu.get_cpu_capability() != "AVX512"


def _weight_if_plain(linear: nn.Module, x: Tensor, other: Tensor | None) -> Tensor | None:
    """The weight if module and tensors are plain (no hooks, subclasses, gradients): oneDNN may multiply by it."""
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
    """Whether x is a dense tensor on the CPU that needs no gradient now."""
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


def _is_observed() -> bool:
    """Whether a compiler, tracer, mode, global hook, mixed precision, torch.func or forward gradient must see the call
    of the module; or `nn.Linear` is patched, or oneDNN switched off."""
    return bool(
        torch.compiler.is_compiling()
        or torch._C._is_tracing()
        or nn.Linear.forward is not _FORWARD
        or nn.Linear.__call__ is not _CALL
        or F.linear is not _F_LINEAR
        or torch_module._has_any_global_hook()
        or has_foreign_function_mode()
        or torch._C._len_torch_dispatch_stack()
        or in_torch_func()
        or forward_ad._current_level >= 0
        or mixed_precision("cpu")
        or not torch._C._get_mkldnn_enabled()
    )


_FORWARD, _CALL, _F_LINEAR = nn.Linear.forward, nn.Linear.__call__, F.linear


# ----------------------------------------------------------------------------------------------------
# Copies of weights in oneDNN's own order


class _Copy:
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
_Copies = dict[tuple[nn.Module, ...], _Copy]


class _Active(threading.local):
    """The copies in use in this thread, the innermost `packed` last."""

    def __init__(self) -> None:
        self.stack: list[_Copies] = []


_ACTIVE = _Active()


def _active_copy(linears: tuple[nn.Module, ...]) -> _Copy | None:
    return _ACTIVE.stack[-1].get(linears) if _ACTIVE.stack else None


def _state(weight: Tensor) -> tuple[object, ...]:
    """Changes whenever torch counts a change of a weight, or it is given other memory."""
    return weight._version, weight.data_ptr(), weight.dtype


class packed:
    """Within it, `project` through one of these modules uses a copy of its weight in oneDNN's own order, and so does
    `project_each` through a tuple of modules that is given here as a tuple.

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
            self._copies = {group: _Copy(weights) for group, weights in chosen.items()} if fits else {}

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
    )


def _memory() -> int:
    """Bytes of the machine."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not every system tells
        return 8 << 30
