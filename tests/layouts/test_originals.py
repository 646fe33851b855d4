"""Every layout, both directions, against the module that its weights come from."""

from __future__ import annotations

import pytest
import torch
from conformance.transformers_modules import MODULES
from layouts.originals import ORIGINALS, Original, randomised
from torch import Tensor, nn

from regard import layouts
from regard.layouts.convert import LAYOUTS
from regard.positions import Rotary

cases = pytest.mark.parametrize("name", ORIGINALS)


def loaded(original: Original, state: dict[str, Tensor], **more: object) -> nn.Module:
    load = layouts.load_block if original.block else layouts.load
    if LAYOUTS[original.layout].named_only:
        more = {"layout": original.layout, **more}
    return load(state, num_heads=original.num_heads, **original.options(), **more)


def close(ours: Tensor, theirs: Tensor, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def inputs(original: Original, n: int = 7) -> Tensor:
    return torch.randn(2, n, original.width, dtype=torch.float64, generator=torch.Generator().manual_seed(5))


@cases
@torch.no_grad()
def test_a_loaded_layer_computes_what_the_original_does(name: str) -> None:
    original = ORIGINALS[name]
    theirs = randomised(original.make(), 1)
    ours = loaded(original, theirs.state_dict())
    x = inputs(original)
    close(ours(x, **original.call), original.run(theirs, x), original.tolerance)


@cases
@torch.no_grad()
def test_an_exported_layer_is_the_original_again(name: str) -> None:
    original = ORIGINALS[name]
    state = randomised(original.make(), 2).state_dict()
    layer = loaded(original, state)
    exported = layouts.export(layer, original.layout)
    torch.testing.assert_close(exported, dict(state), rtol=0, atol=0)
    theirs = randomised(original.make(), 3)  # other weights, so that nothing is right already
    theirs.load_state_dict(exported)
    x = inputs(original)
    close(layer(x, **original.call), original.run(theirs, x), original.tolerance)


@cases
def test_the_layout_is_found_and_can_be_named(name: str) -> None:
    original = ORIGINALS[name]
    state = randomised(original.make(), 1).state_dict()
    matching = [layout for layout in LAYOUTS.values() if layout.matches(state) and not layout.unknown(state)]
    if not LAYOUTS[original.layout].named_only:
        assert [layout.name for layout in matching if not layout.named_only] == [original.layout]
    found, named = loaded(original, state), loaded(original, state, layout=original.layout)
    torch.testing.assert_close(found.state_dict(), named.state_dict(), rtol=0, atol=0)


def test_every_layout_has_an_original() -> None:
    modules = {module.layout for module in MODULES.values()} | {"gemma3n", "gemma3n_shared"}
    assert {original.layout for original in ORIGINALS.values()} | modules == set(LAYOUTS)


@pytest.mark.parametrize("kdim, vdim", [(7, None), (None, 11), (7, 11)])
@torch.no_grad()
def test_torch_with_other_widths_of_keys_and_values(kdim: int | None, vdim: int | None) -> None:
    theirs = randomised(nn.MultiheadAttention(15, 3, kdim=kdim, vdim=vdim, batch_first=True), 1)
    ours = layouts.load(theirs.state_dict(), num_heads=3)
    assert (ours.key_dim, ours.value_dim) == (kdim or 15, vdim or 15)
    q, k, v = (torch.randn(2, n, w, dtype=torch.float64) for n, w in ((5, 15), (7, kdim or 15), (7, vdim or 15)))
    close(ours(q, k, v), theirs(q, k, v)[0])
    torch.testing.assert_close(layouts.export(ours, "torch"), dict(theirs.state_dict()), rtol=0, atol=0)


@torch.no_grad()
def test_rotary_rows_are_turned_for_an_interleaved_layer_and_back() -> None:
    original = ORIGINALS["llama"]
    theirs = randomised(original.make(), 1)
    ours = layouts.load(theirs.state_dict(), 6, position_encoding=Rotary(10, interleaved=True))
    x = inputs(original)
    close(ours(x, **original.call), original.run(theirs, x), original.tolerance)
    torch.testing.assert_close(layouts.export(ours, "llama"), dict(theirs.state_dict()), rtol=0, atol=0)


def test_dtype_and_device_are_those_of_the_tensors_and_nothing_is_shared() -> None:
    for dtype, device in ((torch.bfloat16, "cpu"), (torch.float64, "cpu"), (torch.float32, "meta")):
        state = nn.MultiheadAttention(10, 2, dtype=dtype, device=device).state_dict()
        layer = layouts.load(state, 2)
        assert {(p.dtype, p.device.type, p.requires_grad) for p in layer.parameters()} == {(dtype, device, True)}
    state = nn.MultiheadAttention(10, 2).state_dict()
    before = state["in_proj_weight"].clone()
    layer = layouts.load(state, 2)
    exported = layouts.export(layer, "torch")
    same_names = layouts.export(layer, "separate")
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.fill_(7.0)
    assert torch.equal(state["in_proj_weight"], before)
    assert torch.equal(exported["in_proj_weight"], before)
    assert torch.equal(same_names["q_proj.weight"], before[:10])


def test_loading_draws_nothing_at_random() -> None:
    state = ORIGINALS["t5 encoder"].make().state_dict()
    torch.manual_seed(0)
    layouts.load(state, 3)
    drawn = torch.rand(3)
    torch.manual_seed(0)
    assert torch.equal(drawn, torch.rand(3))
