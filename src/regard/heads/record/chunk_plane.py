"""The plane on which an attention call is measured as a chunk of its sequence.

Letters: B batch, H query heads, N queries, M keys.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from regard.attention import plane_of
from regard.heads.capture.observed import ObservedCall
from regard.measures import Measure, Plane
from regard.measures.base import NO_TOKEN

if TYPE_CHECKING:
    from regard.heads.record.sequences import SequenceRecord

__all__ = ["chunk_plane", "known_of_padding", "usable"]


def chunk_plane(attention: ObservedCall, text: SequenceRecord, numbers: Tensor) -> Plane:
    """What is known of one attention call, whose keys are tokens `numbers` (M,) of the sequence: its sizes, positions,
    token ids and padding. (Neither values nor the output projection.)"""
    batch, heads, n, m = attention.shape
    ids = None
    last = text.total - 1 if attention.numbers is None else int(numbers[-1])
    if text.ids is not None and attention.kind == "self" and text.ids.shape[1] > last:
        ids = text.ids
        if text.key_padding is not None:
            ids = ids.expand(batch, -1).masked_fill(text.key_padding[:, : ids.shape[1]], NO_TOKEN)
    whole = text.ids is not None and not text.pieces and attention.kind == "self" and n == m
    own_ids = text.ids if whole else attention.ids  # (a model may write over its own)
    known: dict[str, Any] = {"ids": own_ids, "text_ids": ids, "key_ids": None if ids is None else ids[:, numbers]}
    known |= known_of_padding(text, None if attention.padding is None else attention.padding[:, 0], numbers)
    call, weights = attention.call, attention.weights
    if call is None:
        assert weights is not None
        first = last + 1 - n if m else 0
        queries = torch.arange(first, first + n, device=weights.device)[None]
        dtype = torch.promote_types(weights.dtype, torch.float32)
        return Plane(batch, heads, n, m, queries, numbers[None], dtype, numbers=numbers, **known)
    plane = replace(plane_of(call), **known)
    if attention.kind == "self" and (text.pieces or attention.numbers is not None):
        # positions that were passed to the call are right (texts of several lengths), unless a cache renumbers them
        given = call.positions is not None and attention.numbers is None
        queries = plane.q_positions if given else numbers[None, m - n :]
        plane = replace(plane, numbers=numbers, k_positions=numbers[None], q_positions=queries)
    elif call.contiguous:
        plane.shared.update({"ascending": True, "steps": True})
        if call.q_start == 0 and n == m and all(x is None for x in (plane.padding, plane.key_padding, plane.first)):
            plane.shared["in order"] = True
    return plane


def known_of_padding(text: SequenceRecord, padding: Tensor | None, numbers: Tensor) -> dict[str, Any]:
    """Arguments of `Plane`: padding queries (B, N), padding among the keys `numbers` (M,), and first tokens (B,)."""
    known: dict[str, Any] = {"padding": padding, "key_padding": None, "first": None}
    if text.key_padding is not None:
        of_keys = text.key_padding[:, numbers]
        first = text.key_padding.to(torch.uint8).argmin(1)
        known |= {"key_padding": of_keys if of_keys.any() else None, "first": first if first.any() else None}
    return known


def usable(measures: list[Measure], plane: Plane) -> list[Measure]:
    """The measures that have what they need: token ids, the output projection's weight."""
    return [
        measure
        for measure in measures
        if not (measure.needs_ids and getattr(measure, "ids", None) is None and plane.key_ids is None)
        and not (measure.needs_out_weight and getattr(measure, "out_weight", None) is None and plane.out_weight is None)
    ]
