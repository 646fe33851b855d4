"""A sequence over 2, 3 and 4 processes, by ring and all-to-all: outputs and gradients are those of one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from distributed import together
from distributed.compare import (
    LIMITS,
    SEED,
    TOKENS,
    Case,
    Found,
    alone,
    apart,
    found,
    in_parts,
    leaf,
    no_worse,
    normal,
    report,
    shaken,
    table,
    within,
)
from distributed.variants import BENEATH, LAYERS, MASKS, RANDOM, Own, made, positions
from regard import parallel
from regard.masks import Causal
from regard.parallel import Tokens, ring
from regard.positions import Rotary

METHODS = ("ring", "alltoall")
UNEVEN = {2: [(0, 29), (28, 1)], 3: [(5, 0, 24), (11, 17, 1), (0, 0, 29)], 4: [(1, 17, 0, 11), (0, 2, 26, 1)]}
Row = tuple[str, Callable[[], dict[str, float]]]


def each(rank: int, size: int) -> dict[str, Any]:
    """All cases, one after the other.

    Each is done in some of the four ways by two processes, in the others by three; every other one in one way by four.
    """
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("sequence",))
    rows: list[Row] = []
    steps = {2: (2, 2, 4, 4), 3: (2, 4, 12, 12), 4: (8, 8, 12, 24)}[size]  # one way of so many
    for way, (balance, method) in enumerate(product((False, True), METHODS)):
        where = f"{method}, {'balanced' if balance else 'contiguous'}"
        for cases, step in zip((LAYERS, MASKS, BENEATH, RANDOM), steps, strict=True):
            for number, (name, case) in enumerate(cases.items()):
                if (number + way + size) % step == 0:
                    rows.append((f"{name}, {where}", partial(compared, case, mesh, method, balance)))
        rows += _others(mesh, method, balance, where)
        if method == "ring" and size < 4:
            for name, case in list({**LAYERS, **MASKS}.items())[size + balance :: 8]:
                rows.append((f"{name}, in rounds, {where}", partial(in_rounds, case, mesh, balance)))
        if not balance:
            rows += _uneven(mesh, method)
    return table(rows)


def compared(case: Case, mesh: DeviceMesh, method: str, balance: bool, **options: Any) -> dict[str, float]:
    """Errors over what is allowed."""
    right = dict(alone(case))
    if "weights" in right:  # a rank has those of its own queries
        tokens = Tokens.of(case.tokens, mesh.size(), balance)
        right["weights"] = tokens.part(right["weights"], mesh.get_local_rank(), right["weights"].dim() - 2)
    return within(LIMITS[case.dtype], apart(in_parts(case, mesh, method, balance=balance, **options), right))


def in_rounds(case: Case, mesh: DeviceMesh, balance: bool) -> dict[str, float]:
    """The same, where a block of two kv heads, or of one, is large."""
    large, ring.LARGE = ring.LARGE, 4000
    try:
        return compared(case, mesh, "ring", balance)
    finally:
        ring.LARGE = large


def _others(mesh: DeviceMesh, method: str, balance: bool, where: str) -> Iterator[Row]:
    own = Case(lambda: shaken(Own()), {"mask": Causal()})
    yield f"somebody's own module, {where}", partial(compared, own, mesh, method, balance)
    for name, shape in {"positions in parts": (TOKENS,), "positions of each in parts": (2, TOKENS)}.items():
        case = made(Causal(), position_encoding=Rotary(6), case={"options": {"positions": positions(*shape)}})
        told = partial(_positions_in_parts, mesh, balance)
        yield f"{name}, {where}", partial(compared, case, mesh, method, balance, change=told)
    half = {"dtype": torch.bfloat16, "numbers": torch.bfloat16}
    for name, case in {
        "bfloat16": made(Causal(), num_kv_heads=4, position_encoding=Rotary(6), case=half),
        "autocast": made(Causal(), num_kv_heads=4, case={**half, "dtype": torch.float32, "autocast": True}),
    }.items():
        yield f"{name}, {where}", partial(rounded, case, mesh, method, balance)
    yield f"a loss of the weights, {where}", partial(of_weights, mesh, method, balance)
    if method == "ring":
        for heads, groups in ((5, 5), (7, 1), (10, 2)):
            case = made(Causal(), num_heads=heads, num_kv_heads=groups)
            yield f"{heads} heads, {groups} kv heads, {where}", partial(compared, case, mesh, method, balance)


def _positions_in_parts(mesh: DeviceMesh, balance: bool, options: dict[str, Any]) -> dict[str, Any]:
    where = options["positions"]
    return {**options, "positions": parallel.SequenceSharding(mesh, balance=balance).shard(where, dim=where.dim() - 1)}


def rounded(case: Case, mesh: DeviceMesh, method: str, balance: bool) -> dict[str, float]:
    """In bfloat16: the error, over twice that of one process."""
    exact = alone(replace(case, dtype=torch.float64, autocast=False))  # of the same numbers
    return no_worse(in_parts(case, mesh, method, balance=balance), alone(case), exact)


def of_weights(mesh: DeviceMesh, method: str, balance: bool) -> dict[str, float]:
    """The gradients of something made of the weights alone, each rank of its own queries'."""
    case = made(Causal(), num_kv_heads=4, case={"options": {"need_weights": True}})
    tokens, rank = Tokens.of(TOKENS, mesh.size(), balance), mesh.get_local_rank()
    direction = normal(2, 12, TOKENS, TOKENS, seed=4)

    def run(spread: bool) -> Found:
        module, x, towards = case.new(), case.inputs()["x"], direction
        part = x
        if spread:
            parallel.shard_sequence(module, mesh, method, balance=balance)  # type: ignore[arg-type]
            part, towards = parallel.SequenceSharding(mesh, balance=balance).shard(x), tokens.part(direction, rank, 2)
        _, weights = module(part, **case.options)
        (weights * towards).sum().backward()
        return found(weights, None, module, {"x": x})

    ours, right = run(True), run(False)
    right["output"] = tokens.part(right["output"], rank, 2)
    return within(1e-12, apart(ours, right))


