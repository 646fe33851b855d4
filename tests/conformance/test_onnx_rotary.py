"""`rotate` against the test cases of ONNX's RotaryEmbedding operator.

ONNX collects its cases into one list of its module, where a second operator collected in the same process
would find the first one's: so the cases are made in a process of their own.
"""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest
import torch

from regard.positions.rotary import rotate

pytest.importorskip("onnx", reason="the cases come from the onnx package")

COLLECT = """
import pickle, sys
import onnx
from onnx.backend.test.case.node import collect_testcases

cases = {}
for case in collect_testcases("RotaryEmbedding"):
    nodes = case.model.graph.node
    if len(nodes) != 1 or nodes[0].op_type != "RotaryEmbedding":
        continue  # the "expanded" twin: the same case, spelled out in smaller operators
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in nodes[0].attribute}
    (inputs, outputs), = case.data_sets
    cases[case.name] = attributes, dict(zip(nodes[0].input, inputs)), outputs[0]
with open(sys.argv[1], "wb") as file:
    pickle.dump(cases, file)
"""

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


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    path = tmp_path_factory.mktemp("onnx") / "rotary.pickle"
    done = subprocess.run([sys.executable, "-c", COLLECT, str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return pickle.loads(path.read_bytes())


def test_the_names_are_all_there_are(cases):
    assert sorted(cases) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_case(cases, name):
    attributes, inputs, expected = cases[name]
    inputs = {key: torch.from_numpy(value) for key, value in inputs.items()}
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
    torch.testing.assert_close(y, torch.from_numpy(expected))
