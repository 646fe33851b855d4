"""`regard` in the terminal. Thin: each verb is one library call.

regard models                      what is installed
regard describe smollm2            the walk of a text through one layer, with real shapes
regard embed "a cat" "a kitten"    sentence embeddings, and how alike they are
regard generate "Once upon a"      text, as it is written
regard look "The cat that I saw"   what every head attends to: in the terminal, in a page, in a figure
regard serve                       the same page, live: type a text, pick a model, see it
regard heads "The cat that I saw"  what each head does: its role, with score and baseline
regard ablate "The cat that I saw" which heads matter to a text; or what happens without some of them
regard prune small.safetensors     a smaller model, without the heads that matter least
regard bench                       how fast this machine is: the kernels, or a layer over several processes
regard doctor                      versions, what the CPU can do, which kernels there are and why not the others
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import webbrowser
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch

from regard import __version__, doctor, draw, measures, models
from regard import bench as benches
from regard import heads as lens
from regard.errors import bad_value, missing_extra, printable
from regard.heads.progress import told, track
from regard.layer import MultiHeadAttention

try:
    import typer
    from rich.console import Console
    from rich.table import Table
except ImportError as _error:
    raise missing_extra(_error.name or "typer", "cli") from _error

__all__ = ["app", "main"]

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_out = Console(highlight=False, soft_wrap=True)
_aside = Console(stderr=True, highlight=False)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}

Text = Annotated[str, typer.Argument(help="A text, a file with one, or - for standard input.")]
Model = Annotated[str, typer.Option("--model", "-m", help="minilm, smollm2, a folder, or a GGUF file.")]
Dtype = Annotated[str | None, typer.Option(help=f"{', '.join(_DTYPES)}; as stored by default.")]
Check = Annotated[bool, typer.Option("--check/--no-check", help="Compare embedded weights with their known SHA-256.")]


def _say_version(asked: bool) -> None:
    if asked:
        print(f"regard {__version__}")
        raise typer.Exit


@app.callback()
def everywhere(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_say_version, help="Say which version this is.")
    ] = False,
) -> None:
    """Multi-head attention that you can see into."""


@app.command(name="models")
def list_models() -> None:
    """What is installed: shapes and heads; and how to install the rest."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("name", "what", "layers x heads", "width", "context", "parameters", "file"):
        right = column in ("width", "context", "parameters", "file")
        table.add_column(column, justify="right" if right else "left", no_wrap=True)
    missing = []
    for name, embedded in models.EMBEDDED.items():
        if embedded.installed() is None:
            missing.append(embedded)
            continue
        found = models.source(name, check=False)
        model, config = models.blank(found), found.config
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
            f"{found.size / 2**20:,.0f} MB",
        )
    if table.row_count:
        _out.print(table)
    for embedded in missing:
        _out.print(f"{embedded.name}: not installed ({embedded.about})\n  {embedded.install}", markup=False)
    families = ", ".join(models.FAMILIES)
    _out.print(f"\nAlso any folder with config.json and safetensors of the families {families},")
    _out.print("and GGUF files of the Llama family: regard describe PATH")


@app.command()
def describe(
    model: Annotated[str, typer.Argument(help="minilm, smollm2, a folder, or a GGUF file.")] = "minilm",
    tokens: Annotated[int, typer.Option(min=1, help="The length of the text.")] = 128,
) -> None:
    """The walk of a text through one layer, with real shapes and sizes. No weight is read."""
    _out.print(models.blank(model).describe(tokens), markup=False)


@app.command()
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
    """Sentence embeddings: how alike the texts are, or the vectors themselves."""
    lines = _lines(texts)
    encoder = _load(model, dtype, check)
    if not isinstance(encoder, models.Encoder):
        raise ValueError(f"model: expected an encoder, received {model!r}, a decoder; remedy: regard generate")
    vectors = encoder.embed(lines, progress=partial(track, what="Embedding"))
    if out is not None:
        from safetensors.torch import save_file

        save_file({"embeddings": vectors}, out)
        _aside.print(f"{tuple(vectors.shape)} written to {out}", markup=False)
    elif as_json:
        print(json.dumps(vectors.tolist()))
    else:
        _print_similarities(lines, vectors.float())


