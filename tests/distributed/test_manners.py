"""What users do with modules that are spread besides calling them: loading, copying, counting, writing text."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from distributed import together
from distributed.compare import WIDTH, layer, normal, shaken
from regard import AttentionBlock, parallel
from regard.models.config import ModelConfig
from regard.models.decoder import Decoder
from regard.models.generation import Rules, tokens

CONFIG = ModelConfig(layers=2, embed_dim=24, num_heads=12, vocabulary=31, inner=24, context=29, causal=True)


def manners(rank: int) -> dict[str, bool]:
    """Whether each goes well on this rank."""
    plane = init_device_mesh("cpu", (2, 1), mesh_dim_names=("heads", "sequence"))
    mesh, x = plane["heads"], normal(2, 7, WIDTH)
    plain = shaken(layer())
    right = plain(x)

    def same(module: nn.Module, other: torch.Tensor = right) -> bool:
        return torch.allclose(module(x), other, atol=1e-12)

    told = {}

    loaded = parallel.shard_heads(layer(), mesh)
    loaded.load_state_dict(plain.state_dict())  # of one process
    told["a plain state dict"] = same(loaded) and isinstance(loaded.q_proj.weight, DTensor)  # type: ignore[union-attr]
    again = parallel.shard_heads(shaken(layer()), mesh)
    again.load_state_dict(loaded.state_dict())
    told["its own state dict"] = same(again)

    both = parallel.shard_sequence(parallel.shard_heads(copy.deepcopy(plain), mesh), plane["sequence"])
    twin = copy.deepcopy(both)
    told["a copy"] = same(twin)
    for module in (both, twin):
        module(x).square().sum().backward()
    pairs = zip(both.parameters(), twin.parameters(), strict=True)
    told["gradients of a copy"] = all(torch.equal(a.grad.to_local(), b.grad.to_local()) for a, b in pairs)  # type: ignore[union-attr]

    pair, right_pair = ([shaken(layer()), shaken(layer())] for _ in range(2))
    for one in (pair, right_pair):
        one[1].q_proj.weight = one[0].q_proj.weight  # type: ignore[union-attr]
    for one in pair:
        parallel.shard_sequence(one, mesh)
    part = parallel.shard(x, mesh)
    sum(one(part).square().sum() for one in pair).backward()
    sum(one(x).square().sum() for one in right_pair).backward()
    ours, theirs = (one[0].q_proj.weight.grad for one in (pair, right_pair))  # type: ignore[union-attr]
    told["a weight of two modules"] = torch.allclose(ours, theirs, atol=1e-11)  # type: ignore[arg-type]

    with parallel.counting() as outer:
        with parallel.counting() as inner:
            pass
        loaded(x)
    told["counting within counting"] = outer.total > 0 == inner.total

    for dtype in (torch.int16, torch.bool, torch.float8_e5m2, torch.complex64):
        y = torch.arange(14).view(2, 7).to(torch.float32).to(dtype)
        back = parallel.gather(parallel.shard(y, mesh), mesh)
        told[f"gather of {dtype}"] = torch.equal(back.to(torch.complex64), y.to(torch.complex64))
    odd = nn.Sequential(layer())
    odd.register_buffer("table", torch.full((3,), rank, dtype=torch.int16))
    parallel.shard_sequence(odd, mesh)
    told["buffers of any dtype"] = odd.table.tolist() == [0, 0, 0]  # type: ignore[union-attr, operator]

    torch.manual_seed(rank)  # each has its own random numbers
    block = parallel.shard_heads(AttentionBlock(layer(), "pre"), mesh).train()
    block.dropout.p = 0.5  # type: ignore[union-attr]
    out = block(x)
    told["dropout that came later"] = torch.equal(parallel.gather(out[None], mesh, False, dim=0)[1 - rank], out)

    torch.manual_seed(rank)
    model = parallel.shard_heads(Decoder(CONFIG).eval(), mesh)
    stream = tokens(model, [[1, 2, 3]], Rules(temperature=1.0), model.new_cache())  # type: ignore[arg-type, operator]
    written = torch.cat([next(stream) for _ in range(11)])
    told["sampling without a seed"] = torch.equal(parallel.gather(written, mesh, False).view(2, -1)[1 - rank], written)
    return told


def test_manners() -> None:
    for rank, told in enumerate(together.run(manners, 2)):
        assert len(told) == 13
        assert all(told.values()), (rank, [name for name, well in told.items() if not well])
