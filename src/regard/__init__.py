"""regard: multi-head attention that you can see into."""

from regard import cache, configurations, kernels, layouts, masks, measures, models, positions
from regard.attention import attend, attention_weights, explain, measure
from regard.cache import KVCache, RollingCache
from regard.heads import watch
from regard.layer import AttentionBlock, MultiHeadAttention
from regard.layouts import swap

__version__ = "0.1.0"

__all__ = [
    "AttentionBlock",
    "KVCache",
    "MultiHeadAttention",
    "RollingCache",
    "attend",
    "attention_weights",
    "cache",
    "configurations",
    "explain",
    "kernels",
    "layouts",
    "masks",
    "measure",
    "measures",
    "models",
    "positions",
    "swap",
    "watch",
]
