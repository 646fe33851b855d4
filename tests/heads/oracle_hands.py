"""Shared by the tests of heads: attention as people write it, in modules which say their own weights when asked."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

B, H, N, M, D, E = 2, 3, 7, 11, 5, 4
W = H * D


def causal() -> Tensor:
    """A causal mask (N, N), True = may attend, on the device of the tests."""
    return torch.ones(N, N, dtype=torch.bool).tril()


Weights = Callable[[], Tensor]  # (B, H, N, M), computed when asked for only: a watch gets no hint from it
Core = Callable[["Hand", Tensor, Tensor, Tensor], tuple[Tensor, Weights]]


class Hand(nn.Module):
    """Projections around a core, which takes (B, N, H, D), (B, M, H, D), (B, M, H, E) and gives (B, N, H, E)."""

    def __init__(self, core: Core, *, heads: int = H, dropout: float = 0.0) -> None:
        super().__init__()
        self.core, self.heads = core, heads
        self.q, self.k = nn.Linear(W, heads * D), nn.Linear(W, heads * D)
        self.v, self.o = nn.Linear(W, heads * E), nn.Linear(heads * E, W)
        self.softmax, self.dropout = nn.Softmax(dim=-1), nn.Dropout(dropout)
        self.note = False
        self.dense: Tensor | None = None

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        y = x if memory is None else memory
        q, k, v = (p(z).unflatten(-1, (self.heads, -1)) for p, z in ((self.q, x), (self.k, y), (self.v, y)))
        out, weights = self.core(self, q, k, v)
        if self.note:
            self.dense = weights().detach()
        return self.o(out.flatten(-2))


class Model(nn.Module):
    """A layer with something around it, so that it has a name."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.norm, self.layer, self.head = nn.LayerNorm(W), layer, nn.Linear(W, 2)

    def forward(self, x: Tensor, *args: Any, **options: Any) -> Tensor:
        out = self.layer(self.norm(x), *args, **options)
        return self.head(out[0] if isinstance(out, tuple) else out)


def made(layer: nn.Module, seed: int = 3) -> Model:
    """In float64 and evaluation, with weights large enough that heads differ."""
    model = Model(layer).double().eval()
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.data = 0.6 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return model


def noise(*shape: int, seed: int = 5) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# The cores


def _scores(q: Tensor, k: Tensor) -> Tensor:
    return q.transpose(1, 2) @ k.transpose(1, 2).transpose(-2, -1) / math.sqrt(D)  # (B, H, N, M)


def _times(p: Tensor, v: Tensor) -> Tensor:
    return (p @ v.transpose(1, 2)).transpose(1, 2)  # (B, N, H, E)


def by_operator(hand: Hand, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Weights]:
    p = _scores(q, k).softmax(-1)
    return _times(p, v), lambda: p


def by_matmul(hand: Hand, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Weights]:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    p = torch.softmax(torch.matmul(q * D**-0.5, k.mT), dim=3)
    return torch.matmul(p, v).permute(0, 2, 1, 3).contiguous(), lambda: p


def by_einsum(hand: Hand, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Weights]:
    p = F.softmax(torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(D), dim=-1)
    return torch.einsum("bhqk,bkhd->bqhd", p, v), lambda: p


def by_einsum_queries_first(hand: Hand, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Weights]:
    p = F.softmax(torch.einsum("bqhd,bkhd->bqhk", q, k) / math.sqrt(D), dim=-1)  # (B, N, H, M)
    return torch.einsum("bqhk,bkhd->bqhd", p, v), lambda: p.transpose(1, 2)


def by_einsum_keys_first(hand: Hand, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Weights]:
    p = F.softmax(torch.einsum("bqhd,bkhd->bhkq", q, k) / math.sqrt(D), dim=2)  # (B, H, M, N)
    return torch.einsum("bhkq,bkhd->bqhd", p, v), lambda: p.mT


def by_softmax_module(hand: Hand, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Weights]:
    p = hand.softmax(_scores(q, k))
    return _times(hand.dropout(p), v), lambda: p


def by_functional_dropout(hand: Hand, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Weights]:
    p = F.softmax(_scores(q, k), -1)
    return _times(F.dropout(p, hand.dropout.p, training=hand.training), v), lambda: p


