"""Composition: how much of what an earlier head writes is read by the query, key or value of a later one.

    Q    |W_OV W_QK|   /  |W_OV| |W_QK|      the later head's query reads what the earlier head wrote
    K    |W_OV W_QK^T| /  |W_OV| |W_QK|      its key reads it
    V    |W_OV W_OV'|  /  |W_OV| |W_OV'|     its value reads it

Frobenius norms, by Elhage et al. 2021; rows to rows. Each matrix is a product of a tall and a wide factor, A B and X Y.
With the triangular factors R (D x D) of A and of Y^T the norm of the product is

    |A B X Y| = |P Q^T|,    P = R_A B (E x W),    Q = R_Y X^T (D x W),    |P Q^T|^2 = <P^T P, Q^T Q>

so that one product of all P^T P with all Q^T Q gives the scores of all pairs. It is taken for a few of their W rows at
a time; no matrix is built for a pair.

Letters: H query heads, D head width of q and k, E of v, W model width, T heads of all layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regard.errors import bad_value
from regard.heads.analysis.circuits.factored import triangle
from regard.heads.analysis.circuits.reading import as_weights
from regard.heads.analysis.circuits.weights import LayerWeights, ModelWeights, passed
from regard.heads.record.table import Shown, Table

__all__ = ["Baseline", "Composition", "composition"]

KINDS = ("q", "k", "v")
_HEADS = 16  # random heads on either side of a baseline
_ROWS = 32  # of W x W Gram matrices that are there at a time


class Baseline(NamedTuple):
    """The scores of random matrices of the same shapes: their mean and standard deviation."""

    mean: float
    std: float


@dataclass(repr=False)
class Composition(Shown):
    """`scores[kind]` (T, T) for the kinds "q", "k" and "v": the row is the earlier head, the column the later one; NaN
    if the one is not in an earlier layer than the other. `heads[i]` is (layer, head) of row and column i."""

    scores: dict[str, Tensor]
    heads: list[tuple[int, int]]
    layers: list[str]
    baselines: dict[str, Baseline]
    notes: tuple[str, ...]

    def score(self, kind: str, earlier: tuple[int, int], later: tuple[int, int]) -> float:
        """The score of two heads, each (layer, head) by number."""
        for what, head in (("earlier", earlier), ("later", later)):
            if head not in self.heads:
                raise bad_value(what, expected="(layer, head) of the model, by number", received=repr(head))
        if kind not in self.scores:
            raise bad_value("kind", expected=f"one of {', '.join(self.scores)}", received=repr(kind))
        return float(self.scores[kind][self.heads.index(earlier), self.heads.index(later)])

    def table(self, top: int = 50) -> Table:
        """A row for each of the `top` pairs of each kind, the largest score first; "over" is how many times the mean
        of random matrices it is."""
        rows: list[dict[str, Any]] = []
        for kind, scores in self.scores.items():
            flat = scores.flatten().nan_to_num(nan=-1.0)
            best = flat.topk(min(top, int((flat >= 0).sum())))
            for value, index in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                (first, i), (second, j) = (self.heads[n] for n in divmod(index, len(self.heads)))
                pair = {"layer": self.layers[first], "head": i, "later": self.layers[second], "its head": j}
                rows.append({"kind": kind, **pair, "score": value, "over": value / self.baselines[kind].mean})
        return Table(sorted(rows, key=lambda row: -row["score"]))

    def caption(self) -> str:
        """The baselines, and what was left out."""
        random = ", ".join(f"{kind} {line.mean:.3f} ± {line.std:.3f}" for kind, line in self.baselines.items())
        return f"composition of {len(self.heads)} heads; random matrices: {random}; {'; '.join(self.notes)}"

    def __str__(self) -> str:
        return f"{self.caption()}\n{Table(self.table(10)[:10])}"


@torch.no_grad()
def composition(
    model: nn.Module | ModelWeights, *, kinds: str | Iterable[str] = KINDS, offset: int = 0, seed: int = 0
) -> Composition:
    """The composition scores of all pairs of heads in different layers, beside those of random matrices.

    Args:
        model: a model, or what `circuits.read` gives.
        kinds: "q", "k", "v", or several of them.
        offset: with rotary, how many tokens the later head's key is before its query.
        seed: of the random matrices.

    >>> from regard.models import Decoder, ModelConfig
    >>> config = ModelConfig(layers=2, embed_dim=6, num_heads=3, vocabulary=11, inner=7, context=13, causal=True)
    >>> found = composition(Decoder(config))
    >>> found.scores["k"].shape, found.score("k", earlier=(0, 2), later=(1, 1)) > 0
    (torch.Size([6, 6]), True)
    """
    asked = _kinds(kinds)
    weights = as_weights(model)
    layers, total = weights.layers, len(weights.heads)
    wide = torch.promote_types(layers[0].query.dtype, torch.float32)  # float64 only if the weights are
    scores = {kind: torch.full((total, total), torch.nan, dtype=wide, device="cpu") for kind in asked}
    starts = [0, *accumulate(layer.heads for layer in layers)]
    changing = any(layer.leaves for layer in layers)  # what was written changes from layer to layer
    steps = [range(i, i + 1) for i in range(1, len(layers))] if changing else [range(1, len(layers))]
    for step in filter(len, steps):
        writers = torch.cat([_writer(weights, i, step[0]).to(wide) for i in range(step[-1])])
        columns = slice(starts[step[0]], starts[step[-1] + 1])
        readers = [torch.cat([_reader(layers[i], kind, offset).to(wide) for i in step]) for kind in asked]
        for kind, norms in zip(asked, _product_norms(writers, readers), strict=True):
            scores[kind][: len(writers), columns] = norms
    later = torch.tensor([number for number, _ in weights.heads], device="cpu")
    for values in scores.values():
        values[later[:, None] >= later] = torch.nan
    baselines = {kind: _baseline(layers[0], kind, seed) for kind in asked}
    return Composition(scores, weights.heads, [layer.name for layer in layers], baselines, weights.notes)


def _kinds(kinds: str | Iterable[str]) -> tuple[str, ...]:
    asked = tuple(kinds)
    if not asked or any(kind not in KINDS for kind in asked):
        raise bad_value("kinds", expected="some of q, k and v", received=repr(kinds))
    return tuple(kind for kind in KINDS if kind in asked)


def _writer(weights: ModelWeights, number: int, at: int) -> Tensor:
    """P (H, E, W) of the W_OV of a layer, as what it writes arrives at another layer."""
    layer = weights.layers[number]
    wide_factor = triangle(layer.values().mT).repeat_interleave(layer.group, 0) @ layer.outputs()
    return passed(wide_factor, [norm for between in weights.layers[number:at] for norm in between.leaves])


def _reader(layer: LayerWeights, kind: str, offset: int) -> Tensor:
    """Q (H, D, W) of what the heads of a layer read by their queries, keys or values."""
    if kind == "v":
        return triangle(layer.outputs().mT) @ layer.values().repeat_interleave(layer.group, 0)
    q, k = layer.rotated(offset)
    k = k.repeat_interleave(layer.group, 0)
    return triangle(k.mT) @ q if kind == "q" else triangle(q.mT) @ k


def _product_norms(writers: Tensor, several_readers: Sequence[Tensor]) -> list[Tensor]:
    """|P Q^T| / |P| |Q| of all P (T, E, W) with all Q (T', D, W), for several tensors of Q: (T, T') each."""
    p, *several = (x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=1e-30) for x in (writers, *several_readers))
    width = p.shape[2]
    squares = [p.new_zeros(len(p), len(q)) for q in several]
    for start in range(0, width, _ROWS):  # rows of P^T P and Q^T Q, from the diagonal on: both are symmetric
        rows = min(_ROWS, width - start)
        left = _gram_rows(p, start, rows)
        left[:, :, rows:] *= 2
        for total, q in zip(squares, several, strict=True):
            total.addmm_(left.flatten(1), _gram_rows(q, start, rows).flatten(1).mT)
    return [total.clamp_(min=0).sqrt_() for total in squares]


def _gram_rows(x: Tensor, start: int, rows: int) -> Tensor:
    """Some rows of x^T x, of x (T, D, W), from the diagonal on: (T, rows, W - start)."""
    return x[:, :, start : start + rows].mT @ x[:, :, start:]


def _baseline(layer: LayerWeights, kind: str, seed: int) -> Baseline:
    """Scores of heads with normal random weights, of the shapes of a layer without grouped heads."""
    generator = torch.Generator().manual_seed(seed)
    d, e, w = layer.query.shape[1], layer.value.shape[1], layer.query.shape[2]
    shapes = ((d, w), (d, w), (e, w), (w, e))

    def random_layer(name: str) -> LayerWeights:
        q, k, v, out = (torch.randn(_HEADS, *shape, generator=generator, device="cpu") for shape in shapes)
        return LayerWeights(name, q, k, v, out)

    drawn = ModelWeights([random_layer("0"), random_layer("1")])
    scores = _product_norms(_writer(drawn, 0, 1), [_reader(drawn.layers[1], kind, 0)])[0]
    return Baseline(float(scores.mean()), float(scores.std()))
