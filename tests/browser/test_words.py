"""One word and every head: the strips are the weights, in both directions; words are chosen by hand, by keys and found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from browser.pages import Look, Written, stack, write
from torch import Tensor

import regard
from regard.draw.scene import Scene

pytestmark = pytest.mark.slow

# the words of browser.pages.TEXT as ranges of tokens: the tenth has five pieces
GROUPS = [*((i, i + 1) for i in range(10)), (10, 15), (15, 16), (16, 17)]

# of each head: layer, head, direction, the strongest unit, its weight and the precision of that
STRIPS = """[...document.querySelectorAll('.cell .thin')].map(c => [
    +c.parentElement.dataset.layer, +c.parentElement.dataset.head, c.dataset.way,
    +c.dataset.unit, +c.dataset.value, +c.dataset.step])"""


def in_words(weights: Tensor, groups: list[tuple[int, int]] = GROUPS) -> Tensor:
    """Rows of a word's tokens averaged, columns added up."""
    rows = torch.stack([weights[a:b].mean(0) for a, b in groups])
    return torch.stack([rows[:, a:b].sum(1) for a, b in groups], 1)


def set_aside(page: Written, aside: Tensor, layer: int, head: int) -> Tensor:
    """The weights of a head without its resting place, renormalised."""
    weights = page.weights(layer, head).masked_fill(aside[head][None], 0.0)
    left = weights.sum(1, keepdim=True)
    return torch.where(left > 0, weights / left.clamp(min=1e-30), 0.0)


def over_strip(tab: Look, layer: int, head: int, way: str, unit: int, units: int) -> dict[str, str]:
    """Point at a unit of a strip, and read what is said of it."""
    strip = tab.page.locator(f"[id='cell-{layer}.{head}'] [data-way={way}]")
    strip.scroll_into_view_if_needed()
    box = strip.bounding_box()
    tab.page.mouse.move(box["x"] + (unit + 0.5) / units * box["width"], box["y"] + box["height"] / 2)
    return tab.ask("({...document.getElementById('word-readout').dataset})")


@pytest.mark.parametrize("word", [2, 10])
def test_strongest_links_of_every_head(look: Callable[..., Look], real: Written, word: int) -> None:
    tab = look(real, f"#view=words&word={word}")
    strips = tab.ask(STRIPS)
    assert len(strips) == 2 * 72
    for layer, head, way, unit, value, step in strips:
        weights = in_words(real.weights(layer, head))
        row = weights[word] if way == "to" else weights[:, word]
        assert 0 < step < 1e-3
        assert abs(value - float(row.max())) <= step
        assert value == pytest.approx(float(row[unit]), abs=step)


@pytest.mark.parametrize("layer, head, word", [(0, 2, 10), (1, 8, 3), (3, 0, 10), (5, 11, 1)])
def test_under_the_pointer(look: Callable[..., Look], real: Written, layer: int, head: int, word: int) -> None:
    tab = look(real, f"#view=words&word={word}")
    weights = in_words(real.weights(layer, head))
    for unit in (0, 2, 7, 10, 12):
        for way, exact in (("to", weights[word, unit]), ("from", weights[unit, word])):
            said = over_strip(tab, layer, head, way, unit, 13)
            assert said["unit"] == "{}-{}".format(*GROUPS[unit])
            assert 0 < float(said["step"]) < 1e-3
            assert abs(float(said["value"]) - float(exact)) <= float(said["step"])


def test_set_aside(look: Callable[..., Look], real: Written) -> None:
    tab = look(real, "#view=words&word=10")
    tab.do(lambda: tab.page.check("#aside"))
    scene = Scene(real.seen, real.tokens)
    for layer, head, way, unit, value, step in tab.ask(STRIPS):
        weights = in_words(set_aside(real, scene[layer].aside, layer, head))
        row = weights[10] if way == "to" else weights[:, 10]
        if unit < 0:
            assert float(row.max()) == 0
        else:
            assert abs(value - float(row.max())) <= step < 0.05
    assert tab.hash["aside"] == "1"
    tab.do(lambda: tab.page.uncheck("#specials"))
    assert tab.page.locator(".sentence button").count() == 11


