"""Look: any model and tokenizer, one call."""

from __future__ import annotations

import builtins
import sys
import types

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTModel,
)

import regard

WORDS = ["[PAD]", "[EOS]", "the", "cat", "that", "i", "saw", "ran", "away", ",", "dog"]


@pytest.fixture(scope="module")
def plain() -> Tokenizer:
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[PAD]"))
    tokenizer.pre_tokenizer = Whitespace()
    return tokenizer


@pytest.fixture(scope="module")
def tokenizer(plain: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="[PAD]", eos_token="[EOS]")


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=11, n_embd=12, n_layer=2, n_head=3, n_positions=17, eos_token_id=None))


def bart() -> BartForConditionalGeneration:
    torch.manual_seed(0)
    sizes = {
        f"{part}_{what}": n
        for part in ("encoder", "decoder")
        for what, n in (("layers", 1), ("attention_heads", 2), ("ffn_dim", 7))
    }
    return BartForConditionalGeneration(
        BartConfig(vocab_size=11, d_model=8, max_position_embeddings=19, pad_token_id=0, bos_token_id=1, eos_token_id=1,
                   decoder_start_token_id=1, forced_eos_token_id=None, **sizes)
    )  # fmt: skip


def test_a_decoder_is_looked_at_as_one_text(tokenizer) -> None:
    model = gpt2()
    seen = regard.look(model, tokenizer, "the cat saw", generate=5, show=False)
    ids = tokenizer("the cat saw", return_tensors="pt")["input_ids"]
    whole = model.eval().generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0)
    assert seen.tokens == tokenizer.convert_ids_to_tokens(whole[0, :-1].tolist())
    assert seen.generated == tokenizer.decode(whole[0, 3:], skip_special_tokens=True)
    with torch.no_grad():
        model.set_attn_implementation("eager")
        maps = model(whole[:, :-1], output_attentions=True).attentions
    for layer, expected in zip(seen, maps, strict=True):
        torch.testing.assert_close(layer.weights(), expected, atol=1e-5, rtol=1e-4)


