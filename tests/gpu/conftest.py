"""The tests in `interpreted/` need Triton's interpreter, which a process has from its start (TRITON_INTERPRET=1):
elsewhere `test_in_interpreter.py` runs them in a process of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from regard.kernels.triton.availability import installed
from regard.kernels.triton.interpreter import interpreting


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if "interpreted" in collection_path.parts:
        return None if installed() and interpreting() else True
    return None
