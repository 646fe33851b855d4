"""Rotary position embedding: a token's position is the angle by which its query and key are turned.

The widths of a head are taken in pairs. Pair i of a token at position p is turned, as a point of the plane,
by the angle p * f_i, where f_i = base ** (-2 i / R). The product of a query at p with a key at p' then
depends on p - p' alone (Su et al. 2021, https://arxiv.org/abs/2104.09864).

A *scaling* (`scalings.py`) changes the frequencies f_i so that a model reads texts longer than those it was trained on.

Letters: B batch, H heads, N tokens, D head width, R rotated width (the first R of the D).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from regard import tuning
from regard.checks import check_integers, check_positions, not_positions
from regard.errors import bad_type, bad_value, shape_of
from regard.positions.scalings import Scaling, periods_of
from regard.tracing import is_eager

__all__ = ["Rotary", "rotate"]


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """Turn the first R widths of `x` by angles given as their cosine and sine; the other widths pass through.

    The pairs are (i, i + R/2), the two halves; or (2i, 2i + 1) if `interleaved`. The arithmetic is in float32
    (float64 for float64), the result has the dtype of `x`.

    Args:
        x: (B, H, N, D).
        cos, sin: (N, R/2), or (B, N, R/2) where each text of the batch has its own angles.

    Returns:
        (B, H, N, D).

    >>> quarter = torch.tensor([[torch.pi / 2]])  # one token, one pair
    >>> x = torch.tensor([3.0, 5.0, 7.0]).view(1, 1, 1, 3)  # the third width passes through
    >>> rotate(x, quarter.cos(), quarter.sin()).flatten().round().tolist()
    [-5.0, 3.0, 7.0]
    """
    _check_rotation(x, cos, sin)
    return _rotate(x, cos, sin, interleaved)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    dtype = _working_dtype(x)
    if cos.dtype != dtype:
        cos, sin = cos.to(dtype), sin.to(dtype)
    if cos.ndim == 3:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)  # (B, 1, N, R/2): the same for all heads

    half = cos.shape[-1]
    all_rotated = 2 * half == x.shape[-1]
    rotated, rest = (x, None) if all_rotated else (x[..., : 2 * half], x[..., 2 * half :])
    turned = _turn(rotated.to(dtype), cos, sin, interleaved).to(x.dtype)
    return turned if rest is None else torch.cat((turned, rest), dim=-1)


def _turn(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """x (B, H, N, R), all of it turned: each pair (a, b) becomes (a cos - b sin, b cos + a sin)."""
    if is_eager() and x.numel() >= tuning.ROTARY_IN_PLACE and not (cos.requires_grad or sin.requires_grad):
        return _InPlace.apply(x, cos, sin, interleaved)
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else x.chunk(2, dim=-1)
    a, b = torch.addcmul(a * cos, b, sin, value=-1), torch.addcmul(b * cos, a, sin)
    return torch.stack((a, b), dim=-1).flatten(-2) if interleaved else torch.cat((a, b), dim=-1)


class _InPlace(torch.autograd.Function):
    """The same with one new tensor instead of five, forward and backward: what large ones cost is memory."""

    @staticmethod
    def forward(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        axis = -1 if interleaved else -2  # the two members of a pair: (B, H, N, R/2, 2) or (B, H, N, 2, R/2)
        # `view` and `reshape`, since batched gradients (`is_grads_batched`) know them and not `unflatten`.
        pairs = x.view(*x.shape[:-1], *((-1, 2) if interleaved else (2, -1)))
        turned = pairs * cos.unsqueeze(axis)
        turned.select(axis, 0).addcmul_(pairs.select(axis, 1), sin, value=-1)
        turned.select(axis, 1).addcmul_(pairs.select(axis, 0), sin)
        return turned.reshape(x.shape)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        _, cos, sin, ctx.interleaved = inputs
        ctx.save_for_backward(cos, sin)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        cos, sin = ctx.saved_tensors
        # A rotation's transpose is the rotation by the opposite angle.
        return _turn(grads[0], cos, -sin, ctx.interleaved), None, None, None


@contextmanager
def _kept_for_training() -> Iterator[None]:
    """For tensors that outlive the call: those made in inference mode cannot be saved for a backward pass."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def _working_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _check_rotation(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    if x.ndim != 4 or not x.is_floating_point():
        raise bad_value(
            "x",
            expected="floating point (B, H, N, D)",
            received=f"{x.dtype} {shape_of(x)}",
            remedy="x.unflatten(-1, (heads, -1)).transpose(1, 2) splits (B, N, W) into heads",
        )
    batch, _, tokens, width = x.shape
    right = cos.shape == sin.shape and cos.ndim in (2, 3) and cos.shape[-2] == tokens
    if not right or (cos.ndim == 3 and cos.shape[0] not in (1, batch)):
        raise bad_value(
            "cos and sin",
            expected=f"both (N, R/2) or (B, N, R/2) with N = {tokens}, B = {batch}",
            received=f"{shape_of(cos)} and {shape_of(sin)}",
            remedy="one row per token of x, one column per pair",
        )
    if 2 * cos.shape[-1] > width:
        raise bad_value(
            "cos and sin",
            expected=f"at most {width // 2} columns, one per pair of the {width} widths of x",
            received=f"{cos.shape[-1]} columns",
            remedy="pass cos and sin of the angles once, not repeated for both members of a pair",
        )


