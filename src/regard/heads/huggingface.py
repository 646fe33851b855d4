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
from typing import Any, Protocol

from torch import Tensor, nn

__all__ = ["Looker", "lookers", "start", "stop"]

Function = Callable[..., tuple[Tensor, Any]]


class Looker(Protocol):
    """Somebody who looks at some modules."""

    changes: bool

    def owns(self, module: nn.Module) -> bool: ...

    def through(self, compute: Function, name: str, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
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
                return _wrapper("eager" if function is default else attn_implementation, function)

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


def _wrapper(name: str, original: Function) -> Function:
    def attention(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        compute = original
        for looker in lookers():  # the innermost is asked first, and calls the others
            if looker.owns(module):
                compute = _around(looker, compute, name)
        return compute(module, *args, **kwargs)

    return attention


def _around(looker: Looker, compute: Function, name: str) -> Function:
    def inner(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        return looker.through(compute, name, module, *args, **kwargs)

    return inner
