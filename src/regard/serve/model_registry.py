"""The models that may be asked for. They are named when the server starts, and loaded when they are first used."""

from __future__ import annotations

import gc
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from torch import nn

from regard import models as library
from regard.errors import bad_type, bad_value

__all__ = ["DEFAULT", "ModelEntry", "ModelRegistry"]

DEFAULT = tuple(library.EMBEDDED)


@dataclass(frozen=True)
class ModelEntry:
    """A model by name: where it is, or the model itself."""

    name: str
    kind: str  # "encoder", "decoder" or "encoder and decoder"
    source: str | PathLike[str] | None = None
    model: nn.Module | None = None
    tokenizer: Any = None


class ModelRegistry:
    """Models by name; at most `keep` of those that it loaded stay in memory. Only one thread may call `get`."""

    def __init__(self, models: Iterable[str] | Mapping[str, Any], keep: int = 2) -> None:
        self.entries = {entry.name: entry for entry in _entries(models)}
        self.keep = keep
        self.loaded: OrderedDict[str, nn.Module] = OrderedDict()  # the last used at the end

    @property
    def kinds(self) -> dict[str, str]:
        """The kind of each model, by name."""
        return {entry.name: entry.kind for entry in self.entries.values()}

    @property
    def first(self) -> str:
        """The name of the first model."""
        return next(iter(self.entries))

    def is_loaded(self, name: str) -> bool:
        return self.entries[name].model is not None or name in self.loaded

    def get(self, name: str, progress: Callable[[float], None]) -> tuple[nn.Module, Any]:
        """A model and its tokenizer (None if the model has its own), loaded if it has to be."""
        entry = self.entries[name]
        if entry.model is not None:
            return entry.model, entry.tokenizer
        if name not in self.loaded:
            while len(self.loaded) >= self.keep:  # free memory before another model is loaded
                self.loaded.popitem(last=False)
                gc.collect()
            assert entry.source is not None
            self.loaded[name] = library.load(entry.source, progress=lambda tensors: _report(list(tensors), progress))
        self.loaded.move_to_end(name)
        return self.loaded[name], None


def _report(items: list[Any], progress: Callable[[float], None]) -> Iterator[Any]:
    for done, item in enumerate(items):
        progress(done / len(items))
        yield item


def _entries(models: Iterable[str] | Mapping[str, Any]) -> list[ModelEntry]:
    if isinstance(models, (str, PathLike, nn.Module)):
        raise bad_type(
            "models",
            expected="several names, or a mapping of names to models",
            received=repr(models)[:80],
            remedy='models=["minilm"], or models={"mine": model}',
        )
    if isinstance(models, Mapping):
        entries = [_entry(str(name), model) for name, model in models.items()]
    else:
        names = list(models)
        if tuple(names) == DEFAULT:  # by default, those that are installed
            names = [name for name in names if library.EMBEDDED[name].installed() is not None]
        entries = [_entry(_name(model), model) for model in names]
    if not entries:
        remedy = " or ".join(model.install for model in library.EMBEDDED.values())
        raise bad_value("models", expected="at least one", received="none", remedy=remedy)
    names = [entry.name for entry in entries]
    if twice := [name for name in names if names.count(name) > 1]:
        remedy = "a mapping of names to models"
        raise bad_value("models", expected="names that differ", received=f"{twice[0]!r} twice", remedy=remedy)
    return entries


def _name(model: Any) -> str:
    """The name of a model: of a path the last part."""
    if not isinstance(model, (str, PathLike)):
        remedy = 'a mapping, models={"mine": model}'
        raise bad_type("models", expected="names or paths", received=type(model).__name__, remedy=remedy)
    return model if isinstance(model, str) and model in library.EMBEDDED else Path(model).name or str(model)


def _entry(name: str, given: Any) -> ModelEntry:
    if isinstance(given, (str, PathLike)):
        return ModelEntry(name, library.source(given, check=False).config.kind, source=given)
    model, tokenizer = given if isinstance(given, tuple) and len(given) == 2 else (given, None)
    if not isinstance(model, nn.Module):
        expected = "a name, a path, a model, or a pair (model, tokenizer)"
        raise bad_type(f"model {name!r}", expected=expected, received=type(given).__name__)
    if tokenizer is None and getattr(model, "tokenizer", None) is None:
        remedy = "a pair (model, tokenizer)"
        raise bad_type(f"model {name!r}", expected="a tokenizer with it", received="none", remedy=remedy)
    return ModelEntry(name, _kind(model), model=model, tokenizer=tokenizer)


def _kind(model: Any) -> str:
    if isinstance(model, (library.Encoder, library.Decoder)):
        return model.config.kind
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return "encoder and decoder"
    can_generate = getattr(model, "can_generate", None)
    return "decoder" if callable(can_generate) and can_generate() else "encoder"
