"""The contract of measures: a `Strip` of weights, the `Plane` that it is cut from, and what a `Measure` does with it.

Letters: B batch, H query heads, G kv heads, N queries, M keys, E head width of v, W model width;
c, h, n, m the same within one strip.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

__all__ = [
    "NO_TOKEN",
    "KeyLists",
    "Measure",
    "PerKey",
    "PerQuery",
    "Plane",
    "Reduction",
    "Strip",
    "Sums",
    "add_to_keys",
    "keys_near",
    "ranks",
]

_T = TypeVar("_T")

NO_TOKEN = torch.iinfo(torch.int64).min  # the id of what is no token: padding, or what stands before a text


@dataclass(frozen=True)
class Plane:
    """The whole of what is measured: its sizes, where its tokens stand, and what is known about them."""

    batch: int
    heads: int
    queries: int
    keys: int
    q_positions: Tensor  # (1|B, N)
    k_positions: Tensor  # (1|B, M)
    dtype: torch.dtype
    values: Tensor | None = None  # (B, G, M, E)
    out_weight: Tensor | None = None  # (W, H * E), as `nn.Linear` stores it
    ids: Tensor | None = None  # (1|B, N) token ids of the queries
    key_ids: Tensor | None = None  # (1|B, M) and of the keys
    numbers: Tensor | None = None  # (M,) which tokens of the whole text the keys are, where it is not the first M
    text_ids: Tensor | None = None  # (1|B, L) token ids of the whole text; `NO_TOKEN` for padding
    padding: Tensor | None = None  # (B, N) True for padding queries; None if there is no padding
    key_padding: Tensor | None = None  # (B, M) True for padding keys; None if there is no padding
    first: Tensor | None = None  # (1|B,) the number of each text's first token; None where it is 0 everywhere
    _shared: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    _rows: list[Tensor] = field(default_factory=list, init=False, repr=False, compare=False)

    def once(self, key: Any, compute: Callable[[], _T]) -> _T:
        """`compute()`, or what it gave for the same key before, here or on a plane that shares with this one."""
        if key not in self._shared:
            self._shared[key] = compute()
        return self._shared[key]

    @property
    def shared(self) -> dict[Any, Any]:
        """What was computed `once`."""
        return self._shared

    def sharing(self, shared: dict[Any, Any]) -> Plane:
        """The same plane, which keeps what it computes `once` in a dict that equal planes (of other layers) share."""
        object.__setattr__(self, "_shared", shared)
        return self

    def without_values(self) -> Plane:
        """The same plane without values and output projection, which shares with this one."""
        if self.values is None and self.out_weight is None:
            return self
        return replace(self, values=None, out_weight=None).sharing(self._shared)

    def reserve_rows(self, count: int) -> None:
        """Allocate at once what the next `count` calls of `new(queries)` will return."""
        shape = (count, self.batch, self.heads, self.queries)
        self._rows.extend(torch.zeros(shape, dtype=self.dtype, device=self.k_positions.device).unbind(0))

    def new(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Zeros (B, H, *shape)."""
        if self._rows and dtype is None and shape == (self.queries,):
            return self._rows.pop()
        device = self.k_positions.device
        return torch.zeros(self.batch, self.heads, *shape, dtype=dtype or self.dtype, device=device)

    @property
    def longest(self) -> tuple[int, int]:
        """How many queries and keys the longest text has, padding left out."""
        sides = (self.padding, self.queries), (self.key_padding, self.keys)
        n, m = (size if padding is None else int((~padding).sum(1).max()) for padding, size in sides)
        return n, m

    @property
    def ascending(self) -> bool:
        """Whether the keys' positions rise from slot to slot, so that a position is found by bisection."""
        return self.once("ascending", lambda: bool((self.k_positions[:, 1:] > self.k_positions[:, :-1]).all()))

    @property
    def steps_of_one(self) -> bool:
        """Whether each key's position is one more than that of the slot before."""
        return self.once("steps", lambda: bool((self.k_positions[:, 1:] - self.k_positions[:, :-1] == 1).all()))

    @property
    def in_order(self) -> bool:
        """Whether queries and keys are the same tokens, without padding, each one position after the one before."""
        return self.once("in order", self._in_order)

    def _in_order(self) -> bool:
        others = (self.numbers, self.padding, self.key_padding, self.first)
        if self.queries != self.keys or any(x is not None for x in others):
            return False
        return self.steps_of_one and torch.equal(*torch.broadcast_tensors(self.q_positions, self.k_positions))

    @property
    def is_first(self) -> Tensor:
        """Which key is the text's first token: booleans (1|B, M)."""
        return self.once("first", self._is_first)

    def _is_first(self) -> Tensor:
        numbers = torch.arange(self.keys, device=self.k_positions.device) if self.numbers is None else self.numbers
        return (numbers == 0)[None] if self.first is None else numbers == self.first[:, None]


