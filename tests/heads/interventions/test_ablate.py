"""`ablate` against the model whose output projection has zeros in the head's columns, or whose input has other ones."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from heads import hf_models
from heads.hf_models import ZOO
from heads.oracle import close
from heads.oracle_hands import (
    CORES,
    MASKED,
    B,
    Core,
    D,
    Fused,
    Grouped,
    H,
    Hand,
    Heads,
    M,
    N,
    SequenceFirst,
    Unbatched,
    W,
    WithMemory,
    a_head_after_another,
    by_operator,
    causal,
    dense,
    drawn,
    made,
    noise,
)
from torch import Tensor, nn
from torch.overrides import _len_torch_function_stack
from torch.utils.checkpoint import checkpoint

import regard
from regard import MultiHeadAttention, models, swap
from regard.heads import ablate
from regard.heads.capture.huggingface import _interface
from regard.heads.interventions.changes import refuse_checkpoints
from regard.masks import Causal
from regard.models import EMBEDDED, Decoder, Encoder, ModelConfig

NEW = 5
GREEDY: dict[str, Any] = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False}
WITH_MINILM = pytest.mark.skipif(EMBEDDED["minilm"].folder() is None, reason="the weights of MiniLM are not installed")


@dataclass
class Case:
    """A model, how it is run, and for each layer the weight that its heads' outputs go through, heads first."""

    model: nn.Module
    run: Callable[[], Tensor]
    weights: dict[str, nn.Parameter]
    by_head: dict[str, Callable[[Tensor], Tensor]]  # from a tensor shaped as the weight to a view (H, ...)

    @property
    def layers(self) -> list[str]:
        return list(self.weights)

    @contextlib.contextmanager
    def zeroed(self, heads: dict[str, list[int]]) -> Iterator[None]:
        """Within it, the columns of those heads are zero."""
        before = {layer: self.weights[layer].detach().clone() for layer in heads}
        try:
            for layer, gone in heads.items():
                self.by_head[layer](self.weights[layer].data)[gone] = 0
            yield
        finally:
            for layer, weight in before.items():
                self.weights[layer].data.copy_(weight)


def linear(heads: int) -> Callable[[Tensor], Tensor]:
    """The weight (W, H * E) of `nn.Linear` as (H, W, E)."""
    return lambda weight: weight.unflatten(1, (heads, -1)).movedim(1, 0)


def case(model: nn.Module, run: Callable[[], Tensor], projections: dict[str, nn.Module], heads: int) -> Case:
    weights = {layer: projection.weight for layer, projection in projections.items()}
    return Case(model, run, weights, dict.fromkeys(weights, linear(heads)))  # type: ignore[arg-type]


# Models of transformers

PROJECTION = {
    "bert": "../output.dense",
    "roberta": "../output.dense",
    "deberta": "../output.dense",
    "distilbert": "out_lin",
    "albert": "dense",
    "gpt2": "c_proj",
    "gpt_neox": "dense",
    "t5": "o",
    "bart": "out_proj",
    "fsmt": "out_proj",
    "whisper": "out_proj",
    "clip": "out_proj",
    "bloom": "dense",
    "gptj": "out_proj",
    "mpt": "out_proj",
    "xglm": "out_proj",
}
OFTEN = ("bert", "gpt2", "llama", "mistral", "gemma2", "gpt_oss", "t5", "bart", "vit", "bloom", "deberta")


def hf(family: str, implementation: str | None = None, **options: Any) -> Case:
    model, given = hf_models.model(family, implementation, **options), hf_models.inputs(family, **options)
    weights: dict[str, nn.Parameter] = {}
    by_head: dict[str, Callable[[Tensor], Tensor]] = {}
    heads = ZOO[family].sizes.get("num_attention_heads", 3)
    for layer in hf_models.names(family, model, **given):
        if family == "xlnet":  # (W, H, E)
            weights[layer], by_head[layer] = model.get_submodule(layer).o, lambda o: o.movedim(1, 0)
            continue
        projection = model.get_submodule(_path(layer.partition("#")[0], PROJECTION.get(family, "o_proj")))
        weights[layer] = projection.weight
        if family == "gpt2":  # (H * E, W)
            by_head[layer] = lambda weight: weight.unflatten(0, (3, -1))
        else:
            by_head[layer] = linear(heads)
    return Case(model, lambda: model(**given)[0], weights, by_head)


def _path(layer: str, projection: str) -> str:
    up = projection.startswith("../")
    return f"{layer.rpartition('.')[0]}.{projection[3:]}" if up else f"{layer}.{projection}"


# Models of torch

NONE = torch.zeros(B, M, dtype=torch.bool)
LAST = torch.tensor([[False] * M, [False] * 8 + [True] * (M - 8)])
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # of the module, and of its call
    "batch first": ({"batch_first": True}, {}),
    "sequence first": ({}, {}),
    "no weights": ({"batch_first": True}, {"need_weights": False}),
    "sequence first, no weights": ({}, {"need_weights": False}),
    "weights of each head": ({"batch_first": True}, {"average_attn_weights": False}),
    "no biases": ({"batch_first": True, "bias": False}, {}),
    "one more key": ({"batch_first": True, "add_bias_kv": True}, {}),
    "one more zero": ({"batch_first": True, "add_zero_attn": True}, {"need_weights": False}),
    "padded": ({"batch_first": True}, {"key_padding_mask": LAST}),
    "padded, no weights": ({}, {"key_padding_mask": LAST, "need_weights": False}),
    "a float mask": ({"batch_first": True}, {"attn_mask": noise(N, M)}),
    "a mask of each head": ({}, {"attn_mask": noise(B * H, N, M) > 1, "need_weights": False}),
    "other widths": ({"batch_first": True, "kdim": 7, "vdim": 13}, {}),
}


def torch_layer(way: str, *, alone: bool = False) -> Case:
    options, call = WAYS[way]
    model = WithMemory(drawn(nn.MultiheadAttention(W, H, **options)))
    x, k, v = noise(B, N, W), noise(B, M, options.get("kdim", W), seed=6), noise(B, M, options.get("vdim", W), seed=7)
    x, k, v = (y if options.get("batch_first") else y.transpose(0, 1) for y in (x, k, v))
    return case(model, lambda: model(x, k, v, **call)[0], {"layer": model.layer.out_proj}, H)


