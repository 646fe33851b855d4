"""`qk_clip`: the largest score becomes tau, of the heads that are above it alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from heads import hf_models
from torch import Tensor, nn

import regard
from regard.heads import qk_clip

W, N = 12, 11


def largest(model: nn.Module, *inputs: Any, **given: Any) -> dict[str, Tensor]:
    with regard.watch(model, measures="max_logit") as seen, torch.no_grad():
        model(*inputs, **given)
    return {layer.name: layer.max_logit.amax((0, 2)) for layer in seen}


def record(model: nn.Module, *inputs: Any, **given: Any) -> Any:
    with regard.watch(model, measures="max_logit") as seen, torch.no_grad():
        model(*inputs, **given)
    return seen


@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("bias", [True, False])
def test_heads_above_tau_have_tau(groups: int, bias: bool) -> None:
    layer = regard.MultiHeadAttention(W, 4, num_kv_heads=groups, bias=bias)
    x = torch.randn(3, N, W)
    with torch.no_grad():
        layer.q_proj.weight[3:6] *= 30
        if bias:
            layer.q_proj.bias.normal_()
            layer.k_proj.bias.normal_()
    (before,) = largest(layer, x).values()
    tau = float(before.sort().values[-2]) + 0.1  # head 1 alone is above it
    factors = qk_clip(layer, tau, record(layer, x))
    assert list(factors) == [("MultiHeadAttention", 1)]
    (after,) = largest(layer, x).values()
    assert float(after[1]) == pytest.approx(tau, rel=1e-4)
    others = [0, 2, 3]
    torch.testing.assert_close(after[others], before[others])
    assert qk_clip(layer, tau * 1.001, record(layer, x)) == {}


@pytest.mark.parametrize("family", ["bert", "llama", "gpt2", "gpt_neox"])
def test_models_of_transformers(family: str) -> None:
    model, given = hf_models.model(family), hf_models.inputs(family)
    before = torch.stack(list(largest(model, **given).values()))
    tau = float(before[0].median())
    if family == "gpt_neox":  # q, k and v of a head lie together
        with pytest.raises((TypeError, ValueError)):
            qk_clip(model, tau, record(model, **given))
        return
    factors = qk_clip(model, tau, record(model, **given))
    assert factors
    (first, *_) = largest(model, **given).values()  # (later layers have other inputs now)
    expected = torch.where(before[0] > tau, torch.full_like(before[0], tau), before[0])
    torch.testing.assert_close(first, expected, rtol=1e-4, atol=1e-4)


def test_the_last_sample_of_a_monitor_is_used_once() -> None:
    layer, x = regard.MultiHeadAttention(W, 4), torch.randn(2, N, W)
    with pytest.raises(ValueError, match=r"seen: expected a record, or a monitor of this model that has sampled it"):
        qk_clip(layer)
    with torch.no_grad():
        layer.q_proj.weight.mul_(100)
    with regard.monitor(layer, every=1, limits=None):
        layer(x)
        assert qk_clip(layer, tau=5.0)
        assert qk_clip(layer, tau=5.0) == {}
        layer(x)
        assert qk_clip(layer, tau=5.01) == {}


def test_what_is_refused() -> None:
    layer, x = regard.MultiHeadAttention(W, 4, qk_norm="rms"), torch.randn(2, N, W)
    with pytest.raises(ValueError, match="received q_norm, which undoes any scaling"):
        qk_clip(layer, 1e-3, record(layer, x))
    plain = regard.MultiHeadAttention(W, 4)
    with pytest.raises(ValueError, match="tau: expected a number above 0, received 0"):
        qk_clip(plain, 0, record(plain, x))
    with regard.watch(plain, measures="entropy") as seen:
        plain(x)
    with pytest.raises(ValueError, match="expected a record in which max_logit was measured"):
        qk_clip(plain, 1.0, seen)
    with pytest.raises(TypeError, match="seen: expected a record, or a sample of a monitor, received int"):
        qk_clip(plain, 1.0, 3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="model: expected the one that was seen, with MultiHeadAttention"):
        qk_clip(nn.Sequential(plain), 1e-9, record(plain, x))
