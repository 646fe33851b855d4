"""What heads attend to, drawn in the terminal: every head small, the clearest large, with the numbers.

Rows of a map are queries, the tokens that look; columns are keys, the tokens looked at. Letters: H query heads,
N queries, M keys.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import replace
from math import ceil
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.draw.scene import Panel, Scene
from regard.draw.story import story
from regard.draw.terminal.maps import GAP, LABEL, Block, HeadMap, beside, gallery, head_maps, map_lines, numbered
from regard.draw.terminal.screen import EDGES, Screen, checked_width, colour_depth
from regard.errors import bad_type, bad_value
from regard.heads import ROLES, Record
from regard.heads.analysis.labels import Labels

__all__ = ["terminal", "terminal_text"]

SMALL = ((8, 7), (7, 7), (6, 5), (5, 5), (4, 3), (3, 3))  # sizes of a small map, in columns and half lines
OVERVIEW_LINES = 48  # of all small maps, if possible
OVERVIEW_MAPS = 4  # large maps of an overview
LINKS, LEAST_LINK, STRIP = 10, 0.05, 512  # strongest links of a head, the least weight of one, queries at once
SINK = next(rule.least for rule in ROLES if rule.name == "first")


def terminal(
    seen: Record,
    tokens: Any = None,
    *,
    layer: int | str | None = None,
    head: int | None = None,
    item: int = 0,
    width: int | None = None,
    colour: bool | None = None,
    file: Any = None,
) -> None:
    """Print what heads attend to: the whole model, the heads of one layer, or one head.

    In colour where the terminal has it, else in shades; in ASCII where the encoding has no blocks. `NO_COLOR`,
    `FORCE_COLOR`, `COLORTERM`, `TERM`, `COLUMNS` and `LC_ALL=C` are respected. A text too long for the width is pooled.

    Args:
        seen: a record of `regard.watch(model, keep="qk")`, or one that measured "heatmap".
        tokens: as for `Scene`: the text's tokens, by default `seen.tokens`; without any they are numbered.
        layer, head: one layer, by name or number; one head of it. By default all layers.
        item: which text of the batch.
        width: in columns, by default that of the terminal.
        colour: True or False; by default whether the stream is a terminal with colours.
        file: a stream, by default standard output.

    >>> import regard, torch
    >>> attention = regard.MultiHeadAttention(16, num_heads=2)
    >>> _ = torch.nn.init.zeros_(attention.q_proj.weight)  # all scores are equal
    >>> with regard.watch(attention, keep="qk") as seen:
    ...     _ = attention(torch.randn(1, 3, 16), mask=regard.masks.Causal())
    >>> terminal(seen, ["a", "small", "cat"], layer=0, head=1, width=48)
    layer 0, head 1: MultiHeadAttention
    self attention, 3 tokens
    <BLANKLINE>
    head  entropy  distance  peak  offset  previous
       1     0.60      0.50  0.61   -0.50      0.28
    <BLANKLINE>
    A row is a token that looks, a column one that
    it looks at; a row sums to 1.
    weight from  ░░ 0.05  ▒▒ 0.15  ▓▓ 0.35  ██ 0.65
    <BLANKLINE>
             s
             m
             a c
             l a
           a l t
        a  ██
    small  ▓▓▓▓
      cat  ▒▒▒▒▒▒
    <BLANKLINE>
    Strongest links:
    small -> small  0.50
      cat -> small  0.33
      cat -> cat    0.33
        a -> a      1.00
    small -> a      0.50
      cat -> a      0.33
    """
    file = sys.stdout if file is None else file
    print(_draw(Scene(seen, tokens, item=item), layer, head, Screen.of(file, width, colour)), file=file)


def terminal_text(
    seen: Record,
    tokens: Any = None,
    *,
    layer: int | str | None = None,
    head: int | None = None,
    item: int = 0,
    width: int = 100,
    colour: bool = False,
    ascii: bool = False,
) -> str:
    """What `terminal` prints, as a string; with escape codes only if `colour` asks for them."""
    screen = Screen(checked_width(width), colour_depth(bool(colour), False), "ascii" if ascii else "utf-8")
    return _draw(Scene(seen, tokens, item=item), layer, head, screen)


def _draw(scene: Scene, layer: int | str | None, head: int | None, screen: Screen) -> str:
    if layer is None and head is not None:
        raise bad_value("head", expected="a layer with it", received=f"head={head!r} alone", remedy="layer=0")
    if layer is None:
        sections = _overview(scene, screen)
    else:
        panel = _panel(scene, layer)
        sections = _layer_view(panel, screen) if head is None else _head_view(panel, _head_number(panel, head), screen)
    return "\n\n".join("\n".join(line.rstrip(" ") for line in lines) for lines in sections if lines)


def _panel(scene: Scene, layer: int | str) -> Panel:
    if isinstance(layer, bool) or not isinstance(layer, (int, str)):
        raise bad_type("layer", expected="a name or a number", received=repr(layer))
    if layer not in scene.record:
        raise bad_value(
            "layer",
            expected=f"a number from 0 to {len(scene) - 1}, or one of the names",
            received=repr(layer),
            remedy=f"seen.layers: {', '.join(scene.record.layers):.200}",
        )
    return scene.panel(layer)


def _head_number(panel: Panel, head: object) -> int:
    if isinstance(head, bool) or not isinstance(head, int):
        raise bad_type("head", expected="a number", received=repr(head))
    if not -panel.heads <= head < panel.heads:
        raise bad_value("head", expected=f"a number from 0 to {panel.heads - 1}, of {panel.name}", received=head)
    return head % panel.heads


# The three views, as sections of lines


def _overview(scene: Scene, screen: Screen) -> list[list[str]]:
    grid = Grid.of(scene, screen)
    small = [panel.pooled(grid.rows, grid.cols) for panel in scene]
    by_role = _heads_by_role(scene)
    chosen = _chosen(scene, by_role, small)
    maps = [head_maps(scene[number], [head], screen, len(chosen))[0] for number, head in chosen]
    return [
        _heading(scene, screen),
        _legend(screen, maps[0]),
        _wrapped("Every head, small: layers down, heads across.", screen) + grid.lines(small, screen),
        _in_words(scene, screen),
        _role_table(scene, by_role, screen),
        *gallery(maps, screen),
    ]


def _layer_view(panel: Panel, screen: Screen) -> list[list[str]]:
    maps = head_maps(panel, range(panel.heads), screen, panel.heads)
    return [
        _subject(panel, f"{panel.heads} heads", screen),
        _legend(screen, maps[0]),
        *gallery(maps, screen),
        _head_table(panel, range(panel.heads), screen),
    ]


def _head_view(panel: Panel, head: int, screen: Screen) -> list[list[str]]:
    head_map = replace(head_maps(panel, [head], screen, 1)[0], title="", role="")
    return [
        _subject(panel, f"head {head}", screen),
        _head_table(panel, [head], screen),
        _legend(screen, head_map),
        *gallery([head_map], screen),
        _links(panel, head, head_map, screen),
    ]


# Text


def _heading(scene: Scene, screen: Screen) -> list[str]:
    """The numbers of layers, heads and tokens; and the text."""
    heads = sorted({panel.heads for panel in scene})
    cross = sum(panel.layer.kind == "cross" for panel in scene)
    layers = _count(len(scene), "layer") + (f" ({cross} of them cross)" if cross else "")
    many = _count(heads[0], "head") if len(heads) == 1 else f"{heads[0]} to {heads[-1]} heads"
    shapes = dict.fromkeys(panel.shape for panel in scene)
    lines = [screen.bold(line) for line in _wrapped(f"{layers} x {many}, {_tokens(shapes)}", screen)]
    for labels in {id(side): side for panel in scene for side in (panel.keys, panel.queries)}.values():
        if labels != Labels.numbers(len(labels)):
            lines.append(screen.fit(" ".join(labels.text[: screen.width]), screen.width))
    if scene.record.unseen:
        lines += _wrapped(f"Not seen: {scene.record.unseen_names()}. The record's `unseen` says why.", screen)
    differ = scene.record.texts_differ()
    if differ:
        lines += _wrapped(
            f"{differ[0].upper()}{differ[1:]}: some fold parts of a text into the batch, or run more often.", screen
        )
    return lines + _which(scene[0], screen)


def _subject(panel: Panel, what: str, screen: Screen) -> list[str]:
    """Which layer, and which part of it."""
    kind = "cross attention" if panel.layer.kind == "cross" else "self attention"
    name = screen.fit(f"layer {panel.number}, {what}: {panel.name}", screen.width)
    size = _wrapped(f"{kind}, {_tokens([panel.shape])}", screen)
    return [screen.bold(name.rstrip(" ")), *size, *_which(panel, screen)]


def _which(panel: Panel, screen: Screen) -> list[str]:
    """Which text is shown, where there were several."""
    batch, batches = panel.layer.shape[0], panel.layer.texts
    words = f"Text {panel.item} of {batch} in the batch. " if batch > 1 else ""
    words += f"The last of {batches} batches. " if batches > 1 else ""
    return _wrapped(words + "Numbers are means over all texts.", screen) if words else []


def _tokens(shapes: Iterable[tuple[int, int]]) -> str:
    return ", ".join(_count(n, "token") if n == m else f"{n} x {m} tokens" for n, m in shapes)


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("s" if number != 1 else "")


def _legend(screen: Screen, drawing: HeadMap) -> list[str]:
    """What a map means, and its shades."""
    words = "A row is a token that looks, a column one that it looks at; a row sums to 1."
    if drawing.rows.pooled or drawing.cols.pooled:
        n, m = (len(axis.labels) for axis in (drawing.rows, drawing.cols))
        words += f" Pooled, {n} x {m} tokens to {len(drawing.rows)} x {len(drawing.cols)} cells: a cell is what a token"
        words += " of its rows gives to all of its columns, on average."
    words += " Numbers in cells are percent." if drawing.numbers else ""
    words += " Columns are numbered." if numbered(drawing, screen) else ""
    marks = (0.0, *EDGES, 1.0) if screen.colours else EDGES
    levels = screen.levels(torch.tensor(marks, device="cpu").clamp(min=1e-6))  # (exactly 0 is not drawn)
    shades = [(f"{screen.cells([level], 2)} {x:g}", 3 + len(f"{x:g}")) for level, x in zip(levels, marks, strict=True)]
    title = "weight" if screen.colours else "weight from"
    hidden = ["unpainted: exactly 0"] if screen.colours and (drawing.weights == 0).any() else []
    items = [(title, len(title)), *shades, *((text, len(text)) for text in hidden)]
    return _wrapped(words, screen) + _wrapped_items(items, screen)


def _wrapped_items(items: list[tuple[str, int]], screen: Screen) -> list[str]:
    """(text, columns) pairs in as many lines as they take."""
    lines, used = [""], 0
    for text, wide in items:
        gap = GAP if used else 0
        if used and used + gap + wide > screen.width:
            lines, used, gap = [*lines, ""], 0, 0
        lines[-1] += " " * gap + text
        used += gap + wide
    return lines


def _wrapped(text: str, screen: Screen) -> list[str]:
    """A text in lines, by the columns that its words take on this screen."""
    lines, used = [""], 0
    for word in text.split():
        wide = min(screen.columns(word), screen.width)
        if used and used + 1 + wide > screen.width:
            lines, used = [*lines, ""], 0
        lines[-1] += (" " if used else "") + screen.fit(word, wide)
        used += wide + (1 if used else 0)
    return lines


# Every head, small


class Grid(NamedTuple):
    """Small maps, layers down and heads across; blocks of layers stand side by side if all heads fit."""

    cols: int  # cells of a map
    rows: int
    high: int  # lines of a map and the gap below
    heads: int  # in a block
    layers: int

    @classmethod
    def of(cls, scene: Scene, screen: Screen) -> Grid:
        """The largest maps with all heads side by side in few lines; else the grid with the fewest lines."""
        grids = [grid for size in SMALL for grid in cls._options(scene, screen, *size)]
        most = max(panel.heads for panel in scene)
        good = [grid for grid in grids if grid.heads == most and grid.height(scene) <= OVERVIEW_LINES]
        return good[0] if good else min(grids, key=lambda grid: grid.height(scene))

    @classmethod
    def _options(cls, scene: Scene, screen: Screen, cols: int, halves: int) -> Iterable[Grid]:
        """Grids with maps of one size, with one block across or more."""
        heads, number = max(panel.heads for panel in scene), len(str(len(scene) - 1))
        cols = max(
            len(str(heads - 1)), min(cols, max(panel.shape[1] for panel in scene))
        )  # (the head's number stands above)
        rows = min(halves if screen.halves else (halves + 1) // 2, max(panel.shape[0] for panel in scene))
        high = rows // 2 + 1 if screen.halves else rows + 1
        fit = min(heads, max(1, (screen.width - number) // (cols + 1)))
        fit = ceil(heads / ceil(heads / fit))  # rows as even as possible
        blocks = (screen.width + GAP) // (number + fit * (cols + 1) + GAP) if fit == heads else 1
        return [cls(cols, rows, high, fit, ceil(len(scene) / n)) for n in range(1, max(blocks, 1) + 1)]

    def height(self, scene: Scene) -> int:
        """Lines in all."""
        return ceil(max(panel.heads for panel in scene) / self.heads) * self.layers * self.high

    def lines(self, small: list[Tensor], screen: Screen) -> list[str]:
        most = max(len(maps) for maps in small)
        lines: list[str] = []
        for first in range(0, most, self.heads):
            heads = range(first, min(first + self.heads, most))
            starts = range(0, len(small), self.layers)
            blocks = [self._block(small, range(s, min(s + self.layers, len(small))), heads, screen) for s in starts]
            lines += beside(blocks)
        return lines[:-1] if not screen.halves or self.rows % 2 == 0 else lines  # without the last gap

    def _block(self, small: list[Tensor], layers: range, heads: range, screen: Screen) -> Block:
        number = len(str(len(small) - 1))
        lines = [screen.dim(" " * number + "".join(f" {head:<{self.cols}}" for head in heads))]
        for layer in layers:
            maps = [self._map(small[layer][head], screen) if head < len(small[layer]) else [] for head in heads]
            for i in range(self.high):
                side = screen.dim(f"{layer:>{number}}") if i == 0 else " " * number
                lines.append(side + "".join(" " + (m[i] if i < len(m) else " " * self.cols) for m in maps))
        return Block(lines, number + len(heads) * (self.cols + 1))

    def _map(self, weights: Tensor, screen: Screen) -> list[str]:
        levels = screen.levels(weights)
        blank = " " * (self.cols - weights.shape[1])
        return [line + blank for line in map_lines(levels, 1, screen, screen.halves)]


# Which heads are shown


def _heads_by_role(scene: Scene) -> dict[str, list[tuple[int, int]]]:
    """The heads of each role as (layer, head), the highest score first; roles in the order of `ROLES`."""
    scored: dict[str, list[tuple[float, int, int]]] = {rule.name: [] for rule in ROLES}
    for panel in scene:
        for head, role in enumerate(panel.roles):
            if role.role is not None:
                scored.setdefault(role.role, []).append((-(role.score or 0.0), panel.number, head))
    return {name: [(layer, head) for _, layer, head in sorted(heads)] for name, heads in scored.items() if heads}


def _chosen(scene: Scene, by_role: dict[str, list[tuple[int, int]]], small: list[Tensor]) -> list[tuple[int, int]]:
    """A few heads to be shown large: the clearest of each role; then the sharpest of those without a role."""
    chosen = [heads[0] for heads in by_role.values()][:OVERVIEW_MAPS]
    sharp = sorted(
        (panel.role(head) is not None, -small[panel.number][head].amax(-1).mean().item(), panel.number, head)
        for panel in scene
        for head in range(panel.heads)
    )
    rest = [(layer, head) for _, _, layer, head in sharp if (layer, head) not in chosen]
    return chosen + rest[: OVERVIEW_MAPS - len(chosen)]


def _in_words(scene: Scene, screen: Screen) -> list[str]:
    """The clearest head of each kind of role, in sentences."""
    told = story(scene)
    lines = [line for card in told.cards for line in _wrapped(card.text(scene), screen)]
    if not lines:
        return []
    return ["What the heads do:", *lines, *(line for absent in told.absent for line in _wrapped(absent, screen))]


def _role_table(scene: Scene, by_role: dict[str, list[tuple[int, int]]], screen: Screen) -> list[str]:
    """The clearest head of each role."""
    if not by_role:
        return []
    rows = []
    for name, heads in by_role.items():
        layer, head = heads[0]
        rows.append({"head": f"{layer}.{head}", "role": name, **_numbers(scene[layer], head), "heads": str(len(heads))})
    without = sum(panel.heads for panel in scene) - sum(map(len, by_role.values()))
    words = (
        "The clearest head of each role, as layer.head; `equal` is the score of equal weights, `heads` how many have"
    )
    return _wrapped(f"{words} the role ({without} have none).", screen) + _table(rows, screen)


def _head_table(panel: Panel, heads: Iterable[int], screen: Screen) -> list[str]:
    rows = [{"head": str(head), "role": panel.role(head) or "", **_numbers(panel, head, True)} for head in heads]
    return _table(rows, screen)


def _numbers(panel: Panel, head: int, everything: bool = False) -> dict[str, str]:
    """A head's score, that of equal weights, and its measures."""
    role = panel.roles[head] if panel.roles else None
    numbers = {"score": role and role.score, "equal": role and role.baseline}
    first = [name for name in ("entropy", "distance") if name in panel.measures]
    names = dict.fromkeys(first + list(panel.measures if everything else ()))
    return {name: "" if x is None else f"{x:.2f}" for name, x in numbers.items()} | {
        name: f"{panel.measures[name][head].item():.2f}" for name in names
    }


