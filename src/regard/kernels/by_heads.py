"""A call whose kv heads hold different tokens (`HeadCache`), in parts: heads that hold the same are one plain call.

Letters: B batch, H query heads, G kv heads, N queries, M keys.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
from torch import Tensor

from regard.cache import StoredHeads, StreamingHeads
from regard.kernels.call import Call
from regard.masks import And, Causal, Mask, Prefix, Window, conjuncts
from regard.tracing import traced

__all__ = ["parts_by_heads"]


def parts_by_heads(call: Call) -> list[tuple[list[int], Call]] | None:
    """The query heads of each part, and its call. None where the call has what cannot be cut by heads and positions
    alone (a mask of slots, biases, dropout, gradients): it is then computed as its definition says, with plain keys and
    the mask of each head."""
    k, v = call.k, call.v
    masks = [part for part in conjuncts(call.mask) if not isinstance(part, StreamingHeads)]
    streaming = next((part for part in conjuncts(call.mask) if isinstance(part, StreamingHeads)), None)
    if (
        not (isinstance(k, StoredHeads) and isinstance(v, StoredHeads) and call.contiguous)
        or not all(isinstance(part, (Causal, Window)) for part in masks)
        or call.biases
        or call.dropout is not None
        or traced(call.q, *call.learned()[3:])
        or (torch.is_grad_enabled() and any(x.requires_grad for x in call.learned()))
    ):
        return None
    parts, per_group = [], call.q.shape[1] // k.shape[1]
    for keys, values in zip(k.parts, v.parts, strict=True):
        heads = [head * per_group + i for head in keys.heads for i in range(per_group)]
        part = replace(call, q=call.q[:, heads], k=keys.tensor, v=values.tensor, mask=_all_of(masks))
        part = replace(part, sinks=None if call.sinks is None else call.sinks[:, heads])
        if keys.positions is not None:
            part = _streaming_part(part, keys.positions, masks, streaming)
        parts.append((heads, part.simplified()))
    return parts


def _streaming_part(call: Call, positions: Tensor, masks: list[Mask], streaming: StreamingHeads | None) -> Call:
    """The part of heads that hold the tokens at some positions only."""
    n, held, keys = call.q.shape[2], positions.shape[0], int(positions[-1]) + 1
    if n == 1 and all(isinstance(mask, Causal) for mask in masks) and call.q_start >= keys - 1:
        return replace(call, mask=None, q_start=held - 1)  # one query sees all that is held
    if streaming is not None:
        near = Window(before=streaming.window - 1, after=keys)
        masks = [*masks, near | Prefix(streaming.keep_first) if streaming.keep_first else near]
    if held == keys:
        return replace(call, mask=_all_of(masks))
    queries = torch.arange(call.q_start, call.q_start + n, device=positions.device)
    return replace(call, mask=_all_of(masks), positions=queries[None], key_positions=positions[None])


def _all_of(masks: list[Mask]) -> Mask | None:
    return functools.reduce(And, masks) if masks else None
