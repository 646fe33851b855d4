"""Which heads speak for the next token: what each adds to its logit directly, by way of the residual stream alone.

A decoder adds the output of every head to one stream, normalises the stream at the end and multiplies it with the
vocabulary. With the scale of that last norm held fixed this is a sum, and each head has its share of it:

    logit = sum over heads of z_h W_h . d + what everything else adds,    d = norm's weight * the target's row / scale

Letters: H heads, E head width of v, W model width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from regard.errors import bad_type, bad_value
from regard.heads.attention import output_weight
from regard.heads.corpus import evaluating
from regard.heads.table import PerHead, Table
from regard.heads.watch import watch
from regard.models.text import tokenizing

__all__ = ["Attribution", "attribution"]

_NORMS = ("norm", "model.norm", "transformer.ln_f", "gpt_neox.final_layer_norm", "model.final_layernorm", "ln_f",
          "model.decoder.final_layer_norm")  # fmt: skip
_AFTER = ("post_feedforward_layernorm", "post_mlp_layernorm")  # norms between a head and the stream


@dataclass
class Attribution(PerHead):
    """`scores[layer]` (H,) is what each head adds to the logit of `target`; `rest` what everything else adds."""

    rest: float
    logit: float
    target: int

    def table(self) -> Table:
        """A row for each head, the largest share first."""
        rows = sorted(self.rows(), key=lambda row: -abs(row[2]))
        return Table({"layer": layer, "head": head, "adds": s} for layer, head, s in rows)

    def __str__(self) -> str:
        top = Table(self.table()[:10])
        return f"logit {self.logit:.3f} of token {self.target}, of which {self.rest:.3f} is not the heads'\n{top}"


def attribution(
    model: nn.Module, text: str | Tensor, target: str | int | None = None, *, tokenizer: Any = None, position: int = -1
) -> Attribution:
    """Each head's direct contribution to the logit of a token.

    Args:
        model: a decoder: regard's, or one of transformers that normalises before its layers (GPT-2, NeoX, Llama ...).
        text: a text, or token ids (N,) or (1, N).
        target: the token, as a text or a number; by default the likeliest one.
        tokenizer: for texts, where the model has none of its own.
        position: at which token of the text the next one is asked for; at the last by default.
    """
    norm, unembedding = _end(model)
    ids = _ids(model, text, tokenizer)
    if isinstance(position, bool) or not isinstance(position, int) or not -len(ids) <= position < len(ids):
        raise bad_value("position", expected=f"one of {len(ids)} tokens", received=repr(position))
    caught: list[Tensor] = []
    handle = norm.register_forward_pre_hook(lambda _, args: caught.append(args[0].detach()))
    try:
        with evaluating(model), torch.no_grad(), watch(model, measures=[], keep="qkv") as seen:
            out = model(ids[None])
    finally:
        handle.remove()
    logits = (out if isinstance(out, Tensor) else out.logits)[0, position].double()
    number = _target(model, target, tokenizer, logits)
    if len(caught) != 1:
        raise bad_value("model", expected="one norm at the end", received=f"one that ran {len(caught)} times")
    x = caught[0][0, position].double()
    direction, constant = _direction(norm, x, unembedding, number)
    logit = float(x @ direction + constant)
    rounding = 64 * max(torch.finfo(caught[0].dtype).eps, 1e-7) * float(x.abs() @ direction.abs() + abs(logit))
    if abs(logit - float(logits[number])) > rounding:
        raise bad_value("model", expected="logits that are the normalised stream times the vocabulary",
                        received=f"{float(logits[number]):.4f} where that is {logit:.4f}")  # fmt: skip
    scores: dict[str, Tensor] = {}
    modules = dict(model.named_modules())
    for layer in seen:
        if layer.kind != "self":
            continue
        z = layer.output[0, :, position].double()  # (H, E)
        weight = output_weight(modules[layer.name.partition("#")[0]], *z.shape)
        if weight is None:
            raise bad_value(layer.name, expected="an output projection of (W, H * E)", received="none by a known name",
                            remedy="regard.models.load, for a model that it knows")  # fmt: skip
        slices = weight.double().unflatten(1, tuple(z.shape))  # (W, H, E)
        scores[layer.name] = torch.einsum("he,whe,w->h", z, slices, direction).float()
    rest = logit - sum(s.sum().item() for s in scores.values())
    return Attribution(scores, rest, logit, number)


def _direction(norm: nn.Module, x: Tensor, unembedding: nn.Module, number: int) -> tuple[Tensor, float]:
    """d (W,) and c with logit = x . d + c, the scale of the norm at x held fixed."""
    row = unembedding.weight[number].detach().double()  # type: ignore[index]
    bias = getattr(unembedding, "bias", None)
    constant = 0.0 if bias is None else bias[number].item()
    weight = getattr(norm, "weight", None)
    eps = next((e for name in ("eps", "variance_epsilon") if isinstance(e := getattr(norm, name, None), float)), 0.0)
    d = row if weight is None else row * weight.detach().double()
    if isinstance(norm, nn.LayerNorm) or getattr(norm, "bias", None) is not None:
        if getattr(norm, "bias", None) is not None:
            constant += float(norm.bias.detach().double() @ row)  # type: ignore[union-attr]
        d = d - d.mean()  # the mean is taken out of x; it comes to the same to take it out of d
        return d / (x.var(unbiased=False) + eps).sqrt(), constant
    return d / (x.square().mean() + eps).sqrt(), constant


def _end(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    """The last norm and the projection to the vocabulary."""
    get = getattr(model, "get_output_embeddings", None)
    unembedding = getattr(model, "head", None) if get is None else get()
    modules = dict(model.named_modules())
    norm = next((modules[name] for name in _NORMS if name in modules), None)
    if norm is None or not isinstance(getattr(unembedding, "weight", None), Tensor):
        raise bad_value("model", expected="a decoder with a last norm and a projection to the vocabulary",
                        received=type(model).__name__, remedy="a language model, such as models.load('smollm2')"
                        )  # fmt: skip
    after = any(name.rpartition(".")[2] in _AFTER for name in modules)
    if after or getattr(getattr(model, "config", None), "order", None) == "post":
        raise bad_value("model", expected="heads that add to the stream as they are",
                        received="norms between heads and stream")  # fmt: skip
    scaled = getattr(getattr(model, "config", None), "residual_multiplier", 1.0)
    if scaled != 1.0:
        raise bad_value("model", expected="heads that add to the stream as they are", received=f"scaled by {scaled}")
    assert unembedding is not None
    return norm, unembedding


def _ids(model: nn.Module, text: object, tokenizer: Any) -> Tensor:
    if isinstance(text, Tensor):
        ids = text[0] if text.dim() == 2 and text.shape[0] == 1 else text
        if ids.dim() != 1 or not ids.numel() or ids.dtype not in (torch.int64, torch.int32):
            raise bad_value("text", expected="token ids (N,) or (1, N), one at least",
                            received=f"{text.dtype} of shape {tuple(text.shape)}")  # fmt: skip
        return ids
    if not isinstance(text, str):
        raise bad_type("text", expected="a text or token ids", received=type(text).__name__)
    ids = _encoded(model, text, tokenizer)
    if not ids:
        raise bad_value("text", expected="one token at least", received=repr(text))
    return torch.tensor(ids, device=next(model.parameters()).device)


def _encoded(model: nn.Module, text: str, tokenizer: Any, special: bool = True) -> list[int]:
    """The ids of a text; `special`: with the tokens that a tokenizer puts around it."""
    tokenizer = getattr(model, "tokenizer", None) if tokenizer is None else tokenizer
    if tokenizer is None:
        raise bad_value("tokenizer", expected="one, for the model has none of its own", received="none")
    with tokenizing(text):
        encoded = tokenizer.encode(text, add_special_tokens=special)
    return list(getattr(encoded, "ids", encoded))


def _target(model: nn.Module, target: str | int | None, tokenizer: Any, logits: Tensor) -> int:
    if target is None:
        return int(logits.argmax())
    if isinstance(target, str):
        ids = _encoded(model, target, tokenizer, special=False)
        if len(ids) != 1:
            raise bad_value("target", expected="one token", received=f"{target!r}, which is {len(ids)}: {ids}",
                            remedy="a token's number, or a text with its leading space")  # fmt: skip
        return ids[0]
    if isinstance(target, bool) or not isinstance(target, int) or not 0 <= target < logits.numel():
        raise bad_value("target", expected=f"a token below {logits.numel()}", received=repr(target))
    return target
