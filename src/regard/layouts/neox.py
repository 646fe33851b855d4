"""`query_key_value dense`: GPT-NeoX, Pythia and BLOOM; rows are, head by head, that head's q, k, v."""

from regard.layouts.base import ALL_OR_NONE, Layout, by_head, linear

layout = Layout(
    name="neox",
    origin="GPT-NeoX, Pythia, BLOOM",
    keys=linear(qkv="query_key_value", out_proj="dense"),
    packing=by_head,
    biases=ALL_OR_NONE,
    can=frozenset({"rotary", "alibi"}),
    pairs="halves",
    ignored=frozenset({"bias", "masked_bias", "attention.bias", "attention.masked_bias", "rotary_emb.inv_freq"}),
)
