"""`w_qs w_ks w_vs fc`, perhaps with `layer_norm`: tutorials with d_k and d_v, residual and LayerNorm in one module."""

from regard.layouts.base import Layout, linear

layout = Layout(
    name="w_qs",
    origin="tutorials with d_k and d_v",
    keys=linear(q_proj="w_qs", k_proj="w_ks", v_proj="w_vs", out_proj="fc", norm="layer_norm"),
    can=frozenset({"value head width", "inner width"}),
    norm_eps=1e-6,
)
