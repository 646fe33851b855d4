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
from regard.heads.attention import Attention, evened
from regard.heads.record import Layer, Piece, Record, Text, measured
from regard.heads.senses import Senses
from regard.kernels import Call
from regard.masks import Keep
from regard.measures import MeasureLike, as_measures
from regard.measures.survey import DEFAULT
from regard.positions import DenseBias

__all__ = ["watch"]


class watch(Senses):
    """Watch every attention that a model computes within a `with` block.

    Args:
        model: any `nn.Module`: attention by torch's functions, `nn.MultiheadAttention`, regard, transformers, by hand.
        measures: names or objects of `regard.measures`; by default those of `measure`, and where token ids are found
            among the model's inputs, induction and duplicate. What cannot be measured in a layer is left out there.
        layers: names of the layers to watch, or a function of the name; all by default. "encoder.layer.1" stands for
            all that is below it.
        keep: "qk" keeps queries and keys, so that `seen[layer].weights(...)` gives any part of the weights later,
            exactly; "qkv" also what comes of them, `seen[layer].output`, which `ablate` can put in. O(N) memory.

    Gives a `Record`. Outputs, gradients and random numbers are those of the model unwatched; everything is put back
    when the block ends, whatever happened in it. A watch that saw nothing raises, and says why.

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
        self.baselines = [one for one in plain if "map" not in one.gives.values() and "links" not in one.gives]
        self.known: dict[Any, Any] = {}
        self.needs_output = keep == "qkv"
        self.keep, self.layers = keep, layers
        self.chosen = _chooser(layers)
        self.record = Record()
        self.refused: set[str] = set()  # layers that were seen and not wanted
        self.continued: int | None = None  # the forward in which self attention went on with a cache
        self.inside = False

    def __enter__(self) -> Record:
        if self.inside:
            raise bad_value("watch", expected="one block", received="the same watch entered twice",
                            remedy="a new watch(model) for each block")  # fmt: skip
        self.inside = True
        super().__enter__()
        return self.record

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        if error is None and not self.record.by_name:
            raise self._saw_nothing()

    def see(self, attention: Attention) -> None:
        """Measure one attention, as the next piece of a text or as a new one."""
        if not self.chosen(attention.layer):
            self.refused.add(attention.layer)
            return
        attention = _trimmed(attention)
        name, layer, goes_on = self._place(attention)
        if layer is None:
            layer = self.record.by_name[name] = Layer(name, attention.kind, self.measures)
        _, _, n, m = attention.shape
        text = layer.text
        if text is None or not goes_on:
            text = Text(attention.shape[:2], total=m, cache=attention.cache)
            text.ids = attention.ids if attention.kind == "self" and n == m else None
        elif attention.kind == "self":
            text.total += n
            if text.ids is not None:
                known = attention.ids is not None and attention.ids.shape[0] == text.ids.shape[0]
                text.ids = torch.cat([text.ids, attention.ids], 1) if known else None  # type: ignore[list-item]
        numbers = attention.numbers
        if numbers is None:
            numbers = torch.arange(text.total - m, text.total)
        else:
            text.total = max(text.total, int(numbers[-1]) + 1)
        found = measured(attention, self.measures, text, numbers)
        piece = Piece(n, numbers, found)
        self._remember(text, piece, attention, goes_on)
        again = not goes_on and layer.text is not None and _reads_again(layer.text, attention)
        if layer.uniform is None:
            layer.uniform = Layer(name, attention.kind, self.baselines)
        self._baseline(layer.uniform, attention, text, numbers, goes_on, again)
        _add(layer, text, piece, goes_on, again)

    def _baseline(
        self, uniform: Layer, attention: Attention, text: Text, numbers: Tensor, goes_on: bool, again: bool
    ) -> None:
        """What equal weights on all visible keys would give. Layers that have a mask in common share it."""
        ids = None if attention.ids is None else id(attention.ids)
        mask = None if attention.call is None else id(attention.call.mask)
        key = (attention.forward, mask, attention.shape[0], *attention.shape[2:], int(numbers.sum()), ids)
        if mask is None or key not in self.known:
            if len(self.known) > 8:
                self.known.clear()
            equal = measured(evened(attention), self.baselines, text, numbers)
            self.known[key] = equal, attention  # (which keeps the mask alive, so that its id is its own)
        own = uniform.text if goes_on else None
        if own is None:
            own = Text((text.shape[0], 1))
        own.total = text.total
        _add(uniform, own, Piece(attention.shape[2], numbers, self.known[key][0]), goes_on, again)

    def _place(self, attention: Attention) -> tuple[str, Layer | None, bool]:
        """The layer that an attention belongs to, and whether it goes on with its text."""
        base = attention.layer
        number = self.counts.get(base, 0)
        # Within one forward a module may be called again: to go on with a cache, or as another layer.
        for k in range(number, -1, -1):
            name = f"{base}#{k}" if k else base
            layer = self.record.by_name.get(name)
            if layer is not None and (k == number or number) and self._goes_on(layer, attention):
                self.counts[base] = max(number, k + 1)
                return name, layer, True
        name = f"{base}#{number}" if number else base
        self.counts[base] = number + 1
        return name, self.record.by_name.get(name), False

    def _goes_on(self, layer: Layer, attention: Attention) -> bool:
        """Whether the keys of an attention extend those that a layer has seen."""
        text = layer.text
        if text is None or layer.kind != attention.kind or text.shape != attention.shape[:2]:
            return False
        _, _, n, m = attention.shape
        if attention.kind == "cross":
            if self.continued != attention.forward or text.total != m:
                return False
            return attention.call is None or _same(attention.call.k[:, :, 0], text.first_keys)
        if n >= m:
            return False
        if attention.cache is not None or text.cache is not None:
            goes_on = attention.cache is text.cache and attention.numbers is not None
            goes_on = goes_on and int(attention.numbers[-1]) + 1 == text.total + n  # type: ignore[index]
        elif attention.call is None:  # by hand: no keys to compare
            goes_on = m == text.total + n
        else:
            before = attention.call.k[:, :, m - n - 1]
            goes_on = _same(before, text.last_key)
            if not goes_on and m == text.total + n and _reordered(before, text.last_key):
                raise bad_value(layer.name, expected="each text of the batch to go on where it was",
                                received="a cache whose texts changed places, as beam search does",
                                remedy="generate with num_beams=1, or watch model(ids) on the text that came out"
                                )  # fmt: skip
        if goes_on:
            self.continued = attention.forward
        return goes_on

    def _remember(self, text: Text, piece: Piece, attention: Attention, goes_on: bool) -> None:
        """What the next piece is compared with; and q, k and the output, if they are to be kept."""
        call, (_, _, n, m) = attention.call, attention.shape
        keeps = self.keep is not None or any("map" in one.gives.values() for one in self.measures)
        if self.keep == "qkv":
            piece.output = attention.output
        if call is None:
            piece.weights = attention.weights if keeps else None
            return
        if m:
            text.last_key = call.k[:, :, -1].clone()
            text.first_keys = call.k[:, :, 0].clone()
        if not keeps:
            return
        if attention.cache is not None:  # its keys are turned anew for every piece
            piece.call = replace(call, k=call.k.clone(), v=call.v[:, :, :0], dropout=None)
            return
        if attention.kind == "self" and goes_on:
            text.keys.append(call.k[:, :, m - n :].clone())
        elif not goes_on:
            own = m > n  # a part of a cache, which will be written to
            text.keys = [call.k.clone() if own else call.k]
        nothing = call.k[:, :, :0]
        piece.call = replace(call, k=nothing, v=nothing, dropout=None)

    def _saw_nothing(self) -> ValueError:
        frames = self.frames
        modules = list(frames.names)
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
        return ValueError(f"watch: expected attention inside the block, saw none: {why}")


def _add(layer: Layer, text: Text, piece: Piece, goes_on: bool, again: bool) -> None:
    """One more piece of a layer's text, or the first of another."""
    text.pieces.append(piece)
    if goes_on and layer.text is text:
        layer.changed()
    elif again:
        layer.replace(text)
    else:
        layer.begin(text)


