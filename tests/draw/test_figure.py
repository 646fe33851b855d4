"""Figures: what is drawn is what was seen, and it fits the page; what cannot be drawn is refused."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import regard
from regard.draw.figure import figure
from regard.draw.figure.legends import sign_of
from regard.heads import ROLES, Record
from regard.measures import Heatmap

matplotlib = pytest.importorskip("matplotlib")
from draw.figures import KINDS, axes, image, options, png, random_weights, record, shifted, texts, ticks  # noqa: E402
from matplotlib.text import Text  # noqa: E402


def test_all_heads_are_their_weights(small: Record) -> None:
    drawn = figure(small)
    for layer in range(2):
        for head in range(3):
            torch.testing.assert_close(image(drawn, f"{layer}.{head}"), small[layer].weights(head, batch=0))
    torch.testing.assert_close(image(drawn, "0.1"), shifted(7)[0, 0])
    assert {"layer", "head", "0", "1", "2", "←", "previous 1", "attention weight; queries down, keys across"} <= {
        *texts(drawn)
    }


def test_maps_stand_with_layers_down_and_heads_across(small: Record) -> None:
    drawn = figure(small)
    places = {
        i.get_label(): i.get_extent() for i in drawn.axes[0].images
    }  # left, right, bottom, top; y grows downwards
    assert list(places) == ["0.0", "0.1", "0.2", "1.0", "1.1", "1.2"]
    assert places["0.0"][0] < places["0.1"][0] < places["0.2"][0]
    assert places["0.0"][:2] == places["1.0"][:2]
    assert places["0.0"][3] < places["0.0"][2] < places["1.0"][3]


def test_pixels_of_a_map() -> None:
    """Dark where the head looks, paper where it does not; the first query on top."""
    drawn = figure(record(shifted(5)), layer=0, head=0, dpi=100)
    pixels, box = png(drawn)[..., :3], axes(drawn, "map").get_window_extent()
    cell = box.width / 5
    for row in range(5):
        for col in range(5):
            y, x = pixels.shape[0] - box.y1 + (row + 0.2) * cell, box.x0 + (col + 0.2) * cell
            light = pixels[int(y), int(x)].mean()
            assert light < 0.2 if col == max(row - 1, 0) else light > 0.99


def test_one_layer_has_its_tokens(small: Record) -> None:
    drawn = figure(small, layer=1)
    assert [i.get_label() for i in drawn.axes[0].images] == ["1.0", "1.1", "1.2"]
    torch.testing.assert_close(image(drawn, "1.2"), small[1].weights(2, batch=0))
    said = texts(drawn)
    assert "blocks.1" in said
    assert "head 2" in said
    assert said.count("cat") == 1 + 3  # queries beside the first map of a row, keys below each that none is below


@pytest.mark.parametrize("layer", [0, "blocks.0"])
def test_one_head(small: Record, layer: int | str) -> None:
    drawn = figure(small, layer=layer, head=1)
    torch.testing.assert_close(image(drawn, "0.1"), shifted(7)[0, 0])
    ax = axes(drawn, "map")
    assert ticks(ax.xaxis) == ticks(ax.yaxis) == small.tokens
    said = " ".join(texts(drawn))
    for part in ("blocks.0 · head 1", "entropy 0.00 nats", "query", "key"):
        assert part in said
    assert texts(drawn).count("1.00") == 7  # in the cells
    assert ticks(axes(drawn, "scale").yaxis)[::6] == ["0", "1"]


def test_kind_heads_with_layer_and_head_is_head(small: Record) -> None:
    assert figure(small, layer=0, head=1)._repr_png_() == figure(small, kind="head", layer=0, head=1)._repr_png_()  # type: ignore[attr-defined]


@pytest.mark.parametrize("n,m", [(600, 600), (520, 13), (7, 1031)])
def test_long_texts_are_pooled(n: int, m: int) -> None:
    weights = random_weights(1, 2, n, m)
    seen = record(weights)
    cells = [math.ceil(size / math.ceil(size / 256)) for size in (n, m)]
    down, across = (F.one_hot(torch.arange(size) * k // size, k).float() for size, k in zip((n, m), cells, strict=True))
    want = (down / down.sum(0)).T @ weights[0, 1] @ across
    drawn = figure(seen, layer=0, head=1)
    torch.testing.assert_close(image(drawn, "0.1"), want)
    torch.testing.assert_close(image(drawn, "0.1").sum(1), torch.ones(cells[0]))
    if n == 600:
        assert ticks(axes(drawn, "map").yaxis)[:2] == ["0–2", "24–26"]
    small = figure(seen)
    rows, cols = image(small, "0.1").shape
    assert rows <= 256
    assert cols <= 256
    torch.testing.assert_close(image(small, "0.1").sum(1), torch.ones(rows))


def test_labels_of_some_tokens_have_their_place() -> None:
    """Too many for each to be named, too few to be pooled."""
    n = 150
    drawn = figure(record(random_weights(1, 1, n, n)), [f"w{i}" for i in range(n)], layer=0, head=0)
    assert ticks(axes(drawn, "map").xaxis)[:3] == ["w0 0", "w4 4", "w8 8"]


def test_heatmaps_that_were_measured() -> None:
    weights = random_weights(1, 2, 12, 12)
    seen = record(weights, keep=None, measures=["entropy", Heatmap(12)])
    torch.testing.assert_close(image(figure(seen), "0.1"), weights[0, 1])
    torch.testing.assert_close(image(figure(seen, layer=0, head=1), "0.1"), weights[0, 1])


def test_heatmaps_from_a_file(tmp_path: Path) -> None:
    """Pooled when they were measured: a cell has the tokens that its label says."""
    pytest.importorskip("safetensors")
    weights = random_weights(1, 2, 30, 30)
    record(weights, keep=None, measures=[Heatmap(7, 30)]).save(tmp_path / "a.safetensors")
    drawn = figure(Record.load(tmp_path / "a.safetensors"), layer=0, head=1)
    labels = ticks(axes(drawn, "map").yaxis)
    assert labels == ["0–4", "5–8", "9–12", "13–17", "18–21", "22–25", "26–29"]
    for row, label in enumerate(labels):
        first, last = map(int, label.split("–"))
        torch.testing.assert_close(image(drawn, "0.1")[row], weights[0, 1, first : last + 1].mean(0))
    assert ticks(axes(drawn, "map").xaxis) == [str(i) for i in range(30)]


def test_roles(small: Record) -> None:
    drawn = figure(small, kind="roles")
    said = texts(drawn)
    counts = [small.roles(tokens=small.tokens).of(rule.name) for rule in ROLES]
    for rule, found in zip(ROLES, counts, strict=True):
        assert (rule.name in said) == bool(found)
        if found:
            assert said[said.index(rule.name) + 1] == str(len(found))
            assert said.count(sign_of(rule.name)) >= len(found) + 1  # in the cells, and in the legend


def test_the_role_of_a_head() -> None:
    seen = record(shifted(13))
    said = " ".join(texts(figure(seen, layer=0, head=0)))
    assert "previous 1.00 (equal weights 0.08)" in said
    assert "←" in texts(figure(seen, kind="roles"))


def test_offsets(small: Record) -> None:
    drawn = figure(small, kind="offsets")
    for layer in range(2):
        torch.testing.assert_close(image(drawn, str(layer)), small[layer].per_head("offsets"))
        base = small[layer].uniform
        assert base is not None
        torch.testing.assert_close(image(drawn, f"{layer} equal weights"), base.per_head("offsets"))
    assert {"layer 0", "layer 1", "−8", "0", "+4", "equal"} <= {*texts(drawn)}
    one = figure(small, kind="offsets", layer="blocks.1")
    assert [i.get_label() for i in one.axes[0].images] == ["1", "1 equal weights"]


def test_offsets_end_at_the_query_where_nobody_looks_ahead() -> None:
    seen = record(random_weights(1, 2, 11, 11, causal=True), causal=True)
    drawn = figure(seen, kind="offsets")
    torch.testing.assert_close(image(drawn, "0"), seen[0].per_head("offsets")[:, :9])
    assert "+4" not in texts(drawn)


def test_entropy(small: Record) -> None:
    ax = axes(figure(small, kind="entropy"), "entropy")
    lines: dict[str, list[Any]] = {}
    for line in ax.lines:
        lines.setdefault(line.get_label(), []).append(line)
    for layer in range(2):
        (dots,) = lines[f"layer {layer}"]
        assert dots.get_ydata().tolist() == pytest.approx(small[layer].per_head("entropy").tolist())
        assert all(layer - 0.5 < x < layer + 0.5 for x in dots.get_xdata())
    (mean,) = lines["mean"]
    want = [small[layer].per_head("entropy").mean().item() for layer in range(2)]
    assert mean.get_ydata().tolist() == pytest.approx(want)
    (even,) = lines["equal weights"]
    assert even.get_ydata().tolist() == pytest.approx([math.log(7)] * 2)
    assert even.get_xdata().tolist() == [-0.5, 1.5]
    assert ticks(ax.xaxis) == ["0", "1"]
    low, high = ax.get_ylim()
    assert low < 0 < math.log(7) < high


def test_item_of_a_batch() -> None:
    weights = random_weights(2, 2, 5, 5)
    seen = record(weights)
    rows = [["a", "b", "c", "d", "e"], ["f", "g", "h"]]
    for item in range(2):
        drawn = figure(seen, rows, layer=0, head=1, item=item)
        torch.testing.assert_close(image(drawn, "0.1"), weights[item, 1])
        assert ticks(axes(drawn, "map").yaxis)[:3] == rows[item][:3]
        torch.testing.assert_close(image(figure(seen, rows, item=item), "0.0"), weights[item, 0])


def test_encoder_and_decoder() -> None:
    torch.manual_seed(0)
    model = nn.Transformer(8, 2, 1, 1, 16, batch_first=True).eval()
    source, target = ["le", "chat", "court", "vite", "."], ["<s>", "the", "cat"]
    with regard.watch(model, keep="qk") as seen, torch.no_grad():
        model(torch.randn(1, 5, 8), torch.randn(1, 3, 8))
    assert len(figure(seen, (source, target), kind="offsets").axes[0].images) == 2 * 3
    drawn = figure(seen, (source, target), layer=2, head=0)
    assert image(drawn, "2.0").shape == (3, 5)
    assert ticks(axes(drawn, "map").xaxis) == source
    assert ticks(axes(drawn, "map").yaxis) == target
    assert texts(figure(seen, kind="roles")).count("cross") == 2
    assert "decoder.layers.0.multihead_attn" in texts(figure(seen))
    means = [line for line in axes(figure(seen, kind="entropy"), "entropy").lines if line.get_label() == "mean"]
    assert [line.get_xdata().tolist() for line in means] == [[0], [1], [2]]  # three stacks: no line between them


def test_records_of_several_texts_and_from_a_file(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    weights = random_weights(1, 2, 5, 5)
    seen = record(weights, keep=None, measures=[*regard.measures.DEFAULT, "heatmap"])
    seen.tokens = ["[CLS]", "a", "b", "c", "[SEP]"]
    seen.save(tmp_path / "seen.safetensors")
    loaded = Record.load(tmp_path / "seen.safetensors")
    for kind in ("head", "roles"):
        assert figure(loaded, **options(kind))._repr_png_() == figure(seen, **options(kind))._repr_png_()  # type: ignore[attr-defined]
    torch.testing.assert_close(image(figure(loaded), "0.1"), weights[0, 1])

    model = nn.MultiheadAttention(8, 2, batch_first=True)
    with regard.watch(model, keep="qk") as several, torch.no_grad():
        for n in (3, 5):
            model(*[torch.randn(1, n, 8)] * 3, need_weights=False)
    for kind in KINDS:
        figure(several, **options(kind))
    assert image(figure(several), "0.0").shape == (5, 5)  # of the last


# --- Sizes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "layers,heads,most", [(1, 1, (4, 4)), (6, 12, (7.01, 7)), (30, 9, (7.01, 9.4)), (2, 32, (11, 3))]
)
def test_sizes_are_those_of_a_page(layers: int, heads: int, most: tuple[float, float]) -> None:
    drawn = figure(record(*[random_weights(1, heads, 3, 3)] * layers, measures=["entropy"]))
    wide, high = drawn.get_size_inches()
    assert 2 <= wide <= most[0]
    assert 1.5 <= high <= most[1]
    assert len(drawn.axes[0].images) == layers * heads


@pytest.mark.parametrize("kind", KINDS)
def test_width_and_dpi(small: Record, kind: str) -> None:
    for width in (3.25, 9):
        drawn = figure(small, width=width, dpi=40, **options(kind))
        assert drawn.get_size_inches()[0] == pytest.approx(width)
    assert png(drawn).shape[1] == 9 * 40
    with pytest.raises(ValueError, match=r"width: expected at least \d\.\d inches, for .*, received 0\.5"):
        figure(small, width=0.5, **options(kind))


@pytest.mark.parametrize("kind", [*KINDS, "layer"])
@pytest.mark.parametrize("width", [None, 3.25])
def test_nothing_is_cut_off(small: Record, kind: str, width: float | None) -> None:
    drawn = figure(small, width=width, **({"layer": 0} if kind == "layer" else options(kind)))
    png(drawn)
    inner = drawn.bbox
    for text in drawn.findobj(Text):
        if text.get_text() and text.get_visible():
            box = text.get_window_extent()
            assert inner.x0 <= box.x0 < box.x1 <= inner.x1, text
            assert inner.y0 <= box.y0 < box.y1 <= inner.y1, text


# --- Errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given,words",
    [
        ({"kind": "map"}, "kind: expected one of heads, head, roles, offsets, entropy, received 'map'"),
        ({"kind": "head"}, 'layer and head: expected which one, for kind="head", received none'),
        ({"kind": "head", "layer": 0}, 'head: expected which one, for kind="head", received none'),
        ({"head": 0}, 'layer: expected which one, for kind="head", received none'),
        ({"kind": "roles", "layer": 0, "head": 0}, "head: expected none, for kind='roles' draws all heads, received 0"),
        ({"layer": 0, "head": 3}, "head: expected from 0 to 2, in blocks.0, received 3"),
        ({"layer": 0, "head": -1}, "head: expected from 0 to 2, in blocks.0, received -1"),
        ({"path": "a.jpg"}, "path: expected one that ends in .png, .svg, .pdf, received 'a.jpg'"),
        ({"path": "png"}, "path: expected one that ends in .png, .svg, .pdf, received 'png'"),
        ({"width": 0}, "width: expected a number above 0, received 0"),
        ({"dpi": -1}, "dpi: expected a number above 0, received -1"),
        ({"dpi": math.nan}, "dpi: expected a number above 0, received nan"),
        ({"item": 1}, "item: expected a text from 0 to 0, received 1"),
        ({"tokens": ["a"]}, "tokens: expected 7, for the queries of blocks.0, received 1"),
    ],
)
def test_errors(small: Record, given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        figure(small, **given)


def test_other_errors(small: Record) -> None:
    with pytest.raises(IndexError, match="layer 5: there are 2"):
        figure(small, layer=5)
    with pytest.raises(KeyError, match=r"no layer 'x'; there are blocks\.0, blocks\.1"):
        figure(small, layer="x")
    with pytest.raises(TypeError, match="path: expected the path of a file, received int"):
        figure(small, None, 3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"record: expected what `regard.watch` gives, received list"):
        figure([])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "kind,words",
    [
        ("heads", "record: expected one that kept q and k, or measured heatmaps"),
        ("offsets", r"record: expected offsets measured, as by default, .*measures=\[..., 'offsets'\]"),
        ("entropy", r"record: expected entropy measured, as by default, .*measures=\[..., 'entropy'\]"),
    ],
)
def test_what_was_not_measured_cannot_be_drawn(kind: str, words: str) -> None:
    seen = record(random_weights(1, 2, 5, 5), keep=None, measures=["received"])
    with pytest.raises(ValueError, match=words):
        figure(seen, kind=kind)
