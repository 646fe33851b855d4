"""One self-contained HTML file that shows every head: no request to anywhere, at any length (docs/page.md)."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Callable, Mapping
from functools import cache
from importlib.resources import files
from os import PathLike
from pathlib import Path
from string import Template
from typing import Any

from regard.draw.page.pack import Packed, packed
from regard.draw.progress import part_of
from regard.draw.scene import Scene
from regard.errors import bad_type, bad_value
from regard.heads import Record

__all__ = ["document", "notebook", "page", "policy", "scenes"]

STYLES = ("base", "views", "story", "words", "flow", "compare", "narrow")  # in this order: a later rule wins
# In this order: a file may use what stands in those before it.
SCRIPTS = (
    "dom",
    "data",
    "colour",
    "state",
    "picture",
    "map",
    "links",
    "glossary",
    "effects",
    "over_image",
    "view_story",
    "view_model",
    "view_head",
    "word_choice",
    "word_strips",
    "view_words",
    "flow_parts",
    "flow_scores",
    "flow_steps",
    "flow_sum",
    "view_flow",
    "view_table",
    "compare",
    "view_compare",
    "tour",
    "save",
    "live",
    "main",
)
LIMIT = 15_000_000  # bytes
NOTEBOOK_LIMIT = 4_000_000  # bytes: notebooks are saved with what they show
HEIGHT = 780  # pixels, in notebooks
ROLES = 0.5  # of the time for a page is spent on what heads do, about


def page(
    seen: Record | Mapping[str, Record],
    tokens: Any = None,
    path: str | PathLike[str] | None = None,
    *,
    title: str | None = None,
    item: int = 0,
    limit: int = LIMIT,
    progress: Callable[[float], None] | None = None,
) -> str | Path:
    """Draw a record as one HTML file that opens anywhere, without a network: all heads, one head, one word, the
    flow of one token, a table, comparisons.

    Args:
        seen: the record that `watch` gave, best with keep="qkv": q and k give maps, v gives the flow. Several records
            by name can be compared: two texts, or one text with and without some heads.
        tokens: the text's tokens, as for `Scene`; for several records the same for all, or a mapping by name.
        path: the file to write; without one nothing is written.
        title: the heading of the page.
        item: which text of the batch.
        limit: bytes of the page, at most. It is as exact as fits: all weights in 16 bits, in 8 bits, or pooled maps
            with exact crops and the strongest links.
        progress: a function that is called with numbers from 0 to 1; it may raise, to stop.

    Returns the path of the file that was written; without a `path`, the HTML.

    >>> import torch, regard
    >>> layer = regard.MultiHeadAttention(16, num_heads=2)
    >>> with regard.watch(layer, keep="qkv") as seen, torch.no_grad():
    ...     _ = layer(torch.randn(1, 3, 16))
    >>> page(seen, ["one", "two", "three"])[:15]
    '<!doctype html>'

    `page(seen, path="heads.html")` writes that file and gives `Path("heads.html")`.
    """
    content = _html(seen, tokens, title, item, limit, progress)
    if path is None:
        return content
    Path(path).write_text(content, encoding="utf-8")
    return Path(path)


def _html(
    seen: Record | Mapping[str, Record],
    tokens: Any = None,
    title: str | None = None,
    item: int = 0,
    limit: int = LIMIT,
    progress: Callable[[float], None] | None = None,
) -> str:
    if not isinstance(limit, int) or limit < 350_000:
        raise bad_value("limit", expected="at least 350000 bytes", received=repr(limit))
    drawn = scenes(seen, tokens, item, part_of(progress, 0.0, ROLES))
    if title is None:
        title = _title(next(iter(drawn.values())))
    room = limit - len(_style()) - len(_script())
    return document(packed(drawn, title=title, limit=room, progress=part_of(progress, ROLES, 1.0)))


def _title(scene: Scene) -> str:
    """The beginning of the text without special tokens; without tokens, the size of the model."""
    labels = scene[-1].queries
    if labels.text == [str(i) for i in range(len(labels))]:
        return f"{len(scene)} layers, {len(labels)} tokens"
    specials = {word for word, special in zip(labels.word, labels.special, strict=True) if special}
    words = [word for number, word in enumerate(labels.words) if number not in specials]
    grid = scene.record.image and scene.record.image.grids.get(scene[-1].name)
    if grid:  # its patches as one word
        patches, first = set(grid.labels()[grid.first :]), "r0c0"
        words = ["(image)" if word == first else word for word in words if word == first or word not in patches]
    return " ".join(words[:12]) + (" …" if len(words) > 12 else "")


def scenes(
    seen: Record | Mapping[str, Record],
    tokens: Any = None,
    item: int = 0,
    progress: Callable[[float], None] | None = None,
) -> dict[str, Scene]:
    """Records by name, with their tokens."""
    if isinstance(seen, Record):
        return {"text": Scene(seen, tokens, item=item, progress=progress)}
    if not isinstance(seen, Mapping) or not seen or not all(isinstance(record, Record) for record in seen.values()):
        raise bad_type(
            "seen",
            expected="a record, or a mapping of names to records",
            received=type(seen).__name__,
            remedy="what `regard.watch` gives",
        )
    by_name = isinstance(tokens, Mapping)
    if by_name and set(tokens) != set(seen):
        expected, received = (", ".join(map(str, names)) for names in (seen, tokens))
        raise bad_value("tokens", expected=f"those of {expected}", received=received)
    drawn = {}
    for number, (name, record) in enumerate(seen.items()):
        words = tokens[name] if by_name else tokens
        share = part_of(progress, number / len(seen), (number + 1) / len(seen))
        drawn[str(name)] = Scene(record, words, item=item, progress=share)
    return drawn


def document(content: Packed, *, live: Mapping[str, Any] | None = None) -> str:
    """The HTML of some content. `live`: settings of a served page, which may send requests to its own server alone."""
    meta = dict(content.meta) | ({"live": dict(live)} if live else {})
    blobs = [
        f'<script type="application/octet-stream" id="blob-{name}">{base64.b64encode(data).decode()}</script>'
        for name, data in content.blobs.items()
    ]
    return Template(_read("index.html")).substitute(
        policy=policy(live is not None),
        title=_without_surrogates(html.escape(content.meta["title"] or "regard")),
        style=_style(),
        meta=as_json(meta),
        blobs="\n".join(blobs),
        script=_script(),
    )


def policy(live: bool = False) -> str:
    """The Content-Security-Policy: only its own script and style, by hash; no requests, except to its own server if it
    is live."""
    directives = [
        "default-src 'none'",
        f"script-src '{_hash(_script())}'",
        f"style-src '{_hash(_style())}'",
        "img-src data: blob:",  # (a view is saved as PNG by way of an image)
        *(["connect-src 'self'"] if live else []),
        "base-uri 'none'",
        "form-action 'none'",
    ]
    return "; ".join(directives)


def as_json(value: Any) -> str:
    """JSON that can stand inside a script element: no character of it can end the element."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return _without_surrogates(text)


def _without_surrogates(text: str) -> str:
    """Text that can be encoded: lone surrogates are replaced."""
    return text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")


def notebook(record: Record) -> str:
    """What a notebook shows of a record: the page in a sandboxed frame."""
    content = html.escape(_html(record, limit=NOTEBOOK_LIMIT), quote=True)
    return (
        f'<iframe srcdoc="{content}" width="100%" height="{HEIGHT}" style="border:0;max-width:100%" title="regard" '
        'sandbox="allow-scripts allow-downloads allow-modals"></iframe>'
    )


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _read(name: str) -> str:
    return (files(__package__ or "regard.draw.page") / name).read_text(encoding="utf-8")


def _source(name: str) -> str:
    """A script or style without indentation and comment lines. (No string or template literal spans lines; tested.)"""
    lines = (line.strip() for line in _read(name).splitlines())
    return "\n".join(line for line in lines if line and not line.startswith("//"))


@cache
def _style() -> str:
    return "\n".join(_source(f"{name}.css") for name in STYLES)


@cache
def _script() -> str:
    """All scripts in one scope of their own."""
    return "\n".join(['(() => {\n"use strict";', *(_source(f"app/{name}.js") for name in SCRIPTS), "})();\n"])
