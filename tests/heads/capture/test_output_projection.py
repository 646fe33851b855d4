"""What each head adds to its layer's output: by what entered the output projection, held against what came out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from heads.tiny_models import EXPERTS, HYBRID, LATENT, tiny
from torch import Tensor, nn

import regard
from regard.heads.record.record import LayerRecord

B, N, H, E, W = 2, 7, 3, 5, 11

# A class of transformers, its sizes, its output projections, and whether something is between the heads and them.
MODELS: dict[str, tuple[str, dict[str, Any], str, bool]] = {
    "afmoe": ("AfmoeForCausalLM", EXPERTS, "self_attn.o_proj", True),
    "bitnet": ("BitNetForCausalLM", {}, "self_attn.o_proj", True),
    "laguna": ("LagunaForCausalLM", EXPERTS, "self_attn.o_proj", True),
    "qwen3_next": ("Qwen3NextForCausalLM", EXPERTS | HYBRID, "self_attn.o_proj", True),
    "qwen3_5": ("Qwen3_5ForCausalLM", HYBRID, "self_attn.o_proj", True),
    "bert": ("BertModel", {}, "attention.output.dense", False),
    "bloom": ("BloomForCausalLM", {"n_head": 6, "n_layer": 2}, "self_attention.dense", False),
    "cohere": ("CohereForCausalLM", {}, "self_attn.o_proj", False),
    "deepseek_v3": ("DeepseekV3ForCausalLM", EXPERTS | LATENT, "self_attn.o_proj", False),
    "gpt2": ("GPT2LMHeadModel", {"n_embd": 24, "n_head": 6, "n_layer": 2}, "attn.c_proj", False),
    "gptj": ("GPTJForCausalLM", {"n_embd": 24, "n_head": 6, "n_layer": 2, "rotary_dim": 4}, "attn.out_proj", False),
    "gpt_neox": ("GPTNeoXForCausalLM", {}, "attention.dense", False),
    "llama": ("LlamaForCausalLM", {}, "self_attn.o_proj", False),
    "modernbert": ("ModernBertModel", {}, "attn.Wo", False),
    "opt": ("OPTForCausalLM", {"word_embed_proj_dim": 24, "ffn_dim": 13}, "self_attn.out_proj", False),
    "vit": ("ViTModel", {"image_size": 8, "patch_size": 4}, "attention.o_proj", False),
}


def given(kind: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    if kind == "vit":
        return {"pixel_values": torch.randn(B, 3, 8, 8, generator=generator)}
    return {"input_ids": torch.randint(3, 23, (B, N), generator=generator)}


def whole(layer: LayerRecord) -> Tensor:
    """All that the heads add, and the bias: (B, N, W)."""
    assert layer.projection is not None
    bias = layer.projection[1]
    return layer.projected().sum(1) + (0 if bias is None else bias)


@pytest.mark.parametrize("kind", MODELS)
def test_what_heads_add_sums_to_what_the_projection_gave(kind: str) -> None:
    made, sizes, name, between = MODELS[kind]
    model = tiny(made, sizes)
    went: list[tuple[nn.Module, Tensor, Tensor]] = []
    for path, module in model.named_modules():
        if path.endswith(name):
            module.register_forward_hook(lambda m, args, out: went.append((m, args[0], out)))
    with torch.no_grad(), regard.watch(model, measures=["entropy", "contribution"], keep="qkv") as seen:
        model(**given(kind))
    assert len(seen) == len(went) > 0
    for layer, (module, entered, out) in zip(seen, went, strict=True):
        torch.testing.assert_close(whole(layer), out.view(B, -1, out.shape[-1]), rtol=1e-4, atol=1e-5)
        weight = module.weight.mT if type(module).__name__ == "Conv1D" else module.weight  # type: ignore[union-attr]
        heads = layer.heads
        slices = entered.reshape(B, -1, heads, weight.shape[1] // heads)  # type: ignore[index]
        alone = slices[:, :, 1] @ weight.unflatten(1, (heads, -1))[:, 1].mT  # type: ignore[union-attr]
        torch.testing.assert_close(layer.projected()[:, 1], alone.detach(), rtol=1e-4, atol=1e-5)
        apart = layer.output.transpose(1, 2) - slices
        assert (apart.abs().max() > 1e-3) == between
        if between:
            assert not layer.has("contribution")
            with pytest.raises(
                AttributeError,
                match="it needs heads' outputs "
                "that enter the output projection as they are, and a gate or a norm is between them",
            ):
                _ = layer.contribution
        elif kind not in ("bloom", "gptj"):  # (which write attention by hand)
            assert layer.contribution.shape == (B, heads, layer.text.queries)  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", ["afmoe", "laguna", "qwen3_next"])
def test_a_gate_leaves_heads_where_they_are(kind: str) -> None:
    """Without head 2 its part is 0, and the others' parts are what they were."""
    made, sizes, _, _ = MODELS[kind]
    model = tiny(made, sizes)
    with torch.no_grad(), regard.watch(model, keep="qkv") as before:
        model(**given(kind))
    first = before[0]
    with torch.no_grad(), regard.watch(model, keep="qkv") as after, regard.ablate(model, {first.name: [2]}):
        model(**given(kind))
    expected = first.projected().clone()
    assert expected[:, 2].abs().max() > 1e-3
    expected[:, 2] = 0
    torch.testing.assert_close(after[0].projected(), expected)


