"""Which heads of a language model look for what came next the last time, and what it loses without them.

    python examples/induction.py
    python examples/induction.py --top 3 --draws 10

SmolLM2 (135M, 30 layers of 9 heads) reads random tokens twice. At the first reading nothing can be foreseen. At the
second a head can look for the earlier copy of a token, and at what came after it: an induction head (Olsson et al.
2022). Its score is how much of its attention goes there.

That is what heads look at. Whether it matters is seen on other random tokens: without the best heads the second reading
is nearly as hard as the first; without as many others, drawn at random, it is about as easy as before.

    8 of 270 heads are induction heads (score; that of equal weights on all tokens so far):
      blocks.18.attention 6  0.905  0.014
      blocks.17.attention 3  0.774  0.014
      ...

    Loss of the next token in nats      first reading  second reading
      with all heads                            14.52            2.69
      without the 5 best                        14.52           11.51
      without 5 others                          14.70            2.83  (5 draws: 2.63 to 3.20)
      without 5 others, same layers             14.52            3.13  (5 draws: 2.97 to 3.27)
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

import regard

Head = tuple[str, int]  # its layer, its number


def losses(model: regard.models.Decoder, ids: Tensor, without: Iterable[Head] = ()) -> tuple[float, float]:
    """The loss of the next token at the first and at the second reading, in nats, without some heads."""
    heads: dict[str, list[int]] = {}
    for layer, head in without:
        heads.setdefault(layer, []).append(head)
    with torch.no_grad(), regard.ablate(model, heads):
        logits = model(ids[:, :-1])  # (B, N - 1, V)
    loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view(len(ids), -1)
    half = ids.shape[1] // 2  # what comes right after the first reading cannot be foreseen either
    return loss[:, : half - 1].mean().item(), loss[:, half:].mean().item()


def others(best: list[Head], all_heads: list[Head], same_layers: bool, rng: random.Random) -> list[Head]:
    """As many heads as the best, none of them among those: of anywhere, or each of the layer of one of the best."""
    left = [head for head in all_heads if head not in best]
    rng.shuffle(left)
    if not same_layers:
        return left[: len(best)]
    drawn: list[Head] = []
    for layer, _ in best:
        drawn.append(next(head for head in left if head[0] == layer and head not in drawn))
    return drawn


def main() -> None:
    parser = argparse.ArgumentParser(description="Find the induction heads of SmolLM2, and do without them.")
    parser.add_argument("--top", type=int, default=5, help="how many of the best heads to do without")
    parser.add_argument("--draws", type=int, default=5, help="how often to draw as many others")
    parser.add_argument("--texts", type=int, default=4, help="texts to take the losses of")
    parser.add_argument("--length", type=int, default=50, help="random tokens in a text, before they are repeated")
    parser.add_argument("--seed", type=int, default=0, help="of all that is drawn")
    options = parser.parse_args()
    try:
        model = regard.models.load("smollm2")
    except (ValueError, ImportError) as error:
        sys.exit(str(error))

    roles = regard.heads.probes.induction(model, length=options.length, seed=options.seed).roles()
    all_heads = [(role.layer, role.head) for role in roles]
    found = roles.of("induction")
    print(
        f"{len(found)} of {len(roles)} heads are induction heads (score; that of equal weights on all tokens so far):"
    )
    for role in found:
        print(f"  {role.layer} {role.head}  {role.score:.3f}  {role.baseline:.3f}")

    ids = regard.heads.probes.repeated(  # other tokens than those that the heads were chosen by
        model.config.vocabulary, length=options.length, batch=options.texts, seed=options.seed + 1
    )
    best = [(role.layer, role.head) for role in found[: options.top]]
    rng = random.Random(options.seed)
    print("\nLoss of the next token in nats      first reading  second reading")
    first, second = losses(model, ids)
    print(f"  {'with all heads':<34}{first:13.2f}{second:16.2f}")
    first, second = losses(model, ids, best)
    print(f"  {f'without the {len(best)} best':<34}{first:13.2f}{second:16.2f}")
    for same_layers, words in ((False, ""), (True, ", same layers")):
        draws = [losses(model, ids, others(best, all_heads, same_layers, rng)) for _ in range(options.draws)]
        firsts, seconds = zip(*draws, strict=True)
        first, second = sum(firsts) / len(draws), sum(seconds) / len(draws)
        spread = f"  ({len(draws)} draws: {min(seconds):.2f} to {max(seconds):.2f})"
        print(f"  {f'without {len(best)} others{words}':<34}{first:13.2f}{second:16.2f}{spread}")


if __name__ == "__main__":
    main()
