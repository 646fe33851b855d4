"""What does one rank of several need? Peak memory and bytes sent, for one attention layer, forward and backward.

    python benchmarks/distributed.py [--tokens 65536] [--ranks 1 2 4] [--heads 4] [--methods ring alltoall heads]

Every rank makes its own part of the sequence; memory is what the process has at its peak above what it had before: the
inputs, everything between, and the gradients. On one rank the layer is the plain one. Times are not compared:
the ranks share one machine's cores.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from datetime import timedelta
from pathlib import Path

HEAD_DIM = 32
EXACT = {"MALLOC_MMAP_THRESHOLD_": "262144"}  # glibc gives memory back at once, whatever the size of a tensor


def memory(field: str) -> int:
    """VmHWM (the most so far) or VmRSS (now), in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def one_rank(rank: int, ranks: int, store: str, method: str, tokens: int, heads: int, balance: bool) -> dict:
    """What this process needs."""
    import torch
    import torch.distributed as dist

    import regard
    from regard import masks, parallel

    shared = dist.FileStore(store, ranks)
    dist.init_process_group("gloo", store=shared, rank=rank, world_size=ranks, timeout=timedelta(seconds=600))
    mesh = dist.init_device_mesh("cpu", (ranks,))
    torch.manual_seed(0)
    width = heads * HEAD_DIM
    layer = regard.MultiHeadAttention(width, heads, bias=False)
    if ranks > 1 and method == "heads":
        parallel.shard_heads(layer, mesh)
    elif ranks > 1:
        parallel.shard_sequence(layer, mesh, method, balance=balance)
    own = tokens if method == "heads" else parallel.Tokens.of(tokens, ranks, balance).lengths[rank]

    def step(n: int) -> parallel.Traffic:
        x = torch.randn(1, n, width, requires_grad=True)
        with parallel.counting() as sent:
            layer(x, mask=masks.Causal()).square().sum().backward()
        return sent

    step(64)  # whatever is made once
    layer.zero_grad()
    Path("/proc/self/clear_refs").write_text("5")
    before = memory("VmRSS")
    sent = step(own)
    peak = memory("VmHWM") - before
    dist.barrier()
    dist.destroy_process_group()
    return {"memory": peak, "bytes": sent.bytes, "tokens": own}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--methods", nargs="+", default=["ring", "alltoall", "heads"])
    parser.add_argument("--json", type=Path, help="write the results here, too")
    parser.add_argument("--one", nargs=6, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        rank, ranks, store, method, balance, out = options.one
        found = one_rank(int(rank), int(ranks), store, method, options.tokens, options.heads, balance == "True")
        Path(out).write_text(json.dumps(found))
        return
    results: dict[str, dict[str, object]] = {}
    print(
        f"{options.tokens:,} tokens, {options.heads} heads of {HEAD_DIM}, causal, float32: memory of the largest rank"
    )
    for method in options.methods:
        first = None
        for ranks in options.ranks:
            found = run(method, ranks, options)
            peak = max(one["memory"] for one in found)
            first = peak if first is None else first
            sent = max(sum(one["bytes"].values()) for one in found)
            results[f"{method} {ranks}"] = {"memory": [one["memory"] for one in found], "bytes": sent}
            share = f"{peak / first:.2f} of one" if ranks != options.ranks[0] else ""
            print(
                f"  {method:9} {ranks} ranks  {peak / 1e6:7,.0f} MB  {share:12}  sent {sent / 1e6:7,.1f} MB", flush=True
            )
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


def run(method: str, ranks: int, options: argparse.Namespace) -> list[dict]:
    """The same in so many processes."""
    with tempfile.TemporaryDirectory() as folder:
        threads = str(max(1, (os.cpu_count() or 1) // ranks))
        balance = str(method == "ring")  # so that all have the same to do
        workers = [
            subprocess.Popen(
                [
                    sys.executable,
                    __file__,
                    "--tokens",
                    str(options.tokens),
                    "--heads",
                    str(options.heads),
                    "--one",
                    str(rank),
                    str(ranks),
                    f"{folder}/store",
                    method,
                    balance,
                    f"{folder}/{rank}.json",
                ],
                env={**os.environ, "OMP_NUM_THREADS": threads, "PYTHONWARNINGS": "ignore", **EXACT},
            )
            for rank in range(ranks)
        ]
        if any(worker.wait() for worker in workers):
            raise SystemExit(f"{method} on {ranks} ranks failed")
        return [json.loads(Path(f"{folder}/{rank}.json").read_text()) for rank in range(ranks)]


if __name__ == "__main__":
    main()
