"""Shared by all tests: what makes a run repeatable, and a machine without the native kernel."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

from regard.kernels import native_library as library

# `make test` draws the same examples every time and remembers none; `make fuzz` draws others in every round.
settings.register_profile(
    "repeatable", derandomize=True, database=None, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("fuzz", settings.get_profile("repeatable"), derandomize=False, print_blob=True)
settings.load_profile(os.environ.get("REGARD_HYPOTHESIS", "repeatable"))


COMPILED = "TORCHINDUCTOR_CACHE_DIR"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device",
        default="cpu",
        choices=("cpu", "cuda"),
        help="where tests with the fixture `device` compute; shapes and errors are tested on meta, too",
    )


def pytest_configure(config: pytest.Config) -> None:
    """What torch's compiler keeps on disk does not say which instructions it was compiled for: each run has its own."""
    os.environ[COMPILED] = tempfile.mkdtemp(prefix="regard-compiled-")
    os.environ.setdefault("CI", "true")  # torch's compiler is stricter with it, and users' machines have it set


def pytest_unconfigure(config: pytest.Config) -> None:
    shutil.rmtree(os.environ.pop(COMPILED, ""), ignore_errors=True)


# Tests of what the system does beside us: browsers, processes, sockets, memory in use. A busy machine can disturb one
# run of them; a fault fails every time. All other tests have one chance.
_SYSTEM = ("tests/browser/", "tests/distributed/", "tests/serve/")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.pluginmanager.hasplugin("rerunfailures"):
        return
    for item in items:
        if item.nodeid.startswith(_SYSTEM) or item.get_closest_marker("system"):
            item.add_marker(pytest.mark.flaky(reruns=2, reruns_delay=2))


@pytest.fixture(autouse=True)
def independent() -> Iterator[None]:
    """What a test draws does not depend on the tests before it, nor on which process runs it; nor does what it leaves
    behind decide about the next one."""
    random.seed(0)
    torch.manual_seed(0)
    yield
    left_off = not torch.is_grad_enabled()
    torch.set_grad_enabled(True)
    assert not left_off, "this test left gradients turned off"


@pytest.fixture
def device(request: pytest.FixtureRequest) -> torch.device:
    """The device to compute on: --device."""
    name = request.config.getoption("--device")
    if name == "cuda" and not torch.cuda.is_available():
        pytest.skip("--device cuda: torch finds no GPU here")
    return torch.device(name)


@pytest.fixture(params=["here", "meta"])
def any_device(request: pytest.FixtureRequest) -> torch.device:
    """The same, and then the meta device: for shapes and errors."""
    return torch.device("meta") if request.param == "meta" else request.getfixturevalue("device")


@pytest.fixture(scope="session")
def smollm2() -> Any:
    """The packaged decoder, which takes seconds to load. Tests that share it leave it as it is."""
    from regard.models import EMBEDDED, load

    if EMBEDDED["smollm2"].installed() is None:
        pytest.skip("the weights of smollm2 are not installed")
    return load("smollm2", check=False)


@pytest.fixture
def without_native(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine where the native kernel was turned off: what the others do is the same everywhere."""
    monkeypatch.setattr(library, "_found", (None, "REGARD_NATIVE=0 turns it off"))
    monkeypatch.setattr(library, "say_once", lambda: None)
