"""What can be given to `look` as a text: one or several, as ids, as a tokenizer returns them."""

from __future__ import annotations

import pytest
import torch
from draw.tiny_models import bert, gpt2, t5
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

import regard
from regard.models import Batch, Decoder, Encoder, ModelConfig

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
