"""`KVCache(dtype="int8")`: the error's bound, and the same answers on every way to the keys."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import regard
from regard import KVCache, MultiHeadAttention
from regard.cache import Stored, quantize
from regard.masks import Causal, Padding
from regard.models import Decoder, ModelConfig
from regard.positions import Rotary

pytestmark = pytest.mark.on_device

EXAMPLES = settings(max_examples=40, deadline=None)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def filled(*counts: int, dtype: torch.dtype = torch.float32, batch: int = 2) -> tuple[KVCache, Tensor, Tensor]:
    """A cache of int8, and the keys and values that it was given."""
    cache, keys, values = KVCache(dtype="int8"), [], []
    for count in counts:
        keys.append(torch.randn(batch, 3, count, 7).to(dtype))
        values.append(torch.randn(batch, 3, count, 5).to(dtype))
        cache.append(keys[-1], values[-1])
    return cache, torch.cat(keys, 2), torch.cat(values, 2)


def held(cache: KVCache) -> tuple[Stored, Stored]:
    keys, values = cache.keys, cache.values
    assert isinstance(keys, Stored)
    assert isinstance(values, Stored)
    return keys, values


# --- numbers ---------------------------------------------------------------------------------------------------------


@EXAMPLES
@given(st.integers(0, 99), st.sampled_from([1e-40, 1e-20, 1.0, 1e4, 1e30]))
def test_off_by_at_most_half_a_step(seed: int, size: float) -> None:
    x = torch.randn(2, 3, 5, 7, generator=torch.Generator().manual_seed(seed)) * size
    numbers, scales = quantize(x)
    assert numbers.dtype is torch.int8
    assert int(numbers.abs().max()) <= 127
    error = (numbers.double() * scales[..., None] - x.double()).abs()
    assert bool((error <= scales[..., None].double() * (0.5 + 1e-4)).all())
    torch.testing.assert_close(scales, (x.abs().amax(-1) / 127).clamp_min(2.0**-100))


def test_rows_of_zeros_and_of_one_number() -> None:
    x = torch.tensor([[[[0.0, 0.0, 0.0], [3.0, 0.0, -3.0]]]])
    numbers, scales = quantize(x)
    assert numbers.tolist() == [[[[0, 0, 0], [127, 0, -127]]]]
    torch.testing.assert_close(numbers * scales[..., None], x)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_infinities_are_refused(bad: float) -> None:
    cache, keys, values = filled(3)
    values[0, 1, 2, 3] = bad
    for held in (cache, empty := KVCache(dtype="int8")):
        with pytest.raises(ValueError, match=r'KVCache\(dtype="int8"\): expected finite keys.*remedy: KVCache\(\)'):
            held.append(keys, values)
    assert len(cache) == 3
    assert empty.keys is None


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"dtype: expected \"int8\", or None.*received 'int4'.*bfloat16"):
        KVCache(dtype="int4")


def test_bytes() -> None:
    cache, _, _ = filled(11)
    assert cache.nbytes == 2 * 3 * 11 * (7 + 5 + 2 * 4)
    plain = KVCache()
    plain.append(torch.ones(2, 3, 11, 7), torch.ones(2, 3, 11, 5))
    assert plain.nbytes == 2 * 3 * 11 * (7 + 5) * 4


# --- the same answers ------------------------------------------------------------------------------------------------


@EXAMPLES
@given(st.data())
def test_every_kernel_sees_the_same_numbers(data: st.DataObject) -> None:
    draw = data.draw
    groups, per_group = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 3, 17]))
    queries, keys, batch = draw(st.integers(1, 19)), draw(st.sampled_from([19, 67, 613])), draw(st.integers(1, 2))
    width, value_width, dtype = draw(st.integers(1, 19)), draw(st.integers(1, 19)), draw(st.sampled_from(DTYPES))
    torch.manual_seed(draw(st.integers(0, 9)))
    cache = KVCache(dtype="int8")
    k, v = cache.append(
        torch.randn(batch, groups, keys, width).to(dtype), torch.randn(batch, groups, keys, value_width).to(dtype)
    )
    assert isinstance(k, Stored)
    assert isinstance(v, Stored)
    q = torch.randn(batch, groups * per_group, queries, width).to(dtype)
    options: dict[str, Any] = draw(
        st.sampled_from(
            [
                {},
                {"mask": Causal()},
                {"mask": Causal() & Padding(lengths=torch.tensor([keys, 13][:batch]))},
                {"mask": torch.rand(queries, keys) < 0.7, "softcap": 2.0},
                {"bias": torch.randn(queries, keys)},
            ]
        )
    )
    wide = [x.float() * s[..., None] for x, s in (k.segments[0], v.segments[0])]  # type: ignore[index]
    if "bias" in options:
        expected = regard.attend(q.double(), *(x.double() for x in wide), bias=options["bias"].double())
    else:
        expected = regard.attend(q.double(), *(x.double() for x in wide), kernel="reference", **options)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 4e-2, torch.float16: 5e-3}[dtype]
    for kernel in ["auto", "blockwise", "reference"]:
        out = regard.attend(q, k, v, kernel=kernel, **options)
        assert out.dtype is dtype
        torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


def test_attention_is_off_by_little() -> None:
    """Weights move by at most exp(2 d) - 1 where scores move by d: half a step of each number of the key times |q|."""
    cache, keys, values = filled(31)
    k, v = held(cache)
    q = torch.randn(2, 3, 1, 7)
    exact, ours = regard.attend(q, keys, values), regard.attend(q, k, v)
    scales = k.segments[0].scales
    assert scales is not None
    moved = (q.abs().sum(-1, keepdim=True) * scales[:, :, None] / 2 * 7**-0.5).amax()
    bound = (torch.exp(2 * moved) - 1) * values.abs().max() + v.segments[0].scales.max() / 2  # type: ignore[union-attr]
    assert (exact - ours).abs().max() <= bound


def test_explain_tells() -> None:
    k, v = held(filled(11)[0])
    q = torch.randn(2, 3, 1, 7)
    assert "int8 in 1 segments" in regard.explain(q, k, v)
    assert "copied to plain tensors for this call" in regard.explain(q, k, v, kernel="blockwise")
    assert "keys and values" not in regard.explain(q, k.plain(), v.plain())


def test_gradients_of_queries() -> None:
    k, v = held(filled(11)[0])
    with torch.enable_grad():
        q = torch.randn(2, 3, 1, 7, requires_grad=True)
        other = q.detach().clone().requires_grad_()
        regard.attend(q, k, v).sum().backward()
        regard.attend(other, k.plain(), v.plain(), kernel="reference").sum().backward()
    torch.testing.assert_close(q.grad, other.grad)


def test_measured_and_weights() -> None:
    k, v = held(filled(11)[0])
    q = torch.randn(2, 6, 2, 7)
    found, expected = regard.measure(q, k, v), regard.measure(q, k.plain(), v.plain(), kernel="reference")
    for name in ("entropy", "received", "output"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(regard.attention_weights(q, k), regard.attention_weights(q, k.plain()))


# --- the cache -------------------------------------------------------------------------------------------------------


def expect(cache: KVCache, keys: Tensor, values: Tensor) -> None:
    for stored, came in zip(held(cache), (keys, values), strict=True):
        numbers, scales = quantize(came)
        torch.testing.assert_close(stored.plain(), (numbers * scales[..., None]).to(came.dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_append_truncate_reorder_clear(dtype: torch.dtype) -> None:
    cache, keys, values = filled(5, 1, 7, dtype=dtype)
    expect(cache, keys, values)
    cache.truncate(6)
    expect(cache, keys[:, :, :6], values[:, :, :6])
    cache.reorder(torch.tensor([1, 0, 1]))
    rows = [1, 0, 1]
    expect(cache, keys[rows, :, :6], values[rows, :, :6])
    cache.clear()
    assert len(cache) == 0
    assert cache.keys is None
    assert cache.append(keys, values)[0].shape == keys.shape


def test_limit_once_and_dtype() -> None:
    cache = KVCache(limit=5, dtype="int8")
    keys, values = torch.randn(1, 2, 4, 3), torch.randn(1, 2, 4, 3)
    cache.append(keys, values)
    with pytest.raises(ValueError, match="at most 5 tokens"):
        cache.append(keys, values)
    with pytest.raises(TypeError, match=r"cached keys: expected torch\.float32"):
        cache.append(keys[:, :, :1].double(), values[:, :, :1].double())
    once = KVCache(once=True, dtype="int8")
    once.append(keys, values)
    with pytest.raises(ValueError, match="one append"):
        once.append(keys, values)


def test_rows_of_different_lengths() -> None:
    cache, _, _ = filled(6)
    cache.truncate(torch.tensor([6, 2]))
    more = torch.randn(2, 3, 1, 7), torch.randn(2, 3, 1, 5)
    cache.append(*more)
    k, _ = held(cache)
    torch.testing.assert_close(k.plain()[1, :, 2], more[0][1, :, 0], atol=0.02, rtol=0)
    torch.testing.assert_close(k.plain()[0, :, 6], more[0][0, :, 0], atol=0.02, rtol=0)
    assert cache.lengths is not None
    assert cache.lengths.tolist() == [7, 3]


def test_it_travels() -> None:
    cache, keys, values = filled(6)
    file = io.BytesIO()
    torch.save(cache, file)
    file.seek(0)
    for other in (copy.deepcopy(cache), torch.load(file, weights_only=False)):
        expect(other, keys, values)
        other.append(keys, values)
        assert len(other) == 12
        assert len(cache) == 6


# --- through the layer -----------------------------------------------------------------------------------------------


def layer() -> MultiHeadAttention:
    torch.manual_seed(0)
    return MultiHeadAttention(24, 6, num_kv_heads=2, position_encoding=Rotary(4)).eval()


def test_the_layer_attends_to_what_is_held() -> None:
    """Token by token: the same as attention with keys and values that were rounded once."""
    attention, x = layer(), torch.randn(2, 9, 24)
    cache, plain = KVCache(dtype="int8"), KVCache()
    outs = [attention(x[:, :5], mask=Causal(), cache=cache)]
    outs += [attention(x[:, i : i + 1], cache=cache) for i in range(5, 9)]
    expected = attention(x, mask=Causal(), cache=plain)
    torch.testing.assert_close(torch.cat(outs, 1), expected, atol=0.02, rtol=0.1)
    assert plain.keys is not None
    assert plain.values is not None
    expect(cache, plain.keys, plain.values)


def test_watch_sees_it() -> None:
    attention, x = layer(), torch.randn(1, 9, 24)
    seen = []
    for watched in (False, True):
        cache = KVCache(dtype="int8")
        attention(x[:, :8], mask=Causal(), cache=cache)
        if watched:
            with regard.watch(attention) as record:
                seen.append(attention(x[:, 8:], cache=cache))
            assert record[0].entropy.shape[-1] == 1
        else:
            seen.append(attention(x[:, 8:], cache=cache))
    torch.testing.assert_close(seen[0], seen[1])


def test_ablate_sees_it() -> None:
    attention, x = layer(), torch.randn(1, 9, 24)
    outs = []
    for cache in (KVCache(dtype="int8"), KVCache()):
        attention(x[:, :8], mask=Causal(), cache=cache)
        with regard.ablate(attention, {0: [1, 2]}):
            outs.append(attention(x[:, 8:], cache=cache))
    torch.testing.assert_close(outs[0], outs[1], atol=0.02, rtol=0.1)


def test_compiled() -> None:
    """Compilers see plain tensors."""
    attention, x = layer(), torch.randn(1, 5, 24)
    cache, other = KVCache(dtype="int8", capacity=16), KVCache(dtype="int8", capacity=16)
    compiled = torch.compile(lambda x, cache: attention(x, mask=Causal(), cache=cache), backend="eager")
    torch.testing.assert_close(compiled(x, cache), attention(x, mask=Causal(), cache=other))


def test_through_a_model() -> None:
    config = ModelConfig(
        layers=2, embed_dim=12, num_heads=6, vocabulary=31, inner=7, context=97, causal=True, positions="rotary"
    )
    model, ids = Decoder(config).eval(), torch.arange(11)[None]
    cache = model.new_cache(dtype="int8")
    model(ids[:, :7], cache=cache)
    assert all(isinstance(part.keys, Stored) for part in cache)
    expected = model(ids, cache=model.new_cache())[:, 7:]
    torch.testing.assert_close(model(ids[:, 7:], cache=cache), expected, atol=0.02, rtol=0.05)
    with pytest.raises(ValueError, match="dtype: expected None with a window"):
        model.new_cache(5, dtype="int8")
