"""Heads and grammar, on maps whose answers are known: heads that point where they are told to."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regard.heads.analysis import treebank
from regard.heads.analysis.syntax import syntax
from regard.heads.analysis.syntax.questions import Question, coreference_questions, dependency_questions
from regard.heads.analysis.syntax.report import ROLES, interval, report
from regard.heads.analysis.syntax.run import _attention_maps, random_halves, shuffled_copy
from regard.heads.analysis.syntax.scores import Tally, answered, word_weights
from regard.heads.analysis.syntax.texts import TokenizedText, _encode, _words_of_tokens, passages, questions_of_others
from regard.heads.watch_all import evaluating
from regard.models import Encoder, ModelConfig

MAPS = "regard.heads.analysis.syntax.run._attention_maps"


tokenizers = pytest.importorskip("tokenizers", reason="tokenizers, which cuts text, is not installed")

WORDS = ["the", "a", "old", "red", "cat", "dog", "bird", "saw", "ate", "sang", "often", "here"]
VOCABULARY = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", *WORDS]
RELATIONS = ["nsubj", "obj", "det", "amod"]


# ----------------------------------------------------------------------------------------------------
# A treebank, a tokenizer, a model and maps of our own


def rows(words: list[str], heads: list[int | None], relations: list[str], misc: list[str] | None = None) -> str:
    """A sentence in CoNLL-U. Heads are numbered from 0 here."""
    lines = [
        f"{i + 1}\t{word}\t_\tX\t_\t_\t{0 if head is None else head + 1}\t{relation}\t_\t{misc[i] if misc else '_'}"
        for i, (word, head, relation) in enumerate(zip(words, heads, relations, strict=True))
    ]
    return "\n".join(lines) + "\n\n"


def treebank_of(folder: Path, count: int, seed: int = 0, longest: int = 11) -> Path:
    """Sentences of random words and random trees."""
    draw, text = random.Random(seed), ""
    for _ in range(count):
        n = draw.randint(3, longest)
        root = draw.randrange(n)
        heads: list[int | None] = [None] * n
        attached = [root]
        for i in draw.sample([j for j in range(n) if j != root], n - 1):  # a tree: each depends on one that is in it
            heads[i] = draw.choice(attached)
            attached.append(i)
        relations = ["root" if head is None else draw.choice(RELATIONS) for head in heads]
        text += rows(draw.choices(WORDS, k=n), heads, relations)
    path = folder / "random.conllu"
    path.write_text(text)
    return path


def of_words() -> Any:
    """A tokenizer that knows a word as one piece, between [CLS] and [SEP]."""
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: i for i, word in enumerate(VOCABULARY)}, "[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.add_special_tokens(VOCABULARY[:3])
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    return made


def new_model(**changes: Any) -> Encoder:
    options: dict[str, Any] = {
        "layers": 2,
        "embed_dim": 6,
        "num_heads": 3,
        "vocabulary": len(VOCABULARY),
        "inner": 7,
        "context": 17,
    }
    torch.manual_seed(0)
    return Encoder(ModelConfig(**options | changes), of_words())


def pointing(n: int, target: Callable[[int], int | None]) -> Tensor:
    """A map (n, n) in which each word gives all its weight to one, or none."""
    weights = torch.zeros(n, n)
    for i in range(n):
        if (place := target(i)) is not None and 0 <= place < n:
            weights[i, place] = 1.0
    return weights


def shared_weight(weights: Tensor, own: float = 0.5) -> Tensor:
    """The same where a word gives most of its weight to itself, and a little to every other."""
    n = weights.shape[-1]
    return weights * (1 - own - 0.1) + torch.eye(n) * own + 0.1 / n


def sentences_of(folder: Path, count: int, seed: int = 0) -> list[treebank.Sentence]:
    return treebank.read(treebank_of(folder, count, seed))


# ----------------------------------------------------------------------------------------------------
# Words from pieces


def test_word_weights_is_the_sum_over_keys_and_the_mean_over_queries() -> None:
    owners, n = [-1, 0, 0, 1, 3, 3, 3, -1, 4], 5  # word 2 has no piece
    pieces = torch.randn(2, 3, 9, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).softmax(-1)
    words = word_weights(pieces, owners, n)
    assert words.shape == (2, 3, n, n)
    for i in range(n):
        for j in range(n):
            queries = [p for p, word in enumerate(owners) if word == i]
            keys = [p for p, word in enumerate(owners) if word == j]
            by_hand = sum((pieces[..., q, keys].sum(-1) for q in queries), torch.zeros(2, 3)) / max(len(queries), 1)
            torch.testing.assert_close(words[..., i, j], by_hand.double())


def test_pieces_belong_to_the_word_with_which_they_share_most() -> None:
    spans = [(0, 2), (2, 5), None, (6, 9)]
    assert _words_of_tokens([(0, 0), (0, 3), (3, 5), (5, 7), (7, 9), (9, 9)], spans, 9) == [-1, 0, 1, 3, 3, -1]
    assert _words_of_tokens([(0, 4)], [(0, 2), (2, 4)], 4) == [0]  # of equals the first
    assert _words_of_tokens([(4, 5)], [(0, 4)], 5) == [-1]


# ----------------------------------------------------------------------------------------------------
# Answers


def test_a_head_that_points_to_the_syntactic_head_is_always_right(tmp_path: Path) -> None:
    tally = Tally()
    for sentence in sentences_of(tmp_path, 29):
        heads = [word.head for word in sentence.words]
        tally.add(shared_weight(pointing(len(heads), heads.__getitem__))[None], dependency_questions(sentence))
    for relation in RELATIONS:
        assert tally.accuracies((relation, "to head")).tolist() == [1.0]
        assert tally.accuracies((relation, "to dependent")) < 0.5
    assert set(tally.asked) == {(relation, way) for relation in RELATIONS for way in ("to head", "to dependent")}


def test_a_head_that_points_to_a_dependent_is_always_right_the_other_way(tmp_path: Path) -> None:
    tally = Tally()
    for sentence in sentences_of(tmp_path, 29):
        maps = []
        for relation in RELATIONS:  # a head for each relation, which points to the last dependent
            last = {word.head: i for i, word in enumerate(sentence.words) if word.relation == relation}
            maps.append(shared_weight(pointing(len(sentence.words), last.get)))
        tally.add(torch.stack(maps), dependency_questions(sentence))
    for i, relation in enumerate(RELATIONS):
        assert tally.accuracies((relation, "to dependent"))[i] == 1.0


def test_a_head_that_points_to_an_offset_equals_the_baseline_exactly(tmp_path: Path) -> None:
    tally = Tally()
    offsets = [-2, -1, 1, 2, 3]
    for sentence in sentences_of(tmp_path, 31):
        n = len(sentence.words)
        tally.add(torch.stack([pointing(n, lambda i, o=o: i + o) for o in offsets]), dependency_questions(sentence))
    for key, asked in tally.asked.items():
        for head, offset in enumerate(offsets):
            assert int(tally.right[key][head]) == tally.offsets[key][offset]
            assert tally.baseline(key, offset) == pytest.approx(float(tally.accuracies(key)[head]))
        best = tally.offsets[key].most_common(1)[0][1]
        assert tally.baseline(key, tally.best_offset(key)) == best / asked


def test_a_uniform_head_answers_the_first_word() -> None:
    questions = [Question("x", "to head", word, (0,)) for word in range(5)]
    assert answered(torch.full((5, 5), 0.2), questions).tolist() == [False, True, True, True, True]


def test_a_word_that_attends_to_itself_alone_answers_nothing() -> None:
    questions = [Question("x", "to head", word, (0, 1, 2)) for word in range(3)]
    assert answered(torch.eye(3), questions).tolist() == [False] * 3


def test_answers_are_sought_among_the_candidates() -> None:
    weights = torch.tensor([0.1, 0.2, 0.4, 0.3]).expand(2, 3, 4, 4)  # (2, 3 heads, n, n)
    for candidates, right in [(None, False), ((0, 1), True), ((0, 3), False), ((1, 2), False)]:
        found = answered(weights, [Question("x", "to antecedent", 3, (1,), candidates)])
        assert found.shape == (2, 3, 1)
        assert found.all() if right else not found.any()


def test_a_decoder_is_asked_what_lies_behind() -> None:
    heads = [1, None, 1, 4, 2]  # words 0 and 3 look ahead
    questions = [Question("x", "to head", i, (head,)) for i, head in enumerate(heads) if head is not None]
    questions.append(Question("x", "to dependent", 1, (0, 2)))
    causal = torch.ones(5, 5).tril()
    looking = causal / causal.sum(-1, keepdim=True) + 9 * pointing(5, heads.__getitem__).tril()
    tally = Tally()
    tally.add(looking[None], questions)
    assert tally.asked == {("x", "to head"): 2, ("x", "to dependent"): 1}
    assert tally.accuracies(("x", "to head")).tolist() == [1.0]
    assert tally.offsets["x", "to dependent"] == {-1: 1}  # no offset is right for what was not asked
    everywhere = Tally()
    everywhere.add(torch.full((1, 5, 5), 0.2), questions)
    assert everywhere.asked == {("x", "to head"): 4, ("x", "to dependent"): 1}


# ----------------------------------------------------------------------------------------------------
# Coreference


def test_coreference_asks_for_an_antecedent_among_all_mentions_before() -> None:
    mentions = [("ann", 0), ("bob", 2), ("ann", 5), ("tea", 7), ("bob", 9), ("ann", 9)]
    assert coreference_questions(mentions) == [
        Question("coreference", "to antecedent", 5, (0,), (0, 2)),
        Question("coreference", "to antecedent", 9, (0, 5), (0, 2, 5, 7)),
        Question("coreference", "to antecedent", 9, (2,), (0, 2, 5, 7)),
    ]


def test_the_nearest_mention_is_the_baseline_of_coreference() -> None:
    tally = Tally()
    questions = coreference_questions([("ann", 0), ("bob", 2), ("ann", 5), ("ann", 7)])
    tally.add(pointing(11, lambda i: {5: 0, 7: 2}.get(i, 0))[None], questions)
    key = ("coreference", "to antecedent")
    assert tally.baseline(key, None) == 0.5  # 5: the nearest is 2, of bob; 7: it is 5
    assert tally.accuracies(key).tolist() == [0.5]


def test_passages_are_sentences_of_one_document_within_the_limit() -> None:
    def sentence(name: str, document: int) -> treebank.Sentence:
        return treebank.Sentence((), "", (), document, name)

    given = [("a", 0, 5), ("b", 0, 5), ("c", 0, 3), ("d", 1, 4), ("e", 1, 13), ("f", 1, 2)]
    lengths = [(sentence(name, document), length) for name, document, length in given]
    assert [[s.name for s in passage] for passage in passages(lengths, 11)] == [["a", "b"], ["c"], ["d"], ["e"], ["f"]]


# ----------------------------------------------------------------------------------------------------
# The report


def counted(right: list[int], asked: int, offsets: dict[int, int], key: tuple[str, str] = ("det", "to head")) -> Tally:
    tally = Tally()
    tally.asked[key] = asked
    tally.right[key] = torch.tensor(right)
    tally.offsets[key] = Counter(offsets)
    return tally


HEADS = [("one", 0), ("one", 1), ("two", 0)]
BAD = [1, 2, 1]  # what shuffled heads get right


def test_heads_and_offsets_are_chosen_on_one_half_and_reported_on_the_other() -> None:
    trained = (counted([10, 60, 50], 100, {1: 30, -1: 20}), counted([90, 70, 10], 200, {1: 20, -1: 80}))
    shuffled = (counted([5, 9, 7], 100, {}), counted([40, 20, 30], 200, {}))
    found = report(HEADS, trained, shuffled)
    (row,) = found.rows
    assert (row.layer, row.head, row.n) == ("one", 1, 200)
    assert (row.accuracy, row.offset, row.baseline, row.shuffled) == pytest.approx((0.35, 1, 0.1, 0.1))
    assert row.gain == pytest.approx(0.25)
    assert found.accuracies["det", "to head"].tolist() == pytest.approx([0.45, 0.35, 0.05])
    assert row.role == "determiner and noun"
    assert found.roles() == {("one", 1): [("det", "to head", row.accuracy, row.baseline, row.shuffled)]}


def test_other_heads_have_a_role_where_they_have_the_margin_on_both_halves() -> None:
    trained = (counted([39, 60, 41], 100, {1: 30}), counted([500, 500, 500], 1000, {1: 300}))
    found = report(HEADS, trained, (counted(BAD, 100, {}), counted(BAD, 1000, {})))
    assert set(found.roles()) == {("one", 1), ("two", 0)}
    assert len(found.rows) == 1


@pytest.mark.parametrize(
    "right, asked, offset, shuffled, role",
    [
        (50, 100, 30, 9, True),  # 50 of 100: from 40.4 on
        (49, 100, 30, 9, False),  # from 39.4 on
        (41, 100, 30, 9, False),
        (4200, 10000, 3000, 9, True),  # from 41.0 on
        (50, 100, 30, 40, True),
        (50, 100, 30, 41, False),
    ],
)
def test_a_role_is_ten_points_over_the_offset_and_over_shuffled_down_to_the_low_end(
    right: int, asked: int, offset: int, shuffled: int, role: bool
) -> None:
    half = counted([0, right, 0], asked, {1: offset})
    chance = counted([0, 0, shuffled], 100, {})
    found = report(HEADS, (half, half), (chance, chance))
    assert (found.rows[0].role is not None) is role
    assert bool(found.roles()) is role


@pytest.mark.parametrize(
    "relation, role",
    [
        ("nsubj", "subject and verb"),
        ("nsubj:pass", "subject and verb"),
        ("acl:relcl", "relative clause"),
        ("acl", "clause and noun"),
        ("nmod:poss", "possessor and noun"),
        ("vocative", "vocative"),
    ],
)
def test_roles_have_names(relation: str, role: str) -> None:
    key = (relation, "to head")
    half, chance = counted([0, 90, 0], 100, {1: 30}, key), counted(BAD, 100, {}, key)
    assert report(HEADS, (half, half), (chance, chance)).rows[0].role == role


def test_relations_that_are_rare_in_a_half_are_left_out() -> None:
    many, few = counted(BAD, 50, {1: 1}), counted(BAD, 49, {1: 1})
    assert len(report(HEADS, (many, many), (many, many)).rows) == 1
    found = report(HEADS, (many, few), (many, few))
    assert found.rows == ()
    assert found.left_out == {("det", "to head"): 99}
    assert len(report(HEADS, (many, few), (many, few), least=49).rows) == 1


def test_intervals() -> None:
    """Wilson's: the shares p whose distance from the one seen is at most 1.96 of their own standard deviations."""
    for right, n in ((0, 7), (3, 7), (73, 100), (101, 101)):
        for p in interval(right / n, n):
            assert abs(p - right / n) == pytest.approx(1.96 * (abs(p * (1 - p)) / n) ** 0.5, abs=1e-7)
    half = counted([0, 73, 0], 100, {1: 30})
    (row,) = report(HEADS, (half, half), (half, half)).rows
    assert (row.low, row.high) == pytest.approx(interval(0.73, 100), abs=1e-6)


