"""What is known of the tokens of a text: which are special, punctuation, or parts of one word.

Letters: B batch, N queries, M keys, K other tokens of a word.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from regard.errors import bad_type, bad_value
from regard.heads.analysis.evidence import TokenFacts
from regard.heads.analysis.labels import Labels
from regard.heads.analysis.token_classes import SEPARATORS, is_punctuation
from regard.heads.module_names import SPECIAL_IDS
from regard.heads.record.sequences import SequenceRecord

if TYPE_CHECKING:
    from regard.heads.record.record import LayerRecord, Record

__all__ = ["checked_tokens", "facts_of", "first_of_target", "same_word", "tokens_of"]


def facts_of(record: Record, text: SequenceRecord, tokens: Sequence[Sequence[str]] | None) -> TokenFacts:
    """What is known of a text. `tokens`: a list for each item of the batch, or one for all; by default those that the
    tokenizer of the model says, if it has one."""
    model = record.model()
    rows = _read(model, text) if tokens is None else [_with_padding(row, text, i) for i, row in enumerate(tokens)]
    if rows is None:
        return TokenFacts(special=_special_by_id(model, text))
    labels = [Labels.of(row) for row in rows]
    special = torch.tensor([label.special for label in labels], device="cpu")
    by_id = _special_by_id(model, text)
    special = special if by_id is None else special | by_id.to(special.device)
    classes = {
        "separator": torch.tensor([[token in SEPARATORS for token in row] for row in rows], device="cpu"),
        "punctuation": torch.tensor([[is_punctuation(token) for token in row] for row in rows], device="cpu"),
    }
    words = [[-1 if s else w for w, s in zip(x.word, x.special, strict=True)] for x in labels]
    device = text.pieces[0].found.seen.device
    found = {name: which.to(device) for name, which in classes.items() if which.any()}
    return TokenFacts(special.to(device), found, same_word(words, text.queries, device))


def same_word(words: Sequence[Sequence[int]], queries: int, device: torch.device | None = None) -> Tensor | None:
    """The other tokens of each token's word, (B, N, K), -1 for none; None if all words are of one token. `words`: the
    number of each token's word, -1 for none, a list for each text. The queries are the last tokens.

    >>> same_word([[-1, 0, 1, 1]], 4)
    tensor([[[-1],
             [-1],
             [ 3],
             [ 2]]])
    """
    others: list[list[list[int]]] = []
    for row in words:
        places: dict[int, list[int]] = {}
        for place, word in enumerate(row):
            places.setdefault(word, []).append(place)
        others.append(
            [[] if word < 0 else [x for x in places[word] if x != place] for place, word in enumerate(row)][-queries:]
        )
    most = max((len(keys) for row in others for keys in row), default=0)
    if not most:
        return None
    return torch.tensor([[keys + [-1] * (most - len(keys)) for keys in row] for row in others], device=device)


def _read(model: Any, text: SequenceRecord) -> list[list[str]] | None:
    """The tokens that a model's tokenizer has for a text's ids; "" for padding."""
    tokenizer: Any = getattr(model, "tokenizer", None)
    if text.ids is None or text.ids.shape[1] != text.total or not hasattr(tokenizer, "id_to_token"):
        return None
    rows = [[tokenizer.id_to_token(number) or "" for number in row] for row in text.ids.tolist()]
    if text.key_padding is not None:
        rows = rows * text.shape[0] if len(rows) == 1 else rows
        padding = text.key_padding.tolist()
        rows = [
            ["" if hidden else token for token, hidden in zip(*pair, strict=True)]
            for pair in zip(rows, padding, strict=True)
        ]
    return rows


def _special_by_id(model: Any, text: SequenceRecord) -> Tensor | None:
    """Special tokens by the ids that a model's configuration names: (1|B, M)."""
    config = getattr(model, "config", None)
    named = [getattr(config, name, None) for name in SPECIAL_IDS]
    ids = [x for number in named for x in (number if isinstance(number, (list, tuple)) else [number])]
    ids = [x for x in ids if isinstance(x, int)]
    if text.ids is None or text.ids.shape[1] != text.total or not ids:
        return None
    return torch.isin(text.ids, torch.tensor(ids, device=text.ids.device))


def tokens_of(record: Record, tokens: Any) -> dict[str, list[list[str]] | None]:
    """The tokens of each layer's text, by the layer's name: a list for each item of the batch; None if `tokens` do not
    fit the text. `tokens` are as `record.tokens`: a list, a list of lists, or a pair of such (source, target)."""
    pair = isinstance(tokens, tuple) and len(tokens) == 2 and not any(isinstance(part, str) for part in tokens)
    sides = list(tokens) if pair else [tokens, tokens]
    target = first_of_target(record)
    return {layer.name: _fitting(layer, sides[number >= target]) for number, layer in enumerate(record)}


def first_of_target(record: Record) -> int:
    """The index of the first layer of a decoder with cross attention: the self attention before the first cross
    attention; where there are `record.source_layers`, of the first layer that is none of them."""
    kinds = [layer.kind for layer in record]
    if record.source_layers:
        return next((i for i, layer in enumerate(record) if layer.name not in record.source_layers), len(kinds))
    if "cross" not in kinds:
        return len(kinds)
    first = kinds.index("cross")
    return first - 1 if first and kinds[first - 1] == "self" else first


def _fitting(layer: LayerRecord, tokens: Any) -> list[list[str]] | None:
    """Tokens in lists, if they are those of the one text that a layer has seen."""
    if not isinstance(tokens, (list, tuple)) or not tokens or layer.texts != 1:
        return None
    batch, total = layer.batch_size, layer.num_keys
    rows = [list(row) for row in tokens] if isinstance(tokens[0], (list, tuple)) else [list(tokens)]
    if layer.num_chunks > 1:  # generated: the last token was never an input
        rows = [row[:-1] if len(row) == total + 1 else row for row in rows]
    fits = len(rows) == batch and all(len(row) == total or (batch > 1 and len(row) < total) for row in rows)
    return [[str(token) for token in row] for row in rows] if fits else None


def checked_tokens(layer: LayerRecord, tokens: Any) -> list[list[str]]:
    """Tokens that a caller gave for the text of a layer, as a list for each item of the batch, or one for all."""
    if layer.texts > 1:
        raise bad_value(
            "tokens",
            expected="a record of one text, which they belong to",
            received=f"{layer.texts} texts",
            remedy="a model with a tokenizer, which needs no tokens",
        )
    rows = [tokens] if tokens and isinstance(tokens[0], str) else list(tokens)
    if not all(isinstance(row, (list, tuple)) and all(isinstance(t, str) for t in row) for row in rows):
        raise bad_type("tokens", expected="a list of words, or a list of lists of them", received=f"{tokens!r:.60}")
    batch, longest = layer.batch_size, layer.num_keys
    least = longest if batch == 1 else 0  # in a batch, shorter texts are padded
    if len(rows) not in (1, batch) or not all(least <= len(row) <= longest for row in rows):
        raise bad_value(
            "tokens", expected=f"{longest} for each of {batch} texts", received=f"{[len(row) for row in rows]}"
        )
    return rows


def _with_padding(row: Sequence[str], text: SequenceRecord, item: int) -> list[str]:
    """The tokens of one text with "" for padding, on the left or on the right: one for each key."""
    padding = None if text.key_padding is None else text.key_padding[item]
    if padding is not None and len(row) == int((~padding).sum()):
        words = iter(row)
        return ["" if is_padding else next(words) for is_padding in padding.tolist()]
    return [*row, *[""] * (text.total - len(row))]
