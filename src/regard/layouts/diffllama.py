"""`q_proj k_proj v_proj o_proj lambda_q1 lambda_k1 lambda_q2 lambda_k2`: differential attention, as of DiffLlama.

DiffLlama counts both halves: its num_attention_heads and num_key_value_heads are twice ours. Its value heads g and
g + G together are the value of our kv head g. `lambda_init` is not among its weights: it follows from the number of the
layer.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from regard.errors import bad_value, shape_of
from regard.layouts.base import Tensors, linear
from regard.layouts.rotary_pairs import rotary_pairs
from regard.layouts.variant import Given, VariantLayout, build, check_shapes
from regard.positions import Rotary
from regard.variants import DifferentialAttention

_LAMBDAS = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")
_KEYS = {
    **linear(q_proj="q_proj", k_proj="k_proj", v_proj="v_proj", out_proj="o_proj"),
    **{name: name for name in _LAMBDAS},
    "head_norm.weight": "groupnorm.weight",
}
_OPTIONAL = frozenset({key for key in _KEYS if key.endswith(".bias")} | {"head_norm.weight"})


def _read(tensors: Tensors, given: Given) -> nn.Module:
    if "lambda_init" not in given.options:
        raise bad_value(
            "lambda_init",
            expected="an argument, for it is not among the weights",
            received="none",
            remedy="lambda_init=0.8 - 0.6 * math.exp(-0.3 * layer), of the layer's number from 0",
        )
    sizes = _sizes(tensors, given.num_heads)
    rearranged = {key: _values(x, sizes["head_dim"]) if key.startswith("v_") else x for key, x in tensors.items()}
    encoding = given.options.get("position_encoding")
    wanted = "interleaved" if isinstance(encoding, Rotary) and encoding.interleaved else "halves"
    if encoding is not None and wanted != (given.pairs or "halves"):
        rearranged |= _in_order(rearranged, sizes["head_dim"], wanted)
    return build(DifferentialAttention, sizes, given.options, rearranged)


def _sizes(tensors: Tensors, heads: int) -> dict[str, Any]:
    """The arguments of `DifferentialAttention` that follow from the shapes, which are checked."""
    for key in ("q_proj.weight", "k_proj.weight", "v_proj.weight", "out_proj.weight"):
        if tensors[key].dim() != 2:
            raise bad_value(_KEYS[key], expected="a matrix", received=f"shape {shape_of(tensors[key])}")
    (queries, width), keys, dim = (
        tensors["q_proj.weight"].shape,
        tensors["k_proj.weight"].shape[0],
        tensors["lambda_q1"].numel(),
    )
    if queries != 2 * heads * dim:
        raise bad_value(
            "num_heads",
            expected=f"{queries / dim / 2:g}: q_proj has {queries} rows, lambda_q1 {dim} numbers, a head two queries",
            received=heads,
            remedy="half of the num_attention_heads of DiffLlama's configuration",
        )
    kv_heads = keys // (2 * dim)
    if not kv_heads or keys % (2 * dim) or heads % kv_heads:
        raise bad_value(
            "k_proj.weight",
            expected=f"2 G * {dim} rows, with G a divisor of num_heads = {heads}",
            received=f"{keys} rows",
            remedy="check num_heads",
        )
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(_LAMBDAS, (dim,))
    shapes |= {"q_proj.weight": (queries, width), "k_proj.weight": (keys, width), "v_proj.weight": (keys, width)}
    shapes |= {"q_proj.bias": (queries,), "k_proj.bias": (keys,), "v_proj.bias": (keys,)}
    shapes |= {"out_proj.weight": (width, queries), "out_proj.bias": (width,), "head_norm.weight": (2 * dim,)}
    check_shapes(tensors, shapes, _KEYS, heads)
    sizes = {"embed_dim": width, "num_heads": heads, "num_kv_heads": kv_heads, "head_dim": dim}
    return {**sizes, "bias": True, "norm_affine": "head_norm.weight" in tensors}


def _values(rows: Tensor, dim: int) -> Tensor:
    """Rows (2, G, D) of values as (G, 2, D)."""
    return rows.unflatten(0, (2, -1, dim)).transpose(0, 1).flatten(0, 2)


def _in_order(tensors: Tensors, dim: int, order: Any) -> Tensors:
    """The rows of q and k with their rotary pairs in the other order."""
    rows = {key: x for key, x in tensors.items() if key.startswith(("q_proj.", "k_proj."))}
    return {key: rotary_pairs(x, x.shape[0] // dim, to=order) for key, x in rows.items()}


def _write(layer: DifferentialAttention) -> Tensors:
    tensors = dict(layer.state_dict())
    for key in [key for key in tensors if key.startswith("v_proj.")]:
        by_head = tensors[key].unflatten(0, (-1, 2, layer.head_dim))
        tensors[key] = by_head.transpose(0, 1).flatten(0, 2)
    if isinstance(layer.position_encoding, Rotary) and layer.position_encoding.interleaved:
        tensors |= _in_order(tensors, layer.head_dim, "halves")
    return tensors


layout = VariantLayout(
    name="diffllama",
    origin="DiffLlama",
    marker="lambda_q1",
    kind=DifferentialAttention,
    keys=_KEYS,
    optional=_OPTIONAL,
    read=_read,
    write=_write,
)
