"""A record as a figure for a paper or a notebook, by matplotlib: readable in colour and printed in grey.

Everything is laid out in inches from the top left corner, and every colour and size is said here: matplotlib's pyplot
and the user's rcParams are neither asked (but for the font) nor changed. So figures can be drawn without a display and
in threads, and the same record gives the same bytes.

Letters: H query heads, N queries, M keys.
"""

from __future__ import annotations

import io
import math
import re
import threading
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache, partial
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from regard.draw.labels import Labels
from regard.draw.scene import Panel, Scene, sizes
from regard.errors import bad_type, bad_value, missing_extra
from regard.heads import Layer, Record
from regard.heads.roles import ROLES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap, Normalize
    from matplotlib.figure import Figure
    from matplotlib.font_manager import FontProperties
    from matplotlib.text import Text

__all__ = ["figure"]

INK, QUIET, FAINT, BLANK, PAPER = "#1b1f27", "#6a7280", "#c9ced6", "#f1f2f4", "#ffffff"

# From the white of the paper down, in even steps of lightness (CIE L* 100 to 12): printed in grey the order stays.
SHADES = ("#ffffff", "#d5eeff", "#acdbff", "#89c7f9", "#6bb3f0", "#539ee3", "#438ad2", "#3a75bd", "#3861a4", "#364e89",
          "#323c6c", "#2b2b4e", "#201c37")  # fmt: skip

# A colour for those who see it, a letter for everybody.
MARKS = {
    "induction": ("I", "#c4314b"),
    "duplicate": ("D", "#dd7a2b"),
    "previous": ("P", "#2b68b0"),
    "next": ("N", "#1f8f86"),
    "itself": ("O", "#7d8a22"),
    "separator": ("S", "#7d48a8"),
    "punctuation": ("C", "#c2569a"),
    "first": ("F", "#b5851c"),
    "local": ("L", "#4f9fd1"),
    "long-range": ("R", "#3a7a41"),
    "broad": ("B", "#8a919b"),
}

PAGE = 7.0  # inches that a figure is wide at most, unless it is told how wide: the text of a page
TALL = 9.4  # inches that it is tall at most, as far as its parts can be made smaller
CELLS = 256  # of a large map, to each side; a longer text is pooled
SUFFIXES = (".png", ".svg", ".pdf")
VECTOR_DPI = 300  # of the maps in SVG and PDF: their cells are images, for seams show between many small squares

# Fonts that know other scripts, asked in this order where the user's font does not know a character.
FONTS = (
    "Noto Sans CJK SC", "Noto Sans CJK JP", "Noto Sans SC", "Noto Sans JP", "Noto Sans KR", "Source Han Sans SC",
    "WenQuanYi Micro Hei", "WenQuanYi Zen Hei", "PingFang SC", "Hiragino Sans GB", "Apple SD Gothic Neo",
    "Microsoft YaHei", "Yu Gothic", "Malgun Gothic", "Arial Unicode MS", "Noto Sans Arabic", "Noto Sans Hebrew",
    "Noto Sans Devanagari", "Noto Sans Thai", "Noto Sans Symbols2", "Noto Sans Math", "Noto Emoji", "Segoe UI Symbol",
    "Segoe UI Emoji", "Symbola", "Unifont", "STIXGeneral",
)  # fmt: skip


def figure(
    seen: Record,
    tokens: Any = None,
    path: str | PathLike[str] | None = None,
    *,
    kind: str = "heads",
    layer: int | str | None = None,
    head: int | None = None,
    item: int = 0,
    width: float | None = None,
    dpi: float = 150,
) -> Figure:
    """Draw a record, and write it to a file if `path` is given.

    | kind        | what it shows                                                         | what it needs             |
    | ----------- | --------------------------------------------------------------------- | ------------------------- |
    | `"heads"`   | the maps of all heads, layers down, heads across, with their roles;   | `keep="qk"` or heatmaps   |
    |             | with `layer` only the heads of that one, larger, with their tokens    |                           |
    | `"head"`    | one head large, tokens on both axes, its role and measures            | the same; layer and head  |
    | `"roles"`   | which head has which role: a letter each, the shade by its score      | the default measures      |
    | `"offsets"` | where heads look, relative to the query: a row for each head          | offsets (a default)       |
    | `"entropy"` | how widely each head looks, by layer, beside equal weights            | entropy (a default)       |

    Maps are of the last text, exact up to 256 tokens; of longer ones a cell is what a query of its rows gives to all
    keys of its columns, on average. All share one scale, from 0 to 1, stretched at its low end (by the square root).
    Roles, offsets and entropy are means over everything that was seen.

    Args:
        seen: what `watch` saw.
        tokens: as for `Scene`: the text's tokens; a list of them for each text of a batch; a pair (source, target).
        path: a file that ends in .png, .svg or .pdf.
        kind: one of the above. With `layer` and `head`, "heads" is "head".
        layer: only this one, by number or name.
        head: which head of it.
        item: which text of the batch.
        width: of the figure, in inches; by default as wide as what it shows, at most 7.
        dpi: dots for each inch, of PNG and notebooks.

    Returns:
        A `matplotlib.figure.Figure`, which shows itself in a notebook. Its axes are labelled: "0.2" is head 2 of layer
        0, "0" is layer 0.

    >>> import regard, torch
    >>> model = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    >>> with regard.watch(model, keep="qk") as seen:
    ...     _ = model(*[torch.randn(1, 4, 8)] * 3, need_weights=False)
    >>> drawn = figure(seen, ["a", "cat", "sat", "down"])
    >>> [ax.get_label() for ax in drawn.axes]
    ['0.0', '0.1', 'scale']
    >>> figure(seen, kind="head", layer=0, head=1).axes[0].images[0].get_array().shape
    (4, 4)
    """
    _need_matplotlib()
    suffix = None if path is None else _suffix(path)
    for what, number in (("width", width), ("dpi", dpi)):
        if number is not None and not (isinstance(number, (int, float)) and 0 < number < math.inf):
            raise bad_value(what, expected="a number above 0", received=repr(number))
    drawing = _drawing(kind, layer, head)
    scene = Scene(seen, tokens, item=item)
    panels = scene.panels if layer is None else [scene.panel(layer)]
    if head is not None:
        _check_head(head, panels[0])
    drawn = drawing(_Order(panels, head, width, dpi, _Letters(), _names(scene.panels)))
    if path is not None:
        _write(drawn, fspath(path), suffix, dpi)
    return drawn


