"""The tokenizer of a GGUF file as a `tokenizers.Tokenizer`: the file holds the vocabulary and names the rest.

Two kinds are there: "gpt2" (byte-level BPE; the text is first cut by a rule that has a name) and "llama" (SentencePiece
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

# The rules by which text is cut before the merges, by the name that GGUF gives them: a regular expression; None for
# GPT-2's own; and whether each digit stands alone.
_NUMBERS_UP_TO_3 = "|".join(
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",  # endings of English contractions
        r"[^\r\n\p{L}\p{N}]?\p{L}+",  # a word, with what stands before it
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",  # marks
        r"\s*[\r\n]+|\s+(?!\S)|\s+",
    )
)
_NUMBERS_OF_1 = _NUMBERS_UP_TO_3.replace(r"\p{N}{1,3}", r"\p{N}")
_CUTS: dict[str, tuple[str | None, bool]] = {
    "gpt-2": (None, False),
    "smollm": (None, True),
    "llama-bpe": (_NUMBERS_UP_TO_3, False),
    "qwen2": (_NUMBERS_OF_1, False),
}


def tokenizer_of(file: GgufFile) -> Any:
    """The tokenizer in a GGUF file, or None where there is none."""
    try:
        import tokenizers  # noqa: F401 - asked for before anything is made
    except ImportError as error:
        raise missing_extra("tokenizers", "models") from error
    kind, words = file.field("tokenizer.ggml.model"), file.field("tokenizer.ggml.tokens")
    if kind is None or words is None:
        return None
    if not isinstance(kind, str) or kind not in ("gpt2", "llama"):
        raise _unknown(file, "tokenizer.ggml.model", "gpt2 or llama", kind)
    cut = file.field("tokenizer.ggml.pre", "gpt-2")
    if kind == "gpt2" and (not isinstance(cut, str) or cut not in _CUTS):
        raise _unknown(file, "tokenizer.ggml.pre", f"one of {', '.join(_CUTS)}", cut)
    if kind == "llama" and file.field("tokenizer.ggml.scores") is None:
        raise bad_value(file.where, expected="tokenizer.ggml.scores, from which merges follow", received="none")
    try:
        return _tokenizer(file, kind, words)
    except BaseException as error:  # tokenizers raises plain Exception, and panics
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        raise damaged(Path(file.where), error, what="a GGUF file with a whole tokenizer") from error


class UnknownTokenizer(ValueError):
    """A tokenizer of a kind that is not known. The model itself can run."""


def _unknown(file: GgufFile, field: str, expected: str, received: object) -> UnknownTokenizer:
    remedy = "pass token ids: the model itself can run"
    return UnknownTokenizer(
        bad_value(f"{file.where}: {field}", expected=expected, received=repr(received), remedy=remedy)
    )


def _tokenizer(file: GgufFile, kind: str, words: list[str]) -> Any:
    import tokenizers

    vocabulary = {word: number for number, word in enumerate(words)}
    made = _byte_level(file, vocabulary) if kind == "gpt2" else _sentencepiece(file, words, vocabulary)
    kinds = file.field("tokenizer.ggml.token_type", [])
    added = [
        tokenizers.AddedToken(word, normalized=False, special=kind == _CONTROL)
        for word, kind in zip(words, kinds, strict=False)
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    made.add_tokens(added)
    _begin_and_end(file, words, made, by_default=kind == "llama")
    return made


def _byte_level(file: GgufFile, vocabulary: dict[str, int]) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    name = file.field("tokenizer.ggml.pre", "gpt-2")
    pattern, digits = _CUTS[name]
    merges = [tuple(merge.split(" ", 1)) for merge in file.field("tokenizer.ggml.merges", [])]
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=name == "llama-bpe"))
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if digits else []
    if pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(pattern), behavior="isolated"))
    prefix = bool(file.field("tokenizer.ggml.add_space_prefix", False))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=pattern is None))
    made.pre_tokenizer = pre_tokenizers.Sequence(steps)
    made.decoder = decoders.ByteLevel()
    if name == "qwen2":
        made.normalizer = normalizers.NFC()
    return made


_LONGEST = 512  # letters of a token: SentencePiece makes none that are longer
_MERGES = 64  # that give the same token, on average; in vocabularies that were trained there are about two


def _merges(words: list[str], scores: list[float], vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """Two tokens merge if their union is a token, the likelier union first. A token of L letters may be cut in L - 1
    places, each cut copies it: both are limited, so that a small file cannot ask for much memory."""
    merges: list[tuple[float, tuple[str, str]]] = []
    for number, (word, score) in enumerate(zip(words, scores, strict=True)):
        if len(word) > _LONGEST:
            raise ValueError(f"token {number} has {len(word)} letters, and {_LONGEST} are the most")
        cuts = ((vocabulary.get(word[:i]), vocabulary.get(word[i:])) for i in range(1, len(word)))
        known = sorted((left, right) for left, right in cuts if left is not None and right is not None)
        merges += [(score, (words[left], words[right])) for left, right in known]
        if len(merges) > _MERGES * len(words):
            raise ValueError(f"more than {_MERGES} merges for each of its {len(words)} tokens")
    merges.sort(key=lambda item: -item[0])
    return [pair for _, pair in merges]


def _sentencepiece(file: GgufFile, words: list[str], vocabulary: dict[str, int]) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers

    merges = _merges(words, file.field("tokenizer.ggml.scores"), vocabulary)
    unknown = file.field("tokenizer.ggml.unknown_token_id")
    made = Tokenizer(
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
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), space]) if prefix else space
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return made


def _begin_and_end(file: GgufFile, words: list[str], made: Any, *, by_default: bool) -> None:
    """Put the tokens that begin and end a text around it, where the file says so."""
    from tokenizers.processors import TemplateProcessing

    def wanted(kind: str, default: bool) -> tuple[str, int] | None:
        number = file.field(f"tokenizer.ggml.{kind}_token_id")
        if number is None or not file.field(f"tokenizer.ggml.add_{kind}_token", default):
            return None
        return f"<{kind}>", number  # a name of our own: to a template, ":" and "$" in a word mean something

    begin, end = wanted("bos", by_default), wanted("eos", False)
    pieces = [{"id": name, "ids": [number], "tokens": [words[number]]} for name, number in filter(None, (begin, end))]
    if begin or end:
        first, last = [begin[0]] if begin else [], [end[0]] if end else []
        made.post_processor = TemplateProcessing(
            single=[*first, "$A", *last],
            pair=[*first, "$A", *last, *(f"{word}:1" for word in first), "$B:1", *(f"{word}:1" for word in last)],
            special_tokens=pieces,
        )
