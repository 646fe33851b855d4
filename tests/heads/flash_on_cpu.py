"""Shared by tests: flash attention of transformers, on a CPU. Its own code prepares the call (unpads, packs, decides on
causality and windows); in the place of the kernels stand two functions that compute what those are documented to: each
text alone, causal and windowed from the bottom right.

`Flash` is an attention function as `AttentionInterface` takes it, which remembers the exact weights of each call: the
same attention again on values that are columns of the identity.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from transformers import modeling_flash_attention_utils as utils
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.masking_utils import AttentionMaskInterface, flash_attention_mask
from transformers.modeling_utils import AttentionInterface

NAME = "lengths_on_cpu"  # without "flash": transformers looks for packages of that name


def dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    causal: bool,
    window: tuple[int, int],
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """One text: q (n, H, D), k and v (m, G, D)."""
    n, m, shared = q.shape[0], k.shape[0], q.shape[1] // k.shape[1]
    if not m:
        return torch.zeros_like(q)
    k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
    scores = torch.einsum("nhd,mhd->hnm", q, k) * (q.shape[2] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    ahead = torch.arange(m)[None] - (torch.arange(n)[:, None] + m - n)
    hidden = torch.zeros(n, m, dtype=torch.bool)
    left, right = window[0], 0 if causal else window[1]
    if right >= 0:
        hidden |= ahead > right
    if left >= 0:
        hidden |= ahead < -left
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(-1, 1, 1).expand(-1, n, 1).to(scores.dtype)], -1)
    weights = scores.softmax(-1).nan_to_num(0.0)[..., :m]
    return torch.einsum("hnm,mhd->nhd", weights, v)


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float | None = None,
    s_aux: Tensor | None = None,
) -> Tensor:
    options = (softmax_scale, causal, window_size, softcap, s_aux)
    return torch.stack([dense(*one, *options) for one in zip(q, k, v, strict=True)])


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float | None = None,
    s_aux: Tensor | None = None,
) -> Tensor:
    out = torch.zeros(*q.shape[:2], v.shape[2], dtype=v.dtype)
    for i in range(len(cu_seqlens_q) - 1):
        own, keys = slice(*cu_seqlens_q[i : i + 2].tolist()), slice(*cu_seqlens_k[i : i + 2].tolist())
        out[own] = dense(q[own], k[keys], v[keys], softmax_scale, causal, window_size, softcap, s_aux)
    return out


def _functions(*_: Any, **__: Any) -> Any:
    process = utils._lazy_define_process_function(flash_attn_varlen_func)
    return (flash_attn_func, flash_attn_varlen_func, None, utils._pad_input, utils._unpad_input), (process, process)


class Flash:
    """An attention function of transformers; `weights` are those of all its calls, (B, H, N, M) each."""

    def __init__(self) -> None:
        self.weights: list[tuple[nn.Module, Tensor]] = []

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, None]:
        assert mask is None or mask.dim() == 2
        with mock.patch.object(utils, "lazy_import_flash_attention", _functions):
            batch, groups, m, _ = key.shape
            columns = torch.eye(m, dtype=value.dtype).expand(batch, groups, m, m).split(query.shape[-1], -1)
            with torch.no_grad():
                parts = [flash_attention_forward(module, query, key, c, mask, **options)[0] for c in columns]
            self.weights.append((module, torch.cat(parts, -1).transpose(1, 2)))  # (B, H, N, M)
            return flash_attention_forward(module, query, key, value, mask, **options)


@contextmanager
def flash_on_cpu(model: Any, function: Any = None, masks: Any = flash_attention_mask) -> Iterator[Any]:
    """A model with flash attention on a CPU, within a block. `masks=None`: no function for its masks is registered."""
    function = Flash() if function is None else function
    AttentionInterface.register(NAME, function)
    if masks is not None:
        AttentionMaskInterface.register(NAME, masks)
    before = model.config._attn_implementation
    try:
        model.set_attn_implementation(NAME)
        yield function
    finally:
        model.set_attn_implementation(before)
        AttentionInterface._global_mapping.pop(NAME)
        AttentionMaskInterface._global_mapping.pop(NAME, None)
