"""Every family against transformers: the same folder, the same numbers, at every layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models.tiny import (
    CONTEXT,
    DECODERS,
    ENCODERS,
    LAYERS,
    VOCABULARY,
    Original,
    change_settings,
    change_tensors,
    hidden_states,
    is_decoder,
    logits,
    save,
    settings,
    some_ids,
)
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM

from regard import models
from regard.models.weights import SafetensorsFolder

EXACT = {"atol": 1e-5, "rtol": 1e-5}

ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 3.7},
    "dynamic": {"rope_type": "dynamic", "factor": 3.7},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 13},
    "yarn with an attention factor": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 13,
        "attention_factor": 0.83,
        "beta_fast": 17.0,
        "beta_slow": 2.0,
    },
    "yarn without rounding": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 13,
        "truncate": False,
    },
    "yarn with mscale": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 13,
        "mscale": 0.7,
        "mscale_all_dim": 1.3,
    },
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 13,
    },
    "longrope, short": {
        "rope_type": "longrope",
        "factor": 3.0,
        "original_max_position_embeddings": 43,
        "short_factor": [1.1, 1.2, 1.3, 1.5, 1.7, 1.9, 2.3],
        "long_factor": [2.0, 3.0, 5.0, 7.0, 11.0, 13.0, 17.0],
    },
    "longrope, long": {
        "rope_type": "longrope",
        "factor": 3.0,
        "original_max_position_embeddings": 13,
        "short_factor": [1.1, 1.2, 1.3, 1.5, 1.7, 1.9, 2.3],
        "long_factor": [2.0, 3.0, 5.0, 7.0, 11.0, 13.0, 17.0],
    },
}


def rope(kind: str, **more: Any) -> Original:
    return Original("llama", {"rope_parameters": {"rope_theta": 5003.0, **ROPES[kind]}, **more})


VARIANTS: dict[str, Original] = {
    "bert": Original("bert"),
    "bert, 5 token types": Original("bert", {"type_vocab_size": 5}),
    "bert, relu": Original("bert", {"hidden_act": "relu"}),
    "bert, gelu_new": Original("bert", {"hidden_act": "gelu_new"}),
    "bert, silu": Original("bert", {"hidden_act": "silu"}),
    "bert, large eps": Original("bert", {"layer_norm_eps": 0.1}),
    "bert, masked LM": Original("bert", kind="AutoModelForMaskedLM"),
    "bert, pretraining": Original("bert", kind="AutoModelForPreTraining"),
    "bert, classifier": Original("bert", {"num_labels": 7}, kind="AutoModelForSequenceClassification"),
    "bert, tagger": Original("bert", {"num_labels": 7}, kind="AutoModelForTokenClassification"),
    "bert, questions": Original("bert", kind="AutoModelForQuestionAnswering"),
    "roberta": Original("roberta"),
    "roberta, padding 3": Original("roberta", {"pad_token_id": 3, "eos_token_id": 1, "max_position_embeddings": 47}),
    "roberta, padding 0": Original("roberta", {"pad_token_id": 0}),
    "roberta, 2 token types": Original("roberta", {"type_vocab_size": 2, "layer_norm_eps": 0.1}),
    "roberta, masked LM": Original("roberta", kind="AutoModelForMaskedLM"),
    "roberta, classifier": Original("roberta", {"num_labels": 7}, kind="AutoModelForSequenceClassification"),
    "xlm-roberta": Original("xlm-roberta"),
    "xlm-roberta, masked LM": Original("xlm-roberta", kind="AutoModelForMaskedLM"),
    "camembert": Original("camembert"),
    "distilbert": Original("distilbert"),
    "distilbert, relu": Original("distilbert", {"activation": "relu"}),
    "distilbert, sinusoids": Original("distilbert", {"sinusoidal_pos_embds": True}),
    "distilbert, masked LM": Original("distilbert", kind="AutoModelForMaskedLM"),
    "distilbert, classifier": Original("distilbert", {"num_labels": 7}, kind="AutoModelForSequenceClassification"),
    "distilbert, questions": Original("distilbert", kind="AutoModelForQuestionAnswering"),
    "gpt2": Original("gpt2"),
    "gpt2, four times inner": Original("gpt2", {"n_inner": None}),
    "gpt2, scaled by layer": Original("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    "gpt2, unscaled": Original("gpt2", {"scale_attn_weights": False}),
    "gpt2, unscaled but by layer": Original(
        "gpt2", {"scale_attn_weights": False, "scale_attn_by_inverse_layer_idx": True}
    ),
    "gpt2, untied": Original("gpt2", {"tie_word_embeddings": False}),
    "gpt2, relu, large eps": Original("gpt2", {"activation_function": "relu", "layer_norm_epsilon": 0.1}),
    "gpt2, two heads": Original("gpt2", {"num_labels": 1}, kind="GPT2DoubleHeadsModel"),
    "gpt_neox": Original("gpt_neox"),
    "gpt_neox, sequential": Original("gpt_neox", {"use_parallel_residual": False}),
    "gpt_neox, all rotary": Original("gpt_neox", {"rotary_pct": 1.0}),
    "gpt_neox, half rotary, base": Original("gpt_neox", {"rotary_pct": 0.5, "rotary_emb_base": 503}),
    "gpt_neox, no attention bias": Original("gpt_neox", {"attention_bias": False}),
    "gpt_neox, tied": Original("gpt_neox", {"tie_word_embeddings": True}),
    "gpt_neox, gelu_fast, large eps": Original("gpt_neox", {"hidden_act": "gelu_fast", "layer_norm_eps": 0.1}),
    "gpt_neox, linear rope": Original(
        "gpt_neox", {"rope_parameters": {"rope_theta": 1e4, **ROPES["linear"], "partial_rotary_factor": 0.25}}
    ),
    "llama": Original("llama"),
    "llama, head width of the model": Original("llama", {"hidden_size": 60, "head_dim": None}),
    "llama, no shared heads": Original("llama", {"num_key_value_heads": None}),
    "llama, one kv head": Original("llama", {"num_key_value_heads": 1}),
    "llama, attention bias": Original("llama", {"attention_bias": True}),
    "llama, mlp bias": Original("llama", {"mlp_bias": True}),
    "llama, tied": Original("llama", {"tie_word_embeddings": True}),
    "llama, gelu, large eps": Original("llama", {"hidden_act": "gelu", "rms_norm_eps": 0.1}),
    **{f"llama, {kind}": rope(kind) for kind in ROPES},
    "llama, dynamic, past its context": rope("dynamic", max_position_embeddings=13),
    "mistral": Original("mistral"),
    "mistral, window": Original("mistral", {"sliding_window": 7}),
    "mistral, window of 1": Original("mistral", {"sliding_window": 1}),
    "qwen2": Original("qwen2"),
    "qwen2, tied": Original("qwen2", {"tie_word_embeddings": True}),
    "qwen2, windows from layer 1": Original(
        "qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}
    ),
    "qwen2, layer types": Original(
        "qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "qwen2, window not used": Original("qwen2", {"use_sliding_window": False, "sliding_window": 7}),
    "qwen3": Original("qwen3"),
    "qwen3, large eps": Original("qwen3", {"rms_norm_eps": 0.1}),
    "qwen3, attention bias": Original("qwen3", {"attention_bias": True}),
    "qwen3, tied, wide heads": Original("qwen3", {"tie_word_embeddings": True, "head_dim": 26}),
    "smollm3, each fourth layer without positions": Original("smollm3"),
    "smollm3, layers without positions by a list": Original("smollm3", {"no_rope_layers": [0, 1, 0]}),
    "smollm3, windows": Original(
        "smollm3", {"no_rope_layers": [1, 0, 0], "use_sliding_window": True, "sliding_window": 7}
    ),
    "qwen3, windows": Original("qwen3", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2}),
}


def ours(folder: Path, ids: Tensor, **options: Any) -> tuple[list[Tensor], Tensor | None]:
    """The states of every layer, and the logits of a decoder."""
    model = models.load(folder)
    states: list[Tensor] = []
    with torch.no_grad():
        if isinstance(model, models.Encoder):
            model(ids, states=states, **options)
            return states, None
        model.hidden(ids, states=states, **options)
        return states, model(ids, **options)


@pytest.mark.parametrize("name", VARIANTS)
def test_states_of_every_layer_and_logits_are_those_of_transformers(name, tmp_path):
    original = VARIANTS[name]
    model = original.make()
    model.save_pretrained(tmp_path)
    ids = some_ids()
    states, last = ours(tmp_path, ids)
    assert len(states) == LAYERS + 1
    for mine, theirs in zip(states, hidden_states(model, ids), strict=True):
        torch.testing.assert_close(mine, theirs, **EXACT)
    if is_decoder(original.family):
        torch.testing.assert_close(last, logits(model, ids), **EXACT)


@pytest.mark.parametrize("family", [*ENCODERS, *DECODERS])
def test_states_are_filled_with_what_the_call_returns_last(family, tmp_path):
    save(tmp_path, family)
    model, ids, states = models.load(tmp_path), some_ids(1, 5), []
    run = model if isinstance(model, models.Encoder) else model.hidden
    torch.testing.assert_close(run(ids, states=states), states[-1])


@pytest.mark.parametrize("family", [*ENCODERS, *DECODERS])
def test_one_text_without_a_batch_axis_is_a_batch_of_one(family, tmp_path):
    save(tmp_path, family)
    model, ids = models.load(tmp_path), some_ids(1, 11)
    torch.testing.assert_close(model(ids[0]), model(ids)[0])


def test_token_types_of_bert(tmp_path):
    model = save(tmp_path, "bert", type_vocab_size=3)
    ids, types = some_ids(2, 11), torch.tensor([[0] * 4 + [1] * 5 + [2] * 2, [1] * 3 + [0] * 8])
    states, _ = ours(tmp_path, ids, token_types=types)
    torch.testing.assert_close(states[-1], hidden_states(model, ids, token_type_ids=types)[-1], **EXACT)


@pytest.mark.parametrize(
    "types, words",
    [
        (torch.full((2, 5), 2), "from 0 to 1, received 2"),
        (torch.full((2, 5), -1), "from 0 to 1, received -1"),
        (torch.zeros(2, 4, dtype=torch.int64), r"one per token, \(2, 5\), received \(2, 4\)"),
        (torch.zeros(2, 5), r"an integer tensor, received dtype torch\.float32"),
    ],
)
def test_token_types_that_are_none(types, words, tmp_path):
    save(tmp_path, "bert")
    with pytest.raises((TypeError, ValueError), match=rf"token_types: expected {words}"):
        models.load(tmp_path)(some_ids(2, 5), token_types=types)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_head_of_its_own_is_used_though_the_config_says_that_it_is_tied(family, tmp_path):
    """As transformers 5 does: what was trained is in the file."""
    theirs = save(tmp_path, family, tie_word_embeddings=False)
    change_settings(tmp_path, tie_word_embeddings=True)
    ids = some_ids()
    torch.testing.assert_close(ours(tmp_path, ids)[1], logits(theirs, ids), **EXACT)


def test_a_head_that_is_a_copy_of_the_embedding_is_tied(tmp_path):
    save(tmp_path, "llama", tie_word_embeddings=True)
    change_tensors(tmp_path, lambda there: there | {"lm_head.weight": there["model.embed_tokens.weight"].clone()})
    model = models.load(tmp_path)
    assert model.head.weight is model.embedding.tokens.weight
    assert model.unused == ()


def give_head(folder: Path, head: str) -> None:
    """A file with a head beside a config that ties it: a copy of the embedding, or another."""
    save(folder, "llama", tie_word_embeddings=head == "a copy")
    if head == "a copy":
        change_tensors(folder, lambda there: there | {"lm_head.weight": there["model.embed_tokens.weight"].clone()})
    change_settings(folder, tie_word_embeddings=True)


@pytest.mark.parametrize("head", ["a copy", "its own"])
def test_to_describe_a_tied_model_reads_no_weight_though_a_head_is_stored(head, tmp_path, monkeypatch):
    give_head(tmp_path, head)
    monkeypatch.setattr(SafetensorsFolder, "read", lambda *_: pytest.fail("a weight was read"))
    model = models.blank(tmp_path)
    assert model.config.tied
    assert model.unused == ()
    assert f"{sum(p.numel() for p in model.parameters()):,}" in model.describe()
    with pytest.raises(pytest.fail.Exception, match="a weight was read"):  # only numbers tell whether it is a copy
        models.load(tmp_path)


@pytest.mark.parametrize("head, reads", [("a copy", 1), ("its own", 2)])
def test_a_stored_head_is_read_to_compare_it_and_again_only_if_it_is_used(head, reads, tmp_path, monkeypatch):
    give_head(tmp_path, head)
    read, names = SafetensorsFolder.read, []
    monkeypatch.setattr(SafetensorsFolder, "read", lambda self, name: names.append(name) or read(self, name))
    model = models.load(tmp_path)
    assert model.config.tied is (head == "a copy")
    assert names[:2] == ["lm_head.weight", "model.embed_tokens.weight"]
    assert names.count("lm_head.weight") == reads


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda head: head[:-1], r"lm_head\.weight: expected shape \(97, 42\).*received \(96, 42\)"),
        (lambda head: head.to(torch.int8), r"lm_head\.weight: expected floating point numbers, received torch\.int8"),
    ],
    ids=["shape", "dtype"],
)
def test_a_head_that_cannot_be_one_is_told_before_a_number_is_read(change, words, tmp_path, monkeypatch):
    give_head(tmp_path, "its own")
    change_tensors(tmp_path, lambda there: there | {"lm_head.weight": change(there["lm_head.weight"])})
    monkeypatch.setattr(SafetensorsFolder, "read", lambda *_: pytest.fail("a weight was read"))
    for use in (models.blank, models.load):
        with pytest.raises(ValueError, match=words):
            use(tmp_path)


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "llama", "qwen3"])
def test_a_tied_base_checkpoint_has_its_embedding_as_head(family, tmp_path):
    model = save(tmp_path, family, kind="AutoModel", tie_word_embeddings=True)
    ids = some_ids()
    states, last = ours(tmp_path, ids)
    theirs = hidden_states(model, ids)[-1]
    torch.testing.assert_close(states[-1], theirs, **EXACT)
    torch.testing.assert_close(last, theirs @ model.get_input_embeddings().weight.detach().T, **EXACT)


def test_an_untied_base_checkpoint_has_no_head_and_says_so(tmp_path):
    save(tmp_path, "llama", kind="AutoModel")
    with pytest.raises(ValueError, match=r"lm_head\.weight.*received none of that name"):
        models.load(tmp_path)


def test_the_head_missing_is_named_as_a_checkpoint_would_name_it(tmp_path):
    save(tmp_path, "llama", kind="AutoModel")
    with pytest.raises(ValueError, match=r"the tensor 'lm_head\.weight'"):
        models.load(tmp_path)


def test_heads_for_other_tasks_are_listed_as_unused(tmp_path):
    save(tmp_path, "bert", kind="AutoModelForSequenceClassification", num_labels=7)
    assert models.load(tmp_path).unused == (
        "bert.pooler.dense.bias",
        "bert.pooler.dense.weight",
        "classifier.bias",
        "classifier.weight",
    )


def test_a_loaded_model_is_in_eval_mode_and_its_head_tied(tmp_path):
    save(tmp_path, "llama", tie_word_embeddings=True)
    model = models.load(tmp_path)
    assert not model.training
    assert model.head.weight is model.embedding.tokens.weight


def test_special_tokens_are_those_of_the_config(tmp_path):
    save(tmp_path, "llama")
    config = models.load(tmp_path).config
    assert (config.bos, config.eos, config.pad) == (2, (3,), 1)


def test_generation_ends_where_generation_config_says(tmp_path):
    save(tmp_path, "llama")
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 11]}')
    assert models.load(tmp_path).config.eos == (3, 11)


# ----------------------------------------------------------------------------------------------------
# config.json as older versions wrote it


def _as_written_by_transformers_4(folder: Path, **more: Any) -> None:
    """rope_theta and rope_scaling stand alone, `torch_dtype` is what is now `dtype`, and no layer types are named."""
    old = {
        "rope_theta": settings(folder)["rope_parameters"]["rope_theta"],
        "rope_scaling": None,
        "torch_dtype": "float32",
        "transformers_version": "4.37.2",
    }
    change_settings(folder, without=("rope_parameters", "dtype", "layer_types"), **old | more)


OLD_SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"type": "linear", "factor": 3.7},
    "dynamic": {"type": "dynamic", "factor": 3.7},
    "yarn": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 13},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 13,
    },
    "both names": {"type": "linear", "rope_type": "linear", "factor": 3.7},
}


@pytest.mark.parametrize("kind", OLD_SCALINGS)
def test_rope_scaling_as_transformers_4_wrote_it(kind, tmp_path):
    save(tmp_path, "llama")
    _as_written_by_transformers_4(
        tmp_path, rope_theta=503.0, rope_scaling=OLD_SCALINGS[kind], max_position_embeddings=13
    )
    ids = some_ids()
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert theirs.config.rope_parameters["rope_theta"] == 503.0
    torch.testing.assert_close(ours(tmp_path, ids)[1], logits(theirs, ids), **EXACT)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_rope_theta_alone_as_transformers_4_wrote_it(family, tmp_path):
    save(tmp_path, family)
    _as_written_by_transformers_4(tmp_path, rope_theta=503.0)
    ids = some_ids()
    torch.testing.assert_close(
        ours(tmp_path, ids)[1], logits(AutoModelForCausalLM.from_pretrained(tmp_path), ids), **EXACT
    )


def test_the_first_llama_configs_had_neither_kv_heads_nor_rope(tmp_path):
    save(tmp_path, "llama", hidden_size=60, head_dim=None, num_key_value_heads=None)
    later = ("num_key_value_heads", "head_dim", "rope_parameters", "attention_bias", "mlp_bias", "tie_word_embeddings")
    change_settings(tmp_path, without=later)
    ids = some_ids()
    torch.testing.assert_close(
        ours(tmp_path, ids)[1], logits(AutoModelForCausalLM.from_pretrained(tmp_path), ids), **EXACT
    )


LEFT_OUT = [
    ("bert", "hidden_act"),
    ("bert", "layer_norm_eps"),
    ("bert", "pad_token_id"),
    ("bert", "is_decoder"),
    ("roberta", "layer_norm_eps"),
    ("xlm-roberta", "layer_norm_eps"),
    ("roberta", "hidden_act"),
    ("distilbert", "activation"),
    ("gpt2", "activation_function"),
    ("gpt2", "layer_norm_epsilon"),
    ("gpt2", "tie_word_embeddings"),
    ("gpt_neox", "rope_parameters"),
    ("gpt_neox", "use_parallel_residual"),
    ("gpt_neox", "attention_bias"),
    ("gpt_neox", "layer_norm_eps"),
    ("gpt_neox", "hidden_act"),
    ("llama", "rms_norm_eps"),
    ("llama", "rope_parameters"),
    ("llama", "hidden_act"),
    ("mistral", "sliding_window"),
    ("qwen2", "layer_types"),
    ("qwen2", "rms_norm_eps"),
    ("qwen3", "attention_bias"),
    ("smollm3", "no_rope_layers"),
    ("smollm3", "tie_word_embeddings"),
    ("smollm3", "layer_types"),
    ("qwen3", "sliding_window"),
]


@pytest.mark.parametrize("family, key", LEFT_OUT)
def test_what_a_config_leaves_out_is_what_transformers_takes_it_for(family, key, tmp_path):
    save(tmp_path, family)
    change_settings(tmp_path, without=(key,))
    ids = some_ids()
    kind = AutoModelForCausalLM if is_decoder(family) else AutoModel
    wanted = hidden_states(kind.from_pretrained(tmp_path, attn_implementation="eager"), ids)[-1]
    torch.testing.assert_close(ours(tmp_path, ids)[0][-1], wanted, **EXACT)


@pytest.mark.parametrize("share", [0.25, 0.5, 1.0])
def test_rotary_pct_of_neox_as_pythia_has_it(share, tmp_path):
    save(tmp_path, "gpt_neox")
    change_settings(tmp_path, without=("rope_parameters", "attention_bias"), rotary_pct=share, rotary_emb_base=503)
    ids = some_ids()
    torch.testing.assert_close(
        ours(tmp_path, ids)[1], logits(AutoModelForCausalLM.from_pretrained(tmp_path), ids), **EXACT
    )


def test_windows_of_qwen2_as_transformers_4_wrote_them(tmp_path):
    save(tmp_path, "qwen2")
    _as_written_by_transformers_4(tmp_path, use_sliding_window=True, sliding_window=7, max_window_layers=2)
    ids = some_ids()
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    torch.testing.assert_close(ours(tmp_path, ids)[1], logits(theirs, ids), **EXACT)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_a_window_that_nothing_says_is_used_is_not(family, tmp_path):
    """`use_sliding_window` is False where it is not named."""
    save(tmp_path, family)
    _as_written_by_transformers_4(tmp_path, sliding_window=7)
    change_settings(tmp_path, without=("use_sliding_window",))
    ids = some_ids()
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    torch.testing.assert_close(ours(tmp_path, ids)[1], logits(theirs, ids), **EXACT)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_windows_begin_at_layer_28_where_nothing_else_is_said(family, tmp_path):
    save(tmp_path, family)
    _as_written_by_transformers_4(tmp_path, sliding_window=7, use_sliding_window=True)
    change_settings(tmp_path, without=("max_window_layers",))
    ids = some_ids()
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    torch.testing.assert_close(ours(tmp_path, ids)[1], logits(theirs, ids), **EXACT)


def test_gpt2_as_its_first_checkpoint_has_it(tmp_path):
    """No prefix, no head, buffers of the causal mask, and few settings."""
    model = save(tmp_path, "gpt2", n_inner=None)

    def first(there):
        there = {name.removeprefix("transformer."): t for name, t in there.items() if name != "lm_head.weight"}
        return there | {f"h.{i}.attn.bias": torch.ones(1, 1, CONTEXT, CONTEXT) for i in range(LAYERS)}

    change_tensors(tmp_path, first)
    later = (
        "n_inner",
        "tie_word_embeddings",
        "scale_attn_weights",
        "add_cross_attention",
        "reorder_and_upcast_attn",
        "scale_attn_by_inverse_layer_idx",
    )
    change_settings(tmp_path, without=later, n_ctx=CONTEXT)
    ids = some_ids()
    torch.testing.assert_close(ours(tmp_path, ids)[1], logits(model, ids), **EXACT)
    assert models.load(tmp_path).unused == ()


def test_neox_with_the_buffers_of_pythia(tmp_path):
    model = save(tmp_path, "gpt_neox")

    def older(there):
        for i in range(LAYERS):
            there[f"gpt_neox.layers.{i}.attention.bias"] = torch.ones(1, 1, CONTEXT, CONTEXT, dtype=torch.bool)
            there[f"gpt_neox.layers.{i}.attention.masked_bias"] = torch.tensor(-1e9)
            there[f"gpt_neox.layers.{i}.attention.rotary_emb.inv_freq"] = torch.ones(3)

    change_tensors(tmp_path, older)
    ids = some_ids()
    torch.testing.assert_close(ours(tmp_path, ids)[1], logits(model, ids), **EXACT)
    assert models.load(tmp_path).unused == ()


@pytest.mark.parametrize("family", ["bert", "roberta", "distilbert"])
def test_position_ids_beside_the_weights_are_no_weights(family, tmp_path):
    save(tmp_path, family)
    change_tensors(tmp_path, lambda there: there | {"embeddings.position_ids": torch.arange(CONTEXT)[None]})
    assert "embeddings.position_ids" not in models.load(tmp_path).unused


# ----------------------------------------------------------------------------------------------------
# Padding

LENGTHS = (11, 3, 7, 1)


def padded(side: str) -> tuple[list[Tensor], Tensor, Tensor]:
    """Rows of different lengths, and the batch of them: ids and keep."""
    rows = [some_ids(1, n, seed=n)[0] for n in LENGTHS]
    longest = max(LENGTHS)
    ids, keep = torch.ones(len(rows), longest, dtype=torch.int64), torch.zeros(len(rows), longest, dtype=torch.bool)
    for i, row in enumerate(rows):
        where = slice(0, len(row)) if side == "right" else slice(longest - len(row), None)
        ids[i, where], keep[i, where] = row, True
    return rows, ids, keep


PADDED = {
    **{family: Original(family) for family in (*ENCODERS, *DECODERS)},
    "mistral, window": VARIANTS["mistral, window"],
    "llama, yarn": VARIANTS["llama, yarn"],
    "gpt_neox, sequential": VARIANTS["gpt_neox, sequential"],
}


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", PADDED)
def test_a_padded_row_is_the_row_alone(name, side, tmp_path):
    PADDED[name].make().save_pretrained(tmp_path)
    model = models.load(tmp_path)
    rows, ids, keep = padded(side)
    with torch.no_grad():
        together = model(ids, keep=keep)
        for i, row in enumerate(rows):
            torch.testing.assert_close(together[i, keep[i]], model(row), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", PADDED)
def test_a_padded_batch_is_that_of_transformers_where_it_is_no_padding(name, side, tmp_path):
    """Told which position each token has, for those with learned positions do not count it themselves."""
    theirs = PADDED[name].make()
    theirs.save_pretrained(tmp_path)
    _, ids, keep = padded(side)
    places = (keep.cumsum(1) - 1).clamp(min=0)
    if "roberta" in name:
        places = places + 2
    states, _ = ours(tmp_path, ids, keep=keep)
    for mine, other in zip(
        states, hidden_states(theirs, ids, attention_mask=keep.long(), position_ids=places), strict=True
    ):
        torch.testing.assert_close(mine[keep], other[keep], **EXACT)


@pytest.mark.parametrize("family", [*ENCODERS, *DECODERS])
def test_what_stands_at_padding_does_not_matter(family, tmp_path):
    save(tmp_path, family)
    model = models.load(tmp_path)
    _, ids, keep = padded("left")
    other = torch.where(keep, ids, 23)
    with torch.no_grad():
        torch.testing.assert_close(model(ids, keep=keep)[keep], model(other, keep=keep)[keep])


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("family", [*ENCODERS, *DECODERS])
def test_the_gradient_of_a_padded_batch_is_finite(family, side, tmp_path):
    """A row of scores where all is hidden must not make NaN of every weight."""
    save(tmp_path, family)
    model = models.load(tmp_path)
    _, ids, keep = padded(side)
    model(ids, keep=keep)[keep].sum().backward()
    assert all(p.grad is None or bool(p.grad.isfinite().all()) for p in model.parameters())


# ----------------------------------------------------------------------------------------------------
# Caches

CACHED = {
    **{family: Original(family) for family in DECODERS},
    **{
        name: VARIANTS[name]
        for name in (
            "mistral, window",
            "qwen2, layer types",
            "llama, yarn",
            "gpt2, untied",
            "gpt_neox, sequential",
            "llama, one kv head",
            "llama, longrope, short",
        )
    },
}


@pytest.mark.parametrize("sizes", [(1,) * 17, (5, 1, 1, 7, 3), (17,)], ids=["one by one", "in chunks", "at once"])
@pytest.mark.parametrize("name", CACHED)
def test_with_a_cache_or_without(name, sizes, tmp_path):
    CACHED[name].make().save_pretrained(tmp_path)
    model, ids = models.load(tmp_path), some_ids(2, 17)
    cache = model.new_cache()
    with torch.no_grad():
        parts = [model(part, cache=cache) for part in ids.split(sizes, dim=1)]
        torch.testing.assert_close(torch.cat(parts, 1), model(ids), atol=1e-4, rtol=1e-4)
    assert len(cache[0]) == 17


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", CACHED)
def test_a_padded_batch_goes_on_with_a_cache_as_each_row_alone(name, side, tmp_path):
    CACHED[name].make().save_pretrained(tmp_path)
    model = models.load(tmp_path)
    rows, ids, keep = padded(side)
    cache, new = model.new_cache(), some_ids(len(rows), 2, seed=13)
    with torch.no_grad():
        model(ids, keep=keep, cache=cache)
        for step in range(2):
            keep = torch.cat([keep, torch.ones(len(rows), 1, dtype=torch.bool)], 1)
            last = model(new[:, step : step + 1], keep=keep, cache=cache)
        for i, row in enumerate(rows):
            alone = model(torch.cat([row, new[i]]))[-1]
            torch.testing.assert_close(last[i, -1], alone, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", DECODERS)
def test_a_cache_of_another_model_is_refused(family, tmp_path):
    save(tmp_path, family)
    model = models.load(tmp_path)
    with pytest.raises(ValueError, match=rf"cache: expected one per layer, {LAYERS}, received 1; remedy: model\.new_c"):
        model(some_ids(1, 2), cache=model.new_cache()[:1])


@pytest.mark.parametrize("family", ["bert", "roberta", "distilbert", "gpt2"])
def test_all_learned_positions_can_be_used_and_no_more(family, tmp_path):
    model = save(tmp_path, family)
    ids = some_ids(1, CONTEXT)
    torch.testing.assert_close(ours(tmp_path, ids)[0][-1], hidden_states(model, ids)[-1], **EXACT)
    with pytest.raises(ValueError, match=rf"at most {CONTEXT} tokens.*received {CONTEXT + 1} tokens; remedy: truncate"):
        models.load(tmp_path)(some_ids(1, CONTEXT + 1))


@pytest.mark.parametrize("id_", [VOCABULARY, -1])
def test_ids_outside_the_vocabulary_are_refused(id_, tmp_path):
    save(tmp_path, "llama")
    with pytest.raises(ValueError, match=rf"ids: expected from 0 to {VOCABULARY - 1}, the vocabulary, received {id_}"):
        models.load(tmp_path)(torch.tensor([[5, id_]]))


# ----------------------------------------------------------------------------------------------------
# Gradients and dtypes


@pytest.mark.parametrize("family", ["bert", "distilbert", "gpt2", "gpt_neox", "llama", "qwen3"])
def test_the_gradient_of_the_embedding_is_that_of_transformers(family, tmp_path):
    theirs = save(tmp_path, family, **({} if family in ENCODERS else {"tie_word_embeddings": False}))
    mine, ids = models.load(tmp_path), some_ids(2, 13)
    probe = torch.randn(2, 13, VOCABULARY if is_decoder(family) else 33, generator=torch.Generator().manual_seed(3))
    (mine(ids) * probe).mean().backward()
    out = theirs(ids)
    ((out.logits if is_decoder(family) else out.last_hidden_state) * probe).mean().backward()
    embedding = theirs.get_input_embeddings().weight
    assert embedding.grad.abs().max() > 0
    torch.testing.assert_close(mine.embedding.tokens.weight.grad, embedding.grad, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("family", [*ENCODERS, *DECODERS])
def test_every_weight_has_a_gradient(family, tmp_path):
    save(tmp_path, family)
    model = models.load(tmp_path)
    (model(some_ids(1, 7)) ** 3).sum().backward()
    missing = [name for name, p in model.named_parameters() if p.grad is None or not bool(p.grad.any())]
    assert [name for name in missing if "k_proj.bias" not in name] == []  # (that one cancels in the softmax)


@pytest.mark.parametrize("family", ["bert", "gpt2", "gpt_neox", "llama", "qwen3"])
def test_with_a_gradient_and_without_the_numbers_are_the_same(family, tmp_path):
    save(tmp_path, family)
    model, ids = models.load(tmp_path), some_ids()
    with torch.no_grad():
        without = model(ids)
    torch.testing.assert_close(model(ids).detach(), without, **EXACT)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("family", ["bert", "gpt2", "gpt_neox", "llama", "qwen3"])
def test_the_dtype_that_was_asked_for(family, dtype, tmp_path):
    theirs = save(tmp_path, family)
    model, ids = models.load(tmp_path, dtype=dtype), some_ids(2, 13)
    assert {p.dtype for p in model.parameters()} == {dtype}
    with torch.no_grad():
        out = model(ids)
        wanted = theirs(ids)
    assert out.dtype == dtype
    wanted = wanted.logits if is_decoder(family) else wanted.last_hidden_state
    near = {torch.bfloat16: 0.1, torch.float16: 0.01, torch.float64: 1e-5}[dtype]
    torch.testing.assert_close(out.float(), wanted, atol=near, rtol=near)


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_bfloat16_is_as_far_from_the_truth_as_that_of_transformers(family, tmp_path):
    save(tmp_path, family)
    ids = some_ids(2, 13)
    kind = AutoModelForCausalLM if is_decoder(family) else AutoModel
    exact, theirs = (kind.from_pretrained(tmp_path, dtype=dtype) for dtype in (torch.float32, torch.bfloat16))
    with torch.no_grad():
        mine = models.load(tmp_path, dtype=torch.bfloat16)(ids).float()
        a, b = (model(ids)[0].float() for model in (exact, theirs))
    assert (mine - a).abs().mean() <= 1.3 * (b - a).abs().mean()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_by_default_the_dtype_is_the_stored_one(dtype, tmp_path):
    Original("llama").make().to(dtype).save_pretrained(tmp_path)
    assert models.load(tmp_path).dtype == dtype


def test_int32_ids_are_ids(tmp_path):
    save(tmp_path, "gpt2")
    model, ids = models.load(tmp_path), some_ids(2, 7)
    torch.testing.assert_close(model(ids.int()), model(ids))
