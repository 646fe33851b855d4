"""`ModelConfig`: what it checks, in whose words, and what it says of each layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from regard.models import Decoder, Encoder, ModelConfig
from regard.models.families import FAMILIES, family_of

SIZES: dict[str, Any] = {"layers": 3, "embed_dim": 35, "num_heads": 5, "vocabulary": 11, "inner": 13, "context": 17}


def made(**changes: Any) -> ModelConfig:
    return ModelConfig(**{**SIZES, **changes})


@pytest.mark.parametrize("value", [0, -3, 3.0, "3", None, True])
@pytest.mark.parametrize("size", ["layers", "embed_dim", "num_heads", "vocabulary", "inner"])
def test_sizes_are_positive_integers(size, value):
    with pytest.raises(ValueError, match=rf"{size}: expected a positive integer, received "):
        made(**{size: value})


@pytest.mark.parametrize("value", [2, 0, -1, 10, 2.5, "5"])
def test_kv_heads_divide_the_heads(value):
    with pytest.raises(ValueError, match=r"num_kv_heads: expected a divisor of num_heads = 5, received "):
        made(num_kv_heads=value)


@pytest.mark.parametrize("value", [None, 1, 5])
def test_kv_heads_that_divide(value):
    assert made(num_kv_heads=value).num_kv_heads == value


def test_heads_divide_the_width():
    with pytest.raises(ValueError, match=r"num_heads: expected a divisor of the width 35, received 6"):
        made(num_heads=6)


def test_heads_need_not_divide_the_width_where_they_have_one_of_their_own():
    assert made(num_heads=6, head_dim=7).head_dim == 7


@pytest.mark.parametrize("value", [0, -7, 7.0, "7"])
def test_a_head_width_is_a_positive_integer(value):
    with pytest.raises(ValueError, match=r"head_dim: expected a positive integer"):
        made(head_dim=value)


def test_an_activation_has_a_name_that_is_known():
    with pytest.raises(ValueError, match=r"activation: expected one of gelu, gelu_tanh, .*, received 'mish'"):
        made(activation="mish")


@pytest.mark.parametrize("context", [None, 0])
def test_learned_positions_have_a_number(context):
    with pytest.raises(ValueError, match=r"context: expected the number of learned positions, received"):
        made(context=context)


@pytest.mark.parametrize("context", [-1, 2.5, "17"])
def test_a_context_is_a_number_of_tokens(context):
    with pytest.raises(ValueError, match=r"context: expected "):
        made(context=context)


def test_rotary_positions_need_no_number():
    assert made(positions="rotary", num_heads=5, head_dim=4, context=None).context is None


@pytest.mark.parametrize(
    "choice, value", [("order", "sequential"), ("norm", "batch"), ("kind", "seq2seq"), ("pooling", "max")]
)
def test_a_choice_is_one_of_those_that_there_are(choice, value):
    """An order that is not known must not be taken for the parallel one."""
    with pytest.raises(ValueError, match=rf"{choice}: expected .*, received '{value}'"):
        made(**{choice: value})


@pytest.mark.parametrize("given", ["windows", "scales"])
def test_there_is_one_for_each_layer(given):
    with pytest.raises(ValueError, match=rf"{given}: expected one for each of 3 layers, received 2"):
        made(**{given: (0.5, 0.25) if given == "scales" else (5, None)})


@pytest.mark.parametrize("value", [0, -5, "5", 2.5])
def test_a_window_is_a_positive_number_of_tokens(value):
    with pytest.raises(ValueError, match=r"windows?: expected "):
        made(windows=(None, value, 7))


def test_the_window_of_a_layer_is_its_own():
    config = made(windows=(5, None, 7))
    assert [config.window_of(i) for i in range(3)] == [5, None, 7]


def test_the_window_of_a_layer_is_that_of_all_where_none_has_its_own():
    assert [made(window=5).window_of(i) for i in range(3)] == [5, 5, 5]
    assert made().window_of(2) is None


def test_the_scale_of_a_layer_is_its_own():
    config = made(scales=(0.5, 0.25, 0.125))
    assert [config.scale_of(i) for i in range(3)] == [0.5, 0.25, 0.125]


def test_the_scale_of_a_layer_is_that_of_all_where_none_has_its_own():
    assert [made(scale=0.3).scale_of(i) for i in range(3)] == [0.3, 0.3, 0.3]
    assert made().scale_of(2) is None


def test_a_window_reaches_as_far_as_it_says():
    """Three layers that see two tokens each: the last token knows of the three before it, and of no more."""
    torch.manual_seed(0)
    model = Decoder(made(windows=(2, 2, 2), causal=True, kind="decoder"))
    ids = torch.tensor([[1, 2, 3, 4, 5, 6, 7]])
    with torch.no_grad():
        last = model(ids)[0, -1]
        assert torch.equal(model(torch.tensor([[9, 9, 9, 4, 5, 6, 7]]))[0, -1], last)
        assert not torch.equal(model(torch.tensor([[1, 2, 3, 9, 5, 6, 7]]))[0, -1], last)


def test_scales_reach_the_layers():
    model = Encoder(made(scales=(0.5, 0.25, 0.125), order="post"))
    assert [block.attention.scale for block in model.blocks] == [0.5, 0.25, 0.125]


@pytest.mark.parametrize("eps", [1e-3, 1e-12])
def test_the_norms_of_queries_and_keys_have_the_model_s_epsilon(eps):
    model = Decoder(made(qk_norm="rms", norm="rms", norm_eps=eps, causal=True, kind="decoder"))
    norms = [m for m in model.modules() if hasattr(m, "eps")]
    assert len(norms) == 3 * 4 + 1
    assert {norm.eps for norm in norms} == {eps}


@pytest.mark.parametrize("model", [Encoder, Decoder])
@pytest.mark.parametrize("order", ["pre", "post", "parallel"])
def test_a_model_can_be_made_from_a_config_alone(model, order):
    out = model(made(order=order))(torch.tensor([[1, 2, 3]]))
    assert out.shape == (1, 3, 35 if model is Encoder else 11)
    assert bool(out.isfinite().all())


def test_a_config_is_a_value():
    assert made(windows=(5, None, 7)) == made(windows=(5, None, 7))
    assert hash(made()) == hash(made())
    with pytest.raises(AttributeError):
        made().layers = 5  # type: ignore[misc]


def test_every_family_is_under_its_own_name():
    assert all(name == family.name for name, family in FAMILIES.items())


@pytest.mark.parametrize("other", ["xlm-roberta", "camembert"])
def test_some_are_roberta_under_another_name(other):
    assert family_of({"model_type": other}) is FAMILIES["roberta"]


@pytest.mark.parametrize("share, width", [(0.25, 6), (0.5, 12), (1.0, None), (None, 6)])
def test_the_rotary_width_of_neox(share, width):
    settings = {
        "num_hidden_layers": 1,
        "hidden_size": 72,
        "num_attention_heads": 3,
        "intermediate_size": 5,
        "vocab_size": 7,
        "max_position_embeddings": 11,
    }
    config = FAMILIES["gpt_neox"].config(settings | ({} if share is None else {"rotary_pct": share}))
    assert config.rotary_width == width


@pytest.mark.parametrize("value", [0, "5", 5.0, -5])
@pytest.mark.parametrize("family", ["llama", "gpt_neox", "gpt2"])
def test_heads_are_checked_before_anything_is_divided_by_them(family, value):
    settings = {
        "num_hidden_layers": 1,
        "hidden_size": 70,
        "num_attention_heads": value,
        "intermediate_size": 5,
        "vocab_size": 7,
        "max_position_embeddings": 11,
        "scale_attn_by_inverse_layer_idx": True,
    }
    with pytest.raises((TypeError, ValueError), match=r"config\.json: .*(num_attention_heads|num_heads).*expected"):
        FAMILIES[family].config(settings)


@pytest.mark.parametrize("value", [0, "5", 5.0, -5])
def test_layers_are_checked_before_anything_is_counted_by_them(value):
    settings = {
        "num_hidden_layers": value,
        "hidden_size": 70,
        "num_attention_heads": 5,
        "intermediate_size": 5,
        "vocab_size": 7,
        "max_position_embeddings": 11,
        "sliding_window": 3,
    }
    with pytest.raises((TypeError, ValueError), match=r"config\.json: .*(num_hidden_layers|layers).*expected"):
        FAMILIES["mistral"].config(settings)
