"""Rotary positions of several axes: a token of a picture has a time, a row and a column, and each turns its own pairs.

Pair i is turned by p[axis(i)] * f_i. The axes share the R/2 pairs in one of four ways, here with sections of 4 and 2:

    order          pairs' axes    pairs' frequencies
    "contiguous"   0 0 0 0 1 1    f0 f1 f2 f3 f4 f5    sections side by side       Qwen2-VL, Qwen2.5-VL
    "interleaved"  0 1 0 1 0 0    f0 f1 f2 f3 f4 f5    in turn, the first again    Qwen3-VL, Qwen3.5
                                                       where the others have theirs
    "grouped"      0 0 0 1 1 1    f0 f2 f4 f1 f3 f5    frequencies dealt in turn   Pixtral (equal sections)
    "separate"     0 0 0 0 1 1    of each axis alone   a series for each axis      vision towers of Qwen-VL and Llama 4

A token of text has the same position on all axes: for the first two it is then rotated as by a plain `Rotary`.

Letters: B batch, H heads, N tokens, A axes, D head width, R rotated width.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from regard.checks import check_integers, not_positions
from regard.errors import bad_value, shape_of
from regard.positions.rotary import Rotary
from regard.positions.scalings import Scaling, periods_of

__all__ = ["MultiAxisRotary"]

Order = Literal["contiguous", "interleaved", "grouped", "separate"]


class MultiAxisRotary(Rotary):
    """`Rotary` for positions of several axes, (N, A) or (B, N, A).

    Masks do not see these positions: in a layer `Causal` and `Window` compare the order of the tokens.

    Args:
        head_dim: D.
        sections: how many pairs turn with each axis; their sum is R/2. (16, 24, 24) in Qwen2-VL.
        order: how pairs and frequencies are shared out, see the top of this file.
        base, width, interleaved, scaling: as `Rotary` (no scaling where the order is "grouped" or "separate").

    >>> rotary = MultiAxisRotary(12, (2, 2, 2))
    >>> time_row_column = torch.tensor([[0, 0, 0], [1, 1, 1], [2, 2, 2], [2, 2, 3], [2, 3, 2]])  # (N, A)
    >>> rotary(torch.ones(1, 2, 5, 12), time_row_column).shape
    torch.Size([1, 2, 5, 12])
    """

    def __init__(
        self,
        head_dim: int,
        sections: Sequence[int],
        *,
        order: Order = "contiguous",
        base: float = 10000.0,
        width: int | None = None,
        interleaved: bool = False,
        scaling: Scaling | None = None,
    ) -> None:
        super().__init__(head_dim, base=base, width=width, interleaved=interleaved, scaling=scaling)
        self.sections, self.order = tuple(sections), order
        if order not in get_args(Order):
            expected = ", ".join(map(repr, get_args(Order)))
            raise bad_value("order", expected=f"one of {expected}", received=repr(order))
        if len(self.sections) < 2 or any(type(section) is not int or section < 1 for section in self.sections):
            raise bad_value("sections", expected="a positive integer for each of two axes or more", received=sections)
        if sum(self.sections) != self.width // 2:
            raise bad_value(
                "sections",
                expected=f"numbers with the sum {self.width // 2}, one pair for two of {self.width} rotated widths",
                received=f"{self.sections}, with the sum {sum(self.sections)}",
            )
        if order == "grouped" and len(set(self.sections)) > 1:
            raise bad_value("sections", expected='equal ones where order="grouped"', received=self.sections)
        if order in ("grouped", "separate") and scaling is not None:
            raise bad_value("scaling", expected=f"None where order={order!r}", received=scaling)
        self._axes = _axes_of_pairs(self.sections, order)

    def forward(self, x: Tensor, positions: Tensor | int = 0, *, length: int | Tensor | None = None) -> Tensor:
        """Turn each token by the angles of its positions.

        Args:
            x: (B, H, N, D).
            positions: (N, A) or (B, N, A); (N,) or a first position, where all axes have the same.
            length: as `Rotary`'s.

        Returns:
            (B, H, N, D), in the dtype of `x`.
        """
        return super().forward(x, positions, length=length)

    def angles(
        self, positions: Tensor, length: int | Tensor | None = None, *, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """The angles (..., R/2), in radians, of integer positions (..., A), or (N,) for the same on all axes."""
        if positions.dim() == 1:
            return super().angles(positions, length, dtype=dtype)
        check_integers("positions", positions)
        if length is None and self.scaling.depends_on_length and positions.numel():
            length = positions.max() + 1
        axes = torch.tensor(self._axes, device=positions.device)
        return positions[..., axes].to(dtype) * self.frequencies(length, positions.device, dtype=dtype)

    def frequencies(
        self,
        length: int | Tensor | None = None,
        device: torch.device | str | None = None,
        *,
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        """The frequency of each pair (R/2,), in radians per position."""
        if self.order == "separate":
            series = [periods_of(self.base, 2 * section, device, dtype) for section in self.sections]
            return 1 / torch.cat(series)
        frequencies = super().frequencies(length, device, dtype=dtype)
        return frequencies.view(self.sections[0], -1).T.flatten() if self.order == "grouped" else frequencies

    def extra_repr(self) -> str:
        head_dim, *rest = super().extra_repr().split(", ", 1)
        return ", ".join([head_dim, f"sections={self.sections}", f"order={self.order!r}", *rest])

    def _check_positions(self, positions: object, batch: int, tokens: int) -> None:
        if not isinstance(positions, Tensor):
            raise not_positions("positions", positions)
        check_integers("positions", positions)
        shape, axes = positions.shape, len(self.sections)
        same = positions.dim() == 1 and shape[0] == tokens
        fits = positions.dim() in (2, 3) and shape[-2] == tokens and shape[-1] == axes
        if not same and (not fits or (positions.dim() == 3 and shape[0] not in (1, batch))):
            raise bad_value(
                "positions",
                expected=f"({tokens}, {axes}) or ({batch}, {tokens}, {axes}): (N, A) or (B, N, A), the axes last",
                received=shape_of(positions),
                remedy="positions.movedim(0, -1), where the axes are first",
            )

    def _key(self, device: torch.device, dtype: torch.dtype, regime: Hashable) -> Hashable:
        return super()._key(device, dtype, regime), self.sections, self.order


def _axes_of_pairs(sections: tuple[int, ...], order: Order) -> tuple[int, ...]:
    """The axis of each pair, (R/2,)."""
    if order != "interleaved":
        return tuple(axis for axis, section in enumerate(sections) for _ in range(section))
    axes = [0] * sum(sections)
    for axis, section in enumerate(sections[1:], start=1):
        for pair in range(axis, min(section * len(sections), len(axes)), len(sections)):
            axes[pair] = axis
    return tuple(axes)
