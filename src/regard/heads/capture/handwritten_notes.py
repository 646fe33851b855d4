"""What `HandwrittenTracer` notes on tensors on the way from scores to weighted values.

Letters: B batch, H heads, N queries, M keys, E head width of v.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class Scores:
    """On the product of two tensors, and on tensors computed from it elementwise."""

    constant: bool = False  # neither factor depends on the model's input
    # If one factor does not depend on it: a tensor of the shape of the scores, with stride 0 along the other's axes
    learned: Tensor | None = None
    routed: list[bool] = field(default_factory=list)  # shared by all scores of one product: a softmax over learned ones


@dataclass
class Origin:
    """One softmax, and how its result was used."""

    keys: int  # M
    where: Any = None  # the frame of the module call in which its result is expected to be used
    home: Any = None  # the frame of the module call that computed it
    scored: bool = False  # its scores are known to be products
    constant: bool = False  # its scores do not depend on the model's input
    routed: list[bool] | None = None  # with learned queries: whether the same scores route tokens to these
    used: bool = False  # multiplied into values, all keys at once
    parts: int = 0  # products with some of the keys
    lost: str = ""  # the name of the function after which it could not be followed
    told: Any = None  # for the caller: the attention that was reported for it, and what identifies its weights


@dataclass
class Softmaxed:
    """On the weights: their values before dropout, in the same shape, and the axis that sums to 1, from the end."""

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
    """On the output of a linear projection, and on tensors computed from it elementwise."""


class Constant:
    """On what is computed from the model's parameters alone."""


@dataclass
class Logged:
    """On the logarithm of weights."""

    axis: int
    origin: Origin


@dataclass
class Weighed:
    """On the product of weights and values: the weights, and what is known of the axes."""

    weights: Tensor  # (X, Y, N, M), X and Y being B and H in some order; (X, N, M); or with more axes in front
    axes: list[str]  # of the tensor that has the note: "x", "y" (or "xy"), "n", "e"
    heads: str | None = None  # "x" or "y", once it is known
    values: Tensor | None = None  # (..., M, E), leading axes as those of the weights
    queries: int | None = None  # N, if the weights are placeholders
    keys: int | None = None  # M, if the weights are placeholders
    where: Any = None  # for the caller: the frame of the module call
    about: Any = None  # for the caller: anything else, until the heads are known
    done: bool = False
    sizes: list[tuple[int, int]] = field(default_factory=list)  # of the inputs of the calls in progress
    origin: Origin | None = None
    whole: bool = True  # whether all keys of the softmax are there
    output: Tensor | None = None  # (B, H, N, E), if it is known before it is reported
    stream: Tensor | None = None  # (B, N): the token ids of the queries, if they are followed

    def ordered(self, other: Tensor | None = None) -> Tensor:
        """The weights as (B, H, N, M), to the best of what is known; or another tensor with the same leading axes."""
        w = self.weights if other is None else other
        if w.dim() == 4:
            return w.transpose(0, 1) if (self.heads or self.guess()) == "x" else w
        if w.dim() == 2:
            return w[None, None]
        batch = self.batch(self.sizes)
        if w.dim() == 3:
            return w.unflatten(0, (folded(w.shape[0], batch, self.sizes), -1))
        return w.flatten(1, -3) if batch == w.shape[0] else w.flatten(0, -4)  # heads in groups, or batches in windows

    def ordered_values(self) -> Tensor | None:
        """The values as (B, G, M, E), H a multiple of G; None if they are not known or have other leading axes."""
        v, w = self.values, self.weights
        if v is not None and v.dim() == 3 and w.dim() == 4 and v.shape[0] == w.shape[:2].numel():
            v = v.unflatten(0, w.shape[:2])  # the heads became an axis of their own after the product
        known = v is not None and v.dim() == w.dim() and (w.dim() != 3 or v.shape[0] == w.shape[0])
        return self.ordered(v) if known else None

    def batch(self, sizes: Sequence[tuple[int, int]]) -> int | None:
        """B, from the sizes of inputs; None if they do not tell."""
        return batch_of(self.queries or self.weights.shape[-2], self.keys or self.weights.shape[-1], sizes)

    def guess(self) -> str | None:
        """Which axis is the heads', from the sizes of the module's input; None if they do not tell."""
        if self.weights.dim() != 4:
            return None
        x, y = self.weights.shape[:2]
        batch = self.batch(self.sizes)
        if batch is None or (x == batch) == (y == batch):
            return None
        return "y" if x == batch else "x"

    def settle(self, sizes: Sequence[tuple[int, int]]) -> None:
        """Decide now which axis is the heads', if the sizes tell: needed to change the output before it is used. With
        fewer or more axes than 4, by the `sizes` of the input of the module that computes it."""
        w = self.weights
        if w.dim() == 4:
            self.heads = self.guess()
        elif w.dim() != 2 and self.batch(sizes) == w.shape[0]:
            self.weights, self.heads = w.reshape(w.shape[0], -1, *w.shape[-2:]), "y"  # one head, or heads in groups
            self.values = None if self.values is None else self.values.reshape(w.shape[0], -1, *self.values.shape[-2:])
            self.axes = ["x", *["y"] * (w.dim() - 3), *self.axes[-2:]]

    def opened(self, out: Tensor | Sequence[Tensor]) -> tuple[Tensor, list[str]]:
        """The tensor that has the note, with B, H, N and E as separate axes, and which axis is which."""
        tensor = out if isinstance(out, Tensor) else torch.stack(tuple(out))
        axes, heads = self.axes, self.weights.shape[1]
        if axes[-1] == "ye":  # heads that were merged
            return tensor.unflatten(-1, (heads, -1)), [*axes[:-1], "y", "e"]
        if axes[0] == "x" and axes.count("y") != 1:
            return tensor.reshape(tensor.shape[0], heads, *tensor.shape[-2:]), ["x", "y", *axes[-2:]]
        return tensor, axes

    def look_for_heads(self) -> None:
        """Heads are right before the width when they are about to be merged with it: (B, N, H, E)."""
        if len(self.axes) == 4 and self.axes[-1] == "e" and self.axes[-2] in ("x", "y"):
            self.heads = self.axes[-2]


Note = Scores | Softmaxed | Derived | Projected | Constant | Logged | Weighed


def batch_of(queries: int, keys: int, sizes: Sequence[tuple[int, int]]) -> int | None:
    """B, from inputs (B, N, W) or (N, B, W), innermost call first, that have as many tokens as there are queries, or
    else keys (queries may be learned); None if there are none."""
    for tokens in (queries, keys):
        for first, second in sizes:
            if tokens in (first, second):
                return first if second == tokens else second
    return None


def folded(size: int, batch: int | None, sizes: Sequence[tuple[int, int]]) -> int:
    """B of an axis of size B * H: `batch`, or that of the innermost input; 1 if neither divides the size."""
    guesses = [batch, *(first for first, _ in sizes[:1])]
    return next((guess for guess in guesses if guess and size % guess == 0), 1)
