"""How long does the page of a long text take, and how much memory? SmolLM2's 270 heads, beside its plain forward.

    python benchmarks/pages_long.py [--lengths 1024 4096] [--threads 2] [--json benchmarks/results/pages_long.json]

The text is this project's own documentation. In turns: the model reads it unwatched; it is watched (keep="qkv"); what
was seen becomes a page. Seconds of wall time and of CPU time (all threads), medians. Each length has a process of its
own, whose peak of memory is read before the first watch and at the end.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from side_by_side import save, table

import regard

ROOT = Path(__file__).parent.parent


def timed(run: Callable[[], Any]) -> tuple[Any, tuple[float, float]]:
    """What it gave, and its seconds: wall, CPU."""
    begun = time.perf_counter(), time.process_time()
    result = run()
    return result, (time.perf_counter() - begun[0], time.process_time() - begun[1])


def peak() -> int:
    """Bytes of memory that this process has had at most."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def measured(length: int, repeats: int) -> dict[str, Any]:
    """The row of one length."""
    model = regard.models.load("smollm2").eval()
    text = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))))
    ids = model.encode(text)[:, :length]
    tokens = model.tokenize(text)[:length]
    taken: dict[str, list[tuple[float, float]]] = {"forward": [], "watched": [], "page": []}
    row: dict[str, Any] = {"tokens": ids.shape[1], "heads": 270, "weights": 270 * ids.shape[1] ** 2}
    with torch.no_grad():
        model(ids[:, :64])  # what happens once
        for _ in range(repeats):  # in turns
            taken["forward"].append(timed(partial(model, ids))[1])
            row.setdefault("forward peak bytes", peak())
            seen, seconds = timed(partial(regard.draw.read, model, None, ids))
            taken["watched"].append(seconds)
            seen.tokens = tokens
            content, seconds = timed(partial(regard.draw.page, seen))
            taken["page"].append(seconds)
            row["bytes"] = len(str(content).encode())
            del seen, content
    for name, several in taken.items():
        for kind, values in zip(("seconds", "cpu seconds"), zip(*several, strict=True), strict=True):
            row[f"{name} {kind}"] = statistics.median(values)
    for kind in ("seconds", "cpu seconds"):
        times = row[f"watched {kind}"] + row[f"page {kind}"]
        row[f"ratio {kind}"] = times / row[f"forward {kind}"]
    return row | {"peak bytes": peak()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="*", default=[1024, 4096])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", default=str(Path(__file__).parent / "results" / "pages_long.json"))
    parser.add_argument("--one", type=int, help="measure this length alone, and print its row as JSON")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    if asked.one is not None:
        print(json.dumps(measured(asked.one, asked.repeats)))
        return
    rows: list[dict[str, Any]] = []
    for length in asked.lengths:
        options = ["--one", str(length), "--repeats", str(asked.repeats), "--threads", str(asked.threads)]
        done = subprocess.run([sys.executable, __file__, *options], check=True, stdout=subprocess.PIPE, text=True)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        print(rows[-1], flush=True)
    shown = [
        [
            f"{row['tokens']:,}",
            f"{row['bytes'] / 1e6:.1f} MB",
            *(f"{row[f'{name} cpu seconds']:.1f} s" for name in ("forward", "watched", "page")),
            f"{row['ratio seconds']:.2f}",
            f"{row['ratio cpu seconds']:.2f}",
            f"{row['peak bytes'] / 1e9:.1f} GB",
        ]
        for row in rows
    ]
    header = ["tokens", "page", "forward", "watched", "page made", "ratio", "ratio of CPU time", "peak memory"]
    print(table(header, shown))
    save(asked.json, rows)


if __name__ == "__main__":
    main()
