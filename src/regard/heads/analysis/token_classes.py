"""Watch a model over many texts (`watch_all`), and classes of tokens: special, separator, punctuation."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from regard.errors import bad_type
from regard.heads.progress import track
from regard.heads.record.record import Record
from regard.heads.watch import watch
from regard.measures import MeasureLike

__all__ = ["evaluating", "is_punctuation", "run", "token_kinds", "watch_all"]


def watch_all(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    measures: MeasureLike | Iterable[MeasureLike] | None = None,
    layers: str | Iterable[str] | Callable[[str], bool] | None = None,
    progress: bool = True,
) -> Record:
    """Run a model over a corpus, in eval mode and without gradient; returns one record of means per head.

    Args:
        model: any model that `watch` can see.
        batches: inputs, one after another: a text (for regard's models), a tensor, a tuple of arguments, or a mapping
            of named ones (as returned by a tokenizer of transformers, or by `encode_batch` of regard's models).
        measures, layers: as for `watch`.
        progress: a bar on a terminal.

    >>> import regard
    >>> layer = regard.MultiHeadAttention(16, num_heads=2)
    >>> seen = watch_all(layer, [torch.randn(1, 5, 16), torch.randn(3, 7, 16)], progress=False)
    >>> seen[0].entropy.shape, seen[0].count  # 5 + 3 * 7 queries
    (torch.Size([2]), tensor([26, 26]))
    """
    if isinstance(batches, (str, Mapping)):
        raise bad_type(
            "batches",
            expected="several, one after another",
            received=f"one {type(batches).__name__}",
            remedy="a list of it",
        )
    watching = watch(model, measures=measures, layers=layers)
    watching.tracker.rereads = False  # a text that starts like the last one is another text
    with evaluating(model), watching as seen, torch.no_grad():
        for batch in track(batches, "watching", progress):
            run(model, batch)
    return seen


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model in eval mode within a `with` block; then each of its modules is as before."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def run(model: nn.Module, batch: Any) -> Any:
    """Call a model on a text, a tensor, a tuple of arguments or a mapping of named ones."""
    if isinstance(batch, str):
        encode = getattr(model, "encode", None)
        if encode is None:
            raise bad_type(
                "batch",
                expected="tensors, for this model has no tokenizer",
                received="a text",
                remedy="what its tokenizer gives, as a mapping: tokenizer(text, return_tensors='pt')",
            )
        return model(encode(batch))
    if hasattr(batch, "_asdict"):  # a named tuple, such as `encode_batch` gives
        return model(**batch._asdict())
    if isinstance(batch, Mapping) or hasattr(batch, "keys"):
        return model(**batch)
    if isinstance(batch, Tensor):
        return model(batch)
    if isinstance(batch, (tuple, list)):
        return model(*batch)
    raise bad_type("batch", expected="a text, a tensor, a tuple or a mapping", received=type(batch).__name__)


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
