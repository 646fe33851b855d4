"""The names of `llama`, with rotary pairs side by side: Llama 4 and Cohere. Llama 4's layers with rotary positions have
a norm without weights (`qk_norm=Norm(weight="none")`), the others scale queries (`query_scale=Temperature()`)."""

from dataclasses import replace

from regard.layouts import llama

layout = replace(
    llama.layout,
    name="llama4",
    origin="Llama 4, Cohere",
    keys={
        ours: theirs
        for ours, theirs in llama.layout.keys.items()
        if "_norm" not in ours and ours != "sinks" and "gate" not in ours
    },
    can=llama.layout.can | {"kind of q and k norm"},
    pairs="interleaved",
    named_only=True,
)
