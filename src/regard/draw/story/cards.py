"""Where the cards of a story are chosen: for each kind of head the one that is strongest in this text.

A relation of syntax is named only where an atlas knows it of the head, or a tree of the text shows it; and only with a
link in this text that stands out of what its query has left beside the resting place.

Letters: H query heads, N tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from regard.draw.scene import Panel, Scene
from regard.draw.story.maps import LEAST_WEIGHT, Link, Unit, UnitMap, units_of
from regard.draw.story.trees import GROUPS, Tree, closed_class, followed, may_stand, tree_of
from regard.heads import ROLES, Role
from regard.heads.analysis.atlas import Entry
from regard.heads.analysis.syntax.questions import TO_DEPENDENT, TO_HEAD
from regard.heads.analysis.syntax.report import ROLES as RELATIONS
from regard.heads.analysis.token_classes import is_punctuation

__all__ = ["KINDS", "Card", "Story", "named", "story"]

LINKS = 3  # that a card shows
LONGEST = 1024  # tokens up to which links are looked for
NEAR = 3  # tokens to each side that are local
WORTH_A_WORD = 0.2  # of a head's mass on its resting place, to be said of it
LEAST_REST = 0.5  # of a head's mass on its resting place, for the card of resting
_OFFSETS = {"previous": -1, "itself": 0, "next": 1} | {f"offset {k:+d}": k for k in range(-8, 9) if abs(k) > 1}
_WORDS = {rule.name: rule.words for rule in ROLES if rule.words}
_LEAST = {rule.name: rule.least for rule in ROLES}

# The kinds of cards in the order of a story, and what is said of a kind that no head shows.
KINDS = {
    **{kind: name for kind, (name, _) in GROUPS.items()},
    "position": "a local head at a fixed distance, such as the token before",
    "local": "a local head on all the tokens around",
    "long-range": "a head that reaches far: one clear link over a third of the text",
    "copies": "a head that finds earlier copies of a token, or what came after them",
    "same word": "a head on the other pieces of the same word",
    "punctuation": "a head on punctuation",
    "broad": "a head that attends to many tokens alike",
    "rest": "a head that rests most of the time",
}


@dataclass
class Card:
    """One head that is worth seeing.

    Attributes:
        kind: one of `KINDS`; `role`: what it is called in `heads.ROLES`, or the relation of syntax.
        layer, head: which head.
        does: what it does, after "Head 2.8 "; `evidence`: how well, in figures.
        links: what it links in this text, the strongest first; a weight is what the map shows.
        rests, rests_on: the share of its attention on its resting place, and where most of that is; "" if it is little.
        strength: by which it was chosen among the heads of its kind.
        checked: whether the links are instances of what it does; False for a relation of syntax, if no tree says so.
    """

    kind: str
    role: str
    layer: int
    head: int
    does: str
    evidence: str
    links: list[Link] = field(default_factory=list)
    rests: float = 0.0
    rests_on: str = ""
    strength: float = 0.0
    checked: bool = True

    def parts(self) -> list[str | tuple[str, Unit]]:
        """The sentence, in parts: words, and ("query" | "key", tokens) for tokens of the text."""
        parts: list[str | tuple[str, Unit]] = [f"Head {self.layer}.{self.head} {self.does} ({self.evidence})"]
        if self.links:
            query, key, weight = self.links[0]
            here = ": here " if self.checked else "; its clearest link here: "
            parts += [here, ("query", query), " looks at ", ("key", key), f", {weight:.2f}"]
        if self.rests_on:
            parts.append(f"; rests with {self.rests:.0%} of its attention, mostly on {self.rests_on}")
        return [*parts, "."]

    def text(self, scene: Scene) -> str:
        """The whole sentence."""
        panel = scene[self.layer]
        sides = {"query": panel.queries.text, "key": panel.keys.text}
        return "".join(part if isinstance(part, str) else named(sides[part[0]], part[1]) for part in self.parts())


class Story(NamedTuple):
    """The cards of a text, and in words which kinds of heads are not there."""

    cards: list[Card]
    absent: list[str]


def named(tokens: list[str], unit: Unit) -> str:
    """The word of a unit; if the text has it several times, with its number: "John (2nd)"."""
    first, last = unit
    parts = [tokens[first], *(token.removeprefix("##") for token in tokens[first + 1 : last])]
    size = last - first
    same = [at for at in range(len(tokens) - size + 1) if tokens[at : at + size] == tokens[first:last]]
    number = same.index(first) + 1
    ordinal = {1: "1st", 2: "2nd", 3: "3rd"}.get(number, f"{number}th")
    return "".join(parts) + (f" ({ordinal})" if len(same) > 1 else "")


@dataclass
class _Head:
    """One head, with what its cards need."""

    panel: Panel
    head: int
    role: Role  # with what an atlas knows
    tokens: UnitMap | None  # None for long texts
    words: UnitMap | None
    tree: Tree | None
    atlas: bool  # whether an atlas is known of the model

    @property
    def here(self) -> Role:
        """The role that was decided by this text."""
        return self.role.here or self.role

    def card(self, kind: str, role: str, does: str, evidence: str, links: list[Link], strength: float) -> Card:
        return Card(kind, role, self.panel.number, self.head, does, evidence, links, strength=strength)


def story(scene: Scene) -> Story:
    """The strongest head of each kind in this text, and which kinds no head shows. Relations of syntax are those of the
    text's tree, if the record's `treebank` has it."""
    tree = _tree(scene)
    found: dict[str, list[Card]] = {kind: [] for kind in KINDS}
    missed = _Missed(tree)
    for one in _heads(scene, tree):
        missed.add(one)
        for card in (card for find in _FINDERS for card in find(one)):
            found[card.kind].append(_with_rest(card, one))
    cards: list[Card] = []
    for of_kind in found.values():
        of_kind.sort(key=lambda card: -card.strength)
        told = {(card.layer, card.head) for card in cards}
        cards += next(([card] for card in of_kind if (card.layer, card.head) not in told), of_kind[:1])
    cards.sort(key=lambda card: not card.checked)
    return Story(cards, _absent(scene, {card.kind for card in cards}) + missed.lines())


def _tree(scene: Scene) -> Tree | None:
    """The syntax of the text, if the treebank of the record has it."""
    panel = next((panel for panel in scene if panel.layer.kind == "self"), None)
    treebank = scene.record.treebank
    return None if treebank is None or panel is None else tree_of(panel.queries, treebank)


def _heads(scene: Scene, tree: Tree | None) -> Iterator[_Head]:
    """The heads of self attention whose roles are known."""
    atlas = any(role.known for panel in scene for role in panel.roles)
    for panel in scene:
        n, m = panel.shape
        if not panel.roles or n != m:
            continue
        tokens = words = None
        if panel.layer.exact and n <= LONGEST and not all(panel.queries.special):
            weights = panel.weights_of_all()
            tokens = UnitMap(panel, units_of(panel.queries, words=False), weights)
            words = UnitMap(panel, units_of(panel.queries, words=True), weights)
        fits = tree is None or words is None or len(tree.heads) == len(words.units)
        for head, role in enumerate(panel.roles):
            yield _Head(panel, head, role, tokens, words, tree if fits else None, atlas)


def _with_rest(card: Card, one: _Head) -> Card:
    role, labels = one.role, one.panel.keys
    if role.rests_on is None or card.kind == "rest" or 1 - role.rest < WORTH_A_WORD:
        return card
    first = labels.text[0] if labels.special[:1] == [True] else "the first token"
    place = {"first": first, "separator": "special tokens", "sink": "another token"}[role.rests_on]
    return replace(card, rests=1 - role.rest, rests_on=place)


Allowed = Callable[[int, int], bool]  # whether a link from unit i to unit j is an instance of a role


def _by_role(
    kind: str, names: tuple[str, ...], allowed: Callable[[_Head, str], Allowed]
) -> Callable[[_Head], Iterator[Card]]:
    """A finder of heads with a role that this text shows, or that an atlas knows and this text does not contradict;
    with links that are instances of it."""

    def find(one: _Head) -> Iterator[Card]:
        found = _decided(one, names) or _known(one, names)
        if found is None:
            return
        role, score, evidence = found
        links: list[Link] = []
        if one.tokens is not None:
            among = one.tokens.weights >= LEAST_WEIGHT
            links = one.tokens.strongest(one.head, LINKS, allowed(one, role), among)
        yield one.card(kind, role, f"attends to {_WORDS[role]}", evidence, links, score * one.role.rest)

    return find


def _decided(one: _Head, names: tuple[str, ...]) -> tuple[str, float, str] | None:
    """A role that was decided by this text: its name, its score and the evidence."""
    here = one.here
    if here.role not in names or here.score is None or not here.clear:
        return None
    evidence = f"{here.score:.2f} of what it does beside resting, uniform attention {here.baseline:.2f}"
    return here.role, here.score, evidence


def _known(one: _Head, names: tuple[str, ...]) -> tuple[str, float, str] | None:
    """A role that an atlas knows, and of which this text has as much as the rule wants. It comes after those that were
    decided by this text."""
    for entry in one.role.known[:1]:
        score = one.role.evidence.get(entry.role, 0.0)
        if entry.role in names and entry.clear and entry.source == "treebank" and score >= _LEAST[entry.role]:
            evidence = f"{score:.2f} of what it does beside resting; in a treebank {entry.score:.2f}, "
            evidence += f"uniform attention {entry.baseline:.2f}"
            evidence += "" if entry.shuffled is None else f", shuffled weights {entry.shuffled:.2f}"
            return entry.role, score / 2, evidence
    return None


def _at_offset(one: _Head, role: str) -> Allowed:
    assert one.tokens is not None
    units, offset = one.tokens.units, _OFFSETS[role]
    return lambda i, j: units[j][0] - units[i][0] == offset


def _around(one: _Head, role: str) -> Allowed:
    assert one.tokens is not None
    units = one.tokens.units
    return lambda i, j: i != j and abs(units[j][0] - units[i][0]) <= NEAR


def _copied(one: _Head, role: str) -> Allowed:
    """For duplicates earlier copies of the token; for induction what came after them."""
    assert one.tokens is not None
    units, text, back = one.tokens.units, one.panel.queries.text, 1 if role == "induction" else 0

    def allowed(i: int, j: int) -> bool:
        query, copy = units[i][0], units[j][0] - back
        return 0 <= copy < query - 1 and text[copy].casefold() == text[query].casefold()

    return allowed


def _in_word(one: _Head, role: str) -> Allowed:
    assert one.tokens is not None
    units, word = one.tokens.units, one.panel.queries.word
    return lambda i, j: i != j and word[units[i][0]] == word[units[j][0]]


def _on_punctuation(one: _Head, role: str) -> Allowed:
    assert one.tokens is not None
    units, text = one.tokens.units, one.panel.keys.text
    return lambda i, j: i != j and is_punctuation(text[units[j][0]])


def _broad(one: _Head) -> Iterator[Card]:
    here = one.here
    if here.role == "broad" and here.score and here.baseline:
        share = here.score / here.baseline
        evidence = f"{share:.0%} of the entropy of uniform attention"
        yield one.card("broad", "broad", f"attends to {_WORDS['broad']}", evidence, [], share * here.rest)


def _resting(one: _Head) -> Iterator[Card]:
    role, share = one.role, 1 - one.role.rest
    if role.rests_on is None or share < LEAST_REST:
        return
    labels = one.panel.keys
    first = labels.text[0] if labels.special[:1] == [True] else "the first token"
    place = {"first": first, "separator": "special tokens", "sink": "another token"}[role.rests_on]
    output = "" if role.output is None else f", which is {role.output:.0%} of what it puts out"
    evidence = f"{share:.0%} of its attention{output}"
    yield one.card("rest", role.rests_on, f"mostly rests, on {place}", evidence, [], share)


def _long_range(one: _Head) -> Iterator[Card]:
    if one.words is None:
        return
    least = max(4, len(one.words.units) // 3)
    links = one.words.strongest(one.head, LINKS, lambda i, j: abs(i - j) >= least, one.words.enough)
    if links:
        distance = abs(one.words.units.index(links[0].query) - one.words.units.index(links[0].key))
        does, evidence = f"reaches {distance} words far", "its clearest link over a third of the text"
        yield one.card("long-range", "long-range", does, evidence, links, links[0].weight)


def _syntax(one: _Head) -> Iterator[Card]:
    """Relations that an atlas knows of the head, with links of this text. (A link alone is no evidence: of the heads of
    a model with shuffled weights, some link the words of any relation in one sentence.)"""
    if one.words is None:
        return
    for entry in _relations(one):
        group = _group(entry.relation)
        if group is None:
            continue
        stand = may_stand(entry.relation, entry.direction, one.panel.queries, one.tree)
        links = one.words.strongest(one.head, LINKS, stand, one.words.clear)
        if links:
            checked = one.tree is not None or bool(closed_class(entry.relation))
            strength = links[0].weight * (1 + entry.score if checked else 0.5)
            evidence = f"{entry.score:.0%} right in a treebank, the best fixed offset {entry.baseline:.0%}"
            evidence += "" if entry.shuffled is None else f", shuffled weights {entry.shuffled:.0%}"
            does = followed(entry.relation, entry.direction)
            yield replace(one.card(group, entry.role, does, evidence, links, strength), checked=checked)


def _relations(one: _Head) -> list[Entry]:
    return [entry for entry in one.role.known if entry.source == "syntax"]


def relation_name(relation: str) -> str:
    """What a head is called that follows a relation."""
    return RELATIONS.get(relation) or RELATIONS.get(relation.split(":")[0]) or relation


def _group(relation: str) -> str | None:
    """The kind of card for a relation."""
    for kind, (_, relations) in GROUPS.items():
        if relation.split(":")[0] in relations:
            return kind
    return None


_FINDERS: tuple[Callable[[_Head], Iterator[Card]], ...] = (
    _syntax,
    _by_role("position", tuple(_OFFSETS), _at_offset),
    _by_role("local", ("local",), _around),
    _long_range,
    _by_role("copies", ("induction", "duplicate"), _copied),
    _by_role("same word", ("same word",), _in_word),
    _by_role("punctuation", ("punctuation",), _on_punctuation),
    _broad,
    _resting,
)


def _absent(scene: Scene, told: set[str]) -> list[str]:
    """Which kinds of heads are not there, and why, where that can be said."""
    panel = next((panel for panel in scene if panel.roles), None)
    if panel is None:
        return ["This record has no roles: heads of self attention have them, where q and k were kept."]
    labels, lines = panel.queries, []
    if not any(role.known for each in scene for role in each.roles):
        lines.append("Relations of syntax are not known of this model: heads.atlas(model, treebank) finds them.")
    words = [text.casefold() for text, special in zip(labels.text, labels.special, strict=True) if not special]
    reasons = {
        "copies": "" if len(set(words)) < len(words) else "the text repeats no token",
        "same word": "" if len(set(labels.word)) < len(labels) else "each word is one token",
        "punctuation": "" if any(map(is_punctuation, words)) else "the text has none",
    }
    for kind, name in KINDS.items():
        if kind in told or (kind in GROUPS and lines[:1] and lines[0].startswith("Relations")):
            continue
        why = f" ({reasons[kind]})" if reasons.get(kind) else ""
        lines.append(f"No head of this text shows it: {name}{why}.")
    return lines


class _Missed:
    """The relations of a tree, over more than the next word, that none of the heads links that are known for them."""

    ASKED = ("nsubj", "obj", "acl:relcl")

    def __init__(self, tree: Tree | None) -> None:
        self.pairs: dict[tuple[int, int], str] = {}  # (dependent, head) by number, and the relation
        self.most: dict[tuple[int, int], tuple[float, str]] = {}
        self.linked: set[tuple[int, int]] = set()
        self.names: dict[tuple[int, int], str] = {}
        for dependent, (head, relation) in enumerate(zip(*tree, strict=True)) if tree is not None else ():
            if relation in self.ASKED and head is not None and abs(head - dependent) > 1:
                self.pairs[dependent, head] = relation

    def add(self, one: _Head) -> None:
        if one.words is None or one.tree is None or not one.atlas:
            return
        text, units = one.panel.queries.text, one.words.units
        known = {(entry.relation, entry.direction) for entry in _relations(one)}
        for pair, relation in self.pairs.items():
            self.names[pair] = " and ".join(named(text, units[i]) for i in sorted(pair))
            for direction, (i, j) in ((TO_HEAD, pair), (TO_DEPENDENT, pair[::-1])):
                if (relation, direction) not in known:
                    continue
                if one.words.clear[one.head, i, j]:
                    self.linked.add(pair)
                weight = one.words.link(one.head, i, j).weight
                if weight >= self.most.get(pair, (0.0, ""))[0]:
                    where = f"head {one.panel.number}.{one.head}: {named(text, units[i])} looks at"
                    self.most[pair] = weight, f"{where} {named(text, units[j])}, {weight:.2f}"

    def lines(self) -> list[str]:
        lines = []
        for pair, relation in self.pairs.items():
            if pair in self.names and pair not in self.linked:
                name = f"{self.names[pair]} ({relation_name(relation)})"
                if pair in self.most:
                    most = f"of the heads known for it the most is {self.most[pair][1]}"
                else:
                    most = "no head is known for this relation"
                lines.append(f"No head links {name}: {most}.")
        return lines
