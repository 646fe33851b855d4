"""Which heads change between two records."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regard
from regard.heads import Record
from regard.heads.analysis import difference as module
from regard.heads.analysis.alignment import aligned


class Attend(nn.Module):
    """Attention on q and k as they are given, so that the weights are known."""

    def forward(self, q: Tensor, k: Tensor, mask: Any = None) -> Tensor:
        return regard.attend(q, k, k, scale=1.0, mask=mask)


def watched(q: Tensor, k: Tensor, tokens: list[str] | None = None, keep: Any = "qk", mask: Any = None) -> Record:
    model = Attend()
    with regard.watch(model, keep=keep) as seen, torch.no_grad():
        model(q, k, mask)
    seen.tokens = tokens
    return seen


def scored(scores: list[list[float]], tokens: list[str] | None = None) -> Record:
    """One head with these scores: the queries are rows of a unit matrix."""
    table = torch.tensor(scores)
    return watched(torch.eye(len(scores))[None, None], table.T[None, None].contiguous(), tokens)


def test_closed_form() -> None:
    """Two keys whose scores differ by 1 have the weights [1, e] / (1 + e): the other way round they differ by
    (e - 1) / (e + 1)."""
    first, second = scored([[0.0, 1.0], [0.0, 0.0]]), scored([[1.0, 0.0], [0.0, 0.0]])
    (head,) = first.difference(second)
    large, small = math.e / (1 + math.e), 1 / (1 + math.e)
    assert head.change == pytest.approx((large - small) / 2, rel=1e-5)  # of one of two queries
    assert head.query == (0, 0)
    assert sorted([head.before, head.after]) == pytest.approx([small, large])
    assert head.elsewhere == pytest.approx((0.0, 0.0), abs=1e-6)
    assert head.measures["entropy"] == pytest.approx(0.0, abs=1e-6)


def test_a_key_that_one_text_has_alone() -> None:
    """ "a b" and "a x b": of query b the mass on x, 1/3, is elsewhere."""
    even = [[0.0] * 3 for _ in range(3)]
    first, second = scored([row[:2] for row in even[:2]], ["a", "b"]), scored(even, ["a", "x", "b"])
    change = first.difference(second)
    assert (change.shared, change.of) == (2, (2, 3))
    (head,) = change
    assert head.change == pytest.approx(1 / 3, rel=1e-5)  # half of |1/2 - 1/3| * 2 + 1/3
    assert head.elsewhere == pytest.approx((0.0, 1 / 3), abs=1e-6)
    assert (head.before, head.after) == (pytest.approx(1 / 2), pytest.approx(1 / 3))
    assert "2 shared tokens, of 2 and 3" in str(change)


def dense(a: Tensor, b: Tensor, pairs: list[tuple[int, int]]) -> Tensor:
    """The mean distance (H,) of dense weights (H, N, M), by the definition."""
    rows, cols = zip(*pairs, strict=True)
    x, y = a.double()[:, rows][:, :, rows], b.double()[:, cols][:, :, cols]
    elsewhere = (x.sum(-1) - y.sum(-1)).abs()
    return ((x - y).abs().sum(-1) + elsewhere).div(2).mean(-1)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("strip", [2**22, 1])
def test_texts_of_different_lengths(causal: bool, strip: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STRIP", strip)
    torch.manual_seed(0)
    texts = tuple(text.split() for text in ("the cat that i saw ran away", "the old cat that you saw today ran off"))
    mask = regard.masks.Causal() if causal else None
    records = [
        watched(torch.randn(1, 6, len(text), 5), torch.randn(1, 3, len(text), 5), text, mask=mask) for text in texts
    ]
    change = records[0].difference(records[1])
    expected = dense(*(record[0].weights(batch=0) for record in records), aligned(*texts))
    for head in change:
        assert head.change == pytest.approx(float(expected[head.head]), abs=2e-6)
        a, b = (
            record[0].weights(head.head, q, k, batch=0)
            for record, q, k in zip(records, head.query, head.key, strict=True)
        )
        assert (head.before, head.after) == (pytest.approx(float(a), abs=1e-6), pytest.approx(float(b), abs=1e-6))
        assert [text[q] for text, q in zip(texts, head.query, strict=True)] == [head.words[0]] * 2
    assert [head.change for head in change] == sorted((head.change for head in change), reverse=True)


def test_a_planted_change_comes_first() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(regard.MultiHeadAttention(15, num_heads=5) for _ in range(2)))
    other = copy.deepcopy(model)
    with torch.no_grad():
        other[1].q_proj.weight[9:12] *= -3  # head 3 of layer 1
    x, records = torch.randn(1, 7, 15), []
    for one in (model, other):
        with regard.watch(one, keep="qk") as seen, torch.no_grad():
            one(x)
        records.append(seen)
    change = records[0].difference(records[1])
    assert (change.heads[0].number, change.heads[0].head) == (1, 3)
    assert all(head.change < 1e-6 for head in change.heads[1:])
    assert change[1, 3] is change.heads[0]
    assert change["1", 3] is change.heads[0]
    assert records[0].difference(records[0]).heads[0].change == 0.0
    assert len(change.table()) == 10
    with pytest.raises(KeyError, match=r"no head 7"):
        change[1, 7]


def test_padding_is_left_out() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(2, 3, 5, 7), torch.randn(2, 3, 5, 7)
    keep = torch.tensor([[False, False, True, True, True], [True] * 5])
    padded = watched(q, k, [["a", "b", "c"], ["a", "b", "c", "d", "e"]], mask=regard.masks.Padding(keep=keep))
    alone = watched(q[:1, :, 2:], k[:1, :, 2:], ["a", "b", "c"])
    change = padded.difference(alone)
    assert change.of == (3, 3)
    assert all(head.change < 1e-6 for head in change)
    with pytest.raises(ValueError, match=r"item: expected a text from 0 to 0, received 1"):
        padded.difference(alone, item=1)


def test_token_ids_align_where_tokens_are_not_known(tiny_decoder: Any) -> None:
    records = []
    for ids in ([3, 5, 7, 11], [3, 2, 5, 7, 11]):
        with regard.watch(tiny_decoder, keep="qk") as seen, torch.no_grad():
            tiny_decoder(torch.tensor([ids]))
        records.append(seen)
    change = records[0].difference(records[1])
    assert (change.shared, change.of) == (4, (4, 5))


@pytest.fixture
def tiny_decoder() -> Any:
    torch.manual_seed(0)
    model = nn.ModuleDict({"embed": nn.Embedding(13, 6), "attention": regard.MultiHeadAttention(6, num_heads=2)})

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = model

        def forward(self, input_ids: Tensor) -> Tensor:
            return self.parts["attention"](self.parts["embed"](input_ids))

    return Decoder()


def test_errors() -> None:
    torch.manual_seed(0)
    q = torch.randn(1, 3, 5, 7)
    seen = watched(q, q)
    with pytest.raises(TypeError, match=r"other: expected what `regard.watch` gives, received int"):
        seen.difference(3)
    with pytest.raises(
        ValueError, match=r"other: expected 1 layers with 3 heads, as in this record, received 1 layers with 2"
    ):
        seen.difference(watched(q[:, :2], q[:, :2]))
    with pytest.raises(ValueError, match=r'other: expected q and k of every layer, received none kept in .*keep="qk"'):
        seen.difference(watched(q, q, keep=None))
    shorter = watched(q[:, :, 1:], q[:, :, 1:])
    with pytest.raises(
        ValueError, match=r"tokens: expected known for both texts, which differ in length, received 5 and 4"
    ):
        seen.difference(shorter)
    seen.tokens, shorter.tokens = list("abcde"), list("vwxy")
    with pytest.raises(ValueError, match=r"difference: expected texts that share words, received two without a common"):
        seen.difference(shorter)
