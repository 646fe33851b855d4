"""Sentences of a treebank as a model reads them: token ids, and which word each token belongs to."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from regard.errors import bad_type
from regard.heads.analysis.syntax.questions import Question
from regard.heads.analysis.treebank import Sentence
from regard.models.base import tokenizing

__all__ = ["TokenizedText", "batches_of_one_length", "passages", "questions_of_others", "tokenized"]


class TokenizedText(NamedTuple):
    """A text: its token ids, the word of each token (-1 for special tokens), the number of words, and the questions."""

    ids: list[int]
    words_of_tokens: list[int]
    words: int
    questions: list[Question]

    @property
    def first_word(self) -> int:
        """The word of the first token, which is no candidate; -1 if that is a special token."""
        return self.words_of_tokens[0] if self.words_of_tokens else -1

    def about(self, questions: Iterable[Question]) -> list[Question]:
        """The questions that can be asked: about words that have tokens, with answers that have tokens, the first
        word excluded."""
        possible = set(self.words_of_tokens) - {self.first_word, -1}
        kept = []
        for question in questions:
            answers = tuple(answer for answer in question.answers if answer in possible)
            if answers and question.word in self.words_of_tokens:
                candidates = question.candidates
                if candidates is not None:
                    candidates = tuple(word for word in candidates if word != self.first_word)
                kept.append(question._replace(answers=answers, candidates=candidates))
        return kept


def tokenized(tokenizer: Any, sentences: Sequence[Sentence], questions: list[Question]) -> TokenizedText:
    """Sentences as one text, with the questions that can be asked about it."""
    text, spans = "", []
    for sentence in sentences:
        text += " " if text else ""
        start = len(text)
        spans += [word.span and (word.span[0] + start, word.span[1] + start) for word in sentence.words]
        text += sentence.text
    ids, offsets = _encode(tokenizer, text)
    without_questions = TokenizedText(ids, _words_of_tokens(offsets, spans, len(text)), len(spans), [])
    return without_questions._replace(questions=without_questions.about(questions))


def _encode(tokenizer: Any, text: str) -> tuple[list[int], list[tuple[int, int]]]:
    """The token ids of a text, and where each token starts and ends in it ((0, 0) for special tokens)."""
    if hasattr(tokenizer, "is_fast"):  # of transformers
        if not tokenizer.is_fast:
            raise bad_type(
                "tokenizer",
                expected="a fast one, which gives the offsets of its tokens",
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
    real = [i for i, keep in enumerate(encoding.attention_mask) if keep]  # a tokenizer may pad
    return [encoding.ids[i] for i in real], [encoding.offsets[i] for i in real]


def _words_of_tokens(
    offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int] | None], length: int
) -> list[int]:
    """For each token the word with which it shares most characters; -1 for none.

    >>> _words_of_tokens([(0, 0), (0, 3), (3, 5), (5, 9)], [(0, 2), (2, 5), (6, 9)], 9)  # [CLS] don 't see; do n't see
    [-1, 0, 1, 2]
    """
    word_of_character = [-1] * length
    for word, span in enumerate(spans):
        if span is not None:
            word_of_character[span[0] : span[1]] = [word] * (span[1] - span[0])
    shared = (Counter(word for word in word_of_character[start:end] if word >= 0) for start, end in offsets)
    return [max(counter, key=counter.__getitem__, default=-1) for counter in shared]


def questions_of_others(texts: Sequence[TokenizedText]) -> list[list[Question]]:
    """For each text the questions of another one with as many words, if there is one."""
    of_length: dict[int, list[int]] = defaultdict(list)
    for i, text in enumerate(texts):
        of_length[text.words].append(i)
    others = {i: same[place - 1] for same in of_length.values() for place, i in enumerate(same) if len(same) > 1}
    return [text.about(texts[others[i]].questions) if i in others else [] for i, text in enumerate(texts)]


def passages(sentences: Iterable[tuple[Sentence, int]], longest: float) -> Iterator[list[Sentence]]:
    """Consecutive sentences of a document with at most `longest` tokens together. Each sentence is given with the
    number of its tokens."""
    passage: list[Sentence] = []
    tokens = 0
    for sentence, length in sentences:
        if passage and (tokens + length > longest or sentence.document != passage[-1].document):
            yield passage
            passage, tokens = [], 0
        passage.append(sentence)
        tokens += length
    if passage:
        yield passage


def batches_of_one_length(texts: Sequence[TokenizedText], size: int) -> list[list[int]]:
    """Indices of the texts that have questions, batched by number of tokens, so that nothing is padded."""
    of_length: dict[int, list[int]] = defaultdict(list)
    for i, text in enumerate(texts):
        if text.questions:
            of_length[len(text.ids)].append(i)
    return [same[start : start + size] for same in of_length.values() for start in range(0, len(same), size)]
