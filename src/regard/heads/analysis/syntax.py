"""Which heads follow grammar: how often the word that a head attends to most is the one that a treebank ties it to.

    a CoNLL-U file ─ treebank.py ─> sentences ─> questions        "who is the head of this subject?"
    a model ─ watch ─> weights of pieces ─> weights of words      what each head attends to
    both ─> right answers of each head, beside what is right without looking ─> `Syntax`

After Clark et al. 2019, "What Does BERT Look At? An Analysis of BERT's Attention": the weights of words are summed over
the pieces of the word attended to and averaged over the pieces of the word that attends; a head's answer is the word
with the most of them, special tokens and the word itself left out. Different from there: the first token is left out
too, special or not, for it is where heads of decoders put what they have no use for (a sink); the head for a relation
is chosen on one half of the sentences and its accuracy is that on the other (the best of hundreds of heads, chosen
where it is scored, is good by luck too); and the direction from a head word to its dependent is also read along a row
of the weights (there: along a column).

Letters: N pieces, n words, C heads of all layers, Q questions.
"""

from __future__ import annotations

import copy
import inspect
import math
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regard.errors import bad_type, bad_value, printable
from regard.heads.analysis import treebank
from regard.heads.analysis.token_classes import evaluating
from regard.heads.analysis.treebank import Sentence
from regard.heads.progress import track
from regard.heads.watch import watch
from regard.models.base import tokenizing

__all__ = ["Question", "Row", "Syntax", "Tally", "answered", "report", "syntax", "words_from_pieces"]

# ----------------------------------------------------------------------------------------------------
# The table of what was decided

LEAST = 50  # a relation is asked at least so often in each half, or left out: of fewer, luck has too large a share
MARGIN = 0.10  # a head is syntactic from so much over the best offset on (Voita et al. 2019)
NORMAL = 1.96  # standard deviations to each side of an interval: 95 %
PASSAGE = 256  # coreference crosses sentences: so many pieces of a document are read together, at most
NOT_ASKED = ("root", "punct")  # the root has no head word; punctuation is not grammar (Clark et al. leave both out)

TO_HEAD, TO_DEPENDENT, TO_ANTECEDENT = "to head", "to dependent", "to antecedent"
COREFERENCE = "coreference"

# What a head is called that follows a relation; a subtype is called like its type, any other like itself.
ROLES = {
    "nsubj": "subject and verb",
    "csubj": "subject and verb",
    "obj": "object and verb",
    "dobj": "object and verb",
    "iobj": "indirect object and verb",
    "det": "determiner and noun",
    "amod": "adjective and noun",
    "nummod": "number and noun",
    "nmod:poss": "possessor and noun",
    "poss": "possessor and noun",
    "compound": "parts of a compound",
    "compound:prt": "particle and verb",
    "flat": "parts of a name",
    "case": "preposition and noun",
    "aux": "auxiliary and verb",
    "cop": "copula and predicate",
    "advmod": "adverb and what it modifies",
    "mark": "conjunction and clause",
    "cc": "coordinator and conjunct",
    "conj": "conjuncts",
    "acl:relcl": "relative clause",
    "rcmod": "relative clause",
}


# ----------------------------------------------------------------------------------------------------
# Questions


class Question(NamedTuple):
    """Which word does `word` attend to most? Right is any of `answers`.

    Attributes:
        relation, direction: what it is counted as.
        word: number of the word that attends.
        answers: numbers of words.
        candidates: the words among which the most attended is sought; None for all but `word`.
    """

    relation: str
    direction: str
    word: int
    answers: tuple[int, ...]
    candidates: tuple[int, ...] | None = None


def _dependencies(sentence: Sentence) -> list[Question]:
    """Of each word its head; of each head word any of its dependents in a relation."""
    asked: list[Question] = []
    dependents: dict[tuple[str, int], list[int]] = defaultdict(list)
    for i, word in enumerate(sentence.words):
        if word.head is not None and word.relation not in NOT_ASKED:
            asked.append(Question(word.relation, TO_HEAD, i, (word.head,)))
            dependents[word.relation, word.head].append(i)
    asked += [Question(relation, TO_DEPENDENT, i, tuple(them)) for (relation, i), them in dependents.items()]
    return asked


