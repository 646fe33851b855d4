"""Heads that write against the tokens they attend to, by construction, and heads that do not."""

from __future__ import annotations

from typing import Any

import pytest
import tokenizers
import torch
from heads import hf_models
from heads.planted import PlantedDecoder, PlantedHead, after_its_copy, on_copies, on_first
from torch import Tensor

from regard.heads import probes
from regard.heads.analysis.probes.copy_suppression import TEXTS
from regard.heads.interventions.direct_logits import direct_logits
from regard.models import EMBEDDED

WITH_SMOLLM2 = pytest.mark.skipif(EMBEDDED["smollm2"].folder() is None, reason="the weights of it are not installed")

LAYER, V = "blocks.0.attention", 31
TEXT = torch.tensor([2, 3, 5, 7, 11, 3, 5])  # the token after the copy of 5 is 7
T, M = 5, 7


def planted() -> PlantedDecoder:
    """Heads that attend to copies or to what came after them, and write against it; one that copies; one that writes
    against all tokens alike; one that is on the first token, one on all, and one that writes nothing."""
    against, eye = -torch.eye(V), torch.eye(V)
    heads = [
        after_its_copy(V, writes=against),
        on_copies(V, against),
        after_its_copy(V, writes=2 * eye),
        after_its_copy(V, writes=-torch.ones(V, V)),
        on_first(13),
        PlantedHead(writes=against),
        after_its_copy(V),
    ]
    heads[4].writes = against
    return PlantedDecoder(V, 13, heads)


def test_planted_heads() -> None:
    """-1 for the token itself, over the mean of five tokens; equal weights give a seventh to the first token."""
    result = probes.copy_suppression(planted(), [TEXT])
    own = 1 - 1 / T
    assert result[LAYER].tolist() == pytest.approx([-own, -own, 2 * own, 0, 0, -own * (M - 1) / M, 0], abs=1e-6)
    even = own * (M - 1) / M
    assert result.baseline[LAYER].tolist() == pytest.approx([-even, -even, 2 * even, 0, -even, -even, 0], abs=1e-6)
    assert result.more["against"][LAYER][[0, 1, 2, 3, 5, 6]].tolist() == pytest.approx([1, 1, 0, 0, 1, 0], abs=1e-6)
    assert {head for _, head in result.best(2)} == {0, 1}
    assert result.table()[-1]["head"] == 2


def test_several_texts() -> None:
    """The token after the copy of 5 is 7, with four others; then there is no copy, and attention is even."""
    result = probes.copy_suppression(planted(), [TEXT, torch.tensor([2, 3, 5])])
    assert result.runs == ("texts[0]", "texts[1]")
    assert result.by_run[LAYER][:, 0].tolist() == pytest.approx([-(1 - 1 / 5), -(1 - 1 / 3) * 2 / 3], abs=1e-6)
    assert result[LAYER][0].item() == pytest.approx(-(4 / 5 + 4 / 9) / 2, abs=1e-6)
    assert result.spread[LAYER][0].item() == pytest.approx((4 / 5 - 4 / 9) / 2, abs=1e-6)


def test_random_tokens() -> None:
    """Without texts and a tokenizer: 13 tokens, and 12 of them again."""
    model, caught = PlantedDecoder(V, 25, [after_its_copy(V, writes=-torch.eye(V))]), []
    model.register_forward_pre_hook(lambda _, args: caught.append(args[0]))
    result = probes.copy_suppression(model, seeds=[0, 1, 2])
    assert result[LAYER].tolist() == pytest.approx([-(1 - 1 / 13)], abs=1e-6)
    assert torch.equal(caught[1][0], probes.repeated(V, length=13, batch=1, seed=1)[0, :-1])


def test_texts() -> None:
    """The default ones, by the model's own tokenizer."""
    words = [word for text in TEXTS for word in text.split()]
    vocabulary = {word: i for i, word in enumerate(["<unk>", *dict.fromkeys(words), "a"])}
    tokenizer: Any = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, "<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    size = len(vocabulary) + 1
    model: Any = PlantedDecoder(size, 17, [on_copies(size, -torch.eye(size) / 2), PlantedHead()])
    caught: list[Tensor] = []
    model.register_forward_pre_hook(lambda _, args: caught.append(args[0]))
    result = probes.copy_suppression(model, tokenizer=tokenizer)
    assert len(result.runs) == 12
    assert tokenizer.decode(caught[0][0].tolist()) == "When Mary and John went to the store, John gave a drink to"
    assert -0.5 < result[LAYER][0] < -0.4
    assert result[LAYER][1] == 0
    assert str(result).startswith("adds to the logits of the tokens attended to: mean over 12 texts\nlayer ")


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mistral"])
def test_against_hand(kind: str) -> None:
    """The logits with and without each key's part in a head's output, the last norm's scale held fixed."""
    model = hf_models.model(kind)
    ids = torch.tensor([5, 11, 7, 11, 13, 7, 2])
    result = probes.copy_suppression(model, [ids])
    run = direct_logits(model, ids, 6, list(range(97)))
    distinct = sorted(set(ids.tolist()))
    for layer in run.layers:
        of_keys, weights = run.of_keys(layer), layer.weights(rows=6, batch=0)
        right = torch.zeros(layer.heads, dtype=torch.float64)
        for key, token in list(enumerate(ids.tolist()))[1:]:
            right += weights[:, key] * (of_keys[:, key, token] - of_keys[:, key, distinct].mean(-1))
        torch.testing.assert_close(result[layer.name].double(), right, atol=1e-6, rtol=1e-5)
        assert right.abs().min() > 1e-6, "heads that add nothing prove nothing"


def test_what_cannot_be_asked() -> None:
    model = planted().train()
    with pytest.raises(
        ValueError, match=r"texts\[0\]: expected two different tokens after the first, received 3 tokens"
    ):
        probes.copy_suppression(model, [torch.tensor([2, 3, 3])])
    with pytest.raises(ValueError, match="model: expected a decoder with a last norm and a projection"):
        probes.copy_suppression(hf_models.model("bert"), [TEXT])
    probes.copy_suppression(model, [TEXT])
    assert model.training


@WITH_SMOLLM2
@pytest.mark.slow
def test_copy_suppression_in_smollm2(smollm2: Any) -> None:
    """Heads 23.3 and 24.4 write against what they attend to, in every text; with equal weights they would less."""
    result = probes.copy_suppression(smollm2)
    assert result.best(2) == [("blocks.23.attention", 3), ("blocks.24.attention", 4)]
    for layer, head in result.best(2):
        assert (result.by_run[layer][:, head] < -0.3).all()
        assert result[layer][head] < 1.5 * result.baseline[layer][head]
        assert result.more["against"][layer][head] > 0.9
