"""`Tree`: draft tokens of speculative decoding, each after its parent.

Letters: B batch, N queries, M keys, T draft tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from regard.checks import integer_tensor
from regard.errors import bad_value, shape_of
from regard.masks.base import Mask, check_sizes, of_batch, short
from regard.masks.tiles import Grid, Survey, Tile
from regard.tracing import traced

__all__ = ["Tree"]


class Tree(Mask):
    """Many continuations of a text at once: a draft token sees all keys before the drafts, its ancestors and itself.

    Args:
        parents: integers (T,) or (B, T). `parents[i]` is the index of draft token i's parent, an earlier draft token;
            -1 where it follows the text directly.

    The drafts lie in the last T slots of the keys, and the queries are the last N of them: usually all, N = T.
    `tree.positions(start)` gives where they stand, for rotary encodings and for `positions=`.

    >>> tree = Tree(torch.tensor([-1, 0, 0, 1, -1]))  # two continuations of token 0; another first token
    >>> print(tree.draw(5, 7))
    ███····
    ████···
    ███·█··
    ████·█·
    ██····█
    >>> tree.positions(2)
    tensor([2, 3, 3, 4, 2])
    """

    fields = ("parents", "ancestors")

    def __init__(self, parents: Tensor) -> None:
        expected = "an integer tensor (T,) or (B, T)"
        self.parents = integer_tensor("Tree parents", parents, dims=2, expected=expected).to(torch.int64)
        _check_order(self.parents)
        self.ancestors = _closure(self.parents)  # (1|B, T, T), each token its own

    @property
    def size(self) -> int:
        """T"""
        return self.parents.shape[1]

    def positions(self, start: int | Tensor = 0) -> Tensor:
        """Where the drafts stand, (T,) or (B, T), after `start` tokens (one number, or one per batch item): siblings at
        the same position."""
        depth = self.ancestors.sum(-1) - 1
        if isinstance(start, Tensor) and start.dim():
            return depth + start[:, None]
        depth = depth + start
        return depth[0] if depth.shape[0] == 1 else depth

    def block(self, tile: Tile) -> Tensor:
        before, first = tile.keys - self.size, self.size - tile.queries
        slots = torch.arange(tile.cols.start, tile.cols.stop, device=self.parents.device)
        own = of_batch(self.ancestors, tile.batch)[:, first + tile.rows.start : first + tile.rows.stop]
        return (own[..., (slots - before).clamp(min=0)] | (slots < before))[:, None]

    def survey(self, grid: Grid) -> Survey:
        slots = torch.arange(grid.keys, device=self.parents.device)[None]
        _, last = grid.cols(slots)
        return Survey(torch.ones_like(last, dtype=torch.bool), last < grid.keys - self.size)

    def check(self, batch: int, heads: int, queries: int, keys: int) -> None:
        check_sizes("Tree parents", self.parents, ("B", batch), ("T", self.size))
        if not queries <= self.size <= keys:
            raise bad_value(
                "Tree parents",
                expected=f"T from {queries} to {keys}: the {queries} queries are drafts, which are among {keys} keys",
                received=f"T = {self.size}, shape {shape_of(self.parents)}",
            )

    def __repr__(self) -> str:
        return f"Tree({short(self.parents)})"


def _check_order(parents: Tensor) -> None:
    if traced(parents) or parents.device.type != "cpu":
        return  # (on other devices the answer would have to be waited for)
    wrong = (parents < -1) | (parents >= torch.arange(parents.shape[1], device=parents.device))
    if wrong.any():
        item, token = (int(x) for x in wrong.nonzero()[0])
        raise bad_value(
            "Tree parents",
            expected="for each draft token the index of an earlier one, or -1 for the text before",
            received=f"{int(parents[item, token])} for draft token {token}",
            remedy="order the drafts by depth",
        )


def _closure(parents: Tensor) -> Tensor:
    """Who is an ancestor of whom, each token its own: (1|B, T, T). Paths double in length with each product."""
    size = parents.shape[1]
    tokens = torch.arange(size, device=parents.device)
    reaches = (parents[:, :, None] == tokens) | (tokens[:, None] == tokens)
    for _ in range(max(size - 1, 0).bit_length()):
        reaches = (reaches.float() @ reaches.float()) > 0
    return reaches
