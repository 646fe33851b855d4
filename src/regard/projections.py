"""Projections: `project(linear, x)` is `linear(x)`, to rounding, with what follows it.

On CPU, torch gives products to MKL, one operation at a time. Where nothing can tell the difference (no gradient, hook,
compiler or mode; a plain `nn.Linear`), a faster library computes the same here, together with what follows: our own
(`native_products.rows_served` says where), or oneDNN. Where a gradient is wanted, our own computes `project_each` of
large weights, and torch its gradients::

    project(linear, x)                      linear(x)
    project(linear, x, activation="gelu")   gelu(linear(x))
    project(linear, x, add=y)               linear(x) + y
    project(linear, x, times=y)             linear(x) * y
    project_each((a, b), x)                 a(x), b(x)
    by_rows(compute, linears, x)            compute(x), made of these, for some rows at a time

Everywhere else it is just these formulas in torch. The weights are used where they are: nothing is copied, except by
`regard.onednn.packed`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules import module as torch_module

from regard import onednn
from regard.errors import bad_value
from regard.kernels import native_library, native_products
from regard.kernels.precision import mixed_precision
from regard.onednn import PLAIN, active_copy, is_plain
from regard.tracing import has_foreign_function_mode, in_torch_func

__all__ = ["ACTIVATIONS", "by_rows", "project", "project_each", "uses_copies"]


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
# Below so many multiply-adds torch is as fast or faster; oneDNN also with few rows for a weight that is not large.
_WORTHWHILE = 1 << 18
_FEW_ROWS, _LARGE, _VERY_LARGE = 32, 1 << 20, 1 << 21
# A tensor between two products that would have more than _BETWEEN bytes is computed for _GROUP rows or more at a time:
# glibc takes new pages from the system for every tensor above 32 MB.
_BETWEEN, _GROUP = 32 << 20, 2048
_FEWEST_ROWS = 4  # up to here oneDNN's product with a copy is faster than ours (bfloat16, AMD Zen 4)


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
    if not _learns(x):
        if _is_native((linear,), x, other):
            after = activation if other is None else "add" if times is None else "times"
            if after is None or after in native_products.AFTER:
                return _multiply((linear,), x, after, other)[0]
        weight = _weight_for_onednn(linear, x, other)
        if weight is not None:
            return _by_onednn(weight, linear._parameters["bias"], x, activation, add, times)
    if torch.is_grad_enabled() and _torch_is_slow(x) and _is_native((linear,), x, learning=True):
        (out,) = _multiply_with_gradients((linear,), x)
    else:
        out = linear(x)
    if activation is not None:
        return _named(activation)(out)
    return out + add if add is not None else out * times if times is not None else out


def project_each(linears: tuple[nn.Module, ...], x: Tensor) -> tuple[Tensor, ...]:
    """`linear(x)` for each of them: one product by our own library, or where they were `packed` together.

    >>> a, b, x = nn.Linear(3, 5), nn.Linear(3, 7), torch.randn(2, 3)
    >>> [out.shape[-1] for out in project_each((a, b), x)]
    [5, 7]
    """
    if not _learns(x) and _is_native(linears, x):
        return tuple(_multiply(linears, x))
    if torch.is_grad_enabled() and _is_native(linears, x, learning=True):
        return _multiply_with_gradients(linears, x)
    if _learns(x):
        return tuple([linear(x) for linear in linears])
    copy = None if torch.compiler.is_compiling() else active_copy(linears)
    if copy is None or not _is_plain_group(linears, x, copy):
        return tuple([project(linear, x) for linear in linears])
    biases = [linear._parameters["bias"] for linear in linears]
    out = torch.ops.mkldnn._linear_pointwise.default(
        _rows(x),
        copy.packed,
        None if biases[0] is None else torch.cat(biases),  # type: ignore[arg-type]
        "none",
        [],
        "",
    )
    return _with_axes(out, x).split_with_sizes(copy.rows, -1)


def by_rows(
    compute: Callable[[Tensor, Tensor | None], Tensor],
    linears: tuple[nn.Linear, ...],
    x: Tensor,
    add: Tensor | None = None,
) -> Tensor:
    """`compute(x, add)`, which projects each row by itself. For a large x it is computed for groups of rows, where
    nobody can tell the difference but by rounding: the tensors between the projections then fit into memory that the
    group before has freed. For all rows at once they take new pages of memory in every call, and the time to map them.

    Args:
        compute: (B, N, in), (B, N, out) or None -> (B, N, out).
        linears: what it projects by, two or more; the last one gives its result, all others take rows of x.
        x, add: (B, N, in), (B, N, out).

    >>> up, down, x = nn.Linear(3, 7), nn.Linear(7, 3), torch.randn(2, 5, 3)
    >>> by_rows(lambda x, add: project(down, project(up, x, activation="gelu"), add=add), (up, down), x, add=x).shape
    torch.Size([2, 5, 3])
    """
    groups = _groups(linears, x, add)
    if groups == 1:
        return compute(x, add)

    def parts(of: Tensor) -> tuple[Tensor, ...]:
        return of.reshape(1, -1, of.shape[-1]).tensor_split(groups, 1)

    out = x.new_empty(*x.shape[:-1], linears[-1].weight.shape[0])
    added = groups * (None,) if add is None else parts(add)
    for part, of_x, of_add in zip(parts(out), parts(x), added, strict=True):
        part.copy_(compute(of_x, of_add))
    return out


def uses_copies(rows: int, dtype: torch.dtype) -> bool:
    """Whether products of so many rows use `onednn.packed` copies of weights.

    >>> uses_copies(1, torch.float64)
    False
    """
    return onednn.packs(dtype) and (rows <= _FEWEST_ROWS or rows not in native_products.rows_served(dtype))


def _learns(x: Tensor) -> bool:
    """Whether a gradient of x is wanted. (Asked first: other questions take time.)"""
    return torch.is_grad_enabled() and x.requires_grad


def _groups(linears: tuple[nn.Linear, ...], x: Tensor, add: Tensor | None) -> int:
    """How many groups of rows to make. Runs before every call: the cheapest checks come first."""
    if torch.compiler.is_compiling() or torch._C._is_tracing() or has_foreign_function_mode():
        return 1  # (they would see the questions below)
    if type(x) not in PLAIN or x.is_nested or x.dim() == 0:
        return 1
    rows = x.numel() // max(x.shape[-1], 1)
    if rows < 2 * _GROUP or _is_observed():
        return 1
    *inner, last = linears
    weights = [_weight_if_fits(linear, x, None) for linear in inner]
    weights.append(_weight_if_plain(last, x.dtype, torch.is_grad_enabled()))
    widths = [0 if weight is None else weight.shape[0] for weight in weights]
    a_row = max(widths[:-1]) * x.itemsize
    if 0 in widths or rows * a_row <= _BETWEEN or _GROUP * a_row > _BETWEEN:
        return 1
    if add is not None and not _fits(add, x, widths[-1]):
        return 1
    return rows // _GROUP


def _rows(x: Tensor) -> Tensor:
    """(..., in) -> (rows, in)."""
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


def _with_axes(out: Tensor, x: Tensor) -> Tensor:
    """Rows (..., out) with the axes of x. Not a view for autograd, which would refuse that someone writes to it; in
    inference mode there is none, and a view takes half the time."""
    if x.dim() == 2:
        return out
    shape = (*x.shape[:-1], out.shape[-1])
    return out.view(shape) if torch.is_inference_mode_enabled() else torch.ops.aten._unsafe_view.default(out, shape)


def _named(activation: str) -> Callable[[Tensor], Tensor]:
    try:
        return ACTIVATIONS[activation]
    except KeyError:
        raise bad_value("activation", expected=f"one of {', '.join(ACTIVATIONS)}", received=repr(activation)) from None


# ----------------------------------------------------------------------------------------------------
# Our own products


def _is_native(
    linears: tuple[nn.Module, ...], x: Tensor, other: Tensor | None = None, *, learning: bool = False
) -> bool:
    """Whether our own library may multiply x by these weights, and it is worthwhile. Runs before every product: the
    cheapest checks come first. If `learning`, a gradient may be wanted: an autograd function of ours takes longer than
    torch's, which only large weights outweigh, and smaller ones where torch is slow."""
    if type(x) not in PLAIN or torch.compiler.is_compiling():
        return False
    served = native_products.rows_served(x.dtype)
    if not served or torch._C._is_tracing() or has_foreign_function_mode():
        return False
    outs = width = 0
    for linear in linears:
        if type(linear) is not nn.Linear:
            return False
        outs, width = outs + linear.out_features, linear.in_features
    numbers = x.numel()
    rows = numbers // width if width else 0
    narrow = x.dtype is not torch.float32
    least = 4 * _WORTHWHILE if narrow and rows == 1 else _WORTHWHILE  # (torch has a kernel of its own for such a row)
    if rows not in served or numbers * outs < least:
        return False
    if (learning and outs * width < (_LARGE >> 3 if _torch_is_slow(x) else _LARGE)) or _is_observed():
        return False
    if rows <= _FEWEST_ROWS and active_copy(linears) is not None:
        return False
    if x.is_neg() or (other is not None and other.is_neg()):
        return False
    for linear in linears:
        weight, bias = _weight_if_fits(linear, x, other, learning), linear._parameters.get("bias")
        if weight is None or weight.stride(1) != 1 or weight.is_neg() or not weight.data_ptr():
            return False
        if bias is not None and (bias.is_neg() or not bias.data_ptr()):
            return False
    return True


