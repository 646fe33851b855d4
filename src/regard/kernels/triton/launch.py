"""Launches of device code: grids, blocks and what each kernel is compiled for. Triton is imported here, at first use.

Letters: B batch, H query heads, G kv heads, N queries, M keys, D head width of q and k, E head width of v.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard import tuning
from regard.kernels.call import Call
from regard.kernels.lowering import bias_gradients, by_distance, gradient_like, in_rows
from regard.kernels.triton.arguments import Heads, Look, Moments, Partial, Plane
from regard.kernels.triton.blocks import Blocks, blocks_for, parts_of
from regard.kernels.triton.interpreter import interpreting, quiet_numpy, repair
from regard.kernels.triton.lowered import Lowered, heads_of, lower, power_of_two

__all__ = ["Target", "attention", "chosen_blocks", "gradients", "launch", "precision_for", "target_of"]


class Target(NamedTuple):
    """What is compiled for: "interpreter", "cuda:80", "hip:gfx942"; and how many processors it has."""

    name: str
    processors: int


def target_of(device: torch.device) -> Target:
    """What device code is compiled for on a device."""
    if interpreting():
        return Target("interpreter", 4)
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        name = f"hip:{properties.gcnArchName.split(':')[0]}"
    else:
        name = f"cuda:{properties.major}{properties.minor}"
    return Target(name, properties.multi_processor_count)


def launch(kernel: Any, grid: tuple[int, ...], blocks: Blocks, like: Tensor, *args: Any, **compiled_for: Any) -> None:
    """Run a kernel on the device of a tensor."""
    if interpreting():
        repair()
        with quiet_numpy():
            kernel[grid](*args, **compiled_for)
        return
    elsewhere = like.is_cuda and like.device.index != torch.cuda.current_device()
    with torch.cuda.device(like.device) if elsewhere else nullcontext():
        kernel[grid](*args, **compiled_for, num_warps=blocks.warps, num_stages=blocks.stages, enable_fp_fusion=True)


def chosen_blocks(kernel: str, low: Lowered, target: Target, height: int = 0, width: int = 0) -> Blocks:
    """The blocks of a kernel; `height` and `width` where the caller named them."""
    call = low.call
    widest = power_of_two(max(call.q.shape[3], call.v.shape[3]))
    blocks = blocks_for(kernel, target.name, call.q.element_size(), widest, low.plain)
    return blocks._replace(rows=height or blocks.rows, keys=width or blocks.keys)


def precision_for(low: Lowered, target: Target) -> str:
    """How float32 is multiplied. NVIDIA's tensor cores take three products in tf32 for one that is nearly exact; they
    need more registers than there are where heads are wide, and AMD's compiler has no such thing."""
    call = low.call
    wide = call.q.element_size() == 4 and max(call.q.shape[3], call.v.shape[3]) > 128
    return "tf32x3" if target.name.startswith("cuda") and not wide else "ieee"


