"""Does a text without end stay readable? Perplexity of smollm2 on real English, far past the length it was trained on.

    python benchmarks/endless.py [--tokens 32768] [--window 1020] [--json benchmarks/results/endless.json]

The text is Python's own reference, as it comes with every Python (`pydoc_data.topics`). It is read in chunks through a
`RollingCache` (the first 4 tokens and the last `window`), and through a `KVCache`, which remembers all, until a little
past the trained length. Rows of the JSON: where a stretch of the text begins and ends, and its perplexity in each.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from side_by_side import save, table
from torch import Tensor

from regard import models
from regard.projections import project

CHUNK = 512


def english(model: models.Decoder, tokens: int) -> Tensor:
    """(1, tokens) of prose."""
    from pydoc_data.topics import topics

    text = "\n\n".join(topics[name] for name in sorted(topics))
    ids = model.encode(text)[:, :tokens]
    assert ids.shape[1] == tokens, f"the text has {ids.shape[1]} tokens"
    return ids


@torch.inference_mode()
def losses(model: models.Decoder, ids: Tensor, window: int | None) -> Iterator[Tensor]:
    """The loss of each token but the first, chunk by chunk."""
    cache = model.new_cache() if window is None else model.new_cache(window, keep_first=4)
    for start in range(0, ids.shape[1] - 1, CHUNK):
        chunk = ids[:, start : start + CHUNK]
        wanted = ids[0, start + 1 : start + 1 + chunk.shape[1]]
        logits = project(model.head, model.hidden(chunk, cache=cache))[0, : len(wanted)]
        yield F.cross_entropy(logits.float(), wanted, reduction="none")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32768, help="four times the trained length")
    parser.add_argument("--window", type=int, default=1020)
    parser.add_argument("--stretch", type=int, default=4096, help="tokens of a row")
    parser.add_argument("--json", default="benchmarks/results/endless.json")
    options = parser.parse_args()
    torch.set_num_threads(2)

    model = models.load("smollm2")
    ids = english(model, options.tokens)
    kept = min(options.tokens, (model.config.context or 0) + options.stretch)
    found = {}
    for name, window, until in (("RollingCache", options.window, options.tokens), ("KVCache", None, kept)):
        parts = []
        for part in losses(model, ids[:, :until], window):
            parts.append(part)
            print(f"\r{name}: {sum(map(len, parts)):,} of {until:,}", end="", flush=True)
        found[name] = torch.cat(parts)
    rows, lines = [], []
    for start in range(0, options.tokens, options.stretch):
        end = min(start + options.stretch, options.tokens)
        values = {name: math.exp(loss[start:end].mean()) for name, loss in found.items() if len(loss) > start}
        rows.append({"begin": start, "end": end, "perplexity": values})
        lines.append([f"{start:,} - {end:,}", *(f"{values[name]:.1f}" if name in values else "" for name in found)])
    print("\r" + table(["tokens", *found], lines))
    save(options.json, rows)


if __name__ == "__main__":
    main()
