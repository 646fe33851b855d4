"""Collectives of `torch.distributed`, counted, with errors that say what to do.

Letters: P processes of one mesh dimension.
"""

from __future__ import annotations

import atexit
import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _resolve_process_group  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._python_dispatch import TorchDispatchMode

from regard.errors import bad_type, bad_value

__all__ = ["Ranks", "Traffic", "counting", "digest", "fingerprint"]


@dataclass
class Traffic:
    """What this process sent, by kind: bytes of payload, and messages.

    `bytes` counts what leaves this process for another: a block to one neighbour once; of a gather, what this process
    adds, to each of the others; of a sum (all-reduce), 2 (P - 1) / P of the tensor, as a ring of P sends it.
    """

    bytes: dict[str, int] = field(default_factory=dict)
    messages: dict[str, int] = field(default_factory=dict)

    def add(self, kind: str, size: int, messages: int = 1) -> None:
        """One more."""
        self.bytes[kind] = self.bytes.get(kind, 0) + size
        self.messages[kind] = self.messages.get(kind, 0) + messages

    @property
    def total(self) -> int:
        """Bytes of all kinds."""
        return sum(self.bytes.values())


_COUNTERS: list[Traffic] = []


@contextmanager
def counting() -> Iterator[Traffic]:
    """Count what this process sends within a `with` block: the blocks of a ring, exchanges, and the sums and gathers of
    torch's own tensor parallelism.

    >>> with counting() as sent:
    ...     pass
    >>> sent.total
    0
    """
    sent = Traffic()
    _COUNTERS.append(sent)
    try:
        with _Functional(sent):
            yield sent
    finally:
        _COUNTERS[:] = [counter for counter in _COUNTERS if counter is not sent]  # (equal ones are not the same)


class _Functional(TorchDispatchMode):
    """Sees the collectives that DTensor makes: they are torch operators."""

    def __init__(self, sent: Traffic) -> None:
        super().__init__()
        self.sent = sent

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if name.startswith("_c10d_functional.all_reduce"):
            size = _resolve_process_group(args[2]).size()
            self.sent.add("sum", _of_a_sum(args[0].nbytes, size))
        elif name.startswith("_c10d_functional.all_gather_into_tensor"):
            self.sent.add("gather", args[0].nbytes * (args[1] - 1), args[1] - 1)
        return func(*args, **(kwargs or {}))


def _of_a_sum(size: int, processes: int) -> int:
    """Bytes that one of P sends for the sum of a tensor: 2 (P - 1) / P of it."""
    return 2 * size * (processes - 1) // processes


def _count(kind: str, size: int, messages: int = 1) -> None:
    for counter in _COUNTERS:
        counter.add(kind, size, messages)


@atexit.register
def _let_threads_finish() -> None:
    """Where the interpreter ends while a thread of gloo still lets go of a tensor, that thread aborts the process, even
    after destroy_process_group: torch's own collectives keep the group alive. Sleeping hands such threads the lock they
    wait for."""
    if Ranks.met:
        time.sleep(0.1)


