"""The names of `llama` with other norms: Gemma 3's weights are zero-centred; Gemma 3n normalises values too, and its
last layers have no keys and values of their own. Only the last is told by its names: the others must be asked for."""

from dataclasses import replace

from regard.layer import Norm
from regard.layouts import llama

_keys = {ours: theirs for ours, theirs in llama.layout.keys.items() if not ours.startswith(("gate_proj", "sinks"))}

layout = replace(
    llama.layout,
    name="gemma",
    origin="Gemma 3",
    keys=_keys,
    options={"qk_norm": Norm(weight="zero-centred")},
    requires=("q_norm.weight",),
    named_only=True,
)
gemma3n = replace(
    layout, name="gemma3n", origin="Gemma 3n", options={"qk_norm": Norm(), "v_norm": Norm(weight="none"), "scale": 1.0}
)
gemma3n_shared = replace(
    gemma3n,
    name="gemma3n_shared",
    origin="Gemma 3n's last layers, which attend to an earlier one's keys and values",
    keys={ours: theirs for ours, theirs in _keys.items() if not ours.startswith(("k_", "v_"))},
    biases=("", "o", "q", "qo"),
    options={"qk_norm": Norm(), "scale": 1.0},
    shares_kv=True,
    named_only=False,
    asks={"num_kv_heads": "those of the layer that it attends to"},
)
