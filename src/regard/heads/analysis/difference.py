"""Which heads change between two records: two texts, two models, or one text with and without some heads.

The weights of both are compared query by query, for the queries and keys that the two texts share. What a query gives
to keys that only one of the texts has counts as given to one more key, "elsewhere". So each query has two distributions
over the same keys, and the change is their total variation distance: half the sum of absolute differences, from 0 (the
same) to 1 (nothing in common). Nothing is renormalised.

Letters: H query heads, N queries, M keys; n, m of those that are compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from regard.errors import bad_type, bad_value
from regard.heads.analysis.alignment import aligned, runs_of
from regard.heads.analysis.labels import Labels
from regard.heads.analysis.token_facts import first_of_target
from regard.heads.record.crops import crop
from regard.heads.record.table import Shown, Table, scalars

if TYPE_CHECKING:
    from regard.heads.record.record import LayerRecord, Record

__all__ = ["Difference", "HeadDifference", "difference"]

STRIP = 2**22  # weights of a record that are computed at once
SHOWN = 20  # heads that `print` shows

Pairs = Sequence[tuple[int, int]]


@dataclass
class HeadDifference:
    """How much one head changes.

    Attributes:
        number, layer, head: the layer's number and its name in the first record.
        change: the total variation distance of its weights, as a mean over the queries that are compared.
        query, key: where a weight changes most, as (in the first, in the second); `words` are their tokens.
        before, after: that weight in the first record and in the second.
        elsewhere: the mean mass on keys that the texts do not share, and on learned sinks, in the first and the second.
        measures: for each measure that is one number per head, its value in the second record minus that in the first.
    """

    number: int
    layer: str
    head: int
    change: float
    query: tuple[int, int]
    key: tuple[int, int]
    words: tuple[str, str]
    before: float
    after: float
    elsewhere: tuple[float, float]
    measures: dict[str, float] = field(default_factory=dict)


class Difference(Shown):
    """The heads of two records, those first that change most; `result[layer, head]` is one of them. `print` shows the
    first ones, a notebook all.

    Attributes:
        heads: a `HeadDifference` for each head, ranked.
        shared: how many queries of the first layer are compared; `of`: how many there are, in the first and the second.
    """

    def __init__(self, heads: list[HeadDifference], layers: list[str], shared: int, of: tuple[int, int]) -> None:
        self.heads, self.layers, self.shared, self.of = heads, layers, shared, of

    def __iter__(self) -> Iterator[HeadDifference]:
        return iter(self.heads)

    def __len__(self) -> int:
        return len(self.heads)

    def __getitem__(self, which: tuple[int | str, int]) -> HeadDifference:
        layer, number = which
        for head in self.heads:
            if layer in (head.layer, head.number) and head.head == number:
                return head
        raise KeyError(f"no head {number} in layer {layer!r}")

    def table(self) -> Table:
        """A row for each head, those first that change most; measures are those of the second minus the first."""
        rows = [
            {
                "layer": head.layer,
                "head": head.head,
                "change": head.change,
                "query": f"{head.query[0]} {head.words[0]}",
                "key": f"{head.key[0]} {head.words[1]}",
                "before": head.before,
                "after": head.after,
                "elsewhere": max(head.elsewhere),
            }
            | head.measures
            for head in self.heads
        ]
        return Table(rows, self.layers)

    def caption(self) -> str:
        """What was compared."""
        a, b = self.of
        both = f"all {a} tokens" if a == b == self.shared else f"{self.shared} shared tokens, of {a} and {b}"
        return f"change: total variation distance of the weights, mean over {both}; measures: second minus first"

    def __str__(self) -> str:
        rows = self.table()
        more = f"\nand {len(rows) - SHOWN} heads more" if len(rows) > SHOWN else ""
        return f"{Table(rows[:SHOWN], self.layers)}{more}\n{self.caption()}"


def difference(
    first: Record,
    second: Record,
    *,
    tokens: tuple[Any, Any] | None = None,
    item: int = 0,
    progress: Callable[[float], None] | None = None,
) -> Difference:
    """Rank the heads of two records by how much their weights change. Layers are compared in call order. Both need q
    and k (keep="qk"); weights are exact, and computed some rows at a time.

    Args:
        first, second: two texts, two models with equally many heads, or one text with and without heads.
        tokens: the tokens of both texts, each as `record.tokens`; by default those.
        item: which text of the batch, in both.
        progress: a function that is called with numbers from 0 to 1.

    Texts are compared by their tokens, else by token ids; without either, texts of one length by position. Texts that
    differ are aligned by a longest common subsequence, and only what they share is compared.

    >>> import regard, torch
    >>> model = regard.models.load("minilm")
    >>> ids = model.encode("The cat that I saw yesterday ran away")
    >>> with regard.watch(model, keep="qk") as seen, torch.no_grad():
    ...     _ = model(ids)
    >>> with regard.ablate(model, {1: [8]}), regard.watch(model, keep="qk") as without, torch.no_grad():
    ...     _ = model(ids)
    >>> change = seen.difference(without)
    >>> change[0, 2].change, change.heads[0].number > 1
    (0.0, True)
    """
    _check(first, second)
    targets = first_of_target(first), first_of_target(second)
    given = (first.tokens, second.tokens) if tokens is None else tokens
    heads: list[HeadDifference] = []
    known: dict[Any, list[tuple[int, int]]] = {}
    sizes: tuple[int, tuple[int, int]] | None = None
    for number, (a, b) in enumerate(zip(first, second, strict=True)):
        sides = _Sides.of(given[0], a, number >= targets[0], item), _Sides.of(given[1], b, number >= targets[1], item)
        rows, cols = (_shared(sides[0][which], sides[1][which], known) for which in (0, 1))
        if sizes is None:
            sizes = len(rows), (len(sides[0].queries), len(sides[1].queries))
        words = tuple({token.slot: token.text for token in tokens} for tokens in sides[0])
        heads += _compared(number, a, b, item, rows, cols, words)
        if progress is not None:
            progress((number + 1) / len(first))
    assert sizes is not None
    heads.sort(key=lambda head: (math.isnan(head.change), -head.change))
    return Difference(heads, first.layers, *sizes)


def _check(first: Record, second: Record) -> None:
    from regard.heads.record.record import Record

    for record in (first, second):
        if not isinstance(record, Record):
            raise bad_type("other", expected="what `regard.watch` gives", received=type(record).__name__)
    shapes = [[(layer.kind, layer.heads) for layer in record if layer.text is not None] for record in (first, second)]
    if shapes[0] != shapes[1] or not shapes[0]:
        a, b = (f"{len(shape)} layers with {sum(heads for _, heads in shape)} heads" for shape in shapes)
        same = a == b and bool(shapes[0])
        raise bad_value(
            "other",
            expected=f"{a}, as in this record",
            received="as many, in other layers" if same else b,
            remedy="two records of one model, or of models with the same layers and heads",
        )
    for name, record in (("this record", first), ("other", second)):
        for layer in record:
            if not layer.exact:
                raise bad_value(
                    name,
                    expected="q and k of every layer",
                    received=f"none kept in {layer.name}",
                    remedy='watch(model, keep="qk")',
                )


class _Token(NamedTuple):
    """A query or key that is no padding: its slot, its text, and what it is compared by (None if that is not known)."""

    slot: int
    text: str
    name: Any


class _Sides(NamedTuple):
    """The queries and keys of a layer, for one text."""

    queries: list[_Token]
    keys: list[_Token]

    @staticmethod
    def of(tokens: Any, layer: LayerRecord, is_target: bool, item: int) -> _Sides:
        batch, _, n, m = layer.shape
        if not 0 <= item < batch:
            raise bad_value("item", expected=f"a text from 0 to {batch - 1}", received=str(item))
        pair = isinstance(tokens, tuple) and len(tokens) == 2 and not any(isinstance(part, str) for part in tokens)
        given = [_row(part, item) for part in (tokens if pair else (tokens, tokens))]
        text, (source, own) = layer.text, (given[0], given[is_target])
        keys = own if layer.kind == "self" else source
        ids = None if text is None or text.ids is None else text.ids[item if len(text.ids) > 1 else 0].tolist()
        of_keys = _tokens(m, layer.key_padding, item, keys, ids)
        if layer.kind == "self" and n <= m:  # the queries are the last tokens
            return _Sides(
                [token._replace(slot=token.slot - m + n) for token in of_keys if token.slot >= m - n], of_keys
            )
        return _Sides(_tokens(n, layer.query_padding, item, own, None), of_keys)


def _row(tokens: Any, item: int) -> list[str] | None:
    """The tokens of one text, of a list or of a list of lists."""
    if not isinstance(tokens, (list, tuple)) or not tokens:
        return None
    if isinstance(tokens[0], (list, tuple)):
        return [str(token) for token in tokens[item]] if item < len(tokens) else None
    return [str(token) for token in tokens]


def _tokens(count: int, padding: Tensor | None, item: int, words: list[str] | None, ids: Any) -> list[_Token]:
    """The tokens of one side that are no padding, by what is known of them."""
    slots = list(range(count)) if padding is None else (~padding[item]).nonzero().flatten().tolist()
    if words is not None and len(words) == count + 1:
        words = words[:-1]  # the last token was generated, not read
    if words is not None and len(words) == count != len(slots):
        words = [words[slot] for slot in slots]
    if words is not None and len(words) == len(slots):
        texts = Labels.of(words).text
        return [_Token(slot, text, text) for slot, text in zip(slots, texts, strict=True)]
    if ids is not None and len(ids) == count:
        return [_Token(slot, "", ids[slot]) for slot in slots]
    return [_Token(slot, "", None) for slot in slots]


def _shared(a: list[_Token], b: list[_Token], known: dict[Any, list[tuple[int, int]]]) -> list[tuple[int, int]]:
    """The slots (in the first, in the second) of the tokens that two sides share."""
    names = [tuple(token.name for token in side) for side in (a, b)]
    if any(name is None for side in names for name in side):
        if len(a) != len(b):
            raise bad_value(
                "tokens",
                expected="known for both texts, which differ in length",
                received=f"{len(a)} and {len(b)} without names",
                remedy="set `seen.tokens` of both records",
            )
        return [(x.slot, y.slot) for x, y in zip(a, b, strict=True)]
    key = tuple(names)
    if key not in known:
        known[key] = aligned(*names)
    if not known[key]:
        raise bad_value(
            "difference",
            expected="texts that share words",
            received="two without a common token",
            remedy="texts of the same words, or records without tokens, which are compared by position",
        )
    return [(a[i].slot, b[j].slot) for i, j in known[key]]


def _compared(
    number: int, a: LayerRecord, b: LayerRecord, item: int, rows: Pairs, cols: Pairs, words: tuple[dict[int, str], ...]
) -> list[HeadDifference]:
    """The heads of one layer."""
    sums, before, after, places = _sums(a, b, item, rows, cols)
    changes, outside_a, outside_b = (sums[:3] / sums[3].clamp(min=1)).tolist()
    scalar_a, scalar_b = scalars(a), scalars(b)
    measures = {
        name: (scalar_b[name].double().cpu() - value.double().cpu()).tolist()
        for name, value in scalar_a.items()
        if name in scalar_b
    }
    heads = []
    for head in range(a.heads):
        query, key = rows[int(places[head, 0])], cols[int(places[head, 1])]
        heads.append(
            HeadDifference(
                number,
                a.name,
                head,
                changes[head],
                query,
                key,
                (words[0].get(query[0], ""), words[1].get(key[0], "")),
                float(before[head]),
                float(after[head]),
                (outside_a[head], outside_b[head]),
                {name: values[head] for name, values in measures.items()},
            )
        )
    return heads


def _sums(a: LayerRecord, b: LayerRecord, item: int, rows: Pairs, cols: Pairs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(4, H): sums of the distance, of the mass elsewhere in both, and the number of queries; and where a weight
    changes most: its value (H,) before and after, and its query and key (H, 2) among the pairs."""
    heads = a.heads
    sums = torch.zeros(4, heads, dtype=torch.float64, device="cpu")
    before, after, largest = (torch.zeros(heads, dtype=torch.float64, device="cpu") - x for x in (0.0, 0.0, 1.0))
    places = torch.zeros(heads, 2, dtype=torch.int64, device="cpu")
    columns = [torch.tensor(side, device="cpu") for side in zip(*cols, strict=True)]
    step, at, every = max(1, STRIP // (heads * max(a.num_keys, b.num_keys, 1))), 0, torch.arange(heads, device="cpu")
    for first, second, length in runs_of(rows):
        for row in range(0, length, step):
            count = min(step, length - row)
            x, y = (
                _rows(layer, item, slice(start + row, start + row + count), of_keys)
                for layer, start, of_keys in ((a, first, columns[0]), (b, second, columns[1]))
            )
            seen = (x[1] & y[1]).double()  # (H, n)
            change = (y[0] - x[0]) * seen[..., None].to(x[0])  # (H, n, m)
            outside = [(1 - weights.sum(-1)).double().clamp(min=0) * seen for weights, _ in (x, y)]
            distance = (change.abs().sum(-1).double() + (outside[1] - outside[0]).abs()) / 2
            sums += torch.stack([part.sum(1) for part in (distance, *outside, seen)])
            most, place = change.abs().nan_to_num(0.0).flatten(1).max(1)
            better, query, key = most.double() > largest, place // len(cols), place % len(cols)
            largest = torch.where(better, most.double(), largest)
            before = torch.where(better, x[0][every, query, key].double(), before)
            after = torch.where(better, y[0][every, query, key].double(), after)
            places = torch.where(better[:, None], torch.stack([query + at, key], 1), places)
            at += count
    return sums, before, after, places


def _rows(layer: LayerRecord, item: int, rows: slice, keys: Tensor) -> tuple[Tensor, Tensor]:
    """The weights (H, n, m) of some queries on some keys; and which of the queries (H, n) see a key at all."""
    assert layer.text is not None
    found = crop(layer.text, item, None, rows, slice(0, layer.num_keys))
    weights = (layer.weights(None, rows, batch=item) if found is None else found).cpu()
    seen = layer.last_seen()[item, :, rows].cpu()
    if weights.dtype not in (torch.float32, torch.float64):
        weights = weights.float()
    whole = len(keys) == weights.shape[2]
    return (weights if whole else weights[..., keys]), seen
