"""A watch on attention as people write it: each module says its own weights, and the watch has to see the same."""

from __future__ import annotations

import math
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from heads.oracle import Oracle, agree, close, wanted
from heads.oracle_hands import (
    CORES,
    MASKED,
    B,
    Classifier,
    Core,
    D,
    Fused,
    Gated,
    Grouped,
    H,
    Hand,
    Heads,
    M,
    N,
    Plain,
    Routed,
    Scored,
    SequenceFirst,
    Unbatched,
    W,
    WithMemory,
    a_head_after_another,
    batch_times_heads,
    by_baddbmm,
    by_einsum,
    by_functional_dropout,
    by_operator,
    by_softmax_module,
    causal,
    dense,
    drawn,
    heads_by_split,
    heads_first,
    heads_times_batch,
    made,
    masked_by_sum,
    noise,
)
from torch import Tensor, nn

import regard
from regard import KVCache, MultiHeadAttention, RollingCache
from regard.masks import Causal, Padding, Window
from regard.positions import Alibi, RelativeBias, Rotary


def see(
    model: nn.Module, *args: Any, keep: Any = None, measures: Any = None, rows: Tensor | None = None, **options: Any
) -> tuple[Any, Any]:
    """What a watch of one forward saw, and the output; which is what it is without (in `rows`, if not all count)."""
    seed = torch.get_rng_state()
    with torch.no_grad():
        right = model(*args, **options)
        torch.set_rng_state(seed)
        with regard.watch(model, measures=wanted() if measures is None else measures, keep=keep) as seen:
            out = model(*args, **options)
    if rows is not None:
        out, right = out[rows], right[rows]
    torch.testing.assert_close(out, right, atol=1e-6, rtol=1e-6)
    return seen, out


@pytest.mark.parametrize("core", CORES, ids=lambda core: core.__name__)
def test_self_attention(core: Core) -> None:
    model, x = made(Hand(core)), noise(B, N, W)
    seen, _ = see(model, x)
    assert seen.layers == ["layer"]
    agree(seen["layer"], Oracle(dense(model, x)))


@pytest.mark.parametrize("core", CORES, ids=lambda core: core.__name__)
def test_cross_attention(core: Core) -> None:
    model, x, memory = made(Hand(core)), noise(B, N, W), noise(B, M, W, seed=7)
    seen, _ = see(model, x, memory)
    assert seen.layers == ["layer"]
    agree(seen["layer"], Oracle(dense(model, x, memory)), kind=None)


def test_a_memory_that_learns() -> None:
    """A parameter of somebody else's (a soft prompt) is an input like any other."""
    model, x, memory = made(Hand(CORES[0])), noise(B, N, W), nn.Parameter(noise(B, M, W, seed=7))
    seen, _ = see(model, x, memory)
    assert seen.layers == ["layer"]
    agree(seen["layer"], Oracle(dense(model, x, memory.detach())), kind=None)


@pytest.mark.parametrize("core", MASKED, ids=lambda core: core.__name__)
def test_masks(core: Core) -> None:
    model, x = made(Hand(core)), noise(B, N, W)
    seen, _ = see(model, x)
    agree(seen["layer"], Oracle(dense(model, x), real=torch.ones(B, N, dtype=torch.bool)))  # causality is no padding


@pytest.mark.parametrize(
    "core",
    [by_operator, by_einsum, heads_first, heads_times_batch, heads_by_split, batch_times_heads, by_baddbmm],
    ids=lambda core: core.__name__,
)
@pytest.mark.parametrize("batch, heads, tokens", [(3, 3, 7), (1, 3, 7), (3, 1, 7), (5, 5, 5), (2, 7, 7)])
def test_sizes_that_could_be_confused(core: Core, batch: int, heads: int, tokens: int) -> None:
    """As many heads as items, or tokens as either; one item; one head."""
    model, x = made(Hand(core, heads=heads)), noise(batch, tokens, W)
    seen, _ = see(model, x)
    agree(seen["layer"], Oracle(dense(model, x)))


@pytest.mark.parametrize("core", [by_softmax_module, by_functional_dropout], ids=lambda core: core.__name__)
def test_dropout_comes_after_what_is_seen(core: Core) -> None:
    model, x = made(Hand(core, dropout=0.4)), noise(B, N, W)
    right = dense(model, x)
    seen, _ = see(model.train(), x)
    agree(seen["layer"], Oracle(right))


