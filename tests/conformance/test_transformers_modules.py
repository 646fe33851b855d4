"""The layer against the attention modules of transformers: output, weights, gradients, cached decoding, loading and
export, and `watch`. In float32, for their norms and softmax are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from conformance.transformers_modules import MODULES, SIZES, Module, rope_by_type, rotary
from torch import Tensor, nn
from transformers import DynamicCache

import regard
from regard import KVCache, MultiHeadAttention, layouts
from regard.layer import KeyValues, Norm
from regard.layouts.convert import LAYOUTS, _with_pairs
from regard.masks import Causal, Window

pytestmark = pytest.mark.slow
B, N = 2, 11
every = pytest.mark.parametrize("name", MODULES)


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def noise(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def positions_of(case: Module) -> Tensor:
    """(B, N), or (B, N, A): a text, a picture of 2 x 3 patches, and text after it, which goes on at the largest; or
    (N, A) in a vision tower."""
    if case.axes == 1:
        return torch.arange(N).expand(B, N)
    if case.axes == 2 and case.source[0] == "llama4":  # columns and rows from 1 on, and the class token
        grid = torch.stack([torch.arange(9) % 3, torch.arange(9) // 3], -1) + 1
        return torch.cat([grid, torch.zeros(1, 2, dtype=torch.long)])
    if case.axes == 2:  # patches of a picture: rows and columns
        return torch.stack([torch.arange(N) // 4, torch.arange(N) % 4], -1)
    picture = torch.cartesian_prod(torch.tensor([2]), torch.tensor([2, 3]), torch.tensor([2, 3, 4]))
    text = [torch.arange(start, end)[:, None].expand(-1, 3) for start, end in ((0, 2), (5, 8))]
    one = torch.cat([text[0], picture, text[1]])
    return torch.stack([one, one + torch.tensor([1, 0, 2])])


def load(case: Module, module: nn.Module, **more: Any) -> MultiHeadAttention:
    layout = "auto" if case.found else case.layout
    return layouts.load(module.state_dict(), case.heads, layout=layout, **case.options(), **more)


def our_positions(case: Module, positions: Tensor) -> Tensor | None:
    return None if case.axes == 1 else positions


def close_gradient(ours: Tensor | None, theirs: Tensor | None, what: str) -> None:
    """To rounding: in units of the largest of them, for these sums have terms of both signs."""
    assert ours is not None, what
    assert theirs is not None, what
    assert ours.shape == theirs.shape, what
    assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max().clamp(min=1.0), what


def check_gradients(layout: str, ours: MultiHeadAttention, theirs: nn.Module) -> None:
    """Of every parameter, by their names."""
    gradients = {key: parameter.grad for key, parameter in ours.named_parameters() if parameter.grad is not None}
    chosen = LAYOUTS[layout]
    heads = (ours.num_heads, ours.num_kv_heads)
    gradients = _with_pairs(gradients, *heads, ours.position_encoding, None, chosen.pairs)
    renamed = chosen.from_canonical(gradients, ours.num_heads)
    expected = {key: parameter.grad for key, parameter in theirs.named_parameters()}
    assert renamed.keys() == expected.keys()
    for key, gradient in expected.items():
        close_gradient(renamed[key], gradient, key)


@every
def test_output_weights_and_gradients(name: str) -> None:
    case = MODULES[name]
    theirs = case.make()
    ours = load(case, theirs)
    positions = positions_of(case)
    n = positions.shape[-2] if case.axes > 1 else N
    x = noise(case.batch, n, ours.query_dim)
    mine, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    wanted, weights = case.run(theirs, other, positions, case.allowed(0, n), **case_extra(case, positions))
    mask = case.our_mask(0, n)
    out, our_weights = ours(mine, mask=mask, positions=our_positions(case, positions), need_weights=True)
    close(out, wanted)
    if weights is not None:
        close(our_weights, weights)
    direction = noise(*wanted.shape, seed=5)
    (wanted * direction).sum().backward()
    (out * direction).sum().backward()
    close_gradient(mine.grad, other.grad, "x")
    check_gradients(case.layout, ours, theirs)


def case_extra(case: Module, positions: Tensor) -> dict[str, Any]:
    return {"position_ids": positions} if "ministral3" in case.source else {}


@pytest.mark.parametrize("name", [name for name, case in MODULES.items() if case.causal])
@torch.no_grad()
def test_cached_decoding(name: str) -> None:
    case = MODULES[name]
    theirs = case.make()
    ours = load(case, theirs).eval()
    positions = positions_of(case)
    n = positions.shape[-2] if case.axes > 1 else N
    x = noise(case.batch, n, ours.query_dim)
    our_cache, their_cache, first = KVCache(), DynamicCache(), 0
    for tokens in (5, 1, 3, 1, 1):
        part = slice(first, first + tokens)
        extra = case_extra(case, positions[:, part])
        wanted, _ = case.run(theirs, x[:, part], positions[:, part], case.allowed(first, tokens), their_cache, **extra)
        mask, at = case.our_mask(first, tokens), our_positions(case, positions[:, part])
        close(ours(x[:, part], mask=mask, positions=at, cache=our_cache), wanted)
        first += tokens


@every
def test_weights_come_back_bit_for_bit(name: str) -> None:
    case = MODULES[name]
    state = case.make().state_dict()
    assert LAYOUTS[case.layout].named_only is not case.found
    ours = layouts.load(state, case.heads, layout="auto" if case.found else case.layout, **case.options())
    exported = layouts.export(ours, case.layout)
    torch.testing.assert_close(exported, dict(state), rtol=0, atol=0)


@every
@torch.no_grad()
def test_watched(name: str) -> None:
    case = MODULES[name]
    theirs = case.make()
    ours = load(case, theirs).eval()
    positions = positions_of(case)
    n = positions.shape[-2] if case.axes > 1 else N
    x = noise(case.batch, n, ours.query_dim)
    _, weights = case.run(theirs, x, positions, case.allowed(0, n), **case_extra(case, positions))
    options = {"mask": case.our_mask(0, n), "positions": our_positions(case, positions)}
    plain = ours(x, **options)
    with regard.watch(ours, keep="qkv") as seen:
        out = ours(x, **options)
    close(out, plain)
    close(seen[0].weights(), ours(x, **options, need_weights=True)[1] if weights is None else weights)
    bias = 0 if ours.out_proj.bias is None else ours.out_proj.bias
    close(seen[0].projected().sum(1) + bias, plain)  # what the heads add, the gate included


SHARING = {**SIZES, **rope_by_type(), "num_hidden_layers": 4, "num_kv_shared_layers": 2, "sliding_window": 3}
GEMMA_3N = Module(
    ("gemma3n", "Gemma3nTextAttention", "Gemma3nTextConfig"),
    {**SHARING, "layer_types": ["full_attention", "sliding_attention"] * 2},
    "gemma3n",
    lambda: {**rotary(), "qk_norm": Norm(), "v_norm": Norm(weight="none")},
    "Gemma3nRotaryEmbedding",
    found=False,
)


def gemma_3n(kind: int) -> tuple[Module, list[nn.Module], list[MultiHeadAttention]]:
    """The layer that keeps its keys and values, and the one that uses them: theirs, and ours."""
    case = replace(GEMMA_3N, kind=["full_attention", "sliding_attention"][kind], mask=Window(3) if kind else Causal())
    settings = case.settings()
    theirs = [case.make(settings, kind), case.make(settings, kind + 2)]
    own = layouts.load(theirs[0].state_dict(), case.heads, layout="gemma3n", **case.options())
    sharing = layouts.load(theirs[1].state_dict(), case.heads, num_kv_heads=own.num_kv_heads, **rotary())
    assert layouts.export(own, "gemma3n").keys() == theirs[0].state_dict().keys()
    for layer, layout, module in zip((own, sharing), ("gemma3n", "gemma3n_shared"), theirs, strict=True):
        torch.testing.assert_close(layouts.export(layer, layout), dict(module.state_dict()), rtol=0, atol=0)
    return case, theirs, [own, sharing]


@pytest.mark.parametrize("kind", [0, 1])
def test_gemma_3n_with_shared_keys_and_values(kind: int) -> None:
    case, theirs, (own, sharing) = gemma_3n(kind)
    positions, x = torch.arange(N).expand(B, N), noise(B, N, own.query_dim)
    mine, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    kept, shared, allowed = {}, KeyValues(), case.allowed(0, N)
    wanted, _ = case.run(theirs[0], other, positions, allowed, shared_kv_states=kept)
    wanted, weights = case.run(theirs[1], wanted, positions, allowed, shared_kv_states=kept)
    out = own(mine, mask=case.mask, share=shared)
    out, our_weights = sharing(out, mask=case.mask, source=shared, need_weights=True)
    close(out, wanted)
    close(our_weights, weights)
    (wanted * x).sum().backward()
    (out * x).sum().backward()
    close_gradient(mine.grad, other.grad, "x")
    check_gradients("gemma3n", own, theirs[0])
    check_gradients("gemma3n_shared", sharing, theirs[1])


@pytest.mark.parametrize("kind", [0, 1])
@pytest.mark.parametrize("through", ["cache", "KeyValues"])
@torch.no_grad()
def test_gemma_3n_decodes_with_one_cache_for_two_layers(kind: int, through: str) -> None:
    case, theirs, (own, sharing) = gemma_3n(kind)
    positions, x = torch.arange(N).expand(B, N), noise(B, N, own.query_dim)
    our_cache, their_cache, first = KVCache(), DynamicCache(), 0
    for tokens in (5, 1, 3, 1, 1):
        part, allowed, kept, shared = slice(first, first + tokens), case.allowed(first, tokens), {}, KeyValues()
        at = positions[:, part]
        wanted, _ = case.run(theirs[0], x[:, part], at, allowed, their_cache, shared_kv_states=kept)
        wanted, _ = case.run(theirs[1], wanted, at, allowed, their_cache, shared_kv_states=kept)
        out = own(x[:, part], mask=case.mask, cache=our_cache, share=shared)
        close(sharing(out, mask=case.mask, source=our_cache if through == "cache" else shared), wanted)
        first += tokens


@torch.no_grad()
def test_gemma_3n_watched() -> None:
    case, theirs, ours = gemma_3n(0)
    positions, x, kept, shared = torch.arange(N).expand(B, N), noise(B, N, ours[0].query_dim), {}, KeyValues()
    allowed, model = case.allowed(0, N), nn.ModuleList(ours)
    wanted, first = case.run(theirs[0], x, positions, allowed, shared_kv_states=kept)
    _, second = case.run(theirs[1], wanted, positions, allowed, shared_kv_states=kept)
    with regard.watch(model, keep="qk") as seen:
        model[1](model[0](x, mask=case.mask, share=shared), mask=case.mask, source=shared)
    close(seen[0].weights(), first)
    close(seen[1].weights(), second)
