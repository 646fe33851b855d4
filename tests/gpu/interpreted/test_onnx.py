"""ONNX's test cases of its Attention operator, by the GPU kernels."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("onnx", reason="the cases come from the onnx package")

from conformance.onnx_cases import collect
from conformance.test_onnx_attention import NAMES, onnx_attention

FEW = NAMES[::12]


@pytest.mark.parametrize("name", [n if n in FEW else pytest.param(n, marks=pytest.mark.slow) for n in NAMES])
def test_case(name: str) -> None:
    case = collect("Attention")[f"test_attention_{name}"]
    # Weights are rounded for the product with values, as on tensor cores everywhere: ONNX's answer stands on the other
    # side of the exact one here and there, as with torch's kernel (`test_onnx_attention.py`).
    received = onnx_attention(case.attributes, case.inputs, "triton")
    case.check(received, two_roundings=(torch.bfloat16, torch.float16))
