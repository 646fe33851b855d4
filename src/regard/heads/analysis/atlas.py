"""An atlas: what each head of a model does, computed once over a treebank and probes, and kept in a small file.

The package has one for each packaged model (`regard.atlas("minilm")`); `heads.atlas(model, treebank)` makes one for any
other (`atlas_making.py`).
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from collections import Counter
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from torch import Tensor

from regard.errors import bad_type, bad_value
from regard.heads.analysis.roles import UNINFORMATIVE, Role
from regard.heads.record.table import Shown, Table
from regard.models.files import open_regular, parse_json

__all__ = ["Atlas", "Entry", "atlas", "of_model"]

VERSION = 1


@dataclass(frozen=True)
class Entry:
    """One thing that a head does.

    Attributes:
        role: as in `heads.ROLES`, or a relation of syntax, such as "determiner and noun".
        score, baseline: the share of what is left beside the resting place, and that of uniform attention; for syntax
            the accuracy, and that of the best fixed offset; for a probe its score, and that of uniform attention.
        low, high: the 95 % interval of the score.
        n: how many queries it is a mean over; for shares, the mass that was left.
        source: "treebank" (shares over sentences), "syntax" or "probe".
        clear: whether it meets its rule clearly, or only partly.
        relation, direction: of syntax, as the treebank calls them.
        shuffled: the same score of the best head of the model with shuffled weights.
    """

    role: str
    score: float
    baseline: float
    low: float
    high: float
    n: int
    source: str = "treebank"
    clear: bool = True
    relation: str = ""
    direction: str = ""
    shuffled: float | None = None


@dataclass
class Atlas(Shown):
    """What each head does. `atlas[layer, head]` are its entries, the most telling first; `print` shows a table.

    Attributes:
        model: the name of the model; `layers`: the names of its layers of self attention, in call order.
        entries: of each head of each layer; empty where there is evidence for nothing.
        rests: of each head the share of its mass on the resting place, its share of the output, and where it is.
        made: how it was made: the treebank, the number of sentences, versions, controls.
        weights: some of the model's weights, by which it is known again (`sample_of`).
    """

    model: str
    layers: list[str]
    entries: list[list[list[Entry]]]
    rests: list[list[tuple[float, float | None, str]]]
    made: dict[str, Any] = field(default_factory=dict)
    weights: list[list[float]] = field(default_factory=list)

    __repr__ = Shown.__repr__

    def __getitem__(self, which: tuple[int | str, int]) -> list[Entry]:
        layer, head = which
        number = self.layers.index(layer) if isinstance(layer, str) else layer
        return self.entries[number][head]

    @property
    def heads(self) -> int:
        """How many heads there are."""
        return sum(len(layer) for layer in self.entries)

    def informative(self) -> list[tuple[int, int]]:
        """The heads, as (layer, head), that do more than to rest or to attend to everything."""
        return [
            (i, j)
            for i, layer in enumerate(self.entries)
            for j, entries in enumerate(layer)
            if any(entry.role not in UNINFORMATIVE for entry in entries)
        ]

    def table(self) -> Table:
        """A row for each head that does something, by its first entry."""
        rows = []
        for i, layer in enumerate(self.entries):
            for j, entries in enumerate(layer):
                if entries:
                    first, (rests, _, where) = entries[0], self.rests[i][j]
                    row = {"layer": self.layers[i], "head": j, "role": first.role, "score": first.score}
                    row |= {"baseline": first.baseline, "low": first.low, "high": first.high, "from": first.source}
                    row |= {"rests": rests, "rests on": where, "also": ", ".join(e.role for e in entries[1:4])}
                    rows.append(row)
        return Table(rows, self.layers)

    def caption(self) -> str:
        """How many heads do something."""
        return f"{len(self.informative())} of {self.heads} heads do something beside resting and looking everywhere"

    def counts(self) -> Counter[str]:
        """How many heads have each role as their first."""
        return Counter(entries[0].role for layer in self.entries for entries in layer if entries)

    def __str__(self) -> str:
        return f"{self.table()}\n{self.caption()}"

    def applied(self, role: Role) -> Role:
        """What was found of a head in a text, with what is known of it: its role is that of the atlas, if there is one
        that says something."""
        layer = self.entries[self.layers.index(role.layer)] if role.layer in self.layers else []
        entries = layer[role.head] if role.head < len(layer) else []
        role.known = list(entries)
        if not entries or entries[0].role in UNINFORMATIVE:
            return role
        role.here = dataclasses.replace(role)
        first = entries[0]
        others = [name for name in (role.role, *role.also, *(e.role for e in entries[1:])) if name]
        role.also = [name for name in dict.fromkeys(others) if name != first.role]
        role.role, role.score, role.baseline, role.least = first.role, first.score, first.baseline, None
        role.low, role.high, role.clear, role.origin = first.low, first.high, first.clear, "atlas"
        return role

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to a JSON file, which `Atlas.load` reads."""
        heads = [
            [
                {"rests": [_short(rests), _short(output), where], "entries": [_described(entry) for entry in entries]}
                for entries, (rests, output, where) in zip(*of_layer, strict=True)
            ]
            for of_layer in zip(self.entries, self.rests, strict=True)
        ]
        about = {"version": VERSION, "model": self.model, "made": self.made, "layers": self.layers}
        lines = ",\n".join("[\n" + ",\n".join(json.dumps(head) for head in layer) + "\n]" for layer in heads)
        weights = json.dumps([[_short(x) for x in layer] for layer in self.weights])
        text = f'{json.dumps(about, indent=1)[:-2]},\n "weights": {weights},\n "heads": [\n{lines}\n]\n}}\n'
        Path(path).write_text(text, encoding="utf-8")

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Atlas:
        """Read an atlas that was saved.

        Raises:
            ValueError: if the file is no atlas, with the path and what is wrong.
        """
        with open_regular(path) as file:
            text = file.read()
        return _parsed(text.decode("utf-8", "replace"), os.fspath(path))


