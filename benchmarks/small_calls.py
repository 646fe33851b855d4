"""What does a small call cost? Microseconds of `attend` and of torch's `scaled_dot_product_attention` where there is
next to nothing to compute, and of the layer at 1 x 16 tokens beside its peers; and what `watch` adds to a model.

    python benchmarks/small_calls.py [--seconds 3] [--json benchmarks/results/small_calls.json] [--only layer]

A ratio is our time divided by theirs: below 1 we are ahead. For the layer "theirs" is the best peer's of
`benchmarks/layer.py`. Rows of the JSON: case, mode, and the seconds of each contestant.

What `watch` adds is the time watched less the time unwatched of transformers' BERT (sdpa) with 12 narrow heads, of two
layers and of twelve: the slope for a layer more, and what a watch takes however many there are. At 128 tokens a layer
may take less than nothing, for our attention takes the place of PyTorch's.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import layer
import torch
import torch.nn.functional as F
from side_by_side import machine, save, table, take_turns

import regard
from regard.masks import Causal, Padding

FEW, MANY = 2, 12  # layers
SIZES = [(1, 2, 1, 8), (1, 2, 8, 8), (1, 12, 16, 64)]  # B, H, N, D
Contestants = dict[str, Callable[[], object]]


def calls(batch: int, heads: int, tokens: int, width: int, mode: str) -> dict[str, Contestants]:
    """Attention of one size, by name: ours and torch's."""
    learns = mode == "training"
    q, k, v = (torch.randn(batch, heads, tokens, width, requires_grad=learns) for _ in range(3))
    lengths, sinks, down = torch.full((batch,), tokens), torch.zeros(heads), torch.ones(batch, heads, tokens, width)
    keep = (torch.arange(tokens) < lengths[:, None])[:, None, None]
    causal, padding = Causal(), Padding(lengths=lengths)

    def step(attention: Callable[[], torch.Tensor]) -> Callable[[], object]:
        if learns:
            return lambda: torch.autograd.grad(attention(), (q, k, v), down)
        return torch.no_grad()(attention)

    sdpa = F.scaled_dot_product_attention
    return {
        "plain": {"regard": step(lambda: regard.attend(q, k, v)), "SDPA": step(lambda: sdpa(q, k, v))},
        "causal": {
            "regard": step(lambda: regard.attend(q, k, v, mask=causal)),
            "SDPA": step(lambda: sdpa(q, k, v, is_causal=True)),
        },
        "padding": {
            "regard": step(lambda: regard.attend(q, k, v, mask=padding)),
            "SDPA": step(lambda: sdpa(q, k, v, attn_mask=keep)),
        },
        "softcap": {"regard": step(lambda: regard.attend(q, k, v, softcap=30.0))},
        "sinks": {"regard": step(lambda: regard.attend(q, k, v, sinks=sinks))},
    }


def layers(mode: str) -> Contestants:
    """The layer and its peers at 1 x 16."""
    modules = {name: make(0.0) for name, make in layer.PEERS.items()}
    x = torch.randn(1, 16, layer.WIDTH, requires_grad=mode == "training")
    return {name: layer.contestant(module, x, mode == "training") for name, module in modules.items()}


def watching(tokens: int, seconds: float) -> dict[str, float]:
    """Seconds that a watch adds for a layer, and for itself."""
    from transformers import BertConfig, BertModel

    ids = torch.arange(tokens)[None] % 89
    runs: Contestants = {}
    for layers in FEW, MANY:
        sizes = {"hidden_size": 48, "num_attention_heads": 12, "intermediate_size": 48, "num_hidden_layers": layers}
        config = BertConfig(vocab_size=89, attn_implementation="sdpa", **sizes)
        model = BertModel(config, add_pooling_layer=False).eval()

        def watched(model: torch.nn.Module = model) -> None:
            with regard.watch(model):
                model(ids)

        runs[f"blind {layers}"] = torch.inference_mode()(lambda model=model: model(ids))
        runs[f"watched {layers}"] = torch.inference_mode()(watched)
    times = take_turns(runs, seconds=seconds)
    few, many = (times[f"watched {layers}"] - times[f"blind {layers}"] for layers in (FEW, MANY))
    layer = (many - few) / (MANY - FEW)
    return {"a layer": layer, "a watch": few - FEW * layer}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0, help="time spent on each row")
    parser.add_argument("--json", default="benchmarks/results/small_calls.json", help="where the numbers go")
    parser.add_argument("--only", default="", help="rows whose name contains this, such as layer or training")
    options = parser.parse_args()

    torch.manual_seed(0)
    cases: list[tuple[str, str, Callable[[], Contestants]]] = []
    for mode in ("inference", "training"):
        for size in SIZES:
            for name in calls(*size, mode):
                case = f"attend {'x'.join(map(str, size))}, {name}"
                cases.append((case, mode, lambda size=size, name=name, mode=mode: calls(*size, mode)[name]))
        cases.append(("layer 1x16", mode, lambda mode=mode: layers(mode)))
    rows, lines = [], []
    for case, mode, make in cases:
        if options.only not in f"{case}, {mode}":
            continue
        times = take_turns(make(), seconds=options.seconds)
        rows.append({"case": case, "mode": mode, "seconds": times})
        ours, others = times["regard"], {peer: t for peer, t in times.items() if peer != "regard"}
        best = min(others, key=others.__getitem__, default=None)
        theirs = ("", "") if best is None else (f"{others[best] * 1e6:.1f}", f"{ours / others[best]:.2f} ({best})")
        lines.append([f"{case}, {mode}", f"{ours * 1e6:.1f}", *theirs])
        print(" | ".join(lines[-1]), flush=True)
    for tokens in (16, 128):
        if options.only in (case := f"watch at {tokens} tokens"):
            for what, time in watching(tokens, 4 * options.seconds).items():
                rows.append({"case": f"{case}, {what}", "mode": "inference", "seconds": {"regard": time}})
                lines.append([rows[-1]["case"], f"{time * 1e6:.1f}", "", ""])
                print(" | ".join(lines[-1]), flush=True)
    print("\n" + table(["", "ours, us", "theirs, us", "ours / theirs"], lines))
    print("\n" + ", ".join(f"{key} {value}" for key, value in machine().items()))
    if not options.only:
        save(options.json, rows)


if __name__ == "__main__":
    main()
