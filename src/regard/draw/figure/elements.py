"""What kinds of figures have in common: headings, legends, maps with their labels, signs of roles.

Letters: H query heads, N queries, M keys.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from regard.draw.figure.canvas import (
    BLANK,
    FAINT,
    INK,
    PAPER,
    QUIET,
    SHADES,
    Letters,
    Sheet,
    colour_map,
    colour_scale,
    ink_on,
    mixed,
    scale_lying,
)
from regard.draw.labels import Labels
from regard.draw.scene import Panel, sizes
from regard.errors import bad_value
from regard.heads import LayerRecord
from regard.heads.analysis.roles import ROLES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = [
    "MAPS",
    "PAGE",
    "SHADED",
    "TALL",
    "Foot",
    "Heading",
    "Order",
    "along",
    "at_least",
    "best_of",
    "color_of",
    "draw_column",
    "draw_dots",
    "draw_map",
    "draw_role",
    "draw_score",
    "head_numbers",
    "in_a_row",
    "labels_below",
    "labels_left",
    "legend_of",
    "lines_between",
    "measured_of",
    "names_of",
    "pooled_head",
    "pooled_heads",
    "profiles_of",
    "round_numbers",
    "runs",
    "sign_of",
    "signed",
    "stacks",
    "write_notes",
    "write_weights",
]

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
MAPS = "attention weight; queries down, keys across"
SHADED = ("shade: the score, from what", "the role takes to the most")


@dataclass
class Order:
    """What is to be drawn, and how large."""

    panels: list[Panel]
    one_layer: bool  # was asked for
    head: int | None
    width: float | None
    dpi: float
    letters: Letters
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


def at_least(size: float, natural: float, order: Order, need: float, what: str) -> float:
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


def pooled_heads(panel: Panel, dots: float) -> Tensor:
    """The maps of all heads at a size of so many dots."""
    n, m = panel.shape
    return panel.pooled(_cells(n, dots), _cells(m, dots))


def pooled_head(panel: Panel, head: int) -> Tensor:
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


def measured_of(layer: LayerRecord, name: str) -> Tensor:
    """The mean of a measure, for each head."""
    if not layer.has(name):
        raise bad_value(
            "record",
            expected=f"{name} measured, as by default",
            received=repr(layer),
            remedy=f"watch(model, measures=[..., {name!r}])",
        )
    return layer.per_head(name).float().cpu()


def profiles_of(panels: Sequence[Panel]) -> tuple[list[tuple[Tensor, Tensor]], int, int]:
    """The mass by offset of each layer's heads and of equal weights, and how far it goes before and after. Where nobody
    looks ahead, it ends at the query."""
    ours = [measured_of(panel.layer, "offsets") for panel in panels]
    bases = [panel.layer.uniform for panel in panels]
    even = [
        torch.zeros_like(own[:1]) if base is None else measured_of(base, "offsets")
        for own, base in zip(ours, bases, strict=True)
    ]
    measure = next(one for one in panels[0].layer.measures if "offsets" in one.gives)
    before = int(getattr(measure, "before", 0))
    after = ours[0].shape[1] - 1 - before
    if all((own[:, before + 1 :] == 0).all() for own in ours):
        after = 0
    end = before + 1 + after
    return [(own[:, :end], base[:, :end]) for own, base in zip(ours, even, strict=True)], before, after


def names_of(panels: Sequence[Panel]) -> list[str]:
    """Layers' names without what all of them begin and end with: 0, 1, 2 of blocks.0.attention and so on."""
    parts = [panel.name.split(".") for panel in panels]
    least = min(len(part) for part in parts)
    first = next((i for i in range(least) if len({part[i] for part in parts}) > 1), least)
    last = next((i for i in range(least - first) if len({part[-1 - i] for part in parts}) > 1), least - first)
    return [".".join(part[first : len(part) - last]) or panel.name for part, panel in zip(parts, panels, strict=True)]


def in_a_row(heads: int) -> int:
    """How many maps of one layer stand in a row: rows that are full, where that can be."""
    least = math.isqrt(max(heads - 1, 0)) + 1
    return next((n for n in range(least, min(2 * least, 8) + 1) if heads % n == 0), min(least, 8))


def stacks(names: Sequence[str]) -> list[list[int]]:
    """Layers that follow each other, by their names but for the numbers in them: those of an encoder, of a decoder."""
    found: dict[str, list[int]] = {}
    for i, name in enumerate(names):
        found.setdefault(re.sub(r"\d+", "#", name), []).append(i)
    return list(found.values())


def runs(values: Sequence[float]) -> list[tuple[int, int]]:
    """The first and the last of neighbours that are the same (to rounding)."""
    starts = [i for i, value in enumerate(values) if not i or not math.isclose(value, values[i - 1], rel_tol=1e-6)]
    return [(a, b - 1) for a, b in pairwise([*starts, len(values)])]


