"""If one head fails: how well a model still works as its heads are removed, one after another.

    python examples/if_one_head_fails.py
    python examples/if_one_head_fails.py --draws 10 --every 1 --figure heads.png

MiniLM (6 layers of 12 heads) finds the paraphrase of each of 80 sentences among all others. Every sentence has a
counterpart that uses one of its words in another sense (a bat in a cave, a bat in a game), so that the context matters.
Heads are removed in three orders: least important first, at random, and most important first. Importance is measured on
other sentences, by gradients (Michel et al. 2019).

    all 72 heads find 92.5% of the paraphrases, no head at all 48.8%.
      least important first:   first below 90% of that with 36 heads removed
      random (mean of 5):      first below 90% of that with 30 heads removed
      most important first:    first below 90% of that with 6 heads removed
    figure: if_one_head_fails.png
"""

from __future__ import annotations

import argparse
import random
import sys

import torch
import torch.nn.functional as F
from torch import Tensor

import regard

Head = tuple[str, int]  # layer name, head number

PAIRS = (  # paraphrases; of each two lines, the second uses a word of the first in another sense
    ("The bank of the river was covered with grass.", "Green plants grew along the side of the stream."),
    ("The bank lent her the money for the house.", "A mortgage let her buy her home."),
    ("The bat flew out of the cave at night.", "After sunset a winged animal left its dark cavern."),
    ("The bat broke when he hit the ball.", "His wooden club snapped during the baseball game."),
    ("The spring in the mattress was broken.", "A metal coil inside the bed had snapped."),
    ("The spring was warm and full of flowers.", "March and April were mild, and everything bloomed."),
    ("The crane lifted the steel beams.", "Heavy girders were hoisted at the building site."),
    ("The crane stood on one leg in the marsh.", "A tall bird was resting in the wetland."),
    ("The bag was light enough for a child.", "The luggage weighed so little that a kid could carry it."),
    ("The light in the room was dim.", "The lamp hardly let us see anything."),
    ("He lit the match to start the fire.", "The man set the wood aflame."),
    ("He won the match against the champion.", "The tennis player beat the title holder."),
    ("The old farmer kicked the bucket.", "The elderly man has passed away."),
    ("The boy kicked the ball over the fence.", "A child shot a football into the garden."),
    ("She filed her nails in the bathroom.", "The woman did her manicure by the sink."),
    ("She filed her letters in the cabinet.", "The woman put the mail into folders."),
    ("He ran the company for ten years.", "For a decade he was the boss of the firm."),
    ("He ran ten miles with his dog.", "He jogged a long way, and his pet came along."),
    ("She was the head of the school.", "The principal was a woman."),
    ("She hit her head on the door.", "The woman's skull was hurt by the entrance."),
    ("The key to success is patience.", "Those who can wait will achieve the most."),
    ("The key to the house is missing.", "Nobody can find what opens our front door."),
    ("He caught a cold in winter.", "In January the man was sneezing with flu."),
    ("He caught a fish in the lake.", "The man had a trout on his hook."),
    ("She likes the fall for its colours.", "Autumn leaves are her favourite sight."),
    ("She hurt her knee in the fall.", "When she tripped, her leg was injured."),
    ("The bark of the tree was rough.", "The trunk of the oak felt coarse."),
    ("The bark of the dog was loud.", "The hound made a lot of noise."),
    ("The mouse stopped working, so I could not click.", "My computer's pointer no longer reacted."),
    ("The mouse hid behind the kitchen stove.", "A small rodent was under the oven."),
    ("The plant makes a thousand cars a day.", "So many vehicles leave the factory."),
    ("The plant needs water twice a week.", "Give the fern a drink every few days."),
    ("The waiter brought the bill.", "We were asked to pay for our meal."),
    ("The parliament passed the bill.", "Lawmakers approved the new act."),
    ("His watch is ten minutes slow.", "The clock on his wrist shows the wrong time."),
    ("They watch the children in the pool.", "An eye is kept on the kids who swim."),
    ("A wave knocked over the surfer.", "The rider on the board fell into the sea."),
    ("A wave of strikes hit the country.", "All over the nation employees refused to work."),
    ("The ring was made of gold.", "The jewel on her finger was precious."),
    ("The ring of the phone woke me.", "A call roused me from sleep."),
)
OTHERS = (  # to measure the importance of heads
    ("The seal swam under the ice.", "A sea animal dived beneath the frozen water."),
    ("The seal on the letter was broken.", "Someone had opened the envelope."),
    ("The palm of her hand was red.", "The inside of her fist had turned pink."),
    ("The palm gave shade on the island.", "We sat out of the sun under a tropical tree."),
    ("He hammered the nail into the wall.", "A metal pin was driven into the plaster."),
    ("He bit his nail until it bled.", "His finger was sore from chewing on it."),
    ("The pitcher threw the ball too high.", "The baseball player missed his target."),
    ("The pitcher was filled with lemonade.", "There was a cold drink in the jug."),
    ("The pupil did her homework.", "The schoolgirl finished her exercises."),
    ("The pupil of the eye grows in the dark.", "Without light, the opening in the iris widens."),
    ("The organ was played at the wedding.", "Church music sounded when they married."),
    ("The organ was given to the sick man.", "The patient received a new kidney."),
)


