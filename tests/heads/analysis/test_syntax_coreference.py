"""Mentions and antecedents: a head that knows them by construction, and heads that do not."""

from __future__ import annotations

import random
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from heads.planted import PlantedDecoder, PlantedHead, before, on_first

from regard import models
from regard.heads import Syntax, coreference
from regard.models import EMBEDDED

tokenizers = pytest.importorskip("tokenizers", reason="tokenizers, which cuts text, is not installed")

WITH_MINILM = pytest.mark.skipif(EMBEDDED["minilm"].folder() is None, reason="the weights of it are not installed")

WOMEN, MEN = ["Mary", "Anna", "Sarah", "Lisa", "Emma", "Laura"], ["John", "Tom", "David", "Paul", "Peter", "James"]
TEMPLATES = (
    "Yesterday {a} met {b} because {p} was bored",
    "In the evening {a} called {b} after {p} had eaten",
    "Last week {a} saw {b} when {p} left the house",
    "At noon {a} told {b} that {p} was late again",
    "The letter from {a} reached {b} before {p} could answer",
    "Then {a} and {b} talked until {p} had to go",
)
LAYER, CONTEXT = "blocks.0.attention", 23


def sentences(count: int) -> list[tuple[list[str], list[Any]]]:
    """A woman and a man, in either order; the pronoun says who is meant."""
    texts = []
    for template, woman, man, order, pronoun in product(TEMPLATES, WOMEN, MEN, (1, -1), ("she", "he")):
        first, second = (woman, man)[::order]
        words = template.format(a=first, b=second, p=pronoun).split()
        names = [words.index(first), words.index(second)]
        antecedent = words.index(woman if pronoun == "she" else man)
        texts.append((words, [(words.index(pronoun), [antecedent], names)]))
    random.Random(0).shuffle(texts)
    return texts[:count]


def story(number: int) -> str:
    """A document of three sentences in CoNLL-U: "Yesterday Anna met Tom", "Later she left", "Then Tom sang too"."""
    draw = random.Random(number)
    names = [draw.choice(WOMEN), draw.choice(MEN)]
    draw.shuffle(names)
    person = draw.randrange(2)
    pronoun = "she" if names[person] in WOMEN else "he"
    other = names[1 - person]
    rows = [
        [
            ("Yesterday", "ADV", 3, "advmod", "_"),
            (names[0], "PROPN", 3, "nsubj", "Entity=(e0-person-1)"),
            ("met", "VERB", 0, "root", "_"),
            (names[1], "PROPN", 3, "obj", "Entity=(e1-person-1)"),
        ],
        [
            ("Later", "ADV", 3, "advmod", "_"),
            (pronoun, "PRON", 3, "nsubj", f"Entity=(e{person}-person-1)"),
            ("left", "VERB", 0, "root", "_"),
        ],
        [
            ("Then", "ADV", 3, "advmod", "_"),
            (other, "PROPN", 3, "nsubj", f"Entity=(e{1 - person}-person-1"),
            ("sang", "VERB", 0, "root", "_"),
            ("too", "ADV", 2, "advmod", f"Entity=e{1 - person})"),
        ],
    ]
    text = "# newdoc\n"
    for words in rows:
        for i, (form, upos, head, relation, misc) in enumerate(words):
            text += f"{i + 1}\t{form}\t_\t{upos}\t_\t_\t{head}\t{relation}\t_\t{misc}\n"
        text += "\n"
    return text


def planted() -> PlantedDecoder:
    """Head 0 attends from a pronoun to names of its gender, and from a name to itself before; head 1 three words back,
    head 2 to the first token, head 3 to all alike."""
    words = " ".join(template.format(a="", b="", p="") for template in TEMPLATES).split()
    words += [*WOMEN, *MEN, "she", "he", "met", "Later", "left", "sang", "too", "They", "they", "a"]
    vocabulary = {word: i for i, word in enumerate(["<unk>", *dict.fromkeys(words)])}
    tokenizer: Any = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, "<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    size = len(vocabulary)
    knows = torch.zeros(size, size)
    for pronoun, names in (("she", WOMEN), ("he", MEN)):
        knows[vocabulary[pronoun], [vocabulary[name] for name in names]] = 1.0
    names = [vocabulary[name] for name in WOMEN + MEN]
    knows[names, names] = 1.0
    heads = [PlantedHead([("token", "token", knows)]), before(CONTEXT, 3), on_first(CONTEXT), PlantedHead()]
    model: Any = PlantedDecoder(size, CONTEXT, heads)
    model.tokenizer = tokenizer
    return model


def rows_of(found: Syntax) -> dict[str, Any]:
    return {row.relation.partition(":")[2]: row for row in found.rows}


