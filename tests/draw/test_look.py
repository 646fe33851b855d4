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
    BertConfig,
    BertModel,
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
from regard.models import Batch, Decoder, Encoder, ModelConfig

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
        BartConfig(
            vocab_size=11,
            d_model=8,
            max_position_embeddings=19,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=1,
            decoder_start_token_id=1,
            forced_eos_token_id=None,
            **sizes,
        )
    )


def bert() -> BertModel:
    torch.manual_seed(0)
    sizes = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 7}
    return BertModel(BertConfig(vocab_size=11, max_position_embeddings=17, **sizes)).eval()


def t5() -> T5ForConditionalGeneration:
    torch.manual_seed(0)
    sizes = {"d_model": 12, "d_kv": 5, "num_heads": 3, "num_layers": 1, "d_ff": 7}
    return T5ForConditionalGeneration(T5Config(vocab_size=11, decoder_start_token_id=0, **sizes)).eval()


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


# What can be given as a text. Words of different numbers, and tokens that are not their own neighbours.
ONE, TWO = "the cat saw", "i saw that dog , the dog ran away"
WORDS_ONE, WORDS_TWO = ONE.split(), TWO.split()


def as_given(kind: str, tokenizer: PreTrainedTokenizerFast, text: str) -> object:
    """One text in each form that it may be given in."""
    ids = tokenizer(text)["input_ids"]
    return {
        "text": text,
        "tensor (N,)": torch.tensor(ids),
        "tensor (1, N)": torch.tensor([ids]),
        "list": ids,
        "list of lists": [ids],
        "encoding": tokenizer(text, return_tensors="pt"),
        "encoding of lists": tokenizer(text),
        "encoding of numpy": tokenizer(text, return_tensors="np"),
        "dict": {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids))},
        "padded encoding": tokenizer(text, return_tensors="pt", padding="max_length", max_length=11),
    }[kind]


KINDS = [
    "text",
    "tensor (N,)",
    "tensor (1, N)",
    "list",
    "list of lists",
    "encoding",
    "encoding of lists",
    "encoding of numpy",
    "dict",
    "padded encoding",
]


def maps(seen: regard.heads.Record, item: int = 0) -> list[tuple[list[str], list[str], torch.Tensor]]:
    """Of each layer: the labels of queries and keys, and the maps (H, N, M) as they are drawn."""
    return [
        (panel.queries.text, panel.keys.text, torch.stack([panel.weights(head) for head in range(panel.heads)]))
        for panel in regard.draw.scene.Scene(seen, item=item)
    ]


