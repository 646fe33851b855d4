"""The weights that circuits are made of: q, k, v and output of every head, the norms around them, the embeddings.

    token -> embedding -> (norm) -> stream -> (reads) -> q, k, v of a head -> output -> stream -> (leaves) -> ...
                                    stream -> (last norm) -> unembedding -> logits

A norm multiplies by a weight, subtracts the mean (LayerNorm) and divides by a scale. All but the scale is linear and is
folded into the weights; the scale depends on the token and is left out (held at 1). So are all biases, and whatever
depends on positions other than rotary.

Letters: H query heads, G kv heads, D head width of q and k, E of v, W model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from regard.errors import bad_type, bad_value, shape_of
from regard.heads.analysis.circuits.factored import FactoredMatrix
from regard.heads.interventions.residual_stream import LinearNorm
from regard.positions import Rotary

__all__ = ["LayerWeights", "ModelWeights", "folded", "passed"]

_ROWS = 4096  # of an embedding that are converted to float64 at a time


@dataclass
class LayerWeights:
    """The weights of one attention layer, as `nn.Linear` has them, and the norms around it.

    Attributes:
        name: of the attention module.
        query, key, value: (H, D, W), (G, D, W) and (G, E, W); query head i uses kv head i // (H // G).
        output: (H, W, E), each head's columns of the output projection.
        scale: of the scores.
        rotary: the rotary positions of q and k, if there are any.
        reads: the norm between the stream and q, k and v (pre-norm models).
        leaves: norms that the stream passes after the heads were added, before the next layer (post-norm models).
        why_no_qk: why a score is no bilinear function of two tokens, in words; "" if it is.
    """

    name: str
    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    scale: float = 1.0
    rotary: Rotary | None = None
    reads: LinearNorm | None = None
    leaves: tuple[LinearNorm, ...] = ()
    why_no_qk: str = ""

    def __post_init__(self) -> None:
        (h, d, w), (g, *_), (_, e, _) = (tuple(t.shape) for t in (self.query, self.key, self.value))
        for what, shape in (("key", (g, d, w)), ("value", (g, e, w)), ("output", (h, w, e))):
            if tuple(getattr(self, what).shape) != shape or h % g:
                raise bad_value(
                    f"{self.name}: {what}",
                    expected=f"{shape} for query {shape_of(self.query)}, G a divisor of H",
                    received=shape_of(getattr(self, what)),
                )

    @property
    def heads(self) -> int:
        """H."""
        return self.query.shape[0]

    @property
    def group(self) -> int:
        """How many query heads share a kv head: H // G."""
        return self.query.shape[0] // self.key.shape[0]

    def values(self) -> Tensor:
        """What each kv head reads, its norm folded in: (G, E, W), float64."""
        return folded(self.value.double(), [self.reads])

    def outputs(self) -> Tensor:
        """What each head writes for each of its E values: (H, E, W), float64."""
        return self.output.double().mT

    def rotated(self, offset: int = 0) -> tuple[Tensor, Tensor]:
        """q (H, D, W) and k (G, D, W), the norm folded in and turned by rotary for a key `offset` tokens before the
        query; float64. Raises if the scores are not bilinear."""
        if isinstance(offset, bool) or not isinstance(offset, int):
            raise bad_type("offset", expected="an integer: how far the key is before the query", received=repr(offset))
        if self.why_no_qk:
            raise bad_value(
                self.name,
                expected="scores that are a product of q and k",
                received=self.why_no_qk,
                remedy="circuits.ov, circuits.copying, circuits.composition(model, kinds='v')",
            )
        q, k = (folded(x.double(), [self.reads]) for x in (self.query, self.key))
        if self.rotary is None:
            return q, k
        return self._turned(q, max(offset, 0), abs(offset) + 1), self._turned(k, max(-offset, 0), abs(offset) + 1)

    def _turned(self, x: Tensor, position: int, length: int) -> Tensor:
        """x (heads, D, W) with its D turned as at a position."""
        assert self.rotary is not None
        positions = torch.full((x.shape[2],), position, device=x.device)
        return self.rotary(x.mT[None], positions, length=length)[0].mT

    def ov(self) -> FactoredMatrix:
        """W_OV of all heads, (H, W, W), rows to rows: what the stream holds at a key times it is what a head writes."""
        return FactoredMatrix(self.values().mT.repeat_interleave(self.group, 0), self.outputs())

    def qk(self, offset: int = 0) -> FactoredMatrix:
        """W_QK of all heads, (H, W, W): query times it times key is the score, for a key `offset` tokens before."""
        q, k = self.rotated(offset)
        return FactoredMatrix(q.mT * self.scale, k.repeat_interleave(self.group, 0))