def test_rows_as_plain_ones_and_as_a_table() -> None:
    half = counted([0, 73, 0], 100, {-2: 34})
    other = counted([99, 0, 0], 100, {1: 2}, ("amod", "to dependent"))
    for part in ("asked", "right", "offsets"):
        getattr(half, part).update(getattr(other, part))
    chance = counted(BAD, 100, {})
    chance.asked.update({("amod", "to dependent"): 100})
    chance.right["amod", "to dependent"] = torch.tensor(BAD)
    found = report(HEADS, (half, half), (chance, chance), counts={"sentences": 211, "words without a token": 0})
    first, second = found.table()
    assert (first["relation"], first["layer"], first["head"], first["n"]) == ("amod", "one", 0, 100)
    assert second["gain"] == pytest.approx(0.39)
    lines = str(found).split("\n")
    assert lines[0].startswith("211 sentences; each head chosen on one half")
    assert lines[1].split() == [
        "relation",
        "direction",
        "layer",
        "head",
        "accuracy",
        "95",
        "%",
        "baseline",
        "gain",
        "shuffled",
        "n",
        "role",
    ]
    assert lines[2].split()[:10] == ["amod", "to", "dependent", "one", "0", "99.0", "94.6-99.8", "2.0", "at", "+1"]
    assert lines[3].split()[4:12] == ["1", "73.0", "63.6-80.7", "34.0", "at", "-2", "39.0", "2.0"]
    assert len({line.index("one") for line in lines[2:]}) == 1  # aligned


