"""Through torch's operators: compiled with the eager backend, fake tensors, torch.func, autograd."""

from __future__ import annotations

import pytest
import torch
from attention_cases import Case
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import regard
from regard.kernels.call_schema import flatten
from regard.masks import Causal, Padding


def everything(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, lengths: Tensor) -> Tensor:
    return regard.attend(q, k, v, mask=Causal() & Padding(lengths=lengths), sinks=sinks, softcap=3.0, kernel="triton")


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiles_as_one_graph(backend: str) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, h, 17, 8, generator=generator).requires_grad_() for h in (4, 2, 2))
    sinks, lengths = torch.ones(4, requires_grad=True), torch.tensor([5, 17])
    leaves = (q, k, v, sinks)
    compiled = torch.compile(everything, fullgraph=True, backend=backend)
    eager, ours = everything(*leaves, lengths), compiled(*leaves, lengths)
    torch.testing.assert_close(ours, eager)
    for a, b in zip(*(torch.autograd.grad(x.square().sum(), leaves) for x in (ours, eager)), strict=True):
        torch.testing.assert_close(a, b)


def test_the_operator_keeps_torchs_rules() -> None:
    q, k, v = (torch.randn(1, h, 5, 8) for h in (2, 1, 1))
    flat = flatten(Case(q, k, v, {"mask": Causal(), "dropout": 0.2}).to(torch.float32).call())
    torch.library.opcheck(torch.ops.regard.triton.default, (*flat, 0, 0), test_utils=("test_schema", "test_faketensor"))


def test_fake_tensors_have_the_shapes_and_strides() -> None:
    q, k, v = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 7, 8), torch.randn(2, 2, 7, 3)
    real = regard.attend(q, k, v, mask=Causal(), kernel="triton")
    with FakeTensorMode() as mode:
        fake = regard.attend(*map(mode.from_tensor, (q, k, v)), mask=Causal(), kernel="triton")
    assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)


def test_vmap_and_gradients_per_sample() -> None:
    q = torch.randn(3, 1, 2, 5, 8)

    def loss(x: Tensor) -> Tensor:
        return regard.attend(x, x, x, mask=Causal(), kernel="triton").square().sum()

    each = torch.func.vmap(torch.func.grad(loss))(q)
    for i in range(3):
        torch.testing.assert_close(each[i], torch.func.grad(loss)(q[i]))


def test_second_derivatives_raise_and_name_the_kernel_that_has_them() -> None:
    q = torch.randn(1, 1, 3, 4, requires_grad=True)
    (first,) = torch.autograd.grad(regard.attend(q, q, q, kernel="triton").sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"second derivatives: kernel 'triton'.*kernel='reference'"):
        first.sum().backward()


def test_dropout_is_that_of_every_kernel() -> None:
    q = torch.randn(2, 3, 11, 8)
    outs = []
    for kernel in ("triton", "blockwise"):
        torch.manual_seed(3)
        outs.append(regard.attend(q, q, q, dropout=0.4, kernel=kernel))
    torch.testing.assert_close(*outs, rtol=1e-5, atol=1e-5)
