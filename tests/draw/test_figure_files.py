"""Figures: readable in grey, in every script, as files; and they leave matplotlib as it was."""

from __future__ import annotations

import math
import pickle
import subprocess
import sys
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from regard.draw.figure import SUFFIXES, figure
from regard.draw.figure.fonts import Fonts
from regard.draw.figure.legends import CLASS, OFFSET, RELATION, SIGNS, sign_of
from regard.heads import ROLES, Record

matplotlib = pytest.importorskip("matplotlib")
from draw.figures import KINDS, MAGIC, NASTY, axes, options, random_weights, record, ticks  # noqa: E402
from matplotlib import style  # noqa: E402

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
    assert set(SIGNS) <= {rule.name for rule in ROLES}
    looks = [*SIGNS.values(), OFFSET, CLASS, RELATION]
    assert len({sign for sign, _ in looks}) == len({color for _, color in looks}) == len(looks)
    assert [sign_of(name) for name in ("offset -3", "nouns", "determiner and noun")] == ["±", "C", "§"]


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
