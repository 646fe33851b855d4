"""Tiny GGUF files for the tests: written from models of transformers as llama.cpp's converter does, or byte by byte."""

from __future__ import annotations

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

gguf = pytest.importorskip("gguf", reason="gguf, which writes the files, is not installed")
np = pytest.importorskip("numpy", reason="numpy, of which gguf is made, is not installed")
transformers = pytest.importorskip("transformers", reason="transformers, to compare with, is not installed")

Q = gguf.GGMLQuantizationType
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
HEADS, KV, HEAD, INNER, VOCABULARY, LAYERS, CONTEXT = 3, 1, 14, 37, 53, 2, 61
WIDTH = HEADS * HEAD


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
    logits = model(ids).logits
    close = CLOSE | {"atol": CLOSE["atol"] * max(1.0, float(logits.detach().abs().max()))}  # sums of terms of that size
    torch.testing.assert_close(models.load(path)(ids), logits, **(close | tolerance))


def raw(*fields: bytes, tensors: int = 0, count: int | None = None, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, len(fields) if count is None else count) + b"".join(fields)


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


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


def whole_file(path: Path) -> bytes:
    """A complete file with a tokenizer."""
    torch.manual_seed(0)
    return write(path, tiny(), more=with_tokenizer).read_bytes()