@pytest.mark.parametrize(
    "core",
    [by_operator, by_einsum, batch_times_heads, masked_by_sum, heads_times_batch],
    ids=lambda core: core.__name__,
)
def test_weights_can_be_kept(core: Core) -> None:
    model, x = made(Hand(core)), noise(B, N, W)
    seen, _ = see(model, x, keep="qk")
    p = dense(model, x)
    close(seen["layer"].weights(), p, "weights")
    close(seen["layer"].weights(head=1, rows=slice(2, 5), batch=1), p[1, 1, 2:5], "a part")


def test_without_a_batch() -> None:
    model, x = made(Unbatched()), noise(N, W)
    seen, _ = see(model, x)
    with torch.no_grad():
        agree(seen["layer"], Oracle(model.layer.weights(model.norm(x))))


def test_a_module_for_each_head() -> None:
    model, x = made(Heads()), noise(B, N, W)
    seen, _ = see(model, x)
    assert seen.layers == [f"layer.heads.{h}" for h in range(H)]
    with torch.no_grad():
        for h, head in enumerate(model.layer.heads):
            agree(seen[h], Oracle(head.weights(model.norm(x))[:, None]))


def test_a_loop_over_heads() -> None:
    """One head each: further calls of one module, "layer#1", "layer#2"."""
    model, x = made(Hand(a_head_after_another)), noise(B, N, W)
    seen, _ = see(model, x)
    p = dense(model, x)
    assert seen.layers == ["layer", "layer#1", "layer#2"]
    for h in range(H):
        agree(seen[h], Oracle(p[:, h : h + 1]))


@pytest.mark.parametrize("batch", [B, H], ids=["", "as many as heads"])
def test_sequence_first(batch: int) -> None:
    model, x = made(SequenceFirst()), noise(N, batch, W)
    seen, _ = see(model, x)
    with torch.no_grad():
        p, _ = model.layer.weights(model.norm(x))
    agree(seen["layer"], Oracle(p.unflatten(0, (batch, H))))


def test_five_axes() -> None:
    model, x = made(Grouped()), noise(B, N, W)
    seen, _ = see(model, x)
    with torch.no_grad():
        agree(seen["layer"], Oracle(model.layer.weights(model.norm(x)).flatten(1, 2)))


# F.scaled_dot_product_attention

KEPT = torch.rand(B, 1, N, M, generator=torch.Generator().manual_seed(1)) > 0.4
FUSED: dict[str, dict[str, Any]] = {
    "plain": {},
    "scale": {"scale": 0.9},
    "grouped": {"enable_gqa": True},
    "causal": {"is_causal": True},
    "bool mask": {"attn_mask": KEPT},
    "float mask": {"attn_mask": noise(H * 2, N, M)},
    "mask of one row": {"attn_mask": KEPT[:, :, :1]},
    "grouped, masked": {"enable_gqa": True, "attn_mask": KEPT, "scale": 0.7},
}


@pytest.mark.parametrize("name", FUSED)
def test_scaled_dot_product_attention(name: str) -> None:
    layer = drawn(Fused(FUSED[name]))
    x, y = noise(B, N, W), noise(B, M, W, seed=7)
    seen, _ = see(WithMemory(layer), x, y, keep="qk")
    assert seen.layers == ["layer"]
    with torch.no_grad():
        right = layer.weights(x, y)
    causal = (
        torch.ones(B, M, dtype=torch.bool) if name == "causal" else None
    )  # keys ahead of all queries are no padding
    agree(seen["layer"], Oracle(right, real=causal), kind=None)
    close(seen["layer"].weights(), right, "weights")


def test_scaled_dot_product_attention_of_itself() -> None:
    layer, x = drawn(Fused({"is_causal": True})), noise(B, N, W)
    seen, _ = see(WithMemory(layer), x, x)
    with torch.no_grad():
        agree(seen["layer"], Oracle(layer.weights(x, x)))


def test_scaled_dot_product_attention_where_a_row_sees_nothing() -> None:
    mask = KEPT[..., :N].clone()
    mask[1, :, 3] = False
    layer, x = drawn(Fused({"attn_mask": mask})), noise(B, N, W)
    seen, _ = see(WithMemory(layer), x, x)
    with torch.no_grad():
        agree(seen["layer"], Oracle(layer.weights(x, x)))


