"""Generation: the same tokens as without a cache, text that is given out as soon as it is sure and never before, ends
where it should, and packed weights that are never out of date."""

from __future__ import annotations

import copy
import gc
import math
import pickle
import pydoc_data.topics
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import islice
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import regard.onednn
from regard import KVCache, RollingCache
from regard.kernels.native_products import rows_served
from regard.models import Decoder, ModelConfig, generation
from regard.models.generation import Rules, Writer, choose

tokenizers = pytest.importorskip("tokenizers", reason="tokenizers, which cuts text, is not installed")

GREEDY = Rules()
LETTERS = "\t\n" + "".join(map(chr, range(32, 127)))  # each is a token
END, VOCABULARY = LETTERS.index("\t"), len(LETTERS)  # 97


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.no_grad():
        yield


# ----------------------------------------------------------------------------------------------------
# Tiny models, and tokenizers made by hand


def bytes_as_letters() -> list[str]:
    """GPT-2's letter for each byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte if byte in plain else next(others)) for byte in range(256)]


def byte_level(vocabulary: dict[str, int], merges: tuple[tuple[str, str], ...] = ()) -> Any:
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=list(merges)))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    if "<end>" in vocabulary:
        made.add_special_tokens(["<end>"])
    return made


def of_letters() -> Any:
    """A token for each printable letter: text and tokens are the same thing."""
    return byte_level({bytes_as_letters()[ord(letter)]: i for i, letter in enumerate(LETTERS)})


def of_bytes(*merges: bytes) -> Any:
    """A token for each byte (its number is the byte), 256 the end; then one for each of `merges`, two bytes."""
    letters = bytes_as_letters()
    vocabulary = {letter: byte for byte, letter in enumerate(letters)} | {"<end>": 256}
    pairs = tuple((letters[one], letters[two]) for one, two in merges)
    return byte_level(vocabulary | {"".join(pair): 257 + i for i, pair in enumerate(pairs)}, pairs)


def of_sentencepiece() -> Any:
    """As Llama 2 has it: words begin with ▁, and what is not in the vocabulary is written in bytes, 3 + byte."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "▁b"]
    made = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            vocab={word: i for i, word in enumerate(words)},
            merges=[("▁", "a"), ("▁", "b")],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    parts, steps = tokenizers.normalizers, tokenizers.decoders
    made.normalizer = parts.Sequence([parts.Prepend("▁"), parts.Replace(" ", "▁")])
    made.decoder = steps.Sequence([steps.Replace("▁", " "), steps.ByteFallback(), steps.Fuse(), steps.Strip(" ", 1, 0)])
    made.add_special_tokens(["<s>", "</s>"])
    return made


KINDS: dict[str, dict[str, Any]] = {
    "learned": {"num_heads": 3, "context": 101},
    "learned, parallel": {"num_heads": 3, "context": 101, "order": "parallel", "first_position": 2},
    "rotary": {
        "num_heads": 6,
        "num_kv_heads": 2,
        "positions": "rotary",
        "norm": "rms",
        "gated": True,
        "bias": False,
        "activation": "silu",
    },
    "window": {"num_heads": 6, "num_kv_heads": 3, "positions": "rotary", "windows": (5, None)},
    "window, learned": {"num_heads": 3, "windows": (3, 7), "context": 101},
}
ALL = pytest.mark.parametrize("kind", KINDS)


def tiny(kind: str = "rotary", tokenizer: Any = None, **changes: Any) -> Decoder:
    options = {"layers": 2, "embed_dim": 24, "vocabulary": VOCABULARY, "inner": 37, "causal": True, "kind": "decoder"}
    torch.manual_seed(3)
    model = Decoder(ModelConfig(**(options | KINDS[kind] | changes)), tokenizer or of_letters(), name="tiny")
    for linear in (module for module in model.modules() if isinstance(module, nn.Linear)):
        linear.weight.mul_(3)  # attention that is felt: what a tiny model says depends on the whole text
    return model.eval()


def greedy(model: Decoder, text: str, count: int) -> str:
    """The likeliest token each time, all of the text computed anew."""
    ids = model.encode(text)
    for _ in range(count):
        new = model(ids)[:, -1].argmax(-1, keepdim=True)
        if int(new) in model.config.eos:
            break
        ids = torch.cat([ids, new], 1)
    return model.decode(ids)[len(text) :]


def new_tokens(model: Decoder, text: str, count: int, cache: Any = None, rules: Rules = GREEDY) -> list[int]:
    cache = model.new_cache() if cache is None else cache
    made = generation.tokens(model, [model.encode(text)[0].tolist()], rules, cache, count)
    return [int(token) for token in islice(made, count)]


def scripted(monkeypatch: pytest.MonkeyPatch, *rows: list[int]) -> None:
    """The model says these tokens, whatever it is."""
    steps = [torch.tensor(step) for step in zip(*rows, strict=True)]
    monkeypatch.setattr(generation, "tokens", lambda *_: iter(steps))


# ----------------------------------------------------------------------------------------------------
# The likeliest token, alone and together


@ALL
def test_greedy_is_the_argmax_without_a_cache(kind: str) -> None:
    model = tiny(kind)
    assert model.generate("To be", 31) == greedy(model, "To be", 31)


def test_greedy_of_smollm2(smollm2: Decoder) -> None:
    text = "The capital of France is"
    made = smollm2.generate(text, 5)
    assert made == greedy(smollm2, text, 5)
    assert "Paris" in made


TEXTS = ["a", "To be, or not to be, that is the question", "Whether", "xyz " * 5]


