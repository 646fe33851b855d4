"""`read`: the weights of a model's heads, its norms and embeddings, from regard's models and those of transformers.

A model of transformers is read by the table of its family (`regard.models.families`), with the same checks of names and
shapes as a file of it. Other models are refused: where norms stand does not follow from weights.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor, nn

from regard.checks import whole_number
from regard.errors import bad_value
from regard.heads.analysis.circuits.weights import LayerWeights, ModelWeights
from regard.heads.interventions.residual_stream import LinearNorm
from regard.heads.watch_all import evaluating
from regard.models import Decoder, Encoder
from regard.models.blocks import Block
from regard.models.families import FAMILIES, family_of
from regard.models.loading import of_state_dict
from regard.positions import Rotary

__all__ = ["as_weights", "read"]

_TEXTS = 4096  # of one token each, that are run at a time


def read(model: nn.Module, *, tied: bool = False, after: int = 0) -> ModelWeights:
    """The weights of all heads, to be given to the functions of this package in place of the model. The tensors are the
    model's own: read again if they were changed.

    Args:
        model: a model of `regard.models`, or one of transformers of the same families (BERT, RoBERTa, DistilBERT,
            GPT-2, GPT-NeoX, Llama, Mistral, Qwen2, Qwen3).
        tied: take the token embedding as the unembedding, if the model has no other.
        after: take each token as the stream holds it after so many layers, run by itself at the first position, in
            place of its embedding: what later layers read of a token has passed the first feed-forward part.

    >>> from regard.models import Decoder, ModelConfig
    >>> config = ModelConfig(layers=2, embed_dim=6, num_heads=3, vocabulary=11, inner=7, context=13, causal=True)
    >>> weights = read(Decoder(config))
    >>> len(weights.heads), weights.layers[0].query.shape, weights.unembedding.shape
    (6, torch.Size([3, 2, 6]), torch.Size([11, 6]))
    """
    if isinstance(model, nn.Module) and any(parameter.is_meta for parameter in model.parameters()):
        raise bad_value("model", expected="weights with values", received="some on the meta device")
    ours = model if isinstance(model, (Decoder, Encoder)) else _of_transformers(model)
    weights = _of_model(ours)
    if ours is not model:
        _adapt(weights, ours, model)
    if whole_number("after", after, at_least=0):
        weights.after, weights.tokens = after, _after_layers(ours, after)
        weights.notes = (*weights.notes, f"tokens are taken after {after} layer{'s' if after > 1 else ''}")
    if tied and weights.unembedding is None:
        weights.unembedding = weights.embedding
        weights.notes = (*weights.notes, "the token embedding is taken for the unembedding")
    return weights


def as_weights(model: nn.Module | ModelWeights) -> ModelWeights:
    """The weights of a model, if they are not given already."""
    return model if isinstance(model, ModelWeights) else read(model)


def _of_model(model: Decoder | Encoder) -> ModelWeights:
    embedding = _weight("embedding.tokens", model.embedding.tokens, nn.Embedding)
    unembedding = _weight("head", model.head) if isinstance(model, Decoder) else None
    shared = embedding.detach()  # one tensor for both ends, if they are tied
    way = " (all on the way from layer to layer)" if model.config.order == "post" else ""
    notes = [f"norms are folded in{way}, their scales left out"]
    if any(name.endswith("bias") for name, _ in model.named_parameters() if ".mlp." not in name):
        notes.append("biases are left out")
    if model.config.positions != "rotary":
        notes.append("positions are left out")
    return ModelWeights(
        [_layer(f"blocks.{i}.attention", block) for i, block in enumerate(model.blocks)],  # type: ignore[arg-type]
        embedding=shared,
        unembedding=shared if unembedding is embedding else None if unembedding is None else unembedding.detach(),
        first=_norm(model.embedding.norm),
        last=_norm(model.norm),
        tokenizer=model.tokenizer,
        notes=tuple(notes),
        why_no_unembedding=f"{type(model).__name__}, which has none",
    )


def _layer(name: str, block: Block) -> LayerWeights:
    """The attention of one block, with the norms around it."""
    layer = block.attention
    rows = {"q_proj": layer.head_dim, "k_proj": layer.head_dim, "v_proj": layer.value_head_dim}
    q, k, v = (_weight(f"{name}.{p}", getattr(layer, p)).detach().unflatten(0, (-1, d)) for p, d in rows.items())
    out = _weight(f"{name}.out_proj", layer.out_proj).detach().unflatten(1, (-1, layer.value_head_dim))
    post = block.order == "post"
    norms = (_norm(block.attention_norm), _norm(block.mlp_norm))
    return LayerWeights(
        name,
        query=q,
        key=k,
        value=v,
        output=out.transpose(0, 1),
        scale=layer.head_dim**-0.5 if layer.scale is None else layer.scale,
        rotary=layer.position_encoding if isinstance(layer.position_encoding, Rotary) else None,
        reads=None if post else norms[0],
        leaves=tuple(norm for norm in norms if norm is not None) if post else (),
        why_no_qk="" if layer.q_norm is None else "q and k that are normalised per head (qk_norm)",
    )


def _weight(name: str, module: nn.Module, kind: type[nn.Module] = nn.Linear) -> nn.Parameter:
    """The weight of a plain module; raises if an adapter, quantisation or sharding makes it another one."""
    weight = getattr(module, "weight", None)
    if not isinstance(module, kind) or list(module.children()) or type(weight) is not nn.Parameter:
        raise bad_value(
            name,
            expected=f"a plain nn.{kind.__name__}",
            received=f"{type(module).__name__} whose weight is a {type(weight).__name__}",
            remedy="merge adapters, remove parametrisations, read before quantising or sharding",
        )
    return weight


def _norm(norm: nn.Module | None) -> LinearNorm | None:
    """The linear part of a norm, its scale held at 1."""
    if norm is None:
        return None
    assert isinstance(norm, (nn.LayerNorm, nn.RMSNorm))
    weight = norm.weight.detach().double()
    bias = getattr(norm, "bias", None)
    bias = torch.zeros_like(weight) if bias is None else bias.detach().double()
    return LinearNorm(weight, bias, centred=isinstance(norm, nn.LayerNorm), scale=1.0)


def _of_transformers(model: Any) -> Decoder | Encoder:
    """A model of transformers as one of ours with the same tensors, by the table of its family."""
    config: Any = getattr(model, "config", None)
    if not isinstance(model, nn.Module) or not hasattr(config, "to_json_string"):
        raise _unknown(type(model).__name__)
    settings: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    head = _head(model)
    if head is None:
        settings["tie_word_embeddings"] = True  # no head is asked for
    try:
        stored = family_of(settings).keys.get("head.weight")  # transformers renames heads when it saves a model
        in_memory = next((f"{name}.weight" for name, module in model.named_modules() if module is head), None)
        tensors = {stored if name == in_memory and stored else name: t for name, t in model.state_dict().items()}
        return of_state_dict(settings, tensors, type(model).__name__)
    except (ValueError, TypeError) as error:
        raise _unknown(f"{type(model).__name__} ({error})") from error


def _head(model: Any) -> nn.Module | None:
    """The projection to the vocabulary of a model of transformers, if it has one."""
    return getattr(model, "get_output_embeddings", lambda: None)()


def _adapt(weights: ModelWeights, ours: Decoder | Encoder, theirs: nn.Module) -> None:
    """Name the layers as another library does, and drop an unembedding that its model does not have."""
    if _head(theirs) is None:
        weights.unembedding = None
    weights.why_no_unembedding = f"{type(theirs).__name__}, which has none that is linear in the stream"
    family = FAMILIES[ours.config.family]
    modules = {name for name, _ in theirs.named_modules()}
    for i, layer in enumerate(weights.layers):
        plain = family.attention[1].format(i=i).rstrip(".")
        layer.name = next((name for name in (family.prefix + plain, plain) if name in modules), layer.name)


def _after_layers(model: Decoder | Encoder, count: int) -> Tensor:
    """The stream (V, W) after the first `count` layers, for each token of the vocabulary by itself."""
    if count > len(model.blocks):
        raise bad_value("after", expected=f"at most {len(model.blocks)} layers", received=count)
    outputs = []
    with evaluating(model), torch.no_grad():
        for ids in torch.arange(model.config.vocabulary, device=model.device)[:, None].split(_TEXTS):
            x = model.embedding(ids)  # (B, 1, W): a text of one token attends to itself
            for block in model.blocks[:count]:
                x = block(x)
            outputs.append(x[:, 0])
    return torch.cat(outputs)


def _unknown(received: str) -> ValueError:
    return bad_value(
        "model",
        expected=f"a model of regard.models, or one of transformers of the families {', '.join(FAMILIES)}, whose norms "
        "and residual stream are known",
        received=received,
        remedy="circuits.ModelWeights(layers=[circuits.LayerWeights(...), ...]) of its tensors",
    )
