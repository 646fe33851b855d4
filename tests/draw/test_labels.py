"""Labels against what a reader reads, tokenizer by tokenizer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard.heads.analysis.labels import Labels

# Tokens as each tokenizer spells them, what is read, and the words they make. Written down from the tokenizers.
ORACLE = {
    "WordPiece": (
        ["[CLS]", "the", "un", "##bel", "##ie", "##vable", "don", "'", "t", "[SEP]"],
        ["[CLS]", "the", "un", "##bel", "##ie", "##vable", "don", "'", "t", "[SEP]"],
        ["[CLS]", "the", "unbelievable", "don", "'", "t", "[SEP]"],
    ),
    "WordPiece without pieces": (["[CLS]", "the", "cat", "[SEP]"],) * 3,
    "bytes": (
        ["Once", "Ġupon", "Ġa", "Ġt", "ime", ",", "ĊĊ", "Ġ", "ĠMr", ".", "Ġ3", "14"],
        ["Once", "upon", "a", "t", "ime", ",", "⏎⏎", "␣", "Mr", ".", "3", "14"],
        ["Once", "upon", "a", "time", ",", "⏎⏎", "␣", "Mr", ".", "314"],
    ),
    "bytes, a heading": (["###", "ĠTitle", "Ċ"], ["###", "Title", "⏎"], ["###", "Title", "⏎"]),
    "bytes of a Chinese text": (["çĮ«", "åľ¨", "ãĢĤ"], ["猫", "在", "。"], ["猫在", "。"]),
    "bytes that are parts of a letter": (["Ġç", "Į«", "Ġa"], ["ç", "Į«", "a"], ["çĮ«", "a"]),
    "bytes of Devanagari": (["Ġà¤¨", "à¤®", "à¤¸", "à¥į", "à¤¤", "à¥ĩ"], ["न", "म", "स", "्", "त", "े"], ["नमस्ते"]),
    "bytes with a special token": (
        ["<|im_start|>", "user", "Ċ", "Hi", "<|im_end|>"],
        ["<|im_start|>", "user", "⏎", "Hi", "<|im_end|>"],
        ["<|im_start|>", "user", "⏎", "Hi", "<|im_end|>"],
    ),
    "sentencepiece": (
        ["<s>", "▁The", "▁c", "ats", "▁sat", ".", "▁", "▁▁", "</s>"],
        ["<s>", "The", "c", "ats", "sat", ".", "␣", "␣", "</s>"],
        ["<s>", "The", "cats", "sat", ".", "␣", "␣", "</s>"],
    ),
    "sentencepiece, by bytes": (
        ["<s>", "▁a", "<0x0A>", "▁", "<0xE7>", "<0x8C>", "<0xAB>"],
        ["<s>", "a", "⏎", "␣", "<0xE7>", "<0x8C>", "<0xAB>"],
        ["<s>", "a", "⏎", "␣<0xE7><0x8C><0xAB>"],
    ),
    "CLIP": (
        ["<|startoftext|>", "a</w>", "photo</w>", "gr", "aph</w>", "<|endoftext|>"],
        ["<|startoftext|>", "a", "photo", "gr", "aph", "<|endoftext|>"],
        ["<|startoftext|>", "a", "photo", "graph", "<|endoftext|>"],
    ),
    "decoded one by one": (
        [b"Once", " upon", " a", " t", "ime"],
        ["Once", "upon", "a", "t", "ime"],
        ["Once", "upon", "a", "time"],
    ),
    "CJK": (["[CLS]", "猫", "が", "好", "き", "[SEP]"],) * 3,
    "emoji": (["👨‍👩‍👧", "👍🏽", "❤️", "🇩🇪"],) * 3,
    "right to left": (["שלום", "مرحبا", "می‌خواهم"],) * 3,
    "controls": (
        ["\x1b[31m", "a\nb", "\t", "\r", "\0", "\x07", "\x9b", "\u202e", "\ud800", "\u2028", "\u200d"],
        ["\\u001b[31m", "a⏎b", "⇥", "␍", "␀", "\\u0007", "\\u009b", "\\u202e", "\\ud800", "\\u2028", "\\u200d"],
        ["\\u001b[31m", "a⏎b", "⇥", "␍", "␀", "\\u0007", "\\u009b", "\\u202e", "\\ud800", "\\u2028", "\\u200d"],
    ),
    "spaces": (["", " ", "   "], ["␣", "␣", "␣␣␣"], ["␣", "␣", "␣␣␣"]),
    "numbers": ([101, 7, 102], ["101", "7", "102"], ["101", "7", "102"]),
}


@pytest.mark.parametrize("tokens, text, words", ORACLE.values(), ids=ORACLE.keys())
def test_reads_as_a_reader_reads(tokens: list[object], text: list[str], words: list[str]) -> None:
    labels = Labels.of(tokens)
    assert labels.text == text
    assert labels.words == words
    assert len(labels) == len(labels.word) == len(labels.special) == len(tokens)


@pytest.mark.parametrize("mark", ["Ġ", "▁", " ", "##x"])
def test_an_empty_token_is_a_word_of_its_own(mark: str) -> None:
    labels = Labels.of([mark + "a", "", "."])
    assert labels.text[1:] == ["␣", "."]
    assert len(set(labels.word)) == 3


def test_special_by_looks_or_as_told() -> None:
    tokens = ["[CLS]", "<s>", "<|end|>", "[MASK]", "<0x0A>", "<0xE7>", "[", "<", "[]", "a", "[a b]"]
    assert Labels.of(tokens).special == [True] * 4 + [False] * 7
    assert Labels.of(tokens, special=["a"]).special == [token == "a" for token in tokens]


def test_a_token_of_ten_thousand_characters() -> None:
    assert Labels.of(["a", "x" * 10_000]).text[1] == "x" * 10_000
    assert Labels.of(["Ġa", "Ġ" + "çĮ«" * 10_000]).text[1] == "猫" * 10_000


def test_padding_has_no_name() -> None:
    labels = Labels.of(["Ġa", "b"]).padded(5)
    assert labels == Labels(["a", "b", "+1", "+2", "+3"], [False, False, True, True, True], [0, 0, 1, 2, 3])
    assert labels.words == ["ab", "+1", "+2", "+3"]


def test_numbers() -> None:
    assert Labels.numbers(3) == Labels(["0", "1", "2"], [False] * 3, [0, 1, 2])
    assert Labels.numbers(0).words == []


_ODD = st.sampled_from(["Ġ", "▁", "##", "</w>", "Ċ", " ", "", "\x1b[2J", "\u202e", "\u200d", "猫", "çĮ«", "<0x1B>"])


@given(st.lists(st.lists(st.one_of(_ODD, st.text(max_size=5)), max_size=3).map("".join), max_size=7))
def test_whatever_the_tokens_are(tokens: list[str]) -> None:
    labels = Labels.of(tokens)
    assert len(labels.text) == len(labels.special) == len(labels.word) == len(tokens)
    assert all(labels.text)
    steps = [b - a for a, b in zip([-1, *labels.word], labels.word, strict=False)]
    assert set(steps[:1]) <= {1}
    assert set(steps) <= {0, 1}
    assert len(labels.words) == len(set(labels.word))
    assert all(c.isprintable() or c in "\u200c\u200d" for text in labels.text for c in text)
