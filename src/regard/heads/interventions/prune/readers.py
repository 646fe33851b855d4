"""Read an attention module as `AttentionSizes`: one reader for each kind of attention.

Letters: H query heads, G kv heads, D head width of q and k, E head width of v.
"""

from __future__ import annotations

from torch import nn

from regard.errors import bad_type, bad_value
from regard.heads.interventions.prune.selection import projecting_module
from regard.heads.interventions.prune.sizes import AttentionSizes
from regard.heads.module_names import (
    ALL_HEADS_WIDTHS,
    KV_HEAD_COUNTS,
    OUTPUT_PROJECTIONS,
    QUERY_HEAD_COUNTS,
    is_conv1d,
    separate_projections,
)
from regard.layer import Gate, MultiHeadAttention
from regard.layouts.swap import SwappedAttention
from regard.positions import Alibi, RelativeBias, Rotary

__all__ = ["read_attention"]


def read_attention(name: str, module: nn.Module) -> AttentionSizes:
    """An attention module as a list of sizes that count heads; raises if any part of it is not understood."""
    projecting = projecting_module(module)
    if isinstance(projecting, MultiHeadAttention):
        attention = _read_layer(name, module, projecting)
    elif isinstance(projecting, SwappedAttention):
        attention = _read_swapped(name, projecting)
    elif isinstance(projecting, nn.MultiheadAttention):
        kind = type(projecting).__name__
        plain = type(projecting) is nn.MultiheadAttention
        raise bad_type(
            name,
            expected="attention that can have fewer heads than fill its width",
            received=f"{kind} of torch" if plain else f"{kind}, with code of its own",
            remedy="regard.swap(model), then prune" if plain else "a regard.MultiHeadAttention in its place",
        )
    else:
        assert projecting is not None
        attention = _read_hugging_face(name, module, projecting)
    attention.check()
    return attention


def _read_layer(name: str, module: nn.Module, layer: MultiHeadAttention) -> AttentionSizes:
    d, e = layer.head_dim, layer.value_head_dim
    if layer.shares_kv:
        raise bad_value(name, expected="keys and values of its own", received="another layer's (shares_kv=True)")
    attention = AttentionSizes(name, module, layer, d, {"query": layer.num_heads, "kv": layer.num_kv_heads})
    attention.add_rows(layer.q_proj, ("query", d))
    attention.add_rows(layer.k_proj, ("kv", d))
    attention.add_rows(layer.v_proj, ("kv", e))
    attention.add_columns(layer.out_proj, ("query", e))
    if isinstance(layer.gate, Gate):
        attention.add_rows(layer.gate_proj, ("query", e if layer.gate.per == "element" else 1))
    attention.add_parameter("sinks", 0, ("query", 1))
    attention.add_numbers(("num_heads",), ("query", 1))
    attention.add_numbers(("num_kv_heads",), ("kv", 1))
    encoding = layer.position_encoding
    if isinstance(encoding, (Alibi, RelativeBias)):
        per_head = encoding.slopes.shape[0] if isinstance(encoding, Alibi) else encoding.weight.shape[1]
        if per_head != layer.num_heads:
            raise bad_value(name, expected=f"a position_encoding of {layer.num_heads} heads", received=per_head)
        attention.bias_table = encoding
    elif encoding is not None and not isinstance(encoding, Rotary):
        raise bad_type(
            name, expected="position_encoding: Rotary, Alibi, RelativeBias or None", received=type(encoding).__name__
        )
    return attention


def _read_swapped(name: str, module: SwappedAttention) -> AttentionSizes:
    d = module.head_dim
    attention = AttentionSizes(name, module, module, d, {"query": module.num_heads, "kv": module.num_heads})
    attention.add_parameter("in_proj_weight", 0, ("query", d), ("kv", d), ("kv", d))
    attention.add_parameter("q_proj_weight", 0, ("query", d))
    attention.add_parameter("k_proj_weight", 0, ("kv", d))
    attention.add_parameter("v_proj_weight", 0, ("kv", d))
    attention.add_parameter("in_proj_bias", 0, ("query", d), ("kv", d), ("kv", d))
    attention.add_parameter("bias_k", 2, ("kv", d))
    attention.add_parameter("bias_v", 2, ("kv", d))
    attention.add_columns(module.out_proj, ("query", d))
    attention.add_numbers(("num_heads",), ("query", 1))
    return attention


