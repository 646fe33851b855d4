"""Verbs that look at heads and change them: look, serve, heads, ablate, prune."""

from __future__ import annotations

import json
import tempfile
import webbrowser
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from regard import draw, models
from regard import heads as lens
from regard.cli import common, images
from regard.cli.common import Check, Dtype, Model, Text, heads_of
from regard.draw.images import takes_ids
from regard.errors import bad_value, printable
from regard.heads.analysis.atlas import atlas as packaged_atlas
from regard.heads.progress import progress_bar
from regard.layer import MultiHeadAttention

__all__ = ["ablate", "atlas", "heads", "look", "prune", "serve"]

CHANGED = ("layer", "head", "change", "query", "key", "before", "after")  # what is printed of heads that change


def look(
    text: Annotated[str | None, typer.Argument(help="A text, a file with one, or - for standard input.")] = None,
    model: Model = "minilm",
    image: Annotated[
        Path | None,
        typer.Option(help="A picture, for a folder with a vision or vision-language model of transformers."),
    ] = None,
    layer: Annotated[int | None, typer.Option(help="All heads of this layer, large.")] = None,
    head: Annotated[int | None, typer.Option(help="This head of the layer, with its strongest links.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write the page, one file that opens anywhere.")] = None,
    png: Annotated[Path | None, typer.Option(help="Write a figure: .png, .svg or .pdf.")] = None,
    open_page: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
    generate: Annotated[int, typer.Option("--generate", "-n", min=0, help="Tokens that a decoder generates.")] = 16,
    without: Annotated[
        list[str] | None, typer.Option(help="Compare with the model without this head, as layer.head; may be repeated.")
    ] = None,
    against: Annotated[str | None, typer.Option(help="Compare with another text.")] = None,
    treebank: Annotated[
        Path | None,
        typer.Option(help="A CoNLL-U file: if it has the text, relations of syntax are checked by its tree."),
    ] = None,
    dtype: Dtype = None,
    check: Check = True,
) -> None:
    """What every head attends to: a picture in the terminal at once, the page and a figure on request.

    With --image, what the heads of a vision model attend to in a picture; --png with --layer draws it over it."""
    if head is not None and layer is None:
        raise bad_value("head", expected="a layer with it", received="none", remedy="--layer 0 --head 2")
    if text is None and image is None:
        raise bad_value("text", expected="a text, or a picture by --image", received="none")
    first, second = common.text_of(text or ""), None if against is None else common.text_of(against)
    if image is None:
        read = _reader_of_text(common.load_model(model, dtype, check), generate, treebank)
    else:
        if treebank is not None:
            raise bad_value("--treebank", expected="none with --image", received=str(treebank))
        read = _reader_of_image(model, dtype, image, generate)
    title = _short(first) or (image.name if image is not None else "")
    seen = read(first)
    draw.terminal(seen, layer=layer, head=head)
    if seen.generated is not None:
        common.out.print(f"\ngenerated: {printable(seen.generated, lines=True)}", markup=False)
    records = {title: seen}
    if second is not None:
        records[_short(second)] = read(second)
    if without:
        with lens.ablate(read.model, {**heads_of(without)}):
            records[f"without {', '.join(without)}"] = read(first)
    for name, other in list(records.items())[1:]:
        _print_changes(seen, other, name)
    if png is not None:
        _write_figure(seen, png, layer, head)
    if html is not None or open_page:
        _write_page(records, html, f"{model}: {_short(first, 60) or title}", open_page)


@dataclass
class _Reader:
    """Reads texts (and an image) with a model: `reader(text)` gives the record."""

    model: Any
    options: Callable[[str], dict[str, Any]]
    treebank: Path | None = None

    def __call__(self, text: str) -> lens.Record:
        with progress_bar("Looking") as progress:
            seen = draw.read(self.model, **self.options(text), progress=progress)
        seen.treebank = self.treebank
        return seen


def _reader_of_text(model: Any, generate: int, treebank: Path | None) -> _Reader:
    new_tokens = generate if isinstance(model, models.Decoder) else 0
    return _Reader(model, lambda text: {"text": text, "generate": new_tokens}, treebank)


def _reader_of_image(name: str, dtype: str | None, path: Path, generate: int) -> _Reader:
    picture = images.open_picture(path)
    model, processor = images.load_image_model(name, common.dtype_of(dtype))
    generates = takes_ids(model) and getattr(model, "can_generate", lambda: False)()

    def options(text: str) -> dict[str, Any]:
        said = images.with_image_token(processor, text) if text and takes_ids(model) else text or None
        return {"tokenizer": processor, "text": said, "image": picture, "generate": generate if generates else 0}

    return _Reader(model, options)


