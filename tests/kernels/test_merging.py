"""Attention in parts: `attend(..., return_lse=True)` and `merge` beside attention over all keys at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_cases import Case, cases
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import regard
from regard import attend, explain, merge
from regard.kernels import available, reference
from regard.masks import Causal, Keep

pytestmark = pytest.mark.on_device

NEGATIVE = float("-inf")


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def in_parts(kernel: str, q: Tensor, k: Tensor, v: Tensor, ends: list[int], visible: Tensor, sinks: Any) -> list[Any]:
    """Keys from one end to the next, the sinks with the first of them."""
    parts = []
    for i, (a, b) in enumerate(zip([0, *ends], [*ends, k.shape[2]], strict=True)):
        options: dict[str, Any] = {} if i or sinks is None else {"sinks": sinks}
        mask = Keep(visible[..., a:b])
        parts.append(attend(q, k[:, :, a:b], v[:, :, a:b], mask=mask, kernel=kernel, return_lse=True, **options))
    return parts


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(0, 13), max_size=4).map(sorted),
    st.sampled_from(["blockwise", "reference"]),
    st.booleans(),
    st.integers(0, 2**20),
)
def test_parts_of_the_keys_merge_to_the_whole(ends: list[int], kernel: str, with_sinks: bool, seed: int) -> None:
    """Wherever the keys are cut, empty parts and rows that see nothing included: output, lse, and their gradients."""
    q, k, v = (normal(*shape, seed=seed + i) for i, shape in enumerate([(2, 6, 5, 3), (2, 2, 13, 3), (2, 2, 13, 7)]))
    visible = torch.rand(2, 1, 5, 13, generator=torch.Generator().manual_seed(seed)) < 0.4
    visible[0, :, 2] = False
    leaves = [q, k, v, *([normal(6, seed=seed + 3)] if with_sinks else [])]
    for leaf in leaves:
        leaf.requires_grad_()
    sinks = leaves[3] if with_sinks else None
    whole = reference.forward(regard.attention.prepare(q, k, v, mask=visible, sinks=sinks))
    merged = merge(*zip(*in_parts(kernel, q, k, v, ends, visible, sinks), strict=True))
    grads = []
    for out, lse in (whole, merged):
        loss = (out * normal(*out.shape, seed=5)).sum() + lse.masked_fill(lse.isneginf(), 0.0).square().sum()
        grads.append(torch.autograd.grad(loss, leaves))
    for a, b in zip((*merged, *grads[1]), (*whole, *grads[0]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kernel", [name for name in available() if name != "fused"])
def test_every_kernel_gives_the_gradient_of_the_log_sum_exp(kernel: str) -> None:
    """dS = P * dlse: in float32, beside the formula in float64."""
    double = [normal(2, h, n, 5, seed=i).requires_grad_() for i, (h, n) in enumerate([(4, 7), (2, 11), (2, 11)])]
    single = [x.detach().float().requires_grad_() for x in double]
    grads = []
    for leaves, name in ((double, "reference"), (single, kernel)):
        out, lse = attend(*leaves, mask=Causal(), softcap=2.0, kernel=name, return_lse=True)
        assert lse.dtype == leaves[0].dtype
        grads.append(torch.autograd.grad(out.square().sum() + lse.sin().sum(), leaves))
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(b, a.float(), rtol=2e-5, atol=2e-5)


@settings(max_examples=40, deadline=None)
@given(cases())
def test_the_log_sum_exp_beside_any_option_is_the_references(case: Case) -> None:
    case = case.to(torch.float64)
    options = dict(case.options)
    if options.get("dropout"):
        options["generator"] = torch.Generator().manual_seed(case.seed)
    out, lse = attend(case.q, case.k, case.v, return_lse=True, **options)
    expected = reference.forward(case.call())
    torch.testing.assert_close(lse, expected[1], rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(out, expected[0], rtol=1e-11, atol=1e-11)


@pytest.mark.of_cpu("torch gives the log-sum-exp on CPUs alone")
@pytest.mark.usefixtures("without_native")
def test_fused_gives_it_without_a_gradient_and_says_so() -> None:
    q = torch.randn(1, 2, 5, 4)
    assert "fused: chosen" in explain(q, q, q, return_lse=True)
    out, lse = attend(q, q, q, return_lse=True, kernel="fused")
    expected = reference.forward(regard.attention.prepare(q, q, q))
    torch.testing.assert_close((out, lse), expected)
    learns = q.clone().requires_grad_()
    assert "fused: no, it gives no gradient of the log-sum-exp" in explain(learns, learns, learns, return_lse=True)
    assert "fused: chosen" in explain(learns, learns, learns)
    with pytest.raises(ValueError, match=r"kernel 'fused'.*it gives no gradient of the log-sum-exp"):
        attend(learns, q, q, return_lse=True, kernel="fused")
    with torch.no_grad():
        assert "fused: chosen" in explain(learns, learns, learns, return_lse=True)


def test_a_part_that_sees_nothing_does_not_count_whatever_it_holds() -> None:
    out, lse = normal(2, 3, 5, 7), normal(2, 3, 5)
    nothing = torch.full_like(lse, NEGATIVE)
    merged = merge([torch.full_like(out, torch.nan), out], [nothing, lse])
    torch.testing.assert_close(merged, (out, lse), rtol=1e-15, atol=1e-15)


def test_rows_that_see_nothing_get_0_and_finite_gradients() -> None:
    outs, lses = normal(3, 2, 5, 7).requires_grad_(), normal(3, 2, 5)
    lses[:, 1, 3] = NEGATIVE
    lses.requires_grad_()
    out, lse = merge(outs, lses)
    assert (out[1, 3] == 0).all()
    assert lse[1, 3] == NEGATIVE
    (out.sum() + lse.masked_fill(lse.isneginf(), 0.0).sum()).backward()
    assert outs.grad is not None
    assert lses.grad is not None
    assert outs.grad.isfinite().all()
    assert lses.grad.isfinite().all()
    assert (lses.grad[:, 1, 3] == 0).all()


def test_two_keys_in_two_parts_have_the_weights_of_their_scores() -> None:
    """Scores 0 and 1: [1, e] / (1 + e)."""
    values = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    out, lse = merge(values[:, None], torch.tensor([[0.0], [1.0]], dtype=torch.float64))
    e = torch.tensor(1.0, dtype=torch.float64).exp()
    torch.testing.assert_close(out[0], torch.stack([1 / (1 + e), e / (1 + e)]))
    torch.testing.assert_close(lse[0], (1 + e).log())


def test_far_apart_parts_do_not_overflow() -> None:
    outs = torch.ones(3, 1, 2)
    out, lse = merge(outs, torch.tensor([[1e30], [-1e30], [80.0]]))
    assert out.tolist() == [[1.0, 1.0]]
    assert lse.item() == pytest.approx(1e30)


@pytest.mark.parametrize("stacked", [True, False])
def test_lists_and_stacked_tensors_in_any_number(stacked: bool) -> None:
    outs, lses = normal(4, 2, 3, 5, 7), normal(4, 2, 3, 5)
    merged = merge(outs, lses) if stacked else merge(tuple(outs), list(lses))
    again = merge(*zip(merge(outs[:3], lses[:3]), (outs[3], lses[3]), strict=True))
    torch.testing.assert_close(merged, again, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(merge(outs[:1], lses[:1]), (outs[0], lses[0]))


@pytest.mark.parametrize(
    "outs, lses, out, lse",
    [
        ([torch.bfloat16, torch.bfloat16], [torch.float32, torch.float32], torch.bfloat16, torch.float32),
        ([torch.bfloat16, torch.float32], [torch.float32, torch.bfloat16], torch.float32, torch.float32),
        ([torch.float16, torch.bfloat16], [torch.float32, torch.float32], torch.float32, torch.float32),
        ([torch.float32, torch.float64], [torch.float32, torch.float64], torch.float64, torch.float64),
        ([torch.bfloat16, torch.bfloat16], [torch.bfloat16, torch.bfloat16], torch.bfloat16, torch.float32),
    ],
)
def test_mixed_dtypes_are_summed_in_float32_or_wider(outs: Any, lses: Any, out: Any, lse: Any) -> None:
    parts = [normal(3, 5, seed=i, dtype=dtype) for i, dtype in enumerate(outs)]
    logs = [normal(3, seed=7 + i, dtype=dtype) for i, dtype in enumerate(lses)]
    merged = merge(parts, logs)
    assert (merged[0].dtype, merged[1].dtype) == (out, lse)
    exact = merge([x.double() for x in parts], [x.double() for x in logs])
    torch.testing.assert_close(merged[0], exact[0].to(out), rtol=torch.finfo(out).eps * 2, atol=1e-6)


@pytest.mark.on_meta
def test_what_cannot_be_merged_is_refused_in_words() -> None:
    out, lse = normal(2, 3, 5, 7), normal(2, 3, 5)
    with pytest.raises(ValueError, match="outs: expected at least one part, received none"):
        merge([], [])
    with pytest.raises(ValueError, match="one log-sum-exp for each output, received 2 outputs and 1"):
        merge([out, out], [lse])
    with pytest.raises(ValueError, match=r"received \(2, 3, 5, 7\) and \(2, 3, 4\)"):
        merge([out, out], [lse, lse[:, :, :4]])
    with pytest.raises(ValueError, match=r"received \(2, 3, 4, 7\) and \(2, 3, 4\), the first output \(2, 3, 5, 7\)"):
        merge([out, out[:, :, :4]], [lse, lse[:, :, :4]])
    with pytest.raises(TypeError, match=r"lses: expected floating-point tensors.*received dtype torch.int64"):
        merge([out], [lse.long()])
    with pytest.raises(TypeError, match=r"outs: expected floating-point tensors.*received NoneType"):
        merge(None, [lse])  # type: ignore[arg-type]


def test_dropout_of_parts_leaves_the_log_sum_exp_alone() -> None:
    q, k, v = (normal(2, 3, 11, 5, seed=i) for i in range(3))
    v = torch.ones_like(v)
    plain = [attend(q, k[:, :, a:b], v[:, :, a:b], return_lse=True) for a, b in ((0, 4), (4, 11))]
    torch.manual_seed(0)
    dropped = [attend(q, k[:, :, a:b], v[:, :, a:b], return_lse=True, dropout=0.5) for a, b in ((0, 4), (4, 11))]
    torch.testing.assert_close(dropped[1][1], plain[1][1])
    out, lse = merge(*zip(*dropped, strict=True))
    torch.testing.assert_close(lse, merge(*zip(*plain, strict=True))[1])
    assert not torch.allclose(out, torch.ones_like(out))


def two_halves(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    options: dict[str, Any] = {"softcap": 3.0, "return_lse": True}
    near = attend(q, k[:, :, :3], v[:, :, :3], **options)
    far = attend(q, k[:, :, 3:], v[:, :, 3:], **options)
    return merge(*zip(near, far, strict=True))


def test_under_vmap() -> None:
    q, k, v = (normal(5, 2, h, 7, 3, seed=h) for h in (4, 2, 2))
    ours = torch.func.vmap(two_halves)(q, k, v)
    expected = [reference.forward(regard.attention.prepare(*x, softcap=3.0)) for x in zip(q, k, v, strict=True)]
    for a, b in zip(ours, zip(*expected, strict=True), strict=True):
        torch.testing.assert_close(a, torch.stack(b))


def test_compiled() -> None:
    q, k, v = (normal(2, h, 7, 3, seed=h).requires_grad_() for h in (4, 2, 2))
    compiled = torch.compile(two_halves, fullgraph=True, backend="aot_eager")
    grads = []
    for out, lse in (compiled(q, k, v), reference.forward(regard.attention.prepare(q, k, v, softcap=3.0))):
        grads.append((out, lse, *torch.autograd.grad(out.square().sum() + lse.sin().sum(), (q, k, v))))
    torch.testing.assert_close(*grads)


class Halves(nn.Module):
    """Attention in two parts, each of which `watch` sees as a call of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return two_halves(x, x, x)[0]