def by_log_softmax(hand: Hand, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Weights]:
    p = _scores(q, k).log_softmax(-1).exp()
    return _times(p, v), lambda: p


def by_float32_softmax(hand: Hand, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Weights]:
    p = F.softmax(_scores(q, k), dim=-1, dtype=torch.float32).to(v.dtype)
    return _times(p, v), lambda: p


def by_float_and_back(hand: Hand, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Weights]:
    p = torch.softmax(_scores(q, k).float(), -1).type_as(v)
    return _times(p, v), lambda: p


def by_steps_in_place(hand: Hand, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Weights]:
    s = torch.matmul(q.transpose(1, 2), k.permute(0, 2, 3, 1))
    s /= math.sqrt(D)
    p = nn.functional.softmax(s, dim=-1)
    return _times(p, v), lambda: p


def heads_first(hand: Hand, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Weights]:
    q, k, v = (torch.stack(x.unbind(2)) for x in (q, k, v))  # (H, B, N, D)
    p = torch.softmax(q @ k.transpose(2, 3) / math.sqrt(D), -1)
    return torch.stack((p @ v).unbind(0), 2), lambda: p.transpose(0, 1)


def heads_times_batch(hand: Hand, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Weights]:
    """As in "Attention is all you need" in PyTorch (jadore801120): heads outside, then the batch."""
    b, h = q.shape[0], hand.heads
    q, k, v = (x.permute(2, 0, 1, 3).contiguous().view(-1, x.shape[1], x.shape[3]) for x in (q, k, v))  # (H * B, N, D)
    p = hand.softmax(torch.bmm(q, k.transpose(1, 2)) / math.sqrt(D))
    out = torch.bmm(p, v).view(h, b, q.shape[1], E).permute(1, 2, 0, 3)
    return out, lambda: p.view(h, b, *p.shape[1:]).transpose(0, 1)


def heads_by_split(hand: Hand, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Weights]:
    """As in Kyubyong's transformer: split the width, join along the batch."""
    b, h = q.shape[0], hand.heads
    q, k, v = (torch.cat(x.flatten(2).split(x.shape[3], 2), 0) for x in (q, k, v))  # (H * B, N, D)
    p = torch.softmax(torch.matmul(q, k.permute(0, 2, 1)) * D**-0.5, -1)
    out = torch.stack(torch.matmul(p, v).split(b, 0), 2)
    return out, lambda: p.view(h, b, *p.shape[1:]).transpose(0, 1)


def batch_times_heads(hand: Hand, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Weights]:
    b, h = q.shape[0], hand.heads
    q, k, v = (x.transpose(1, 2).reshape(b * h, x.shape[1], x.shape[3]) for x in (q, k, v))
    p = F.softmax(torch.bmm(q, k.transpose(1, 2)) * D**-0.5, dim=-1)
    return torch.bmm(p, v).view(b, h, -1, E).transpose(1, 2), lambda: p.unflatten(0, (b, h))


def by_baddbmm(hand: Hand, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Weights]:
    b, h = q.shape[0], hand.heads
    q, k, v = (x.transpose(1, 2).reshape(b * h, x.shape[1], x.shape[3]) for x in (q, k, v))
    bias = noise(b * h, q.shape[1], k.shape[1])
    p = torch.baddbmm(bias, q, k.transpose(1, 2), alpha=D**-0.5).softmax(-1)
    return torch.bmm(p, v).view(b, h, -1, E).transpose(1, 2), lambda: p.unflatten(0, (b, h))


def by_other_spellings(hand: Hand, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Weights]:
    """`torch.unflatten` for `Tensor.unflatten`, `Tensor.multiply` for `*`."""
    b, h = q.shape[0], hand.heads
    q, k, v = (x.transpose(1, 2).reshape(b * h, x.shape[1], x.shape[3]) for x in (q, k, v))
    p = torch.unflatten(F.softmax(torch.bmm(q, k.transpose(1, 2)) * D**-0.5, dim=-1), 0, (b, h))
    p = p.multiply(torch.ones_like(p))
    return torch.matmul(p, torch.unflatten(v, 0, (b, h))).transpose(1, 2), lambda: p


