"""Whatever a token is, it is shown as text and nothing else happens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest
from browser.pages import VIEWS, Look, Written, plain, stack, write

pytestmark = pytest.mark.slow

HOSTILE = [
    "</script><img src=x onerror=alert(1)>",
    "<!--",
    "-->",
    "<script>alert(2)</script>",
    "]]>",
    "<svg onload=alert(3)>",
    "javascript:alert(4)",
    "${alert(5)}",
    "&lt;b&gt;",
    "\"'`",
    "=1+1",
    "שלום עולם",
    "مرحبا",
    "注意機構",
    "👩‍👩‍👧‍👦🏳️‍🌈",
    "x" * 10_000,
    "漢" * 5_000,
    "a\nb",
    "\r",
    "\0",
    "\x1b[31m",
    "\ud800",
    "\udc00x",
    "\u202eabc",
    "\u2028",
    "\ufffe",
    "",
    " ",
    "__proto__",
    "constructor",
    "e\u0301\u0301\u0301\u0301",
]


@pytest.fixture(scope="session")
def hostile(folder: Path) -> Written:
    seen = stack(2, 3, len(HOSTILE))
    both = {"</script><b>": seen, "\ud800\0\x01": seen}
    return write(folder / "hostile.html", both, HOSTILE, title="</title><script>alert(6)</script>\0\u202e" + "y" * 3000)


@pytest.mark.parametrize("width", [1280, 390])
def test_in_every_view(look: Callable[..., Look], hostile: Written, width: int) -> None:
    """No dialog, no request, no word on the console (`look` sees to these), no element that a token made."""
    tab = look(hostile, width=width, height=900)
    for view in VIEWS:
        tab.click(f"#tab-{view}")
        assert tab.text(".status") == ""
        assert tab.ask("document.querySelectorAll('img, b b, main script, main style, iframe, object').length") == 0
        assert tab.overflow() <= 0, view
        assert (
            tab.ask("document.querySelectorAll('body > script').length") == 6
        )  # the description, 4 layers, the program


def test_tokens_are_text(look: Callable[..., Look], hostile: Written) -> None:
    tab = look(hostile, "#view=head&layer=0&head=0")
    shown = tab.texts(".queries button")
    assert shown[3] == "<script>alert(2)</scrip…"[:23] + "…"
    assert shown[8:15] == ["&lt;b&gt;", "\"'`", "=1+1", "שלום עולם", "مرحبا", "注意機構", "👩‍👩‍👧‍👦🏳️‍🌈"]
    assert shown[15] == "x" * 23 + "…"
    assert len(shown) == len(HOSTILE)
    assert all(text.strip() for text in shown)  # none is invisible
    assert tab.ask("document.title").startswith("</title><script>alert(6)</script>")
    assert tab.texts("#run option")[0] == "</script><b>"
    tab.over(0.5, 0.5, (0, len(HOSTILE), 0, len(HOSTILE)))
    assert tab.text("#readout").startswith("</script><img src=x one… → </script>")
    directions = tab.ask("[...document.querySelectorAll('.queries button')].map(b => getComputedStyle(b).direction)")
    assert directions[11:14] == ["rtl", "rtl", "ltr"]
    inside = tab.ask("""() => {
        const svg = document.querySelector('.labels').getBoundingClientRect();
        return [...document.querySelectorAll('.labels text')].every(t => { const b = t.getBoundingClientRect(); return b.left >= svg.left - 1 && b.top >= svg.top - 1; });
    }""")
    assert inside  # no label is cut at the edge


@pytest.mark.parametrize("view", VIEWS)
def test_pictures_of_them(look: Callable[..., Look], hostile: Written, tmp_path: Path, view: str) -> None:
    tab = look(hostile, f"#view={view}&layer=0&head=0")
    for button, name in (("#save-svg", "a.svg"), ("#save-png", "a.png")):
        with tab.page.expect_download() as waiting:
            tab.page.click(button)
        waiting.value.save_as(tmp_path / name)
    assert tab.text(".status") == ""
    root = ElementTree.parse(tmp_path / "a.svg").getroot()
    words = [plain("".join(node.itertext())) for node in root.iter("{http://www.w3.org/2000/svg}text")]
    if view in ("head", "compare"):
        assert any(word.endswith("مرحبا") for word in words)  # (with its number, where labels are many)
    assert not list(root.iter("{http://www.w3.org/2000/svg}script"))
