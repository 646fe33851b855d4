"""regard: multi-head attention that you can see into."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from regard import cache, draw, heads, kernels, layer, layouts, masks, measures, models, positions, presets
from regard.attention import attend, attention_weights, explain, measure
from regard.cache import HeadCache, KVCache, LatentCache, RollingCache
from regard.draw import look
from regard.heads import ablate, importance, monitor, prune, watch
from regard.heads.analysis.atlas import atlas
from regard.kernels.merging import merge
from regard.layer import AttentionBlock, MultiHeadAttention
from regard.layouts import swap
from regard.variants import DifferentialAttention, LatentAttention

if TYPE_CHECKING:
    from regard import parallel

__version__ = "0.2.0"  # pyproject.toml reads it here

__all__ = [
    "AttentionBlock",
    "DifferentialAttention",
    "HeadCache",
    "KVCache",
    "LatentAttention",
    "LatentCache",
    "MultiHeadAttention",
    "RollingCache",
    "ablate",
    "atlas",
    "attend",
    "attention_weights",
    "cache",
    "draw",
    "explain",
    "heads",
    "importance",
    "kernels",
    "layer",
    "layouts",
    "look",
    "masks",
    "measure",
    "measures",
    "merge",
    "models",
    "monitor",
    "parallel",
    "positions",
    "presets",
    "prune",
    "swap",
    "watch",
]


def __getattr__(name: str) -> Any:
    """`parallel` on first use, for torch.distributed imports slowly; `configurations` is `presets`' earlier name."""
    if name in ("parallel", "configurations"):
        return importlib.import_module("regard.parallel" if name == "parallel" else "regard.presets")
    raise AttributeError(f"module 'regard' has no attribute {name!r}")
