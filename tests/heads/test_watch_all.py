"""`watch_all` against a loop by hand, and the classes of tokens of real tokenizers."""

from __future__ import annotations

from typing import Any

import pytest
import tokenizers
import torch
import transformers
from heads import hf_models
from heads.oracle import close
from heads.oracle_hands import B, Hand, N, W, WithMemory, by_operator, drawn, made, noise
from torch import Tensor, nn

import regard
from regard import measures, models
from regard.heads import Record, token_kinds, watch_all
from regard.heads.analysis.token_classes import is_punctuation
from regard.models import EMBEDDED, Encoder, ModelConfig
from regard.models.base import padded

WITH = {
    name: pytest.mark.skipif(EMBEDDED[name].folder() is None, reason=f"the weights of {name} are not installed")
    for name in ("minilm", "smollm2")
}


def by_hand(model: nn.Module, *calls: Any, **options: Any) -> Record:
    """The same, in a loop."""
    model.eval()
    with torch.no_grad(), regard.watch(model, **options) as seen:
        for call in calls:
            call()
    return seen


def same(got: Record, right: Record) -> None:
    assert got.layers == right.layers
    for mine, theirs in zip(got, right, strict=True):
        assert torch.equal(mine.count, theirs.count)
        assert mine.values.keys() == theirs.values.keys()
        for name, value in theirs.values.items():
            close(mine.values[name], value, name, 1e-6)
    assert got.table() == right.table()


TENSORS = [noise(B, N, W), noise(3, 5, W, seed=8), noise(1, 11, W, seed=9)]


def test_tensors() -> None:
    model = made(Hand(by_operator))
    right = by_hand(model, *(lambda x=x: model(x) for x in TENSORS))
    same(watch_all(model, TENSORS), right)
    same(watch_all(model, iter(TENSORS), progress=False), right)
    assert right[0].count.tolist() == [2 * 7 + 3 * 5 + 11] * 3


def test_tuples_of_arguments() -> None:
    model = WithMemory(drawn(nn.MultiheadAttention(W, 3, batch_first=True)))
    x, y = noise(B, N, W), noise(B, 11, W, seed=6)
    right = by_hand(model, lambda: model(x, y, y), lambda: model(x, x, x))
    same(watch_all(model, [(x, y, y), [x, x, x]]), right)


def test_mappings() -> None:
    """Of named arguments; a tokenizer of transformers gives one that is no dict."""
    model, given = hf_models.model("bert"), hf_models.inputs("bert", padded=True)
    right = by_hand(model, lambda: model(**given), lambda: model(**hf_models.inputs("bert")))
    batches = [transformers.BatchEncoding(dict(given)), hf_models.inputs("bert")]
    same(watch_all(model, batches), right)


def reader(tokenizer: Any = None) -> Encoder:
    config = ModelConfig(layers=2, embed_dim=15, num_heads=3, vocabulary=29, inner=7, context=13, order="post")
    model = drawn(Encoder(config, tokenizer))
    assert isinstance(model, Encoder)
    return model


def words() -> tokenizers.Tokenizer:
    vocabulary = {"[UNK]": 0, "a": 1, "b": 2, "c": 3, ",": 4}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()  # type: ignore[assignment]
    return made


def test_texts() -> None:
    model = reader(words())
    texts = ["a b c", "b , a , c c", "c"]
    right = by_hand(model, *(lambda t=t: model(model.encode(t)) for t in texts))
    same(watch_all(model, texts), right)
    assert right[0].count.tolist() == [10] * 3


def test_padded_batches_of_our_models() -> None:
    """`encode_batch` names what it gives, as forward does."""
    model = reader(words())
    texts = model.encode_batch(["a b c", "b , a , c c", "c"])
    right = by_hand(model, lambda: model(texts.ids, keep=texts.keep))
    same(watch_all(model, [texts]), right)
    rows = padded([[1, 2, 3], [4]])
    same(
        watch_all(model, [rows, texts]),
        by_hand(model, lambda: model(rows.ids, keep=rows.keep), lambda: model(texts.ids, keep=texts.keep)),
    )


def test_measures_and_layers_are_those_of_watch() -> None:
    model = hf_models.model("llama")
    ids = [hf_models.some_ids(2, 13), hf_models.some_ids(3, 7)]
    options: dict[str, Any] = {"measures": ["entropy", measures.Tokens({"low": [5, 7]})], "layers": "model.layers.1"}
    got = watch_all(model, ids, **options)
    same(got, by_hand(model, *(lambda x=x: model(x) for x in ids), **options))
    assert got.layers == ["model.layers.1.self_attn"]
    assert set(got.table()[0]) == {"layer", "head", "entropy", "low"}


class Fails(Exception):
    pass


def test_each_module_is_as_it_was() -> None:
    """In evaluation meanwhile, without gradient; then those that were in training are again, and no others; also where
    the model raises."""
    model, meanwhile = made(Hand(by_operator, dropout=0.3)), []
    model.train()
    model.norm.eval()
    before = [module.training for module in model.modules()]
    assert len(set(before)) == 2
    handle = model.register_forward_hook(
        lambda *_: meanwhile.append((any(m.training for m in model.modules()), torch.is_grad_enabled()))
    )
    watch_all(model, TENSORS)
    assert set(meanwhile) == {(False, False)}
    assert [module.training for module in model.modules()] == before
    handle.remove()

    def stop(*_: Any) -> None:
        raise Fails

    model.register_forward_hook(stop)
    with pytest.raises(Fails):
        watch_all(model, TENSORS)
    assert [module.training for module in model.modules()] == before
    assert torch.is_grad_enabled()


