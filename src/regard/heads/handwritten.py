"""Sense of attention written by hand: a softmax over keys, whose result is multiplied into values.

Tensors that matter carry a note from one torch function to the next. A softmax gives its result a `Softmaxed`; what
reshapes, masks or drops it passes the note on; a product of it with values is attention, and gives its result a
`Weighed`. Weights come in any order: (B, H, N, M), (H, B, N, M), (B * H, N, M), (H * B, N, M). Which axis is the heads'
is told by what the model does next: before it merges heads it brings their axis beside the values' width,

    (B, H, N, E) -> transpose(1, 2) -> (B, N, H, E) -> reshape -> (B, N, H * E)

and where it does not, by the sizes of the module's input.

Letters: B batch, H heads, N queries, M keys, E head width of v.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["FUNCTIONS", "SOFTMAXES", "Hands", "Weighed", "batch_of"]


@dataclass
class Softmaxed:
    """On the weights: what they were before dropout, in the same shape; and the axis that sums to 1, from the end."""

    weights: Tensor
    axis: int


class Projected:
    """On the output of a linear projection."""


@dataclass
class Logged:
    """On the logarithm of weights."""

    axis: int


@dataclass
class Weighed:
    """On values after they were weighed: the weights, and what is known of the axes."""

    weights: Tensor  # (X, Y, N, M), X and Y being B and H in some order; (X, N, M); or with more axes in front
    axes: list[str]  # of the tensor that carries the note: "x", "y" (or "xy"), "n", "e"
    heads: str | None = None  # "x" or "y", once it is known
    values: Tensor | None = None  # (..., M, E), leading axes as those of the weights
    queries: int | None = None  # N, where the weights stand for others
    where: Any = None  # for whoever looks: in which call of which module
    about: Any = None  # and whatever else it wants to know when the heads are known
    done: bool = False
    sizes: list[tuple[int, int]] = field(default_factory=list)  # of the inputs of the calls in progress

    def ordered(self) -> Tensor:
        """The weights as (B, H, N, M), by the best that is known."""
        w = self.weights
        if w.dim() == 4:
            return w.transpose(0, 1) if (self.heads or self.guess()) == "x" else w
        if w.dim() == 2:
            return w[None, None]
        if w.dim() == 3:
            batch = batch_of(self.queries or w.shape[1], self.sizes)
            if batch is not None and w.shape[0] % batch == 0:
                return w.unflatten(0, (batch, -1))
            return w[None]  # no batch: (H, N, M)
        batch = batch_of(self.queries or w.shape[-2], self.sizes)  # heads in groups, or batches in windows
        return w.flatten(1, -3) if batch == w.shape[0] else w.flatten(0, -4)

    def guess(self) -> str | None:
        """Which axis is the heads', by the sizes of the module's input; None where these do not tell."""
        if self.weights.dim() != 4:
            return None
        x, y, n = self.weights.shape[:3]
        batch = batch_of(self.queries or n, self.sizes)
        if batch is None or (x == batch) == (y == batch):
            return None
        return "y" if x == batch else "x"

    def settle(self, size: tuple[int, int] | None) -> None:
        """Decide at once, if the sizes tell: for whoever changes what comes of it before anything else is done with it.
        With one axis less or more, by the input of the module that computes it, `size`, alone."""
        w = self.weights
        if w.dim() == 4:
            self.heads = self.guess()
        elif w.dim() != 2 and size is not None and batch_of(self.queries or w.shape[-2], [size]) == w.shape[0]:
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


def batch_of(queries: int, sizes: Sequence[tuple[int, int]]) -> int | None:
    """B, by inputs (B, N, W) or (N, B, W), the innermost call's first; None where they do not tell."""
    for first, second in sizes:
        if queries in (first, second):
            return first if second == queries else second
    return None


LOW = -9e3  # what people hide keys by is -1e4, -1e9, -inf or the lowest number; no score is so low


