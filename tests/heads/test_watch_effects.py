"""A watch changes nothing: outputs, gradients, random numbers. And there may be several."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from heads import hf_models
from heads.oracle import Oracle, agree, close, wanted
from heads.oracle_hands import (
    B,
    D,
    Fused,
    H,
    Hand,
    N,
    W,
    WithMemory,
    batch_times_heads,
    by_functional_dropout,
    by_operator,
    by_softmax_module,
    causal,
    dense,
    drawn,
    made,
    noise,
)
from torch import Tensor, nn

import regard
from regard import MultiHeadAttention
from regard.masks import Causal

pytestmark = pytest.mark.on_device

SQUARE = torch.tensor([[False] * N, [False] * 4 + [True] * (N - 4)])
Run = Callable[[], Tensor]


def _hand(core: Any) -> tuple[nn.Module, Run]:
    model, x = made(Hand(core, dropout=0.3)), noise(B, N, W)
    return model, lambda: model(x).square().mean()


def _torch(**options: Any) -> tuple[nn.Module, Run]:
    model = WithMemory(drawn(nn.MultiheadAttention(W, H, dropout=0.3, batch_first=True)))
    x = noise(B, N, W).requires_grad_()
    return model, lambda: model(x, x, x, **options)[0].square().mean()


def _encoder() -> tuple[nn.Module, Run]:
    block = nn.TransformerEncoderLayer(28, 4, 13, dropout=0.3, batch_first=True)
    model, x = drawn(nn.TransformerEncoder(block, 2)), noise(B, N, 28)
    return model, lambda: model(x, src_key_padding_mask=SQUARE)[~SQUARE].square().mean()


def _fused() -> tuple[nn.Module, Run]:
    layer = drawn(Fused({"enable_gqa": True, "attn_mask": causal(), "dropout_p": 0.3}))
    model, x = WithMemory(layer), noise(B, N, W)
    return model, lambda: model(x, x).square().mean()


def _regard(**options: Any) -> tuple[nn.Module, Run]:
    layer = drawn(MultiHeadAttention(W, 6, head_dim=D, num_kv_heads=3, dropout=0.3, sinks=True, **options))
    model, x = WithMemory(layer), noise(B, N, W)
    return model, lambda: model(x, mask=Causal()).square().mean()


def _hf(family: str, way: str | None = None) -> tuple[nn.Module, Run]:
    model, given = hf_models.model(family, way), hf_models.inputs(family)
    for module in model.modules():  # dropout wherever there may be some
        for name in ("dropout", "attention_dropout", "attn_dropout", "dropout_prob"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.3)
        if isinstance(module, nn.Dropout):
            module.p = 0.3
    return model, lambda: model(**given)[0].square().mean()


MODELS: dict[str, Callable[[], tuple[nn.Module, Run]]] = {
    "by hand": lambda: _hand(by_softmax_module),
    "by hand, functional": lambda: _hand(by_functional_dropout),
    "by hand, bmm": lambda: _hand(batch_times_heads),
    "torch": lambda: _torch(),
    "torch, no weights": lambda: _torch(need_weights=False),
    "torch, causal": lambda: _torch(need_weights=False, attn_mask=~causal(), is_causal=True),
    "encoder": _encoder,
    "fused": _fused,
    "regard": lambda: _regard(),
    "bert": lambda: _hf("bert"),
    "bert, eager": lambda: _hf("bert", "eager"),
    "llama": lambda: _hf("llama"),
    "gpt_oss": lambda: _hf("gpt_oss"),
    "t5": lambda: _hf("t5"),
    "bloom": lambda: _hf("bloom"),
    "deberta": lambda: _hf("deberta"),
}


@contextmanager
def watching(model: nn.Module, on: bool) -> Iterator[None]:
    with regard.watch(model, measures=wanted()) if on else nullcontext():
        yield


@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_and_random_numbers(name: str, train: bool) -> None:
    model, run = MODELS[name]()
    model.train(train)
    results: list[tuple[Tensor, dict[str, Tensor | None], Tensor]] = []
    for on in (False, True):
        torch.manual_seed(23)
        model.zero_grad(set_to_none=True)
        with watching(model, on):
            loss = run()
            loss.backward()
        grads = {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
        results.append((loss.detach(), grads, torch.get_rng_state()))
    (loss, grads, state), (watched, watched_grads, watched_state) = results
    torch.testing.assert_close(watched, loss, atol=1e-9, rtol=1e-9)
    assert torch.equal(watched_state, state)
    assert any(g is not None and g.any() for g in grads.values())
    for parameter, right in grads.items():
        got = watched_grads[parameter]
        assert (got is None) == (right is None), parameter
        if right is not None:
            torch.testing.assert_close(got, right, atol=1e-9, rtol=1e-7, msg=lambda m, p=parameter: f"{p}: {m}")


def test_backward_after_the_watch() -> None:
    model, run = MODELS["by hand"]()
    run().backward()
    right = model.layer.q.weight.grad.clone()
    model.zero_grad()
    with regard.watch(model):
        loss = run()
    loss.backward()
    torch.testing.assert_close(model.layer.q.weight.grad, right)


def test_the_record_has_no_gradient() -> None:
    model, run = MODELS["fused"]()
    with regard.watch(model, measures=["entropy", "received"], keep="qk") as seen:
        run()
    assert not seen[0].entropy.requires_grad
    assert not seen[0].received.requires_grad
    assert not seen[0].weights().requires_grad


@pytest.mark.parametrize("name", ["by hand", "torch", "regard", "bert", "deberta"])
def test_in_inference_mode(name: str) -> None:
    model, run = MODELS[name]()
    with torch.inference_mode():
        right = run()
        with regard.watch(model) as seen:
            got = run()
    torch.testing.assert_close(got, right, atol=1e-9, rtol=1e-9)
    assert seen.layers


@pytest.mark.parametrize("family", ["bert", "deberta"])
def test_one_watch_in_another(family: str) -> None:
    model, given = hf_models.model(family), hf_models.inputs(family)
    oracles = hf_models.eager(family, hf_models.model(family, "eager"), given)
    with regard.watch(model, measures=wanted()) as outer, regard.watch(model, measures=["entropy"]) as inner:
        model(**given)
    for name, oracle in oracles.items():
        agree(outer[name], Oracle(oracle.weights))
        close(inner[name].entropy, oracle.entropy(), "inner")
    assert outer.layers == inner.layers == list(oracles)


def test_a_watch_of_a_part_within_one_of_the_whole() -> None:
    model, given = hf_models.model("bert"), hf_models.inputs("bert")
    oracles = hf_models.eager("bert", hf_models.model("bert", "eager"), given)
    part = model.encoder.layer[1]
    with regard.watch(model, measures=wanted()) as outer, regard.watch(part, measures=wanted()) as inner:
        model(**given)
    assert outer.layers == list(oracles)
    assert inner.layers == ["attention.self"]
    agree(inner[0], Oracle(list(oracles.values())[1].weights))


def test_the_inner_watch_ends_first() -> None:
    """The outer goes on: two forwards for it, one for the inner."""
    model, x, y = made(Hand(by_operator)), noise(B, N, W), noise(B, N, W, seed=8)
    with torch.no_grad(), regard.watch(model, measures=["entropy"]) as outer:
        with regard.watch(model, measures=["entropy"]) as inner:
            model(x)
        model(y)
    first, second = Oracle(dense(model, x)), Oracle(dense(model, y))
    close(inner[0].entropy, first.entropy(), "inner")
    both = torch.cat([first.entropy(), second.entropy()])
    close(outer[0].entropy, both.mean((0, 2)), "outer")


def test_one_watch_after_another() -> None:
    model = made(Hand(by_operator))
    for seed in (5, 6, 7):
        x = noise(B, N, W, seed=seed)
        with torch.no_grad(), regard.watch(model, measures=wanted()) as seen:
            model(x)
        agree(seen["layer"], Oracle(dense(model, x)))


def test_two_models_at_once() -> None:
    one, two = made(Hand(by_operator)), WithMemory(drawn(nn.MultiheadAttention(W, H, batch_first=True)))
    x, y = noise(B, N, W), noise(B, N, W, seed=9)
    with torch.no_grad(), regard.watch(one, measures=wanted()) as first, regard.watch(two, measures=wanted()) as second:
        one(x)
        two(y, y, y)
    agree(first["layer"], Oracle(dense(one, x)))
    agree(second["layer"], Oracle(two.layer(y, y, y, average_attn_weights=False)[1].detach()))