@dataclass
class _Order:
    """What is to be drawn, and how large."""

    panels: list[Panel]
    head: int | None
    width: float | None
    dpi: float
    letters: _Letters
    names: list[str]  # of all layers, short

    @property
    def alone(self) -> bool:
        """One layer was asked for."""
        return len(self.panels) == 1

    def name(self, panel: Panel) -> str:
        return self.names[panel.number]


def _need_matplotlib() -> None:
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise missing_extra("matplotlib", "draw") from None


def _suffix(path: str | PathLike[str]) -> str:
    if not isinstance(path, (str, PathLike)):
        raise bad_type("path", expected="the path of a file", received=type(path).__name__)
    suffix = Path(fspath(path)).suffix.lower()
    if suffix not in SUFFIXES:
        raise bad_value("path", expected=f"one that ends in {', '.join(SUFFIXES)}", received=repr(fspath(path)))
    return suffix


def _drawing(kind: str, layer: Any, head: Any) -> Callable[[_Order], Figure]:
    """The function that draws a kind, after a look at whether layer and head fit it."""
    if kind not in KINDS:
        raise bad_value("kind", expected=f"one of {', '.join(KINDS)}", received=repr(kind))
    if kind == "heads" and head is not None:
        kind = "head"
    if kind == "head" and (layer is None or head is None):
        missing = " and ".join(name for name, given in (("layer", layer), ("head", head)) if given is None)
        raise bad_value(missing, expected='which one, for kind="head"', received="none")
    if kind != "head" and head is not None:
        raise bad_value("head", expected=f"none, for kind={kind!r} draws all heads", received=repr(head))
    return KINDS[kind]


def _check_head(head: object, panel: Panel) -> None:
    if isinstance(head, bool) or not isinstance(head, int) or not 0 <= head < panel.heads:
        raise bad_value("head", expected=f"from 0 to {panel.heads - 1}, in {panel.name}", received=repr(head))


# --- The kinds -------------------------------------------------------------------------------------------------------


def _heads(order: _Order) -> Figure:
    """The maps of all heads: layers down and heads across, or one layer's in rows."""
    panels, letters = order.panels, order.letters
    every = [(panel, head) for panel in panels for head in range(panel.heads)]
    across = _columns(panels[0].heads) if order.alone else max(panel.heads for panel in panels)
    rows: list[list[tuple[Panel, int]]]
    if order.alone:
        rows = [every[i : i + across] for i in range(0, len(every), across)]
    else:
        rows = [[(panel, head) for head in range(panel.heads)] for panel in panels]
    legend = _legend([panel.role(head) for panel, head in every if panel.roles])
    named = [] if order.alone else [letters.short(order.name(panel), 26) for panel in panels]
    gap = 0.05

    # The maps are as large as the page allows; the tokens beside them as large as the maps allow.
    left = 0.30 + max((letters.wide(name, 7) for name in named), default=0.0)
    top, bottom = (0.12, 0.62) if order.alone else (0.36, 0.62)
    most = PAGE if order.width is None else order.width
    tab = 0.15

    def side(left: float) -> float:
        found = (most - left - 0.12) / across - gap
        if order.width is None:
            found = min(found, (TALL - top - bottom) / len(rows) - gap - tab, 2.6 if order.alone else 1.2)
        return max(found, 0.28)

    beside = _beside(panels[0], side(left), letters) if order.alone else None
    if beside:
        left += max(letters.wide(text, beside.size) for text in beside.rows) - 0.1
        bottom += max(letters.wide(text, beside.size) for text in beside.cols) + 0.04
    one = side(left)
    tab = tab if one >= 0.42 else 0.11
    size = 5.6 if one >= 0.42 else 4.6
    wide = left + across * (one + gap) + 0.12
    wide = max(wide, min(most, 3.4)) if order.width is None else order.width
    high = top + len(rows) * (one + tab + gap) + bottom
    lines = _flow(legend, wide - 0.3 - 1.75, letters)
    high += max(0, len(lines) - 2) * 0.17
    sheet = _Sheet(letters, wide, high, order.dpi)

    if not order.alone:
        sheet.text(left - 0.08, top - 0.06, "layer", 6.5, QUIET, ha="right", va="bottom")
        sheet.text(left, top - 0.2, "head", 6.5, QUIET, ha="left", va="bottom")
        for head in range(across):
            sheet.text(
                left + (head + 0.5) * (one + gap) - gap / 2, top - 0.06, str(head), 6.5, ha="center", va="bottom"
            )
    cells = max(32, min(CELLS, int(one * order.dpi)))
    for i, row in enumerate(rows):
        y = top + i * (one + tab + gap) + tab
        maps = row[0][0].pooled(cells, cells) if i == 0 or not order.alone else maps  # noqa: F821
        if not order.alone:
            sheet.text(left - 0.08, y + one / 2, named[i], 7, ha="right", va="center")
        for j, (panel, head) in enumerate(row):
            x, role = left + j * (one + gap), panel.role(head)
            color = _color(role) if role else FAINT
            ax = sheet.axes(x, y, one, one, f"{panel.number}.{head}", color, 0.9 if role else 0.5)
            sheet.map(ax, maps[head])
            said = [f"head {head}"] if order.alone else []
            if role:
                sheet.tab(x, y - tab, one, tab, _tab(panel, head, one, size, letters, said), size, color)
            elif said:
                sheet.text(x, y - 0.025, said[0], size, QUIET, ha="left", va="bottom")
            if beside and j == 0:
                _tick(ax, letters, "y", beside.rows, beside.size, panel.queries)
            if beside and (i + 1) * across + j >= len(every):
                _tick(ax, letters, "x", beside.cols, beside.size, panel.keys)

    y = high - 0.44 - max(0, len(lines) - 2) * 0.17
    for i, line in enumerate(lines):
        _draw_legend(sheet, 0.3, y + 0.17 * i, line)
    _scale_across(sheet, wide - 1.62, y, 1.5, "attention weight; queries down, keys across")
    return sheet.figure


