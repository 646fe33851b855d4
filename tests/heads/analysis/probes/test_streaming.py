"""Attention limited to sinks and a window: heads that do not notice, and heads that do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from heads import hf_models
from heads.oracle_hands import Hand, W, by_operator
from heads.planted import PlantedDecoder, PlantedHead, after_its_copy, before, on_first

import regard
from regard import models
from regard.heads import probes
from regard.masks import Causal, Prefix, Window
from regard.models import EMBEDDED

WITH_SMOLLM2 = pytest.mark.skipif(EMBEDDED["smollm2"].folder() is None, reason="the weights of it are not installed")

LAYER, V, CONTEXT = "blocks.0.attention", 31, 61


def planted(writes: bool = True) -> PlantedDecoder:
    """Heads 0 to 2 stream: on the token before, on the one three before, on the first. Heads 3 to 5 do not: on the
    token after the copy, on the one 13 before, on all alike."""
    heads = [
        before(CONTEXT),
        before(CONTEXT, 3),
        on_first(CONTEXT),
        after_its_copy(V),
        before(CONTEXT, 13),
        PlantedHead(),
    ]
    for head in heads:
        head.writes = torch.eye(V) if writes else None
    return PlantedDecoder(V, CONTEXT, heads)


def thirteen_before(tokens: list[int], i: int, allowed: list[int]) -> torch.Tensor:
    """What head 4 gives at a query: the token 13 before if it is allowed, else the mean of what is."""
    places = [i - 13] if i - 13 in allowed else allowed
    return torch.eye(V)[[tokens[j] for j in places]].mean(0)


def test_planted_heads() -> None:
    """Tokens come again after 17: a window of 5 holds no copy, and nothing 13 before."""
    seeds = [0, 1, 2]
    result = probes.streaming(planted(), sinks=2, window=5, length=17, seeds=seeds)
    change, outside = result[LAYER].tolist(), result.more["outside"][LAYER].tolist()
    assert change[:3] == pytest.approx([0.0] * 3, abs=1e-6)
    assert outside[:3] == pytest.approx([0.0] * 3, abs=1e-6)
    queries, right = range(7, 34), []
    for seed in seeds:
        tokens = probes.repeated(V, length=17, batch=1, seed=seed)[0].tolist()
        full = torch.stack([thirteen_before(tokens, i, list(range(i + 1))) for i in queries])
        less = torch.stack([thirteen_before(tokens, i, [0, 1, *range(i - 4, i + 1)]) for i in queries])
        right.append(float((full - less).norm() / full.norm()))
    assert result.by_run[LAYER][:, 4].tolist() == pytest.approx(right, abs=1e-5)
    assert change[4] == pytest.approx(sum(right) / 3, abs=1e-5)
    assert result.spread[LAYER][4].item() == pytest.approx(torch.tensor(right).std(correction=0).item(), abs=1e-5)
    assert outside[4] == pytest.approx((even_outside(range(7, 13)) + 19) / len(queries), abs=1e-6)  # (13, 14: on sinks)
    assert change[3] > 0.5
    # Head 5 is uniform: its own baseline.
    assert change[5] == pytest.approx(result.baseline[LAYER][5].item(), abs=1e-6)
    assert outside[5] == pytest.approx(even_outside(queries) / len(queries), abs=1e-6)
    assert result.more["uniform"][LAYER].tolist() == pytest.approx([outside[5]] * 6, abs=1e-6)
    assert {head for _, head in result.streaming_heads()} == {0, 1, 2}
    assert {head for _, head in result.best(3)} == {0, 1, 2}


def even_outside(queries: range) -> float:
    """What equal weights on keys up to the query give to what 2 sinks and a window of 5 leave out, summed."""
    return sum((i + 1 - 7) / (i + 1) for i in queries)


def test_against_attend() -> None:
    """The same by hand, for each head and a layer with fewer kv heads."""
    torch.manual_seed(0)
    config = models.ModelConfig(
        layers=2, embed_dim=12, num_heads=6, num_kv_heads=3, vocabulary=31, inner=7, context=61, causal=True
    )
    model = models.Decoder(config).double()
    for parameter in model.parameters():
        parameter.data *= 3
    ids = probes.repeated(31, length=11, batch=1)
    result = probes.streaming(model, [ids[0]], sinks=2, window=5)
    with torch.no_grad(), regard.watch(model, keep="qkv") as seen:
        model(ids)
    for layer in seen:
        mask = Causal() & (Window(5) | Prefix(2))
        limited = regard.attend(layer.q, layer.k, layer.v, mask=mask)
        slices = layer.projection[0].unflatten(1, (6, -1)).permute(1, 2, 0)  # type: ignore[index]
        full, less = (x[:, :, 7:] @ slices for x in (layer.output, limited))
        right = ((full - less).square().sum((0, 2, 3)) / full.square().sum((0, 2, 3))).sqrt()
        torch.testing.assert_close(result[layer.name], right.float(), atol=1e-6, rtol=1e-5)
        inside = (layer.weights() * mask.dense(22, 22)).sum(-1)[:, :, 7:]
        torch.testing.assert_close(result.more["outside"][layer.name], (1 - inside).mean((0, 2)).float())
        assert (right > 0.01).all(), "heads that do not change prove nothing"


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding(side: str) -> None:
    """Padding changes nothing: the sinks are the first tokens, and padding queries do not count."""
    model, ids = planted(), probes.repeated(V, length=17, batch=1)[0]
    right = probes.streaming(model, [ids], sinks=2, window=5)
    other = torch.full((3,), next(token for token in range(V) if token not in ids))
    keep, pad = torch.ones(34, dtype=torch.bool), torch.zeros(3, dtype=torch.bool)
    if side == "right":
        padded, keep = torch.cat([ids, other]), torch.cat([keep, pad])
    else:
        padded, keep = torch.cat([other, ids]), torch.cat([pad, keep])
    result = probes.streaming(model, [padded], sinks=2, window=5, keep=keep[None])
    heads = [0, 1, 3, 4, 5] if side == "left" else list(range(6))  # head 2 attends to slot 0, which is padding then
    for name in ("outside", "uniform"):
        torch.testing.assert_close(result.more[name][LAYER][heads], right.more[name][LAYER][heads])
    if side == "right":
        torch.testing.assert_close(result[LAYER], right[LAYER])


def test_heads_that_write_nothing() -> None:
    """Their change is 0, not NaN."""
    result = probes.streaming(planted(writes=False), sinks=2, window=5, length=17)
    assert result[LAYER].tolist() == [0.0] * 6


@pytest.mark.parametrize("which", ["llama", "gpt2", "gpt_oss"])
def test_other_models(which: str) -> None:
    """In a window nearly as long as the text little changes; with learned sinks, too."""
    model: Any = hf_models.model(which)
    ids = torch.arange(29)
    little = probes.streaming(model, [ids], sinks=2, window=5, use_cache=False)
    nothing = probes.streaming(model, [ids], sinks=1, window=27, use_cache=False)
    for layer in list(nothing.scores)[1:]:  # (the first of gpt_oss has a window of its own)
        assert (little[layer] > 0.01).all()
        # the last query alone is limited, and one key of 29 is hidden from it
        assert (nothing[layer] < little[layer]).all()
        assert nothing.more["uniform"][layer].tolist() == pytest.approx([1 / 29] * len(nothing[layer]), abs=1e-6)


def test_the_caption_and_the_table() -> None:
    result = probes.streaming(planted(), sinks=2, window=5, length=17)
    assert str(result).startswith("change by 2 sinks and a window of 5: mean over 2 texts\nlayer ")
    assert list(result.table()[0]) == ["layer", "head", "change", "baseline", "spread", "outside", "uniform"]
    assert result.runs == ("random tokens, seed 0", "random tokens, seed 1")


def test_what_cannot_be_asked() -> None:
    model: Any = planted().train()
    with pytest.raises(
        ValueError, match=r"texts\[1\]: expected more than 7 tokens, sinks and window, received 7 tokens"
    ):
        probes.streaming(model, [torch.arange(8), torch.arange(7)], sinks=2, window=5)
    with pytest.raises(ValueError, match="window: expected at least 1, received 0"):
        probes.streaming(model, window=0)
    with pytest.raises(ValueError, match="sinks: expected at least 0, received -1"):
        probes.streaming(model, sinks=-1)
    with pytest.raises(ValueError, match="seeds: expected one at least, received none"):
        probes.streaming(model, seeds=[])
    with pytest.raises(TypeError, match=r"texts: expected a list of texts or of token ids \(N,\), received Tensor"):
        probes.streaming(model, torch.arange(8))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"texts\[0\]: expected a text or token ids \(N,\), received int"):
        probes.streaming(model, [5])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="tokenizer: expected one, for the model has none of its own, received none"):
        probes.streaming(model, ["a text"])
    assert model.training


def test_attention_written_by_hand_is_refused() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hand = Hand(by_operator)
            self.embedding = torch.nn.Embedding(31, W)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.hand(self.embedding(ids))

    with pytest.raises(ValueError, match="expected queries, keys and values that can be kept, received attention writ"):
        probes.streaming(Model(), [torch.arange(11)], sinks=2, window=5)


@WITH_SMOLLM2
@pytest.mark.slow
def test_streaming_heads_of_smollm2(smollm2: Any) -> None:
    """Its best induction heads change most of all, by nearly all that they give."""
    result = probes.streaming(smollm2, seeds=[0])
    last = [(row["layer"], row["head"]) for row in result.table()[-40:]]
    assert {("blocks.18.attention", 6), ("blocks.17.attention", 3)} <= set(last)
    assert result["blocks.18.attention"][6] > 0.5
