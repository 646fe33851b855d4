"""Decoding by the native kernel with many query heads to a kv head, and with wide heads (latent attention)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import regard
from regard.kernels import native_library as library
from regard.masks import Causal, Padding, Window

pytestmark = pytest.mark.skipif(
    library.load() is None, reason=f"the native kernel is not here: {library.why_not() or ''}"
)

EXAMPLES = settings(max_examples=40, deadline=None)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]

loaded = library.load()
SETS = [] if loaded is None else loaded.usable


@pytest.fixture(params=SETS)
def instruction_set(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(library, "instruction_set", library.INSTRUCTION_SETS.index(request.param))
    return request.param


def latent(heads: int, queries: int, keys: int, *, rank: int = 512, rope: int = 64, batch: int = 1) -> list[Tensor]:
    """Queries, keys of one kv head, and values that are the first numbers of the keys."""
    q, k = torch.randn(batch, heads, queries, rank + rope), torch.randn(batch, 1, keys, rank + rope)
    return [q, k, k[..., :rank]]


def exact(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    options = {name: x.double() if name == "sinks" else x for name, x in options.items()}
    return regard.attend(q.double(), k.double(), v.double(), kernel="reference", **options)


def compare(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> None:
    """An error of at most twice that of plain PyTorch, or a few roundings of the values."""
    expected = exact(q, k, v, **options)
    ours, plain = (
        (regard.attend(q, k, v, kernel=kernel, **options).double() - expected).abs().max()
        for kernel in ("native", "reference")
    )
    assert ours <= 2 * plain + 8 * torch.finfo(q.dtype).eps * v.abs().max()


@EXAMPLES
@given(st.data())
def test_any_shape(data: st.DataObject) -> None:
    """Heads that fill the lanes and heads that do not, one kv head and several, with each mask of ranges."""
    draw = data.draw
    groups, per_group = draw(st.sampled_from([1, 2])), draw(st.sampled_from([7, 16, 17, 64, 67]))
    queries, keys = draw(st.integers(1, 5)), draw(st.sampled_from([1, 5, 64, 131, 1031]))
    batch, width, value_width = draw(st.integers(1, 2)), draw(st.integers(1, 37)), draw(st.integers(1, 37))
    dtype = draw(st.sampled_from(DTYPES))
    options: dict[str, Any] = draw(
        st.sampled_from(
            [
                {},
                {"mask": Causal()},
                {"mask": Window(29)},
                {"mask": Causal() & Padding(lengths=torch.tensor([keys, (keys + 1) // 2][:batch]))},
                {"softcap": 3.0, "mask": Causal()},
                {"scale": -0.5},
                {"sinks": torch.linspace(-2, 2, groups * per_group)},
            ]
        )
    )
    torch.manual_seed(draw(st.integers(0, 9)))
    q = torch.randn(batch, groups * per_group, queries, width).to(dtype)
    k = torch.randn(batch, keys, groups, width).to(dtype).transpose(1, 2)
    compare(q, k, torch.randn(batch, groups, keys, value_width).to(dtype), **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads, queries, keys", [(16, 1, 613), (128, 1, 31), (23, 3, 67)])
def test_latent_attention(heads: int, queries: int, keys: int, dtype: torch.dtype, instruction_set: str) -> None:
    q, k, v = (x.to(dtype) for x in latent(heads, queries, keys))
    v = k[..., :512]
    assert v.data_ptr() == k.data_ptr()
    compare(q, k, v, mask=Causal())


def test_values_that_are_no_view(instruction_set: str) -> None:
    q, k, v = latent(17, 1, 131)
    assert torch.equal(regard.attend(q, k, v, kernel="native"), regard.attend(q, k, v.clone(), kernel="native"))


def test_the_same_bits_for_any_number_of_threads() -> None:
    q, k, v = latent(67, 1, 3001)
    before, outputs = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            outputs.append(regard.attend(q, k, v, kernel="native"))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(outputs[0], other) for other in outputs)


def test_nothing_visible_and_nan_that_is_hidden(instruction_set: str) -> None:
    q, k, v = latent(17, 2, 131, rank=29, rope=3, batch=2)
    lengths = torch.tensor([0, 131])
    out = regard.attend(q, k, v, mask=Padding(lengths=lengths), kernel="native")
    assert bool((out[0] == 0).all())
    expected = regard.attend(q, k, v, mask=Causal(), kernel="native")
    k = k.clone()
    k[:, :, -1] = float("nan")  # the first of two queries does not see it
    out = regard.attend(q, k, k[..., :29], mask=Causal(), kernel="native")
    torch.testing.assert_close(out[:, :, 0], expected[:, :, 0])
    assert bool(out[:, :, 1].isnan().all())


@pytest.mark.parametrize("width, value_width", [(576, 512), (1024, 3), (3, 1024)])
def test_wide_heads_with_gradients(width: int, value_width: int) -> None:
    q, k = torch.randn(1, 3, 37, width), torch.randn(1, 3, 37, width)
    v = torch.randn(1, 3, 37, value_width)
    compare(q, k, v, mask=Causal())
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    narrow = [x.requires_grad_() for x in (q, k, v)]
    regard.attend(*wide, mask=Causal(), kernel="reference").sin().sum().backward()
    regard.attend(*narrow, mask=Causal(), kernel="native").sin().sum().backward()
    for x, y in zip(narrow, wide, strict=True):
        torch.testing.assert_close(x.grad, y.grad.float(), rtol=1e-4, atol=1e-5)  # type: ignore[union-attr]


def test_measures_of_wide_heads() -> None:
    q, k, v = latent(17, 3, 31)
    found = regard.measure(q, k, v, measures=["entropy", "received"], mask=Causal(), kernel="native")
    expected = regard.measure(q, k, v, measures=["entropy", "received"], mask=Causal(), kernel="reference")
    torch.testing.assert_close(found.entropy, expected.entropy, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.received, expected.received, rtol=1e-4, atol=1e-5)
