"""Save and load a pruned model: its weights, and which heads were removed."""

from __future__ import annotations

import json
from os import PathLike
from reprlib import repr as short
from typing import Any

from regard import models
from regard.errors import bad_type, bad_value, missing_extra
from regard.heads.interventions.head_choice import Heads, by_layer, head_numbers
from regard.heads.interventions.prune.edit import prune
from regard.models.base import TextModel
from regard.models.fields import LAYERS, WIDTH, integer, several, word
from regard.models.files import damaged, open_safetensors, parse_json

__all__ = ["load_pruned", "save_pruned"]


def save_pruned(model: TextModel, heads: Heads, path: str | PathLike[str]) -> None:
    """Write a model of `models.load` from which `heads` were pruned: its weights, and what `load_pruned` needs."""
    try:
        from safetensors.torch import save_model
    except ImportError:
        raise missing_extra("safetensors", "models") from None
    removed = [[layer, head_numbers(str(layer), numbers)] for layer, numbers in by_layer(heads).items()]
    metadata = json.dumps({"model": model.name, "heads": removed})
    save_model(model, str(path), metadata={"regard.pruned": metadata})


def load_pruned(path: str | PathLike[str], model: TextModel | str | PathLike[str] | None = None) -> TextModel:
    """Read a model that `save_pruned` wrote.

    Args:
        path: the file.
        model: the unpruned model, or where it is, as `models.load` takes it. It is pruned in the same way, and filled
            with the weights of the file. By default the embedded model that the file names; no other name in the file
            is opened.

    Raises:
        ValueError: if `save_pruned` did not write the file, or it does not fit the model.
    """
    try:
        from safetensors.torch import load_model
    except ImportError:
        raise missing_extra("safetensors", "models") from None
    what = "a file that `save_pruned` wrote"
    with open_safetensors(path, what) as file:
        metadata = (file.metadata() or {}).get("regard.pruned")
    if metadata is None:
        raise bad_value(str(path), expected=what, received="another safetensors file")
    name, heads = _checked(parse_json(metadata, path, what), path)
    if model is None:
        if name not in models.EMBEDDED:
            raise bad_value(
                f"{path}: model",
                expected=f"one of {', '.join(models.EMBEDDED)}",
                received=short(name),
                remedy="say which model it was made of: load_pruned(path, model)",
            )
        model = name
    if not isinstance(model, TextModel):
        model = models.load(model)
    assert isinstance(model, TextModel)
    pruned = prune(model, heads)
    try:
        load_model(pruned, str(path))
    except RuntimeError as error:
        raise damaged(path, error, what=f"the weights of {model.name or 'the model'} without those heads") from error
    return pruned


def _checked(metadata: Any, path: str | PathLike[str]) -> tuple[str, dict[str | int, list[int]]]:
    """The name of the model, and the removed heads by layer."""
    try:
        if not isinstance(metadata, dict):
            raise bad_type("regard.pruned", expected="an object", received=short(metadata))
        pairs = several("heads", metadata.get("heads"), lambda what, pair: several(what, pair, _as_it_is, count=2))
        heads = {_layer("heads", layer): [*several("heads", numbers, _head)] for layer, numbers in pairs}
        if len(heads) != len(pairs):
            raise bad_value("heads", expected="each layer once", received=short(metadata["heads"]))
        return word("model", metadata.get("model")), heads
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error


def _as_it_is(what: str, value: Any) -> Any:
    return value


def _layer(what: str, value: Any) -> str | int:
    """A layer by its name or its number."""
    return value if isinstance(value, str) else integer(what, value, least=-LAYERS, most=LAYERS)


def _head(what: str, value: Any) -> int:
    return integer(what, value, least=0, most=WIDTH)