@dataclass(frozen=True)
class KeyLists:
    """K lists of keys for each query: list k of query i is `keys[begin[.., i, k] : end[.., i, k]]`. Lists may overlap
    in `keys`, so that the earlier tokens like the query's own, for all queries, take O(N + M) memory.

    >>> keys, slots = torch.arange(3, dtype=torch.int32)[None], torch.arange(3)[None, :, None]
    >>> KeyLists(keys, slots, slots + 1).count  # for each of three queries a list with its own key
    1
    """

    keys: Tensor  # (1|B, L) int32, indices of keys
    begin: Tensor  # (1|B, N, K) int64
    end: Tensor  # (1|B, N, K) int64

    @property
    def count(self) -> int:
        """K"""
        return self.begin.shape[2]

    @staticmethod
    def joined(several: Sequence[KeyLists]) -> KeyLists:
        """All lists of several, in their order."""
        if len(several) == 1:
            return several[0]
        items = max(x.shape[0] for lists in several for x in (lists.keys, lists.begin))
        begins, ends, keys, first = [], [], [], 0
        for lists in several:
            begin, end = (lists.begin + first, lists.end + first) if first else (lists.begin, lists.end)
            begins.append(begin if begin.shape[0] == items else begin.expand(items, -1, -1))
            ends.append(end if end.shape[0] == items else end.expand(items, -1, -1))
            keys.append(lists.keys if lists.keys.shape[0] == items else lists.keys.expand(items, -1))
            first += lists.keys.shape[1]
        return KeyLists(torch.cat(keys, 1), torch.cat(begins, 2), torch.cat(ends, 2))


@dataclass(frozen=True)
class Reduction:
    """What a measure needs, if sums are enough: a kernel computes them in its own loop, and hands out no strips."""

    columns: Tensor | None = None  # (1|B, 1|H, K, M): sums over keys of P_ij times these
    lists: KeyLists | None = None  # sums of P_ij over lists of keys
    received: bool = False  # sums of P_ij over queries but padding


@dataclass(frozen=True)
class Sums:
    """The sums that a `Reduction` asked for."""

    columns: Tensor | None = None  # (B, H, N, K)
    lists: Tensor | None = None  # (B, H, N, K)
    received: Tensor | None = None  # (B, H, M)


