"""Needles in haystacks, and heads that find them by construction."""

from __future__ import annotations

from typing import Any

import pytest
import tokenizers
import torch
import transformers
from heads import hf_models
from heads.planted import PlantedDecoder, PlantedHead, after_its_copy, before, on_copies, on_first
from tokenizers.processors import TemplateProcessing
from torch import Tensor

from regard.heads import probes
from regard.heads.analysis.probes import haystack as stacks
from regard.heads.analysis.probes.haystack import haystack
from regard.models import EMBEDDED, Decoder, ModelConfig

WITH_SMOLLM2 = pytest.mark.skipif(EMBEDDED["smollm2"].folder() is None, reason="the weights of it are not installed")

LAYER = "blocks.0.attention"
CONTEXT = 131


def planted(vocabulary: int = 31) -> PlantedDecoder:
    """Of five heads the first retrieves."""
    heads = [
        after_its_copy(vocabulary, writes=3 * torch.eye(vocabulary)),
        on_copies(vocabulary),
        before(CONTEXT),
        on_first(CONTEXT),
        PlantedHead(),
    ]
    return PlantedDecoder(vocabulary, CONTEXT, heads)


def word_tokenizer(first: bool = False) -> Any:
    """A tokenizer of the words that haystacks are made of; `first`: each text begins with <s>."""
    whitespace = tokenizers.pre_tokenizers.Whitespace()
    texts = [*stacks.SENTENCES, *stacks.PLACES, *stacks.WORDS, "The secret words of the are . Question : Answer name a"]
    words = sorted({word for text in texts for word, _ in whitespace.pre_tokenize_str(text)})
    vocabulary = {word: i for i, word in enumerate(["<s>", "<unk>", *words])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = whitespace  # type: ignore[assignment]
    if first:
        made.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])  # type: ignore[assignment]
    return made


# Haystacks


@pytest.mark.parametrize("depth", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("words", [False, True])
def test_a_haystack(depth: float, words: bool) -> None:
    """The needle stands once in the filler, near its depth; the question and the answer are at the end."""
    generator = torch.Generator().manual_seed(5)
    parts = stacks.text_parts(word_tokenizer(first=True), generator) if words else stacks.random_parts(31, generator)
    text = haystack(parts, 127, depth)
    ids, n = text.ids.tolist(), 127
    assert len(ids) == n
    assert ids[: len(parts.first)] == parts.first == ([0] if words else [])
    assert ids[n - len(parts.answer) :] == parts.answer
    needle = parts.key + parts.answer
    at = [i for i in range(n) if ids[i : i + len(needle)] == needle]
    assert at[0] + len(needle) < n - len(parts.question) - len(parts.answer) + 1
    room = n - len(parts.first) - len(needle) - len(parts.after) - len(parts.question) - len(parts.answer)
    sentence = max(map(len, parts.filler))
    assert at[0] == pytest.approx(len(parts.first) + depth * room, abs=sentence)
    assert text.queries.tolist() == list(range(n - 1 - len(parts.answer), n - 1))
    for t, query in enumerate(text.queries.tolist()):
        assert ids[query + 1] == parts.answer[t]
        assert text.keys[query].tolist() == [at[0] + len(parts.key) + t]
    assert (text.keys >= 0).sum() == len(parts.answer)


def test_an_answer_that_says_a_token_twice() -> None:
    """Both are right."""
    parts = stacks.NeedleParts([], [[5], [6]], [2], [3, 4, 3], [], [2])
    text = haystack(parts, 13, 0.0)
    assert text.ids.tolist() == [5, 2, 3, 4, 3, 6, 5, 6, 5, 2, 3, 4, 3]
    assert text.keys[text.queries].tolist() == [[2, 4], [3, -1], [2, 4]]


def test_the_secrets_are_not_in_the_filler() -> None:
    for seed in range(7):
        generator = torch.Generator().manual_seed(seed)
        for parts in (stacks.text_parts(word_tokenizer(), generator), stacks.random_parts(31, generator)):
            filler = {token for sentence in parts.filler for token in sentence}
            assert not filler & set(parts.answer)
            assert parts.key[-1] not in filler
            assert len(set(parts.answer)) == 3


# Planted heads


def test_planted_heads() -> None:
    result = probes.retrieval(planted(), lengths=[53, 101], depths=[0.0, 0.4, 1.0], seeds=[0, 3])
    assert result[LAYER].tolist() == [1, 0, 0, 0, 0]
    assert result.answered == 1.0
    assert len(result.runs) == 12
    assert result.runs[4] == "length 101, depth 0.4, seed 0"
    assert result.by_run[LAYER].shape == (12, 5)
    assert result.spread[LAYER].tolist() == [0] * 5
    uniform = sum(1 / n for length in (53, 101) for n in range(length - 3, length)) / 6  # one key of those up to itself
    assert result.baseline[LAYER].tolist() == pytest.approx([uniform] * 5)
    mass = result.more["mass"][LAYER].tolist()
    assert mass[0] == pytest.approx(1.0)
    assert mass[1:4] == pytest.approx([0.0] * 3, abs=1e-9)
    assert mass[4] == pytest.approx(uniform)
    assert result.best(2)[0] == (LAYER, 0)


def test_the_table() -> None:
    result = probes.retrieval(planted(), lengths=[53], depths=[0.5])
    rows = result.table()
    assert list(rows[0]) == ["layer", "head", "retrieval", "baseline", "spread", "mass"]
    assert [row["head"] for row in rows] == [0, 1, 2, 3, 4]
    assert str(result).startswith("retrieval: mean over 1 texts; the model predicts 100.0% of the answers\nlayer ")
    assert "<table>" in result._repr_html_()


@pytest.mark.parametrize("whose", ["model's", "tokenizers", "transformers"])
def test_texts(whose: str) -> None:
    """Of words, by any tokenizer: the head that retrieves finds them, too."""
    tokenizer = word_tokenizer()
    model: Any = planted(tokenizer.get_vocab_size())
    if whose == "model's":
        model.tokenizer = tokenizer
    elif whose == "transformers":
        tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    caught: list[Tensor] = []
    model.register_forward_pre_hook(lambda _, args: caught.append(args[0]))
    result = probes.retrieval(model, None if whose == "model's" else tokenizer, lengths=[127], depths=[0.2, 0.8])
    assert result[LAYER].tolist() == [1, 0, 0, 0, 0]
    words = tokenizer.decode(caught[0][0].tolist())
    assert "The secret words of the" in words
    assert "Question : name the secret words of the" in words


def test_their_model_with_their_tokenizer() -> None:
    """A model of transformers that learned nothing, with its cache: shapes, and scores that are shares of 3 tokens."""
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=word_tokenizer(first=True))
    sizes = {"num_hidden_layers": 2, "hidden_size": 24, "num_attention_heads": 6, "num_key_value_heads": 3}
    config = transformers.LlamaConfig(
        **sizes, intermediate_size=13, vocab_size=len(tokenizer), max_position_embeddings=131
    )
    torch.manual_seed(0)
    result = probes.retrieval(transformers.LlamaForCausalLM(config), tokenizer, lengths=[101, 127], depths=[0.2, 0.8])
    assert list(result.scores) == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    for layer in result.scores:
        thirds = 3 * result.by_run[layer]
        assert thirds.shape == (4, 6)
        torch.testing.assert_close(thirds, thirds.round())
        assert result.baseline[layer].tolist() == pytest.approx([0.0090] * 6, abs=1e-4)  # 1 / 100 and 1 / 126, about


