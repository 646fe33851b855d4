"""Attention functions of other packages that a capture should see: `register(function, handler)`.

Letters: B batch, H query heads, h those of this process, N queries, M keys, E head width of values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from regard.kernels import Call

__all__ = ["GatherHeads", "Handler", "PartialCall", "handler_of", "register"]


@dataclass(frozen=True)
class GatherHeads:
    """Gathers results per head over processes: (B, h, ...) of this process's heads to (B, H, ...) of all."""

    heads: int  # H
    own: slice  # which of all heads are this process's
    gather: Callable[[Tensor], Tensor]

    def __call__(self, x: Tensor) -> Tensor:
        """(B, H, ...) of all processes."""
        return self.gather(x)


@dataclass(frozen=True)
class PartialCall:
    """One attention of which this process computes a part, and other processes the rest."""

    call: Call  # all tokens of this process's heads
    gather_heads: GatherHeads
    global_call: Callable[[], Call]  # all tokens of all heads
    gather_output: Callable[[Tensor], Tensor]  # the outputs (B, H, N, E) of all heads and tokens, from those here
    gather_tokens: Callable[[Tensor, int], Tensor]  # of what each process has for its own queries, along an axis


Handler = Callable[..., PartialCall]
_HANDLERS: dict[Callable[..., Tensor], Handler] = {}


def register(function: Callable[..., Tensor], handler: Handler) -> None:
    """Calls of `function(q, k, v, **options)` are seen by `watch`; `handler`, called with the same arguments, says
    what they compute. The function must go through `torch.overrides.handle_torch_function`."""
    _HANDLERS[function] = handler


def handler_of(function: object) -> Handler | None:
    """The handler of a function, if it was registered."""
    return _HANDLERS.get(function)  # type: ignore[call-overload]
