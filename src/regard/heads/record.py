"""What was seen: a record of every layer, from one forward or from many.

A layer's text may come in pieces: a prompt, then token after token from a cache. Pieces that continue each other are
joined to one map, as if the whole had been read at once. A second text begins a second sequence; from then on what was
measured per query becomes a mean per head.

Letters: B batch, H query heads, N queries, M keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor

from regard.attention import look
from regard.errors import bad_type, bad_value
from regard.heads.attention import Attention
from regard.kernels import Call, reference
from regard.masks import Keep, Padding, conjuncts
from regard.measures import Measure, Measurements, Plane, Strip, Survey, TopLinks, rollout
from regard.positions import DenseBias

__all__ = ["Layer", "Record"]

DENSE = 2048  # tokens up to which rollout builds dense maps


@dataclass
class Piece:
    """One call of attention within a sequence: how many queries it has, which tokens of the whole text its keys are,
    and what was measured."""

    queries: int
    runs: list[slice]  # of numbers
    found: Measurements
    padding: Tensor | None = None  # (B, 1, N): queries that are none, where there are some
    call: Call | None = None  # with neither k nor v, if it was kept and `Text.keys` have them
    weights: Tensor | None = None  # (B, H, N, M) if it was kept and the model wrote attention by hand
    output: Tensor | None = None  # (B, H, N, E) if it was kept

    @property
    def numbers(self) -> Tensor:
        """Which tokens of the whole text its keys are: (M,)"""
        device = self.found.seen.device
        return torch.cat([torch.arange(run.start, run.stop, device=device) for run in self.runs or [slice(0, 0)]])

    @property
    def counted(self) -> Tensor:
        """Which queries count in means, (B, H, N): those that see a key, but for padding."""
        return self.found.seen if self.padding is None else self.found.seen & ~self.padding


@dataclass
class Text:
    """One sequence: pieces that continue each other."""

    shape: tuple[int, int]  # (B, H)
    pieces: list[Piece] = field(default_factory=list)
    total: int = 0  # keys so far, those that were dropped from a cache included
    ids: Tensor | None = None  # (1|B, total)
    keys: list[Tensor] = field(default_factory=list)  # kept: (B, G, m, D), each key once
    by_key: dict[str, Tensor] = field(default_factory=dict)  # sums of all pieces so far, where there are several

    def add(self, piece: Piece, axes: dict[str, str]) -> None:
        """One more piece. What it gave to each key is added up at once: kept by pieces it would grow by the square."""
        self.pieces.append(piece)
        if len(self.pieces) == 1:
            return
        for name in [name for name, axis in axes.items() if axis == "key" and name in piece.found.values]:
            for one in self.pieces if len(self.pieces) == 2 else [piece]:
                total = one.found.values[name].new_zeros(*one.found.values[name].shape[:2], self.total)
                if name in self.by_key:
                    total[..., : self.by_key[name].shape[-1]] = self.by_key[name]
                total[..., one.numbers] += one.found.values[name]
                self.by_key[name] = total
            piece.found = replace(piece.found, values={k: v for k, v in piece.found.values.items() if k != name})

    @property
    def queries(self) -> int:
        """N of all pieces together."""
        return sum(piece.queries for piece in self.pieces)


class Layer:
    """One layer's attention: what was measured by name, such as `.entropy`, (B, H, N) after one text; after several,
    means per head (H,) over all queries that see a key; how many these are is in `.count`."""

    def __init__(self, name: str, kind: Literal["self", "cross"], measures: list[Measure]) -> None:
        self.name, self.kind, self.measures = name, kind, measures
        self.text: Text | None = None
        self.texts = 0
        self.sums: dict[str, Tensor] = {}
        self.before: dict[str, Any] = {}  # how many queries (H,) those sums are over; "" those that see a key
        self.uniform: Layer | None = None  # what equal weights on all visible keys would give, as one head
        self._last: dict[str, Any] | None = None
        self._means: dict[str, Any] | None = None

    @property
    def axes(self) -> dict[str, str]:
        """What was measured, and along which axis it is laid (see `measures.Measure`)."""
        return {name: axis for one in self.measures for name, axis in one.gives.items()}

    @property
    def heads(self) -> int:
        """H"""
        assert self.text is not None
        return self.text.shape[1]

    @property
    def values(self) -> dict[str, Any]:
        """Everything that was measured, by name."""
        if self.texts == 1:
            return self.last()
        if self._means is None:
            self._means = {name: self.per_head(name) for name in self.axes if name in self._sums()}
        return self._means

    @property
    def seen(self) -> Tensor:
        """Which queries see a key, (B, H, N), after one text."""
        if self.texts > 1:
            raise AttributeError("`seen` is per query, and there were several texts")
        return self.last_seen()

    def has(self, name: str) -> bool:
        """Whether something was measured here."""
        return self.text is not None and name in self.last()

    def last(self) -> dict[str, Any]:
        """What was measured in the last text."""
        if self._last is None:
            assert self.text is not None
            self._last = joined(self.text, self.measures)
        return self._last

    def _sums(self) -> dict[str, tuple[Tensor, Tensor]]:
        assert self.text is not None
        return _sums(self.text, self.measures, self.last())

    def last_seen(self) -> Tensor:
        """Which queries (B, H, N) of the last text see a key."""
        assert self.text is not None
        return torch.cat([piece.found.seen for piece in self.text.pieces], 2)

    def last_padding(self) -> Tensor | None:
        """Which queries (B, 1, N) of the last text are padding, where some are."""
        assert self.text is not None
        parts = [piece.padding for piece in self.text.pieces]
        if all(part is None for part in parts):
            return None
        blank = [piece.found.seen.new_zeros(self.text.shape[0], 1, piece.queries) for piece in self.text.pieces]
        return torch.cat([b if p is None else p.expand_as(b) for p, b in zip(parts, blank, strict=True)], 2)

    def last_counted(self) -> dict[str, Tensor]:
        """The same for measures that count fewer queries."""
        assert self.text is not None
        names = self.text.pieces[0].found.counts
        return {name: torch.cat([piece.found.counts[name] for piece in self.text.pieces], 2) for name in names}

    @property
    def count(self) -> Tensor:
        """How many queries (H,) the means are taken over, in all texts: those that saw a key, but for padding."""
        assert self.text is not None
        return torch.cat([piece.counted for piece in self.text.pieces], 2).sum((0, 2)) + self.before.get("", 0)

    @property
    def counts(self) -> dict[str, Tensor]:
        """How many queries (H,) the means of each measure per query are taken over."""
        return {name: count + self.before.get(name, 0) for name, (_, count) in self._sums().items()}

    def per_head(self, name: str) -> Tensor:
        """The mean (H,) of a measure per query, or the mean (H, ...) of another, over everything that was seen."""
        total, count = self._sums()[name]
        total, count = _plus(total, self.sums.get(name)), count + self.before.get(name, 0)
        return total / count.clamp(min=1).view(-1, *[1] * (total.dim() - 1))

    def begin(self, text: Text) -> None:
        """A new sequence: what the last one gave is summed up."""
        if self.text is not None:
            self.before[""] = self.count
            for name, (total, count) in self._sums().items():
                self.sums[name] = _plus(total, self.sums.get(name))
                self.before[name] = count + self.before.get(name, 0)
        self.text = text
        self.texts += 1
        self.changed()

    def replace(self, text: Text) -> None:
        """The same sequence, read again from the start and further."""
        self.text = text
        self.changed()

    def snapshot(self) -> dict[str, Any]:
        """Everything, as it is now."""
        state = dict(self.__dict__)
        for name in ("sums", "before"):
            state[name] = dict(state[name])
        if self.text is not None:
            state["text"] = copy(self.text)
            for name in ("pieces", "keys", "by_key"):
                setattr(state["text"], name, copy(getattr(self.text, name)))
        if self.uniform is not None:
            state["uniform"] = (self.uniform, self.uniform.snapshot())
        return state

    def restore(self, state: dict[str, Any]) -> None:
        """Everything, as it was then."""
        state = dict(state)
        if isinstance(state["uniform"], tuple):
            state["uniform"], before = state["uniform"]
            state["uniform"].restore(before)
        self.__dict__.update(state)

    def changed(self) -> None:
        """Something was added to the text: what was joined of it is to be joined again."""
        self._last = self._means = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or "measures" not in self.__dict__:
            raise AttributeError(name)
        if name == "seen":  # (of a property that raised, the words are lost)
            raise AttributeError("`seen` is per query, and there were several texts")
        values = self.values
        if name in values:
            return values[name]
        if name in self.axes and self.texts > 1 and name in self.last():
            raise AttributeError(f"{name!r} has no mean over the {self.texts} texts that were seen")
        if name in self.axes:
            one = next(one for one in self.measures if name in one.gives)
            needs = "the output projection's weight and the values"
            if one.needs_ids:
                needs = "token ids, and none were found among the model's inputs"
            raise AttributeError(f"{name!r} was not measured in {self.name}: it needs {needs}")
        raise AttributeError(f"{name!r} was not measured in {self.name}; there are {', '.join(values) or 'none'}")

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)

    def weights(
        self,
        head: int | slice | Sequence[int] | None = None,
        rows: slice | int | None = None,
        cols: slice | int | None = None,
        batch: int | None = None,
    ) -> Tensor:
        """Weights of the last text, exactly, computed now from the q and k that were kept: (B, H, N, M), or a part.

        Args:
            head: one head (its axis goes), several, or all.
            rows, cols: queries and keys, as slices (or one, whose axis goes); all by default.
            batch: one item of the batch (its axis goes), or all.
        """
        text = self.text
        assert text is not None
        if any(piece.call is None and piece.weights is None for piece in text.pieces):
            raise bad_value("weights", expected='a watch with keep="qk"', received="one that kept nothing",
                            remedy='watch(model, keep="qk")')  # fmt: skip
        if head is None or isinstance(head, slice):
            which = list(range(self.heads)[slice(None) if head is None else head])
        else:
            several = [head] if isinstance(head, int) or not isinstance(head, Sequence) else head
            which = [_number("head", one, self.heads) for one in several]
        first = None if batch is None else _number("batch", batch, text.shape[0])
        items = slice(None) if first is None else slice(first, first + 1)
        r0, r1, _ = _slice("rows", rows, text.queries).indices(text.queries)
        c0, c1, _ = _slice("cols", cols, text.total).indices(text.total)
        result = self._block(items, which, slice(r0, max(r0, r1)), slice(c0, max(c0, c1)))
        if isinstance(cols, int):
            result = result[..., 0]
        if isinstance(rows, int):
            result = result[:, :, 0]
        result = result[:, 0] if isinstance(head, int) else result
        return result if batch is None else result[0]

    @property
    def output(self) -> Tensor:
        """The heads' outputs in the last text, before the output projection: (B, H, N, E). Needs keep="qkv"."""
        assert self.text is not None
        parts = [piece.output for piece in self.text.pieces]
        if any(part is None for part in parts):
            raise bad_value("output", expected='a watch with keep="qkv"', received="one that did not keep it",
                            remedy='watch(model, keep="qkv")')  # fmt: skip
        return torch.cat(parts, 2)  # type: ignore[arg-type]

    def _block(self, items: slice, heads: list[int], rows: slice, cols: slice) -> Tensor:
        text = self.text
        assert text is not None
        keys = torch.cat(text.keys, 2) if len(text.keys) > 1 else text.keys[0] if text.keys else None
        first, blocks = 0, []
        for piece in text.pieces:
            own = slice(max(rows.start - first, 0), max(min(rows.stop - first, piece.queries), 0))
            first += piece.queries
            if own.start >= own.stop:
                continue
            block = _weights(piece, keys, items, heads, own)
            wide = block.new_zeros(*block.shape[:3], cols.stop - cols.start)
            inside = (piece.numbers >= cols.start) & (piece.numbers < cols.stop)
            wide[..., piece.numbers[inside] - cols.start] = block[..., inside]
            blocks.append(wide)
        if not blocks:
            like = text.pieces[0].found.lse
            return like.new_zeros(len(range(text.shape[0])[items]), len(heads), 0, cols.stop - cols.start)
        return torch.cat(blocks, 2)

    def __repr__(self) -> str:
        return f"Layer({self.name!r}, {self.kind}, {', '.join(self.axes)})"