def test_reading_what_was_written_gives_the_weights_of_generating(tokenizer) -> None:
    torch.manual_seed(1)
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 13,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    model = LlamaForCausalLM(LlamaConfig(vocab_size=11, eos_token_id=None, bos_token_id=None, **sizes)).eval()
    seen = regard.look(model, tokenizer, "the cat", generate=6, show=False)
    with regard.watch(model, keep="qk") as stepwise, torch.no_grad():
        model.generate(**tokenizer("the cat", return_tensors="pt", return_token_type_ids=False), max_new_tokens=6,
                       do_sample=False, pad_token_id=0)  # fmt: skip
    for ours, theirs in zip(seen, stepwise, strict=True):
        torch.testing.assert_close(ours.weights(), theirs.weights(), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("target", [None, "the dog ran"])
def test_an_encoder_and_decoder(tokenizer, target) -> None:
    seen = regard.look(bart(), tokenizer, "the cat saw that", target=target, generate=0 if target else 4, show=False)
    source, written = seen.tokens
    assert source == ["the", "cat", "saw", "that"]
    assert written[0] == "[EOS]"
    assert (seen.generated is None) == (target is not None)
    if target:
        assert written == ["[EOS]", "the", "dog", "ran"]
    scene = regard.draw.scene.Scene(seen)
    assert [(panel.layer.kind, panel.shape) for panel in scene] == [
        ("self", (4, 4)),
        ("self", (len(written), len(written))),
        ("cross", (len(written), 4)),
    ]


def test_t5_shows_what_each_head_adds(tokenizer) -> None:
    model = T5ForConditionalGeneration(
        T5Config(vocab_size=11, d_model=12, d_kv=5, num_heads=3, num_layers=1, d_ff=7, decoder_start_token_id=0)
    )
    seen = regard.look(model, tokenizer, "the cat", target="a dog", show=False)
    for layer in seen:
        assert layer.projected().shape[1:] == (3, layer.text.queries, 12)


def test_what_each_head_adds_sums_to_the_layers_output() -> None:
    layer = regard.MultiHeadAttention(10, num_heads=5, num_kv_heads=5)
    x = torch.randn(1, 7, 10)
    with regard.watch(layer, keep="qkv") as seen, torch.no_grad():
        out = layer(x)
    _, bias = seen[0].projection
    torch.testing.assert_close(seen[0].projected().sum(1) + bias, out)
    torch.testing.assert_close(seen[0].projected(slice(2, 5)), seen[0].projected()[:, :, 2:5])
    torch.testing.assert_close(seen[0].input, x)
    torch.testing.assert_close(seen[0].weights() @ seen[0].v, seen[0].output)
    for name in ("q", "k", "v", "output", "input"):
        with regard.watch(layer) as bare, torch.no_grad():
            layer(x)
        with pytest.raises(ValueError, match=f"{name}: expected a watch with keep="):
            getattr(bare[0], name)


def test_more_can_be_measured_later() -> None:
    layer = regard.MultiHeadAttention(6, num_heads=2)
    with regard.watch(layer, keep="qk", measures=["peak"]) as seen, torch.no_grad():
        layer(torch.randn(1, 5, 6))
    found = seen[0].measure(["entropy", regard.measures.Links(2)])
    torch.testing.assert_close(found["entropy"], -torch.special.xlogy(seen[0].weights(), seen[0].weights()).sum(-1))
    assert found["links"].keys[..., 0].equal(seen[0].weights().argmax(-1))
    with pytest.raises(ValueError, match="measures: expected those that need weights alone, received Induction"):
        seen[0].measure("induction")


def test_a_tokenizer_of_tokenizers_and_a_model_of_ones_own(plain) -> None:
    class Mine(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.attention = torch.nn.Embedding(11, 6), regard.MultiHeadAttention(6, num_heads=2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.attention(self.embedding(x))

    seen = regard.look(Mine(), plain, "the dog ran away", show=False)
    assert seen.tokens == ["the", "dog", "ran", "away"]
    assert seen.layers == ["attention"]


def test_what_has_no_tokens(tmp_path) -> None:
    sizes = {"hidden_size": 6, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 7}
    model = ViTModel(ViTConfig(image_size=12, patch_size=4, **sizes))
    seen = regard.look(model, text={"pixel_values": torch.randn(1, 3, 12, 12)}, show=False, html=tmp_path / "a.html")
    assert seen.tokens is None
    assert seen[0].weights().shape == (1, 2, 10, 10)
    assert "1 layers, 10 tokens" in (tmp_path / "a.html").read_text(encoding="utf-8")


def test_files_and_the_terminal(tokenizer, tmp_path, capsys) -> None:
    pytest.importorskip("matplotlib", reason="a figure needs matplotlib")
    regard.look(gpt2(), tokenizer, "the cat saw", generate=2, html=tmp_path / "p.html", figure=tmp_path / "f.png")
    said = capsys.readouterr().out
    assert "2 layers x 3 heads" in said
    assert "generated:" in said
    assert (tmp_path / "p.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    assert (tmp_path / "f.png").read_bytes().startswith(b"\x89PNG")


def test_training_mode_and_progress(tokenizer) -> None:
    model = gpt2().train()
    heard: list[float] = []
    regard.draw.read(model, tokenizer, "the cat", generate=2, progress=heard.append)
    assert model.training
    assert heard == sorted(heard)
    assert 0 < heard[0] < heard[-1] <= 1


def test_progress_can_stop_it(tokenizer) -> None:
    class Stop(Exception):
        pass

    def stop(share: float) -> None:
        raise Stop

    model = gpt2()
    with pytest.raises(Stop):
        regard.draw.read(model, tokenizer, "the cat", progress=stop)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert regard.draw.read(model, tokenizer, "the cat").tokens == ["the", "cat"]


@pytest.mark.parametrize(
    "given, error, words",
    [
        ({"text": None}, TypeError, "text: expected a text, or what the model is called on, received None"),
        (
            {"text": torch.zeros(1, 3).long(), "generate": 2},
            TypeError,
            "text: expected a text, to generate or to have a",
        ),
        ({"text": " "}, ValueError, "text: expected at least one word, received ' '"),
        ({"text": "the cat", "tokenizer": None}, TypeError, "tokenizer: expected the model's tokenizer"),
        (
            {"text": "the cat", "tokenizer": 3},
            TypeError,
            "tokenizer: expected one of transformers or of tokenizers, received int",
        ),
        (
            {"text": "the " * 18},
            ValueError,
            "text: expected at most 17 tokens, what is generated included, received 18",
        ),
        ({"text": "the cat", "generate": -1}, ValueError, "generate: expected a number of tokens from 0, received -1"),
        (
            {"text": "the cat", "target": "a"},
            ValueError,
            "target: expected an encoder and decoder, received GPT2LMHeadModel",
        ),
    ],
)
def test_what_the_caller_got_wrong(tokenizer, given, error, words) -> None:
    with pytest.raises(error, match=words):
        regard.look(gpt2(), **({"tokenizer": tokenizer, "show": False} | given))


def test_a_model_that_cannot_generate(tokenizer) -> None:
    with pytest.raises(ValueError, match="generate: expected a model that can generate, received GPT2Model"):
        regard.look(gpt2().transformer, tokenizer, "the cat", generate=2, show=False)


def test_in_a_notebook_the_record_shows_itself(tokenizer, monkeypatch, capsys) -> None:
    shell = types.SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
    seen = regard.look(gpt2(), tokenizer, "the cat saw")
    assert capsys.readouterr().out == ""
    shown = seen._repr_html_()
    assert shown is not None
    assert shown.startswith("<iframe srcdoc=")
    assert "require" not in shown.split("srcdoc")[0]
    assert not hasattr(builtins, "regard")


def test_an_empty_record_shows_nothing() -> None:
    assert regard.heads.Record()._repr_html_() is None


def test_tokens_are_saved_with_a_record(tokenizer, tmp_path) -> None:
    seen = regard.look(bart(), tokenizer, "the cat saw that", target="the dog", show=False)
    seen.save(tmp_path / "seen.safetensors")
    again = regard.heads.Record.load(tmp_path / "seen.safetensors")
    assert again.tokens == seen.tokens
    assert isinstance(again.tokens, tuple)


def test_only_learned_positions_end(tokenizer) -> None:
    sizes = {"hidden_size": 8, "intermediate_size": 7, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=11, max_position_embeddings=5, **sizes))
    assert len(regard.look(model, tokenizer, "the cat saw the dog that ran", show=False).tokens) == 7
