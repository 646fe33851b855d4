"""Save and load a record: one safetensors file, whose metadata describes the tensors (docs/records.md).

Kept q and k are not written: they are as large as the model's cache. Everything read is checked against the format
before it is used: a file is a complete record, or it is refused with a message that says what is wrong.

Letters: B batch, H query heads, N queries, M keys.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from os import PathLike
from reprlib import repr as short
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from regard import measures
from regard.errors import bad_type, bad_value, missing_extra
from regard.measures import Links, Measure, Measurements, Offsets, PerKey, PerQuery, Tokens, TopLinks
from regard.models.fields import LAYERS, WIDTH, flag, integer, number, several, word
from regard.models.files import open_safetensors, parse_json

if TYPE_CHECKING:
    from regard.heads.record.record import LayerRecord, Record

__all__ = ["load", "save"]

VERSION = 1


def save(record: Record, path: str | PathLike[str]) -> None:
    """Write a record to a file."""
    from regard.heads.analysis.roles import Shared, evidence_of_layer, tokens_of

    try:
        import safetensors.torch
    except ImportError:
        raise missing_extra("safetensors", "models") from None
    tensors: dict[str, Tensor] = {}
    layers, words, shared = [], tokens_of(record, record.tokens), Shared()
    for i, layer in enumerate(record):
        layers.append(_described(layer))
        evidence = evidence_of_layer(record, layer, words[layer.name], shared)
        for name, tensor in (_tensors(layer) | ({} if evidence is None else evidence.tensors())).items():
            tensors[f"{i}/{name}"] = tensor.detach().cpu().contiguous().clone()
    about = {"version": VERSION, "layers": layers}
    if record.unseen:
        about["unseen"] = record.unseen
    if record.tokens is not None:
        about |= {"tokens": record.tokens, "pair": isinstance(record.tokens, tuple)}
    if record.source_layers:
        about["source_layers"] = list(record.source_layers)
    safetensors.torch.save_file(tensors, str(path), metadata={"regard.record": json.dumps(about)})


def load(path: str | PathLike[str]) -> Record:
    """Read a record that `save` wrote: its measures, table and roles are there; `weights` are not.

    Raises:
        ValueError: if the file is not a complete record, with the path and what is wrong.
    """
    from regard.heads.record.record import Record

    what = "a file that a record's `save` wrote"
    with open_safetensors(path, what) as file:
        metadata = (file.metadata() or {}).get("regard.record")
        if metadata is None:
            raise bad_value(str(path), expected=what, received="another safetensors file")
        about = parse_json(metadata, path, what)
        try:
            _check_version(about)
            stored = _tensors_of(file)
            layers = _objects("layers", about.get("layers"), most=LAYERS)
            record = Record()
            for i, description in enumerate(layers):
                layer = _layer(f"layers[{i}]", description, stored.pop(str(i), {}))
                if layer.name in record.by_name:
                    raise bad_value(f"layers[{i}].name", expected="names that differ", received=short(layer.name))
                record.by_name[layer.name] = layer
            if stored:
                raise bad_value("tensors", expected=f"those of {len(layers)} layers", received=short(min(stored)))
            unseen = about.get("unseen", {})
            if not isinstance(unseen, dict):
                raise bad_type("unseen", expected="an object", received=short(unseen))
            record.unseen = {name: word(f"unseen[{short(name)}]", why) for name, why in unseen.items()}
            source = about.get("source_layers", [])
            if not isinstance(source, list):
                raise bad_type("source_layers", expected="a list of names", received=short(source))
            record.source_layers = tuple(word("source_layers", name) for name in source)
            record.tokens = _tokens(about.get("tokens"), flag("pair", about.get("pair", False)))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}: {error}") from error
    return record


def _check_version(about: Any) -> None:
    if not isinstance(about, dict):
        raise bad_type("regard.record", expected="an object", received=short(about))
    if type(about.get("version")) is not int or about["version"] != VERSION:
        raise bad_value("version", expected=f"version {VERSION} of the format", received=short(about.get("version")))


def _objects(what: str, value: Any, most: int) -> list[dict[str, Any]]:
    """A list of objects."""
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise bad_type(what, expected="a list of objects", received=short(value))
    if len(value) > most:
        raise bad_value(what, expected=f"at most {most}", received=len(value))
    return value


def _tokens(value: Any, pair: bool) -> Any:
    """A list of tokens, a list for each text of a batch, or a pair of those (source, target)."""

    def nested(value: Any, depth: int) -> Any:
        if isinstance(value, list) and depth:
            return [nested(item, depth - 1) for item in value]
        if isinstance(value, (str, int, type(None))):
            return value
        raise bad_type("tokens", expected="tokens in a list, or in a list for each text", received=short(value))

    if value is None:
        return None
    if not isinstance(value, list) or (pair and len(value) != 2):
        raise bad_type("tokens", expected="two lists, for they are a pair" if pair else "a list", received=short(value))
    tokens = nested(value, 3 if pair else 2)
    return tuple(tokens) if pair else tokens


class _Stored(NamedTuple):
    """A tensor of the file, not read yet."""

    file: Any
    name: str
    shape: tuple[int, ...]
    dtype: str

    def read(self, shape: tuple[int | None, ...], kinds: tuple[str, ...], more: bool = False) -> Tensor:
        """The tensor, if its shape and dtype are these (None: any size; `more`: further axes may follow)."""
        fits = len(self.shape) == len(shape) or (more and len(self.shape) > len(shape))
        fits = fits and all(want in (None, size) for want, size in zip(shape, self.shape, strict=False))
        if not fits or self.dtype not in kinds:
            sizes = ", ".join("any" if size is None else str(size) for size in shape) + (", ..." if more else "")
            raise bad_value(
                self.name, expected=f"({sizes}) of {' or '.join(kinds)}", received=f"{self.shape} of {self.dtype}"
            )
        mapped = self.file.get_tensor(self.name)  # memory-mapped: it would change with the file
        return mapped.view(torch.uint8) != 0 if self.dtype == "BOOL" else mapped.clone()


_FLOATS, _INTEGERS, _FLAGS = ("F32", "F64", "F16", "BF16"), ("I64", "I32"), ("BOOL",)
_AXES = ("query", "choice", "key", "mean", "sum", "map")  # (see `measures.Measure`)


def _tensors_of(file: Any) -> dict[str, dict[str, _Stored]]:
    """The tensors of each layer, by the layer's number and the rest of the name."""
    tensors: dict[str, dict[str, _Stored]] = {}
    for name in file.keys():  # noqa: SIM118 (it is no mapping)
        header = file.get_slice(name)
        layer, _, rest = name.partition("/")
        tensors.setdefault(layer, {})[rest] = _Stored(file, name, tuple(header.get_shape()), str(header.get_dtype()))
    return tensors


