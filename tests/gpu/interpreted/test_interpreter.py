"""What is mended of Triton's interpreter: products and rounding of bfloat16."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from regard.kernels.triton.blocks import Blocks
from regard.kernels.triton.launch import launch

ONE = Blocks(16, 16, 4, 1)


@triton.jit
def multiply(a, b, to):
    i, j = tl.arange(0, 16)[:, None], tl.arange(0, 16)[None, :]
    tl.store(to + i * 16 + j, tl.dot(tl.load(a + i * 16 + j), tl.load(b + i * 16 + j)))


@triton.jit
def narrow(x, to):
    i = tl.arange(0, 1024)
    tl.store(to + i, tl.load(x + i).to(tl.bfloat16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_products(dtype: torch.dtype) -> None:
    a, b = torch.randn(16, 16).to(dtype), torch.randn(16, 16).to(dtype)
    to = torch.empty(16, 16)
    launch(multiply, (1,), ONE, a, a, b, to)
    torch.testing.assert_close(to, a.float() @ b.float(), rtol=1e-5, atol=1e-5)


def test_bfloat16_is_rounded_to_the_nearest_even() -> None:
    x = torch.randn(1024) * torch.logspace(-30, 30, 1024)
    x[:6] = torch.tensor([0.0, float("inf"), -float("inf"), float("nan"), 1.00390625, 1.01171875])  # (two ties)
    to = torch.empty(1024, dtype=torch.bfloat16)
    launch(narrow, (1,), ONE, x, x, to)
    torch.testing.assert_close(to, x.bfloat16(), rtol=0, atol=0, equal_nan=True)
