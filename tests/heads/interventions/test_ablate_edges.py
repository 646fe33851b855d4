"""`ablate` with mode="hide" against dense attention with masked scores, on every way a model computes attention."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from heads import hf_models
from heads.flash_on_cpu import flash_on_cpu
from heads.interventions.test_ablate import (
    Case,
    fused,
    hf,
    projection_of,
    prompts,
    regard_model,
    same,
    scores,
    seen_of,
    swapped_in,
)
from heads.oracle_hands import (
    CORES,
    MASKED,
    B,
    D,
    Grouped,
    H,
    Hand,
    M,
    N,
    W,
    WithMemory,
    by_operator,
    causal,
    dense,
    drawn,
    made,
    noise,
)
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import regard
from regard import MultiHeadAttention
from regard.heads import ablate, importance
from regard.heads.capture.flex import from_flex
from regard.heads.capture.observed import ObservedCall
from regard.heads.interventions import recompute
from regard.masks import Causal, Keep, Padding, Window
from regard.models import Decoder


def masked(weights: Tensor, hidden: Tensor, sinks: bool = False) -> Tensor:
    """Weights as if what is hidden had been masked before the softmax; a row with nothing left is 0."""
    kept = weights.masked_fill(hidden, 0.0)
    left = kept.sum(-1, keepdim=True) + (1 - weights.sum(-1, keepdim=True)) * sinks
    return (kept / left).nan_to_num(0.0)


def hidden(n: int, m: int, queries: list[int], keys: list[int]) -> Tensor:
    mask = torch.zeros(n, m, dtype=torch.bool)
    mask[torch.tensor(queries)[:, None], torch.tensor(keys)] = True
    return mask


def check(one: Case, layer: str, weights: Tensor, values: Tensor, atol: float, sinks: bool = False) -> None:
    """Heads 0 and 2 of a layer without the edges from three queries to three keys, against dense weights."""
    n, m = weights.shape[-2:]
    queries, keys = [2, 4, n - 1], [0, 1, 3]
    right_heads = (masked(weights, hidden(n, m, queries, keys), sinks) @ values).transpose(1, 2)  # (B, N, H, E)
    handle = swapped_in(*projection_of(one, layer), [0, 2], lambda x: right_heads.to(x))
    right = one.run()
    handle.remove()
    plain = one.run()
    assert (right - plain).abs().max() > 1e-3 * plain.abs().max(), "edges that carry nothing prove nothing"
    as_bools = torch.zeros(n, dtype=torch.bool)
    as_bools[queries] = True
    for choice in (
        {"queries": queries, "keys": keys},
        {"queries": as_bools, "keys": torch.tensor([-m, 1, 3])},
        {"edges": [(2, keys), ([4, -1], slice(0, 2)), (4, 3), (n - 1, 3)]},
    ):
        with ablate(one.model, {layer: [0, 2]}, mode="hide", **choice):  # type: ignore[arg-type]
            got = one.run()
        torch.testing.assert_close(got, right, rtol=0.0, atol=atol * float(right.abs().max()))
    assert torch.equal(one.run(), plain)


FAMILIES = ["bert", "gpt2", "llama", "mistral", "gemma2", "gpt_oss", "bart", "vit", "qwen3", "t5", "bloom", "deberta"]
WAYS = [(family, way) for family in FAMILIES for way in ("eager", None) if way or hf_models.ZOO[family].sdpa]


@pytest.mark.parametrize("family,way", WAYS)
@torch.no_grad()
def test_transformers(family: str, way: str | None) -> None:
    """The weights and values are those that the eager model gives out. (Its softmax is in float32.)"""
    one = hf(family, way)
    given = hf_models.inputs(family)
    oracles = hf_models.eager(family, hf_models.model(family, "eager"), given)
    layer = one.layers[-1]  # nothing comes after it but the feed forward
    values = oracles[layer].values
    if values is None:
        values = _values_of(one.model, layer, given, oracles[layer].weights)
    rounding = 1e-5 if family == "gpt_oss" else 1e-6  # (a sink is 1 less the sum of the rest)
    check(one, layer, oracles[layer].weights, values, atol=rounding, sinks=family == "gpt_oss")


def _values_of(model: nn.Module, layer: str, given: dict[str, Any], weights: Tensor) -> Tensor:
    """The values (B, H, M, E) of attention by hand, by a hook on the projection that makes them."""
    module, heads = model.get_submodule(layer), weights.shape[1]
    names = {name for name, _ in module.named_children()}
    caught: list[Tensor] = []
    if "query_key_value" in names:  # BLOOM: (B, M, H, 3, E)
        handle = module.query_key_value.register_forward_hook(
            lambda *a: caught.append(a[2].unflatten(-1, (heads, 3, -1))[..., 2, :])
        )  # type: ignore
    else:
        projection = next(getattr(module, name) for name in ("v", "value_proj", "v_proj") if name in names)
        handle = projection.register_forward_hook(lambda *a: caught.append(a[2].unflatten(-1, (heads, -1))))
    model(**given)
    handle.remove()
    return caught[0].transpose(1, 2)


@pytest.mark.parametrize("core", [*CORES, *MASKED], ids=lambda core: core.__name__)
@torch.no_grad()
def test_by_hand(core: Any) -> None:
    model, x = made(Hand(core)), noise(B, N, W)
    values = model.layer.v(model.norm(x)).unflatten(-1, (H, -1)).transpose(1, 2)
    if core.__name__ == "one_key_head":
        values = values[:, :1].expand(-1, H, -1, -1)
    one = Case(
        model,
        lambda: model(x),
        {"layer": model.layer.o.weight},
        {"layer": lambda w: w.unflatten(1, (H, -1)).movedim(1, 0)},
    )
    rounding = 1e-6 if "float" in core.__name__ else 1e-11
    check(one, "layer", dense(model, x), values, atol=rounding)


@torch.no_grad()
def test_by_hand_in_groups() -> None:
    model, x = made(Grouped()), noise(B, N, W)
    y = model.norm(x)
    values = model.layer.v(y).unflatten(-1, (3, -1)).transpose(1, 2).repeat_interleave(2, 1)
    weights = model.layer.weights(y).flatten(1, 2)
    one = Case(
        model,
        lambda: model(x),
        {"layer": model.layer.o.weight},
        {"layer": lambda w: w.unflatten(1, (6, -1)).movedim(1, 0)},
    )
    check(one, "layer", weights, values, atol=1e-11)


class AfterSoftmax(nn.Module):
    """Masked after the softmax alone, by a product: what is masked stays in the denominator. One kv head for all."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = nn.Linear(W, H * D), nn.Linear(W, D), nn.Linear(W, D), nn.Linear(H * D, W)
        self.cut: Tensor | None = None  # (H, N, N)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (H, D))
        s = torch.einsum("bnhd,bmd->bhnm", q, self.k(x)) * D**-0.5
        s = s if self.cut is None else s.masked_fill(self.cut, -math.inf)
        p = s.softmax(-1) * causal().to(x)
        return self.o(torch.einsum("bhnm,bme->bnhe", p, self.v(x)).flatten(2))


