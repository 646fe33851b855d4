"""Rectangles of the weights by the log-sum-exp that was measured."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regard
from regard.heads.record.crops import crop

pytestmark = pytest.mark.on_device

B, G, H, N, D = 2, 3, 6, 11, 5


class Attend(nn.Module):
    def forward(self, q: Tensor, k: Tensor, options: dict[str, Any]) -> Tensor:
        return regard.attend(q, k, k, **options)


def options(case: str) -> dict[str, Any]:
    keep = torch.ones(B, N, dtype=torch.bool)
    keep[1, 7:] = False
    return {
        "plain": {},
        "causal": {"mask": regard.masks.Causal()},
        "padding": {"mask": regard.masks.Padding(keep=keep)},
        "window": {"mask": regard.masks.Causal() & regard.masks.Window(3)},
        "nothing to see": {"mask": regard.masks.Keep(torch.arange(N)[:, None] > torch.arange(N))},
        "sinks": {"sinks": torch.randn(H)},
        "softcap": {"softcap": 2.0, "bias": regard.positions.Alibi(H)},
    }[case]


@pytest.mark.parametrize("case", ["plain", "causal", "padding", "window", "nothing to see", "sinks", "softcap"])
def test_as_the_whole_weights(case: str) -> None:
    torch.manual_seed(0)
    model = Attend()
    with regard.watch(model, keep="qk") as seen, torch.no_grad():
        model(torch.randn(B, H, N, D), torch.randn(B, G, N, D), options(case))
    text, rows, cols = seen[0].text, slice(2, 9), slice(3, 10)
    assert text is not None
    for item in range(B):
        whole = seen[0].weights(None, rows, cols, batch=item)
        together = crop(text, item, None, rows, cols)
        assert together is not None
        torch.testing.assert_close(together, whole, atol=2e-6, rtol=2e-5)
        for head in (0, 1, 5):
            single = crop(text, item, head, rows, cols)
            assert single is not None
            torch.testing.assert_close(single[0], whole[head], atol=2e-6, rtol=2e-5)
    assert crop(text, 0, None, slice(0, 1), slice(0, N)).sum(-1).isfinite().all()  # type: ignore[union-attr]


def test_none_where_the_sums_are_not_known(tmp_path: Any) -> None:
    torch.manual_seed(0)
    layer = regard.MultiHeadAttention(12, num_heads=3)
    with regard.watch(layer, keep="qk") as seen, torch.no_grad():
        layer(torch.randn(1, 7, 12))
    text = seen[0].text
    assert text is not None
    text.pieces[0].found.lse = None
    assert crop(text, 0, 1, slice(0, 3), slice(0, 3)) is None
