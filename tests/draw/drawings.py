"""Records with given weights, and what the terminal shows of them, read back."""

from __future__ import annotations

import io
import re
import unicodedata
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import regard
from regard.heads import Record

EDGES = [0.05, 0.15, 0.35, 0.65]
ESCAPE = re.compile(r"\x1b\[([0-9;]*)m")


class Given(nn.Module):
    """Heads that attend as they are told: their scores are the logarithms of the weights (B, H, N, M)."""

    def forward(self, weights: Tensor, hidden: Tensor | None) -> Tensor:
        eye = torch.eye(weights.shape[-1]).expand(*weights.shape[:2], -1, -1)
        return F.scaled_dot_product_attention(weights.clamp(min=1e-30).log(), eye, eye, attn_mask=hidden, scale=1.0)


class Stack(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Given() for _ in range(layers))

    def forward(self, weights: tuple[Tensor, ...], hidden: Tensor | None = None) -> None:
        for layer, one in zip(self.layers, weights, strict=True):
            layer(one, hidden)


def record(*weights: Tensor, visible: Tensor | None = None, **options: Any) -> Record:
    """Of a model whose layers have these weights."""
    model = Stack(len(weights))
    with regard.watch(model, **({"keep": "qk"} | options)) as seen, torch.no_grad():
        model(weights, visible)
    return seen


def noise(*shape: int, sharp: float = 5.0, seed: int = 0) -> Tensor:
    return (sharp * torch.rand(shape, generator=torch.Generator().manual_seed(seed))).softmax(-1)


def places(n: int, to: list[int]) -> Tensor:
    """(1, 1, n, n): query i looks at key to[i] alone."""
    return F.one_hot(torch.tensor(to), n).float()[None, None]


class Tty(io.StringIO):
    def isatty(self) -> bool:
        return True


# Reading a drawing back


def shown(line: str) -> str:
    return re.sub("[\u2066\u2069]", "", ESCAPE.sub("", line))


def wide(text: str) -> int:
    """How many columns: by Unicode's own tables, apart from what is drawn with."""
    return sum(
        0
        if unicodedata.category(c) in ("Mn", "Me", "Cf") or "\u1160" <= c <= "\u11ff" or "\ud7b0" <= c <= "\ud7ff"
        else 2
        if unicodedata.east_asian_width(c) in "WF"
        else 1
        for c in text
    )


def pixels(line: str) -> list[tuple[str, str, str]]:
    """A line's characters, each with the codes of its foreground and its background."""
    found, fore, back, at = [], "", "", 0
    for match in [*ESCAPE.finditer(line), None]:
        end = match.start() if match else len(line)
        found += [(c, fore, back) for c in line[at:end]]
        if match:
            at, codes = match.end(), match[1].split(";")
            while codes:
                first = codes.pop(0)
                if first == "0":
                    fore = back = ""
                elif first in ("38", "48"):
                    many = 4 if codes[0] == "2" else 2
                    colour, codes = ";".join(codes[:many]), codes[many:]
                    fore, back = (colour, back) if first == "38" else (fore, colour)
    return found


def rows_of(text: str, labels: list[str]) -> list[str]:
    """The lines of the first large map: those that begin with the labels."""
    lines = [line for line in text.splitlines() if "->" not in line]
    label = max(map(len, labels))
    found, at = [], 0
    for name in labels:
        at = next(i for i in range(at, len(lines)) if shown(lines[i])[: label + 1].rstrip() == name.rjust(label))
        found.append(lines[at])
        at += 1
    return found


WORDS = ["the", "tired", "cat", "sat", "down"]
