"""The uniform baseline in closed form, beside the same baseline from weights that are built."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regard
from regard import measures
from regard.attention import prepare
from regard.heads.capture.observed import ObservedCall, with_uniform_weights
from regard.heads.record import uniform
from regard.heads.record.chunk_plane import chunk_plane
from regard.heads.record.sequences import SequenceRecord, measured, padding
from regard.heads.record.uniform import uniform_measurements
from regard.masks import Causal, Documents, Keep, Mask, Padding, Prefix, Window
from regard.measures import Measure, Measurements, PerQuery, Strip, as_measures

pytestmark = pytest.mark.on_device

B, H, N, M, D = 2, 3, 5, 11, 7


class Confident(PerQuery):
    """A user's own measure."""

    gives = {"confident": "query"}

    def of(self, strip: Strip, prepared: Any) -> Tensor:
        return (strip.weights.amax(-1) > 0.3).to(strip.weights.dtype)


def chosen() -> list[Measure]:
    words = measures.Tokens({"some": [1, 3], "same": "same"})
    names = ["entropy", "peak", "distance", "offset", "offsets", "received", "on_first", "previous", "induction"]
    return as_measures([*names, Confident(), words, "duplicate", "local"])


def same(found: Measurements, right: Measurements) -> None:
    assert list(found.values) == list(right.values)
    for name, value in right.values.items():
        assert found[name].dtype == value.dtype
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-5, msg=f"{name}: {{}}".format)
    assert torch.equal(found.seen, right.seen)
    assert found.counts.keys() == right.counts.keys()
    assert all(torch.equal(found.counts[name], which) for name, which in right.counts.items())


def compared(attention: ObservedCall, numbers: Tensor, ids: Tensor | None, earlier: bool = False) -> Measurements:
    """By both ways; `earlier` says that other chunks came before."""
    attention.padding = padding(attention)
    text = SequenceRecord(attention.shape[:2])
    text.ids, text.total = ids, int(numbers[-1]) + 1
    text.place_padding(attention, attention.padding)
    if earlier:
        text.pieces.append(None)  # type: ignore[arg-type]
    plane = chunk_plane(attention, text, numbers)
    found = uniform_measurements(attention, chosen(), plane)
    of_one_head = replace(plane, heads=1, values=None, out_weight=None)
    same(found, measured(with_uniform_weights(attention), chosen(), of_one_head))
    return found


def observed(n: int, m: int, mask: Mask | None, **options: Any) -> ObservedCall:
    generator = torch.Generator().manual_seed(0)
    dtype = options.pop("dtype", torch.float32)
    q, k = (torch.randn(B, H, size, D, generator=generator, dtype=dtype) for size in (n, m))
    kind = options.pop("kind", "self")
    ids = torch.randint(0, 4, (B, n), generator=generator) if kind == "self" else None
    return ObservedCall("layer", nn.Identity(), 1, kind, call=prepare(q, k, k, mask=mask, **options), ids=ids)


LEFT = Padding(keep=torch.arange(M) >= torch.tensor([[0], [4]]))
MASKS: dict[str, Mask | None] = {
    "none": None,
    "causal": Causal(),
    "window": Causal() & Window(4),
    "prefix": Causal() | Prefix(3),
    "right": Padding(lengths=torch.tensor([11, 6])),
    "left": LEFT,
    "causal, left": Causal() & LEFT,
    "documents": Documents(torch.tensor([0] * 4 + [1] * 7)) & Causal(),
    "tensor": Keep(torch.ones(M, M).tril().bool()),
    "per head": Keep(torch.ones(1, H, M, M).tril().bool()),
    "gaps": Keep((torch.arange(M)[:, None] - torch.arange(M)) % 3 != 1),
    "gaps per head": Keep(torch.rand(B, H, M, M, generator=torch.Generator().manual_seed(1)) > 0.5),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str) -> None:
    attention = observed(M, M, MASKS[name])
    compared(attention, torch.arange(M), attention.ids)


@pytest.mark.parametrize("mask", [Causal(), Causal() & Window(6), Causal() & LEFT])
def test_the_next_chunk_from_a_cache(mask: Mask) -> None:
    ids = torch.randint(0, 4, (B, M), generator=torch.Generator().manual_seed(2))
    attention = observed(N, M, mask)
    attention.ids = ids[:, M - N :]
    compared(attention, torch.arange(M), ids, earlier=True)


def test_a_cache_that_dropped_tokens() -> None:
    numbers = torch.tensor([0, 1, *range(20, 29)])
    attention = observed(N, M, Causal(), dtype=torch.float64)  # by a kernel that measures by the plane's positions
    attention.numbers = numbers
    ids = torch.randint(0, 4, (B, 29), generator=torch.Generator().manual_seed(2))
    attention.ids = ids[:, 29 - N :]
    compared(attention, numbers, ids)


def test_positions_of_the_caller() -> None:
    rising = torch.tensor([[0, 1, 2, 4, 8, 9, 10, 11, 12, 13, 20]])
    attention = observed(M, M, Causal(), positions=rising, key_positions=rising)
    compared(attention, torch.arange(M), attention.ids)
    falling = rising.flip(1)
    attention = observed(M, M, Causal(), positions=falling, key_positions=falling)
    compared(attention, torch.arange(M), attention.ids)


def test_cross_attention_has_no_ids() -> None:
    for n, m in ((N, M), (M, N)):
        found = compared(observed(n, m, Padding(lengths=torch.tensor([m, 3])), kind="cross"), torch.arange(m), None)
        assert "induction" not in found.values
        assert "confident" in found.values


@pytest.mark.parametrize("gaps", [False, True])
def test_weights_that_were_written_by_hand(gaps: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    weights = torch.rand(B, H, M, M, generator=generator).tril()
    if gaps:
        weights[:, :, 5:, 2] = 0
    weights = weights / weights.sum(-1, keepdim=True)
    ids = torch.randint(0, 4, (B, M), generator=generator)
    attention = ObservedCall("layer", nn.Identity(), 1, "self", weights=weights, ids=ids)
    compared(attention, torch.arange(M), ids)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Which measures were given weights that are built, call by call."""
    calls: list[list[str]] = []

    def noted(attention: ObservedCall, measures: list[Measure], *others: Any) -> Measurements:
        calls.append([type(measure).__name__ for measure in measures])
        return measured(attention, measures, *others)

    monkeypatch.setattr(uniform, "measured", noted)
    return calls


def test_weights_are_built_only_where_they_must_be(asked: list[list[str]]) -> None:
    layer = regard.MultiHeadAttention(H * D, H)
    x = torch.randn(B, M, H * D)
    with regard.watch(layer) as seen, torch.no_grad():
        layer(x, mask=Causal() & LEFT)
    assert asked == []
    assert seen[0].uniform is not None
    with regard.watch(layer, measures=["entropy", Confident()]) as seen, torch.no_grad():
        layer(x, mask=Causal())
    assert asked == []  # nobody has asked for the baseline yet
    assert seen[0].uniform is not None
    assert seen[0].uniform.entropy.shape == (B, 1, M)
    assert asked == [["Confident"]]
    with regard.watch(layer, measures=["entropy"]), torch.no_grad():
        layer(x, mask=MASKS["gaps"])
    assert asked[1:] == [["Entropy"]]