class Ranks:
    """The processes of one mesh dimension, and which of them this one is."""

    met = False  # whether this process has been one of several

    def __init__(self, group: dist.ProcessGroup, name: str, device: str = "cpu") -> None:
        self.group, self.name = group, name
        self.device = torch.device(device)  # where what travels must lie
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        Ranks.met = Ranks.met or self.size > 1

    @staticmethod
    def of(mesh: DeviceMesh) -> Ranks:
        """Those of a mesh of one dimension."""
        if not isinstance(mesh, DeviceMesh):
            raise bad_type(
                "mesh",
                expected="a torch DeviceMesh",
                received=type(mesh).__name__,
                remedy='torch.distributed.init_device_mesh("cpu", (world_size,))',
            )
        if mesh.ndim != 1:
            names = mesh.mesh_dim_names or tuple(range(mesh.ndim))
            raise bad_value(
                "mesh",
                expected="one dimension",
                received=f"{mesh.ndim}: {names}",
                remedy='name one of them: mesh["sequence"]',
            )
        if mesh.get_coordinate() is None:
            raise bad_value(
                "mesh",
                expected="one that this process is part of",
                received=f"ranks {mesh.mesh.flatten().tolist()}, and this is rank {dist.get_rank()}",
                remedy="run this on the mesh's own ranks alone",
            )
        order = mesh.mesh.flatten().tolist()
        if order != sorted(order):  # groups are ordered by rank, DTensors by the mesh
            raise bad_value(
                "mesh",
                expected="ranks in ascending order",
                received=order,
                remedy="start the processes in the order that they should have",
            )
        return Ranks(mesh.get_group(), (mesh.mesh_dim_names or ("mesh",))[0], mesh.device_type)

    def __deepcopy__(self, memo: Any) -> Ranks:
        return self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ranks) and self.group is other.group

    def __hash__(self) -> int:
        return id(self.group)

    def __repr__(self) -> str:
        return f"rank {self.rank} of {self.size} ({self.name})"

    # Collectives. All processes must call them in the same order.

    def all_gather(self, x: Tensor) -> Tensor:
        """x of every process, of one shape: (P, *x.shape)."""
        out = x.new_empty(self.size, *x.shape)
        if self.size == 1:
            return out.copy_(x[None])
        _count("gather", x.nbytes * (self.size - 1), self.size - 1)
        with self._network_errors("gather"):
            _gather(_travelling(out.view(-1)), _travelling(x.contiguous().view(-1)), group=self.group)
        return out

    def first(self, number: int) -> int:
        """The first process's number, on all."""
        return int(self.all_gather(torch.tensor(number, dtype=torch.int64, device=self.device))[0])

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of x over the processes, in its place."""
        if self.size > 1:
            _count("sum", _of_a_sum(x.nbytes, self.size))
            with self._network_errors("sum"):
                dist.all_reduce(x, group=self.group)
        return x

    def broadcast_module(self, module: nn.Module, check: Callable[[], None], /, **settings: Any) -> None:
        """Give every process the parameters and buffers of the first, where they have the same names and shapes, and
        the same settings. Where the check raises on one, all raise."""
        names, frozen = "names, shapes and dtypes of parameters", "parameters that get a gradient"

        def facts() -> dict[str, int]:
            check()
            for name, x in module.named_parameters():
                self._check_whole(name, x)
            shapes = [(name, tuple(x.shape), str(x.dtype)) for name, x in _tensors(module).items()]
            learned = [name for name, x in module.named_parameters() if x.requires_grad]
            return {names: digest(shapes), frozen: digest(learned), **{key: digest(x) for key, x in settings.items()}}

        self.agree("module", (names, frozen, *settings), facts)
        for x in _tensors(module).values():
            if self.size > 1 and x.device.type != "meta":
                whole = x.contiguous()
                with self._network_errors("weights"):
                    dist.broadcast(_travelling(whole.view(-1)), group=self.group, group_src=0)
                x.copy_(whole)

    def overlaps(self, group: dist.ProcessGroup) -> bool:
        """Whether some process besides this one is in both groups."""
        mine, theirs = (dist.get_process_group_ranks(each) for each in (self.group, group))
        return len(set(mine) & set(theirs)) > 1

    def _check_whole(self, name: str, x: Tensor) -> None:
        """Raise where a parameter is cut up among these processes: they cannot have the same."""
        if not isinstance(x, DTensor):
            return
        for axis, placement in enumerate(x.placements):
            if not placement.is_replicate() and self.overlaps(x.device_mesh.get_group(axis)):
                raise bad_value(
                    name,
                    expected=f"a parameter that is whole on every rank of {self.name!r}",
                    received=f"a DTensor, {placement}",
                    remedy="heads and sequence over two dimensions of a mesh; fully_shard last",
                )

    def all_to_all(self, sent: Tensor, sizes: list[int], came: Tensor, their_sizes: list[int]) -> None:
        """Cut along `sizes`, the first piece goes to the first process, and so on; `came` is filled in the same way."""
        if self.size == 1:
            came.copy_(sent)
            return
        _count("exchange", (sent.numel() - sizes[self.rank]) * sent.element_size(), self.size - 1)
        with self._network_errors("exchange"):
            dist.all_to_all_single(came, sent, their_sizes, sizes, group=self.group)

    def post(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]], *, channel: int = 0
    ) -> Callable[[], None]:
        """Begin to send and receive, each to or from a process (by its number here); gives what waits for it all.

        Between two processes, messages of one channel arrive in the order of the lists. All processes must post in the
        same order, with or without messages.
        """
        operations = []
        for kind, messages in ((dist.isend, sends), (dist.irecv, receives)):
            for tag, (peer, tensor) in enumerate(messages):
                assert tensor.is_contiguous() and peer != self.rank
                tag = 2 * sum(other == peer for other, _ in messages[:tag]) + channel  # which of those between the two
                operations.append(dist.P2POp(kind, tensor, group=self.group, tag=tag, group_peer=peer))
        if not operations:
            return lambda: None
        _count("blocks", sum(tensor.nbytes for _, tensor in sends), len(sends))
        with self._network_errors("send"):
            works = dist.batch_isend_irecv(operations)

        def wait() -> None:
            with self._network_errors("receive"):
                while works:  # (gloo would wait a second time for ever)
                    works.pop(0).wait()

        return wait

    def agree(
        self, what: str, names: Sequence[str], facts: Callable[[], dict[str, int]], differ: Sequence[str] = ()
    ) -> list[dict[str, int]]:
        """Every process's facts, by process. They must be the same in all, but for those that may `differ`.

        Where they are not, or where `facts` raises in one process, all raise. It is a gather of a few integers, and
        where all goes well nothing else.
        """
        error, row = None, dict.fromkeys(names, 0)
        try:
            row = facts()
        except Exception as raised:  # whatever it was: the others must not wait for this process
            error = raised
        assert tuple(row) == tuple(names)
        values = torch.tensor([int(error is not None), *row.values()], dtype=torch.int64, device=self.device)
        table = self.all_gather(values).tolist()
        failed = [rank for rank, (flag, *_) in enumerate(table) if flag]
        if failed:
            words: list[Any] = [None] * self.size
            with self._network_errors("agree"):
                dist.all_gather_object(words, None if error is None else f"{type(error).__name__}: {error}", self.group)
            if error is not None:
                raise error
            who = f"rank {failed[0]} of {self.name!r}"
            raise bad_value(what, expected="all ranks to go on", received=f"{who} raised {words[failed[0]]}")
        rows = [dict(zip(names, values, strict=True)) for _, *values in table]
        for name in names:
            if name not in differ and len({row[name] for row in rows}) > 1:
                values = [row[name] for row in rows]
                if max(values) >= _HASHED:
                    values = ["one" if value == values[0] else "another" for value in values]
                by_rank = ", ".join(f"{value} on rank {rank}" for rank, value in enumerate(values))
                raise bad_value(what, expected=f"the same {name} on every rank of {self.name!r}", received=by_rank)
        return rows

    def wait(self, x: Tensor) -> Tensor:
        """What DTensor computes with others, as soon as it is there."""
        if isinstance(x, AsyncCollectiveTensor):
            with self._network_errors("sum"):
                x.wait()  # (what it returns has no gradient)
        return x

    def replicate(self, x: Tensor, mesh: DeviceMesh) -> Tensor:
        """An input of projections sharded by columns, as a replicated DTensor: its gradient is a sum over the
        processes."""
        if isinstance(x, DTensor):
            return x
        return _Replicate.apply(x, self, mesh)  # type: ignore[return-value]

    @contextmanager
    def _network_errors(self, what: str) -> Iterator[None]:
        """Turn errors of the network into a `ConnectionError` that says what to look for."""
        try:
            yield
        except (RuntimeError, dist.DistError) as error:
            first = str(error).splitlines()[0]
            raise ConnectionError(
                f"{what}: expected an answer from the other ranks of {self.name!r}, received none by {self}: {first}; "
                "remedy: look for the first error among the ranks (one died, raised, or is cut off); where one is only "
                "slow, a longer init_process_group(timeout=...)"
            ) from error


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, of DTensors what is here."""
    tensors = {name: x.detach() for name, x in (*module.named_parameters(), *module.named_buffers())}
    return {name: x.to_local() if isinstance(x, DTensor) else x for name, x in tensors.items()}


