"""Layers that make their weights or their keys in another way than `MultiHeadAttention`, on the same `attend`.

LatentAttention        keys and values of all heads are made of one short latent per token, which is all that is cached
DifferentialAttention  the weights are the difference of two softmaxes
"""

from regard.variants.differential_attention import DifferentialAttention
from regard.variants.latent_attention import LatentAttention

__all__ = ["DifferentialAttention", "LatentAttention"]
