"""Report attention that a model computes by hand, once it is known which axis is the heads'.

`HandwrittenTracer` recognises a product of weights and values. Which of its axes is the heads' may be known at once, or
from a later function; if not, when the module ends, it is guessed from the sizes of the module's input.
`F.scaled_dot_product_attention` with ambiguous axes waits here as well.

Letters: B batch, H heads, N queries, M keys, E head width of v.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from regard.errors import bad_value
from regard.heads.capture import unseen
from regard.heads.capture.handwritten import HandwrittenTracer, Weighed
from regard.heads.capture.handwritten_functions import DROPOUTS, IN_PLACE, LOG_SOFTMAXES, SOFTMAXES
from regard.heads.capture.module_stack import Frame
from regard.heads.capture.observed import ObservedCall
from regard.kernels import Call

if TYPE_CHECKING:
    from regard.heads.capture.capture import AttentionCapture

__all__ = ["HandwrittenCalls"]


class HandwrittenCalls:
    """The handwritten attention of a capture's model."""

    def __init__(self, capture: AttentionCapture, modules: list[nn.Module]) -> None:
        self.capture = capture
        self.tracer = HandwrittenTracer(modules, live=capture.changes)
        self.waiting: list[Weighed] = []  # products that were not reported yet

    def clear(self) -> None:
        """Forget everything."""
        self.waiting.clear()
        self.tracer.clear()

    def follow(self, frame: Frame, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call one of the tracer's functions, and report attention if it is computed or recognised by it."""
        tracer = self.tracer
        if func in SOFTMAXES or func in LOG_SOFTMAXES:
            is_function = isinstance(frame.module, (nn.Softmax, nn.LogSoftmax, nn.Dropout, nn.Identity))
            tracer.where = frame.parent if is_function and frame.parent is not None else frame
        elif func in IN_PLACE or func in DROPOUTS:
            tracer.before(func, args, kwargs)
        out = func(*args, **kwargs)
        product = tracer.see(func, args, kwargs, out)
        if product is None:
            return out
        if product.stream is None:
            product.stream = self.capture.streams.of(args)
        return self._product(frame, product, out)

    def wait_for_axes(
        self, frame: Frame, query: Tensor, key: Tensor, out: Tensor, call_in_order: Callable[[Tensor], Call]
    ) -> None:
        """Wait until the axes of the output of an attention function are known. `call_in_order` will be given the
        indices (B, H) into its flattened leading axes."""
        product = self.tracer.follow(out, query.shape[-2], key.shape[-2])
        product.where, product.sizes = frame, self.capture.frames.sizes()
        product.about, product.stream = call_in_order, self.capture.streams.of(query)
        self.waiting.append(product)

    def module_ended(self, frame: Frame) -> None:
        """Report what a module computed and what still waits, with the axes guessed from the sizes of its input. If
        heads are to be changed it is too late for that: an error, once the module around it has ended."""
        for product in list(self.waiting):
            if self.capture.changes:
                if frame is (product.where.parent or product.where):
                    raise _unknown_heads(product.where.name, product)
            elif product.where is frame:
                may_be_part = frame.unseen and _may_be_part(product) and not _is_square(product)
                if _routes_tokens(product) or may_be_part:
                    self.waiting.remove(product)
                else:
                    self._report(product)

    def _product(self, frame: Frame, product: Weighed, out: Any) -> Any:
        """A function computed a product of weights and values, or showed more of its axes; `out` is its result."""
        changes = self.capture.changes
        if not self._begin(frame, product) or product.done:
            return out
        if product.heads is None and changes:
            product.settle(frame.sizes)
        if product.heads is None:
            return out
        opened, axes = product.opened(out)
        known = sorted(axes) == ["e", "n", "x", "y"]
        batch = "y" if product.heads == "x" else "x"
        order = [axes.index(axis) for axis in (batch, product.heads, "n", "e")] if known else []
        product.output = opened.permute(order).detach() if known else None
        if not changes:
            if not _may_be_part(product):
                self._report(product)
            return out
        attention = self._report(product)
        if not known:
            raise _unknown_heads(attention.layer, product)
        heads = opened.permute(order)
        changed = self.capture.change(attention, heads)
        product.where.changed |= changed is not heads
        changed = changed.permute([order.index(i) for i in range(4)])
        return tuple(changed.unbind()) if isinstance(out, (tuple, list)) else changed.reshape(out.shape)

    def _begin(self, frame: Frame, product: Weighed) -> bool:
        """Let a product wait until its axes are known, if it does not yet. False if it is not to be reported."""
        if product.where is not None:
            return True
        if not self._is_new(product):
            return False
        product.where, product.sizes = frame, self.capture.frames.sizes()
        frame.tell()
        if self.capture.changes and (frame.unseen or not product.whole or _routes_tokens(product)):
            unseen.report_unreadable(self.capture, frame, unseen.IN_PARTS)
            return False
        self.waiting.append(product)
        return True

    def _is_new(self, product: Weighed) -> bool:
        """Whether the same weights were not multiplied into other values before, which would be the same attention. If
        heads are changed, every product is new: all outputs of a head are changed."""
        if product.origin is None:
            return True
        identity = _identity(product.weights)
        if product.origin.told is None or product.origin.told[0] != identity:
            product.origin.told = [identity, None]
            return True
        return self.capture.changes

    def _report(self, product: Weighed) -> ObservedCall:
        """Report a product to the capture, unless the same weights were reported before."""
        product.done = True
        self.waiting.remove(product)
        frame = product.where
        reported = None if product.origin is None else product.origin.told  # [identity of weights, ObservedCall]
        if reported is not None and reported[1] is not None and reported[0] == _identity(product.weights):
            return reported[1]
        with self.capture.graph(), torch._C.DisableTorchFunction():
            weights, values = product.ordered(), product.ordered_values() if self.capture.changes else None
        with torch.no_grad(), torch._C.DisableTorchFunction():
            if product.about is not None:
                call = product.about(weights[..., 0, 0])
                attention = self.capture.describe(frame, call.shape, product.stream, call=call, output=product.output)
            else:
                shape, output = tuple(weights.shape), product.output
                attention = self.capture.describe(frame, shape, product.stream, weights=weights, output=output)
                attention.values = product.values if values is None else values
                attention.unsure = "values whose axes are not known" if values is None else ""
            self.capture.projections.find(attention, frame)
            self.capture.projections.expect(attention, frame)
            self.capture.see(attention)
        if reported is not None:
            reported[1] = attention
        return attention


def _identity(weights: Tensor) -> tuple[int, int]:
    return weights.data_ptr(), weights.numel()


def _may_be_part(product: Weighed) -> bool:
    """Whether a product may be one part of an attention: unless all tokens of an input attend to all of them."""
    if product.about is not None or product.origin is None:
        return False
    lengths = product.where.lengths()
    return not _is_square(product) or product.origin.routed is not None or product.weights.shape[-1] not in lengths


def _routes_tokens(product: Weighed) -> bool:
    """Whether the same scores route tokens to learned slots: a mixture of experts, not attention."""
    return product.origin is not None and bool(product.origin.routed)


def _is_square(product: Weighed) -> bool:
    return product.whole and product.weights.shape[-2] == product.weights.shape[-1]


def _unknown_heads(layer: str, product: Weighed) -> ValueError:
    return bad_value(
        layer,
        expected="attention by hand whose heads can be told from the batch",
        received=f"weights of shape {tuple(product.weights.shape)}",
    )