def _read_hugging_face(name: str, module: nn.Module, projecting: nn.Module) -> AttentionSizes:
    attributes = vars(projecting)
    d = attributes.get("head_dim", attributes.get("attention_head_size"))
    # A module with `is_causal` and a configuration passes q, k and v to one of the library's attention functions, in
    # which heads are independent. Others (sparse, hashed, low-rank) have code of their own.
    common = "is_causal" in attributes and hasattr(attributes.get("config"), "_attn_implementation")
    if type(d) is not int or d < 1 or not common:
        raise bad_type(
            name,
            expected="attention of transformers that is computed by its common functions (with head_dim and is_causal)",
            received=type(projecting).__name__,
            remedy="regard.layouts.load makes a MultiHeadAttention of the weights of many others",
        )
    if attributes.get("is_kv_shared_layer") or attributes.get("store_full_length_kv"):
        raise bad_value(name, expected="keys and values of its own", received="some that layers share")
    attention = AttentionSizes(name, module, projecting, d, {"query": 1, "kv": 1})
    if "c_attn" in projecting._modules:
        _add_gpt2(attention, d)
    else:
        _add_separate(attention, d)
    attention.add_parameter("sinks", 0, ("query", 1))
    attention.add_numbers(QUERY_HEAD_COUNTS, ("query", 1))
    attention.add_numbers(KV_HEAD_COUNTS, ("kv", 1))
    attention.add_numbers(ALL_HEADS_WIDTHS, ("query", d))
    h, g = attention.counts["query"], attention.counts["kv"]
    groups = attributes.get("num_key_value_groups", 1)
    if g * groups != h:
        raise bad_value(name, expected=f"{h} query heads in groups for {g} kv heads", received=f"groups of {groups}")
    return attention


def _add_gpt2(attention: AttentionSizes, d: int) -> None:
    """GPT-2: q, k and v in one projection; in cross attention k and v in one, and q by itself."""
    children = attention.projecting._modules
    cross_query, joint, out = children.get("q_attn"), children["c_attn"], children["c_proj"]
    for linear in (joint, out):
        if linear is None or not is_conv1d(linear):  # others of the same name order their heads differently
            raise bad_type(
                attention.name, expected="c_attn and c_proj as GPT-2 has them, Conv1D", received=type(linear).__name__
            )
    count = max(1, getattr(out, "nx", 0) // d)
    attention.counts = {"query": count, "kv": count}
    if cross_query is None:
        attention.add_rows(joint, ("query", d), ("kv", d), ("kv", d))
    else:
        attention.add_rows(cross_query, ("query", d))
        attention.add_rows(joint, ("kv", d), ("kv", d))
    attention.add_columns(out, ("query", d))


def _add_separate(attention: AttentionSizes, d: int) -> None:
    """Separate q, k and v; the output projection is a child too, or `output.dense` of the module around (BERT)."""
    children = attention.projecting._modules
    names = separate_projections(attention.projecting)
    assert names is not None
    q, k, v = (children[name] for name in names)
    out = next((children[name] for name in OUTPUT_PROJECTIONS if name in children), None)
    if out is None:
        output = attention.module._modules["output"]
        out = None if output is None else output._modules["dense"]
    g = max(1, getattr(k, "out_features", 0) // d)
    e = getattr(v, "out_features", 0) // g
    attention.counts = {"query": max(1, getattr(q, "out_features", 0) // d), "kv": g}
    attention.add_rows(q, ("query", d))
    attention.add_rows(k, ("kv", d))
    attention.add_rows(v, ("kv", e))
    attention.add_columns(out, ("query", e))
