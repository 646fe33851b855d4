"""The table of well-known models: every entry builds, and its numbers are those that were published."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import regard
from regard import MultiHeadAttention
from regard.positions import LinearScaling, Llama3, MultiAxisRotary, RelativeBias, Rotary
from regard.positions.scalings import Scaling
from regard.presets import CONFIGURATIONS, configuration

PARAMETERS = {  # of one attention layer: weights, then biases
    "bert-base": 4 * 768 * 768 + 4 * 768,
    "bert-large": 4 * 1024 * 1024 + 4 * 1024,
    "minilm": 4 * 384 * 384 + 4 * 384,
    "vit-b16": 4 * 768 * 768 + 4 * 768,
    "gpt2": 4 * 768 * 768 + 4 * 768,
    "gpt2-medium": 4 * 1024 * 1024 + 4 * 1024,
    "gpt2-large": 4 * 1280 * 1280 + 4 * 1280,
    "gpt2-xl": 4 * 1600 * 1600 + 4 * 1600,
    "gpt3": 4 * 12288 * 12288 + 4 * 12288,
    "t5-small": 4 * 512 * 512 + 32 * 8,
    "t5-base": 4 * 768 * 768 + 32 * 12,
    "pythia-160m": 4 * 768 * 768 + 4 * 768,
    "llama2-7b": 4 * 4096 * 4096,
    "llama3-8b": 2 * 4096 * 4096 + 2 * 4096 * 1024,
    "llama3.1-8b": 2 * 4096 * 4096 + 2 * 4096 * 1024,
    "mistral-7b": 2 * 4096 * 4096 + 2 * 4096 * 1024,
    "smollm2-135m": 2 * 576 * 576 + 2 * 576 * 192,
    "qwen2.5-0.5b": 2 * 896 * 896 + 2 * 896 * 128 + 896 + 2 * 128,
    "qwen3-0.6b": 2 * 1024 * 2048 + 2 * 1024 * 1024 + 2 * 128,
    "gemma2-2b": 2 * 2304 * 2048 + 2 * 2304 * 1024,
    "modernbert-base": 4 * 768 * 768,
    "mistral-small-24b": 2 * 5120 * 4096 + 2 * 5120 * 1024,
    "gemma3-4b": 2 * 2560 * 2048 + 2 * 2560 * 1024 + 2 * 256,
    "smollm3-3b": 2 * 2048 * 2048 + 2 * 2048 * 512,
    "gpt-oss-20b": 2 * 2880 * 4096 + 2 * 2880 * 512 + 4096 + 2 * 512 + 2880 + 64,
    "qwen2.5-vl-72b": 2 * 8192 * 8192 + 2 * 8192 * 1024 + 8192 + 2 * 1024,
    "llama4-scout": 2 * 5120 * 5120 + 2 * 5120 * 1024,
    "gemma3n-e4b": 2 * 2048 * 2048 + 2 * 2048 * 512 + 2 * 256,
    "qwen3-next-80b": 3 * 2048 * 4096 + 2 * 2048 * 512 + 2 * 256,  # the gate is as large as q
}


def test_every_entry_has_its_count() -> None:
    assert {*PARAMETERS, "deepseek-v3"} == set(CONFIGURATIONS)
    assert PARAMETERS["bert-base"] == 2_362_368


@pytest.mark.parametrize("name", PARAMETERS)
def test_every_entry_builds_and_runs_on_meta(name: str) -> None:
    config = configuration(name)
    with torch.device("meta"):
        layer = MultiHeadAttention.from_config(name)
        out = layer(torch.empty(2, 5, config.embed_dim), mask=regard.masks.Causal())
    assert out.shape == (2, 5, config.embed_dim)
    assert sum(p.numel() for p in layer.parameters()) == PARAMETERS[name]
    assert all(p.is_meta for p in layer.parameters())
    assert (layer.num_heads, layer.num_kv_heads) == (config.num_heads, config.num_kv_heads or config.num_heads)
    assert layer.head_dim == (config.head_dim or config.embed_dim // config.num_heads)
    assert config.layers > 0
    assert config.num_heads % layer.num_kv_heads == 0


@pytest.mark.parametrize("name", ["minilm", "t5-small", "smollm2-135m", "qwen2.5-0.5b", "qwen3-0.6b", "pythia-160m"])
def test_small_ones_run(name: str) -> None:
    torch.manual_seed(0)
    layer = MultiHeadAttention.from_config(name)
    x = torch.randn(2, 5, layer.embed_dim)
    out = layer(x, mask=regard.masks.Causal())
    torch.testing.assert_close(out[:, :3], layer(x[:, :3], mask=regard.masks.Causal()), rtol=1e-4, atol=1e-5)
    assert out.std() > 1e-3


def test_positions_are_each_models_own() -> None:
    t5 = configuration("t5-base").position_encoding()
    assert isinstance(t5, RelativeBias)
    assert tuple(t5.weight.shape) == (32, 12)
    assert (t5.max_distance, t5.bidirectional) == (128, True)
    pythia = configuration("pythia-160m").position_encoding()
    assert isinstance(pythia, Rotary)
    assert (pythia.head_dim, pythia.width, pythia.base) == (64, 16, 10000.0)
    llama = configuration("llama3.1-8b").position_encoding()
    assert isinstance(llama, Rotary)
    assert (llama.base, llama.scaling) == (5e5, Llama3(8.0, 1.0, 4.0, 8192))
    assert configuration("gpt2").position_encoding() is None
    one, other = (configuration("t5-small").position_encoding() for _ in range(2))
    assert one is not other


@pytest.mark.parametrize(
    "name, facts",
    [
        ("bert-base", {"layers": 12, "num_heads": 12, "causal": False, "context": 512}),
        ("vit-b16", {"layers": 12, "context": 14 * 14 + 1}),
        ("gpt2-xl", {"layers": 48, "num_heads": 25, "causal": True, "context": 1024}),
        ("gpt3", {"layers": 96, "num_heads": 96, "context": 2048}),
        ("t5-small", {"scale": 1.0, "head_dim": 64, "context": None}),
        ("mistral-7b", {"window": 4096, "context": 32768, "rotary_base": 1e4}),
        ("llama3-8b", {"rotary_base": 5e5, "context": 8192}),
        ("smollm2-135m", {"layers": 30, "num_heads": 9, "num_kv_heads": 3, "rotary_base": 1e5}),
        ("qwen2.5-0.5b", {"bias": True, "out_bias": False, "rotary_base": 1e6}),
        ("qwen3-0.6b", {"qk_norm": "rms", "head_dim": 128, "bias": False}),
    ],
)
def test_facts(name: str, facts: dict[str, object]) -> None:
    config = configuration(name)
    assert {field: getattr(config, field) for field in facts} == facts


def test_latent_attention_is_another_class() -> None:
    words = r"received keys and values of one latent vector of 512 per token; remedy: regard\.LatentAttention"
    with pytest.raises(ValueError, match=f"configuration: expected a layer that MultiHeadAttention can be, {words}"):
        MultiHeadAttention.from_config("deepseek-v3")


def test_parts_of_each_layer() -> None:
    with torch.device("meta"):
        gemma2, oss = (MultiHeadAttention.from_config(name) for name in ("gemma2-2b", "gpt-oss-20b"))
        near, far = (MultiHeadAttention.from_config("llama4-scout", layer) for layer in (0, 3))
        own, shared = (MultiHeadAttention.from_config("gemma3n-e4b", layer) for layer in (19, 20))
        gated = MultiHeadAttention.from_config("qwen3-next-80b", 3)
        picture = MultiHeadAttention.from_config("qwen2.5-vl-72b")
    assert (gemma2.softcap, oss.sinks is not None) == (50.0, True)
    assert near.query_scale is None
    assert near.q_norm is not None
    assert far.query_scale is not None
    assert far.q_norm is far.position_encoding is None
    assert own.v_norm is not None
    assert shared.k_proj is None
    assert gated.gate_proj is not None
    assert isinstance(picture.position_encoding, MultiAxisRotary)
    with pytest.raises(ValueError, match=r"expected a layer of attention, received layer 0, .*one of 3, 7, 11"):
        MultiHeadAttention.from_config("qwen3-next-80b", 0)
    with pytest.raises(ValueError, match="layer: expected a number from 0 to 47, received 48"):
        MultiHeadAttention.from_config("llama4-scout", 48)


def test_layers_of_one_model_may_differ() -> None:
    gemma = configuration("gemma3-4b")
    assert gemma.kinds[:7] == (*["window"] * 5, "full", "window")
    assert gemma.kinds.count("full") == 5
    near, far = gemma.encoding_of(0), gemma.encoding_of(5)
    assert isinstance(near, Rotary)
    assert isinstance(far, Rotary)
    assert (near.base, near.scaling, far.base, far.scaling) == (1e4, Scaling(), 1e6, LinearScaling(8.0))
    smollm = configuration("smollm3-3b")
    assert [smollm.encoding_of(i) is None for i in range(8)] == [False, False, False, True] * 2
    with torch.device("meta"):
        assert MultiHeadAttention.from_config(smollm, 3).position_encoding is None
    assert configuration("mistral-7b").kinds == ("window",) * 32
    assert configuration("llama2-7b").kinds == ("full",) * 32


def test_what_a_token_leaves_in_the_caches() -> None:
    """Numbers, of layers; closed forms of the papers' sizes."""
    assert configuration("deepseek-v3").kept(60) == 512 + 64
    assert configuration("deepseek-v3").kept_by_all_heads() == 128 * (128 + 64 + 128)
    assert configuration("llama2-7b").kept(0) == configuration("llama2-7b").kept_by_all_heads() == 2 * 4096
    assert configuration("llama3-8b").kept(0) == 2 * 8 * 128
    qwen = configuration("qwen3-next-80b")
    assert [qwen.kept(i) for i in range(4)] == [0, 0, 0, 2 * 2 * 256]
    gemma = configuration("gemma3n-e4b")
    assert [gemma.kept(i) for i in (0, 19, 20, 34)] == [1024, 1024, 0, 0]
    assert configuration("bert-base").kept(0) == 0


