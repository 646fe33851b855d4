"""What was seen: a record of every layer, from one forward or from many.

A layer's text may come in pieces: a prompt, then token after token from a cache. Pieces that continue each other are
joined to one map, as if the whole had been read at once. A second text begins a second sequence; from then on what was
measured per query becomes a mean per head.

Letters: B batch, H query heads, N queries, M keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from regard.errors import bad_type, bad_value, printable
from regard.heads.record.sequences import SequenceRecord, joined, plus, remeasured, sums, weights_of
from regard.heads.record.table import Table, table
from regard.measures import Heatmap, Measure, MeasureLike, as_measures, rollout

__all__ = ["LayerRecord", "Record"]

DENSE = 2048  # tokens up to which rollout builds dense maps


class LayerRecord:
    """One layer's attention: what was measured by name, such as `.entropy`, (B, H, N) after one text; after several,
    means per head (H,) over all queries that see a key; how many these are is in `.count`."""

    def __init__(self, name: str, kind: Literal["self", "cross"], measures: list[Measure]) -> None:
        self.name, self.kind, self.measures = name, kind, measures
        self.text: SequenceRecord | None = None
        self.texts = 0
        self.sums: dict[str, Tensor] = {}
        self.before: dict[str, Any] = {}  # how many queries (H,) those sums are over; "" those that see a key
        self.uniform: LayerRecord | None = None  # what equal weights on all visible keys would give, as one head
        self._last: dict[str, Any] | None = None
        self._means: dict[str, Any] | None = None
        self._added: dict[str, tuple[Tensor, Tensor]] | None = None

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
    def shape(self) -> tuple[int, int, int, int]:
        """(B, H, N, M) of the last text."""
        assert self.text is not None
        return *self.text.shape, self.text.queries, self.text.total

    @property
    def in_chunks(self) -> bool:
        """Whether the last text was read in several calls, by a cache."""
        return self.text is not None and len(self.text.pieces) > 1

    @property
    def padding(self) -> tuple[Tensor | None, Tensor | None]:
        """True for padding queries (B, N) and for padding keys (B, M) of the last text; None if there is no padding."""
        assert self.text is not None
        return self.text.padding, self.text.key_padding

    def pooled_weights(self, rows: int, cols: int) -> Tensor:
        """Sums of weights over at most (rows, cols) cells, (B, H, rows, cols), padding included. Needs keep="qk"."""
        assert self.text is not None
        self._check_kept()
        return remeasured(self.text, [Heatmap(rows, cols)], slots=True)["heatmap"]

    def drop_values(self) -> None:
        """Free what `weights` does not need: values, outputs, inputs and projections."""
        assert self.text is not None
        self.text.values.clear()
        for piece in self.text.pieces:
            piece.output = piece.input = piece.projection = None

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
            gated = {name for one in self.measures if self._is_gated(one) for name in one.gives}
            values = joined(self.text, self.measures)
            self._last = {name: value for name, value in values.items() if name not in gated}
        return self._last

    def _is_gated(self, measure: Measure) -> bool:
        """Whether a measure took the layer's projection for what values go through, and more became of the heads'
        outputs before it: a gate, a norm; or nobody saw."""
        if not measure.needs_out_weight or getattr(measure, "out_weight", None) is not None or self.text is None:
            return False
        return any(piece.projection is not None and not piece.projection.plain for piece in self.text.pieces)

    def _sums(self) -> dict[str, tuple[Tensor, Tensor]]:
        if self._added is None:
            assert self.text is not None
            self._added = sums(self.text, self.measures, self.last())
        return self._added

    def last_seen(self) -> Tensor:
        """Which queries (B, H, N) of the last text see a key."""
        assert self.text is not None
        return torch.cat([piece.found.seen for piece in self.text.pieces], 2)

    def last_tokens(self) -> Tensor:
        """Which queries (B, H, N) of the last text count in means: those that see a key, but for padding."""
        assert self.text is not None
        return torch.cat([piece.counted for piece in self.text.pieces], 2)

    def last_padding(self) -> Tensor | None:
        """Which queries (B, 1, N) of the last text are padding, where some are."""
        assert self.text is not None
        padding = self.text.padding
        return None if padding is None else padding[:, None]

    def last_counted(self) -> dict[str, Tensor]:
        """The same for measures that count fewer queries."""
        assert self.text is not None
        names = self.text.pieces[0].found.counts
        return {name: torch.cat([piece.found.counts[name] for piece in self.text.pieces], 2) for name in names}

    @property
    def count(self) -> Tensor:
        """How many queries (H,) the means are taken over, in all texts: those that saw a key, but for padding."""
        return self.last_tokens().sum((0, 2)) + self.before.get("", 0)

    @property
    def counts(self) -> dict[str, Tensor]:
        """How many queries (H,) the means of each measure per query are taken over."""
        return {name: count + self.before.get(name, 0) for name, (_, count) in self._sums().items()}

    def per_head(self, name: str) -> Tensor:
        """The mean (H,) of a measure per query, or the mean (H, ...) of another, over everything that was seen."""
        total, count = self._sums()[name]
        total, count = plus(total, self.sums.get(name)), count + self.before.get(name, 0)
        return total / count.clamp(min=1).view(-1, *[1] * (total.dim() - 1))

    def begin(self, text: SequenceRecord) -> None:
        """A new sequence: what the last one gave is summed up."""
        if self.text is not None:
            self.before[""] = self.count
            for name, (total, count) in self._sums().items():
                self.sums[name] = plus(total, self.sums.get(name))
                self.before[name] = count + self.before.get(name, 0)
        self.text = text
        self.texts += 1
        self.changed()

    def replace(self, text: SequenceRecord) -> None:
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
        self._last = self._means = self._added = None

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
            if self._is_gated(one):
                needs = "heads' outputs that enter the output projection as they are, and "
                needs += self.why_not_projected() or "a gate or a norm is between them"
            if one.needs_ids:
                needs = "token ids, and none were found among the model's inputs"
            raise AttributeError(f"{name!r} was not measured in {printable(self.name)}: it needs {needs}")
        there = printable(", ".join(values) or "none")
        raise AttributeError(f"{name!r} was not measured in {printable(self.name)}; there are {there}")

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
        self._check_kept()
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

    def measure(self, measures: MeasureLike | Iterable[MeasureLike]) -> dict[str, Any]:
        """More measures of the last text, taken now from the q and k that were kept: `{name: result}`, as `measure`
        gives them. Those that need token ids or values have to be asked for when watching."""
        several = as_measures(measures)
        for one in several:
            if one.needs_ids or one.needs_out_weight:
                raise bad_value(
                    "measures",
                    expected="those that need weights alone",
                    received=repr(one),
                    remedy="watch(model, measures=[...])",
                )
        assert self.text is not None
        self._check_kept()
        return remeasured(self.text, several)

    @property
    def exact(self) -> bool:
        """Whether any part of the weights can be had now: q and k were kept."""
        pieces = [] if self.text is None else self.text.pieces
        return bool(pieces) and all(piece.call is not None or piece.weights is not None for piece in pieces)

    @property
    def keeps_values(self) -> bool:
        """Whether `q`, `k`, `v` and `output` are there: keep="qkv", of a call that showed them."""
        text = self.text
        return (
            text is not None
            and bool(text.values)
            and all(p.output is not None and p.call is not None for p in text.pieces)
        )

    @property
    def has_input(self) -> bool:
        """Whether `input` is there."""
        return self.text is not None and all(piece.input is not None for piece in self.text.pieces)

    def _check_kept(self) -> None:
        if not self.exact:
            raise bad_value(
                "weights",
                expected='a watch with keep="qk"',
                received="one that kept nothing",
                remedy='watch(model, keep="qk")',
            )

    @property
    def output(self) -> Tensor:
        """The heads' outputs in the last text, before the output projection: (B, H, N, E). Needs keep="qkv"."""
        assert self.text is not None
        return _whole("output", [piece.output for piece in self.text.pieces])

    @property
    def input(self) -> Tensor:
        """What the queries of the last text were made of: (B, N, W). Needs keep="qkv", and a module that is handed
        it."""
        assert self.text is not None
        parts = [piece.input for piece in self.text.pieces]
        whole = _whole("input", parts)
        return whole[None] if whole.dim() == 2 else whole

    @property
    def q(self) -> Tensor:
        """The queries of the last text as they meet the keys: (B, H, N, D). Needs keep="qkv"."""
        assert self.text is not None
        return _whole("q", [None if piece.call is None else piece.call.q for piece in self.text.pieces])

    @property
    def k(self) -> Tensor:
        """The keys of the last text as they meet the queries: (B, G, M, D). Needs keep="qkv"."""
        assert self.text is not None
        return _whole("k", list(self.text.keys) or [None])

    @property
    def v(self) -> Tensor:
        """The values of the last text: (B, G, M, E). Needs keep="qkv"."""
        assert self.text is not None
        return _whole("v", list(self.text.values) or [None])

    @property
    def projection(self) -> tuple[Tensor, Tensor | None] | None:
        """The weight (W, H * E) and bias (W,) of the output projection, where `projected` knows what each head adds."""
        if self.why_not_projected() or not self.keeps_output:
            return None
        assert self.text is not None
        found = self.text.pieces[0].projection
        assert found is not None
        return found.weight, found.bias

    @property
    def keeps_output(self) -> bool:
        """Whether `output` is there."""
        return self.text is not None and all(piece.output is not None for piece in self.text.pieces)

    def why_not_projected(self) -> str:
        """Why it is not known what each head adds, in words; "" where it is."""
        assert self.text is not None
        why = ["none by a known name" if p.projection is None else p.projection.unknown for p in self.text.pieces]
        return next((words for words in why if words), "")

    def projected(self, rows: slice | None = None) -> Tensor:
        """What each head adds to the layer's output: its slice of what entered the output projection, times its slice
        of the weight, (B, H, N, W). Their sum, and the projection's bias, are what the projection gave.

        What entered are the heads' outputs, or what a gate or a norm made of them. (Where a norm is over all heads, its
        scale is that of all of them.) Needs keep="qkv", and a projection that is known by its name and was seen to
        run."""
        entered = self.entered
        assert self.text is not None and self.text.pieces[0].projection is not None
        slices = self.text.pieces[0].projection.weight.unflatten(1, (self.heads, -1)).permute(1, 2, 0)  # (H, E, W)
        return entered[:, :, slice(None) if rows is None else rows].to(slices.dtype) @ slices

    @property
    def entered(self) -> Tensor:
        """What entered the output projection in the last text, a slice for each head: (B, H, N, E). It is `output`, or
        what a gate or a norm made of it. Needs what `projected` needs."""
        assert self.text is not None
        output, why = self.output, self.why_not_projected()
        if why:
            raise bad_value(
                "projected", expected="an output projection (W, H * E) that the heads of this layer enter", received=why
            )
        parts = [None if piece.projection is None else piece.projection.entered for piece in self.text.pieces]
        if all(part is None for part in parts):
            return output
        pairs = zip(self.text.pieces, parts, strict=True)
        return torch.cat([piece.output if part is None else part for piece, part in pairs], 2)  # type: ignore[misc]

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
            block = weights_of(piece, keys, items, heads, own)
            wide = block.new_zeros(*block.shape[:3], cols.stop - cols.start)
            inside = (piece.numbers >= cols.start) & (piece.numbers < cols.stop)
            wide[..., piece.numbers[inside] - cols.start] = block[..., inside]
            blocks.append(wide)
        if not blocks:  # no rows: those of the first piece, and none of them
            return weights_of(text.pieces[0], keys, items, heads, slice(0, 0))[..., :0].new_zeros(
                len(range(text.shape[0])[items]), len(heads), 0, cols.stop - cols.start
            )
        return torch.cat(blocks, 2)

    def __repr__(self) -> str:
        return printable(f"Layer({self.name!r}, {self.kind}, {', '.join(self.axes)})")