def _coreferences(mentions: Iterable[tuple[str, int]]) -> list[Question]:
    """Of the head word of each mention, given as (entity, head word), an antecedent among the mentions before."""
    asked = []
    places = sorted(set(mentions), key=lambda mention: mention[::-1])  # by word
    for entity, word in places:
        before = [(other, place) for other, place in places if place < word]
        antecedents = tuple(place for other, place in before if other == entity)
        if antecedents:
            candidates = tuple(sorted({place for _, place in before}))
            asked.append(Question(COREFERENCE, TO_ANTECEDENT, word, antecedents, candidates))
    return asked


# ----------------------------------------------------------------------------------------------------
# From weights to answers


def words_from_pieces(weights: Tensor, owners: Sequence[int], words: int) -> Tensor:
    """Weights of words from those of pieces: summed over the pieces attended to, averaged over those that attend.

    Args:
        weights: (..., N, N).
        owners: of each piece the number of its word; -1 for none (a special token).
        words: how many there are. One without a piece has zeros.

    Returns:
        (..., n, n). Rows sum to less than 1 by what went to special tokens.

    >>> weights = torch.tensor([[0.2, 0.3, 0.5], [0.6, 0.0, 0.4], [0.1, 0.1, 0.8]])
    >>> words_from_pieces(weights, [0, 0, 1], 2)
    tensor([[0.5500, 0.4500],
            [0.2000, 0.8000]])
    """
    owner = torch.tensor(owners, device=weights.device)
    belongs = (owner == torch.arange(words, device=weights.device)[:, None]).to(weights.dtype)  # (n, N)
    return belongs / belongs.sum(1, keepdim=True).clamp(min=1) @ (weights @ belongs.mT)


def answered(weights: Tensor, questions: Sequence[Question]) -> Tensor:
    """Whether each head answers each question rightly.

    Of equal weights the first counts. A row that gives no weight to any candidate answers nothing, and is not right.

    Args:
        weights: of words, (..., n, n).

    Returns:
        Booleans (..., Q).

    >>> weights = torch.tensor([[0.5, 0.4, 0.1], [0.0, 0.9, 0.1], [0.0, 0.0, 1.0]])
    >>> answered(weights, [Question("det", "to head", word, (1, 2)) for word in range(3)])
    tensor([ True,  True, False])
    """
    n, every = weights.shape[-1], range(weights.shape[-1])
    right = _among([question.answers for question in questions], n).to(weights.device)  # (Q, n)
    allowed = _among([every if q.candidates is None else q.candidates for q in questions], n).to(weights.device)
    itself = _among([(question.word,) for question in questions], n).to(weights.device)
    rows = weights[..., [question.word for question in questions], :] * (allowed & ~itself)  # (..., Q, n)
    most = rows.argmax(-1, keepdim=True)
    return (right.expand(rows.shape).gather(-1, most) & (rows.gather(-1, most) > 0))[..., 0]


def _among(chosen: Sequence[Sequence[int]], words: int) -> Tensor:
    """Some words of each question as booleans, (Q, n)."""
    flags = torch.zeros(len(chosen), words, dtype=torch.bool)
    flags[[i for i, some in enumerate(chosen) for _ in some], [word for some in chosen for word in some]] = True
    return flags


def _visible(weights: Tensor, questions: list[Question]) -> list[Question]:
    """The questions that can be answered: in a decoder, which gives no weight to what lies ahead, those with an
    answer behind."""
    if weights.triu(1).any():
        return questions
    back = (
        question._replace(answers=tuple(a for a in question.answers if a < question.word)) for question in questions
    )
    return [question for question in back if question.answers]


Key = tuple[str, str]  # a relation and a direction


