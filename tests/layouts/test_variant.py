"""Layouts of layers that are no `MultiHeadAttention`: found by keys, sizes from shapes, refusals in words.

That the layers compute what the originals do: `tests/variants`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from regard import DifferentialAttention, LatentAttention, MultiHeadAttention, layouts
from regard.positions import Rotary

Tensors = dict[str, Tensor]


def latent_state(**options: Any) -> Tensors:
    sizes = {"kv_rank": 11, "nope_head_dim": 5, "rope_head_dim": 4, "value_head_dim": 7, **options}
    return layouts.export(LatentAttention(14, 3, **sizes), "deepseek")  # type: ignore[arg-type]


def differential_state() -> Tensors:
    return layouts.export(DifferentialAttention(14, 6, num_kv_heads=3, head_dim=4), "diffllama")


def refuses(*words: str) -> Any:
    return pytest.raises((ValueError, TypeError), match="(?s)" + ".*".join(words))


def test_names() -> None:
    assert layouts.names()[-3:] == ["deepseek", "minicpm3", "diffllama"]


@pytest.mark.parametrize("q_rank", [None, 13])
@pytest.mark.parametrize("bias", [False, True])
def test_sizes_of_latent_attention_are_read_from_the_shapes(q_rank: int | None, bias: bool) -> None:
    state = latent_state(q_rank=q_rank, bias=bias)
    layer = layouts.load(state, 3)
    assert isinstance(layer, LatentAttention)
    found = (
        layer.embed_dim,
        layer.kv_rank,
        layer.nope_head_dim,
        layer.rope_head_dim,
        layer.value_head_dim,
        layer.q_rank,
    )
    assert found == (14, 11, 5, 4, 7, q_rank)
    assert (layer.kv_down_proj.bias is not None) == bias
    assert all(torch.equal(tensor, state[key]) for key, tensor in layouts.export(layer, "deepseek").items())


def test_some_biases_alone() -> None:
    state = latent_state(q_rank=13, bias=True)
    del state["q_a_proj.bias"], state["o_proj.bias"]
    layer = layouts.load(state, 3)
    assert layer.q_down_proj.bias is None
    assert layer.kv_down_proj.bias is not None
    assert layouts.export(layer, "deepseek").keys() == state.keys()


@pytest.mark.parametrize("make", [latent_state, differential_state])
def test_prefixes(make: Any) -> None:
    heads, options = (3, {}) if make is latent_state else (6, {"lambda_init": 0.3})
    model = {f"model.layers.{i}.self_attn.{key}": x for i in range(2) for key, x in make().items()}
    model["model.norm.weight"] = torch.ones(14)
    for prefix in ("model.layers.1.self_attn.", "model.layers.1.self_attn"):
        layer = layouts.load(model, heads, prefix=prefix, **options)
        assert torch.equal(layer.out_proj.weight, model["model.layers.1.self_attn.o_proj.weight"])
    with refuses("keys with a prefix", r"remedy: prefix='model.layers.0.self_attn.' \(or another of 2\)"):
        layouts.load(model, heads, **options)
    with refuses("keys with a prefix", r"remedy: prefix='model.layers.1.self_attn.'"):
        layouts.load(model, heads, prefix="model.layers.1", **options)


@pytest.mark.parametrize(
    "key, words",
    [
        ("indexer.wk.weight", "'indexer.wk.weight': a top-k indexer that chooses keys"),
        ("g_proj.weight", "'g_proj.weight': a gate on the heads' outputs"),
        ("gate_proj.weight", "a gate on the heads' outputs"),
        ("k_rope_only_layernorm.weight", "a norm of the shared rotary key"),
        ("softmax_scaling.scale", "a learned scale that depends on positions"),
        ("sinks", "sinks"),
        ("other.weight", "expected no keys but its own, received 'other.weight'"),
        ("kv_b_proj.bias", "expected no keys but its own, received 'kv_b_proj.bias'"),
    ],
)
def test_features_that_latent_attention_has_not(key: str, words: str) -> None:
    with refuses("layout 'deepseek': ", words):
        layouts.load({**latent_state(), key: torch.ones(3)}, 3)


def test_latent_states_that_do_not_fit() -> None:
    state = latent_state(q_rank=13)
    with refuses("num_heads: expected a divisor of the 27 rows of q, received 5"):
        layouts.load(state, 5)
    with refuses("num_heads: expected heads whose queries are wider than the shared rotary key"):
        layouts.load(state, 9)
    with refuses("expected the number of heads"):
        layouts.load(state)
    with refuses("'kv_b_proj.weight', as layout 'deepseek' has it"):
        layouts.load({key: x for key, x in state.items() if key != "kv_b_proj.weight"}, 3)
    with refuses("expected q_proj, or q_a_proj with q_a_layernorm and q_b_proj, received no 'q_a_layernorm.weight'"):
        layouts.load({key: x for key, x in state.items() if key != "q_a_layernorm.weight"}, 3)
    with refuses("expected q_proj or q_b_proj, received both"):
        layouts.load({**state, "q_proj.weight": torch.ones(27, 14)}, 3)
    with refuses("expected q_proj", "received no 'q_proj.weight'"):
        layouts.load({key: x for key, x in state.items() if not key.startswith("q_")}, 3)
    with refuses(r"o_proj.weight: expected shape \(14, 21\), for 3 heads and the other tensors, received \(14, 5\)"):
        layouts.load({**state, "o_proj.weight": torch.ones(14, 5)}, 3)
    with refuses(r"q_b_proj.weight: expected a matrix, received shape \(27,\)"):
        layouts.load({**state, "q_b_proj.weight": torch.ones(27)}, 3)
    with refuses("kv_b_proj.weight: expected a floating-point tensor", "dequantise"):
        layouts.load({**state, "kv_b_proj.weight": torch.ones(36, 11, dtype=torch.int8)}, 3)
    with refuses("kv_rank: expected no argument: it is read from the shapes", "remedy: leave kv_rank out"):
        layouts.load(state, 3, kv_rank=11)
    with refuses("'kv_a_proj_with_mqa.weight', as layout 'minicpm3' has it"):
        layouts.load({"q_proj.weight": torch.ones(3, 3)}, 3, layout="minicpm3")


def test_differential_states_that_do_not_fit() -> None:
    state = differential_state()
    with refuses("lambda_init: expected an argument, for it is not among the weights", "math.exp"):
        layouts.load(state, 6)
    with refuses("num_heads: expected 6: q_proj has 48 rows", "half of the num_attention_heads of DiffLlama"):
        layouts.load(state, 12, lambda_init=0.3)
    with refuses(r"k_proj.weight: expected 2 G \* 4 rows"):
        layouts.load({**state, "k_proj.weight": torch.ones(20, 14)}, 6, lambda_init=0.3)
    with refuses(r"v_proj.weight: expected shape \(24, 14\)"):
        layouts.load({**state, "v_proj.weight": torch.ones(20, 14)}, 6, lambda_init=0.3)
    with refuses("'lambda_k2', as layout 'diffllama' has it"):
        layouts.load({key: x for key, x in state.items() if key != "lambda_k2"}, 6, lambda_init=0.3)
    affine = {**state, "groupnorm.weight": torch.full((8,), 2.0)}
    assert layouts.load(affine, 6, lambda_init=0.3).head_norm.weight[0] == 2


def test_kinds_of_layers_are_not_confused() -> None:
    with refuses("export as 'deepseek': expected a LatentAttention, received MultiHeadAttention"):
        layouts.export(MultiHeadAttention(6, 3), "deepseek")
    with refuses("export as 'llama': expected a MultiHeadAttention", "received LatentAttention", "layout='deepseek'"):
        layouts.export(layouts.load(latent_state(), 3), "llama")
    with refuses("export as 'llama'", "received DifferentialAttention", "layout='diffllama'"):
        layouts.export(DifferentialAttention(8, 2), "llama")
    with refuses("layout: expected one of MultiHeadAttention, received 'deepseek', of LatentAttention"):
        layouts.load_block(latent_state(), 3, layout="deepseek")


def test_rotary_pairs_that_are_stored_in_halves() -> None:
    state = latent_state()
    layer = layouts.load(state, 3, position_encoding=Rotary(4), rotary_pairs="halves")
    assert all(torch.equal(x, state[key]) for key, x in layouts.export(layer, "minicpm3").items())
    assert not all(torch.equal(x, state[key]) for key, x in layouts.export(layer, "deepseek").items())