@app.command()
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
    """Text after a beginning, as it is written."""
    start = _text(text)
    decoder = _load(model, dtype, check)
    if not isinstance(decoder, models.Decoder):
        raise ValueError(f"model: expected a decoder, received {model!r}, an encoder; remedy: regard embed")
    cache = None if window is None else decoder.new_cache(window)
    for piece in decoder.stream(
        start,
        max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        stop=stop or (),
        cache=cache,
    ):
        print(printable(piece, lines=True) if sys.stdout.isatty() else piece, end="", flush=True)
    print()


@app.command()
def look(
    text: Text,
    model: Model = "minilm",
    layer: Annotated[int | None, typer.Option(help="All heads of this layer, large.")] = None,
    head: Annotated[int | None, typer.Option(help="This head of the layer, with its strongest links.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write the page, one file that opens anywhere.")] = None,
    png: Annotated[Path | None, typer.Option(help="Write a figure: .png, .svg or .pdf.")] = None,
    open_page: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
    generate: Annotated[int, typer.Option("--generate", "-n", min=0, help="Tokens that a decoder goes on for.")] = 16,
    without: Annotated[
        list[str] | None, typer.Option(help="Compare with the model without this head, as layer.head; may be repeated.")
    ] = None,
    against: Annotated[str | None, typer.Option(help="Compare with another text.")] = None,
    dtype: Dtype = None,
    check: Check = True,
) -> None:
    """What every head attends to: a picture in the terminal at once, the page and a figure on request."""
    if head is not None and layer is None:
        raise bad_value("head", expected="a layer with it", received="none", remedy="--layer 0 --head 2")
    if (without or against) and html is None and not open_page:
        raise bad_value(
            "--without and --against", expected="a page to compare in", received="none", remedy="--html FILE, or --open"
        )
    written, other = _text(text), None if against is None else _text(against)
    loaded = _load(model, dtype, check)
    more = generate if isinstance(loaded, models.Decoder) else 0

    def read(what: str) -> lens.Record:
        with told("Looking") as progress:
            return draw.read(loaded, None, what, generate=more, progress=progress)

    seen = read(written)
    draw.terminal(seen, layer=layer, head=head)
    if seen.generated is not None:
        _out.print(f"\ngenerated: {printable(seen.generated, lines=True)}", markup=False)
    records = {_short(written): seen}
    if other is not None:
        records[_short(other)] = read(other)
    if without:
        with lens.ablate(loaded, {**_heads_of(without)}):
            records[f"without {', '.join(without)}"] = read(written)
    if png is not None:
        draw.figure(seen, path=png, layer=layer, head=head)
        _aside.print(f"figure: {png}", markup=False)
    if html is not None or open_page:
        where = html or Path(tempfile.mkdtemp(prefix="regard-")) / "look.html"
        with told("Drawing") as progress:
            draw.page(records, path=where, title=f"{model}: {_short(written, 60)}", progress=progress)
        _aside.print(f"page: {where.resolve()} ({where.stat().st_size / 1e6:.1f} MB)", markup=False)
        if open_page:
            webbrowser.open(where.resolve().as_uri())


@app.command()
def serve(
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8808,
    model: Annotated[
        list[str] | None,
        typer.Option("--model", "-m", help="A model to offer: a name, a folder, a GGUF file; may be repeated."),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Who may connect: this machine only, unless you say otherwise.")
    ] = "127.0.0.1",
    open_page: Annotated[bool, typer.Option("--open", help="Open it in the browser.")] = False,
) -> None:
    """The page, live on this machine: type a text, pick a model, see what its heads attend to."""
    from regard.serve import serve as run

    offered = model or [name for name, embedded in models.EMBEDDED.items() if embedded.installed() is not None]
    run(offered, host=host, port=port, open_browser=open_page)


