"""Load a model from a name or a path. Names and shapes are all checked before any weight is read, so loading returns a
complete model or raises.

    find      a packaged model, a folder, or a GGUF file              packaged.py, weights.py, gguf_file.py
    read      config.json and the family it belongs to                families.py
    build     the model on the meta device                            encoder.py, decoder.py
    match     every tensor of the model with tensors of the file      here
    fill      read the tensors, convert them, assign them
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
from regard.models import packaged
from regard.models.config import ModelConfig
from regard.models.decoder import Decoder
from regard.models.encoder import Encoder
from regard.models.families import Family, family_of
from regard.models.fields import integer
from regard.models.files import check_regular, damaged, read_json
from regard.models.gguf_file import GgufFile
from regard.models.gguf_tokenizer import UnknownTokenizer, tokenizer_of
from regard.models.weights import SafetensorsFolder, StateDict, Weights

__all__ = ["Source", "blank", "load", "of_state_dict", "source"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True)
class Source:
    """A model that was found: its config, its weights (not read yet) and its tokenizer."""

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

    Args:
        name: "minilm" (an encoder) or "smollm2" (a decoder), which install as packages; or the path of a folder with
            config.json, safetensors and tokenizer.json, or of a GGUF file.
        dtype: float32, bfloat16, float16 or float64; by default as stored (a GGUF file: float32).
        check: whether the weights of a packaged model are compared with their known SHA-256.
        mmap: whether safetensors weights are memory-mapped: they are read when first used, and shared by processes.
            While the model is in use, overwriting the file in place changes the model, and truncating it crashes the
            process; to replace the file, write another one and rename it. False copies all weights into memory.
        progress: wraps the iterable of tensors while they are read, such as `rich.progress.track`.

    Returns:
        An `Encoder` or a `Decoder`.

    >>> model = load("minilm")
    >>> model(model.encode("Hello, world!")).shape
    torch.Size([1, 6, 384])
    """
    if dtype is not None and dtype not in _DTYPES:
        raise bad_type("dtype", expected=" or ".join(map(str, _DTYPES)), received=repr(dtype))
    origin = source(name, check=check)
    model = _load(origin, dtype, mmap=mmap, progress=progress)
    model.tokenizer = origin.tokenizer()
    return model


def of_state_dict(settings: Mapping[str, Any], tensors: Mapping[str, Tensor], name: str) -> Encoder | Decoder:
    """A model with the tensors of another library's model that is in memory, in eval mode, without a tokenizer.

    Tensors that lie as ours do are shared with it, not copied.

    Args:
        settings: what its config.json would hold.
        tensors: its state dict.
        name: for messages.
    """
    family, weights = family_of(settings), StateDict(name, tensors)
    return _load(Source(name, Path(name), family, family.config(settings), weights, 0), None)


def _load(
    origin: Source,
    dtype: torch.dtype | None,
    *,
    mmap: bool = True,
    progress: Callable[[Iterable[Any]], Iterable[Any]] | None = None,
) -> Encoder | Decoder:
    """Match the tensors of a source, read them, and fill the model with them."""
    model, matches, unused = _matched(origin)
    if origin.config.tied and (head := matches.pop("head.weight", None)) is not None:
        stored = (origin.weights.read(match.names[0]) for match in (head, matches["embedding.tokens.weight"]))
        if not torch.equal(*stored):  # the config says tied, but the file has a separately trained head
            origin = replace(origin, config=replace(origin.config, tied=False))
            model, matches, unused = _matched(origin)
    dtype = dtype or _stored_dtype(origin, matches)
    model.unused = unused
    items = list(matches.items())
    tensors: dict[str, Tensor] = {}
    for key, match in items if progress is None else progress(items):
        tensor = match.read(origin.weights, dtype)
        tensors[key] = tensor if mmap else tensor.clone()
    _fill(model, tensors)
    return model.eval()


