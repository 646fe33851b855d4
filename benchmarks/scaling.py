"""Which way over how many devices? By calculation: the cost model of `regard.parallel.cost`, carried to a million tokens.

    python benchmarks/scaling.py [--efficiency 0.5] [--probe] [--json FILE]

One attention layer, forward and backward, B = 1, causal, bfloat16: attention between the projections, and of heads the
sums around it. Nothing here was measured on the devices named: their published peaks are taken, and for attention a
share of the peak (--efficiency). A ring within a host of 8 has the links of the host; as soon as hosts take part, all
that a device sends is taken to go over the slower links between hosts. One message is taken to cost 10 us.

    heads            heads over all devices          ring          the sequence over all, balanced
    alltoall         tokens traded for heads         heads x ring  heads within a host of 8, a ring over hosts

--probe measures this machine (multiply-adds of `attend`, float32; two processes over loopback) and adds it.
"""

from __future__ import annotations

import argparse
import math
import os
import socket
import statistics
import time
from dataclasses import asdict, dataclass, replace

import torch
from side_by_side import save, table

from regard import attend
from regard.masks import Causal
from regard.parallel.cost import METHODS, Device, Sizes, cost, seconds, why_not

HOST = 8  # devices
TOKENS = [2**i for i in range(13, 21)]
DEVICES = [2**i for i in range(1, 11)]
LAYERS = {
    "8B-like: 32 heads, 8 kv heads of 128, width 4,096": Sizes(0, 32, 8, 128, 4096),
    "70B-like: 64 heads, 8 kv heads of 128, width 8,192": Sizes(0, 64, 8, 128, 8192),
}
SHORT = {"heads": "H", "ring": "R", "alltoall": "A", "heads x ring": "HR"}


@dataclass(frozen=True)
class Machine:
    """Devices in hosts. `flops` is the peak (dense bfloat16), links are bytes per second in one direction."""

    name: str
    flops: float
    inside: float
    between: float
    latency: float = 10e-6

    def device(self, devices: int, efficiency: float) -> Device:
        """One of so many."""
        return Device(
            self.name, self.flops * efficiency, self.inside if devices <= HOST else self.between, self.latency
        )


MACHINES = [
    Machine("H100 SXM: 989 TFLOP/s, NVLink 4: 450 GB/s, 400 Gb/s between hosts", 989e12, 450e9, 50e9),
    Machine("A100 SXM: 312 TFLOP/s, NVLink 3: 300 GB/s, 200 Gb/s between hosts", 312e12, 300e9, 25e9),
]


