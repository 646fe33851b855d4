"""The kinds of figures: all heads, one head, roles, offsets, entropy.

Letters: H query heads, N queries, M keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from regard.draw.figure.canvas import INK, QUIET, Sheet, map_look, scale_standing, tick
from regard.draw.figure.elements import (
    MAPS,
    PAGE,
    SHADED,
    TALL,
    Foot,
    Heading,
    Order,
    along,
    at_least,
    best_of,
    color_of,
    draw_column,
    draw_dots,
    draw_map,
    draw_role,
    draw_score,
    head_numbers,
    in_a_row,
    labels_below,
    labels_left,
    legend_of,
    lines_between,
    measured_of,
    pooled_head,
    pooled_heads,
    profiles_of,
    round_numbers,
    runs,
    sign_of,
    signed,
    stacks,
    write_notes,
    write_weights,
)
from regard.errors import bad_value

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["KINDS"]


def _heads(order: Order) -> Figure:
    """The maps of all heads: layers down and heads across; or those of one layer, larger."""
    return _one_layer(order) if order.one_layer else _all_layers(order)


def _all_layers(order: Order) -> Figure:
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
    one = at_least(side(columns), 0.26, order, need, f"{across} heads")
    high, size = (0.16, 5.8) if one >= 0.4 else (0.13, 5.0)  # of the line above a map
    down = math.ceil(len(panels) / columns)
    block = left + across * (one + gap)
    wide = order.width or max(columns * block - gap + 0.12, 2.6)
    foot = Foot(letters, legend_of(panels), wide - left - 0.12, MAPS)
    sheet = Sheet(letters, wide, top + down * (one + high + gap) + 0.1 + foot.high, order.dpi)
    for i, panel in enumerate(panels):
        x, y = (i // down) * block + left, top + (i % down) * (one + high + gap) + high
        if i % down == 0:
            head_numbers(sheet, x, top, one + gap, one / 2, across)
        sheet.text(x - 0.08, y + one / 2, names[i], 7, ha="right", va="center")
        maps = pooled_heads(panel, one * order.dpi)
        for head in range(panel.heads):
            draw_map(sheet, x + head * (one + gap), y, one, panel, head, maps[head])
            draw_role(sheet, x + head * (one + gap), y - 0.02, one, panel, head, size)
    foot.draw(sheet, left)
    return sheet.figure


def _one_layer(order: Order) -> Figure:
    """The maps of one layer's heads, in rows, with tokens beside them where there is room."""
    panel, letters = order.panels[0], order.letters
    across = in_a_row(panel.heads)
    down = math.ceil(panel.heads / across)
    gap, high, top = 0.1, 0.18, 0.34

    def side(left: float, below: float) -> float:
        fits = (order.most - left - 0.12 + gap) / across - gap
        return fits if order.width else min(fits, (TALL - top - below - 0.7) / down - gap - high, 2.6)

    size = min(6.5, side(0.8, 0.6) / max(panel.shape) * 72 * 0.85)  # of tokens; none where they would be too small
    queries, keys = (
        [letters.short(text, 14) for text in labels.text if size >= 4.2] for labels in (panel.queries, panel.keys)
    )
    left, below = 0.16 + letters.widest(queries, size), 0.08 + letters.widest(keys, size)
    one = at_least(side(left, below), 0.4, order, left + 0.1 + across * (0.4 + gap), f"{across} maps in a row")
    wide = order.width or max(left + across * (one + gap) - gap + 0.12, 2.6)
    foot = Foot(letters, legend_of([panel]), wide - left - 0.12, MAPS)
    sheet = Sheet(letters, wide, top + down * (one + high + gap) + below + foot.high, order.dpi)
    sheet.text(left, 0.24, letters.short(panel.name, 48), 8, bold=True, ha="left", va="baseline")
    maps = pooled_heads(panel, one * order.dpi)
    for head in range(panel.heads):
        i, j = divmod(head, across)
        x, y = left + j * (one + gap), top + i * (one + high + gap) + high
        draw_map(sheet, x, y, one, panel, head, maps[head])
        sheet.text(x, y - 0.05, f"head {head}", 6.5, ha="left", va="baseline")
        draw_role(sheet, x, y - 0.03, one, panel, head, 6.5, named=True)
        if j == 0:
            labels_left(sheet, x, y, one, queries, size, panel.queries.special)
        if head + across >= panel.heads:  # (no map stands below it)
            labels_below(sheet, x, y + one, one, keys, size, panel.keys.special)
    foot.draw(sheet, left)
    return sheet.figure


