"""Values that a file says: each is of its kind, or is refused in words; whatever a config.json holds, a model is loaded
whole or not at all, and nothing large is made before the sizes are compared."""

from __future__ import annotations

import json
import math
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch

from regard import models
from regard.models import ModelConfig
from regard.models.families import FAMILIES, family_of
from regard.models.fields import LAYERS, ROWS, WIDTH, flag, integer, number, several, word

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize("value", [1, 7, ROWS])
def test_an_integer(value):
    assert integer("it", value) == value


@pytest.mark.parametrize("value", [True, 3.0, "3", None, [3], {}])
def test_what_is_no_integer(value):
    with pytest.raises(TypeError, match=r"^it: expected a positive integer, received "):
        integer("it", value)


@pytest.mark.parametrize("value", [0, -1, ROWS + 1, 10**400])
def test_an_integer_out_of_bounds(value):
    with pytest.raises(ValueError, match=rf"^it: expected a positive integer, at most {ROWS}, received .{{1,40}}$"):
        integer("it", value)


def test_an_integer_with_bounds_of_its_own():
    assert integer("it", 0, least=0) == 0
    with pytest.raises(ValueError, match=r"^it: expected an integer from 0 on, at most 5, received 6$"):
        integer("it", 6, least=0, most=5)
    with pytest.raises(ValueError, match=r"^it: expected an integer from -1 on, at most 5, received -2$"):
        integer("it", -2, least=-1, most=5)


@pytest.mark.parametrize("value", [1e-6, 0.5, 3, 1e30])
def test_a_number(value):
    assert number("it", value, above=0.0) == value
    assert type(number("it", value)) is float


@pytest.mark.parametrize("value", [NAN, INF, -INF, 0, -1e-9, 2e30, 10**400, -(10**400)])
def test_a_number_out_of_bounds(value):
    with pytest.raises(ValueError, match=r"^it: expected a finite number above 0, at most 1e\+30, received "):
        number("it", value, above=0.0)


@pytest.mark.parametrize("value", [True, "1e-6", None, [1.0]])
def test_what_is_no_number(value):
    with pytest.raises(TypeError, match=r"^it: expected a finite number from 2 on, received "):
        number("it", value, least=2.0)


def test_flags_and_words():
    assert flag("it", False) is False
    assert word("it", "so") == "so"
    for value in (0, 1, "true", None):
        with pytest.raises(TypeError, match=r"^it: expected true or false, received "):
            flag("it", value)
    for value in (0, None, ["so"]):
        with pytest.raises(TypeError, match=r"^it: expected a string, received "):
            word("it", value)


def test_lists():
    assert several("it", [1, 2], integer) == (1, 2)
    with pytest.raises(ValueError, match=r"^it\[1\]: expected a positive integer, at most \d+, received 0$"):
        several("it", [1, 0], integer)
    with pytest.raises(TypeError, match=r"^it: expected a list, received 'ab'$"):
        several("it", "ab", word)
    with pytest.raises(ValueError, match=r"^it: expected a list of 2, received one of 3$"):
        several("it", [1, 2, 3], integer, count=2)


# ----------------------------------------------------------------------------------------------------
# A config.json that holds anything

_SIZES: dict[str, Any] = {
    "vocab_size": 11,
    "hidden_size": 12,
    "num_attention_heads": 3,
    "num_hidden_layers": 2,
    "intermediate_size": 7,
    "max_position_embeddings": 13,
}
_TOKENS: dict[str, Any] = {"bos_token_id": 2, "eos_token_id": [3, 4], "pad_token_id": 1}
_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 8,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "attention_factor": 1.2,
    "truncate": True,
}
_LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8,
    "rope_theta": 1e4,
}
_LONG: dict[str, Any] = {
    "rope_type": "longrope",
    "short_factor": [1.0, 2.0],
    "long_factor": [1.0, 3.0],
    "factor": 2.0,
    "original_max_position_embeddings": 8,
    "attention_factor": 1.1,
}
GOOD: dict[str, dict[str, Any]] = {
    "bert": {
        "model_type": "bert",
        "type_vocab_size": 2,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-12,
        "is_decoder": False,
        **_SIZES,
        **_TOKENS,
    },
    "roberta": {"model_type": "roberta", "type_vocab_size": 1, **_SIZES, **_TOKENS},
    "gpt2": {
        "model_type": "gpt2",
        "n_layer": 2,
        "n_embd": 12,
        "n_head": 3,
        "n_inner": 7,
        "vocab_size": 11,
        "n_positions": 13,
        "scale_attn_by_inverse_layer_idx": True,
        "scale_attn_weights": False,
        "tie_word_embeddings": True,
        "layer_norm_epsilon": 1e-5,
        "activation_function": "gelu_new",
    },
    "gpt_neox": {
        "model_type": "gpt_neox",
        "rotary_pct": 0.5,
        "rotary_emb_base": 1e4,
        "use_parallel_residual": True,
        "attention_bias": True,
        **_SIZES,
    },
    "mistral": {
        "model_type": "mistral",
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"],
        "head_dim": 4,
        "num_key_value_heads": 1,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e4,
        "mlp_bias": False,
        **_SIZES,
    },
    "qwen2": {
        "model_type": "qwen2",
        "sliding_window": 5,
        "use_sliding_window": True,
        "max_window_layers": 1,
        "rope_parameters": _YARN,
        **_SIZES,
    },
    "llama3": {"model_type": "llama", "rope_scaling": _LLAMA3, "tie_word_embeddings": True, **_SIZES},
    "longrope": {"model_type": "llama", "rope_scaling": _LONG, **_SIZES},
    "dynamic": {"model_type": "llama", "rope_scaling": {"type": "dynamic", "factor": 2.0}, **_SIZES},
}
BAD = [
    None,
    True,
    0,
    -1,
    -3,
    3,
    1.0,
    1e-300,
    1e308,
    NAN,
    INF,
    -INF,
    10**5,
    10**8,
    2**31,
    2**63,
    10**400,
    "",
    "7",
    "x\x1b[31m",
    [],
    [1],
    [[1]],
    {},
    {"a": 1},
    [NAN, INF],
]