@dataclass
class Tally:
    """What was asked over many texts, and how often who was right: each head, each offset, the nearest candidate.

    >>> tally = Tally()
    >>> to_the_next = torch.diag(torch.ones(2), 1)  # (3, 3): words 0 and 1 attend to the word after
    >>> tally.add(to_the_next[None], [Question("det", "to head", 0, (1,)), Question("det", "to head", 1, (0,))])
    >>> tally.asked["det", "to head"], tally.right["det", "to head"], tally.offsets["det", "to head"]
    (2, tensor([1]), Counter({1: 1, -1: 1}))
    """

    asked: Counter[Key] = field(default_factory=Counter)
    right: dict[Key, Tensor] = field(default_factory=dict)  # (C,)
    offsets: dict[Key, Counter[int]] = field(default_factory=dict)
    nearest: Counter[Key] = field(default_factory=Counter)

    def add(self, weights: Tensor, questions: list[Question]) -> None:
        """Ask all heads all questions of one text.

        Args:
            weights: of words, (C, n, n).
        """
        questions = _visible(weights, questions)
        if not questions:
            return
        hits = answered(weights, questions).cpu()
        places: dict[Key, list[int]] = defaultdict(list)
        for i, question in enumerate(questions):
            key = question.relation, question.direction
            places[key].append(i)
            self.offsets.setdefault(key, Counter()).update(answer - question.word for answer in question.answers)
            if question.candidates is not None:
                self.nearest[key] += _nearest(question.word, question.candidates) in question.answers
        for key, these in places.items():
            self.asked[key] += len(these)
            self.right[key] = hits[:, these].sum(1) + self.right.get(key, 0)

    def accuracies(self, key: Key) -> Tensor:
        """Of each head, (C,)."""
        return self.right[key] / self.asked[key]

    def best_offset(self, key: Key) -> int:
        """The one that is right most often; of equals the shortest."""
        return min(self.offsets[key].items(), key=lambda item: (-item[1], abs(item[0]), item[0]))[0]

    def baseline(self, key: Key, offset: int | None) -> float:
        """How often the word at an offset is right; or, without one, the nearest candidate."""
        return (self.nearest[key] if offset is None else self.offsets[key][offset]) / self.asked[key]


def _nearest(word: int, candidates: Sequence[int]) -> int:
    """The candidate nearest to a word; of two the one before."""
    return min(candidates, key=lambda place: (abs(place - word), place))


Halves = tuple[Tally, Tally]  # on which heads are chosen, and for which they are reported


def interval(accuracy: float, n: int) -> tuple[float, float]:
    """Between which shares the true one lies, in 95 of 100 cases, where `n` were asked (Wilson 1927).

    >>> low, high = interval(0.5, 100)
    >>> round(low, 3), round(high, 3)
    (0.404, 0.596)
    """
    z = NORMAL**2 / n
    middle = (accuracy + z / 2) / (1 + z)
    half = math.sqrt(accuracy * (1 - accuracy) * z + z * z / 4) / (1 + z)
    return middle - half, middle + half


# ----------------------------------------------------------------------------------------------------
# The result


@dataclass(frozen=True)
class Row:
    """A head and a relation. All figures are of the half on which nothing was chosen.

    Attributes:
        relation: as the treebank calls it, or "coreference".
        direction: "to head" (a dependent attends to its head word), "to dependent" (a head word attends to one of its
            dependents), or "to antecedent".
        layer, head: which one; the layer by name, the head from 0 on.
        accuracy: the share of words that attend most to the right one.
        low, high: its interval of 95 %, by Wilson's formula for `n` words.
        n: how many were asked.
        baseline: the same for the word at the best `offset`; for coreference, where `offset` is None, for the nearest
            mention.
        shuffled: the same for the best head of the model with shuffled weights.
        role: what such a head is called, if it is syntactic; else None.
    """

    relation: str
    direction: str
    layer: str
    head: int
    accuracy: float
    low: float
    high: float
    n: int
    baseline: float
    offset: int | None
    shuffled: float
    role: str | None

    @property
    def gain(self) -> float:
        """Accuracy over the baseline."""
        return self.accuracy - self.baseline


class Role(NamedTuple):
    """What a syntactic head follows, and how well."""

    relation: str
    direction: str
    accuracy: float
    baseline: float
    shuffled: float


