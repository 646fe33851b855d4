"""What a text model does without some heads: how much worse it foresees a text, or how far its embedding moves.

Letters: B batch, N tokens, V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from os import PathLike
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from regard import models
from regard.errors import bad_value, missing_extra
from regard.heads.ablate import ablate
from regard.heads.importance import Importance, importance, leave_one_out
from regard.heads.prune import prune
from regard.models.text import TextModel

__all__ = ["effect", "effects", "load_pruned", "loss_of", "save_pruned"]

Heads = Mapping[Any, Iterable[int]]  # layers by name or by number


def loss_of(model: TextModel, texts: Sequence[str]) -> Callable[[TextModel, int], Tensor]:
    """A loss of text `i`, for `importance` and `leave_one_out`: of a decoder the cross entropy of the next token in
    nats, a mean over the text; of an encoder 1 - cosine of the text's embedding and that of the intact model."""
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
        whole = sum(loss(model, i).item() for i in range(len(texts))) / len(texts)
        with ablate(model, heads, mode=mode):
            without = sum(loss(model, i).item() for i in range(len(texts))) / len(texts)
    return whole, without


def effects(model: TextModel, texts: Sequence[str], *, quick: bool = False, progress: bool = True) -> Importance:
    """How much each head matters to some texts: the loss without it, one head after another; or, where `quick` and the
    model is a decoder, by gradients in one pass over the texts (Michel et al. 2019, not normalised)."""
    loss, numbers = loss_of(model, texts), range(len(texts))
    if quick and isinstance(model, models.Decoder):
        return importance(model, loss, numbers, normalize=False, progress=progress)  # type: ignore[arg-type]
    return leave_one_out(model, loss, numbers, progress=progress)  # type: ignore[arg-type]


def save_pruned(model: TextModel, heads: Heads, path: str | PathLike[str]) -> None:
    """Write a model of `models.load` that was pruned of `heads`: its weights, and what `load_pruned` needs to know."""
    try:
        from safetensors.torch import save_model
    except ImportError:
        raise missing_extra("safetensors", "models") from None
    said = {"model": model.name, "heads": [[layer, list(several)] for layer, several in heads.items()]}
    save_model(model, str(path), metadata={"regard.pruned": json.dumps(said)})


def load_pruned(path: str | PathLike[str], model: TextModel | None = None) -> TextModel:
    """Read a model that `save_pruned` wrote: `model` (by default the one that it was made of, by its name) is pruned in
    the same way and filled with the weights of the file."""
    try:
        from safetensors import safe_open
        from safetensors.torch import load_model
    except ImportError:
        raise missing_extra("safetensors", "models") from None
    with safe_open(str(path), framework="pt") as file:
        said = (file.metadata() or {}).get("regard.pruned")
    if said is None:
        raise bad_value("path", expected="a file that `save_pruned` wrote", received=str(path))
    about = json.loads(said)
    whole = models.load(about["model"]) if model is None else model
    pruned = prune(whole, dict(about["heads"]))
    load_model(pruned, str(path))
    return pruned


def _context(model: TextModel) -> int:
    return model.config.context or 10**9