def same_maps(ours: list, theirs: list) -> None:
    assert len(ours) == len(theirs) > 0
    for (queries, keys, weights), (queries2, keys2, weights2) in zip(ours, theirs, strict=True):
        assert (queries, keys) == (queries2, keys2)
        torch.testing.assert_close(weights, weights2, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("make", [bert, gpt2, t5])
@pytest.mark.parametrize("kind", KINDS)
def test_one_text_in_every_form(tokenizer, make, kind) -> None:
    model = make()
    target = {"target": "a dog"} if make is t5 else {}
    wanted = regard.look(model, tokenizer, ONE, show=False, **target)
    seen = regard.look(model, tokenizer, as_given(kind, tokenizer, ONE), show=False, **target)
    same_maps(maps(seen), maps(wanted))
    assert maps(seen)[0][0] == WORDS_ONE
    written = seen.tokens[0] if make is t5 else seen.tokens
    assert written == WORDS_ONE + [""] * (8 if kind == "padded encoding" else 0)


@pytest.mark.parametrize("make", [bert, gpt2, t5])
@pytest.mark.parametrize(
    "kind", ["texts", "tuple of texts", "lists", "encoding", "encoding of lists", "padded on the left"]
)
def test_several_texts_in_every_form(tokenizer, make, kind) -> None:
    """Each is drawn as if it had been given alone, its padding is not drawn at all."""
    model, both = make(), [ONE, TWO, "ran"]
    given = {
        "texts": both,
        "tuple of texts": tuple(both),
        "lists": tokenizer(both)["input_ids"],
        "encoding": tokenizer(both, padding=True, return_tensors="pt"),
        "encoding of lists": tokenizer(both),
        "padded on the left": tokenizer(both, padding=True, padding_side="left", return_tensors="pt"),
    }[kind]
    targets = ["a dog", "that cat ran", "a"]
    several = {"target": targets} if make is t5 else {}
    seen = regard.look(model, tokenizer, given, show=False, **several)
    for item, text in enumerate(both):
        alone = {"target": targets[item]} if make is t5 else {}
        wanted = regard.look(model, tokenizer, text, show=False, **alone)
        found = maps(seen, item)
        assert found[0][:2] == (text.split(), text.split())
        if kind == "padded on the left" and make is not t5:  # absolute positions, which a mask does not move
            assert [(one[:2], one[2].shape) for one in found] == [(one[:2], one[2].shape) for one in maps(wanted)]
        else:
            same_maps(found, maps(wanted))


def test_padding_is_drawn_nowhere(tokenizer, tmp_path) -> None:
    pytest.importorskip("matplotlib", reason="a figure needs matplotlib")
    seen = regard.look(gpt2(), tokenizer, [TWO, ONE], item=1, html=tmp_path / "a.html", show=False)
    alone = regard.look(gpt2(), tokenizer, ONE, show=False)
    drawn = regard.draw.terminal_text(seen, item=1, layer=0, head=1)
    assert "Text 1 of 2 in the batch." in drawn
    for text in (drawn, (tmp_path / "a.html").read_text(encoding="utf-8")):
        assert "[PAD]" not in text
    assert '"tokens":["the","cat","saw"]' in (tmp_path / "a.html").read_text(encoding="utf-8")
    figure = regard.draw.figure(seen, layer=0, head=1, item=1)
    assert [label.get_text() for label in figure.axes[1].get_xticklabels()] == WORDS_ONE
    panel, single = (regard.draw.scene.Scene(one, item=item)[0] for one, item in ((seen, 1), (alone, 0)))
    torch.testing.assert_close(panel.pooled(2, 2), single.pooled(2, 2), atol=1e-6, rtol=1e-4)
    for ours, theirs in zip(panel.links(2), single.links(2), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("make", [gpt2, t5])
def test_several_texts_are_each_gone_on_with(tokenizer, make) -> None:
    model, both = make(), [ONE, TWO]
    seen = regard.look(model, tokenizer, both, generate=3, show=False)
    alone = [regard.look(model, tokenizer, text, generate=3, show=False) for text in both]
    assert seen.generated == [one.generated for one in alone]
    for item, one in enumerate(alone):
        same_maps(maps(seen, item), maps(one))


def test_ids_are_gone_on_with(tokenizer) -> None:
    seen = regard.look(gpt2(), tokenizer, torch.tensor(tokenizer(ONE)["input_ids"]), generate=3, show=False)
    wanted = regard.look(gpt2(), tokenizer, ONE, generate=3, show=False)
    assert (seen.tokens, seen.generated) == (wanted.tokens, wanted.generated)
    same_maps(maps(seen), maps(wanted))


def test_a_decoder_is_given_its_own_ids(tokenizer) -> None:
    source, target = (torch.tensor([tokenizer(text)["input_ids"]]) for text in (ONE, TWO))
    seen = regard.look(t5(), tokenizer, {"input_ids": source, "decoder_input_ids": target}, show=False)
    assert seen.tokens == (WORDS_ONE, WORDS_TWO)
    seen = regard.look(t5(), tokenizer, {"input_ids": source, "labels": target}, show=False)
    assert seen.tokens == (WORDS_ONE, None)
    assert maps(seen)[-1][:2] == ([str(i) for i in range(len(WORDS_TWO))], WORDS_ONE)


def test_an_encoding_knows_its_tokens_without_a_tokenizer(tokenizer) -> None:
    assert regard.look(gpt2(), tokenizer([ONE, TWO], padding=True, return_tensors="pt"), show=False).tokens == [
        WORDS_ONE + [""] * 6,
        WORDS_TWO,
    ]
    assert regard.look(gpt2(), torch.tensor([[2, 3, 5]]), show=False).tokens is None


def own(kind: str, plain: Tokenizer) -> Encoder | Decoder:
    """A model of regard's, with a tokenizer."""
    torch.manual_seed(0)
    sizes = {"layers": 2, "embed_dim": 15, "num_heads": 3, "inner": 7, "vocabulary": 11, "context": 17}
    config = ModelConfig(kind=kind, causal=kind == "decoder", token_types=2 if kind == "encoder" else 0, **sizes)
    model = (Encoder if kind == "encoder" else Decoder)(config, plain).eval()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.5)
    return model


@pytest.mark.parametrize("kind", ["encoder", "decoder"])
def test_a_model_of_regard_needs_no_tokenizer(plain, tokenizer, kind) -> None:
    model = own(kind, plain)
    wanted = regard.look(model, text=ONE, show=False)
    assert wanted.tokens == WORDS_ONE
    with regard.watch(model, keep="qk") as seen, torch.no_grad():
        model(model.encode(ONE))
    for ours, theirs in zip(wanted, seen, strict=True):
        torch.testing.assert_close(ours.weights(), theirs.weights())
    ids = model.encode(ONE)
    for given in (ONE, ids, ids[0], ids[0].tolist(), ids.tolist(), tokenizer(ONE, return_tensors="pt"), tokenizer(ONE)):
        same_maps(maps(regard.look(model, given, show=False)), maps(wanted))
    two = regard.look(model, TWO, show=False)
    for given in (
        [ONE, TWO],
        model.encode_batch([ONE, TWO]),
        model.encode_batch([ONE, TWO], pad="left"),
        tokenizer([ONE, TWO]),
    ):
        seen = regard.look(model, given, show=False)
        for item, alone in enumerate((wanted, two)):
            if isinstance(given, Batch) and not given.keep[0, 0]:  # (an encoder counts positions from the left)
                assert [one[:2] for one in maps(seen, item)] == [one[:2] for one in maps(alone)]
            else:
                same_maps(maps(seen, item), maps(alone))


def test_an_encoder_of_regard_reads_a_pair(plain) -> None:
    model = own("encoder", plain)
    seen = regard.look(model, (ONE, TWO), show=False)
    assert seen.tokens == WORDS_ONE + WORDS_TWO
    types = torch.tensor([[0] * len(WORDS_ONE) + [1] * len(WORDS_TWO)])
    with regard.watch(model, keep="qk") as wanted, torch.no_grad():
        model(model.encode(f"{ONE} {TWO}"), token_types=types)
    torch.testing.assert_close(seen[1].weights(), wanted[1].weights())
    with pytest.raises(TypeError, match="text: expected one text, for this model is a decoder, received a pair"):
        regard.look(own("decoder", plain), (ONE, TWO), show=False)


def test_models_of_regard_say_what_is_missing(plain) -> None:
    bare = own("encoder", plain)
    bare.tokenizer = None
    with pytest.raises(
        ValueError, match=r"tokenizer: expected one beside the weights \(tokenizer.json\), received none"
    ):
        regard.look(bare, ONE, show=False)
    assert regard.look(bare, [2, 3, 5], show=False).tokens is None
    with pytest.raises(ValueError, match="generate: expected 0, for this model is an encoder, received 2"):
        regard.look(own("encoder", plain), ONE, generate=2, show=False)


def test_a_missing_tokenizer_is_named(tokenizer) -> None:
    model = gpt2()
    with pytest.raises(
        TypeError, match=r"tokenizer: .* a text was given, received None; remedy: look\(model, tokenizer"
    ):
        regard.look(model, ONE, show=False)
    model.config._name_or_path = "small/gpt"
    with pytest.raises(TypeError, match=r"look\(model, AutoTokenizer.from_pretrained\('small/gpt'\), text\)"):
        regard.look(model, [ONE, TWO], show=False)
    with pytest.raises(TypeError, match=rf"text: .* received a {type(tokenizer).__name__}; remedy: look\(model, token"):
        regard.look(model, ONE, tokenizer, show=False)


def test_several_texts_for_a_model_without_a_mask(plain) -> None:
    class Mine(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.attention = torch.nn.Embedding(11, 6), regard.MultiHeadAttention(6, num_heads=2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.attention(self.embedding(x))

    assert regard.look(Mine(), plain, ["the cat", "a dog"], show=False).tokens == [["the", "cat"], ["[PAD]", "dog"]]
    with pytest.raises(
        ValueError, match=r"text: expected texts of one length, .* received lengths \[3, 9\]; remedy: one"
    ):
        regard.look(Mine(), plain, [ONE, TWO], show=False)


def test_targets_fit_their_texts(tokenizer) -> None:
    with pytest.raises(ValueError, match="target: expected one for each of 2 texts, received 1"):
        regard.look(t5(), tokenizer, [ONE, TWO], target="a dog", show=False)
