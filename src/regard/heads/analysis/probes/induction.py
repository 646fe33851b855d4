"""Repeated random tokens, which can be predicted only by attending to the first copy: induction and duplicate heads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from regard.errors import bad_type, bad_value
from regard.heads.analysis.probes.inputs import device_of, special_prefix, token_ids, tokenizer_of, vocabulary_size
from regard.heads.record.record import Record
from regard.heads.watch import watch
from regard.heads.watch_all import evaluating

__all__ = ["induction", "repeated", "texts_or_random_tokens"]


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
        drawn = torch.randperm(vocabulary, generator=generator, device="cpu")
        rows.append((drawn if first is None else drawn[drawn != first])[:length])
    text = torch.stack(rows).repeat(1, times)
    return text if first is None else torch.cat([torch.full((batch, 1), first, device="cpu"), text], 1)


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
    ids = repeated(vocabulary_size(model), length=length, batch=batch, first=first, seed=seed)
    measures = ["induction", "duplicate", "previous", "entropy", "on_first", "distance", "offsets", "received"]
    with evaluating(model), torch.no_grad(), watch(model, measures=measures) as seen:
        model(ids.to(device_of(model)), **options)
    return seen


def texts_or_random_tokens(
    model: nn.Module, texts: Sequence[str | Tensor] | None, length: int, seeds: Sequence[int], tokenizer: Any
) -> list[tuple[str, Tensor]]:
    """What each text of a probe is called, and its token ids (N,); without texts, repeated random tokens."""
    if texts is None:
        size = vocabulary_size(model)
        drawn = [
            (f"random tokens, seed {seed}", repeated(size, length=length, batch=1, seed=seed)[0]) for seed in seeds
        ]
        if not drawn:
            raise bad_value("seeds", expected="one at least", received="none")
        return drawn
    if isinstance(texts, (str, Tensor)) or not len(texts):
        raise bad_type("texts", expected="a list of texts or of token ids (N,)", received=type(texts).__name__)
    rows: list[tuple[str, Tensor]] = []
    for i, text in enumerate(texts):
        if isinstance(text, str):
            found = tokenizer_of(model, tokenizer)
            if found is None:
                raise bad_value("tokenizer", expected="one, for the model has none of its own", received="none")
            text = torch.tensor(special_prefix(found) + token_ids(found, text), device="cpu")
        if not isinstance(text, Tensor) or text.dim() != 1 or text.is_floating_point():
            raise bad_type(f"texts[{i}]", expected="a text or token ids (N,)", received=type(text).__name__)
        rows.append((f"texts[{i}]", text))
    return rows