def _uneven(mesh: DeviceMesh, method: str) -> Iterator[Row]:
    cases = {
        "plain": made(num_kv_heads=4),
        "causal": made(Causal(), position_encoding=Rotary(6)),
        "documents": MASKS["mask: causal documents with padding"],
        "dropout": LAYERS["dropout"],
        "weights": LAYERS["weights"],
        "cross": LAYERS["cross, more keys, causal"],
        "dense bias": LAYERS["dense bias of each head"],
        "kernel": made(Causal(), kernel="reference"),
    }
    for number, (name, case) in enumerate(cases.items()):
        for lengths in UNEVEN[mesh.size()][number % 2 :: 2]:
            yield f"{name}, {method}, parts of {lengths}", partial(by_hand, case, mesh, method, lengths)


def by_hand(case: Case, mesh: DeviceMesh, method: str, lengths: tuple[int, ...]) -> dict[str, float]:
    """Parts of any lengths, cut by whoever wishes; each rank's loss is that of its tokens alone."""
    rank = mesh.get_local_rank()
    module, right = case.new(), alone(case)
    parallel.shard_sequence(module, mesh, method)  # type: ignore[arg-type]

    def part(x: torch.Tensor, dim: int) -> torch.Tensor:
        many = lengths if x.shape[dim] == TOKENS else (*[0] * (mesh.size() - 2), 3, x.shape[dim] - 3)
        return x.split(many, dim)[rank]

    parts = {name: leaf(part(x, 1)) for name, x in case.inputs().items()}
    torch.manual_seed(SEED + rank)
    out = module(*parts.values(), **case.options)
    out, weights = out if isinstance(out, tuple) else (out, None)
    (out * part(case.direction(), 1)).sum().backward()
    ours = found(out, weights, module, parts)
    ours["whole"] = parallel.gather(out, mesh).detach()
    expected = {
        name: part(x, 1) if name in ("output", "gradient of x", "gradient of key") else x for name, x in right.items()
    }
    if weights is not None:
        expected["weights"] = part(right["weights"], 2)
    return within(LIMITS[case.dtype], apart(ours, {**expected, "whole": right["output"]}))


@pytest.mark.parametrize(
    "size, cases", [(2, 265), pytest.param(3, 205, marks=pytest.mark.slow), pytest.param(4, 95, marks=pytest.mark.slow)]
)
def test_parts_of_a_sequence_give_what_the_whole_gives(size: int, cases: int) -> None:
    report(together.run(each, size, size), least=cases)
