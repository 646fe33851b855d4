"""Rows of q and k from one order of rotary pairs to the other: the turned layer computes the same."""

from __future__ import annotations

import pytest
import torch
from layouts.originals import ORIGINALS, randomised

from regard import MultiHeadAttention, layouts
from regard.positions import Rotary


@pytest.mark.parametrize("width", [10, 6])
@pytest.mark.parametrize("qk_norm", [None, "rms"])
@torch.no_grad()
def test_a_turned_layer_computes_the_same(width: int, qk_norm: str | None) -> None:
    def layer(interleaved: bool) -> MultiHeadAttention:
        encoding = Rotary(10, width=width, interleaved=interleaved)
        made = randomised(
            MultiHeadAttention(14, 6, num_kv_heads=3, head_dim=10, qk_norm=qk_norm, position_encoding=encoding),
            1,  # type: ignore[arg-type]
        )
        assert isinstance(made, MultiHeadAttention)
        return made

    interleaved, halves = layer(True), layer(False)
    x = torch.randn(2, 7, 14, dtype=torch.float64)
    assert not torch.allclose(interleaved(x), halves(x))
    expected = halves(x)
    torch.testing.assert_close(layouts.rotary_pairs(interleaved, to="interleaved")(x), expected, rtol=1e-12, atol=1e-12)
    assert layouts.rotary_pairs(layouts.rotary_pairs(halves, to="interleaved"), to="halves") is halves
    torch.testing.assert_close(halves(x), expected, rtol=0, atol=0)


def test_a_weight_is_given_back_anew() -> None:
    weight = torch.randn(12, 5)
    turned = layouts.rotary_pairs(weight, 2, to="halves")
    assert [int((weight == row).all(1).nonzero()) for row in turned] == [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]
    assert torch.equal(layouts.rotary_pairs(turned, 2, to="interleaved"), weight)
    partly = layouts.rotary_pairs(torch.arange(12), 2, to="halves", width=4)
    assert partly.tolist() == [0, 2, 1, 3, 4, 5, 6, 8, 7, 9, 10, 11]


@torch.no_grad()
def test_load_turns_interleaved_rows_to_halves() -> None:
    original = ORIGINALS["llama"]
    theirs = randomised(original.make(), 1)
    state = dict(theirs.state_dict())
    stored = {
        **state,
        "q_proj.weight": layouts.rotary_pairs(state["q_proj.weight"], 6, to="interleaved"),
        "k_proj.weight": layouts.rotary_pairs(state["k_proj.weight"], 3, to="interleaved"),
    }
    ours = layouts.load(stored, 6, rotary_pairs="interleaved", **original.options())
    x = torch.randn(2, 7, 42, dtype=torch.float64)
    torch.testing.assert_close(ours(x, **original.call), original.run(theirs, x), rtol=1e-10, atol=1e-10)
    left = layouts.load(stored, 6, rotary_pairs="interleaved", position_encoding=Rotary(10, interleaved=True))
    assert torch.equal(left.q_proj.weight, stored["q_proj.weight"])
    torch.testing.assert_close(left(x, **original.call), ours(x, **original.call), rtol=1e-10, atol=1e-10)


def test_errors() -> None:
    with pytest.raises(ValueError, match=r'to: expected "halves" or "interleaved", received \'half\''):
        layouts.rotary_pairs(torch.ones(6), 1, to="half")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="num_heads: expected a divisor of the 6 rows, received None"):
        layouts.rotary_pairs(torch.ones(6))
    with pytest.raises(ValueError, match="num_heads: expected a divisor of the 6 rows, received 4"):
        layouts.rotary_pairs(torch.ones(6), 4)
    with pytest.raises(ValueError, match="width: expected an even number up to the head's width 3, received 3"):
        layouts.rotary_pairs(torch.ones(6), 2)
    with pytest.raises(ValueError, match="width: expected an even number up to the head's width 6, received 8"):
        layouts.rotary_pairs(torch.ones(6), 1, width=8)
