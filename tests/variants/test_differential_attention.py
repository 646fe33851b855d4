"""`DifferentialAttention`: against the paper's formulas and DiffLlama of transformers; caches; words of errors."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from regard import DifferentialAttention, KVCache, LatentCache, RollingCache, layouts
from regard.masks import Causal, Documents, Padding, Window
from regard.positions import Alibi, Rotary
from regard.variants.differential_attention import lambda_init_at

pytestmark = pytest.mark.on_device

SIZES: dict[str, Any] = {"embed_dim": 14, "num_heads": 6, "num_kv_heads": 3, "head_dim": 4}


def layer_of(seed: int = 0, **options: Any) -> DifferentialAttention:
    layer = DifferentialAttention(**{**SIZES, "position_encoding": Rotary(4, base=50.0), "lambda_init": 0.3, **options})
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in layer.double().parameters():
            parameter.normal_(generator=generator).mul_(0.5)
    return layer


def normal(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def close(a: Tensor, b: Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def by_formula(layer: DifferentialAttention, x: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    """The paper's equations, head by head and with the matrices of weights."""
    d, heads, kv_heads = layer.head_dim, layer.num_heads, layer.num_kv_heads
    rotary = layer.position_encoding or (lambda x: x)
    q = layer.q_proj(x).unflatten(-1, (2, heads, d))
    k = layer.k_proj(x).unflatten(-1, (2, kv_heads, d))
    v = layer.v_proj(x).unflatten(-1, (kv_heads, 2 * d))
    factor = (
        torch.exp(layer.lambda_q1 @ layer.lambda_k1) - torch.exp(layer.lambda_q2 @ layer.lambda_k2) + layer.lambda_init
    )
    outputs, weights = [], []
    for h in range(heads):
        g = h // (heads // kv_heads)
        softmaxes = []
        for i in range(2):
            scores = rotary(q[:, None, :, i, h])[:, 0] @ rotary(k[:, None, :, i, g])[:, 0].mT / math.sqrt(d)
            softmaxes.append(scores.masked_fill(~visible, -math.inf).softmax(-1))
        weights.append(softmaxes[0] - factor * softmaxes[1])
        out = weights[-1] @ v[:, :, g]
        out = out / (out.pow(2).mean(-1, keepdim=True) + layer.head_norm.eps).sqrt()
        if layer.head_norm.weight is not None:
            out = out * layer.head_norm.weight
        outputs.append((1 - layer.lambda_init) * out)
    return layer.out_proj(torch.cat(outputs, -1)), torch.stack(weights, 1)


@pytest.mark.parametrize(
    "options", [{}, {"bias": True}, {"norm_affine": True, "out_bias": True}, {"position_encoding": None}]
)
def test_the_papers_formula(options: dict[str, Any]) -> None:
    layer, x = layer_of(**options), normal(2, 11, 14)
    out, weights = layer(x, mask=Causal(), need_weights=True)
    expected, expected_weights = by_formula(layer, x, Causal().dense(11, 11)[0, 0])
    close(out, expected)
    close(weights, expected_weights)
    close(weights.sum(-1), (1 - layer.lambda_()).expand(2, 6, 11))
    assert torch.equal(layer(x, mask=Causal()), out)


def test_gradients_are_those_of_the_formula() -> None:
    layer, pull = layer_of(bias=True, norm_affine=True), normal(2, 7, 14, seed=2)
    gradients = []
    for run in (lambda x: layer(x, mask=Causal()), lambda x: by_formula(layer, x, Causal().dense(7, 7)[0, 0])[0]):
        layer.zero_grad()
        x = normal(2, 7, 14).requires_grad_()
        (run(x) * pull).sum().backward()
        gradients.append([x.grad, *(parameter.grad for parameter in layer.parameters())])
    for ours, expected in zip(*gradients, strict=True):
        assert expected is not None
        close(ours, expected, 1e-10)


def test_equal_softmaxes_cancel() -> None:
    """With the same query and key twice, weights are (1 - lambda) softmax, and lambda alone is seen."""
    layer = layer_of(position_encoding=None)
    with torch.no_grad():
        for projection in (layer.q_proj, layer.k_proj):
            half = projection.weight.shape[0] // 2
            projection.weight[half:] = projection.weight[:half]
        for vector in (layer.lambda_q1, layer.lambda_q2):
            vector.zero_()
    close(layer.lambda_(), torch.tensor(0.3, dtype=torch.float64))
    _, weights = layer(normal(1, 5, 14), need_weights=True)
    assert (weights > 0).all()
    close(weights.sum(-1), torch.full((1, 6, 5), 0.7, dtype=torch.float64))


