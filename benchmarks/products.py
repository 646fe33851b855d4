"""How fast are projections? `regard.projections.project` beside `nn.Linear`, by the number of rows.

    python benchmarks/products.py [--seconds 1] [--json benchmarks/results/products.json] [--dtypes float32]

Each turn multiplies by several weights one after another, 48 MB together, as a model does, so that they come from
memory and not from a cache. A ratio is nn.Linear's median time / ours: above 1 we are faster. Rows of the JSON: dtype,
rows, the sizes of the weight, after (what follows the product), and the seconds of one product of each contestant.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from side_by_side import machine, save, table, take_turns
from torch import nn

from regard.projections import ACTIVATIONS, project

WEIGHTS = [(384, 384), (384, 1536), (1536, 384), (576, 576), (768, 3072)]  # in, out: MiniLM, SmolLM2, BERT-base
ROWS = [1, 4, 16, 64, 128, 512, 2048]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MEMORY, WORK = 48 << 20, 1 << 31  # bytes of weights, and multiply-adds, of a turn at most
THREADS = 2


def contestants(
    rows: int, width: int, outs: int, dtype: torch.dtype, after: str | None
) -> tuple[dict[str, Callable[[], object]], int]:
    """Both, and the number of products of a turn."""
    count = max(1, min(MEMORY // (width * outs * dtype.itemsize), WORK // (rows * width * outs)))
    linears = [nn.Linear(width, outs, dtype=dtype) for _ in range(count)]
    x = torch.randn(rows, width).to(dtype)
    follow = (lambda out: out) if after is None else ACTIVATIONS[after]

    @torch.inference_mode()
    def theirs() -> None:
        for linear in linears:
            follow(linear(x))

    @torch.inference_mode()
    def ours() -> None:
        for linear in linears:
            project(linear, x, activation=after)

    return {"nn.Linear": theirs, "regard": ours}, count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1.0, help="time spent on each row")
    parser.add_argument("--json", default="benchmarks/results/products.json", help="where the numbers go")
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES))
    options = parser.parse_args()
    torch.set_num_threads(THREADS)
    torch.manual_seed(0)
    results, lines = [], []
    for dtype in options.dtypes:
        for rows in ROWS:
            for width, outs in WEIGHTS:
                after = "gelu" if outs == 4 * width else None
                pair, count = contestants(rows, width, outs, DTYPES[dtype], after)
                times = {name: t / count for name, t in take_turns(pair, seconds=options.seconds, rounds=5).items()}
                results.append(
                    {"dtype": dtype, "rows": rows, "width": width, "outs": outs, "after": after, "times": times}
                )
                speed = 2e-9 * rows * width * outs / times["regard"]
                lines.append(
                    [
                        f"{dtype}, {rows} x {width} -> {outs}{', gelu' if after else ''}",
                        f"{times['regard'] * 1e6:,.0f} us",
                        f"{speed:.0f} GFLOPS",
                        f"{times['nn.Linear'] / times['regard']:.2f}",
                    ]
                )
                print(" | ".join(lines[-1]), flush=True)
    print("\n" + table(["", "regard", "", "nn.Linear / regard"], lines))
    print("\n" + ", ".join(f"{key} {value}" for key, value in machine().items()))
    if len(options.dtypes) == len(DTYPES):
        save(options.json, results)


if __name__ == "__main__":
    main()
