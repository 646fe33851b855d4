"""What probes read: the vocabulary of a model, token ids of a text, and how a model is called."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from regard.errors import bad_type, bad_value
from regard.heads.module_names import VOCABULARY_SIZES
from regard.models.base import tokenizing

__all__ = ["device_of", "logits_of", "special_prefix", "token_ids", "tokenizer_of", "vocabulary_size"]


def vocabulary_size(model: nn.Module) -> int:
    """The size of a model's vocabulary, from its configuration or its embedding."""
    config = getattr(model, "config", None)
    for name in VOCABULARY_SIZES:
        size = getattr(config, name, None)
        if isinstance(size, int):
            return size
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            return module.num_embeddings
    raise bad_value(
        "model",
        expected="one with an embedding of tokens",
        received=type(model).__name__,
        remedy="watch(model) on heads.probes.repeated(...)",
    )


def device_of(model: nn.Module) -> torch.device | None:
    """The device of a model's weights; None if it has none."""
    return next((parameter.device for parameter in model.parameters()), None)


def tokenizer_of(model: nn.Module, tokenizer: Any) -> Any:
    """The tokenizer that was passed, or the model's own; None if there is neither."""
    tokenizer = getattr(model, "tokenizer", None) if tokenizer is None else tokenizer
    if tokenizer is not None and not hasattr(tokenizer, "encode"):
        raise bad_type(
            "tokenizer", expected="a tokenizer of transformers or tokenizers", received=type(tokenizer).__name__
        )
    return tokenizer


def token_ids(tokenizer: Any, text: str) -> list[int]:
    """The token ids of a text, without special tokens."""
    with tokenizing(text):
        encoded = tokenizer.encode(text, add_special_tokens=False)
    return list(getattr(encoded, "ids", encoded))


def special_prefix(tokenizer: Any) -> list[int]:
    """The special tokens that a tokenizer begins a text with, such as BOS."""
    encoded = tokenizer.encode("a", add_special_tokens=True)
    ids, plain = list(getattr(encoded, "ids", encoded)), token_ids(tokenizer, "a")
    return next((ids[:i] for i in range(len(ids)) if ids[i : i + len(plain)] == plain), [])


def logits_of(output: Any) -> Tensor | None:
    """The logits (B, N, V) in what a language model returned; None if there are none."""
    if isinstance(output, Mapping) or hasattr(output, "logits"):
        output = output["logits"] if isinstance(output, Mapping) else output.logits
    return output if isinstance(output, Tensor) and output.dim() == 3 else None
