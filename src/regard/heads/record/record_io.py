"""A record in a file: one safetensors file, which says in its metadata what the tensors are (docs/records.md).

What was kept of q and k is not written: it is as large as the model's own cache. What is read is compared with what the
format says before anything is made of it: a file is a whole record, or it is refused in words.

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
    try:
        import safetensors.torch
    except ImportError:
        raise missing_extra("safetensors", "models") from None
    tensors: dict[str, Tensor] = {}
    layers = []
    for i, layer in enumerate(record):
        layers.append(_described(layer))
        for name, tensor in _tensors(layer).items():
            tensors[f"{i}/{name}"] = tensor.detach().cpu().contiguous().clone()
    about = {"version": VERSION, "layers": layers}
    if record.unseen:
        about["unseen"] = record.unseen
    if record.tokens is not None:
        about |= {"tokens": record.tokens, "pair": isinstance(record.tokens, tuple)}
    safetensors.torch.save_file(tensors, str(path), metadata={"regard.record": json.dumps(about)})


def load(path: str | PathLike[str]) -> Record:
    """Read a record that `save` wrote: its measures, table and roles are there; `weights` are not.

    Raises:
        ValueError: where the file is not a whole record, with the path and what is wrong.
    """
    from regard.heads.record.record import Record

    what = "a file that a record's `save` wrote"
    with open_safetensors(path, what) as file:
        said = (file.metadata() or {}).get("regard.record")
        if said is None:
            raise bad_value(str(path), expected=what, received="another safetensors file")
        about = parse_json(said, path, what)
        try:
            _check_version(about)
            stored = _tensors_of(file)
            layers = _objects("layers", about.get("layers"), most=LAYERS)
            record = Record()
            for i, layer in enumerate(layers):
                made = _layer(f"layers[{i}]", layer, stored.pop(str(i), {}))
                if made.name in record.by_name:
                    raise bad_value(f"layers[{i}].name", expected="names that differ", received=short(made.name))
                record.by_name[made.name] = made
            if stored:
                raise bad_value("tensors", expected=f"those of {len(layers)} layers", received=short(min(stored)))
            unseen = about.get("unseen", {})
            if not isinstance(unseen, dict):
                raise bad_type("unseen", expected="an object", received=short(unseen))
            record.unseen = {name: word(f"unseen[{short(name)}]", why) for name, why in unseen.items()}
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
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        raise bad_type(what, expected="a list of objects", received=short(value))
    if len(value) > most:
        raise bad_value(what, expected=f"at most {most}", received=len(value))
    return value


def _tokens(said: Any, pair: bool) -> Any:
    """A list of tokens, one for each text of a batch, or a pair of those: of source and target."""

    def deep(what: str, value: Any, depth: int) -> Any:
        if isinstance(value, list) and depth:
            return [deep(what, one, depth - 1) for one in value]
        if isinstance(value, (str, int, type(None))):
            return value
        raise bad_type(what, expected="tokens in a list, or in a list for each text", received=short(value))

    if said is None:
        return None
    if not isinstance(said, list) or (pair and len(said) != 2):
        raise bad_type("tokens", expected="two lists, for they are a pair" if pair else "a list", received=short(said))
    made = deep("tokens", said, 3 if pair else 2)
    return tuple(made) if pair else made


class _Stored(NamedTuple):
    """A tensor of the file, not read yet."""

    file: Any
    name: str
    shape: tuple[int, ...]
    dtype: str

    def read(self, shape: tuple[int | None, ...], kinds: tuple[str, ...], more: bool = False) -> Tensor:
        """The numbers, where shape (None: any size; `more`: further axes may follow) and type are these."""
        fits = len(self.shape) == len(shape) or (more and len(self.shape) > len(shape))
        fits = fits and all(want in (None, size) for want, size in zip(shape, self.shape, strict=False))
        if not fits or self.dtype not in kinds:
            sizes = ", ".join("any" if size is None else str(size) for size in shape) + (", ..." if more else "")
            raise bad_value(
                self.name, expected=f"({sizes}) of {' or '.join(kinds)}", received=f"{self.shape} of {self.dtype}"
            )
        mapped = self.file.get_tensor(self.name)  # (it would change with the file)
        return mapped.view(torch.uint8) != 0 if self.dtype == "BOOL" else mapped.clone()


_FLOATS, _INTEGERS, _FLAGS = ("F32", "F64", "F16", "BF16"), ("I64", "I32"), ("BOOL",)
_AXES = ("query", "choice", "key", "mean", "sum", "map")  # (see `measures.Measure`)


def _tensors_of(file: Any) -> dict[str, dict[str, _Stored]]:
    """The tensors of each layer, by the layer's number and the rest of the name."""
    found: dict[str, dict[str, _Stored]] = {}
    for name in file.keys():  # noqa: SIM118 (it is no mapping)
        part = file.get_slice(name)
        layer, _, own = name.partition("/")
        found.setdefault(layer, {})[own] = _Stored(file, name, tuple(part.get_shape()), str(part.get_dtype()))
    return found