@dataclass(frozen=True)
class Syntax:
    """What heads know of grammar. `print` it.

    Attributes:
        rows: for each relation and direction the best head, those with the largest gain first.
        syntactic: a row for each head and relation with a role, the best heads' among them; the largest gain first.
        heads: the C heads, as (layer, head).
        accuracies: for each relation and direction those of all heads, (C,), on the half that is reported.
        left_out: how often relations and directions were asked that are too rare to report, in both halves together.
        counts: of sentences read, and of what was skipped.
        crossed: how many roles there are if each sentence is asked about the tree of another one, as long as it is:
            what is right then is right by chance. None where that was not asked.
    """

    rows: tuple[Row, ...]
    syntactic: tuple[Row, ...]
    heads: tuple[tuple[str, int], ...]
    accuracies: Mapping[Key, Tensor]
    left_out: Mapping[Key, int]
    counts: Mapping[str, int] = field(default_factory=dict)
    crossed: int | None = None

    def table(self) -> list[dict[str, Any]]:
        """The rows as plain dictionaries: for JSON, CSV, a data frame."""
        return [{**vars(row), "gain": row.gain} for row in self.rows]

    def roles(self) -> dict[tuple[str, int], list[Role]]:
        """Of each syntactic head, by (layer, head), what it follows; its largest gain first."""
        found: dict[tuple[str, int], list[Role]] = {}
        for row in self.syntactic:
            role = Role(row.relation, row.direction, row.accuracy, row.baseline, row.shuffled)
            found.setdefault((row.layer, row.head), []).append(role)
        return found

    def __str__(self) -> str:
        titles = (
            "relation",
            "direction",
            "layer",
            "head",
            "accuracy",
            "95 %",
            "baseline",
            "",
            "gain",
            "shuffled",
            "n",
            "role",
        )
        lines = [titles, *(tuple(map(printable, _cells(row))) for row in self.rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        left = (0, 1, 2, 7, 11)  # columns of words; numbers stand to the right
        table = [
            "  ".join(cell.ljust(widths[i]) if i in left else cell.rjust(widths[i]) for i, cell in enumerate(line))
            for line in lines
        ]
        said = [f"{count} {what}" for what, count in self.counts.items() if count]
        said.append("each head chosen on one half of the texts, and reported on the other")
        if self.crossed is not None:
            heads = len({(row.layer, row.head) for row in self.syntactic})
            said.append(
                f"{len(self.syntactic)} roles on {heads} heads; with the trees of other sentences {self.crossed}"
            )
        return "\n".join(line.rstrip() for line in ["; ".join(said), *table])


def _cells(row: Row) -> tuple[str, ...]:
    """A row as it is printed, in percent."""
    accuracy, low, high, baseline, gain, shuffled = (
        f"{round(100 * share, 1) + 0:.1f}"
        for share in (row.accuracy, row.low, row.high, row.baseline, row.gain, row.shuffled)
    )
    beside = "nearest" if row.offset is None else f"at {row.offset:+d}"
    return (
        row.relation,
        row.direction,
        row.layer,
        str(row.head),
        accuracy,
        f"{low}-{high}",
        baseline,
        beside,
        gain,
        shuffled,
        str(row.n),
        row.role or "",
    )


def report(
    heads: Sequence[tuple[str, int]],
    trained: Halves,
    shuffled: Halves,
    *,
    least: int = LEAST,
    counts: Mapping[str, int] | None = None,
) -> Syntax:
    """Choose heads and offsets on the first half, and report them on the second.

    Args:
        heads: the C heads, as (layer, head).
        trained, shuffled: what was counted with the model, and with its weights shuffled.
        least: relations asked less often in one of the halves are left out.
    """
    rows, syntactic, accuracies, left_out = [], [], {}, {}
    chosen, reported = trained
    for key in sorted(chosen.asked | reported.asked):
        if min(half.asked[key] for half in (*trained, *shuffled)) < least:
            left_out[key] = chosen.asked[key] + reported.asked[key]
            continue
        offset = None if key[0] == COREFERENCE else chosen.best_offset(key)
        bases = [half.baseline(key, offset) for half in trained]
        chance = float(shuffled[1].accuracies(key)[shuffled[0].accuracies(key).argmax()])
        halves = [half.accuracies(key) for half in trained]
        accuracies[key] = halves[1]
        # Chosen are the best head and all others with the margin; whoever has it on the other half too, down to the low
        # end of the interval, has the role. (On one half alone some of hundreds of heads have it by luck.)
        n = reported.asked[key]
        intervals = [interval(accuracy, n) for accuracy in halves[1].tolist()]
        lows = torch.tensor([low for low, _ in intervals])
        best = int(halves[0].argmax())
        candidates = halves[0] >= bases[0] + MARGIN
        candidates[best] = True
        roles = candidates & (lows >= bases[1] + MARGIN) & (lows > chance)
        for i in {best, *roles.nonzero().flatten().tolist()}:
            role = ROLES.get(key[0]) or ROLES.get(key[0].split(":")[0]) or key[0]
            row = Row(
                relation=key[0],
                direction=key[1],
                layer=heads[i][0],
                head=heads[i][1],
                accuracy=float(halves[1][i]),
                low=intervals[i][0],
                high=intervals[i][1],
                n=n,
                baseline=bases[1],
                offset=offset,
                shuffled=chance,
                role=role if roles[i] else None,
            )
            rows += [row] * (i == best)
            syntactic += [row] * (row.role is not None)
    for found in (rows, syntactic):
        found.sort(key=lambda row: -row.gain)
    return Syntax(tuple(rows), tuple(syntactic), tuple(heads), accuracies, left_out, counts or {})


# ----------------------------------------------------------------------------------------------------
# Texts as a model reads them


class _Text(NamedTuple):
    """A text in pieces: their ids, the word that each belongs to, how many words, and what is asked about them."""

    ids: list[int]
    owners: list[int]
    words: int
    questions: list[Question]

    @property
    def sink(self) -> int:
        """The word that the first piece belongs to, which is no candidate; -1 where that is a special token."""
        return self.owners[0] if self.owners else -1

    def about(self, questions: Iterable[Question]) -> list[Question]:
        """The questions that can be asked: of words that have pieces, about others that have some; but for the sink."""
        there = set(self.owners) - {self.sink, -1}
        asked = []
        for question in questions:
            answers = tuple(answer for answer in question.answers if answer in there)
            if answers and question.word in self.owners:
                few = question.candidates
                few = None if few is None else tuple(word for word in few if word != self.sink)
                asked.append(question._replace(answers=answers, candidates=few))
        return asked


def _pieces(tokenizer: Any, text: str) -> tuple[list[int], list[tuple[int, int]]]:
    """The ids of a text, and where in it each piece begins and ends (nowhere, (0, 0), for special tokens)."""
    if hasattr(tokenizer, "is_fast"):  # of transformers
        if not tokenizer.is_fast:
            raise bad_type(
                "tokenizer",
                expected="a fast one, which knows where its pieces are",
                received=type(tokenizer).__name__,
                remedy="AutoTokenizer.from_pretrained(...)",
            )
        with tokenizing(text):
            encoding = tokenizer(text, return_offsets_mapping=True)
        return encoding["input_ids"], encoding["offset_mapping"]
    with tokenizing(text):
        encoding = tokenizer.encode(text)
    if not hasattr(encoding, "offsets"):
        raise bad_type(
            "tokenizer",
            expected="a tokenizers.Tokenizer, or a fast tokenizer of transformers",
            received=type(tokenizer).__name__,
        )
    real = [i for i, keep in enumerate(encoding.attention_mask) if keep]  # (it may be one that pads)
    return [encoding.ids[i] for i in real], [encoding.offsets[i] for i in real]


def _owners(offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int] | None], length: int) -> list[int]:
    """Of each piece the word with which it shares most characters; -1 for none.

    >>> _owners([(0, 0), (0, 3), (3, 5), (5, 9)], [(0, 2), (2, 5), (6, 9)], 9)  # [CLS] don 't see; of do n't see
    [-1, 0, 1, 2]
    """
    words = [-1] * length  # of each character
    for word, span in enumerate(spans):
        if span is not None:
            words[span[0] : span[1]] = [word] * (span[1] - span[0])
    shared = (Counter(word for word in words[start:end] if word >= 0) for start, end in offsets)
    return [max(counter, key=counter.__getitem__, default=-1) for counter in shared]


