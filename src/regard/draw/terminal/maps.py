"""Maps in the terminal: cells that fit, the tokens beside and above them, several side by side.

Letters: H query heads, N queries, M keys.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import ceil
from typing import NamedTuple

import torch
from torch import Tensor

from regard.draw.scene import Panel
from regard.draw.terminal.screen import UNSEEN, Screen
from regard.heads.analysis.labels import Labels

__all__ = ["GAP", "LABEL", "Block", "HeadMap", "beside", "gallery", "head_maps", "map_lines", "numbered"]

GAP = 2  # columns between blocks side by side
USEFUL = 20  # columns that each of several maps should have at least
LABEL, HEADER = 12, 10  # of a token: columns beside a map at most, lines above it at most
TITLE = 16  # columns: "layer 29 head 11"
TALL, LARGE = 48, 120  # lines of one map of several, of a map alone


@dataclass(frozen=True)
class Axis:
    """One side of a map: the range of tokens of each cell, first and end."""

    labels: Labels
    spans: list[tuple[int, int]]

    def __len__(self) -> int:
        return len(self.spans)

    @property
    def pooled(self) -> bool:
        return len(self.spans) < len(self.labels)

    def name(self, first: int, last: int | None = None) -> str:
        """The token of a cell, or the range of its tokens; with `last`, the range up to another cell."""
        a, b = self.spans[first][0], self.spans[first if last is None else last][1]
        if not self.pooled and last is None:
            return self.labels.text[a]
        return f"{a}-{b - 1}" if b - a > 1 else str(a)


@dataclass(frozen=True)
class HeadMap:
    """One head's map, ready to be drawn."""

    title: str
    role: str
    weights: Tensor  # (rows, cols)
    rows: Axis
    cols: Axis
    size: Size

    @property
    def width(self) -> int:
        return len(self.cols) * self.size.wide

    @property
    def numbers(self) -> bool:
        """Whether cells have room for numbers."""
        return self.size.wide > 2


class Size(NamedTuple):
    """The size of a map: its cells, the columns of each, the columns of labels beside it, two rows in a line or one."""

    rows: int
    cols: int
    wide: int
    label: int
    halves: bool


def head_maps(panel: Panel, heads: Iterable[int], screen: Screen, many: int) -> list[HeadMap]:
    """The maps of some heads, of a size for `many` maps on one screen."""
    size = _size(panel, screen, many)
    maps = panel.pooled(size.rows, size.cols)
    rows, cols = (_axis(panel, dim, maps.shape[1 + dim]) for dim in (0, 1))
    return [HeadMap(*_title(panel, head), maps[head], rows, cols, size) for head in heads]


