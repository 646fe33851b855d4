"""Plans of measured calls: layers that share get what the usual way gives, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regard
from regard.heads.record import lasting_plans
from regard.kernels import measured_plans
from regard.kernels import native_library as library
from regard.masks import And, Causal, Keep, Mask, Padding, Window

pytestmark = pytest.mark.skipif(library.load() is None, reason="plans are of the native kernel")

B, N, W, H = 2, 11, 24, 3


class Stack(nn.Module):
    """Three layers of attention with one mask."""

    def __init__(self, mask: Mask | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(regard.MultiHeadAttention(W, H) for _ in range(3))
        self.mask = mask
        self.between: Any = None

    def forward(self, x: Tensor, ids: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            x = x + layer(x, mask=self.mask)
            if self.between is not None:
                self.between()
        return x


@pytest.fixture(autouse=True)
def nothing_known() -> None:
    """No layer is like one of an earlier test."""
    lasting_plans.forget_all()


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each measured call, whether a plan gave its output: one for such calls, or for the layer."""
    answers: list[bool] = []
    compute, keep = measured_plans.MeasuredPlan.compute, measured_plans.keep

    def by_plan(*arguments: Any) -> Any:
        answers.append(True)
        return compute(*arguments)

    def without(*arguments: Any) -> None:
        answers.append(False)
        keep(*arguments)

    monkeypatch.setattr(measured_plans.MeasuredPlan, "compute", by_plan)
    monkeypatch.setattr(measured_plans, "keep", without)
    return answers


def watched(model: nn.Module, *inputs: Tensor, **options: Any) -> tuple[Tensor, regard.Record]:
    with torch.no_grad(), regard.watch(model, **options) as seen:
        out = model(*inputs)
    return out, seen


def without_plans(monkeypatch: pytest.MonkeyPatch, model: nn.Module, *inputs: Tensor) -> tuple[Tensor, regard.Record]:
    with monkeypatch.context() as patch:
        patch.setattr(measured_plans, "plan_of", lambda *arguments, **options: None)
        patch.setattr(lasting_plans, "find", lambda *arguments: None)
        return watched(model, *inputs)


MASKS = {
    "none": None,
    "causal": Causal(),
    "window": And(Causal(), Window(3)),
    "keep": Keep(torch.rand(B, 1, N, N, generator=torch.Generator().manual_seed(0)) > 0.4),
    "lengths": Padding(torch.tensor([7, N])),
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_layers_with_a_plan_give_the_same_bits(
    mask: Mask | None, planned: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x, ids = Stack(mask), torch.randn(B, N, W), torch.randint(0, 5, (B, N))
    out, seen = watched(model, x, ids)
    assert planned[-2:] == [True, True]  # (before them the first layer, and perhaps its uniform baseline)
    assert not any(planned[:-2])
    expected, usual = without_plans(monkeypatch, model, x, ids)
    assert torch.equal(out, expected)
    for layer, other in zip(seen, usual, strict=True):
        assert list(layer.values) == list(other.values)
        assert all(torch.equal(layer[name], other[name]) for name in layer.values)
        assert torch.equal(layer.seen, other.seen)
        assert all(torch.equal(layer.counts[name], other.counts[name]) for name in layer.counts)


def test_a_mask_that_changes_between_layers_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.ones(B, 1, N, N, dtype=torch.bool)
    model, x = Stack(Keep(tensor)), torch.randn(B, N, W)
    model.between = lambda: tensor[..., -1].logical_not_()
    blind = model(x).detach()
    tensor.fill_(True)
    out, _ = watched(model, x)
    torch.testing.assert_close(out, blind, rtol=1e-5, atol=1e-5)


def test_another_number_of_threads_is_another_plan(planned: list[bool]) -> None:
    model, x, threads = Stack(), torch.randn(B, N, W), torch.get_num_threads()
    model.between = lambda: torch.set_num_threads(3 - torch.get_num_threads())
    torch.set_num_threads(1)
    try:
        watched(model, x)
    finally:
        torch.set_num_threads(threads)
    assert planned == [False, False, True]


@pytest.mark.parametrize("measures", [["contribution"], ["divergence"]])
def test_measures_of_values_have_no_plan(measures: list[str], planned: list[bool]) -> None:
    watched(Stack(), torch.randn(B, N, W), measures=measures)
    assert planned == [False, False, False]