@given(batch=st.integers(1, 3), n=st.integers(1, 5), before=st.integers(0, 7))
@settings(derandomize=True, max_examples=20, deadline=None)
def test_a_cache_continues(batch: int, n: int, before: int) -> None:
    layer, x = layer_of(), normal(batch, before + n, 14)
    whole = layer(x, mask=Causal())
    with torch.no_grad():
        cache = KVCache()
        if before:
            layer(x[:, :before], mask=Causal(), cache=cache)
        out, weights = layer(x[:, before:], mask=Causal(), cache=cache, need_weights=True)
    close(out, whole[:, before:])
    assert weights.shape == (batch, 6, n, before + n)
    assert cache.keys.shape == (batch, 3, before + n, 8)  # both keys of a kv head, side by side


def test_masks_positions_and_no_batch() -> None:
    layer, x = layer_of(), normal(2, 7, 14)
    documents, places = torch.tensor([[0, 0, 0, 1, 1, 1, 1]] * 2), torch.tensor([[0, 1, 2, 0, 1, 2, 3]])
    packed = layer(x, mask=Causal() & Documents(documents), positions=places)
    close(packed[:, 3:], layer(x[:, 3:], mask=Causal()))
    padded = layer(x, mask=Padding(lengths=torch.tensor([7, 3])))
    close(padded[1, :3], layer(x[1:, :3])[0])
    _, weights = layer(x, mask=Causal() & Window(2), bias=Alibi(6), need_weights=True)
    assert (weights != 0).sum(-1).amax() == 2
    out, weights = layer(x[0], mask=Causal(), need_weights=True)
    batched, batched_weights = layer(x[:1], mask=Causal(), need_weights=True)
    close(out, batched[0])
    close(weights, batched_weights[0])
    close(layer(x[0], mask=Causal()), out)


@torch.no_grad()
def test_rows_of_different_lengths_and_a_call_that_fails() -> None:
    layer, x, cache = layer_of(), normal(2, 9, 14), KVCache()
    layer(x[:, :6], mask=Causal(), cache=cache)
    with pytest.raises(ValueError, match="mask"):
        layer(x[:, 6:7], mask=torch.ones(3, 3, dtype=torch.bool), cache=cache)
    cache.truncate(torch.tensor([6, 4]))
    out = layer(torch.stack([x[0, 6:8], x[1, 4:6]]), mask=Causal(), cache=cache)
    close(out[0], layer(x, mask=Causal())[0, 6:8])
    close(out[1], layer(x, mask=Causal())[1, 4:6])


def test_half_precision_and_autocast() -> None:
    layer, x = layer_of(norm_affine=True).float(), normal(2, 7, 14).float()
    whole = layer(x, mask=Causal())
    with torch.autocast("cpu", torch.bfloat16):
        cast = layer(x, mask=Causal())
    torch.testing.assert_close(cast.float(), whole, rtol=0.1, atol=0.1)
    half = copy.deepcopy(layer).bfloat16()(x.bfloat16(), mask=Causal())
    torch.testing.assert_close(half.float(), whole, rtol=0.1, atol=0.1)


def test_repr_and_description() -> None:
    layer = layer_of(kernel="reference", norm_affine=True)
    assert "14, num_heads=6, num_kv_heads=3, head_dim=4, lambda_init=0.3, kernel='reference'" in repr(layer)
    assert f"{sum(parameter.numel() for parameter in layer.parameters()):,}" in layer.describe(5)
    assert "cache: 384 bytes per token (3 kv heads x (8 + 8) x 8 bytes)" in layer.describe(5)
    assert lambda_init_at(0) == pytest.approx(0.2)


class TestErrors:
    @pytest.mark.parametrize(
        "options, words",
        [
            ({"num_heads": 5, "head_dim": None}, r"num_heads: expected a divisor of embed_dim / 2 = 7, received 5"),
            ({"num_kv_heads": 4}, r"num_kv_heads: expected a divisor of num_heads = 6, received 4"),
            ({"head_dim": 0}, r"head_dim: expected an integer of at least 1"),
            ({"init": "zeros"}, r"init: expected"),
            ({"dropout": 0.1}, r"dropout: expected none: it is not defined for a difference of two softmaxes"),
            ({"position_encoding": Rotary(8)}, r"position_encoding: expected Rotary of head width 4, received 8"),
        ],
    )
    def test_of_the_constructor(self, options: dict[str, Any], words: str) -> None:
        with pytest.raises(ValueError, match=words):
            DifferentialAttention(**{**SIZES, **options})
        DifferentialAttention(**SIZES, dropout=0.0)  # type: ignore[arg-type]

    def test_of_types(self) -> None:
        with pytest.raises(TypeError, match=r"lambda_init: expected a number, received str"):
            DifferentialAttention(**SIZES, lambda_init="0.8")  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"DifferentialAttention: expected arguments of its own, received heads="):
            DifferentialAttention(**SIZES, heads=3)  # type: ignore[arg-type]

    @pytest.mark.parametrize("cache", [RollingCache(window=3), LatentCache()])
    def test_of_caches(self, cache: Any) -> None:
        with pytest.raises(TypeError, match=r"cache: expected a KVCache, received (Rolling|Latent)Cache"):
            layer_of()(normal(2, 3, 14), cache=cache)


