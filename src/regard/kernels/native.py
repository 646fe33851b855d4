"""Our own C++ for CPUs (`native/`): flash attention forward and backward, and the statistics of `measure` in the same
pass. `docs/kernel.md` explains it. Where nobody differentiates or traces, C is called directly.

Letters: B batch, H query heads, G kv heads, N queries, M keys, D head width of q and k, E head width of v.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard import tuning
from regard.cache import Stored
from regard.kernels import blockwise, fused, operators
from regard.kernels import native_library as library
from regard.kernels.call import Call
from regard.kernels.dropout import Dropout, threshold_of
from regard.kernels.lowering import (
    Added,
    Visible,
    bias_gradients,
    broadcast_strides,
    gradient_like,
    in_rows,
    lower_biases,
    lower_mask,
    new_gradient,
    why_not_lowered,
)
from regard.kernels.native_library import CALL, DTYPES, GRADIENTS, SEGMENT
from regard.kernels.native_statistics import NO_STATISTICS, Statistics
from regard.measures import MeasureRun
from regard.tracing import traced

__all__ = ["backward", "forward", "forward_measured", "name", "output", "why_not"]

name = "native"

WIDEST = 1024  # numbers of a head


def why_not(call: Call) -> str | None:
    """In words, where it cannot serve."""
    missing = library.why_not()
    if missing is not None:
        if not torch.compiler.is_compiling():
            library.say_once()
        return missing
    if call.q.device.type != "cpu":
        return f"it is for CPUs, and the tensors are on {call.q.device.type}"
    return why_not_lowered(call, WIDEST)


def worth(call: Call) -> bool:
    """Wherever it can serve: no size is so small that torch's own kernel takes fewer microseconds. But on CPUs with AMX
    tiles, which that one uses and this one does only if asked for, bfloat16 in bulk is left to it."""
    if call.q.dtype is not torch.bfloat16 or call.q.shape[2] <= tuning.AMX_QUERIES or not library.has_amx():
        return True
    return library.uses_tiles() or fused.why_not(call) is not None


def forward(call: Call) -> tuple[Tensor, Tensor]:
    """Output (B, H, N, E) and log-sum-exp (B, H, N)."""
    return _forward(call)


def backward(call: Call, out: Tensor, lse: Tensor, d_out: Tensor, wanted: list[bool]) -> list[Tensor]:
    """The wanted gradients of `call.learned()`, where out and lse may be of more keys than the call has."""
    return _Loops().backward(call, out, lse, d_out, torch.zeros_like(lse), wanted, 0, 0)


def output(call: Call) -> Tensor:
    """(B, H, N, E)"""
    return _forward(call)[0]


def reads_stored(call: Call) -> bool:
    """Whether it reads keys and values as a cache stores them; else they are copied to plain tensors for this call."""
    k, v = call.k, call.v
    return (
        isinstance(k, Stored)
        and isinstance(v, Stored)
        and len(k.segments) == len(v.segments)
        and not traced(call.q, *call.learned()[3:])
        and not (torch.is_grad_enabled() and any(x.requires_grad for x in call.learned()))
    )


def _forward(call: Call) -> tuple[Tensor, Tensor]:
    if not call.stored:
        return differentiable_forward(call)
    return _Loops().forward(call, 0, 0) if reads_stored(call) else differentiable_forward(call.plain())


def forward_measured(call: Call, measuring: MeasureRun, *, output: bool = True) -> tuple[Tensor | None, Tensor]:
    """The same, with statistics from the same pass. Measures that it does not know are shown the weights afterwards."""
    out, lse = operators.new_output(call.q, call.v if output else call.v[..., :0])
    statistics = Statistics.of(call, measuring)
    block = statistics.new_block()
    _attention(call, out if output else None, lse, statistics.packed(block))
    hand_over(statistics, block, measuring)
    if any(statistics.in_strips):
        measuring.finish()
        blockwise.replay(call, lse, measuring.only(statistics.in_strips))
    return (out if output else None), lse


def hand_over(statistics: Statistics, block: Tensor, measuring: MeasureRun) -> None:
    """C has filled the block: the run will ask for its results."""
    measuring.unfinished = functools.partial(statistics.finish, block)
    if statistics.may_wait:
        measuring.plane, measuring.sees_all = statistics.plane, functools.partial(statistics.sees_all, block)


def _attention(call: Call, out: Tensor | None, lse: Tensor, statistics: Sequence[int] = NO_STATISTICS) -> None:
    """Call C: fills `out`, `lse` and what the fields of the statistics point to."""
    loaded = library.load()
    assert loaded is not None
    packed = _packed(call, out, lse, statistics)
    loaded.attention(packed.call)


class _Packed(NamedTuple):
    """The call as C reads it; the biases as they were lowered; and what else must live as long as it is read."""

    call: bytes
    added: Added | None
    alive: tuple[Any, ...]


def _packed(call: Call, out: Tensor | None, lse: Tensor, statistics: Sequence[int] = NO_STATISTICS) -> _Packed:
    """A call as C reads it. `statistics`: the fields of args.h from `entropy` on."""
    q, segments = in_rows(call.q), _segments(call.k, call.v)
    k, v = (_NOWHERE, _NOWHERE) if segments is not None else (in_rows(call.k), in_rows(call.v))
    batch, heads, n, width = q.shape
    _, groups, m, value_width = call.v.shape
    seen = _ALL if call.mask is None else call.derive(lower_mask)
    added = call.derive(lower_biases) if call.biases else None
    sinks = None if call.sinks is None else call.sinks.detach().resolve_neg().to(torch.float32)
    drop = call.dropout
    dense, documents = seen.dense, seen.documents
    packed = CALL.pack(
        CALL.size,
        library.isa(),
        torch.get_num_threads(),
        DTYPES[q.dtype],
        seen.causal,
        batch,
        heads,
        groups,
        n,
        m,
        width,
        value_width,
        q.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        0 if out is None else out.data_ptr(),
        lse.data_ptr(),
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        *((0, 0, 0) if out is None else out.stride()[:3]),
        *lse.stride(),
        call.scale,
        call.softcap or 0.0,
        call.q_start,
        seen.before,
        seen.after,
        0 if seen.key_start is None else seen.key_start.data_ptr(),
        0 if seen.key_end is None else seen.key_end.data_ptr(),
        *((0, 0, 0, 0) if documents is None else _documents(*documents)),
        *((0, 0, 0, 0, 0) if dense is None else (dense.data_ptr(), *broadcast_strides(dense))),
        *((0, 0, 0, 0, 0) if added is None else _bias(added)),
        *((0, 0, 0) if sinks is None else (sinks.data_ptr(), *broadcast_strides(sinks))),
        *((0, 0, 0, 0, 0, 0, 0, 0, 1.0) if drop is None else _dropout(drop)),
        segments.data_ptr() if segments is not None else 0,
        0 if segments is None else segments.numel() // SEGMENT.size,
        *statistics,
    )
    return _Packed(packed, added, (q, k, v, seen, sinks, drop, segments))


_ALL = Visible()
_NOWHERE = torch.empty(0, 0, 0, 0, device="cpu")  # stands for keys and values that are given as segments


def _segments(k: Tensor, v: Tensor) -> Tensor | None:
    """Keys and values as a cache stores them, as C reads them: bytes; None where they are plain tensors."""
    if not (isinstance(k, Stored) and isinstance(v, Stored)):
        return None
    packed = bytearray()
    for keys, values in zip(k.segments, v.segments, strict=True):
        parts = [keys.numbers, values.numbers, keys.scales, values.scales]
        strides = [(0, 0, 0) if x is None else (x.stride(0) if x.shape[0] > 1 else 0, *x.stride()[1:3]) for x in parts]
        numbers = (stride for each in strides for stride in each)
        packed += SEGMENT.pack(*map(_address, parts), keys.numbers.shape[2], *numbers)
    return torch.frombuffer(packed, dtype=torch.uint8)


def _address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def _documents(q_ids: Tensor, k_ids: Tensor) -> tuple[int, int, int, int]:
    return q_ids.data_ptr(), k_ids.data_ptr(), broadcast_strides(q_ids)[0], broadcast_strides(k_ids)[0]


def _bias(added: Added) -> tuple[int, ...]:
    return added.tensor.data_ptr() + added.first * added.tensor.element_size(), *added.strides


def _dropout(drop: Dropout) -> tuple[int | float, ...]:
    rows, cols = drop.rows, drop.cols
    strides = (*broadcast_strides(rows), *broadcast_strides(cols))
    return rows.data_ptr(), cols.data_ptr(), *strides, threshold_of(drop.p), drop.kept


class _Loops:
    """C's loops, for `operators`. Its blocks have sides of their own."""

    def forward(self, call: Call, height: int, width: int) -> tuple[Tensor, Tensor]:
        out, lse = operators.new_output(call.q, call.v)
        _attention(call, out, lse)
        return out, lse

    def backward(
        self,
        call: Call,
        out: Tensor,
        lse: Tensor,
        d_out: Tensor,
        d_lse: Tensor,
        wanted: list[bool],
        height: int,
        width: int,
    ) -> list[Tensor]:
        dtype = call.q.dtype
        if any(x.dtype is not dtype for x in (call.k, call.v, out, d_out)):  # C reads numbers of one kind
            call = replace(call, q=call.q.float(), k=call.k.float(), v=call.v.float())
            out, d_out = out.float(), d_out.float()
        loaded = library.load()
        assert loaded is not None
        grads: list[Tensor | None] = [
            gradient_like(x) if want else None for x, want in zip((call.q, call.k, call.v), wanted, strict=False)
        ]
        others = wanted[3:]
        want_sinks = others.pop(0) if call.sinks is not None else False
        d_sinks = lse.new_empty(lse.shape[:2]) if want_sinks else None
        d_out, out = in_rows(d_out), in_rows(out)
        packed = _packed(call, out, lse)
        d_added = new_gradient(packed.added) if packed.added is not None and any(others) else None
        loaded.backward(packed.call, _packed_gradients(d_out, d_lse, grads, d_added, d_sinks))
        results: list[Tensor] = [grad.to(dtype) for grad in grads if grad is not None]
        if d_sinks is not None and call.sinks is not None:
            results.append(d_sinks.sum_to_size(call.sinks.shape).to(call.sinks.dtype))
        if d_added is not None:
            results += bias_gradients(call, d_added.tensor, others)
        return results


def _packed_gradients(
    d_out: Tensor,
    d_lse: Tensor | None,
    grads: list[Tensor | None],
    d_added: Added | None = None,
    d_sinks: Tensor | None = None,
) -> bytes:
    """What the backward pass is given, and where the gradients of q, k and v go."""
    return GRADIENTS.pack(
        GRADIENTS.size,
        d_out.data_ptr(),
        _address(d_lse),
        *d_out.stride()[:3],
        *((0, 0, 0) if d_lse is None else d_lse.stride()),
        *[_address(grad) for grad in grads],
        *[stride for grad in grads for stride in ((0, 0, 0) if grad is None else grad.stride()[:3])],
        *((0, 0, 0, 0, 0) if d_added is None else _bias(d_added)),
        _address(d_sinks),
    )


differentiable_forward = operators.register(name, _Loops())
