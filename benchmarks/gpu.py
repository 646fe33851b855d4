"""The GPU kernels on a GPU: are they right, and how fast beside SDPA and FlexAttention, blind and seeing.

    python benchmarks/gpu.py --check               compares them with the reference; fails if one is wrong
    python benchmarks/gpu.py                       checks, then measures (some minutes); writes results/gpu.json
    python benchmarks/gpu.py --quick               fewer sizes
    python benchmarks/gpu.py --estimate cuda:90    without a GPU: an estimate from counted instructions

Needs CUDA or ROCm and the extra `gpu`; only `--estimate` runs without a GPU. Contestants take turns, times are medians
over turns with events of the device, and tables show ratios. FlexAttention is compiled by torch.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from side_by_side import table
from torch import Tensor

import regard
from regard.attention import plane_of, prepare
from regard.kernels import blockwise, triton
from regard.kernels.triton import availability, self_check
from regard.masks import Causal, Documents, Mask, Window
from regard.measures import MeasureRun, as_measures

RESULTS = Path(__file__).parent / "results" / "gpu.json"
HEADS, GROUPS = 16, 4
ROWS = ("entropy", "peak", "distance", "offset")  # statistics of the forward pass itself
EVERY = ("entropy", "peak", "distance", "offset", "offsets", "received", "on_first", "heatmap")

# --- measuring
# ----------------------------------------------------------------------------------------------------------


def take_turns(contestants: dict[str, Callable[[], object]], seconds: float) -> dict[str, dict[str, float]]:
    """The median time of each contestant on the device, and the quartiles, in seconds. Every round runs each of them
    once, in random order."""
    for run in contestants.values():  # compiling, and warming up
        for _ in range(3):
            run()
    torch.cuda.synchronize()
    times: dict[str, list[float]] = {name: [] for name in contestants}
    spent = 0.0
    while spent < seconds or min(map(len, times.values())) < 7:
        for name in random.sample(list(contestants), len(contestants)):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            contestants[name]()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end) / 1e3)
            spent += times[name][-1]
    found = {}
    for name, values in times.items():
        low, middle, high = statistics.quantiles(values, n=4)
        found[name] = {"median": middle, "low": low, "high": high}
    return found


def inputs(tokens: int, queries: int, width: int, dtype: torch.dtype, gradient: bool) -> list[Tensor]:
    shapes = (1, queries, HEADS), (1, tokens, GROUPS), (1, tokens, GROUPS)
    return [
        torch.randn(*shape, width, device="cuda", dtype=dtype).transpose(1, 2).requires_grad_(gradient)
        for shape in shapes
    ]


def flex(
    mask_mod: Callable[..., Tensor] | None, score_mod: Callable[..., Tensor] | None, n: int, m: int
) -> Callable[..., Tensor]:
    """torch's FlexAttention, compiled."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    compiled = torch.compile(flex_attention)
    blocks = None if mask_mod is None else create_block_mask(mask_mod, None, None, n, m, device="cuda")
    return lambda q, k, v: compiled(q, k, v, score_mod=score_mod, block_mask=blocks, enable_gqa=True)