def _write_figure(seen: lens.Record, png: Path, layer: int | None, head: int | None) -> None:
    """The figure. Of a layer that saw a picture, over it: what the first token looks at; of a text, the last."""
    name = None if layer is None or not 0 <= layer < len(seen.layers) else seen.layers[layer]
    if seen.image is not None and name is not None and name in seen.image.grids:
        grid, tokens = seen.image.grids[name], seen[name].num_queries
        draw.image(seen, name, head, 0 if len(grid.labels()) == tokens else tokens - 1, path=png)
    else:
        draw.figure(seen, path=png, layer=layer, head=head)
    common.aside.print(f"figure: {png}", markup=False)


def _print_changes(seen: lens.Record, other: lens.Record, name: str, top: int = 8) -> None:
    """The heads that change most from the first record to another; why not, if they cannot be compared."""
    try:
        change = seen.difference(other)
    except ValueError as error:  # (two texts that share no word)
        common.aside.print(f"heads are not ranked: {error}", markup=False)
        return
    common.out.print(f"\nheads that change most, {printable(name)}:", markup=False)
    rows = lens.Table([{key: row[key] for key in CHANGED} for row in change.table()[:top]])
    common.out.print(f"{rows}\n{change.caption()}", markup=False, soft_wrap=True)


def _write_page(records: dict[str, lens.Record], html: Path | None, title: str, open_page: bool) -> None:
    """Write the page, to a temporary folder if no file is named, and open it."""
    path = html or Path(tempfile.mkdtemp(prefix="regard-")) / "look.html"
    with progress_bar("Drawing") as progress:
        draw.page(records, path=path, title=title, progress=progress)
    common.aside.print(f"page: {path.resolve()} ({path.stat().st_size / 1e6:.1f} MB)", markup=False)
    if open_page:
        webbrowser.open(path.resolve().as_uri())


def _short(text: str, length: int = 40) -> str:
    """The beginning of a text, in one line."""
    line = " ".join(text.split())
    return line if len(line) <= length else line[: length - 1] + "…"


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
    tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of a text, at most; longer texts take more memory.")
    ] = 2048,
) -> None:
    """The page, live on this machine: type a text, pick a model, see what its heads attend to."""
    from regard.serve import Limits
    from regard.serve import serve as run

    offered = model or [name for name, embedded in models.EMBEDDED.items() if embedded.installed() is not None]
    run(offered, host=host, port=port, open_browser=open_page, limits=Limits.of_tokens(tokens))


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
    limit: Annotated[int | None, typer.Option(min=1, help="At most this many sentences of the treebank.")] = None,
    dtype: Dtype = None,
    check: Check = True,
) -> None:
    """What each head does: its role, with score and baseline; and what it follows in a treebank."""
    if not (text or treebank or probe):
        raise bad_value("text", expected="a text, a file, --probe or --treebank", received="none of them")
    if text and probe:
        expected = "none beside --probe, which looks at random tokens"
        raise bad_value("text", expected=expected, received=repr(text), remedy="one of the two")
    content = common.text_of(text) if text else ""
    loaded = common.load_model(model, dtype, check)
    results: dict[str, Any] = {}
    if text or probe:
        seen = lens.probes.induction(loaded) if probe else _watched(loaded, content)
        if save is not None:
            seen.save(save)
            common.aside.print(f"written to {save}", markup=False)
        results["heads"] = seen.table() if all_measures else seen.roles()
    if treebank is not None:
        results["syntax"] = lens.syntax(loaded, treebank, limit=limit)
    if as_json:
        print(json.dumps({name: list(result.table()) for name, result in results.items()}))
        return
    for result in results.values():
        common.out.print(str(result), markup=False, soft_wrap=True)


