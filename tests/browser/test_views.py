"""The views: what they show, and that what one does in them has its effect."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from browser.pages import VIEWS, Look, Written, plain, write

import regard
from regard.draw.figure.legends import color_of, sign_of
from regard.draw.scene import Scene
from regard.heads import Record

# how many colours the picture of a canvas has
COLOURS = "c => new Set(new Uint32Array(c.getContext('2d').getImageData(0, 0, c.width, c.height).data.buffer)).size"


def measures(seen: Record, name: str) -> dict[tuple[int, int], float]:
    """A measure of every head, by layer and head."""
    rows = seen.table()
    return {(seen.layers.index(row["layer"]), row["head"]): row[name] for row in rows if name in row}


def shown(tab: Look) -> list[tuple[int, int]]:
    """The heads of the model view, in order."""
    return [
        tuple(x)
        for x in tab.ask("[...document.querySelectorAll('a.head')].map(a => [+a.dataset.layer, +a.dataset.head])")
    ]


def test_every_view(look: Callable[..., Look], real: Written) -> None:
    tab = look(real)
    for name in VIEWS:
        tab.click(f"#tab-{name}")
        assert tab.page.locator(f"#tab-{name}").get_attribute("aria-current") == "page"
        assert tab.page.locator("main > section").count() == 1
        assert tab.page.locator(f"section.{name}").is_visible()


def test_all_heads_are_drawn(look: Callable[..., Look], real: Written) -> None:
    tab = look(real, "#view=model")
    assert shown(tab) == [(layer, head) for layer in range(6) for head in range(12)]
    tab.until("[...document.querySelectorAll('a.head')].slice(0, 36).every(a => a.painted)")
    tab.page.wait_for_timeout(100)
    assert tab.ask(f"[...document.querySelectorAll('.thumb')].slice(0, 36).map({COLOURS}).every(n => n > 2)")
    size = tab.ask("(({ width, height }) => [width, height])(document.querySelector('.thumb'))")
    assert size == [17, 17]


def test_sorting_and_filtering(look: Callable[..., Look], real: Written) -> None:
    tab = look(real, "#view=model")
    entropy = measures(real.seen, "entropy")
    tab.do(lambda: tab.page.select_option("#sort", "entropy"))
    assert shown(tab) == sorted(entropy, key=lambda head: entropy[head])
    tab.do(lambda: tab.page.check("#down"))
    assert shown(tab) == sorted(entropy, key=lambda head: -entropy[head])
    tab.do(lambda: tab.page.select_option("#by", "peak"))
    peak = measures(real.seen, "peak")
    tab.do(lambda: tab.page.fill("#least", "0.8") or tab.page.press("#least", "Enter"))
    assert set(shown(tab)) == {head for head, value in peak.items() if value >= 0.8}
    tab.do(lambda: tab.page.select_option("#than", "most"))
    assert set(shown(tab)) == {head for head, value in peak.items() if value <= 0.8}
    assert tab.text(".model .note").startswith(f"{len(shown(tab))} of 72 heads")
    roles = {(real.seen.layers.index(one.layer), one.head): one.role for one in real.seen.roles(tokens=real.tokens)}
    tab.do(lambda: tab.page.select_option("#by", ""))
    for role in ("previous", "first", None):
        tab.do(lambda role=role: tab.page.select_option("#role", role or "-"))
        assert set(shown(tab)) == {head for head, one in roles.items() if one == role}
    tab.do(lambda: tab.page.select_option("#role", ""))
    tab.do(lambda: tab.page.select_option("#sort", "role"))
    tab.do(lambda: tab.page.uncheck("#down"))
    order = [roles[head] or "~" for head in shown(tab)]
    assert order == sorted(order)


def test_colour_by_role(look: Callable[..., Look], real: Written) -> None:
    tab = look(real, "#view=model")
    roles = {(real.seen.layers.index(one.layer), one.head): one.role for one in real.seen.roles(tokens=real.tokens)}
    seen = tab.ask(
        "[...document.querySelectorAll('a.head')].map(a => [+a.dataset.layer, +a.dataset.head, getComputedStyle(a).borderTopColor])"
    )
    colours = {}
    for layer, head, colour in seen:
        colours.setdefault(roles[layer, head], set()).add(colour)
    assert all(len(found) == 1 for found in colours.values())
    for role, found in colours.items():  # as in figures: classes of words share one, and so do relations of syntax
        if role:
            wanted = color_of(role)
            assert found == {f"rgb({', '.join(str(int(wanted[i : i + 2], 16)) for i in (1, 3, 5))})"}
    names = [role for role in colours if role]
    assert sorted(tab.texts(".roles .badge")) == sorted(sign_of(role) for role in names)


def test_from_the_model_to_a_head(look: Callable[..., Look], real: Written) -> None:
    tab = look(real, "#view=model")
    tab.click('a.head[data-layer="3"][data-head="7"]')
    assert tab.page.locator("section.head").is_visible()
    assert tab.hash == {"view": "head", "layer": "3", "head": "7"}
    tab.do(tab.page.go_back)
    assert tab.page.locator("section.model").is_visible()
    assert tab.hash == {"view": "model"}


def test_the_clearest_head_is_the_first_to_be_seen(look: Callable[..., Look], real: Written) -> None:
    tab = look(real, "#view=head")
    layer, head = tab.ask("regard.run.best")
    assert (tab.page.input_value("#pick-layer"), tab.page.input_value("#pick-head")) == (str(layer), str(head))


def test_resting_places(look: Callable[..., Look], real: Written) -> None:
    """A bar below each map: the share of the weight that is not beside the resting place; in words for those who hear."""
    tab = look(real, "#view=model")
    bars = tab.ask("""[...document.querySelectorAll('a.head')].map(a => [+a.dataset.layer, +a.dataset.head,
        +a.querySelector('.rest').dataset.rest, a.getAttribute('aria-label'),
        a.querySelector('.share').getBoundingClientRect().width / a.querySelector('.rest').getBoundingClientRect().width])""")
    roles = real.seen.roles(tokens=real.tokens)
    assert len(bars) == 72
    for layer, head, share, name, wide in bars:
        wanted = 1 - roles[layer, head].rest
        assert share == pytest.approx(wanted, abs=1e-4)
        assert wide == pytest.approx(wanted, abs=0.02)
        assert f"rests {wanted:.2f}" in name
    tab = look(real, "#view=head&layer=1&head=8")
    role = roles[1, 8]
    assert f"takes {1 - role.rest:.2f} of its weight, and makes {role.output:.2f} of its output" in tab.text("#rests")


@pytest.mark.parametrize("layer, head", [(1, 8), (2, 4), (3, 1), (5, 7)])
def test_the_resting_place_is_set_aside(look: Callable[..., Look], real: Written, layer: int, head: int) -> None:
    """What is left of each query is divided by its sum; the steps are those of that."""
    tab = look(real, f"#view=head&layer={layer}&head={head}")
    tab.do(lambda: tab.page.check("#aside"))
    aside = Scene(real.seen, real.tokens)[layer].aside[head]
    weights = real.weights(layer, head).masked_fill(aside[None], 0.0)
    weights = weights / weights.sum(1, keepdim=True)
    for i in (0, 3, 9, 12, 16):
        for j in range(17):
            tab.over(i + 0.5, j + 0.5, (0, 17, 0, 17))
            assert abs(float(tab.readout["value"]) - float(weights[i, j])) <= float(tab.readout["step"]) < 0.02
    names = [real.tokens[key] for key in aside.nonzero().flatten().tolist()]
    assert tab.text("#without").startswith(f"Set aside: {', '.join(names)}.")
    strongest = [float(row.split("\t")[2]) for row in tab.texts("#strongest tbody tr")]
    assert strongest == pytest.approx(weights.flatten().topk(12).values.tolist(), abs=1e-3)
    tab.click("#tab-model")  # the switch is the same everywhere
    assert tab.page.is_checked("#aside")
    tab.until("[...document.querySelectorAll('a.head')].slice(0, 24).every(a => a.painted)")
    tab.page.wait_for_timeout(100)
    thumb = tab.ask("document.querySelector('.thumb').toDataURL()")
    tab.do(lambda: tab.page.uncheck("#aside"))
    tab.until("document.querySelector('a.head').painted")
    tab.page.wait_for_timeout(100)
    assert tab.ask("document.querySelector('.thumb').toDataURL()") != thumb
    tab.do(lambda: tab.page.uncheck("#specials"))
    tab.until("document.querySelector('.thumb').width === 15")


def test_a_head_that_looks_everywhere_stays_pale(look: Callable[..., Look], folder: Path) -> None:
    """The strongest colour is that of 8 times the uniform weight, at least; the legend says so."""
    layer = regard.MultiHeadAttention(8, num_heads=2)
    torch.manual_seed(3)
    with regard.watch(layer, keep="qk") as seen, torch.no_grad():
        layer(torch.randn(1, 40, 8) * 0.01)
    page = write(folder / "pale.html", seen, [f"t{i}" for i in range(40)])
    tab = look(page, "#view=head&layer=0&head=1&scale=linear")
    most = float(page.weights(0, 1).max())
    assert most < 0.03
    assert tab.ask("regard.view.map.picture.top") == pytest.approx(8 / 40)
    assert "0.2" in tab.text(".legend")
    assert f"8 × the uniform weight; the largest here is {float(f'{most:.3g}'):g}" in tab.text(".legend")
    darkest = "c => c.getContext('2d').getImageData(0, 0, c.width, c.height).data.reduce((a, b) => Math.min(a, b))"
    assert tab.ask(f"({darkest})(document.getElementById('map'))") > 150
    tab.click("#tab-model")
    tab.until("document.querySelector('a.head').painted")
    tab.page.wait_for_timeout(100)
    assert tab.ask(f"({darkest})(document.querySelector('.thumb'))") > 150


def test_change_between_runs(look: Callable[..., Look], ablated: Written, real: Written) -> None:
    """Heads by how much of their weight lies elsewhere in the other run."""
    tab = look(ablated, "#view=model")
    tab.do(lambda: tab.page.select_option("#sort", "change"))
    tab.do(lambda: tab.page.check("#down"))
    names = ("intact", "without 0.2")
    moved = {}
    for layer in range(6):
        for head in range(12):
            a, b = (ablated.weights(layer, head, name) for name in names)
            moved[layer, head] = float((a - b).abs().sum(1).mean() / 2)
    said = tab.ask(
        "[...document.querySelectorAll('a.head')].map(a => [[+a.dataset.layer, +a.dataset.head], +a.dataset.change])"
    )
    assert [value for _, value in said] == sorted((value for _, value in said), reverse=True)
    for place, value in said:
        assert value == pytest.approx(moved[tuple(place)], abs=1e-3)
    assert tab.text(".caption >> nth=0") == f"{float(f'{said[0][1]:.3g}'):g}"
    tab.do(lambda: tab.page.select_option("#by", "change"))
    tab.do(lambda: tab.page.fill("#least", "0.05") or tab.page.press("#least", "Enter"))
    assert set(shown(tab)) == {tuple(place) for place, value in said if value >= 0.05}
    assert 0 < len(shown(tab)) < 72
    tab.do(lambda: tab.page.select_option("#run", "1"))  # the same, seen from the other run
    assert set(shown(tab)) == {tuple(place) for place, value in said if value >= 0.05}
    alone = look(real, "#view=model&sort=change&by=change&least=2")
    assert len(shown(alone)) == 72
    assert "change" not in alone.ask("[...document.querySelectorAll('#by option')].map(o => o.value)")


def test_words_are_explained(look: Callable[..., Look], real: Written) -> None:
    """On hover, on focus and by a tap; Escape hides it; a screen reader is told."""
    tab = look(real, "#view=model")
    told = "(node => document.getElementById(node.getAttribute('aria-describedby')).textContent)"
    names = tab.texts(".roles li .term")
    texts = tab.ask(f"[...document.querySelectorAll('.roles .term')].map({told})")
    assert len(texts) == len(set(names)) > 5
    assert all(len(text.split()) > 2 and text.endswith(".") for text in texts)
    previous = names.index("previous")
    tab.page.hover(f"#role-{previous}")
    assert tab.text("#tip") == "Looks at the token just before." == texts[previous]
    tab.page.mouse.move(5, 500)
    tab.until("document.getElementById('tip').hidden")
    tab.page.focus(f"#role-{previous}")
    assert tab.page.locator("#tip").is_visible()
    tab.press("Escape")
    assert not tab.page.locator("#tip").is_visible()
    tab.click("#tab-table")
    columns = tab.texts("thead th")
    texts = tab.ask(f"[...document.querySelectorAll('thead button')].map({told})")
    assert all(len(text.split()) > 3 for text in texts)
    assert not [name for name, text in zip(columns, texts, strict=True) if "of your own" in text]
    tab.page.focus("#sort-entropy")
    assert tab.text("#tip").startswith("How far a query spreads its weights")
    tab.do(lambda: tab.ask("regard.state.set({view: 'head', layer: 0, head: 2})"))
    tab.page.hover("#the-role")
    assert tab.text("#tip") == "Looks at the token just before."
    tab.page.hover("#measure-1")
    assert "largest weight" in tab.text("#tip")


def test_previous_and_next(look: Callable[..., Look], real: Written) -> None:
    tab = look(real, "#view=head&layer=1&head=11")

    def now() -> tuple[str, str]:
        return tab.page.input_value("#pick-layer"), tab.page.input_value("#pick-head")

    tab.press("]")
    assert now() == ("2", "0")
    tab.press("[", "[")
    assert now() == ("1", "10")
    tab.press("ArrowRight")
    assert now() == ("1", "11")
    tab.press("ArrowLeft", "}")
    assert now() == ("2", "10")
    tab.press("{", "{", "{")
    assert now() == ("0", "10")
    tab.press("[", *["ArrowLeft"] * 10)
    assert now() == ("5", "11")  # around the corner
    tab.click("#next")
    assert now() == ("0", "0")


def test_tokens_of_the_head_view(look: Callable[..., Look], real: Written) -> None:
    tab = look(real, "#view=head&layer=2&head=5")
    assert tab.texts(".queries button") == real.tokens == tab.texts(".keys button")
    labels = [plain(text) for text in tab.page.locator(".labels text").all_text_contents()]
    assert labels == real.tokens * 2  # none is cut short
    tab.do(lambda: tab.page.uncheck("#specials"))
    assert tab.texts(".queries button") == real.tokens[1:-1]
    tab.do(lambda: tab.page.check("#words"))
    assert tab.texts(".keys button")[-3:] == [",", "unbelievably", "quickly"]
    tab.ask("document.getElementById('threshold').value = 0.3")
    tab.page.dispatch_event("#threshold", "input")
    assert "at least 0.3" in tab.text("#filters")
    tab.ask("document.getElementById('most').value = 1")
    tab.page.dispatch_event("#most", "input")
    assert tab.page.locator(".lines path").count() <= 11
    assert (tab.hash["threshold"], tab.hash["top"]) == ("0.3", "1")


def test_choosing_a_token(look: Callable[..., Look], real: Written) -> None:
    """A click in the map chooses; the links, the flow and the address know; a second click lets go."""
    tab = look(real, "#view=head&layer=1&head=2")
    every = tab.page.locator(".lines path").count()
    tab.over(6.5, 4.5, (0, 17, 0, 17))
    tab.page.mouse.down()
    tab.page.mouse.up()
    assert (tab.hash["q"], tab.hash["k"]) == ("6", "4")
    assert tab.page.locator(".mark rect").count() == 1
    assert 0 < tab.page.locator(".lines path").count() < every
    assert tab.page.locator("#query-6").get_attribute("aria-pressed") == "true"
    tab.page.mouse.move(5, 5)  # what is chosen stays in sight
    assert (tab.readout["query"], tab.readout["key"]) == ("6-7", "4-5")
    tab.click("#tab-flow")
    assert tab.page.input_value("#flow-token") == "6"
    tab.click("#tab-head")
    assert tab.readout["query"] == "6-7"
    tab.click("#query-6")
    tab.page.mouse.move(5, 5)
    tab.page.locator("#tab-head").focus()
    assert tab.page.locator(".lines path").count() == every
    assert "q" not in tab.hash
    assert tab.readout == {}


def test_flow_opens_heads(look: Callable[..., Look], real: Written) -> None:
    tab = look(real, "#view=flow&layer=2&head=0&q=6")
    tab.click("#open-5")
    assert tab.page.locator("#open-5").get_attribute("aria-expanded") == "true"
    assert tab.page.locator(".opened").count() == 1
    assert tab.texts(".opened #flow-keys tbody button") == real.tokens
    stored = tab.ask("[...document.querySelectorAll('#flow-keys tbody tr')].map(row => +row.dataset.stored)")
    assert stored == pytest.approx(real.weights(2, 5)[6].tolist(), abs=1e-4)
    tab.click("#open-5")
    assert tab.page.locator(".opened").count() == 0
    tab.do(lambda: tab.page.select_option("#flow-layer", "4"))
    tab.do(lambda: tab.page.select_option("#flow-token", "3"))
    assert (tab.hash["layer"], tab.hash["q"]) == ("4", "3")
    assert f"The token {real.tokens[3]} (number 3)" in tab.text(".stage >> nth=0")


def test_table(look: Callable[..., Look], real: Written, tmp_path: Path) -> None:
    tab = look(real, "#view=table")
    assert tab.page.locator("tbody tr").count() == 72
    tab.click("#sort-distance")
    distance = measures(real.seen, "distance")
    heads = [tuple(int(x) for x in row.split("\t")[:2]) for row in tab.texts("tbody tr")]
    assert heads == sorted(distance, key=lambda head: distance[head])
    assert tab.page.locator("th[aria-sort=ascending]").inner_text().startswith("distance")
    tab.click("#sort-distance")
    heads = [tuple(int(x) for x in row.split("\t")[:2]) for row in tab.texts("tbody tr")]
    assert heads == sorted(distance, key=lambda head: -distance[head])
    tab.page.fill("#filter", "first 3.")
    rows = tab.texts("tbody tr")
    assert 0 < len(rows) < 12
    assert all(row.startswith("3\t") and "first" in row for row in rows)
    assert tab.page.evaluate("document.activeElement.id") == "filter"
    tab.page.fill("#filter", "")
    with tab.page.expect_download() as waiting:
        tab.page.click("#csv")
    waiting.value.save_as(tmp_path / "heads.csv")
    found = list(csv.DictReader(io.StringIO((tmp_path / "heads.csv").read_text(encoding="utf-8"))))
    assert len(found) == 72
    table = {(row["layer"], row["head"]): row for row in real.seen.table()}
    roles = {(one.layer, one.head): one for one in real.seen.roles(tokens=real.tokens)}
    for row in found:
        key = (row["name"], int(row["head"]))
        assert real.seen.layers[int(row["layer"])] == row["name"]
        for name, value in table[key].items():
            if name not in ("layer", "head"):
                assert float(row[name]) == pytest.approx(value, rel=1e-5, abs=1e-30)
        assert row["role"] == (roles[key].role or "")
        assert row["also"] == ", ".join(roles[key].also if roles[key].role else [])
    assert [float(row["distance"]) for row in found] == sorted((float(row["distance"]) for row in found), reverse=True)


def test_a_cell_of_a_csv_is_no_formula(look: Callable[..., Look], folder: Path, tmp_path: Path) -> None:
    names = ['=cmd("a,b")', "\n=1+1", "\r\n@a", " \u00a0-2", "\x01+3", "\uff1d4", "\tplain", "a;=5", "plain"]

    class Odd(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name in names:
                self.add_module(name, regard.MultiHeadAttention(4, num_heads=1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.children():
                x = layer(x)
            return x

    with regard.watch(model := Odd(), keep="qk") as seen, torch.no_grad():
        model(torch.randn(1, 2, 4))
    tab = look(write(folder / "formula.html", seen, ["a", "b"]), "#view=table")
    with tab.page.expect_download() as waiting:
        tab.page.click("#csv")
    waiting.value.save_as(tmp_path / "heads.csv")
    saved = (tmp_path / "heads.csv").read_bytes().decode("utf-8")
    found = [row["name"] for row in csv.DictReader(io.StringIO(saved, newline=""))]
    assert found == [f"'{name}" for name in names[:-2]] + names[-2:]
    assert '"a;=5"' in saved  # (where a semicolon parts cells, it is one cell all the same)


@pytest.mark.parametrize("width", [1280, 390])
def test_columns_of_the_table(look: Callable[..., Look], real: Written, width: int) -> None:
    """Layers by number, with the module's name at hand; as many decimals in all rows; nothing is cut off for good."""
    tab = look(real, "#view=table", width=width, height=844)
    columns = tab.texts("thead th")
    assert columns[:2] == ["layer ▴", "head"]
    rows = [row.split("\t") for row in tab.texts("tbody tr")]
    for name in ("entropy", "peak", "distance", "offset", "rests"):
        column = [row[columns.index(name)] for row in rows]
        assert len({len(value.partition(".")[2]) for value in column}) == 1
    title = tab.page.locator("tbody tr >> nth=40 >> td >> nth=0").get_attribute("title")
    assert title == real.seen.layers[3]
    aligned = "[...document.querySelectorAll('td.number')].every(td => getComputedStyle(td).textAlign === 'right')"
    assert tab.ask(aligned)
    assert tab.overflow() <= 0
    tab.ask("document.querySelector('.scroll').scrollLeft = 1e6")
    last = tab.page.locator("tbody tr >> nth=0 >> td").last.bounding_box()
    assert last["x"] + last["width"] <= width


