"""In a notebook: a frame of its own that works inside and leaves what is outside alone."""

from __future__ import annotations

import html
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from browser.pages import VIEWS, Look, Written, some_cells

from regard.draw.page import notebook

pytestmark = pytest.mark.slow

GLOBALS = "Object.getOwnPropertyNames(window).sort()"


@pytest.fixture(scope="module")
def bare(real: Written, folder: Path) -> dict[str, Path]:
    """A page with the frame in it, and the same without; and one whose frame is not sandboxed."""
    real.seen.tokens = real.tokens
    shown = notebook(real.seen)
    real.seen.tokens = None
    before = "<!doctype html><meta charset=utf-8><title>A notebook</title><body><p id=outside>before</p>"
    made = {
        "sandboxed": shown,
        "open": shown.replace(' sandbox="allow-scripts allow-downloads allow-modals"', ""),
        "none": "",
    }
    paths = {}
    for name, frame in made.items():
        paths[name] = folder / f"notebook-{name}.html"
        paths[name].write_text(f"{before}{frame}<p>after</p><main aria-busy=false></main>", encoding="utf-8")
    return paths


def inside(tab: Look) -> Any:
    (frame,) = [frame for frame in tab.page.frames if frame != tab.page.main_frame]
    frame.wait_for_selector("main[aria-busy=false]", state="attached")
    return frame


@pytest.mark.parametrize("kind", ["sandboxed", "open"])
def test_it_works_inside(look: Callable[..., Look], bare: dict[str, Path], real: Written, kind: str) -> None:
    tab = look(bare[kind])
    frame = inside(tab)
    url = tab.page.url
    steps = tab.ask("history.length")
    for view in VIEWS:
        frame.click(f"#tab-{view}")
        frame.wait_for_selector(f"section.{view}")
    frame.click("#tab-model")
    frame.click('a.head[data-layer="1"][data-head="8"]')
    frame.wait_for_selector("#map")
    weights = real.weights(1, 8)
    tab.ask("document.querySelector('iframe').scrollIntoView()")
    for i, j in some_cells(range(17), range(17), 8):
        box = frame.locator("#map").bounding_box()
        tab.page.mouse.move(box["x"] + (j + 0.5) / 17 * box["width"], box["y"] + (i + 0.5) / 17 * box["height"])
        said = frame.evaluate("({...document.getElementById('readout').dataset})")
        assert abs(float(said["value"]) - float(weights[i, j])) <= float(said["step"]) < 1e-3
    frame.click("#next")
    frame.wait_for_timeout(250)
    assert frame.input_value("#pick-head") == "9"
    frame.click("#help")
    frame.click("#keys button")
    assert not frame.locator("#keys").is_visible()
    frame.press("body", "Tab")
    frame.focus("#skip")
    frame.press("#skip", "Enter")
    assert frame.locator("section.head").is_visible()
    with tab.page.expect_download() as waiting:
        frame.click("#save-png")
    assert waiting.value.suggested_filename == "regard-head-1.9.png"
    assert tab.page.url == url  # the notebook's own address and history are untouched
    assert tab.ask("history.length") == steps
    assert tab.ask("document.title") == "A notebook"


def test_it_works_in_an_editor_that_frames_it_again(look: Callable[..., Look], bare: dict[str, Path]) -> None:
    """As editors do: outputs are in a sandboxed frame whose policy, which holds in ours, too, allows little."""
    policy = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; child-src data:"
    outputs = bare["sandboxed"].read_text(encoding="utf-8").replace("<main aria-busy=false></main>", "")
    outputs = outputs.replace("<body>", f'<meta http-equiv="Content-Security-Policy" content="{policy}"><body>')
    path = bare["sandboxed"].with_name("notebook-editor.html")
    frame = f'<iframe sandbox="allow-scripts" width=900 height=900 srcdoc="{html.escape(outputs)}"></iframe>'
    path.write_text(f"<!doctype html><meta charset=utf-8>{frame}<main aria-busy=false></main>", encoding="utf-8")
    tab = look(path)
    ours = tab.page.main_frame.child_frames[0].child_frames[0]
    for view in VIEWS:
        ours.click(f"#tab-{view}")
        ours.wait_for_selector(f"section.{view}")


def test_the_outside_is_untouched(look: Callable[..., Look], bare: dict[str, Path]) -> None:
    with_frame, without = look(bare["sandboxed"]), look(bare["none"])
    inside(with_frame).click("#tab-head")
    assert with_frame.ask(GLOBALS) == [*without.ask(GLOBALS), "0"] or set(with_frame.ask(GLOBALS)) - set(
        without.ask(GLOBALS)
    ) <= {"0"}  # (frames are numbered properties of their window)
    styles = "(p => [getComputedStyle(p).font, getComputedStyle(p).color, getComputedStyle(document.body).margin])(document.getElementById('outside'))"
    assert with_frame.ask(styles) == without.ask(styles)
    assert with_frame.ask("document.querySelectorAll('style, script').length") == 0
    frame = inside(with_frame)
    with pytest.raises(Exception, match=r"cross-origin|SecurityError"):
        frame.evaluate("window.parent.document.title")


def test_the_frame_is_escaped(real: Written) -> None:
    shown = notebook(real.seen)
    assert shown.startswith('<iframe srcdoc="')
    assert shown.count("<") == 2  # the frame's own tags
    assert "<!doctype html>" in html.unescape(shown)


def test_a_record_shows_itself(real: Written) -> None:
    assert real.seen._repr_html_() == notebook(real.seen)
