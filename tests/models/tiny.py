"""Shared by the tests of models: tiny random models of transformers, with sizes that no two axes share, in a folder.

An `Original` is a model of transformers as its authors compute it; `save` writes it where `regard.models.load` reads.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

LAYERS, VOCABULARY, CONTEXT = 3, 97, 43

_BERT: dict[str, Any] = {
    "num_hidden_layers": LAYERS,
    "hidden_size": 33,
    "num_attention_heads": 3,
    "intermediate_size": 71,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": CONTEXT,
    "type_vocab_size": 2,
}
_LLAMA: dict[str, Any] = {
    "num_hidden_layers": LAYERS,
    "hidden_size": 42,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 14,
    "intermediate_size": 71,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": CONTEXT,
}

# The smallest that says everything: `SIZES[family] | {...}` are the arguments of its configuration.
SIZES: dict[str, dict[str, Any]] = {
    "bert": _BERT,
    "roberta": _BERT | {"max_position_embeddings": CONTEXT + 2, "pad_token_id": 1, "type_vocab_size": 1},
    "xlm-roberta": _BERT | {"max_position_embeddings": CONTEXT + 2, "pad_token_id": 1, "type_vocab_size": 1},
    "camembert": _BERT | {"max_position_embeddings": CONTEXT + 2, "pad_token_id": 1, "type_vocab_size": 1},
    "distilbert": {
        "n_layers": LAYERS,
        "dim": 33,
        "n_heads": 3,
        "hidden_dim": 71,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": CONTEXT,
    },
    "gpt2": {
        "n_layer": LAYERS,
        "n_embd": 33,
        "n_head": 3,
        "n_inner": 71,
        "vocab_size": VOCABULARY,
        "n_positions": CONTEXT,
    },
    "gpt_neox": {
        "num_hidden_layers": LAYERS,
        "hidden_size": 72,
        "num_attention_heads": 3,
        "intermediate_size": 61,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": CONTEXT,
    },
    "llama": _LLAMA,
    "mistral": _LLAMA | {"sliding_window": None},
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "smollm3": _LLAMA,
}
ENCODERS = ("bert", "roberta", "xlm-roberta", "distilbert")
DECODERS = ("gpt2", "gpt_neox", "llama", "mistral", "qwen2", "qwen3", "smollm3")


@dataclass(frozen=True)
class Original:
    """A model of transformers: its family, how its configuration differs from `SIZES`, and which class it is."""

    family: str
    options: dict[str, Any] = field(default_factory=dict)
    kind: str = ""  # a class of transformers; by default what the family is for

    def make(self, seed: int = 0) -> Any:
        """The model itself, every parameter drawn anew, biases and norms too: none of them may be lost unseen."""
        config = transformers.AutoConfig.for_model(self.family, **SIZES[self.family] | SPECIAL | self.options)
        kind = self.kind or ("AutoModel" if self.family in SIZES and not is_decoder(self.family) else CAUSAL)
        made = getattr(transformers, kind)
        if hasattr(made, "from_config"):
            model = made.from_config(config, attn_implementation="eager")
        else:
            model = made(config)
        return randomised(model, seed)


SPECIAL: dict[str, Any] = {"bos_token_id": 2, "eos_token_id": 3, "pad_token_id": 1}
CAUSAL = "AutoModelForCausalLM"


def is_decoder(family: str) -> bool:
    return family in DECODERS


def randomised(module: nn.Module, seed: int) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        drawn = torch.randn(parameter.shape, generator=generator)
        norm = parameter.dim() == 1 and name.endswith("weight")
        parameter.data = 1 + 0.3 * drawn if norm else 0.15 * drawn
    return module.eval()


def save(folder: Path, family: str, *, kind: str = "", seed: int = 0, **options: Any) -> Any:
    """Write a tiny model of a family to a folder; returns it as transformers has it."""
    model = Original(family, options, kind).make(seed)
    model.save_pretrained(folder)
    return model


def hidden_states(model: Any, ids: Tensor, **options: Any) -> tuple[Tensor, ...]:
    """What goes into the first layer and what comes out of each, as transformers has them."""
    with torch.no_grad():
        return model.base_model(ids, output_hidden_states=True, **options).hidden_states


def logits(model: Any, ids: Tensor, **options: Any) -> Tensor:
    with torch.no_grad():
        return model(ids, **options).logits


def some_ids(batch: int = 3, tokens: int = 41, seed: int = 5) -> Tensor:
    """Ids (batch, tokens) without the special ones. The default is as much work as oneDNN is asked for."""
    return torch.randint(5, VOCABULARY, (batch, tokens), generator=torch.Generator().manual_seed(seed))


def settings(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def change_settings(folder: Path, *, without: tuple[str, ...] = (), **changes: Any) -> None:
    """Write other settings into config.json."""
    new = {name: value for name, value in settings(folder).items() if name not in without} | changes
    (folder / "config.json").write_text(json.dumps(new))


def tensors(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def change_tensors(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor] | None]) -> None:
    """Write other weights; `change` may change its argument or return another."""
    there = tensors(folder)
    changed = change(there)
    save_file(
        {name: t.contiguous() for name, t in (there if changed is None else changed).items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
