"""What does `regard.watch` cost? A model that is watched beside the same model unwatched, and beside its eager maps.

    python benchmarks/watching.py [--models bert minilm gemma2] [--lengths 16 128 512 2048 8192] [--seconds 8]

    blind     the model in evaluation mode, nobody looks; models of transformers with their sdpa attention, if they have
              one (Gemma 2 needs its eager one, GPT-J's is written by hand: up to 2,048 tokens)
    watched   `with regard.watch(model) as seen: model(ids)`, default measures, beginning and ending the watch included
    exact     the same with `exact=True`: the model's own attention function computes, and we look beside it
    roles     `seen.roles(atlas=False)` of the record alone, up to 2,048 tokens
    eager     transformers' eager attention with `output_attentions=True`, and nothing done with the N x N maps
    torch     of our own models, whose blind run has our kernel: blind with PyTorch's (SDPA) in its place
    peer      of our own models: the same model in transformers, blind, with its sdpa attention
    nnsight   where it is installed: the maps of all layers of BERT saved by nnsight, which needs eager attention

Contestants take turns in one run; times are medians, of 7 turns at least (of 3 from 2,048 tokens on), and the tables
show ratios to blind. The largest difference between the outputs of `watched` and `blind`, relative to the largest
output, is of the same run. Token ids follow Zipf's law, so that induction and duplicate find as many copies as in a
real text; at most 8,192 tokens. Eager is left out where its maps of all layers take over 4 GiB. glibc keeps what is
freed (`keep_freed_memory`), for all contestants.

Rows of the JSON: model, tokens, seconds of each contestant (null where it did not run), and the difference.
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from side_by_side import keep_freed_memory, machine, save, table, take_turns
from torch import Tensor, nn

import regard
from regard import models

VOCABULARY, LAYERS = 30522, 4
LENGTHS = (16, 128, 512, 2048, 8192)
LIMIT = 4 * 2**30  # bytes of eager maps
CONTESTANTS = ("blind", "watched", "exact", "eager", "torch", "peer", "nnsight", "roles")


def text(tokens: int) -> Tensor:
    """Token ids (1, N) as frequent as words are: the r-th by 1 / (r + 2.7)."""
    frequency = 1 / (torch.arange(VOCABULARY) + 3.7)
    return torch.multinomial(frequency, tokens, replacement=True, generator=torch.Generator().manual_seed(0))[None]


def hidden(output: Any) -> Tensor:
    """The first tensor that a model returns."""
    return output if isinstance(output, Tensor) else output[0]


def bert(implementation: str) -> nn.Module:
    """BERT-base's sizes with 4 layers, random weights, in transformers."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(num_hidden_layers=LAYERS, max_position_embeddings=8192, attn_implementation=implementation)
    return BertModel(config, add_pooling_layer=False).eval()


def gemma2(_: str) -> nn.Module:
    """Gemma 2's code with BERT-base's sizes, 4 layers and random weights, in transformers: eager, which it needs for
    its softcap."""
    from transformers import Gemma2Config, Gemma2Model

    torch.manual_seed(0)
    sizes = {"hidden_size": 768, "num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 64}
    config = Gemma2Config(
        vocab_size=VOCABULARY, num_hidden_layers=LAYERS, intermediate_size=2048, sliding_window=512, **sizes
    )
    return Gemma2Model(config).eval()


def gptj(_: str) -> nn.Module:
    """GPT-J's code, whose attention is written by hand, with BERT-base's sizes, 4 layers and random weights."""
    from transformers import GPTJConfig, GPTJModel

    torch.manual_seed(0)
    sizes = {"n_embd": 768, "n_head": 12, "n_layer": LAYERS, "n_positions": 2048, "rotary_dim": 32}
    config = GPTJConfig(vocab_size=VOCABULARY, bos_token_id=1, eos_token_id=2, **sizes)
    return GPTJModel(config).eval()


def minilm(implementation: str) -> nn.Module:
    """MiniLM's sizes and weights in transformers; positions past its 512 are random."""
    from transformers import AutoModel

    path = models.source("minilm", check=False).path
    peer = AutoModel.from_pretrained(path, attn_implementation=implementation).eval()
    return _with_positions(peer.embeddings, "position_embeddings", peer)


def minilm_regard(_: str) -> nn.Module:
    """MiniLM on regard's layer; positions past its 512 are random."""
    model = models.load("minilm")
    model.embedding.context = LENGTHS[-1]
    return _with_positions(model.embedding, "places", model)


def _with_positions(owner: nn.Module, name: str, model: nn.Module) -> nn.Module:
    """The model with room for 8,192 positions: the trained ones, and random ones after them."""
    trained: Any = getattr(owner, name)
    wide = nn.Embedding(LENGTHS[-1], trained.weight.shape[1])
    with torch.no_grad():
        wide.weight.normal_(std=0.02)
        wide.weight[: trained.weight.shape[0]] = trained.weight
    setattr(owner, name, wide)
    for buffer in ("position_ids", "token_type_ids"):
        if hasattr(owner, buffer):
            setattr(owner, buffer, torch.arange(LENGTHS[-1])[None] * (buffer == "position_ids"))
    return model


def smollm2(implementation: str) -> nn.Module:
    """SmolLM2-135M in transformers: the model below its head."""
    from transformers import AutoModelForCausalLM

    path = models.source("smollm2", check=False).path
    options = {"gguf_file": path.name, "dtype": torch.float32, "attn_implementation": implementation}
    return AutoModelForCausalLM.from_pretrained(path.parent, **options).eval().model


def smollm2_regard(_: str) -> nn.Module:
    """SmolLM2-135M on regard's layer: the model below its head."""
    return _Hidden(models.load("smollm2"))


class _Hidden(nn.Module):
    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, ids: Tensor) -> Tensor:
        return self.decoder(ids, head=False)


