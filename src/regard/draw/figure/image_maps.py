"""Figures of attention over a picture: what one token looks at in an image, and who looks at one patch of it.

Letters: H query heads, N queries, M keys; h, w patches down and across.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from regard.draw.figure import check_numbers, need_matplotlib, suffix_of
from regard.draw.figure.canvas import BLANK, FAINT, INK, QUIET, Sheet, show_map, tick, write
from regard.draw.figure.fonts import Fonts
from regard.draw.figure.legends import PAGE, TALL
from regard.draw.image_grid import ImageGrid, check_fits
from regard.draw.images import pixels_of
from regard.errors import bad_type, bad_value
from regard.heads import LayerRecord, Record
from regard.heads.analysis.labels import Labels
from regard.heads.analysis.roles import tokens_of
from regard.heads.record.signed_weights import refuse_signed

if TYPE_CHECKING:
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure

__all__ = ["image", "image_readers"]

MARK = "#cc3311"  # what the weights are drawn in: the picture itself is grey
MOST_BARS = 12  # tokens beside the picture, those with the largest weights
MOST_READERS = 40


def image(
    seen: Record,
    layer: int | str,
    head: int | None,
    token: int | str,
    image: Any = None,
    grid: ImageGrid | None = None,
    path: str | PathLike[str] | None = None,
    *,
    item: int = 0,
    width: float | None = None,
    dpi: float = 150,
) -> Figure:
    """Draw what one token looks at in a picture: a square for each patch, the more opaque the larger its weight (by the
    square root, up to the largest weight in the figure). All other weights, on class and register tokens and on text,
    stand beside it.

    Args:
        seen: a record with q and k: of `look(model, processor, image=...)`, or of `watch(model, keep="qk")`.
        layer, head: which; `head=None` draws all heads of the layer, on one scale.
        token: the query: its position, or its label, such as "[CLS]" or "r3c5" (the first of that name).
        image: the picture, as for `look`; of a record of `look` it is known. It is stretched over the grid: give the
            picture as the model got it, after cropping.
        grid: where the patches are (`patch_grid`); of a record of `look` it is known.
        path: a file that ends in .png, .svg or .pdf.
        item: which item of the batch.
        width: in inches. dpi: dots per inch.

    Returns a `matplotlib.figure.Figure`. The weights (h, w) of head 2 of layer 0 are the image with the label "0.2".

    >>> import regard
    >>> model = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    >>> with regard.watch(model, keep="qk") as seen, torch.no_grad():
    ...     _ = model(*[torch.randn(1, 7, 8)] * 3, need_weights=False)
    >>> grid = regard.draw.ImageGrid(2, 3, first=1, names=("[CLS]",))
    >>> drawn = regard.draw.image(seen, 0, 1, "[CLS]", torch.rand(20, 30, 3), grid)
    >>> [(image.get_label(), image.get_array().shape) for image in drawn.axes[0].images]
    [('picture', (20, 30, 3)), ('0.1', (2, 3))]
    """
    need_matplotlib()
    suffix = None if path is None else suffix_of(path)
    check_numbers(width=width, dpi=dpi)
    view = _view(seen, layer, head, image, grid, item)
    query = view.position(token)
    weights = view.layer.weights(view.heads, slice(query, query + 1), batch=item)[:, 0].float().cpu()  # (heads, M)
    drawn = (_one_head if head is not None else _all_heads)(view, query, weights, width, dpi)
    if path is not None:
        write(drawn, fspath(path), suffix, dpi)
    return drawn


def image_readers(
    seen: Record,
    layer: int | str,
    head: int | None,
    patch: tuple[int, int],
    image: Any = None,
    grid: ImageGrid | None = None,
    path: str | PathLike[str] | None = None,
    *,
    item: int = 0,
    width: float | None = None,
    dpi: float = 150,
) -> Figure:
    """Draw which tokens look at one patch: the picture with the patch marked, and the weight that each token of the
    text (of a vision transformer: each class and register token) gives it; what patches give it is a mean.

    Args:
        patch: its (row, col) in the grid.
        head: which; `head=None` draws all heads of the layer: tokens down, heads across.

    The other arguments are those of `draw.image`.

    Returns a `matplotlib.figure.Figure`. Of all heads, the weights (tokens + 1, heads) are the image with the
    label "readers"; its last row is the mean of the patches.

    >>> import regard
    >>> model = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    >>> with regard.watch(model, keep="qk") as seen, torch.no_grad():
    ...     _ = model(*[torch.randn(1, 9, 8)] * 3, need_weights=False)
    >>> grid = regard.draw.ImageGrid(2, 3, first=1)  # a token of text before the patches, two after them
    >>> drawn = regard.draw.image_readers(seen, 0, None, (1, 2), torch.rand(20, 30, 3), grid)
    >>> [image.get_array().shape for image in drawn.findobj(lambda artist: artist.get_label() == "readers")]
    [(4, 2)]
    """
    need_matplotlib()
    suffix = None if path is None else suffix_of(path)
    check_numbers(width=width, dpi=dpi)
    view = _view(seen, layer, head, image, grid, item)
    if not (isinstance(patch, (tuple, list)) and len(patch) == 2):
        raise bad_type("patch", expected="a (row, col)", received=f"{patch!r:.40}")
    key = view.grid.position(*patch)
    weights = view.layer.weights(view.heads, None, slice(key, key + 1), batch=item)[..., 0].float().cpu()  # (heads, N)
    drawn = _draw_readers(view, (patch[0], patch[1]), weights, width, dpi)
    if path is not None:
        write(drawn, fspath(path), suffix, dpi)
    return drawn


@dataclass
class _View:
    """One layer of a record, its picture and the labels of its tokens."""

    number: int
    layer: LayerRecord
    heads: list[int]
    pixels: Tensor  # (H, W, 3) in 0 to 255
    grid: ImageGrid
    labels: list[str]  # as they were given
    shown: list[str]  # without the marks of tokenizers
    fonts: Fonts

    @property
    def shape(self) -> float:
        """The picture's height for a width of 1."""
        return self.pixels.shape[0] / self.pixels.shape[1]

    def position(self, token: int | str) -> int:
        """The position of a token by number or label."""
        count = len(self.labels)
        if isinstance(token, str):
            for labels in (self.labels, self.shown):
                if token in labels:
                    return labels.index(token)
            expected = f"one of {', '.join(self.labels[:3])} ... {self.labels[-1]}"
            raise bad_value("token", expected=expected, received=repr(token))
        if isinstance(token, bool) or not isinstance(token, int) or not -count <= token < count:
            raise bad_value("token", expected=f"a label, or a position below {count}", received=f"{token!r:.40}")
        return token % count

    def asked(self, query: int) -> str:
        """What is drawn of a query, in words."""
        return f"what \u201c{self.fonts.short(self.shown[query], 18)}\u201d (token {query}) looks at"

    def on_patches(self, weights: Tensor) -> Tensor:
        """Weights (..., M) on the patches, (..., h, w)."""
        return weights[..., self.grid.positions()]

    def others(self) -> list[int]:
        """The positions that are no patches."""
        return [i for i in range(len(self.labels)) if i not in self.grid.span]


