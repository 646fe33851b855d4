"""Longest common subsequences."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from regard.heads.analysis import alignment
from regard.heads.analysis.alignment import aligned, runs_of


def longest(a: str, b: str) -> int:
    """The length of a longest common subsequence, by the textbook's table."""
    table = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            table[i + 1][j + 1] = table[i][j] + 1 if x == y else max(table[i][j + 1], table[i + 1][j])
    return table[-1][-1]


@pytest.mark.parametrize("letters", ["ab", "abcdef"])
@pytest.mark.parametrize("seed", range(20))
def test_as_long_as_the_table_says(letters: str, seed: int) -> None:
    choose = random.Random(seed)
    a, b = ("".join(choose.choices(letters, k=choose.randrange(23))) for _ in range(2))
    pairs = aligned(a, b)
    assert all(a[i] == b[j] for i, j in pairs)
    assert all(i < k and j < m for (i, j), (k, m) in pairwise(pairs))
    assert len(pairs) == longest(a, b)


def test_texts_with_nothing_in_common() -> None:
    assert aligned("abc", "xyz") == []
    assert aligned("", "xyz") == []


def test_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alignment, "MOST", 8)
    with pytest.raises(
        ValueError, match=r"difference: expected texts that differ in at most .*, received 3 and 3; remedy"
    ):
        aligned("abc", "xyz")
    assert len(aligned("abcdefgh", "abcdefgh")) == 8  # what is the same does not count


def test_runs() -> None:
    assert runs_of([(0, 1), (1, 2), (3, 3), (4, 4)]) == [(0, 1, 2), (3, 3, 2)]
    assert runs_of([]) == []
