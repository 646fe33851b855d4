"""Pages of long texts: one pass for maps and links, bounded memory, progress; and heads that change between runs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any

import pytest
import torch

import regard
from regard.draw.page import page
from regard.draw.scene import Scene


def seen_of(layers: int, heads: int, tokens: int, seed: int = 0, change: float = 1.0) -> Any:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(*(regard.MultiHeadAttention(4 * heads, num_heads=heads) for _ in range(layers)))
    x = torch.randn(1, tokens, 4 * heads)
    with torch.no_grad():
        model[-1].q_proj.weight[4:8] *= change  # head 1 of the last layer
        with regard.watch(model, keep="qkv") as seen:
            model(x)
    return seen


def meta_of(content: str) -> dict[str, Any]:
    found = re.search(r'id="regard-meta">(.*?)</script>', content, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def test_maps_and_links_of_one_pass() -> None:
    panel = Scene(seen_of(1, 3, 211))[0]
    cells, (keys, weights) = panel.drawn(32, 16, 5)
    torch.testing.assert_close(cells, panel.pooled(32, 16))
    alone = panel.links(5)
    assert torch.equal(keys, alone[0])
    torch.testing.assert_close(weights, alone[1])


def test_a_crop_is_a_part_of_the_weights() -> None:
    panel = Scene(seen_of(1, 3, 97))[0]
    part = slice(11, 43), slice(5, 31)
    torch.testing.assert_close(panel.crop(2, *part), panel.weights(2, *part), atol=2e-6, rtol=2e-5)


def test_progress_rises_from_what_heads_do_to_the_end() -> None:
    shares: list[float] = []
    page({"a": seen_of(3, 2, 7), "b": seen_of(3, 2, 7, change=-2.0)}, progress=shares.append)
    assert shares == sorted(shares)
    assert shares[0] < 0.1
    assert shares[-1] == pytest.approx(1.0)
    assert len(shares) == 3 * 2 + 3 * 2 + 3  # roles, maps, differences
    stop = RuntimeError("stop")

    def stopping(share: float) -> None:
        raise stop

    with pytest.raises(RuntimeError, match="stop"):
        page(seen_of(1, 2, 5), progress=stopping)


def test_look_reports_reading_and_drawing(tmp_path: Any) -> None:
    shares: list[float] = []
    model = torch.nn.TransformerEncoderLayer(16, nhead=2, batch_first=True).eval()
    regard.look(model, text=torch.randn(1, 3, 16), show=False, html=tmp_path / "page.html", progress=shares.append)
    assert shares == sorted(shares)
    assert shares[-1] == pytest.approx(1.0)


def test_heads_that_change_are_in_the_page() -> None:
    first, second = seen_of(2, 3, 7), seen_of(2, 3, 7, change=-3.0)
    meta = meta_of(str(page({"first": first, "second": second})))
    (change,) = meta["changes"]
    expected = first.difference(second).heads[0]
    assert (change["runs"], change["shared"], change["of"]) == ([0, 1], 7, [7, 7])
    assert (change["heads"][0]["layer"], change["heads"][0]["head"]) == (1, 1)
    assert change["heads"][0]["change"] == pytest.approx(expected.change, rel=1e-3)
    assert change["heads"][0]["query"] == list(expected.query)
    assert len(change["heads"]) == 6
    assert "changes" not in meta_of(str(page(first)))


def test_runs_that_cannot_be_compared_say_why() -> None:
    (change,) = meta_of(str(page({"three": seen_of(1, 3, 7), "two": seen_of(1, 2, 7)})))["changes"]
    assert "expected 1 layers with 3 heads, as in this record, received 1 layers with 2 heads" in change["why"]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the peak of memory is read in Linux's unit")
@pytest.mark.system
def test_memory_is_bounded() -> None:
    """6,007 tokens of 4 heads: their weights would be 577 MB; the page needs less than half of that."""
    script = """
import resource, torch, regard
torch.manual_seed(0)
layer = regard.MultiHeadAttention(64, num_heads=4)
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
def drawn(tokens):
    with regard.watch(layer, keep="qkv") as seen, torch.no_grad():
        layer(torch.randn(1, tokens, 64))
    regard.draw.page(seen, limit=2_000_000)
drawn(300)
before = peak()
drawn(6007)
print(peak() - before)
"""
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert int(done.stdout) < 280e6