def torch_self(*, batch_first: bool = True, alone: bool = False, **call: Any) -> Case:
    model = WithMemory(drawn(nn.MultiheadAttention(W, H, batch_first=batch_first)))
    x = noise(N, W) if alone else noise(B, N, W) if batch_first else noise(N, B, W)
    return case(model, lambda: model(x, x, x, **call)[0], {"layer": model.layer.out_proj}, H)


def torch_encoder(*, batch_first: bool = True, padded: bool = False, **options: Any) -> Case:
    block = nn.TransformerEncoderLayer(28, 4, 13, batch_first=batch_first, dropout=0.0)
    model, x = drawn(nn.TransformerEncoder(block, 2, **options)), noise(B, N, 28)
    mask = torch.tensor([[False] * N, [False] * 4 + [True] * (N - 4)]) if padded else None
    x = x if batch_first else x.transpose(0, 1)
    outs = {f"layers.{i}.self_attn": model.layers[i].self_attn.out_proj for i in range(2)}  # type: ignore[union-attr]
    return case(model, lambda: model(x, src_key_padding_mask=mask), outs, 4)  # type: ignore[arg-type]


def torch_decoder() -> Case:
    model = drawn(nn.TransformerDecoder(nn.TransformerDecoderLayer(28, 4, 13, batch_first=True, dropout=0.0), 2))
    x, memory = noise(B, N, 28), noise(B, M, 28, seed=6)
    outs = {
        f"layers.{i}.{name}": getattr(model.layers[i], name).out_proj
        for i in range(2)
        for name in ("self_attn", "multihead_attn")
    }
    return case(model, lambda: model(x, memory), outs, 4)


def torch_whole() -> Case:
    model = drawn(nn.Transformer(28, 4, 1, 1, 13, dropout=0.0, batch_first=True))
    x, y = noise(B, M, 28), noise(B, N, 28, seed=6)
    names = ("encoder.layers.0.self_attn", "decoder.layers.0.self_attn", "decoder.layers.0.multihead_attn")
    return case(model, lambda: model(x, y), {n: model.get_submodule(n).out_proj for n in names}, 4)  # type: ignore


# Models of regard


def regard_layer(**options: Any) -> Case:
    model = WithMemory(drawn(MultiHeadAttention(W, 6, head_dim=D, **options)))
    x = noise(B, N, W)
    return case(model, lambda: model(x, mask=Causal()), {"layer": model.layer.out_proj}, 6)


def regard_model(kind: type[Encoder | Decoder], **options: Any) -> Case:
    config = ModelConfig(
        layers=2,
        embed_dim=42,
        num_heads=6,
        num_kv_heads=3,
        head_dim=14,
        vocabulary=97,
        inner=47,
        context=37,
        **{"norm": "rms", **options},
    )
    model, ids = drawn(kind(config)), hf_models.some_ids()
    keep = torch.ones_like(ids, dtype=torch.bool)
    keep[1, 8:] = False
    outs = {f"blocks.{i}.attention": model.blocks[i].attention.out_proj for i in range(2)}  # type: ignore[union-attr]
    return case(model, lambda: model(ids, keep=keep)[keep], outs, 6)  # type: ignore[arg-type]


def swapped(split: bool) -> Case:
    made = torch_self()
    model = swap(made.model, split=split)
    if not split:
        return Case(model, made.run, made.weights, made.by_head)
    x = noise(B, N, W)
    return case(model, lambda: model(x, x, x)[0], {"layer.layer": model.layer.layer.out_proj}, H)


def by_hand(core: Core, *, batch: int = B, queries: int = N, memory: bool = False) -> Case:
    model, x = made(Hand(core)), noise(batch, queries, W)
    more = (noise(batch, M, W, seed=6),) if memory else ()
    return case(model, lambda: model(x, *more), {"layer": model.layer.o}, H)


def by_hand_too(layer: Any, x: Tensor, heads: int) -> Case:
    model = made(layer)
    return case(model, lambda: model(x), {"layer": model.layer.o}, heads)


def fused(**options: Any) -> Case:
    model, x = made(Fused(options)), noise(B, N, W)
    return case(model, lambda: model(x, x), {"layer": model.layer.o}, 6)


CASES: dict[str, Callable[[], Case]] = {
    **{family: lambda f=family: hf(f) for family in ZOO if family not in ("fsmt", "albert")},
    **{f"{family}, eager": lambda f=family: hf(f, "eager") for family in OFTEN if ZOO[family].sdpa},
    **{f"{family}, padded": lambda f=family: hf(f, padded=True) for family in OFTEN if hf_models.can_be_padded(family)},
    **{f"torch, {way}": lambda w=way: torch_layer(w) for way in WAYS},
    "torch, self": lambda: torch_self(),
    "torch, self, sequence first": lambda: torch_self(batch_first=False, need_weights=False),
    "torch, self, one text": lambda: torch_self(alone=True),
    "torch, causal": lambda: torch_self(attn_mask=~causal(), is_causal=True, need_weights=False),
    "torch, causal, weights": lambda: torch_self(batch_first=False, attn_mask=~causal(), is_causal=True),
    "torch, encoder": lambda: torch_encoder(),
    "torch, encoder, sequence first": lambda: torch_encoder(batch_first=False, enable_nested_tensor=False),
    "torch, encoder, padded": lambda: torch_encoder(padded=True, enable_nested_tensor=False),
    "torch, decoder": torch_decoder,
    "torch, both": torch_whole,
    "regard": lambda: regard_layer(),
    "regard, grouped, sinks": lambda: regard_layer(num_kv_heads=3, sinks=True, softcap=3.0),
    "regard, one kv head": lambda: regard_layer(num_kv_heads=1, value_head_dim=3),
    "regard, encoder": lambda: regard_model(Encoder),
    "regard, encoder, post": lambda: regard_model(Encoder, order="post", norm="layer"),
    "regard, decoder": lambda: regard_model(Decoder, causal=True, positions="rotary"),
    "regard, decoder, parallel": lambda: regard_model(Decoder, causal=True, order="parallel", window=5),
    "swapped": lambda: swapped(False),
    "swapped, split": lambda: swapped(True),
    "fused": lambda: fused(),
    "fused, grouped": lambda: fused(enable_gqa=True, is_causal=True),
}
CASES |= {
    "by hand, sequence first": lambda: by_hand_too(SequenceFirst(), noise(N, B, W), 3),
    "by hand, in groups": lambda: by_hand_too(Grouped(), noise(B, N, W), 6),
    "fsmt": lambda: hf("fsmt"),
}
CASES |= {f"by hand, {core.__name__}": lambda c=core: by_hand(c) for core in [*CORES, *MASKED]}
CASES |= {f"by hand, {core.__name__}, cross": lambda c=core: by_hand(c, memory=True) for core in CORES}
CASES |= {f"by hand, {core.__name__}, one text": lambda c=core: by_hand(c, batch=1) for core in CORES}
CASES |= {f"by hand, {core.__name__}, one token": lambda c=core: by_hand(c, queries=1) for core in CORES}
CASES |= {f"by hand, {core.__name__}, as many texts as heads": lambda c=core: by_hand(c, batch=H) for core in CORES}
CASES |= {f"by hand, {core.__name__}, as many of all": lambda c=core: by_hand(c, batch=H, queries=H) for core in CORES}


