"""Compiles every GPU kernel for real GPUs, without one: registers, shared memory, and what is spilled.

    python benchmarks/compile_gpu.py                  everything, in about an hour; writes results/compile_gpu.json
    python benchmarks/compile_gpu.py --targets cuda:90 --widths 64 --dtypes bfloat16 --save none

Fails where a kernel of a plain call spills registers, or any needs more shared memory than the GPU has. Needs the extra
`gpu`; the assemblers come with Triton. TRITON_INTERPRET must not be set.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from regard import kernels, measures
from regard.attention import plane_of, prepare
from regard.kernels import triton as kernel
from regard.kernels.triton import launch
from regard.masks import Causal, Keep
from regard.measures import MeasureRun, as_measures

RESULTS = Path(__file__).parent / "results" / "compile_gpu.json"
# Shared memory that a block may have, in bytes, and processors.
TARGETS = {
    "cuda:80": (163 * 1024, 108),
    "cuda:90": (227 * 1024, 132),
    "cuda:100": (227 * 1024, 148),
    "hip:gfx942": (64 * 1024, 304),
}
SEEING = ["entropy", "peak", "distance", "offset", "offsets", "received", "on_first", "heatmap", "links"]
TOKENS, HEADS, GROUPS = 512, 4, 2


class Driver:
    """Stands for the driver of a GPU that is not there."""

    def __init__(self, target: Any) -> None:
        self.target = target

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def calls(dtype: torch.dtype, width: int, features: str) -> Iterator[tuple[str, kernels.Call]]:
    """A call of many queries and one of few, plain or with everything."""
    for what, queries in (("", TOKENS), ("decode", 1)):
        q = torch.zeros(1, HEADS, queries, width, dtype=dtype)
        k = torch.zeros(1, GROUPS, TOKENS, width, dtype=dtype)
        options: dict[str, Any] = {"mask": Causal()}
        if features == "everything":
            options = {
                "mask": Causal() & Keep(torch.ones(queries, TOKENS, dtype=torch.bool)),
                "bias": torch.zeros(1, HEADS, queries, TOKENS),
                "softcap": 30.0,
                "sinks": torch.zeros(HEADS),
                "dropout": 0.1,
            }
        yield what, prepare(q, k, k, **options)


def run_all(call: kernels.Call, decode: bool) -> None:
    """Everything that launches a kernel: forward, backward, statistics. What it computes is lost."""
    loops = kernel._Loops()
    out, lse = loops.forward(call, 0, 0)
    if not decode:
        wanted = [True] * len(call.learned())
        loops.backward(call, out, lse, out, lse, wanted, 0, 0)
    factors = torch.zeros(HEADS, TOKENS)
    asked = [
        *as_measures(SEEING),
        measures.Crop(0, 8, 0, 8),
        measures.Pairs(torch.zeros(call.shape[2], dtype=torch.int64)),
    ]
    run = MeasureRun(asked, plane_of(call))
    kernel.forward_measured(call.detached(), run)
    from regard.kernels.triton import statistics

    statistics._Weights(call.detached(), lse, plane_of(call)).columns([factors[None, :, None]])


def usage(compiled: Any, target: str) -> dict[str, int]:
    """Registers, spilled bytes and shared memory of a compiled kernel."""
    if target.startswith("hip"):
        text = compiled.asm["amdgcn"]
        numbers = {name: int(re.search(rf"\.{name}:\s+(\d+)", text)[1]) for name in ("vgpr_count", "vgpr_spill_count")}
        return {
            "registers": numbers["vgpr_count"],
            "spills": 4 * numbers["vgpr_spill_count"],
            "shared": compiled.metadata.shared,
        }
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found is not None, text
    return {"registers": int(found[1]), "spills": int(found[2]), "shared": compiled.metadata.shared}


def each_kernel(target: str, dtype: torch.dtype, width: int, features: str) -> Iterator[tuple[str, Any, Any, float]]:
    """Every kernel of some calls, compiled: its name, the result, its blocks, and the seconds it took."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    backend, architecture = target.split(":")
    nvidia = backend == "cuda"
    driver.set_active(Driver(GPUTarget(backend, int(architecture) if nvidia else architecture, 32 if nvidia else 64)))
    found: dict[str, tuple[Any, Any, float]] = {}

    def compile_only(kernel: Any, grid: Any, blocks: Any, like: Tensor, *args: Any, **options: Any) -> None:
        name = kernel.fn.__name__
        if name == "forward":
            name = "seeing" if options["TARGET"] else "forward"
            name = f"{name}, few queries" if options["PACKED"] else name
        if name in found:
            return
        kernel.device_caches.clear()  # (it would keep what was compiled for another target)
        start = time.perf_counter()
        compiled = kernel.run(
            *args,
            grid=grid,
            warmup=True,
            num_warps=blocks.warps,
            num_stages=blocks.stages,
            enable_fp_fusion=True,
            **options,
        )
        found[name] = compiled, blocks, time.perf_counter() - start

    with (
        mock.patch.object(launch, "launch", compile_only),
        mock.patch.object(launch, "target_of", return_value=launch.Target(target, TARGETS[target][1])),
    ):
        for what, call in calls(dtype, width, features):
            run_all(call, what == "decode")
    for name, result in found.items():
        yield name, *result


