"""Layers of one forward that are alike: what was checked and found for one of them holds for the next.

Most of what a watched layer costs in a short text is not its attention: what kind of attention it is, which tokens it
reads, what there is to measure and where results go. All of that is the same for the next layer with the same class of
module, sizes, options, mask and token ids. So the first of them leaves a plan (`Filing.plan`), and those that follow
have their key looked up, and are computed and kept (`Filing.see_by_plan`).

    out = by_plan(capture, frame, key, q, k, v)       where there is a plan: the output (B, H, N, E)
    keep(capture, key, attention, (q, k, v))          else, after `see`: make one

A key is None where each layer has to be described: both functions take that.

Plans are dropped with the call of the model, whose token ids and masks they have. The first layer of the next call may
find one that was kept without them (`AttentionCapture.earlier_plan`, `record/lasting_plans.py`).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, is_grad_enabled
from torch import get_num_threads as num_threads

from regard.heads.capture.huggingface import number_of_observers
from regard.heads.capture.module_stack import Frame
from regard.heads.capture.observed import ObservedCall
from regard.heads.capture.sdpa import added_band
from regard.kernels import native_library, plans

if TYPE_CHECKING:
    from regard.heads.capture.capture import AttentionCapture

__all__ = ["attend_key", "by_plan", "keep", "transformers_key"]


def attend_key(
    capture: AttentionCapture, frame: Frame, tensors: tuple[Tensor, Tensor, Tensor], options: Mapping[str, Any]
) -> Hashable | None:
    """The key of an `attend` that `kernels.plans` could repeat; None if it has no plan."""
    others = plans.options_key(options, learns=False)
    return None if others is None else _key(capture, frame, tensors, others)


def transformers_key(
    capture: AttentionCapture, frame: Frame, args: tuple[Any, ...], kwargs: dict[str, Any], *, eager: bool
) -> Hashable | None:
    """The key of a call of transformers' own sdpa function, or of an `eager` one that computes what its arguments say;
    None if it has no plan."""
    if len(args) != 4:
        return None
    q, k, v, mask = args
    if not plans.may_repeat(q, k, v) or not (mask is None or type(mask) is Tensor):
        return None
    given = kwargs.get
    if given("dropout") or not (given("position_bias") is given("cache") is None):
        return None
    scale, softcap = given("scaling"), given("softcap")
    if (scale is not None and type(scale) is not float) or (softcap is not None and type(softcap) is not float):
        return None
    if eager and given("s_aux") is not None:
        return None
    if softcap is not None and not eager:  # (sdpa refuses it, and ignores sinks)
        return None
    if mask is not None and mask.requires_grad and is_grad_enabled():
        return None
    visible = id(mask), 0 if mask is None or mask.is_inference() else mask._version  # (the plan keeps the mask alive)
    if mask is not None and mask.dtype is not torch.bool:
        with torch._C.DisableTorchFunction():
            band = added_band(mask) if mask.shape[-1] == k.shape[2] else None
        if band is not None:
            visible = repr(band)
        elif mask.is_inference():
            return None  # (it was made a boolean mask of, and nothing tells whether it was written over since)
    causal = getattr(frame.module, "is_causal", None), given("is_causal")
    return _key(capture, frame, (q, k, v), (eager, visible, scale, softcap, *causal))


def _key(
    capture: AttentionCapture, frame: Frame, tensors: tuple[Tensor, Tensor, Tensor], others: tuple[Any, ...]
) -> Hashable | None:
    q, k, v = tensors
    if (
        not capture.plans_layers
        or number_of_observers() != 1
        or capture.inside_attention
        or capture.streams.on
        or not frame.has_one_input()
        or "cu_seqlens" in frame.kwargs
        or (is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad))
    ):
        return None
    sizes = q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype, v.dtype
    cache = type(frame.kwargs.get("cache"))
    return type(frame.module), cache, sizes, others, num_threads(), native_library.instruction_set


def by_plan(
    capture: AttentionCapture, frame: Frame, key: Hashable | None, q: Tensor, k: Tensor, v: Tensor
) -> Tensor | None:
    """The output (B, H, N, E) of a layer like one before, seen and computed; None if there is no plan for it."""
    if key is None:
        return None
    ids = capture.frames.ids(q.shape[0], q.shape[2])
    if key in capture.layer_plans:
        plan = capture.layer_plans[key]
    else:
        plan = capture.earlier_plan(key, frame, ids)
        if plan is not None:
            capture.layer_plans[key] = plan
    if plan is None or not plan.is_valid() or ids is not plan.attention.ids:
        return None
    out = capture.see_by_plan(plan, frame, q, k, v)
    if out is not None:
        frame.tell()
        capture.reported.add(frame.name)
    return out


def keep(
    capture: AttentionCapture,
    key: Hashable | None,
    attention: ObservedCall,
    given: tuple[Tensor, Tensor, Tensor],
    mask: Tensor | None = None,
) -> None:
    """Make a plan of an attention that was seen and computed, `given` these q, k and v. Without one if its call has
    others: keys may have been cut. `mask`: the one that was given as a tensor, which must live as long as the plan."""
    call = attention.call
    if key is None or key in capture.layer_plans or call is None:
        return
    pairs = zip((call.q, call.k, call.v), given, strict=True)
    as_given = all(a.shape == b.shape and a.data_ptr() == b.data_ptr() for a, b in pairs)
    capture.layer_plans[key] = capture.layer_plan(key, attention, mask) if as_given else None