# ----------------------------------------------------------------------------------------------------
# Models


def test_shuffled_weights_are_the_same_numbers_in_another_order() -> None:
    model = new_model()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    copies = [dict(shuffled_copy(model, seed).named_parameters()) for seed in (0, 0, 1)]
    for name, weight in model.named_parameters():
        assert torch.equal(weight, before[name])
        one, again, other = (copy[name] for copy in copies)
        assert torch.equal(one, again)
        assert torch.equal(one.flatten().sort().values, weight.flatten().sort().values)
        if weight.dim() > 1:
            assert not torch.equal(one, weight)
            assert not torch.equal(one, other)
        else:
            assert torch.equal(one, weight)


def test_tied_weights_stay_tied_when_shuffled() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(5, 3, bias=False)
            self.other = self.one

    made = shuffled_copy(Tied(), 0)
    assert isinstance(made, Tied)
    assert made.one.weight is made.other.weight


def test_parts_of_a_model_are_in_the_mode_they_were_in() -> None:
    model = new_model().train()
    model.blocks[0].eval()
    modes = [module.training for module in model.modules()]
    with evaluating(model):
        assert not any(module.training for module in model.modules())
    assert [module.training for module in model.modules()] == modes


# ----------------------------------------------------------------------------------------------------
# All of it, with maps that are known


