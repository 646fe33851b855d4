"""The translation of `F.multi_head_attention_forward`'s arguments, against that function itself."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import regard
from regard.layouts.torch_mha_call import functional_operands, mask_options
from regard.masks import Causal

B, H, N, M, W = 2, 3, 5, 7, 15


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + sum(shape)))


ATTN: dict[str, Any] = {
    "none": lambda: None,
    "bool": lambda: torch.arange(N)[:, None] < torch.arange(M)[None] - 3,
    "float": lambda: drawn(N, M, seed=1),
    "bool per head": lambda: drawn(B * H, N, M, seed=2) > 1.0,
    "float per head": lambda: drawn(B * H, N, M, seed=3),
}
PADDING: dict[str, Any] = {
    "none": lambda: None,
    "bool": lambda: torch.arange(M)[None] >= torch.tensor([[7], [4]]),
    "float": lambda: drawn(B, M, seed=4),
}


@pytest.mark.filterwarnings("ignore:Support for mismatched:UserWarning")
@pytest.mark.parametrize("attn, padding", list(itertools.product(ATTN, PADDING)))
@pytest.mark.parametrize("extra", ["none", "bias", "zero", "both"])
@pytest.mark.parametrize("separate", [False, True])
def test_against_the_function(attn: str, padding: str, extra: str, separate: bool) -> None:
    query, key = drawn(N, B, W), drawn(M, B, W)
    biased = extra in ("bias", "both")
    weights = drawn(3 * W, W)
    arguments: dict[str, Any] = {
        "embed_dim_to_check": W,
        "num_heads": H,
        "in_proj_weight": None if separate else weights,
        "in_proj_bias": drawn(3 * W),
        "bias_k": drawn(1, 1, W, seed=5) if biased else None,
        "dropout_p": 0.0,
        "bias_v": drawn(1, 1, W, seed=6) if biased else None,
        "add_zero_attn": extra in ("zero", "both"),
        "out_proj_weight": torch.eye(W, dtype=torch.float64),
        "out_proj_bias": None,
        "need_weights": True,
        "average_attn_weights": False,
        "attn_mask": ATTN[attn](),
        "key_padding_mask": PADDING[padding](),
        "use_separate_proj_weight": separate,
    }
    if separate:
        arguments |= dict(zip(("q_proj_weight", "k_proj_weight", "v_proj_weight"), weights.chunk(3), strict=True))
    out, seen = F.multi_head_attention_forward(query, key, key, **arguments)
    q, k, v, options = functional_operands(query, key, key, **arguments)
    ours = regard.attend(q, k, v, **options).permute(2, 0, 1, 3).flatten(2)  # (N, B, W)
    torch.testing.assert_close(ours, out, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(regard.attention_weights(q, k, **options), seen, rtol=1e-12, atol=1e-12)


def test_static_keys_and_values_and_no_batch() -> None:
    arguments: dict[str, Any] = {
        "embed_dim_to_check": W,
        "num_heads": H,
        "in_proj_weight": drawn(3 * W, W),
        "in_proj_bias": None,
        "bias_k": None,
        "bias_v": None,
        "add_zero_attn": False,
        "dropout_p": 0.0,
        "out_proj_bias": None,
        "out_proj_weight": torch.eye(W, dtype=torch.float64),
        "need_weights": False,
    }
    static = {"static_k": drawn(B * H, 11, 5, seed=7), "static_v": drawn(B * H, 11, 5, seed=8)}
    query = drawn(N, B, W)
    q, k, v, options = functional_operands(query, query, query, **arguments, **static)
    out, _ = F.multi_head_attention_forward(query, query, query, **arguments, **static)
    torch.testing.assert_close(regard.attend(q, k, v, **options).permute(2, 0, 1, 3).flatten(2), out)
    query, padding = drawn(N, W), torch.tensor([False, True, False, False, True])
    q, k, v, options = functional_operands(query, query, query, **arguments, key_padding_mask=padding)
    out, _ = F.multi_head_attention_forward(query, query, query, **arguments, key_padding_mask=padding)
    torch.testing.assert_close(regard.attend(q, k, v, **options)[0].transpose(0, 1).flatten(1), out)


@pytest.mark.parametrize("n, m", [(5, 5), (3, 7), (7, 3)])
def test_causal_is_from_the_top_left_and_takes_the_fast_path(n: int, m: int) -> None:
    options = mask_options((B, H, n, m), attn_mask=torch.ones(n, m, dtype=torch.bool).triu(1), is_causal=True)
    assert type(options["mask"]) is Causal
    q, k = drawn(B, H, n, 5), drawn(B, H, m, 5)
    expected = F.scaled_dot_product_attention(q, k, k, is_causal=True)
    torch.testing.assert_close(regard.attend(q, k, k, **options), expected)
    assert "fused: chosen" in regard.explain(q, k, k, **options)


def test_errors() -> None:
    shape = (B, H, N, M)
    expected = r"attn_mask: expected shape \(N, M\) = \(5, 7\) or \(B \* H, N, M\) = \(6, 5, 7\), received \(7, 5\)"
    with pytest.raises(ValueError, match=expected):
        mask_options(shape, attn_mask=torch.ones(M, N))
    with pytest.raises(ValueError, match=r"key_padding_mask: expected shape \(B, M\) = \(2, 7\), received \(2, 5\)"):
        mask_options(shape, key_padding_mask=torch.ones(B, N))
    with pytest.raises(TypeError, match=r"key_padding_mask: expected a boolean tensor \(True hides\).*torch.int64"):
        mask_options(shape, key_padding_mask=torch.ones(B, M, dtype=torch.int64))
