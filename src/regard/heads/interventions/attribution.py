"""Direct logit attribution: what each head adds to the logit of a token, by way of the residual stream alone.

A decoder adds the output of every head to one stream, normalises the stream at the end and multiplies it with the
unembedding. With the scale of each norm on that way held fixed this is a sum, and each head has its share of it:

    logit = sum over heads of z_h W_h . d + what everything else adds,    d = norm's weight * the target's row / scale

Nothing depends on the name of a model: `residual_stream.py` finds from the numbers of one forward how the layers add to
the stream, and refuses a model whose numbers do not add up exactly.

Letters: H heads, E head width of v, W model width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from regard.errors import bad_type, bad_value
from regard.heads.interventions.direct_logits import direct_logits
from regard.heads.record.table import PerHead, Table
from regard.models.base import tokenizing

__all__ = ["Attribution", "attribution"]


@dataclass(repr=False)
class Attribution(PerHead):
    """`scores[layer]` (H,) is what each head adds to the logit of `target`; `rest` what everything else adds. If the
    model caps its logits, `logit` is that before the cap: the model's is softcap * tanh(logit / softcap)."""

    rest: float
    logit: float
    target: int
    softcap: float | None = None

    def table(self) -> Table:
        """A row for each head, the largest share first."""
        rows = sorted(self.rows(), key=lambda row: -abs(row[2]))
        return Table(({"layer": layer, "head": head, "adds": s} for layer, head, s in rows), self.scores)

    def caption(self) -> str:
        """The logit, and how much of it is not the heads'."""
        capped = "" if self.softcap is None else f" before the cap of {self.softcap:g}"
        return f"logit {self.logit:.3f} of token {self.target}{capped}, of which {self.rest:.3f} is not the heads'"

    def __str__(self) -> str:
        return f"{self.caption()}\n{Table(self.table()[:10])}"


def attribution(
    model: nn.Module, text: str | Tensor, target: str | int | None = None, *, tokenizer: Any = None, position: int = -1
) -> Attribution:
    """Each head's direct contribution to the logit of a token.

    Args:
        model: a decoder: regard's, or one of transformers, whose layers add to one stream: as they are (GPT-2, NeoX,
            Llama ...), scaled (Granite), or after a norm (OLMo 2, GLM 4, Gemma 2 and 3). Others are refused.
        text: a text, or token ids (N,) or (1, N).
        target: the token, as a text or a number; by default the likeliest one.
        tokenizer: for texts, if the model has none.
        position: the token of the text after which the next one is predicted; the last by default.
    """
    ids = _ids(model, text, tokenizer)
    if isinstance(position, bool) or not isinstance(position, int) or not -len(ids) <= position < len(ids):
        raise bad_value("position", expected=f"one of {len(ids)} tokens", received=repr(position))
    found = direct_logits(model, ids, position, lambda logits: [_target(model, target, tokenizer, logits)])
    scores = {
        layer.name: (found.writes[layer.name][0] @ found.directions[layer.name][0]).float() for layer in found.layers
    }
    logit = float(found.sums[0])
    rest = logit - sum(s.sum().item() for s in scores.values())
    return Attribution(scores, rest, logit, found.tokens[0], found.softcap)


def _ids(model: nn.Module, text: object, tokenizer: Any) -> Tensor:
    if isinstance(text, Tensor):
        ids = text[0] if text.dim() == 2 and text.shape[0] == 1 else text
        if ids.dim() != 1 or not ids.numel() or ids.dtype not in (torch.int64, torch.int32):
            raise bad_value(
                "text",
                expected="token ids (N,) or (1, N), one at least",
                received=f"{text.dtype} of shape {tuple(text.shape)}",
            )
        return ids
    if not isinstance(text, str):
        raise bad_type("text", expected="a text or token ids", received=type(text).__name__)
    ids = _encoded(model, text, tokenizer)
    if not ids:
        raise bad_value("text", expected="one token at least", received=repr(text))
    return torch.tensor(ids, device=next(model.parameters()).device)


def _encoded(model: nn.Module, text: str, tokenizer: Any, special: bool = True) -> list[int]:
    """The ids of a text; `special`: with the special tokens that the tokenizer adds."""
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
            raise bad_value(
                "target",
                expected="one token",
                received=f"{target!r}, which is {len(ids)}: {ids}",
                remedy="a token's number, or a text with its leading space",
            )
        return ids[0]
    if isinstance(target, bool) or not isinstance(target, int) or not 0 <= target < logits.numel():
        raise bad_value("target", expected=f"a token below {logits.numel()}", received=repr(target))
    return target