def same(got: Tensor, right: Tensor) -> None:
    """Equal to rounding: 1e-12 of the largest in float64, 1e-6 in float32."""
    assert got.shape == right.shape
    error = (got - right).abs().max() / right.abs().max()
    assert error <= (1e-12 if right.dtype == torch.float64 else 1e-6), f"{error:.2e}"


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_zero_is_a_projection_without_its_columns(name: str) -> None:
    """Layer by layer, by name; and all layers at once, by number."""
    one = CASES[name]()
    plain = one.run()
    everywhere = {layer: [0] for layer in one.layers}
    for heads in [*({layer: [0, 2]} for layer in one.layers), everywhere]:
        with one.zeroed(heads):
            right = one.run()
        assert (right - plain).abs().max() > 1e-3 * plain.abs().max(), "heads that do nothing prove nothing"
        with ablate(one.model, heads):
            got = one.run()
        same(got, right)
    with ablate(one.model, {number: [0] for number in range(len(one.layers))}):
        same(one.run(), right)
    assert torch.equal(one.run(), plain)


@pytest.mark.parametrize(
    "name",
    [
        *OFTEN,
        "torch, batch first",
        "torch, no weights",
        "torch, encoder",
        "torch, decoder",
        "regard, decoder",
        "regard, grouped, sinks",
        "swapped",
        "swapped, split",
        "fused, grouped",
        "by hand, by_operator",
        "by hand, by_einsum_keys_first",
        "by hand, heads_first",
        "by hand, heads_times_batch",
        "by hand, batch_times_heads",
    ],
)
def test_gradients_are_those_without_the_columns(name: str) -> None:
    """Of the columns themselves too: what is not used learns nothing."""
    one = CASES[name]()
    layer = one.layers[-1]
    grads: list[dict[str, Tensor]] = []
    for by_hand in (True, False):
        one.model.zero_grad(set_to_none=True)
        with one.zeroed({layer: [0, 2]}) if by_hand else ablate(one.model, {layer: [0, 2]}):
            out = one.run()
            out.mul(noise(*out.shape, seed=9).to(out)).mean().backward()
        if by_hand:
            weight = one.weights[layer]
            one.by_head[layer](weight.grad)[[0, 2]] = 0  # type: ignore[arg-type]
        grads.append({n: p.grad.clone() for n, p in one.model.named_parameters() if p.grad is not None})
    right, got = grads
    assert got.keys() == right.keys()
    assert any(g.any() for g in right.values())
    for parameter in right:
        torch.testing.assert_close(
            got[parameter], right[parameter], atol=1e-12, rtol=1e-9, msg=lambda m, p=parameter: f"{p}: {m}"
        )


def test_gradients_outside_of_the_block() -> None:
    one = CASES["bert"]()
    with ablate(one.model, {0: [1]}):
        out = one.run()
        inside = torch.autograd.grad(out.square().mean(), one.weights[one.layers[1]], retain_graph=True)[0]
    torch.testing.assert_close(torch.autograd.grad(out.square().mean(), one.weights[one.layers[1]])[0], inside)


