"""`LatentAttention`: both forms against the formula and each other, caches, choice of the form, words of errors."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from regard import KVCache, LatentAttention, LatentCache
from regard.masks import Causal, Documents, Padding, Window
from regard.positions import Alibi, Rotary
from regard.positions.scalings import YaRN

pytestmark = pytest.mark.on_device

SIZES: dict[str, Any] = {
    "embed_dim": 17,
    "num_heads": 3,
    "kv_rank": 13,
    "nope_head_dim": 5,
    "rope_head_dim": 4,
    "value_head_dim": 7,
}


def layer_of(seed: int = 0, **options: Any) -> LatentAttention:
    options = {**SIZES, "position_encoding": Rotary(4, base=50.0, interleaved=True), **options}
    layer = LatentAttention(**options).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(generator=generator).mul_(0.5)
    return layer


def normal(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def close(a: Tensor, b: Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def by_formula(layer: LatentAttention, x: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    """The layer's equations, head by head and with the matrix of weights."""
    rank, nope, rope = layer.kv_rank, layer.nope_head_dim, layer.rope_head_dim
    low = layer.q_proj(x) if layer.q_rank is None else layer.q_up_proj(layer.q_norm(layer.q_down_proj(x)))
    c, shared = layer.kv_down_proj(x).split([rank, rope], -1)
    c = layer.kv_norm(c) * layer.latent_scale
    rotary = layer.position_encoding or (lambda x: x)
    shared = rotary(shared[:, None])[:, 0] if rope else shared
    outputs, weights = [], []
    for h in range(layer.num_heads):
        q = low.unflatten(-1, (layer.num_heads, -1))[:, :, h]
        up = layer.kv_up_proj(c).unflatten(-1, (layer.num_heads, -1))[:, :, h]
        q_rope = rotary(q[:, None, :, nope:])[:, 0] if rope else q[..., nope:]
        scores = q[..., :nope] @ up[..., :nope].mT + q_rope @ shared.mT
        scores = scores * layer.softmax_scale
        weights.append(scores.masked_fill(~visible, -math.inf).softmax(-1))
        outputs.append(weights[-1] @ up[..., nope:])
    return layer.out_proj(torch.cat(outputs, -1)), torch.stack(weights, 1)


@pytest.mark.parametrize("absorb", [None, False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"q_rank": 11, "bias": True},
        {"bias": True, "out_bias": False},
        {"latent_scale": 1.7, "scale": 0.3},
        {"position_encoding": None},
        {"rope_head_dim": 0, "position_encoding": None},
        {"position_encoding": Rotary(4, scaling=YaRN(4.0, 8, mscale=0.7, mscale_all_dim=1.3))},
    ],
)
def test_both_forms_are_the_formula(options: dict[str, Any], absorb: bool | None) -> None:
    layer, x = layer_of(absorb=absorb, **options), normal(2, 11, 17)
    out, weights = layer(x, mask=Causal(), need_weights=True)
    expected, expected_weights = by_formula(layer, x, Causal().dense(11, 11)[0, 0])
    close(out, expected)
    close(weights, expected_weights)
    assert torch.equal(layer(x, mask=Causal()), out)


@given(batch=st.integers(1, 3), n=st.integers(1, 7), before=st.integers(0, 7), low=st.booleans())
@settings(derandomize=True, max_examples=20, deadline=None)
def test_forms_agree_with_and_without_a_cache(batch: int, n: int, before: int, low: bool) -> None:
    layer, x = layer_of(q_rank=11 if low else None), normal(batch, before + n, 17)
    whole = layer(x, mask=Causal())
    for absorb in (False, True, None):
        layer.absorb = absorb
        close(layer(x, mask=Causal()), whole)
        with torch.no_grad():
            cache = LatentCache()
            if before:
                layer(x[:, :before], mask=Causal(), cache=cache)
            close(layer(x[:, before:], mask=Causal(), cache=cache), whole[:, before:])


