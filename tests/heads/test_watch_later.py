"""What a watch measured is in memory as the kernel wrote it, and becomes measures when it is read."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regard
from regard.heads.capture import capture
from regard.heads.capture.module_stack import Frame
from regard.kernels import native_library as library
from regard.masks import Causal
from regard.measures import Measurements

pytestmark = pytest.mark.skipif(library.load() is None, reason="other kernels hand out strips")

B, N, W, H = 2, 11, 24, 3


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(5, W)
        self.layers = nn.ModuleList(regard.MultiHeadAttention(W, H) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = x + layer(x, mask=Causal())
        return x


def watched(ids: Tensor, **options: Any) -> regard.Record:
    model = Model()
    with torch.no_grad(), regard.watch(model, **options) as seen:
        model(ids)
    return seen


def first_text(seen: regard.Record, layer: int) -> Any:
    return seen[layer].text


def read(seen: regard.Record) -> list[dict[str, Any]]:
    return [dict(layer.values) for layer in seen]


def same(a: list[dict[str, Any]], b: list[dict[str, Any]]) -> bool:
    pairs = [(x, y) for one, other in zip(a, b, strict=True) for x, y in zip(one.values(), other.values(), strict=True)]
    return all(torch.equal(x, y) for x, y in pairs)


def is_pending(seen: regard.Record) -> bool:
    return not any(isinstance(layer.text.pieces[0].measurements, Measurements) for layer in seen)


def test_nothing_is_computed_until_it_is_read() -> None:
    seen = watched(torch.randint(0, 5, (B, N)))
    assert is_pending(seen)
    read(seen)
    assert not is_pending(seen)


def waiting(seen: regard.Record) -> list[Any]:
    assert seen._filing is not None
    return seen._filing.waiting


def uniform(seen: regard.Record) -> list[dict[str, Any]]:
    return [dict(layer.uniform.values) for layer in seen if layer.uniform is not None]


def test_ids_that_are_written_over_before_anything_is_filed_do_not_matter() -> None:
    model, ids = Model(), torch.randint(0, 5, (B, N))
    expected = watched(ids.clone())
    with torch.no_grad(), regard.watch(model) as seen:
        model(ids)
        ids.zero_()
        assert len(waiting(seen)) == 2
    assert len(uniform(seen)) == 2
    assert same(uniform(seen), uniform(expected))
    assert same(read(seen), read(expected))
    assert torch.equal(seen[0].text.ids, expected[0].text.ids)


def test_one_forward_waits_at_most() -> None:
    """A text that is read again and again must not stay in memory each time."""
    model, ids = Model(), torch.randint(0, 5, (B, N))
    with torch.no_grad(), regard.watch(model) as seen:
        for n in range(3, 8):
            model(ids[:, :n])
            assert len(waiting(seen)) == 2
    assert seen[0].texts == 1


def test_ids_that_are_written_over_afterwards_do_not_matter() -> None:
    ids = torch.randint(0, 5, (B, N))
    expected = watched(ids.clone())
    counts = expected[0].counts
    seen = watched(ids)
    ids.zero_()
    assert same(read(seen), read(expected))
    assert all(torch.equal(seen[0].counts[name], count) for name, count in counts.items())


@pytest.mark.parametrize("inside", [True, False])
def test_inference_mode_ends_before_or_after_reading(inside: bool) -> None:
    ids = torch.randint(0, 5, (B, N))
    expected = read(watched(ids))
    with torch.inference_mode():
        seen = watched(ids)
        values = read(seen) if inside else None
    assert same(values or read(seen), expected)


def test_a_record_keeps_no_values_alive() -> None:
    model, ids, values = Model(), torch.randint(0, 5, (B, N)), []
    for layer in model.layers:
        layer.register_forward_pre_hook(lambda module, inputs: values.append(weakref.ref(inputs[0])))
    with torch.no_grad(), regard.watch(model) as seen:
        model(ids)
    gc.collect()
    assert is_pending(seen)
    assert all(x() is None for x in values)


def test_a_record_can_be_copied_and_pickled_before_it_is_read() -> None:
    seen = watched(torch.randint(0, 5, (B, N)))
    copied, pickled = copy.deepcopy(seen), pickle.loads(pickle.dumps(seen))
    assert is_pending(seen)
    expected = read(seen)
    assert same(read(copied), expected)
    assert same(read(pickled), expected)


@pytest.mark.parametrize("steady", [False, True])
def test_queries_and_keys_of_our_own_layers_are_kept_as_they_are(monkeypatch: Any, steady: bool) -> None:
    monkeypatch.setattr(capture, "LARGE", 1 if steady else 2**40)
    made: list[Tensor] = []
    observed = capture.AttentionCapture.describe

    def describe(self: Any, *args: Any, **known: Any) -> Any:
        attention: Any = observed(self, *args, **known)
        made.append(attention.call.k)
        assert attention.steady is steady
        return attention

    by_plan = regard.watch.see_by_plan

    def see_by_plan(self: Any, plan: Any, frame: Any, q: Tensor, k: Tensor, v: Tensor) -> Any:
        made.append(k)
        return by_plan(self, plan, frame, q, k, v)

    monkeypatch.setattr(capture.AttentionCapture, "describe", describe)
    monkeypatch.setattr(regard.watch, "see_by_plan", see_by_plan)
    model, ids = Model(), torch.randint(0, 5, (B, N))
    with torch.no_grad(), regard.watch(model) as seen:
        model(ids)
    for layer in range(2):
        keys = first_text(seen, layer).keys[0]
        assert torch.equal(keys, made[layer])
        assert (keys.data_ptr() == made[layer].data_ptr()) is steady


def test_tensors_that_others_hold_are_not_kept_as_they_are() -> None:
    """Inputs, parts of larger tensors, and what a cache may write over."""
    x, q, k, v = torch.randn(B, N, W), *torch.randn(3, B, N, W).unbind()
    module = nn.Identity()

    def frame(*args: Any, **kwargs: Any) -> Frame:
        return Frame(module, "", args, kwargs)

    assert frame(x, mask=Causal()).made(q, k, v)  # all of one tensor's memory
    assert not frame(x).made(q, k)
    assert not frame(x).made(q, k, v, x)
    assert frame(torch.randn(2)).made(x)
    assert not frame(x, cache=regard.KVCache()).made(q, k, v)


def test_a_layer_with_a_cache_is_kept_in_copies(monkeypatch: Any) -> None:
    monkeypatch.setattr(capture, "LARGE", 1)
    torch.manual_seed(0)
    layer, cache, x = regard.MultiHeadAttention(W, H), regard.KVCache(), torch.randn(B, N, W)
    with torch.no_grad(), regard.watch(layer) as seen:
        layer(x, mask=Causal(), cache=cache)
    keys = first_text(seen, 0).keys[0]
    before = keys.clone()
    assert cache.keys is not None
    cache.keys.zero_()
    assert before.any()
    assert torch.equal(keys, before)
