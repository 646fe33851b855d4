"""Caches: whatever the pieces a text comes in, the answer is that of the whole text; memory is what was promised."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import regard
from regard import KVCache, MultiHeadAttention, RollingCache
from regard.masks import Causal, Mask, Padding, Prefix, Window
from regard.positions import Alibi, RelativeBias, Rotary

pytestmark = pytest.mark.on_device

TIGHT = {"rtol": 1e-12, "atol": 1e-12}
B, W, H, G, D = 2, 12, 6, 3, 4

ENCODINGS: dict[str, Callable[[], nn.Module | None]] = {
    "none": lambda: None,
    "rotary": lambda: Rotary(D),
    "rotary, interleaved": lambda: Rotary(D, interleaved=True),
    "rotary, partial": lambda: Rotary(D, width=2),
    "alibi": lambda: Alibi(H),
    "relative": lambda: RelativeBias(H, num_buckets=8, max_distance=16),
    "relative, one way": lambda: RelativeBias(H, num_buckets=8, max_distance=16, bidirectional=False),
}


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.no_grad():
        yield


def new_layer(encoding: str = "none", **options: object) -> MultiHeadAttention:
    layer = MultiHeadAttention(
        W, H, num_kv_heads=G, head_dim=D, value_head_dim=5, position_encoding=ENCODINGS[encoding](), **options
    )
    if isinstance(layer.position_encoding, RelativeBias):  # as large as the scores, or nothing would be seen of it
        layer.position_encoding.weight.data.normal_()
    return layer.double()


def text(tokens: int, batch: int = B) -> Tensor:
    return torch.randn(batch, tokens, W, dtype=torch.float64)


def feed(
    layer: MultiHeadAttention, x: Tensor, cache: KVCache | RollingCache, sizes: list[int], **options: object
) -> Tensor:
    return torch.cat([layer(part, cache=cache, **options) for part in x.split(sizes, dim=1)], dim=1)


def in_pieces(total: int, size: int) -> list[int]:
    return [size] * (total // size) + ([total % size] if total % size else [])


# ----------------------------------------------------------------------------------------------------
# KVCache


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("sizes", [[11], [1] * 11, [3, 3, 3, 2], [7, 1, 1, 1, 1]], ids=str)
def test_pieces_give_what_the_whole_gives(encoding: str, sizes: list[int]) -> None:
    layer, x = new_layer(encoding), text(11)
    torch.testing.assert_close(feed(layer, x, KVCache(), sizes, mask=Causal()), layer(x, mask=Causal()), **TIGHT)


def test_growth_is_by_doubling() -> None:
    """1000 tokens one by one: the memory moves at most log2(1000) + 1 times, and is at most twice what is held."""
    cache, moves, before = KVCache(), 0, None
    token = torch.randn(1, 2, 1, 3)
    for count in range(1, 1001):
        keys, values = cache.append(token * count, token)
        moves += keys.data_ptr() != before
        before = keys.data_ptr()
        assert len(cache) == keys.shape[2] == values.shape[2] == count
        assert keys.untyped_storage().nbytes() <= 2 * count * 2 * 3 * 4
    assert moves <= 11
    assert torch.equal(cache.keys, token * torch.arange(1, 1001).view(1, 1, -1, 1))


def test_a_capacity_is_room_from_the_start() -> None:
    cache = KVCache(capacity=13)
    token = torch.randn(1, 2, 1, 3)
    pointers = {cache.append(token, token)[0].data_ptr() for _ in range(13)}
    assert len(pointers) == 1
    assert repr(cache) == "KVCache(13 tokens, batch 1, room 13)"
    cache.append(token, token)
    assert repr(cache) == "KVCache(14 tokens, batch 1, room 26)"
    assert repr(KVCache()) == "KVCache(0 tokens)"


def test_a_limit_is_kept_and_says_so() -> None:
    cache = KVCache(limit=5)
    token = torch.randn(1, 2, 3, 3)
    cache.append(token, token)
    with pytest.raises(ValueError, match=r"cache: expected at most 5 tokens, received 3 held and 3 new; remedy"):
        cache.append(token, token)
    assert len(cache) == 3
    keys, _ = cache.append(token[:, :, :2], token[:, :, :2])
    assert keys.shape[2] == 5
    assert keys.untyped_storage().nbytes() == 5 * 2 * 3 * 4  # no room beyond what may be used


def test_after_an_append_that_failed_all_is_as_before() -> None:
    layer, x = new_layer("rotary"), text(5)
    positions = torch.tensor([2, 3, 7, 8, 11])
    cache = KVCache(limit=5)
    layer(x[:, :4], cache=cache, mask=Causal(), positions=positions[:4])
    with pytest.raises(ValueError, match="expected at most 5 tokens"):
        layer(x, cache=cache, mask=Causal(), positions=positions)
    last = layer(x[:, 4:], cache=cache, mask=Causal(), positions=positions[4:])
    torch.testing.assert_close(last, layer(x, mask=Causal(), positions=positions)[:, 4:], **TIGHT)


@pytest.mark.parametrize("first", [0, 2])
def test_after_a_call_with_positions_that_failed_a_call_without_is_as_before(first: int) -> None:
    layer, x = new_layer("rotary"), text(5)
    cache = KVCache(limit=5)
    layer(x[:, :first], cache=cache, mask=Causal())
    with pytest.raises(ValueError, match="expected at most 5 tokens"):
        layer(text(7), cache=cache, positions=torch.arange(7) + 50)
    rest = layer(x[:, first:], cache=cache, mask=Causal())
    torch.testing.assert_close(rest, layer(x, mask=Causal())[:, first:], **TIGHT)


def test_truncate_goes_back() -> None:
    layer, x, other = new_layer("rotary"), text(7), text(3)
    cache = KVCache()
    layer(x, mask=Causal(), cache=cache)
    cache.truncate(4)
    assert len(cache) == 4
    assert cache.keys.shape[2] == cache.values.shape[2] == 4
    again = layer(other, mask=Causal(), cache=cache)
    torch.testing.assert_close(again, layer(torch.cat([x[:, :4], other], 1), mask=Causal())[:, 4:], **TIGHT)
    cache.truncate(0)
    torch.testing.assert_close(layer(x, mask=Causal(), cache=cache), layer(x, mask=Causal()), **TIGHT)


@pytest.mark.parametrize("encoding", ["none", "rotary", "rotary, interleaved", "alibi", "relative"])
def test_rows_of_different_lengths_are_each_as_if_alone(encoding: str) -> None:
    """A batch of prompts padded on the right, then single tokens, then a chunk: each row as it would be by itself."""
    layer, prompts, rest = new_layer(encoding), text(7, batch=3), text(5, batch=3)
    lengths = torch.tensor([7, 2, 4])
    cache = KVCache()
    layer(prompts, mask=Causal() & Padding(lengths=lengths), cache=cache)
    cache.truncate(lengths)
    assert cache.lengths.tolist() == [7, 2, 4]
    out = feed(layer, rest, cache, [1, 1, 3], mask=Causal())
    assert cache.lengths.tolist() == [12, 7, 9]
    for b, length in enumerate(lengths.tolist()):
        alone = torch.cat([prompts[b : b + 1, :length], rest[b : b + 1]], 1)
        torch.testing.assert_close(out[b], layer(alone, mask=Causal())[0, length:], **TIGHT)
        by_itself = KVCache()
        layer(prompts[b : b + 1, :length], mask=Causal(), cache=by_itself)
        one = feed(layer, rest[b : b + 1], by_itself, [1, 1, 3], mask=Causal())
        torch.testing.assert_close(out[b : b + 1], one, **TIGHT)


def test_the_gaps_of_short_rows_hold_zeros() -> None:
    """Not memory as it comes: on some devices a NaN there would reach every row."""
    cache = KVCache()
    ones = torch.ones(2, 1, 3, 2)
    cache.append(ones, ones)
    cache.truncate(torch.tensor([3, 1]))
    cache.append(ones, ones)
    assert cache.keys.shape[2] == 6
    assert cache.keys[1, :, 4:].abs().sum() == 0
    assert cache.values[1, :, 4:].abs().sum() == 0


def test_rows_can_be_cut_again_by_one_number_and_each_by_its_own() -> None:
    layer, x, more = new_layer("rotary"), text(7), text(3)
    cache = KVCache()
    layer(x, mask=Causal(), cache=cache)
    cache.truncate(torch.tensor([6, 3]))
    cache.truncate(5)
    assert cache.lengths.tolist() == [5, 3]
    assert len(cache) == 5
    cache.truncate(torch.tensor([2, 3]))
    assert cache.lengths.tolist() == [2, 3]
    out = layer(more, mask=Causal(), cache=cache)
    for b, length in enumerate((2, 3)):
        alone = torch.cat([x[b : b + 1, :length], more[b : b + 1]], 1)
        torch.testing.assert_close(out[b], layer(alone, mask=Causal())[0, length:], **TIGHT)


def test_reorder_continues_the_chosen_beams() -> None:
    layer, x, more = new_layer("rotary"), text(5, batch=3), text(2, batch=4)
    cache = KVCache()
    layer(x, mask=Causal(), cache=cache)
    rows = torch.tensor([2, 0, 0, 1])
    cache.reorder(rows)
    out = layer(more, mask=Causal(), cache=cache)
    whole = layer(torch.cat([x[rows], more], 1), mask=Causal())
    torch.testing.assert_close(out, whole[:, 5:], **TIGHT)


def test_reorder_takes_lengths_and_positions_along() -> None:
    layer, x, more = new_layer("rotary"), text(5, batch=2), text(2, batch=2)
    rows = torch.tensor([1, 0])
    cache = KVCache()
    layer(x, mask=Causal(), cache=cache)
    cache.truncate(torch.tensor([5, 2]))
    cache.reorder(rows)
    assert cache.lengths.tolist() == [2, 5]
    out = layer(more, mask=Causal(), cache=cache)
    alone = layer(torch.cat([x[1:, :2], more[:1]], 1), mask=Causal())
    torch.testing.assert_close(out[:1], alone[:, 2:], **TIGHT)

    positions = torch.tensor([[0, 1, 2, 3, 4], [3, 5, 6, 8, 9]])
    cache = KVCache()
    layer(x, mask=Causal(), cache=cache, positions=positions)
    cache.reorder(rows)
    out = layer(more, mask=Causal(), cache=cache)
    together = torch.cat([positions[rows], torch.tensor([[10, 11], [5, 6]])], 1)
    whole = layer(torch.cat([x[rows], more], 1), mask=Causal(), positions=together)
    torch.testing.assert_close(out, whole[:, 5:], **TIGHT)
    KVCache().reorder(rows)  # nothing to reorder


@pytest.mark.parametrize("encoding", ["none", "rotary", "alibi", "relative"])
@pytest.mark.parametrize("batched", [False, True])
def test_positions_are_remembered_over_calls(encoding: str, batched: bool) -> None:
    """The keys of a call stand where its queries stood, also for the queries of later calls."""
    layer, x = new_layer(encoding), text(7)
    positions = torch.tensor([0, 2, 3, 7, 8, 11, 12])
    if batched:  # padding on the left: the second row starts later
        positions = torch.stack([torch.arange(7), torch.tensor([0, 0, 0, 1, 2, 3, 4])])
    cache = KVCache()
    whole = layer(x, mask=Causal() & Window(5), positions=positions)
    parts = zip(x.split([3, 1, 3], 1), positions.split([3, 1, 3], -1), strict=True)
    out = torch.cat([layer(a, mask=Causal() & Window(5), positions=p, cache=cache) for a, p in parts], 1)
    torch.testing.assert_close(out, whole, **TIGHT)
    # without positions the next tokens follow the last one
    more = text(2)
    after = positions[..., -1:] + torch.tensor([1, 2])
    whole = layer(torch.cat([x, more], 1), mask=Causal(), positions=torch.cat([positions, after], -1))
    torch.testing.assert_close(layer(more, mask=Causal(), cache=cache), whole[:, 7:], **TIGHT)


def test_positions_may_come_after_tokens_without() -> None:
    layer, x = new_layer("rotary"), text(5)
    cache = KVCache()
    layer(x[:, :3], mask=Causal(), cache=cache)
    out = layer(x[:, 3:], mask=Causal(), cache=cache, positions=torch.tensor([7, 9]))
    whole = layer(x, mask=Causal(), positions=torch.tensor([0, 1, 2, 7, 9]))
    torch.testing.assert_close(out, whole[:, 3:], **TIGHT)


def test_truncating_all_forgets_the_positions_too() -> None:
    layer, x = new_layer("rotary"), text(5)
    cache = KVCache()
    layer(x[:, :3], cache=cache, positions=torch.tensor([5, 7, 9]))
    cache.truncate(0)
    torch.testing.assert_close(layer(x, mask=Causal(), cache=cache), layer(x, mask=Causal()), **TIGHT)
    cache.clear()
    layer(x[:, :3], mask=Causal(), cache=cache, positions=torch.tensor([5, 7, 9]))
    cache.truncate(2)
    out = layer(x[:, 2:], mask=Causal(), cache=cache)
    whole = layer(x, mask=Causal(), positions=torch.tensor([5, 7, 8, 9, 10]))
    torch.testing.assert_close(out, whole[:, 2:], **TIGHT)


@pytest.mark.parametrize("encoding", ["none", "rotary", "alibi"])
def test_cross_attention_computes_keys_and_values_once(encoding: str) -> None:
    layer, x, memory = new_layer(encoding), text(5), text(7)
    calls = {"k_proj": 0, "v_proj": 0, "q_proj": 0}
    for name in calls:

        def count(*_: object, name: str = name) -> None:
            calls[name] += 1

        getattr(layer, name).register_forward_hook(count)
    cache = KVCache(once=True)
    steps = [layer(x[:, i : i + 1], memory, cache=cache) for i in range(5)]
    assert calls == {"k_proj": 1, "v_proj": 1, "q_proj": 5}
    for i, step in enumerate(steps):
        torch.testing.assert_close(step, layer(x[:, i : i + 1], memory), **TIGHT)
    assert len(cache) == 7
    # after the first call the memory may be left out
    torch.testing.assert_close(layer(x[:, :1], cache=cache), steps[0], **TIGHT)
    cache.clear()
    assert not cache.complete
    other = text(3)
    torch.testing.assert_close(layer(x, other, cache=cache), layer(x, other), **TIGHT)


def test_once_takes_one_append() -> None:
    cache = KVCache(once=True)
    token = torch.zeros(1, 2, 3, 5)
    cache.append(token, token)
    with pytest.raises(ValueError, match=r"KVCache\(once=True\): expected one append, received a second one"):
        cache.append(token, token)


def test_weights_over_a_cache_are_those_of_the_whole() -> None:
    layer, x = new_layer("rotary"), text(7)
    cache = KVCache()
    layer(x[:, :4], mask=Causal(), cache=cache)
    out, weights = layer(x[:, 4:], mask=Causal(), cache=cache, need_weights=True)
    whole, all_weights = layer(x, mask=Causal(), need_weights=True)
    torch.testing.assert_close(out, whole[:, 4:], **TIGHT)
    torch.testing.assert_close(weights, all_weights[:, :, 4:], **TIGHT)


def test_weights_over_a_rolling_cache_are_those_of_the_whole() -> None:
    """They are taken before the cache moves what it keeps."""
    layer, x = new_layer(), text(8)
    for window, keep_first in ((5, 0), (5, 2), (1, 0)):
        cache = RollingCache(window, keep_first)
        out, weights = layer(x[:, :7], cache=cache, need_weights=True)
        whole, all_weights = layer(x, mask=visible(window, keep_first), need_weights=True)
        torch.testing.assert_close(out, whole[:, :7], **TIGHT)
        torch.testing.assert_close(weights, all_weights[:, :, :7, :7], **TIGHT)
        held = [*range(keep_first), *range(8 - window, 8)]
        out, weights = layer(x[:, 7:], cache=cache, need_weights=True)
        torch.testing.assert_close(weights, all_weights[:, :, 7:, held], **TIGHT)


@pytest.mark.parametrize("encoding", ["none", "rotary", "alibi"])
def test_a_memory_that_grows_gives_what_the_whole_gives(encoding: str) -> None:
    """Cross attention to what has come so far: new keys go on where the cached ones end."""
    layer, x, memory = new_layer(encoding), text(2), text(7)
    cache = KVCache()
    layer(x, memory[:, :3], cache=cache)
    torch.testing.assert_close(layer(x, memory[:, 3:], cache=cache), layer(x, memory), **TIGHT)


def test_memories_of_different_lengths_are_each_as_if_alone() -> None:
    layer, x, memory = new_layer(), text(2), text(7)
    cache = KVCache(once=True)
    layer(x, memory, cache=cache)
    cache.truncate(torch.tensor([7, 3]))
    out = layer(x, cache=cache)
    torch.testing.assert_close(out[1:], layer(x[1:], memory[1:, :3]), **TIGHT)


@pytest.mark.parametrize("encoding", ["none", "rotary"])
def test_a_query_of_cross_attention_may_say_where_it_stands(encoding: str) -> None:
    layer, x, memory = new_layer(encoding), text(2), text(7)
    cache = KVCache(once=True)
    positions = torch.tensor([5, 3])
    expected = layer(x, memory, positions=positions, mask=Causal())
    torch.testing.assert_close(layer(x, memory, positions=positions, mask=Causal(), cache=cache), expected, **TIGHT)
    torch.testing.assert_close(layer(x, positions=positions, mask=Causal(), cache=cache), expected, **TIGHT)


@pytest.mark.parametrize("new", [KVCache, lambda: RollingCache(5, 1)], ids=["KVCache", "RollingCache"])
def test_a_call_that_fails_leaves_the_cache_as_it_was(new: Callable) -> None:
    layer, x = new_layer("rotary"), text(7)
    cache = new()
    layer(x[:, :3], mask=Causal(), cache=cache)
    with pytest.raises(ValueError, match="Keep: expected a mask that broadcasts"):
        layer(x[:, 3:], mask=torch.ones(11, 13, dtype=torch.bool), cache=cache)
    assert len(cache) == 3
    out = layer(x[:, 3:], mask=Causal(), cache=cache)
    torch.testing.assert_close(out, feed(layer, x, new(), [3, 4], mask=Causal())[:, 3:], **TIGHT)


@pytest.mark.parametrize("new", [KVCache, lambda: RollingCache(5, 1)], ids=["KVCache", "RollingCache"])
@pytest.mark.parametrize("encoding", ["none", "rotary"])
def test_a_text_without_a_batch(encoding: str, new: Callable) -> None:
    layer, x = new_layer(encoding), text(7, batch=1)
    whole = feed(layer, x, new(), [3, 4], mask=Causal())[0]
    for keys in (False, True):  # the key is the query, said or not
        cache = new()
        parts = x[0].split([3, 4])
        out = torch.cat([layer(p, *([p, p] if keys else []), mask=Causal(), cache=cache) for p in parts])
        torch.testing.assert_close(out, whole, **TIGHT)


def test_masks_of_slots_count_cached_and_new_keys() -> None:
    layer, x = new_layer("rotary"), text(7)
    keep = torch.rand(B, 7) < 0.6
    ids = torch.tensor([0, 0, 0, 1, 1, 1, 1])
    for mask, part in (
        (Padding(keep=keep), Padding(keep=keep)),
        (regard.masks.Documents(ids), regard.masks.Documents(ids)),
    ):
        cache = KVCache()
        layer(x[:, :5], cache=cache)
        out = layer(x[:, 5:], cache=cache, mask=Causal() & part)
        torch.testing.assert_close(out, layer(x, mask=Causal() & mask)[:, 5:], **TIGHT)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("new", [KVCache, lambda: RollingCache(5, 1)], ids=["KVCache", "RollingCache"])
def test_modes_without_gradient(mode: Callable, new: Callable) -> None:
    layer, x = new_layer("rotary"), text(7)
    with torch.enable_grad(), mode():
        out = feed(layer, x, new(), [3, 1, 3], mask=Causal())
    assert not out.requires_grad
    torch.testing.assert_close(out.clone(), feed(layer, x, new(), [7], mask=Causal()), **TIGHT)


def test_a_cache_of_no_grad_goes_on_in_inference_mode() -> None:
    layer, x = new_layer("rotary"), text(7)
    cache = KVCache()
    layer(x[:, :3], mask=Causal(), cache=cache)
    with torch.inference_mode():
        out = layer(x[:, 3:], mask=Causal(), cache=cache)
    torch.testing.assert_close(out.clone(), layer(x, mask=Causal())[:, 3:], **TIGHT)


@pytest.mark.on_meta
def test_gradient_is_refused() -> None:
    layer, x = new_layer(), text(3)
    for cache in (KVCache(), RollingCache(3)):
        with (
            torch.enable_grad(),
            pytest.raises(ValueError, match=r"cache: expected keys and values without gradient.*torch.no_grad\(\)"),
        ):
            layer(x, cache=cache)
        assert len(cache) == 0
    frozen = new_layer().requires_grad_(False)
    with torch.enable_grad():
        assert frozen(x, cache=KVCache()).shape == x.shape


@pytest.mark.on_meta
@pytest.mark.parametrize(
    "keys, values, error, words",
    [
        ((2, 3, 1), (2, 3, 1), ValueError, r"cache: expected keys \(B, G, N, D\) and values .*received \(2, 3, 1\)"),
        ((2, 3, 1, 4), (2, 3, 2, 5), ValueError, r"received \(2, 3, 1, 4\) and \(2, 3, 2, 5\)"),
        ((1, 3, 1, 4), (1, 3, 1, 5), ValueError, r"cached keys: .*width \(2, 3, 4\), received \(1, 3, 4\); remedy"),
        ((2, 2, 1, 4), (2, 2, 1, 5), ValueError, r"cached keys: .*width \(2, 3, 4\), received \(2, 2, 4\)"),
        ((2, 3, 1, 7), (2, 3, 1, 5), ValueError, r"cached keys: .*width \(2, 3, 4\), received \(2, 3, 7\)"),
        ((2, 3, 1, 4), (2, 3, 1, 7), ValueError, r"cached values: .*width \(2, 3, 5\), received \(2, 3, 7\)"),
    ],
)
def test_another_shape_is_refused(
    keys: tuple[int, ...], values: tuple[int, ...], error: type[Exception], words: str
) -> None:
    cache = KVCache()
    cache.append(torch.zeros(2, 3, 2, 4), torch.zeros(2, 3, 2, 5))
    with pytest.raises(error, match=words):
        cache.append(torch.zeros(keys), torch.zeros(values))
    assert len(cache) == 2


@pytest.mark.of_cpu("the messages name the CPU")
@pytest.mark.parametrize("cache", [KVCache(), RollingCache(3)], ids=["KVCache", "RollingCache"])
def test_another_dtype_or_device_is_refused(cache: KVCache | RollingCache) -> None:
    token = torch.zeros(1, 2, 1, 3)
    cache.append(token, token)
    with pytest.raises(TypeError, match=r"cached keys: expected torch.float32 on cpu, received torch.float64 on cpu"):
        cache.append(token.double(), token.double())
    with pytest.raises(TypeError, match=r"cached values: expected torch.float32 on cpu, received torch.float16 on cpu"):
        cache.append(token, token.half())
    with pytest.raises(TypeError, match=r"cached keys: expected torch.float32 on cpu, received torch.float32 on meta"):
        cache.append(token.to("meta"), token.to("meta"))
    assert len(cache) == getattr(cache, "seen", 1) == 1


def test_cache_sizes_are_checked() -> None:
    for wrong in ({"capacity": -1}, {"limit": 0}, {"capacity": 5, "limit": 3}):
        with pytest.raises(ValueError, match=r"KVCache: expected a capacity of at least 0 and a limit .*received"):
            KVCache(**wrong)
    for wrong in ({"window": 0}, {"window": 3, "keep_first": -1}):
        with pytest.raises(ValueError, match=r"RollingCache: expected a window of at least 1 and .*received window="):
            RollingCache(**wrong)


@pytest.mark.parametrize(
    "length, error, words",
    [
        (6, ValueError, "truncate: expected a length from 0 to 5, received 6"),
        (-1, ValueError, "truncate: expected a length from 0 to 5, received -1"),
        (2.0, TypeError, r"truncate: expected an integer, or an integer tensor \(B,\), received 2.0"),
        (torch.tensor([2.0, 1.0]), TypeError, "truncate: expected an integer"),
        (torch.tensor([True, False]), TypeError, "truncate: expected an integer"),
        (torch.tensor([2]), ValueError, r"truncate: expected a length per row, \(B,\), received shape \(1,\)"),
        (torch.tensor([2, 6]), ValueError, r"truncate: expected lengths .*\[5, 5\], received \[2, 6\]"),
        (torch.tensor([-1, 2]), ValueError, r"truncate: expected lengths .*\[5, 5\], received \[-1, 2\]"),
    ],
)
def test_truncate_checks(length: int | Tensor, error: type[Exception], words: str) -> None:
    cache = KVCache()
    cache.append(torch.zeros(2, 1, 5, 3), torch.zeros(2, 1, 5, 3))
    with pytest.raises(error, match=words):
        cache.truncate(length)
    assert len(cache) == 5


def test_positions_and_rows_of_different_lengths_do_not_mix() -> None:
    layer, x = new_layer(), text(3)
    cache = KVCache()
    layer(x, cache=cache)
    cache.truncate(torch.tensor([3, 1]))
    with pytest.raises(ValueError, match="positions: expected none: rows of different lengths are numbered"):
        layer(x, cache=cache, positions=torch.arange(3))
    cache = KVCache()
    layer(x, cache=cache, positions=torch.arange(3))
    with pytest.raises(ValueError, match="truncate: expected one length: this cache was given positions"):
        cache.truncate(torch.tensor([3, 1]))


@pytest.mark.on_meta
@pytest.mark.parametrize(
    "positions, error, words",
    [
        ([0, 1, 2], TypeError, r"positions: expected integers \(N,\) or \(B, N\) for 3 new tokens, received list"),
        (torch.arange(3.0), TypeError, "positions: .*received dtype torch.float32"),
        (torch.arange(4), ValueError, r"positions: .*received shape \(4,\)"),
        (torch.zeros(1, 1, 3).long(), ValueError, r"positions: .*received shape \(1, 1, 3\)"),
        (torch.zeros(3, 3).long(), ValueError, r"positions: .*received shape \(3, 3\)"),
    ],
)
def test_wrong_positions_leave_a_cache_as_it_was(positions: object, error: type[Exception], words: str) -> None:
    layer, x = new_layer("rotary"), text(5)
    cache = KVCache()
    layer(x[:, :2], mask=Causal(), cache=cache)
    with pytest.raises(error, match=words):
        layer(x[:, 2:], cache=cache, positions=positions)
    out = layer(x[:, 2:], mask=Causal(), cache=cache)
    torch.testing.assert_close(out, layer(x, mask=Causal())[:, 2:], **TIGHT)


@pytest.mark.parametrize("new", [KVCache, lambda: RollingCache(4, 1)], ids=["KVCache", "RollingCache"])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c))], ids=["deepcopy", "pickle"])
def test_a_copy_goes_its_own_way(new: Callable, copied: Callable) -> None:
    layer, x, other = new_layer("rotary"), text(9), text(2)
    cache = new()
    layer(x[:, :7], mask=Causal(), cache=cache)
    twin = copied(cache)
    assert repr(twin) == repr(cache)
    layer(other, mask=Causal(), cache=twin)
    expected = new()
    whole = feed(layer, x, expected, [7, 2], mask=Causal())
    torch.testing.assert_close(layer(x[:, 7:], mask=Causal(), cache=cache), whole[:, 7:], **TIGHT)


# ----------------------------------------------------------------------------------------------------
# Whose cache it is, and of what


@pytest.mark.parametrize("new", [KVCache, lambda: RollingCache(5, 1)], ids=["KVCache", "RollingCache"])
def test_one_cache_for_two_layers_is_refused(new: Callable) -> None:
    first, second, x = new_layer("rotary"), new_layer("rotary"), text(5)
    cache = new()
    first(x[:, :3], mask=Causal(), cache=cache)
    words = r"cache: expected one for each layer, received one with 3 tokens of another layer; remedy: \[KVCache\(\)"
    with pytest.raises(ValueError, match=words):
        second(x[:, :3], mask=Causal(), cache=cache)
    expected = feed(first, x, new(), [3, 2], mask=Causal())
    torch.testing.assert_close(first(x[:, 3:], mask=Causal(), cache=cache), expected[:, 3:], **TIGHT)
    with pytest.raises(ValueError, match="expected one for each layer"):
        copy.deepcopy(first)(x[:, :1], cache=cache)
    cache.clear()  # as the remedy says
    torch.testing.assert_close(second(x, cache=cache), second(x, cache=new()), **TIGHT)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c))], ids=["deepcopy", "pickle"])
def test_copies_of_a_cache_go_with_copies_of_the_layer(copied: Callable) -> None:
    layer, x = new_layer("rotary"), text(5)
    cache = KVCache()
    layer(x[:, :3], mask=Causal(), cache=cache)
    twin, kept = copied((layer, cache))
    torch.testing.assert_close(twin(x[:, 3:], mask=Causal(), cache=kept), layer(x, mask=Causal())[:, 3:], **TIGHT)
    with pytest.raises(ValueError, match="expected one for each layer"):
        layer(x[:, 3:], mask=Causal(), cache=kept)


def test_a_layer_that_is_gone_does_not_keep_its_cache() -> None:
    layer, x = new_layer(), text(5)
    twin, cache = copy.deepcopy(layer), KVCache()
    layer(x[:, :3], mask=Causal(), cache=cache)
    expected = layer(x, mask=Causal())
    del layer
    gc.collect()
    torch.testing.assert_close(twin(x[:, 3:], mask=Causal(), cache=cache), expected[:, 3:], **TIGHT)


def test_a_call_that_failed_does_not_own_the_cache() -> None:
    first, second, x = new_layer(), new_layer(), text(5)
    cache = KVCache()
    with pytest.raises(ValueError, match="Keep: expected a mask"):
        first(x, mask=torch.ones(11, 13, dtype=torch.bool), cache=cache)
    second(x, cache=cache)
    second(x, cache=cache)


def test_other_weights_in_a_functional_call_are_the_same_layer() -> None:
    layer, x = new_layer("rotary"), text(5)
    weights = {name: parameter.clone() for name, parameter in layer.named_parameters()}
    cache = KVCache()
    parts = [
        torch.func.functional_call(layer, weights, (part,), {"mask": Causal(), "cache": cache})
        for part in x.split([3, 2], 1)
    ]
    torch.testing.assert_close(torch.cat(parts, 1), layer(x, mask=Causal()), **TIGHT)


@pytest.mark.parametrize("same", ["object", "view", "numbers", "unbatched"])
@pytest.mark.parametrize("new", [KVCache, lambda: RollingCache(20)], ids=["KVCache", "RollingCache"])
def test_a_memory_that_is_appended_again_is_noticed(new: Callable, same: str) -> None:
    layer, x, memory = new_layer("rotary"), text(1, batch=1), text(7, batch=1)
    cache = new()
    layer(x, memory, cache=cache)
    again = {"object": memory, "view": memory[:, :], "numbers": memory.clone(), "unbatched": memory[0]}[same]
    words = r"cache: expected new keys, received the memory that it holds already, \(1, 7, 12\).*KVCache\(once=True\)"
    with pytest.raises(ValueError, match=words):
        layer(x if again.dim() == 3 else x[0], again, cache=cache)
    assert len(cache) == 7


def test_a_memory_that_grows_by_equal_pieces_is_said_to_grow() -> None:
    layer, x, silence = new_layer(), text(2), torch.zeros(B, 3, W, dtype=torch.float64)
    cache = KVCache(once=False)
    for _ in range(2):
        out = layer(x, silence, cache=cache)
    torch.testing.assert_close(out, layer(x, torch.cat([silence, silence], 1)), **TIGHT)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_another_memory_is_not_answered_by_the_first(mode: Callable) -> None:
    layer, x = new_layer("rotary"), text(2)
    with mode():
        memory = text(7)
        cache = KVCache(once=True)
        first = layer(x, memory, cache=cache)
        for same in (memory, memory.clone(), memory[:, :], memory.transpose(1, 2).contiguous().transpose(1, 2)):
            torch.testing.assert_close(layer(x, same, cache=cache), first, **TIGHT)
        changed, swapped = memory.clone(), memory.flip(1)
        changed[1, 6, 11] += 1e-9
        words = (
            r"key, value: expected the memory that the cache was filled with, or none, received another one.*clear\(\)"
        )
        for other in (changed, swapped, text(7), text(5)):
            with pytest.raises(ValueError, match=words):
                layer(x, other, cache=cache)
        with pytest.raises(ValueError, match=words):
            layer(x, memory, changed, cache=cache)  # other values
        torch.testing.assert_close(layer(x, cache=cache), first, **TIGHT)
        cache.clear()
        torch.testing.assert_close(layer(x, changed, cache=cache), layer(x, changed), **TIGHT)


def test_a_memory_that_was_changed_in_place_is_another() -> None:
    layer, x, memory = new_layer(), text(2), text(7)
    cache = KVCache(once=True)
    layer(x, memory, cache=cache)
    memory += 1
    with pytest.raises(ValueError, match="received another one"):
        layer(x, memory, cache=cache)


def test_beams_take_their_memory_along() -> None:
    layer, x, memory = new_layer(), text(1, batch=3), text(7)
    cache = KVCache(once=True)
    layer(x[:2], memory, cache=cache)
    rows = torch.tensor([1, 1, 0])
    cache.reorder(rows)
    torch.testing.assert_close(layer(x, memory[rows], cache=cache), layer(x, memory[rows]), **TIGHT)
    with pytest.raises(ValueError, match="received another one"):
        layer(x, memory[[0, 1, 0]], cache=cache)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_memories_of_any_dtype_are_compared(dtype: torch.dtype) -> None:
    layer, x, memory = new_layer().to(dtype), text(2).to(dtype), text(7).to(dtype)
    cache = KVCache(once=True)
    layer(x, memory, cache=cache)
    layer(x, memory.clone(), cache=cache)
    with pytest.raises(ValueError, match="received another one"):
        layer(x, memory + 1, cache=cache)


def test_a_cache_that_is_filled_once_is_not_for_self_attention() -> None:
    layer, x = new_layer(), text(5)
    cache = KVCache(once=True)
    layer(x[:, :3], mask=Causal(), cache=cache)
    with pytest.raises(
        ValueError, match=r"KVCache\(once=True\): expected cross attention.*self attention, a second time"
    ):
        layer(x[:, 3:], mask=Causal(), cache=cache)


@pytest.mark.slow
def test_a_compiled_layer_takes_caches() -> None:
    layer, x = new_layer(), text(5)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    cache = KVCache()
    out = torch.cat([compiled(part, mask=Causal(), cache=cache) for part in x.split([3, 2], 1)], 1)
    torch.testing.assert_close(out, layer(x, mask=Causal()), **TIGHT)


# ----------------------------------------------------------------------------------------------------
# RollingCache


TOKENS = 23


def visible(window: int, keep_first: int) -> Mask:
    return Window(window) | (Causal() & Prefix(keep_first)) if keep_first else Window(window)


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("keep_first", [0, 1, 4])
@pytest.mark.parametrize("window", [1, 5, 8])
def test_rolling_is_the_same_by_any_pieces(encoding: str, window: int, keep_first: int) -> None:
    layer, x = new_layer(encoding), text(TOKENS)
    one_by_one = feed(layer, x, RollingCache(window, keep_first), [1] * TOKENS)
    for sizes in (in_pieces(TOKENS, 3), in_pieces(TOKENS, 7), [TOKENS], [2, 11, 1, 9]):
        cache = RollingCache(window, keep_first)
        torch.testing.assert_close(feed(layer, x, cache, sizes), one_by_one, **TIGHT)
        assert cache.seen == TOKENS
        assert len(cache) == keep_first + window - 1


@pytest.mark.parametrize("keep_first", [0, 1, 4])
@pytest.mark.parametrize("window", [1, 5, 8])
def test_rolling_without_positions_is_a_mask(window: int, keep_first: int) -> None:
    layer, x = new_layer(), text(TOKENS)
    expected = layer(x, mask=visible(window, keep_first))
    for sizes in ([1] * TOKENS, in_pieces(TOKENS, 7), [TOKENS]):
        torch.testing.assert_close(feed(layer, x, RollingCache(window, keep_first), sizes), expected, **TIGHT)


@pytest.mark.parametrize("encoding", [name for name in ENCODINGS if name != "none"])
@pytest.mark.parametrize("window", [1, 5, 8])
def test_rolling_that_keeps_no_first_is_a_window(encoding: str, window: int) -> None:
    """Positions count from the start of what is held, but a score depends on the distance alone."""
    layer, x = new_layer(encoding), text(TOKENS)
    expected = layer(x, mask=Window(window))
    torch.testing.assert_close(feed(layer, x, RollingCache(window, 0), [1] * TOKENS), expected, **TIGHT)


@pytest.mark.parametrize("encoding", ["rotary", "alibi", "relative"])
def test_rolling_sees_each_token_where_its_slot_stands(encoding: str) -> None:
    """The definition, literally: for each token, the first tokens and the last of the window, numbered 0, 1, 2, ..."""
    window, keep_first = 5, 2
    layer, x = new_layer(encoding), text(TOKENS)
    out = feed(layer, x, RollingCache(window, keep_first), in_pieces(TOKENS, 7))
    for i in range(TOKENS):
        seen = sorted({*range(min(keep_first, i + 1)), *range(max(0, i + 1 - window), i + 1)})
        torch.testing.assert_close(out[:, i], layer(x[:, seen], mask=Causal())[:, -1], **TIGHT)


def test_a_mask_of_the_callers_joins_that_of_the_cache() -> None:
    layer, x = new_layer(), text(11)
    cache = RollingCache(5, 2)
    feed(layer, x[:, :8], cache, [8])  # holds tokens 0, 1, 4, 5, 6, 7
    held = len(cache)
    hidden = torch.zeros(3, held + 3, dtype=torch.bool)
    hidden[:, -3] = True  # token 8
    out = layer(x[:, 8:], cache=cache, mask=regard.masks.Hide(hidden))
    whole = torch.zeros(11, 11, dtype=torch.bool)
    whole[:, 8] = True
    torch.testing.assert_close(out, layer(x, mask=visible(5, 2) & regard.masks.Hide(whole))[:, 8:], **TIGHT)


def test_rolling_memory_is_bounded() -> None:
    cache = RollingCache(13, 3)
    layer = new_layer("rotary")
    x = text(500, batch=1)
    most = 0
    for i in range(500):
        layer(x[:, i : i + 1], cache=cache)
        most = max(most, cache.keys.untyped_storage().nbytes())
        assert len(cache) <= 15
    assert most <= 2 * 16 * G * D * 8
    assert cache.seen == 500
    assert repr(cache) == "RollingCache(window=13, keep_first=3, holds 15 of 500 tokens)"


def test_rolling_lets_go_of_the_room_of_a_long_chunk() -> None:
    cache = RollingCache(13, 3)
    layer, x = new_layer("rotary"), text(500, batch=1)
    layer(x, cache=cache)
    layer(x[:, :1], cache=cache)
    assert cache.keys.untyped_storage().nbytes() <= 2 * 16 * G * D * 8
    assert cache.values.untyped_storage().nbytes() <= 2 * 16 * G * 5 * 8


def test_rolling_positions_never_pass_what_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """One by one, no query or key is turned beyond `keep_first + window`, however long the text."""
    greatest = 0
    turn = Rotary.forward

    def spy(self: Rotary, x: Tensor, positions: Tensor | int = 0, *, length: int | None = None) -> Tensor:
        nonlocal greatest
        last = int(positions.max()) if isinstance(positions, Tensor) else positions + x.shape[2] - 1
        greatest = max(greatest, last, (length or 0) - 1)
        return turn(self, x, positions, length=length)

    monkeypatch.setattr(Rotary, "forward", spy)
    layer, cache = new_layer("rotary"), RollingCache(5, 4)
    feed(layer, text(40), cache, [1] * 40)
    assert greatest == 5 + 4 - 1


def test_rolling_reorder_and_clear() -> None:
    layer, x, more = new_layer("rotary"), text(11), text(2)
    rows = torch.tensor([1, 0])
    cache = RollingCache(5, 2)
    layer(x, cache=cache)
    cache.reorder(rows)
    out = layer(more, cache=cache)
    expected = feed(layer, torch.cat([x[rows], more], 1), RollingCache(5, 2), [11, 2])
    torch.testing.assert_close(out, expected[:, 11:], **TIGHT)
    cache.clear()
    assert len(cache) == cache.seen == 0
    torch.testing.assert_close(layer(x, cache=cache), expected[rows][:, :11], **TIGHT)


def test_rolling_refuses_positions() -> None:
    with pytest.raises(ValueError, match="positions: expected none: a RollingCache numbers its slots itself"):
        new_layer()(text(3), cache=RollingCache(5), positions=torch.arange(3))


def test_rolling_keeps_a_failed_call_out_of_its_count() -> None:
    cache = RollingCache(5)
    with pytest.raises(ValueError, match="cache: expected keys"):
        cache.append(torch.zeros(1, 2, 3), torch.zeros(1, 2, 3))
    assert cache.seen == 0