def compile_all(target: str, dtype: torch.dtype, width: int, features: str) -> list[dict[str, Any]]:
    """A row for each kernel."""
    call = {"target": target, "dtype": str(dtype).removeprefix("torch."), "width": width, "features": features}
    return [
        call
        | {"kernel": name, "blocks": list(blocks), **usage(compiled, target)}
        | {"limit": TARGETS[target][0], "seconds": round(seconds, 1)}
        for name, compiled, blocks, seconds in each_kernel(target, dtype, width, features)
    ]


def assembly(target: str, dtype: torch.dtype, width: int) -> dict[str, tuple[str, Any]]:
    """The PTX of every kernel of a plain call, and its blocks."""
    return {
        name: (compiled.asm["ptx"], blocks) for name, compiled, blocks, _ in each_kernel(target, dtype, width, "plain")
    }


def wrong(row: dict[str, Any]) -> str | None:
    """What is wrong with a row, in words."""
    if row["shared"] > row["limit"]:
        return f"needs {row['shared']} bytes of shared memory, and there are {row['limit']}"
    if row["spills"] and row["features"] == "plain":
        return f"spills {row['spills']} bytes"
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", nargs="+", default=list(TARGETS), choices=list(TARGETS))
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float16", "float32"])
    parser.add_argument("--widths", nargs="+", type=int, default=[64, 128, 256])
    parser.add_argument("--features", nargs="+", default=["plain", "everything"], choices=["plain", "everything"])
    parser.add_argument("--save", default=str(RESULTS), help='a file, or "none"')
    arguments = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET") == "1":
        print("TRITON_INTERPRET: expected it not to be set, received 1; remedy: unset it", file=sys.stderr)
        return 2
    import triton

    rows, failures = [], []
    for target in arguments.targets:
        for dtype in arguments.dtypes:
            for width in arguments.widths:
                for features in arguments.features:
                    for row in compile_all(target, getattr(torch, dtype), width, features):
                        rows.append(row)
                        reason = wrong(row)
                        failures += [] if reason is None else [reason]
                        numbers = (
                            f"{row['registers']:>4} registers {row['spills']:>5} spilled {row['shared']:>7} shared"
                        )
                        where = f"{target:<11}{dtype:<9}{width:>4} {features:<11}{row['kernel']:<20}"
                        blocks = "{}x{}, {}w, {}s".format(*row["blocks"])
                        print(f"{where} {blocks:<16}{numbers} {row['seconds']:>5} s  {reason or ''}", flush=True)
    if arguments.save != "none":
        machine = {"compiler": f"Triton {triton.__version__}", "torch": torch.__version__}
        for row in rows:
            del row["seconds"]  # (of this machine, and not of the kernel)
        Path(arguments.save).write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")
    spilled = sum(bool(row["spills"]) for row in rows)
    print(f"{len(rows)} kernels compiled, {spilled} spill, {len(failures)} wrong")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
