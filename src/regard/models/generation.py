"""Generation: choose the next token, emit text as soon as it is final, and stop.

Letters: B texts, N tokens, V vocabulary.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from regard.cache import RollingCache, together, tokens_read
from regard.errors import bad_type, bad_value
from regard.models.base import padded
from regard.projections import project, uses_copies

if TYPE_CHECKING:
    from regard.models.decoder import Cache, Decoder

__all__ = ["Rules", "Writer", "choose", "generate_batch", "stream", "tokens"]

# From this many tokens on, packing the weights for products with single rows pays off: it costs 3 to 5 tokens.
_WORTH_PACKING = 32


@dataclass(frozen=True)
class Rules:
    """How the next token is chosen."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        for name, kind in (("temperature", (int, float)), ("top_p", (int, float)), ("seed", (int,))):
            value = getattr(self, name)
            if value is not None and not isinstance(value, kind):
                raise bad_type(name, expected="a number" if float in kind else "an integer", received=repr(value))
        if not 0 <= self.temperature < float("inf"):
            raise bad_value(
                "temperature", expected="0 (the likeliest token) or a positive number", received=self.temperature
            )
        if self.top_k is not None and (type(self.top_k) is not int or self.top_k < 1):
            raise bad_value("top_k", expected="a positive integer, or None for all", received=repr(self.top_k))
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise bad_value("top_p", expected="a probability above 0 and up to 1, or None", received=self.top_p)

    def generator(self, model: Decoder) -> torch.Generator | None:
        """The random generator; None for torch's default. Sharded processes use the same seed."""
        seed = self.seed
        if seed is None and self.temperature and model.first is not None:
            seed = model.first(int(torch.randint(2**62, (), device="cpu")))
        return None if seed is None else torch.Generator(model.device).manual_seed(seed)


def choose(logits: Tensor, rules: Rules, generator: torch.Generator | None = None) -> Tensor:
    """The next token of each row of logits (B, V), as (B,).

    >>> choose(torch.tensor([[0.0, 2.0, 1.0]]), Rules())
    tensor([1])
    """
    if rules.temperature == 0:
        return logits.argmax(-1)
    logits = logits.float()
    logits = (logits - logits.amax(-1, keepdim=True)) / max(rules.temperature, 1e-30)  # at most 0, so nothing overflows
    if rules.top_k is not None and rules.top_k < logits.shape[-1]:
        kept = logits.topk(rules.top_k)
        logits = torch.full_like(logits, float("-inf")).scatter(-1, kept.indices, kept.values)
    probabilities = logits.softmax(-1)
    if rules.top_p is not None and rules.top_p < 1:
        ordered, order = probabilities.sort(-1, descending=True)
        dropped = ordered.cumsum(-1) - ordered >= rules.top_p  # the tokens before it already have this probability
        probabilities = probabilities.masked_fill(torch.zeros_like(dropped).scatter(-1, order, dropped), 0.0)
    return torch.multinomial(probabilities, 1, generator=generator)[:, 0]


def tokens(
    model: Decoder, rows: Sequence[Sequence[int]], rules: Rules, cache: Cache, expected: int | None = None
) -> Iterator[Tensor]:
    """Yield the next token of each row, (B,), without end. Several rows may differ in length; their cache is empty.

    `expected`: how many tokens the caller will take, if known.
    """
    assert len(rows) == 1 or not len(cache[0])
    ids, keep = (x.to(model.device) for x in padded(rows))
    generator = rules.generator(model)
    few = expected is not None and expected < _WORTH_PACKING
    packed = nullcontext() if few or not uses_copies(len(rows), next(model.parameters()).dtype) else model.packed()
    with packed, torch.inference_mode():
        states = _prefill(model, ids, cache)
        if len(rows) > 1:  # padded on the right: no token attends to padding, and the cache drops it
            lengths = keep.sum(1)
            states = states[torch.arange(len(rows), device=model.device), lengths - 1][:, None]
            for layer_cache in cache:
                layer_cache.truncate(lengths)  # type: ignore[union-attr]
        chosen = choose(project(model.head, states[:, -1]), rules, generator)
    yield chosen
    while True:
        with packed, torch.inference_mode():  # (not active while the caller has control)
            chosen = choose(model(chosen[:, None], cache=cache)[:, -1], rules, generator)
        yield chosen