def blank(name: str | os.PathLike[str] | Source = "minilm", *, check: bool = False) -> Encoder | Decoder:
    """The same model on the meta device, to describe it: shapes without values. No weight is read.

    The head is tied if the config says so. (`load` compares the weights, since some files have a separate head.)

    Args:
        name: as for `load`; or a `Source`.
        check: as for `load`.

    >>> blank("minilm").embedding.tokens.weight.device
    device(type='meta')
    """
    origin = name if isinstance(name, Source) else source(name, check=check)
    model, matches, unused = _matched(origin)
    model.unused = unused
    return model.to(_stored_dtype(origin, matches)).eval()


def _stored_dtype(origin: Source, matches: Mapping[str, _Match]) -> torch.dtype:
    """The dtype of the stored token embedding, which the whole model gets."""
    stored = origin.weights.dtypes[matches["embedding.tokens.weight"].names[0]]
    return stored if stored in _DTYPES else torch.float32


def source(name: str | os.PathLike[str], *, check: bool = True) -> Source:
    """Find a model by name or path, and read its configuration."""
    if not isinstance(name, (str, os.PathLike)):
        raise bad_type("name", expected="a name or a path", received=type(name).__name__)
    short = str(name)
    if short in packaged.EMBEDDED:
        path = packaged.find(short, checked=check)
    else:
        path = Path(name).expanduser()
        if not os.path.exists(path):  # (Path.exists raises if the name is too long for a file)
            near = difflib.get_close_matches(short.lower(), packaged.EMBEDDED, n=1)
            raise bad_value(
                "model",
                expected=f"one of {', '.join(packaged.EMBEDDED)}, or a folder or GGUF file",
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
    config = replace(family.config(settings), **_sentence_settings(path))
    weights = SafetensorsFolder(path)
    size = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    return Source(short, path, family, config, weights, size)


def _settings(folder: Path) -> dict[str, Any]:
    """config.json, with the end tokens of generation_config.json if there is one."""
    settings = _object(folder / "config.json")
    if (folder / "generation_config.json").exists():
        generation = read_json(folder / "generation_config.json")
        if isinstance(generation, dict) and generation.get("eos_token_id") is not None:
            settings["eos_token_id"] = generation["eos_token_id"]
    return settings


def _sentence_settings(folder: Path) -> dict[str, Any]:
    """How sentence embeddings are pooled, from the files of sentence-transformers beside the weights."""
    fields: dict[str, Any] = {}
    if (folder / "sentence_bert_config.json").exists():
        length = _object(folder / "sentence_bert_config.json").get("max_seq_length")
        fields["embed_length"] = (
            None if length is None else integer("sentence_bert_config.json: max_seq_length", length)
        )
    if (folder / "1_Pooling" / "config.json").exists():
        pooling = _object(folder / "1_Pooling" / "config.json")
        modes = [name for name, on in pooling.items() if name.startswith("pooling_mode_") and on is True]
        fields["pooling"] = "cls" if modes == ["pooling_mode_cls_token"] else "mean"
        if modes not in (["pooling_mode_cls_token"], ["pooling_mode_mean_tokens"], []):
            fields["not_pooled"] = f"pooling by {' and '.join(modes)}"
    if (folder / "modules.json").exists():
        modules = read_json(folder / "modules.json")
        if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
            raise damaged(folder / "modules.json", f"a {type(modules).__name__}", what="a list of objects")
        types = [str(module.get("type", "")).rsplit(".", 1)[-1] for module in modules]
        fields["normalised"] = "Normalize" in types
        others = [name for name in types if name not in ("Transformer", "Pooling", "Normalize")]
        if others:
            fields["not_pooled"] = f"a {' and a '.join(others)} module after it"
    return fields


def _object(path: Path) -> dict[str, Any]:
    """The object in a JSON file."""
    content = read_json(path)
    if not isinstance(content, dict):
        raise damaged(path, f"a {type(content).__name__}", what="an object")
    return content


def _tokenizer_json(path: Path) -> Any:
    """The tokenizer in tokenizer.json with padding and truncation switched off; None if there is no such file."""
    if not path.exists():
        return None
    check_regular(path)
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise missing_extra("tokenizers", "models") from error
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except BaseException as error:  # tokenizers raises plain Exception, and panics
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        raise damaged(path, error, what="a tokenizer.json") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


# ----------------------------------------------------------------------------------------------------
# Matching the tensors of the model with those of the file


@dataclass(frozen=True)
class _Match:
    """The stored tensors that one tensor of the model is made of, and how."""

    names: tuple[str, ...]  # stored names
    layout: Layout | None = None  # of attention weights; None for all others, which need none of the next three
    keys: tuple[str, ...] = ()  # the same tensors by the layout's names
    canonical: str = ""  # our name within the layer
    heads: int = 0
    transposed: bool = False

    def take(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Our tensor from the stored ones (by name), which may be on the meta device."""
        if self.layout is None:
            tensor = tensors[self.names[0]]
            return tensor.T if self.transposed and tensor.dim() == 2 else tensor
        theirs = {key: tensors[name] for key, name in zip(self.keys, self.names, strict=True)}
        return self.layout.to_canonical(theirs, self.heads)[self.canonical]

    def read(self, weights: Weights, dtype: torch.dtype) -> Tensor:
        """Our tensor with its values. Of a second stored tensor only the shape is needed."""
        tensors = {name: torch.empty(weights.shapes[name], device="meta") for name in self.names[1:]}
        return self.take({self.names[0]: weights.read(self.names[0]), **tensors}).to(dtype).contiguous()


def _matched(origin: Source) -> tuple[Encoder | Decoder, dict[str, _Match], tuple[str, ...]]:
    """The model on the meta device, the match of each of its tensors, and the names of heads that are not used.

    A tied head is matched too if the file has one, because its values may differ.
    """
    config, family, weights = origin.config, origin.family, origin.weights
    if config.layers > len(weights.shapes):  # checked before that many layers are built
        raise bad_value(
            str(origin.path),
            expected=f"tensors of {config.layers} layers, as the configuration says",
            received=f"{len(weights.shapes)} tensors",
            remedy="the file is incomplete",
        )
    with torch.device("meta"):
        model = (Encoder if config.kind == "encoder" else Decoder)(config, name=origin.name)
    stored: dict[str, str] = {}  # name without prefix -> stored name
    for name in weights.shapes:
        if (other := stored.setdefault(_plain(name, family), name)) != name:
            raise bad_value(str(origin.path), expected="one tensor of each name", received=f"{other!r} and {name!r}")
    shapes = {name: torch.empty(shape, device="meta") for name, shape in weights.shapes.items()}
    matches: dict[str, _Match] = {}
    used: set[str] = set()
    for key, expected in model.state_dict().items():
        if key == "head.weight" and config.tied and family.keys[key] not in stored:
            continue
        match = _match(key, stored, origin)
        used.update(match.names)
        try:
            received = match.take(shapes)
        except (ValueError, IndexError) as error:  # (IndexError: an out_proj that is not a matrix)
            raise ValueError(f"{origin.path}: {' with '.join(match.names)}: {error}") from error
        if not (dtype := weights.dtypes[match.names[0]]).is_floating_point:
            raise bad_value(
                f"{origin.path}: {match.names[0]}",
                expected="floating point numbers",
                received=dtype,
                remedy="use a GGUF file for quantised weights",
            )
        if received.shape != expected.shape:
            raise bad_value(
                f"{origin.path}: {match.names[0]}",
                expected=f"shape {_stored_shape(expected, received, shapes[match.names[0]])}, "
                f"as the configuration says ({_sizes(config)})",
                received=tuple(shapes[match.names[0]].shape),
                remedy="config.json and the weights belong to different models",
            )
        matches[key] = match
    unused = {name: plain for plain, name in stored.items() if name not in used}
    unknown = sorted(name for name, plain in unused.items() if not family.is_ignored(plain))
    if unknown:
        raise bad_value(
            str(origin.path),
            expected=f"only tensors of a {family.name} model with {_sizes(config)}",
            received=f"{len(unknown)} more, such as {unknown[0]!r}",
            remedy="config.json and the weights belong to different models",
        )
    heads = (name for name, plain in unused.items() if not plain.endswith(_BUFFERS))
    return model, matches, tuple(sorted(heads))


_BUFFERS = (".position_ids", ".token_type_ids", ".inv_freq", ".masked_bias", "attn.bias", "attention.bias")


def _plain(name: str, family: Family) -> str:
    """A stored name without the model's prefix, with the old names of norms replaced by the new ones."""
    plain = name.removeprefix(family.prefix)
    for old, new in ((".gamma", ".weight"), (".beta", ".bias")):
        if plain.endswith(f"LayerNorm{old}"):
            plain = plain.removesuffix(old) + new
    return plain


def _match(key: str, stored: Mapping[str, str], origin: Source) -> _Match:
    """The stored tensors of one tensor of the model; raises if one of them is absent."""
    family = origin.family
    layer, inner = _split_key(key)
    if inner is None:
        plain = family.keys[key]
    elif f"blocks.{{i}}.{inner}" in family.keys:
        plain = family.keys[f"blocks.{{i}}.{inner}"].format(i=layer)
    else:
        layout, prefix = LAYOUTS[family.attention[0]], family.attention[1].format(i=layer)
        canonical = inner.removeprefix("attention.")
        theirs = layout.keys.get(canonical) or layout.keys[f"qkv.{canonical.rsplit('.', 1)[1]}"]
        out = layout.keys["out_proj.weight"]  # the layout needs its shape to split q, k and v
        keys = tuple(dict.fromkeys((theirs, out)))
        for name in keys:
            if prefix + name not in stored:
                raise _absent(origin, prefix + name, stored)
        return _Match(tuple(stored[prefix + name] for name in keys), layout, keys, canonical, origin.config.num_heads)
    if plain not in stored:
        raise _absent(origin, plain, stored)
    return _Match((stored[plain],), transposed=family.transposed and ".mlp." in key)


def _split_key(key: str) -> tuple[int | None, str | None]:
    """The layer number and the name inside the layer: "blocks.3.mlp.up.weight" -> 3, "mlp.up.weight"."""
    if not key.startswith("blocks."):
        return None, None
    _, layer, inner = key.split(".", 2)
    return int(layer), inner


def _absent(origin: Source, name: str, stored: Mapping[str, str]) -> ValueError:
    """The error for a tensor that is not in the file."""
    near = difflib.get_close_matches(name, stored, n=1, cutoff=0.8) or [
        other for other in stored if other.endswith(name)
    ]
    is_head = name == origin.family.keys.get("head.weight")  # which has no prefix
    wanted = repr(name) if is_head else f"{origin.family.prefix + name!r} (or without the prefix)"
    return bad_value(
        str(origin.path),
        expected=f"the tensor {wanted}, as the configuration says ({_sizes(origin.config)})",
        received="none of that name",
        remedy=f"the nearest is {stored[near[0]]!r}"
        if near
        else "config.json and the weights belong to different models, or the file is incomplete",
    )


def _stored_shape(expected: Tensor, received: Tensor, stored: Tensor) -> tuple[int, ...]:
    """The expected shape in the file's own orientation, (in, out) or (out, in)."""
    if received.dim() == 2 and received.shape != stored.shape and received.T.shape == stored.shape:
        return tuple(expected.T.shape)
    return tuple(expected.shape)


def _sizes(config: ModelConfig) -> str:
    """The sizes of a model in words."""
    kv = config.num_kv_heads
    heads = f"{config.num_heads} heads" + (f", {kv} kv heads" if kv not in (None, config.num_heads) else "")
    return (
        f"{config.layers} layers, width {config.embed_dim}, {heads}, inner width {config.inner}, "
        f"vocabulary {config.vocabulary}"
    )


def _fill(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Replace the meta parameters of the model by these tensors."""
    for name, module in model.named_modules():
        for attribute, parameter in list(module.named_parameters(recurse=False)):
            key = f"{name}.{attribute}" if name else attribute
            if key in tensors:
                setattr(module, attribute, nn.Parameter(tensors[key], requires_grad=parameter.requires_grad))
    if isinstance(model, Decoder):
        model.tie()
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())), "a tensor was left out"
