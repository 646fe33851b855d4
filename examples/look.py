"""What the heads of a real model attend to, drawn in the terminal.

    python examples/look.py
    python examples/look.py "time flies like an arrow and fruit flies like a banana"

The model is all-MiniLM-L6-v2, a trained BERT encoder of 6 layers with 12 heads each. Of its 72 heads four are shown:
the clearest of each kind.
"""

from __future__ import annotations

import math
import os
import shutil
import sys
import textwrap

import torch
from torch import Tensor, nn

import regard

SENTENCE = "the cat sat on the mat because it was tired"

EDGES = (0.05, 0.15, 0.35, 0.65)  # the weights at which the next shade begins
SHADES, ASCII_SHADES = " ░▒▓█", " .:*#"
LABEL, GAP = 12, 2  # columns: a word is cut to LABEL; GAP stands between


def weights_of(model: nn.Module, ids: Tensor) -> Tensor:
    """(L, H, N, N): what every head of every layer attends to, for one text."""
    with regard.watch(model, measures=[], keep="qk") as seen, torch.no_grad():
        model(ids)
    return torch.stack([layer.weights(batch=0) for layer in seen])


def clearest(weights: Tensor) -> dict[str, tuple[int, int, float]]:
    """For each kind, the layer and head that do it most, and how much of their attention goes there on average."""
    inner = weights[:, :, 1:-1]  # words: not the marks [CLS] and [SEP] that stand around them
    between = weights[:, :, 1:-1, 1:-1]
    kinds = {
        "the word before": between.diagonal(-1, 2, 3).mean(-1),
        "the word after": between.diagonal(1, 2, 3).mean(-1),
        "the mark in front": inner[..., 0].mean(-1),
        "the mark at the end": inner[..., -1].mean(-1),
    }
    found = {}
    for kind, score in kinds.items():
        layer, head = divmod(int(score.argmax()), score.shape[1])
        found[kind] = (layer, head, float(score[layer, head]))
    return found


def draw(weights: Tensor, titles: list[str], words: list[str], shades: str, columns: int) -> str:
    """The maps of (H, N, N) weights, side by side as far as they fit. Rows are queries, columns are keys."""
    count = len(words)
    label = min(LABEL, max(map(len, words)))
    cell = 2 if label + GAP + 2 * count <= columns else 1
    width = max(cell * count, *map(len, titles))
    rows = math.ceil(len(weights) / max(1, (columns - label) // (GAP + width)))
    across = math.ceil(len(weights) / rows)  # as even as they go: 2 + 2 rather than 3 + 1
    levels = torch.bucketize(weights.contiguous(), torch.tensor(EDGES), right=True).tolist()

    def line(word: str, maps: list[str]) -> str:
        return (" " * GAP).join([word[:label].rjust(label), *(drawn.ljust(width) for drawn in maps)]).rstrip()

    lines = []
    for first in range(0, len(levels), across):
        group = range(first, min(first + across, len(levels)))
        lines += ["", line("", [titles[head] for head in group])]
        for i, word in enumerate(words):
            maps = ["".join(shades[level] * cell for level in levels[head][i]) for head in group]
            lines.append(line(word, maps))
    return "\n".join(lines)


def shades_of(stream) -> str:
    """Blocks where the stream can carry them, else ASCII; `LC_ALL=C` asks for ASCII whatever it can carry."""
    if os.environ.get("LC_ALL") in ("C", "POSIX"):
        return ASCII_SHADES
    try:
        SHADES.encode(stream.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return ASCII_SHADES
    return SHADES


def main() -> None:
    text = " ".join(sys.argv[1:]) if len(sys.argv) > 1 else SENTENCE
    if not text.strip():
        sys.exit("sentence: expected at least one word, received none")
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a word that the terminal cannot show is no reason to stop
    shades = shades_of(sys.stdout)
    columns = max(20, shutil.get_terminal_size().columns)

    try:
        model = regard.models.load("minilm")
        ids = model.encode(text)
        weights, words = weights_of(model, ids), model.tokenize(text)
    except (ValueError, ImportError) as error:
        sys.exit(str(error))
    if len(words) < 4:
        sys.exit("sentence: expected at least two words, received one")

    layers, heads = weights.shape[:2]
    steps = [f"{shade}{shade} from {edge:.0%}" for shade, edge in zip(shades[1:], EDGES, strict=True)]
    for line in (
        f"all-MiniLM-L6-v2: {layers} layers x {heads} heads. A row is a word that looks, a column a word looked at.",
        f"A row sums to 1. Shades: {', '.join(steps)}. Of each kind, the clearest head:",
    ):
        print(textwrap.fill(line, columns))
    found = clearest(weights)
    for kind, (layer, head, share) in found.items():
        print(f"  {kind:<20} layer {layer} head {head:<2}  {share:.0%} of its attention")
    titles = [f"layer {layer} head {head}" for layer, head, _ in found.values()]
    maps = torch.stack([weights[layer, head] for layer, head, _ in found.values()])
    shown = min(len(words), columns - LABEL - GAP)
    print(draw(maps[:, :shown, :shown], titles, words[:shown], shades, columns))
    if shown < len(words):
        print(f"\n(the first {shown} of {len(words)} tokens; a wider terminal shows more)")
    print(f"\nids {tuple(ids.shape)} -> weights {tuple(weights.shape)}: (L, H, N, M), layers and heads counted from 0")


if __name__ == "__main__":
    main()
