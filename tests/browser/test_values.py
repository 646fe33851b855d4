"""What the page says is what the tensors hold, within the step that it states."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from browser.pages import Look, Written, pooled, some_cells, stack, write
from torch import Tensor

import regard


def agree(tab: Look, weights: Tensor, cells: list[tuple[int, int]], window: Any, bits: int = 16) -> None:
    """The value under the pointer at some cells, each a token by a token."""
    most = float(weights.max())
    for i, j in cells:
        tab.over(i + 0.5, j + 0.5, window)
        said = tab.readout
        assert (said["query"], said["key"]) == (f"{i}-{i + 1}", f"{j}-{j + 1}")
        step = float(said["step"])
        assert 0 < step <= 2 * most / (2**bits - 1) * 1.001  # (a step as large as a weight would agree with anything)
        # within a step is what is promised; rounding to the nearest code gives half of one
        assert abs(float(said["value"]) - float(weights[i, j])) <= 0.51 * step + 1e-9, (i, j)


@pytest.mark.parametrize("layer, head", [(0, 2), (1, 8), (3, 0), (5, 11)])
def test_under_the_pointer(look: Callable[..., Look], real: Written, layer: int, head: int) -> None:
    tab = look(real, f"#view=head&layer={layer}&head={head}")
    agree(tab, real.weights(layer, head), some_cells(range(17), range(17), 25, layer), (0, 17, 0, 17))


def test_after_zooming(look: Callable[..., Look], real: Written) -> None:
    tab = look(real, "#view=head&layer=2&head=5")
    tab.over(11.3, 6.2, (0, 17, 0, 17))
    for _ in range(3):
        tab.page.mouse.wheel(0, -60)
    window = [float(x) for x in tab.hash["zoom"].split(",")]
    r0, r1, c0, c1 = window
    assert 3 <= r1 - r0 < 8
    assert 3 <= c1 - c0 < 8
    assert r0 < 11.3 < r1
    assert c0 < 6.2 < c1
    inside = some_cells(range(int(r0) + 1, int(r1)), range(int(c0) + 1, int(c1)), 20)
    agree(tab, real.weights(2, 5), inside, window)
    before = tab.hash["zoom"]
    tab.over(11, 6, window)  # and after panning
    tab.page.mouse.down()
    tab.over(12.4, 7.4, window)
    tab.page.mouse.up()
    moved = [float(x) for x in tab.hash["zoom"].split(",")]
    assert tab.hash["zoom"] != before
    assert moved[0] == pytest.approx(r0 - 1.4, abs=0.05)
    assert moved[2] == pytest.approx(c0 - 1.4, abs=0.05)
    inside = some_cells(range(int(moved[0]) + 1, int(moved[1])), range(int(moved[2]) + 1, int(moved[3])), 10)
    agree(tab, real.weights(2, 5), inside, moved)


def test_a_screen_with_more_pixels(look: Callable[..., Look], real: Written) -> None:
    tab = look(real, "#view=head&layer=4&head=3", device={"device_scale_factor": 2})
    agree(tab, real.weights(4, 3), some_cells(range(17), range(17), 10), (0, 17, 0, 17))


def test_eight_bits(look: Callable[..., Look], folder: Any) -> None:
    """Where two bytes for each weight are too many, it is one."""
    page = write(folder / "eight.html", stack(1, 2, 149), [str(i) for i in range(149)], limit=500_000)
    tab = look(page, "#view=head&layer=0&head=1")
    assert (tab.ask("regard.layer.map.bits"), tab.ask("regard.layer.pooled")) == (8, False)
    # (within a cell of a few pixels, the middle is where the pointer is sure to be)
    agree(tab, page.weights(0, 1), some_cells(range(149), range(149), 20), (0, 149, 0, 149), bits=8)


def test_words_and_specials(look: Callable[..., Look], real: Written) -> None:
    """Rows of a word's pieces are averaged, columns added up; specials fall away."""
    tab = look(real, "#view=head&layer=2&head=4&words=1&specials=0")
    assert tab.texts(".queries button")[-2:] == ["unbelievably", "quickly"]
    weights = real.weights(2, 4)
    groups = [(i, i + 1) for i in range(1, 10)] + [(10, 15), (15, 16)]
    assert len(tab.texts(".queries li")) == len(groups)
    window = (0, len(groups), 0, len(groups))
    for i, j in [(9, 9), (9, 2), (2, 9), (10, 9), (9, 10), (0, 0)]:
        (r0, r1), (c0, c1) = groups[i], groups[j]
        tab.over(i + 0.5, j + 0.5, window)
        said = tab.readout
        wanted = float(weights[r0:r1, c0:c1].sum(1).mean())
        assert (said["query"], said["key"]) == (f"{r0}-{r1}", f"{c0}-{c1}")
        assert abs(float(said["value"]) - wanted) <= float(said["step"])
        assert float(said["step"]) < 1e-3