def _read(tokenizer: Any, sentences: Sequence[Sentence], questions: list[Question]) -> _Text:
    """Sentences as one text, with the questions whose words have pieces."""
    text, spans = "", []
    for sentence in sentences:
        text += " " if text else ""
        at = len(text)
        spans += [word.span and (word.span[0] + at, word.span[1] + at) for word in sentence.words]
        text += sentence.text
    ids, offsets = _pieces(tokenizer, text)
    read = _Text(ids, _owners(offsets, spans, len(text)), len(spans), [])
    return read._replace(questions=read.about(questions))


def _exchanged(texts: Sequence[_Text]) -> list[list[Question]]:
    """For each text the questions of another one with as many words, where there is one."""
    of_length: dict[int, list[int]] = defaultdict(list)
    for i, text in enumerate(texts):
        of_length[text.words].append(i)
    others = {i: same[place - 1] for same in of_length.values() for place, i in enumerate(same) if len(same) > 1}
    return [text.about(texts[others[i]].questions) if i in others else [] for i, text in enumerate(texts)]


def _passages(sentences: Iterable[tuple[Sentence, int]], longest: float) -> Iterator[list[Sentence]]:
    """Sentences that stand together in a document, as many as have at most `longest` pieces. Each comes with the number
    of its pieces."""
    passage: list[Sentence] = []
    pieces = 0
    for sentence, length in sentences:
        if passage and (pieces + length > longest or sentence.document != passage[-1].document):
            yield passage
            passage, pieces = [], 0
        passage.append(sentence)
        pieces += length
    if passage:
        yield passage


