"""The steps of a layer that `describe` shows, with shapes, parameters and multiply-adds.

Letters: B batch, H query heads, G kv heads, N tokens, D head width of q and k, E of v, W model width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from regard.summary import Step

if TYPE_CHECKING:
    from regard.layer.multi_head_attention import MultiHeadAttention

__all__ = ["steps_of"]


def steps_of(layer: MultiHeadAttention, tokens: int, batch: int) -> list[Step]:
    """The steps of a text of `tokens`."""
    h, g, d, e = layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.value_head_dim
    b, n = batch, tokens

    def through(step: str, name: str) -> Step:
        linear: nn.Linear = getattr(layer, name)
        return Step(step, name, (b, n, linear.out_features), _size(linear), b * n * linear.weight.numel())

    inputs = ["q_proj", "k_proj", "v_proj", "gate_proj"]
    present = [name for name in inputs if getattr(layer, name) is not None]
    steps = [through("" if i else "project", name) for i, name in enumerate(present)]
    steps.append(Step("split", f"{h} heads of q", (b, h, n, d)))
    shared = ", of another layer" if layer.shares_kv else ""
    steps.append(Step("", f"{g} heads of k{shared}", (b, g, n, d)))
    steps.append(Step("", f"{g} heads of v{shared}", (b, g, n, e)))
    steps += _normed(layer, b, n)
    if layer.value_mix is not None:
        steps.append(Step("", "v mixed with an earlier layer's", (b, g, n, e), _size(layer.value_mix)))
    if layer.position_encoding is not None:
        steps.append(Step("place", type(layer.position_encoding).__name__, None, _size(layer.position_encoding)))
    if layer.query_scale is not None:
        steps.append(Step("", f"q * {type(layer.query_scale).__name__}", (b, h, n, d), _size(layer.query_scale)))
    scale = d**-0.5 if layer.scale is None else layer.scale
    cap = "" if layer.softcap is None else f", capped at {layer.softcap:g}"
    steps.append(Step("score", f"q k^T * {scale:.4g}{cap}", (b, h, n, n), None, b * h * n * n * d))
    sinks = "" if layer.sinks is None else " with sinks"
    count = None if layer.sinks is None else layer.sinks.numel()
    steps.append(Step("weigh", f"softmax{sinks}, times v", (b, h, n, e), count, b * h * n * n * e))
    if layer.gate is not None:
        steps.append(Step("gate", f"{layer.gate.activation} per {layer.gate.per}", (b, n, h, e)))
    steps.append(Step("merge", "heads side by side", (b, n, h * e)))
    return [*steps, through("project", "out_proj")]


def _normed(layer: MultiHeadAttention, b: int, n: int) -> list[Step]:
    """The norms, q's and k's as one step."""
    steps = []
    shape = (b, layer.num_heads, n, layer.head_dim)
    if layer.q_norm is not None:
        what = "q" if layer.k_norm is None else "q and k"
        count = sum(p.numel() for norm in (layer.q_norm, layer.k_norm) if norm is not None for p in norm.parameters())
        steps.append(Step("", f"{type(layer.q_norm).__name__} of {what}", shape, count or None))
    if layer.v_norm is not None:
        shape = (b, layer.num_kv_heads, n, layer.value_head_dim)
        steps.append(Step("", f"{type(layer.v_norm).__name__} of v", shape, _size(layer.v_norm)))
    return steps


def _size(module: nn.Module) -> int | None:
    return sum(p.numel() for p in module.parameters()) or None