class Pointers:
    """Instead of a look into a model: a layer "a" whose head 0 points to the syntactic head and 1 to the piece before,
    and a layer "b" whose only head points to the piece after. With shuffled weights none points anywhere."""

    def __init__(self, model: nn.Module, sentences: list[treebank.Sentence], tokenizer: Any) -> None:
        self.model, self.batches = model, []
        self.heads = {tuple(tokenizer.encode(s.text).ids): [word.head for word in s.words] for s in sentences}

    def __call__(self, model: nn.Module, ids: Tensor) -> Iterator[tuple[str, Tensor]]:
        self.batches.append(ids.shape)
        assert not model.training
        n = ids.shape[1]
        parents = [[None, *self.heads[tuple(row)], None] for row in ids.tolist()]  # between [CLS] and [SEP]
        to_head = [pointing(n, lambda i, p=p: 0 if p[i] is None else p[i] + 1) for p in parents]
        before, after = pointing(n, lambda i: i - 1), pointing(n, lambda i: i + 1)
        scale = float(model is self.model)
        yield "a", shared_weight(scale * torch.stack([torch.stack([one, before]) for one in to_head]))
        yield "b", shared_weight(scale * after.repeat(len(ids), 1, 1, 1))


@pytest.fixture
def known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Encoder, Path, Pointers]:
    path, model = treebank_of(tmp_path, 149), new_model().train()
    pointers = Pointers(model, treebank.read(path), model.tokenizer)
    monkeypatch.setattr(MAPS, pointers)
    return model, path, pointers


