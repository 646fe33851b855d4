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
from itertools import pairwise
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

__all__ = ["figure"]

INK, QUIET, FAINT, BLANK, PAPER = "#1b1f27", "#6a7280", "#c9ced6", "#f1f2f4", "#ffffff"

# From the white of the paper down, in even steps of lightness (CIE L* 100 to 12): printed in grey the order stays.
SHADES = ("#ffffff", "#d5eeff", "#acdbff", "#89c7f9", "#6bb3f0", "#539ee3", "#438ad2", "#3a75bd", "#3861a4", "#364e89",
          "#323c6c", "#2b2b4e", "#201c37")  # fmt: skip

# A sign and a colour for each role, as on the page: the sign tells where the colour does not.
SIGNS = {
    "induction": ("I", "#cc3311"),
    "duplicate": ("D", "#ee7733"),
    "previous": ("←", "#0077bb"),
    "next": ("→", "#33bbee"),
    "itself": ("•", "#009988"),
    "separator": ("S", "#aa4499"),
    "punctuation": ("P", "#882255"),
    "first": ("1", "#777777"),
    "local": ("L", "#117733"),
    "long-range": ("R", "#999933"),
    "broad": ("B", "#ddaa33"),
}

PAGE = 7.0  # inches that a figure is wide at most, unless it is told how wide: the text of a page
TALL = 9.4  # inches that it is tall at most, as far as its parts can be made smaller
CELLS = 256  # of a large map, to each side; a longer text is pooled
SUFFIXES = (".png", ".svg", ".pdf")
MAPS = "attention weight; queries down, keys across"
SHADED = ("shade: the score, from what", "the role takes to the most")
VECTOR_DPI = 300  # of the maps in SVG and PDF: their cells are images, for seams show between many small squares

# Fonts that know other scripts, asked in this order where the user's font does not know a character.
FONTS = (
    "Noto Sans CJK SC", "Noto Sans CJK JP", "Noto Sans SC", "Noto Sans JP", "Noto Sans KR", "Source Han Sans SC",
    "WenQuanYi Micro Hei", "WenQuanYi Zen Hei", "PingFang SC", "Hiragino Sans GB", "Apple SD Gothic Neo",
    "Microsoft YaHei", "Yu Gothic", "Malgun Gothic", "Arial Unicode MS", "Noto Sans Arabic", "Noto Sans Hebrew",
    "Noto Sans Devanagari", "Noto Sans Thai", "Noto Sans Symbols2", "Noto Sans Math", "Noto Emoji", "Segoe UI Symbol",
    "Segoe UI Emoji", "Symbola", "Unifont", "STIXGeneral",
)  # fmt: skip


JOINERS = "\u200c\u200d"  # without a shape of their own, between letters and in emoji


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
    | `"roles"`   | which head has which role: a sign each, the shade by its score        | the default measures      |
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
        width: of the figure, in inches; by default as wide as what it shows, and 7 at most where that is enough.
        dpi: dots for each inch, of PNG and notebooks.

    Returns:
        A `matplotlib.figure.Figure`, which shows itself in a notebook. The map of head 2 of layer 0 is the image with
        the label "0.2": `figure.findobj(lambda artist: artist.get_label() == "0.2")`.

    >>> import regard, torch
    >>> model = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    >>> with regard.watch(model, keep="qk") as seen:
    ...     _ = model(*[torch.randn(1, 4, 8)] * 3, need_weights=False)
    >>> drawn = figure(seen, ["a", "cat", "sat", "down"])
    >>> [(image.get_label(), image.get_array().shape) for image in drawn.axes[0].images]
    [('0.0', (4, 4)), ('0.1', (4, 4))]
    >>> one = figure(seen, ["a", "cat", "sat", "down"], layer=0, head=1)
    >>> [label.get_text() for label in one.axes[1].get_xticklabels()]
    ['a', 'cat', 'sat', 'down']
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
    drawn = drawing(_Order(panels, layer is not None, head, width, dpi, _Letters(), _names(scene.panels)))
    if path is not None:
        _write(drawn, fspath(path), suffix, dpi)
    return drawn


@dataclass
class _Order:
    """What is to be drawn, and how large."""

    panels: list[Panel]
    one_layer: bool  # was asked for
    head: int | None
    width: float | None
    dpi: float
    letters: _Letters
    names: list[str]  # of all layers, short

    @property
    def most(self) -> float:
        """Inches that the figure may be wide."""
        return self.width or PAGE

    def short_names(self) -> list[str]:
        """The names of the layers that are drawn."""
        return [self.letters.short(self.names[panel.number], 32) for panel in self.panels]

    def title(self, panel: Panel) -> str:
        """A layer's name where it stands alone."""
        name = self.letters.short(self.names[panel.number], 32)
        return f"layer {name}" if name.isdigit() else name


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
    """The maps of all heads: layers down and heads across; or those of one layer, larger."""
    return _one_layer(order) if order.one_layer else _all_layers(order)


