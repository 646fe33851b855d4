"""A record as a figure for a paper or a notebook, by matplotlib: readable in colour and printed in grey.

Figures are laid out in inches from the top left corner, with colours and sizes of their own: pyplot is not used, and
the user's rcParams are neither read (except for the font) nor changed. So figures can be drawn without a display and in
threads, and the same record gives the same bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard.draw.figure.canvas import write
from regard.draw.figure.fonts import Fonts
from regard.draw.figure.legends import Request, short_names
from regard.draw.figure.maps import draw_head, draw_heads
from regard.draw.figure.patching import draw_patching
from regard.draw.figure.summaries import draw_entropy, draw_offsets, draw_roles
from regard.draw.scene import Panel, Scene
from regard.errors import bad_type, bad_value, missing_extra
from regard.heads import Patching, Record

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["figure"]

SUFFIXES = (".png", ".svg", ".pdf")
KINDS: dict[str, Callable[[Request], Figure]] = {
    "heads": draw_heads,
    "head": draw_head,
    "roles": draw_roles,
    "offsets": draw_offsets,
    "entropy": draw_entropy,
}


def figure(
    seen: Record | Patching,
    tokens: Any = None,
    path: str | PathLike[str] | None = None,
    *,
    kind: str = "heads",
    layer: int | str | None = None,
    head: int | None = None,
    item: int = 0,
    width: float | None = None,
    dpi: float = 150,
) -> Figure:
    """Draw a record, or what `heads.sweep` gave, and write it to a file if `path` is given.

    | kind        | what it shows                                                         | what it needs             |
    | ----------- | --------------------------------------------------------------------- | ------------------------- |
    | `"heads"`   | the maps of all heads, layers down, heads across, with their roles;   | `keep="qk"` or heatmaps   |
    |             | with `layer` only the heads of that one, larger, with their tokens    |                           |
    | `"head"`    | one head large, tokens on both axes, its role and measures            | the same; layer and head  |
    | `"roles"`   | which head has which role: a sign each, the shade by its score        | q and k (kept by default) |
    | `"offsets"` | where heads look, relative to the query: a row for each head          | offsets (a default)       |
    | `"entropy"` | how widely each head looks, by layer, beside equal weights            | entropy (a default)       |

    Maps show the last text: exact up to 256 tokens, pooled if it is longer (a cell is what a query of its rows gives to
    all keys of its columns, on average). All share one colour scale from 0 to 1, by the square root. Roles, offsets and
    entropy are means over all texts.

    Args:
        seen: the record that `watch` gave; or the result of `heads.sweep` or `heads.attribution_patching`, drawn with
            layers down and heads across, or by token (the heads with the largest scores); of the rest only `tokens`,
            `path`, `width` and `dpi` are for it.
        tokens: as for `Scene`: the text's tokens; a list of them for each text of a batch; a pair (source, target).
        path: a file that ends in .png, .svg or .pdf.
        kind: one of the above. With `layer` and `head`, "heads" is "head".
        layer, head: only this layer, by number or name; only this head of it.
        item: which text of the batch.
        width: in inches; by default what the figure needs, and at most 7 where that is enough.
        dpi: dots per inch, of PNG and notebooks.

    Returns a `matplotlib.figure.Figure`, which shows itself in a notebook. The map of head 2 of layer 0 is the image
    with the label "0.2": `figure.findobj(lambda artist: artist.get_label() == "0.2")`.

    >>> import regard, torch
    >>> model = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    >>> with regard.watch(model, keep="qk") as seen:
    ...     _ = model(*[torch.randn(1, 4, 8)] * 3, need_weights=False)
    >>> drawn = figure(seen, ["a", "cat", "sat", "down"])
    >>> [(image.get_label(), image.get_array().shape) for image in drawn.axes[0].images]
    [('0.0', (4, 4)), ('0.1', (4, 4))]
    """
    need_matplotlib()
    suffix = None if path is None else suffix_of(path)
    check_numbers(width=width, dpi=dpi)
    if isinstance(seen, Patching):
        _check_alone(kind=kind != "heads", layer=layer is not None, head=head is not None, item=item != 0)
        drawn = draw_patching(seen, tokens, width, dpi, Fonts())
    else:
        draw = _drawing(kind, layer, head)
        drawn = draw(_request(Scene(seen, tokens, item=item), layer, head, width, dpi))
    if path is not None:
        write(drawn, fspath(path), suffix, dpi)
    return drawn


def _request(scene: Scene, layer: int | str | None, head: int | None, width: float | None, dpi: float) -> Request:
    panels = scene.panels if layer is None else [scene.panel(layer)]
    if head is not None:
        _check_head(head, panels[0])
    names = short_names([panel.name for panel in scene.panels])
    return Request(panels, layer is not None, head, width, dpi, Fonts(), names)


def _check_alone(**given: bool) -> None:
    """Raise if a choice is made that only records have."""
    for name in (name for name, is_given in given.items() if is_given):
        raise bad_value(name, expected="none, for a result of patching is drawn as a whole", received="one")


def check_numbers(**numbers: float | None) -> None:
    """Raise unless each of them is None or a number above 0."""
    for name, number in numbers.items():
        if number is not None and not (isinstance(number, (int, float)) and 0 < number < math.inf):
            raise bad_value(name, expected="a number above 0", received=repr(number))


def need_matplotlib() -> None:
    """Raise an error that names the extra, if matplotlib is not installed."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise missing_extra("matplotlib", "draw") from None


def suffix_of(path: str | PathLike[str]) -> str:
    """The format of a figure by the end of its path; raises for one that cannot be written."""
    if not isinstance(path, (str, PathLike)):
        raise bad_type("path", expected="the path of a file", received=type(path).__name__)
    suffix = Path(fspath(path)).suffix.lower()
    if suffix not in SUFFIXES:
        raise bad_value("path", expected=f"one that ends in {', '.join(SUFFIXES)}", received=repr(fspath(path)))
    return suffix


def _drawing(kind: str, layer: Any, head: Any) -> Callable[[Request], Figure]:
    """The function that draws a kind; an error if layer and head do not fit it."""
    if kind not in KINDS:
        raise bad_value("kind", expected=f"one of {', '.join(KINDS)}", received=repr(kind))
    if kind == "heads" and head is not None:
        kind = "head"
    if kind == "head" and (layer is None or head is None):
        missing = " and ".join(name for name, given in (("layer", layer), ("head", head)) if given is None)
        raise bad_value(missing, expected='which one, for kind="head"', received="none")
    if kind != "head" and head is not None:
        raise bad_value("head", expected=f"none, for kind={kind!r} draws all heads", received=repr(head))
    return KINDS[kind]


def _check_head(head: object, panel: Panel) -> None:
    if isinstance(head, bool) or not isinstance(head, int) or not 0 <= head < panel.heads:
        raise bad_value("head", expected=f"from 0 to {panel.heads - 1}, in {panel.name}", received=repr(head))