# nn.MultiheadAttention and what is built of it

PADDING = torch.tensor([[False] * M, [False] * 6 + [True] * (M - 6)])
SQUARE = torch.tensor([[False] * N, [False] * 4 + [True] * (N - 4)])
FLOATS = torch.zeros(N, N, dtype=torch.float64).masked_fill(~causal(), -math.inf)
EVEN, WIDE = 4, 28  # heads and width of what has the fast path, which asks for an even number
OPTIONS: dict[str, dict[str, Any]] = {  # of the constructor
    "plain": {},
    "no bias": {"bias": False},
    "sequence first": {"batch_first": False},
    "bias_kv": {"add_bias_kv": True},
    "zero": {"add_zero_attn": True},
    "both": {"add_bias_kv": True, "add_zero_attn": True},
    "widths": {"kdim": 13, "vdim": 17},
}
CALLS: dict[str, dict[str, Any]] = {
    "weights": {"need_weights": True},
    "weights of heads": {"need_weights": True, "average_attn_weights": False},
    "no weights": {"need_weights": False},
    "padding": {"need_weights": False, "key_padding_mask": SQUARE},
    "padding and weights": {"key_padding_mask": SQUARE},
    "bool mask": {"need_weights": False, "attn_mask": ~causal()},
    "float mask": {"need_weights": True, "attn_mask": FLOATS},
    "mask of each head": {"need_weights": False, "attn_mask": noise(B * H, N, N)},
    "causal": {"need_weights": False, "attn_mask": ~causal(), "is_causal": True},
    "mask and padding": {"need_weights": False, "attn_mask": ~causal(), "key_padding_mask": SQUARE},
}


def own(layer: nn.MultiheadAttention, *args: Tensor, **options: Any) -> Tensor:
    """The weights (B, H, N, M) which the layer itself returns, gradients on: no fast path."""
    options = {name: value for name, value in options.items() if name != "is_causal"}
    return layer(*args, **options | {"need_weights": True, "average_attn_weights": False})[1].detach()


@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("call", CALLS)
def test_multihead_attention(call: str, train: bool) -> None:
    layer = drawn(nn.MultiheadAttention(W, H, batch_first=True)).train(train)
    x = noise(B, N, W)
    seen, _ = see(WithMemory(layer), x, x, x, **CALLS[call])
    assert seen.layers == ["layer"]
    agree(seen["layer"], Oracle(own(layer, x, x, x, **CALLS[call])))


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("name", OPTIONS)
def test_options_of_multihead_attention(name: str, need_weights: bool) -> None:
    options = {"batch_first": True} | OPTIONS[name]
    layer = drawn(nn.MultiheadAttention(W, H, **options))
    x = noise(B, N, W)
    k, v = noise(B, M, options.get("kdim", W), seed=7), noise(B, M, options.get("vdim", W), seed=9)
    if not options["batch_first"]:
        x, k, v = (y.transpose(0, 1) for y in (x, k, v))
    given = {"need_weights": need_weights, "key_padding_mask": PADDING}
    seen, _ = see(WithMemory(layer), x, k, v, **given)
    assert seen.layers == ["layer"]
    agree(seen["layer"], Oracle(own(layer, x, k, v, **given)), kind="cross")


@pytest.mark.parametrize("need_weights", [True, False])
def test_multihead_attention_without_a_batch(need_weights: bool) -> None:
    layer, x = drawn(nn.MultiheadAttention(W, H)), noise(N, W)
    seen, _ = see(WithMemory(layer), x, x, x, need_weights=need_weights)
    agree(seen["layer"], Oracle(own(layer, x, x, x)[None]))


def test_multihead_attention_is_the_whole_model() -> None:
    layer, x = drawn(nn.MultiheadAttention(W, H, batch_first=True)), noise(B, N, W)
    seen, _ = see(layer, x, x, x)
    assert len(seen.layers) == 1
    agree(seen[0], Oracle(own(layer, x, x, x)))


def test_dropout_of_multihead_attention() -> None:
    layer, x = drawn(nn.MultiheadAttention(W, H, dropout=0.4, batch_first=True)), noise(B, N, W)
    right = own(layer, x, x, x)
    for need_weights in (True, False):
        seen, _ = see(WithMemory(layer.train()), x, x, x, need_weights=need_weights)
        agree(seen["layer"], Oracle(right))


