"""`q_lin k_lin v_lin out_lin`: DistilBERT, FlauBERT, XLM."""

from regard.layouts.base import ALWAYS, Layout, linear

layout = Layout(
    name="distilbert",
    origin="DistilBERT",
    keys=linear(q_proj="q_lin", k_proj="k_lin", v_proj="v_lin", out_proj="out_lin"),
    biases=ALWAYS,
)