def attention(
    call: Call,
    out: Tensor | None,
    lse: Tensor,
    look: Look | None = None,
    moments: Moments | None = None,
    height: int = 0,
    width: int = 0,
) -> None:
    """Fill `out` (B, H, N, E), `lse` (B, H, N) and what `look` asks for."""
    from regard.kernels.triton.device import finish, forward

    low, target = lower(call), target_of(call.q.device)
    batch, heads, n, m = call.shape
    blocks = chosen_blocks("forward" if look is None else "seeing", low, target, height, width)
    few = n * low.sizes.shared <= blocks.rows  # then all query heads of a kv head are one block
    packed = few and low.sizes.shared > 1
    rows, units = (n * low.sizes.shared, batch * heads // low.sizes.shared) if packed else (n, batch * heads)
    if rows <= blocks.rows and not height:
        blocks = chosen_blocks("decode", low, target, power_of_two(rows), width)
    programs = -(-rows // blocks.rows) * units
    parts = parts_of(programs, m, blocks.keys, target.processors) if rows <= blocks.rows else 1
    per_part = -(-m // parts // blocks.keys) * blocks.keys
    parts = -(-m // per_part)
    flags = _row_flags(low, look, moments)
    partial = _new_partial(call, out, parts, flags) if parts > 1 else None
    place = None if out is None else Heads(out, *out.stride()[:3])
    compiled_for = low.compiled_for
    launch(
        forward.forward, (programs, parts), blocks, call.q, low.q, low.k, low.v, place, lse, look, partial, low.sizes,
        low.seen, low.bias, low.numbers, low.sinks, low.drop, moments, per_part,
        ROWS=blocks.rows, KEYS=blocks.keys, PACKED=packed, EDGES=low.edges, PRECISION=precision_for(low, target),
        OUTPUT=out is not None, **flags, **compiled_for,
    )  # fmt: skip
    if partial is not None:
        join = Blocks(16, 0, 4, 1)
        launch(
            finish.combine, (-(-batch * heads * n // join.rows),), join, call.q, place, lse, look, partial, low.sinks,
            1.0 if low.drop is None else low.drop.kept, low.sizes, low.numbers, batch, parts,
            ROWS=join.rows, E=compiled_for["E"], VALUES=compiled_for["VALUES"], BEHIND=flags["BEHIND"],
        )  # fmt: skip


def _row_flags(low: Lowered, look: Look | None, moments: Moments | None) -> dict[str, bool]:
    """Which sums over keys the statistics of rows need."""
    if look is None:
        return dict.fromkeys(("LOGS", "AHEAD", "APART", "BEHIND", "TARGET"), False)
    behind = moments is None and low.seen.after == 0  # no key stands ahead: distances are offsets
    far = look.distance is not None
    return {
        "LOGS": look.entropy is not None,
        "AHEAD": look.offset is not None or (far and behind),
        "APART": far and not behind,
        "BEHIND": behind,
        "TARGET": look.target is not None,
    }


def _new_partial(call: Call, out: Tensor | None, parts: int, flags: dict[str, bool]) -> Partial:
    """Memory for what parts of the keys give."""

    def new(*more: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(parts, *call.shape[:3], *more, dtype=dtype, device=call.q.device)

    return Partial(
        new(call.v.shape[3] if out is not None else 0),
        new(),
        new(),
        new() if flags["LOGS"] else None,
        new() if flags["AHEAD"] else None,
        new() if flags["APART"] else None,
        new(dtype=torch.int32) if flags["TARGET"] else None,
    )


def gradients(
    call: Call, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor, wanted: list[bool], height: int, width: int
) -> list[Tensor]:
    """The wanted gradients of `call.learned()`."""
    low, target = lower(call), target_of(call.q.device)
    d_out = in_rows(d_out.detach())
    delta = ((out.float() * d_out.float()).sum(-1) - d_lse).contiguous()
    rows = _Rows(low, target, heads_of(d_out), lse.contiguous(), delta, height, width)
    others = wanted[3:]
    want_sinks = others.pop(0) if call.sinks is not None else False
    dq, dk, dv = (gradient_like(x) if want else None for x, want in zip((call.q, call.k, call.v), wanted, strict=False))
    if dq is not None:
        rows.d_queries(dq)
    if dk is not None or dv is not None:
        rows.d_keys(dk, dv)
    results = [x for x in (dq, dk, dv) if x is not None]
    if want_sinks and call.sinks is not None:
        # a sink's weight is exp(sink - lse), and it holds no value
        d_sinks = -((call.sinks.float()[:, :, None] - lse).exp() * delta).nan_to_num(0.0).sum(2)
        results.append(d_sinks.sum_to_size(call.sinks.shape).to(call.sinks.dtype))
    return results + (rows.d_biases(others) if any(others) else [])


class _Rows(NamedTuple):
    """What every kernel of the backward pass reads."""

    low: Lowered
    target: Target
    d_out: Heads
    lse: Tensor
    delta: Tensor
    height: int
    width: int

    def _common(self) -> tuple[Any, ...]:
        low = self.low
        return low.sizes, low.seen, low.bias, low.numbers, low.drop

    def _blocks(self, kernel: str) -> Blocks:
        return chosen_blocks(kernel, self.low, self.target, self.height, self.width)

    def d_queries(self, dq: Tensor) -> None:
        from regard.kernels.triton.device import backward

        low, blocks = self.low, self._blocks("d_queries")
        batch, heads, n, _ = low.call.shape
        launch(
            backward.d_queries, (-(-n // blocks.rows) * batch * heads,), blocks, dq, low.q, low.k, low.v, self.d_out,
            Heads(dq, *dq.stride()[:3]), self.lse, self.delta, *self._common(),
            ROWS=blocks.rows, KEYS=blocks.keys, EDGES=low.edges, PRECISION=precision_for(self.low, self.target),
            **low.compiled_for,
        )  # fmt: skip

    def d_keys(self, dk: Tensor | None, dv: Tensor | None) -> None:
        from regard.kernels.triton.device import backward

        low, blocks = self.low, self._blocks("d_keys")
        batch, groups, m, _ = low.call.k.shape
        places = [None if x is None else Heads(x, *x.stride()[:3]) for x in (dk, dv)]
        launch(
            backward.d_keys, (-(-m // blocks.keys) * batch * groups,), blocks, low.call.q, low.q, low.k, low.v,
            self.d_out, *places, self.lse, self.delta, *self._common(),
            ROWS=blocks.rows, KEYS=blocks.keys, EDGES=low.edges, PRECISION=precision_for(self.low, self.target),
            WANT_K=dk is not None, WANT_V=dv is not None, **low.compiled_for,
        )  # fmt: skip

    def d_biases(self, wanted: list[bool]) -> list[Tensor]:
        """Gradients of scores are written for some queries at a time, and biases sum them up: by distance where they
        depend on it alone, else as each bias does."""
        call = self.low.call
        batch, heads, n, m = call.shape
        count = max(1, min(n, tuning.DENSE_LIMIT // (batch * heads * m)))
        if call.derive(by_distance):
            total = self.delta.new_zeros(batch, heads, 1, n + m - 1)
            for row in range(0, n, count):
                some = min(count, n - row)
                # row x of queries is shifted x to the left: columns are distances
                skewed = self.delta.new_zeros(batch, heads, some, m + some - 1)
                self._d_scores(Plane(skewed, some - 1, skewed.stride(1), skewed.stride(2) - 1), row, some)
                total[:, :, 0, n - row - some :][..., : m + some - 1] += skewed.sum(2)
            return bias_gradients(call, total, wanted)
        into = [torch.zeros_like(bias.weight, dtype=torch.float32) for bias in call.biases]
        for row in range(0, n, count):
            some = min(count, n - row)
            ds = self.delta.new_zeros(batch, heads, some, m)
            self._d_scores(Plane(ds, 0, ds.stride(1), m), row, some)
            tile = call.tile(slice(0, batch), slice(row, row + some), slice(0, m))
            for bias, to, want in zip(call.biases, into, wanted, strict=True):
                if want:
                    bias.add_gradient(ds, tile, to)
        return [to.to(bias.weight.dtype) for bias, to, want in zip(call.biases, into, wanted, strict=True) if want]

    def _d_scores(self, to: Plane, row: int, count: int) -> None:
        from regard.kernels.triton.device import backward

        low, blocks = self.low, self._blocks("d_scores")
        batch, heads, _, m = low.call.shape
        grid = -(-count // blocks.rows) * -(-m // blocks.keys) * batch * heads
        launch(
            backward.d_scores, (grid,), blocks, low.call.q, low.q, low.k, low.v, self.d_out, to, self.lse, self.delta,
            *self._common(), row, count,
            ROWS=blocks.rows, KEYS=blocks.keys, PRECISION=precision_for(self.low, self.target), **low.compiled_for,
        )  # fmt: skip
