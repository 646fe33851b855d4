"""The layer (`MultiHeadAttention`), the parts that it may have (`Gate`, `Norm`, `ValueMix`), what layers share
(`KeyValues`), and the residual and normalisation around it (`AttentionBlock`)."""

from regard.layer.attention_block import AttentionBlock
from regard.layer.gate import Gate
from regard.layer.key_values import KeyValues
from regard.layer.multi_head_attention import MultiHeadAttention
from regard.layer.norm import Norm
from regard.layer.value_mix import ValueMix

__all__ = ["AttentionBlock", "Gate", "KeyValues", "MultiHeadAttention", "Norm", "ValueMix"]
