"""`W_q W_k W_v W_o`: the names of the paper's formula, as many tutorials and books write them."""

from regard.layouts.base import Layout, linear

layout = Layout(
    name="w_q",
    origin="tutorials that follow the paper's formula",
    keys=linear(q_proj="W_q", k_proj="W_k", v_proj="W_v", out_proj="W_o"),
    can=frozenset({"inner width", "query width", "key and value widths"}),
)
