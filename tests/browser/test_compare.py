"""Compare: heads ranked by how much they change, texts aligned, heads like and unlike a head."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from browser.pages import Look, Written, write

import regard

pytestmark = pytest.mark.slow

OTHER = "The old cat that you saw today ran away"


@pytest.fixture(scope="session")
def texts(minilm: Any, real: Written, folder: Path) -> Written:
    """Two texts that share some words."""
    with regard.watch(minilm, keep="qkv") as seen, torch.no_grad():
        minilm(minilm.encode(OTHER))
    tokens = {"first": real.tokens, "second": minilm.tokenize(OTHER)}
    return write(folder / "aligned.html", {"first": real.seen, "second": seen}, tokens)


def shown(tab: Look) -> list[str]:
    """Layer and head of A, then of B."""
    return [tab.page.input_value(f"#{what}-{side}") for side in "AB" for what in ("layer", "head")]


def places(tab: Look, selector: str) -> list[str]:
    return tab.texts(f"{selector} b")


def test_it_opens_on_the_head_that_changes_most(look: Callable[..., Look], ablated: Written) -> None:
    change = ablated.runs["intact"].difference(ablated.runs["without 0.2"], tokens=(ablated.tokens, ablated.tokens))
    most = change.heads[0]
    tab = look(ablated, "#view=compare")
    assert shown(tab) == [str(most.number), str(most.head)] * 2
    assert places(tab, "#changed") == [f"{head.number}.{head.head}" for head in change.heads[:8]]
    scores = [float(text) for text in tab.texts("#changed .score")]
    assert scores == pytest.approx([head.change for head in change.heads[:8]], rel=0.06)
    assert tab.page.get_attribute("#changed a >> nth=0", "aria-current") == "true"
    said = tab.text("#changed .said >> nth=0")
    assert said.startswith(f"{most.words[0]} → {most.words[1]}")


def test_a_head_of_the_list_is_shown(look: Callable[..., Look], ablated: Written) -> None:
    tab = look(ablated, "#view=compare")
    layer, head = places(tab, "#changed")[2].split(".")
    tab.click("#changed a >> nth=2")
    assert shown(tab) == [layer, head, layer, head]
    assert tab.hash == {"view": "compare", "layer": layer, "head": head, "other": f"1.{layer}.{head}"}
    assert tab.page.get_attribute("#changed a >> nth=2", "aria-current") == "true"
    assert tab.page.locator("#changed a").count() == 8
    tab.page.click("#changed-more")
    assert tab.page.locator("#changed a").count() == 40
    tab.press("]")  # the next head, of both
    assert shown(tab)[:2] != [layer, head]


def test_the_other_way_round(look: Callable[..., Look], ablated: Written) -> None:
    """From the second run to the first the same heads change, and weights before and after change places."""
    tab = look(ablated, "#view=compare")
    heads, weights = places(tab, "#changed"), tab.text("#changed .said >> nth=0").split()
    tab = look(ablated, "#view=compare&run=1&other=0.0.0")
    assert places(tab, "#changed") == heads
    assert tab.text("#changed .said >> nth=0").split()[-3:] == weights[-3:][::-1]


def test_texts_are_aligned(look: Callable[..., Look], texts: Written) -> None:
    first, second = texts.tokens["first"], texts.tokens["second"]
    tab = look(texts, "#view=compare&layer=1&head=3")
    assert tab.page.locator("canvas.plane").count() == 3
    assert "aligned where they share words" in tab.text(".compare")
    shared = tab.ask("regard.view.pictures['A − B'].shared")
    assert [first[i] for i, _ in shared["rows"]] == [second[j] for _, j in shared["rows"]]
    assert len(shared["rows"]) == 8  # [CLS] the cat that saw ran away [SEP]
    a, b = texts.weights(1, 3, "first"), texts.weights(1, 3, "second")
    count = len(shared["rows"])
    for i, j in ((2, 1), (5, 5), (7, 0)):
        (r, q), (c, k) = shared["rows"][i], shared["cols"][j]
        expected = {"A": float(a[r, c]), "B": float(b[q, k]), "A − B": float(a[r, c] - b[q, k])}
        for selector, place, (rows, cols) in (
            ("#map-2", (i, j), (count, count)),
            ("#map-0", (r, c), (len(first), len(first))),
            ("#map-1", (q, k), (len(second), len(second))),
        ):
            tab.over(place[0] + 0.5, place[1] + 0.5, (0, rows, 0, cols), selector)
            said = json.loads(tab.ask("document.getElementById('compare-readout').dataset.value"))
            assert said == {name: pytest.approx(value, abs=1e-4) for name, value in expected.items()}
    alone = first.index("yesterday")  # the second text does not have it
    tab.over(alone + 0.5, 0.5, (0, len(first), 0, len(first)), "#map-0")
    assert list(json.loads(tab.ask("document.getElementById('compare-readout').dataset.value"))) == ["A"]


def test_texts_that_share_nothing_are_not_ranked(look: Callable[..., Look], minilm: Any, folder: Path) -> None:
    records, tokens = {}, {"one": ["a", "b", "c", "d"], "two": ["v", "w", "x", "y", "z"]}
    for name, words in tokens.items():
        with regard.watch(minilm, keep="qkv") as seen, torch.no_grad():
            minilm(torch.arange(5, 5 + len(words))[None])
        records[name] = seen
    tab = look(write(folder / "nothing.html", records, tokens), "#view=compare")
    assert "Heads are not ranked: difference: expected texts that share words" in tab.text(".compare")
    assert "share no tokens, so there is no difference to show" in tab.text(".compare")
    assert tab.page.locator("canvas.plane").count() == 2


def test_heads_like_and_unlike(look: Callable[..., Look], real: Written) -> None:
    tab = look(real, "#view=compare&layer=1&head=8")
    tab.until("document.getElementById('alike') !== null")
    own = real.weights(1, 8)
    far = {
        f"{layer}.{head}": float((real.weights(layer, head) - own).abs().sum(-1).mean() / 2)
        for layer in range(6)
        for head in range(12)
        if (layer, head) != (1, 8)
    }
    ranked = sorted(far, key=far.__getitem__)
    assert places(tab, "#alike") == ranked[:8]
    assert places(tab, "#unlike") == ranked[:-9:-1]
    assert float(tab.text("#alike .score >> nth=0")) == pytest.approx(far[ranked[0]], rel=0.06)
    layer, head = ranked[0].split(".")
    tab.click("#alike a >> nth=0")
    assert shown(tab) == ["1", "8", layer, head]


def test_one_run_opens_on_two_different_heads(look: Callable[..., Look], real: Written) -> None:
    tab = look(real, "#view=compare")
    a, b = shown(tab)[:2], shown(tab)[2:]
    assert a != b
    assert real.seen.roles(tokens=real.tokens)[int(b[0]), int(b[1])].role is not None


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_on_a_phone(look: Callable[..., Look], texts: Written, scheme: str) -> None:
    tab = look(texts, "#view=compare", width=390, height=800, scheme=scheme)
    assert tab.overflow() == 0
    wide = "[...document.querySelectorAll('section.compare *')].filter(e => e.getBoundingClientRect().right > 390.5)"
    assert tab.ask(f"{wide}.map(e => e.tagName)") == []
    heights = tab.ask("[...document.querySelectorAll('a.change')].map(a => a.getBoundingClientRect().height)")
    assert min(heights) >= 44
