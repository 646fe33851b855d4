"""Where two texts share tokens: a longest common subsequence."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from regard.errors import bad_value

__all__ = ["aligned", "runs_of"]

MOST = 2**31  # bits of memory for what differs of two texts: some 46,000 tokens each


def aligned(a: Sequence[Hashable], b: Sequence[Hashable]) -> list[tuple[int, int]]:
    """The places (in a, in b) of a longest common subsequence, in rising order.

    >>> aligned("the cat sat".split(), "the old cat sat down".split())
    [(0, 0), (1, 2), (2, 3)]
    """
    same = _common(a, b)
    last = _common(a[same:][::-1], b[same:][::-1])
    begin = [(i, i) for i in range(same)]
    end = [(len(a) - i, len(b) - i) for i in range(last, 0, -1)]
    middle = _longest(a[same : len(a) - last], b[same : len(b) - last])
    return begin + [(same + i, same + j) for i, j in middle] + end


def _common(a: Sequence[Hashable], b: Sequence[Hashable]) -> int:
    """How many tokens two texts have in common from their beginning."""
    pairs = zip(a, b, strict=False)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))


def _longest(a: Sequence[Hashable], b: Sequence[Hashable]) -> list[tuple[int, int]]:
    """The same by rows of bits (Crochemore et al. 2001): row i has a 0 for each token of a by which the longest common
    subsequence with the first i tokens of b grows."""
    if not a or not b:
        return []
    if len(a) * len(b) > MOST:
        raise bad_value(
            "difference",
            expected="texts that differ in at most some 46,000 tokens",
            received=f"{len(a):,} and {len(b):,}",
            remedy="shorter texts",
        )
    places: dict[Hashable, int] = {}
    for i, token in enumerate(a):
        places[token] = places.get(token, 0) | 1 << i
    every = (1 << len(a)) - 1
    rows = [every]
    for token in b:
        row, here = rows[-1], places.get(token, 0)
        rows.append(((row + (row & here)) | (row & ~here)) & every)
    pairs: list[tuple[int, int]] = []
    i, j = len(a) - 1, len(b)
    while i >= 0 and j > 0:
        if rows[j] >> i & 1:  # token i adds nothing
            i -= 1
        elif not rows[j - 1] >> i & 1:  # it did before token j of b
            j -= 1
        else:
            pairs.append((i, j - 1))
            i, j = i - 1, j - 1
    return pairs[::-1]


def runs_of(pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Pairs as runs (first in a, first in b, length) in which both rise by one.

    >>> runs_of([(0, 0), (1, 2), (2, 3)])
    [(0, 0, 1), (1, 2, 2)]
    """
    runs: list[tuple[int, int, int]] = []
    for i, j in pairs:
        if runs and (i, j) == (runs[-1][0] + runs[-1][2], runs[-1][1] + runs[-1][2]):
            runs[-1] = (*runs[-1][:2], runs[-1][2] + 1)
        else:
            runs.append((i, j, 1))
    return runs
