"""Projections where gradients are wanted: values and gradients as torch's, of first and second order, and no more is
kept for the backward pass."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils.checkpoint import checkpoint

import regard
import regard.projections
from regard.kernels import native_library, native_products
from regard.projections import project, project_each

_TORCH_IS_SLOW = regard.projections._torch_is_slow
IN, OUTS, ROWS = 59, (53, 31, 37), 101
LEAVES = [(part, i) for part in ("weight", "bias") for i in range(3)]
pytestmark = pytest.mark.skipif(native_library.load() is None, reason="the native kernel is not there")


@pytest.fixture(autouse=True)
def ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small weights are large, and our products serve every CPU."""
    ours = frozenset({torch.float32, torch.bfloat16, torch.float16})
    monkeypatch.setattr(native_products, "rows_served", lambda dtype: range(1, 1 << 40) if dtype in ours else range(0))
    monkeypatch.setattr(regard.projections, "_LARGE", 1)
    monkeypatch.setattr(regard.projections, "_WORTHWHILE", 1)
    monkeypatch.setattr(regard.projections, "_torch_is_slow", lambda x: False)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a CPU of which torch uses half."""
    monkeypatch.setattr(regard.projections, "_torch_is_slow", lambda x: x.dtype is torch.float32)


def new(*, bias: bool = True, dtype: torch.dtype = torch.float32) -> tuple[nn.Linear, ...]:
    torch.manual_seed(7)
    return tuple(nn.Linear(IN, out, bias=bias, dtype=dtype) for out in OUTS)


def rows(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> Tensor:
    return torch.randn(*(shape or (ROWS, IN)), generator=torch.Generator().manual_seed(seed)).to(dtype)


def each(linears: tuple[nn.Module, ...], x: Tensor) -> tuple[Tensor, ...]:
    """By torch."""
    return tuple([linear(x) for linear in linears])


def is_ours(out: Tensor) -> bool:
    return type(out.grad_fn).__name__ == "_LearningBackward"


def parameters(linears: tuple[nn.Linear, ...]) -> list[nn.Parameter]:
    return [parameter for linear in linears for parameter in linear.parameters()]


def outs_and_gradients(function: Callable[..., tuple[Tensor, ...]], linears: Any, x: Tensor) -> list[Tensor]:
    """The outputs, and the gradients of x and all parameters from the same random gradient of the outputs."""
    outs = function(linears, x)
    downs = [rows(*out.shape, dtype=out.dtype, seed=11 + i) for i, out in enumerate(outs)]
    leaves = [leaf for leaf in (x, *parameters(linears)) if leaf.requires_grad]
    return [*[out.detach() for out in outs], *torch.autograd.grad(outs, leaves, downs)]


def exactly(linears: tuple[nn.Linear, ...], x: Tensor) -> list[Tensor]:
    """The same in float64."""
    exact = tuple(nn.Linear(IN, linear.out_features, linear.bias is not None).double() for linear in linears)
    for a, b in zip(exact, linears, strict=True):
        a.load_state_dict(b.state_dict())
        a.requires_grad_(b.weight.requires_grad)
    x64 = x.detach().double().requires_grad_(x.requires_grad)
    outs = each(exact, x64)
    downs = [rows(*out.shape, dtype=x.dtype, seed=11 + i).double() for i, out in enumerate(outs)]
    leaves = [leaf for leaf in (x64, *parameters(exact)) if leaf.requires_grad]
    return [*[out.detach() for out in outs], *torch.autograd.grad(outs, leaves, downs)]


def check(linears: tuple[nn.Linear, ...], x: Tensor) -> None:
    """The error of each result is at most twice torch's own."""
    assert all(map(is_ours, project_each(linears, x)))
    received, plain = outs_and_gradients(project_each, linears, x), outs_and_gradients(each, linears, x)
    for ours, theirs, exact in zip(received, plain, exactly(linears, x), strict=True):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        tiny = 4 * torch.finfo(theirs.dtype).eps * exact.abs().max()
        assert (ours - exact).abs().max() <= 2 * (theirs - exact).abs().max() + tiny


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", ""])
@pytest.mark.parametrize("shape", [(ROWS, IN), (1, IN), (3, 37, IN), (2, 3, 17, IN)], ids=str)
def test_values_and_gradients(shape: tuple[int, ...], bias: bool, dtype: torch.dtype) -> None:
    check(new(bias=bias, dtype=dtype), rows(*shape, dtype=dtype).requires_grad_())


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 5), st.integers(47, 97), st.sampled_from(["plain", "transposed", "sliced", "expanded"]))
def test_strides(batch: int, tokens: int, how: str) -> None:
    x = {
        "plain": lambda: rows(batch, tokens, IN),
        "transposed": lambda: rows(tokens, batch, IN).transpose(0, 1),
        "sliced": lambda: rows(batch, tokens, 2 * IN)[..., ::2],
        "expanded": lambda: rows(1, tokens, IN).expand(batch, tokens, IN),
    }[how]()
    check(new(), x.requires_grad_())