def test_gradients_of_both_forms_are_the_same() -> None:
    layer, pull = layer_of(q_rank=11, bias=True), normal(2, 7, 17, seed=2)
    gradients = []
    for absorb in (False, True):
        layer.absorb, x = absorb, normal(2, 7, 17).requires_grad_()
        layer.zero_grad()
        (layer(x, mask=Causal() & Window(3)) * pull).sum().backward()
        gradients.append([x.grad, *(parameter.grad for parameter in layer.parameters())])
    for plain, absorbed in zip(*gradients, strict=True):
        close(plain, absorbed, 1e-11)


@pytest.mark.parametrize("absorb", [False, True])
def test_masks_biases_and_positions(absorb: bool) -> None:
    layer, plain = layer_of(absorb=absorb), layer_of(absorb=False)
    x, bias = normal(2, 7, 17), normal(3, 7, 7)[None]
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [0, 0, 1, 1, 2, 2, 2]])
    places = torch.tensor([[0, 1, 2, 0, 1, 2, 3], [0, 1, 0, 1, 0, 1, 2]])
    packed = layer(x, mask=Causal() & Documents(documents), positions=places)
    alone = layer(x[:1, 3:], mask=Causal())
    close(packed[:1, 3:], alone)
    for options in ({"mask": Padding(lengths=torch.tensor([7, 3]))}, {"bias": bias}, {"bias": Alibi(3)}):
        close(layer(x, **options), plain(x, **options))


def test_without_a_batch() -> None:
    layer, x = layer_of(), normal(5, 17)
    out, weights = layer(x, mask=Causal(), need_weights=True)
    batched, batched_weights = layer(x[None], mask=Causal(), need_weights=True)
    close(out, batched[0])
    close(weights, batched_weights[0])
    close(layer(x, mask=Causal()), out)


@torch.no_grad()
def test_rows_of_different_lengths_and_beams() -> None:
    layer, x = layer_of(), normal(2, 9, 17)
    cache = LatentCache()
    layer(x[:, :6], mask=Causal(), cache=cache)
    cache.truncate(torch.tensor([6, 4]))
    more = torch.stack([x[0, 6:8], x[1, 4:6]])
    out = layer(more, mask=Causal(), cache=cache)
    close(out[0], layer(x, mask=Causal())[0, 6:8])
    close(out[1], layer(x, mask=Causal())[1, 4:6])
    cache = LatentCache()
    layer(x[:, :6], mask=Causal(), cache=cache)
    cache.reorder(torch.tensor([1, 1]))
    twice = x[[1, 1]]
    close(layer(twice[:, 6:], mask=Causal(), cache=cache), layer(twice, mask=Causal())[:, 6:])


@torch.no_grad()
def test_given_positions_are_remembered_by_the_cache() -> None:
    layer, x, places = layer_of(), normal(2, 7, 17), torch.tensor([[3, 4, 5, 9, 10, 11, 12]])
    whole = layer(x, mask=Causal(), positions=places)
    cache = LatentCache()
    layer(x[:, :4], mask=Causal(), positions=places[:, :4], cache=cache)
    close(layer(x[:, 4:], mask=Causal(), positions=places[:, 4:], cache=cache), whole[:, 4:])


@torch.no_grad()
def test_a_call_that_fails_leaves_the_cache_as_it_was() -> None:
    layer, x, cache = layer_of(), normal(2, 7, 17), LatentCache(limit=6)
    layer(x[:, :4], mask=Causal(), cache=cache)
    held = cache.tokens.clone()
    with pytest.raises(ValueError, match=r"mask"):
        layer(x[:, 4:6], mask=torch.ones(3, 3, dtype=torch.bool), cache=cache)
    with pytest.raises(
        ValueError, match=r"cache: expected at most 6 tokens, received 4 held and 3 new; remedy: a larger"
    ):
        layer(x[:, 4:], mask=Causal(), cache=cache)
    assert len(cache) == 4
    assert torch.equal(cache.tokens, held)
    close(layer(x[:, 4:6], mask=Causal(), cache=cache), layer(x, mask=Causal())[:, 4:6])