def _described(layer: LayerRecord) -> dict[str, Any]:
    """A layer in the metadata."""
    taken = [
        {
            "measure": type(measure).__name__ if type(measure) is _OWN.get(type(measure).__name__) else "",
            "gives": measure.gives,
            "options": {k: v for k, v in vars(measure).items() if isinstance(v, (int, float, str))},
            **({"names": list(measure.names)} if isinstance(measure, Tokens) else {}),
        }
        for measure in layer.measures
    ]
    description = {"name": layer.name, "kind": layer.kind, "texts": layer.texts, "measures": taken}
    sizes = {"batch": layer.batch_size, "heads": layer.heads, "queries": layer.num_queries, "keys": layer.num_keys}
    uniform = {} if layer.uniform is None else {"uniform": _described(layer.uniform)}
    return description | sizes | ({"signed": True} if layer.signed else {}) | uniform


def _tensors(layer: LayerRecord) -> dict[str, Tensor]:
    """`last/...` of the last text, `sum/...` and `count/...` of those before it, `uniform/...` of the baseline."""
    tensors: dict[str, Tensor] = {}
    for name, value in layer.last().items():
        if isinstance(value, TopLinks):
            tensors |= {f"last/{name}.keys": value.keys, f"last/{name}.weights": value.weights}
        else:
            tensors[f"last/{name}"] = value
    tensors["seen"] = layer.last_seen()
    for name, padding in (("padding", layer.last_padding()), ("key_padding", layer.key_padding)):
        if padding is not None:
            tensors[name] = padding
    tensors |= {f"counted/{name}": counted for name, counted in layer.last_counted().items()}
    tensors |= {f"sum/{name}": total for name, total in layer.sums.items()}
    tensors |= {f"count/{name}": torch.as_tensor(count) for name, count in layer.counts_of_sums.items()}
    if layer.uniform is not None:
        tensors |= {f"uniform/{name}": tensor for name, tensor in _tensors(layer.uniform).items()}
    return tensors


