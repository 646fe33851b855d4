"""The result of `syntax`: the head chosen for each relation, its accuracy beside the baselines, and its role."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.errors import printable
from regard.heads.analysis.intervals import interval
from regard.heads.analysis.syntax.questions import COREFERENCE
from regard.heads.analysis.syntax.scores import Key, Tally
from regard.summary import in_columns

__all__ = ["ROLES", "Halves", "Role", "Row", "Syntax", "interval", "report"]

LEAST = 50  # questions about a relation in each half; rarer ones are left out, for chance weighs too much in them
MARGIN = 0.10  # a head is syntactic if it is this much better than the best offset (Voita et al. 2019)

Halves = tuple[Tally, Tally]  # the texts on which heads are chosen, and those on which they are reported

# What a head is called that follows a relation. A subtype has the name of its type; any other relation its own.
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
    "obl": "oblique and verb",
    "nmod": "modifier and noun",
    "xcomp": "complement and verb",
    "ccomp": "clause and verb",
    "advcl": "adverbial clause and verb",
    "acl": "clause and noun",
    "appos": "apposition and noun",
    "acl:relcl": "relative clause",
    "rcmod": "relative clause",
}


@dataclass(frozen=True)
class Row:
    """A head and a relation. All figures are of the half on which nothing was chosen.

    Attributes:
        relation: as the treebank calls it, or "coreference".
        direction: "to head" (a dependent attends to its head word), "to dependent" (a head word attends to one of its
            dependents), or "to antecedent".
        layer, head: the name of the layer, and the head's number from 0.
        accuracy: the share of words whose largest weight is on a correct word.
        low, high: its 95 % interval, by Wilson's formula for `n` words.
        n: number of questions.
        baseline: the accuracy of the word at the best `offset`; if that is None, of the nearest mention (coreference; a
            kind of it, such as "coreference:pronoun", has the better of both).
        shuffled: the accuracy of the best head of the model with shuffled weights.
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

    def cells(self) -> tuple[str, ...]:
        """The row as it is printed, in percent; see `TITLES`."""
        shares = (self.accuracy, self.low, self.high, self.baseline, self.gain, self.shuffled)
        accuracy, low, high, baseline, gain, shuffled = (f"{round(100 * share, 1) + 0:.1f}" for share in shares)
        where = self.relation, self.direction, self.layer, str(self.head)
        compared = baseline, "nearest" if self.offset is None else f"at {self.offset:+d}", gain, shuffled
        cells = (*where, accuracy, f"{low}-{high}", *compared, str(self.n), self.role or "")
        return tuple(map(printable, cells))


_WHERE, _COMPARED = ("relation", "direction", "layer", "head"), ("baseline", "", "gain", "shuffled")
TITLES = (*_WHERE, "accuracy", "95 %", *_COMPARED, "n", "role")
WORDS = (0, 1, 2, 7, 11)  # columns aligned to the left


class Role(NamedTuple):
    """What a syntactic head follows, and how well."""

    relation: str
    direction: str
    accuracy: float
    baseline: float
    shuffled: float


@dataclass(frozen=True)
class Syntax:
    """Which heads follow grammar. `print` it.

    Attributes:
        rows: for each relation and direction the best head, those with the largest gain first.
        syntactic: a row for each head and relation with a role, including the best heads; the largest gain first.
        heads: the C heads, as (layer, head).
        accuracies: for each relation and direction those of all heads, (C,), on the half that is reported.
        left_out: relations and directions too rare to report, with the number of questions in both halves together.
        counts: of sentences read, and of what was skipped.
        crossed: how many roles there are if each sentence is asked about the tree of another one of the same length:
            these are correct by chance. None if that was not computed.
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
        """The roles of each syntactic head, by (layer, head); the largest gain first."""
        by_head: dict[tuple[str, int], list[Role]] = {}
        for row in self.syntactic:
            role = Role(row.relation, row.direction, row.accuracy, row.baseline, row.shuffled)
            by_head.setdefault((row.layer, row.head), []).append(role)
        return by_head

    def __str__(self) -> str:
        notes = [f"{count} {what}" for what, count in self.counts.items() if count]
        notes.append("each head chosen on one half of the texts, and reported on the other")
        if self.crossed is not None:
            heads = len({(row.layer, row.head) for row in self.syntactic})
            notes.append(
                f"{len(self.syntactic)} roles on {heads} heads; with the trees of other sentences {self.crossed}"
            )
        return "; ".join(notes) + "\n" + in_columns([TITLES, *(row.cells() for row in self.rows)], left=WORDS)


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
        trained, shuffled: the counts of the model, and of the model with shuffled weights.
        least: relations asked less often in one of the halves are left out.
    """
    best_rows, syntactic, accuracies, left_out = [], [], {}, {}
    chosen, reported = trained
    for key in sorted(chosen.asked | reported.asked):
        if min(half.asked[key] for half in (*trained, *shuffled)) < least:
            left_out[key] = chosen.asked[key] + reported.asked[key]
            continue
        accuracies[key] = reported.accuracies(key)
        best, rows = _rows(heads, key, trained, shuffled)
        best_rows.append(best)
        syntactic += [row for row in rows if row.role is not None]
    for several in (best_rows, syntactic):
        several.sort(key=lambda row: -row.gain)
    return Syntax(tuple(best_rows), tuple(syntactic), tuple(heads), accuracies, left_out, counts or {})


def _rows(heads: Sequence[tuple[str, int]], key: Key, trained: Halves, shuffled: Halves) -> tuple[Row, list[Row]]:
    """The row of the best head for a relation, and those of it and of all heads that have the role.

    Candidates for the role are the best head and all others with the margin on the first half; they have it if the low
    end of their interval has the margin on the second half too. (On one half alone some heads have it by luck.)
    """
    relation, direction = key
    offset = _offset(key, trained[0])
    baselines = [half.baseline(key, offset) for half in trained]
    by_chance = float(shuffled[1].accuracies(key)[shuffled[0].accuracies(key).argmax()])
    chosen, reported = (half.accuracies(key) for half in trained)
    n = trained[1].asked[key]
    intervals = [interval(accuracy, n) for accuracy in reported.tolist()]
    lows = torch.tensor([low for low, _ in intervals], device="cpu")
    best = int(chosen.argmax())
    candidates = chosen >= baselines[0] + MARGIN
    candidates[best] = True
    has_role = candidates & (lows >= baselines[1] + MARGIN) & (lows > by_chance)
    role = ROLES.get(relation) or ROLES.get(relation.split(":")[0]) or relation
    rows = {
        i: Row(
            relation=relation,
            direction=direction,
            layer=heads[i][0],
            head=heads[i][1],
            accuracy=float(reported[i]),
            low=intervals[i][0],
            high=intervals[i][1],
            n=n,
            baseline=baselines[1],
            offset=offset,
            shuffled=by_chance,
            role=role if has_role[i] else None,
        )
        for i in {best, *has_role.nonzero().flatten().tolist()}
    }
    return rows[best], list(rows.values())


def _offset(key: Key, chosen: Tally) -> int | None:
    """The offset of the baseline; None if it is the nearest candidate: for coreference, and for a kind of it
    ("coreference:pronoun") if no offset is better."""
    offset = chosen.best_offset(key)
    name, _, kind = key[0].partition(":")
    if name != COREFERENCE:
        return offset
    return offset if kind and chosen.baseline(key, offset) > chosen.baseline(key, None) else None
