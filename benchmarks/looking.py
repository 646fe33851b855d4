"""What does looking cost? Time and memory of `measure` and `watch`, beside not looking and beside building the maps.

    python benchmarks/looking.py [--sizes 512 2048 8192] [--lengths 128 512 2048] [--long] [--quick] [--only memory]

    headline  attention with the seven statistics that come with it (entropy, peak and target, distance, received,
              offsets, on_first, a heatmap of 64 x 64), all checked in the same run, beside blind attention: SDPA in the
              better of its two layouts, ours, and today's way: softmax(q k^T) in full, and the statistics from it

    layer     one attention, 12 heads of width 64, float32: causal; causal with 4 kv heads; Window(512)
    SDPA      plain `scaled_dot_product_attention`, which sees nothing; for the window with a mask (N, N), made before
    attend    ours, and sees nothing either
    default   `regard.measure(q, k, v)` as it comes, output included
    every     with all other measures too, but for divergence, which costs pairs of heads and has a column of its own
    all       both in one call (its memory)
    dense     softmax(q k^T) of all heads in full, and the same statistics from it; every and divergence likewise

    model     BERT-base with 4 layers (random weights), one text
    forward   attn_implementation="sdpa", nobody looks
    watch     the same model within `regard.watch(model)`
    eager     attn_implementation="eager" with output_attentions=True, and nothing done with the maps
    page      the maps of eager as lists and then as JSON text, as the pages of BertViz embed them

Times are ratios to the first column. Memory is the peak of a process of its own above what it held before the call
(inputs and weights), after a small call that loaded what is loaded once. What would take over 8 GiB is not run: the
same at an eighth of the length, times 64, is shown with a `~`. Lengths above 8192 run once, in that process, and not if
an eighth of the length says that it takes longer than `--patience`. Token ids follow Zipf's law, so that induction and
duplicate find as many copies as in a real text. Rows of the JSON: what, case, tokens, and for each contestant seconds
and bytes; under "estimated" those that were not run. The headline goes to headline.json beside it: width, causal,
tokens, and the seconds of each contestant.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import json
import math
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from side_by_side import machine, save, table, take_turns
from torch import Tensor, nn

import regard
from regard import measures

HEADS, WIDTH, WINDOW, LAYERS, VOCABULARY = 12, 64, 512, 4, 30522
CASES = {"causal": HEADS, "GQA 12/4": 4, f"Window({WINDOW})": HEADS}  # and their kv heads
LAYER = ("SDPA", "attend", "default", "every", "divergence", "all", "dense", "dense every", "dense divergence")
MODEL = ("forward", "watch", "eager", "page")
SIZES, LONG, LENGTHS = [512, 2048, 8192], [16384, 32768], [128, 512, 2048]
LIMIT = 8 * 2**30  # bytes
ONCE = 8192  # longer ones run once
SMALL = 128  # tokens of the call that loads what is loaded once

Run = Callable[[], object]


def text(tokens: int) -> Tensor:
    """Token ids (N,) as frequent as words are: the r-th by 1 / (r + 2.7)."""
    generator = torch.Generator().manual_seed(0)
    frequency = 1 / (torch.arange(VOCABULARY) + 3.7)
    return torch.multinomial(frequency, tokens, replacement=True, generator=generator)


def inference(run: Run) -> Run:
    def wrapped() -> object:
        with torch.inference_mode():
            return run()

    return wrapped


# ----------------------------------------------------------------------------------------------------
# One layer


def every(ids: Tensor, weight: Tensor) -> list[measures.MeasureLike]:
    """Every measure that is shipped, but for divergence."""
    return [
        *("entropy", "peak", "distance", "offset", "offsets", "local", "received", "on_first"),
        *("previous", "itself", "next", measures.Heatmap(64), measures.Links(8), measures.Crop(0, 64, 0, 64)),
        measures.Tokens({"common": [0, 1, 2], "same": "same"}),
        *(measures.Induction(ids), measures.Duplicate(ids), measures.Contribution(weight)),
    ]


def layer(case: str, tokens: int, who: str) -> Run:
    """One contestant, its inputs ready."""
    torch.manual_seed(0)
    q = torch.randn(1, HEADS, tokens, WIDTH)
    k, v = (torch.randn(1, CASES[case], tokens, WIDTH) for _ in range(2))
    ids, weight = text(tokens), torch.randn(HEADS * WIDTH, HEADS * WIDTH)
    windowed = case.startswith("Window")
    mask = regard.masks.Window(WINDOW) if windowed else regard.masks.Causal()
    wanted = {"default": None, "every": every(ids, weight), "divergence": "divergence"}
    wanted["all"] = [*every(ids, weight), "divergence"]
    if who == "SDPA" and windowed:
        visible = _visible(tokens, WINDOW)
        return inference(lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=visible))
    if who == "SDPA":
        return inference(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))
    if who == "attend":
        return inference(lambda: regard.attend(q, k, v, mask=mask))
    if who in wanted:
        return inference(lambda: regard.measure(q, k, v, mask=mask, measures=wanted[who], ids=ids))
    statistics = {"dense": of_default, "dense every": of_every, "dense divergence": of_divergence}[who]
    visible = _visible(tokens, WINDOW if windowed else tokens)

    def dense() -> dict[str, object]:
        keys, values = (x.repeat_interleave(HEADS // x.shape[1], 1) for x in (k, v))
        p = (q * WIDTH**-0.5) @ keys.mT
        p = p.masked_fill_(~visible, -math.inf).softmax(-1)  # (B, H, N, N)
        return {"output": p @ values, **statistics(p, values, ids, weight)}

    return inference(dense)


def _visible(tokens: int, window: int) -> Tensor:
    """Who may see whom, (N, N): by bands, for the integers of the whole would take eight times its memory."""
    i = torch.arange(tokens, dtype=torch.int32)
    visible = torch.empty(tokens, tokens, dtype=torch.bool)
    for rows in i.split(256):
        back = rows[:, None] - i
        visible[rows[0] : rows[-1] + 1] = (back >= 0) & (back < window)
    return visible


def of_default(p: Tensor, v: Tensor, ids: Tensor, weight: Tensor) -> dict[str, object]:
    """What `measure` finds as it comes, from the weights (B, H, N, N)."""
    n = p.shape[-1]
    ahead = _ahead(n)
    peak, target = p.max(-1)
    return {
        "entropy": torch.special.entr(p).sum(-1),
        "peak": peak,
        "target": target,
        "distance": (p * ahead.abs()).sum(-1),
        "offset": (p * ahead).sum(-1),
        "offsets": torch.stack([p.diagonal(offset, -2, -1).sum(-1) / n for offset in range(-8, 9)], -1),
        "received": p.sum(2),
        "on_first": p[..., 0].clone(),
    }


def of_every(p: Tensor, v: Tensor, ids: Tensor, weight: Tensor) -> dict[str, object]:
    """The same as `every`, from the weights in full."""
    n, ahead = p.shape[-1], _ahead(p.shape[-1])
    found = of_default(p, v, ids, weight)
    found["local"] = (p * (ahead.abs() <= 3)).sum(-1)
    found["previous"] = F.pad(p.diagonal(-1, -2, -1), (1, 0))
    found["itself"] = p.diagonal(0, -2, -1).clone()
    found["next"] = F.pad(p.diagonal(1, -2, -1), (0, 1))
    cells = min(64, n)
    cell = F.one_hot(torch.arange(n) * cells // n, cells).to(p.dtype)  # (N, cells)
    found["heatmap"] = cell.mT @ (p @ cell)
    found["links"] = p.topk(min(8, n))[::-1]
    found["crop"] = p[..., :64, :64].clone()
    same, earlier = ids[:, None] == ids, ahead < 0
    common = (p @ (ids < 3).to(p.dtype)[:, None])[..., 0]
    found["tokens"] = torch.stack([common, (p * same).sum(-1)], -1)
    found["duplicate"] = (p * (same & earlier)).sum(-1)
    found["induction"] = (p * F.pad((same & earlier)[:, :-1], (1, 0))).sum(-1)
    norms = torch.stack([(v[:, h] @ weight[:, h * WIDTH : (h + 1) * WIDTH].mT).norm(dim=-1) for h in range(HEADS)], 1)
    found["contribution"] = (p @ norms[..., None])[..., 0]
    found["contributed"] = p.sum(2) * norms
    return found


def of_divergence(p: Tensor, v: Tensor, ids: Tensor, weight: Tensor) -> dict[str, object]:
    """Jensen-Shannon divergence of each two heads, summed over queries: (B, H, H)."""
    entropy, result = torch.special.entr(p).sum(-1), torch.zeros(p.shape[0], HEADS, HEADS)
    for a in range(HEADS):
        for b in range(a):
            apart = torch.special.entr((p[:, a] + p[:, b]) / 2).sum(-1) - (entropy[:, a] + entropy[:, b]) / 2
            result[:, a, b] = result[:, b, a] = apart.sum(-1)
    return {"divergence": result}


def _ahead(n: int) -> Tensor:
    """Key minus query, (N, N)."""
    i = torch.arange(n, dtype=torch.float32)
    return i - i[:, None]


SEVEN = ["entropy", "peak", "distance", "received", "offsets", "on_first", measures.Heatmap(64)]


def headline(width: int, tokens: int, causal: bool) -> dict[str, Run]:
    """Seeing every head, and not seeing any; what is seen is checked first."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, HEADS, tokens, width) for _ in range(3))
    apart = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    mask = regard.masks.Causal() if causal else None

    def looking() -> object:
        return regard.measure(q, k, v, mask=mask, measures=SEVEN)

    def dense() -> dict[str, object]:
        p = (q * width**-0.5) @ k.mT
        if causal:
            p = p.masked_fill_(~_visible(tokens, tokens), -math.inf)
        p = p.softmax(-1)
        ahead, (peak, target) = _ahead(tokens), p.max(-1)
        cells = min(64, tokens)
        cell = F.one_hot(torch.arange(tokens) * cells // tokens, cells).to(p.dtype)
        offsets = [p.diagonal(offset, -2, -1).sum(-1) / tokens for offset in range(-8, 9)]
        return {
            "output": p @ v,
            "entropy": torch.special.entr(p).sum(-1),
            "peak": peak,
            "target": target,
            "distance": (p * ahead.abs()).sum(-1),
            "received": p.sum(2),
            "offsets": torch.stack(offsets, -1),
            "on_first": p[..., 0].clone(),
            "heatmap": cell.mT @ (p @ cell),
        }

    runs: dict[str, Run] = {
        "SDPA": lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal),
        "SDPA apart": lambda: F.scaled_dot_product_attention(*apart, is_causal=causal),
        "attend": lambda: regard.attend(q, k, v, mask=mask),
        "looking": looking,
    }
    runs = {name: inference(run) for name, run in runs.items()}
    found = runs["looking"]()
    torch.testing.assert_close(found.output, runs["SDPA"](), rtol=1e-4, atol=1e-4)
    if tokens <= 2048:
        runs["dense"] = inference(dense)
        for name, right in runs["dense"]().items():
            got = found.output if name == "output" else found[name]
            if name == "target":
                assert (got == right).float().mean() > 0.999
            else:
                torch.testing.assert_close(got, right, rtol=1e-4, atol=1e-4 * max(1.0, right.abs().max().item()))
    else:  # some heads and rows of the whole, and what must hold for all of it
        rows = torch.arange(0, tokens, tokens // 16)
        p = (q[:, :2, rows].double() * width**-0.5) @ k[:, :2].double().mT
        p = p.masked_fill_(~(torch.arange(tokens) <= rows[:, None]), -math.inf) if causal else p
        p = p.softmax(-1)
        ahead = (torch.arange(tokens) - rows[:, None]).abs()
        expected = {
            "entropy": torch.special.entr(p).sum(-1),
            "peak": p.amax(-1),
            "target": p.argmax(-1),
            "distance": (p * ahead).sum(-1),
            "on_first": p[..., 0],
        }
        for name, right in expected.items():
            got = found[name][:, :2, rows]
            torch.testing.assert_close(got.to(right.dtype), right, rtol=1e-4, atol=1e-4)
        for whole in (found.received, found.heatmap):
            torch.testing.assert_close(
                whole.flatten(2).sum(-1), torch.full((1, HEADS), float(tokens)), rtol=1e-4, atol=0
            )
        assert (found.offsets.sum(-1) < 1).all()
    return runs


def show_headline(sizes: list[int], seconds: float) -> list[dict[str, object]]:
    rows, lines = [], []
    for width in (64, 128):
        for causal in (False, True):
            for tokens in sizes:
                times = take_turns(headline(width, tokens, causal), seconds=seconds, rounds=7 if tokens < 8192 else 3)
                blind = min(times["SDPA"], times["SDPA apart"])
                cells = [
                    f"{blind * 1e3:.1f} ms",
                    f"{blind / times['looking']:.2f}",
                    f"{times['looking'] / times['attend']:.2f}",
                    f"{times['dense'] / times['looking']:.1f}" if "dense" in times else "",
                ]
                lines.append([f"D{width}{' causal' if causal else ''} {tokens}", *cells])
                rows.append({"what": "headline", "width": width, "causal": causal, "tokens": tokens, "seconds": times})
                print(" | ".join(lines[-1]), flush=True)
    header = ["headline", "SDPA, blind", "SDPA / looking", "looking / attend", "dense / looking"]
    print("\n" + table(header, lines) + "\n", flush=True)
    return rows


def check() -> None:
    """The two ways find the same."""
    for case in CASES:
        blind = layer(case, 700, "SDPA")()
        for ours, theirs in (("default", "dense"), ("every", "dense every"), ("divergence", "dense divergence")):
            found, expected = layer(case, 700, ours)(), layer(case, 700, theirs)()
            assert sorted(found.values) == sorted(set(expected) - {"output"}), (sorted(found.values), sorted(expected))
            for name, value in expected.items():
                got = blind if name == "output" else found[name]
                if name == "links":  # (equal weights may stand in another order)
                    got, value = got.weights, value[1]
                torch.testing.assert_close(got, value, rtol=2e-4, atol=2e-5, msg=f"{case}, {name}".format)
            torch.testing.assert_close(found.output, blind, rtol=1e-4, atol=1e-4)


# ----------------------------------------------------------------------------------------------------
# A whole model


@functools.cache
def bert(implementation: str) -> nn.Module:
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(num_hidden_layers=LAYERS, max_position_embeddings=8192, attn_implementation=implementation)
    return BertModel(config).eval()


def model(case: str, tokens: int, who: str) -> Run:
    """One contestant; `case` says nothing."""
    peer, ids = bert("sdpa" if who in ("forward", "watch") else "eager"), text(tokens)[None]

    def watched() -> object:
        with regard.watch(peer) as seen:
            peer(ids)
        return seen

    def page() -> str:
        maps = torch.stack([one[0] for one in peer(ids, output_attentions=True).attentions])
        words = [str(one) for one in ids[0].tolist()]
        return json.dumps({"attn": maps.tolist(), "left_text": words, "right_text": words})

    return inference(
        {
            "forward": lambda: peer(ids).last_hidden_state,
            "watch": watched,
            "eager": lambda: peer(ids, output_attentions=True).attentions,
            "page": page,
        }[who]
    )


# ----------------------------------------------------------------------------------------------------
# In a process of its own

WHAT = {"layer": layer, "model": model}


def run_alone(what: str, case: str, tokens: str, who: str) -> None:
    """Prints seconds, and bytes at the peak above those before."""
    WHAT[what](case, SMALL, who)()
    run = WHAT[what](case, int(tokens), who)
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before, begin = _status("VmHWM"), time.perf_counter()
    held = run()
    seconds = time.perf_counter() - begin
    print(seconds, _status("VmHWM") - before)
    del held


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) * 1024