def test_a_gated_text_in_pieces() -> None:
    """Token after token from a cache, as all at once."""
    model, ids = tiny("LagunaForCausalLM", EXPERTS), given("laguna")["input_ids"]
    with torch.no_grad(), regard.watch(model, keep="qkv") as seen:
        model(ids)
    with torch.no_grad(), regard.watch(model, keep="qkv") as pieces:
        past = model(ids[:, :4], use_cache=True).past_key_values
        for i in range(4, N):
            past = model(ids[:, i : i + 1], past_key_values=past, use_cache=True).past_key_values
    for one, other in zip(seen, pieces, strict=True):
        assert other.text is not None
        assert len(other.text.pieces) == 4
        torch.testing.assert_close(other.projected(), one.projected(), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(other.projected(slice(3, 6)), one.projected()[:, :, 3:6], rtol=1e-4, atol=1e-5)


def test_heads_that_are_subtracted_from_each_other_are_refused() -> None:
    """Differential attention: two attentions go into one projection."""
    model = tiny("DiffLlamaForCausalLM", {"num_key_value_heads": 2})
    with torch.no_grad(), regard.watch(model, keep="qkv", measures=["entropy", "contribution"]) as seen:
        model(**given("diffllama"))
    assert seen[0].projection is None
    assert not seen[0].has("contribution")
    words = r"projected: expected an output projection \(W, H \* E\) that the heads of this layer enter, received "
    with pytest.raises(ValueError, match=words + "one that several attentions enter together"):
        seen[0].projected()


# Modules of one's own


class Own(nn.Module):
    """Attention whose heads go `way` to the output projection."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.q, self.k, self.v = (nn.Linear(W, H * E) for _ in range(3))
        self.gate, self.o_proj = nn.Linear(W, H * E), nn.Linear(H * E, W)
        self.norm = nn.LayerNorm(H * E)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (H, E)).transpose(1, 2) for p in (self.q, self.k, self.v))
        z = F.scaled_dot_product_attention(q, k, v)
        if self.way == "in place":
            z *= torch.sigmoid(self.gate(x)).unflatten(-1, (H, E)).transpose(1, 2)
        z = z.transpose(1, 2).flatten(2)
        if self.way == "gate":
            z = z * torch.sigmoid(self.gate(x))
        if self.way == "norm":
            z = self.norm(z)
        if self.way == "flat":
            return self.o_proj(z.flatten(0, 1)).view(B, N, W)
        if self.way == "batch second":
            return self.o_proj(z.transpose(0, 1)).transpose(0, 1)
        if self.way == "a function":
            return F.linear(z, self.o_proj.weight, self.o_proj.bias)
        if self.way == "fewer":
            return self.o_proj(z[:, 1:])
        return self.o_proj(z)


def watched(layer: nn.Module, x: Tensor) -> tuple[LayerRecord, Tensor]:
    with torch.no_grad(), regard.watch(layer, keep="qkv", measures=["entropy", "contribution"]) as seen:
        out = layer(x)
    return seen[0], out


@pytest.mark.parametrize("way", ["plain", "gate", "in place", "norm", "flat", "batch second"])
def test_ways_to_the_projection(way: str) -> None:
    torch.manual_seed(1)
    own, x = Own(way), torch.randn(B, N, W)
    layer, out = watched(own, x)
    torch.testing.assert_close(whole(layer), out, rtol=1e-5, atol=1e-6)
    assert layer.has("contribution") == (way in ("plain", "flat", "batch second"))
    q, k, v = (p(x).unflatten(-1, (H, E)).transpose(1, 2) for p in (own.q, own.k, own.v))
    torch.testing.assert_close(layer.output, F.scaled_dot_product_attention(q, k, v).detach())


@pytest.mark.parametrize(
    "way, words",
    [
        ("a function", "one that was not seen to run"),
        ("fewer", r"one that was given \(2, 6, 15\) after heads of \(2, 3, 7, 5\)"),
        ("a hook", "one whose result is not its weight times what it was given"),
    ],
)
def test_ways_that_are_refused(way: str, words: str) -> None:
    torch.manual_seed(1)
    own = Own(way)
    if way == "a hook":
        own.o_proj.register_forward_hook(lambda module, args, out: out * 1.01)
    layer, _ = watched(own, torch.randn(B, N, W))
    with pytest.raises(ValueError, match=f"that the heads of this layer enter, received {words}"):
        layer.projected()
    assert layer.projection is None
    with pytest.raises(AttributeError, match=f"enter the output projection as they are, and {words}"):
        _ = layer.contribution


def test_a_weight_of_ones_own_is_believed() -> None:
    """Who names the weight wants the norms by it."""
    own = Own("gate")
    measure = regard.measures.Contribution(own.o_proj.weight)
    with torch.no_grad(), regard.watch(own, measures=measure) as seen:
        own(torch.randn(B, N, W))
    assert seen[0].contribution.shape == (B, H, N)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_in_other_precisions(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    layer, out = watched(Own("gate").to(dtype), torch.randn(B, N, W, dtype=dtype))
    rtol, atol = (1e-9, 1e-9) if dtype is torch.float64 else (0.05, 0.02)
    torch.testing.assert_close(whole(layer), out, rtol=rtol, atol=atol)


def test_under_autocast() -> None:
    torch.manual_seed(1)
    with torch.autocast("cpu", torch.bfloat16):
        layer, out = watched(Own("gate"), torch.randn(B, N, W))
    torch.testing.assert_close(whole(layer).float(), out.float(), rtol=0.05, atol=0.02)


def test_the_flow_of_a_gated_layer() -> None:
    """The page shows what the layer gave, and the heads' real parts of it."""
    from draw.test_page import Reader, page, signed, weights

    torch.manual_seed(1)
    own = Own("gate")
    with torch.no_grad(), regard.watch(own, keep="qkv") as seen:
        out = own(torch.randn(1, N, W))
    said, data = Reader(page(seen, list("abcdefg"))).layer(0, 0)
    result, half = signed(data, said["flow"]["result"])
    assert bool(((result - out[0].double()).abs() <= half + 1e-6).all())
    norms, steps = weights(data, said["flow"]["norms"])
    assert bool(((norms - seen[0].projected()[0].norm(dim=-1).double()).abs() <= steps + 1e-6).all())