def _all_layers(order: _Order) -> Figure:
    """Layers down, heads across. A deep model stands in several columns, as text does."""
    panels, letters, names = order.panels, order.letters, order.short_names()
    across = max(panel.heads for panel in panels)
    left, top, gap = 0.2 + letters.widest(["layer", *names], 7), 0.36, 0.06

    def side(columns: int) -> float:
        """Of a map, if the layers stand in so many columns."""
        fits = (order.most / columns - left - 0.06) / across - gap
        down = (TALL - top - 0.7) / math.ceil(len(panels) / columns) - gap - 0.16
        return fits if order.width else min(fits, down, 2.2)

    columns = max(range(1, min(len(panels), 8) + 1), key=lambda n: (round(side(n), 2), -n))
    need = columns * (left + 0.06 + across * (0.1 + gap))
    one = _at_least(side(columns), 0.26, order, need, f"{across} heads")
    high, size = (0.16, 5.8) if one >= 0.4 else (0.13, 5.0)  # of the line above a map
    down = math.ceil(len(panels) / columns)
    block = left + across * (one + gap)
    wide = order.width or max(columns * block - gap + 0.12, 2.6)
    foot = _Foot(letters, _legend(panels), wide - left - 0.12, MAPS)
    sheet = _Sheet(letters, wide, top + down * (one + high + gap) + 0.1 + foot.high, order.dpi)
    for i, panel in enumerate(panels):
        x, y = (i // down) * block + left, top + (i % down) * (one + high + gap) + high
        if i % down == 0:
            _head_numbers(sheet, x, top, one + gap, one / 2, across)
        sheet.text(x - 0.08, y + one / 2, names[i], 7, ha="right", va="center")
        maps = _pooled_heads(panel, one * order.dpi)
        for head in range(panel.heads):
            _draw_map(sheet, x + head * (one + gap), y, one, panel, head, maps[head])
            _draw_role(sheet, x + head * (one + gap), y - 0.02, one, panel, head, size)
    foot.draw(sheet, left)
    return sheet.figure


def _one_layer(order: _Order) -> Figure:
    """The maps of one layer's heads, in rows, with tokens beside them where there is room."""
    panel, letters = order.panels[0], order.letters
    across = _in_a_row(panel.heads)
    down = math.ceil(panel.heads / across)
    gap, high, top = 0.1, 0.18, 0.34

    def side(left: float, below: float) -> float:
        fits = (order.most - left - 0.12 + gap) / across - gap
        return fits if order.width else min(fits, (TALL - top - below - 0.7) / down - gap - high, 2.6)

    size = min(6.5, side(0.8, 0.6) / max(panel.shape) * 72 * 0.85)  # of tokens; none where they would be too small
    queries, keys = ([letters.short(text, 14) for text in labels.text if size >= 4.2]
                     for labels in (panel.queries, panel.keys))  # fmt: skip
    left, below = 0.16 + letters.widest(queries, size), 0.08 + letters.widest(keys, size)
    one = _at_least(side(left, below), 0.4, order, left + 0.1 + across * (0.4 + gap), f"{across} maps in a row")
    wide = order.width or max(left + across * (one + gap) - gap + 0.12, 2.6)
    foot = _Foot(letters, _legend([panel]), wide - left - 0.12, MAPS)
    sheet = _Sheet(letters, wide, top + down * (one + high + gap) + below + foot.high, order.dpi)
    sheet.text(left, 0.24, letters.short(panel.name, 48), 8, bold=True, ha="left", va="baseline")
    maps = _pooled_heads(panel, one * order.dpi)
    for head in range(panel.heads):
        i, j = divmod(head, across)
        x, y = left + j * (one + gap), top + i * (one + high + gap) + high
        _draw_map(sheet, x, y, one, panel, head, maps[head])
        sheet.text(x, y - 0.05, f"head {head}", 6.5, ha="left", va="baseline")
        _draw_role(sheet, x, y - 0.03, one, panel, head, 6.5, named=True)
        if j == 0:
            _labels_left(sheet, x, y, one, queries, size, panel.queries.special)
        if head + across >= panel.heads:  # (no map stands below it)
            _labels_below(sheet, x, y + one, one, keys, size, panel.keys.special)
    foot.draw(sheet, left)
    return sheet.figure


def _head(order: _Order) -> Figure:
    """One head, large."""
    panel, letters, head = order.panels[0], order.letters, order.head
    assert head is not None
    weights = _pooled_head(panel, head)
    rows, cols = weights.shape

    def cell(left: float) -> tuple[float, float]:
        """How wide and how high: square, unless the map would be a thread."""
        square = min(order.width or 0.42, (order.most - left - 0.7) / cols, (TALL - 2.2) / rows)
        return max(square, 0.25 / cols), max(square, 0.25 / rows)

    queries = _along(panel.queries, rows, cell(1.2)[1], letters)
    left = 0.4 + letters.widest(queries.texts, queries.size)
    wide, high = cell(_at_least(left, left, order, left + 1.2, "a map with its labels"))
    queries, keys = _along(panel.queries, rows, high, letters), _along(panel.keys, cols, wide, letters)
    heading = _Heading(letters, panel, head, order.width, left + cols * wide + 0.7)
    top = heading.high + 0.24 + letters.widest(keys.texts, keys.size)
    sheet = _Sheet(letters, heading.wide, top + max(rows * high, 0.8) + 0.16, order.dpi)
    heading.draw(sheet)
    ax = sheet.axes(left, top, cols * wide, rows * high, "map")
    ax.imshow(weights.numpy(), label=f"{panel.number}.{head}", **_look())
    if min(wide, high) >= 0.12:
        _lines_between(ax, rows, cols)
    _tick(ax, letters, "left", queries.texts, queries.size, queries.at, special=queries.special)
    _tick(ax, letters, "top", keys.texts, keys.size, keys.at, special=keys.special)
    sheet.text(0.22, top + rows * high / 2, "query", 7.5, QUIET, ha="center", va="center", rotation=90)
    sheet.text(left + cols * wide / 2, heading.high + 0.12, "key", 7.5, QUIET, ha="center", va="center")
    if min(wide, high) >= 0.3 and rows * cols <= 400:
        _write_weights(ax, letters, weights, min(6.5, wide * 16))
    _scale_standing(sheet, left + cols * wide + 0.16, top, min(max(rows * high, 0.8), 2.2))
    return sheet.figure


def _roles(order: _Order) -> Figure:
    """Which head has which role: a sign each. The legend stands beside, or below where the figure is narrow."""
    panels, letters, names = order.panels, order.letters, order.short_names()
    if not any(panel.roles for panel in panels):
        raise bad_value("record", expected="self attention, with the default measures", received=repr(panels[0].layer),
                        remedy="watch(model)")  # fmt: skip
    across, legend = max(panel.heads for panel in panels), _legend(panels, everything=True)
    left, top = 0.2 + letters.widest(["layer", *names], 7), 0.38
    column = 0.3 + max(letters.widest(SHADED, 6), 0.55 + letters.widest([name for name, _ in legend], 7))
    beside = order.most >= left + column + 0.2 * across
    aside = column if beside else 0.12
    side = (order.most - left - aside) / across
    side = side if order.width else min(side, 0.42, (TALL - 0.6) / len(panels))
    side = _at_least(side, 0.2, order, left + aside + 0.1 * across, f"{across} heads")
    foot = _Foot(letters, legend, across * side)
    wide, high = order.width or left + across * side + aside, len(panels) * side
    below = max(high, len(legend) * 0.2 + 0.35) + 0.14 if beside else high + foot.high + 0.28
    sheet = _Sheet(letters, wide, top + below, order.dpi)
    best = _best(panels)
    _head_numbers(sheet, left, top - 0.03, side, side / 2, across)
    for row, panel in enumerate(panels):
        y = top + row * side
        sheet.text(left - 0.08, y + side / 2, names[row], 7, ha="right", va="center")
        for head in range(panel.heads):
            _draw_score(sheet, left + head * side, y, side, panel, head, best)
    if beside:
        _draw_column(sheet, left + across * side + 0.18, top, column - 0.34, legend)
    else:
        sheet.text(left, sheet.high - foot.high - 0.06, " ".join(SHADED), 6, QUIET, ha="left", va="center")
        foot.draw(sheet, left)
    return sheet.figure


def _offsets(order: _Order) -> Figure:
    """Where heads look, relative to the query: for each layer a row for each head, and below one of equal weights."""
    panels, letters = order.panels, order.letters
    profiles, before, after = _profiles(panels)
    steps, heads = before + 1 + after, max(panel.heads for panel in panels)
    left, gap, title = 0.54, 0.26, 0.24
    side = 0.2 if order.one_layer else 0.1
    least = 0.055 if order.width else side
    across = max(1, min(len(panels), int((order.most - left) / (steps * least + gap))))
    down = math.ceil(len(panels) / across)
    across = math.ceil(len(panels) / down)  # (rows as even as can be)
    if order.width:
        side = ((order.width - left) / across - gap) / steps
    _at_least(side, side, order, left + gap + 0.05 * steps, f"{steps} offsets")
    wide = order.width or max(left + across * (steps * side + gap), 2.6)
    pitch = title + (heads + 1.5) * side + 0.26
    foot = _Foot(letters, _legend(panels), wide - left - gap, "share of attention, by offset from the query")
    sheet = _Sheet(letters, wide, 0.04 + down * pitch + foot.high, order.dpi)
    size = min(6.5, side * 58)
    for i, (panel, (profile, even)) in enumerate(zip(panels, profiles, strict=True)):
        x, y = left + (i % across) * (steps * side + gap), 0.04 + (i // across) * pitch + title
        long, below = steps * side, y + (panel.heads + 0.5) * side
        sheet.text(x, y - 0.05, order.title(panel), 7, ha="left", va="baseline")
        sheet.image(x, y, long, panel.heads * side, profile, str(panel.number))
        sheet.image(x, below, long, side, even, f"{panel.number} equal weights")
        marks = range(-before, after + 1, max(1, max(before, after) // 2))
        for j in marks:
            sheet.text(x + (j + before + 0.5) * side, below + side + 0.11, _signed(j), 6, ha="center", va="baseline")
        for head in range(panel.heads):
            if role := panel.role(head):
                sheet.text(x + long + 0.03, y + (head + 0.5) * side, _sign(role), size, _color(role), ha="left",
                           va="center")  # fmt: skip
        if i % across == 0:
            _labels_left(sheet, x, y, panel.heads * side, [str(head) for head in range(panel.heads)], size)
            _labels_left(sheet, x, below, side, ["equal"], size)
            sheet.text(x - 0.38, y + panel.heads * side / 2, "head", 6.5, QUIET, ha="center", va="center", rotation=90)
    foot.draw(sheet, left)
    return sheet.figure


def _entropy(order: _Order) -> Figure:
    """How widely each head looks, by layer: a dot for each, their mean, and what equal weights would have."""
    panels, letters, names = order.panels, order.letters, order.short_names()
    values = [_measured(panel.layer, "entropy") for panel in panels]
    bases = [panel.layer.uniform for panel in panels]
    even = [math.nan if base is None else _measured(base, "entropy")[0].item() for base in bases]
    means = [value.mean().item() for value in values]
    most = max(value for value in [*torch.cat(values).tolist(), *even] if not math.isnan(value)) or 1.0
    wide = order.width or min(PAGE, max(3.4, 1.8 + 0.5 * len(panels)))
    left, right, top, high = 0.62, 0.95, 0.14, max(1.6, min(2.8, wide * 0.42))
    pitch = _at_least((wide - left - right) / len(panels), 0.0, order, 2.4, "the plot and its labels")
    long = letters.widest(names, 7)
    turned = long > 0.95 * pitch and not all(name.isdigit() for name in names)
    below = (long if turned else 0.1) + 0.44
    sheet = _Sheet(letters, wide, top + high + below, order.dpi)
    ax = sheet.axes(left, top, wide - left - right, high, "entropy", frame=None)
    ax.set_xlim(-0.5, len(panels) - 0.5)
    ax.set_ylim(-0.03 * most, 1.06 * most)
    for side in ("left", "bottom"):
        ax.spines[side].set(visible=True, color=QUIET, linewidth=0.6)
    marks = _round_numbers(1.06 * most)
    _tick(ax, letters, "left", [f"{mark:g}" for mark in marks], 7, marks, length=2.5)
    every = math.ceil((0.13 if turned else 1.4 * long) / pitch)
    shown = range(0, len(panels), every)
    _tick(ax, letters, "bottom", [names[i] for i in shown], 7, shown, length=2.5, turned=turned)
    _draw_dots(ax, values, pitch)
    for first, last in _runs(even):
        ax.plot([first - 0.5, last + 0.5], [even[first]] * 2, label="equal weights", color=QUIET, linewidth=1.0,
                linestyle=(0, (4, 2)), marker="", zorder=1)  # fmt: skip
    for stack in _stacks([panel.name for panel in panels]):
        ax.plot(stack, [means[i] for i in stack], label="mean", color=INK, linewidth=0.8, linestyle="-", marker="_",
                markersize=min(9.0, pitch * 40), markeredgewidth=1.6, markeredgecolor=INK, zorder=3)  # fmt: skip
    _notes(ax, letters, high, [("mean", means[-1], INK), ("equal weights", even[-1], QUIET)])
    sheet.text(0.18, top + high / 2, "entropy in nats", 7.5, ha="center", va="center", rotation=90)
    sheet.text(left + (wide - left - right) / 2, top + high + below - 0.12, "layer, its heads from left to right", 7.5,
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


def _at_least(size: float, natural: float, order: _Order, need: float, what: str) -> float:
    """A size that parts can have: by default no less than is pleasant; an error if a width leaves no room."""
    if order.width is None:
        return max(size, natural)
    if order.width < need:
        raise bad_value(
            "width", expected=f"at least {math.ceil(need * 10) / 10} inches, for {what}", received=f"{order.width:g}"
        )
    return size


def _cells(tokens: int, most: float = CELLS) -> int:
    """Into how many cells tokens are pooled: as many in each, as far as they can be shared out."""
    return math.ceil(tokens / math.ceil(tokens / max(16, min(int(most), CELLS))))


def _pooled_heads(panel: Panel, dots: float) -> Tensor:
    """The maps of all heads at a size of so many dots."""
    n, m = panel.shape
    return panel.pooled(_cells(n, dots), _cells(m, dots))


def _pooled_head(panel: Panel, head: int) -> Tensor:
    """The map of one head. (Of a long text, to look at all heads for it would take many times as long.)"""
    n, m = panel.shape
    if not panel.layer.exact:
        return panel.pooled(n, m)[head]  # (as it was measured: pooled again, ranges of tokens would not be even)
    found = torch.zeros(_cells(n), _cells(m))
    down, across = (torch.arange(size) * cells // size for size, cells in zip((n, m), found.shape, strict=True))
    step = max(1, 2**22 // m)
    for start in range(0, n, step):
        rows = slice(start, min(start + step, n))
        strip = torch.zeros(rows.stop - rows.start, found.shape[1])
        found.index_add_(0, down[rows], strip.index_add_(1, across, panel.weights(head, rows)))
    return found / sizes(n, found.shape[0])[:, None]


def _measured(layer: Layer, name: str) -> Tensor:
    """The mean of a measure, for each head."""
    if not layer.has(name):
        raise bad_value("record", expected=f"{name} measured, as by default", received=repr(layer),
                        remedy=f"watch(model, measures=[..., {name!r}])")  # fmt: skip
    return layer.per_head(name).float().cpu()


def _profiles(panels: Sequence[Panel]) -> tuple[list[tuple[Tensor, Tensor]], int, int]:
    """The mass by offset of each layer's heads and of equal weights, and how far it goes before and after. Where nobody
    looks ahead, it ends at the query."""
    ours = [_measured(panel.layer, "offsets") for panel in panels]
    bases = [panel.layer.uniform for panel in panels]
    even = [
        torch.zeros_like(own[:1]) if base is None else _measured(base, "offsets")
        for own, base in zip(ours, bases, strict=True)
    ]
    measure = next(one for one in panels[0].layer.measures if "offsets" in one.gives)
    before = int(getattr(measure, "before", 0))
    after = ours[0].shape[1] - 1 - before
    if all((own[:, before + 1 :] == 0).all() for own in ours):
        after = 0
    end = before + 1 + after
    return [(own[:, :end], base[:, :end]) for own, base in zip(ours, even, strict=True)], before, after


def _names(panels: Sequence[Panel]) -> list[str]:
    """Layers' names without what all of them begin and end with: 0, 1, 2 of blocks.0.attention and so on."""
    parts = [panel.name.split(".") for panel in panels]
    least = min(len(part) for part in parts)
    first = next((i for i in range(least) if len({part[i] for part in parts}) > 1), least)
    last = next((i for i in range(least - first) if len({part[-1 - i] for part in parts}) > 1), least - first)
    return [".".join(part[first : len(part) - last]) or panel.name for part, panel in zip(parts, panels, strict=True)]


def _in_a_row(heads: int) -> int:
    """How many maps of one layer stand in a row: rows that are full, where that can be."""
    least = math.isqrt(max(heads - 1, 0)) + 1
    return next((n for n in range(least, min(2 * least, 8) + 1) if heads % n == 0), min(least, 8))


def _stacks(names: Sequence[str]) -> list[list[int]]:
    """Layers that follow each other, by their names but for the numbers in them: those of an encoder, of a decoder."""
    found: dict[str, list[int]] = {}
    for i, name in enumerate(names):
        found.setdefault(re.sub(r"\d+", "#", name), []).append(i)
    return list(found.values())


def _runs(values: Sequence[float]) -> list[tuple[int, int]]:
    """The first and the last of neighbours that are the same (to rounding)."""
    starts = [i for i, value in enumerate(values) if not i or not math.isclose(value, values[i - 1], rel_tol=1e-6)]
    return [(a, b - 1) for a, b in pairwise([*starts, len(values)])]


def _round_numbers(most: float) -> list[float]:
    """A few round numbers from 0 up."""
    step = 10.0 ** math.floor(math.log10(most / 4))
    step *= next(factor for factor in (1, 2, 5, 10) if most / (step * factor) <= 6)
    return [round(i * step, 10) for i in range(int(most / step + 1e-9) + 1)]


def _signed(number: int) -> str:
    return f"{number:+d}".replace("-", "−") if number else "0"


def _few_digits(value: float) -> str:
    return f"{value:.2f}".removeprefix("0") if value < 9.995 else f"{value:.0f}"


class _Heading:
    """What stands above one head: its name, its role with its score and that of equal weights, its measures. It makes
    the figure wider where that is left open, and is broken into lines where it is not."""

    def __init__(self, letters: _Letters, panel: Panel, head: int, width: float | None, need: float) -> None:
        self.role = panel.role(head)
        self.title = f"{letters.short(panel.name, 48)} · head {head}"
        self.words = ""
        if self.role:
            score, baseline = (getattr(panel.roles[head], name) or 0.0 for name in ("score", "baseline"))
            self.words = f"{self.role} {score:.2f} (equal weights {baseline:.2f})"
            if width and 0.52 + letters.wide(self.words, 8) > width:
                self.words = f"{self.role} {score:.2f}"
        title, words = letters.wide(self.title, 10, bold=True), letters.wide(self.words, 8)
        self.wide = width or max(need, 0.32 + title + (0.34 + words if self.role else 0.0), 3.2)
        self.size = 10 * min(1.0, (self.wide - 0.32) / title)
        self.after = 0.3 + title if self.role and 0.66 + title + words <= self.wide else 0.0  # 0: in a line of its own
        self.lines = _broken(_said(panel, head), self.wide - 0.32, letters)
        self.start = 0.48 + (0.2 if self.role and not self.after else 0.0)
        self.high = self.start + 0.14 * len(self.lines)

    def draw(self, sheet: _Sheet) -> None:
        sheet.text(0.16, 0.28, self.title, self.size, bold=True, ha="left", va="baseline")
        if self.role:
            x, y = (self.after, 0.28) if self.after else (0.16, 0.48)
            _draw_sign(sheet, x, y - 0.12, self.role)
            sheet.text(x + 0.2, y, self.words, 8, ha="left", va="baseline")
        for i, line in enumerate(self.lines):
            sheet.text(0.16, self.start + 0.14 * i, line, 7, QUIET, ha="left", va="baseline")


def _said(panel: Panel, head: int) -> list[str]:
    """A head's measures."""
    units = {"entropy": " nats", "distance": " tokens", "offset": " tokens"}
    return [f"{name.replace('_', ' ')} {value[head].item():.2f}{units.get(name, '')}".replace("-", "−")
            for name, value in panel.measures.items()]  # fmt: skip


def _broken(parts: Sequence[str], room: float, letters: _Letters) -> list[str]:
    """Parts of a text in lines that fit."""
    lines: list[str] = []
    for part in parts:
        longer = f"{lines[-1]} · {part}" if lines else part
        if lines and letters.wide(longer, 7) <= room:
            lines[-1] = longer
        else:
            lines.append(part)
    return lines


def _sign(role: str) -> str:
    return SIGNS[role][0] if role in SIGNS else role[:1].upper()


def _color(role: str) -> str:
    return SIGNS[role][1] if role in SIGNS else QUIET


def _legend(panels: Sequence[Panel], everything: bool = False) -> list[tuple[str, int]]:
    """The roles that heads have, in the order of the table of roles, and how many have each."""
    counts = Counter(panel.role(head) for panel in panels if panel.roles for head in range(panel.heads))
    known = [rule.name for rule in ROLES]
    names = sorted((name for name in counts if name), key=lambda n: known.index(n) if n in known else len(known))
    return [(name, counts[name]) for name in names] + (
        [("no role", counts[None])] if everything and counts[None] else []
    )


def _draw_column(sheet: _Sheet, x: float, y: float, wide: float, legend: Sequence[tuple[str, int]]) -> None:
    """The roles with their signs and how many heads have each, one below the other."""
    for i, (name, count) in enumerate(legend):
        middle = y + 0.2 * i + 0.09
        _draw_sign(sheet, x, middle - 0.07, name)
        sheet.text(x + 0.2, middle, name, 7, ha="left", va="center")
        sheet.text(x + wide, middle, str(count), 7, QUIET, ha="right", va="center")
    for i, part in enumerate(SHADED):
        sheet.text(x, y + 0.2 * len(legend) + 0.12 + 0.12 * i, part, 6, QUIET, ha="left", va="center")


class _Foot:
    """What stands below: roles with their signs, and the scale if there is one; beside each other if there is room."""

    def __init__(self, letters: _Letters, legend: Sequence[tuple[str, int]], wide: float, words: str = "") -> None:
        self.words, self.right = words, wide
        scale = max(1.5, letters.wide(words, 6)) if words else 0.0
        self.beside = not words or wide - scale - 0.2 >= 1.0
        room = wide - scale - 0.2 if self.beside else wide
        self.entries: list[tuple[str, str, float, int]] = []  # role, words, place from the left, line
        x, line = 0.0, 0
        for name, count in legend:
            long = 0.36 + letters.wide(f"{name} {count}", 6.5)
            if x and x + long > room:
                x, line = 0.0, line + 1
            self.entries.append((name, f"{name} {count}", x, line))
            x += long
        self.tall = 0.18 * (line + 1) if self.entries else 0.0
        self.high = 0.14 + (max(self.tall, 0.36 if words else 0.0) if self.beside else self.tall + 0.42)

    def draw(self, sheet: _Sheet, left: float) -> None:
        top = sheet.high - self.high + 0.02
        for role, words, x, line in self.entries:
            _draw_sign(sheet, left + x, top + 0.18 * line, role)
            sheet.text(left + x + 0.18, top + 0.18 * line + 0.07, words, 6.5, ha="left", va="center")
        if self.words:
            _scale_lying(sheet, left + self.right, top + (0.03 if self.beside else self.tall + 0.05), self.words)


def _head_numbers(sheet: _Sheet, x: float, y: float, pitch: float, middle: float, across: int) -> None:
    """The heads' numbers above a grid, and what stands there."""
    sheet.text(x - 0.08, y, "layer", 6.5, QUIET, ha="right", va="bottom")
    sheet.text(x, y - 0.14, "head", 6.5, QUIET, ha="left", va="bottom")
    for head in range(across):
        sheet.text(x + head * pitch + middle, y, str(head), 6.5, ha="center", va="bottom")


def _draw_map(sheet: _Sheet, x: float, y: float, side: float, panel: Panel, head: int, data: Tensor) -> None:
    """The map of one head, its frame in the colour of its role."""
    role = panel.role(head)
    frame, line = (_color(role), 0.9) if role else (FAINT, 0.5)
    sheet.image(x, y, side, side, data, f"{panel.number}.{head}", frame, line)


def _draw_role(
    sheet: _Sheet, x: float, y: float, wide: float, panel: Panel, head: int, size: float, named: bool = False
) -> None:
    """The role of a head and its score on the upper edge of its map: in words, to the right; else by its sign."""
    role = panel.role(head)
    if role is None:
        return
    score, box = _few_digits(panel.roles[head].score or 0.0), size / 72 * 1.25
    words = f"{role} {score}" if named else score
    long = box + 0.05 + sheet.letters.wide(words, size)
    if named and wide - long < sheet.letters.wide("head 000", size):  # no room beside the head's number
        words, long = "", box
    start = x + wide - long if named else x
    sheet.badge(start, y - box, box, _sign(role), size * 0.92, _color(role))
    if long <= wide + 0.01:
        sheet.text(start + box + 0.05, y - box / 2, words, size, INK if named else QUIET, ha="left", va="center")


def _draw_sign(sheet: _Sheet, x: float, y: float, role: str) -> None:
    """A role's colour with its sign."""
    if role == "no role":
        sheet.box(x, y, 0.14, 0.14, BLANK)
    else:
        sheet.badge(x, y, 0.14, _sign(role), 6.2, _color(role))


def _best(panels: Sequence[Panel]) -> dict[str | None, float]:
    """The score at which a role has its full colour: 1 for shares of attention; the highest, for nats and tokens."""
    best: dict[str | None, float] = {}
    for role in (role for panel in panels for role in panel.roles):
        best[role.role] = max(best.get(role.role, 1.0), role.score or 0.0)
    return best


def _draw_score(
    sheet: _Sheet, x: float, y: float, side: float, panel: Panel, head: int, best: dict[str | None, float]
) -> None:
    """One head in the overview of roles."""
    role = panel.roles[head] if panel.roles else None
    inner = (x + 0.01, y + 0.01, side - 0.02, side - 0.02)
    if role is None or role.role is None:
        sheet.box(*inner, BLANK)
        if role is None:
            sheet.text(x + side / 2, y + side / 2, "cross", min(6.0, side * 17), QUIET, ha="center", va="center")
        return
    score, least = role.score or 0.0, role.least or 0.0
    above = (score - least) / max(best[role.role] - least, 1e-9)
    color = _mixed(_color(role.role), 0.35 + 0.65 * min(max(above, 0.0), 1.0))
    sheet.box(*inner, color)
    scored = side >= 0.28
    sheet.text(x + side / 2, y + side * (0.38 if scored else 0.52), _sign(role.role), min(9.0, side * 26), _on(color),
               ha="center", va="center")  # fmt: skip
    if scored:
        sheet.text(x + side / 2, y + side * 0.77, _few_digits(score), min(6.0, side * 16), _on(color), ha="center",
                   va="center")  # fmt: skip


@dataclass
class _Along:
    """Labels along a map, the cells that they stand at, which are of special tokens, and how large they are."""

    texts: list[str]
    at: list[int]
    special: list[bool]
    size: float


def _along(labels: Labels, cells: int, side: float, letters: _Letters) -> _Along:
    """Every token if there is room; else some, with their place; ranges of tokens where cells hold several."""
    count, size, every = len(labels), min(8.0, side * 72 * 0.8), 1
    if size < 5.0:
        size = 6.5
        every = 1 << (math.ceil(size * 1.5 / 72 / side) - 1).bit_length()  # (1, 2, 4, 8: places that are round)
    at = list(range(0, cells, every))
    if cells < count:
        ends = sizes(count, cells).cumsum(0).tolist()
        starts = [0, *ends]
        texts = [f"{starts[i]}–{ends[i] - 1}" if ends[i] - 1 > starts[i] else f"{starts[i]}" for i in at]
        return _Along(texts, at, [False] * len(at), size)
    if every == 1 or labels == Labels.numbers(count):
        texts = [letters.short(labels.text[i], 18) for i in at]
    else:
        texts = [f"{letters.short(labels.text[i], 12)} {i}" for i in at]
    return _Along(texts, at, [labels.special[i] for i in at], size)


def _labels_left(
    sheet: _Sheet, x: float, y: float, high: float, texts: Sequence[str], size: float, special: Sequence[bool] = ()
) -> None:
    """A label for each row of a map, to its left. Those of special tokens are quieter."""
    for i, text in enumerate(texts):
        color = QUIET if special and special[i] else INK
        sheet.text(x - 0.05, y + (i + 0.5) * high / len(texts), text, size, color, ha="right", va="center")


def _labels_below(
    sheet: _Sheet, x: float, y: float, wide: float, texts: Sequence[str], size: float, special: Sequence[bool]
) -> None:
    """A label for each column of a map, standing below it."""
    for i, text in enumerate(texts):
        color = QUIET if special[i] else INK
        sheet.text(x + (i + 0.5) * wide / len(texts), y + 0.05, text, size, color, ha="right", va="center", rotation=90)


def _tick(
    ax: Axes,
    letters: _Letters,
    side: str,
    texts: Sequence[str],
    size: float,
    at: Sequence[float],
    *,
    special: Sequence[bool] = (),
    length: float = 0.0,
    turned: bool = True,
) -> None:
    """Labels along one side of axes: left, right, bottom or top. Those of special tokens are quieter."""
    upright = side in ("left", "right")
    axis = ax.yaxis if upright else ax.xaxis
    where = {edge: edge == side for edge in (("left", "right") if upright else ("bottom", "top"))}
    axis.set_visible(True)
    axis.set_tick_params(which="both", direction="out", length=length, width=0.6, color=QUIET, pad=2.5, labelcolor=INK,
                         labelrotation=90 if turned and not upright else 0, **where,
                         **{f"label{edge}": shown for edge, shown in where.items()})  # fmt: skip
    axis.set_ticks(list(at), labels=[letters.clean(text) for text in texts], **letters.plain(size))
    for label, quiet in zip(axis.get_ticklabels(), special, strict=False):
        label.set_color(QUIET if quiet else INK)


def _lines_between(ax: Axes, rows: int, cols: int) -> None:
    """Thin lines of paper between cells, so that neighbours of one shade are two."""
    ax.vlines([i - 0.5 for i in range(1, cols)], -0.5, rows - 0.5, colors=PAPER, linewidths=0.5, linestyles="solid")
    ax.hlines([i - 0.5 for i in range(1, rows)], -0.5, cols - 0.5, colors=PAPER, linewidths=0.5, linestyles="solid")


def _write_weights(ax: Axes, letters: _Letters, weights: Tensor, size: float) -> None:
    """The numbers, in cells that have room for them."""
    norm, shades = _norm(), _shades()
    for row, values in enumerate(weights.tolist()):
        for col, value in enumerate(values):
            if value >= 0.005:
                ax.text(col, row, _few_digits(value), color=_on(shades(norm(value))), ha="center", va="center",
                        **letters.plain(size))  # fmt: skip


def _draw_dots(ax: Axes, values: Sequence[Tensor], pitch: float) -> None:
    """The heads of each layer from left to right; every other layer on grey, so that it is seen whose they are."""
    size = max(2.0, min(3.8, pitch * 72 * 0.85 / max(len(value) for value in values)))
    for i, value in enumerate(values):
        if i % 2:
            ax.axvspan(i - 0.5, i + 0.5, facecolor=BLANK, edgecolor="none", linewidth=0, zorder=0)
        spread = torch.linspace(-0.38, 0.38, len(value)) if len(value) > 1 else torch.zeros(1)
        ax.plot((i + spread).tolist(), value.tolist(), label=f"layer {i}", color=SHADES[6], linestyle="", marker="o",
                markersize=size, markeredgewidth=0, zorder=2)  # fmt: skip


def _notes(ax: Axes, letters: _Letters, high: float, notes: Sequence[tuple[str, float, str]]) -> None:
    """Words beside the ends of lines: no legend has to be looked up. They keep a line's distance from each other."""
    low, top = ax.get_ylim()
    line = 0.13 / high * (top - low)
    at = -math.inf
    for text, value, color in sorted((note for note in notes if not math.isnan(note[1])), key=lambda note: note[1]):
        at = max(value, at + line)
        ax.annotate(text, (ax.get_xlim()[1], at), xytext=(5, 0), textcoords="offset points", color=color, va="center",
                    annotation_clip=False, **letters.plain(7))  # fmt: skip


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
    return INK if 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.2 else PAPER


def _look() -> dict[str, Any]:
    """How maps are drawn: the first query on top, no colours mixed between cells."""
    return {"cmap": _shades(), "norm": _norm(), "aspect": "auto", "interpolation": "antialiased",
            "interpolation_stage": "data", "origin": "upper", "resample": True}  # fmt: skip


def _scale_lying(sheet: _Sheet, right: float, y: float, words: str) -> None:
    """The scale, with what it means below."""
    marks = (0.0, 0.05, 0.25, 0.5, 1.0)
    ax = sheet.axes(right - 1.5, y, 1.5, 0.08, "scale")
    _gradient(ax, across=True)
    _tick(ax, sheet.letters, "bottom", [f"{mark:g}" for mark in marks], 6, _shares(marks), length=2, turned=False)
    sheet.text(right, y + 0.29, words, 6, QUIET, ha="right", va="center")


def _scale_standing(sheet: _Sheet, x: float, y: float, high: float) -> None:
    """The scale, from below to above."""
    marks = (0.0, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0) if high > 1.2 else (0.0, 0.1, 0.5, 1.0)
    ax = sheet.axes(x, y, 0.1, high, "scale")
    _gradient(ax, across=False)
    _tick(ax, sheet.letters, "right", [f"{mark:g}" for mark in marks], 6.5, _shares(marks), length=2)


def _shares(marks: Sequence[float]) -> list[float]:
    """Where weights stand on the scale."""
    return [float(_norm()(mark)) for mark in marks]


def _gradient(ax: Axes, across: bool) -> None:
    """All shades, from the first to the last."""
    shades = torch.linspace(0, 1, 256)
    data = shades[None] if across else shades[:, None]
    ax.imshow(data.numpy(), cmap=_shades(), vmin=0, vmax=1, aspect="auto", interpolation="nearest", origin="lower",
              extent=(0, 1, 0, 1), resample=True)  # fmt: skip


# --- Paper and letters -----------------------------------------------------------------------------------------------


class _Sheet:
    """A figure in inches from its top left corner. Most is drawn on one large `paper`: axes of its own for each of
    hundreds of maps would take matplotlib seconds."""

    def __init__(self, letters: _Letters, wide: float, high: float, dpi: float) -> None:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        self.letters, self.wide, self.high = letters, wide, high
        nothing: Any = "none"  # (else rcParams may choose one that moves all parts)
        self.figure = Figure((wide, high), dpi, facecolor=PAPER, edgecolor=PAPER, linewidth=0, layout=nothing)
        FigureCanvasAgg(self.figure)
        self.figure._repr_png_ = partial(_png, self.figure, dpi)  # type: ignore[attr-defined]  # (in a notebook)
        self.paper = self.axes(0, 0, wide, high, "paper", frame=None)
        self.paper.set(xlim=(0, wide), ylim=(high, 0), autoscale_on=False)
        self.paper.patch.set_visible(False)

    def axes(self, x: float, y: float, wide: float, high: float, label: str, frame: str | None = FAINT) -> Axes:
        """Empty axes, with a frame or without."""
        place = (x / self.wide, 1 - (y + high) / self.high, wide / self.wide, high / self.high)
        ax = self.figure.add_axes(place, label=label, facecolor=PAPER)
        ax.grid(False, which="both")
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_ticks([])
            axis.set_ticks([], minor=True)
            axis.set_visible(False)
        for spine in ax.spines.values():
            spine.set(visible=frame is not None, color=frame or FAINT, linewidth=0.5)
        return ax

    def image(
        self,
        x: float,
        y: float,
        wide: float,
        high: float,
        data: Tensor,
        label: str,
        frame: str = FAINT,
        line: float = 0.5,
    ) -> None:
        """A map in its frame."""
        self.paper.imshow(data.numpy(), extent=(x, x + wide, y + high, y), label=label, clip_on=False, **_look())
        edge = line / 72 / 2  # a line lies half on either side, and shall hide nothing of the map
        self.box(x - edge, y - edge, wide + 2 * edge, high + 2 * edge, "none", frame, line)

    def box(
        self, x: float, y: float, wide: float, high: float, color: Any, frame: str = "none", line: float = 0
    ) -> None:
        from matplotlib.patches import Rectangle

        self.paper.add_artist(Rectangle((x, y), wide, high, facecolor=color, edgecolor=frame, linewidth=line,
                                       linestyle="-", joinstyle="miter", clip_on=False))  # fmt: skip

    def badge(self, x: float, y: float, side: float, sign: str, size: float, color: str) -> None:
        """A coloured box with a sign in it."""
        self.box(x, y, side, side, color)
        self.text(x + side / 2, y + side * 0.54, sign, size, _on(color), ha="center", va="center")

    def text(
        self, x: float, y: float, text: str, size: float, color: str = INK, *, bold: bool = False, **where: Any
    ) -> None:
        text = self.letters.clean(text, bold)
        self.paper.text(x, y, text, color=color, rotation_mode="anchor", **where, **self.letters.plain(size, bold))


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
        """Inches that a line of text takes, with some to spare: letters that are fitted to dots are wider."""
        from matplotlib.textpath import text_to_path

        text = self.clean(text, bold)
        return 1.05 * text_to_path.get_text_width_height_descent(text, self.font(size, bold), ismath=False)[0] / 72

    def widest(self, texts: Sequence[str], size: float) -> float:
        """Inches that the longest of some texts takes."""
        return max((self.wide(text, size) for text in texts), default=0.0)

    def short(self, text: str, most: int) -> str:
        """A text cut to so many columns, an ellipsis at its end. (Wide characters take two.)"""
        text, columns = self.clean(text[: 4 * most]) + ("…" if len(text) > 4 * most else ""), 0
        for i, character in enumerate(text):
            columns += 2 if unicodedata.east_asian_width(character) in "WF" else 1
            if columns > most:
                return text[: max(i - 1, 0)] + "…"
        return text

    def clean(self, text: str, bold: bool = False) -> str:
        """With □ for what no font knows."""
        return "".join(self._drawable(character, bold) for character in text)

    def _drawable(self, character: str, bold: bool) -> str:
        known = any(ord(character) in some for some in (self.known_bold if bold else self.known))
        if character in JOINERS:
            return character if known else ""
        if "\ufe00" <= character <= "\ufe0f":  # (they choose between looks of what stands before)
            return ""
        if not character.isprintable():
            return " "
        return character if known or (not bold and self._found(character)) else "□"

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
    figure.set_layout_engine("none")  # (after a first `savefig` matplotlib asks rcParams for one)
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
    import matplotlib

    settings: Any = matplotlib.rcParams
    ours = {"svg.fonttype": "none", "svg.hashsalt": "regard", "svg.image_inline": True, "pdf.fonttype": 42}
    with _WRITING:
        before = {name: settings[name] for name in ours}
        settings.update(ours)
        try:
            yield
        finally:
            settings.update(before)
