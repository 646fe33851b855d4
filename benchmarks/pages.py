"""How large is the page, and how long does it take? Beside BertViz's model view, for the same model and text.

    python benchmarks/pages.py [--lengths 16 64 128 256 512 1024 2048 4096] [--json benchmarks/results/pages.json]

The model is all-MiniLM-L6-v2 as transformers loads it (6 layers, 12 heads), up to the 512 tokens that it can read;
beyond, one of the same sizes with more positions, and random weights. Both start from the model, the tokens and a
text: ours watches a run and packs the page, theirs has the model return its weights and writes them as JSON. Theirs
also loads two libraries from the network when it is opened, which is not counted.

Where theirs would take more than `--most` bytes it is not made: its size is told from the bytes per weight of the
longest that was. Rows of the JSON: tokens, weights, and of each page its bytes and seconds (medians, in turns).
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from side_by_side import save, table
from transformers import AutoModel, AutoTokenizer, BertConfig, BertModel

import regard

WORDS = "the cat that i saw yesterday ran away because a dog had come into the garden and looked at it for too long"


def model_of(length: int) -> Any:
    """MiniLM, or for longer texts one like it."""
    folder = str(regard.models.source("minilm").path)
    if length <= 512:
        return AutoModel.from_pretrained(folder).eval()
    config = BertConfig.from_pretrained(folder, max_position_embeddings=length)
    torch.manual_seed(0)
    return BertModel(config).eval()


def ours(model: Any, ids: torch.Tensor, tokens: list[str]) -> int:
    """Bytes of our page."""
    model.set_attn_implementation("sdpa")
    with regard.watch(model, keep="qkv") as seen, torch.no_grad():
        model(ids)
    return len(regard.draw.page(seen, tokens).encode())


def theirs(model: Any, ids: torch.Tensor, tokens: list[str]) -> int:
    """Bytes of BertViz's model view."""
    from bertviz import model_view

    model.set_attn_implementation("eager")  # the one that can return weights
    with torch.no_grad():
        weights = model(ids, output_attentions=True).attentions
    return len(model_view(weights, tokens, html_action="return").data.encode())


def timed(make: Callable[[], int]) -> tuple[int, float]:
    """What it gave, and how long it took."""
    begun = time.perf_counter()
    size = make()
    return size, time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="*", default=[16, 64, 128, 256, 512, 1024, 2048, 4096])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--most", type=float, default=6e8, help="bytes of theirs that are still made")
    parser.add_argument("--json", default=str(Path(__file__).parent / "results" / "pages.json"))
    asked = parser.parse_args()
    warnings.filterwarnings("ignore")
    tokenizer = AutoTokenizer.from_pretrained(str(regard.models.source("minilm").path))
    rows: list[dict[str, Any]] = []
    per_weight = 12.0  # bytes, until it is measured
    for length in asked.lengths:
        model = model_of(length)
        words = tokenizer(
            " ".join([WORDS] * (length // 20 + 1)), truncation=True, max_length=length, return_tensors="pt"
        )
        ids = words["input_ids"]
        tokens = tokenizer.convert_ids_to_tokens(ids[0].tolist())
        weights = 72 * length * length
        row: dict[str, Any] = {"tokens": length, "weights": weights}
        repeats = asked.repeats if length <= 1024 else 1
        taken: dict[str, list[float]] = {"ours": [], "theirs": []}
        makers = {"ours": ours, "theirs": theirs} if per_weight * weights < asked.most else {"ours": ours}
        for _ in range(repeats):  # in turns
            for name, make in makers.items():
                row[f"{name} bytes"], seconds = timed(partial(make, model, ids, tokens))
                taken[name].append(seconds)
        for name, seconds in taken.items():
            row[f"{name} seconds"] = statistics.median(seconds) if seconds else None
        if "theirs" in makers:
            per_weight = row["theirs bytes"] / weights
        else:
            row["theirs bytes"], row["told from"] = per_weight * weights, f"{per_weight:.1f} bytes a weight"
        rows.append(row)
        print(f"{length}: {row}", flush=True)
    shown = [
        [
            f"{row['tokens']:,}",
            f"{row['ours bytes'] / 1e6:.1f} MB",
            f"{row['theirs bytes'] / 1e6:,.1f} MB" + (" (told)" if "told from" in row else ""),
            f"{row['ours seconds']:.2f} s",
            f"{row['theirs seconds']:.2f} s" if row["theirs seconds"] else "not made",
        ]
        for row in rows
    ]
    print(table(["tokens", "our page", "BertViz's", "our time", "its time"], shown))
    save(asked.json, rows)


if __name__ == "__main__":
    main()
