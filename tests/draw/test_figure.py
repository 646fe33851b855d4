"""Figures: what is drawn is what was seen, it is readable in grey, and it leaves matplotlib as it was."""

from __future__ import annotations

import io
import math
import pickle
import re
import subprocess
import sys
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import regard
from regard.draw.figure import SUFFIXES, figure
from regard.draw.figure.fonts import Fonts
from regard.draw.figure.legends import SIGNS
from regard.heads import ROLES, Record
from regard.measures import Heatmap

matplotlib = pytest.importorskip("matplotlib")
from matplotlib import style  # noqa: E402
from matplotlib.image import AxesImage, imread  # noqa: E402
from matplotlib.text import Text  # noqa: E402

MAGIC = {".png": b"\x89PNG\r\n\x1a\n", ".svg": b"<?xml", ".pdf": b"%PDF-"}
KINDS = ("heads", "head", "roles", "offsets", "entropy")
NASTY = [
    *("$math$", "$", r"\frac{a}{b}", "__init__", "##ing", "%s{}", "&<>\"'", "<|endoftext|>"),
    *("日本語", "한국어", "ไทย", "مرحبا", "می\u200cخواهم", "שלום", "\U0001f469\u200d\U0001f680", "👍🏽", "\ufe0f"),
    *("a\nb\tc\0", "\x1b[31m", "\u202eabc", "\ud83d", "\U0010fffd", "\u0301", "e" + "\u0301" * 50, "", "  "),
    *("x" * 10_000, "漢" * 5_000),
]


class Given(nn.Module):
    """Attention with given weights: their logarithms as queries, keys that pick them out."""

    def __init__(self, weights: Tensor, causal: bool) -> None:
        super().__init__()
        m = weights.shape[-1]
        self.q = weights.clamp(min=1e-35).log()  # (B, H, N, M), so scores q k^T / sqrt(M) are these logarithms
        self.k = (torch.eye(m) * math.sqrt(m)).expand(*weights.shape[:2], m, m)
        self.causal = causal

    def forward(self) -> Tensor:
        return F.scaled_dot_product_attention(self.q, self.k, self.k, is_causal=self.causal)


def random_weights(*shape: int, causal: bool = False, seed: int = 0) -> Tensor:
    """(B, H, N, M)"""
    scores = 3 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    if causal:
        scores = scores.masked_fill(torch.ones(shape[-2:]).triu(1).bool(), -math.inf)
    return scores.softmax(-1)


def record(*layers: Tensor, causal: bool = False, **options: Any) -> Record:
    """What is seen of layers with given weights."""
    model = nn.Module()
    model.blocks = nn.ModuleList(Given(weights, causal) for weights in layers)
    model.forward = lambda: [block() for block in model.blocks]  # type: ignore[method-assign]
    with regard.watch(model, **{"keep": "qk", **options}) as seen, torch.no_grad():
        model()
    return seen


def shifted(n: int) -> Tensor:
    """A head that looks at the token before, (1, 1, n, n)."""
    return torch.eye(n).roll(1, 0).index_put((torch.tensor(0),), torch.eye(n)[0])[None, None]


def options(kind: str) -> dict[str, Any]:
    return {"kind": kind, **({"layer": 0, "head": 1} if kind == "head" else {})}


def image(drawn: Any, label: str) -> Tensor:
    """The map with a label."""
    (found,) = drawn.findobj(lambda artist: isinstance(artist, AxesImage) and artist.get_label() == label)
    return torch.from_numpy(found.get_array().data)


def texts(drawn: Any) -> list[str]:
    return [text.get_text() for text in drawn.findobj(Text) if text.get_text()]


def axes(drawn: Any, label: str) -> Any:
    (found,) = [ax for ax in drawn.axes if ax.get_label() == label]
    return found


def ticks(axis: Any) -> list[str]:
    return [label.get_text() for label in axis.get_ticklabels()]


def png(drawn: Any) -> Any:
    """The picture as an array of pixels."""
    return imread(io.BytesIO(drawn._repr_png_()))


@pytest.fixture(scope="module")
def small() -> Record:
    """Two layers of three heads, seven tokens; head 1 of layer 0 looks at the token before."""
    first = torch.cat([random_weights(1, 1, 7, 7), shifted(7), random_weights(1, 1, 7, 7, seed=1)], 1)
    seen = record(first, random_weights(1, 3, 7, 7, seed=2))
    seen.tokens = ["[CLS]", "the", "cat", "that", "I", "saw", "[SEP]"]
    return seen