def test_x_without_a_gradient() -> None:
    check(new(), rows())


def test_frozen_weights() -> None:
    linears = new()
    for linear in linears:
        linear.requires_grad_(False)
    check(linears, rows().requires_grad_())


@pytest.mark.parametrize("part, i", LEAVES, ids=str)
def test_one_parameter_alone_wants_a_gradient(part: str, i: int) -> None:
    linears, received = new(), []
    for parameter in parameters(linears):
        parameter.requires_grad_(False)
    leaf = getattr(linears[i], part).requires_grad_()
    for function in (project_each, each):
        torch.cat(function(linears, rows()), -1).square().sum().backward()
        received.append(leaf.grad)
        leaf.grad = None
    torch.testing.assert_close(*received)
    assert not any(parameter.grad is not None for parameter in parameters(linears))


def test_biases_on_some_of_them_alone() -> None:
    linears = new()
    linears[1].bias = None
    check(linears, rows().requires_grad_())


def test_an_output_that_nobody_uses_gives_no_gradients() -> None:
    linears, x = new(), rows().requires_grad_()
    first, _, last = project_each(linears, x)
    (first.sum() + 2 * last.sum()).backward()
    assert linears[1].weight.grad is None
    assert linears[1].bias.grad is None
    torch.testing.assert_close(x.grad[0], linears[0].weight.sum(0) + 2 * linears[2].weight.sum(0))


def test_second_derivatives() -> None:
    linears, x = new(), rows().requires_grad_()
    leaves, received = [x, *parameters(linears)], []
    for function in (project_each, each):
        loss = torch.cat(function(linears, x), -1).sin().sum()
        first = torch.autograd.grad(loss, leaves, create_graph=True)
        received.append(torch.autograd.grad(sum(g.square().sum() for g in first), leaves))
    for ours, theirs in zip(*received, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4 * float(theirs.abs().max()))


def test_a_batch_of_gradients() -> None:
    linears, x = new(), rows(3, 37, IN).requires_grad_()
    downs = [rows(5, 3, 37, out, seed=out) for out in OUTS]
    leaves = [x, *parameters(linears)]
    ours, theirs = (
        torch.autograd.grad(f(linears, x), leaves, downs, is_grads_batched=True) for f in (project_each, each)
    )
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def kept(function: Callable[..., tuple[Tensor, ...]], linears: tuple[nn.Linear, ...], x: Tensor) -> set[int]:
    """The addresses of what is kept for the backward pass."""
    addresses: set[int] = set()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: addresses.add(t.data_ptr()) or t, lambda t: t):
        function(linears, x)
    return addresses


@pytest.mark.parametrize("x_learns, weights_learn", [(True, True), (True, False), (False, True)])
def test_what_is_kept_is_what_torch_keeps(x_learns: bool, weights_learn: bool) -> None:
    linears, x = new(), rows().requires_grad_(x_learns)
    for linear in linears:
        linear.requires_grad_(weights_learn)
    assert is_ours(project_each(linears, x)[0])
    assert kept(project_each, linears, x) == kept(each, linears, x) != set()


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(reentrant: bool) -> None:
    linears, x = new(), rows().requires_grad_()
    outs = checkpoint(lambda x: torch.cat(project_each(linears, x), -1), x, use_reentrant=reentrant)
    outs.square().sum().backward()
    received, x.grad = x.grad, None
    torch.cat(each(linears, x), -1).square().sum().backward()
    torch.testing.assert_close(received, x.grad, rtol=1e-4, atol=1e-4)


def test_a_result_may_be_changed_in_place() -> None:
    linears, x = new(), rows().requires_grad_()
    outs = project_each(linears, x)
    for out in outs:
        out.mul_(2)
    torch.cat(outs, -1).sum().backward()
    torch.testing.assert_close(x.grad[0], 2 * sum(linear.weight.sum(0) for linear in linears))


def test_a_weight_that_changed_before_the_backward_pass_is_an_error() -> None:
    linears, x = new(), rows().requires_grad_()
    out = torch.cat(project_each(linears, x), -1).sum()
    with torch.no_grad():
        linears[1].weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


def test_hooks_of_modules_parameters_and_results_are_called() -> None:
    linears, x, seen = new(), rows().requires_grad_(), []
    outs = project_each(linears, x)
    assert is_ours(outs[0])
    outs[0].register_hook(lambda _: seen.append("result"))
    linears[0].weight.register_hook(lambda _: seen.append("gradient"))
    linears[0].weight.register_post_accumulate_grad_hook(lambda _: seen.append("accumulated"))
    torch.cat(outs, -1).sum().backward()
    assert seen == ["result", "gradient", "accumulated"]
    linears[1].register_full_backward_hook(lambda *_: seen.append("module"))
    torch.cat(project_each(linears, x), -1).sum().backward()
    assert seen.count("module") == 1


