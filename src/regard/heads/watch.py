"""`watch`: record what every head of an unmodified model attends to while it runs.

Letters: B batch, H query heads, N queries, M keys.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable
from types import TracebackType
from typing import Literal

import torch
from torch import Tensor, nn

from regard.errors import bad_type, bad_value
from regard.heads.capture.capture import AttentionCapture
from regard.heads.capture.module_stack import Frame
from regard.heads.capture.observed import ObservedCall
from regard.heads.record.filing import Filing, LayerPlan
from regard.heads.record.record import Record
from regard.measures import MeasureLike, as_measures
from regard.measures.run import DEFAULT

__all__ = ["watch"]


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
        self.needs_output = keep == "qkv"
        self.needs_projection = self.needs_output or any(measure.needs_out_weight for measure in self.measures)
        self.frames.leaves = self.needs_projection
        self.layers, self.is_wanted = layers, _filter(layers)
        self.filing = Filing(self.measures, keep, self.is_wanted)
        self.record = Record(self.filing)
        self.record.model = weakref.ref(model)
        self.record.unseen = self.unseen  # the same dict
        self.inside = False
        self.plans_layers = self.computes and not self.needs_projection

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
        self.filing.end()
        if error is None and self.filing.is_empty:
            raise self._saw_nothing()

    def see(self, attention: ObservedCall) -> Callable[[], bool] | None:
        """Measure one attention call, as the next chunk of a sequence or as a new sequence."""
        return self.filing.see(attention)

    def layer_plan(self, key: Hashable, attention: ObservedCall, mask: Tensor | None) -> LayerPlan | None:
        """A plan for layers like one that was seen and computed."""
        return self.filing.plan(key, attention, mask)

    def earlier_plan(self, key: Hashable, frame: Frame, ids: Tensor | None) -> LayerPlan | None:
        """A plan for a layer like one of an earlier forward."""
        return self.filing.plan_of_earlier(key, frame.name, frame.module, self.frames.forwards, ids)

    def see_by_plan(self, plan: LayerPlan, frame: Frame, q: Tensor, k: Tensor, v: Tensor) -> Tensor | None:
        """Measure and compute a layer like another one."""
        own = self.is_steady(frame, q, k, v)
        return self.filing.see_by_plan(plan, frame.name, frame.module, self.frames.forwards, q, k, v, own)

    def not_seen(self, name: str, reason: str) -> None:
        if self.is_wanted(name):
            super().not_seen(name, reason)

    def _failed(self) -> None:
        super()._failed()
        self.filing.failed(self.frames.forwards)

    def _saw_nothing(self) -> ValueError:
        return ValueError(f"watch: expected attention inside the block, saw none: {self._why_nothing()}")

    def _why_nothing(self) -> str:
        frames = self.frames
        modules = frames.modules
        if self.filing.unwanted:
            ran = ", ".join(sorted(self.filing.unwanted)[:9])
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
        return why


def _filter(layers: str | Iterable[str] | Callable[[str], bool] | None) -> Callable[[str], bool]:
    if layers is None:
        return lambda name: True
    if callable(layers):
        return layers
    wanted = [layers] if isinstance(layers, str) else list(layers)
    if not all(isinstance(name, str) for name in wanted):
        raise bad_type("layers", expected="names of layers, or a function of the name", received=repr(wanted))
    return lambda name: any(name == prefix or name.startswith((f"{prefix}.", f"{prefix}#")) for prefix in wanted)
