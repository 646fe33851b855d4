"""Plans that hold for other forwards and watches: records and outputs are those of layers that are each described."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from heads import same_records
from torch import Tensor, nn
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

import regard
from regard.heads.record import lasting_plans
from regard.kernels import native_library as library
from regard.masks import Causal, Keep, Padding

pytestmark = pytest.mark.skipif(library.load() is None, reason="plans are of the native kernel")

B, N, W, H, LAYERS = 2, 13, 24, 3, 2


@pytest.fixture(autouse=True)
def nothing_known() -> None:
    lasting_plans.forget_all()


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each question after a plan of an earlier forward, whether there was one."""
    answers: list[bool] = []
    find = lasting_plans.find

    def noted(*arguments: Any) -> Any:
        plan = find(*arguments)
        answers.append(plan is not None)
        return plan

    monkeypatch.setattr(lasting_plans, "find", noted)
    return answers


class Stack(nn.Module):
    def __init__(self, options: Callable[[], dict[str, Any]] = dict) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(7, W)
        self.layers = nn.ModuleList(regard.MultiHeadAttention(W, H) for _ in range(LAYERS))
        self.options = options

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = x + layer(x, **self.options())
        return x


def bert() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": W, "num_attention_heads": H, "intermediate_size": 29, "num_hidden_layers": LAYERS}
    return BertModel(BertConfig(**sizes, vocab_size=31, attn_implementation="sdpa"), add_pooling_layer=False).eval()


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": W, "num_attention_heads": H, "intermediate_size": 29, "num_hidden_layers": LAYERS}
    config = LlamaConfig(**sizes, num_key_value_heads=1, vocab_size=31, pad_token_id=0, attn_implementation="sdpa")
    return LlamaForCausalLM(config).eval()


def text(seed: int, batch: int = B, tokens: int = N) -> Tensor:
    return torch.randint(1, 7, (batch, tokens), generator=torch.Generator().manual_seed(seed))


def watched(model: nn.Module, *texts: Tensor, **options: Any) -> tuple[list[Any], regard.Record]:
    with torch.no_grad(), regard.watch(model, **options) as seen:
        out = [model(ids) for ids in texts]
    return [x if isinstance(x, Tensor) else x[0] for x in out], seen


def described(model: nn.Module, *texts: Tensor, **options: Any) -> tuple[list[Any], regard.Record]:
    lasting_plans.forget_all()
    return watched(model, *texts, **options)


def same(result: tuple[list[Any], regard.Record], expected: tuple[list[Any], regard.Record]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(result[0], expected[0], strict=True))
    same_records.same(result[1], expected[1])
    for layer, other in zip(result[1], expected[1], strict=True):
        assert layer.texts > 1 or torch.equal(layer.text.ids, other.text.ids)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "regard": Stack,
    "causal": lambda: Stack(lambda: {"mask": Causal()}),
    "bert": bert,
    "llama": llama,
}


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_another_text(make: Callable[[], nn.Module], found: list[bool]) -> None:
    model = make()
    watched(model, text(0))
    assert found == [False]
    result = watched(model, text(1))
    assert found == [False, True]
    same(result, described(model, text(1)))


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_another_model_of_the_same_sizes(make: Callable[[], nn.Module], found: list[bool]) -> None:
    watched(make(), text(0))
    model = make()
    for parameter in model.parameters():
        parameter.data.mul_(1.5)
    result = watched(model, text(1))
    assert found == [False, True]
    same(result, described(model, text(1)))


def test_several_texts_in_one_watch() -> None:
    model = Stack()
    same(watched(model, text(0), text(1), text(2)), described(model, text(0), text(1), text(2)))


def test_roles_of_another_text() -> None:
    model = Stack()
    watched(model, text(0, tokens=29))
    _, seen = watched(model, text(1, tokens=29))
    _, expected = described(model, text(1, tokens=29))
    assert seen.roles(atlas=False) == expected.roles(atlas=False)


@pytest.mark.parametrize("change", ["tokens", "batch", "measures", "keep"])
def test_what_is_not_alike(change: str, found: list[bool]) -> None:
    model = Stack()
    watched(model, text(0))
    ids = {"tokens": text(1, tokens=11), "batch": text(1, batch=3)}.get(change, text(1))
    options: dict[str, Any] = {"measures": {"measures": ["entropy"]}, "keep": {"keep": "qk"}}.get(change, {})
    result = watched(model, ids, **options)
    assert found[1:] == [False] * len(found[1:])
    same(result, described(model, ids, **options))