def test_more_keys_than_queries(look: Callable[..., Look], folder: Any) -> None:
    torch.manual_seed(1)
    layer = torch.nn.MultiheadAttention(15, 3, batch_first=True).eval()
    with regard.watch(layer, keep="qkv") as seen, torch.no_grad():
        layer(torch.randn(1, 3, 15) * 4, *[torch.randn(1, 17, 15) * 4] * 2)
    wide = write(folder / "wide.html", seen, ([f"k{i}" for i in range(17)], ["a", "b", "c"]))
    tab = look(wide, "#view=head&layer=0&head=2")
    agree(tab, wide.weights(0, 2), some_cells(range(3), range(17), 20), (0, 3, 0, 17))


def test_a_pooled_map(look: Callable[..., Look], long: Written) -> None:
    """Cells are means over blocks; crops are exact."""
    tab = look(long, "#view=head&layer=1&head=1")
    _, rows, cols = tab.ask("regard.layer.map.shape")
    assert rows < 701
    weights = long.weights(1, 1)
    cells = pooled(weights, rows, cols)
    for i, j in some_cells(range(rows), range(cols), 40):
        tab.over(i + 0.5, j + 0.5, (0, rows, 0, cols))
        said = tab.readout
        assert said["query"] == f"{-(-i * 701 // rows)}-{-(-(i + 1) * 701 // rows)}"  # (rounded up)
        assert abs(float(said["value"]) - float(cells[i, j])) <= float(said["step"])
        assert float(said["step"]) <= 2 * float(cells.max()) / 255 * 1.001
    for number in range(tab.page.locator(".crop").count()):
        button = tab.page.locator(".crop").nth(number)
        (q0, q1), (k0, k1) = ([int(x) for x in part.split("–")] for part in button.inner_text().split(" → "))
        tab.do(button.click)
        tab.ask("window.scrollTo(0, 0)")
        window = (q0, q1 + 1, k0, k1 + 1)
        for q, k in some_cells(range(q0 + 1, q1), range(k0 + 1, k1), 15, number):
            tab.over(q + 0.5, k + 0.5, window)
            said = tab.readout
            assert (said["query"], said["key"]) == (f"{q}-{q + 1}", f"{k}-{k + 1}")
            assert abs(float(said["value"]) - float(weights[q, k])) <= float(said["step"]) < 0.02
    assert number >= 0


def test_links_of_a_pooled_map(look: Callable[..., Look], long: Written) -> None:
    """The strongest links are exact, wherever they are."""
    tab = look(long, "#view=head&layer=0&head=2")
    weights = long.weights(0, 2)
    found = [row.split("\t") for row in tab.texts("#strongest tbody tr")]
    assert len(found) == 12
    for query, key, weight in found:
        exact = float(weights[int(query.split()[0]), int(key.split()[0])])
        assert float(weight) == pytest.approx(exact, abs=0.0045)
    assert float(found[0][2]) == pytest.approx(float(weights.max()), abs=0.0045)
    q = int(found[0][0].split()[0])
    tab.do(lambda: tab.ask("q => regard.state.set({q})", q))
    links = tab.ask("q => regard.layer.strongest(2, q, 8)", q)
    values, keys = weights[q].topk(len(links))
    assert [k for k, _ in links] == keys.tolist()
    assert [w for _, w in links] == pytest.approx(values.tolist(), abs=0.0045)


