"""The result of a look: the page's content, and exact weights of a part of a map from the q and k that were kept."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from regard.draw.effects import effects
from regard.draw.look import read
from regard.draw.page.numbers import codes
from regard.draw.page.pack import Packed, packed
from regard.draw.page.story_content import effects_json
from regard.draw.scene import Panel, Scene
from regard.errors import bad_value
from regard.models.base import tokenizing
from regard.serve.requests import Limits, LookRequest

__all__ = ["LookResult", "crop_weights", "page_content", "run_look", "run_without"]

Progress = Callable[[float, str], None]  # a share from 0 to 1 and what is being done; may raise, to stop


@dataclass
class LookResult:
    """The page's content as JSON, and the scene that crops are computed from; None if it is too large to keep."""

    page: bytes
    scene: Scene | None
    size: int  # bytes of both


def run_look(model: nn.Module, tokenizer: Any, request: LookRequest, limits: Limits, progress: Progress) -> LookResult:
    """Run a model on a text, and make the page's content of what was seen."""
    _check_length(model, tokenizer, request, limits)
    seen = read(
        model, tokenizer, request.text, generate=request.generate, progress=lambda share: progress(share / 2, "reading")
    )
    progress(0.5, "drawing")
    scene = Scene(seen, progress=lambda share: progress(0.5 + share / 4, "drawing"))
    content = packed(
        {"text": scene},
        title=_title(request.text, seen.generated),
        limit=limits.page,
        progress=lambda share: progress(0.75 + share / 4, "drawing"),
    )
    content.meta |= {"model": request.model, "generated": seen.generated}
    page = _to_json(content)
    for layer in seen:
        layer.drop_values()
    size = len(page) + tensor_bytes(seen)
    return LookResult(page, scene, size) if size <= limits.memory else LookResult(page, None, len(page))


def run_without(scene: Scene, layer: int, head: int) -> LookResult:
    """What changes without one head of a result, as the page has it."""
    record = scene.record
    found = None if record.rerun is None else effects(record.rerun, record, [(layer, head)], scene[layer].item)
    if found is None:
        expected, received = "a model that is still loaded and gives logits or hidden states", "none"
        raise bad_value("without", expected=expected, received=received, remedy="look again")
    page = json.dumps(effects_json(found), separators=(",", ":"), allow_nan=False).encode()
    return LookResult(page, None, len(page))


def crop_weights(panel: Panel, head: int, rows: slice, cols: slice) -> dict[str, Any]:
    """The exact weights of a part of a head's map, in the page's format."""
    code, scale = codes(panel.crop(head, rows, cols)[None], 16)
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


def page_content(page: bytes) -> Packed:
    """The content of a page from its JSON."""
    content = json.loads(page)
    return Packed(content["meta"], {name: base64.b64decode(data) for name, data in content["blobs"].items()})


def _to_json(content: Packed) -> bytes:
    blobs = {name: base64.b64encode(data).decode() for name, data in content.blobs.items()}
    return json.dumps({"meta": content.meta, "blobs": blobs}, separators=(",", ":"), allow_nan=False).encode()


def _check_length(model: Any, tokenizer: Any, request: LookRequest, limits: Limits) -> None:
    """Refuse a text that, with what shall be generated, has more tokens than the server or the model allows."""
    tokens = _count_tokens(model, tokenizer, request.text)
    context = getattr(getattr(model, "config", None), "context", None) or limits.tokens
    most = min(limits.tokens, context)
    if tokens + request.generate > most:
        why = f"as many as {request.model} reads" if context == most else "as many as this server reads"
        received = f"{tokens} and {request.generate} to generate" if request.generate else str(tokens)
        expected = f"at most {most} tokens, {why}"
        longer = "" if context == most else ", or `regard serve --tokens` with a larger number"
        raise bad_value("text", expected=expected, received=received, remedy=f"a shorter text{longer}")


def _count_tokens(model: Any, tokenizer: Any, text: str) -> int:
    if tokenizer is None:
        return model.encode(text).shape[1]
    with tokenizing(text):
        encoding: Any = tokenizer(text) if callable(tokenizer) else tokenizer.encode(text)
    return len(encoding["input_ids"] if callable(tokenizer) else encoding.ids)  # of transformers, or of tokenizers


def _title(text: str, generated: str | None) -> str:
    """The beginning of the text, and of what was generated."""
    if not (generated and generated.strip()):
        return _shortened(text, 76)
    return f"{_shortened(text, 36)} → {_shortened(generated, 36)}"


def _shortened(text: str, most: int) -> str:
    words = " ".join(text.split())
    return words if len(words) <= most else words[: most - 1].rstrip() + "…"


def tensor_bytes(root: Any) -> int:
    """The bytes of all tensors that a record, or any object of this package, holds."""
    visited: set[int] = set()
    storages: dict[int, int] = {}
    stack = [root]
    while stack:
        value = stack.pop()
        if id(value) in visited:
            continue
        visited.add(id(value))
        if isinstance(value, Tensor):
            storages[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        elif isinstance(value, Mapping):
            stack += value.values()
        elif isinstance(value, (list, tuple)):
            stack += value
        elif type(value).__module__.startswith("regard.") and hasattr(value, "__dict__"):
            stack += vars(value).values()
    return sum(storages.values())