def _view(seen: Any, layer: int | str, head: int | None, image: Any, grid: Any, item: int) -> _View:
    """Check what was given, and take what was not from the record."""
    if not isinstance(seen, Record):
        raise bad_type("seen", expected="what `regard.watch` or `look` gives", received=type(seen).__name__)
    record = seen[layer]
    refuse_signed("a picture", record.name, record.signed)
    if record.kind != "self":
        raise bad_value("layer", expected="self attention over a sequence with patches", received=repr(record))
    if head is not None and (isinstance(head, bool) or not isinstance(head, int) or not 0 <= head < record.heads):
        raise bad_value("head", expected=f"from 0 to {record.heads - 1}, or None for all", received=repr(head))
    if isinstance(item, bool) or not isinstance(item, int) or not 0 <= item < record.batch_size:
        raise bad_value("item", expected=f"from 0 to {record.batch_size - 1}", received=repr(item))
    known = seen.image
    grid = known.grids.get(record.name) if grid is None and known is not None else grid
    if not isinstance(grid, ImageGrid):
        raise bad_type(
            "grid",
            expected=f"an ImageGrid, which says where the patches of {record.name} are",
            received="None" if grid is None else type(grid).__name__,
            remedy="patch_grid(model, inputs), or look(model, processor, image=image)",
        )
    check_fits(grid, record.num_keys, f"tokens of {record.name}")
    if image is not None:
        pixels = pixels_of(image)
    elif known is not None:
        pixels = known.pixels
    else:
        raise bad_type("image", expected="the picture", received="None", remedy="draw.image(..., image=image)")
    rows = tokens_of(seen, seen.tokens)[record.name]
    words = None if rows is None else rows[item]
    if words is None or len(words) != record.num_keys:
        words = grid.labels([str(i) for i in range(record.num_keys)])
    shown = [text if grid.place(i) is None else words[i] for i, text in enumerate(Labels.of(words).text)]
    heads = list(range(record.heads)) if head is None else [head]
    return _View(seen.layers.index(record.name), record, heads, pixels, grid, words, shown, Fonts())


