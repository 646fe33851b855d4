"""Attention on given pairs of tokens: a list of keys for each query.

Letters: B batch, H query heads, N queries, M keys, K keys of a query; c, h, n, m the same within one strip.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from regard.errors import bad_type, bad_value, shape_of
from regard.measures.base import KeyLists, Measure, Plane, Reduction, Strip, Sums

__all__ = ["PairSets", "Pairs"]


class Pairs(Measure):
    """The mass on given pairs, (B, H, N): for each query the sum of P_ij over keys of its own, such as the syntactic
    head of each token. Queries without any have 0 and do not count in means.

    Args:
        keys: integers (N,), (N, K) or (B, N, K): the keys of each query, each once; -1 for none.

    >>> import regard
    >>> q = k = torch.zeros(1, 2, 3, 5)  # equal scores: all weights are 1/3
    >>> regard.measure(q, k, measures=Pairs(torch.tensor([[1, 2], [0, -1], [-1, -1]]))).pairs[0, 0]
    tensor([0.6667, 0.3333, 0.0000])
    """

    gives = {"pairs": "query"}
    query_tensors = 1
    shareable = True

    def __init__(self, keys: Tensor) -> None:
        if not isinstance(keys, Tensor) or keys.is_floating_point() or keys.dtype is torch.bool:
            received = f"dtype {keys.dtype}" if isinstance(keys, Tensor) else type(keys).__name__
            raise bad_type("Pairs keys", expected="integers (N,), (N, K) or (B, N, K)", received=received)
        if keys.dim() not in (1, 2, 3):
            raise bad_value(
                "Pairs keys", expected="shape (N,), (N, K) or (B, N, K)", received=f"shape {shape_of(keys)}"
            )
        self.keys = keys[:, None] if keys.dim() == 1 else keys

    def prepare(self, plane: Plane) -> Tensor:
        """(1|B, N, K)"""
        keys = self.keys.to(plane.k_positions.device, torch.int64)
        keys = keys[None] if keys.dim() == 2 else keys
        if keys.shape[0] not in (1, plane.batch) or keys.shape[1] != plane.queries:
            raise bad_value(
                "Pairs keys",
                expected=f"keys of {plane.queries} queries, of 1 or {plane.batch} texts",
                received=f"shape {shape_of(self.keys)}",
            )
        if keys.numel() and (int(keys.max()) >= plane.keys or int(keys.min()) < -1):
            raise bad_value(
                "Pairs keys",
                expected=f"numbers from -1 to {plane.keys - 1}",
                received=f"from {int(keys.min())} to {int(keys.max())}",
            )
        return keys

    def begin(self, plane: Plane) -> Tensor:
        return plane.new(plane.queries)

    def add(self, state: Tensor, strip: Strip, prepared: Tensor) -> None:
        keys = (prepared if prepared.shape[0] == 1 else prepared[strip.batch])[:, strip.rows]  # (1|c, n, K)
        column_of = torch.full((strip.plane.keys + 1,), -1, device=keys.device)  # (the last one: for -1)
        column_of[strip.columns] = torch.arange(strip.columns.numel(), device=keys.device)
        columns = column_of[keys]
        index = columns.clamp(min=0)[:, None].expand(*strip.weights.shape[:3], -1)
        state[strip.where] = (strip.weights.gather(-1, index) * (columns >= 0)[:, None]).sum(-1)

    def reduction(self, plane: Plane, prepared: Tensor) -> Reduction:
        there = prepared >= 0
        ends = there.sum(-1).flatten().cumsum(0).view(prepared.shape[:2])  # into the keys of all texts in a row
        begins = ends - there.sum(-1)
        keys = prepared[there].to(torch.int32)[None]
        return Reduction(lists=KeyLists(keys, begins[..., None], ends[..., None]))

    def take(self, state: Tensor, sums: Sums, plane: Plane, prepared: Any) -> None:
        assert sums.lists is not None
        state.copy_(sums.lists[..., 0])

    def counted(self, plane: Plane, prepared: Tensor) -> Tensor:
        return (prepared >= 0).any(-1)


class PairSets(Measure):
    """The mass on several sets of given pairs, (B, H, N, S): `Pairs` for each of them.

    Args:
        sets: S tensors of keys, each as `Pairs` takes them.

    >>> import regard
    >>> q = k = torch.zeros(1, 1, 3, 5)  # equal scores: all weights are 1/3
    >>> sets = PairSets([torch.tensor([1, 0, -1]), torch.tensor([[0, 1], [0, -1], [-1, -1]])])
    >>> regard.measure(q, k, measures=sets).pair_sets[0, 0, 0]
    tensor([0.3333, 0.6667])
    """

    gives = {"pair_sets": "query"}
    untabled = ("pair_sets",)
    shareable = True

    def __init__(self, sets: Sequence[Tensor]) -> None:
        self.sets = [Pairs(keys) for keys in sets]
        if not self.sets:
            raise bad_value("PairSets sets", expected="at least one", received="none")

    def prepare(self, plane: Plane) -> list[Tensor]:
        """(1|B, N, K) of each set."""
        return [pairs.prepare(plane) for pairs in self.sets]

    def begin(self, plane: Plane) -> Tensor:
        return plane.new(plane.queries, len(self.sets))

    def add(self, state: Tensor, strip: Strip, prepared: list[Tensor]) -> None:
        for number, (pairs, keys) in enumerate(zip(self.sets, prepared, strict=True)):
            pairs.add(state[..., number], strip, keys)

    def reduction(self, plane: Plane, prepared: list[Tensor]) -> Reduction:
        lists = [pairs.reduction(plane, keys).lists for pairs, keys in zip(self.sets, prepared, strict=True)]
        return Reduction(lists=KeyLists.joined([x for x in lists if x is not None]))

    def take(self, state: Tensor, sums: Sums, plane: Plane, prepared: Any) -> None:
        assert sums.lists is not None
        state.copy_(sums.lists)
