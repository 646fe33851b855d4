"""Figures of measures: which head has which role, where heads look by offset, how widely they look.

Letters: H query heads, N queries, M keys.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from regard.draw.figure.canvas import BLANK, INK, QUIET, SHADES, Sheet, ink_on, mixed, tick
from regard.draw.figure.fonts import Fonts
from regard.draw.figure.legends import (
    PAGE,
    TALL,
    Legend,
    Request,
    check_measured,
    color_of,
    count_roles,
    draw_sign,
    few_digits,
    head_numbers,
    per_head,
    sign_of,
)
from regard.draw.scene import Panel
from regard.errors import bad_value

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SHADED = ("shade: the score, from what", "the role takes to the most")


# Roles


def draw_roles(request: Request) -> Figure:
    """Which head has which role, by sign. The legend stands beside, or below where the figure is narrow."""
    panels, fonts, names = request.panels, request.fonts, request.short_names()
    if not any(panel.roles for panel in panels):
        expected, received = "self attention, with the default measures", repr(panels[0].layer)
        raise bad_value("record", expected=expected, received=received, remedy="watch(model)")
    across, roles = max(panel.heads for panel in panels), count_roles(panels)
    left, top = 0.2 + fonts.widest(["layer", *names], 7), 0.38
    column = 0.3 + max(fonts.widest(SHADED, 6), 0.55 + fonts.widest([name for name, _ in roles], 7))
    beside = request.most >= left + column + 0.2 * across
    aside = column if beside else 0.12
    request.check_width(left + aside + 0.1 * across, f"{across} heads")
    side = (request.most - left - aside) / across
    side = side if request.width else max(min(side, 0.42, (TALL - 0.6) / len(panels)), 0.2)
    legend = Legend(fonts, roles, across * side)
    wide, high = request.width or left + across * side + aside, len(panels) * side
    below = max(high, len(roles) * 0.2 + 0.35) + 0.14 if beside else high + legend.high + 0.28
    sheet = Sheet(fonts, wide, top + below, request.dpi)
    best = _best_scores(panels)
    head_numbers(sheet, left, top - 0.03, side, side / 2, across)
    for row, panel in enumerate(panels):
        y = top + row * side
        sheet.text(left - 0.08, y + side / 2, names[row], 7, align="right center")
        for head in range(panel.heads):
            _draw_score(sheet, left + head * side, y, side, panel, head, best)
    if beside:
        _draw_column(sheet, left + across * side + 0.18, top, column - 0.34, roles)
    else:
        sheet.text(left, sheet.high - legend.high - 0.06, " ".join(SHADED), 6, QUIET, "left center")
        legend.draw(sheet, left)
    return sheet.figure


def _best_scores(panels: Sequence[Panel]) -> dict[str | None, float]:
    """The score at which a role has its full colour: 1 for shares of attention; the highest, for nats and tokens."""
    best: dict[str | None, float] = {}
    for role in (role for panel in panels for role in panel.roles):
        best[role.role] = max(best.get(role.role, 1.0), role.score or 0.0)
    return best


def _draw_score(
    sheet: Sheet, x: float, y: float, side: float, panel: Panel, head: int, best: dict[str | None, float]
) -> None:
    """One head in the overview of roles."""
    role = panel.roles[head] if panel.roles else None
    inner = (x + 0.01, y + 0.01, side - 0.02, side - 0.02)
    if role is None or role.role is None:
        sheet.box(*inner, BLANK)
        if role is None:
            sheet.text(x + side / 2, y + side / 2, "cross", min(6.0, side * 17), QUIET)
        return
    score, least = role.score or 0.0, role.least or 0.0
    above = (score - least) / max(best[role.role] - least, 1e-9)
    color = mixed(color_of(role.role), 0.35 + 0.65 * min(max(above, 0.0), 1.0))
    sheet.box(*inner, color)
    scored = side >= 0.28
    middle = y + side * (0.38 if scored else 0.52)
    sheet.text(x + side / 2, middle, sign_of(role.role), min(9.0, side * 26), ink_on(color))
    if scored:
        sheet.text(x + side / 2, y + side * 0.77, few_digits(score), min(6.0, side * 16), ink_on(color))


def _draw_column(sheet: Sheet, x: float, y: float, wide: float, roles: Sequence[tuple[str, int]]) -> None:
    """The roles with their signs and how many heads have each, one below the other."""
    for i, (name, count) in enumerate(roles):
        middle = y + 0.2 * i + 0.09
        draw_sign(sheet, x, middle - 0.07, name)
        sheet.text(x + 0.2, middle, name, 7, align="left center")
        sheet.text(x + wide, middle, str(count), 7, QUIET, "right center")
    for i, part in enumerate(SHADED):
        sheet.text(x, y + 0.2 * len(roles) + 0.12 + 0.12 * i, part, 6, QUIET, "left center")


# Offsets


def draw_offsets(request: Request) -> Figure:
    """Where heads look, relative to the query: for each layer a row for each head, and below it equal weights."""
    panels, fonts = request.panels, request.fonts
    profiles, before, after = _profiles(panels)
    steps, heads = before + 1 + after, max(panel.heads for panel in panels)
    left, gap, title = 0.54, 0.26, 0.24
    request.check_width(left + gap + 0.05 * steps, f"{steps} offsets")
    side = 0.2 if request.one_layer else 0.1
    least = 0.055 if request.width else side
    across = max(1, min(len(panels), int((request.most - left) / (steps * least + gap))))
    down = math.ceil(len(panels) / across)
    across = math.ceil(len(panels) / down)  # (rows as even as can be)
    if request.width:
        side = ((request.width - left) / across - gap) / steps
    wide = request.width or max(left + across * (steps * side + gap), 2.6)
    pitch = title + (heads + 1.5) * side + 0.26
    roles = [(role, count) for role, count in count_roles(panels) if role != "no role"]
    legend = Legend(fonts, roles, wide - left - gap, "share of attention, by offset from the query")
    sheet = Sheet(fonts, wide, 0.04 + down * pitch + legend.high, request.dpi)
    for i, (panel, name, profile) in enumerate(zip(panels, request.short_names(), profiles, strict=True)):
        x, y = left + (i % across) * (steps * side + gap), 0.04 + (i // across) * pitch + title
        sheet.text(x, y - 0.05, f"layer {name}" if name.isdigit() else name, 7, align="left baseline")
        _draw_profile(sheet, x, y, side, panel, profile, before, numbers=i % across == 0)
    legend.draw(sheet, left)
    return sheet.figure


def _draw_profile(
    sheet: Sheet,
    x: float,
    y: float,
    side: float,
    panel: Panel,
    profile: tuple[Tensor, Tensor],
    before: int,
    numbers: bool,
) -> None:
    """One layer's heads by offset, equal weights below, roles to the right; head numbers to the left if asked for."""
    ours, even = profile
    after = ours.shape[1] - 1 - before
    long, high, size = ours.shape[1] * side, panel.heads * side, min(6.5, side * 58)
    below = y + (panel.heads + 0.5) * side
    sheet.image(x, y, long, high, ours, str(panel.number))
    sheet.image(x, below, long, side, even, f"{panel.number} equal weights")
    for offset in range(-before, after + 1, max(1, max(before, after) // 2)):
        text = f"{offset:+d}".replace("-", "−") if offset else "0"
        sheet.text(x + (offset + before + 0.5) * side, below + side + 0.11, text, 6, align="center baseline")
    for head in range(panel.heads):
        if role := panel.role(head):
            sheet.text(x + long + 0.03, y + (head + 0.5) * side, sign_of(role), size, color_of(role), "left center")
        if numbers:
            sheet.text(x - 0.05, y + (head + 0.5) * side, str(head), size, align="right center")
    if numbers:
        sheet.text(x - 0.05, below + side / 2, "equal", size, align="right center")
        sheet.text(x - 0.38, y + high / 2, "head", 6.5, QUIET, rotation=90)


def _profiles(panels: Sequence[Panel]) -> tuple[list[tuple[Tensor, Tensor]], int, int]:
    """The attention by offset of each layer's heads and of equal weights, and how many offsets there are before and
    after the query; none after, if no head looks ahead."""
    for panel in panels:
        check_measured(panel.layer, "offsets")
    ours, before = [panel.offsets()[0] for panel in panels], panels[0].offsets()[1]
    bases = [panel.layer.uniform for panel in panels]
    even = [
        torch.zeros_like(mass[:1]) if base is None else per_head(base, "offsets")
        for mass, base in zip(ours, bases, strict=True)
    ]
    after = ours[0].shape[1] - 1 - before
    if all((mass[:, before + 1 :] == 0).all() for mass in ours):
        after = 0
    end = before + 1 + after
    return [(mass[:, :end], base[:, :end]) for mass, base in zip(ours, even, strict=True)], before, after


# Entropy


def draw_entropy(request: Request) -> Figure:
    """How widely each head looks, by layer: a dot for each, their mean, and the entropy of equal weights."""
    panels, fonts, names = request.panels, request.fonts, request.short_names()
    values = [per_head(panel.layer, "entropy") for panel in panels]
    bases = [panel.layer.uniform for panel in panels]
    even = [math.nan if base is None else per_head(base, "entropy")[0].item() for base in bases]
    most = max(value for value in [*torch.cat(values).tolist(), *even] if not math.isnan(value)) or 1.0
    request.check_width(2.4, "the plot and its labels")
    wide = request.width or min(PAGE, max(3.4, 1.8 + 0.5 * len(panels)))
    left, right, top, high = 0.62, 0.95, 0.14, max(1.6, min(2.8, wide * 0.42))
    pitch, long = (wide - left - right) / len(panels), fonts.widest(names, 7)
    turned = long > 0.95 * pitch and not all(name.isdigit() for name in names)
    below = (long if turned else 0.1) + 0.44
    sheet = Sheet(fonts, wide, top + high + below, request.dpi)
    ax = sheet.axes(left, top, wide - left - right, high, "entropy", frame=None)
    ax.set_xlim(-0.5, len(panels) - 0.5)
    ax.set_ylim(-0.03 * most, 1.06 * most)
    for edge in ("left", "bottom"):
        ax.spines[edge].set(visible=True, color=QUIET, linewidth=0.6)
    marks = _round_numbers(1.06 * most)
    tick(ax, fonts, "left", [f"{mark:g}" for mark in marks], 7, marks, length=2.5)
    shown = range(0, len(panels), math.ceil((0.13 if turned else 1.4 * long) / pitch))
    tick(ax, fonts, "bottom", [names[i] for i in shown], 7, shown, length=2.5, turned=turned)
    _plot_entropy(ax, panels, values, even, pitch)
    notes = [("mean", values[-1].mean().item(), INK), ("equal weights", even[-1], QUIET)]
    _write_notes(ax, fonts, high, notes)
    sheet.text(0.18, top + high / 2, "entropy in nats", 7.5, rotation=90)
    middle = left + (wide - left - right) / 2
    sheet.text(middle, top + high + below - 0.12, "layer, its heads from left to right", 7.5)
    return sheet.figure


def _plot_entropy(
    ax: Axes, panels: Sequence[Panel], values: Sequence[Tensor], even: Sequence[float], pitch: float
) -> None:
    """Dots for the heads of each layer from left to right, every other layer on grey; lines for equal weights and for
    the means."""
    size = max(2.0, min(3.8, pitch * 72 * 0.85 / max(map(len, values))))
    dots = {"color": SHADES[6], "linestyle": "", "marker": "o", "markersize": size, "markeredgewidth": 0}
    for i, value in enumerate(values):
        if i % 2:
            ax.axvspan(i - 0.5, i + 0.5, facecolor=BLANK, edgecolor="none", linewidth=0, zorder=0)
        jitter = (
            torch.linspace(-0.38, 0.38, len(value), device="cpu") if len(value) > 1 else torch.zeros(1, device="cpu")
        )
        ax.plot((i + jitter).tolist(), value.tolist(), label=f"layer {i}", zorder=2, **dots)
    dashes = {"color": QUIET, "linewidth": 1.0, "linestyle": (0, (4, 2)), "marker": ""}
    for first, last in _runs(even):
        ax.plot([first - 0.5, last + 0.5], [even[first]] * 2, label="equal weights", zorder=1, **dashes)
    line = {"color": INK, "linewidth": 0.8, "linestyle": "-", "marker": "_", "markersize": min(9.0, pitch * 40)}
    edge = {"markeredgewidth": 1.6, "markeredgecolor": INK}
    for stack in _stacks([panel.name for panel in panels]):
        ax.plot(stack, [values[i].mean().item() for i in stack], label="mean", zorder=3, **line, **edge)


def _stacks(names: Sequence[str]) -> list[list[int]]:
    """Layers grouped by their names without the numbers: those of an encoder, those of a decoder."""
    groups: dict[str, list[int]] = {}
    for i, name in enumerate(names):
        groups.setdefault(re.sub(r"\d+", "#", name), []).append(i)
    return list(groups.values())


def _runs(values: Sequence[float]) -> list[tuple[int, int]]:
    """The first and the last index of each run of equal neighbours (to rounding)."""
    starts = [i for i, value in enumerate(values) if not i or not math.isclose(value, values[i - 1], rel_tol=1e-6)]
    return [(a, b - 1) for a, b in pairwise([*starts, len(values)])]


def _round_numbers(most: float) -> list[float]:
    """A few round numbers from 0 up."""
    step = 10.0 ** math.floor(math.log10(most / 4))
    step *= next(factor for factor in (1, 2, 5, 10) if most / (step * factor) <= 6)
    return [round(i * step, 10) for i in range(int(most / step + 1e-9) + 1)]


def _write_notes(ax: Axes, fonts: Fonts, high: float, notes: Sequence[tuple[str, float, str]]) -> None:
    """Names beside the ends of lines, instead of a legend, at least a line apart."""
    low, top = ax.get_ylim()
    line = 0.13 / high * (top - low)
    at = -math.inf
    for text, value, color in sorted((note for note in notes if not math.isnan(note[1])), key=lambda note: note[1]):
        at = max(value, at + line)
        look = {"xytext": (5, 0), "textcoords": "offset points", "color": color, "va": "center"}
        ax.annotate(text, (ax.get_xlim()[1], at), annotation_clip=False, **look, **fonts.style(7))
