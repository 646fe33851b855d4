"""Probes: random tokens that come twice, and what heads made for them give."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from heads import hf_models
from heads.oracle_hands import Hand, by_operator
from torch import Tensor, nn

from regard.heads.analysis import probes
from regard.models import EMBEDDED, Decoder, ModelConfig

WITH_SMOLLM2 = pytest.mark.skipif(EMBEDDED["smollm2"].folder() is None, reason="the weights of it are not installed")


@pytest.mark.parametrize("first", [None, 0, 13])
@pytest.mark.parametrize("times", [2, 3])
def test_repeated(times: int, first: int | None) -> None:
    """Each text is its own tokens, all of them different, over and over."""
    text = probes.repeated(31, length=7, times=times, batch=5, first=first)
    assert text.dtype == torch.int64
    if first is not None:
        assert (text[:, 0] == first).all()
        text = text[:, 1:]
        assert (text != first).all()
    assert text.shape == (5, 7 * times)
    parts = text.unflatten(1, (times, 7))
    assert (parts == parts[:, :1]).all()
    assert all(row.unique().numel() == 7 for row in parts[:, 0])
    assert text.min() >= 0
    assert text.max() < 31
    assert not torch.equal(text[0], text[1])


def test_repeated_is_the_same_again() -> None:
    assert torch.equal(probes.repeated(97), probes.repeated(97))
    assert not torch.equal(probes.repeated(97), probes.repeated(97, seed=1))
    assert probes.repeated(97).shape == (8, 100)


def test_every_token_may_be_drawn() -> None:
    """Of 8 tokens 7 are taken: over 64 texts each is there, and each is missing."""
    text = probes.repeated(8, length=7, batch=64)
    assert text.unique().tolist() == list(range(8))
    missing = {next(iter(set(range(8)) - set(row))) for row in text.tolist()}
    assert missing == set(range(8))


def test_probes_that_cannot_be() -> None:
    for wrong in ({"length": 0}, {"times": 1}, {"batch": 0}):
        with pytest.raises(ValueError, match="repeated: expected length >= 1, times >= 2, batch >= 1, received"):
            probes.repeated(97, **wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="vocabulary: expected more than 50 tokens, received 50"):
        probes.repeated(50)
    for first in (97, -1):
        with pytest.raises(ValueError, match=f"first: expected a token below 97, received {first}"):
            probes.repeated(97, first=first)


class Looks(nn.Module):
    """A language model of one layer, by hand. Head 0 looks at the token after the last copy, head 1 at the copy, head 2
    at the token before; where there is none, at itself. Head 3 looks at all alike, none of them later."""

    def __init__(self, vocabulary: int = 31) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 2)
        self.dropout = nn.Dropout(0.5)

    def forward(self, ids: Tensor) -> Tensor:
        batch, n = ids.shape
        scores = torch.full((batch, 4, n, n), -60.0)
        for b in range(batch):
            for i in range(n):
                copies = [j for j in range(i) if ids[b, j] == ids[b, i]]
                scores[b, 0, i, copies[-1] + 1 if copies else i] = 0
                scores[b, 1, i, copies[-1] if copies else i] = 0
                scores[b, 2, i, max(i - 1, 0)] = 0
                scores[b, 3, i] = 0
        scores = scores.masked_fill(~torch.ones(n, n, dtype=torch.bool).tril(), -torch.inf)
        v = self.dropout(self.embedding(ids))[:, None].expand(-1, 4, -1, -1)
        return F.scaled_dot_product_attention(v * 0, v * 0, v, attn_mask=scores).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("first", [None, 3])
def test_heads_made_for_it(first: int | None) -> None:
    """The means are over the second half alone, for the first has no copies: 7 queries of each text."""
    seen = probes.induction(Looks(), length=7, batch=5, first=first)
    layer, n = seen[0], 14 + (first is not None)
    assert layer.induction.shape == (5, 4, n)
    assert layer.counts["induction"].tolist() == [5 * 7] * 4
    even = sum(1 / (i + 1) for i in range(n - 7, n)) / 7
    for name, right in (("induction", [1, 0, 0, even]), ("duplicate", [0, 1, 0, even])):
        torch.testing.assert_close(layer.per_head(name), torch.tensor(right, dtype=torch.float32))
    before = torch.tensor([0, 0, (n - 1) / n, sum(1 / (i + 1) for i in range(1, n)) / n])
    torch.testing.assert_close(layer.per_head("previous"), before)
    roles = seen.roles()
    assert [one.role for one in roles] == ["induction", "duplicate", "previous", "broad"]
    assert roles[0].baseline == pytest.approx(sum(1 / i for i in range(n - 7, n)) / 7, abs=1e-6)  # (without the first)


def test_the_text_is_the_probe() -> None:
    """As `repeated` draws it, from the model's own vocabulary."""
    caught: list[Tensor] = []
    model = Looks()
    model.register_forward_pre_hook(lambda _, args: caught.append(args[0]))
    probes.induction(model, length=5, batch=3, first=7, seed=11)
    assert torch.equal(caught[0], probes.repeated(31, length=5, batch=3, first=7, seed=11))


def test_each_module_is_as_it_was() -> None:
    model = Looks().train()
    model.embedding.eval()
    probes.induction(model, length=5, batch=3)
    assert model.training
    assert model.dropout.training
    assert not model.embedding.training


@pytest.mark.parametrize("which", ["ours", "llama", "gpt2"])
def test_vocabularies(which: str) -> None:
    """By the configuration: 97 tokens, all of them may come."""
    if which == "ours":
        model: Any = Decoder(
            ModelConfig(layers=1, embed_dim=6, num_heads=3, vocabulary=97, inner=7, context=200, causal=True)
        )
    else:
        model = hf_models.model(which)
    seen = probes.induction(model, length=17, batch=3, **({} if which == "ours" else {"use_cache": False}))
    assert seen[0].induction.shape[::2] == (3, 34)
    with pytest.raises(ValueError, match="vocabulary: expected more than 97 tokens, received 97"):
        probes.induction(model, length=97)


def test_a_model_without_a_vocabulary() -> None:
    with pytest.raises(ValueError, match="model: expected one with an embedding of tokens, received Hand; remedy"):
        probes.induction(Hand(by_operator))


@WITH_SMOLLM2
@pytest.mark.slow
def test_induction_heads_of_smollm2(smollm2: Any) -> None:
    """The two that match best, of 270: elsewhere 0.94 and 0.81 were found; by the defaults it is 0.90 and 0.77."""
    rows = sorted(probes.induction(smollm2).table(), key=lambda row: -row["induction"])
    assert len(rows) == 30 * 9
    scores = {(row["layer"], row["head"]): row["induction"] for row in rows}
    top = list(scores)[:3]
    for layer, head, right in ((18, 6, 0.94), (17, 3, 0.81)):
        assert (f"blocks.{layer}.attention", head) in top
        assert scores[f"blocks.{layer}.attention", head] == pytest.approx(right, abs=0.05)