def test_a_sequence_is_not_sharded() -> None:
    from regard.parallel.sequence import refuse_other_attention

    with pytest.raises(
        ValueError, match=r"1: expected MultiHeadAttention.*received DifferentialAttention; remedy: shard_"
    ):
        refuse_other_attention(nn.Sequential(nn.Identity(), layer_of()))


class TestDiffLlama:
    def make(self, **options: Any) -> tuple[nn.Module, nn.Module, DifferentialAttention]:
        from transformers import DiffLlamaConfig
        from transformers.models.diffllama.modeling_diffllama import DiffLlamaAttention, DiffLlamaRotaryEmbedding

        config = DiffLlamaConfig(
            hidden_size=12,
            num_attention_heads=12,
            num_key_value_heads=6,
            head_dim=4,
            num_hidden_layers=7,
            attn_implementation="eager",
            rope_parameters={"rope_type": "default", "rope_theta": 100.0},
            **options,
        )
        module = DiffLlamaAttention(config, layer_idx=5).eval()
        generator = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.normal_(generator=generator).mul_(0.5)
        told = {"lambda_init": lambda_init_at(5), "norm_eps": config.rms_norm_eps}
        layer = layouts.load(module.state_dict(), 6, position_encoding=Rotary(4, base=100.0), **told)
        assert isinstance(layer, DifferentialAttention)
        return module, DiffLlamaRotaryEmbedding(config), layer

    def run(self, module: nn.Module, rotary: nn.Module, x: Tensor, cache: Any = None, start: int = 0) -> Any:
        n, m = x.shape[1], start + x.shape[1]
        mask = torch.zeros(n, m).masked_fill(~Causal().dense(n, m)[0, 0], -math.inf)[None, None]
        places = rotary(x, torch.arange(start, m)[None])
        out, weights = module(x, position_embeddings=places, attention_mask=mask, past_key_values=cache)
        return out, weights

    @pytest.mark.parametrize("bias", [False, True])
    def test_output_weights_and_gradients(self, bias: bool) -> None:
        module, rotary, layer = self.make(attention_bias=bias)
        x, y = (normal(2, 13, 12).float().requires_grad_() for _ in range(2))
        pull = normal(2, 13, 12, seed=2).float()
        out, weights = layer(x, mask=Causal(), need_weights=True)
        theirs, both = self.run(module, rotary, y)
        close(out, theirs, 1e-5)
        close(weights, both[:, :6] - layer.lambda_() * both[:, 6:], 1e-5)
        (out * pull).sum().backward()
        (theirs * pull).sum().backward()
        assert x.grad is not None
        assert y.grad is not None
        close(x.grad, y.grad, 3e-5)
        for parameter in layer.parameters():
            assert parameter.grad is not None
            parameter.data = parameter.grad
        gradients = layouts.export(layer, "diffllama")
        for key, parameter in module.named_parameters():
            assert parameter.grad is not None
            close(gradients[key], parameter.grad, 1e-5 * max(1.0, float(parameter.grad.abs().amax())))

    @torch.no_grad()
    def test_prefill_and_decoding_token_by_token(self) -> None:
        from transformers import DynamicCache

        module, rotary, layer = self.make()
        x, ours, theirs = normal(2, 13, 12).float(), KVCache(), DynamicCache()
        for start, stop in ((0, 8), *((i, i + 1) for i in range(8, 13))):
            out = layer(x[:, start:stop], mask=Causal(), cache=ours)
            close(out, self.run(module, rotary, x[:, start:stop], theirs, start)[0], 1e-5)

    @pytest.mark.parametrize("interleaved", [False, True])
    def test_weights_go_back_bit_for_bit(self, interleaved: bool) -> None:
        module, _, layer = self.make(attention_bias=True)
        told = {"lambda_init": layer.lambda_init, "norm_eps": layer.head_norm.eps}
        other = layouts.load(
            module.state_dict(), 6, position_encoding=Rotary(4, base=100.0, interleaved=interleaved), **told
        )
        x = normal(2, 5, 12).float()
        close(other(x), layer(x), 1e-5)
        back = layouts.export(other, "diffllama")
        assert back.keys() == module.state_dict().keys()
        for key, tensor in module.state_dict().items():
            assert torch.equal(back[key], tensor), key
