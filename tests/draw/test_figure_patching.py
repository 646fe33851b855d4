"""The figure of a sweep: its scores as they are, with layers, heads and tokens named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from regard.draw.figure import figure
from regard.heads import Patching

matplotlib = pytest.importorskip("matplotlib")
from draw.figures import axes, texts  # noqa: E402


def result(*shape: int, **known: Any) -> Patching:
    generator = torch.Generator().manual_seed(3)
    raw = {f"blocks.{i}.attention": torch.randn(shape, generator=generator) for i in range(3)}
    return Patching.of(raw, 2.0, -1.0, **known)


def test_layers_down_and_heads_across(tmp_path: Path) -> None:
    one = result(5)
    drawn = figure(one, path=tmp_path / "sweep.png")
    image = axes(drawn, "patching").images[0]
    torch.testing.assert_close(torch.tensor(image.get_array()), one.matrix())
    assert [label.get_text() for label in axes(drawn, "patching").get_yticklabels()] == ["0", "1", "2"]
    assert [label.get_text() for label in axes(drawn, "patching").get_xticklabels()] == ["0", "1", "2", "3", "4"]
    assert one.caption() in texts(drawn)
    assert (tmp_path / "sweep.png").read_bytes()[:4] == b"\x89PNG"


def test_by_token_the_heads_with_the_largest_scores() -> None:
    one = result(11, 7, tokens=["a", "cat", "sat", "on", "the", "mat", "."])
    drawn = axes(figure(one), "patching")
    data = torch.tensor(drawn.images[0].get_array())
    assert data.shape == (24, 7)
    names = [label.get_text() for label in drawn.get_yticklabels()]
    for name, row in zip(names, data, strict=True):
        layer, head = map(int, name.split("."))
        torch.testing.assert_close(row, one.matrix()[layer, head])
    largest = one.matrix().abs().amax(-1).flatten().sort(descending=True).values
    assert data.abs().amax(-1).min() == largest[23]
    assert [label.get_text() for label in drawn.get_xticklabels()] == one.tokens


def test_refused() -> None:
    with pytest.raises(ValueError, match="head: expected none, for a result of patching is drawn as a whole, received"):
        figure(result(5), head=0)
    with pytest.raises(ValueError, match="tokens: expected 7 of them, received 2"):
        figure(result(5, 7), ["a", "b"])
    with pytest.raises(ValueError, match=r"width: expected at least 1\.\d inches, for 5 columns, received 0.9"):
        figure(result(5), width=0.9)
