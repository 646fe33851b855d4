"""A call in parts, some heads, queries and keys at a time: merged by their log-sum-exp they are the whole."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from attention_cases import Case, cases
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from regard import kernels
from regard.kernels import Call, Kernel, blockwise, fused, native, reference
from regard.kernels.dropout import Dropout
from regard.masks import Causal, Documents, Hide, Keep, Mask, Padding, Prefix, Tile, Window

pytestmark = pytest.mark.on_device

EXAMPLES = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
CUTS = st.lists(st.floats(0, 1), max_size=2)


def slices(length: int, cuts: list[float]) -> list[slice]:
    ends = sorted({0, length, *(round(cut * length) for cut in cuts)})
    return [slice(a, b) for a, b in pairwise(ends)]


def parts(call: Call, rows: list[float], cols: list[float], by_group: bool):
    """Every part of a call, with where it lies; dropout cut along."""
    groups, heads = call.k.shape[1], call.q.shape[1]
    shared = heads // groups
    some = [slice(g * shared, (g + 1) * shared) for g in range(groups)] if by_group else [slice(0, heads)]
    for own in some:
        kv = slice(own.start // shared, own.stop // shared)
        for row in slices(call.q.shape[2], rows):
            for col in slices(call.k.shape[2], cols):
                part = call.part(call.q[:, own, row], call.k[:, kv, col], call.v[:, kv, col], own, row, col)
                if call.dropout is not None:
                    drop = call.dropout
                    part = replace(part, dropout=Dropout(drop.p, drop.rows[:, own, row], drop.cols[:, col]))
                yield own, kv, row, col, replace(part, sinks=None)


def merged(call: Call, kernel: Kernel, *cut) -> tuple[torch.Tensor, torch.Tensor]:
    """Out and lse of all parts together, by the definition."""
    batch, heads, n, _ = call.q.shape
    found: dict[tuple[int, int], list] = {}
    for own, _, row, _, part in parts(call, *cut):
        found.setdefault((own.start, row.start), []).append((own, row, *kernel.forward(part)))
    out = torch.zeros(batch, heads, n, call.v.shape[3], dtype=call.dtype)
    lse = torch.full((batch, heads, n), float("-inf"), dtype=call.dtype)
    for several in found.values():
        own, row = several[0][:2]
        lses = torch.stack([one[3] for one in several])
        if call.sinks is not None:
            sink = call.sinks[:, own, None].to(call.dtype).expand(lses.shape[1:])
            lses = torch.cat([lses, sink[None]])
        total = lses.logsumexp(0)
        lse[:, own, row] = total
        share = (lses - total.masked_fill(total.isneginf(), 0.0)).exp()
        for one, weight in zip(several, share, strict=False):
            out[:, own, row] += one[2].to(call.dtype) * weight[..., None]
    return out, lse


@EXAMPLES
@given(cases(), CUTS, CUTS, st.booleans())
def test_parts_merge_to_the_whole(case: Case, rows: list[float], cols: list[float], by_group: bool) -> None:
    call = case.to(torch.float64).call()
    with torch.no_grad():
        out, lse = merged(call, reference, rows, cols, by_group)
        whole = reference.forward(call)
    torch.testing.assert_close(out, whole[0], rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(lse, whole[1], rtol=1e-11, atol=1e-11)


def gradients(call: Call, kernel: Kernel, d_out: torch.Tensor, *cut) -> list[torch.Tensor]:
    """The sum of what `backward` gives for each part, from the whole's out and lse."""
    with torch.no_grad():
        out, lse = reference.forward(call)
    made = [torch.zeros_like(x, dtype=call.dtype) for x in learned_but_sinks(call)]
    wanted = [x.requires_grad for x in learned_but_sinks(call)]
    for own, kv, row, col, part in parts(call, *cut):
        if kernel.why_not(part) is not None:
            return []
        rows = (slice(None), own, row)
        grads = kernel.backward(part, out[rows], lse[rows], d_out[rows], wanted)
        made[0][rows] += grads[0]
        made[1][:, kv, col] += grads[1]
        made[2][:, kv, col] += grads[2]
        more = iter(grads[3:])
        for bias, into, want in zip(call.biases, made[3:], wanted[3:], strict=True):
            if want:
                into[bias.where(own, row, col)] += next(more)
    return made


def learned_but_sinks(call: Call) -> list[torch.Tensor]:
    return [x for i, x in enumerate(call.learned()) if call.sinks is None or i != 3]


