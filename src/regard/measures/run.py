"""Measures at work: from names to objects, from strips to results."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from regard.errors import bad_type, bad_value
from regard.measures.base import Measure, Plane, Reduction, Strip
from regard.measures.contribution import Contribution, Divergence
from regard.measures.distribution import (
    Distance,
    Entropy,
    Itself,
    Local,
    MaxLogit,
    Next,
    Offset,
    Offsets,
    OnFirst,
    Peak,
    Previous,
    Received,
)
from regard.measures.maps import Heatmap, Links
from regard.measures.tokens import Duplicate, Induction

__all__ = ["DEFAULT", "MeasureLike", "MeasureRun", "Measurements", "as_measures", "measures_key"]


MeasureLike: TypeAlias = "str | Measure | type[Measure]"

NAMED: dict[str, type[Measure]] = {
    "entropy": Entropy,
    "peak": Peak,
    "target": Peak,
    "max_logit": MaxLogit,
    "distance": Distance,
    "offset": Offset,
    "offsets": Offsets,
    "local": Local,
    "received": Received,
    "on_first": OnFirst,
    "previous": Previous,
    "itself": Itself,
    "next": Next,
    "heatmap": Heatmap,
    "links": Links,
    "induction": Induction,
    "duplicate": Duplicate,
    "contribution": Contribution,
    "contributed": Contribution,
    "divergence": Divergence,
}
DEFAULT = ("entropy", "peak", "distance", "offset", "offsets", "received", "on_first")


def as_measures(measures: MeasureLike | Iterable[MeasureLike] | None) -> list[Measure]:
    """Names, classes and objects as objects; None is the default ones.

    >>> as_measures(["entropy", Links(3)])
    [Entropy(), Links(k=3)]
    """
    if measures is None:
        measures = DEFAULT
    if isinstance(measures, (str, Measure, type)):
        measures = [measures]
    chosen: list[Measure] = []
    for measure in measures:
        if isinstance(measure, str):
            if measure not in NAMED:
                raise bad_value(
                    "measures",
                    expected=f"names among {sorted(NAMED)}, or objects of regard.measures",
                    received=repr(measure),
                )
            measure = NAMED[measure]
        if isinstance(measure, type) and issubclass(measure, Measure):
            try:
                measure = measure()
            except TypeError as error:
                raise bad_type(
                    f"measure {measure.__name__}",
                    expected="an object made with its arguments",
                    received="the class",
                    remedy=str(error),
                ) from None
        if not isinstance(measure, Measure):
            raise bad_type("measures", expected="names or objects of regard.measures", received=type(measure).__name__)
        twins = [other for other in chosen if type(other) is type(measure)]
        if not twins or _holds_tensors(measure) or all(vars(measure) != vars(other) for other in twins):
            chosen.append(measure)
    names = [name for measure in chosen for name in measure.gives]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise bad_value("measures", expected="one of a kind", received=f"{', '.join(twice)} twice")
    return chosen


def measures_key(measures: list[Measure]) -> Hashable | None:
    """A key that equal measures share; None if one of them is not known to be decided by plain numbers."""
    key: list[Hashable] = []
    for measure in measures:
        settings = tuple(vars(measure).items())
        if not type(measure).__module__.startswith("regard.measures."):
            return None
        if not all(x is None or type(x) in (bool, int, float, str) for _, x in settings):
            return None
        key.append((type(measure), settings))
    return tuple(key)


def _holds_tensors(measure: Measure) -> bool:
    return any(isinstance(x, (Tensor, dict)) for x in vars(measure).values())


@dataclass
class Measurements:
    """What `measure` found: each result by its name, as an attribute or by `[name]`; `output` (B, H, N, E) where v was
    given, `lse` (B, H, N), and `seen` (B, H, N): which queries see a key."""

    values: dict[str, Any]
    seen: Tensor
    counts: dict[str, Tensor] = field(default_factory=dict)  # (B, H, N): which queries count, where not all that see
    output: Tensor | None = None
    lse: Tensor | None = None

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def __getattr__(self, name: str) -> Any:
        values = self.__dict__.get("values", {})
        if name in values:
            return values[name]
        raise AttributeError(f"{name!r} was not measured; there are {', '.join(values) or 'none'}")

    def __repr__(self) -> str:
        return f"Measurements({', '.join(self.values)})"


@dataclass
class _Prepared:
    """What a measure computes once for a plane."""

    measure: Measure
    plane: Plane
    prepared: Any = None

    def __post_init__(self) -> None:
        self.prepared = self.measure.prepare(self.plane)

    @functools.cached_property
    def reduction(self) -> Reduction | None:
        return self.measure.reduction(self.plane, self.prepared)

    @functools.cached_property
    def counted(self) -> Tensor | dict[str, Tensor] | None:
        return self.measure.counted(self.plane, self.prepared)


class MeasureRun:
    """Some measures at work on one plane: give it every strip, then ask for the results.

    A kernel that has sums in place of strips may set `unfinished`: called with the run before its first result is
    needed, it sets `states` and `seen`."""

    def __init__(self, measures: list[Measure], plane: Plane) -> None:
        self.measures, self.plane = measures, plane
        self.unfinished: Callable[[MeasureRun], None] | None = None
        # Set by a kernel where the result may wait, and nothing of the call has to live until then: whether each query
        # saw a key.
        self.sees_all: Callable[[], bool] | None = None
        shared = plane.once(tuple(measures), lambda: _Shared(measures, plane))
        # What a kernel derives of these measures, for this run and those on planes that share; None: not to be kept.
        self.kept: dict[Any, Any] | None = None
        if len(shared.work) == len(measures):
            self.work, self.kept = shared.work, shared.kept
        else:
            of_shared = {work.measure: work for work in shared.work}
            self.work = [of_shared.get(measure) or _Prepared(measure, plane) for measure in measures]

    @functools.cached_property
    def states(self) -> list[Any]:
        """The memory of each measure."""
        self.plane.reserve_rows(sum([measure.query_tensors for measure in self.measures]))
        return [measure.begin(self.plane) for measure in self.measures]

    @functools.cached_property
    def seen(self) -> Tensor:
        """Which queries see a key, (B, H, N)."""
        return self.plane.new(self.plane.queries, dtype=torch.bool)

    def reduction(self, number: int) -> Reduction | None:
        """The sums that are enough for a measure; None if it needs strips."""
        return self.work[number].reduction

    @property
    def prepared(self) -> list[Any]:
        """What each measure prepared."""
        return [work.prepared for work in self.work]

    @property
    def wants_logs(self) -> bool:
        return any(measure.needs_logs for measure in self.measures)

    @property
    def wants_all_heads(self) -> bool:
        return any(measure.needs_all_heads for measure in self.measures)

    def only(self, which: list[bool]) -> MeasureRun:
        """The same survey with some of its measures alone; what they find is found here, too."""
        partial = copy(self)
        partial.seen = self.seen
        partial.measures, partial.work, partial.states = (
            [x for x, wanted in zip(some, which, strict=True) if wanted]
            for some in (self.measures, self.work, self.states)
        )
        return partial

    def add(self, strip: Strip) -> None:
        """Show a strip to every measure."""
        self.seen[strip.where] = strip.mass > 0
        for measure, state, prepared in zip(self.measures, self.states, self.prepared, strict=True):
            measure.add(state, strip.without_padding if measure.sums_queries else strip, prepared)

    def result(self, lse: Tensor | None = None) -> Measurements:
        """Everything that was found. `lse` (B, H, N): the log-sum-exp, where scores are known."""
        self.finish()
        values: dict[str, Any] = {}
        padding = self.plane.padding
        tokens = self.seen if padding is None else self.seen & ~padding[:, None]
        for measure, state in zip(self.measures, self.states, strict=True):
            results = measure.end(state, tokens if measure.sums_queries else self.seen)
            values.update(measure.with_scores(results, lse) if lse is not None and measure.needs_scores else results)
        return Measurements(values, self.seen, self._counts(), lse=lse)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"kept": None}

    def finish(self) -> None:
        """Hand the measures what a kernel has found, unless that was done."""
        if self.unfinished is not None:
            finish, self.unfinished = self.unfinished, None
            finish(self)

    def _counts(self) -> dict[str, Tensor]:
        """Which queries (B, H, N) count in the mean of a result, where not all do that see a key."""
        names: list[str] = []
        masks: list[Tensor] = []
        shareable = True
        for work in self.work:
            counted = work.counted
            if counted is not None:
                shareable = shareable and work.measure.shareable
                by_name = counted if isinstance(counted, dict) else dict.fromkeys(work.measure.gives, counted)
                names.extend(by_name)
                masks.extend(by_name.values())
        if not names:
            return {}
        plane = self.plane if shareable else replace(self.plane)  # (a plane of its own shares nothing)
        key = ("counts", *self.measures)
        which = plane.once(key, lambda: torch.stack(torch.broadcast_tensors(*masks))[:, :, None])  # (K, 1|B, 1, N)
        return dict(zip(names, (which & self.seen).unbind(0), strict=True))


class _Shared:
    """What runs of the same measures on planes that share need not compute again. It keeps no values alive."""

    def __init__(self, measures: list[Measure], plane: Plane) -> None:
        plane = plane.without_values()
        self.work = [_Prepared(measure, plane) for measure in measures if measure.shareable]
        self.kept: dict[Any, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Without what kernels have derived, which may hold addresses."""
        return {"work": self.work, "kept": {}}
