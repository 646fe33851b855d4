"""`KVCache.fork`: two caches with one beginning, each of which goes its own way; nothing of the beginning is copied."""

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
from regard import KVCache, MultiHeadAttention
from regard.cache import Stored
from regard.masks import Causal, Padding
from regard.positions import Rotary

pytestmark = pytest.mark.on_device

B, G, D, E = 2, 3, 7, 5


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.no_grad():
        yield


def tokens(count: int, batch: int = B) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, G, count, D), torch.randn(batch, G, count, E)


def storages(cache: KVCache) -> set[int]:
    """Where its tokens lie."""
    pairs = [*cache._segments()]
    return {part.numbers.untyped_storage().data_ptr() for pair in pairs for part in pair}


class Copied:
    """A cache that does the same with plain tensors, copied at every step."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values = keys, values

    def append(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values = torch.cat([self.keys, keys], 2), torch.cat([self.values, values], 2)

    def truncate(self, length: int) -> None:
        self.keys, self.values = self.keys[:, :, :length], self.values[:, :, :length]

    def reorder(self, rows: Tensor) -> None:
        self.keys, self.values = self.keys[rows], self.values[rows]

    def fork(self) -> Copied:
        return Copied(self.keys, self.values)


def assert_same(cache: KVCache, copied: Copied, tolerance: float) -> None:
    assert cache.keys is not None
    assert cache.values is not None
    assert len(cache) == copied.keys.shape[2]
    for ours, expected in ((cache.keys, copied.keys), (cache.values, copied.values)):
        ours = ours.plain() if isinstance(ours, Stored) else ours
        torch.testing.assert_close(ours, expected, atol=tolerance, rtol=0)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_whatever_is_done_to_one_is_not_seen_by_another(data: st.DataObject) -> None:
    """Random steps on a family of caches, beside the same on copies."""
    dtype = data.draw(st.sampled_from([None, "int8"]))
    torch.manual_seed(data.draw(st.integers(0, 9)))
    first = KVCache(dtype=dtype)
    start = tokens(data.draw(st.integers(1, 5)))
    first.append(*start)
    family = [(first, Copied(*start))]
    for _ in range(data.draw(st.integers(1, 12))):
        cache, copied = family[data.draw(st.integers(0, len(family) - 1))]
        step = data.draw(st.sampled_from(["append", "append", "fork", "fork", "truncate", "reorder"]))
        if step == "append":
            new = tokens(data.draw(st.integers(1, 4)))
            cache.append(*new)
            copied.append(*new)
        elif step == "fork":
            family.append((cache.fork(), copied.fork()))
        elif step == "truncate":
            length = data.draw(st.integers(0, len(cache)))
            cache.truncate(length)
            copied.truncate(length)
        else:
            rows = torch.tensor(data.draw(st.lists(st.integers(0, 1), min_size=2, max_size=2)))
            cache.reorder(rows)
            copied.reorder(rows)
        for each in family:
            assert_same(*each, 0.0 if dtype is None else 0.03)


@pytest.mark.parametrize("dtype", [None, "int8"])
def test_the_beginning_is_in_memory_once(dtype: str | None) -> None:
    cache = KVCache(dtype=dtype)
    cache.append(*tokens(301))
    forks = [cache.fork() for _ in range(5)]
    for _ in range(3):
        for each in (cache, *forks):
            each.append(*tokens(1))
    one = B * G * ((D + E) * 4 if dtype is None else D + E + 8)
    assert [each.nbytes for each in forks] == [3 * one] * 5
    assert [each.shared_nbytes for each in forks] == [301 * one] * 5
    assert cache.nbytes + cache.shared_nbytes == 304 * one
    assert len(set.union(*map(storages, (cache, *forks)))) == 2 * (1 + 6)  # the beginning, and six tails
    room = sum(x.nbytes for x in {id(y): y for each in forks for y in each._memories()}.values())
    assert room <= 5 * 2 * 3 * one


def test_to_grow_copies_nothing_but_the_tail() -> None:
    """While a fork appends, what it shares stays where it is, and the cache that it was forked from in its place."""
    cache = KVCache()
    cache.append(*tokens(301))
    before, fork = storages(cache), cache.fork()
    for _ in range(40):
        fork.append(*tokens(1))
        assert before < storages(fork)
    cache.append(*tokens(1))  # (grows by doubling)
    assert fork.nbytes == 40 * B * G * (D + E) * 4


@pytest.mark.parametrize("dtype", [None, "int8"])
@pytest.mark.parametrize("per_group", [1, 3, 17])
@pytest.mark.parametrize("queries", [1, 4, 23])
def test_attention_over_several_places(dtype: str | None, per_group: int, queries: int) -> None:
    cache = KVCache(dtype=dtype)
    cache.append(*tokens(301))
    fork = cache.fork()
    fork.append(*tokens(29))
    fork = fork.fork()
    k, v = fork.append(*tokens(queries))
    assert isinstance(k, Stored)
    assert isinstance(v, Stored)
    assert len(k.segments) == 3
    q = torch.randn(B, G * per_group, queries, D)
    masks: list[Any] = [None, Causal(), Causal() & Padding(lengths=torch.tensor([310, 330 + queries]))]
    for mask in masks:
        expected = regard.attend(
            q.double(), k.plain().double(), v.plain().double(), mask=mask, kernel="reference"
        ).float()
        for kernel in ("auto", "blockwise"):
            torch.testing.assert_close(regard.attend(q, k, v, mask=mask, kernel=kernel), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [None, "int8"])
def test_one_row_becomes_several(dtype: str | None) -> None:
    """To continue a prompt in several ways: its tokens lie in memory once, whatever the order of the rows."""
    cache = KVCache(dtype=dtype)
    cache.append(*tokens(301, batch=1))
    several = cache.fork(rows=4)
    assert several.lengths is not None
    assert several.lengths.tolist() == [301] * 4
    new = tokens(1, batch=4)
    several.append(*new)
    several.reorder(torch.tensor([3, 3, 0]))
    k, v = several.append(*tokens(1, batch=3))
    assert storages(cache) < storages(several)
    assert several.nbytes == 3 * 2 * G * ((D + E) * 4 if dtype is None else D + E + 8)
    assert isinstance(k, Stored)
    assert isinstance(v, Stored)
    torch.testing.assert_close(k.plain()[:, :, 301], new[0][[3, 3, 0], :, 0], atol=0.02, rtol=0)
    q = torch.randn(3, 2 * G, 1, D)
    expected = regard.attend(q, k.plain(), v.plain(), kernel="reference")
    torch.testing.assert_close(regard.attend(q, k, v), expected, rtol=1e-5, atol=1e-5)


def test_rows_of_different_lengths_are_copied() -> None:
    cache = KVCache()
    cache.append(*tokens(6))
    fork = cache.fork()
    fork.truncate(torch.tensor([6, 2]))
    new = tokens(1)
    keys, _ = fork.append(*new)
    torch.testing.assert_close(keys[1, :, 2], new[0][1, :, 0])
    assert cache.keys is not None
    assert not torch.equal(cache.keys[1, :, 2], new[0][1, :, 0])
    other = fork.fork()
    more = tokens(1)
    other.append(*more)
    assert fork.lengths is not None
    assert fork.lengths.tolist() == [7, 3]
    assert other.lengths is not None
    assert other.lengths.tolist() == [8, 4]
    assert not storages(fork) & storages(other)


def test_many_generations_are_gathered() -> None:
    cache = KVCache()
    for i in range(30):
        cache = cache.fork()
        cache.append(torch.full((1, 1, 1, 3), float(i)), torch.zeros(1, 1, 1, 2))
    assert cache.keys is not None
    assert cache.keys[0, 0, :, 0].tolist() == list(range(30))
    assert len(cache._prefix) <= 9


def test_empty_once_limit_and_positions() -> None:
    fork = KVCache(limit=5).fork()
    fork.append(*tokens(4))
    child = fork.fork()
    with pytest.raises(ValueError, match="at most 5 tokens"):
        child.append(*tokens(2))
    assert len(child.append(*tokens(1))[0][0, 0]) == 5
    once = KVCache(once=True)
    once.append(*tokens(3))
    assert once.fork().complete
    placed = KVCache()
    placed.number(3, torch.tensor([5, 7, 11]))
    placed.append(*tokens(3))
    other = placed.fork()
    slots = other.number(1)
    assert slots.key_positions is not None
    assert slots.key_positions.tolist() == [[5, 7, 11, 12]]
    assert placed.number(1, torch.tensor([20])).key_positions.tolist() == [[5, 7, 11, 20]]  # type: ignore[union-attr]


def test_rows_are_checked() -> None:
    cache = KVCache()
    cache.append(*tokens(3))
    with pytest.raises(
        ValueError, match=r"rows: expected a positive number, of a cache of one row.*of 2 rows.*reorder"
    ):
        cache.fork(rows=3)
    with pytest.raises(ValueError, match="rows: expected a positive number"):
        KVCache().fork(rows=0)


def test_copies_of_a_fork() -> None:
    cache = KVCache(dtype="int8")
    cache.append(*tokens(3))
    fork = cache.fork()
    fork.append(*tokens(2))
    other = copy.deepcopy(fork)
    other.append(*tokens(1))
    assert len(fork) == 5
    assert len(other) == 6


@pytest.mark.parametrize("dtype", [None, "int8"])
def test_through_the_layer(dtype: str | None) -> None:
    """Two continuations of one text, each as if it had been read from the start."""
    layer = MultiHeadAttention(24, 6, num_kv_heads=2, position_encoding=Rotary(4)).eval()
    text, ways = torch.randn(1, 11, 24), torch.randn(2, 5, 24)
    prompt = KVCache(dtype=dtype)
    layer(text, mask=Causal(), cache=prompt)
    for way in ways:
        fork = prompt.fork()
        out = torch.cat([layer(way[None, i : i + 1], cache=fork) for i in range(5)], 1)
        whole = layer(torch.cat([text, way[None]], 1), mask=Causal(), cache=KVCache())[:, 11:]
        torch.testing.assert_close(out, whole, atol=1e-5 if dtype is None else 0.03, rtol=1e-4)
    several = prompt.fork(rows=2)
    out = torch.cat([layer(ways[:, i : i + 1], cache=several) for i in range(5)], 1)
    whole = layer(torch.cat([text.expand(2, -1, -1), ways], 1), mask=Causal(), cache=KVCache())[:, 11:]
    torch.testing.assert_close(out, whole, atol=1e-5 if dtype is None else 0.03, rtol=1e-4)
    with regard.watch(layer) as record:
        watched = layer(ways[:, :1], cache=several)
    assert record[0].entropy.shape[0] == 2
    assert watched.shape == (2, 1, 24)