@ALL
def test_several_texts_are_each_alone(kind: str) -> None:
    model = tiny(kind)
    assert model.generate(TEXTS, 29) == [model.generate(text, 29) for text in TEXTS]


@pytest.mark.slow
def test_several_texts_of_smollm2_are_each_alone(smollm2: Decoder) -> None:
    texts = ["The sky is", "One, two, three, four, five, six,", "Paris"]
    assert smollm2.generate(texts, 5) == [smollm2.generate(text, 5) for text in texts]


@ALL
def test_logits_of_rows_together_are_those_alone_at_each_step(kind: str) -> None:
    model, steps = tiny(kind), 7
    rows = [model.encode(text)[0].tolist() for text in TEXTS]
    seen: list[Tensor] = []

    def run(rows: list[list[int]]) -> list[Tensor]:
        seen.clear()
        hook = model.norm.register_forward_hook(lambda _, __, out: seen.append(model.head(out[:, -1])))
        made = list(islice(generation.tokens(model, rows, GREEDY, model.new_cache()), steps))
        hook.remove()
        return made

    run(rows)
    together = seen[1:]
    for i, row in enumerate(rows):
        run([row])
        for step, alone in zip(together, seen[1:], strict=True):
            torch.testing.assert_close(step[i], alone[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("side", ["left", "right"])
@ALL
def test_padded_rows_give_the_logits_of_each_alone(kind: str, side: str) -> None:
    model = tiny(kind)
    ids, keep = model.encode_batch(TEXTS, pad=side)
    logits = model(ids, keep=keep)
    for i, text in enumerate(TEXTS):
        torch.testing.assert_close(logits[i][keep[i]], model(model.encode(text))[0], rtol=1e-4, atol=1e-4)


@ALL
def test_left_padding_and_a_cache_give_the_logits_of_each_alone(kind: str) -> None:
    model, more = tiny(kind), torch.randint(VOCABULARY, (len(TEXTS), 5))
    ids, keep = model.encode_batch(TEXTS, pad="left")
    cache = model.new_cache()
    model(ids, keep=keep, cache=cache)
    for step in range(5):
        keep = torch.cat([keep, torch.ones(len(TEXTS), 1, dtype=torch.bool)], 1)
        logits = model(more[:, step : step + 1], keep=keep, cache=cache)
        for i, text in enumerate(TEXTS):
            alone = model(torch.cat([model.encode(text), more[i : i + 1, : step + 1]], 1))[0, -1]
            torch.testing.assert_close(logits[i, 0], alone, rtol=1e-4, atol=1e-4)


@ALL
def test_a_row_that_ended_does_not_change_the_others(kind: str) -> None:
    model = tiny(kind)
    alone = [model.generate(text, 29) for text in TEXTS]
    stop = alone[1][4:6]
    together = model.generate(TEXTS, 29, stop=stop)
    assert together == [text[: text.find(stop)] if stop in text else text for text in alone]


def test_no_texts_and_one_text() -> None:
    model = tiny()
    assert model.generate([], 5) == []
    assert model.generate(["To"], 5) == [model.generate("To", 5)]


def test_several_texts_take_no_cache() -> None:
    model = tiny()
    with pytest.raises(ValueError, match="cache: expected None for several texts"):
        model.generate(["a", "b"], 3, cache=model.new_cache())


# ----------------------------------------------------------------------------------------------------
# Drawing


LOGITS = torch.tensor([[1.0, -0.5, 2.0, 0.25, -3.0]])
MANY = 20011


def frequencies(rules: Rules, logits: Tensor = LOGITS) -> Tensor:
    drawn = choose(logits.expand(MANY, -1), rules, torch.Generator().manual_seed(11))
    return torch.bincount(drawn, minlength=logits.shape[1])


def assert_drawn_from(counts: Tensor, probabilities: Tensor) -> None:
    """Chi-square: below the value that chance passes once in ten thousand times (4 degrees of freedom: 23.5)."""
    assert counts[probabilities == 0].sum() == 0
    there = probabilities > 0
    expected = probabilities[there] * MANY
    assert float(((counts[there] - expected) ** 2 / expected).sum()) < 23.5


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_temperature_draws_from_the_softmax(temperature: float) -> None:
    assert_drawn_from(frequencies(Rules(temperature)), (LOGITS[0] / temperature).softmax(-1))


@pytest.mark.parametrize("k", [1, 2, 3, 5, 7])
def test_top_k_draws_among_the_k_likeliest(k: int) -> None:
    kept = LOGITS[0].argsort(descending=True)[:k]
    cut = torch.full((5,), -math.inf).index_copy(0, kept, LOGITS[0, kept])
    assert_drawn_from(frequencies(Rules(1.0, top_k=k)), cut.softmax(-1))


@pytest.mark.parametrize("p, kept", [(1e-9, 1), (0.6, 1), (0.62, 2), (0.85, 3), (0.95, 4), (0.999, 5)])
def test_top_p_draws_among_the_fewest_that_have_so_much_together(p: float, kept: int) -> None:
    """Together they have .613, .839, .945, .996 and 1."""
    probabilities = LOGITS[0].softmax(-1)
    ordered, order = probabilities.sort(descending=True)
    fewest = int((ordered.cumsum(0) < p).sum()) + 1
    assert fewest == kept
    cut = torch.zeros(5).index_copy(0, order[:kept], ordered[:kept])
    assert_drawn_from(frequencies(Rules(1.0, top_p=p)), cut / cut.sum())


def test_top_p_counts_after_top_k_and_temperature() -> None:
    kept = (LOGITS[0] / 2).argsort(descending=True)[:3]
    three = (LOGITS[0, kept] / 2).softmax(-1)  # .50, .30, .20
    assert three[0] < 0.6 < three[:2].sum()
    counts = frequencies(Rules(2.0, top_k=3, top_p=0.6))
    assert_drawn_from(counts, torch.zeros(5).index_copy(0, kept[:2], three[:2] / three[:2].sum()))


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-40, 5e-324])
def test_a_very_low_temperature_is_greedy(temperature: float) -> None:
    assert choose(20 * LOGITS, Rules(temperature)).item() == 2


