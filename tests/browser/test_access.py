"""For every hand and eye: names, focus, keys, contrast, both themes, narrow screens."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
from browser.pages import VIEWS, Look, Written

pytestmark = pytest.mark.slow

# roles of what one can act on, as the browser tells them to a screen reader
ACTIVE = {
    "application",
    "button",
    "checkbox",
    "combobox",
    "link",
    "searchbox",
    "slider",
    "spinbutton",
    "textbox",
    "Canvas",
}

# the ratio of contrast (WCAG) of each piece of text with what is behind it
CONTRASTS = """() => {
    const part = (c) => { const [r, g, b, a = 1] = c.match(/[\\d.]+/g).map(Number); return [r, g, b, a]; };
    const light = ([r, g, b]) => { const [x, y, z] = [r, g, b].map(v => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4); return 0.2126 * x + 0.7152 * y + 0.0722 * z; };
    const behind = (node) => { for (; node; node = node.parentElement) { const c = part(getComputedStyle(node).backgroundColor); if (c[3] > 0.99) return c; } return [255, 255, 255]; };
    const found = [];
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
        const node = walker.currentNode.parentElement;
        if (!walker.currentNode.nodeValue.trim() || node.closest('script, style, option, svg, #skip, .unseen') || !node.getClientRects().length) continue;
        const [a, b] = [light(part(getComputedStyle(node).color)), light(behind(node))];
        found.push([(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), node.className, walker.currentNode.nodeValue.slice(0, 30)]);
    }
    return found;
}"""


def tree(tab: Look) -> list[dict[str, Any]]:
    """What the browser tells a screen reader: role and name of everything."""
    session = tab.page.context.new_cdp_session(tab.page)
    nodes = session.send("Accessibility.getFullAXTree")["nodes"]
    session.detach()
    return [
        {"role": node["role"]["value"], "name": node.get("name", {}).get("value", ""), "ignored": node["ignored"]}
        for node in nodes
        if "role" in node
    ]


@pytest.mark.parametrize("view", VIEWS)
def test_everything_has_a_name(look: Callable[..., Look], ablated: Written, view: str) -> None:
    tab = look(ablated, f"#view={view}&layer=1&head=2&by=peak&sort=entropy&q=3")
    nodes = [node for node in tree(tab) if not node["ignored"] and node["role"] in ACTIVE]
    assert len(nodes) > 12
    assert [node for node in nodes if not re.search(r"\w", node["name"])] == []  # (a sign such as "‹" is no name)
    links = [node["name"] for node in nodes if node["role"] == "link"]
    assert len(set(links)) == len(links)
    pictures = [node["name"] for node in tree(tab) if node["role"] in ("img", "image") and not node["ignored"]]
    assert all(name.strip() for name in pictures)
    doubles = tab.ask(
        "[...document.querySelectorAll('[id]')].map(e => e.id).filter((id, i, all) => all.indexOf(id) < i)"
    )
    assert doubles == []
    roles = [node["role"] for node in tree(tab)]
    assert {"main", "navigation", "banner", "heading"} <= set(roles)
    assert tab.ask("document.querySelectorAll('table th:not([scope])').length") == 0


@pytest.mark.parametrize("view", VIEWS)
def test_order_of_focus(look: Callable[..., Look], real: Written, view: str) -> None:
    """Tab goes through everything in the order of the page, and is shown where it is."""
    tab = look(real, f"#view={view}&layer=1&role=previous&filter=previous")
    wanted = tab.ask("""() => {
        const all = [...document.querySelectorAll('a[href], button, input, select, [tabindex="0"]')];
        return all.filter(e => e.getClientRects().length && !e.disabled && e.tabIndex >= 0).map((e, i) => { e.number = i; return i; });
    }""")
    found = []
    for _ in wanted:
        tab.page.keyboard.press("Tab")
        found.append(tab.ask("document.activeElement.number"))
        if len(found) % 5 == 1:
            outline = tab.ask(
                "(s => [s.outlineStyle, parseFloat(s.outlineWidth)])(getComputedStyle(document.activeElement))"
            )
            assert outline[0] != "none", tab.ask("document.activeElement.outerHTML")
            assert outline[1] >= 1
    assert found == wanted
    assert tab.ask("document.querySelector('#skip').getBoundingClientRect().right") <= 0  # out of sight again


def test_focus_stays(look: Callable[..., Look], real: Written) -> None:
    """What is drawn anew does not take the focus away from who works with keys."""
    tab = look(real, "#view=head&layer=1&head=3")

    def focused() -> str:
        return tab.ask("document.activeElement.id")

    tab.page.focus("#next")
    tab.press("Enter", "Enter")
    assert (focused(), tab.page.input_value("#pick-head")) == ("next", "5")
    tab.page.focus("#pick-head")
    tab.press("ArrowDown")
    assert (focused(), tab.page.input_value("#pick-head")) == ("pick-head", "6")
    tab.page.focus("#words")
    tab.press("Space")
    assert (focused(), tab.page.is_checked("#words")) == ("words", True)
    tab.page.focus("#map")
    tab.press("]")
    assert focused() == "map"
    tab.page.focus("#query-3")
    tab.press("Enter")
    assert focused() == "query-3"
    tab.page.focus("#tab-flow")
    tab.press("Enter")
    assert focused() == "tab-flow"
    tab.page.focus("#open-4")
    tab.press("Enter")
    assert focused() == "open-4"
    tab.press("6")
    tab.page.focus("#sort-peak")
    tab.press("Enter")
    assert focused() == "sort-peak"
    tab.press("d")
    assert (focused(), tab.ask("document.documentElement.dataset.theme")) == ("sort-peak", "dark")
    tab.press("2")
    tab.page.focus("#sort")
    tab.press("ArrowDown")
    assert focused() == "sort"


def test_the_map_by_keys(look: Callable[..., Look], real: Written) -> None:
    tab = look(real, "#view=head&layer=2&head=1")
    tab.page.focus("#map")
    tab.press("ArrowDown")
    assert (tab.readout["query"], tab.readout["key"]) == ("0-1", "0-1")
    tab.press("ArrowDown", "ArrowDown", "ArrowRight")
    assert (tab.readout["query"], tab.readout["key"]) == ("2-3", "1-2")
    exact = float(real.weights(2, 1)[2, 1])
    assert float(tab.readout["value"]) == pytest.approx(exact, abs=float(tab.readout["step"]))
    assert tab.page.locator("#readout").get_attribute("aria-live") == "polite"
    assert tab.text("#readout").startswith("cat → the ")
    tab.press("+", "+")
    r0, r1, c0, c1 = (float(x) for x in tab.hash["zoom"].split(","))
    assert r1 - r0 == pytest.approx(17 / 4)
    assert r0 <= 2.5 <= r1
    assert c0 <= 1.5 <= c1
    tab.press(*["ArrowRight"] * 9)  # the window follows
    r0, r1, c0, c1 = (float(x) for x in tab.hash["zoom"].split(","))
    assert c0 <= 10 < 11 <= c1 + 1e-3
    assert tab.readout["key"] == "10-11"
    tab.press(*["ArrowRight"] * 9, *["ArrowUp"] * 9)  # to the corner, and no further
    assert (tab.readout["query"], tab.readout["key"]) == ("0-1", "16-17")
    tab.press("-", "0")
    assert "zoom" not in tab.hash
    tab.press("Escape")
    assert tab.readout == {}
    assert "q" not in tab.hash


def test_a_pooled_map_by_keys(look: Callable[..., Look], long: Written) -> None:
    """Cell by cell; where tokens come to sight, token by token."""
    tab = look(long, "#view=head&layer=1&head=1")
    _, rows, _cols = tab.ask("regard.layer.map.shape")
    tab.page.focus("#map")
    tab.press("ArrowDown", "ArrowDown", "ArrowRight")
    assert tab.readout["query"] == f"{-(-701 // rows)}-{-(-2 * 701 // rows)}"
    tab.do(tab.page.locator(".crop").first.click)
    q0, k0 = (int(part.split("–")[0]) for part in tab.text(".crop >> nth=0").split(" → "))
    tab.press("Escape")
    tab.page.focus("#map")
    tab.press("Escape", "ArrowDown", "ArrowDown", "ArrowDown", "ArrowRight")
    assert (tab.readout["query"], tab.readout["key"]) == (f"{q0 + 2}-{q0 + 3}", f"{k0 + 1}-{k0 + 2}")
    exact = float(long.weights(1, 1)[q0 + 2, k0 + 1])
    assert abs(float(tab.readout["value"]) - exact) <= float(tab.readout["step"])


def test_a_change_of_head_is_said(look: Callable[..., Look], real: Written) -> None:
    tab = look(real, "#view=head&layer=0&head=1")
    tab.press("]")
    assert tab.ask("document.getElementById('announcer').textContent") == "head: layer 0 head 2, previous"
    assert [node for node in tree(tab) if node["role"] == "status" and not node["ignored"]]


def test_the_list_of_keys(look: Callable[..., Look], real: Written) -> None:
    tab = look(real, "#view=head&layer=0&head=0")
    tab.page.focus("#help")
    tab.page.keyboard.press("Enter")
    assert tab.page.locator("#keys").is_visible()
    tab.page.keyboard.press("2")  # what is behind it does not move
    tab.page.keyboard.press("]")
    assert tab.page.input_value("#pick-head") == "0"
    tab.page.click("#keys button")
    assert not tab.page.locator("#keys").is_visible()
    assert tab.ask("document.activeElement.id") == "help"
    tab.page.keyboard.press("?")
    tab.page.keyboard.press("Escape")
    assert not tab.page.locator("#keys").is_visible()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_can_be_read(look: Callable[..., Look], real: Written, theme: str) -> None:
    tab = look(real, f"#theme={theme}")
    assert tab.ask("document.documentElement.dataset.theme") == theme
    for view in VIEWS:
        tab.click(f"#tab-{view}")
        found = tab.ask(CONTRASTS)
        assert len(found) > 20
        assert [one for one in found if one[0] < 4.5] == [], view


def test_the_theme_of_the_system(look: Callable[..., Look], real: Written) -> None:
    tab = look(real, "#view=head&layer=1", scheme="dark")
    assert tab.ask("document.documentElement.dataset.theme") == "dark"
    dark = tab.ask("[getComputedStyle(document.body).backgroundColor, document.getElementById('map').toDataURL()]")
    tab.page.emulate_media(color_scheme="light")
    tab.until("document.documentElement.dataset.theme == 'light'")  # the browser tells the page of it when it likes
    tab.rest()
    light = tab.ask("[getComputedStyle(document.body).backgroundColor, document.getElementById('map').toDataURL()]")
    assert dark[0] != light[0]
    assert dark[1] != light[1]
    tab.click("#theme")
    assert tab.ask("document.documentElement.dataset.theme") == "dark"
    assert tab.hash["theme"] == "dark"


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_colours_are_told_apart_by_lightness(look: Callable[..., Look], real: Written, theme: str) -> None:
    """The legend goes one way in lightness, so that maps read the same in grey and to every eye."""
    tab = look(real, f"#view=head&theme={theme}&scale=linear")
    pixels = tab.ask(
        "(c => [...c.getContext('2d').getImageData(0, 0, c.width, 1).data])(document.querySelector('.bar'))"
    )
    grey = [
        0.2126 * r + 0.7152 * g + 0.0722 * b for r, g, b in zip(pixels[::4], pixels[1::4], pixels[2::4], strict=True)
    ]
    sign = 1 if theme == "dark" else -1
    assert all(sign * (b - a) > 0 for a, b in itertools.pairwise(grey))
    assert abs(grey[-1] - grey[0]) > 180
    tab.click("#tab-compare")
    pixels = tab.ask(
        "(c => [...c.getContext('2d').getImageData(0, 0, c.width, 1).data])(document.querySelectorAll('.bar')[2])"
    )
    red, blue = pixels[::4], pixels[2::4]
    assert all(r > b for r, b in zip(red[:20], blue[:20], strict=True))  # below nothing orange, above it blue:
    assert all(b > r for r, b in zip(red[-20:], blue[-20:], strict=True))  # no eye confuses these


@pytest.mark.parametrize("width", [320, 390])
def test_narrow_screens(look: Callable[..., Look], ablated: Written, long: Written, width: int) -> None:
    for page in (ablated, long):
        tab = look(page, "#by=peak", width=width, height=844)
        for view in VIEWS:
            tab.click(f"#tab-{view}")
            assert tab.overflow() <= 0, view
            wide = tab.ask(
                "[...document.querySelectorAll('main button, main select, main input, main .plane, main figure')].filter(e => !e.closest('.scroll, .columns') && e.getBoundingClientRect().right > innerWidth + 1).map(e => e.outerHTML.slice(0, 90))"
            )
            assert wide == [], view


def test_fingers(look: Callable[..., Look], real: Written) -> None:
    """A tap chooses; two fingers zoom; one finger scrolls the page until there is something to pan."""
    tab = look(real, "#view=head&layer=2&head=2", width=390, height=844, device={"has_touch": True, "is_mobile": True})
    tab.page.locator("#map").scroll_into_view_if_needed()
    box = tab.page.locator("#map").bounding_box()
    assert tab.ask("getComputedStyle(document.getElementById('map')).touchAction") == "pan-x pan-y"
    tab.page.touchscreen.tap(box["x"] + box["width"] * 4.5 / 17, box["y"] + box["height"] * 7.5 / 17)
    assert (tab.hash["q"], tab.hash["k"]) == ("7", "4")
    session = tab.page.context.new_cdp_session(tab.page)
    middle = [box["x"] + box["width"] / 2, box["y"] + box["height"] / 2]

    def touch(kind: str, apart: float) -> None:
        points = [{"x": middle[0] + s * apart, "y": middle[1] + s * apart, "id": i} for i, s in enumerate((-1, 1))]
        session.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points if kind != "touchEnd" else []})

    touch("touchStart", 20)
    for apart in (25, 30, 40, 50, 60):
        touch("touchMove", apart)
    touch("touchEnd", 60)
    r0, r1, c0, c1 = (float(x) for x in tab.hash["zoom"].split(","))
    assert r1 - r0 == pytest.approx(17 / 3, rel=0.15)
    assert c1 - c0 == pytest.approx(17 / 3, rel=0.15)
    assert tab.ask("getComputedStyle(document.getElementById('map')).touchAction") == "none"
    assert (tab.hash["q"], tab.hash["k"]) == ("7", "4")  # a pinch is no tap


def test_the_wheel_lets_the_page_go(look: Callable[..., Look], real: Written) -> None:
    """Over the whole map, turning the wheel down scrolls the page; turning it up zooms in."""
    tab = look(real, "#view=head&layer=2", width=1280, height=700)
    tab.over(8, 8, (0, 17, 0, 17))
    tab.page.mouse.wheel(0, 120)
    tab.until("window.scrollY > 50")
    assert "zoom" not in tab.hash
    tab.page.mouse.wheel(0, -60)
    assert "zoom" in tab.hash
