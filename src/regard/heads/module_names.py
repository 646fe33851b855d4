"""What transformers, torch.nn and other libraries call the parts of attention: the one table of such names.

To support a model whose parts have other names, add them here.
"""

from __future__ import annotations

import inspect

from torch import nn

from regard.positions import Rotary

# Submodules of an attention module
SEPARATE_PROJECTIONS = (("q_proj", "k_proj", "v_proj"), ("query", "key", "value"), ("q_lin", "k_lin", "v_lin"))
OUTPUT_PROJECTIONS = ("out_proj", "o_proj", "c_proj", "dense", "out_lin", "o", "proj", "Wo", "wo", "attention_out")

# Numbers that an attention module keeps
QUERY_HEAD_COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head")
KV_HEAD_COUNTS = ("num_kv_heads", "num_key_value_heads")
ALL_HEADS_WIDTHS = ("all_head_size", "split_size", "inner_dim")  # number of query heads times their width

# Numbers of a model's configuration
CONTEXT_LENGTHS = ("context", "max_position_embeddings")
VOCABULARY_SIZES = ("vocabulary", "vocab_size")
SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "cls_token_id", "bos", "eos", "pad")

# Arguments of a forward
ROTARY_INPUTS = ("position_embeddings", "rotary_pos_emb", "freqs_cis")  # cosines and sines that q and k are rotated by
CROSS_ATTENTION_INPUTS = (  # what keys and values are made of, if it is not the module's own input
    "encoder_hidden_states",
    "key_value_states",
    "cross_attention_states",
    "memory",
    "context",
    "key",
    "source",
    "y",
    "kv",
    "keys",
    "x_kv",
    "key_value",
    "enc_output",
    "encoder_out",
    "encoder_output",
    "other",
)
# An integer tensor (B, N) whose argument has one of these in its name does not hold token ids.
NOT_TOKEN_IDS = ("mask", "pos", "type", "label", "length", "cache", "index", "indices", "seg", "doc", "seq", "step")


def separate_projections(module: nn.Module) -> tuple[str, str, str] | None:
    """The names of a module's q, k and v projections, if it has three separate ones."""
    return next((names for names in SEPARATE_PROJECTIONS if all(name in module._modules for name in names)), None)


def is_conv1d(module: nn.Module) -> bool:
    """Whether it is the linear layer of GPT-2 in transformers, whose weight is (in, out)."""
    return all(isinstance(getattr(module, name, None), int) for name in ("nf", "nx"))


def applies_rotary(module: nn.Module) -> bool:
    """Whether an attention module rotates q and k by their positions, as far as its parts, its arguments and its
    configuration tell."""
    if isinstance(getattr(module, "position_encoding", None), Rotary):
        return True
    if any("rotary" in name or name.startswith("rope") for name in (*vars(module), *module._modules)):
        return True
    try:
        arguments = inspect.signature(module.forward).parameters
    except (TypeError, ValueError):  # compiled or scripted: it does not tell
        return False
    rotated = any(name.startswith("rope") for name in dir(getattr(module, "config", None)))
    return rotated and any(name in ROTARY_INPUTS for name in arguments)
