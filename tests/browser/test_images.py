"""The picture beside a head's map: the weights of a query over it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser.pages import Look, Written

import regard

# the colour in the middle of each patch, as red - green: the picture is grey, weights are red
REDNESS = """([rows, cols]) => {
  const canvas = document.getElementById("over-image");
  const { width, height } = canvas;
  const copy = Object.assign(document.createElement("canvas"), { width, height });
  copy.getContext("2d").drawImage(canvas, 0, 0);
  const { data } = copy.getContext("2d").getImageData(0, 0, width, height);
  const at = (i, count, size) => Math.floor(((i + 0.5) / count) * size);
  const out = [];
  for (let r = 0; r < rows; r++)
    for (let c = 0; c < cols; c++) {
      const i = 4 * (at(r, rows, height) * width + at(c, cols, width));
      out.push(data[i] - data[i + 1]);
    }
  return out;
}"""


def written(folder: Path, name: str) -> Written:
    from draw import tiny_vision

    image = np.full((28, 42, 3), 200, np.uint8)
    if name == "dino":
        model, processor, text = tiny_vision.dinov2(), tiny_vision.image_processor(), None
    else:
        model, processor, text = tiny_vision.qwen2_vl(), tiny_vision.QwenProcessor(), "what is <image> this ?"
    path = folder / f"{name}.html"
    seen = regard.look(model, processor, text, image=image, html=path, show=False)
    return Written(path, seen, seen.tokens)


@pytest.fixture(scope="module")
def dino(folder: Path) -> Written:
    return written(folder, "dino")


@pytest.fixture(scope="module")
def qwen(folder: Path) -> Written:
    return written(folder, "qwen")


def drawn(tab: Look) -> dict[str, Any]:
    return tab.ask("({...document.getElementById('over-image').dataset})")


def check(tab: Look, page: Written, layer: int, head: int, query: int) -> None:
    """The squares have the order of the weights, and the words their sum."""
    grid = page.seen.image.grids[page.seen.layers[layer]]
    weights = page.weights(layer, head)[query][grid.positions()].flatten()
    found = drawn(tab)
    assert int(found["query"]) == query
    assert float(found["sum"]) == pytest.approx(float(weights.sum()), abs=1e-3)
    assert float(found["most"]) == pytest.approx(float(weights.max()), abs=1e-3)
    red = tab.ask(REDNESS, [grid.rows, grid.cols])
    shares = (weights / weights.max()).sqrt()
    for place, share in enumerate(shares.tolist()):
        grey, full = 0.0, 153.0  # red - green of the colour that weights are drawn in
        assert red[place] == pytest.approx(grey + 0.92 * share * (full - grey), abs=4)


def test_the_class_token_first_then_the_row_under_the_pointer(look: Callable[..., Look], dino: Written) -> None:
    tab = look(dino, "#view=head&layer=1&head=2&specials=1")
    check(tab, dino, 1, 2, 0)
    for query in (2, 7, 17):
        tab.over(query + 0.5, 4.5, (0, 18, 0, 18))
        check(tab, dino, 1, 2, query)
        assert dino.tokens[query] in tab.text("#over-words")
    tab.page.mouse.move(0, 0)
    check(tab, dino, 1, 2, 0)


def test_the_chosen_query_stays(look: Callable[..., Look], dino: Written) -> None:
    tab = look(dino, "#view=head&layer=0&head=1&specials=1&q=9&k=3")
    check(tab, dino, 0, 1, 9)
    tab.click("#next")
    check(tab, dino, 0, 2, 9)


@pytest.mark.parametrize("layer, query", [(0, 5), (3, 8)])
def test_patches_in_squares_and_patches_in_a_text(look: Callable[..., Look], qwen: Written, layer, query) -> None:
    tab = look(qwen, f"#view=head&layer={layer}&head=1&q={query}&k=2")
    check(tab, qwen, layer, 1, query)


def test_a_text_has_no_picture(look: Callable[..., Look], real: Written) -> None:
    tab = look(real, "#view=head")
    assert tab.page.locator("#over-image").count() == 0
