"""Keys and values that layers share: a borrower is the layer with the lender's k_proj and v_proj in its place."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regard
from regard import KVCache, MultiHeadAttention, RollingCache
from regard.layer import Gate, KeyValues, Norm
from regard.masks import Causal, Window
from regard.positions import MultiAxisRotary, Rotary, Temperature

pytestmark = pytest.mark.on_device

TIGHT = {"rtol": 1e-12, "atol": 1e-12}
SIZES: dict[str, Any] = {"num_kv_heads": 3, "head_dim": 6, "value_head_dim": 5}


def noise(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def pair(**options: Any) -> tuple[MultiHeadAttention, MultiHeadAttention, MultiHeadAttention]:
    """A lender, a borrower, and the borrower with the lender's keys and values as its own."""
    torch.manual_seed(2)
    own = {name: options.pop(name) for name in ("v_norm",) if name in options}
    options.setdefault("position_encoding", Rotary(6))
    lender = MultiHeadAttention(13, 6, **SIZES, **options, **own).double().eval()
    borrower = MultiHeadAttention(13, 6, **SIZES, **options, shares_kv=True).double().eval()
    for parameter in (*lender.parameters(), *borrower.parameters()):
        nn.init.normal_(parameter, std=0.5)
    whole = MultiHeadAttention(13, 6, **SIZES, **options, **own).double().eval()
    lent = {key: value for key, value in lender.state_dict().items() if key.startswith(("k_", "v_"))}
    whole.load_state_dict({**borrower.state_dict(), **lent})
    return lender, borrower, whole


