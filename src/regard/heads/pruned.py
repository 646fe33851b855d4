"""A pruned model in a file: its weights, and what was removed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from os import PathLike
from typing import Any

from regard import models
from regard.errors import bad_value, missing_extra
from regard.heads.ablate import head_numbers
from regard.heads.prune import prune
from regard.models.text import TextModel

__all__ = ["load_pruned", "save_pruned"]


def save_pruned(model: TextModel, heads: Mapping[Any, Iterable[int]], path: str | PathLike[str]) -> None:
    """Write a model of `models.load` that was pruned of `heads`: its weights, and what `load_pruned` needs to know."""
    try:
        from safetensors.torch import save_model
    except ImportError:
        raise missing_extra("safetensors", "models") from None
    removed = [[layer, head_numbers(str(layer), several)] for layer, several in heads.items()]
    said = {"model": model.name, "heads": removed}
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
