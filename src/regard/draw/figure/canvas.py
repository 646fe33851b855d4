"""The canvas of a figure: colours, a sheet laid out in inches, axes with labels, files."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from regard.draw.figure.fonts import Fonts

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap, Normalize
    from matplotlib.figure import Figure

INK, QUIET, FAINT, BLANK, PAPER = "#1b1f27", "#6a7280", "#c9ced6", "#f1f2f4", "#ffffff"
# From the white of the paper down, in even steps of lightness (CIE L* 100 to 12): printed in grey the order stays.
SHADES = [
    *("#ffffff", "#d5eeff", "#acdbff", "#89c7f9", "#6bb3f0", "#539ee3", "#438ad2"),
    *("#3a75bd", "#3861a4", "#364e89", "#323c6c", "#2b2b4e", "#201c37"),
]
VECTOR_DPI = 300  # of the maps in SVG and PDF: they are images, for many small squares would show seams


@lru_cache(maxsize=1)
def colour_map() -> Colormap:
    """The colour map of weights, from paper to ink."""
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("regard", SHADES)


def colour_scale() -> Normalize:
    """From a weight to a shade, by the square root: most weights are small, and should be visible."""
    from matplotlib.colors import PowerNorm

    return PowerNorm(0.5, 0.0, 1.0, clip=True)


def mixed(color: str, share: float) -> tuple[float, float, float]:
    """A share of a colour, on white."""
    from matplotlib.colors import to_rgb

    red, green, blue = (1 - share * (1 - channel) for channel in to_rgb(color))
    return red, green, blue


def ink_on(color: Any) -> str:
    """The text colour, ink or paper, that can be read on a colour."""
    from matplotlib.colors import to_rgb

    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(color)]
    return INK if 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2] > 0.2 else PAPER


def show_map(ax: Axes, data: Tensor, label: str, **options: Any) -> None:
    """Draw weights as an image: the first query on top, no colours mixed between cells."""
    colours = {"cmap": colour_map(), "norm": colour_scale()}
    how = {"aspect": "auto", "interpolation": "antialiased", "interpolation_stage": "data", "origin": "upper"}
    ax.imshow(data.numpy(), label=label, resample=True, **colours, **how, **options)


class Sheet:
    """A figure in inches from its top left corner. Most is drawn on one large axes, `paper`: matplotlib takes seconds
    for hundreds of axes, one for each map."""

    def __init__(self, fonts: Fonts, wide: float, high: float, dpi: float) -> None:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        self.fonts, self.wide, self.high = fonts, wide, high
        nothing: Any = "none"  # (else rcParams may choose a layout engine)
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
        show_map(self.paper, data, label, extent=(x, x + wide, y + high, y), clip_on=False)
        edge = line / 72 / 2  # a line lies half on either side; the frame hides nothing of the map
        self.box(x - edge, y - edge, wide + 2 * edge, high + 2 * edge, "none", frame, line)

    def box(self, x: float, y: float, wide: float, high: float, fill: Any, edge: str = "none", line: float = 0) -> None:
        from matplotlib.patches import Rectangle

        look = {"facecolor": fill, "edgecolor": edge, "linewidth": line, "linestyle": "-", "joinstyle": "miter"}
        self.paper.add_artist(Rectangle((x, y), wide, high, clip_on=False, **look))

    def badge(self, x: float, y: float, side: float, sign: str, size: float, color: str) -> None:
        """A coloured box with a sign in it."""
        self.box(x, y, side, side, color)
        self.text(x + side / 2, y + side * 0.54, sign, size, ink_on(color))

    def text(
        self,
        x: float,
        y: float,
        text: str,
        size: float,
        color: str = INK,
        align: str = "center center",
        *,
        bold: bool = False,
        rotation: float = 0,
    ) -> None:
        """A line of text. `align`: which point of it stands at (x, y), horizontally and vertically."""
        ha, va = align.split()
        look: dict[str, Any] = {"color": color, "ha": ha, "va": va, "rotation": rotation, "rotation_mode": "anchor"}
        self.paper.text(x, y, self.fonts.clean(text, bold), **look, **self.fonts.style(size, bold))

    def colour_bar(self, x: float, y: float, wide: float, high: float, marks: Sequence[float], size: float) -> None:
        """The colours of weights from 0 to 1, with some values marked: below it, or to its right where it stands."""
        ax = self.axes(x, y, wide, high, "scale")
        shades, lying = torch.linspace(0, 1, 256, device="cpu"), wide > high
        data = shades[None] if lying else shades[:, None]
        how: dict[str, Any] = {"aspect": "auto", "interpolation": "nearest", "origin": "lower", "resample": True}
        ax.imshow(data.numpy(), cmap=colour_map(), vmin=0, vmax=1, extent=(0, 1, 0, 1), **how)
        at = [float(colour_scale()(mark)) for mark in marks]
        side, texts = "bottom" if lying else "right", [f"{mark:g}" for mark in marks]
        tick(ax, self.fonts, side, texts, size, at, length=2, turned=False)


def write(figure: Figure, path: str | io.BytesIO, suffix: str | None, dpi: float) -> None:
    """Write a figure: text stays text in vector formats, and the same figure gives the same bytes."""
    dates: dict[str, dict[str, None]] = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
    vector = suffix in dates
    figure.set_layout_engine("none")  # (after a first `savefig` matplotlib asks rcParams for one)
    with _file_settings() if vector else nullcontext():
        figure.savefig(
            path,
            format=(suffix or ".png")[1:],
            dpi=max(dpi, VECTOR_DPI) if vector else dpi,
            metadata=dates.get(suffix or "", {}),
            bbox_inches=figure.bbox_inches,
            pad_inches=0,
            facecolor=PAPER,
            edgecolor=PAPER,
            transparent=False,
        )


def _png(figure: Figure, dpi: float) -> bytes:
    """What a notebook shows."""
    file = io.BytesIO()
    write(figure, file, ".png", dpi)
    return file.getvalue()


_WRITING = threading.Lock()


@contextmanager
def _file_settings() -> Iterator[None]:
    """Settings of files that matplotlib takes from rcParams alone: set under a lock, and restored."""
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


def tick(
    ax: Axes,
    fonts: Fonts,
    side: str,
    texts: Sequence[str],
    size: float,
    at: Sequence[float],
    *,
    special: Sequence[bool] = (),
    length: float = 0.0,
    turned: bool = True,
) -> None:
    """Labels along one side of axes: left, right, bottom or top. Labels of special tokens are grey."""
    upright = side in ("left", "right")
    axis = ax.yaxis if upright else ax.xaxis
    where = {edge: edge == side for edge in (("left", "right") if upright else ("bottom", "top"))}
    axis.set_visible(True)
    look = {"direction": "out", "length": length, "width": 0.6, "color": QUIET, "pad": 2.5, "labelcolor": INK}
    shown = where | {f"label{edge}": value for edge, value in where.items()}
    axis.set_tick_params(which="both", labelrotation=90 if turned and not upright else 0, **look, **shown)
    axis.set_ticks(list(at), labels=[fonts.clean(text) for text in texts], **fonts.style(size))
    for label, quiet in zip(axis.get_ticklabels(), special, strict=False):
        label.set_color(QUIET if quiet else INK)
