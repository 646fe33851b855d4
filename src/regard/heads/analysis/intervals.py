"""Confidence intervals of shares."""

from __future__ import annotations

import math

__all__ = ["interval"]

NORMAL = 1.96  # standard deviations to each side of a 95 % interval


def interval(share: float, n: float) -> tuple[float, float]:
    """The 95 % interval of a share of `n` queries (Wilson 1927). For shares of mass, `n` is the mass: no narrower than
    it is.

    >>> low, high = interval(0.5, 100)
    >>> round(low, 3), round(high, 3)
    (0.404, 0.596)
    """
    if n <= 0:
        return 0.0, 1.0
    z = NORMAL**2 / n
    middle = (share + z / 2) / (1 + z)
    half = math.sqrt(share * (1 - share) * z + z * z / 4) / (1 + z)
    return middle - half, middle + half
