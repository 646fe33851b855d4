"""Run a model without some of its heads, or with the outputs of another run in their place.

Letters: B batch, H query heads, N queries, E head width of v.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from numbers import Integral
from types import TracebackType
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from regard.errors import bad_type, bad_value, shape_of
from regard.heads.capture.cache_tracking import SequenceTracker, trimmed
from regard.heads.capture.capture import AttentionCapture
from regard.heads.capture.observed import ObservedCall
from regard.heads.record.record import Record
from regard.heads.record.sequences import padding

__all__ = ["Changes", "Head", "Heads", "ablate", "by_layer"]


class Head(Protocol):
    """One head, by the name of its layer and its number in it, such as a `Role`."""

    layer: str
    head: int


Heads = Mapping[Any, Iterable[int]] | Iterable[Head]  # numbers by layers, or heads one by one


class Changes(AttentionCapture):
    """Base class for changing heads' outputs. Layers are named as `watch` names them, or numbered in call order."""

    changes = True

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.order: list[str] = []  # layers, in the order in which they were first called
        self.tracker = SequenceTracker(strict=False)
        self.goes_on = False  # whether the last attention call continued its layer's sequence from a cache
        self.inside = False

    def __enter__(self) -> Any:
        if self.inside:
            raise bad_value(
                type(self).__name__,
                expected="one block",
                received="the same one entered twice",
                remedy="a new one for each block",
            )
        self.inside = True
        return super().__enter__()

    def see(self, attention: ObservedCall) -> None:
        """Name the attention's layer as `watch` does."""
        attention.layer, self.goes_on, _, _ = self.tracker.place(trimmed(attention))
        if attention.layer not in self.order:
            self.order.append(attention.layer)

    def _failed(self) -> None:
        super()._failed()
        self.tracker.failed(self.frames.forwards)


