"""The GPU kernels compile for real GPUs, without one; and what the benchmark of GPUs says where there is none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from regard.kernels.triton.availability import installed

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}


def run(script: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / script), *options]
    return subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=1800)


@pytest.mark.slow
@pytest.mark.skipif(not installed(), reason="Triton is not installed; it comes with the extra gpu")
@pytest.mark.parametrize("target", ["cuda:80", "hip:gfx942"])
def test_plain_calls_compile_without_spills_and_fit(target: str) -> None:
    options = ["--dtypes", "bfloat16", "--widths", "64", "--features", "plain", "--save", "none"]
    done = run("compile_gpu.py", "--targets", target, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "12 kernels compiled, 0 spill, 0 wrong" in done.stdout


@pytest.mark.slow
@pytest.mark.skipif(not installed(), reason="Triton is not installed; it comes with the extra gpu")
def test_an_estimate_from_counted_instructions() -> None:
    done = run("gpu.py", "--estimate", "cuda:80")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "An estimate, not a measurement: cuda:80, bfloat16, width 64" in done.stdout


def test_the_interpreter_cannot_compile() -> None:
    command = [sys.executable, str(BENCHMARKS / "compile_gpu.py"), "--save", "none"]
    done = subprocess.run(
        command, capture_output=True, text=True, env=ENVIRONMENT | {"TRITON_INTERPRET": "1"}, timeout=300
    )
    assert done.returncode == 2
    assert "TRITON_INTERPRET: expected it not to be set, received 1; remedy: unset it" in done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_nothing_is_measured() -> None:
    done = run("gpu.py", "--check")
    assert done.returncode == 2
    assert "GPU: expected one that Triton compiles for, received none" in done.stderr
    done = run("gpu.py", "--estimate", "cuda:1")
    assert done.returncode == 2
    assert "--estimate: expected one of cuda:80, cuda:90, cuda:100, received cuda:1" in done.stderr
