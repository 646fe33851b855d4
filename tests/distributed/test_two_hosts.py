"""Two hosts with a cable between them: two network namespaces of this machine, joined by a pair of veth interfaces."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from distributed import together
from distributed.compare import alone, apart, by_heads, in_parts, layer, normal, report, table, within
from distributed.together import Host
from distributed.variants import LAYERS
from regard import MultiHeadAttention, parallel

TIMEOUT = 10.0


class Cable(NamedTuple):
    """Two hosts, each with its interface; and the address of the first."""

    first: Host
    second: Host
    address: str

    def hosts(self, each: int) -> list[Host]:
        """So many processes on each."""
        return [self.first] * each + [self.second] * each

    def cut(self) -> None:
        """The first host's end goes down."""
        _do(*self.first.prefix, "ip", "link", "set", self.first.interface, "down")


def _do(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")


@contextmanager
def _joined() -> Iterator[Cable]:
    number = os.getpid()
    names, ends = [f"regard{number}{side}" for side in "ab"], [f"rg{number}{side}" for side in "ab"]
    net = f"10.97.{number % 251}"
    try:
        for name in names:
            _do("ip", "netns", "add", name)
        _do("ip", "link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for i, (name, end) in enumerate(zip(names, ends, strict=True)):
            _do("ip", "link", "set", end, "netns", name)
            inside = ("ip", "netns", "exec", name, "ip")
            _do(*inside, "address", "add", f"{net}.{i + 1}/24", "dev", end)
            _do(*inside, "link", "set", end, "up")
            _do(*inside, "link", "set", "lo", "up")
        hosts = [Host(("ip", "netns", "exec", name), end) for name, end in zip(names, ends, strict=True)]
        yield Cable(*hosts, address=f"{net}.1")
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
        subprocess.run(["ip", "link", "del", ends[0]], capture_output=True, check=False)


@pytest.fixture
def cable() -> Iterator[Cable]:
    """Two hosts that are joined. Skipped, with what is missing, where this machine cannot have them."""
    if shutil.which("ip") is None:
        pytest.skip("two hosts: expected the command `ip` (iproute2) to make network namespaces, found none")
    if os.geteuid() != 0:
        pytest.skip("two hosts: expected to be root, who may make network namespaces (`ip netns add`)")
    try:
        with _joined():
            pass
    except OSError as error:
        pytest.skip(f"two hosts: expected network namespaces and a veth pair between them, received {error}")
    with _joined() as joined:
        yield joined


# All is well

LONG, HEADS, WIDE, TIMES = 1021, 8, 64, 5  # a rank's keys and values: 1021 * 2 * 8 * 64 * 4 bytes, 4 MB


def equal(rank: int, size: int, interfaces: list[str]) -> dict[str, Any]:
    """Outputs and gradients as on one process; and the bytes that left this host, over what is allowed."""
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("ranks",))
    far = DeviceMesh("cpu", [0, size // 2], mesh_dim_names=("far",))  # one rank on each host
    cases = [LAYERS["norm of heads"], LAYERS["all at once"], LAYERS["cross, more keys, causal"]]

    def over(method: str, number: int) -> dict[str, float]:
        case = cases[number]
        ours = by_heads(case, mesh) if method == "heads" else in_parts(case, mesh, method, balance=number > 0)
        return within(1e-12, apart(ours, alone(case)))

    rows = [(f"{way}, {i}", partial(over, way, i)) for way in ("ring", "alltoall", "heads") for i in range(len(cases))]
    told = table(rows)
    torch.distributed.barrier()
    if rank in (0, size // 2):
        told |= table([("bytes", partial(carried, far, interfaces[rank]))])
    else:
        told["bytes"] = {}
    torch.distributed.barrier()
    return told


def carried(mesh: DeviceMesh, interface: str) -> dict[str, float]:
    """What this host's interface sent for a large ring: at least the payload, and not much more."""
    module = MultiHeadAttention(16, HEADS, head_dim=WIDE, bias=False)
    parallel.shard_sequence(module, mesh, balance=False, sum_gradients=False)
    x = torch.randn(1, LONG, 16)
    module(x).sum().backward()
    before = _sent(interface)
    with parallel.counting() as counted:
        for _ in range(TIMES):
            module(x).sum().backward()
    block = LONG * 2 * HEADS * WIDE * 4
    assert counted.bytes["blocks"] == TIMES * 3 * block  # forward once; backward again, and the gradients
    torch.distributed.barrier(mesh.get_group())
    sent = _sent(interface) - before
    assert sent >= counted.total, f"{sent} bytes through {interface}, and {counted.total} were to be sent"
    return {"over the payload": sent / (1.15 * counted.total)}


def _sent(interface: str) -> int:
    return int(Path(f"/sys/class/net/{interface}/statistics/tx_bytes").read_text())


@pytest.mark.slow
def test_two_hosts_compute_what_one_process_does(cable: Cable) -> None:
    hosts = cable.hosts(2)
    interfaces, store = [host.interface for host in hosts], f"tcp://{cable.address}:29511"
    report(together.run(equal, 4, 4, interfaces, hosts=hosts, store=store), least=10)


# The cable is cut


def ringing(rank: int, folder: str) -> None:
    """One attention after the other, for longer than anybody waits, until the others do not answer any more."""
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("sequence",))
    module = parallel.shard_sequence(layer(), mesh)
    x = parallel.shard(normal(2, 29, 23), mesh)
    begun = time.monotonic()
    for step in range(10**6):
        last = time.monotonic()
        try:
            module(x).sum().backward()
        except ConnectionError:
            late = time.monotonic() - last - TIMEOUT
            assert step > 5, "it failed before anything was cut"
            assert late < 5.0, f"it took {late:.1f} s longer than the timeout"
            raise
        if step == 5:
            (Path(folder) / str(rank)).touch()
        assert time.monotonic() - begun < 60.0, "nothing was cut"


@pytest.mark.slow
def test_a_cut_cable_is_an_error_on_every_rank_within_the_timeout(cable: Cable, tmp_path: Path) -> None:
    cuts = []

    def cut() -> None:
        end = time.monotonic() + 60.0
        while len(list(tmp_path.iterdir())) < 4 and time.monotonic() < end:
            time.sleep(0.05)
        cable.cut()
        cuts.append(time.monotonic())

    with pytest.raises(together.Failed) as caught:
        together.run(
            ringing,
            4,
            str(tmp_path),
            timeout=TIMEOUT,
            hosts=cable.hosts(2),
            store=f"tcp://{cable.address}:29512",
            meanwhile=cut,
        )
    assert time.monotonic() - cuts[0] < TIMEOUT + 20.0  # and every process has ended
    assert set(caught.value.errors) == {0, 1, 2, 3}
    for rank, words in caught.value.errors.items():
        expected = r"^ConnectionError: \w+: expected an answer from the other ranks of 'sequence', received none by "
        assert re.search(rf"{expected}rank {rank} of 4 .*remedy: look for the first error", words), words