def _head(order: Order) -> Figure:
    """One head, large."""
    panel, letters, head = order.panels[0], order.letters, order.head
    assert head is not None
    weights = pooled_head(panel, head)
    rows, cols = weights.shape

    def cell(left: float) -> tuple[float, float]:
        """How wide and how high: square, unless the map would be a thread."""
        square = min(order.width or 0.42, (order.most - left - 0.7) / cols, (TALL - 2.2) / rows)
        return max(square, 0.25 / cols), max(square, 0.25 / rows)

    queries = along(panel.queries, rows, cell(1.2)[1], letters)
    left = 0.4 + letters.widest(queries.texts, queries.size)
    wide, high = cell(at_least(left, left, order, left + 1.2, "a map with its labels"))
    queries, keys = along(panel.queries, rows, high, letters), along(panel.keys, cols, wide, letters)
    heading = Heading(letters, panel, head, order.width, left + cols * wide + 0.7)
    top = heading.high + 0.24 + letters.widest(keys.texts, keys.size)
    sheet = Sheet(letters, heading.wide, top + max(rows * high, 0.8) + 0.16, order.dpi)
    heading.draw(sheet)
    ax = sheet.axes(left, top, cols * wide, rows * high, "map")
    ax.imshow(weights.numpy(), label=f"{panel.number}.{head}", **map_look())
    if min(wide, high) >= 0.12:
        lines_between(ax, rows, cols)
    tick(ax, letters, "left", queries.texts, queries.size, queries.at, special=queries.special)
    tick(ax, letters, "top", keys.texts, keys.size, keys.at, special=keys.special)
    sheet.text(0.22, top + rows * high / 2, "query", 7.5, QUIET, ha="center", va="center", rotation=90)
    sheet.text(left + cols * wide / 2, heading.high + 0.12, "key", 7.5, QUIET, ha="center", va="center")
    if min(wide, high) >= 0.3 and rows * cols <= 400:
        write_weights(ax, letters, weights, min(6.5, wide * 16))
    scale_standing(sheet, left + cols * wide + 0.16, top, min(max(rows * high, 0.8), 2.2))
    return sheet.figure


def _roles(order: Order) -> Figure:
    """Which head has which role: a sign each. The legend stands beside, or below where the figure is narrow."""
    panels, letters, names = order.panels, order.letters, order.short_names()
    if not any(panel.roles for panel in panels):
        raise bad_value(
            "record",
            expected="self attention, with the default measures",
            received=repr(panels[0].layer),
            remedy="watch(model)",
        )
    across, legend = max(panel.heads for panel in panels), legend_of(panels, everything=True)
    left, top = 0.2 + letters.widest(["layer", *names], 7), 0.38
    column = 0.3 + max(letters.widest(SHADED, 6), 0.55 + letters.widest([name for name, _ in legend], 7))
    beside = order.most >= left + column + 0.2 * across
    aside = column if beside else 0.12
    side = (order.most - left - aside) / across
    side = side if order.width else min(side, 0.42, (TALL - 0.6) / len(panels))
    side = at_least(side, 0.2, order, left + aside + 0.1 * across, f"{across} heads")
    foot = Foot(letters, legend, across * side)
    wide, high = order.width or left + across * side + aside, len(panels) * side
    below = max(high, len(legend) * 0.2 + 0.35) + 0.14 if beside else high + foot.high + 0.28
    sheet = Sheet(letters, wide, top + below, order.dpi)
    best = best_of(panels)
    head_numbers(sheet, left, top - 0.03, side, side / 2, across)
    for row, panel in enumerate(panels):
        y = top + row * side
        sheet.text(left - 0.08, y + side / 2, names[row], 7, ha="right", va="center")
        for head in range(panel.heads):
            draw_score(sheet, left + head * side, y, side, panel, head, best)
    if beside:
        draw_column(sheet, left + across * side + 0.18, top, column - 0.34, legend)
    else:
        sheet.text(left, sheet.high - foot.high - 0.06, " ".join(SHADED), 6, QUIET, ha="left", va="center")
        foot.draw(sheet, left)
    return sheet.figure


