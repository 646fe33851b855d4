"""Shared by all tests: what makes a run repeatable, and a machine without the native kernel."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections.abc import Generator, Iterator
from contextlib import nullcontext
from typing import Any

import other_device
import pytest
import torch
from hypothesis import HealthCheck, settings
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

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
        choices=("cpu", "cuda", "other", "meta"),
        help="where tests marked `on_device` and those with the fixture `device` compute: on a GPU; on a device of its "
        "own kind in the CPU's memory, which finds what assumes a CPU without a GPU; on meta those marked `on_meta`",
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


@pytest.hookimpl(tryfirst=True)  # (before tests are chosen by their marks)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        # Attention on tiles serves only who asks for it, and no CPU with tiles has run it: not in `make test`.
        of_tiles = "tiles" in getattr(item, "fixturenames", ()) or "[amx" in item.name or "native amx" in item.name
        if of_tiles or "-amx" in item.name:
            item.add_marker(pytest.mark.slow)
    if not config.pluginmanager.hasplugin("rerunfailures"):
        return
    for item in items:
        if item.nodeid.startswith(_SYSTEM) or item.get_closest_marker("system"):
            item.add_marker(pytest.mark.flaky(reruns=2, reruns_delay=2))


class MadeOn(TorchFunctionMode):
    """Tensors of tests that name no device are made on one. Random numbers are drawn on the CPU first: they are the
    same on every device."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("generator") is not None and function.__name__.endswith("_"):  # x.normal_(generator=...)
            return args[0].copy_(function(args[0].cpu(), *args[1:], **kwargs))
        if function not in _device_constructors() or kwargs.get("device") is not None:
            return function(*args, **kwargs)
        if function.__name__.startswith("rand"):
            made = function(*args, **{**kwargs, "device": "cpu"})
            return made.detach().to(self.device).requires_grad_(made.requires_grad)
        return function(*args, **{**kwargs, "device": self.device})


def device_of(config: pytest.Config) -> torch.device:
    """The device of --device, made known to torch; the test is skipped where there is none."""
    name = config.getoption("--device")
    if name == "cuda" and not torch.cuda.is_available():
        pytest.skip("--device cuda: torch finds no GPU here")
    if name == "other":
        other_device.register()
    return torch.device(name)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, Any]:
    """What a file that is marked makes when it is imported is on the device, too."""
    there = collector.config.getoption("--device") != "cpu" and isinstance(collector, pytest.Module)
    marked = there and "pytestmark = pytest.mark.on_device" in collector.path.read_text()
    with MadeOn(device_of(collector.config)) if marked else nullcontext():
        return (yield)


def _why_not_there(test: pytest.Item) -> str | None:
    """In words, where a test needs a CPU, or values and there are none."""
    if test.config.getoption("--device") == "meta" and test.get_closest_marker("on_meta") is None:
        return "values are compared, and the meta device has none"
    if (marker := test.get_closest_marker("of_cpu")) is not None:
        return marker.args[0]
    parameters = test.callspec.params if isinstance(test, pytest.Function) and hasattr(test, "callspec") else {}
    return "the native kernel is for CPUs" if parameters.get("kernel") == "native" else None


@pytest.fixture(autouse=True)
def independent(request: pytest.FixtureRequest) -> Iterator[None]:
    """What a test draws does not depend on the tests before it, nor on which process runs it; nor does what it leaves
    behind decide about the next one. A test that is marked `on_device` makes its tensors there."""
    random.seed(0)
    torch.manual_seed(0)
    there = request.config.getoption("--device") != "cpu" and request.node.get_closest_marker("on_device") is not None
    if there and (reason := _why_not_there(request.node)) is not None:
        pytest.skip(f"--device: {reason}")
    with MadeOn(device_of(request.config)) if there else nullcontext():
        yield
    left_off = not torch.is_grad_enabled()
    torch.set_grad_enabled(True)
    assert not left_off, "this test left gradients turned off"


@pytest.fixture
def device(request: pytest.FixtureRequest) -> torch.device:
    """The device to compute on: --device."""
    return device_of(request.config)


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
