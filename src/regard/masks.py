"""Who may see whom. A mask is a small object that answers for any block of (query, key) pairs, so that no kernel
ever needs the whole N x M matrix, and masks compose with `&`, `|` and `~`.

    Causal() & Window(128) & Documents(ids)        Causal() | Prefix(16)        ~Padding(lengths=n)

`Causal`, `Window` and `Prefix` compare *positions* (where a token stands); `Padding`, `Documents`, `Keep` and `Hide`
index *slots* (where it lies in the tensor). The two differ with caches, packed sequences and padding on the left.

A new mask is one class: `fields` names what it is made of, `check` refuses wrong sizes, `block` answers for a tile.
Optional: `survey` says which tiles are wholly hidden or wholly visible, so that kernels can skip them, and `part` gives
the mask of one tile, so that a part of the plane can be computed alone.

Letters: B batch, H query heads, N queries, M keys; n, m the sides of one tile; R, C the number of tiles down, across.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from regard.errors import bad_type, bad_value, shape_of

__all__ = [
    "And",
    "Causal",
    "Documents",
    "Grid",
    "Hide",
    "Keep",
    "Mask",
    "Not",
    "Or",
    "Padding",
    "Prefix",
    "Survey",
    "Tile",
    "Window",
    "as_mask",
    "conjuncts",
]

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
FARTHEST = 2**61  # of a position from 0. Differences are up to twice that, and what is added to these still fits int64


class Tile(NamedTuple):
    """A rectangle of (query, key) pairs: its slots, and the positions that stand there."""

    queries: int  # N, of the whole plane
    batch: slice
    rows: slice
    cols: slice
    q_positions: Tensor  # (B|1, n)
    k_positions: Tensor  # (B|1, m)
    items: int = 0  # batch items and query heads, where they are known; else 0
    heads: int = 0

    @property
    def shape(self) -> tuple[int, int]:
        """(n, m)"""
        return self.rows.stop - self.rows.start, self.cols.stop - self.cols.start

    @staticmethod
    def at(q_positions: Tensor, k_positions: Tensor) -> Tile:
        """The plane of queries at (B|1, n) and keys at (B|1, m)."""
        n, m = q_positions.shape[1], k_positions.shape[1]
        return Tile(n, slice(None), slice(0, n), slice(0, m), q_positions, k_positions)


class Survey(NamedTuple):
    """What is known of each tile of a grid without looking inside: Kleene's three values as two booleans.

    `some`: a pair of the tile may be visible (False: all are hidden). `every`: all pairs are visible.
    Both (B|1, R, C). Saying `some=True, every=False` is always right: it means "look inside".
    """

    some: Tensor
    every: Tensor


@dataclass(frozen=True)
class Grid:
    """The whole N x M plane cut into tiles of `height` x `width`; what a mask is asked to survey."""

    queries: int
    keys: int
    height: int
    width: int
    q_positions: Tensor  # (B|1, N)
    k_positions: Tensor  # (B|1, M)

    def rows(self, per_query: Tensor) -> tuple[Tensor, Tensor]:
        """The least and the greatest of (B|1, N) within each row of tiles: two of (B|1, R, 1)."""
        low, high = _extremes(per_query, self.height)
        return low[:, :, None], high[:, :, None]

    def cols(self, per_key: Tensor) -> tuple[Tensor, Tensor]:
        """The least and the greatest of (B|1, M) within each column of tiles: two of (B|1, 1, C)."""
        low, high = _extremes(per_key, self.width)
        return low[:, None, :], high[:, None, :]

    def tiles(self, plane: Tensor) -> tuple[Tensor, Tensor]:
        """The least and the greatest of (B|1, N|1, M|1), numbers from 0 to 1, within each tile: two of
        (B|1, R|1, C|1)."""
        low = high = plane
        for axis, size in ((1, self.height), (2, self.width)):
            if plane.shape[axis] > 1:
                short = -plane.shape[axis] % size
                pad = [0, 0, 0, short] if axis == 1 else [0, short]
                low = torch.nn.functional.pad(low, pad, value=1).unflatten(axis, (-1, size)).amin(axis + 1)
                high = torch.nn.functional.pad(high, pad, value=0).unflatten(axis, (-1, size)).amax(axis + 1)
        return low, high


def _extremes(values: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Least and greatest of each run of `size` values: (B, L) -> two (B, ceil(L / size))."""
    short = -values.shape[-1] % size
    if short:  # repeat the last value: it changes neither extreme
        values = torch.cat([values, values[:, -1:].expand(-1, short)], dim=-1)
    runs = values.unflatten(-1, (-1, size))
    return runs.amin(-1), runs.amax(-1)


