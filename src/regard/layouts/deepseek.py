"""`q_a_proj q_b_proj kv_a_proj_with_mqa kv_b_proj o_proj`: latent attention, as of DeepSeek-V2 and V3, AXK1, GLM-4
MoE Lite, LongCat-Flash, Youtu, Kimi Linear; as "minicpm3" the same names with the other order of rotary pairs.

Sizes are read from the shapes. What a state dict does not say, and an argument of `load` does:

- LongCat multiplies latents and queries: `latent_scale=(W / kv_rank) ** 0.5`, and
  `scale=(C + P) ** -0.5 * (W / q_rank) ** 0.5`.
- Kimi Linear rotates nothing: no `position_encoding`.
- Mistral 4 multiplies queries by a number that depends on their position, beyond the length of its training: not here.
- Where top-k indices of an earlier layer choose the keys (GLM-MoE-DSA, "shared" layers), that is a mask of the call.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from regard.errors import bad_value, shape_of
from regard.layouts.base import Tensors, linear
from regard.layouts.canonical import divide
from regard.layouts.rotary_pairs import rotary_pairs
from regard.layouts.variant import Given, Pairs, VariantLayout, build, check_shapes
from regard.positions import Rotary
from regard.variants import LatentAttention

_KEYS = {
    **linear(q_proj="q_proj", q_down_proj="q_a_proj", kv_down_proj="kv_a_proj_with_mqa", out_proj="o_proj"),
    "q_norm.weight": "q_a_layernorm.weight",
    "q_up_proj.weight": "q_b_proj.weight",
    "kv_norm.weight": "kv_a_layernorm.weight",
    "kv_up_proj.weight": "kv_b_proj.weight",
}
del _KEYS["q_proj.bias"]
_OPTIONAL = frozenset({key for key in _KEYS if key.endswith(".bias") or key.startswith("q_")})
_REFUSED = {
    "indexer.": "a top-k indexer that chooses keys (DeepSeek-V3.2, GLM-MoE-DSA): sparse attention",
    "g_proj.weight": "a gate on the heads' outputs (Bailing, Dots)",
    "gate_proj.weight": "a gate on the heads' outputs (HunYuan V4)",
    "q_gate_proj.weight": "queries and a gate in one projection (AXK2)",
    "k_rope_only_layernorm.weight": "a norm of the shared rotary key (Dots)",
    "sinks": "sinks (HunYuan V4)",
    "softmax_scaling.": "a learned scale that depends on positions (Mistral Large 4)",
}


def _read(pairs: Pairs, tensors: Tensors, given: Given) -> nn.Module:
    heads, sizes = given.num_heads, _sizes(tensors, given.num_heads)
    layer_order = _order(given.options.get("position_encoding"))
    stored = given.pairs or pairs
    if layer_order is not None and layer_order != stored:
        tensors = _in_order(tensors, layer_order, heads, sizes["rope_head_dim"], sizes["kv_rank"])
    return build(LatentAttention, sizes, given.options, tensors)


def _sizes(tensors: Tensors, heads: int) -> dict[str, Any]:
    """The arguments of `LatentAttention` that follow from the shapes, which are checked."""
    low = "q_up_proj.weight" in tensors
    needed = ["q_down_proj.weight", "q_norm.weight", "q_up_proj.weight"] if low else ["q_proj.weight"]
    for ours in needed:
        if ours not in tensors:
            raise bad_value(
                "state_dict",
                expected="q_proj, or q_a_proj with q_a_layernorm and q_b_proj",
                received=f"no {_KEYS[ours]!r}",
            )
    if low == ("q_proj.weight" in tensors):
        raise bad_value("state_dict", expected="q_proj or q_b_proj", received="both")
    queries = tensors[needed[-1]]
    for key in (*needed, "kv_down_proj.weight", "kv_up_proj.weight", "out_proj.weight"):
        if tensors[key].dim() != (1 if "norm" in key else 2):
            raise bad_value(_KEYS[key], expected="a matrix", received=f"shape {shape_of(tensors[key])}")
    divide("num_heads", heads, queries.shape[0], "rows of q")
    divide("num_heads", heads, tensors["kv_up_proj.weight"].shape[0], "rows of kv_b_proj")
    width, rank = tensors["kv_down_proj.weight"].shape[1], tensors["kv_norm.weight"].shape[0]
    rope = tensors["kv_down_proj.weight"].shape[0] - rank
    nope = queries.shape[0] // heads - rope
    value = tensors["kv_up_proj.weight"].shape[0] // heads - nope
    if min(rope + 1, nope, value) < 1:
        raise bad_value(
            "num_heads",
            expected="heads whose queries are wider than the shared rotary key, and keys and values beside them",
            received=f"{heads}: widths of {nope} without positions, {rope} with, {value} of values",
        )
    q_rank = tensors["q_up_proj.weight"].shape[1] if low else None
    shapes = {
        "kv_down_proj.bias": (rank + rope,),
        "kv_up_proj.weight": (heads * (nope + value), rank),
        "out_proj.weight": (width, heads * value),
        "out_proj.bias": (width,),
        "q_proj.weight": (heads * (nope + rope), width),
    }
    if q_rank is not None:
        shapes |= {"q_down_proj.weight": (q_rank, width), "q_down_proj.bias": (q_rank,), "q_norm.weight": (q_rank,)}
    check_shapes(tensors, shapes, _KEYS, heads)
    return {
        "embed_dim": width,
        "num_heads": heads,
        "kv_rank": rank,
        "nope_head_dim": nope,
        "rope_head_dim": rope,
        "value_head_dim": value,
        "q_rank": q_rank,
        "bias": True,  # those that are absent are left out
    }


def _write(pairs: Pairs, layer: LatentAttention) -> Tensors:
    tensors = dict(layer.state_dict())
    order = _order(layer.position_encoding)
    if order is None or order == pairs:
        return tensors
    return _in_order(tensors, pairs, layer.num_heads, layer.rope_head_dim, layer.kv_rank)


def _order(encoding: object) -> Pairs | None:
    """The order in which a position encoding takes its pairs."""
    if not isinstance(encoding, Rotary):
        return None
    return "interleaved" if encoding.interleaved else "halves"


def _in_order(tensors: Tensors, order: Pairs, heads: int, rope: int, rank: int) -> Tensors:
    """The rows that are rotated in the other order: the last `rope` of each head's queries, and of kv_down_proj."""
    changed = dict(tensors)
    for key in ("q_proj.weight", "q_up_proj.weight"):
        if key in tensors:
            by_head = tensors[key].unflatten(0, (heads, -1)).clone()
            rotated = by_head[:, -rope:].flatten(0, 1)
            by_head[:, -rope:] = rotary_pairs(rotated, heads, to=order).unflatten(0, (heads, -1))
            changed[key] = by_head.flatten(0, 1)
    for key in ("kv_down_proj.weight", "kv_down_proj.bias"):
        if key in tensors:
            rows = tensors[key].clone()
            rows[rank:] = rotary_pairs(rows[rank:], 1, to=order)
            changed[key] = rows
    return changed


def _layout(name: str, origin: str, pairs: Pairs) -> VariantLayout:
    return VariantLayout(
        name=name,
        origin=origin,
        marker="kv_a_proj_with_mqa.weight",
        kind=LatentAttention,
        keys=_KEYS,
        optional=_OPTIONAL,
        read=partial(_read, pairs),
        write=partial(_write, pairs),
        refused=_REFUSED,
    )


layout = _layout("deepseek", "DeepSeek-V2 and V3, GLM-4 MoE Lite, LongCat-Flash, Youtu, Kimi Linear", "interleaved")
minicpm3 = _layout("minicpm3", "MiniCPM3", "halves")
