"""Changes of rotary frequencies, so that a model reads texts longer than those it was trained on.

    LinearScaling  all positions squeezed by one factor             https://arxiv.org/abs/2306.15595
    DynamicNTK     a larger base, the larger the longer the text    https://arxiv.org/abs/2309.00071 (appendix B)
    YaRN           slow pairs squeezed, fast pairs kept             https://arxiv.org/abs/2309.00071
    LongRoPE       one searched factor per pair                     https://arxiv.org/abs/2402.13753
    Llama3         slow pairs squeezed, fast pairs kept, by wavelength   https://arxiv.org/abs/2407.21783

Letters: R rotated width, R/2 pairs.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

import torch
from torch import Tensor

from regard.errors import bad_value

__all__ = ["DynamicNTK", "LinearScaling", "Llama3", "LongRoPE", "Scaling", "YaRN", "periods_of"]


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

    >>> from regard.positions import Rotary
    >>> Rotary(4, base=100.0, scaling=LinearScaling(4.0)).frequencies().tolist()  # 1 and 0.1, divided by 4
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
        return 1 / periods_of(base * stretch ** (width / (width - 2)), width, periods.device, periods.dtype)

    def regime(self, length: int) -> Hashable:
        return "trained" if length <= self.trained_length else length

    def check(self, width: int) -> None:
        if width < 4:
            raise bad_value(
                "scaling",
                expected="a rotated width of at least 4 for DynamicNTK",
                received=width,
                remedy="with one pair there is no slowest pair to hold: use LinearScaling",
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


def periods_of(base: float | Tensor, width: int, device: torch.device | str | None, dtype: torch.dtype) -> Tensor:
    """base ** (2 i / R) for each pair i: (R/2,), one over the unscaled frequencies."""
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
