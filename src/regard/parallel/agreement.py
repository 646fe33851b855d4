"""How a layer, or a model, is spread over processes: `layer.spread`, `model.spread`. Before each call the ranks agree
on what is to be computed, so that what is wrong on one of them is an error on all.

Letters: B batch, H query heads, G kv heads, N queries, M keys, n, m those of one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from regard.errors import bad_type, bad_value, shape_of
from regard.kernels.dropout import new_seed
from regard.parallel.alltoall import heads_of
from regard.parallel.collectives import Ranks, digest
from regard.parallel.global_call import describe
from regard.parallel.sharded_call import Spread
from regard.parallel.token_layout import Tokens, balance_of, mark, parts_of
from regard.positions import as_biases

__all__ = ["Heads", "PartOfText", "Sequence", "Sharding"]

Method = Literal["ring", "alltoall"]
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Heads:
    """Heads spread over ranks: each has as many query heads."""

    mesh: DeviceMesh
    total: int  # H
    groups: int  # G
    check: bool = True

    @cached_property
    def ranks(self) -> Ranks:
        """Those of the mesh."""
        return Ranks.of(self.mesh)

    def __deepcopy__(self, memo: Any) -> Heads:
        return self

    @property
    def each(self) -> list[slice]:
        """Those of each rank."""
        return heads_of(self.total, self.ranks.size)

    @property
    def own(self) -> slice:
        """Those of this rank."""
        return self.each[self.ranks.rank]


@dataclass(frozen=True)
class Sequence:
    """A sequence spread over ranks."""

    ranks: Ranks
    method: Method
    balance: bool | None = None


@dataclass
class Sharding:
    """How one layer (or a model) is spread: its heads, its sequence, or both."""

    heads: Heads | None = None
    sequence: Sequence | None = None

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        check: Callable[[], None],
        mask: Any,
        bias: Any,
        positions: Tensor | None,
        cache: Any,
        dropout: float,
    ) -> Spread:
        """One call of the layer: the ranks agree on what is to be computed. Where a rank raises, all do."""
        seed = new_seed(None, query.device) if dropout else None

        def facts() -> dict[str, int]:
            check()
            _check_positions(positions)
            if self.heads is not None and 0 in (query.shape[0], query.shape[1], key.shape[1]):
                raise bad_value(
                    "query",
                    expected="a text and a token at least on every rank, where heads are spread",
                    received=f"{query.shape[0]} texts of {query.shape[1]} queries and {key.shape[1]} keys",
                    remedy="fewer ranks for the sequence",
                )
            if cache is not None and self.sequence is not None:
                raise bad_value(
                    "cache",
                    expected="none where the sequence is spread over ranks",
                    received="a cache",
                    remedy="spread the heads instead: parallel.shard_heads",
                )
            of_queries = self._balance("query", query)
            of_keys = of_queries if key is query else self._balance("key", key)
            _check_balance("positions", positions, of_queries)
            if value is not key and self._balance("value", value) is not of_keys:
                raise bad_value("value", expected=f"balance={of_keys}, as the key's", received=f"balance={not of_keys}")
            return {
                "batch": query.shape[0],
                "width": query.shape[-1],
                "dtype": _DTYPES.index(query.dtype),
                "mask and bias (kinds, shapes and values)": digest(describe(mask, *as_said(bias))),
                "dropout": digest(dropout),
                "gradient": torch.is_grad_enabled(),
                "cache": cache is not None,
                "self attention": key is query,
                "axes of positions": 0 if positions is None else positions.dim(),  # (a dtype that is none raises)
                "seed": 0 if seed is None else int(seed),
                "queries": query.shape[1],
                "keys": key.shape[1],
                "positions": 0 if positions is None else positions.shape[-1],
                "balance of queries": of_queries,
                "balance of keys": of_keys,
            }

        if self.sequence is None and not (self.heads is not None and (self.heads.check or seed is not None)):
            check()
            return Spread(self)
        rows = self._agreed("attention", _FACTS, facts, _LENGTHS, seed is not None)
        seed = None if seed is None else seed.new_full((1,), rows[0]["seed"])
        return Spread(self, seed=seed) if self.sequence is None else self._place(rows, key is query, positions, seed)

    def _agreed(
        self,
        what: str,
        names: tuple[str, ...],
        facts: Callable[[], dict[str, int]],
        lengths: tuple[str, ...],
        ask: bool = False,
    ) -> list[dict[str, int]]:
        """Every rank's facts, of those that share the sequence (or else the heads). Where both are spread, whoever
        hears of an error in one group tells it in the other, so that all of them raise.

        `ask`: also where the ranks of the heads need not check.
        """
        groups: list[tuple[Ranks, tuple[str, ...]]] = []
        if self.heads is not None and (self.heads.check or ask):
            groups.append((self.heads.ranks, ("seed",)))
        if self.sequence is not None:
            groups.append((self.sequence.ranks, ("seed", *lengths)))
        error: Exception | None = None
        rows: list[dict[str, int]] = []

        def told() -> dict[str, int]:
            if error is not None:
                raise error
            row = facts()
            return {**row, "seed": rows[0]["seed"]} if rows and "seed" in row else row  # (the first one's, on all)

        for ranks, differ in groups:
            try:
                rows = ranks.agreed(what, names, told, differ)
            except ConnectionError:
                raise
            except Exception as raised:
                error = raised
        if error is not None:
            raise error
        return rows

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """Where what is done within raises on this rank, before the ranks have agreed on a call, all raise."""
        try:
            yield
        except (ValueError, TypeError) as error:
            if self.sequence is None and self.heads is not None and not self.heads.check:
                raise

            def facts(error: Exception = error) -> dict[str, int]:
                raise error

            self._agreed("attention", _FACTS, facts, _LENGTHS)

    def text(self, ids: Tensor, keep: Tensor | None, check: Callable[[], None], cache: Any = None) -> PartOfText:
        """One call of a model: which tokens of a text these ids (B, n) are, and `keep` of the whole text (it may be
        given whole, or as each rank's part)."""
        assert self.sequence is not None
        ranks = self.sequence.ranks

        def facts() -> dict[str, int]:
            check()
            if cache is not None:
                raise bad_value(
                    "cache",
                    expected="none where the text is spread over ranks",
                    received="a cache",
                    remedy="spread the heads instead: parallel.shard_heads",
                )
            balanced = self._balance("ids", ids)
            _check_balance("keep", keep, balanced)
            return {
                "texts": ids.shape[0],
                "balance": balanced,
                "tokens": ids.shape[1],
                "keep": 0 if keep is None else keep.shape[1],
            }

        rows = self._agreed("ids", ("texts", "balance", "tokens", "keep"), facts, ("tokens", "keep"))
        lengths, kept = (tuple(row[name] for row in rows) for name in ("tokens", "keep"))
        tokens = Tokens(lengths, bool(rows[0]["balance"]))
        tokens.check()
        if any(kept) and set(kept) != {tokens.total}:
            if kept != lengths or keep is None:
                raise bad_value(
                    "keep",
                    expected=f"one flag for each of all {tokens.total} tokens, or on each rank of its part, {lengths}",
                    received=f"lengths {kept}",
                )
            keep = tokens.whole(parts_of(keep, ranks, tokens, 1), 1)
        return PartOfText(tokens, ranks.rank, keep, ids.device)

    @staticmethod
    def like(x: Tensor, other: Tensor) -> Tensor:
        """x, a part of a sequence as the other is, if that is known."""
        balanced: bool | None = getattr(other, "_regard_balanced", None)
        return x if balanced is None else mark(x, balanced)

    def _balance(self, what: str, x: Tensor) -> bool:
        return self.sequence is not None and balance_of(what, x, self.sequence.balance)

    def _place(self, rows: list[dict[str, int]], own: bool, positions: Tensor | None, seed: Tensor | None) -> Spread:
        """Where this rank's tokens are in the whole: each told the others how many it has."""
        assert self.sequence is not None
        n, m, at = (tuple(row[name] for row in rows) for name in _LENGTHS)
        queries = Tokens(n, bool(rows[0]["balance of queries"]))
        keys = Tokens(m, bool(rows[0]["balance of keys"]))
        for tokens in (queries, keys):
            tokens.check()
        if positions is not None and set(at) != {queries.total}:
            axis = positions.dim() - 1
            if at != n:
                raise bad_value(
                    "positions",
                    expected=f"those of all {queries.total} tokens, or on each rank those of its part, {n}",
                    received=f"lengths {at}",
                )
            positions = queries.whole(parts_of(positions, self.sequence.ranks, queries, axis), axis)
        return Spread(self, queries, keys, positions, own, seed)


_LENGTHS = ("queries", "keys", "positions")
_FACTS = (
    "batch",
    "width",
    "dtype",
    "mask and bias (kinds, shapes and values)",
    "dropout",
    "gradient",
    "cache",
    "self attention",
    "axes of positions",
    "seed",
    *_LENGTHS,
    "balance of queries",
    "balance of keys",
)


def _check_positions(positions: object) -> None:
    if positions is None or (isinstance(positions, Tensor) and positions.dim() and not positions.is_floating_point()):
        return
    received = shape_of(positions) if isinstance(positions, Tensor) else type(positions).__name__
    if isinstance(positions, Tensor) and positions.dim():
        received = str(positions.dtype)
    raise bad_type("positions", expected="an integer tensor (N,) or (B, N)", received=received)


def _check_balance(what: str, part: Tensor | None, balanced: bool) -> None:
    """Raise where something that was sharded beside the tokens was cut in another way."""
    marked: bool | None = getattr(part, "_regard_balanced", None)
    if marked is not None and marked is not balanced:
        raise bad_value(what, expected=f"balance={balanced}, as the tokens", received=f"balance={marked}")


def as_said(bias: Any) -> list[Any]:
    """A bias as `describe` can tell of it: kinds and shapes."""
    return [(type(one).__name__, tuple(one.weight.shape)) for one in as_biases(bias)]


class PartOfText(NamedTuple):
    """Which tokens of a text a rank has."""

    tokens: Tokens
    rank: int
    keep: Tensor | None  # (B, N), the whole's
    device: torch.device

    @property
    def length(self) -> int:
        """N"""
        return self.tokens.total

    def part(self, positions: Tensor | int) -> Tensor:
        """This rank's part of positions (N,) or (B, N), or of those that follow a first one."""
        if isinstance(positions, int):
            return self.tokens.numbers(self.rank, self.device) + positions
        return self.tokens.part(positions, self.rank, positions.dim() - 1)

    def marked(self, x: Tensor) -> Tensor:
        """A part, as the ids are."""
        return mark(x, self.tokens.balanced)
