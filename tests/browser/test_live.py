"""The page as `regard serve` serves it: a text is typed and looked at; an error of the server is shown."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("starlette", reason="starlette, which serves, is not installed")
pytest.importorskip("uvicorn", reason="uvicorn, which serves, is not installed")

from regard.serve import Limits, application, server


@pytest.fixture
def address(minilm: Any) -> Iterator[str]:
    """The address of a server with a real model, which reads at most 20 tokens."""
    with server.listen("127.0.0.1", 0) as listening:
        port = listening.getsockname()[1]
        running = server.make_server(application({"minilm": minilm}, port=port, limits=Limits(tokens=20)))
        thread = threading.Thread(target=running.run, kwargs={"sockets": [listening]})
        thread.start()
        yield server.url("127.0.0.1", port)
        running.should_exit = True
        thread.join(20)


@pytest.mark.slow
def test_a_text_is_looked_at_and_an_error_is_shown(browser: Any, address: str) -> None:
    tab = browser.new_page()
    try:
        tab.goto(f"{address}#view=model")
        tab.fill("form.live textarea", "A dog sat down")
        tab.click("#live-go")
        tab.wait_for_selector("h1:has-text('A dog sat down')")
        tab.click("#tab-model")
        tab.wait_for_selector(".layer a.head .thumb")
        assert tab.locator(".layer a.head").count() == 72
        tab.click("#tab-words")
        tab.wait_for_selector("#word-2:has-text('dog')")
        tab.fill("form.live textarea", "Two cats ran up")
        tab.click("#live-go")
        tab.wait_for_selector("#word-2:has-text('cats')")  # and its strips are of the new text, as long as the other
        assert tab.evaluate("[...regard.view.pictures.values()].every(picture => picture.layer.run === regard.run)")
        tab.fill("form.live textarea", "a cat " * 20)
        tab.click("#live-go")
        tab.wait_for_selector("#live-error:has-text('remedy')")
        message = tab.locator("#live-error").text_content()
        assert message.startswith("text: expected at most 20 tokens, as many as this server reads, received 42")
        assert "`regard serve --tokens`" in message
        assert tab.locator("#live-error").get_attribute("role") == "alert"
    finally:
        tab.close()
