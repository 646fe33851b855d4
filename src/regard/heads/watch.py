"""`watch`: record what every head of an unmodified model attends to while it runs.

Letters: B batch, H query heads, N queries, M keys.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Literal

import torch
from torch import nn

from regard.errors import bad_type, bad_value
from regard.heads.capture.cache_tracking import SequenceTracker, trimmed
from regard.heads.capture.capture import AttentionCapture
from regard.heads.capture.observed import ObservedCall
from regard.heads.module_names import applies_rotary
from regard.heads.record.record import LayerRecord, Record
from regard.heads.record.sequences import Chunk, SequenceRecord, measured_later, sees_all
from regard.heads.record.shared_planes import SharedPlanes
from regard.measures import Measure, MeasureLike, as_measures
from regard.measures.run import DEFAULT

__all__ = ["watch"]

MOST_FOR_ROLES = 2**23  # numbers of q, k and v of a text in a layer that are kept for `roles` if nothing is to be kept


class watch(AttentionCapture):
    """Watch every attention that a model computes within a `with` block.

    Args:
        model: any `nn.Module`: attention by torch's functions, `nn.MultiheadAttention`, regard, transformers, by hand.
        measures: names or objects of `regard.measures`; by default those of `measure`, and if token ids are found among
            the model's inputs, induction and duplicate. What cannot be measured in a layer is left out there.
        layers: names of the layers to watch, or a function of the name; all by default. "encoder.layer.1" stands for
            all that is below it.
        keep: "qk" keeps queries and keys, so that `seen[layer].weights(...)` computes any part of the weights later,
            exactly; "qkv" also keeps values and the heads' outputs, `seen[layer].output`, which `ablate` can patch in,
            and for `seen[layer].projected()`, what each head adds to the layer's output. O(N) memory.
        exact: call the attention functions of the model and measure beside them: outputs are those of the model
            unwatched bit for bit. By default, where nobody wants gradients, dropout or the weights, the attention is
            computed by regard's kernels in one pass with what is measured, which takes no longer than not to look.

    Returns a `Record`. Outputs and gradients are those of the model unwatched, to rounding, and random numbers are the
    same. What queries get that may see nothing is for the model's own function to say (0, NaN, a mean of values): it is
    called where there are any. Only the fast path of `nn.TransformerEncoder` is off, for nothing can
    be seen in it: outputs differ at padding, and for queries that may see nothing. Everything is restored when the
    block ends, also after an error. A watch that saw nothing raises, and says why. A layer whose attention could not be
    read is named in `seen.unseen`, with the reason.

    >>> import regard
    >>> layer = regard.MultiHeadAttention(16, num_heads=2)
    >>> with regard.watch(layer) as seen:
    ...     _ = layer(torch.randn(1, 5, 16), mask=regard.masks.Causal())
    >>> seen.layers
    ['MultiHeadAttention']
    >>> seen[0].entropy.shape
    torch.Size([1, 2, 5])
    """

    def __init__(
        self,
        model: nn.Module,
        measures: MeasureLike | Iterable[MeasureLike] | None = None,
        layers: str | Iterable[str] | Callable[[str], bool] | None = None,
        keep: Literal["qk", "qkv"] | None = None,
        exact: bool = False,
    ) -> None:
        super().__init__(model)
        self.computes = not exact
        if keep not in (None, "qk", "qkv"):
            raise bad_value("keep", expected='None, "qk" or "qkv"', received=repr(keep))
        self.measures = as_measures([*DEFAULT, "induction", "duplicate"] if measures is None else measures)
        # The uniform baseline is one head without values; maps and choices of it mean nothing.
        of_weights = [
            measure
            for measure in self.measures
            if not (measure.needs_out_weight or measure.needs_all_heads or measure.needs_scores)
        ]
        self.baselines = [measure for measure in of_weights if not {"map", "choice"} >= set(measure.gives.values())]
        self.planes = SharedPlanes()
        self.needs_values = any(_may_need_values(measure) for measure in self.measures)
        self.saved: dict[str, Any] = {}  # snapshots of layers before the outermost call `saved_in`
        self.saved_in = -1
        self.needs_output = keep == "qkv"
        self.needs_projection = self.needs_output or any(measure.needs_out_weight for measure in self.measures)
        self.frames.leaves = self.needs_projection
        self.keep, self.layers = keep, layers
        self.keeps = keep is not None or any("map" in measure.gives.values() for measure in self.measures)
        self.is_wanted = _filter(layers)
        self.record = Record()
        self.record.model = weakref.ref(model)
        self.record.unseen = self.unseen  # the same dict
        self.unwanted: set[str] = set()  # layers that ran and were not asked for
        self.tracker = SequenceTracker()
        self.inside = False

    def __enter__(self) -> Record:
        if self.inside:
            raise bad_value(
                "watch",
                expected="one block",
                received="the same watch entered twice",
                remedy="a new watch(model) for each block",
            )
        self.inside = True
        super().__enter__()
        return self.record

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        self.planes = SharedPlanes()
        if error is None and not self.record.by_name:
            raise self._saw_nothing()

    def see(self, attention: ObservedCall) -> Callable[[], bool] | None:
        """Measure one attention call, as the next chunk of a sequence or as a new sequence."""
        given, attention = attention, trimmed(attention)
        shared = self.planes.of(attention)
        attention.padding = shared.padding
        name, goes_on, again, total = self.tracker.place(attention)
        if not (self.is_wanted(attention.layer) or self.is_wanted(name)):
            self.unwanted.add(name)
            return None
        layer = self.record.by_name.get(name)
        self._save(name, layer)
        if layer is None:
            layer = self.record.by_name[name] = LayerRecord(name, attention.kind, self.measures)
        _, _, n, m = attention.shape
        text, ids = layer.text, attention.ids
        if text is None or not goes_on:
            text = SequenceRecord(attention.shape[:2])
            text.ids = shared.own_ids(ids) if attention.kind == "self" and n == m else None
        elif attention.kind == "self" and text.ids is not None:
            fits = ids is not None and ids.shape[0] == text.ids.shape[0]
            text.ids = torch.cat([text.ids, ids], 1) if fits else None  # type: ignore[list-item]
        text.total = total
        numbers = shared.numbers(attention, total)
        text.place_padding(attention, attention.padding)
        plane = shared.plane(attention, text, numbers, self.needs_values)
        measurements = measured_later(attention, self.measures, plane)
        piece = Chunk(
            n, shared.runs(attention, total), measurements, attention.padding, projection=attention.projection
        )
        self._keep(text, piece, attention, goes_on)
        if layer.uniform is None:
            layer.uniform = LayerRecord(name, attention.kind, self.baselines)
        baseline = shared.baseline(attention, self.baselines, text, plane)
        uniform = Chunk(n, piece.runs, baseline, attention.padding)
        _add(layer.uniform, _uniform_sequence(layer.uniform, text, goes_on), uniform, goes_on, again)
        _add(layer, text, piece, goes_on, again)
        given.output = attention.output
        return partial(sees_all, measurements)

    def not_seen(self, name: str, reason: str) -> None:
        if self.is_wanted(name):
            super().not_seen(name, reason)

    def _save(self, name: str, layer: LayerRecord | None) -> None:
        """Keep a snapshot of a layer as it was before this outermost call, in case the call raises."""
        if self.saved_in != self.frames.forwards:
            self.saved_in, self.saved = self.frames.forwards, {}
        if name not in self.saved:
            self.saved[name] = None if layer is None else layer.snapshot()

    def _failed(self) -> None:
        super()._failed()
        self.tracker.failed(self.frames.forwards)
        if self.saved_in != self.frames.forwards:
            return
        for name, snapshot in self.saved.items():
            if snapshot is None:
                self.record.by_name.pop(name, None)
            else:
                self.record.by_name[name].restore(snapshot)

    def _keep(self, text: SequenceRecord, piece: Chunk, attention: ObservedCall, goes_on: bool) -> None:
        """Store copies of q, k, v and the output, as far as they are to be kept."""
        call, (_, _, n, m) = attention.call, attention.shape
        if self.keep == "qkv" and attention.output is not None:
            piece.output = attention.output.clone()
            piece.input = None if attention.input is None else attention.input.clone()
            piece.rotary = applies_rotary(attention.module)
        if not self.keeps and not self._keeps_for_roles(text, attention):
            return
        if call is None:
            piece.weights = None if attention.weights is None else attention.weights.clone()
            return
        if attention.global_call is not None:
            call = attention.global_call()
        # Copies: what a model has in memory it may write over, a cache most of all.
        if attention.cache is not None:  # rotary is applied anew to its keys for every chunk
            piece.call = replace(call, q=call.q.clone(), k=call.k.clone(), v=call.v[:, :, :0], dropout=None)
            return
        if attention.kind == "self" or not goes_on:  # (the keys of cross attention are the same in every chunk)
            new = slice(m - n if goes_on else 0, m)
            text.keys.append(call.k[:, :, new].clone())
            if self.keep == "qkv" or text.for_roles:
                text.values.append(call.v[:, :, new].clone())
        nothing = call.k[:, :, :0]
        piece.call = replace(call, q=call.q.clone(), k=nothing, v=nothing, dropout=None)

    def _keeps_for_roles(self, text: SequenceRecord, attention: ObservedCall) -> bool:
        """Whether a chunk is kept for `roles`: self attention that is not too long, and not sharded over processes."""
        if text.pieces and not text.keeps_calls():
            return False
        call, weights = attention.call, attention.weights
        if call is not None:
            size = call.q.numel() + (call.k.numel() + call.v.numel()) * call.q.shape[2] // max(call.k.shape[2], 1)
        else:
            size = 0 if weights is None else weights.numel()
        text.for_roles, text.kept = True, text.kept + size
        whole = attention.cache is None and attention.global_call is None and attention.gather_heads is None
        if attention.kind == "self" and whole and text.kept <= MOST_FOR_ROLES:
            return True
        text.drop_calls()
        text.kept = 0
        return False

    def _saw_nothing(self) -> ValueError:
        frames = self.frames
        modules = frames.modules
        if self.unwanted:
            ran = ", ".join(sorted(self.unwanted)[:9])
            why = f"none of the layers that ran is among layers={self.layers!r}; there are {ran}"
        elif frames.elsewhere:
            why = "the model ran in another thread, and a watch sees the thread that began it"
        elif not frames.forwards and any(isinstance(m, torch.jit.ScriptModule) for m in modules):
            why = "it was traced or scripted by torch.jit, which shows nothing; watch the model that it was made of"
        elif not frames.forwards:
            why = "the model was not run inside the block"
        elif any(isinstance(m, torch.jit.ScriptModule) for m in modules):
            why = "parts of the model were traced or scripted by torch.jit, which shows nothing"
        elif any(type(m).__module__.startswith("torch.fx") or hasattr(m, "_compiled_fn") for m in modules):
            why = "the model was compiled or exported, which shows nothing; watch the model that it was made of"
        else:
            why = "the model ran, and computed no attention that a watch knows"
        if self.unseen:
            why = "; ".join(f"{name}: {reason}" for name, reason in list(self.unseen.items())[:3])
            why += f"; and {len(self.unseen) - 3} more" if len(self.unseen) > 3 else ""
        return ValueError(f"watch: expected attention inside the block, saw none: {why}")


def _add(layer: LayerRecord, text: SequenceRecord, piece: Chunk, goes_on: bool, again: bool) -> None:
    """Add a chunk to a layer's sequence, or begin a new one with it."""
    text.add(piece, layer.axes)
    if goes_on and layer.text is text:
        layer.changed()
    elif again:
        layer.replace(text)
    else:
        layer.begin(text)


def _uniform_sequence(uniform: LayerRecord, text: SequenceRecord, goes_on: bool) -> SequenceRecord:
    """The sequence of the uniform baseline, which has one head, beside that of a layer."""
    sequence = uniform.text if goes_on else None
    if sequence is None:
        sequence = SequenceRecord((text.shape[0], 1))
    sequence.total, sequence.key_padding = text.total, text.key_padding
    return sequence


def _may_need_values(measure: Measure) -> bool:
    """Whether a measure may read the values or the output projection: known of the package's own measures."""
    return not measure.shareable or not type(measure).__module__.startswith("regard.measures.")


def _filter(layers: str | Iterable[str] | Callable[[str], bool] | None) -> Callable[[str], bool]:
    if layers is None:
        return lambda name: True
    if callable(layers):
        return layers
    wanted = [layers] if isinstance(layers, str) else list(layers)
    if not all(isinstance(name, str) for name in wanted):
        raise bad_type("layers", expected="names of layers, or a function of the name", received=repr(wanted))
    return lambda name: any(name == prefix or name.startswith((f"{prefix}.", f"{prefix}#")) for prefix in wanted)
