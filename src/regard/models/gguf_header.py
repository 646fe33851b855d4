"""The header of a GGUF file: its fields, and where each tensor lies. All numbers are little-endian::

    "GGUF"  version u32  tensors u64  fields u64
    fields   name, type u32, value                        a string is its length u64 and its bytes in UTF-8;
    tensors  name, axes u32, axes x u64, type u32,        an array is its type u32, its length u64 and its values
             offset u64                                   (the fastest axis comes first; offsets count from `data`)
    padding to a multiple of general.alignment (32), then `data`

The package `gguf` reads the same, through an array per value: seconds for the hundred thousand strings of a tokenizer.
What it knows of the types of tensors and how to dequantise them is used in `gguf_file.py`.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, NamedTuple

__all__ = ["Header", "Stored", "read_header"]

_ALIGNMENT = 32
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


class Stored(NamedTuple):
    """One tensor: its shape (slowest axis first), its type's number, and where its bytes begin in the file."""

    shape: tuple[int, ...]
    kind: int
    start: int


@dataclass(frozen=True)
class Header:
    """What a GGUF file says of itself."""

    version: int
    fields: dict[str, Any]
    tensors: dict[str, Stored]


_DEEPEST = 8  # arrays within arrays


def read_header(file: memoryview) -> Header:
    """Read the header; raises ValueError in words where it is none, or ends too early."""
    reader = _Reader(file)
    if bytes(file[:4]) != b"GGUF":
        raise ValueError("it does not begin with GGUF")
    reader.at = 4
    version = reader.scalar("I")
    if version not in (2, 3):
        raise ValueError(f"version {version}, and 2 and 3 are known")
    count, fields_count = reader.scalar("Q"), reader.scalar("Q")
    fields = {}
    for _ in range(fields_count):
        name = reader.string()
        if name in fields:
            raise ValueError(f"the field {name!r} is there twice")
        fields[name] = reader.value(reader.scalar("I"))
    listed = {}
    for _ in range(count):
        name, axes = reader.string(), reader.scalar("I")
        if name in listed:
            raise ValueError(f"the tensor {name!r} is there twice")
        if axes > 8:
            raise ValueError(f"the tensor {name!r} has {axes} axes")
        shape = tuple(reversed(reader.scalars(f"{axes}Q")))
        listed[name] = Stored(shape, reader.scalar("I"), reader.scalar("Q"))
    alignment = fields.get("general.alignment", _ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError(f"alignment {alignment}")
    data = -(-reader.at // alignment) * alignment
    return Header(
        version, fields, {name: stored._replace(start=data + stored.start) for name, stored in listed.items()}
    )


class _Reader:
    """Values one after another; `at` is where the next begins."""

    def __init__(self, file: memoryview) -> None:
        self.file, self.at = file, 0

    def scalars(self, form: str) -> tuple[Any, ...]:
        start = self.at
        self.at += struct.calcsize(f"<{form}")
        if self.at > len(self.file):
            raise ValueError(f"it ends after {len(self.file)} bytes, within its header")
        return struct.unpack_from(f"<{form}", self.file, start)

    def scalar(self, form: str) -> Any:
        return self.scalars(form)[0]

    def string(self) -> str:
        length = self.scalar("Q")
        start = self.at
        self.at += length
        if self.at > len(self.file):
            raise ValueError(f"it ends after {len(self.file)} bytes, within its header")
        return str(self.file[start : self.at], "utf-8")

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            inner, length = self.scalar("I"), self.scalar("Q")
            if depth >= _DEEPEST:
                raise ValueError(f"arrays within arrays, more than {_DEEPEST} deep")
            if length > len(self.file):
                raise ValueError(f"an array of {length} values in a file of {len(self.file)} bytes")
            if inner in _SCALARS:
                return list(self.scalars(f"{length}{_SCALARS[inner]}"))
            return [self.value(inner, depth + 1) for _ in range(length)]
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        raise ValueError(f"a value of the unknown type {kind}")
