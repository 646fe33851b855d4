"""Shared by the tests in a browser: models and their pages, and a browser tab that notes what a page must not do."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import torch
from torch import Tensor, nn

import regard
from regard.draw.page import page
from regard.heads import Record

VIEWS = ("story", "model", "head", "words", "flow", "table", "compare")
TEXT = "The cat that I saw yesterday ran away, unbelievably quickly"


@dataclass
class Written:
    """A page in a file, and what it was made of."""

    path: Path
    seen: Record
    tokens: Any
    runs: dict[str, Record] = field(default_factory=dict)

    def weights(self, layer: int, head: int, run: str | None = None) -> Tensor:
        """What the page should show, exactly: (N, M)"""
        record = self.seen if run is None else self.runs[run]
        return record[layer].weights(head, batch=0).double()


def write(path: Path, seen: Record | Mapping[str, Record], tokens: Any = None, **options: Any) -> Written:
    page(seen, tokens, path, **options)
    if isinstance(seen, Record):
        return Written(path, seen, tokens)
    return Written(path, next(iter(seen.values())), tokens, dict(seen))


class Stack(nn.Module):
    """Layers of attention alone, with weights large enough for heads to differ."""

    def __init__(self, layers: int, heads: int, width: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(layers + heads)
        width = width or 4 * heads
        self.layers = nn.ModuleList(regard.MultiHeadAttention(width, num_heads=heads) for _ in range(layers))
        self.width = width
        for parameter in self.parameters():
            parameter.data *= 1.5

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def stack(layers: int, heads: int, tokens: int, width: int | None = None, keep: Any = "qkv") -> Record:
    """What is seen of random layers in a random text."""
    model = Stack(layers, heads, width)
    torch.manual_seed(tokens)
    with torch.no_grad(), regard.watch(model, keep=keep) as seen:
        model(torch.randn(1, tokens, model.width))
    return seen


class Look:
    """A tab that shows a page. `leave` fails if it asked for anything, said anything or opened a dialog."""

    def __init__(
        self, tab: Any, url: str, hash_: str = "", width: int = 1280, height: int = 1200, scheme: str = "light"
    ) -> None:
        self.page, self.url = tab, url
        self.troubles: list[str] = []
        self.ears = {
            "console": lambda message: self.troubles.append(f"console {message.type}: {message.text}"),
            "pageerror": lambda error: self.troubles.append(f"error: {error}"),
            "popup": lambda other: self.troubles.append(f"opened {other.url}"),
            "dialog": self._dialog,
            "request": self._request,
        }
        for name, ear in self.ears.items():
            tab.on(name, ear)
        tab.set_viewport_size({"width": width, "height": height})
        tab.emulate_media(color_scheme=scheme)
        tab.bring_to_front()
        tab.goto(url + hash_)
        self.rest()
        self.ask(
            "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
        )  # (before, clicks get lost)

    def _dialog(self, dialog: Any) -> None:
        self.troubles.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def _request(self, request: Any) -> None:
        if request.url.split("#")[0] != self.url and not request.url.startswith(("data:", "blob:")):
            self.troubles.append(f"request: {request.url}")

    def leave(self) -> None:
        self.page.mouse.move(0, 0)
        for name, ear in self.ears.items():
            self.page.remove_listener(name, ear)
        self.page.goto("about:blank")
        assert not self.troubles, self.troubles

    def rest(self) -> None:
        """Until the view that was asked for is drawn."""
        self.page.wait_for_selector("main[aria-busy=false]", state="attached")

    def do(self, act: Callable[[], Any]) -> None:
        """Something that changes the view."""
        act()
        self.rest()

    def click(self, selector: str) -> None:
        self.do(lambda: self.page.click(selector))

    def press(self, *keys: str) -> None:
        for key in keys:
            self.do(lambda key=key: self.page.keyboard.press(key))

    def ask(self, script: str, argument: Any = None) -> Any:
        return self.page.evaluate(script, argument)

    def until(self, script: str) -> None:
        """Until something is so. (`wait_for_function` evaluates a string within the page, which the page forbids.)"""
        for _ in range(200):
            if self.ask(script):
                return
            self.page.wait_for_timeout(25)
        raise AssertionError(f"never: {script}")

    def text(self, selector: str) -> str:
        return plain(self.page.inner_text(selector))

    def texts(self, selector: str) -> list[str]:
        return [plain(text) for text in self.page.locator(selector).all_inner_texts()]

    @property
    def hash(self) -> dict[str, str]:
        """What the address says, once it is written."""
        self.until("regard.state.timer === undefined")
        address = self.ask("location.hash").removeprefix("#")
        return {name: value[0] for name, value in parse_qs(address, keep_blank_values=True).items()}

    @property
    def readout(self) -> dict[str, str]:
        """What is said of the cell under the pointer."""
        return self.ask("({...document.getElementById('readout').dataset})")

    def over(self, i: float, j: float, window: Sequence[float], selector: str = "#map") -> None:
        """Point at a place of a map, in its units."""
        box = self.page.locator(selector).bounding_box()
        r0, r1, c0, c1 = window
        self.page.mouse.move(
            box["x"] + (j - c0) / (c1 - c0) * box["width"], box["y"] + (i - r0) / (r1 - r0) * box["height"]
        )

    def overflow(self) -> int:
        """By how many pixels the page is wider than the screen."""
        return self.ask("document.documentElement.scrollWidth - document.documentElement.clientWidth")


def plain(text: str) -> str:
    """Without the marks that keep the direction of a token to itself."""
    return text.replace("\u2068", "").replace("\u2069", "")


def some_cells(rows: range, cols: range, count: int, seed: int = 0) -> list[tuple[int, int]]:
    choose = random.Random(seed)
    return [(choose.choice(rows), choose.choice(cols)) for _ in range(count)]


def pooled(weights: Tensor, rows: int, cols: int) -> Tensor:
    """The cells of a pooled map: what a query of a cell's rows gives to all keys of its columns, on average."""
    n, m = weights.shape
    to_row, to_col = torch.arange(n) * rows // n, torch.arange(m) * cols // m
    sums = torch.zeros(rows, cols, dtype=weights.dtype)
    sums.index_put_((to_row[:, None].expand(n, m), to_col[None].expand(n, m)), weights, accumulate=True)
    return sums / torch.bincount(to_row, minlength=rows)[:, None]