def test_random_tokens_in_spite_of_a_tokenizer() -> None:
    model: Any = planted()
    model.tokenizer = word_tokenizer()  # its ids are not the model's
    assert probes.retrieval(model, lengths=[53], synthetic=True)[LAYER][0] == 1.0


@pytest.mark.parametrize("which", ["ours", "llama", "gpt2"])
def test_other_models(which: str) -> None:
    """Two layers of heads that learned nothing."""
    model: Any = hf_models.model(which) if which != "ours" else None
    if which == "ours":
        model = Decoder(
            ModelConfig(layers=2, embed_dim=6, num_heads=3, vocabulary=97, inner=7, context=37, causal=True)
        )
    options = {} if which == "ours" else {"use_cache": False}
    result = probes.retrieval(model.train(), lengths=[31], depths=[0.5], **options)
    assert len(result.scores) == 2
    assert all(0 <= s <= 1 for scores in result.scores.values() for s in scores.tolist())
    assert 0 <= result.answered <= 1
    assert model.training


def test_the_same_again() -> None:
    model = planted()
    state = torch.random.get_rng_state()
    first, again = (probes.retrieval(model, lengths=[53], depths=[0.3]) for _ in range(2))
    assert torch.equal(first.more["mass"][LAYER], again.more["mass"][LAYER])
    assert torch.equal(torch.random.get_rng_state(), state)


def test_what_cannot_be_asked() -> None:
    model = planted()
    for name in ("lengths", "depths", "seeds"):
        with pytest.raises(ValueError, match=rf"{name}: expected a list with one number at least, received \[\]"):
            probes.retrieval(model, **{name: []})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"depths: expected numbers from 0 to 1, received 1\.5"):
        probes.retrieval(model, depths=[1.5])
    with pytest.raises(ValueError, match="lengths: expected at least 11 tokens, for the needle and the question, rec"):
        probes.retrieval(model, lengths=[10])
    with pytest.raises(ValueError, match="lengths: expected at most 37 tokens, the model's context, received 41"):
        probes.retrieval(hf_models.model("llama"), lengths=[41])
    with pytest.raises(ValueError, match="vocabulary: expected more than 10 tokens, received 7"):
        probes.retrieval(planted(7), lengths=[53])
    with pytest.raises(TypeError, match="tokenizer: expected a tokenizer of transformers or tokenizers, received int"):
        probes.retrieval(model, 5)
    with pytest.raises(TypeError, match="seeds: expected an integer, received str 'a'"):
        probes.retrieval(model, seeds=["a"])  # type: ignore[list-item]


@WITH_SMOLLM2
@pytest.mark.slow
def test_retrieval_heads_of_smollm2(smollm2: Any) -> None:
    """It knows the answers; the two best induction heads are among the ten best of 270, and most of the ten best among
    the twenty best."""
    result = probes.retrieval(smollm2, lengths=[256], depths=[0.1, 0.5, 0.9])
    assert result.answered > 0.9
    best = result.best(10)
    assert {("blocks.18.attention", 6), ("blocks.17.attention", 3)} <= set(best)
    assert result["blocks.18.attention"][6] > 0.9
    assert sum((scores > 0.1).sum().item() for scores in result.scores.values()) < 60  # sparse, as Wu et al. find
    rows = sorted(probes.induction(smollm2).table(), key=lambda row: -row["induction"])
    assert len({(row["layer"], row["head"]) for row in rows[:10]} & set(result.best(20))) >= 7