@app.command()
def heads(
    text: Text = "",
    model: Model = "minilm",
    treebank: Annotated[
        Path | None, typer.Option(help="A CoNLL-U file: which heads follow which dependency relations.")
    ] = None,
    probe: Annotated[
        bool, typer.Option("--probe", help="Look at random tokens, repeated: induction heads stand out.")
    ] = False,
    all_measures: Annotated[bool, typer.Option("--all", help="Every measure of every head.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The same as JSON.")] = False,
    save: Annotated[Path | None, typer.Option(help="Write the record to a safetensors file.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="At most so many sentences of the treebank.")] = None,
    dtype: Dtype = None,
    check: Check = True,
) -> None:
    """What each head does: its role, with score and baseline; and what it follows in a treebank."""
    if not (text or treebank or probe):
        raise ValueError("text: expected a text, a file, --probe or --treebank, received none of them")
    if text and probe:
        raise bad_value(
            "text",
            expected="none beside --probe, which looks at random tokens",
            received=repr(text),
            remedy="one of the two",
        )
    written = _text(text) if text else ""
    loaded = _load(model, dtype, check)
    found: dict[str, Any] = {}
    if text or probe:
        seen = lens.probes.induction(loaded) if probe else _watched(loaded, written)
        if save is not None:
            seen.save(save)
            _aside.print(f"written to {save}", markup=False)
        found["heads"] = seen.table() if all_measures else seen.roles()
    if treebank is not None:
        found["syntax"] = lens.syntax(loaded, treebank, limit=limit)
    if as_json:
        print(
            json.dumps({name: list(x if all_measures and name == "heads" else x.table()) for name, x in found.items()})
        )
        return
    for part in found.values():
        _out.print(str(part), markup=False, soft_wrap=True)


@app.command()
def ablate(
    text: Text,
    head: Annotated[list[str] | None, typer.Argument(help="Heads to leave out, as layer.head: 3.5 7.0")] = None,
    model: Model = "minilm",
    mode: Annotated[str, typer.Option(help="zero, or mean.")] = "zero",
    quick: Annotated[bool, typer.Option("--quick", help="By gradients, in one pass (decoders).")] = False,
    top: Annotated[int, typer.Option(min=1, help="How many heads to show.")] = 12,
    dtype: Dtype = None,
    check: Check = True,
) -> None:
    """Which heads matter to a text, one left out after another; or what happens without some of them.

    Of a decoder (-m smollm2) also what it then writes."""
    chosen = _heads_of(head or [])
    lines = [_text(text)]
    loaded = _load(model, dtype, check)
    decoder = isinstance(loaded, models.Decoder)
    what = "nats per token" if decoder else "1 - cosine with the intact embedding"
    if not head:
        found = lens.effects(loaded, lines, quick=quick)
        gradients = quick and decoder  # (as in `effects`: where nothing has moved, those of an encoder are 0)
        _out.print(
            "Sensitivity of the loss to each head:" if gradients else f"How much more {what}, without each head:"
        )
        _out.print(str(lens.Table(found.table()[:top])), markup=False)
        return
    whole, without = lens.effect(loaded, lines, chosen, mode)
    _out.print(f"{what}: {whole:.4f} with all heads, {without:.4f} without {', '.join(head)}")
    if decoder:
        for said, changes in (("with all heads", {}), ("without", chosen)):
            with lens.ablate(loaded, changes, mode=mode):  # type: ignore[arg-type]
                _out.print(printable(f"{said}: {lines[0]}|{loaded.generate(lines[0], 24)}", lines=True), markup=False)


@app.command()
def prune(
    out: Annotated[Path, typer.Argument(help="The safetensors file to write.")],
    head: Annotated[list[str] | None, typer.Argument(help="Heads to remove, as layer.head: 3.5 7.0")] = None,
    model: Model = "minilm",
    count: Annotated[int | None, typer.Option(min=1, help="Remove so many, those that matter least to --text.")] = None,
    text: Annotated[list[str] | None, typer.Option(help="A text or a file by which to judge; may be repeated.")] = None,
    dtype: Dtype = None,
    check: Check = True,
) -> None:
    """A smaller model, without some heads: written to a file that `heads.load_pruned` reads."""
    if (head is None) == (count is None):
        raise ValueError(
            "heads: expected either heads as layer.head or --count, received " + ("both" if head else "none")
        )
    lines = [_text(one) for one in text or ["The quick brown fox jumps over the lazy dog, and nobody knows why."]]
    loaded = _load(model, dtype, check)
    names = [name for name, module in loaded.named_modules() if isinstance(module, MultiHeadAttention)]
    if count is not None:
        chosen = lens.effects(loaded, lines, quick=True).least(count)
    else:
        chosen = {names[layer]: several for layer, several in _heads_of(head or [], len(names)).items()}
    loss, before = lens.loss_of(loaded, lines), sum(p.numel() for p in loaded.parameters())
    with torch.no_grad():
        whole = sum(loss(loaded, i).item() for i in range(len(lines))) / len(lines)
        lens.prune(loaded, chosen)
        without = sum(loss(loaded, i).item() for i in range(len(lines))) / len(lines)
    lens.save_pruned(loaded, chosen, out)
    after, what = sum(p.numel() for p in loaded.parameters()), "nats per token"
    what = what if isinstance(loaded, models.Decoder) else "1 - cosine with the intact embedding"
    for layer, several in chosen.items():
        _out.print(f"{layer}: without heads {', '.join(map(str, several))}", markup=False)
    _out.print(f"{before:,} parameters, now {after:,}; {what}: {whole:.4f}, now {without:.4f}")
    _out.print(f"written to {out}", markup=False)


@app.command()
def bench(
    distributed: Annotated[
        bool, typer.Option("--distributed", help=f"One layer over several processes: {benches.COMMAND}")
    ] = False,
    tokens: Annotated[int, typer.Option(min=1, help="The length of the sequence.")] = 4096,
    heads: Annotated[int, typer.Option(min=1, help="Query heads.")] = 12,
    kv_heads: Annotated[int | None, typer.Option(min=1, help="Key and value heads; as many by default.")] = None,
    head_dim: Annotated[int, typer.Option(min=1, help="The width of a head.")] = 64,
    causal: Annotated[bool, typer.Option("--causal/--no-causal", help="Each token sees those before it only.")] = True,
    repeats: Annotated[int, typer.Option(min=1, help="Turns of each contestant; medians are shown.")] = 5,
    timeout: Annotated[float, typer.Option(help="Seconds that a process waits for another.")] = 60.0,
    as_json: Annotated[bool, typer.Option("--json", help="For programs: times in seconds, sizes in bytes.")] = False,
) -> None:
    """How fast this machine is: the kernels beside torch's own, or one layer over several processes beside one."""
    sizes: dict[str, Any] = {
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "causal": causal,
        "repeats": repeats,
    }
    if not distributed:
        rows = benches.kernels(sorted({max(1, tokens // 16), max(1, tokens // 4), tokens}), **sizes)
        if as_json:
            typer.echo(json.dumps([asdict(row) for row in rows], indent=2))
        else:
            _print_kernels(rows)
        return
    report = benches.distributed(tokens=tokens, timeout=timeout, **sizes)
    if report.rank:
        return
    if as_json:
        typer.echo(json.dumps(asdict(report), indent=2))
    else:
        _print_report(report)


@app.command(name="doctor")
def examine(as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False) -> None:
    """Versions, what the CPU can do, which kernels there are and why not the others."""
    found = doctor.examine()
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    width = max(len(name) for lines in found.values() for name in lines)
    for section, lines in found.items():
        _out.print(section, style="bold")
        for name, value in lines.items():
            _out.print(f"  {name:<{width}}  {value}", markup=False)


def _text(given: str) -> str:
    """A text as it is, from standard input for -, or what a file of that name holds."""
    held = sys.stdin.read() if given == "-" else _of_file(given)
    return given if held is None else held


def _lines(given: list[str]) -> list[str]:
    """Texts as they are; of standard input for -, and of a file, each line is one."""
    lines: list[str] = []
    for one in given:
        held = sys.stdin.read() if one == "-" else _of_file(one)
        lines += [one] if held is None else held.splitlines()
    if not lines:
        raise ValueError("texts: expected at least one, received none")
    return lines


def _of_file(given: str) -> str | None:
    """What a file of this name holds; None where it is a text and no name. One word with a slash or a suffix is taken
    for a name."""
    try:
        path = Path(given)
        there = len(given) < 4096 and path.exists()
    except (OSError, ValueError):  # no name of a file: too long for one, or with a character that none has
        return None
    named = re.fullmatch(r"\S*[/\\]\S*|\S+\.[A-Za-z]\w{0,9}", given) is not None
    if not there and not named:
        return None
    if not there:
        raise bad_value(
            "text",
            expected="a text, or a file that is there",
            received=f"no such file: {given}",
            remedy="for a text that looks like a file's name, give - and the text by standard input",
        )
    if path.is_dir():
        if not named:
            return None  # (a word may be the name of a folder, too)
        raise bad_value("text", expected="a text, or a file with one", received=f"a folder: {given}")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise bad_value("text", expected="a file of text in UTF-8", received=f"other bytes in {given}") from None


def _short(text: str, length: int = 40) -> str:
    """The beginning of a text, in one line."""
    line = " ".join(text.split())
    return line if len(line) <= length else line[: length - 1] + "…"


def _watched(model: Any, text: str) -> Any:
    """A record of a text, in pieces where it is longer than the model reads at once."""
    ids = model.encode(text)
    size = min(model.config.context or 1024, 1024)
    pieces = ids.split(size, dim=1)
    kinds = {name: ids for name, ids in lens.token_kinds(model).items() if name != "special"}
    wanted = [*measures.DEFAULT, "induction", "duplicate", *([measures.Tokens(kinds)] if kinds else [])]
    return lens.watch_all(model, pieces, measures=wanted)


def _heads_of(said: list[str], layers: int | None = None) -> dict[int, list[int]]:
    """3.5 7.0 as {3: [5], 7: [0]}"""
    chosen: dict[int, list[int]] = {}
    for one in said:
        layer, dot, head = one.partition(".")
        if not (dot and layer.isdigit() and head.isdigit()):
            raise ValueError(f"head: expected layer.head such as 3.5, received {one!r}")
        if layers is not None and int(layer) >= layers:
            raise ValueError(f"head: expected a layer below {layers}, received {one!r}")
        chosen.setdefault(int(layer), []).append(int(head))
    return chosen


def _load(name: str, dtype: str | None, check: bool) -> Any:
    if dtype is not None and dtype not in _DTYPES:
        raise ValueError(f"dtype: expected one of {', '.join(_DTYPES)}, received {dtype!r}")
    wanted = None if dtype is None else _DTYPES[dtype]
    return models.load(name, dtype=wanted, check=check, progress=partial(track, what=f"Loading {name}"))


def _print_similarities(texts: list[str], vectors: torch.Tensor) -> None:
    """A vector in short; for several texts, the cosine of each with each."""
    if len(texts) == 1:
        numbers = " ".join(f"{x:+.4f}" for x in vectors[0, :8].tolist())
        _out.print(f"{vectors.shape[1]} numbers, length {vectors[0].norm():.4f}: {numbers} ...", markup=False)
        return
    alike = torch.nn.functional.normalize(vectors, dim=-1)
    alike = alike @ alike.T
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("cosine")
    for i in range(len(texts)):
        table.add_column(str(i + 1), justify="right")
    for i, text in enumerate(texts):
        short = printable(text if len(text) <= 48 else text[:47] + "…")
        table.add_row(f"{i + 1}  {short}".replace("[", r"\["), *(f"{x:.3f}" for x in alike[i].tolist()))
    _out.print(table)


def _table(*columns: str) -> Table:
    """All but the first column to the right."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left", no_wrap=True)
    return table


def _print_kernels(rows: list[benches.Beside]) -> None:
    table = _table("", "tokens", "SDPA", "attend", "ratio", "seeing", "ratio")
    for row in rows:
        seeing = ("", "") if row.seeing is None else (_time(row.seeing), f"{row.ratio_seeing:.2f}")
        table.add_row(
            "with backward" if row.backward else "forward",
            f"{row.tokens:,}",
            _time(row.sdpa),
            _time(row.attend),
            f"{row.ratio:.2f}",
            *seeing,
        )
    _out.print(table)
    _out.print("\nMedians; a ratio above 1: faster than F.scaled_dot_product_attention. Seeing is regard.measure.")


def _print_report(report: benches.Report) -> None:
    table, served = _table("", "step", "memory", "bytes sent", "by formula", "off by"), []
    for row in report.rows:
        if row.why_not is not None:
            served.append(f"{row.way}: no, {row.why_not}")
            continue
        formula = "the same" if row.as_calculated else f"{sum(row.formula.values()):,}"
        wrong = "" if row.right in (None, True) else " (!)"
        table.add_row(
            row.way,
            _time(row.seconds),
            "-" if row.memory is None else f"{row.memory / 1e6:,.1f} MB",
            f"{sum(row.sent.values()):,}",
            formula,
            "-" if row.difference is None else f"{row.difference:.0e}{wrong}",
        )
    _out.print(table)
    for line in served:
        _out.print(line, markup=False)
    _out.print(
        f"\nOne layer, forward and backward, on {report.ranks} processes ({report.device}, threads of each: "
        f"{report.threads}). Of the ranks' numbers the largest.",
        markup=False,
    )


def _time(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:,.2f} ms"


def main() -> None:
    """The entry point: what the caller got wrong is said in one line, without a traceback."""
    try:
        app()
    except (ValueError, TypeError, ImportError, OSError) as error:
        said = printable(error, lines=True).replace("[", r"\[")
        _aside.print(f"[bold red]error[/bold red] {said}", soft_wrap=True)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
