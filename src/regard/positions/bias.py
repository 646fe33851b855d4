"""What is added to the scores: a tensor of the caller's, or an object that knows any block of itself.

A bias object never becomes a dense (H, N, M) tensor: a kernel asks for `block(q_positions, k_positions)`, and in the
backward pass hands the gradient of that block to `block_gradient`, which sums it into the gradient of the one
tensor the object learns, `weight`. To add one: subclass `Bias`, or an `nn.Module` with `as_bias()` that returns one.

Letters: B batch, H query heads, N queries, M keys, K buckets; n, m the sides of one block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from copy import copy
from types import EllipsisType
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from regard.errors import bad_type, bad_value, shape_of
from regard.masks import check_axes, checked

__all__ = ["Alibi", "Bias", "DenseBias", "RelativeBias", "Saturated", "as_biases"]


class Bias:
    """Base of what can be added to scores block by block. `weight` leads with a batch axis of 1 (or B) and ends with an
    axis of heads, by which kernels take a part of it."""

    fields: ClassVar[tuple[str, ...]] = ("weight",)
    kinds: ClassVar[dict[str, type[Bias]]] = {}
    weight: Tensor

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        Bias.kinds[cls.__name__] = cls
        if cls.__module__ != __name__ and "block" in vars(cls):  # somebody's own: kernels rely on the shapes it gives
            cls.block = checked(cls.block, _check_block)

    def block(self, q_positions: Tensor, k_positions: Tensor) -> Tensor:
        """What to add for queries at (B|1, n) and keys at (B|1, m): (B|1, H, n, m)."""
        raise NotImplementedError

    def block_gradient(self, gradient: Tensor, q_positions: Tensor, k_positions: Tensor, into: Tensor) -> None:
        """Add to `into` (the gradient of `weight`) what the gradient (B, H, n, m) of one block gives it."""
        raise NotImplementedError(f"{type(self).__name__} has no gradient")

    def where(self, heads: slice, rows: slice, cols: slice) -> tuple[slice | EllipsisType, ...]:
        """Which part of `weight` some heads, queries and keys need."""
        return (..., heads)

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


def _check_block(bias: Bias, block: object, q_positions: Tensor, k_positions: Tensor) -> None:
    what = f"{type(bias).__name__}.block"
    if not isinstance(block, Tensor) or not block.is_floating_point():
        received = f"dtype {block.dtype}" if isinstance(block, Tensor) else type(block).__name__
        raise bad_type(what, expected="a floating-point tensor, added to the scores", received=received)
    batch = max(x.shape[0] for x in (q_positions, k_positions, bias.weight))
    sizes = (batch, bias.weight.shape[-1], q_positions.shape[1], k_positions.shape[1])
    check_axes(what, block, ("B", "H", "n", "m"), sizes)
    if block.device != q_positions.device:
        raise bad_value(what, expected=f"device {q_positions.device}, as the positions'", received=block.device)


class DenseBias(Bias):
    """A tensor as it is: (1|B, 1|H, 1|N, 1|M). Indexed by slots, so kernels slice it themselves."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def part(self, batch: slice, rows: slice, cols: slice, of: Tensor | None = None) -> Tensor:
        """A block of the tensor (or of its gradient, `of`), as a view; axes of 1 stay."""
        part = self.weight if of is None else of
        part = part[batch] if part.shape[0] > 1 else part
        part = part[:, :, rows] if part.shape[2] > 1 else part
        return part[..., cols] if part.shape[3] > 1 else part

    def where(self, heads: slice, rows: slice, cols: slice) -> tuple[slice | EllipsisType, ...]:
        axes = zip(self.weight.shape[1:], (heads, rows, cols), strict=True)
        return (slice(None), *(which if size > 1 else slice(None) for size, which in axes))

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

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def _distance(self, q_positions: Tensor, k_positions: Tensor) -> Tensor:
        dtype = torch.promote_types(self.weight.dtype, torch.float32)
        return (q_positions[:, None, :, None] - k_positions[:, None, None, :]).abs().to(dtype)

    def block(self, q_positions: Tensor, k_positions: Tensor) -> Tensor:
        return self._distance(q_positions, k_positions) * -self.weight[:, :, None, None].to(q_positions.device)

    def block_gradient(self, gradient: Tensor, q_positions: Tensor, k_positions: Tensor, into: Tensor) -> None:
        heads = (gradient * self._distance(q_positions, k_positions).to(gradient.dtype)).sum((2, 3))  # (B, H)
        into.sub_(heads if into.shape[0] > 1 else heads.sum(0, keepdim=True))


class Buckets(Bias):
    """A learned number per head and bucket of relative position: weight (1, K, H)."""

    fields = ("weight", "bidirectional", "max_distance")

    def __init__(self, weight: Tensor, bidirectional: bool, max_distance: int) -> None:
        self.weight, self.bidirectional, self.max_distance = weight, bool(bidirectional), max_distance

    def buckets(self, q_positions: Tensor, k_positions: Tensor) -> Tensor:
        """The bucket of each pair, (B|1, n, m): exact for near keys, logarithmic up to `max_distance`."""
        ahead = k_positions[:, None, :] - q_positions[:, :, None]
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

    def block(self, q_positions: Tensor, k_positions: Tensor) -> Tensor:
        buckets = self.buckets(q_positions, k_positions)
        if self.weight.shape[0] == 1:
            return self.weight[0][buckets].permute(0, 3, 1, 2)
        item = torch.arange(self.weight.shape[0], device=buckets.device)[:, None, None]
        return self.weight[item, buckets].permute(0, 3, 1, 2)

    def block_gradient(self, gradient: Tensor, q_positions: Tensor, k_positions: Tensor, into: Tensor) -> None:
        buckets = self.buckets(q_positions, k_positions).expand(gradient.shape[0], -1, -1)
        count = self.weight.shape[1]
        if into.shape[0] > 1:
            buckets = buckets + count * torch.arange(into.shape[0], device=buckets.device)[:, None, None]
        rows = gradient.permute(0, 2, 3, 1).reshape(-1, gradient.shape[1])  # (B * n * m, H)
        into.view(-1, into.shape[-1]).index_add_(0, buckets.reshape(-1), rows.to(into.dtype))


class Saturated(Bias):
    """Another bias, for which queries meet the first `sinks` keys as if they stood at `last` at most."""

    fields = ("weight", "inner", "sinks", "last")

    def __init__(self, inner: Bias, sinks: int, last: int) -> None:
        self.weight, self.inner, self.sinks, self.last = inner.weight, inner, sinks, last

    def with_weight(self, weight: Tensor) -> Bias:
        return Saturated(self.inner.with_weight(weight), self.sinks, self.last)

    def block(self, q_positions: Tensor, k_positions: Tensor) -> Tensor:
        plain = self.inner.block(q_positions, k_positions)
        near = self.inner.block(q_positions.clamp(max=self.last), k_positions)
        return torch.where(k_positions[:, None, None, :] < self.sinks, near, plain)


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
        return self.as_bias().block(q_positions, k_positions)

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
        return self.as_bias().block(q_positions, k_positions)

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
        return tuple(one for part in cast("Sequence[Any]", bias) for one in as_biases(part))
    raise bad_type(
        "bias",
        expected="a tensor, a bias object (positions.Alibi, positions.RelativeBias) or a list of them",
        received=type(bias).__name__,
    )