class TestChoiceOfTheForm:
    def which(self, layer: LatentAttention, n: int, m: int) -> str:
        return "absorbed" if layer._absorbs(n, m) else "plain"

    @pytest.mark.of_cpu("the operations that are counted are others elsewhere")
    def test_by_the_number_of_multiply_adds(self) -> None:
        layer = LatentAttention(64, 4, kv_rank=512, nope_head_dim=128, rope_head_dim=64)

        def products(n: int, m: int) -> dict[str, int]:
            return {"plain": m * 512 * 256 + n * m * (192 + 128), "absorbed": n * 512 * 256 + n * m * (576 + 512)}

        for n, m in ((1, 1), (1, 2), (1, 4096), (16, 4096), (160, 4096), (170, 4096), (512, 4096), (4096, 4096)):
            costs = products(n, m)
            assert costs[self.which(layer, n, m)] == min(costs.values())
        assert self.which(layer, 1, 4096) == "absorbed"
        assert self.which(layer, 64, 64) == "plain"

    def test_forced(self) -> None:
        layer = layer_of(absorb=True)
        assert self.which(layer, 7, 7) == "absorbed"
        layer.absorb = False
        assert self.which(layer, 1, 4096) == "plain"

    def test_what_stands_for_a_linear_layer_is_called(self) -> None:
        layer, x = layer_of(), normal(2, 7, 17)
        whole = layer(x, mask=Causal())
        layer.kv_up_proj = nn.Sequential(layer.kv_up_proj)
        assert self.which(layer, 1, 4096) == "plain"
        close(layer(x, mask=Causal()), whole)
        layer.absorb = True
        with pytest.raises(ValueError, match=r"absorb: expected nn.Linear as kv_up_proj, received Sequential"):
            layer(x)

    def test_hooks_are_called(self) -> None:
        layer = layer_of()
        assert self.which(layer, 1, 4096) == "absorbed"
        layer.kv_up_proj.register_forward_hook(lambda *_: None)
        assert self.which(layer, 1, 4096) == "plain"

    @torch.no_grad()
    def test_values_of_the_absorbed_form_are_a_view_of_the_cache(self) -> None:
        layer, x, cache = layer_of(absorb=True), normal(2, 7, 17), LatentCache(capacity=16)
        layer(x, mask=Causal(), cache=cache)
        q_content, q_rotary, _, _ = layer._project(x[:, :1])
        _, k, v = layer._absorbed(q_content, q_rotary, cache.tokens)
        assert k.shape == (2, 1, 7, 17)
        assert v.shape == (2, 1, 7, 13)
        assert k.data_ptr() == v.data_ptr() == cache._rows._keys.data_ptr()


def test_dropout_is_for_training() -> None:
    layer, x = layer_of(dropout=0.5), normal(2, 7, 17)
    torch.manual_seed(0)
    dropped = layer(x)
    layer.eval()
    assert not torch.allclose(layer(x), dropped)
    close(layer(x), layer_of()(x))


@pytest.mark.parametrize("absorb", [False, True])
def test_half_precision_and_autocast(absorb: bool) -> None:
    layer, x = layer_of(absorb=absorb, q_rank=11).float(), normal(2, 7, 17).float()
    whole = layer(x, mask=Causal())
    with torch.autocast("cpu", torch.bfloat16):
        cast = layer(x, mask=Causal())
    torch.testing.assert_close(cast.float(), whole, rtol=0.1, atol=0.1)
    half = copy.deepcopy(layer).bfloat16()(x.bfloat16(), mask=Causal())
    torch.testing.assert_close(half.float(), whole, rtol=0.1, atol=0.1)


def test_state_dict_and_copies() -> None:
    layer, x = layer_of(q_rank=11), normal(2, 5, 17)
    other = layer_of(seed=7, q_rank=11)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x), layer(x))
    assert torch.equal(copy.deepcopy(layer)(x), layer(x))
    names = [name for name, _ in layer.named_children()]
    assert names == [
        "q_down_proj",
        "q_norm",
        "q_up_proj",
        "kv_down_proj",
        "kv_norm",
        "kv_up_proj",
        "out_proj",
        "position_encoding",
    ]


