"""The tokenizer of a GGUF file as a `tokenizers.Tokenizer`: the file has its vocabulary and names its algorithms.

Two kinds are supported: "gpt2" (byte-level BPE, after a pre-tokenizer that the file names) and "llama" (SentencePiece
BPE, whose merges follow from the scores of the tokens).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from regard.errors import bad_value, is_panic, missing_extra
from regard.models.files import damaged
from regard.models.gguf_file import GgufFile

__all__ = ["UnknownTokenizer", "tokenizer_of"]

_CONTROL, _USER_DEFINED = 3, 4  # of tokenizer.ggml.token_type

# Pre-tokenizers by their name in GGUF: a regular expression (None: GPT-2's), and whether each digit is split off.
_NUMBERS_UP_TO_3 = "|".join(
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",  # endings of English contractions
        r"[^\r\n\p{L}\p{N}]?\p{L}+",  # a word, with one character before it
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",  # punctuation
        r"\s*[\r\n]+|\s+(?!\S)|\s+",
    )
)
_NUMBERS_OF_1 = _NUMBERS_UP_TO_3.replace(r"\p{N}{1,3}", r"\p{N}")
_PRE_TOKENIZERS: dict[str, tuple[str | None, bool]] = {
    "gpt-2": (None, False),
    "smollm": (None, True),
    "llama-bpe": (_NUMBERS_UP_TO_3, False),
    "qwen2": (_NUMBERS_OF_1, False),
}


def tokenizer_of(file: GgufFile) -> Any:
    """The tokenizer in a GGUF file, or None if it has none."""
    try:
        import tokenizers  # noqa: F401 - fails early if it is missing
    except ImportError as error:
        raise missing_extra("tokenizers", "models") from error
    kind, words = file.field("tokenizer.ggml.model"), file.field("tokenizer.ggml.tokens")
    if kind is None or words is None:
        return None
    if not isinstance(kind, str) or kind not in ("gpt2", "llama"):
        raise _unknown(file, "tokenizer.ggml.model", "gpt2 or llama", kind)
    pre = file.field("tokenizer.ggml.pre", "gpt-2")
    if kind == "gpt2" and (not isinstance(pre, str) or pre not in _PRE_TOKENIZERS):
        raise _unknown(file, "tokenizer.ggml.pre", f"one of {', '.join(_PRE_TOKENIZERS)}", pre)
    if kind == "llama" and file.field("tokenizer.ggml.scores") is None:
        raise bad_value(file.where, expected="tokenizer.ggml.scores, from which merges follow", received="none")
    try:
        return _tokenizer(file, kind, words)
    except BaseException as error:  # tokenizers raises plain Exception, and panics
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        raise damaged(Path(file.where), error, what="a GGUF file with a complete tokenizer") from error


class UnknownTokenizer(ValueError):
    """The file has a tokenizer of a kind that is not supported. The model itself can run."""


def _unknown(file: GgufFile, field: str, expected: str, received: object) -> UnknownTokenizer:
    remedy = "pass token ids; the model itself can run"
    return UnknownTokenizer(
        bad_value(f"{file.where}: {field}", expected=expected, received=repr(received), remedy=remedy)
    )


def _tokenizer(file: GgufFile, kind: str, words: list[str]) -> Any:
    """The tokenizer with its special tokens."""
    import tokenizers

    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = _byte_level(file, vocabulary) if kind == "gpt2" else _sentencepiece(file, words, vocabulary)
    kinds = file.field("tokenizer.ggml.token_type", [])
    added = [
        tokenizers.AddedToken(word, normalized=False, special=kind == _CONTROL)
        for word, kind in zip(words, kinds, strict=False)
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    tokenizer.add_tokens(added)
    _begin_and_end(file, words, tokenizer, by_default=kind == "llama")
    return tokenizer


def _byte_level(file: GgufFile, vocabulary: dict[str, int]) -> Any:
    """Byte-level BPE, as in GPT-2 and Llama 3."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    name = file.field("tokenizer.ggml.pre", "gpt-2")
    pattern, digits = _PRE_TOKENIZERS[name]
    merges = [tuple(merge.split(" ", 1)) for merge in file.field("tokenizer.ggml.merges", [])]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=name == "llama-bpe"))
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if digits else []
    if pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(pattern), behavior="isolated"))
    prefix = bool(file.field("tokenizer.ggml.add_space_prefix", False))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=pattern is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    if name == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


_LONGEST = 512  # characters of a token: SentencePiece makes no longer ones
_MERGES = 64  # per token, on average; trained vocabularies have about two


def _merges(words: list[str], scores: list[float], vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """Two tokens merge if their concatenation is a token, the one with the higher score first. The length of tokens and
    the number of merges are limited, so that a small file cannot use much memory."""
    merges: list[tuple[float, tuple[str, str]]] = []
    for number, (word, score) in enumerate(zip(words, scores, strict=True)):
        if len(word) > _LONGEST:
            raise ValueError(f"token {number} has {len(word)} characters, more than {_LONGEST}")
        cuts = ((vocabulary.get(word[:i]), vocabulary.get(word[i:])) for i in range(1, len(word)))
        known = sorted((left, right) for left, right in cuts if left is not None and right is not None)
        merges += [(score, (words[left], words[right])) for left, right in known]
        if len(merges) > _MERGES * len(words):
            raise ValueError(f"more than {_MERGES} merges for each of its {len(words)} tokens")
    merges.sort(key=lambda item: -item[0])
    return [pair for _, pair in merges]


def _sentencepiece(file: GgufFile, words: list[str], vocabulary: dict[str, int]) -> Any:
    """SentencePiece BPE, as in Llama 2."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    merges = _merges(words, file.field("tokenizer.ggml.scores"), vocabulary)
    unknown = file.field("tokenizer.ggml.unknown_token_id")
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=merges,
            unk_token=None if unknown is None else words[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = bool(file.field("tokenizer.ggml.add_space_prefix", True))
    space = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), space]) if prefix else space
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return tokenizer


def _begin_and_end(file: GgufFile, words: list[str], tokenizer: Any, *, by_default: bool) -> None:
    """Add the tokens that begin and end a text, if the file says so."""
    from tokenizers.processors import TemplateProcessing

    def special_token(kind: str, default: bool) -> tuple[str, int] | None:
        number = file.field(f"tokenizer.ggml.{kind}_token_id")
        if number is None or not file.field(f"tokenizer.ggml.add_{kind}_token", default):
            return None
        return f"<{kind}>", number  # (not the word itself: ":" and "$" have a meaning in templates)

    begin, end = special_token("bos", by_default), special_token("eos", False)
    special_tokens = [
        {"id": name, "ids": [number], "tokens": [words[number]]} for name, number in filter(None, (begin, end))
    ]
    if begin or end:
        first, last = [begin[0]] if begin else [], [end[0]] if end else []
        tokenizer.post_processor = TemplateProcessing(
            single=[*first, "$A", *last],
            pair=[*first, "$A", *last, *(f"{word}:1" for word in first), "$B:1", *(f"{word}:1" for word in last)],
            special_tokens=special_tokens,
        )
