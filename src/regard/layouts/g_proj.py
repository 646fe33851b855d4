"""`q_proj k_proj v_proj o_proj` and a gate called `g_proj`, per head or per element: Laguna, Step 3.7, LFM3."""

from dataclasses import replace

from regard.layouts import llama

layout = replace(
    llama.layout,
    name="g_proj",
    origin="Laguna, Step 3.7, LFM3",
    keys={ours: theirs.replace("gate_proj", "g_proj") for ours, theirs in llama.layout.keys.items() if ours != "sinks"},
    can=llama.layout.can | {"gate per head", "gate activation", "kind of q and k norm"},
    requires=("gate_proj.weight",),
    asks={
        "gate": 'gate=Gate(activation="softplus") in Laguna, Gate() in Step 3.7 and LFM3',
        "qk_norm": 'qk_norm=Norm() in Laguna and LFM3, Norm(weight="zero-centred") in Step 3.7',
    },
)
