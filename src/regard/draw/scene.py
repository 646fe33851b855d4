"""A record and its tokens, ready to be drawn: what terminal, figure and page have in common.

Letters: B batch, H query heads, N queries, M keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from regard.draw.labels import Labels
from regard.errors import bad_type, bad_value
from regard.heads import ROLES, LayerRecord, Record, Role
from regard.heads.analysis.roles import first_of_target, roles, tokens_of
from regard.heads.record.sequences import remeasured
from regard.heads.record.table import scalars
from regard.measures import Heatmap, Links

__all__ = ["Panel", "Scene", "sizes"]

STRIP = 256  # queries whose weights are pooled at once
TELLING = {rule.name for rule in ROLES} | {
    "on_first",
    "distance",
    "entropy",
}  # what tells of roles, by its name in a table


@dataclass
class Panel:
    """One layer of a scene, of one text: its map's labels, and what is known of each of its heads. Padding is not part
    of the text: `rows` and `cols` are the layer's queries and keys that are."""

    number: int
    layer: LayerRecord
    item: int  # of the batch
    rows: range
    cols: range
    queries: Labels
    keys: Labels
    measures: dict[str, Tensor] = field(default_factory=dict)  # one number for each head: (H,)
    roles: list[Role] = field(default_factory=list)  # one for each head; none for cross attention

    @property
    def name(self) -> str:
        return self.layer.name

    @property
    def heads(self) -> int:
        return self.layer.heads

    @property
    def shape(self) -> tuple[int, int]:
        """(N, M)"""
        return len(self.queries), len(self.keys)

    @property
    def whole(self) -> bool:
        """Whether the text fills the layer's map, without padding."""
        text = self.layer.text
        assert text is not None
        return (len(self.rows), len(self.cols)) == (text.queries, text.total)

    @property
    def drawable(self) -> bool:
        """Whether there are maps: q and k were kept, or heatmaps measured."""
        return self.layer.exact or self.layer.has("heatmap")

    def role(self, head: int) -> str | None:
        """The name of a head's role, if it has one."""
        return self.roles[head].role if self.roles else None

    def weights(self, head: int, rows: slice | None = None, cols: slice | None = None) -> Tensor:
        """Exact weights of one head, (N, M) or a part."""
        return self._weights(head, rows, cols).float().cpu()

    def _weights(self, head: int | None, rows: slice | None = None, cols: slice | None = None) -> Tensor:
        return self.layer.weights(head, _of(self.rows, rows), _of(self.cols, cols), batch=self.item)

    def links(self, count: int) -> tuple[Tensor, Tensor]:
        """Of each query the keys (H, N, count) with the largest weights, and those weights; 0 where there are fewer."""
        if self.whole:
            found = self.layer.measure(Links(count))["links"]
            return found.keys[self.item].clamp(min=0), found.weights[self.item]
        strips = [slice(first, first + STRIP) for first in range(0, len(self.rows), STRIP)]
        largest = [self._weights(None, rows).topk(min(count, len(self.cols)), dim=2) for rows in strips]
        keys, weights = (torch.cat([top[i] for top in largest], 1) for i in (1, 0))
        return keys.where(weights > 0, 0), weights

    def pooled(self, rows: int, cols: int) -> Tensor:
        """The maps of all heads at a size of at most (rows, cols): (H, rows, cols). A cell is the attention that a
        query of its rows gives to all keys of its columns, on average: where each token has a cell, the weights."""
        n, m = self.shape
        if self.layer.exact and self.whole:
            assert self.layer.text is not None
            heat = remeasured(self.layer.text, [Heatmap(rows, cols)], slots=True)["heatmap"][self.item]
            counts = sizes(n, heat.shape[1])
        elif self.layer.exact:
            rows, cols = min(rows, n), min(cols, m)
            down, across = torch.arange(n) * rows // max(n, 1), torch.arange(m) * cols // max(m, 1)
            heat = torch.zeros(self.heads, rows, cols)
            for first in range(0, n, STRIP):
                part = self._weights(None, slice(first, first + STRIP)).float().cpu()  # (H, strip, M)
                strip = part.new_zeros(*part.shape[:2], cols).index_add_(2, across, part)
                heat.index_add_(1, down[first : first + STRIP], strip)
            counts = sizes(n, rows)
        elif self.layer.has("heatmap"):
            heat = self.layer.last()["heatmap"][self.item, :, :n, : len(self.keys)]
            counts = _fewer(sizes(n, heat.shape[1]), rows, 0)
            heat = _fewer(_fewer(heat, rows, 1), cols, 2)
        else:
            raise bad_value(
                "record",
                expected="one that kept q and k, or measured heatmaps",
                received=repr(self.layer),
                remedy='watch(model, keep="qk")',
            )
        return (heat / counts.to(heat)[:, None]).float().cpu()


