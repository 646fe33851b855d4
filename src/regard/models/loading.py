"""From a name or a path to a model. Everything is checked by names and shapes before a number is read, so there is
either a whole model or an error.

    find      an embedded model, a folder, or a GGUF file      embedded.py, weights.py, gguf_file.py
    read      config.json, and the family it belongs to        families.py
    plan      the model without weights, on the meta device    encoder.py, decoder.py
    match     every tensor of the plan with one of the file    here
    fill      the numbers
"""

from __future__ import annotations

import difflib
import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regard.errors import bad_type, bad_value, is_panic, missing_extra
from regard.layouts.base import Layout
from regard.layouts.convert import LAYOUTS
from regard.models import packaged as embedded
from regard.models.config import ModelConfig
from regard.models.decoder import Decoder
from regard.models.encoder import Encoder
from regard.models.families import Family, family_of
from regard.models.fields import integer
from regard.models.files import check_regular, damaged, read_json
from regard.models.gguf_file import GgufFile
from regard.models.gguf_tokenizer import UnknownTokenizer, tokenizer_of
from regard.models.weights import SafetensorsFolder, Weights

__all__ = ["Source", "blank", "load", "source"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True)
class Source:
    """Where a model comes from: what it is, its weights (not read yet) and its tokenizer."""

    name: str
    path: Path
    family: Family
    config: ModelConfig
    weights: Weights
    size: int  # bytes of the weight files

    def tokenizer(self) -> Any:
        """The `tokenizers.Tokenizer` beside the weights, or None."""
        if not isinstance(self.weights, GgufFile):
            return _tokenizer_json(self.path / "tokenizer.json")
        try:
            return tokenizer_of(self.weights)
        except UnknownTokenizer as error:
            warnings.warn(str(error), stacklevel=3)
            return None


def load(
    name: str | os.PathLike[str] = "minilm",
    *,
    dtype: torch.dtype | None = None,
    check: bool = True,
    mmap: bool = True,
    progress: Callable[[Iterable[Any]], Iterable[Any]] | None = None,
) -> Any:
    """A trained model, ready to use, in eval mode.

    Weights that are stored as the model holds them are not copied, but mapped: whoever overwrites the file in place
    changes the model, and whoever cuts it short ends the process. (Replacing the file by a new one of its name does
    neither.) With `mmap=False` the model has its own copy.

    Args:
        name: "minilm" (an encoder) or "smollm2" (a decoder), which install as packages; or the path of a folder with
            config.json, safetensors and tokenizer.json, or of a GGUF file.
        dtype: float32, bfloat16, float16 or float64; by default as stored (a GGUF file: float32).
        check: whether the weights of an embedded model are compared with their known SHA-256.
        mmap: whether weights in safetensors stay in the file, mapped, until they are used: loading takes no time, and
            processes share the memory. As long as the model is used the file is then part of it: whoever writes into it
            changes the model, whoever cuts it short ends the process. (To replace a file while it is in use, write
            another and rename it.) False reads everything into memory at once.
        progress: wraps the tensors as they are read, such as `rich.progress.track`.

    Returns:
        An `Encoder` or a `Decoder`.

    >>> model = load("minilm")
    >>> model(model.encode("Hello, world!")).shape
    torch.Size([1, 6, 384])
    """
    if dtype is not None and dtype not in _DTYPES:
        raise bad_type("dtype", expected=" or ".join(map(str, _DTYPES)), received=repr(dtype))
    found = source(name, check=check)
    model, matched, unused = _matched(found)
    if found.config.tied and (head := matched.pop("head.weight", None)) is not None:
        stored = (found.weights.read(match.names[0]) for match in (head, matched["embedding.tokens.weight"]))
        if not torch.equal(*stored):  # the config says so, but a head of its own was trained
            found = replace(found, config=replace(found.config, tied=False))
            model, matched, unused = _matched(found)
    dtype = dtype or _stored_dtype(found, matched)
    model.tokenizer, model.unused = found.tokenizer(), unused
    items = list(matched.items())
    tensors: dict[str, Tensor] = {}
    for key, match in items if progress is None else progress(items):
        tensor = match.read(found.weights, dtype)
        tensors[key] = tensor if mmap else tensor.clone()
    _fill(model, tensors)
    return model.eval()