def test_the_head_that_points_to_syntactic_heads_is_found(known: tuple[Encoder, Path, Pointers]) -> None:
    model, path, _ = known
    found = syntax(model, path, progress=False)
    assert found.heads == (("a", 0), ("a", 1), ("b", 0))
    to_head = [row for row in found.rows if row.direction == "to head"]
    assert {row.relation for row in to_head} == set(RELATIONS)
    for row in to_head:
        assert (row.layer, row.head, row.accuracy) == ("a", 0, 1.0)
        assert row.shuffled < 0.5
        assert row.role == ROLES[row.relation]
        assert found.accuracies[row.relation, "to head"][1] < 0.5
    assert {role.relation for role in found.roles()["a", 0] if role.direction == "to head"} == set(RELATIONS)
    assert found.counts == {"sentences": 149, "sentences longer than the model reads": 0, "words without a token": 0}
    assert model.training


def test_only_texts_of_one_length_are_computed_together(known: tuple[Encoder, Path, Pointers]) -> None:
    model, path, pointers = known
    syntax(model, path, progress=False, batch_size=7)
    assert sum(shape[0] for shape in pointers.batches) == 2 * 149  # as it is, and shuffled
    assert max(shape[0] for shape in pointers.batches) == 7
    assert len({shape[1] for shape in pointers.batches}) == 9  # 3 to 11 words


def test_the_halves_are_drawn_by_the_seed(known: tuple[Encoder, Path, Pointers]) -> None:
    model, path, _ = known
    one, again, other = (syntax(model, path, progress=False, seed=seed) for seed in (0, 0, 1))
    assert one.table() == again.table()
    assert one.table() != other.table()
    halves = random_halves(149, 0)
    assert sorted((halves.count(0), halves.count(1))) == [74, 75]


def test_limit(known: tuple[Encoder, Path, Pointers]) -> None:
    model, path, _ = known
    found = syntax(model, path, progress=False, limit=11)
    assert found.counts["sentences"] == 11
    assert found.rows == ()
    assert found.left_out


def test_sentences_longer_than_the_model_reads_are_skipped_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, model = treebank_of(tmp_path, 37), new_model(context=7)
    pointers = Pointers(model, treebank.read(path), model.tokenizer)
    monkeypatch.setattr(MAPS, pointers)
    found = syntax(model, path, progress=False)
    assert found.counts["sentences"] + found.counts["sentences longer than the model reads"] == 37
    assert max(shape[1] for shape in pointers.batches) == 7


def test_words_without_a_piece_are_skipped_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, model = tmp_path / "some.conllu", new_model()
    lines = rows(["cat", "saw", "dog"], [1, None, 1], ["nsubj", "root", "obj"]).split("\n")
    path.write_text("\n".join(["1-2\tcatsaw" + "\t_" * 8, *lines]))
    model.tokenizer.add_tokens(["catsaw"])  # type: ignore[union-attr] - one piece for two words: the first has it
    monkeypatch.setattr(MAPS, lambda _, ids: [("a", torch.full((len(ids), 1, 4, 4), 0.25))])
    found = syntax(model, path, progress=False)
    assert found.counts["words without a token"] == 1
    assert found.rows == ()
    assert found.left_out == {}  # the verb was in both relations


