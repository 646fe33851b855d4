"""The families of models that can be loaded, as tables: where config.json says what, and how the weights are named.

To add one: a `Family(...)`, and a line in `FAMILIES`. What a table says in one word, the code reads in one place:

    fields    ModelConfig's field -> the key of config.json it is in (several names: the first that is there)
    fixed     ModelConfig's fields that are the same for the whole family
    keys      our names of tensors -> theirs; {i} is the number of the layer
    attention the layout (`regard.layouts`) of the attention weights, and the prefix where they are
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from reprlib import repr as short
from typing import Any, Literal, NamedTuple

from regard.errors import bad_type, bad_value
from regard.layouts.base import linear
from regard.models.config import ModelConfig
from regard.models.fields import LAYERS, WIDTH, flag, integer, number, several, word
from regard.positions import DynamicNTK, LinearScaling, Llama3, LongRoPE, YaRN
from regard.positions.scalings import Scaling

__all__ = ["FAMILIES", "Family", "family_of"]

Settings = Mapping[str, Any]  # what a config.json holds
Fields = dict[str, Any]  # arguments of ModelConfig

Kind = Callable[[str, Any], Any]  # one of `regard.models.fields`

_REQUIRED = object()


class At(NamedTuple):
    """Where a value is in config.json, and what it is where it is not there."""

    names: tuple[str, ...]
    default: Any = _REQUIRED

    def read(self, settings: Settings, kind: Kind) -> Any:
        """The value, which is of this kind; raises where it is not, or where it is required and not there."""
        for name in self.names:
            if settings.get(name) is not None:
                return kind(f"config.json: {name}", settings[name])
        if self.default is _REQUIRED:
            raise bad_value("config.json", expected=f"{' or '.join(map(repr, self.names))}", received="none")
        return self.default


def at(*names: str, default: Any = _REQUIRED) -> At:
    """See `At`."""
    return At(names, default)


_WIDTH = partial(integer, most=WIDTH)
_KINDS: Mapping[str, Kind] = {  # of ModelConfig's fields that `Family.fields` name
    "layers": partial(integer, most=LAYERS),
    "embed_dim": _WIDTH,
    "num_heads": _WIDTH,
    "num_kv_heads": _WIDTH,
    "head_dim": _WIDTH,
    "inner": _WIDTH,
    "vocabulary": integer,
    "context": integer,
    "token_types": partial(integer, least=0),
    "activation": lambda what, value: value,  # (see `_activation`)
    "norm_eps": partial(number, above=0.0, most=1.0),
    "bias": flag,
    "mlp_bias": flag,
    "tied": flag,
}


@dataclass(frozen=True)
class Family:
    """One family: how its config.json and its weights are read.

    Attributes:
        name: config.json's `model_type`.
        kind: "encoder" or "decoder".
        fields, fixed, keys, attention: see the top of this file.
        derived: functions from the settings and the fields so far to more fields.
        only: settings that must have one of these values, because the model has no place for others.
        prefix: what may stand before every name ("bert.embeddings..." or "embeddings...").
        transposed: whether the feed-forward weights are (in, out).
        beside: patterns of names that are not part of the model: buffers, heads for other tasks.
    """

    name: str
    kind: Literal["encoder", "decoder"]
    fields: Mapping[str, At]
    fixed: Mapping[str, Any]
    keys: Mapping[str, str]
    attention: tuple[str, str]
    derived: tuple[Callable[[Settings, Fields], Fields], ...] = ()
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    prefix: str = ""
    transposed: bool = False
    beside: tuple[str, ...] = ()

    def config(self, settings: Settings) -> ModelConfig:
        """What the settings of a config.json say, checked."""
        for name, allowed in self.only.items():
            if settings.get(name, allowed[0]) not in allowed:
                raise bad_value(
                    f"config.json: {name}",
                    expected=" or ".join(map(repr, allowed)),
                    received=short(settings[name]),
                    remedy=WATCH,
                )
        if settings.get("quantization_config"):
            raise bad_value(
                "config.json: quantization_config",
                expected="none: weights as they are, or a GGUF file",
                received=short(settings["quantization_config"]),
                remedy=WATCH,
            )
        found: Fields = {"family": self.name, "kind": self.kind, "causal": self.kind == "decoder", **self.fixed}
        found |= {ours: where.read(settings, _KINDS[ours]) for ours, where in self.fields.items()}
        for derive in (*self.derived, _activation, _special_tokens):
            found |= derive(settings, found)
        try:
            return ModelConfig(**found)
        except ValueError as error:
            raise ValueError(f"config.json: {error}") from error

    def is_beside(self, name: str) -> bool:
        """Whether a tensor of this name is not part of the model."""
        return any(re.fullmatch(pattern, name) for pattern in self.beside)


WATCH = "regard.watch looks into any torch model, this one as transformers runs it included"


# ----------------------------------------------------------------------------------------------------
# What several families say in the same way

_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
    "tanh": "tanh",
}


def _activation(settings: Settings, fields: Fields) -> Fields:
    if not isinstance(fields["activation"], str) or fields["activation"] not in _ACTIVATIONS:
        raise bad_value(
            "config.json: the activation",
            expected=f"one of {', '.join(_ACTIVATIONS)}",
            received=short(fields["activation"]),
            remedy=WATCH,
        )
    return {"activation": _ACTIVATIONS[fields["activation"]]}


_TOKEN = partial(integer, least=-1)  # some say -1 for none


def _special_tokens(settings: Settings, fields: Fields) -> Fields:
    """Token ids. Generation may end at several."""
    eos = settings.get("eos_token_id")
    ends = eos if isinstance(eos, (list, tuple)) else [] if eos is None else [eos]
    pad = at("pad_token_id", default=-1).read(settings, _TOKEN)
    return {
        "bos": at("bos_token_id", default=None).read(settings, _TOKEN),
        "eos": several("config.json: eos_token_id", ends, _TOKEN),
        "pad": pad if 0 <= pad < fields["vocabulary"] else None,  # (or one that was never added)
    }


_SHARE = partial(number, above=0.0, most=1.0)


def _rotary(settings: Settings, fields: Fields) -> Fields:
    """Newer files have `rope_parameters`, older ones `rope_theta` and `rope_scaling`; GPT-NeoX had names of its own."""
    rope: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        given = settings.get(name) or {}
        if not isinstance(given, Mapping) or any(isinstance(value, Mapping) for value in given.values()):
            raise bad_type(f"config.json: {name}", expected="an object, of all layers", received=short(given))
        rope |= given
    both = {**settings, **{name: value for name, value in rope.items() if value is not None}}
    part = at("partial_rotary_factor", "rotary_pct", default=1.0).read(both, _SHARE)
    head_dim = fields.get("head_dim") or fields["embed_dim"] // fields["num_heads"]
    return {
        "positions": "rotary",
        "rotary_base": at("rope_theta", "rotary_emb_base", default=10000.0).read(both, partial(number, above=1.0)),
        "rotary_width": None if part == 1 else int(head_dim * part),
        "rotary_scaling": _scaling(rope, fields.get("context")),
    }


_FACTOR = partial(number, least=1e-3, most=1e6)  # of angles and scores: others overflow
_SCALING_OPTIONS: Mapping[str, Kind] = {
    "attention_factor": partial(number, least=1e-3, most=1e3),
    "beta_fast": _FACTOR,
    "beta_slow": _FACTOR,
    "mscale": partial(number, least=0.0, most=1e3),
    "mscale_all_dim": partial(number, least=0.0, most=1e3),
    "truncate": flag,
}


def _scaling(rope: Mapping[str, Any], context: int | None) -> Scaling | None:
    kind = at("rope_type", "type", default="default").read(rope, word)
    trained = at("original_max_position_embeddings", default=context or 0).read(rope, integer)
    options = {name: at(name).read(rope, kind) for name, kind in _SCALING_OPTIONS.items() if rope.get(name) is not None}

    def needed(name: str, of: Kind = _FACTOR) -> Any:
        if rope.get(name) is None:
            raise bad_value(f"config.json: rope of type {kind!r}", expected=repr(name), received=short(dict(rope)))
        return at(name).read(rope, of)

    match kind:
        case "default":
            return None
        case "linear":
            return LinearScaling(needed("factor"))
        case "dynamic":
            return DynamicNTK(needed("factor"), context or trained)
        case "yarn":
            return YaRN(needed("factor"), trained, **options)
        case "longrope":
            factor = at("factor", default=(context or 0) / (trained or 1)).read(rope, _FACTOR)
            factors = partial(several, kind=_FACTOR)
            return LongRoPE(
                needed("short_factor", factors),
                needed("long_factor", factors),
                trained,
                factor=factor,
                attention_factor=options.get("attention_factor"),
            )
        case "llama3":
            return Llama3(needed("factor"), needed("low_freq_factor"), needed("high_freq_factor"), trained)
    raise bad_value(
        "config.json: rope_type",
        expected="default, linear, dynamic, yarn, longrope or llama3",
        received=short(kind),
        remedy=WATCH,
    )


def _windows(settings: Settings, fields: Fields) -> Fields:
    """Which layers see only so many tokens back."""
    layers = fields["layers"]
    qwen = fields["family"] in ("qwen2", "qwen3")  # they say of a window whether, and from which layer on, it is used
    if settings.get("sliding_window") is None or not at("use_sliding_window", default=not qwen).read(settings, flag):
        return {}
    window = at("sliding_window").read(settings, integer)
    if settings.get("layer_types") is not None:
        kinds = settings["layer_types"]
        if not isinstance(kinds, (list, tuple)) or len(kinds) != layers:
            raise bad_value(
                "config.json: layer_types",
                expected=f"one for each of {layers} layers",
                received=len(kinds) if isinstance(kinds, (list, tuple)) else short(kinds),
            )
        for kind in kinds:
            if kind not in ("sliding_attention", "full_attention"):
                raise bad_value(
                    "config.json: layer_types",
                    expected="sliding_attention or full_attention",
                    received=short(kind),
                    remedy=WATCH,
                )
        return {"windows": tuple(window if kind == "sliding_attention" else None for kind in kinds)}
    first = at("max_window_layers", default=28).read(settings, partial(integer, least=0)) if qwen else 0
    return {"windows": tuple(window if i >= first else None for i in range(layers))}


def _gpt2_scales(settings: Settings, fields: Fields) -> Fields:
    scaled = at("scale_attn_weights", default=True).read(settings, flag)
    by_layer = at("scale_attn_by_inverse_layer_idx", default=False).read(settings, flag)
    if scaled and not by_layer:
        return {}
    head_dim = fields["embed_dim"] // fields["num_heads"]
    scale = head_dim**-0.5 if scaled else 1.0
    return {"scales": tuple(scale / (i + 1 if by_layer else 1) for i in range(fields["layers"]))}


def _roberta_context(settings: Settings, fields: Fields) -> Fields:
    """Its positions begin after the padding's, and the table has rows for those before it too."""
    first = 1 + at("pad_token_id", default=1).read(settings, partial(integer, least=0))
    return {"first_position": first, "context": fields["context"] - first}


