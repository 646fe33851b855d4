"""Where torch's kernel serves, and where it must not: never by its N x M fallback."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import regard
from regard import attend
from regard.attention import prepare
from regard.kernels import fused
from regard.masks import Causal, Documents, Keep, Padding, Window
from regard.positions import Alibi


def tensors(
    n: int = 5, m: int = 7, *, e: int = 4, h: int = 6, g: int = 2 if fused.GROUPS_ON_CPU else 6
) -> tuple[torch.Tensor, ...]:
    return torch.randn(2, h, n, 4), torch.randn(2, g, m, 4), torch.randn(2, g, m, e)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"dropout": 0.1}, "dropout"),
        ({"softcap": 1.0}, "softcap"),
        ({"sinks": torch.zeros(6)}, "sinks"),
        ({"bias": torch.zeros(5, 7, requires_grad=True)}, "gradient to a bias"),
    ],
)
def test_says_why_not(options: dict, words: str) -> None:
    assert words in (fused.why_not(prepare(*tensors(), **options)) or "")


def test_refuses_different_head_widths_and_zero_sizes() -> None:
    assert "differ" in (fused.why_not(prepare(*tensors(e=3))) or "")
    assert "zero" in (fused.why_not(prepare(*tensors(n=0))) or "")
    assert "zero" in (fused.why_not(prepare(*tensors(m=0))) or "")


def test_refuses_a_mask_that_would_be_too_large_when_dense() -> None:
    q = torch.zeros(1, 1, 5003, 4)
    assert "dense tensor, 95 MB" in (fused.why_not(prepare(q, q, q, mask=Window(before=4000, after=4000))) or "")
    assert fused.why_not(prepare(q, q, q, mask=Causal())) is None
    assert "dense" in (fused.why_not(prepare(q, q, q, bias=Alibi(1))) or "")


def test_leaves_what_is_mostly_hidden_to_others() -> None:
    q = torch.zeros(1, 1, 1024, 4)
    ids = torch.arange(1024) // 100
    assert "hidden" in (fused.why_not(prepare(q, q, q, mask=Documents(ids))) or "")
    assert fused.why_not(prepare(q, q, q, mask=Documents(ids * 0))) is None


def test_under_torch_func_it_steps_back() -> None:
    q = torch.randn(3, 1, 2, 5, 4)
    out = torch.func.vmap(lambda x: attend(x, x, x))(q)
    torch.testing.assert_close(out[1], attend(q[1], q[1], q[1]))
    with pytest.raises(ValueError, match=r"under torch.func"):
        torch.func.vmap(lambda x: attend(x, x, x, kernel="fused"))(q)


@pytest.mark.parametrize(
    "mask",
    [
        None,
        Causal(),
        Causal() & Padding(lengths=torch.tensor([5, 7])),
        Keep(torch.rand(5, 7) < 0.5),
        Window(9) & Causal(),
    ],
)
@pytest.mark.parametrize("train", [False, True])
def test_really_runs_fused(mask: object, train: bool) -> None:
    """With torch's N x M path forbidden, it still runs."""
    q, k, v = (x.requires_grad_(train) for x in tensors())
    columns = q.detach().mT.contiguous().mT.requires_grad_(train)  # a last stride that torch refuses
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
        out = attend(columns, k, v, mask=mask, kernel="fused")
    torch.testing.assert_close(out, attend(q, k, v, mask=mask, kernel="reference"), rtol=1e-4, atol=1e-5)


def test_where_the_user_forbids_torchs_flash_it_is_not_chosen() -> None:
    q, k, v = tensors()
    with sdpa_kernel([SDPBackend.MATH]):
        assert "no fused attention" in (fused.why_not(prepare(q, k, v)) or "")
        assert "fused: no, torch has no fused attention" in regard.explain(q, k, v)


def test_is_causal_serves_when_the_first_query_stands_at_the_first_key() -> None:
    q, k, v = tensors()
    call = prepare(q, k, v, mask=Causal(), positions=0)
    assert fused._split(call) == (True, ())
    torch.testing.assert_close(fused.output(call), attend(q, k, v, mask=Causal(), positions=torch.arange(5)))


def test_decoding_needs_no_mask() -> None:
    q, k, v = tensors(n=1)
    assert fused._operands(prepare(q, k, v, mask=Causal() & Window(100))) == (None, False)


@pytest.mark.usefixtures("without_native")
@pytest.mark.parametrize("dtype, queries", [(torch.bfloat16, 1), (torch.bfloat16, 2), (torch.float16, 13)])
def test_a_few_queries_that_see_everything_go_to_the_formula(dtype: torch.dtype, queries: int) -> None:
    q, k = torch.randn(1, 6, queries, 10).to(dtype), torch.randn(1, 2, 31, 10).to(dtype)
    with torch.no_grad():
        assert "reference: chosen" in regard.explain(q, k, k)
        mask = Causal() if queries == 1 else None
        assert "reference: chosen" in regard.explain(q, k, k, mask=mask)
        assert "fused: chosen" in regard.explain(q.float(), k.float(), k.float(), mask=mask)


@pytest.mark.usefixtures("without_native")
def test_many_keys_of_shared_heads_go_to_the_formula_in_float32_too() -> None:
    q, k = torch.randn(1, 6, 3, 64), torch.randn(1, 2, 2053, 64)
    with torch.no_grad():
        assert "reference: chosen" in regard.explain(q, k, k)
        torch.testing.assert_close(attend(q, k, k), attend(q, k, k, kernel="fused"))
    assert "fused: chosen" in regard.explain(q.requires_grad_(), k, k)  # in training it has the better backward pass