def _described(layer: LayerRecord) -> dict[str, Any]:
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


def _tensors(layer: LayerRecord) -> dict[str, Tensor]:
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
    found |= {f"count/{name}": torch.as_tensor(count) for name, count in layer.counts_of_sums.items()}
    if layer.uniform is not None:
        found |= {f"uniform/{name}": tensor for name, tensor in _tensors(layer.uniform).items()}
    return found


def _layer(
    what: str, said: dict[str, Any], stored: dict[str, _Stored], outer: LayerRecord | None = None
) -> LayerRecord:
    """One layer; or, of `outer`, its baseline."""
    from regard.heads.record.record import LayerRecord
    from regard.heads.record.sequences import Chunk, SequenceRecord

    kind = word(f"{what}.kind", said.get("kind"))
    if kind not in ("self", "cross"):
        raise bad_value(f"{what}.kind", expected="self or cross", received=short(kind))
    taken = [
        _measure(f"{what}.measures[{i}]", one)
        for i, one in enumerate(_objects(f"{what}.measures", said.get("measures"), most=1000))
    ]
    names = [name for one in taken for name in one.gives]
    if len(set(names)) < len(names):
        raise bad_value(f"{what}.measures", expected="one of each name", received=short(names))
    layer = LayerRecord(word(f"{what}.name", said.get("name")), kind, taken)  # type: ignore[arg-type]
    layer.texts = integer(f"{what}.texts", said.get("texts"))
    batch, heads, queries = (integer(f"{what}.{size}", said.get(size)) for size in ("batch", "heads", "queries"))
    keys = integer(f"{what}.keys", said.get("keys"), least=0, most=WIDTH)
    if outer is not None and heads != 1:
        raise bad_value(f"{what}.heads", expected="1, for it is one head whose weights are equal", received=heads)
    if "seen" not in stored:
        raise bad_value(what, expected="the tensor 'seen'", received="none")
    per_query = (batch, heads, queries)
    seen = stored.pop("seen").read(per_query, _FLAGS)  # (so large is what follows at most: it is in the file)
    padding = stored.pop("padding").read((batch, 1, queries), _FLAGS) if "padding" in stored else None
    key_padding = stored.pop("key_padding").read((batch, keys), _FLAGS) if "key_padding" in stored else None

    def under(folder: str) -> dict[str, _Stored]:
        return {name.removeprefix(folder): stored.pop(name) for name in list(stored) if name.startswith(folder)}

    parts, sums, counts = under("last/"), under("sum/"), under("count/")
    values: dict[str, Any] = {}
    for one in taken:
        for name, axis in one.gives.items():
            value = _value(one, name, axis, parts, per_query, keys)
            if value is not None:
                values[name] = value
    counted = {name: one.read(per_query, _FLAGS) for name, one in under("counted/").items()}
    if strange := sorted({*parts, *(counted.keys() - values.keys())}):
        raise bad_value(what, expected=f"what was measured: {short(names)}", received=short(strange[0]))
    layer.text = SequenceRecord((batch, heads), total=keys, key_padding=key_padding)
    layer.text.pieces.append(Chunk(queries, [slice(0, keys)], Measurements(values, seen, counted), padding))
    if (layer.texts > 1) != bool(counts) or (counts and counts.keys() - {""} != sums.keys()) or (sums and not counts):
        raise bad_value(
            what,
            expected=f"a sum and a count of each measure, for there were {layer.texts} texts",
            received=f"sums {short(sorted(sums))}, counts {short(sorted(counts))}",
        )
    layer.sums = {name: _sum(one, name, layer, values) for name, one in sums.items()}
    layer.counts_of_sums = {
        name: _not_negative(one.read((heads,), _INTEGERS), one.name) for name, one in counts.items()
    }
    below = under("uniform/")
    if outer is None and "uniform" in said:
        if not isinstance(said["uniform"], dict):
            raise bad_type(f"{what}.uniform", expected="an object", received=short(said["uniform"]))
        layer.uniform = _layer(f"{what}.uniform", said["uniform"], below, layer)
    elif below or "uniform" in said:
        raise bad_value(what, expected="one baseline, described and with its tensors", received="another")
    if stored:
        raise bad_value(what, expected="tensors that the format knows", received=short(min(stored)))
    return layer


