"""A watch on torch's own attention where masks, the hint `is_causal` and rows that see nothing meet: what is seen is
what torch computes, and a watch changes none of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from heads.oracle import close
from torch import Tensor, nn

import regard

B, H, N, D = 2, 2, 5, 7
W = H * D


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


AFTER = torch.ones(N, N, dtype=torch.bool).triu(1)
SOME = drawn(N, N, seed=3) > 0.3
SOME[:, 0] = False  # something is left to see
MASKS = {
    "boolean": SOME,
    "a bias": drawn(N, N, seed=5),
    "causal": AFTER,
    "causal, added": torch.zeros(N, N, dtype=torch.float64).masked_fill(AFTER, float("-inf")),
    "per head": (drawn(B * H, N, N, seed=7) > 0.3).logical_and(~torch.eye(N, dtype=torch.bool)),
}
PADDING = torch.zeros(B, N, dtype=torch.bool)
PADDING[1, 3:] = True


def module(heads: int = H, **options: Any) -> nn.MultiheadAttention:
    torch.manual_seed(0)
    return nn.MultiheadAttention(W * heads // H, heads, batch_first=True, **options).double().eval()


def heads_of(model: nn.MultiheadAttention, weights: Tensor, x: Tensor, extra: int = 0) -> Tensor:
    """The module's output by weights (B, H, N, M)."""
    v = F.linear(x, model.in_proj_weight, model.in_proj_bias).chunk(3, -1)[2]
    if model.bias_v is not None:
        v = torch.cat([v, model.bias_v.expand(x.shape[0], 1, -1)], 1)
    if model.add_zero_attn:
        v = torch.cat([v, v.new_zeros(x.shape[0], 1, v.shape[2])], 1)
    v = v.unflatten(-1, (model.num_heads, -1)).transpose(1, 2)
    return model.out_proj((weights @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("fast", [False, True], ids=["slow", "fast"])
@pytest.mark.parametrize("need_weights", [False, True], ids=["output", "weights"])
@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("kind", MASKS)
def test_a_hint_beside_a_mask(kind: str, padded: bool, need_weights: bool, fast: bool) -> None:
    """Of nn.MultiheadAttention: with a hint that is wrong it computes now this, now that; the weights seen are those by
    which its output came about."""
    model, x = module(), drawn(B, N, W, seed=11)
    options: dict[str, Any] = {"attn_mask": MASKS[kind], "need_weights": need_weights, "is_causal": True}
    if padded and MASKS[kind].is_floating_point():
        options["key_padding_mask"] = torch.zeros(B, N, dtype=torch.float64).masked_fill(PADDING, float("-inf"))
    elif padded:
        options["key_padding_mask"] = PADDING
    with torch.set_grad_enabled(not fast):
        before, _ = model(x, x, x, **options)
        with regard.watch(model, keep="qk", exact=True) as seen:
            during, _ = model(x, x, x, **options)
        with regard.watch(model) as in_one_pass:
            again, _ = model(x, x, x, **options)
    assert torch.equal(during, before)
    close(again, before, "in one pass")
    close(in_one_pass[0].entropy, seen[0].entropy, "what was seen in one pass")
    close(heads_of(model, seen[0].weights(), x), before, "what was seen gives what came out")


@pytest.mark.parametrize("extra", ["add_bias_kv", "add_zero_attn"])
@pytest.mark.parametrize("need_weights", [False, True])
def test_a_hint_and_extra_keys(extra: str, need_weights: bool) -> None:
    """torch hides them by the hint, and shows them by the mask."""
    model, x = module(**{extra: True}), drawn(B, N, W, seed=11)
    with regard.watch(model, keep="qk") as seen:
        out, _ = model(x, x, x, attn_mask=AFTER, is_causal=True, need_weights=need_weights)
    close(heads_of(model, seen[0].weights(), x), out, "what was seen gives what came out")
    assert bool(seen[0].weights()[..., 0, -1].any()) == need_weights


class Fused(nn.Module):
    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.mask = mask

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = x.unflatten(-1, (H, D)).transpose(1, 2).expand(3, -1, -1, -1, -1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask, is_causal=True)


@pytest.mark.parametrize("kind", ["boolean", "a bias"])
def test_a_mask_and_causal_of_the_fused_function(kind: str) -> None:
    """There both count."""
    mask = ~MASKS[kind] if kind == "boolean" else MASKS[kind]
    model, x = Fused(mask), drawn(B, N, W, seed=13)
    with regard.watch(model, keep="qk") as seen:
        out = model(x)
    assert not (seen[0].weights() * AFTER).any()
    close(seen[0].weights() @ x.unflatten(-1, (H, D)).transpose(1, 2), out, "what was seen gives what came out")


@pytest.mark.parametrize("need_weights", [False, True], ids=["output", "weights"])
@pytest.mark.parametrize("heads", [2, 3], ids=["fast", "slow"])
@pytest.mark.parametrize("hidden", ["row", "text"])
def test_rows_that_see_nothing_stay_what_they_are(hidden: str, heads: int, need_weights: bool) -> None:
    """NaN on the fast path (an even number of heads), and with weights; finite else. A watch changes neither."""
    model, x = module(heads), drawn(B, N, 7 * heads, seed=17)
    row, text = torch.zeros(N, N, dtype=torch.bool), torch.zeros(B, N, dtype=torch.bool)
    row[2], text[1] = True, True
    options: dict[str, Any] = {"attn_mask": row} if hidden == "row" else {"key_padding_mask": text}
    with torch.no_grad():
        before = model(x, x, x, need_weights=need_weights, **options)
        with regard.watch(model, keep="qkv") as seen:
            during = model(x, x, x, need_weights=need_weights, **options)
        with regard.watch(model), regard.watch(model):
            twice = model(x, x, x, need_weights=need_weights, **options)
    blind = before[0][:, 2] if hidden == "row" else before[0][1]
    assert blind.isnan().all() == (heads == 2 or need_weights)
    for after in (during, twice):
        torch.testing.assert_close(after, before, rtol=0.0, atol=0.0, equal_nan=True)
    weights = seen[0].weights()[:, :, 2] if hidden == "row" else seen[0].weights()[1]
    assert not weights.any(), "in the record they see nothing"
    assert seen[0].weights().isfinite().all()


def test_sequence_first_and_without_a_batch() -> None:
    torch.manual_seed(0)
    model = nn.MultiheadAttention(W, H).double().eval()
    with torch.no_grad():
        for x in (drawn(N, B, W), drawn(N, W)):
            before = model(x, x, x)
            with regard.watch(model):
                during = model(x, x, x)
            torch.testing.assert_close(during, before, rtol=0.0, atol=0.0)