def _reads_again(text: Text, attention: Attention) -> bool:
    """Whether a causal model reads the same text once more, one token further: generation without a cache."""
    call = attention.call
    _, _, n, m = attention.shape
    if attention.kind != "self" or n != m or m != text.total + 1 or text.shape != attention.shape[:2]:
        return False
    if call is None:
        ids = attention.ids
        return text.ids is not None and ids is not None and torch.equal(ids[:, :-1], text.ids)
    if call.mask is None or text.last_key is None:
        return False
    if not torch.allclose(call.k[:, :, m - 2], text.last_key, rtol=1e-3, atol=1e-4):  # other sizes round differently
        return False
    return not call.mask.block(call.tile(slice(None), slice(0, 1), slice(m - 1, m))).any()


def _same(a: Tensor, b: Tensor | None) -> bool:
    return b is not None and a.shape == b.shape and torch.equal(a, b)


def _reordered(a: Tensor, b: Tensor | None) -> bool:
    """Whether every item of a batch is another item of the last one."""
    if b is None or a.shape != b.shape:
        return False
    same = (a[:, None] == b[None]).flatten(2).all(-1)  # (B now, B before)
    return bool(same.any(1).all())


def _trimmed(attention: Attention) -> Attention:
    """Without the last keys, if no query may see them: a cache of fixed size is longer than the text."""
    _, _, n, m = attention.shape
    call = attention.call
    if attention.kind != "self" or n >= m or attention.cache is not None:
        return attention
    if call is None:
        assert attention.weights is not None
        used = attention.weights.flatten(0, 2).any(0).nonzero()
        last = int(used.max()) + 1 if used.numel() else m
        return attention if last == m else replace(attention, weights=attention.weights[..., :last])
    if call.mask is None or call.key_positions is not None or call.q_start != m - n:
        return attention
    visible = call.mask.block(call.whole())  # (1|B, 1|H, 1|N, M)
    used = visible.expand(*visible.shape[:3], m).flatten(0, 2).any(0).nonzero()
    last = int(used.max()) + 1 if used.numel() else m
    if last == m or last < n:
        return attention
    return replace(attention, call=_first_keys(call, last))


def _first_keys(call: Call, count: int) -> Call:
    """The same call with its first keys alone; the last query stands at the last of them."""
    assert call.mask is not None
    visible = call.mask.block(call.whole())
    biases = tuple(
        DenseBias(b.weight[..., :count] if b.weight.shape[3] > 1 else b.weight) if isinstance(b, DenseBias) else b
        for b in call.biases
    )
    n = call.shape[2]
    start = call.q_start if call.positions is None and call.q_start < count - n else count - n
    return replace(call, k=call.k[:, :, :count], v=call.v[:, :, :count], mask=Keep(visible[..., :count]), biases=biases,
                   q_start=start)  # fmt: skip


def _chooser(layers: str | Iterable[str] | Callable[[str], bool] | None) -> Callable[[str], bool]:
    if layers is None:
        return lambda name: True
    if callable(layers):
        return layers
    wanted = [layers] if isinstance(layers, str) else list(layers)
    if not all(isinstance(name, str) for name in wanted):
        raise bad_type("layers", expected="names of layers, or a function of the name", received=repr(wanted))
    return lambda name: any(name == one or name.startswith((f"{one}.", f"{one}#")) for one in wanted)
