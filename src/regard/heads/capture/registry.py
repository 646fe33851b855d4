"""Attention functions of other rooms that a capture should see: `register(function, handler)`.

Letters: B batch, H query heads, h those of this process, N queries, M keys, E head width of values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from regard.kernels import Call

__all__ = ["GatherHeads", "Handler", "PartialCall", "handler_of", "register"]


class GatherHeads(Protocol):
    """Gathers results per head over processes: (B, h, ...) of this process's heads to (B, H, ...) of all."""

    @property
    def heads(self) -> int:
        """H of all processes."""
        ...

    @property
    def own(self) -> slice:
        """Which of all heads are this process's."""
        ...

    def __call__(self, x: Tensor) -> Tensor: ...


class PartialCall(Protocol):
    """One attention of which this process computes a part, and other processes the rest."""

    @property
    def call(self) -> Call:
        """All tokens of this process's heads."""
        ...

    @property
    def gather_heads(self) -> GatherHeads:
        """Gathers what each process finds for its heads."""
        ...

    def global_call(self) -> Call:
        """All tokens of all heads."""
        ...

    def gather_output(self, out: Tensor) -> Tensor:
        """The outputs (B, H, N, E) of all heads and tokens, from what the function returned here."""
        ...

    def gather_tokens(self, x: Tensor, dim: int) -> Tensor:
        """What this process has for each of its queries, for all queries."""
        ...


Handler = Callable[..., PartialCall]
_HANDLERS: dict[Callable[..., Tensor], Handler] = {}


def register(function: Callable[..., Tensor], handler: Handler) -> None:
    """Calls of `function(q, k, v, **options)` are seen by `watch`; `handler`, called with the same arguments, says
    what they compute. The function must go through `torch.overrides.handle_torch_function`."""
    _HANDLERS[function] = handler


def handler_of(function: object) -> Handler | None:
    """The handler of a function, if it was registered."""
    return _HANDLERS.get(function)  # type: ignore[call-overload]