def _mention_heads(passage: Sequence[Sentence]) -> Iterator[tuple[str, int]]:
    """Each mention as its entity and its head word, numbered through the passage."""
    before = 0
    for sentence in passage:
        yield from (
            (mention.entity, before + mention.head) for mention in sentence.mentions if mention.head is not None
        )
        before += len(sentence.words)


# ----------------------------------------------------------------------------------------------------
# Models


def _maps(model: nn.Module, ids: Tensor) -> Iterator[tuple[str, Tensor]]:
    """For some texts of one length, (B, N), each layer's name and weights, (B, H, N, N). Only layers whose queries and
    keys are the pieces of the text."""
    with torch.no_grad(), watch(model, measures=[], keep="qk") as seen:
        model(ids)
    for name in seen.layers:
        if seen[name].kind == "self":
            weights = seen[name].weights()
            if weights.shape[-2:] == (ids.shape[1], ids.shape[1]):
                yield name, weights


def _counted(
    model: nn.Module,
    texts: Sequence[_Text],
    halves: Sequence[int],
    batches: Iterable[list[int]],
    others: Sequence[list[Question]] = (),
) -> tuple[list[tuple[str, int]], Halves, Halves]:
    """The heads of a model; what they answer in each half of the texts; and what to `others`, a list for each text."""
    heads: list[tuple[str, int]] = []
    tallies, crossed = (Tally(), Tally()), (Tally(), Tally())
    device = next((parameter.device for parameter in model.parameters()), None)
    for batch in batches:
        ids = torch.tensor([texts[i].ids for i in batch], device=device)
        heads, words = [], [[] for _ in batch]
        for name, weights in _maps(model, ids):  # pieces become words layer by layer: fewer, so all layers fit
            heads += [(name, head) for head in range(weights.shape[1])]
            for i, of_text, maps in zip(batch, words, weights.float(), strict=True):
                of_text.append(words_from_pieces(maps, texts[i].owners, texts[i].words))
        if not heads:
            raise bad_value("model", expected="self-attention over the pieces of a text", received="none that was seen")
        for i, of_text in zip(batch, words, strict=True):
            weights = torch.cat(of_text)  # (C, n, n)
            if texts[i].sink >= 0:
                weights[..., texts[i].sink] = 0.0
            tallies[halves[i]].add(weights, texts[i].questions)
            if i < len(others):
                crossed[halves[i]].add(weights, others[i])
    return heads, tallies, crossed


def _shuffled(model: nn.Module, seed: int) -> nn.Module:
    """A copy of a model with the entries of each weight matrix in another order: as large, and nothing is learned."""
    made = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() > 1:
                order = torch.randperm(parameter.numel(), generator=generator).to(parameter.device)
                parameter.copy_(parameter.flatten()[order].view_as(parameter))
    return made


