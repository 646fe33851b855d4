"""Value residual: values mixed with those of an earlier layer."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import regard
from regard import KVCache, MultiHeadAttention, RollingCache
from regard.layer import KeyValues, Norm, ValueMix
from regard.masks import Causal
from regard.positions import Rotary

pytestmark = pytest.mark.on_device

TIGHT = {"rtol": 1e-12, "atol": 1e-12}


def noise(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Two(nn.Module):
    """Two layers, the second with the values of the first in its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        options = {"num_kv_heads": 3, "head_dim": 6, "value_head_dim": 5, "v_norm": Norm(weight="none")}
        self.first = MultiHeadAttention(13, 6, position_encoding=Rotary(6), **options)  # type: ignore[arg-type]
        self.second = MultiHeadAttention(13, 6, position_encoding=Rotary(6), value_mix=ValueMix(0.25, 0.875), **options)  # type: ignore[arg-type]
        self.double()

    def forward(self, x: Tensor, caches: list | None = None) -> Tensor:
        shared, (a, b) = KeyValues(), caches or (None, None)
        x = self.first(x, mask=Causal(), cache=a, share=shared)
        return self.second(x, mask=Causal(), cache=b, value_residual=shared.new_values)


def by_hand(model: Two, x: Tensor) -> Tensor:
    """The second layer with its values written out."""
    shared, plain = KeyValues(), copy.deepcopy(model.second)
    plain.value_mix = None
    y = model.first(x, mask=Causal(), share=shared)
    own = KeyValues()
    _, weights = plain(y, mask=Causal(), share=own, need_weights=True)
    assert own.values is not None
    assert shared.values is not None
    mixed = 0.25 * own.values + 0.875 * shared.values
    heads = weights @ mixed.repeat_interleave(2, 1)
    return plain.out_proj(heads.transpose(1, 2).flatten(2))


def test_the_formula() -> None:
    model, x = Two(), noise(2, 11, 13)
    torch.testing.assert_close(model(x), by_hand(model, x), **TIGHT)


def test_gradients_reach_both_layers_and_the_mix() -> None:
    model, x = Two(), noise(1, 3, 13).requires_grad_()
    names = ("second.value_mix.weight", "second.v_proj.bias", "first.v_proj.bias")
    parameters = {name: model.get_parameter(name) for name in names}

    def call(x: Tensor, *values: Tensor) -> Tensor:
        return torch.func.functional_call(model, dict(zip(parameters, values, strict=True)), (x,))  # type: ignore[return-value]

    assert torch.autograd.gradcheck(call, (x, *parameters.values()), fast_mode=True)


@pytest.mark.parametrize("kind", [KVCache, lambda: RollingCache(19, 2)])
@torch.no_grad()
def test_cached(kind: type[KVCache]) -> None:
    model, x = Two().eval(), noise(2, 11, 13)
    caches = [kind(), kind()]
    parts = [model(part, caches) for part in x.split([5, 1, 4, 1], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), model(x), **TIGHT)


@pytest.mark.slow
@torch.no_grad()
def test_compiled() -> None:
    model, x = Two().eval(), noise(2, 11, 13)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), model(x), **TIGHT)


@torch.no_grad()
def test_copied_stored_and_watched() -> None:
    model, x = Two().eval(), noise(2, 11, 13)
    other = Two().eval()
    other.load_state_dict(copy.deepcopy(model).state_dict())
    torch.testing.assert_close(other(x), model(x), **TIGHT)
    with regard.watch(model, keep="qkv") as seen:
        out = model(x)
    torch.testing.assert_close(seen[1].projected().sum(1) + model.second.out_proj.bias, out, rtol=1e-9, atol=1e-9)
    assert "v mixed with an earlier layer's" in model.second.describe()
    exported = regard.layouts.export(model.second, "separate")
    again = regard.layouts.load(exported, 6, position_encoding=Rotary(6), v_norm=Norm(weight="none"))
    values = noise(2, 3, 11, 5)
    torch.testing.assert_close(again(x, value_residual=values), model.second(x, value_residual=values), **TIGHT)


def test_it_starts_at_one_half_of_each() -> None:
    mix = ValueMix()
    a, b = torch.randn(1, 2, 3, 5), torch.randn(1, 2, 3, 5)
    torch.testing.assert_close(mix(a, b), (a + b) / 2)
    with torch.no_grad():
        mix.weight.fill_(7.0)
    mix.reset_parameters()
    assert mix.weight.tolist() == [0.5, 0.5]


@pytest.mark.on_meta
def test_refused() -> None:
    layer, x = MultiHeadAttention(12, 3, value_mix=ValueMix()), torch.randn(2, 5, 12)
    with pytest.raises(ValueError, match=r"value_residual: expected the values of an earlier layer.*kv.new_values"):
        layer(x)
    with pytest.raises(ValueError, match=r"value_residual: expected \(2, 3, 5, 4\).*received \(2, 3, 7, 4\)"):
        layer(x, value_residual=torch.randn(2, 3, 7, 4))
    with pytest.raises(TypeError, match=r"value_residual: expected a tensor \(B, G, N, E\), received KeyValues"):
        layer(x, value_residual=KeyValues())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"value_residual: expected none: this layer has no value_mix"):
        MultiHeadAttention(12, 3)(x, value_residual=torch.randn(2, 3, 5, 4))
    with pytest.raises(TypeError, match=r"value_mix: expected a ValueMix or None, received bool True"):
        MultiHeadAttention(12, 3, value_mix=True)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"value_mix: expected None: with shares_kv the values are another layer's"):
        MultiHeadAttention(12, 3, value_mix=ValueMix(), shares_kv=True)
    with pytest.raises(ValueError, match=r"received a parameter 'value_mix.weight' \(2,\) beside them"):
        regard.prune(layer, [0])
