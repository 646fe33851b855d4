"""`wq wk wv wo`: Llama as Meta stores it, with rotary pairs interleaved in the rows of q and k."""

from regard.layouts.base import NEVER, Layout, linear

layout = Layout(
    name="meta_llama",
    origin="Llama as Meta stores it",
    keys=linear(q_proj="wq", k_proj="wk", v_proj="wv", out_proj="wo"),
    biases=NEVER,
    can=frozenset({"kv heads", "inner width", "rotary"}),
    pairs="interleaved",
)