@pytest.mark.parametrize("call", range(3))
def test_one_call_of_a_module_that_is_called_again(call: int) -> None:
    """ALBERT: "name#2" is its third layer; "name" and "name#0" its first."""
    one = hf("albert")
    base, projection = one.layers[0], one.model.get_submodule(f"{one.layers[0]}.dense")
    calls: list[int] = []

    def hook(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        calls.append(len(calls))
        x = inputs[0].unflatten(-1, (3, -1)).clone()
        x[..., [1], :] *= calls[-1] != call
        return (x.flatten(-2),)

    handle = projection.register_forward_pre_hook(hook)
    right = one.run()
    handle.remove()
    assert len(calls) == 3
    for key in (one.layers[call], f"{base}#{call}", call):
        with ablate(one.model, {key: [1]}):
            same(one.run(), right)


def test_the_names_are_those_of_watch() -> None:
    one = hf("albert")
    with regard.watch(one.model, measures=["entropy"]) as seen, ablate(one.model, {0: [1]}) as changing:
        one.run()
    assert changing.order == seen.layers == one.layers


@torch.no_grad()
def test_heads_that_are_layers() -> None:
    """One after another in a loop, or modules of their own: each is a layer of one head."""
    x = noise(B, N, W)
    loop, apart = by_hand(a_head_after_another), made(Heads())
    for model, projection, layers in (
        (loop.model, loop.model.layer.o, ["layer", "layer#1", "layer#2"]),
        (apart, apart.layer.proj, [f"layer.heads.{i}" for i in range(3)]),
    ):
        one = case(model, lambda model=model: model(x), {"layer": projection}, H)  # type: ignore[arg-type, dict-item]
        for head, layer in enumerate(layers):
            with one.zeroed({"layer": [head]}):
                right = one.run()
            with ablate(model, {layer: [0]}):
                same(one.run(), right)
            assert (one.run() - right).abs().max() > 1e-3


@WITH_MINILM
def test_minilm() -> None:
    model = models.load("minilm", check=False)
    ids = model.encode("The heads of a real model, one of them gone.")
    outs = {f"blocks.{i}.attention": model.blocks[i].attention.out_proj for i in (0, 5)}
    with torch.no_grad():
        one = case(model, lambda: model(ids), outs, 12)
        for heads in ({"blocks.0.attention": [3]}, {"blocks.5.attention": [11, 2], "blocks.0.attention": [0]}):
            with one.zeroed(heads):
                right = one.run()
            with ablate(model, heads):
                got = one.run()
            assert (got - right).abs().max() <= 1e-5 * right.abs().max()
            assert (one.run() - right).abs().max() > 1e-2 * right.abs().max()


def test_a_compiled_model_runs_as_it_was_written() -> None:
    one = by_hand(by_operator)
    with one.zeroed({"layer": [1]}):
        right = one.run()
    compiled, x = torch.compile(one.model), noise(B, N, W)
    with ablate(compiled, {"_orig_mod.layer": [1]}):  # type: ignore[arg-type]
        same(compiled(x), right)


def test_weights_that_are_returned_are_those_of_the_model() -> None:
    model, x = WithMemory(drawn(nn.MultiheadAttention(W, H, batch_first=True))), noise(B, N, W)
    right = model(x, x, x, average_attn_weights=False)[1]
    with ablate(model, {0: [0, 1, 2]}):
        out, weights = model(x, x, x, average_attn_weights=False)
    assert torch.equal(weights, right)
    torch.testing.assert_close(out, model.layer.out_proj.bias.expand_as(out))


# Generation


def prompts(seed: int = 17) -> dict[str, Tensor]:
    ids = hf_models.some_ids(tokens=11, seed=seed)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


class Chat(nn.Module):
    """A model that generates within its own forward."""

    def __init__(self, lm: nn.Module) -> None:
        super().__init__()
        self.lm = lm

    def forward(self, given: dict[str, Tensor], **options: Any) -> Tensor:
        return self.lm.generate(**given, **GREEDY, **options)  # type: ignore[operator]


def scores(model: Any, given: dict[str, Tensor], **options: Any) -> tuple[Tensor, Tensor]:
    """What is generated, and the logits of each step."""
    out = model.generate(**given, **GREEDY, **options, return_dict_in_generate=True, output_logits=True)
    return out.sequences, torch.stack(out.logits)


GENERATION = [
    ("llama", {}),
    ("llama", {"cache_implementation": "static"}),
    ("llama", {"use_cache": False}),
    ("mistral", {}),
    ("mistral", {"cache_implementation": "static"}),
    ("gpt2", {}),
    ("gpt_oss", {}),
    ("bloom", {}),
    ("t5", {}),
    ("bart", {"num_beams": 1}),
    ("llama", {"num_beams": 2}),
]


def _said(x: Any) -> str:
    return x if isinstance(x, str) else "_".join(x) or "-"


@pytest.mark.parametrize("family,options", GENERATION, ids=_said)
def test_generation_without_some_heads(family: str, options: dict[str, Any]) -> None:
    one, given = hf(family), prompts()
    heads = {layer: [0, 2] for layer in one.layers}
    plain, _ = scores(one.model, given, **options)
    with one.zeroed(heads):
        right, right_logits = scores(one.model, given, **options)
    with ablate(one.model, heads):  # type: ignore[arg-type]
        got, logits = scores(one.model, given, **options)
    assert torch.equal(got, right)
    same(logits, right_logits)
    assert not torch.equal(got, plain), "heads that do nothing prove nothing"


@pytest.mark.parametrize(
    "family,options",
    [("llama", {}), ("llama", {"cache_implementation": "static"}), ("mistral", {}), ("bloom", {}), ("t5", {})],
    ids=_said,
)
def test_generation_within_a_forward(family: str, options: dict[str, Any]) -> None:
    """One call of the root is many of the model below: all of them are one layer, as `watch` has it."""
    one, given = hf(family), prompts()
    with ablate(one.model, {one.layers[-1]: [0, 1]}):
        right = one.model.generate(**given, **GREEDY, **options)  # type: ignore[operator]
    assert not torch.equal(one.model.generate(**given, **GREEDY, **options), right)  # type: ignore[operator]
    chat = Chat(one.model)
    with regard.watch(chat, measures=[]) as seen, ablate(chat, {f"lm.{one.layers[-1]}": [0, 1]}) as changing:
        assert torch.equal(chat(given, **options), right)
    assert changing.order == seen.layers == [f"lm.{layer}" for layer in one.layers]


@pytest.mark.parametrize("window", [None, 3])
@torch.no_grad()
def test_token_after_token_with_a_cache(window: int | None) -> None:
    """regard's own caches: one that keeps all, one that rolls."""
    one = regard_model(Decoder, causal=True, positions="rotary")
    heads = {"blocks.1.attention": [1, 4]}

    def run() -> Tensor:
        cache = one.model.new_cache(window)  # type: ignore[operator]
        pieces = hf_models.some_ids().split([5, *[1] * 8], dim=1)
        return torch.cat([one.model(piece, cache=cache) for piece in pieces], 1)

    plain = run()
    with one.zeroed(heads):
        right = run()
    with ablate(one.model, heads):  # type: ignore[arg-type]
        same(run(), right)
    assert (plain - right).abs().max() > 0.1


# One in another


@pytest.mark.parametrize(
    "name",
    [
        "bert",
        "t5",
        "bloom",
        "deberta",
        "torch, self",
        "torch, encoder",
        "torch, decoder",
        "torch, no weights",
        "regard, decoder",
        "swapped",
        "swapped, split",
        "fsmt",
        "fused",
        "by hand, by_operator",
        "by hand, by_einsum",
        "by hand, heads_first",
        "by hand, batch_times_heads",
        "by hand, by_operator, as many texts as heads",
    ],
)
@torch.no_grad()
def test_one_ablate_in_another(name: str) -> None:
    one = CASES[name]()
    first, last = one.layers[0], one.layers[-1]
    with ablate(one.model, {first: [0, 1]}):
        right = one.run()
    with ablate(one.model, {first: [1]}), ablate(one.model, {0: [0]}):
        same(one.run(), right)
    with ablate(one.model, {first: [0, 1], last: [2]} if first != last else {first: [0, 1, 2]}):
        right = one.run()
    with ablate(one.model, {first: [0]}), ablate(one.model, {last: [2]}):
        with ablate(one.model, {first: [1]}):
            same(one.run(), right)
        between = one.run()
    assert (between - right).abs().max() > 1e-6


def without(name: str) -> tuple[Case, Tensor, dict[str, Tensor]]:
    """A model of which the first layer has no head 1, by hand: its output, and the entropies of its layers."""
    one = CASES[name]()
    with one.zeroed({one.layers[0]: [1]}):
        right = one.run()
        with regard.watch(one.model, measures=["entropy"]) as seen:
            one.run()
    return one, right, {layer: seen[layer].entropy for layer in seen.layers}


WATCHED = [
    "bert",
    "t5",
    "bloom",
    "deberta",
    "torch, self",
    "torch, encoder",
    "torch, decoder",
    "torch, sequence first",
    "torch, no weights",
    "fsmt",
    "by hand, heads_by_split",
    "by hand, heads_first",
    "regard, decoder",
    "swapped",
    "by hand, by_operator",
    "by hand, by_einsum",
    "by hand, heads_times_batch",
    "by hand, by_operator, as many texts as heads",
]


@pytest.mark.parametrize("name", WATCHED)
@torch.no_grad()
def test_a_watch_around_and_a_watch_inside(name: str) -> None:
    """Both see the model without its head; the one inside also what the heads then give."""
    one, right, entropies = without(name)
    heads = {one.layers[0]: [1]}
    with regard.watch(one.model, measures=["entropy"]) as around, ablate(one.model, heads):  # type: ignore[arg-type]
        same(one.run(), right)
    with ablate(one.model, heads), regard.watch(one.model, measures=["entropy"], keep="qkv") as inside:  # type: ignore
        same(one.run(), right)
    for seen in (around, inside):
        assert seen.layers == list(entropies)
        for layer, entropy in entropies.items():
            close(seen[layer].entropy, entropy, layer)
    with regard.watch(one.model, measures=[], keep="qkv") as plain:
        one.run()
    gone, before = inside[0].output, plain[0].output
    assert not gone[:, 1].any()
    torch.testing.assert_close(gone[:, [0, 2]], before[:, [0, 2]])
    assert before[:, 1].any()


# Afterwards everything is as it was


def footprint(model: nn.Module) -> Any:
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    return hooks, _len_torch_function_stack(), _interface().get_interface, torch._dynamo.eval_frame._stance.stance


class Breaks(Exception):
    pass


@pytest.mark.parametrize("name", ["bert", "t5", "bloom", "torch, encoder", "regard, decoder", "by hand, by_operator"])
def test_put_back_when_the_model_raises(name: str) -> None:
    one = CASES[name]()
    plain, before = one.run(), footprint(one.model)

    def stop(*_: Any) -> None:
        raise Breaks

    handle = one.model.register_forward_hook(stop)
    with pytest.raises(Breaks), ablate(one.model, {one.layers[0]: [0]}):
        one.run()
    handle.remove()
    inner = one.model.get_submodule(one.layers[-1]).register_forward_pre_hook(stop)
    with pytest.raises(Breaks), ablate(one.model, {0: [0]}), regard.watch(one.model):
        one.run()
    inner.remove()
    assert footprint(one.model) == before
    assert torch.equal(one.run(), plain)


def test_put_back_when_a_head_is_not_there() -> None:
    one = CASES["bert"]()
    plain, before = one.run(), footprint(one.model)
    with pytest.raises(ValueError, match=r"heads of .*layer\.1.*self: expected numbers below 3, received \[1, 3\]"):  # noqa: SIM117
        with ablate(one.model, {0: [0], 1: [3, 1]}):
            one.run()
    assert footprint(one.model) == before
    assert torch.equal(one.run(), plain)


def test_the_same_one_twice() -> None:
    """Entered within itself it would leave something behind, and entered again it would remember."""
    one = by_hand(by_operator)
    before, twice = footprint(one.model), ablate(one.model, {0: [0]})
    with twice:
        one.run()
        with pytest.raises(ValueError, match="ablate: expected one block, received the same one entered twice"):
            twice.__enter__()
    assert footprint(one.model) == before


# The mean


def swapped_in(projection: nn.Module, heads: int, which: list[int], other: Callable[[Tensor], Tensor]) -> Any:
    """A hook: what some heads give to a projection, (B, N, H * E), is `other` of all that is given, (B, N, H, E)."""

    def hook(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x = inputs[0].unflatten(-1, (heads, -1))
        chosen = torch.isin(torch.arange(heads), torch.tensor(which))[:, None]
        return (torch.where(chosen, other(x), x).flatten(-2),)

    return projection.register_forward_pre_hook(hook)


PROJECTED = [
    "bert",
    "gpt2",
    "llama",
    "t5",
    "bloom",
    "deberta",
    "regard, decoder",
    "regard, grouped, sinks",
    "fused",
    "by hand, by_operator",
    "by hand, heads_times_batch",
    "by hand, by_operator, cross",
]


def projection_of(one: Case, layer: str) -> tuple[nn.Module, int]:
    weight = one.weights[layer]
    projection = next(m for m in one.model.modules() if getattr(m, "weight", None) is weight)
    return projection, one.by_head[layer](weight).shape[0]


@pytest.mark.parametrize("name", PROJECTED)
@torch.no_grad()
def test_mean_of_the_same_call(name: str) -> None:
    one = CASES[name]()
    layer = one.layers[-1]
    real = None
    if name == "regard, decoder":  # whose second text is padded
        real = torch.arange(hf_models.TOKENS) < torch.tensor([[hf_models.TOKENS], [8]])
    handle = swapped_in(*projection_of(one, layer), [0, 2], SoFar(real))
    right = one.run()
    handle.remove()
    with ablate(one.model, {layer: [0, 2]}, mode="mean"):
        same(one.run(), right)
    assert (one.run() - right).abs().max() > 1e-3 * right.abs().max()


@torch.no_grad()
def test_gradients_flow_through_a_mean_of_the_same_call() -> None:
    one = CASES["bert"]()
    with torch.enable_grad():
        handle = swapped_in(*projection_of(one, one.layers[0]), [1], lambda x: x.mean((0, 1), keepdim=True))
        one.run().square().mean().backward()
        handle.remove()
        right = {n: p.grad.clone() for n, p in one.model.named_parameters() if p.grad is not None}
        one.model.zero_grad(set_to_none=True)
        with ablate(one.model, {0: [1]}, mode="mean"):
            one.run().square().mean().backward()
    for n, p in one.model.named_parameters():
        if n in right:
            torch.testing.assert_close(p.grad, right[n], atol=1e-12, rtol=1e-9)


def seen_of(model: nn.Module, run: Callable[[], Any], **options: Any) -> Any:
    with torch.no_grad(), regard.watch(model, measures=[], **{"keep": "qkv", **options}) as seen:
        run()
    return seen


@torch.no_grad()
def test_mean_of_another_run() -> None:
    """Of other texts, fewer or more, shorter or longer: one vector for each head."""
    model, x, y = made(Hand(by_operator)), noise(B, N, W), noise(5, 3, W, seed=8)
    source = seen_of(model, lambda: model(y))
    means = source[0].output.mean((0, 2))  # (H, E)
    handle = swapped_in(model.layer.o, H, [0, 2], lambda x: means.expand_as(x))
    right = model(x)
    handle.remove()
    with ablate(model, {"layer": [0, 2]}, mode="mean", source=source):
        same(model(x), right)


@torch.no_grad()
def test_mean_of_another_run_in_generation() -> None:
    """The same vector at every step."""
    one, given = hf("llama"), prompts()
    source = seen_of(one.model, one.run)
    layer = one.layers[1]
    means = source[layer].output.mean((0, 2))
    handle = swapped_in(*projection_of(one, layer), [0, 5], lambda x: means.expand_as(x))
    right, logits = scores(one.model, given)
    handle.remove()
    with ablate(one.model, {layer: [0, 5]}, mode="mean", source=source):
        got, got_logits = scores(one.model, given)
    assert torch.equal(got, right)
    same(got_logits, logits)


class SoFar:
    """The mean over everything that a projection was given, in this call and in those before it."""

    def __init__(self, real: Tensor | None = None) -> None:
        self.given: list[Tensor] = []
        self.real = real  # (B, N) of the first call

    def __call__(self, x: Tensor) -> Tensor:
        self.given.append(x[self.real] if self.real is not None and not self.given else x.flatten(0, 1))
        return torch.cat(self.given).mean(0).expand_as(x)


@pytest.mark.parametrize(
    "family,options",
    [("llama", {}), ("llama", {"cache_implementation": "static"}), ("gpt2", {}), ("bloom", {}), ("mistral", {})],
    ids=_said,
)
@torch.no_grad()
def test_mean_of_what_was_read_so_far(family: str, options: dict[str, Any]) -> None:
    """While a model writes, token after token from a cache: of its prompt, and of what it has written."""
    one, given = hf(family), prompts()
    layer = one.layers[1]
    handle = swapped_in(*projection_of(one, layer), [0, 2], SoFar())
    right, logits = scores(one.model, given, **options)
    handle.remove()
    with ablate(one.model, {layer: [0, 2]}, mode="mean"):
        got, got_logits = scores(one.model, given, **options)
        again, _ = scores(one.model, given, **options)  # another text: its mean is its own
    assert torch.equal(got, right)
    assert torch.equal(again, right)
    same(got_logits, logits)
    assert (scores(one.model, given, **options)[1][1:] - logits[1:]).abs().max() > 1e-3  # after the prompt, too


@torch.no_grad()
def test_mean_so_far_with_our_own_cache() -> None:
    one = regard_model(Decoder, causal=True, positions="rotary")
    layer = "blocks.1.attention"

    def run() -> Tensor:
        cache = one.model.new_cache()  # type: ignore[operator]
        return torch.cat([one.model(x, cache=cache) for x in hf_models.some_ids().split([5, 1, 3, 1, 3], dim=1)], 1)

    handle = swapped_in(*projection_of(one, layer), [1, 4], SoFar())
    right = run()
    handle.remove()
    with ablate(one.model, {layer: [1, 4]}, mode="mean"):
        same(run(), right)


@torch.no_grad()
def test_mean_so_far_after_a_call_that_failed() -> None:
    """What a call read that raised does not count."""
    one = regard_model(Decoder, causal=True, positions="rotary")

    def stop(*_: Any) -> None:
        raise Breaks

    with ablate(one.model, {0: [1]}, mode="mean") as changing:
        one.model(hf_models.some_ids())
        kept = dict(changing.sums)
        handle = one.model.get_submodule("norm").register_forward_pre_hook(stop)
        with pytest.raises(Breaks):
            one.model(hf_models.some_ids(tokens=5))
        handle.remove()
        assert len(kept) == 1
        assert changing.sums == kept


@pytest.mark.parametrize("family", ["bert", "llama", "gpt2"])
@torch.no_grad()
def test_mean_without_padding(family: str) -> None:
    """Padded on the right (BERT) or on the left: padding has no part in the mean."""
    model, given = hf_models.model(family, padded=True), hf_models.inputs(family, padded=True)
    real = given["attention_mask"].bool()
    assert not real.all()
    one = hf(family)
    layer = one.layers[0]
    projection, heads = projection_of(one, layer)
    name = next(name for name, module in one.model.named_modules() if module is projection)

    def run() -> Tensor:
        out = model(**given)
        return (out.logits if "logits" in out else out.last_hidden_state)[real]

    handle = swapped_in(model.get_submodule(name), heads, [0, 2], SoFar(real))
    right = run()
    handle.remove()
    with ablate(model, {layer: [0, 2]}, mode="mean"):
        torch.testing.assert_close(run(), right, rtol=1e-4, atol=1e-5)
    source = seen_of(model, run)
    with ablate(model, {layer: [0, 2]}, mode="mean", source=source):
        torch.testing.assert_close(run(), right, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_mean_of_one_token_is_refused() -> None:
    """It would change nothing, and say nothing."""
    model = regard_model(Decoder, causal=True, positions="rotary").model
    words = "mean of blocks.0.attention: expected two tokens at least, for the mean of one is itself, received one; "
    with pytest.raises(ValueError, match=words), ablate(model, {0: [0]}, mode="mean"):
        model(torch.tensor([[5]]))
    source = seen_of(model, lambda: model(hf_models.some_ids()))
    plain = model(torch.tensor([[5]]))
    with ablate(model, {0: [0]}, mode="mean", source=source):
        assert not torch.allclose(model(torch.tensor([[5]])), plain)
    with ablate(model, {0: [0]}, mode="mean"):  # two texts of one token each
        assert not torch.allclose(model(torch.tensor([[5], [7]])), model(torch.tensor([[5], [5]])))


# Another run in the place of this one


ALL = {
    "bert": 3,
    "gpt2": 3,
    "llama": 6,
    "gpt_oss": 6,
    "t5": 3,
    "bart": 3,
    "vit": 3,
    "bloom": 3,
    "deberta": 3,
    "torch, self": 3,
    "torch, encoder": 4,
    "torch, decoder": 4,
    "regard, decoder": 6,
    "swapped": 3,
    "fused": 6,
    "by hand, by_operator": 3,
    "by hand, heads_times_batch": 3,
}


@pytest.mark.parametrize("name", ALL)
@torch.no_grad()
def test_a_patch_of_the_same_input_changes_nothing(name: str) -> None:
    one = CASES[name]()
    right, source = one.run(), seen_of(one.model, one.run)
    with ablate(one.model, {layer: range(ALL[name]) for layer in one.layers}, "patch", source):
        same(one.run(), right)
        same(one.run(), right)  # a second text begins at its beginning


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama", "t5", "bloom"])
@torch.no_grad()
def test_a_patch_of_another_input(family: str) -> None:
    """Activation patching: what goes into the output projection is what went into it in another run."""
    one = hf(family)
    given, layer = hf_models.inputs(family), one.layers[-1]
    corrupted = given | {"input_ids": hf_models.some_ids(seed=29)}
    projection, heads = projection_of(one, layer)
    caught: list[Tensor] = []
    handle = projection.register_forward_pre_hook(lambda _, args: caught.append(args[0]))
    source = seen_of(one.model, lambda: one.model(**corrupted))
    handle.remove()
    handle = swapped_in(projection, heads, [1], lambda x: caught[0].unflatten(-1, (heads, -1)))
    right = one.run()
    handle.remove()
    with ablate(one.model, {layer: [1]}, mode="patch", source=source):
        same(one.run(), right)
    assert (one.run() - right).abs().max() > 1e-6


@pytest.mark.parametrize("family,options", GENERATION[:-1], ids=_said)
def test_a_patch_of_the_same_generation_changes_nothing(family: str, options: dict[str, Any]) -> None:
    """Nor does it when the text is generated once more: it begins at its beginning."""
    one, given = hf(family), prompts()
    with regard.watch(one.model, measures=[], keep="qkv") as source:
        _, right = scores(one.model, given, **options)
    heads = range(ZOO[family].sizes.get("num_attention_heads", 3))
    with ablate(one.model, dict.fromkeys(one.layers, heads), "patch", source):
        for _ in range(2):
            same(scores(one.model, given, **options)[1], right)


def test_a_patch_goes_on_where_it_was() -> None:
    """Step t is patched with query t: by hand, with the rows of the source one after another."""
    one, given, other = hf("llama"), prompts(), prompts(seed=23)
    layer = one.layers[0]
    with regard.watch(one.model, measures=[], keep="qkv") as source:
        one.model.generate(**other, **GREEDY)  # type: ignore[operator]
    rows, at = source[layer].output.transpose(1, 2), [0]

    def part(x: Tensor) -> Tensor:
        at[0] += x.shape[1]
        return rows[:, at[0] - x.shape[1] : at[0]]

    handle = swapped_in(*projection_of(one, layer), [2, 3], part)
    right, logits = scores(one.model, given)
    handle.remove()
    assert at[0] == 11 + NEW - 1
    with ablate(one.model, {layer: [2, 3]}, "patch", source):
        got, got_logits = scores(one.model, given)
    assert torch.equal(got, right)
    same(got_logits, logits)


# What is refused


def test_heads_by_hand_that_cannot_be_told_in_time() -> None:
    model, x = WithMemory(drawn(Unbatched())), noise(N, W)
    with pytest.raises(ValueError, match="expected attention by hand whose heads can be told from the batch"):  # noqa: SIM117
        with ablate(model, {0: [0]}):
            model(x)


def test_layers_that_are_not_there() -> None:
    one = hf("bert")
    ran = r"expected layers of the model: encoder\.layer\.0\.attention\.self, encoder\.layer\.1\.attention\.self"
    for wrong in ("encoder.layer.2.attention.self", "encoder.layer.0", 2, -1, f"{one.layers[0]}#1"):
        with pytest.raises(ValueError, match=rf"heads: {ran}, received {wrong!r}"):  # noqa: SIM117
            with ablate(one.model, {wrong: [0], 0: [1]}):
                one.run()
    with pytest.raises(ValueError, match="heads: expected layers of the model: none ran in the block, received 0"):  # noqa: SIM117
        with ablate(one.model, {0: [0]}):
            pass


def test_wrong_arguments() -> None:
    model = made(Hand(by_operator))
    with pytest.raises(TypeError, match=r"model: expected a torch\.nn\.Module, received function"):
        ablate(by_operator, {0: [0]})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"heads: expected a mapping from layers to heads, or .* received list; remedy"):
        ablate(model, [0, 1])  # type: ignore[arg-type]
    for heads in (3, "layer", None):
        with pytest.raises(TypeError, match="heads: expected a mapping from layers to heads, or heads such as"):
            ablate(model, heads)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="heads: expected one head at least, received an empty list; remedy: seen"):
        ablate(model, [])
    for layer in (True, None, 0.0, ("layer",)):
        with pytest.raises(TypeError, match="heads: expected layers by name or by number, received"):
            ablate(model, {layer: [0]})  # type: ignore[dict-item]
    for which in (True, "01", None, 1.0, b"0", {0: 1}):
        with pytest.raises(TypeError, match="heads of 'layer': expected a list of head numbers, received"):
            ablate(model, {"layer": which})  # type: ignore[dict-item]
    for which in ([True], [0.0], ["0"], [None], torch.tensor([True]), torch.tensor([0.0])):
        with pytest.raises(TypeError, match=r"heads of 'layer': expected a list .* received .* among them"):
            ablate(model, {"layer": which})  # type: ignore[dict-item]
    for which in (-1, [0, -1]):
        with pytest.raises(ValueError, match="heads of 'layer': expected head numbers from 0, received -1"):
            ablate(model, {"layer": which})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="heads of 'layer': expected each head once, received 1 more than once"):
        ablate(model, {"layer": [1, 0, 1]})
    with pytest.raises(ValueError, match='mode: expected "zero", "mean", "patch" or "hide", received \'none\''):
        ablate(model, {0: [0]}, mode="none")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match='source: expected a record of another run for mode="patch", received none; '):
        ablate(model, {0: [0]}, mode="patch")
    with pytest.raises(TypeError, match="source: expected a record that `watch` gave, received Tensor"):
        ablate(model, {0: [0]}, mode="mean", source=torch.zeros(3))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match='source: expected none for mode="zero", received a record; remedy'):
        ablate(model, {0: [0]}, source=regard.heads.Record())


