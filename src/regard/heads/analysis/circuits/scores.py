"""What single heads do, from weights alone: `ov` and `qk` matrices, the copying score, the matching score.

    copying    eigenvalues of W_E W_OV W_U (V x V): positive if attending to a token makes that token likelier
    matching   eigenvalues of W_E W_QK W_E^T (V x V): positive if tokens attend to the same token

Both by Elhage et al. 2021 (A mathematical framework for transformer circuits): the sum of the eigenvalues over the sum
of their moduli. A product of rank D has D eigenvalues that are not 0; they are those of a D x D matrix.

Letters: H query heads, G kv heads, D head width of q and k, E of v, W model width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from regard.heads.analysis.circuits.factored import FactoredMatrix, eigenvalue_score
from regard.heads.analysis.circuits.reading import as_weights
from regard.heads.analysis.circuits.weights import ModelWeights
from regard.heads.record.table import PerHead, Table

__all__ = ["Copying", "Matching", "copying", "matching", "ov", "qk"]


@dataclass(repr=False)
class EigenvalueScores(PerHead):
    """`scores[layer]` (H,), from -1 to 1, and the `eigenvalues[layer]` (H, D) they are made of."""

    eigenvalues: dict[str, Tensor]
    notes: tuple[str, ...]

    score = ""  # the name of the column

    def table(self) -> Table:
        """A row for each head, the largest score first."""
        rows = sorted(self.rows(), key=lambda row: -row[2])
        return Table(({"layer": layer, "head": head, self.score: s} for layer, head, s in rows), self.scores)

    def caption(self) -> str:
        """What the scores are of."""
        values = torch.cat([*self.scores.values()])
        return f"{self.score} of {len(values)} heads, median {float(values.median()):.3f}; {'; '.join(self.notes)}"

    def __str__(self) -> str:
        return f"{self.caption()}\n{Table(self.table()[:10])}"


class Copying(EigenvalueScores):
    """The copying score of each head: 1 if what it writes makes the attended tokens likelier, -1 if unlikelier."""

    score = "copying"


@dataclass(repr=False)
class Matching(EigenvalueScores):
    """The matching score of each head: 1 if a token attends to keys `offset` before it that are the same token, -1 if
    it avoids them."""

    offset: int = 0

    score = "matching"

    def caption(self) -> str:
        """What the scores are of."""
        return f"offset {self.offset}: {super().caption()}"


def ov(model: nn.Module | ModelWeights, layer: int | str, head: int) -> FactoredMatrix:
    """W_OV of a head, (W, W) of rank E, rows to rows: the stream at a key (minus biases, before the layer's norm, whose
    weight is folded in) times it is what the head adds to the stream for a weight of 1.

    >>> from regard.models import Decoder, ModelConfig
    >>> config = ModelConfig(layers=2, embed_dim=6, num_heads=3, vocabulary=11, inner=7, context=13, causal=True)
    >>> ov(Decoder(config), layer=1, head=2)
    FactoredMatrix((6, 2) @ (2, 6))
    """
    weights = as_weights(model)
    number, head = weights.head(layer, head)
    left, right = weights.layers[number].ov()
    return FactoredMatrix(left[head], right[head])


def qk(model: nn.Module | ModelWeights, layer: int | str, head: int, *, offset: int = 0) -> FactoredMatrix:
    """W_QK of a head, (W, W) of rank D: query times it times key is the score, scale included. With rotary it depends
    on the `offset`, how many tokens the key is before the query.

    >>> from regard.models import Decoder, ModelConfig
    >>> config = ModelConfig(layers=2, embed_dim=6, num_heads=3, vocabulary=11, inner=7, context=13, causal=True)
    >>> qk(Decoder(config), layer=1, head=2, offset=3)
    FactoredMatrix((6, 2) @ (2, 6))
    """
    weights = as_weights(model)
    number, head = weights.head(layer, head)
    left, right = weights.layers[number].qk(offset)
    return FactoredMatrix(left[head], right[head])


@torch.no_grad()
def copying(model: nn.Module | ModelWeights, *, centre: bool = True) -> Copying:
    """The copying score of every head: of the eigenvalues of W_E W_OV W_U, from tokens to logits, norms folded in.

    `centre` takes the mean over tokens from the logits, which changes no probability; False is as published.

    >>> from regard.models import Decoder, ModelConfig
    >>> config = ModelConfig(layers=2, embed_dim=6, num_heads=3, vocabulary=11, inner=7, context=13, causal=True)
    >>> copying(Decoder(config))["blocks.1.attention"].shape
    torch.Size([3])
    """
    weights = as_weights(model)
    eigenvalues: dict[str, Tensor] = {}
    for i, layer in enumerate(weights.layers):
        read = weights.reading(i, layer.values()).repeat_interleave(layer.group, 0)  # (H, E, W)
        written = weights.written(i, layer.outputs())  # (H, E, W)
        eigenvalues[layer.name] = FactoredMatrix(read.mT, written).eigenvalues(weights.logit_gram(i, centre=centre))
    return Copying(_scores(eigenvalues), eigenvalues, weights.notes)


@torch.no_grad()
def matching(model: nn.Module | ModelWeights, *, offset: int = 0, centre: bool = True) -> Matching:
    """The matching score of every head: of the eigenvalues of W_E W_QK W_E^T, from tokens to tokens, for keys `offset`
    tokens before the query (which matters with rotary alone).

    `centre` takes the mean over keys from the scores of each query, which changes no weight; False is as published.

    >>> from regard.models import Decoder, ModelConfig
    >>> config = ModelConfig(layers=2, embed_dim=6, num_heads=3, vocabulary=11, inner=7, context=13, causal=True)
    >>> matching(Decoder(config))[0].shape
    torch.Size([3])
    """
    weights = as_weights(model)
    eigenvalues: dict[str, Tensor] = {}
    for i, layer in enumerate(weights.layers):
        q, k = (weights.reading(i, rows) for rows in layer.rotated(offset))
        circuit = FactoredMatrix(q.mT, k.repeat_interleave(layer.group, 0))
        eigenvalues[layer.name] = circuit.eigenvalues(weights.token_gram(i, centre=centre))
    return Matching(_scores(eigenvalues), eigenvalues, weights.notes, offset)


def _scores(eigenvalues: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: eigenvalue_score(values) for name, values in eigenvalues.items()}
