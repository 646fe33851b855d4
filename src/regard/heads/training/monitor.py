"""`monitor`: statistics of every head while a model is trained, of one forward pass in every so many steps.

Letters: B batch, H query heads, N queries, E head width of v.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from regard.checks import whole_number
from regard.errors import bad_type, bad_value
from regard.heads.capture.observed import ObservedCall
from regard.heads.record.layer_record import LayerRecord
from regard.heads.record.record import Record
from regard.heads.record.scalars import flat_scalars, per_head_numbers
from regard.heads.training.health import AttentionWarning, Health, LayerState, Limits
from regard.heads.watch import watch
from regard.measures import MeasureLike

__all__ = ["Sample", "monitor", "monitor_of"]

MEASURES = ("entropy", "peak", "max_logit", "on_first", "received")
Log = Callable[[int, dict[str, float]], object]


@dataclass
class Sample:
    """What a monitor saw in one step."""

    step: int
    scalars: dict[str, float]  # "attention/3/7/entropy": layer 3, head 7; "attention/3/effective_rank": layer 3
    warnings: list[str]
    record: Record = field(repr=False)
    used: bool = False  # by `qk_clip`


class monitor:
    """Statistics of every head while a model is trained. Between samples it costs one comparison per forward pass.

    Args:
        model: any model that `regard.watch` sees into.
        every: steps between samples; the first step is sampled.
        log: called with the step and the numbers of each sample; `regard.integrations.callbacks` has some for trackers
            of experiments.
        optimizer: its `step` ends a step, and only the first forward pass of a step is sampled: gradient accumulation
            counts once.
        count: what a step is without it: "forwards", in training mode; or "steps", each ended by `monitor.step()`.
        measures: names or objects of `regard.measures`; by default entropy, peak, max_logit, on_first and received.
        layers: as for `regard.watch`.
        limits: from where on it warns; None: never.
        per: numbers of each head, or of each layer (as `Record.scalars` has it).
        first_rank_only: of several processes only the first one samples. (Not where heads or tokens are sharded by
            `regard.parallel`: there all take part.)

    `samples` has all so far but for their records; `last` is the last one. `close()`, or the end of a `with` block,
    removes it.

    >>> import regard
    >>> layer = regard.MultiHeadAttention(16, num_heads=4)
    >>> optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    >>> with regard.monitor(layer, every=2, optimizer=optimizer) as watching:
    ...     for _ in range(3):
    ...         layer(torch.randn(2, 5, 16)).square().mean().backward()
    ...         optimizer.step()
    >>> [sample.step for sample in watching.samples]
    [0, 2]
    >>> sorted(watching.last.scalars)[:3]
    ['attention/0/0/entropy', 'attention/0/0/max_logit', 'attention/0/0/on_first']
    """

    def __init__(
        self,
        model: nn.Module,
        every: int = 100,
        log: Log | None = None,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        count: Literal["forwards", "steps"] = "forwards",
        measures: MeasureLike | Iterable[MeasureLike] | None = None,
        layers: str | Iterable[str] | Callable[[str], bool] | None = None,
        limits: Limits | None = Limits(),  # noqa: B008 (it is frozen)
        per: Literal["head", "layer"] = "head",
        first_rank_only: bool = True,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise bad_type("model", expected="a torch.nn.Module", received=type(model).__name__)
        if log is not None and not callable(log):
            raise bad_type("log", expected="a function of the step and a dict of numbers", received=type(log).__name__)
        self.every = whole_number("every", every, at_least=1)
        self.model, self.log, self.layers, self.first_rank_only = model, log, layers, first_rank_only
        self.per: Literal["head", "layer"] = per
        self.measures = MEASURES if measures is None else measures
        self.health = None if limits is None else Health(limits)
        self.samples: list[Sample] = []
        self.last: Sample | None = None
        self.steps = 0
        if count not in ("forwards", "steps"):
            raise bad_value("count", expected='"forwards" or "steps"', received=repr(count))
        self._counts_forwards = optimizer is None and count == "forwards"
        self._sampled_in = -1  # the last step of which a forward pass was sampled
        self._watching: _Watch | None = None
        self._ends_with_forward = False
        self._handles: list[Any] = [
            model.register_forward_pre_hook(self._forward_begins, prepend=True, with_kwargs=True),
            model.register_forward_hook(self._forward_ends, always_call=True),
        ]
        _MONITORS[model] = weakref.ref(self)
        if optimizer is not None:
            self._handles.append(optimizer.register_step_post_hook(lambda *_: self.step()))

    def step(self) -> None:
        """The optimizer's step is done."""
        if self._counts_forwards:
            raise bad_value(
                "monitor",
                expected="no step(): forward passes are counted",
                received="one",
                remedy='monitor(..., count="steps")',
            )
        self.steps += 1

    def begin(self) -> bool:
        """Sample what runs from here to `end`, if a sample is due; returns whether it is. The model's own forward pass
        calls both: they are for training that calls parts of the model instead."""
        if (
            self._watching is not None
            or self.steps % self.every
            or self._sampled_in == self.steps
            or not self._is_here()
        ):
            return False
        self._sampled_in = self.steps
        self._watching = _Watch(self.model, self.measures, self.layers)
        self._watching.__enter__()
        return True

    def end(self, error: BaseException | None = None) -> None:
        """What is sampled has run, or raised an error."""
        watching, self._watching = self._watching, None
        if watching is None:
            return
        try:
            watching.__exit__(None if error is None else type(error), error, None)
        except BaseException:
            self.close()  # (there is nothing to monitor, and the next step shall not fail for it)
            raise
        if error is None:
            self._keep(watching)

    def close(self) -> None:
        """Remove the monitor from the model."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def __enter__(self) -> monitor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Hooks of the model

    def _forward_begins(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._ends_with_forward = model.training and self.begin()
        if self._watching is not None:
            self._watching.frames.enter(model, args, kwargs)

    def _forward_ends(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._watching is not None:
            self._watching.frames.leave(model, args, output)
        if self._ends_with_forward:
            self.end(sys.exc_info()[1] if output is None else None)
        if model.training and self._counts_forwards:
            self.steps += 1

    def _is_here(self) -> bool:
        """Whether this process samples."""
        return not (self.first_rank_only and dist.is_available() and dist.is_initialized() and dist.get_rank())

    def _keep(self, watching: _Watch) -> None:
        record = watching.record
        scalars, states = flat_scalars(record, per=self.per), []
        for index, layer in enumerate(record):
            outputs = watching.outputs.get(layer.name)
            if outputs is not None:
                scalars[f"attention/{index}/effective_rank"] = effective_rank(outputs)
            norms = [] if outputs is None else outputs.diagonal().clamp(min=0).sqrt().tolist()
            states.append(_state(layer, norms))
        found = [] if self.health is None else self.health.check(states)
        sample = Sample(self.steps, scalars, found, record)
        if self.last is not None:
            self.last.record = Record()
        self.last = sample
        self.samples.append(sample)
        if self.log is not None:
            self.log(self.steps, scalars)
        for words in found:
            warnings.warn(f"step {self.steps}: {words}", AttentionWarning, stacklevel=2)


_MONITORS: weakref.WeakKeyDictionary[nn.Module, weakref.ref[monitor]] = weakref.WeakKeyDictionary()


def monitor_of(model: nn.Module) -> monitor | None:
    """The last monitor of a model, if it has one."""
    reference = _MONITORS.get(model)
    return None if reference is None else reference()


class _Watch(watch):
    """A watch that keeps no q, k and v, but for each layer the products of its heads' outputs, (H, H)."""

    def __init__(self, model: nn.Module, measures: Any, layers: Any) -> None:
        super().__init__(model, measures, layers)
        self.needs_output = True
        self.filing.most_for_roles = 0
        self.frames.root_has_hooks = False  # the monitor's own, which are running: it tells
        self.outputs: dict[str, Tensor] = {}

    def _saw_nothing(self) -> ValueError:
        model = type(self.frames.root).__name__
        ran = self.frames.forwards or self.unseen or self.filing.unwanted
        why = self._why_nothing() if ran else "no module in it that could compute attention was run"
        return bad_value(
            "monitor",
            expected=f"attention in a training step of {model}",
            received=f"none: {why}",
            remedy="monitor a model with attention, or the part of it that has it",
        )

    def see(self, attention: ObservedCall) -> Callable[[], bool] | None:
        seen = super().see(attention)
        if attention.output is not None and self.is_wanted(attention.layer):
            heads = attention.output.detach().transpose(0, 1).flatten(1).float()  # (H, B N E)
            self.outputs[attention.layer] = heads @ heads.T / max(heads.shape[1], 1)
        return seen


def effective_rank(products: Tensor) -> float:
    """How many heads differ, from 1 to H, by the products of their outputs (H, H): the exponential of the entropy of
    the singular values (Roy & Vetterli 2007).

    >>> effective_rank(torch.eye(4)), effective_rank(torch.ones(4, 4))
    (4.0, 1.0)
    """
    values = torch.linalg.eigvalsh(products.double()).clamp(min=0).sqrt()
    if not bool(values.sum() > 0):
        return 0.0
    shares = values / values.sum()
    return round(float(torch.special.entr(shares).sum().exp()), 6)


def _state(layer: LayerRecord, outputs: list[float]) -> LayerState:
    numbers = per_head_numbers(layer)
    uniform = per_head_numbers(layer.uniform) if layer.uniform is not None else {}
    equal = uniform.get("entropy", [0.0])[0]
    entropy = [x / equal for x in numbers.get("entropy", [])] if equal > 0 else []
    return LayerState(
        layer.name, layer.num_keys, entropy, numbers.get("max_logit", []), outputs, numbers.get("sink", [])
    )