def heads_and_ring(sizes: Sizes, devices: int, machine: Machine, efficiency: float) -> float | None:
    """Seconds with heads over the devices of a host, and the sequence over hosts; None where it cannot be."""
    hosts = devices // HOST
    if devices % HOST or hosts < 2 or sizes.heads % HOST or sizes.tokens < hosts:
        return None
    here = replace(sizes, heads=sizes.heads // HOST, kv_heads=max(1, sizes.kv_heads // HOST))
    sums = cost("heads", replace(sizes, tokens=sizes.tokens // hosts), HOST)
    sums = replace(sums, flops=(0.0, 0.0))  # they are counted once, in the ring
    inside = seconds(sums, machine.device(HOST, efficiency))
    return inside + seconds(cost("ring", here, hosts), machine.device(devices, efficiency))


def times(sizes: Sizes, devices: int, machine: Machine, efficiency: float) -> dict[str, float]:
    """Seconds of each way that there is."""
    device = machine.device(devices, efficiency)
    found = {way: seconds(cost(way, sizes, devices), device) for way in METHODS if not why_not(way, sizes, devices)}
    both = heads_and_ring(sizes, devices, machine, efficiency)
    return found if both is None else {**found, "heads x ring": both}


def memory(way: str, sizes: Sizes, devices: int) -> int:
    """Bytes that a device keeps of one layer for the backward pass (input, q, k, v, output), and blocks on their way."""
    hosts = devices // HOST if way == "heads x ring" else devices
    n, split = (sizes.tokens, devices) if way == "heads" else (sizes.tokens // hosts, 1)
    split = HOST if way == "heads x ring" else split
    q, kv = sizes.heads / split, max(1.0, sizes.kv_heads / split)
    kept = n * (sizes.width + 2 * (q + kv) * sizes.head_dim) * sizes.number
    blocks = 2 * n * kv * 2 * sizes.head_dim * (sizes.number + sizes.sum) if "ring" in way else 0  # with gradients
    return int(sizes.batch * (kept + blocks))


def enough(sizes: Sizes, flops: float, bandwidth: float) -> tuple[float, float]:
    """n*: tokens of a device from which on a ring computes for as long as it sends, forward and backward.

    Computing a block of n keys: 4 H n n D / flops, half of it under a causal mask; sending it: 2 G n D numbers. Both
    are equal at n* = (2 if causal) G number flops / (2 H bandwidth): whatever the length, the width and the devices.
    Backward: 2.5 times the computing, and the gradient of the block travels along.
    """
    forward = (2 if sizes.causal else 1) * sizes.kv_heads * sizes.number * flops / (2 * sizes.heads * bandwidth)
    return forward, forward * (sizes.number + sizes.sum) / sizes.number / 2.5


def waits(sizes: Sizes, flops: float, latency: float) -> float:
    """Tokens of a device below which the latency of one message is longer than computing a block."""
    return math.sqrt(latency * flops * (2 if sizes.causal else 1) / (4 * sizes.heads * sizes.head_dim))


def show(machine: Machine, name: str, layer: Sizes, efficiency: float) -> list[dict[str, object]]:
    rows, shown, held = [], [], []
    for n in TOKENS:
        sizes, cells, kept = replace(layer, tokens=n), [], []
        alone = seconds(cost("ring", sizes, 1), machine.device(1, efficiency))
        for devices in DEVICES:
            found = times(sizes, devices, machine, efficiency)
            best = min(found, key=lambda way: found[way])
            cells.append(f"{SHORT[best]} {alone / devices / found[best]:.0%}")
            kept.append(f"{memory(best, sizes, devices) / 2**20:,.0f}")
            rows.append({"machine": machine.name, "layer": name, "tokens": n, "devices": devices, "fastest": best,
                         "alone": alone, "seconds": found,
                         "memory": {way: memory(way, sizes, devices) for way in found}})  # fmt: skip
        shown.append([f"{n:,}", f"{alone * 1e3:,.1f} ms", *cells])
        held.append([f"{n:,}", *kept])
    print(f"\n{machine.name}\n{name}\n\nthe fastest, and how much of the time it computes\n")
    print(table(["tokens", "one device", *(f"{d:,}" for d in DEVICES)], shown))
    print("\nMB that a device keeps of the layer then\n")
    print(table(["tokens", *(f"{d:,}" for d in DEVICES)], held))
    print(f"\nheads and alltoall stop at {layer.heads} devices, which have one head each.")
    for words, link in (("within a host", machine.inside), ("between hosts", machine.between)):
        forward, backward = enough(layer, machine.flops * efficiency, link)
        print(f"ring {words}: computes for as long as it sends from {forward:,.0f} tokens of a device on forward, "
              f"{backward:,.0f} backward: {2**20:,} tokens over up to {2**20 / max(forward, backward):,.0f}.")  # fmt: skip
    print(f"A message ({machine.latency * 1e6:.0f} us) is longer than the computing below "
          f"{waits(layer, machine.flops * efficiency, machine.latency):,.0f} tokens of a device.")  # fmt: skip
    return rows


def probe() -> Machine:
    """This machine: what `attend` computes, and what two processes send each other over loopback."""
    q, k, v = (torch.randn(1, 12, 2048, 64) for _ in range(3))
    took = []
    for _ in range(7):
        begin = time.perf_counter()
        attend(q, k, v, mask=Causal())
        took.append(time.perf_counter() - begin)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    results = torch.multiprocessing.get_context("spawn").SimpleQueue()
    torch.multiprocessing.spawn(loopback, (port, results), nprocs=2)
    bandwidth, latency = results.get()
    flops = 4 * 12 * 2048**2 * 64 / 2 / statistics.median(took)
    name = f"this machine: {flops / 1e9:,.0f} GFLOP/s float32, {bandwidth / 1e9:.2f} GB/s, {latency * 1e6:.0f} us"
    return Machine(name, flops, bandwidth, bandwidth, latency)


def loopback(rank: int, port: int, results: torch.multiprocessing.SimpleQueue) -> None:
    import torch.distributed as dist

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2)
    found = []
    for count in (2**22, 1):  # numbers of 4 bytes
        mine, theirs, took = torch.zeros(count), torch.empty(count), []
        for _ in range(20):
            begin = time.perf_counter()
            works = [dist.isend(mine, 1 - rank), dist.irecv(theirs, 1 - rank)]
            for work in works:
                work.wait()  # type: ignore[union-attr]
            took.append(time.perf_counter() - begin)
        found.append(statistics.median(took))
    if rank == 0:
        results.put((4 * 2**22 / found[0], found[1]))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--efficiency", type=float, default=0.5, help="the share of the peak that attention reaches")
    parser.add_argument("--probe", action="store_true", help="measure this machine, too")
    parser.add_argument("--json", help="where the numbers go")
    options = parser.parse_args()
    print(
        f"By calculation; attention at {options.efficiency:.0%} of the peak. {', '.join(f'{s} {w}' for w, s in SHORT.items())}"
    )
    rows: list[dict[str, object]] = []
    for machine in MACHINES:
        for name, layer in LAYERS.items():
            rows += show(machine, name, layer, options.efficiency)
    if options.probe:
        name, layer = next(iter(LAYERS.items()))
        rows += show(probe(), f"{name}, in float32", replace(layer, number=4), 1.0)
    if options.json:
        save(options.json, [{**row, "efficiency": options.efficiency} for row in rows])


if __name__ == "__main__":
    main()
