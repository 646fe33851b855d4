"""What the heads of a model do in a text, in sentences: the clearest head of each kind, and what it links here.

Letters: N queries, M keys.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from regard.draw.scene import Panel, Scene
from regard.heads import ROLES, Role

__all__ = ["Sentence", "sentences"]

MOST = 8  # sentences
LINKS = 2  # links that a sentence names
LEAST_LINK = 0.05  # the least weight of a link that is named
LONGEST = 1024  # tokens up to which links are looked for
_WORDS = {rule.name: rule.words for rule in ROLES if rule.words}
_OFFSETS = {"previous": -1, "itself": 0, "next": 1} | {f"offset {k:+d}": k for k in range(-8, 9) if abs(k) > 1}
# What stands in a relation: dependents, and what they depend on.
_RELATIONS = {
    "det": ("determiners", "their nouns"),
    "case": ("prepositions", "their nouns"),
    "amod": ("adjectives", "their nouns"),
    "nummod": ("numbers", "their nouns"),
    "nmod": ("nouns", "the nouns that they modify"),
    "nmod:poss": ("possessors", "their nouns"),
    "acl": ("clauses", "their nouns"),
    "acl:relcl": ("relative clauses", "their nouns"),
    "appos": ("appositions", "their nouns"),
    "nsubj": ("subjects", "their verbs"),
    "obj": ("objects", "their verbs"),
    "iobj": ("indirect objects", "their verbs"),
    "obl": ("obliques", "their verbs"),
    "aux": ("auxiliaries", "their verbs"),
    "advmod": ("adverbs", "what they modify"),
    "advcl": ("adverbial clauses", "their verbs"),
    "xcomp": ("complements", "their verbs"),
    "ccomp": ("clauses", "their verbs"),
    "cop": ("copulas", "their predicates"),
    "mark": ("conjunctions", "their clauses"),
    "cc": ("coordinators", "their conjuncts"),
    "conj": ("conjuncts", "the first one"),
    "compound": ("parts of compounds", "their heads"),
    "flat": ("parts of names", "the first one"),
}


class Sentence(NamedTuple):
    """One head in words.

    Attributes:
        layer, head, role: which one, and the name of what it does.
        what: what it does; `evidence`: how well, beside uniform attention or a fixed offset, and shuffled weights.
        links: what it links in this text, as (query, key, weight); `rests`: where it rests, and how much.
    """

    layer: int
    head: int
    role: str
    what: str
    evidence: str
    links: list[tuple[int, int, float]]
    rests: str

    def text(self, scene: Scene) -> str:
        """The sentence, with the tokens of the scene."""
        panel = scene[self.layer]
        links = [f"{panel.queries.text[q]} -> {panel.keys.text[k]} {weight:.2f}" for q, k, weight in self.links]
        here = f"; its strongest links here: {', '.join(links)}" if links else ""
        rests = f"; {self.rests}" if self.rests else ""
        return f"Head {self.layer}.{self.head} {self.what} ({self.evidence}){here}{rests}."


def sentences(scene: Scene, most: int = MOST) -> list[Sentence]:
    """The clearest head of each kind of role that is present, the most telling kinds first."""
    best: dict[str, tuple[float, Panel, int]] = {}
    for panel in scene:
        for head, role in enumerate(panel.roles):
            if role.role is not None and role.informative and role.score is not None:
                strength = role.score * (1.0 if role.clear else 0.5)
                if role.role not in best or strength > best[role.role][0]:
                    best[role.role] = strength, panel, head
    order = [rule.name for rule in ROLES]
    kinds = sorted(best, key=lambda name: (order.index(name) if name in order else -1, -best[name][0]))
    told = [_sentence(panel, head, panel.roles[head]) for _, panel, head in (best[kind] for kind in kinds)]
    return told[:most]


def _sentence(panel: Panel, head: int, role: Role) -> Sentence:
    assert role.role is not None and role.score is not None
    entry = role.known[0] if role.origin == "atlas" and role.known else None
    if entry is not None and entry.source == "syntax":
        what = _followed(entry.relation, entry.direction)
        evidence = f"{entry.score:.0%} right in a treebank, best offset {entry.baseline:.0%}"
        chance = f"{entry.shuffled:.0%}" if entry.shuffled is not None else ""
    else:
        what = f"{'' if role.clear else 'partly '}attends to {_WORDS.get(role.role, role.role)}"
        source = {"treebank": " in a treebank", "probe": " in a probe"}.get(entry.source, "") if entry else ""
        evidence = f"{role.score:.2f} of what it does beside resting{source}, uniform {role.baseline or 0:.2f}"
        chance = f"{entry.shuffled:.2f}" if entry is not None and entry.shuffled is not None else ""
    evidence += f", shuffled weights {chance}" if chance else ""
    rests = role.describe().split(";")[0]
    rests = rests if rests.startswith("rests") else ""
    return Sentence(panel.number, head, role.role, what, evidence, _links(panel, head, role), rests)


def _followed(relation: str, direction: str) -> str:
    """A relation of syntax in words.

    >>> _followed("det", "to head"), _followed("det", "to dependent")
    ('takes determiners to their nouns', 'takes nouns to their determiners')
    """
    if direction == "to antecedent":
        return "takes mentions to what they refer to"
    known = _RELATIONS.get(relation) or _RELATIONS.get(relation.split(":")[0])
    if known is None:
        return f"takes words to their {'head' if direction == 'to head' else 'dependent'} ({relation})"
    dependents, heads = known
    if direction == "to head":
        return f"takes {dependents} to {heads}"
    return f"takes {heads.removeprefix('their ').removeprefix('the ')} to their {dependents}"


def _links(panel: Panel, head: int, role: Role) -> list[tuple[int, int, float]]:
    """The strongest links of a head but to its resting place: at the role's offset, if it has one."""
    n, m = panel.shape
    if not panel.layer.exact or max(n, m) > LONGEST or n != m:
        return []
    weights = panel.weights(head).clone()
    weights[:, 0] = 0
    special = torch.tensor(panel.keys.special)
    weights[:, special] = 0
    weights[torch.tensor(panel.queries.special)] = 0
    if role.role in _OFFSETS:
        weights = _only_offset(weights, _OFFSETS[role.role])
    elif role.role != "itself":
        weights.fill_diagonal_(0)
    top = weights.flatten().topk(min(LINKS, weights.numel()))
    pairs = [(int(i) // m, int(i) % m, float(w)) for i, w in zip(top.indices, top.values, strict=True)]
    return [pair for pair in pairs if pair[2] >= LEAST_LINK]


def _only_offset(weights: Tensor, offset: int) -> Tensor:
    """The weights at one offset, 0 elsewhere."""
    band = torch.zeros_like(weights)
    band.diagonal(offset).copy_(weights.diagonal(offset))
    return band
