"""`q_proj k_proj v_proj out_proj`: our own names, also those of Whisper, BART, OPT and CLIP. Any combination of biases."""

from regard.layouts.base import EVERYTHING, Layout, linear

layout = Layout(
    name="separate",
    origin="regard, Whisper, BART, OPT, CLIP",
    keys={
        **{key: key for key in linear(q_proj="", k_proj="", v_proj="", out_proj="", q_norm="", k_norm="")},
        "sinks": "sinks",
        "position_encoding.weight": "position_encoding.weight",
    },
    can=EVERYTHING,
)
