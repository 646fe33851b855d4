"""`q_proj k_proj v_proj out_proj`: our names, also those of Whisper, BART, OPT and CLIP. Any combination of biases."""

from regard.layouts.base import EVERYTHING, Layout, linear

layout = Layout(
    name="separate",
    origin="regard, Whisper, BART, OPT, CLIP",
    keys={
        **{key: key for key in linear(q_proj="", k_proj="", v_proj="", out_proj="", gate_proj="")},
        **{key: key for key in linear(q_norm="", k_norm="", v_norm="")},
        "value_mix.weight": "value_mix.weight",
        "sinks": "sinks",
        "position_encoding.weight": "position_encoding.weight",
    },
    can=EVERYTHING,
)
