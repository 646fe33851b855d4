"""Watch heads form: a small model learns to repeat random tokens, and two kinds of heads appear at the same time.

    python examples/training.py
    python examples/training.py --steps 2000 --seed 3 --figure heads.png

Two layers of four heads read repeated random tokens, each batch with another period, so that no fixed distance helps.
The next token can be predicted in two steps only: a head of the first layer copies to each token the one before it (the
previous-token score), and a head of the second layer finds the position whose previous token is the current one, and
attends to it (the induction score: Olsson et al. 2022). Neither is useful without the other, so at first nothing seems
to happen; then both form, and the loss falls. `regard.watch` measures the heads every 20 steps.

    step   loss  previous-token, layer 0   induction, layer 1
       0   4.30  0.07  0.07  0.08  0.06    0.03  0.03  0.03  0.03
     200   4.00  0.08  0.07  0.08  0.07    0.05  0.05  0.04  0.04
     400   0.03  0.65  0.31  0.65  0.31    0.75  0.89  0.82  0.75
     ...
    1000   0.00  0.86  0.48  0.86  0.29    0.86  0.94  0.91  0.87

    best induction head: layer 1 head 1, score 0.94, over 0.5 from step 320 on
    best previous-token head: layer 0 head 0, score 0.86, over 0.5 from step 340 on
    figure: training.png
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import regard

VOCABULARY, WIDTH, HEADS, LAYERS = 64, 64, 4, 2
TOKENS, BATCH, PERIODS = 48, 32, (8, 24)  # tokens per text, texts per batch, shortest and longest period


class Decoder(nn.Module):
    """An attention-only model: token ids (B, N) to logits (B, N, V)."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(self.block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def block(self) -> nn.Module:
        rotary = regard.positions.Rotary(WIDTH // HEADS)
        return regard.AttentionBlock(
            regard.MultiHeadAttention(WIDTH, HEADS, position_encoding=rotary, bias=False), norm="pre"
        )

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x, mask=regard.masks.Causal())
        return self.head(self.norm(x))


def loss_of(model: Decoder, ids: Tensor, period: int) -> Tensor:
    """The loss of the next token in nats, where the text repeats itself."""
    logits = model(ids)[:, period:-1]
    return F.cross_entropy(logits.flatten(0, 1), ids[:, period + 1 :].flatten())


def train(steps: int, every: int, seed: int) -> Iterator[tuple[int, float, Tensor, Tensor]]:
    """Train; yield step, loss, previous-token and induction scores (layers, heads) every `every` steps."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    model = Decoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.98))
    probe = regard.heads.probes.repeated(VOCABULARY, length=TOKENS // 2, batch=16, seed=seed)
    for step in range(steps + 1):
        if step % every == 0 or step == steps:
            with regard.watch(model, measures=["previous", "induction"]) as seen, torch.no_grad():
                loss = loss_of(model, probe, TOKENS // 2).item()
            previous, induction = (torch.stack([x.per_head(n) for x in seen]) for n in ("previous", "induction"))
            yield step, loss, previous, induction
        period = rng.randint(*PERIODS)
        times = -(-TOKENS // period)
        ids = regard.heads.probes.repeated(
            VOCABULARY, length=period, times=times, batch=BATCH, seed=rng.randrange(2**32)
        )
        optimizer.zero_grad()
        loss_of(model, ids[:, :TOKENS], period).backward()
        optimizer.step()


def draw(path: str, steps: list[int], losses: list[float], previous: Tensor, induction: Tensor) -> None:
    """Loss, previous-token scores and induction scores against steps; scores are (steps, layers, heads)."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        print("no figure: matplotlib is not installed")
        return
    matplotlib.use("Agg")
    colours = matplotlib.colormaps["viridis"]([0.08, 0.6])  # one per layer
    with matplotlib.rc_context(
        {"font.size": 12, "axes.spines.top": False, "axes.spines.right": False, "axes.titlesize": 12}
    ):
        figure = Figure(figsize=(11.5, 3.6), layout="constrained")
        panels = figure.subplots(1, 3, sharex=True)
        formed = int((induction[:, 1] > 0.5).any(1).int().argmax())  # the first measurement with an induction head
        for axes in panels:
            axes.set(xlabel="training step", xlim=(0, steps[-1]))
            if formed:
                axes.axvline(steps[formed], color="lightgrey", linewidth=1, zorder=0)
        panels[0].plot(steps, losses, color="black", linewidth=2)
        panels[0].set(title="loss where the text repeats", ylim=(0, None))
        for axes, values, title in (
            (panels[1], previous, "weight on the previous token"),
            (panels[2], induction, "weight on the induction target"),
        ):
            for layer, colour in enumerate(colours):
                axes.plot(steps, values[:, layer], color=colour, linewidth=1.8)
                top = values[-1, layer].max().item()
                axes.annotate(
                    f"layer {layer}, each head",
                    (steps[-1], top),
                    (-4, 6),
                    textcoords="offset points",
                    ha="right",
                    color=colour,
                )
            axes.set(title=title, ylim=(0, 1.05))
        panels[0].set_ylabel("nats")
        figure.get_layout_engine().set(wspace=0.05)
        figure.savefig(path, dpi=150)
    print(f"figure: {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Watch induction heads form in training.")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--every", type=int, default=20, help="steps between measurements")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--figure", default="training.png", help="file of the figure")
    options = parser.parse_args()
    torch.set_num_threads(1)  # the model is too small for several threads

    print("step   loss  previous-token, layer 0   induction, layer 1")
    measurements = []
    for step, loss, previous, induction in train(options.steps, options.every, options.seed):
        measurements.append((step, loss, previous, induction))
        if len(measurements) % 10 == 1 or step == options.steps:
            rows = ("  ".join(f"{x:.2f}" for x in s.tolist()) for s in (previous[0], induction[1]))
            print(f"{step:4}  {loss:5.2f}  " + "    ".join(rows), flush=True)
    steps, losses, *scores = map(list, zip(*measurements, strict=True))
    previous, induction = map(torch.stack, scores)  # (measurements, layers, heads)
    print()
    for layer, name, values in ((1, "induction", induction), (0, "previous-token", previous)):
        best = int(values[-1, layer].argmax())
        over = (values[:, layer, best] > 0.5).int()
        since = f"over 0.5 from step {steps[int(over.argmax())]} on" if over[-1] else "never over 0.5"
        print(f"best {name} head: layer {layer} head {best}, score {values[-1, layer, best]:.2f}, {since}")
    draw(options.figure, steps, losses, previous, induction)


if __name__ == "__main__":
    main()
