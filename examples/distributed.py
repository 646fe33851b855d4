"""One model over several processes, trained as one process would train it, looked into, saved, and loaded whole.

    torchrun --nproc-per-node 2 examples/distributed.py
    torchrun --nproc-per-node 4 examples/distributed.py --method heads
    torchrun --nproc-per-node 4 examples/distributed.py --method both

A small decoder learns to repeat random tokens. `heads`: each process computes some heads of the whole text. `ring` and
`alltoall`: each process has some tokens of the text, and attends to all. `both`: two by two, heads over one dimension
of the mesh and the sequence over the other. Process 0 then trains the same model alone, from the same seed: the losses
are the same to rounding, which training makes larger. `regard.watch` sees all heads and tokens, from every process.

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
    saved, and loaded into a plain model: its logits differ by 2e-05 at most
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from datetime import timedelta

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


class Spread:
    """How the model and its texts are spread over the processes."""

    def __init__(self, method: str) -> None:
        size = dist.get_world_size()
        shape = (size // 2, 2) if method == "both" else (1, size) if method == "heads" else (size, 1)
        self.method = "ring" if method == "both" else method
        self.mesh: DeviceMesh = init_device_mesh("cpu", shape, mesh_dim_names=("sequence", "heads"))
        self.sequence, self.heads = shape[0] > 1, shape[1] > 1

    def model(self, model: Decoder) -> Decoder:
        """In place: first the heads, then the sequence."""
        if self.heads:
            parallel.shard_heads(model, self.mesh["heads"])
        if self.sequence:
            parallel.shard_sequence(model, self.mesh["sequence"], self.method)  # type: ignore[arg-type]
        return model

    def text(self, ids: Tensor) -> Tensor:
        """This process's part of ids (B, N): under a causal mask balanced, so that all have the same to do."""
        return parallel.shard(ids, self.mesh["sequence"], balance=self.method == "ring") if self.sequence else ids

    def total(self, loss: Tensor) -> float:
        """The loss of all tokens, from that of this process's."""
        loss = loss.detach().clone()
        if self.sequence:
            dist.all_reduce(loss, group=self.mesh["sequence"].get_group())
        return loss.item()


def train(steps: int, seed: int, spread: Spread | None) -> tuple[Decoder, list[float]]:
    """The model, and its loss at every step; on one process where nothing is spread."""
    torch.manual_seed(seed)  # the same weights on every process
    model = Decoder(CONFIG)
    if spread is not None:
        spread.model(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.98))
    losses = []
    for step in range(steps):
        ids = texts(seed + step)
        inputs, targets = ids[:, :-1], ids[:, 1:]
        if spread is not None:
            inputs, targets = spread.text(inputs), spread.text(targets)
        logits = model(inputs)  # (B, n, V)
        # of this process's tokens, over how many there are in all: what the processes add up is the mean
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / (BATCH * TOKENS)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item() if spread is None else spread.total(loss))
    return model, losses


def texts(seed: int) -> Tensor:
    """Random tokens, repeated: (BATCH, TOKENS + 1)"""
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

    def tell(words: str) -> None:
        if rank == 0:
            print(words, flush=True)

    spread = Spread(options.method)
    model, losses = train(options.steps, options.seed, spread)
    _, alone = train(options.steps, options.seed, None) if rank == 0 else (None, losses)
    tell(f"{options.method}, {size} processes\n\n step   loss  alone")
    for step in sorted({*range(0, options.steps, 10), options.steps - 1}):
        tell(f"{step:5}  {losses[step]:5.3f}  {alone[step]:5.3f}")
    difference = max(abs(a - b) for a, b in zip(losses, alone, strict=True))
    tell(f"largest difference: {difference:.0e}\n")

    probe = texts(options.seed + options.steps)[:, :-1]
    with regard.watch(model, measures=["induction"]) as seen, torch.no_grad():
        model(spread.text(probe))
    scores = torch.stack([layer.per_head("induction") for layer in seen])  # (layers, heads), on every process
    layer, head = divmod(int(scores.argmax()), CONFIG.num_heads)
    tell(f"best induction head: layer {layer} head {head}, score {scores.max():.2f}")

    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder)
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder[0])
    plain = Decoder(CONFIG)
    state = {"model": plain.state_dict()}
    dcp.load(state, checkpoint_id=folder[0])
    plain.load_state_dict(state["model"])
    with torch.no_grad():
        logits, whole = model(spread.text(probe)), plain(probe)
        logits = parallel.gather(logits, spread.mesh["sequence"]) if spread.sequence else logits
    tell(f"saved, and loaded into a plain model: its logits differ by {(logits - whole).abs().max():.0e} at most")
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder[0])  # type: ignore[arg-type]
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
