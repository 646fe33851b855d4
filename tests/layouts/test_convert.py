"""Finding the layout, selecting by prefix, refusing what does not fit, and what each layout can express."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from layouts.originals import ORIGINALS, randomised
from torch import Tensor, nn

from regard import AttentionBlock, MultiHeadAttention, layouts
from regard.layouts.convert import LAYOUTS
from regard.positions import Alibi, RelativeBias, Rotary

PLAIN = {"embed_dim": 6, "num_heads": 3}


def state_of(name: str) -> dict[str, Tensor]:
    return dict(randomised(ORIGINALS[name].make(), 1).state_dict())


def prefixed(state: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {prefix + key: tensor for key, tensor in state.items()}


def refuses(*words: str) -> Any:
    """A ValueError with these words, in this order."""
    return pytest.raises(ValueError, match="(?s)" + ".*".join(words))


class TestPrefix:
    def test_selects_one_layer_of_a_model(self) -> None:
        first, second = (dict(randomised(ORIGINALS["llama"].make(), seed).state_dict()) for seed in (1, 2))
        model = {
            **prefixed(first, "model.layers.1.self_attn."),
            **prefixed(second, "model.layers.10.self_attn."),
            "model.layers.1.mlp.up_proj.weight": torch.ones(3, 3),
        }
        layer = layouts.load(model, 6, prefix="model.layers.1.self_attn.")
        assert torch.equal(layer.q_proj.weight, first["q_proj.weight"])
        layer = layouts.load(model, 6, prefix="model.layers.10.self_attn")  # the dot may be left out
        assert torch.equal(layer.q_proj.weight, second["q_proj.weight"])

    @pytest.mark.parametrize("prefix", ["attn.", "self_attn.", "encoder.layers.0.self_attn."])
    @pytest.mark.parametrize("name", ["torch", "gpt2", "llama", "t5"])
    def test_is_named_where_it_was_left_out(self, prefix: str, name: str) -> None:
        with refuses("expected the keys of one attention layer", f"remedy: prefix='{prefix}'"):
            layouts.load(prefixed(state_of(name), prefix), 3)

    def test_is_named_in_full_below_another(self) -> None:
        with refuses(r"remedy: prefix='model\.self_attn\.' \(or another of 2\)"):
            state = state_of("llama")
            layouts.load({**prefixed(state, "model.self_attn."), **prefixed(state, "model.x_attn.")}, 6, prefix="model")

    def test_that_nothing_begins_with(self) -> None:
        with refuses("prefix: expected", "received 'self_atn.'", "the nearest is 'self_attn.'"):
            layouts.load(prefixed(state_of("llama"), "self_attn."), 6, prefix="self_atn.")


class TestKeys:
    def test_a_misspelt_key_is_told_the_nearest(self) -> None:
        state = state_of("whisper")
        state["v_proj.wieght"] = state.pop("v_proj.weight")
        with refuses("expected 'v_proj.weight', as layout 'separate'", "the nearest is 'v_proj.wieght'"):
            layouts.load(state, 3)

    def test_a_misspelt_bias_is_told_the_nearest(self) -> None:
        state = state_of("whisper")
        state["v_proj.bais"] = state.pop("v_proj.bias")
        with refuses(
            "layout 'separate': expected no keys but its own, received 'v_proj.bais'", "the nearest is 'v_proj.bias'"
        ):
            layouts.load(state, 3)

    def test_nothing_known(self) -> None:
        with refuses("the keys of one of the layouts separate, qwen3_next, llama", r"received \['a', 'b.c'\]"):
            layouts.load({"a": torch.ones(2), "b.c": torch.ones(2)}, 3)

    def test_near_to_a_known_key(self) -> None:
        with refuses("remedy: the nearest to 'query.weight' is 'self.query.weight', of layout 'bert'"):
            layouts.load({"query.weight": torch.ones(6, 6)}, 3)

    def test_a_named_layout_that_is_not_there(self) -> None:
        with refuses("expected 'c_attn.weight', as layout 'gpt2'|the keys of one of the layouts gpt2"):
            layouts.load(state_of("llama"), 6, layout="gpt2")
        with refuses("layout: expected one of separate, ", "received 'lama'", "the nearest is 'llama'"):
            layouts.load(state_of("llama"), 6, layout="lama")
        with refuses("expected the shapes of layout 'nanogpt'", "remedy: layout='auto'"):
            layouts.load(state_of("gpt2"), 3, layout="nanogpt")

    def test_buffers_of_the_originals_are_ignored(self) -> None:
        buffers = {
            "gpt2": ("bias", "masked_bias"),
            "neox": ("bias", "masked_bias", "rotary_emb.inv_freq"),
            "llama": ("rotary_emb.inv_freq",),
        }
        for name, keys in buffers.items():
            original, state = ORIGINALS[name], state_of(name)
            more = {key: torch.ones(1, 1, 5, 5, dtype=torch.bool) for key in keys}
            layer = layouts.load({**state, **more}, original.num_heads)
            torch.testing.assert_close(layouts.export(layer, original.layout), state, rtol=0, atol=0)

    def test_extra_keys_of_torch_are_refused(self) -> None:
        with refuses("layout 'torch': expected plain attention, received 'bias_k'", "regard.swap"):
            layouts.load(nn.MultiheadAttention(6, 3, add_bias_kv=True).state_dict(), 3)

    def test_cross_attention_of_gpt2_is_refused(self) -> None:
        shapes = {"c_attn": (6, 12), "c_proj": (6, 6), "q_attn": (6, 6)}
        state = {f"{name}.weight": torch.ones(shape) for name, shape in shapes.items()}
        with refuses("layout 'gpt2'", "'q_attn.weight': cross attention"):
            layouts.load(state, 3)

    def test_integer_weights_are_refused(self) -> None:
        state = {key: tensor.to(torch.int8) for key, tensor in state_of("llama").items()}
        with pytest.raises(TypeError, match=r"q_proj.weight: expected a floating-point tensor, received torch.int8"):
            layouts.load(state, 6)

    def test_a_layer_norm_beside_it(self) -> None:
        for name, key in (("bert", "output.LayerNorm.weight"), ("w_qs with norm", "layer_norm.weight")):
            with refuses(f"received a LayerNorm too: '{key}'", "remedy: layouts.load_block"):
                layouts.load(state_of(name), 3)
        for name in ("torch", "w_qs"):
            with refuses("expected an attention layer and a LayerNorm", "remedy: layouts.load,"):
                layouts.load_block(state_of(name), ORIGINALS[name].num_heads)

    def test_bert_without_its_norm_is_a_layer(self) -> None:
        state = {key: tensor for key, tensor in state_of("bert").items() if "LayerNorm" not in key}
        layer = layouts.load(state, 3)
        torch.testing.assert_close(layouts.export(layer, "bert"), state, rtol=0, atol=0)

    def test_a_missing_bias(self) -> None:
        state = {key: tensor for key, tensor in state_of("bert").items() if key != "self.key.bias"}
        with refuses("biases of layout 'bert': expected on q, k, v, out, received on q, v, out"):
            layouts.load_block(state, 3)


class TestShapes:
    @pytest.mark.parametrize("name", ORIGINALS)
    def test_heads_that_do_not_divide(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        def built(*_: Any, **__: Any) -> None:
            raise AssertionError("built before the check")

        monkeypatch.setattr("regard.layouts.canonical.MultiHeadAttention", built)
        load = layouts.load_block if ORIGINALS[name].block else layouts.load
        for number in (13, 0, -1):
            with refuses("num_heads: expected a divisor of the", f"received {number}"):
                load(state_of(name), number)

    def test_heads_that_fit_the_rows_but_not_each_other(self) -> None:
        with refuses("k_proj.weight: expected G \\* 30 rows", "received 45 rows"):  # q 60 rows, k 45
            state = {
                "q_proj.weight": torch.ones(60, 7),
                "k_proj.weight": torch.ones(45, 7),
                "v_proj.weight": torch.ones(45, 7),
                "o_proj.weight": torch.ones(7, 60),
            }
            layouts.load(state, 2)

    def test_norms_are_per_head_or_over_all_heads_and_q_and_k_agree(self) -> None:
        state = {**state_of("qwen3"), "q_norm.weight": torch.ones(60)}
        with refuses("k_norm.weight: expected shape \\(30,\\)", "received \\(10,\\)"):
            layouts.load(state, 6)
        with refuses("q_norm.weight: expected shape \\(10,\\)", "received \\(20,\\)"):
            layouts.load({**state, "q_norm.weight": torch.ones(20)}, 6)

    def test_one_norm_alone(self) -> None:
        state = {key: tensor for key, tensor in state_of("qwen3").items() if key != "k_norm.weight"}
        with refuses("qk_norm: expected weights of a norm of q and of k, or of neither", "q_norm.weight"):
            layouts.load(state, 6)

    def test_shared_kv_heads_packed_by_head(self) -> None:
        with refuses("packed q, k, v: expected H \\* 3 \\* D = 18 rows, head by head, received 10 rows"):
            layouts.load({"query_key_value.weight": torch.ones(10, 6), "dense.weight": torch.ones(6, 6)}, 3)

    def test_packed_rows_that_do_not_divide(self) -> None:
        with refuses("packed q, k, v: expected \\(H \\+ 2 G\\) \\* D rows, with H = 3, D = 2, received 9 rows"):
            layouts.load({"Wqkv.weight": torch.ones(9, 6), "out_proj.weight": torch.ones(6, 6)}, 3)

    def test_sizes_are_read_and_not_told(self) -> None:
        with refuses(
            "num_kv_heads: expected no argument: it is read from the shapes", "remedy: leave num_kv_heads out"
        ):
            layouts.load(state_of("llama"), 6, num_kv_heads=3)

    def test_a_wrong_bias_shape(self) -> None:
        with refuses("self.key.bias: expected shape \\(33,\\)", "received \\(7,\\)"):
            layouts.load_block({**state_of("bert"), "self.key.bias": torch.ones(7)}, 3)

    def test_a_vector_for_a_matrix(self) -> None:
        with refuses("o_proj.weight: expected a matrix"):
            layouts.load({**state_of("llama"), "o_proj.weight": torch.ones(60)}, 6)
        with refuses("k_proj.weight: expected shape \\(out, in\\)"):
            layouts.load({**state_of("llama"), "k_proj.weight": torch.ones(30)}, 6)

    def test_the_relative_bias(self) -> None:
        state = state_of("t5 encoder")
        layer = layouts.load(state, 3, bidirectional=False, max_distance=17)
        encoding = layer.position_encoding
        assert isinstance(encoding, RelativeBias)
        assert (encoding.bidirectional, encoding.max_distance, layer.scale) == (False, 17, 1.0)
        with refuses("position_encoding: expected None", "received RelativeBias"):
            layouts.load(state, 3, position_encoding=RelativeBias(3))
        with refuses("relative position bias: expected shape \\(buckets, 3\\), received \\(8, 5\\)"):
            layouts.load({**state, "relative_attention_bias.weight": torch.ones(8, 5)}, 3)
        del state["relative_attention_bias.weight"]  # a later layer, which uses the first one's
        shared = layouts.load(state, 3, position_encoding=encoding)
        assert shared.position_encoding is encoding

    def test_options_of_the_block(self) -> None:
        state = state_of("bert")
        assert layouts.load_block(state, 3).norm.eps == 1e-12
        block = layouts.load_block(state, 3, eps=1e-3, block_dropout=0.25, dropout=0.5)
        assert (block.norm.eps, block.dropout.p, block.layer.dropout, block.order) == (1e-3, 0.25, 0.5, "post")


GATED = {"qwen3_next", "g_proj"}  # and these have norms that a plain layer has not:
NORMED = {"gemma", "gemma3n", "gemma3n_shared"}

# What each layout can say. A pair (layer, layout) not named here raises.
LAYERS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "plain": ({}, set(LAYOUTS) - {"t5", "meta_llama"} - GATED - NORMED),
    "no biases": ({"bias": False}, set(LAYOUTS) - {"gpt2", "bert", "distilbert", "t5"} - GATED - NORMED),
    "no biases, unscaled": ({"bias": False, "scale": 1.0}, {"separate", "llama", "llama4", "wqkv", "t5"}),
    "bias within alone": (
        {"out_bias": False},
        {"separate", "llama", "llama4", "w_q", "w_qs", "qkv_layer", "timm", "wqkv", "modernbert"},
    ),
    "bias at the end alone": (
        {"bias": False, "out_bias": True},
        {"separate", "llama", "llama4", "w_q", "w_qs", "qkv_layer", "timm", "wqkv", "modernbert"},
    ),
    "kv heads": ({"num_kv_heads": 1}, {"separate", "llama", "llama4", "wqkv"}),
    "head width": ({"head_dim": 8}, {"separate", "llama", "llama4", "w_q", "w_qs", "wqkv"}),
    "value head width": ({"head_dim": 5, "value_head_dim": 7}, {"separate", "w_qs"}),
    "input width": ({"query_dim": 7, "key_dim": 7}, {"separate", "w_q", "qkv_layer"}),
    "key width": ({"key_dim": 7}, {"separate", "w_q", "torch"}),
    "value width": ({"value_dim": 7}, {"separate", "w_q", "torch"}),
    "query width": ({"query_dim": 7}, {"separate", "w_q"}),
    "rms norm": ({"qk_norm": "rms"}, {"separate", "llama", "timm"}),
    "layer norm": ({"qk_norm": "layer"}, {"separate", "timm"}),
    "sinks": ({"sinks": True}, {"separate", "llama"}),
    "softcap": ({"softcap": 3.0}, {"separate", "llama", "llama4"}),
    "scale": ({"scale": 0.3}, {"separate", "llama", "llama4", "wqkv"}),
    "rotary": ({"position_encoding": Rotary(2)}, {"separate", "llama", "llama4", "timm", "neox", "wqkv", "modernbert"}),
    "rotary, no biases": (
        {"position_encoding": Rotary(2), "bias": False},
        {"separate", "llama", "llama4", "timm", "neox", "wqkv", "modernbert", "meta_llama"},
    ),
    "rotary, interleaved": (
        {"position_encoding": Rotary(2, interleaved=True), "bias": False},
        {"separate", "llama", "llama4", "timm", "neox", "wqkv", "modernbert", "meta_llama"},
    ),
    "wide rotary, interleaved": (
        {"position_encoding": Rotary(11, width=6, interleaved=True), "bias": False, "head_dim": 11, "num_kv_heads": 1},
        {"separate", "llama", "llama4", "wqkv", "meta_llama"},
    ),
    "alibi": ({"position_encoding": Alibi(3)}, {"separate", "neox", "wqkv"}),
    "relative bias": ({"position_encoding": RelativeBias(3, num_buckets=8, max_distance=13)}, {"separate"}),
    "relative bias, unscaled": (
        {"position_encoding": RelativeBias(3, num_buckets=8, max_distance=13), "scale": 1.0, "bias": False},
        {"separate", "t5"},
    ),
}
TOLD = ("scale", "softcap", "position_encoding", "qk_norm")  # what load has to be told again


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", LAYERS)
@torch.no_grad()
def test_round_trip_or_refusal(name: str, layout: str) -> None:
    options, can = LAYERS[name]
    layer = randomised(MultiHeadAttention(**{**PLAIN, **options}), 1)
    assert isinstance(layer, MultiHeadAttention)
    if layout not in can:
        with refuses(f"(export as|biases of layout) '{layout}': expected ", "received ", "remedy: "):
            layouts.export(layer, layout)
        return
    state = layouts.export(layer, layout)
    told = {key: value for key, value in options.items() if key in TOLD and not isinstance(value, RelativeBias)}
    if isinstance(options.get("position_encoding"), RelativeBias):
        told["max_distance"] = 13
    again = layouts.load(state, 3, layout=layout, **told)
    q, k, v = (
        torch.randn(2, n, w, dtype=torch.float64)
        for n, w in ((5, layer.query_dim), (7, layer.key_dim), (7, layer.value_dim))
    )
    torch.testing.assert_close(again(q, k, v), layer(q, k, v), rtol=1e-12, atol=1e-12)
    assert layouts.export(again, layout).keys() == state.keys()


@torch.no_grad()
def test_blocks_that_can_and_cannot_be_exported() -> None:
    post, pre = (randomised(AttentionBlock(MultiHeadAttention(**PLAIN), norm=norm), 1) for norm in ("post", "pre"))
    assert isinstance(post, AttentionBlock)
    assert isinstance(pre, AttentionBlock)
    x = torch.randn(2, 5, 6, dtype=torch.float64)
    for layout in LAYOUTS:
        if layout in ("bert", "w_qs"):
            again = layouts.load_block(layouts.export(post, layout), 3, eps=1e-5)
            torch.testing.assert_close(again(x), post(x), rtol=1e-12, atol=1e-12)
            with refuses("expected a LayerNorm after the residual, received an AttentionBlock with norm='pre'"):
                layouts.export(pre, layout)
        else:
            with refuses("expected a layer without a LayerNorm", "remedy: export block.layer"):
                layouts.export(post, layout)


@torch.no_grad()
def test_a_norm_without_bias_stays_without() -> None:
    state = state_of("w_qs with norm")
    del state["layer_norm.bias"]
    block = layouts.load_block(state, 3)
    assert block.norm.bias is None
    torch.testing.assert_close(layouts.export(block, "w_qs"), state, rtol=0, atol=0)


def test_biases_of_some_projections() -> None:
    state = state_of("whisper")
    assert "k_proj.bias" not in state
    layer = layouts.load(state, 3)
    assert layer.k_proj.bias is None
    assert layer.q_proj.bias is not None
    with refuses(
        "biases of layout 'torch': expected none or on q, k, v, out, received on q, v, out",
        "remedy: a bias of zeros changes nothing",
    ):
        layouts.export(layer, "torch")


def test_export_to_an_unknown_layout() -> None:
    with refuses("layout: expected one of", "received 'gpt3'", "the nearest is 'gpt2'"):
        layouts.export(MultiHeadAttention(6, 3), "gpt3")


@torch.no_grad()
def test_the_copied_snippet_without_its_transpose_is_not_what_loads() -> None:
    original = ORIGINALS["qkv_layer"]
    theirs: Any = randomised(original.make(), 1)
    x = torch.randn(2, 5, 11, dtype=torch.float64)
    qkv = theirs.qkv_layer(x).reshape(2, 5, 3, -1).permute(0, 2, 1, 3)
    values = nn.functional.scaled_dot_product_attention(*qkv.chunk(3, -1))
    broken = theirs.linear_layer(values.reshape(2, 5, -1))
    ours = layouts.load(theirs.state_dict(), 3)
    assert not torch.allclose(ours(x), broken)
    torch.testing.assert_close(ours(x), original.run(theirs, x))


def test_the_room_has_its_names() -> None:
    for name in layouts.__all__:
        assert callable(getattr(layouts, name))  # a file of the same name does not hide the function
