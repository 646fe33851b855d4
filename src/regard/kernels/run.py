"""The only way into a kernel: choose one, turn autocast off, and hand the call to observers.

    run(call)            the output (B, H, N, E), differentiable; observers are told
    run_with_lse(call)   the same, and the log-sum-exp (B, H, N), differentiable
    run_unobserved(call) the same, and they are not
    run_measured(...)    output and log-sum-exp while the weights are shown to measures; without gradient
    weights(call)        the N x M weights, by the reference formula

An observer is registered for a `with` block in the current thread (`observed_by`) and wraps each `run` in it.
`regard.watch` and `regard.ablate` do so around each `attend` that they intercept. Compiled code is never observed.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from regard.cache import StoredHeads
from regard.errors import bad_value
from regard.kernels import blockwise, fused, native, native_library, reference, triton
from regard.kernels.by_heads import parts_by_heads
from regard.kernels.call import Call, Kernel
from regard.kernels.operators import new_output
from regard.kernels.precision import fixed_precision
from regard.kernels.triton.availability import why_not_on
from regard.measures import MeasureRun

__all__ = [
    "KERNELS",
    "Observer",
    "available",
    "choose",
    "explain",
    "observed_by",
    "observers",
    "repeat_observed",
    "run",
    "run_measured",
    "run_unobserved",
    "run_with_lse",
    "weights",
]

# In the order in which "auto" asks: the fastest first, the one that serves everything last.
KERNELS: tuple[Kernel, ...] = (native, fused, triton, blockwise, reference)
# The same for `run_measured`. (`fused` would compute the weights a second time.)
MEASURING: tuple[Kernel, ...] = (native, triton, blockwise, reference)


class Observer(Protocol):
    """Sees each attention that runs, and may replace its output."""

    def attention(self, call: Call, compute: Callable[[], Tensor], kernel: str) -> Tensor:
        """The output (B, H, N, E) of the call. `compute()` calls the next observer; the last one's calls the kernel.
        `kernel`: the one that the caller named, or "auto"."""
        ...


class _Observers(threading.local):
    """The observers of this thread; the first one wraps the others."""

    stack: tuple[Observer, ...] = ()


observers = _Observers()


@contextmanager
def observed_by(observer: Observer) -> Iterator[None]:
    """Hand every `run` of this thread within the block to an observer. Earlier observers are outermost."""
    before = observers.stack
    observers.stack = (*before, observer)
    try:
        yield
    finally:
        observers.stack = before


def run(call: Call, kernel: str = "auto") -> Tensor:
    """The output (B, H, N, E) of a call, by the kernel named; by "auto" the first that can serve and is worth it."""
    if not torch.compiler.is_compiling() and observers.stack:
        return _run_observed(call, kernel, functools.partial(run_unobserved, call, kernel))
    return run_unobserved(call, kernel)


def run_with_lse(call: Call, kernel: str = "auto") -> tuple[Tensor, Tensor]:
    """Output (B, H, N, E) and log-sum-exp (B, H, N) of a call that `needs_lse`. Observers may replace the output; they
    must have it computed, for they give no log-sum-exp."""
    call = call.plain()
    lses: list[Tensor] = []

    def compute() -> Tensor:
        with fixed_precision(call.q):
            out, lse = choose(kernel, call).forward(call)
        lses[:] = [lse]
        return out

    observed = not torch.compiler.is_compiling() and observers.stack
    out = _run_observed(call, kernel, compute) if observed else compute()
    return out, lses[0]


def repeat_observed(q: Tensor, k: Tensor, v: Tensor, kernel: str, options: Mapping[str, Any]) -> Tensor | None:
    """The output of an `attend` whose arguments were not checked yet, if there is one observer alone, and it has a way
    to `repeat` calls and has seen one like it; else None. The tensors are plain ones on the CPU, and no mode, compiler
    or autocast is on."""
    stack = observers.stack
    known = getattr(stack[0], "repeat", None) if len(stack) == 1 else None
    return None if known is None else known(q, k, v, kernel, options)


def _run_observed(call: Call, kernel: str, compute: Callable[[], Tensor]) -> Tensor:
    """Each observer wraps the next. Attention that an observer computes is not observed."""
    call = call.plain()
    stack = observers.stack
    for observer in reversed(stack):
        compute = functools.partial(observer.attention, call, compute, kernel)
    observers.stack = ()
    try:
        return compute()
    finally:
        observers.stack = stack


def run_unobserved(call: Call, kernel: str = "auto") -> Tensor:
    """As `run`, without telling observers."""
    if call.stored:
        if isinstance(call.k, StoredHeads) and (parts := parts_by_heads(call)) is not None:
            return _run_by_heads(call, parts, kernel)
        if kernel in ("auto", native.name) and native.why_not(call) is None and native.worth(call):
            with fixed_precision(call.q):
                return native.output(call)
        call = call.plain()
    chosen = choose(kernel, call)
    with fixed_precision(call.q):
        return chosen.output(call)


def _run_by_heads(call: Call, parts: list[tuple[list[int], Call]], kernel: str) -> Tensor:
    """The output of a call whose heads hold different tokens: each part alone."""
    out, _ = new_output(call.q, call.v)
    for heads, part in parts:
        out[:, heads] = run_unobserved(part, kernel)
    return out


def run_measured(
    call: Call, measures: MeasureRun, *, output: bool, kernel: str = "auto"
) -> tuple[Tensor | None, Tensor]:
    """Output (None unless asked for) and log-sum-exp, while the weights are shown to some measures. The caller has
    switched gradients and autocast off."""
    call = call.plain()
    if kernel == "auto":
        chosen = next(candidate for candidate in MEASURING if candidate.why_not(call) is None and candidate.worth(call))
    else:
        chosen = choose(kernel, call)
    return chosen.forward_measured(call, measures, output=output)


def weights(call: Call, stage: str = "weights") -> Tensor:
    """The weights (B, H, N, M) before dropout, or the scores after an earlier step of `reference.STAGES`."""
    call = call.plain()
    with fixed_precision(call.q):
        return reference.weights(call)[0] if stage == "weights" else reference.scores(call, stage)


def available(device: str = "cpu") -> list[str]:
    """The names of the kernels for a type of device on this machine, in the order in which "auto" asks them.

    >>> available()[-2:]  # before them "native", where it was compiled, and "fused"
    ['blockwise', 'reference']
    """
    there = {
        native.name: device == "cpu" and native_library.load() is not None,
        triton.name: why_not_on(device) is None,
    }
    return [kernel.name for kernel in KERNELS if there.get(kernel.name, True)]


def choose(kernel: str, call: Call) -> Kernel:
    """The kernel for a call: by "auto" the first that can serve and is worth it; else the one named, or an error."""
    if kernel == "auto":
        for candidate in KERNELS:
            if candidate.why_not(call) is None and candidate.worth(call):
                return candidate
        raise AssertionError("reference serves every call")
    for candidate in KERNELS:
        if candidate.name == kernel:
            reason = candidate.why_not(call)
            if reason is not None:
                raise bad_value(
                    f"kernel {kernel!r}",
                    expected="a call that it can serve",
                    received=f"one it cannot: {reason}",
                    remedy='kernel="auto" chooses one that can',
                )
            return candidate
    raise bad_value("kernel", expected=f'"auto" or one of {available(call.q.device.type)}', received=repr(kernel))


def explain(kernel: str, call: Call) -> str:
    """Which kernel serves a call, and why not the others, in words."""
    chosen = choose(kernel, call)
    lines = []
    for candidate in KERNELS:
        reason = candidate.why_not(call)
        if candidate is chosen:
            lines.append(f"{candidate.name}: chosen")
        elif reason is not None:
            lines.append(f"{candidate.name}: no, {reason}")
        elif kernel == "auto" and candidate is triton and (doubt := triton.doubt(call)) is not None:
            lines.append(f"{candidate.name}: could serve, but {doubt}")
        else:
            why = "was named" if kernel != "auto" else "is faster"
            lines.append(f"{candidate.name}: could serve, but {chosen.name} {why}")
    if call.stored:
        parts = parts_by_heads(call) if isinstance(call.k, StoredHeads) else [([], call)]
        reads = chosen is native and parts is not None and all(native.reads_stored(part) for _, part in parts)
        how = "read where they are" if reads else "copied to plain tensors for this call"
        lines.append(f"keys and values: {call.k!r}, {how}")
    return "\n".join(lines)
