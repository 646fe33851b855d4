"""Sense of attention written by hand: a softmax over keys, whose result is multiplied into values.

Tensors that matter carry a note from one torch function to the next. A softmax gives its result a `Softmaxed`; what
reshapes, masks or drops it passes the note on; a product of it with values is attention, and gives its result a
`Weighed`. Weights come in any order: (B, H, N, M), (H, B, N, M), (B * H, N, M), (H * B, N, M). Which axis is the heads'
is told by what the model does next: before it merges heads it brings their axis beside the values' width,

    (B, H, N, E) -> transpose(1, 2) -> (B, N, H, E) -> reshape -> (B, N, H * E)

and where it does not, by the sizes of the module's input.

Not every softmax that is multiplied into something is attention. Scores of tokens with learned keys (a codebook, a
router, the slots of a soft mixture of experts) are not, nor are weights on learned values: keys and values are made of
tokens. Learned queries are attention (`Scores.learned`). What became of a softmax is known by its `Origin`: where its
result cannot be followed, or is multiplied in parts, whoever looks can say so.

Letters: B batch, H heads, N queries, M keys, E head width of v.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["FUNCTIONS", "SOFTMAXES", "HandwrittenTracer", "Origin", "Weighed", "batch_of", "folded"]


@dataclass
class Scores:
    """On the product of two tensors, and on what is made of it number by number."""

    constant: bool = False  # neither of them depends on the model's input
    # Where one of them does not: a tensor of the shape of the scores, of stride 0 but along the axes of that one
    learned: Tensor | None = None
    routed: list[bool] = field(default_factory=list)  # of all that are made of one product: some softmax is over these


@dataclass
class Origin:
    """One softmax, and what became of its result."""

    keys: int  # M
    where: Any = None  # for whoever looks: in which call of which module
    home: Any = None  # where it began; it may be handed to the call around it
    scored: bool = False  # whether its scores are known to be products
    constant: bool = False  # whether its scores do not depend on the model's input
    routed: list[bool] | None = None  # of learned queries: whether the same scores route tokens to these
    used: bool = False  # by a product with values, all keys at once
    parts: int = 0  # products with some of the keys
    lost: str = ""  # where it could not be followed: the name of a function
    told: Any = None  # for whoever looks: the attention that was made of it, and by which weights it is known


@dataclass
class Softmaxed:
    """On the weights: what they were before dropout, in the same shape; and the axis that sums to 1, from the end."""

    weights: Tensor
    axis: int
    origin: Origin

    @property
    def whole(self) -> bool:
        """Whether all keys are there."""
        return self.weights.shape[self.axis] == self.origin.keys


@dataclass
class Derived:
    """On what is computed from weights in a way that is not followed."""

    origin: Origin


class Projected:
    """On the output of a linear projection, and on what is made of it number by number."""


class Constant:
    """On what is computed from the model's parameters alone."""


@dataclass
class Logged:
    """On the logarithm of weights."""

    axis: int
    origin: Origin