def _multiply(
    linears: tuple[nn.Module, ...], x: Tensor, after: str | None = None, other: Tensor | None = None
) -> list[Tensor]:
    weights = [linear._parameters["weight"] for linear in linears]
    biases = [linear._parameters["bias"] for linear in linears]
    return native_products.multiply(x, weights, biases, after, other)  # type: ignore[arg-type]


def _torch_is_slow(x: Tensor) -> bool:
    """Whether torch multiplies x, by MKL, with half of the vector width that the CPU has."""
    return x.dtype is torch.float32 and native_library.is_zen5()


def _multiply_with_gradients(linears: tuple[nn.Module, ...], x: Tensor) -> tuple[Tensor, ...]:
    weights, biases = ([linear._parameters[name] for linear in linears] for name in ("weight", "bias"))
    return _Learning.apply(x, *weights, *biases)  # type: ignore[return-value]


class _Learning(torch.autograd.Function):
    """`_multiply` with gradients, which torch computes by operations that have gradients themselves.

    It keeps what torch would keep: x if the gradient of a weight is wanted, the weights if that of x is.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights_and_biases: Tensor | None) -> tuple[Tensor, ...]:
        count = len(weights_and_biases) // 2
        weights, biases = weights_and_biases[:count], weights_and_biases[count:]
        of_x, of_weights = ctx.needs_input_grad[0], any(ctx.needs_input_grad[1 : 1 + count])
        ctx.save_for_backward(x if of_weights else None, *[w if of_x else None for w in weights])
        ctx.shape = x.shape
        ctx.set_materialize_grads(False)
        return tuple(native_products.multiply(x, weights, biases))  # type: ignore[arg-type]

    @staticmethod
    def backward(ctx: Any, *downs: Tensor | None) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        of_x, of_weights = ctx.needs_input_grad[0], ctx.needs_input_grad[1 : 1 + len(weights)]
        of_biases = ctx.needs_input_grad[1 + len(weights) :]
        rows = [None if down is None else _rows(down) for down in downs]  # (rows, out) each
        x_grad = None
        if of_x:
            for down, weight in zip(rows, weights, strict=True):
                if down is not None:
                    x_grad = down @ weight if x_grad is None else torch.addmm(x_grad, down, weight)
            x_grad = None if x_grad is None else x_grad.view(ctx.shape)
        x_rows = None if x is None else _rows(x)
        weight_grads = [
            down.t() @ x_rows if wanted and down is not None and x_rows is not None else None
            for down, wanted in zip(rows, of_weights, strict=True)
        ]
        bias_grads = [
            down.sum(0) if wanted and down is not None else None for down, wanted in zip(rows, of_biases, strict=True)
        ]
        return (x_grad, *weight_grads, *bias_grads)


# ----------------------------------------------------------------------------------------------------
# oneDNN's


def _by_onednn(
    weight: Tensor, bias: Tensor | None, x: Tensor, activation: str | None, add: Tensor | None, times: Tensor | None
) -> Tensor:
    product, other = torch.ops.mkldnn._linear_pointwise, add if times is None else times
    if other is not None:
        out = product.binary(_rows(x), _rows(other), weight, bias, "mul" if add is None else "add")
    else:
        attribute, algorithm = _ONEDNN.get(activation, _ONEDNN[None])
        out = product.default(_rows(x), weight, bias, attribute, [], algorithm)
    out = _with_axes(out, x)
    return out if activation is None or activation in _ONEDNN else _named(activation)(out)


def _is_plain_group(linears: tuple[nn.Module, ...], x: Tensor, copy: onednn.Copy) -> bool:
    """Whether oneDNN may multiply x by the weights of all of them at once, from their copy."""
    if type(x) not in PLAIN or not x.numel() or not torch._C._get_mkldnn_enabled() or _is_observed():
        return False
    weights = [_weight_if_fits(linear, x, None) for linear in linears]
    without_bias = {linear._parameters.get("bias") is None for linear in linears}
    return len(without_bias) == 1 and copy.is_of(weights)


def _weight_for_onednn(linear: nn.Module, x: Tensor, other: Tensor | None) -> Tensor | None:
    """The weight to multiply by where oneDNN may do it and it is worthwhile; else None. Runs before every product: the
    cheapest checks come first."""
    if type(linear) is not nn.Linear or type(x) not in PLAIN or torch.compiler.is_compiling():
        return None
    if x.dtype not in onednn.dtypes() or not torch._C._get_mkldnn_enabled():
        return None
    if torch._C._is_tracing() or has_foreign_function_mode():
        return None
    copy = active_copy((linear,))
    if copy is None and _is_for_mkl(x, linear.out_features, linear.in_features):  # most products are
        return None
    weight = None if _is_observed() else _weight_if_fits(linear, x, other)
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


# ----------------------------------------------------------------------------------------------------
# What must not be noticed


def _weight_if_fits(linear: nn.Module, x: Tensor, other: Tensor | None, learning: bool = False) -> Tensor | None:
    """The weight if module and tensors are plain (no hooks or subclasses, nor gradients unless `learning`) and fit each
    other: another library may use it."""
    grad = torch.is_grad_enabled() and not learning
    weight = _weight_if_plain(linear, x.dtype, grad)
    if weight is None or not is_plain(x, weight.dtype, grad) or x.dim() == 0 or x.shape[-1] != weight.shape[1]:
        return None
    return weight if other is None or _fits(other, x, weight.shape[0], learning) else None


def _fits(other: Tensor, x: Tensor, out: int, learning: bool = False) -> bool:
    """Whether a tensor is plain and may be added to a result of x (or multiplied with it) in place."""
    return is_plain(other, x.dtype, torch.is_grad_enabled() and not learning) and other.shape == (*x.shape[:-1], out)


def _weight_if_plain(linear: nn.Module, dtype: torch.dtype, grad: bool) -> Tensor | None:
    """The weight (out, in) of an `nn.Linear` without hooks, whose forward is that of its class, if weight and bias are
    plain, too, and fit each other."""
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
    if weight is None or not is_plain(weight, dtype, grad) or weight.dim() != 2:
        return None
    fits = bias is None or (is_plain(bias, dtype, grad) and bias.shape == weight.shape[:1] and bias.is_contiguous())
    return weight if fits else None


def _is_observed() -> bool:
    """Whether a compiler, tracer, mode, global hook, mixed precision, torch.func or forward gradient must see the call
    of the module; or `nn.Linear` is patched."""
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
    )


_FORWARD, _CALL, _F_LINEAR = nn.Linear.forward, nn.Linear.__call__, F.linear
