"""Shared by all tests."""

from __future__ import annotations

import pytest

from regard.kernels import library


@pytest.fixture
def without_native(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine where the native kernel was turned off: what the others do is the same everywhere."""
    monkeypatch.setattr(library, "_found", (None, "REGARD_NATIVE=0 turns it off"))
    monkeypatch.setattr(library, "say_once", lambda: None)
