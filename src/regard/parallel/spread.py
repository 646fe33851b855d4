"""How a layer is spread over processes, and what happens in one call of it. The layer knows this by two names alone:
`layer.spread`, and what it gives for each call, which `regard.attend` takes as `spread=`.

Letters: B batch, H query heads, G kv heads, N queries, M keys, n, m those of one rank, D head width of q and k, E of v.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from regard import kernels
from regard.attention import attention_weights, prepare
from regard.errors import bad_type, bad_value, shape_of
from regard.kernels import Call
from regard.kernels.dropout import new_seed
from regard.masks import Mask, as_mask
from regard.parallel import alltoall, ring
from regard.parallel.alltoall import heads_of, kv_heads_of
from regard.parallel.tokens import Tokens, balance_of, mark, parts_of
from regard.parallel.whole import Drop, Whole, describe
from regard.parallel.wire import Ranks, digest
from regard.positions import Bias, DenseBias, as_biases

__all__ = ["Heads", "Sequence", "Sharding", "Spread"]

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
                raise bad_value("query", expected="a text and a token at least on every rank, where heads are spread",
                                received=f"{query.shape[0]} texts of {query.shape[1]} queries and {key.shape[1]} keys",
                                remedy="fewer ranks for the sequence")  # fmt: skip
            if cache is not None and self.sequence is not None:
                raise bad_value("cache", expected="none where the sequence is spread over ranks", received="a cache",
                                remedy="spread the heads instead: parallel.shard_heads")  # fmt: skip
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
        seed = None if seed is None else seed.new_full((1,), self._first(rows[0]["seed"]))
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
            return facts()

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

    def _first(self, seed: int) -> int:
        """The seed of the sequence's first rank; where heads are spread, too, that of their first."""
        both = self.heads is not None and self.sequence is not None
        return self.heads.ranks.first(seed) if both else seed  # type: ignore[union-attr]

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
                raise bad_value("cache", expected="none where the text is spread over ranks", received="a cache",
                                remedy="spread the heads instead: parallel.shard_heads")  # fmt: skip
            balanced = self._balance("ids", ids)
            _check_balance("keep", keep, balanced)
            return {"texts": ids.shape[0], "balance": balanced, "tokens": ids.shape[1],
                    "keep": 0 if keep is None else keep.shape[1]}  # fmt: skip

        rows = self._agreed("ids", ("texts", "balance", "tokens", "keep"), facts, ("tokens", "keep"))
        lengths, kept = (tuple(row[name] for row in rows) for name in ("tokens", "keep"))
        tokens = Tokens(lengths, bool(rows[0]["balance"]))
        tokens.check()
        if any(kept) and set(kept) != {tokens.total}:
            if kept != lengths or keep is None:
                raise bad_value("keep", expected=f"one flag for each of all {tokens.total} tokens, or on each rank of "
                                f"its part, {lengths}", received=f"lengths {kept}")  # fmt: skip
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
                raise bad_value("positions", expected=f"those of all {queries.total} tokens, or on each rank those of "
                                f"its part, {n}", received=f"lengths {at}")  # fmt: skip
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


class Stand(NamedTuple):
    """Where some tokens stand, (n,) or (B, n), and how long the whole text is."""

    positions: Tensor
    length: int


