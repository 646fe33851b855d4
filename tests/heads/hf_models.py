"""Shared by the tests of heads: tiny random models of transformers, their inputs, and their weights by eager attention.

A `Zoo` entry makes a model in float64 whose heads differ: its q and k are scaled up until the mean entropy is below
half of what it would be if every key that is seen were as good as any other.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
import transformers
from heads.oracle import Oracle
from torch import Tensor, nn

LAYERS, VOCABULARY, CONTEXT = 2, 97, 37
BATCH, TOKENS, TARGET = 2, 13, 7  # of a text, and of what a decoder is given beside it
SPECIAL: dict[str, Any] = {"bos_token_id": 2, "eos_token_id": 3, "pad_token_id": 1}

_BERT: dict[str, Any] = {
    "num_hidden_layers": LAYERS,
    "hidden_size": 33,
    "num_attention_heads": 3,
    "intermediate_size": 47,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": CONTEXT + 2,
}
_LLAMA: dict[str, Any] = {
    "num_hidden_layers": LAYERS,
    "hidden_size": 42,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 14,
    "intermediate_size": 47,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": CONTEXT,
}
_BART: dict[str, Any] = {
    "encoder_layers": LAYERS,
    "decoder_layers": LAYERS,
    "d_model": 33,
    "encoder_attention_heads": 3,
    "decoder_attention_heads": 3,
    "encoder_ffn_dim": 47,
    "decoder_ffn_dim": 47,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": CONTEXT,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}
_VISION: dict[str, Any] = {
    "num_hidden_layers": LAYERS,
    "hidden_size": 33,
    "num_attention_heads": 3,
    "intermediate_size": 47,
    "image_size": 15,
    "patch_size": 5,
    "num_channels": 3,
}


@dataclass(frozen=True)
class Stack:
    """Layers whose weights the model hands out together: their field of the output, and their names."""

    field: str  # of the model's output; "a.b" is a field of a field
    names: str  # a pattern
    kind: str = "self"
    ids: str | None = "input_ids"  # which input the keys are
    mask: str | None = "attention_mask"  # which input says where the queries are padding; None: nowhere


SELF = (Stack("attentions", ""),)
ENCODER_DECODER = (
    Stack("encoder_attentions", r"^(model\.)?encoder"),
    Stack("decoder_attentions", r"^(model\.)?decoder.*(self_attn|SelfAttention)", "self", "decoder_input_ids", None),
    Stack("cross_attentions", r"^(model\.)?decoder.*(encoder_attn|EncDecAttention)", "cross", "input_ids", None),
)


@dataclass(frozen=True)
class Zoo:
    """A family: its class and configuration, which modules attend, and what is to be scaled for heads to differ."""

    kind: str  # a class of transformers
    attends: str  # the class of the module whose forward attends
    scaled: str  # a pattern of the names of weights that make q and k
    sizes: dict[str, Any] = field(default_factory=dict)
    side: str = "right"  # where a batch is padded
    stacks: tuple[Stack, ...] = SELF
    interface: bool = True  # whether it attends by the attention interface of transformers
    sdpa: bool = True  # whether it knows "sdpa"
    double: bool = True  # whether it can be in float64

    @property
    def decoder(self) -> bool:
        return self.side == "left"


_QK = r"\b(query|key|q_proj|k_proj|q_lin|k_lin)\.weight$"
ZOO: dict[str, Zoo] = {
    "bert": Zoo("BertModel", "BertSelfAttention", _QK, _BERT),
    "distilbert": Zoo(
        "DistilBertModel",
        "DistilBertSelfAttention",
        _QK,
        {
            "n_layers": LAYERS,
            "dim": 33,
            "n_heads": 3,
            "hidden_dim": 47,
            "vocab_size": VOCABULARY,
            "max_position_embeddings": CONTEXT,
        },
    ),
    "roberta": Zoo("RobertaModel", "RobertaSelfAttention", _QK, _BERT),
    "albert": Zoo("AlbertModel", "AlbertAttention", _QK, _BERT | {"embedding_size": 17, "num_hidden_layers": 3}),
    "gpt2": Zoo(
        "GPT2LMHeadModel",
        "GPT2Attention",
        r"c_attn\.weight$",
        side="left",
        sizes={"n_layer": LAYERS, "n_embd": 33, "n_head": 3, "vocab_size": VOCABULARY, "n_positions": CONTEXT},
    ),
    "gpt_neox": Zoo(
        "GPTNeoXForCausalLM",
        "GPTNeoXAttention",
        r"query_key_value\.weight$",
        side="left",
        sizes={
            "num_hidden_layers": LAYERS,
            "hidden_size": 72,
            "num_attention_heads": 3,
            "intermediate_size": 61,
            "vocab_size": VOCABULARY,
            "max_position_embeddings": CONTEXT,
        },
    ),
    "llama": Zoo("LlamaForCausalLM", "LlamaAttention", _QK, _LLAMA, "left"),
    "mistral": Zoo("MistralForCausalLM", "MistralAttention", _QK, _LLAMA | {"sliding_window": 5}, "left"),
    "qwen3": Zoo("Qwen3ForCausalLM", "Qwen3Attention", r"\b(q_norm|k_norm)\.weight$", _LLAMA, "left"),
    "gemma2": Zoo(
        "Gemma2ForCausalLM",
        "Gemma2Attention",
        _QK,
        side="left",
        sdpa=False,
        sizes=_LLAMA | {"sliding_window": 5, "attn_logit_softcapping": 7.0, "query_pre_attn_scalar": 14},
    ),
    "gpt_oss": Zoo(
        "GptOssForCausalLM",
        "GptOssAttention",
        _QK,
        side="left",
        sdpa=False,
        sizes=_LLAMA
        | {
            "sliding_window": 5,
            "num_local_experts": 3,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "t5": Zoo(
        "T5ForConditionalGeneration",
        "T5Attention",
        r"Attention\.[qk]\.weight$",
        stacks=ENCODER_DECODER,
        sizes={
            "num_layers": LAYERS,
            "d_model": 33,
            "num_heads": 3,
            "d_kv": 11,
            "d_ff": 47,
            "vocab_size": VOCABULARY,
            "decoder_start_token_id": 2,
        },
    ),
    "bart": Zoo("BartForConditionalGeneration", "BartAttention", _QK, _BART, stacks=ENCODER_DECODER),
    "vit": Zoo("ViTModel", "ViTAttention", _QK, _VISION, stacks=(Stack("attentions", "", ids=None, mask=None),)),
    "whisper": Zoo(
        "WhisperForConditionalGeneration",
        "WhisperAttention",
        _QK,
        _BART | {"d_model": 42, "num_mel_bins": 5, "max_source_positions": 11, "max_target_positions": CONTEXT},
        stacks=(
            Stack("encoder_attentions", r"^model\.encoder", ids=None, mask=None),
            *(Stack(s.field, s.names, s.kind, s.ids if s.kind == "self" else None, None) for s in ENCODER_DECODER[1:]),
        ),
    ),
    "clip": Zoo(
        "CLIPModel",
        "CLIPAttention",
        _QK,
        stacks=(
            Stack("vision_model_output.attentions", "^vision", ids=None, mask=None),
            Stack("text_model_output.attentions", "^text"),
        ),
        sizes={"text_config": _BERT | SPECIAL, "vision_config": _VISION, "projection_dim": 7},
    ),
    # attention written by hand inside of transformers
    "bloom": Zoo(
        "BloomForCausalLM",
        "BloomAttention",
        r"query_key_value\.weight$",
        side="left",
        interface=False,
        sdpa=False,
        sizes={"n_layer": LAYERS, "hidden_size": 33, "n_head": 3, "vocab_size": VOCABULARY},
    ),
    "gptj": Zoo(
        "GPTJForCausalLM",
        "GPTJAttention",
        _QK,
        side="left",
        interface=False,
        sdpa=False,
        sizes={
            "n_layer": LAYERS,
            "n_embd": 42,
            "n_head": 3,
            "rotary_dim": 6,
            "vocab_size": VOCABULARY,
            "n_positions": CONTEXT,
        },
    ),
    "xglm": Zoo(
        "XGLMForCausalLM",
        "XGLMAttention",
        _QK,
        side="left",
        interface=False,
        sdpa=False,
        double=False,
        sizes={
            "num_layers": LAYERS,
            "d_model": 36,
            "attention_heads": 3,
            "ffn_dim": 47,
            "vocab_size": VOCABULARY,
            "max_position_embeddings": CONTEXT,
        },
    ),
    "mpt": Zoo(
        "MptForCausalLM",
        "MptAttention",
        r"Wqkv\.weight$",
        side="left",
        interface=False,
        sdpa=False,
        sizes={
            "n_layers": LAYERS,
            "d_model": 33,
            "n_heads": 3,
            "vocab_size": VOCABULARY,
            "max_seq_len": CONTEXT,
            "expansion_ratio": 2,
        },
    ),
    "xlnet": Zoo(
        "XLNetModel",
        "XLNetRelativeAttention",
        r"rel_attn\.[qkr]$",
        interface=False,
        sdpa=False,
        sizes={"n_layer": LAYERS, "d_model": 42, "n_head": 3, "d_inner": 47, "vocab_size": VOCABULARY},
    ),
    "deberta": Zoo(
        "DebertaV2Model",
        "DisentangledSelfAttention",
        r"(query|key)_proj\.weight$",
        interface=False,
        sdpa=False,
        sizes=_BERT | {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
    ),
    "fsmt": Zoo(
        "FSMTForConditionalGeneration",
        "Attention",
        _QK,
        stacks=ENCODER_DECODER,
        interface=False,
        sdpa=False,
        double=False,
        sizes=_BART | {"langs": ["en", "de"], "src_vocab_size": VOCABULARY, "tgt_vocab_size": VOCABULARY},
    ),
}
DECODERS = tuple(name for name, zoo in ZOO.items() if zoo.decoder)


def some_ids(batch: int = BATCH, tokens: int = TOKENS, seed: int = 5) -> Tensor:
    """Ids of few kinds, so that some come again, and none that is special."""
    return torch.randint(5, 14, (batch, tokens), generator=torch.Generator().manual_seed(seed))


@cache
def _states(family: str) -> dict[str, Tensor]:
    """The weights of a family, with heads that differ."""
    zoo = ZOO[family]
    model = _fresh(family)
    generator = torch.Generator().manual_seed(7)
    for name, parameter in model.named_parameters():
        drawn = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        norm = parameter.dim() == 1 and "norm" in name.lower() and name.endswith("weight")
        parameter.data = 1 + 0.3 * drawn if norm else 0.2 * drawn
    for _ in range(40):
        oracles = eager(family, model, inputs(family)).values()
        if all(o.entropy()[o.seeing].mean() < _half(o) for o in oracles):
            break
        for name, parameter in model.named_parameters():
            if re.search(zoo.scaled, name):
                parameter.data *= 1.25
    else:
        raise AssertionError(f"{family}: heads stay flat")
    return model.state_dict()


def _half(oracle: Oracle) -> Tensor:
    seen = (oracle.p > 1e-30).sum(-1)[oracle.seeing]
    return seen.double().log().mean() / 2 + 1e-9


def _fresh(family: str, implementation: str | None = "eager") -> Any:
    zoo = ZOO[family]
    made = getattr(transformers, zoo.kind)
    special = {} if family == "clip" else SPECIAL
    config = made.config_class(**zoo.sizes | special)
    config._attn_implementation = implementation
    config._experts_implementation = "eager"  # the others have no float64
    return made(config).to(torch.float64 if zoo.double else torch.float32).eval()


def model(family: str, implementation: str | None = None, *, padded: bool = False) -> Any:
    """The model of a family, in evaluation; the same weights each time. In float64, but for a decoder of padded texts:
    where a query sees nothing, eager attention of transformers is NaN in float64 (its softmax is in float32, and so
    the least number of float64 is -inf), and NaN spreads over the layers."""
    made = _fresh(family, implementation)
    made.load_state_dict(_states(family))
    zoo = ZOO[family]
    return made if zoo.double and not (padded and zoo.decoder) else made.float()


def inputs(family: str, *, padded: bool = False) -> dict[str, Any]:
    """What the model is called with: two texts, where `padded` the second of 8 tokens."""
    generator = torch.Generator().manual_seed(11)
    zoo = ZOO[family]
    ids = some_ids()
    given: dict[str, Any] = {}
    if family in ("vit", "clip"):
        given["pixel_values"] = torch.randn(BATCH, 3, 15, 15, generator=generator, dtype=torch.float64)
    if family == "whisper":
        given["input_features"] = torch.randn(BATCH, 5, 22, generator=generator, dtype=torch.float64)
    elif family != "vit":
        given["input_ids"] = ids
        mask = torch.ones_like(ids)
        if padded:
            blank = slice(8, None) if zoo.side == "right" else slice(None, TOKENS - 8)
            ids[1, blank], mask[1, blank] = SPECIAL["pad_token_id"], 0
            given["attention_mask"] = mask
        if family == "clip":
            ids[:, 7] = 3  # the end of a text
    if len(zoo.stacks) == 3:
        given["decoder_input_ids"] = some_ids(tokens=TARGET, seed=13)
        given |= {"use_cache": False} if family == "fsmt" else {}  # with a cache it forgets its mask
    return given


def can_be_padded(family: str) -> bool:
    return any(stack.mask is not None for stack in ZOO[family].stacks)


def names(family: str, model: nn.Module, **given: Any) -> list[str]:
    """The modules that attend, in the order of their calls; "#1" and so on where one is called again."""
    called: list[str] = []

    def note(name: str) -> Any:
        return lambda *_: called.append(name)

    hooks = [
        module.register_forward_pre_hook(note(name))
        for name, module in model.named_modules()
        if type(module).__name__ == ZOO[family].attends
    ]
    with torch.no_grad():
        model(**given)
    for hook in hooks:
        hook.remove()
    return [name if not (k := called[:i].count(name)) else f"{name}#{k}" for i, name in enumerate(called)]


def eager(family: str, model: Any, given: dict[str, Any]) -> dict[str, Oracle]:
    """What an eager model says itself, by the names of its layers in the order of their calls."""
    assert model.config._attn_implementation == "eager"
    order = names(family, model, **given)
    with torch.no_grad(), _values(model) as values:
        out = model(**given, output_attentions=True)
    found: dict[str, Oracle] = {}
    for stack in ZOO[family].stacks:
        mine = [name for name in order if re.search(stack.names, name)]
        weights = out
        for part in stack.field.split("."):
            weights = getattr(weights, part)
        assert len(mine) == len(weights), f"{stack.field}: {len(weights)} weights, {mine}"
        ids = None if stack.ids is None else given[stack.ids]
        found |= {name: Oracle(p, ids=ids) for name, p in zip(mine, weights, strict=True)}
    assert sorted(found) == sorted(order)
    assert not any(o.weights.isnan().any() for o in found.values())
    by_call: dict[str, Tensor] = dict(zip(order, values, strict=True)) if values else {}
    return {name: replace(found[name], values=by_call.get(name)) for name in order}


def kinds(family: str, order: list[str]) -> list[str]:
    return [next(s.kind for s in ZOO[family].stacks if re.search(s.names, name)) for name in order]


def rows(family: str, name: str, given: dict[str, Any]) -> Tensor | None:
    """The queries (B, N) of a layer which are not padding; None for all."""
    stack = next(s for s in ZOO[family].stacks if re.search(s.names, name))
    mask = None if stack.mask is None else given.get(stack.mask)
    return None if mask is None else mask.bool()


@contextmanager
def _values(model: Any) -> Iterator[list[Tensor]]:
    """The values (B, H, M, E) that the attention interface is given, one per query head, call by call."""
    homes = {sys.modules[type(m).__module__] for m in model.modules()}
    homes = {home for home in homes if hasattr(home, "eager_attention_forward")}
    originals = {home: home.eager_attention_forward for home in homes}
    seen: list[Tensor] = []

    def spy(original: Any) -> Any:
        def attend(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, *args: Any, **options: Any) -> Any:
            seen.append(v.repeat_interleave(q.shape[1] // v.shape[1], dim=1))
            return original(module, q, k, v, *args, **options)

        return attend

    try:
        for home, original in originals.items():
            home.eager_attention_forward = spy(original)
        yield seen
    finally:
        for home, original in originals.items():
            home.eager_attention_forward = original
