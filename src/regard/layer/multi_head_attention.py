"""The layer: project to heads, attend, merge, project.

      query (B, N, W)    key (B, M, W)    value (B, M, W)
          │ q_proj           │ k_proj         │ v_proj
      (B, H, N, D)       (B, G, M, D)     (B, G, M, E)          split into heads; H is a multiple of G:
          │ norm, rotary     │ norm, rotary   │
          └────────┬─────────┘                │                 MHA  q q q q    GQA  q q q q    MQA  q q q q
        weights (B, H, N, M), not stored      │                      k k k k         k   k           k
                   └───────────┬──────────────┘
                        (B, H, N, E)                            merge the heads
                               │ out_proj
                        out (B, N, W)

Letters: B batch, H query heads, G kv heads, N queries, M keys, D head width of q and k, E of v, W model width.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Literal, NoReturn, overload

import torch
from torch import Tensor, nn

from regard.attention import BiasLike, attend, attention_weights
from regard.cache import KVCache, RollingCache, Slots
from regard.errors import bad_value, no_torchscript, refuse_trace, unknown_argument
from regard.layer.checks import SIZES, check_inputs, check_settings, check_sizes, check_types
from regard.masks import Mask, as_mask
from regard.onednn import project, project_each
from regard.positions import Alibi, RelativeBias, Rotary, as_biases
from regard.presets import Configuration, configuration
from regard.summary import Step, table
from regard.tracing import traced

__all__ = ["MultiHeadAttention"]


class MultiHeadAttention(nn.Module):
    """Multi-head attention: self or cross, with grouped kv heads, rotary, biases, caches; no N x M matrix.

    Args:
        embed_dim: W, the width of the output and, unless said otherwise, of the inputs.
        num_heads: H.
        num_kv_heads: G, a divisor of H (grouped-query attention; 1 is multi-query); H by default.
        head_dim: D, embed_dim / num_heads by default.
        value_head_dim: E, D by default.
        query_dim, key_dim, value_dim: widths of the inputs; embed_dim by default (value_dim: key_dim).
        bias: whether q_proj, k_proj, v_proj have one; out_bias: whether out_proj has (as bias by default).
        dropout: on the weights, in training only.
        scale: D ** -0.5 by default.
        position_encoding: a `positions.Rotary`, or a bias object (`positions.Alibi`, `positions.RelativeBias`).
        qk_norm: "rms" or "layer": normalise each head's q and k, before rotary.
        softcap: scores become softcap * tanh(scores / softcap).
        sinks: a learned logit per head that takes part in the denominator.
        init: "xavier" (uniform) or "normal" (std 0.02); biases start at 0.
        kernel: "auto", or one of `regard.kernels.available()`.

    >>> import regard
    >>> layer = MultiHeadAttention(16, num_heads=4, num_kv_heads=2)
    >>> x = torch.randn(2, 5, 16)
    >>> layer(x, mask=regard.masks.Causal()).shape
    torch.Size([2, 5, 16])
    >>> out, weights = layer(x, need_weights=True)
    >>> weights.shape
    torch.Size([2, 4, 5, 5])
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        value_head_dim: int | None = None,
        query_dim: int | None = None,
        key_dim: int | None = None,
        value_dim: int | None = None,
        bias: bool = True,
        out_bias: bool | None = None,
        dropout: float = 0.0,
        scale: float | None = None,
        position_encoding: Rotary | Alibi | RelativeBias | None = None,
        qk_norm: Literal["rms", "layer"] | None = None,
        softcap: float | None = None,
        sinks: bool = False,
        init: Literal["xavier", "normal"] = "xavier",
        kernel: str = "auto",
        **unknown: NoReturn,
    ) -> None:
        super().__init__()
        if unknown:
            raise unknown_argument("MultiHeadAttention", MultiHeadAttention.__init__, unknown)
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        sizes = (embed_dim, num_heads, num_kv_heads, head_dim, value_head_dim, query_dim, key_dim, value_dim)
        check_sizes(dict(zip(SIZES, sizes, strict=True)))
        self.embed_dim, self.num_heads, self.num_kv_heads = embed_dim, num_heads, num_kv_heads
        self.head_dim = embed_dim // num_heads if head_dim is None else head_dim
        self.value_head_dim = self.head_dim if value_head_dim is None else value_head_dim
        self.query_dim = embed_dim if query_dim is None else query_dim
        self.key_dim = embed_dim if key_dim is None else key_dim
        self.value_dim = self.key_dim if value_dim is None else value_dim
        check_settings(dropout, position_encoding, init, self.head_dim)
        self.dropout, self.scale, self.softcap, self.kernel, self.init = dropout, scale, softcap, kernel, init

        self.q_proj = nn.Linear(self.query_dim, num_heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(self.key_dim, num_kv_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(self.value_dim, num_kv_heads * self.value_head_dim, bias=bias)
        out_bias = bias if out_bias is None else out_bias
        self.out_proj = nn.Linear(num_heads * self.value_head_dim, embed_dim, bias=out_bias)
        self.q_norm, self.k_norm = _norm(qk_norm, self.head_dim), _norm(qk_norm, self.head_dim)
        self.position_encoding = position_encoding
        self.sinks = nn.Parameter(torch.zeros(num_heads)) if sinks else None
        self.reset_parameters()

    @classmethod
    def from_config(cls, config: str | Configuration, **changes: Any) -> MultiHeadAttention:
        """The attention layer of a well-known model, untrained; `changes` go to the constructor.

        `config` is a name, one of `regard.presets.CONFIGURATIONS`, or a `Configuration` of your own.

        >>> MultiHeadAttention.from_config("smollm2-135m", dropout=0.1)
        MultiHeadAttention(
          576, num_heads=9, num_kv_heads=3, head_dim=64, dropout=0.1
          (q_proj): Linear(in_features=576, out_features=576, bias=False)
          (k_proj): Linear(in_features=576, out_features=192, bias=False)
          (v_proj): Linear(in_features=576, out_features=192, bias=False)
          (out_proj): Linear(in_features=576, out_features=576, bias=False)
          (position_encoding): Rotary(64, base=100000)
        )
        """
        fields = ("embed_dim", "num_heads", "num_kv_heads", "head_dim", "bias", "out_bias", "scale", "qk_norm")
        config = configuration(config) if isinstance(config, str) else config
        config = replace(config, **{field: changes[field] for field in fields if field in changes})
        options: dict[str, Any] = {field: getattr(config, field) for field in fields}
        if "position_encoding" not in changes:
            options["position_encoding"] = config.position_encoding()
        return cls(**{**options, **changes})

    def reset_parameters(self) -> None:
        """Start again from random weights."""
        for linear in (self.q_proj, self.k_proj, self.v_proj, self.out_proj):
            if self.init == "xavier":
                nn.init.xavier_uniform_(linear.weight)
            else:
                nn.init.normal_(linear.weight, std=0.02)
            if linear.bias is not None:
                nn.init.zeros_(linear.bias)
        if self.sinks is not None:
            nn.init.zeros_(self.sinks)
        for module in (self.q_norm, self.k_norm, self.position_encoding):
            if isinstance(module, (nn.RMSNorm, nn.LayerNorm, RelativeBias)):
                module.reset_parameters()

    @overload
    def forward(
        self,
        query: Tensor,
        key: Tensor | None = ...,
        value: Tensor | None = ...,
        *,
        mask: Mask | Tensor | None = ...,
        bias: BiasLike | None = ...,
        positions: Tensor | None = ...,
        cache: KVCache | RollingCache | None = ...,
        need_weights: Literal[False] = ...,
    ) -> Tensor: ...

    @overload
    def forward(
        self,
        query: Tensor,
        key: Tensor | None = ...,
        value: Tensor | None = ...,
        *,
        mask: Mask | Tensor | None = ...,
        bias: BiasLike | None = ...,
        positions: Tensor | None = ...,
        cache: KVCache | RollingCache | None = ...,
        need_weights: Literal[True],
    ) -> tuple[Tensor, Tensor]: ...

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        *,
        mask: Mask | Tensor | None = None,
        bias: BiasLike | None = None,
        positions: Tensor | None = None,
        cache: KVCache | RollingCache | None = None,
        need_weights: bool = False,
        **unknown: NoReturn,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend from `query` to `key` and `value`.

        Args:
            query: (B, N, W), or (N, W) without a batch.
            key: (B, M, W); the query itself by default (self attention).
            value: (B, M, W); the key by default.
            mask, bias: as in `regard.attend`; with a cache M counts cached and new keys.
            positions: where the queries stand, (N,) or (B, N) (in self attention the new keys too).
            cache: a `KVCache` or `RollingCache`, updated in place.
            need_weights: also return the weights, (B, H, N, M), before dropout.

        Returns:
            (B, N, W); with `need_weights` the same and the weights.
        """
        self._check_types(query, key, value, cache, unknown)
        if query.dim() == 2:
            options = {"mask": mask, "bias": bias, "positions": positions, "cache": cache}
            return self._unbatched(query, key, value, need_weights=need_weights, **options)
        key = query if key is None else key
        value = key if value is None else value
        self._check_call(query, key, value, cache)
        with nullcontext() if cache is None else self._filling(cache, query, key, value):
            q, k, v = self._project(query, key, value, cache)
            q, k, v, slots = self._place(q, k, v, positions, cache, self_attention=key is query)
            options = self._options(slots, mask, bias)
            out = attend(q, k, v, dropout=self.dropout if self.training else 0.0, kernel=self.kernel, **options)
            weights = attention_weights(q, k, **options) if need_weights else None
            out = self._merge(out)
        return out if weights is None else (out, weights)

    def _unbatched(
        self, query: Tensor, key: Tensor | None, value: Tensor | None, *, need_weights: bool, **options: Any
    ) -> Any:
        """The same for inputs (N, W) without a batch."""
        value = None if value is None or value is key else value[None]
        key = None if key is None or key is query else key[None]
        if need_weights:
            out, weights = self.forward(query[None], key, value, need_weights=True, **options)
            return out[0], weights[0]
        return self.forward(query[None], key, value, **options)[0]

    @contextmanager
    def _filling(self, cache: KVCache | RollingCache, query: Tensor, key: Tensor, value: Tensor) -> Iterator[None]:
        """Context of one call with a cache: the cache notes which layer fills it, and is rolled back on an error."""
        with cache.attending():
            if not traced(query, key, value):
                cache.set_source(self, key, value, own=key is query)
            yield

    def _project(
        self, query: Tensor, key: Tensor, value: Tensor, cache: KVCache | RollingCache | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """q (B, H, N, D), k (B, G, M, D), v (B, G, M, E); k and v are None if a complete cache has them."""
        if cache is not None and cache.complete:
            return self._split(project(self.q_proj, query), self.q_norm, self.head_dim), None, None
        if key is query and value is query:
            q, k, v = project_each((self.q_proj, self.k_proj, self.v_proj), query)
        else:
            q, k, v = project(self.q_proj, query), project(self.k_proj, key), project(self.v_proj, value)
        return (
            self._split(q, self.q_norm, self.head_dim),
            self._split(k, self.k_norm, self.head_dim),
            self._split(v, None, self.value_head_dim),
        )

    def _split(self, x: Tensor, norm: nn.Module | None, width: int) -> Tensor:
        """(B, N, heads * width) -> (B, heads, N, width). The number of heads is inferred: x may hold a shard."""
        x = x.view(*x.shape[:-1], x.shape[-1] // width, width)
        if norm is not None:
            x = norm(x.to(next(norm.parameters()).dtype)).to(x.dtype)  # its weights may be wider than x
        return x.transpose(1, 2)

    def _place(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        positions: Tensor | None,
        cache: KVCache | RollingCache | None,
        *,
        self_attention: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Slots]:
        """Queries and keys rotated to their positions; keys and values with the cached ones first.

        In self attention `positions` apply to both the queries and the new keys.
        """
        if k is None or v is None:
            assert cache is not None
            k, v, slots = cache.recall(positions)
        elif cache is not None:
            k, v, slots = cache.extend(k, v, self._rotate, positions if self_attention else None)
            slots = slots if self_attention else replace(slots, positions=positions)
        elif self_attention and positions is not None:
            k, slots = self._rotate(k, positions, None), Slots(positions=positions, key_positions=positions)
        else:
            k, slots = self._rotate(k, 0, k.shape[2]), _CONTIGUOUS if positions is None else Slots(positions=positions)
        if isinstance(self.position_encoding, Rotary):
            q, k = slots.rotate_queries(q, k, self._rotate)
        return q, k, v, slots

    def _rotate(self, x: Tensor, positions: Tensor | int, length: int | None) -> Tensor:
        """x (B, heads, N, D) rotated to its positions in a text of some length; x itself without rotary positions."""
        rotary = self.position_encoding
        return rotary(x, positions, length=length) if isinstance(rotary, Rotary) else x

    def _options(self, slots: Slots, mask: Mask | Tensor | None, bias: BiasLike | None) -> dict[str, Any]:
        """The arguments of `attend` and `attention_weights` beside q, k and v."""
        encoding = self.position_encoding
        if encoding is not None and not isinstance(encoding, Rotary):
            bias = (*slots.clamp_biases(as_biases(encoding)), *as_biases(bias))
        if slots.mask is not None:
            mask = slots.mask if mask is None else slots.mask & as_mask(mask)
        return {
            "mask": mask,
            "bias": bias,
            "positions": slots.positions,
            "key_positions": slots.key_positions,
            "scale": self.head_dim**-0.5 if self.scale is None else self.scale,
            "softcap": self.softcap,
            "sinks": self.sinks,
        }

    def _merge(self, out: Tensor) -> Tensor:
        """The heads side by side, (B, H, N, E) -> (B, N, H * E), and projected to (B, N, W)."""
        return project(self.out_proj, out.transpose(1, 2).flatten(2))

    def __prepare_scriptable__(self) -> NoReturn:
        """Asked by `torch.jit.script`."""
        no_torchscript(self)

    def _check_types(
        self, query: object, key: object, value: object, cache: object, unknown: dict[str, NoReturn]
    ) -> None:
        refuse_trace("attention")
        if unknown:
            raise unknown_argument("layer", MultiHeadAttention.forward, unknown)
        check_types(query, key, value, cache)

    def _check_call(self, query: Tensor, key: Tensor, value: Tensor, cache: KVCache | RollingCache | None) -> None:
        widths = (self.query_dim, self.key_dim, self.value_dim)
        check_inputs(query, key, value, widths, self.q_proj.weight)
        if cache is not None and not traced(query, key, value):
            cache.check_source(self, key, value, own=key is query)

    def describe(self, tokens: int = 128, *, batch: int = 1) -> str:
        """The walk through the layer for a text of `tokens`: shapes at each step, parameters, multiply-adds, cache.

        >>> print(MultiHeadAttention(16, 4, num_kv_heads=2, bias=False).describe(5))
        step     what                shape         parameters  multiply-adds
        project  q_proj              (1, 5, 16)           256          1,280
                 k_proj              (1, 5, 8)            128            640
                 v_proj              (1, 5, 8)            128            640
        split    4 heads of q        (1, 4, 5, 4)
                 2 heads of k        (1, 2, 5, 4)
                 2 heads of v        (1, 2, 5, 4)
        score    q k^T * 0.5         (1, 4, 5, 5)                        400
        weigh    softmax, times v    (1, 4, 5, 4)                        400
        merge    heads side by side  (1, 5, 16)
        project  out_proj            (1, 5, 16)           256          1,280
        total                                             768          4,640
        cache: 64 bytes per token (2 kv heads x (4 + 4) x 4 bytes)
        """
        g, d, e, size = self.num_kv_heads, self.head_dim, self.value_head_dim, self.k_proj.weight.element_size()
        cache = f"cache: {g * (d + e) * size:,} bytes per token ({g} kv heads x ({d} + {e}) x {size} bytes)"
        return f"{table(self.walk(tokens, batch=batch))}\n{cache}"

    def walk(self, tokens: int, *, batch: int = 1) -> list[Step]:
        """The steps that `describe` shows."""
        h, g, d, e = self.num_heads, self.num_kv_heads, self.head_dim, self.value_head_dim
        b, n = batch, tokens

        def through(step: str, name: str) -> Step:
            linear: nn.Linear = getattr(self, name)
            count = sum(p.numel() for p in linear.parameters())
            return Step(step, name, (b, n, linear.out_features), count, b * n * linear.weight.numel())

        steps = [
            through("project", "q_proj"),
            through("", "k_proj"),
            through("", "v_proj"),
            Step("split", f"{h} heads of q", (b, h, n, d)),
            Step("", f"{g} heads of k", (b, g, n, d)),
            Step("", f"{g} heads of v", (b, g, n, e)),
        ]
        if self.q_norm is not None and self.k_norm is not None:
            count = sum(p.numel() for norm in (self.q_norm, self.k_norm) for p in norm.parameters())
            steps.append(Step("", f"{type(self.q_norm).__name__} of q and k", (b, h, n, d), count))
        if self.position_encoding is not None:
            count = sum(p.numel() for p in self.position_encoding.parameters())
            steps.append(Step("place", f"{type(self.position_encoding).__name__}", None, count or None))
        scale = d**-0.5 if self.scale is None else self.scale
        cap = "" if self.softcap is None else f", capped at {self.softcap:g}"
        steps.append(Step("score", f"q k^T * {scale:.4g}{cap}", (b, h, n, n), None, b * h * n * n * d))
        sinks = "" if self.sinks is None else " with sinks"
        count = None if self.sinks is None else self.sinks.numel()
        steps.append(Step("weigh", f"softmax{sinks}, times v", (b, h, n, e), count, b * h * n * n * e))
        steps.append(Step("merge", "heads side by side", (b, n, h * e)))
        return [*steps, through("project", "out_proj")]

    def extra_repr(self) -> str:
        parts = [f"{self.embed_dim}, num_heads={self.num_heads}"]
        if self.num_kv_heads != self.num_heads:
            parts.append(f"num_kv_heads={self.num_kv_heads}")
        parts.append(f"head_dim={self.head_dim}")
        for name, default in (
            ("value_head_dim", self.head_dim),
            ("dropout", 0.0),
            ("scale", None),
            ("softcap", None),
            ("kernel", "auto"),
        ):
            if getattr(self, name) != default:
                parts.append(f"{name}={getattr(self, name)!r}")
        return ", ".join(parts)


_CONTIGUOUS = Slots()


def _norm(kind: str | None, width: int) -> nn.Module | None:
    if kind is None:
        return None
    if kind not in ("rms", "layer"):
        raise bad_value("qk_norm", expected='"rms", "layer" or None', received=repr(kind))
    return nn.RMSNorm(width, eps=1e-6) if kind == "rms" else nn.LayerNorm(width)
