"""What a rank sends, computes and holds: as the formulas say, and never the whole of keys and values.

Letters: B batch, H query heads, G kv heads, N tokens, n those of one rank, D head width of q and k, E of v, P ranks.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from distributed import together
from distributed.compare import layer, normal
from regard import MultiHeadAttention, parallel
from regard.masks import Causal, Mask, Window
from regard.parallel import Tokens, alltoall
from regard.parallel.collectives import Ranks
from regard.parallel.global_call import GlobalCall
from regard.parallel.ring import Plan

B, H, G, D, E = 2, 12, 4, 6, 5
Counts = dict[str, dict[str, dict[str, int]]]
MASKS: dict[str, Mask | None] = {
    "all": None,
    "causal": Causal(),
    "window": Window(5),
    "both": Window(before=3, after=3),
}


def sent(rank: int, size: int, tokens: int) -> Counts:
    """What this rank sends, forward and backward, by kind."""
    mesh = init_device_mesh("cpu", (size,))
    told: Counts = {}
    for method in ("ring", "alltoall"):
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            for name, mask in MASKS.items():
                module = layer(num_heads=H, num_kv_heads=G, head_dim=D, value_head_dim=E).to(dtype)
                parallel.shard_sequence(module, mesh, method, sum_gradients=False)  # type: ignore[arg-type]
                x = normal(B, tokens, 23).to(dtype).chunk(size, 1)[rank].clone().requires_grad_()
                with parallel.counting() as forward:
                    out = module(x, mask=mask)
                with parallel.counting() as backward:
                    out.sum().backward()
                told[f"{method} {dtype} {name}"] = {"forward": forward.bytes, "backward": backward.bytes}
    return told


def steps(name: str, rank: int, size: int) -> tuple[int, int]:
    """How many times a rank sends a block on, its own or another's; and how many gradients of blocks. (Parts are longer
    than windows.)"""
    if name == "all":
        return size - 1, size - 1
    if name == "causal":  # block j goes to the ranks after it; its gradient goes the same way, and then home
        passed = sum(1 for j in range(rank + 1) if rank < size - 1)
        return passed, sum(1 for j in range(rank))
    if name == "window":
        return int(rank < size - 1), int(rank > 0)
    return int(rank < size - 1) + int(rank > 0), int(rank > 0) + int(rank < size - 1)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.slow
def test_a_ring_sends_each_block_as_far_as_it_is_needed_and_no_further(size: int) -> None:
    tokens = 11 * size
    for rank, told in enumerate(together.run(sent, size, size, tokens)):
        for name, counts in told.items():
            method, dtype, mask = name.split()
            item = {"torch.float32": 4, "torch.float64": 8, "torch.bfloat16": 2}[dtype]
            wide = max(item, 4)  # gradients are added up in float32 or wider
            n = tokens // size
            handshake = counts["forward"].pop("gather")
            assert 0 < handshake < 200 * (size - 1), name  # a few integers to each
            if method == "ring":
                blocks, gradients = steps(mask, rank, size)
                block = B * G * n * (D + E)
                forward = {"blocks": blocks * block * item} if blocks or size > 1 else {}
                assert _only(counts["forward"]) == _only(forward), (rank, name)
                backward = {"blocks": blocks * block * item + gradients * block * wide}
                assert _only(counts["backward"]) == _only(backward), (rank, name)
            else:
                there, back = _exchanged(size, n)
                assert counts["forward"] == {"exchange": (there[rank] + back) * item}, (rank, name)
                home = there_of_others(size, n, rank) + back  # the gradients go where the tensors came from
                assert counts["backward"] == {"exchange": home * item}, (rank, name)


def _only(counts: dict[str, int]) -> dict[str, int]:
    return {kind: count for kind, count in counts.items() if count}


def _exchanged(size: int, n: int) -> tuple[list[int], int]:
    """Numbers that each rank sends away for its q, k and v of the others' heads; and of its heads' output."""
    own = [slice(r * H // size, (r + 1) * H // size) for r in range(size)]
    groups = [len(alltoall.kv_heads_of(some, H, G)) for some in own]
    there = [sum(B * n * (H // size * D + groups[i] * (D + E)) for i in range(size) if i != r) for r in range(size)]
    return there, (size - 1) * B * n * (H // size) * E


def there_of_others(size: int, n: int, rank: int) -> int:
    """Numbers that a rank was sent: those of its own heads, from each other rank."""
    groups = len(alltoall.kv_heads_of(slice(rank * H // size, (rank + 1) * H // size), H, G))
    return (size - 1) * B * n * (H // size * D + groups * (D + E))


# Work


def pairs(rank: int, size: int, tokens: int, balanced: bool) -> int:
    """How many (query, key) pairs the ring gives this rank's kernels to look at, under a causal mask."""
    ranks = Ranks.of(init_device_mesh("cpu", (size,)))
    own = Tokens.of(tokens, size, balanced)
    q, block = torch.zeros(1, 1, own.lengths[rank], 2), torch.zeros(4 * own.lengths[rank])
    whole = GlobalCall.of(q, q, q, own, own, None, mask=Causal())
    plan = Plan.of(whole, ranks, "reference")
    total = 0
    for owner in range(size):
        block = plan.new_block(owner, torch.float32)
        for _, _, _, _, call in plan.block_pairs(q, block, owner):
            n, m = call.shape[2:]
            total += n * m if call.mask is None else n * (n + 1) // 2  # on the diagonal a kernel skips half
            assert call.mask is None or n == m
    return total


