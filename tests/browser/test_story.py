"""The story: its cards say what the record says. The tour: ten steps that drive the page."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from browser.pages import Look, Written, plain, write

import regard
from regard.draw.scene import Scene
from regard.draw.story import story
from regard.heads.analysis.syntax.run import shuffled_copy

pytestmark = pytest.mark.slow
LESSON = "The cat that I saw yesterday ran away"
TREEBANK = Path(__file__).parents[2] / "examples" / "sentences.conllu"
GRAMMAR = {"verbs", "clauses", "phrases"}


@pytest.fixture(scope="module")
def lesson(minilm: Any, folder: Path) -> Written:
    seen = regard.look(minilm, text=LESSON, show=False, treebank=TREEBANK)
    return write(folder / "lesson.html", seen)


@pytest.fixture(scope="module")
def decoder(smollm2: Any, folder: Path) -> Written:
    seen = regard.look(smollm2, text=LESSON, show=False, treebank=TREEBANK)
    return write(folder / "decoder.html", seen)


def cards(tab: Look) -> list[tuple[str, str]]:
    found = tab.ask(
        "[...document.querySelectorAll('.card')].map(x => [x.dataset.kind, x.querySelector('.told').textContent])"
    )
    return [(kind, plain(text)) for kind, text in found]


@pytest.mark.parametrize("which", ["lesson", "decoder"])
def test_the_story_is_the_first_view_and_says_what_the_record_says(
    look: Callable[..., Look], request: pytest.FixtureRequest, which: str
) -> None:
    page: Written = request.getfixturevalue(which)
    scene = Scene(page.seen)
    told = story(scene)
    tab = look(page)
    assert tab.ask("regard.state.view") == "story"
    assert cards(tab) == [(card.kind, card.text(scene)) for card in told.cards]
    assert tab.texts(".absent li") == told.absent
    arcs = tab.ask("[...document.querySelectorAll('.card')].map(x => x.querySelectorAll('.arc').length)")
    assert arcs == [len(card.links) for card in told.cards]
    first = told.cards[0]
    name = f"{first.layer}.{first.head}"
    assert tab.ask("[regard.layer.index, regard.head]") == [first.layer, first.head]  # where the other views open
    tab.click(f'[id="see-{name}"]')
    assert tab.ask("[regard.state.view, regard.state.layer, regard.state.head]") == ["head", first.layer, first.head]


def test_what_changes_without_a_head(look: Callable[..., Look], smollm2: Any, decoder: Written) -> None:
    tab = look(decoder)
    with torch.no_grad():
        best = smollm2(decoder.seen.rerun.inputs["ids"])[0, -1].double().softmax(-1).max().item()
    shown = tab.text(".said p")
    assert f"{100 * best:.0f}%" in shown or f"{100 * best:.1f}%" in shown
    changes = [
        float(x) for x in tab.ask("[...document.querySelectorAll('#effects [data-change]')].map(x => x.dataset.change)")
    ]
    assert len(changes) == len({(card.layer, card.head) for card in story(Scene(decoder.seen)).cards})
    assert changes == sorted(changes, reverse=True)


def test_shuffled_weights_have_no_syntax(look: Callable[..., Look], minilm: Any, folder: Path) -> None:
    seen = regard.look(shuffled_copy(minilm, 0), text=LESSON, show=False, treebank=TREEBANK)
    tab = look(write(folder / "shuffled.html", seen))
    assert not {kind for kind, _ in cards(tab)} & GRAMMAR
    assert any("Relations of syntax are not known" in line for line in tab.texts(".absent li"))


def test_tokens_of_a_story_are_inert(look: Callable[..., Look], folder: Path) -> None:
    tokens = [
        "<img src=x onerror=alert(1)>",
        "</script><script>alert(2)</script>",
        "\u202eevil",
        "a",
        "b",
        "c",
        "d",
        "e",
    ]
    layer = regard.MultiHeadAttention(16, num_heads=2)
    with regard.watch(layer, keep="qkv") as seen, torch.no_grad():
        layer(4 * torch.randn(1, 8, 16, generator=torch.Generator().manual_seed(1)))
    tab = look(write(folder / "hostile.html", seen, tokens))
    assert tab.ask("regard.state.view") == "story"
    assert tab.ask("document.querySelectorAll('.story img, .story script').length") == 0


@pytest.mark.parametrize("view", ["", "#tour=1", "#tour=6&view=model"])
def test_on_a_phone_nothing_is_cut(look: Callable[..., Look], lesson: Written, view: str) -> None:
    tab = look(lesson, view, width=390, height=800)
    assert tab.overflow() == 0


# The tour

# What a reader does in each step: a script that changes the page as a click would.
TASKS = [
    lambda tab: tab.page.locator("#map").click(position={"x": 60, "y": 60}),
    lambda tab: tab.ask("regard.state.set({q: 3})"),
    lambda tab: tab.ask("regard.state.set({k: 1})"),
    lambda tab: tab.ask("regard.state.set({q: 0})"),
    lambda tab: tab.page.check("#aside"),
    lambda tab: tab.page.select_option("#role", index=1),
    lambda tab: tab.ask("regard.state.set({q: 2})"),
    lambda tab: tab.page.locator(".card .onward a").first.click(),
    lambda tab: tab.ask("regard.state.set({word: 4})"),
    lambda tab: tab.page.keyboard.press("]"),
]


@pytest.mark.parametrize("which", ["lesson", "decoder"])
def test_ten_steps(look: Callable[..., Look], request: pytest.FixtureRequest, which: str) -> None:
    tab = look(request.getfixturevalue(which))
    tab.click("#story-tour")
    for number, task in enumerate(TASKS, 1):
        assert tab.text(".tour h2").startswith(f"{number} of 10: ")
        assert len(tab.text("#tour-text")) > 100
        assert tab.text("#tour-task").startswith("Do: ")
        assert tab.ask("document.activeElement.tagName") == "H2"  # screen readers read on from there
        assert not tab.page.locator("#tour-task.done").count(), number
        tab.page.evaluate("document.activeElement.blur()")
        tab.do(lambda task=task: task(tab))
        tab.until("document.querySelector('#tour-task.done') !== null")
        assert tab.text("#tour-done") == "Done."
        tab.click("#tour-next")
    assert tab.page.locator(".tour").is_hidden()
    assert tab.ask("regard.state.view") == "story"


def test_a_tour_can_be_left_and_resumed(look: Callable[..., Look], lesson: Written) -> None:
    tab = look(lesson)
    tab.press("t")
    tab.click("#tour-next")
    tab.click("#tour-next")
    assert tab.ask("[regard.state.view, regard.state.tour]") == ["flow", 3]
    tab.click("#tour-leave")
    assert tab.page.locator(".tour").is_hidden()
    assert tab.ask("document.activeElement.id") == "tour"
    assert tab.hash["tour"] == "-3"
    tab.click("#tab-story")
    assert tab.text("#story-tour") == "Resume the tour (step 3 of 10)"
    tab.press("t")
    assert tab.text(".tour h2").startswith("3 of 10")
    tab.click("#tour-back")
    assert tab.text(".tour h2").startswith("2 of 10")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_tour_can_be_read(look: Callable[..., Look], lesson: Written, theme: str) -> None:
    from browser.test_access import CONTRASTS

    tab = look(lesson, f"#tour=1&theme={theme}")
    found = tab.ask(CONTRASTS)
    assert [one for one in found if one[0] < 4.5] == []
