"""Classes of tokens: special, separator, punctuation."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from typing import Any

from torch import nn

from regard.errors import bad_type

__all__ = ["SEPARATORS", "as_text", "is_punctuation", "looks_special", "token_kinds"]


def is_punctuation(token: str) -> bool:
    """Whether a token is only punctuation, apart from the tokenizer's marks of word boundaries. Byte-level tokens are
    decoded.

    >>> [is_punctuation(t) for t in (",", "##.", "Ġ!", "a.", "[SEP]", "▁", "âĢĻ")]
    [True, True, True, False, False, False, True]
    """
    token = as_text(token) or token
    for mark in ("Ġ", "▁", "</w>"):
        token = token.replace(mark, "")
    token = token.removeprefix("##") or token
    return bool(token.strip()) and all(unicodedata.category(c)[0] in "PS" for c in token.strip())


def as_text(token: str) -> str | None:
    """The text of a byte-level token, as GPT-2 has them; None if it is none, or holds a part of a character."""
    try:
        return bytes(_BYTES[c] for c in token).decode()
    except (KeyError, UnicodeDecodeError):
        return None


# GPT-2's byte-level alphabet: printable bytes stand for themselves, the others for characters from 256 on.
_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
_BYTES = {chr(byte): byte for byte in _PRINTABLE}
_BYTES |= {chr(256 + i): byte for i, byte in enumerate(sorted(set(range(256)) - set(_PRINTABLE)))}


def token_kinds(tokenizer: Any) -> dict[str, list[int]]:
    """Classes of token ids for `measures.Tokens`: "special", "separator" and "punctuation", where a tokenizer has them.

    `tokenizer` is one of transformers or of tokenizers, or a regard model that has one.
    """
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer) if isinstance(tokenizer, nn.Module) else tokenizer
    if not hasattr(tokenizer, "get_vocab"):
        raise bad_type(
            "tokenizer",
            expected="a tokenizer of transformers or tokenizers, or a model that has one",
            received=type(tokenizer).__name__,
        )
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    special, by_bytes = _special(tokenizer, vocabulary), "Ġ" in vocabulary
    kinds = {
        "special": sorted(vocabulary[token] for token in special if token in vocabulary),
        "separator": [vocabulary[token] for token in SEPARATORS if token in vocabulary],
        "punctuation": sorted(
            number
            for token, number in vocabulary.items()
            if token not in special and is_punctuation(token) and (not by_bytes or as_text(token))
        ),
    }
    return {name: ids for name, ids in kinds.items() if ids}


SEPARATORS = ("[SEP]", "</s>", "<sep>", "<|im_end|>", "<|endoftext|>", "<eos>")


def _special(tokenizer: Any, vocabulary: Mapping[str, int]) -> set[str]:
    """The special tokens of a tokenizer; if it does not say, those that look like it."""
    added = getattr(tokenizer, "added_tokens_decoder", None)  # of transformers
    if added is None and hasattr(tokenizer, "get_added_tokens_decoder"):  # of tokenizers
        added = tokenizer.get_added_tokens_decoder()
    if added is None:
        return {token for token in vocabulary if looks_special(token)}
    special = {token.content for token in added.values() if token.special}
    return special | set(getattr(tokenizer, "all_special_tokens", ()))


def looks_special(token: str) -> bool:
    """Whether a token is spelled like a special one: [CLS], <s>, <|endoftext|>."""
    pairs = (("[", "]"), ("<|", "|>"), ("<", ">"))
    return len(token) > 2 and any(
        token.startswith(a) and token.endswith(b) and token[len(a) : -len(b)].replace("_", "").isalnum()
        for a, b in pairs
    )
