"""Figures of maps: all heads, the heads of one layer, one head.

Letters: H query heads, N queries, M keys.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from regard.draw.figure.canvas import FAINT, INK, PAPER, QUIET, Sheet, colour_map, colour_scale, ink_on, show_map, tick
from regard.draw.figure.fonts import Fonts
from regard.draw.figure.legends import (
    TALL,
    Legend,
    Request,
    color_of,
    count_roles,
    draw_sign,
    few_digits,
    head_numbers,
    sign_of,
)
from regard.draw.scene import Panel, sizes
from regard.heads.analysis.labels import Labels

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CELLS = 256  # of a map, along each side; longer texts are pooled
BAR = "attention weight; queries down, keys across"


def draw_heads(request: Request) -> Figure:
    """The maps of all heads: layers down and heads across; or those of one layer, larger."""
    return _one_layer(request) if request.one_layer else _all_layers(request)


def _all_layers(request: Request) -> Figure:
    """Layers down, heads across. A deep model stands in several columns, as text does."""
    panels, fonts, names = request.panels, request.fonts, request.short_names()
    across = max(panel.heads for panel in panels)
    left, top, gap = 0.2 + fonts.widest(["layer", *names], 7), 0.36, 0.06

    def side_in(columns: int) -> float:
        """The side of a map in inches, with the layers in `columns` columns."""
        fits = (request.most / columns - left - 0.06) / across - gap
        down = (TALL - top - 0.7) / math.ceil(len(panels) / columns) - gap - 0.16
        return fits if request.width else min(fits, down, 2.2)

    columns = max(range(1, min(len(panels), 8) + 1), key=lambda n: (round(side_in(n), 2), -n))
    request.check_width(columns * (left + 0.06 + across * (0.1 + gap)), f"{across} heads")
    side = side_in(columns) if request.width else max(side_in(columns), 0.26)
    line, size = (0.16, 5.8) if side >= 0.4 else (0.13, 5.0)  # the height of the line above a map, and its font size
    down = math.ceil(len(panels) / columns)
    block = left + across * (side + gap)
    wide = request.width or max(columns * block - gap + 0.12, 2.6)
    legend = _legend(fonts, panels, wide - left - 0.12)
    sheet = Sheet(fonts, wide, top + down * (side + line + gap) + 0.1 + legend.high, request.dpi)
    for i, panel in enumerate(panels):
        x, y = (i // down) * block + left, top + (i % down) * (side + line + gap) + line
        if i % down == 0:
            head_numbers(sheet, x, top, side + gap, side / 2, across)
        sheet.text(x - 0.08, y + side / 2, names[i], 7, align="right center")
        for head, weights in enumerate(_pooled_heads(panel, side * request.dpi)):
            _draw_map(sheet, x + head * (side + gap), y, side, panel, head, weights)
            _draw_role(sheet, x + head * (side + gap), y - 0.02, side, panel, head, size)
    legend.draw(sheet, left)
    return sheet.figure


def _one_layer(request: Request) -> Figure:
    """The maps of one layer's heads, in rows, with tokens beside them where there is room."""
    panel, fonts = request.panels[0], request.fonts
    across = _maps_in_a_row(panel.heads)
    down = math.ceil(panel.heads / across)
    gap, line, top = 0.1, 0.18, 0.34

    def side_with(left: float, below: float) -> float:
        fits = (request.most - left - 0.12 + gap) / across - gap
        return fits if request.width else min(fits, (TALL - top - below - 0.7) / down - gap - line, 2.6)

    size = min(6.5, side_with(0.8, 0.6) / max(panel.shape) * 72 * 0.85)  # of tokens; none where it would be too small
    queries, keys = (
        [fonts.short(text, 14) for text in labels.text if size >= 4.2] for labels in (panel.queries, panel.keys)
    )
    left, below = 0.16 + fonts.widest(queries, size), 0.08 + fonts.widest(keys, size)
    request.check_width(left + 0.1 + across * (0.4 + gap), f"{across} maps in a row")
    side = side_with(left, below) if request.width else max(side_with(left, below), 0.4)
    wide = request.width or max(left + across * (side + gap) - gap + 0.12, 2.6)
    legend = _legend(fonts, [panel], wide - left - 0.12)
    sheet = Sheet(fonts, wide, top + down * (side + line + gap) + below + legend.high, request.dpi)
    sheet.text(left, 0.24, fonts.short(panel.name, 48), 8, align="left baseline", bold=True)
    for head, weights in enumerate(_pooled_heads(panel, side * request.dpi)):
        i, j = divmod(head, across)
        x, y = left + j * (side + gap), top + i * (side + line + gap) + line
        _draw_map(sheet, x, y, side, panel, head, weights)
        sheet.text(x, y - 0.05, f"head {head}", 6.5, align="left baseline")
        _draw_role(sheet, x, y - 0.03, side, panel, head, 6.5, named=True)
        for i, text in enumerate(queries if j == 0 else []):
            color = QUIET if panel.queries.special[i] else INK
            sheet.text(x - 0.05, y + (i + 0.5) * side / len(queries), text, size, color, "right center")
        for i, text in enumerate(keys if head + across >= panel.heads else []):  # (no map stands below this one)
            color, at = QUIET if panel.keys.special[i] else INK, x + (i + 0.5) * side / len(keys)
            sheet.text(at, y + side + 0.05, text, size, color, "right center", rotation=90)
    legend.draw(sheet, left)
    return sheet.figure


