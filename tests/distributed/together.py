"""Several processes for one test: each runs a function by name with its rank, and what it returns comes back.

To import torch takes seconds, so it is done once: one process imports it, starts no thread, and forks the others.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import pickle
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[2]
TIMEOUT = 60.0  # seconds that a process may wait for another


class Failed(AssertionError):
    """Some process did not end well; `errors` has each one's last words."""

    def __init__(self, errors: dict[int, str]) -> None:
        super().__init__("\n".join(f"rank {rank}: {error}" for rank, error in errors.items()))
        self.errors = errors


class Host(NamedTuple):
    """Where a process runs: what its command begins with, and the network interface that it must use."""

    prefix: tuple[str, ...] = ()
    interface: str = ""


def run(
    function: Any,
    size: int,
    *args: Any,
    timeout: float = TIMEOUT,
    patience: float = 240.0,
    hosts: Sequence[Host] = (),
    store: str = "",
    meanwhile: Callable[[], None] = lambda: None,
) -> list[Any]:
    """`function(rank, *args)` in `size` processes that can talk to each other: the results, by rank.

    They find each other by a file, or, on several hosts (one for each process), by a `store` such as
    "tcp://10.0.0.1:29500". What is still running after `patience` is killed. Raises `Failed` where one raises or dies.
    """
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "args").write_bytes(pickle.dumps(args))
        job = {
            "module": function.__module__,
            "name": function.__qualname__,
            "folder": folder,
            "size": size,
            "timeout": timeout,
            "patience": patience,
            "store": store or f"file://{folder}/store",
        }
        places = [(host, [r for r in range(size) if hosts[r] == host]) for host in dict.fromkeys(hosts)]
        parents = [(_Parent(host), ranks) for host, ranks in places] or [(_here(), list(range(size)))]
        try:
            for parent, ranks in parents:
                parent.begin({**job, "ranks": ranks})
            meanwhile()
            codes = {rank: code for parent, _ in parents for rank, code in parent.end().items()}
        finally:
            for parent, _ in parents if hosts else ():
                parent.close()
        errors = {rank: _last(folder, rank) for rank in range(size) if codes[rank]}
        if errors:
            raise Failed(errors)
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(size)]


def _last(folder: str, rank: int) -> str:
    """The last error in what a process said."""
    said = (Path(folder) / f"{rank}.txt").read_text()
    lines = [re.sub(r"^\[rank\d+\]: ?", "", line) for line in said.strip().splitlines()]  # (as torch begins them)
    lines = [line for line in lines if line and not line.startswith((" ", "[W", "[E"))]
    return lines[-1] if lines else "it died without a word"


class _Parent:
    """A process that forks the others, seen from the test."""

    def __init__(self, host: Host) -> None:
        paths = {"PYTHONPATH": f"{ROOT / 'tests'}:{ROOT / 'src'}", "OMP_NUM_THREADS": "1"}
        interface = {"GLOO_SOCKET_IFNAME": host.interface} if host.interface else {}
        self.process = subprocess.Popen(
            [*host.prefix, sys.executable, "-m", "distributed.together"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **paths, **interface},
        )

    def begin(self, job: dict[str, Any]) -> None:
        """Fork the processes of a job."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()

    def end(self) -> dict[int, int]:
        """Wait for them: the exit code of each rank."""
        assert self.process.stdout is not None
        return {int(rank): code for rank, code in json.loads(self.process.stdout.readline()).items()}

    def close(self) -> None:
        """No more jobs; a job that is still running is killed."""
        self.process.communicate()


@cache
def _here() -> _Parent:
    """The one on this host, for all tests."""
    made = _Parent(Host())
    atexit.register(made.close)
    return made


# Within the process that forks


def main() -> None:
    """One job after the other, as they come."""
    # What most of them need; torch imports its compiler at the first step of an optimizer, which takes seconds.
    for name in ("distributed.compare", "distributed.variants", "torch._dynamo"):
        importlib.import_module(name)
    while line := sys.stdin.readline():
        job = json.loads(line)
        importlib.import_module(job["module"])
        children = {_forked(job, rank): rank for rank in job["ranks"]}
        codes: dict[int, int] = {}
        end = time.monotonic() + job["patience"]
        while children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid:
                codes[children.pop(pid)] = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > end or select.select([sys.stdin], [], [], 0.02)[0]:  # or whoever asked is gone
                for child in children:
                    os.kill(child, signal.SIGKILL)
                end = float("inf")
        print(json.dumps(codes), flush=True)


def _forked(job: dict[str, Any], rank: int) -> int:
    """A new process; its number."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        said = os.open(f"{job['folder']}/{rank}.txt", os.O_WRONLY | os.O_CREAT)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for stream in (1, 2):
            os.dup2(said, stream)
        _work(job, rank)
        code = 0
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _work(job: dict[str, Any], rank: int) -> None:
    """One of the processes."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=job["store"], rank=rank, world_size=job["size"], timeout=timedelta(seconds=job["timeout"])
    )
    function: Any = importlib.import_module(job["module"])
    for part in job["name"].split("."):
        function = getattr(function, part)
    folder = Path(job["folder"])
    result = function(rank, *pickle.loads((folder / "args").read_bytes()))
    torch.save(result, folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
