"""The test cases that the onnx package makes for its operators, as torch tensors.

ONNX collects its cases into one list of its module, where a second operator collected in the same process
would find the first one's: so the cases are made in a process of their own, once for each operator. Its
`collect_testcases` makes those of all operators first, which takes ten times as long: here one module is imported.
"""

from __future__ import annotations

import functools
import pickle
import subprocess
import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor

COLLECT = """
import importlib, pickle, sys
import onnx
from onnx.backend.test.case import node

operator, cases = sys.argv[1], {}
node._TargetOpType = operator
importlib.import_module(f"{node.__name__}.{operator.lower()}")  # makes its cases
for case in node._NodeTestCases:
    nodes = case.model.graph.node
    if len(nodes) != 1 or nodes[0].op_type != operator:
        continue  # the "expanded" twin: the same case, spelled out in smaller operators
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in nodes[0].attribute}
    (inputs, outputs), = case.data_sets
    inputs = dict(zip(filter(None, nodes[0].input), inputs, strict=True))
    outputs = dict(zip(filter(None, nodes[0].output), outputs, strict=True))
    cases[case.name] = attributes, inputs, outputs, case.rtol, case.atol
sys.stdout.buffer.write(pickle.dumps(cases))
"""


class Case(NamedTuple):
    """One call of an operator: what goes in and what must come out, by the names of the specification."""

    attributes: dict[str, Any]
    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]
    rtol: float
    atol: float

    def check(self, received: dict[str, Tensor], *, two_roundings: tuple[torch.dtype, ...] = (torch.bfloat16,)) -> None:
        """What came out is what ONNX's own runner would accept, dtypes and shapes included.

        The runner lets bfloat16 differ by two units in the last place, for the expected value is rounded too;
        `two_roundings` names the dtypes that may.
        """
        assert received.keys() >= self.outputs.keys()
        for name, expected in self.outputs.items():
            rtol = self.rtol
            if expected.dtype is torch.float32:
                rtol = min(rtol, 1e-5)  # stricter than the runner, which has coarser dtypes in mind
            if expected.dtype in two_roundings:
                rtol = max(rtol, 2 * torch.finfo(expected.dtype).eps)
            torch.testing.assert_close(
                received[name], expected, rtol=rtol, atol=self.atol, msg=lambda said, name=name: f"{name}: {said}"
            )


@functools.cache
def collect(operator: str) -> dict[str, Case]:
    """The cases of an operator, by name."""
    command = [sys.executable, "-W", "ignore", "-c", COLLECT, operator]
    done = subprocess.run(command, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    made = pickle.loads(done.stdout)
    return {
        name: Case(attributes, _tensors(inputs), _tensors(outputs), rtol, atol)
        for name, (attributes, inputs, outputs, rtol, atol) in made.items()
    }


def _tensors(arrays: dict[str, Any]) -> dict[str, Tensor]:
    return {name: _tensor(array) for name, array in arrays.items()}


def _tensor(array: Any) -> Tensor:
    if array.dtype.name == "bfloat16":  # numpy has none of its own, so torch cannot read it
        return torch.from_numpy(array.view("int16")).view(torch.bfloat16)
    return torch.from_numpy(array)
