"""`ablate` with mode="patch": queries, keys, values, weights or outputs of another run, against dense attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from heads import hf_models
from heads.interventions.test_ablate import CASES, GREEDY, fused, hf, prompts, regard_model, same, scores, seen_of
from heads.oracle_hands import B, D, Fused, H, Hand, M, N, W, by_operator, drawn, made, noise
from heads.tiny_models import EXPERTS, tiny
from torch import Tensor

import regard
from regard import MultiHeadAttention
from regard.heads import ablate
from regard.masks import Causal
from regard.models import Decoder

WHAT: list[Any] = ["output", "q", "k", "v", "pattern"]
HEADS = [1, 4, 5]


def patched(layer: Fused, here: list[Tensor], there: list[Tensor], what: str, tokens: list[int]) -> Tensor:
    """The layer's output, densely: `here` and `there` are q, k, v of two runs; some heads have a part of `there`."""
    shared = 6 // layer.groups

    def heads(q: Tensor, k: Tensor, v: Tensor, p: Tensor | None = None) -> tuple[Tensor, Tensor]:
        k, v = (x.repeat_interleave(6 // x.shape[1], 1) for x in (k, v))
        scores = (q @ k.mT * D**-0.5).masked_fill(~torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(), -1e300)
        p = scores.softmax(-1) if p is None else p
        return p @ v, p

    plain, p_here = heads(*here)
    clean, p_there = heads(*there)
    q, k, v = (x.clone() for x in here)
    p = p_here.clone()
    k, v, k_there, v_there = (x.repeat_interleave(shared, 1) for x in (k, v, there[1], there[2]))
    if what == "output":
        other = plain.clone()
        other[:, :, tokens] = clean[:, :, tokens]
    else:
        new, old = {"q": (there[0], q), "k": (k_there, k), "v": (v_there, v), "pattern": (p_there, p)}[what]
        old[:, :, tokens] = new[:, :, tokens]
        other = heads(q, k, v, p if what == "pattern" else None)[0]
    out = plain.clone()
    out[:, HEADS] = other[:, HEADS]
    return layer.o(out.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("what", WHAT)
@torch.no_grad()
def test_against_dense_attention(what: Any, grouped: bool) -> None:
    """Of grouped heads, those that share a kv head with a patched one and are not patched keep their keys."""
    one = fused(is_causal=True, enable_gqa=grouped)
    model, x, y = one.model, noise(B, N, W), noise(B, N, W, seed=8)
    layer = model.layer
    here, there = layer.heads(model.norm(x), x), layer.heads(model.norm(y), y)  # type: ignore[operator,union-attr]
    source = seen_of(model, lambda: model(y, y))
    for tokens, choice in ((list(range(N)), None), ([0, 2, 5], [0, 2, -2]), ([3, 4], slice(3, 5))):
        right = model.head(patched(layer, here, there, what, tokens))  # type: ignore[operator,arg-type]
        chosen = {} if choice is None else {"keys" if what in ("k", "v") else "queries": choice}
        with ablate(model, {0: HEADS}, "patch", source, what=what, **chosen):  # type: ignore[arg-type]
            same(model(x, x), right)
        assert (model(x, x) - right).abs().max() > 1e-3


@pytest.mark.parametrize("what", WHAT)
@pytest.mark.parametrize("name", ["bert", "llama", "gpt_oss", "bart", "torch, self", "regard, decoder", "fused"])
@torch.no_grad()
def test_a_patch_of_the_same_input_changes_nothing(name: str, what: Any) -> None:
    one = CASES[name]()
    right, source = one.run(), seen_of(one.model, one.run)
    with ablate(one.model, {layer: [0, 2] for layer in one.layers}, "patch", source, what=what):
        got = one.run()
    torch.testing.assert_close(got, right, rtol=0.0, atol=3e-6 * float(right.abs().max()))


@pytest.mark.parametrize("name", ["t5", "bloom", "deberta", "by hand, by_operator", "by hand, heads_times_batch"])
@torch.no_grad()
def test_the_pattern_of_attention_by_hand(name: str) -> None:
    one = CASES[name]()
    right, source = one.run(), seen_of(one.model, one.run)
    with ablate(one.model, {layer: [0, 2] for layer in one.layers}, "patch", source, what="pattern"):
        got = one.run()
    torch.testing.assert_close(got, right, rtol=0.0, atol=3e-6 * float(right.abs().max()))


@torch.no_grad()
def test_all_heads_of_the_clean_run_give_its_output() -> None:
    """Of a model that has nothing but heads: no stream goes past them."""
    model, x, y = made(Hand(by_operator)), noise(B, N, W), noise(B, N, W, seed=8)
    clean, corrupt, source = model(x), model(y), seen_of(model, lambda: model(x))
    assert (clean - corrupt).abs().max() > 0.1
    with ablate(model, {0: range(H)}, "patch", source):
        same(model(y), clean)
    with ablate(model, {0: range(H)}, "patch", source, queries=[1, 5]):
        got = model(y)
    same(got[:, [1, 5]], clean[:, [1, 5]])
    assert torch.equal(got[:, [0, 2, 3, 4, 6]], corrupt[:, [0, 2, 3, 4, 6]])


@torch.no_grad()
def test_pattern_and_values_make_the_output() -> None:
    """The clean pattern on a run that has the clean values is the clean output: here keys alone are corrupted."""
    one = fused()
    model, x, y = one.model, noise(B, N, W), noise(B, N, W, seed=8)
    clean, source = model(x, y), seen_of(model, lambda: model(x, y))
    layer = model.layer
    weight = layer.k.weight.data.clone()  # type: ignore[union-attr]
    layer.k.weight.data.copy_(noise(*weight.shape, seed=4))  # type: ignore[union-attr,operator]
    for what in ("pattern", "k"):
        with ablate(model, {0: range(6)}, "patch", source, what=what):  # type: ignore[arg-type]
            same(model(x, y), clean)
    assert (model(x, y) - clean).abs().max() > 0.1


def test_gradients_flow_to_what_is_left() -> None:
    """With the values of another run the projection of values learns from the other heads alone."""
    one = fused()
    model, x, y = one.model, noise(B, N, W), noise(B, N, W, seed=8)
    source = seen_of(model, lambda: model(y, y))
    projections: Any = model.layer
    for what, still in (("v", "qk"), ("q", "kv"), ("k", "qv"), ("pattern", "v")):
        model.zero_grad(set_to_none=True)
        with ablate(model, {0: range(6)}, "patch", source, what=what):  # type: ignore[arg-type]
            model(x, x).square().sum().backward()
        learning = {name for name in "qkv" if (g := getattr(projections, name).weight.grad) is not None and g.any()}
        assert learning == set(still), what


# While decoding


@pytest.mark.parametrize("what", WHAT)
@pytest.mark.parametrize("options", [{}, {"cache_implementation": "static"}], ids=["grows", "static"])
def test_a_generation_patched_with_itself(what: Any, options: dict[str, Any]) -> None:
    one, given = hf("llama"), prompts()
    with regard.watch(one.model, measures=[], keep="qkv") as source:
        _, right = scores(one.model, given, **options)
    with ablate(one.model, {layer: [0, 2, 5] for layer in one.layers}, "patch", source, what=what):
        got = scores(one.model, given, **options)[1]
    torch.testing.assert_close(got, right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("what", WHAT)
@torch.no_grad()
def test_a_text_in_chunks_is_the_text_at_once(what: Any) -> None:
    one = regard_model(Decoder, causal=True, positions="rotary")
    ids, other = hf_models.some_ids(), hf_models.some_ids(seed=23)
    source = seen_of(one.model, lambda: one.model(other))
    chosen: dict[str, Any] = {"keys" if what in ("k", "v") else "queries": [2, 7, 11]}

    def run() -> Tensor:
        cache = one.model.new_cache()  # type: ignore[operator]
        return torch.cat([one.model(piece, cache=cache) for piece in ids.split([5, 1, 1, 6], dim=1)], 1)

    outs = []
    for compute in (lambda: one.model(ids), run):
        with ablate(one.model, {1: [1, 4]}, "patch", source, what=what, **chosen):
            outs.append(compute())
    torch.testing.assert_close(outs[1], outs[0], rtol=1e-9, atol=1e-9)
    assert (one.model(ids) - outs[0]).abs().max() > 1e-3


# What is refused


@torch.no_grad()
def test_sources_that_do_not_serve() -> None:
    def refused(words: str, model: Any, source: Any, run: Callable[[], Any], **options: Any) -> None:
        with pytest.raises(ValueError, match=words), ablate(model, {0: [0]}, "patch", source, **options):
            run()

    layer = drawn(MultiHeadAttention(W, H))
    x, longer = noise(B, N, W), noise(B, M, W)
    source = seen_of(layer, lambda: layer(x))
    name = "source of MultiHeadAttention"
    refused(rf"{name}: expected queries \(2, 3, 11, 5\), received \(2, 3, 7, 5\), of which queries 0 to 11",
            layer, source, lambda: layer(longer), what="q")  # fmt: skip
    refused(rf"{name}: expected keys \(2, 3, 11, 5\), received \(2, 3, 7, 5\); remedy: texts of the same length",
            layer, source, lambda: layer(longer), what="k")  # fmt: skip
    refused(rf"{name}: expected values \(5, 3, 7, 5\), received \(2, 3, 7, 5\)",
            layer, source, lambda: layer(noise(5, N, W)), what="v")  # fmt: skip
    refused(rf"{name}: expected weights \(2, 3, 11, 11\), received \(2, 3, 7, 7\), of which queries 0 to 11",
            layer, source, lambda: layer(longer), what="pattern")  # fmt: skip
    more = seen_of(layer, lambda: layer(longer))
    refused(rf"{name}: expected weights on the 7 keys of this run alone, received weights on 11 keys",
            layer, more, lambda: layer(x), what="pattern")  # fmt: skip
    with_causal = seen_of(layer, lambda: layer(longer, mask=Causal()))
    with ablate(layer, {0: [0]}, "patch", with_causal, what="pattern"):  # the first 7 see none of the rest
        layer(x, mask=Causal())
    less = seen_of(layer, lambda: layer(x), keep="qk")
    refused(
        rf'{name}: expected q, k and v of a watch with keep="qkv", received none',
        layer,
        less,
        lambda: layer(x),
        what="v",
    )
    by_hand = made(Hand(by_operator))
    hands = seen_of(by_hand, lambda: by_hand(x))
    for what in ("q", "k", "v"):
        refused(f'layer: expected attention with q, k and v of its own, for what="{what}", received attention by hand; '
                'remedy: what="output" or what="pattern"', by_hand, hands, lambda: by_hand(x), what=what)  # fmt: skip


def test_wrong_tokens() -> None:
    model = made(Hand(by_operator))
    source = seen_of(model, lambda: model(noise(B, N, W)))
    with pytest.raises(ValueError, match='queries: expected none for what="k", which all queries see, received 3; rem'):
        ablate(model, {0: [0]}, "patch", source, what="k", queries=3)
    with pytest.raises(
        ValueError, match='keys: expected mode="hide", or what="k" or "v", received mode="patch", what="q'
    ):
        ablate(model, {0: [0]}, "patch", source, what="q", keys=3)
    with pytest.raises(ValueError, match="queries: expected numbers of the 7 tokens that were read, received 7"):  # noqa: SIM117
        with ablate(model, {0: [0]}, "patch", source, queries=7):
            model(noise(B, N, W))


def test_a_text_longer_than_its_source() -> None:
    one, given = hf("llama"), prompts()
    source = seen_of(one.model, lambda: one.model(**given))
    words = r"expected values \(2, 3, 12, 14\), received \(2, 3, 11, 14\); remedy: texts of the same length"
    with pytest.raises(ValueError, match=words), ablate(one.model, {0: [0]}, "patch", source, what="v"):
        one.model.generate(**given, **GREEDY)  # type: ignore[operator]


@torch.no_grad()
def test_a_rolling_cache() -> None:
    """It rotates its keys anew at each step, so that those of another run do not fit; outputs and weights do."""
    layer = drawn(MultiHeadAttention(W, H, head_dim=4, position_encoding=regard.positions.Rotary(4)))
    x = noise(1, N, W)

    def run() -> Tensor:
        cache = regard.RollingCache(window=4, keep_first=1)
        return torch.cat([layer(piece, mask=Causal(), cache=cache) for piece in x.split(1, 1)], 1)

    right, source, plain = run(), seen_of(layer, run), seen_of(layer, lambda: layer(x, mask=Causal()))
    for what in ("output", "pattern"):
        with ablate(layer, {0: [1]}, "patch", source, what=what):  # type: ignore[arg-type]
            same(run(), right)
    words = (
        "source of MultiHeadAttention: expected q, k and v of a watch .* received a cache that rotates its keys anew; "
    )
    with pytest.raises(ValueError, match=words), ablate(layer, {0: [1]}, "patch", source, what="v"):
        run()
    words = 'MultiHeadAttention: expected keys that stay, for what="k", received a cache that rotates its keys anew'
    with pytest.raises(ValueError, match=words), ablate(layer, {0: [1]}, "patch", plain, what="k"):
        run()
    with ablate(layer, {0: [1]}, "patch", plain, what="v"):
        same(run(), right)  # the values are those of the same text


@torch.no_grad()
def test_outputs_lie_in_memory_as_before() -> None:
    """A model may `view` them: AFMoE does."""
    model, given = tiny("AfmoeForCausalLM", EXPERTS), {"input_ids": torch.arange(3, 17).view(2, 7)}
    right = model(**given).logits
    source = seen_of(model, lambda: model(**given))
    for what in WHAT:
        with ablate(model, {0: [1, 4]}, "patch", source, what=what):
            torch.testing.assert_close(model(**given).logits, right, rtol=1e-4, atol=1e-5)
    with ablate(model, {0: [1, 4]}, mode="hide", queries=[1, 3], keys=0):
        assert (model(**given).logits - right).abs().max() > 1e-5
