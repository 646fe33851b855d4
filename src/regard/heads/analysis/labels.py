"""Tokens as labels: without the marks of tokenizers; which are special, and which form one word."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from regard.heads.analysis.token_classes import as_text, looks_special

__all__ = ["Labels"]

_VISIBLE = str.maketrans({"\n": "⏎", "\r": "␍", "\t": "⇥", "\0": "␀"})
_JOINERS = "\u200c\u200d"  # within words, and within joined emoji
_PATCH = re.compile(r"r\d+c\d+")  # a patch of an image, by its place
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # how sentencepiece spells bytes


@dataclass(frozen=True)
class Labels:
    """The tokens of one text: `text` to be shown, which are `special`, and the number of the `word` each is part of."""

    text: list[str]
    special: list[bool]
    word: list[int]

    @classmethod
    def of(cls, tokens: Iterable[object], special: Collection[str] = ()) -> Labels:
        """From tokens as a tokenizer spells them. `special`: its special tokens; by default those that look like it.

        >>> labels = Labels.of(["[CLS]", "the", "un", "##seen", "[SEP]"])
        >>> labels.words, labels.special
        (['[CLS]', 'the', 'unseen', '[SEP]'], [True, False, False, False, True])
        >>> Labels.of(["Once", "Ġup", "on", "Ċ"]).text
        ['Once', 'up', 'on', '⏎']
        """
        spelled = [token.decode(errors="replace") if isinstance(token, bytes) else str(token) for token in tokens]
        marks = _marks(spelled)
        text = [_readable(token, marks) for token in spelled]
        is_special = [token in special if special else _looks_special(token) for token in spelled]
        word, number = [], -1
        for i, token in enumerate(spelled):
            before = spelled[i - 1] if i else ""
            if not i or is_special[i] or is_special[i - 1] or _begins(token, before, marks):
                number += 1
            word.append(number)
        return cls(text, is_special, word)

    @classmethod
    def numbers(cls, count: int) -> Labels:
        """Labels 0, 1, 2 ... for what has no tokens, such as patches of an image."""
        return cls([str(i) for i in range(count)], [False] * count, list(range(count)))

    def padded(self, count: int) -> Labels:
        """Extended to `count` labels: for padding, or keys that a layer adds to its text."""
        more = count - len(self.text)
        last = self.word[-1] if self.word else -1
        extra = [last + 1 + i for i in range(more)]
        return Labels(self.text + [f"+{i + 1}" for i in range(more)], self.special + [True] * more, self.word + extra)

    @property
    def words(self) -> list[str]:
        """The words, each of one token or more."""
        words: list[str] = []
        for text, word in zip(self.text, self.word, strict=True):
            if word == len(words):
                words.append(text)
            else:
                words[word] += text.removeprefix("##") or text
        return words

    def __len__(self) -> int:
        return len(self.text)


def _looks_special(token: str) -> bool:
    return looks_special(token) and not _BYTE.fullmatch(token)


def _marks(tokens: Sequence[str]) -> str:
    """How a tokenizer marks words: "##" within one, "Ġ" (bytes), "▁" or a space at the start of one, "</w>" at its
    end."""
    if any(re.match("##[^#]", token) for token in tokens):  # (not "###", which begins a heading)
        return "##"
    for mark in ("Ġ", "▁"):
        if any(token.startswith(mark) for token in tokens):
            return mark
    if any(token.endswith("</w>") for token in tokens):
        return "</w>"
    if any("Ċ" in token or _in_bytes(token) for token in tokens):
        return "Ġ"
    return " " if any(token.startswith(" ") and token.strip() for token in tokens) else ""


def _in_bytes(token: str) -> bool:
    """Whether a token spells a letter as bytes: "çĮ«" for "猫"."""
    plain = as_text(token)
    return plain is not None and not plain.isascii() and plain.isprintable()


def _begins(token: str, before: str, marks: str) -> bool:
    """Whether a token begins a word, given the token before it."""
    if _PATCH.fullmatch(token) or _PATCH.fullmatch(before):
        return True
    if marks == "##":
        return not token.startswith("##")
    if marks == "</w>":
        return before.endswith("</w>")
    if marks:  # letters and digits continue a word; a mark, a space or a sign begins one
        inside = _within_word(token, marks, 0) and (before == marks or _within_word(before, marks, -1))
        return token.startswith(marks) or not inside
    return True


def _within_word(token: str, marks: str, place: int) -> bool:
    """Whether a token's first or last character belongs to a word: a letter, a digit, a combining mark."""
    plain = as_text(token) if marks == "Ġ" else token
    byte = _BYTE.fullmatch(token)
    if plain is None or (byte and int(byte[1], 16) >= 128):  # (a part of a letter's bytes)
        return True
    letter = plain[place : place + 1 or None]
    return bool(letter) and (letter.isalnum() or letter in _JOINERS or unicodedata.category(letter)[0] == "M")


def _readable(token: str, marks: str) -> str:
    """A token without its marks, with visible signs for white space and escapes for control characters."""
    if marks == "Ġ":
        plain = as_text(token)
        token = token.removeprefix("Ġ") if plain is None else plain.removeprefix(" ")
    elif marks in ("▁", " "):
        token = token.removeprefix(marks).replace("▁", " ")
    elif marks == "</w>":
        token = token.removesuffix("</w>")
    byte = _BYTE.fullmatch(token)
    if byte and int(byte[1], 16) < 128:
        token = chr(int(byte[1], 16))
    token = "".join(c if _shown(c, token) else f"\\u{ord(c):04x}" for c in token)
    return token.translate(_VISIBLE) if token.strip(" ") else "␣" * max(len(token), 1)


def _shown(c: str, token: str) -> bool:
    """Whether a character is printable, has a visible sign, or joins its neighbours."""
    return c.isprintable() or c in "\n\r\t\0" or (c in _JOINERS and not token.isascii() and len(token) > 1)