def changed(good: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """The settings with each value in turn, those of rope too, replaced by each that should not be there."""
    made = []
    for name, value in good.items():
        made += [(f"{name}={bad!r:.20}", good | {name: bad}) for bad in BAD]
        if isinstance(value, dict):
            made += [(f"{name}.{own}", good | {name: value | {own: bad}}) for own in value for bad in BAD]
    return made


@pytest.mark.parametrize("name", GOOD)
def test_whatever_a_config_holds_it_is_refused_in_words_or_is_a_model_that_runs(name):
    torch.manual_seed(0)
    ids = torch.tensor([[5, 6, 7, 8, 9]])

    def outputs(settings: dict[str, Any]) -> torch.Tensor:
        config = family_of(settings).config(settings)
        # (what `load` compares with the file before it makes anything)
        sizes = config.embed_dim, config.inner, config.vocabulary, config.context, config.token_types, config.head_dim
        if config.layers > 9 or max(size or 0 for size in sizes) > 100:
            return torch.zeros(1)
        model = (models.Encoder if config.kind == "encoder" else models.Decoder)(config).eval()
        with torch.no_grad():
            return model(ids[:, : config.context])

    assert outputs(GOOD[name]).isfinite().all()
    refused = 0
    for case, settings in changed(GOOD[name]):
        try:
            assert outputs(settings).isfinite().all(), case
        except (TypeError, ValueError) as error:
            refused, said = refused + 1, str(error)
            in_words = "expected" in said and "received" in said and len(said) < 500 and "\x1b" not in said
            if not in_words:
                pytest.fail(f"{case}: {said}")
    assert refused > 0.6 * len(changed(GOOD[name]))


@pytest.mark.parametrize(
    "name, size, most",
    [
        ("mistral", "num_hidden_layers", LAYERS),
        ("gpt2", "n_layer", LAYERS),
        ("qwen2", "num_hidden_layers", LAYERS),
        ("mistral", "hidden_size", WIDTH),
        ("mistral", "intermediate_size", WIDTH),
        ("gpt2", "n_embd", WIDTH),
        ("mistral", "num_attention_heads", WIDTH),
        ("mistral", "head_dim", WIDTH),
        ("bert", "vocab_size", ROWS),
        ("bert", "max_position_embeddings", ROWS),
        ("bert", "type_vocab_size", ROWS),
        ("mistral", "sliding_window", ROWS),
    ],
)
def test_a_size_that_cannot_be_is_refused_before_anything_is_made_of_it(name, size, most):
    settings = {key: value for key, value in GOOD[name].items() if key != "layer_types"} | {size: 10**10}
    tracemalloc.start()
    try:
        with pytest.raises(
            ValueError, match=rf"config\.json: {size}: expected .*, at most {most}, received 10000000000"
        ):
            FAMILIES[name].config(settings)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_a_list_of_layer_types_is_compared_by_its_length_first():
    settings = GOOD["mistral"] | {"layer_types": ["sliding_attention"] * 10**6}
    with pytest.raises(ValueError, match=r"layer_types: expected one for each of 2 layers, received 1000000$"):
        FAMILIES["mistral"].config(settings)


@pytest.mark.parametrize("name", ["bert", "gpt2", "mistral"])
def test_the_largest_sizes_are_compared_with_the_file_in_words(name, tmp_path: Path):
    """All of them at once: no product of them overflows, and nothing is made in memory."""
    from safetensors.torch import save_file

    sizes = {"num_hidden_layers": 1, "n_layer": 1, "num_attention_heads": 1, "n_head": 1, "num_key_value_heads": 1}
    sizes |= dict.fromkeys(("hidden_size", "n_embd", "intermediate_size", "n_inner", "head_dim"), WIDTH)
    sizes |= dict.fromkeys(("vocab_size", "max_position_embeddings", "n_positions", "type_vocab_size"), ROWS)
    good = {key: value for key, value in GOOD[name].items() if key not in ("layer_types", "pad_token_id")}
    (tmp_path / "config.json").write_text(json.dumps(good | {k: v for k, v in sizes.items() if k in good}))
    save_file({"a.weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"expected the tensor '.*received none of that name"):
        models.load(tmp_path)


def test_heads_that_are_wide_and_many_are_refused():
    settings = GOOD["mistral"] | {"num_attention_heads": WIDTH, "num_key_value_heads": 1, "head_dim": WIDTH}
    with pytest.raises(ValueError, match=rf"head_dim: expected a total width of all heads of at most {WIDTH}"):
        FAMILIES["mistral"].config(settings)


@pytest.mark.parametrize("what", ["norm_eps", "rotary_base", "scale"])
@pytest.mark.parametrize("value", [NAN, INF, -1e-5, 0.0, "1"])
def test_a_number_of_a_config_that_cannot_be_is_refused(what, value):
    sizes: dict[str, Any] = {"layers": 2, "embed_dim": 6, "num_heads": 3, "vocabulary": 5, "inner": 7, "context": 11}
    with pytest.raises(ValueError, match=rf"^{what}: expected a positive finite number, received "):
        ModelConfig(**sizes, **{what: value})


def test_a_rope_for_each_kind_of_layer_is_not_half_read():
    settings = GOOD["mistral"] | {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}
    with pytest.raises(TypeError, match=r"config\.json: rope_parameters: expected one object for all layers"):
        FAMILIES["mistral"].config(settings)
