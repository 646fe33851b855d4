"""The model families that can be loaded, as tables: the keys of their config.json and the names of their weights.

To add a family, write a `Family(...)` and add it to `FAMILIES`:

    fields      field of ModelConfig -> its key in config.json (several names: the first one present)
    fixed       fields of ModelConfig that have the same value in the whole family
    keys        our tensor name -> theirs; {i} is the layer number
    attention   the layout (`regard.layouts`) of the attention weights, and their prefix
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from reprlib import repr as short
from typing import Any, Literal

from regard.errors import bad_value
from regard.layouts.base import linear
from regard.models.config import ModelConfig
from regard.models.config_json import (
    FIELD_KINDS,
    WATCH,
    Fields,
    Key,
    Settings,
    activation,
    gpt2_scales,
    inner_default,
    key,
    layers_without_positions,
    roberta_context,
    rotary,
    special_tokens,
    windows,
)
from regard.models.fields import flag

__all__ = ["FAMILIES", "Family", "family_of"]


@dataclass(frozen=True)
class Family:
    """How the config.json and the weights of one family are read.

    Attributes:
        name: config.json's `model_type`.
        kind: "encoder" or "decoder".
        fields, fixed, keys, attention: see the top of this file.
        derived: functions of the settings and the fields so far that return more fields.
        supported: setting -> the values that our models support.
        prefix: an optional prefix of every tensor name ("bert.embeddings..." or "embeddings...").
        transposed: whether the feed-forward weights are (in, out).
        ignored: patterns of tensor names that are not part of the model: buffers, heads for other tasks.
    """

    name: str
    kind: Literal["encoder", "decoder"]
    fields: Mapping[str, Key]
    fixed: Mapping[str, Any]
    keys: Mapping[str, str]
    attention: tuple[str, str]
    derived: tuple[Callable[[Settings, Fields], Fields], ...] = ()
    supported: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    prefix: str = ""
    transposed: bool = False
    ignored: tuple[str, ...] = ()

    def config(self, settings: Settings) -> ModelConfig:
        """The `ModelConfig` of a parsed config.json, checked."""
        for name, values in self.supported.items():
            if settings.get(name, values[0]) not in values:
                raise bad_value(
                    f"config.json: {name}",
                    expected=" or ".join(map(repr, values)),
                    received=short(settings[name]),
                    remedy=WATCH,
                )
        if settings.get("quantization_config"):
            raise bad_value(
                "config.json: quantization_config",
                expected="none: weights that are not quantised, or a GGUF file",
                received=short(settings["quantization_config"]),
                remedy=WATCH,
            )
        fields: Fields = {"family": self.name, "kind": self.kind, "causal": self.kind == "decoder", **self.fixed}
        fields |= {name: source.read(settings, FIELD_KINDS[name]) for name, source in self.fields.items()}
        for derive in (*self.derived, activation, special_tokens):
            fields |= derive(settings, fields)
        try:
            return ModelConfig(**fields)
        except ValueError as error:
            raise ValueError(f"config.json: {error}") from error

    def is_ignored(self, name: str) -> bool:
        """Whether a tensor of this name is not part of the model."""
        return any(re.fullmatch(pattern, name) for pattern in self.ignored)


_BERT_FIELDS = {
    "layers": key("num_hidden_layers"),
    "embed_dim": key("hidden_size"),
    "num_heads": key("num_attention_heads"),
    "inner": key("intermediate_size"),
    "vocabulary": key("vocab_size"),
    "context": key("max_position_embeddings"),
    "token_types": key("type_vocab_size", default=0),
    "activation": key("hidden_act", default="gelu"),
    "norm_eps": key("layer_norm_eps", default=1e-12),
}
_POST = {"order": "post", "norm": "layer", "positions": "learned"}

_BERT = Family(
    name="bert",
    kind="encoder",
    fields=_BERT_FIELDS,
    fixed=_POST,
    supported={"position_embedding_type": ("absolute",), "is_decoder": (False,), "add_cross_attention": (False,)},
    prefix="bert.",
    keys={
        "embedding.tokens.weight": "embeddings.word_embeddings.weight",
        "embedding.places.weight": "embeddings.position_embeddings.weight",
        "embedding.types.weight": "embeddings.token_type_embeddings.weight",
        **linear(
            **{
                "embedding.norm": "embeddings.LayerNorm",
                "blocks.{i}.attention_norm": "encoder.layer.{i}.attention.output.LayerNorm",
                "blocks.{i}.mlp.up": "encoder.layer.{i}.intermediate.dense",
                "blocks.{i}.mlp.down": "encoder.layer.{i}.output.dense",
                "blocks.{i}.mlp_norm": "encoder.layer.{i}.output.LayerNorm",
            }
        ),
    },
    attention=("bert", "encoder.layer.{i}.attention."),
    ignored=(r"embeddings\.(position_ids|token_type_ids)", r"pooler\..*", r"(cls|classifier|lm_head|qa_outputs)\..*"),
)

_ROBERTA = Family(
    name="roberta",
    kind="encoder",
    fields=_BERT_FIELDS,
    fixed=_POST,
    derived=(roberta_context,),
    supported=_BERT.supported,
    prefix="roberta.",
    keys=_BERT.keys,
    attention=_BERT.attention,
    ignored=_BERT.ignored,
)

_DISTILBERT = Family(
    name="distilbert",
    kind="encoder",
    fields={
        "layers": key("n_layers", "num_hidden_layers"),
        "embed_dim": key("dim", "hidden_size"),
        "num_heads": key("n_heads", "num_attention_heads"),
        "inner": key("hidden_dim"),
        "vocabulary": key("vocab_size"),
        "context": key("max_position_embeddings"),
        "activation": key("activation", default="gelu"),
    },
    fixed=_POST | {"norm_eps": 1e-12},
    prefix="distilbert.",
    keys={
        "embedding.tokens.weight": "embeddings.word_embeddings.weight",
        "embedding.places.weight": "embeddings.position_embeddings.weight",
        **linear(
            **{
                "embedding.norm": "embeddings.LayerNorm",
                "blocks.{i}.attention_norm": "transformer.layer.{i}.sa_layer_norm",
                "blocks.{i}.mlp.up": "transformer.layer.{i}.ffn.lin1",
                "blocks.{i}.mlp.down": "transformer.layer.{i}.ffn.lin2",
                "blocks.{i}.mlp_norm": "transformer.layer.{i}.output_layer_norm",
            }
        ),
    },
    attention=("distilbert", "transformer.layer.{i}.attention."),
    ignored=(r"embeddings\.position_ids", r"(vocab_\w+|pre_classifier|classifier|qa_outputs)\..*"),
)

_GPT2 = Family(
    name="gpt2",
    kind="decoder",
    fields={
        "layers": key("n_layer", "num_hidden_layers"),
        "embed_dim": key("n_embd", "hidden_size"),
        "num_heads": key("n_head", "num_attention_heads"),
        "inner": key("n_inner", default=None),
        "vocabulary": key("vocab_size"),
        "context": key("n_positions", "n_ctx", "max_position_embeddings"),
        "activation": key("activation_function", default="gelu_new"),
        "norm_eps": key("layer_norm_epsilon", default=1e-5),
        "tied": key("tie_word_embeddings", default=True),
    },
    fixed={"order": "pre", "norm": "layer", "positions": "learned"},
    derived=(inner_default, gpt2_scales),
    supported={"add_cross_attention": (False,)},
    prefix="transformer.",
    keys={
        "embedding.tokens.weight": "wte.weight",
        "embedding.places.weight": "wpe.weight",
        "head.weight": "lm_head.weight",
        **linear(
            **{
                "blocks.{i}.attention_norm": "h.{i}.ln_1",
                "blocks.{i}.mlp_norm": "h.{i}.ln_2",
                "blocks.{i}.mlp.up": "h.{i}.mlp.c_fc",
                "blocks.{i}.mlp.down": "h.{i}.mlp.c_proj",
                "norm": "ln_f",
            }
        ),
    },
    attention=("gpt2", "h.{i}.attn."),
    transposed=True,
    ignored=(r"h\.\d+\.attn\.(bias|masked_bias)", r"(score|classifier|multiple_choice_head)\..*"),
)

_NEOX = Family(
    name="gpt_neox",
    kind="decoder",
    fields={
        "layers": key("num_hidden_layers"),
        "embed_dim": key("hidden_size"),
        "num_heads": key("num_attention_heads"),
        "inner": key("intermediate_size"),
        "vocabulary": key("vocab_size"),
        "context": key("max_position_embeddings"),
        "activation": key("hidden_act", default="gelu"),
        "norm_eps": key("layer_norm_eps", default=1e-5),
        "bias": key("attention_bias", default=True),
        "tied": key("tie_word_embeddings", default=False),
    },
    fixed={"norm": "layer"},
    derived=(
        lambda settings, _: {
            "order": "parallel" if key("use_parallel_residual", default=True).read(settings, flag) else "pre"
        },
        lambda settings, fields: rotary({"rotary_pct": 0.25, **settings}, fields),
    ),
    prefix="gpt_neox.",
    keys={
        "embedding.tokens.weight": "embed_in.weight",
        "head.weight": "embed_out.weight",
        **linear(
            **{
                "blocks.{i}.attention_norm": "layers.{i}.input_layernorm",
                "blocks.{i}.mlp_norm": "layers.{i}.post_attention_layernorm",
                "blocks.{i}.mlp.up": "layers.{i}.mlp.dense_h_to_4h",
                "blocks.{i}.mlp.down": "layers.{i}.mlp.dense_4h_to_h",
                "norm": "final_layer_norm",
            }
        ),
    },
    attention=("neox", "layers.{i}.attention."),
    ignored=(
        r"layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",
        r"rotary_emb\.inv_freq",
        r"(score|classifier|qa_outputs)\..*",
    ),
)

_LLAMA_FIELDS = {
    "layers": key("num_hidden_layers"),
    "embed_dim": key("hidden_size"),
    "num_heads": key("num_attention_heads"),
    "num_kv_heads": key("num_key_value_heads", default=None),
    "head_dim": key("head_dim", default=None),
    "inner": key("intermediate_size"),
    "vocabulary": key("vocab_size"),
    "context": key("max_position_embeddings", default=None),
    "activation": key("hidden_act", default="silu"),
    "norm_eps": key("rms_norm_eps", default=1e-6),
    "bias": key("attention_bias", default=False),
    "mlp_bias": key("mlp_bias", default=False),
    "tied": key("tie_word_embeddings", default=False),
}


def _llama(name: str, **fixed: Any) -> Family:
    """Llama, or a family that differs from it by these fixed fields."""
    return Family(
        name=name,
        kind="decoder",
        fields={name: source for name, source in _LLAMA_FIELDS.items() if name not in fixed},
        fixed={"order": "pre", "norm": "rms", "gated": True, **fixed},
        derived=(rotary, windows),
        prefix="model.",
        keys={
            "embedding.tokens.weight": "embed_tokens.weight",
            "head.weight": "lm_head.weight",
            "norm.weight": "norm.weight",
            "blocks.{i}.attention_norm.weight": "layers.{i}.input_layernorm.weight",
            "blocks.{i}.mlp_norm.weight": "layers.{i}.post_attention_layernorm.weight",
            **linear(
                **{
                    "blocks.{i}.mlp.gate": "layers.{i}.mlp.gate_proj",
                    "blocks.{i}.mlp.up": "layers.{i}.mlp.up_proj",
                    "blocks.{i}.mlp.down": "layers.{i}.mlp.down_proj",
                }
            ),
        },
        attention=("llama", "layers.{i}.self_attn."),
        ignored=(r"(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq", r"(score|classifier|qa_outputs)\..*"),
    )


_SMOLLM3 = replace(
    _llama("smollm3"),
    fields=_LLAMA_FIELDS
    | {"num_kv_heads": key("num_key_value_heads", default=4), "tied": key("tie_word_embeddings", default=True)},
    derived=(
        layers_without_positions,
        lambda settings, fields: rotary({"rope_theta": 2e6, **settings}, fields),
        windows,
    ),
)

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        _BERT,
        _ROBERTA,
        _DISTILBERT,
        _GPT2,
        _NEOX,
        _llama("llama"),
        _llama("mistral", bias=False),
        _llama("qwen2", bias=True, out_bias=False),
        _llama("qwen3", qk_norm="rms"),
        _SMOLLM3,
    )
}
_ALIASES = {"xlm-roberta": "roberta", "camembert": "roberta"}


def family_of(settings: Settings) -> Family:
    """The family of a parsed config.json, by its `model_type`."""
    name = settings.get("model_type")
    name = _ALIASES.get(name, name) if isinstance(name, str) else name
    if not isinstance(name, str) or name not in FAMILIES:
        received = "no model_type" if name is None else f"model_type {short(name)}"
        raise bad_value(
            "config.json",
            expected=f"a model of one of the families {', '.join(FAMILIES)}",
            received=received,
            remedy=WATCH,
        )
    return FAMILIES[name]
