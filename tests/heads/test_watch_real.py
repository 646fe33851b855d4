"""The two models with real weights: every measure of regard's and of transformers' is that of the eager maps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from heads.oracle import Oracle, agree, close, wanted
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM

import regard
from regard.models import EMBEDDED

TEXT = "The cat that I saw yesterday ran away, and the dog that I saw yesterday ran away, too."


def needs(name: str) -> Any:
    return pytest.mark.skipif(EMBEDDED[name].installed() is None, reason=f"the weights of {name} are not installed")


@pytest.fixture(scope="module")
def minilm() -> Any:
    ours = regard.models.load("minilm", check=False)
    return ours, AutoModel.from_pretrained(EMBEDDED["minilm"].folder() / "model").eval()  # type: ignore[operator]


@pytest.fixture(scope="module")
def smollm2() -> Any:
    one = EMBEDDED["smollm2"]
    theirs = AutoModelForCausalLM.from_pretrained(one.folder(), gguf_file=one.path, dtype=torch.float32).eval()
    return regard.models.load("smollm2", check=False), theirs


def eager(model: Any, ids: Tensor, **options: Any) -> list[Tensor]:
    """The weights of each layer, as transformers builds them."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            return list(model(ids, output_attentions=True, **options).attentions)
    finally:
        model.set_attn_implementation(before)


def check(
    model: nn.Module, ids: Tensor, maps: list[Tensor], atol: float, rows: Tensor | None = None, **options: Any
) -> None:
    with torch.no_grad(), regard.watch(model, measures=wanted(ids=True)) as seen:
        model(ids, **options)
    assert len(seen) == len(maps)
    for layer, weights in zip(seen, maps, strict=True):
        # positions weigh in by thousands of tokens: the mass itself is held to `atol`, a mean of them to more
        agree(layer, Oracle(weights, ids=ids), rows=rows, atol=atol)


@needs("minilm")
@pytest.mark.parametrize("whose", ["regard", "transformers"])
def test_minilm(minilm: Any, whose: str) -> None:
    ours, theirs = minilm
    ids = ours.encode(TEXT)
    check(ours if whose == "regard" else theirs, ids, eager(theirs, ids), atol=1e-5)


@needs("minilm")
@pytest.mark.parametrize("whose", ["regard", "transformers"])
def test_minilm_on_a_padded_batch(minilm: Any, whose: str) -> None:
    ours, theirs = minilm
    ids, keep = ours.encode_batch([TEXT, "A short one."])
    maps = eager(theirs, ids, attention_mask=keep.long())
    if whose == "regard":
        # (at padding the two differ: what is summed over all queries is not compared)
        with torch.no_grad(), regard.watch(ours, measures=wanted(ids=True)) as seen:
            ours(ids, keep=keep)
        for layer, weights in zip(seen, maps, strict=True):
            sums = ("received", "offsets", "heatmap", "divergence")
            agree(layer, Oracle(weights, ids=ids), rows=keep, without=sums, atol=3e-5)
    else:
        check(theirs, ids, maps, atol=1e-5, rows=keep, attention_mask=keep.long())


@needs("smollm2")
@pytest.mark.parametrize("whose", ["regard", "transformers"])
@pytest.mark.slow
def test_smollm2(smollm2: Any, whose: str) -> None:
    """(Thirty layers of float32 differ by rounding between two implementations: both are held to the same maps.)"""
    ours, theirs = smollm2
    ids = ours.encode(TEXT)
    check(ours if whose == "regard" else theirs, ids, eager(theirs, ids), atol=1e-5 if whose != "regard" else 2e-4)


@needs("smollm2")
@pytest.mark.slow
def test_smollm2_writing(smollm2: Any) -> None:
    """The map of what it wrote, token by token from its cache, is that of one forward over all of it."""
    ours, _ = smollm2
    with regard.watch(ours, measures=["entropy", "received", "induction"]) as seen:
        text = ours.generate(TEXT, 7)
    ids = torch.cat([ours.encode(TEXT), ours.encode(text)], 1)
    with torch.no_grad(), regard.watch(ours, measures=["entropy", "received", "induction"]) as once:
        ours(ids[:, :-1])
    for a, b in zip(seen, once, strict=True):
        for name in ("entropy", "received", "induction"):
            close(a[name], b[name], f"{a.name} {name}", 1e-3)