def test_tokenizers_of_transformers(known: tuple[Encoder, Path, Pointers]) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    model, path, _ = known
    of_its_own = syntax(model, path, progress=False)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=model.tokenizer)
    model.tokenizer = None
    assert syntax(model, path, tokenizer=fast, progress=False).table() == of_its_own.table()


def test_tokenizers_that_pad_are_read_without_padding() -> None:
    padding = of_words()
    padding.enable_padding(length=13, pad_id=0, pad_token="[PAD]")
    pieces = [1, 4, 8, 2], [(0, 0), (0, 3), (4, 7), (0, 0)]
    assert _encode(padding, "the cat") == _encode(of_words(), "the cat") == pieces


# ----------------------------------------------------------------------------------------------------
# All of it, with maps as models compute them


class Looking(nn.Module):
    """A layer of attention in which each token looks at those that its embedding names: "the" at "cat"."""

    def __init__(self, causal: bool = False) -> None:
        super().__init__()
        self.tokenizer, self.causal = of_words(), causal
        self.queries = nn.Parameter(torch.zeros(len(VOCABULARY), len(VOCABULARY)))
        self.queries.data[VOCABULARY.index("the"), VOCABULARY.index("cat")] = 300.0
        self.keys = nn.Parameter(torch.eye(len(VOCABULARY)))

    def forward(self, ids: Tensor) -> Tensor:
        q, k = self.queries[ids][:, None], self.keys[ids][:, None]  # (B, 1, N, D)
        return nn.functional.scaled_dot_product_attention(q, k, k, is_causal=self.causal)


def test_a_model_that_is_watched(tmp_path: Path) -> None:
    path, model = tmp_path / "cats.conllu", Looking()
    draw, text = random.Random(0), ""
    for _ in range(103):  # "the", then from 1 to 5 other words, then "cat"
        between = draw.choices(["old", "red", "here"], k=draw.randint(1, 5))
        n = len(between) + 2
        text += rows(["the", *between, "cat"], [n - 1] * (n - 1) + [None], ["det", *["amod"] * (n - 2), "root"])
    path.write_text(text)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    found = syntax(model, path, progress=False)
    assert len(found.heads) == 1
    (row,) = [row for row in found.rows if (row.relation, row.direction) == ("det", "to head")]
    assert (row.accuracy, row.role, row.n) == (1.0, "determiner and noun", 51)
    assert row.baseline < 0.5
    assert row.shuffled < 0.5
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    blind = syntax(nn.Sequential(Looking(causal=True)), path, tokenizer=of_words(), progress=False)
    assert not any(row.direction == "to head" for row in blind.rows)  # "cat" is ahead
    assert {row.direction for row in blind.rows} == {"to dependent"}


class Resting(nn.Module):
    """A causal layer in which each token gives 0.9 of its attention to the first one, whatever it is; of what is left,
    ten times as much to a "cat" as to any other."""

    def __init__(self, rest: float = 0.9) -> None:
        super().__init__()
        self.rest, self.liked = rest, nn.Parameter(torch.ones(len(VOCABULARY), len(VOCABULARY)))
        self.liked.data[:, VOCABULARY.index("cat")] = 10.0
        self.tokenizer = of_words()
        self.tokenizer.post_processor = tokenizers.processors.TemplateProcessing(single="$A")  # no special token

    def forward(self, ids: Tensor) -> Tensor:
        n = ids.shape[1]
        wanted = self.liked[ids[:, :, None], ids[:, None, :]] * torch.ones(n, n).tril()
        weights = (1 - self.rest) * wanted / wanted.sum(-1, keepdim=True)
        weights[:, :, 0] += self.rest
        scores = weights.log()[:, None]  # (B, 1, N, N)
        q = torch.zeros(len(ids), 1, n, 2)
        return nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=scores)


