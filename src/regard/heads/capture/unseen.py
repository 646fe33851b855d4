"""Attention that a capture could not read: how it is noticed, and the reason that is given in `seen.unseen`.

- a softmax whose result could not be followed to a product with values, or was multiplied in parts
- a function that computes attention by its name, and that the capture does not know
- a module whose class is named for attention, in which none was seen
- modules traced or scripted by torch.jit
"""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING, Any

from regard.errors import bad_value
from regard.heads.capture.model_tree import is_named_for_attention
from regard.heads.capture.module_stack import Frame

if TYPE_CHECKING:
    from regard.heads.capture.capture import AttentionCapture

__all__ = [
    "IN_PARTS",
    "check_function",
    "check_scripted_modules",
    "check_softmaxes",
    "check_unreported_module",
    "report_unreadable",
]

IN_PARTS = "its attention is computed in parts, of some queries or keys each, which are not put together"

_ATTENTION_FUNCTION = re.compile(r"scaled_dot_product|flash_att|efficient_att|varlen_att|flex_att|native_multi_head")
_ATTENTION_IN_GRAPH = re.compile(r"aten::(softmax|_softmax|scaled_dot_product|_native_multi_head|\w*flash_att)")


def report_unreadable(capture: AttentionCapture, frame: Frame, reason: str) -> None:
    """Name the module of a call, which computed attention that cannot be read; an error if heads were changed in it."""
    if frame.changed:
        raise bad_value(
            frame.name, expected="attention that can be read as a whole, where heads are changed", received=reason
        )
    frame.tell()
    frame.unseen = True
    capture.not_seen(frame.name, reason)


def check_function(capture: AttentionCapture, frame: Frame, func: Any) -> None:
    """A function without a handler was called: does its name say that it computes attention?"""
    if _is_attention(func):
        reason = f"it calls {func}, which shows nothing; F.scaled_dot_product_attention is seen"
        report_unreadable(capture, frame, reason)


def check_softmaxes(capture: AttentionCapture, frame: Frame) -> None:
    """A module ended: report those of its softmaxes whose result could not be followed to a product with values."""
    origins = capture.handwritten.tracer.origins
    for origin in [origin for origin in origins if origin.where is frame]:
        lost = origin.scored and not origin.used and origin.lost
        if lost or (origin.parts and (origin.lost or origin.parts > 1)):
            reason = f"its softmax over keys could not be followed to a product with values (lost in {origin.lost})"
            report_unreadable(capture, origin.home, IN_PARTS if origin.parts else reason)
            frame.unseen = True
        elif not (origin.used or origin.parts or origin.lost) and frame.parent is not None:
            origin.where = frame.parent  # the module may have returned it to its caller
            continue
        origins.remove(origin)


def check_unreported_module(capture: AttentionCapture, frame: Frame) -> None:
    """A module ended in which no attention was reported: if its class is named for attention, name it. Of nested ones
    the innermost is named, when the outermost ends."""
    if not is_named_for_attention(type(frame.module)):
        return
    outer = frame.parent
    while outer is not None and not is_named_for_attention(type(outer.module)):
        outer = outer.parent
    silent = frame.silent or [frame.name]
    if outer is not None:
        outer.silent += silent
        return
    for name in silent:
        if name not in capture.reported:
            capture.not_seen(
                name,
                "its class is named for attention, and no softmax over keys that could be followed "
                "to values was computed in it",
            )


def check_scripted_modules(capture: AttentionCapture) -> None:
    """The capture ended: name the modules of torch.jit whose graph computes attention."""
    for name, module in capture.frames.scripted():
        if _ATTENTION_IN_GRAPH.search(str(module.inlined_graph)):
            capture.not_seen(name, "it was traced or scripted by torch.jit, which shows nothing")


@functools.lru_cache(maxsize=4096)
def _is_attention(func: Any) -> bool:
    """Whether a torch function or operator computes attention, by its name."""
    return _ATTENTION_FUNCTION.search(str(getattr(func, "__name__", func))) is not None
