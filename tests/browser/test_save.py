"""Every view as SVG and as PNG, and its numbers as they stand on the screen."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from browser.pages import VIEWS, Look, Written, plain

pytestmark = pytest.mark.slow

NAMES = {"head": "-2.5", "compare": "-2.5"}
HASH = "#view={}&layer=2&head=5"


def saved(tab: Look, button: str, folder: Path) -> Path:
    with tab.page.expect_download() as waiting:
        tab.page.click(button)
    path = folder / waiting.value.suggested_filename
    waiting.value.save_as(path)
    return path


@pytest.fixture(scope="module")
def blank(browser: Any) -> Any:
    """A tab to look at pictures in."""
    return browser.new_page()


def colours(page: Any, path: Path) -> tuple[int, int, int]:
    """Width, height and how many colours a picture has, as a browser decodes it."""
    kind = "image/svg+xml" if path.suffix == ".svg" else "image/png"
    data = f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"
    found = page.evaluate(
        """async (src) => {
            const image = new Image();
            image.src = src;
            await image.decode();
            const canvas = document.createElement('canvas');
            [canvas.width, canvas.height] = [image.naturalWidth, image.naturalHeight];
            canvas.getContext('2d').drawImage(image, 0, 0);
            const data = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
            return [canvas.width, canvas.height, new Set(new Uint32Array(data.buffer)).size];
        }""",
        data,
    )
    return tuple(found)


@pytest.mark.parametrize("view", VIEWS)
def test_svg_and_png(look: Callable[..., Look], real: Written, blank: Any, tmp_path: Path, view: str) -> None:
    tab = look(real, HASH.format(view))
    vector = saved(tab, "#save-svg", tmp_path)
    assert vector.name == f"regard-{view}{NAMES.get(view, '')}.svg"
    root = ElementTree.parse(vector).getroot()
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    words = [plain("".join(node.itertext())).strip() for node in root.iter("{http://www.w3.org/2000/svg}text")]
    wanted = {
        "model": ["0.0", "5.11", "previous", "blocks.3.attention"],
        "head": [
            *real.tokens,
            real.seen.roles(tokens=real.tokens)[2, 5].role or "no role",
            "Measures",
            "entropy",
            "Strongest links",
        ],
        "words": ["[CLS]", "yesterday", "unbelievably", "5", "previous", "Strongest heads: what yesterday looks at"],
        "flow": ["away", "Concatenation", "cosine with the sum", "12 heads: softmax(q kᵀ · scale) v"],
        "table": ["entropy", "rests", "previous", "nouns"],
        "compare": [*real.tokens, "A", "B", "A − B", "Largest differences"],
    }.get(view, [])
    assert [word for word in wanted if word not in words] == []
    assert not re.search(
        r"var\(|currentColor", "".join(str(node.attrib) for node in root.iter() if "fill" not in node.attrib)
    )
    assert "http" not in re.sub(
        r"http://www.w3.org/(2000/svg|XML/1998/namespace)", "", vector.read_text(encoding="utf-8")
    )
    width, height, several = colours(blank, vector)
    assert width == 1244 + 2 * 16  # as wide as the view, with a margin
    assert several > 50
    picture = saved(tab, "#save-png", tmp_path)
    assert picture.name == vector.name.replace(".svg", ".png")
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    wide, high, several = colours(blank, picture)
    assert (wide, high) == (2 * width, 2 * height)
    assert several > 50


def test_what_is_out_of_sight_is_saved(look: Callable[..., Look], real: Written, tmp_path: Path) -> None:
    """Small maps are drawn when they come to sight; a picture has them all."""
    tab = look(real, "#view=model", width=600, height=300)
    root = ElementTree.parse(saved(tab, "#save-svg", tmp_path)).getroot()
    images = [node.get("href") for node in root.iter("{http://www.w3.org/2000/svg}image")]
    assert len(images) == 72
    assert len(set(images)) == 72  # (blank ones would be the same)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_picture_looks_like_the_page(
    look: Callable[..., Look], real: Written, blank: Any, tmp_path: Path, theme: str
) -> None:
    """The saved picture beside a screenshot: most pixels agree."""
    tab = look(real, f"#view=head&layer=3&head=1&theme={theme}&q=4&k=3")
    tab.page.mouse.move(5, 5)
    path = saved(tab, "#save-svg", tmp_path)
    tab.page.evaluate("document.activeElement.blur()")
    shot = tab.page.locator("section.head").screenshot()
    share = blank.evaluate(
        """async ([a, b]) => {
            const pixels = async (src, margin) => {
                const image = new Image();
                image.src = src;
                await image.decode();
                const canvas = document.createElement('canvas');
                [canvas.width, canvas.height] = [1244, 1000];
                canvas.getContext('2d').drawImage(image, -margin, -margin);
                return canvas.getContext('2d').getImageData(0, 0, 1244, 1000).data;
            };
            const [x, y] = [await pixels(a, 16), await pixels(b, 0)];
            let same = 0;
            for (let i = 0; i < x.length; i += 4) same += Math.abs(x[i] - y[i]) + Math.abs(x[i + 1] - y[i + 1]) + Math.abs(x[i + 2] - y[i + 2]) < 40;
            return same / (x.length / 4);
        }""",
        [
            f"data:image/svg+xml;base64,{base64.b64encode(path.read_bytes()).decode()}",
            f"data:image/png;base64,{base64.b64encode(shot).decode()}",
        ],
    )
    assert share > 0.95


def test_a_table_that_is_scrolled(look: Callable[..., Look], real: Written, tmp_path: Path) -> None:
    """What sticks to the top is on top, and what is scrolled away is not in the picture."""
    tab = look(real, "#view=table")
    tab.ask("document.querySelector('.scroll').scrollTop = 500")
    root = ElementTree.parse(saved(tab, "#save-svg", tmp_path)).getroot()
    words = ["".join(node.itertext()).strip() for node in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "entropy" in words
    rows = [words[i + 1] for i, word in enumerate(words[:-2]) if words[i + 2] == "self"]  # (layer, head, kind)
    assert rows
    last = max(i for i, word in enumerate(words) if word == "self")
    assert words.index("entropy") > last  # drawn after the rows it covers
    assert len(rows) < 60
