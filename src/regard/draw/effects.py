"""What changes without a head: the probabilities of the next token, or the vector of the sentence.

Letters: B batch, N tokens, W model width, V vocabulary.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from regard.heads import Record
from regard.heads.interventions.ablate import ablate
from regard.heads.watch_all import evaluating, run

__all__ = ["Effect", "Effects", "Rerun", "effects", "is_causal", "rerun_of"]

TOP = 5  # tokens that are shown
LONGEST = 512  # tokens up to which a page computes them by itself: each head is one more run of the model


@dataclass(frozen=True)
class Effect:
    """A run of the model: the most probable next tokens, and how far it is from the intact run.

    Attributes:
        top: tokens and their probabilities, the most probable first; empty for an encoder.
        change: for the next token the Kullback-Leibler divergence from the intact probabilities, in nats; for the
            vector of the sentence 1 - cosine with the intact vector. 0 for the intact run.
    """

    top: list[tuple[str, float]]
    change: float = 0.0


@dataclass
class Effects:
    """What the model says with all heads, and without each of some heads.

    Attributes:
        kind: "next" (probabilities of the next token) or "vector" (the mean of the last hidden states).
        intact: the run with all heads; `heads`: those without one head, by (layer, head).
    """

    kind: str
    intact: Effect
    heads: dict[tuple[int, int], Effect] = field(default_factory=dict)


@dataclass(frozen=True)
class Rerun:
    """A model with what it was run on and what it said, to run it again without some heads.

    Attributes:
        model: a weak reference to it; `inputs`: what it was run on.
        keep: (B, N) True for tokens, False for padding; None if that is not known.
        decode: the text of a token id.
        kind: "next" or "vector"; `numbers`: the logarithms of the next token's probabilities (B, V), or the vectors of
            the texts (B, W).
    """

    model: Callable[[], nn.Module | None]
    inputs: Any
    keep: Tensor | None
    decode: Callable[[int], str]
    kind: str
    numbers: Tensor


def rerun_of(
    model: nn.Module, inputs: Any, output: Any, record: Record, keep: Tensor | None, decode: Callable[[int], str]
) -> Rerun | None:
    """What is needed to run a model again; None if its output is neither logits of a causal model nor hidden states."""
    kind = _kind(output, record)
    if kind is None:
        return None
    return Rerun(weakref.ref(model), inputs, keep, decode, kind, _numbers(output, kind, keep))


def effects(again: Rerun, record: Record, heads: Iterable[tuple[int, int]], item: int = 0) -> Effects | None:
    """What changes without each of some heads, (layer, head), for one text of the batch. None if the model is gone, or
    no longer says what it said (some of its heads were replaced when it was watched)."""
    model = again.model()
    if model is None:
        return None
    with evaluating(model), torch.no_grad():
        now = _numbers(run(model, again.inputs), again.kind, again.keep)[item]
        intact = again.numbers[item]
        if now.shape != intact.shape or not torch.allclose(now, intact, rtol=1e-3, atol=1e-3):
            return None
        found = Effects(again.kind, _effect(again, intact, intact))
        for layer, head in heads:
            with ablate(model, {record.layers[layer]: [head]}):
                without = _numbers(run(model, again.inputs), again.kind, again.keep)[item]
            found.heads[layer, head] = _effect(again, without, intact)
    return found


def _kind(output: Any, record: Record) -> str | None:
    """Whether an output has logits for the next token, or hidden states."""
    causal = is_causal(record)
    logits, hidden = getattr(output, "logits", None), getattr(output, "last_hidden_state", None)
    if isinstance(output, Tensor):
        logits, hidden = (output, None) if causal else (None, output)
    if causal and isinstance(logits, Tensor) and logits.dim() == 3:
        return "next"
    return "vector" if isinstance(hidden, Tensor) and hidden.dim() == 3 else None


def _numbers(output: Any, kind: str, keep: Tensor | None) -> Tensor:
    """The logarithms of the next token's probabilities (B, V), or the means of the hidden states (B, W)."""
    name = "logits" if kind == "next" else "last_hidden_state"
    values: Tensor = output if isinstance(output, Tensor) else getattr(output, name)
    batch, tokens, _ = values.shape
    if keep is None or keep.shape != (batch, tokens):
        keep = torch.ones(batch, tokens, dtype=torch.bool, device=values.device)
    kept = keep.to(values.device, torch.bool)
    if kind == "vector":
        return ((values.double() * kept[..., None]).sum(1) / kept.sum(1, keepdim=True).clamp(min=1)).cpu()
    last = (kept * torch.arange(tokens, device=kept.device)).amax(1)
    return values[torch.arange(batch, device=values.device), last].double().log_softmax(-1).cpu()


def is_causal(record: Record) -> bool:
    """Whether the last layer of self attention sees no token after its query."""
    layer = next((layer for layer in reversed(list(record)) if layer.kind == "self" and layer.exact), None)
    if layer is None:
        return False
    n, m = layer.shape[2:]
    first = max(n - 64, 0)
    weights = layer.weights(0, slice(first, n), slice(m - n + first, m), batch=0)
    return n > 1 and not bool(weights.triu(1).any())


def _effect(again: Rerun, numbers: Tensor, intact: Tensor) -> Effect:
    if again.kind == "vector":
        return Effect([], float((1 - torch.nn.functional.cosine_similarity(numbers, intact, dim=0)).clamp(min=0)))
    top = numbers.exp().topk(min(TOP, len(numbers)))
    tokens = [(again.decode(int(i)), float(p)) for i, p in zip(top.indices, top.values, strict=True)]
    change = (intact.exp() * (intact - numbers)).nan_to_num(0.0).sum()
    return Effect(tokens, float(change.clamp(min=0)))