def test_the_first_token_is_no_candidate(tmp_path: Path) -> None:
    """A head that rests on the first word knows the grammar all the same; and where the first word is the answer, it is
    not asked."""
    path, model = tmp_path / "resting.conllu", Resting()
    draw, text = random.Random(0), ""
    for _ in range(211):  # of thirteen words one is "cat", and the last its dependent
        words = [draw.choice(["the", "a"]), *draw.choices(["old", "red", "here", "often"], k=11), "dog"]
        cat = draw.randint(1, 11)
        words[cat] = "cat"
        heads: list[int | None] = [cat] * len(words)
        heads[0], heads[cat], heads[-1] = None, 0, cat
        relations = ["amod"] * len(words)
        relations[0], relations[cat], relations[-1] = "root", "dep", "obj"
        text += rows(words, heads, relations)
    path.write_text(text)
    found = syntax(model, path, progress=False)
    (row,) = [row for row in found.rows if (row.relation, row.direction) == ("obj", "to head")]
    assert (row.accuracy, row.role) == (1.0, "object and verb")
    assert row.baseline < 0.5
    assert ("dep", "to head") not in found.accuracies  # its head is the first word
    assert found.crossed == 0
    assert str(found).splitlines()[0].endswith("with the trees of other sentences 0")


def test_the_first_word_after_a_special_token_is_a_candidate() -> None:
    questions = [Question("x", "to head", 1, (0,)), Question("x", "to antecedent", 2, (0,), (0, 1))]
    special, plain = TokenizedText([1, 4, 5, 6], [-1, 0, 1, 2], 3, []), TokenizedText([4, 5, 6], [0, 1, 2], 3, [])
    assert (special.first_word, plain.first_word) == (-1, 0)
    assert special.about(questions) == questions
    assert plain.about(questions) == []
    both = Question("x", "to antecedent", 2, (0, 1), (0, 1))
    assert plain.about([both]) == [Question("x", "to antecedent", 2, (1,), (1,))]


def test_trees_of_other_sentences_are_as_long() -> None:
    lengths = [3, 5, 3, 7, 5, 3]
    texts = [
        TokenizedText(
            [1] * (n + 1),
            [-1, *range(n)],
            n,
            [Question("x", "to head", 0, (n - 1,)), Question(str(i), "to head", 1, (0,))],
        )
        for i, n in enumerate(lengths)
    ]
    others = questions_of_others(texts)
    assert [[q.relation for q in some] for some in others] == [
        ["x", "5"],
        ["x", "4"],
        ["x", "0"],
        [],
        ["x", "1"],
        ["x", "2"],
    ]


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_maps_are_those_of_transformers(family: str) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    sizes = {
        "bert": {"num_hidden_layers": 2, "hidden_size": 15, "num_attention_heads": 3, "intermediate_size": 7},
        "gpt2": {"n_layer": 2, "n_embd": 15, "n_head": 3},
    }[family]
    config = transformers.AutoConfig.for_model(family, vocab_size=17, **sizes)
    model = transformers.AutoModel.from_config(config, attn_implementation="eager").eval()
    ids = torch.randint(17, (2, 7))
    with torch.no_grad():
        right = model(ids, output_attentions=True).attentions
    maps = list(_attention_maps(model, ids))
    assert len(maps) == len(right) == 2
    for (_, weights), expected in zip(maps, right, strict=True):
        torch.testing.assert_close(weights, expected)


# ----------------------------------------------------------------------------------------------------
# All of it, coreference


def stories(count: int) -> str:
    """Documents of two sentences, "the cat saw a dog" and "here it sang": whoever sang is the cat."""
    text = ""
    for i in range(count):
        said = [f"Entity=(c{i}-animal-2", f"Entity=c{i})", "_", f"Entity=(d{i}-animal-2", f"Entity=d{i})"]
        text += "# newdoc\n" + rows(
            ["the", "cat", "saw", "a", "dog"], [1, 2, None, 4, 2], ["det", "nsubj", "root", "det", "obj"], said
        )
        text += rows(["here", "bird", "sang"], [2, 2, None], ["advmod", "nsubj", "root"], ["_", f"Entity=(c{i})", "_"])
    return text


def test_coreference_of_the_file_crosses_sentences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, model = tmp_path / "stories.conllu", new_model()
    path.write_text(stories(100))

    def maps(run: nn.Module, ids: Tensor) -> Iterator[tuple[str, Tensor]]:
        n = ids.shape[1]  # [CLS] the cat saw a dog here bird sang [SEP]
        to_cat, to_dog = pointing(n, lambda i: 2), pointing(n, lambda i: 5)
        one = torch.stack([to_cat if run is model else to_dog, to_dog])
        yield "a", shared_weight(one).repeat(len(ids), 1, 1, 1)

    monkeypatch.setattr(MAPS, maps)
    found = syntax(model, path, progress=False)
    (row,) = [row for row in found.rows if row.relation == "coreference"]
    assert (row.direction, row.layer, row.head, row.n, row.offset) == ("to antecedent", "a", 0, 50, None)
    assert (row.accuracy, row.baseline, row.shuffled) == (1.0, 0.0, 0.0)  # the dog is nearest
    assert row.role == "coreference"
    assert "nearest" in str(found)