# One head, all heads


def _one_head(view: _View, query: int, weights: Tensor, width: float | None, dpi: float) -> Figure:
    """The picture, and beside it what is not on the picture."""
    patches = view.on_patches(weights[0])
    rows = _shares(view, weights[0], patches)
    names = [view.fonts.short(name, 18) for name, _ in rows]
    beside = 0.3 + view.fonts.widest(names, 7) + 1.35
    wide = width or PAGE * 0.8
    side = min(wide - beside - 0.32, TALL / view.shape)
    if side < 0.8:
        raise bad_value("width", expected=f"at least {beside + 1.12:.1f} inches", received=f"{wide:g}")
    high = side * view.shape
    top = 0.66
    sheet = Sheet(view.fonts, wide, top + max(high, 0.2 * len(rows)) + 0.5, dpi)
    title = f"{view.fonts.short(view.layer.name, 48)} · head {view.heads[0]}"
    size = 10 * min(1.0, (wide - 0.32) / view.fonts.width(title, 10, bold=True))
    sheet.text(0.16, 0.28, title, size, align="left baseline", bold=True)
    words = view.asked(query)
    sheet.text(0.16, 0.48, words, 7.5, QUIET, "left baseline")
    most = _draw_over(sheet, view, 0.16, top, side, patches, f"{view.number}.{view.heads[0]}", query)
    _scale(sheet, 0.16, top + high + 0.1, min(1.5, side), most)
    _bars(sheet, 0.16 + side + 0.2, top, wide - 0.16, names, [share for _, share in rows])
    return sheet.figure


