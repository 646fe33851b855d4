"""Plans of `measure`: a repeated call gives what the usual way gives, bit for bit."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import regard
from regard import measures
from regard.kernels import measured_plans, repeated_measures
from regard.kernels import native_library as library
from regard.kernels import run as kernel_run
from regard.masks import Causal, Keep, Padding, Window

pytestmark = pytest.mark.skipif(library.load() is None, reason="plans are of the native kernel")

B, G, H, N, M, D, E = 2, 3, 6, 11, 13, 5, 7


@pytest.fixture(autouse=True)
def nothing_known() -> None:
    """No call is like one of an earlier test."""
    repeated_measures.clear()


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with every call that a plan computes."""
    calls: list[int] = []
    compute = measured_plans.MeasuredPlan.compute

    def counting(*arguments: Any) -> Any:
        calls.append(1)
        return compute(*arguments)

    monkeypatch.setattr(measured_plans.MeasuredPlan, "compute", counting)
    return calls


def tensors(seed: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = (B, H, N, D), (B, G, M, D), (B, G, M, E)
    q, k, v = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return q, k, v


def usual(q: Tensor, k: Tensor, v: Tensor | None, **options: Any) -> measures.Measurements:
    """The results of a call that nobody remembers."""
    repeated_measures.clear()
    return regard.measure(q, k, v, **options)


def assert_same(found: measures.Measurements, expected: measures.Measurements) -> None:
    assert list(found.values) == list(expected.values)
    for name, value in expected.values.items():
        for x, y in zip(_parts(found[name]), _parts(value), strict=True):
            assert x.dtype == y.dtype
            assert torch.equal(x, y), name
    assert torch.equal(found.seen, expected.seen)
    for x, y in ((found.lse, expected.lse), (found.output, expected.output)):
        assert (x is None) == (y is None)
        if x is not None and y is not None:
            assert x.stride() == y.stride()
            assert torch.equal(x, y)


def _parts(value: Any) -> tuple[Tensor, ...]:
    return (value,) if isinstance(value, Tensor) else tuple(value)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"mask": Causal()},
    "causal window": {"mask": Causal() & Window(4)},
    "queries that see nothing": {"mask": Causal(), "positions": -3},
    "scale and softcap": {"scale": 0.3, "softcap": 5.0},
    "one name": {"measures": "entropy"},
    "heatmap and links": {"measures": [measures.Heatmap(3, 5), measures.Links(2), "received"]},
    "lists": {"measures": ["previous", "itself", "next", "local", "max_logit"]},
    "named kernel": {"kernel": "native"},
}


