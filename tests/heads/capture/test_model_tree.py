"""Which modules of a model need hooks, which are closed, and when what was found is found again."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import regard
from regard.heads.capture import model_tree
from regard.heads.capture.model_tree import tree_of

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
W, H = 12, 3


def bert(**options: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": W, "num_attention_heads": H, "intermediate_size": 13, "num_hidden_layers": 2}
    config = transformers.BertConfig(**sizes, vocab_size=29, max_position_embeddings=17, **options)
    return transformers.BertModel(config, add_pooling_layer=False).eval()


def closed(model: nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if id(module) in tree_of(model).closed}


def with_hooks(model: nn.Module) -> set[str]:
    hooked = {id(module) for module in tree_of(model).with_hooks}
    return {name for name, module in model.named_modules() if id(module) in hooked}


def test_the_encoder_of_bert_is_closed() -> None:
    model = bert()
    below = ["", ".attention", ".attention.self"]
    layers = {f"encoder.layer.{i}{name}" for i in range(2) for name in below}
    assert closed(model) == {"encoder", "encoder.layer", *layers}
    assert with_hooks(model) == {"", "encoder", *(name for name in layers if name.endswith("self"))}
    assert len(tree_of(model).can_be_hooked) == len(list(model.modules()))


def test_a_closed_block_of_an_open_model_has_hooks() -> None:
    """While it runs, torch functions are not followed."""
    model = bert()
    replace_a_module(model)
    assert {"encoder.layer.0", "encoder.layer.0.attention.self"} <= with_hooks(model)


def test_heads_that_are_handed_over_keep_the_hooks_around_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_tree, "_takes_hidden_states", lambda kind: False)
    model = bert()
    assert with_hooks(model) == {"", *closed(model)} - {"encoder.layer"}


@pytest.mark.parametrize("line", ["x += 1", "x.add_(1)", "x[0] = 1"])
def test_code_that_may_write_over_a_tensor_is_known(line: str) -> None:
    home: dict[str, Any] = {"__name__": "transformers.guest"}
    for name, first in (("Writes", line), ("Reads", "y = x + 1")):
        exec(f"class {name}:\n    def forward(self, x):\n        {first}\n        return x", home)
    assert len(tree_of(bert()).steady) == 2
    writes, reads = (model_tree.forward_code(home[name]) for name in ("Writes", "Reads"))
    assert writes is not None
    assert reads is not None
    assert writes.writes
    assert not reads.writes


class Guest(nn.Module):
    """Attention by hand."""

    def forward(self, x: torch.Tensor, *_: Any) -> torch.Tensor:
        return (x @ x.mT).softmax(-1) @ x


def replace_a_module(model: Any) -> None:
    model.encoder.layer[1].intermediate.dense = Guest()


def replace_a_forward(model: Any) -> None:
    model.encoder.layer[1].output.forward = lambda x, _: x


def replace_an_attribute(model: Any) -> None:
    model.encoder.layer[1].intermediate.intermediate_act_fn.act = lambda x: x.softmax(-1)


def replace_a_class(model: Any) -> None:
    model.encoder.layer[1].output.__class__ = Guest


def add_a_hook(model: Any) -> None:
    model.encoder.layer[1].output.register_forward_hook(lambda module, args, out: out.softmax(-1))


def add_a_hook_to_a_leaf(model: Any) -> None:
    model.encoder.layer[1].output.dense.register_forward_pre_hook(lambda module, args: args)


def add_a_softmax(model: Any) -> None:
    model.encoder.layer[1].output.dropout = nn.Softmax(-1)


CHANGES = [
    replace_a_module,
    replace_a_forward,
    replace_an_attribute,
    replace_a_class,
    add_a_hook,
    add_a_hook_to_a_leaf,
    add_a_softmax,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("known", [False, True], ids=["first", "seen before"])
def test_a_module_that_may_compute_attention_opens_those_around_it(change: Any, known: bool) -> None:
    model = bert()
    if known:
        assert "encoder" in closed(model)
    change(model)
    below = {name.removeprefix("encoder.layer.0") for name in closed(model) if name.startswith("encoder.layer.0")}
    assert below == {"", ".attention", ".attention.self"}
    assert not {"encoder", "encoder.layer", "encoder.layer.1"} & closed(model)


def test_hooks_on_all_modules_close_nothing() -> None:
    model = bert()
    assert closed(model)
    hook = nn.modules.module.register_module_forward_hook(lambda module, args, out: None)
    try:
        assert not closed(model)
    finally:
        hook.remove()
    assert closed(model)


def test_what_was_found_is_kept_as_long_as_the_model() -> None:
    model = bert()
    assert tree_of(model).names is tree_of(model).names
    model.encoder.layer.append(type(model.encoder.layer[0])(model.config, layer_idx=2).eval())
    assert "encoder.layer.2.attention.self" in tree_of(model).names.values()
    key, dead = id(model), weakref.ref(model)
    assert key in model_tree._KNOWN
    del model
    gc.collect()
    assert dead() is None
    assert key not in model_tree._KNOWN


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_layers_are_seen_in_open_and_closed_modules_alike(change: Any) -> None:
    ids = torch.randint(0, 29, (2, 7))
    plain, changed = bert(), bert()
    if change in (replace_a_module, replace_a_class):  # (sizes do not fit)
        return
    change(changed)
    with torch.no_grad(), regard.watch(plain) as expected:
        plain(ids)
    with torch.no_grad(), regard.watch(changed) as seen:
        out = changed(ids).last_hidden_state
    with torch.no_grad():
        torch.testing.assert_close(changed(ids).last_hidden_state, out)
    assert seen.layers == expected.layers == [f"encoder.layer.{i}.attention.self" for i in range(2)]
    assert torch.equal(seen[0].entropy, expected[0].entropy)


def test_attention_by_hand_in_a_hook_is_seen() -> None:
    model = bert()

    def attend_again(module: nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:
        q = out[:, None]
        return ((q @ q.mT).softmax(-1) @ q).transpose(1, 2).flatten(2)

    model.encoder.layer[1].output.register_forward_hook(attend_again)
    with torch.no_grad(), regard.watch(model) as seen:
        model(torch.randint(0, 29, (2, 7)))
    assert len(seen.layers) == 3


def test_what_is_recorded_is_freed_with_the_record() -> None:
    model, ids = bert(), torch.randint(0, 29, (2, 7))
    gc.collect()
    gc.disable()
    try:
        watching = regard.watch(model)
        with torch.no_grad(), watching as seen:
            model(ids)
        capture, record = weakref.ref(watching), weakref.ref(seen)
        del watching, seen
        assert capture() is None
        assert record() is None
    finally:
        gc.enable()