@dataclass(frozen=True)
class Spread:
    """One call of a layer that is spread over processes: where its tokens are, and how `attend` computes it."""

    sharding: Sharding
    queries: Tokens | None = None
    keys: Tokens | None = None
    positions: Tensor | None = None  # the whole's, where the caller gave them
    own: bool = True  # whether the keys are the queries' own tokens
    seed: Tensor | None = None

    @property
    def parts(self) -> bool:
        """Whether tokens are spread: else the layer has them all."""
        return self.queries is not None

    def of_queries(self, device: torch.device) -> Stand:
        """Where this rank's queries stand."""
        assert self.queries is not None and self.keys is not None and self.sharding.sequence is not None
        rank, n, m = self.sharding.sequence.ranks.rank, self.queries.total, self.keys.total
        if self.positions is None:
            return Stand(self.queries.numbers(rank, device) + (m - n), m)
        own = self.queries.part(self.positions, rank, self.positions.dim() - 1)
        return Stand(own, int(self.positions.max()) + 1 if self.positions.numel() else 0)

    def of_keys(self, device: torch.device) -> Stand:
        """Where this rank's keys stand."""
        assert self.keys is not None and self.sharding.sequence is not None
        if self.own and self.positions is not None:
            return self.of_queries(device)
        return Stand(self.keys.numbers(self.sharding.sequence.ranks.rank, device), self.keys.total)

    def marked(self, out: Tensor) -> Tensor:
        """The layer's output: the sum over the ranks of their heads; a part, where its input was one."""
        if self.sharding.heads is not None:
            out = self.sharding.heads.ranks.wait(out)
        return out if self.queries is None else mark(out, self.queries.balanced)

    def entered(self, *inputs: Tensor) -> list[Tensor]:
        """The layer's inputs as its projections take them: where heads are spread, a replicated DTensor, so that the
        gradients of one input are summed over the ranks once, and not once for each projection."""
        heads = self.sharding.heads
        if heads is None:
            return list(inputs)
        made: dict[int, Tensor] = {}
        for x in inputs:
            if id(x) not in made:
                made[id(x)] = heads.ranks.entered(x, heads.mesh)
        return [made[id(x)] for x in inputs]

    # What `attend` does

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, kernel: str, dropout: float, **options: Any) -> Tensor:
        """(B, H, n, E) from this rank's q (B, H, n, D), k (B, G, m, D), v (B, G, m, E)."""
        device = q.device.type
        if torch.is_autocast_enabled(device) and q.dtype is not torch.float64:
            q, k, v = (x.to(torch.get_autocast_dtype(device)) for x in (q, k, v))
        with torch.autocast(device, enabled=False):
            drop = self._drop(q, dropout)
            sequence = self.sharding.sequence
            options = self._of_heads(q, k, **options)
            if sequence is None:
                call = prepare(q, k, v, **options)
                if drop is not None:
                    batch, heads, n, m = call.shape
                    call = replace(call, dropout=drop.part(batch, slice(0, heads), slice(0, n), slice(0, m)))
                return kernels.choose(kernel, call).output(call)
            method = ring.attend if sequence.method == "ring" else alltoall.attend
            whole = self._whole(q, k, v, drop, **options)
            return method(whole, sequence.ranks, q, k, v, kernel)

    def weights(self, q: Tensor, k: Tensor, **options: Any) -> Tensor:
        """The weights of this rank's queries: (B, h, n, M), h the heads here."""
        options = self._of_heads(q, k, **options)
        sequence = self.sharding.sequence
        if sequence is None:
            return attention_weights(q, k, **options)
        assert self.queries is not None and self.keys is not None
        whole = self._whole(q, k, k, None, **options)
        k = cast("Tensor", _AllKeys.apply(k, sequence.ranks, self.keys))
        rows = []
        at = 0
        for run in self.queries.runs[sequence.ranks.rank]:
            own = q[:, :, at : at + run.stop - run.start]
            at += run.stop - run.start
            call = whole.part(own, k, k, slice(0, q.shape[1]), run, slice(0, self.keys.total))
            rows.append(kernels.reference.weights(call)[0].to(q.dtype))
        return torch.cat(rows, 2) if rows else q.new_zeros(*q.shape[:3], self.keys.total)

    # What those need who look

    def seen(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Call, Gathered]:
        """All tokens of some heads, as one call; and how to put together what each rank finds of its heads."""
        options = self._of_heads(q, k, **options)
        sequence, heads = self.sharding.sequence, q.shape[1]
        groups: list[tuple[Ranks, list[slice], int]] = []
        if sequence is None:
            call = prepare(q, k, v, **options)
        else:
            assert self.queries is not None and self.keys is not None
            ranks = sequence.ranks
            whole = self._whole(q, k, v, None, **options)
            own = heads_of(heads, ranks.size)
            q, k, v = alltoall.to_heads(ranks, self.queries, self.keys, q, k, v)
            every = (slice(0, self.queries.total), slice(0, self.keys.total))
            call = whole.part(q, k, v, own[ranks.rank], *every)
            groups.append((ranks, own, heads))
        if self.sharding.heads is not None:
            spread = self.sharding.heads
            groups.append((spread.ranks, spread.each, spread.total))
        return call, Gathered(groups)

    def everything(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Call:
        """All tokens of all heads, as one call: what one process would have."""
        mask, bias, sinks = options.pop("mask"), options.pop("bias"), options.pop("sinks")
        sequence, heads = self.sharding.sequence, self.sharding.heads
        if sequence is not None:
            assert self.queries is not None and self.keys is not None
            tokens = (self.queries, self.keys, self.keys)
            q, k, v = (t.whole(parts_of(x, sequence.ranks, t, 2), 2) for x, t in zip((q, k, v), tokens, strict=True))
            options |= {"positions": self.positions, "key_positions": self.positions if self.own else None}
        if heads is not None:
            size = heads.ranks.size
            even = Tokens((heads.total // size,) * size, False)
            q = even.whole(parts_of(q, heads.ranks, even, 1), 1)
            k, v = (_of_all_kv_heads(x, heads) for x in (k, v))
            bias = tuple(one.with_weight(_full(one.weight)) for one in as_biases(bias)) or None
            sinks = None if sinks is None else _full(sinks)
        return prepare(q, k, v, mask=mask, bias=bias, sinks=sinks, **options)

    def outputs(self, out: Tensor) -> Tensor:
        """The outputs (B, H, N, E) of all heads and tokens, from this rank's."""
        out, heads = self.whole_of(out, 2), self.sharding.heads
        if heads is None:
            return out
        even = Tokens((out.shape[1],) * heads.ranks.size, False)
        return even.whole(parts_of(out, heads.ranks, even, 1), 1)

    def whole_of(self, x: Tensor, dim: int) -> Tensor:
        """This rank's part of something that the queries have, as the whole."""
        if self.queries is None or self.sharding.sequence is None:
            return x
        return self.queries.whole(parts_of(x, self.sharding.sequence.ranks, self.queries, dim), dim)

    # Options of the whole

    def _drop(self, q: Tensor, dropout: float) -> Drop | None:
        if not dropout:
            return None
        assert self.seed is not None
        heads = self.sharding.heads
        return Drop(dropout, self.seed, *((0, q.shape[1]) if heads is None else (heads.own.start, heads.total)))

    def _whole(self, q: Tensor, k: Tensor, v: Tensor, drop: Drop | None, **options: Any) -> Whole:
        assert self.queries is not None and self.keys is not None
        options = {**options, "positions": self.positions, "key_positions": self.positions if self.own else None}
        return Whole.of(q, k, v, self.queries, self.keys, drop, **options)

    def _of_heads(
        self, q: Tensor, k: Tensor, *, mask: Any, bias: Any, sinks: Tensor | None, **options: Any
    ) -> dict[str, Any]:
        """What is said of all heads, for those that are here."""
        heads = self.sharding.heads
        if heads is not None:
            if mask is not None and not as_mask(mask).shared_by_heads():
                mask = self._mask_of_heads(as_mask(mask), q, k, options)
            bias = tuple(_bias_of_heads(one, heads) for one in as_biases(bias)) or None
            sinks = sinks.to_local() if isinstance(sinks, DTensor) else sinks
        return {"mask": mask, "bias": bias, "sinks": sinks, **options}

    def _mask_of_heads(self, mask: Mask, q: Tensor, k: Tensor, options: dict[str, Any]) -> Mask | None:
        """A mask that is said of each head, for the heads here and all tokens."""
        heads = self.sharding.heads
        assert heads is not None
        every = q.detach()[:, :1].expand(-1, heads.total, -1, -1)  # (as many heads as the mask is of)
        if self.queries is not None and self.keys is not None:
            call = self._whole(every, k[:, :1], k[:, :1], None, mask=mask).call
        else:
            place = {name: options[name] for name in ("positions", "key_positions")}
            call = prepare(every, k.detach()[:, :1], k.detach()[:, :1], mask=mask, **place)
        return None if call.mask is None else call.mask.part(call.whole(), heads.own, 0)


class _AllKeys(torch.autograd.Function):
    """The keys (B, G, M, D) of all ranks; each rank looks at them all, so their gradients are summed."""

    @staticmethod
    def forward(ctx: Any, k: Tensor, ranks: Ranks, keys: Tokens) -> Tensor:
        ctx.ranks, ctx.keys = ranks, keys
        return keys.whole(parts_of(k, ranks, keys, 2), 2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.keys.part(ctx.ranks.summed(grads[0].clone()), ctx.ranks.rank, 2).clone(), None, None


def _full(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def _of_all_kv_heads(x: Tensor, heads: Heads) -> Tensor:
    """Keys or values (B, G, M, D) of all kv heads, from those that each rank has (some may be on several)."""
    here = [kv_heads_of(own, heads.total, heads.groups) for own in heads.each]
    there = Tokens(tuple(map(len, here)), False)
    every = there.whole(parts_of(x, heads.ranks, there, 1), 1)
    numbers = [one for some in here for one in some]
    return every[:, [numbers.index(one) for one in range(heads.groups)]]


def _bias_of_heads(bias: Bias, heads: Heads) -> Bias:
    """Its part for the heads here. A weight that is whole on every rank gets the gradient of all of them."""
    weight = bias.weight
    if isinstance(weight, DTensor):
        return bias.with_weight(weight.to_local())
    axis = 1 if isinstance(bias, DenseBias) else weight.dim() - 1
    if not weight.requires_grad:
        return bias if weight.shape[axis] != heads.total else bias.with_weight(_narrow(weight, axis, heads.own))
    return bias.with_weight(cast("Tensor", _OwnHeads.apply(weight, heads, axis)))


def _narrow(x: Tensor, axis: int, which: slice) -> Tensor:
    return x.narrow(axis, which.start, which.stop - which.start)


class _OwnHeads(torch.autograd.Function):
    """The part for the heads here of something that every rank has whole (or all of it, where it is one for all heads);
    its gradient is whole again, on every rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, heads: Heads, axis: int) -> Tensor:
        own = heads.own if x.shape[axis] == heads.total else slice(0, x.shape[axis])
        ctx.ranks, ctx.axis, ctx.own, ctx.shape = heads.ranks, axis, own, x.shape
        return _narrow(x, axis, own).clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        total = grads[0].new_zeros(ctx.shape)
        _narrow(total, ctx.axis, ctx.own).copy_(grads[0])
        return ctx.ranks.summed(total), None, None


@dataclass(frozen=True)
class Gathered:
    """How results of this rank's heads become those of all: over the ranks of each mesh dimension in turn."""

    groups: list[tuple[Ranks, list[slice], int]]

    @property
    def heads(self) -> int:
        """H of the whole."""
        return self.groups[-1][2]

    @property
    def own(self) -> slice:
        """Which heads of the whole are here."""
        start, stop = 0, None
        for ranks, own, _ in reversed(self.groups):
            piece = own[ranks.rank]
            start, stop = start + piece.start, start + piece.stop
        assert stop is not None
        return slice(start, stop)

    def __call__(self, x: Tensor, dim: int = 1) -> Tensor:
        """(B, h, ...) of this rank's heads to (B, H, ...) of all."""
        for ranks, own, total in self.groups:
            lengths = tuple(piece.stop - piece.start for piece in own)
            parts = parts_of(x, ranks, Tokens(lengths, False), dim)
            first = [i for i, piece in enumerate(own) if piece not in own[:i]]  # (where ranks share a head)
            x = torch.cat([parts[i] for i in first], dim)
            assert x.shape[dim] == total
        return x