def _prefill(model: Decoder, ids: Tensor, cache: Cache) -> Tensor:
    """Hidden states of the prompt, (B, N, W); of its last chunk, if a rolling cache reads it in chunks."""
    step = cache[0].window if isinstance(cache[0], RollingCache) else ids.shape[1]
    with together(cache):
        for start in range(0, ids.shape[1] - step, step):
            model(ids[:, start : start + step], cache=cache, head=False)
        rest = ids.shape[1] % step or step
        return model(ids[:, -rest:], cache=cache, head=False)


def stream(
    model: Decoder, text: str, max_new_tokens: int | None, rules: Rules, stop: str | Sequence[str], cache: Cache | None
) -> Iterator[str]:
    """Iterate over the new text in pieces, each as soon as it is final. Arguments are checked at once."""
    model._check_cache(cache)
    stops, rows = _stops(stop), _rows(model, [text], cache)
    count = _count(model, rows, max_new_tokens, cache)
    return _stream(model, rows, count, rules, stops, cache)


def _stream(
    model: Decoder, rows: list[list[int]], count: int | None, rules: Rules, stops: tuple[str, ...], given: Cache | None
) -> Iterator[str]:
    """See `stream`. `given`: the caller's cache."""
    if count == 0:
        if given is not None:  # the caller's cache gets the prompt anyway
            with torch.inference_mode():
                _prefill(model, torch.tensor(rows, device=model.device), given)
        return
    writer = Writer(model, stops, rows[0])
    cache = model.new_cache(capacity=len(rows[0]) + (count or 0)) if given is None else given
    chosen, written, read = None, 0, tokens_read(cache[0]) + len(rows[0])
    try:
        for written, chosen in enumerate(tokens(model, rows, rules, cache, count), 1):
            if int(chosen) in model.config.eos:
                yield writer.finish()
                break
            piece, ended = writer.add(int(chosen))
            if piece:
                yield piece
            if ended or written == count:
                yield "" if ended else writer.finish()
                break
    except BaseException:  # closed by the caller, or interrupted: the cache may be used again
        _read_last(model, chosen, given, read + written)
        raise
    _read_last(model, chosen, given, read + written)


def _read_last(model: Decoder, chosen: Tensor | None, cache: Cache | None, tokens: int) -> None:
    """Run the last chosen token through the caller's cache, unless it has all `tokens` already (after an interrupt) or
    there is no learned position left."""
    if cache is None or chosen is None or tokens_read(cache[0]) >= tokens:
        return
    if model.embedding.places is not None and len(cache[0]) >= (model.config.context or 0):
        return
    with torch.inference_mode():
        model(chosen[:, None], cache=cache, head=False)


def generate_batch(
    model: Decoder,
    texts: Sequence[str],
    max_new_tokens: int,
    rules: Rules,
    stop: str | Sequence[str],
    cache: Cache | None,
) -> list[str]:
    """The new text of each prompt. Finished rows are computed until the last one ends, and their tokens dropped."""
    if cache is not None:
        raise bad_value(
            "cache",
            expected="None for several texts, which end at different lengths",
            received="a cache",
            remedy="generate one text at a time, each with its own cache",
        )
    if not isinstance(texts, Sequence) or isinstance(texts, bytes):
        raise bad_type("text", expected="a text, or a list of texts", received=type(texts).__name__)
    if max_new_tokens is None:
        raise bad_value("max_new_tokens", expected="an integer for several texts", received="None")
    if not texts:
        return []
    stops, rows = _stops(stop), _rows(model, texts, None)
    count = _count(model, rows, max_new_tokens, None)
    writers, written, unfinished = (
        [Writer(model, stops, row) for row in rows],
        ["" for _ in rows],
        set(range(len(rows))),
    )
    if count == 0:
        return written
    assert count is not None
    cache = model.new_cache(capacity=max(map(len, rows)) + count)
    for number, chosen in enumerate(tokens(model, rows, rules, cache, count), 1):
        for i, token in enumerate(chosen.tolist()):
            if i not in unfinished:
                continue
            ended = stopped = token in model.config.eos
            if not ended:
                piece, stopped = writers[i].add(token)
                written[i] += piece
            if ended or (number == count and not stopped):
                written[i] += writers[i].finish()
            if stopped:
                unfinished.discard(i)
        if not unfinished or number == count:
            break
    return written


def _rows(model: Decoder, texts: Sequence[str], cache: Cache | None) -> list[list[int]]:
    """The ids of each text; without the beginning-of-text token if it continues a cache."""
    rows = [model._tokenize(text).ids for text in texts]
    if cache is not None and len(cache[0]) and model.config.bos is not None:
        rows = [row[1:] if row[:1] == [model.config.bos] else row for row in rows]
    for row in rows:
        if not row:
            raise bad_value("text", expected="at least one token to begin with", received="an empty text")
    return rows


