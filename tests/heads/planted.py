"""Decoders of one layer whose heads are planted: each attends and writes by construction.

The stream of a token has its features side by side: `token` and `previous` (one-hot of the vocabulary), `place`
(one-hot of the context), `one`. A head scores sharpness * (feature of the query) M (feature of the key), and writes M'
times the token that it attends to into `token`, which the logits read.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import regard
from regard.masks import Causal, Mask, Padding

SHARP = 40.0  # of a score: another key gets e^-40


@dataclass
class PlantedHead:
    """`looks`: (feature of the query, feature of the key, matrix) for each term of the score; `writes` (V, V)."""

    looks: list[tuple[str, str, Tensor]] = field(default_factory=list)
    writes: Tensor | None = None
    sharp: float = SHARP


class PlantedBlock(nn.Module):
    """The stream and what its attention adds to it."""

    def __init__(self, slots: dict[str, slice], width: int, heads: list[PlantedHead]) -> None:
        super().__init__()
        self.attention = regard.MultiHeadAttention(width, len(heads), head_dim=width, bias=False, scale=1.0)
        shape = (len(heads), width, width)
        q, k, v, out = (torch.zeros(shape) for _ in range(4))
        for i, head in enumerate(heads):
            for of_query, of_key, matrix in head.looks:
                q[i, slots[of_key], slots[of_query]] += head.sharp * matrix.mT
                k[i, slots[of_key], slots[of_key]] = torch.eye(matrix.shape[1])
            size = slots["token"].stop
            v[i, :size, :size] = torch.eye(size)
            if head.writes is not None:
                out[i, :size, :size] = head.writes
        with torch.no_grad():
            for projection, weight in zip(("q_proj", "k_proj", "v_proj"), (q, k, v), strict=True):
                getattr(self.attention, projection).weight.copy_(weight.flatten(0, 1))
            self.attention.out_proj.weight.copy_(out.transpose(0, 1).flatten(1))

    def forward(self, x: Tensor, mask: Mask) -> Tensor:
        out = self.attention(x, mask=mask)
        assert isinstance(out, Tensor)
        return x + out


class PlantedDecoder(nn.Module):
    """Token ids (B, N) to logits (B, N, V)."""

    def __init__(self, vocabulary: int, context: int, heads: list[PlantedHead]) -> None:
        super().__init__()
        self.vocabulary, self.context = vocabulary, context
        self.embedding = nn.Embedding(vocabulary, 1)  # says how many tokens there are, and has the device
        ends = [vocabulary, 2 * vocabulary, 2 * vocabulary + context, 2 * vocabulary + context + 1]
        names = ("token", "previous", "place", "one")
        self.slots = {name: slice(a, b) for name, a, b in zip(names, [0, *ends], ends, strict=False)}
        self.blocks = nn.ModuleList([PlantedBlock(self.slots, ends[-1], heads)])
        self.head = nn.Linear(ends[-1], vocabulary, bias=False)
        with torch.no_grad():
            self.head.weight.zero_()[:, :vocabulary] = torch.eye(vocabulary)

    def forward(self, ids: Tensor, keep: Tensor | None = None) -> Tensor:
        token = F.one_hot(ids, self.vocabulary).float()
        previous = F.pad(token, (0, 0, 1, 0))[:, :-1]
        place = torch.eye(self.context)[: ids.shape[1]].expand(len(ids), -1, -1)
        x = torch.cat([token, previous, place, torch.ones(*ids.shape, 1)], -1)
        mask = Causal() if keep is None else Causal() & Padding(keep=keep)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x)


def shift(size: int, by: int) -> Tensor:
    """The matrix of "the key is `by` places before the query": row of the query, column of the key."""
    return torch.diag(torch.ones(size - by), -by)


def after_its_copy(vocabulary: int, **more: Tensor) -> PlantedHead:
    """Attends to the token after an earlier copy of its own: induction, and retrieval."""
    return PlantedHead([("token", "previous", torch.eye(vocabulary))], **more)


def before(context: int, by: int = 1) -> PlantedHead:
    """Attends to the token `by` places before."""
    return PlantedHead([("place", "place", shift(context, by))])


def on_first(context: int) -> PlantedHead:
    """Attends to the first token."""
    first = torch.zeros(1, context)
    first[0, 0] = 1.0
    return PlantedHead([("one", "place", first)])


def on_copies(vocabulary: int, writes: Tensor | None = None) -> PlantedHead:
    """Attends to its own token and its copies."""
    return PlantedHead([("token", "token", torch.eye(vocabulary))], writes)
