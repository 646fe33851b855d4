"""Latent attention against the attention of transformers' model types: values, gradients, prefill and decoding."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from variants.latent_originals import HEADS, ORIGINALS, WIDTH, Original, run

from regard import LatentAttention, LatentCache, layouts
from regard.masks import Causal

FORMS = pytest.mark.parametrize("absorb", [False, True])
NAMES = pytest.mark.parametrize("name", ORIGINALS)


def loaded(original: Original, module: torch.nn.Module, absorb: bool | None) -> LatentAttention:
    position_encoding = original.position_encoding()
    options = {"position_encoding": position_encoding, "absorb": absorb, **original.options()}
    return layouts.load(module.state_dict(), HEADS, layout=original.layout, **options).eval()


def inputs(tokens: int = 17) -> Tensor:
    return torch.randn(2, tokens, WIDTH, generator=torch.Generator().manual_seed(3))


def close(ours: Tensor, theirs: Tensor) -> None:
    """To 1e-5 of the largest number."""
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5 * max(1.0, float(theirs.detach().abs().amax())))


@FORMS
@NAMES
def test_output_and_weights(name: str, absorb: bool) -> None:
    module, rotary = ORIGINALS[name].make()
    layer, x = loaded(ORIGINALS[name], module, absorb), inputs()
    out, weights = layer(x, mask=Causal(), need_weights=True)
    theirs, their_weights = run(module, rotary, x)
    close(out, theirs)
    close(weights, their_weights)


@FORMS
@NAMES
def test_gradients_of_the_input_and_every_parameter(name: str, absorb: bool) -> None:
    original = ORIGINALS[name]
    module, rotary = original.make()
    layer, x, y = loaded(original, module, absorb), inputs().requires_grad_(), inputs().requires_grad_()
    pull = torch.randn(2, 17, WIDTH, generator=torch.Generator().manual_seed(5))
    (layer(x, mask=Causal()) * pull).sum().backward()
    (run(module, rotary, y)[0] * pull).sum().backward()
    assert x.grad is not None
    assert y.grad is not None
    close(x.grad, y.grad)
    for parameter in layer.parameters():
        assert parameter.grad is not None
        parameter.data = parameter.grad
    theirs = {key: parameter.grad for key, parameter in module.named_parameters()}
    ours = layouts.export(layer, original.layout)  # the gradients by their names
    assert ours.keys() == theirs.keys()
    for key, gradient in theirs.items():
        assert gradient is not None
        close(ours[key], gradient)


@pytest.mark.parametrize("absorb", [None, False, True])
@NAMES
@torch.no_grad()
def test_prefill_and_decoding_token_by_token(name: str, absorb: bool | None) -> None:
    from transformers import DynamicCache

    module, rotary = ORIGINALS[name].make()
    layer, x = loaded(ORIGINALS[name], module, absorb), inputs()
    ours, theirs = LatentCache(), DynamicCache()
    for start, stop in ((0, 11), *((i, i + 1) for i in range(11, 17))):
        out, weights = layer(x[:, start:stop], mask=Causal(), cache=ours, need_weights=True)
        expected, their_weights = run(module, rotary, x[:, start:stop], theirs, start)
        close(out, expected)
        close(weights, their_weights)
    assert len(ours) == 17


@NAMES
def test_weights_go_back_bit_for_bit(name: str) -> None:
    original = ORIGINALS[name]
    module, _ = original.make()
    state = dict(module.state_dict())
    layer = loaded(original, module, None)
    back = layouts.export(layer, original.layout)
    assert back.keys() == state.keys()
    for key, tensor in state.items():
        assert torch.equal(back[key], tensor), key
    if original.layout == "deepseek":  # found by its keys, and with the pairs in the other order
        other = original.position_encoding()
        if other is not None:
            other.interleaved = False
        turned = layouts.load(state, HEADS, position_encoding=other, **original.options())
        x = inputs(5)
        torch.testing.assert_close(turned(x), layer(x), rtol=1e-4, atol=1e-5)
        assert all(torch.equal(tensor, state[key]) for key, tensor in layouts.export(turned, "deepseek").items())
