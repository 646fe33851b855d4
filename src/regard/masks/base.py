"""The base of all masks, and the checks of what a user's own masks answer.

Letters: B batch, H query heads, N queries, M keys; n, m the sides of one tile; R, C the number of tiles down, across.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor

import regard.masks as masks  # (complete when a method asks for it: the kinds of masks import this file)
from regard.errors import bad_type, bad_value, shape_of
from regard.masks.tiles import Grid, Survey, Tile, whole

__all__ = ["Mask", "check_axes", "check_sizes", "checked", "of_batch", "short"]


class Mask:
    """Base of all masks. True means: may attend.

    >>> from regard.masks import Causal, Window
    >>> mask = Causal() & Window(2)
    >>> mask
    Causal() & Window(2)
    >>> mask.dense(3, 3)[0, 0].int().tolist()
    [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
    >>> print(mask.draw(3))
    █··
    ██·
    ·██
    """

    fields: ClassVar[tuple[str, ...]] = ()
    kinds: ClassVar[dict[str, type[Mask]]] = {}  # by name, so that operators can rebuild a mask from its parts

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        Mask.kinds[cls.__name__] = cls
        if not cls.__module__.startswith(
            "regard.masks."
        ):  # a user's own: kernels rely on the shapes of what it answers
            for answer, check in (("block", _check_block), ("survey", _check_survey)):
                if answer in vars(cls):
                    setattr(cls, answer, checked(vars(cls)[answer], check))

    def block(self, tile: Tile) -> Tensor:
        """Which pairs of the tile are visible: boolean, four axes that broadcast to (B, H, n, m)."""
        raise NotImplementedError

    def survey(self, grid: Grid) -> Survey:
        """Which tiles are wholly hidden or wholly visible. By default nothing is known."""
        unknown = torch.ones(1, 1, 1, dtype=torch.bool, device=grid.q_positions.device)
        return Survey(unknown, ~unknown)

    def part(self, tile: Tile, heads: slice, shift: int) -> Mask:
        """The same mask for a tile alone, with all batch items and some heads: slots are counted from its corner, and
        positions from `shift`. By default what it says of the tile is evaluated."""
        visible = self.block(tile)
        return masks.Keep(visible[:, heads] if visible.shape[1] > 1 else visible)

    def grain(self) -> tuple[int, int] | None:
        """The queries and keys of a tile, where it hides whole tiles of one size; None where any size will do."""
        return None

    def of_heads(self, heads: slice) -> Mask:
        """A mask that surveys the same for some heads alone, where it can be had for nothing; else itself."""
        return self

    def sees_all(self, first: int, queries: int, keys: int) -> bool:
        """Whether it is known to hide nothing from queries at `first`, `first` + 1, ... of keys at 0, 1, ..."""
        return False

    def shared_by_heads(self) -> bool:
        """Whether all heads see the same: no tensor of it has an axis for them."""
        return all(tensor.dim() < 4 or tensor.shape[1] == 1 for tensor in self.tensors())

    def check(self, batch: int, heads: int, queries: int, keys: int) -> None:
        """Raise where this mask does not fit attention of shape (B, H, N, M)."""

    def dense(
        self,
        queries: int,
        keys: int | None = None,
        *,
        positions: Tensor | None = None,
        key_positions: Tensor | None = None,
    ) -> Tensor:
        """The whole mask at once: boolean, (1|B, 1|H, N, M). For small sizes and for looking.

        Without positions the last query stands at the last key.
        """
        keys = queries if keys is None else keys
        tile = whole(queries, keys, positions=positions, key_positions=key_positions, device=self._device())
        visible = self.block(tile)
        return visible.expand(*visible.shape[:2], queries, keys)

    def draw(self, queries: int = 8, keys: int | None = None, *, batch: int = 0, head: int = 0) -> str:
        """A small text picture: one line per query, `█` where it may look, `·` where not."""
        picture = self.dense(queries, keys)
        rows = picture[min(batch, picture.shape[0] - 1), min(head, picture.shape[1] - 1)].tolist()
        return "\n".join("".join("█" if seen else "·" for seen in row) for row in rows)

    def tensors(self) -> Iterator[Tensor]:
        """Those that it is made of."""
        for name in self.fields:
            value = getattr(self, name)
            if isinstance(value, Tensor):
                yield value
            elif isinstance(value, Mask):
                yield from value.tensors()

    def _device(self) -> torch.device | None:
        return next((tensor.device for tensor in self.tensors()), None)

    def __and__(self, other: Mask) -> Mask:
        return masks.And(self, masks.as_mask(other))

    def __or__(self, other: Mask) -> Mask:
        return masks.Or(self, masks.as_mask(other))

    __rand__ = __and__
    __ror__ = __or__

    def __invert__(self) -> Mask:
        return self.inner if isinstance(self, masks.Not) else masks.Not(self)

    def __bool__(self) -> bool:
        raise bad_type(
            "mask",
            expected="`a & b`, `a | b` or `~a`",
            received="`a and b`, `not a` or `if a`",
            remedy="masks compose with &, | and ~; test for absence with `is None`",
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={short(getattr(self, name))}' for name in self.fields)})"


def checked(answer: Callable[..., Any], check: Callable[..., None]) -> Callable[..., Any]:
    """The method `answer`, whose results `check(self, result, *arguments)` refuses where they are wrong."""

    @functools.wraps(answer)
    def call(self: Any, *arguments: Any) -> Any:
        result = answer(self, *arguments)
        if not torch.compiler.is_compiling():
            check(self, result, *arguments)
        return result

    return call


def check_axes(what: str, tensor: Tensor, names: tuple[str, ...], sizes: tuple[int, ...], remedy: str = "") -> None:
    """Each axis of a tensor must be 1 or the size named (0: any)."""
    fits = tensor.dim() == len(sizes) and all(
        size in (1, want) or not want for size, want in zip(tensor.shape, sizes, strict=True)
    )
    if not fits:
        axes = ", ".join(f"1|{name}" if want != 1 else "1" for name, want in zip(names, sizes, strict=True))
        known = ", ".join(f"{name} = {want}" for name, want in zip(names, sizes, strict=True) if want)
        raise bad_value(what, expected=f"shape ({axes}), {known}", received=f"shape {shape_of(tensor)}", remedy=remedy)


def _check_block(mask: Mask, visible: object, tile: Tile) -> None:
    what = f"{type(mask).__name__}.block"
    if not isinstance(visible, Tensor) or visible.dtype is not torch.bool:
        received = f"dtype {visible.dtype}" if isinstance(visible, Tensor) else type(visible).__name__
        remedy = "compare: scores > 0; numbers that are added to the scores are a bias (positions.Bias)"
        raise bad_type(what, expected="a boolean tensor (True = may attend)", received=received, remedy=remedy)
    remedy = "axes of the batch and of the heads lead, 1 where all are alike: (n, m) is visible[None, None]"
    check_axes(what, visible, ("B", "H", "n", "m"), (tile.items, tile.heads, *tile.shape), remedy)
    if visible.device != tile.q_positions.device:
        raise bad_value(what, expected=f"device {tile.q_positions.device}, as the tile's", received=visible.device)


def _check_survey(mask: Mask, survey: object, grid: Grid) -> None:
    what = f"{type(mask).__name__}.survey"
    if not isinstance(survey, Survey) or any(not isinstance(x, Tensor) or x.dtype is not torch.bool for x in survey):
        raise bad_type(what, expected="a masks.Survey of two boolean tensors", received=type(survey).__name__)
    rows, cols = grid.rows(grid.q_positions)[0].shape[1], grid.cols(grid.k_positions)[0].shape[2]
    for name, answer in survey._asdict().items():
        check_axes(f"{what}, {name}", answer, ("B", "R", "C"), (0, rows, cols))
    if bool((survey.every & ~survey.some).any()):
        raise bad_value(what, expected="some where every is", received="a tile that is wholly visible and hidden")


def of_batch(tensor: Tensor, batch: slice) -> Tensor:
    """The items of a tensor whose batch axis is 1 (shared by all items) or B."""
    return tensor if tensor.shape[0] == 1 else tensor[batch]


def check_sizes(what: str, tensor: Tensor, *axes: tuple[str, int], exact: tuple[str, ...] = ()) -> None:
    """Each axis must be the size named, or 1 (unless it is named in `exact`)."""
    for got, (name, want) in zip(tensor.shape, axes, strict=True):
        if got != want and (got != 1 or name in exact):
            names = ", ".join(name for name, _ in axes)
            raise bad_value(
                what, expected=f"({names}) = {tuple(size for _, size in axes)}", received=f"shape {shape_of(tensor)}"
            )


def short(value: object) -> str:
    """A tensor in a repr: its values where there are few, else its shape."""
    if not isinstance(value, Tensor):
        return repr(value)
    if value.numel() <= 8 and value.device.type == "cpu" and type(value) is Tensor:
        return repr(value.tolist() if value.shape[0] != 1 or value.dim() == 1 else value[0].tolist())
    return repr(tuple(value.shape))