def test_contribution_by_the_output_projection() -> None:
    layer, x = drawn(nn.MultiheadAttention(W, H, batch_first=True)), noise(B, N, W)
    seen, _ = see(WithMemory(layer), x, x, x, measures=wanted(out="own"))
    v = F.linear(x, layer.in_proj_weight[2 * W :], layer.in_proj_bias[2 * W :]).detach()
    v = v.unflatten(-1, (H, D)).transpose(1, 2)
    agree(seen["layer"], Oracle(own(layer, x, x, x), values=v, out=layer.out_proj.weight.detach()))


@pytest.mark.parametrize("mask", ["none", "padding", "causal"])
@pytest.mark.parametrize("norm_first", [False, True])
def test_transformer_encoder(mask: str, norm_first: bool) -> None:
    """In evaluation without gradient, where PyTorch takes its fast path, on a padded batch by nested tensors."""
    block = nn.TransformerEncoderLayer(WIDE, EVEN, 13, dropout=0.3, batch_first=True, norm_first=norm_first)
    model = drawn(nn.TransformerEncoder(block, 2, enable_nested_tensor=not norm_first))
    model.layers[1].load_state_dict(drawn(nn.TransformerEncoderLayer(WIDE, EVEN, 13), seed=9).state_dict())
    x = noise(B, N, WIDE)
    given = {"none": {}, "padding": {"src_key_padding_mask": SQUARE}, "causal": {"mask": ~causal(), "is_causal": True}}[
        mask
    ]
    rows = ~SQUARE if mask == "padding" else None  # nested tensors have no padding: what comes out there is nothing's
    seen, _ = see(model, x, **given, rows=rows)
    assert seen.layers == ["layers.0.self_attn", "layers.1.self_attn"]
    hidden = x
    for number, layer in enumerate(model.layers):
        inner = layer.norm1(hidden) if norm_first else hidden
        p = own(
            layer.self_attn,
            inner,
            inner,
            inner,
            attn_mask=given.get("mask"),
            key_padding_mask=given.get("src_key_padding_mask"),
        )
        agree(seen[number], Oracle(p), rows=rows)
        hidden = layer(hidden, src_mask=given.get("mask"), src_key_padding_mask=given.get("src_key_padding_mask"))


@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
def test_transformer_decoder(train: bool) -> None:
    block = nn.TransformerDecoderLayer(W, H, 13, dropout=0.0, batch_first=True)
    model = drawn(nn.TransformerDecoder(block, 2)).train(train)
    x, memory = noise(B, N, W), noise(B, M, W, seed=7)
    given = {"tgt_mask": ~causal(), "tgt_is_causal": True, "memory_key_padding_mask": PADDING}
    seen, _ = see(model, x, memory, **given)
    assert seen.layers == [f"layers.{i}.{name}" for i in range(2) for name in ("self_attn", "multihead_attn")]
    hidden = x
    for i, layer in enumerate(model.layers):
        agree(seen[2 * i], Oracle(own(layer.self_attn, hidden, hidden, hidden, attn_mask=~causal())))
        middle = layer.norm1(hidden + layer._sa_block(hidden, ~causal(), None))
        right = own(layer.multihead_attn, middle, memory, memory, key_padding_mask=PADDING)
        agree(seen[2 * i + 1], Oracle(right), kind="cross")
        hidden = layer(hidden, memory, tgt_mask=~causal(), memory_key_padding_mask=PADDING)


def test_cross_attention_to_as_many_keys_as_queries() -> None:
    """It is cross by what it is given, not by how much."""
    block = nn.TransformerDecoderLayer(W, H, 13, dropout=0.0, batch_first=True)
    model = drawn(nn.TransformerDecoder(block, 1))
    seen, _ = see(model, noise(B, N, W), noise(B, N, W, seed=7))
    assert [seen[name].kind for name in seen.layers] == ["self", "cross"]


