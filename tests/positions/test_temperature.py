"""Queries scaled by their position."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from regard import KVCache, MultiHeadAttention, RollingCache
from regard.masks import Causal
from regard.positions import Rotary, Temperature

pytestmark = pytest.mark.on_device

TIGHT = {"rtol": 1e-12, "atol": 1e-12}


def noise(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("shift", [0, 1])
def test_the_closed_form(shift: int) -> None:
    temperature, q = Temperature(3, 0.7, shift=shift), noise(2, 5, 11, 7)
    factors = torch.tensor([1 + 0.7 * math.log(1 + (p + shift) // 3) for p in range(4, 15)], dtype=torch.float64)
    torch.testing.assert_close(temperature(q, 4), q * factors[:, None], **TIGHT)
    places = torch.arange(4, 15).expand(2, -1).contiguous()
    torch.testing.assert_close(temperature(q, places), q * factors[:, None], **TIGHT)
    assert temperature.factors(torch.tensor([-7])).item() == 1.0


@pytest.mark.parametrize("rotary", [False, True])
@torch.no_grad()
def test_in_a_layer_and_with_a_cache(rotary: bool) -> None:
    torch.manual_seed(2)
    encoding = Rotary(6) if rotary else None
    layer = MultiHeadAttention(18, 3, query_scale=Temperature(2, 0.9), position_encoding=encoding).double().eval()
    x, cache, plain = noise(2, 11, 18), KVCache(), MultiHeadAttention(18, 3, position_encoding=encoding).double().eval()
    plain.load_state_dict(layer.state_dict())
    whole, weights = layer(x, mask=Causal(), need_weights=True)
    _, unscaled = plain(x, mask=Causal(), need_weights=True)
    factors = Temperature(2, 0.9).factors(torch.arange(11), torch.float64)
    scores = unscaled.log() * factors[:, None]  # (log-softmax differs from scores by a constant of each row)
    torch.testing.assert_close(weights, scores.softmax(-1), rtol=1e-9, atol=1e-9)
    parts = [layer(part, mask=Causal(), cache=cache) for part in x.split([5, 1, 4, 1], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), whole, **TIGHT)
    later = torch.arange(7, 18)
    assert not torch.allclose(layer(x, mask=Causal(), positions=later), whole)
    ragged = KVCache()
    layer(x[:, :7], mask=Causal(), cache=ragged)
    ragged.truncate(torch.tensor([7, 4]))
    out = layer(x[:, 7:9], mask=Causal(), cache=ragged)
    text = torch.cat([x[1:, :4], x[1:, 7:9]], 1)
    torch.testing.assert_close(out[1], layer(text, mask=Causal())[0, 4:], **TIGHT)


@pytest.mark.on_meta
def test_refused() -> None:
    layer = MultiHeadAttention(18, 3, query_scale=Temperature(2))
    with pytest.raises(
        TypeError, match=r"cache: expected a KVCache: a RollingCache numbers its tokens anew.*query_scale"
    ):
        layer(torch.randn(1, 3, 18), cache=RollingCache(7))
    with pytest.raises(TypeError, match=r"query_scale: expected a Temperature or None, received float 2.0"):
        MultiHeadAttention(18, 3, query_scale=2.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"Temperature: every: expected at least 1, received 0"):
        Temperature(0)
    with pytest.raises(TypeError, match=r"Temperature: scale: expected a number, received str 'a'"):
        Temperature(2, "a")  # type: ignore[arg-type]
