"""What is added to the scores: a tensor of the caller's, or an object that knows any block of itself.

A bias object never becomes a dense (H, N, M) tensor: a kernel asks for the block of a `masks.Tile`, as it asks masks,
and in the backward pass hands the gradient of that block to `block_gradient`, which sums it into the gradient of the
one tensor that the object learns, `weight`. To add one: subclass `Bias` and write `block(tile)`, or write an
`nn.Module` with `as_bias()` that returns one. A function of the scores themselves is a `ScoreMod` (`score_mod.py`).

Letters: B batch, H query heads, N queries, M keys, K buckets; n, m the sides of one tile, c its batch items.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from copy import copy
from types import EllipsisType
from typing import Any, ClassVar, TypeAlias, cast

import torch
from torch import Tensor, nn

from regard.errors import bad_type, bad_value, shape_of
from regard.masks import Tile
from regard.masks.base import check_axes, checked

__all__ = ["Alibi", "Bias", "DenseBias", "RelativeBias", "Saturated", "as_biases"]

_Heads: TypeAlias = slice | Tensor  # which heads: a run of them, or their numbers
_ALL = slice(None)


class Bias:
    """Base of what can be added to scores tile by tile. `weight` leads with a batch axis of 1 (or B) and ends with an
    axis of heads.

    Kernels call `evaluate` and `add_gradient`, which cut `weight` to the batch items of the tile and to some heads
    before they ask `block` and `block_gradient`: what these see as `self.weight` is already cut.
    """

    fields: ClassVar[tuple[str, ...]] = ("weight",)
    kinds: ClassVar[dict[str, type[Bias]]] = {}  # by name, so that operators can rebuild a bias from its parts
    by_distance: ClassVar[bool] = False  # whether it depends on nothing but the distance of key and query
    is_dense: ClassVar[bool] = False  # whether `weight` has the axes of the scores, (1|B, 1|H, 1|N, 1|M)
    on_device: ClassVar[bool] = False  # whether `weight` must be on the device of the queries
    changes_scores: ClassVar[bool] = False  # whether it is a function of the scores, a `ScoreMod`
    weight: Tensor

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        Bias.kinds[cls.__name__] = cls
        if cls.__module__ != __name__ and "block" in vars(cls):  # a user's own: kernels rely on the shapes it gives
            cls.block = checked(cls.block, cls.check_answer)

    def block(self, tile: Tile) -> Tensor:
        """What to add to the scores of the tile: floating point, four axes that broadcast to (B, H, n, m)."""
        raise NotImplementedError

    def block_gradient(self, gradient: Tensor, tile: Tile, into: Tensor) -> None:
        """Add to `into` (the gradient of `weight`) what the gradient (B, H, n, m) of one block gives it."""
        raise NotImplementedError(f"{type(self).__name__} has no gradient")

    def check_answer(self, block: object, tile: Tile, *_: Any) -> None:
        """Raise where the `block` that a user's own class gave is wrong."""
        what = f"{type(self).__name__}.block"
        if not isinstance(block, Tensor) or not block.is_floating_point():
            received = f"dtype {block.dtype}" if isinstance(block, Tensor) else type(block).__name__
            raise bad_type(what, expected="a floating-point tensor, added to the scores", received=received)
        batch = max(x.shape[0] for x in (tile.q_positions, tile.k_positions, self.weight))
        check_axes(what, block, ("B", "H", "n", "m"), (batch, self.weight.shape[-1], *tile.shape))
        device = tile.q_positions.device
        if block.device != device:
            raise bad_value(what, expected=f"device {device}, as the positions'", received=block.device)

    @property
    def per_head(self) -> bool:
        """Whether heads differ."""
        return True

    @property
    def per_item(self) -> bool:
        """Whether batch items differ, positions aside."""
        return False

    @property
    def heads_axis(self) -> int:
        """The axis of `weight` that belongs to heads."""
        return self.weight.dim() - 1

    def where(self, heads: _Heads, rows: slice, cols: slice) -> tuple[slice | Tensor | EllipsisType, ...]:
        """Which part of `weight` some heads, queries and keys need."""
        return (..., heads)

    def part(self, tile: Tile, heads: _Heads = _ALL) -> Bias:
        """The same bias with the weight that a tile and some heads need."""
        return self.with_weight(self.cut(self.weight, tile, heads))

    def cut(self, weight: Tensor, tile: Tile, heads: _Heads = _ALL) -> Tensor:
        """The part of `weight`, or of its gradient, that belongs to a tile and some heads: a view."""
        weight = weight if weight.shape[0] == 1 else weight[tile.batch]
        return weight[self.where(heads, tile.rows, tile.cols)]

    def evaluate(self, tile: Tile, heads: slice = _ALL) -> Tensor:
        """The block of a tile for some heads: broadcasts to (c, h, n, m)."""
        return self.part(tile, heads).block(tile)

    def apply_to(self, scores: Tensor, tile: Tile, heads: slice = _ALL) -> Tensor:
        """The scores (c, h, n, m) of a tile with it."""
        return scores + self.evaluate(tile, heads)

    def add_gradient(self, gradient: Tensor, tile: Tile, into: Tensor, heads: slice = _ALL) -> None:
        """Add to `into` (the gradient of the whole `weight`) what the gradient (c, h, n, m) of a tile gives it."""
        self.part(tile, heads).block_gradient(gradient, tile, self.cut(into, tile, heads))

    def with_weight(self, weight: Tensor) -> Bias:
        """The same bias with another weight, such as that of some batch items."""
        other = copy(self)
        other.weight = weight
        return other

    def check(self, batch: int, heads: int, queries: int, keys: int) -> None:
        """Raise where this bias does not fit attention of shape (B, H, N, M)."""
        if self.weight.shape[-1] != heads:
            raise bad_value(
                f"bias {type(self).__name__}", expected=f"{heads} heads", received=f"{self.weight.shape[-1]}"
            )