def test_lists_of_heads(look: Callable[..., Look], real: Written) -> None:
    """The strongest links between the word and others, beside each head's resting place."""
    word = 5
    tab = look(real, f"#view=words&word={word}")
    scene = Scene(real.seen, real.tokens)
    for way in ("to", "from"):
        best = []
        for layer in range(6):
            for head in range(12):
                weights = in_words(real.weights(layer, head))
                rests = [bool(scene[layer].aside[head][a:b].all()) for a, b in GROUPS]
                row = weights[word] if way == "to" else weights[:, word]
                kept = [u for u in range(13) if u != word and not (rests[u] if way == "to" else rests[word])]
                unit = max(kept, key=lambda u, row=row: float(row[u]), default=None)
                if unit is not None:
                    best.append((float(row[unit]), f"{layer}.{head}", unit))
        best = sorted(best, reverse=True)[:8]
        rows = [row.split("\t") for row in tab.texts(f"#strongest-{way} tbody tr")]
        assert [row[0] for row in rows] == [place for _, place, _ in best]
        assert [float(row[3]) for row in rows] == pytest.approx([value for value, _, _ in best], abs=6e-4)
        for row, (_, _, unit) in zip(rows, best, strict=True):
            other = real.tokens[GROUPS[unit][0]] if unit != 10 else "unbelievably"
            assert row[2] == (f"saw → {other}" if way == "to" else f"{other} → saw")
    roles = real.seen.roles(tokens=real.tokens)
    first = tab.texts("#strongest-to tbody tr")[0].split("\t")
    layer, head = map(int, first[0].split("."))
    assert first[1].endswith(roles[layer, head].role or "")


def test_choosing_a_word(look: Callable[..., Look], real: Written) -> None:
    """By hand and by keys; the address knows; a token that was chosen elsewhere is the word to begin with."""
    tab = look(real, "#view=words")
    assert tab.page.locator(".sentence [aria-checked=true]").inner_text() == "yesterday"
    tab.click("#word-2")
    assert tab.page.locator(".sentence [aria-checked=true]").inner_text() == "cat"
    assert tab.hash["word"] == "2"
    tab.page.focus("#word-2")
    tab.press("ArrowRight", "ArrowRight", "ArrowLeft")
    assert tab.ask("document.activeElement.id") == "word-3"
    tab.press("End")
    assert (tab.ask("document.activeElement.id"), tab.hash["word"]) == ("word-16", "16")
    tab.press("Home", "ArrowLeft")
    assert tab.ask("document.activeElement.id") == "word-0"
    tab = look(real, "#view=head&layer=1&head=2&q=12")  # a piece of a word
    tab.click("#tab-words")
    assert tab.page.locator(".sentence [aria-checked=true]").inner_text() == "unbelievably"
    tab.do(lambda: tab.page.select_option("#way", "from"))
    assert {way for _, _, way, *_ in tab.ask(STRIPS)} == {"from"}
    assert tab.page.locator("#strongest-to").count() == 0


def test_a_head_in_focus(look: Callable[..., Look], real: Written) -> None:
    tab = look(real, "#view=words&word=5")
    tab.page.hover("[id='cell-1.8']")
    assert tab.text("#peek h3") == "→1.8 next"
    assert tab.page.locator("#peek canvas").count() == 1
    assert tab.ask("(c => [c.width, c.height])(document.querySelector('#peek canvas'))") == [13, 13]
    weights = in_words(real.weights(1, 8))
    shown = [text.rsplit(" ", 1) for text in tab.texts("#peek li")]
    best = float(weights[5].max())
    assert float(shown[0][1]) == pytest.approx(best, abs=6e-4)
    tab.page.mouse.move(5, 5)
    tab.page.focus("[id='cell-1.8']")
    tab.press("ArrowDown", "ArrowLeft", "ArrowLeft")
    assert tab.ask("document.activeElement.id") == "cell-2.6"
    assert tab.text("#peek h3").endswith("2.6 " + (real.seen.roles(tokens=real.tokens)[2, 6].role or "no role"))
    assert tab.page.locator(".cell[tabindex='0']").count() == 1
    name = tab.page.locator("[id='cell-0.2']").get_attribute("aria-label")
    assert name == "layer 0 head 2, previous: saw looks at i 1.00, saw is looked at by yesterday 1.00"
    tab.press("Enter")
    assert tab.page.locator("section.head").is_visible()
    assert (tab.hash["layer"], tab.hash["head"], tab.hash["q"]) == ("2", "6", "5")


def test_taps(look: Callable[..., Look], real: Written) -> None:
    """The first tap shows a head, the second opens it."""
    tab = look(real, "#view=words&word=5", width=390, height=844, device={"has_touch": True, "is_mobile": True})
    assert tab.overflow() <= 0
    tab.page.locator("[id='cell-3.4']").tap()
    assert "3.4" in tab.text("#peek h3")
    assert tab.page.locator("section.words").is_visible()
    tab.do(tab.page.locator("[id='cell-3.4']").tap)
    assert tab.page.locator("section.head").is_visible()
    tab.page.locator("#the-role").tap()  # and what a role is, is said to a finger too
    assert tab.page.locator("#tip").is_visible()
    tab.page.locator("#rests").tap()
    assert not tab.page.locator("#tip").is_visible()


