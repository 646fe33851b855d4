"""Requests, checked before anything is computed."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from reprlib import repr as short
from typing import Any

from regard.errors import bad_type, bad_value

__all__ = [
    "Limits",
    "LookRequest",
    "RequestError",
    "WithoutRequest",
    "parse_head",
    "parse_index",
    "parse_look",
    "parse_range",
]


@dataclass(frozen=True)
class Limits:
    """How much may be asked for, and how much is kept.

    Attributes:
        characters, tokens: of a text; generated tokens count.
        generate: tokens that a model may generate.
        crop: tokens to each side of an exact crop.
        page: bytes of a page, about; longer texts are pooled.
        waiting: jobs in the queue.
        results, memory: how many results are kept, and their bytes together.
        models: how many loaded models are kept.
        forget: seconds without a request after which a finished job is forgotten.
        patience: seconds without a request after which a running job is stopped.
        reading: seconds in which a request has to arrive completely.
    """

    characters: int = 16_000
    tokens: int = 2048
    generate: int = 128
    crop: int = 256
    page: int = 8_000_000
    waiting: int = 8
    results: int = 4
    memory: int = 512 * 2**20
    models: int = 2
    forget: float = 900.0
    patience: float = 120.0
    reading: float = 5.0

    @staticmethod
    def of_tokens(tokens: int) -> Limits:
        """Limits for texts of this many tokens: characters, and what is kept, grow with them."""
        default = Limits()
        longer = max(1, -(-tokens // default.tokens))
        return Limits(characters=longer * default.characters, tokens=tokens, memory=longer * default.memory)

    @property
    def body(self) -> int:
        """Bytes of a request: JSON may write a character as twelve."""
        return 12 * self.characters + 4096


class RequestError(Exception):
    """A request that is refused: the HTTP status, the message, more headers."""

    def __init__(self, status: int, message: Exception | str, **headers: str) -> None:
        super().__init__(str(message))
        self.status, self.message, self.headers = status, str(message), headers


@dataclass(frozen=True)
class LookRequest:
    """A text to look at with a model, and how many tokens the model shall generate after it."""

    text: str
    model: str
    generate: int = 0


@dataclass(frozen=True)
class WithoutRequest:
    """What changes in the result of a job without one head."""

    job: str
    model: str
    layer: int
    head: int


def parse_look(body: bytes, kinds: Mapping[str, str], limits: Limits) -> LookRequest:
    """The body of a request as a `LookRequest`. `kinds`: the models that it may name, and the kind of each."""
    content = _parse_json(body)
    if not isinstance(content, dict):
        raise RequestError(422, bad_type("body", expected="an object with text and model", received=short(content)))
    if unknown := sorted(set(content) - {"text", "model", "generate"}):
        raise RequestError(422, bad_value("body", expected="text, model and generate", received=short(unknown[0])))
    text = _check_text(content.get("text"), limits)
    model = content.get("model")
    if not isinstance(model, str) or model not in kinds:
        raise RequestError(422, bad_value("model", expected=f"one of {', '.join(kinds)}", received=short(model)))
    return LookRequest(text, model, _check_generate(content.get("generate", 0), model, kinds[model], limits))


def parse_head(body: bytes, heads: list[int]) -> tuple[int, int]:
    """The body of a request as the numbers of a layer and of one of its heads; `heads`: how many each layer has."""
    content = _parse_json(body)
    if not isinstance(content, dict) or set(content) != {"layer", "head"}:
        raise RequestError(422, bad_type("body", expected="an object with layer and head", received=short(content)))
    numbers = []
    for name in ("layer", "head"):
        size, value = len(heads) if name == "layer" else heads[numbers[0]], content[name]
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < size:
            raise RequestError(422, bad_value(name, expected=f"a number from 0 to {size - 1}", received=short(value)))
        numbers.append(value)
    return numbers[0], numbers[1]


def _parse_json(body: bytes) -> Any:
    try:
        return json.loads(body.decode("utf-8"))
    except UnicodeDecodeError:
        raise RequestError(400, bad_value("body", expected="UTF-8", received="other bytes")) from None
    except RecursionError:
        raise RequestError(400, bad_value("body", expected="one flat object", received="a deep one")) from None
    except ValueError as error:
        raise RequestError(400, bad_value("body", expected="JSON", received=str(error)[:80])) from None


def _check_text(text: Any, limits: Limits) -> str:
    if not isinstance(text, str):
        raise RequestError(422, bad_type("text", expected="a text", received=short(text)))
    if not text.strip():
        raise RequestError(422, bad_value("text", expected="at least one word", received=short(text)))
    if len(text) > limits.characters:
        expected = f"at most {limits.characters} characters"
        remedy = "a shorter text, or `regard serve --tokens` with a larger number"
        raise RequestError(422, bad_value("text", expected=expected, received=len(text), remedy=remedy))
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise RequestError(422, bad_value("text", expected="whole characters", received="half of a pair")) from None
    return text


def _check_generate(count: Any, model: str, kind: str, limits: Limits) -> int:
    if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= limits.generate:
        expected = f"a number of tokens from 0 to {limits.generate}"
        raise RequestError(422, bad_value("generate", expected=expected, received=short(count)))
    if count and kind == "encoder":
        expected = f"0, for {model} is an encoder and cannot generate"
        raise RequestError(422, bad_value("generate", expected=expected, received=count, remedy="a decoder, or 0"))
    return count


def parse_index(name: str, value: str | None, size: int) -> int:
    """A number from 0 to size - 1, of a URL's query."""
    if value is None or re.fullmatch("[0-9]{1,9}", value) is None or int(value) >= size:
        raise RequestError(422, bad_value(name, expected=f"a number from 0 to {size - 1}", received=short(value)))
    return int(value)


def parse_range(name: str, value: str | None, size: int, most: int) -> slice:
    """A range within 0 to size, of a URL's query: 3-7 is 3, 4, 5 and 6."""
    match = re.fullmatch("([0-9]{1,9})-([0-9]{1,9})", value or "")
    first, last = (int(x) for x in match.groups()) if match else (0, 0)
    if not first < last <= size or last - first > most:
        expected = f"first-last within 0-{size}, at most {most} of them"
        raise RequestError(422, bad_value(name, expected=expected, received=short(value)))
    return slice(first, last)
