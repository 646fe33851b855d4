"""Projections by the native library against float64: every dtype, number of rows, stride and instruction set."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from regard.kernels import native_library, native_products
from regard.kernels.native_library import FACTOR, PRODUCT
from regard.kernels.native_products import AFTER, multiply
from regard.projections import ACTIVATIONS

pytestmark = pytest.mark.skipif(
    native_library.load() is None, reason=f"the native kernel is not here: {native_library.why_not() or ''}"
)

loaded = native_library.load()
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ROWS = [1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 61, 67, 131, 257]  # around each way to compute them, and each size of a strip
SHAPES = [(1, 1), (5, 3), (13, 17), (257, 101), (384, 384), (1531, 67)]  # in, out


@pytest.fixture(params=[] if loaded is None else loaded.usable)
def instruction_set(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(native_library, "instruction_set", native_library.INSTRUCTION_SETS.index(request.param))
    return request.param


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def formula(x: Tensor, weight: Tensor, bias: Tensor | None, after: str | None, other: Tensor | None) -> Tensor:
    out = F.linear(x, weight, bias)
    if after in ACTIVATIONS:
        return ACTIVATIONS[after](out)
    return out if after is None else out + other if after == "add" else out * other


def check(
    out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, after: str | None = None, other: Tensor | None = None
) -> None:
    """The typical error is at most twice torch's own, or what rounding the terms of a sum may do (of few outputs
    torch may have all exact by luck); and the largest is within what rounding may do."""
    wide_bias, wide_other = (None if t is None else t.double() for t in (bias, other))
    exact = formula(x.double(), weight.double(), wide_bias, after, wide_other)
    plain = formula(x, weight, bias, after, other)
    assert (out.shape, out.dtype, out.stride()) == (plain.shape, plain.dtype, plain.stride())
    ours, theirs = (out - exact).abs(), (plain - exact).abs()
    tiny = 2 * torch.finfo(out.dtype).eps * exact.abs().max()
    terms = (x.double().abs() @ weight.double().abs().mT).max()
    few = torch.finfo(torch.float32).eps * terms if out.numel() < 16 else 0.0
    assert ours.square().mean().sqrt() <= 2 * theirs.square().mean().sqrt() + 0.1 * tiny + few
    assert ours.max() <= 3 * theirs.max() + tiny


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ROWS)
def test_as_good_as_plain_pytorch(rows: int, dtype: torch.dtype, instruction_set: str) -> None:
    for width, outs in SHAPES:
        x, weight = random(rows, width, dtype=dtype), random(outs, width, dtype=dtype, seed=1)
        bias = random(outs, dtype=dtype, seed=2)
        check(*multiply(x, [weight], [bias]), x, weight, bias)
        check(*multiply(x, [weight], [None]), x, weight, None)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("after", AFTER)
def test_what_follows(after: str, dtype: torch.dtype, instruction_set: str) -> None:
    for rows in (1, 3, 23):
        x, weight = 2 * random(rows, 59, dtype=dtype), random(53, 59, dtype=dtype, seed=1) / 8
        bias, other = random(53, dtype=dtype, seed=2), random(rows, 53, dtype=dtype, seed=3)
        given = other if after in ("add", "times") else None
        check(*multiply(x, [weight], [bias], after, given), x, weight, bias, after, given)


def test_activations_from_end_to_end(instruction_set: str) -> None:
    """Close to the exact value over the whole range; NaN and infinities as torch has them."""
    values = torch.cat([torch.linspace(-20, 20, 40_001), torch.tensor([1e-30, -1e-30, 1e30, -1e30, float("nan")])])
    for name, exact in ACTIVATIONS.items():
        (out,) = multiply(values[:, None], [torch.ones(1, 1)], [None], name)
        expected = exact(values.double())
        torch.testing.assert_close(out[:, 0].double(), expected, rtol=1e-5, atol=2e-7, equal_nan=True)
        for end in (float("inf"), -float("inf")):
            (out,) = multiply(torch.full((7, 1), end), [torch.ones(1, 1)], [None], name)
            expected = exact(torch.full((7, 1), end, dtype=torch.float64))  # (in float32 torch's depend on the CPU)
            torch.testing.assert_close(out.double(), expected, equal_nan=True)


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    rows=st.integers(1, 70),
    width=st.integers(1, 300),
    outs=st.lists(st.integers(0, 90), min_size=1, max_size=4),
    dtype=st.sampled_from(DTYPES),
    gaps=st.booleans(),
    biases=st.lists(st.booleans(), min_size=4, max_size=4),
)
def test_several_weights_at_once_are_as_each_alone(
    rows: int, width: int, outs: list[int], dtype: torch.dtype, gaps: bool, biases: list[bool]
) -> None:
    def rows_of(count: int, seed: int) -> Tensor:  # with memory of others between the rows
        return random(count, width + 5, dtype=dtype, seed=seed)[:, 2 : 2 + width] if gaps else random(
            count, width, dtype=dtype, seed=seed
        )  # fmt: skip

    x = rows_of(rows, 0)
    weights = [rows_of(count, i + 1) for i, count in enumerate(outs)]
    offered = [random(count, dtype=dtype, seed=9) if has else None for count, has in zip(outs, biases, strict=False)]
    together = multiply(x, weights, offered)
    for out, weight, bias in zip(together, weights, offered, strict=True):
        (alone,) = multiply(x, [weight], [bias])
        assert torch.equal(out, alone)
        if out.numel():
            check(out, x, weight, bias)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [521, 522])
def test_neither_threads_nor_other_rows_change_a_row(
    width: int, dtype: torch.dtype, threads: Callable[[int], None], instruction_set: str
) -> None:
    x, weight = random(300, width, dtype=dtype), random(211, width, dtype=dtype, seed=1)
    threads(1)
    (expected,) = multiply(x, [weight], [None])
    for count in (2, 3, 7):
        threads(count)
        assert torch.equal(multiply(x, [weight], [None])[0], expected)
    for rows in (5, 8, 17, 131):
        assert torch.equal(multiply(x[:rows], [weight], [None])[0], expected[:rows])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_begin_anywhere(dtype: torch.dtype, instruction_set: str) -> None:
    """Pairs of bfloat16 are read where they lie if each begins at a multiple of four bytes."""
    x, weight = random(61, 131, dtype=dtype), random(67, 132, dtype=dtype, seed=1)
    for begin, end, rows in ((0, 130, 61), (1, 131, 61), (2, 98, 17), (3, 98, 5), (0, 131, 61)):
        y, w = x[:rows, begin:end], weight[:, begin:end]
        check(multiply(y, [w], [None])[0], y, w, None)
        check(multiply(y.contiguous(), [w, w[::2]], [None, None])[1], y, w[::2], None)


def test_axes_and_strides() -> None:
    weight = random(13, 11, dtype=torch.float32)
    for x in (
        random(2, 3, 11, dtype=torch.float32),
        random(11, dtype=torch.float32),
        random(3, 11, 2, dtype=torch.float32).transpose(1, 2),
        random(3, 22, dtype=torch.float32)[:, ::2],
        random(1, 11, dtype=torch.float32).expand(7, 11),
    ):
        other = random(*x.shape[:-1], 26, dtype=torch.float32)[..., ::2]
        torch.testing.assert_close(multiply(x, [weight], [None], "add", other)[0], F.linear(x, weight) + other)


def test_many_rows_are_transposed_in_parts() -> None:
    x, weight = random(9_001, 257, dtype=torch.float32), random(19, 257, dtype=torch.float32, seed=1)
    check(*multiply(x, [weight], [None]), x, weight, None)


def test_memory_is_that_of_the_result(instruction_set: str) -> None:
    """Nothing is written outside of it, whatever the sizes."""
    for rows in (1, 3, 5, 17):
        for outs in (1, 7, 8, 9, 31):
            x, weight = random(rows, 23, dtype=torch.float32), random(outs, 23, dtype=torch.float32, seed=1)
            around = torch.full((rows + 2, outs + 2), 7.0)
            inside = around[1:-1, 1:-1]
            factor = FACTOR.pack(weight.data_ptr(), 0, inside.data_ptr(), 0, outs, 23, outs + 2, 0)
            call = PRODUCT.pack(PRODUCT.size, native_library.isa(), 2, 0, 0, rows, 23, 1, x.data_ptr(), 23)
            assert loaded is not None
            loaded.multiply(call, factor)
            torch.testing.assert_close(inside, F.linear(x, weight))
            inside.fill_(7.0)
            assert (around == 7.0).all()


@pytest.mark.parametrize("field, value", [("rows", -1), ("width", 0), ("after", 9), ("after", -1), ("dtype", 3)])
def test_a_call_out_of_range_is_refused(field: str, value: int) -> None:
    fields = {"threads": 1, "dtype": 0, "after": 0, "rows": 1, "width": 1, "factors": 0} | {field: value}
    assert loaded is not None
    with pytest.raises(RuntimeError, match="a size is out of range"):
        loaded.multiply(PRODUCT.pack(PRODUCT.size, 0, *fields.values(), 0, 0), b"")
    with pytest.raises(RuntimeError, match="built from another version"):
        loaded.multiply(PRODUCT.pack(PRODUCT.size + 8, 0, 1, 0, 0, 1, 1, 0, 0, 0), b"")


def test_after_a_fork() -> None:
    """A forked child has none of its parent's threads."""
    program = """
import os, torch
from regard.kernels.native_products import multiply
x, weight = torch.randn(64, 512), torch.randn(512, 512)
expected = multiply(x, [weight], [None])[0]
if (child := os.fork()) == 0:
    os._exit(0 if torch.equal(multiply(x, [weight], [None])[0], expected) else 1)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert subprocess.run([sys.executable, "-c", program], timeout=120).returncode == 0


def test_serves_what_the_other_libraries_have_no_instructions_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert loaded is not None
    rows_served = native_products.rows_served.__wrapped__
    assert not rows_served(torch.float64)
    monkeypatch.setattr(native_library, "instruction_set", 1)  # portable
    assert not any(rows_served(dtype) for dtype in DTYPES)
    for best in ("avx2", "avx512", "avx512_bf16"):
        for capability in ("AVX2", "AVX512"):
            monkeypatch.setattr(native_library, "instruction_set", 0)
            monkeypatch.setattr(native_library, "load", lambda best=best: Served(best))
            monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda capability=capability: capability)
            served = rows_served(torch.float32)
            if capability == "AVX2":
                assert (served.start, served.stop) == (1, sys.maxsize)
            else:  # oneDNN has AVX-512: only where it would pack a weight for a few rows
                assert [rows in served for rows in (1, 16, 2048)] == [best != "avx2", best != "avx2", False]
            for amx in (False, True):  # (with instructions for bfloat16, again a few rows)
                monkeypatch.setattr(native_library, "has_amx", lambda amx=amx: amx)
                few = rows_served(torch.bfloat16)
                assert [rows in few for rows in (1, 16, 2048)] == [not amx, not amx, not amx and best != "avx512_bf16"]
    monkeypatch.setattr(native_library, "load", lambda: None)
    assert not any(rows_served(dtype) for dtype in DTYPES)


@pytest.mark.parametrize("cpu", ["GenuineIntel avx512_vp2intersect", "AuthenticAMD avx512_bf16", "", "Zen 5"])
def test_more_rows_are_ours_on_zen_5(monkeypatch: pytest.MonkeyPatch, cpu: str) -> None:
    info = cpu if cpu != "Zen 5" else "vendor_id: AuthenticAMD flags: avx512_bf16 avx512_vp2intersect"
    monkeypatch.setattr(native_library, "_cpu_info", lambda: info)
    monkeypatch.setattr(native_library, "instruction_set", 0)
    monkeypatch.setattr(native_library, "load", lambda: Served("avx512_bf16"))
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    most = [native_products.rows_served.__wrapped__(dtype).stop - 1 for dtype in (torch.float32, torch.bfloat16)]
    assert most == ([1024, 256] if cpu == "Zen 5" else [256, 128])


class Served:
    """A library on a CPU with these instructions at best."""

    def __init__(self, best: str) -> None:
        sets = native_library.INSTRUCTION_SETS
        self.best, self.usable = best, sets[1 : sets.index(best) + 1]
