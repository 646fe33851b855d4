"""One browser for all tests of a worker, pages that are made once, and tabs that must stay quiet."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from browser.pages import TEXT, Look, Written, stack, write

import regard
from regard.models import EMBEDDED

# no GPU, no sandbox (which needs rights that containers lack), and nothing that a browser asks of its maker
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: no browser to look with")
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    with api.sync_playwright() as playwright:
        try:
            made = playwright.chromium.launch(executable_path=found, args=FLAGS)
        except api.Error as error:
            pytest.skip(f"no browser can be started: {str(error).splitlines()[0]}")
        yield made
        made.close()


@pytest.fixture(scope="session")
def idle(browser: Any) -> list[Any]:
    """Tabs that nobody looks at. A new one takes longer than most tests."""
    context = browser.new_context()
    context.set_default_timeout(20_000)
    return [context.new_page()]


@pytest.fixture
def look(browser: Any, idle: list[Any]) -> Iterator[Callable[..., Look]]:
    """Open a page in a tab; when the test ends, it has to have been quiet. `device` is what only a new one can be."""
    looks: list[Look] = []
    tabs: list[Any] = []
    devices: list[Any] = []

    def opened(page: Written | Path, hash_: str = "", device: dict[str, Any] | None = None, **options: Any) -> Look:
        if device:
            devices.append(browser.new_context(**device))
            tab = devices[-1].new_page()
        else:
            tab = idle.pop() if idle else tabs[-1].context.new_page()
            tabs.append(tab)
        path = page.path if isinstance(page, Written) else page
        looks.append(Look(tab, path.as_uri(), hash_, **options))
        return looks[-1]

    yield opened
    try:
        for one in looks:
            one.leave()
    finally:
        idle.extend(tabs[:1])  # (one that is behind another is not drawn)
        for tab in tabs[1:]:
            tab.close()
        for device in devices:
            device.close()


@pytest.fixture(scope="session")
def folder(tmp_path_factory: Any) -> Path:
    return tmp_path_factory.mktemp("pages")


@pytest.fixture(scope="session")
def minilm() -> Any:
    if EMBEDDED["minilm"].installed() is None:
        pytest.skip("the weights of minilm are not installed")
    return regard.models.load("minilm", check=False)


@pytest.fixture(scope="session")
def real(minilm: Any, folder: Path) -> Written:
    """An encoder with real weights, one text: 6 layers, 12 heads, 17 tokens."""
    with regard.watch(minilm, keep="qkv") as seen, torch.no_grad():
        minilm(minilm.encode(TEXT))
    return write(folder / "real.html", seen, minilm.tokenize(TEXT))


@pytest.fixture(scope="session")
def ablated(minilm: Any, real: Written, folder: Path) -> Written:
    """The same text twice: as it is, and without a head."""
    first = real.seen.layers[0]
    with regard.ablate(minilm, {first: [2]}), regard.watch(minilm, keep="qkv") as seen, torch.no_grad():
        minilm(minilm.encode(TEXT))
    return write(folder / "ablated.html", {"intact": real.seen, "without 0.2": seen}, real.tokens)


@pytest.fixture(scope="session")
def long(folder: Path) -> Written:
    """A text too long for its page: 701 tokens (a prime, so that no cell is as large as the next), pooled."""
    seen = stack(2, 3, 701, 12)
    return write(folder / "long.html", seen, [f"t{i}" for i in range(701)], limit=500_000)
