"""Where transformers is intercepted: its attention functions are wrapped while a `watch` or an `ablate` is active.

Models of transformers ask `AttentionInterface` for the function that computes attention ("sdpa", "eager", ...) and call
it with q, unexpanded k and v, mask, softcap and sinks. Meanwhile the interface returns a wrapper, which calls the
observers of the module; calls of other modules pass through. No configuration is changed, so a model computes what it
would have computed, bit for bit.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn

__all__ = ["Implementation", "Observer", "number_of_observers", "observers", "start", "stop", "uses_flex_attention"]

Function = Callable[..., tuple[Tensor, Any]]


class Implementation(NamedTuple):
    """An attention function of transformers: the name it was asked for by, and how its masks are to be read.

    - "eager", the module's own function: the mask is added to the scores, whatever its dtype.
    - "sdpa": (B, 1, N, M), boolean (True = may attend) or added; without a mask, causal from the top left if the module
      says so.
    - "flash": (B, M), True for keys that are no padding; causal from the bottom right; windows and packed texts by
      arguments.
    - "flex": a `BlockMask`.
    - "unknown": no function for its masks is registered, so it is given none.
    """

    name: str
    masks: Literal["eager", "sdpa", "flash", "flex", "unknown"]
    trusted: bool = False  # transformers' own function: its result need not be compared with ours


class Observer(Protocol):
    """A `watch` or an `ablate` of some modules."""

    changes: bool  # whether it changes outputs

    def owns(self, module: nn.Module) -> bool: ...

    def through(self, compute: Function, how: Implementation, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Call `compute`, and record the attention or change its output."""
        ...


_LOCK = threading.Lock()  # guards both lists and the interface: observers may start and stop in several threads
_OBSERVERS: list[Observer] = []  # the innermost last
_ORIGINAL: list[Any] = []  # the interface's own `get_interface`, while it is replaced


def start(observer: Observer) -> None:
    """Add an observer; the first one replaces `get_interface`, if transformers was imported."""
    with _LOCK:
        interface = _interface()
        if interface is not None and not _ORIGINAL:
            original = interface.get_interface
            _ORIGINAL.append(original)
            wrappers: dict[Any, tuple[Function, Any]] = {}  # every layer asks for the same function

            def get_interface(self: Any, attn_implementation: str, default: Function) -> Function:
                function = original(self, attn_implementation, default)
                if getattr(function, "__module__", "") == "regard.integrations.transformers":
                    return function  # it calls `attend`, which is observed itself
                makes_masks = None if function is default else _mask_function(attn_implementation)
                key = attn_implementation, id(function), id(default), id(makes_masks)
                if key not in wrappers:
                    how = _implementation(attn_implementation, function, default)
                    wrappers[key] = _wrapper(how, function), (default, makes_masks)  # (alive, as their ids are known)
                return wrappers[key][0]

            interface.get_interface = get_interface
        _OBSERVERS.append(observer)


def stop(observer: Observer) -> None:
    """Remove an observer; the last one puts `get_interface` back."""
    with _LOCK:
        _OBSERVERS.remove(observer)
        interface = _interface()
        if not _OBSERVERS and _ORIGINAL and interface is not None:
            interface.get_interface = _ORIGINAL.pop()


def observers() -> list[Observer]:
    """A copy of the list of observers, the innermost last."""
    with _LOCK:
        return list(_OBSERVERS)


def number_of_observers() -> int:
    """How many there are."""
    return len(_OBSERVERS)


def _interface() -> Any:
    """`AttentionInterface` of transformers, if it was imported. (Versions before 5 have none that can be replaced:
    their attention is seen as torch functions.)"""
    interface = getattr(sys.modules.get("transformers.modeling_utils"), "AttentionInterface", None)
    return interface if hasattr(interface, "get_interface") else None


def uses_flex_attention(modules: list[nn.Module]) -> bool:
    """Whether a model of transformers among these, or a part of one, uses `flex_attention`, which is compiled."""
    # (not by getattr, which is slow where a module has no such attribute)
    configs = [module.__dict__["config"] for module in modules if "config" in module.__dict__]
    return any(getattr(config, "_attn_implementation", None) == "flex_attention" for config in configs)


def _implementation(name: str, function: Function, default: Function) -> Implementation:
    if function is default:
        return Implementation("eager", "eager")
    masks = _masks_of(name)
    own = getattr(function, "__module__", "") == "transformers.integrations.sdpa_attention"
    return Implementation(name, masks, trusted=own and masks == "sdpa")


def _mask_function(name: str) -> Any:
    """The function that is registered to build the masks of an implementation; None if there is none."""
    utils = sys.modules.get("transformers.masking_utils")
    registered = getattr(getattr(utils, "AttentionMaskInterface", None), "_global_mapping", {})
    return registered.get(name.removeprefix("paged|"))


def _masks_of(name: str) -> Any:
    """How the masks of an implementation are to be read, by the function that is registered to build them."""
    make = _mask_function(name)
    if make is None:
        return "unknown"
    while isinstance(make, partial):
        make = make.func
    return _masks_made_by(make)


@lru_cache(maxsize=64)
def _masks_made_by(make: Callable[..., Any]) -> str:
    utils = sys.modules.get("transformers.masking_utils")
    for kind in ("flash", "sdpa", "eager", "flex"):
        if make in (getattr(utils, f"{kind}_mask", None), getattr(utils, f"{kind}_attention_mask", None)):
            return "sdpa" if kind == "eager" else kind  # both build (B, 1, N, M), read by dtype
    try:  # a function that a user registered: try it on a small text with padding
        mask = make(batch_size=1, q_length=2, kv_length=2, attention_mask=torch.tensor([[False, True]], device="cpu"))
    except Exception:
        return "unknown"
    return {2: "flash", 4: "sdpa"}.get(mask.dim(), "unknown") if isinstance(mask, Tensor) else "unknown"


def _wrapper(how: Implementation, original: Function) -> Function:
    def attention(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        owners = [observer for observer in _OBSERVERS[:] if observer.owns(module)]
        compute = original
        for observer in owners[:-1]:  # the innermost is called first, and calls the others
            compute = _around(observer, compute, how)
        if not owners:
            return compute(module, *args, **kwargs)
        return owners[-1].through(compute, how, module, *args, **kwargs)

    return attention


def _around(observer: Observer, compute: Function, how: Implementation) -> Function:
    def inner(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        return observer.through(compute, how, module, *args, **kwargs)

    return inner
