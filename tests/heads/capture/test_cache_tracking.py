"""A watch on `generate`: its steps are stitched to the map of one pass over the text, whatever the cache keeps."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from heads import hf_models
from heads.hf_models import DECODERS, SPECIAL
from heads.oracle import Oracle, agree, close, means, wanted
from torch import Tensor

import regard

NEW, PROMPT = 7, 11
GREEDY: dict[str, Any] = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False}


def prompt(*, padded: bool, seed: int = 17, tokens: int = PROMPT) -> dict[str, Tensor]:
    """Two prompts; where padded the second of 7 tokens, on the right."""
    ids = hf_models.some_ids(tokens=tokens, seed=seed)
    mask = torch.ones_like(ids)
    if padded:
        ids[1, : tokens - 7], mask[1, : tokens - 7] = SPECIAL["pad_token_id"], 0
    return {"input_ids": ids, "attention_mask": mask}


def whole(family: str, given: dict[str, Tensor], sequences: Tensor) -> tuple[dict[str, Oracle], Tensor]:
    """The oracles of one pass over prompt and new tokens but the last, which is never fed; and the rows that count."""
    text = sequences[:, :-1]
    fed = text.shape[1] - given["input_ids"].shape[1]
    mask = torch.cat([given["attention_mask"], torch.ones(text.shape[0], fed, dtype=torch.int64)], 1)
    model = hf_models.model(family, "eager", padded=not mask.all())
    full = {"input_ids": text, "attention_mask": mask}
    if "position_ids" in inspect.signature(model.forward).parameters:
        full["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
    return hf_models.eager(family, model, full), mask.bool()


def check(family: str, given: dict[str, Tensor], **options: Any) -> None:
    model = hf_models.model(family, padded=not given["attention_mask"].all())
    right = model.generate(**given, **GREEDY, **options)
    with regard.watch(model, measures=wanted(ids=True), keep="qk") as seen:
        sequences = model.generate(**given, **GREEDY, **options)
    assert torch.equal(sequences, right)
    assert sequences.shape[1] == given["input_ids"].shape[1] + NEW
    oracles, rows = whole(family, given, sequences)
    assert seen.layers == list(oracles)
    for name, oracle in oracles.items():
        agree(seen[name], Oracle(oracle.weights, ids=oracle.ids), rows=rows)
        weights, look = seen[name].weights(), rows[:, None] & oracle.seeing
        assert weights.shape == oracle.weights.shape
        close(weights[look], oracle.p[look], "weights")


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("family", DECODERS)
def test_a_cache_that_grows(family: str, padded: bool) -> None:
    check(family, prompt(padded=padded))


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral", "gemma2"])
def test_a_static_cache(family: str, padded: bool) -> None:
    """Its keys have room for all that comes; in Mistral (window 5) for the window."""
    check(family, prompt(padded=padded), cache_implementation="static")


@pytest.mark.parametrize("tokens", [3, 5, 13], ids=["below", "at", "beyond"])
@pytest.mark.parametrize("family", ["mistral", "gpt_oss"])
def test_a_cache_that_slides(family: str, tokens: int) -> None:
    """The prompt is shorter than the window (5), as long, longer; keys which slid out keep their numbers."""
    check(family, prompt(padded=False, tokens=tokens))


@pytest.mark.parametrize("family", ["llama", "bloom"])
def test_without_a_cache(family: str) -> None:
    """Each step reads the whole text again: the record is that of the last."""
    check(family, prompt(padded=False), use_cache=False)


def test_a_prompt_of_one_token() -> None:
    check("llama", prompt(padded=False, tokens=1))


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("family", ["t5", "bart", "fsmt"])
def test_encoder_and_decoder(family: str, padded: bool) -> None:
    given = hf_models.inputs(family, padded=padded)
    given = {name: given[name] for name in ("input_ids", "attention_mask") if name in given}
    model = hf_models.model(family)
    options = GREEDY | {"num_beams": 1}
    right = model.generate(**given, **options)
    with regard.watch(model, measures=wanted()) as seen:
        sequences = model.generate(**given, **options)
    assert torch.equal(sequences, right)
    full = given | {"decoder_input_ids": sequences[:, :-1], "use_cache": False}
    oracles = hf_models.eager(family, hf_models.model(family, "eager"), full)
    assert seen.layers == list(oracles)
    assert [seen[name].kind for name in seen.layers] == hf_models.kinds(family, seen.layers)
    for name, oracle in oracles.items():
        rows = hf_models.rows(family, name, given)
        agree(seen[name], Oracle(oracle.weights), kind=seen[name].kind, rows=rows)


@pytest.mark.parametrize("family", ["llama", "t5"])
def test_beams_are_refused(family: str) -> None:
    """They change places from step to step, and no record of one row is the record of one text."""
    given = prompt(padded=False)
    model = hf_models.model(family)
    with pytest.raises(ValueError, match=r"(?i)beam"), regard.watch(model):
        model.generate(**given, **GREEDY, num_beams=2)


def test_two_generates_become_means() -> None:
    first, second = prompt(padded=False), prompt(padded=True, seed=19, tokens=13)
    model = hf_models.model("llama", padded=True)
    with regard.watch(model, measures=["entropy", "distance", "previous", "itself", "on_first"]) as seen:
        sequences = [model.generate(**given, **GREEDY) for given in (first, second)]
    both = [whole("llama", given, s) for given, s in zip((first, second), sequences, strict=True)]
    for name in seen.layers:
        oracles = [o[name].blind(~rows) for o, rows in both]
        for measure in ("entropy", "distance", "previous", "itself", "on_first"):
            close(getattr(seen[name], measure), means(oracles, measure), measure)


def test_a_generate_and_a_forward_become_means() -> None:
    given, text = prompt(padded=False), hf_models.some_ids(3, 5)
    model, eager = hf_models.model("llama"), hf_models.model("llama", "eager")
    with regard.watch(model, measures=["entropy", "distance"]) as seen, torch.no_grad():
        sequences = model.generate(**given, **GREEDY)
        model(text)
    first, _ = whole("llama", given, sequences)
    second = hf_models.eager("llama", eager, {"input_ids": text})
    for name in seen.layers:
        for measure in ("entropy", "distance"):
            close(getattr(seen[name], measure), means([first[name], second[name]], measure), measure)


def test_steps_by_hand() -> None:
    """A loop of one's own with a cache is stitched as `generate` is: a prompt in two pieces, then tokens."""
    model, ids = hf_models.model("llama"), hf_models.some_ids(tokens=13)
    right = hf_models.eager("llama", hf_models.model("llama", "eager"), {"input_ids": ids})
    with regard.watch(model, measures=wanted(ids=True)) as seen, torch.no_grad():
        cache = None
        for piece in ids.split([5, 3, 1, 1, 3], dim=1):
            cache = model(piece, past_key_values=cache, use_cache=True).past_key_values
    for name, oracle in right.items():
        agree(seen[name], Oracle(oracle.weights, ids=ids))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral"])
def test_all_layers_read_the_same_texts_in_any_precision(family: str, dtype: torch.dtype) -> None:
    """Without a cache a text is read again and again; what later layers make of it is rounded otherwise."""
    model, ids = hf_models.model(family).to(dtype), hf_models.some_ids(3, 13)
    with regard.watch(model, measures=["entropy"]) as seen:
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=6,
            min_new_tokens=6,
            do_sample=False,
            use_cache=False,
        )
    assert [(layer.texts, layer.text.queries) for layer in seen] == [(1, out.shape[1] - 1)] * len(seen)
    assert seen.texts_differ() == ""


def test_another_text_that_is_one_longer_is_another_text() -> None:
    model = hf_models.model("llama").to(torch.bfloat16)
    with torch.no_grad(), regard.watch(model, measures=["entropy"]) as seen:
        model(hf_models.some_ids(2, 5))
        model(hf_models.some_ids(2, 6, seed=9))
    assert [layer.texts for layer in seen] == [2] * len(seen)
