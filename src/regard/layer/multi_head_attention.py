"""The layer: project to heads, attend, merge, project.

      query (B, N, W)    key (B, M, W)    value (B, M, W)
          │ q_proj           │ k_proj         │ v_proj
      (B, H, N, D)       (B, G, M, D)     (B, G, M, E)          split into heads; H is a multiple of G:
          │ norm, rotary     │ norm, rotary   │ norm
          └────────┬─────────┘                │                 MHA  q q q q    GQA  q q q q    MQA  q q q q
        weights (B, H, N, M), not stored      │                      k k k k         k   k           k
                   └───────────┬──────────────┘
                        (B, H, N, E)                            times a gate, perhaps; merge the heads
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
from regard.cache import KVCache, RollingCache, Rotate, Slots
from regard.errors import no_torchscript, refuse_trace, unknown_argument
from regard.layer.checks import (
    SIZES,
    check_axes_given,
    check_inputs,
    check_parts,
    check_settings,
    check_shared,
    check_sizes,
    check_types,
)
from regard.layer.from_preset import layer_options
from regard.layer.gate import Gate
from regard.layer.key_values import KeyValues, read_source
from regard.layer.norm import Norm, as_norm, normalise
from regard.layer.steps import steps_of
from regard.layer.value_mix import ValueMix
from regard.masks import Mask, as_mask
from regard.positions import Alibi, MultiAxisRotary, RelativeBias, Rotary, Temperature, as_biases
from regard.presets import Configuration, configuration
from regard.projections import project, project_each
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
        qk_norm: "rms" or "layer": normalise each head's q and k, before rotary; or a `Norm`, for other norms.
        v_norm: the same for v.
        softcap: scores become softcap * tanh(scores / softcap).
        sinks: a learned logit per head that takes part in the denominator.
        gate: a `Gate` on the heads' outputs, computed from the query's input by `gate_proj`.
        query_scale: a `positions.Temperature`, which scales queries by their position.
        value_mix: a `ValueMix`, which mixes values with those of an earlier layer (`value_residual` of the call).
        shares_kv: no k_proj and v_proj: attends to another layer's keys and values (`source` of the call).
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

    k_proj: nn.Linear  # None where keys and values are another layer's (shares_kv)
    v_proj: nn.Linear

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
        qk_norm: Literal["rms", "layer"] | Norm | None = None,
        v_norm: Literal["rms", "layer"] | Norm | None = None,
        softcap: float | None = None,
        sinks: bool = False,
        gate: Gate | None = None,
        query_scale: Temperature | None = None,
        value_mix: ValueMix | None = None,
        shares_kv: bool = False,
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

        check_parts(gate, query_scale, value_mix, shares_kv=shares_kv, v_norm=v_norm)
        self.q_proj = nn.Linear(self.query_dim, num_heads * self.head_dim, bias=bias)
        out_bias = bias if out_bias is None else out_bias
        self._add_keys_and_values(bias, shares_kv)
        self.out_proj = nn.Linear(num_heads * self.value_head_dim, embed_dim, bias=out_bias)
        self._add_norms(as_norm("qk_norm", qk_norm), as_norm("v_norm", v_norm))
        self.position_encoding = position_encoding
        self.sinks = nn.Parameter(torch.zeros(num_heads)) if sinks else None
        self.query_scale, self.value_mix, self.gate, self.gate_proj = query_scale, value_mix, gate, None
        if gate is not None:
            rows = gate.width(num_heads, self.value_head_dim)
            self.gate_proj = nn.Linear(self.query_dim, rows, bias=gate.bias)
        self.reset_parameters()

    def _add_keys_and_values(self, bias: bool, shares_kv: bool) -> None:
        """k_proj and v_proj; None where the keys and values are another layer's."""
        self.shares_kv, g = shares_kv, self.num_kv_heads
        sizes = {"k_proj": (self.key_dim, g * self.head_dim), "v_proj": (self.value_dim, g * self.value_head_dim)}
        for name, (width, rows) in sizes.items():
            self.register_module(name, None if shares_kv else nn.Linear(width, rows, bias=bias))

    def _add_norms(self, qk_norm: Norm | None, v_norm: Norm | None) -> None:
        g, d = self.num_kv_heads, self.head_dim
        self.q_norm = None if qk_norm is None else qk_norm.module(self.num_heads, d)
        self.k_norm = None if qk_norm is None or self.shares_kv else qk_norm.module(g, d)
        self.v_norm = None if v_norm is None else v_norm.module(g, self.value_head_dim)

    @classmethod
    def from_config(cls, config: str | Configuration, layer: int | None = None, **changes: Any) -> MultiHeadAttention:
        """The attention layer of a well-known model, untrained, with all its parts; `changes` go to the constructor.

        `config` is a name, one of `regard.presets.CONFIGURATIONS`, or a `Configuration` of your own; `layer` the number
        of the layer, if they differ: by default one that sees everything.

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
        config = configuration(config) if isinstance(config, str) else config
        return cls(**layer_options(config, layer, **changes))

    def reset_parameters(self) -> None:
        """Start again from random weights."""
        for linear in (self.q_proj, self.k_proj, self.v_proj, self.out_proj, self.gate_proj):
            if linear is None:
                continue
            if self.init == "xavier":
                nn.init.xavier_uniform_(linear.weight)
            else:
                nn.init.normal_(linear.weight, std=0.02)
            if linear.bias is not None:
                nn.init.zeros_(linear.bias)
        if self.sinks is not None:
            nn.init.zeros_(self.sinks)
        for module in (self.q_norm, self.k_norm, self.v_norm, self.value_mix, self.position_encoding):
            if isinstance(module, (nn.RMSNorm, nn.LayerNorm, ValueMix, RelativeBias)):
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
        value_residual: Tensor | None = ...,
        share: KeyValues | None = ...,
        source: KeyValues | KVCache | None = ...,
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
        value_residual: Tensor | None = ...,
        share: KeyValues | None = ...,
        source: KeyValues | KVCache | None = ...,
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
        value_residual: Tensor | None = None,
        share: KeyValues | None = None,
        source: KeyValues | KVCache | None = None,
        need_weights: bool = False,
        **unknown: NoReturn,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend from `query` to `key` and `value`.

        Args:
            query: (B, N, W), or (N, W) without a batch.
            key: (B, M, W); the query itself by default (self attention).
            value: (B, M, W); the key by default.
            mask, bias: as in `regard.attend`; with a cache M counts cached and new keys.
            positions: where the queries stand, (N,) or (B, N) (in self attention the new keys too); (N, A) or (B, N, A)
                for a `MultiAxisRotary`, which masks do not see: they compare the order of the tokens.
            cache: a `KVCache` or `RollingCache`, updated in place.
            value_residual: (B, G, N, E), values that the layer's `value_mix` mixes with its own.
            share: an empty `KeyValues`, filled with the keys and values of this call for other layers.
            source: what a layer with `shares_kv` attends to: the `KeyValues` or the `KVCache` of another layer, which
                has run before with the same tokens.
            need_weights: also return the weights, (B, H, N, M), before dropout.

        Returns:
            (B, N, W); with `need_weights` the same and the weights.
        """
        self._check_types(query, key, value, cache, unknown)
        if query.dim() == 2:
            options = {"mask": mask, "bias": bias, "positions": positions, "cache": cache}
            options |= {"value_residual": value_residual, "share": share, "source": source}
            return self._unbatched(query, key, value, need_weights=need_weights, **options)
        key = query if key is None else key
        value = key if value is None else value
        self._check_call(query, key, value, cache)
        if self.shares_kv or not (share is source is value_residual is None) or isinstance(cache, RollingCache):
            check_shared(self, cache, key is query, value_residual, share, source)
        with nullcontext() if cache is None else self._filling(cache, query, key, value):
            if self.shares_kv:
                q, k, v, slots = self._borrow(query, positions, source)
            else:
                q, k, v = self._project(query, key, value, cache)
                if self.value_mix is not None and v is not None:
                    v = self.value_mix(v, value_residual)
                q, k, v, slots = self._place(q, k, v, positions, cache, self_attention=key is query, share=share)
            options = self._options(slots, mask, bias)
            out = attend(q, k, v, dropout=self.dropout if self.training else 0.0, kernel=self.kernel, **options)
            weights = attention_weights(q, k, **options) if need_weights else None
            out = self._merge(out, query)
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
            self._split(v, self.v_norm, self.value_head_dim),
        )

    def _split(self, x: Tensor, norm: nn.Module | None, width: int) -> Tensor:
        """(B, N, heads * width) -> (B, heads, N, width). The number of heads is inferred: x may hold a shard."""
        if norm is not None and getattr(norm, "normalized_shape", (width,)) != (width,):  # all heads together
            x, norm = normalise(norm, x), None
        x = x.view(*x.shape[:-1], x.shape[-1] // width, width)
        return (x if norm is None else normalise(norm, x)).transpose(1, 2)

    def _place(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        positions: Tensor | None,
        cache: KVCache | RollingCache | None,
        *,
        self_attention: bool,
        share: KeyValues | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Slots]:
        """Queries and keys rotated to their positions; keys and values with the cached ones first.

        In self attention `positions` apply to both the queries and the new keys.
        """
        rotate, positions = self._rotation(positions, cache)
        rotate_keys = rotate if self_attention else self._rotate
        new_values = v
        if k is None or v is None:
            assert cache is not None
            k, v, slots = cache.recall(positions)
        elif cache is not None:
            k, v, slots = cache.extend(k, v, rotate_keys, positions if self_attention else None)
            slots = slots if self_attention else replace(slots, positions=positions)
        elif self_attention and positions is not None:
            k, slots = self._rotate(k, positions, None), Slots(positions=positions, key_positions=positions)
        else:
            k, slots = rotate_keys(k, 0, k.shape[2]), _CONTIGUOUS if positions is None else Slots(positions=positions)
        if share is not None:
            assert new_values is not None
            share.fill(k, v, new_values, slots)
        return *self._place_queries(q, k, slots, rotate), v, slots

    def _borrow(
        self, query: Tensor, positions: Tensor | None, source: KeyValues | KVCache | None
    ) -> tuple[Tensor, Tensor, Tensor, Slots]:
        """The layer's own queries, and another layer's keys and values, which are placed already."""
        q = self._split(project(self.q_proj, query), self.q_norm, self.head_dim)
        k, v, slots = read_source(self, source, q)
        if positions is None and isinstance(self.position_encoding, MultiAxisRotary):
            check_axes_given(True)
        rotate, positions = self._rotation(positions, None)
        slots = slots if positions is None else replace(slots, positions=positions)
        return *self._place_queries(q, k, slots, rotate), v, slots

    def _place_queries(self, q: Tensor, k: Tensor, slots: Slots, rotate: Rotate) -> tuple[Tensor, Tensor]:
        """Queries rotated and scaled; and the rotated keys to compare them with."""
        if isinstance(self.position_encoding, Rotary):
            q, k = slots.rotate_queries(q, k, rotate)
        if self.query_scale is not None:
            q = self.query_scale(q, k.shape[2] - q.shape[2] if slots.positions is None else slots.positions)
        return q, k

    def _rotation(self, positions: Tensor | None, cache: KVCache | RollingCache | None) -> tuple[Rotate, Tensor | None]:
        """How to rotate; and the positions that masks and caches see, which those of several axes are not."""
        rotary = self.position_encoding
        if not isinstance(rotary, MultiAxisRotary):
            return self._rotate, positions
        if positions is None:
            check_axes_given(cache is not None and len(cache) > 0)
            return self._rotate, None
        return (lambda x, *_: rotary(x, positions)), None

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

    def _merge(self, out: Tensor, query: Tensor) -> Tensor:
        """The heads, perhaps gated, side by side, (B, H, N, E) -> (B, N, H * E), and projected to (B, N, W)."""
        out = out.transpose(1, 2)
        if self.gate is not None:
            assert self.gate_proj is not None
            out = self.gate(out, project(self.gate_proj, query))
        return project(self.out_proj, out.flatten(2))

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
        g, d, e, size = self.num_kv_heads, self.head_dim, self.value_head_dim, self.q_proj.weight.element_size()
        if self.shares_kv:
            return f"{table(self.walk(tokens, batch=batch))}\ncache: none of its own"
        cache = f"cache: {g * (d + e) * size:,} bytes per token ({g} kv heads x ({d} + {e}) x {size} bytes)"
        return f"{table(self.walk(tokens, batch=batch))}\n{cache}"

    def walk(self, tokens: int, *, batch: int = 1) -> list[Step]:
        """The steps that `describe` shows."""
        return steps_of(self, tokens, batch)

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
            ("gate", None),
            ("shares_kv", False),
            ("kernel", "auto"),
        ):
            if getattr(self, name) != default:
                parts.append(f"{name}={getattr(self, name)!r}")
        return ", ".join(parts)


_CONTIGUOUS = Slots()
