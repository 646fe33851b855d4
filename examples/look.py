"""What the heads of a layer attend to, drawn in the terminal.

    python examples/look.py
    python examples/look.py "time flies like an arrow and fruit flies like a banana"

The layer is fresh: seeded, untrained. The maps show how attention works, not what a trained head has learned.
"""

from __future__ import annotations

import math
import os
import shutil
import sys
import textwrap

import torch

import regard

SENTENCE = "the cat sat on the mat because the cat was tired"
WIDTH, HEADS = 64, 4

EDGES = (0.05, 0.15, 0.35, 0.65)  # the weights at which the next shade begins
SHADES, ASCII_SHADES = " ░▒▓█", " .:*#"
LABEL, GAP = 12, 2  # columns: a word is cut to LABEL; GAP stands between


def embed(words: list[str]) -> torch.Tensor:
    """(1, N, W): the same random vector for the same word, plus sines and cosines of where it stands.

    The vectors are longer than a layer's usual input: untrained scores are small, and the maps would be flat.
    """
    number = {word: i for i, word in enumerate(dict.fromkeys(words))}
    vectors = torch.randn(len(number), WIDTH)[[number[word] for word in words]]
    where = torch.arange(len(words))[:, None] / 100 ** torch.linspace(0, 1, WIDTH // 2)
    return (1.5 * vectors + torch.cat([where.sin(), where.cos()], dim=1))[None]


def draw(weights: torch.Tensor, words: list[str], shades: str, columns: int) -> str:
    """The maps of (H, N, N) weights, side by side as far as they fit. Rows are queries, columns are keys."""
    count = len(words)
    label = min(LABEL, max(map(len, words)))
    cell = 2 if label + GAP + 2 * count <= columns else 1
    width = max(cell * count, len("head 0"))
    rows = math.ceil(len(weights) / max(1, (columns - label) // (GAP + width)))
    across = math.ceil(len(weights) / rows)  # as even as they go: 2 + 2 rather than 3 + 1
    levels = torch.bucketize(weights.contiguous(), torch.tensor(EDGES), right=True).tolist()

    def line(word: str, maps: list[str]) -> str:
        return (" " * GAP).join([word[:label].rjust(label), *(drawn.ljust(width) for drawn in maps)]).rstrip()

    lines = []
    for first in range(0, len(levels), across):
        group = range(first, min(first + across, len(levels)))
        lines += ["", line("", [f"head {head}" for head in group])]
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
    words = (" ".join(sys.argv[1:]) if len(sys.argv) > 1 else SENTENCE).split()
    if not words:
        sys.exit("sentence: expected at least one word, received none")
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a word that the terminal cannot show is no reason to stop
    shades = shades_of(sys.stdout)
    columns = max(20, shutil.get_terminal_size().columns)

    torch.manual_seed(0)
    layer = regard.MultiHeadAttention(WIDTH, HEADS).eval()
    x = embed(words)  # (B, N, W)
    with torch.no_grad():
        out, weights = layer(x, mask=regard.masks.Causal(), need_weights=True)  # (B, N, W), (B, H, N, M)

    shown = min(len(words), columns - LABEL - GAP)  # causal: the first words never depend on those left out
    steps = [f"{shade}{shade} from {edge:.0%}" for shade, edge in zip(shades[1:], EDGES, strict=True)]
    for text in (
        f"{HEADS} heads, causal. A row is a word that looks, a column a word looked at.",
        f"A row sums to 1. Shades: {', '.join(steps)}.",
        "The layer is untrained: random weights from a fixed seed, nothing learned.",
    ):
        print(textwrap.fill(text, columns))
    print(draw(weights[0, :, :shown, :shown], words[:shown], shades, columns))
    if shown < len(words):
        print(f"\n(the first {shown} of {len(words)} words; a wider terminal shows more)")
    print(f"\nx {tuple(x.shape)} -> out {tuple(out.shape)}, weights {tuple(weights.shape)}: (B, H, N, M)")


if __name__ == "__main__":
    main()
