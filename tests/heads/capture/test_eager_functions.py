"""Eager attention of transformers under a watch: one pass computes it where its function does as it is told."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any

import pytest
import torch
from heads import hf_models
from heads.hf_models import TOKENS, ZOO
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from transformers.models.bert import modeling_bert
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.llama import modeling_llama

import regard
from regard.heads.capture import eager_functions
from regard.heads.capture.sdpa import added_band
from regard.masks import Causal, Window

LAYERS = hf_models.LAYERS
Change = Callable[[nn.Module, Tensor, str], Tensor]
HOMES = {"llama": modeling_llama, "gemma2": modeling_gemma2, "gpt_oss": modeling_gpt_oss, "bert": modeling_bert}


def function(home: Any, calls: list[int], change: Change = lambda module, x, what: x) -> Callable[..., Any]:
    """An eager function as transformers has them. It notes the number of queries of each call; `change` is given the
    scores, the weights and the output, each by name."""

    def eager(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        softcap: float | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        calls.append(query.shape[2])
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
        scores = query @ key.mT * (query.shape[3] ** -0.5 if scaling is None else scaling)
        if softcap is not None:
            scores = softcap * (scores / softcap).tanh()
        scores = change(module, scores, "scores")
        scores = scores if attention_mask is None else scores + attention_mask
        sinks = getattr(module, "sinks", None)
        if sinks is not None:
            scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
        weights = change(module, scores.softmax(-1)[..., : key.shape[2]], "weights")
        return change(module, (weights @ value).transpose(1, 2).contiguous(), "output"), weights

    return at_home(eager, home)


def at_home(f: Any, home: Any) -> Callable[..., Any]:
    """The same function as if it stood in this module."""
    there = FunctionType(f.__code__, f.__globals__ | {"__name__": home.__name__}, None, f.__defaults__, f.__closure__)
    there.__kwdefaults__ = f.__kwdefaults__
    return there


def with_other_arguments(
    does: Callable[..., Any],
    home: Any,
    *,
    module: Callable[[nn.Module], nn.Module] = lambda module: module,
    mask: Callable[[Tensor, Tensor], Tensor | None] = lambda mask, key: mask,
) -> Callable[..., Any]:
    """A function that hands on another module, or another mask (given the mask and the keys)."""

    def eager(
        own: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, scaling: float, **kwargs: Any
    ) -> Any:
        return does(module(own), query, key, value, mask(attention_mask, key), scaling)

    return at_home(eager, home)


def run(model: nn.Module, given: dict[str, Any], **options: Any) -> tuple[Tensor, Tensor, regard.heads.Record]:
    """The output unwatched, watched, and the record."""
    with torch.no_grad():
        before = model(**given)[0]
        with regard.watch(model, **options) as seen:
            during = model(**given)[0]
    return before, during, seen


@pytest.mark.parametrize("family", HOMES)
def test_a_function_that_does_what_it_is_told_is_replaced(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    model, given = hf_models.model(family, "eager"), hf_models.inputs(family)
    monkeypatch.setattr(HOMES[family], "eager_attention_forward", function(HOMES[family], calls))
    before, during, seen = run(model, given)
    assert calls.count(TOKENS) == LAYERS  # before; and trials of a few tokens while watched
    assert len(calls) == 2 * LAYERS
    torch.testing.assert_close(during, before, rtol=1e-5, atol=1e-5)
    again, exact, right = run(model, given, exact=True)
    assert torch.equal(again, exact)
    assert calls.count(TOKENS) == 3 * LAYERS
    for name in seen.layers:
        for what in ("entropy", "peak", "distance", "offset", "received", "on_first"):
            torch.testing.assert_close(seen[name].last()[what], right[name].last()[what], rtol=1e-5, atol=1e-6)
    tried = len(calls)
    run(model, given)
    assert len(calls) == tried + LAYERS  # once tried, it is known


CHANGES: dict[str, Change] = {
    "another scale": lambda module, x, what: x * 1.01 if what == "scores" else x,
    "a cap": lambda module, x, what: 50.0 * (x / 50.0).tanh() if what == "scores" else x,
    "a distance": lambda module, x, what: x - torch.arange(x.shape[3]) * 0.01 if what == "scores" else x,
    "sharper": lambda module, x, what: x.square() / x.square().sum(-1, keepdim=True) if what == "weights" else x,
    "a share": lambda module, x, what: x * 0.99 if what == "weights" else x,
    "a gate in one layer": lambda module, x, what: x * (1 + module.layer_idx) if what == "output" else x,
}


@pytest.mark.parametrize("name", CHANGES)
def test_one_that_does_something_else_is_left_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    model, given = hf_models.model("llama", "eager"), hf_models.inputs("llama")
    monkeypatch.setattr(modeling_llama, "eager_attention_forward", function(modeling_llama, calls, CHANGES[name]))
    before, during, seen = run(model, given)
    replaced = 1 if "one layer" in name else 0
    assert calls.count(TOKENS) == 2 * LAYERS - replaced
    assert len(seen.unseen) == replaced
    if not replaced:
        assert torch.equal(before, during)


def test_one_that_hides_nothing_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    model, given = hf_models.model("llama", "eager"), hf_models.inputs("llama")
    eager = with_other_arguments(function(modeling_llama, calls), modeling_llama, mask=lambda mask, key: None)
    monkeypatch.setattr(modeling_llama, "eager_attention_forward", eager)
    before, during, _ = run(model, given)
    assert sorted(set(calls)) == [5, TOKENS]  # it was tried
    assert calls.count(TOKENS) == 2 * LAYERS
    assert torch.equal(before, during)


def test_it_is_tried_again_if_the_modules_own_tensors_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function may read them: of sinks near -inf a trial would show nothing."""
    calls: list[int] = []
    model, given = hf_models.model("gpt_oss", "eager"), hf_models.inputs("gpt_oss")
    monkeypatch.setattr(modeling_gpt_oss, "eager_attention_forward", function(modeling_gpt_oss, calls))
    run(model, given)
    tried = len(calls)
    run(model, given)
    assert len(calls) == tried + LAYERS
    with torch.no_grad():
        next(x for name, x in model.named_parameters() if name.endswith("sinks")).add_(0.5)
    before, during, _ = run(model, given)
    assert len(calls) == tried + 2 * LAYERS + 1
    torch.testing.assert_close(during, before, rtol=1e-5, atol=1e-5)