def features(n: int, m: int) -> dict[str, tuple[dict[str, Any], tuple[Any, Any] | None, dict[str, Any] | None]]:
    """By name: options of `attend`; mask_mod and score_mod of FlexAttention, None where it has no such thing; options
    of SDPA, None where it cannot."""
    first = m - n
    documents = torch.arange(m, device="cuda") // 512

    def causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return i + first >= j

    def window(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i + first >= j) & (i + first - j < 512)

    def same(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i + first >= j) & (documents[i + first] == documents[j])

    def capped(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return 30.0 * torch.tanh(score / 30.0)

    is_causal = {"is_causal": True} if n == m else None
    return {
        "full": ({}, (None, None), {}),
        "causal": ({"mask": Causal()}, (causal, None), is_causal),
        "window 512": ({"mask": Causal() & Window(512)}, (window, None), None),
        "documents of 512": ({"mask": Causal() & Documents(documents)}, (same, None), None),
        "softcap": ({"mask": Causal(), "softcap": 30.0}, (causal, capped), None),
        "sinks": ({"mask": Causal(), "sinks": torch.zeros(HEADS, device="cuda")}, None, None),
        "dropout": ({"mask": Causal(), "dropout": 0.1}, None, None),
    }


def attempt(run: Callable[[], object]) -> Callable[[], object] | None:
    """The contestant, if it runs at all: what is told of one that does not."""
    try:
        run()
    except Exception as error:
        print(f"  (left out: {type(error).__name__}: {str(error).splitlines()[0][:100] if str(error) else ''})")
        return None
    return run


def contest(
    name: str, tokens: int, queries: int, width: int, dtype: torch.dtype, gradient: bool, seconds: float
) -> dict[str, Any]:
    """A feature by all who have it: forward, or forward and backward."""
    options, of_flex, of_sdpa = features(queries, tokens)[name]
    q, k, v = inputs(tokens, queries, width, dtype, gradient)

    def whole(attend: Callable[..., Tensor]) -> Callable[[], object]:
        def run() -> object:
            out = attend(q, k, v)
            return torch.autograd.grad(out, (q, k, v), out.detach()) if gradient else out

        return run

    contestants = {"ours": whole(lambda *x: regard.attend(*x, kernel="triton", **options))}
    contestants["blockwise"] = whole(lambda *x: regard.attend(*x, kernel="blockwise", **options))
    if of_sdpa is not None:
        contestants["SDPA"] = whole(lambda *x: F.scaled_dot_product_attention(*x, enable_gqa=True, **of_sdpa))
    if of_flex is not None:
        contestants["flex"] = whole(flex(*of_flex, queries, tokens))
    running = {who: run for who, run in contestants.items() if attempt(run) is not None}
    row = {
        "what": "backward" if gradient else "forward",
        "feature": name,
        "tokens": tokens,
        "queries": queries,
        "width": width,
    }
    return row | {"dtype": str(dtype).removeprefix("torch."), "times": take_turns(running, seconds)}


def seeing(
    tokens: int, queries: int, width: int, dtype: torch.dtype, mask: Mask | None, seconds: float
) -> dict[str, Any]:
    """Blind, with the statistics of rows, and with all of them; and all of them in strips."""
    q, k, v = inputs(tokens, queries, width, dtype, False)

    def look(kernel: Any, names: tuple[str, ...]) -> Callable[[], object]:
        def run() -> object:
            call = prepare(q, k, v, mask=mask)
            measuring = MeasureRun(as_measures(names), plane_of(call))
            _, lse = kernel.forward_measured(call, measuring)
            return measuring.result(lse)

        return run

    with torch.no_grad():
        times = take_turns(
            {
                "blind": lambda: regard.attend(q, k, v, mask=mask, kernel="triton"),
                "rows": look(triton, ROWS),
                "every": look(triton, EVERY),
                "every, in strips": look(blockwise, EVERY),
            },
            seconds,
        )
    row = {"what": "seeing", "feature": "full" if mask is None else "causal", "tokens": tokens, "queries": queries}
    return row | {"width": width, "dtype": str(dtype).removeprefix("torch."), "times": times}


# --- an estimate from counted instructions
# ----------------------------------------------------------------------------------

# Cycles of a quarter of a processor for one instruction of a warp, and multiply-adds of its tensor core per cycle.
UNITS = {
    "cuda:80": {"fma": 2, "alu": 2, "exp": 8, "tensor": 256},
    "cuda:90": {"fma": 1, "alu": 2, "exp": 8, "tensor": 512},
    "cuda:100": {"fma": 1, "alu": 2, "exp": 8, "tensor": 1024},
}
KINDS = {
    "exp": r"\bex2\.",
    "fma": r"\b(fma|mul|add|sub)\.(rn\.|ftz\.)*f32",
    "alu": r"\b(max|min|setp|selp|and|or|xor|shl|shr|add|sub|mad|cvt)\.(?!.*\bf32\b.*ex2)(?!(rn\.|ftz\.)*f32)",
}


def counted(ptx: str) -> dict[str, int]:
    """Instructions of a thread in the loop that needs no mask: of all blocks with products and exponentials the one
    with the fewest selections."""
    loops = [
        block
        for block in re.split(r"^\$L__BB\w+:", ptx, flags=re.MULTILINE)
        if re.search(KINDS["exp"], block) and "mma" in block
    ]
    if not loops:
        return {}
    loop = min(loops, key=lambda block: len(re.findall(r"\bselp\.", block)))
    return {kind: len(re.findall(pattern, loop)) for kind, pattern in KINDS.items()}


def estimate(target: str, width: int) -> list[list[str]]:
    """For blind and seeing attention: cycles of each unit for 32 weights, and the time of seeing over that of blind, if
    units overlap, and if tensor cores wait for the others."""
    import compile_gpu

    rows, cycles = [], {}
    ptx = compile_gpu.assembly(target, torch.bfloat16, width)
    for name in ("forward", "seeing"):
        text, blocks = ptx[name]
        found = counted(text)
        if not found:
            raise SystemExit(f"{name}: no loop with products and exponentials was found in its PTX")
        per_warp = blocks.warps * 32 / (blocks.rows * blocks.keys)  # instructions of a warp for 32 weights
        units = UNITS[target]
        own = {kind: count * per_warp * units[kind] for kind, count in found.items()}
        own["tensor"] = 32 * 2 * width / units["tensor"]
        cycles[name] = max(own.values()), own["tensor"] + max(own[kind] for kind in found)
        numbers = [f"{own[kind]:.1f}" for kind in ("tensor", "exp", "fma", "alu")]
        ratios = [f"{mine / blind:.2f}" for mine, blind in zip(cycles[name], cycles["forward"], strict=True)]
        rows.append([name, *numbers, *ratios])
    return rows


def print_estimate(target: str) -> None:
    if target not in UNITS:
        print(
            f"--estimate: expected one of {', '.join(UNITS)}, received {target}; remedy: rates of its units in UNITS",
            file=sys.stderr,
        )
        raise SystemExit(2)
    for width in (64, 128):
        print(f"\nAn estimate, not a measurement: {target}, bfloat16, width {width}, causal.")
        print("Cycles for 32 weights in a quarter of a processor:")
        header = ["", "tensor", "exp2", "fma", "alu", "over blind, overlapping", "over blind, apart"]
        print(table(header, estimate(target, width)))


# --- the tables ------------------------------------------------------------------------------------------------------


def check() -> bool:
    """The self-check on every GPU, told line by line."""
    right = True
    for index in range(torch.cuda.device_count()):
        print(f"== {torch.cuda.get_device_name(index)}")
        verdict = self_check.check(torch.device("cuda", index), print)
        print(verdict)
        right = right and verdict.passed
    return right


def ratios(rows: list[dict[str, Any]]) -> None:
    """The tables."""
    for what in ("forward", "backward"):
        some = [row for row in rows if row["what"] == what]
        lines = []
        for row in some:
            ours = row["times"]["ours"]["median"]
            cells = [
                f"{row['times'][who]['median'] / ours:.2f}" if who in row["times"] else ""
                for who in ("SDPA", "flex", "blockwise")
            ]
            spread = (row["times"]["ours"]["high"] - row["times"]["ours"]["low"]) / ours
            size = f"{row['queries']} x {row['tokens']}"
            lines.append([row["feature"], row["dtype"], str(row["width"]), size, *cells, f"{spread:.0%}"])
        if lines:
            print(f"\n{what}: time of others over ours (above 1: ours is faster)")
            print(
                table(
                    ["", "dtype", "width", "queries x keys", "SDPA", "FlexAttention", "blockwise", "our spread"], lines
                )
            )
    lines = []
    for row in rows:
        if row["what"] == "seeing":
            blind = row["times"]["blind"]["median"]
            cells = [f"{row['times'][who]['median'] / blind:.2f}" for who in ("rows", "every", "every, in strips")]
            lines.append(
                [row["feature"], row["dtype"], str(row["width"]), f"{row['queries']} x {row['tokens']}", *cells]
            )
    if lines:
        print("\nseeing: time over blind attention by the same kernel")
        print(
            table(
                ["", "dtype", "width", "queries x keys", "rows' statistics", "every statistic", "every one in strips"],
                lines,
            )
        )


def measure(quick: bool, seconds: float) -> list[dict[str, Any]]:
    """All rows."""
    rows: list[dict[str, Any]] = []
    sizes = [(2048, 2048), (4096, 1)] if quick else [(1024, 1024), (4096, 4096), (16384, 16384), (16384, 1)]
    for width in (64,) if quick else (64, 128):
        for tokens, queries in sizes:
            for name in features(queries, tokens):
                for gradient in (False, True) if queries > 1 else (False,):
                    print(
                        f"{name}, {queries} x {tokens}, width {width}, {'backward' if gradient else 'forward'}",
                        flush=True,
                    )
                    rows.append(contest(name, tokens, queries, width, torch.bfloat16, gradient, seconds))
            for mask in (None, Causal()):
                rows.append(seeing(tokens, queries, width, torch.bfloat16, mask, seconds))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare only")
    parser.add_argument("--quick", action="store_true", help="fewer sizes")
    parser.add_argument("--seconds", type=float, default=0.5, help="of the device, for each row")
    parser.add_argument("--estimate", metavar="TARGET", help="without a GPU: from counted instructions")
    parser.add_argument("--save", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if arguments.estimate:
        print_estimate(arguments.estimate)
        return 0
    missing = availability.why_not_on("cuda") or (
        None if torch.cuda.is_available() else f"torch {torch.__version__} finds none"
    )
    if missing is not None:
        print(
            f"GPU: expected one that Triton compiles for, received none: {missing}; remedy: a machine that has one",
            file=sys.stderr,
        )
        return 2
    if not check():
        print("Not measured: what is wrong has no speed.", file=sys.stderr)
        return 1
    if arguments.check:
        return 0
    rows = measure(arguments.quick, arguments.seconds)
    ratios(rows)
    properties = torch.cuda.get_device_properties(0)
    machine = {"cpu": properties.name, "threads": 1, "torch": torch.__version__, "triton": availability.version()}
    arguments.save.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