def test_heads_in_any_form() -> None:
    one = by_hand(by_operator)
    with ablate(one.model, {0: 1}), torch.no_grad():  # type: ignore[dict-item]
        got = one.run()
    for which in ((1,), {1}, range(1, 2), iter([1]), torch.tensor([1]), torch.tensor(1)):
        with ablate(one.model, {"layer#0": which}), torch.no_grad():
            assert torch.equal(one.run(), got)
    with ablate(one.model, {"layer": [1], 0: [1]}), torch.no_grad():  # the same layer by two names
        assert torch.equal(one.run(), got)
    with ablate(one.model, {0: []}), torch.no_grad():
        assert not torch.equal(one.run(), got)


def test_heads_that_have_a_role() -> None:
    """What `roles` gives is what `ablate`, `leave_one_out` and `prune` take."""
    model, ids = regard_model(Encoder).model, hf_models.some_ids()
    with regard.watch(model) as seen, torch.no_grad():
        model(ids)
    some = [one for one in seen.roles() if one.head % 2]
    by_name = {layer: [1, 3, 5] for layer in seen.layers}
    with ablate(model, by_name), torch.no_grad():  # type: ignore[arg-type]
        right = model(ids)
    for heads in (some, tuple(some), iter(some)):
        with ablate(model, heads), torch.no_grad():
            assert torch.equal(model(ids), right)
    scores = regard.heads.leave_one_out(model, lambda model, x: model(x).square().mean(), [ids], heads=some[:1])
    assert [(layer, head) for layer, head, _ in scores.ranked()] == [(seen.layers[0], 1)]
    pruned = regard.prune(model, some)
    assert [block.attention.num_heads for block in pruned.blocks] == [3, 3]  # type: ignore[union-attr]
    with torch.no_grad():
        same(pruned(ids), right)


