"""`q_proj k_proj v_proj o_proj` where the rows of each head in q_proj are its query's, then its gate's: Qwen3-Next,
Qwen3.5. The weights of q_norm and k_norm are zero-centred."""

from dataclasses import replace

from regard.layer import Norm
from regard.layouts import llama

layout = replace(
    llama.layout,
    name="qwen3_next",
    origin="Qwen3-Next, Qwen3.5",
    keys={ours: theirs for ours, theirs in llama.layout.keys.items() if not ours.startswith(("gate_proj", "sinks"))},
    options={"qk_norm": Norm(weight="zero-centred")},
    requires=("gate_proj.weight", "q_norm.weight"),
    gate_in_q=True,
)
