"""The weights of a layer between tokens or between words, and what is left of them beside each head's resting place.

Letters: H query heads, N tokens, n units (tokens or words).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from regard.draw.scene import Panel
from regard.heads.analysis.labels import Labels
from regard.heads.analysis.syntax.scores import word_weights

__all__ = ["Link", "Unit", "UnitMap", "units_of"]

LEAST_WEIGHT = 0.1  # of a link that is worth a word
LEAST_SHARE = 0.3  # of what its query has left beside the resting place
OVER_UNIFORM = 2.0  # times what uniform attention on the same keys has

Unit = tuple[int, int]  # the first token of a token or word, and the one after its last


class Link(NamedTuple):
    """A query, a key, and the weight between them: averaged over the query's tokens, summed over the key's."""

    query: Unit
    key: Unit
    weight: float


def units_of(labels: Labels, words: bool) -> list[Unit]:
    """The tokens of a text, or its words, as ranges of tokens; special tokens are left out.

    >>> units_of(Labels.of(["[CLS]", "un", "##seen", "cat", "[SEP]"]), words=True)
    [(1, 3), (3, 4)]
    """
    units: list[Unit] = []
    for i, special in enumerate(labels.special):
        if special:
            continue
        if words and units and units[-1][1] == i and labels.word[i] == labels.word[i - 1]:
            units[-1] = units[-1][0], i + 1
        else:
            units.append((i, i + 1))
    return units


class UnitMap:
    """The weights of all heads of a layer between units.

    Attributes:
        units: the tokens or words, without special tokens.
        weights: (H, n, n), as the maps show them.
        share: (H, n, n), the share of a weight in what its query has left beside the head's resting place; 0 for keys
            of that place.
        enough, clear: (H, n, n) True for links whose weight and share are worth a word; and that besides are the
            strongest of their query, but for itself.
    """

    def __init__(self, panel: Panel, units: Sequence[Unit], weights: Tensor) -> None:
        self.panel, self.units = panel, list(units)
        place = [-1] * len(panel.keys)
        for number, (first, last) in enumerate(units):
            place[first:last] = [number] * (last - first)
        self.weights = word_weights(weights, place, len(units))
        left, kept = weights, self.weights
        if panel.aside is not None:
            left = weights.masked_fill(panel.aside[:, None], 0.0)
            kept = word_weights(left, place, len(units))
        whole = kept == self.weights  # (no token of the key is at rest)
        mass = _mass_of_rows(left, place, len(units))
        self.share = torch.where(whole, kept / mass.clamp(min=1e-12), 0.0)
        visible = (kept > 0) & whole
        uniform = 1 / visible.sum(-1, keepdim=True).clamp(min=1)
        self.enough = (self.weights >= LEAST_WEIGHT) & (self.share >= LEAST_SHARE)
        self.enough &= self.share >= OVER_UNIFORM * uniform
        others = self.share - self.share * torch.eye(len(units))
        self.clear = self.enough & (others > 0) & (others >= others.amax(-1, keepdim=True))

    def strongest(self, head: int, count: int, allowed: Callable[[int, int], bool], among: Tensor) -> list[Link]:
        """The strongest links of a head, of those `among` (H, n, n) that are `allowed(i, j)`."""
        pairs = among[head].nonzero()
        order = self.weights[head][pairs[:, 0], pairs[:, 1]].argsort(descending=True, stable=True)
        links: list[Link] = []
        for i, j in pairs[order].tolist():
            if len(links) < count and allowed(i, j):
                links.append(self.link(head, i, j))
        return links

    def link(self, head: int, i: int, j: int) -> Link:
        return Link(self.units[i], self.units[j], float(self.weights[head, i, j]))


def _mass_of_rows(left: Tensor, place: Sequence[int], units: int) -> Tensor:
    """What each unit's tokens have left, on average: (H, n, 1)."""
    mass = left.sum(-1)  # (H, N)
    word_of_token = torch.tensor(place, device="cpu")
    belongs = (word_of_token == torch.arange(units, device="cpu")[:, None]).to(left.dtype)  # (n, N)
    return (mass @ (belongs / belongs.sum(1, keepdim=True).clamp(min=1)).mT)[..., None]