def _head(order: _Order) -> Figure:
    """One head, large."""
    panel, letters, head = order.panels[0], order.letters, order.head
    assert head is not None
    n, m = panel.shape
    small = n <= CELLS and m <= CELLS and panel.layer.exact
    weights = panel.weights(head) if small else panel.pooled(CELLS, CELLS)[head]
    rows, cols = weights.shape

    def layout(most: float) -> tuple[float, float, _Beside, _Beside]:
        square = min(0.42 if order.width is None else math.inf, most / cols, (TALL - 3.0) / rows)
        wide, high = max(square, 0.25 / cols), max(square, 0.25 / rows)
        return wide, high, _ticks(panel.queries, rows, high, letters), _ticks(panel.keys, cols, wide, letters)

    full = PAGE - 0.6 if order.width is None else order.width
    *_, down, across = layout(full - 1.6)
    left = 0.42 + max(letters.wide(text, down.size) for text in down.rows)
    wide, high, down, across = layout(full - left - 0.75)
    left = 0.42 + max(letters.wide(text, down.size) for text in down.rows)
    above = 0.92 + max(letters.wide(text, across.size) for text in across.rows)

    title = f"{order.panels[0].name} · head {head}"
    said = _said(panel, head)
    role = panel.role(head)
    right = 0.75
    total = left + cols * wide + right
    if order.width is None:
        badge = letters.wide(_role_words(panel, head), 7.5) + 0.3 if role else 0.0
        total = max(total, 0.2 + letters.wide(letters.clean(title, bold=True), 10, bold=True) + badge + 0.2)
        total = max(total, min(PAGE, 0.2 + max(letters.wide(part, 7) for part in said) + 0.2))
    else:
        total = order.width
    sheet = _Sheet(letters, total, above + rows * high + 0.18, order.dpi)
    ax = sheet.axes(left, above, cols * wide, rows * high, f"{panel.number}.{head}", FAINT, 0.6)
    sheet.map(ax, weights)
    _tick(ax, letters, "y", down.rows, down.size, panel.queries, down.at)
    _tick(ax, letters, "top", across.rows, across.size, panel.keys, across.at)
    sheet.text(0.2, above + rows * high / 2, "query", 7.5, QUIET, ha="center", va="center", rotation=90)
    sheet.text(left + cols * wide / 2, 0.78, "key", 7.5, QUIET, ha="center", va="center")
    if min(wide, high) >= 0.3 and rows * cols <= 400:
        _write_weights(ax, letters, weights, min(6.5, wide * 16))
    heading = sheet.text(0.12, 0.24, letters.clean(title, bold=True), 10, bold=True, ha="left", va="center")
    if role:
        words = _role_words(panel, head)
        x = 0.12 + letters.wide(heading.get_text(), 10, bold=True) + 0.12
        sheet.tab(x, 0.15, letters.wide(words, 7.5) + 0.14, 0.18, words, 7.5, _color(role))
    for i, part in enumerate(said):
        sheet.text(0.12, 0.46 + 0.14 * i, part, 7, QUIET, ha="left", va="center")
    tall = min(max(rows * high, 0.8), 2.0)
    _scale_down(sheet, left + cols * wide + 0.18, above, tall)
    return sheet.figure


def _roles(order: _Order) -> Figure:
    """Which head has which role."""
    panels, letters = order.panels, order.letters
    if not any(panel.roles for panel in panels):
        raise bad_value("record", expected="self attention, with the default measures", received=repr(panels[0].layer),
                        remedy="watch(model)")  # fmt: skip
    across = max(panel.heads for panel in panels)
    found = [panel.role(head) for panel in panels if panel.roles for head in range(panel.heads)]
    legend = _legend(found, everything=True)
    named = [letters.short(order.name(panel), 26) for panel in panels]
    left = 0.32 + max(letters.wide(name, 7) for name in named)
    aside = 0.55 + max(letters.wide(f"{name}  {count}", 7) for name, count in legend)
    most = PAGE if order.width is None else order.width
    one = (most - left - aside) / across
    if order.width is None:
        one = max(0.2, min(one, 0.42, (TALL - 0.6) / len(panels)))
    top, high = 0.4, max(len(panels) * one, len(legend) * 0.2 + 0.55)
    sheet = _Sheet(letters, left + across * one + aside if order.width is None else most, top + high + 0.15, order.dpi)
    ax = sheet.axes(left, top, across * one, len(panels) * one, "roles", None)
    ax.set_xlim(0, across)
    ax.set_ylim(len(panels), 0)
    best = _best(panels)
    for row, panel in enumerate(panels):
        for head in range(panel.heads):
            _cell(ax, letters, row, head, panel, best, one)
    sheet.text(left - 0.08, top - 0.05, "layer", 6.5, QUIET, ha="right", va="bottom")
    sheet.text(left, top - 0.19, "head", 6.5, QUIET, ha="left", va="bottom")
    for head in range(across):
        sheet.text(left + (head + 0.5) * one, top - 0.05, str(head), 6.5, ha="center", va="bottom")
    for row, name in enumerate(named):
        sheet.text(left - 0.08, top + (row + 0.5) * one, name, 7, ha="right", va="center")
    x = left + across * one + 0.2
    for i, (name, count) in enumerate(legend):
        _draw_mark(sheet, x, top + 0.2 * i + 0.02, name)
        sheet.text(x + 0.2, top + 0.2 * i + 0.09, f"{name}  {count}", 7, ha="left", va="center")
    y = top + 0.2 * len(legend) + 0.14
    for i, part in enumerate(("shade: the score,", "from what it takes", "to the most")):
        sheet.text(x, y + 0.12 * i, part, 6, QUIET, ha="left", va="center")
    return sheet.figure


