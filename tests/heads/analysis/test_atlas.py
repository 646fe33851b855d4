"""Atlases: of a planted model over a small treebank, their files, and those of the packaged models."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from torch import Tensor, nn

import regard
from regard.heads import Atlas
from regard.heads.analysis.atlas import of_model
from regard.models import EMBEDDED

NOUNS = ["cat", "dog", "bird", "fish", "horse"]
VERBS = ["runs", "sees", "sings", "jumps", "eats"]
ADVERBS = ["often", "never", "now", "then", "here"]
WORDS = ["[UNK]", "start", "the", "a", "old", ".", *NOUNS, *VERBS, *ADVERBS]
LONGEST = 23


def lines(seed: int) -> str:
    """A sentence in CoNLL-U: start, a determiner and a noun, some adverbs, the verb, some more adverbs, a full stop."""
    draw = random.Random(seed)
    rows = [("start", "X", 0, "discourse"), (draw.choice(["the", "a"]), "DET", 0, "det")]
    rows.append((draw.choice(NOUNS), "NOUN", 0, "nsubj"))
    before, after = draw.randrange(4), draw.randrange(1, 4)
    rows += [(draw.choice(ADVERBS), "ADV", 0, "advmod") for _ in range(before)]
    rows.append((draw.choice(VERBS), "VERB", 0, "root"))
    verb = len(rows)
    rows += [(draw.choice(ADVERBS), "ADV", 0, "advmod") for _ in range(after)] + [(".", "PUNCT", 0, "punct")]
    told = []
    for i, (word, tag, _, relation) in enumerate(rows, 1):
        head = 0 if relation == "root" else 3 if relation == "det" else verb
        told.append("\t".join([str(i), word, "_", tag, "_", "_", str(head), relation, "_", "_"]))
    return "\n".join(told)


@pytest.fixture(scope="module")
def treebank(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("treebank") / "planted.conllu"
    path.write_text("\n\n".join(lines(seed) for seed in range(260)) + "\n", encoding="utf-8")
    return path


def tokenizer() -> Any:
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return made


class Planted(nn.Module):
    """Heads whose scores are tables of pairs of tokens, and of offsets: what is shuffled loses its role."""

    def __init__(self) -> None:
        super().__init__()
        number = {word: i for i, word in enumerate(WORDS)}
        pairs, offsets = torch.zeros(5, len(WORDS), len(WORDS)), torch.zeros(5, 2 * LONGEST + 1)
        for verb in VERBS:
            pairs[0, :, number[verb]] -= 4.0
            for noun in NOUNS:
                pairs[0, number[noun], number[verb]] = 9.0  # head 0: a noun attends to the verb
        offsets[1, LONGEST - 1] = 9.0  # head 1: the token before
        pairs[2, :, number["start"]] = 4.0  # head 2: mostly rests on the first token; else the token before
        offsets[2, LONGEST - 1] = 3.0
        for adverb in ADVERBS:
            pairs[3, :, number[adverb]] = 3.0  # head 3: adverbs
        self.pairs, self.offsets = nn.Parameter(pairs), nn.Parameter(offsets)  # head 4: everything alike

    def forward(self, input_ids: Tensor) -> Tensor:
        n = input_ids.shape[1]
        ahead = torch.arange(n) - torch.arange(n)[:, None] + LONGEST
        scores = self.pairs[:, input_ids[:, :, None], input_ids[:, None, :]].transpose(0, 1) + self.offsets[:, ahead]
        q = torch.zeros(input_ids.shape[0], 5, n, 2)
        return regard.attend(q, q, torch.ones_like(q), bias=scores).transpose(1, 2).flatten(2)


@pytest.fixture(scope="module")
def atlas(treebank: Path) -> Atlas:
    return regard.heads.atlas(Planted(), treebank, tokenizer=tokenizer(), progress=False, name="planted")


def test_planted_heads(atlas: Atlas) -> None:
    first = [entries[0] for entries in atlas.entries[0]]
    assert [entry.role for entry in first] == ["subject and verb", "previous", "previous", "adverbs", "broad"]
    subject = first[0]
    assert (subject.source, subject.relation, subject.direction) == ("syntax", "nsubj", "to head")
    assert subject.score > 0.95
    assert subject.score > subject.baseline + 0.3
    assert first[2].score > 0.5
    assert atlas.rests[0][2][0] > 0.5
    assert atlas.rests[0][2][2] == "first"
    assert atlas.informative() == [(0, 0), (0, 1), (0, 2), (0, 3)]


def test_controls(atlas: Atlas) -> None:
    assert atlas.made["sentences"] == 260
    assert atlas.made["shuffled"] == 0
    assert atlas.made["other_sentences_syntax"] <= 1  # (all of these sentences are alike)
    assert atlas.made["halves_agree"].split(" of ")[0] == atlas.made["halves_agree"].split(" of ")[1]
    assert all(entry.shuffled is not None for entry in atlas[0, 1] if entry.source == "treebank")


def test_files(atlas: Atlas, tmp_path: Path) -> None:
    atlas.save(tmp_path / "atlas.json")
    again = Atlas.load(tmp_path / "atlas.json")
    assert (again.model, again.layers, again.made) == (atlas.model, atlas.layers, atlas.made)
    for mine, theirs in zip(again.entries[0], atlas.entries[0], strict=True):
        assert [entry.role for entry in mine] == [entry.role for entry in theirs]
        assert [entry.score for entry in mine] == pytest.approx([entry.score for entry in theirs], abs=1e-4)
    assert "subject and verb" in str(again)
    assert str(again).endswith("4 of 5 heads do something beside resting and looking everywhere")
    (tmp_path / "other.json").write_text('{"version": 1}')
    with pytest.raises(ValueError, match=r"other\.json: expected an atlas that `save` wrote"):
        Atlas.load(tmp_path / "other.json")


def test_what_is_known_beside_what_is_seen(atlas: Atlas) -> None:
    """With an atlas a head has the role that is known of it, and says so; what the text shows is there, too."""
    model = Planted()
    ids = torch.tensor([tokenizer().encode("start the old cat now often sees here then .").ids])
    with torch.no_grad(), regard.watch(model) as seen:
        model(ids)
    known, alone = seen.roles(atlas=atlas), seen.roles()
    assert (known[0].role, known[0].origin) == ("subject and verb", "atlas")
    assert known[0].known[0].relation == "nsubj"
    assert known[0].evidence == alone[0].evidence
    assert "by the atlas" in known[1].describe()
    assert (alone[1].role, alone[1].origin) == ("previous", "text")


def test_what_cannot_be(treebank: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"atlas: expected minilm or smollm2, received 'gpt5'; remedy: heads\.atlas"):
        regard.atlas("gpt5")
    with pytest.raises(TypeError, match="atlas: expected the name of a packaged model, received Planted"):
        regard.atlas(Planted())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="tokenizer: expected one, as the model has none"):
        regard.heads.atlas(Planted(), treebank)
    (tmp_path / "none.conllu").write_text("")
    with pytest.raises(ValueError, match="expected at least one sentence that the model reads, received none"):
        regard.heads.atlas(Planted(), tmp_path / "none.conllu", tokenizer=tokenizer())


@pytest.mark.parametrize("name, heads, least", [("minilm", 72, 36), ("smollm2", 270, 180)])
def test_packaged(name: str, heads: int, least: int) -> None:
    atlas = regard.atlas(name)
    assert (atlas.model, atlas.heads) == (name, heads)
    assert len(atlas.informative()) >= least
    assert atlas.made["shuffled"] == atlas.made["other_sentences"] == 0
    agree, of = map(int, atlas.made["halves_agree"].split(" of "))
    assert agree >= 0.85 * of


def test_known_heads() -> None:
    assert regard.atlas("minilm")[0, 2][0].role == "previous"
    assert regard.atlas("minilm")[1, 8][0].role == "next"
    relations = {(entry.relation, entry.direction) for entry in regard.atlas("minilm")[2, 8]}
    assert ("det", "to head") in relations
    for layer, head in ((18, 6), (17, 3)):
        assert regard.atlas("smollm2")[layer, head][0].role == "induction"


@pytest.mark.skipif(EMBEDDED["minilm"].folder() is None, reason="the weights of it are not installed")
def test_of_which_model() -> None:
    """Of a packaged model with all its heads, and no other."""
    model = regard.models.load("minilm")
    assert of_model(model) is regard.atlas("minilm")
    assert of_model(regard.prune(model, {0: [1]})) is None
    assert of_model(Planted()) is None
    assert of_model(None) is None