class Hands:
    """Follows the torch functions of one thread. Notes are its own: another one's are not seen."""

    _made = 0

    def __init__(self) -> None:
        Hands._made += 1
        self.key = f"_regard_note_{Hands._made}"
        self.noted: dict[int, weakref.ref[Tensor]] = {}

    def clear(self) -> None:
        """Take every note back: a tensor that lives on shall be as it was."""
        for tensor in [reference() for reference in self.noted.values()]:
            if tensor is not None:
                vars(tensor).pop(self.key, None)
        self.noted.clear()

    def see(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Weighed | None:
        """Follow one torch function. Gives a `Weighed` where attention was computed, or more became known of it."""
        return getattr(self, FUNCTIONS[func])(func, args, kwargs, out)

    def before(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """What is about to write over weights must not write over those that are remembered."""
        note = self._first(args)
        in_place = kwargs.get("inplace", len(args) > 3 and args[3]) if func in _DROPOUTS else func in _IN_PLACE
        if isinstance(note, Softmaxed) and in_place:
            note.weights = note.weights.clone()

    def follow(self, out: Tensor, queries: int) -> Weighed:
        """Follow the output (X, Y, N, E) or (X, N, E) of an attention whose weights nobody has. In their place stand
        the numbers of texts and heads, from which their order will be known."""
        lead = out.shape[:-2]
        axes = (["xy"] if len(lead) == 1 else ["x", "y"]) + ["n", "e"]
        note = Weighed(torch.arange(lead.numel(), device=out.device).view(*lead, 1, 1), axes, queries=queries)
        self._put(out, note)
        return note

    def note(self, x: object) -> Softmaxed | Logged | Projected | Weighed | None:
        """The note that a tensor carries."""
        return x.__dict__.get(self.key) if isinstance(x, Tensor) else None

    def _first(self, args: tuple[Any, ...]) -> Softmaxed | Logged | Projected | Weighed | None:
        return self.note(args[0]) if len(args) else None

    def _put(self, x: Any, note: Softmaxed | Logged | Projected | Weighed) -> None:
        if isinstance(x, Tensor):
            setattr(x, self.key, note)
            number = id(x)
            self.noted[number] = weakref.ref(x, lambda _: self.noted.pop(number, None))

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
        if isinstance(self.note(scores), Projected):
            return  # a projection, softmaxed as it is: a classifier or a gate
        blind = scores.detach().amax(axis, keepdim=True) <= LOW
        self._put(out, Softmaxed(weights.masked_fill(blind, 0.0) if blind.any() else weights, axis))

    def _linear(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        self._put(out, Projected())

    def _log_softmax(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        if isinstance(out, Tensor) and isinstance(dim, int) and out.dim() > 1:
            self._put(out, Logged(dim if dim < 0 else dim - out.dim()))

    def _exp(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        note = self._first(args)
        if isinstance(note, Logged) and isinstance(out, Tensor):
            self._put(out, Softmaxed(out.detach(), note.axis))

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
        if isinstance(note, Softmaxed) and isinstance(out, Tensor):
            axis = note.axis
            if func in _ORDERS:
                axis = _order(func, args, kwargs).index(note.weights.dim() + axis) - note.weights.dim()
            elif axis != -1 and out.shape != args[0].shape:
                return None
            elif out.dim() > args[0].dim() and 1 in out.shape[-2:]:
                return None  # weights of one thing, made to look like a row: a mixture, not attention
            with torch.no_grad():
                self._put(out, Softmaxed(func(note.weights, *args[1:], **kwargs), axis))
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
        if isinstance(note, Projected) and not isinstance(right, Tensor):
            self._put(out, note)
        if isinstance(note, Softmaxed) and isinstance(out, Tensor) and out.shape == note.weights.shape:
            right = right.detach() if isinstance(right, Tensor) else right
            with torch.no_grad():
                weights = note.weights / right if func in _DIVISIONS else note.weights * right
            self._put(out, Softmaxed(weights, note.axis))

    def _written_over(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """The tensor is the same, and what it holds is not: its note goes, unless the weights can follow."""
        note = self._first(args)
        if isinstance(note, Softmaxed) and func is Tensor.masked_fill_:
            with torch.no_grad():
                self._put(args[0], Softmaxed(note.weights.masked_fill(*args[1:], **kwargs), note.axis))
        elif note is not None:
            args[0].__dict__.pop(self.key, None)

    # From weights and values to attention

    def _product(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Weighed | None:
        """matmul, bmm: weights (..., N, M) by values (..., M, E); or values (..., E, M) by weights (..., M, N)."""
        if func in _SUMS:
            args = args[1:]
        if len(args) < 2 or not isinstance(args[1], Tensor) or args[0].dim() != args[1].dim():
            return None  # (values have the axes that weights have: one table for all of them is no attention)
        left, right = self.note(args[0]), self.note(args[1])
        if isinstance(left, Softmaxed) and left.axis == -1:
            weights, values, last = left.weights, args[1], ["n", "e"]
        elif isinstance(right, Softmaxed) and right.axis == -2:
            weights, values, last = right.weights.mT, args[0].mT, ["e", "n"]
        else:
            return None
        lead = weights.dim() - 2
        note = Weighed(weights, ([[], ["xy"], ["x", "y"]][lead] if lead < 3 else ["?"] * lead) + last)
        note.values = values.detach()
        self._put(out, note)
        return note

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
            return None
        key = mine[note.axis]
        width = [c for c in output if c in other and c not in mine]
        query = [c for c in mine if c in output and c not in other]
        shared = [c for c in mine if c in other and c in output]
        if len(query) == 2 and len(shared) == 1:  # one kv head for all: the heads are the queries' alone
            shared, query = [c for c in mine if c in (shared[0], query[0])], query[1:]
        if key in output or key not in other or len(width) != 1 or len(query) != 1 or len(shared) > 2:
            return None
        weights = note.weights.permute(*(mine.index(c) for c in [*shared, query[0], key]))
        names = dict(zip(shared, [[], ["xy"], ["x", "y"]][len(shared)], strict=True)) | {query[0]: "n", width[0]: "e"}
        weighed = Weighed(weights, [names[c] for c in output])
        if all(c in other for c in shared):
            values = args[2] if note is left else args[1]
            weighed.values = values.detach().permute(*(other.index(c) for c in [*shared, key, width[0]]))
        _look_for_heads(weighed)
        self._put(out, weighed)
        return weighed

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


def _order(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
    """Where each axis of the result comes from: torch itself is asked, with a tensor whose strides tell axes apart."""
    strides = [2**i for i in range(args[0].dim())]
    with torch.no_grad():
        moved = func(torch.empty(1).as_strided([1] * len(strides), strides), *args[1:], **kwargs)
    return [strides.index(stride) for stride in moved.stride()]


_ORDERS = {
    torch.transpose, Tensor.transpose, Tensor.permute, torch.permute, torch.swapaxes, Tensor.swapaxes, torch.movedim,
    Tensor.movedim, Tensor.moveaxis, torch.moveaxis, torch.swapdims, Tensor.swapdims, Tensor.mT.__get__,  # type: ignore
}  # fmt: skip
_SHAPES = {
    Tensor.view, Tensor.reshape, torch.reshape, Tensor.flatten, torch.flatten, Tensor.unflatten, Tensor.contiguous,
    Tensor.__getitem__, Tensor.masked_fill, torch.masked_fill, Tensor.nan_to_num, torch.nan_to_num, Tensor.squeeze,
    Tensor.unsqueeze, torch.squeeze, torch.unsqueeze, Tensor.expand, Tensor.clone, torch.clone, torch.split,
    Tensor.split, torch.chunk, Tensor.chunk, Tensor.narrow, Tensor.unbind, torch.unbind, Tensor.view_as,
}  # fmt: skip
_CASTS = {
    F.dropout, torch.dropout, Tensor.to, Tensor.type_as, Tensor.type, Tensor.float, Tensor.half, Tensor.bfloat16,
    Tensor.double, torch.feature_dropout, F.dropout1d, F.dropout2d,
}  # fmt: skip

_DROPOUTS = {F.dropout, torch.dropout, F.dropout1d, F.dropout2d}
_IN_PLACE = {Tensor.mul_, Tensor.masked_fill_, Tensor.zero_, Tensor.div_, Tensor.copy_, Tensor.fill_}
_DIVISIONS = {torch.div, Tensor.div, Tensor.__truediv__, Tensor.div_, torch.true_divide, torch.divide}
SOFTMAXES = {torch.softmax, Tensor.softmax, F.softmax}
_SUMS = {torch.baddbmm, Tensor.baddbmm, torch.addmm, Tensor.addmm}

# What is done about which torch function.
FUNCTIONS: dict[Any, str] = {
    **dict.fromkeys(SOFTMAXES, "_softmax"),
    **dict.fromkeys((torch.log_softmax, Tensor.log_softmax, F.log_softmax), "_log_softmax"),
    **dict.fromkeys((torch.exp, Tensor.exp), "_exp"),
    **dict.fromkeys(_CASTS, "_cast"),
    **dict.fromkeys(_ORDERS | _SHAPES, "_shape"),
    **dict.fromkeys((torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__, Tensor.mul_, torch.multiply), "_times"),
    **dict.fromkeys(_DIVISIONS, "_times"),
    **dict.fromkeys((torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm), "_product"),
    **dict.fromkeys((torch.mm, Tensor.mm, *_SUMS), "_product"),
    **dict.fromkeys((Tensor.masked_fill_, Tensor.zero_, Tensor.copy_, Tensor.fill_), "_written_over"),
    F.linear: "_linear",
    torch.einsum: "_einsum",
}
