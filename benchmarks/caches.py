"""What do caches cost and save? Keys and values in float32, bfloat16 and int8; shared prefixes; heads that forget;
latent attention.

    python benchmarks/caches.py [--only speed perplexity fork heads latent] [--text FILE] [--tokens 2048] [--threads 2]
                                [--seconds 4] [--json benchmarks/results/caches.json]

speed       one query against 4,096 and 32,768 cached tokens, at SmolLM2-135M's sizes (9 heads, 3 kv heads, width 64)
            and Llama-3-8B's (32, 8, 128). A ratio is the time over that of bfloat16.
perplexity  SmolLM2 in float32 reads a text through a cache of each kind, in chunks. The text is a file, or Python's
            own reference, as it comes with every Python. bfloat16: keys and values are rounded to it when they come.
fork        four continuations of one prompt: in memory once (`fork(rows=4)`), or a copy for each.
heads       `HeadCache` with the kv heads that the streaming probe says change least, beside as many others (those that
            change most): perplexity, and the share of a repeated random text that is foreseen (induction).
latent      one token of latent attention in its absorbed form: one kv head of width 576, values its first 512 numbers.

Rows of the JSON: part, case, and its figures: seconds by contestant, bytes per token, perplexity, accuracy.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from side_by_side import machine, save, table, take_turns
from torch import Tensor

import regard
from regard import HeadCache, KVCache, models
from regard.heads import probes
from regard.projections import project

CHUNK = 256
SIZES = {"SmolLM2-135M": (9, 3, 64), "Llama-3-8B": (32, 8, 128)}
Row = dict[str, object]
Cache = list[KVCache]


class Rounded(KVCache):
    """A cache whose keys and values are rounded to bfloat16."""

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return super().append(keys.bfloat16().to(keys.dtype), values.bfloat16().to(values.dtype))


KINDS: dict[str, Callable[[], KVCache]] = {
    "float32": KVCache,
    "bfloat16": Rounded,
    "int8": lambda: KVCache(dtype="int8"),
}


def speed(options: argparse.Namespace) -> Iterator[Row]:
    kinds = {"float32": (torch.float32, None), "bfloat16": (torch.bfloat16, None), "int8": (torch.float32, "int8")}
    for name, (heads, groups, width) in SIZES.items():
        for keys in (4096, 32768):
            runs, size = {}, {}
            for kind, (dtype, stored) in kinds.items():
                cache = KVCache(dtype=stored)
                k, v = cache.append(*(torch.randn(1, groups, keys, width).to(dtype) for _ in range(2)))
                q = torch.randn(1, heads, 1, width).to(dtype)
                runs[kind] = lambda q=q, k=k, v=v: regard.attend(q, k, v)
                size[kind] = cache.nbytes / keys
            yield {
                "part": "speed",
                "case": f"{name}, {keys} tokens",
                "seconds": take_turns(runs, seconds=options.seconds),
                "bytes": size,
            }


def english(model: models.Decoder, options: argparse.Namespace) -> Tensor:
    """(1, tokens) of prose."""
    from pydoc_data.topics import topics

    own = "\n\n".join(topics[name] for name in sorted(topics))
    text = Path(options.text).read_text(encoding="utf-8") if options.text else own
    ids = model.encode(text)[:, : options.tokens]
    assert ids.shape[1] == options.tokens, f"the text has {ids.shape[1]} tokens"
    return ids


def losses(model: models.Decoder, ids: Tensor, cache: Cache) -> Tensor:
    """The loss of each token but the first."""
    found = []
    for start in range(0, ids.shape[1] - 1, CHUNK):
        chunk = ids[:, start : start + CHUNK]
        wanted = ids[0, start + 1 : start + 1 + chunk.shape[1]]
        logits = project(model.head, model.hidden(chunk, cache=cache))[0, : len(wanted)]
        found.append(F.cross_entropy(logits.float(), wanted, reduction="none"))
    return torch.cat(found)


def held(cache: Cache) -> float:
    """Bytes per token of the text, of all layers."""
    return sum(part.nbytes + part.shared_nbytes for part in cache) / len(cache[0])


def perplexity(options: argparse.Namespace) -> Iterator[Row]:
    model = models.load("smollm2")
    ids = english(model, options)
    for kind, new in KINDS.items():
        cache = [new() for _ in model.blocks]
        loss = losses(model, ids, cache).mean().item()
        size = held(cache) / (2 if kind == "bfloat16" else 1)  # (it is stored as float32 here)
        yield {
            "part": "perplexity",
            "case": kind,
            "tokens": options.tokens,
            "perplexity": math.exp(loss),
            "bytes": size,
        }


def fork(options: argparse.Namespace) -> Iterator[Row]:
    heads, groups, width = SIZES["SmolLM2-135M"]
    for kind in (None, "int8"):
        for keys in (4096, 32768):
            prompt = KVCache(dtype=kind)
            prompt.append(*(torch.randn(1, groups, keys, width) for _ in range(2)))
            shared, copied = prompt.fork(rows=4), copy.deepcopy(prompt)
            copied.reorder(torch.zeros(4, dtype=torch.long))
            q, runs, size = torch.randn(4, heads, 1, width), {}, {}
            for name, cache in (("shared", shared), ("copied", copied)):
                k, v = cache.append(*(torch.randn(4, groups, 16, width) for _ in range(2)))
                runs[name] = lambda q=q, k=k, v=v: regard.attend(q, k, v)
                size[name] = cache.nbytes + cache.shared_nbytes
            yield {
                "part": "fork",
                "case": f"{kind or 'float32'}, 4 rows, {keys} tokens",
                "seconds": take_turns(runs, seconds=options.seconds),
                "total bytes": size,
            }


def heads(options: argparse.Namespace) -> Iterator[Row]:
    model = models.load("smollm2")
    count, window, first = model.config.num_kv_heads or model.config.num_heads, 64, 4
    ids = english(model, options)
    probe = probes.streaming(model, sinks=first, window=window, length=128, progress=False)
    change = torch.cat([x.unflatten(0, (count, -1)).amax(1) for x in probe.scores.values()])  # of every kv head
    times = probes.repeated(model.config.vocabulary, length=200, batch=1, first=model.config.bos)
    flags: dict[str, Tensor] = {"none forgets": torch.zeros_like(change, dtype=torch.bool)}
    for share in (0.25, 0.5):
        few = int(share * len(change))
        order = change.argsort()
        flags[f"{share:.0%} forget, by the probe"] = torch.zeros_like(flags["none forgets"])
        flags[f"{share:.0%} forget, by the probe"][order[:few]] = True
        flags[f"{share:.0%} forget, those that change most"] = torch.zeros_like(flags["none forgets"])
        flags[f"{share:.0%} forget, those that change most"][order[-few:]] = True
    for name, forget in flags.items():

        def new(forget: Tensor = forget) -> Cache:
            rows = forget.unflatten(0, (-1, count))
            return [HeadCache(row.nonzero()[:, 0].tolist(), window, first) for row in rows]

        cache = new()
        loss = losses(model, ids, cache).mean().item()
        logits = model(times, cache=new())[0, -200:-1]
        accuracy = (logits.argmax(-1) == times[0, -199:]).float().mean().item()
        yield {
            "part": "heads",
            "case": name,
            "window": window,
            "tokens": options.tokens,
            "perplexity": math.exp(loss),
            "induction": accuracy,
            "bytes": held(cache),
        }


def latent(options: argparse.Namespace) -> Iterator[Row]:
    for dtype in (torch.float32, torch.bfloat16):
        for query_heads in (16, 128):
            for keys in (1024, 16384):
                q = torch.randn(1, query_heads, 1, 576).to(dtype)
                k = torch.randn(1, 1, keys, 576).to(dtype)
                v = k[..., :512]
                runs: dict[str, Callable[[], object]] = {
                    kernel: lambda kernel=kernel, q=q, k=k, v=v: regard.attend(q, k, v, kernel=kernel)
                    for kernel in ("native", "blockwise")
                }
                slow: dict[str, Callable[[], object]] = {
                    "two products": lambda q=q, k=k, v=v: (q[:, :, 0] @ k[:, 0].mT * 576**-0.5).softmax(-1) @ v[:, 0],
                    "SDPA": lambda q=q, k=k, v=v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
                }
                if dtype is torch.float32:
                    runs["two products"] = slow.pop("two products")
                seconds = take_turns(runs, seconds=options.seconds)
                if keys == 1024:  # (these take up to seconds; torch's own goes through the keys once per head)
                    seconds |= take_turns(slow, seconds=0, rounds=3)
                case = f"{str(dtype).removeprefix('torch.')}, {query_heads} heads, {keys} tokens"
                yield {"part": "latent", "case": case, "seconds": seconds}


PARTS = {"speed": speed, "perplexity": perplexity, "fork": fork, "heads": heads, "latent": latent}
AGAINST = {"speed": "bfloat16", "fork": "copied", "latent": "native"}


def shown(row: Row) -> list[str]:
    """A row in words."""
    cells = [f"{row['part']}: {row['case']}"]
    if isinstance(seconds := row.get("seconds"), dict):
        one = seconds[AGAINST[str(row["part"])]]
        cells.append(", ".join(f"{name} {time * 1e3:.2f} ms ({time / one:.2f})" for name, time in seconds.items()))
    rest = {k: v for k, v in row.items() if k not in ("part", "case", "seconds")}
    cells += [", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in rest.items())]
    return [cells[0], " ".join(cells[1:])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--text", help="a text file; Python's own reference by default")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=4.0, help="per case")
    parser.add_argument("--json", default="benchmarks/results/caches.json")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    print(machine())
    rows: list[Row] = []
    with torch.inference_mode():
        for name in options.only:
            for row in PARTS[name](options):
                rows.append(row)
                print(*shown(row), sep="  ", flush=True)
    path = Path(options.json)
    before = json.loads(path.read_text())["rows"] if path.exists() else []
    rows = [row for row in before if row["part"] not in options.only] + rows  # other parts stay as they were
    rows.sort(key=lambda row: list(PARTS).index(str(row["part"])))
    print(table(["case", "figures"], [shown(row) for row in rows]))
    save(options.json, rows)


if __name__ == "__main__":
    main()