def round_numbers(most: float) -> list[float]:
    """A few round numbers from 0 up."""
    step = 10.0 ** math.floor(math.log10(most / 4))
    step *= next(factor for factor in (1, 2, 5, 10) if most / (step * factor) <= 6)
    return [round(i * step, 10) for i in range(int(most / step + 1e-9) + 1)]


def signed(number: int) -> str:
    """A number with its sign, as it is read."""
    return f"{number:+d}".replace("-", "−") if number else "0"


def _few_digits(value: float) -> str:
    return f"{value:.2f}".removeprefix("0") if value < 9.995 else f"{value:.0f}"


class Heading:
    """What stands above one head: its name, its role with its score and that of equal weights, its measures. It makes
    the figure wider where that is left open, and is broken into lines where it is not."""

    def __init__(self, letters: Letters, panel: Panel, head: int, width: float | None, need: float) -> None:
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

    def draw(self, sheet: Sheet) -> None:
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
    return [
        f"{name.replace('_', ' ')} {value[head].item():.2f}{units.get(name, '')}".replace("-", "−")
        for name, value in panel.measures.items()
    ]


def _broken(parts: Sequence[str], room: float, letters: Letters) -> list[str]:
    """Parts of a text in lines that fit."""
    lines: list[str] = []
    for part in parts:
        longer = f"{lines[-1]} · {part}" if lines else part
        if lines and letters.wide(longer, 7) <= room:
            lines[-1] = longer
        else:
            lines.append(part)
    return lines


def sign_of(role: str) -> str:
    """The sign of a role."""
    return SIGNS[role][0] if role in SIGNS else role[:1].upper()


def color_of(role: str) -> str:
    """The colour of a role."""
    return SIGNS[role][1] if role in SIGNS else QUIET


def legend_of(panels: Sequence[Panel], everything: bool = False) -> list[tuple[str, int]]:
    """The roles that heads have, in the order of the table of roles, and how many have each."""
    counts = Counter(panel.role(head) for panel in panels if panel.roles for head in range(panel.heads))
    known = [rule.name for rule in ROLES]
    names = sorted((name for name in counts if name), key=lambda n: known.index(n) if n in known else len(known))
    return [(name, counts[name]) for name in names] + (
        [("no role", counts[None])] if everything and counts[None] else []
    )


def draw_column(sheet: Sheet, x: float, y: float, wide: float, legend: Sequence[tuple[str, int]]) -> None:
    """The roles with their signs and how many heads have each, one below the other."""
    for i, (name, count) in enumerate(legend):
        middle = y + 0.2 * i + 0.09
        _draw_sign(sheet, x, middle - 0.07, name)
        sheet.text(x + 0.2, middle, name, 7, ha="left", va="center")
        sheet.text(x + wide, middle, str(count), 7, QUIET, ha="right", va="center")
    for i, part in enumerate(SHADED):
        sheet.text(x, y + 0.2 * len(legend) + 0.12 + 0.12 * i, part, 6, QUIET, ha="left", va="center")


class Foot:
    """What stands below: roles with their signs, and the scale if there is one; beside each other if there is room."""

    def __init__(self, letters: Letters, legend: Sequence[tuple[str, int]], wide: float, words: str = "") -> None:
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

    def draw(self, sheet: Sheet, left: float) -> None:
        top = sheet.high - self.high + 0.02
        for role, words, x, line in self.entries:
            _draw_sign(sheet, left + x, top + 0.18 * line, role)
            sheet.text(left + x + 0.18, top + 0.18 * line + 0.07, words, 6.5, ha="left", va="center")
        if self.words:
            scale_lying(sheet, left + self.right, top + (0.03 if self.beside else self.tall + 0.05), self.words)


def head_numbers(sheet: Sheet, x: float, y: float, pitch: float, middle: float, across: int) -> None:
    """The heads' numbers above a grid, and what stands there."""
    sheet.text(x - 0.08, y, "layer", 6.5, QUIET, ha="right", va="bottom")
    sheet.text(x, y - 0.14, "head", 6.5, QUIET, ha="left", va="bottom")
    for head in range(across):
        sheet.text(x + head * pitch + middle, y, str(head), 6.5, ha="center", va="bottom")


def draw_map(sheet: Sheet, x: float, y: float, side: float, panel: Panel, head: int, data: Tensor) -> None:
    """The map of one head, its frame in the colour of its role."""
    role = panel.role(head)
    frame, line = (color_of(role), 0.9) if role else (FAINT, 0.5)
    sheet.image(x, y, side, side, data, f"{panel.number}.{head}", frame, line)


