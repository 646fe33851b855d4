"""The gate on the heads' outputs: its formula, its gradients, and what changes heads."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import regard
from regard import KVCache, MultiHeadAttention
from regard.layer import Gate
from regard.masks import Causal

pytestmark = pytest.mark.on_device

TIGHT = {"rtol": 1e-12, "atol": 1e-12}
GATES = [Gate(), Gate("head"), Gate("element", "softplus"), Gate("head", "softplus", bias=True)]
gates = pytest.mark.parametrize("gate", GATES, ids=str)


def new_layer(gate: Gate | None, **options: object) -> MultiHeadAttention:
    torch.manual_seed(5)
    layer = MultiHeadAttention(14, 6, num_kv_heads=3, head_dim=5, value_head_dim=7, gate=gate, **options).double()  # type: ignore[arg-type]
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.5)
    return layer.eval()


def noise(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@gates
def test_heads_times_the_gate(gate: Gate) -> None:
    layer, x = new_layer(gate), noise(2, 11, 14)
    assert layer.gate_proj is not None
    heads: list[Tensor] = []
    hook = layer.out_proj.register_forward_pre_hook(lambda _, args: heads.append(args[0]))
    layer(x, mask=Causal())
    layer.gate = None
    layer(x, mask=Causal())
    hook.remove()
    gated, plain = heads
    activation = {"sigmoid": torch.sigmoid, "softplus": nn.functional.softplus}[gate.activation]
    factor = activation(layer.gate_proj(x))  # (B, N, H * E) or (B, N, H)
    factor = factor if gate.per == "element" else factor.repeat_interleave(7, -1)
    torch.testing.assert_close(gated, plain * factor, **TIGHT)


@gates
def test_gradients(gate: Gate) -> None:
    layer = new_layer(gate)
    parameters = dict(layer.named_parameters())

    def call(x: Tensor, *values: Tensor) -> Tensor:
        return torch.func.functional_call(layer, dict(zip(parameters, values, strict=True)), (x,), {"mask": Causal()})  # type: ignore[return-value]

    inputs = (noise(1, 3, 14).requires_grad_(), *parameters.values())
    assert torch.autograd.gradcheck(call, inputs, fast_mode=True)


@gates
@torch.no_grad()
def test_with_a_cache(gate: Gate) -> None:
    layer, x, cache = new_layer(gate), noise(2, 11, 14), KVCache()
    parts = [layer(part, mask=Causal(), cache=cache) for part in x.split([5, 1, 4, 1], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), layer(x, mask=Causal()), **TIGHT)


def test_the_gate_is_of_the_query_in_cross_attention() -> None:
    layer, x, memory = new_layer(Gate(), key_dim=11), noise(2, 5, 14), noise(2, 7, 11)
    assert layer.gate_proj is not None
    assert layer.gate_proj.in_features == 14
    assert layer(x, memory).shape == (2, 5, 14)


@gates
@torch.no_grad()
def test_pruning_cuts_the_gate_too(gate: Gate) -> None:
    layer, x = new_layer(gate), noise(2, 11, 14)
    kept = [1, 2, 3, 4, 5]
    without = new_layer(gate)
    without.out_proj.weight.view(14, 6, 7)[:, 0] = 0
    with pytest.warns(UserWarning, match="kv heads instead of"):
        regard.prune(layer, [0])
    assert layer.num_heads == len(kept)
    assert layer.gate_proj is not None
    assert layer.gate_proj.out_features == len(kept) * (7 if gate.per == "element" else 1)
    torch.testing.assert_close(layer(x, mask=Causal()), without(x, mask=Causal()), **TIGHT)


@torch.no_grad()
def test_ablating_a_head_takes_what_it_adds_through_the_gate() -> None:
    layer, x = new_layer(Gate()), noise(2, 11, 14)
    with regard.watch(layer, keep="qkv") as seen:
        whole = layer(x, mask=Causal())
    with regard.ablate(layer, {0: [2]}):
        without = layer(x, mask=Causal())
    torch.testing.assert_close(whole - without, seen[0].projected()[:, 2], rtol=1e-9, atol=1e-9)


def test_described_and_shown() -> None:
    layer = MultiHeadAttention(12, 3, gate=Gate("head"))
    assert "gate=Gate(per='head', activation='sigmoid', bias=False)" in repr(layer)
    text = layer.describe(5)
    assert "gate_proj           (1, 5, 3)             36" in text
    assert "gate     sigmoid per head    (1, 5, 3, 4)" in text
    assert f"total                                             {sum(p.numel() for p in layer.parameters())}" in text


def test_what_is_no_gate() -> None:
    with pytest.raises(ValueError, match=r"Gate: per: expected 'element' or 'head', received 'token'"):
        Gate("token")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"Gate: activation: expected 'sigmoid' or 'softplus', received 'tanh'"):
        Gate(activation="tanh")  # type: ignore[arg-type]
    with pytest.raises(
        TypeError, match=r"gate: expected a Gate or None, received str 'head'; remedy: regard.layer.Gate"
    ):
        MultiHeadAttention(12, 3, gate="head")  # type: ignore[arg-type]