@dataclass
class Weighed:
    """On values after they were weighed: the weights, and what is known of the axes."""

    weights: Tensor  # (X, Y, N, M), X and Y being B and H in some order; (X, N, M); or with more axes in front
    axes: list[str]  # of the tensor that carries the note: "x", "y" (or "xy"), "n", "e"
    heads: str | None = None  # "x" or "y", once it is known
    values: Tensor | None = None  # (..., M, E), leading axes as those of the weights
    queries: int | None = None  # N, where the weights stand for others
    keys: int | None = None  # M, where the weights stand for others
    where: Any = None  # for whoever looks: in which call of which module
    about: Any = None  # and whatever else it wants to know when the heads are known
    done: bool = False
    sizes: list[tuple[int, int]] = field(default_factory=list)  # of the inputs of the calls in progress
    origin: Origin | None = None
    whole: bool = True  # whether all keys of the softmax are there
    output: Tensor | None = None  # (B, H, N, E), where it is known before it is told of
    stream: Tensor | None = None  # (B, N): the ids that the queries are made of, where they are followed

    def ordered(self) -> Tensor:
        """The weights as (B, H, N, M), by the best that is known."""
        w = self.weights
        if w.dim() == 4:
            return w.transpose(0, 1) if (self.heads or self.guess()) == "x" else w
        if w.dim() == 2:
            return w[None, None]
        batch = self.batch(self.sizes)
        if w.dim() == 3:
            return w.unflatten(0, (folded(w.shape[0], batch, self.sizes), -1))
        return w.flatten(1, -3) if batch == w.shape[0] else w.flatten(0, -4)  # heads in groups, or batches in windows

    def batch(self, sizes: Sequence[tuple[int, int]]) -> int | None:
        """B, by the sizes of inputs; None where they do not tell."""
        return batch_of(self.queries or self.weights.shape[-2], self.keys or self.weights.shape[-1], sizes)

    def guess(self) -> str | None:
        """Which axis is the heads', by the sizes of the module's input; None where these do not tell."""
        if self.weights.dim() != 4:
            return None
        x, y = self.weights.shape[:2]
        batch = self.batch(self.sizes)
        if batch is None or (x == batch) == (y == batch):
            return None
        return "y" if x == batch else "x"

    def settle(self, sizes: Sequence[tuple[int, int]]) -> None:
        """Decide at once, if the sizes tell: for whoever changes what comes of it before anything else is done with it.
        With one axis less or more, by the `sizes` of the input of the module that computes it alone."""
        w = self.weights
        if w.dim() == 4:
            self.heads = self.guess()
        elif w.dim() != 2 and self.batch(sizes) == w.shape[0]:
            self.weights, self.heads = w.reshape(w.shape[0], -1, *w.shape[-2:]), "y"  # one head, or heads in groups
            self.values = None if self.values is None else self.values.reshape(w.shape[0], -1, *self.values.shape[-2:])
            self.axes = ["x", *["y"] * (w.dim() - 3), *self.axes[-2:]]

    def opened(self, out: Tensor | Sequence[Tensor]) -> tuple[Tensor, list[str]]:
        """What carries the note, with an axis of its own for B, H, N and E each, and which is which."""
        whole = out if isinstance(out, Tensor) else torch.stack(tuple(out))
        axes, heads = self.axes, self.weights.shape[1]
        if axes[-1] == "ye":  # heads that were merged
            return whole.unflatten(-1, (heads, -1)), [*axes[:-1], "y", "e"]
        if axes[0] == "x" and axes.count("y") != 1:
            return whole.reshape(whole.shape[0], heads, *whole.shape[-2:]), ["x", "y", *axes[-2:]]
        return whole, axes


Note = Scores | Softmaxed | Derived | Projected | Constant | Logged | Weighed


def batch_of(queries: int, keys: int, sizes: Sequence[tuple[int, int]]) -> int | None:
    """B, by inputs (B, N, W) or (N, B, W), the innermost call's first, that have as many tokens as there are queries,
    or else keys (queries may be learned); None where they do not tell."""
    for tokens in (queries, keys):
        for first, second in sizes:
            if tokens in (first, second):
                return first if second == tokens else second
    return None


def folded(size: int, batch: int | None, sizes: Sequence[tuple[int, int]]) -> int:
    """B of an axis B * H: that of the inputs that have these tokens, or of the innermost that there is; else 1."""
    known = [batch, *(first for first, _ in sizes[:1])]
    return next((one for one in known if one and size % one == 0), 1)


LOW = -9e3  # what people hide keys by is -1e4, -1e9, -inf or the lowest number; no score is so low


