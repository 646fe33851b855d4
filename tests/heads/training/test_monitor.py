"""`monitor`: which steps are sampled, what the numbers are, and what it warns of.

Letters: B batch, H query heads, N queries, M keys.
"""

from __future__ import annotations

import gc
import math
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regard
from regard.heads.training import monitor as module
from regard.heads.training.health import AttentionWarning, Health, LayerState, Limits

W, H, N = 12, 3, 17


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(regard.MultiHeadAttention(W, H) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x, mask=regard.masks.Causal())
        return x


def text(batch: int = 2) -> Tensor:
    return torch.randn(batch, N, W)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, batches: int = 1) -> None:
    for _ in range(steps):
        for _ in range(batches):
            model(text()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_every_so_many_steps_of_the_optimizer_and_once_where_batches_are_accumulated() -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    logged: list[tuple[int, dict[str, float]]] = []
    with regard.monitor(model, every=3, log=lambda *x: logged.append(x), optimizer=optimizer) as watching:
        train(model, optimizer, steps=7, batches=4)
    assert [sample.step for sample in watching.samples] == [step for step, _ in logged] == [0, 3, 6]
    train(model, optimizer, steps=5)
    assert len(logged) == 3  # it was closed
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_forward_passes_in_training_are_steps_if_nobody_tells() -> None:
    model = Model()
    with regard.monitor(model, every=2) as watching:
        for _ in range(4):
            model(text())
        model.eval()
        model(text())
    assert [sample.step for sample in watching.samples] == [0, 2]
    model.train()
    with regard.monitor(model, every=2, count="steps") as watching:
        for _ in range(3):
            model(text())
            model(text())
            watching.step()
    assert [sample.step for sample in watching.samples] == [0, 2]


def test_the_numbers_are_those_of_a_watch() -> None:
    model, x = Model(), text()
    with regard.monitor(model, every=1) as watching:
        out = model(x)
    with regard.watch(model, measures=["entropy", "max_logit", "received"], keep="qkv") as seen, torch.no_grad():
        right = model(x)
    assert torch.equal(out, right)
    assert watching.last is not None
    scalars = watching.last.scalars
    for i in range(2):
        weights, layer = seen[i].weights(), seen[i]
        entropy = torch.special.entr(weights).sum(-1).mean((0, 2))
        scores = (layer.q @ layer.k.transpose(2, 3)) * (W // H) ** -0.5
        largest = scores.masked_fill(weights == 0, -math.inf).amax((0, 2, 3))
        received = weights.sum(2)
        sink = (received.amax(-1) / received.sum(-1)).mean(0)
        flat = layer.output.transpose(0, 1).flatten(1)
        values = torch.linalg.svdvals(flat)
        rank = torch.special.entr(values / values.sum()).sum().exp()
        for head in range(H):
            got = {name: scalars[f"attention/{i}/{head}/{name}"] for name in ("entropy", "max_logit", "sink")}
            expected = {"entropy": entropy[head], "max_logit": largest[head], "sink": sink[head]}
            assert got == pytest.approx({name: float(x) for name, x in expected.items()}, rel=1e-4)
        assert scalars[f"attention/{i}/effective_rank"] == pytest.approx(float(rank), rel=1e-4)
    assert seen.scalars()["attention/1/2/entropy"] == pytest.approx(scalars["attention/1/2/entropy"], rel=1e-5)
    by_layer = seen.scalars("heads", per="layer")
    assert by_layer["heads/1/max_logit"] == pytest.approx(max(scalars[f"attention/1/{h}/max_logit"] for h in range(H)))
    with pytest.raises(ValueError, match=r'per: expected "head" or "layer", received \'token\''):
        seen.scalars(per="token")  # type: ignore[arg-type]


def test_gradients_and_outputs_are_the_same_when_sampled() -> None:
    model, x = Model(), text()
    model(x).square().mean().backward()
    right = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    with regard.monitor(model, every=1):
        model(x).square().mean().backward()
    for p, gradient in zip(model.parameters(), right, strict=True):
        assert p.grad is not None
        assert torch.equal(p.grad, gradient)


def test_a_step_that_fails_is_forgotten_and_the_next_is_sampled() -> None:
    model = Model()
    watching = regard.monitor(model, every=1, count="steps")
    with pytest.raises(ValueError, match="query"):
        model(torch.randn(2, N, W + 1))
    assert watching.samples == []
    watching.step()
    model(text())
    assert [sample.step for sample in watching.samples] == [1]


def test_nothing_is_kept_but_numbers_of_all_samples_but_the_last() -> None:
    model = Model()
    with regard.monitor(model, every=1) as watching:
        for _ in range(3):
            model(text())
    assert [len(sample.record.layers) for sample in watching.samples] == [0, 0, 2]
    assert watching.last is not None
    assert not any(layer.exact for layer in watching.last.record)  # no q, k and v
    model_is, monitor_is = weakref.ref(model), weakref.ref(watching)
    del model, watching
    gc.collect()
    assert model_is() is None
    assert monitor_is() is None


def test_only_the_first_rank_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    monkeypatch.setattr(module.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(module.dist, "get_rank", lambda: 1)
    with regard.monitor(model, every=1) as watching:
        model(text())
    assert watching.samples == []
    with regard.monitor(model, every=1, first_rank_only=False) as watching:
        model(text())
    assert len(watching.samples) == 1


def test_training_that_calls_parts_of_the_model() -> None:
    model = Model()
    with regard.monitor(model, every=1, count="steps") as watching:
        assert watching.begin()
        model.layers[1](text())
        watching.end()
        assert not watching.begin()
        watching.step()
    assert watching.last is not None
    assert watching.last.record.layers == ["layers.1"]


def test_bad_input() -> None:
    with pytest.raises(TypeError, match=r"model: expected a torch.nn.Module, received int"):
        regard.monitor(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="every: expected at least 1, received 0"):
        regard.monitor(Model(), every=0)
    with pytest.raises(TypeError, match=r"log: expected a function of the step and a dict of numbers, received int"):
        regard.monitor(Model(), log=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match='count: expected "forwards" or "steps", received \'epochs\''):
        regard.monitor(Model(), count="epochs")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"expected no step\(\): forward passes are counted.*count=\"steps\""):
        regard.monitor(Model()).step()
    linear = nn.Linear(3, 3)
    with regard.monitor(linear, every=1), pytest.raises(ValueError, match="computed no attention that a watch knows"):
        linear(torch.randn(2, 3))


# Warnings


def state(**changes: Any) -> LayerState:
    usual = {"entropy": [0.9, 0.8], "max_logit": [1.0, 2.0], "output": [1.0, 0.7], "sink": [0.2, 0.3]}
    return LayerState("layer", 100, **usual | changes)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"entropy": [0.05, 0.01]}, "layer: entropy collapses: 3% of that of equal weights, 85% at first"),
        ({"max_logit": [1.0, 60.0]}, "layer: scores grow: head 1 has 60, 2.0 at first (1 heads above 50)"),
        ({"output": [1.0, 1e-5]}, "layer: heads 1 are dead: their output is below 0.001 of the largest in the layer"),
        ({"sink": [0.2, 0.995]}, "layer: heads 1 only rest: one key receives over 99% of their weight"),
    ],
)
def test_each_warning_is_given_once(change: dict[str, Any], words: str) -> None:
    health = Health(Limits())
    assert health.check([state()]) == []
    (found,) = health.check([state(**change)])
    assert found.startswith(words)
    assert health.check([state(**change)]) == []


def test_what_was_so_from_the_beginning_is_no_change() -> None:
    health = Health(Limits())
    same = state(entropy=[0.05, 0.01], max_logit=[60.0, 70.0])
    assert health.check([same]) == []
    assert health.check([same]) == []


def test_warnings_of_a_model() -> None:
    model = Model()
    with regard.monitor(model, every=1) as watching:
        model(text())
        with torch.no_grad():
            model.layers[1].q_proj.weight.mul_(1000)
            model.layers[0].v_proj.weight[: W // H].mul_(0)
        with pytest.warns(AttentionWarning) as caught:
            model(text())
        said = [str(warning.message) for warning in caught]
        assert any(words.startswith("step 1: layers.1: entropy collapses") for words in said)
        assert any(words.startswith("step 1: layers.1: scores grow: head ") for words in said)
        assert any(words.startswith("step 1: layers.0: heads 0 are dead") for words in said)
        assert watching.last is not None
        assert [f"step 1: {words}" for words in watching.last.warnings] == said
    with regard.monitor(model, every=1, limits=None):
        model(text())
