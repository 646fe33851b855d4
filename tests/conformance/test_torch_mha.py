"""A swapped `nn.MultiheadAttention` beside torch's own where a call is unusual: what torch refuses is refused by an
error of the same type, what torch computes is computed, and what cannot be served is refused in words."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regard
from regard.masks import Causal

B, N, M, W, H = 2, 5, 7, 6, 3
TIGHT = {"rtol": 1e-12, "atol": 1e-12}


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def pair(split: bool = False, **options: Any) -> tuple[nn.Module, nn.Module]:
    """Torch's, and ours with the same weights."""
    options = {"batch_first": True, "dtype": torch.float64, **options}
    theirs = nn.MultiheadAttention(W, H, **options).eval()
    return theirs, regard.swap(copy.deepcopy(theirs), split=split)


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


# ----------------------------------------------------------------------------------------------------
# Errors


def q() -> Tensor:
    return numbers(B, N, W)


def k() -> Tensor:
    return numbers(B, M, W)


REFUSED: dict[str, tuple[Callable[[], tuple[tuple[Any, ...], dict[str, Any]]], str]] = {
    "key without a batch": (lambda: ((q(), k()[0], k()), {}), "query, key, value: expected all three with 3 axes"),
    "value without a batch": (lambda: ((q(), k(), k()[0]), {}), "query, key, value: expected all three with 3 axes"),
    "query without a batch": (lambda: ((q()[0], k(), k()), {}), "query, key, value: expected all three with 3 axes"),
    "four axes": (lambda: ((q()[None], k()[None], k()[None]), {}), "query, key, value: expected all three with 3 axes"),
    "one axis": (lambda: ((q()[0, 0], q()[0, 0], q()[0, 0]), {}), "query, key, value: expected all three with 3 axes"),
    "no tensor": (lambda: (([[1.0]], k(), k()), {}), "query: expected a tensor, received list"),
    "width of the query": (lambda: ((q()[..., 1:], k(), k()), {}), "query: expected .*6"),
    "values of another length": (lambda: ((q(), k(), k()[:, 1:]), {}), "expected the same .*length"),
    "padding of one axis": (
        lambda: ((q(), k(), k()), {"key_padding_mask": torch.zeros(M).bool()}),
        r"key_padding_mask: expected shape \(B, M\) = \(2, 7\), received \(7,\)",
    ),
    "padding of a batch for a text without": (
        lambda: ((q()[0], k()[0], k()[0]), {"key_padding_mask": torch.zeros(1, M).bool()}),
        r"key_padding_mask: expected shape \(B, M\) = \(1, 7\), received \(1, 1, 7\)",
    ),
    "padding of another length": (
        lambda: ((q(), k(), k()), {"key_padding_mask": torch.zeros(B, N).bool()}),
        r"key_padding_mask: expected shape \(B, M\) = \(2, 7\), received \(2, 5\)",
    ),
    "a mask of one axis": (
        lambda: ((q(), k(), k()), {"attn_mask": torch.zeros(M).bool()}),
        r"attn_mask: expected shape \(N, M\) = \(5, 7\)",
    ),
    "a mask per text": (
        lambda: ((q(), k(), k()), {"attn_mask": torch.zeros(B, N, M).bool()}),
        r"attn_mask: expected .*\(B \* H, N, M\) = \(6, 5, 7\), received \(2, 5, 7\)",
    ),
    "a mask per head, too many": (
        lambda: ((q()[0], k()[0], k()[0]), {"attn_mask": torch.zeros(H + 1, N, M).bool()}),
        r"attn_mask: expected .*\(B \* H, N, M\) = \(3, 5, 7\), received \(4, 5, 7\)",
    ),
    "an integer mask": (
        lambda: ((q(), k(), k()), {"attn_mask": torch.zeros(N, M).long()}),
        "attn_mask: expected a boolean tensor",
    ),
}


@pytest.mark.parametrize("split", [False, True], ids=["swap", "split"])
@pytest.mark.parametrize("name", REFUSED)
def test_what_torch_refuses_is_an_error_of_its_type_in_our_words(name: str, split: bool) -> None:
    make, words = REFUSED[name]
    args, options = make()
    theirs, ours = pair(split)
    for module in (theirs.train(), theirs.eval()):  # in evaluation torch may go another way, and refuses all the same
        with pytest.raises((AssertionError, RuntimeError, AttributeError)) as refused:
            module(*args, **options)
    with pytest.raises(type(refused.value), match=words) as error:
        ours(*args, **options)
    assert isinstance(error.value, (ValueError, TypeError))
    assert str(refused.value)[:40] in str(error.value)  # torch's words, too: they may have been looked for
    assert isinstance(pickle.loads(pickle.dumps(error.value)), type(refused.value))


def test_an_error_of_ours_alone_stays_as_it_is() -> None:
    _, ours = pair()
    with pytest.raises(ValueError, match="nested query, key, value: expected all three nested") as error:
        ours(torch.nested.nested_tensor([numbers(3, W)], layout=torch.jagged), k()[:1], k()[:1])
    assert "remedy: torch.nested.to_padded_tensor" in str(error.value)


# ----------------------------------------------------------------------------------------------------
# Dtypes