class _Sizes(NamedTuple):
    """The sizes of a layer's last text."""

    batch: int
    heads: int
    queries: int
    keys: int

    @property
    def per_query(self) -> tuple[int, int, int]:
        """(B, H, N)"""
        return self.batch, self.heads, self.queries


def _layer(
    what: str, description: dict[str, Any], stored: dict[str, _Stored], *, is_baseline: bool = False
) -> LayerRecord:
    """One layer, or its baseline."""
    from regard.heads.record.layer_record import LayerRecord

    kind = word(f"{what}.kind", description.get("kind"))
    if kind not in ("self", "cross"):
        raise bad_value(f"{what}.kind", expected="self or cross", received=short(kind))
    measures = _measures(f"{what}.measures", description.get("measures"))
    layer = LayerRecord(word(f"{what}.name", description.get("name")), kind, measures)  # type: ignore[arg-type]
    layer.texts = integer(f"{what}.texts", description.get("texts"))
    sizes = _Sizes(
        *(integer(f"{what}.{size}", description.get(size)) for size in ("batch", "heads", "queries")),
        keys=integer(f"{what}.keys", description.get("keys"), least=0, most=WIDTH),
    )
    if is_baseline and sizes.heads != 1:
        raise bad_value(f"{what}.heads", expected="1, for it is one head whose weights are equal", received=sizes.heads)
    _read_last_text(what, layer, sizes, stored)
    if description.get("signed", False) not in (False, True):
        raise bad_type(f"{what}.signed", expected="true or false", received=short(description["signed"]))
    layer.text.pieces[0].signed = bool(description.get("signed", False))  # type: ignore[union-attr]
    _read_sums(what, layer, sizes.heads, stored)
    layer.evidence = _evidence(what, sizes.heads, stored)
    below = _take(stored, "uniform/")
    if "uniform" in description and not is_baseline:
        if not isinstance(description["uniform"], dict):
            raise bad_type(f"{what}.uniform", expected="an object", received=short(description["uniform"]))
        layer.uniform = _layer(f"{what}.uniform", description["uniform"], below, is_baseline=True)
    elif below or "uniform" in description:
        raise bad_value(what, expected="one baseline, described and with its tensors", received="another")
    if stored:
        raise bad_value(what, expected="tensors that the format knows", received=short(min(stored)))
    return layer


def _take(stored: dict[str, _Stored], prefix: str) -> dict[str, _Stored]:
    """The tensors whose names begin with a prefix, taken out of `stored`, by the rest of their names."""
    return {name.removeprefix(prefix): stored.pop(name) for name in list(stored) if name.startswith(prefix)}


