"""What changes without a head: compared with running the model without it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import regard
from regard.draw.effects import effects
from regard.draw.page import page
from regard.models import EMBEDDED


def load(name: str) -> Any:
    if EMBEDDED[name].installed() is None:
        pytest.skip(f"the weights of {name} are not installed")
    return regard.models.load(name, check=False)


def test_the_next_token(smollm2: Any) -> None:
    model = smollm2
    text = "When Mary and John went to the store, John gave a drink to"
    seen = regard.look(model, text=text, show=False)
    found = effects(seen.rerun, seen, [(23, 3), (0, 0)])
    assert found is not None
    assert found.kind == "next"
    ids = model.encode(text)
    with torch.no_grad():
        intact = model(ids)[0, -1].double().log_softmax(-1)
        with regard.ablate(model, {"blocks.23.attention": [3]}):
            without = model(ids)[0, -1].double().log_softmax(-1)
    token, probability = found.intact.top[0]
    assert token == " Mary"
    assert probability == pytest.approx(intact.exp().max().item(), abs=1e-5)
    assert found.heads[23, 3].top[0][1] == pytest.approx(without.exp().max().item(), abs=1e-4)
    divergence = (intact.exp() * (intact - without)).sum().item()
    assert found.heads[23, 3].change == pytest.approx(divergence, rel=1e-2)
    assert found.intact.change == 0.0


def test_the_vector_of_a_sentence_without_its_padding() -> None:
    model = load("minilm")
    texts = ["The cat that I saw yesterday ran away", "Dogs bark"]
    seen = regard.look(model, text=texts, show=False)
    found = effects(seen.rerun, seen, [(2, 8)], item=1)
    assert found is not None
    assert found.kind == "vector"
    assert found.intact.top == []
    ids = model.encode(texts[1])
    with torch.no_grad():
        intact = model(ids)[0].double().mean(0)
        with regard.ablate(model, {"blocks.2.attention": [8]}):
            without = model(ids)[0].double().mean(0)
    turned = 1 - torch.nn.functional.cosine_similarity(intact, without, dim=0).item()
    assert found.heads[2, 8].change == pytest.approx(turned, rel=1e-2)


def test_a_model_that_says_something_else_now() -> None:
    """A record of a model without a head: outside of the `ablate` its effects would be those of another model."""
    model = load("minilm")
    with regard.ablate(model, {"blocks.5.attention": [3]}):
        seen = regard.look(model, text="The cat ran away", show=False)
        assert effects(seen.rerun, seen, [(0, 0)]) is not None
    assert effects(seen.rerun, seen, [(0, 0)]) is None


def test_models_without_either() -> None:
    model = torch.nn.MultiheadAttention(16, 2, batch_first=True)

    class Pair(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = model

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, int]:
            return self.attention(x, x, x)[0], 1

    seen = regard.look(Pair(), text=torch.randn(1, 3, 16), show=False)
    assert seen.rerun is None
    assert "effects" not in page(seen).split('id="regard-meta">')[1].split("</script>")[0]


def test_a_record_is_saved_without_the_model(tmp_path: Any) -> None:
    seen = regard.look(load("minilm"), text="The cat ran away", show=False)
    seen.save(tmp_path / "record.safetensors")
    assert regard.heads.Record.load(tmp_path / "record.safetensors").rerun is None