def test_both_sides_of_cross_attention(look: Callable[..., Look], folder: Path) -> None:
    """Queries are of one text and keys of the other: each has one direction."""
    torch.manual_seed(1)
    layer = torch.nn.MultiheadAttention(15, 3, batch_first=True).eval()
    with regard.watch(layer, keep="qkv") as seen, torch.no_grad():
        layer(torch.randn(1, 3, 15) * 4, *[torch.randn(1, 17, 15) * 4] * 2)
    page = write(folder / "sides.html", seen, ([f"k{i}" for i in range(17)], ["a", "b", "c"]))
    tab = look(page, "#view=words&word=1")
    for words in (3, 17):
        names = tab.texts("#text option")
        which = next(i for i, name in enumerate(names) if name.startswith("target" if words == 3 else "source"))
        tab.do(lambda which=which: tab.page.select_option("#text", str(which)))
        tab.click("#word-1")
        assert tab.page.locator(".sentence button").count() == words
        strips = tab.ask(STRIPS)
        assert {way for _, _, way, *_ in strips} == {"to" if words == 3 else "from"}
        for number, head, way, unit, value, step in strips:
            weights = page.weights(number, head)
            row = weights[1] if way == "to" else weights[:, 1]
            assert abs(value - float(row.max())) <= step < 1e-3
            assert unit == int(row.argmax())


def test_a_long_text(look: Callable[..., Look], long: Written) -> None:
    """The links that were kept, of one token in each direction; a part of the text, and a search."""
    tab = look(long, "#view=words")
    assert tab.page.locator(".sentence button").count() == 120
    assert "strongest links of each query" in tab.text(".words .note >> nth=0")
    tab.page.fill("#find-word", "t65")
    found = tab.texts(".found button")
    assert found[0] == "65 t65"
    assert len(found) == 11
    tab.click(".found button >> nth=10")
    assert tab.hash["word"] == "659"
    assert tab.page.locator(".sentence [aria-checked=true]").inner_text() == "t659"
    kept = {}
    for layer, head, way, unit, value, _ in tab.ask(STRIPS):
        weights = long.weights(layer, head)
        if way == "to":
            assert value == pytest.approx(float(weights[659].max()), abs=0.0045)
            assert value == pytest.approx(float(weights[659, unit]), abs=0.0045)
        elif unit >= 0:
            kept[layer, head] = unit
            assert value == pytest.approx(float(weights[unit, 659]), abs=0.0045)
            looking = [q for q in range(701) if 659 in weights[q].topk(3).indices.tolist()]
            assert float(weights[unit, 659]) >= max(float(weights[q, 659]) for q in looking) - 0.0045
    assert kept
    said = over_strip(tab, 0, 0, "to", 0, 1)
    assert "unit" in said or "no link is kept here" in tab.text("#word-readout")


def test_words_of_a_decoder(look: Callable[..., Look], folder: Path) -> None:
    """Where the first query has nothing beside its resting place, nothing is shown for it."""
    torch.manual_seed(5)
    layer = regard.MultiHeadAttention(12, num_heads=3)
    with regard.watch(layer, keep="qkv") as seen, torch.no_grad():
        layer(torch.randn(1, 7, 12) * 3, mask=regard.masks.Causal())
    page = write(folder / "causal.html", seen, ["[CLS]", *"bcdefg"])
    tab = look(page, "#view=words&word=0&aside=1")
    aside = Scene(page.seen, page.tokens)[0].aside
    for _, head, way, unit, value, step in tab.ask(STRIPS):
        weights = set_aside(page, aside, 0, head)
        row = weights[0] if way == "to" else weights[:, 0]
        assert (unit < 0) == (float(row.max()) == 0)
        assert unit < 0 or abs(value - float(row.max())) <= step
    assert all(unit < 0 for _, _, way, unit, *_ in tab.ask(STRIPS) if way == "to")


def test_no_maps(look: Callable[..., Look], folder: Path) -> None:
    layer = regard.MultiHeadAttention(12, num_heads=3)
    with regard.watch(layer, keep=None) as seen, torch.no_grad():
        layer(torch.randn(1, 5, 12))
    seen.save(folder / "none.safetensors")
    saved: Any = regard.heads.Record.load(folder / "none.safetensors")
    tab = look(write(folder / "none.html", saved, list("abcde")), "#view=words")
    assert 'keep="qk"' in tab.text(".words .note")


def test_many_words(look: Callable[..., Look], folder: Path) -> None:
    """As many heads as there are on a narrow screen: what does not fit is scrolled to."""
    page = write(folder / "manywords.html", stack(3, 40, 6, 80), list("abcdef"))
    tab = look(page, "#view=words", width=390, height=844)
    assert tab.overflow() <= 0
    assert tab.page.locator(".cell").count() == 120
    small = tab.ask("Math.min(...[...document.querySelectorAll('.cell')].map(c => c.getBoundingClientRect().width))")
    assert small >= 24
