"""`self.query self.key self.value output.dense`, perhaps with `output.LayerNorm`: BERT and its kin."""

from regard.layouts.base import ALWAYS, Layout, linear

layout = Layout(
    name="bert",
    origin="BERT, RoBERTa, ELECTRA",
    keys=linear(
        q_proj="self.query", k_proj="self.key", v_proj="self.value", out_proj="output.dense", norm="output.LayerNorm"
    ),
    biases=ALWAYS,
    norm_eps=1e-12,
)