def test_what_cannot_be_run() -> None:
    model = made(Hand(by_operator))
    with pytest.raises(TypeError, match="batch: expected tensors, for this model has no tokenizer, received a text"):
        watch_all(model, ["a text"])
    with pytest.raises(TypeError, match="batch: expected a text, a tensor, a tuple or a mapping, received int"):
        watch_all(model, [3])
    for one in ("a text", {"input_ids": torch.zeros(1, 3)}):
        said = f"batches: expected several, one after another, received one {type(one).__name__}; remedy: a list of it"
        with pytest.raises(TypeError, match=said):
            watch_all(reader(words()), one)
    with pytest.raises(ValueError, match="saw none: the model was not run inside the block"):
        watch_all(model, [])


# Classes of tokens


@pytest.mark.parametrize(
    "token,right",
    [
        (",", True),
        ("##.", True),
        ("Ġ!", True),
        ("▁?", True),
        (".</w>", True),
        ("...", True),
        ("$", True),
        ("–", True),
        ("«", True),
        ("。", True),
        ("âĢĻ", True),
        ("ĠâĢĵ", True),
        ("##", True),
        ('."', True),
        ("a.", False),
        ("a", False),
        ("Ġ", False),
        ("▁", False),
        ("", False),
        ("[SEP]", False),
        ("<|im_end|>", False),
        ("é", False),
        ("Ã©", False),
        ("3", False),
        ("Ċ", False),
        ("##s", False),
    ],
)
def test_punctuation(token: str, right: bool) -> None:
    """As it is spelled in words, or in bytes as GPT-2 spells it: âĢĻ is ’."""
    assert is_punctuation(token) is right


@WITH["minilm"]
def test_kinds_of_minilm() -> None:
    model = models.load("minilm", check=False)
    kinds = token_kinds(model)
    number = model.tokenizer.token_to_id  # type: ignore[union-attr]
    assert sorted(kinds["special"]) == sorted(map(number, ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")))
    assert kinds["separator"] == [number("[SEP]")]
    _punctuation(set(kinds["punctuation"]), number, [".", ",", "!", "’", "—", "##."], ["a", "##s", "3", "[SEP]"])
    assert kinds == token_kinds(model.tokenizer)
    ids = model.encode("Look: a cat, a dog!")[0].tolist()
    assert [i in kinds["punctuation"] for i in ids] == [t in ":,!" for t in model.tokenize("Look: a cat, a dog!")]


@WITH["smollm2"]
def test_kinds_of_smollm2(smollm2: Any) -> None:
    """Its vocabulary is spelled in bytes: ’ is âĢĻ, and a lone ¡ is a part of some other character."""
    model = smollm2
    kinds = token_kinds(model)
    number = model.tokenizer.token_to_id  # type: ignore[union-attr]
    assert len(kinds["special"]) == 17
    assert kinds["separator"] == [number("<|im_end|>"), number("<|endoftext|>")]
    marks = [".", "Ġ(", "...", "âĢĻ", "âĢľ", "âĢĶ", "ãĢĤ"]
    _punctuation(set(kinds["punctuation"]), number, marks, ["a", "Ġthe", "3", "¡", "¥", "Ċ", "<|im_end|>"])
    for text in ("“Look”", "it’s – so"):
        ids = model.encode(text)[0].tolist()
        right = [not any(c.isalnum() for c in model.decode([i])) for i in ids]
        assert [i in kinds["punctuation"] for i in ids] == right
    assert not set(kinds["special"]) & set(kinds["punctuation"])


def _punctuation(found: set[int], number: Any, marks: list[str], others: list[str]) -> None:
    for token in (*marks, *others):
        if number(token) is not None:
            assert (number(token) in found) == (token in marks), token


def test_kinds_of_transformers() -> None:
    """By what the tokenizer calls special, not by the look: <0x0A> is a byte, [edit] a word."""
    vocabulary = {"<pad>": 0, "</s>": 1, "<0x0A>": 2, "[edit]": 3, "▁cat": 4, "▁.": 5, "<unk>": 6}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="</s>")
    kinds = token_kinds(theirs)
    assert kinds == {"special": [0, 1], "separator": [1], "punctuation": [5]}


class Bare:
    """A tokenizer that says nothing but its vocabulary."""

    def get_vocab(self) -> dict[str, int]:
        return {"[CLS]": 0, "<|begin_of_text|>": 1, "a": 2, "[x": 3, "<>": 4}


def test_kinds_by_the_look() -> None:
    assert token_kinds(Bare()) == {"special": [0, 1], "punctuation": [4]}
    said = "tokenizer: expected a tokenizer of transformers or tokenizers, or a model that has one, received"
    for wrong, kind in (
        ("bert", "str"),
        (made(Hand(by_operator)), "Model"),
        (None, "NoneType"),
        (reader(), "NoneType"),
    ):
        with pytest.raises(TypeError, match=f"{said} {kind}"):
            token_kinds(wrong)


def test_kinds_are_what_tokens_take() -> None:
    model = reader(words())
    kinds = token_kinds(model)
    assert kinds == {"punctuation": [4]}
    seen = watch_all(model, ["a , b", "c ,"], measures=[measures.Tokens(kinds)])

    def mass(text: str) -> Tensor:
        with torch.no_grad(), regard.watch(model, keep="qk") as kept:
            model(model.encode(text))
        return kept[0].weights()[0, :, :, 1].sum(1)  # (H,): the comma is the second

    close(seen[0].per_head("tokens")[:, 0], (mass("a , b") + mass("c ,")) / 5, "tokens")