@pytest.mark.parametrize("options", [{}, {"kdim": 5, "vdim": 4}], ids=["packed", "separate"])
def test_a_bias_of_another_dtype_is_added_in_that_of_the_product(options: dict[str, int]) -> None:
    theirs, ours = pair(**options)
    for module in (theirs, ours):
        module.in_proj_bias = nn.Parameter(module.in_proj_bias.detach().half() + 0.5)
    x, key, value = q(), numbers(B, M, options.get("kdim", W)), numbers(B, M, options.get("vdim", W))
    out, weights = ours(x, key, value)
    assert out.dtype is torch.float64
    same = copy.deepcopy(ours)
    same.in_proj_bias = nn.Parameter(ours.in_proj_bias.detach().double())
    torch.testing.assert_close((out, weights), same(x, key, value), **TIGHT)
    with torch.no_grad():
        torch.testing.assert_close((out, weights), theirs(x, key, value), **TIGHT)


def test_inputs_of_another_dtype_than_the_weights_are_refused_as_by_torch() -> None:
    theirs, ours = pair()
    for args in ((q().float(), k(), k()), (q(), k().float(), k()), (q(), k(), k().half())):
        for module in (theirs, ours):
            with pytest.raises(RuntimeError, match=r"must have the same dtype|to have the same dtype"):
                module(*args)


# ----------------------------------------------------------------------------------------------------
# Nested tensors


LAYOUTS = {"strided": torch.strided, "jagged": torch.jagged}


def nested(lengths: list[int], layout: torch.layout) -> Tensor:
    return torch.nested.nested_tensor([numbers(length, W) for length in lengths], layout=layout)


@pytest.mark.parametrize("extra", [{}, {"add_bias_kv": True}, {"add_zero_attn": True}], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("cross", [False, True], ids=["self", "cross"])
def test_nested_texts_are_each_as_if_alone(cross: bool, layout: str, extra: dict[str, bool]) -> None:
    theirs, ours = pair(**extra)
    x = nested([4, 1, 6], LAYOUTS[layout])
    memory = nested([7, 3, 2], LAYOUTS[layout]) if cross else x
    out, weights = ours(x, memory, memory)
    assert out.is_nested
    assert out.layout is x.layout
    for i, (row, text, keys) in enumerate(zip(out.unbind(), x.unbind(), memory.unbind(), strict=True)):
        alone, seen = theirs(text, keys, keys)
        torch.testing.assert_close(row, alone, **TIGHT)
        here = weights[i, : len(text)]
        torch.testing.assert_close(here[:, : len(keys)], seen[:, : len(keys)], **TIGHT)
    if not extra:
        again = regard.swap(copy.deepcopy(theirs), split=True)(x, memory, memory, need_weights=False)[0]
        for row, same in zip(out.unbind(), again.unbind(), strict=True):
            torch.testing.assert_close(same, row, **TIGHT)


def test_nested_gradients_reach_the_weights() -> None:
    theirs, ours = pair()
    x = nested([4, 6], torch.jagged)
    out = ours(x, x, x)[0]
    (x + out).values().sum().backward()  # the residual of a block: both have the same offsets
    expected = [theirs(text, text, text)[0].sum() for text in x.unbind()]
    torch.stack(expected).sum().backward()
    torch.testing.assert_close(ours.in_proj_weight.grad, theirs.in_proj_weight.grad, **TIGHT)


def test_nested_texts_that_do_not_fit_are_refused() -> None:
    _, ours = pair()
    x = nested([4, 6], torch.strided)
    empty = torch.nested.nested_tensor([])
    with pytest.raises(AssertionError, match="nested query, key, value: expected texts of shape") as error:
        ours(empty, empty, empty)
    assert isinstance(error.value, ValueError)
    for args, options, words in (
        ((x, q(), q()), {}, "received nested, not nested, not nested"),
        ((q(), x, x), {}, "received not nested, nested, nested"),
        ((x, x, x), {"key_padding_mask": torch.zeros(2, 6).bool()}, "a key_padding_mask"),
        (
            (x, nested([4], torch.strided), nested([4], torch.strided)),
            {},
            r"received lengths \[4, 6\], \[4\] and \[4\]",
        ),
        ((x, x, nested([5, 6], torch.strided)), {}, r"received lengths \[4, 6\], \[4, 6\] and \[5, 6\]"),
    ):
        with pytest.raises(ValueError, match=words):
            ours(*args, **options)


# ----------------------------------------------------------------------------------------------------
# TorchScript


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(W, H, 11, batch_first=True)
    return regard.swap(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval())


MODULES: dict[str, Callable[[], nn.Module]] = {
    "swapped": lambda: pair()[1].float(),
    "split": lambda: pair(split=True)[1].float(),
    "within an encoder": encoder,
    "layer": lambda: regard.MultiHeadAttention(W, H),
    "block": lambda: regard.AttentionBlock(regard.MultiHeadAttention(W, H)),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("name", MODULES)
def test_torchscript_is_refused_in_words(name: str) -> None:
    module = MODULES[name]()
    with pytest.raises(TypeError, match=r"torch.jit.script: expected .*TorchScript can compile.*torch.export.export"):
        torch.jit.script(module)
    x = torch.randn(B, N, W)
    args = (x, x, x) if name in ("swapped", "split") else (x,)
    module(*args)  # is as it was
    with pytest.raises(TypeError, match=r"attention: expected .*received a call under torch.jit.trace.*torch.export"):
        torch.jit.trace(module, args)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_a_trace_of_the_function_is_refused_and_an_export_serves() -> None:
    x = torch.randn(B, H, N, 4)

    class Attend(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return regard.attend(x, x, x, mask=Causal())

    for call in (lambda x: regard.attend(x, x, x), lambda x: regard.measure(x, x).entropy):
        with pytest.raises(TypeError, match=r"received a call under torch.jit.trace"):
            torch.jit.trace(call, (x,))
    program = torch.export.export(Attend(), (x,))  # as the remedy says
    torch.testing.assert_close(program.module()(x), regard.attend(x, x, x, mask=Causal()))
