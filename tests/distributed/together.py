"""Several processes for one test: each runs a function by name with its rank, and what it returns comes back."""

from __future__ import annotations

import importlib
import os
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
TIMEOUT = 60.0  # seconds that a process may wait for another


class Failed(AssertionError):
    """Some process did not end well; `errors` has each one's last words."""

    def __init__(self, errors: dict[int, str]) -> None:
        super().__init__("\n".join(f"rank {rank}: {error}" for rank, error in errors.items()))
        self.errors = errors


def run(function: Any, size: int, *args: Any, timeout: float = TIMEOUT, patience: float = 240.0) -> list[Any]:
    """`function(rank, *args)` in `size` processes that can talk to each other: the results, by rank.

    Raises `Failed` where one raises or dies. The processes are new ones: a fork would share torch's threads.
    """
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "args").write_bytes(pickle.dumps(args))
        workers = [
            subprocess.Popen(
                [sys.executable, "-m", "distributed.together", function.__module__, function.__qualname__, folder,
                 str(rank), str(size), str(timeout)],
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'tests'}:{ROOT / 'src'}"},
            )
            for rank in range(size)
        ]  # fmt: skip
        try:
            said = [worker.communicate(timeout=patience)[0] for worker in workers]
        finally:
            for worker in workers:
                worker.kill()
        errors = {rank: _last(said[rank]) for rank, worker in enumerate(workers) if worker.returncode}
        if errors:
            raise Failed(errors)
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(size)]


def _last(said: str) -> str:
    """The last error in what a process said."""
    lines = [line for line in said.strip().splitlines() if line and not line.startswith((" ", "[W", "[E"))]
    return lines[-1] if lines else "it died without a word"


def main() -> None:
    """One of the processes."""
    from datetime import timedelta

    import torch.distributed as dist

    module, name, folder, rank, size, timeout = sys.argv[1:]
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), int(size))
    dist.init_process_group("gloo", store=store, rank=int(rank), world_size=int(size),
                            timeout=timedelta(seconds=float(timeout)))  # fmt: skip
    function = importlib.import_module(module)
    for part in name.split("."):
        function = getattr(function, part)
    args = pickle.loads((Path(folder) / "args").read_bytes())
    result = function(int(rank), *args)  # type: ignore[operator]
    torch.save(result, Path(folder) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
