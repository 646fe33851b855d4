"""How much smaller and faster is attention with fewer heads? Against itself with all of them, float32, inference.

    python benchmarks/prune.py [--seconds 4] [--json benchmarks/results/prune.json] [--only smollm2]

Cases: a layer and a model of BERT-base's sizes (12 heads, 12 layers) with 1/4, 1/2 and 3/4 of the heads removed; and a
layer of SmolLM2-135M's (9 heads in 3 groups), where kv heads go too if the groups that are left are of one size, and
are repeated if not ("uneven"). A ratio is the time of the pruned one divided by that of the whole one: below 1 it is
faster. Rows of the JSON: case, and for each contestant its seconds, parameters, heads and kv heads.
"""

from __future__ import annotations

import argparse
import copy
import warnings
from collections.abc import Callable

import torch
from side_by_side import machine, save, table, take_turns
from torch import nn

import regard
from regard.heads.interventions.prune import prune
from regard.models import Encoder, ModelConfig

QUARTERS: dict[str, list[int]] = {
    "whole": [],
    "1/4 removed": [1, 5, 9],
    "1/2 removed": [0, 2, 4, 6, 8, 10],
    "3/4 removed": [0, 1, 2, 4, 5, 6, 8, 9, 10],
}
GROUPS: dict[str, list[int]] = {  # of 9 heads in 3 groups: 0 1 2, 3 4 5, 6 7 8
    "whole": [],
    "2 of 9 removed, uneven": [0, 3],
    "3 of 9 removed": [0, 3, 6],
    "5 of 9 removed": [0, 3, 6, 7, 8],
    "7 of 9 removed": [0, 3, 4, 5, 6, 7, 8],
}


def bert_layer() -> nn.Module:
    return regard.MultiHeadAttention.from_config("bert-base").eval()


def bert_model() -> nn.Module:
    config = ModelConfig(layers=12, embed_dim=768, num_heads=12, vocabulary=101, inner=3072, context=512, order="post")
    return Encoder(config).eval()


def smollm2_layer() -> nn.Module:
    return regard.MultiHeadAttention.from_config("smollm2-135m").eval()


def on_vectors(batch: int, length: int, width: int) -> Callable[[nn.Module], Callable[[], object]]:
    """A run of a layer over vectors (B, N, W)."""
    x = torch.randn(batch, length, width)
    return lambda module: lambda: module(x)


def on_tokens(batch: int, length: int) -> Callable[[nn.Module], Callable[[], object]]:
    """A run of a model over token ids (B, N)."""
    ids = torch.randint(0, 101, (batch, length))
    return lambda model: lambda: model(ids)


def one_more_token(held: int, width: int) -> Callable[[nn.Module], Callable[[], object]]:
    """A run of a layer over one vector more, with a cache that holds others; the new one is forgotten again."""
    first, x = torch.randn(1, held, width), torch.randn(1, 1, width)

    def make(module: nn.Module) -> Callable[[], object]:
        cache = regard.KVCache(held + 1)
        module(first, cache=cache, mask=regard.masks.Causal())

        def run() -> object:
            out = module(x, cache=cache)
            cache.truncate(held)
            return out

        return run

    return make


CASES: list[tuple[str, Callable[[], nn.Module], dict[str, list[int]], Callable]] = [
    ("bert-base layer, 1x128", bert_layer, QUARTERS, on_vectors(1, 128, 768)),
    ("bert-base layer, 8x128", bert_layer, QUARTERS, on_vectors(8, 128, 768)),
    ("bert-base layer, 1x2048", bert_layer, QUARTERS, on_vectors(1, 2048, 768)),
    ("bert-base model, 1x128", bert_model, QUARTERS, on_tokens(1, 128)),
    ("smollm2 layer, 1x512", smollm2_layer, GROUPS, on_vectors(1, 512, 576)),
    ("smollm2 layer, 1x2048", smollm2_layer, GROUPS, on_vectors(1, 2048, 576)),
    ("smollm2 layer, 1 after 2048", smollm2_layer, GROUPS, one_more_token(2048, 576)),
]


def without(module: nn.Module, gone: list[int]) -> nn.Module:
    """A copy with those heads removed, from every layer."""
    count = sum(isinstance(part, regard.MultiHeadAttention) for part in module.modules())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # uneven groups are meant
        return prune(copy.deepcopy(module), dict.fromkeys(range(count), gone))


def count_heads(module: nn.Module) -> tuple[int, int]:
    layer = next(part for part in module.modules() if isinstance(part, regard.MultiHeadAttention))
    return layer.num_heads, layer.num_kv_heads


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=4.0, help="time spent on each case (more for slow ones)")
    parser.add_argument("--json", default="benchmarks/results/prune.json", help="where the numbers go")
    parser.add_argument("--only", default="", help="cases whose name contains this, such as smollm2")
    options = parser.parse_args()

    torch.manual_seed(0)
    rows, lines = [], []
    for case, make, plans, runs in CASES:
        if options.only not in case:
            continue
        module = make()
        contestants = {name: without(module, gone) for name, gone in plans.items()}
        times = take_turns({name: runs(pruned) for name, pruned in contestants.items()}, seconds=options.seconds)
        sizes = {name: sum(p.numel() for p in pruned.parameters()) for name, pruned in contestants.items()}
        counts = {name: count_heads(pruned) for name, pruned in contestants.items()}
        heads, kv_heads = ({name: pair[i] for name, pair in counts.items()} for i in (0, 1))
        rows.append({"case": case, "seconds": times, "parameters": sizes, "heads": heads, "kv_heads": kv_heads})
        ratios = {name: f"{seconds / times['whole']:.2f}" for name, seconds in times.items()}
        for name, (h, g) in counts.items():
            lines.append(
                [
                    f"{case}, {name}",
                    f"{h}/{g}",
                    f"{sizes[name]:,}",
                    f"{sizes[name] / sizes['whole']:.2f}",
                    f"{times[name] * 1e3:.2f}",
                    ratios[name],
                ]
            )
        print(f"{case}: {', '.join(ratios.values())}", flush=True)
    header = ["pruned / whole", "heads/kv", "parameters", "ratio", "ms", "time ratio"]
    print("\n" + table(header, lines))
    print("\n" + ", ".join(f"{key} {value}" for key, value in machine().items()))
    if not options.only:
        save(options.json, rows)


if __name__ == "__main__":
    main()
