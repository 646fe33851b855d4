"""Every kernel against `reference` in float64, values and gradients, over shapes, strides, masks, dtypes, blocks."""

from __future__ import annotations

import pytest
import torch
from attention_cases import Case, assert_accurate, cases
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from regard import kernels
from regard.kernels import blockwise, fused, reference

EXAMPLES = settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
FEWER = settings(EXAMPLES, max_examples=60)
STRIDES = st.sampled_from(["plain", "transposed", "gaps", "columns"])
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
BLOCKS = st.sampled_from([1, 3, 16, 64])  # the last is larger than any length drawn


@EXAMPLES
@given(cases(), STRIDES, BLOCKS, BLOCKS)
def test_blockwise_in_float64_is_the_reference(case: Case, strides: str, height: int, width: int) -> None:
    case = case.to(torch.float64, strides)
    out, lse = blockwise.differentiable_forward(case.call(), height, width)
    assert_accurate(case, case.with_gradients(out), "blockwise")
    torch.testing.assert_close(lse, reference.forward(case.call())[1], rtol=1e-11, atol=1e-11)


@FEWER
@given(cases(), BLOCKS, BLOCKS)
def test_blockwise_gives_the_gradient_of_the_log_sum_exp(case: Case, height: int, width: int) -> None:
    case = case.to(torch.float64)
    ours = case.with_gradients(*blockwise.differentiable_forward(case.call(), height, width))
    assert_accurate(case, ours, "blockwise", lse=True)


@EXAMPLES
@given(cases(), DTYPES, STRIDES, BLOCKS, BLOCKS)
def test_blockwise_is_as_good_as_plain_pytorch(
    case: Case, dtype: torch.dtype, strides: str, height: int, width: int
) -> None:
    case = case.to(dtype, strides)
    out, lse = blockwise.differentiable_forward(case.call(), height, width)
    assert lse.dtype == torch.float32
    assert_accurate(case, case.with_gradients(out), "blockwise")


@FEWER
@given(cases(), DTYPES, STRIDES)
def test_reference_is_as_good_as_plain_pytorch(case: Case, dtype: torch.dtype, strides: str) -> None:
    case = case.to(dtype, strides)
    assert_accurate(case, case.with_gradients(reference.output(case.call())), "reference")


@EXAMPLES
@given(cases(simple=True), STRIDES)
def test_fused_in_float64_is_the_reference(case: Case, strides: str) -> None:
    case = case.to(torch.float64, strides)
    assert fused.why_not(case.call()) is None
    assert_accurate(case, case.with_gradients(fused.output(case.call())), "fused")
    lse = fused.forward(case.call())[1]
    torch.testing.assert_close(lse, reference.forward(case.call())[1].detach(), rtol=1e-11, atol=1e-11)


@EXAMPLES
@given(cases(simple=True), DTYPES, STRIDES)
def test_fused_is_as_good_as_plain_pytorch(case: Case, dtype: torch.dtype, strides: str) -> None:
    case = case.to(dtype, strides)
    assert_accurate(case, case.with_gradients(fused.output(case.call())), "fused")


@EXAMPLES
@given(cases(), STRIDES)
def test_auto_never_changes_the_answer(case: Case, strides: str) -> None:
    case = case.to(torch.float64, strides)
    assert_accurate(case, case.with_gradients(case.attend("auto")), "auto")


@pytest.mark.parametrize("kernel", kernels.available())
def test_larger_than_one_strip(kernel: str) -> None:
    """Sizes at which `blockwise` really cuts into chunks and strips on its own."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 6, 331, 16), torch.randn(3, 2, 347, 16), torch.randn(3, 2, 347, 16)
    case = Case(q, k, v, {"mask": regard_mask()}).to(torch.float32, "transposed")
    assert_accurate(case, case.with_gradients(case.attend(kernel)), kernel)


def regard_mask():
    from regard.masks import Causal, Padding, Prefix, Window

    return (Causal() & Window(100) | Prefix(7)) & Padding(lengths=torch.tensor([347, 60, 200]))