class Mask:
    """Base of all masks. True means: may attend.

    >>> mask = Causal() & Window(2)
    >>> mask
    Causal() & Window(2)
    >>> mask.dense(3, 3)[0, 0].int().tolist()
    [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
    >>> print(mask.draw(3))
    █··
    ██·
    ·██
    """

    fields: ClassVar[tuple[str, ...]] = ()
    kinds: ClassVar[dict[str, type[Mask]]] = {}  # by name, so that operators can rebuild a mask from its parts

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        Mask.kinds[cls.__name__] = cls
        if cls.__module__ != __name__:  # a mask of somebody's own: kernels rely on the shapes of what it answers
            for answer, check in (("block", _check_block), ("survey", _check_survey)):
                if answer in vars(cls):
                    setattr(cls, answer, checked(vars(cls)[answer], check))

    def block(self, tile: Tile) -> Tensor:
        """Which pairs of the tile are visible: boolean, four axes that broadcast to (B, H, n, m)."""
        raise NotImplementedError

    def survey(self, grid: Grid) -> Survey:
        """Which tiles are wholly hidden or wholly visible. By default nothing is known."""
        unknown = torch.ones(1, 1, 1, dtype=torch.bool, device=grid.q_positions.device)
        return Survey(unknown, ~unknown)

    def part(self, tile: Tile, heads: slice, shift: int) -> Mask:
        """The same mask for a tile alone, with all batch items and some heads: slots are counted from its corner, and
        positions from `shift`. By default what it says of the tile is evaluated."""
        visible = self.block(tile)
        return Keep(visible[:, heads] if visible.shape[1] > 1 else visible)

    def sees_all(self, first: int, queries: int, keys: int) -> bool:
        """Whether it is known to hide nothing from queries at `first`, `first` + 1, ... of keys at 0, 1, ..."""
        return False

    def shared_by_heads(self) -> bool:
        """Whether all heads see the same: no tensor of it has an axis for them."""
        return all(tensor.dim() < 4 or tensor.shape[1] == 1 for tensor in self.tensors())

    def check(self, batch: int, heads: int, queries: int, keys: int) -> None:
        """Raise where this mask does not fit attention of shape (B, H, N, M)."""

    def dense(
        self,
        queries: int,
        keys: int | None = None,
        *,
        positions: Tensor | None = None,
        key_positions: Tensor | None = None,
    ) -> Tensor:
        """The whole mask at once: boolean, (1|B, 1|H, N, M). For small sizes and for looking.

        Without positions the last query stands at the last key.
        """
        keys = queries if keys is None else keys
        tile = whole(queries, keys, positions=positions, key_positions=key_positions, device=self._device())
        visible = self.block(tile)
        return visible.expand(*visible.shape[:2], queries, keys)

    def draw(self, queries: int = 8, keys: int | None = None, *, batch: int = 0, head: int = 0) -> str:
        """A small text picture: one line per query, `█` where it may look, `·` where not."""
        picture = self.dense(queries, keys)
        rows = picture[min(batch, picture.shape[0] - 1), min(head, picture.shape[1] - 1)].tolist()
        return "\n".join("".join("█" if seen else "·" for seen in row) for row in rows)

    def tensors(self) -> Iterator[Tensor]:
        """Those that it is made of."""
        for name in self.fields:
            value = getattr(self, name)
            if isinstance(value, Tensor):
                yield value
            elif isinstance(value, Mask):
                yield from value.tensors()

    def _device(self) -> torch.device | None:
        return next((tensor.device for tensor in self.tensors()), None)

    def __and__(self, other: Mask) -> Mask:
        return And(self, as_mask(other))

    def __or__(self, other: Mask) -> Mask:
        return Or(self, as_mask(other))

    __rand__ = __and__
    __ror__ = __or__

    def __invert__(self) -> Mask:
        return self.inner if isinstance(self, Not) else Not(self)

    def __bool__(self) -> bool:
        raise bad_type(
            "mask",
            expected="`a & b`, `a | b` or `~a`",
            received="`a and b`, `not a` or `if a`",
            remedy="masks compose with &, | and ~; test for absence with `is None`",
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={_short(getattr(self, name))}' for name in self.fields)})"


class Causal(Mask):
    """A query sees the keys at its own position and before. By default the last query stands at the last key."""

    def block(self, tile: Tile) -> Tensor:
        return (tile.k_positions[:, None, :] <= tile.q_positions[:, :, None])[:, None]

    def part(self, tile: Tile, heads: slice, shift: int) -> Mask:
        return self

    def sees_all(self, first: int, queries: int, keys: int) -> bool:
        return first >= keys - 1  # every query stands at or after the last key, as in decoding

    def survey(self, grid: Grid) -> Survey:
        q_low, q_high = grid.rows(grid.q_positions)
        k_low, k_high = grid.cols(grid.k_positions)
        return Survey(k_low <= q_high, k_high <= q_low)


class Window(Mask):
    """A query sees its neighbours. `Window(size)`: the `size` keys that end at its own, itself included.
    `Window(before=b, after=a)`: b before, itself, a after (either is 0 where it is not given).

    >>> print((Window(3)).draw(4))
    █···
    ██··
    ███·
    ·███
    >>> print(Window(before=1, after=1).draw(4))
    ██··
    ███·
    ·███
    ··██
    """

    fields = ("before", "after")

    def __init__(self, size: int | None = None, *, before: int | None = None, after: int | None = None) -> None:
        if (size is None) == (before is None and after is None):
            raise bad_value(
                "Window",
                expected="either a size, or before= and after=",
                received=f"size={size}, before={before}, after={after}",
                remedy="Window(128), or Window(before=127, after=0)",
            )
        if size is not None:
            before, after = _whole_number("Window size", size, at_least=1) - 1, 0
        self.before = _whole_number("Window before", 0 if before is None else before, at_least=0)
        self.after = _whole_number("Window after", 0 if after is None else after, at_least=0)

    def block(self, tile: Tile) -> Tensor:
        ahead = tile.k_positions[:, None, :] - tile.q_positions[:, :, None]  # (B|1, n, m)
        return ((ahead >= -self.before) & (ahead <= self.after))[:, None]

    def part(self, tile: Tile, heads: slice, shift: int) -> Mask:
        return self

    def sees_all(self, first: int, queries: int, keys: int) -> bool:
        return first + queries - 1 <= self.before and keys - 1 - first <= self.after  # wider than the plane

    def survey(self, grid: Grid) -> Survey:
        q_low, q_high = grid.rows(grid.q_positions)
        k_low, k_high = grid.cols(grid.k_positions)
        least, most = k_low - q_high, k_high - q_low  # how far ahead the tile's keys can be
        return Survey((most >= -self.before) & (least <= self.after), (least >= -self.before) & (most <= self.after))

    def __repr__(self) -> str:
        return f"Window(before={self.before}, after={self.after})" if self.after else f"Window({self.before + 1})"


class Prefix(Mask):
    """Every query sees the keys whose position is below `n` (one number, or one per batch item).

    Alone it hides all that comes after; the mask of a prefix language model is `Causal() | Prefix(n)`.
    """

    fields = ("n",)

    def __init__(self, n: int | Tensor) -> None:
        if isinstance(n, Tensor):
            self.n = _integers("Prefix", n, dims=1, say="an integer, or an integer tensor (B,)").to(torch.int64)
        else:
            self.n = _whole_number("Prefix", n, at_least=0)

    def _n(self, batch: slice) -> Tensor | int:
        return _of_batch(self.n, batch)[:, None] if isinstance(self.n, Tensor) else self.n

    def block(self, tile: Tile) -> Tensor:
        return (tile.k_positions < self._n(tile.batch))[:, None, None, :]

    def part(self, tile: Tile, heads: slice, shift: int) -> Mask:
        return Prefix(self.n.clamp(min=shift) - shift if isinstance(self.n, Tensor) else max(self.n - shift, 0))

    def survey(self, grid: Grid) -> Survey:
        low, high = grid.cols(grid.k_positions)
        n = self.n[:, None, None] if isinstance(self.n, Tensor) else self.n
        return Survey(low < n, high < n)

    def check(self, batch: int, heads: int, queries: int, keys: int) -> None:
        if isinstance(self.n, Tensor):
            _fits("Prefix", self.n, ("B", batch))

    def __repr__(self) -> str:
        return f"Prefix({_short(self.n)})"


class Padding(Mask):
    """Which key slots hold real tokens. `Padding(lengths=...)`: the first `lengths[b]` of them, integers (B,).
    `Padding(keep=...)`: boolean (B, M), True where the token is real. Queries are not masked.

    >>> print(Padding(lengths=torch.tensor([2])).draw(3))
    ██·
    ██·
    ██·
    """

    fields = ("lengths", "keep")

    def __init__(self, lengths: Tensor | None = None, keep: Tensor | None = None) -> None:
        if (lengths is None) == (keep is None):
            raise bad_value(
                "Padding",
                expected="exactly one of lengths= and keep=",
                received="both" if lengths is not None else "neither",
            )
        if lengths is not None:
            boolean = isinstance(lengths, Tensor) and lengths.dtype is torch.bool
            if isinstance(lengths, Tensor) and (boolean or lengths.dim() == 2):
                raise bad_type(
                    "Padding lengths",
                    expected="an integer tensor (B,)",
                    received=f"a {'boolean ' * boolean}tensor of shape {shape_of(lengths)}",
                    remedy=f"Padding(keep={'t' if boolean else 't.bool()'}) takes the (B, M) mask of real tokens",
                )
            lengths = _integers("Padding lengths", lengths, dims=1, say="an integer tensor (B,)").to(torch.int64)
        if keep is not None:
            keep = _booleans("Padding keep", keep)
            if keep.dim() != 2:
                raise bad_value(
                    "Padding keep",
                    expected="a boolean tensor (B, M)",
                    received=f"shape {shape_of(keep)}",
                    remedy="keep[None] for one text" if keep.dim() == 1 else "masks.Keep for (B, N, M) or (B, H, N, M)",
                )
        self.lengths, self.keep = lengths, keep

    def block(self, tile: Tile) -> Tensor:
        if self.keep is not None:
            return _of_batch(self.keep, tile.batch)[:, None, None, tile.cols]
        assert self.lengths is not None
        slots = torch.arange(tile.cols.start, tile.cols.stop, device=self.lengths.device)
        return (slots < _of_batch(self.lengths, tile.batch)[:, None])[:, None, None, :]

    def part(self, tile: Tile, heads: slice, shift: int) -> Mask:
        if self.keep is not None:
            return Padding(keep=self.keep[:, tile.cols])
        assert self.lengths is not None
        return Padding(lengths=self.lengths.clamp(min=tile.cols.start) - tile.cols.start)

    def survey(self, grid: Grid) -> Survey:
        if self.keep is not None:
            low, high = grid.cols(self.keep.to(torch.uint8))
            return Survey(high > 0, low > 0)
        assert self.lengths is not None
        first, last = grid.cols(torch.arange(grid.keys, device=self.lengths.device)[None])
        lengths = self.lengths[:, None, None]
        return Survey(first < lengths, last < lengths)

    def check(self, batch: int, heads: int, queries: int, keys: int) -> None:
        if self.keep is not None:
            _fits("Padding keep", self.keep, ("B", batch), ("M", keys), exact=("M",))
        else:
            assert self.lengths is not None
            _fits("Padding lengths", self.lengths, ("B", batch))

    def __repr__(self) -> str:
        return f"Padding(keep={_short(self.keep)})" if self.keep is not None else f"Padding({_short(self.lengths)})"


class Documents(Mask):
    """Packed sequences: a query sees the keys of its own document. `ids` (N,) or (B, N) integers, equal within a
    document; `key_ids` (M,) or (B, M) where the keys are others. Where `ids` covers all M slots of a cache and there
    are fewer queries, the queries are the last N of them.

    >>> print((Causal() & Documents(torch.tensor([0, 0, 1, 1]))).draw(4))
    █···
    ██··
    ··█·
    ··██
    """

    fields = ("ids", "key_ids")

    def __init__(self, ids: Tensor, key_ids: Tensor | None = None) -> None:
        say = "an integer tensor (N,) or (B, N)"
        self.ids = _integers("Documents ids", ids, dims=2, say=say)
        self.key_ids = None if key_ids is None else _integers("Documents key_ids", key_ids, dims=2, say=say)

    def sides(self, queries: int) -> tuple[Tensor, Tensor]:
        """The documents of the queries, (1|B, N), and of the keys, (1|B, M)."""
        if self.key_ids is not None:
            return self.ids, self.key_ids
        return self.ids[:, max(self.ids.shape[1] - queries, 0) :], self.ids

    def block(self, tile: Tile) -> Tensor:
        q_ids, k_ids = (_of_batch(ids, tile.batch) for ids in self.sides(tile.queries))
        return (q_ids[:, tile.rows, None] == k_ids[:, None, tile.cols])[:, None]

    def part(self, tile: Tile, heads: slice, shift: int) -> Mask:
        q_ids, k_ids = self.sides(tile.queries)
        return Documents(q_ids[:, tile.rows], k_ids[:, tile.cols])

    def survey(self, grid: Grid) -> Survey:
        q_ids, k_ids = self.sides(grid.queries)
        (q_low, q_high), (k_low, k_high) = grid.rows(q_ids), grid.cols(k_ids)
        same = (q_low == q_high) & (k_low == k_high) & (q_low == k_low)
        return Survey((q_low <= k_high) & (k_low <= q_high), same)

    def check(self, batch: int, heads: int, queries: int, keys: int) -> None:
        q_ids, k_ids = self.sides(queries)
        _fits("Documents ids", q_ids, ("B", batch), ("N", queries), exact=("N",))
        _fits("Documents key_ids", k_ids, ("B", batch), ("M", keys), exact=("M",))

    def __repr__(self) -> str:
        keys = "" if self.key_ids is None else f", key_ids={_short(self.key_ids)}"
        return f"Documents({_short(self.ids)}{keys})"


class Keep(Mask):
    """A boolean tensor, True = may attend: (N, M), (B, N, M) or (B, H, N, M); any axis may be 1."""

    fields = ("tensor",)
    sense: ClassVar[bool] = True

    def __init__(self, tensor: Tensor) -> None:
        name = type(self).__name__
        tensor = _booleans(name, tensor)
        if not 2 <= tensor.dim() <= 4:
            raise bad_value(
                name,
                expected="shape (N, M), (B, N, M) or (B, H, N, M)",
                received=f"shape {shape_of(tensor)}",
                remedy=f"padding is masks.Padding(keep={'' if self.sense else '~'}t[None]), for one of keys (M,)",
            )
        if tensor.dim() == 3:
            tensor = tensor[:, None]
        self.tensor = tensor if tensor.dim() == 4 else tensor[None, None]

    def block(self, tile: Tile) -> Tensor:
        part = _of_batch(self.tensor, tile.batch)
        part = part[:, :, tile.rows] if part.shape[2] > 1 else part
        part = part[..., tile.cols] if part.shape[3] > 1 else part
        return part if self.sense else ~part

    def part(self, tile: Tile, heads: slice, shift: int) -> Mask:
        own = self.tensor[:, heads] if self.tensor.shape[1] > 1 else self.tensor
        own = own[:, :, tile.rows] if own.shape[2] > 1 else own
        return type(self)(own[..., tile.cols] if own.shape[3] > 1 else own)

    def survey(self, grid: Grid) -> Survey:
        seen = self.tensor.to(torch.uint8)
        low, high = seen.amin(1), seen.amax(1)  # over heads: (B|1, N|1, M|1)
        low, high = grid.tiles(low)[0], grid.tiles(high)[1]
        some, every = high > 0, low > 0
        return Survey(some, every) if self.sense else Survey(~every, ~some)

    def check(self, batch: int, heads: int, queries: int, keys: int) -> None:
        name, shape = type(self).__name__, tuple(self.tensor.shape)
        if any(got not in (1, want) for got, want in zip(shape, (batch, heads, queries, keys), strict=True)):
            remedy = "give the mask one of the shapes (N, M), (B, N, M), (B, H, N, M)"
            if shape[:2] == (1, 1) and shape[2:] == (batch, keys):
                keep, what = ("t", "real tokens") if self.sense else ("~t", "padding")
                remedy = f"a (B, M) mask of {what} is masks.Padding(keep={keep})"
            elif shape[1] == 1 and shape[0] == heads:
                remedy = f"a mask per head is (1, H, N, M): masks.{name}(t[None])"
            elif shape[1] == 1 and shape[0] == batch * heads:
                remedy = f"a mask per text and head is (B, H, N, M): masks.{name}(t.unflatten(0, ({batch}, {heads})))"
            raise bad_value(
                name,
                expected=f"a mask that broadcasts to (B, H, N, M) = {(batch, heads, queries, keys)}",
                received=f"{shape}",
                remedy=remedy,
            )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({_short(self.tensor)})"


class Hide(Keep):
    """The opposite of `Keep`, by name: a boolean tensor, True = may *not* attend (as `nn.MultiheadAttention`)."""

    sense = False


class And(Mask):
    """Visible where both are."""

    fields = ("left", "right")

    def __init__(self, left: Mask, right: Mask) -> None:
        self.left, self.right = left, right

    def block(self, tile: Tile) -> Tensor:
        return self.left.block(tile) & self.right.block(tile)

    def part(self, tile: Tile, heads: slice, shift: int) -> Mask:
        return type(self)(self.left.part(tile, heads, shift), self.right.part(tile, heads, shift))

    def sees_all(self, first: int, queries: int, keys: int) -> bool:
        return self.left.sees_all(first, queries, keys) and self.right.sees_all(first, queries, keys)

    def survey(self, grid: Grid) -> Survey:
        a, b = self.left.survey(grid), self.right.survey(grid)
        return Survey(a.some & b.some, a.every & b.every)

    def check(self, batch: int, heads: int, queries: int, keys: int) -> None:
        self.left.check(batch, heads, queries, keys)
        self.right.check(batch, heads, queries, keys)

    def __repr__(self) -> str:
        return " & ".join(f"({m})" if isinstance(m, Or) else f"{m}" for m in (self.left, self.right))


class Or(And):
    """Visible where either is."""

    def block(self, tile: Tile) -> Tensor:
        return self.left.block(tile) | self.right.block(tile)

    def sees_all(self, first: int, queries: int, keys: int) -> bool:
        return self.left.sees_all(first, queries, keys) or self.right.sees_all(first, queries, keys)

    def survey(self, grid: Grid) -> Survey:
        a, b = self.left.survey(grid), self.right.survey(grid)
        return Survey(a.some | b.some, a.every | b.every)

    def __repr__(self) -> str:
        return f"{self.left} | {self.right}"


class Not(Mask):
    """Visible where the other is not."""

    fields = ("inner",)

    def __init__(self, inner: Mask) -> None:
        self.inner = inner

    def block(self, tile: Tile) -> Tensor:
        return ~self.inner.block(tile)

    def part(self, tile: Tile, heads: slice, shift: int) -> Mask:
        return Not(self.inner.part(tile, heads, shift))

    def survey(self, grid: Grid) -> Survey:
        inner = self.inner.survey(grid)
        return Survey(~inner.every, ~inner.some)

    def check(self, batch: int, heads: int, queries: int, keys: int) -> None:
        self.inner.check(batch, heads, queries, keys)

    def __repr__(self) -> str:
        return f"~({self.inner})" if isinstance(self.inner, And) else f"~{self.inner}"


def checked(answer: Callable[..., Any], check: Callable[..., None]) -> Callable[..., Any]:
    """The method `answer`, whose results `check(self, result, *arguments)` refuses where they are wrong."""

    @functools.wraps(answer)
    def call(self: Any, *arguments: Any) -> Any:
        result = answer(self, *arguments)
        if not torch.compiler.is_compiling():
            check(self, result, *arguments)
        return result

    return call


def check_axes(what: str, tensor: Tensor, names: tuple[str, ...], sizes: tuple[int, ...], remedy: str = "") -> None:
    """Each axis of a tensor must be 1 or the size named (0: any)."""
    fits = tensor.dim() == len(sizes) and all(
        size in (1, want) or not want for size, want in zip(tensor.shape, sizes, strict=True)
    )
    if not fits:
        axes = ", ".join(f"1|{name}" if want != 1 else "1" for name, want in zip(names, sizes, strict=True))
        known = ", ".join(f"{name} = {want}" for name, want in zip(names, sizes, strict=True) if want)
        raise bad_value(what, expected=f"shape ({axes}), {known}", received=f"shape {shape_of(tensor)}", remedy=remedy)


def _check_block(mask: Mask, visible: object, tile: Tile) -> None:
    what = f"{type(mask).__name__}.block"
    if not isinstance(visible, Tensor) or visible.dtype is not torch.bool:
        received = f"dtype {visible.dtype}" if isinstance(visible, Tensor) else type(visible).__name__
        remedy = "compare: scores > 0; numbers that are added to the scores are a bias (positions.Bias)"
        raise bad_type(what, expected="a boolean tensor (True = may attend)", received=received, remedy=remedy)
    remedy = "axes of the batch and of the heads lead, 1 where all are alike: (n, m) is visible[None, None]"
    check_axes(what, visible, ("B", "H", "n", "m"), (tile.items, tile.heads, *tile.shape), remedy)
    if visible.device != tile.q_positions.device:
        raise bad_value(what, expected=f"device {tile.q_positions.device}, as the tile's", received=visible.device)


def _check_survey(mask: Mask, survey: object, grid: Grid) -> None:
    what = f"{type(mask).__name__}.survey"
    if not isinstance(survey, Survey) or any(not isinstance(x, Tensor) or x.dtype is not torch.bool for x in survey):
        raise bad_type(what, expected="a masks.Survey of two boolean tensors", received=type(survey).__name__)
    rows, cols = grid.rows(grid.q_positions)[0].shape[1], grid.cols(grid.k_positions)[0].shape[2]
    for name, answer in survey._asdict().items():
        check_axes(f"{what}, {name}", answer, ("B", "R", "C"), (0, rows, cols))
    if bool((survey.every & ~survey.some).any()):
        raise bad_value(what, expected="some where every is", received="a tile that is wholly visible and hidden")


def as_mask(mask: Mask | Tensor, sizes: tuple[int, int, int] | None = None) -> Mask:
    """A mask as it is; a boolean tensor as `Keep`; anything else is an error that says what to write, the better if the
    `sizes` of the attention, B, N, M, are told."""
    if isinstance(mask, Mask):
        return mask
    if isinstance(mask, Tensor):
        return Keep(_booleans("Keep", mask, sizes))
    raise bad_type(
        "mask",
        expected="a regard.masks.Mask or a boolean tensor (True = may attend)",
        received=type(mask).__name__,
        remedy="masks.Causal(), masks.Padding(lengths=...), or masks.Keep(torch.as_tensor(mask)) of booleans",
    )


def conjuncts(mask: Mask | None) -> Iterator[Mask]:
    """The parts of a mask that all must agree: `a & b & ~(c | d)` is a, b, ~c, ~d.

    >>> list(conjuncts(Causal() & (Window(3) | Prefix(2)) & ~(Prefix(1) | Window(1))))
    [Causal(), Window(3) | Prefix(2), ~Prefix(1), ~Window(1)]
    """
    if mask is None:
        return
    if type(mask) is And:
        yield from conjuncts(mask.left)
        yield from conjuncts(mask.right)
    elif type(mask) is Not and type(mask.inner) is Or:
        yield from conjuncts(~mask.inner.left)
        yield from conjuncts(~mask.inner.right)
    else:
        yield mask


def whole(
    queries: int,
    keys: int,
    *,
    positions: Tensor | None = None,
    key_positions: Tensor | None = None,
    device: torch.device | None = None,
) -> Tile:
    """The tile that is the whole plane. Without positions the last query stands at the last key."""
    if key_positions is None:
        key_positions = torch.arange(keys, device=device)
    if positions is None:
        positions = (
            key_positions[..., keys - queries :]
            if queries <= keys
            else torch.arange(keys - queries, keys, device=device)
        )
    # as int64: differences of narrow or unsigned integers would wrap around
    q_positions, k_positions = (
        p.to(torch.int64).view(1, -1) if p.dim() == 1 else p.to(torch.int64) for p in (positions, key_positions)
    )
    return Tile(queries, slice(None), slice(0, queries), slice(0, keys), q_positions, k_positions)


def _of_batch(tensor: Tensor, batch: slice) -> Tensor:
    return tensor if tensor.shape[0] == 1 else tensor[batch]


def _whole_number(what: str, value: object, *, at_least: int) -> int:
    """The number itself; or the largest distance of two positions, where it is larger."""
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise bad_type(what, expected="an integer", received=f"{type(value).__name__} {value!r}")
    if value < at_least:
        raise bad_value(what, expected=f"at least {at_least}", received=value)
    return value if isinstance(value, torch.SymInt) else min(value, 2 * FARTHEST)  # pyright: ignore[reportReturnType]


def _integers(what: str, tensor: object, *, dims: int, say: str) -> Tensor:
    """An integer tensor of `dims` axes, the batch first; one axis fewer is taken as a batch of one."""
    if not isinstance(tensor, Tensor):
        try:
            tensor = torch.as_tensor(tensor)
        except (TypeError, ValueError, RuntimeError):
            raise bad_type(what, expected=say, received=type(tensor).__name__) from None
    if tensor.dtype not in _INTEGERS:
        raise bad_type(what, expected=say, received=f"dtype {tensor.dtype}")
    if tensor.dim() == dims - 1:
        tensor = tensor[None]
    if tensor.dim() != dims:
        raise bad_value(what, expected=say, received=f"shape {shape_of(tensor)}")
    return tensor


def _booleans(what: str, tensor: object, sizes: tuple[int, int, int] | None = None) -> Tensor:
    if not isinstance(tensor, Tensor):
        raise bad_type(what, expected="a boolean tensor", received=type(tensor).__name__)
    if tensor.dtype is not torch.bool:
        raise bad_type(
            "mask" if what == "Keep" else what,
            expected=f"a boolean tensor (True = may {'not ' if what == 'Hide' else ''}attend)",
            received=f"dtype {tensor.dtype}",
            remedy=_as_booleans(what, tensor, sizes),
        )
    return tensor


def _as_booleans(what: str, tensor: Tensor, sizes: tuple[int, int, int] | None) -> str:
    """What to write instead of numbers, for attention of `sizes` B, N, M, where they are known. Where all numbers are 0
    or hugely negative, 0 is what may be seen."""
    added = tensor.is_floating_point() and _is_added(tensor)
    if what == "Padding keep":
        return "Padding(keep=t == 0), for it is 0 at real tokens" if added else "Padding(keep=t.bool())"
    if added:
        other = "masks.Hide(t != 0)" if what == "Hide" else "masks.Keep(t == 0)"
        return f"bias=t, which adds it to the scores, or {other}, for it is 0 where a query may attend"
    remedy, keep, of = "masks.Keep(t != 0) where nonzero means visible, ", "t.bool()", "real tokens"
    if what == "Hide":
        remedy, keep, of = "", "t == 0", "padding"
    added = "t" if tensor.is_floating_point() else "t.to(q.dtype)"
    remedy += "masks.Hide(t != 0) where it means hidden (masks.Keep(t) and masks.Hide(t) for booleans), "
    remedy += f"bias={added} to add it to the scores"
    if tensor.dim() != 2 or tensor.is_floating_point():
        return remedy
    padding = f"masks.Padding(keep={keep}) for a (B, M) mask of {of}"  # what tokenizers give
    if sizes is None:
        return f"{padding}; for one (N, M) {remedy}"
    batch, queries, keys = sizes
    of_keys, of_queries = (tensor.shape[1] == keys and tensor.shape[0] in (1, size) for size in (batch, queries))
    return f"{padding}; for one (N, M) {remedy}" if of_keys == of_queries else padding if of_keys else remedy


def _is_added(tensor: Tensor) -> bool:
    """Whether a mask is one that is added to scores: 0, or so little that nothing is left of a weight."""
    try:
        little = tensor <= -1e4
        return bool(little.any()) and bool((little | (tensor == 0)).all())
    except RuntimeError:  # no numbers to look at: a compiler's, or of torch.func
        return False


def _fits(what: str, tensor: Tensor, *axes: tuple[str, int], exact: tuple[str, ...] = ()) -> None:
    """Each axis must be the size named, or 1 (unless it is named in `exact`)."""
    for got, (name, want) in zip(tensor.shape, axes, strict=True):
        if got != want and (got != 1 or name in exact):
            names = ", ".join(name for name, _ in axes)
            raise bad_value(
                what, expected=f"({names}) = {tuple(size for _, size in axes)}", received=f"shape {shape_of(tensor)}"
            )


def _short(value: object) -> str:
    """A tensor in a repr: its values where there are few, else its shape."""
    if not isinstance(value, Tensor):
        return repr(value)
    if value.numel() <= 8 and value.device.type == "cpu" and type(value) is Tensor:
        return repr(value.tolist() if value.shape[0] != 1 or value.dim() == 1 else value[0].tolist())
    return repr(tuple(value.shape))