def _of(whole: range, part: slice | None = None) -> slice:
    """A part of a range, as a slice of what the range is of."""
    inside = whole if part is None else whole[part]
    return slice(inside.start, max(inside.stop, inside.start))


def sizes(tokens: int, cells: int) -> Tensor:
    """How many of `tokens` fall into each of `cells`, as `measures.Heatmap` shares them out: token i into cell
    i * cells // tokens."""
    return torch.bincount(torch.arange(tokens) * cells // max(tokens, 1), minlength=cells)


def _fewer(heat: Tensor, cells: int, dim: int) -> Tensor:
    """Sums of a map over fewer cells along an axis."""
    size = heat.shape[dim]
    if size <= cells:
        return heat
    to = torch.arange(size, device=heat.device) * cells // size
    shape = [*heat.shape]
    shape[dim] = cells
    return heat.new_zeros(shape).index_add_(dim, to, heat)


class Scene:
    """A record with its tokens.

    Args:
        record: what `watch` saw, best with keep="qk"; of several texts in a row the last is drawn.
        tokens: the text's tokens; a list of them for each item of the batch, with padding (anything that stands for
            it) or without; or, for an encoder and a decoder, a pair `(source, target)` of such lists. By default
            `record.tokens`; without any, tokens are numbered.
        item: which text of the batch. What the record knows to be its padding, before it or after it, is not drawn.
        special: tokens that are special, where their looks do not tell.
    """

    def __init__(self, record: Record, tokens: Any = None, *, item: int = 0, special: Sequence[str] = ()) -> None:
        if not isinstance(record, Record):
            raise bad_type("record", expected="what `regard.watch` gives", received=type(record).__name__)
        if not len(record):
            raise bad_value(
                "record",
                expected="at least one layer",
                received="an empty one",
                remedy="run the model inside the watch",
            )
        self.record = record
        given = record.tokens if tokens is None else tokens
        self.panels: list[Panel] = []
        texts = _texts(given, item)
        target = first_of_target(record)
        words = tokens_of(record, given)
        labels: dict[Any, Labels] = {}  # those that were made: layers of one text share them
        inside = _without_padding(record, item, target)
        for number, layer in enumerate(record):
            assert layer.text is not None
            batch = layer.text.shape[0]
            if not 0 <= item < batch:
                raise bad_value("item", expected=f"a text from 0 to {batch - 1}", received=str(item))
            source, own = (texts[0], texts[-1]) if number >= target else (texts[0], texts[0])
            ours = own if layer.kind == "self" else source
            rows, cols = inside[number]
            panel = Panel(number, layer, item, rows, cols, *_named(layer, own, ours, rows, cols, special, labels))
            panel.measures = {name: value.float().cpu() for name, value in scalars(layer).items()}
            panel.roles = _roles(layer, words[layer.name])
            self.panels.append(panel)

    def __len__(self) -> int:
        return len(self.panels)

    def __iter__(self) -> Any:
        return iter(self.panels)

    def __getitem__(self, number: int) -> Panel:
        return self.panels[number]

    def panel(self, layer: int | str) -> Panel:
        """The panel of a layer, by number or by name."""
        wanted = self.record[layer]
        return next(panel for panel in self.panels if panel.layer is wanted)


def _texts(tokens: Any, item: int) -> list[list[Any] | None]:
    """One list of tokens, or two, of source and target."""
    if tokens is None:
        return [None]
    if isinstance(tokens, (str, bytes)):
        raise bad_type("tokens", expected="a list of tokens", received="one string", remedy="tokenizer.tokenize(text)")
    if isinstance(tokens, tuple) and len(tokens) == 2 and not any(isinstance(part, str) for part in tokens):
        return [None if part is None else _texts(list(part), item)[0] for part in tokens]
    rows = list(tokens)
    if rows and isinstance(rows[0], (list, tuple)):
        if not 0 <= item < len(rows):
            raise bad_value("item", expected=f"one of {len(rows)} texts", received=str(item))
        return [list(rows[item])]
    return [rows]


def _without_padding(record: Record, item: int, target: int) -> list[tuple[range, range]]:
    """Of each layer, the queries and the keys of one text that are no padding, before it or after it."""
    own: dict[tuple[bool, int], range] = {}  # the queries of self attention, which cross attention has too
    found = []
    for number, layer in enumerate(record):
        text = layer.text
        assert text is not None
        rows, cols = _tokens(text.padding, item, text.queries), _tokens(text.key_padding, item, text.total)
        side = number >= target, text.queries
        if layer.kind == "self":
            own[side] = rows
        elif text.key_padding is None:  # what cross attention looks at is known by the layers that made it
            cols = own.get((False, text.total), cols)
        found.append((own.get(side, rows), cols))
    return found


def _tokens(padding: Tensor | None, item: int, count: int) -> range:
    """From the first to the last slot of a text that is no padding (B, count)."""
    real = [] if padding is None or item >= len(padding) else (~padding[item]).nonzero().flatten().tolist()
    return range(real[0], real[-1] + 1) if real else range(count)


def _named(
    layer: LayerRecord,
    own: list[Any] | None,
    others: list[Any] | None,
    rows: range,
    cols: range,
    special: Sequence[str],
    known: dict[Any, Labels],
) -> tuple[Labels, Labels]:
    """The labels of a layer's queries and of its keys, from the tokens of each."""
    text = layer.text
    assert text is not None
    n, m, several = text.queries, text.total, text.shape[0] > 1
    if layer.kind == "self" and own is not None:
        if len(text.pieces) > 1 and len(own) == m + 1:
            own = others = own[:-1]  # the last token was written, not read
        if n < m == len(own):  # a watch that began in the middle
            own = own[m - n :]

    def labels(what: str, words: list[Any] | None, count: int, inside: range) -> Labels:
        if words is not None and len(words) == count:
            words = words[_of(inside)]
        key = (len(inside), None if words is None else tuple(map(str, words)))
        if key not in known:
            known[key] = _labels(words, len(inside), special, f"{what} of {layer.name}", several)
        return known[key]

    return labels("queries", own, n, rows), labels("keys", others, m, cols)


def _labels(words: list[Any] | None, count: int, special: Sequence[str], what: str, padded: bool) -> Labels:
    if words is None:
        return Labels.numbers(count)
    labels = Labels.of(words, special)
    if len(labels) == count:
        return labels
    # Padding of shorter texts in a batch; a key or two that nn.MultiheadAttention may add (add_bias_kv, add_zero_attn).
    if len(labels) < count and (padded or (what.startswith("keys") and count - len(labels) <= 2)):
        return labels.padded(count)
    raise bad_value(
        "tokens",
        expected=f"{count}, for the {what}",
        received=f"{len(labels)}",
        remedy="those that the model was given; for an encoder and a decoder a pair (source, target)",
    )


def _roles(layer: LayerRecord, tokens: list[list[str]] | None) -> list[Role]:
    """The roles of one layer's heads, as `record.roles()` has them; none where nothing was measured that tells of
    roles. `tokens`: those of each text of the batch."""
    if (
        layer.kind != "self"
        or layer.uniform is None
        or not TELLING & scalars(layer).keys() & scalars(layer.uniform).keys()
    ):
        return []
    alone = Record()
    alone.by_name[layer.name] = layer
    return list(roles(alone, tokens=tokens))
