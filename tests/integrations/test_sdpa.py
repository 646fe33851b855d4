"""torch's `scaled_dot_product_attention`, computed by regard: the same answers and gradients.

Letters: B batch, H query heads, G kv heads, N queries, M keys, D head width of q and k, E head width of v.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import regard
from regard.integrations.sdpa import RedirectSdpa, scaled_dot_product_attention

B, H, G, N, M, D, E = 2, 6, 3, 5, 7, 11, 13


def tensors(heads: int = H, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    shapes = (B, H, N, D), (B, heads, M, D), (B, heads, M, E)
    return [torch.randn(*shape, dtype=dtype, requires_grad=True) for shape in shapes]


def keep(*shape: int) -> Tensor:
    """Some keys, and the first for all."""
    mask = torch.rand(*shape) > 0.4
    mask[..., 0] = True
    return mask


def additive(*shape: int, hidden: float = -1e4) -> Tensor:
    return torch.zeros(*shape, dtype=torch.float64).masked_fill(~keep(*shape), hidden)


CASES: dict[str, Any] = {
    "plain": dict,
    "scale": lambda: {"scale": 0.7},
    "causal": lambda: {"is_causal": True},
    "boolean (N, M)": lambda: {"attn_mask": keep(N, M)},
    "boolean (B, 1, 1, M)": lambda: {"attn_mask": keep(B, 1, 1, M)},
    "boolean (H, N, M)": lambda: {"attn_mask": keep(H, N, M)},
    "boolean (B, H, N, M)": lambda: {"attn_mask": keep(B, H, N, M)},
    "-10000 (B, 1, 1, M)": lambda: {"attn_mask": additive(B, 1, 1, M)},
    "-inf (B, 1, N, M)": lambda: {"attn_mask": additive(B, 1, N, M, hidden=-float("inf"))},
    "-10000 on every key of a text": lambda: {"attn_mask": additive(B, 1, 1, M).index_fill(0, torch.tensor([1]), -1e4)},
    "numbers (1, H, N, M)": lambda: {"attn_mask": torch.randn(1, H, N, M, dtype=torch.float64)},
    "numbers (M,), as (1, M)": lambda: {"attn_mask": torch.randn(1, M, dtype=torch.float64)},
}


@pytest.mark.parametrize("grouped", [False, True], ids=["as many", "grouped"])
@pytest.mark.parametrize("case", CASES)
def test_the_same_answers_and_gradients(case: str, grouped: bool) -> None:
    given = tensors(G if grouped else H)
    options = CASES[case]()
    right = F.scaled_dot_product_attention(*given, **options, enable_gqa=grouped)
    ours = scaled_dot_product_attention(*given, **options, enable_gqa=grouped)
    torch.testing.assert_close(ours, right)
    weight = torch.randn_like(right)
    for x, y in zip(torch.autograd.grad(ours, given, weight), torch.autograd.grad(right, given, weight), strict=True):
        torch.testing.assert_close(x, y)


def test_a_mask_with_gradient() -> None:
    given, mask = tensors(), torch.zeros(1, H, N, M, dtype=torch.float64, requires_grad=True)
    gradients = [
        torch.autograd.grad(function(*given, attn_mask=mask).square().sum(), mask)[0]
        for function in (F.scaled_dot_product_attention, scaled_dot_product_attention)
    ]
    assert gradients[0].abs().max() > 0
    torch.testing.assert_close(gradients[1], gradients[0])


@pytest.mark.parametrize("axes", [2, 3])
def test_without_heads_and_without_a_batch(axes: int) -> None:
    q, k, v = (x[0, 0] if axes == 2 else x[:, 0] for x in tensors())
    for mask in (None, keep(N, M), *([keep(B, N, M)] if axes == 3 else [])):
        right = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        torch.testing.assert_close(scaled_dot_product_attention(q, k, v, mask), right)
        out, lse = scaled_dot_product_attention(q, k, v, mask, return_lse=True)
        torch.testing.assert_close(out, right)
        assert lse.shape == out.shape[:-1]


def test_a_batch_of_one_is_for_all() -> None:
    q, k, v = tensors()
    right = F.scaled_dot_product_attention(q, k[:1], v[:1])
    torch.testing.assert_close(scaled_dot_product_attention(q, k[:1], v[:1]), right)


def test_two_keys_in_closed_form() -> None:
    # scores 0 and 1: weights [1, e] / (1 + e), log-sum-exp log(1 + e)
    q = torch.ones(1, 1, 1, 1)
    k = torch.tensor([0.0, 1.0]).view(1, 1, 2, 1)
    out, lse = scaled_dot_product_attention(q, k, k, return_lse=True)
    e = torch.tensor(1.0).exp()
    torch.testing.assert_close(out.squeeze(), e / (1 + e))
    torch.testing.assert_close(lse.squeeze(), (1 + e).log())


def test_dropout_is_that_of_attend() -> None:
    q, k, v = tensors()
    torch.manual_seed(3)
    ours = scaled_dot_product_attention(q, k, v, dropout_p=0.3)
    torch.manual_seed(3)
    assert torch.equal(ours, regard.attend(q, k, v, dropout=0.3))
    assert not torch.allclose(ours, regard.attend(q, k, v))


class Old(nn.Module):
    """Code that calls torch's function."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, None, 0.0, True, scale=0.3)


def test_the_mode_redirects_whoever_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    model, given, calls = Old(), tensors(), []
    right = model(*given)

    def attend(*args: Any, **options: Any) -> Any:
        calls.append(options)
        return regard.attend(*args, **options)

    monkeypatch.setattr("regard.integrations.sdpa.attend", attend)
    with RedirectSdpa():
        torch.testing.assert_close(model(*given), right)
        assert len(calls) == 1
    torch.testing.assert_close(model(*given), right)
    assert len(calls) == 1


def test_watch_sees_through_the_mode() -> None:
    model, given = Old(), tensors(dtype=torch.float32)
    records = []
    for redirect in (False, True):
        with regard.watch(model) as seen, torch.no_grad():
            if redirect:
                with RedirectSdpa():
                    model(*given)
            else:
                model(*given)
        records.append(seen)
    assert records[0].layers == records[1].layers != []
    torch.testing.assert_close(records[1][0].entropy, records[0][0].entropy)


@pytest.mark.slow
def test_compiled() -> None:
    model, given = Old(), tensors(dtype=torch.float32)

    def redirected(*given: Tensor) -> Tensor:
        with RedirectSdpa():
            return model(*given)

    compiled = torch.compile(redirected, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*given), model(*given))


def test_refusals_in_words() -> None:
    q, k, v = tensors()
    with pytest.raises(ValueError, match=r"expected attn_mask or is_causal, received both; remedy: one mask"):
        scaled_dot_product_attention(q, k, v, keep(N, M), is_causal=True)
    with pytest.raises(
        ValueError, match=r"expected query, key and value of 2 to 4 axes, as many each, received shapes"
    ):
        scaled_dot_product_attention(q[None], k[None], v[None])
    with pytest.raises(ValueError, match=r"as many each, received shapes \(2, 6, 5, 11\), \(6, 7, 11\)"):
        scaled_dot_product_attention(q, k[0], v[0])
    with pytest.raises(ValueError, match=r"mask"):
        scaled_dot_product_attention(q, k, v, keep(N, M + 1))