def check_gradients(case: Case, kernel: Kernel, dtype: torch.dtype, tolerance: float, *cut) -> None:
    case = case.to(dtype)
    call = case.call()
    d_out = torch.linspace(-1, 1, call.q.shape[0] * call.q.shape[1] * call.q.shape[2] * call.v.shape[3], dtype=dtype)
    d_out = d_out.view(*call.q.shape[:3], call.v.shape[3])
    made = gradients(call, kernel, d_out, *cut)
    learned = [x for x in learned_but_sinks(call) if x.requires_grad]
    right = torch.autograd.grad(reference.output(call), learned, d_out, allow_unused=True)
    wanted = [mine for mine, x in zip(made, learned_but_sinks(call), strict=False) if x.requires_grad]
    for mine, grad, x in zip(wanted, right, learned, strict=False):
        grad = torch.zeros_like(x) if grad is None else grad
        torch.testing.assert_close(mine.to(dtype), grad, rtol=tolerance, atol=tolerance)


@EXAMPLES
@given(cases(), CUTS, CUTS, st.booleans(), st.sampled_from([reference, blockwise, fused]))
def test_gradients_of_parts_are_those_of_the_whole(
    case: Case, rows: list[float], cols: list[float], by_group: bool, kernel: Kernel
) -> None:
    check_gradients(case, kernel, torch.float64, 1e-10, rows, cols, by_group)


@pytest.mark.skipif("native" not in kernels.available(), reason="the native kernel was not compiled here")
@EXAMPLES
@given(cases(), CUTS, CUTS, st.booleans())
def test_gradients_of_parts_by_the_native_kernel(
    case: Case, rows: list[float], cols: list[float], by_group: bool
) -> None:
    check_gradients(case, native, torch.float32, 2e-4, rows, cols, by_group)


MASKS = [
    Causal(),
    Window(3),
    Window(before=1, after=2),
    Prefix(4),
    Prefix(torch.tensor([2, 6])),
    Padding(lengths=torch.tensor([5, 9])),
    Padding(keep=torch.tensor([[True, False] * 5 + [True], [True] * 11])),
    Documents(torch.tensor([0] * 4 + [1] * 3 + [2] * 4)),
    Keep(torch.rand(2, 3, 11, 11, generator=torch.Generator().manual_seed(0)) > 0.5),
    Hide(torch.rand(11, 11, generator=torch.Generator().manual_seed(0)) > 0.5),
    Causal() & Window(4) & ~Prefix(1),
    (Causal() | Prefix(3)) & Padding(lengths=torch.tensor([7, 11])),
]


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_the_part_of_a_mask_is_that_part(mask: Mask) -> None:
    whole = mask.dense(11)
    rows, cols, heads = slice(3, 8), slice(2, 9), slice(1, 3)
    tile = Tile(11, slice(None), rows, cols, torch.arange(3, 8)[None], torch.arange(2, 9)[None])
    part = mask.part(tile, heads, 2)
    seen = part.dense(5, 7, positions=torch.arange(1, 6), key_positions=torch.arange(7))
    right = whole[:, heads] if whole.shape[1] > 1 else whole
    right = right[..., rows, cols]
    assert torch.equal(seen.expand(right.shape), right)
    assert not right.all()  # (it hides something, so that a part of another place would show)


def test_a_mask_of_ones_own_is_evaluated() -> None:
    class Even(Mask):
        def block(self, tile: Tile) -> torch.Tensor:
            return ((tile.k_positions % 2 == 0)[:, None, None, :]).expand(-1, 1, tile.q_positions.shape[1], -1)

    tile = Tile(7, slice(None), slice(2, 4), slice(1, 6), torch.arange(2, 4)[None], torch.arange(1, 6)[None])
    part = Even().part(tile, slice(0, 1), 1)
    assert isinstance(part, Keep)
    assert part.dense(2, 5)[0, 0].int().tolist() == [[0, 1, 0, 1, 0]] * 2


def test_dropout_of_a_part_is_that_part() -> None:
    seed = torch.tensor([5])
    whole = Dropout.of(0.4, seed, 2, 6, 11, 13)
    numbers = torch.arange(2, dtype=torch.int32)[:, None] * 6 + torch.arange(2, 5, dtype=torch.int32)
    rows, cols = (torch.arange(a, b, dtype=torch.int32) for a, b in ((3, 7), (5, 12)))
    part = Dropout.at(0.4, seed, numbers, rows, cols)
    assert torch.equal(part.rows, whole.rows[:, 2:5, 3:7])
    assert torch.equal(part.cols, whole.cols[:, 5:12])
