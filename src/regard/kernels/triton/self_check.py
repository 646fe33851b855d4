"""No code that never ran is trusted: before "auto" takes these kernels on a device, they are compared there with
`reference` in float64, small calls of every feature, forward, backward and statistics. It takes about a minute, most of
it compiling.

    check(device)      runs the comparison
    trusted(device)    whether it has passed there; runs it at first use
    doubt(device)      in words, why not

The verdict is remembered in the user's cache directory, for the device's model, its driver, and the versions of torch,
Triton and regard.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from regard.kernels.triton import availability

__all__ = ["Verdict", "check", "device_key", "doubt", "forget", "remembered", "trusted", "verdict_file"]


class Verdict(NamedTuple):
    """What a self-check found."""

    passed: bool
    comparisons: int
    failures: list[str]
    seconds: float

    def __str__(self) -> str:
        if self.passed:
            return f"{self.comparisons} comparisons with `reference` passed in {self.seconds:.0f} s"
        return f"{len(self.failures)} of {self.comparisons} comparisons failed; the first: {self.failures[0]}"


_known: dict[str, Verdict] = {}  # of this process


def check(device: torch.device | str, report: Callable[[str], None] | None = None, *, keep: bool = True) -> Verdict:
    """Compare the kernels with `reference` on a device; `report` is told each comparison. The verdict is remembered."""
    from regard.kernels.triton import comparisons

    device = torch.device(device)
    start, count, failures = time.perf_counter(), 0, []
    with _undisturbed(device):
        for comparison in comparisons.every(device):
            count += 1
            wrong = comparison.wrong()
            if wrong is not None:
                failures.append(f"{comparison.name}: {wrong}")
            if report is not None:
                report(f"{comparison.name}: {wrong or 'right'}")
    verdict = Verdict(not failures, count, failures[:20], time.perf_counter() - start)
    _known[device_key(device)] = verdict
    if keep:
        _write(device_key(device), verdict)
    return verdict


@contextmanager
def _undisturbed(device: torch.device) -> Iterator[None]:
    """A context for comparisons within whatever is going on: with gradients, without autocast and torch function modes
    (`watch`), and the caller's random numbers stay as they were."""
    with (
        torch.random.fork_rng(devices=[]),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast(device.type, enabled=False),
        torch._C.DisableTorchFunction(),  # pyright: ignore[reportPrivateImportUsage]
    ):
        yield


def trusted(device: torch.device) -> bool:
    """Whether the self-check has passed on a device. Runs it, if it never did."""
    verdict = remembered(device)
    if verdict is None:
        warnings.warn(
            f"regard compares its GPU kernels with the reference on {_name(device)}, once (about a minute); "
            "`regard doctor --gpu` does so beforehand",
            RuntimeWarning,
            stacklevel=2,
        )
        verdict = check(device)
        if not verdict.passed:
            warnings.warn(
                f"regard leaves its GPU kernels alone on {_name(device)}: {verdict}", RuntimeWarning, stacklevel=2
            )
    return verdict.passed


def passed(device: torch.device) -> bool:
    """Whether the self-check is known to have passed on a device. Runs nothing: for compilers and tracers."""
    verdict = remembered(device)
    return verdict is not None and verdict.passed


passed._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


def doubt(device: torch.device) -> str | None:
    """In words, why the kernels are not trusted on a device; None where they are."""
    verdict = remembered(device)
    if verdict is None:
        return "its self-check has not run on this device; remedy: regard doctor --gpu"
    return None if verdict.passed else f"its self-check failed on this device: {verdict}"


def remembered(device: torch.device) -> Verdict | None:
    """The verdict on a device, where there is one. (Fake tensors may be on a GPU that is not there.)"""
    if device.type == "cuda" and not torch.cuda.is_available():
        return None
    key = device_key(device)
    if key not in _known:
        found = _read().get(key)
        if found is None:
            return None
        _known[key] = found
    return _known[key]


def forget() -> None:
    """All verdicts, in memory and on disk."""
    _known.clear()
    verdict_file().unlink(missing_ok=True)


def device_key(device: torch.device) -> str:
    """All that a verdict depends on."""
    own = sys.modules["regard"].__version__  # (a kernel imports nothing from above)
    versions = f"torch {torch.__version__}, triton {availability.version()}, regard {own}"
    if device.type != "cuda":
        return f"interpreter on {device.type}, {versions}"
    return f"{_name(device)}, driver {_driver()}, {versions}"


def _name(device: torch.device) -> str:
    if device.type != "cuda":
        return device.type
    properties = torch.cuda.get_device_properties(device)
    kind = getattr(properties, "gcnArchName", None) if torch.version.hip else f"{properties.major}.{properties.minor}"
    return f"{properties.name} ({kind})"


def _driver() -> str:
    if torch.version.hip:
        return f"hip {torch.version.hip}"
    return str(torch._C._cuda_getDriverVersion())  # pyright: ignore[reportAttributeAccessIssue]


def verdict_file() -> Path:
    """Where verdicts are remembered."""
    base = os.environ.get("XDG_CACHE_HOME") or os.environ.get("LOCALAPPDATA") or Path.home() / ".cache"
    return Path(base) / "regard" / "triton_self_check.json"


def _read() -> dict[str, Verdict]:
    """All verdicts on disk; none where the file cannot be read."""
    try:
        found = json.loads(verdict_file().read_text())
        return {key: Verdict(**verdict) for key, verdict in found.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _write(key: str, verdict: Verdict) -> None:
    """Add a verdict to those on disk, in one step. A home that cannot be written to is no error."""
    every: dict[str, Any] = {other: found._asdict() for other, found in _read().items()} | {key: verdict._asdict()}
    file = verdict_file()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as part:
            json.dump(every, part, indent=1)
        os.replace(part.name, file)
    except OSError as error:
        print(f"regard: the verdict on the GPU kernels is not kept: {error}", file=sys.stderr)
