"""Related words: content words whose embeddings are alike; and a head that was planted to attend to them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import regard
from regard.heads.analysis.evidence import TokenFacts, evidence_of
from regard.heads.analysis.related_words import Related
from regard.heads.analysis.roles import decide
from regard.heads.analysis.syntax.texts import TokenizedText
from regard.heads.analysis.treebank import Sentence, Word

GROUPS, EACH, N = 5, 4, 23  # 20 content words in 5 groups, after a token for all other words


class Planted(nn.Module):
    """Embeddings in groups. Head 0 attends to content words of the query's group, head 1 to all tokens alike."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(1 + GROUPS * EACH, 13)
        with torch.no_grad():
            centres = torch.randn(GROUPS, 13).repeat_interleave(EACH, 0)
            self.embedding.weight[1:] = centres + 0.1 * torch.randn(GROUPS * EACH, 13)
            self.embedding.weight[0] = 0

    def forward(self, ids: Tensor) -> Tensor:
        group = (ids - 1).div(EACH, rounding_mode="floor")
        same = (group[:, :, None] == group[:, None]) & (ids > 0)[:, None] & (ids > 0)[:, :, None]
        scores = torch.stack([4.0 * same, torch.zeros_like(same, dtype=torch.float32)], 1)
        q = torch.zeros(ids.shape[0], 2, ids.shape[1], 2)
        return regard.attend(q, q, torch.ones_like(q), bias=scores).transpose(1, 2).flatten(2)


def texts(count: int = 40) -> list[tuple[Sentence, TokenizedText]]:
    """Random words, every other one a content word."""
    generator, made = torch.Generator().manual_seed(1), []
    for _ in range(count):
        ids = torch.randint(1, 1 + GROUPS * EACH, (N,), generator=generator)
        ids[::2] = 0
        words = tuple(Word(str(x), None, "dep", "NOUN" if x else "ADP", None) for x in ids.tolist())
        made.append((Sentence(words, ""), TokenizedText(ids.tolist(), list(range(N)), N, [])))
    return made


def test_the_most_alike_tenth_is_related() -> None:
    sentences = texts()
    related = Related.of(Planted(), sentences)
    assert related is not None
    found = related.of_texts(sentences[:3], "other: ")
    assert list(found) == ["related", "other: related"]
    for number, (_, text) in enumerate(sentences[:3]):
        candidates, keys = (x[number].tolist() for x in found["related"])
        for i, (all_words, own) in enumerate(zip(candidates, keys, strict=True)):
            content = [j for j in range(1, N, 2) if i % 2 and j != i and text.ids[j] != text.ids[i]]
            assert [j for j in all_words if j >= 0] == content
            groups = {(text.ids[j] - 1) // EACH for j in own if j >= 0}
            assert groups <= {(text.ids[i] - 1) // EACH}


def test_a_planted_head() -> None:
    """Head 0 has the role, head 1 has not; with the pairs of another text neither has."""
    model, sentences = Planted(), texts()
    related = Related.of(model, sentences)
    assert related is not None
    with torch.no_grad(), regard.watch(model, keep="qk") as seen:
        model(torch.tensor([text.ids for _, text in sentences]))
    evidence = evidence_of(seen[0].text, TokenFacts(related=related.of_texts(sentences, "other: ")))
    planted, even = decide("layer", evidence)
    assert "related" in (planted.role, *planted.also)
    assert "related" not in (even.role, *even.also)
    assert planted.evidence["other: related"] < 1.3 * float(evidence.roles["other: related"][1, 0]) / float(
        evidence.roles["other: related"][2, 0]
    )


def test_models_without_an_embedding() -> None:
    assert Related.of(nn.Linear(2, 2), texts()) is None
    assert Related.of(nn.Embedding(5, 2), texts()) is None  # of fewer tokens than the texts have