def test_a_very_high_temperature_is_even() -> None:
    assert_drawn_from(frequencies(Rules(1e30)), torch.full((5,), 0.2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_choose_of_other_dtypes(dtype: torch.dtype) -> None:
    assert choose(LOGITS.to(dtype), Rules()).item() == 2
    assert choose(LOGITS.to(dtype), Rules(0.7, top_k=1, top_p=0.5)).item() == 2


def test_rows_are_drawn_each_for_itself() -> None:
    logits = torch.full((3, 5), -math.inf)
    logits[[0, 1, 2], [4, 0, 3]] = 1.0
    assert choose(logits, Rules(1.0, top_k=2, top_p=0.9)).tolist() == [4, 0, 3]


def test_top_k_of_1_is_greedy() -> None:
    model = tiny()
    assert model.generate("To be", 23, temperature=5.0, top_k=1) == model.generate("To be", 23)


def test_top_k_of_1_is_one_token_even_where_two_are_equal() -> None:
    counts = torch.bincount(choose(torch.zeros(MANY, 3), Rules(1.0, top_k=1), torch.Generator().manual_seed(5)))
    assert int((counts > 0).sum()) == 1


def test_the_same_seed_draws_the_same_and_another_not() -> None:
    model = tiny()
    drawn = [model.generate("To be", 31, temperature=1.0, seed=seed) for seed in (5, 5, 7)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_without_a_seed_torchs_own_decides() -> None:
    model, drawn = tiny(), []
    for seed in (5, 5, 7):
        torch.manual_seed(seed)
        drawn.append(model.generate("To be", 31, temperature=1.0))
    assert drawn[0] == drawn[1] != drawn[2]


def test_a_seed_leaves_torchs_own_numbers_alone() -> None:
    model, before = tiny(), torch.get_rng_state()
    model.generate("To be", 11, temperature=1.0, seed=5)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("temperature", [-1, math.nan, math.inf])
def test_wrong_temperature(temperature: float) -> None:
    with pytest.raises(ValueError, match="temperature: expected 0"):
        tiny().stream("a", temperature=temperature)


@pytest.mark.parametrize("top_k", [0, -3, 2.0, True, "2"])
def test_wrong_top_k(top_k: Any) -> None:
    with pytest.raises(ValueError, match="top_k: expected a positive integer"):
        tiny().stream("a", top_k=top_k)


@pytest.mark.parametrize("top_p", [0, -0.5, 1.5, math.nan])
def test_wrong_top_p(top_p: float) -> None:
    with pytest.raises(ValueError, match="top_p: expected a probability"):
        tiny().stream("a", top_p=top_p)


@pytest.mark.parametrize("options", [{"seed": 1.5}, {"seed": "x"}, {"temperature": "hot"}, {"top_p": "some"}], ids=str)
def test_options_of_another_type_are_said_at_once(options: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError), match=f"{next(iter(options))}: expected"):
        tiny().stream("a", **options)


# ----------------------------------------------------------------------------------------------------
# Where it ends


def test_ends_at_the_end_token(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny(eos=(END, 7))
    scripted(monkeypatch, [11, 12, END, 13])
    assert model.generate("a", 9) == LETTERS[11] + LETTERS[12]
    scripted(monkeypatch, [11, 7, END, 13])
    assert model.generate("a", 9) == LETTERS[11]
    scripted(monkeypatch, [END, 13])
    assert model.generate("a", 9) == ""


def test_the_end_token_ends_in_earnest() -> None:
    model = tiny()
    text = model.generate("To be", 31)
    ended = tiny(eos=(LETTERS.index(text[10]),))
    assert ended.generate("To be", 31) == text[: text.index(text[10])]


def test_the_end_token_ends_each_row(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny(eos=(END,))
    scripted(monkeypatch, [11, END, 12], [13, 14, END])
    assert model.generate(["a", "b"], 9) == [LETTERS[11], LETTERS[13] + LETTERS[14]]


def test_max_new_tokens() -> None:
    model = tiny()
    assert model.generate("a", 0) == ""
    assert model.generate(["a", "b"], 0) == ["", ""]
    assert list(model.stream("a", 0)) == []
    assert len(model.generate("a", 1)) == 1
    assert len(model.generate("a", 13)) == 13
    assert [len(text) for text in model.generate(["a", "bcd"], 13)] == [13, 13]


@pytest.mark.parametrize("text", ["a", ["a", "b"]], ids=["one", "several"])
@pytest.mark.parametrize("count", [-1, 2.0, "3", True])
def test_wrong_max_new_tokens(count: Any, text: Any) -> None:
    with pytest.raises(ValueError, match="max_new_tokens: expected an integer of at least 0"):
        tiny().generate(text, count)


def test_several_texts_need_a_number_of_new_tokens() -> None:
    with pytest.raises((ValueError, TypeError), match="max_new_tokens: expected"):
        tiny().generate(["a", "b"], None)  # type: ignore[arg-type]


def test_empty_text() -> None:
    with pytest.raises(ValueError, match="text: expected at least one token to begin with, received an empty text"):
        tiny().generate("", 3)
    with pytest.raises(ValueError, match="text: expected at least one token to begin with"):
        tiny().generate(["a", ""], 3)


@pytest.mark.parametrize("text", [None, 5, b"bytes", [5], [None]], ids=repr)
def test_what_is_no_text(text: Any) -> None:
    with pytest.raises(TypeError, match=r"texts?: expected"):
        tiny().generate(text, 3)


def test_what_is_wrong_is_said_before_the_first_piece_is_asked_for() -> None:
    model = tiny()
    with pytest.raises(ValueError, match="max_new_tokens"):
        model.stream("a", -1)
    with pytest.raises(TypeError, match="text: expected a string"):
        model.stream(["a"])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="stop: expected strings, received int"):
        model.stream("a", stop=[5])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="stop: expected strings of at least one character, received an empty one"):
        model.stream("a", stop=["x", ""])


def test_without_a_tokenizer() -> None:
    model = tiny()
    model.tokenizer = None
    with pytest.raises(ValueError, match=r"tokenizer: expected one beside the weights"):
        model.generate("a", 3)


# ----------------------------------------------------------------------------------------------------
# Stop strings


def said(monkeypatch: pytest.MonkeyPatch, text: str, stop: Any, **options: Any) -> list[str]:
    """The pieces in which a model gives out `text`, a letter at a time, if it stops at `stop`."""
    scripted(monkeypatch, [LETTERS.index(letter) for letter in text])
    return list(tiny(**options).stream("ab", len(text), stop=stop))


@pytest.mark.parametrize(
    "text, stop, expected",
    [
        ("one. two", ".", "one"),
        ("one\n\ntwo", "\n\n", "one"),
        ("one\ntwo\n\nthree", "\n\n", "one\ntwo"),
        ("ababac", "abac", "ab"),
        ("aaab", "aab", "a"),
        ("one two", ["zwei", "two", "o t"], "one "),
        ("xstop", "stop", "x"),
        ("stopx", "stop", ""),
        ("never", "stop", "never"),
        ("half sto", "stop", "half sto"),
        ("abcd", ["bcd", "c"], "ab"),
        ("abcd", ["abcde", "bc"], "a"),
        ("ends here!", "!", "ends here"),
    ],
)
def test_stop(monkeypatch: pytest.MonkeyPatch, text: str, stop: Any, expected: str) -> None:
    pieces = said(monkeypatch, text, stop)
    assert "".join(pieces) == expected
    scripted(monkeypatch, [LETTERS.index(letter) for letter in text])
    assert tiny().generate("ab", len(text), stop=stop) == expected
    scripted(monkeypatch, *2 * [[LETTERS.index(letter) for letter in text]])
    assert tiny().generate(["ab", "c"], len(text), stop=stop) == [expected, expected]


def test_a_stop_string_that_is_part_of_the_given_text_does_not_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "".join(said(monkeypatch, "cd", ["ab", "bc"])) == "cd"


def test_a_stop_string_before_the_end_token(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny(eos=(END,))
    scripted(monkeypatch, [LETTERS.index("a"), LETTERS.index("s"), END])
    assert model.generate("x", 9, stop="st") == "as"  # what was held back is given out


@settings(max_examples=150, deadline=None)
@given(st.text("ab", min_size=1, max_size=12), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_any_stop_string_in_any_text(text: str, stops: list[str]) -> None:
    """The first place where a token completes one; of those completed at once, the one that begins first."""
    model = MODEL_OF_LETTERS
    writer, out, ended = Writer(model, tuple(stops)), "", False
    for letter in text:
        piece, ended = writer.add(LETTERS.index(letter))
        out += piece
        if ended:
            break
    out += "" if ended else writer.finish()
    found = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    end = min((at for at, _ in found), default=None)
    assert out == (text if end is None else text[: min(begin for at, begin in found if at == end)])


MODEL_OF_LETTERS = Decoder(
    ModelConfig(layers=1, embed_dim=2, num_heads=1, vocabulary=VOCABULARY, inner=1, context=5), of_letters()
)


def test_nothing_of_a_stop_string_is_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = said(monkeypatch, "go st sto stop more", "stop")
    assert "".join(pieces) == "go st sto "
    assert pieces[:3] == ["g", "o", " "]
    for i in range(len(pieces)):
        assert not "".join(pieces[: i + 1]).endswith(("stop", "sto s"))


def test_streaming_holds_back_no_more_than_it_must(monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, [LETTERS.index(letter) for letter in "xxsxx"])
    seen = [piece for piece in tiny().stream("ab", 5, stop="stop") if piece]
    assert seen == ["x", "x", "sx", "x"]


# ----------------------------------------------------------------------------------------------------
# Streaming


@ALL
def test_a_stream_is_what_is_generated(kind: str) -> None:
    model = tiny(kind)
    pieces = list(model.stream("To be", 29))
    assert "".join(pieces) == model.generate("To be", 29)
    assert len(pieces) > 10


def test_a_stream_of_smollm2_is_what_is_generated(smollm2: Decoder) -> None:
    text = "Write three emoji: 🙂🎉"
    pieces = list(smollm2.stream(text, 13, temperature=1.3, seed=5))
    assert "".join(pieces) == smollm2.generate(text, 13, temperature=1.3, seed=5)


def bytes_model(*merges: bytes) -> Decoder:
    return Decoder(
        ModelConfig(layers=1, embed_dim=2, num_heads=1, vocabulary=257 + len(merges), inner=1, context=5),
        of_bytes(*merges),
    )


BYTES = bytes_model()
PAIRS = bytes_model(b"\xf0\x9f", b"\x98\x80", b"\xc3\xa9", b"a\xf0", b"\x80b")
PIECES = Decoder(
    ModelConfig(layers=1, embed_dim=2, num_heads=1, vocabulary=264, inner=1, context=5), of_sentencepiece()
)


def written(model: Decoder, before: list[int], ids: list[int]) -> list[str]:
    writer = Writer(model, (), before)
    return [*(writer.add(token)[0] for token in ids), writer.finish()]


@pytest.mark.parametrize("text", ["😀", "a😀b", "é😀é", "naïve — 漢字 🏳️‍🌈!", "👩‍👩‍👧‍👦" * 3], ids=repr)
@pytest.mark.parametrize("model", [BYTES, PAIRS, PIECES], ids=["bytes", "pairs", "sentencepiece"])
def test_characters_are_never_split(model: Decoder, text: str) -> None:
    ids = model.tokenizer.encode("a" + text).ids
    before, ids = model.tokenizer.encode("a").ids, ids[len(model.tokenizer.encode("a").ids) :]
    pieces = written(model, before, ids)
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("model", [BYTES, PAIRS, PIECES], ids=["bytes", "pairs", "sentencepiece"])
@settings(max_examples=80, deadline=None)
@given(text=st.text(max_size=30), before=st.text(max_size=12))
def test_any_text_is_written_as_it_is(model: Decoder, text: str, before: str) -> None:
    start = model.tokenizer.encode("a" + before + "a").ids
    ids = model.tokenizer.encode("a" + before + "a" + text).ids
    if ids[: len(start)] != start:
        return
    assert "".join(written(model, start, ids[len(start) :])) == text


@settings(max_examples=150, deadline=None)
@given(raw=st.lists(st.sampled_from([0x61, 0x80, 0x9F, 0x98, 0xF0, 0xC3, 0xA9, 0xE2, 0xFF]), max_size=30))
def test_bytes_that_are_no_text_are_written_as_decode_writes_them(raw: list[int]) -> None:
    assert "".join(written(BYTES, [97], raw)) == BYTES.decode(raw)


def test_an_emoji_after_bytes_that_are_no_text() -> None:
    pieces = written(BYTES, [97], [0x80, 0x80, 0x80, *"😀".encode(), 98])
    assert "".join(pieces) == "\ufffd\ufffd\ufffd😀b"


def test_an_unfinished_character_is_written_at_the_end_only() -> None:
    pieces = written(BYTES, [97], [98, *"😀".encode()[:3]])
    assert pieces == ["b", "", "", "", "\ufffd"]


def test_special_tokens_are_not_written() -> None:
    assert "".join(written(BYTES, [97], [98, 256, 99])) == "bc"


def test_a_space_after_a_special_token_is_written() -> None:
    """SentencePiece writes no space before the first word: the first of all, not the first we look at."""
    a = PIECES.tokenizer.token_to_id("▁a")
    assert "".join(written(PIECES, [1, a, *8 * [2]], [a, a])) == " a a"


def test_words_of_sentencepiece_keep_their_spaces() -> None:
    a, b = (PIECES.tokenizer.token_to_id(word) for word in ("▁a", "b"))
    assert "".join(written(PIECES, [1, a], 5 * [a, b, b])) == 5 * " abb"


def test_writing_takes_no_longer_as_the_text_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    longest, decode = 0, Decoder.decode

    def seen(self: Decoder, ids: list[int], **options: Any) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return decode(self, ids, **options)

    monkeypatch.setattr(Decoder, "decode", seen)
    written(BYTES, [97] * 5, [98] * 500)
    written(BYTES, [97] * 5, [0x80] * 500)
    assert longest < 100


def test_two_streams_of_one_model_at_once() -> None:
    model = tiny()
    one, two = model.stream("To be", 29), model.stream("or not", 29)
    pieces = [(a, b) for a, b in zip(one, two, strict=False)]
    assert "".join(a for a, _ in pieces) == model.generate("To be", 29)[: len(pieces)]
    assert "".join(b for _, b in pieces) == model.generate("or not", 29)[: len(pieces)]
    one.close()
    two.close()
    assert not users()


def test_two_threads_with_two_models() -> None:
    made = [tiny("rotary"), tiny("window")]
    alone = [model.generate("To be", 61) for model in made]
    together: dict[int, list[str]] = {0: [], 1: []}

    def work(i: int) -> None:
        for _ in range(3):
            together[i].append(made[i].generate("To be", 61))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together == {0: 3 * [alone[0]], 1: 3 * [alone[1]]}


# ----------------------------------------------------------------------------------------------------
# Caches that are given


@ALL
def test_two_calls_with_one_cache_are_one_call_of_the_whole(kind: str) -> None:
    model, cache = tiny(kind), None
    cache = model.new_cache()
    first = model.generate("To be", 11, cache=cache)
    second = model.generate(" or not", 13, cache=cache)
    assert second == model.generate("To be" + first + " or not", 13)
    assert len(cache[0]) == len("To be" + first + " or not" + second)


@ALL
def test_one_token_with_a_cache(kind: str) -> None:
    model = tiny(kind)
    cache = model.new_cache()
    first = model.generate("To be", 1, cache=cache)
    assert model.generate("x", 9, cache=cache) == model.generate("To be" + first + "x", 9)


def test_no_token_with_a_cache_reads_the_text_all_the_same() -> None:
    model = tiny()
    cache = model.new_cache()
    assert model.generate("To be", 0, cache=cache) == ""
    assert model.generate("x", 9, cache=cache) == model.generate("To bex", 9)


def test_a_stream_that_was_left_has_a_cache_that_holds_what_it_gave() -> None:
    model = tiny()
    cache, given_out = model.new_cache(), ""
    stream = model.stream("To be", 29, cache=cache)
    for _ in range(5):
        given_out += next(stream)
    stream.close()
    assert model.generate("x", 9, cache=cache) == model.generate("To be" + given_out + "x", 9)


def test_the_beginning_token_is_read_at_the_beginning_only() -> None:
    begin = LETTERS.index("~")
    model = tiny(bos=begin)
    model.tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single=["~", "$A"], special_tokens=[("~", begin)]
    )
    cache = model.new_cache()
    first = model.generate("To be", 7, cache=cache)
    assert len(cache[0]) == 1 + len("To be" + first)
    model.generate("x", 5, cache=cache)
    assert len(cache[0]) == 1 + len("To be" + first) + 1 + 5


@pytest.mark.parametrize(
    "make", [list, lambda: [KVCache()], KVCache, lambda: KVCache], ids=["none", "one too few", "no list", "a class"]
)
def test_a_wrong_cache_is_said(make: Callable[[], Any]) -> None:
    model = tiny()
    with pytest.raises((ValueError, TypeError), match=r"cache: expected one .*per layer.*remedy: model\.new_cache\(\)"):
        model.generate("a", 3, cache=make())
    with pytest.raises((ValueError, TypeError), match=r"cache: expected one .*per layer.*remedy: model\.new_cache\(\)"):
        model(model.encode("a"), cache=make())


def test_tokens_of_smollm2_in_two_calls(smollm2: Decoder) -> None:
    cache = smollm2.new_cache()
    first = smollm2.generate("One, two,", 6, cache=cache)
    whole = smollm2.encode("One, two," + first)[0].tolist()
    if whole[: smollm2.encode("One, two,").shape[1]] != smollm2.encode("One, two,")[0].tolist():
        pytest.skip("the text is cut into other tokens as a whole")
    assert smollm2.generate("\n", 6, cache=cache) == smollm2.generate("One, two," + first + "\n", 6)


# ----------------------------------------------------------------------------------------------------
# Rolling


ROLLING = pytest.mark.parametrize("kind", ["rotary", "window"])


@ROLLING
@pytest.mark.parametrize("keep_first", [0, 1, 4])
def test_rolling_is_a_kv_cache_within_its_window(kind: str, keep_first: int) -> None:
    model = tiny(kind)
    rolling = new_tokens(model, "To be", 26, model.new_cache(window=31 - keep_first, keep_first=keep_first))
    assert rolling == new_tokens(model, "To be", 26)


def test_an_endless_stream_holds_so_much_and_no_more() -> None:
    model = tiny()
    cache, sizes, count = model.new_cache(window=13, keep_first=3), set(), 0
    for piece in model.stream("To be", None, cache=cache, temperature=1.0, seed=5):
        count += len(piece)
        if count > 100:
            sizes.add((len(cache[0]), cache[0]._store._keys.shape[2]))
        if count >= 400:
            break
    assert cache[0].seen > 390
    assert all(held <= 16 and room <= 64 for held, room in sizes)


def test_a_stream_without_end_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny(context=23)  # (no warning: a rolling cache stays within)
    stream = model.stream("To be", None, cache=model.new_cache(window=11))
    assert len("".join(islice(stream, 200))) >= 200
    stream.close()


@ROLLING
def test_rolling_logits_are_finite_far_beyond(kind: str) -> None:
    model = tiny(kind, context=31)
    cache = model.new_cache(window=11, keep_first=2)
    for _ in range(40):
        assert model(torch.randint(VOCABULARY, (1, 29)), cache=cache).isfinite().all()
    assert cache[0].seen == 40 * 29


@ROLLING
@pytest.mark.parametrize("keep_first", [0, 2])
@pytest.mark.parametrize("length", [10, 11, 12, 21, 22, 23, 53])
def test_rolling_reads_a_long_text_in_pieces_as_token_by_token(kind: str, keep_first: int, length: int) -> None:
    model, ids = tiny(kind), torch.randint(VOCABULARY, (1, length))
    whole, single = (model.new_cache(window=11, keep_first=keep_first) for _ in range(2))
    state = generation._prefill(model, ids, whole)[:, -1]
    for i in range(length):
        expected = model.hidden(ids[:, i : i + 1], cache=single)[:, -1]
    torch.testing.assert_close(state, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["learned", "window, learned"])
def test_learned_positions_refuse_a_window(kind: str) -> None:
    with pytest.raises(ValueError, match="window: expected None: this model has learned positions"):
        tiny(kind).new_cache(window=11)


def test_rolling_takes_no_keep() -> None:
    model = tiny()
    ids, keep = model.encode_batch(["a", "bc"])
    with pytest.raises(ValueError, match="keep: expected None: a RollingCache forgets"):
        model(ids, keep=keep, cache=model.new_cache(window=5))


def test_new_cache_is_one_per_layer() -> None:
    model = tiny()
    assert [type(part) for part in model.new_cache()] == [KVCache, KVCache]
    assert [type(part) for part in model.new_cache(window=5)] == [RollingCache, RollingCache]
    with pytest.raises(ValueError, match="a window of at least 1"):
        model.new_cache(window=0)


def perplexities(model: Decoder, ids: Tensor, keep_first: int, chunk: int = 64) -> list[float]:
    """Of pieces of a long text, each read after those before it, through a window."""
    cache, losses = model.new_cache(window=128, keep_first=keep_first), []
    last = None
    for start in range(0, ids.shape[1], chunk):
        piece = ids[:, start : start + chunk]
        logits = model(piece, cache=cache)[0]
        before = logits[:-1] if last is None else torch.cat([last, logits[:-1]])
        wanted = piece[0, 1:] if last is None else piece[0]
        losses.append(float(nn.functional.cross_entropy(before, wanted)))
        last = logits[-1:]
    return losses


@pytest.mark.slow
def test_smollm2_reads_on_and_on_with_its_first_tokens_kept(smollm2: Decoder) -> None:
    """Streaming with attention sinks (Xiao et al. 2023): without the first tokens it falls apart."""
    ids = smollm2.encode(pydoc_data.topics.topics["execmodel"])[:, :1472]
    assert ids.shape[1] == 1472
    with torch.inference_mode():
        kept, lost = perplexities(smollm2, ids, 4), perplexities(smollm2, ids[:, :640], 0)
    assert all(map(math.isfinite, kept))

    def mean(losses: list[float]) -> float:
        return math.exp(sum(losses) / len(losses))

    third, half = len(kept) // 3, len(lost) // 2
    first, last = mean(kept[:third]), mean(kept[-third:])
    with_, without = mean(kept[half : 2 * half]), mean(lost[half:])
    print(
        f"perplexity: {first:.1f}, then {last:.1f}; in the middle {with_:.1f}, without the first tokens {without:.1f}"
    )
    assert last < 1.3 * first
    assert without > 1.4 * with_


# ----------------------------------------------------------------------------------------------------
# Past the end of what was trained


@pytest.mark.parametrize("kind", ["learned", "learned, parallel"])
def test_learned_positions_end_the_text(kind: str) -> None:
    """The last token chosen is not read again: there is one more than there are positions."""
    model = tiny(kind, context=19)
    assert len("To be" + model.generate("To be", 100)) == 20
    assert len("To be" + "".join(model.stream("To be", None))) == 20


def test_learned_positions_end_several_texts_with_the_longest() -> None:
    made = tiny("learned", context=19).generate(["a", "To be or not"], 100)
    assert [len(text) for text in made] == [8, 8]


def test_learned_positions_with_a_cache_end_the_text() -> None:
    model = tiny("learned", context=19)
    alone = model.generate("To be", 100)
    assert model.generate("To be", 100, cache=model.new_cache()) == alone


def test_learned_positions_with_a_cache_go_on_to_the_last() -> None:
    model = tiny("learned", context=19)
    cache = model.new_cache()
    first = model.generate("To be", 5, cache=cache)
    assert model.generate("xy", 100, cache=cache) == model.generate("To be" + first + "xy", 100)


def test_a_text_longer_than_the_learned_positions() -> None:
    with pytest.raises(ValueError, match="ids: expected at most 19 tokens, the number of learned positions"):
        tiny("learned", context=19).generate("x" * 20, 3)


def test_a_text_as_long_as_the_learned_positions() -> None:
    assert len(tiny("learned", context=19).generate("x" * 19, 3)) == 1


def test_rotary_warns_past_the_trained_length() -> None:
    model = tiny(context=19)
    with pytest.warns(UserWarning, match=r"25 tokens are more than the 19 that tiny was trained on; remedy: cache="):
        assert len(model.generate("To be", 20)) == 20
    with pytest.warns(UserWarning, match="25 tokens are more than the 19"):
        model.stream("To be", 20)
    with pytest.warns(UserWarning, match="25 tokens are more than the 19"):
        model.generate(["a", "To be"], 20)


def test_the_warning_points_at_the_caller() -> None:
    model = tiny(context=19)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.generate("To be", 20)
        model.stream("To be", 20)
        model.generate(["To be"], 20)
    assert {warning.filename for warning in caught} == {__file__}


def test_no_warning_within_the_trained_length() -> None:
    model = tiny(context=19)
    model.generate("To be", 14)
    model.generate("To be", 50, cache=model.new_cache(window=9))


# ----------------------------------------------------------------------------------------------------
# Packed weights


def users() -> int:
    return len(regard.onednn._ACTIVE.stack)


def large(**changes: Any) -> Decoder:
    return tiny("rotary", embed_dim=72, inner=67, **changes)


def forgotten(model: Decoder) -> Decoder:
    """The same weights in a new model, of which nothing was packed."""
    fresh = large()
    fresh.load_state_dict({key: tensor.clone() for key, tensor in model.state_dict().items()})
    return fresh


def test_packing_is_used_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[int] = []

    class Counted(regard.onednn.packed):
        def __enter__(self) -> None:
            copies.append(len(self._copies))
            super().__enter__()

    monkeypatch.setattr("regard.models.base.packed", Counted)
    monkeypatch.setattr("regard.onednn.packs", lambda dtype: True)
    large().generate("To be", 61)
    assert len(copies) > 30
    assert copies[0]
    assert not users()
    copies.clear()
    large().generate(["To be"] * 9, 61)  # products of nine rows may be ours
    assert bool(copies) is (9 not in rows_served(torch.float32))


def test_a_stream_that_is_left_lets_go() -> None:
    model = large()
    stream = model.stream("To be", 61)
    for _ in range(5):
        next(stream)
    stream.close()
    assert not users()


def test_a_stream_that_is_forgotten_lets_go() -> None:
    stream = large().stream("To be", 61)
    for _ in range(5):
        next(stream)
    del stream
    gc.collect()
    assert not users()


def test_a_stream_that_fails_lets_go(monkeypatch: pytest.MonkeyPatch) -> None:
    model = large()
    stream = model.stream("To be", 61)
    for _ in range(5):
        next(stream)

    def fail(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(generation, "choose", fail)
    with pytest.raises(KeyboardInterrupt):
        next(stream)
    gc.collect()
    assert not users()


def flipped(tensor: Tensor, axis: int) -> Tensor:
    return tensor.flip(axis).clone()


def through_numpy(model: Decoder) -> None:
    array = model.blocks[0].mlp.down.weight.detach().numpy()
    array[:] = array[::-1].copy()


CHANGES: dict[str, Callable[[Decoder], object]] = {
    "in place": lambda m: m.blocks[0].mlp.down.weight.mul_(-1),
    "through .data": lambda m: m.blocks[0].mlp.down.weight.data.mul_(-1),
    "one row through .data": lambda m: m.head.weight.data[50].mul_(7),
    "another .data": lambda m: setattr(m.head.weight, "data", flipped(m.head.weight, 0)),
    "load_state_dict": lambda m: m.load_state_dict(
        {key: flipped(tensor, 0) if "head" in key else tensor for key, tensor in m.state_dict().items()}
    ),
    "load_state_dict, assigned": lambda m: m.load_state_dict(
        {key: flipped(tensor, 0) if "head" in key else tensor for key, tensor in m.state_dict().items()}, assign=True
    ),
    "a new parameter": lambda m: setattr(m.head, "weight", nn.Parameter(flipped(m.head.weight, 0))),
    "a new module": lambda m: setattr(m, "head", nn.Linear(72, VOCABULARY, bias=False)),
    "rows swapped through .data": lambda m: m.head.weight.data.copy_(flipped(m.head.weight, 0)),
    "columns swapped through .data": lambda m: m.blocks[1].attention.out_proj.weight.data.copy_(
        flipped(m.blocks[1].attention.out_proj.weight, 1)
    ),
    "rows of a head of v swapped through .data": lambda m: (
        m.blocks[0].attention.v_proj.weight.data[:12].copy_(flipped(m.blocks[0].attention.v_proj.weight[:12], 0))
    ),
    "through numpy": through_numpy,
}


@pytest.mark.parametrize("how", CHANGES)
def test_weights_that_changed_are_noticed(how: str) -> None:
    model = large()
    before = model.generate("To be", 19)
    CHANGES[how](model)
    after = model.generate("To be", 19)
    assert after == forgotten(model).generate("To be", 19) == greedy(model, "To be", 19)
    assert after != before


def test_rows_of_a_permutation_swapped_through_data_are_noticed() -> None:
    """Sums by row and by column are the same for all permutations: more is needed to tell them apart."""
    model = large()
    weight = model.blocks[0].attention.out_proj.weight
    weight.copy_(3 * torch.eye(72))
    before = model.generate("To be", 19)
    weight.data.copy_(3 * torch.eye(72).roll(2, 0))
    after = model.generate("To be", 19)
    assert after == forgotten(model).generate("To be", 19)
    assert after != before


def test_a_checkerboard_swapped_through_data_is_noticed() -> None:
    model = large()
    weight = model.blocks[0].mlp.up.weight
    weight.copy_(torch.where((torch.arange(67)[:, None] // 2 + torch.arange(72) // 2) % 2 == 0, 0.5, -0.25))
    weight[64:] = 0
    before = model.generate("To be", 19)
    weight.data[:64] = weight.data[:64].roll(2, 0)
    after = model.generate("To be", 19)
    assert after == forgotten(model).generate("To be", 19)
    assert after != before


MIDWAY: dict[str, Callable[[Decoder], object]] = {
    "in place": CHANGES["in place"],
    "load_state_dict": CHANGES["load_state_dict"],
    "a new parameter": CHANGES["a new parameter"],
    "another .data": CHANGES["another .data"],
    "transposed": lambda m: setattr(
        m.blocks[0].attention.out_proj, "weight", nn.Parameter(m.blocks[0].attention.out_proj.weight.detach().t())
    ),
}


@pytest.mark.parametrize("how", MIDWAY)
def test_weights_that_change_within_a_stream_are_noticed(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    def run() -> str:
        model = large()
        stream = model.stream("To be", 41)
        out = "".join(islice(stream, 10))
        MIDWAY[how](model)
        return out + "".join(stream)

    packed = run()
    monkeypatch.setattr(Decoder, "packed", lambda _: nullcontext())
    assert packed == run()


def test_weights_changed_between_two_streams_that_overlap() -> None:
    model = large()
    one = model.stream("To be", 61)
    next(one), next(one)
    model.head.weight.data.copy_(flipped(model.head.weight, 0))
    assert model.generate("or not", 31) == forgotten(model).generate("or not", 31)
    one.close()
    assert not users()
    assert model.generate("or not", 31) == forgotten(model).generate("or not", 31)


def test_a_hook_sees_every_token() -> None:
    model, calls = large(), []
    hook = model.blocks[0].mlp.down.register_forward_hook(lambda *_: calls.append(1))
    model.generate("To be", 23)
    hook.remove()
    assert len(calls) == 23


def test_training_after_generating() -> None:
    model = large()
    model.generate("To be", 23)
    with torch.enable_grad():
        model(model.encode("To be")).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_half_precision_is_packed_and_right() -> None:
    model = large().to(torch.bfloat16)
    assert len(model.generate("To be", 23)) == 23
    before = model.generate("To be", 23)
    model.head.weight.data.copy_(flipped(model.head.weight, 0))
    assert model.generate("To be", 23) != before


def test_weights_made_in_inference_mode_generate() -> None:
    expected = large().generate("To be", 23)
    with torch.inference_mode():
        model = large()
    assert model.generate("To be", 23) == expected


@pytest.mark.parametrize(
    "how", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["deepcopy", "pickle"]
)
def test_a_copy_after_generating_generates_the_same(how: Callable[[Decoder], Decoder]) -> None:
    model = large()
    text = model.generate("To be", 23)
    other = how(model)
    assert other.generate("To be", 23) == text
    other.head.weight.data.copy_(flipped(other.head.weight, 0))
    assert other.generate("To be", 23) != text == model.generate("To be", 23)
