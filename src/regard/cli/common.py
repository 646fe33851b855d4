"""What verbs share: the consoles, common options, texts and heads as they are typed, loading a model, tables."""

from __future__ import annotations

import re
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from regard import models
from regard.errors import bad_value
from regard.heads.progress import track

out = Console(highlight=False, soft_wrap=True)
aside = Console(stderr=True, highlight=False)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}

Text = Annotated[str, typer.Argument(help="A text, a file with one, or - for standard input.")]
Model = Annotated[str, typer.Option("--model", "-m", help="minilm, smollm2, a folder, or a GGUF file.")]
Dtype = Annotated[str | None, typer.Option(help=f"{', '.join(DTYPES)}; as stored by default.")]
Check = Annotated[bool, typer.Option("--check/--no-check", help="Compare embedded weights with their known SHA-256.")]


def load_model(name: str, dtype: str | None, check: bool) -> Any:
    """A model with its weights; a bar shows the progress."""
    given = {"dtype": dtype_of(dtype), "check": check}
    return models.load(name, **given, progress=partial(track, what=f"Loading {name}"))


def dtype_of(name: str | None) -> torch.dtype | None:
    """A dtype by its name."""
    if name is not None and name not in DTYPES:
        raise bad_value("dtype", expected=f"one of {', '.join(DTYPES)}", received=repr(name))
    return None if name is None else DTYPES[name]


def text_of(argument: str) -> str:
    """The text that an argument names: standard input for -, the content of a file, or the argument itself."""
    content = sys.stdin.read() if argument == "-" else _file_content(argument)
    return argument if content is None else content


def lines_of(arguments: list[str]) -> list[str]:
    """The texts that arguments name; each line of a file or of standard input is one."""
    lines: list[str] = []
    for argument in arguments:
        content = sys.stdin.read() if argument == "-" else _file_content(argument)
        lines += [argument] if content is None else content.splitlines()
    if not lines:
        raise bad_value("texts", expected="at least one", received="none")
    return lines


def _file_content(argument: str) -> str | None:
    """The content of the file that an argument names; None if it is a text. One word with a slash or a suffix is taken
    for a file name."""
    try:
        path = Path(argument)
        exists = len(argument) < 4096 and path.exists()
    except (OSError, ValueError):  # too long for a file name, or with a character that none may have
        return None
    looks_like_name = re.fullmatch(r"\S*[/\\]\S*|\S+\.[A-Za-z]\w{0,9}", argument) is not None
    if not exists and not looks_like_name:
        return None
    if not exists:
        raise bad_value(
            "text",
            expected="a text, or a file that is there",
            received=f"no such file: {argument}",
            remedy="for a text that looks like a file name, give - and the text by standard input",
        )
    if path.is_dir():
        if not looks_like_name:
            return None  # (a word that is also the name of a folder)
        raise bad_value("text", expected="a text, or a file with one", received=f"a folder: {argument}")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise bad_value("text", expected="a file of text in UTF-8", received=f"other bytes in {argument}") from None


def heads_of(arguments: list[str], layers: int | None = None) -> dict[int, list[int]]:
    """Heads as they are typed, layer.head: 3.5 7.0 gives {3: [5], 7: [0]}."""
    heads: dict[int, list[int]] = {}
    for argument in arguments:
        layer, dot, head = argument.partition(".")
        if not (dot and layer.isdigit() and head.isdigit()):
            raise bad_value("head", expected="layer.head such as 3.5", received=repr(argument))
        if layers is not None and int(layer) >= layers:
            raise bad_value("head", expected=f"a layer below {layers}", received=repr(argument))
        heads.setdefault(int(layer), []).append(int(head))
    return heads


def table(*columns: str, left: int = 1) -> Table:
    """An empty table without lines; the first `left` columns are aligned to the left, the others to the right."""
    empty = Table(box=None, pad_edge=False, header_style="bold")
    for i, column in enumerate(columns):
        empty.add_column(column, justify="left" if i < left else "right", no_wrap=True)
    return empty