@pytest.mark.parametrize("mode", ["mean", "patch"])
@torch.no_grad()
def test_sources_that_do_not_serve(mode: Any) -> None:
    model, x = made(Hand(by_operator)), noise(B, N, W)

    def refused(words: str, source: Any, given: Tensor = x, model: nn.Module = model) -> None:
        with pytest.raises(ValueError, match=words), ablate(model, {0: [0]}, mode, source):
            model(given)

    refused(
        'output: expected a watch with keep="qkv", received one that did not',
        seen_of(model, lambda: model(x), keep="qk"),
    )
    twice = seen_of(model, lambda: [model(x), model(x)])
    refused(
        "source: expected a record of one forward, for the outputs of the last alone are kept, received one of 2", twice
    )
    bert = hf("bert")
    refused(r"source: expected a record of layer, received one of \['encoder", seen_of(bert.model, bert.run))
    more = made(Hand(by_operator, heads=5))
    refused(
        r"source of layer: expected heads and their width as in \(2, 3, 7, 4\), received \(2, 5, 7, 4\)",
        seen_of(more, lambda: more(x)),
    )
    if mode == "patch":
        source = seen_of(model, lambda: model(x))
        refused(
            r"source of layer: expected outputs \(5, 3, 7, 4\), received \(2, 3, 7, 4\), of which queries 0 to 7",
            source,
            noise(5, N, W),
        )
        refused(
            r"source of layer: expected outputs \(2, 3, 11, 4\), received \(2, 3, 7, 4\), of which queries 0 to 11",
            source,
            noise(B, M, W),
        )


