"""The GPU kernels against `reference` in float64, as every kernel: values, log-sum-exp, gradients, block edges,
widths."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_cases import Case, assert_accurate, assert_typically_accurate, cases
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import regard
from regard.kernels import reference, triton
from regard.masks import Blocks, Causal, Chunk, Documents, Keep, Padding, Prefix, Tree, Window
from regard.positions import Alibi, RelativeBias, ScoreMod

FEW = settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
MANY = settings(FEW, max_examples=150)
STRIDES = st.sampled_from(["plain", "transposed", "gaps", "columns"])
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIDES = st.sampled_from([0, 16])


def agrees(case: Case, dtype: torch.dtype, strides: str, side: int) -> None:
    case = case.to(dtype, strides)
    out, lse = triton.differentiable_forward(case.call(), side, side)
    assert lse.dtype == torch.float32
    assert_accurate(case, case.with_gradients(out), "triton")


def log_sum_exp_agrees(case: Case, strides: str, side: int) -> None:
    case, precise = case.to(torch.float32, strides), case.to(torch.float64)
    out, lse = triton.differentiable_forward(case.call(), side, side)
    right = reference.forward(precise.call())[1]
    torch.testing.assert_close(lse.double(), right, rtol=2e-6, atol=2e-6)
    assert_accurate(case, case.with_gradients(out, lse), "triton", lse=True)


@FEW
@given(cases(), st.sampled_from(DTYPES), STRIDES, SIDES)
def test_as_good_as_plain_pytorch(case: Case, dtype: torch.dtype, strides: str, side: int) -> None:
    agrees(case, dtype, strides, side)


@FEW
@given(cases(), STRIDES, SIDES)
def test_log_sum_exp_and_its_gradient(case: Case, strides: str, side: int) -> None:
    log_sum_exp_agrees(case, strides, side)


@pytest.mark.slow
@MANY
@given(cases(), st.sampled_from(DTYPES), STRIDES, SIDES)
def test_many_cases_as_good_as_plain_pytorch(case: Case, dtype: torch.dtype, strides: str, side: int) -> None:
    agrees(case, dtype, strides, side)


@pytest.mark.slow
@MANY
@given(cases(), STRIDES, SIDES)
def test_log_sum_exp_and_its_gradient_of_many_cases(case: Case, strides: str, side: int) -> None:
    log_sum_exp_agrees(case, strides, side)


def chosen_blocks(batch: int, heads: int, query_blocks: int, keys: int, size: int) -> Tensor:
    """Two blocks of keys for each block of queries, or one, or none: (batch, heads, query_blocks, 2)."""
    numbers = torch.arange(batch * heads * query_blocks * 2).view(batch, heads, query_blocks, 2)
    return numbers * 5 % (-(-keys // size) + 1) - 1


MASKS: dict[str, Any] = {
    "none": lambda b, h, n, m: None,
    "causal": lambda b, h, n, m: Causal(),
    "window": lambda b, h, n, m: Causal() & Window(11),
    "both ways": lambda b, h, n, m: Window(before=9, after=20),
    "padding": lambda b, h, n, m: Padding(lengths=torch.arange(b) * 31 % (m + 1)),
    "holes": lambda b, h, n, m: Padding(keep=torch.arange(b * m).view(b, m) % 7 > 1),
    "left": lambda b, h, n, m: Causal() & Padding(keep=torch.arange(m)[None] >= torch.arange(b)[:, None] * 5),
    "documents": lambda b, h, n, m: Causal() & Documents(torch.arange(n) // 17, torch.arange(m) // 17),
    "chunk": lambda b, h, n, m: Causal() & Chunk(13, start=5),
    "chunks of documents": lambda b, h, n, m: Chunk(11) & Documents(torch.arange(n) // 17, torch.arange(m) // 17),
    "blocks": lambda b, h, n, m: Blocks(chosen_blocks(1, h, -(-n // 5), m, 7), size=7, query_size=5),
    "blocks per item": lambda b, h, n, m: Causal() & Blocks(chosen_blocks(b, 1, -(-n // 8), m, 8), size=8),
    "dense": lambda b, h, n, m: Keep(torch.arange(n * m).view(n, m) % 5 != 0),
    "per head": lambda b, h, n, m: Keep(torch.arange(h * n * m).view(1, h, n, m) % 3 != 0),
    "prefix": lambda b, h, n, m: Causal() | Prefix(19),
}
EDGES = [1, 15, 16, 17, 31, 32, 33, 47, 48, 49]  # blocks of 16


def sizes_agree(mask: str, pairs: list[tuple[int, int]]) -> None:
    generator = torch.Generator().manual_seed(0)
    for i, (n, m) in enumerate(pairs):
        d, e = [(16, 16), (3, 5), (17, 31), (33, 7)][i % 4]
        b, g, r = [(1, 1, 2), (2, 1, 1), (1, 2, 1)][i % 3]
        q, k, v = (torch.randn(*s, generator=generator) for s in ((b, g * r, n, d), (b, g, m, d), (b, g, m, e)))
        made = MASKS[mask](b, g * r, n, m)
        case = Case(q, k, v, {} if made is None else {"mask": made})
        case = case.to(torch.float32, ["plain", "transposed", "gaps"][i % 3])
        out, _ = triton.differentiable_forward(case.call(), 16, 16)
        assert_accurate(case, case.with_gradients(out), f"{mask}, {n} x {m}, {d}, {e}")


@pytest.mark.parametrize("mask", MASKS)
def test_sizes_beside_an_edge(mask: str) -> None:
    sizes_agree(mask, [(33, 49)])


@pytest.mark.slow
@pytest.mark.parametrize("mask", MASKS)
def test_sizes_around_every_edge(mask: str) -> None:
    sizes_agree(mask, list(zip(EDGES, EDGES[::-1], strict=True)) + [(n, n) for n in EDGES])


@pytest.mark.parametrize("before", [0, 30])
def test_drafts_in_a_tree(before: int) -> None:
    """Of one text, and of two with trees of their own."""
    parents = torch.tensor([[-1, 0, 0, 1, 2, -1, 4], [-1, 0, 1, 2, 3, 4, 5]])
    for tree in (Tree(parents[0]), Tree(parents)):
        q, k, v = (torch.randn(2, h, m, 8) for h, m in ((4, 7), (2, 7 + before), (2, 7 + before)))
        case = Case(q, k, v, {"mask": tree, "positions": tree.positions(before)}).to(torch.float32)
        assert_accurate(case, case.with_gradients(case.attend("triton")), f"{tree}")


@pytest.mark.parametrize("name", ["chunk", "blocks"])
def test_masks_of_queries_that_continue_a_text(name: str) -> None:
    """As with a cache: many keys, and queries at the end of them."""
    q, k, v = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 41, 8), torch.randn(2, 2, 41, 8)
    case = Case(q, k, v, {"mask": MASKS[name](2, 4, 3, 41), "positions": torch.arange(38, 41)}).to(torch.float32)
    assert_accurate(case, case.with_gradients(case.attend("triton")), name)


@pytest.mark.parametrize("options", [{}, {"softcap": 2.0, "sinks": torch.arange(4.0)}, {"mask": Chunk(11)}])
def test_the_log_sum_exp_that_is_returned(options: dict[str, Any]) -> None:
    q, k, v = torch.randn(2, 4, 19, 8), torch.randn(2, 2, 37, 8), torch.randn(2, 2, 37, 5)
    case = Case(q, k, v, options).to(torch.float32)
    out, lse = regard.attend(case.q, case.k, case.v, return_lse=True, kernel="triton", **case.options)
    right = reference.forward(case.to(torch.float64).call())[1]
    torch.testing.assert_close(lse.double(), right, rtol=2e-6, atol=2e-6)
    assert_accurate(case, case.with_gradients(out, lse), "triton", lse=True)


def test_parts_of_the_keys_are_merged_to_the_whole() -> None:
    """With gradients, where one part hides everything from some queries."""
    case = Case(*(torch.randn(2, h, m, 8) for h, m in ((4, 19), (2, 37), (2, 37))), {"mask": Causal()})
    case = case.to(torch.float32)
    parts = [
        regard.attend(
            case.q, case.k[:, :, keys], case.v[:, :, keys], mask=Causal(), kernel="triton", return_lse=True,
            positions=torch.arange(18, 37), key_positions=torch.arange(37)[keys],
        )
        for keys in (slice(0, 25), slice(25, 37))
    ]  # fmt: skip
    out, lse = regard.merge(*zip(*parts, strict=True))
    torch.testing.assert_close(lse.double(), reference.forward(case.to(torch.float64).call())[1], rtol=2e-6, atol=2e-6)
    assert_accurate(case, case.with_gradients(out), "merged")


class Squash(ScoreMod):
    """A tanh of each score, whose reach each head learns."""

    def __init__(self, reach: Tensor) -> None:
        self.weight = reach  # (1, H)

    def block(self, tile: Any, scores: Tensor) -> Tensor:
        reach = self.weight[:, :, None, None]
        return reach * torch.tanh(scores / reach)


def test_functions_of_scores_are_refused_in_words() -> None:
    """A kernel cannot call Python; others can."""
    q = torch.randn(1, 2, 5, 8)
    squash = Squash(torch.full((1, 2), 2.0))
    with pytest.raises(ValueError, match=r"kernel 'triton': .*cannot change them by a function \(positions.ScoreMod\)"):
        regard.attend(q, q, q, bias=squash, kernel="triton")
    with pytest.raises(ValueError, match=r"kernel 'triton': .*positions.ScoreMod"):
        regard.measure(q, q, q, bias=squash, kernel="triton")
    right = regard.attend(q, q, q, softcap=2.0, kernel="triton")
    torch.testing.assert_close(regard.attend(q, q, q, bias=squash), right, rtol=1e-5, atol=1e-5)


def widths_agree(width: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(width)
    for d, e in ((width, width), (width, 256 - width + 1), (3, width)):
        q, k, v = (torch.randn(1, 2, 19, x, generator=generator) for x in (d, d, e))
        case = Case(q, k, v, {"mask": Causal()}).to(dtype)
        assert_accurate(case, case.with_gradients(case.attend("triton")), f"{d}, {e}")


def test_a_width_between_powers_of_two() -> None:
    widths_agree(80, torch.bfloat16)


@pytest.mark.slow
@pytest.mark.parametrize("width", [1, 2, 7, 15, 16, 17, 40, 64, 65, 96, 128, 129, 192, 255, 256])
@pytest.mark.parametrize("dtype", DTYPES)
def test_widths(width: int, dtype: torch.dtype) -> None:
    widths_agree(width, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_typical_errors(dtype: torch.dtype) -> None:
    """No luck with a single number: output and gradients as a whole."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 4, x, 32, generator=generator) for x in (67, 131, 131))
    for options in ({}, {"mask": Causal()}, {"softcap": 2.0, "sinks": torch.randn(4, generator=generator)}):
        case = Case(q, k, v, options).to(dtype, "transposed")
        assert_typically_accurate(case, case.with_gradients(case.attend("triton")), f"{options}")


