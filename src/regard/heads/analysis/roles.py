"""Where roles are decided: what each head does beside its resting place, with the evidence for it.

A head's resting place is the first token, special tokens, or another key that takes most of all queries' mass. It is
set aside (`evidence.py`): a role is scored by its share of the mass that is left. It needs a threshold, several times
the share of uniform attention on the same text, and enough queries. All thresholds are in one table, `ROLES`, with
their sources.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from regard.errors import bad_value
from regard.heads.analysis.evidence import AFTER, BEFORE, NEAR, Evidence, TokenFacts, evidence_of
from regard.heads.analysis.intervals import interval
from regard.heads.analysis.token_facts import checked_tokens, facts_of, first_of_target, tokens_of
from regard.heads.record.signed_weights import refuse_signed
from regard.heads.record.table import Shown, Table

if TYPE_CHECKING:
    from regard.heads.analysis.atlas import Atlas, Entry
    from regard.heads.record.record import LayerRecord, Record
    from regard.heads.record.sequences import SequenceRecord

__all__ = ["CLASSES", "ROLES", "Role", "Roles", "collect_evidence", "decide", "first_of_target", "roles", "tokens_of"]

RESTS = 0.1  # the least share of a head's mass on a resting place that is worth a word
RESTING_ONLY = 0.02  # a head that has less than this beside its resting place does nothing else
LEAST_MASS = 3.0  # in queries, beside the resting place, for a mean of entropies or distances
LEAST_REST_FOR_BROAD = 0.3  # a head with less beside its resting place is called by that place rather than broad


class Rule(NamedTuple):
    """When a head has a role.

    Attributes:
        least, over_baseline: the least share of what is left, and the least ratio to the share of uniform attention.
        clear, clear_over: the same from which the role is clear.
        source: where it is described, and where the threshold comes from.
        queries: least number of queries that the score is a mean over; with fewer it may be luck.
        words: what such a head does, as the end of "attends to ...".
    """

    name: str
    least: float
    over_baseline: float
    source: str
    queries: int = 5
    clear: float = 0.0
    clear_over: float = 0.0
    words: str = ""


def _rule(
    name: str, partly: tuple[float, float], clear: tuple[float, float], words: str, source: str, queries: int = 5
) -> Rule:
    return Rule(name, *partly, source, queries, *clear, words)


_POSITION, _COPY, _CLASS = ((0.2, 3.0), (0.4, 3.0)), ((0.2, 3.0), (0.4, 3.0)), ((0.25, 1.6), (0.3, 2.0))
_WORD, _RELATED = ((0.3, 1.5), (0.4, 2.0)), ((0.25, 1.6), (0.4, 2.0))

# Word classes, as Universal Dependencies tags them. They are known where a treebank says them: in an atlas.
CLASSES = {
    "NOUN": "nouns",
    "PROPN": "names",
    "VERB": "verbs",
    "AUX": "auxiliaries",
    "PRON": "pronouns",
    "DET": "determiners",
    "ADP": "prepositions",
    "ADJ": "adjectives",
    "ADV": "adverbs",
    "NUM": "numbers",
    "CCONJ": "coordinators",
    "SCONJ": "subordinators",
}


def _offset(k: int) -> Rule:
    return _rule(
        f"offset {k:+d}", *_POSITION, f"the token {abs(k)} {'before' if k < 0 else 'after'}", "as for previous"
    )


# A head's role is the first rule that it meets clearly; else the first that it meets. Specific roles come first.
ROLES = (
    _rule("induction", *_COPY, "what came after an earlier copy of the token", "Olsson et al. 2022", 10),
    _rule("duplicate", *_COPY, "earlier copies of the token", "Wang et al. 2022", 10),
    _rule("retrieval", (0.1, 3.0), (0.5, 3.0), "the answer in a long text, by a probe", "Wu et al. 2024", 10),
    _rule("previous", *_POSITION, "the token before", "Clark et al. 2019"),
    _rule("next", *_POSITION, "the token after", "Clark et al. 2019"),
    _rule("itself", *_POSITION, "the token itself", "Clark et al. 2019"),
    *(_offset(k) for k in (*range(-2, -BEFORE - 1, -1), *range(2, AFTER + 1))),
    _rule("same word", *_WORD, "the other pieces of the same word", "ours; over what its offsets explain"),
    _rule("related", *_RELATED, "words related in meaning, of the content words", "ours; by static embeddings", 10),
    _rule("punctuation", *_CLASS, "punctuation", "Clark et al. 2019"),
    *(_rule(name, *_CLASS, name, "ours; classes of Universal Dependencies") for name in CLASSES.values()),
    _rule("local", (0.45, 1.6), (0.6, 1.8), f"the {NEAR} tokens to each side", "ours"),
    _rule("long-range", (0.0, 1.2), (0.0, 1.4), "tokens farther away than uniform attention", "Vig & Belinkov 2019"),
    _rule("broad", (0.0, 0.85), (0.0, 0.95), "many tokens alike", "Clark et al. 2019"),
    Rule("separator", 0.3, 1.5, "mass on special tokens but the first: a resting place (Clark et al. 2019)"),
    Rule("first", 0.3, 1.5, "mass on the first token: a resting place, or sink (Gu et al. 2024)"),
    Rule("sink", 0.3, 0.0, "mass on other keys that most queries attend to: a resting place (Gu et al. 2024)"),
    Rule("resting only", 1 - RESTING_ONLY, 0.0, "all but 2 % of the mass on the resting place"),
)
_RULES = {rule.name: rule for rule in ROLES}
_CLASS_NAMES = ("punctuation", *CLASSES.values())
UNINFORMATIVE = frozenset({"broad", "separator", "first", "sink", "resting only"})
PLACES = ("first", "separator", "sink")  # of rest, in the order of `Evidence.resting`
_PLACE_WORDS = {"first": "the first token", "separator": "special tokens", "sink": "another token"}


@dataclass
class Role:
    """What a head does.

    Attributes:
        role: its name in `ROLES`, or that of a relation of syntax; None if there is evidence for none.
        score, baseline: its share of what is left beside the resting place, and that of uniform attention.
        least: the least score for it; `low` and `high`: the 95 % interval of the score.
        clear: whether it meets the rule clearly, or only partly.
        also: the other roles whose rules it meets.
        evidence: every score of the head.
        rest: the share of its mass that is not on its resting place; `rests_on`: where that is ("first", "separator",
            "sink" or None); `output`: the share of its output that comes from there, by norms, if values are known.
        origin: "text" if it was decided on the text that was seen, "atlas" if it is known of the model.
        known: what an atlas says of the head, best first.
        here: where `role` comes from an atlas, what was decided on the text that was seen.
    """

    layer: str
    head: int
    role: str | None
    score: float | None = None
    baseline: float | None = None
    least: float | None = None
    also: list[str] = field(default_factory=list)
    evidence: dict[str, float] = field(default_factory=dict)
    low: float | None = None
    high: float | None = None
    clear: bool = False
    rest: float = 1.0
    rests_on: str | None = None
    output: float | None = None
    origin: str = "text"
    known: list[Entry] = field(default_factory=list)
    here: Role | None = None

    @property
    def informative(self) -> bool:
        """Whether it says more than where the head rests, or that it attends to everything."""
        return self.role is not None and self.role not in UNINFORMATIVE

    def describe(self) -> str:
        """In words: where it rests, and what it does with the rest.

        >>> Role("blocks.1", 8, "next", 0.81, 0.05, 0.4, rest=0.48, rests_on="first", clear=True).describe()
        'rests on the first token 0.52; else: the token after 0.81 (uniform 0.05)'
        """
        shares = {name: self.evidence.get(name, 0.0) for name in PLACES}
        if self.rests_on is not None and not self.evidence:
            shares[self.rests_on] = 1 - self.rest
        places = [f"{_PLACE_WORDS[name]} {share:.2f}" for name, share in shares.items() if share >= RESTS]
        parts = [f"rests on {' and '.join(places)}"] if places else []
        if self.role is None:
            parts.append("no role" if not parts else "else nothing clear")
        elif self.rest < RESTING_ONLY:
            parts = [f"rests only, on {' and '.join(places)}"]
        elif self.role not in PLACES:
            rule = _RULES.get(self.role)
            what = rule.words if rule is not None else self.role
            partly = "" if self.clear else "partly "
            syntax = self.origin == "atlas" and self.known[:1] and self.known[0].source == "syntax"
            beside = f"{'best offset' if syntax else 'uniform'} {self.baseline:.2f}"
            source = ", by the atlas" if self.origin == "atlas" else ""
            parts.append(f"{'else: ' if parts else ''}{partly}{what} {self.score:.2f} ({beside}{source})")
        return "; ".join(parts)


class Roles(list[Role], Shown):  # type: ignore[misc]
    """A `Role` for each head of each layer; `print` shows those that have a role, a notebook as a table."""

    __repr__ = Shown.__repr__
    layers: Sequence[str] = ()  # all that were watched, in call order

    def of(self, role: str) -> list[Role]:
        """The heads that have a role, the highest score first."""
        return sorted((head for head in self if head.role == role), key=lambda head: -(head.score or 0.0))

    @property
    def informative(self) -> list[Role]:
        """The heads whose role says more than where they rest, or that they attend to everything."""
        return [head for head in self if head.informative]

    def __getitem__(self, which: Any) -> Any:
        if isinstance(which, tuple):
            layer, number = which
            name = self.layers[layer] if isinstance(layer, int) else layer
            for head in self:
                if head.layer == name and head.head == number:
                    return head
            raise KeyError(f"no head {number} in layer {layer!r}")
        return super().__getitem__(which)

    def table(self) -> Table:
        """A row for each head that has a role."""
        rows = (
            {
                "layer": r.layer,
                "head": r.head,
                "role": r.role,
                "score": r.score,
                "baseline": r.baseline,
                "least": r.least,
                "rests on": r.rests_on or "",
                "rest": r.rest,
                "also": ", ".join(r.also),
            }
            for r in self
            if r.role is not None
        )
        return Table(rows, self.layers)

    def caption(self) -> str:
        """How many heads have a role."""
        without = sum(head.role is None for head in self)
        told = len(self.informative)
        return (
            f"{len(self) - without} of {len(self)} heads have a role, {told} one beside resting and looking everywhere"
        )

    def __str__(self) -> str:
        return f"{self.table()}\n{self.caption()}"


def roles(
    record: Record,
    tokens: Sequence[str] | Sequence[Sequence[str]] | None = None,
    *,
    atlas: Atlas | bool = True,
    shared: Shared | None = None,
) -> Roles:
    """Say what each head of self attention does.

    Args:
        record: what `watch` saw. Of a text of many thousand tokens, watched with keep="qk".
        tokens: the tokens as text, or a list of them for each item of the batch: special tokens, punctuation and pieces
            of words are recognised by them. By default `record.tokens`, if they are those of the text, or what the
            model's tokenizer says.
        atlas: what is known of the model's heads; by default that of the package, if it has one for this model. False:
            decide by this text alone.
        shared: for several calls about parts of one record, what they have in common.

    What a head may attend to for another reason does not count: for induction and duplicate, copies next to the query;
    for everything, the resting place. Induction and duplicate need a text that repeats itself, such as `heads.probes`
    make.

    >>> import regard, torch
    >>> model = regard.models.load("minilm")
    >>> with regard.watch(model) as seen, torch.no_grad():
    ...     _ = model(model.encode("The cat that I saw yesterday ran away"))
    >>> print(seen.roles(atlas=False)[0, 2].describe())
    rests on the first token 0.13; else: the token before 1.00 (uniform 0.12)
    """
    words = {layer.name: tokens for layer in record} if tokens is not None else tokens_of(record, record.tokens)
    known = _atlas(record, atlas)
    result, shared = Roles(), Shared() if shared is None else shared
    result.layers = record.layers
    for layer in record:
        if layer.kind != "self":
            continue
        given = words[layer.name]
        if tokens is not None and layer.text is not None and not layer.text.keeps_calls():
            raise bad_value(
                "tokens",
                expected="a record whose text is kept",
                received="one that was loaded, or that saw a longer text",
                remedy="set `seen.tokens` before `seen.save(path)`",
            )
        rows = None if given is None else checked_tokens(layer, given)
        refuse_signed("roles", layer.name, layer.signed)
        evidence = evidence_of_layer(record, layer, rows, shared)
        if evidence is None:
            raise bad_value(
                "roles",
                expected="q and k of the text, which are kept if it has at most some thousand tokens",
                received=f"none kept in {layer.name}",
                remedy='watch(model, keep="qk")',
            )
        shared.aside[layer.name] = evidence.aside
        of_layer = decide(layer.name, evidence)
        result += of_layer if known is None else [known.applied(role) for role in of_layer]
    return result


def _atlas(record: Record, atlas: Atlas | bool) -> Atlas | None:
    from regard.heads.analysis import atlas as atlases

    if isinstance(atlas, bool):
        return atlases.of_model(record.model()) if atlas else None
    return atlas


def collect_evidence(record: Record) -> None:
    """Take the evidence of the texts before the last now, and free them: for many texts in one watch."""
    shared = Shared()
    for layer in record:
        for text in layer.earlier if layer.kind == "self" else ():
            found = evidence_of(text, shared.facts_of(record, text, None), shared.uniform)
            layer.evidence = found if layer.evidence is None else layer.evidence + found
        layer.earlier = []


class Shared:
    """What the layers of one record have in common: the facts about their tokens, and uniform attention; and the keys
    (B, H, M) that were set aside in each layer."""

    def __init__(self) -> None:
        self.aside: dict[str, Tensor | None] = {}
        self.facts: dict[Any, TokenFacts] = {}
        self.uniform: dict[Any, Any] = {}

    def facts_of(self, record: Record, text: SequenceRecord, tokens: Any) -> TokenFacts:
        """`facts_of`, once for texts of the same tokens."""
        padding = text.key_padding
        words = None if tokens is None else tuple(map(tuple, tokens))
        ids = None if text.ids is None else (text.ids.data_ptr(), text.ids.shape)
        key = (words, ids, text.queries, text.total, None if padding is None else padding.cpu().numpy().tobytes())
        if key not in self.facts:
            self.facts[key] = facts_of(record, text, tokens)
        return self.facts[key]


def evidence_of_layer(
    record: Record, layer: LayerRecord, tokens: Any = None, shared: Shared | None = None
) -> Evidence | None:
    """The evidence of all texts of a layer of self attention that were kept; None if there are none. `tokens`: those of
    the last text; `shared`: for all layers of a record."""
    total, shared = layer.evidence, Shared() if shared is None else shared
    if layer.kind == "self":
        for text in (*layer.earlier, layer.text):
            if text is not None and text.keeps_calls() and not text.signed:
                facts = shared.facts_of(record, text, tokens if text is layer.text else None)
                found = evidence_of(text, facts, shared.uniform)
                total = found if total is None else total + found
    return total


def decide(layer: str, evidence: Evidence) -> list[Role]:
    """The role of each head of a layer, by the evidence."""
    sums = {name: values.double().cpu() for name, values in evidence.roles.items()}
    resting, output = evidence.resting.double().cpu(), evidence.output.double().cpu()
    roles = []
    for head in range(resting.shape[1]):
        scores = {name: score_of(name, *values[:, head].tolist()) for name, values in sums.items()}
        queries, *places, left = resting[:, head].tolist()
        all_output, of_places = output[:, head].tolist()
        role = _role(layer, head, scores, left / max(queries, 1), dict(zip(PLACES, places, strict=True)), queries)
        role.output = of_places / all_output if all_output > 0 else None
        roles.append(role)
    return roles


class Score(NamedTuple):
    """The score for a role, that of uniform attention, the interval of the score, and the number of queries."""

    score: float
    baseline: float
    low: float
    high: float
    queries: float


def score_of(name: str, mass: float, uniform: float, left: float, queries: float) -> Score:
    """The score of a role from its sums (`Evidence.roles`) for one head."""
    score, baseline = (mass / left, uniform / left) if left > 0 else (0.0, 0.0)
    if name in ("broad", "long-range"):  # no shares; of a few queries' mass they say nothing
        return Score(score, baseline, score, score, queries if left >= LEAST_MASS else 0)
    return Score(score, baseline, *interval(min(score, 1.0), left), queries)


def _meets(rule: Rule, score: Score, rest: float) -> bool | None:
    """Whether a score meets a rule clearly; None if not at all."""
    if score.queries < rule.queries or score.baseline <= 0 or score.low <= score.baseline * min(rule.over_baseline, 1):
        return None
    if rule.name == "broad" and rest < LEAST_REST_FOR_BROAD:
        return None

    def passes(least: float, over: float) -> bool:
        return score.score >= least and score.score >= over * score.baseline

    return passes(rule.clear, rule.clear_over) or (False if passes(rule.least, rule.over_baseline) else None)


def _role(
    layer: str, head: int, scores: dict[str, Score], rest: float, places: dict[str, float], queries: float
) -> Role:
    shares = {name: mass / max(queries, 1) for name, mass in places.items()}
    place = max(shares, key=shares.__getitem__)
    role = Role(layer, head, None, rest=rest, rests_on=place if shares[place] >= RESTS else None)
    role.evidence = {name: score.score for name, score in scores.items()} | shares
    only = bool(queries) and rest < RESTING_ONLY
    names = _CLASS_NAMES if only else _RULES  # (a class is measured with its sinks: a full stop is punctuation)
    fitting = [(_RULES[name], _meets(_RULES[name], scores[name], rest)) for name in names if name in scores]
    fitting = [(rule, clear) for rule, clear in fitting if clear is not None]
    fitting.sort(key=lambda pair: not pair[1])  # clear ones first, in the order of the table
    if only and not fitting:
        role.role, role.score, role.baseline = "separator" if place == "separator" else "resting only", 1 - rest, 0.0
        role.least, role.clear = 1 - RESTING_ONLY, True
        return role
    resting = [_RULES[name] for name in PLACES if shares[name] >= _RULES[name].least and queries >= 5]
    role.also = [rule.name for rule, _ in fitting[1:]] + [rule.name for rule in resting]
    if fitting:
        rule, role.clear = fitting[0][0], bool(fitting[0][1])
        found = scores[rule.name]
        role.role, role.score, role.baseline, role.low, role.high = rule.name, *found[:4]
        least, over = (rule.clear, rule.clear_over) if role.clear else (rule.least, rule.over_baseline)
        role.least = max(least, over * found.baseline)
    elif resting:
        role.also = role.also[1:]
        role.role, role.score, role.baseline = resting[0].name, shares[resting[0].name], 0.0
        role.least, role.clear = resting[0].least, True
    return role