def test_bytes_per_token() -> None:
    layer = LatentAttention(2048, 16, kv_rank=512, nope_head_dim=128, rope_head_dim=64).to(torch.bfloat16)
    assert layer.cache_sizes(num_kv_heads=4) == {"latent": 1152, "MHA": 10240, "GQA of 4": 2560, "MQA": 640}
    assert "cache: 1,152 bytes per token ((512 + 64) x 2 bytes); MHA 10,240, GQA of 2 1,280" in layer.describe(7)


def test_repr_and_description() -> None:
    layer = layer_of(q_rank=11, absorb=True, dropout=0.1)
    expected = "17, num_heads=3, kv_rank=13, nope_head_dim=5, rope_head_dim=4, value_head_dim=7, q_rank=11, dropout=0.1"
    assert f"{expected}, absorb=True" in repr(layer)
    total = sum(parameter.numel() for parameter in layer.parameters())
    described = layer.describe(5)
    assert f"{total:,}" in described
    assert "q_down_proj" in described


class TestErrors:
    @pytest.mark.parametrize(
        "options, words",
        [
            ({"kv_rank": 0}, r"kv_rank: expected an integer of at least 1, received 0"),
            ({"rope_head_dim": -1}, r"rope_head_dim: expected an integer of at least 0, received -1"),
            ({"q_rank": 0}, r"q_rank: expected an integer of at least 1, received 0"),
            ({"dropout": 2.0}, r"dropout: expected a probability from 0 to 1, received 2.0"),
            ({"absorb": "yes"}, r"absorb: expected True, False or None, received 'yes'"),
            ({"init": "zeros"}, r"init: expected"),
            ({"position_encoding": Rotary(6)}, r"position_encoding: expected Rotary of head width 4, received 6"),
        ],
    )
    def test_of_the_constructor(self, options: dict[str, Any], words: str) -> None:
        with pytest.raises(ValueError, match=words):
            LatentAttention(**{**SIZES, **options})

    def test_of_types(self) -> None:
        with pytest.raises(
            TypeError, match=r"position_encoding: expected Rotary or None, received Alibi; remedy: regard"
        ):
            LatentAttention(**SIZES, position_encoding=Alibi(3))  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"LatentAttention: expected arguments of its own, received kv_lora_rank="):
            LatentAttention(**SIZES, kv_lora_rank=5)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"dropout: expected a number, received str"):
            LatentAttention(**SIZES, dropout="0.1")  # type: ignore[arg-type]

    def test_of_the_call(self) -> None:
        layer, x = layer_of(), normal(2, 5, 17)
        with pytest.raises(TypeError, match=r"x: expected a tensor, received list"):
            layer([1])
        with pytest.raises(
            TypeError, match=r"cache: expected a LatentCache, received KVCache; remedy: cache=regard.Latent"
        ):
            layer(x, cache=KVCache())
        with pytest.raises(TypeError, match=r"the call of LatentAttention: expected arguments.*mask=masks.Causal"):
            layer(x, is_causal=True)
        with pytest.raises(ValueError, match=r"expected shape \(B, length, 17\)"):
            layer(normal(2, 5, 16))
        with pytest.raises(TypeError, match=r"expected torch.float64, as the layer's weights, received torch.float32"):
            layer(x.float())

    def test_a_cache_is_for_inference_and_for_one_layer(self) -> None:
        layer, x, cache = layer_of(), normal(2, 5, 17), LatentCache()
        with pytest.raises(ValueError, match=r"cache: expected keys and values without gradient"):
            layer(x, cache=cache)
        with torch.no_grad():
            layer(x, cache=cache)
            with pytest.raises(ValueError, match=r"cache: expected one for each layer, received one with 5 tokens"):
                layer_of()(x, cache=cache)