def test_sinks_that_a_function_ignores(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    model, given = hf_models.model("gpt_oss", "eager"), hf_models.inputs("gpt_oss")
    does = function(modeling_gpt_oss, calls)
    eager = with_other_arguments(does, modeling_gpt_oss, module=lambda module: nn.Module())
    monkeypatch.setattr(modeling_gpt_oss, "eager_attention_forward", eager)
    before, during, _ = run(model, given)
    assert calls.count(TOKENS) == 2 * LAYERS
    assert torch.equal(before, during)


def _by_argument(model: Any, given: dict[str, Any]) -> Any:
    return model(**given, output_attentions=True).attentions


def _by_configuration(model: Any, given: dict[str, Any]) -> Any:
    model.config.output_attentions = True
    try:
        return model(**given).attentions
    finally:
        model.config.output_attentions = False


def _by_a_hook(model: Any, given: dict[str, Any]) -> Any:
    found: list[Any] = []
    attends = [module for name, module in model.named_modules() if name.endswith("self_attn")]
    hooks = [module.register_forward_hook(lambda module, args, out: found.append(out[1])) for module in attends]
    model(**given)
    for hook in hooks:
        hook.remove()
    return found


def _by_a_global_hook(model: Any, given: dict[str, Any]) -> Any:
    found: list[Any] = []
    attends = [module for name, module in model.named_modules() if name.endswith("self_attn")]
    handle = register_module_forward_hook(lambda module, args, out: found.append(out[1]) if module in attends else None)
    try:
        model(**given)
    finally:
        handle.remove()
    return found


def _by_a_forward_in_its_place(model: Any, given: dict[str, Any]) -> Any:
    found: list[Any] = []
    attends = [module for name, module in model.named_modules() if name.endswith("self_attn")]

    def forward(*args: Any, own: Callable[..., Any], **kwargs: Any) -> Any:
        out = own(*args, **kwargs)
        found.append(out[1])
        return out

    for module in attends:
        module.forward = functools.partial(forward, own=module.forward)
    try:
        model(**given)
    finally:
        for module in attends:
            del module.forward
    return found


def _by_a_layer_of_ones_own(model: Any, given: dict[str, Any]) -> Any:
    found: list[Any] = []
    layers = [module for name, module in model.named_modules() if name.endswith("self_attn")]
    kind = type(layers[0])

    class Mine(kind):  # type: ignore[misc, valid-type]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            out = super().forward(*args, **kwargs)
            found.append(out[1])
            return out

    for layer in layers:
        layer.__class__ = Mine
    try:
        model(**given)
    finally:
        for layer in layers:
            layer.__class__ = kind
    return found


ASK = [
    _by_argument,
    _by_configuration,
    _by_a_hook,
    _by_a_global_hook,
    _by_a_forward_in_its_place,
    _by_a_layer_of_ones_own,
]


@pytest.mark.parametrize("ask", ASK)
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_who_asks_for_the_weights_gets_them(family: str, ask: Callable[..., Any]) -> None:
    model, given = hf_models.model(family, "eager"), hf_models.inputs(family)
    with torch.no_grad():
        right = ask(model, given)
        with regard.watch(model):
            weights = ask(model, given)
    assert len(weights) == len(right) == LAYERS
    assert all(torch.equal(a, b) for a, b in zip(weights, right, strict=True))


def test_gradients_and_dropout_are_the_models_own(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    model, given = hf_models.model("llama", "eager"), hf_models.inputs("llama")
    monkeypatch.setattr(modeling_llama, "eager_attention_forward", function(modeling_llama, calls))
    with regard.watch(model):
        model(**given)[0].sum().backward()
    assert calls == [TOKENS] * LAYERS


def test_gradients_of_sinks_alone() -> None:
    def gradients(model: nn.Module) -> list[Tensor]:
        sinks = [x for name, x in model.named_parameters() if name.endswith("sinks")]
        return list(torch.autograd.grad(model(**given)[0].sum(), sinks))

    model, given = hf_models._fresh("gpt_oss", "eager"), hf_models.inputs("gpt_oss")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith("sinks"))
    right = gradients(model)
    with torch.no_grad(), regard.watch(model):  # (which leaves what is known of the layers)
        model(**given)
        model(**given)
    with regard.watch(model):
        received = gradients(model)
    assert all(map(torch.equal, received, right))


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_gradients_of_a_mask_that_is_added(implementation: str) -> None:
    model, given = hf_models._fresh("llama", implementation).float().requires_grad_(False), hf_models.inputs("llama")
    hidden = torch.ones(1, 1, TOKENS, TOKENS).triu(1).bool()
    mask = torch.zeros(1, 1, TOKENS, TOKENS).masked_fill(hidden, -1e9).to(next(model.parameters()).dtype)
    with regard.watch(model):
        for _ in range(3):
            model(input_ids=given["input_ids"], attention_mask=mask)
        learned = mask.clone().requires_grad_()
        assert model(input_ids=given["input_ids"], attention_mask=learned)[0].requires_grad


def test_a_model_that_knows_no_other_function_keeps_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may do more with the weights than hand them out."""
    for name in ("_supports_sdpa", "_supports_flash_attn", "_supports_flex_attn"):
        monkeypatch.setattr(modeling_llama.LlamaModel, name, False)
    before, during, _ = run(hf_models.model("llama", "eager"), hf_models.inputs("llama"))
    assert torch.equal(before, during)


def test_functions_of_others_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    model, given = hf_models.model("llama", "eager"), hf_models.inputs("llama")
    theirs = function(modeling_llama, calls)

    @functools.wraps(theirs)
    def mine(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, scaling: float, **kwargs: Any
    ) -> Any:
        return theirs(module, query, key, value, attention_mask, scaling)

    mine.__module__ = modeling_llama.__name__
    monkeypatch.setattr(modeling_llama, "eager_attention_forward", mine)
    before, during, _ = run(model, given)
    assert calls == [TOKENS] * 2 * LAYERS
    assert torch.equal(before, during)


def test_texts_of_other_lengths_are_no_other_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    model, given = hf_models.model("llama", "eager"), hf_models.inputs("llama")
    monkeypatch.setattr(modeling_llama, "eager_attention_forward", function(modeling_llama, calls))
    for tokens in range(3, TOKENS):
        run(model, {"input_ids": given["input_ids"][:, :tokens]})
    assert len(calls) == LAYERS * (TOKENS - 3 + 1)  # as often unwatched, and one trial
    with torch.no_grad(), regard.watch(model):
        model.generate(given["input_ids"], max_new_tokens=5, do_sample=False)
    assert len(calls) == LAYERS * (TOKENS - 3 + 2)  # a trial of single queries


def test_a_small_difference_is_seen_in_16_bits_too(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    model, given = hf_models._fresh("llama", "eager").to(torch.bfloat16), hf_models.inputs("llama")
    sharper = function(modeling_llama, calls, lambda module, x, what: x * 1.01 if what == "scores" else x)
    monkeypatch.setattr(modeling_llama, "eager_attention_forward", sharper)
    before, during, _ = run(model, given)
    assert calls.count(TOKENS) == 2 * LAYERS
    assert torch.equal(before, during)


def test_heads_that_are_merged_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    model, given = hf_models.model("llama", "eager"), hf_models.inputs("llama")
    merge = function(modeling_llama, calls, lambda module, x, what: x.flatten(2) if what == "output" else x)
    monkeypatch.setattr(modeling_llama, "eager_attention_forward", merge)
    before, during, _ = run(model, given)
    assert calls.count(TOKENS) == 2 * LAYERS
    assert torch.equal(before, during)


def test_keys_that_a_function_cuts_off_and_keys_that_it_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask with more keys than there are."""
    calls: list[int] = []
    model, given = hf_models.model("llama", "eager"), hf_models.inputs("llama")
    does = function(modeling_llama, calls)
    cuts = with_other_arguments(does, modeling_llama, mask=lambda mask, key: mask[..., : key.shape[2]])
    wide = torch.zeros(1, 1, TOKENS, TOKENS + 3).masked_fill(torch.ones(TOKENS, TOKENS + 3).triu(1).bool(), -1e9)
    given = {"input_ids": given["input_ids"], "attention_mask": wide.to(next(model.parameters()).dtype)}
    monkeypatch.setattr(modeling_llama, "eager_attention_forward", cuts)
    before, during, _ = run(model, given)
    assert calls.count(TOKENS) == LAYERS
    torch.testing.assert_close(during, before, rtol=1e-5, atol=1e-5)
    monkeypatch.setattr(modeling_llama, "eager_attention_forward", does)
    with pytest.raises(RuntimeError, match="must match"), torch.no_grad(), regard.watch(model):
        model(**given)


def test_trials_draw_no_random_numbers_of_the_model() -> None:
    model, given = hf_models.model("llama", "eager"), hf_models.inputs("llama")
    eager_functions._FOUND.clear()
    state = torch.get_rng_state()
    run(model, given)
    assert len(eager_functions._FOUND) == LAYERS
    assert torch.equal(torch.get_rng_state(), state)


def test_what_was_found_keeps_no_module_alive() -> None:
    eager_functions._FOUND.clear()
    model = hf_models._fresh("llama")
    run(model, hf_models.inputs("llama"))
    assert len(eager_functions._FOUND) == LAYERS
    del model
    assert len(eager_functions._FOUND) == 0


def test_options_that_a_function_reads() -> None:
    def none(module: Any, query: Any, scaling: Any, *, softcap: Any = None, **kwargs: Any) -> Any:
        return query, scaling, softcap

    def all_of_them(module: Any, query: Any, **kwargs: Any) -> Any:
        return kwargs.get("position_ids")

    def inside(module: Any, query: Any, **kwargs: Any) -> Any:
        return lambda: kwargs

    def without(module: Any, query: Any, *args: Any) -> Any:
        return args

    read = eager_functions._options_read
    assert read(none.__code__) == {"module", "query", "scaling", "softcap"}
    assert read(all_of_them.__code__) is None
    assert read(inside.__code__) is None
    assert read(without.__code__) == {"module", "query"}


@pytest.mark.parametrize("family", [name for name, zoo in ZOO.items() if zoo.interface and zoo.double])
def test_every_family_in_one_pass_gives_what_it_gave(family: str) -> None:
    model, given = hf_models.model(family, "eager"), hf_models.inputs(family)
    before, during, seen = run(model, given)
    torch.testing.assert_close(during, before, rtol=1e-5, atol=1e-5)
    _, exact, right = run(model, given, exact=True)
    assert torch.equal(exact, before)
    assert seen.layers == right.layers
    assert not seen.unseen


# ----------------------------------------------------------------------------------------------------
# Masks that are causal


def plane(n: int, size: int, low: float = float("-inf")) -> Tensor:
    """A mask that is added: each query sees `size` keys that end at its own."""
    sees = torch.ones(n, n, dtype=torch.bool).tril().triu(1 - size)
    return torch.zeros(1, 1, n, n).masked_fill(~sees, low)


@pytest.mark.parametrize("low", [float("-inf"), torch.finfo(torch.float32).min, -1e4])
@pytest.mark.parametrize("size", [1, 3, 7])
def test_bands_are_known(size: int, low: float) -> None:
    mask = plane(7, size, low).expand(2, -1, -1, -1)
    expected = Causal() if size == 7 else Window(size)
    assert repr(added_band(mask)) == repr(expected)


@pytest.mark.parametrize(
    "mask",
    [
        torch.zeros(1, 1, 7, 7),
        plane(7, 7).mT,
        plane(7, 7)[..., 1:],
        plane(7, 7)[..., 1:, :],
        plane(7, 7).expand(1, 2, 7, 7),
        plane(7, 7) + torch.eye(7),
        plane(7, 7).clamp(min=-5.0),
        plane(7, 7)[:0],
        plane(7, 3).index_fill(3, torch.tensor(0), 0.0),
        torch.cat([plane(7, 7), plane(7, 3)]),
        torch.full((1, 1, 7, 7), float("-inf")),
        torch.zeros(1, 1, 1, 1),
        torch.zeros(7, 7),
        plane(7, 7, float("nan")),
    ],
    ids=[
        "all",
        "ahead",
        "fewer keys",
        "fewer queries",
        "heads",
        "bias",
        "low bias",
        "no text",
        "column",
        "two texts",
        "none",
        "one",
        "axes",
        "not a number",
    ],
)
def test_other_masks_are_no_bands(mask: Tensor) -> None:
    assert added_band(mask) is None
