"""Verbs about this machine: bench, doctor."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated, Any

import typer

from regard import bench as benches
from regard import doctor
from regard.cli import common

__all__ = ["bench", "examine"]


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
    sizes: dict[str, Any] = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "causal": causal}
    if not distributed:
        lengths = sorted({max(1, tokens // 16), max(1, tokens // 4), tokens})
        rows = benches.kernels(lengths, repeats=repeats, **sizes)
        if as_json:
            typer.echo(json.dumps([asdict(row) for row in rows], indent=2))
        else:
            _print_kernels(rows)
        return
    report = benches.distributed(tokens=tokens, timeout=timeout, repeats=repeats, **sizes)
    if report.rank:
        return
    if as_json:
        typer.echo(json.dumps(asdict(report), indent=2))
    else:
        _print_report(report)


def _print_kernels(rows: list[benches.KernelTiming]) -> None:
    table = common.table("", "tokens", "SDPA", "attend", "ratio", "seeing", "ratio")
    for row in rows:
        times = [_time(row.sdpa), _time(row.attend), f"{row.ratio:.2f}"]
        seeing = ["", ""] if row.seeing is None else [_time(row.seeing), f"{row.ratio_seeing:.2f}"]
        table.add_row("with backward" if row.backward else "forward", f"{row.tokens:,}", *times, *seeing)
    common.out.print(table)
    common.out.print(
        "\nMedians; a ratio above 1: faster than F.scaled_dot_product_attention. Seeing is regard.measure."
    )


def _print_report(report: benches.Report) -> None:
    table, refused = common.table("", "step", "memory", "bytes sent", "by formula", "off by"), []
    for row in report.rows:
        if row.why_not is not None:
            refused.append(f"{row.way}: no, {row.why_not}")
            continue
        wrong = "" if row.right in (None, True) else " (!)"
        table.add_row(
            row.way,
            _time(row.seconds),
            "-" if row.memory is None else f"{row.memory / 1e6:,.1f} MB",
            f"{sum(row.sent.values()):,}",
            "the same" if row.as_calculated else f"{sum(row.formula.values()):,}",
            "-" if row.difference is None else f"{row.difference:.0e}{wrong}",
        )
    common.out.print(table)
    for line in refused:
        common.out.print(line, markup=False)
    common.out.print(
        f"\nOne layer, forward and backward, on {report.ranks} processes ({report.device}, threads per "
        f"process: {report.threads}). The largest number of all ranks.",
        markup=False,
    )


def _time(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:,.2f} ms"


def examine(
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
    gpu: Annotated[
        bool, typer.Option("--gpu", help="Compare the GPU kernels with the reference on each GPU first (a minute).")
    ] = False,
) -> None:
    """Versions, what the CPU can do, which kernels there are and why not the others."""
    verdicts = doctor.check_gpus(None if as_json else lambda line: common.out.print(line, markup=False)) if gpu else {}
    sections = doctor.examine() | ({"GPU kernels": verdicts} if verdicts else {})
    if as_json:
        typer.echo(json.dumps(sections, indent=2))
        return
    width = max(len(name) for lines in sections.values() for name in lines)
    for section, lines in sections.items():
        common.out.print(section, style="bold")
        for name, value in lines.items():
            common.out.print(f"  {name:<{width}}  {value}", markup=False)
