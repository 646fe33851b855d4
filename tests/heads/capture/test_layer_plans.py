"""Layers like one before are seen by its plan: records and outputs are those of layers that are each described."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from heads import hf_models
from heads.hf_models import ZOO
from heads.same_records import same
from torch import Tensor, nn
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

import regard
from regard.heads.capture import layer_plans
from regard.heads.record import lasting_plans
from regard.kernels import native_library as library
from regard.masks import And, Causal, Keep, Mask, Padding, Window

pytestmark = pytest.mark.skipif(library.load() is None, reason="plans are of the native kernel")

B, N, W, H, LAYERS = 2, 11, 24, 3, 4


@pytest.fixture(autouse=True)
def nothing_known() -> None:
    """No layer is like one of an earlier test."""
    lasting_plans.forget_all()


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the layers that were seen by a plan."""
    names: list[str] = []
    by_plan = regard.watch.see_by_plan

    def noted(self: Any, plan: Any, frame: Any, *tensors: Tensor) -> Tensor | None:
        out = by_plan(self, plan, frame, *tensors)
        names.extend([] if out is None else [frame.name])
        return out

    monkeypatch.setattr(regard.watch, "see_by_plan", noted)
    return names


@pytest.fixture
def without_plans(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Any]], Any]:
    """Calls a function while no layer has a plan."""

    def call(function: Callable[[], Any]) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(layer_plans, "_key", lambda *arguments: None)
            return function()

    return call


class Stack(nn.Module):
    """Layers of attention, each with an input, a mask and options of its own."""

    def __init__(self, options: Callable[[int], dict[str, Any]] = lambda i: {}) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(7, W)
        self.layers = nn.ModuleList(regard.MultiHeadAttention(W, H) for _ in range(LAYERS))
        self.options = options

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for i, layer in enumerate(self.layers):
            x = x + layer(x, **self.options(i))
        return x


IDS = torch.randint(0, 7, (B, N), generator=torch.Generator().manual_seed(0))
MASKS: dict[str, Mask | None] = {
    "none": None,
    "causal": Causal(),
    "window": And(Causal(), Window(3)),
    "keep": Keep(torch.rand(B, 1, N, N, generator=torch.Generator().manual_seed(0)) > 0.4),
    "lengths": Padding(torch.tensor([7, N])),
}


def watched(model: nn.Module, *inputs: Any, **options: Any) -> tuple[Tensor, regard.Record]:
    with torch.no_grad(), regard.watch(model, **options) as seen:
        out = model(*inputs)
    return out, seen


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_layers_with_one_mask(mask: Mask | None, planned: list[str], without_plans: Any) -> None:
    model = Stack(lambda i: {"mask": mask})
    out, seen = watched(model, IDS)
    assert planned == [f"layers.{i}" for i in range(1, LAYERS)]
    expected, described = without_plans(lambda: watched(model, IDS))
    assert torch.equal(out, expected)
    same(seen, described)


def test_layers_whose_masks_differ(planned: list[str], without_plans: Any) -> None:
    model = Stack(lambda i: {"mask": Causal() if i % 2 else None})
    out, seen = watched(model, IDS)
    assert planned == ["layers.2", "layers.3"]
    expected, described = without_plans(lambda: watched(model, IDS))
    assert torch.equal(out, expected)
    same(seen, described)


def test_a_new_mask_in_the_memory_of_another(without_plans: Any) -> None:
    """Tensors of masks are known by their addresses, which may be used again."""

    def options(i: int) -> dict[str, Any]:
        visible = torch.ones(B, 1, N, N, dtype=torch.bool)
        visible[..., i + 1 :] = False
        return {"mask": Keep(visible)}

    model = Stack(options)
    out, seen = watched(model, IDS)
    expected, described = without_plans(lambda: watched(model, IDS))
    assert torch.equal(out, expected)
    same(seen, described)


@pytest.mark.parametrize(
    "options",
    [
        lambda i: {"key": torch.ones(B, 5, W), "mask": None} if i % 2 else {},  # cross attention
        lambda i: {"cache": regard.RollingCache(N)} if i % 2 else {"cache": regard.KVCache()},
        lambda i: {"positions": torch.arange(N) * (i + 1), "mask": Causal()},
    ],
    ids=["cross", "caches", "positions"],
)
def test_layers_that_are_not_alike(options: Callable[[int], dict[str, Any]], without_plans: Any) -> None:
    model = Stack(options)
    out, seen = watched(model, IDS)
    expected, described = without_plans(lambda: watched(model, IDS))
    assert torch.equal(out, expected)
    same(seen, described)


