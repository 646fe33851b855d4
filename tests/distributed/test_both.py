"""Models by heads, by sequence and by both: logits, gradients, training; with torch's DDP, FSDP and checkpoints."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from distributed import together
from distributed.compare import Found, alone, apart, found, normal, report, shaken, table, within
from distributed.variants import integers, made
from regard import parallel
from regard.masks import Causal
from regard.models.config import ModelConfig
from regard.models.decoder import Decoder
from regard.models.encoder import Encoder
from regard.positions import Rotary

SIZES: dict[str, Any] = {"layers": 2, "embed_dim": 24, "num_heads": 12, "vocabulary": 31, "inner": 36, "context": 41}
TEXTS, LONG = 2, 23
KEEP = torch.arange(LONG)[None] < torch.tensor([[LONG], [13]])
MODELS: dict[str, Callable[[], nn.Module]] = {
    "decoder": lambda: Decoder(ModelConfig(**SIZES, causal=True)),
    "decoder, rotary, gated": lambda: Decoder(
        ModelConfig(
            **SIZES,
            causal=True,
            positions="rotary",
            num_kv_heads=4,
            gated=True,
            norm="rms",
            qk_norm="rms",
            activation="silu",
            mlp_bias=False,
            bias=False,
        )
    ),
    "decoder, tied, parallel, windows": lambda: Decoder(
        ModelConfig(
            **SIZES, causal=True, positions="rotary", num_kv_heads=1, order="parallel", tied=True, windows=(5, None)
        )
    ),
    "encoder": lambda: Encoder(ModelConfig(**SIZES, order="post", token_types=2)),
    "encoder, rotary, gated": lambda: Encoder(
        ModelConfig(**SIZES, positions="rotary", gated=True, num_kv_heads=2, windows=(7, None))
    ),
}


def ids(seed: int = 1, texts: int = TEXTS) -> Tensor:
    """Texts of random tokens, (B, N)."""
    return integers(SIZES["vocabulary"], texts, LONG, seed=seed)


def new(name: str) -> nn.Module:
    """A model, the same each time."""
    return shaken(MODELS[name]())


def logits(
    model: nn.Module, keep: Tensor | None, mesh: DeviceMesh | None = None, balance: bool = False, parts: bool = False
) -> Found:
    """Outputs and all gradients; where the sequence is over a mesh, of its parts."""
    text = ids()
    if mesh is not None:
        text = parallel.SequenceSharding(mesh, balance=balance).shard(text)
        keep = parallel.SequenceSharding(mesh, balance=balance).shard(keep) if parts and keep is not None else keep
    out = model(text, keep=keep)
    out = out if mesh is None else parallel.SequenceSharding(mesh, balance=balance).gather(out)
    weight = normal(*out.shape, seed=3) * (1.0 if keep is None else KEEP[..., None])
    (out * weight).sum().backward()
    return found(out * (weight != 0), None, model, {})


def models(rank: int, size: int) -> dict[str, Any]:
    """Every model, by heads and by sequence; on four processes by both. (On three, every other case.)"""
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("ranks",))
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("heads", "sequence")) if size == 4 else None

    def compared(name: str, keep: Tensor | None, way: str, method: str, balance: bool, parts: bool) -> dict[str, float]:
        right, model, over = logits(new(name), keep), new(name), None
        if way in ("heads", "both"):
            parallel.shard_heads(model, mesh if both is None else both["heads"])
        if way in ("sequence", "both"):
            over = mesh if both is None else both["sequence"]
            parallel.shard_sequence(model, over, method, balance=balance)  # type: ignore[arg-type]
        return within(1e-12, apart(logits(model, keep, over, balance, parts), right))

    ways = ("heads", "sequence") if both is None else ("both",)
    rows = []
    for way in ways:
        for number, name in enumerate(MODELS):
            for padded in (False, True):
                for method in ("ring", "alltoall") if way != "heads" else ("",):
                    balance = way != "heads" and (number + padded + len(method)) % 2 == 1
                    where = f"{name}, {way}, {method}, {'balanced, ' * balance}{'padded' * padded}"
                    keep = KEEP if padded else None
                    rows.append((where, partial(compared, name, keep, way, method, balance, number % 2 == 0)))
    if both is None:
        rows += [(f"one text alone, {balance}", partial(of_one, mesh, balance)) for balance in (False, True)]
    if both is not None:
        rows += [(f"layer, {method}", partial(of_layer, both, method)) for method in ("ring", "alltoall")]
    return table(rows[::2] if size == 3 else rows)


def of_one(mesh: DeviceMesh, balance: bool) -> dict[str, float]:
    """Ids (N,): a text that is in no batch."""
    sequence = parallel.SequenceSharding(mesh, balance=balance)
    right, model = new("decoder"), parallel.shard_sequence(new("decoder"), sequence)
    out = sequence.gather(model(sequence.shard(ids()[0])), dim=0)
    return within(1e-12, apart({"output": out.detach()}, {"output": right(ids()[0]).detach()}))


def of_layer(both: DeviceMesh, method: str) -> dict[str, float]:
    """One layer, its heads over one dimension of a mesh and its tokens over the other."""
    case = made(Causal(), num_kv_heads=2, position_encoding=Rotary(6), sinks=True, dropout=0.2, case={"train": True})
    module, inputs = case.new(), case.inputs()
    sequence = parallel.SequenceSharding(both["sequence"], method, balance=True)  # type: ignore[arg-type]
    parallel.shard_sequence(parallel.shard_heads(module, both["heads"]), sequence)
    torch.manual_seed(97 + torch.distributed.get_rank())
    out = module(sequence.shard(inputs["x"]), **case.options)
    whole = sequence.gather(out)
    (whole * case.direction()).sum().backward()
    return within(1e-12, apart(found(whole, None, module, inputs), alone(case)))


@pytest.mark.parametrize("size, cases", [(2, 30), (3, 15), (4, 20)])
@pytest.mark.slow
def test_models_over_processes_give_what_one_process_gives(size: int, cases: int) -> None:
    report(together.run(models, size, size), least=cases)


# Training


def loss_of(out: Tensor, text: Tensor) -> Tensor:
    """The sum over some tokens, (B, n, V) and (B, n), of how unlikely each was, per token of all texts."""
    return F.cross_entropy(out.flatten(0, 1), text.flatten(), reduction="sum") / (TEXTS * LONG)


def trained(
    model: nn.Module,
    steps: int,
    mesh: DeviceMesh | None = None,
    *,
    rows: slice = slice(None),
    times: float = 1.0,
    summed: Callable[[Tensor], Tensor] = lambda x: x,
) -> list[float]:
    """Losses of the whole, step by step. `rows`: which texts are here; `times`: what the loss is multiplied by."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(steps):
        text, targets = ids(seed=step)[rows], ids(seed=step).roll(-1, 1)[rows]
        if mesh is not None:
            text, targets = (parallel.SequenceSharding(mesh, balance=True).shard(x) for x in (text, targets))
        loss = loss_of(model(text), targets)
        (loss * times).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(summed(loss.detach().clone()).item())
    return losses


