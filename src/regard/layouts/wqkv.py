"""`Wqkv out_proj` (MPT, flash-attn) and `Wqkv Wo` (ModernBERT): q, k, v stacked; kv heads read from the rows."""

from dataclasses import replace

from regard.layouts.base import IN_AND_OUT, Layout, linear

layout = Layout(
    name="wqkv",
    origin="MPT, flash-attn",
    keys=linear(qkv="Wqkv", out_proj="out_proj"),
    biases=IN_AND_OUT,
    can=frozenset({"kv heads", "inner width", "rotary", "alibi", "scale"}),
    pairs="halves",
    ignored=frozenset({"rotary_emb.inv_freq"}),
)
modernbert = replace(
    layout, name="modernbert", origin="ModernBERT", keys=linear(qkv="Wqkv", out_proj="Wo"), can=frozenset({"rotary"})
)