# --- What is drawn is what was seen ----------------------------------------------------------------------------------


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
    for part in ("blocks.0 · head 1", "previous 0.86 (equal weights 0.12)", "entropy 0.00 nats", "query", "key"):
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
            assert said.count(SIGNS[rule.name][0]) >= len(found) + 1  # in the cells, and in the legend
    assert ".86" in said
    assert "no role" in said


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


# --- Colours ---------------------------------------------------------------------------------------------------------


def lightness(color: Any) -> float:
    """CIE L* of an sRGB colour, from 0 to 100."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in color[:3]]
    y = sum(a * b for a, b in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
    return 116 * y ** (1 / 3) - 16 if y > (6 / 29) ** 3 else y * (29 / 3) ** 3


def test_shades_in_grey(small: Record) -> None:
    """From the white of the paper down in even steps: printed in grey the order stays, and the distances."""
    drawn = figure(small)
    found = drawn.axes[0].images[0]
    steps = [lightness(found.cmap(i / 255)) for i in range(256)]
    assert found.cmap(0.0)[:3] == (1, 1, 1)
    assert all(a > b for a, b in pairwise(steps))
    assert steps[-1] < 15
    even = [steps[0] + (steps[-1] - steps[0]) * i / 255 for i in range(256)]
    assert max(abs(a - b) for a, b in zip(steps, even, strict=True)) < 1.5


def test_the_scale_is_said(small: Record) -> None:
    """All maps have one norm, from 0 to 1 by the square root; the marks of the scale stand where it says."""
    drawn = figure(small)
    for found in drawn.axes[0].images:
        assert found.norm(0.25) == pytest.approx(0.5)
        assert (found.norm.vmin, found.norm.vmax) == (0, 1)
    axis = axes(drawn, "scale").xaxis
    assert axis.get_ticklocs().tolist() == pytest.approx([math.sqrt(float(text)) for text in ticks(axis)])
    assert ticks(axis)[-1] == "1"


def test_every_role_has_a_sign_of_its_own() -> None:
    assert set(SIGNS) == {rule.name for rule in ROLES}
    assert len({sign for sign, _ in SIGNS.values()}) == len({color for _, color in SIGNS.values()}) == len(ROLES)


# --- Fonts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_nasty_labels(tmp_path: Path, suffix: str) -> None:
    """Nothing raises, nothing warns (warnings are errors here), and nothing is taken for a formula."""
    seen = record(random_weights(1, 2, len(NASTY), len(NASTY)))
    drawn = figure(seen, NASTY, tmp_path / f"a{suffix}", layer=0, head=1)
    said = ticks(axes(drawn, "map").xaxis)
    assert said[:3] == ["$math$", "$", r"\frac{a}{b}"]
    assert all(len(text) <= 20 for text in said)
    assert said[NASTY.index("x" * 10_000)] == "x" * 17 + "…"
    assert said[NASTY.index("a\nb\tc\0")].startswith("a⏎b")
    if suffix == ".png":
        figure(seen, NASTY, tmp_path / f"b{suffix}", layer=0)


def test_fonts() -> None:
    """What no font knows is a box; what has no shape is nothing, or a space; what is long is cut."""
    fonts = Fonts()
    assert fonts.clean("naïve → ฿") == "naïve → ฿"
    assert fonts.clean("a\u0378b") == fonts.clean("a\ufe0f\u0378b\ufe0f", bold=True) == "a b"  # assigned to nobody
    assert fonts.clean("a\n\U000f0000") == "a  "
    assert set(fonts.clean("𓀀𓀁", bold=True)) == {"□"}  # hieroglyphs
    assert fonts.short("abcdef", 4) == "abc…"
    assert fonts.short("abcd", 4) == "abcd"
    assert fonts.short("", 4) == ""
    assert fonts.width("wide", 14) == pytest.approx(2 * fonts.width("wide", 7), rel=0.02)


# --- Files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_files(small: Record, tmp_path: Path, suffix: str) -> None:
    """By their suffix, in any case, to any path; the same bytes again."""
    first, again = tmp_path / f"first{suffix}", tmp_path / f"again{suffix.upper()}"
    figure(small, None, first, layer=0)
    figure(small, None, str(again), layer=0)
    assert first.read_bytes().startswith(MAGIC[suffix])
    assert first.read_bytes() == again.read_bytes()


def test_text_is_text(small: Record, tmp_path: Path) -> None:
    """It can be searched and edited, and there is no date; whatever is usual otherwise."""
    with matplotlib.rc_context({"svg.fonttype": "path", "pdf.fonttype": 3}):
        for suffix in (".svg", ".pdf"):
            figure(small, None, tmp_path / f"a{suffix}", layer=0, head=1)
    svg, pdf = (tmp_path / "a.svg").read_text(encoding="utf-8"), (tmp_path / "a.pdf").read_bytes()
    assert ">that</text>" in svg
    assert "<dc:date>" not in svg
    assert b"/CIDFontType2" in pdf
    assert b"/Type3" not in pdf
    assert b"CreationDate" not in pdf


def test_notebook(small: Record, tmp_path: Path) -> None:
    """A figure shows itself as what the file would be; also after it was pickled."""
    drawn: Any = figure(small, None, tmp_path / "a.png")
    assert drawn._repr_png_() == (tmp_path / "a.png").read_bytes()
    again = pickle.loads(pickle.dumps(drawn))
    assert again._repr_png_() == drawn._repr_png_()


# --- Manners ---------------------------------------------------------------------------------------------------------


DARK = {
    "text.usetex": True,
    "text.color": "red",
    "font.size": 30,
    "lines.marker": "x",
    "lines.linewidth": 9,
    "axes.grid": True,
    "axes.grid.which": "both",
    "axes.linewidth": 5,
    "axes.xmargin": 0.3,
    "patch.linewidth": 4,
    "xtick.top": True,
    "xtick.minor.visible": True,
    "ytick.minor.visible": True,
    "ytick.direction": "in",
    "image.interpolation": "bilinear",
    "image.origin": "lower",
    "image.cmap": "jet",
    "figure.autolayout": True,
    "savefig.bbox": "tight",
    "savefig.dpi": 31,
    "savefig.transparent": True,
    "svg.fonttype": "path",
    "pdf.fonttype": 3,
}


@pytest.mark.parametrize("kind", KINDS)
def test_rc_params_are_neither_changed_nor_heeded(small: Record, tmp_path: Path, kind: str) -> None:
    """But for the font: a style for dark slides, LaTeX and grids change nothing."""

    def files() -> list[bytes]:
        drawn: Any = figure(small, None, tmp_path / "a.svg", **options(kind))
        return [(tmp_path / "a.svg").read_bytes(), drawn._repr_png_()]

    plain = files()
    with matplotlib.rc_context():
        style.use("dark_background")
        matplotlib.rcParams.update(DARK)
        before = dict(matplotlib.rcParams)
        assert files() == plain
        assert dict(matplotlib.rcParams) == before


def test_threads(small: Record, tmp_path: Path) -> None:
    want = figure(small, layer=0, head=1)._repr_png_()  # type: ignore[attr-defined]
    found: list[bytes] = []

    def draw(number: int) -> None:
        drawn: Any = figure(small, None, tmp_path / f"{number}.svg", layer=0, head=1)
        found.append(drawn._repr_png_())

    threads = [threading.Thread(target=draw, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [want] * 3
    assert len({(tmp_path / f"{i}.svg").read_bytes() for i in range(3)}) == 1


@pytest.mark.slow
def test_matplotlib_comes_when_it_is_needed_and_pyplot_never() -> None:
    code = """
