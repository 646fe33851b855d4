"""Probes with known answers: repeated random tokens, which can be predicted only by attending to the first copy."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from regard.errors import bad_value
from regard.heads.module_names import VOCABULARY_SIZES
from regard.heads.record.record import Record
from regard.heads.watch import watch
from regard.heads.watch_all import evaluating

__all__ = ["induction", "repeated"]


def repeated(
    vocabulary: int, *, length: int = 50, times: int = 2, batch: int = 8, first: int | None = None, seed: int = 0
) -> Tensor:
    """Random tokens, no two of them the same, repeated: integers (batch, times * length), or one more where each text
    begins with the token `first`.

    >>> repeated(100, length=3, batch=1, first=7)[0].tolist()
    [7, 44, 19, 93, 44, 19, 93]
    """
    if length < 1 or times < 2 or batch < 1:
        raise bad_value(
            "repeated", expected="length >= 1, times >= 2, batch >= 1", received=f"{(length, times, batch)}"
        )
    if vocabulary <= length:
        raise bad_value("vocabulary", expected=f"more than {length} tokens", received=vocabulary)
    if first is not None and not 0 <= first < vocabulary:
        raise bad_value("first", expected=f"a token below {vocabulary}", received=first)
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(batch):
        drawn = torch.randperm(vocabulary, generator=generator)
        rows.append((drawn if first is None else drawn[drawn != first])[:length])
    text = torch.stack(rows).repeat(1, times)
    return text if first is None else torch.cat([torch.full((batch, 1), first), text], 1)


def induction(
    model: nn.Module, *, length: int = 50, batch: int = 8, first: int | None = None, seed: int = 0, **options: Any
) -> Record:
    """Run a language model on repeated random tokens. In the record, `induction` is the prefix matching score of Olsson
    et al. 2022 (mean weight from a token of the second half to the one after its copy), `duplicate` that of Wang et al.
    2022, `previous` the mass on the token before.

    Args:
        model: called with token ids (B, N): regard's, transformers', or any other whose vocabulary size is found.
        length, batch, seed: of the probe.
        first: a token that every text begins with, such as the model's BOS token.
        options: further arguments of the model's forward.
    """
    ids = repeated(_vocabulary(model), length=length, batch=batch, first=first, seed=seed)
    device = next(model.parameters()).device
    measures = ["induction", "duplicate", "previous", "entropy", "on_first", "distance", "offsets", "received"]
    with evaluating(model), torch.no_grad(), watch(model, measures=measures) as seen:
        model(ids.to(device), **options)
    return seen


def _vocabulary(model: nn.Module) -> int:
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