def draw_head(request: Request) -> Figure:
    """One head, large."""
    panel, fonts, head = request.panels[0], request.fonts, request.head
    assert head is not None
    weights = _pooled_head(panel, head)
    rows, cols = weights.shape

    def cell(left: float) -> tuple[float, float]:
        """The width and height of a cell: square, unless the map would be too thin."""
        square = min(request.width or 0.42, (request.most - left - 0.7) / cols, (TALL - 2.2) / rows)
        return max(square, 0.25 / cols), max(square, 0.25 / rows)

    queries = _axis_labels(panel.queries, rows, cell(1.2)[1], fonts)
    left = 0.4 + fonts.widest(queries.texts, queries.size)
    request.check_width(left + 1.2, "a map with its labels")
    wide, high = cell(left)
    queries, keys = _axis_labels(panel.queries, rows, high, fonts), _axis_labels(panel.keys, cols, wide, fonts)
    heading = _Heading(fonts, panel, head, request.width, left + cols * wide + 0.7)
    top = heading.high + 0.24 + fonts.widest(keys.texts, keys.size)
    sheet = Sheet(fonts, heading.wide, top + max(rows * high, 0.8) + 0.16, request.dpi)
    heading.draw(sheet)
    ax = sheet.axes(left, top, cols * wide, rows * high, "map")
    show_map(ax, weights, f"{panel.number}.{head}")
    if min(wide, high) >= 0.12:  # thin lines between cells
        line: dict[str, Any] = {"colors": PAPER, "linewidths": 0.5, "linestyles": "solid"}
        ax.vlines([i - 0.5 for i in range(1, cols)], -0.5, rows - 0.5, **line)
        ax.hlines([i - 0.5 for i in range(1, rows)], -0.5, cols - 0.5, **line)
    tick(ax, fonts, "left", queries.texts, queries.size, queries.at, special=queries.special)
    tick(ax, fonts, "top", keys.texts, keys.size, keys.at, special=keys.special)
    sheet.text(0.22, top + rows * high / 2, "query", 7.5, QUIET, rotation=90)
    sheet.text(left + cols * wide / 2, heading.high + 0.12, "key", 7.5, QUIET)
    if min(wide, high) >= 0.3 and rows * cols <= 400:
        _write_weights(ax, fonts, weights, min(6.5, wide * 16))
    tall = min(max(rows * high, 0.8), 2.2)
    marks = (0.0, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0) if tall > 1.2 else (0.0, 0.1, 0.5, 1.0)
    sheet.colour_bar(left + cols * wide + 0.16, top, 0.1, tall, marks, 6.5)
    return sheet.figure