def over(*groups: Any) -> Callable[[Tensor], Tensor]:
    """The sum over some groups of processes."""

    def summed(x: Tensor) -> Tensor:
        for group in groups:
            torch.distributed.all_reduce(x, group=group)
        return x

    return summed


def differences(ours: list[float], right: list[float]) -> dict[str, float]:
    """By step, over what is allowed. The losses must fall."""
    assert right[-1] < right[0] - 0.1 or len(right) < 20
    return {f"step {i}": abs(a - b) / 1e-10 for i, (a, b) in enumerate(zip(ours, right, strict=True))}


def training(rank: int, size: int) -> dict[str, Any]:
    """Twenty steps of a small decoder, by all ways that this many processes allow."""
    name = "decoder, rotary, gated"
    right = trained(new(name), 20)

    def heads() -> dict[str, float]:
        return differences(trained(parallel.shard_heads(new(name), init_device_mesh("cpu", (size,))), 20), right)

    def sequence(method: str) -> dict[str, float]:
        mesh = init_device_mesh("cpu", (size,))
        model = parallel.shard_sequence(new(name), mesh, method, balance=True)  # type: ignore[arg-type]
        return differences(trained(model, 20, mesh, summed=over(None)), right)

    def both(method: str) -> dict[str, float]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("heads", "sequence"))
        model = parallel.shard_heads(new(name), mesh["heads"])
        parallel.shard_sequence(model, mesh["sequence"], method, balance=True)  # type: ignore[arg-type]
        return differences(trained(model, 20, mesh["sequence"], summed=over(mesh.get_group("sequence"))), right)

    ways = {
        2: {"heads": heads, "ring": partial(sequence, "ring"), "alltoall": partial(sequence, "alltoall")},
        3: {"ring": partial(sequence, "ring")},
        4: {
            "both, ring": partial(both, "ring"),
            "both, alltoall": partial(both, "alltoall"),
            "data and sequence by DDP": partial(ddp, name, right),
            "heads, and data by FSDP": partial(fsdp_heads, name, right),
            "data and sequence by FSDP": partial(fsdp_sequence, name, right),
        },
    }
    return table(ways[size].items())


