"""Look: any model and tokenizer, one call."""

from __future__ import annotations

import builtins
import sys
import types

import pytest
import torch
from draw.tiny_models import bart, gpt2, t5
from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration, ViTConfig, ViTModel

import regard


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
        model.generate(
            **tokenizer("the cat", return_tensors="pt", return_token_type_ids=False),
            max_new_tokens=6,
            do_sample=False,
            pad_token_id=0,
        )
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
    assert heard == sorted(set(heard))
    assert heard[0] > 0
    assert heard[-1] == 1.0


class Twice(torch.nn.Module):
    """Every block runs several times, as in ALBERT; one module never runs."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.block = torch.nn.Embedding(11, 6), regard.MultiHeadAttention(6, num_heads=2)
        self.unused = torch.nn.Sequential(torch.nn.Linear(6, 6))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(input_ids)
        for _ in range(7):
            x = self.block(x)
        return x


@pytest.mark.parametrize("make, options", [(gpt2, {"generate": 5}), (t5, {}), (gpt2, {}), (Twice, {})])
def test_progress_says_1_at_the_end_alone(tokenizer, make, options) -> None:
    """Not half way: a model of transformers that translates writes before it is read; some modules run often."""
    model, events = make(), []
    handle = model.register_forward_hook(lambda *_: events.append("forward"))
    regard.draw.read(model, tokenizer, "the cat saw that", progress=events.append, **options)
    handle.remove()
    assert events[-1] == 1.0
    last = max(i for i, event in enumerate(events) if event == "forward")
    shares = [event for event in events if event != "forward"]
    assert shares == sorted(set(shares))
    assert all(event == "forward" or event < 1 for event in events[:last])
    if make is t5 or options:  # writing is half of the way
        first = [event for event in events[: events.index("forward")] if event != "forward"]
        assert max(first, default=0) < 0.5


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
        ({"text": torch.zeros(1, 3), "generate": 2}, TypeError, "text: expected a text, to generate or to have a"),
        (
            {"text": torch.zeros(1, 3).long(), "generate": 2, "tokenizer": None},
            TypeError,
            r"tokenizer: expected the model's tokenizer, to generate a text, received None; remedy: look\(model, token",
        ),
        ({"text": []}, ValueError, "text: expected at least one, received an empty list"),
        ({"text": ["the cat", " "]}, ValueError, "text: expected at least one word, received ' '"),
        (
            {"text": torch.zeros(0).long()},
            ValueError,
            r"text: expected at least one token, received ids of shape \(1, 0",
        ),
        ({"text": [[2, 3], []]}, ValueError, "text: expected at least one token in each, received lengths"),
        (
            {"text": {"input_ids": "the cat"}},
            TypeError,
            r"input_ids: expected token ids: integers \(N,\) or \(B, N\), received 'the cat'",
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
