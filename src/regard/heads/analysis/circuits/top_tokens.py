"""The tokens that a head writes: from weights, for an attended token (`writes`), or in a run (`logit_lens`).

A head's output, through the norms that follow and the unembedding, is a number for each token: what it adds to the
token's logit directly. The scales of norms are left out, and so is the mean over all tokens, which changes no
probability.

Letters: H query heads, E head width of v, W model width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regard.checks import whole_number
from regard.errors import bad_type, bad_value
from regard.heads.analysis.circuits.reading import as_weights
from regard.heads.analysis.circuits.weights import ModelWeights
from regard.heads.record.record import LayerRecord, Record
from regard.heads.record.table import Shown, Table
from regard.models.base import tokenizing

__all__ = ["TokenLogit", "TopTokens", "logit_lens", "writes"]


class TokenLogit(NamedTuple):
    """A token: its number, its text ("token 7" without a tokenizer), and what is added to its logit."""

    token: int
    text: str
    adds: float


@dataclass(repr=False)
class TopTokens(Shown):
    """The tokens that a head makes likelier (`promotes`) and unlikelier (`suppresses`), the most first.

    `logits` (V,) is what it adds to each; `rank` the place of the token that was attended to, from 1."""

    promotes: list[TokenLogit]
    suppresses: list[TokenLogit]
    logits: Tensor
    title: str
    notes: tuple[str, ...]
    rank: int | None = None

    def table(self) -> Table:
        """A row for each place."""
        pairs = zip(self.promotes, self.suppresses, strict=True)
        return Table(
            {"promotes": repr(up.text), "adds": up.adds, "suppresses": repr(down.text), "takes": down.adds}
            for up, down in pairs
        )

    def caption(self) -> str:
        """Which head, of what, and what was left out."""
        rank = "" if self.rank is None else f", the token itself is number {self.rank} of {len(self.logits)}"
        return f"{self.title}{rank}; {'; '.join(self.notes)}"

    def __str__(self) -> str:
        return f"{self.caption()}\n{self.table()}"


@torch.no_grad()
def writes(
    model: nn.Module | ModelWeights,
    layer: int | str,
    head: int,
    token: int | str,
    *,
    top: int = 10,
    tokenizer: Any = None,
) -> TopTokens:
    """The tokens that a head writes if it attends to a token: its W_OV on the token's embedding, to the unembedding.

    Args:
        model: a model, or what `circuits.read` gives.
        layer: its number, or the name of its attention module.
        token: the token that is attended to, as a number or as a text of one token.
        top: how many tokens to list.
        tokenizer: if the model has none of its own.

    >>> from regard.models import Decoder, ModelConfig
    >>> config = ModelConfig(layers=2, embed_dim=6, num_heads=3, vocabulary=11, inner=7, context=13, causal=True)
    >>> found = writes(Decoder(config), layer=1, head=2, token=5, top=3)
    >>> len(found.promotes), found.promotes[0].adds >= found.promotes[1].adds
    (3, True)
    """
    weights = as_weights(model)
    number, head = weights.head(layer, head)
    tokenizer = weights.tokenizer if tokenizer is None else tokenizer
    token = _token(token, len(weights.sources(number)), tokenizer)
    attention = weights.layers[number]
    value = attention.value[head // attention.group].double() @ weights.arriving(number, token)  # (E,)
    logits = _logits(weights, number, value @ attention.outputs()[head])
    title = f"{attention.name} head {head} at {_text(token, tokenizer)!r}"
    found = _top(logits, top, title, weights, tokenizer)
    found.rank = int((logits > logits[token]).sum()) + 1
    return found


@torch.no_grad()
def logit_lens(
    model: nn.Module | ModelWeights,
    record: Record,
    layer: int | str,
    head: int,
    *,
    position: int = -1,
    item: int = 0,
    top: int = 10,
    tokenizer: Any = None,
) -> TopTokens:
    """The tokens that a head's actual output at a position promotes, from a record of `watch(model, keep="qkv")`.

    Args:
        model: the model that was watched, or what `circuits.read` gives of it.
        record: the record; its last text is looked at.
        layer: its number, or the name of its attention module.
        position: of the query, negative from the end; `item`: of the batch.
        top: how many tokens to list.
        tokenizer: if the model has none of its own.

    >>> import regard
    >>> from regard.models import Decoder, ModelConfig
    >>> config = ModelConfig(layers=2, embed_dim=6, num_heads=3, vocabulary=11, inner=7, context=13, causal=True)
    >>> model = Decoder(config)
    >>> with regard.watch(model, keep="qkv") as seen, torch.no_grad():
    ...     logits = model(torch.tensor([[1, 2, 3]]))
    >>> len(logit_lens(model, seen, layer=1, head=2, top=3).promotes)
    3
    """
    weights = as_weights(model)
    number, head = weights.head(layer, head)
    seen = _record_of(weights, record, number)
    batch, _, queries, _ = seen.entered.shape
    for what, index, count in (("position", position, queries), ("item", item, batch)):
        if isinstance(index, bool) or not isinstance(index, int) or not -count <= index < count:
            raise bad_value(what, expected=f"one of {count}", received=repr(index))
    written = seen.projected(slice(position % queries, position % queries + 1))[item, head, 0]  # (W,)
    logits = _logits(weights, number, written.double())
    title = f"{seen.name} head {head} at position {position % queries}"
    return _top(logits, top, title, weights, weights.tokenizer if tokenizer is None else tokenizer)


def _record_of(weights: ModelWeights, record: object, number: int) -> LayerRecord:
    """The record of a layer, checked against the weights."""
    if not isinstance(record, Record):
        raise bad_type("record", expected="what watch(model, keep='qkv') gives", received=type(record).__name__)
    layers = [layer for layer in record if layer.kind == "self"]
    if len(layers) != len(weights.layers) or layers[number].heads != weights.layers[number].heads:
        raise bad_value(
            "record",
            expected=f"one of this model, with {len(weights.layers)} layers",
            received=f"one with {len(layers)} layers of {layers[0].heads if layers else 0} heads",
        )
    return layers[number]


def _logits(weights: ModelWeights, number: int, written: Tensor) -> Tensor:
    """What a vector (W,) that a layer writes adds to each logit, less the mean: (V,)."""
    logits = weights.logits(weights.written(number, written))
    return logits - logits.mean()


def _top(logits: Tensor, top: int, title: str, weights: ModelWeights, tokenizer: Any) -> TopTokens:
    count = min(whole_number("top", top, at_least=1), len(logits))
    lists = []
    for largest in (True, False):
        best = logits.topk(count, largest=largest)
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        lists.append([TokenLogit(token, _text(token, tokenizer), adds) for token, adds in pairs])
    return TopTokens(lists[0], lists[1], logits, title, weights.notes)


def _text(token: int, tokenizer: Any) -> str:
    """A token as a text."""
    return f"token {token}" if tokenizer is None else tokenizer.decode([token], skip_special_tokens=False)


def _token(token: object, vocabulary: int, tokenizer: Any) -> int:
    """The number of a token that was given as a number or a text."""
    if isinstance(token, str):
        if tokenizer is None:
            raise bad_value("tokenizer", expected="one, for the model has none of its own", received="none")
        with tokenizing(token):
            encoded = tokenizer.encode(token, add_special_tokens=False)
        ids = list(getattr(encoded, "ids", encoded))
        if len(ids) != 1:
            raise bad_value(
                "token",
                expected="one token",
                received=f"{token!r}, which is {len(ids)}: {ids}",
                remedy="a token's number, or a text with its leading space",
            )
        return ids[0]
    if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocabulary:
        raise bad_value("token", expected=f"a token below {vocabulary}", received=repr(token))
    return token
