"""`c_attn c_proj` as `nn.Linear`: nanoGPT. GPT-2's names with weights (out, in); distinguished by the shape."""

from regard.layouts.base import ALL_OR_NONE, Layout, linear

layout = Layout(
    name="nanogpt",
    origin="nanoGPT",
    keys=linear(qkv="c_attn", out_proj="c_proj"),
    biases=ALL_OR_NONE,
    ignored=frozenset({"bias"}),
)
