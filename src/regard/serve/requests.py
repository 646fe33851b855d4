"""What is asked for, checked before anything is computed."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from reprlib import repr as short
from typing import Any

from regard.errors import bad_type, bad_value

__all__ = ["Ask", "Limits", "Refused", "ask", "number", "span"]


@dataclass(frozen=True)
class Limits:
    """How much may be asked for, and how much is kept.

    Attributes:
        characters, tokens: of a text; what is generated counts as tokens.
        generate: tokens that a model may go on for.
        crop: tokens to each side of an exact crop.
        page: bytes of a page, about; longer texts are pooled.
        waiting: jobs in the queue.
        results, memory: how many results are kept, and the bytes of all together.
        models: how many loaded models are kept.
        forget: seconds after which a job that nobody asks for is forgotten.
        patience: seconds after which one that nobody asks for is not computed any further.
        reading: seconds in which a request has to arrive whole.
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

    @property
    def body(self) -> int:
        """Bytes of a request: JSON may write a character as twelve."""
        return 12 * self.characters + 4096


class Refused(Exception):
    """A request that is not served: the status, and why in words."""

    def __init__(self, status: int, why: Exception | str, **headers: str) -> None:
        super().__init__(str(why))
        self.status, self.why, self.headers = status, str(why), headers


@dataclass(frozen=True)
class Ask:
    """A text to look at with a model, which may go on for some tokens."""

    text: str
    model: str
    generate: int = 0


def ask(body: bytes, kinds: Mapping[str, str], limits: Limits) -> Ask:
    """What a request asks for. `kinds` are the models that it may name, and what each is."""
    said = _json(body)
    if not isinstance(said, dict):
        raise Refused(422, bad_type("body", expected="an object with text and model", received=short(said)))
    if strange := sorted(set(said) - {"text", "model", "generate"}):
        raise Refused(422, bad_value("body", expected="text, model and generate", received=short(strange[0])))
    text = _text(said.get("text"), limits)
    model = said.get("model")
    if not isinstance(model, str) or model not in kinds:
        raise Refused(422, bad_value("model", expected=f"one of {', '.join(kinds)}", received=short(model)))
    return Ask(text, model, _generate(said.get("generate", 0), model, kinds[model], limits))


def _json(body: bytes) -> Any:
    try:
        return json.loads(body.decode("utf-8"))
    except UnicodeDecodeError:
        raise Refused(400, bad_value("body", expected="UTF-8", received="other bytes")) from None
    except RecursionError:
        raise Refused(400, bad_value("body", expected="one flat object", received="a deep one")) from None
    except ValueError as error:
        raise Refused(400, bad_value("body", expected="JSON", received=str(error)[:80])) from None


def _text(text: Any, limits: Limits) -> str:
    if not isinstance(text, str):
        raise Refused(422, bad_type("text", expected="a text", received=short(text)))
    if not text.strip():
        raise Refused(422, bad_value("text", expected="at least one word", received=short(text)))
    if len(text) > limits.characters:
        raise Refused(
            422,
            bad_value(
                "text",
                expected=f"at most {limits.characters} characters",
                received=f"{len(text)}",
                remedy="a shorter text",
            ),
        )
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise Refused(422, bad_value("text", expected="whole characters", received="half of a pair")) from None
    return text


def _generate(count: Any, model: str, kind: str, limits: Limits) -> int:
    if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= limits.generate:
        raise Refused(
            422,
            bad_value("generate", expected=f"a number of tokens from 0 to {limits.generate}", received=short(count)),
        )
    if count and kind == "encoder":
        raise Refused(
            422,
            bad_value(
                "generate",
                expected=f"0, for {model} is an encoder and does not write",
                received=count,
                remedy="a decoder, or 0",
            ),
        )
    return count


def number(what: str, said: str | None, size: int) -> int:
    """One of so many, as an address says it."""
    if said is None or re.fullmatch("[0-9]{1,9}", said) is None or int(said) >= size:
        raise Refused(422, bad_value(what, expected=f"a number from 0 to {size - 1}", received=short(said)))
    return int(said)


def span(what: str, said: str | None, size: int, most: int) -> slice:
    """Some of so many in a row, as an address says it: 3-7 is 3, 4, 5 and 6."""
    found = re.fullmatch("([0-9]{1,9})-([0-9]{1,9})", said or "")
    first, last = (int(x) for x in found.groups()) if found else (0, 0)
    if not first < last <= size or last - first > most:
        raise Refused(
            422, bad_value(what, expected=f"first-last within 0-{size}, at most {most} of them", received=short(said))
        )
    return slice(first, last)
