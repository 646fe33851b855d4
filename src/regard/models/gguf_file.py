"""GGUF files of the Llama family: their metadata as the settings of a config.json, and their tensors, dequantised.

A GGUF file has sizes, tokenizer and (mostly quantised) weights in one. Its names are translated to those of the
safetensors files of the same family, so that one table (`families.py`) serves both.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable
from pathlib import Path
from reprlib import repr as short
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from regard.errors import bad_value, missing_extra
from regard.layouts import rotary_pairs
from regard.models.config_json import WATCH
from regard.models.fields import LAYERS, WIDTH, integer
from regard.models.files import damaged, open_regular
from regard.models.gguf_header import TensorInfo, read_header

if TYPE_CHECKING:
    import numpy as np

__all__ = ["GgufFile"]

# Architecture -> its family, and whether the rows of q and k are stored as interleaved rotary pairs.
_ARCHITECTURES = {"llama": ("llama", True), "qwen2": ("qwen2", False), "qwen3": ("qwen3", False)}

_SETTINGS = {  # key in config.json -> key in GGUF, after "llama."
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "max_position_embeddings": "context_length",
    "rope_theta": "rope.freq_base",
    "sliding_window": "attention.sliding_window",
    "vocab_size": "vocab_size",
}

_REQUIRED = ("num_hidden_layers", "hidden_size", "num_attention_heads")

_NAMES = {  # name after "blk.{i}." -> name after "model.layers.{i}."
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_ROPE_FACTORS = "rope_freqs.weight"  # divisors of the rotary frequencies, one per pair


class GgufFile:
    """An open GGUF file: `settings` as in a config.json, raw metadata by `field`, and tensors (it is a `Weights`).

    Tensor names are those of the safetensors files of the family; q and k have their rotary pairs as halves.
    """

    def __init__(self, path: Path) -> None:
        try:
            import gguf  # noqa: F401 - fails early if it is missing
        except ImportError as error:
            raise missing_extra("gguf", "models") from error
        self.where = str(path)
        self._to_halves: dict[str, Callable[[Tensor], Tensor]] = {}
        try:
            with open_regular(path) as file:
                self._file = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
            header = read_header(self._file)
            self._fields = header.fields
            self._tensors: dict[str, TensorInfo] = {}
            for name, info in header.tensors.items():
                if self._tensors.setdefault(_translated(name), info) is not info:
                    raise ValueError(f"two tensors are {_translated(name)!r}, one of them as {name!r}")
            self._sizes = {name: self._check(name, info) for name, info in self._tensors.items()}
        except (ValueError, OverflowError) as error:  # (an empty file cannot be mapped)
            raise damaged(path, error, what="a GGUF file") from error
        self.shapes = {name: info.shape for name, info in self._tensors.items()}
        architecture = self.field("general.architecture", "")
        if not isinstance(architecture, str) or architecture not in _ARCHITECTURES:
            raise bad_value(
                str(path),
                expected=f"a GGUF file of one of {', '.join(_ARCHITECTURES)}",
                received=short(architecture),
                remedy=WATCH,
            )
        self.dtypes = dict.fromkeys(self.shapes, torch.float32)
        self.settings = self._read_settings(architecture)
        self._to_halves = self._pairs(_ARCHITECTURES[architecture][1])

    def field(self, name: str, default: Any = None) -> Any:
        """A metadata field of the header."""
        return self._fields.get(name, default)

    def read(self, name: str) -> Tensor:
        """A tensor, dequantised to float32."""
        import gguf
        import numpy as np

        info = self._tensors[name]
        rows, per_row = self._sizes[name]
        kind = gguf.GGMLQuantizationType(info.kind)
        data = np.frombuffer(self._file, np.uint8, rows * per_row, info.start)
        try:
            numbers = _dequantised(data, rows, kind)
        except NotImplementedError as error:
            raise bad_value(
                f"{self.where}: {name}", expected="a type that gguf can dequantise", received=kind.name
            ) from error
        tensor = torch.from_numpy(numbers).view(info.shape)
        if not tensor.sum(dtype=torch.float32).isfinite():
            raise damaged(Path(self.where), f"{name} has values that are not finite", what="a GGUF file")
        convert = self._to_halves.get(name.split(".")[-2])
        return tensor if convert is None else convert(tensor)

    def _check(self, name: str, info: TensorInfo) -> tuple[int, int]:
        """The number of rows of a tensor, and of bytes per row; raises if the file is too short for them."""
        import gguf

        try:
            block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(info.kind)]
        except (ValueError, KeyError):
            raise ValueError(f"{name} is of the unknown type {info.kind}") from None
        width = info.shape[-1] if info.shape else 1
        if any(size >= 1 << 31 for size in info.shape):
            raise ValueError(f"{name} has the shape {info.shape}")
        if width % block:
            raise ValueError(f"{name} has rows of {width}, not a multiple of the block size {block} of its type")
        rows, per_row = math.prod(info.shape[:-1]), width // block * size
        if info.start + rows * per_row > len(self._file):
            raise ValueError(
                f"it ends after {len(self._file)} bytes, but {name} ends after {info.start + rows * per_row}"
            )
        return rows, per_row

    def _read_settings(self, architecture: str) -> dict[str, Any]:
        """The metadata as the settings of a config.json."""
        family, _ = _ARCHITECTURES[architecture]
        values = {name: self.field(f"{architecture}.{key}") for name, key in _SETTINGS.items()}
        settings: dict[str, Any] = {name: value for name, value in values.items() if value is not None}
        for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
            if isinstance(settings.get(name), list):  # one per layer
                first = settings[name][0] if settings[name] else None
                if first is None or any(value != first for value in settings[name]):
                    raise bad_value(
                        f"{self.where}: {name}", expected="the same in all layers", received=short(settings[name])
                    )
                settings[name] = first
        if self.field(f"{architecture}.expert_count", 0):
            raise bad_value(
                self.where, expected="one feed-forward part per layer", received="a mixture of experts", remedy=WATCH
            )
        if "model.embed_tokens.weight" in self.shapes:
            settings.setdefault("vocab_size", self.shapes["model.embed_tokens.weight"][0])
        for name in ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim"):
            where = f"{self.where}: {architecture}.{_SETTINGS[name]}"
            if name in settings:
                integer(where, settings[name], most=LAYERS if name == "num_hidden_layers" else WIDTH)
            elif name in _REQUIRED:
                raise bad_value(where, expected="a positive integer", received="none")
        if settings.get("sliding_window") == 0:
            del settings["sliding_window"]
        settings["model_type"] = family
        settings |= {"use_sliding_window": True, "max_window_layers": 0}  # a window applies to all layers
        settings["tie_word_embeddings"] = "lm_head.weight" not in self.shapes
        settings["attention_bias"] = "model.layers.0.self_attn.q_proj.bias" in self.shapes
        settings["rope_parameters"] = self._rope(architecture, settings)
        ends = [self.field(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot")]
        settings["eos_token_id"] = [end for end in dict.fromkeys(ends) if end is not None]
        settings["bos_token_id"] = self.field("tokenizer.ggml.bos_token_id")
        settings["pad_token_id"] = self.field("tokenizer.ggml.padding_token_id")
        return settings

    def _rope(self, architecture: str, settings: dict[str, Any]) -> dict[str, Any]:
        """The rotary settings: base, width, scaling."""
        rope: dict[str, Any] = {"rope_theta": settings.get("rope_theta", 10000.0)}
        head_dim = settings.get("head_dim") or settings["hidden_size"] // settings["num_attention_heads"]
        rotary_width = integer(
            f"{self.where}: {architecture}.rope.dimension_count",
            self.field(f"{architecture}.rope.dimension_count", head_dim),
            most=head_dim,
        )
        if rotary_width != head_dim:
            rope["partial_rotary_factor"] = rotary_width / head_dim
        kind = self.field(f"{architecture}.rope.scaling.type", "none")
        if _ROPE_FACTORS in self._tensors:
            if kind != "none":
                raise bad_value(
                    f"{self.where}: rope.scaling.type",
                    expected=f"none beside the tensor {_ROPE_FACTORS}",
                    received=repr(kind),
                )
            factors = tuple(self.read(_ROPE_FACTORS).tolist())  # a setting that is stored as a tensor
            del self._tensors[_ROPE_FACTORS], self.shapes[_ROPE_FACTORS], self.dtypes[_ROPE_FACTORS]
            return rope | {
                "rope_type": "longrope",
                "short_factor": factors,
                "long_factor": factors,
                "factor": 1.0,
                "attention_factor": 1.0,
            }
        if kind not in ("none", "linear", "yarn"):
            raise bad_value(f"{self.where}: rope.scaling.type", expected="none, linear or yarn", received=short(kind))
        if kind != "none":
            rope |= {"rope_type": kind, "factor": self.field(f"{architecture}.rope.scaling.factor", 1.0)}
            trained = self.field(f"{architecture}.rope.scaling.original_context_length")
            if trained is not None:
                rope["original_max_position_embeddings"] = trained
        if kind == "yarn":
            self._yarn(architecture, rope)
        return rope

    def _yarn(self, architecture: str, rope: dict[str, Any]) -> None:
        """Add the other settings of YaRN; raise for those that we do not support."""
        scaling = f"{architecture}.rope.scaling."
        for ours in ("beta_fast", "beta_slow"):
            if (value := self.field(f"{scaling}yarn_{ours}")) is not None:
                rope[ours] = value
        for name, default in (
            ("attn_factor", 1.0),
            ("yarn_attn_factor", 1.0),
            ("yarn_ext_factor", 1.0),
            ("yarn_log_multiplier", 0.0),
        ):
            if self.field(scaling + name, default) != default:
                raise bad_value(
                    f"{self.where}: {scaling}{name}",
                    expected=f"{default}",
                    received=self.field(scaling + name),
                    remedy=WATCH,
                )

    def _pairs(self, interleaved: bool) -> dict[str, Callable[[Tensor], Tensor]]:
        """For q_proj and k_proj, the function that reorders rows from interleaved pairs to halves."""
        if not interleaved:
            return {}
        heads = self.settings["num_attention_heads"]
        kv_heads = self.settings.get("num_key_value_heads", heads)
        width = self.field("llama.rope.dimension_count")  # the pairs are within the rotated part of a head
        return {
            "q_proj": lambda rows: rotary_pairs(rows, heads, width=width),
            "k_proj": lambda rows: rotary_pairs(rows, kv_heads, width=width),
        }


def _dequantised(data: np.ndarray, rows: int, kind: Any) -> np.ndarray:
    """Dequantise bytes. `gguf` works on 16 rows at a time, which is slow for short rows, so several are joined."""
    from gguf.quants import dequantize

    joined = max(
        (n for n in range(1, min(rows, 2 * _ROW_BYTES) + 1) if rows % n == 0 and n * data.size <= _ROW_BYTES * rows),
        default=1,
    )
    numbers = dequantize(data.reshape(rows // joined, -1), kind)
    return numbers if numbers.flags.writeable else numbers.copy()  # (a read-only view of the file)


_ROW_BYTES = 1 << 16  # of joined rows, at most


def _translated(name: str) -> str:
    """The safetensors name of a GGUF name. Unknown names are returned unchanged; `loading.py` reports them."""
    stem, _, part = name.rpartition(".")
    if stem in _TOP:
        return f"{_TOP[stem]}.{part}"
    if stem.startswith("blk."):
        _, layer, inner = stem.split(".", 2)
        return f"model.layers.{layer}.{_NAMES.get(inner, inner)}.{part}"
    return name
