"""Read the header of a GGUF file: its metadata fields, and the offset of each tensor. The format, little-endian::

    "GGUF"   version u32, number of tensors u64, number of fields u64
    fields   name, type u32, value                        a string is its length u64 and its bytes in UTF-8;
    tensors  name, axes u32, axes x u64, type u32,        an array is its type u32, its length u64 and its values
             offset u64                                   (the fastest axis comes first; offsets count from `data`)
    padding to a multiple of general.alignment (32), then `data`

`gguf.GGUFReader` makes a numpy array of every value: gguf 0.19 takes 3 to 4 s to open smollm2, this file 0.2 s (98,000
strings of its tokenizer). The package is used for tensor types and dequantisation, in `gguf_file.py`.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, NamedTuple

__all__ = ["Header", "TensorInfo", "read_header"]

_ALIGNMENT = 32
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


class TensorInfo(NamedTuple):
    """The shape of a tensor (slowest axis first), its type number, and the offset of its bytes in the file."""

    shape: tuple[int, ...]
    kind: int
    start: int


@dataclass(frozen=True)
class Header:
    """The header of a GGUF file."""

    version: int
    fields: dict[str, Any]
    tensors: dict[str, TensorInfo]


_MAX_DEPTH = 8  # of arrays within arrays


def read_header(file: memoryview) -> Header:
    """Parse the header. Raises ValueError if it is not a GGUF header or is truncated."""
    reader = _Reader(file)
    if bytes(file[:4]) != b"GGUF":
        raise ValueError("it does not begin with GGUF")
    reader.at = 4
    version = reader.scalar("I")
    if version not in (2, 3):
        raise ValueError(f"version {version}; supported are 2 and 3")
    count, fields_count = reader.scalar("Q"), reader.scalar("Q")
    fields = {}
    for _ in range(fields_count):
        name = reader.string()
        if name in fields:
            raise ValueError(f"the field {name!r} occurs twice")
        fields[name] = reader.value(reader.scalar("I"))
    tensors = {}
    for _ in range(count):
        name, axes = reader.string(), reader.scalar("I")
        if name in tensors:
            raise ValueError(f"the tensor {name!r} occurs twice")
        if axes > 8:
            raise ValueError(f"the tensor {name!r} has {axes} axes")
        shape = tuple(reversed(reader.scalars(f"{axes}Q")))
        tensors[name] = TensorInfo(shape, reader.scalar("I"), reader.scalar("Q"))
    alignment = fields.get("general.alignment", _ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError(f"alignment {alignment}")
    data = -(-reader.at // alignment) * alignment
    return Header(version, fields, {name: info._replace(start=data + info.start) for name, info in tensors.items()})


class _Reader:
    """Reads values one after another; `at` is the offset of the next one."""

    def __init__(self, file: memoryview) -> None:
        self.file, self.at = file, 0

    def advance(self, size: int) -> int:
        """Move past `size` bytes and return where they start."""
        start = self.at
        self.at += size
        if self.at > len(self.file):
            raise ValueError(f"it ends after {len(self.file)} bytes, within its header")
        return start

    def scalars(self, form: str) -> tuple[Any, ...]:
        return struct.unpack_from(f"<{form}", self.file, self.advance(struct.calcsize(f"<{form}")))

    def scalar(self, form: str) -> Any:
        return self.scalars(form)[0]

    def string(self) -> str:
        start = self.advance(self.scalar("Q"))
        return str(self.file[start : self.at], "utf-8")

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            inner, length = self.scalar("I"), self.scalar("Q")
            if depth >= _MAX_DEPTH:
                raise ValueError(f"arrays within arrays, more than {_MAX_DEPTH} deep")
            if length > len(self.file):
                raise ValueError(f"an array of {length} values in a file of {len(self.file)} bytes")
            if inner in _SCALARS:
                return list(self.scalars(f"{length}{_SCALARS[inner]}"))
            return [self.value(inner, depth + 1) for _ in range(length)]
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        raise ValueError(f"a value of the unknown type {kind}")
