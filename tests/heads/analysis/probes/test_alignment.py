"""Cross-attention along the diagonal, by construction, and other ways to attend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from heads import hf_models
from torch import Tensor, nn

import regard
from regard.heads import probes
from regard.masks import Padding

PLACES = 23
NAME = "attention"


class Crossing(nn.Module):
    """Each head attends from query i to key `looks[head](i)`; None for equal weights."""

    def __init__(self, looks: list[Callable[[int], int] | None]) -> None:
        super().__init__()
        self.attention = regard.MultiHeadAttention(PLACES, len(looks), head_dim=PLACES, bias=False, scale=1.0)
        q = torch.zeros(len(looks), PLACES, PLACES)
        for head, look in enumerate(looks):
            for i in range(PLACES) if look is not None else ():
                q[head, look(i) % PLACES, i] = 40.0
        with torch.no_grad():
            self.attention.q_proj.weight.copy_(q.flatten(0, 1))
            self.attention.k_proj.weight.copy_(-torch.eye(PLACES).repeat(len(looks), 1))

    def forward(self, queries: Tensor, keys: Tensor, keep: Tensor | None = None) -> Any:
        """`queries` (B, N) and `keys` (B, M): their places. (What is equal to the queries would be self-attention.)"""
        x, y = (F.one_hot(places, PLACES).float() for places in (queries, keys))
        return self.attention(x, -y, mask=None if keep is None else Padding(keep=keep))


def places(n: int, batch: int = 1) -> Tensor:
    return torch.arange(n).expand(batch, -1)


def brute_force(weights: Tensor) -> dict[str, float]:
    """Of one head (N, M), pair by pair."""
    n, m = weights.shape
    near = torch.tensor([[abs(j * n - i * m) <= max(n, m) for j in range(m)] for i in range(n)]).double()
    mean = weights.double().mean(0)
    target = weights.argmax(1).tolist()
    pairs = [(a, b) for a in range(n) for b in range(n) if a != b]
    return {
        "diagonal": float((weights * near).sum() / n),
        "permuted": float((mean * near).sum() / n),
        "uniform": float(near.sum() / n / m),
        "monotonic": sum(target[i + 1] >= target[i] for i in range(n - 1)) / (n - 1),
        "by chance": sum(target[b] >= target[a] for a, b in pairs) / len(pairs),
    }


def check(result: Any, layer: str, weights: list[Tensor]) -> None:
    """`weights`: of each text (H, N, M), without padding."""
    columns = {"diagonal": result.scores, "permuted": result.baseline, **result.more}
    for head in range(weights[0].shape[0]):
        right = [brute_force(text[head]) for text in weights]
        for name, column in columns.items():
            mean = sum(numbers[name] for numbers in right) / len(right)
            assert column[layer][head].item() == pytest.approx(mean, abs=1e-5), (name, head)
        by_text = [numbers["diagonal"] for numbers in right]
        assert result.by_run[layer][:, head].tolist() == pytest.approx(by_text, abs=1e-5)


@pytest.mark.parametrize("n, m", [(7, 17), (17, 7), (11, 11)])
def test_planted_heads(n: int, m: int) -> None:
    """On the diagonal; against it; always on one key; on all alike; forward, at half the pace."""
    looks = [lambda i: i * m // n, lambda i: m - 1 - i * m // n, lambda i: 3, None, lambda i: i * m // n // 2]
    model = Crossing(looks)
    with regard.watch(model, keep="qk") as seen, torch.no_grad():
        model(places(n), places(m))
    assert seen[NAME].kind == "cross"
    result = probes.alignment(seen)
    check(result, NAME, [seen[NAME].weights(batch=0)])
    diagonal, monotonic = result[NAME].tolist(), result.more["monotonic"][NAME].tolist()
    assert diagonal[0] == pytest.approx(1.0)
    assert monotonic == [1, pytest.approx(0 if m >= n else 1 - (m - 1) / (n - 1)), 1, 1, 1]
    for head in (2, 3):  # it makes no difference in which order the queries are
        assert diagonal[head] == pytest.approx(result.baseline[NAME][head].item(), abs=1e-6)
        assert result.more["by chance"][NAME][head] == 1.0
    assert diagonal[3] == pytest.approx(result.more["uniform"][NAME][3].item(), abs=1e-6)
    assert result.best() == [(NAME, 0)]
    assert diagonal[1] < 0.5 > diagonal[4]


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding(side: str) -> None:
    """Texts of a padded batch are as they are alone."""
    torch.manual_seed(0)
    layer = regard.MultiHeadAttention(12, 3).double()
    layer.q_proj.weight.data *= 5
    x, y = torch.randn(2, 11, 12).double(), torch.randn(2, 17, 12).double()
    sizes = [(11, 13), (7, 17)]
    part = {"right": lambda n, size: slice(0, size), "left": lambda n, size: slice(n - size, n)}[side]
    query_keep, keep = torch.zeros(2, 11, dtype=torch.bool), torch.zeros(2, 17, dtype=torch.bool)
    for b, (n, m) in enumerate(sizes):
        query_keep[b, part(11, n)], keep[b, part(17, m)] = True, True
    with regard.watch(layer, keep="qk") as seen, torch.no_grad():
        layer(x, y, mask=Padding(keep=keep))
    result = probes.alignment(seen, query_keep=query_keep)
    weights = seen[0].weights()
    check(result, seen.layers[0], [weights[b][:, part(11, n)][..., part(17, m)] for b, (n, m) in enumerate(sizes)])


def test_a_model_and_its_batches() -> None:
    """One result for each text; a text with one query says nothing."""
    model = Crossing([lambda i: i, lambda i: 3]).train()
    batches = [(places(7, 2), places(7, 2)), {"queries": places(5), "keys": places(11)}, (places(1), places(7))]
    result = probes.alignment(model, batches)
    assert model.training
    assert result.runs == ("text 0", "text 1", "text 2")
    weights = [
        F.one_hot(torch.stack([places(n)[0], torch.full((n,), 3)]), m).float() for n, m in [(7, 7), (7, 7), (5, 11)]
    ]
    check(result, NAME, weights)
    assert result.spread[NAME][0] > 0.1
    assert str(result).startswith("weight within one step of the diagonal: mean over 3 texts\nlayer ")
    columns = ["layer", "head", "diagonal", "baseline", "spread", "uniform", "monotonic", "by chance"]
    assert list(result.table()[0]) == columns


@pytest.mark.parametrize("family", ["bart", "t5"])
def test_their_encoders_with_decoders(family: str) -> None:
    """The padding of the decoder is found in its self-attention."""
    model = hf_models.model(family)
    ids, target = hf_models.some_ids(2, 13), hf_models.some_ids(2, 7)
    keep, target_keep = torch.ones(2, 13, dtype=torch.int64), torch.ones(2, 7, dtype=torch.int64)
    keep[1, 11:], target_keep[1, 5:] = 0, 0
    inputs = {
        "input_ids": ids,
        "attention_mask": keep,
        "decoder_input_ids": target,
        "decoder_attention_mask": target_keep,
        "use_cache": False,
    }
    result = probes.alignment(model, [inputs])
    with regard.watch(model, keep="qk") as seen, torch.no_grad():
        model(**inputs)
    cross = [layer for layer in seen if layer.kind == "cross"]
    assert list(result.scores) == [layer.name for layer in cross]
    assert len(cross) == 2
    for layer in cross:
        weights = layer.weights()
        check(result, layer.name, [weights[0], weights[1][:, :5, :11]])


def test_what_cannot_be_asked() -> None:
    model = Crossing([None])
    with regard.watch(model, keep="qk") as seen:
        model(places(5), places(7))
    with pytest.raises(ValueError, match="batches: expected none beside a record, received list"):
        probes.alignment(seen, [])
    with pytest.raises(
        ValueError, match=r"query_keep: expected booleans of shape \(1, 5\), received torch.bool of shape"
    ):
        probes.alignment(seen, query_keep=torch.ones(1, 7, dtype=torch.bool))
    with pytest.raises(ValueError, match="alignment: expected a model with batches, or a record, received no batches"):
        probes.alignment(model)
    with pytest.raises(
        ValueError, match="alignment: expected a model with batches, or a record, received a model with q"
    ):
        probes.alignment(model, [], query_keep=torch.ones(1, 5, dtype=torch.bool))
    with pytest.raises(
        ValueError, match="alignment: expected texts of two queries and two keys at least, received none"
    ):
        probes.alignment(model, [(places(1), places(7))])
    with pytest.raises(TypeError, match="source: expected a record or a model, received int"):
        probes.alignment(5)  # type: ignore[arg-type]
    with regard.watch(model) as kept_nothing:
        model(places(5), places(7))
    with pytest.raises(ValueError, match='weights: expected a watch with keep="qk"'):
        probes.alignment(kept_nothing)
    layer = regard.MultiHeadAttention(12, 3)
    with regard.watch(layer, keep="qk") as alone:
        layer(torch.randn(1, 5, 12))
    with pytest.raises(ValueError, match="source: expected cross-attention, received none that was seen"):
        probes.alignment(alone)
