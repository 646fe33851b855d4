"""From attention weights to correct answers: which questions each head answers correctly, counted over texts.

Letters: N tokens, n words, C heads of all layers, Q questions.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from regard.heads.analysis.evidence import LEAST_QUERIES, SINK
from regard.heads.analysis.syntax.questions import Question

__all__ = ["Key", "Tally", "answered", "without_sinks", "word_weights"]

Key = tuple[str, str]  # a relation and a direction


def word_weights(weights: Tensor, words_of_tokens: Sequence[int], words: int) -> Tensor:
    """Weights between words: summed over the tokens attended to, averaged over the tokens that attend.

    Args:
        weights: (..., N, N).
        words_of_tokens: for each token the index of its word; -1 for none (a special token).
        words: how many there are. A word without tokens has zeros.

    Returns:
        (..., n, n). Rows sum to less than 1 by what went to special tokens.

    >>> weights = torch.tensor([[0.2, 0.3, 0.5], [0.6, 0.0, 0.4], [0.1, 0.1, 0.8]])
    >>> word_weights(weights, [0, 0, 1], 2)
    tensor([[0.5500, 0.4500],
            [0.2000, 0.8000]])
    """
    # Added where they belong, in N² steps: a product with a matrix of words by tokens has N³. What belongs to no word
    # is added up behind the last one, and left out.
    owners = [words if word < 0 else word for word in words_of_tokens]
    word_of_token = torch.tensor(owners, dtype=torch.long, device=weights.device)
    count = torch.bincount(word_of_token, minlength=words + 1)[:words].clamp(min=1)  # (n,)
    rows = weights.new_zeros(*weights.shape[:-2], words + 1, weights.shape[-1]).index_add_(-2, word_of_token, weights)
    rows = rows[..., :words, :] / count[:, None]  # (..., n, N)
    return weights.new_zeros(*rows.shape[:-1], words + 1).index_add_(-1, word_of_token, rows)[..., :words]


def without_sinks(weights: Tensor) -> Tensor:
    """Weights between words with 0 for each head's sinks: words that take over 0.3 of the mass, on average over the
    words that may see them, of which there are at least 8. A head rests there, so it is no answer.

    Args:
        weights: (C, n, n).

    >>> weights = torch.eye(9)
    >>> weights[2:, 1] = 1.0  # all words but the first attend to word 1
    >>> without_sinks(weights[None])[0].nonzero().tolist() == [[i, i] for i in range(9) if i != 1]
    True
    """
    n = weights.shape[-1]
    causal = not bool(weights.triu(1).any())
    seeing = torch.arange(n, 0, -1, device=weights.device) if causal else torch.full((n,), n, device=weights.device)
    sinks = (weights.sum(-2) > SINK * seeing) & (seeing >= LEAST_QUERIES)  # (C, n)
    return weights.masked_fill(sinks[:, None], 0.0)


def answered(weights: Tensor, questions: Sequence[Question]) -> Tensor:
    """Whether each head answers each question correctly.

    Of equal weights the first counts. A row that gives no weight to any candidate is not correct.

    Args:
        weights: between words, (..., n, n).

    Returns:
        Booleans (..., Q).

    >>> weights = torch.tensor([[0.5, 0.4, 0.1], [0.0, 0.9, 0.1], [0.0, 0.0, 1.0]])
    >>> answered(weights, [Question("det", "to head", word, (1, 2)) for word in range(3)])
    tensor([ True,  True, False])
    """
    n, all_words = weights.shape[-1], range(weights.shape[-1])
    correct = _one_hot([question.answers for question in questions], n).to(weights.device)  # (Q, n)
    allowed = _one_hot([all_words if q.candidates is None else q.candidates for q in questions], n).to(weights.device)
    itself = _one_hot([(question.word,) for question in questions], n).to(weights.device)
    rows = weights[..., [question.word for question in questions], :] * (allowed & ~itself)  # (..., Q, n)
    largest = rows.argmax(-1, keepdim=True)
    return (correct.expand(rows.shape).gather(-1, largest) & (rows.gather(-1, largest) > 0))[..., 0]


def _one_hot(words_of_questions: Sequence[Sequence[int]], words: int) -> Tensor:
    """Some words of each question as booleans, (Q, n)."""
    flags = torch.zeros(len(words_of_questions), words, dtype=torch.bool, device="cpu")
    rows = [i for i, chosen in enumerate(words_of_questions) for _ in chosen]
    flags[rows, [word for chosen in words_of_questions for word in chosen]] = True
    return flags


def _answerable(weights: Tensor, questions: list[Question]) -> list[Question]:
    """The questions that can be answered: for causal weights those with an answer before the word."""
    if weights.triu(1).any():
        return questions
    backward = (
        question._replace(answers=tuple(a for a in question.answers if a < question.word)) for question in questions
    )
    return [question for question in backward if question.answers]


@dataclass
class Tally:
    """Over many texts, how often each question was asked, and answered correctly: by each head, by each offset, by the
    nearest candidate.

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
        """Ask all heads all questions about one text.

        Args:
            weights: between words, (C, n, n).
        """
        questions = _answerable(weights, questions)
        if not questions:
            return
        correct = answered(weights, questions).cpu()
        indices: dict[Key, list[int]] = defaultdict(list)
        for i, question in enumerate(questions):
            key = question.relation, question.direction
            indices[key].append(i)
            self.offsets.setdefault(key, Counter()).update(answer - question.word for answer in question.answers)
            if question.candidates is not None:
                self.nearest[key] += _nearest(question.word, question.candidates) in question.answers
        for key, of_key in indices.items():
            self.asked[key] += len(of_key)
            self.right[key] = correct[:, of_key].sum(1) + self.right.get(key, 0)

    def accuracies(self, key: Key) -> Tensor:
        """Of each head, (C,)."""
        return self.right[key] / self.asked[key]

    def best_offset(self, key: Key) -> int:
        """The offset that is correct most often; of equals the shortest."""
        return min(self.offsets[key].items(), key=lambda item: (-item[1], abs(item[0]), item[0]))[0]

    def baseline(self, key: Key, offset: int | None) -> float:
        """How often the word at an offset is correct; without an offset, the nearest candidate."""
        return (self.nearest[key] if offset is None else self.offsets[key][offset]) / self.asked[key]


def _nearest(word: int, candidates: Sequence[int]) -> int:
    """The candidate nearest to a word; of two the one before."""
    return min(candidates, key=lambda place: (abs(place - word), place))