@pytest.mark.parametrize("size", [3])
def test_a_balanced_causal_sequence_gives_every_rank_the_same_to_do(size: int) -> None:
    tokens = 2 * size * 7
    balanced = together.run(both_pairs, size, size, tokens)
    assert len({even for even, _ in balanced}) == 1
    assert sum(even for even, _ in balanced) == tokens * (tokens + 1) // 2  # and nothing is done twice or left out
    assert sum(odd for _, odd in balanced) == tokens * (tokens + 1) // 2
    assert balanced[-1][1] > 3 * balanced[0][1]  # which cannot be said of neighbours


def both_pairs(rank: int, size: int, tokens: int) -> tuple[int, int]:
    """Those of a balanced sequence, and of a contiguous one."""
    return pairs(rank, size, tokens, True), pairs(rank, size, tokens, False)


# Memory

RANKS, LONG, HEADS, WIDE = 5, 8192, 8, 64  # what one rank has: 2 * 8192 * 8 * 64 * 4 bytes, 32 MiB
BLOCK = 32.0


def peak(rank: int) -> tuple[float, float]:
    """MiB that an attention takes beyond what was there before, forward and in all. There are few queries: keys and
    values are all that counts."""
    ctypes.CDLL(None).mallopt(-3, 65536)  # M_MMAP_THRESHOLD: what is freed is given back at once
    module = MultiHeadAttention(8, HEADS, head_dim=WIDE, bias=False)
    parallel.shard_sequence(module, init_device_mesh("cpu", (RANKS,)))
    x, key = torch.randn(1, 2, 8), torch.randn(1, LONG, 8)
    module(x, key[:, :2]).sum().backward()  # all code is loaded
    before = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the highest so far is forgotten
    out = module(x, key)
    forward = _resident("VmHWM") - before
    out.sum().backward()
    return forward, _resident("VmHWM") - before


def _resident(what: str) -> float:
    """MiB, as the system counts them."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(what)).split()[1]) / 1024


@pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK), reason="this system does not tell a peak of memory"
)
def test_a_ring_never_holds_the_whole_of_keys_and_values() -> None:
    whole = RANKS * BLOCK
    for forward, backward in together.run(peak, RANKS):
        # its own, and the same as messages; of the kv heads of one round the block that is here, and the one that
        # comes: 2.5 blocks. Half a block is left for what the system counts besides (threads, pages not given back).
        assert forward < 3.0 * BLOCK < whole
        # and gradients: of its own, of the one that is here, those that leave and come, and as the kernel gives them:
        # 3.5 blocks
        assert backward < 4.0 * BLOCK < whole
