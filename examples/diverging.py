"""See training diverge before the loss tells, and keep it from diverging.

    python examples/diverging.py

A small model has to name the one letter among the digits of a text. Muon moves its weights by steps of a fixed size,
which are too large here, so the scores of attention grow until each query sees one key at random. `regard.monitor`
warns while the loss still falls; `regard.heads.qk_clip` keeps the scores small, and the same training succeeds. Writes
diverging.png.

    without qk_clip: step 5: layers.0: scores grow: head 0 has 58, 2.9 at first (1 heads above 50); ...
    without qk_clip: loss 1.76 at step 16, lowest 0.49 at step 156, in the end 1.05; largest score 92,514
    with qk_clip:    loss 1.13 at step 16, lowest 0.01 at step 148, in the end 0.04; largest score 42
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import regard
from regard.heads import AttentionWarning, qk_clip

WIDTH, HEADS, TOKENS, BATCH, LETTERS = 32, 4, 24, 32, 16
STEPS, RATE, TAU = 200, 1.0, 20.0


class Model(nn.Module):
    """Two layers of attention, which see everything, and nothing between them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(2 * LETTERS, WIDTH)
        self.layers = nn.ModuleList(regard.MultiHeadAttention(WIDTH, HEADS, bias=False) for _ in range(2))
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.head = nn.Sequential(nn.RMSNorm(WIDTH), nn.Linear(WIDTH, LETTERS))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + layer(norm(x))
        return self.head(x)


def texts(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Digits with one letter among them, and the letter: ids (B, N) twice."""
    ids = torch.randint(LETTERS, (BATCH, TOKENS), generator=generator)
    place = torch.randint(TOKENS, (BATCH, 1), generator=generator)
    letter = torch.randint(LETTERS, (BATCH, 1), generator=generator)
    return ids.scatter(1, place, letter + LETTERS), letter.expand(-1, TOKENS)


def train(clip: bool) -> tuple[list[float], list[float], list[str]]:
    """The loss and the largest score of every step, and the warnings."""
    torch.manual_seed(0)
    generator, model = torch.Generator().manual_seed(0), Model()
    others = [p for name, p in model.named_parameters() if not name.startswith("layers")]
    muon = torch.optim.Muon(model.layers.parameters(), lr=RATE, weight_decay=0.0)
    adam = torch.optim.AdamW(others, lr=3e-3)
    losses: list[float] = []
    scores: list[float] = []

    def log(step: int, scalars: dict[str, float]) -> None:
        scores.append(max(x for name, x in scalars.items() if name.endswith("max_logit")))

    with (
        warnings.catch_warnings(record=True) as caught,
        regard.monitor(model, every=1, log=log, optimizer=muon, per="layer"),
    ):
        warnings.simplefilter("always", AttentionWarning)
        for _ in range(STEPS):
            ids, letters = texts(generator)
            loss = F.cross_entropy(model(ids).flatten(0, 1), letters.flatten())
            for optimizer in (muon, adam):
                optimizer.zero_grad()
            loss.backward()
            for optimizer in (muon, adam):
                optimizer.step()
            if clip:
                qk_clip(model, TAU)
            losses.append(loss.item())
    return losses, scores, [str(warning.message) for warning in caught]


def draw(runs: dict[str, tuple[list[float], list[float], list[str]]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), dpi=100, layout="constrained")
    left, right = figure.subplots(1, 2)
    for (name, (losses, scores, told)), colour in zip(runs.items(), ("tab:red", "tab:blue"), strict=True):
        left.plot(losses, color=colour, label=name, linewidth=1)
        right.plot(scores, color=colour, label=name, linewidth=1)
        if told and name.startswith("without"):
            step = int(told[0].split()[1].rstrip(":"))
            for axes in (left, right):
                axes.axvline(step, color="grey", linestyle=":", linewidth=1)
            right.annotate("first warning", (step, scores[step]), (step + 12, scores[step] / 3), fontsize=9)
    left.set(xlabel="step", ylabel="loss", title="What everybody sees")
    right.set(xlabel="step", ylabel="largest score", yscale="log", title="What regard.monitor sees")
    left.legend()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("diverging.png"))
    options = parser.parse_args()
    runs = {"without qk_clip": train(clip=False), "with qk_clip": train(clip=True)}
    print("without qk_clip:", runs["without qk_clip"][2][0])
    for name, (losses, scores, _) in runs.items():
        lowest = min(range(STEPS), key=losses.__getitem__)
        print(
            f"{name + ':':<16} loss {losses[16]:.2f} at step 16, lowest {losses[lowest]:.2f} at step {lowest}, "
            f"in the end {sum(losses[-10:]) / 10:.2f}; largest score {scores[-1]:,.0f}"
        )
    draw(runs, options.out)


if __name__ == "__main__":
    main()
