"""A watch in the corners: caches that are cut or shared, memory written over, layouts that only the module knows."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from heads import hf_models
from heads.oracle import Oracle, agree, close, wanted
from heads.oracle_hands import (
    B,
    Core,
    D,
    E,
    Fused,
    H,
    Hand,
    N,
    W,
    Weights,
    WithMemory,
    by_operator,
    causal,
    dense,
    drawn,
    made,
    noise,
)
from models.tiny import save, some_ids
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import regard
from regard.models import generation
from regard.models.generation import Rules

pytestmark = pytest.mark.on_device

GREEDY: dict[str, Any] = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}


def watched(model: nn.Module, *args: Any, keep: Any = None, **options: Any) -> Any:
    with torch.no_grad(), regard.watch(model, measures=wanted(), keep=keep) as seen:
        model(*args, **options)
    return seen


# Forwards that are not one text each


@pytest.mark.parametrize("family", ["llama", "bert"])
def test_gradient_checkpointing_of_transformers(family: str) -> None:
    """The backward pass computes forwards again: they are no further text."""
    model, given = hf_models.model(family), hf_models.inputs(family)
    oracles = hf_models.eager(family, hf_models.model(family, "eager"), given)
    model.gradient_checkpointing_enable()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    with regard.watch(model.train(), measures=wanted()) as seen:
        model(**given)[0].sum().backward()
    assert seen.layers == list(oracles)
    for name, oracle in oracles.items():
        agree(seen[name], Oracle(oracle.weights))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_by_hand(reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = drawn(Hand(by_operator))

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.layer, x, use_reentrant=reentrant)

    model, x = Checkpointed(), noise(B, N, W).requires_grad_()
    with regard.watch(model, measures=wanted()) as seen:
        model(x).sum().backward()
    assert seen.layers == ["layer"]
    agree(seen["layer"], Oracle(dense(model, x)))


def test_a_forward_that_raised_does_not_count() -> None:
    """Someone catches the error within the block, and runs the model again."""
    model, given, broken = hf_models.model("bert"), hf_models.inputs("bert"), [True]
    oracles = hf_models.eager("bert", hf_models.model("bert", "eager"), given)

    def stop(*_: Any) -> None:
        if broken:
            raise KeyError(broken.pop())

    model.encoder.layer[1].attention.self.register_forward_pre_hook(stop)
    with torch.no_grad(), regard.watch(model, measures=wanted()) as seen:
        with pytest.raises(KeyError):
            model(**given)
        model(**given)
    for name, oracle in oracles.items():
        agree(seen[name], Oracle(oracle.weights))


@pytest.mark.parametrize("family", ["gpt2", "bloom", "gptj", "mistral", "gpt_oss", "bart", "fsmt"])
def test_beams_are_refused_whatever_the_cache(family: str) -> None:
    given = {"input_ids": hf_models.inputs(family)["input_ids"]}
    model = hf_models.model(family)
    with pytest.raises(ValueError, match=r"(?i)beam"), regard.watch(model):
        model.generate(**given, max_new_tokens=6, min_new_tokens=6, do_sample=False, num_beams=3)


def test_speculation_is_refused() -> None:
    """Guessed tokens are read, and what was guessed wrong is cut from the cache again: the pieces that were seen are no
    text. (The prompt repeats itself, so that there is a guess; the model, of random weights, does not.)"""
    model, ids = hf_models.model("llama"), torch.tensor([[5, 6, 7, 8, 5, 6, 7, 8, 5, 6, 7]])
    options = {"max_new_tokens": 9, "min_new_tokens": 9, "do_sample": False, "prompt_lookup_num_tokens": 3}
    words = "expected a cache that is added to, received one that was cut, as in assisted generation and prompt lookup"
    with pytest.raises(ValueError, match=words), regard.watch(model, measures=wanted()):
        model.generate(ids, attention_mask=torch.ones_like(ids), **options)


def test_a_talk_that_goes_on_with_its_cache() -> None:
    model, ids = hf_models.model("llama"), hf_models.some_ids(1, 5)
    cache = transformers.DynamicCache(config=model.config)
    with regard.watch(model, measures=wanted(ids=True)) as seen:
        said = model.generate(ids, past_key_values=cache, **GREEDY)
        said = torch.cat([said, hf_models.some_ids(1, 3, seed=9)], 1)
        said = model.generate(said, past_key_values=cache, **GREEDY)
    right = hf_models.eager("llama", hf_models.model("llama", "eager"), {"input_ids": said[:, :-1]})
    for name, oracle in right.items():
        agree(seen[name], Oracle(oracle.weights, ids=oracle.ids))


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_prompt_read_in_pieces(family: str) -> None:
    model, ids = hf_models.model(family), hf_models.some_ids()
    with regard.watch(model, measures=wanted(ids=True)) as seen:
        out = model.generate(ids, attention_mask=torch.ones_like(ids), prefill_chunk_size=4, **GREEDY)
    right = hf_models.eager(family, hf_models.model(family, "eager"), {"input_ids": out[:, :-1]})
    for name, oracle in right.items():
        agree(seen[name], Oracle(oracle.weights, ids=oracle.ids))


def test_several_texts_from_one_prompt() -> None:
    model, ids = hf_models.model("llama"), hf_models.some_ids(2, 5)
    torch.manual_seed(1)
    with regard.watch(model, measures=wanted()) as seen:
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), **GREEDY | {"do_sample": True}, num_return_sequences=3
        )
    right = hf_models.eager("llama", hf_models.model("llama", "eager"), {"input_ids": out[:, :-1]})
    for name, oracle in right.items():
        agree(seen[name], Oracle(oracle.weights))


# Memory written over


def _heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def dropped_in_place(hand: Hand, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Weights]:
    q, k, v = _heads(q, k, v)
    p = (q @ k.mT).softmax(-1)
    before = p.clone()
    p = F.dropout(p, 0.5, training=True, inplace=True)
    return (p @ v).transpose(1, 2), lambda: before


def cleared_afterwards(hand: Hand, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Weights]:
    q, k, v = _heads(q, k, v)
    p = (q @ k.mT).softmax(-1)
    before = p.clone()
    out = (p @ v).transpose(1, 2)
    p.zero_()
    return out, lambda: before


def masked_in_place(hand: Hand, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Weights]:
    q, k, v = _heads(q, k, v)
    s = q @ k.mT
    s.masked_fill_(~causal(), -math.inf)
    p = s.softmax(-1)
    return (p @ v).transpose(1, 2), lambda: p


@pytest.mark.parametrize("core", [dropped_in_place, cleared_afterwards, masked_in_place], ids=lambda c: c.__name__)
def test_weights_written_over(core: Core) -> None:
    model, x = made(Hand(core)), noise(B, N, W)
    with torch.no_grad():
        right = dense(model, x)
    seen = watched(model, x, keep="qk")
    agree(seen["layer"], Oracle(right))
    close(seen["layer"].weights(), right, "weights")


class Overwriting(Fused):
    """Its q and k are memory that it uses again."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        q, k, v = self.heads(x, y)
        out = F.scaled_dot_product_attention(q, k, v)
        q.zero_()
        k.zero_()
        return self.o(out.transpose(1, 2).flatten(2))


