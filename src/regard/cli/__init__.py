"""`regard` in the terminal. Thin: each verb is one library call.

regard models                      what is installed
regard describe smollm2            the steps of a text through one layer, with real shapes
regard embed "a cat" "a kitten"    sentence embeddings, and how similar they are
regard generate "Once upon a"      text, as it is generated
regard look "The cat that I saw"   what every head attends to: in the terminal, in a page, in a figure
regard serve                       the same page, live: type a text, pick a model, see it
regard heads "The cat that I saw"  what each head does: its role, with score and baseline
regard atlas smollm2               what every head of a model does, over a treebank and probes
regard ablate "The cat that I saw" which heads matter to a text; or what happens without some of them
regard prune small.safetensors     a smaller model, without the heads that matter least
regard bench                       how fast this machine is: the kernels, or a layer over several processes
regard doctor                      versions, what the CPU can do, which kernels there are and why not the others
"""

from __future__ import annotations

import sys
from typing import Annotated

from regard import __version__
from regard.errors import missing_extra, printable

try:
    import typer

    from regard.cli.common import aside
    from regard.cli.heads import ablate, atlas, heads, look, prune, serve
    from regard.cli.machine import bench, examine
    from regard.cli.models import describe, embed, generate, list_models
except ModuleNotFoundError as _error:
    if (_error.name or "").partition(".")[0] not in ("typer", "rich"):
        raise
    raise missing_extra(_error.name or "typer", "cli") from _error

__all__ = ["app", "main"]

# In the order in which --help lists them.
VERBS = {
    "models": list_models,
    "describe": describe,
    "embed": embed,
    "generate": generate,
    "look": look,
    "serve": serve,
    "heads": heads,
    "atlas": atlas,
    "ablate": ablate,
    "prune": prune,
    "bench": bench,
    "doctor": examine,
}

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _name, _verb in VERBS.items():
    app.command(name=_name)(_verb)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"regard {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version.")
    ] = False,
) -> None:
    """Multi-head attention that you can see into."""


def main() -> None:
    """Run the command line; an error of the caller is printed as one line, without a traceback."""
    try:
        app()
    except (ValueError, TypeError, ImportError, OSError) as error:
        message = printable(error, lines=True).replace("[", r"\[")
        aside.print(f"[bold red]error[/bold red] {message}", soft_wrap=True)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