class ablate(Changes):
    """Replace the outputs of some heads of a model within a `with` block. Afterwards the model is as before.

    Args:
        model: any model that `watch` can see.
        heads: for each layer, by name or by number in call order, the heads to change; or heads one by one, as
            `seen.roles().of("induction")` gives them.
        mode: "zero": their outputs become 0. "mean": the mean of their outputs over all queries that are no padding, of
            `source` if there is one, else of what the model has read so far: of the same call, and if it continues from
            a cache, of the calls before it. "patch": their outputs in `source`, query by query.
        source: a record of another run, watched with keep="qkv".

    Gradients flow through what is left. The weights that `nn.MultiheadAttention` returns are those of the model.

    >>> import regard
    >>> layer = regard.MultiHeadAttention(16, num_heads=2, out_bias=False)
    >>> x = torch.randn(1, 5, 16)
    >>> with ablate(layer, {0: [0, 1]}):
    ...     layer(x).abs().max()
    tensor(0., grad_fn=<MaxBackward1>)
    """

    def __init__(
        self,
        model: nn.Module,
        heads: Heads,
        mode: Literal["zero", "mean", "patch"] = "zero",
        source: Record | None = None,
    ) -> None:
        super().__init__(model)
        heads = by_layer(heads)
        if mode not in ("zero", "mean", "patch"):
            raise bad_value("mode", expected='"zero", "mean" or "patch"', received=repr(mode))
        if mode == "patch" and source is None:
            raise bad_value(
                "source",
                expected='a record of another run for mode="patch"',
                received="none",
                remedy='watch(model, keep="qkv")',
            )
        if source is not None and not isinstance(source, Record):
            raise bad_type("source", expected="a record that `watch` gave", received=type(source).__name__)
        if source is not None and mode == "zero":
            raise bad_value(
                "source", expected='none for mode="zero"', received="a record", remedy='mode="mean" or mode="patch"'
            )
        if not all(isinstance(layer, (str, int)) and not isinstance(layer, bool) for layer in heads):
            raise bad_type("heads", expected="layers by name or by number", received=repr(list(heads)))
        self.heads = {layer: head_numbers(f"heads of {layer!r}", which, alone=True) for layer, which in heads.items()}
        self.mode, self.source = mode, source
        self.tracker.strict = mode == "patch"
        self.met: set[str | int] = set()  # keys of `heads` whose layer was called
        self.queries_so_far: dict[str, int] = {}  # of a patched sequence, by layer
        # by layer: the sum of the outputs (H, E) of its sequence so far, and the number of queries
        self.sums: dict[str, tuple[Tensor, Tensor]] = {}
        self.sums_before: tuple[int, dict[str, tuple[Tensor, Tensor]]] = (-1, {})  # an outermost call, and them before

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        missed = [layer for layer in self.heads if layer not in self.met]
        if error is None and missed:
            ran = ", ".join(self.order) or "none ran in the block"
            reasons = [f"{layer!r} ({self.unseen[layer]})" if layer in self.unseen else repr(layer) for layer in missed]
            raise bad_value("heads", expected=f"layers of the model: {ran}", received=", ".join(reasons))

    def change(self, attention: ObservedCall, output: Tensor) -> Tensor:
        heads = self._heads_of(attention)
        if not heads:
            return output
        refuse_checkpoints(attention.layer)
        count = output.shape[1]
        if max(heads) >= count:
            raise bad_value(f"heads of {attention.layer}", expected=f"numbers below {count}", received=heads)
        if self.mode == "patch":
            return _replace_heads(output, heads, self._patch(attention, output))
        if self.mode == "zero":
            return _replace_heads(output, heads, torch.zeros_like(output))
        mean = self._mean_so_far(attention, output) if self.source is None else self._mean_of_source(attention, output)
        return _replace_heads(output, heads, mean[None, :, None].to(output.dtype).expand_as(output))

    def _mean_so_far(self, attention: ObservedCall, output: Tensor) -> Tensor:
        """The mean (H, E) over the queries of this call, and over earlier ones of the sequence that it continues."""
        if self.sums_before[0] != attention.forward:
            self.sums_before = attention.forward, dict(self.sums)
        total, count = _sum_over_queries(output, padding(attention))
        if self.goes_on and attention.layer in self.sums:
            total_before, count_before = self.sums[attention.layer]
            total, count = total + total_before, count + count_before
        self.sums[attention.layer] = total.detach(), count
        if int(count) == 1:
            raise bad_value(
                f"mean of {attention.layer}",
                expected="two tokens at least, for the mean of one is itself",
                received="one",
                remedy="source=a record of another text, or a longer prompt",
            )
        return total / count.clamp(min=1)

    def _mean_of_source(self, attention: ObservedCall, output: Tensor) -> Tensor:
        """The mean (H, E) over the queries of the source."""
        output_of_source = self._output_of_source(attention.layer, output)
        assert self.source is not None
        padding = self.source[attention.layer].last_padding()
        total, count = _sum_over_queries(output_of_source, None if padding is None else padding.to(output.device))
        return total / count.clamp(min=1)

    def _failed(self) -> None:
        super()._failed()
        if self.sums_before[0] == self.frames.forwards:
            self.sums = self.sums_before[1]

    def _heads_of(self, attention: ObservedCall) -> list[int]:
        """The heads of a layer that are to be changed."""
        heads: set[int] = set()
        for key in (attention.layer, f"{attention.layer}#0", self.order.index(attention.layer)):
            if key in self.heads:
                self.met.add(key)
                heads.update(self.heads[key])
        return sorted(heads)

    def _patch(self, attention: ObservedCall, output: Tensor) -> Tensor:
        """The source's outputs for the queries of this call, which may be one chunk of a sequence."""
        output_of_source = self._output_of_source(attention.layer, output)
        n = output.shape[2]
        first = self.queries_so_far.get(attention.layer, 0) if self.goes_on else 0
        self.queries_so_far[attention.layer] = first + n
        chunk = output_of_source[:, :, first : first + n]
        if chunk.shape != output.shape:
            raise bad_value(
                f"source of {attention.layer}",
                expected=f"outputs {shape_of(output)}",
                received=f"{shape_of(output_of_source)}, of which queries {first} to {first + n} are wanted",
            )
        return chunk

    def _output_of_source(self, layer: str, output: Tensor) -> Tensor:
        """The outputs of a layer in the source, (B, H, N, E) with its own B and N."""
        assert self.source is not None
        if layer not in self.source:
            raise bad_value("source", expected=f"a record of {layer}", received=f"one of {self.source.layers}")
        record = self.source[layer]
        if record.texts > 1:
            raise bad_value(
                "source",
                expected="a record of one forward, for the outputs of the last alone are kept",
                received=f"one of {record.texts}",
            )
        if record.output.shape[1::2] != output.shape[1::2]:
            raise bad_value(
                f"source of {layer}",
                expected=f"heads and their width as in {shape_of(output)}",
                received=shape_of(record.output),
            )
        return record.output.to(output)


