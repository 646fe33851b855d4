"""Checks of what a cache is given: keys, values and positions of new tokens.

Letters: B batch, G kv heads, N new tokens, D head width of keys, E head width of values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from regard.errors import bad_type, bad_value, shape_of

__all__ = ["check_alike", "check_positions", "check_shapes"]


def check_shapes(keys: Tensor, values: Tensor) -> None:
    """Refuse all but keys (B, G, N, D) and values (B, G, N, E)."""
    if keys.dim() != 4 or values.dim() != 4 or keys.shape[:3] != values.shape[:3]:
        raise bad_value(
            "cache",
            expected="keys (B, G, N, D) and values (B, G, N, E)",
            received=f"{shape_of(keys)} and {shape_of(values)}",
        )


def check_alike(what: str, held: Tensor, new: Tensor, batch: int, dtype: torch.dtype | None) -> None:
    """Refuse new keys or values (B, G, N, D) that do not go on with those `held`, which came in `dtype`."""
    known, given = (batch, held.shape[1], held.shape[3]), (*new.shape[:2], new.shape[3])
    if known != given:
        raise bad_value(
            f"cached {what}",
            expected=f"batch, heads and width {known}",
            received=f"{given}",
            remedy="one cache per layer and batch",
        )
    if dtype != new.dtype or held.device != new.device:
        raise bad_type(
            f"cached {what}",
            expected=f"{dtype} on {held.device}",
            received=f"{new.dtype} on {new.device}",
            remedy="clear() the cache",
        )


def check_positions(positions: object, new: int, batch: int | None) -> None:
    """Refuse all but integers (N,) or (B, N); before the first tokens any batch will do."""
    expected = f"integers (N,) or (B, N) for {new} new tokens"
    if not isinstance(positions, Tensor):
        raise bad_type("positions", expected=expected, received=type(positions).__name__)
    if positions.is_floating_point() or positions.dtype is torch.bool:
        raise bad_type("positions", expected=expected, received=f"dtype {positions.dtype}")
    rows = positions.shape[0] if positions.dim() == 2 else 1
    if positions.dim() not in (1, 2) or positions.shape[-1] != new or (batch is not None and rows not in (1, batch)):
        raise bad_value("positions", expected=expected, received=f"shape {shape_of(positions)}")
