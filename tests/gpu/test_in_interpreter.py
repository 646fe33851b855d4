"""The quick tests in `interpreted/`, in a process with TRITON_INTERPRET=1: Triton reads it when it is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from regard.kernels.triton.availability import installed
from regard.kernels.triton.interpreter import interpreting

FOLDER = Path(__file__).parent / "interpreted"
ROOT = FOLDER.parents[2]


@pytest.mark.skipif(not installed(), reason="Triton is not installed; it comes with the extra gpu")
@pytest.mark.skipif(interpreting(), reason="this process interprets already, and runs them itself")
def test_quick_ones() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", "not slow", "-p", "no:cacheprovider", str(FOLDER)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
        timeout=1200,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