def test_from_the_table_to_a_head(look: Callable[..., Look], real: Written) -> None:
    tab = look(real, "#view=table&tsort=peak&tdown=1")
    first = tab.text("tbody tr >> nth=0").split("\t")
    tab.click("tbody tr >> nth=0 >> a")
    assert [tab.page.input_value("#pick-layer"), tab.page.input_value("#pick-head")] == first[:2]


def test_compare_two_heads(look: Callable[..., Look], real: Written) -> None:
    tab = look(real, "#view=compare")
    tab.do(lambda: tab.page.select_option("#layer-A", "2"))
    tab.do(lambda: tab.page.select_option("#head-A", "3"))
    tab.do(lambda: tab.page.select_option("#layer-B", "4"))
    tab.do(lambda: tab.page.select_option("#head-B", "6"))
    assert tab.hash["other"] == "0.4.6"
    difference = real.weights(2, 3) - real.weights(4, 6)
    first = tab.text("#changes tbody tr >> nth=0").split("\t")
    at = int(difference.abs().argmax())
    assert first[:2] == [real.tokens[at // 17], real.tokens[at % 17]]
    assert float(first[4]) == pytest.approx(float(difference.flatten()[at]), abs=1e-4)
    tab.over(8, 8, (0, 17, 0, 17), "#map-1")  # the three maps zoom together
    tab.page.mouse.wheel(0, -60)
    windows = tab.ask("Object.values(regard.view.maps).map(m => m.window.join())")
    assert len(set(windows)) == 1
    assert windows[0] != "0,17,0,17"
    assert tab.hash["zoom"]


def test_compare_two_texts(look: Callable[..., Look], minilm: Any, real: Written, folder: Path) -> None:
    text = "She said that the old house was haunted."
    with regard.watch(minilm, keep="qkv") as seen, torch.no_grad():
        minilm(minilm.encode(text))
    tokens = {"cat": real.tokens, "house": minilm.tokenize(text)}
    both = write(folder / "texts.html", {"cat": real.seen, "house": seen}, tokens)
    tab = look(both, "#view=compare&layer=1&head=8")
    assert tab.page.locator("canvas.plane").count() == 3
    assert "(of 17 × 17 and 11 × 11); all others are left out" in tab.text(".compare")
    assert tab.page.input_value("#run-B") == "1"
    tab.do(lambda: tab.page.select_option("#run-A", "1"))
    tab.do(lambda: tab.page.select_option("#run-B", "1"))
    assert tab.page.locator("canvas.plane").count() == 3
    tab.click("#tab-head")
    assert tab.texts(".queries button") == tokens["house"]
    tab.do(lambda: tab.page.select_option("#run", "0"))
    assert tab.texts(".queries button") == tokens["cat"]


def test_runs(look: Callable[..., Look], ablated: Written) -> None:
    """Another run of the same text: the same place of the same map."""
    tab = look(ablated, "#view=head&layer=3&head=4&q=5&k=2&zoom=2,9,1,8")
    for run, name in ((1, "without 0.2"), (0, "intact")):
        tab.do(lambda run=run: tab.page.select_option("#run", str(run)))
        assert (tab.readout["query"], tab.readout["key"]) == ("5-6", "2-3")
        assert float(tab.readout["value"]) == pytest.approx(float(ablated.weights(3, 4, name)[5, 2]), abs=1e-4)
        assert tab.hash["zoom"] == "2,9,1,8"
    without = ablated.runs["without 0.2"]
    tab = look(ablated, "#view=table&run=1")
    entropy = measures(without, "entropy")
    row = dict(zip(tab.texts("thead th"), tab.text("tbody tr >> nth=40").split("\t"), strict=True))
    assert float(row["entropy"]) == pytest.approx(entropy[3, 4], rel=1e-3)
