"""Reading a config.json: where a value is, and the fields of `ModelConfig` that follow from several values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from reprlib import repr as short
from typing import Any, NamedTuple

from regard.errors import bad_type, bad_value
from regard.models.fields import LAYERS, WIDTH, flag, integer, number, several, word
from regard.positions import DynamicNTK, LinearScaling, Llama3, LongRoPE, YaRN
from regard.positions.scalings import Scaling

__all__ = [
    "FIELD_KINDS",
    "WATCH",
    "Fields",
    "Key",
    "Settings",
    "activation",
    "gpt2_scales",
    "inner_default",
    "key",
    "layers_without_positions",
    "roberta_context",
    "rotary",
    "special_tokens",
    "windows",
]

Settings = Mapping[str, Any]  # a parsed config.json
Fields = dict[str, Any]  # arguments of ModelConfig
Kind = Callable[[str, Any], Any]  # a checking function of `regard.models.fields`

WATCH = "regard.watch works on any torch model, such as this one loaded by transformers"

_REQUIRED = object()


class Key(NamedTuple):
    """The names that a value may have in config.json (the first one present counts), and its default."""

    names: tuple[str, ...]
    default: Any = _REQUIRED

    def read(self, settings: Settings, kind: Kind) -> Any:
        """The value, checked by `kind`. Raises if it is of another kind, or required and absent."""
        for name in self.names:
            if settings.get(name) is not None:
                return kind(f"config.json: {name}", settings[name])
        if self.default is _REQUIRED:
            raise bad_value("config.json", expected=f"{' or '.join(map(repr, self.names))}", received="none")
        return self.default


def key(*names: str, default: Any = _REQUIRED) -> Key:
    """A `Key`; without a default the value is required."""
    return Key(names, default)


_WIDTH = partial(integer, most=WIDTH)
FIELD_KINDS: Mapping[str, Kind] = {  # how each field of ModelConfig in `Family.fields` is checked
    "layers": partial(integer, most=LAYERS),
    "embed_dim": _WIDTH,
    "num_heads": _WIDTH,
    "num_kv_heads": _WIDTH,
    "head_dim": _WIDTH,
    "inner": _WIDTH,
    "vocabulary": integer,
    "context": integer,
    "token_types": partial(integer, least=0),
    "activation": lambda what, value: value,  # (checked by `activation`)
    "norm_eps": partial(number, above=0.0, most=1.0),
    "bias": flag,
    "mlp_bias": flag,
    "tied": flag,
}


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


def activation(settings: Settings, fields: Fields) -> Fields:
    """The activation by our name for it."""
    if not isinstance(fields["activation"], str) or fields["activation"] not in _ACTIVATIONS:
        raise bad_value(
            "config.json: the activation",
            expected=f"one of {', '.join(_ACTIVATIONS)}",
            received=short(fields["activation"]),
            remedy=WATCH,
        )
    return {"activation": _ACTIVATIONS[fields["activation"]]}


_TOKEN = partial(integer, least=-1)  # some files write -1 for none


def special_tokens(settings: Settings, fields: Fields) -> Fields:
    """Token ids that begin, end and pad a text. There may be several that end it."""
    eos = settings.get("eos_token_id")
    ends = eos if isinstance(eos, (list, tuple)) else [] if eos is None else [eos]
    pad = key("pad_token_id", default=-1).read(settings, _TOKEN)
    return {
        "bos": key("bos_token_id", default=None).read(settings, _TOKEN),
        "eos": several("config.json: eos_token_id", ends, _TOKEN),
        "pad": pad if 0 <= pad < fields["vocabulary"] else None,  # (some name a token that was never added)
    }


_FRACTION = partial(number, above=0.0, most=1.0)


def rotary(settings: Settings, fields: Fields) -> Fields:
    """Rotary positions. Newer files have `rope_parameters`, older ones `rope_theta` and `rope_scaling`; GPT-NeoX has
    its own names."""
    rope: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        stored = settings.get(name) or {}
        if not isinstance(stored, Mapping) or any(isinstance(value, Mapping) for value in stored.values()):
            raise bad_type(f"config.json: {name}", expected="one object for all layers", received=short(stored))
        rope |= stored
    merged = {**settings, **{name: value for name, value in rope.items() if value is not None}}
    fraction = key("partial_rotary_factor", "rotary_pct", default=1.0).read(merged, _FRACTION)
    head_dim = fields.get("head_dim") or fields["embed_dim"] // fields["num_heads"]
    return {
        "positions": "rotary",
        "rotary_base": key("rope_theta", "rotary_emb_base", default=10000.0).read(merged, partial(number, above=1.0)),
        "rotary_width": None if fraction == 1 else int(head_dim * fraction),
        "rotary_scaling": _scaling(rope, fields.get("context")),
    }


_FACTOR = partial(number, least=1e-3, most=1e6)  # beyond these bounds angles and scores overflow
_SCALING_OPTIONS: Mapping[str, Kind] = {
    "attention_factor": partial(number, least=1e-3, most=1e3),
    "beta_fast": _FACTOR,
    "beta_slow": _FACTOR,
    "mscale": partial(number, least=0.0, most=1e3),
    "mscale_all_dim": partial(number, least=0.0, most=1e3),
    "truncate": flag,
}


def _scaling(rope: Mapping[str, Any], context: int | None) -> Scaling | None:
    """The scaling of rotary frequencies, or None for the default."""
    kind = key("rope_type", "type", default="default").read(rope, word)
    trained = key("original_max_position_embeddings", default=context or 0).read(rope, integer)
    options = {
        name: key(name).read(rope, check) for name, check in _SCALING_OPTIONS.items() if rope.get(name) is not None
    }

    def required(name: str, check: Kind = _FACTOR) -> Any:
        if rope.get(name) is None:
            raise bad_value(f"config.json: rope of type {kind!r}", expected=repr(name), received=short(dict(rope)))
        return key(name).read(rope, check)

    match kind:
        case "default":
            return None
        case "linear":
            return LinearScaling(required("factor"))
        case "dynamic":
            return DynamicNTK(required("factor"), context or trained)
        case "yarn":
            return YaRN(required("factor"), trained, **options)
        case "longrope":
            factor = key("factor", default=(context or 0) / (trained or 1)).read(rope, _FACTOR)
            factors = partial(several, kind=_FACTOR)
            return LongRoPE(
                required("short_factor", factors),
                required("long_factor", factors),
                trained,
                factor=factor,
                attention_factor=options.get("attention_factor"),
            )
        case "llama3":
            return Llama3(required("factor"), required("low_freq_factor"), required("high_freq_factor"), trained)
    raise bad_value(
        "config.json: rope_type",
        expected="default, linear, dynamic, yarn, longrope or llama3",
        received=short(kind),
        remedy=WATCH,
    )


def windows(settings: Settings, fields: Fields) -> Fields:
    """The sliding window of each layer, in tokens; no field if there is none."""
    layers = fields["layers"]
    qwen = fields["family"] in ("qwen2", "qwen3")  # they have switches: whether a window is used, and from which layer
    switched = qwen or fields["family"] == "smollm3"
    switch = key("use_sliding_window", default=not switched)
    if settings.get("sliding_window") is None or not switch.read(settings, flag):
        return {}
    window = key("sliding_window").read(settings, integer)
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
    if fields["family"] == "smollm3":  # layers without positions have the window
        return {"windows": tuple(None if placed else window for placed in fields["placed"])}
    first = key("max_window_layers", default=28).read(settings, partial(integer, least=0)) if qwen else 0
    return {"windows": tuple(window if i >= first else None for i in range(layers))}


def layers_without_positions(settings: Settings, fields: Fields) -> Fields:
    """Which layers have rotary positions: `no_rope_layers` has 1 for those that do, 0 for those that do not; without it
    each `no_rope_layer_interval`-th does not."""
    layers, given = fields["layers"], settings.get("no_rope_layers")
    if given is None:
        every = key("no_rope_layer_interval", default=4).read(settings, integer)
        return {"placed": tuple((i + 1) % every != 0 for i in range(layers))}
    uses = several("config.json: no_rope_layers", given, partial(integer, least=0, most=1))
    if len(uses) != layers:
        raise bad_value(
            "config.json: no_rope_layers", expected=f"one for each of {layers} layers", received=f"{len(uses)} numbers"
        )
    return {"placed": tuple(map(bool, uses))}


def gpt2_scales(settings: Settings, fields: Fields) -> Fields:
    """The scale of each layer's scores, if the model does not use the default."""
    scaled = key("scale_attn_weights", default=True).read(settings, flag)
    by_layer = key("scale_attn_by_inverse_layer_idx", default=False).read(settings, flag)
    if scaled and not by_layer:
        return {}
    head_dim = fields["embed_dim"] // fields["num_heads"]
    scale = head_dim**-0.5 if scaled else 1.0
    return {"scales": tuple(scale / (i + 1 if by_layer else 1) for i in range(fields["layers"]))}


def roberta_context(settings: Settings, fields: Fields) -> Fields:
    """RoBERTa's positions start after the padding id; the rows of the table before that are unused."""
    first = 1 + key("pad_token_id", default=1).read(settings, partial(integer, least=0))
    return {"first_position": first, "context": fields["context"] - first}


def inner_default(settings: Settings, fields: Fields) -> Fields:
    """The width of the feed-forward part: 4 W by default."""
    return {"inner": fields["inner"] or 4 * fields["embed_dim"]}
