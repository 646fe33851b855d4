"""The record of one layer: what was measured in its last sequence, and means over all sequences.

A sequence may come in chunks: a prompt, then token after token from a cache. Chunks that continue each other are
joined, as if the sequence had been read at once. From the second sequence on, what was measured per query becomes a
mean per head.

Letters: B batch, H query heads, G kv heads, N queries, M keys, D head width of q and k, E head width of v,
W model width.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from typing import Any, Literal

import torch
from torch import Tensor

from regard.errors import bad_value, printable
from regard.heads.record.indices import index_of, slice_of
from regard.heads.record.sequences import SequenceRecord, joined, plus, remeasured, sums, weights_of
from regard.heads.record.signed_weights import check_term, refuse_signed, why_not_signed
from regard.heads.record.table import scalars
from regard.measures import Heatmap, Measure, MeasureLike, as_measures

__all__ = ["ROOM", "LayerRecord"]

ROOM = 2**24  # numbers of q, k and v of a layer that are kept for roles, of all sequences together


class LayerRecord:
    """One layer's attention. What was measured is there by name, such as `.entropy`: (B, H, N) after one sequence;
    after several, means per head (H,) over all queries that see a key, of which there are `.count`.

    Attributes:
        name, kind: the layer's name; "self" or "cross" attention.
        measures: what was asked for.
        text: the last sequence; `texts`: how many there were.
        sums: of each measure, the sum (H, ...) over all sequences but the last.
        counts_of_sums: how many queries (H,) each sum is over; "" counts those that see a key.
        uniform: the same measures for uniform weights on all visible keys, as one head: the baseline.
        earlier: sequences before the last that are kept for `roles`, as far as there is room (`ROOM`).
        evidence: what roles are decided by (`heads.analysis.evidence`), of sequences that are kept no more.
    """

    def __init__(self, name: str, kind: Literal["self", "cross"], measures: list[Measure]) -> None:
        self.name, self.kind, self.measures = name, kind, measures
        self.text: SequenceRecord | None = None
        self.texts = 0
        self.sums: dict[str, Tensor] = {}
        self.counts_of_sums: dict[str, Any] = {}
        self.uniform: LayerRecord | None = None
        self.earlier: list[SequenceRecord] = []
        self.evidence: Any = None
        self._last: dict[str, Any] | None = None
        self._means: dict[str, Any] | None = None
        self._last_sums: dict[str, tuple[Tensor, Tensor]] | None = None

    # Sizes

    @property
    def _sequence(self) -> SequenceRecord:
        assert self.text is not None
        return self.text

    @property
    def heads(self) -> int:
        """H"""
        return self._sequence.shape[1]

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B, H, N, M) of the last sequence."""
        return self.batch_size, self.heads, self.num_queries, self.num_keys

    @property
    def batch_size(self) -> int:
        """B of the last sequence."""
        return self._sequence.shape[0]

    @property
    def num_queries(self) -> int:
        """N of the last sequence, padding included."""
        return self._sequence.queries

    @property
    def num_keys(self) -> int:
        """M of the last sequence, padding and keys that a cache has dropped included."""
        return self._sequence.total

    @property
    def num_chunks(self) -> int:
        """In how many calls the last sequence was read: more than 1 for generation with a cache."""
        return len(self._sequence.pieces)

    # What was measured

    @property
    def axes(self) -> dict[str, str]:
        """The names of what was measured, each with the kind of its axis (see `measures.Measure`)."""
        return {name: axis for measure in self.measures for name, axis in measure.gives.items()}

    def measure_of(self, name: str) -> Measure:
        """The measure that gives a name, such as `Offsets` for "offsets"."""
        return next(measure for measure in self.measures if name in measure.gives)

    def has(self, name: str) -> bool:
        """Whether something was measured here."""
        return self.text is not None and name in self.last()

    @property
    def values(self) -> dict[str, Any]:
        """Everything that was measured, by name."""
        if self.texts == 1:
            return self.last()
        if self._means is None:
            self._means = {name: self.per_head(name) for name in self.axes if name in self._sums_of_last()}
        return self._means

    def last(self) -> dict[str, Any]:
        """What was measured in the last sequence, by name."""
        if self._last is None:
            gated = {name for measure in self.measures if self._is_gated(measure) for name in measure.gives}
            values = joined(self._sequence, self.measures)
            self._last = {name: value for name, value in values.items() if name not in gated}
        return self._last

    def scalars(self) -> dict[str, Tensor]:
        """The measures that are one number per head, (H,) each."""
        return scalars(self)

    def per_head(self, name: str) -> Tensor:
        """The mean (H,) of a measure per query, or the mean (H, ...) of another, over all sequences."""
        total, count = self._sums_of_last()[name]
        total, count = plus(total, self.sums.get(name)), count + self.counts_of_sums.get(name, 0)
        return total / count.clamp(min=1).view(-1, *[1] * (total.dim() - 1))

    def _is_gated(self, measure: Measure) -> bool:
        """Whether a measure needs the layer's output projection, and the heads' outputs did not enter it as they are (a
        gate or a norm is in between), or were not seen to."""
        if not measure.needs_out_weight or getattr(measure, "out_weight", None) is not None or self.text is None:
            return False
        return self.gated

    def _sums_of_last(self) -> dict[str, tuple[Tensor, Tensor]]:
        if self._last_sums is None:
            self._last_sums = sums(self._sequence, self.measures, self.last())
        return self._last_sums

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or "measures" not in self.__dict__:
            raise AttributeError(name)
        if name == "seen":  # Python drops the message of a property that raises AttributeError
            raise AttributeError("`seen` is per query, and there were several texts")
        values = self.values
        if name in values:
            return values[name]
        if name in self.axes and self.texts > 1 and name in self.last():
            raise AttributeError(f"{name!r} has no mean over the {self.texts} texts that were seen")
        if name in self.axes:
            measure = self.measure_of(name)
            needs = "the output projection's weight and the values"
            if self._is_gated(measure):
                needs = "heads' outputs that enter the output projection as they are, and "
                needs += self.why_not_projected() or "a gate or a norm is between them"
            if measure.needs_ids:
                needs = "token ids, and none were found among the model's inputs"
            if self.signed:
                needs = why_not_signed(measure) or needs
            raise AttributeError(f"{name!r} was not measured in {printable(self.name)}: it needs {needs}")
        measured = printable(", ".join(values) or "none")
        raise AttributeError(f"{name!r} was not measured in {printable(self.name)}; there are {measured}")

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)

    # Which queries count

    @property
    def seen(self) -> Tensor:
        """Which queries see a key, (B, H, N), after one sequence."""
        if self.texts > 1:
            raise AttributeError("`seen` is per query, and there were several texts")
        return self.last_seen()

    def last_seen(self) -> Tensor:
        """Which queries (B, H, N) of the last sequence see a key."""
        return torch.cat([piece.found.seen for piece in self._sequence.pieces], 2)

    def last_tokens(self) -> Tensor:
        """Which queries (B, H, N) of the last sequence count in means: those that see a key and are no padding."""
        return torch.cat([piece.counted for piece in self._sequence.pieces], 2)

    def last_padding(self) -> Tensor | None:
        """True for padding queries of the last sequence, (B, 1, N); None if there is no padding."""
        padding = self.query_padding
        return None if padding is None else padding[:, None]

    @property
    def query_padding(self) -> Tensor | None:
        """True for padding queries of the last sequence, (B, N); None if there is no padding."""
        return self._sequence.padding

    @property
    def key_padding(self) -> Tensor | None:
        """True for padding keys of the last sequence, (B, M); None if there is no padding."""
        return self._sequence.key_padding

    def last_counted(self) -> dict[str, Tensor]:
        """Which queries (B, H, N) count, for each measure that counts fewer than `last_tokens`."""
        pieces = self._sequence.pieces
        return {name: torch.cat([piece.found.counts[name] for piece in pieces], 2) for name in pieces[0].found.counts}

    @property
    def count(self) -> Tensor:
        """How many queries (H,) the means are taken over, in all sequences: those that see a key and are no padding."""
        return self.last_tokens().sum((0, 2)) + self.counts_of_sums.get("", 0)

    @property
    def counts(self) -> dict[str, Tensor]:
        """How many queries (H,) the mean of each measure is taken over."""
        counts = {name: count for name, (_, count) in self._sums_of_last().items()}
        return {name: count + self.counts_of_sums.get(name, 0) for name, count in counts.items()}

    # Recording

    def begin(self, text: SequenceRecord) -> None:
        """A new sequence begins: what was measured in the last one is added to the sums."""
        if self.text is not None:
            self.counts_of_sums[""] = self.count
            for name, (total, count) in self._sums_of_last().items():
                self.sums[name] = plus(total, self.sums.get(name))
                self.counts_of_sums[name] = count + self.counts_of_sums.get(name, 0)
            kept = self.text.keeps_calls() and not self.text.signed
            if kept and sum(x.kept for x in (*self.earlier, self.text, text)) <= ROOM:
                self.earlier.append(self.text)
        self.text = text
        self.texts += 1
        self.changed()

    def replace(self, text: SequenceRecord) -> None:
        """The last sequence was read again from the start, one token further."""
        self.text = text
        self.changed()

    def changed(self) -> None:
        """Something was added to the sequence: drop what was computed from it."""
        self._last = self._means = self._last_sums = None

    def snapshot(self) -> dict[str, Any]:
        """The state, to `restore` it if the call that is in progress raises."""
        state = dict(self.__dict__)
        for name in ("sums", "counts_of_sums"):
            state[name] = dict(state[name])
        state["earlier"] = list(self.earlier)
        if self.text is not None:
            state["text"] = copy(self.text)
            for name in ("pieces", "keys", "by_key"):
                setattr(state["text"], name, copy(getattr(self.text, name)))
        if self.uniform is not None:
            state["uniform"] = (self.uniform, self.uniform.snapshot())
        return state

    def restore(self, state: dict[str, Any]) -> None:
        """Go back to a `snapshot`."""
        state = dict(state)
        if isinstance(state["uniform"], tuple):
            state["uniform"], before = state["uniform"]
            state["uniform"].restore(before)
        self.__dict__.update(state)

    # What was kept: weights, queries, keys, values, outputs

    def weights(
        self,
        head: int | slice | Sequence[int] | None = None,
        rows: slice | int | None = None,
        cols: slice | int | None = None,
        batch: int | None = None,
        *,
        term: Literal[0, 1] | None = None,
    ) -> Tensor:
        """Exact weights of the last sequence, computed now from the q and k that were kept: (B, H, N, M), or a part.

        Args:
            head: one head (its axis is dropped), several, or all.
            rows, cols: queries and keys, as slices (or one, whose axis is dropped); all by default.
            batch: one item of the batch (its axis is dropped), or all.
            term: of a difference of two softmaxes the first (0) or the second (1), without its factor; by default the
                difference.
        """
        sequence = self._sequence
        self._check_kept()
        check_term(term, self.name, self.signed)
        if head is None or isinstance(head, slice):
            heads = list(range(self.heads)[slice(None) if head is None else head])
        else:
            several = [head] if isinstance(head, int) or not isinstance(head, Sequence) else head
            heads = [index_of("head", number, self.heads) for number in several]
        item = None if batch is None else index_of("batch", batch, self.batch_size)
        items = slice(None) if item is None else slice(item, item + 1)
        r0, r1, _ = slice_of("rows", rows, sequence.queries).indices(sequence.queries)
        c0, c1, _ = slice_of("cols", cols, sequence.total).indices(sequence.total)
        result = self._block(items, heads, slice(r0, max(r0, r1)), slice(c0, max(c0, c1)), term)
        if isinstance(cols, int):
            result = result[..., 0]
        if isinstance(rows, int):
            result = result[:, :, 0]
        result = result[:, 0] if isinstance(head, int) else result
        return result if batch is None else result[0]

    def _block(self, items: slice, heads: list[int], rows: slice, cols: slice, term: int | None = None) -> Tensor:
        """The weights of some items, heads, queries and keys, chunk by chunk."""
        sequence = self._sequence
        keys = torch.cat(sequence.keys, 2) if len(sequence.keys) > 1 else next(iter(sequence.keys), None)
        first, blocks = 0, []
        for piece in sequence.pieces:
            of_piece = slice(max(rows.start - first, 0), max(min(rows.stop - first, piece.queries), 0))
            first += piece.queries
            if of_piece.start >= of_piece.stop:
                continue
            block = weights_of(piece, keys, items, heads, of_piece, term)
            wide = block.new_zeros(*block.shape[:3], cols.stop - cols.start)
            inside = (piece.numbers >= cols.start) & (piece.numbers < cols.stop)
            wide[..., piece.numbers[inside] - cols.start] = block[..., inside]
            blocks.append(wide)
        if not blocks:  # no rows
            none = weights_of(sequence.pieces[0], keys, items, heads, slice(0, 0))
            return none.new_zeros(len(range(self.batch_size)[items]), len(heads), 0, cols.stop - cols.start)
        return torch.cat(blocks, 2)

    def measure(self, measures: MeasureLike | Iterable[MeasureLike], *, slots: bool = False) -> dict[str, Any]:
        """More measures of the last sequence, computed now from the q and k that were kept: `{name: result}`, as
        `measure` gives them. Measures that need token ids or values must be asked for when watching. With `slots`
        padding is measured like any token."""
        several = as_measures(measures)
        for measure in several:
            if measure.needs_ids or measure.needs_out_weight:
                raise bad_value(
                    "measures",
                    expected="those that need weights alone",
                    received=repr(measure),
                    remedy="watch(model, measures=[...])",
                )
            if self.signed and (why := why_not_signed(measure)):
                raise bad_value(
                    "measures", expected=f"what weights of {self.name} have", received=f"{measure!r}: it needs {why}"
                )
        self._check_kept()
        return remeasured(self._sequence, several, slots=slots)

    def pooled_weights(self, rows: int, cols: int) -> Tensor:
        """Sums of weights over at most (rows, cols) cells, (B, H, rows, cols), padding included. Needs keep="qk"."""
        return self.measure(Heatmap(rows, cols), slots=True)["heatmap"]

    @property
    def exact(self) -> bool:
        """Whether `weights` can be computed: q and k were kept."""
        return self.text is not None and not self.text.for_roles and self.text.keeps_calls()

    def _check_kept(self) -> None:
        if not self.exact:
            raise bad_value(
                "weights",
                expected='a watch with keep="qk"',
                received="one that kept nothing",
                remedy='watch(model, keep="qk")',
            )

    @property
    def signed(self) -> bool:
        """Whether weights may be below 0: they are the difference of two softmaxes. What needs probabilities (entropy,
        mean distance and offset, divergence, contribution, roles) is not measured then."""
        return self.text is not None and self.text.signed

    @property
    def keeps_values(self) -> bool:
        """Whether `q`, `k`, `v` and `output` were kept: keep="qkv", and attention that was not written by hand."""
        text = self.text
        if text is None or not text.values:
            return False
        return all(piece.output is not None and piece.call is not None for piece in text.pieces)

    @property
    def keeps_output(self) -> bool:
        """Whether `output` was kept."""
        return self.text is not None and all(piece.output is not None for piece in self.text.pieces)

    @property
    def has_input(self) -> bool:
        """Whether `input` was kept."""
        return self.text is not None and all(piece.input is not None for piece in self.text.pieces)

    def drop_values(self) -> None:
        """Free what `weights` and `measure` do not need: values, outputs, inputs, the output projection."""
        self._sequence.values.clear()
        for piece in self._sequence.pieces:
            piece.output = piece.input = piece.projection = None

    @property
    def q(self) -> Tensor:
        """The queries of the last sequence, after rotary and norms: (B, H, N, D). Needs keep="qkv"."""
        refuse_signed("q", self.name, self.signed)
        pieces = self._sequence.pieces
        asked = not self._sequence.for_roles
        return _concatenated("q", [piece.call.q if piece.call is not None and asked else None for piece in pieces])

    @property
    def k(self) -> Tensor:
        """The keys of the last sequence, after rotary and norms: (B, G, M, D). Needs keep="qkv"."""
        refuse_signed("k", self.name, self.signed)
        return _concatenated("k", [None] if self._sequence.for_roles else list(self._sequence.keys) or [None])

    @property
    def v(self) -> Tensor:
        """The values of the last sequence: (B, G, M, E). Needs keep="qkv"."""
        return _concatenated("v", [None] if self._sequence.for_roles else list(self._sequence.values) or [None])

    @property
    def output(self) -> Tensor:
        """The heads' outputs in the last sequence, before the output projection: (B, H, N, E). Needs keep="qkv"."""
        return _concatenated("output", [piece.output for piece in self._sequence.pieces])

    @property
    def input(self) -> Tensor:
        """What the queries of the last sequence were projected from: (B, N, W). Needs keep="qkv", and a module that is
        called with it."""
        tensor = _concatenated("input", [piece.input for piece in self._sequence.pieces])
        return tensor[None] if tensor.dim() == 2 else tensor

    # The output projection

    @property
    def projection(self) -> tuple[Tensor, Tensor | None] | None:
        """The weight (W, H * E) and bias (W,) of the output projection, if `projected` can be computed."""
        if self.why_not_projected() or not self.keeps_output:
            return None
        projection = self._sequence.pieces[0].projection
        assert projection is not None
        return projection.weight, projection.bias

    def why_not_projected(self) -> str:
        """Why `projected` cannot be computed, in words; "" if it can."""
        pieces = self._sequence.pieces
        reasons = ["none by a known name" if p.projection is None else p.projection.unknown for p in pieces]
        return next((reason for reason in reasons if reason), "")

    @property
    def gated(self) -> bool:
        """Whether a gate or a norm is between the heads' outputs and the output projection."""
        pieces = self._sequence.pieces
        return any(piece.projection is not None and not piece.projection.plain for piece in pieces)

    @property
    def entered(self) -> Tensor:
        """What entered the output projection in the last sequence, a slice for each head: (B, H, N, E). It is `output`,
        or what a gate or a norm made of it. Needs what `projected` needs."""
        output, reason = self.output, self.why_not_projected()
        if reason:
            raise bad_value(
                "projected",
                expected="an output projection (W, H * E) that the heads of this layer enter",
                received=reason,
            )
        pieces = self._sequence.pieces
        entered = [None if piece.projection is None else piece.projection.entered for piece in pieces]
        if all(x is None for x in entered):
            return output
        pairs = zip(pieces, entered, strict=True)
        return torch.cat([piece.output if x is None else x for piece, x in pairs], 2)  # type: ignore[misc]

    def projected(self, rows: slice | None = None) -> Tensor:
        """What each head adds to the layer's output: its slice of what entered the output projection, times its slice
        of the weight, (B, H, N, W). Their sum, plus the bias of the projection, is the projection's output.

        What entered are the heads' outputs, or what a gate or a norm made of them. (If a norm is over all heads, its
        scale is that of all heads.) Needs keep="qkv", and a projection of a known name that was seen to run."""
        entered = self.entered
        projection = self._sequence.pieces[0].projection
        assert projection is not None
        slices = projection.weight.unflatten(1, (self.heads, -1)).permute(1, 2, 0)  # (H, E, W)
        return entered[:, :, slice(None) if rows is None else rows].to(slices.dtype) @ slices

    def __repr__(self) -> str:
        return printable(f"Layer({self.name!r}, {self.kind}, {', '.join(self.axes)})")


def _concatenated(what: str, kept: Sequence[Tensor | None]) -> Tensor:
    """What was kept of the chunks, as one tensor."""
    if any(x is None for x in kept):
        raise bad_value(
            what,
            expected='a watch with keep="qkv"',
            received="one that did not keep it",
            remedy='watch(model, keep="qkv")',
        )
    return kept[0] if len(kept) == 1 else torch.cat(kept, -2)  # type: ignore[arg-type, return-value]
