"""`HeadCache`: attention over all tokens with a mask for each head, from the tokens that each head still holds."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import regard
from regard import HeadCache, KVCache, MultiHeadAttention
from regard.cache import StoredHeads
from regard.masks import Causal, Padding, Window
from regard.models import Decoder, ModelConfig
from regard.positions import Alibi, Rotary

pytestmark = pytest.mark.on_device

TIGHT: dict[str, Any] = {"rtol": 1e-11, "atol": 1e-11}
B, W, H, G, D = 2, 12, 6, 3, 4


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.no_grad():
        yield


def new_layer(encoding: Any = None, dtype: torch.dtype = torch.float64, **options: Any) -> MultiHeadAttention:
    encoding = Rotary(D) if encoding is None else encoding
    return MultiHeadAttention(W, H, num_kv_heads=G, head_dim=D, position_encoding=encoding, **options).to(dtype).eval()


def text(tokens: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(B, tokens, W, dtype=dtype)


def visible(tokens: int, streaming: list[int], window: int, keep_first: int) -> Tensor:
    """The definition: a dense mask for each query head, (1, H, N, N)."""
    at = torch.arange(tokens)
    behind = at[:, None] - at
    keep = (behind >= 0).repeat(H, 1, 1)
    for head in streaming:
        keep[head * H // G : (head + 1) * H // G] &= (behind < window) | (at < keep_first)
    return keep[None]


def feed(layer: MultiHeadAttention, x: Tensor, sizes: list[int], cache: KVCache, **options: Any) -> Tensor:
    pieces = x.split(sizes, dim=1)
    return torch.cat([layer(piece, cache=cache, **{"mask": Causal(), **options}) for piece in pieces], dim=1)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_the_attention_of_a_mask_for_each_head(data: st.DataObject) -> None:
    draw = data.draw
    streaming = draw(st.sampled_from([[], [0], [1], [0, 2], [0, 1, 2]]))
    window, keep_first = draw(st.integers(1, 7)), draw(st.integers(0, 4))
    sizes = draw(st.lists(st.integers(1, 9), min_size=1, max_size=12))
    dtype = draw(st.sampled_from([torch.float64, torch.float32]))
    torch.manual_seed(draw(st.integers(0, 9)))
    layer, x = new_layer(dtype=dtype), text(sum(sizes), dtype)
    expected = layer(x, mask=visible(sum(sizes), streaming, window, keep_first))
    cache = HeadCache(streaming, window, keep_first)
    tolerance: dict[str, Any] = TIGHT if dtype is torch.float64 else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(feed(layer, x, sizes, cache), expected, **tolerance)


@pytest.mark.parametrize(
    "options, more",
    [
        ({"softcap": 2.0}, {}),
        ({"sinks": True}, {}),
        ({}, {"mask": Causal() & Window(9)}),
        ({"encoding": Alibi(H)}, {}),  # (not cut by heads: computed as the definition says)
        ({}, {"mask": Causal() & Padding(lengths=torch.tensor([99, 3]))}),
    ],
    ids=["softcap", "sinks", "window", "alibi", "padding"],
)
def test_with_other_parts_of_a_layer(options: dict[str, Any], more: dict[str, Any]) -> None:
    layer, x = new_layer(**options), text(29)
    mask = more.get("mask", Causal()) & visible(29, [0, 2], 5, 2)
    ours = feed(layer, x, [11, 1, 1, 7, *[1] * 9], HeadCache([0, 2], 5, 2), **more)
    torch.testing.assert_close(ours, layer(x, mask=mask), **TIGHT)


def test_streaming_heads_forget() -> None:
    layer, x = new_layer(), text(301)
    cache, whole = HeadCache([0, 2], window=8, keep_first=3), KVCache()
    feed(layer, x, [100, *[1] * 201], cache)
    feed(layer, x, [301], whole)
    one = B * 2 * D * 8  # bytes of a token of one head
    assert whole.nbytes == 301 * G * one
    assert 301 * one + 2 * (3 + 7) * one <= cache.nbytes <= 301 * one + 2 * (3 + 2 * 8) * one
    room = sum(x.nbytes for x in cache._recent._memories())
    assert room <= 4 * 8 * 2 * one
    feed(layer, x, [301], cache)  # a long chunk is let go of at once
    assert cache.nbytes <= 602 * one + 2 * (3 + 2 * 8) * one


def test_what_is_returned() -> None:
    cache = HeadCache([1], window=3, keep_first=1)
    keys = torch.randn(1, 2, 20, 5)
    for i in range(20):
        cache.append(keys[:, :, i : i + 1], keys[:, :, i : i + 1])
    held = cache.keys
    assert isinstance(held, StoredHeads)
    assert held.shape == (1, 2, 20, 5)
    expected = keys.clone()
    expected[:, 1, 1:17] = 0
    assert torch.equal(held.plain(), expected)
    q = torch.randn(1, 4, 1, 5)
    assert "1 heads with 20 tokens, 1 heads with 4 tokens" in regard.explain(q, held, held)


def test_watch_and_weights_see_the_mask() -> None:
    layer, x = new_layer(), text(20)
    cache = HeadCache([1], window=3, keep_first=1)
    feed(layer, x[:, :19], [19], cache)
    other = copy.deepcopy(cache)
    out, weights = layer(x[:, 19:], cache=cache, need_weights=True)
    hidden = ~visible(20, [1], 3, 1)[:, :, -1:].expand(B, -1, -1, -1)
    assert bool((weights[hidden] == 0).all())
    torch.testing.assert_close(weights.sum(-1), torch.ones(B, H, 1, dtype=torch.float64))
    with regard.watch(layer, measures=["received"]) as seen:
        torch.testing.assert_close(layer(x[:, 19:], cache=other), out, **TIGHT)
    torch.testing.assert_close(seen[0].received, weights.sum(2), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("new", [lambda: HeadCache([1], 3, 2), lambda: KVCache(dtype="int8"), KVCache])
def test_what_is_watched_is_one_text(new: Any) -> None:
    """A chunk, single tokens, and those of a fork are joined."""
    layer, x, cache = new_layer(dtype=torch.float32), text(20, torch.float32), new()
    with regard.watch(layer) as seen:
        feed(layer, x[:, :14], [9, *[1] * 5], cache)
        feed(layer, x[:, 14:], [1] * 6, cache.fork())
    assert seen[0].entropy.shape == (B, H, 20)
    torch.testing.assert_close(seen[0].received.sum(-1), torch.full((B, H), 20.0))
    if isinstance(cache, HeadCache):
        with regard.watch(layer) as dense:
            layer(x, mask=visible(20, [1], 3, 2))
        torch.testing.assert_close(seen[0].entropy, dense[0].entropy, rtol=1e-4, atol=1e-5)


def test_a_call_that_fails_leaves_it_as_it_was() -> None:
    layer, x = new_layer(), text(30)
    cache, other = HeadCache([1], window=2, keep_first=1), HeadCache([1], window=2, keep_first=1)
    for part in (cache, other):
        feed(layer, x[:, :20], [7, *[1] * 13], part)
    with pytest.raises(ValueError, match="mask"):
        layer(x[:, 20:25], mask=torch.ones(3, 3, dtype=torch.bool), cache=cache)
    assert len(cache) == 20
    torch.testing.assert_close(feed(layer, x[:, 20:], [1] * 10, cache), feed(layer, x[:, 20:], [1] * 10, other))


def test_reorder_fork_truncate() -> None:
    layer, x = new_layer(), text(30)
    cache = HeadCache([0, 1], window=4, keep_first=2)
    feed(layer, x[:, :25], [20, 1, 1, 1, 1, 1], cache)
    fork = cache.fork()
    expected = layer(x, mask=visible(30, [0, 1], 4, 2))[:, 25:]
    torch.testing.assert_close(feed(layer, x[:, 25:], [1] * 5, cache), expected, **TIGHT)
    fork.reorder(torch.tensor([1, 0]))
    torch.testing.assert_close(feed(layer, x[:, 25:].flip(0), [1] * 5, fork), expected.flip(0), **TIGHT)
    more = text(2)
    expected_more = layer(torch.cat([x, more], 1), mask=visible(32, [0, 1], 4, 2))[:, 30:]
    layer(text(3), mask=Causal(), cache=cache)
    cache.truncate(30)
    torch.testing.assert_close(feed(layer, more, [1, 1], cache), expected_more, **TIGHT)
    with pytest.raises(ValueError, match=r"truncate: expected 0, or at least .*streaming heads forgot.*received 9"):
        cache.truncate(9)
    cache.truncate(0)
    torch.testing.assert_close(feed(layer, x, [30], cache)[:, 25:], expected, **TIGHT)
    cache.clear()
    assert len(cache) == 0
    assert cache.nbytes == 0


def test_truncate_within_the_first_window() -> None:
    layer, x = new_layer(), text(9)
    for length in range(9):
        cache = HeadCache([1], window=8, keep_first=3)
        feed(layer, x[:, ::1], [9], cache)
        cache.truncate(length)
        ours = feed(layer, x[:, length:], [1] * (9 - length), cache)
        torch.testing.assert_close(ours, layer(x, mask=visible(9, [1], 8, 3))[:, length:], **TIGHT)


def test_one_prompt_for_several_rows() -> None:
    layer, x = new_layer(), text(25)
    x[1, :20] = x[0, :20]
    cache = HeadCache([2], window=4, keep_first=2)
    feed(layer, x[:1, :20], [20], cache)
    ours = feed(layer, x[:, 20:], [1] * 5, cache.fork(rows=2))
    torch.testing.assert_close(ours, layer(x, mask=visible(25, [2], 4, 2))[:, 20:], **TIGHT)


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: HeadCache([0], 0), "a window of at least 1"),
        (lambda: HeadCache([0], 4, -1), "keep_first of at least 0"),
        (lambda: HeadCache([0, 0], 4), "each kv head once"),
        (lambda: HeadCache([-1], 4), "each kv head once, from 0 on"),
        (lambda: feed(new_layer(), text(3), [3], HeadCache([3], 4)), "streaming: expected kv heads below 3"),
        (lambda: new_layer()(text(3), cache=HeadCache([0], 4), positions=torch.arange(3)), "numbers its tokens itself"),
        (lambda: HeadCache([0], 4).truncate(torch.tensor([1, 2])), "a HeadCache has rows of one length"),
    ],
)
def test_what_is_refused(make: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


def test_heads_are_numbers() -> None:
    with pytest.raises(TypeError, match="streaming: expected numbers of kv heads"):
        HeadCache(["1"], 4)  # type: ignore[list-item]


def test_a_model_with_the_heads_of_the_probe() -> None:
    """With a threshold above every change all heads stream; with one of 0 none does, and nothing changes."""
    config = ModelConfig(
        layers=2, embed_dim=12, num_heads=6, num_kv_heads=3, vocabulary=97, inner=7, context=97, causal=True
    )
    model = Decoder(config).eval()
    result = regard.heads.probes.streaming(model, sinks=2, window=5, length=17, progress=False)
    assert list(result.kv_heads(3, 1e9).values()) == [[0, 1, 2]] * 2
    assert list(result.kv_heads(3, 0.0).values()) == [[], []]
    change = result["blocks.0.attention"].unflatten(0, (3, 2)).amax(1)
    at = float(change.sort().values[1])
    assert result.kv_heads(3, at)["blocks.0.attention"] == [int(change.argmin())]
    with pytest.raises(ValueError, match="count: expected a divisor of the 6 heads"):
        result.kv_heads(4)
    ids = torch.randint(97, (1, 40))
    full = model(ids, cache=model.new_cache())
    heads = result.kv_heads(3, 0.0).values()
    same = model(ids, cache=[HeadCache(some, 5, 2) for some in heads])
    torch.testing.assert_close(same, full, rtol=1e-4, atol=1e-5)
    caches = [HeadCache(some, 5, 2) for some in result.kv_heads(3, 1e9).values()]
    steps = torch.cat([model(ids[:, i : i + 1], cache=caches) for i in range(40)], dim=1)
    other = [HeadCache([0, 1, 2], 5, 2) for _ in range(2)]
    torch.testing.assert_close(steps, model(ids, cache=other), rtol=1e-4, atol=1e-5)