def test_kept_queries_and_keys_written_over() -> None:
    layer, x = drawn(Overwriting({})), noise(B, N, W)
    with torch.no_grad():
        right = layer.weights(x, x)
    close(watched(WithMemory(layer), x, x, keep="qk")["layer"].weights(), right, "weights")


# Other ways to write it


def by_ellipsis(hand: Hand, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Weights]:
    q, k, v = _heads(q, k, v)
    p = torch.einsum("... i d, ... j d -> ... i j", q, k).softmax(dim=-1)
    return torch.einsum("... i j, ... j d -> ... i d", p, v).transpose(1, 2), lambda: p


def by_transposed_product(hand: Hand, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Weights]:
    q, k, v = _heads(q, k, v)
    p = (q @ k.mT).softmax(-1)
    return (v.mT @ p.mT).mT.transpose(1, 2), lambda: p


def by_values_first(hand: Hand, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Weights]:
    p = torch.einsum("b q h d, b k h d -> b h q k", q, k).softmax(-1)
    return torch.einsum("bkhd,bhqk->bqhd", v, p), lambda: p


def added_to_something(hand: Hand, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Weights]:
    b = q.shape[0]
    q, k, v = (x.transpose(1, 2).reshape(b * H, x.shape[1], x.shape[3]) for x in (q, k, v))
    p = torch.bmm(q, k.mT).softmax(-1)
    out = torch.baddbmm(torch.zeros(b * H, q.shape[1], E, dtype=q.dtype), p, v)
    return out.view(b, H, -1, E).transpose(1, 2), lambda: p.unflatten(0, (b, H))


