"""Masks made of masks: `a & b`, `a | b`, `~a`, and the parts of a conjunction."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from regard.masks.base import Mask
from regard.masks.tiles import Grid, Survey, Tile

__all__ = ["And", "Not", "Or", "conjuncts"]


class And(Mask):
    """Visible where both are."""

    fields = ("left", "right")

    def __init__(self, left: Mask, right: Mask) -> None:
        self.left, self.right = left, right

    def block(self, tile: Tile) -> Tensor:
        return self.left.block(tile) & self.right.block(tile)

    def part(self, tile: Tile, heads: slice, shift: int) -> Mask:
        return type(self)(self.left.part(tile, heads, shift), self.right.part(tile, heads, shift))

    def grain(self) -> tuple[int, int] | None:
        return self.left.grain() or self.right.grain()

    def of_heads(self, heads: slice) -> Mask:
        return type(self)(self.left.of_heads(heads), self.right.of_heads(heads))

    def sees_all(self, first: int, queries: int, keys: int) -> bool:
        return self.left.sees_all(first, queries, keys) and self.right.sees_all(first, queries, keys)

    def survey(self, grid: Grid) -> Survey:
        a, b = self.left.survey(grid), self.right.survey(grid)
        return Survey(a.some & b.some, a.every & b.every)

    def check(self, batch: int, heads: int, queries: int, keys: int) -> None:
        self.left.check(batch, heads, queries, keys)
        self.right.check(batch, heads, queries, keys)

    def __repr__(self) -> str:
        return " & ".join(f"({m})" if isinstance(m, Or) else f"{m}" for m in (self.left, self.right))


class Or(And):
    """Visible where either is."""

    def block(self, tile: Tile) -> Tensor:
        return self.left.block(tile) | self.right.block(tile)

    def sees_all(self, first: int, queries: int, keys: int) -> bool:
        return self.left.sees_all(first, queries, keys) or self.right.sees_all(first, queries, keys)

    def survey(self, grid: Grid) -> Survey:
        a, b = self.left.survey(grid), self.right.survey(grid)
        return Survey(a.some | b.some, a.every | b.every)

    def __repr__(self) -> str:
        return f"{self.left} | {self.right}"


class Not(Mask):
    """Visible where the other is not."""

    fields = ("inner",)

    def __init__(self, inner: Mask) -> None:
        self.inner = inner

    def block(self, tile: Tile) -> Tensor:
        return ~self.inner.block(tile)

    def part(self, tile: Tile, heads: slice, shift: int) -> Mask:
        return Not(self.inner.part(tile, heads, shift))

    def grain(self) -> tuple[int, int] | None:
        return self.inner.grain()

    def of_heads(self, heads: slice) -> Mask:
        return Not(self.inner.of_heads(heads))

    def survey(self, grid: Grid) -> Survey:
        inner = self.inner.survey(grid)
        return Survey(~inner.every, ~inner.some)

    def check(self, batch: int, heads: int, queries: int, keys: int) -> None:
        self.inner.check(batch, heads, queries, keys)

    def __repr__(self) -> str:
        return f"~({self.inner})" if isinstance(self.inner, And) else f"~{self.inner}"


def conjuncts(mask: Mask | None) -> Iterator[Mask]:
    """The parts of a mask that all must agree: `a & b & ~(c | d)` is a, b, ~c, ~d.

    >>> from regard.masks import Causal, Prefix, Window
    >>> list(conjuncts(Causal() & (Window(3) | Prefix(2)) & ~(Prefix(1) | Window(1))))
    [Causal(), Window(3) | Prefix(2), ~Prefix(1), ~Window(1)]
    """
    if mask is None:
        return
    if type(mask) is And:
        yield from conjuncts(mask.left)
        yield from conjuncts(mask.right)
    elif type(mask) is Not and type(mask.inner) is Or:
        yield from conjuncts(~mask.inner.left)
        yield from conjuncts(~mask.inner.right)
    else:
        yield mask
