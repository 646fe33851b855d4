"""The layer (`MultiHeadAttention`), and the residual and normalisation around it (`AttentionBlock`)."""

from regard.layer.attention_block import AttentionBlock
from regard.layer.multi_head_attention import MultiHeadAttention

__all__ = ["AttentionBlock", "MultiHeadAttention"]
