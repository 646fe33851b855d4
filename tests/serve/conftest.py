"""Servers that tests share. (What they need is imported within: a conftest cannot be skipped.)"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from serve.serving import Client, Gate


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    """A client of a server with two tiny models, whose pages are small, so that long texts are pooled."""
    from serve.serving import served, tiny

    with served({"tiny": tiny(), "small": tiny("encoder", context=31)}, page=300_000, characters=4000) as client:
        yield client


@pytest.fixture
def gated() -> Iterator[tuple[Client, Gate]]:
    """A server whose model waits; the first sentence is computed."""
    from serve.serving import Gate, served, tiny

    model = tiny()
    with served({"tiny": model}, waiting=3, results=2) as client:
        while "yesterday" not in client.ask("GET", "/").data.decode().partition("</title>")[0]:
            time.sleep(0.01)
        gate = Gate(model)
        try:
            yield client, gate
        finally:
            gate.open.set()
