"""A record and its tokens, ready to be drawn: what terminal, figure and page have in common.

Letters: B batch, H query heads, N queries, M keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from regard.errors import bad_type, bad_value
from regard.heads import LayerRecord, Record, Role
from regard.heads.analysis.labels import Labels
from regard.heads.analysis.roles import Shared, first_of_target, roles, tokens_of
from regard.heads.record.crops import crop
from regard.heads.record.signed_weights import refuse_signed
from regard.heads.record.table import scalars
from regard.measures import Heatmap, Links, TopLinks

__all__ = ["Panel", "Scene", "sizes"]

STRIP = 256  # queries whose weights are pooled at once


@dataclass
class Panel:
    """One layer of a scene, for one text: the labels of its map, and measures and roles of its heads. Padding is left
    out: `rows` and `cols` are the queries and keys of the layer that are tokens."""

    number: int
    layer: LayerRecord
    item: int  # of the batch
    rows: range
    cols: range
    queries: Labels
    keys: Labels
    measures: dict[str, Tensor] = field(default_factory=dict)  # one number for each head: (H,)
    roles: list[Role] = field(default_factory=list)  # one for each head; empty for cross attention
    aside: Tensor | None = None  # (H, M) True for keys of a head's resting place; None if it is not known

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
    def unpadded(self) -> bool:
        """Whether the text has no padding in this layer."""
        return (len(self.rows), len(self.cols)) == self.layer.shape[2:]

    @property
    def drawable(self) -> bool:
        """Whether there are maps: q and k were kept, or heatmaps measured."""
        return self.layer.exact or self.layer.has("heatmap")

    def role(self, head: int) -> str | None:
        """The name of a head's role, or None."""
        return self.roles[head].role if self.roles else None

    def offsets(self) -> tuple[Tensor, int]:
        """The attention by offset from the query, (H, offsets), and how many offsets come before the query."""
        measure: Any = next(measure for measure in self.layer.measures if "offsets" in measure.gives)
        return self.layer.per_head("offsets").float().cpu(), int(getattr(measure, "before", 0))

    def weights(self, head: int, rows: slice | None = None, cols: slice | None = None) -> Tensor:
        """Exact weights of one head, (N, M) or a part."""
        return self._weights(head, rows, cols).float().cpu()

    def _weights(self, head: int | None, rows: slice | None = None, cols: slice | None = None) -> Tensor:
        return self.layer.weights(head, _within(self.rows, rows), _within(self.cols, cols), batch=self.item)

    def weights_of_all(self) -> Tensor:
        """Exact weights of all heads, (H, N, M): for short texts."""
        return self._weights(None).float().cpu()

    def crop(self, head: int, rows: slice, cols: slice) -> Tensor:
        """Exact weights of one head in a small rectangle, (n, m), without the rows that it is cut from."""
        inside = _within(self.rows, rows), _within(self.cols, cols)
        text = self.layer.text
        weights = None if text is None or not self.layer.exact else crop(text, self.item, head, *inside)
        return self.weights(head, rows, cols) if weights is None else weights[0].float().cpu()

    def drawn(self, rows: int, cols: int, links: int) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """What `pooled` and `links` give, from one computation of the weights where that can be."""
        if not (self.layer.exact and self.unpadded):
            return self.pooled(rows, cols), self.links(links)
        found = self.layer.measure([Heatmap(rows, cols), Links(links)], slots=True)
        return self._means(found["heatmap"][self.item]), self._top(found["links"])

    def links(self, count: int) -> tuple[Tensor, Tensor]:
        """The keys (H, N, count) with the largest weights of each query, and those weights; 0 where there are fewer."""
        if self.unpadded:
            return self._top(self.layer.measure(Links(count))["links"])
        strips = [slice(first, first + STRIP) for first in range(0, len(self.rows), STRIP)]
        largest = [self._weights(None, rows).topk(min(count, len(self.cols)), dim=2) for rows in strips]
        keys, weights = (torch.cat([top[i] for top in largest], 1) for i in (1, 0))
        return keys.where(weights > 0, 0), weights

    def _top(self, links: TopLinks) -> tuple[Tensor, Tensor]:
        return links.keys[self.item].clamp(min=0), links.weights[self.item]

    def _means(self, sums: Tensor) -> Tensor:
        """Cells (H, rows, cols) as means over the queries of their rows."""
        return (sums / sizes(self.shape[0], sums.shape[1]).to(sums)[:, None]).float().cpu()

    def pooled(self, rows: int, cols: int) -> Tensor:
        """The maps of all heads at a size of at most (rows, cols): (H, rows, cols). A cell is the attention that a
        query of its rows gives to all keys of its columns, on average: where each token has a cell, the weights."""
        n, m = self.shape
        if self.layer.exact:
            fast = self.unpadded
            return self._means(
                self.layer.pooled_weights(rows, cols)[self.item] if fast else self._pooled_strips(rows, cols)
            )
        if self.layer.has("heatmap"):
            sums = self.layer.last()["heatmap"][self.item, :, :n, :m]
            counts = _pool(sizes(n, sums.shape[1]), rows, 0)
            return (_pool(_pool(sums, rows, 1), cols, 2) / counts.to(sums)[:, None]).float().cpu()
        raise bad_value(
            "record",
            expected="one that kept q and k, or measured heatmaps",
            received=repr(self.layer),
            remedy='watch(model, keep="qk")',
        )

    def _pooled_strips(self, rows: int, cols: int) -> Tensor:
        """Sums of weights over the cells of a text without its padding, strip by strip."""
        n, m = self.shape
        sums = torch.zeros(self.heads, min(rows, n), min(cols, m), device="cpu")
        cell = torch.arange(n, device="cpu") * sums.shape[1] // max(n, 1)
        for first in range(0, n, STRIP):
            strip = slice(first, first + STRIP)
            sums.index_add_(1, cell[strip], _pool(self._weights(None, strip).float().cpu(), cols, 2))
        return sums


