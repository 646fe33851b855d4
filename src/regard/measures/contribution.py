"""Heads as a whole: what they add to the stream, how they differ, and how layers combine.

Letters: B batch, H query heads, G kv heads, N queries, M keys, E head width of v, W model width;
c, h, n, m the same within one strip.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from regard.errors import bad_value, shape_of
from regard.measures.base import Measure, Plane, Reduction, Strip, Sums, add_to_keys

__all__ = ["Contribution", "Divergence", "rollout"]


class Contribution(Measure):
    """Norm-weighted attention (Kobayashi et al. 2020): P_ij times the norm of value j after the head's slice of the
    output projection; `contribution` (B, H, N) is its sum over keys, `contributed` (B, H, M) its sum over queries.

    `out_weight` (W, H * E) is the output projection's, as `nn.Linear` stores it. `watch` knows it for regard's layers
    and `nn.MultiheadAttention`.
    """

    gives = {"contribution": "query", "contributed": "key"}
    query_tensors = 1
    needs_out_weight = True
    needs_probabilities = True

    def __init__(self, out_weight: Tensor | None = None) -> None:
        self.out_weight = out_weight

    def prepare(self, plane: Plane) -> Tensor:
        """|v_j W_h| of each head and key: (B, H, M). By the Gram matrix of W_h, so no (M, H, W) is built."""
        weight = plane.out_weight if self.out_weight is None else self.out_weight
        if weight is None:
            raise bad_value(
                "contribution",
                expected="the output projection's weight (W, H * E)",
                received="none",
                remedy="measures.Contribution(out_proj.weight)",
            )
        if plane.values is None:
            raise bad_value("contribution", expected="values", received="v=None", remedy="measure(q, k, v, ...)")
        groups, width = plane.values.shape[1], plane.values.shape[3]
        if weight.dim() != 2 or weight.shape[1] != plane.heads * width:
            raise bad_value(
                "contribution out_weight",
                expected=f"shape (W, H * E) = (W, {plane.heads * width})",
                received=f"shape {shape_of(weight)}",
            )
        slices = weight.detach().to(plane.dtype).unflatten(1, (plane.heads, width))  # (W, H, E)
        norms = plane.new(plane.keys)
        for head in range(plane.heads):
            values = plane.values[:, head // (plane.heads // groups)].detach().to(plane.dtype)  # (B, M, E)
            gram = slices[:, head].mT @ slices[:, head]
            norms[:, head] = ((values @ gram) * values).sum(-1).clamp(min=0).sqrt()
        return norms

    def begin(self, plane: Plane) -> tuple[Tensor, Tensor]:
        return plane.new(plane.queries), plane.new(plane.keys)

    def add(self, state: tuple[Tensor, Tensor], strip: Strip, prepared: Tensor) -> None:
        norms = strip.of_keys(prepared)[:, strip.heads]  # (c, h, m)
        state[0][strip.where] = strip.times(norms)
        add_to_keys(state[1], strip, strip.without_padding.weights.sum(2) * norms)

    def reduction(self, plane: Plane, prepared: Tensor) -> Reduction:
        return Reduction(columns=prepared[:, :, None], received=True)

    def take(self, state: tuple[Tensor, Tensor], sums: Sums, plane: Plane, prepared: Tensor) -> None:
        assert sums.columns is not None and sums.received is not None
        state[0].copy_(sums.columns[..., 0])
        torch.mul(sums.received, prepared, out=state[1])

    def end(self, state: tuple[Tensor, Tensor], seen: Tensor) -> dict[str, Tensor]:
        return {"contribution": state[0], "contributed": state[1]}


class Divergence(Measure):
    """How much heads differ: for each two heads the Jensen-Shannon divergence of their rows, in nats, summed over
    queries: (B, H, H) (Clark et al. 2019, whose code first smooths each row: 0.999 P + 0.001 / n; `smooth=0.001` does).
    Memory is that of a strip; the time grows with the square of the heads."""

    gives = {"divergence": "sum"}
    needs_logs = True
    needs_all_heads = True
    needs_probabilities = True

    def __init__(self, smooth: float = 0.0) -> None:
        self.smooth = smooth

    def begin(self, plane: Plane) -> Tensor:
        return torch.zeros(plane.batch, plane.heads, plane.heads, dtype=plane.dtype, device=plane.k_positions.device)

    def add(self, state: Tensor, strip: Strip, prepared: Any) -> None:
        weights, entropies = strip.weights, strip.entropies
        if self.smooth:
            if weights.shape[-1] < strip.plane.keys:  # smoothing reaches the keys that are hidden, too
                wide = weights.new_zeros(*weights.shape[:-1], strip.plane.keys)
                wide[..., strip.columns] = weights
                weights = wide
            weights = (1 - self.smooth) * weights + self.smooth * _share(strip)
            entropies = torch.special.entr(weights).sum(-1)
        mass = weights.sum(-1)
        for head in range(weights.shape[1] - 1):
            this, others = slice(head, head + 1), slice(head + 1, None)
            # of the mean of two rows, by that of their sum: -sum m/2 ln(m/2) = -1/2 sum m ln m + ln 2 / 2 sum m
            mixed = torch.special.entr(weights[:, this] + weights[:, others]).sum(-1) / 2
            mixed += (mass[:, this] + mass[:, others]) * (math.log(2) / 2)
            apart = mixed - (entropies[:, this] + entropies[:, others]) / 2
            sums = apart.clamp_(min=0).sum(-1)  # (c, heads after this one); rounding may have gone below 0
            state[strip.batch, head, head + 1 :] += sums
            state[strip.batch, head + 1 :, head] += sums


def _share(strip: Strip) -> Tensor | float:
    """1 / n for each of the n tokens of a text, 0 for padding: (c, 1, 1, M), or one number for all."""
    padding = strip.plane.key_padding
    if padding is None:
        return 1 / strip.plane.keys
    real = (~padding[strip.batch]).to(strip.weights.dtype)
    return (real / real.sum(1, keepdim=True).clamp(min=1))[:, None, None]


def rollout(maps: Sequence[Tensor]) -> Tensor:
    """Attention rollout (Abnar & Zuidema 2020): how much of each input token is in each output token after all layers.

    Args:
        maps: the weights of each layer, first to last, (B, H, N, N) or (H, N, N).

    Returns:
        (B, N, N) or (N, N): R_l = A_l R_(l-1), A the rows of (mean over heads of P) + I, made to sum to 1.

    >>> uniform = torch.full((1, 2, 2), 0.5)
    >>> rollout([uniform])
    tensor([[0.7500, 0.2500],
            [0.2500, 0.7500]])
    """
    if not maps:
        raise bad_value("maps", expected="the weights of one layer at least", received="none")
    result = None
    for weights in maps:
        if weights.dim() not in (3, 4) or weights.shape[-1] != weights.shape[-2]:
            raise bad_value(
                "maps", expected="(B, H, N, N) or (H, N, N) of self attention", received=f"shape {shape_of(weights)}"
            )
        mixed = weights.mean(-3) + torch.eye(weights.shape[-1], dtype=weights.dtype, device=weights.device)
        mixed = mixed / mixed.sum(-1, keepdim=True)
        result = mixed if result is None else mixed @ result
    assert result is not None
    return result