def test_pairs() -> None:
    """The head that knows is right always; a head on one place is the baseline at best."""
    found = coreference(planted(), sentences(200), progress=False)
    assert found.heads == tuple((LAYER, head) for head in range(4))
    rows = rows_of(found)
    assert list(rows) == ["pronoun", "any"]
    row = rows["pronoun"]
    assert (row.layer, row.head, row.accuracy, row.n, row.direction) == (LAYER, 0, 1.0, 100, "to antecedent")
    assert row.low == pytest.approx(1 / (1 + 1.96**2 / 100))  # Wilson, for all of 100
    assert row.high == pytest.approx(1.0)
    assert 0.35 < row.baseline < 0.65
    assert row.offset is None
    assert row.role == "coreference:pronoun"
    accuracies = found.accuracies["coreference:pronoun", "to antecedent"].tolist()
    assert accuracies[2] == accuracies[3]  # the first token is no candidate: all others are equal, and the first counts
    assert all(accuracy < 0.65 for accuracy in accuracies[1:])
    assert {(role.layer, role.head) for role in found.syntactic} == {(LAYER, 0)}
    assert found.counts["pronouns"] == 200
    assert "200 texts; 200 pronouns; each head chosen on one half" in str(found)


def test_a_file(tmp_path: Path) -> None:
    """Pronouns first; mentions cross sentences; nouns by their head words."""
    path = tmp_path / "stories.conllu"
    path.write_text("".join(story(i) for i in range(60)))
    found = coreference(planted(), path, least=20, progress=False)
    rows = rows_of(found)
    assert list(rows) == ["pronoun", "noun", "any"]
    assert found.counts["texts"] == 60
    assert found.counts["pronouns"] == found.counts["other mentions"] == 60
    assert (rows["pronoun"].n, rows["noun"].n, rows["any"].n) == (30, 30, 60)
    for row in rows.values():
        assert (row.head, row.accuracy) == (0, 1.0)
    # words are Yesterday A met B Later P left Then C sang too: C's candidates are 1, 3 and 5
    assert rows["noun"].offset in (-5, -7)
    assert 0.4 < rows["noun"].baseline < 0.75


def test_the_better_of_nearest_and_offset() -> None:
    """If the antecedent is always four words before, though another is nearer."""
    text = "Yesterday Anna met Tom because she was bored"
    row = coreference(planted(), [(text, [(5, [1], [1, 3])])] * 40, least=20, progress=False).rows[0]
    assert (row.offset, row.baseline, row.accuracy) == (-4, 1.0, 1.0)
    assert row.role is None  # it has nothing over that
    row = coreference(planted(), [(text, [(5, [3], [1, 3])])] * 40, least=20, progress=False).rows[0]
    assert (row.offset, row.baseline) == (None, 1.0)


def test_candidates_that_are_left_out() -> None:
    """Are all words before the mention, except the first: of these head 0 finds the name."""
    texts = [("Yesterday Anna met him because she was bored", [(5, [1])])] * 40
    row = coreference(planted(), texts, least=20, progress=False).rows[0]
    assert (row.head, row.accuracy) == (0, 1.0)


def test_what_is_not_asked() -> None:
    """A mention that has no wrong candidate, and one whose antecedent is the first word."""
    texts = sentences(40)
    trivial = [("Yesterday Anna met him because she was bored", [(5, [1], [1])])] * 7
    first = [("Anna met Tom because she was bored", [(4, [0], [0, 2])])] * 7
    found = coreference(planted(), texts + trivial + first, least=10, progress=False)
    assert found.counts["pronouns"] == 40
    assert sum(row.n for row in found.rows if row.relation == "coreference:pronoun") <= 30
    with pytest.raises(
        ValueError, match="source: expected mentions with an antecedent and another candidate, received n"
    ):
        coreference(planted(), trivial, progress=False)


def test_rare_kinds_are_left_out() -> None:
    found = coreference(planted(), sentences(60), progress=False)  # 30 in each half, and 50 are wanted
    assert found.rows == ()
    assert found.left_out["coreference:pronoun", "to antecedent"] == 60


def test_the_model_is_as_it_was() -> None:
    model = planted().train()
    before_it = [parameter.clone() for parameter in model.parameters()]
    coreference(model, sentences(20), least=3, progress=False)
    assert model.training
    assert all(torch.equal(a, b) for a, b in zip(before_it, model.parameters(), strict=True))


def test_what_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "plain.conllu"
    path.write_text("1\tBirds\t_\tNOUN\t_\t_\t2\tnsubj\t_\t_\n2\tsing\t_\tVERB\t_\t_\t0\troot\t_\t_\n\n")
    with pytest.raises(
        ValueError, match=r"plain.conllu: expected entities in its last column, such as Entity=\(e1-per"
    ):
        coreference(planted(), path)
    with pytest.raises(TypeError, match=r"source\[0\]: expected \(words, pairs\), received 'Anna sang'"):
        coreference(planted(), ["Anna sang"])  # type: ignore[list-item]
    with pytest.raises(ValueError, match=r"pairs\[0\]: expected antecedents among the candidates, and the mention not"):
        coreference(planted(), [("Anna met Tom", [(2, [0], [1])])])
    with pytest.raises(ValueError, match="least: expected at least 1, received 0"):
        coreference(planted(), sentences(3), least=0)
    with pytest.raises(TypeError, match=r"model: expected a torch\.nn\.Module, received str"):
        coreference("minilm", sentences(3))  # type: ignore[arg-type]


@WITH_MINILM
@pytest.mark.slow
def test_pronouns_in_minilm() -> None:
    """Some head knows who "she" and "he" are, where the nearest name is right half of the time."""
    row = coreference(models.load("minilm", check=False), sentences(400), progress=False).rows[0]
    assert row.n == 200
    assert row.low > 0.85
    assert row.baseline < 0.6
    assert row.role == "coreference:pronoun"