def test_links_of_some_queries(look: Callable[..., Look], folder: Path) -> None:
    """Of a text so long that not every query can have one: the strongest of each head."""
    longer = write(folder / "longer.html", stack(2, 12, 701, 24), [f"{i} tok" for i in range(701)], limit=400_000)
    tab = look(longer, "#view=head&layer=1&head=2")
    weights = longer.weights(1, 2)
    _, rows, k = tab.ask("regard.layer.links.keys.shape")
    assert k == 1
    assert 100 < rows < 701
    assert f"The strongest link of {rows} of 701 queries" in tab.text(".links .note")
    linked = 0
    for q, links in enumerate(tab.ask("[...Array(701).keys()].map(q => regard.layer.strongest(2, q, 8))")):
        for key, weight in links:
            linked += 1
            assert weight == pytest.approx(float(weights[q].max()), abs=0.0045)
            assert weight == pytest.approx(float(weights[q, key]), abs=0.0045)
            said = tab.ask("([q, k]) => regard.layer.exactly(2, q, k).value", [q, key]) if linked < 9 else weight
            assert said == pytest.approx(weight, abs=0.01)
    assert linked == rows
    found = [row.split("\t") for row in tab.texts("#strongest tbody tr")]
    assert len(found) == 12
    for query, key, weight in found:
        exact = float(weights[int(query.split()[0]), int(key.split()[0])])
        assert float(weight) == pytest.approx(exact, abs=0.0045)


def test_cells_of_links_are_read_exactly(look: Callable[..., Look], long: Written) -> None:
    """Where one zooms in, what stands at a token is what is read there."""
    tab = look(long, "#view=head&layer=1&head=0")
    _, rows, cols = tab.ask("regard.layer.map.shape")
    crops = tab.ask("regard.layer.crops.filter(c => c.head === 0).map(c => [c.row, c.col])")
    q, k = next(
        (q, k)
        for q in range(40, 660)
        for k, _ in tab.ask("q => regard.layer.strongest(0, q, 1)", q)
        if 40 < k < 660 and not any(r <= q < r + 64 and c <= k < c + 64 for r, c in crops)
    )
    window = [(q - 20) * rows / 701, (q + 20) * rows / 701, (k - 20) * cols / 701, (k + 20) * cols / 701]
    tab.do(lambda: tab.ask("zoom => regard.state.set({zoom: zoom.join(',')}) || regard.show()", window))
    tab.over((q + 0.5) * rows / 701, (k + 0.5) * cols / 701, window)
    said = tab.readout
    assert (said["query"], said["key"]) == (f"{q}-{q + 1}", f"{k}-{k + 1}")
    assert abs(float(said["value"]) - float(long.weights(1, 0)[q, k])) <= float(said["step"]) < 0.02


def test_flow(look: Callable[..., Look], real: Written) -> None:
    """Vectors, weights and what each head adds are those of the layer."""
    token, layer = 8, real.seen[3]
    tab = look(real, f"#view=flow&layer=3&q={token}&head=7")
    added = layer.projected()[0, :, token]  # (H, W)
    norms = added.norm(dim=-1)
    cosines = torch.nn.functional.cosine_similarity(added, added.sum(0), dim=-1)
    rows = tab.ask("[...document.querySelectorAll('.row[data-head]')].map(r => [+r.dataset.norm, +r.dataset.cosine])")
    assert [norm for norm, _ in rows] == pytest.approx(norms.tolist(), abs=1e-3 * float(norms.max()))
    assert [cosine for _, cosine in rows] == pytest.approx(cosines.tolist(), abs=1e-3)
    for name, exact in (
        ("q", layer.q[0, 7]),
        ("output", layer.output[0, 7]),
        ("k", layer.k[0, 7]),
        ("v", layer.v[0, 7]),
    ):
        shown = tab.ask("([name, at]) => [...regard.layer.vector(name, 7, at)]", [name, token])
        assert shown == pytest.approx(exact[token].tolist(), abs=1e-3 * float(exact[token].abs().max()))
    _weight, bias = layer.projection
    whole = added.sum(0) + bias
    assert tab.ask("at => [...regard.layer.vector('result', at)]", token) == pytest.approx(whole.tolist(), abs=2e-3)
    given = layer.input[0, token]
    assert tab.ask("at => [...regard.layer.vector('input', at)]", token) == pytest.approx(given.tolist(), abs=2e-3)
    said = tab.text("#cancel")
    assert f"{float(norms.sum()):.4g}" in said
    assert f"{float(added.sum(0).norm()):.4g}" in said
    assert f"{100 * (1 - float(added.sum(0).norm() / norms.sum())):.1f}%" in said
    against = int((cosines < 0).sum())
    assert (f"{against} of 12 heads" if against else "No head points against") in said
    shapes = " ".join(tab.texts(".stage code"))
    assert "x (17, 384)" in shapes
    assert tab.text(".arrow >> nth=0").startswith("↓ q = x W_q: (17, 384) → (12, 17, 32)")
    # the numbers under the pointer are those of the strip
    strip = tab.page.locator('.strip[aria-label^="q of head 7"]')
    strip.scroll_into_view_if_needed()
    box = strip.bounding_box()
    tab.page.mouse.move(box["x"] + box["width"] * 4.5 / 32, box["y"] + 9)
    assert tab.text("#flow-readout").startswith("q of head 7[4] = ")
    assert float(tab.text("#flow-readout").split("= ")[1].split()[0]) == pytest.approx(
        float(layer.q[0, 7, token, 4]), abs=2e-3
    )


