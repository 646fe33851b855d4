"""Rotary position embedding: a token's position is the angle by which its query and key are turned.

The widths of a head are taken in pairs. Pair i of a token at position p is turned, as a point of the plane,
by the angle p * f_i, where f_i = base ** (-2 i / R). The product of a query at p with a key at p' then
depends on p - p' alone (Su et al. 2021, https://arxiv.org/abs/2104.09864).

A *scaling* changes the frequencies f_i so that a model reads texts longer than those it was trained on::

    Linear      all positions squeezed by one factor             https://arxiv.org/abs/2306.15595
    DynamicNTK  a larger base, the larger the longer the text    https://arxiv.org/abs/2309.00071 (appendix B)
    YaRN        slow pairs squeezed, fast pairs kept             https://arxiv.org/abs/2309.00071
    LongRoPE    one searched factor per pair                     https://arxiv.org/abs/2402.13753
    Llama3      slow pairs squeezed, fast pairs kept, by wavelength   https://arxiv.org/abs/2407.21783

Letters: B batch, H heads, N tokens, D head width, R rotated width (the first R of the D).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from regard.errors import bad_type, bad_value, shape_of

__all__ = ["DynamicNTK", "LinearScaling", "Llama3", "LongRoPE", "Rotary", "Scaling", "YaRN", "rotate"]

# From this many numbers on, memory is what a rotation waits for, and `_InPlace` is worth its cost per call.
_LARGE = 1 << 17
# Up to this many it is the number of operations.
_FEW = 1 << 13
# A table holds at most this many positions (4 MB at width 64); what lies beyond is computed each time.
_LONGEST_TABLE = 1 << 14


# ----------------------------------------------------------------------------------------------------
# The rotation


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
    whole = 2 * half == x.shape[-1]
    part, rest = (x, None) if whole else (x[..., : 2 * half], x[..., 2 * half :])
    turned = _turn(part.to(dtype), cos, sin, interleaved).to(x.dtype)
    return turned if rest is None else torch.cat((turned, rest), dim=-1)


def _turn(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """x (B, H, N, R), all of it turned: each pair (a, b) becomes (a cos - b sin, b cos + a sin)."""
    if _is_eager() and x.numel() >= _LARGE and not (cos.requires_grad or sin.requires_grad):
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


def _is_eager() -> bool:
    """Whether operations run as they are called, under no compiler, tracer, `torch.func` or forward gradient.

    Only then may a result be kept for later calls, and only then is backward all that a gradient needs.
    """
    return not (
        torch.compiler.is_compiling()
        or torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage]
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
    )


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


# ----------------------------------------------------------------------------------------------------
# Scalings


@dataclass(frozen=True)
class Scaling:
    """How frequencies change for texts longer than the trained ones. The base class changes nothing.

    Write your own by overriding `frequencies`; where they depend on the length, `regime` and its flag too.
    """

    depends_on_length: ClassVar[bool] = False

    def frequencies(self, periods: Tensor, *, base: float, length: int | Tensor | None) -> Tensor:
        """The scaled frequencies (R/2,), in radians per position.

        Args:
            periods: (R/2,), base ** (2 i / R): one over the unscaled frequencies.
            length: how long the text is, an int or a tensor without axes; None stands for the trained length.
        """
        return 1 / periods

    def regime(self, length: int) -> Hashable:
        """What of `length` the frequencies depend on: two lengths of one regime have equal frequencies."""
        return length if self.depends_on_length else "any length"

    @property
    def amplitude(self) -> float:
        """What cosine and sine are multiplied by, and so the scores by its square."""
        return 1.0

    def check(self, width: int) -> None:
        """Raise if a rotated width of `width` cannot be scaled so."""


@dataclass(frozen=True)
class LinearScaling(Scaling):
    """Position interpolation: position p is treated as p / factor.

    >>> Rotary(4, base=100.0, scaling=Linear(4.0)).frequencies().tolist()  # 1 and 0.1, divided by 4
    [0.25, 0.02500000037252903]
    """

    factor: float

    def __post_init__(self) -> None:
        _check_positive(self, "factor")

    def frequencies(self, periods: Tensor, *, base: float, length: int | Tensor | None) -> Tensor:
        return 1 / periods / self.factor


@dataclass(frozen=True)
class DynamicNTK(Scaling):
    """A base that grows with the text once it is longer than `trained_length`; up to there nothing changes.

    The base grows so that the slowest pair turns as little as under linear interpolation by
    factor * length / trained_length - (factor - 1), and the fastest pair as before.
    """

    depends_on_length: ClassVar[bool] = True
    factor: float
    trained_length: int

    def __post_init__(self) -> None:
        _check_positive(self, "factor", "trained_length")

    def frequencies(self, periods: Tensor, *, base: float, length: int | Tensor | None) -> Tensor:
        if length is None:
            return 1 / periods
        if isinstance(length, Tensor):
            length = length.clamp(min=self.trained_length).to(periods.dtype)  # (of integers it would be float32)
        else:
            length = max(length, self.trained_length)
        width = 2 * len(periods)
        stretch = self.factor * length / self.trained_length - (self.factor - 1)
        return 1 / _periods(base * stretch ** (width / (width - 2)), width, periods.device, periods.dtype)

    def regime(self, length: int) -> Hashable:
        return "trained" if length <= self.trained_length else length

    def check(self, width: int) -> None:
        if width < 4:
            raise bad_value(
                "scaling",
                expected="a rotated width of at least 4 for DynamicNTK",
                received=width,
                remedy="with one pair there is no slowest pair to hold: use Linear",
            )


@dataclass(frozen=True)
class YaRN(Scaling):
    """Pairs that turn often within the trained length are kept, those that turn seldom squeezed by `factor`.

    Args:
        factor: the extended length over the trained one.
        trained_length: the length the model was trained on.
        beta_fast: pairs that make more turns than this within the trained length are kept.
        beta_slow: pairs that make fewer turns than this are squeezed; those between, in proportion.
        attention_factor: what cosine and sine are multiplied by; by default 0.1 log(factor) + 1, the paper's.
        mscale, mscale_all_dim: given both, the default is (0.1 mscale log(factor) + 1) over the same with
            mscale_all_dim.
        truncate: whether the kept and squeezed ranges end at whole pairs.
    """

    factor: float
    trained_length: int
    _: KW_ONLY
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        _check_positive(self, "factor", "trained_length", "beta_fast", "beta_slow")
        if self.beta_fast <= self.beta_slow:
            raise bad_value(
                "beta_fast",
                expected=f"more turns than beta_slow = {self.beta_slow}",
                received=self.beta_fast,
                remedy="swap the two",
            )

    def frequencies(self, periods: Tensor, *, base: float, length: int | Tensor | None) -> Tensor:
        width = 2 * len(periods)

        def pair_that_turns(times: float) -> float:
            # trained_length * base ** (-2 i / R) = 2 pi * times, solved for i
            return width * math.log(self.trained_length / (times * 2 * math.pi)) / (2 * math.log(base))

        first, last = pair_that_turns(self.beta_fast), pair_that_turns(self.beta_slow)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        # The published models were made with the bound R - 1, though the pairs end at R/2 - 1.
        first, last = max(first, 0), min(last, width - 1)
        if first == last:
            last += 0.001  # a step, instead of a ramp of no width

        pairs = torch.arange(len(periods), device=periods.device, dtype=periods.dtype)
        kept = 1 - ((pairs - first) / (last - first)).clamp(0, 1)
        return 1 / (self.factor * periods) * (1 - kept) + 1 / periods * kept

    @property
    def amplitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor

        def sharpening(weight: float) -> float:
            return 0.1 * weight * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0

        if self.mscale and self.mscale_all_dim:
            return sharpening(self.mscale) / sharpening(self.mscale_all_dim)
        return sharpening(1.0)


@dataclass(frozen=True)
class LongRoPE(Scaling):
    """One factor per pair, from one list up to the trained length and from another beyond it.

    Args:
        short, long: R/2 factors each, by which the frequencies are divided.
        trained_length: texts longer than this take `long`, all positions of them.
        factor: the extended length over the trained one, from which the attention factor follows.
        attention_factor: what cosine and sine are multiplied by; by default
            sqrt(1 + log(factor) / log(trained_length)), and 1 if factor is at most 1.
    """

    depends_on_length: ClassVar[bool] = True
    short: tuple[float, ...]
    long: tuple[float, ...]
    trained_length: int
    _: KW_ONLY
    factor: float | None = None
    attention_factor: float | None = None

    def __post_init__(self) -> None:
        _check_positive(self, "trained_length")
        for name in ("short", "long"):
            factors = tuple(float(factor) for factor in getattr(self, name))
            object.__setattr__(self, name, factors)  # a list would change under us, and has no hash
            if not factors or min(factors) <= 0:
                raise bad_value(name, expected="R/2 positive factors", received=factors)
        if self.factor is not None:
            _check_positive(self, "factor")
        elif self.attention_factor is None:
            raise bad_value(
                "factor",
                expected="factor or attention_factor",
                received="neither",
                remedy="factor is the extended length over the trained one",
            )

    def frequencies(self, periods: Tensor, *, base: float, length: int | Tensor | None) -> Tensor:
        def stretched(factors: tuple[float, ...]) -> Tensor:
            return 1 / (torch.tensor(factors, device=periods.device, dtype=periods.dtype) * periods)

        if length is not None and not isinstance(length, Tensor) and torch.compiler.is_exporting():
            # What is exported serves every length: scalar_tensor alone makes a tensor of a symbolic one.
            length = torch.scalar_tensor(length, device=periods.device, dtype=torch.int64)
        if isinstance(length, Tensor):
            return torch.where(length > self.trained_length, stretched(self.long), stretched(self.short))
        return stretched(self.short if length is None or length <= self.trained_length else self.long)

    def regime(self, length: int) -> Hashable:
        return "long" if length > self.trained_length else "short"

    @property
    def amplitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        assert self.factor is not None
        if self.factor <= 1:
            return 1.0
        return math.sqrt(1 + math.log(self.factor) / math.log(self.trained_length))

    def check(self, width: int) -> None:
        for name in ("short", "long"):
            received = len(getattr(self, name))
            if received != width // 2:
                raise bad_value(
                    f"scaling.{name}",
                    expected=f"{width // 2} factors, one per pair of {width} rotated widths",
                    received=received,
                    remedy="the lists and the rotated width belong to one model: pass width=",
                )


@dataclass(frozen=True)
class Llama3(Scaling):
    """Pairs that turn slowly are squeezed by `factor`, those that turn fast kept, those between mixed.

    Args:
        factor: the extended length over the trained one.
        low_frequency_factor: pairs that make fewer turns than this within the trained length are squeezed.
        high_frequency_factor: pairs that make more turns than this are kept.
        trained_length: the length the model was trained on.
    """

    factor: float
    low_frequency_factor: float
    high_frequency_factor: float
    trained_length: int

    def __post_init__(self) -> None:
        _check_positive(self, "factor", "low_frequency_factor", "high_frequency_factor", "trained_length")
        if self.high_frequency_factor <= self.low_frequency_factor:
            raise bad_value(
                "high_frequency_factor",
                expected=f"more than low_frequency_factor = {self.low_frequency_factor}",
                received=self.high_frequency_factor,
                remedy="swap the two",
            )

    def frequencies(self, periods: Tensor, *, base: float, length: int | Tensor | None) -> Tensor:
        frequencies = 1 / periods
        turns = self.trained_length / (2 * math.pi / frequencies)  # within the trained length
        low, high = self.low_frequency_factor, self.high_frequency_factor
        kept = ((turns - low) / (high - low)).clamp(0, 1)
        return (1 - kept) * frequencies / self.factor + kept * frequencies


def _periods(base: float | Tensor, width: int, device: torch.device | str | None, dtype: torch.dtype) -> Tensor:
    return base ** (torch.arange(0, width, 2, device=device).to(dtype) / width)


def _check_positive(scaling: Scaling, *names: str) -> None:
    for name in names:
        value = getattr(scaling, name)
        if not value > 0:
            raise bad_value(
                f"{type(scaling).__name__}.{name}",
                expected="a positive number",
                received=value,
                remedy="" if name != "factor" else "factor is the extended length over the trained one, e.g. 8.0",
            )


# ----------------------------------------------------------------------------------------------------
# The module


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
                expected="Linear, DynamicNTK, YaRN, LongRoPE, Llama3 or None",
                received=type(scaling).__name__,
                remedy="for example scaling=Linear(4.0)",
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
            self._check_positions(positions, x)
            cos, sin = self._cos_sin(positions.to(x.device), length, dtype)
        elif isinstance(positions, (int, torch.SymInt)) and not isinstance(positions, bool):
            cos, sin = self._cos_sin_from(positions, x, length, dtype)
            if cos.shape[-1] == self.width:  # both halves of the pairs
                wide = x if x.dtype == dtype else x.to(dtype)
                return torch.addcmul(wide * cos, wide.roll(self.width // 2, -1), sin).to(x.dtype)
        else:
            raise bad_type(
                "positions",
                expected="an int or an integer tensor",
                received=type(positions).__name__,
                remedy="the position of the first token, or torch.tensor([...]) with one per token",
            )
        return _rotate(x, cos, sin, self.interleaved)

    def angles(
        self, positions: Tensor, length: int | Tensor | None = None, *, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """The angles (..., R/2), in radians, of integer positions (...).

        >>> Rotary(4, base=100.0).angles(torch.tensor([0, 10]))
        tensor([[ 0.,  0.],
                [10.,  1.]])
        """
        _check_integers(positions)
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
        periods = _periods(self.base, self.width, device, dtype)
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
        if _is_eager() and type(x) is Tensor and isinstance(length, int) and start >= 0 and end <= _LONGEST_TABLE:
            regime = self.scaling.regime(length)
            if regime != length:  # else the table would serve this one length
                few = x.numel() < _FEW and self.width == self.head_dim and not self.interleaved
                cos, sin = self._table(end, regime, length, x.device, dtype, both=few)
                return cos[start:end], sin[start:end]
        return self._cos_sin(torch.arange(start, end, device=x.device), length, dtype)

    def _key(self, device: torch.device, dtype: torch.dtype, regime: Hashable) -> Hashable:
        return device, dtype, self.base, self.width, self.scaling, regime

    def _kept_frequencies(self, positions: Tensor, dtype: torch.dtype) -> Tensor:
        """`frequencies` of a scaling that is the same for all lengths, kept where that is possible."""
        device = positions.device
        if type(positions) is not Tensor or not _is_eager():
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
        size = min(max(size, 256, 0 if kept is None else 2 * len(kept[0])), _LONGEST_TABLE)
        with _kept_for_training():
            made = self._cos_sin(torch.arange(size, device=device), length, dtype)
            if both:
                made = torch.cat((made[0], made[0]), -1), torch.cat((-made[1], made[1]), -1)
        if type(made[0]) is Tensor:  # not a fake one, of a mode that is on around this call
            self._tables[key] = made
        return made

    def _check_positions(self, positions: Tensor, x: Tensor) -> None:
        _check_integers(positions)
        batch, tokens = x.shape[0], x.shape[-2]
        right = positions.ndim in (1, 2) and positions.shape[-1] == tokens
        if not right or (positions.ndim == 2 and positions.shape[0] not in (1, batch)):
            raise bad_value(
                "positions",
                expected=f"(N,) or (B, N) with N = {tokens}, B = {batch}, or an int",
                received=shape_of(positions),
                remedy="one position per token of x, or the first one's as an int",
            )


def _check_integers(positions: Tensor) -> None:
    if positions.is_floating_point() or positions.is_complex() or positions.dtype == torch.bool:
        raise bad_type("positions", expected="integers", received=positions.dtype, remedy="positions.long()")