class DenseBias(Bias):
    """A tensor as it is: (1|B, 1|H, 1|N, 1|M), indexed by slots."""

    is_dense = True
    on_device = True

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    @property
    def per_head(self) -> bool:
        return self.weight.shape[1] > 1

    @property
    def per_item(self) -> bool:
        return self.weight.shape[0] > 1

    @property
    def heads_axis(self) -> int:
        return 1

    def where(self, heads: _Heads, rows: slice, cols: slice) -> tuple[slice | Tensor | EllipsisType, ...]:
        axes = zip(self.weight.shape[1:], (heads, rows, cols), strict=True)
        return (slice(None), *(which if size > 1 else slice(None) for size, which in axes))

    def block(self, tile: Tile) -> Tensor:
        return self.evaluate(tile)

    def evaluate(self, tile: Tile, heads: slice = _ALL) -> Tensor:
        weight, (n, m) = self.weight, tile.shape
        if tile.batch == _ALL and heads == _ALL and weight.shape[2] in (1, n) and weight.shape[3] in (1, m):
            return weight  # the tile is all of it
        return self.cut(weight, tile, heads)

    def add_gradient(self, gradient: Tensor, tile: Tile, into: Tensor, heads: slice = _ALL) -> None:
        into = self.cut(into, tile, heads)
        axes = [i for i, size in enumerate(into.shape) if size == 1 and gradient.shape[i] != 1]
        into.add_(gradient.sum(axes, keepdim=True) if axes else gradient)

    def check(self, batch: int, heads: int, queries: int, keys: int) -> None:
        wanted = (batch, heads, queries, keys)
        if any(got not in (1, want) for got, want in zip(self.weight.shape, wanted, strict=True)):
            of_keys = self.weight.shape == (1, 1, batch, keys)
            raise bad_value(
                "bias",
                expected=f"a tensor that broadcasts to (B, H, N, M) = {wanted}",
                received=shape_of(self.weight),
                remedy="bias[:, None, None] for one of keys, (B, M)" if of_keys else "",
            )


class Slopes(Bias):
    """`-slope * |query - key|`, one slope per head: weight (1, H). In float32 at least: bfloat16 counts to 256 only."""

    by_distance = True

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def _distance(self, tile: Tile) -> Tensor:
        dtype = torch.promote_types(self.weight.dtype, torch.float32)
        return (tile.q_positions[:, None, :, None] - tile.k_positions[:, None, None, :]).abs().to(dtype)

    def block(self, tile: Tile) -> Tensor:
        return self._distance(tile) * -self.weight[:, :, None, None].to(tile.q_positions.device)

    def block_gradient(self, gradient: Tensor, tile: Tile, into: Tensor) -> None:
        heads = (gradient * self._distance(tile).to(gradient.dtype)).sum((2, 3))  # (B, H)
        into.sub_(heads if into.shape[0] > 1 else heads.sum(0, keepdim=True))