@torch.no_grad()
def test_by_hand_with_a_denominator_of_more_than_is_seen() -> None:
    model, x = made(AfterSoftmax()), noise(B, N, W)
    model.layer.cut = per_head(N, N, H, [2, 4, 6], [0, 1])
    right = model(x)
    model.layer.cut = None
    with ablate(model, {0: HEADS}, mode="hide", queries=[2, 4, 6], keys=[0, 1]):
        same(model(x), right)
    assert (model(x) - right).abs().max() > 1e-3


@pytest.mark.parametrize(
    "options", [{}, {"is_causal": True}, {"enable_gqa": True}, {"attn_mask": noise(N, N)}], ids=str
)
@torch.no_grad()
def test_torchs_function(options: dict[str, Any]) -> None:
    one, x = fused(**options), noise(B, N, W)
    layer, y = one.model.layer, one.model.norm(x)  # type: ignore[attr-defined]
    shared = 6 // layer.groups
    # the model is called with x twice, and only the first is normalised
    values = layer.heads(y, x)[2].repeat_interleave(shared, 1)
    check(one, "layer", layer.weights(y, x), values, atol=1e-11)


def _causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def _linear(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return score - 0.25 * h * (q - k)


class Flex(nn.Module):
    """`flex_attention` of six heads on three kv heads, with `weights` as it is documented."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(W, 6 * D), nn.Linear(W, 3 * D), nn.Linear(W, 3 * D)
        self.o = nn.Linear(6 * D, W)

    def heads(self, x: Tensor) -> list[Tensor]:
        return [p(x).unflatten(-1, (-1, D)).transpose(1, 2) for p in (self.q, self.k, self.v)]

    def weights(self, x: Tensor) -> Tensor:
        q, k, _ = self.heads(x)
        ahead = torch.arange(N)[:, None] - torch.arange(N)
        scores = q @ k.repeat_interleave(2, 1).mT * D**-0.5 - 0.25 * torch.arange(6)[:, None, None] * ahead
        return scores.masked_fill(ahead < 0, -math.inf).softmax(-1)

    def forward(self, x: Tensor) -> Tensor:
        mask = create_block_mask(_causal, None, None, N, N, device="cpu")
        out: Any = flex_attention(*self.heads(x), score_mod=_linear, block_mask=mask, enable_gqa=True)
        return self.o(out.transpose(1, 2).flatten(2))


@pytest.mark.filterwarnings("ignore:(?s)flex_attention called without:UserWarning")
@pytest.mark.filterwarnings("ignore:_compile flag on create_block_mask:DeprecationWarning")
@torch.no_grad()
def test_flex_attention() -> None:
    model, x = made(Flex()), noise(B, N, W)
    y = model.norm(x)
    by_head: Any = {"layer": lambda w: w.unflatten(1, (6, -1)).movedim(1, 0)}
    one = Case(model, lambda: model(x), {"layer": model.layer.o.weight}, by_head)
    values = model.layer.heads(y)[2].repeat_interleave(2, 1)
    check(one, "layer", model.layer.weights(y), values, atol=1e-11)
    source = seen_of(model, lambda: model(x))
    for what in ("output", "v", "pattern"):
        with ablate(model, {0: HEADS}, "patch", source, what=what):  # type: ignore[arg-type]
            got = model(x)
        same(got, model(x))
    words = "layer: expected attention with q, k and v of its own, .* received flex_attention, whose score_mod reads q"
    with pytest.raises(ValueError, match=words), ablate(model, {0: HEADS}, "patch", source, what="k"):
        model(x)


def test_gradients_of_a_score_mod_are_refused() -> None:
    """It may depend on the score, whose gradient is not known here. (On a CPU torch itself has none.)"""
    model = made(Flex())
    q, k, v = model.layer.heads(noise(B, N, W))
    mask = create_block_mask(_causal, None, None, N, N, device="cpu").as_tuple()
    call = from_flex(q, k, v, _linear, mask, D**-0.5)
    attention = ObservedCall("layer", model.layer, 1, "self", call=call)
    edges = [(torch.ones(N, dtype=torch.bool), torch.arange(N) == 0)]
    words = "layer: expected attention that can be computed again .* received a score_mod of flex_attention, with gra"
    with pytest.raises(ValueError, match=words):
        recompute.without_edges(attention, noise(B, 6, N, D), [0], edges)
    with torch.no_grad():
        assert recompute.without_edges(attention, noise(B, 6, N, D), [0], edges)[:, 0].any()


@torch.no_grad()
def test_flash_attention_of_transformers() -> None:
    """Masks as lengths: what is hidden is hidden as it is with dense masks."""
    one, choice = hf("mistral"), {"queries": [5, 9, -1], "keys": [4, 8, 11]}
    with ablate(one.model, {1: HEADS}, mode="hide", **choice):  # type: ignore[arg-type]
        right = one.run()
    with flash_on_cpu(one.model), ablate(one.model, {1: HEADS}, mode="hide", **choice):  # type: ignore[arg-type]
        torch.testing.assert_close(one.run(), right, rtol=1e-6, atol=1e-6)
    assert (one.run() - right).abs().max() > 1e-3


@torch.no_grad()
def test_a_function_that_computes_something_else() -> None:
    """Its outputs can be changed, but not computed again."""

    def doubled(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **_: Any) -> Any:
        return 2 * value.repeat_interleave(2, 1).transpose(1, 2), None

    one = hf("llama")
    words = (
        "expected attention that can be computed again .* received the function 'lengths_on_cpu' computed other than"
    )
    with flash_on_cpu(one.model, doubled):
        with ablate(one.model, {1: HEADS}):
            one.run()
        with pytest.raises(ValueError, match=words), ablate(one.model, {1: HEADS}, mode="hide", keys=0):
            one.run()


HEADS = [0, 2]


def per_head(n: int, m: int, heads: int, queries: Any, keys: Any) -> Tensor:
    """True where an edge is hidden: (H, N, M)."""
    mask = torch.zeros(heads, n, m, dtype=torch.bool)
    for head in HEADS:
        mask[head][hidden(n, m, queries, keys)] = True
    return mask


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("way", ["plain", "causal", "padded", "cross"])
@torch.no_grad()
def test_torchs_layer(way: str, need_weights: bool) -> None:
    """Against the mask of each head that `nn.MultiheadAttention` itself takes."""
    model = WithMemory(drawn(nn.MultiheadAttention(W, H, batch_first=True)))
    x, y = noise(B, N, W), noise(B, M, W, seed=6) if way == "cross" else noise(B, N, W)
    m = y.shape[1]
    cut = per_head(N, m, H, [2, N - 1], [0, 1])
    options: dict[str, Any] = {"need_weights": need_weights}
    mask = torch.zeros(N, m, dtype=torch.bool)
    if way == "causal":
        mask = ~causal()
        options |= {"attn_mask": mask, "is_causal": True}
    if way == "padded":
        options["key_padding_mask"] = torch.arange(m) >= torch.tensor([[m], [4]])
    more = options | {"attn_mask": (cut | mask).repeat(B, 1, 1), "is_causal": False}
    right = model(x, y, y, **more)[0]
    with ablate(model, {0: HEADS}, mode="hide", queries=[2, N - 1], keys=slice(2)):
        got = model(x, y, y, **options)[0]
    same(got, right)
    assert (model(x, y, y, **options)[0] - right).abs().max() > 1e-3


@torch.no_grad()
def test_keys_that_torchs_layer_adds() -> None:
    """They stand after the tokens, which keep their numbers."""
    model, x = WithMemory(drawn(nn.MultiheadAttention(W, H, batch_first=True, add_bias_kv=True))), noise(B, N, W)
    cut = per_head(N, N, H, [0, 5], [0, 4])  # (torch's own mask is without the key that is added)
    right = model(x, x, x, attn_mask=cut.repeat(B, 1, 1))[0]
    with ablate(model, {0: HEADS}, mode="hide", queries=[0, 5], keys=[0, 4]):
        same(model(x, x, x)[0], right)
    with ablate(model, {0: HEADS}, mode="hide", queries=0, keys=N):
        got = model(x, x, x)[0]
    plain = model(x, x, x)[0]
    same(got[:, 1:], plain[:, 1:])
    assert (got[:, 0] - plain[:, 0]).abs().max() > 1e-3


REGARD: dict[str, dict[str, Any]] = {
    "plain": {},
    "grouped": {"num_kv_heads": 3},
    "sinks and softcap": {"num_kv_heads": 2, "sinks": True, "softcap": 3.0},
    "one kv head": {"num_kv_heads": 1, "value_head_dim": 3},
    "rotary": {"num_kv_heads": 3, "position_encoding": regard.positions.Rotary(D + 1)},
}


@pytest.mark.parametrize("name", REGARD)
@torch.no_grad()
def test_regards_layer(name: str) -> None:
    """Against the mask of each head that the layer itself takes; a padded batch under a causal window."""
    model = drawn(MultiHeadAttention(W, 6, head_dim=D + 1, **REGARD[name]))
    x, mask = noise(B, N, W), Causal() & Window(5) & Padding(lengths=torch.tensor([N, 4]))
    cut = per_head(N, N, 6, [2, 5, 6], [2, 3])
    right = model(x, mask=mask & Keep(~cut[None]))
    with ablate(model, {0: HEADS}, mode="hide", queries=[2, 5, -1], keys=[2, 3]):
        same(model(x, mask=mask), right)
    assert (model(x, mask=mask) - right).abs().max() > 1e-3


@torch.no_grad()
def test_a_query_with_nothing_left_gives_0() -> None:
    """As a head that is gone, there; the first query of a causal model sees itself alone."""
    model, x = drawn(MultiHeadAttention(W, 6, head_dim=D)), noise(B, N, W)
    plain = model(x, mask=Causal())
    with ablate(model, {0: HEADS}):
        gone = model(x, mask=Causal())
    with ablate(model, {0: HEADS}, mode="hide", queries=0, keys=0):
        got = model(x, mask=Causal())
    same(got[:, :1], gone[:, :1])
    assert torch.equal(got[:, 1:], plain[:, 1:])
    with ablate(model, {0: HEADS}, mode="hide"):  # all edges
        same(model(x, mask=Causal()), gone)


def test_two_keys_in_closed_form() -> None:
    """Weights [1, e, e^2] / (1 + e + e^2): without the last [1, e] / (1 + e)."""

    class Three(nn.Module):
        def forward(self, v: Tensor) -> Tensor:
            q, k = torch.ones(1, 1, 1, 1), torch.arange(3.0).view(1, 1, 3, 1)
            return F.scaled_dot_product_attention(q, k, v)

    model, v = Three(), torch.tensor([1.0, 10.0, 100.0]).view(1, 1, 3, 1)
    with ablate(model, {0: [0]}, mode="hide", keys=2):
        got = model(v)
    assert got.item() == pytest.approx((1 + 10 * math.e) / (1 + math.e), rel=1e-6)


@torch.no_grad()
def test_long_texts_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows in small blocks give what they give at once."""
    model, x = drawn(MultiHeadAttention(W, 6, head_dim=D, num_kv_heads=3)), noise(1, 97, W)
    edges = [(i, i - 1) for i in range(1, 97)]
    cut = torch.zeros(97, 97, dtype=torch.bool)
    cut[range(1, 97), range(96)] = True
    per = torch.zeros(6, 97, 97, dtype=torch.bool)
    per[[1, 2, 3]] = cut
    right = model(x, mask=Causal() & Keep(~per[None]))
    for pairs in (recompute.PAIRS, 97 * 11):
        monkeypatch.setattr(recompute, "PAIRS", pairs)
        with ablate(model, {0: [1, 2, 3]}, mode="hide", edges=edges):
            same(model(x, mask=Causal()), right)


# Gradients

GRADIENTS: dict[str, Callable[[], tuple[nn.Module, Callable[..., Tensor]]]] = {}


def _regard() -> tuple[nn.Module, Callable[..., Tensor]]:
    model = drawn(MultiHeadAttention(W, 6, head_dim=D, num_kv_heads=3, sinks=True))
    return model, lambda cut: model(noise(B, N, W), mask=Causal() if cut is None else Causal() & Keep(~cut[None]))


def _torch() -> tuple[nn.Module, Callable[..., Tensor]]:
    model, x = WithMemory(drawn(nn.MultiheadAttention(W, 6 // 2, batch_first=True))), noise(B, N, W)
    return model, lambda cut: model(x, x, x, attn_mask=None if cut is None else cut[:H].repeat(B, 1, 1))[0]


def _function() -> tuple[nn.Module, Callable[..., Tensor]]:
    model, x = fused(attn_mask=None).model, noise(B, N, W)

    def run(cut: Tensor | None) -> Tensor:
        model.layer.options["attn_mask"] = None if cut is None else ~cut  # type: ignore[union-attr,index]
        return model(x, x)

    return model, run


class Masked(nn.Module):
    """By hand, with a mask of each head."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(W, 6 * D) for _ in range(3)), None, None, None  # type: ignore
        self.q, self.k, self.v = nn.Linear(W, 6 * D), nn.Linear(W, 6 * D), nn.Linear(W, 6 * D)
        self.o = nn.Linear(6 * D, W)
        self.cut: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (6, D)).transpose(1, 2) for p in (self.q, self.k, self.v))
        s = q @ k.mT * D**-0.5
        s = s if self.cut is None else s.masked_fill(self.cut, -math.inf)
        return self.o((s.softmax(-1) @ v).transpose(1, 2).flatten(2))


def _by_hand() -> tuple[nn.Module, Callable[..., Tensor]]:
    model, x = WithMemory(drawn(Masked())), noise(B, N, W)

    def run(cut: Tensor | None) -> Tensor:
        model.layer.cut = cut
        return model(x)

    return model, run


@pytest.mark.parametrize("make", [_regard, _torch, _function, _by_hand])
def test_gradients_are_those_of_masked_scores(make: Any) -> None:
    model, run = make()
    cut = per_head(N, N, 6, [3, 5, 6], [0, 2])
    grads: list[dict[str, Tensor]] = []
    for dense_mask in (True, False):
        model.zero_grad(set_to_none=True)
        if dense_mask:
            out = run(cut)
        else:
            with ablate(model, {0: HEADS}, mode="hide", queries=[3, 5, 6], keys=[0, 2]):
                out = run(None)
        out.mul(noise(*out.shape, seed=9)).sum().backward()
        grads.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    right, got = grads
    assert got.keys() == right.keys()
    for name in right:
        torch.testing.assert_close(got[name], right[name], atol=1e-11, rtol=1e-9, msg=lambda m, p=name: f"{p}: {m}")


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "t5"])
def test_gradients_of_transformers(family: str) -> None:
    """By finite differences, along a random direction in the weights."""
    one = hf(family)
    parameters = [p for p in one.model.parameters() if p.dim() > 1]
    steps = [noise(*p.shape, seed=i) for i, p in enumerate(parameters)]

    def loss() -> Tensor:
        with ablate(one.model, {one.layers[0]: [0, 2]}, mode="hide", queries=slice(3, None), keys=[0, 1]):
            return one.run().square().mean()

    gradients = torch.autograd.grad(loss(), parameters, allow_unused=True)
    slope = sum(float((g * s).sum()) for g, s in zip(gradients, steps, strict=True) if g is not None)
    values, eps = [], 1e-5
    with torch.no_grad():
        for sign in (1, -2):
            for p, s in zip(parameters, steps, strict=True):
                p.add_(s, alpha=sign * eps)
            values.append(float(loss()))
    assert slope == pytest.approx((values[0] - values[1]) / (2 * eps), rel=2e-2)


# While decoding


def _cut_of_cache(one: Case, run: Callable[[], Tensor], **choice: Any) -> Tensor:
    with ablate(one.model, {0: [1, 4], 1: [0]}, mode="hide", **choice):
        return run()


@pytest.mark.parametrize("sizes", [[5, 1, 1, 1, 5], [1] * 13, [7, 6]], ids=str)
@torch.no_grad()
def test_positions_are_those_in_the_sequence(sizes: list[int]) -> None:
    """A text read in chunks from a cache is the text read at once."""
    one = regard_model(Decoder, causal=True, positions="rotary")
    ids = hf_models.some_ids()
    choice: dict[str, Any] = {"edges": [(slice(4, None), [0, 2]), (6, 5), (12, slice(8, 12))]}
    right = _cut_of_cache(one, lambda: one.model(ids), **choice)

    def run() -> Tensor:
        cache = one.model.new_cache()  # type: ignore[operator]
        return torch.cat([one.model(piece, cache=cache) for piece in ids.split(sizes, dim=1)], 1)

    torch.testing.assert_close(_cut_of_cache(one, run, **choice), right, rtol=1e-9, atol=1e-9)
    assert (one.model(ids) - right).abs().max() > 1e-3


@torch.no_grad()
def test_a_rolling_cache() -> None:
    """It keeps the first token and the last ones; keys have their numbers in the sequence."""
    layer = drawn(MultiHeadAttention(W, 6, head_dim=D))
    x, window = noise(1, N, W), Causal() & Window(4)
    keep = window | (Causal() & regard.masks.Prefix(1))
    cut = per_head(N, N, 6, [5, 6], [0, 4])
    right = layer(x, mask=keep & Keep(~cut[None]))
    cache = regard.RollingCache(window=4, keep_first=1)
    with ablate(layer, {0: HEADS}, mode="hide", queries=[5, 6], keys=[0, 4]):
        got = torch.cat([layer(piece, mask=Causal(), cache=cache) for piece in x.split(1, 1)], 1)
    same(got, right)
    assert (layer(x, mask=keep) - right).abs().max() > 1e-3


@pytest.mark.parametrize(
    "family,options",
    [("llama", {}), ("llama", {"cache_implementation": "static"}), ("mistral", {}), ("gpt2", {}), ("bloom", {})],
    ids=str,
)
def test_generation(family: str, options: dict[str, Any]) -> None:
    """What is generated from a cache is what is generated without one, reading all again at each step."""
    one, given = hf(family), prompts()
    choice: dict[str, Any] = {"edges": [(slice(8, None), [0, 3]), (slice(12, None), 11)]}
    heads = {layer: [0, 2] for layer in one.layers}
    with ablate(one.model, heads, mode="hide", **choice):
        right, logits = scores(one.model, given, use_cache=False)
    with ablate(one.model, heads, mode="hide", **choice):
        got, got_logits = scores(one.model, given, **options)
    assert torch.equal(got, right)
    torch.testing.assert_close(got_logits, logits, rtol=1e-5, atol=1e-5)
    assert (scores(one.model, given)[1] - logits).abs().max() > 1e-4


@torch.no_grad()
def test_the_last_token_so_far() -> None:
    """While a model writes, -1 is each token when it is read."""
    one = regard_model(Decoder, causal=True, positions="rotary")
    ids = hf_models.some_ids()
    right = _cut_of_cache(one, lambda: one.model(ids), queries=slice(5, None), keys=0)

    def run() -> Tensor:
        cache = one.model.new_cache()  # type: ignore[operator]
        return torch.cat([one.model(piece, cache=cache) for piece in ids.split([5, *[1] * 8], dim=1)], 1)

    got = _cut_of_cache(one, run, queries=-1, keys=0)
    assert (got[:, 4] - right[:, 4]).abs().max() > 1e-3  # (the last of the prompt is a last token, too)


@torch.no_grad()
def test_padded_texts() -> None:
    """Padded on the left: tokens are counted with their padding. Rows that are tokens are as those of dense weights."""
    model, given = hf_models.model("llama", padded=True), hf_models.inputs("llama", padded=True)
    eager_model = hf_models.model("llama", "eager", padded=True)
    real = given["attention_mask"].bool()
    layer = "model.layers.1.self_attn"
    cut = per_head(13, 13, 6, [9, 12], [6, 8])
    seen: list[Any] = []

    def hide(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        seen.append(1)
        least = torch.finfo(torch.float32).min
        mask = kwargs["attention_mask"].expand(-1, 6, -1, -1).masked_fill(cut[None], least)
        return args, kwargs | {"attention_mask": mask}

    handle = eager_model.get_submodule(layer).register_forward_pre_hook(hide, with_kwargs=True)
    right = eager_model(**given).logits[real]
    handle.remove()
    assert seen
    for one in (model, eager_model):
        with ablate(one, {layer: HEADS}, mode="hide", queries=[9, 12], keys=[6, 8]):
            torch.testing.assert_close(one(**given).logits[real], right, rtol=1e-4, atol=1e-5)
    assert (model(**given).logits[real] - right).abs().max() > 1e-3


# Other tokens, other heads, other blocks


@torch.no_grad()
def test_the_rest_is_untouched() -> None:
    """Queries that lose no edge, and heads that are not meant, are the model's, bit for bit."""
    model, x = made(Hand(by_operator)), noise(B, N, W)
    inputs: list[Tensor] = []
    model.layer.o.register_forward_pre_hook(lambda _, args: inputs.append(args[0].unflatten(-1, (H, -1))))
    model(x)
    with ablate(model, {0: [1]}, mode="hide", queries=slice(1, 3), keys=0):
        model(x)
    plain, cut = inputs
    assert torch.equal(cut[:, :, [0, 2]], plain[:, :, [0, 2]])
    assert torch.equal(cut[:, [0, 3, 4, 5, 6]], plain[:, [0, 3, 4, 5, 6]])
    assert ((cut != plain)[:, 1:3, 1]).any(-1).all()


@pytest.mark.parametrize("mode", ["zero", "mean"])
@torch.no_grad()
def test_other_modes_at_chosen_queries(mode: Any) -> None:
    model, x = made(Hand(by_operator)), noise(B, N, W)
    plain = model(x)
    with ablate(model, {0: [1]}, mode=mode):
        everywhere = model(x)
    with ablate(model, {0: [1]}, mode=mode, queries=[-1, 2]):
        got = model(x)
    same(got[:, [2, 6]], everywhere[:, [2, 6]])
    assert torch.equal(got[:, [0, 1, 3, 4, 5]], plain[:, [0, 1, 3, 4, 5]])


@torch.no_grad()
def test_a_watch_sees_the_model() -> None:
    """What is computed again is not seen as attention of the model."""
    one = regard_model(Decoder, causal=True, positions="rotary")
    with regard.watch(one.model, measures=[]) as around, ablate(one.model, {0: [1]}, mode="hide", keys=0):
        one.run()
    one_more = fused()
    with regard.watch(one_more.model, measures=[]) as other, ablate(one_more.model, {0: [1]}, mode="hide", keys=0):
        one_more.run()
    assert around.layers == one.layers
    assert [layer.texts for layer in (*around, *other)] == [1, 1, 1]


@torch.no_grad()
def test_two_blocks() -> None:
    """Of other heads: both count. Of the same head: refused, for the inner one would forget the outer one."""
    model, x = made(Hand(by_operator)), noise(B, N, W)
    with ablate(model, {0: [0, 2]}, mode="hide", queries=3, keys=1):
        right = model(x)
    with ablate(model, {0: [0]}, mode="hide", queries=3, keys=1):  # noqa: SIM117
        with ablate(model, {"layer": [2]}, mode="hide", queries=3, keys=1):
            same(model(x), right)
    words = r"heads of layer: expected heads that no block around this one changes, .*received \[2\]; remedy: one block"
    with pytest.raises(ValueError, match=words), ablate(model, {0: [1, 2]}):  # noqa: SIM117
        with ablate(model, {0: [2]}, mode="hide", keys=1):
            model(x)
    with pytest.raises(ValueError, match=r"heads of layer: expected heads that no block around .*received \[2\]"):
        importance(model, lambda model, x: _within(ablate(model, {0: [2]}, mode="hide", keys=1), model, x), [x])
    with ablate(model, {0: [2]}, mode="hide", queries=3, keys=1), ablate(model, {0: [2]}, queries=3):
        got = [model(x), model(x)]  # an output that is replaced inside may be anything
    with ablate(model, {0: [2]}, queries=3):
        right = model(x)
    for one in got:
        same(one, right)


def _within(block: Any, model: Any, x: Tensor) -> Tensor:
    with block:
        return model(x).square().mean()


# What is refused


def test_wrong_arguments() -> None:
    model = made(Hand(by_operator))

    def refused(kind: type[Exception], words: str, **options: Any) -> None:
        with pytest.raises(kind, match=words):
            ablate(model, {0: [0]}, **{"mode": "hide", **options})

    expected = "expected a number, a slice, a list of numbers, a boolean tensor, or None for all, received"
    refused(TypeError, f"queries: {expected} '3'", queries="3")
    refused(TypeError, f"keys: {expected} 1.5", keys=1.5)
    refused(TypeError, f"keys: {expected} 1.5 among them", keys=[1.5])
    refused(TypeError, rf"queries: {expected} True among them; remedy: torch.tensor", queries=[True, False])
    refused(TypeError, "queries: expected a slice of whole numbers, received slice", queries=slice("a"))
    refused(ValueError, "queries: expected a slice with a step other than 0", queries=slice(0, 3, 0))
    two = torch.ones(2, 3, dtype=torch.bool)
    refused(ValueError, r"keys: expected a boolean tensor \(N,\), .* received one of shape \(2, 3\)", keys=two)
    refused(
        ValueError, 'edges: expected edges alone, for mode="hide", received queries or keys', edges=[(0, 1)], keys=1
    )
    refused(
        ValueError, 'edges: expected edges alone, for mode="hide", received mode="zero"', edges=[(0, 1)], mode="zero"
    )
    refused(TypeError, r"edges: expected a list of pairs \(queries, keys\), received 3", edges=3)
    refused(
        TypeError, r"edges: expected a list of pairs .* received 5 among them; remedy: edges=\[\(5, 3\)\]", edges=[5]
    )
    refused(ValueError, "edges: expected one at least, received none", edges=[])
    refused(ValueError, 'keys: expected mode="hide", or what="k" or "v", received mode="mean"', mode="mean", keys=1)
    refused(ValueError, 'source: expected none for mode="hide", received a record', source=regard.heads.Record())
    refused(ValueError, 'what: expected "output" for mode="hide", received \'q\'; remedy: mode="patch"', what="q")
    refused(ValueError, "what: expected 'output', 'q', 'k', 'v', 'pattern', received 'z'", what="z")


@torch.no_grad()
def test_tokens_that_are_not_there() -> None:
    model, x = made(Hand(by_operator)), noise(B, N, W)
    for choice, words in (
        ({"queries": 7}, "queries: expected numbers of the 7 tokens that were read, received 7"),
        ({"keys": [0, -8]}, "keys: expected numbers of the 7 tokens that were read, received -8"),
        ({"edges": [(0, 1), (0, 9)]}, "keys: expected numbers of the 7 tokens that were read, received 9"),
        ({"queries": torch.ones(5, dtype=torch.bool)}, "queries: expected a boolean for each of 7 tokens, received 5"),
        ({"keys": torch.ones(9, dtype=torch.bool)}, "keys: expected numbers of the 7 tokens .* received 9 booleans"),
    ):
        with pytest.raises(ValueError, match=words), ablate(model, {0: [0]}, mode="hide", **choice):  # type: ignore[arg-type]
            model(x)


@pytest.mark.parametrize("name", ["by hand", "function", "regard", "transformers"])
def test_dropout_is_refused(name: str) -> None:
    """What was dropped is not known; computed again, heads would have none."""
    torch.manual_seed(0)
    x = noise(B, N, W)
    if name == "by hand":
        model: nn.Module = made(Hand(CORES[5], dropout=0.3)).train()
        run, received = (lambda: model(x)), "an output that is not their product; remedy: model.eval"
    elif name == "function":
        model = fused(dropout_p=0.3).model
        run, received = (lambda: model(x, x)), "dropout 0.3; remedy: model.eval"
    elif name == "regard":
        model = drawn(MultiHeadAttention(W, 3, dropout=0.3)).train()
        run, received = (lambda: model(x)), "dropout in training; remedy: model.eval"
    else:
        model = hf_models.model("bert").train()
        run, received = (lambda: model(**hf_models.inputs("bert"))), "dropout 0.1 in training; remedy: model.eval"
    with pytest.raises(ValueError, match=received), ablate(model, {0: [0]}, mode="hide", keys=0):
        run()