@pytest.mark.parametrize(
    "name, cls",
    [
        ("gemma2-2b", "Gemma2Config"),
        ("modernbert-base", "ModernBertConfig"),
        ("deepseek-v3", "DeepseekV3Config"),
        ("qwen2.5-vl-72b", "Qwen2_5_VLTextConfig"),
        ("llama4-scout", "Llama4TextConfig"),
        ("gemma3n-e4b", "Gemma3nTextConfig"),
        ("smollm3-3b", "SmolLM3Config"),
        ("qwen3-next-80b", "Qwen3NextConfig"),
    ],
)
def test_sizes_are_those_of_transformers(name: str, cls: str) -> None:
    """Where the defaults of a class are this model's."""
    import transformers

    theirs, ours = getattr(transformers, cls)(), configuration(name)
    assert ours.layers == theirs.num_hidden_layers
    assert (ours.embed_dim, ours.num_heads) == (theirs.hidden_size, theirs.num_attention_heads)
    assert (ours.num_kv_heads or ours.num_heads) == getattr(theirs, "num_key_value_heads", ours.num_heads)
    words = {"full": "full_attention", "window": "sliding_attention", "chunk": "chunked_attention"}
    words["linear"] = "linear_attention"
    kinds = getattr(theirs, "layer_types", None) or ["full_attention"] * ours.layers
    assert [words[kind] for kind in ours.kinds] == kinds
    if ours.window is not None:
        assert ours.window == theirs.sliding_window * (1 if ours.causal else 2)
    if ours.parts.no_rotary_every is not None:
        assert [ours.encoding_of(i) is not None for i in range(ours.layers)] == [bool(x) for x in theirs.no_rope_layers]
    latent = ours.parts.latent
    if latent is not None:
        assert (latent.kv_rank, latent.rotary_dim) == (theirs.kv_lora_rank, theirs.qk_rope_head_dim)
        assert (latent.query_rank, latent.head_dim) == (theirs.q_lora_rank, theirs.qk_nope_head_dim)
        assert latent.value_head_dim == theirs.v_head_dim
    else:
        head_dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
        assert (ours.head_dim or ours.embed_dim // ours.num_heads) == head_dim


def test_changes_go_to_the_constructor() -> None:
    with torch.device("meta"):
        layer = MultiHeadAttention.from_config("smollm2-135m", dropout=0.1, bias=True, kernel="reference", sinks=True)
    assert (layer.dropout, layer.kernel) == (0.1, "reference")
    assert layer.q_proj.bias is not None
    assert layer.out_proj.bias is None
    assert layer.sinks is not None
    with torch.device("meta"):
        assert MultiHeadAttention.from_config("llama3-8b", position_encoding=None).position_encoding is None


@pytest.mark.parametrize("name", ["t5-small", "smollm2-135m", "pythia-160m"])
def test_a_change_of_heads_changes_the_position_encoding_too(name: str) -> None:
    config = configuration(name)
    layer = MultiHeadAttention.from_config(name, num_heads=3, num_kv_heads=3, head_dim=32)
    assert layer(torch.randn(1, 5, config.embed_dim)).shape == (1, 5, config.embed_dim)


def test_an_unknown_name_is_told_the_nearest() -> None:
    with pytest.raises(
        ValueError, match=r"configuration: expected one of bert-base,.*received 'lama3-8b'; .*'llama3-8b'"
    ):
        MultiHeadAttention.from_config("lama3-8b")
    with pytest.raises(ValueError, match=r"configuration: expected one of .*received 'zzz'$"):
        configuration("zzz")
    with pytest.raises(ValueError, match=r"configuration: expected one of .*received None$"):
        configuration(None)


def test_configurations_cannot_be_changed_by_accident() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        configuration("gpt2").layers = 3
