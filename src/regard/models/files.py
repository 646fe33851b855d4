"""Open and parse untrusted files: regular files only, and damaged ones raise a readable error.

Opening a pipe or a device in place of a file could block forever. JSON that is nested too deeply, or that has an
integer of ten thousand digits, raises something else than `JSONDecodeError`.
"""

from __future__ import annotations

import json
import os
import stat
from io import BufferedReader
from pathlib import Path
from typing import Any

from regard.errors import bad_value, is_panic, missing_extra

__all__ = ["check_regular", "damaged", "open_regular", "open_safetensors", "parse_json", "read_json"]


def damaged(path: str | os.PathLike[str], why: object, *, what: str = "a whole file") -> ValueError:
    """The error for a file that is not `what` it should be."""
    return bad_value(
        str(path),
        expected=what,
        received=f"one that is damaged or cut short ({why})",
        remedy="fetch or install it again",
    )


_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def check_regular(path: str | os.PathLike[str], mode: int | None = None) -> None:
    """Raise if the path is a folder, a pipe, a socket or a device. `mode`: the file's `st_mode`, if known."""
    mode = os.stat(path).st_mode if mode is None else mode
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "something else")
        raise bad_value(str(path), expected="a file", received=kind)


def open_regular(path: str | os.PathLike[str]) -> BufferedReader:
    """Open a file for reading bytes. Raises `OSError` as `open` does, and `ValueError` if it is not a regular file."""
    check_regular(path)  # (opening some devices has side effects)
    return open(path, "rb", opener=_open_checked)


def _open_checked(path: str, flags: int) -> int:
    """Open without blocking on pipes, and check again what was opened: the path may have been replaced meanwhile."""
    handle = os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
    try:
        check_regular(path, os.fstat(handle).st_mode)
    except BaseException:
        os.close(handle)
        raise
    return handle


def open_safetensors(path: str | os.PathLike[str], what: str = "a safetensors file") -> Any:
    """An open safetensors file: names, shapes and metadata. No tensor is read."""
    try:
        from safetensors import safe_open
    except ImportError as error:
        raise missing_extra("safetensors", "models") from error
    check_regular(path)
    try:
        return safe_open(str(path), framework="pt")
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        raise damaged(path, error, what=what) from error


def parse_json(text: str | bytes, path: str | os.PathLike[str], what: str = "JSON") -> Any:
    """Parse JSON text that came from the file at `path`."""
    try:
        return json.loads(text.decode("utf-8") if isinstance(text, bytes) else text)
    except RecursionError:
        raise damaged(path, "it is nested too deeply", what=what) from None
    except ValueError as error:  # not UTF-8, not JSON, or an integer with too many digits
        raise damaged(path, error, what=what) from error


def read_json(path: Path) -> Any:
    """Parse a JSON file."""
    try:
        with open_regular(path) as file:
            return parse_json(file.read(), path)
    except FileNotFoundError:
        raise bad_value(str(path.parent), expected=f"a folder with {path.name}", received="none in it") from None
