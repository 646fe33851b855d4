"""Importing regard does no work: it reads no CPU flags and loads no library before it is first used."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src"
CODE = """
import sys, torch, torch.nn, ctypes
events = []
def hook(event, args):
    if event in ("open", "ctypes.dlopen") and args and ("cpuinfo" in str(args[0]) or "libregard" in str(args[0])):
        events.append(str(args[0]))
sys.addaudithook(hook)
import regard
print(len(events), "torch._dynamo" in sys.modules)
q = torch.randn(1, 2, 5, 3)
regard.attend(q, q, q)
print(len(events) > 0)
"""


def run_python(code: str) -> list[str]:
    environment = {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_import_reads_and_loads_nothing() -> None:
    if not (SOURCE / "regard/kernels/libregard_native.so").exists():
        pytest.skip("there is no native library to load")
    assert run_python(CODE) == ["0", "False", "True"]


def test_the_first_use_may_be_compiled() -> None:
    code = """
import torch, regard
from regard.kernels import native_library
q = torch.randn(1, 2, 5, 3)
assert native_library._found is None
out = torch.compile(lambda q: regard.attend(q, q, q), backend="eager", fullgraph=True)(q)
torch.testing.assert_close(out, regard.attend(q, q, q, kernel="reference"))
print(native_library._found is not None)
"""
    assert run_python(code) == ["True"]
