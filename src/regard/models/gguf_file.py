"""GGUF files of the Llama family: what they say in the words of a config.json, and their tensors, dequantised.

A GGUF file holds everything in one: sizes, tokenizer, weights, most of them quantised. Its names are translated to
those of the safetensors files of the same family, so that one table (`families.py`) serves both.
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
from regard.models.families import WATCH
from regard.models.fields import LAYERS, WIDTH, integer
from regard.models.files import damaged, open_regular
from regard.models.gguf_header import Stored, read_header

if TYPE_CHECKING:
    import numpy as np

__all__ = ["GgufFile"]

# Architectures, the family each is, and whether the rows of q and k lie as interleaved pairs.
_ARCHITECTURES = {"llama": ("llama", True), "qwen2": ("qwen2", False), "qwen3": ("qwen3", False)}

_SETTINGS = {  # config.json's key -> GGUF's, after "llama."
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

_NEEDED = ("num_hidden_layers", "hidden_size", "num_attention_heads")

_NAMES = {  # after "blk.{i}." -> after "model.layers.{i}."
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
_ROPE_FACTORS = "rope_freqs.weight"  # one per pair: the frequencies are divided by them


class GgufFile:
    """An open GGUF file: `settings` as in a config.json, `field` as it is, and `Weights`.

    Names are those of the family in safetensors; q and k are given with rotary pairs as halves.
    """

    def __init__(self, path: Path) -> None:
        try:
            import gguf  # noqa: F401 - asked for before anything is read
        except ImportError as error:
            raise missing_extra("gguf", "models") from error
        self.where = str(path)
        self._to_halves: dict[str, Callable[[Tensor], Tensor]] = {}
        try:
            with open_regular(path) as file:
                self._file = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
            header = read_header(self._file)
            self._fields = header.fields
            self._tensors: dict[str, Stored] = {}
            for name, stored in header.tensors.items():
                if self._tensors.setdefault(_translated(name), stored) is not stored:
                    raise ValueError(f"two tensors are {_translated(name)!r}, one of them as {name!r}")
            self._sizes = {name: self._check(name, stored) for name, stored in self._tensors.items()}
        except (ValueError, OverflowError) as error:  # (an empty file cannot be mapped)
            raise damaged(path, error, what="a GGUF file") from error
        self.shapes = {name: stored.shape for name, stored in self._tensors.items()}
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
        """A value of the file's header."""
        return self._fields.get(name, default)

    def read(self, name: str) -> Tensor:
        """A tensor, dequantised to float32."""
        import gguf
        import numpy as np

        stored = self._tensors[name]
        rows, per_row = self._sizes[name]
        kind = gguf.GGMLQuantizationType(stored.kind)
        data = np.frombuffer(self._file, np.uint8, rows * per_row, stored.start)
        try:
            numbers = _dequantised(data, rows, kind)
        except NotImplementedError as error:
            raise bad_value(
                f"{self.where}: {name}", expected="a type that gguf can dequantise", received=kind.name
            ) from error
        tensor = torch.from_numpy(numbers).view(stored.shape)
        if not tensor.sum(dtype=torch.float32).isfinite():
            raise damaged(Path(self.where), f"{name} holds numbers that are not finite", what="a GGUF file")
        convert = self._to_halves.get(name.split(".")[-2])
        return tensor if convert is None else convert(tensor)

    def _check(self, name: str, stored: Stored) -> tuple[int, int]:
        """How many rows a tensor has, and bytes each; raises where they are not all in the file."""
        import gguf

        try:
            block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(stored.kind)]
        except (ValueError, KeyError):
            raise ValueError(f"{name} is of the unknown type {stored.kind}") from None
        width = stored.shape[-1] if stored.shape else 1
        if any(size >= 1 << 31 for size in stored.shape):
            raise ValueError(f"{name} has the shape {stored.shape}")
        if width % block:
            raise ValueError(f"{name} has rows of {width}, and its type has blocks of {block}")
        rows, per_row = math.prod(stored.shape[:-1]), width // block * size
        if stored.start + rows * per_row > len(self._file):
            raise ValueError(f"it ends after {len(self._file)} bytes, and {name} after {stored.start + rows * per_row}")
        return rows, per_row

    def _read_settings(self, architecture: str) -> dict[str, Any]:
        """The header in the words of a config.json."""
        family, _ = _ARCHITECTURES[architecture]
        found = {ours: self.field(f"{architecture}.{theirs}") for ours, theirs in _SETTINGS.items()}
        settings: dict[str, Any] = {name: value for name, value in found.items() if value is not None}
        for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
            if isinstance(settings.get(name), list):  # one per layer
                first = settings[name][0] if settings[name] else None
                if first is None or any(one != first for one in settings[name]):
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
            elif name in _NEEDED:
                raise bad_value(where, expected="a positive integer", received="none")
        if settings.get("sliding_window") == 0:
            del settings["sliding_window"]
        settings["model_type"] = family
        settings |= {"use_sliding_window": True, "max_window_layers": 0}  # a window is for all layers
        settings["tie_word_embeddings"] = "lm_head.weight" not in self.shapes
        settings["attention_bias"] = "model.layers.0.self_attn.q_proj.bias" in self.shapes
        settings["rope_parameters"] = self._rope(architecture, settings)
        ends = [self.field(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot")]
        settings["eos_token_id"] = [end for end in dict.fromkeys(ends) if end is not None]
        settings["bos_token_id"] = self.field("tokenizer.ggml.bos_token_id")
        settings["pad_token_id"] = self.field("tokenizer.ggml.padding_token_id")
        return settings

    def _rope(self, architecture: str, settings: dict[str, Any]) -> dict[str, Any]:
        """How positions are turned and scaled."""
        rope: dict[str, Any] = {"rope_theta": settings.get("rope_theta", 10000.0)}
        head_dim = settings.get("head_dim") or settings["hidden_size"] // settings["num_attention_heads"]
        turned = integer(
            f"{self.where}: {architecture}.rope.dimension_count",
            self.field(f"{architecture}.rope.dimension_count", head_dim),
            most=head_dim,
        )
        if turned != head_dim:
            rope["partial_rotary_factor"] = turned / head_dim
        kind = self.field(f"{architecture}.rope.scaling.type", "none")
        if _ROPE_FACTORS in self._tensors:
            if kind != "none":
                raise bad_value(
                    f"{self.where}: rope.scaling.type",
                    expected=f"none beside the tensor {_ROPE_FACTORS}",
                    received=repr(kind),
                )
            factors = tuple(self.read(_ROPE_FACTORS).tolist())  # a setting, though it lies there as a tensor
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
        """The finer settings of YaRN; those that there is no place for are refused."""
        scaling = f"{architecture}.rope.scaling."
        for ours in ("beta_fast", "beta_slow"):
            if (value := self.field(f"{scaling}yarn_{ours}")) is not None:
                rope[ours] = value
        for name, plain in (
            ("attn_factor", 1.0),
            ("yarn_attn_factor", 1.0),
            ("yarn_ext_factor", 1.0),
            ("yarn_log_multiplier", 0.0),
        ):
            if self.field(scaling + name, plain) != plain:
                raise bad_value(
                    f"{self.where}: {scaling}{name}",
                    expected=f"{plain}",
                    received=self.field(scaling + name),
                    remedy=WATCH,
                )

    def _pairs(self, interleaved: bool) -> dict[str, Callable[[Tensor], Tensor]]:
        """What turns the rows of q and k into halves, by the projection's name."""
        if not interleaved:
            return {}
        heads = self.settings["num_attention_heads"]
        kv_heads = self.settings.get("num_key_value_heads", heads)
        width = self.field("llama.rope.dimension_count")  # the pairs lie within the part of a head that is turned
        return {
            "q_proj": lambda rows: rotary_pairs(rows, heads, width=width),
            "k_proj": lambda rows: rotary_pairs(rows, kv_heads, width=width),
        }


def _dequantised(data: np.ndarray, rows: int, kind: Any) -> np.ndarray:
    """Numbers from bytes. `gguf` works on 16 rows at a time, slow where they are short: it is given longer ones."""
    from gguf.quants import dequantize

    together = max(
        (n for n in range(1, min(rows, 2 * _AT_ONCE) + 1) if rows % n == 0 and n * data.size <= _AT_ONCE * rows),
        default=1,
    )
    numbers = dequantize(data.reshape(rows // together, -1), kind)
    return numbers if numbers.flags.writeable else numbers.copy()  # the file is mapped, and not ours to write


_AT_ONCE = 1 << 16  # bytes of such a row, about


def _translated(name: str) -> str:
    """A GGUF name as safetensors has it; one that is not known stays as it is, and is found to be unknown later."""
    stem, _, part = name.rpartition(".")
    if stem in _TOP:
        return f"{_TOP[stem]}.{part}"
    if stem.startswith("blk."):
        _, layer, inner = stem.split(".", 2)
        return f"model.layers.{layer}.{_NAMES.get(inner, inner)}.{part}"
    return name
