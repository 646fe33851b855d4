"""The sides of a kernel's blocks, its warps and pipeline stages: found by compiling for each GPU
(`benchmarks/compile_gpu.py`), the largest without spilled registers and within shared memory. They decide speed, and no
answer.

Kernels: "forward", "seeing" (with statistics of rows), "decode" (few rows, any), "d_queries", "d_keys", "d_scores",
"received", "columns", "lists", "links", "region".
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

# By kernel, for widths up to 64, 128 and 256. A plain call reads and computes nothing pair by pair beside the product;
# with a dense mask, documents, a bias, a softcap or dropout registers are scarce, and blocks smaller. "" stands for all
# others.
_Table = dict[str, tuple[Blocks, Blocks, Blocks]]
_PLAIN: _Table = {
    "forward": (Blocks(128, 64, 8, 2), Blocks(128, 32, 8, 2), Blocks(32, 32, 4, 1)),
    "seeing": (Blocks(128, 64, 8, 2), Blocks(128, 32, 8, 2), Blocks(32, 32, 8, 1)),
    "decode": (Blocks(16, 64, 4, 2), Blocks(16, 64, 4, 2), Blocks(16, 32, 4, 1)),
    "d_queries": (Blocks(128, 64, 8, 2), Blocks(64, 64, 8, 2), Blocks(32, 32, 8, 1)),
    "d_keys": (Blocks(32, 64, 8, 2), Blocks(32, 64, 8, 1), Blocks(32, 32, 8, 1)),
    "received": (Blocks(64, 64, 4, 2), Blocks(64, 64, 4, 2), Blocks(32, 32, 4, 1)),
    "": (Blocks(32, 64, 4, 1), Blocks(32, 32, 4, 1), Blocks(32, 32, 8, 1)),
}
_HEAVY: _Table = {
    "forward": (Blocks(64, 64, 8, 2), Blocks(64, 32, 8, 2), Blocks(32, 32, 8, 1)),
    "seeing": (Blocks(64, 64, 8, 2), Blocks(64, 32, 8, 2), Blocks(32, 32, 8, 1)),
    "decode": (Blocks(16, 64, 4, 2), Blocks(16, 64, 4, 2), Blocks(16, 32, 4, 2)),
    "d_queries": (Blocks(32, 32, 4, 1), Blocks(32, 32, 8, 1), Blocks(32, 32, 8, 1)),
    "d_keys": (Blocks(32, 32, 4, 1), Blocks(32, 32, 8, 1), Blocks(32, 32, 8, 1)),
    "received": (Blocks(64, 32, 4, 2), Blocks(64, 32, 4, 2), Blocks(32, 32, 4, 1)),
    "": (Blocks(32, 64, 4, 1), Blocks(32, 32, 4, 1), Blocks(32, 32, 8, 1)),
}
# What does not fit on one GPU. (With four warps a thread of AMD's has twice as many registers.)
_ELSEWHERE: dict[tuple[str, str, int, int], Blocks] = {  # by target, kernel, bytes of a number, and column
    ("cuda:100", "seeing", 2, 0): Blocks(128, 32, 8, 2),
    ("cuda:100", "d_queries", 2, 1): Blocks(64, 32, 8, 2),
    ("cuda:100", "d_keys", 2, 1): Blocks(64, 64, 8, 1),
    ("cuda:100", "decode", 2, 1): Blocks(16, 32, 4, 2),
    ("cuda:100", "d_queries", 2, 2): Blocks(16, 32, 4, 1),
    ("cuda:100", "decode", 2, 2): Blocks(16, 16, 4, 1),
    ("cuda:100", "d_queries", 4, 0): Blocks(32, 16, 4, 1),
    ("cuda:100", "d_keys", 4, 0): Blocks(16, 16, 4, 1),
    ("hip:gfx942", "d_keys", 2, 0): Blocks(32, 64, 4, 1),
    ("hip:gfx942", "d_queries", 2, 1): Blocks(64, 64, 4, 1),
    ("hip:gfx942", "d_queries", 2, 2): Blocks(32, 32, 4, 1),
    ("hip:gfx942", "d_keys", 2, 2): Blocks(16, 32, 4, 1),
    ("hip:gfx942", "decode", 4, 2): Blocks(16, 16, 4, 1),
}
# float32 is for exactness: three products for one, or none of the tensor cores.
_PLAIN_FLOAT32: _Table = {
    "forward": (Blocks(32, 32, 4, 1), Blocks(32, 16, 8, 1), Blocks(16, 16, 4, 1)),
    "seeing": (Blocks(32, 32, 4, 1), Blocks(32, 16, 8, 1), Blocks(16, 16, 4, 1)),
    "decode": (Blocks(16, 32, 4, 1), Blocks(16, 16, 4, 1), Blocks(16, 32, 8, 1)),
    "d_queries": (Blocks(32, 32, 4, 1), Blocks(16, 16, 4, 1), Blocks(16, 16, 4, 1)),
    "d_keys": (Blocks(32, 32, 4, 1), Blocks(32, 16, 4, 1), Blocks(16, 16, 4, 1)),
    "received": (Blocks(32, 32, 4, 1), Blocks(32, 16, 4, 1), Blocks(16, 16, 4, 1)),
    "lists": (Blocks(32, 32, 4, 1), Blocks(16, 16, 8, 1), Blocks(16, 16, 8, 1)),
    "": (Blocks(32, 32, 4, 1), Blocks(16, 16, 4, 1), Blocks(16, 16, 8, 1)),
}
_HEAVY_FLOAT32: _Table = {
    "decode": (Blocks(16, 32, 4, 1), Blocks(16, 16, 4, 1), Blocks(16, 16, 8, 1)),
    "": (Blocks(16, 32, 4, 1), Blocks(16, 16, 4, 1), Blocks(16, 16, 8, 1)),
}


def blocks_for(kernel: str, target: str, itemsize: int, width: int, plain: bool) -> Blocks:
    """For a kernel on a target ("interpreter", "cuda:80", "hip:gfx942"), numbers of so many bytes and heads so wide."""
    if target == "interpreter":
        return INTERPRETED
    column = 0 if width <= 64 else 1 if width <= 128 else 2
    if plain and (target, kernel, itemsize, column) in _ELSEWHERE:
        return _ELSEWHERE[target, kernel, itemsize, column]
    if itemsize == 4:
        table = _PLAIN_FLOAT32 if plain else _HEAVY_FLOAT32
    else:
        table = _PLAIN if plain else _HEAVY
    return table.get(kernel, table[""])[column]


def parts_of(programs: int, keys: int, block: int, processors: int) -> int:
    """Into how many parts keys are split, so that each processor has two programs; a part has four blocks at least."""
    return max(1, min(-(-2 * processors // programs), keys // (4 * block)))
