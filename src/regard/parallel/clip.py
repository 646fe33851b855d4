"""Gradients clipped by their norm over all parameters, where some are sharded over processes and others are not."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from regard.errors import bad_value

__all__ = ["clip_grad_norm_"]


@torch.no_grad()
def clip_grad_norm_(parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor:
    """As `torch.nn.utils.clip_grad_norm_`, which refuses a mixture of plain tensors and DTensors: a model of which
    `shard_heads` sharded some weights. The norm is that of the whole gradients, the same on every rank.

    >>> weight = torch.nn.Parameter(torch.ones(4))
    >>> weight.grad = torch.full((4,), 2.0)
    >>> clip_grad_norm_([weight], 1.0), weight.grad
    (tensor(4.), tensor([0.5000, 0.5000, 0.5000, 0.5000]))
    """
    if not max_norm > 0:
        raise bad_value("max_norm", expected="above 0", received=max_norm)
    gradients = [p.grad for p in ([parameters] if isinstance(parameters, Tensor) else parameters) if p.grad is not None]
    if not gradients:
        return torch.zeros((), device="cpu")
    norms = [torch.linalg.vector_norm(gradient, norm_type) for gradient in gradients]
    whole = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    total = torch.linalg.vector_norm(torch.stack([norm.to(whole[0].device) for norm in whole]), norm_type)
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(factor.to(gradient.device).item())
    return total