MODELS: dict[str, tuple[str, Callable[[str], nn.Module]]] = {
    "bert": ("BERT-base sizes, 4 layers, transformers", bert),
    "minilm": ("MiniLM, transformers", minilm),
    "minilm-regard": ("MiniLM, regard", minilm_regard),
    "smollm2": ("SmolLM2, transformers", smollm2),
    "smollm2-regard": ("SmolLM2, regard", smollm2_regard),
    "gemma2": ("Gemma 2's code (eager), BERT-base sizes, 4 layers, transformers", gemma2),
    "gptj": ("GPT-J's code (by hand), BERT-base sizes, 4 layers, transformers", gptj),
}
LONGEST = {"gemma2": 2048, "gptj": 2048}  # they build maps, watched or not


def contestants(name: str, build: Callable[[str], nn.Module], ids: Tensor) -> dict[str, Callable[[], object]]:
    """What takes turns on one text."""
    model = build("sdpa")

    def watched(**options: Any) -> Tensor:
        with regard.watch(model, **options) as seen:
            out = hidden(model(ids))
        assert not seen.unseen, seen.unseen
        return out

    runs: dict[str, Callable[[], object]] = {
        "blind": lambda: hidden(model(ids)),
        "watched": watched,
        "exact": functools.partial(watched, exact=True),
    }
    if ids.shape[1] <= (512 if name == "gptj" else 2048):  # (of what is written by hand, weights are kept for roles)
        with regard.watch(model) as seen, torch.inference_mode():
            model(ids)
        runs["roles"] = functools.partial(seen.roles, atlas=False)
    if name.endswith("regard"):
        theirs = build("")
        for module in theirs.modules():
            if isinstance(module, regard.MultiHeadAttention):
                module.kernel = "fused"
        runs["torch"] = lambda: hidden(theirs(ids))
        peer = MODELS[name.removesuffix("-regard")][1]("sdpa")
        runs["peer"] = lambda: hidden(peer(ids))
    elif _bytes_of_maps(model, ids.shape[1]) <= LIMIT:
        eager = build("eager")
        runs["eager"] = lambda: eager(ids, output_attentions=True).attentions[-1]
        if name == "bert" and importlib.util.find_spec("nnsight") is not None:
            runs["nnsight"] = lambda: nnsight_maps(eager, ids)
    return {who: torch.inference_mode()(run) for who, run in runs.items()}


def nnsight_maps(model: nn.Module, ids: Tensor) -> list[Tensor]:
    """The N x N maps of all layers of a BERT of transformers, saved by nnsight."""
    import nnsight

    traced: Any = nnsight.NNsight(model)
    with traced.trace(ids):
        maps = nnsight.save([layer.attention.self.output[1] for layer in traced.encoder.layer])
    return list(maps)


def _bytes_of_maps(model: nn.Module, tokens: int) -> int:
    config: Any = model.config
    return config.num_hidden_layers * config.num_attention_heads * tokens**2 * 4


def measure(name: str, tokens: int, seconds: float) -> dict[str, Any]:
    """One row of the JSON."""
    title, build = MODELS[name]
    runs = contestants(name, build, text(tokens))
    blind, watched = runs["blind"](), runs["watched"]()
    difference = float((watched - blind).abs().max() / blind.abs().max())  # type: ignore[operator]
    if tokens > 2048:
        runs.pop("exact")
    times = take_turns(runs, seconds=seconds, rounds=3 if tokens >= 2048 else 7)
    gc.collect()
    return {"model": title, "tokens": tokens, "difference": difference} | {who: times.get(who) for who in CONTESTANTS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS))
    parser.add_argument("--lengths", nargs="*", type=int, default=list(LENGTHS))
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--json", default=str(Path(__file__).with_name("results") / "watching.json"))
    options = parser.parse_args()
    torch.set_num_threads(2)
    print(machine() | {"keeps freed memory": keep_freed_memory()})
    rows: list[dict[str, Any]] = []
    for name in options.models:
        for tokens in [n for n in options.lengths if n <= LONGEST.get(name, n)]:
            rows.append(measure(name, tokens, options.seconds))
            print(_line(rows[-1]), flush=True)
            if options.json:
                save(options.json, rows)
    header = ["time / blind", "tokens", *CONTESTANTS, "difference"]
    print(table(header, [_line(row) for row in rows]))


def _line(row: dict[str, Any]) -> list[str]:
    ratios = ["" if row[who] is None else f"{row[who] / row['blind']:.2f}" for who in CONTESTANTS[1:]]
    blind = f"{row['blind'] * 1e3:,.1f} ms"
    return [row["model"], f"{row['tokens']:,}", blind, *ratios, f"{row['difference']:.0e}"]


if __name__ == "__main__":
    main()