def _all_heads(view: _View, query: int, weights: Tensor, width: float | None, dpi: float) -> Figure:
    """A small picture for each head, on one scale; above each how much of its attention is on the patches."""
    count, wide, gap, line, top = len(view.heads), width or PAGE, 0.1, 0.2, 0.6
    across = min(count, 4 if count <= 12 else 6)
    side = min((wide - 0.32 + gap) / across - gap, math.inf if width else 2.2, TALL / view.shape)
    if side < 0.5:
        raise bad_value("width", expected=f"at least {across * 0.6 + 0.32:.1f} inches", received=f"{wide:g}")
    wide = width or max(0.32 + across * (side + gap) - gap, 3.2)
    down, high = math.ceil(count / across), side * view.shape
    sheet = Sheet(view.fonts, wide, top + down * (high + line + gap) + 0.45, dpi)
    sheet.text(0.16, 0.26, view.fonts.short(view.layer.name, 48), 9, align="left baseline", bold=True)
    words = view.asked(query)
    sheet.text(0.16, 0.44, words, 7.5, QUIET, "left baseline")
    patches = view.on_patches(weights)  # (H, h, w)
    most = float(patches.max())
    for i, head in enumerate(view.heads):
        x, y = 0.16 + (i % across) * (side + gap), top + (i // across) * (high + line + gap) + line
        _draw_over(sheet, view, x, y, side, patches[i], f"{view.number}.{head}", query, most)
        sheet.text(x, y - 0.05, f"head {head}", 6.5, align="left baseline")
        if side >= 1.0:
            sheet.text(x + side, y - 0.05, f"image {float(patches[i].sum()):.2f}", 6, QUIET, "right baseline")
    _scale(sheet, 0.16, sheet.high - 0.38, 1.5, most)
    return sheet.figure


def _shares(view: _View, weights: Tensor, patches: Tensor) -> list[tuple[str, float]]:
    """Where a query's weights are: on the patches, and on the other tokens, those with the largest weights by name."""
    others = view.others()
    named = sorted(sorted(others, key=lambda i: -float(weights[i]))[:MOST_BARS])
    rest = [i for i in others if i not in set(named)]
    rows = [("image", float(patches.sum()))] + [(view.shown[i], float(weights[i])) for i in named]
    return rows + ([(f"{len(rest)} others", float(weights[rest].sum()))] if rest else [])


# Who looks at a patch


def _draw_readers(view: _View, patch: tuple[int, int], weights: Tensor, width: float | None, dpi: float) -> Figure:
    """The picture with the patch, and the tokens that look at it."""
    others = view.others()
    named = sorted(sorted(others, key=lambda i: -float(weights[:, i].max()))[:MOST_READERS])
    names = [view.fonts.short(view.shown[i], 18) for i in named]
    left_out = len(others) - len(named)
    of_patches = weights[:, list(view.grid.span)].mean(1)  # (heads,)
    one, wide = len(view.heads) == 1, width or PAGE
    label = view.fonts.widest([*names, "mean of patches"], 7) + 0.2
    need = label + (1.3 if one else max(0.12 * len(view.heads), 0.6) + 0.1)
    side = min(wide * 0.45, wide - need - 0.5, TALL / view.shape)
    if side < 0.6:
        raise bad_value("width", expected=f"at least {need + 1.1:.1f} inches", received=f"{wide:g}")
    top, step = 0.66, 0.18
    sheet = Sheet(view.fonts, wide, top + max(side * view.shape, step * (len(named) + 2) + 0.3) + 0.45, dpi)
    title = view.fonts.short(view.layer.name, 48) + (f" · head {view.heads[0]}" if one else "")
    sheet.text(0.16, 0.28, title, 9, align="left baseline", bold=True)
    words = f"who looks at the patch r{patch[0]}c{patch[1]}" + ("" if one else "; heads across")
    words += f"; {left_out} tokens are left out" if left_out else ""
    sheet.text(0.16, 0.48, words, 7.5, QUIET, "left baseline")
    _picture(sheet, view, 0.16, top, side)
    _frame(sheet, view, 0.16, top, side, patch)
    x = 0.16 + side + 0.2
    if one:
        shares = [*weights[0, named].tolist(), float(of_patches[0])]
        _bars(sheet, x, top, wide - 0.16, [*names, "mean of patches"], shares, step)
        return sheet.figure
    data = torch.cat([weights[:, named].T, of_patches[None]])  # (tokens + 1, heads)
    high = step * len(data)
    ax = sheet.axes(x + label, top + 0.12, wide - 0.16 - x - label, high, "readers of the patch")
    show_map(ax, data, "readers")
    tick(ax, view.fonts, "left", [*names, "mean of patches"], 7, range(len(data)))
    heads = list(range(0, len(view.heads), 1 if len(view.heads) <= 16 else 4))
    tick(ax, view.fonts, "top", [str(i) for i in heads], 6.5, heads, turned=False)
    sheet.colour_bar(x + label, top + 0.12 + high + 0.12, min(1.5, wide - 0.16 - x - label), 0.08, (0.0, 0.25, 1.0), 6)
    return sheet.figure


# Parts


@lru_cache(maxsize=1)
def _over() -> Colormap:
    """From nothing to a colour that hides the picture."""
    from matplotlib.colors import LinearSegmentedColormap, to_rgb

    return LinearSegmentedColormap.from_list("over", [(*to_rgb(MARK), 0.0), (*to_rgb(MARK), 0.92)])


def _picture(sheet: Sheet, view: _View, x: float, y: float, side: float) -> None:
    """The picture in light grey: colour is for weights."""
    grey = (view.pixels.float() @ torch.tensor([0.299, 0.587, 0.114], device="cpu")).round()
    grey = (255 - (255 - grey) * 0.5).to(torch.uint8)[..., None].expand(-1, -1, 3)
    extent = (x, x + side, y + side * view.shape, y)
    how: dict[str, Any] = {"aspect": "auto", "interpolation": "antialiased", "origin": "upper", "clip_on": False}
    sheet.paper.imshow(grey.numpy(), label="picture", extent=extent, **how)
    sheet.box(x, y, side, side * view.shape, "none", FAINT, 0.5)


def _draw_over(
    sheet: Sheet,
    view: _View,
    x: float,
    y: float,
    side: float,
    patches: Tensor,
    label: str,
    query: int,
    most: float | None = None,
) -> float:
    """The picture and weights (h, w) over it. Returns the weight that has the full colour."""
    from matplotlib.colors import PowerNorm

    most = max(float(patches.max()) if most is None else most, 1e-12)
    _picture(sheet, view, x, y, side)
    extent = (x, x + side, y + side * view.shape, y)
    how: dict[str, Any] = {"aspect": "auto", "interpolation": "nearest", "origin": "upper", "clip_on": False}
    norm = PowerNorm(0.5, 0.0, most, clip=True)
    sheet.paper.imshow(patches.numpy(), label=label, extent=extent, cmap=_over(), norm=norm, **how)
    place = view.grid.place(query)
    if place is not None:
        _frame(sheet, view, x, y, side, place)
    return most


def _frame(sheet: Sheet, view: _View, x: float, y: float, side: float, place: tuple[int, int]) -> None:
    """A line around one patch."""
    wide, high = side / view.grid.cols, side * view.shape / view.grid.rows
    sheet.box(x + place[1] * wide, y + place[0] * high, wide, high, "none", INK, 1.2)


def _scale(sheet: Sheet, x: float, y: float, wide: float, most: float) -> None:
    """The colours of weights from 0 to the largest."""
    ax = sheet.axes(x, y, wide, 0.08, "scale")
    how: dict[str, Any] = {"aspect": "auto", "interpolation": "nearest", "origin": "lower", "cmap": _over()}
    ax.imshow(torch.linspace(0, 1, 256, device="cpu")[None].numpy(), vmin=0, vmax=1, extent=(0, 1, 0, 1), **how)
    texts = ["0", f"{most / 4:.2g}", f"{most:.2g}"]
    tick(ax, sheet.fonts, "bottom", texts, 6, [0.0, 0.5, 1.0], length=2, turned=False)
    sheet.text(x + wide + 0.14, y + 0.04, "weight of a patch", 6, QUIET, "left center")


def _bars(
    sheet: Sheet, x: float, y: float, right: float, names: Sequence[str], shares: Sequence[float], step: float = 0.2
) -> None:
    """Shares as bars, each with its name and number; a full bar is 1."""
    left = x + 0.1 + sheet.fonts.widest(names, 7)
    room = right - left - 0.36
    for i, (name, share) in enumerate(zip(names, shares, strict=True)):
        middle = y + (i + 0.5) * step
        sheet.text(left - 0.06, middle, name, 7, align="right center")
        sheet.box(left, middle - 0.045, room, 0.09, BLANK)
        sheet.box(left, middle - 0.045, room * min(max(share, 0.0), 1.0), 0.09, MARK)
        sheet.text(right, middle, f"{share:.3f}", 6.5, QUIET, "right center")
