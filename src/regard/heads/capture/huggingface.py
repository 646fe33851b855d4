"""Sense of transformers' models: the functions that compute their attention, wrapped for as long as somebody looks.

Models of transformers ask an interface for the function that computes attention ("sdpa", "eager", ...) and hand it q,
unexpanded k and v, mask, softcap, sinks. For the duration the interface answers with a wrapper, which asks those who
look at the module, and passes everyone else's calls through. No configuration is touched, so a model computes what it
would have computed, down to the bit.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn

__all__ = ["Implementation", "Looker", "lookers", "start", "stop", "uses_flex_attention"]

Function = Callable[..., tuple[Tensor, Any]]


class Implementation(NamedTuple):
    """How a model of transformers attends: the name under which it asked, and how its masks are to be read.

    - "eager", the module's own function: the mask is added to the scores, whatever its dtype.
    - "sdpa": a plane that is boolean (True sees) or added; without one causal from the top left, by the module's word.
    - "flash": which keys are no padding, (B, M); causal from the bottom right, windows and packed texts by arguments.
    - "flex": a `BlockMask`.
    - "unknown": no function for its masks is registered, so it is given none.
    """

    name: str
    masks: Literal["eager", "sdpa", "flash", "flex", "unknown"]
    trusted: bool = False  # transformers' own function, which does as it says: no need to compare


class Looker(Protocol):
    """Somebody who looks at some modules."""

    changes: bool

    def owns(self, module: nn.Module) -> bool: ...

    def through(self, compute: Function, how: Implementation, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Compute, and look; or change what comes out."""
        ...


_LOCK = threading.Lock()  # of both lists and of the interface: others may begin and end in other threads
_LOOKERS: list[Looker] = []  # the innermost last
_ORIGINAL: list[Any] = []  # the interface's own `get_interface`, while it is replaced


def start(looker: Looker) -> None:
    """Begin to look. Where transformers is not in use nothing happens."""
    with _LOCK:
        interface = _interface()
        if interface is not None and not _ORIGINAL:
            original = interface.get_interface
            _ORIGINAL.append(original)

            def get_interface(self: Any, attn_implementation: str, default: Function) -> Function:
                function = original(self, attn_implementation, default)
                return _wrapper(_implementation(attn_implementation, function, default), function)

            interface.get_interface = get_interface
        _LOOKERS.append(looker)


def stop(looker: Looker) -> None:
    """Look no more; the last one puts the interface back as it was."""
    with _LOCK:
        _LOOKERS.remove(looker)
        interface = _interface()
        if not _LOOKERS and _ORIGINAL and interface is not None:
            interface.get_interface = _ORIGINAL.pop()


def lookers() -> list[Looker]:
    """All who look, the innermost last; as of now."""
    with _LOCK:
        return list(_LOOKERS)


def _interface() -> Any:
    """transformers' class, if it was imported: a model of it cannot be there otherwise."""
    interface = getattr(sys.modules.get("transformers.modeling_utils"), "AttentionInterface", None)
    return interface if hasattr(interface, "get_interface") else None  # (before version 5: the other senses see it)


def uses_flex_attention(model: nn.Module) -> bool:
    """Whether a model of transformers, or a part of one, is told to attend by `flex_attention`, which is compiled."""
    configs = (getattr(module, "config", None) for module in model.modules())
    return any(getattr(config, "_attn_implementation", None) == "flex_attention" for config in configs)


def _implementation(name: str, function: Function, default: Function) -> Implementation:
    if function is default:
        return Implementation("eager", "eager")
    masks = _masks_of(name)
    own = getattr(function, "__module__", "") == "transformers.integrations.sdpa_attention"
    return Implementation(name, masks, trusted=own and masks == "sdpa")


def _masks_of(name: str) -> Any:
    """How the masks of an implementation are to be read: by the function that is registered to make them."""
    utils = sys.modules.get("transformers.masking_utils")
    registered = getattr(getattr(utils, "AttentionMaskInterface", None), "_global_mapping", {})
    make = registered.get(name.removeprefix("paged|"))
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
            return "sdpa" if kind == "eager" else kind  # (both are planes, read by their dtype)
    try:  # one of somebody's own: what does it make of a small text with padding?
        mask = make(batch_size=1, q_length=2, kv_length=2, attention_mask=torch.tensor([[False, True]]))
    except Exception:
        return "unknown"
    return {2: "flash", 4: "sdpa"}.get(mask.dim(), "unknown") if isinstance(mask, Tensor) else "unknown"


def _wrapper(how: Implementation, original: Function) -> Function:
    def attention(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        compute = original
        for looker in lookers():  # the innermost is asked first, and calls the others
            if looker.owns(module):
                compute = _around(looker, compute, how)
        return compute(module, *args, **kwargs)

    return attention


def _around(looker: Looker, compute: Function, how: Implementation) -> Function:
    def inner(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        return looker.through(compute, how, module, *args, **kwargs)

    return inner
