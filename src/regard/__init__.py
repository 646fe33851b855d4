"""regard: multi-head attention that you can see into."""

from regard import cache, configurations, draw, heads, kernels, layouts, masks, measures, models, positions
from regard.attention import attend, attention_weights, explain, measure
from regard.cache import KVCache, RollingCache
from regard.draw import look
from regard.heads import ablate, importance, prune, watch
from regard.layer import AttentionBlock, MultiHeadAttention
from regard.layouts import swap

__version__ = "0.1.0"

__all__ = [
    "AttentionBlock",
    "KVCache",
    "MultiHeadAttention",
    "RollingCache",
    "ablate",
    "attend",
    "attention_weights",
    "cache",
    "configurations",
    "draw",
    "explain",
    "heads",
    "importance",
    "kernels",
    "layouts",
    "look",
    "masks",
    "measure",
    "measures",
    "models",
    "positions",
    "prune",
    "swap",
    "watch",
]
