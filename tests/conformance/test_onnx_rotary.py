"""`rotate` against the test cases of ONNX's RotaryEmbedding operator."""

from __future__ import annotations

import pytest
import torch

from regard.positions.rotary import rotate

from .onnx_cases import collect

pytest.importorskip("onnx", reason="the cases come from the onnx package")

# Named here, so that a case that disappears or appears is noticed.
NAMES = [
    "test_rotary_embedding",
    "test_rotary_embedding_3d_input",
    "test_rotary_embedding_interleaved",
    "test_rotary_embedding_no_position_ids",
    "test_rotary_embedding_no_position_ids_interleaved",
    "test_rotary_embedding_no_position_ids_rotary_dim",
    "test_rotary_embedding_with_interleaved_rotary_dim",
    "test_rotary_embedding_with_rotary_dim",
]


def test_the_names_are_all_there_are() -> None:
    assert sorted(collect("RotaryEmbedding")) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_case(name: str) -> None:
    case = collect("RotaryEmbedding")[name]
    attributes, inputs = case.attributes, case.inputs
    x, cos, sin = inputs["input"], inputs["cos_cache"], inputs["sin_cache"]
    if "position_ids" in inputs:
        cos, sin = cos[inputs["position_ids"]], sin[inputs["position_ids"]]  # (positions, R/2) -> (B, N, R/2)

    packed = x.ndim == 3  # (B, N, H * D)
    if packed:
        x = x.unflatten(-1, (attributes["num_heads"], -1)).transpose(1, 2)
    rotated = attributes.get("rotary_embedding_dim", 0) or x.shape[-1]
    assert cos.shape[-1] == rotated // 2
    y = rotate(x, cos, sin, interleaved=bool(attributes.get("interleaved", 0)))
    if packed:
        y = y.transpose(1, 2).flatten(-2)
    torch.testing.assert_close(y, case.outputs["output"])  # tighter than ONNX asks for