class Rotary(nn.Module):
    """Rotary position embedding of queries or keys, with any scaling. It has no parameters and no buffers.

    Args:
        head_dim: D, the width of a head.
        base: the slowest pair turns once in about 2 pi * base positions.
        width: R, how many of the D widths are rotated, the first ones; even. By default all of them.
        interleaved: pairs (2i, 2i + 1) instead of the halves (i, i + R/2).
        scaling: for texts longer than the trained ones: `LinearScaling`, `DynamicNTK`, `YaRN`, `LongRoPE`, `Llama3`.

    Raises:
        ValueError: for an odd width, one larger than the head, or a scaling that does not fit it.

    A score depends on the distance alone:

    >>> rotary = Rotary(4)
    >>> q, k = torch.ones(1, 1, 1, 4), torch.ones(1, 1, 1, 4)
    >>> near = (rotary(q, 3) * rotary(k, 1)).sum()
    >>> far = (rotary(q, 1003) * rotary(k, 1001)).sum()
    >>> torch.allclose(near, far, atol=1e-4)
    True

    Positions of your own, such as those of a packed or a left-padded batch:

    >>> rotary(torch.ones(2, 3, 5, 4), torch.tensor([0, 1, 2, 0, 1])).shape
    torch.Size([2, 3, 5, 4])
    """

    def __init__(
        self,
        head_dim: int,
        *,
        base: float = 10000.0,
        width: int | None = None,
        interleaved: bool = False,
        scaling: Scaling | None = None,
    ) -> None:
        super().__init__()
        width = head_dim if width is None else width
        if head_dim < 1 or width < 2 or width % 2:
            raise bad_value(
                "width",
                expected="an even number of rotated widths, at least 2",
                received=f"width={width} for head_dim={head_dim}",
                remedy="widths are rotated in pairs; pass width=, the even part of head_dim to rotate",
            )
        if width > head_dim:
            raise bad_value(
                "width",
                expected=f"at most head_dim = {head_dim}",
                received=width,
                remedy="the rotated part is the first `width` of the head's widths",
            )
        if not base > 1:
            raise bad_value("base", expected="a number above 1", received=base, remedy="10000.0 is usual")
        if scaling is not None and not isinstance(scaling, Scaling):
            raise bad_type(
                "scaling",
                expected="LinearScaling, DynamicNTK, YaRN, LongRoPE, Llama3 or None",
                received=type(scaling).__name__,
                remedy="for example scaling=LinearScaling(4.0)",
            )
        self.head_dim = head_dim
        self.base = base
        self.width = width
        self.interleaved = interleaved
        self.scaling = Scaling() if scaling is None else scaling
        self.scaling.check(width)
        # (cos, sin) of the positions 0, 1, 2 ...; and the frequencies. Derived, so no buffers; the keys name
        # all that they are derived from.
        self._tables: dict[Hashable, tuple[Tensor, Tensor]] = {}
        self._frequencies: dict[Hashable, Tensor] = {}

    @property
    def attention_factor(self) -> float:
        """What cosine and sine are multiplied by (YaRN and LongRoPE; 1 otherwise)."""
        return self.scaling.amplitude

    def forward(self, x: Tensor, positions: Tensor | int = 0, *, length: int | Tensor | None = None) -> Tensor:
        """Turn each token by the angles of its position.

        Args:
            x: (B, H, N, D).
            positions: where the first token stands, and the others follow; or integers (N,) or (B, N).
            length: how long the whole text is, for scalings that depend on it (`DynamicNTK`, `LongRoPE`). By
                default it ends at the last of `positions`.

        Returns:
            (B, H, N, D), in the dtype of `x`.
        """
        if x.ndim != 4 or x.shape[-1] != self.head_dim:
            raise bad_value(
                "x",
                expected=f"(B, H, N, D) with D = head_dim = {self.head_dim}",
                received=shape_of(x),
                remedy="x.unflatten(-1, (heads, head_dim)).transpose(1, 2) splits (B, N, W) into heads",
            )
        dtype = _working_dtype(x)
        if isinstance(positions, Tensor):
            self._check_positions(positions, x.shape[0], x.shape[-2])
            cos, sin = self._cos_sin(positions.to(x.device), length, dtype)
        elif isinstance(positions, (int, torch.SymInt)) and not isinstance(positions, bool):
            cos, sin = self._cos_sin_from(positions, x, length, dtype)
            if cos.shape[-1] == self.width:  # both halves of the pairs
                wide = x if x.dtype == dtype else x.to(dtype)
                return torch.addcmul(wide * cos, wide.roll(self.width // 2, -1), sin).to(x.dtype)
        else:
            raise not_positions("positions", positions)
        return _rotate(x, cos, sin, self.interleaved)

    def angles(
        self, positions: Tensor, length: int | Tensor | None = None, *, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """The angles (..., R/2), in radians, of integer positions (...).

        >>> Rotary(4, base=100.0).angles(torch.tensor([0, 10]))
        tensor([[ 0.,  0.],
                [10.,  1.]])
        """
        check_integers("positions", positions)
        if not self.scaling.depends_on_length:
            frequencies = self._kept_frequencies(positions, dtype)
        else:
            if length is None and positions.numel():
                length = positions.max() + 1  # a tensor: no wait for the device, one graph for a compiler
            frequencies = self.frequencies(length, positions.device, dtype=dtype)
        return positions.unsqueeze(-1).to(dtype) * frequencies

    def frequencies(
        self,
        length: int | Tensor | None = None,
        device: torch.device | str | None = None,
        *,
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        """The frequencies (R/2,), in radians per position, of a text of `length` (None: the trained one)."""
        periods = periods_of(self.base, self.width, device, dtype)
        return self.scaling.frequencies(periods, base=self.base, length=length)

    def extra_repr(self) -> str:
        parts = [f"{self.head_dim}", f"base={self.base:g}"]
        if self.width != self.head_dim:
            parts.append(f"width={self.width}")
        if self.interleaved:
            parts.append("interleaved=True")
        if type(self.scaling) is not Scaling:
            parts.append(f"scaling={self.scaling}")
        return ", ".join(parts)

    def __getstate__(self) -> dict:
        # Copies and pickles make their own tables: these are on this process's devices, and quickly made.
        return {**self.__dict__, "_tables": {}, "_frequencies": {}}

    def _check_positions(self, positions: object, batch: int, tokens: int) -> None:
        check_positions("positions", positions, batch, tokens)

    def _cos_sin(self, positions: Tensor, length: int | Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        angles = self.angles(positions, length, dtype=dtype)
        cos, sin = angles.cos(), angles.sin()
        if self.attention_factor == 1:
            return cos, sin
        return cos * self.attention_factor, sin * self.attention_factor

    def _cos_sin_from(
        self, start: int, x: Tensor, length: int | Tensor | None, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Of positions start .. start + N - 1: a slice of a table where one may be kept, else computed.

        For a few tokens each is (N, R), cosines twice and sines with both signs: what is slow there are operations, and
        these need the fewest. Otherwise (N, R/2).
        """
        end = start + x.shape[-2]
        length = end if length is None else length
        # `type`: for tensors of another kind, such as fake ones, nothing is kept.
        if is_eager() and type(x) is Tensor and isinstance(length, int) and start >= 0 and end <= tuning.ROTARY_TABLE:
            regime = self.scaling.regime(length)
            if regime != length:  # else the table would serve this one length
                few = x.numel() < tuning.ROTARY_FEW and self.width == self.head_dim and not self.interleaved
                cos, sin = self._table(end, regime, length, x.device, dtype, both=few)
                return cos[start:end], sin[start:end]
        return self._cos_sin(torch.arange(start, end, device=x.device), length, dtype)

    def _key(self, device: torch.device, dtype: torch.dtype, regime: Hashable) -> Hashable:
        return device, dtype, self.base, self.width, self.scaling, regime

    def _kept_frequencies(self, positions: Tensor, dtype: torch.dtype) -> Tensor:
        """`frequencies` of a scaling that is the same for all lengths, kept where that is possible."""
        device = positions.device
        if type(positions) is not Tensor or not is_eager():
            return self.frequencies(None, device, dtype=dtype)
        key = self._key(device, dtype, None)
        kept = self._frequencies.get(key)
        if kept is None:
            with _kept_for_training():
                kept = self.frequencies(None, device, dtype=dtype)
            if type(kept) is Tensor:
                self._frequencies[key] = kept
        return kept

    def _table(
        self, size: int, regime: Hashable, length: int, device: torch.device, dtype: torch.dtype, *, both: bool = False
    ) -> tuple[Tensor, Tensor]:
        """cos and sin, each (at least `size`, R/2); for `both` halves (at least `size`, R), the first sine minus."""
        key = self._key(device, dtype, (regime, both))
        kept = self._tables.get(key)
        if kept is not None and len(kept[0]) >= size:
            return kept
        # Doubling makes the cost of a text read token by token that of reading it at once.
        size = min(max(size, 256, 0 if kept is None else 2 * len(kept[0])), tuning.ROTARY_TABLE)
        with _kept_for_training():
            table = self._cos_sin(torch.arange(size, device=device), length, dtype)
            if both:
                table = torch.cat((table[0], table[0]), -1), torch.cat((-table[1], table[1]), -1)
        if type(table[0]) is Tensor:  # not a fake one, of a mode that is on around this call
            self._tables[key] = table
        return table
