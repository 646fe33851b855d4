"""Paper, ink and letters: colours, a sheet laid out in inches, fonts that know a text's characters, files."""

from __future__ import annotations

import io
import threading
import unicodedata
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap, Normalize
    from matplotlib.figure import Figure
    from matplotlib.font_manager import FontProperties

__all__ = [
    "BLANK",
    "FAINT",
    "INK",
    "PAPER",
    "QUIET",
    "SHADES",
    "Letters",
    "Sheet",
    "colour_map",
    "colour_scale",
    "ink_on",
    "map_look",
    "mixed",
    "scale_lying",
    "scale_standing",
    "tick",
    "write",
]

INK, QUIET, FAINT, BLANK, PAPER = "#1b1f27", "#6a7280", "#c9ced6", "#f1f2f4", "#ffffff"
# From the white of the paper down, in even steps of lightness (CIE L* 100 to 12): printed in grey the order stays.
SHADES = (
    "#ffffff",
    "#d5eeff",
    "#acdbff",
    "#89c7f9",
    "#6bb3f0",
    "#539ee3",
    "#438ad2",
    "#3a75bd",
    "#3861a4",
    "#364e89",
    "#323c6c",
    "#2b2b4e",
    "#201c37",
)
VECTOR_DPI = 300  # of the maps in SVG and PDF: their cells are images, for seams show between many small squares
# Fonts that know other scripts, asked in this order where the user's font does not know a character.
FONTS = (
    "Noto Sans CJK SC",
    "Noto Sans CJK JP",
    "Noto Sans SC",
    "Noto Sans JP",
    "Noto Sans KR",
    "Source Han Sans SC",
    "WenQuanYi Micro Hei",
    "WenQuanYi Zen Hei",
    "PingFang SC",
    "Hiragino Sans GB",
    "Apple SD Gothic Neo",
    "Microsoft YaHei",
    "Yu Gothic",
    "Malgun Gothic",
    "Arial Unicode MS",
    "Noto Sans Arabic",
    "Noto Sans Hebrew",
    "Noto Sans Devanagari",
    "Noto Sans Thai",
    "Noto Sans Symbols2",
    "Noto Sans Math",
    "Noto Emoji",
    "Segoe UI Symbol",
    "Segoe UI Emoji",
    "Symbola",
    "Unifont",
    "STIXGeneral",
)
JOINERS = "\u200c\u200d"  # without a shape of their own, between letters and in emoji


@lru_cache(maxsize=1)
def colour_map() -> Colormap:
    """The colour map of weights, from paper to ink."""
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("regard", list(SHADES))


def colour_scale() -> Normalize:
    """From a weight to a shade: the square root, for most weights are small, and still are to be seen."""
    from matplotlib.colors import PowerNorm

    return PowerNorm(0.5, 0.0, 1.0, clip=True)


def mixed(color: str, share: float) -> tuple[float, float, float]:
    """So much of a colour, on paper."""
    from matplotlib.colors import to_rgb

    red, green, blue = (1 - share * (1 - part) for part in to_rgb(color))
    return red, green, blue


def ink_on(color: Any) -> str:
    """Ink or paper, which can be read on a colour."""
    from matplotlib.colors import to_rgb

    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in to_rgb(color))
    return INK if 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.2 else PAPER


def map_look() -> dict[str, Any]:
    """How maps are drawn: the first query on top, no colours mixed between cells."""
    return {
        "cmap": colour_map(),
        "norm": colour_scale(),
        "aspect": "auto",
        "interpolation": "antialiased",
        "interpolation_stage": "data",
        "origin": "upper",
        "resample": True,
    }


def scale_lying(sheet: Sheet, right: float, y: float, words: str) -> None:
    """The scale, with what it means below."""
    marks = (0.0, 0.05, 0.25, 0.5, 1.0)
    ax = sheet.axes(right - 1.5, y, 1.5, 0.08, "scale")
    _gradient(ax, across=True)
    tick(ax, sheet.letters, "bottom", [f"{mark:g}" for mark in marks], 6, _shares(marks), length=2, turned=False)
    sheet.text(right, y + 0.29, words, 6, QUIET, ha="right", va="center")