def one_key_head(hand: Hand, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Weights]:
    k, v = k[:, :, :1].transpose(1, 2), v[:, :, :1].transpose(1, 2)  # (B, 1, M, D)
    p = torch.softmax(q.transpose(1, 2) @ k.mT * D**-0.5, -1)
    return (p @ v).transpose(1, 2), lambda: p


def a_head_after_another(hand: Hand, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Weights]:
    """A loop over heads within one forward: three calls of the same module, of one head each."""
    ps = [torch.softmax(q[:, :, h] @ k[:, :, h].mT * D**-0.5, -1) for h in range(hand.heads)]
    return torch.stack([p @ v[:, :, h] for h, p in enumerate(ps)], 2), lambda: torch.stack(ps, 1)


def masked_by_sum(hand: Hand, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Weights]:
    p = F.softmax(_scores(q, k) + torch.zeros(N, N, dtype=q.dtype).masked_fill(~causal(), -math.inf), dim=-1)
    return _times(p, v), lambda: p


def masked_by_filling(hand: Hand, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Weights]:
    p = F.softmax(_scores(q, k).masked_fill(~causal(), -1e9), dim=-1)
    return _times(p, v), lambda: p


def masked_with_a_blind_row(hand: Hand, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Weights]:
    """The first query sees nothing, and NaN is mended after the softmax."""
    p = F.softmax(_scores(q, k).masked_fill(~causal().tril(-1), -math.inf), dim=-1).nan_to_num(0.0)
    return _times(p, v), lambda: p


def masked_after(hand: Hand, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Weights]:
    """Masked before and once more after the softmax, where a row may see nothing."""
    p = F.softmax(_scores(q, k).masked_fill(~causal(), -1e9), dim=-1).masked_fill(~causal(), 0.0)
    return _times(p, v), lambda: p


CORES = [
    by_operator,
    by_matmul,
    by_einsum,
    by_einsum_queries_first,
    by_einsum_keys_first,
    by_softmax_module,
    by_functional_dropout,
    by_log_softmax,
    by_float32_softmax,
    by_float_and_back,
    by_steps_in_place,
    heads_first,
    heads_times_batch,
    heads_by_split,
    batch_times_heads,
    by_baddbmm,
    by_other_spellings,
    one_key_head,
]
MASKED = [masked_by_sum, masked_by_filling, masked_after, masked_with_a_blind_row]


def dense(model: Model, *args: Tensor) -> Tensor:
    """The weights that the module has itself, outside of any watch."""
    model.layer.note = True
    with torch.no_grad():
        model(*args)
    model.layer.note = False
    return model.layer.dense


# Modules of another shape


class Unbatched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(W, 3 * W)

    def heads(self, x: Tensor) -> list[Tensor]:
        return [y.unflatten(-1, (H, D)).transpose(0, 1) for y in self.qkv(x).chunk(3, -1)]  # (H, N, D)

    def weights(self, x: Tensor) -> Tensor:
        q, k, _ = self.heads(x)
        return torch.softmax(q @ k.mT * D**-0.5, -1)[None]

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        return (torch.softmax(q @ k.mT * D**-0.5, -1) @ v).transpose(0, 1).flatten(1)