def atlas(
    model: Annotated[
        str, typer.Argument(help="A packaged model, a file of an atlas; with --treebank any model.")
    ] = "minilm",
    treebank: Annotated[Path | None, typer.Option(help="Make it anew from this CoNLL-U file.")] = None,
    save: Annotated[Path | None, typer.Option(help="Write it to a JSON file.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="At most this many sentences of the treebank.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The table as JSON.")] = False,
    dtype: Dtype = None,
    check: Check = True,
) -> None:
    """What every head of a model does, computed over a treebank and probes."""
    if treebank is None and limit is not None:
        raise bad_value("--limit", expected="--treebank with it", received="none")
    if treebank is None:
        found = lens.Atlas.load(model) if model.endswith(".json") else packaged_atlas(model)
    else:
        found = lens.atlas(common.load_model(model, dtype, check), treebank, limit=limit)
    if save is not None:
        found.save(save)
        common.aside.print(f"written to {save}", markup=False)
    if as_json:
        print(json.dumps(list(found.table())))
        return
    common.out.print(str(found), markup=False, soft_wrap=True)
    made = ", ".join(f"{name} {value}" for name, value in found.made.items())
    common.out.print(f"made from: {made}", markup=False, soft_wrap=True)


def _watched(model: Any, text: str) -> Any:
    """A record of a text, in chunks if it is longer than the model's context."""
    ids = model.encode(text)
    chunks = ids.split(min(model.config.context or 1024, 1024), dim=1)
    return lens.watch_all(model, chunks)


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

    Of a decoder (-m smollm2) also what it then generates."""
    chosen = heads_of(head or [])
    lines = [common.text_of(text)]
    loaded = common.load_model(model, dtype, check)
    decoder, loss_name = isinstance(loaded, models.Decoder), _loss_name(loaded)
    if not head:
        effects = lens.effects(loaded, lines, quick=quick)
        gradients = (
            quick and decoder
        )  # (as in `effects`: with all heads in place, gradients of an encoder's loss are 0)
        title = (
            "Sensitivity of the loss to each head:" if gradients else f"How much more {loss_name}, without each head:"
        )
        common.out.print(title)
        common.out.print(str(lens.Table(effects.table()[:top])), markup=False)
        return
    intact, without = lens.effect(loaded, lines, chosen, mode)
    common.out.print(f"{loss_name}: {intact:.4f} with all heads, {without:.4f} without {', '.join(head)}")
    if decoder:
        for title, changes in (("with all heads", {}), ("without", chosen)):
            with lens.ablate(loaded, changes, mode=mode):  # type: ignore[arg-type]
                written = f"{title}: {lines[0]}|{loaded.generate(lines[0], 24)}"
                common.out.print(printable(written, lines=True), markup=False)


def _loss_name(model: Any) -> str:
    return "nats per token" if isinstance(model, models.Decoder) else "1 - cosine with the intact embedding"


def prune(
    out: Annotated[Path, typer.Argument(help="The safetensors file to write.")],
    head: Annotated[list[str] | None, typer.Argument(help="Heads to remove, as layer.head: 3.5 7.0")] = None,
    model: Model = "minilm",
    count: Annotated[
        int | None, typer.Option(min=1, help="Remove this many, those that matter least to --text.")
    ] = None,
    text: Annotated[list[str] | None, typer.Option(help="A text or a file by which to judge; may be repeated.")] = None,
    dtype: Dtype = None,
    check: Check = True,
) -> None:
    """A smaller model, without some heads: written to a file that `heads.load_pruned` reads."""
    if (head is None) == (count is None):
        received = "both" if head else "none"
        raise bad_value("heads", expected="either heads as layer.head or --count", received=received)
    default = "The quick brown fox jumps over the lazy dog, and nobody knows why."
    lines = [common.text_of(argument) for argument in text or [default]]
    loaded = common.load_model(model, dtype, check)
    names = [name for name, module in loaded.named_modules() if isinstance(module, MultiHeadAttention)]
    if count is not None:
        chosen = lens.effects(loaded, lines, quick=True).least(count)
    else:
        chosen = {names[layer]: numbers for layer, numbers in heads_of(head or [], len(names)).items()}
    loss, parameters = lens.loss_of(loaded, lines), sum(p.numel() for p in loaded.parameters())
    with torch.no_grad():
        intact = sum(loss(loaded, i).item() for i in range(len(lines))) / len(lines)
        lens.prune(loaded, chosen)
        without = sum(loss(loaded, i).item() for i in range(len(lines))) / len(lines)
    lens.save_pruned(loaded, chosen, out)
    remaining = sum(p.numel() for p in loaded.parameters())
    for layer, numbers in chosen.items():
        common.out.print(f"{layer}: without heads {', '.join(map(str, numbers))}", markup=False)
    losses = f"{_loss_name(loaded)}: {intact:.4f}, now {without:.4f}"
    common.out.print(f"{parameters:,} parameters, now {remaining:,}; {losses}")
    common.out.print(f"written to {out}", markup=False)