def test_torch_func() -> None:
    linears, x = new(), rows()
    held = nn.ModuleList(linears)

    class Each(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.held = held

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat(project_each(tuple(self.held), x), -1)

    module = Each()
    weights = dict(module.named_parameters())
    one = grad(lambda weights, x: functional_call(module, weights, (x,)).sum())
    per_row = vmap(one, (None, 0))(weights, x[:3])
    torch.testing.assert_close(per_row["held.0.weight"][2], x[2].expand(OUTS[0], IN))


def test_mixed_precision_is_torchs() -> None:
    linears, x = new(), rows().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        out = project_each(linears, x)[0]
    assert out.dtype is torch.bfloat16
    assert not is_ours(out)


def test_small_weights_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    linears, x = new(), rows().requires_grad_()
    total = sum(linear.weight.numel() for linear in linears)
    monkeypatch.setattr(regard.projections, "_LARGE", total)
    assert is_ours(project_each(linears, x)[0])
    monkeypatch.setattr(regard.projections, "_LARGE", total + 1)
    assert not is_ours(project_each(linears, x)[0])
    assert outs_and_gradients(project_each, linears, x)[0].equal(outs_and_gradients(each, linears, x)[0])


FOLLOWERS: list[dict[str, Any]] = [
    {},
    {"activation": "gelu"},
    {"activation": "tanh"},
    {"add": rows(ROWS, OUTS[0], seed=3)},
    {"times": rows(ROWS, OUTS[0], seed=3)},
]


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("follower", FOLLOWERS, ids=["", "gelu", "tanh", "add", "times"])
def test_one_alone_where_torch_is_slow(follower: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    linear, x = new()[0], rows().requires_grad_()
    leaves = [x, linear.weight, linear.bias]
    out = project(linear, x, **follower)
    received = [out, *torch.autograd.grad(out.square().sum(), leaves, create_graph=True)]
    assert is_ours(project(linear, x))
    monkeypatch.setattr(regard.projections, "_torch_is_slow", lambda x: False)
    out = project(linear, x, **follower)
    assert not is_ours(project(linear, x))
    for ours, torchs in zip(received, [out, *torch.autograd.grad(out.square().sum(), leaves)], strict=True):
        torch.testing.assert_close(ours, torchs, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("slow")
def test_one_alone_is_torchs_in_other_dtypes_and_without_gradients() -> None:
    linear = new(dtype=torch.bfloat16)[0]
    assert not is_ours(project(linear, rows(dtype=torch.bfloat16).requires_grad_()))
    linear = new()[0]
    assert is_ours(project(linear, rows()))  # its weights learn
    assert project(linear.requires_grad_(False), rows()).grad_fn is None
    with torch.no_grad():
        assert project(new()[0], rows()).grad_fn is None


@pytest.mark.usefixtures("slow")
def test_hooks_see_one_alone() -> None:
    linear, x, seen = new()[0], rows().requires_grad_(), []
    linear.register_forward_hook(lambda *_: seen.append(1))
    assert not is_ours(project(linear, x))
    assert seen == [1]


def test_one_alone_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regard.projections, "_torch_is_slow", _TORCH_IS_SLOW)
    linear, x = new()[0], rows().requires_grad_()
    compiled = torch.compile(lambda x: project(linear, x), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), project(linear, x))


def test_smaller_weights_are_large_where_torch_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    linear, x = new()[0], rows().requires_grad_()
    monkeypatch.setattr(regard.projections, "_LARGE", 8 * linear.weight.numel())
    assert not is_ours(project_each((linear,), x)[0])
    monkeypatch.setattr(regard.projections, "_torch_is_slow", lambda x: True)
    assert is_ours(project_each((linear,), x)[0])
    monkeypatch.setattr(regard.projections, "_LARGE", 8 * linear.weight.numel() + 8)
    assert not is_ours(project_each((linear,), x)[0])


def test_several_threads_learn_at_once() -> None:
    linears, wrong = new(), []
    expected = outs_and_gradients(project_each, linears, rows().requires_grad_())

    def work() -> None:
        for _ in range(5):
            received = outs_and_gradients(project_each, linears, rows().requires_grad_())
            wrong.extend(pair for pair in zip(received, expected, strict=True) if not torch.allclose(*pair, atol=1e-4))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_the_layer_learns_as_with_torchs_projections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten steps of AdamW, with our projections and without."""
    losses: list[list[float]] = []
    for large in (1, 1 << 40):
        monkeypatch.setattr(regard.projections, "_LARGE", large)
        torch.manual_seed(3)
        layer = regard.MultiHeadAttention(96, 6)
        optimiser, x, target = torch.optim.AdamW(layer.parameters(), lr=1e-2), rows(3, 37, 96), rows(3, 37, 96, seed=2)
        losses.append([])
        for _ in range(10):
            loss = (layer(x) - target).square().mean()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            losses[-1].append(loss.item())
    torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-5)
    assert losses[0][-1] < losses[0][0]