def test_whole_transformer() -> None:
    model = drawn(nn.Transformer(WIDE, EVEN, 1, 1, 13, dropout=0.0, batch_first=True))
    x, y = noise(B, M, WIDE), noise(B, N, WIDE, seed=7)
    seen, _ = see(model, x, y)
    names = ["encoder.layers.0.self_attn", "decoder.layers.0.self_attn", "decoder.layers.0.multihead_attn"]
    assert seen.layers == names
    assert [seen[name].kind for name in names] == ["self", "self", "cross"]
    agree(seen[0], Oracle(own(model.encoder.layers[0].self_attn, x, x, x)))
    agree(seen[1], Oracle(own(model.decoder.layers[0].self_attn, y, y, y)))
    layer, memory = model.decoder.layers[0], model.encoder(x)
    middle = layer.norm1(y + layer._sa_block(y, None, None))
    agree(seen[2], Oracle(own(layer.multihead_attn, middle, memory, memory)), kind="cross")


# regard's own layer

OWN: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "grouped": ({"num_kv_heads": 3}, {"mask": Causal()}),
    "softcap": ({"softcap": 0.7}, {}),
    "sinks": ({"sinks": True}, {"mask": Causal()}),
    "window": ({"num_kv_heads": 2}, {"mask": Causal() & Window(2)}),
    "rotary": ({"position_encoding": lambda: Rotary(6)}, {"mask": Causal()}),
    "alibi": ({"position_encoding": lambda: Alibi(6)}, {"mask": Causal()}),
    "buckets": ({"position_encoding": lambda: RelativeBias(6, num_buckets=8, max_distance=11)}, {}),
    "padding": ({"qk_norm": "rms"}, {"mask": Padding(torch.tensor([N, 4]))}),
    "dense mask": ({}, {"mask": KEPT[..., :N]}),
    "bias": ({"scale": 0.8}, {"bias": noise(1, 6, N, N)}),
    "everything": (
        {
            "num_kv_heads": 3,
            "softcap": 5.0,
            "sinks": True,
            "qk_norm": "rms",
            "value_head_dim": 5,
            "position_encoding": lambda: Rotary(6),
        },
        {"mask": Causal() & Window(3)},
    ),
}


def regards(options: dict[str, Any]) -> MultiHeadAttention:
    options = {name: value() if callable(value) else value for name, value in options.items()}
    return drawn(MultiHeadAttention(W, 6, head_dim=6, **options))


