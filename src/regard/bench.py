"""How fast this machine is, quickly: the kernels beside torch's own, and one layer over several processes beside one.

    kernels()       `attend` and `measure` (seeing) beside F.scaled_dot_product_attention
    distributed()   within torchrun: heads, ring and all-to-all beside one process: time, memory, bytes, differences

Contestants take turns, so that a slow moment of the machine hits all alike; medians and ratios count. Long measurements
are in `benchmarks/`.

Letters: B batch, H query heads, G kv heads, N tokens, D head width, W model width, P ranks.
"""

from __future__ import annotations

import copy
import ctypes
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.attention import attend, measure
from regard.errors import bad_type, bad_value
from regard.layer import MultiHeadAttention
from regard.masks import Causal

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from regard.parallel.cost import Sizes, Way

__all__ = ["CLOSE", "KernelTiming", "Report", "Row", "distributed", "kernels"]

COMMAND = "torchrun --nproc-per-node 2 -m regard bench --distributed"
CLOSE = 1e-5  # how far outputs and gradients may be from one process's, relative to the largest
HANDSHAKE = 14 * 8  # bytes that a rank sends each of the others in one call of a layer: 14 integers


@dataclass(frozen=True)
class KernelTiming:
    """Medians in seconds."""

    tokens: int
    backward: bool  # whether with the backward pass
    sdpa: float  # F.scaled_dot_product_attention
    attend: float
    seeing: float | None  # measure: the output, and what each head attends to; forward alone

    @property
    def ratio(self) -> float:
        """SDPA's time / that of `attend`: above 1 `attend` is faster."""
        return self.sdpa / self.attend

    @property
    def ratio_seeing(self) -> float | None:
        """SDPA's time / that of `measure`."""
        return None if self.seeing is None else self.sdpa / self.seeing


def kernels(
    tokens: Sequence[int] = (256, 1024, 4096),
    *,
    heads: int = 12,
    kv_heads: int | None = None,
    head_dim: int = 64,
    causal: bool = True,
    repeats: int = 5,
) -> list[KernelTiming]:
    """`attend` and `measure` beside F.scaled_dot_product_attention, in float32 with B = 1.

    Args:
        tokens: N, one or several.
        heads, kv_heads, head_dim: H, G (H by default), D.
        causal: whether each token sees those before it only.
        repeats: turns of each contestant, after one to warm up.

    >>> [row.tokens for row in kernels([16], heads=2, head_dim=8, repeats=1)]  # forward; forward and backward
    [16, 16]
    """
    kv_heads = _checked(heads, kv_heads, head_dim=head_dim, repeats=repeats)
    rows = []
    for n in tokens:
        _positive("tokens", n)
        for backward in (False, True):
            times = _take_turns(_contestants(n, heads, kv_heads, head_dim, causal, backward), repeats)
            rows.append(KernelTiming(n, backward, times["sdpa"], times["attend"], times.get("seeing")))
    return rows