def blank(name: str | os.PathLike[str] | Source = "minilm", *, check: bool = False) -> Encoder | Decoder:
    """The same model with shapes and no numbers, on the meta device: for describing it. No weight is read.

    Where the config says that the head is the embedding's, it is so here. The file may hold a head of its own all the
    same: only the numbers tell, and `load` looks at them.

    Args:
        name: as for `load`; or what `source` found.
        check: as for `load`.

    >>> blank("minilm").embedding.tokens.weight.device
    device(type='meta')
    """
    found = name if isinstance(name, Source) else source(name, check=check)
    model, matched, unused = _matched(found)
    model.unused = unused
    return model.to(_stored_dtype(found, matched)).eval()


def _stored_dtype(found: Source, matched: Mapping[str, _Match]) -> torch.dtype:
    """What the token embedding is stored as: the whole model is held in one dtype."""
    stored = found.weights.dtypes[matched["embedding.tokens.weight"].names[0]]
    return stored if stored in _DTYPES else torch.float32


def source(name: str | os.PathLike[str], *, check: bool = True) -> Source:
    """Find a model and read what it is."""
    if not isinstance(name, (str, os.PathLike)):
        raise bad_type("name", expected="a name or a path", received=type(name).__name__)
    short = str(name)
    if short in embedded.EMBEDDED:
        path = embedded.find(short, checked=check)
    else:
        path = Path(name).expanduser()
        if not os.path.exists(path):  # (which says no of a name too long for a file, where Path raises)
            near = difflib.get_close_matches(short.lower(), embedded.EMBEDDED, n=1)
            raise bad_value(
                "model",
                expected=f"one of {', '.join(embedded.EMBEDDED)}, or a folder or GGUF file",
                received=repr(short),
                remedy=f"did you mean {near[0]!r}?" if near else "",
            )
        short = path.stem if path.is_file() else path.resolve().name
    if not path.is_dir():
        check_regular(path)
        if path.suffix == ".safetensors" or path.name == "config.json":
            raise bad_value(
                "model",
                expected="a folder, or a GGUF file",
                received=str(path),
                remedy=f"the folder it is in: {str(path.parent)!r}",
            )
        file = GgufFile(path)
        family = family_of(file.settings)
        return Source(short, path, family, family.config(file.settings), file, path.stat().st_size)
    settings = _settings(path)
    family = family_of(settings)
    config = replace(family.config(settings), **_recipe(path))
    weights = SafetensorsFolder(path)
    size = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    return Source(short, path, family, config, weights, size)


def _settings(folder: Path) -> dict[str, Any]:
    """config.json; the tokens at which generation ends are in generation_config.json where there is one."""
    settings = _object(folder / "config.json")
    if (folder / "generation_config.json").exists():
        more = read_json(folder / "generation_config.json")
        if isinstance(more, dict) and more.get("eos_token_id") is not None:
            settings["eos_token_id"] = more["eos_token_id"]
    return settings


def _recipe(folder: Path) -> dict[str, Any]:
    """How sentence embeddings are made, where files beside the weights tell."""
    recipe: dict[str, Any] = {}
    if (folder / "sentence_bert_config.json").exists():
        said = _object(folder / "sentence_bert_config.json").get("max_seq_length")
        recipe["embed_length"] = None if said is None else integer("sentence_bert_config.json: max_seq_length", said)
    if (folder / "1_Pooling" / "config.json").exists():
        pooling = _object(folder / "1_Pooling" / "config.json")
        modes = [name for name, on in pooling.items() if name.startswith("pooling_mode_") and on is True]
        recipe["pooling"] = "cls" if modes == ["pooling_mode_cls_token"] else "mean"
        if modes not in (["pooling_mode_cls_token"], ["pooling_mode_mean_tokens"], []):
            recipe["not_pooled"] = f"pooling by {' and '.join(modes)}"
    if (folder / "modules.json").exists():
        listed = read_json(folder / "modules.json")
        if not isinstance(listed, list) or not all(isinstance(part, dict) for part in listed):
            raise damaged(folder / "modules.json", f"a {type(listed).__name__}", what="a list of objects")
        parts = [str(part.get("type", "")).rsplit(".", 1)[-1] for part in listed]
        recipe["normalised"] = "Normalize" in parts
        others = [part for part in parts if part not in ("Transformer", "Pooling", "Normalize")]
        if others:
            recipe["not_pooled"] = f"a {' and a '.join(others)} module after it"
    return recipe