class Head(nn.Module):
    """One head, as in "Let's build GPT"."""

    def __init__(self) -> None:
        super().__init__()
        self.key, self.query, self.value = (nn.Linear(W, D, bias=False) for _ in range(3))
        self.register_buffer("tril", torch.tril(torch.ones(N, N)))

    def weights(self, x: Tensor) -> Tensor:
        t = x.shape[1]
        wei = self.query(x) @ self.key(x).transpose(-2, -1) * D**-0.5
        return F.softmax(wei.masked_fill(self.tril[:t, :t] == 0, float("-inf")), dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        return self.weights(x) @ self.value(x)


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads, self.proj = nn.ModuleList([Head() for _ in range(H)]), nn.Linear(W, W)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(torch.cat([head(x) for head in self.heads], -1))


class SequenceFirst(nn.Module):
    """Inputs (N, B, W), heads by a view of (N, B * H, D), as fairseq has it."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(W, W) for _ in range(4))

    def weights(self, x: Tensor) -> tuple[Tensor, Tensor]:
        n, b, _ = x.shape
        q, k, v = (p(x).contiguous().view(n, b * H, D).transpose(0, 1) for p in (self.q, self.k, self.v))
        return torch.softmax(torch.bmm(q * D**-0.5, k.transpose(1, 2)), -1), v

    def forward(self, x: Tensor) -> Tensor:
        p, v = self.weights(x)
        return self.o(torch.bmm(p, v).transpose(0, 1).contiguous().view(x.shape))


class Grouped(nn.Module):
    """Query heads in groups, (B, G, R, N, D), against one key head each, (B, G, 1, M, D)."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(W, 6 * D), nn.Linear(W, 3 * D), nn.Linear(W, 3 * D)
        self.o = nn.Linear(6 * D, W)

    def weights(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (3, 2, D)).permute(0, 2, 3, 1, 4)
        k = self.k(x).unflatten(-1, (3, 1, D)).permute(0, 2, 3, 1, 4)
        return torch.softmax(q @ k.mT * D**-0.5, -1)  # (B, 3, 2, N, M)

    def forward(self, x: Tensor) -> Tensor:
        v = self.v(x).unflatten(-1, (3, 1, D)).permute(0, 2, 3, 1, 4)
        return self.o((self.weights(x) @ v).permute(0, 3, 1, 2, 4).flatten(2))


class Fused(nn.Module):
    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__()
        self.options, self.groups = options, 3 if options.get("enable_gqa") else 6
        self.q, self.k, self.v = nn.Linear(W, 6 * D), nn.Linear(W, self.groups * D), nn.Linear(W, self.groups * E)
        self.o = nn.Linear(6 * E, W)

    def heads(self, x: Tensor, y: Tensor) -> list[Tensor]:
        return [
            p(z).unflatten(-1, (g, -1)).transpose(1, 2)
            for p, z, g in ((self.q, x, 6), (self.k, y, self.groups), (self.v, y, self.groups))
        ]

    def weights(self, x: Tensor, y: Tensor) -> Tensor:
        q, k, _ = self.heads(x, y)
        s = q @ k.repeat_interleave(6 // self.groups, 1).mT * self.options.get("scale", D**-0.5)
        mask = self.options.get("attn_mask")
        if self.options.get("is_causal"):
            mask = torch.ones(s.shape[-2:], dtype=torch.bool).tril()  # as PyTorch defines it: from the first key
        if mask is not None:
            s = s.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else s + mask
        return s.softmax(-1).nan_to_num(0.0)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.o(F.scaled_dot_product_attention(*self.heads(x, y), **self.options).transpose(1, 2).flatten(2))


class WithMemory(nn.Module):
    """A model of its own: an inner layer that gets what its model gets, unchanged."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *args: Any, **options: Any) -> Any:
        return self.layer(*args, **options)


def drawn(module: nn.Module, seed: int = 3) -> nn.Module:
    """As `made`, without anything around it."""
    module = module.double().eval()
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.data = 0.6 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return module


# With something in them that is not attention


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out = drawn(Hand(by_operator)), nn.Linear(W, 7)

    def forward(self, x: Tensor) -> Tensor:
        return F.softmax(self.out(self.layer(x)), dim=-1)


class Gated(nn.Module):
    """Experts, weighted by a softmax, each multiplied by its own weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.gate = drawn(Hand(by_operator)), nn.Linear(W, 3)
        self.experts = nn.ModuleList([nn.Linear(W, W) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        shares = self.gate(x).softmax(-1)  # (B, N, 3)
        return sum(expert(x) * shares[..., i : i + 1] for i, expert in enumerate(self.experts))


class Routed(Gated):
    """The same, where the two best experts are chosen."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        shares, chosen = torch.softmax(self.gate(x), -1).topk(2, -1)
        outs = torch.stack([expert(x) for expert in self.experts], -2)  # (B, N, 3, W)
        return (outs.gather(-2, chosen[..., None].expand(*chosen.shape, W)) * shares[..., None]).sum(-2)


class Scored(Classifier):
    """A loss at the end, and a matrix product of no softmax."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.out(self.layer(x))
        gram = y @ y.mT
        return F.cross_entropy(y.flatten(0, 1), torch.zeros(y.shape[0] * y.shape[1], dtype=torch.long)) + gram.mean()


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.out = nn.Linear(W, W), nn.Linear(W, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.fc(x).relu()).softmax(-1)
