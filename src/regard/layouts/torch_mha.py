"""`in_proj_weight in_proj_bias out_proj`: `nn.MultiheadAttention`; with kdim or vdim `q_proj_weight k_proj_weight
v_proj_weight` instead of the first."""

from regard.layouts.base import ALL_OR_NONE, Layout, linear

_EXTRA = "one more learned key (add_bias_kv), which the layer does not have; regard.swap keeps it"

layout = Layout(
    name="torch",
    origin="nn.MultiheadAttention",
    keys={
        "qkv.weight": "in_proj_weight",
        "qkv.bias": "in_proj_bias",
        "q_proj.weight": "q_proj_weight",
        "k_proj.weight": "k_proj_weight",
        "v_proj.weight": "v_proj_weight",
        **linear(out_proj="out_proj"),
    },
    biases=ALL_OR_NONE,
    can=frozenset({"key and value widths"}),
    refused={"bias_k": _EXTRA, "bias_v": _EXTRA},
)