def _value(
    one: Measure, name: str, axis: str, parts: dict[str, _Stored], per_query: tuple[int, int, int], keys: int
) -> Any:
    """What a measure gave for the last text, taken out of `parts`; None where it gave nothing."""
    batch, heads, _ = per_query
    if isinstance(one, Links) or f"{name}.keys" in parts:
        halves = [parts.pop(f"{name}.{half}", None) for half in ("keys", "weights")]
        if halves == [None, None]:
            return None
        if halves[0] is None or halves[1] is None or halves[0].shape != halves[1].shape:
            raise bad_value(f"last/{name}", expected="keys and weights of one shape", received="others")
        chosen = halves[0].read((*per_query, None), _INTEGERS)
        return TopLinks(_within(chosen, keys, halves[0].name), halves[1].read((*per_query, None), _FLOATS))
    if name not in parts:
        return None
    part = parts.pop(name)
    if axis == "choice":
        return _within(part.read(per_query, _INTEGERS), keys, part.name)
    if axis == "query":
        shape = (*per_query, len(one.names)) if isinstance(one, Tokens) else per_query
        return part.read(shape, _FLOATS, more=isinstance(one, Stored))
    if axis == "key":
        return part.read((batch, heads, keys), _FLOATS)
    if isinstance(one, Offsets):
        return part.read((batch, heads, one.before + 1 + one.after), _FLOATS)
    return part.read((batch, heads), _FLOATS, more=True)


def _within(chosen: Tensor, keys: int, name: str) -> Tensor:
    """Numbers of keys, or -1 for none."""
    if chosen.numel() and not (int(chosen.min()) >= -1 and int(chosen.max()) < keys):
        raise bad_value(name, expected=f"numbers of keys, from -1 to {keys - 1}", received="others")
    return chosen


def _not_negative(count: Tensor, name: str) -> Tensor:
    if int(count.min()) < 0:
        raise bad_value(name, expected="counts from 0 on", received=int(count.min()))
    return count


def _sum(part: _Stored, name: str, layer: LayerRecord, values: Mapping[str, Any]) -> Tensor:
    """A sum over texts: like what one text gives, (H, ...). Of keys and maps there may be more or fewer."""
    axis, value = layer.axes.get(name), values.get(name)
    if axis in (None, "choice") or not isinstance(value, Tensor):
        raise bad_value(part.name, expected="a sum of something that was measured", received=short(name))
    own = value.shape[1:2] + value.shape[3 if axis == "query" else 2 :]
    shape = (own[0], *[None] * (len(own) - 1)) if axis in ("key", "map") else tuple(own)
    if not math.prod(part.shape) and part.shape != tuple(own):
        raise bad_value(part.name, expected=f"{tuple(own)}, or more", received=part.shape)
    return part.read(shape, _FLOATS)


class Stored(Measure):
    """A measure that is not among regard's own: what it gave is known, not how it was taken."""

    def __init__(self, gives: dict[str, str]) -> None:
        self.gives = gives  # type: ignore[misc]


_OWN = {
    name: kind
    for name in measures.__all__
    if isinstance(kind := getattr(measures, name), type) and issubclass(kind, Measure)
    if kind not in (Measure, PerQuery, PerKey)
}


def _measure(what: str, said: dict[str, Any]) -> Measure:
    gives, options = said.get("gives"), said.get("options", {})
    if not isinstance(gives, dict) or not gives or not all(axis in _AXES for axis in gives.values()):
        raise bad_type(f"{what}.gives", expected=f"names, each with one of {', '.join(_AXES)}", received=short(gives))
    name = word(f"{what}.measure", said.get("measure"))
    if not name:
        return Stored(gives)
    if name not in _OWN or _OWN[name].gives != gives:
        raise bad_value(
            f"{what}.measure",
            expected="a class of regard.measures, and what it gives",
            received=f"{short(name)}, which gives {short(gives)}",
        )
    if _OWN[name] is Tokens:
        names = several(f"{what}.names", said.get("names"), word)
        if not names or len(set(names)) < len(names):
            raise bad_value(f"{what}.names", expected="names that differ", received=short(names))
        return Tokens({one: [0] for one in names})
    if not isinstance(options, dict):
        raise bad_type(f"{what}.options", expected="an object", received=short(options))
    for option, value in options.items():
        if not isinstance(value, (str, bool)):
            number(f"{what}.options.{option}", value)
    try:
        return _OWN[name](**options)
    except TypeError as error:
        raise bad_type(f"{what}.options", expected=f"those of {name}", received=f"{short(options)} ({error})") from None