def draw_role(
    sheet: Sheet, x: float, y: float, wide: float, panel: Panel, head: int, size: float, named: bool = False
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
    sheet.badge(start, y - box, box, sign_of(role), size * 0.92, color_of(role))
    if long <= wide + 0.01:
        sheet.text(start + box + 0.05, y - box / 2, words, size, INK if named else QUIET, ha="left", va="center")


def _draw_sign(sheet: Sheet, x: float, y: float, role: str) -> None:
    """A role's colour with its sign."""
    if role == "no role":
        sheet.box(x, y, 0.14, 0.14, BLANK)
    else:
        sheet.badge(x, y, 0.14, sign_of(role), 6.2, color_of(role))


def best_of(panels: Sequence[Panel]) -> dict[str | None, float]:
    """The score at which a role has its full colour: 1 for shares of attention; the highest, for nats and tokens."""
    best: dict[str | None, float] = {}
    for role in (role for panel in panels for role in panel.roles):
        best[role.role] = max(best.get(role.role, 1.0), role.score or 0.0)
    return best


def draw_score(
    sheet: Sheet, x: float, y: float, side: float, panel: Panel, head: int, best: dict[str | None, float]
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
    color = mixed(color_of(role.role), 0.35 + 0.65 * min(max(above, 0.0), 1.0))
    sheet.box(*inner, color)
    scored = side >= 0.28
    middle = y + side * (0.38 if scored else 0.52)
    sheet.text(x + side / 2, middle, sign_of(role.role), min(9.0, side * 26), ink_on(color), ha="center", va="center")
    if scored:
        sheet.text(
            x + side / 2,
            y + side * 0.77,
            _few_digits(score),
            min(6.0, side * 16),
            ink_on(color),
            ha="center",
            va="center",
        )


@dataclass
class _Along:
    """Labels along a map, the cells that they stand at, which are of special tokens, and how large they are."""

    texts: list[str]
    at: list[int]
    special: list[bool]
    size: float


def along(labels: Labels, cells: int, side: float, letters: Letters) -> _Along:
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


def labels_left(
    sheet: Sheet, x: float, y: float, high: float, texts: Sequence[str], size: float, special: Sequence[bool] = ()
) -> None:
    """A label for each row of a map, to its left. Those of special tokens are quieter."""
    for i, text in enumerate(texts):
        color = QUIET if special and special[i] else INK
        sheet.text(x - 0.05, y + (i + 0.5) * high / len(texts), text, size, color, ha="right", va="center")


def labels_below(
    sheet: Sheet, x: float, y: float, wide: float, texts: Sequence[str], size: float, special: Sequence[bool]
) -> None:
    """A label for each column of a map, standing below it."""
    for i, text in enumerate(texts):
        color = QUIET if special[i] else INK
        sheet.text(x + (i + 0.5) * wide / len(texts), y + 0.05, text, size, color, ha="right", va="center", rotation=90)


def lines_between(ax: Axes, rows: int, cols: int) -> None:
    """Thin lines of paper between cells, so that neighbours of one shade are two."""
    ax.vlines([i - 0.5 for i in range(1, cols)], -0.5, rows - 0.5, colors=PAPER, linewidths=0.5, linestyles="solid")
    ax.hlines([i - 0.5 for i in range(1, rows)], -0.5, cols - 0.5, colors=PAPER, linewidths=0.5, linestyles="solid")


def write_weights(ax: Axes, letters: Letters, weights: Tensor, size: float) -> None:
    """The numbers, in cells that have room for them."""
    norm, shades = colour_scale(), colour_map()
    for row, values in enumerate(weights.tolist()):
        for col, value in enumerate(values):
            if value >= 0.005:
                ax.text(
                    col,
                    row,
                    _few_digits(value),
                    color=ink_on(shades(norm(value))),
                    ha="center",
                    va="center",
                    **letters.plain(size),
                )


def draw_dots(ax: Axes, values: Sequence[Tensor], pitch: float) -> None:
    """The heads of each layer from left to right; every other layer on grey, so that it is seen whose they are."""
    size = max(2.0, min(3.8, pitch * 72 * 0.85 / max(len(value) for value in values)))
    for i, value in enumerate(values):
        if i % 2:
            ax.axvspan(i - 0.5, i + 0.5, facecolor=BLANK, edgecolor="none", linewidth=0, zorder=0)
        spread = torch.linspace(-0.38, 0.38, len(value)) if len(value) > 1 else torch.zeros(1)
        ax.plot(
            (i + spread).tolist(),
            value.tolist(),
            label=f"layer {i}",
            color=SHADES[6],
            linestyle="",
            marker="o",
            markersize=size,
            markeredgewidth=0,
            zorder=2,
        )


def write_notes(ax: Axes, letters: Letters, high: float, notes: Sequence[tuple[str, float, str]]) -> None:
    """Words beside the ends of lines: no legend has to be looked up. They keep a line's distance from each other."""
    low, top = ax.get_ylim()
    line = 0.13 / high * (top - low)
    at = -math.inf
    for text, value, color in sorted((note for note in notes if not math.isnan(note[1])), key=lambda note: note[1]):
        at = max(value, at + line)
        ax.annotate(
            text,
            (ax.get_xlim()[1], at),
            xytext=(5, 0),
            textcoords="offset points",
            color=color,
            va="center",
            annotation_clip=False,
            **letters.plain(7),
        )