def scale_standing(sheet: Sheet, x: float, y: float, high: float) -> None:
    """The scale, from below to above."""
    marks = (0.0, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0) if high > 1.2 else (0.0, 0.1, 0.5, 1.0)
    ax = sheet.axes(x, y, 0.1, high, "scale")
    _gradient(ax, across=False)
    tick(ax, sheet.letters, "right", [f"{mark:g}" for mark in marks], 6.5, _shares(marks), length=2)


def _shares(marks: Sequence[float]) -> list[float]:
    """Where weights stand on the scale."""
    return [float(colour_scale()(mark)) for mark in marks]


def _gradient(ax: Axes, across: bool) -> None:
    """All shades, from the first to the last."""
    shades = torch.linspace(0, 1, 256)
    data = shades[None] if across else shades[:, None]
    ax.imshow(
        data.numpy(),
        cmap=colour_map(),
        vmin=0,
        vmax=1,
        aspect="auto",
        interpolation="nearest",
        origin="lower",
        extent=(0, 1, 0, 1),
        resample=True,
    )


class Sheet:
    """A figure in inches from its top left corner. Most is drawn on one large `paper`: axes of its own for each of
    hundreds of maps would take matplotlib seconds."""

    def __init__(self, letters: Letters, wide: float, high: float, dpi: float) -> None:
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
        self.paper.imshow(data.numpy(), extent=(x, x + wide, y + high, y), label=label, clip_on=False, **map_look())
        edge = line / 72 / 2  # a line lies half on either side, and shall hide nothing of the map
        self.box(x - edge, y - edge, wide + 2 * edge, high + 2 * edge, "none", frame, line)

    def box(
        self, x: float, y: float, wide: float, high: float, color: Any, frame: str = "none", line: float = 0
    ) -> None:
        from matplotlib.patches import Rectangle

        self.paper.add_artist(
            Rectangle(
                (x, y),
                wide,
                high,
                facecolor=color,
                edgecolor=frame,
                linewidth=line,
                linestyle="-",
                joinstyle="miter",
                clip_on=False,
            )
        )

    def badge(self, x: float, y: float, side: float, sign: str, size: float, color: str) -> None:
        """A coloured box with a sign in it."""
        self.box(x, y, side, side, color)
        self.text(x + side / 2, y + side * 0.54, sign, size, ink_on(color), ha="center", va="center")

    def text(
        self, x: float, y: float, text: str, size: float, color: str = INK, *, bold: bool = False, **where: Any
    ) -> None:
        text = self.letters.clean(text, bold)
        self.paper.text(x, y, text, color=color, rotation_mode="anchor", **where, **self.letters.plain(size, bold))


class Letters:
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

        return FontProperties(
            family=self.usual if bold else self.families,
            style="normal",
            variant="normal",
            stretch="normal",
            weight="bold" if bold else "normal",
            size=size,
        )

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


def write(figure: Figure, path: str | io.BytesIO, suffix: str | None, dpi: float) -> None:
    """Write a figure: text as text where the format has it, and nothing of the day or of chance."""
    dates: dict[str, dict[str, None]] = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
    vector = suffix in dates
    figure.set_layout_engine("none")  # (after a first `savefig` matplotlib asks rcParams for one)
    with _file_settings() if vector else nullcontext():
        figure.savefig(
            path,
            format=(suffix or ".png")[1:],
            dpi=max(dpi, VECTOR_DPI) if vector else dpi,
            metadata=dates.get(suffix or "", {}),
            facecolor=PAPER,
            edgecolor=PAPER,
            transparent=False,
            bbox_inches=figure.bbox_inches,
            pad_inches=0,
        )


def _png(figure: Figure, dpi: float) -> bytes:
    """What a notebook shows."""
    file = io.BytesIO()
    write(figure, file, ".png", dpi)
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


def tick(
    ax: Axes,
    letters: Letters,
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
    axis.set_tick_params(
        which="both",
        direction="out",
        length=length,
        width=0.6,
        color=QUIET,
        pad=2.5,
        labelcolor=INK,
        labelrotation=90 if turned and not upright else 0,
        **where,
        **{f"label{edge}": shown for edge, shown in where.items()},
    )
    axis.set_ticks(list(at), labels=[letters.clean(text) for text in texts], **letters.plain(size))
    for label, quiet in zip(axis.get_ticklabels(), special, strict=False):
        label.set_color(QUIET if quiet else INK)