def _count(model: Decoder, rows: list[list[int]], wanted: int | None, cache: Cache | None) -> int | None:
    """The maximum number of new tokens: as many as wanted, but no more than there are learned positions."""
    if wanted is not None and (type(wanted) is not int or wanted < 0):
        raise bad_value("max_new_tokens", expected="an integer of at least 0", received=repr(wanted))
    context, longest = model.config.context, max(map(len, rows)) + (0 if cache is None else len(cache[0]))
    if context is None or isinstance(cache and cache[0], RollingCache):
        return wanted
    if model.embedding.places is not None:  # (the last chosen token needs none)
        return max(context + 1 - longest, 1) if wanted is None else min(wanted, max(context + 1 - longest, 1))
    if wanted is not None and longest + wanted > context:
        warnings.warn(
            f"{longest + wanted} tokens are more than the {context} that {model.name or 'the model'} was trained on; "
            f"remedy: cache=model.new_cache(window={context // 2}), which stays within",
            stacklevel=4,
        )
    return wanted


def _stops(stop: str | Sequence[str]) -> tuple[str, ...]:
    """The stop strings, checked."""
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    for text in stops:
        if not isinstance(text, str):
            raise bad_type("stop", expected="strings", received=type(text).__name__)
        if not text:
            raise bad_value("stop", expected="strings of at least one character", received="an empty one")
    return stops


class Writer:
    """Incremental decoding: turns tokens into text, and emits only text that later tokens cannot change.

    A character may consist of several tokens, and the text may end with the beginning of a stop string.
    """

    def __init__(self, model: Decoder, stops: tuple[str, ...] = (), before: Sequence[int] = ()) -> None:
        self._model, self._stops = model, stops
        self._ids = self._beginning(before)  # the last tokens, which the decoding of the next one may depend on
        self._known = len(model.decode(self._ids))  # length of their text that was emitted
        self._waiting = 0  # tokens since the last complete character
        self._boundaries: list[int] = []  # indices in `_ids` where a character starts
        self._held = ""  # final text that may be the beginning of a stop string

    def _beginning(self, before: Sequence[int]) -> list[int]:
        """The last tokens of the prompt, starting at a character; enough of them to have some text."""
        for count in range(_LOOK_BACK, len(before)):
            text = self._model.decode(before[-count:])
            if text and not text.startswith("\ufffd"):
                return list(before[-count:])
        return list(before)

    def add(self, token: int) -> tuple[str, bool]:
        """The text that is now final, and whether a stop string ended it."""
        self._ids.append(token)
        self._waiting += 1
        text = self._model.decode(self._ids)
        unfinished = text.endswith("\ufffd")
        if unfinished and self._waiting < _LONGEST_CHARACTER:  # wait for the other bytes of the character
            return "", False
        final = text[: len(text) - unfinished]  # more bytes can change the last character only
        new, self._known = final[self._known :], max(self._known, len(final))
        if not unfinished:
            self._waiting = 0
            self._boundaries.append(len(self._ids))
        self._forget()
        return self._emit(self._held + new)

    def _forget(self) -> None:
        """Drop old tokens, up to a character boundary, if the rest still has some text."""
        spare = max((at for at in self._boundaries if at <= len(self._ids) - _LOOK_BACK), default=0)
        if not spare and len(self._ids) > _LOOK_BACK * _LOOK_BACK:  # bytes that are not valid text
            spare = len(self._ids) - _LOOK_BACK
        text = self._model.decode(self._ids[spare:]) if spare else ""
        if text:
            self._ids, self._boundaries = self._ids[spare:], [at - spare for at in self._boundaries if at > spare]
            self._known = len(text) - text.endswith("\ufffd")

    def finish(self) -> str:
        """The remaining text, when no more tokens come."""
        rest = self._model.decode(self._ids)[self._known :]
        return self._emit(self._held + rest, final=True)[0]

    def _emit(self, text: str, *, final: bool = False) -> tuple[str, bool]:
        """`text` up to a stop string, and whether there is one; a possible beginning of one is held back."""
        ends = [at for at in (text.find(stop) for stop in self._stops) if at >= 0]
        if ends:
            self._held = ""
            return text[: min(ends)], True
        longest = 0 if final else max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - longest :]
        return text[: len(text) - longest], False


_LOOK_BACK = 8  # tokens that are kept for decoding
_LONGEST_CHARACTER = 4  # bytes of a character in UTF-8, and so tokens


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that is a proper prefix of `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
