"""The effect of heads on a text model: how much the loss of a text rises without them, or its embedding moves.

Letters: B batch, N tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from regard import models
from regard.errors import bad_value
from regard.heads.interventions.ablate import ablate
from regard.heads.interventions.head_choice import Heads
from regard.heads.interventions.importance import Importance, importance, leave_one_out
from regard.models.base import TextModel

__all__ = ["effect", "effects", "loss_of"]


def loss_of(model: TextModel, texts: Sequence[str]) -> Callable[[TextModel, int], Tensor]:
    """A function of (model, i), the loss of text `i`, for `importance` and `leave_one_out`: for a decoder the mean
    cross entropy of the next token in nats; for an encoder 1 - cosine between the text's embedding and the intact
    model's."""
    ids = [model.encode(text)[:, : _context(model)] for text in texts]  # (1, N) each
    if isinstance(model, models.Decoder):
        if any(x.shape[1] < 2 for x in ids):
            raise bad_value("texts", expected="two tokens at least, for the second to be foreseen", received="fewer")

        def next_token(model: TextModel, i: int) -> Tensor:
            logits = model(ids[i])[0]
            return F.cross_entropy(logits[:-1].float(), ids[i][0, 1:])[None]

        return next_token
    with torch.no_grad():
        intact = [model(x).mean(1) for x in ids]

    def moved(model: TextModel, i: int) -> Tensor:
        return 1 - F.cosine_similarity(model(ids[i]).mean(1), intact[i])

    return moved


def effect(model: TextModel, texts: Sequence[str], heads: Heads, mode: Any = "zero") -> tuple[float, float]:
    """The mean loss over some texts, with all heads and without some of them."""
    loss = loss_of(model, texts)
    with torch.no_grad():
        intact = sum(loss(model, i).item() for i in range(len(texts))) / len(texts)
        with ablate(model, heads, mode=mode):
            without = sum(loss(model, i).item() for i in range(len(texts))) / len(texts)
    return intact, without


def effects(model: TextModel, texts: Sequence[str], *, quick: bool = False, progress: bool = True) -> Importance:
    """How much each head matters to some texts: the rise of the loss without it, one head after another; or, if `quick`
    and the model is a decoder, by gradients in one pass over the texts (Michel et al. 2019, not normalised)."""
    loss, numbers = loss_of(model, texts), range(len(texts))
    if quick and isinstance(model, models.Decoder):
        return importance(model, loss, numbers, normalize=False, progress=progress)  # type: ignore[arg-type]
    return leave_one_out(model, loss, numbers, progress=progress)  # type: ignore[arg-type]


def _context(model: TextModel) -> int:
    return model.config.context or 10**9