_TRAVEL = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
)


def _travelling(x: Tensor) -> Tensor:
    """As it is, or as bytes where collectives do not know the dtype; nothing is computed with it. (n,)"""
    return x if x.dtype in _TRAVEL else x.view(torch.uint8)


class _Replicate(torch.autograd.Function):
    """As DTensor.from_local; the sum of the gradient is waited for here, where an error of the network gets words."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks, mesh: DeviceMesh) -> Tensor:
        ctx.ranks, ctx.mesh = ranks, mesh
        return DTensor.from_local(x.view_as(x), mesh, [Replicate()], run_check=False)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        with ctx.ranks._network_errors("sum"):
            return ctx.ranks.wait(grads[0].redistribute(ctx.mesh, [Replicate()]).to_local()), None, None


# torch gave it another name; the older one warns
_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def fingerprint(x: Tensor) -> list[int]:
    """GlobalCall numbers as a few: which there are, and in which rows and columns.

    >>> fingerprint(torch.tensor([[1, 0], [0, 1]])) == fingerprint(torch.tensor([[1, 1], [0, 0]]))
    False
    >>> fingerprint(torch.tensor(5))
    [5, 5]
    """
    x = x.detach()[(None,) * max(0, 2 - x.dim())]
    sums = x.sum(-1, dtype=torch.int64).flatten(), x.flatten(0, -2).sum(0, dtype=torch.int64)
    return [int((numbers * torch.arange(1, len(numbers) + 1, device=x.device)).sum()) for numbers in sums]


_HASHED = 2**40  # larger numbers are hashes, which say nothing to a reader


def digest(*facts: object) -> int:
    """Facts as one number, the same in every process: 62 bits of a hash of their words."""
    return int.from_bytes(hashlib.blake2b(repr(facts).encode(), digest_size=8).digest(), "big") >> 2