@pytest.mark.parametrize("case", OPTIONS)
@pytest.mark.parametrize("output", [True, False], ids=["output", "statistics alone"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_other_tensors_of_the_same_sizes(case: str, output: bool, dtype: torch.dtype, planned: list[int]) -> None:
    q, k, v = tensors(1, dtype)
    expected = usual(q, k, v if output else None, **OPTIONS[case])
    assert not planned
    q0, k0, v0 = tensors(0, dtype)
    usual(q0, k0, v0 if output else None, **OPTIONS[case])
    found = regard.measure(q, k, v if output else None, **OPTIONS[case])
    assert len(planned) == 1
    assert_same(found, expected)


def test_strides(planned: list[int]) -> None:
    """As a layer has them: (B, N, H, D) in memory."""
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors(1))
    expected = usual(q, k, v)
    regard.measure(*tensors(0))
    assert not planned  # other strides, another plan
    assert_same(regard.measure(q, k, v), expected)
    assert len(planned) == 1


@pytest.mark.parametrize("first", [True, False], ids=["first inside", "first outside"])
def test_inference_mode(first: bool, planned: list[int]) -> None:
    q, k, v = tensors(0)
    with torch.inference_mode(first):
        expected = usual(q, k, v, measures=["heatmap", "offsets", "previous"])
    with torch.inference_mode(not first):
        found = regard.measure(q, k, v, measures=["heatmap", "offsets", "previous"])
    assert len(planned) == 1
    assert_same(found, expected)
    assert found.heatmap.is_inference() is not first


def test_a_measure_that_was_changed() -> None:
    q, k, v = tensors(0)
    heatmap = measures.Heatmap(3)
    assert usual(q, k, v, measures=heatmap).heatmap.shape == (B, H, 3, 3)
    heatmap.rows = 5
    assert regard.measure(q, k, v, measures=heatmap).heatmap.shape == (B, H, 5, 3)
    assert regard.measure(q, k, v, measures=measures.Heatmap(3)).heatmap.shape == (B, H, 3, 3)


def test_names_that_can_be_read_once(planned: list[int]) -> None:
    q, k, v = tensors(0)
    for _ in range(2):
        assert list(regard.measure(q, k, v, measures=iter(["entropy", "received"])).values) == ["entropy", "received"]
    assert not planned


def test_threads(planned: list[int]) -> None:
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            regard.measure(*tensors(0))
    finally:
        torch.set_num_threads(before)
    assert not planned


class Confident(measures.PerQuery):
    gives = {"confident": "query"}

    def of(self, strip: Any, prepared: Any) -> Tensor:
        return strip.weights.amax(-1)


class Watching(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


USUAL: dict[str, dict[str, Any]] = {
    "token ids": {"ids": torch.arange(M), "measures": ["entropy", "duplicate"]},
    "lengths": {"mask": Padding(lengths=torch.tensor([M, 3]))},
    "a boolean mask": {"mask": Keep(torch.ones(N, M, dtype=torch.bool).tril(2))},
    "sinks": {"sinks": torch.zeros(H)},
    "a bias": {"bias": torch.zeros(N, M)},
    "positions": {"positions": torch.arange(N)},
    "a measure of one's own": {"measures": Confident()},
    "values": {"measures": measures.Contribution(torch.ones(4, H * E))},
    "strips": {"measures": "divergence"},
    "another kernel": {"kernel": "blockwise"},
}


@pytest.mark.parametrize("case", USUAL)
def test_no_plan(case: str, planned: list[int]) -> None:
    q, k, v = tensors(0)
    for _ in range(3):
        regard.measure(q, k, v, **USUAL[case])
    assert not planned


def test_no_plan_where_others_see_the_call(planned: list[int]) -> None:
    q, k, v = tensors(0)
    regard.measure(q, k, v)
    with Watching():
        regard.measure(q, k, v)
    with torch.autocast("cpu"):
        cast = regard.measure(q, k, v).output
    learns = regard.measure(q.clone().requires_grad_(), k, v).output
    assert cast is not None
    assert cast.dtype == torch.bfloat16
    assert learns is not None
    assert learns.requires_grad
    assert not planned


def test_no_plan_of_another_kernel(monkeypatch: pytest.MonkeyPatch, planned: list[int]) -> None:
    """Whether the native kernel is still the first to be asked is looked up at every call."""
    q, k, v = tensors(0)
    regard.measure(q, k, v)
    monkeypatch.setattr(kernel_run, "MEASURING", kernel_run.MEASURING[1:])
    regard.measure(q, k, v)
    assert not planned


def test_errors_are_those_of_the_first_call() -> None:
    q, k, v = tensors(0)
    for _ in range(2):
        with pytest.raises(ValueError, match="kv heads: expected a divisor of the 6 query heads, received 5"):
            regard.measure(q, k[:, :1].expand(-1, 5, -1, -1), v[:, :1].expand(-1, 5, -1, -1))
    with pytest.raises(TypeError, match="v: expected a tensor, received list"):
        regard.measure(q, k, [1])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="measures: expected names among"):
        regard.measure(q, k, v, measures="entropie")


def test_a_plan_keeps_nothing_of_the_caller() -> None:
    q, k, v = tensors(0)
    heatmap = measures.Heatmap(3)
    found = regard.measure(q, k, v, measures=[heatmap, "entropy"])
    kept = [weakref.ref(x) for x in (q, k, v, heatmap, found.heatmap, found.output)]
    del q, k, v, heatmap, found
    gc.collect()
    assert [x() for x in kept] == [None] * len(kept)


def test_plans_are_forgotten_at_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeated_measures, "MOST", 2)
    q, k, v = tensors(0)
    for n in range(1, 8):
        regard.measure(q[:, :, :n], k, v)
        assert len(repeated_measures._plans) <= 2
