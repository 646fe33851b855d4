"""`q_proj k_proj v_proj o_proj`: the Llama family (Llama, Mistral, Qwen, Phi, gpt-oss), kv heads read from the shapes;
with `gate_proj` AFMoE. The same names, but other weights, are in "gemma", "gemma3n" and "llama4".
"""

from regard.layouts.base import IN_AND_OUT, Layout, linear

layout = Layout(
    name="llama",
    origin="Llama, Mistral, Qwen, OLMo 2, SmolLM3, gpt-oss, AFMoE",
    keys={
        **linear(q_proj="q_proj", k_proj="k_proj", v_proj="v_proj", out_proj="o_proj", gate_proj="gate_proj"),
        "q_norm.weight": "q_norm.weight",
        "k_norm.weight": "k_norm.weight",
        "sinks": "sinks",
    },
    biases=IN_AND_OUT,
    can=frozenset({"kv heads", "inner width", "rotary", "scale", "softcap", "query scale"}),
    pairs="halves",
    ignored=frozenset({"rotary_emb.inv_freq"}),
)
