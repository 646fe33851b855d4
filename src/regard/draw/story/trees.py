"""Which words of a text may stand in a relation of syntax: by its tree where one is known, else by closed word classes.

Words are numbered without special tokens, as `units_of(labels, words=True)` has them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import NamedTuple

from regard.heads.analysis.labels import Labels
from regard.heads.analysis.syntax.questions import TO_DEPENDENT, TO_HEAD
from regard.heads.analysis.token_classes import is_punctuation
from regard.heads.analysis.treebank import Sentence, sentences

__all__ = ["GROUPS", "Tree", "closed_class", "followed", "may_stand", "tree_of"]

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
# Kinds of relations that a story has a card for, with their names.
GROUPS = {
    "verbs": ("a head that links verbs with their subjects or objects", ("nsubj", "csubj", "obj", "iobj", "obl")),
    "clauses": ("a head on a relative or another dependent clause", ("acl", "advcl", "ccomp", "xcomp", "mark")),
    "phrases": (
        "a head that links the words of a phrase",
        ("det", "case", "amod", "nummod", "nmod", "appos", "aux", "cop", "advmod", "compound", "flat", "cc", "conj"),
    ),
}
_PRONOUNS = "i you he she it we they me him her us them who whom which that this these those what"
# English words of closed classes: a dependent of the relation is one of these.
_CLOSED = {
    "det": "the a an every each some any no another",
    "case": "of in for on with at by from about into under between through during without against among towards upon"
    " within across behind",
    "aux": "be is are was were been being am have has had do does did will would can could may might shall should must",
    "cop": "be is are was were been being am",
    "mark": "if because although though whether unless",
    "cc": "and or but nor yet",
    "nmod:poss": "my your his her its our their whose",
}
_CLOSED_WORDS = {relation: frozenset(words.split()) for relation, words in _CLOSED.items()}
# Of the pronouns these can only be subjects, or objects.
_CASES = {"nsubj": frozenset(["i", "he", "she", "we", "they"]), "obj": frozenset(["me", "him", "us", "them"])}
_FUNCTION_WORDS = frozenset(_PRONOUNS.split()).union(
    *_CLOSED_WORDS.values(), ["that", "to", "as", "this", "these", "those", "over", "so"]
)
_CLOSED_WORDS |= _CASES
# Relations of clauses: without a tree, a text without any of these words has none that could be found.
_CLAUSES = {
    "acl:relcl": frozenset(["that", "which", "who", "whom", "whose", "where"]),
    "advcl": frozenset(["when", "if", "because", "although", "though", "while", "since", "unless", "until"]),
    "acl": frozenset(),
    "ccomp": frozenset(),
    "xcomp": frozenset(),
    "csubj": frozenset(),
}


class Tree(NamedTuple):
    """The syntax of a text: for each word its head (None for the root) and its relation to it."""

    heads: tuple[int | None, ...]
    relations: tuple[str, ...]


def tree_of(labels: Labels, source: str | os.PathLike[str] | Iterable[Sentence]) -> Tree | None:
    """The tree of a text in a CoNLL-U file, or among sentences: of the longest one that the text begins with (what a
    model generated after it has no tree); None if there is none."""
    words, best = _words(labels), None
    for sentence in sentences(source) if isinstance(source, (str, os.PathLike)) else source:
        forms = [word.form.casefold() for word in sentence.words]
        if forms == words[: len(forms)] and len(forms) > (0 if best is None else len(best.words)):
            best = sentence
    if best is None:
        return None
    more = len(words) - len(best.words)
    heads, relations = (tuple(getattr(word, name) for word in best.words) for name in ("head", "relation"))
    return Tree(heads + (None,) * more, relations + ("",) * more)


def _words(labels: Labels) -> list[str]:
    """The words of a text in small letters, without special tokens."""
    special = {word for word, is_special in zip(labels.word, labels.special, strict=True) if is_special}
    return [word.casefold() for number, word in enumerate(labels.words) if number not in special]


def may_stand(relation: str, direction: str, labels: Labels, tree: Tree | None) -> Callable[[int, int], bool]:
    """Whether words i and j, who looks and who is looked at, stand in a relation by the tree; without one, whether they
    may: by English words of closed classes, for other relations content words."""
    words = _words(labels)
    closed = closed_class(relation)
    clause = _CLAUSES.get(relation, _CLAUSES.get(relation.split(":")[0]))
    if tree is None and clause is not None and not clause.intersection(words):
        return lambda i, j: False

    def stand(i: int, j: int) -> bool:
        dependent, head = (i, j) if direction == TO_HEAD else (j, i)
        if tree is not None:
            return tree.heads[dependent] == head and tree.relations[dependent] == relation
        fits = words[dependent] in closed if closed else _is_content(words[dependent])
        return fits and _is_content(words[head])

    return stand


def closed_class(relation: str) -> frozenset[str]:
    """English words that are dependents of a relation, if it has words of its own."""
    base = relation.split(":")[0]
    return _CLOSED_WORDS.get(relation) or _CLOSED_WORDS.get(base) or frozenset()


def _is_content(word: str) -> bool:
    return word not in _FUNCTION_WORDS and not is_punctuation(word)


def followed(relation: str, direction: str) -> str:
    """What a head does that follows a relation, in words.

    >>> followed("det", "to head"), followed("det", "to dependent")
    ('takes determiners to their nouns', 'takes nouns to their determiners')
    """
    if direction not in (TO_HEAD, TO_DEPENDENT):
        return "takes mentions to what they refer to"
    known = _RELATIONS.get(relation) or _RELATIONS.get(relation.split(":")[0])
    if known is None:
        return f"takes words to their {'head' if direction == TO_HEAD else 'dependent'} ({relation})"
    dependents, heads = known
    if direction == TO_HEAD:
        return f"takes {dependents} to {heads}"
    return f"takes {heads.removeprefix('their ').removeprefix('the ')} to their {dependents}"
