"""Makes the loops of a kernel one node for compilers: a registered torch operator with fake, autograd and vmap rules.

Three ways lead to the same loops, for torch wants each of them said in its own way:

    eager        an autograd function straight to the loops: the dispatcher's toll is saved
    torch.func   an autograd function with a `setup_context`, around the operator, which has a vmap rule
    compilers    the operator itself, with its autograd rule
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch._decomp import register_decomposition

from regard.kernels import reference
from regard.kernels.call import Call, accumulation_dtype
from regard.kernels.call_schema import Flat, flatten, unflatten
from regard.kernels.precision import fixed_precision
from regard.tracing import traced

__all__ = ["Loops", "first_derivatives_only", "new_output", "register"]


class Loops(Protocol):
    """A kernel's loops, run on real tensors and without autograd.

    `height` and `width` are the block's sides, 0 where the kernel may choose. `wanted` says which gradients to give, in
    the order q, k, v, sinks (where there are any), biases; they come back in that order, the unwanted left out.
    """

    def forward(self, call: Call, height: int, width: int) -> tuple[Tensor, Tensor]: ...

    def backward(
        self,
        call: Call,
        out: Tensor,
        lse: Tensor,
        d_out: Tensor,
        d_lse: Tensor,
        wanted: list[bool],
        height: int,
        width: int,
    ) -> list[Tensor]: ...


class Layout(NamedTuple):
    """How the tensors of a flat call stand in a row: q, k, v, sinks (where there are any), biases, the rest."""

    sinks: bool
    biases: int
    numbers: tuple[Any, ...]

    @property
    def differentiable(self) -> int:
        return 3 + self.sinks + self.biases

    def row(self, q: Any, k: Any, v: Any, sinks: Any, biases: Any, rest: Any = ()) -> list[Any]:
        """The arguments of an operator (or what belongs to each of them) in a row."""
        return [q, k, v, *([sinks] if self.sinks else []), *(biases if self.biases else []), *rest]

    def pieces(self, row: Any) -> tuple[Any, ...]:
        """A row as the arguments of an operator."""
        first, last = 3 + self.sinks, self.differentiable
        return *row[:3], row[3] if self.sinks else None, list(row[first:last]), list(row[last:]), *self.numbers


_LIBRARY = torch.library.Library("regard", "DEF")
_PIECES = (
    "Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor[] biases, Tensor[] rest, "
    "SymInt[] ints, float[] floats, str plan, int height, int width"
)


def new_output(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Memory for (out, lse). Heads lie side by side, so that merging them afterwards is a view."""
    batch, heads, rows, _ = q.shape
    out = q.new_empty(batch, rows, heads, v.shape[3]).transpose(1, 2)
    return out, q.new_empty(batch, heads, rows, dtype=accumulation_dtype(q.dtype))


class _Operators(NamedTuple):
    """The two torch operators of a kernel, and the loops behind them."""

    name: str
    loops: Loops
    forward: Any
    backward: Any


def register(name: str, loops: Loops) -> Callable[..., tuple[Tensor, Tensor]]:
    """Register `regard::<name>` and `regard::<name>_backward`; returns `run(call, height=0, width=0) -> (out, lse)`."""
    ops = _define(name, loops)
    _tell_shapes(ops)
    _tell_gradients(ops)
    _tell_vmap(ops)
    eager, functional = _eager_function(ops), _functional_function(ops)

    def run(call: Call, height: int = 0, width: int = 0) -> tuple[Tensor, Tensor]:
        learned = call.learned()
        if traced(*learned):
            flat = flatten(call)
            if torch.compiler.is_compiling():
                return ops.forward(*flat, height, width)
            layout = Layout(flat.sinks is not None, len(flat.biases), (*flat[6:], height, width))
            return functional.apply(layout, *layout.row(*flat[:6]))  # type: ignore[return-value]
        if torch.is_grad_enabled() and any(x.requires_grad for x in learned):
            return eager.apply(call, height, width, *learned)  # type: ignore[return-value]
        return loops.forward(call, height, width)

    return run


def _define(name: str, loops: Loops) -> _Operators:
    """The operators' signatures, and what they do to real tensors."""
    _LIBRARY.define(f"{name}({_PIECES}) -> (Tensor, Tensor)")
    _LIBRARY.define(
        f"{name}_backward(Tensor out, Tensor lse, Tensor d_out, Tensor d_lse, bool[] wanted, {_PIECES}) -> Tensor[]"
    )

    def forward(*args: Any) -> tuple[Tensor, Tensor]:
        *flat, height, width = args
        with fixed_precision(args[0]):
            return loops.forward(unflatten(Flat(*flat)), height, width)

    def backward(
        out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor, wanted: list[bool], *args: Any
    ) -> list[Tensor]:
        *flat, height, width = args
        with fixed_precision(out):
            return loops.backward(unflatten(Flat(*flat)), out, lse, d_out, d_lse, wanted, height, width)

    _LIBRARY.impl(name, forward, "CompositeExplicitAutograd")
    _LIBRARY.impl(f"{name}_backward", backward, "CompositeExplicitAutograd")
    return _Operators(
        name, loops, getattr(torch.ops.regard, name).default, getattr(torch.ops.regard, f"{name}_backward").default
    )