def _size(panel: Panel, screen: Screen, many: int) -> Size:
    """A cell for each token if there is room; else pooled, to a map about as high as wide."""
    n, m = panel.shape
    longest = max((screen.columns(text[: 2 * LABEL]) for text in panel.queries.text), default=1)
    longest += len(str(n)) + 1 if _wide_letters(panel.keys, screen) else 0  # (they may be numbered)
    label = min(LABEL, screen.width // 3, max(longest, len(f"{n}-{n}") if n > TALL else 0))
    room = screen.width - label - GAP
    half = (room - GAP) // 2
    spaces = (room,) if many == 1 or half < USEFUL else (half, room)  # two maps side by side, if they fit
    widths = (4, 2, 1) if many == 1 and screen.colours else (2, 1)
    most = LARGE if many == 1 else TALL
    cols = min(m, spaces[0] if many == 1 else min(TALL, spaces[0]))
    fits = [wide for space in spaces for wide in widths if m * wide <= space]
    if fits and m <= most:
        cols, widths = m, fits
    else:
        widths = (1,)
    lines = max(cols * widths[0] // 2, TALL // 2)
    rows = n if n <= most else min(n, 2 * lines) if screen.halves else min(n, lines)
    return Size(rows, cols, widths[0], label, n > most and screen.halves)


def _axis(panel: Panel, dim: int, cells: int) -> Axis:
    labels = (panel.queries, panel.keys)[dim]
    count = len(labels)
    stored = count if panel.layer.exact else min(count, panel.layer.last()["heatmap"].shape[2 + dim])
    cell = (
        torch.arange(count, device="cpu") * stored // max(count, 1) * cells // max(stored, 1)
    )  # (heatmaps are pooled again)
    ends = torch.bincount(cell, minlength=cells).cumsum(0).tolist()
    return Axis(labels, list(zip([0, *ends], ends, strict=False)))


def _title(panel: Panel, head: int) -> tuple[str, str]:
    """The name of a head and its role."""
    role = panel.roles[head] if panel.roles else None
    words = f"{role.role} {role.score:.2f}" if role is not None and role.role is not None else ""
    return f"layer {panel.number} head {head}", "cross" if panel.layer.kind == "cross" else words


def gallery(maps: list[HeadMap], screen: Screen) -> list[list[str]]:
    """Maps of the same queries side by side, as many as fit: a section for each row of maps."""
    sections = []
    for _, same in groupby(maps, lambda drawing: (id(drawing.rows.labels), len(drawing.rows), drawing.size)):
        group = list(same)
        room = screen.width - group[0].size.label
        width = max(max(drawing.width for drawing in group), min(TITLE, room - GAP))
        fit = max(1, room // (width + GAP))
        across = ceil(len(group) / ceil(len(group) / fit))  # rows as even as possible: 2 + 2 rather than 3 + 1
        for first in range(0, len(group), across):
            sections.append(_row_of_maps(group[first : first + across], width, screen))
    return sections


def _row_of_maps(group: list[HeadMap], width: int, screen: Screen) -> list[str]:
    """Maps side by side: above each its title, role and tokens, if it has them; tokens to the left of the first."""
    has_titles, has_roles = any(drawing.title for drawing in group), any(drawing.role for drawing in group)
    headers = [_header(drawing, screen) for drawing in group]
    high = max(map(len, headers))
    label, side = group[0].size.label, _side(group[0], screen)
    blocks = [Block([" " * label] * (has_titles + has_roles + high) + side, label)]
    for drawing, header in zip(group, headers, strict=True):
        lines = [screen.bold(screen.fit(drawing.title, width))] if has_titles else []
        lines += [screen.dim(screen.fit(drawing.role, width))] if has_roles else []
        lines += [" " * width] * (high - len(header))
        blank = " " * (width - drawing.width)
        blocks.append(Block(lines + [line + blank for line in header + _cells(drawing, screen)], width))
    return beside(blocks)


def _side(drawing: HeadMap, screen: Screen) -> list[str]:
    """The tokens beside a map."""
    rows, label = drawing.rows, drawing.size.label
    if drawing.size.halves:
        names = [rows.name(i, min(i + 1, len(rows) - 1)) for i in range(0, len(rows), 2)]
        return [screen.dim(screen.fit(name, label, right=True)) for name in names]
    names = [rows.name(i) for i in range(len(rows))]
    if numbered(drawing, screen) and not rows.pooled:
        names = [f"{i} {name}" for i, name in enumerate(names)]
    names = [screen.fit(name, label, right=True) for name in names]
    faint = [rows.pooled or rows.labels.special[first] for first, _ in rows.spans]
    return [screen.dim(name) if dim else name for name, dim in zip(names, faint, strict=True)]


def _header(drawing: HeadMap, screen: Screen) -> list[str]:
    """The tokens above a map, written from top to bottom; the positions of some if it is pooled."""
    cols, wide = drawing.cols, drawing.size.wide
    if cols.pooled:
        return [screen.dim(_ruler(drawing))]
    texts = list(map(str, range(len(cols)))) if numbered(drawing, screen) else cols.labels.text
    high = min(HEADER, max((len(screen.letters(text)) for text in texts), default=0))
    before = (wide - 1) // 2
    letters = [screen.down(text, high, wide - before) for text in texts]
    if wide == 1:  # every other token is dim, to tell it from its neighbours
        letters[1::2] = [[screen.dim(letter) for letter in column] for column in letters[1::2]]
    return ["".join(" " * before + letter for letter in line) for line in zip(*letters, strict=True)]


def numbered(drawing: HeadMap, screen: Screen) -> bool:
    """Whether columns are too narrow for the letters of their tokens, and are numbered instead."""
    return not drawing.cols.pooled and drawing.size.wide == 1 and _wide_letters(drawing.cols.labels, screen)


def _wide_letters(labels: Labels, screen: Screen) -> bool:
    return any(screen.columns(letter) > 1 for text in labels.text for letter in screen.letters(text[: 2 * HEADER]))


def _ruler(drawing: HeadMap) -> str:
    """The position of the first token of some columns, evenly spaced."""
    wide, line = drawing.size.wide, ""
    every = ceil((len(str(len(drawing.cols.labels))) + 3) / wide)
    for i in range(0, len(drawing.cols), every):
        number = str(drawing.cols.spans[i][0])
        line = line.ljust(i * wide) + (number if i * wide + len(number) <= drawing.width else "")
    return line.ljust(drawing.width)


def _cells(drawing: HeadMap, screen: Screen) -> list[str]:
    levels = screen.levels(drawing.weights)
    if not drawing.numbers:
        return map_lines(levels, drawing.size.wide, screen, drawing.size.halves)
    texts = [[f"{100 * x:^4.0f}" if x >= 0.005 else "    " for x in row] for row in drawing.weights.tolist()]
    return [screen.cells(row, drawing.size.wide, text) for row, text in zip(levels, texts, strict=True)]


def map_lines(levels: list[list[int]], wide: int, screen: Screen, halves: bool) -> list[str]:
    """The lines of a map; as half blocks, two rows each."""
    if not halves:
        return [screen.cells(row, wide) for row in levels]
    empty = [UNSEEN] * len(levels[0]) if levels else []
    return [screen.two_rows(above, below) for above, below in zip(levels[::2], [*levels[1::2], empty], strict=False)]


class Block(NamedTuple):
    """Lines that all take the same number of columns."""

    lines: list[str]
    width: int


def beside(blocks: Sequence[Block]) -> list[str]:
    """Blocks of lines side by side."""
    high = max(len(block.lines) for block in blocks)
    full = [block.lines + [" " * block.width] * (high - len(block.lines)) for block in blocks]
    return [(" " * GAP).join(parts) for parts in zip(*full, strict=True)]