def keys_near(plane: Plane, first: int | Tensor, last: int | Tensor) -> KeyLists:
    """For each query the keys at positions from `first` to `last` relative to its own, both included; for several pairs
    of them (K,) as many lists.

    >>> positions = torch.arange(4)[None]
    >>> plane = Plane(1, 1, 4, 4, positions, positions, torch.float32)
    >>> near = keys_near(plane, -1, 0)  # the previous token and itself
    >>> [near.keys[0, a:b].tolist() for a, b in zip(near.begin[0, :, 0], near.end[0, :, 0])]
    [[0], [0, 1], [1, 2], [2, 3]]
    """
    positions, queries = plane.k_positions, plane.q_positions
    items = max(positions.shape[0], queries.shape[0])
    positions, order = positions.sort(dim=1) if not plane.ascending else (positions, None)
    if order is None:
        order = torch.arange(plane.keys, device=positions.device)[None]
    positions, queries = positions.expand(items, -1).contiguous(), queries.expand(items, -1)
    low, high = (torch.as_tensor(x, device=queries.device).reshape(-1) for x in (first, last))
    begin = torch.searchsorted(positions, (queries[..., None] + low).flatten(1))
    end = torch.searchsorted(positions, (queries[..., None] + high).flatten(1), right=True)
    shape = (items, plane.queries, low.numel())
    return KeyLists(order.to(torch.int32), begin.view(shape), end.view(shape))


@dataclass
class Strip:
    """Some rows of some heads of some batch items, against all keys that they may see. Read it, do not write to it."""

    plane: Plane
    batch: slice
    heads: slice
    rows: slice
    runs: list[slice]  # of key slots, ascending
    weights: Tensor  # (c, h, n, m)
    mass: Tensor  # (c, h, n): what the row sums to: 1, below 1 with sinks, 0 where it sees nothing
    logs: Tensor | None = None  # (c, h, n, m): log2 of P times `total`, finite everywhere; from kernels that have it
    total: Tensor | None = None  # (c, h, n)

    @property
    def where(self) -> tuple[slice, slice, slice]:
        """Its place in a (B, H, N) tensor."""
        return self.batch, self.heads, self.rows

    @functools.cached_property
    def columns(self) -> Tensor:
        """The slots of its keys: (m,)"""
        device = self.weights.device
        return torch.cat([torch.arange(run.start, run.stop, device=device) for run in self.runs])

    @property
    def numbers(self) -> Tensor:
        """The numbers of its keys in the whole text: (m,)"""
        return self.columns if self.plane.numbers is None else self.plane.numbers[self.columns]

    def of_keys(self, x: Tensor) -> Tensor:
        """The strip's part of a tensor (1|B, ..., M)."""
        x = x if x.shape[0] == 1 else x[self.batch]
        parts = [x[..., run] for run in self.runs]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)

    def of_queries(self, x: Tensor) -> Tensor:
        """The strip's part of a tensor (1|B, ..., N)."""
        return (x if x.shape[0] == 1 else x[self.batch])[..., self.rows]

    @functools.cached_property
    def q_positions(self) -> Tensor:
        """(1|c, n)"""
        return self.of_queries(self.plane.q_positions)

    @functools.cached_property
    def k_positions(self) -> Tensor:
        """(1|c, m)"""
        return self.of_keys(self.plane.k_positions)

    @functools.cached_property
    def is_first(self) -> Tensor:
        """Which of its keys is the text's first token: booleans (1|c, m)."""
        return self.of_keys(self.plane.is_first)

    @property
    def without_padding(self) -> Strip:
        """The same where padding queries see nothing: what is summed over queries is summed over this."""
        return self if self.plane.padding is None else self._tokens  # (itself in a cache would outlive its use)

    @functools.cached_property
    def _tokens(self) -> Strip:
        assert self.plane.padding is not None
        hidden = self.of_queries(self.plane.padding)[:, None]  # (c, 1, n)
        weights, mass = self.weights.masked_fill(hidden[..., None], 0.0), self.mass.masked_fill(hidden, 0.0)
        return replace(self, weights=weights, mass=mass)

    @functools.cached_property
    def entropies(self) -> Tensor:
        """-sum_j P_ij ln P_ij: (c, h, n)"""
        if self.logs is None or self.total is None:
            return torch.special.entr(self.weights).sum(-1)
        # ln P = ln 2 (logs - log2 total): no logarithm per weight
        mean = torch.linalg.vecdot(self.weights, self.logs)
        return (self.mass * self.total.log2() - mean) * math.log(2)

    def times(self, per_key: Tensor) -> Tensor:
        """sum_j P_ij x_j, as a matrix product: x (1|c, 1|h, m) -> (c, h, n); x (1|c, 1|h, m, X) -> (c, h, n, X)."""
        if per_key.dim() == 4:
            return self.weights @ per_key.to(self.weights.dtype)
        return (self.weights @ per_key.to(self.weights.dtype)[..., None])[..., 0]

    def where_true(self, pairs: Tensor) -> Tensor:
        """The mass on some pairs, a boolean tensor (1|c, n, m), mostly False: (c, h, n)."""
        result = torch.zeros_like(self.mass)
        item, row, column = pairs.nonzero(as_tuple=True)
        if pairs.shape[0] == 1:
            result.index_add_(2, row, self.weights[:, :, row, column])
        else:
            # (indexing by two tensors with a slice between them puts their axis first)
            result.transpose(1, 2).index_put_((item, row), self.weights[item, :, row, column], accumulate=True)
        return result

    def at(self, positions: Tensor) -> Tensor:
        """The mass on the keys that stand at `positions` (1|c, n, K), K of them for each query: (c, h, n, K)."""
        keys = self.k_positions
        if not self.plane.ascending:
            parts = (self.where_true(keys[:, None, :] == places[:, :, None]) for places in positions.unbind(-1))
            return torch.stack(list(parts), -1)
        items = max(keys.shape[0], positions.shape[0])
        keys = keys.expand(items, -1).contiguous()
        wanted = positions.expand(items, -1, -1).flatten(1).contiguous()  # (items, n * K)
        nearest = torch.searchsorted(keys, wanted).clamp_(max=keys.shape[1] - 1)
        hit = (keys.gather(1, nearest) == wanted).view(items, 1, *positions.shape[1:])
        index = nearest.view(items, 1, *positions.shape[1:]).expand(*self.weights.shape[:3], -1)
        return self.weights.gather(-1, index) * hit

    def near(self, before: int, after: int) -> tuple[slice, Tensor]:
        """The columns in which keys may stand that are at most `before` before or `after` after a query, and how far
        ahead of each query they are: (1|c, 1, n, columns)."""
        keys, queries = self.k_positions, self.q_positions
        columns = slice(0, keys.shape[1])
        if self.plane.ascending:
            low, high = queries.amin(-1, keepdim=True) - before, queries.amax(-1, keepdim=True) + after
            items = max(keys.shape[0], queries.shape[0])
            keys_of, low, high = (x.expand(items, -1).contiguous() for x in (keys, low, high))
            first = torch.searchsorted(keys_of, low).min()
            last = torch.searchsorted(keys_of, high, right=True).max()
            columns = slice(int(first), int(last))
        return columns, (keys[:, None, columns] - queries[:, :, None])[:, None]


