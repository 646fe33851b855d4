"""Heads over 2, 3 and 4 processes: outputs, gradients, caches and state dicts are those of one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from distributed import together
from distributed.compare import (
    BATCH,
    HEAD,
    HEADS,
    LIMITS,
    TOKENS,
    WIDTH,
    Case,
    alone,
    apart,
    by_heads,
    found,
    layer,
    leaf,
    no_worse,
    normal,
    report,
    shaken,
    table,
    within,
)
from distributed.variants import BENEATH, LAYERS, MASKS, RANDOM, made
from regard import AttentionBlock, KVCache, RollingCache, parallel
from regard.masks import Causal
from regard.positions import RelativeBias, Rotary

Row = tuple[str, Callable[[], dict[str, float]]]


def each(rank: int, size: int) -> dict[str, Any]:
    """The cases, one after the other: on two processes all layers; on more, where each takes longer, some."""
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("heads",))
    rows: list[Row] = []
    for cases, step in (
        (LAYERS, {2: 1, 3: 2, 4: 4}),
        (MASKS, {2: 2, 3: 3, 4: 8}),
        (BENEATH | RANDOM, {2: 4, 3: 7, 4: 12}),
    ):
        for number, (name, case) in enumerate(cases.items()):
            if (number + size) % step[size] == 0 and case.batch != 0:  # (DTensor refuses an empty batch)
                rows.append((name, partial(compared, case, mesh)))
    rows += _others(mesh)
    return table(rows)


def compared(case: Case, mesh: DeviceMesh) -> dict[str, float]:
    """Errors over what is allowed."""
    right = dict(alone(case))
    if "weights" in right:  # a rank has those of its own heads
        right["weights"] = right["weights"].chunk(mesh.size(), -3)[mesh.get_local_rank()]
    return within(LIMITS[case.dtype], apart(by_heads(case, mesh), right))


def _others(mesh: DeviceMesh) -> Iterator[Row]:
    block = Case(lambda: shaken(AttentionBlock(layer(dropout=0.2, num_kv_heads=4), "pre", dropout=0.3)), train=True)
    yield "dropout of a block", partial(compared, block, mesh)
    yield (
        "dropout of a block, post",
        partial(
            compared,
            replace(block, module=lambda: shaken(AttentionBlock(layer(num_kv_heads=2), "post", dropout=0.3))),
            mesh,
        ),
    )
    half = {"dtype": torch.bfloat16, "numbers": torch.bfloat16}
    for name, case in {
        "bfloat16": made(Causal(), num_kv_heads=4, position_encoding=Rotary(HEAD), case=half),
        "autocast": made(Causal(), num_kv_heads=4, case={**half, "dtype": torch.float32, "autocast": True}),
    }.items():
        yield name, partial(rounded, case, mesh)
    for shape in ((TOKENS, TOKENS), (BATCH, HEADS, TOKENS, TOKENS), (1, HEADS, 1, TOKENS), (BATCH, 1, 1, TOKENS)):
        yield f"a bias {shape} of the caller's", partial(given_bias, mesh, shape)
    for groups in (12, 4, 3, 1):
        for kind in (KVCache, partial(RollingCache, 5, keep_first=2)):
            yield f"decoding, {groups} kv heads, {kind}", partial(decoding, mesh, groups, kind)
        yield f"state dict, {groups} kv heads", partial(state, mesh, groups)
    yield "without checks", partial(unchecked, mesh)


def rounded(case: Case, mesh: DeviceMesh) -> dict[str, float]:
    """In bfloat16: the error, over twice that of one process."""
    exact = alone(replace(case, dtype=torch.float64, autocast=False))  # of the same numbers
    return no_worse(by_heads(case, mesh), alone(case), exact)


def given_bias(mesh: DeviceMesh, shape: tuple[int, ...]) -> dict[str, float]:
    """A bias that is no parameter of the layer: its gradient is whole on every rank."""

    def run(spread: bool) -> dict[str, torch.Tensor]:
        module, bias, case = layer(num_kv_heads=4), leaf(normal(*shape, seed=8)), Case()
        x = case.inputs()["x"]
        out = (parallel.shard_heads(module, mesh) if spread else module)(x, mask=Causal(), bias=bias)
        (out * case.direction()).sum().backward()
        return found(out, None, module, {"x": x, "bias": bias})

    return within(1e-12, apart(run(True), run(False)))


def decoding(mesh: DeviceMesh, groups: int, cache: Callable[[], Any]) -> dict[str, float]:
    """Token by token, after a beginning. A rank's cache has its own heads alone."""

    def run(spread: bool) -> dict[str, torch.Tensor]:
        module = layer(num_kv_heads=groups, position_encoding=Rotary(HEAD)).eval()
        if spread:
            parallel.shard_heads(module, mesh)
        x, held = normal(BATCH, 11, WIDTH, seed=1), cache()
        mask = Causal() if isinstance(held, KVCache) else None
        with torch.inference_mode():
            parts = [module(x[:, :5], mask=mask, cache=held)]
            parts += [module(x[:, i : i + 1], mask=mask, cache=held) for i in range(5, 11)]
        if spread:
            assert held.keys.shape[1] <= max(1, HEADS // mesh.size())
            assert held.keys.shape[1] == groups // mesh.size() or groups % mesh.size()
        return {"output": torch.cat(parts, 1)}

    return within(1e-12, apart(run(True), run(False)))


def state(mesh: DeviceMesh, groups: int) -> dict[str, float]:
    """Names and values of the state dict stay; what is spread takes a part of the memory; it can be loaded."""

    def new() -> torch.nn.Module:
        encoding = RelativeBias(HEADS, num_buckets=8, max_distance=17)
        return layer(num_kv_heads=groups, sinks=True, qk_norm="rms", position_encoding=encoding)

    plain, spread = new(), parallel.shard_heads(new(), mesh)
    right, ours = plain.state_dict(), spread.state_dict()
    assert list(ours) == list(right)
    assert [name for name, _ in spread.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert all(isinstance(x, DTensor) for name, x in ours.items())
    for name in ("q_proj.weight", "q_proj.bias", "out_proj.weight", "sinks", "position_encoding.weight"):
        assert ours[name].to_local().numel() * mesh.size() == right[name].numel(), name
    if groups % mesh.size() == 0:
        assert ours["k_proj.weight"].to_local().numel() * mesh.size() == right["k_proj.weight"].numel()
    errors = apart({name: x.full_tensor() for name, x in ours.items()}, right)
    with torch.no_grad():
        for parameter in spread.parameters():
            parameter.mul_(2.0)
    spread.load_state_dict({name: x.clone() for name, x in ours.items()})  # (the same tensors: doubled)
    doubled = {name: x.full_tensor() for name, x in spread.state_dict().items()}
    twice = apart(doubled, {name: 2.0 * x for name, x in right.items()})
    return within(1e-15, {**errors, **{f"{name}, doubled": error for name, error in twice.items()}})


def unchecked(mesh: DeviceMesh) -> dict[str, float]:
    """`check=False`: the same without asking the others."""
    case = Case()
    module, inputs = parallel.shard_heads(case.new(), mesh, check=False), case.inputs()
    with parallel.counting() as sent:
        out = module(query=inputs["x"])
    assert set(sent.bytes) == {"sum"}, sent
    (out * case.direction()).sum().backward()
    return within(1e-12, apart(found(out, None, module, inputs), alone(case)))


@pytest.mark.parametrize(
    "size, cases", [(2, 85), pytest.param(3, 60, marks=pytest.mark.slow), pytest.param(4, 40, marks=pytest.mark.slow)]
)
def test_heads_over_processes_give_what_one_process_gives(size: int, cases: int) -> None:
    report(together.run(each, size, size), least=cases)
