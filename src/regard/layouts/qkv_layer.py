"""`qkv_layer linear_layer`: one projection whose rows are, head by head, that head's q, k, v; any width of the input.

A widely copied snippet with these names merges (B, H, N, D) to (B, N, H * D) without transposing back, which mixes
tokens and heads. Its weights are loaded into a layer that merges correctly.
"""

from regard.layouts.base import IN_AND_OUT, Layout, by_head, linear

layout = Layout(
    name="qkv_layer",
    origin="a widely copied tutorial",
    keys=linear(qkv="qkv_layer", out_proj="linear_layer"),
    packing=by_head,
    biases=IN_AND_OUT,
    can=frozenset({"query width", "key and value widths"}),
)
