"""Which way over how many devices? By calculation: `regard.parallel.cost`, carried to a million tokens.

    python benchmarks/scaling.py [--efficiency 0.5] [--probe] [--json FILE]

One attention layer, forward and backward, B = 1, causal, bfloat16: attention between the projections, and of heads the
sums around it. Nothing here was measured on the devices named: their published peaks are taken, and for attention a
share of the peak (--efficiency). Within a host of 8 the links are the host's; as soon as hosts take part, all that a
device sends is taken to go over the slower links between hosts. A message is taken to cost 10 us, one after the other.
Left out: gathering weights (FSDP, where the sequence is spread), summing their gradients, the handshake.

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
from dataclasses import dataclass, replace

import torch
from side_by_side import save, table

from regard import attend
from regard.masks import Causal
from regard.parallel.cost import METHODS, Cost, Sizes, cost, why_not
from regard.parallel.ring import LARGE

HOST = 8  # devices
TOKENS = [2**i for i in range(13, 21)]
DEVICES = [2**i for i in range(1, 11)]
SHOWN = (2**15, 2**20)  # lengths of which each way is shown
LAYERS = {
    "8B-like: 32 heads, 8 kv heads of 128, width 4,096": Sizes(0, 32, 8, 128, 4096),
    "70B-like: 64 heads, 8 kv heads of 128, width 8,192": Sizes(0, 64, 8, 128, 8192),
}
SHORT = {"heads": "H", "ring": "R", "alltoall": "A", "heads x ring": "HR"}


@dataclass(frozen=True)
class Device:
    """What a device can do."""

    name: str
    flops: float  # multiply-adds count as two, per second
    bandwidth: float  # bytes per second that it sends to its neighbour
    latency: float  # seconds of one message


def seconds(cost: Cost, device: Device, *, training: bool = True) -> float:
    """How long it takes: computing and sending one after the other, or (where they overlap) the longer of the two."""
    total = 0.0
    for flops, sent, messages in zip(cost.flops, cost.bytes, cost.messages, strict=True):
        computing, sending = flops / device.flops, sent / device.bandwidth + messages * device.latency
        total += max(computing, sending) if cost.overlaps else computing + sending
        if not training:
            break
    return total


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
    """Bytes that a device keeps of one layer for the backward pass (input, q, k, v, output); blocks on their way."""
    over, by = {"ring": (devices, 1), "heads x ring": (devices // HOST, HOST)}.get(way, (1, devices))
    n, q, kv = sizes.tokens // over, sizes.heads / by, max(1.0, sizes.kv_heads / by)
    own = sizes.tokens // devices if way == "alltoall" else n  # tokens of the input
    kept = (own * sizes.width + n * 2 * (q + kv) * sizes.head_dim) * sizes.number
    at_once = min(kv, max(1, 8 * LARGE // (n * 2 * sizes.head_dim * sizes.number)))  # kv heads of a round
    blocks = 2 * n * at_once * 2 * sizes.head_dim * (sizes.number + sizes.sum) if "ring" in way else 0  # with gradients
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
    """Tables of one layer on one machine."""
    rows, best, each = [], [], []
    for n in TOKENS:
        sizes = replace(layer, tokens=n)
        alone = seconds(cost("ring", sizes, 1), machine.device(1, efficiency))
        found = {devices: times(sizes, devices, machine, efficiency) for devices in DEVICES}
        first = {devices: min(ways, key=lambda way: ways[way]) for devices, ways in found.items()}
        best.append(
            [
                f"{n:,}",
                f"{alone:,.3f} s",
                *(f"{SHORT[way]} {alone / d / found[d][way]:.0%}" for d, way in first.items()),
            ]
        )
        for way in SHORT if n in SHOWN else ():
            each.append(
                [
                    f"{n:,} {way}",
                    *(
                        "-"
                        if way not in ways
                        else f"{alone / d / ways[way]:.0%}, {memory(way, sizes, d) / 2**20:,.0f} MB"
                        for d, ways in found.items()
                    ),
                ]
            )
        rows += [
            {
                "machine": machine.name,
                "layer": name,
                "tokens": n,
                "devices": d,
                "fastest": first[d],
                "alone": alone,
                "seconds": ways,
                "memory": {way: memory(way, sizes, d) for way in ways},
            }
            for d, ways in found.items()
        ]
    names = [f"{devices:,}" for devices in DEVICES]
    print(f"\n{machine.name}\n{name}\n\nthe fastest over so many devices, and how much of the time it computes\n")
    print(table(["tokens", "one device", *names], best))
    print("\neach: how much of the time it computes, and what a device keeps of the layer\n")
    print(table(["tokens", *names], each))
    flops = machine.flops * efficiency
    print(f"\nheads and alltoall stop at {layer.heads} devices, which have one head each.")
    for words, link in (("within a host", machine.inside), ("between hosts", machine.between)):
        forward, backward = enough(layer, flops, link)
        print(
            f"ring {words}: computes for as long as it sends from {forward:,.0f} tokens of a device on, backward "
            f"from {backward:,.0f} on: a million over up to {2**20 / max(forward, backward):,.0f}."
        )
    print(
        f"A message ({machine.latency * 1e6:.0f} us) is longer than computing a block of fewer than "
        f"{waits(layer, flops, machine.latency):,.0f} tokens."
    )
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
    words = ", ".join(f"{short} {way}" for way, short in SHORT.items())
    print(f"By calculation; attention at {options.efficiency:.0%} of the peak. {words}")
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
