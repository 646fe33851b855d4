"""All statistics against `reference` in float64; `watch` and `measure` take them from the kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard.kernels import blockwise, run, triton
from regard.masks import Blocks, Causal, Chunk, Documents, Keep, Padding, Tree, Window
from regard.measures import Contribution, Crop, Heatmap, Links, Local, Offsets, Pairs
from regard.positions import Alibi

N, M = 21, 37
PAIRS = Pairs(torch.stack([torch.arange(N) * 5 % M, torch.where(torch.arange(N) % 3 > 0, torch.arange(N), -1)], -1))
WEIGHT = torch.randn(8, 4 * 11, generator=torch.Generator().manual_seed(0))
EVERY = [
    "entropy",
    "peak",
    "max_logit",
    "distance",
    "offset",
    Offsets(2, 1),
    "received",
    "on_first",
    Heatmap(4, 3),
    Links(3),
]
EVERY += [Crop(2, 9, 5, 30), Local(1), Contribution(WEIGHT), PAIRS]
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"mask": Causal()},
    "window": {"mask": Causal() & Window(9)},
    "padding": {"mask": Padding(lengths=torch.tensor([M, 0]))},
    "documents": {"mask": Window(5) & Documents(torch.arange(N) // 11, torch.arange(M) // 13), "softcap": 2.0},
    "chunk": {"mask": Causal() & Chunk(8, start=3)},
    "blocks": {"mask": Blocks(torch.tensor([[0, -1], [2, 1], [4, 3], [-1, -1], [0, 5]]), size=7, query_size=5)},
    "tree": {"mask": Tree((torch.arange(N) - 1) // 2)},  # (two continuations of each)
    "everything": {
        "mask": Keep(torch.arange(N * M).view(N, M) % 5 > 1),
        "softcap": 3.0,
        "bias": torch.sin(torch.arange(4 * N * M)).view(1, 4, N, M),
        "sinks": torch.arange(4.0),
    },
    "positions": {"positions": torch.arange(N) * 7 % 50, "key_positions": torch.arange(M) * 4 // 3, "mask": Causal()},
    "sinks": {"sinks": torch.full((4,), 30.0), "bias": Alibi(4)},
}


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = (2, 4, N, 24), (2, 2, M, 24), (2, 2, M, 11)
    q, k, v = (torch.randn(*shape, generator=generator).to(dtype) for shape in shapes)
    return q, k, v


def same(ours: Any, right: Any, allowed: float = 4e-6) -> None:
    assert torch.equal(ours.seen, right.seen)
    for name, value in right.values.items():
        mine = ours[name]
        if name in ("target", "links"):
            keys = (mine, value) if name == "target" else (mine.keys, value.keys)
            assert (keys[0] == keys[1]).float().mean() > 0.99, name  # (equals, to rounding, may change places)
            if name == "target":
                continue
            mine, value = mine.weights, value.weights
        error = (mine.double() - value).abs().max().item() / max(1.0, value.abs().max().item())
        assert error < allowed, f"{name} is off by {error}"


def compare(options: dict[str, Any], dtype: torch.dtype = torch.float32) -> None:
    q, k, v = inputs(dtype)
    ours = regard.measure(q, k, v, measures=EVERY, kernel="triton", **options)
    precise = {
        name: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for name, x in options.items()
    }
    right = regard.measure(q.double(), k.double(), v.double(), measures=EVERY, kernel="reference", **precise)
    same(ours, right)
    torch.testing.assert_close(ours.lse.double(), right.lse, rtol=2e-6, atol=2e-6)
    assert_near(ours.output, right.output)


def assert_near(out: Tensor, right: Tensor) -> None:
    near = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}[out.dtype]
    torch.testing.assert_close(out.double(), right, rtol=near, atol=near)


@pytest.mark.parametrize("name", ["window", "blocks", "everything"])
def test_statistics_are_those_of_the_formula(name: str) -> None:
    compare(OPTIONS[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in OPTIONS if name not in ("window", "blocks", "everything")])
def test_statistics_of_other_calls(name: str) -> None:
    compare(OPTIONS[name])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_statistics_in_half_precision_are_as_exact(dtype: torch.dtype) -> None:
    """Weights are rounded for the product with values only."""
    compare({"mask": Causal()}, dtype)


@pytest.fixture
def strips(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Calls whose weights were computed in strips."""
    told: list[Any] = []
    replay = blockwise.replay

    def note(call: Any, lse: Tensor, measuring: Any) -> None:
        told.append(measuring.measures)
        replay(call, lse, measuring)

    monkeypatch.setattr(blockwise, "replay", note)
    return told


def test_the_default_measures_need_no_strips(strips: list[Any]) -> None:
    q, k, v = inputs()
    regard.measure(q, k, v, mask=Causal(), kernel="triton")
    assert not strips
    found = regard.measure(q, k, v, mask=Causal(), measures=["entropy", "divergence"], kernel="triton")
    assert len(strips) == 1  # what compares heads is shown the weights
    right = regard.measure(q, k, v, mask=Causal(), measures=["entropy", "divergence"], kernel="reference")
    torch.testing.assert_close(found.divergence, right.divergence, rtol=1e-4, atol=1e-5)


def test_padding_queries_are_left_out_of_sums_over_queries() -> None:
    q, k, v = inputs()
    q = q.repeat(1, 1, 2, 1)[:, :, :M]
    options: dict[str, Any] = {"mask": Padding(lengths=torch.tensor([M, 11]))}
    names = ["received", "on_first", Offsets(1, 1), "entropy"]
    ours = regard.measure(q, k, v, measures=names, kernel="triton", **options)
    same(ours, regard.measure(q.double(), k.double(), v.double(), measures=names, kernel="reference", **options))


def test_watch_takes_its_statistics_from_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU whose self-check has passed."""
    torch.manual_seed(0)
    layer = regard.MultiHeadAttention(32, 4).eval()
    x = torch.randn(1, 13, 32)
    with torch.no_grad(), regard.watch(layer) as right:
        layer(x)
    called: list[int] = []
    measured = triton.forward_measured

    def note(*args: Any, **options: Any) -> Any:
        called.append(1)
        return measured(*args, **options)

    monkeypatch.setattr(triton, "forward_measured", note)
    monkeypatch.setattr(triton, "worth", lambda call: True)
    monkeypatch.setattr(run, "MEASURING", (triton,))
    with torch.no_grad(), regard.watch(layer) as seen:
        layer(x)
    assert called
    for name in ("entropy", "peak", "received"):
        torch.testing.assert_close(seen[0][name], right[0][name], rtol=1e-4, atol=1e-5)
