"""How fast is the layer beside its peers? Width 768, 12 heads, float32, with and without dropout.

    python benchmarks/layer.py [--seconds 3] [--json benchmarks/results/layer.json] [--only 1x2048]

Peers: `nn.MultiheadAttention`, a plain module around `scaled_dot_product_attention`, x-transformers and the self
attention of HF's BERT. All take (B, N, 768), apply their own projections and give (B, N, 768). A ratio is our time
divided by theirs: below 1 we are ahead. Rows of the JSON: case, mode, dropout, and the seconds of each contestant.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
import torch.nn.functional as F
from side_by_side import machine, save, table, take_turns
from torch import Tensor, nn

import regard

WIDTH, HEADS = 768, 12
CASES = [(1, 16), (8, 128), (1, 512), (4, 512), (1, 2048)]


class Torch(nn.Module):
    """`nn.MultiheadAttention` as most people call it."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, dropout=dropout, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


class Plain(nn.Module):
    """The snippet people copy: one projection for q, k, v, then `scaled_dot_product_attention`."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.qkv, self.out, self.dropout = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), dropout

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0.0)
        return self.out(y.transpose(1, 2).flatten(2))


def x_transformers(dropout: float) -> nn.Module:
    from x_transformers.x_transformers import Attention

    class XTransformers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = Attention(WIDTH, heads=HEADS, dim_head=WIDTH // HEADS, dropout=dropout, flash=True)

        def forward(self, x: Tensor) -> Tensor:
            out = self.attention(x)
            return out[0] if isinstance(out, tuple) else out

    return XTransformers()


def bert(dropout: float) -> nn.Module:
    from transformers import BertConfig
    from transformers.models.bert.modeling_bert import BertSelfAttention

    class Bert(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            config = BertConfig(hidden_size=WIDTH, num_attention_heads=HEADS, attention_probs_dropout_prob=dropout)
            config._attn_implementation = "sdpa"
            self.attention, self.dense = BertSelfAttention(config), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.dense(self.attention(x)[0])

    return Bert()


PEERS: dict[str, Callable[[float], nn.Module]] = {
    "regard": lambda dropout: regard.MultiHeadAttention(WIDTH, HEADS, dropout=dropout),
    "nn.MHA": Torch,
    "plain SDPA": Plain,
    "x-transformers": x_transformers,
    "HF BERT": bert,
}


def contestant(module: nn.Module, x: Tensor, training: bool) -> Callable[[], object]:
    """One step: a forward pass, and in training a backward pass to every parameter and to the input."""
    module.train(training)
    wanted = [x, *module.parameters()]

    def infer() -> Tensor:
        with torch.inference_mode():
            return module(x)

    def train() -> object:
        return torch.autograd.grad(module(x).sum(), wanted)

    return train if training else infer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0, help="time spent on each row (more for slow ones)")
    parser.add_argument("--json", default="benchmarks/results/layer.json", help="where the numbers go")
    parser.add_argument("--only", default="", help="rows whose name contains this, such as 1x2048 or training")
    options = parser.parse_args()

    torch.manual_seed(0)
    rows, lines = [], []
    for mode, dropout in (("inference", 0.0), ("training", 0.0), ("training", 0.1)):
        modules = {name: make(dropout) for name, make in PEERS.items()}
        for batch, length in CASES:
            name = f"{mode}{f', dropout {dropout}' if dropout else ''}, {batch}x{length}"
            if options.only not in name:
                continue
            x = torch.randn(batch, length, WIDTH, requires_grad=mode == "training")
            times = take_turns(
                {peer: contestant(module, x, mode == "training") for peer, module in modules.items()},
                seconds=options.seconds,
            )
            ours, others = times["regard"], {peer: t for peer, t in times.items() if peer != "regard"}
            best = min(others, key=others.__getitem__)
            rows.append({"case": f"{batch}x{length}", "mode": mode, "dropout": dropout, "seconds": times})
            ratios = [f"{ours / t:.2f}" for t in others.values()]
            lines.append([name, f"{ours * 1e3:.2f}", *ratios, f"{ours / others[best]:.2f} ({best})"])
            print(f"{name}: {ours * 1e3:.2f} ms, {ours / others[best]:.2f} of the best peer's ({best})", flush=True)
    header = ["our time / theirs", "ours, ms", *(peer for peer in PEERS if peer != "regard"), "best peer"]
    print("\n" + table(header, lines))
    print("\n" + ", ".join(f"{key} {value}" for key, value in machine().items()))
    if not options.only:
        save(options.json, rows)


if __name__ == "__main__":
    main()
