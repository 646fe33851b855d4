"""Watch a model: what every head attends to, while it runs, unmodified.

Letters: B batch, H query heads, N queries, M keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from regard.errors import bad_type, bad_value
from regard.heads.capture.cache_tracking import SequenceTracker, trimmed
from regard.heads.capture.capture import AttentionCapture
from regard.heads.capture.observed import ObservedCall, evened
from regard.heads.record.record import LayerRecord, Record
from regard.heads.record.sequences import Chunk, SequenceRecord, measured, padding, runs
from regard.masks import Mask
from regard.measures import MeasureLike, as_measures
from regard.measures.run import DEFAULT

__all__ = ["watch"]


class watch(AttentionCapture):
    """Watch every attention that a model computes within a `with` block.

    Args:
        model: any `nn.Module`: attention by torch's functions, `nn.MultiheadAttention`, regard, transformers, by hand.
        measures: names or objects of `regard.measures`; by default those of `measure`, and where token ids are found
            among the model's inputs, induction and duplicate. What cannot be measured in a layer is left out there.
        layers: names of the layers to watch, or a function of the name; all by default. "encoder.layer.1" stands for
            all that is below it.
        keep: "qk" keeps queries and keys, so that `seen[layer].weights(...)` gives any part of the weights later,
            exactly; "qkv" also values and what comes of them, `seen[layer].output`, which `ablate` can put in, and
            `seen[layer].projected()`, what each head adds to the layer's output. O(N) memory.

    Gives a `Record`. Outputs and gradients are those of the model unwatched, to rounding, and random numbers are the
    same. `nn.MultiheadAttention` goes its fast path where it would unwatched: queries that may see nothing are NaN
    there, and 0 before the output projection elsewhere. The fast path of `nn.TransformerEncoder` alone is off, for
    nothing can be seen in it: outputs at padding differ, and of queries that may see nothing. Everything is put back
    when the block ends, whatever happened in it. A watch that saw nothing raises, and says why. A layer that computed
    attention which could not be read is named in `seen.unseen`, with the reason.

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
    ) -> None:
        super().__init__(model)
        if keep not in (None, "qk", "qkv"):
            raise bad_value("keep", expected='None, "qk" or "qkv"', received=repr(keep))
        self.measures = as_measures([*DEFAULT, "induction", "duplicate"] if measures is None else measures)
        # A baseline is of one head, of no values, and not a picture.
        plain = [one for one in self.measures if not (one.needs_out_weight or one.needs_all_heads)]
        self.baselines = [one for one in plain if not {"map", "choice"} >= set(one.gives.values())]
        self.known: dict[Any, Any] = {}
        self.saved: dict[str, Any] = {}
        self.saved_of = -1
        self.needs_output = keep == "qkv"
        self.needs_projection = self.needs_output or any(one.needs_out_weight for one in self.measures)
        self.keep, self.layers = keep, layers
        self.chosen = _chooser(layers)
        self.record = Record()
        self.record.unseen = self.unseen  # one and the same
        self.refused: set[str] = set()  # layers that were seen and not wanted
        self.places = SequenceTracker()
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
        if error is None and not self.record.by_name:
            raise self._saw_nothing()

    def see(self, attention: ObservedCall) -> None:
        """Measure one attention, as the next piece of a text or as a new one."""
        attention = trimmed(attention)
        attention.padding = padding(attention)
        name, goes_on, again, total = self.places.place(attention)
        if not (self.chosen(attention.layer) or self.chosen(name)):
            self.refused.add(name)
            return
        layer = self.record.by_name.get(name)
        self._save(name, layer)
        if layer is None:
            layer = self.record.by_name[name] = LayerRecord(name, attention.kind, self.measures)
        _, _, n, m = attention.shape
        text, ids = layer.text, attention.ids
        if text is None or not goes_on:
            text = SequenceRecord(attention.shape[:2])
            text.ids = ids if attention.kind == "self" and n == m else None
        elif attention.kind == "self" and text.ids is not None:
            known = ids is not None and ids.shape[0] == text.ids.shape[0]
            text.ids = torch.cat([text.ids, ids], 1) if known else None  # type: ignore[list-item]
        text.total = total
        numbers = attention.numbers
        if numbers is None:
            numbers = torch.arange(total - m, total, device=attention.device)
        text.place_padding(attention, attention.padding)
        found = measured(attention, self.measures, text, numbers)
        piece = Chunk(n, runs(numbers), found, attention.padding, projection=attention.projection)
        self._remember(text, piece, attention, goes_on)
        if layer.uniform is None:
            layer.uniform = LayerRecord(name, attention.kind, self.baselines)
        self._baseline(layer.uniform, attention, text, numbers, goes_on, again)
        _add(layer, text, piece, goes_on, again)

    def not_seen(self, name: str, reason: str) -> None:
        if self.chosen(name):
            super().not_seen(name, reason)

    def _baseline(
        self,
        uniform: LayerRecord,
        attention: ObservedCall,
        text: SequenceRecord,
        numbers: Tensor,
        goes_on: bool,
        again: bool,
    ) -> None:
        """What equal weights on all visible keys would give. Layers that have a mask in common share it."""
        ids = None if attention.ids is None else attention.ids.data_ptr()
        mask = None if attention.call is None else _known_by(attention.call.mask)
        key = (attention.forward, mask, attention.shape[0], *attention.shape[2:], int(numbers.sum()), ids)
        if mask is None or key not in self.known:
            if len(self.known) > 8:
                self.known.clear()
            equal = measured(evened(attention), self.baselines, text, numbers)
            self.known[key] = equal, attention  # (which keeps the mask alive, so that its place in memory is its own)
        own = uniform.text if goes_on else None
        if own is None:
            own = SequenceRecord((text.shape[0], 1))
        own.total, own.key_padding = text.total, text.key_padding
        piece = Chunk(attention.shape[2], runs(numbers), self.known[key][0], attention.padding)
        _add(uniform, own, piece, goes_on, again)

    def _save(self, name: str, layer: LayerRecord | None) -> None:
        """Remember how a layer was before this outermost call, in case that it raises."""
        if self.saved_of != self.frames.forwards:
            self.saved_of, self.saved = self.frames.forwards, {}
        if name not in self.saved:
            self.saved[name] = None if layer is None else layer.snapshot()

    def _failed(self) -> None:
        super()._failed()
        self.places.failed(self.frames.forwards)
        if self.saved_of != self.frames.forwards:
            return
        for name, before in self.saved.items():
            if before is None:
                self.record.by_name.pop(name, None)
            else:
                self.record.by_name[name].restore(before)

    def _remember(self, text: SequenceRecord, piece: Chunk, attention: ObservedCall, goes_on: bool) -> None:
        """q, k and the output, if they are to be kept."""
        call, (_, _, n, m) = attention.call, attention.shape
        keeps = self.keep is not None or any("map" in one.gives.values() for one in self.measures)
        if self.keep == "qkv" and attention.output is not None:
            piece.output = attention.output.clone()
            piece.input = None if attention.input is None else attention.input.clone()
        if not keeps:
            return
        if call is None:
            piece.weights = None if attention.weights is None else attention.weights.clone()
            return
        if attention.global_call is not None:
            call = attention.global_call()
        # Copies: what a model has in memory it may write over, a cache most of all.
        if attention.cache is not None:  # its keys are turned anew for every piece
            piece.call = replace(call, q=call.q.clone(), k=call.k.clone(), v=call.v[:, :, :0], dropout=None)
            return
        if attention.kind == "self" or not goes_on:  # (what is looked at across is the same in every piece)
            new = slice(m - n if goes_on else 0, m)
            text.keys.append(call.k[:, :, new].clone())
            if self.keep == "qkv":
                text.values.append(call.v[:, :, new].clone())
        nothing = call.k[:, :, :0]
        piece.call = replace(call, q=call.q.clone(), k=nothing, v=nothing, dropout=None)

    def _saw_nothing(self) -> ValueError:
        frames = self.frames
        modules = frames.modules
        if self.refused:
            ran = ", ".join(sorted(self.refused)[:9])
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
    """One more piece of a layer's text, or the first of another."""
    text.add(piece, layer.axes)
    if goes_on and layer.text is text:
        layer.changed()
    elif again:
        layer.replace(text)
    else:
        layer.begin(text)


def _known_by(mask: Mask | None) -> Any:
    """What a mask is known by: what it says of itself, and where its tensors are."""
    return (repr(mask), *(tensor.data_ptr() for tensor in mask.tensors())) if mask is not None else "none"


def _chooser(layers: str | Iterable[str] | Callable[[str], bool] | None) -> Callable[[str], bool]:
    if layers is None:
        return lambda name: True
    if callable(layers):
        return layers
    wanted = [layers] if isinstance(layers, str) else list(layers)
    if not all(isinstance(name, str) for name in wanted):
        raise bad_type("layers", expected="names of layers, or a function of the name", received=repr(wanted))
    return lambda name: any(name == one or name.startswith((f"{one}.", f"{one}#")) for one in wanted)