def test_coreference_of_pairs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, model = tmp_path / "pairs.conllu", new_model()
    path.write_text(rows(["cat", "dog", "saw", "bird"], [2, 2, None, 2], ["nsubj", "list", "root", "obj"]) * 103)
    to_dog = shared_weight(pointing(6, lambda i: 2))
    monkeypatch.setattr(MAPS, lambda _, ids: [("a", to_dog.repeat(len(ids), 1, 1, 1))])
    for antecedent, accuracy, nearest in ((0, 0.0, 0.0), (1, 1.0, 1.0)):
        found = syntax(model, path, progress=False, pairs=[[(3, [antecedent], [0, 1])]] * 103)
        (row,) = [row for row in found.rows if row.relation == "coreference"]
        assert (row.accuracy, row.baseline, row.n) == (accuracy, nearest, 51)


# ----------------------------------------------------------------------------------------------------
# What is wrong


def test_what_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"model: expected a torch.nn.Module, received str"):
        syntax("minilm", treebank_of(tmp_path, 1))  # type: ignore[arg-type]


def test_models_that_read_two_texts(tmp_path: Path) -> None:
    class Two(nn.Module):
        def forward(self, input_ids: Tensor, decoder_input_ids: Tensor | None = None) -> None: ...

    with pytest.raises(ValueError, match=r"model: expected an encoder or a decoder.*remedy: model.get_encoder\(\)"):
        syntax(Two(), treebank_of(tmp_path, 1))


def test_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="tokenizer: expected one, as the model has none, received None; remedy: pass"):
        syntax(nn.Linear(3, 5), treebank_of(tmp_path, 1))


def test_tokenizers_that_do_not_know_where_their_pieces_are(tmp_path: Path) -> None:
    class Slow:
        is_fast = False

    class Other:
        def encode(self, text: str) -> list[int]:
            return [1, 2]

    with pytest.raises(TypeError, match=r"tokenizer: expected a fast one, .*received Slow; remedy: AutoTokenizer"):
        syntax(new_model(), treebank_of(tmp_path, 1), tokenizer=Slow())
    with pytest.raises(TypeError, match=r"tokenizer: expected a tokenizers\.Tokenizer, or a fast .*received Other"):
        syntax(new_model(), treebank_of(tmp_path, 1), tokenizer=Other())


def test_a_file_without_sentences(tmp_path: Path) -> None:
    path = tmp_path / "empty.conllu"
    path.write_text("# nothing\n")
    with pytest.raises(ValueError, match=r"empty\.conllu: expected at least one sentence, received none"):
        syntax(new_model(), path)


def test_a_model_without_attention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MAPS, lambda model, ids: [])
    with pytest.raises(ValueError, match="model: expected self-attention over the tokens of a text, received none"):
        syntax(new_model(), treebank_of(tmp_path, 1), progress=False)


@pytest.mark.parametrize(
    "options, error, said",
    [
        ({"batch_size": 0}, ValueError, "batch_size: expected an integer, at least 1, received 0"),
        ({"batch_size": 2.0}, TypeError, r"batch_size: expected an integer, at least 1, received 2\.0"),
        ({"seed": -1}, ValueError, "seed: expected an integer, at least 0, received -1"),
        ({"seed": None}, TypeError, "seed: expected an integer, at least 0, received None"),
        ({"limit": 0}, ValueError, "limit: expected a positive integer"),
        ({"pairs": []}, ValueError, "pairs: expected a list for each of 2 sentences, received 0"),
        ({"pairs": [[], [(99, [0], [0])]]}, ValueError, r"pairs\[1\]: expected words from 0 to .*received \(99, "),
        ({"pairs": [[(1, [0], [0, 77])], []]}, ValueError, r"pairs\[0\]: expected words from 0 to "),
        ({"pairs": [[(1, [0], [2])], []]}, ValueError, r"pairs\[0\]: expected antecedents among the candidates"),
        ({"pairs": [[(1, [0], [0, 1])], []]}, ValueError, r"pairs\[0\]: expected antecedents among the candidates"),
        ({"pairs": [[(1, [], [0])], []]}, ValueError, r"pairs\[0\]: expected antecedents among the candidates"),
    ],
)
def test_arguments_that_are_wrong(tmp_path: Path, options: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        syntax(new_model(), treebank_of(tmp_path, 2), **options)