class Measure:
    """Base of all measures. `gives` names what comes out, and which axis it is laid along:

    "query"   (B, H, N, ...)   a number per query
    "choice"  (B, H, N, ...)   keys that each query chose: of these there is no mean
    "key"     (B, H, M)        a sum over queries, for each key
    "mean"    (B, H, ...)      a mean over the queries that count
    "sum"     (B, ...)         a sum over queries
    "map"     (B, H, ...)      a picture of the whole plane

    Of a padded batch, padding queries have their number per query like all others; but nothing else counts them: a
    measure that gives neither "query" nor "choice" is shown them as queries that see nothing.
    """

    gives: ClassVar[dict[str, str]]
    needs_ids: ClassVar[bool] = False
    needs_out_weight: ClassVar[bool] = False
    needs_logs: ClassVar[bool] = False
    needs_all_heads: ClassVar[bool] = False  # whether a strip must hold all of them
    needs_scores: ClassVar[bool] = False  # whether weights alone, of attention written by hand, are not enough
    needs_probabilities: ClassVar[bool] = False  # whether it means nothing where weights may be below 0
    query_tensors: ClassVar[int] = 0  # how many tensors (B, H, N) `begin` makes, for `Plane.reserve_rows`
    shareable: ClassVar[bool] = False  # whether `prepare`, `reduction` and `counted` use no values and no out_weight
    untabled: ClassVar[tuple[str, ...]] = ()  # results that roles are told by, and that are no column of a table

    def prepare(self, plane: Plane) -> Any:
        """What all strips need, computed once."""
        return None

    def reduction(self, plane: Plane, prepared: Any) -> Reduction | None:
        """The sums that are enough for it, if kernels that have them shall call `take` in place of `add`; else None."""
        return None

    def take(self, state: Any, sums: Sums, plane: Plane, prepared: Any) -> None:
        """Put the sums that `reduction` asked for into the result."""
        raise NotImplementedError

    def begin(self, plane: Plane) -> Any:
        """Memory for the result."""
        raise NotImplementedError

    def add(self, state: Any, strip: Strip, prepared: Any) -> None:
        """Take from a strip what is wanted."""
        raise NotImplementedError

    def end(self, state: Any, seen: Tensor) -> dict[str, Any]:
        """The results by name. `seen` (B, H, N) says which queries see a key, as the measure was shown them."""
        return {next(iter(self.gives)): state}

    def with_scores(self, results: dict[str, Any], lse: Tensor) -> dict[str, Any]:
        """The results completed by the log-sum-exp (B, H, N) of the scores; called if `needs_scores`."""
        return results

    def counted(self, plane: Plane, prepared: Any) -> Tensor | dict[str, Tensor] | None:
        """Which queries (1|B, N) count in a mean, for all results or by their names; None for all that see a key."""
        return None

    @property
    def sums_queries(self) -> bool:
        """Whether all that it gives is summed over queries, so that it is shown no padding."""
        return not {"query", "choice"} & set(self.gives.values())

    def __repr__(self) -> str:
        shown = ", ".join(f"{k}={v!r}" for k, v in vars(self).items() if isinstance(v, (int, float)))
        return f"{type(self).__name__}({shown})"


