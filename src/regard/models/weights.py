"""Weight files, read lazily: names and shapes when opened, values on request. Never pickle.

`Weights` is the interface; this file implements it for safetensors and for tensors in memory, `gguf_file.py` for GGUF.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from regard.errors import bad_value
from regard.models.files import damaged, open_safetensors, read_json

__all__ = ["SafetensorsFolder", "StateDict", "Weights", "damaged", "read_json"]


class Weights(Protocol):
    """Tensors by name, stored in a file."""

    where: str  # the path, for messages
    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, torch.dtype]

    def read(self, name: str) -> Tensor:
        """The tensor with its values."""
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
    """`model.safetensors`, or the shards listed in `model.safetensors.index.json`.

    Tensors are views of the memory-mapped file: read when first used, private when written to. Changes that other
    processes write into the file do show (`models.load(..., mmap=False)` copies)."""

    def __init__(self, folder: Path) -> None:
        self.where = str(folder)
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        self._files: dict[str, Any] = {}  # tensor name -> the open file that has it
        shards = self._shards(folder)
        for path in sorted(set(shards.values())) if shards else [folder / "model.safetensors"]:
            if not path.exists():
                raise self._absent(folder, path, sharded=bool(shards))
            file = open_safetensors(path)
            for name in file.keys():  # noqa: SIM118 - it is not a mapping
                tensor = file.get_slice(name)
                self.shapes[name], self._files[name] = tuple(tensor.get_shape()), file
                self.dtypes[name] = _DTYPES.get(tensor.get_dtype(), torch.uint8)
        for name in shards:
            if name not in self.shapes:
                raise bad_value(
                    str(shards[name]),
                    expected=f"the tensor {name!r}, as the index says",
                    received="none of that name",
                    remedy="fetch the shards again",
                )

    @staticmethod
    def _shards(folder: Path) -> dict[str, Path]:
        """The shard of each tensor, from the index; empty if the weights are one file."""
        index = folder / "model.safetensors.index.json"
        if (folder / "model.safetensors").exists() or not index.exists():
            return {}
        table = read_json(index)
        shards = table.get("weight_map") if isinstance(table, dict) else None
        if not isinstance(shards, dict) or not shards:
            raise damaged(index, "no weight_map", what="the index of a sharded model")
        for file in shards.values():
            if not isinstance(file, str) or Path(file).name != file:
                raise bad_value(str(index), expected="names of files beside it", received=repr(file))
        return {name: folder / file for name, file in shards.items()}

    @staticmethod
    def _absent(folder: Path, path: Path, *, sharded: bool) -> ValueError:
        """The error for a weight file that does not exist."""
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


class StateDict:
    """The tensors of a module that is in memory, as they are."""

    def __init__(self, where: str, tensors: Mapping[str, Tensor]) -> None:
        self.where, self._tensors = where, tensors
        self.shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        self.dtypes = {name: tensor.dtype for name, tensor in tensors.items()}

    def read(self, name: str) -> Tensor:
        """The tensor itself."""
        return self._tensors[name]
