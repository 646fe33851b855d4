"""A watch on models of transformers, unmodified: every measure of every head is what eager attention says."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from heads import hf_models
from heads.hf_models import ZOO
from heads.oracle import Oracle, agree, close, wanted
from torch import Tensor
from transformers import LlamaConfig, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding

import regard

WAYS = [
    (family, way)
    for family, zoo in ZOO.items()
    for way in (None, "eager", "sdpa")
    if way != "sdpa" or zoo.sdpa
    if way is None or zoo.interface  # what has its own softmax knows one way
]
# A few that stand for all: an encoder, a layer called again, grouped heads, windows, cross attention, written by hand.
SOME = ("bert", "albert", "llama", "gemma2", "gpt_oss", "t5", "deberta")


def has_ids(family: str) -> bool:
    return all(stack.ids is not None for stack in ZOO[family].stacks)


def sight(family: str, oracles: dict[str, Oracle]) -> list[Any]:
    """The measures to ask for; values count as they are, without an output projection."""
    values = next(iter(oracles.values())).values
    out = None if values is None else torch.eye(values.shape[1] * values.shape[3], dtype=values.dtype)
    return wanted(ids=has_ids(family), out=out)


def run(model: PreTrainedModel, given: dict[str, Any]) -> list[Tensor]:
    with torch.no_grad():
        out = model(**given)
    return [x for x in out.to_tuple() if isinstance(x, Tensor)]


def same(got: list[Tensor], right: list[Tensor], atol: float = 1e-6) -> None:
    assert len(got) == len(right)
    for a, b in zip(got, right, strict=True):
        torch.testing.assert_close(a, b, atol=atol, rtol=atol)


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("family, way", WAYS)
def test_every_measure_of_every_layer(family: str, way: str | None, padded: bool) -> None:
    if padded and not hf_models.can_be_padded(family):
        pytest.skip("nothing to pad")
    given = hf_models.inputs(family, padded=padded)
    oracles = hf_models.eager(family, hf_models.model(family, "eager", padded=padded), given)
    model = hf_models.model(family, way, padded=padded)
    before = run(model, given)

    with regard.watch(model, measures=sight(family, oracles), keep="qk") as seen:
        during = run(model, given)

    same(during, before, 1e-5)  # (eager functions have their softmax in float32)
    assert seen.layers == list(oracles)
    assert [seen[name].kind for name in seen.layers] == hf_models.kinds(family, seen.layers)
    for number, (name, oracle) in enumerate(oracles.items()):
        layer, rows = seen[name], hf_models.rows(family, name, given)
        if not has_ids(family):
            oracle = Oracle(oracle.weights, values=oracle.values)
        # (Padding that sees itself, as in XLNet, is not known as such.)
        counted = torch.ones_like(rows) if rows is not None and family == "xlnet" else None
        agree(layer, oracle, kind=layer.kind, rows=rows, counted=counted)
        close(seen[number].entropy, layer.entropy, "by number", 0.0)
        weights, right = layer.weights(), oracle.p
        look = oracle.seeing if rows is None else oracle.seeing & rows[:, None]
        assert weights.shape == right.shape
        close(weights[look], right[look], "weights")


@pytest.mark.parametrize("family", ["bert", "llama", "t5"])
def test_any_part_of_the_weights(family: str) -> None:
    given = hf_models.inputs(family)
    model = hf_models.model(family)
    name, oracle = list(hf_models.eager(family, hf_models.model(family, "eager"), given).items())[-1]
    with regard.watch(model, keep="qk") as seen:
        run(model, given)
    layer, p = seen[name], oracle.p
    close(layer.weights(head=1), p[:, 1], "a head")
    close(layer.weights(head=slice(1, 3)), p[:, 1:3], "heads")
    close(layer.weights(head=[2, 0]), p[:, [2, 0]], "heads in an order")
    close(layer.weights(rows=slice(2, 5)), p[:, :, 2:5], "rows")
    close(layer.weights(cols=slice(1, 4)), p[..., 1:4], "columns")
    close(layer.weights(batch=1), p[1], "an item")
    close(layer.weights(2, slice(1, 6), slice(3, 7), 0), p[0, 2, 1:6, 3:7], "all at once")


def test_weights_have_to_be_kept() -> None:
    model = hf_models.model("bert")
    with regard.watch(model) as seen:
        run(model, hf_models.inputs("bert"))
    with pytest.raises(ValueError, match='keep="qk"'):
        seen[0].weights()


def test_some_layers_only() -> None:
    model, name = hf_models.model("bert"), "encoder.layer.1.attention.self"
    given = hf_models.inputs("bert")
    oracle = hf_models.eager("bert", hf_models.model("bert", "eager"), given)[name]
    with regard.watch(model, measures=wanted(), layers=[name]) as seen:
        run(model, given)
    assert seen.layers == [name]
    agree(seen[name], Oracle(oracle.weights))


def test_many_forwards_become_means_of_heads() -> None:
    model, eager = hf_models.model("llama"), hf_models.model("llama", "eager")
    several = [{"input_ids": hf_models.some_ids(batch, n, seed=n)} for batch, n in ((2, 13), (3, 7), (1, 11))]
    oracles = [hf_models.eager("llama", eager, given) for given in several]
    with regard.watch(model, measures=["entropy", "distance", "previous", "peak"]) as seen:
        for given in several:
            run(model, given)
    for name in seen.layers:
        these = [o[name] for o in oracles]
        rows = torch.cat([o.seeing.movedim(1, 0).flatten(1) for o in these], 1).double()  # (H, all queries)
        for measure in ("entropy", "distance", "previous", "peak"):
            values = torch.cat([getattr(o, measure)().movedim(1, 0).flatten(1) for o in these], 1)
            close(getattr(seen[name], measure), (values * rows).sum(1) / rows.sum(1), measure)
        count = torch.as_tensor(seen[name].count, dtype=torch.float64)
        close(count.expand(rows.shape[0]), rows.sum(1), "count")


def state(model: PreTrainedModel) -> dict[str, Any]:
    """All that a watch might leave behind."""
    found: dict[str, Any] = {
        "implementation": model.config._attn_implementation,
        "functions": {name: ALL_ATTENTION_FUNCTIONS[name] for name in ALL_ATTENTION_FUNCTIONS},
        "torch": [
            id(getattr(home, name))
            for home, name in (
                (torch, "softmax"),
                (torch, "matmul"),
                (torch, "bmm"),
                (torch, "einsum"),
                (torch.Tensor, "softmax"),
                (torch.Tensor, "__matmul__"),
                (torch.nn.functional, "softmax"),
                (torch.nn.functional, "scaled_dot_product_attention"),
                (torch.nn.functional, "multi_head_attention_forward"),
                (torch.nn.Module, "__call__"),
                (AttentionInterface, "get_interface"),
            )
        ],
        "modes": (torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()),
        "fast path": torch.backends.mha.get_fastpath_enabled(),
    }
    for name, module in model.named_modules():
        hooks = {key: list(value) for key, value in vars(module).items() if "hooks" in key and isinstance(value, dict)}
        config = getattr(module, "config", None)
        found[name] = hooks, sorted(vars(module)), getattr(config, "_attn_implementation", None), module.training
    return found


@pytest.mark.parametrize("way", [None, "eager"])
@pytest.mark.parametrize("family", SOME)
def test_nothing_is_left_behind(family: str, way: str | None) -> None:
    model, given = hf_models.model(family, way), hf_models.inputs(family)
    right = run(model, given)
    before = state(model)
    with regard.watch(model):
        run(model, given)
    assert state(model) == before
    same(run(model, given), right, 0.0)


class Stop(Exception):
    pass


@pytest.mark.parametrize("family", SOME)
def test_nothing_is_left_behind_when_the_model_raises(family: str) -> None:
    model, given = hf_models.model(family), hf_models.inputs(family)
    right = run(model, given)
    last = [m for m in model.modules() if type(m).__name__ == ZOO[family].attends][-1]

    def stop(*_: Any) -> None:
        raise Stop

    before = state(model)
    hook = last.register_forward_hook(stop)
    with pytest.raises(Stop), regard.watch(model):
        run(model, given)
    hook.remove()
    assert state(model) == before
    same(run(model, given), right, 0.0)


@pytest.mark.parametrize("family", SOME)
def test_a_watch_after_a_model_that_raised(family: str) -> None:
    """What the model had seen before it raised is forgotten with it."""
    model, given = hf_models.model(family), hf_models.inputs(family)
    oracles = hf_models.eager(family, hf_models.model(family, "eager"), given)
    last = [m for m in model.modules() if type(m).__name__ == ZOO[family].attends][-1]

    def stop(*_: Any) -> None:
        raise Stop

    hook = last.register_forward_pre_hook(stop)
    with pytest.raises(Stop), regard.watch(model):
        run(model, given)
    hook.remove()
    with regard.watch(model, measures=wanted()) as seen:
        run(model, given)
    assert seen.layers == list(oracles)
    for name, oracle in oracles.items():
        agree(seen[name], Oracle(oracle.weights), kind=seen[name].kind)


def test_output_attentions_under_a_watch() -> None:
    """Whoever asks an eager model for its weights still gets them."""
    model, given = hf_models.model("bert", "eager"), hf_models.inputs("bert", padded=True)
    with torch.no_grad():
        right = model(**given, output_attentions=True).attentions
        with regard.watch(model, measures=wanted()) as seen:
            got = model(**given, output_attentions=True).attentions
    for layer, (a, b) in enumerate(zip(got, right, strict=True)):
        torch.testing.assert_close(a, b)
        agree(seen[layer], Oracle(b))


def test_an_attention_module_whose_config_names_no_implementation() -> None:
    """It computes its own eager attention."""
    config = LlamaConfig(hidden_size=24, num_attention_heads=3, num_key_value_heads=1)
    assert config._attn_implementation is None
    module, x = LlamaAttention(config, 0).eval(), torch.randn(1, 5, 24)
    given = {"position_embeddings": LlamaRotaryEmbedding(config)(x, torch.arange(5)[None]), "attention_mask": None}
    with torch.no_grad(), regard.watch(module) as seen:
        out, weights = module(x, **given)
    assert seen.layers == ["LlamaAttention"]
    torch.testing.assert_close(seen[0].peak, weights.amax(-1))
    with torch.no_grad():
        assert torch.equal(out, module(x, **given)[0])


def test_a_registered_function_that_has_no_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    class Function:
        __hash__ = None  # type: ignore[assignment]

        def __eq__(self, other: object) -> bool:
            return True

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return ALL_ATTENTION_FUNCTIONS["sdpa"](*args, **kwargs)

    monkeypatch.setitem(AttentionInterface._global_mapping, "no_hash", Function())
    monkeypatch.setitem(AttentionMaskInterface._global_mapping, "no_hash", sdpa_mask)
    model, given = copy.deepcopy(hf_models.model("bert")), hf_models.inputs("bert")
    model.config._attn_implementation = "no_hash"
    with regard.watch(model) as seen:
        run(model, given)
    assert len(seen.layers) == model.config.num_hidden_layers