def test_biases_by_distance_need_no_plane() -> None:
    n, m = 20, 37
    relative = RelativeBias(4, num_buckets=8, max_distance=20)
    q, k, v = torch.randn(2, 4, n, 16), torch.randn(2, 2, m, 16), torch.randn(2, 2, m, 16)
    case = Case(q, k, v, {"bias": [relative, Alibi(4)], "mask": Causal()}).to(torch.float32)
    assert_accurate(case, case.with_gradients(case.attend("triton")), "by distance")


def test_the_gradient_of_a_bias_in_several_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a plane of gradients is too large for one."""
    n, m = 21, 23
    q, k, v = torch.randn(1, 2, n, 8), torch.randn(1, 1, m, 8), torch.randn(1, 1, m, 8)
    relative = RelativeBias(2, num_buckets=8, max_distance=20)
    monkeypatch.setattr("regard.tuning.DENSE_LIMIT", 2 * n * m)
    cases = [Case(q, k, v, {"bias": [bias]}).to(torch.float32) for bias in (relative, torch.randn(1, 2, n, m))]
    outs = [case.attend("triton") for case in cases]
    monkeypatch.setattr("regard.tuning.DENSE_LIMIT", 2 * 8 * m)
    for case, out in zip(cases, outs, strict=True):
        assert_accurate(case, case.with_gradients(out), "in parts of eight queries")


def all_gradients(options: dict[str, Any]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, h, n, 16, generator=generator) for h, n in ((4, 21), (2, 37), (2, 37)))
    bias = torch.randn(1, 4, 21, 37, generator=generator)
    case = Case(q, k, v, {"bias": [bias], "sinks": torch.ones(4), **options}).to(torch.float32)
    return case.with_gradients(case.attend("triton"))


def test_programs_in_the_opposite_order_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """No program reads what another writes, and none adds to what another added to."""
    if torch.cuda.is_available():
        pytest.skip("a GPU has an order of its own")
    from triton.runtime import interpreter

    options = {"mask": Causal() & Window(19), "dropout": 0.2}
    first = all_gradients(options)
    backwards = lambda *a: reversed(range(*a)) if len(a) == 1 else range(*a)  # noqa: E731
    monkeypatch.setattr(interpreter, "range", backwards, raising=False)
    assert all(map(torch.equal, first, all_gradients(options)))


def test_nothing_beyond_a_tensor_is_read() -> None:
    """Tensors lie amid NaN."""
    generator = torch.Generator().manual_seed(0)
    shapes = (1, 4, 21, 24), (1, 2, 37, 24), (1, 2, 37, 19)
    plain = [torch.randn(*shape, generator=generator) for shape in shapes]
    amid = []
    for x in plain:
        b, h, n, d = x.shape
        around = torch.full((b, h, n + 3, d + 5), float("nan"))
        around[:, :, 1 : n + 1, 2 : d + 2] = x
        amid.append(around[:, :, 1 : n + 1, 2 : d + 2].requires_grad_())
    for mask in (None, Causal() & Window(5), Padding(lengths=torch.tensor([30]))):
        right = regard.attend(*plain, mask=mask, kernel="reference")
        out = regard.attend(*amid, mask=mask, kernel="triton")
        torch.testing.assert_close(out, right)
        assert all(grad.isfinite().all() for grad in torch.autograd.grad(out.square().sum(), amid))


@pytest.mark.parametrize("n", [1, 19])
def test_what_padding_hides_is_not_read(n: int) -> None:
    """Slots of a cache that nothing was written to may hold anything."""
    q, k, v = torch.randn(2, 4, n, 8), torch.randn(2, 2, 37, 8), torch.randn(2, 2, 37, 8)
    mask = Padding(lengths=torch.tensor([30, 17]))
    right = regard.attend(q, k, v, mask=mask, kernel="reference")
    k[0, :, 30:], k[1, :, 17:], v[0, :, 30:], v[1, :, 17:] = (float("nan"),) * 4
    out, _ = triton._Loops().forward(regard.attention.prepare(q, k, v, mask=mask), 0, 0)
    torch.testing.assert_close(out, right)


def test_what_a_mask_hides_within_a_block_is_refused_where_it_is_no_number() -> None:
    q, k, v = (torch.randn(1, 1, 5, 4) for _ in range(3))
    v[0, 0, 4, 0] = float("nan")
    with pytest.raises(ValueError, match=r"kernel 'triton': .*keys or values hold NaN or inf.*kernel=\"auto\""):
        regard.attend(q, k, v, mask=Causal(), kernel="triton")
    assert regard.attend(q, k, v, kernel="triton")[..., 0].isnan().all()  # without a mask it counts


def test_rows_that_see_nothing() -> None:
    q, k, v = (torch.randn(2, 2, m, 8, requires_grad=True) for m in (5, 20, 20))
    mask = Padding(lengths=torch.tensor([0, 20])) & Keep(torch.arange(5)[:, None] != 0)
    out, lse = triton.forward(regard.attention.prepare(q, k, v, mask=mask))
    assert (out[0] == 0).all()
    assert (out[:, :, 0] == 0).all()
    assert lse[0].isneginf().all()
    assert lse[:, :, 0].isneginf().all()
    assert lse[1, :, 1:].isfinite().all()
    for grad in torch.autograd.grad(out.sum(), [q, k, v]):
        assert (grad[0] == 0).all()
        assert grad.isfinite().all()


def test_a_bias_of_the_lowest_number_hides_nothing_and_of_minus_infinity_all() -> None:
    q, k, v = torch.randn(1, 1, 2, 4), torch.randn(1, 1, 3, 4), torch.randn(1, 1, 3, 4)
    bias = torch.full((1, 1, 2, 3), torch.finfo(torch.float32).min)
    bias[..., 1, :] = -float("inf")
    out, lse = triton.forward(regard.attention.prepare(q, k, v, bias=bias))
    torch.testing.assert_close(out[0, 0, 0], v[0, 0].mean(0))
    assert (out[0, 0, 1] == 0).all()
    assert lse[0, 0, 1].isneginf()