def _within(tokens: range, part: slice | None = None) -> slice:
    """A part of a range of tokens, as a slice of the whole sequence."""
    inside = tokens if part is None else tokens[part]
    return slice(inside.start, max(inside.stop, inside.start))


def sizes(tokens: int, cells: int) -> Tensor:
    """How many of `tokens` fall into each of `cells`, as in `measures.Heatmap`: token i into cell
    i * cells // tokens."""
    return torch.bincount(torch.arange(tokens, device="cpu") * cells // max(tokens, 1), minlength=cells)


def _pool(sums: Tensor, cells: int, dim: int) -> Tensor:
    """Sums over at most `cells` cells along an axis."""
    size = sums.shape[dim]
    if size <= cells:
        return sums
    to = torch.arange(size, device=sums.device) * cells // size
    shape = [*sums.shape]
    shape[dim] = cells
    return sums.new_zeros(shape).index_add_(dim, to, sums)


class Scene:
    """A record with its tokens.

    Args:
        record: what `watch` gave, best with keep="qk"; of several texts in a row the last is drawn.
        tokens: the text's tokens; a list of them for each item of the batch, with padding (any string) or without; or,
            for an encoder-decoder, a pair `(source, target)` of such lists. By default `record.tokens`; without any,
            tokens are numbered.
        item: which text of the batch. Its padding, as far as the record knows it, is not drawn.
        special: tokens that are special, where their spelling does not show it.
        progress: a function that is called with numbers from 0 to 1; it may raise, to stop.
    """

    def __init__(
        self,
        record: Record,
        tokens: Any = None,
        *,
        item: int = 0,
        special: Sequence[str] = (),
        progress: Callable[[float], None] | None = None,
    ) -> None:
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
        self.panels: list[Panel] = []
        self.tokens = given = record.tokens if tokens is None else tokens
        self.item = item
        texts, role_tokens, target = _texts(given, item), tokens_of(record, given), first_of_target(record)
        shared = Shared()
        known: dict[Any, Labels] = {}  # layers of one text share their labels
        for number, (layer, (rows, cols)) in enumerate(
            zip(record, _unpadded_ranges(record, item, target), strict=True)
        ):
            refuse_signed("a picture", layer.name, layer.signed)
            if not 0 <= item < layer.shape[0]:
                raise bad_value("item", expected=f"a text from 0 to {layer.shape[0] - 1}", received=str(item))
            q_tokens = texts[-1] if number >= target else texts[0]
            k_tokens = q_tokens if layer.kind == "self" else texts[0]
            labels = _layer_labels(layer, q_tokens, k_tokens, rows, cols, special, known)
            panel = Panel(number, layer, item, rows, cols, *labels)
            panel.measures = {name: value.float().cpu() for name, value in scalars(layer).items()}
            if _has_roles(layer):
                kept = layer.text is not None and layer.text.keeps_calls()  # else the evidence was taken before
                words = role_tokens[layer.name] if kept else None
                panel.roles = list(roles(record.subset([layer.name]), words, shared=shared))
                aside = shared.aside.get(layer.name)
                panel.aside = None if aside is None else aside[item, :, cols.start : cols.stop].cpu()
            self.panels.append(panel)
            if progress is not None:
                progress(len(self.panels) / len(record))

    def __len__(self) -> int:
        return len(self.panels)

    def __iter__(self) -> Iterator[Panel]:
        return iter(self.panels)

    def __getitem__(self, number: int) -> Panel:
        return self.panels[number]

    def panel(self, layer: int | str) -> Panel:
        """The panel of a layer, by number or by name."""
        wanted = self.record[layer]
        return next(panel for panel in self.panels if panel.layer is wanted)


def _has_roles(layer: LayerRecord) -> bool:
    """Whether a layer is self attention of which q and k were kept, or what roles are decided by."""
    texts = (*layer.earlier, layer.text)
    kept = any(text is not None and text.keeps_calls() for text in texts)
    return layer.kind == "self" and (layer.evidence is not None or kept)


def _texts(tokens: Any, item: int) -> list[list[Any] | None]:
    """The tokens of one item: one list, or two, of source and target."""
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


def _unpadded_ranges(record: Record, item: int, target: int) -> list[tuple[range, range]]:
    """For each layer, the queries and keys of one text without the padding before and after it."""
    self_queries: dict[tuple[bool, int], range] = {}  # queries of self attention, which cross attention has too
    ranges = []
    for number, layer in enumerate(record):
        _, _, n, m = layer.shape
        q_padding, k_padding = layer.query_padding, layer.key_padding
        rows, cols = _unpadded(q_padding, item, n), _unpadded(k_padding, item, m)
        side = number >= target, n
        if layer.kind == "self":
            self_queries[side] = rows
        elif k_padding is None:  # the keys of cross attention are the queries of the encoder
            cols = self_queries.get((False, m), cols)
        ranges.append((self_queries.get(side, rows), cols))
    return ranges


def _unpadded(padding: Tensor | None, item: int, count: int) -> range:
    """From the first to the last position of a text that is no padding (B, count)."""
    tokens = [] if padding is None or item >= len(padding) else (~padding[item]).nonzero().flatten().tolist()
    return range(tokens[0], tokens[-1] + 1) if tokens else range(count)


def _layer_labels(
    layer: LayerRecord,
    q_tokens: list[Any] | None,
    k_tokens: list[Any] | None,
    rows: range,
    cols: range,
    special: Sequence[str],
    known: dict[Any, Labels],
) -> tuple[Labels, Labels]:
    """The labels of a layer's queries and keys."""
    batch, _, n, m = layer.shape
    if layer.kind == "self" and q_tokens is not None:
        if layer.num_chunks > 1 and len(q_tokens) == m + 1:
            q_tokens = k_tokens = q_tokens[:-1]  # the last token was generated, not read
        if n < m == len(q_tokens):  # a watch that began in the middle
            q_tokens = q_tokens[m - n :]

    def labels(side: str, tokens: list[Any] | None, count: int, inside: range) -> Labels:
        if tokens is not None and len(tokens) == count:
            tokens = tokens[_within(inside)]
        key = (len(inside), None if tokens is None else tuple(map(str, tokens)))
        if key not in known:
            known[key] = _labels(tokens, len(inside), special, f"{side} of {layer.name}", padded=batch > 1)
        return known[key]

    return labels("queries", q_tokens, n, rows), labels("keys", k_tokens, m, cols)


def _labels(tokens: list[Any] | None, count: int, special: Sequence[str], what: str, padded: bool) -> Labels:
    if tokens is None:
        return Labels.numbers(count)
    labels = Labels.of(tokens, special)
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