class Record:
    """What `watch` saw. `seen.layers` are the names, in the order in which they were called; `seen[name]`, or by
    number, is one `Layer`."""

    def __init__(self) -> None:
        self.by_name: dict[str, Layer] = {}

    @property
    def layers(self) -> list[str]:
        """The names of the layers, in the order in which they were first called."""
        return list(self.by_name)

    def __getitem__(self, layer: str | int) -> Layer:
        if isinstance(layer, int) and not isinstance(layer, bool):
            if not -len(self.by_name) <= layer < len(self.by_name):
                raise IndexError(f"layer {layer}: there are {len(self.by_name)}")
            return list(self.by_name.values())[layer]
        if isinstance(layer, str):
            if layer.endswith("#0"):
                layer = layer[:-2]
            if layer in self.by_name:
                return self.by_name[layer]
            raise KeyError(f"no layer {layer!r}; there are {', '.join(self.by_name) or 'none'}")
        raise bad_type("layer", expected="a name or a number", received=type(layer).__name__)

    def __len__(self) -> int:
        return len(self.by_name)

    def __iter__(self) -> Iterator[Layer]:
        return iter(self.by_name.values())

    def __contains__(self, layer: object) -> bool:
        """Whether `seen[layer]` is there."""
        if isinstance(layer, Layer):
            return any(layer is one for one in self)
        try:
            return isinstance(self[layer], Layer)  # type: ignore[index]
        except (KeyError, IndexError, TypeError):
            return False

    def __repr__(self) -> str:
        kinds = [layer.kind for layer in self]
        cross = f", {kinds.count('cross')} of them cross" if "cross" in kinds else ""
        return f"Record of {len(kinds)} layers{cross}"

    def rollout(self) -> Tensor:
        """Attention rollout (Abnar & Zuidema 2020) through the layers of self attention, (B, N, N): how much of each
        input token is in each output token. Needs keep="qk" and a text short enough for dense maps."""
        layers = [layer for layer in self if layer.kind == "self"]
        sizes = {(layer.text.queries, layer.text.total) for layer in layers if layer.text is not None}
        if len(sizes) != 1 or not all(n == m for n, m in sizes):
            raise bad_value("rollout", expected="self attention of one text in all layers", received=f"sizes {sizes}")
        n = next(iter(sizes))[0]
        if n > DENSE:
            raise bad_value("rollout", expected=f"at most {DENSE} tokens, for it builds dense maps", received=f"{n}")
        return rollout([layer.weights() for layer in layers])

    # In other files: table(), roles(), save(), are functions of a record; here they are at hand.

    def table(self) -> Any:
        """A row for each layer and head: every scalar measure, as a mean over queries. See `heads.table.Table`."""
        from regard.heads.table import table

        return table(self)

    def roles(self, **options: Any) -> Any:
        """The role of each head, or none. See `heads.roles.roles`."""
        from regard.heads.roles import roles

        return roles(self, **options)

    def save(self, path: Any) -> None:
        """Write it to a file. See `heads.store`."""
        from regard.heads.store import save

        save(self, path)

    @staticmethod
    def load(path: Any) -> Record:
        """Read one that was saved."""
        from regard.heads.store import load

        return load(path)


