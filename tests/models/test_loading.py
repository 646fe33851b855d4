"""Folders as they lie on a disk: whole, cut short, mixed up. There is a model, or an error that says what is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from models.tiny import (
    DECODERS,
    ENCODERS,
    LAYERS,
    VOCABULARY,
    change_settings,
    change_tensors,
    hidden_states,
    save,
    settings,
    some_ids,
    tensors,
)
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing

from regard import models
from regard.models.loading import of_state_dict

EXACT = {"atol": 1e-5, "rtol": 1e-5}


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    save(tmp_path, "llama")
    return tmp_path


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    save(tmp_path, "bert")
    return tmp_path


def give_tokenizer(folder: Path) -> None:
    """Words "w5", "w6", ... with [CLS] and [SEP] around a text."""
    words = {"[UNK]": 0, "[PAD]": 1, "[CLS]": 2, "[SEP]": 3} | {f"w{i}": i for i in range(4, VOCABULARY)}
    made = Tokenizer(WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = Whitespace()
    made.post_processor = TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    made.save(str(folder / "tokenizer.json"))


# ----------------------------------------------------------------------------------------------------
# Which folder, which file


def test_a_path_that_is_not_there(tmp_path):
    with pytest.raises(
        ValueError, match=r"model: expected one of minilm, smollm2, or .*folder.*, received '.*nowhere'"
    ):
        models.load(tmp_path / "nowhere")


@pytest.mark.parametrize("typed, meant", [("minilmm", "minilm"), ("smolm2", "smollm2"), ("minillm", "minilm")])
def test_a_near_miss_is_told(typed, meant):
    with pytest.raises(ValueError, match=rf"received '{typed}'; remedy: did you mean '{meant}'\?"):
        models.load(typed)


@pytest.mark.parametrize("typed, meant", [("MiniLM", "minilm"), ("SmolLM2", "smollm2")])
def test_capitals_are_a_near_miss(typed, meant):
    with pytest.raises(ValueError, match=rf"did you mean '{meant}'\?"):
        models.load(typed)


@pytest.mark.parametrize("name", [None, 7, b"minilm", ["minilm"]])
def test_what_is_no_path_at_all(name):
    with pytest.raises(TypeError, match=r"name: expected a name or a path, received (NoneType|int|bytes|list)"):
        models.load(name)


def test_a_name_too_long_for_a_file_is_not_there():
    with pytest.raises(ValueError, match="model: expected one of minilm"):
        models.load("a" * 4099)


def test_a_path_may_be_a_string_or_begin_at_home(llama, monkeypatch):
    monkeypatch.setenv("HOME", str(llama.parent))
    assert models.load(str(llama)).name == models.load(f"~/{llama.name}").name == llama.name


@pytest.mark.parametrize("file", ["model.safetensors", "config.json"])
def test_a_file_of_the_folder_instead_of_the_folder(file, llama):
    with pytest.raises(ValueError, match=r"expected a folder, or a GGUF file.*remedy: the folder it is in: '"):
        models.load(llama / file)


@pytest.mark.parametrize("dtype", ["float32", torch.int8, torch.complex64, float, 32])
def test_a_dtype_that_is_none_for_weights(dtype, llama):
    with pytest.raises(TypeError, match=r"dtype: expected torch\.float32 or torch\.bfloat16"):
        models.load(llama, dtype=dtype)


# ----------------------------------------------------------------------------------------------------
# config.json


def test_no_config(llama):
    (llama / "config.json").unlink()
    with pytest.raises(ValueError, match=r"expected a folder with config\.json, received none in it"):
        models.load(llama)


def test_an_empty_folder(tmp_path):
    with pytest.raises(ValueError, match=r"expected a folder with config\.json, received none in it"):
        models.load(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "model_type: llama", '{"model_type": "llama",}', "\ufeff{}"])
def test_a_config_that_is_not_json(text, llama):
    (llama / "config.json").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=r"config\.json: expected JSON, received one that is damaged or cut short"):
        models.load(llama)


def test_a_config_that_is_not_text(llama):
    (llama / "config.json").write_bytes(b"\xff\xfe{\x00}\x00")
    with pytest.raises(ValueError, match=r"config\.json: expected JSON, received one that is damaged"):
        models.load(llama)


@pytest.mark.parametrize("text, kind", [("[]", "list"), ("7", "int"), ("null", "NoneType"), ('"llama"', "str")])
def test_a_config_that_is_no_object(text, kind, llama):
    (llama / "config.json").write_text(text)
    with pytest.raises(ValueError, match=rf"config\.json: expected an object, received .*\(a {kind}\)"):
        models.load(llama)


def test_a_config_that_is_a_folder(llama):
    (llama / "config.json").unlink()
    (llama / "config.json").mkdir()
    with pytest.raises(ValueError, match=r"config\.json"):
        models.load(llama)


@pytest.mark.parametrize("name", ["t5", "mamba", "gemma", "Llama", "qwen3_moe"])
def test_a_family_that_is_not_here_names_those_that_are_and_the_way_out(name, llama):
    change_settings(llama, model_type=name)
    families = "bert, roberta, distilbert, gpt2, gpt_neox, llama, mistral, qwen2, qwen3, smollm3"
    with pytest.raises(ValueError, match=rf"families {families}, received model_type '{name}'; remedy: regard\.watch"):
        models.load(llama)


@pytest.mark.parametrize("value", [None, 7, ["llama"], {}])
def test_a_model_type_that_is_no_name(value, llama):
    change_settings(llama, model_type=value)
    with pytest.raises(ValueError, match="expected a model of one of the families"):
        models.load(llama)


@pytest.mark.parametrize(
    "key", ["num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size"]
)
@pytest.mark.parametrize("family", ["bert", "llama", "gpt_neox"])
def test_a_size_that_the_config_does_not_say(family, key, tmp_path):
    save(tmp_path, family)
    change_settings(tmp_path, without=(key,))
    with pytest.raises(ValueError, match=rf"config\.json: expected '{key}', received none"):
        models.load(tmp_path)


@pytest.mark.parametrize("value", ["3", 3.0, [3], True, -3, 0])
@pytest.mark.parametrize(
    "key",
    [
        "num_hidden_layers",
        "hidden_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "intermediate_size",
        "vocab_size",
    ],
)
def test_a_size_that_is_no_positive_integer(key, value, llama):
    change_settings(llama, **{key: value})
    with pytest.raises(
        (TypeError, ValueError), match=r"config\.json: .*expected ((an|a positive) integer|a divisor of)"
    ):
        models.load(llama)


@pytest.mark.parametrize("value", ["43", [43], -1, 2.5])
@pytest.mark.parametrize("family", ["bert", "roberta", "llama"])
def test_a_context_that_is_no_number_of_tokens(family, value, tmp_path):
    save(tmp_path, family)
    change_settings(tmp_path, max_position_embeddings=value)
    with pytest.raises((TypeError, ValueError), match=r"config\.json: .*(max_position_embeddings|context)"):
        models.load(tmp_path)


@pytest.mark.parametrize("value", ["7", 0, -7, 2.5])
def test_a_window_that_is_no_number_of_tokens(value, tmp_path):
    save(tmp_path, "mistral")
    change_settings(tmp_path, sliding_window=value)
    with pytest.raises((TypeError, ValueError), match=r"config\.json: .*window"):
        models.load(tmp_path)


@pytest.mark.parametrize("value", ["linear", ["linear"], 7])
def test_a_rope_scaling_that_is_no_object(value, llama):
    change_settings(llama, without=("rope_parameters",), rope_scaling=value)
    with pytest.raises((TypeError, ValueError), match=r"config\.json: rope"):
        models.load(llama)


def test_a_rope_scaling_that_is_not_known(llama):
    change_settings(llama, rope_parameters={"rope_type": "spiral", "rope_theta": 1e4})
    with pytest.raises(ValueError, match=r"config\.json: rope_type: expected default, linear, .*received 'spiral'"):
        models.load(llama)


def test_a_rope_scaling_without_its_factor(llama):
    change_settings(llama, rope_parameters={"rope_type": "llama3", "factor": 8.0})
    with pytest.raises(ValueError, match=r"config\.json: rope of type 'llama3': expected 'low_freq_factor'"):
        models.load(llama)


def test_heads_that_do_not_divide_the_width(bert):
    change_settings(bert, num_attention_heads=5)
    with pytest.raises(ValueError, match=r"config\.json: num_heads: expected a divisor of the width 33, received 5"):
        models.load(bert)


def test_kv_heads_that_do_not_divide_the_heads(llama):
    change_settings(llama, num_key_value_heads=4)
    with pytest.raises(
        ValueError, match=r"config\.json: num_kv_heads: expected a divisor of num_heads = 6, received 4"
    ):
        models.load(llama)


@pytest.mark.parametrize("value", ["mish", "gelu_10", None, 7, ["gelu"]])
def test_an_activation_that_is_not_known(value, bert):
    if value is None:  # is as if it were not there
        change_settings(bert, hidden_act=None)
        assert models.load(bert).config.activation == "gelu"
        return
    change_settings(bert, hidden_act=value)
    with pytest.raises(ValueError, match=r"config\.json: the activation: expected one of gelu, .*regard\.watch"):
        models.load(bert)


@pytest.mark.parametrize(
    "key, value", [("position_embedding_type", "relative_key"), ("is_decoder", True), ("add_cross_attention", True)]
)
def test_a_bert_of_another_kind_is_refused(key, value, bert):
    change_settings(bert, **{key: value})
    with pytest.raises(
        ValueError, match=rf"config\.json: {key}: expected .*, received {value!r}; remedy: regard\.watch"
    ):
        models.load(bert)


def test_a_layer_type_for_each_layer(tmp_path):
    save(tmp_path, "qwen2", use_sliding_window=True, sliding_window=7, max_window_layers=1)
    change_settings(tmp_path, layer_types=["sliding_attention"])
    with pytest.raises(ValueError, match=rf"config\.json: layer_types: expected one for each of {LAYERS} layers"):
        models.load(tmp_path)


def test_a_layer_type_that_is_not_known_is_refused(tmp_path):
    """Chunked or linear attention is neither full nor sliding."""
    save(tmp_path, "qwen2", use_sliding_window=True, sliding_window=7, max_window_layers=1)
    change_settings(tmp_path, layer_types=["chunked_attention"] * LAYERS)
    with pytest.raises(ValueError, match=r"config\.json: layer_types: .*chunked_attention"):
        models.load(tmp_path)


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes", "fp8"])
def test_quantised_weights_are_refused_by_name(method, llama):
    """Names and shapes may all be right, and the numbers mean something else."""
    change_settings(llama, quantization_config={"quant_method": method, "bits": 8})
    change_tensors(llama, lambda there: {name: (t * 100).to(torch.int8) for name, t in there.items()})
    with pytest.raises(ValueError, match=r"quantiz|quantis|int8"):
        models.load(llama)


def test_integers_where_weights_should_be_are_refused(llama):
    def change(there):
        there["model.layers.1.mlp.up_proj.weight"] = there["model.layers.1.mlp.up_proj.weight"].to(torch.int8)

    change_tensors(llama, change)
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.up_proj\.weight.*int8"):
        models.load(llama)


# ----------------------------------------------------------------------------------------------------
# config.json and the weights tell different stories


def test_more_layers_in_the_config_than_in_the_weights(llama):
    change_settings(llama, num_hidden_layers=LAYERS + 2)
    with pytest.raises(
        ValueError, match=rf"expected the tensor 'model\.layers\.{LAYERS}\.[\w.]+'.*{LAYERS + 2} layers"
    ):
        models.load(llama)


@pytest.mark.parametrize("family", ["bert", "distilbert", "gpt2", "gpt_neox", "llama"])
def test_fewer_layers_in_the_config_than_in_the_weights(family, tmp_path):
    save(tmp_path, family)
    key = next(key for key in ("num_hidden_layers", "n_layers", "n_layer") if key in settings(tmp_path))
    change_settings(tmp_path, **{key: LAYERS - 1})
    with pytest.raises(
        ValueError, match=rf"received \d+ more, such as '[\w.]*\.{LAYERS - 1}\..*belong to different mod"
    ):
        models.load(tmp_path)


CONTEXT = "max_position_embeddings"
WRONG = {
    "width": ("llama", {"hidden_size": 48}, r"embed_tokens\.weight: .*shape \(97, 48\).*received \(97, 42\)"),
    "vocabulary": ("llama", {"vocab_size": 101}, r"embed_tokens\.weight: .*shape \(101, 42\).*received \(97, 42\)"),
    "kv heads": ("llama", {"num_key_value_heads": 2}, r"k_proj\.weight: .*shape \(28, 42\).*received \(42, 42\)"),
    "head width": ("llama", {"head_dim": 10}, r"layers\.0\.self_attn\.q_proj\.weight: .*received"),
    "inner width": ("llama", {"intermediate_size": 73}, r"gate_proj\.weight: .*shape \(73, 42\).*received \(71, 42\)"),
    "gpt2 inner": ("gpt2", {"n_inner": 73}, r"h\.0\.mlp\.c_fc\.weight: .*shape \(33, 73\).*received \(33, 71\)"),
    "gpt2 width": ("gpt2", {"n_embd": 36}, r"wte\.weight: .*shape \(97, 36\).*received \(97, 33\)"),
    "gpt2 context": ("gpt2", {"n_positions": 47}, r"wpe\.weight: .*shape \(47, 33\).*received \(43, 33\)"),
    "bert context": ("bert", {CONTEXT: 47}, r"position_embeddings\.weight: .*shape \(47, 33\)"),
    "bert types": ("bert", {"type_vocab_size": 3}, r"token_type_embeddings\.weight: .*shape \(3, 33\)"),
    "roberta context": ("roberta", {CONTEXT: 47}, r"position_embeddings\.weight: .*shape \(47, 33\)"),
    "neox inner width": ("gpt_neox", {"intermediate_size": 73}, r"dense_h_to_4h\.weight: .*shape \(73, 72\)"),
}


def test_a_head_width_that_the_config_does_not_say_and_cannot_be_halved(llama):
    """7 = 42 / 6 is what the config says without it."""
    change_settings(llama, head_dim=None)
    with pytest.raises(ValueError, match=r"expected an even number of rotated widths"):
        models.load(llama)


@pytest.mark.parametrize("name", WRONG)
def test_a_size_in_the_config_that_is_not_the_weights(name, tmp_path):
    family, change, words = WRONG[name]
    save(tmp_path, family)
    change_settings(tmp_path, **change)
    with pytest.raises(ValueError, match=words):
        models.load(tmp_path)


def test_a_bias_that_the_config_promises_and_the_weights_lack(llama):
    change_settings(llama, attention_bias=True)
    with pytest.raises(ValueError, match=r"expected the tensor 'model\.layers\.0\.self_attn\.q_proj\.bias'"):
        models.load(llama)


def test_a_bias_that_the_config_does_not_tell_of(tmp_path):
    save(tmp_path, "llama", mlp_bias=True)
    change_settings(tmp_path, mlp_bias=False)
    with pytest.raises(ValueError, match=r"received 9 more, such as 'model\.layers\.0\.mlp\.down_proj\.bias'"):
        models.load(tmp_path)


def test_weights_of_another_family(bert):
    other = settings(bert)
    save(bert, "llama")
    (bert / "config.json").write_text(json.dumps(other))
    with pytest.raises(ValueError, match=r"expected the tensor 'bert\.embeddings\.word_embeddings\.weight'"):
        models.load(bert)


# ----------------------------------------------------------------------------------------------------
# Tensors


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "model.norm.weight",
        "lm_head.weight",
        "model.layers.1.self_attn.k_proj.weight",
        "model.layers.2.self_attn.o_proj.weight",
        "model.layers.1.post_attention_layernorm.weight",
    ],
)
def test_a_missing_tensor_is_named(name, llama):
    change_tensors(llama, lambda there: {key: t for key, t in there.items() if key != name})
    with pytest.raises(ValueError, match=rf"expected the tensor '[\w.]*{name}'.*received none of that name"):
        models.load(llama)


def test_a_misspelt_tensor_is_missing_and_the_nearest_is_named(llama):
    def change(there):
        there["model.layers.1.mlp.upproj.weight"] = there.pop("model.layers.1.mlp.up_proj.weight")

    change_tensors(llama, change)
    with pytest.raises(
        ValueError, match=r"up_proj\.weight'.*remedy: the nearest is 'model\.layers\.1\.mlp\.upproj\.weig"
    ):
        models.load(llama)


@pytest.mark.parametrize("family", [*ENCODERS, *DECODERS])
def test_a_tensor_that_is_not_known_is_named(family, tmp_path):
    save(tmp_path, family)
    change_tensors(tmp_path, lambda there: there | {"extra.adapter.weight": torch.ones(3, 5)})
    with pytest.raises(ValueError, match=r"received 1 more, such as 'extra\.adapter\.weight'"):
        models.load(tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "model.layers.1.self_attn.k_proj.weight",
        "model.layers.1.self_attn.o_proj.weight",
        "model.layers.2.mlp.down_proj.weight",
        "model.norm.weight",
    ],
)
def test_a_tensor_of_another_shape_is_named(name, llama):
    change_tensors(llama, lambda there: there | {name: there[name][:-1]})
    with pytest.raises(ValueError, match=name.replace(".", r"\.")):
        models.load(llama)


@pytest.mark.parametrize(
    "name",
    [
        "transformer.h.1.attn.c_attn.weight",
        "transformer.h.1.attn.c_attn.bias",
        "transformer.h.1.attn.c_proj.weight",
        "transformer.h.1.mlp.c_fc.weight",
    ],
)
def test_a_packed_or_transposed_tensor_of_another_shape_is_named(name, tmp_path):
    save(tmp_path, "gpt2")
    change_tensors(tmp_path, lambda there: there | {name: there[name][..., :-1]})
    with pytest.raises(ValueError, match=name.replace(".", r"\.")):
        models.load(tmp_path)


@pytest.mark.parametrize("shape", [(), (0,), (97 * 42,), (1, 97, 42)])
def test_a_tensor_of_another_number_of_axes(shape, llama):
    change_tensors(llama, lambda there: there | {"model.embed_tokens.weight": torch.zeros(shape)})
    with pytest.raises(ValueError, match=r"embed_tokens\.weight: expected shape \(97, 42\)"):
        models.load(llama)


@pytest.mark.parametrize("name", ["self_attn.q_proj.weight", "self_attn.o_proj.weight"])
@pytest.mark.parametrize("shape", [(), (7,), (2, 3, 5)])
def test_an_attention_tensor_of_another_number_of_axes(name, shape, llama):
    change_tensors(llama, lambda there: there | {f"model.layers.0.{name}": torch.zeros(shape)})
    with pytest.raises(ValueError, match=r"model\.layers\.0\.self_attn\.\w+\.weight"):
        models.load(llama)


def test_one_tensor_under_two_names_is_refused(bert):
    """With the prefix and without it, and not the same: no telling which is meant."""
    change_tensors(bert, lambda there: there | {f"bert.{name}": t + 1 for name, t in there.items()})
    with pytest.raises(ValueError, match=r"bert\.embeddings\.LayerNorm\.\w+"):
        models.load(bert)


@pytest.mark.parametrize("prefix", ["", "bert."])
def test_norms_with_the_names_they_had_in_tensorflow(prefix, bert):
    model, ids = save(bert, "bert"), some_ids()

    def older(there):
        old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
        for name in list(there):
            stem = ".".join(name.split(".")[-2:])
            there[prefix + name.replace(stem, old.get(stem, stem))] = there.pop(name)
        there["cls.predictions.transform.LayerNorm.gamma"] = torch.ones(33)

    change_tensors(bert, older)
    assert any("gamma" in name for name in tensors(bert))
    with torch.no_grad():
        torch.testing.assert_close(models.load(bert)(ids), hidden_states(model, ids)[-1], **EXACT)


@pytest.mark.parametrize("prefix", ["module.", "model.model.", "_orig_mod."])
def test_a_prefix_that_a_wrapper_left_is_not_guessed_but_named(prefix, llama):
    change_tensors(llama, lambda there: {prefix + name: t for name, t in there.items()})
    with pytest.raises(ValueError, match=rf"expected the tensor 'model\.embed_tokens\.weight'.*{prefix[:-1]}"):
        models.load(llama)


# ----------------------------------------------------------------------------------------------------
# Tokenizers


def test_without_a_tokenizer_ids_still_work_and_text_says_what_is_missing(llama):
    model = models.load(llama)
    assert model.tokenizer is None
    assert model(some_ids(1, 3)).shape == (1, 3, VOCABULARY)
    for use in (model.encode, model.tokenize, model.generate, lambda text: model.encode_batch([text])):
        with pytest.raises(ValueError, match=r"tokenizer: expected one beside the weights.*remedy: pass token ids"):
            use("some text")


@pytest.mark.parametrize("text", ["", "{}", "[]", "not json", '{"model": {"type": "Spell"}}'])
def test_a_broken_tokenizer(text, llama):
    (llama / "tokenizer.json").write_text(text)
    with pytest.raises(ValueError, match=r"tokenizer\.json: expected a tokenizer\.json, received one that is damaged"):
        models.load(llama)


def test_a_tokenizer_is_used_as_it_is(bert):
    give_tokenizer(bert)
    assert models.load(bert).encode("w5 w7 w11").tolist() == [[2, 5, 7, 11, 3]]


def test_padding_and_truncation_that_a_tokenizer_came_with_are_off(bert):
    give_tokenizer(bert)
    made = Tokenizer.from_file(str(bert / "tokenizer.json"))
    made.enable_truncation(4)
    made.enable_padding(length=13)
    made.save(str(bert / "tokenizer.json"))
    assert models.load(bert).encode("w5 w7 w11").tolist() == [[2, 5, 7, 11, 3]]


@pytest.mark.parametrize("side", ["right", "left"])
def test_a_batch_of_texts_is_padded_with_the_config_s_token(side, bert):
    give_tokenizer(bert)
    batch = models.load(bert).encode_batch(["w5", "w7 w11"], pad=side)
    assert batch.ids.tolist() == [[2, 5, 3, 1] if side == "right" else [1, 2, 5, 3], [2, 7, 11, 3]]
    assert batch.lengths.tolist() == [3, 4]


@pytest.mark.parametrize("pad", [-1, VOCABULARY, None])
def test_a_padding_token_that_is_not_in_the_vocabulary(pad, llama):
    """The first Llamas had -1; a fine-tune may have one that it never added a row for."""
    give_tokenizer(llama)
    change_settings(llama, pad_token_id=pad)
    model = models.load(llama)
    batch = model.encode_batch(["w5", "w7 w11 w13"])
    assert model(batch.ids, keep=batch.keep).shape == (2, 5, VOCABULARY)


# ----------------------------------------------------------------------------------------------------
# Sentence embeddings, as the files beside the weights tell


def _recipe(folder: Path, pooling: dict | None = None, modules: list[str] | None = None, length: int | None = None):
    give_tokenizer(folder)
    if pooling is not None:
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 33, **pooling}))
    if modules is not None:
        kinds = [{"idx": i, "type": f"sentence_transformers.models.{kind}"} for i, kind in enumerate(modules)]
        (folder / "modules.json").write_text(json.dumps(kinds))
    if length is not None:
        (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": length}))


MEAN = {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": False}
CLS = {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}


def test_the_mean_without_normalising(bert):
    _recipe(bert, MEAN, ["Transformer", "Pooling"])
    model = models.load(bert)
    with torch.no_grad():
        wanted = model(model.encode("w5 w7 w11"))[0].mean(0)
    torch.testing.assert_close(model.embed("w5 w7 w11").clone(), wanted)


def test_the_first_token_normalised(bert):
    _recipe(bert, CLS, ["Transformer", "Pooling", "Normalize"])
    model = models.load(bert)
    with torch.no_grad():
        wanted = model(model.encode("w5 w7 w11"))[0, 0]
    torch.testing.assert_close(model.embed(["w5 w7 w11", "w5"])[0].clone(), wanted / wanted.norm())


@pytest.mark.parametrize("mode", ["max_tokens", "mean_sqrt_len_tokens", "lasttoken", "weightedmean_tokens"])
def test_a_pooling_that_is_neither_is_not_taken_for_the_mean(mode, bert):
    _recipe(bert, {"pooling_mode_mean_tokens": False, f"pooling_mode_{mode}": True}, ["Transformer", "Pooling"])
    with pytest.raises(ValueError, match=rf"pooling.*{mode}"):
        models.load(bert).embed("w5 w7")


def test_two_poolings_side_by_side_are_not_taken_for_one(bert):
    _recipe(bert, {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}, ["Transformer", "Pooling"])
    with pytest.raises(ValueError, match="pooling"):
        models.load(bert).embed("w5 w7")


def test_a_layer_after_the_pooling_is_not_left_out_unsaid(bert):
    """LaBSE and distiluse have one."""
    _recipe(bert, CLS, ["Transformer", "Pooling", "Dense", "Normalize"])
    with pytest.raises(ValueError, match="Dense"):
        models.load(bert).embed("w5 w7")


def test_what_is_longer_than_the_recipe_reads_is_cut_before_the_last_special_token(bert):
    _recipe(bert, MEAN, ["Transformer", "Pooling"], length=5)
    model = models.load(bert)
    torch.testing.assert_close(model.embed("w5 w7 w11 w13 w17 w19"), model.embed("w5 w7 w11"))


@pytest.mark.parametrize("length", [53, None])
def test_a_recipe_longer_than_the_positions_that_were_learned(length, bert):
    _recipe(bert, MEAN, ["Transformer", "Pooling"], length)
    model = models.load(bert)
    torch.testing.assert_close(model.embed("w5 " * 97), model.embed("w5 " * 41))


@pytest.mark.parametrize("file", ["sentence_bert_config.json", "modules.json", "1_Pooling/config.json"])
@pytest.mark.parametrize("text", ["7", "[7]", "null", "{"])
def test_a_recipe_that_is_none(file, text, bert):
    _recipe(bert, MEAN, ["Transformer", "Pooling"], 5)
    (bert / file).write_text(text)
    with pytest.raises(ValueError, match=file.replace(".", r"\.")):
        models.load(bert)


# ----------------------------------------------------------------------------------------------------
# Memory


def test_loading_maps_the_file_instead_of_reading_it(tmp_path):
    """200 MB of weights, and the process has little more of its own."""
    if not Path("/proc/self/status").exists():
        pytest.skip("this system does not tell how much memory is a process's own")
    save(tmp_path, "llama", tie_word_embeddings=True)
    change_settings(tmp_path, vocab_size=1_200_007)
    there = tensors(tmp_path)
    there["model.embed_tokens.weight"] = torch.zeros(1_200_007, 42)
    save_file(there, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert (tmp_path / "model.safetensors").stat().st_size > 200e6
    script = """
        import sys
        from regard import models

        def own():
            lines = open("/proc/self/status").read().splitlines()
            return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1024

        models.load(sys.argv[1])  # what is imported on the way
        before = own()
        model = models.load(sys.argv[2])
        print(own() - before, model.embedding.tokens.weight.shape[0])
    """
    small = tmp_path / "small"
    save(small, "llama")
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(small), str(tmp_path)],
        text=True,
        capture_output=True,
        check=True,
        env={**os.environ, "PYTHONPATH": "src"},
    )
    grown, rows = done.stdout.split()
    assert int(rows) == 1_200_007
    assert float(grown) < 20


def test_writing_to_a_loaded_weight_does_not_write_to_the_file(llama):
    before = (llama / "model.safetensors").read_bytes()
    model = models.load(llama)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    assert (llama / "model.safetensors").read_bytes() == before
    assert not torch.equal(models.load(llama).norm.weight, model.norm.weight)


def test_two_models_of_one_file_do_not_share_what_is_written(llama):
    first, second = models.load(llama), models.load(llama)
    was = second.norm.weight.detach().clone()
    with torch.no_grad():
        first.norm.weight.add_(1)
    torch.testing.assert_close(second.norm.weight.detach(), was)


def test_a_model_can_be_trained_right_after_loading(bert):
    model, ids = models.load(bert), some_ids(2, 7)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.01)
    before = model(ids).square().sum()
    before.backward()
    optimiser.step()
    assert not torch.equal(model(ids).square().sum(), before)


def test_a_blank_model_has_shapes_and_no_numbers(llama):
    model = models.blank(llama)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert {name: p.shape for name, p in model.state_dict().items()} == {
        name: p.shape for name, p in models.load(llama).state_dict().items()
    }


def test_a_copy_of_the_weights_does_not_change_with_the_file(llama):
    """The file is overwritten in place, after two models were loaded of it: only the one that maps it may notice."""
    copied, mapped = models.load(llama, mmap=False), models.load(llama)
    before = {name: parameter.clone() for name, parameter in copied.named_parameters()}
    assert mapped.blocks[0].attention.q_proj.weight.sum() == before["blocks.0.attention.q_proj.weight"].sum()
    path = llama / "model.safetensors"
    size = path.stat().st_size
    start = 8 + int.from_bytes(path.read_bytes()[:8], "little")  # the numbers begin after the header
    with path.open("r+b") as file:
        file.seek(start)
        file.write(b"\x01" * (size - start))
    for name, parameter in copied.named_parameters():
        assert torch.equal(parameter, before[name]), name


# ----------------------------------------------------------------------------------------------------
# A model that is in memory


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_state_dict_is_a_model(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same numbers, on the same memory where tensors lie as ours do; no file of the same name is looked at."""
    theirs = save(tmp_path / "Theirs", family)
    give_tokenizer(tmp_path / "Theirs")
    monkeypatch.chdir(tmp_path)
    ours = of_state_dict(settings(tmp_path / "Theirs"), theirs.state_dict(), "Theirs")
    assert ours.tokenizer is None
    assert not ours.training
    ids = some_ids(2, 7)
    torch.testing.assert_close(ours.hidden(ids), hidden_states(theirs, ids)[-1], **EXACT)  # type: ignore[operator]
    state = {tensor.data_ptr() for tensor in theirs.state_dict().values()}
    assert ours.embedding.tokens.weight.data_ptr() in state
    assert (ours.blocks[0].attention.q_proj.weight.data_ptr() in state) == (family == "llama")  # type: ignore[union-attr]


def test_a_state_dict_of_something_else(llama: Path) -> None:
    named = tensors(llama)
    with pytest.raises(
        ValueError, match=r"Mine: expected only tensors of a llama model.*received 1 more, such as 'lora'"
    ):
        of_state_dict(settings(llama), named | {"lora": torch.zeros(3)}, "Mine")
    del named["model.norm.weight"]
    with pytest.raises(
        ValueError, match=r"Mine: expected the tensor 'model\.norm\.weight'.*received none of that name"
    ):
        of_state_dict(settings(llama), named, "Mine")
