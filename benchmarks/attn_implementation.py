"""Models of transformers with `attn_implementation="regard"` beside the same models with "sdpa" and "eager".

    python benchmarks/attn_implementation.py [--models smollm2 bert mistral gemma2] [--seconds 6]

    prefill   a forward pass of N tokens, without gradient
    decode    one token more, after N in a cache
    train     forward and backward of 2 texts of N tokens; with dropout 0.1 on the weights in the rows that say so

Whole models, whole forward passes: embedding, projections, head and Python included. Contestants take turns in one run;
times are medians, the table shows their time / ours. "sdpa" refuses gemma2's softcap. The largest difference between
the outputs of regard and of sdpa (or eager), relative to the largest output, is of the same run.

Rows of the JSON: model, what, tokens, seconds of each contestant (null where it did not run), and the difference.
(The file is not called transformers.py, for no script beside it could then import transformers.)
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from side_by_side import machine, save, table, take_turns
from torch import Tensor
from watching import text

import regard.integrations.transformers  # noqa: F401 (it registers itself)
from regard import models

CONTESTANTS = ("regard", "sdpa", "eager")
_SMALL = {
    "hidden_size": 768,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "intermediate_size": 2048,
    "num_hidden_layers": 4,
    "vocab_size": 30522,
    "max_position_embeddings": 32768,
}


def smollm2(**options: Any) -> Any:
    from transformers import AutoModelForCausalLM

    path = models.source("smollm2", check=False).path
    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32, **options)


def bert(**options: Any) -> Any:
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    dropout = options.pop("attention_dropout", 0.0)
    config = BertConfig(
        num_hidden_layers=4,
        max_position_embeddings=4096,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=dropout,
        **options,
    )
    return BertModel(config, add_pooling_layer=False)


def _decoder(kind: str, **sizes: Any) -> Callable[..., Any]:
    def build(**options: Any) -> Any:
        import transformers

        torch.manual_seed(0)
        config = getattr(transformers, f"{kind}Config")(**_SMALL | sizes | options)
        return getattr(transformers, f"{kind}ForCausalLM")(config)

    return build


MODELS: dict[
    str, tuple[str, Callable[..., Any], bool]
] = {  # the last: whether it decodes (a cache that slides cannot be cut back)
    "smollm2": ("SmolLM2-135M", smollm2, True),
    "bert": ("BERT-base sizes, 4 layers", bert, False),
    "mistral": ("Mistral, window 512, 4 layers of width 768", _decoder("Mistral", sliding_window=512), False),
    "gemma2": (
        "Gemma 2, softcap, window 512, 4 layers of width 768",
        _decoder("Gemma2", sliding_window=512, query_pre_attn_scalar=64),
        False,
    ),
}


def forward(model: Any, ids: Tensor) -> Tensor:
    options = {"logits_to_keep": 1, "use_cache": False} if hasattr(model, "lm_head") else {}
    return model(input_ids=ids, **options)[0]


def prefill(built: dict[str, Any], tokens: int) -> dict[str, Callable[[], Any]]:
    ids = text(tokens)
    return {who: torch.inference_mode()(lambda m=model: forward(m, ids)) for who, model in built.items()}


def decode(built: dict[str, Any], tokens: int) -> dict[str, Callable[[], Any]]:
    """One token at a time; the cache is cut to the same length before each."""
    ids, runs = text(tokens), {}
    for who, model in built.items():
        with torch.inference_mode():
            cache = model(input_ids=ids[:, :-1], use_cache=True, logits_to_keep=1).past_key_values

        @torch.inference_mode()
        def step(model: Any = model, cache: Any = cache) -> Tensor:
            out = model(input_ids=ids[:, -1:], past_key_values=cache, use_cache=True)[0]
            cache.crop(-1)
            return out

        runs[who] = step
    return runs


def train(built: dict[str, Any], tokens: int) -> dict[str, Callable[[], Any]]:
    ids = text(2 * tokens).view(2, tokens)

    def step(model: Any) -> Tensor:
        model.zero_grad(set_to_none=True)
        out = model(input_ids=ids)[0]
        out.float().square().mean().backward()
        return out.detach()

    return {who: lambda m=model: step(m) for who, model in built.items()}


CASES: dict[str, tuple[Any, tuple[int, ...], float]] = {
    "prefill": (prefill, (128, 512, 2048), 0.0),
    "decode": (decode, (512, 4096), 0.0),
    "train": (train, (512,), 0.0),
    "train, dropout 0.1": (train, (512,), 0.1),
}


def measure(name: str, what: str, tokens: int, seconds: float) -> dict[str, Any]:
    """One row of the JSON."""
    title, build, _ = MODELS[name]
    case, _, dropout = CASES[what]
    built: dict[str, Any] = {}
    for who in CONTESTANTS:
        if who == "sdpa" and name == "gemma2":
            continue
        options: dict[str, Any] = {"attn_implementation": who}
        if dropout:
            options["attention_dropout"] = dropout
        built[who] = build(**options).train(what.startswith("train"))
    runs = case(built, tokens)
    ours, theirs = runs["regard"](), runs["sdpa" if "sdpa" in runs else "eager"]()
    difference = None if dropout else float((ours - theirs).abs().max() / theirs.abs().max())
    times = take_turns(runs, seconds=seconds, rounds=5)
    del built, runs
    gc.collect()
    return {"model": title, "what": what, "tokens": tokens, "difference": difference} | {
        who: times.get(who) for who in CONTESTANTS
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS))
    parser.add_argument("--cases", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--json", default=str(Path(__file__).with_name("results") / "attn_implementation.json"))
    options = parser.parse_args()
    torch.set_num_threads(2)
    print(machine())
    rows: list[dict[str, Any]] = []
    for name in options.models:
        for what in options.cases:
            if what == "decode" and not MODELS[name][2]:
                continue
            if what.startswith("train") and name == "smollm2":
                continue  # (its head alone takes most of a step)
            for tokens in CASES[what][1]:
                rows.append(measure(name, what, tokens, options.seconds))
                print(_line(rows[-1]), flush=True)
                if options.json:
                    save(options.json, rows)
    print(
        table(["their time / ours", "what", "tokens", "ours", "sdpa", "eager", "difference"], [_line(r) for r in rows])
    )


def _line(row: dict[str, Any]) -> list[str]:
    ratios = ["" if row[who] is None else f"{row[who] / row['regard']:.2f}" for who in CONTESTANTS[1:]]
    difference = "" if row["difference"] is None else f"{row['difference']:.0e}"
    return [row["model"], row["what"], f"{row['tokens']:,}", f"{row['regard'] * 1e3:,.1f} ms", *ratios, difference]


if __name__ == "__main__":
    main()
