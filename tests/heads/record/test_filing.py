"""Calls that are measured when they are seen, and filed when the record is read."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regard
from regard.heads.record.record import Record
from regard.kernels import native_library

pytestmark = pytest.mark.on_device

N, W, H, LAYERS = 11, 24, 3, 5
waits = pytest.mark.skipif(native_library.load() is None, reason="only the native kernel lets results wait")


class Stack(nn.Module):
    """Layers of regard on embedded tokens; `after` is called after each."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(29, W)
        self.layers = nn.ModuleList([regard.MultiHeadAttention(W, H) for _ in range(LAYERS)])
        self.after: Any = lambda number, x: None

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for number, layer in enumerate(self.layers):
            x = x + layer(x)
            self.after(number, x)
        return x


def ids(seed: int = 0, tokens: int = N) -> Tensor:
    return torch.randint(0, 29, (2, tokens), generator=torch.Generator().manual_seed(seed))


def waiting(seen: Record) -> int:
    return 0 if seen._filing is None else len(seen._filing.waiting)


def same(a: Record, b: Record) -> bool:
    names = ("entropy", "peak", "target", "received", "induction", "offsets")
    pairs = [(x[name], y[name]) for x, y in zip(a, b, strict=True) for name in names]
    return a.layers == b.layers and all(torch.equal(x, y) for x, y in pairs)


def each_at_once(model: Stack, *texts: Tensor, **options: Any) -> Record:
    """What is recorded if the record is read after each layer, so that nothing waits for long."""
    with torch.no_grad(), regard.watch(model, **options) as seen:
        model.after = lambda number, x: seen.layers
        for text in texts:
            model(text)
    model.after = lambda number, x: None
    return seen


@pytest.mark.of_cpu("layers wait where the native kernel computes")
@waits
def test_layers_wait_until_the_record_is_read() -> None:
    model = Stack()
    with torch.no_grad(), regard.watch(model) as seen:
        model(ids())
        assert waiting(seen) == LAYERS
    assert waiting(seen) == LAYERS
    assert len(seen) == LAYERS
    assert seen._filing is None
    assert same(seen, each_at_once(model, ids()))


@waits
def test_roles_and_baselines_of_layers_that_waited() -> None:
    model = Stack()
    with torch.inference_mode(), regard.watch(model) as seen:
        model(ids())
    other = each_at_once(model, ids())
    assert torch.equal(seen[3].uniform.entropy, other[3].uniform.entropy)
    assert repr(seen.roles(atlas=False)) == repr(other.roles(atlas=False))
    assert repr(seen.table()) == repr(other.table())


def test_several_texts() -> None:
    model, texts = Stack(), [ids(seed, tokens) for seed, tokens in enumerate((N, N, 7))]
    with torch.no_grad(), regard.watch(model) as seen:
        for text in texts:
            model(text)
    assert [layer.texts for layer in seen] == [3] * LAYERS
    assert seen[4].count.tolist() == [2 * (N + N + 7)] * H
    torch.testing.assert_close(seen[4].entropy, each_at_once(model, *texts)[4].entropy)


@waits
def test_a_call_that_raises_is_forgotten() -> None:
    model = Stack()

    def fail(number: int, x: Tensor) -> None:
        if number == 3:
            raise RuntimeError("meanwhile")

    with torch.no_grad(), regard.watch(model) as seen:
        model(ids())
        model.after = fail
        with pytest.raises(RuntimeError, match="meanwhile"):
            model(ids(1))
        model.after = lambda number, x: None
        assert waiting(seen) == 0
        assert [layer.texts for layer in seen] == [1] * LAYERS
    assert same(seen, each_at_once(model, ids()))


@waits
def test_a_call_that_raises_at_the_beginning_leaves_what_waits() -> None:
    model = Stack()
    with torch.no_grad(), regard.watch(model) as seen:
        model(ids())
        with pytest.raises(IndexError):
            model(ids() + 29)
    assert same(seen, each_at_once(model, ids()))


@waits
def test_what_the_model_writes_over_was_copied() -> None:
    model, text = Stack(), ids()
    kept: list[Tensor] = []
    hooks = [layer.q_proj.register_forward_hook(lambda m, a, out: kept.append(out)) for layer in model.layers]
    with torch.inference_mode(), regard.watch(model) as seen:
        model(text)
        text.zero_()
        for x in kept:
            x.zero_()
    for hook in hooks:
        hook.remove()
    other = each_at_once(model, ids())
    assert same(seen, other)
    assert repr(seen.roles(atlas=False)) == repr(other.roles(atlas=False))
    assert torch.equal(seen[2].text.ids, ids())


@waits
@pytest.mark.parametrize("keep", ["qk", "qkv"])
def test_nothing_waits_where_more_is_kept(keep: Any) -> None:
    model = Stack()
    with torch.no_grad(), regard.watch(model, keep=keep) as seen:
        model(ids())
        assert waiting(seen) == 0
    assert seen[0].weights().shape == (2, H, N, N)


@waits
def test_copies_and_files_of_a_record_have_all_layers() -> None:
    model = Stack()
    with torch.no_grad(), regard.watch(model) as seen:
        model(ids())
        twin = copy.deepcopy(seen)
        assert waiting(twin) == 0
    again = pickle.loads(pickle.dumps(seen))
    assert same(twin, seen)
    assert same(again, seen)


def test_unwanted_layers() -> None:
    model = Stack()
    with torch.no_grad(), regard.watch(model, layers=["layers.0", "layers.3"]) as seen:
        model(ids())
    assert seen.layers == ["layers.0", "layers.3"]
    with pytest.raises(ValueError, match=r"there are layers\.0"), regard.watch(model, layers=["other"]):
        model(ids())