def with_a_column_for_nothing(hand: Hand, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Weights]:
    q, k, v = _heads(q, k, v)
    p = F.pad(q @ k.mT, (0, 1)).softmax(-1)[..., :-1]
    return (p @ v).transpose(1, 2), lambda: p


def by_one_projection(hand: Hand, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Weights]:
    """As timm: one tensor for q, k and v, cut apart."""
    qkv = torch.stack([q, k, F.pad(v, (0, D - E))], 2)  # (B, N, 3, H, D)
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    p = (q * D**-0.5 @ k.transpose(-2, -1)).softmax(dim=-1)
    return (hand.dropout(p) @ v).transpose(1, 2)[..., :E], lambda: p


def renormalised(hand: Hand, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Weights]:
    q, k, v = _heads(q, k, v)
    p = (q @ k.mT).softmax(-1) * torch.linspace(0.1, 1, k.shape[2], dtype=q.dtype)
    p = p / p.sum(-1, keepdim=True)
    return (p @ v).transpose(1, 2), lambda: p


OTHER = [
    by_ellipsis,
    by_transposed_product,
    by_values_first,
    added_to_something,
    with_a_column_for_nothing,
    by_one_projection,
    renormalised,
]


@pytest.mark.parametrize("core", OTHER, ids=lambda core: core.__name__)
def test_other_ways(core: Core) -> None:
    model, x = made(Hand(core)), noise(B, N, W)
    seen = watched(model, x)
    assert seen.layers == ["layer"]
    agree(seen["layer"], Oracle(dense(model, x)))