def _table(rows: list[dict[str, str]], screen: Screen) -> list[str]:
    """Rows as a table of as many columns as fit; empty columns are left out."""
    names = [name for name in dict.fromkeys(name for row in rows for name in row) if any(row.get(name) for row in rows)]
    lines, used = [""] * (len(rows) + 1), 0
    for name in names:
        cells = [name, *(row.get(name, "") for row in rows)]
        wide = max(map(screen.columns, cells))
        gap = GAP if used else 0
        if used + gap + wide > screen.width:
            break
        right = name != "role"
        lines = [
            line + " " * gap + screen.fit(cell, wide, right=right) for line, cell in zip(lines, cells, strict=True)
        ]
        used += gap + wide
    return [screen.dim(lines[0]), *lines[1:]]


# Links


class Link(NamedTuple):
    """One weight and the positions of its tokens."""

    weight: float
    query: int
    key: int


def _links(panel: Panel, head: int, drawing: HeadMap, screen: Screen) -> list[str]:
    """The strongest links: those between words before those with special tokens."""
    if not panel.layer.exact and (drawing.rows.pooled or drawing.cols.pooled):
        return _wrapped('The strongest links need q and k: watch(model, keep="qk").', screen)
    words, others = _strongest(panel, head, drawing)
    links = ([link for link in words + others if link.weight >= LEAST_LINK] or words + others)[:LINKS]
    pairs = [(_label(panel.queries, link.query), _label(panel.keys, link.key)) for link in links]
    most = min(2 * LABEL, (screen.width - len(" ->   0.00")) // 2)
    wide = [min(most, max((screen.columns(pair[i]) for pair in pairs), default=0)) for i in (0, 1)]
    lines = [
        f"{screen.fit(query, wide[0], right=True)} -> {screen.fit(key, wide[1])}  {link.weight:.2f}"
        for (query, key), link in zip(pairs, links, strict=True)
    ]
    return ["Strongest links:", *lines] if lines else []


def _label(labels: Labels, number: int) -> str:
    """A token; with its position, if it occurs more than once."""
    text = labels.text[number]
    return f"{text} ({number})" if labels.text.count(text) > 1 else text


def _strongest(panel: Panel, head: int, drawing: HeadMap) -> tuple[list[Link], list[Link]]:
    """Links between words, and links with special tokens, the strongest first. A first token that is an attention sink
    counts as special."""
    queries, keys = (
        ~torch.tensor(side.special, dtype=torch.bool, device="cpu") for side in (panel.queries, panel.keys)
    )
    if "on_first" in panel.measures and panel.measures["on_first"][head] > SINK:
        keys[:1] = False
    lists: tuple[list[Link], list[Link]] = [], []
    for first in range(0, len(queries), STRIP):
        rows = slice(first, min(first + STRIP, len(queries)))
        weights = panel.weights(head, rows) if panel.layer.exact else drawing.weights[rows]
        words = queries[rows, None] & keys
        for links, which in zip(lists, (words, ~words), strict=True):
            strongest = weights.nan_to_num(0.0).where(which, -1.0).flatten().topk(min(LINKS, weights.numel()))
            for weight, place in zip(strongest.values.tolist(), strongest.indices.tolist(), strict=True):
                if weight > 0:
                    links.append(Link(weight, first + place // len(keys), place % len(keys)))
    words, others = (sorted(links, key=lambda link: (-link.weight, link.query, link.key))[:LINKS] for links in lists)
    return words, others