class PerQuery(Measure):
    """A number per query: (B, H, N)."""

    query_tensors = 1

    def of(self, strip: Strip, prepared: Any) -> Tensor:
        """The number of each query of the strip: (c, h, n)."""
        raise NotImplementedError

    def begin(self, plane: Plane) -> Tensor:
        return plane.new(plane.queries)

    def add(self, state: Tensor, strip: Strip, prepared: Any) -> None:
        state[strip.where] = self.of(strip, prepared)


class PerKey(Measure):
    """A number per key, summed over queries: (B, H, M)."""

    def of(self, strip: Strip, prepared: Any) -> Tensor:
        """What the strip gives to each of its keys: (c, h, m)."""
        raise NotImplementedError

    def begin(self, plane: Plane) -> Tensor:
        return plane.new(plane.keys)

    def add(self, state: Tensor, strip: Strip, prepared: Any) -> None:
        add_to_keys(state, strip, self.of(strip, prepared))


def add_to_keys(state: Tensor, strip: Strip, sums: Tensor) -> None:
    """Add what a strip gives to each of its keys, (c, h, m), to a tensor of all of them, (B, H, M)."""
    at = 0
    for run in strip.runs:
        state[strip.batch, strip.heads, run] += sums[..., at : at + run.stop - run.start]
        at += run.stop - run.start


def ranks(padding: Tensor | None, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Which token of its text each slot holds, (1|B, size), -1 for padding; and how many each text has, (1|B, 1).

    >>> [x.tolist() for x in ranks(torch.tensor([[True, False, False]]), 3, torch.device("cpu"))]
    [[[-1, 0, 1]], [[2]]]
    """
    if padding is None:
        return torch.arange(size, device=device)[None], torch.full((1, 1), size, device=device)
    real = ~padding
    return (real.cumsum(1) - 1).masked_fill(padding, -1), real.sum(1, keepdim=True)
