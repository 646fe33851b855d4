"""The address holds the view: what is shared is what is seen."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from browser.pages import VIEWS, Look, Written

pytestmark = pytest.mark.slow

# everything of the page that can be seen, but for what a pointer brings about
SEEN = """() => {
    const pictures = [...document.querySelectorAll('main canvas')].map(c => c.toDataURL());
    const lines = [...document.querySelectorAll('main svg')].map(s => s.outerHTML);
    const inputs = [...document.querySelectorAll('main input, main select')].map(i => [i.id, i.type === 'checkbox' ? i.checked : i.value]);
    return JSON.stringify([document.documentElement.dataset.theme, document.querySelector('main').innerText, pictures, lines, inputs]);
}"""

SHARED = [
    "#view=model&aside=1&specials=0&sort=entropy&down=1&role=first&by=peak&than=most&least=0.7",
    "#view=head&layer=2&head=5&q=6&k=7&zoom=3,9.5,4,10.5&words=1&specials=0&scale=linear&threshold=0.11&top=3&theme=dark",
    "#view=words&word=5&way=from&aside=1&specials=0",
    "#view=flow&layer=4&head=3&q=12",
    "#view=table&tsort=distance&tdown=1&filter=first",
    "#view=compare&layer=1&head=3&other=0.5.2&zoom=2,8,2,8&specials=0",
]


@pytest.mark.parametrize("hash_", SHARED)
def test_an_address_gives_the_same_view(look: Callable[..., Look], real: Written, hash_: str) -> None:
    tab = look(real, hash_)
    wait(tab)
    before = tab.ask(SEEN)
    assert tab.hash == {name: value for name, _, value in (part.partition("=") for part in hash_[1:].split("&"))}
    tab.page.reload()
    tab.rest()
    wait(tab)
    assert tab.ask(SEEN) == before


def wait(tab: Look) -> None:
    if tab.page.locator("section.model").count():
        tab.until(
            "[...document.querySelectorAll('a.head')].every(a => a.painted || a.getBoundingClientRect().top > 900)"
        )
    tab.page.wait_for_timeout(150)


def test_what_one_does_is_in_the_address(look: Callable[..., Look], real: Written) -> None:
    """By hand, in every view; then the address alone, in another tab, gives the same."""
    tab = look(real, "#view=head&layer=1&head=4")
    tab.do(lambda: tab.page.check("#words"))
    tab.do(lambda: tab.page.select_option("#scale", "linear"))
    tab.over(5, 5, (0, 13, 0, 13))
    tab.page.mouse.wheel(0, -60)
    tab.page.focus("#threshold")
    tab.press("ArrowRight", "ArrowRight")
    tab.page.focus("#most")
    tab.press("ArrowLeft")
    tab.page.keyboard.press("Tab")
    tab.page.mouse.move(5, 5)
    tab.page.locator("#map").focus()
    tab.page.evaluate("document.activeElement.blur()")
    said = tab.hash
    assert {name: said[name] for name in ("words", "scale", "threshold", "top")} == {
        "words": "1",
        "scale": "linear",
        "threshold": "0.03",
        "top": "7",
    }
    assert "zoom" in said
    other = look(real, tab.ask("location.hash"))
    other.page.wait_for_timeout(100)
    assert other.ask(SEEN) == tab.ask(SEEN)


def test_back_and_forward(look: Callable[..., Look], real: Written) -> None:
    tab = look(real)
    for name in VIEWS[1:]:
        tab.click(f"#tab-{name}")
    for name in reversed(VIEWS[:-1]):
        tab.do(tab.page.go_back)
        assert tab.page.locator(f"section.{name}").is_visible()
    tab.do(tab.page.go_forward)
    assert tab.page.locator(f"section.{VIEWS[1]}").is_visible()


def test_an_address_typed_by_hand(look: Callable[..., Look], real: Written) -> None:
    tab = look(real)
    tab.do(lambda: tab.ask("location.hash = '#view=head&layer=3&head=2'"))
    tab.page.wait_for_selector("section.head")
    assert tab.page.input_value("#pick-layer") == "3"


NONSENSE = [
    "#main",
    "#view=constructor",
    "#view=__proto__",
    "#__proto__=1&constructor=2&toString=3",
    "#theme=pink&scale=cubic",
    "#view=head&layer=1.5&head=-7",
    "#view=head&layer=99&head=99",
    "#view=head&layer=NaN&q=1e999&k=-5",
    "#view=head&q=3.5&k=2",
    "#view=head&zoom=1,2,3",
    "#view=head&zoom=9,2,3,1",
    "#view=head&zoom=a,b,c,d",
    "#view=head&zoom=0,900,0,900",
    "#view=head&top=0&threshold=7&words=5&specials=-1",
    "#view=flow&q=900&head=-1",
    "#view=flow&q=-9",
    "#run=7&view=compare",
    "#view=compare&other=0.0.99",
    "#view=compare&other=constructor",
    "#view=compare&other=0.1.1.1",
    "#view=model&sort=toString&by=valueOf&least=x",
    "#view=model&sort=change&by=change&versus=9",
    "#view=model&role=nobody",
    "#view=words&word=900&text=9&way=up",
    "#view=words&word=-4&text=-1&aside=7",
    "#view=table&tsort=nothing&filter=%00%ff",
    "#%",
    "#&&&==",
    "#view=head&layer=%E0%A4%A",
]


def test_nonsense_in_an_address(look: Callable[..., Look], real: Written) -> None:
    """Whatever stands there, a view is shown, and it says nothing of a failure."""
    tab = look(real)
    for hash_ in NONSENSE:
        tab.ask("hash => { location.hash = ''; location.hash = hash; }", hash_)
        tab.page.wait_for_timeout(30)
        tab.rest()
        assert tab.text(".status") == "", hash_
        assert tab.page.locator("main > section").count() == 1, hash_
        assert tab.page.locator("main > section > *").count() > 0, hash_
        assert tab.ask("document.documentElement.dataset.theme") == "light", hash_


def test_the_skip_link_keeps_the_view(look: Callable[..., Look], real: Written) -> None:
    tab = look(real, "#view=head&layer=2")
    tab.press("Tab", "Enter")
    assert tab.ask("document.activeElement.id") == "main"
    assert tab.page.locator("section.head").is_visible()
    assert tab.hash == {"view": "head", "layer": "2"}


def test_a_long_zoom_is_written_once(look: Callable[..., Look], real: Written) -> None:
    """Browsers complain of, or refuse, hundreds of addresses within seconds."""
    tab = look(real, "#view=head&layer=0&head=0")
    tab.ask("""() => {
        window.writes = 0;
        const replace = history.replaceState.bind(history);
        history.replaceState = (...all) => { window.writes += 1; replace(...all); };
    }""")
    box = tab.page.locator("#map").bounding_box()
    tab.ask(
        """([x, y]) => {
        const map = document.getElementById('map');
        for (let i = 0; i < 300; i++) map.dispatchEvent(new WheelEvent('wheel', { deltaY: i % 2 ? 30 : -40, clientX: x, clientY: y, cancelable: true }));
    }""",
        [box["x"] + 100, box["y"] + 100],
    )
    assert "zoom" in tab.hash
    assert 1 <= tab.ask("window.writes") <= 3