class Buckets(Bias):
    """A learned number per head and bucket of relative position: weight (1, K, H)."""

    fields = ("weight", "bidirectional", "max_distance")
    by_distance = True
    on_device = True

    def __init__(self, weight: Tensor, bidirectional: bool, max_distance: int) -> None:
        self.weight, self.bidirectional, self.max_distance = weight, bool(bidirectional), max_distance

    def buckets(self, tile: Tile) -> Tensor:
        """The bucket of each pair, (B|1, n, m): exact for near keys, logarithmic up to `max_distance`."""
        ahead = tile.k_positions[:, None, :] - tile.q_positions[:, :, None]
        count = self.weight.shape[1]
        offset = torch.zeros_like(ahead)
        if self.bidirectional:  # the upper half of the buckets is for keys ahead of the query
            count //= 2
            offset = (ahead > 0) * count
            distance = ahead.abs()
        else:
            distance = (-ahead).clamp(min=0)
        exact = count // 2
        ratio = distance.clamp(min=1).float() / exact
        far = exact + (torch.log(ratio) / math.log(self.max_distance / exact) * (count - exact)).long()
        return offset + torch.where(distance < exact, distance, far.clamp(max=count - 1))

    def block(self, tile: Tile) -> Tensor:
        buckets = self.buckets(tile)
        if self.weight.shape[0] == 1:
            return self.weight[0][buckets].permute(0, 3, 1, 2)
        item = torch.arange(self.weight.shape[0], device=buckets.device)[:, None, None]
        return self.weight[item, buckets].permute(0, 3, 1, 2)

    def block_gradient(self, gradient: Tensor, tile: Tile, into: Tensor) -> None:
        buckets = self.buckets(tile).expand(gradient.shape[0], -1, -1)
        count = self.weight.shape[1]
        if into.shape[0] > 1:
            buckets = buckets + count * torch.arange(into.shape[0], device=buckets.device)[:, None, None]
        rows = gradient.permute(0, 2, 3, 1).reshape(-1, gradient.shape[1])  # (B * n * m, H)
        add_by_bucket(into.view(-1, into.shape[-1]), buckets.reshape(-1), rows.to(into.dtype), in_order=not into.is_cpu)


def add_by_bucket(into: Tensor, buckets: Tensor, rows: Tensor, *, in_order: bool) -> None:
    """into[b] += the rows (L, H) of bucket b. `in_order`: as a product, if its factors fit; for on a GPU `index_add_`
    adds in any order, and bits differ from run to run."""
    if in_order and buckets.numel() * into.shape[0] <= _FACTORS:
        into.addmm_(nn.functional.one_hot(buckets, into.shape[0]).to(rows.dtype).mT, rows)
    else:
        into.index_add_(0, buckets, rows)


_FACTORS = 2**24  # numbers of a product with ones: 64 MB in float32, a limit on memory


class Saturated(Bias):
    """Another bias in which, against the first `sinks` keys, the query position is clamped to `last`."""

    fields = ("weight", "inner", "sinks", "last")

    def __init__(self, inner: Bias, sinks: int, last: int) -> None:
        if inner.changes_scores:
            raise bad_value(
                f"bias {type(inner).__name__}",
                expected="something that is added to the scores, with a cache that keeps the first tokens",
                received="a function of the scores",
                remedy="a cache that grows (KVCache)",
            )
        self.weight, self.inner, self.sinks, self.last = inner.weight, inner, sinks, last

    def with_weight(self, weight: Tensor) -> Bias:
        return Saturated(self.inner.with_weight(weight), self.sinks, self.last)

    def block(self, tile: Tile) -> Tensor:
        far = self.inner.block(tile)
        near = self.inner.block(tile._replace(q_positions=tile.q_positions.clamp(max=self.last)))
        return torch.where(tile.k_positions[:, None, None, :] < self.sinks, near, far)


