"""A record as a table: a row for each layer and head, a column for each measure that is one number per head.

`PerHead` is the base class of results with one number per head: importance, attribution.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from torch import Tensor

from regard.errors import missing_extra, printable
from regard.measures import Offsets
from regard.summary import in_columns

if TYPE_CHECKING:
    from regard.heads.record.record import LayerRecord, Record

__all__ = ["PerHead", "Shown", "Table", "table"]

NAMED_OFFSETS = {"previous": -1, "itself": 0, "next": 1}  # columns made of the measure "offsets"
MOST_ROWS = 500  # of a table in a notebook


class Shown:
    """Base class of results that show themselves as a table: in a notebook as HTML, elsewhere as text."""

    def table(self) -> Table:
        """The rows."""
        raise NotImplementedError

    def caption(self) -> str:
        """A line above them."""
        return ""

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        caption = f"<p>{escape(self.caption())}</p>" if self.caption() else ""
        return f'<div style="max-height: 40em; overflow: auto">{caption}{self.table().html()}</div>'


class Table(list[dict[str, Any]], Shown):  # type: ignore[misc]
    """Rows as plain dictionaries; `print` shows them in columns, a notebook as a table. `layers` are the names of all
    layers in call order, if they are known: HTML then has a column with their numbers."""

    __repr__ = Shown.__repr__

    def __init__(self, rows: Iterable[dict[str, Any]] = (), layers: Iterable[str] = ()) -> None:
        super().__init__(rows)
        self.layers = list(layers)

    def table(self) -> Table:
        """Itself."""
        return self

    def html(self) -> str:
        """As an HTML table, everything in it escaped."""
        numbers = {layer: number for number, layer in enumerate(self.layers)}
        names = list(dict.fromkeys(name for row in self for name in row))
        titles = [title for name in names for title in (["number", name] if name == "layer" and numbers else [name])]
        lines = ["".join(f"<th>{escape(str(title))}</th>" for title in titles)]
        for row in self[:MOST_ROWS]:
            cells: list[Any] = []
            for name in names:
                cells += [numbers.get(row.get(name))] if name == "layer" and numbers else []  # type: ignore[arg-type]
                cells.append(row.get(name))
            lines.append("".join(f"<td{_aligned(cell)}>{escape(_shown(cell))}</td>" for cell in cells))
        more = f"<p>and {len(self) - MOST_ROWS} rows more</p>" if len(self) > MOST_ROWS else ""
        if not self:
            return "<p>(no rows)</p>"
        return "<table>" + "".join(f"<tr>{line}</tr>" for line in lines) + f"</table>{more}"

    def to_pandas(self) -> Any:
        """The rows as a `pandas.DataFrame`. Needs pandas."""
        try:
            import pandas  # type: ignore[import-not-found]
        except ImportError:
            raise missing_extra("pandas", "tables") from None
        return pandas.DataFrame(list(self))

    def __str__(self) -> str:
        if not self:
            return "(no rows)"
        names = list(dict.fromkeys(name for row in self for name in row))
        left = [i for i, name in enumerate(names) if any(isinstance(row.get(name), str) for row in self)]
        cells = [list(map(printable, names)), *([_shown(row.get(name)) for name in names] for row in self)]
        return in_columns(cells, left)


@dataclass(repr=False)
class PerHead(Shown):
    """A number for each head: `scores[layer]` is (H,); `result[layer]` the same, by name or by number in call order."""

    scores: dict[str, Tensor]

    def __getitem__(self, layer: str | int) -> Tensor:
        return list(self.scores.values())[layer] if isinstance(layer, int) else self.scores[layer]

    def rows(self) -> list[tuple[str, int, float]]:
        """(layer, head, score) of every head."""
        return [(layer, head, score) for layer, s in self.scores.items() for head, score in enumerate(s.tolist())]


def _aligned(value: Any) -> str:
    return ' style="text-align: left"' if isinstance(value, str) else ' style="text-align: right"'


def _shown(value: Any) -> str:
    return "" if value is None else f"{value:.3f}" if isinstance(value, float) else printable(value)


def table(record: Record) -> Table:
    """A row for each layer and head, with every measure that is one number per head: means over queries."""
    rows = Table(layers=record.layers)
    for layer in record:
        columns = scalars(layer)
        for head in range(layer.heads):
            row: dict[str, Any] = {"layer": layer.name, "head": head}
            if layer.kind == "cross":
                row["kind"] = "cross"
            rows.append(row | {name: value[head].item() for name, value in columns.items()})
    return rows


def scalars(layer: LayerRecord) -> dict[str, Tensor]:
    """The measures of a layer that are one number per head: (H,) each."""
    values: dict[str, Tensor] = {}
    for measure in layer.measures:
        names = getattr(measure, "names", None)  # of `Tokens`: a column for each class of tokens
        for name, axis in measure.gives.items():
            if axis == "query" and not names and name not in measure.untabled and layer.has(name):
                values[name] = layer.per_head(name)
        if isinstance(measure, Offsets) and layer.has("offsets"):
            profile = layer.per_head("offsets")
            for name, offset in NAMED_OFFSETS.items():
                if name not in values and -measure.before <= offset <= measure.after:
                    values[name] = profile[:, measure.before + offset]
        if names and layer.has("tokens"):
            values |= dict(zip(names, layer.per_head("tokens").unbind(1), strict=True))
    return values