def padding(attention: Attention) -> Tensor | None:
    """Which queries (B, 1, N) are padding: those that may not see themselves, where others may; None where all may."""
    _, _, n, m = attention.shape
    if attention.kind != "self" or n > m or not n:
        return None
    if attention.call is None:
        assert attention.weights is not None
        hidden = (attention.weights != 0).any(2).any(1)[:, None, m - n :].logical_not() if n == m else None
    else:
        hidden = None
        for part in conjuncts(attention.call.mask):
            if isinstance(part, Padding):
                own = ~part.block(attention.call.tile(slice(None), slice(0, 1), slice(m - n, m)))[:, :, 0]
            elif isinstance(part, Keep) and part.tensor.shape[2] == n and part.tensor.shape[3] == m:
                own = part.tensor if part.sense else ~part.tensor
                own = ~own.diagonal(m - n, 2, 3).any(1, keepdim=True)
            else:
                continue
            hidden = own if hidden is None else hidden | own
    if hidden is None or not hidden.any() or hidden.all():
        return None
    return hidden


def measured(attention: Attention, measures: list[Measure], text: Text, numbers: Tensor) -> Measurements:
    """What some measures find in one attention, whose keys are tokens `numbers` (M,) of the whole text."""
    batch, _, n, m = attention.shape
    ids = None
    if text.ids is not None and attention.kind == "self" and text.ids.shape[1] > int(numbers[-1]):
        ids = text.ids
    key_ids = None if ids is None else ids[:, numbers]
    usable = [
        one
        for one in measures
        if not (one.needs_ids and getattr(one, "ids", None) is None and key_ids is None)
        and not (one.needs_out_weight and getattr(one, "out_weight", None) is None and attention.out_weight is None)
    ]
    known: dict[str, Any] = {
        "key_ids": key_ids,
        "ids": attention.ids,
        "out_weight": attention.out_weight,
        "text_ids": ids,
    }
    if attention.call is not None:
        call = attention.call
        if attention.kind == "self" and (text.pieces or attention.numbers is not None):
            # positions of a call's own are right where it has some (texts of several lengths), unless it renumbers
            own = call.positions is not None and attention.numbers is None
            known |= {"numbers": numbers, "q_numbers": call.positions if own else numbers[None, m - n :]}
        return look(call, usable, values=call.v, **known)
    weights = attention.weights
    assert weights is not None
    dtype = torch.float64 if weights.dtype is torch.float64 else torch.float32
    weights = weights.to(dtype)
    columns = numbers[None]
    first = int(numbers[-1]) + 1 - n if m else 0
    queries = torch.arange(first, first + n, device=weights.device)[None]
    usable = [one for one in usable if not one.needs_out_weight]  # no values are known
    known.pop("out_weight")
    plane = Plane(batch, weights.shape[1], n, m, queries, columns, dtype, numbers=numbers, **known)
    everything = (slice(0, batch), slice(0, weights.shape[1]), slice(0, n), [slice(0, m)])
    with torch.autocast(weights.device.type, enabled=False):
        survey = Survey(usable, plane)
        survey.add(Strip(plane, *everything, weights=weights, mass=weights.sum(-1)))
    return survey.result(None, torch.zeros(weights.shape[:3], dtype=dtype, device=weights.device))


