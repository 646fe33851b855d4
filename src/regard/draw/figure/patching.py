"""The figure of a `Patching`: how much each head, or each head at each token, brings the metric back.

Letters: H heads, N tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from regard.draw.figure.canvas import BLANK, PAPER, QUIET, Sheet, tick
from regard.draw.figure.fonts import Fonts
from regard.draw.figure.legends import PAGE, short_names
from regard.errors import bad_value

if TYPE_CHECKING:
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure

    from regard.heads import Patching

MOST_ROWS = 24  # heads that are drawn by token
AGAINST, TOWARDS = ("#a63603", "#e6842e"), ("#539ee3", "#364e89")  # from dark to light, and from light to dark


def draw_patching(result: Patching, tokens: Any, width: float | None, dpi: float, fonts: Fonts) -> Figure:
    """Layers down and heads across; by token, the heads with the largest scores down and tokens across."""
    names = [fonts.short(name, 32) for name in short_names(list(result.scores))]
    if result.by_token:
        rows, data = _largest(result, names)
        words = result.tokens if tokens is None else [str(token) for token in tokens]
        columns = [str(i) for i in range(data.shape[1])] if words is None else list(words)
        if len(columns) != data.shape[1]:
            raise bad_value("tokens", expected=f"{data.shape[1]} of them", received=f"{len(columns)}")
    else:
        rows, data = names, result.matrix()
        columns = [str(head) for head in range(data.shape[1])]
    return _draw(result, rows, columns, data, width, dpi, fonts)


def _draw(
    result: Patching,
    rows: Sequence[str],
    columns: Sequence[str],
    data: Tensor,
    width: float | None,
    dpi: float,
    fonts: Fonts,
) -> Figure:
    above = 0.12 + (fonts.widest(columns, 6.5) if result.by_token else 0.14)
    left, top, right = 0.3 + fonts.widest(["layer", *rows], 6.5), 0.26 + above, 0.75
    room = (width or PAGE) - left - right
    side = min(0.3, room / len(columns)) if width is None else room / len(columns)
    if side < 0.04:
        expected = f"at least {left + right + 0.04 * len(columns):.1f} inches, for {len(columns)} columns"
        raise bad_value("width", expected=expected, received=f"{width or PAGE:g}")
    high = max(0.12, min(side, 0.3)) * len(rows)
    wide = left + side * len(columns) + right
    sheet = Sheet(fonts, max(wide, left + fonts.width(result.caption(), 6.5) + 0.1), top + high + 0.15, dpi)
    sheet.text(left, 0.14, result.caption(), 6.5, QUIET, "left center")
    if not result.by_token:
        sheet.text(left - 0.08, top - 0.05, "layer", 6.5, QUIET, "right bottom")
        sheet.text(left + side * len(columns) + 0.08, top - 0.05, "head", 6.5, QUIET, "left bottom")
    ax = sheet.axes(left, top, side * len(columns), high, "patching")
    most = float(data.nan_to_num(0.0).abs().max()) or 1.0
    how: dict[str, Any] = {"aspect": "auto", "interpolation": "nearest", "origin": "upper", "cmap": _colours()}
    how |= {"vmin": -most, "vmax": most}
    ax.imshow(data.numpy(), label="patching", **how)
    tick(ax, fonts, "left", rows, 6.5, range(len(rows)))
    tick(ax, fonts, "top", columns, 6.5, range(len(columns)), turned=result.by_token)
    x = left + side * len(columns) + 0.15
    bar = sheet.axes(x, top, 0.09, min(high, 1.5), "scale")
    shades = torch.linspace(most, -most, 256, device="cpu")[:, None]
    bar.imshow(shades.numpy(), extent=(0, 1, -most, most), **how)
    tick(bar, fonts, "right", [f"{most:.2g}", "0", f"−{most:.2g}"], 6, [most, 0.0, -most], length=2)
    return sheet.figure


def _largest(result: Patching, names: Sequence[str]) -> tuple[list[str], Tensor]:
    """The heads with the largest scores, in the order of the model, and their scores (heads, N)."""
    matrix = result.matrix()  # (layers, H, N)
    size = matrix.nan_to_num(0.0).abs().amax(-1).flatten()
    chosen = size.topk(min(MOST_ROWS, int((size > 0).sum()) or 1)).indices.sort().values
    heads = matrix.shape[1]
    rows = [f"{names[i // heads]}.{i % heads}" for i in chosen.tolist()]
    return rows, matrix.flatten(0, 1)[chosen]


@lru_cache(maxsize=1)
def _colours() -> Colormap:
    """From what goes against the clean run, over white, to what brings it back; grey where there is nothing."""
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("patching", [*AGAINST, PAPER, *TOWARDS]).with_extremes(bad=BLANK)