def _longest(model: nn.Module, tokenizer: Any) -> float:
    """How many pieces a model reads at once."""
    config = getattr(model, "config", None)
    known = [
        getattr(config, "context", None),
        getattr(config, "max_position_embeddings", None),
        getattr(tokenizer, "model_max_length", None),
    ]
    return min((n for n in known if isinstance(n, int) and n > 0), default=float("inf"))


# ----------------------------------------------------------------------------------------------------
# All of it

Pair = tuple[int, Sequence[int], Sequence[int]]  # a mention's head word, its antecedents' and the candidates'


def syntax(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    tokenizer: Any = None,
    limit: int | None = None,
    batch_size: int = 32,
    progress: bool = True,
    seed: int = 0,
    pairs: Sequence[Sequence[Pair]] | None = None,
) -> Syntax:
    r"""Which heads of a model follow the relations of a treebank (Clark et al. 2019), and how much of it needs no head.

    For each relation and direction the head is chosen on one half of the sentences, drawn by `seed`, and reported on
    the other, beside two baselines chosen and reported alike: the best fixed offset ("the next word"), and the best
    head of the same model with the entries of each weight matrix shuffled. Each accuracy has an interval of 95 %. A
    head is syntactic, and has a role, where the low end of it is at least 10 points over the best offset (Voita et al.
    2019), and over the shuffled model. Heads other than the best have to have the margin on both halves. `crossed`
    tells how many roles there are if each sentence is asked about the tree of another.

    Neither special tokens nor the first token, special or not, are candidates: heads of decoders rest there when there
    is nothing to attend to, whatever word it is. What has no other answer is not asked.

    A decoder's heads look back only, and what lies ahead is no mistake of theirs: heads and offsets are asked there
    only what has an answer behind, and `n` tells how often. The two directions are then about different words: an
    English verb finds its subject "to dependent", and an object its verb "to head".

    Coreference, where the file marks entities (CorefUD's brackets): the share of mentions whose head word attends most,
    among the head words of all mentions before it, to that of an antecedent. The baseline is the nearest of them.
    Sentences of a document are read together, up to 256 pieces.

    Args:
        model: any model of torch that `regard.watch` sees, called with ids (B, N) alone. It is left as it is. A
            copy with shuffled weights is made beside it.
        path: a CoNLL-U file.
        tokenizer: a `tokenizers.Tokenizer` or a fast tokenizer of transformers; by default the model's own.
        limit: read so many sentences only.
        batch_size: texts computed at once, at most; only those of one length are.
        progress: whether to show a bar on a terminal (with rich, of the extra "cli").
        seed: of the halves and of the shuffled weights.
        pairs: coreference within sentences, instead of what the file has: for each sentence a list of (head word of a
            mention, head words of its antecedents, head words of all candidates), words numbered from 0.

    Returns:
        A `Syntax`.

    >>> import pathlib, tempfile
    >>> from regard.models import load
    >>> folder = tempfile.TemporaryDirectory()
    >>> path = pathlib.Path(folder.name, "birds.conllu")
    >>> lines = "1 Birds _ NOUN _ _ 3 nsubj _ _", "2 often _ ADV _ _ 3 advmod _ _", "3 sing _ VERB _ _ 0 root _ _"
    >>> _ = path.write_text("\n\n".join(["\n".join(lines).replace(" ", "\t")] * 101))
    >>> found = syntax(load("minilm"), path)
    >>> {row.relation: (row.direction, row.accuracy, row.baseline, row.n) for row in found.rows if row.offset == 2}
    {'nsubj': ('to head', 1.0, 1.0, 50)}
    >>> folder.cleanup()
    """
    _check(model, batch_size, seed)
    tokenizer = getattr(model, "tokenizer", None) if tokenizer is None else tokenizer
    if tokenizer is None:
        raise bad_value(
            "tokenizer",
            expected="one, as the model has none",
            received="None",
            remedy="pass a tokenizers.Tokenizer or a fast tokenizer of transformers",
        )
    sentences = treebank.read(path, limit)
    if not sentences:
        raise bad_value(os.fspath(path), expected="at least one sentence", received="none")
    given = [[]] * len(sentences) if pairs is None else _check_pairs(pairs, sentences)
    longest = _longest(model, tokenizer)

    alone = [
        _read(tokenizer, [sentence], _dependencies(sentence) + more)
        for sentence, more in zip(sentences, given, strict=True)
    ]
    short = [len(text.ids) <= longest for text in alone]
    texts = [text for text, fits in zip(alone, short, strict=True) if fits]
    counts = {
        "sentences": len(texts),
        "sentences longer than the model reads": len(alone) - len(texts),
        "words without a piece": sum(text.words - len(set(text.owners) - {-1}) for text in texts),
    }
    halves = _halves(len(texts), seed)
    if pairs is None and any(sentence.mentions for sentence in sentences):
        fitting = ((s, len(text.ids)) for s, text, fits in zip(sentences, alone, short, strict=True) if fits)
        passages = list(_passages(fitting, min(longest, PASSAGE)))
        texts += [_read(tokenizer, passage, _coreferences(_mention_heads(passage))) for passage in passages]
        halves += _halves(len(passages), seed)
    batches = _batches(texts, batch_size)
    others = _exchanged(texts[: counts["sentences"]])
    with evaluating(model):
        heads, trained, crossed = _counted(model, texts, halves, track(batches, "heads", progress), others)
        random = _shuffled(model, seed)
    _, shuffled, _ = _counted(random, texts, halves, track(batches, "heads, shuffled", progress))
    found = report(heads, trained, shuffled, counts=counts)
    return replace(found, crossed=len(report(heads, crossed, shuffled).syntactic))


