"""How a layer, or a model, is sharded (`Sharding`). Before each call the ranks agree on what is to be computed, so that
what is wrong on one of them is an error on all.

Letters: B batch, H query heads, G kv heads, N queries, M keys, n, m those of one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from regard.errors import bad_type, bad_value, shape_of
from regard.kernels.dropout import new_seed
from regard.parallel.alltoall import heads_of
from regard.parallel.collectives import Ranks, digest
from regard.parallel.global_call import describe
from regard.parallel.sharded_call import ShardedCall
from regard.parallel.token_layout import SequenceSharding, Tokens, parts_of
from regard.positions import as_biases

__all__ = ["HeadSharding", "LayerInputs", "Sharding", "no_cache"]

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class HeadSharding:
    """Heads split over ranks: each has as many query heads."""

    mesh: DeviceMesh
    total: int  # H
    groups: int  # G
    check: bool = True

    @cached_property
    def ranks(self) -> Ranks:
        """Those of the mesh."""
        return Ranks.of(self.mesh)

    def __deepcopy__(self, memo: Any) -> HeadSharding:
        return self

    @property
    def each(self) -> list[slice]:
        """Those of each rank."""
        return heads_of(self.total, self.ranks.size)

    @property
    def own(self) -> slice:
        """Those of this rank."""
        return self.each[self.ranks.rank]


class LayerInputs(NamedTuple):
    """The arguments of one call of a layer on this rank."""

    query: Tensor  # (B, n, W)
    key: Tensor  # (B, m, W)
    value: Tensor  # (B, m, W)
    mask: Any
    bias: Any
    positions: Tensor | None
    cache: Any
    dropout: float


@dataclass
class Sharding:
    """How one layer (or a model) is sharded: its heads, its sequence, or both."""

    heads: HeadSharding | None = None
    sequence: SequenceSharding | None = None

    def agree(self, inputs: LayerInputs, check: Callable[[], None]) -> ShardedCall:
        """One call of the layer: the ranks agree on what is to be computed. Where a rank raises, all do."""
        seed = new_seed(None, inputs.query.device) if inputs.dropout else None
        if self.sequence is None and not (self.heads is not None and (self.heads.check or seed is not None)):
            check()
            return ShardedCall(self)
        facts = partial(self._facts, inputs, check, 0 if seed is None else int(seed))
        rows = self._agreed("attention", _FACTS, facts, _LENGTHS, seed is not None)
        seed = None if seed is None else seed.new_full((1,), rows[0]["seed"])
        if self.sequence is None:
            return ShardedCall(self, seed=seed)
        return self._locate(rows, inputs, seed)

    def _facts(self, inputs: LayerInputs, check: Callable[[], None], seed: int) -> dict[str, int]:
        """What the ranks compare before a call of the layer. Raises where this rank's call is wrong."""
        check()
        query, key, _, mask, bias, positions, cache, dropout = inputs
        _check_positions(positions)
        if self.heads is not None and 0 in (query.shape[0], query.shape[1], key.shape[1]):
            raise bad_value(
                "query",
                expected="a text and a token at least on every rank, where heads are sharded",
                received=f"{query.shape[0]} texts of {query.shape[1]} queries and {key.shape[1]} keys",
                remedy="fewer ranks for the sequence",
            )
        if cache is not None and self.sequence is not None:
            raise no_cache()
        return {
            "batch": query.shape[0],
            "width": query.shape[-1],
            "dtype": _DTYPES.index(query.dtype),
            "mask and bias (kinds, shapes and values)": digest(describe(mask, *describe_bias(bias))),
            "dropout": digest(dropout),
            "gradient": torch.is_grad_enabled(),
            "cache": cache is not None,
            "self attention": key is query,
            "axes of positions": 0 if positions is None else positions.dim(),  # (a dtype that is none raises)
            "seed": seed,
            "queries": query.shape[1],
            "keys": key.shape[1],
            "positions": 0 if positions is None else positions.shape[-1],
        }

    def _agreed(
        self,
        what: str,
        names: tuple[str, ...],
        facts: Callable[[], dict[str, int]],
        lengths: tuple[str, ...],
        ask: bool = False,
    ) -> list[dict[str, int]]:
        """Every rank's facts, of those that share the sequence (or else the heads). Where both are sharded, an error
        that is heard of in one group is passed on in the other, so that all ranks raise.

        `ask`: also where the ranks of the heads need not check.
        """
        groups: list[tuple[Ranks, tuple[str, ...]]] = []
        if self.heads is not None and (self.heads.check or ask):
            groups.append((self.heads.ranks, ("seed",)))
        if self.sequence is not None:
            groups.append((self.sequence.ranks, ("seed", *lengths)))
        error: Exception | None = None
        rows: list[dict[str, int]] = []

        def facts_or_error() -> dict[str, int]:
            if error is not None:
                raise error
            row = facts()
            return {**row, "seed": rows[0]["seed"]} if rows and "seed" in row else row  # (the first one's, on all)

        for ranks, differ in groups:
            try:
                rows = ranks.agreed(what, names, facts_or_error, differ)
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
            self._agreed("attention", _FACTS, partial(_fail, error), _LENGTHS)

    def refuse_text(self, error: Exception) -> None:
        """Raise an error of this rank's call of a model, on all ranks."""
        self._agreed("ids", _TEXT_FACTS, partial(_fail, error), _TEXT_LENGTHS)

    def agree_on_text(
        self, ids: Tensor, keep: Tensor | None, check: Callable[[], None]
    ) -> tuple[Tokens, Tensor | None]:
        """One call of a model: which tokens of a text these ids (B, n) are, and `keep` (B, N) of the whole text (it may
        be given whole, or as each rank's part)."""
        assert self.sequence is not None

        def facts() -> dict[str, int]:
            check()
            return {"texts": ids.shape[0], "tokens": ids.shape[1], "keep": 0 if keep is None else keep.shape[1]}

        rows = self._agreed("ids", _TEXT_FACTS, facts, _TEXT_LENGTHS)
        lengths, kept = (tuple(row[name] for row in rows) for name in _TEXT_LENGTHS)
        tokens = self.sequence.tokens(lengths)
        if any(kept) and set(kept) != {tokens.total}:
            if kept != lengths or keep is None:
                raise bad_value(
                    "keep",
                    expected=f"one flag for each of all {tokens.total} tokens, or on each rank of its part, {lengths}",
                    received=f"lengths {kept}",
                )
            keep = tokens.whole(parts_of(keep, self.sequence.ranks, tokens, 1), 1)
        return tokens, keep

    def _locate(self, rows: list[dict[str, int]], inputs: LayerInputs, seed: Tensor | None) -> ShardedCall:
        """Which tokens of the whole this rank has: each told the others how many it has."""
        assert self.sequence is not None
        n, m, given = (tuple(row[name] for row in rows) for name in _LENGTHS)
        queries, keys, positions = self.sequence.tokens(n), self.sequence.tokens(m), inputs.positions
        if positions is not None and set(given) != {queries.total}:
            axis = positions.dim() - 1
            if given != n:
                raise bad_value(
                    "positions",
                    expected=f"those of all {queries.total} tokens, or on each rank those of its part, {n}",
                    received=f"lengths {given}",
                )
            positions = queries.whole(parts_of(positions, self.sequence.ranks, queries, axis), axis)
        return ShardedCall(self, queries, keys, positions, inputs.key is inputs.query, seed)


def _fail(error: Exception) -> NoReturn:
    raise error


def no_cache() -> ValueError:
    """The error of a call with a cache where the sequence is sharded."""
    return bad_value(
        "cache",
        expected="none where the sequence is sharded over ranks",
        received="a cache",
        remedy="shard the heads instead: parallel.shard_heads",
    )


_TEXT_LENGTHS = ("tokens", "keep")
_TEXT_FACTS = ("texts", *_TEXT_LENGTHS)
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
)


def _check_positions(positions: object) -> None:
    if positions is None or (isinstance(positions, Tensor) and positions.dim() and not positions.is_floating_point()):
        return
    received = shape_of(positions) if isinstance(positions, Tensor) else type(positions).__name__
    if isinstance(positions, Tensor) and positions.dim():
        received = str(positions.dtype)
    raise bad_type("positions", expected="an integer tensor (N,) or (B, N)", received=received)


def describe_bias(bias: Any) -> list[Any]:
    """Kinds and shapes of biases, for `describe`."""
    return [(type(one).__name__, tuple(one.weight.shape)) for one in as_biases(bias)]
