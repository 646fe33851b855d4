"""Timing that a noisy machine cannot fool: contestants take turns within one run, and only ratios of medians count."""

from __future__ import annotations

import ctypes
import json
import os
import platform
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch


def take_turns(
    contestants: dict[str, Callable[[], object]], *, seconds: float = 3.0, rounds: int = 7
) -> dict[str, float]:
    """The median time of each contestant, in seconds.

    Every round runs each of them once, in random order, so that a slow moment of the machine hits all alike. A quick
    contestant is repeated within its turn until the turn lasts a millisecond. Rounds go on until `seconds` are spent,
    and there are at least `rounds`.
    """
    repeats = {}
    for name, run in contestants.items():
        run()  # what happens once
        begin = time.perf_counter()
        run()
        repeats[name] = max(1, round(1e-3 / max(time.perf_counter() - begin, 1e-7)))
    times: dict[str, list[float]] = {name: [] for name in contestants}
    begin, done = time.perf_counter(), 0
    while done < rounds or time.perf_counter() - begin < seconds:
        for name in random.sample(list(contestants), len(contestants)):
            start = time.perf_counter()
            for _ in range(repeats[name]):
                contestants[name]()
            times[name].append((time.perf_counter() - start) / repeats[name])
        done += 1
    return {name: statistics.median(values) for name, values in times.items()}


def keep_freed_memory() -> bool:
    """Let glibc keep what contestants free, and return whether it does. Else the one that comes after another with much
    memory (such as N x N maps) pays a page fault for each 4 KB of its own, which were given back to the system."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if platform.system() == "Linux" else None
    trim, mmap = -1, -3  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD: the latter is limited to 32 MB on most versions
    return mallopt is not None and bool(mallopt(trim, 2**31 - 1)) and bool(mallopt(mmap, 2**25))


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table with aligned columns."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    line = "| " + " | ".join(f"{{:{'>' if i else '<'}{w}}}" for i, w in enumerate(widths)) + " |"
    rule = "|" + "|".join("-" * (w + 2) for w in widths) + "|"
    return "\n".join([line.format(*header), rule, *(line.format(*row) for row in rows)])


def machine() -> dict[str, object]:
    """Where it was measured."""
    return {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "cpu": cpu_name(),
        "processor": platform.machine(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
    }


def cpu_name() -> str:
    """The CPU's model, as the system names it, and its family where the name is that of many; else its architecture."""
    try:
        first = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
    except OSError:
        first = ""
    info = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in first.splitlines())}
    name = info.get("model name") or platform.processor() or platform.machine()
    return f"{name} (family {info['cpu family']})" if "cpu family" in info else name


def save(path: str, rows: list[dict[str, object]]) -> None:
    """Write `{"machine": {...}, "rows": [...]}`; times in seconds."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")