def test_heads_that_cancel(look: Callable[..., Look], folder: Any) -> None:
    """Two heads that add the same and its opposite: the page shows that nothing is left of them."""
    torch.manual_seed(0)
    layer = regard.MultiHeadAttention(8, num_heads=2, bias=False)
    first = dict(layer.named_parameters())
    for name, parameter in first.items():
        half = parameter.data.shape[0] // 2
        if "out" in name:
            parameter.data[:, 4:] = -0.9 * parameter.data[:, :4]
        else:
            parameter.data[half:] = parameter.data[:half]
    with regard.watch(layer, keep="qkv") as seen, torch.no_grad():
        layer(torch.randn(1, 3, 8))
    added = seen[0].projected()[0, :, 1]
    assert torch.nn.functional.cosine_similarity(*added, dim=0) == pytest.approx(-1, abs=1e-5)
    tab = look(write(folder / "cancel.html", seen, ["a", "b", "c"]), "#view=flow&q=1")
    cosines = tab.ask("[...document.querySelectorAll('.row[data-head]')].map(r => +r.dataset.cosine)")
    assert cosines == pytest.approx([1, -1], abs=1e-3)
    assert "1 of 2 heads point against the sum" in tab.text("#cancel")
    assert "94.7% cancels" in tab.text("#cancel")  # 1 - 0.1 / 1.9
    colours = tab.ask("[...document.querySelectorAll('[data-name=cosine] rect')].map(r => getComputedStyle(r).fill)")
    assert colours[0] != colours[1]


def test_difference(look: Callable[..., Look], ablated: Written) -> None:
    """With and without a head, and what is between."""
    tab = look(ablated, "#view=compare&layer=3&head=1")
    a, b = ablated.weights(3, 1, "intact"), ablated.weights(3, 1, "without 0.2")
    assert float((a - b).abs().max()) > 0.01  # (the head that was taken out matters)
    for selector in ("#map-0", "#map-1", "#map-2"):
        for i, j in some_cells(range(17), range(17), 6):
            tab.over(i + 0.5, j + 0.5, (0, 17, 0, 17), selector)
            said = json.loads(tab.ask("document.getElementById('compare-readout').dataset.value"))
            assert said["A"] == pytest.approx(float(a[i, j]), abs=1e-4)
            assert said["B"] == pytest.approx(float(b[i, j]), abs=1e-4)
            assert said["A − B"] == pytest.approx(float(a[i, j] - b[i, j]), abs=1e-4)
    largest = [float(row.split("\t")[-1]) for row in tab.texts("#changes tbody tr")]
    exact = (a - b).flatten()
    wanted = exact[exact.abs().topk(10).indices]
    assert largest == pytest.approx(wanted.tolist(), abs=2e-4)


def test_links(look: Callable[..., Look], real: Written) -> None:
    """Lines between tokens: as thick as the weight, above the threshold, at most so many of each query."""
    tab = look(real, "#view=head&layer=1&head=3&threshold=0.1&top=2")
    weights = real.weights(1, 3)
    values, _ = weights.topk(2)
    wanted = sorted(float(x) for x in values.flatten() if x >= 0.1)
    widths = tab.ask("[...document.querySelectorAll('.lines path')].map(p => +p.getAttribute('stroke-width'))")
    assert sorted(widths) == pytest.approx([max(0.5, 7 * x) for x in wanted], abs=0.01)
    tab.page.hover(".queries li:nth-child(6) button")  # what the sixth token looks at
    mine = [float(x) for x in values[5] if x >= 0.1]
    assert sorted(float(x) for x in tab.texts(".keys .weight") if x) == pytest.approx(sorted(mine), abs=0.006)
    tab.page.hover(".keys li:nth-child(1) button")  # who looks at the first
    _, best = weights.topk(2)
    looking = [float(weights[q, 0]) for q in range(17) if 0 in best[q].tolist() and weights[q, 0] >= 0.1]
    assert sorted(float(x) for x in tab.texts(".queries .weight") if x) == pytest.approx(sorted(looking), abs=0.006)