class Sentences:
    """Pairs of sentences as one batch: 0 and 1 belong together, 2 and 3, and so on."""

    def __init__(self, model: regard.models.Encoder, pairs: tuple[tuple[str, str], ...]) -> None:
        self.batch = model.encode_batch([sentence for pair in pairs for sentence in pair])
        self.partner = torch.arange(2 * len(pairs)) ^ 1

    def cosines(self, model: regard.models.Encoder) -> Tensor:
        """Cosine similarities of all sentences, (B, B); -inf on the diagonal."""
        states = model(self.batch.ids, keep=self.batch.keep)
        vectors = F.normalize((states * self.batch.keep[..., None]).sum(1), dim=-1)  # as `model.embed` does
        return (vectors @ vectors.T).fill_diagonal_(float("-inf"))

    def loss(self, model: regard.models.Encoder) -> Tensor:
        """The cross-entropy of the paraphrase among all other sentences, (B,)."""
        return F.cross_entropy(20 * self.cosines(model), self.partner, reduction="none")

    def accuracy(self, model: regard.models.Encoder, without: list[Head]) -> float:
        """The share of sentences whose nearest neighbour is their paraphrase, without some heads."""
        heads: dict[str, list[int]] = {}
        for layer, head in without:
            heads.setdefault(layer, []).append(head)
        with torch.no_grad(), regard.ablate(model, heads):
            return (self.cosines(model).argmax(1) == self.partner).float().mean().item()


def draw(path: str, removed: list[int], curves: dict[str, Tensor]) -> None:
    """Plot the accuracy against the number of heads removed; (draws, counts) for each order."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        print("no figure: matplotlib is not installed")
        return
    matplotlib.use("Agg")
    with matplotlib.rc_context({"font.size": 13, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(8, 4.5), layout="constrained")
        axes = figure.subplots()
        colours = matplotlib.colormaps["viridis"]([0.05, 0.45, 0.7])
        labels = ((0.6, 14), (0.17, -52), (0.17, -42))  # of each curve: position along it, and height above it
        for (order, accuracy), colour, style, (along, above) in zip(
            curves.items(), colours, ("-", "--", "-"), labels, strict=True
        ):
            axes.fill_between(removed, accuracy.amin(0), accuracy.amax(0), color=colour, alpha=0.2, linewidth=0)
            axes.plot(removed, accuracy.mean(0), color=colour, linestyle=style, linewidth=2)
            at = int(along * len(removed))
            order += f" ({len(accuracy)} orders)" if len(accuracy) > 1 else ""
            axes.annotate(
                order, (removed[at], accuracy.mean(0)[at]), (0, above), color=colour, textcoords="offset points"
            )
        full = curves["random"][0, 0].item()
        axes.axhline(0.9 * full, color="grey", linewidth=1, linestyle=":")
        axes.annotate(
            "90% of the full model",
            (removed[-1], 0.9 * full),
            (0, 4),
            color="grey",
            ha="right",
            textcoords="offset points",
        )
        axes.set(xlabel="heads removed, of 72", ylabel="paraphrases found", ylim=(0.4, 1), xlim=(0, removed[-1]))
        axes.yaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1))
        figure.savefig(path, dpi=150)
    print(f"figure: {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Remove the heads of MiniLM one after another.")
    parser.add_argument("--every", type=int, default=3, help="heads between measurements")
    parser.add_argument("--draws", type=int, default=5, help="how many random orders")
    parser.add_argument("--seed", type=int, default=0, help="of the random orders")
    parser.add_argument("--figure", default="if_one_head_fails.png", help="file of the figure")
    options = parser.parse_args()
    try:
        model = regard.models.load("minilm")
    except (ValueError, ImportError) as error:
        sys.exit(str(error))

    others, sentences = Sentences(model, OTHERS), Sentences(model, PAIRS)
    importance = regard.importance(model, lambda model, others: others.loss(model), [others], normalize=False)
    least = [(layer, head) for layer, head, _ in importance.ranked()]
    rng = random.Random(options.seed)
    orders = {
        "least important first": [least],
        "random": [rng.sample(least, len(least)) for _ in range(options.draws)],
        "most important first": [least[::-1]],
    }
    removed = sorted({*range(0, len(least), options.every), len(least)})
    curves = {
        name: torch.tensor([[sentences.accuracy(model, order[:count]) for count in removed] for order in draws])
        for name, draws in orders.items()
    }
    full, none = (curves["random"][0, at].item() for at in (0, -1))
    print(f"all {len(least)} heads find {full:.1%} of the paraphrases, no head at all {none:.1%}.")
    for name, accuracy in curves.items():
        under = [count for count, share in zip(removed, accuracy.mean(0).tolist(), strict=True) if share < 0.9 * full]
        words = f" (mean of {len(accuracy)})" if len(accuracy) > 1 else ""
        print(f"  {name + words + ':':<24} first below 90% of that with {under[0]} heads removed")
    draw(options.figure, removed, curves)


if __name__ == "__main__":
    main()