def ddp(name: str, right: list[float]) -> dict[str, float]:
    """Texts over one dimension of a mesh, tokens over the other: DDP, which averages over the first."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "sequence"))
    model = parallel.shard_sequence(new(name), mesh["sequence"], balance=True)
    model = DistributedDataParallel(model, process_group=mesh.get_group("data"))
    here = mesh.get_local_rank("data")
    summed = over(mesh.get_group("data"), mesh.get_group("sequence"))
    ours = trained(model, 5, mesh["sequence"], rows=slice(here, here + 1), times=2.0, summed=summed)
    return differences(ours, right[:5])


def fsdp_heads(name: str, right: list[float]) -> dict[str, float]:
    """Heads over one dimension, and over the other texts and, by FSDP, what is left of the weights."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "heads"))
    model = parallel.shard_heads(new(name), mesh["heads"])
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    here = mesh.get_local_rank("data")
    ours = trained(model, 5, rows=slice(here, here + 1), times=2.0, summed=over(mesh.get_group("data")))
    return differences(ours, right[:5])


def fsdp_sequence(name: str, right: list[float]) -> dict[str, float]:
    """Texts and tokens over the two dimensions; FSDP over both spreads the weights and averages the gradients."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "sequence"))
    model = parallel.shard_sequence(new(name), mesh["sequence"], balance=True, sum_gradients=False)
    everybody = mesh["data", "sequence"]._flatten("everybody")
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=everybody)
    fully_shard(model, mesh=everybody)
    here = mesh.get_local_rank("data")
    ours = trained(model, 5, mesh["sequence"], rows=slice(here, here + 1), times=4.0, summed=over(None))
    return differences(ours, right[:5])


@pytest.mark.parametrize("size, cases", [(2, 3), (3, 1), (4, 5)])
@pytest.mark.slow
def test_training_goes_as_on_one_process(size: int, cases: int) -> None:
    report(together.run(training, size, size), least=cases)


# Checkpoints


def saved(rank: int, folder: str) -> None:
    """A model whose heads are over four processes, saved by all of them."""
    model = parallel.shard_heads(new("decoder, rotary, gated"), init_device_mesh("cpu", (4,)))
    dcp.save(get_model_state_dict(model), checkpoint_id=folder)


def loaded(rank: int, folder: str) -> dict[str, Any]:
    """The same on two, and the step of an optimizer after it; on other weights before."""
    name = "decoder, rotary, gated"
    right, model = new(name), new(name)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    parallel.shard_heads(model, init_device_mesh("cpu", (2,)))
    state = get_model_state_dict(model)
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(model, state)

    def values() -> dict[str, float]:
        ours = {name: x.full_tensor() for name, x in _spread(model).items()}
        return within(1e-15, apart(ours, {name: x for name, x in right.state_dict().items() if name in ours}))

    def training() -> dict[str, float]:
        return differences(trained(model, 3), trained(copy.deepcopy(right), 3))

    return table([("values", values), ("training", training)])


def _spread(model: nn.Module) -> dict[str, Any]:
    found = {name: x for name, x in model.state_dict().items() if hasattr(x, "full_tensor")}
    assert len(found) >= 2 * 9  # of each block q, k, v, out, the norms of heads, gate, up, down
    return found


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # (on one process, which is what is meant)
@pytest.mark.slow
def test_a_checkpoint_of_four_processes_loads_on_two_and_on_one(tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoint")
    together.run(saved, 4, folder)
    report(together.run(loaded, 2, folder), least=2)
    right, plain = new("decoder, rotary, gated"), new("decoder, rotary, gated")
    state = {name: torch.zeros_like(x) for name, x in plain.state_dict().items()}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    set_model_state_dict(plain, state)
    for name, x in right.state_dict().items():
        assert torch.equal(plain.state_dict()[name], x), name
