"""`ScoreMod`: a function of each score, in the place of something that is added to it.

Letters: B batch, H query heads; n, m the sides of one tile, c its batch items, h its heads.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from regard.errors import bad_type, bad_value, shape_of
from regard.masks import Tile
from regard.positions.bias import Bias
from regard.tracing import recording

__all__ = ["ScoreMod"]


class ScoreMod(Bias):
    """Base of functions that change every score by itself; given as `bias=`, alone or in a list with others.

    Write `block(tile, scores)`. The scores (c, h, n, m) of a tile come after scale and softcap, and after the biases
    and functions before it in the list; the changed ones have the same shape. Each may depend on its own score, on
    where query and key stand (`tile.q_positions`, `tile.k_positions`) and on `self.weight`, which is cut to the
    tile's batch items and heads: it leads with a batch axis of 1 and ends with one of heads; (1, H) of anything where
    nothing is learned. Write with differentiable operations, and not into `scores`: gradients of the scores and of
    `weight` follow, tile by tile. What it gives for pairs that a mask hides does not count, nor does the gradient by
    such scores; the gradient of `weight` counts all pairs, so keep it finite there.

    `reference` and `blockwise` serve it; masks, sinks, dropout, grouped heads, caches and measures go on working.

    >>> import regard
    >>> class Squash(ScoreMod):
    ...     '''A tanh whose reach grows with the distance, at a pace that each head learns.'''
    ...
    ...     def __init__(self, pace):
    ...         self.weight = pace  # (1, H)
    ...
    ...     def block(self, tile, scores):
    ...         apart = (tile.q_positions[:, None, :, None] - tile.k_positions[:, None, None, :]).abs()
    ...         reach = 1 + self.weight[:, :, None, None] * apart
    ...         return reach * torch.tanh(scores / reach)
    >>> q, k, v = (torch.randn(2, 4, 6, 8) for _ in range(3))
    >>> pace = torch.full((1, 4), 0.5, requires_grad=True)
    >>> regard.attend(q, k, v, mask=regard.masks.Causal(), bias=Squash(pace)).sum().backward()
    >>> pace.grad.shape
    torch.Size([1, 4])
    """

    changes_scores: ClassVar[bool] = True

    def block(self, tile: Tile, scores: Tensor) -> Tensor:  # type: ignore[override]
        """The changed scores (c, h, n, m) of a tile."""
        raise NotImplementedError

    def apply_to(self, scores: Tensor, tile: Tile, heads: slice = slice(None)) -> Tensor:
        return self.part(tile, heads).block(tile, scores).to(scores.dtype)  # type: ignore[call-arg]

    def evaluate(self, tile: Tile, heads: slice = slice(None)) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} adds nothing: it changes scores")

    def check_answer(self, block: object, tile: Tile, *given: Any) -> None:
        what, scores = f"{type(self).__name__}.block", given[0]
        if not isinstance(block, Tensor) or not block.is_floating_point():
            received = f"dtype {block.dtype}" if isinstance(block, Tensor) else type(block).__name__
            raise bad_type(what, expected="the changed scores, a floating-point tensor", received=received)
        if block.shape != scores.shape or block.device != scores.device:
            raise bad_value(
                what,
                expected=f"the shape and device of the scores, {shape_of(scores)} on {scores.device}",
                received=f"shape {shape_of(block)} on {block.device}",
                remedy="what is added and never reads the scores is a positions.Bias",
            )

    def gradients(
        self, scores: Tensor, gradient: Tensor, tile: Tile, into: Tensor | None, heads: slice = slice(None)
    ) -> Tensor:
        """From the gradient (c, h, n, m) of the changed scores that of the `scores`; what it gives to `weight` is added
        to `into`, where that is wanted. The block is computed again, recorded by autograd."""
        part = self.part(tile, heads)
        with recording():
            wanted = [scores.detach().requires_grad_()]
            if into is not None:
                wanted.append(part.weight.detach().requires_grad_())
            changed = part.with_weight(wanted[-1] if into is not None else part.weight.detach())
            changed = changed.block(tile, wanted[0]).to(scores.dtype)  # type: ignore[call-arg]
            if not changed.requires_grad:  # (numbers that depend on neither)
                return torch.zeros_like(scores)
            of_scores, *of_weight = torch.autograd.grad(changed, wanted, gradient, allow_unused=True)
        if into is not None and of_weight[0] is not None:
            self.cut(into, tile, heads).add_(of_weight[0])
        return torch.zeros_like(scores) if of_scores is None else of_scores
