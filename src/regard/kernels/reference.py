"""The specification: attention as its formula, with the N x M matrix in full. Any dtype, any device, any derivative.

Letters: B batch, H query heads, G kv heads, N queries, M keys, D head width of q and k, E head width of v.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from regard.kernels.call import Call
from regard.measures import MeasureRun, Strip

__all__ = ["STAGES", "backward", "forward", "forward_measured", "name", "output", "scores", "weights", "why_not"]

name = "reference"
STAGES = ("scaled", "capped", "biased", "weights")


def why_not(call: Call) -> str | None:
    """It serves every call."""
    return None


def worth(call: Call) -> bool:
    """The last to be asked."""
    return True


def scores(call: Call, stage: str = "biased") -> Tensor:
    """The scores after one of the steps "scaled", "capped", "biased" (with the mask's -inf): (B, H, N, M)."""
    q, k = call.q.to(call.dtype), call.k.to(call.dtype)
    s = (_by_group(q, k.mT) if call.mask is None else _meet(q, k)) * call.scale
    if stage == "scaled":
        return s
    if call.softcap is not None:
        s = call.softcap * torch.tanh(s / call.softcap)
    if stage == "capped":
        return s
    tile = call.whole()
    visible = None if call.mask is None else call.mask.block(tile)
    for bias in call.biases:
        if bias.changes_scores and visible is not None:  # a hidden score gets no gradient, where 0 * NaN would be one
            s = torch.where(visible, s, s.detach())
        s = bias.apply_to(s, tile)
    return s if visible is None else s.masked_fill(~visible, float("-inf"))


def weights(call: Call) -> tuple[Tensor, Tensor]:
    """The weights (B, H, N, M) before dropout, and the log-sum-exp of each row (B, H, N)."""
    s = scores(call)
    if call.sinks is not None:  # a sink is one more key that every query sees and that holds no value
        sink = call.sinks.to(s.dtype)[:, :, None, None].expand(*s.shape[:3], 1)
        s = torch.cat([s, sink], dim=-1)
    # A row that may see nothing has weights 0 and lse -inf. Its scores are set to 0 on the way, for softmax would
    # make NaN of them, in the gradient too.
    empty = s.detach().isneginf().all(-1, keepdim=True)
    s = s.masked_fill(empty, 0.0)
    lse = s.logsumexp(-1).masked_fill(empty.squeeze(-1), float("-inf"))
    p = s.softmax(-1).masked_fill(empty, 0.0)
    p = p[..., :-1] if call.sinks is not None else p
    if call.mask is not None:  # (0 already, but for rows that a NaN reached)
        p = p.masked_fill(~call.mask.block(call.whole()), 0.0)
    return p, lse


def forward(call: Call) -> tuple[Tensor, Tensor]:
    """Output (B, H, N, E) and log-sum-exp (B, H, N)."""
    p, lse = weights(call)
    return _values(call, p), lse


def backward(call: Call, out: Tensor, lse: Tensor, d_out: Tensor, wanted: list[bool]) -> list[Tensor]:
    """The wanted gradients of `call.learned()`: dS = P * (dO V^T - rowsum(dO * O)), where P = exp(S - lse)."""
    assert call.sinks is None, "a sink enters once, where all keys have been merged"
    learned = [x.detach().requires_grad_(want) for x, want in zip(call.learned(), wanted, strict=True)]
    call = call.with_learned(learned)
    d_out, empty = d_out.to(call.dtype), lse.isneginf()[..., None]
    with torch.enable_grad():
        s = scores(call)
        p = (s.detach() - lse.masked_fill(empty[..., 0], 0.0)[..., None]).exp().masked_fill(empty, 0.0)
        p = p.requires_grad_()
        values = _values(replace(call, q=call.q.to(call.dtype)), p)  # in the dtype that sums are computed in
        delta = (out.to(call.dtype) * d_out).sum(-1, keepdim=True)
        grads = [x for x, want in zip(learned, wanted, strict=True) if want]
        d_p, *direct = torch.autograd.grad(values, [p, *grads], d_out, allow_unused=True)
        through = torch.autograd.grad(s, grads, p.detach() * (d_p - delta), allow_unused=True)
    both = zip(grads, direct, through, strict=True)
    return [sum((term for term in parts if term is not None), torch.zeros_like(x)) for x, *parts in both]


def output(call: Call) -> Tensor:
    """(B, H, N, E)"""
    if call.mask is None and not call.biases and call.sinks is None:  # nothing is hidden: plain softmax will do
        return _values(call, scores(call).softmax(-1))
    return forward(call)[0]


def forward_measured(call: Call, measuring: MeasureRun, *, output: bool = True) -> tuple[Tensor | None, Tensor]:
    """The same, the weights shown to some measures as one strip."""
    p, lse = weights(call)
    batch, heads, n, m = call.shape
    if m and n:
        everything = (slice(0, batch), slice(0, heads), slice(0, n), [slice(0, m)])
        measuring.add(Strip(measuring.plane, *everything, weights=p, mass=p.sum(-1)))
    return (_values(call, p) if output else None), lse


def _values(call: Call, p: Tensor) -> Tensor:
    """Dropout, and the values by their weights: (B, H, N, E)."""
    if call.dropout is not None:
        n, m = call.shape[2:]
        p = p * call.dropout.block(slice(None), slice(None), slice(0, n), slice(0, m), p.dtype) * call.dropout.kept
    v = call.v.to(p.dtype)
    if call.mask is None:
        return _by_group(p, v).to(call.q.dtype)
    return weigh_visible(p, v, call.mask.block(call.whole()), _by_group).to(call.q.dtype)


def weigh_visible(p: Tensor, v: Tensor, visible: Tensor, product: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """p v over the visible pairs alone. A hidden value that is NaN or inf does not count, where 0 * NaN would reach
    every row; a visible one does, as it would without a mask: p inf is inf or, where p has come to 0, NaN."""
    broken = ~v.isfinite()
    out = product(p, v.masked_fill(broken, 0.0))
    reached = product(visible.expand(p.shape).to(p.dtype), broken.to(p.dtype))  # how many there are
    signs = product((p > 0).to(p.dtype), (v == float("inf")).to(p.dtype) - (v == float("-inf")).to(p.dtype))
    odd = torch.full_like(out, float("nan")).masked_fill(signs == reached, float("inf"))
    odd = odd.masked_fill(signs == -reached, float("-inf")).masked_fill(reached == 0, 0.0)
    return out + odd.detach() * p.sum(-1, keepdim=True)  # by way of p, so that a gradient of NaN says it, too


def _meet(q: Tensor, k: Tensor) -> Tensor:
    """q k^T, where a key that holds NaN or inf passes none of it to the gradient of queries that may not see it."""
    broken = ~k.isfinite()
    s = _by_group(q, k.masked_fill(broken, 0.0).mT)
    columns = broken.any(-1)[:, :, None].repeat_interleave(q.shape[1] // k.shape[1], 1)  # (B, H, 1, M)
    return torch.where(columns, _by_group(q.detach(), k.detach().mT), s)


def _by_group(a: Tensor, b: Tensor) -> Tensor:
    """a (B, H, N, X) @ b (B, G, X, Y) -> (B, H, N, Y): query head i meets kv head i // (H // G); b is not expanded."""
    batch, heads, rows, inner = a.shape
    groups = b.shape[1]
    if heads == groups:
        return a @ b
    a = a.reshape(batch, groups, heads // groups * rows, inner)
    return (a @ b).reshape(batch, heads, rows, b.shape[-1])
