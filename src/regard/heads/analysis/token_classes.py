"""Watch a model over many texts; and the classes of tokens that a tokenizer knows."""

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
    """Run a model over a corpus, in evaluation and without gradient, and give one record of means per head.

    Args:
        model: any model that `watch` can see.
        batches: what to run it on, one after another: a text (regard's models), a tensor, a tuple of arguments, or a
            mapping of named ones (such as a tokenizer of transformers gives, or `encode_batch` of regard's models).
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
    watching.places.rereads = False  # a text that begins as the last one did is a text of its own
    with evaluating(model), watching as seen, torch.no_grad():
        for batch in track(batches, "watching", progress):
            run(model, batch)
    return seen


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Within it a model is in evaluation; then each of its modules is as it was."""
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
    """Whether a token is nothing but punctuation, whatever marks of words its tokenizer puts around it, and whether it
    spells characters as they are or as bytes.

    >>> [is_punctuation(t) for t in (",", "##.", "Ġ!", "a.", "[SEP]", "▁", "âĢĻ")]
    [True, True, True, False, False, False, True]
    """
    token = as_text(token) or token
    for mark in ("Ġ", "▁", "</w>"):
        token = token.replace(mark, "")
    token = token.removeprefix("##") or token
    return bool(token.strip()) and all(unicodedata.category(c)[0] in "PS" for c in token.strip())


def as_text(token: str) -> str | None:
    """What a token says that is spelled in bytes, as GPT-2's are; None for what is none, or a part of a character."""
    try:
        return bytes(_BYTES[c] for c in token).decode()
    except (KeyError, UnicodeDecodeError):
        return None


# Bytes that are printable stand for themselves, the others for what comes from 256 on.
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
    """The tokens that a tokenizer calls special; those that look it, where it does not say."""
    added = getattr(tokenizer, "added_tokens_decoder", None)  # of transformers
    if added is None and hasattr(tokenizer, "get_added_tokens_decoder"):  # of tokenizers
        added = tokenizer.get_added_tokens_decoder()
    if added is None:
        return {token for token in vocabulary if looks_special(token)}
    said = {token.content for token in added.values() if token.special}
    return said | set(getattr(tokenizer, "all_special_tokens", ()))


def looks_special(token: str) -> bool:
    """Whether a token is spelled as special ones are: [CLS], <s>, <|endoftext|>."""
    pairs = (("[", "]"), ("<|", "|>"), ("<", ">"))
    return len(token) > 2 and any(
        token.startswith(a) and token.endswith(b) and token[len(a) : -len(b)].replace("_", "").isalnum()
        for a, b in pairs
    )
