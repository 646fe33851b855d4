"""GGUF files: tiny ones give the logits of the transformers model they were written from; wrong ones raise an error."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from models.tiny_gguf import (
    CLOSE,
    CONTEXT,
    HEAD,
    HEADS,
    KV,
    LAYERS,
    WIDTH,
    Q,
    arrays,
    assert_same,
    at_most,
    gguf,
    gguf_name,
    heads_of,
    load_bytes,
    np,
    permuted,
    raw,
    some_ids,
    string,
    tiny,
    transformers,
    unpermuted,
    whole_file,
    write,
)

from regard import models
from regard.models.gguf_file import GgufFile


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return whole_file(tmp_path_factory.mktemp("whole") / "m.gguf")


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
    assert_same(path, model, rtol=1e-4, atol=5e-4)  # (quantised weights are large, and so are logits)


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
