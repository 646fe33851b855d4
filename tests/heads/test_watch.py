"""A watch leaves nothing behind, and is right where it is easy to be nearly right."""

from __future__ import annotations

import gc
import io
import threading
import weakref
from typing import Any

import pytest
import torch
import transformers.modeling_utils
from heads import hf_models
from heads.oracle import Oracle, agree, close, wanted
from heads.oracle_hands import B, H, Hand, N, W, by_operator, made, noise
from torch import Tensor, nn

import regard
from regard.heads.capture import huggingface, large_calls
from regard.masks import Causal, Prefix, Window
from regard.measures import Contribution, Divergence, Heatmap

pytestmark = pytest.mark.on_device


def test_tensors_that_live_on_are_as_they_were() -> None:
    model = made(Hand(by_operator))
    with torch.no_grad(), regard.watch(model):
        out = model(noise(B, N, W))
    assert vars(out) == {}
    file = io.BytesIO()
    torch.save(out, file)
    file.seek(0)
    assert torch.equal(torch.load(file), out)


def test_a_watch_that_cannot_begin_leaves_no_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    model = made(Hand(by_operator))
    monkeypatch.setattr(huggingface, "start", lambda looker: (_ for _ in ()).throw(RuntimeError("no")))
    with pytest.raises(RuntimeError, match="no"), regard.watch(model):
        pass
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_transformers_without_the_interface_does_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    class Old:
        pass

    monkeypatch.setattr(transformers.modeling_utils, "AttentionInterface", Old)
    model = made(Hand(by_operator))
    with torch.no_grad(), regard.watch(model) as seen:
        model(noise(B, N, W))
    assert seen.layers == ["layer"]


def test_two_threads_put_the_compilers_stance_back() -> None:
    import torch._dynamo
    from torch._dynamo import eval_frame

    before = eval_frame._stance.stance
    first, second = threading.Event(), threading.Event()

    def look() -> None:
        watching = regard.watch(made(Hand(by_operator)))
        watching.__enter__()
        first.set()
        second.wait(20)
        watching.__exit__(RuntimeError, RuntimeError(), None)

    other = threading.Thread(target=look)
    with torch.no_grad(), regard.watch(model := made(Hand(by_operator))):
        other.start()
        first.wait(20)
        model(noise(B, N, W))
    second.set()
    other.join()
    assert eval_frame._stance.stance == before


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_changes_of_multihead_attention_within_changes(batch: int) -> None:
    layer = nn.MultiheadAttention(12, 3, batch_first=True).double().eval()
    x = noise(batch, N, 12)
    with torch.no_grad():
        with regard.ablate(layer, {0: [0, 1]}):
            right = layer(x, x, x)[0]
        with regard.ablate(layer, {0: [0]}), regard.ablate(layer, {0: [1]}):
            close(layer(x, x, x)[0], right, "nested")
        with regard.watch(layer) as seen, regard.ablate(layer, {0: [0]}):
            layer(x, x, x)
    assert seen.layers == ["MultiheadAttention"]


def test_large_eager_maps_are_recorded_once_and_only_where_they_must_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_calls, "is_large", lambda call: True)
    for family in ("llama", "gemma2", "gpt_oss"):
        model, given = hf_models.model(family, "eager"), hf_models.inputs(family)
        with torch.no_grad():
            right = model(**given).logits
            with regard.watch(model, measures=["entropy"]) as seen:
                close(model(**given).logits, right, family)
            assert len(seen) == model.config.num_hidden_layers
            with regard.watch(model, measures=["entropy"]):
                assert model(**given, output_attentions=True).attentions[0] is not None


@pytest.mark.parametrize("cells", [3, 7, 64, 128, 256])
def test_heatmaps_where_a_strip_has_gaps(cells: int) -> None:
    q = torch.randn(1, 2, 1024, 4)
    mask = (Causal() & Window(100)) | (Causal() & Prefix(50))
    ours = regard.measure(q, q, mask=mask, measures=Heatmap(cells), kernel="blockwise").heatmap
    theirs = regard.measure(q, q, mask=mask, measures=Heatmap(cells), kernel="reference").heatmap
    close(ours, theirs, "heatmap", 1e-4)


def test_autocast_does_not_reach_the_measures() -> None:
    model = made(Hand(by_operator)).float()
    x = noise(B, N, W).float()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        with regard.watch(model, measures=wanted(), keep="qk") as seen:
            model(x)
        weights = seen[0].weights()
    assert seen[0].entropy.dtype is torch.float32
    agree(seen[0], Oracle(weights.double()), atol=1e-4)


def test_the_record_of_a_generation_grows_with_its_length() -> None:
    model = hf_models.model("llama")
    ids = hf_models.some_ids(1, 5, seed=1)

    def held(new: int) -> int:
        with regard.watch(model) as seen:
            model.generate(ids, max_new_tokens=new, min_new_tokens=new, do_sample=False)
        pieces = [piece for layer in seen for piece in layer.text.pieces]
        tensors = [t for piece in pieces for t in piece.found.values.values() if isinstance(t, Tensor)]
        return sum(t.numel() for t in tensors)

    short, long = held(20), held(80)
    assert long < 4.5 * short