def head_numbers(what: str, which: object, *, alone: bool = False) -> list[int]:
    """Numbers of heads as a list, from a list, a tensor, a range ...; `alone`: or from one number by itself.

    >>> head_numbers("heads", torch.tensor([3, 1]))
    [3, 1]
    """
    given = which.tolist() if isinstance(which, Tensor) else which
    if alone and isinstance(given, Integral) and not isinstance(given, bool):
        given = [given]
    if isinstance(given, (str, bytes, Mapping)) or not isinstance(given, Iterable):
        raise bad_type(what, expected="a list of head numbers", received=repr(given))
    listed = list(given)
    for number in listed:
        if isinstance(number, bool) or not isinstance(number, Integral):
            raise bad_type(
                what,
                expected="a list of head numbers",
                received=f"{number!r} among them",
                remedy="mask.nonzero().flatten() has the numbers of a mask" if isinstance(number, bool) else "",
            )
        if number < 0:
            raise bad_value(what, expected="head numbers from 0", received=number)
    twice = [number for number, count in Counter(listed).items() if count > 1]
    if twice:
        raise bad_value(what, expected="each head once", received=f"{twice[0]} more than once")
    return [int(number) for number in listed]


def by_layer(heads: Heads) -> Mapping[str | int, Iterable[int]]:
    """Heads as a mapping from layers to numbers, from such a mapping or from heads one by one.

    >>> from regard.heads import Role
    >>> by_layer([Role("a", 3, "induction"), Role("b", 0, "induction"), Role("a", 1, "induction")])
    {'a': [3, 1], 'b': [0]}
    """
    if isinstance(heads, Mapping):
        return heads  # type: ignore[return-value]
    listed: list[Any] = list(heads) if isinstance(heads, Iterable) else [heads]
    if not listed:
        raise bad_value(
            "heads",
            expected="one head at least",
            received="an empty list",
            remedy="seen.roles() has the roles that there are",
        )
    if not is_heads(listed):
        raise bad_type(
            "heads",
            expected="a mapping from layers to heads, or heads such as seen.roles().of(...) gives",
            received=type(heads).__name__,
            remedy='ablate(model, {"layer name": [0, 3]})',
        )
    numbers: dict[str | int, list[int]] = {}
    for head in listed:
        numbers.setdefault(head.layer, []).append(head.head)
    return numbers


def is_heads(heads: list[Any]) -> bool:
    """Whether these are heads with the names of their layers (see `Head`)."""
    return bool(heads) and all(hasattr(head, "layer") and hasattr(head, "head") for head in heads)


def refuse_checkpoints(layer: str) -> None:
    """Raise in a checkpointed layer: it is recomputed in backward, where our hooks are off; gradients would ignore the
    ablation."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch.utils.checkpoint":
            raise bad_value(
                layer,
                expected="no checkpointing where heads are changed",
                received="a checkpointed layer",
                remedy="turn it off: model.gradient_checkpointing_disable()",
            )
        frame = frame.f_back


def _replace_heads(output: Tensor, heads: list[int], other: Tensor) -> Tensor:
    """The output (B, H, N, E) with some heads taken from `other`."""
    chosen = torch.zeros(output.shape[1], dtype=torch.bool, device=output.device)
    chosen[heads] = True
    return torch.where(chosen[None, :, None, None], other, output)


def _sum_over_queries(output: Tensor, padding: Tensor | None) -> tuple[Tensor, Tensor]:
    """The sum (H, E) of the outputs (B, H, N, E) over queries that are not `padding` (B, 1, N), and their number."""
    wide = output.to(torch.promote_types(output.dtype, torch.float32))
    if padding is None:
        return wide.sum((0, 2)), torch.tensor(output.shape[0] * output.shape[2], device=output.device)
    real = ~padding.expand(output.shape[0], 1, output.shape[2])
    return torch.where(real[..., None], wide, 0.0).sum((0, 2)), real.sum()
