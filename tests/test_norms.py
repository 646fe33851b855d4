"""`regard.norms`: torch's RMSNorm, computed by the native library where nobody can tell the difference."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import regard.norms
from regard.kernels import native_library
from regard.norms import RMSNorm, ZeroCentredRMSNorm

loaded = native_library.load()
no_library = pytest.mark.skipif(loaded is None, reason="the native kernel is not there")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(params=["auto"] if loaded is None else loaded.usable)
def instruction_set(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(native_library, "instruction_set", native_library.INSTRUCTION_SETS.index(request.param))
    return request.param


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """What the native library was given."""
    given, compute = [], regard.norms._by_native_library
    monkeypatch.setattr(
        regard.norms, "_by_native_library", lambda x, *args, **more: (given.append(x), compute(x, *args, **more))[1]
    )
    return given


def new(
    width: int, kind: type[nn.RMSNorm] = RMSNorm, dtype: torch.dtype = torch.float32, **options: object
) -> nn.RMSNorm:
    norm = kind(width, dtype=dtype, **options)  # type: ignore[arg-type]
    if norm.weight is not None:
        with torch.no_grad():
            norm.weight.copy_(torch.randn(width, generator=torch.Generator().manual_seed(1)))
    return norm


def formula(norm: nn.RMSNorm, x: Tensor) -> Tensor:
    """The definition, in float64."""
    wide = x.double()
    eps = torch.finfo(x.dtype).eps if norm.eps is None else norm.eps
    out = wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt()
    if norm.weight is None:
        return out
    return out * (norm.weight.double() + isinstance(norm, ZeroCentredRMSNorm))


def check(norm: nn.RMSNorm, x: Tensor) -> None:
    with torch.no_grad():
        out, exact = norm(x), formula(norm, x)
    assert (out.shape, out.dtype) == (x.shape, x.dtype)
    kind = torch.finfo(x.dtype)
    rtol = kind.eps if x.dtype != torch.float32 else 8 * kind.eps
    torch.testing.assert_close(out.double(), exact, rtol=rtol, atol=kind.smallest_normal * kind.eps)


@no_library
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 3, 16, 31, 64, 97, 384, 577])
def test_is_the_formula(width: int, dtype: torch.dtype, instruction_set: str, calls: list[Tensor]) -> None:
    for rows in (1, 7, 129):
        x = torch.randn(rows, width, generator=torch.Generator().manual_seed(0)).to(dtype)
        check(new(width, dtype=dtype), x)
        check(new(width, dtype=dtype, eps=1e-5), x)
        check(new(width, ZeroCentredRMSNorm, dtype=dtype, eps=1e-6), x)
        check(new(width, dtype=dtype, elementwise_affine=False), x)
    assert len(calls) == 12


@no_library
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    shape=st.lists(st.integers(1, 7), min_size=0, max_size=3),
    width=st.integers(1, 90),
    layout=st.sampled_from(["contiguous", "rows apart", "transposed", "expanded"]),
    dtype=st.sampled_from(DTYPES),
)
def test_any_shape_and_layout(shape: list[int], width: int, layout: str, dtype: torch.dtype) -> None:
    x = torch.randn(*shape, width, generator=torch.Generator().manual_seed(0)).to(dtype)
    if layout == "rows apart":
        x = torch.cat([x, x], -1)[..., :width]
    elif layout == "transposed" and shape:
        x = x.transpose(0, -1).contiguous().transpose(0, -1)
    elif layout == "expanded" and shape:
        x = x[:1].expand(3, *x.shape[1:])
    before = x.clone()
    check(new(width, dtype=dtype), x)
    assert torch.equal(x, before)


def threads() -> Iterator[int]:
    before = torch.get_num_threads()
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        yield count
    torch.set_num_threads(before)


@no_library
def test_the_same_bits_for_any_number_of_threads() -> None:
    norm, x = new(577), torch.randn(2053, 577)
    with torch.no_grad():
        first, *others = [norm(x) for _ in threads()]
    assert all(torch.equal(first, other) for other in others)


@no_library
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e30, 1e-30, 0.0])
def test_extremes_are_torchs(value: float, calls: list[Tensor]) -> None:
    x, norm = torch.randn(5, 61), new(61, eps=1e-6)
    x[2, 7] = value
    with torch.no_grad():
        expected = F.rms_norm(x, (61,), norm.weight, norm.eps)
        torch.testing.assert_close(norm(x), expected, equal_nan=True)
    assert calls


@no_library
def test_gradients_are_torchs(calls: list[Tensor]) -> None:
    norm, x = new(61), torch.randn(5, 61, requires_grad=True)
    norm(x).square().sum().backward()
    own = x.grad, norm.weight.grad
    norm.weight.grad = x.grad = None
    F.rms_norm(x, (61,), norm.weight, norm.eps).square().sum().backward()
    assert not calls
    assert torch.equal(own[0], x.grad)  # type: ignore[arg-type]
    assert torch.equal(own[1], norm.weight.grad)  # type: ignore[arg-type]
    with torch.enable_grad():
        norm.requires_grad_(False)(x.detach())
    assert len(calls) == 1


class Functions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: object, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        self.seen.append(getattr(func, "__name__", ""))
        return func(*args, **(kwargs or {}))  # type: ignore[operator]


@torch.no_grad()
def test_who_must_see_torchs_own_operator_does(calls: list[Tensor]) -> None:
    norm, x = new(61), torch.randn(5, 61)
    with Functions() as mode:
        norm(x)
    assert "rms_norm" in mode.seen
    torch.func.vmap(norm)(x)
    assert "rms_norm" in str(torch.export.export(norm, (x,)).graph)
    assert norm.to("meta")(x.to("meta")).is_meta
    assert not calls


def test_what_does_not_fit_is_torchs_error(calls: list[Tensor]) -> None:
    for norm in (new(61), new(61, elementwise_affine=False), new(61, ZeroCentredRMSNorm)):
        with torch.no_grad(), pytest.raises(RuntimeError, match="normalized_shape"):
            norm(torch.randn(5, 60))
    assert RMSNorm((5, 7))(torch.ones(2, 5, 7)).shape == (2, 5, 7)
    assert not calls


@no_library
def test_float64_and_weights_of_another_dtype_are_torchs(calls: list[Tensor]) -> None:
    with torch.no_grad():
        new(61, dtype=torch.float64)(torch.randn(5, 61, dtype=torch.float64))
    assert not calls
    assert not regard.norms._is_native(torch.ones(5, 61).bfloat16(), torch.ones(61), (61,))
