"""A record in a file: one safetensors file, which says in its metadata what the tensors are (docs/records.md).

What was kept of q and k is not written: it is as large as the model's own cache.
"""

from __future__ import annotations

import json
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from regard import measures
from regard.errors import bad_value, missing_extra
from regard.measures import Measure, Measurements, Tokens, TopLinks

if TYPE_CHECKING:
    from regard.heads.record import Layer, Record

__all__ = ["load", "save"]

VERSION = 1


def save(record: Record, path: str | PathLike[str]) -> None:
    """Write a record to a file."""
    write = _safetensors("save_file")
    tensors: dict[str, Tensor] = {}
    layers = []
    for number, layer in enumerate(record):
        layers.append(_described(layer))
        for name, tensor in _tensors(layer).items():
            tensors[f"{number}/{name}"] = tensor.detach().cpu().contiguous().clone()
    about = {"version": VERSION, "layers": layers}
    if record.unseen:
        about["unseen"] = record.unseen
    if record.tokens is not None:
        about |= {"tokens": record.tokens, "pair": isinstance(record.tokens, tuple)}
    write(tensors, str(path), metadata={"regard.record": json.dumps(about)})


def load(path: str | PathLike[str]) -> Record:
    """Read a record that `save` wrote: its measures, table and roles are there; `weights` are not."""
    from regard.heads.record import Record

    try:
        opened = _safetensors("safe_open")(str(path), framework="pt")
    except _safetensors("SafetensorError") as error:
        raise bad_value("path", expected="a file that a record's `save` wrote", received=f"{path} ({error})") from None
    with opened as file:
        said = (file.metadata() or {}).get("regard.record")
        if said is None:
            raise bad_value("path", expected="a file that a record's `save` wrote", received=str(path))
        about = json.loads(said)
        if about.get("version") != VERSION:
            raise bad_value("path", expected=f"version {VERSION} of the format", received=about.get("version"))
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no mapping)
    record = Record()
    for number, layer in enumerate(about["layers"]):
        own = {name.partition("/")[2]: x for name, x in tensors.items() if name.partition("/")[0] == str(number)}
        record.by_name[layer["name"]] = _layer(layer, own)
    record.unseen = dict(about.get("unseen", {}))
    record.tokens = tuple(about["tokens"]) if about.get("pair") else about.get("tokens")
    return record


def _safetensors(name: str) -> Any:
    try:
        import safetensors
        import safetensors.torch
    except ImportError:
        raise missing_extra("safetensors", "models") from None
    return getattr(safetensors.torch, name, None) or getattr(safetensors, name)


def _described(layer: Layer) -> dict[str, Any]:
    made = [
        {
            "measure": type(one).__name__ if type(one) is getattr(measures, type(one).__name__, None) else "",
            "gives": one.gives,
            "options": {k: v for k, v in vars(one).items() if isinstance(v, (int, float, str))},
            **({"names": list(one.names)} if isinstance(one, Tokens) else {}),
        }
        for one in layer.measures
    ]
    assert layer.text is not None
    said = {"name": layer.name, "kind": layer.kind, "texts": layer.texts, "measures": made}
    said |= {
        "batch": layer.text.shape[0],
        "heads": layer.heads,
        "queries": layer.text.queries,
        "keys": layer.text.total,
    }
    return said | ({"uniform": _described(layer.uniform)} if layer.uniform is not None else {})


def _tensors(layer: Layer) -> dict[str, Tensor]:
    """`last/...` of the last text, `sum/...` and `count/...` of those before it, `uniform/...` of the baseline."""
    found: dict[str, Tensor] = {}
    for name, value in layer.last().items():
        if isinstance(value, TopLinks):
            found |= {f"last/{name}.keys": value.keys, f"last/{name}.weights": value.weights}
        else:
            found[f"last/{name}"] = value
    found["seen"] = layer.last_seen()
    padding = layer.last_padding()
    if padding is not None:
        found["padding"] = padding
    if layer.text is not None and layer.text.key_padding is not None:
        found["key_padding"] = layer.text.key_padding
    found |= {f"counted/{name}": counted for name, counted in layer.last_counted().items()}
    found |= {f"sum/{name}": total for name, total in layer.sums.items()}
    found |= {f"count/{name}": torch.as_tensor(count) for name, count in layer.before.items()}
    if layer.uniform is not None:
        found |= {f"uniform/{name}": tensor for name, tensor in _tensors(layer.uniform).items()}
    return found


def _layer(said: dict[str, Any], tensors: dict[str, Tensor]) -> Layer:
    from regard.heads.record import Layer
    from regard.heads.texts import Piece, Text

    def under(folder: str) -> dict[str, Tensor]:
        return {name.removeprefix(folder): x for name, x in tensors.items() if name.startswith(folder)}

    layer = Layer(said["name"], said["kind"], [_measure(one) for one in said["measures"]])
    values: dict[str, Any] = under("last/")
    if "links.keys" in values:
        values["links"] = TopLinks(values.pop("links.keys"), values.pop("links.weights"))
    values = {name: values[name] for name in layer.axes if name in values}  # (a file has an order of its own)
    seen = tensors["seen"]
    found = Measurements(values, seen, under("counted/"))
    layer.text = Text((said["batch"], said["heads"]), total=said["keys"], key_padding=tensors.get("key_padding"))
    padding = tensors.get("padding")
    layer.text.pieces.append(Piece(said["queries"], [slice(0, said["keys"])], found, padding))
    layer.texts, layer.sums, layer.before = said["texts"], under("sum/"), under("count/")
    if "uniform" in said:
        layer.uniform = _layer(said["uniform"], under("uniform/"))
    return layer


class Stored(Measure):
    """A measure that is not among regard's own: what it gave is known, not how it was taken."""

    def __init__(self, gives: dict[str, str]) -> None:
        self.gives = gives  # type: ignore[misc]


def _measure(said: dict[str, Any]) -> Measure:
    kind = getattr(measures, said["measure"], None)
    if kind is Tokens:
        return Tokens({name: [0] for name in said["names"]})
    return Stored(said["gives"]) if kind is None else kind(**said["options"])
