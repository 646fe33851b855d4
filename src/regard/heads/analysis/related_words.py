"""Words that are related in meaning: content words whose static token embeddings are alike.

Letters: V vocabulary, W width, N tokens, K keys of a token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from regard.heads.analysis.syntax.texts import TokenizedText
from regard.heads.analysis.treebank import Sentence

__all__ = ["Related"]

CONTENT = ("NOUN", "VERB", "ADJ", "PROPN")  # of other words, embeddings tell the frequency more than the meaning
SHARE = 0.1  # of all pairs, the most alike, that are related
SAMPLE = 500  # sentences by which the least similarity is found

Text = tuple[Sentence, TokenizedText]


@dataclass
class Related:
    """Static embeddings of a model's tokens, of length 1 and without their mean, and the least similarity (cosine) of
    related words: the most alike tenth of all pairs of content words."""

    embeddings: Tensor  # (V, W)
    least: float

    @classmethod
    def of(cls, model: nn.Module, texts: Sequence[Text]) -> Related | None:
        """Those of a model, with the least similarity in some texts; None if it has no embedding of their tokens."""
        tokens = 1 + max((number for _, text in texts for number in text.ids), default=0)
        weight = _embedding(model, tokens)
        if weight is None:
            return None
        weight = weight.detach().float().cpu()
        weight = weight - weight.mean(0)
        found = cls(weight / weight.norm(dim=1, keepdim=True).clamp(min=1e-12), 0.0)
        alike = [found._similarity(text)[_candidates(text)] for text in texts[:SAMPLE]]
        values = torch.cat(alike) if alike else torch.zeros(0, device="cpu")
        if not values.numel():
            return None
        found.least = float(values.sort().values[int((1 - SHARE) * values.numel())])
        return found

    def of_texts(self, texts: Sequence[Text], other: str) -> Mapping[str, tuple[Tensor, Tensor]]:
        """For texts of one length: of each token the other content words, and the related ones among them, (B, N, K)
        each, -1 for none; and with the prefix `other` those of the text before it in the batch."""
        candidates = [_candidates(text) for text in texts]
        related = [c & (self._similarity(t) >= self.least) for c, t in zip(candidates, texts, strict=True)]
        before = related[-1:] + related[:-1]
        crossed = [c & r for c, r in zip(candidates, before, strict=True)]
        words = _lists(candidates)
        found = {"related": (words, _lists(related)), other + "related": (words, _lists(crossed))}
        return found if len(texts) > 1 else {"related": found["related"]}

    def _similarity(self, text: Text) -> Tensor:
        own = self.embeddings[torch.tensor(text[1].ids, device="cpu")]
        return own @ own.mT


def _candidates(text: Text) -> Tensor:
    """Pairs of content words, (N, N): of other words and tokens, not next to each other, the first token left out."""
    sentence, tokens = text
    words, ids = torch.tensor(tokens.words_of_tokens, device="cpu"), torch.tensor(tokens.ids, device="cpu")
    content = torch.tensor([w >= 0 and sentence.words[w].upos in CONTENT for w in tokens.words_of_tokens], device="cpu")
    places = torch.arange(len(ids), device="cpu")
    pairs = content[:, None] & content & (words[:, None] != words) & (ids[:, None] != ids)
    pairs &= (places[:, None] - places).abs() > 1
    pairs[:, 0] = False
    return pairs


def _lists(pairs: Sequence[Tensor]) -> Tensor:
    """Booleans (N, N) of each text as keys (B, N, K), -1 for none."""
    flags = torch.stack(list(pairs))
    most = max(int(flags.sum(-1).max()), 1)
    keys = torch.arange(flags.shape[-1], device="cpu").expand_as(flags)
    first = keys.where(flags, flags.shape[-1]).sort(-1).values[..., :most]
    return first.masked_fill(first == flags.shape[-1], -1)


def _embedding(model: Any, tokens: int) -> Tensor | None:
    """The weight of a model's token embedding: the largest of its embeddings, if it has all tokens."""
    modules = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    largest = max(modules, key=lambda module: module.num_embeddings, default=None)
    return None if largest is None or largest.num_embeddings < tokens else largest.weight
