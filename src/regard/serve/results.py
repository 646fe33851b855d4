"""What a model sees in a text, as the page wants it; and exact weights of a part, from the q and k that were kept."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from regard.draw.look import read
from regard.draw.page.pack import Packed, codes, packed
from regard.draw.scene import Panel, Scene
from regard.errors import bad_value
from regard.heads import Record
from regard.models.base import tokenizing
from regard.serve.requests import Ask, Limits

__all__ = ["Result", "cropped", "looked", "unpacked"]

Tell = Callable[[float, str], None]  # how far it is (0 to 1), and what is being done; may raise, to stop


@dataclass
class Result:
    """What a job made: the page's content as JSON; the scene, of which crops are made, unless it is too large."""

    page: bytes
    scene: Scene | None
    size: int  # bytes of both


def looked(model: nn.Module, tokenizer: Any, ask: Ask, limits: Limits, tell: Tell) -> Result:
    """Look at a text."""
    _check_length(model, tokenizer, ask, limits)
    seen = read(model, tokenizer, ask.text, generate=ask.generate, progress=lambda share: tell(share / 2, "reading"))
    tell(0.5, "drawing")
    scene = Scene(seen)
    content = packed(
        {"text": scene},
        title=_title(ask, seen.generated),
        limit=limits.page,
        progress=lambda share: tell(0.5 + share / 2, "drawing"),
    )
    content.meta |= {"model": ask.model, "generated": seen.generated}
    page = _as_json(content)
    _slim(seen)
    size = len(page) + _held(seen)
    return Result(page, scene, size) if size <= limits.memory else Result(page, None, len(page))


def cropped(panel: Panel, head: int, rows: slice, cols: slice) -> dict[str, Any]:
    """The exact weights of a part of a head's map, as the page reads them."""
    code, scale = codes(panel.weights(head, rows, cols)[None], 16)
    flat = code.flatten()
    low, high = (bytes(part.tolist()) for part in (flat & 255, flat >> 8))
    return {
        "head": head,
        "row": rows.start,
        "col": cols.start,
        "at": 0,
        "shape": list(code.shape),
        "bits": 16,
        "scale": scale.tolist(),
        "data": base64.b64encode(low + high).decode(),
    }


def unpacked(page: bytes) -> Packed:
    """The content of a page that was made."""
    said = json.loads(page)
    return Packed(said["meta"], {name: base64.b64decode(data) for name, data in said["blobs"].items()})


def _as_json(content: Packed) -> bytes:
    blobs = {name: base64.b64encode(data).decode() for name, data in content.blobs.items()}
    return json.dumps({"meta": content.meta, "blobs": blobs}, separators=(",", ":"), allow_nan=False).encode()


def _check_length(model: Any, tokenizer: Any, ask: Ask, limits: Limits) -> None:
    """Raise where a text, with what shall be generated, has more tokens than may be, or than the model reads."""
    tokens = _count(model, tokenizer, ask.text)
    context = getattr(getattr(model, "config", None), "context", None) or limits.tokens
    most = min(limits.tokens, context)
    if tokens + ask.generate > most:
        why = f"as many as {ask.model} reads" if context == most else "as many as this server reads"
        more = f" and {ask.generate} to generate" if ask.generate else ""
        raise bad_value(
            "text", expected=f"at most {most} tokens, {why}", received=f"{tokens}{more}", remedy="a shorter text"
        )


def _count(model: Any, tokenizer: Any, text: str) -> int:
    if tokenizer is None:
        return model.encode(text).shape[1]
    with tokenizing(text):
        made: Any = tokenizer(text) if callable(tokenizer) else tokenizer.encode(text)
    return len(made["input_ids"] if callable(tokenizer) else made.ids)  # of transformers, or of tokenizers


def _title(ask: Ask, generated: str | None) -> str:
    """The beginning of the text, and of what came after it."""
    if not (generated and generated.strip()):
        return _beginning(ask.text, 76)
    return f"{_beginning(ask.text, 36)} → {_beginning(generated, 36)}"


def _beginning(text: str, most: int) -> str:
    words = " ".join(text.split())
    return words if len(words) <= most else words[: most - 1].rstrip() + "…"


def _slim(seen: Record) -> None:
    """Let go of what crops do not need: values, outputs, inputs, the model's own weights."""
    for layer in seen:
        assert layer.text is not None
        layer.text.values.clear()
        for piece in layer.text.pieces:
            piece.output = piece.input = piece.projection = None


def _held(thing: Any) -> int:
    """Bytes of all tensors that are within reach of something of ours."""
    known: set[int] = set()
    memory: dict[int, int] = {}
    rest = [thing]
    while rest:
        one = rest.pop()
        if id(one) in known:
            continue
        known.add(id(one))
        if isinstance(one, Tensor):
            memory[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes()
        elif isinstance(one, Mapping):
            rest += one.values()
        elif isinstance(one, (list, tuple)):
            rest += one
        elif type(one).__module__.startswith("regard.") and hasattr(one, "__dict__"):
            rest += vars(one).values()
    return sum(memory.values())
