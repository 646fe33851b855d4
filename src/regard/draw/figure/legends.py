"""What kinds of figures share: the request, signs of roles, and the legend of roles and colours below.

Letters: H query heads, N queries, M keys.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from regard.draw.figure.canvas import BLANK, QUIET, Sheet
from regard.draw.figure.fonts import Fonts
from regard.draw.scene import Panel
from regard.errors import bad_value
from regard.heads import ROLES, LayerRecord

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
    "same word": ("W", "#44aa99"),
    "related": ("M", "#bb5566"),
    "retrieval": ("F", "#994455"),
    "sink": ("_", "#888888"),
    "resting only": ("0", "#999999"),
}
OFFSET, CLASS, RELATION = ("±", "#4477aa"), ("C", "#aa7744"), ("§", "#663399")  # kinds that have many names
PAGE = 7.0  # inches: the default width is at most the text width of a page
TALL = 9.4  # inches: the height is at most this, as far as maps can be made smaller


@dataclass
class Request:
    """What to draw, and how large."""

    panels: list[Panel]
    one_layer: bool  # a layer was asked for
    head: int | None
    width: float | None
    dpi: float
    fonts: Fonts
    names: list[str]  # of all layers, short

    @property
    def most(self) -> float:
        """Inches that the figure may be wide."""
        return self.width or PAGE

    def short_names(self) -> list[str]:
        """The names of the layers that are drawn."""
        return [self.fonts.short(self.names[panel.number], 32) for panel in self.panels]

    def check_width(self, need: float, what: str) -> None:
        """Refuse a width that leaves no room."""
        if self.width is not None and self.width < need:
            expected = f"at least {math.ceil(need * 10) / 10} inches, for {what}"
            raise bad_value("width", expected=expected, received=f"{self.width:g}")


def short_names(names: Sequence[str]) -> list[str]:
    """Layers' names without their common beginning and end.

    >>> short_names(["blocks.0.attention", "blocks.1.attention"])
    ['0', '1']
    """
    parts = [name.split(".") for name in names]
    least = min(map(len, parts))
    first = next((i for i in range(least) if len({part[i] for part in parts}) > 1), least)
    last = next((i for i in range(least - first) if len({part[-1 - i] for part in parts}) > 1), least - first)
    return [".".join(part[first : len(part) - last]) or name for part, name in zip(parts, names, strict=True)]


def check_measured(layer: LayerRecord, name: str) -> None:
    """Raise where a measure that the figure needs was not taken."""
    if not layer.has(name):
        remedy = f"watch(model, measures=[..., {name!r}])"
        raise bad_value("record", expected=f"{name} measured, as by default", received=repr(layer), remedy=remedy)


def per_head(layer: LayerRecord, name: str) -> Tensor:
    """The mean of a measure, for each head."""
    check_measured(layer, name)
    return layer.per_head(name).float().cpu()


def few_digits(value: float) -> str:
    """A number as few characters: .07, 1.25, 12."""
    return f"{value:.2f}".removeprefix("0") if value < 9.995 else f"{value:.0f}"


def _look(role: str) -> tuple[str, str]:
    """The sign and the colour of a role: of its own, of offsets, of relations ("determiner and noun"), of classes."""
    if role in SIGNS:
        return SIGNS[role]
    return OFFSET if role.startswith("offset ") else RELATION if " " in role else CLASS


def sign_of(role: str) -> str:
    """The character that stands for a role."""
    return _look(role)[0]


def color_of(role: str) -> str:
    """The colour of a role's sign."""
    return _look(role)[1]


def draw_sign(sheet: Sheet, x: float, y: float, role: str) -> None:
    """A role's colour with its sign."""
    if role == "no role":
        sheet.box(x, y, 0.14, 0.14, BLANK)
    else:
        sheet.badge(x, y, 0.14, sign_of(role), 6.2, color_of(role))


def count_roles(panels: Sequence[Panel]) -> list[tuple[str, int]]:
    """The roles that heads have, in the order of the table of roles, and how many heads have each."""
    counts = Counter(panel.role(head) for panel in panels if panel.roles for head in range(panel.heads))
    known = [rule.name for rule in ROLES]
    names = sorted((name for name in counts if name), key=lambda n: known.index(n) if n in known else len(known))
    return [(name, counts[name]) for name in names] + ([("no role", counts[None])] if counts[None] else [])


def head_numbers(sheet: Sheet, x: float, y: float, pitch: float, middle: float, across: int) -> None:
    """The heads' numbers above a grid, and the words "layer" and "head"."""
    sheet.text(x - 0.08, y, "layer", 6.5, QUIET, "right bottom")
    sheet.text(x, y - 0.14, "head", 6.5, QUIET, "left bottom")
    for head in range(across):
        sheet.text(x + head * pitch + middle, y, str(head), 6.5, align="center bottom")


class Legend:
    """What stands below a figure: roles with their signs, and the colour bar; beside each other if there is room."""

    def __init__(self, fonts: Fonts, roles: Sequence[tuple[str, int]], wide: float, bar: str = "") -> None:
        self.bar, self.wide = bar, wide  # `bar`: what the colours mean; "" for no colour bar
        bar_wide = max(1.5, fonts.width(bar, 6)) if bar else 0.0
        self.beside = not bar or wide - bar_wide - 0.2 >= 1.0
        room = wide - bar_wide - 0.2 if self.beside else wide
        self.entries: list[tuple[str, str, float, int]] = []  # role, words, inches from the left, line
        x, line = 0.0, 0
        for name, count in roles:
            long = 0.36 + fonts.width(f"{name} {count}", 6.5)
            if x and x + long > room:
                x, line = 0.0, line + 1
            self.entries.append((name, f"{name} {count}", x, line))
            x += long
        self.tall = 0.18 * (line + 1) if self.entries else 0.0
        self.high = 0.14 + (max(self.tall, 0.36 if bar else 0.0) if self.beside else self.tall + 0.42)

    def draw(self, sheet: Sheet, left: float) -> None:
        top = sheet.high - self.high + 0.02
        for role, words, x, line in self.entries:
            draw_sign(sheet, left + x, top + 0.18 * line, role)
            sheet.text(left + x + 0.18, top + 0.18 * line + 0.07, words, 6.5, align="left center")
        if self.bar:
            right, y = left + self.wide, top + (0.03 if self.beside else self.tall + 0.05)
            sheet.colour_bar(right - 1.5, y, 1.5, 0.08, (0.0, 0.05, 0.25, 0.5, 1.0), 6)
            sheet.text(right, y + 0.29, self.bar, 6, QUIET, "right center")
