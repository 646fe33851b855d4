"""The way into kernels: observers see each call once, in order, and compiled code is not observed."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import regard
from regard.kernels import Call, observed_by


class Scaled:
    """Notes each call and multiplies its output."""

    def __init__(self, factor: float, seen: list[float]) -> None:
        self.factor, self.seen = factor, seen

    def attention(self, call: Call, compute: Callable[[], Tensor], kernel: str) -> Tensor:
        out = compute()
        regard.attend(call.q, call.k, call.v)  # what an observer computes is not observed
        self.seen.append(self.factor)
        return out * self.factor


def test_observers_wrap_one_another() -> None:
    q = torch.randn(2, 3, 5, 7)
    plain, seen = regard.attend(q, q, q), []
    with observed_by(Scaled(2.0, seen)), observed_by(Scaled(3.0, seen)):
        out = regard.attend(q, q, q)
    assert seen == [3.0, 2.0]  # the last one registered is next to the kernel
    torch.testing.assert_close(out, plain * 6)
    torch.testing.assert_close(regard.attend(q, q, q), plain)
    assert len(seen) == 2


def test_compiled_code_is_not_observed() -> None:
    q, seen = torch.randn(2, 3, 5, 7), []
    compiled = torch.compile(lambda q: regard.attend(q, q, q), backend="eager", fullgraph=True)
    with observed_by(Scaled(2.0, seen)):
        torch.testing.assert_close(compiled(q), regard.attend(q, q, q, kernel="reference") / 2)
    assert seen == [2.0]


def test_options_are_shown_and_refused_by_name() -> None:
    parameters = inspect.signature(regard.attend).parameters
    assert list(parameters)[:12] == [
        *("q", "k", "v", "mask", "bias", "positions", "key_positions", "scale", "softcap", "sinks", "dropout"),
        "generator",
    ]
    assert parameters["dropout"].default == 0.0
    assert parameters["mask"].default is None
    assert "dropout" not in inspect.signature(regard.attention_weights).parameters
    q = torch.randn(1, 1, 2, 3)
    with pytest.raises(TypeError, match=r"attention_weights: .*received dropout="):
        regard.attention_weights(q, q, dropout=0.1)


def test_options_may_be_compiled() -> None:
    q = torch.randn(2, 3, 5, 7)
    run = lambda q, **options: regard.attend(q, q, q, **options)  # noqa: E731
    options = {"mask": regard.masks.Causal(), "softcap": 3.0, "bias": torch.randn(5, 5)}
    compiled = torch.compile(run, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, **options), run(q, **options))
