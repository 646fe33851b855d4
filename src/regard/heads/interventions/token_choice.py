"""Which tokens of a sequence are meant: numbers, slices, lists, boolean tensors; and edges, from queries to keys.

Tokens are counted from 0 in the whole sequence, padding and what a cache holds included; negative numbers count from
the end of what the model has read so far.

Letters: N queries, M keys.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import Any, TypeAlias

import torch
from torch import Tensor

from regard.errors import bad_type, bad_value, shape_of

__all__ = ["Edges", "TokenChoice", "Tokens"]

Tokens: TypeAlias = int | slice | Iterable[int] | Tensor | None

_EXPECTED = "a number, a slice, a list of numbers, a boolean tensor, or None for all"


@dataclass(frozen=True)
class TokenChoice:
    """Some tokens of a sequence.

    >>> TokenChoice.of("queries", [0, -1]).among(torch.arange(2, 5), total=5)
    tensor([False, False,  True])
    """

    what: str  # the name of the argument, for errors
    chosen: slice | tuple[int, ...]
    length: int | None = None  # of a boolean tensor

    @staticmethod
    def of(what: str, tokens: Tokens) -> TokenChoice:
        """From what a caller gives."""
        if tokens is None:
            return TokenChoice(what, slice(None))
        if isinstance(tokens, slice):
            if not all(part is None or isinstance(part, int) for part in (tokens.start, tokens.stop, tokens.step)):
                raise bad_type(what, expected="a slice of whole numbers", received=repr(tokens))
            if tokens.step == 0:
                raise bad_value(what, expected="a slice with a step other than 0", received=repr(tokens))
            return TokenChoice(what, tokens)
        length = None
        if isinstance(tokens, Tensor) and tokens.dtype is torch.bool:
            if tokens.dim() != 1:
                received = f"one of shape {shape_of(tokens)}"
                raise bad_value(what, expected="a boolean tensor (N,), the same for all texts", received=received)
            length, tokens = len(tokens), tokens.nonzero().flatten()
        given: Any = tokens.tolist() if isinstance(tokens, Tensor) else tokens
        if isinstance(given, Integral):
            given = [given]
        if isinstance(given, (str, bytes, Mapping)) or not isinstance(given, Iterable):
            raise bad_type(what, expected=_EXPECTED, received=repr(given))
        numbers = list(given)
        for number in numbers:
            if isinstance(number, bool) or not isinstance(number, Integral):
                remedy = "torch.tensor([...]) of booleans" if isinstance(number, bool) else ""
                raise bad_type(what, expected=_EXPECTED, received=f"{number!r} among them", remedy=remedy)
        return TokenChoice(what, tuple(int(number) for number in numbers), length)

    @property
    def all(self) -> bool:
        """Whether it is every token."""
        return self.chosen == slice(None)

    def numbers(self, total: int) -> list[int]:
        """The chosen tokens of a sequence of `total` tokens; those that are not read yet are left out."""
        if isinstance(self.chosen, slice):
            return list(range(total)[self.chosen])
        self._check_length(total)
        return sorted({n % total for n in self.chosen if -total <= n < total})

    def among(self, numbers: Tensor, total: int) -> Tensor:
        """Which of the tokens `numbers` (n,) of a sequence of `total` tokens so far are chosen: boolean, (n,)."""
        if self.all:
            return torch.ones_like(numbers, dtype=torch.bool)
        return torch.isin(numbers, torch.tensor(self.numbers(total), dtype=numbers.dtype, device=numbers.device))

    def check_reached(self, total: int) -> None:
        """Raise if tokens are chosen that a sequence of `total` tokens, all that was read, does not have."""
        if isinstance(self.chosen, slice):
            return
        self._check_length(total)
        beyond = [n for n in self.chosen if not -total <= n < total]
        if beyond or (self.length is not None and self.length > total):
            received = f"{self.length} booleans" if self.length is not None else beyond[0]
            raise bad_value(self.what, expected=f"numbers of the {total} tokens that were read", received=received)

    def _check_length(self, total: int) -> None:
        if self.length is not None and self.length < total:
            expected, received = f"a boolean for each of {total} tokens", f"{self.length} of them"
            raise bad_value(self.what, expected=expected, received=received)


@dataclass(frozen=True)
class Edges:
    """Edges from tokens to tokens: all from the queries of a pair to its keys, for each of some pairs."""

    pairs: tuple[tuple[TokenChoice, TokenChoice], ...]

    @staticmethod
    def of(edges: object) -> Edges:
        """From a list of pairs (queries, keys)."""
        expected = "a list of pairs (queries, keys)"
        if isinstance(edges, Tensor) and edges.dim() == 2 and edges.shape[1] == 2:
            edges = edges.tolist()
        if isinstance(edges, (str, bytes, Mapping, Tensor)) or not isinstance(edges, Iterable):
            raise bad_type("edges", expected=expected, received=repr(edges))
        pairs = []
        for edge in edges:
            if not isinstance(edge, (tuple, list)) or len(edge) != 2:
                remedy = "edges=[(5, 3)], or queries=5, keys=3"
                raise bad_type("edges", expected=expected, received=f"{edge!r} among them", remedy=remedy)
            pairs.append((TokenChoice.of("queries", edge[0]), TokenChoice.of("keys", edge[1])))
        if not pairs:
            raise bad_value("edges", expected="one at least", received="none")
        return Edges(tuple(pairs))

    def hidden(self, queries: Tensor, keys: Tensor, totals: tuple[int, int]) -> list[tuple[Tensor, Tensor]]:
        """The pairs as boolean tensors (N,) and (M,), of the tokens `queries` (N,) and `keys` (M,) of sequences of
        `totals` tokens; pairs without an edge are left out. Pairs of the same queries are joined."""
        by_queries: dict[str, tuple[TokenChoice, list[TokenChoice]]] = {}
        for of_queries, of_keys in self.pairs:
            by_queries.setdefault(repr(of_queries.chosen), (of_queries, []))[1].append(of_keys)
        found = []
        for of_queries, choices in by_queries.values():
            rows = of_queries.among(queries, totals[0])
            if rows.any():
                cols = torch.stack([of_keys.among(keys, totals[1]) for of_keys in choices]).any(0)
                found += [(rows, cols)] if cols.any() else []
        return found

    def check_reached(self, queries: int, keys: int) -> None:
        """Raise if edges have tokens that sequences of so many tokens do not have."""
        for of_queries, of_keys in self.pairs:
            of_queries.check_reached(queries)
            of_keys.check_reached(keys)
