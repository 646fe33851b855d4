"""Long texts with a needle: filler sentences, or random token ids, with a fact in them that is asked for at the end.

filler ... | key answer | ... filler | question (the key again) | answer
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard.errors import bad_value
from regard.heads.analysis.probes.inputs import special_prefix, token_ids

__all__ = ["Haystack", "NeedleParts", "haystack", "random_parts", "text_parts"]

SENTENCES = (
    "The train left the station a few minutes late.",
    "Rain fell on the roofs all afternoon.",
    "She put the bread on the table and opened a window.",
    "Two boats came in with the tide.",
    "The baker closed his shop at noon.",
    "A grey cat slept on the warm stones.",
    "Nobody had painted the fence for years.",
    "The road went down to the river and up again.",
    "He read the letter twice before he answered it.",
    "In winter the lake was covered with ice.",
    "The children played behind the school until it was dark.",
    "Some of the books had lost their covers.",
    "Her uncle kept bees and sold the honey.",
    "The clock in the hall had stopped long ago.",
    "They ate soup and talked about the weather.",
    "A cold wind came over the hills.",
    "The old bridge was closed to cars.",
    "He carried the chairs into the garden.",
    "From the top of the tower one could see the sea.",
    "The shop sold nails, rope and candles.",
    "A dog barked somewhere in the next street.",
    "She washed the cups and hung up the towel.",
    "The path was wet and covered with leaves.",
    "Every spring the storks returned to the same roof.",
    "The doctor lived in the last house of the village.",
    "A lamp was still burning in the kitchen.",
    "They waited an hour for the bus.",
    "The farmer looked at the sky and shook his head.",
    "Snow lay on the fields until March.",
    "The museum was small, and the tickets were cheap.",
    "He mended the gate with a piece of wire.",
    "At night the trains could be heard far away.",
    "The apples were red on one side and green on the other.",
    "She wrote her name in the guest book.",
    "The market was full of people and noise.",
    "A narrow stair led to the room under the roof.",
)
PLACES = ("harbour", "library", "mountain", "castle", "island", "forest", "palace", "valley")
WORDS = (
    *("copper", "violin", "pepper", "marble", "falcon", "ticket", "saddle", "walnut", "candle", "rocket", "velvet"),
    *("anchor", "barley", "cactus", "dragon", "emerald", "feather", "ginger", "hammer", "ivory", "jacket", "lemon"),
    *("magnet", "needle", "orange", "pencil", "quartz", "ribbon", "silver", "turtle"),
)
KEY, ANSWER = 2, 3  # tokens of the key and of the answer in a text of random ids; words of the answer in one of words


@dataclass(frozen=True)
class NeedleParts:
    """The token ids that a haystack is made of."""

    first: list[int]  # special tokens
    filler: list[list[int]]  # sentences, in a random order; they are repeated as often as needed
    key: list[int]
    answer: list[int]
    after: list[int]  # what ends the needle
    question: list[int]


@dataclass(frozen=True)
class Haystack:
    """A text with a needle. At query `queries[t]` the answer's token t is predicted; `keys` (N, K) has for each of
    these queries the places of that token in the needle's answer, and -1 elsewhere."""

    ids: Tensor  # (N,)
    queries: Tensor  # (A,)
    keys: Tensor  # (N, K)


def text_parts(tokenizer: Any, generator: torch.Generator) -> NeedleParts:
    """Filler sentences, and a secret of three words that belongs to a place."""
    place = PLACES[int(torch.randint(len(PLACES), (), generator=generator, device="cpu"))]
    words = [WORDS[i] for i in torch.randperm(len(WORDS), generator=generator, device="cpu")[:ANSWER].tolist()]
    order = torch.randperm(len(SENTENCES), generator=generator, device="cpu").tolist()
    key = f" The secret words of the {place} are"
    question = f" Question: name the secret words of the {place}. Answer: the secret words of the {place} are"
    pieces = (token_ids(tokenizer, text) for text in (key, " " + " ".join(words), ".", question))
    filler = [token_ids(tokenizer, " " + SENTENCES[i]) for i in order]
    return NeedleParts(special_prefix(tokenizer), filler, *pieces)


def random_parts(vocabulary: int, generator: torch.Generator) -> NeedleParts:
    """Random ids: a key of two tokens and an answer of three, none of which is in the filler."""
    if vocabulary <= 2 * (KEY + ANSWER):
        raise bad_value("vocabulary", expected=f"more than {2 * (KEY + ANSWER)} tokens", received=vocabulary)
    drawn = torch.randperm(vocabulary, generator=generator, device="cpu")
    key, answer, others = drawn[:KEY].tolist(), drawn[KEY : KEY + ANSWER].tolist(), drawn[KEY + ANSWER :]
    filler = others[torch.randint(len(others), (997,), generator=generator, device="cpu")].tolist()
    return NeedleParts([], [[token] for token in filler], key, answer, [], key)


def haystack(parts: NeedleParts, length: int, depth: float) -> Haystack:
    """A text of `length` tokens, the needle at a depth from 0 (after the first sentence) to 1 (before the question).

    >>> parts = NeedleParts([1], [[5], [6], [7, 7]], key=[2], answer=[3, 4], after=[], question=[2])
    >>> text = haystack(parts, 11, 0.5)
    >>> text.ids.tolist(), text.queries.tolist()
    ([1, 5, 6, 2, 3, 4, 7, 7, 2, 3, 4], [8, 9])
    >>> text.keys[8:].tolist()
    [[4], [5], [-1]]
    """
    needle = parts.key + parts.answer + parts.after
    room = length - len(parts.first) - len(needle) - len(parts.question) - len(parts.answer)
    least = length - room + len(parts.filler[0])
    if length < least:
        raise bad_value(
            "lengths", expected=f"at least {least} tokens, for the needle and the question", received=length
        )
    filler, ends = [], []  # where sentences end
    while len(filler) < room:
        for sentence in parts.filler:
            filler += sentence
            ends.append(len(filler))
    filler = filler[:room]
    place = min((end for end in ends if end <= room), key=lambda end: abs(end - depth * room))
    body = [*parts.first, *filler[:place], *needle, *filler[place:], *parts.question, *parts.answer]
    start = len(parts.first) + place + len(parts.key)  # of the answer in the needle
    queries = torch.arange(length - len(parts.answer) - 1, length - 1, device="cpu")
    keys = torch.full((length, len(parts.answer)), -1, device="cpu")
    for query, token in zip(queries.tolist(), parts.answer, strict=True):
        places = [start + i for i, other in enumerate(parts.answer) if other == token]
        keys[query, : len(places)] = torch.tensor(places, device="cpu")
    return Haystack(torch.tensor(body, device="cpu"), queries, keys[:, : _most(keys)])


def _most(keys: Tensor) -> int:
    """The largest number of keys of a query."""
    return int((keys >= 0).sum(1).max())