def _inner_default(settings: Settings, fields: Fields) -> Fields:
    return {"inner": fields["inner"] or 4 * fields["embed_dim"]}


# ----------------------------------------------------------------------------------------------------
# The tables

_BERT_FIELDS = {
    "layers": at("num_hidden_layers"),
    "embed_dim": at("hidden_size"),
    "num_heads": at("num_attention_heads"),
    "inner": at("intermediate_size"),
    "vocabulary": at("vocab_size"),
    "context": at("max_position_embeddings"),
    "token_types": at("type_vocab_size", default=0),
    "activation": at("hidden_act", default="gelu"),
    "norm_eps": at("layer_norm_eps", default=1e-12),
}
_POST = {"order": "post", "norm": "layer", "positions": "learned"}

_BERT = Family(
    name="bert",
    kind="encoder",
    fields=_BERT_FIELDS,
    fixed=_POST,
    only={"position_embedding_type": ("absolute",), "is_decoder": (False,), "add_cross_attention": (False,)},
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
    beside=(r"embeddings\.(position_ids|token_type_ids)", r"pooler\..*", r"(cls|classifier|lm_head|qa_outputs)\..*"),
)

_ROBERTA = Family(
    name="roberta",
    kind="encoder",
    fields=_BERT_FIELDS,
    fixed=_POST,
    derived=(_roberta_context,),
    only=_BERT.only,
    prefix="roberta.",
    keys=_BERT.keys,
    attention=_BERT.attention,
    beside=_BERT.beside,
)