def _read_last_text(what: str, layer: LayerRecord, sizes: _Sizes, stored: dict[str, _Stored]) -> None:
    """Set the layer's last text, as one chunk."""
    from regard.heads.record.sequences import Chunk, SequenceRecord

    if "seen" not in stored:
        raise bad_value(what, expected="the tensor 'seen'", received="none")
    seen = stored.pop("seen").read(sizes.per_query, _FLAGS)  # so large is what follows at most: it is in the file
    padding = key_padding = None
    if "padding" in stored:
        padding = stored.pop("padding").read((sizes.batch, 1, sizes.queries), _FLAGS)
    if "key_padding" in stored:
        key_padding = stored.pop("key_padding").read((sizes.batch, sizes.keys), _FLAGS)
    last = _take(stored, "last/")
    values: dict[str, Any] = {}
    for measure in layer.measures:
        for name, axis in measure.gives.items():
            value = _value(measure, name, axis, last, sizes)
            if value is not None:
                values[name] = value
    counted = {name: tensor.read(sizes.per_query, _FLAGS) for name, tensor in _take(stored, "counted/").items()}
    if unknown := sorted({*last, *(counted.keys() - values.keys())}):
        names = short([name for measure in layer.measures for name in measure.gives])
        raise bad_value(what, expected=f"what was measured: {names}", received=short(unknown[0]))
    layer.text = SequenceRecord((sizes.batch, sizes.heads), total=sizes.keys, key_padding=key_padding)
    measurements = Measurements(values, seen, counted)
    layer.text.pieces.append(Chunk(sizes.queries, [slice(0, sizes.keys)], measurements, padding))


def _evidence(what: str, heads: int, stored: dict[str, _Stored]) -> Any:
    """What roles are decided by; None if the file has nothing of it."""
    from regard.heads.analysis.evidence import Evidence

    found = _take(stored, "evidence/")
    if not found:
        return None
    rows = {"resting": 5, "output": 2}
    tensors = {name: tensor.read((rows.get(name, 4), heads), _FLOATS) for name, tensor in found.items()}
    if not rows.keys() <= tensors.keys():
        raise bad_value(what, expected="evidence/resting and evidence/output", received=short(sorted(tensors)))
    return Evidence(
        {name.removeprefix("role."): x for name, x in tensors.items() if name not in rows},
        tensors["resting"],
        tensors["output"],
    )


def _read_sums(what: str, layer: LayerRecord, heads: int, stored: dict[str, _Stored]) -> None:
    """Set the layer's sums over the texts before the last one, and their counts."""
    sums, counts = _take(stored, "sum/"), _take(stored, "count/")
    if (layer.texts > 1) != bool(counts) or (counts and counts.keys() - {""} != sums.keys()) or (sums and not counts):
        raise bad_value(
            what,
            expected=f"a sum and a count of each measure, for there were {layer.texts} texts",
            received=f"sums {short(sorted(sums))}, counts {short(sorted(counts))}",
        )
    values = layer.text.pieces[0].found.values  # type: ignore[union-attr]
    layer.sums = {name: _sum(tensor, name, layer, values) for name, tensor in sums.items()}
    read = {name: (tensor.read((heads,), _INTEGERS), tensor.name) for name, tensor in counts.items()}
    layer.counts_of_sums = {name: _not_negative(count, path) for name, (count, path) in read.items()}


def _value(measure: Measure, name: str, axis: str, last: dict[str, _Stored], sizes: _Sizes) -> Any:
    """What a measure gave for the last text, taken out of `last`; None if it gave nothing."""
    if isinstance(measure, Links) or f"{name}.keys" in last:
        keys, weights = (last.pop(f"{name}.{field}", None) for field in ("keys", "weights"))
        if keys is None and weights is None:
            return None
        if keys is None or weights is None or keys.shape != weights.shape:
            raise bad_value(f"last/{name}", expected="keys and weights of one shape", received="others")
        indices = keys.read((*sizes.per_query, None), _INTEGERS)
        return TopLinks(_key_indices(indices, sizes.keys, keys.name), weights.read((*sizes.per_query, None), _FLOATS))
    if name not in last:
        return None
    tensor = last.pop(name)
    if axis == "choice":
        return _key_indices(tensor.read(sizes.per_query, _INTEGERS), sizes.keys, tensor.name)
    if axis == "query":
        shape = (*sizes.per_query, len(measure.names)) if isinstance(measure, Tokens) else sizes.per_query
        return tensor.read(shape, _FLOATS, more=isinstance(measure, Stored))
    if axis == "key":
        return tensor.read((sizes.batch, sizes.heads, sizes.keys), _FLOATS)
    if isinstance(measure, Offsets):
        return tensor.read((sizes.batch, sizes.heads, measure.before + 1 + measure.after), _FLOATS)
    return tensor.read((sizes.batch, sizes.heads), _FLOATS, more=True)


