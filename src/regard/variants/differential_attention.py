"""Differential attention: a head's weights are the difference of two softmaxes, so that what both attend to cancels.

    weights = softmax(q1 k1^T * scale) - lambda * softmax(q2 k2^T * scale)
    lambda  = exp(lambda_q1 . lambda_k1) - exp(lambda_q2 . lambda_k2) + lambda_init
    head    = (1 - lambda_init) * RMSNorm(weights v)

The product is linear in the weights: it is computed as the difference of two `attend`, and no N x M matrix is built.
(https://arxiv.org/abs/2410.05258)

Letters: B batch, H heads, G kv heads, N queries, M keys, D width of each q and k, E = 2 D width of v, W model width.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Literal, NoReturn, overload

import torch
from torch import Tensor, nn

from regard.attention import BiasLike, attention_weights
from regard.cache import KVCache, Slots
from regard.errors import bad_type, bad_value, no_torchscript, unknown_argument
from regard.masks import Mask, as_mask
from regard.norms import RMSNorm
from regard.positions import Rotary
from regard.projections import project, project_each
from regard.summary import Step, table
from regard.tracing import traced
from regard.variants.checks import check_call, check_input, check_rotary, check_sizes
from regard.variants.difference import attend_difference

__all__ = ["DifferentialAttention", "lambda_init_at"]


def lambda_init_at(depth: int) -> float:
    """The start of lambda in the layer number `depth`, from 0: 0.8 - 0.6 exp(-0.3 depth).

    >>> round(lambda_init_at(0), 3), round(lambda_init_at(11), 3)
    (0.2, 0.778)
    """
    return 0.8 - 0.6 * math.exp(-0.3 * depth)


class DifferentialAttention(nn.Module):
    """Differential attention: self attention whose weights are the difference of two softmaxes.

    Args:
        embed_dim: W, the width of input and output.
        num_heads: H. Each has two queries and two keys of width D, and values of width 2 D.
        num_kv_heads: G, a divisor of H; H by default.
        head_dim: D, embed_dim / (2 num_heads) by default.
        lambda_init: what lambda starts from; `lambda_init_at(depth)` for a layer of a deep model.
        bias: whether q_proj, k_proj, v_proj have one; out_bias: whether out_proj has (as bias by default).
        scale: D ** -0.5 by default.
        position_encoding: a `positions.Rotary` of width D.
        norm_affine: whether the norm of each head's output has a weight, shared by all heads.
        norm_eps: its epsilon.
        init: "xavier" (uniform) or "normal" (std 0.02); biases start at 0, the vectors of lambda with std 0.1.
        kernel: "auto", or one of `regard.kernels.available()`.

    There is no dropout on the weights: it is not defined for a difference. The rows of q_proj are the first queries of
    all heads, then the second ones; so are those of k_proj.

    >>> import regard
    >>> layer = DifferentialAttention(16, num_heads=2)
    >>> x = torch.randn(2, 5, 16)
    >>> layer(x, mask=regard.masks.Causal()).shape
    torch.Size([2, 5, 16])
    >>> out, weights = layer(x, need_weights=True)  # a row sums to 1 - lambda
    >>> torch.allclose(weights.sum(-1), (1 - layer.lambda_()).expand(2, 2, 5), atol=1e-6)
    True
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        lambda_init: float = 0.8,
        bias: bool = False,
        out_bias: bool | None = None,
        scale: float | None = None,
        position_encoding: Rotary | None = None,
        norm_affine: bool = False,
        norm_eps: float = 1e-5,
        init: Literal["xavier", "normal"] = "xavier",
        kernel: str = "auto",
        **unknown: NoReturn,
    ) -> None:
        super().__init__()
        _check_no_dropout(unknown)
        if unknown:
            raise unknown_argument("DifferentialAttention", DifferentialAttention.__init__, unknown)
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        check_sizes(
            {"embed_dim": embed_dim, "num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
        )
        _check_settings(embed_dim, num_heads, num_kv_heads, head_dim, lambda_init, init)
        self.embed_dim, self.num_heads, self.num_kv_heads = embed_dim, num_heads, num_kv_heads
        self.head_dim = embed_dim // (2 * num_heads) if head_dim is None else head_dim
        check_rotary(position_encoding, self.head_dim)
        self.scale, self.lambda_init, self.kernel, self.init = scale, lambda_init, kernel, init

        self.q_proj = nn.Linear(embed_dim, 2 * num_heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(embed_dim, 2 * num_kv_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(embed_dim, num_kv_heads * self.value_head_dim, bias=bias)
        out_bias = bias if out_bias is None else out_bias
        self.out_proj = nn.Linear(num_heads * self.value_head_dim, embed_dim, bias=out_bias)
        self.lambda_q1, self.lambda_k1 = (
            nn.Parameter(torch.empty(self.head_dim)),
            nn.Parameter(torch.empty(self.head_dim)),
        )
        self.lambda_q2, self.lambda_k2 = (
            nn.Parameter(torch.empty(self.head_dim)),
            nn.Parameter(torch.empty(self.head_dim)),
        )
        self.head_norm = RMSNorm(self.value_head_dim, eps=norm_eps, elementwise_affine=norm_affine)
        self.position_encoding = position_encoding
        self.reset_parameters()

    @property
    def value_head_dim(self) -> int:
        """E = 2 D, the width of a head's values."""
        return 2 * self.head_dim

    def lambda_(self) -> Tensor:
        """lambda, a number: the weight of the second softmax. With gradient."""
        wide = torch.promote_types(self.lambda_q1.dtype, torch.float32)
        first = torch.exp((self.lambda_q1 * self.lambda_k1).sum(dtype=wide))
        return first - torch.exp((self.lambda_q2 * self.lambda_k2).sum(dtype=wide)) + self.lambda_init

    def reset_parameters(self) -> None:
        """Start again from random weights."""
        for linear in (self.q_proj, self.k_proj, self.v_proj, self.out_proj):
            if self.init == "xavier":
                nn.init.xavier_uniform_(linear.weight)
            else:
                nn.init.normal_(linear.weight, std=0.02)
            if linear.bias is not None:
                nn.init.zeros_(linear.bias)
        for vector in (self.lambda_q1, self.lambda_k1, self.lambda_q2, self.lambda_k2):
            nn.init.normal_(vector, std=0.1)
        self.head_norm.reset_parameters()

    @overload
    def forward(
        self,
        x: Tensor,
        *,
        mask: Mask | Tensor | None = ...,
        bias: BiasLike | None = ...,
        positions: Tensor | None = ...,
        cache: KVCache | None = ...,
        need_weights: Literal[False] = ...,
    ) -> Tensor: ...

    @overload
    def forward(
        self,
        x: Tensor,
        *,
        mask: Mask | Tensor | None = ...,
        bias: BiasLike | None = ...,
        positions: Tensor | None = ...,
        cache: KVCache | None = ...,
        need_weights: Literal[True],
    ) -> tuple[Tensor, Tensor]: ...

    def forward(
        self,
        x: Tensor,
        *,
        mask: Mask | Tensor | None = None,
        bias: BiasLike | None = None,
        positions: Tensor | None = None,
        cache: KVCache | None = None,
        need_weights: bool = False,
        **unknown: NoReturn,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend from x to itself, and to what is cached.

        Args:
            x: (B, N, W), or (N, W) without a batch.
            mask, bias: as in `regard.attend`, the same for both softmaxes; with a cache M counts cached and new keys.
            positions: where the tokens of x stand, (N,) or (B, N).
            cache: a `KVCache`, updated in place. It holds both keys of a head side by side.
            need_weights: also return the difference of the weights, (B, H, N, M): rows sum to 1 - lambda.

        Returns:
            (B, N, W); with `need_weights` the same and the weights.
        """
        check_call(self, x, cache, KVCache, DifferentialAttention.forward, unknown)
        if x.dim() == 2:
            options: dict[str, Any] = {"mask": mask, "bias": bias, "positions": positions, "cache": cache}
            if need_weights:
                out, weights = self.forward(x[None], need_weights=True, **options)
                return out[0], weights[0]
            return self.forward(x[None], **options)[0]
        check_input(x, self.embed_dim, self.q_proj.weight)
        with nullcontext() if cache is None else self._filling(cache, x):
            q, k, v = self._project(x)
            q, k, v, slots = self._place(q, k, v, positions, cache)
            options = self._options(slots, mask, bias)
            (q1, q2), (k1, k2) = q.chunk(2, 1), k.chunk(2, -1)
            factor = self.lambda_().to(v.dtype)
            heads = attend_difference(q1, k1, q2, k2, v, factor, kernel=self.kernel, **options)  # (B, H, N, E)
            out = project(self.out_proj, self._normalised(heads).transpose(1, 2).flatten(2))
            weights = None
            if need_weights:
                weights = attention_weights(q1, k1, **options) - factor * attention_weights(q2, k2, **options)
        return out if weights is None else (out, weights)

    @contextmanager
    def _filling(self, cache: KVCache, x: Tensor) -> Iterator[None]:
        """Context of one call with a cache: the cache notes which layer fills it, and is rolled back on an error."""
        if not traced(x):
            cache.check_source(self, x, x, own=True)
        with cache.attending():
            if not traced(x):
                cache.set_source(self, x, x, own=True)
            yield

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q (B, 2 H, N, D), the first queries of all heads, then the second; k (B, G, N, 2 D), both keys of a kv head
        side by side; v (B, G, N, E)."""
        q, k, v = project_each((self.q_proj, self.k_proj, self.v_proj), x)
        q = q.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        k = k.unflatten(-1, (2, -1, self.head_dim)).permute(0, 3, 1, 2, 4).flatten(3)
        return q, k, v.unflatten(-1, (-1, self.value_head_dim)).transpose(1, 2)

    def _place(
        self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor | None, cache: KVCache | None
    ) -> tuple[Tensor, Tensor, Tensor, Slots]:
        """Queries and keys rotated to their positions; keys and values with the cached ones first."""
        if cache is not None:
            k, v, slots = cache.extend(k, v, self._rotate, positions)
        else:
            slots = Slots(positions=positions, key_positions=positions)
            k = self._rotate(k, 0, k.shape[2]) if positions is None else self._rotate(k, positions, None)
        q, k = slots.rotate_queries(q, k, self._rotate)
        return q, k, v, slots

    def _rotate(self, x: Tensor, positions: Tensor | int, length: int | None) -> Tensor:
        """x (B, heads, N, D), or (B, heads, N, 2 D) of two side by side, rotated to its positions."""
        rotary = self.position_encoding
        if rotary is None:
            return x
        return torch.cat([rotary(part, positions, length=length) for part in x.split(self.head_dim, -1)], -1)

    def _options(self, slots: Slots, mask: Mask | Tensor | None, bias: BiasLike | None) -> dict[str, Any]:
        """The arguments of `attend` and `attention_weights` beside q, k and v."""
        if slots.mask is not None:
            mask = slots.mask if mask is None else slots.mask & as_mask(mask)
        return {
            "mask": mask,
            "bias": bias,
            "positions": slots.positions,
            "key_positions": slots.key_positions,
            "scale": self.head_dim**-0.5 if self.scale is None else self.scale,
        }

    def _normalised(self, heads: Tensor) -> Tensor:
        weight = self.head_norm.weight
        wide = heads if weight is None else heads.to(weight.dtype)  # its weights may be wider than the heads
        return (1 - self.lambda_init) * self.head_norm(wide).to(heads.dtype)

    def __prepare_scriptable__(self) -> NoReturn:
        """Asked by `torch.jit.script`."""
        no_torchscript(self)

    def describe(self, tokens: int = 128, *, batch: int = 1) -> str:
        """The walk through the layer for a text of `tokens`: shapes at each step, parameters, multiply-adds, cache.

        >>> print(DifferentialAttention(16, 2).describe(5))
        step       what                    shape         parameters  multiply-adds
        project    q_proj                  (1, 5, 16)           256          1,280
                   k_proj                  (1, 5, 16)           256          1,280
                   v_proj                  (1, 5, 16)           256          1,280
        split      2 x 2 heads of q        (1, 4, 5, 4)
                   2 x 2 heads of k        (1, 4, 5, 4)
                   2 heads of v            (1, 2, 5, 8)
        score      q k^T * 0.5, twice      (1, 4, 5, 5)                        400
        weigh      softmax, times v twice  (1, 4, 5, 8)                        800
        subtract   first - lambda second   (1, 2, 5, 8)          16
        normalise  RMSNorm of each head    (1, 2, 5, 8)
        merge      heads side by side      (1, 5, 16)
        project    out_proj                (1, 5, 16)           256          1,280
        total                                                 1,040          6,320
        cache: 128 bytes per token (2 kv heads x (8 + 8) x 4 bytes)
        """
        g, e, size = self.num_kv_heads, self.value_head_dim, self.k_proj.weight.element_size()
        cache = f"cache: {2 * g * e * size:,} bytes per token ({g} kv heads x ({e} + {e}) x {size} bytes)"
        return f"{table(self.walk(tokens, batch=batch))}\n{cache}"

    def walk(self, tokens: int, *, batch: int = 1) -> list[Step]:
        """The steps that `describe` shows."""
        b, n, h, g, d, e = batch, tokens, self.num_heads, self.num_kv_heads, self.head_dim, self.value_head_dim

        def through(step: str, name: str) -> Step:
            linear: nn.Linear = getattr(self, name)
            count = sum(p.numel() for p in linear.parameters())
            return Step(step, name, (b, n, linear.out_features), count, b * n * linear.weight.numel())

        scale = d**-0.5 if self.scale is None else self.scale
        norm = sum(p.numel() for p in self.head_norm.parameters()) or None
        return [
            through("project", "q_proj"),
            through("", "k_proj"),
            through("", "v_proj"),
            Step("split", f"2 x {h} heads of q", (b, 2 * h, n, d)),
            Step("", f"2 x {g} heads of k", (b, 2 * g, n, d)),
            Step("", f"{g} heads of v", (b, g, n, e)),
            *([] if self.position_encoding is None else [Step("place", "Rotary")]),
            Step("score", f"q k^T * {scale:.4g}, twice", (b, 2 * h, n, n), None, 2 * b * h * n * n * d),
            Step("weigh", "softmax, times v twice", (b, 2 * h, n, e), None, 2 * b * h * n * n * e),
            Step("subtract", "first - lambda second", (b, h, n, e), 4 * d),
            Step("normalise", "RMSNorm of each head", (b, h, n, e), norm),
            Step("merge", "heads side by side", (b, n, h * e)),
            through("project", "out_proj"),
        ]

    def extra_repr(self) -> str:
        parts = [f"{self.embed_dim}, num_heads={self.num_heads}"]
        if self.num_kv_heads != self.num_heads:
            parts.append(f"num_kv_heads={self.num_kv_heads}")
        parts += [f"head_dim={self.head_dim}", f"lambda_init={self.lambda_init:.4g}"]
        defaults = {"scale": None, "kernel": "auto"}
        parts += [f"{name}={getattr(self, name)!r}" for name, value in defaults.items() if getattr(self, name) != value]
        return ", ".join(parts)


def _check_no_dropout(unknown: dict[str, Any]) -> None:
    if unknown.get("dropout") == 0:
        del unknown["dropout"]
    if "dropout" in unknown:
        raise bad_value(
            "dropout",
            expected="none: it is not defined for a difference of two softmaxes",
            received=f"dropout={unknown['dropout']!r}",
            remedy="nn.Dropout on the layer's output",
        )


def _check_settings(
    embed_dim: int, num_heads: int, num_kv_heads: int, head_dim: int | None, lambda_init: object, init: object
) -> None:
    if head_dim is None and embed_dim % (2 * num_heads):
        raise bad_value(
            "num_heads",
            expected=f"a divisor of embed_dim / 2 = {embed_dim / 2:g}",
            received=num_heads,
            remedy="pass head_dim, which frees the head's width",
        )
    if num_heads % num_kv_heads:
        raise bad_value("num_kv_heads", expected=f"a divisor of num_heads = {num_heads}", received=num_kv_heads)
    if isinstance(lambda_init, bool) or not isinstance(lambda_init, (int, float)):
        remedy = "lambda_init_at(depth) gives the paper's for a layer"
        raise bad_type("lambda_init", expected="a number", received=type(lambda_init).__name__, remedy=remedy)
    if init not in ("xavier", "normal"):
        raise bad_value("init", expected='"xavier" or "normal"', received=repr(init))