def test_a_patch_that_is_longer_than_its_source() -> None:
    one, given = hf("llama"), prompts()
    source = seen_of(one.model, lambda: one.model(**given))
    words = r"expected outputs \(2, 6, 1, 14\), received \(2, 6, 11, 14\), of which queries 11 to 12 are wanted"
    with pytest.raises(ValueError, match=words), ablate(one.model, {0: [0]}, "patch", source):
        one.model.generate(**given, **GREEDY)  # type: ignore[operator]


def test_dropout_of_torch() -> None:
    model, x = WithMemory(drawn(nn.MultiheadAttention(W, H, dropout=0.3, batch_first=True))), noise(B, N, W)
    with ablate(model, {0: [0]}):
        model(x, x, x)
    model.train()
    words = (
        "nn.MultiheadAttention: expected no dropout where heads are changed, received dropout 0.3 in training; remedy"
    )
    with pytest.raises(ValueError, match=re.escape(words)), ablate(model, {0: [0]}):
        model(x, x, x)


class Checkpointed(nn.Module):
    """Two layers, the second of them computed again in the backward pass."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.second, self.reentrant = drawn(Hand(by_operator)), drawn(Hand(by_operator)), reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.second, self.first(x), use_reentrant=self.reentrant)  # type: ignore[return-value]


WORDS = "expected no checkpointing where heads are changed, received a checkpointed layer; remedy: turn it off"


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_of_torch(reentrant: bool) -> None:
    model, x = Checkpointed(reentrant).train(), noise(B, N, W)
    with pytest.raises(ValueError, match=f"second: {WORDS}"), ablate(model, {"second": [0]}):
        model(x)
    with pytest.raises(ValueError, match=f"second: {WORDS}"):
        regard.heads.importance(model, lambda model, x: model(x).square().mean(), [x])
    # The other layer is not computed again, and may be changed: its gradients are right.
    weight = model.first.o.weight
    grads = []
    for again in (True, False):
        inner = model if again else nn.Sequential(model.first, model.second)
        weight.grad = None
        with ablate(inner, {0: [0]}):
            loss = inner(x).square().mean()
        loss.backward()
        grads.append(weight.grad)
    torch.testing.assert_close(grads[0], grads[1])


@pytest.mark.parametrize("family", ["bert", "llama", "t5"])
def test_checkpoints_of_transformers(family: str) -> None:
    """In training they are there, in evaluation not."""
    one = hf(family)
    one.model.gradient_checkpointing_enable()  # type: ignore[operator]
    with ablate(one.model, {0: [0]}):
        one.run()
    one.model.train()
    with pytest.raises(ValueError, match=WORDS), ablate(one.model, {0: [0]}):
        one.run()


def test_checkpoints_wherever_torch_is() -> None:
    """Known by the name of torch's module, however a system writes the path to its file."""
    path = r"C:\Python\Lib\site-packages\torch\utils\checkpoint.py"
    torchs = {"__name__": "torch.utils.checkpoint", "refuse": refuse_checkpoints}
    with pytest.raises(ValueError, match="layer: expected no checkpointing where heads are changed"):
        exec(compile("refuse('layer')", path, "exec"), torchs)


def test_a_head_by_hand_is_dense_without_it() -> None:
    """Weights are those of the model: only what the head gives is gone."""
    model, x = made(Hand(by_operator)), noise(B, N, W)
    with ablate(model, {0: [0]}), regard.watch(model, keep="qk") as seen, torch.no_grad():
        model(x)
    close(seen[0].weights(), dense(model, x), "weights", 1e-12)