class OneHead(nn.Module):
    """No batch, no heads: (N, M) by `torch.mm`."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(W, W) for _ in range(3))

    def weights(self, x: Tensor) -> Tensor:
        return torch.softmax(torch.mm(self.q(x), self.k(x).t()), 1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.mm(self.weights(x), self.v(x))


def test_one_head_and_no_batch() -> None:
    model, x = made(OneHead()), noise(N, W)
    with torch.no_grad():
        right = model.layer.weights(model.norm(x))[None, None]
    agree(watched(model, x)["layer"], Oracle(right))


# Layouts of F.scaled_dot_product_attention that only the module knows

Turn = Callable[[Tensor], Tensor]
LAYOUTS: dict[str, tuple[Turn, Turn, Turn]] = {  # (B, N, H, D) in; out again; weights as (B, H, N, M)
    "(B * H, N, D)": (
        lambda x: x.transpose(1, 2).flatten(0, 1),
        lambda x: x.unflatten(0, (-1, H)).transpose(1, 2),
        lambda p: p.unflatten(0, (-1, H)),
    ),
    "(H * B, N, D)": (
        lambda x: x.permute(2, 0, 1, 3).flatten(0, 1),
        lambda x: x.unflatten(0, (H, -1)).permute(1, 2, 0, 3),
        lambda p: p.unflatten(0, (H, -1)).transpose(0, 1),
    ),
    "(H, B, N, D)": (lambda x: x.permute(2, 0, 1, 3), lambda x: x.permute(1, 2, 0, 3), lambda p: p.transpose(0, 1)),
}


class Laid(nn.Module):
    def __init__(self, layout: str) -> None:
        super().__init__()
        self.layout = layout
        self.q, self.k, self.v, self.o = (nn.Linear(W, W) for _ in range(4))

    def heads(self, x: Tensor) -> list[Tensor]:
        return [LAYOUTS[self.layout][0](p(x).unflatten(-1, (H, D))) for p in (self.q, self.k, self.v)]

    def weights(self, x: Tensor) -> Tensor:
        q, k, _ = self.heads(x)
        return LAYOUTS[self.layout][2]((q @ k.mT * D**-0.5).softmax(-1))

    def forward(self, x: Tensor) -> Tensor:
        return self.o(LAYOUTS[self.layout][1](F.scaled_dot_product_attention(*self.heads(x))).flatten(2))


@pytest.mark.parametrize("batch", [B, H], ids=["", "as many as heads"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_scaled_dot_product_attention(layout: str, batch: int) -> None:
    model, x = made(Laid(layout)), noise(batch, N, W)
    with torch.no_grad():
        right = model.layer.weights(model.norm(x))
    agree(watched(model, x)["layer"], Oracle(right))


# Self or cross, where no argument says so


class Sourced(Hand):
    def forward(self, x: Tensor, source: Tensor) -> Tensor:
        return super().forward(x, source)


def test_cross_attention_by_another_name() -> None:
    """To as many keys as there are queries, so that the sizes do not tell."""
    model, x, y = made(Sourced(by_operator)), noise(B, N, W), noise(B, N, W, seed=8)
    assert watched(model, x, y)["layer"].kind == "cross"
    assert watched(WithMemory(drawn(Fused({}))), x, y)["layer"].kind == "cross"


class Joint(Hand):
    """Text and image as one sequence: to the text, `encoder_hidden_states` is no memory."""

    def forward(self, x: Tensor, encoder_hidden_states: Tensor) -> Tensor:
        both = torch.cat([encoder_hidden_states, x], 1)
        return super().forward(both, both)[:, encoder_hidden_states.shape[1] :]


def test_joint_attention_is_self_attention() -> None:
    model, x = made(Joint(by_operator)), noise(B, N, W)
    for text in (3, N):
        layer = watched(model, x, noise(B, text, W, seed=8))["layer"]
        assert (layer.kind, layer.shape[2:]) == ("self", (N + text, N + text))


class Placed(nn.Module):
    """As in DETR: positions are added to q and k anew, and not to v."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(W, H, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        places = noise(N, W, seed=4)
        return self.inner(x + places, x + places, x, need_weights=False)[0]


def test_self_attention_whose_queries_and_keys_are_sums() -> None:
    assert watched(made(Placed()), noise(B, N, W))["layer.inner"].kind == "self"


# What is not attention, though a product


