"""`q k v o`: T5, which does not scale the scores; perhaps with its `relative_attention_bias` (buckets, heads)."""

from regard.layouts.base import NEVER, Layout, linear

layout = Layout(
    name="t5",
    origin="T5",
    keys={
        **linear(q_proj="q", k_proj="k", v_proj="v", out_proj="o"),
        "position_encoding.weight": "relative_attention_bias.weight",
    },
    biases=NEVER,
    can=frozenset({"inner width"}),
    options={"scale": 1.0},
)