class HandwrittenTracer:
    """Follows the torch functions of one thread. Notes are kept beside the tensors, none of which is touched.

    Args:
        model: its parameters, and buffers (K, E), which may be codebooks, do not depend on what it is given.
    """

    def __init__(self, model: nn.Module) -> None:
        self.noted: dict[int, tuple[weakref.ref[Tensor], Note]] = {}
        self.fixed = {id(x): x for x in (*model.parameters(), *(b for b in model.buffers() if b.dim() == 2))}
        self.origins: list[Origin] = []  # in the order of the softmaxes, until somebody asks what became of them
        self.where: Any = None  # of whoever looks: the call of a module that is in progress

    def clear(self) -> None:
        """Forget everything."""
        self.noted.clear()
        self.origins.clear()

    def see(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Weighed | None:
        """Follow one torch function. Gives a `Weighed` where attention was computed, or more became known of it."""
        weighed = getattr(self, FUNCTIONS[func])(func, args, kwargs, out)
        if weighed is None:
            self.pass_by(func, args, out)
        return weighed

    def pass_by(self, func: Any, args: tuple[Any, ...], out: Any) -> None:
        """Any other function: what is made of scores number by number are scores; of weights, nobody knows."""
        if func is Tensor.__setitem__:  # what is written into a tensor is what the tensor is
            out = args[0]
            self.noted.pop(id(out), None)
        if not isinstance(out, Tensor) or id(out) in self.noted:
            return
        constant, found = True, False
        for x in _tensors(args):
            note, found = self.note(x), True
            constant = constant and self.is_constant(x)
            less = out.numel() < x.numel()
            if isinstance(note, (Softmaxed, Derived)) and (func in _PRODUCTS or not less):
                note.origin.lost = note.origin.lost or getattr(func, "__name__", str(func))
                self._put(out, Derived(note.origin))
                return
            if isinstance(note, (Scores, Projected)) and func not in _PRODUCTS and out.shape == x.shape:
                self._put(out, note)
                return
            if (
                isinstance(note, Scores) and func not in _PRODUCTS and not less
            ):  # padded, beside others, in other strides
                self._put(out, Scores(note.constant))
                return
        if constant and found and out.is_floating_point():
            self._put(out, Constant())

    def is_constant(self, x: object) -> bool:
        """Whether a tensor is known not to depend on what the model is given."""
        if id(x) in self.fixed:
            return True
        note = self.note(x)
        return isinstance(note, Constant) or (isinstance(note, Scores) and note.constant)

    def before(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """What is about to write over weights must not write over those that are remembered."""
        note = self._first(args)
        in_place = kwargs.get("inplace", len(args) > 3 and args[3]) if func in _DROPOUTS else func in _IN_PLACE
        if isinstance(note, Softmaxed) and in_place:
            note.weights = note.weights.clone()

    def follow(self, out: Tensor, queries: int, keys: int) -> Weighed:
        """Follow the output (X, Y, N, E) or (X, N, E) of an attention whose weights nobody has. In their place stand
        the numbers of texts and heads, from which their order will be known."""
        lead = out.shape[:-2]
        axes = (["xy"] if len(lead) == 1 else ["x", "y"]) + ["n", "e"]
        numbers = torch.arange(lead.numel(), device=out.device).view(*lead, 1, 1)
        note = Weighed(numbers, axes, queries=queries, keys=keys)
        self._put(out, note)
        return note

    def note(self, x: object) -> Note | None:
        """The note on a tensor."""
        entry = self.noted.get(id(x))
        return entry[1] if entry is not None and entry[0]() is x else None

    def _first(self, args: tuple[Any, ...]) -> Note | None:
        return self.note(args[0]) if len(args) else None

    def _put(self, x: Any, note: Note) -> None:
        if isinstance(x, Tensor):
            number, noted = id(x), self.noted
            noted[number] = weakref.ref(x, lambda gone: _forget(noted, number, gone)), note

    # From queries and keys to scores

    def _scores(self, left: Tensor, right: Tensor, out: Any, axes: tuple[list[int], list[int]]) -> None:
        """A product of two tensors; `axes` of the result that come of the left one alone, and of the right one."""
        if not isinstance(out, Tensor):
            return
        fixed = self.is_constant(left), self.is_constant(right)
        note = Scores(constant=all(fixed))
        if fixed[0] != fixed[1] and out.numel():
            theirs, strides, step = axes[0] if fixed[0] else axes[1], [0] * out.dim(), 1
            for axis in theirs:
                strides[axis], step = step, step * out.shape[axis]
            note.learned = torch.zeros(step, device=out.device).as_strided(out.shape, strides)
        self._put(out, note)

    def _distances(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        if len(args) > 1 and isinstance(out, Tensor):
            self._scores(args[0], args[1], out, ([out.dim() - 2], [out.dim() - 1]))

    def _linear(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        weight = kwargs.get("weight", args[1] if len(args) > 1 else None)
        if self.is_constant(weight) or not isinstance(out, Tensor) or not args:
            self._put(out, Constant() if args and self.is_constant(args[0]) else Projected())
        elif isinstance(weight, Tensor):
            self._scores(args[0], weight, out, (list(range(out.dim() - 1)), [out.dim() - 1]))

    # From scores to weights

    def _softmax(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        if not isinstance(out, Tensor) or not isinstance(dim, int) or out.dim() < 2 or not out.numel():
            return
        axis = dim if dim < 0 else dim - out.dim()
        scores, weights = kwargs.get("input", next(iter(args), None)), out.detach()
        # Masks of the lowest number everywhere make a row of equal weights: it sees nothing.
        if not isinstance(scores, Tensor) or not scores.is_floating_point():
            return
        origin = self._begun(scores, axis)
        if origin is None:
            return
        blind = scores.detach().amax(axis, keepdim=True) <= LOW
        self._put(out, Softmaxed(weights.masked_fill(blind, 0.0) if blind.any() else weights, axis, origin))

    def _begun(self, scores: Tensor, axis: int) -> Origin | None:
        """What a softmax of scores begins; None where it cannot be attention."""
        note = self.note(scores)
        if isinstance(note, Projected):
            return None  # a projection, softmaxed as it is: a classifier or a gate
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

    def _log_softmax(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        scores = kwargs.get("input", next(iter(args), None))
        if isinstance(out, Tensor) and isinstance(dim, int) and out.dim() > 1 and isinstance(scores, Tensor):
            axis = dim if dim < 0 else dim - out.dim()
            origin = self._begun(scores, axis)
            if origin is not None:
                origin.scored = False  # (what is most often wanted of a logarithm is a loss)
                self._put(out, Logged(axis, origin))

    def _exp(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        note = self._first(args)
        if isinstance(note, Logged) and isinstance(out, Tensor):
            self._put(out, Softmaxed(out.detach(), note.axis, note.origin))

    # From weights to weights

    def _cast(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Dropout and changes of dtype: the weights are what they were before."""
        note = self._first(args)
        if note is not None and isinstance(out, Tensor) and out.shape == args[0].shape:
            self._put(out, note)

    def _shape(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Weighed | None:
        """What changes the numbers or the shape of weights is done to the undropped ones too."""
        note = self._first(args)
        if isinstance(note, Weighed):
            return self._moved(note, func, args, kwargs, out)
        if isinstance(note, Projected):
            self._put(out, note)
        if isinstance(note, Scores) and isinstance(out, Tensor):
            learned = note.learned
            if learned is not None and func not in _NUMBERS:
                with torch.no_grad():
                    try:
                        learned = func(learned, *args[1:], **kwargs)
                    except RuntimeError:  # a view that is none with these strides
                        learned = func(learned.contiguous(), *args[1:], **kwargs)
            self._put(out, Scores(note.constant, learned, note.routed))
        if isinstance(note, Softmaxed):
            axis = note.axis
            if func in _ORDERS:
                axis = _order(func, args, kwargs).index(note.weights.dim() + axis) - note.weights.dim()
            elif axis != -1 and getattr(out, "shape", None) != args[0].shape:
                return None
            elif (
                isinstance(out, Tensor)
                and out.dim() > args[0].dim()
                and 1 in out.shape[-2:]
                and not _leading_axes_alone(args[0], out)
            ):
                return None  # weights of one thing, made to look like a row: a mixture, not attention
            with torch.no_grad():
                weights = func(note.weights, *args[1:], **kwargs)
            parts = [(out, weights)] if isinstance(out, Tensor) else zip(out, weights, strict=True)
            for part, mine in parts:
                if mine.dim() >= -axis:
                    self._put(part, Softmaxed(mine, axis, note.origin))
        return None

    def _times(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Weights times (or by) something of the same shape: a mask of heads, or of padding, or their sum."""
        if len(args) < 2:
            return
        left, right = args[0], args[1]
        if (
            func not in _DIVISIONS
            and isinstance(self.note(right), Softmaxed)
            and not isinstance(self.note(left), Softmaxed)
        ):
            left, right = right, left
        note = self.note(left)
        if isinstance(note, Softmaxed) and isinstance(out, Tensor) and out.shape == note.weights.shape:
            right = right.detach() if isinstance(right, Tensor) else right
            with torch.no_grad():
                weights = note.weights / right if func in _DIVISIONS else note.weights * right
            self._put(out, Softmaxed(weights, note.axis, note.origin))

    def _written_over(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """The tensor is the same, and what it holds is not: its note goes, unless the weights can follow."""
        note = self._first(args)
        if isinstance(note, Softmaxed) and func is Tensor.masked_fill_:
            with torch.no_grad():
                weights = note.weights.masked_fill(*args[1:], **kwargs)
                self._put(args[0], Softmaxed(weights, note.axis, note.origin))
        elif note is not None and not (isinstance(note, (Scores, Projected)) and func is Tensor.masked_fill_):
            self.noted.pop(id(args[0]), None)

    # From weights and values to attention

    def _product(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Weighed | None:
        """matmul, bmm: weights (..., N, M) by values (..., M, E); or values (..., E, M) by weights (..., M, N)."""
        if func in _SUMS:
            args = args[1:]
        if len(args) < 2 or not isinstance(args[0], Tensor) or not isinstance(args[1], Tensor):
            return None
        left, right = self.note(args[0]), self.note(args[1])
        same = args[0].dim() == args[1].dim()  # (values have the axes that weights have)
        if same and isinstance(left, Softmaxed) and left.axis == -1:
            note, weights, values, last = left, left.weights, args[1], ["n", "e"]
        elif same and isinstance(right, Softmaxed) and right.axis == -2:
            note, weights, values, last = right, right.weights.mT, args[0].mT, ["e", "n"]
        else:
            if not isinstance(left, (Softmaxed, Derived)) and not isinstance(right, (Softmaxed, Derived)):
                self._scores(args[0], args[1], out, _axes_of_product(args[0].dim(), args[1].dim()))
            return None
        if not self._are_values(args[1] if note is left else args[0], note):
            return None
        lead = weights.dim() - 2
        weighed = Weighed(weights, ([[], ["xy"], ["x", "y"]][lead] if lead < 3 else ["?"] * lead) + last)
        weighed.values = values.detach()
        return self._weighed(weighed, note, out)

    def _are_values(self, values: Tensor, note: Softmaxed) -> bool:
        """Whether weights are multiplied into values: not into what is learned, or into other weights."""
        other = self.note(values)
        if isinstance(other, (Softmaxed, Derived)):
            note.origin.lost = other.origin.lost = "a product of weights with weights"
            return False
        if self.is_constant(values) and not note.origin.constant:
            note.origin.used = True
            return False
        return True

    def _weighed(self, weighed: Weighed, note: Softmaxed, out: Any) -> Weighed:
        weighed.origin, weighed.whole = note.origin, note.whole
        if note.whole:
            note.origin.used = True
        else:
            note.origin.parts += 1
        self._put(out, weighed)
        return weighed

    def _einsum(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Weighed | None:
        if len(args) == 2 and isinstance(args[1], (list, tuple)):
            args = (args[0], *args[1])
        if len(args) != 3 or not isinstance(args[0], str) or "->" not in args[0]:
            return None
        inputs, _, output = args[0].replace(" ", "").partition("->")
        first, _, second = inputs.partition(",")
        if "..." in inputs:  # the same letters for all of them
            count = args[1].dim() - len(first.replace("...", ""))
            if count != args[2].dim() - len(second.replace("...", "")) or count < 0:
                return None
            first, second, output = (part.replace("...", "ABCDEFG"[:count]) for part in (first, second, output))
        left, right = self.note(args[1]), self.note(args[2])
        if isinstance(left, Softmaxed):
            note, mine, other = left, first, second
        elif isinstance(right, Softmaxed):
            note, mine, other = right, second, first
        else:
            if isinstance(out, Tensor) and out.dim() == len(output):
                ours, theirs = (
                    [i for i, c in enumerate(output) if c in a and c not in b]
                    for a, b in ((first, second), (second, first))
                )
                self._scores(args[1], args[2], out, (ours, theirs))
            return None
        key = mine[note.axis]
        width = [c for c in output if c in other and c not in mine]
        query = [c for c in mine if c in output and c not in other]
        shared = [c for c in mine if c in other and c in output]
        if len(query) == 2 and len(shared) == 1:  # one kv head for all: the heads are the queries' alone
            shared, query = [c for c in mine if c in (shared[0], query[0])], query[1:]
        if key in output or key not in other or len(width) != 1 or len(query) != 1 or len(shared) > 2:
            return None
        if not self._are_values(args[2] if note is left else args[1], note):
            return None
        weights = note.weights.permute(*(mine.index(c) for c in [*shared, query[0], key]))
        names = dict(zip(shared, [[], ["xy"], ["x", "y"]][len(shared)], strict=True)) | {query[0]: "n", width[0]: "e"}
        weighed = Weighed(weights, [names[c] for c in output])
        if all(c in other for c in shared):
            values = args[2] if note is left else args[1]
            weighed.values = values.detach().permute(*(other.index(c) for c in [*shared, key, width[0]]))
        _look_for_heads(weighed)
        return self._weighed(weighed, note, out)

    def _moved(
        self, note: Weighed, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> Weighed | None:
        """Follow the weighed values until the axis of heads is known."""
        axes = note.axes
        if note.heads is not None or "?" in axes:
            return None
        if isinstance(out, (tuple, list)):
            return _parted(note, func, args, kwargs, out)
        if not isinstance(out, Tensor):
            return None
        if func in _ORDERS:
            note.axes = [axes[i] for i in _order(func, args, kwargs)]
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
        self._put(out, note)
        _look_for_heads(note)
        return note if note.heads else None


def _leading_axes_alone(x: Tensor, out: Tensor) -> bool:
    """Whether axes before the last two were split: (B * H, N, M) to (B, H, N, M), of one query too."""
    return x.dim() > 2 and out.shape[-2:] == x.shape[-2:] and out.shape[:-2] != (*x.shape[:-2], 1)


def _parted(note: Weighed, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Weighed | None:
    """Values that are cut into heads, to be laid side by side."""
    whole, parts = args[0], len(out)
    if func in (torch.unbind, Tensor.unbind) and len(note.axes) == 4:  # (H, B, N, E) into H times (B, N, E)
        dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
        axis = note.axes[dim]
        note.heads = axis if axis in ("x", "y") else None
        note.axes = [axis, *(other for other in note.axes if other != axis)]
    elif note.axes == ["xy", "n", "e"] and parts > 1 and out[0].shape[0] * parts == whole.shape[0]:  # (H * B, N, E)
        note.weights, note.heads = note.weights.unflatten(0, (parts, -1)), "x"
        note.axes = ["x", "y", "n", "e"]
    else:
        return None
    return note


def _look_for_heads(note: Weighed) -> None:
    """Heads stand right before the width when they are about to be merged with it: (B, N, H, E)."""
    if len(note.axes) == 4 and note.axes[-1] == "e" and note.axes[-2] in ("x", "y"):
        note.heads = note.axes[-2]


def _axes_of_product(left: int, right: int) -> tuple[list[int], list[int]]:
    """Which axes of a matrix product come of the left operand alone, and which of the right, by their dimensions."""
    n = max(left, right) if min(left, right) > 1 else max(left, right) - 1
    rows, columns = ([n - 1] if right == 1 else [n - 2]) if left > 1 else [], [n - 1] if right > 1 else []
    lead = [i for i in range(n) if i not in (*rows, *columns)]
    return (lead if right < 3 else []) + rows, (lead if left < 3 else []) + columns


def _forget(noted: dict[int, Any], number: int, gone: weakref.ref[Tensor]) -> None:
    """A tensor is gone, and another may have its number by now."""
    if number in noted and noted[number][0] is gone:
        del noted[number]


def _tensors(args: tuple[Any, ...]) -> Iterator[Tensor]:
    """The tensors among arguments, and among those of a list (of `cat`, `stack`)."""
    for x in args:
        if isinstance(x, Tensor):
            yield x
        elif isinstance(x, (list, tuple)):
            yield from (one for one in x if isinstance(one, Tensor))


def _order(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
    """Where each axis of the result comes from: torch itself is asked, with a tensor whose strides tell axes apart."""
    strides = [2**i for i in range(args[0].dim())]
    with torch.no_grad():
        moved = func(torch.empty(1).as_strided([1] * len(strides), strides), *args[1:], **kwargs)
    return [strides.index(stride) for stride in moved.stride()]


_ORDERS = {
    torch.transpose,
    Tensor.transpose,
    Tensor.permute,
    torch.permute,
    torch.swapaxes,
    Tensor.swapaxes,
    torch.movedim,
    Tensor.movedim,
    Tensor.moveaxis,
    torch.moveaxis,
    torch.swapdims,
    Tensor.swapdims,
    Tensor.mT.__get__,  # type: ignore
}
_SHAPES = {
    Tensor.view,
    Tensor.reshape,
    torch.reshape,
    Tensor.flatten,
    torch.flatten,
    Tensor.unflatten,
    Tensor.contiguous,
    Tensor.__getitem__,
    Tensor.masked_fill,
    torch.masked_fill,
    Tensor.nan_to_num,
    torch.nan_to_num,
    Tensor.squeeze,
    Tensor.unsqueeze,
    torch.squeeze,
    torch.unsqueeze,
    Tensor.expand,
    Tensor.clone,
    torch.clone,
    torch.split,
    Tensor.split,
    torch.chunk,
    Tensor.chunk,
    Tensor.narrow,
    Tensor.unbind,
    torch.unbind,
    Tensor.view_as,
}
_NUMBERS = {  # the shape stays, and so do strides
    Tensor.contiguous,
    Tensor.masked_fill,
    torch.masked_fill,
    Tensor.nan_to_num,
    torch.nan_to_num,
    Tensor.clone,
    torch.clone,
}
_CASTS = {
    Tensor.detach,
    torch.detach,
    Tensor.cpu,
    Tensor.cuda,
    F.dropout,
    torch.dropout,
    Tensor.to,
    Tensor.type_as,
    Tensor.type,
    Tensor.float,
    Tensor.half,
    Tensor.bfloat16,
    Tensor.double,
    torch.feature_dropout,
    F.dropout1d,
    F.dropout2d,
}

_DROPOUTS = {F.dropout, torch.dropout, F.dropout1d, F.dropout2d}
_IN_PLACE = {Tensor.mul_, Tensor.masked_fill_, Tensor.zero_, Tensor.div_, Tensor.copy_, Tensor.fill_}
_DIVISIONS = {torch.div, Tensor.div, Tensor.__truediv__, Tensor.div_, torch.true_divide, torch.divide}
SOFTMAXES = {torch.softmax, Tensor.softmax, F.softmax}
_SUMS = {torch.baddbmm, Tensor.baddbmm, torch.addmm, Tensor.addmm}
_PRODUCTS = {
    torch.matmul,
    Tensor.matmul,
    Tensor.__matmul__,
    torch.bmm,
    Tensor.bmm,
    torch.mm,
    Tensor.mm,
    torch.einsum,
    *_SUMS,
}

# What is done about which torch function.
FUNCTIONS: dict[Any, str] = {
    **dict.fromkeys(SOFTMAXES, "_softmax"),
    **dict.fromkeys((torch.log_softmax, Tensor.log_softmax, F.log_softmax), "_log_softmax"),
    **dict.fromkeys((torch.exp, Tensor.exp), "_exp"),
    **dict.fromkeys(_CASTS, "_cast"),
    **dict.fromkeys(_ORDERS | _SHAPES, "_shape"),
    **dict.fromkeys((torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__, Tensor.mul_, torch.multiply), "_times"),
    **dict.fromkeys(_DIVISIONS, "_times"),
    **dict.fromkeys(_PRODUCTS, "_product"),
    **dict.fromkeys((Tensor.masked_fill_, Tensor.zero_, Tensor.copy_, Tensor.fill_), "_written_over"),
    torch.cdist: "_distances",
    F.linear: "_linear",
    torch.einsum: "_einsum",
}