@pytest.mark.parametrize("gradients", [True, False])
def test_watch_sees_each_part_once(gradients: bool) -> None:
    x = torch.randn(1, 2, 7, 4, requires_grad=gradients)
    model = Halves()
    with regard.watch(model) as seen, torch.set_grad_enabled(gradients):
        out = model(x)
    torch.testing.assert_close(out, model(x))
    assert not seen.unseen
    assert len(seen.layers) == 2
    torch.testing.assert_close(seen[0].entropy, regard.measure(x, x[:, :, :3], softcap=3.0, measures="entropy").entropy)
    torch.testing.assert_close(seen[1].entropy, regard.measure(x, x[:, :, 3:], softcap=3.0, measures="entropy").entropy)


def test_ablating_outputs_keeps_the_log_sum_exp_and_hiding_edges_of_a_part_is_refused() -> None:
    x, model = torch.randn(1, 2, 7, 4), Halves()
    with regard.ablate(model, {0: [1], 1: [1]}):
        out = model(x)
    torch.testing.assert_close(out[:, 0], model(x)[:, 0])
    assert (out[:, 1] == 0).all()
    with (
        pytest.raises(ValueError, match=r"a part of attention, of which the log-sum-exp is used \(return_lse=True\)"),
        regard.ablate(model, {0: [1]}, mode="hide", keys=1),
    ):
        model(x)
