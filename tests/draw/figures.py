"""Records with given weights, and what a figure of them shows."""

from __future__ import annotations

import io
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import regard
from regard.heads import Record

matplotlib = pytest.importorskip("matplotlib")
from matplotlib.image import AxesImage, imread  # noqa: E402
from matplotlib.text import Text  # noqa: E402

MAGIC = {".png": b"\x89PNG\r\n\x1a\n", ".svg": b"<?xml", ".pdf": b"%PDF-"}
KINDS = ("heads", "head", "roles", "offsets", "entropy")
NASTY = [
    *("$math$", "$", r"\frac{a}{b}", "__init__", "##ing", "%s{}", "&<>\"'", "<|endoftext|>"),
    *("日本語", "한국어", "ไทย", "مرحبا", "می\u200cخواهم", "שלום", "\U0001f469\u200d\U0001f680", "👍🏽", "\ufe0f"),
    *("a\nb\tc\0", "\x1b[31m", "\u202eabc", "\ud83d", "\U0010fffd", "\u0301", "e" + "\u0301" * 50, "", "  "),
    *("x" * 10_000, "漢" * 5_000),
]


class Given(nn.Module):
    """Attention with given weights: their logarithms as queries, keys that pick them out."""

    def __init__(self, weights: Tensor, causal: bool) -> None:
        super().__init__()
        m = weights.shape[-1]
        self.q = weights.clamp(min=1e-35).log()  # (B, H, N, M), so scores q k^T / sqrt(M) are these logarithms
        self.k = (torch.eye(m) * math.sqrt(m)).expand(*weights.shape[:2], m, m)
        self.causal = causal

    def forward(self) -> Tensor:
        return F.scaled_dot_product_attention(self.q, self.k, self.k, is_causal=self.causal)


def random_weights(*shape: int, causal: bool = False, seed: int = 0) -> Tensor:
    """(B, H, N, M)"""
    scores = 3 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    if causal:
        scores = scores.masked_fill(torch.ones(shape[-2:]).triu(1).bool(), -math.inf)
    return scores.softmax(-1)


def record(*layers: Tensor, causal: bool = False, **options: Any) -> Record:
    """What is seen of layers with given weights."""
    model = nn.Module()
    model.blocks = nn.ModuleList(Given(weights, causal) for weights in layers)
    model.forward = lambda: [block() for block in model.blocks]  # type: ignore[method-assign]
    with regard.watch(model, **{"keep": "qk", **options}) as seen, torch.no_grad():
        model()
    return seen


def shifted(n: int) -> Tensor:
    """A head that looks at the token before, (1, 1, n, n)."""
    return torch.eye(n).roll(1, 0).index_put((torch.tensor(0),), torch.eye(n)[0])[None, None]


def options(kind: str) -> dict[str, Any]:
    return {"kind": kind, **({"layer": 0, "head": 1} if kind == "head" else {})}


def image(drawn: Any, label: str) -> Tensor:
    """The map with a label."""
    (found,) = drawn.findobj(lambda artist: isinstance(artist, AxesImage) and artist.get_label() == label)
    return torch.from_numpy(found.get_array().data)


def texts(drawn: Any) -> list[str]:
    return [text.get_text() for text in drawn.findobj(Text) if text.get_text()]


def axes(drawn: Any, label: str) -> Any:
    (found,) = [ax for ax in drawn.axes if ax.get_label() == label]
    return found


def ticks(axis: Any) -> list[str]:
    return [label.get_text() for label in axis.get_ticklabels()]


def png(drawn: Any) -> Any:
    """The picture as an array of pixels."""
    return imread(io.BytesIO(drawn._repr_png_()))
