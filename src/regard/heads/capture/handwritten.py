"""Recognise attention written by hand: a softmax over keys, whose result is multiplied into values.

Notes on tensors (`handwritten_notes.py`) are passed on from one torch function to the next. A softmax puts `Softmaxed`
on its result; reshapes, masks and dropout pass the note on; its product with values is attention, and gets `Weighed`.
Weights come in any order: (B, H, N, M), (H, B, N, M), (B * H, N, M), (H * B, N, M). Which axis is the heads' follows
from what the model does next: before it merges heads it brings their axis next to the width of the values,

    (B, H, N, E) -> transpose(1, 2) -> (B, N, H, E) -> reshape -> (B, N, H * E)

and if it does not, from the sizes of the module's input.

Not every softmax that is multiplied into something is attention. Scores of tokens with learned keys (a codebook, a
router, the slots of a soft mixture of experts) are not, nor are weights on learned values: keys and values are computed
from tokens. Learned queries are attention (`Scores.learned`). `Origin` tells how the result of a softmax was used, so
that one which cannot be followed, or is multiplied in parts, can be reported.

Letters: B batch, H heads, N queries, M keys, E head width of v.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from regard.heads.capture.handwritten_functions import (
    ADDED_PRODUCTS,
    DIVISIONS,
    DROPOUTS,
    ELEMENTWISE,
    FUNCTIONS,
    IN_PLACE,
    PERMUTATIONS,
    PRODUCTS,
    SOFTMAXES,
    permutation,
    product_axes,
    splits_leading_axes_only,
)
from regard.heads.capture.handwritten_notes import (
    Constant,
    Derived,
    Logged,
    Note,
    Origin,
    Projected,
    Scores,
    Softmaxed,
    Weighed,
    batch_of,
    folded,
)
from regard.heads.capture.tensor_notes import TensorNotes, tensors_in

__all__ = ["FUNCTIONS", "SOFTMAXES", "HandwrittenTracer", "Weighed", "batch_of", "folded"]

Args = tuple[Any, ...]
Kwargs = dict[str, Any]

_SETITEM = Tensor.__setitem__
LOW = -9e3  # masks add -1e4, -1e9, -inf or the lowest number; no real score is so low
LEADING_AXES = ([], ["xy"], ["x", "y"])  # of weights with 2, 3 and 4 axes


class HandwrittenTracer:
    """Follows the torch functions of one thread. Notes are kept beside the tensors, which are not touched.

    Args:
        modules: of the model; their parameters, and buffers (K, E), which may be codebooks, do not depend on its input.
        live: whether the weights and values that are noted keep their gradients.
    """

    def __init__(self, modules: list[nn.Module], live: bool = False) -> None:
        self.live = live
        self.notes: TensorNotes[Note] = TensorNotes()
        self.modules = modules
        self.origins: list[Origin] = []  # all softmaxes, in order, until the caller has asked how they were used
        self.where: Any = None  # set by the caller: the frame of the module call in progress

    @cached_property
    def fixed(self) -> dict[int, Tensor]:
        """The parameters, and the buffers that may be codebooks, by their ids."""
        parameters = {id(x): x for module in self.modules for x in module._parameters.values() if x is not None}
        buffers = [x for module in self.modules if module._buffers for x in module._buffers.values()]
        return parameters | {id(x): x for x in buffers if x is not None and x.dim() == 2}

    def clear(self) -> None:
        """Forget everything."""
        self.notes.clear()
        self.origins.clear()

    def computed(self, out: Any) -> None:
        """Note what a module gave whose functions were not followed: what projections give, and sums of it."""
        for x in tensors_in((out,)):
            if x.is_floating_point() and x not in self.notes:
                self.notes.put(x, Projected())

    def see(self, func: Any, args: Args, kwargs: Kwargs, out: Any) -> Weighed | None:
        """Follow one of `FUNCTIONS`. Returns a `Weighed` if attention was computed, or more became known of it."""
        weighed = getattr(self, FUNCTIONS[func])(func, args, kwargs, out)
        if weighed is None:
            self.pass_by(func, args, out)
        return weighed

    def pass_by(self, func: Any, args: Args, out: Any) -> None:
        """Follow any other function: elementwise results of scores are scores; of weights they are not followed."""
        if func is _SETITEM:  # the tensor now holds what was written into it
            out = args[0]
            self.notes.drop(out)
        if not isinstance(out, Tensor) or out in self.notes:
            return
        constant, any_tensor = out.is_floating_point(), False
        for x in tensors_in(args):
            note, any_tensor = self.notes.get(x), True
            if note is None:
                constant = constant and id(x) in self.fixed
                continue
            constant = constant and self.is_constant(x)
            smaller = out.numel() < x.numel()
            if isinstance(note, (Softmaxed, Derived)) and (func in PRODUCTS or not smaller):
                note.origin.lost = note.origin.lost or getattr(func, "__name__", str(func))
                self.notes.put(out, Derived(note.origin))
                return
            if isinstance(note, (Scores, Projected)) and func not in PRODUCTS and out.shape == x.shape:
                self.notes.put(out, note)
                return
            if isinstance(note, Scores) and func not in PRODUCTS and not smaller:  # padded, joined, in other strides
                self.notes.put(out, Scores(note.constant))
                return
        if constant and any_tensor:
            self.notes.put(out, Constant())

    def is_constant(self, x: object) -> bool:
        """Whether a tensor is known not to depend on the model's input."""
        if id(x) in self.fixed:
            return True
        note = self.notes.get(x)
        return isinstance(note, Constant) or (isinstance(note, Scores) and note.constant)

    def before(self, func: Any, args: Args, kwargs: Kwargs) -> None:
        """Copy the noted weights before a function writes over them."""
        note = self._note_of_first(args)
        in_place = kwargs.get("inplace", len(args) > 3 and args[3]) if func in DROPOUTS else func in IN_PLACE
        if isinstance(note, Softmaxed) and in_place:
            note.weights = note.weights.clone()

    def follow(self, out: Tensor, queries: int, keys: int) -> Weighed:
        """Follow the output (X, Y, N, E) or (X, N, E) of attention whose weights were not built. In their place stand
        indices of batch and head, (X, Y, 1, 1), from which the order of axes will be known."""
        lead = out.shape[:-2]
        axes = (["xy"] if len(lead) == 1 else ["x", "y"]) + ["n", "e"]
        indices = torch.arange(lead.numel(), device=out.device).view(*lead, 1, 1)
        note = Weighed(indices, axes, queries=queries, keys=keys)
        self.notes.put(out, note)
        return note

    def _noted(self, x: Tensor) -> Tensor:
        return x if self.live else x.detach()

    def _graph(self) -> torch.set_grad_enabled:
        return torch.set_grad_enabled(self.live and torch.is_grad_enabled())

    def _note_of_first(self, args: Args) -> Note | None:
        return self.notes.get(args[0]) if len(args) else None

    # From queries and keys to scores

    def _put_scores(self, left: Tensor, right: Tensor, out: Any, axes: tuple[list[int], list[int]]) -> None:
        """Note a product of two tensors; `axes` of the result that come from the left one alone, and from the right."""
        if not isinstance(out, Tensor):
            return
        fixed = self.is_constant(left), self.is_constant(right)
        note = Scores(constant=all(fixed))
        if fixed[0] != fixed[1] and out.numel():
            strides, step = [0] * out.dim(), 1
            for axis in axes[0] if fixed[0] else axes[1]:
                strides[axis], step = step, step * out.shape[axis]
            note.learned = torch.zeros(step, device=out.device).as_strided(out.shape, strides)
        self.notes.put(out, note)

    def _distances(self, func: Any, args: Args, kwargs: Kwargs, out: Any) -> None:
        if len(args) > 1 and isinstance(out, Tensor):
            self._put_scores(args[0], args[1], out, ([out.dim() - 2], [out.dim() - 1]))

    def _linear(self, func: Any, args: Args, kwargs: Kwargs, out: Any) -> None:
        weight = kwargs.get("weight", args[1] if len(args) > 1 else None)
        if self.is_constant(weight) or not isinstance(out, Tensor) or not args:
            self.notes.put(out, Constant() if args and self.is_constant(args[0]) else Projected())
        elif isinstance(weight, Tensor):
            self._put_scores(args[0], weight, out, (list(range(out.dim() - 1)), [out.dim() - 1]))

    # From scores to weights

    def _softmax(self, func: Any, args: Args, kwargs: Kwargs, out: Any) -> None:
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        if not isinstance(out, Tensor) or not isinstance(dim, int) or out.dim() < 2 or not out.numel():
            return
        axis = dim if dim < 0 else dim - out.dim()
        scores, weights = kwargs.get("input", next(iter(args), None)), self._noted(out)
        if not isinstance(scores, Tensor) or not scores.is_floating_point():
            return
        origin = self._origin(scores, axis)
        if origin is None:
            return
        # If the lowest number masks a whole row, its weights are equal although it may see nothing: they count as 0.
        sees_nothing = scores.detach().amax(axis, keepdim=True) <= LOW
        if sees_nothing.any():
            weights = weights.masked_fill(sees_nothing, 0.0)
        self.notes.put(out, Softmaxed(weights, axis, origin))

    def _origin(self, scores: Tensor, axis: int) -> Origin | None:
        """The origin that a softmax of scores begins; None if it cannot be attention."""
        note = self.notes.get(scores)
        if isinstance(note, Projected):
            return None  # the softmax of a projection: a classifier or a gate
        origin = Origin(scores.shape[axis], self.where, self.where)
        if isinstance(note, Scores):
            origin.scored, origin.constant = True, note.constant
            if note.learned is not None:
                if note.learned.stride(axis):
                    note.routed.append(True)
                    return None  # learned keys: a codebook, or a router
                origin.routed = note.routed
        self.origins.append(origin)
        return origin

    def _log_softmax(self, func: Any, args: Args, kwargs: Kwargs, out: Any) -> None:
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        scores = kwargs.get("input", next(iter(args), None))
        if isinstance(out, Tensor) and isinstance(dim, int) and out.dim() > 1 and isinstance(scores, Tensor):
            axis = dim if dim < 0 else dim - out.dim()
            origin = self._origin(scores, axis)
            if origin is not None:
                origin.scored = False  # a logarithm is most often used for a loss
                self.notes.put(out, Logged(axis, origin))

    def _exp(self, func: Any, args: Args, kwargs: Kwargs, out: Any) -> None:
        note = self._note_of_first(args)
        if isinstance(note, Logged) and isinstance(out, Tensor):
            self.notes.put(out, Softmaxed(self._noted(out), note.axis, note.origin))

    # From weights to weights

    def _cast(self, func: Any, args: Args, kwargs: Kwargs, out: Any) -> None:
        """Dropout and changes of dtype: the noted weights stay what they were before."""
        note = self._note_of_first(args)
        if note is not None and isinstance(out, Tensor) and out.shape == args[0].shape:
            self.notes.put(out, note)

    def _shape(self, func: Any, args: Args, kwargs: Kwargs, out: Any) -> Weighed | None:
        """Reshapes and masks: the noted weights, which are those before dropout, are reshaped and masked as well."""
        note = self._note_of_first(args)
        if isinstance(note, Weighed):
            return self._moved(note, func, args, kwargs, out)
        if isinstance(note, Projected):
            self.notes.put(out, note)
        if isinstance(note, Scores) and isinstance(out, Tensor):
            learned = note.learned
            if learned is not None and func not in ELEMENTWISE:
                with torch.no_grad():
                    try:
                        learned = func(learned, *args[1:], **kwargs)
                    except RuntimeError:  # no view with these strides
                        learned = func(learned.contiguous(), *args[1:], **kwargs)
            self.notes.put(out, Scores(note.constant, learned, note.routed))
        if isinstance(note, Softmaxed):
            self._reshape_weights(note, func, args, kwargs, out)
        return None

    def _reshape_weights(self, note: Softmaxed, func: Any, args: Args, kwargs: Kwargs, out: Any) -> None:
        axis = note.axis
        if func in PERMUTATIONS:
            axis = permutation(func, args, kwargs).index(note.weights.dim() + axis) - note.weights.dim()
        elif axis != -1 and getattr(out, "shape", None) != args[0].shape:
            return
        elif (
            isinstance(out, Tensor)
            and out.dim() > args[0].dim()
            and 1 in out.shape[-2:]
            and not splits_leading_axes_only(args[0], out)
        ):
            return  # weights of one thing, reshaped to a row: a mixture, not attention
        with self._graph():
            weights = func(note.weights, *args[1:], **kwargs)
        pairs = [(out, weights)] if isinstance(out, Tensor) else zip(out, weights, strict=True)
        for result, undropped in pairs:
            if undropped.dim() >= -axis:
                self.notes.put(result, Softmaxed(undropped, axis, note.origin))

    def _times(self, func: Any, args: Args, kwargs: Kwargs, out: Any) -> None:
        """Weights times (or divided by) something of the same shape: a mask of heads or padding, or their sum."""
        if len(args) < 2:
            return
        left, right = args[0], args[1]
        weights_on_the_right = isinstance(self.notes.get(right), Softmaxed)
        if func not in DIVISIONS and weights_on_the_right and not isinstance(self.notes.get(left), Softmaxed):
            left, right = right, left
        note = self.notes.get(left)
        if isinstance(note, Softmaxed) and isinstance(out, Tensor) and out.shape == note.weights.shape:
            right = self._noted(right) if isinstance(right, Tensor) else right
            with self._graph():
                weights = note.weights / right if func in DIVISIONS else note.weights * right
            self.notes.put(out, Softmaxed(weights, note.axis, note.origin))

    def _written_over(self, func: Any, args: Args, kwargs: Kwargs, out: Any) -> None:
        """The same tensor holds something else: its note is dropped, unless the noted weights can be changed too."""
        note = self._note_of_first(args)
        if isinstance(note, Softmaxed) and func is Tensor.masked_fill_:
            with self._graph():
                weights = note.weights.masked_fill(*args[1:], **kwargs)
                self.notes.put(args[0], Softmaxed(weights, note.axis, note.origin))
        elif note is not None and not (isinstance(note, (Scores, Projected)) and func is Tensor.masked_fill_):
            self.notes.drop(args[0])

    # From weights and values to attention

    def _product(self, func: Any, args: Args, kwargs: Kwargs, out: Any) -> Weighed | None:
        """matmul, bmm: weights (..., N, M) by values (..., M, E); or values (..., E, M) by weights (..., M, N)."""
        if func in ADDED_PRODUCTS:
            args = args[1:]
        if len(args) < 2 or not isinstance(args[0], Tensor) or not isinstance(args[1], Tensor):
            return None
        left, right = self.notes.get(args[0]), self.notes.get(args[1])
        same_dims = args[0].dim() == args[1].dim()
        if same_dims and isinstance(left, Softmaxed) and left.axis == -1:
            note, weights, values, last = left, left.weights, args[1], ["n", "e"]
        elif same_dims and isinstance(right, Softmaxed) and right.axis == -2:
            note, weights, values, last = right, right.weights.mT, args[0].mT, ["e", "n"]
        else:
            if not isinstance(left, (Softmaxed, Derived)) and not isinstance(right, (Softmaxed, Derived)):
                self._put_scores(args[0], args[1], out, product_axes(args[0].dim(), args[1].dim()))
            return None
        if not self._are_values(args[1] if note is left else args[0], note):
            return None
        lead = weights.dim() - 2
        weighed = Weighed(weights, (LEADING_AXES[lead] if lead < 3 else ["?"] * lead) + last)
        weighed.values = self._noted(values)
        return self._put_weighed(weighed, note, out)

    def _are_values(self, values: Tensor, note: Softmaxed) -> bool:
        """Whether the other factor holds values: nothing learned, and no weights."""
        other = self.notes.get(values)
        if isinstance(other, (Softmaxed, Derived)):
            note.origin.lost = other.origin.lost = "a product of weights with weights"
            return False
        if self.is_constant(values) and not note.origin.constant:
            note.origin.used = True
            return False
        return True

    def _put_weighed(self, weighed: Weighed, note: Softmaxed, out: Any) -> Weighed:
        weighed.origin, weighed.whole = note.origin, note.whole
        if note.whole:
            note.origin.used = True
        else:
            note.origin.parts += 1
        self.notes.put(out, weighed)
        return weighed

    def _einsum(self, func: Any, args: Args, kwargs: Kwargs, out: Any) -> Weighed | None:
        """einsum of weights and values, as letters: mine of the weights, other of the values."""
        if len(args) == 2 and isinstance(args[1], (list, tuple)):
            args = (args[0], *args[1])
        if len(args) != 3 or not isinstance(args[0], str) or "->" not in args[0]:
            return None
        letters = _einsum_letters(args[0], args[1].dim(), args[2].dim())
        if letters is None:
            return None
        first, second, output = letters
        left, right = self.notes.get(args[1]), self.notes.get(args[2])
        if isinstance(left, Softmaxed):
            note, values, mine, other = left, args[2], first, second
        elif isinstance(right, Softmaxed):
            note, values, mine, other = right, args[1], second, first
        else:
            if isinstance(out, Tensor) and out.dim() == len(output):
                ours, theirs = (
                    [i for i, c in enumerate(output) if c in a and c not in b]
                    for a, b in ((first, second), (second, first))
                )
                self._put_scores(args[1], args[2], out, (ours, theirs))
            return None
        key = mine[note.axis]
        width = [c for c in output if c in other and c not in mine]
        query = [c for c in mine if c in output and c not in other]
        shared = [c for c in mine if c in other and c in output]
        if len(query) == 2 and len(shared) == 1:  # one kv head for all: only the queries have an axis of heads
            shared, query = [c for c in mine if c in (shared[0], query[0])], query[1:]
        if key in output or key not in other or len(width) != 1 or len(query) != 1 or len(shared) > 2:
            return None
        if not self._are_values(values, note):
            return None
        weights = note.weights.permute(*(mine.index(c) for c in [*shared, query[0], key]))
        axes = dict(zip(shared, LEADING_AXES[len(shared)], strict=True)) | {query[0]: "n", width[0]: "e"}
        weighed = Weighed(weights, [axes[c] for c in output])
        order = [*shared, key, width[0]]
        noted = self._noted(values).permute(*(other.index(c) for c in order if c in other))
        for axis, letter in enumerate(order):  # (one kv head for all has no axis of heads)
            noted = noted if letter in other else noted.unsqueeze(axis)
        weighed.values = noted
        weighed.look_for_heads()
        return self._put_weighed(weighed, note, out)

    def _moved(self, note: Weighed, func: Any, args: Args, kwargs: Kwargs, out: Any) -> Weighed | None:
        """Follow the weighted values until the axis of heads is known."""
        axes = note.axes
        if note.heads is not None or "?" in axes:
            return None
        if isinstance(out, (tuple, list)):
            return _split_into_heads(note, func, args, kwargs, out)
        if not isinstance(out, Tensor):
            return None
        if func in PERMUTATIONS:
            note.axes = [axes[i] for i in permutation(func, args, kwargs)]
        elif out.shape == args[0].shape:
            pass
        elif axes == ["n", "xy", "e"] and out.dim() == 3 and out.shape[0] == args[0].shape[0]:
            # merged at once: (N, B * H, E) -> (N, B, H * E)
            note.weights, note.heads = note.weights.unflatten(0, (out.shape[1], -1)), "y"
            note.axes = ["n", "x", "ye"]
        elif axes == ["xy", "n", "e"] and out.dim() == 4 and out.shape[2:] == args[0].shape[1:]:
            note.weights, note.axes = note.weights.unflatten(0, tuple(out.shape[:2])), ["x", "y", "n", "e"]
        else:
            return None
        self.notes.put(out, note)
        note.look_for_heads()
        return note if note.heads else None


