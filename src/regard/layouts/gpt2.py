"""`c_attn c_proj`: GPT-2, whose weights are (in, out); q, k, v stacked."""

from regard.layouts.base import ALWAYS, Layout, linear

layout = Layout(
    name="gpt2",
    origin="GPT-2",
    keys=linear(qkv="c_attn", out_proj="c_proj"),
    transposed=True,
    biases=ALWAYS,
    ignored=frozenset({"bias", "masked_bias"}),
    refused={"q_attn.weight": "cross attention, whose c_attn holds k and v alone"},
)