def _offsets(order: Order) -> Figure:
    """Where heads look, relative to the query: for each layer a row for each head, and below one of equal weights."""
    panels, letters = order.panels, order.letters
    profiles, before, after = profiles_of(panels)
    steps, heads = before + 1 + after, max(panel.heads for panel in panels)
    left, gap, title = 0.54, 0.26, 0.24
    side = 0.2 if order.one_layer else 0.1
    least = 0.055 if order.width else side
    across = max(1, min(len(panels), int((order.most - left) / (steps * least + gap))))
    down = math.ceil(len(panels) / across)
    across = math.ceil(len(panels) / down)  # (rows as even as can be)
    if order.width:
        side = ((order.width - left) / across - gap) / steps
    at_least(side, side, order, left + gap + 0.05 * steps, f"{steps} offsets")
    wide = order.width or max(left + across * (steps * side + gap), 2.6)
    pitch = title + (heads + 1.5) * side + 0.26
    foot = Foot(letters, legend_of(panels), wide - left - gap, "share of attention, by offset from the query")
    sheet = Sheet(letters, wide, 0.04 + down * pitch + foot.high, order.dpi)
    size = min(6.5, side * 58)
    for i, (panel, (profile, even)) in enumerate(zip(panels, profiles, strict=True)):
        x, y = left + (i % across) * (steps * side + gap), 0.04 + (i // across) * pitch + title
        long, below = steps * side, y + (panel.heads + 0.5) * side
        sheet.text(x, y - 0.05, order.title(panel), 7, ha="left", va="baseline")
        sheet.image(x, y, long, panel.heads * side, profile, str(panel.number))
        sheet.image(x, below, long, side, even, f"{panel.number} equal weights")
        marks = range(-before, after + 1, max(1, max(before, after) // 2))
        for j in marks:
            sheet.text(x + (j + before + 0.5) * side, below + side + 0.11, signed(j), 6, ha="center", va="baseline")
        for head in range(panel.heads):
            if role := panel.role(head):
                sheet.text(
                    x + long + 0.03,
                    y + (head + 0.5) * side,
                    sign_of(role),
                    size,
                    color_of(role),
                    ha="left",
                    va="center",
                )
        if i % across == 0:
            labels_left(sheet, x, y, panel.heads * side, [str(head) for head in range(panel.heads)], size)
            labels_left(sheet, x, below, side, ["equal"], size)
            sheet.text(x - 0.38, y + panel.heads * side / 2, "head", 6.5, QUIET, ha="center", va="center", rotation=90)
    foot.draw(sheet, left)
    return sheet.figure


def _entropy(order: Order) -> Figure:
    """How widely each head looks, by layer: a dot for each, their mean, and what equal weights would have."""
    panels, letters, names = order.panels, order.letters, order.short_names()
    values = [measured_of(panel.layer, "entropy") for panel in panels]
    bases = [panel.layer.uniform for panel in panels]
    even = [math.nan if base is None else measured_of(base, "entropy")[0].item() for base in bases]
    means = [value.mean().item() for value in values]
    most = max(value for value in [*torch.cat(values).tolist(), *even] if not math.isnan(value)) or 1.0
    wide = order.width or min(PAGE, max(3.4, 1.8 + 0.5 * len(panels)))
    left, right, top, high = 0.62, 0.95, 0.14, max(1.6, min(2.8, wide * 0.42))
    pitch = at_least((wide - left - right) / len(panels), 0.0, order, 2.4, "the plot and its labels")
    long = letters.widest(names, 7)
    turned = long > 0.95 * pitch and not all(name.isdigit() for name in names)
    below = (long if turned else 0.1) + 0.44
    sheet = Sheet(letters, wide, top + high + below, order.dpi)
    ax = sheet.axes(left, top, wide - left - right, high, "entropy", frame=None)
    ax.set_xlim(-0.5, len(panels) - 0.5)
    ax.set_ylim(-0.03 * most, 1.06 * most)
    for side in ("left", "bottom"):
        ax.spines[side].set(visible=True, color=QUIET, linewidth=0.6)
    marks = round_numbers(1.06 * most)
    tick(ax, letters, "left", [f"{mark:g}" for mark in marks], 7, marks, length=2.5)
    every = math.ceil((0.13 if turned else 1.4 * long) / pitch)
    shown = range(0, len(panels), every)
    tick(ax, letters, "bottom", [names[i] for i in shown], 7, shown, length=2.5, turned=turned)
    draw_dots(ax, values, pitch)
    for first, last in runs(even):
        ax.plot(
            [first - 0.5, last + 0.5],
            [even[first]] * 2,
            label="equal weights",
            color=QUIET,
            linewidth=1.0,
            linestyle=(0, (4, 2)),
            marker="",
            zorder=1,
        )
    for stack in stacks([panel.name for panel in panels]):
        ax.plot(
            stack,
            [means[i] for i in stack],
            label="mean",
            color=INK,
            linewidth=0.8,
            linestyle="-",
            marker="_",
            markersize=min(9.0, pitch * 40),
            markeredgewidth=1.6,
            markeredgecolor=INK,
            zorder=3,
        )
    write_notes(ax, letters, high, [("mean", means[-1], INK), ("equal weights", even[-1], QUIET)])
    sheet.text(0.18, top + high / 2, "entropy in nats", 7.5, ha="center", va="center", rotation=90)
    sheet.text(
        left + (wide - left - right) / 2,
        top + high + below - 0.12,
        "layer, its heads from left to right",
        7.5,
        ha="center",
        va="center",
    )
    return sheet.figure


KINDS: dict[str, Callable[[Order], Figure]] = {
    "heads": _heads,
    "head": _head,
    "roles": _roles,
    "offsets": _offsets,
    "entropy": _entropy,
}