# Maps


def _cells(tokens: int, most: float = CELLS) -> int:
    """Into how many cells tokens are pooled: the same number in each, as far as that is possible."""
    return math.ceil(tokens / math.ceil(tokens / max(16, min(int(most), CELLS))))


def _pooled_heads(panel: Panel, dots: float) -> Tensor:
    """The maps of all heads, (H, rows, cols), for images of `dots` pixels a side."""
    n, m = panel.shape
    return panel.pooled(_cells(n, dots), _cells(m, dots))


def _pooled_head(panel: Panel, head: int) -> Tensor:
    """The map of one head. (Of a long text, pooling all heads would take many times as long.)"""
    n, m = panel.shape
    if not panel.layer.exact:
        return panel.pooled(n, m)[head]  # (as it was measured: pooled again, cells would hold uneven ranges)
    pooled = torch.zeros(_cells(n), _cells(m), device="cpu")
    down, across = (
        torch.arange(size, device="cpu") * cells // size for size, cells in zip((n, m), pooled.shape, strict=True)
    )
    step = max(1, 2**22 // m)
    for start in range(0, n, step):
        rows = slice(start, min(start + step, n))
        strip = torch.zeros(rows.stop - rows.start, pooled.shape[1], device="cpu")
        pooled.index_add_(0, down[rows], strip.index_add_(1, across, panel.weights(head, rows)))
    return pooled / sizes(n, pooled.shape[0])[:, None]


def _maps_in_a_row(heads: int) -> int:
    """How many maps of one layer stand in a row: so that rows are full, where that is possible."""
    least = math.isqrt(max(heads - 1, 0)) + 1
    return next((n for n in range(least, min(2 * least, 8) + 1) if heads % n == 0), min(least, 8))


def _draw_map(sheet: Sheet, x: float, y: float, side: float, panel: Panel, head: int, weights: Tensor) -> None:
    """The map of one head, its frame in the colour of its role."""
    role = panel.role(head)
    frame, line = (color_of(role), 0.9) if role else (FAINT, 0.5)
    sheet.image(x, y, side, side, weights, f"{panel.number}.{head}", frame, line)


def _draw_role(
    sheet: Sheet, x: float, y: float, wide: float, panel: Panel, head: int, size: float, named: bool = False
) -> None:
    """The role of a head and its score above its map: the name, to the right, if `named`; else the sign."""
    role = panel.role(head)
    if role is None:
        return
    score, box = few_digits(panel.roles[head].score or 0.0), size / 72 * 1.25
    words = f"{role} {score}" if named else score
    long = box + 0.05 + sheet.fonts.width(words, size)
    if named and wide - long < sheet.fonts.width("head 000", size):  # no room beside the head's number
        words, long = "", box
    start = x + wide - long if named else x
    sheet.badge(start, y - box, box, sign_of(role), size * 0.92, color_of(role))
    if long <= wide + 0.01:
        sheet.text(start + box + 0.05, y - box / 2, words, size, INK if named else QUIET, "left center")


def _write_weights(ax: Axes, fonts: Fonts, weights: Tensor, size: float) -> None:
    """The weights as numbers in their cells."""
    norm, shades = colour_scale(), colour_map()
    for row, values in enumerate(weights.tolist()):
        for col, value in enumerate(values):
            if value >= 0.005:
                look = {"color": ink_on(shades(norm(value))), "ha": "center", "va": "center"}
                ax.text(col, row, few_digits(value), **look, **fonts.style(size))


def _legend(fonts: Fonts, panels: Sequence[Panel], wide: float) -> Legend:
    return Legend(fonts, [(role, count) for role, count in count_roles(panels) if role != "no role"], wide, BAR)


# One head


@dataclass
class _AxisLabels:
    """Labels along a map: their texts, the cells that they stand at, which are of special tokens, the font size."""

    texts: list[str]
    at: list[int]
    special: list[bool]
    size: float


def _axis_labels(labels: Labels, cells: int, side: float, fonts: Fonts) -> _AxisLabels:
    """Every token if there is room; else some, with their position; ranges of tokens where a cell holds several."""
    count, size, every = len(labels), min(8.0, side * 72 * 0.8), 1
    if size < 5.0:
        size = 6.5
        every = 1 << (math.ceil(size * 1.5 / 72 / side) - 1).bit_length()  # a power of two
    at = list(range(0, cells, every))
    if cells < count:
        ends = sizes(count, cells).cumsum(0).tolist()
        starts = [0, *ends]
        texts = [f"{starts[i]}–{ends[i] - 1}" if ends[i] - 1 > starts[i] else f"{starts[i]}" for i in at]
        return _AxisLabels(texts, at, [False] * len(at), size)
    if every == 1 or labels == Labels.numbers(count):
        texts = [fonts.short(labels.text[i], 18) for i in at]
    else:
        texts = [f"{fonts.short(labels.text[i], 12)} {i}" for i in at]
    return _AxisLabels(texts, at, [labels.special[i] for i in at], size)


class _Heading:
    """What stands above one head: its name, its role with its score and that of equal weights, its measures. It
    widens the figure if no width was asked for; else it is broken into lines."""

    def __init__(self, fonts: Fonts, panel: Panel, head: int, width: float | None, need: float) -> None:
        self.role = panel.role(head)
        self.title = f"{fonts.short(panel.name, 48)} · head {head}"
        self.words = ""
        if self.role:
            score, baseline = (getattr(panel.roles[head], name) or 0.0 for name in ("score", "baseline"))
            self.words = f"{self.role} {score:.2f} (equal weights {baseline:.2f})"
            if width and 0.52 + fonts.width(self.words, 8) > width:
                self.words = f"{self.role} {score:.2f}"
        title, words = fonts.width(self.title, 10, bold=True), fonts.width(self.words, 8)
        self.wide = width or max(need, 0.32 + title + (0.34 + words if self.role else 0.0), 3.2)
        self.size = 10 * min(1.0, (self.wide - 0.32) / title)
        # Where the role begins, beside the title; 0 if it has a line of its own.
        self.after = 0.3 + title if self.role and 0.66 + title + words <= self.wide else 0.0
        self.lines = _wrapped(_measures(panel, head), self.wide - 0.32, fonts)
        self.start = 0.48 + (0.2 if self.role and not self.after else 0.0)
        self.high = self.start + 0.14 * len(self.lines)

    def draw(self, sheet: Sheet) -> None:
        sheet.text(0.16, 0.28, self.title, self.size, align="left baseline", bold=True)
        if self.role:
            x, y = (self.after, 0.28) if self.after else (0.16, 0.48)
            draw_sign(sheet, x, y - 0.12, self.role)
            sheet.text(x + 0.2, y, self.words, 8, align="left baseline")
        for i, line in enumerate(self.lines):
            sheet.text(0.16, self.start + 0.14 * i, line, 7, QUIET, "left baseline")


def _measures(panel: Panel, head: int) -> list[str]:
    """A head's measures in words."""
    units = {"entropy": " nats", "distance": " tokens", "offset": " tokens"}
    return [
        f"{name.replace('_', ' ')} {value[head].item():.2f}{units.get(name, '')}".replace("-", "−")
        for name, value in panel.measures.items()
    ]


def _wrapped(parts: Sequence[str], room: float, fonts: Fonts) -> list[str]:
    """Parts of a text in lines that fit."""
    lines: list[str] = []
    for part in parts:
        longer = f"{lines[-1]} · {part}" if lines else part
        if lines and fonts.width(longer, 7) <= room:
            lines[-1] = longer
        else:
            lines.append(part)
    return lines
