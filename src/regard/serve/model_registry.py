"""The models that may be asked for. They are named when the server begins, and loaded when they are first used."""

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

__all__ = ["DEFAULT", "Offer", "Shelf"]

DEFAULT = tuple(library.EMBEDDED)


@dataclass(frozen=True)
class Offer:
    """A model by the name that it is asked for: where it is, or the model itself."""

    name: str
    kind: str  # "encoder", "decoder" or "encoder and decoder"
    source: str | PathLike[str] | None = None
    model: nn.Module | None = None
    tokenizer: Any = None


class Shelf:
    """Models by name; at most `keep` of those that it loaded stay in memory. One thread takes from it."""

    def __init__(self, models: Iterable[str] | Mapping[str, Any], keep: int = 2) -> None:
        self.offers = {offer.name: offer for offer in _offers(models)}
        self.keep = keep
        self.loaded: OrderedDict[str, nn.Module] = OrderedDict()

    @property
    def kinds(self) -> dict[str, str]:
        """What may be asked for, and what each is."""
        return {offer.name: offer.kind for offer in self.offers.values()}

    def ready(self, name: str) -> bool:
        """Whether a model is in memory."""
        return self.offers[name].model is not None or name in self.loaded

    def take(self, name: str, progress: Callable[[float], None]) -> tuple[nn.Module, Any]:
        """A model and its tokenizer (None where the model has its own)."""
        offer = self.offers[name]
        if offer.model is not None:
            return offer.model, offer.tokenizer
        if name not in self.loaded:
            self._make_room()
            assert offer.source is not None
            self.loaded[name] = library.load(offer.source, progress=lambda tensors: _told(list(tensors), progress))
        self.loaded.move_to_end(name)
        return self.loaded[name], None

    def _make_room(self) -> None:
        """Let go of what was not used for longest, before another is loaded."""
        while len(self.loaded) >= self.keep:
            self.loaded.popitem(last=False)
            gc.collect()


def _told(things: list[Any], progress: Callable[[float], None]) -> Iterator[Any]:
    for done, thing in enumerate(things):
        progress(done / len(things))
        yield thing


def _offers(models: Iterable[str] | Mapping[str, Any]) -> list[Offer]:
    if isinstance(models, (str, PathLike, nn.Module)):
        raise bad_type(
            "models",
            expected="several names, or a mapping of names to models",
            received=repr(models)[:80],
            remedy='models=["minilm"], or models={"mine": model}',
        )
    if isinstance(models, Mapping):
        made = [_offer(str(name), model) for name, model in models.items()]
    else:
        names = list(models)
        if tuple(names) == DEFAULT:  # nobody asked for one of them in particular
            names = [name for name in names if library.EMBEDDED[name].installed() is not None]
        made = [_offer(_name(one), one) for one in names]
    if not made:
        raise bad_value(
            "models",
            expected="at least one",
            received="none",
            remedy=" or ".join(model.install for model in library.EMBEDDED.values()),
        )
    twice = [offer.name for offer in made if sum(offer.name == other.name for other in made) > 1]
    if twice:
        raise bad_value(
            "models",
            expected="names that differ",
            received=f"{twice[0]!r} twice",
            remedy="a mapping of names to models",
        )
    return made


def _name(one: Any) -> str:
    """What a model is asked for by: a name as it is, of a path the last part."""
    if not isinstance(one, (str, PathLike)):
        raise bad_type(
            "models", expected="names or paths", received=type(one).__name__, remedy='a mapping, models={"mine": model}'
        )
    return one if isinstance(one, str) and one in library.EMBEDDED else Path(one).name or str(one)


def _offer(name: str, given: Any) -> Offer:
    if isinstance(given, (str, PathLike)):
        return Offer(name, library.source(given, check=False).config.kind, source=given)
    model, tokenizer = given if isinstance(given, tuple) and len(given) == 2 else (given, None)
    if not isinstance(model, nn.Module):
        raise bad_type(
            f"model {name!r}",
            expected="a name, a path, a model, or a pair (model, tokenizer)",
            received=type(given).__name__,
        )
    if tokenizer is None and getattr(model, "tokenizer", None) is None:
        raise bad_type(
            f"model {name!r}", expected="a tokenizer with it", received="none", remedy="a pair (model, tokenizer)"
        )
    return Offer(name, _kind(model), model=model, tokenizer=tokenizer)


def _kind(model: Any) -> str:
    config = getattr(model, "config", None)
    if isinstance(model, (library.Encoder, library.Decoder)):
        return model.config.kind
    if getattr(config, "is_encoder_decoder", False):
        return "encoder and decoder"
    writes = getattr(model, "can_generate", None)
    return "decoder" if callable(writes) and writes() else "encoder"