class Mixed(nn.Module):
    """A softmax over experts, or over a vocabulary, and a product with what they say: no token looks at another."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.layer = kind, drawn(Hand(by_operator))
        self.gate, self.book = nn.Linear(W, 3), nn.Parameter(torch.randn(3, W))
        self.experts = nn.ModuleList([nn.Linear(W, W) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        shares = self.gate(x).softmax(-1)  # (B, N, 3)
        if self.kind == "book":
            return shares @ self.book
        outs = torch.stack([expert(x) for expert in self.experts], -2)  # (B, N, 3, W)
        return (shares[..., None, :] @ outs)[..., 0, :]


@pytest.mark.parametrize("kind", ["experts", "book"])
def test_products_that_are_not_attention(kind: str) -> None:
    model = Mixed(kind).double()
    assert watched(model, noise(B, N, W)).layers == ["layer"]


# Arguments, precision, company


def test_a_later_call_of_a_module_can_be_chosen() -> None:
    model, given = hf_models.model("albert"), hf_models.inputs("albert")
    oracles = hf_models.eager("albert", hf_models.model("albert", "eager"), given)
    name = list(oracles)[1]
    with torch.no_grad(), regard.watch(model, measures=wanted(), layers=[name]) as seen:
        model(**given)
    assert seen.layers == [name]
    agree(seen[name], Oracle(oracles[name].weights))


@pytest.mark.parametrize("family", ["llama", "bert", "gpt_oss", "bloom"])
def test_bfloat16(family: str) -> None:
    model, given = hf_models.model(family, "eager").to(torch.bfloat16), hf_models.inputs(family)
    oracles = hf_models.eager(family, model, given)
    with torch.no_grad(), regard.watch(model) as seen:
        model(**given)
    for name, oracle in oracles.items():
        close(seen[name].entropy, oracle.entropy(), "entropy", 0.06)
        assert seen[name].entropy.dtype == torch.float32


def test_large_maps_of_an_eager_model() -> None:
    """Beyond some size the weights are not built; unless someone asks the model itself for them."""
    sizes = {
        "num_hidden_layers": 1,
        "hidden_size": 12,
        "num_attention_heads": 3,
        "intermediate_size": 7,
        "vocab_size": 97,
        "max_position_embeddings": 2400,
    }
    config = transformers.BertConfig(**sizes)
    config._attn_implementation = "eager"
    model, ids = transformers.BertModel(config).eval(), hf_models.some_ids(1, 2400)
    with torch.no_grad():
        right = model(ids, output_attentions=True)
        for asked in (False, True):
            with regard.watch(model, measures=["entropy"]) as seen:
                out = model(ids, output_attentions=asked)
            torch.testing.assert_close(out[0], right[0], atol=1e-5, rtol=1e-5)
            close(seen[0].entropy, Oracle(right.attentions[0]).entropy(), "entropy", 1e-4)
    torch.testing.assert_close(out.attentions, right.attentions)


def test_another_model_of_transformers_is_not_recorded() -> None:
    """Neither in this thread nor in another, which goes on undisturbed."""
    model, other, given = hf_models.model("bert"), hf_models.model("roberta"), hf_models.inputs("bert")
    errors: list[Exception] = []

    def run() -> None:
        try:
            for _ in range(5):
                other(**given)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    with torch.no_grad(), regard.watch(model, measures=wanted()) as seen:
        thread.start()
        other(**given)
        model(**given)
        thread.join()
    assert not errors
    for name, oracle in hf_models.eager("bert", hf_models.model("bert", "eager"), given).items():
        agree(seen[name], Oracle(oracle.weights))


def test_a_model_with_adapters() -> None:
    peft = pytest.importorskip("peft", reason="peft, which makes adapters, is not installed")
    given = hf_models.inputs("llama")
    oracles = hf_models.eager("llama", hf_models.model("llama", "eager"), given)
    model = peft.get_peft_model(hf_models.model("llama"), peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    with torch.no_grad(), regard.watch(model, measures=wanted(ids=True)) as seen:
        model(**given)
    assert seen.layers == [f"base_model.model.{name}" for name in oracles]
    for name, oracle in oracles.items():
        agree(seen[f"base_model.model.{name}"], Oracle(oracle.weights, ids=oracle.ids))


def test_measures_without_ids_say_so() -> None:
    """Where no ids are found, what asks for them is left out, and an error says why."""
    model = made(Hand(by_operator))
    with torch.no_grad(), regard.watch(model, measures=["entropy", "induction"]) as seen:
        model(noise(B, N, W))
    assert seen["layer"].entropy.shape == (B, H, N)
    with pytest.raises(AttributeError, match=r"(?i)\bids\b"):
        _ = seen["layer"].induction


# Models that regard loads itself


def loaded(folder: Path, family: str, **options: Any) -> tuple[Any, Any]:
    """A tiny model, and the same of transformers, eager."""
    original = save(folder, family, **options)
    original.set_attn_implementation("eager")
    return regard.models.load(folder), original


LOADED = {
    "bert": {},
    "distilbert": {},
    "gpt2": {},
    "gpt_neox": {},
    "llama": {},
    "mistral": {"sliding_window": 7},
    "qwen3": {},
}


@pytest.mark.of_cpu("models are loaded on the CPU")
@pytest.mark.parametrize("family", LOADED)
def test_models_of_regard(family: str, tmp_path: Path) -> None:
    model, original = loaded(tmp_path, family, **LOADED[family])
    ids = some_ids(2, 13)
    with torch.no_grad(), regard.watch(model, measures=wanted(ids=True)) as seen:
        model(ids)
        right = original(ids, output_attentions=True).attentions
    assert len(seen.layers) == len(right)
    for number, weights in enumerate(right):
        agree(seen[number], Oracle(weights, ids=ids), atol=5e-5)


@pytest.mark.of_cpu("models are loaded on the CPU")
@pytest.mark.parametrize("by_ids", [False, True], ids=["", "measures that ask for ids"])
@pytest.mark.parametrize("family", ["gpt2", "llama", "mistral"])
def test_generation_of_regard(family: str, by_ids: bool, tmp_path: Path) -> None:
    model, original = loaded(tmp_path, family, **LOADED[family])
    ids = some_ids(2, 11)
    with regard.watch(model, measures=wanted(ids=by_ids)) as seen:
        new = list(islice(generation.tokens(model, ids.tolist(), Rules(), model.new_cache()), 5))
    text = torch.cat([ids, torch.stack(new, 1)], 1)[:, :-1]
    with torch.no_grad():
        right = original(text, output_attentions=True).attentions
    for number, weights in enumerate(right):
        agree(seen[number], Oracle(weights, ids=text if by_ids else None), atol=5e-5)


@pytest.mark.of_cpu("models are loaded on the CPU")
def test_generation_of_regard_from_texts_of_two_lengths(tmp_path: Path) -> None:
    """New tokens of the shorter text stand after its own, not after the padding."""
    model, original = loaded(tmp_path, "llama")
    rows = some_ids(2, 11).tolist()
    rows[1] = rows[1][:7]
    with regard.watch(model, measures=["entropy", "distance", "offset", "previous", "itself"]) as seen:
        new = torch.stack(list(islice(generation.tokens(model, rows, Rules(), model.new_cache()), 5)), 1)
    for item, row in enumerate(rows):
        text = torch.tensor([row + new[item, :-1].tolist()])
        with torch.no_grad():
            right = original(text, output_attentions=True).attentions
        for number, weights in enumerate(right):
            for name in ("entropy", "distance", "offset", "previous", "itself"):
                got = getattr(seen[number], name)[item]  # (H, 11 + 4)
                got = torch.cat([got[:, : len(row)], got[:, 11:]], 1)
                close(got, getattr(Oracle(weights), name)()[0], f"{name} of text {item}", 5e-5)


@pytest.mark.parametrize("form", ["boolean", "additive"])
def test_masks_of_multihead_attention_hide_from_the_baseline_too(form) -> None:
    layer = torch.nn.MultiheadAttention(6, 2, batch_first=True).eval()
    x, lengths = torch.randn(2, 7, 6), [7, 4]
    hidden = torch.arange(7) >= torch.tensor(lengths)[:, None]
    causal = torch.ones(7, 7).triu(1).bool()
    if form == "additive":
        hidden, causal = (mask.float().masked_fill(mask, float("-inf")) for mask in (hidden, causal))
    with regard.watch(layer) as seen, torch.no_grad():
        layer(x, x, x, key_padding_mask=hidden)
    assert seen[0].uniform.entropy[:, 0].exp().round().tolist() == [[7.0] * 7, [4.0] * 7]
    assert seen[0].count.tolist() == [11, 11]  # padding counts in no mean
    with regard.watch(layer) as seen, torch.no_grad():
        layer(x, x, x, attn_mask=causal)
    assert seen[0].uniform.entropy[:, 0].exp().round().tolist() == [[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]] * 2