def _offsets(order: _Order) -> Figure:
    """Where heads look, relative to the query: for each layer a row for each head, and below one of equal weights."""
    panels, letters = order.panels, order.letters
    profiles = [(_measured(panel.layer, "offsets"), panel.layer.uniform) for panel in panels]
    measure = next(one for one in panels[0].layer.measures if "offsets" in one.gives)
    before, after = int(measure.before), int(measure.after)  # type: ignore[attr-defined]
    if after and all((profile[:, before + 1 :] == 0).all() for profile, _ in profiles):
        after = 0  # nobody looks ahead: nothing is there to be shown
    steps = before + 1 + after
    heads = max(panel.heads for panel in panels)
    most = PAGE if order.width is None else order.width
    side = 0.24 if order.alone else 0.115
    gap, title, mark = 0.2, 0.24, 0.12
    across = max(1, min(len(panels), int((most - 0.45) / (steps * side + mark + gap))))
    down = math.ceil(len(panels) / across)
    across = math.ceil(len(panels) / down)  # (rows as even as can be)
    if order.width is not None:
        side = (most - 0.5) / across - mark - gap
        side /= steps
    left, top = 0.5, 0.12
    pitch = title + (heads + 1.5) * side + gap + 0.08
    wide = max(left + across * (steps * side + mark + gap), 3.4 if order.width is None else 0.0)
    sheet = _Sheet(letters, wide if order.width is None else most, top + down * pitch + 0.55, order.dpi)
    size = min(6.5, side * 58)
    for i, (panel, (profile, uniform)) in enumerate(zip(panels, profiles, strict=True)):
        x = left + (i % across) * (steps * side + mark + gap)
        y = top + (i // across) * pitch + title
        shown = profile[:, :steps] if after == 0 else profile
        ax = sheet.axes(x, y, steps * side, panel.heads * side, f"{panel.number}", FAINT, 0.5)
        sheet.map(ax, shown)
        name = letters.short(order.name(panel) if len(order.names) > 1 else panel.name, 26)
        sheet.text(x, y - 0.06, f"layer {name}" if name.isdigit() else name, 7, ha="left", va="bottom")
        if i % across == 0:
            _tick(ax, letters, "y", [str(head) for head in range(panel.heads)], size)
            sheet.text(x - 0.34, y + panel.heads * side / 2, "head", 6.5, QUIET, ha="center", va="center", rotation=90)
        for head in range(panel.heads):
            role = panel.role(head)
            if role:
                sheet.text(x + steps * side + 0.03, y + (head + 0.5) * side, _letter(role), size, _color(role),
                           ha="left", va="center")  # fmt: skip
        y += (panel.heads + 0.5) * side
        if uniform is not None and uniform.has("offsets"):
            even = sheet.axes(x, y, steps * side, side, f"{panel.number} equal weights", FAINT, 0.5)
            sheet.map(even, uniform.per_head("offsets")[:, :steps].float().cpu())
            if i % across == 0:
                _tick(even, letters, "y", ["equal"], size)
            ax = even
        marks = [j for j in range(steps) if (j - before) % max(1, (steps + 3) // 4) == 0]
        _tick(ax, letters, "x", [f"{j - before:+d}" if j != before else "0" for j in marks], 6, at=marks, turned=False)
    y = top + down * pitch + 0.1
    _scale_across(sheet, sheet.wide - 1.62, y, 1.5, "share of attention, by offset from the query")
    lines = _flow(_legend([p.role(h) for p in panels if p.roles for h in range(p.heads)]), sheet.wide - 2.2, letters)
    for i, line in enumerate(lines[:2]):
        _draw_legend(sheet, left, y + 0.17 * i, line)
    return sheet.figure


def _entropy(order: _Order) -> Figure:
    """How widely each head looks, by layer."""
    panels, letters = order.panels, order.letters
    values = [_measured(panel.layer, "entropy") for panel in panels]
    even = [
        None if panel.layer.uniform is None else _measured(panel.layer.uniform, "entropy")[0].item() for panel in panels
    ]
    most = max([float(value.max()) for value in values] + [value for value in even if value is not None])
    named = [letters.short(order.name(panel), 26) for panel in panels]
    long = max(letters.wide(name, 7) for name in named)
    wide = min(PAGE, max(3.4, 1.7 + 0.5 * len(panels))) if order.width is None else order.width
    left, right, top = 0.6, 0.95, 0.15
    pitch = (wide - left - right) / len(panels)
    turned = long > pitch * 0.95
    bottom = (long if turned else 0.1) + 0.42
    high = max(1.6, min(3.0, wide * 0.45))
    sheet = _Sheet(letters, wide, top + high + bottom, order.dpi)
    ax = sheet.axes(left, top, wide - left - right, high, "entropy", None)
    ax.set_xlim(-0.5, len(panels) - 0.5)
    ax.set_ylim(0, most * 1.06 or 1.0)
    for side in ("left", "bottom"):
        ax.spines[side].set(visible=True, color=QUIET, linewidth=0.6)
    marks = _round_steps(most * 1.06 or 1.0)
    _tick(ax, letters, "y", [f"{mark:g}" for mark in marks], 7, at=marks, length=2.5)
    for mark in marks[1:]:
        ax.axhline(mark, color=BLANK, linewidth=0.8, linestyle="-", zorder=0)
    every = max(1, math.ceil(0.13 / pitch)) if turned else max(1, math.ceil(long * 1.3 / pitch))
    shown = list(range(0, len(panels), every))
    _tick(ax, letters, "x", [named[i] for i in shown], 7, at=shown, length=2.5, turned=turned)
    radius = max(1.4, min(3.2, pitch * 72 * 0.8 / max(len(value) for value in values)))
    for i, value in enumerate(values):
        spread = torch.linspace(-0.36, 0.36, len(value)) if len(value) > 1 else torch.zeros(1)
        ax.plot((i + spread).tolist(), value.tolist(), color=SHADES[6], linestyle="", marker="o", markersize=radius,
                markeredgewidth=0, alpha=0.85, zorder=2)  # fmt: skip
    means = [value.mean().item() for value in values]
    for series in _series([panel.name for panel in panels]):
        _line(ax, series, means, color=INK, linewidth=1.3, linestyle="-", zorder=3)
        _line(ax, series, even, color=QUIET, linewidth=1.1, linestyle=(0, (4, 2)), zorder=1)
    last = len(panels) - 1
    _note(ax, letters, last, means[last], "mean", INK)
    if even[last] is not None:
        _note(ax, letters, last, even[last], "equal weights", QUIET)
    sheet.text(0.16, top + high / 2, "entropy in nats", 7.5, ha="center", va="center", rotation=90)
    sheet.text(left + (wide - left - right) / 2, top + high + bottom - 0.12, "layer; its heads from left to right", 7.5,
               ha="center", va="center")  # fmt: skip
    return sheet.figure


KINDS: dict[str, Callable[[_Order], Figure]] = {
    "heads": _heads,
    "head": _head,
    "roles": _roles,
    "offsets": _offsets,
    "entropy": _entropy,
}


# --- What kinds have in common ---------------------------------------------------------------------------------------


def _measured(layer: Layer, name: str) -> Tensor:
    """Means of a measure for each head."""
    if not layer.has(name):
        raise bad_value("record", expected=f"{name} measured, as by default", received=repr(layer),
                        remedy=f"watch(model, measures=[..., {name!r}])")  # fmt: skip
    return layer.per_head(name).float().cpu()


def _names(panels: Sequence[Panel]) -> list[str]:
    """Layers' names without what all of them begin and end with: 0, 1, 2 of blocks.0.attention and so on."""
    parts = [panel.name.split(".") for panel in panels]
    if len(parts) < 2:
        return [panel.name for panel in panels]
    least = min(len(part) for part in parts)
    head = next((i for i in range(least) if len({part[i] for part in parts}) > 1), least)
    tail = next((i for i in range(least - head) if len({part[-1 - i] for part in parts}) > 1), least - head)
    return [".".join(part[head : len(part) - tail]) or panel.name for part, panel in zip(parts, panels, strict=True)]


def _columns(heads: int) -> int:
    """How many maps of one layer stand in a row: rows that are full, where that can be."""
    least = math.isqrt(max(heads - 1, 0)) + 1
    return next((n for n in range(least, min(2 * least, 8) + 1) if heads % n == 0), min(least, 8))


def _series(names: Sequence[str]) -> list[list[int]]:
    """Layers that are one stack, by their names but for the numbers in them: those of an encoder, of a decoder ..."""
    stacks: dict[str, list[int]] = {}
    for i, name in enumerate(names):
        stacks.setdefault(re.sub(r"\d+", "#", name), []).append(i)
    return list(stacks.values())


def _line(ax: Axes, at: Sequence[int], values: Sequence[float | None], **style: Any) -> None:
    """A line through some of the values; for one alone a dash as wide as its layer."""
    points = [(i, value) for i in at if (value := values[i]) is not None]
    if len(points) == 1:
        (i, value) = points[0]
        points = [(i - 0.4, value), (i + 0.4, value)]  # type: ignore[list-item]
    ax.plot([i for i, _ in points], [value for _, value in points], marker="", **style)


def _note(ax: Axes, letters: _Letters, at: float, value: float, text: str, color: str) -> None:
    """Words to the right of a line's end: no legend has to be looked up."""
    ax.annotate(text, (at + 0.5, value), xytext=(4, 0), textcoords="offset points", color=color, va="center",
                annotation_clip=False, **letters.plain(7))  # fmt: skip


def _round_steps(most: float) -> list[float]:
    """About five round numbers from 0 up."""
    step = 10.0 ** math.floor(math.log10(most / 4))
    step *= next(factor for factor in (1, 2, 5, 10) if most / (step * factor) <= 6)
    return [round(i * step, 10) for i in range(int(most / step + 1e-9) + 1)]


def _said(panel: Panel, head: int) -> list[str]:
    """A head's measures, in a line or two."""
    units = {"entropy": " nats", "distance": " tokens", "offset": " tokens"}
    parts = [f"{name.replace('_', ' ')} {value[head].item():.2f}{units.get(name, '')}"
             for name, value in panel.measures.items()]  # fmt: skip
    half = parts if len(parts) < 7 else parts[: (len(parts) + 1) // 2]
    return [" · ".join(some) for some in (half, parts[len(half) :]) if some] or [""]


def _role_words(panel: Panel, head: int) -> str:
    role = panel.roles[head]
    return f"{role.role} {role.score:.2f}"


def _tab(panel: Panel, head: int, wide: float, size: float, letters: _Letters, said: list[str]) -> str:
    """What fits onto the tab of a map: the role and its score, the role, or its letter."""
    role = panel.role(head)
    assert role is not None
    before = f"{said[0]} · " if said else ""
    tries = (f"{before}{_role_words(panel, head)}", f"{before}{role}", f"{before}{_letter(role)}")
    return next((text for text in tries if letters.wide(text, size) <= wide - 0.06), _letter(role))


def _letter(role: str) -> str:
    return MARKS[role][0] if role in MARKS else role[:1].upper()


def _color(role: str | None) -> str:
    return MARKS[role][1] if role in MARKS else QUIET


def _legend(found: Sequence[str | None], everything: bool = False) -> list[tuple[str, int]]:
    """The roles that were found, in the order of the table of roles, and how often."""
    counts = Counter(found)
    known = [rule.name for rule in ROLES]
    named = sorted((name for name in counts if name is not None), key=lambda n: known.index(n) if n in known else 99)
    return [(name, counts[name]) for name in named] + ([("no role", counts[None])] if everything else [])


def _flow(legend: list[tuple[str, int]], wide: float, letters: _Letters) -> list[list[tuple[str, int, float]]]:
    """The legend in lines: each entry with its place from the left."""
    lines: list[list[tuple[str, int, float]]] = [[]]
    x = 0.0
    for name, count in legend:
        long = 0.34 + letters.wide(f"{name} {count}", 6.5)
        if x and x + long > wide:
            lines.append([])
            x = 0.0
        lines[-1].append((name, count, x))
        x += long
    return lines


def _draw_legend(sheet: _Sheet, x: float, y: float, line: list[tuple[str, int, float]]) -> None:
    for name, count, dx in line:
        _draw_mark(sheet, x + dx, y, name)
        sheet.text(x + dx + 0.18, y + 0.07, f"{name} {count}", 6.5, ha="left", va="center")


def _draw_mark(sheet: _Sheet, x: float, y: float, role: str) -> None:
    """A role's colour with its letter."""
    if role == "no role":
        sheet.box(x, y, 0.14, 0.14, BLANK)
    else:
        sheet.tab(x, y, 0.14, 0.14, _letter(role), 6, _color(role))


def _best(panels: Sequence[Panel]) -> dict[str, float]:
    """The score at which a role has its full colour: 1 for shares of attention; the highest, for nats and tokens."""
    best: dict[str, float] = {}
    for role in (role for panel in panels for role in panel.roles if role.role is not None):
        best[str(role.role)] = max(best.get(str(role.role), 1.0), role.score or 0.0)
    return best


def _cell(ax: Axes, letters: _Letters, row: int, head: int, panel: Panel, best: dict[str, float], side: float) -> None:
    """One head of the overview of roles."""
    from matplotlib.patches import Rectangle

    role = panel.roles[head] if panel.roles else None
    color = BLANK
    if role is not None and role.role is not None:
        score, least = role.score or 0.0, role.least or 0.0
        above = (score - least) / max(best[role.role] - least, 1e-9)
        color = _mixed(_color(role.role), 0.35 + 0.65 * min(max(above, 0.0), 1.0))
    edge = 0.012 / side
    ax.add_patch(Rectangle((head + edge, row + edge), 1 - 2 * edge, 1 - 2 * edge, facecolor=color, edgecolor="none",
                           linewidth=0))  # fmt: skip
    if role is None:
        ax.text(head + 0.5, row + 0.5, "cross", color=QUIET, ha="center", va="center", **letters.plain(side * 14))
    elif role.role is not None:
        with_score = side >= 0.3
        ax.text(head + 0.5, row + (0.38 if with_score else 0.52), _letter(role.role), color=_on(color), ha="center",
                va="center", **letters.plain(min(9.0, side * 25)))  # fmt: skip
        if with_score:
            ax.text(head + 0.5, row + 0.76, _few_digits(role.score or 0.0), color=_on(color), ha="center", va="center",
                    **letters.plain(min(6.0, side * 14)))  # fmt: skip


def _few_digits(value: float) -> str:
    return f"{value:.2f}".removeprefix("0") if value < 10 else f"{value:.0f}"


@dataclass
class _Beside:
    """Labels beside a map: of its rows (and columns), the cells they stand at, and how large they are."""

    rows: list[str]
    cols: list[str]
    at: list[float]
    size: float


def _beside(panel: Panel, side: float, letters: _Letters) -> _Beside | None:
    """All tokens at both sides of a map, if there is room for them."""
    n, m = panel.shape
    size = min(6.5, side / max(n, m) * 72 * 0.85)
    if size < 4.2:
        return None
    rows, cols = ([letters.short(text, 14) for text in labels.text] for labels in (panel.queries, panel.keys))
    return _Beside(rows, cols, [], size)


def _ticks(labels: Labels, cells: int, side: float, letters: _Letters) -> _Beside:
    """Labels along a large map: every token if there is room; else some of them with their place; ranges of tokens
    where cells hold several."""
    count = len(labels)
    size = min(8.0, side * 72 * 0.8)
    every = 1
    if size < 5.0:
        size = 6.5
        every = _round_up(math.ceil(size / 0.6 / 72 / side))
    at = list(range(0, cells, every))
    if cells < count:
        ends = sizes(count, cells).cumsum(0).tolist()
        starts = [0, *ends[:-1]]
        texts = [f"{starts[i]}–{ends[i] - 1}" if ends[i] - 1 > starts[i] else f"{starts[i]}" for i in at]
    elif every > 1:
        numbered = labels == Labels.numbers(count)
        texts = [str(i) if numbered else f"{letters.short(labels.text[i], 12)} {i}" for i in at]
    else:
        texts = [letters.short(text, 18) for text in labels.text]
    return _Beside(texts, [], [float(i) for i in at], size)


def _round_up(number: int) -> int:
    """The next of 1, 2, 4, 8, 16 ...: labels that stand at round places."""
    return 1 << max(number - 1, 0).bit_length()


def _tick(
    ax: Axes,
    letters: _Letters,
    side: str,
    texts: Sequence[str],
    size: float,
    labels: Labels | None = None,
    at: Sequence[float] | None = None,
    length: float = 0.0,
    turned: bool = True,
) -> None:
    """Labels along one side of the axes: "y" left, "x" below, "top". Special tokens are quieter."""
    places = list(range(len(texts))) if at is None else list(at)
    texts = [letters.clean(text) for text in texts]
    axis = ax.yaxis if side == "y" else ax.xaxis
    axis.set_visible(True)
    ax.tick_params(
        axis="y" if side == "y" else "x", which="both", direction="out", length=length, width=0.6, color=QUIET, pad=2.5,
        labelsize=size, labelcolor=INK, grid_alpha=0.0, bottom=side == "x", top=side == "top", left=side == "y",
        right=False, labelbottom=side == "x", labeltop=side == "top", labelleft=side == "y", labelright=False,
        labelrotation=90 if turned and side != "y" else 0,
    )  # fmt: skip
    axis.set_ticks(places, labels=texts, **letters.plain(size))
    axis.set_ticks([], minor=True)
    if labels is not None and len(labels) == len(texts):
        for label, special in zip(axis.get_ticklabels(), labels.special, strict=True):
            label.set_color(QUIET if special else INK)


def _write_weights(ax: Axes, letters: _Letters, weights: Tensor, size: float) -> None:
    """The numbers, in cells that have room for them."""
    norm, shades = _norm(), _shades()
    for row, values in enumerate(weights.tolist()):
        for col, value in enumerate(values):
            if value >= 0.005:
                ax.text(col, row, _few_digits(value), color=_on(shades(norm(value))), ha="center", va="center",
                        **letters.plain(size))  # fmt: skip


# --- Colours ---------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _shades() -> Colormap:
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("regard", list(SHADES))


def _norm() -> Normalize:
    """From a weight to a shade: the square root, for most weights are small, and still are to be seen."""
    from matplotlib.colors import PowerNorm

    return PowerNorm(0.5, 0.0, 1.0, clip=True)


def _mixed(color: str, share: float) -> tuple[float, float, float]:
    """So much of a colour, on paper."""
    from matplotlib.colors import to_rgb

    red, green, blue = (1 - share * (1 - part) for part in to_rgb(color))
    return red, green, blue


def _on(color: Any) -> str:
    """Ink or paper, which can be read on a colour."""
    from matplotlib.colors import to_rgb

    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in to_rgb(color))
    return INK if 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.3 else PAPER


def _scale_across(sheet: _Sheet, x: float, y: float, wide: float, words: str) -> None:
    """The scale, lying, with what it means below."""
    ax = sheet.axes(x, y, wide, 0.08, "scale", FAINT, 0.4)
    _gradient(ax, across=True)
    marks = (0.0, 0.05, 0.25, 0.5, 1.0)
    at = [float(_norm()(mark)) for mark in marks]
    _tick(ax, sheet.letters, "x", [f"{mark:g}" for mark in marks], 6, at=at, length=2, turned=False)
    sheet.text(x + wide, y + 0.29, words, 6, QUIET, ha="right", va="center")


def _scale_down(sheet: _Sheet, x: float, y: float, high: float) -> None:
    """The scale, standing."""
    ax = sheet.axes(x, y, 0.1, high, "scale", FAINT, 0.4)
    _gradient(ax, across=False)
    marks = (0.0, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0) if high > 1.2 else (0.0, 0.1, 0.5, 1.0)
    _tick(ax, sheet.letters, "y", [f"{mark:g}" for mark in marks], 6.5, at=[float(_norm()(m)) for m in marks], length=2)
    ax.tick_params(axis="y", left=False, right=True, labelleft=False, labelright=True)


def _gradient(ax: Axes, across: bool) -> None:
    """All shades in the order of the scale. The axis is that of shades, so that marks stand by the square root."""
    shades = torch.linspace(0, 1, 256)
    data = shades[None] if across else shades[:, None]
    ax.imshow(data.numpy(), cmap=_shades(), vmin=0, vmax=1, aspect="auto", interpolation="nearest", origin="lower",
              extent=(0, 1, 0, 1), resample=True)  # fmt: skip


# --- Paper and letters -----------------------------------------------------------------------------------------------


class _Sheet:
    """A figure in inches from its top left corner."""

    def __init__(self, letters: _Letters, wide: float, high: float, dpi: float) -> None:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        self.letters, self.wide, self.high = letters, wide, high
        self.figure = Figure((wide, high), dpi, facecolor=PAPER, edgecolor=PAPER, linewidth=0, layout="none")
        FigureCanvasAgg(self.figure)
        self.figure._repr_png_ = partial(_png, self.figure, dpi)  # type: ignore[attr-defined]  # (in a notebook)

    def axes(
        self, x: float, y: float, wide: float, high: float, label: str, frame: str | None, line: float = 0.6
    ) -> Axes:
        """Empty axes, with a frame or without."""
        place = (x / self.wide, 1 - (y + high) / self.high, wide / self.wide, high / self.high)
        ax = self.figure.add_axes(place, label=label, facecolor=PAPER)
        ax.grid(False)
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_ticks([])
            axis.set_visible(False)
        for spine in ax.spines.values():
            spine.set(visible=frame is not None, color=frame or FAINT, linewidth=line)
        return ax

    def map(self, ax: Axes, data: Tensor) -> None:
        """A map of weights, the first query on top."""
        ax.imshow(data.numpy(), cmap=_shades(), norm=_norm(), aspect="auto", interpolation="antialiased",
                  interpolation_stage="data", origin="upper", resample=True)  # fmt: skip

    def text(self, x: float, y: float, text: str, size: float, color: str = INK, *, bold: bool = False,
             **where: Any) -> Text:  # fmt: skip
        text = self.letters.clean(text, bold=bold)
        return self.figure.text(x, self.high - y, text, color=color, transform=self.figure.dpi_scale_trans,
                                rotation_mode="anchor", **where, **self.letters.plain(size, bold))  # fmt: skip

    def box(self, x: float, y: float, wide: float, high: float, color: str) -> None:
        from matplotlib.patches import Rectangle

        self.figure.add_artist(
            Rectangle((x, self.high - y - high), wide, high, facecolor=color, edgecolor="none", linewidth=0,
                      transform=self.figure.dpi_scale_trans)
        )  # fmt: skip

    def tab(self, x: float, y: float, wide: float, high: float, text: str, size: float, color: str) -> None:
        """A coloured box with words in it."""
        self.box(x, y, wide, high, color)
        self.text(x + wide / 2, y + high * 0.54, text, size, _on(color), ha="center", va="center")


class _Letters:
    """Text that can be drawn: in the user's font, in others for what that does not know, and □ for the rest."""

    def __init__(self) -> None:
        from matplotlib.font_manager import FontProperties

        own = dict.fromkeys([*FontProperties().get_family(), "DejaVu Sans"])  # (the last comes with matplotlib)
        self.usual = [name for name in own if _font_file(name)]
        self.families = list(self.usual)  # and those for other scripts, when they are met
        self.known = [_characters(_font_file(name)) for name in self.usual]
        self.known_bold = [_characters(_font_file(name, bold=True)) for name in self.usual]
        self.unknown: set[str] = set()

    def font(self, size: float, bold: bool = False) -> FontProperties:
        from matplotlib.font_manager import FontProperties

        return FontProperties(family=self.usual if bold else self.families, style="normal", variant="normal",
                              stretch="normal", weight="bold" if bold else "normal", size=size)  # fmt: skip

    def plain(self, size: float, bold: bool = False) -> dict[str, Any]:
        """How text is to be taken: as it is. Dollars are dollars, no formulas, and LaTeX is not asked."""
        return {"fontproperties": self.font(size, bold), "parse_math": False, "usetex": False}

    def wide(self, text: str, size: float, bold: bool = False) -> float:
        """Inches that a line of text takes."""
        from matplotlib.textpath import text_to_path

        text = self.clean(text, bold)
        return text_to_path.get_text_width_height_descent(text, self.font(size, bold), ismath=False)[0] / 72

    def short(self, text: str, most: int) -> str:
        """A text cut to so many columns, an ellipsis at its end. (Wide characters take two.)"""
        text, columns = self.clean(text[: 4 * most]) + ("…" if len(text) > 4 * most else ""), 0
        for i, character in enumerate(text):
            columns += 2 if unicodedata.east_asian_width(character) in "WF" else 1
            if columns > most:
                return text[: max(i - 1, 0)] + "…"
        return text

    def clean(self, text: str, bold: bool = False) -> str:
        """With □ for what no font knows, and without marks that only choose between looks of a character."""
        return "".join(self._drawable(character, bold) for character in text)

    def _drawable(self, character: str, bold: bool) -> str:
        code = ord(character)
        if 0xFE00 <= code <= 0xFE0F:
            return ""
        if not character.isprintable():
            return " "
        if any(code in some for some in (self.known_bold if bold else self.known)):
            return character
        return character if not bold and self._found(character) else "□"

    def _found(self, character: str) -> bool:
        """Whether there is another font that knows a character; from then on it is used."""
        if character in self.unknown:
            return False
        for name in FONTS:
            file = None if name in self.families else _font_file(name)
            if file and ord(character) in _characters(file):
                self.families.append(name)
                self.known.append(_characters(file))
                return True
        self.unknown.add(character)
        return False


def _font_file(name: str, bold: bool = False) -> Any:
    """Where a font is, or None."""
    from matplotlib.font_manager import FontProperties, fontManager

    if name in FONTS and name not in fontManager.get_font_names():
        return None  # (without words in the log, as they come where a font is asked for that is not there)
    try:
        wanted = FontProperties(family=[name], weight="bold" if bold else "normal")
        return fontManager.findfont(wanted, fallback_to_default=False)
    except ValueError:
        return None


@lru_cache(maxsize=64)
def _characters(file: Any) -> frozenset[int]:
    """What a font can draw."""
    from matplotlib.font_manager import get_font

    try:
        return frozenset(get_font(file).get_charmap())
    except (OSError, RuntimeError):  # made of bitmaps, as those of coloured emoji are
        return frozenset()


# --- Files -----------------------------------------------------------------------------------------------------------


def _write(figure: Figure, path: str | io.BytesIO, suffix: str | None, dpi: float) -> None:
    """Write a figure: text as text where the format has it, and nothing of the day or of chance."""
    dates: dict[str, dict[str, None]] = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
    vector = suffix in dates
    with _file_settings() if vector else nullcontext():
        figure.savefig(
            path, format=(suffix or ".png")[1:], dpi=max(dpi, VECTOR_DPI) if vector else dpi,
            metadata=dates.get(suffix or "", {}), facecolor=PAPER, edgecolor=PAPER, transparent=False,
            bbox_inches=figure.bbox_inches, pad_inches=0,
        )  # fmt: skip


def _png(figure: Figure, dpi: float) -> bytes:
    """What a notebook shows."""
    file = io.BytesIO()
    _write(figure, file, ".png", dpi)
    return file.getvalue()


_WRITING = threading.Lock()


@contextmanager
def _file_settings() -> Iterator[None]:
    """What matplotlib asks rcParams alone for, while a file is written: one file at a time, and as it was after."""
    from matplotlib import rcParams

    ours = {"svg.fonttype": "none", "svg.hashsalt": "regard", "svg.image_inline": True, "pdf.fonttype": 42}
    with _WRITING:
        before = {name: rcParams[name] for name in ours}
        rcParams.update(ours)
        try:
            yield
        finally:
            rcParams.update(before)