def _short(number: float | None) -> float | None:
    return None if number is None else round(number, 4)


def _described(entry: Entry) -> dict[str, Any]:
    """An entry as JSON, without what is as by default."""
    values = dataclasses.asdict(entry)
    defaults = {f.name: f.default for f in dataclasses.fields(entry)}
    return {
        name: _short(value) if isinstance(value, float) else value
        for name, value in values.items()
        if value != defaults[name]
    }


def _parsed(text: str, path: str) -> Atlas:
    about = parse_json(text, path, "an atlas that `save` wrote")
    try:
        if not isinstance(about, dict) or about.get("version") != VERSION:
            raise bad_value("version", expected=f"version {VERSION} of the format", received=f"{about!r:.40}")
        names, layers = about["layers"], about["heads"]
        if len(names) != len(layers):
            raise bad_value("heads", expected=f"those of {len(names)} layers", received=len(layers))
        entries = [[[Entry(**entry) for entry in head["entries"]] for head in layer] for layer in layers]
        rests = [[(float(a), b, str(c)) for a, b, c in (head["rests"] for head in layer)] for layer in layers]
        weights = [[float(x) for x in layer] for layer in about.get("weights", [])]
        return Atlas(str(about["model"]), list(names), entries, rests, dict(about["made"]), weights)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: expected an atlas that `save` wrote; received another file ({error})") from error


@functools.cache
def _packaged(name: str) -> Atlas | None:
    file = resources.files("regard.heads.analysis").joinpath("atlases", f"{name}.json")
    return _parsed(file.read_text(encoding="utf-8"), name) if file.is_file() else None


def atlas(name: str) -> Atlas:
    """The atlas of a packaged model, "minilm" or "smollm2": what every head of it does.

    >>> import regard
    >>> regard.atlas("minilm")[0, 2][0].role
    'previous'
    """
    if not isinstance(name, str):
        raise bad_type(
            "atlas",
            expected="the name of a packaged model",
            received=type(name).__name__,
            remedy="heads.atlas(model, treebank) makes one for any model",
        )
    found = _packaged(name) if name.isidentifier() else None
    if found is None:
        raise bad_value(
            "atlas",
            expected="minilm or smollm2",
            received=repr(name),
            remedy="heads.atlas(model, treebank) makes one for any model; Atlas.load(path) reads it",
        )
    return found


def of_model(model: Any) -> Atlas | None:
    """The atlas of the package for a model, if it is a packaged one with all its heads and the weights it came with."""
    name = getattr(model, "name", None)
    found = _packaged(name) if isinstance(name, str) and name.isidentifier() else None
    if found is None:
        return None
    blocks = getattr(model, "blocks", ())
    heads = [getattr(getattr(block, "attention", None), "num_heads", 0) for block in blocks]
    same = heads == [len(layer) for layer in found.entries] and _same_weights(sample_of(model), found.weights)
    return found if same else None


def sample_of(model: Any) -> list[list[float]]:
    """Some weights of each layer's query projection, for models of this package; none for others."""
    blocks = getattr(model, "blocks", ())
    weights = [getattr(getattr(getattr(block, "attention", None), "q_proj", None), "weight", None) for block in blocks]
    return [weight[0, :4].float().tolist() for weight in weights if isinstance(weight, Tensor) and weight.dim() == 2]


def _same_weights(sample: list[list[float]], known: list[list[float]]) -> bool:
    """Whether weights are the same, to the rounding of bfloat16 and of the file."""
    if len(sample) != len(known):
        return False
    pairs = (pair for layers in zip(sample, known, strict=True) for pair in zip(*layers, strict=True))
    return all(abs(a - b) <= 0.01 * abs(b) + 2e-4 for a, b in pairs)