OPTIONS: dict[str, dict[str, Any]] = {
    "rotary": {},
    "no positions": {"position_encoding": None},
    "norms": {"qk_norm": Norm(weight="zero-centred"), "v_norm": Norm(weight="none")},
    "gate, temperature, sinks": {"gate": Gate(), "query_scale": Temperature(2, 0.9), "sinks": True, "softcap": 3.0},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_without_a_cache_values_and_gradients(name: str) -> None:
    lender, borrower, whole = pair(**OPTIONS[name])
    x, shared = noise(2, 11, 13), KeyValues()
    lender(x, mask=Causal(), share=shared)
    out = borrower(x, mask=Causal(), source=shared)
    wanted = whole(x, mask=Causal())
    torch.testing.assert_close(out, wanted, **TIGHT)
    torch.autograd.backward([out.square().sum(), wanted.square().sum()])
    for key, parameter in whole.named_parameters():
        owner = lender if key.startswith(("k_", "v_")) else borrower
        torch.testing.assert_close(owner.get_parameter(key).grad, parameter.grad, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("through", ["cache", "KeyValues"])
@torch.no_grad()
def test_cached(name: str, through: str) -> None:
    lender, borrower, whole = pair(**OPTIONS[name])
    x, cache, other = noise(2, 11, 13), KVCache(), KVCache()
    for part in x.split([5, 1, 4, 1], 1):
        shared = KeyValues()
        lender(part, mask=Window(4), cache=cache, share=shared)
        out = borrower(part, mask=Window(4), source=cache if through == "cache" else shared)
        torch.testing.assert_close(out, whole(part, mask=Window(4), cache=other), **TIGHT)
    assert len(cache) == 11


@pytest.mark.parametrize("through", ["cache", "KeyValues"])
@torch.no_grad()
def test_cached_with_positions_and_with_rows_of_different_lengths(through: str) -> None:
    lender, borrower, whole = pair()
    x, cache, other = noise(2, 9, 13), KVCache(), KVCache()
    at = torch.tensor([[0, 1, 2, 5, 6, 7, 8, 9, 10], [3, 4, 5, 6, 7, 8, 9, 10, 11]])
    for part, where in zip(x.split([5, 3, 1], 1), at.split([5, 3, 1], 1), strict=True):
        shared = KeyValues()
        lender(part, mask=Causal(), cache=cache, positions=where, share=shared)
        out = borrower(part, mask=Causal(), source=cache if through == "cache" else shared)
        torch.testing.assert_close(out, whole(part, mask=Causal(), cache=other, positions=where), **TIGHT)
    cache.clear()
    other.clear()
    lender(x[:, :5], mask=Causal(), cache=cache)
    whole(x[:, :5], mask=Causal(), cache=other)
    for each in (cache, other):
        each.truncate(torch.tensor([5, 2]))
    for part in x[:, 5:].split([1, 3], 1):
        shared = KeyValues()
        lender(part, mask=Causal(), cache=cache, share=shared)
        out = borrower(part, mask=Causal(), source=cache if through == "cache" else shared)
        torch.testing.assert_close(out, whole(part, mask=Causal(), cache=other), **TIGHT)


@torch.no_grad()
def test_a_rolling_cache_is_shared_through_key_values() -> None:
    lender, borrower, whole = pair()
    x, cache, other = noise(2, 23, 13), RollingCache(5, 2), RollingCache(5, 2)
    for part in x.split([3, 1, 11, 1, 1, 6], 1):
        shared = KeyValues()
        lender(part, mask=Causal(), cache=cache, share=shared)
        out = borrower(part, mask=Causal(), source=shared)
        torch.testing.assert_close(out, whole(part, mask=Causal(), cache=other), **TIGHT)


@torch.no_grad()
def test_positions_of_several_axes_are_given_to_both() -> None:
    lender, borrower, whole = pair(position_encoding=MultiAxisRotary(6, (2, 1)))
    x, at, shared = (
        noise(2, 7, 13),
        torch.randint(0, 50, (2, 7, 2), generator=torch.Generator().manual_seed(3)),
        KeyValues(),
    )
    lender(x, mask=Causal(), positions=at, share=shared)
    out = borrower(x, mask=Causal(), positions=at, source=shared)
    torch.testing.assert_close(out, whole(x, mask=Causal(), positions=at), **TIGHT)
    with pytest.raises(ValueError, match=r"positions: expected .*only the caller knows where earlier keys stand"):
        borrower(x, mask=Causal(), source=shared)


@torch.no_grad()
def test_without_a_batch_and_copied() -> None:
    lender, borrower, whole = pair()
    x, shared = noise(11, 13), KeyValues()
    lender(x, mask=Causal(), share=shared)
    torch.testing.assert_close(borrower(x, mask=Causal(), source=shared), whole(x, mask=Causal()), **TIGHT)

    twin = copy.deepcopy(borrower)
    torch.testing.assert_close(twin(x, source=shared), borrower(x, source=shared), **TIGHT)
    assert sorted(twin.state_dict()) == ["out_proj.bias", "out_proj.weight", "q_proj.bias", "q_proj.weight"]


@pytest.mark.slow
@torch.no_grad()
def test_compiled_with_weights() -> None:
    lender, borrower, _ = pair()
    x = noise(2, 11, 13)

    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        kv = KeyValues()
        return borrower(lender(x, mask=Causal(), share=kv), mask=Causal(), source=kv, need_weights=True)

    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    for ours, theirs in zip(compiled(x), both(x), strict=True):
        torch.testing.assert_close(ours, theirs, **TIGHT)


@torch.no_grad()
def test_watched_and_ablated() -> None:
    lender, borrower, whole = pair()
    model, x = nn.ModuleList([lender, borrower]), noise(2, 7, 13)

    def run() -> Tensor:
        kv = KeyValues()
        lender(x, mask=Causal(), share=kv)
        return borrower(x, mask=Causal(), source=kv)

    with regard.watch(model, keep="qk") as seen:
        out = run()
    torch.testing.assert_close(out, whole(x, mask=Causal()), **TIGHT)
    torch.testing.assert_close(seen[1].weights(), whole(x, mask=Causal(), need_weights=True)[1], rtol=1e-9, atol=1e-9)
    with regard.ablate(model, {1: [2]}):
        without = run()
    with regard.ablate(whole, {0: [2]}):
        torch.testing.assert_close(without, whole(x, mask=Causal()), **TIGHT)


def test_described_and_shown() -> None:
    layer = MultiHeadAttention(12, 3, shares_kv=True)
    assert "shares_kv=True" in repr(layer)
    assert "k_proj" not in layer.describe()
    assert "3 heads of k, of another layer" in layer.describe()
    assert layer.describe().endswith("cache: none of its own")
    assert repr(KeyValues()) == "KeyValues(empty)"
    layer.reset_parameters()


class TestRefused:
    @staticmethod
    def filled(**options: Any) -> KeyValues:
        shared = KeyValues()
        MultiHeadAttention(12, 6, **options)(torch.randn(2, 5, 12), share=shared)
        return shared

    @pytest.mark.on_meta
    def test_no_source(self) -> None:
        with pytest.raises(
            ValueError, match=r"source: expected keys and values of another layer.*remedy: kv = KeyValues"
        ):
            MultiHeadAttention(12, 6, shares_kv=True)(torch.randn(2, 5, 12))

    @pytest.mark.on_meta
    def test_an_empty_one(self) -> None:
        layer = MultiHeadAttention(12, 6, shares_kv=True)
        for source in (KeyValues(), KVCache()):
            with pytest.raises(
                ValueError, match=rf"source: expected one that is filled.*an empty {type(source).__name__}"
            ):
                layer(torch.randn(2, 5, 12), source=source)

    @pytest.mark.on_meta
    def test_a_rolling_cache_or_something_else(self) -> None:
        layer = MultiHeadAttention(12, 6, shares_kv=True)
        with pytest.raises(TypeError, match=r"received a RollingCache, which has forgotten tokens.*share=kv"):
            layer(torch.randn(2, 5, 12), source=RollingCache(7))  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"source: expected a KeyValues or a KVCache, received tuple"):
            layer(torch.randn(2, 5, 12), source=(1, 2))  # type: ignore[arg-type]

    @pytest.mark.on_meta
    def test_other_sizes(self) -> None:
        layer = MultiHeadAttention(12, 6, num_kv_heads=2, shares_kv=True)
        with pytest.raises(ValueError, match=r"source: expected batch 2, 2 kv heads, .*received keys \(2, 3, 5, 2\)"):
            layer(torch.randn(2, 5, 12), source=self.filled(num_kv_heads=3))
        with pytest.raises(ValueError, match=r"source: expected batch 3, .*received keys \(2, 2, 5, 2\)"):
            layer(torch.randn(3, 5, 12), source=self.filled(num_kv_heads=2))
        with pytest.raises(ValueError, match=r"source: expected at least 7 tokens, as the query has, received 5"):
            layer(torch.randn(2, 7, 12), source=self.filled(num_kv_heads=2))

    @pytest.mark.on_meta
    def test_a_source_for_a_layer_with_its_own(self) -> None:
        with pytest.raises(ValueError, match=r"source: expected none: this layer has keys and values of its own"):
            MultiHeadAttention(12, 6)(torch.randn(2, 5, 12), source=self.filled())

    @pytest.mark.on_meta
    def test_what_a_borrower_cannot_take(self) -> None:
        layer, x, source = MultiHeadAttention(12, 6, shares_kv=True), torch.randn(2, 5, 12), self.filled()
        with pytest.raises(ValueError, match=r"cache: expected none: this layer has shares_kv=True"):
            layer(x, source=source, cache=KVCache())
        with pytest.raises(ValueError, match=r"share: expected none: this layer has shares_kv=True"):
            layer(x, source=source, share=KeyValues())
        with pytest.raises(ValueError, match=r"key: expected none: this layer has shares_kv=True"):
            layer(x, torch.randn(2, 7, 12), source=source)
        with pytest.raises(ValueError, match=r"v_norm: expected None: with shares_kv the values are another layer's"):
            MultiHeadAttention(12, 6, shares_kv=True, v_norm="rms")
        with pytest.raises(TypeError, match=r"shares_kv: expected True or False, received int 1"):
            MultiHeadAttention(12, 6, shares_kv=1)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"expected keys and values of its own, received another layer's"):
            regard.prune(layer, [0])

    @pytest.mark.on_meta
    def test_share(self) -> None:
        layer, x = MultiHeadAttention(12, 6), torch.randn(2, 5, 12)
        with pytest.raises(ValueError, match=r"share: expected an empty KeyValues, received one that is filled"):
            layer(x, share=self.filled())
        with pytest.raises(TypeError, match=r"share: expected an empty KeyValues, received bool"):
            layer(x, share=True)  # type: ignore[arg-type]
        memory, cache = torch.randn(2, 7, 12), KVCache(once=True)
        with torch.no_grad():
            layer(x, memory, cache=cache, share=KeyValues())
            with pytest.raises(
                ValueError, match=r"share: expected new keys and values, received a KVCache\(once=True\)"
            ):
                layer(x, memory, cache=cache, share=KeyValues())