class Alibi(nn.Module):
    """Attention with linear biases (Press et al. 2022): each head loses `slope * |query - key|`, never a dense tensor.

    Args:
        num_heads: H; the slopes are the paper's geometric series.
        slopes: (H,) instead of the paper's.

    >>> Alibi(4).slopes.tolist()
    [0.25, 0.0625, 0.015625, 0.00390625]
    >>> Alibi(2).block(torch.tensor([[3]]), torch.arange(4)[None])[0, :, 0].tolist()
    [[-0.1875, -0.125, -0.0625, -0.0], [-0.01171875, -0.0078125, -0.00390625, -0.0]]
    """

    slopes: Tensor

    def __init__(self, num_heads: int, *, slopes: Tensor | None = None) -> None:
        super().__init__()
        if num_heads < 1:
            raise bad_value("Alibi num_heads", expected="at least 1", received=num_heads)
        self._exact = _slopes(num_heads) if slopes is None else None
        if slopes is None:
            slopes = torch.tensor(self._exact, device="cpu")  # not meta: no state dict would bring them
        if slopes.shape != (num_heads,):
            raise bad_value("Alibi slopes", expected=f"shape ({num_heads},)", received=shape_of(slopes))
        self.register_buffer("slopes", slopes, persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Alibi:
        """Move, but keep the paper's slopes exact: `.bfloat16()` would round what is multiplied by distances in the
        thousands, and `to_empty` would leave nothing of them (they are in no state dict)."""
        super()._apply(fn, recurse)
        if self._exact is not None:
            dtype = torch.promote_types(self.slopes.dtype, torch.float32)
            self.slopes = torch.tensor(self._exact, dtype=dtype, device=self.slopes.device)
        return self

    def as_bias(self) -> Bias:
        """The same as a `Bias`, for kernels."""
        return Slopes(self.slopes[None])

    def block(self, q_positions: Tensor, k_positions: Tensor) -> Tensor:
        """What to add for queries at (B|1, n) and keys at (B|1, m): (B|1, H, n, m)."""
        return self.as_bias().block(Tile.at(q_positions, k_positions))

    def extra_repr(self) -> str:
        return f"num_heads={self.slopes.shape[0]}"


def _slopes(heads: int) -> list[float]:
    """2^(-8/n), 2^(-16/n), ...; for a count that is no power of two, every other slope of the next one fills up."""
    floor = 1 << (heads.bit_length() - 1)
    slopes = [2 ** (-8 * (i + 1) / floor) for i in range(floor)]
    return slopes + [2 ** (-4 * (2 * i + 1) / floor) for i in range(heads - floor)]


class RelativeBias(nn.Module):
    """T5's relative position bias: one learned number per head and bucket of distance, never a dense tensor.

    Args:
        num_heads: H.
        num_buckets: K; half of them exact for near keys, half logarithmic up to `max_distance`.
        bidirectional: keys ahead have buckets of their own (an encoder); else they share bucket 0 (a decoder).

    `weight` (K, H) is a parameter. The bias of a block is exact and has a gradient.

    >>> bias = RelativeBias(2, num_buckets=8, max_distance=16)
    >>> bias.block(torch.arange(3)[None], torch.arange(5)[None]).shape
    torch.Size([1, 2, 3, 5])
    """

    def __init__(
        self, num_heads: int, *, num_buckets: int = 32, max_distance: int = 128, bidirectional: bool = True
    ) -> None:
        super().__init__()
        exact = num_buckets // (4 if bidirectional else 2)
        if exact < 1 or max_distance <= exact:
            raise bad_value(
                "RelativeBias",
                expected=f"at least {4 if bidirectional else 2} buckets and a max_distance above the exact ones",
                received=f"num_buckets={num_buckets}, max_distance={max_distance}",
            )
        self.max_distance, self.bidirectional = max_distance, bidirectional
        self.weight = nn.Parameter(torch.empty(num_buckets, num_heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start again from random weights."""
        nn.init.normal_(self.weight, std=0.02)

    def as_bias(self) -> Bias:
        """The same as a `Bias`, for kernels."""
        return Buckets(self.weight[None], self.bidirectional, self.max_distance)

    def block(self, q_positions: Tensor, k_positions: Tensor) -> Tensor:
        """What to add for queries at (B|1, n) and keys at (B|1, m): (B|1, H, n, m)."""
        return self.as_bias().block(Tile.at(q_positions, k_positions))

    def extra_repr(self) -> str:
        buckets, heads = self.weight.shape
        far, both = self.max_distance, self.bidirectional
        return f"num_heads={heads}, num_buckets={buckets}, max_distance={far}, bidirectional={both}"


def as_biases(bias: Any) -> tuple[Bias, ...]:
    """What a caller may give as `bias=`: None, a tensor (N, M) or (B, H, N, M), a bias object, or several in a list."""
    if bias is None:
        return ()
    if isinstance(bias, Tensor):
        if not bias.is_floating_point():
            raise bad_type(
                "bias",
                expected="a floating-point tensor, added to the scores",
                received=f"dtype {bias.dtype}",
                remedy="a boolean mask goes to mask=, where True means: may attend"
                if bias.dtype is torch.bool
                else "bias.to(q.dtype)",
            )
        if bias.dim() not in (2, 4):
            raise bad_value(
                "bias",
                expected="shape (N, M) or (B, H, N, M)",
                received=f"shape {shape_of(bias)}",
                remedy="unsqueeze the missing axes: bias[:, None] for (B, N, M), bias[None] for (H, N, M) or (M,)",
            )
        return (DenseBias(bias if bias.dim() == 4 else bias[None, None]),)
    if hasattr(bias, "as_bias"):
        bias = bias.as_bias()
    if isinstance(bias, Bias):
        if not isinstance(getattr(bias, "weight", None), Tensor):
            raise bad_type(
                f"{type(bias).__name__}.weight",
                expected="a tensor that leads with a batch axis of 1 and ends with one of heads",
                received="none" if not hasattr(bias, "weight") else type(bias.weight).__name__,
                remedy="a bias that learns nothing has one all the same: torch.zeros(1, H)",
            )
        return (bias,)
    if isinstance(bias, Sequence) and not isinstance(bias, str):
        return tuple(single for several in cast("Sequence[Any]", bias) for single in as_biases(several))
    raise bad_type(
        "bias",
        expected="a tensor, a bias object (positions.Alibi, positions.RelativeBias) or a list of them",
        received=type(bias).__name__,
    )