def _key_indices(indices: Tensor, keys: int, name: str) -> Tensor:
    """Indices of keys, or -1 for none, checked."""
    if indices.numel() and not (int(indices.min()) >= -1 and int(indices.max()) < keys):
        raise bad_value(name, expected=f"numbers of keys, from -1 to {keys - 1}", received="others")
    return indices


def _not_negative(count: Tensor, name: str) -> Tensor:
    if int(count.min()) < 0:
        raise bad_value(name, expected="counts from 0 on", received=int(count.min()))
    return count


def _sum(tensor: _Stored, name: str, layer: LayerRecord, values: Mapping[str, Any]) -> Tensor:
    """A sum over texts, of the shape (H, ...) of one text's. Along keys and maps the sizes may differ."""
    axis, value = layer.axes.get(name), values.get(name)
    if axis in (None, "choice") or not isinstance(value, Tensor):
        raise bad_value(tensor.name, expected="a sum of something that was measured", received=short(name))
    of_last = tuple(value.shape[1:2] + value.shape[3 if axis == "query" else 2 :])
    shape = (of_last[0], *[None] * (len(of_last) - 1)) if axis in ("key", "map") else of_last
    if not math.prod(tensor.shape) and tensor.shape != of_last:
        raise bad_value(tensor.name, expected=f"{of_last}, or more", received=tensor.shape)
    return tensor.read(shape, _FLOATS)


class Stored(Measure):
    """A measure that is not one of regard's: its results are known, not how they are computed."""

    def __init__(self, gives: dict[str, str]) -> None:
        self.gives = gives  # type: ignore[misc]


_OWN = {
    name: kind
    for name in measures.__all__
    if isinstance(kind := getattr(measures, name), type) and issubclass(kind, Measure)
    if kind not in (Measure, PerQuery, PerKey)
}


def _measures(what: str, value: Any) -> list[Measure]:
    """The measures of a layer, whose results have different names."""
    measures = [_measure(f"{what}[{i}]", item) for i, item in enumerate(_objects(what, value, most=1000))]
    names = [name for measure in measures for name in measure.gives]
    if len(set(names)) < len(names):
        raise bad_value(what, expected="one of each name", received=short(names))
    return measures


def _measure(what: str, description: dict[str, Any]) -> Measure:
    gives, options = description.get("gives"), description.get("options", {})
    if not isinstance(gives, dict) or not gives or not all(axis in _AXES for axis in gives.values()):
        raise bad_type(f"{what}.gives", expected=f"names, each with one of {', '.join(_AXES)}", received=short(gives))
    name = word(f"{what}.measure", description.get("measure"))
    if not name:
        return Stored(gives)
    if name not in _OWN or _OWN[name].gives != gives:
        raise bad_value(
            f"{what}.measure",
            expected="a class of regard.measures, and what it gives",
            received=f"{short(name)}, which gives {short(gives)}",
        )
    if _OWN[name] is Tokens:
        names = several(f"{what}.names", description.get("names"), word)
        if not names or len(set(names)) < len(names):
            raise bad_value(f"{what}.names", expected="names that differ", received=short(names))
        return Tokens({name: [0] for name in names})
    if not isinstance(options, dict):
        raise bad_type(f"{what}.options", expected="an object", received=short(options))
    for option, value in options.items():
        if not isinstance(value, (str, bool)):
            number(f"{what}.options.{option}", value)
    try:
        return _OWN[name](**options)
    except TypeError as error:
        raise bad_type(f"{what}.options", expected=f"those of {name}", received=f"{short(options)} ({error})") from None
