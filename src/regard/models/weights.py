"""Files of weights, read lazily: names and shapes at once, numbers when they are asked for. Never pickle.

`Weights` is what a file (or a folder of them) gives: for safetensors here, for GGUF in `gguf_file.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from regard.errors import bad_value
from regard.models.files import damaged, open_safetensors, read_json

__all__ = ["SafetensorsFolder", "Weights", "damaged", "read_json"]


class Weights(Protocol):
    """Tensors by name, in a file."""

    where: str  # for messages
    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, torch.dtype]

    def read(self, name: str) -> Tensor:
        """The tensor itself."""
        ...


_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class SafetensorsFolder:
    """`model.safetensors`, or the shards that `model.safetensors.index.json` lists. Tensors are views of the mapped
    file: nothing is read before it is used, and what is written to them stays in this process. What others write into
    the file is seen, too (`models.load(..., mmap=False)` copies)."""

    def __init__(self, folder: Path) -> None:
        self.where = str(folder)
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        self._files: dict[str, Any] = {}  # name of a tensor -> the open file it is in
        listed = self._listed(folder)
        for path in sorted(set(listed.values())) if listed else [folder / "model.safetensors"]:
            if not path.exists():
                raise self._absent(folder, path, sharded=bool(listed))
            file = open_safetensors(path)
            for name in file.keys():  # noqa: SIM118 - it is no mapping
                part = file.get_slice(name)
                self.shapes[name], self._files[name] = tuple(part.get_shape()), file
                self.dtypes[name] = _DTYPES.get(part.get_dtype(), torch.uint8)
        for name in listed:
            if name not in self.shapes:
                raise bad_value(
                    str(listed[name]),
                    expected=f"the tensor {name!r}, as the index says",
                    received="none of that name",
                    remedy="fetch the shards again",
                )

    @staticmethod
    def _listed(folder: Path) -> dict[str, Path]:
        """Which shard each tensor is in; empty where there is one file alone."""
        index = folder / "model.safetensors.index.json"
        if (folder / "model.safetensors").exists() or not index.exists():
            return {}
        table = read_json(index)
        listed = table.get("weight_map") if isinstance(table, dict) else None
        if not isinstance(listed, dict) or not listed:
            raise damaged(index, "no weight_map", what="the index of a sharded model")
        for file in listed.values():
            if not isinstance(file, str) or Path(file).name != file:
                raise bad_value(str(index), expected="names of files beside it", received=repr(file))
        return {name: folder / file for name, file in listed.items()}

    @staticmethod
    def _absent(folder: Path, path: Path, *, sharded: bool) -> ValueError:
        if sharded:
            return bad_value(
                str(folder),
                expected=f"the shard {path.name}, as the index says",
                received="none",
                remedy="fetch the shards again",
            )
        pickled = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".ckpt"))
        received = f"{', '.join(pickled)}, which are pickles and can run code" if pickled else "none"
        others = sorted(p.name for p in folder.glob("*.safetensors"))
        if others:
            return bad_value(
                str(folder),
                expected="weights in model.safetensors, whole or in shards",
                received=", ".join(others),
                remedy="rename the file if that is the model",
            )
        return bad_value(
            str(folder),
            expected="weights in model.safetensors, whole or in shards",
            received=received,
            remedy="save the model as safetensors" if pickled else "",
        )

    def read(self, name: str) -> Tensor:
        """A view of the mapped file."""
        return self._files[name].get_tensor(name)
