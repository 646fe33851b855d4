"""`direct_logits`: what heads write, as logits, head by head and key by key."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from heads import hf_models
from heads.hf_models import some_ids
from heads.oracle_hands import drawn
from heads.tiny_models import EXPERTS, HYBRID, tiny
from torch import Tensor, nn

import regard
from regard.heads.interventions.direct_logits import direct_logits
from regard.masks import Causal
from regard.models import Decoder, ModelConfig


def model_of(kind: str) -> Any:
    if kind == "ours":
        sizes: dict[str, Any] = {"layers": 2, "embed_dim": 42, "num_heads": 6, "num_kv_heads": 3, "head_dim": 14}
        return drawn(Decoder(ModelConfig(**sizes, vocabulary=97, inner=47, context=37, causal=True, norm="rms")))
    return tiny("Gemma2ForCausalLM", {}) if kind == "gemma2" else hf_models.model(kind)


@pytest.mark.parametrize("kind", ["ours", "llama", "gpt2", "gemma2"])
def test_heads_are_the_sum_over_their_keys(kind: str) -> None:
    """Weights times what each key would add; with norms after the heads, too."""
    model, ids, position, tokens = model_of(kind), some_ids(1, 13)[0], 7, [2, 3, 5]
    found = direct_logits(model, ids, position, tokens)
    with torch.no_grad():
        out = model(ids[None])
    logits = (out if isinstance(out, Tensor) else out.logits)[0, position, tokens].double()
    if found.softcap is not None:
        logits = found.softcap * torch.atanh(logits / found.softcap)
    torch.testing.assert_close(found.sums, logits, atol=1e-4, rtol=1e-5)
    assert len(found.layers) == 2
    for layer in found.layers:
        of_keys = found.of_keys(layer)
        assert of_keys.shape == (layer.heads, 13, 3)
        weights = layer.weights(rows=position, batch=0).double()  # (H, M)
        right = found.writes[layer.name][0] @ found.directions[layer.name].mT
        assert right.abs().min() > 1e-7, "heads that add nothing prove nothing"
        torch.testing.assert_close(torch.einsum("hm,hmt->ht", weights, of_keys), right, atol=1e-5, rtol=1e-4)


class Halved(nn.Module):
    """A layer that halves the stream before it adds to it."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = regard.MultiHeadAttention(15, 3)

    def forward(self, x: Tensor) -> Any:
        return x / 2 + self.attention(x, mask=Causal())


class HalvedStream(nn.Module):
    """Two of these, without a norm at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(31, 15), nn.Linear(15, 31)
        self.blocks = nn.Sequential(Halved(), Halved())

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.blocks(self.embedding(ids)))


def test_a_stream_that_is_scaled_on_its_way() -> None:
    """What the first layer adds is halved by the second."""
    torch.manual_seed(0)
    model, tokens = HalvedStream(), [2, 3, 5]
    found = direct_logits(model, torch.arange(7), -1, tokens)
    rows = model.head.weight[tokens].double()
    torch.testing.assert_close(found.directions["blocks.1.attention"], rows, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(found.directions["blocks.0.attention"], rows / 2, atol=1e-6, rtol=1e-5)


def test_tokens_by_the_logits() -> None:
    model, ids = model_of("ours"), some_ids(1, 13)[0]
    found = direct_logits(model, ids, -1, lambda logits: logits.topk(3).indices.tolist())
    with torch.no_grad():
        assert found.tokens == model(ids[None])[0, -1].topk(3).indices.tolist()
    assert found.sums.tolist() == sorted(found.sums.tolist(), reverse=True)


def test_a_gate_between_the_heads_and_the_projection() -> None:
    found = direct_logits(tiny("Qwen3NextForCausalLM", EXPERTS | HYBRID), some_ids(1, 13)[0], -1, [2])
    with pytest.raises(
        ValueError, match="expected heads whose outputs enter the output projection as they are, received"
    ):
        found.of_keys(found.layers[-1])