class Record:
    """What `watch` saw. `seen.layers` are the names, in the order in which they were called; `seen[name]`, or by
    number, is one `LayerRecord`. `seen.unseen` names the layers that computed attention which the watch could not read,
    each with the reason. `seen.tokens` may be set to the text's tokens, in words: pictures are labelled with them.

    In a notebook a record shows itself, as a page."""

    shown_by: ClassVar[Callable[[Record], str] | None] = None  # by `regard.draw`, which leans on this file

    def __init__(self) -> None:
        self.by_name: dict[str, LayerRecord] = {}
        self.unseen: dict[str, str] = {}  # layers that computed attention which could not be read: why, in words
        self.tokens: Any = None  # a list; a list for each text of a batch ("": padding); or a pair (source, target)
        self.generated: Any = None  # what the model wrote, where `look` had it: a text, or a list of them for a batch

    def _repr_html_(self) -> str | None:
        return None if Record.shown_by is None or not self.by_name else Record.shown_by(self)

    @property
    def layers(self) -> list[str]:
        """The names of the layers, in the order in which they were first called."""
        return list(self.by_name)

    def __getitem__(self, layer: str | int) -> LayerRecord:
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

    def only(self, layer: str | int) -> Record:
        """A record of one layer alone, which both share."""
        alone, wanted = Record(), self[layer]
        alone.by_name[wanted.name] = wanted
        return alone

    def __len__(self) -> int:
        return len(self.by_name)

    def __iter__(self) -> Iterator[LayerRecord]:
        return iter(self.by_name.values())

    def __contains__(self, layer: object) -> bool:
        """Whether `seen[layer]` is there."""
        if isinstance(layer, LayerRecord):
            return any(layer is one for one in self)
        try:
            return isinstance(self[layer], LayerRecord)  # type: ignore[index]
        except (KeyError, IndexError, TypeError):
            return False

    def __repr__(self) -> str:
        kinds = [layer.kind for layer in self]
        cross = f", {kinds.count('cross')} of them cross" if "cross" in kinds else ""
        unseen = f"; not seen: {self.unseen_names()}" if self.unseen else ""
        differ = self.texts_differ()
        return f"Record of {len(kinds)} layers{cross}{unseen}" + (f"; {differ}" if differ else "")

    def texts_differ(self) -> str:
        """In words, where layers differ in how many texts they had; nothing where they do not. Some models fold parts
        of a text into the batch (windows of an image), some run a layer more often than another (an encoder once)."""
        several = {
            "texts in a batch": {layer.text.shape[0] for layer in self if layer.text is not None},
            "batches": {layer.texts for layer in self},
        }
        said = [f"from {min(n)} to {max(n)} {what}" for what, n in several.items() if len(n) > 1]
        return f"layers had {' and '.join(said)}" if said else ""

    def unseen_names(self, most: int = 5) -> str:
        """The names of the layers that could not be read, `most` of them and how many more."""
        names = list(self.unseen)
        return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")

    def rollout(self) -> Tensor:
        """Attention rollout (Abnar & Zuidema 2020) through the layers of self attention, (B, N, N): how much of each
        input token is in each output token. Needs keep="qk" and a text short enough for dense maps."""
        layers = [layer for layer in self if layer.kind == "self"]
        sizes = {(layer.text.queries, layer.text.total) for layer in layers if layer.text is not None}
        if len(sizes) != 1 or not all(n == m for n, m in sizes):
            raise bad_value("rollout", expected="self attention of one text in all layers", received=f"sizes {sizes}")
        if len({layer.text.shape[0] for layer in layers if layer.text is not None}) > 1:
            raise bad_value("rollout", expected="the same texts in all layers", received=self.texts_differ())
        n = next(iter(sizes))[0]
        if n > DENSE:
            raise bad_value("rollout", expected=f"at most {DENSE} tokens, for it builds dense maps", received=f"{n}")
        return rollout([layer.weights() for layer in layers])

    # Functions of a record, at hand. (Those in other files lean on this one, so they are imported when called.)

    def table(self) -> Table:
        """A row for each layer and head: every scalar measure, as a mean over queries."""
        return table(self)

    def roles(self, **options: Any) -> Any:
        """The role of each head, or none. See `heads.roles.roles`."""
        from regard.heads.analysis.roles import roles

        return roles(self, **options)

    def save(self, path: Any) -> None:
        """Write it to a file. See `heads.store`."""
        from regard.heads.record.record_io import save

        save(self, path)

    @staticmethod
    def load(path: Any) -> Record:
        """Read one that was saved."""
        from regard.heads.record.record_io import load

        return load(path)


def _whole(what: str, parts: Sequence[Tensor | None]) -> Tensor:
    """What was kept of the pieces, as one."""
    if any(part is None for part in parts):
        raise bad_value(
            what,
            expected='a watch with keep="qkv"',
            received="one that did not keep it",
            remedy='watch(model, keep="qkv")',
        )
    return torch.cat(parts, -2)  # type: ignore[arg-type]


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