@pytest.mark.parametrize("name", OWN)
def test_regards_own_layer(name: str) -> None:
    options, given = OWN[name]
    layer, x = regards(options), noise(B, N, W)
    model = WithMemory(layer)
    right = layer(x, **given, need_weights=True)[1].detach()
    v = layer.v_proj(x).detach().unflatten(-1, (layer.num_kv_heads, -1)).transpose(1, 2)
    v = v.repeat_interleave(6 // layer.num_kv_heads, 1)
    seen, _ = see(model, x, **given, keep="qk", measures=wanted(out="own"))
    assert seen.layers == ["layer"]
    agree(seen["layer"], Oracle(right, values=v, out=layer.out_proj.weight.detach()))
    close(seen["layer"].weights(), right, "weights")


def test_regards_own_layer_returning_weights() -> None:
    """The weights that a call returns beside its output are not a second attention."""
    layer, x = regards({}), noise(B, N, W)
    seen, (_, right) = see(WithMemory(layer), x, need_weights=True)
    assert seen.layers == ["layer"]
    agree(seen["layer"], Oracle(right))


def test_regards_own_layer_across() -> None:
    layer, x, memory = regards({"num_kv_heads": 3}), noise(B, N, W), noise(B, M, W, seed=7)
    seen, _ = see(WithMemory(layer), x, memory)
    agree(seen["layer"], Oracle(layer(x, memory, need_weights=True)[1].detach()), kind="cross")


@pytest.mark.parametrize("kind", ["growing", "rolling"])
def test_regards_own_caches(kind: str) -> None:
    """Tokens that come one by one are stitched to the map of the whole."""
    layer, x = regards({"num_kv_heads": 3, "position_encoding": lambda: Rotary(6)}), noise(B, M, W)
    mask = Causal() & Window(3) if kind == "rolling" else Causal()
    right = layer(x, mask=mask, need_weights=True)[1].detach()
    cache = KVCache() if kind == "growing" else RollingCache(4)
    model = WithMemory(layer)
    with torch.no_grad(), regard.watch(model, measures=wanted()) as seen:
        for piece in x.split([5, 1, 1, 4], dim=1):
            model(piece, mask=mask, cache=cache)
    agree(seen["layer"], Oracle(right))


# What is not attention


@pytest.mark.parametrize("kind", [Classifier, Gated, Routed, Scored])
def test_what_is_not_attention(kind: type[nn.Module]) -> None:
    model, x = kind().double().eval(), noise(B, N, W)
    seen, _ = see(model, x)
    assert seen.layers == ["layer"]
    model.layer.note = True
    model(x)
    agree(seen["layer"], Oracle(model.layer.dense))


# A watch that saw nothing says why


def test_a_model_without_attention() -> None:
    model = Plain().double()
    with (
        pytest.raises(ValueError, match=r"(?i)no attention|without attention|none of its modules"),
        regard.watch(model),
    ):
        model(noise(B, N, W))


def test_nothing_was_run() -> None:
    with (
        pytest.raises(ValueError, match=r"(?i)not (run|called)|no forward|was run|did not run|never"),
        regard.watch(made(Hand(by_operator))),
    ):
        pass


def test_another_model_was_run() -> None:
    model, other = made(Hand(by_operator)), made(Hand(by_operator))
    with (
        pytest.raises(ValueError, match=r"(?i)not (run|called)|no forward|was run|did not run|never"),
        regard.watch(model),
    ):
        other(noise(B, N, W))


def test_another_model_is_not_recorded() -> None:
    model, other = made(Hand(by_operator)), made(Hand(by_operator))
    x = noise(B, N, W)
    with regard.watch(model, measures=wanted()) as seen, torch.no_grad():
        other(x)
        model(x)
        other(noise(B, N, W, seed=8))
        F.scaled_dot_product_attention(*(noise(B, H, N, D, seed=s) for s in (1, 2, 3)))
    assert seen.layers == ["layer"]
    agree(seen["layer"], Oracle(dense(model, x)))


def test_a_compiled_model() -> None:
    """Compiled code shows nothing: as long as somebody watches it runs as it was written, and then compiled again."""
    model, x = made(Hand(by_operator)), noise(B, N, W)
    right, runs = dense(model, x), Counter()
    compiled = torch.compile(model, backend=runs)
    for watched in (model, compiled):
        with torch.no_grad():
            compiled(x)
            before = runs.count
            with regard.watch(watched, measures=wanted()) as seen:
                compiled(x)
            assert runs.count == before
            compiled(x)
            assert runs.count == before + 1
        assert [name.removeprefix("_orig_mod.") for name in seen.layers] == ["layer"]
        agree(seen[0], Oracle(right))


class Counter:
    """A backend of torch.compile that counts how often what it compiled is run."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            self.count += 1
            return graph(*args)

        return run


def test_a_model_with_a_compiled_layer() -> None:
    model, x = made(Hand(by_operator)), noise(B, N, W)
    right = dense(model, x)
    model.layer.compile(backend="eager")
    with torch.no_grad():
        model(x)
        with regard.watch(model, measures=wanted()) as seen:
            model(x)
    assert seen.layers == ["layer"]
    agree(seen["layer"], Oracle(right))


def test_a_traced_model() -> None:
    x = noise(B, N, W)
    traced = torch.jit.trace(made(Hand(by_operator)), (x,))
    with torch.no_grad(), pytest.raises(ValueError, match=r"(?i)jit|trac|script"), regard.watch(traced):
        traced(x)


def run_elsewhere(model: nn.Module, x: Tensor) -> None:
    thread = threading.Thread(target=model, args=(x,))
    thread.start()
    thread.join()


def test_another_thread() -> None:
    model, x = made(Hand(by_operator)), noise(B, N, W)
    with pytest.raises(ValueError, match=r"(?i)thread"), regard.watch(model):
        run_elsewhere(model, x)


def test_an_error_of_the_model_is_the_models() -> None:
    model = made(Hand(by_operator))
    with pytest.raises(RuntimeError, match="shape"), regard.watch(model):
        model(noise(B, N, W - 1))


@pytest.mark.parametrize(
    "bad, words",
    [({"measures": ["entropie"]}, "entropie"), ({"keep": "everything"}, "keep"), ({"layers": ["nowhere"]}, "nowhere")],
)
def test_bad_arguments(bad: dict[str, Any], words: str) -> None:
    model = made(Hand(by_operator))
    with pytest.raises(ValueError, match=words), regard.watch(model, **bad), torch.no_grad():
        model(noise(B, N, W))