@functools.cache
def alone(what: str, case: str, tokens: int, who: str) -> tuple[float, float]:
    """Seconds and bytes."""
    command = [sys.executable, __file__, "--alone", what, case, str(tokens), who]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    seconds, size = done.stdout.split()[-2:]
    return float(seconds), float(size)


def too_much(what: str, case: str, tokens: int, who: str, patience: float) -> dict[str, float | None] | None:
    """The estimated seconds and bytes of what shall not be run."""
    maps = who.startswith("dense") or who in ("eager", "page") or (who == "SDPA" and case.startswith("Window"))
    if not (tokens > ONCE or (maps and tokens > (4096 if what == "layer" else 1024))):
        return None
    seconds, size = (64 * x for x in alone(what, case, tokens // 8, who))
    if (maps and size > LIMIT) or (tokens > ONCE and seconds > patience):
        return {"seconds": seconds, "bytes": size if maps else None}
    return None


# ----------------------------------------------------------------------------------------------------


def ratio(who: str, times: dict[str, float], estimated: dict[str, dict], first: str) -> str:
    """A cell: the time divided by the first one's, or that time itself."""
    value, base = (times.get(one) or estimated[one]["seconds"] for one in (who, first))
    mark = "" if who in times and first in times else "~"
    return f"{mark}{base * 1e3:.1f} ms" if who == first else f"{mark}{value / base:.2f}"


def memory(who: str, sizes: dict[str, float], estimated: dict[str, dict]) -> str:
    """A cell: MB or GB."""
    size = sizes.get(who) or (estimated[who]["bytes"] if who in estimated else None)
    if size is None:
        return ""
    return ("" if who in sizes else "~") + (f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="*", help=f"tokens of the layer; {SIZES} by default")
    parser.add_argument("--lengths", type=int, nargs="*", help=f"tokens of the model; {LENGTHS} by default")
    parser.add_argument("--long", action="store_true", help=f"{LONG} tokens too, in the layer, each once")
    parser.add_argument("--quick", action="store_true", help="does it work? small sizes, little memory, no JSON")
    parser.add_argument("--seconds", type=float, default=3.0, help="time spent on each row (more for slow ones)")
    parser.add_argument("--patience", type=float, default=900.0, help="seconds for one contestant above 8192 tokens")
    parser.add_argument("--only", default="", help="rows whose name contains this: memory, model time, causal 2048")
    parser.add_argument("--json", help="where the numbers go; a full run writes benchmarks/results/looking.json")
    parser.add_argument("--alone", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()

    warnings.simplefilter("ignore")
    if options.alone:
        run_alone(*options.alone)
        return
    quick = options.quick
    partial = quick or options.only or options.sizes is not None or options.lengths is not None
    path = options.json or (None if partial else "benchmarks/results/looking.json")
    sizes = ([256] if quick else SIZES) if options.sizes is None else options.sizes
    lengths = ([64] if quick else LENGTHS) if options.lengths is None else options.lengths
    plan = [("layer", case, size) for case in CASES for size in [*sizes, *(LONG if options.long else [])]]
    plan += [("model", "", size) for size in lengths]
    rows: list[dict] = []
    if options.only in "headline":
        found = show_headline([256] if quick else options.sizes or SIZES, 0.1 if quick else options.seconds)
        if not quick and options.sizes is None:
            save(str(Path(options.json or "benchmarks/results/looking.json").with_name("headline.json")), found)
    if options.only == "headline":
        return
    check()

    tables: dict = {}
    for what, case, tokens in plan:
        names = {"layer": LAYER, "model": MODEL}[what]
        timed = [who for who in names if who != "all"]
        name = f"{case} {tokens}".strip()
        figures = ("time",) if quick and case not in ("causal", "") else ("time", "memory")
        wanted = [figure for figure in figures if options.only in f"{what} {figure} {name}"]
        if not wanted:
            continue
        estimates = {who: too_much(what, case, tokens, who, options.patience) for who in names}
        estimated = {who: value for who, value in estimates.items() if value is not None}
        rows.append({"what": what, "case": case, "tokens": tokens, "estimated": estimated})
        if "time" in wanted:
            runs = [who for who in timed if who not in estimated]
            if tokens > ONCE:
                times = {who: alone(what, case, tokens, who)[0] for who in runs}
            else:
                contestants = {who: WHAT[what](case, tokens, who) for who in runs}
                rounds = 2 if quick else 7 if tokens < 4096 else 3
                times = take_turns(contestants, seconds=0.1 if quick else options.seconds, rounds=rounds)
            rows[-1]["seconds"] = times
            cells = {who: ratio(who, times, estimated, names[0]) for who in timed}
            tables.setdefault((what, f"time / {names[0]}'s", *timed), []).append([name, *cells.values()])
            print(f"{what} time, {name}: " + ", ".join(f"{who} {cell}" for who, cell in cells.items()), flush=True)
        if "memory" in wanted:
            some = [who for who in names if who not in estimated and (not quick or who in ("every", "watch"))]
            found = {who: alone(what, case, tokens, who)[1] for who in some}
            rows[-1]["bytes"] = found
            cells = {who: memory(who, found, estimated) for who in names}
            tables.setdefault((what, "peak memory", *names), []).append([name, *cells.values()])
            print(f"{what} memory, {name}: " + ", ".join(f"{who} {cell}" for who, cell in cells.items()), flush=True)
    for (what, title, *names), lines in tables.items():
        print("\n" + table([f"{what}, {title}", *names], lines))
    print("\n" + ", ".join(f"{key} {value}" for key, value in machine().items()))
    if path:
        save(path, rows)


if __name__ == "__main__":
    main()
