"""One attention that a model computed, as `watch` and `ablate` are handed it.

Letters: B batch, H query heads, N queries, M keys, D head width of q and k, E head width of v, W model width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn

from regard.heads.capture.output_projection import Projection
from regard.heads.capture.registry import GatherHeads
from regard.heads.capture.sdpa import band_of
from regard.kernels import Call
from regard.masks import Mask

__all__ = ["ObservedCall", "Subtracted", "with_uniform_weights"]


@dataclass
class Subtracted:
    """The second term of a difference of two attentions: its weights times `factor` are subtracted."""

    call: Call  # with the values, mask, biases and positions of the first
    factor: Tensor  # a number

    def detach(self) -> Subtracted:
        """The same without gradients."""
        return Subtracted(self.call.detached(), self.factor.detach())


@dataclass
class ObservedCall:
    """Either a `call` (q, k, v and everything that decides the weights), or, for attention written by hand, the
    `weights` (B, H, N, M) themselves, before dropout. What is not known is None. Its tensors have no gradients, unless
    the capture changes heads: then outputs can be computed again of them."""

    layer: str
    module: nn.Module
    forward: int  # number of the outermost call of the model, from 1
    kind: Literal["self", "cross"]
    call: Call | None = None
    weights: Tensor | None = None
    subtracted: Subtracted | None = None  # if the weights are those of `call` minus those of another one
    ids: Tensor | None = None  # (1|B, N)
    padding: Tensor | None = None  # (B, 1, N) True for padding queries; None if there is no padding
    out_weight: Tensor | None = None  # (W, H * E)
    projection: Projection | None = None  # the output projection
    input: Tensor | None = None  # (B, N, W): what queries are projected from
    output: Tensor | None = None  # (B, H, N, E)
    to_compute: bool = False  # whether `see` shall set `output`: it is computed in one pass with what is measured
    values: Tensor | None = None  # (..., M, E) of attention written by hand, leading axes in the model's own order
    cache: Any = None  # the cache that holds its keys
    numbers: Tensor | None = None  # (M,) the index in the sequence of each key
    steady: bool = False  # whether nobody will write over q, k and v of the call, as far as it is known
    unsure: str = ""  # why `call` or `weights` may not give the output, such as dropout; "" if they do
    # If other processes compute other heads: `call` has this process's, `gather_heads` gathers results per head
    gather_heads: GatherHeads | None = None
    global_call: Callable[[], Call] | None = None  # all tokens of all heads

    @property
    def device(self) -> torch.device:
        """The device of its tensors."""
        tensor = self.weights if self.call is None else self.call.q
        assert tensor is not None
        return tensor.device

    @property
    def keys(self) -> Tensor | None:
        """(..., M, D): the keys (or values, of attention written by hand) by which a sequence is recognised."""
        return self.values if self.call is None else self.call.k

    @cached_property
    def visible(self) -> Tensor:
        """(B, N, M): of weights that were built by hand, which pairs have any in one of the heads. (NaN is none.)"""
        assert self.weights is not None
        return self.weights.amax(1) > 0

    @cached_property
    def band(self) -> Mask | None:
        """The same as a mask without tensors, where it is one."""
        return band_of(self.visible)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B, H, N, M)"""
        if self.call is not None:
            batch, heads, n, m = self.call.shape
            return batch, heads if self.gather_heads is None else self.gather_heads.heads, n, m
        assert self.weights is not None
        batch, heads, n, m = self.weights.shape
        return batch, heads, n, m


def with_uniform_weights(attention: ObservedCall) -> ObservedCall:
    """The same attention with one head, whose weights are equal on all visible keys: the uniform baseline."""
    if attention.call is None:
        visible = attention.visible[:, None].float()
        return replace(attention, weights=visible / visible.sum(-1, keepdim=True).clamp(min=1))
    call = attention.call
    mask = call.mask
    if mask is not None and not mask.shared_by_heads():
        mask = mask.part(call.whole(), slice(0, 1), 0)
    q, k = (x.new_zeros(x.shape[0], 1, x.shape[2], 1, dtype=call.dtype) for x in (call.q, call.k))
    uniform = replace(call, q=q, k=k, v=k, scale=1.0, softcap=None, biases=(), sinks=None, dropout=None, mask=mask)
    return replace(attention, call=uniform, subtracted=None, gather_heads=None, global_call=None)
