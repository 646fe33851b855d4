"""`coreference`: which heads attend from a mention to an antecedent, for pronouns and nouns apart."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from regard.checks import whole_number
from regard.errors import bad_type, bad_value
from regard.heads.analysis import treebank
from regard.heads.analysis.syntax.questions import (
    COREFERENCE,
    Pair,
    Question,
    coreference_questions,
    mention_heads,
    questions_from_pairs,
)
from regard.heads.analysis.syntax.report import LEAST, Syntax, report
from regard.heads.analysis.syntax.run import (
    PASSAGE,
    check_arguments,
    context_of,
    count_answers,
    find_tokenizer,
    random_halves,
    shuffled_copy,
)
from regard.heads.analysis.syntax.texts import TokenizedText, batches_of_one_length, passages, tokenized
from regard.heads.analysis.treebank import Sentence, Word
from regard.heads.progress import track
from regard.heads.watch_all import evaluating

__all__ = ["coreference"]

OF_PRONOUNS, OF_NOUNS, OF_ANY = (f"{COREFERENCE}:{kind}" for kind in ("pronoun", "noun", "any"))
ORDER = (OF_PRONOUNS, OF_NOUNS, OF_ANY)  # of the rows of the result

# By these a pronoun is told where parts of speech are not given.
PRONOUNS = frozenset(
    (
        *("he", "she", "it", "they", "him", "her", "them", "his", "hers", "its", "their", "theirs"),
        *("himself", "herself", "itself", "themselves", "i", "you", "we", "me", "us", "my", "your", "our", "mine"),
        *("yours", "ours", "myself", "yourself", "ourselves", "who", "whom", "whose", "which", "that"),
    )
)

WordsWithPairs = tuple[Sequence[str] | str, Sequence[Pair | tuple[int, Sequence[int]]]]


def coreference(
    model: nn.Module,
    source: str | os.PathLike[str] | Sequence[WordsWithPairs],
    *,
    tokenizer: Any = None,
    limit: int | None = None,
    least: int = LEAST,
    batch_size: int = 32,
    progress: bool = True,
    seed: int = 0,
) -> Syntax:
    """Which heads attend from a mention to an antecedent (Clark et al. 2019): the share of mentions whose head word
    attends most, among the head words of earlier mentions, to one of the same entity. The first token of the text is no
    candidate, and a mention is not asked about if all its candidates are right.

    The rows are "coreference:pronoun", "coreference:noun" and "coreference:any". As in `syntax` the head is chosen on
    one half of the texts and reported on the other with a 95 % interval (Wilson), beside the nearest mention or the
    best fixed offset, whichever is better on the first half, and the model with shuffled weights.

    Args:
        model: as for `syntax`.
        source: a CoNLL-U file whose MISC column marks entities (`Entity=(e1-person-1` ... `e1)`, as CorefUD), read in
            passages; or a list of (words, pairs): words as a list or divided by spaces, and for each mention its head
            word, the head words of its antecedents, and those of all candidates (every word before it, if left out),
            numbered from 0.
        tokenizer: a `tokenizers.Tokenizer` or a fast tokenizer of transformers; by default the model's own.
        limit: read only the first `limit` sentences of a file.
        least: kinds of mentions with fewer in one of the halves are left out.
        batch_size, progress, seed: as for `syntax`.

    >>> from regard.models import load
    >>> texts = [("Yesterday Anna met Tom because she was bored", [(5, [1], [1, 3])])] * 20
    >>> row = coreference(load("minilm"), texts, least=10).rows[0]
    >>> row.relation, row.n, row.baseline  # the nearest is Tom; the word four before is Anna
    ('coreference:pronoun', 10, 1.0)
    """
    check_arguments(model, batch_size, seed)
    whole_number("least", least, at_least=1)
    tokenizer = find_tokenizer(model, tokenizer)
    longest = context_of(model, tokenizer)
    if isinstance(source, (str, os.PathLike)):
        texts = _texts_of_file(source, limit, tokenizer, longest)
    else:
        texts = _texts_of_pairs(source, tokenizer)
    fitting = [text for text in texts if len(text.ids) <= longest]
    halves = random_halves(len(fitting), seed)
    batches = batches_of_one_length(fitting, batch_size)
    if not batches:
        raise bad_value("source", expected="mentions with an antecedent and another candidate", received="none")
    with evaluating(model):
        heads, trained, _ = count_answers(model, fitting, halves, track(batches, "coreference", progress))
        random = shuffled_copy(model, seed)
    _, shuffled, _ = count_answers(random, fitting, halves, track(batches, "coreference, shuffled", progress))
    result = report(heads, trained, shuffled, least=least, counts=_counts(fitting, len(texts)))
    return replace(result, rows=tuple(sorted(result.rows, key=lambda row: ORDER.index(row.relation))))


def _counts(texts: Sequence[TokenizedText], given: int) -> dict[str, int]:
    """What was read, and asked about."""
    kinds = Counter(question.relation for text in texts for question in text.questions)
    return {
        "texts": len(texts),
        "texts longer than the model reads": given - len(texts),
        "pronouns": kinds[OF_PRONOUNS],
        "other mentions": kinds[OF_NOUNS],
    }


def _texts_of_file(
    path: str | os.PathLike[str], limit: int | None, tokenizer: Any, longest: float
) -> list[TokenizedText]:
    """The passages of a file, with questions about its mentions."""
    sentences = treebank.read(path, limit)
    if not any(sentence.mentions for sentence in sentences):
        raise bad_value(
            os.fspath(path), expected="entities in its last column, such as Entity=(e1-person-1)", received="none"
        )
    lengths = ((sentence, len(tokenized(tokenizer, [sentence], []).ids)) for sentence in sentences)
    texts = []
    for passage in passages(lengths, min(longest, PASSAGE)):
        words = [word for sentence in passage for word in sentence.words]
        texts.append(_asked(tokenized(tokenizer, passage, coreference_questions(mention_heads(passage))), words))
    return texts


def _texts_of_pairs(source: Sequence[WordsWithPairs], tokenizer: Any) -> list[TokenizedText]:
    """The texts that a caller passed, with questions about their pairs."""
    sentences: list[Sentence] = []
    pairs: list[list[Pair]] = []
    for i, given in enumerate(source):
        if not isinstance(given, Sequence) or isinstance(given, str) or len(given) != 2:
            raise bad_type(f"source[{i}]", expected="(words, pairs)", received=repr(given))
        words, of_text = given
        sentences.append(_sentence(words.split() if isinstance(words, str) else words))
        pairs.append([(*pair, range(pair[0])) if len(pair) == 2 else pair for pair in of_text])  # type: ignore[misc]
    questions = questions_from_pairs(pairs, sentences)
    return [
        _asked(tokenized(tokenizer, [sentence], of_text), sentence.words)
        for sentence, of_text in zip(sentences, questions, strict=True)
    ]


def _sentence(words: Sequence[str]) -> Sentence:
    """Words as a sentence, divided by spaces."""
    found, start = [], 0
    for form in words:
        found.append(Word(form, None, "_", "_", (start, start + len(form))))
        start += len(form) + 1
    return Sentence(tuple(found), " ".join(words))


def _asked(text: TokenizedText, words: Sequence[Word]) -> TokenizedText:
    """The text with each question that has a wrong candidate: once for its kind of word, once for all."""
    questions: list[Question] = []
    for question in text.questions:
        if set(question.candidates or ()) <= set(question.answers):
            continue
        relation = OF_PRONOUNS if _is_pronoun(words[question.word]) else OF_NOUNS
        questions += [question._replace(relation=name) for name in (relation, OF_ANY)]
    return text._replace(questions=questions)


def _is_pronoun(word: Word) -> bool:
    return word.form.lower() in PRONOUNS if word.upos in ("_", "") else word.upos == "PRON"
