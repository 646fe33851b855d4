"""The specification against closed forms worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from regard import attend, attention_weights
from regard.kernels import available

pytestmark = pytest.mark.on_device

E = math.e


def row(*values: float, kernel: str = "") -> torch.Tensor:
    """Numbers, float64; float32 for the kernel that has no float64."""
    return torch.tensor(values, dtype=torch.float32 if kernel == "native" else torch.float64).view(1, 1, -1, 1)


@pytest.mark.parametrize("kernel", available())
def test_two_keys(kernel: str) -> None:
    """Scores 0 and 1: weights 1/(1+e) and e/(1+e)."""
    q, k, v = (row(*x, kernel=kernel) for x in ([1.0], [0.0, 1.0], [10.0, 20.0]))
    precision = 1e-6 if kernel == "native" else 1e-14
    assert attend(q, k, v, kernel=kernel).item() == pytest.approx((10 + 20 * E) / (1 + E), rel=precision)


@pytest.mark.parametrize("kernel", available())
def test_equal_scores_give_the_mean(kernel: str) -> None:
    q, k, v = (row(*x, kernel=kernel) for x in ([0.0, 3.0], [1.0] * 11, range(11)))
    assert attend(q, k, v, kernel=kernel).flatten().tolist() == pytest.approx([5.0, 5.0])


def test_the_stages_of_the_scores() -> None:
    q, k, bias = row(2.0), row(1.0, 3.0, 5.0), torch.tensor([[0.5, 0.0, 0.0]], dtype=torch.float64)
    options = {"scale": 0.5, "softcap": 2.0, "bias": bias, "mask": torch.tensor([[True, True, False]])}

    def stage(name: str) -> list[float]:
        return attention_weights(q, k, stage=name, **options).flatten().tolist()

    capped = [2 * math.tanh(x / 2) for x in (1.0, 3.0, 5.0)]
    assert stage("scaled") == [1.0, 3.0, 5.0]
    assert stage("capped") == pytest.approx(capped)
    assert stage("biased") == pytest.approx([capped[0] + 0.5, capped[1], -math.inf])
    a, b = math.exp(capped[0] + 0.5), math.exp(capped[1])
    assert stage("weights") == pytest.approx([a / (a + b), b / (a + b), 0.0])
    with pytest.raises(ValueError, match=r"stage: expected one of .*'weights'.*received 'logits'"):
        stage("logits")


def test_sinks() -> None:
    """One key with score 0 and a sink of log 3: the key gets a quarter."""
    weights = attention_weights(row(0.0), row(1.0), sinks=torch.tensor([math.log(3)], dtype=torch.float64))
    assert weights.item() == pytest.approx(0.25)


def test_dropout_scales_what_is_kept() -> None:
    q = torch.zeros(1, 1, 101, 2, dtype=torch.float64)
    v = torch.eye(101, dtype=torch.float64)[None, None]
    weights = attend(q, q, v, dropout=0.75, kernel="reference")
    assert sorted(weights.unique().tolist()) == pytest.approx([0.0, 4 / 101])
