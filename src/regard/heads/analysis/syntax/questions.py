"""What each head is asked about a sentence: of each word its head, of each head word its dependents, of each mention an
antecedent."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from regard.errors import bad_value
from regard.heads.analysis.treebank import Sentence

__all__ = [
    "COREFERENCE",
    "Pair",
    "Question",
    "coreference_questions",
    "dependency_questions",
    "mention_heads",
    "questions_from_pairs",
]

NOT_ASKED = ("root", "punct")  # the root has no head word; punctuation is not grammar (Clark et al. skip both)

TO_HEAD, TO_DEPENDENT, TO_ANTECEDENT = "to head", "to dependent", "to antecedent"
COREFERENCE = "coreference"

Pair = tuple[int, Sequence[int], Sequence[int]]  # head words of a mention, of its antecedents, and of the candidates


class Question(NamedTuple):
    """Which word does `word` attend to most? Any of `answers` is correct.

    Attributes:
        relation, direction: what it is counted as.
        word: index of the word that attends.
        answers: indices of words.
        candidates: the words to choose from; None for all but `word`.
    """

    relation: str
    direction: str
    word: int
    answers: tuple[int, ...]
    candidates: tuple[int, ...] | None = None


def dependency_questions(sentence: Sentence) -> list[Question]:
    """For each word its head; for each head word any of its dependents in a relation."""
    questions: list[Question] = []
    dependents: dict[tuple[str, int], list[int]] = defaultdict(list)
    for i, word in enumerate(sentence.words):
        if word.head is not None and word.relation not in NOT_ASKED:
            questions.append(Question(word.relation, TO_HEAD, i, (word.head,)))
            dependents[word.relation, word.head].append(i)
    questions += [Question(relation, TO_DEPENDENT, i, tuple(words)) for (relation, i), words in dependents.items()]
    return questions


def coreference_questions(mentions: Iterable[tuple[str, int]]) -> list[Question]:
    """For the head word of each mention, given as (entity, head word), an antecedent among the earlier mentions."""
    questions = []
    in_order = sorted(set(mentions), key=lambda mention: mention[::-1])  # by word
    for entity, word in in_order:
        earlier = [(other, place) for other, place in in_order if place < word]
        antecedents = tuple(place for other, place in earlier if other == entity)
        if antecedents:
            candidates = tuple(sorted({place for _, place in earlier}))
            questions.append(Question(COREFERENCE, TO_ANTECEDENT, word, antecedents, candidates))
    return questions


def mention_heads(passage: Sequence[Sentence]) -> Iterator[tuple[str, int]]:
    """Each mention as its entity and its head word; words are counted through the passage."""
    words_before = 0
    for sentence in passage:
        for mention in sentence.mentions:
            if mention.head is not None:
                yield mention.entity, words_before + mention.head
        words_before += len(sentence.words)


def questions_from_pairs(pairs: Sequence[Sequence[Pair]], sentences: Sequence[Sentence]) -> list[list[Question]]:
    """The coreference questions of each sentence that a caller passed as `pairs`."""
    if len(pairs) != len(sentences):
        raise bad_value("pairs", expected=f"a list for each of {len(sentences)} sentences", received=len(pairs))
    questions = []
    for i, (pairs_of_sentence, sentence) in enumerate(zip(pairs, sentences, strict=True)):
        questions.append([])
        for mention, antecedents, candidates in pairs_of_sentence:
            words = range(len(sentence.words))
            if mention not in words or not all(word in words for word in candidates):
                raise bad_value(
                    f"pairs[{i}]",
                    expected=f"words from 0 to {len(words) - 1}",
                    received=(mention, antecedents, candidates),
                )
            if not antecedents or mention in candidates or not set(antecedents) <= set(candidates):
                raise bad_value(
                    f"pairs[{i}]",
                    expected="antecedents among the candidates, and the mention not",
                    received=(mention, antecedents, candidates),
                )
            questions[-1].append(Question(COREFERENCE, TO_ANTECEDENT, mention, tuple(antecedents), tuple(candidates)))
    return questions
