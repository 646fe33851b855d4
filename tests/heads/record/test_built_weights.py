"""Weights that a model built by hand: measured by the native kernel as strip by strip, where they are a softmax."""

from __future__ import annotations

import gc
import math
import weakref
from typing import Any

import pytest
import torch
from heads.oracle import wanted
from torch import Tensor, nn

import regard
from regard.heads.record import built_weights, sequences
from regard.kernels import native_library
from regard.measures import DEFAULT

B, N, W, H = 2, 23, 21, 3
no_library = pytest.mark.skipif(native_library.load() is None, reason="the native kernel is not there")


class Hand(nn.Module):
    """Attention written by hand: softmax of scores to which a mask (B|1, 1, N, N) is added, and what `change` makes of
    the weights."""

    def __init__(self, mask: Tensor | None = None, change: Any = None) -> None:
        super().__init__()
        self.qkv, self.out, self.mask, self.change = nn.Linear(W, 3 * W), nn.Linear(W, W), mask, change

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, H, -1)).permute(2, 0, 3, 1, 4)
        scores = 2.0 * q @ k.mT
        weights = torch.softmax(scores if self.mask is None else scores + self.mask, -1)
        weights = weights if self.change is None else self.change(weights)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


class Layers(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.embed, self.places, self.layers = nn.Embedding(11, W), nn.Embedding(N, W), nn.ModuleList(layers)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids) + self.places.weight
        for layer in self.layers:
            x = x + layer(x)
        return x


def added(sees: Tensor, low: float = -math.inf) -> Tensor:
    return torch.zeros(sees.shape).masked_fill(~sees, low)


CAUSAL = torch.ones(1, 1, N, N, dtype=torch.bool).tril()
KEPT = torch.arange(N) < torch.tensor([N, N - 5])[:, None, None, None]  # (B, 1, 1, N)
MASKS: dict[str, Tensor | None] = {
    "all": None,
    "causal": added(CAUSAL),
    "lowest": added(CAUSAL, torch.finfo(torch.float32).min),
    "window": added(CAUSAL.triu(-4)),
    "padding": added(KEPT & CAUSAL),
    "holes": added(torch.rand(B, 1, N, N, generator=torch.Generator().manual_seed(1)) < 0.6).index_fill_(
        3, torch.tensor(0), 0.0
    ),
    "far": -torch.arange(N) * 40.0,  # weights of far keys are below the least number
}
IDS = torch.randint(0, 11, (B, N), generator=torch.Generator().manual_seed(2))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each layer's weights whether a kernel has measured them."""
    found: list[bool] = []
    ask = built_weights.is_softmax
    monkeypatch.setattr(sequences, "is_softmax", lambda lse: (found.append(ask(lse)), found[-1])[1])
    return found


def look(model: nn.Module, **options: Any) -> regard.heads.Record:
    with torch.no_grad(), regard.watch(model, **options) as seen:
        model(IDS)
    return seen


def by_strips(model: nn.Module, monkeypatch: pytest.MonkeyPatch, **options: Any) -> regard.heads.Record:
    with monkeypatch.context() as context:
        context.setattr(sequences, "call_of_weights", lambda weights, band: None)
        return look(model, **options)


def agree(seen: regard.heads.Record, right: regard.heads.Record) -> None:
    assert seen.layers == right.layers
    for name in seen.layers:
        (one, other), (least, expected) = [(x[name], x[name].uniform) for x in (seen, right)]
        for a, b in ((one.last(), least.last()), (other.last(), expected.last())):
            assert list(a) == list(b)
            for what in a:
                if isinstance(a[what], Tensor):
                    size = N if what in ("distance", "offset") else 1  # (means of numbers up to N, which may cancel)
                    torch.testing.assert_close(
                        a[what], b[what], rtol=2e-5, atol=2e-6 * size, msg=lambda m, w=what: f"{w}: {m}"
                    )
                else:
                    torch.testing.assert_close(a[what].weights, b[what].weights, rtol=2e-5, atol=2e-6)
                    counts = b[what].weights > 1e-6  # (among equal weights any key may be first)
                    assert torch.equal(a[what].keys[counts], b[what].keys[counts])


@no_library
@pytest.mark.parametrize("name", MASKS)
def test_by_a_kernel_as_by_strips(name: str, calls: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = Layers(Hand(MASKS[name]), Hand(MASKS[name])).eval()
    measures = wanted(ids=True)
    seen = look(model, measures=measures)
    assert len(calls) >= 2  # (with holes, the baseline is measured so, too)
    assert all(calls)
    agree(seen, by_strips(model, monkeypatch, measures=measures))


NO_SOFTMAX = {
    "halved": lambda p: p * 0.5,
    "sharper": lambda p: p.square(),
    "signed": lambda p: p - 0.01,
    "missing": lambda p: p.index_fill(3, torch.tensor(2), math.nan),
}


@no_library
@pytest.mark.parametrize("name", NO_SOFTMAX)
def test_what_is_no_softmax_is_read_as_it_is(name: str) -> None:
    weights = NO_SOFTMAX[name](torch.randn(B, H, N, N).softmax(-1))
    call = built_weights.call_of_weights(weights)
    assert call is not None
    assert not built_weights.is_softmax(regard.measure(call.q, call.k, bias=call.biases[0].weight, scale=1.0).lse)


@no_library
def test_rows_that_see_nothing(calls: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    sees = CAUSAL.clone()
    sees[:, :, 3:5] = False
    model = Layers(Hand(added(sees), lambda p: p.nan_to_num())).eval()
    seen = look(model)
    agree(seen, by_strips(model, monkeypatch))
    assert (~seen[0].last_seen()).sum() == 2 * B * H
    assert calls == [True]


def test_rows_of_nan_see_nothing() -> None:
    """Those of queries that may see nothing; and in the next layer all, for 0 x NaN is NaN."""
    torch.manual_seed(0)
    sees = CAUSAL.clone()
    sees[:, :, 3:5] = False
    seen = look(Layers(Hand(added(sees)), Hand(added(sees))).eval())
    first, second = (seen[layer].uniform.last()["entropy"] for layer in range(2))
    assert (first[..., 3:5] == 0).all()
    assert (first[..., 5:] > 0).all()
    assert (second[..., 3:] == 0).all()


def test_layers_share_only_where_they_hide_the_same() -> None:
    torch.manual_seed(0)
    order = ["causal", "window", "causal", "all", "padding", "all", "window", "holes"]
    model = Layers(*[Hand(MASKS[name]) for name in order]).eval()
    together = look(model)
    for number, name in enumerate(order):
        alone = Layers(*[Hand(MASKS[name]) for name in order]).eval()
        alone.load_state_dict(model.state_dict())
        one = look(alone, layers=[f"layers.{number}"])
        for a, b in ((together[number], one[0]), (together[number].uniform, one[0].uniform)):
            for what in DEFAULT:
                assert torch.equal(a.last()[what], b.last()[what]), (name, what)


def test_no_weights_are_kept_for_others() -> None:
    kept: list[weakref.ref[Tensor]] = []

    def note(p: Tensor) -> Tensor:
        q = p.clone()
        kept.append(weakref.ref(q.untyped_storage()))
        return q

    model = Layers(Hand(MASKS["causal"], note), Hand(MASKS["causal"], note)).eval()
    with torch.no_grad(), regard.watch(model):
        model(IDS)
        gc.collect()
        assert [ref() for ref in kept] == [None, None]