class Twice(nn.Module):
    """Two stacks with ids of their own, of one shape."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = Stack(), Stack()

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.one(a) + self.other(b)


def test_ids_are_those_of_each_layer(without_plans: Any) -> None:
    model, inputs = Twice(), (IDS, IDS.flip(1).contiguous())
    out, seen = watched(model, *inputs)
    expected, described = without_plans(lambda: watched(model, *inputs))
    assert torch.equal(out, expected)
    same(seen, described)
    assert torch.equal(seen["one.layers.2"].text.ids, inputs[0])
    assert torch.equal(seen["other.layers.2"].text.ids, inputs[1])


def test_several_texts(planned: list[str], without_plans: Any) -> None:
    """Plans are of the ids of each call of the model: also if these are in the same memory."""

    def read() -> tuple[Tensor, regard.Record]:
        model, ids = Stack(), IDS.clone()
        with torch.no_grad(), regard.watch(model) as seen:
            first = model(ids)
            ids.copy_(IDS.flip(1))
            return torch.stack([first, model(ids)]), seen

    out, seen = read()
    assert len(planned) == 2 * LAYERS - 1
    expected, described = without_plans(read)
    assert torch.equal(out, expected)
    same(seen, described)


def test_layers_that_are_not_wanted(planned: list[str], without_plans: Any) -> None:
    model, some = Stack(), ["layers.0", "layers.3"]
    out, seen = watched(model, IDS, layers=some)
    assert planned == ["layers.3"]
    assert seen.layers == some
    expected, described = without_plans(lambda: watched(model, IDS, layers=some))
    torch.testing.assert_close(out, expected)
    same(seen, described)


def test_where_each_layer_is_described(planned: list[str]) -> None:
    model = Stack()
    watched(model, IDS, exact=True)
    watched(model, IDS, keep="qkv")
    watched(model, IDS, measures=["contribution"])
    with regard.watch(model) as seen:  # gradients are wanted
        model(IDS).sum().backward()
    assert seen.layers == [f"layers.{i}" for i in range(LAYERS)]
    assert all(p.grad is not None for p in model.layers.parameters())
    with torch.no_grad(), torch.autocast("cpu"), regard.watch(model):
        model(IDS)
    with torch.no_grad(), regard.watch(model), regard.watch(model):
        model(IDS)
    assert planned == []


def test_a_call_that_is_refused_is_refused_again() -> None:
    """Its arguments are not checked yet when its key is known: the next call must not leave its plan there."""

    class Tries(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = regard.MultiHeadAttention(W, H)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(3):
                self.layer.softcap = -1.0
                with pytest.raises(ValueError, match="softcap"):
                    self.layer(x)
                self.layer.softcap = None
                with torch.autocast("cpu"):  # (such calls have no key)
                    x = x + self.layer(x).float()
            return x

    model, x = Tries(), torch.randn(B, N, W)
    out, seen = watched(model, x)
    assert seen.layers == ["layer", "layer#1", "layer#2"]
    with torch.no_grad():
        torch.testing.assert_close(out, model(x), rtol=1e-2, atol=1e-2)


def test_a_forward_that_fails(planned: list[str]) -> None:
    def options(i: int) -> dict[str, Any]:
        if fails and i == 2:
            raise RuntimeError("stop")
        return {}

    fails = True
    model = Stack(options)
    with torch.no_grad(), regard.watch(model) as seen:
        with pytest.raises(RuntimeError, match="stop"):
            model(IDS)
        fails = False
        model(IDS.flip(1))
    assert planned == ["layers.1", *[f"layers.{i}" for i in range(LAYERS)]]
    assert torch.equal(seen[0].text.ids, IDS.flip(1))
    assert all(layer.texts == 1 for layer in seen)


def test_what_a_model_writes_over_later_is_not_kept(planned: list[str], without_plans: Any) -> None:
    """Small tensors are copied, as they are where each layer is described."""

    class Careless(Stack):
        def forward(self, ids: Tensor) -> Tensor:
            x = self.embedding(ids)
            q, k, v = torch.randn(3, B, H, N, W // H, generator=torch.Generator().manual_seed(0)).unbind()
            for _ in self.layers:
                x = x + regard.attend(q, k, v).transpose(1, 2).flatten(2)
                q.mul_(-1)
            return x

    model = Careless()
    out, seen = watched(model, IDS)
    expected, described = without_plans(lambda: watched(model, IDS))
    assert torch.equal(out, expected)
    same(seen, described)


def in_float32(family: str, padded: bool) -> tuple[nn.Module, dict[str, Any]]:
    """A model and its inputs, as the native kernel serves them."""
    model = copy.deepcopy(hf_models.model(family, "sdpa", padded=padded)).float()
    given = hf_models.inputs(family, padded=padded)
    return model, {name: x.float() if torch.is_floating_point(x) else x for name, x in given.items()}


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("family", [family for family, zoo in ZOO.items() if zoo.sdpa])
def test_models_of_transformers(family: str, padded: bool, without_plans: Any) -> None:
    if padded and not hf_models.can_be_padded(family):
        pytest.skip("nothing to pad")
    model, given = in_float32(family, padded)

    def read() -> tuple[list[Tensor], regard.Record]:
        with torch.no_grad(), regard.watch(model) as seen:
            out = model(**given)
        return [x for x in out.to_tuple() if isinstance(x, Tensor)], seen

    out, seen = read()
    expected, described = without_plans(read)
    assert all(torch.equal(a, b) for a, b in zip(out, expected, strict=True))
    same(seen, described)


@pytest.mark.parametrize("family, padded", [("bert", False), ("bert", True), ("llama", False)])
def test_layers_of_transformers_have_plans(family: str, padded: bool, planned: list[str]) -> None:
    model, given = in_float32(family, padded)
    with torch.no_grad(), regard.watch(model) as seen:
        model(**given)
    assert planned == seen.layers[1:]


def test_gradients_that_nobody_wants(planned: list[str]) -> None:
    model = Stack().requires_grad_(False)
    with regard.watch(model) as seen:
        out = model(IDS)
    assert not out.requires_grad
    assert planned == seen.layers[1:]


def tiny_llama() -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=W,
        intermediate_size=29,
        num_hidden_layers=LAYERS,
        num_attention_heads=H,
        num_key_value_heads=1,
        vocab_size=31,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


def test_a_cache_of_fixed_size(without_plans: Any) -> None:
    """Its prompt is longer in memory than what the function attends to: keys are cut before they are seen."""
    model, prompt = tiny_llama(), torch.randint(1, 31, (B, N))

    def read() -> tuple[Tensor, regard.Record]:
        options: dict[str, Any] = {"cache_implementation": "static", "disable_compile": True, "do_sample": False}
        with torch.no_grad(), regard.watch(model) as seen:
            return model.generate(prompt, max_new_tokens=5, **options), seen  # type: ignore[operator]

    out, seen = read()
    expected, described = without_plans(read)
    assert torch.equal(out, expected)
    same(seen, described)


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_a_mask_that_is_written_over_between_layers(dtype: torch.dtype, inference: bool, without_plans: Any) -> None:
    class Shrinking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            config = BertConfig(hidden_size=W, num_attention_heads=H, intermediate_size=29, num_hidden_layers=LAYERS)
            config._attn_implementation = "sdpa"
            self.layers = BertModel(config, add_pooling_layer=False).eval().encoder.layer

        def forward(self, x: Tensor) -> Tensor:
            mask = torch.empty(B, 1, N, N, dtype=dtype)
            for i, layer in enumerate(self.layers):
                hidden = torch.ones(N, N, dtype=torch.bool).triu(i - 1)  # (in the end some queries see nothing)
                mask.copy_(~hidden if dtype is torch.bool else hidden * -1e9)
                x = layer(x, attention_mask=mask)
                x = x if isinstance(x, Tensor) else x[0]
            return x.nan_to_num()

    model, x = Shrinking(), torch.randn(B, N, W)

    def read() -> tuple[Tensor, regard.Record]:
        with torch.inference_mode(inference), torch.no_grad(), regard.watch(model) as seen:
            return model(x), seen

    out, seen = read()
    expected, described = without_plans(read)
    assert torch.equal(out, expected)
    assert seen.layers == described.layers
    for layer, other in zip(seen, described, strict=True):
        assert torch.equal(layer.entropy, other.entropy)
