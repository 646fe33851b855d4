"""Multi-head latent attention: keys and values of all heads are made of one short latent per token.

      x (B, N, W)
       │ q_proj, or              │ kv_down_proj
       │ q_down_proj, q_norm,    ├──────────────────────────┐
       │ q_up_proj            (B, N, R)                  (B, N, P)
       │                         │ kv_norm                  │ rotary
       │                      latents (B, N, R)          rotary keys (B, N, P)      both are all that is cached
       │                         │ kv_up_proj               │
    (B, H, N, C + P)      (B, H, M, C), (B, H, M, E)     the same for all heads
       │ rotary on P      keys without    values
       │                  positions

A score is q_c k_c + q_p k_p. With k_c = A c, where c is the latent and A (C, R) the head's part of kv_up_proj, it is
(A^T q_c) c + q_p k_p: attention of wider queries to one kv head, whose keys are what is cached, and whose values are
the latents. That is the *absorbed* form; the values' part of kv_up_proj is applied to its result. Both forms give the
same output and the same weights. (DeepSeek-V2, https://arxiv.org/abs/2405.04434.)

Letters: B batch, H heads, N queries, M keys, W model width, R rank of the latent, C head width of q and k without
positions, P width of the rotary part, D = C + P head width of q and k, E head width of v.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Literal, NoReturn, overload

import torch
from torch import Tensor, nn

from regard.attention import BiasLike, attend, attention_weights
from regard.cache import LatentCache, Slots
from regard.errors import bad_type, bad_value, no_torchscript, unknown_argument
from regard.masks import Mask, as_mask
from regard.norms import RMSNorm
from regard.positions import Rotary
from regard.positions.scalings import YaRN
from regard.projections import project, project_each
from regard.summary import Step, table
from regard.tracing import traced
from regard.variants.checks import check_call, check_input, check_rotary, check_sizes, is_watched

__all__ = ["LatentAttention"]


class LatentAttention(nn.Module):
    """Multi-head latent attention (MLA) of DeepSeek-V2 and the families after it: self attention whose cache holds
    `kv_rank + rope_head_dim` numbers per token, whatever the number of heads.

    Args:
        embed_dim: W, the width of input and output.
        num_heads: H.
        kv_rank: R, the width of the latent that keys and values are made of.
        nope_head_dim: C, the width of a head's queries and keys that has no positions.
        rope_head_dim: P, the width that has; its keys are shared by all heads. 0 for none.
        value_head_dim: E, nope_head_dim by default.
        q_rank: the rank of the queries' own latent, with a norm; by default queries are made of x by one projection.
        bias: whether q_down_proj, kv_down_proj and out_proj have one; out_bias: whether out_proj has (as bias by
            default). The others have none.
        latent_scale: the latents are multiplied by it after their norm (LongCat).
        dropout: on the weights, in training only.
        scale: (C + P) ** -0.5 by default; where the rotary scaling is a YaRN with `mscale_all_dim` that is multiplied,
            as in all these families, by (0.1 mscale_all_dim log(factor) + 1) ** 2.
        position_encoding: a `positions.Rotary` of width P; most of these models have `interleaved=True`. None leaves
            the P as they are (Kimi Linear).
        norm_eps: epsilon of the two norms.
        absorb: which form to compute: True for the absorbed one, False for the plain one, None for the one that takes
            fewer multiply-adds. It may be changed at any time: `layer.absorb = True`.
        init: "xavier" (uniform) or "normal" (std 0.02); biases start at 0.
        kernel: "auto", or one of `regard.kernels.available()`.

    >>> import regard
    >>> rotary = regard.positions.Rotary(4, interleaved=True)
    >>> layer = LatentAttention(32, 4, kv_rank=16, nope_head_dim=8, rope_head_dim=4, position_encoding=rotary).eval()
    >>> x, cache = torch.randn(2, 5, 32), regard.LatentCache()
    >>> with torch.no_grad():
    ...     first = layer(x[:, :4], mask=regard.masks.Causal(), cache=cache)
    ...     last = layer(x[:, 4:], mask=regard.masks.Causal(), cache=cache)
    >>> torch.allclose(last, layer(x, mask=regard.masks.Causal())[:, 4:], atol=1e-5)
    True
    >>> cache.bytes_per_token  # (16 + 4) * 4
    80
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        kv_rank: int,
        nope_head_dim: int,
        rope_head_dim: int,
        value_head_dim: int | None = None,
        q_rank: int | None = None,
        bias: bool = False,
        out_bias: bool | None = None,
        latent_scale: float = 1.0,
        dropout: float = 0.0,
        scale: float | None = None,
        position_encoding: Rotary | None = None,
        norm_eps: float = 1e-6,
        absorb: bool | None = None,
        init: Literal["xavier", "normal"] = "xavier",
        kernel: str = "auto",
        **unknown: NoReturn,
    ) -> None:
        super().__init__()
        if unknown:
            raise unknown_argument("LatentAttention", LatentAttention.__init__, unknown)
        value_head_dim = nope_head_dim if value_head_dim is None else value_head_dim
        sizes = {"embed_dim": embed_dim, "num_heads": num_heads, "kv_rank": kv_rank, "nope_head_dim": nope_head_dim}
        check_sizes({**sizes, "value_head_dim": value_head_dim, "q_rank": q_rank})
        check_sizes({"rope_head_dim": rope_head_dim}, least=0)
        check_rotary(position_encoding, rope_head_dim)
        _check_settings(dropout, absorb, init)
        self.embed_dim, self.num_heads, self.kv_rank, self.q_rank = embed_dim, num_heads, kv_rank, q_rank
        self.nope_head_dim, self.rope_head_dim, self.value_head_dim = nope_head_dim, rope_head_dim, value_head_dim
        self.dropout, self.scale, self.latent_scale, self.absorb = dropout, scale, latent_scale, absorb
        self.kernel, self.init = kernel, init

        queries = num_heads * self.head_dim
        if q_rank is None:
            self.q_proj = nn.Linear(embed_dim, queries, bias=False)
        else:
            self.q_down_proj = nn.Linear(embed_dim, q_rank, bias=bias)
            self.q_norm = RMSNorm(q_rank, eps=norm_eps)
            self.q_up_proj = nn.Linear(q_rank, queries, bias=False)
        self.kv_down_proj = nn.Linear(embed_dim, kv_rank + rope_head_dim, bias=bias)
        self.kv_norm = RMSNorm(kv_rank, eps=norm_eps)
        self.kv_up_proj = nn.Linear(kv_rank, num_heads * (nope_head_dim + value_head_dim), bias=False)
        self.out_proj = nn.Linear(num_heads * value_head_dim, embed_dim, bias=bias if out_bias is None else out_bias)
        self.position_encoding = position_encoding
        self.reset_parameters()

    @property
    def head_dim(self) -> int:
        """D = C + P, the head width of queries and keys."""
        return self.nope_head_dim + self.rope_head_dim

    @property
    def softmax_scale(self) -> float:
        """What scores are multiplied by."""
        if self.scale is not None:
            return self.scale
        yarn = None if self.position_encoding is None else self.position_encoding.scaling
        factor = self.head_dim**-0.5
        if isinstance(yarn, YaRN) and yarn.mscale_all_dim and yarn.factor > 1:
            factor *= (0.1 * yarn.mscale_all_dim * math.log(yarn.factor) + 1) ** 2
        return factor

    def reset_parameters(self) -> None:
        """Start again from random weights."""
        for module in self.children():
            if isinstance(module, nn.Linear):
                if self.init == "xavier":
                    nn.init.xavier_uniform_(module.weight)
                else:
                    nn.init.normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.RMSNorm):
                module.reset_parameters()

    @overload
    def forward(
        self,
        x: Tensor,
        *,
        mask: Mask | Tensor | None = ...,
        bias: BiasLike | None = ...,
        positions: Tensor | None = ...,
        cache: LatentCache | None = ...,
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
        cache: LatentCache | None = ...,
        need_weights: Literal[True],
    ) -> tuple[Tensor, Tensor]: ...

    def forward(
        self,
        x: Tensor,
        *,
        mask: Mask | Tensor | None = None,
        bias: BiasLike | None = None,
        positions: Tensor | None = None,
        cache: LatentCache | None = None,
        need_weights: bool = False,
        **unknown: NoReturn,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend from x to itself, and to what is cached.

        Args:
            x: (B, N, W), or (N, W) without a batch.
            mask, bias: as in `regard.attend`; with a cache M counts cached and new keys.
            positions: where the tokens of x stand, (N,) or (B, N).
            cache: a `LatentCache`, updated in place.
            need_weights: also return the weights, (B, H, N, M), before dropout.

        Returns:
            (B, N, W); with `need_weights` the same and the weights.
        """
        check_call(self, x, cache, LatentCache, LatentAttention.forward, unknown)
        if x.dim() == 2:
            options: dict[str, Any] = {"mask": mask, "bias": bias, "positions": positions, "cache": cache}
            if need_weights:
                out, weights = self.forward(x[None], need_weights=True, **options)
                return out[0], weights[0]
            return self.forward(x[None], **options)[0]
        check_input(x, self.embed_dim, self.kv_down_proj.weight)
        with nullcontext() if cache is None else self._filling(cache, x):
            q_content, q_rotary, latents, rotary_keys = self._project(x)
            q_rotary, tokens, slots = self._place(q_rotary, latents, rotary_keys, positions, cache)
            score = self._options(slots, mask, bias)
            form = self._absorbed if self._absorbs(x.shape[1], tokens.shape[2]) else self._plain
            q, k, v = form(q_content, q_rotary, tokens)
            out = attend(q, k, v, dropout=self.dropout if self.training else 0.0, kernel=self.kernel, **score)
            weights = attention_weights(q, k, **score) if need_weights else None
            if form == self._absorbed:
                out = torch.einsum("bhnr,her->bhne", out, self._up_weights()[1])
            out = project(self.out_proj, out.transpose(1, 2).flatten(2))
        return out if weights is None else (out, weights)

    @contextmanager
    def _filling(self, cache: LatentCache, x: Tensor) -> Iterator[None]:
        """Context of one call with a cache: the cache notes which layer fills it, and is rolled back on an error."""
        if not traced(x):
            cache.check_source(self)
        with cache.attending():
            if not traced(x):
                cache.set_source(self)
            yield

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries without positions (B, H, N, C) and the part to rotate (B, H, N, P); latents (B, N, R) and shared keys
        to rotate (B, N, P)."""
        first = self.q_proj if self.q_rank is None else self.q_down_proj
        q, kv = project_each((first, self.kv_down_proj), x)
        if self.q_rank is not None:
            q = project(self.q_up_proj, _normalised(self.q_norm, q))
        q = q.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)
        latents = _normalised(self.kv_norm, kv[..., : self.kv_rank])
        if self.latent_scale != 1:
            latents = latents * self.latent_scale
        return q[..., : self.nope_head_dim], q[..., self.nope_head_dim :], latents, kv[..., self.kv_rank :]

    def _place(
        self, q: Tensor, latents: Tensor, rotary_keys: Tensor, positions: Tensor | None, cache: LatentCache | None
    ) -> tuple[Tensor, Tensor, Slots]:
        """The queries' rotary part (B, H, N, P), rotated; latents and rotated keys side by side, (B, 1, M, R + P), the
        cached ones first; and where they stand."""
        if cache is not None:
            tokens, slots = cache.extend(latents, rotary_keys, self._rotate, positions)
        else:
            n = latents.shape[1]
            stand = (0, n) if positions is None else (positions, None)
            slots = Slots(positions=positions, key_positions=positions)
            tokens = torch.cat([latents[:, None], self._rotate(rotary_keys[:, None], *stand)], -1)
        q, tokens = slots.rotate_queries(q, tokens, self._rotate)
        return q, tokens, slots

    def _rotate(self, x: Tensor, positions: Tensor | int, length: int | None) -> Tensor:
        """x (B, heads, N, P) rotated to its positions in a text of some length."""
        rotary = self.position_encoding
        return x if rotary is None else rotary(x, positions, length=length)

    def _options(self, slots: Slots, mask: Mask | Tensor | None, bias: BiasLike | None) -> dict[str, Any]:
        """The arguments of `attend` and `attention_weights` beside q, k and v."""
        if slots.mask is not None:
            mask = slots.mask if mask is None else slots.mask & as_mask(mask)
        return {
            "mask": mask,
            "bias": bias,
            "positions": slots.positions,
            "key_positions": slots.key_positions,
            "scale": self.softmax_scale,
        }

    def _absorbs(self, n: int, m: int) -> bool:
        """Whether to compute the absorbed form for N queries and M keys.

        Multiply-adds of one head:

            plain      M R (C + E)  to make keys and values of M latents,  + N M (C + P + E)
            absorbed   N R (C + E)  for N queries and N results,           + N M (2 R + P)

        So the absorbed one takes fewer if (M - N) R (C + E) > N M (2 R - C - E). Of DeepSeek's sizes (R = 512, C = E =
        128) that is fewer than about 170 queries at a time where the cache is long; never without a cache.
        """
        up = self.kv_up_proj
        plain = type(up) is nn.Linear  # (one that is quantised or has adapters has no weight to take apart)
        if self.absorb is not None:
            if self.absorb and not plain:
                received = f"{type(up).__name__}, which is called as a whole"
                raise bad_value("absorb", expected="nn.Linear as kv_up_proj", received=received, remedy="absorb=None")
            return self.absorb
        # Hooks of kv_up_proj are called in the plain form alone. And a text that is watched is seen in one form from
        # its first token to its last: in the plain one a head's keys, values and output are those of the equations.
        if not plain or up._forward_hooks or up._forward_pre_hooks or is_watched():
            return False
        widths = self.nope_head_dim + self.value_head_dim
        return (m - n) * self.kv_rank * widths > n * m * (2 * self.kv_rank - widths)

    def _up_weights(self) -> tuple[Tensor, Tensor]:
        """kv_up_proj by heads: from latents to keys (H, C, R) and to values (H, E, R). Views."""
        weight = self.kv_up_proj.weight.unflatten(0, (self.num_heads, -1))
        return weight[:, : self.nope_head_dim], weight[:, self.nope_head_dim :]

    def _plain(self, q_content: Tensor, q_rotary: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q (B, H, N, D), k (B, H, M, D), v (B, H, M, E): the keys and values of every head."""
        latents, rotary_keys = tokens[:, 0, :, : self.kv_rank], tokens[..., self.kv_rank :]
        kv = project(self.kv_up_proj, latents).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)  # (B, H, M, C + E)
        k, v = kv.split([self.nope_head_dim, self.value_head_dim], -1)
        k = torch.cat([k, rotary_keys.expand(-1, self.num_heads, -1, -1)], -1)
        return torch.cat([q_content, q_rotary], -1), k, v

    def _absorbed(self, q_content: Tensor, q_rotary: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q (B, H, N, R + P), k (B, 1, M, R + P), v (B, 1, M, R): keys and values are what is cached."""
        q_latent = torch.einsum("bhnc,hcr->bhnr", q_content, self._up_weights()[0])
        return torch.cat([q_latent, q_rotary], -1), tokens, tokens[..., : self.kv_rank]

    def absorbed_out_weight(self) -> Tensor:
        """The output projection of the absorbed form, (W, H * R): out_proj after the values' part of kv_up_proj. What a
        head adds to the output is its slice times the head's result, a mean of latents."""
        by_head = self.out_proj.weight.unflatten(1, (self.num_heads, -1))  # (W, H, E)
        return torch.einsum("whe,her->whr", by_head, self._up_weights()[1]).flatten(1)

    def __prepare_scriptable__(self) -> NoReturn:
        """Asked by `torch.jit.script`."""
        no_torchscript(self)

    def cache_sizes(self, num_kv_heads: int | None = None) -> dict[str, int]:
        """Bytes per token of this layer's cache, beside those of a `KVCache` of as many heads of the same widths (MHA),
        of `num_kv_heads` (GQA; an eighth of the heads by default), and of one (MQA).

        >>> layer = LatentAttention(2048, 16, kv_rank=512, nope_head_dim=128, rope_head_dim=64)
        >>> layer.cache_sizes()
        {'latent': 2304, 'MHA': 20480, 'GQA of 2': 2560, 'MQA': 1280}
        """
        groups = max(self.num_heads // 8, 1) if num_kv_heads is None else num_kv_heads
        size, width = self.kv_down_proj.weight.element_size(), self.head_dim + self.value_head_dim
        per_head = {"MHA": self.num_heads, f"GQA of {groups}": groups, "MQA": 1}
        of_heads = {name: heads * width * size for name, heads in per_head.items()}
        return {"latent": (self.kv_rank + self.rope_head_dim) * size, **of_heads}

    def describe(self, tokens: int = 128, *, batch: int = 1) -> str:
        """The walk through the layer for a text of `tokens`, in the plain form: shapes at each step, parameters,
        multiply-adds, cache.

        >>> print(LatentAttention(16, 2, kv_rank=8, nope_head_dim=4, rope_head_dim=2).describe(5))
        step     what                shape         parameters  multiply-adds
        project  q_proj              (1, 5, 12)           192            960
                 kv_down_proj        (1, 5, 10)           160            800
                 RMSNorm of latents  (1, 5, 8)              8
                 kv_up_proj          (1, 5, 16)           128            640
        split    2 heads of q        (1, 2, 5, 6)
                 2 heads of k        (1, 2, 5, 6)
                 2 heads of v        (1, 2, 5, 4)
        score    q k^T * 0.4082      (1, 2, 5, 5)                        300
        weigh    softmax, times v    (1, 2, 5, 4)                        200
        merge    heads side by side  (1, 5, 8)
        project  out_proj            (1, 5, 16)           128            640
        total                                             616          3,540
        cache: 40 bytes per token ((8 + 2) x 4 bytes); MHA 80, GQA of 1 40, MQA 40
        """
        size = self.kv_down_proj.weight.element_size()
        own, *others = self.cache_sizes().items()
        beside = ", ".join(f"{name} {count:,}" for name, count in others)
        how = f"({self.kv_rank} + {self.rope_head_dim}) x {size} bytes"
        cache = f"cache: {own[1]:,} bytes per token ({how}); {beside}"
        return f"{table(self.walk(tokens, batch=batch))}\n{cache}"

    def walk(self, tokens: int, *, batch: int = 1) -> list[Step]:
        """The steps that `describe` shows."""
        b, n, h, d, e = batch, tokens, self.num_heads, self.head_dim, self.value_head_dim

        def through(step: str, name: str) -> Step:
            linear: nn.Linear = getattr(self, name)
            count = sum(p.numel() for p in linear.parameters())
            return Step(step, name, (b, n, linear.out_features), count, b * n * linear.weight.numel())

        steps = [through("project", "q_proj" if self.q_rank is None else "q_down_proj")]
        if self.q_rank is not None:
            steps += [Step("", "RMSNorm of them", (b, n, self.q_rank), self.q_rank), through("", "q_up_proj")]
        return [
            *steps,
            through("", "kv_down_proj"),
            Step("", "RMSNorm of latents", (b, n, self.kv_rank), self.kv_rank),
            through("", "kv_up_proj"),
            Step("split", f"{h} heads of q", (b, h, n, d)),
            Step("", f"{h} heads of k", (b, h, n, d)),
            Step("", f"{h} heads of v", (b, h, n, e)),
            *([] if self.position_encoding is None else [Step("place", "Rotary, shared keys", None)]),
            Step("score", f"q k^T * {self.softmax_scale:.4g}", (b, h, n, n), None, b * h * n * n * d),
            Step("weigh", "softmax, times v", (b, h, n, e), None, b * h * n * n * e),
            Step("merge", "heads side by side", (b, n, h * e)),
            through("project", "out_proj"),
        ]

    def extra_repr(self) -> str:
        names = ("num_heads", "kv_rank", "nope_head_dim", "rope_head_dim", "value_head_dim")
        parts = [f"{self.embed_dim}", *(f"{name}={getattr(self, name)}" for name in names)]
        defaults = {
            "q_rank": None,
            "dropout": 0.0,
            "scale": None,
            "latent_scale": 1.0,
            "absorb": None,
            "kernel": "auto",
        }
        parts += [f"{name}={getattr(self, name)!r}" for name, value in defaults.items() if getattr(self, name) != value]
        return ", ".join(parts)


def _normalised(norm: nn.RMSNorm, x: Tensor) -> Tensor:
    return norm(x.to(norm.weight.dtype)).to(x.dtype)  # its weights may be wider than x


def _check_settings(dropout: object, absorb: object, init: object) -> None:
    if isinstance(dropout, bool) or not isinstance(dropout, (int, float)):
        raise bad_type("dropout", expected="a number", received=f"{type(dropout).__name__} {dropout!r}")
    if not 0.0 <= dropout <= 1.0:
        raise bad_value("dropout", expected="a probability from 0 to 1", received=dropout)
    if absorb not in (None, True, False):
        raise bad_value("absorb", expected="True, False or None", received=repr(absorb))
    if init not in ("xavier", "normal"):
        raise bad_value("init", expected='"xavier" or "normal"', received=repr(init))