def _object(path: Path) -> dict[str, Any]:
    found = read_json(path)
    if not isinstance(found, dict):
        raise damaged(path, f"a {type(found).__name__}", what="an object")
    return found


def _tokenizer_json(path: Path) -> Any:
    """The tokenizer as it is, but with padding and truncation off: those are the caller's to choose."""
    if not path.exists():
        return None
    check_regular(path)
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise missing_extra("tokenizers", "models") from error
    try:
        made = Tokenizer.from_file(str(path))
    except BaseException as error:  # tokenizers raises plain Exception, and panics
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        raise damaged(path, error, what="a tokenizer.json") from error
    made.no_padding()
    made.no_truncation()
    return made


# ----------------------------------------------------------------------------------------------------
# Matching the plan with the file


@dataclass(frozen=True)
class _Match:
    """How one of our tensors comes from theirs."""

    names: tuple[str, ...]  # of the tensors it needs, as stored
    layout: Layout | None = None  # of attention weights, with what follows
    keys: tuple[str, ...] = ()  # the same tensors by the layout's names
    ours: str = ""  # which canonical tensor
    heads: int = 0
    transposed: bool = False

    def take(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Our tensor from theirs (by stored name): numbers, or shapes on the meta device."""
        if self.layout is None:
            tensor = tensors[self.names[0]]
            return tensor.T if self.transposed and tensor.dim() == 2 else tensor
        theirs = {key: tensors[name] for key, name in zip(self.keys, self.names, strict=True)}
        return self.layout.to_canonical(theirs, self.heads)[self.ours]

    def read(self, weights: Weights, dtype: torch.dtype) -> Tensor:
        """The numbers. Of a second tensor the shape alone is needed."""
        tensors = {name: torch.empty(weights.shapes[name], device="meta") for name in self.names[1:]}
        return self.take({self.names[0]: weights.read(self.names[0]), **tensors}).to(dtype).contiguous()


def _matched(found: Source) -> tuple[Encoder | Decoder, dict[str, _Match], tuple[str, ...]]:
    """The model on the meta device, where each of its tensors comes from, and what is left over.

    A tied head is matched too where the file holds one, for it may be another.
    """
    config, family, weights = found.config, found.family, found.weights
    if config.layers > len(weights.shapes):  # before so many are made
        raise bad_value(
            str(found.path),
            expected=f"tensors of {config.layers} layers, as the configuration says",
            received=f"{len(weights.shapes)} tensors",
            remedy="the file is not whole",
        )
    with torch.device("meta"):
        model = (Encoder if config.kind == "encoder" else Decoder)(config, name=found.name)
    there: dict[str, str] = {}
    for name in weights.shapes:
        if (other := there.setdefault(_plain(name, family), name)) != name:
            raise bad_value(str(found.path), expected="one tensor of each name", received=f"{other!r} and {name!r}")
    shapes = {name: torch.empty(shape, device="meta") for name, shape in weights.shapes.items()}
    matched: dict[str, _Match] = {}
    used: set[str] = set()
    for key, expected in model.state_dict().items():
        if key == "head.weight" and config.tied and family.keys[key] not in there:
            continue
        match = _match(key, there, found, config)
        used.update(match.names)
        try:
            received = match.take(shapes)
        except (ValueError, IndexError) as error:  # (an out_proj that is no matrix)
            raise ValueError(f"{found.path}: {' with '.join(match.names)}: {error}") from error
        if not (stored := weights.dtypes[match.names[0]]).is_floating_point:
            raise bad_value(
                f"{found.path}: {match.names[0]}",
                expected="floating point numbers",
                received=stored,
                remedy="quantised weights are read from GGUF files alone",
            )
        if received.shape != expected.shape:
            raise bad_value(
                f"{found.path}: {match.names[0]}",
                expected=f"shape {_stored_shape(expected, received, shapes[match.names[0]])}, "
                f"as the configuration says ({_sizes(config)})",
                received=tuple(shapes[match.names[0]].shape),
                remedy="config.json and the weights belong to different models",
            )
        matched[key] = match
    left = {name: plain for plain, name in there.items() if name not in used}
    strange = sorted(name for name, plain in left.items() if not family.is_beside(plain))
    if strange:
        raise bad_value(
            str(found.path),
            expected=f"only tensors of a {family.name} model with {_sizes(config)}",
            received=f"{len(strange)} more, such as {strange[0]!r}",
            remedy="config.json and the weights belong to different models",
        )
    heads = (name for name, plain in left.items() if not plain.endswith(_BUFFERS))
    return model, matched, tuple(sorted(heads))


_BUFFERS = (".position_ids", ".token_type_ids", ".inv_freq", ".masked_bias", "attn.bias", "attention.bias")


def _plain(name: str, family: Family) -> str:
    """A stored name without the model's prefix, and without the names that norms once had."""
    plain = name.removeprefix(family.prefix)
    for old, new in ((".gamma", ".weight"), (".beta", ".bias")):
        if plain.endswith(f"LayerNorm{old}"):
            plain = plain.removesuffix(old) + new
    return plain


def _match(key: str, there: Mapping[str, str], found: Source, config: ModelConfig) -> _Match:
    """Where one of our tensors comes from; raises where what it needs is not there."""
    family = found.family
    layer, inner = _parts(key)
    if inner is None:
        plain = family.keys[key]
    elif f"blocks.{{i}}.{inner}" in family.keys:
        plain = family.keys[f"blocks.{{i}}.{inner}"].format(i=layer)
    else:
        layout, prefix = LAYOUTS[family.attention[0]], family.attention[1].format(i=layer)
        ours = inner.removeprefix("attention.")
        own = layout.keys.get(ours) or layout.keys[f"qkv.{ours.rsplit('.', 1)[1]}"]
        out = layout.keys["out_proj.weight"]  # from which the layout reads the inner width
        keys = tuple(dict.fromkeys((own, out)))
        for needed in keys:
            if prefix + needed not in there:
                raise _absent(found, prefix + needed, there)
        return _Match(tuple(there[prefix + k] for k in keys), layout, keys, ours, config.num_heads)
    if plain not in there:
        raise _absent(found, plain, there)
    return _Match((there[plain],), transposed=family.transposed and ".mlp." in key)


def _parts(key: str) -> tuple[int | None, str | None]:
    """The layer, and what stands after it: "blocks.3.mlp.up.weight" -> 3, "mlp.up.weight"."""
    if not key.startswith("blocks."):
        return None, None
    _, layer, inner = key.split(".", 2)
    return int(layer), inner


def _absent(found: Source, name: str, there: Mapping[str, str]) -> ValueError:
    near = difflib.get_close_matches(name, there, n=1, cutoff=0.8) or [one for one in there if one.endswith(name)]
    own = name == found.family.keys.get("head.weight")  # the head stands beside the model, and has no prefix
    wanted = repr(name) if own else f"{found.family.prefix + name!r} (or without the prefix)"
    return bad_value(
        str(found.path),
        expected=f"the tensor {wanted}, as the configuration says ({_sizes(found.config)})",
        received="none of that name",
        remedy=f"the nearest is {there[near[0]]!r}"
        if near
        else "config.json and the weights belong to different models, or the file is not whole",
    )


def _stored_shape(expected: Tensor, received: Tensor, stored: Tensor) -> tuple[int, ...]:
    """The shape to expect, as the file would have it."""
    if received.dim() == 2 and received.shape != stored.shape and received.T.shape == stored.shape:
        return tuple(expected.T.shape)
    return tuple(expected.shape)


def _sizes(config: ModelConfig) -> str:
    kv = config.num_kv_heads
    heads = f"{config.num_heads} heads" + (f", {kv} kv heads" if kv not in (None, config.num_heads) else "")
    return (
        f"{config.layers} layers, width {config.embed_dim}, {heads}, inner width {config.inner}, "
        f"vocabulary {config.vocabulary}"
    )


def _fill(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Put the tensors into the model in the place of its shapes."""
    for name, module in model.named_modules():
        for own, parameter in list(module.named_parameters(recurse=False)):
            key = f"{name}.{own}" if name else own
            if key in tensors:
                setattr(module, own, nn.Parameter(tensors[key], requires_grad=parameter.requires_grad))
    if isinstance(model, Decoder):
        model.tie()
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())), "a tensor was left out"