_DISTILBERT = Family(
    name="distilbert",
    kind="encoder",
    fields={
        "layers": at("n_layers", "num_hidden_layers"),
        "embed_dim": at("dim", "hidden_size"),
        "num_heads": at("n_heads", "num_attention_heads"),
        "inner": at("hidden_dim"),
        "vocabulary": at("vocab_size"),
        "context": at("max_position_embeddings"),
        "activation": at("activation", default="gelu"),
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
    beside=(r"embeddings\.position_ids", r"(vocab_\w+|pre_classifier|classifier|qa_outputs)\..*"),
)

_GPT2 = Family(
    name="gpt2",
    kind="decoder",
    fields={
        "layers": at("n_layer", "num_hidden_layers"),
        "embed_dim": at("n_embd", "hidden_size"),
        "num_heads": at("n_head", "num_attention_heads"),
        "inner": at("n_inner", default=None),
        "vocabulary": at("vocab_size"),
        "context": at("n_positions", "n_ctx", "max_position_embeddings"),
        "activation": at("activation_function", default="gelu_new"),
        "norm_eps": at("layer_norm_epsilon", default=1e-5),
        "tied": at("tie_word_embeddings", default=True),
    },
    fixed={"order": "pre", "norm": "layer", "positions": "learned"},
    derived=(_inner_default, _gpt2_scales),
    only={"add_cross_attention": (False,)},
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
    beside=(r"h\.\d+\.attn\.(bias|masked_bias)", r"(score|classifier|multiple_choice_head)\..*"),
)

_NEOX = Family(
    name="gpt_neox",
    kind="decoder",
    fields={
        "layers": at("num_hidden_layers"),
        "embed_dim": at("hidden_size"),
        "num_heads": at("num_attention_heads"),
        "inner": at("intermediate_size"),
        "vocabulary": at("vocab_size"),
        "context": at("max_position_embeddings"),
        "activation": at("hidden_act", default="gelu"),
        "norm_eps": at("layer_norm_eps", default=1e-5),
        "bias": at("attention_bias", default=True),
        "tied": at("tie_word_embeddings", default=False),
    },
    fixed={"norm": "layer"},
    derived=(
        lambda settings, _: {
            "order": "parallel" if at("use_parallel_residual", default=True).read(settings, flag) else "pre"
        },
        lambda settings, fields: _rotary({"rotary_pct": 0.25, **settings}, fields),
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
    beside=(
        r"layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",
        r"rotary_emb\.inv_freq",
        r"(score|classifier|qa_outputs)\..*",
    ),
)

_LLAMA_FIELDS = {
    "layers": at("num_hidden_layers"),
    "embed_dim": at("hidden_size"),
    "num_heads": at("num_attention_heads"),
    "num_kv_heads": at("num_key_value_heads", default=None),
    "head_dim": at("head_dim", default=None),
    "inner": at("intermediate_size"),
    "vocabulary": at("vocab_size"),
    "context": at("max_position_embeddings", default=None),
    "activation": at("hidden_act", default="silu"),
    "norm_eps": at("rms_norm_eps", default=1e-6),
    "bias": at("attention_bias", default=False),
    "mlp_bias": at("mlp_bias", default=False),
    "tied": at("tie_word_embeddings", default=False),
}


def _llama(name: str, *, fields: Mapping[str, At] | None = None, **fixed: Any) -> Family:
    """Llama, and those that differ from it by a field or two."""
    own = {key: where for key, where in (_LLAMA_FIELDS | dict(fields or {})).items() if key not in fixed}
    return Family(
        name=name,
        kind="decoder",
        fields=own,
        fixed={"order": "pre", "norm": "rms", "gated": True, **fixed},
        derived=(_rotary, _windows),
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
        beside=(r"(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq", r"(score|classifier|qa_outputs)\..*"),
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
    )
}
_ALSO = {"xlm-roberta": "roberta", "camembert": "roberta"}  # the same under another name


def family_of(settings: Settings) -> Family:
    """The family that a config.json belongs to."""
    name = settings.get("model_type")
    name = _ALSO.get(name, name) if isinstance(name, str) else name
    if not isinstance(name, str) or name not in FAMILIES:
        received = "no model_type" if name is None else f"model_type {short(name)}"
        raise bad_value(
            "config.json",
            expected=f"a model of one of the families {', '.join(FAMILIES)}",
            received=received,
            remedy=WATCH,
        )
    return FAMILIES[name]
