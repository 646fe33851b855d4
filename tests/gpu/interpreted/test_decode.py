"""Few queries against many keys: query heads of a kv head in one block, keys split among programs and joined."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_cases import Case, assert_accurate

import regard
from regard.kernels.triton import launch
from regard.kernels.triton.blocks import parts_of
from regard.masks import Causal, Keep, Padding, Window

MASKS: dict[str, Any] = {
    "none": None,
    "causal": Causal(),
    "window": Causal() & Window(50),
    "padding": Padding(lengths=torch.tensor([3, 270])),
    "left": Padding(keep=torch.arange(270)[None] >= torch.tensor([[0], [260]])),
    "dense": Keep((torch.arange(270) % 5 != 0)[None]),
}


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[int, ...], dict[str, Any]]]:
    """The name, grid and constants of each launch."""
    told: list[tuple[str, tuple[int, ...], dict[str, Any]]] = []
    run = launch.launch

    def note(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        told.append((kernel.fn.__name__, grid, options))
        run(kernel, grid, *args, **options)

    monkeypatch.setattr(launch, "launch", note)
    return told


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("queries", [1, 3])
def test_few_queries(queries: int, mask: str, launches: list[Any]) -> None:
    generator = torch.Generator().manual_seed(queries)
    q, k, v = (torch.randn(2, h, n, 16, generator=generator) for h, n in ((4, queries), (2, 270), (2, 270)))
    options: dict[str, Any] = {} if MASKS[mask] is None else {"mask": MASKS[mask]}
    options |= {"sinks": torch.randn(4, generator=generator)} if mask == "window" else {}
    options |= {"softcap": 3.0, "bias": [torch.randn(1, 4, queries, 270)], "dropout": 0.2} if mask == "dense" else {}
    case = Case(q, k, v, options).to(torch.bfloat16 if queries == 3 else torch.float32, "transposed")
    out = case.attend("triton")
    assert [(name, grid) for name, grid, _ in launches] == [("forward", (4, 2)), ("combine", (-(-8 * queries // 16),))]
    assert launches[0][2]["PACKED"]
    assert_accurate(case, case.with_gradients(out), mask)


def test_statistics_of_split_keys(launches: list[Any]) -> None:
    q, k, v = torch.randn(1, 4, 2, 16) * 2, torch.randn(1, 2, 270, 16), torch.randn(1, 2, 270, 16)
    k[:, :, 240] = k[:, :, 3]  # equal scores in two parts: the first key is the target
    names = ["entropy", "peak", "distance", "offset"]
    for options in ({"mask": Causal()}, {"sinks": torch.ones(4)}):
        ours = regard.measure(q, k, v, measures=names, kernel="triton", **options)
        precise = {name: x.double() if isinstance(x, torch.Tensor) else x for name, x in options.items()}
        right = regard.measure(q.double(), k.double(), v.double(), measures=names, kernel="reference", **precise)
        assert launches[-1][0] == "combine"
        for name in names:
            torch.testing.assert_close(ours[name].double(), right[name], rtol=1e-5, atol=1e-5)
        assert torch.equal(ours.target, right.target)


@pytest.mark.parametrize(
    "programs, keys, parts", [(1, 64, 1), (1, 2**20, 264), (264, 2**20, 1), (8, 4096, 16), (8, 2**16, 33)]
)
def test_how_keys_are_split(programs: int, keys: int, parts: int) -> None:
    """Two programs for each of 132 processors, and four blocks of 64 keys at least."""
    assert parts_of(programs, keys, 64, 132) == parts