def joined(text: Text, measures: list[Measure]) -> dict[str, Any]:
    """What was measured piece by piece, of the whole text."""
    pieces = text.pieces
    if len(pieces) == 1:
        return pieces[0].found.values
    result: dict[str, Any] = {}
    for one in measures:
        for name, axis in one.gives.items():
            if axis == "key":
                result |= {name: text.by_key[name]} if name in text.by_key else {}
                continue
            parts: list[Any] = [piece.found.values.get(name) for piece in pieces]
            if any(part is None for part in parts):
                continue
            if axis == "query":
                result[name] = _joined_links(parts) if name == "links" else torch.cat(parts, 2)
            elif axis == "mean":
                counts = [piece.found.seen.sum(2) for piece in pieces]
                total = sum(part * count[..., None] for part, count in zip(parts, counts, strict=True))
                result[name] = total / torch.stack(counts).sum(0).clamp(min=1)[..., None]
            elif axis == "sum":
                result[name] = torch.stack(parts).sum(0)
    maps = [one for one in measures if "map" in one.gives.values()]
    if maps:
        result |= _maps(text, maps)
    return result


def _maps(text: Text, measures: list[Measure]) -> dict[str, Any]:
    """Pictures of the whole text, for which the pieces were kept: a piece is a strip."""
    batch, heads = text.shape
    keys = torch.cat(text.keys, 2) if text.keys else None
    first = text.pieces[0]
    dtype, device = first.found.lse.dtype, first.found.seen.device
    columns = torch.arange(text.total, device=device)[None]
    start = text.total - text.queries if text.total >= text.queries else 0
    rows = torch.arange(start, start + text.queries, device=device)[None]
    plane = Plane(batch, heads, text.queries, text.total, rows, columns, dtype)
    survey = Survey(measures, plane)
    at = 0
    for piece in text.pieces:
        step = max(1, 2**22 // max(1, batch * heads * piece.numbers.numel()))
        for row in range(0, piece.queries, step):
            own = slice(row, min(row + step, piece.queries))
            weights = _weights(piece, keys, slice(None), list(range(heads)), own).to(dtype)
            where = slice(at + own.start, at + own.stop)
            strip = Strip(plane, slice(0, batch), slice(0, heads), where, piece.runs, weights, weights.sum(-1))
            survey.add(strip)
        at += piece.queries
    return survey.result(None, first.found.lse).values


def _weights(piece: Piece, keys: Tensor | None, items: slice, heads: list[int], rows: slice) -> Tensor:
    """Some rows of some heads of some texts of a piece: (b, h, n, m)."""
    if piece.weights is not None:
        return piece.weights[items][:, heads, rows]
    call = piece.call
    assert call is not None
    k = call.k if keys is None or call.k.shape[2] else keys[:, :, piece.numbers]
    with torch.no_grad(), torch.autocast(k.device.type, enabled=False):
        return reference.weights(cut(replace(call, k=k, v=k), items, heads, rows))[0]


def runs(numbers: Tensor) -> list[slice]:
    """Rising numbers as runs of neighbours."""
    breaks = ((numbers[1:] - numbers[:-1]) != 1).nonzero().flatten().add(1).tolist()
    ends = [0, *breaks, numbers.numel()]
    return [slice(int(numbers[a]), int(numbers[b - 1]) + 1) for a, b in pairwise(ends) if b > a]


def cut(call: Call, items: slice, heads: list[int], rows: slice) -> Call:
    """The part of a call that some texts, heads and rows need: exact, for a row's weights depend on its own scores."""
    shared = call.shape[1] // call.k.shape[1]
    index = torch.tensor(heads, device=call.q.device)

    def of_heads(x: Tensor) -> Tensor:
        return x[:, index] if x.shape[1] > 1 else x

    def of_items(x: Tensor) -> Tensor:
        return x[items] if x.shape[0] > 1 else x

    mask = None
    if call.mask is not None:
        batch = slice(*items.indices(call.shape[0]))
        mask = Keep(of_heads(call.mask.block(call.tile(batch, rows, slice(0, call.shape[3])))))
    biases = []
    for bias in call.biases:
        if isinstance(bias, DenseBias):
            weight = of_heads(of_items(bias.weight))
            biases.append(DenseBias(weight[:, :, rows] if weight.shape[2] > 1 else weight))
        else:
            biases.append(bias.with_weight(of_items(bias.weight)[..., index]))
    return replace(
        call,
        q=call.q[items][:, index, rows],
        k=call.k[items][:, index // shared],
        v=call.v[items][:, index // shared],
        mask=mask,
        biases=tuple(biases),
        positions=of_items(call.query_positions(rows)),
        key_positions=None if call.key_positions is None else of_items(call.key_positions),
        sinks=None if call.sinks is None else of_items(call.sinks)[:, index],
        dropout=None,
    )


def _joined_links(parts: list[TopLinks]) -> TopLinks:
    """Early pieces may have fewer keys than links."""
    k = max(part.keys.shape[-1] for part in parts)
    pad = torch.nn.functional.pad
    keys = [pad(part.keys, (0, k - part.keys.shape[-1]), value=-1) for part in parts]
    weights = [pad(part.weights, (0, k - part.weights.shape[-1])) for part in parts]
    return TopLinks(torch.cat(keys, 2), torch.cat(weights, 2))


def _sums(text: Text, measures: list[Measure], values: dict[str, Any]) -> dict[str, tuple[Tensor, Tensor]]:
    """Of one text, what means over several are made of: the sum (H, ...) and the count (H,) of each measure."""
    seen = torch.cat([piece.found.seen for piece in text.pieces], 2)
    real = torch.cat([piece.counted for piece in text.pieces], 2)
    queries, items = seen.sum((0, 2)), torch.full((text.shape[1],), text.shape[0], device=seen.device)
    result = {}
    for one in measures:
        for name, axis in one.gives.items():
            if name not in values or name in ("target", "links"):
                continue
            value = values[name]
            if axis == "query":
                counted = real
                if name in text.pieces[0].found.counts:
                    counted = real & torch.cat([piece.found.counts[name] for piece in text.pieces], 2)
                weight = counted.view(*counted.shape, *[1] * (value.dim() - 3))
                result[name] = (value * weight).sum((0, 2)), counted.sum((0, 2))
            elif axis == "mean":
                result[name] = (value * seen.sum(2)[..., None]).sum(0), queries
            elif axis == "key" or axis == "sum":
                result[name] = value.sum(0), queries
            else:
                result[name] = value.sum(0), items
    return result


def _plus(a: Tensor, b: Tensor | None) -> Tensor:
    """a + b, the shorter one padded with 0 at the end of each axis: texts differ in length."""
    if b is None or a.shape == b.shape:
        return a if b is None else a + b
    shape = [max(x, y) for x, y in zip(a.shape, b.shape, strict=True)]
    total = a.new_zeros(shape)
    total[tuple(slice(0, size) for size in a.shape)] += a
    total[tuple(slice(0, size) for size in b.shape)] += b
    return total


def _slice(what: str, which: slice | int | None, size: int) -> slice:
    if which is None:
        return slice(0, size)
    if not isinstance(which, slice):
        first = _number(what, which, size)
        return slice(first, first + 1)
    if which.step not in (None, 1):
        raise bad_value(what, expected="a slice without a step", received=f"{which}")
    return which


def _number(what: str, which: object, size: int) -> int:
    """One of so many, counted from the start; below 0 it was counted from the end."""
    if isinstance(which, bool) or not isinstance(which, int):
        raise bad_type(what, expected="a number or a slice", received=repr(which))
    if not -size <= which < size:
        raise IndexError(f"{what} {which}: there are {size}")
    return which % size
