"""A kernel's loops are one node for compilers: fake, autograd and vmap rules; calls survive being taken apart."""

from __future__ import annotations

import shutil

import pytest
import torch
from attention_cases import Case, cases
from hypothesis import given, settings
from torch import Tensor

import regard
from regard import attend
from regard.kernels import available, blockwise, reference
from regard.kernels.call_schema import flatten, unflatten
from regard.masks import Causal, Padding, Prefix, Window
from regard.positions import Alibi, RelativeBias


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@settings(max_examples=60, deadline=None)
@given(cases())
def test_a_call_taken_apart_and_put_together_is_the_same(case: Case) -> None:
    call = case.call()
    again = unflatten(flatten(call))
    assert repr(again.mask) == repr(call.mask)
    for a, b in zip(reference.forward(call), reference.forward(again), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@settings(max_examples=12, deadline=None)
@given(cases())
def test_the_operator_keeps_torchs_rules(case: Case) -> None:
    """torch's own checks: schema, fake tensors, autograd registration, compilation with dynamic shapes."""
    flat = flatten(case.to(torch.float64).call())
    torch.library.opcheck(
        torch.ops.regard.blockwise.default, (*flat, 3, 5), test_utils=("test_schema", "test_faketensor")
    )


ALIBI = Alibi(4).double()


def all_of_it(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, lengths: Tensor, relative: RelativeBias) -> Tensor:
    mask = Causal() & Padding(lengths=lengths) | Prefix(3)
    return attend(q, k, v, mask=mask, sinks=sinks, softcap=3.0, bias=[relative, ALIBI])


@pytest.mark.parametrize("dynamic", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_compiles_as_one_graph(dynamic: bool) -> None:
    relative = RelativeBias(4).double()
    sinks, lengths = normal(4).requires_grad_(), torch.tensor([5, 30])
    compiled = torch.compile(all_of_it, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for n in (31, 37):
        q, k, v = (normal(2, h, n, 8, seed=h + i).requires_grad_() for i, h in enumerate((4, 2, 2)))
        leaves = (q, k, v, sinks, relative.weight)
        eager = all_of_it(q, k, v, sinks, lengths, relative)
        ours = compiled(q, k, v, sinks, lengths, relative)
        torch.testing.assert_close(ours, eager)
        for a, b in zip(*(torch.autograd.grad(x.square().sum(), leaves) for x in (ours, eager)), strict=True):
            torch.testing.assert_close(a, b)


def test_compiled_4096_tokens_are_not_unrolled() -> None:
    """The number of nodes does not grow with the number of tokens."""
    counts = []

    def count(graph: torch.fx.GraphModule, _: object):
        counts.append(len(graph.graph.nodes))
        return graph.forward

    for n in (64, 4096):
        torch._dynamo.reset()
        q = torch.zeros(1, 2, n, 4)
        compiled = torch.compile(
            lambda q: attend(q, q, q, mask=Causal() & Window(5), dropout=0.1, softcap=2.0),
            fullgraph=True,
            backend=count,
        )
        assert compiled(q).shape == q.shape
    assert counts[0] == counts[1] < 150


@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="inductor needs a C++ compiler")
@pytest.mark.parametrize("mask", [None, Causal()])
@pytest.mark.slow
def test_inductor_compiles_attention(mask: object) -> None:
    q, k, v = (torch.randn(2, 3, 17, 8, requires_grad=True) for _ in range(3))
    compiled = torch.compile(
        lambda q, k, v: attend(q, k, v, mask=mask, softcap=2.0) + attend(q, k, v, mask=mask), fullgraph=True
    )
    eager = attend(q, k, v, mask=mask, softcap=2.0) + attend(q, k, v, mask=mask)
    ours = compiled(q, k, v)
    torch.testing.assert_close(ours, eager)
    for a, b in zip(*(torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (ours, eager)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_vmap_over_the_batch() -> None:
    q, k, v = (normal(5, 2, h, 7, 3, seed=h) for h in (4, 2, 2))
    lengths, sinks, relative = torch.tensor([3, 7]), normal(4), RelativeBias(4).double()

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return all_of_it(q, k, v, sinks, lengths, relative)

    out = torch.func.vmap(run)(q, k, v)
    torch.testing.assert_close(out, torch.stack([run(*x) for x in zip(q, k, v, strict=True)]))
    out = torch.func.vmap(run, in_dims=(0, None, None))(q, k[0], v[0])  # keys and values shared
    torch.testing.assert_close(out, torch.stack([run(x, k[0], v[0]) for x in q]))
    out = torch.func.vmap(run, in_dims=(2, 0, 0))(q.movedim(0, 2), k, v)
    torch.testing.assert_close(out, torch.stack([run(*x) for x in zip(q, k, v, strict=True)]))


def test_gradients_per_sample() -> None:
    q, k, v = (normal(5, 2, h, 7, 3, seed=h) for h in (4, 2, 2))
    learned = {"sinks": normal(4), "bias": normal(1, 4, 1, 7), "table": normal(8, 4)}

    def loss(learned: dict[str, Tensor], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from regard.positions.bias import Buckets

        biases = [learned["bias"], Buckets(learned["table"][None], True, 9)]
        return attend(q, k, v, mask=Causal(), sinks=learned["sinks"], bias=biases, softcap=2.0).square().sum()

    grad = torch.func.grad(loss, argnums=(0, 1, 2))
    each = torch.func.vmap(grad, in_dims=(None, 0, 0, 0))(learned, q, k, v)
    for i in range(5):
        alone = grad(learned, q[i], k[i], v[i])
        for name in learned:
            torch.testing.assert_close(each[0][name][i], alone[0][name])
        torch.testing.assert_close(each[1][i], alone[1])
        torch.testing.assert_close(each[2][i], alone[2])


def test_dropout_under_vmap_is_that_of_each_item() -> None:
    q = normal(3, 1, 2, 5, 4)

    def run(x: Tensor) -> Tensor:
        return attend(x, x, x, dropout=0.5, kernel="blockwise")

    torch.manual_seed(1)
    out = torch.func.vmap(run, randomness="same")(q)
    for i in range(3):
        torch.manual_seed(1)
        torch.testing.assert_close(out[i], run(q[i]))
    torch.manual_seed(1)
    different = torch.func.vmap(run, randomness="different")(q[:1].expand(3, -1, -1, -1, -1))
    assert not torch.equal(different[0], different[1])


@pytest.mark.parametrize("kernel", [name for name in available() if name != "reference"])
def test_second_derivatives_raise_and_name_the_kernel_that_has_them(kernel: str) -> None:
    q = normal(1, 2, 3, 4).float().requires_grad_()
    (first,) = torch.autograd.grad(attend(q, q, q, kernel=kernel).sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match=f"second derivatives: kernel '{kernel}'.*kernel='reference'"):
        first.sum().backward()


def test_second_derivatives_of_the_reference() -> None:
    q, k, v = (normal(1, 2, 3, 4, seed=i).requires_grad_() for i in range(3))
    mask = torch.tensor([[True, False, True], [False, False, False], [True, True, True]])
    sinks = normal(2).requires_grad_()

    def run(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        return attend(q, k, v, mask=mask, sinks=sinks, softcap=2.0, kernel="reference")

    assert torch.autograd.gradgradcheck(run, (q, k, v, sinks))


def test_meta_device_gives_shapes() -> None:
    q, k, v = torch.empty(2, 6, 5, 4), torch.empty(2, 2, 7, 4), torch.empty(2, 2, 7, 3)
    out = attend(*(x.to("meta") for x in (q, k, v)), mask=Causal(), dropout=0.1)
    assert out.device.type == "meta"
    assert out.shape == (2, 6, 5, 3)
    assert out.stride() == blockwise.output(regard.attention.prepare(q, k, v)).stride()


def test_under_autocast_the_backward_pass_keeps_its_dtypes() -> None:
    q = torch.randn(1, 2, 5, 4, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        attend(q, q, q, softcap=2.0).float().square().sum().backward()
    assert q.grad is not None
    assert q.grad.dtype == torch.float32
    mine, q.grad = q.grad, None
    b = q.bfloat16()
    attend(b, b, b, softcap=2.0).float().square().sum().backward()
    torch.testing.assert_close(mine, q.grad, rtol=2e-2, atol=2e-2)
