"""What a caller of these layers got wrong, in words; and whether somebody watches.

Letters: B batch, N tokens, W model width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from regard.errors import bad_type, bad_value, refuse_trace, unknown_argument
from regard.kernels.run import observers
from regard.layer.checks import check_inputs
from regard.positions import Rotary

__all__ = ["check_call", "check_input", "check_rotary", "check_sizes", "is_watched"]


def check_sizes(sizes: Mapping[str, int | None], *, least: int = 1) -> None:
    """Raise unless the sizes are integers of at least `least`, or None."""
    for name, size in sizes.items():
        if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < least):
            raise bad_value(name, expected=f"an integer of at least {least}", received=repr(size))


def check_rotary(position_encoding: object, width: int) -> None:
    """Raise unless it is None, or a `Rotary` of this width."""
    if position_encoding is not None and not isinstance(position_encoding, Rotary):
        raise bad_type(
            "position_encoding",
            expected="Rotary or None",
            received=type(position_encoding).__name__,
            remedy=f"regard.positions.Rotary({width}); a bias is an argument of the call: layer(x, bias=...)",
        )
    if isinstance(position_encoding, Rotary) and position_encoding.head_dim != width:
        raise bad_value(
            "position_encoding", expected=f"Rotary of head width {width}", received=f"{position_encoding.head_dim}"
        )


def check_call(
    layer: nn.Module, x: object, cache: object, kind: type, forward: Callable[..., Any], unknown: Mapping[str, Any]
) -> None:
    """Raise unless x is a tensor and the cache of this kind, and there are no unknown arguments."""
    refuse_trace("attention")
    name = type(layer).__name__
    if unknown:
        raise unknown_argument(f"the call of {name}", forward, unknown)
    if not isinstance(x, Tensor):
        raise bad_type("x", expected="a tensor", received=type(x).__name__, remedy="torch.as_tensor(...)")
    if cache is not None and not isinstance(cache, kind):
        raise bad_type(
            "cache",
            expected=f"a {kind.__name__}",
            received=type(cache).__name__,
            remedy=f"cache=regard.{kind.__name__}(), one for each layer",
        )


def check_input(x: Tensor, width: int, weight: object) -> None:
    """Raise unless x is (B, N, W) and fits the layer's weight."""
    check_inputs(x, x, x, (width, width, width), weight)


def is_watched() -> bool:
    """Whether `watch`, `ablate` or another observer is shown the attention that is computed next."""
    if torch.compiler.is_compiling():
        return False
    count: int = torch._C._len_torch_function_stack()  # pyright: ignore[reportAttributeAccessIssue]
    modes = [torch._C._get_function_stack_at(i) for i in range(count)]  # pyright: ignore[reportAttributeAccessIssue]
    return bool(observers.stack) or any(not getattr(mode, "sees_projections", True) for mode in modes)