def _einsum_letters(equation: str, first_dims: int, second_dims: int) -> tuple[str, str, str] | None:
    """The letters of both factors and of the result, "..." replaced by capitals; None if that is not possible."""
    inputs, _, output = equation.replace(" ", "").partition("->")
    first, _, second = inputs.partition(",")
    if "..." not in inputs:
        return first, second, output
    count = first_dims - len(first.replace("...", ""))
    if count != second_dims - len(second.replace("...", "")) or count < 0:
        return None
    first, second, output = (letters.replace("...", "ABCDEFG"[:count]) for letters in (first, second, output))
    return first, second, output


def _split_into_heads(note: Weighed, func: Any, args: Args, kwargs: Kwargs, out: Any) -> Weighed | None:
    """Weighted values that are split into heads, to be concatenated."""
    tensor, parts = args[0], len(out)
    if func in (torch.unbind, Tensor.unbind) and len(note.axes) == 4:  # (H, B, N, E) into H times (B, N, E)
        dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
        axis = note.axes[dim]
        note.heads = axis if axis in ("x", "y") else None
        note.axes = [axis, *(other for other in note.axes if other != axis)]
    elif note.axes == ["xy", "n", "e"] and parts > 1 and out[0].shape[0] * parts == tensor.shape[0]:  # (H * B, N, E)
        note.weights, note.heads = note.weights.unflatten(0, (parts, -1)), "x"
        note.axes = ["x", "y", "n", "e"]
    else:
        return None
    return note