@dataclass
class ModelWeights:
    """The layers in order, and the embeddings at both ends. `circuits.read` makes it of a model.

    Attributes:
        layers: in the order in which they add to the stream.
        embedding, unembedding: (V, W) each, or None.
        first: the norm between the embedding and the first layer, if there is one.
        last: the norm between the stream and the unembedding.
        tokens: (V, W): the stream after the first `after` layers for each token by itself. The layers from there on
            are taken to read it in place of the embedding.
        tokenizer: to show tokens as text.
        notes: what was left out of the model or taken for something else, in words.
        why_no_unembedding: in words, if there is none.
    """

    layers: list[LayerWeights]
    embedding: Tensor | None = None
    unembedding: Tensor | None = None
    first: LinearNorm | None = None
    last: LinearNorm | None = None
    tokens: Tensor | None = None
    after: int = 0
    tokenizer: Any = None
    notes: tuple[str, ...] = ()
    why_no_unembedding: str = "none was given"
    heads: list[tuple[int, int]] = field(init=False)  # the number of the layer, and the head's within it
    _grams: dict[tuple[int, int], tuple[Tensor, ...]] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        if not self.layers:
            raise bad_value("layers", expected="one at least", received="none")
        self.heads = [(i, head) for i, layer in enumerate(self.layers) for head in range(layer.heads)]

    def number(self, layer: int | str) -> int:
        """The number of a layer, from its number or its name."""
        names = [weights.name for weights in self.layers]
        if layer in names:
            return names.index(layer)  # type: ignore[arg-type]
        if isinstance(layer, bool) or not isinstance(layer, int) or not -len(names) <= layer < len(names):
            raise bad_value("layer", expected=f"one of {len(names)}, such as 0 or {names[0]!r}", received=repr(layer))
        return layer % len(names)

    def head(self, layer: int | str, head: int) -> tuple[int, int]:
        """The numbers of a layer and of a head in it."""
        number = self.number(layer)
        count = self.layers[number].heads
        if isinstance(head, bool) or not isinstance(head, int) or not -count <= head < count:
            raise bad_value("head", expected=f"one of {count}", received=repr(head))
        return number, head % count

    # Along the stream

    def sources(self, number: int) -> Tensor:
        """The vectors (V, W) of all tokens that a layer is taken to read: the embedding, or `tokens` from the layer
        `after` on."""
        if self.embedding is None:
            raise bad_value("model", expected="an embedding of tokens", received="none")
        return self.embedding if self.tokens is None or number < self.after else self.tokens

    def before(self, number: int) -> list[LinearNorm | None]:
        """The norms between `sources` and a layer, its own not included."""
        if self.tokens is not None and number >= self.after:
            return [norm for layer in self.layers[self.after : number] for norm in layer.leaves]
        return [self.first, *(norm for layer in self.layers[:number] for norm in layer.leaves)]

    def after_layer(self, number: int) -> list[LinearNorm | None]:
        """The norms between what the heads of a layer write and the unembedding."""
        return [*(norm for layer in self.layers[number:] for norm in layer.leaves), self.last]

    def reading(self, number: int, rows: Tensor) -> Tensor:
        """Rows (..., W) that are multiplied with the stream at a layer, as rows to be multiplied with `sources`."""
        return folded(rows, self.before(number))

    def written(self, number: int, rows: Tensor) -> Tensor:
        """Vectors (..., W) that a layer writes, as they reach the unembedding."""
        return passed(rows, self.after_layer(number))

    def arriving(self, number: int, token: int) -> Tensor:
        """The vector (W,) of a token as it enters q, k and v of a layer."""
        return passed(self.sources(number)[token].double(), [*self.before(number), self.layers[number].reads])

    # Both ends

    def unembeddings(self) -> Tensor:
        """The unembedding (V, W); raises if there is none."""
        if self.unembedding is None:
            tied = "circuits.read(model, tied=True), which takes the token embedding for it"
            raise bad_value(
                "model",
                expected="a projection to the vocabulary (unembedding)",
                received=self.why_no_unembedding,
                remedy=tied if self.embedding is not None else "a language model",
            )
        return self.unembedding

    def token_gram(self, number: int, *, centre: bool = True) -> Tensor:
        """Y^T X (W, W), float64, for X = Y = `sources` of a layer. `centre`: less the mean over tokens of Y."""
        return self._gram(self.sources(number), self.sources(number), centre)

    def logit_gram(self, number: int, *, centre: bool = True) -> Tensor:
        """Y^T X (W, W), float64, for X = `sources` of a layer and Y the unembedding. `centre`: less the mean over
        tokens of Y, which adds the same to all logits and so changes nothing."""
        return self._gram(self.unembeddings(), self.sources(number), centre)

    def _gram(self, y: Tensor, x: Tensor, centre: bool) -> Tensor:
        key = id(y), id(x)
        if key not in self._grams:
            total = torch.zeros(y.shape[1], x.shape[1], dtype=torch.float64, device=y.device)
            for some, others in zip(y.split(_ROWS), x.split(_ROWS), strict=True):
                total.addmm_(some.double().mT, others.double())
            sums = y.sum(0, dtype=torch.float64), x.sum(0, dtype=torch.float64)
            self._grams[key] = total, *sums, y, x  # (as long as both are kept, no other tensor has their id)
        total, sum_y, sum_x, *_ = self._grams[key]
        return total - torch.outer(sum_y, sum_x) / len(y) if centre else total

    def logits(self, x: Tensor) -> Tensor:
        """What a vector (W,) at the end of the stream, after the last norm, gives each token: (V,), float64."""
        return torch.cat([rows.double() @ x for rows in self.unembeddings().split(_ROWS)])


def folded(rows: Tensor, norms: Iterable[LinearNorm | None]) -> Tensor:
    """Rows (..., W) that multiply what comes out of these norms, as rows that multiply what goes into the first."""
    for norm in reversed([*norms]):
        rows = rows if norm is None else norm.transposed(rows)
    return rows


def passed(x: Tensor, norms: Iterable[LinearNorm | None]) -> Tensor:
    """x (..., W) through these norms, their scales held fixed and without their biases."""
    for norm in norms:
        x = x if norm is None else norm.linear(x)
    return x
