"""Norms of q, k and v: over a head or over all heads, with, without and around their weights."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from regard import KVCache, MultiHeadAttention, prune
from regard.layer import Norm
from regard.masks import Causal
from regard.positions import Rotary

pytestmark = pytest.mark.on_device

TIGHT = {"rtol": 1e-12, "atol": 1e-12}


def noise(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rms(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def formula(layer: MultiHeadAttention, norm: Norm, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q (B, H, N, D), k (B, G, N, D), v (B, G, N, E), normalised, written out."""
    found = []
    for name, heads in (("q", 6), ("k", 3), ("v", 3)):
        y = getattr(layer, f"{name}_proj")(x)
        y = y if norm.over == "width" else y.unflatten(-1, (heads, -1))
        if norm.kind == "rms":
            y = rms(y, norm.eps)
        else:
            y = (y - y.mean(-1, keepdim=True)) * torch.rsqrt(y.var(-1, unbiased=False, keepdim=True) + norm.eps)
        module = getattr(layer, f"{name}_norm")
        if norm.weight != "none":
            y = y * (module.weight + (1 if norm.weight == "zero-centred" else 0))
            y = y if norm.kind == "rms" else y + module.bias
        y = y.unflatten(-1, (heads, -1)) if norm.over == "width" else y
        found.append(y.transpose(1, 2))
    return found[0], found[1], found[2]


NORMS = [
    Norm(),
    Norm("layer", eps=0.1),
    Norm(weight="none"),
    Norm("layer", weight="none"),
    Norm(weight="zero-centred", eps=0.01),
    Norm(over="width"),
    Norm("layer", over="width"),
    Norm(over="width", weight="zero-centred"),
]


@pytest.mark.parametrize("norm", NORMS, ids=str)
def test_the_formula_and_gradients(norm: Norm) -> None:
    torch.manual_seed(3)
    layer = MultiHeadAttention(14, 6, num_kv_heads=3, head_dim=5, value_head_dim=7, qk_norm=norm, v_norm=norm).double()
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.5)
    x = noise(2, 11, 14)
    q, k, v = formula(layer, norm, x)
    weights = (q @ k.repeat_interleave(2, 1).mT * 5**-0.5).softmax(-1)
    wanted = layer.out_proj((weights @ v.repeat_interleave(2, 1)).transpose(1, 2).flatten(2))
    out = layer(x)
    torch.testing.assert_close(out, wanted, **TIGHT)
    for ours, theirs in zip(
        *(torch.autograd.grad(y.square().sum(), layer.parameters()) for y in (out, wanted)), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
    cache = KVCache()
    with torch.no_grad():
        parts = [layer(part, mask=Causal(), cache=cache) for part in x.split([5, 1, 5], 1)]
        torch.testing.assert_close(torch.cat(parts, 1), layer(x, mask=Causal()), **TIGHT)


def test_a_norm_without_weights_is_the_same_before_and_after_rotary() -> None:
    """Llama 4 normalises after it rotates: a rotation keeps lengths."""
    rotary, x = Rotary(10), noise(2, 3, 7, 10)
    torch.testing.assert_close(rms(rotary(x), 1e-5), rotary(rms(x, 1e-5)), **TIGHT)


def test_strings_are_norms_of_each_head() -> None:
    layer = MultiHeadAttention(12, 3, qk_norm="rms", v_norm="layer")
    assert repr(layer.q_norm) == "RMSNorm((4,), eps=1e-06, elementwise_affine=True)"
    assert isinstance(layer.v_norm, nn.LayerNorm)
    assert (layer.v_norm.normalized_shape, layer.v_norm.eps) == ((4,), 1e-5)
    assert "LayerNorm of v" in layer.describe()


def test_a_zero_centred_norm_starts_at_one() -> None:
    x = noise(3, 5)
    torch.testing.assert_close(Norm(weight="zero-centred").module(2, 5).double()(x), rms(x, 1e-6), **TIGHT)


def test_half_precision_is_normalised_in_float32() -> None:
    torch.manual_seed(0)
    layer = MultiHeadAttention(12, 3, v_norm=Norm(weight="none")).bfloat16()
    x = torch.randn(2, 5, 12).bfloat16()
    assert layer(x).dtype == torch.bfloat16


def test_heads_under_one_norm_cannot_be_pruned() -> None:
    layer = MultiHeadAttention(12, 3, qk_norm=Norm(over="width"))
    with pytest.raises(ValueError, match=r"received a parameter 'q_norm.weight' \(12,\) beside them"):
        prune(layer, [0])


def test_what_is_no_norm() -> None:
    with pytest.raises(ValueError, match=r"Norm: kind: expected one of 'rms', 'layer', received 'batch'"):
        Norm("batch")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r'Norm: expected kind="rms" where the weight is zero-centred'):
        Norm("layer", weight="zero-centred")
    with pytest.raises(ValueError, match=r"v_norm: expected \"rms\", \"layer\" or None, received 'l2'"):
        MultiHeadAttention(12, 3, v_norm="l2")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"qk_norm: expected .* a layer.Norm or None, received bool"):
        MultiHeadAttention(12, 3, qk_norm=True)  # type: ignore[arg-type]