def _contestants(
    n: int, heads: int, kv_heads: int, head_dim: int, causal: bool, backward: bool
) -> dict[str, Callable[[], object]]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, count, n, head_dim, generator=generator, device="cpu").requires_grad_(backward)
        for count in (heads, kv_heads, kv_heads)
    )
    mask, shared = Causal() if causal else None, heads != kv_heads

    def sdpa() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=shared)

    def ours() -> Tensor:
        return attend(q, k, v, mask=mask)

    def trained(run: Callable[[], Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(run().sum(), (q, k, v))

    if backward:
        return {"sdpa": trained(sdpa), "attend": trained(ours)}
    return {"sdpa": sdpa, "attend": ours, "seeing": lambda: measure(q, k, v, mask=mask)}


def _take_turns(runs: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Medians in seconds. A quick contestant is repeated within its turn until that lasts a millisecond."""
    often, times = {}, {name: [] for name in runs}
    for name, run in runs.items():
        run()  # what happens once
        begin = time.perf_counter()
        run()
        often[name] = max(1, round(1e-3 / max(time.perf_counter() - begin, 1e-7)))
    for _ in range(repeats):
        for name in random.sample(list(runs), len(runs)):
            begin = time.perf_counter()
            for _ in range(often[name]):
                runs[name]()
            times[name].append((time.perf_counter() - begin) / often[name])
    return {name: statistics.median(values) for name, values in times.items()}


# Over several processes


@dataclass(frozen=True)
class Row:
    """One way to compute the layer, forward and backward; of the ranks' numbers the largest."""

    way: str
    why_not: str | None = None  # in words, where it cannot be done
    seconds: float | None = None  # the median
    memory: int | None = None  # bytes at the peak, above what there was before; None where the system does not tell
    sent: dict[str, int] = field(default_factory=dict)  # bytes by kind, as `parallel.counting` has them
    formula: dict[str, int] = field(default_factory=dict)  # the same by calculation
    difference: float | None = None  # of outputs and gradients from one process's, relative to the largest

    @property
    def as_calculated(self) -> bool:
        """Whether what was sent is what was calculated, to the byte."""
        return self.sent == self.formula

    @property
    def right(self) -> bool | None:
        """Whether outputs and gradients are one process's; None where that one did not run."""
        return None if self.difference is None else self.difference <= CLOSE


@dataclass(frozen=True)
class Report:
    """What was measured: the same on every rank, but for `rank`."""

    rank: int
    ranks: int
    threads: int  # of each rank
    device: str
    rows: list[Row]


def distributed(
    *,
    tokens: int = 4096,
    heads: int = 12,
    kv_heads: int | None = None,
    head_dim: int = 64,
    causal: bool = True,
    repeats: int = 5,
    timeout: float = 60.0,
    progress: bool = True,
) -> Report:
    """One attention layer, forward and backward in float32 with B = 1, over the processes that torchrun started: by
    heads, ring, balanced ring and all-to-all, beside one process that has it all.

    All ranks call it, with the same arguments. It makes the process group and destroys it, unless there is one.

    Args:
        tokens, heads, kv_heads, head_dim: N, H, G (H by default), D; the width W is H * D.
        causal: whether each token sees those before it only.
        repeats: turns of each way, after two that warm up, count and compare.
        timeout: seconds that a rank waits for another: more than one process alone takes for a step.
        progress: a line on the terminal of rank 0.
    """
    kv_heads = _checked(heads, kv_heads, head_dim=head_dim, tokens=tokens, repeats=repeats)
    if not timeout > 0:
        raise bad_value("timeout", expected="more than 0 seconds", received=timeout)
    with _processes(timeout) as mesh:
        from regard.parallel.cost import Sizes

        sizes = Sizes(tokens, heads, kv_heads, head_dim, heads * head_dim, number=4, causal=causal)
        return _Bench(mesh, sizes, repeats, progress).run()


@contextmanager
def _processes(timeout: float) -> Iterator[DeviceMesh]:
    """All processes, as a mesh of one dimension."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    own_group = not (dist.is_available() and dist.is_initialized())
    if own_group and not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        raise bad_value(
            "bench --distributed", expected="processes that torchrun started", received="one of its own", remedy=COMMAND
        )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if own_group:
        if device == "cuda":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=timedelta(seconds=timeout))
    elif "nccl" not in dist.get_backend():
        device = "cpu"
    try:
        yield init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("ranks",))
    finally:
        if own_group:
            dist.destroy_process_group()


_ALONE = "one process"
_WAYS: dict[str, tuple[Way, bool]] = {
    "heads": ("heads", False),
    "ring": ("ring", False),
    "ring, balanced": ("ring", True),
    "alltoall": ("alltoall", False),
}


@dataclass(frozen=True)
class _Contestant:
    """A layer, and what this rank gives it."""

    layer: MultiHeadAttention
    x: Tensor  # (B, n, W): the whole, or this rank's part
    d_out: Tensor
    mask: Causal | None
    formula: dict[str, int]
    balanced: bool | None  # of a part; None where tokens are whole

    def step(self) -> list[Tensor]:
        """Forward and backward: the output, the gradient of x, and those of the weights."""
        x = self.x.detach().requires_grad_()
        self.layer.zero_grad()
        out = self.layer(x, mask=self.mask)
        out.backward(self.d_out)
        results = [out.detach(), *(y.grad for y in (x, *self.layer.parameters()) if y.grad is not None)]
        return [_waited(y) for y in results]


def _waited(x: Tensor) -> Tensor:
    """A sum over the ranks may still be on its way."""
    return x.wait() if hasattr(x, "wait") else x  # type: ignore[attr-defined]


class _Bench:
    """All ways in turn, in step on all ranks."""

    def __init__(self, mesh: DeviceMesh, sizes: Sizes, repeats: int, progress: bool) -> None:
        from regard.parallel.collectives import Ranks

        self.mesh, self.sizes, self.repeats = mesh, sizes, repeats
        self.ranks, self.device = Ranks.of(mesh), torch.device(mesh.device_type)
        self.telling = progress and self.ranks.rank == 0 and sys.stderr.isatty()

    def run(self) -> Report:
        """All that there is to know."""
        ways, refused = self._ways()
        measured: dict[str, dict[str, Any]] = {}
        whole: list[Tensor] = []
        for name, way in ways.items():
            self._tell(f"{name}: counting, comparing")
            sent, results = self._counted(name, way)
            whole = results if name == _ALONE else whole
            difference = self._difference(results, whole) if _ALONE in ways and name != _ALONE else None
            measured[name] = {"sent": sent, "formula": way.formula, "difference": difference}
        del whole
        for name, way in ways.items():
            self._tell(f"{name}: memory")
            measured[name]["memory"] = self._memory(name, way)
        times = self._times(ways)
        self._tell("")
        rows = [
            Row(name, refused[name]) if name in refused else Row(name, seconds=times[name], **measured[name])
            for name in (_ALONE, *_WAYS)
        ]
        return Report(self.ranks.rank, self.ranks.size, torch.get_num_threads(), self.device.type, rows)

    def _ways(self) -> tuple[dict[str, _Contestant], dict[str, str]]:
        """Those that can be done, and why not the others."""
        from regard.parallel import SequenceSharding, shard_heads, shard_sequence
        from regard.parallel.cost import why_not

        s = self.sizes
        generator = torch.Generator().manual_seed(0)
        x, d_out = (
            torch.randn(1, s.tokens, s.width, generator=generator, device="cpu").to(self.device) for _ in range(2)
        )
        torch.manual_seed(0)
        layer = MultiHeadAttention(s.width, s.heads, num_kv_heads=s.kv_heads, bias=False).to(self.device)
        mask = Causal() if s.causal else None
        ways, refused = {}, {}
        if self._fits():
            ways[_ALONE] = _Contestant(copy.deepcopy(layer), x, d_out, mask, {}, None)
        else:
            refused[_ALONE] = "the whole does not fit into the free memory of rank 0"
        for name, (way, balanced) in _WAYS.items():
            why = why_not(way, s, self.ranks.size)
            if why is not None:
                refused[name] = why
                continue
            formula, own = _formula(way, balanced, s, self.ranks.size, layer), copy.deepcopy(layer)
            if way == "heads":
                ways[name] = _Contestant(shard_heads(own, self.mesh), x, d_out, mask, formula, None)  # type: ignore[arg-type]
            else:
                sequence = SequenceSharding(self.mesh, way, balanced)  # type: ignore[arg-type]
                shard_sequence(own, sequence)
                part, d_part = (sequence.shard(y) for y in (x, d_out))
                ways[name] = _Contestant(own, part, d_part, mask, formula, balanced)
        return ways, refused

    def _fits(self) -> bool:
        """Whether rank 0 has memory for the whole: roughly 20 tensors of (N, W)."""
        need = 20 * self.sizes.tokens * self.sizes.width * self.sizes.number
        if self.device.type == "cuda":
            free = torch.cuda.mem_get_info()[0]
        else:
            free = _bytes_of("/proc/meminfo", "MemAvailable")
        return bool(self._largest(float(self.ranks.rank == 0 and (free is None or free >= need))))

    def _largest(self, *values: float) -> Any:
        """Of each value the largest of all ranks'; one alone as a number."""
        own = torch.tensor(values, dtype=torch.float64, device=self.device)
        most = self.ranks.all_gather(own).amax(0).tolist()
        return most if len(most) > 1 else most[0]

    def _step(self, name: str, way: _Contestant) -> list[Tensor]:
        """One step of this rank; where one process is alone, the others have none."""
        return way.step() if name != _ALONE or self.ranks.rank == 0 else []

    def _counted(self, name: str, way: _Contestant) -> tuple[dict[str, int], list[Tensor]]:
        """What the busiest rank sends, by kind; and the results, whole."""
        from regard.parallel import SequenceSharding, counting

        with counting() as traffic:
            results = self._step(name, way)
        kinds = ("blocks", "exchange", "sum", "gather")
        most = self._largest(*(traffic.bytes.get(kind, 0) for kind in kinds))
        if way.balanced is not None:
            results[:2] = map(SequenceSharding(self.mesh, balance=way.balanced).gather, results[:2])
        results = [_waited(y.full_tensor()) if hasattr(y, "full_tensor") else y for y in results]  # type: ignore[attr-defined]
        return {kind: int(size) for kind, size in zip(kinds, most, strict=True) if size}, results

    def _difference(self, results: list[Tensor], whole: list[Tensor]) -> float:
        """The largest difference from what one process computed, relative to its largest number."""
        apart = [((a - b).abs().max() / b.abs().max()).item() for a, b in zip(results, whole, strict=False)]
        return self._largest(max(apart, default=0.0))  # (the ranks that were not that one have nothing to compare)

    def _memory(self, name: str, way: _Contestant) -> int | None:
        """Bytes at the peak of a step, above what there was before; of the busiest rank."""
        way.layer.zero_grad()
        before = _begin_peak(self.device)
        results = self._step(name, way)
        peak = _peak(self.device)
        del results
        above = -1 if before is None or peak is None else peak - before
        missing, most = self._largest(above < 0, above)
        return None if missing else int(most)

    def _times(self, ways: dict[str, _Contestant]) -> dict[str, float]:
        """Medians in seconds, of the slowest rank's time of each step. The ways take turns."""
        times: dict[str, list[float]] = {name: [] for name in ways}
        order = random.Random(0)  # the same on all ranks
        for turn in range(self.repeats):
            for name in order.sample(list(ways), len(ways)):
                self._tell(f"{name}: {turn + 1} of {self.repeats}")
                self._largest(0.0)  # all begin together
                begin = time.perf_counter()
                self._step(name, ways[name])
                if self.device.type == "cuda":
                    torch.cuda.synchronize()
                times[name].append(self._largest(time.perf_counter() - begin))
        return {name: statistics.median(values) for name, values in times.items()}

    def _tell(self, what: str) -> None:
        if self.telling:
            print(f"\r\x1b[K{what}", end="", file=sys.stderr, flush=True)


def _formula(way: Way, balanced: bool, sizes: Sizes, ranks: int, layer: MultiHeadAttention) -> dict[str, int]:
    """Bytes that the busiest rank sends for one step, by kind: `parallel.cost`, the handshake, and the sums of the
    weights' gradients, of which a rank sends 2 (P - 1) / P."""
    from regard.parallel.cost import cost

    forward, backward = cost(way, sizes, ranks).bytes
    kinds = {"gather": HANDSHAKE * (ranks - 1)}
    if way == "heads":
        kinds["sum"] = forward + backward
    else:
        kinds["sum"] = sum(2 * w.nbytes * (ranks - 1) // ranks for w in layer.parameters())
        kinds["blocks" if way == "ring" else "exchange"] = forward + backward
    if way == "ring" and sizes.causal and not balanced and ranks > 1:
        # Nobody needs later blocks: rank r sends its own block and those of the r before it, forward and backward, and
        # the gradients of those r; the last rank sends gradients only.
        block, d_block = forward // (ranks - 1), (backward - forward) // (ranks - 1)
        kinds["blocks"] = max(2 * (ranks - 1) * block + (ranks - 2) * d_block, (ranks - 1) * d_block)
    return {kind: size for kind, size in kinds.items() if size}


def _begin_peak(device: torch.device) -> int | None:
    """Bytes in use; from now on the peak is measured. None where the system does not do that."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    try:
        ctypes.CDLL(None).malloc_trim(0)  # what was freed goes back, so that the step asks for it again
        Path("/proc/self/clear_refs").write_text("5")
    except (OSError, AttributeError, TypeError):  # no Linux, or a C library without it
        return None
    return _bytes_of("/proc/self/status", "VmHWM")


def _peak(device: torch.device) -> int | None:
    return torch.cuda.max_memory_allocated() if device.type == "cuda" else _bytes_of("/proc/self/status", "VmHWM")


def _bytes_of(path: str, name: str) -> int | None:
    """A line such as `VmHWM: 123 kB`, in bytes."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), None)


def _checked(heads: int, kv_heads: int | None, **others: int) -> int:
    """G, where all sizes are right."""
    kv_heads = heads if kv_heads is None else kv_heads
    for what, value in {"heads": heads, "kv_heads": kv_heads, **others}.items():
        _positive(what, value)
    if heads % kv_heads:
        raise bad_value("kv_heads", expected=f"a divisor of the {heads} heads", received=kv_heads)
    return kv_heads


def _positive(what: str, value: int) -> None:
    if not isinstance(value, int):
        raise bad_type(what, expected="an integer", received=type(value).__name__)
    if value < 1:
        raise bad_value(what, expected="at least 1", received=value)