def test_measures_of_other_settings(found: list[bool]) -> None:
    model = Stack()
    few, many = (regard.measures.Offsets(before=k, after=k) for k in (1, 3))
    watched(model, text(0), measures=[few])
    _, seen = watched(model, text(0), measures=[many])
    assert found == [False, False]
    assert seen[0].offsets.shape[-1] == 7
    watched(model, text(0), measures=[regard.measures.Offsets(before=3, after=3)])
    assert found == [False, False, True]


def test_a_measure_changed_before_it_is_used(found: list[bool]) -> None:
    model = Stack()
    watched(model, text(0), measures=[regard.measures.Offsets(before=1, after=1)])
    offsets = regard.measures.Offsets(before=1, after=1)
    watch = regard.watch(model, measures=[offsets])
    offsets.before = 3
    with torch.no_grad(), watch as seen:
        model(text(0))
    assert seen[0].offsets.shape[-1] == 5
    assert found == [False, False]


def test_measures_that_hold_tensors(found: list[bool]) -> None:
    model, ids = Stack(), text(0)
    measures = [regard.measures.Induction(ids)]
    same(watched(model, ids, measures=measures), described(model, ids, measures=measures))
    assert found == []


@pytest.mark.parametrize(
    "options",
    [
        lambda: {"mask": Keep(torch.ones(N, N, dtype=torch.bool).tril())},
        lambda: {"mask": Padding(lengths=torch.tensor([7, N]))},
        lambda: {"positions": torch.arange(N) * 2, "mask": Causal()},
    ],
    ids=["dense", "padding", "positions"],
)
def test_tensors_that_decide_what_is_visible(options: Callable[[], dict[str, Any]], found: list[bool]) -> None:
    model = Stack(options)
    watched(model, text(0))
    result = watched(model, text(1))
    assert not any(found)
    same(result, described(model, text(1)))


def test_a_module_without_ids(found: list[bool]) -> None:
    layer, x = regard.MultiHeadAttention(W, H), torch.randn(B, N, W)
    watched(layer, x)
    with torch.no_grad(), regard.watch(layer) as seen:
        layer(2 * x)
    assert found == [False, True]
    assert "induction" not in seen[0].values
    lasting_plans.forget_all()
    with torch.no_grad(), regard.watch(layer) as expected:
        layer(2 * x)
    assert torch.equal(seen[0].entropy, expected[0].entropy)


def test_ids_written_over_later() -> None:
    model, ids = Stack(), text(1)
    watched(model, text(0))
    result = watched(model, ids)
    ids.zero_()
    same(result, described(model, text(1)))


def test_a_prompt_and_the_tokens_after_it() -> None:
    model = llama()

    def generate() -> tuple[list[Any], regard.Record]:
        with torch.no_grad(), regard.watch(model) as seen:
            out = model.generate(text(1, batch=1), max_new_tokens=3, do_sample=False)
        return [out], seen

    generate()
    result = generate()
    lasting_plans.forget_all()
    same(result, generate())


def test_nothing_of_a_model_or_text_is_kept() -> None:
    model, ids = Stack(), text(0)
    _, seen = watched(model, ids)
    references = [weakref.ref(x) for x in (model, model.layers[0], ids, seen, seen[0].text.ids)]
    del model, ids, seen
    gc.collect()
    assert [reference() for reference in references] == [None] * len(references)
    assert lasting_plans._plans


def test_only_so_many_are_kept() -> None:
    model = Stack()
    for tokens in range(2, lasting_plans.MOST + 5):
        watched(model, text(0, batch=1, tokens=tokens))
    assert 0 < len(lasting_plans._plans) <= lasting_plans.MOST


def test_another_library_is_asked_anew(monkeypatch: pytest.MonkeyPatch, found: list[bool]) -> None:
    model = Stack()
    watched(model, text(0))
    before = library._find_once()
    monkeypatch.setattr(library, "_found", (*before,))
    assert library._found is not before
    result = watched(model, text(1))
    assert found == [False, False]
    same(result, described(model, text(1)))
