"""Sense of attention written by hand: a softmax over the last axis, whose result is multiplied into values.

Tensors that matter carry a note from one torch function to the next. A softmax gives its result a `Softmaxed`; what
reshapes, masks or drops it passes the note on; a product of it with values is attention, and gives its result a
`Weighed`. Weights come in any order: (B, H, N, M), (H, B, N, M), (B * H, N, M), (H * B, N, M). Which axis is the heads'
is told by what the model does next: before it merges heads it brings their axis beside the values' width,

    (B, H, N, E) -> transpose(1, 2) -> (B, N, H, E) -> reshape -> (B, N, H * E)

and where it does not, by the sizes of the module's input.

Letters: B batch, H heads, N queries, M keys, E head width of v.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["FUNCTIONS", "Softmaxed", "Weighed", "note_of", "see"]

_NOTE = "_regard_note"


@dataclass
class Softmaxed:
    """On the weights: what they were before dropout, in the same shape."""

    weights: Tensor
    axis: int  # the axis that sums to 1, from the end: -1, unless it was moved


@dataclass
class Weighed:
    """On values after they were weighed: the weights, and what is known of the axes."""

    weights: Tensor  # (X, Y, N, M), X and Y being B and H in some order; or (X, N, M)
    axes: list[str]  # of the tensor that carries the note: "x", "y" (or "xy"), "n", "e"
    heads: str | None = None  # "x" or "y", once it is known
    where: Any = None  # for whoever looks: in which call of which module
    done: bool = False
    sizes: list[tuple[int, int]] = field(default_factory=list)

    def ordered(self) -> Tensor:
        """The weights as (B, H, N, M), by the best that is known."""
        w = self.weights
        if w.dim() == 4:
            return w.transpose(0, 1) if (self.heads or self.guess()) == "x" else w
        if w.dim() == 2:
            return w[None, None]
        batch = self._batch(w.shape[0], w.shape[1])
        return w.unflatten(0, (batch, -1)) if batch else w[None]

    def guess(self) -> str | None:
        """Which axis is the heads', by the sizes of the module's input; None where these do not tell."""
        if self.weights.dim() != 4:
            return None
        x, y, n = self.weights.shape[:3]
        if x == 1 or y == 1:  # one of them is alone: the batch, if the input says so
            return "x" if y == 1 and x > 1 and any(1 in pair and x not in pair for pair in self.sizes) else "y"
        for first, second in self.sizes:
            if first == second:
                continue
            batch = first if second == n else second if first == n else None
            if batch is not None and (x == batch) != (y == batch):
                return "y" if x == batch else "x"
        return None

    def _batch(self, x: int, n: int) -> int | None:
        """B of weights (B * H, N, M); None where there is no batch and they are (H, N, M)."""
        for first, second in self.sizes:
            batch = first if second == n else second if first == n else None
            if batch is not None and x % batch == 0:
                return batch
        return None if x > 1 and not self.sizes else x


def note_of(x: object) -> Softmaxed | Weighed | None:
    """The note that a tensor carries."""
    return x.__dict__.get(_NOTE) if isinstance(x, Tensor) else None


def _put(x: Any, note: Softmaxed | Weighed) -> None:
    if isinstance(x, Tensor):
        setattr(x, _NOTE, note)


def see(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Weighed | None:
    """Follow one torch function. Gives a `Weighed` where attention was computed, or where more became known of it."""
    act = FUNCTIONS[func]
    return act(func, args, kwargs, out)


def _softmax(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    if (
        isinstance(out, Tensor)
        and isinstance(dim, int)
        and out.dim() > 1
        and out.numel()
        and dim in (-1, out.dim() - 1)
    ):
        scores, weights = args[0].detach(), out.detach()
        # Masks of the lowest number everywhere make a row of equal weights: it sees nothing.
        blind = scores.amax(-1, keepdim=True) <= torch.finfo(scores.dtype).min / 2
        _put(out, Softmaxed(weights.masked_fill(blind, 0.0) if blind.any() else weights, -1))


def _as_it_is(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    """Dropout and changes of dtype: the weights are what they were before."""
    note = note_of(args[0]) if args else None
    if note is not None and isinstance(out, Tensor) and out.shape == args[0].shape:
        _put(out, note)


def _the_same_done(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Weighed | None:
    """What changes the numbers or the shape of weights is done to the undropped ones too."""
    note = note_of(args[0]) if args else None
    if isinstance(note, Weighed):
        return _moved(note, func, args, kwargs, out)
    if isinstance(note, Softmaxed) and isinstance(out, Tensor):
        if note.weights.shape == out.shape and out.data_ptr() == note.weights.data_ptr():
            weights = out.detach()
        else:
            with torch.no_grad():
                weights = func(note.weights, *args[1:], **kwargs)
        _put(out, Softmaxed(weights, note.axis))
    return None


def _times(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    """Weights times something of the same shape: a mask of heads, or of padding."""
    if len(args) < 2:
        return
    left, right = args[0], args[1]
    if isinstance(note_of(right), Softmaxed) and not isinstance(note_of(left), Softmaxed):
        left, right = right, left
    note = note_of(left)
    if isinstance(note, Softmaxed) and isinstance(out, Tensor) and out.shape == note.weights.shape:
        with torch.no_grad():
            _put(out, Softmaxed(note.weights * (right.detach() if isinstance(right, Tensor) else right), note.axis))


def _product(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Weighed | None:
    """matmul, bmm: weights (..., N, M) by values (..., M, E); or values (..., E, M) by weights (..., M, N)."""
    if len(args) < 2:
        return None
    left, right = note_of(args[0]), note_of(args[1])
    if isinstance(left, Softmaxed) and args[0].dim() >= 2 and args[1].dim() >= 2:
        return _weighed(out, left.weights, ["n", "e"])
    if isinstance(right, Softmaxed) and args[0].dim() >= 2:
        return _weighed(out, right.weights.mT, ["e", "n"])
    return None


def _weighed(out: Tensor, weights: Tensor, last: list[str]) -> Weighed | None:
    lead = weights.dim() - 2
    if lead > 2:  # more axes before: they are batches of batches
        weights = weights.flatten(0, lead - 2)
        note = Weighed(weights, ["?"] * (lead - 1) + ["y", *last], heads="y")
    elif out.dim() != weights.dim():
        return None
    else:
        note = Weighed(weights, [[], ["xy"], ["x", "y"]][lead] + last)
    _put(out, note)
    return note


def _einsum(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Weighed | None:
    if len(args) == 2 and isinstance(args[1], (list, tuple)):
        args = (args[0], *args[1])
    if len(args) != 3 or not isinstance(args[0], str) or "." in args[0]:
        return None
    inputs, _, output = args[0].replace(" ", "").partition("->")
    first, _, second = inputs.partition(",")
    notes = note_of(args[1]), note_of(args[2])
    if isinstance(notes[0], Softmaxed):
        note, mine, other = notes[0], first, second
    elif isinstance(notes[1], Softmaxed):
        note, mine, other = notes[1], second, first
    else:
        return None
    key = mine[note.axis]
    width = [c for c in output if c in other and c not in mine]
    query = [c for c in mine if c in output and c not in other]
    shared = [c for c in mine if c in other and c in output]
    if key in output or key not in other or len(width) != 1 or len(query) != 1 or len(shared) > 2:
        return None
    weights = note.weights.permute(*(mine.index(c) for c in [*shared, query[0], key]))
    names = dict(zip(shared, [[], ["xy"], ["x", "y"]][len(shared)], strict=True)) | {query[0]: "n", width[0]: "e"}
    weighed = Weighed(weights, [names[c] for c in output])
    _look_for_heads(weighed)
    _put(out, weighed)
    return weighed


def _look_for_heads(note: Weighed) -> None:
    """Heads stand right before the width when they are about to be merged with it: (B, N, H, E)."""
    if len(note.axes) == 4 and note.axes[-1] == "e" and note.axes[-2] in ("x", "y"):
        note.heads = note.axes[-2]


def _moved(note: Weighed, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Weighed | None:
    """Follow the weighed values until the axis of heads is known."""
    if isinstance(out, (tuple, list)):  # split along B * H: (H * B, N, E) cut into heads
        if note.axes[0] == "xy" and out and out[0].dim() == 3 and note.weights.dim() == 3 and len(out) > 1:
            rows = out[0].shape[0]
            if rows < args[0].shape[0] and rows * len(out) == args[0].shape[0]:
                note.weights, note.heads = note.weights.unflatten(0, (len(out), rows)), "x"
                note.axes = ["x", "y", "n", "e"]
                return note
        return None
    if not isinstance(out, Tensor) or note.heads is not None:
        return None
    axes = note.axes
    if out.dim() == len(axes) and out.shape == args[0].shape and func not in _ORDERS:
        _put(out, note)
        return None
    if func in _ORDERS:
        # Ask torch itself where the axes go: a tensor of the same shape whose strides are powers of a number.
        marks = torch.empty(1).as_strided([1] * len(axes), [2**i for i in range(len(axes))])
        with torch.no_grad():
            strides = func(marks, *args[1:], **kwargs).stride()
        note.axes = [axes[[2**i for i in range(len(axes))].index(s)] for s in strides]
    elif axes == ["n", "xy", "e"] and out.dim() == 3 and out.shape[0] == args[0].shape[0]:
        # merged at once: (N, B * H, E) -> (N, B, H * E)
        note.weights, note.heads = note.weights.unflatten(0, (out.shape[1], -1)), "y"
        note.axes = ["?"] * 3
        return note
    elif axes == ["xy", "n", "e"] and out.dim() == 4 and out.shape[2:] == args[0].shape[1:]:
        note.weights = note.weights.unflatten(0, tuple(out.shape[:2]))
        note.axes = ["x", "y", "n", "e"]
    else:
        return None
    _put(out, note)
    _look_for_heads(note)
    return note if note.heads else None


_ORDERS = {
    torch.transpose, Tensor.transpose, Tensor.permute, torch.permute, torch.swapaxes, Tensor.swapaxes, torch.movedim,
    Tensor.movedim, Tensor.moveaxis, torch.moveaxis, torch.swapdims, Tensor.swapdims, Tensor.mT.__get__,  # type: ignore
}  # fmt: skip
_SHAPES = {
    Tensor.view, Tensor.reshape, torch.reshape, Tensor.flatten, torch.flatten, Tensor.unflatten, Tensor.contiguous,
    Tensor.__getitem__, Tensor.masked_fill, torch.masked_fill, Tensor.nan_to_num, torch.nan_to_num, Tensor.squeeze,
    Tensor.unsqueeze, torch.squeeze, torch.unsqueeze, Tensor.expand, Tensor.clone, torch.clone, torch.split,
    Tensor.split, torch.chunk, Tensor.chunk, Tensor.narrow, Tensor.masked_fill_, Tensor.unbind, torch.unbind,
}  # fmt: skip
_CASTS = {
    F.dropout, torch.dropout, Tensor.to, Tensor.type_as, Tensor.type, Tensor.float, Tensor.half, Tensor.bfloat16,
    Tensor.double, torch.feature_dropout, F.dropout1d, F.dropout2d,
}  # fmt: skip

FUNCTIONS: dict[Any, Callable[..., Weighed | None]] = {
    **dict.fromkeys((torch.softmax, Tensor.softmax, F.softmax), _softmax),
    **dict.fromkeys(_CASTS, _as_it_is),
    **dict.fromkeys(_ORDERS | _SHAPES, _the_same_done),
    **dict.fromkeys((torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__, Tensor.mul_, torch.multiply), _times),
    **dict.fromkeys((torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm), _product),
    torch.einsum: _einsum,
}
