"""Where `torch.autocast` is decided: what dtype it asks for, and that it is off while attention is computed."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

__all__ = ["casts_to", "fixed_precision", "mixed_precision"]


def mixed_precision(device_type: str) -> bool:
    """Whether autocast is on for devices of a type, such as "cpu"."""
    return device_type != "meta" and torch.is_autocast_enabled(device_type)


def casts_to(device: torch.device, dtype: torch.dtype) -> torch.dtype | None:
    """The dtype to which autocast casts tensors of `dtype` on `device`; None where it is off, and for float64."""
    if dtype is torch.float64 or not mixed_precision(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


def fixed_precision(like: Tensor) -> AbstractContextManager[Any]:
    """A context with autocast off on the tensor's device: dtypes are chosen before, and must not change within."""
    return torch.autocast(like.device.type, enabled=False) if mixed_precision(like.device.type) else nullcontext()
