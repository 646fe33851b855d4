"""Train a model sharded over several processes, watch it, save it, and load it into an unsharded model.

    torchrun --nproc-per-node 2 examples/distributed.py
    torchrun --nproc-per-node 4 examples/distributed.py --method heads
    torchrun --nproc-per-node 4 examples/distributed.py --method both

A small decoder learns to repeat random tokens. `heads`: each process computes some heads for all tokens. `ring` and
`alltoall`: each process has some tokens, which attend to all. `both`: heads over one dimension of a 2 x 2 mesh, the
sequence over the other. Process 0 then trains the same model alone, from the same seed: the losses agree to rounding
errors, which grow during training. `regard.watch` records all heads and tokens on every process.

    ring, 2 processes

     step   loss  alone
        0  4.300  4.300
       10  4.174  4.174
       20  4.063  4.063
       30  3.977  3.977
       40  2.733  2.733
       50  0.971  0.971
       59  0.813  0.813
    largest difference: 1e-05

    best induction head: layer 1 head 2, score 1.00
    saved, and loaded into an unsharded model: its logits differ by 2e-05 at most
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import regard
from regard import parallel
from regard.models import Decoder
from regard.models.config import ModelConfig

VOCABULARY, PERIOD, TOKENS, BATCH = 64, 16, 128, 32
CONFIG = ModelConfig(
    kind="decoder",
    layers=2,
    embed_dim=64,
    num_heads=4,
    num_kv_heads=2,
    vocabulary=VOCABULARY,
    inner=128,
    norm="rms",
    activation="silu",
    gated=True,
    bias=False,
    mlp_bias=False,
    positions="rotary",
    causal=True,
)


class Sharding:
    """How the model and its texts are sharded over the processes."""

    def __init__(self, method: str) -> None:
        size = dist.get_world_size()
        shape = (size // 2, 2) if method == "both" else (1, size) if method == "heads" else (size, 1)
        self.method: Any = "ring" if method == "both" else method
        self.mesh: DeviceMesh = init_device_mesh("cpu", shape, mesh_dim_names=("sequence", "heads"))
        self.heads = shape[1] > 1
        self.sequence: parallel.SequenceSharding | None = None
        if shape[0] > 1:  # under a causal mask balanced, so that all have the same to do in a ring
            self.sequence = parallel.SequenceSharding(self.mesh["sequence"], self.method, balance=self.method == "ring")

    def model(self, model: Decoder) -> Decoder:
        """Shard the model in place: first the heads, then the sequence."""
        if self.heads:
            parallel.shard_heads(model, self.mesh["heads"])
        if self.sequence is not None:
            parallel.shard_sequence(model, self.sequence)
        return model

    def text(self, ids: Tensor) -> Tensor:
        """This process's part of ids (B, N)."""
        return ids if self.sequence is None else self.sequence.shard(ids)

    def total(self, loss: Tensor) -> float:
        """The loss of all tokens, from that of this process's tokens."""
        loss = loss.detach().clone()
        if self.sequence is not None:
            dist.all_reduce(loss, group=self.mesh["sequence"].get_group())
        return loss.item()


def train(steps: int, seed: int, sharding: Sharding | None) -> tuple[Decoder, list[float]]:
    """The model, and its loss at every step; on one process if there is no sharding."""
    torch.manual_seed(seed)  # the same weights on every process
    model = Decoder(CONFIG)
    if sharding is not None:
        sharding.model(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.98))
    losses = []
    for step in range(steps):
        ids = texts(seed + step)
        inputs, targets = ids[:, :-1], ids[:, 1:]
        if sharding is not None:
            inputs, targets = sharding.text(inputs), sharding.text(targets)
        logits = model(inputs)  # (B, n, V)
        # the sum over this process's tokens by the number of all tokens: the processes add up to the mean
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / (BATCH * TOKENS)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item() if sharding is None else sharding.total(loss))
    return model, losses


def texts(seed: int) -> Tensor:
    """Repeated random tokens, (BATCH, TOKENS + 1)."""
    times = TOKENS // PERIOD + 1
    return regard.heads.probes.repeated(VOCABULARY, length=PERIOD, times=times, batch=BATCH, seed=seed)[:, : TOKENS + 1]


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small model over several processes.")
    parser.add_argument("--method", choices=["heads", "ring", "alltoall", "both"], default="ring")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    rank, size = dist.get_rank(), dist.get_world_size()
    if size not in ((4,) if options.method == "both" else (2, 4)):
        raise SystemExit("expected 4 processes for --method both, 2 or 4 for the others: torchrun --nproc-per-node 4")

    def log(text: str) -> None:
        if rank == 0:
            print(text, flush=True)

    sharding = Sharding(options.method)
    model, losses = train(options.steps, options.seed, sharding)
    _, alone = train(options.steps, options.seed, None) if rank == 0 else (None, losses)
    log(f"{options.method}, {size} processes\n\n step   loss  alone")
    for step in sorted({*range(0, options.steps, 10), options.steps - 1}):
        log(f"{step:5}  {losses[step]:5.3f}  {alone[step]:5.3f}")
    difference = max(abs(a - b) for a, b in zip(losses, alone, strict=True))
    log(f"largest difference: {difference:.0e}\n")

    probe = texts(options.seed + options.steps)[:, :-1]
    with regard.watch(model, measures=["induction"]) as seen, torch.no_grad():
        model(sharding.text(probe))
    scores = torch.stack([layer.per_head("induction") for layer in seen])  # (layers, heads), on every process
    layer, head = divmod(int(scores.argmax()), CONFIG.num_heads)
    log(f"best induction head: layer {layer} head {head}, score {scores.max():.2f}")

    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder)
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder[0])
    unsharded = Decoder(CONFIG)
    state = {"model": unsharded.state_dict()}
    dcp.load(state, checkpoint_id=folder[0])
    unsharded.load_state_dict(state["model"])
    with torch.no_grad():
        logits, expected = model(sharding.text(probe)), unsharded(probe)
        logits = logits if sharding.sequence is None else sharding.sequence.gather(logits)
    log(
        f"saved, and loaded into an unsharded model: its logits differ by {(logits - expected).abs().max():.0e} at most"
    )
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder[0])  # type: ignore[arg-type]
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
