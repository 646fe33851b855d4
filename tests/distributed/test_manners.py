"""What users do with modules that are spread besides calling them: loading, copying, counting, writing text."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from distributed import together
from distributed.compare import WIDTH, layer, normal, shaken
from regard import AttentionBlock, MultiHeadAttention, parallel
from regard.models.config import ModelConfig
from regard.models.decoder import Decoder
from regard.models.generation import Rules, tokens

CONFIG = ModelConfig(layers=2, embed_dim=24, num_heads=12, vocabulary=31, inner=24, context=29, causal=True)
DTYPES = (torch.int16, torch.bool, torch.float8_e5m2, torch.complex64)
EXACT, CLOSE, SUMMED = 0.0, 1e-12, 1e-11  # how far apart two results may be

Pairs = dict[str, tuple[Any, Any]]  # of each manner what was got and what was wanted


def manners(rank: int) -> Pairs:
    """All of them, on this rank."""
    plane = init_device_mesh("cpu", (2, 1), mesh_dim_names=("heads", "sequence"))
    mesh, x = plane["heads"], normal(2, 7, WIDTH)
    return {**_states(plane, mesh, x), **_shared(mesh, x), **_dtypes(rank, mesh), **_random(rank, mesh, x)}


def _states(plane: DeviceMesh, mesh: DeviceMesh, x: Tensor) -> Pairs:
    """State dicts, copies, and what is counted."""
    plain = shaken(layer())
    right = plain(x).detach()
    loaded = parallel.shard_heads(layer(), mesh)
    loaded.load_state_dict(plain.state_dict())  # of one process
    again = parallel.shard_heads(shaken(layer()), mesh)
    again.load_state_dict(loaded.state_dict())
    found: Pairs = {
        "a plain state dict": (loaded(x).detach(), right),
        "weights after a plain state dict": (type(loaded.q_proj.weight), DTensor),  # type: ignore[union-attr]
        "its own state dict": (again(x).detach(), right),
    }
    both = parallel.shard_sequence(parallel.shard_heads(copy.deepcopy(plain), mesh), plane["sequence"])
    twin = copy.deepcopy(both)
    found["a copy"] = twin(x).detach(), right
    found["a copy's class"] = (
        [type(twin).__name__, type(twin).__bases__[-1]],
        ["ShardedMultiHeadAttention", MultiHeadAttention],
    )
    found["the plain layer's class"] = type(plain), MultiHeadAttention
    for module in (both, twin):
        module(x).square().sum().backward()
    twins, ours = ([p.grad.to_local() for p in module.parameters()] for module in (twin, both))  # type: ignore[union-attr]
    found["gradients of a copy"] = twins, ours
    with parallel.counting() as outer:
        with parallel.counting() as inner:
            pass
        loaded(x)
    found["counting within counting"] = (outer.total > 0, inner.total), (True, 0)
    return found


def _shared(mesh: DeviceMesh, x: Tensor) -> Pairs:
    """A weight that two modules have."""
    pair, right_pair = ([shaken(layer()), shaken(layer())] for _ in range(2))
    for one in (pair, right_pair):
        one[1].q_proj.weight = one[0].q_proj.weight  # type: ignore[union-attr]
    for one in pair:
        parallel.shard_sequence(one, mesh)
    part = parallel.shard(x, mesh)
    sum(one(part).square().sum() for one in pair).backward()
    sum(one(x).square().sum() for one in right_pair).backward()
    ours, theirs = (one[0].q_proj.weight.grad for one in (pair, right_pair))  # type: ignore[union-attr]
    return {"a weight of two modules": (ours, theirs)}


def _dtypes(rank: int, mesh: DeviceMesh) -> Pairs:
    found: Pairs = {}
    for dtype in DTYPES:
        y = torch.arange(14).view(2, 7).to(torch.float32).to(dtype)
        back = parallel.gather(parallel.shard(y, mesh), mesh)
        found[f"gather of {dtype}"] = back.to(torch.complex64), y.to(torch.complex64)
        found[f"dtype after gather of {dtype}"] = back.dtype, dtype
    odd = nn.Sequential(layer())
    odd.register_buffer("table", torch.full((3,), rank, dtype=torch.int16))
    parallel.shard_sequence(odd, mesh)
    found["buffers of any dtype"] = odd.table.tolist(), [0, 0, 0]  # type: ignore[union-attr, operator]
    return found


def _random(rank: int, mesh: DeviceMesh, x: Tensor) -> Pairs:
    """What is drawn at random is the same on both, though each has its own random numbers."""
    torch.manual_seed(rank)
    block = parallel.shard_heads(AttentionBlock(layer(), "pre"), mesh).train()
    block.dropout.p = 0.5  # type: ignore[union-attr]
    out = block(x).detach()
    torch.manual_seed(rank)
    model = parallel.shard_heads(Decoder(CONFIG).eval(), mesh)
    stream = tokens(model, [[1, 2, 3]], Rules(temperature=1.0), model.new_cache())  # type: ignore[arg-type, operator]
    written = torch.cat([next(stream) for _ in range(11)])
    return {
        "dropout that came later": (out, parallel.gather(out[None], mesh, False, dim=0)[1 - rank]),
        "sampling without a seed": (written, parallel.gather(written, mesh, False).view(2, -1)[1 - rank]),
    }


MANNERS = {
    "a plain state dict": CLOSE,
    "weights after a plain state dict": EXACT,
    "its own state dict": CLOSE,
    "a copy": CLOSE,
    "a copy's class": EXACT,
    "the plain layer's class": EXACT,
    "gradients of a copy": EXACT,
    "counting within counting": EXACT,
    "a weight of two modules": SUMMED,
    **{f"gather of {dtype}": EXACT for dtype in DTYPES},
    **{f"dtype after gather of {dtype}": EXACT for dtype in DTYPES},
    "buffers of any dtype": EXACT,
    "dropout that came later": EXACT,
    "sampling without a seed": EXACT,
}


@pytest.fixture(scope="module")
def found() -> list[Pairs]:
    """What was got and wanted on each rank: two processes, once for all tests."""
    return together.run(manners, 2)


@pytest.mark.parametrize("rank", [0, 1], ids="rank {}".format)
@pytest.mark.parametrize("manner", MANNERS)
def test_manners(found: list[Pairs], manner: str, rank: int) -> None:
    got, wanted = found[rank][manner]
    if isinstance(wanted, Tensor) or (isinstance(wanted, list) and isinstance(wanted[0], Tensor)):
        torch.testing.assert_close(got, wanted, atol=MANNERS[manner], rtol=0.0)
    else:
        assert got == wanted


def test_there_is_no_other_manner(found: list[Pairs]) -> None:
    assert [sorted(one) for one in found] == [sorted(MANNERS)] * 2