def _halves(count: int, seed: int) -> list[int]:
    """Of each of some texts the half, 0 or 1, that it is drawn into."""
    return [place % 2 for place in torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()]


def _batches(texts: Sequence[_Text], size: int) -> list[list[int]]:
    """Numbers of texts of one length, so that nothing is padded; of those about which anything is asked."""
    of_length: dict[int, list[int]] = defaultdict(list)
    for i, text in enumerate(texts):
        if text.questions:
            of_length[len(text.ids)].append(i)
    return [same[start : start + size] for same in of_length.values() for start in range(0, len(same), size)]


def _check(model: nn.Module, batch_size: int, seed: int) -> None:
    """Raise where the arguments are not what `syntax` takes."""
    if not isinstance(model, nn.Module):
        raise bad_type("model", expected="a torch.nn.Module", received=type(model).__name__)
    if "decoder_input_ids" in inspect.signature(model.forward).parameters:
        raise bad_value(
            "model",
            expected="an encoder or a decoder, which reads one text",
            received="an encoder and a decoder",
            remedy="model.get_encoder()",
        )
    for what, value, least in (("batch_size", batch_size, 1), ("seed", seed, 0)):
        if type(value) is not int:
            raise bad_type(what, expected=f"an integer, at least {least}", received=repr(value))
        if value < least:
            raise bad_value(what, expected=f"an integer, at least {least}", received=value)


def _check_pairs(pairs: Sequence[Sequence[Pair]], sentences: Sequence[Sentence]) -> list[list[Question]]:
    """The questions of what a caller gave as `pairs`."""
    if len(pairs) != len(sentences):
        raise bad_value("pairs", expected=f"a list for each of {len(sentences)} sentences", received=len(pairs))
    asked = []
    for i, (some, sentence) in enumerate(zip(pairs, sentences, strict=True)):
        asked.append([])
        for mention, antecedents, candidates in some:
            known = range(len(sentence.words))
            if mention not in known or not all(word in known for word in candidates):
                raise bad_value(
                    f"pairs[{i}]",
                    expected=f"words from 0 to {len(known) - 1}",
                    received=(mention, antecedents, candidates),
                )
            if not antecedents or mention in candidates or not set(antecedents) <= set(candidates):
                raise bad_value(
                    f"pairs[{i}]",
                    expected="antecedents among the candidates, and the mention not",
                    received=(mention, antecedents, candidates),
                )
            asked[-1].append(Question(COREFERENCE, TO_ANTECEDENT, mention, tuple(antecedents), tuple(candidates)))
    return asked
