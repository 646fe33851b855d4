"""A record as flat names and numbers, as trackers of experiments want them.

Letters: H query heads, B batch, N queries, M keys.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from regard.errors import bad_value

if TYPE_CHECKING:
    from regard.heads.record.layer_record import LayerRecord
    from regard.heads.record.record import Record

__all__ = ["flat_scalars", "per_head_numbers"]


def flat_scalars(record: Record, prefix: str = "attention", per: Literal["head", "layer"] = "head") -> dict[str, float]:
    """Every number of every head: {"attention/3/7/entropy": 1.2, ...}, by layer (in the order of calls) and head; or of
    every layer, {"attention/3/entropy": 1.1, ...}: the mean of its heads, and the largest of `max_logit`."""
    if per not in ("head", "layer"):
        raise bad_value("per", expected='"head" or "layer"', received=repr(per))
    flat: dict[str, float] = {}
    for index, layer in enumerate(record):
        for name, values in per_head_numbers(layer).items():
            if per == "head":
                flat |= {f"{prefix}/{index}/{head}/{name}": x for head, x in enumerate(values)}
            else:
                flat[f"{prefix}/{index}/{name}"] = max(values) if name == "max_logit" else sum(values) / len(values)
    return flat


def per_head_numbers(layer: LayerRecord) -> dict[str, list[float]]:
    """The numbers of each head, by name: means over queries; of `max_logit` the largest; and `sink`, the share of all
    weight on the key that receives most of it, if `received` was measured."""
    found: dict[str, Tensor] = dict(layer.scalars())
    last = layer.last()
    if "max_logit" in last:
        found["max_logit"] = last["max_logit"].amax((0, 2))  # (B, H, N) -> (H,)
    if "received" in last:
        received = last["received"]  # (B, H, M)
        found["sink"] = (received.amax(-1) / received.sum(-1).clamp(min=torch.finfo(received.dtype).tiny)).mean(0)
    return {name: values.tolist() for name, values in found.items() if values.dim() == 1}