def _tell_shapes(ops: _Operators) -> None:
    """For those who trace: what comes out has which shape, dtype and strides; and the formula, for exporters."""

    def fake_forward(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        _keep_whole_under_ci(ops.forward)
        return new_output(q, v)

    def fake_backward(_o: Tensor, _l: Tensor, _do: Tensor, _dl: Tensor, wanted: list[bool], *args: Any) -> list[Tensor]:
        return [torch.empty_like(x) for x, want in zip(_differentiable(args, args), wanted, strict=True) if want]

    torch.library.register_fake(f"regard::{ops.name}", fake_forward, lib=_LIBRARY)
    torch.library.register_fake(f"regard::{ops.name}_backward", fake_backward, lib=_LIBRARY)

    # Exporters that know no such operator (ONNX) write the formula in its place; the strides are the operator's.
    @register_decomposition(ops.forward)
    def spelled_out(*args: Any) -> tuple[Tensor, Tensor]:
        out, lse = reference.forward(unflatten(Flat(*args[:-2])))
        return out.transpose(1, 2).contiguous().transpose(1, 2), lse


def _keep_whole_under_ci(operator: Any) -> None:
    """With the variable CI set, inductor refuses to call an operator that has a decomposition, as ours has for ONNX.

    That rule is meant for PyTorch's own operators and holds on every user's CI. It is passed by saying first that the
    operator is to be called; inductor, loaded only by those who compile, traces shapes before it asks.
    """
    lowering = sys.modules.get("torch._inductor.lowering")
    if lowering is not None and os.environ.get("CI") and operator not in lowering.lowerings:
        lowering.make_fallback(
            operator, layout_constraint=lowering.constrain_to_fake_tensors, warn=False, override_decomp=True
        )


def _tell_gradients(ops: _Operators) -> None:
    """For compilers: the forward pass keeps its inputs, its output and the lse; no weight is kept."""

    def remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        q, k, v, sinks, biases, rest, *numbers = inputs
        ctx.layout = Layout(sinks is not None, len(biases), tuple(numbers))
        ctx.save_for_backward(*output, *ctx.layout.row(q, k, v, sinks, biases, rest))

    def differentiate(ctx: Any, d_out: Tensor, d_lse: Tensor) -> tuple[Any, ...]:
        out, lse, *tensors = ctx.saved_tensors
        layout = ctx.layout
        wanted = layout.row(*ctx.needs_input_grad[:5])
        gradients = iter(ops.backward(out, lse, d_out, d_lse, wanted, *layout.pieces(tensors)))
        grads = [next(gradients) if want else None for want in wanted]
        *grads, rest, numbers = *layout.pieces(grads)[:5], tensors[layout.differentiable :], layout.numbers
        return *grads, [None] * len(rest), *(None for _ in numbers)

    torch.library.register_autograd(f"regard::{ops.name}", differentiate, setup_context=remember, lib=_LIBRARY)


def _eager_function(ops: _Operators) -> type[torch.autograd.Function]:
    """For plain eager torch: straight to the loops."""

    class Eager(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, call: Call, height: int, width: int, *learned: Tensor) -> tuple[Tensor, Tensor]:
            out, lse = ops.loops.forward(call, height, width)
            ctx.save_for_backward(out, lse, *learned)
            ctx.call, ctx.sides = call.with_learned([_NOTHING] * len(learned)), (height, width)
            return out, lse

        @staticmethod
        def backward(ctx: Any, *d_output: Tensor) -> tuple[Any, ...]:
            out, lse, *learned = ctx.saved_tensors
            d_out, d_lse = d_output
            wanted = list(ctx.needs_input_grad[3:])
            with fixed_precision(out), torch.no_grad():
                gradients = ops.loops.backward(
                    ctx.call.with_learned(learned), out, lse, d_out, d_lse, wanted, *ctx.sides
                )
            gradients = iter(first_derivatives_only(ops.name, gradients, d_out, *learned))
            return None, None, None, *(next(gradients) if want else None for want in wanted)

    return Eager


def _functional_function(ops: _Operators) -> type[torch.autograd.Function]:
    """For torch.func, which sees only tensors that stand alone among the arguments, and wants a `setup_context`."""

    class Forward(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(layout: Layout, *tensors: Tensor) -> tuple[Tensor, Tensor]:
            return ops.forward(*layout.pieces(tensors))

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
            ctx.layout, *tensors = inputs
            ctx.save_for_backward(*output, *tensors)

        @staticmethod
        def backward(ctx: Any, *d_output: Tensor) -> tuple[Any, ...]:
            layout, differentiable = ctx.layout, ctx.layout.differentiable
            wanted = list(ctx.needs_input_grad[1 : 1 + differentiable])
            out, lse, *tensors = ctx.saved_tensors
            gradients = iter(Backward.apply(layout, wanted, out, lse, *d_output, *tensors))
            return (
                None,
                *(next(gradients) if want else None for want in wanted),
                *(None for _ in tensors[differentiable:]),
            )

    class Backward(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(
            layout: Layout, wanted: list[bool], out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor, *tensors: Tensor
        ) -> tuple[Tensor, ...]:
            return tuple(ops.backward(out, lse, d_out, d_lse, wanted, *layout.pieces(tensors)))

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
            pass

        @staticmethod
        def backward(ctx: Any, *_: Tensor) -> None:
            raise _no_second_derivative(ops.name)

    return Forward


def _tell_vmap(ops: _Operators) -> None:
    """For vmap: its axis joins the batch."""

    def batched_forward(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        size, batch = info.batch_size, _inner_batch(args[0], in_dims[0])
        result = ops.forward(*_fold_all(args, in_dims, size, batch, learned=False))
        return tuple(x.unflatten(0, (size, batch)) for x in result), (0, 0)

    def batched_backward(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        size, batch = info.batch_size, _inner_batch(args[5], in_dims[5])
        saved = [_fold(x, dim, size, batch, force=True) for x, dim in zip(args[:4], in_dims[:4], strict=True)]
        pieces = _fold_all(args[5:], in_dims[5:], size, batch, learned=True)
        result = ops.backward(*saved, args[4], *pieces)
        # What was one for the whole batch gets one gradient per item of vmap's axis: the sum over its batch.
        before = [x for x, want in zip(_differentiable(args[5:], args[5:]), args[4], strict=True) if want]
        dims = [d for d, want in zip(_differentiable(in_dims[5:], args[5:]), args[4], strict=True) if want]
        grads = []
        for grad, x, dim in zip(result, before, dims, strict=True):
            grad = grad.unflatten(0, (size, batch))
            leading = x.shape[0] if dim is None else x.movedim(dim, 0).shape[1]
            grads.append(grad.sum(1, keepdim=True) if leading == 1 and batch > 1 else grad)
        return grads, [0] * len(grads)

    torch.library.register_vmap(f"regard::{ops.name}", batched_forward, lib=_LIBRARY)
    torch.library.register_vmap(f"regard::{ops.name}_backward", batched_backward, lib=_LIBRARY)


_NOTHING = torch.empty(0, device="cpu")  # stands for a tensor that autograd keeps


class _FirstOnly(torch.autograd.Function):
    """Identity that has no derivative, and says so."""

    @staticmethod
    def forward(ctx: Any, name: str, x: Tensor, *sources: Tensor) -> Tensor:
        ctx.name = name
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> None:
        raise _no_second_derivative(ctx.name)


def first_derivatives_only(name: str, gradients: list[Tensor], *sources: Tensor) -> list[Tensor]:
    """Gradients that raise in our words when they are differentiated again, by whichever of `sources` they came from.

    Only where a graph of the gradient is wanted is grad mode on in a backward pass.
    """
    if not torch.is_grad_enabled():
        return gradients
    return [_FirstOnly.apply(name, x, *sources) for x in gradients]  # type: ignore[misc]


def _no_second_derivative(name: str) -> NotImplementedError:
    return NotImplementedError(
        f"second derivatives: kernel {name!r} gives first derivatives only; remedy: kernel='reference', "
        "which gives derivatives of any order"
    )


def _differentiable(pieces: Any, tensors: Any) -> list[Any]:
    """What belongs to the tensors that may have a gradient (themselves, or vmap's axes), in the order of `wanted`."""
    q, k, v, sinks, biases = pieces[:5]
    layout = Layout(tensors[3] is not None, len(tensors[4]), ())
    return layout.row(q, k, v, sinks, [None] * layout.biases if biases is None else biases)


def _inner_batch(q: Tensor, dim: int | None) -> int:
    return q.shape[0] if dim is None else q.movedim(dim, 0).shape[1]


def _fold(x: Tensor, dim: int | None, size: int, batch: int, *, force: bool) -> Tensor:
    """Join vmap's axis (`dim`, of `size`) with the batch: (X * B, ...). What is one for all stays so, unless forced."""
    if dim is None and x.shape[0] == 1 and not force:
        return x
    x = x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
    return x.expand(size, batch, *x.shape[2:]).flatten(0, 1)


def _fold_all(pieces: tuple[Any, ...], dims: tuple[Any, ...], size: int, batch: int, *, learned: bool) -> list[Any]:
    """Fold every tensor of a flat call; `learned` ones must lead with the batch where their gradient is asked for."""
    q, k, v, sinks, biases, rest, *numbers = pieces

    def fold_list(tensors: list[Tensor], axes: list[int | None] | None, force: bool) -> list[Tensor]:
        each = axes or [None] * len(tensors)
        return [_fold(x, dim, size, batch, force=force) for x, dim in zip(tensors, each, strict=True)]

    folded = [_fold(x, dim, size, batch, force=True) for x, dim in zip((q, k, v), dims[:3], strict=True)]
    sinks = None if sinks is None else _fold(sinks, dims[3], size, batch, force=learned)
    return [*folded, sinks, fold_list(biases, dims[4], learned), fold_list(rest, dims[5], False), *numbers]