import sys, torch, regard, regard.draw
assert "matplotlib" not in sys.modules
model = torch.nn.MultiheadAttention(8, 2, batch_first=True)
with regard.watch(model, keep="qk") as seen:
    model(*[torch.randn(1, 4, 8)] * 3, need_weights=False)
for kind in ("heads", "entropy"):
    regard.draw.figure(seen, kind=kind)._repr_png_()
assert "matplotlib" in sys.modules
assert "matplotlib.pyplot" not in sys.modules
"""
    subprocess.run([sys.executable, "-W", "error::UserWarning", "-c", code], check=True)


def test_without_matplotlib(small: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"matplotlib is not installed; it comes with: pip install 'regard\[draw\]'"):
        figure(small)


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
        ("roles", "record: expected self attention, with the default measures"),
        ("offsets", r"record: expected offsets measured, as by default, .*measures=\[..., 'offsets'\]"),
        ("entropy", r"record: expected entropy measured, as by default, .*measures=\[..., 'entropy'\]"),
    ],
)
def test_what_was_not_measured_cannot_be_drawn(kind: str, words: str) -> None:
    seen = record(random_weights(1, 2, 5, 5), keep=None, measures=["received"])
    with pytest.raises(ValueError, match=words):
        figure(seen, kind=kind)