def test_padding_does_not_count_in_means() -> None:
    model = hf_models.model("bert")
    ids = hf_models.some_ids(1, 5, seed=1)
    padded = torch.nn.functional.pad(ids, (0, 6))
    keep = torch.tensor([[1] * 5 + [0] * 6])
    with torch.no_grad(), regard.watch(model) as alone:
        model(ids)
    with torch.no_grad(), regard.watch(model) as filled:
        model(padded, attention_mask=keep)
    for a, b in zip(alone, filled, strict=True):
        assert a.count.tolist() == b.count.tolist() == [5] * a.heads
        for name in ("entropy", "distance", "peak"):
            close(b.per_head(name), a.per_head(name), name)
        assert b.entropy.shape[2] == 11  # each query is still there


@pytest.mark.parametrize("low", [-1e4, -1e9, float("-inf"), torch.finfo(torch.float32).min])
def test_masks_by_any_low_number_hide(low: float) -> None:
    class Added(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            q = x.unflatten(-1, (H, -1)).transpose(1, 2)
            mask = torch.zeros(N, N).masked_fill(~torch.ones(N, N, dtype=torch.bool).tril(), low)
            return nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=mask).transpose(1, 2).flatten(2)

    with regard.watch(model := Added()) as seen:
        model(torch.randn(B, N, W))
    right = torch.arange(1, N + 1).double().log()
    assert seen[0].uniform is not None
    close(seen[0].uniform.entropy[0, 0], right, "baseline")


def test_positions_are_not_taken_for_tokens() -> None:
    class Layer(nn.Module):
        def forward(self, x: Tensor, input_pos: Tensor) -> Tensor:
            q = x.unflatten(-1, (H, -1)).transpose(1, 2)
            return nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2).flatten(2)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.layer = nn.Embedding(7, W), Layer()

        def forward(self, tokens: Tensor) -> Tensor:
            return self.layer(self.embedding(tokens), torch.arange(N).expand(B, -1))

    ids = torch.tensor([[1, 2, 1, 2, 1, 2, 1], [3, 3, 3, 3, 3, 3, 3]])
    with regard.watch(model := Model()) as seen:
        model(ids)
    assert seen[0].duplicate[1, :, 1:].min() > 0


def test_contribution_where_texts_are_as_many_as_heads() -> None:
    layer = regard.MultiHeadAttention(12, num_heads=2)
    for batch in (1, 2, 3):
        with regard.watch(layer, measures="contribution") as seen:
            layer(torch.randn(batch, N, 12))
        assert seen[0].contribution.shape == (batch, 2, N)


def test_contribution_of_a_projection_with_an_adapter_is_not_guessed() -> None:
    class Adapted(nn.Linear):
        def __init__(self) -> None:
            super().__init__(12, 12)
            self.down = nn.Linear(12, 2)

    layer = regard.MultiHeadAttention(12, num_heads=2)
    layer.out_proj = Adapted()
    with regard.watch(layer, measures=["entropy", "contribution"]) as seen:
        layer(torch.randn(1, N, 12))
    with pytest.raises(AttributeError, match="it needs the output projection's weight"):
        _ = seen[0].contribution
    with regard.watch(layer, measures=Contribution(torch.eye(12))) as seen:
        layer(torch.randn(1, N, 12))
    assert seen[0].contribution.shape == (1, 2, N)


def test_smoothing_reaches_hidden_keys_whatever_the_strips() -> None:
    q = torch.randn(1, 3, 700, 4)
    given: dict[str, Any] = {"mask": Causal() & Window(50), "measures": Divergence(smooth=0.01)}
    ours = regard.measure(q, q, kernel="blockwise", **given).divergence
    close(ours, regard.measure(q, q, kernel="reference", **given).divergence, "divergence", 1e-4)


def test_texts_of_a_corpus_are_texts_of_their_own() -> None:
    model = hf_models.model("llama")
    ids = hf_models.some_ids(1, 6, seed=1)
    seen = regard.heads.watch_all(model, [ids[:, :-1], ids], progress=False)
    assert seen[0].texts == 2
    assert seen[0].count.tolist() == [11] * seen[0].heads


def test_a_layer_that_only_gets_heads_asks_its_parent() -> None:
    class Attend(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return (q @ k.mT).softmax(-1) @ v

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attend = Attend()

        def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
            y = x if context is None else context
            q, k = (z.unflatten(-1, (H, -1)).transpose(1, 2) for z in (x, y))
            return self.attend(q, k, k).transpose(1, 2).flatten(2)

    model = Outer()
    with regard.watch(model) as seen:
        model(torch.randn(B, 5, W), torch.randn(B, 7, W))
    assert seen[0].kind == "cross"
    with regard.watch(model) as seen:
        model(torch.randn(B, 5, W))
    assert seen[0].kind == "self"


def test_an_interrupt_does_not_rename_layers() -> None:
    model = made(Hand(by_operator))
    stop = [True]

    def interrupt(*_: Any) -> None:
        if stop.pop() if stop else False:
            raise KeyboardInterrupt

    handle = model.head.register_forward_hook(interrupt)
    with torch.no_grad(), regard.watch(model) as seen:
        with pytest.raises(KeyboardInterrupt):
            model(noise(B, N, W))
        model(noise(B, N, W))
    handle.remove()
    assert seen.layers == ["layer"]


def test_what_a_watch_held_is_let_go() -> None:
    model = made(Hand(by_operator))
    watching = regard.watch(model)
    with torch.no_grad(), watching:
        model(noise(B, N, W))
    gone = weakref.ref(watching)
    del watching
    gc.collect()
    assert gone() is None
