"""Lists of earlier copies by the native library are those that the measures find by torch operators."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from regard.kernels import native_library as library
from regard.kernels.copies import earlier_copies
from regard.kernels.reductions import flat_lists
from regard.measures import Duplicate, Induction, KeyLists, MeasureRun, Plane

pytestmark = pytest.mark.skipif(library.load() is None, reason="there is no native library")


def by_torch(ids: torch.Tensor, *measures: type[Induction] | type[Duplicate]) -> KeyLists:
    items, tokens = ids.shape
    positions = torch.arange(tokens)[None]
    plane = Plane(items, 1, tokens, tokens, positions, positions, torch.float32, ids=ids, key_ids=ids, text_ids=ids)
    run = MeasureRun([measure() for measure in measures], plane)
    reductions = [run.reduction(i) for i in range(len(measures))]
    return flat_lists(KeyLists.joined([x.lists for x in reductions if x is not None and x.lists is not None]))


def same(lists: KeyLists, expected: KeyLists) -> None:
    assert torch.equal(lists.keys, expected.keys)
    assert torch.equal(lists.begin, expected.begin)
    assert torch.equal(lists.end, expected.end)


def test_by_hand() -> None:
    ids = torch.tensor([[5, 3, 5, 5, 3]])
    lists = earlier_copies(ids, (1, 0))
    found = [[lists.keys[0, lists.begin[0, i, k] : lists.end[0, i, k]].tolist() for k in range(4)] for i in range(5)]
    assert found == [
        [[], [], [], []],
        [[], [], [], []],
        [[1], [], [0], []],  # the token after the first 5 is the query's neighbour; the first 5 is the first token
        [[1, 3], [1], [0, 2], []],
        [[2], [2], [1], [1]],
    ]


@settings(max_examples=200, deadline=None)
@given(
    items=st.integers(1, 3),
    tokens=st.integers(1, 41),
    kinds=st.integers(1, 11),
    seed=st.integers(0, 2**16),
    order=st.permutations([Induction, Duplicate]),
)
def test_as_torch_finds_them(items: int, tokens: int, kinds: int, seed: int, order: list[type]) -> None:
    ids = torch.randint(-kinds, kinds, (items, tokens), generator=torch.Generator().manual_seed(seed)) * 2**40
    same(earlier_copies(ids, [measure.after for measure in order]), by_torch(ids, *order))
    same(earlier_copies(ids, [order[0].after]), by_torch(ids, order[0]))


def test_ids_that_lie_apart() -> None:
    ids = torch.randint(0, 3, (2, 26), generator=torch.Generator().manual_seed(0))[:, ::2]
    same(earlier_copies(ids, (1, 0)), earlier_copies(ids.contiguous(), (1, 0)))


def test_a_wrong_size_is_refused() -> None:
    loaded = library.load()
    assert loaded is not None
    with pytest.raises(RuntimeError, match="another version"):
        loaded.copies(library.COPIES.pack(1, *[0] * 8))
    with pytest.raises(RuntimeError, match="out of range"):
        loaded.copies(library.COPIES.pack(library.COPIES.size, 0, 0, -1, 3, 1, 0, 0, 0))
