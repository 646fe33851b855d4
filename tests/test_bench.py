"""`regard bench`: it runs, counts what it calculates, finds what one process finds, and says what it cannot do.

No time is compared with anything: machines differ, and this one may be busy.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from distributed import together
from typer.testing import CliRunner

from regard import bench
from regard.cli import app

SMALL = ["--tokens", "64", "--head-dim", "16", "--repeats", "1"]


def torchrun(processes: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`regard bench --distributed` on several processes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    return subprocess.run(
        [*command, "-m", "regard", "bench", "--distributed", *SMALL, *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )


def measured(rank: int, options: dict[str, Any]) -> dict[str, bench.Row]:
    """`bench.distributed` in a process that has its group already."""
    report = bench.distributed(tokens=64, head_dim=16, repeats=1, progress=False, **options)
    return {row.way: row for row in report.rows}


@pytest.mark.parametrize("options", [[], ["--kv-heads", "2", "--no-causal"]])
def test_kernels_as_json(options):
    result = CliRunner().invoke(app, ["bench", "--heads", "4", *SMALL, "--json", *options], catch_exceptions=False)
    rows = json.loads(result.output)
    assert [(row["tokens"], row["backward"]) for row in rows] == [(n, b) for n in (4, 16, 64) for b in (False, True)]
    assert all(row["sdpa"] > 0 < row["attend"] for row in rows)
    assert all((row["seeing"] is None) is row["backward"] for row in rows)


def test_kernels_as_a_table():
    out = CliRunner().invoke(app, ["bench", "--heads", "2", *SMALL], catch_exceptions=False).output
    assert out.splitlines()[0].split() == ["tokens", "SDPA", "attend", "ratio", "seeing", "ratio"]
    assert "…" not in out
    assert len([line for line in out.splitlines() if line.startswith(("forward", "with backward"))]) == 6


@pytest.mark.slow
def test_what_two_processes_send_is_what_the_formulas_say_and_results_are_those_of_one():
    for rows in together.run(measured, 2, {"heads": 4, "kv_heads": 2}):
        assert list(rows) == ["one process", "heads", "ring", "ring, balanced", "alltoall"]
        alone = rows.pop("one process")
        assert alone.sent == {}
        assert alone.seconds > 0
        for row in rows.values():
            assert row.sent == row.formula
            assert row.sent
            assert row.seconds > 0
            assert row.right


def printed(rank: int, arguments: list[str]) -> str:
    """What the command writes in this process."""
    return CliRunner().invoke(app, ["bench", "--distributed", *SMALL, *arguments], catch_exceptions=False).output


def test_as_json():
    first, second = together.run(printed, 2, ["--heads", "2", "--json"])
    assert second == ""  # one process speaks for all
    found = json.loads(first)
    assert (found["ranks"], found["device"]) == (2, "cpu")
    assert all(row["sent"] == row["formula"] and row["seconds"] > 0 for row in found["rows"])


@pytest.mark.slow
def test_four_processes_and_a_table():
    result = torchrun(4, "--heads", "4")
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()  # of one process alone
    assert lines[0].split() == ["step", "memory", "bytes", "sent", "by", "formula", "off", "by"]
    assert [line.split("  ")[0] for line in lines[1:6]] == [
        "one process",
        "heads",
        "ring",
        "ring, balanced",
        "alltoall",
    ]
    assert all("the same" in line for line in lines[1:6])
    assert "(!)" not in result.stdout
    assert lines[7].startswith("One layer, forward and backward, on 4 processes (cpu, threads per process: 1)")


def test_a_way_that_cannot_serve_is_shown_with_the_reason():
    for rows in together.run(measured, 2, {"heads": 3, "causal": False}):
        for way in ("heads", "alltoall"):
            assert rows[way].why_not == "3 heads do not divide by 2"
            assert rows[way].seconds is None
        for way in ("ring", "ring, balanced"):
            assert rows[way].as_calculated
            assert rows[way].right


def test_outside_torchrun_it_says_what_to_run():
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    result = subprocess.run(
        [sys.executable, "-m", "regard", "bench", "--distributed"], env=environment, capture_output=True, text=True
    )
    assert result.returncode == 1
    assert "remedy: torchrun --nproc-per-node 2 -m regard bench --distributed" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    "options, words",
    [
        ({"heads": 4, "kv_heads": 3}, "kv_heads: expected a divisor of the 4 heads, received 3"),
        ({"repeats": 0}, "repeats: expected at least 1, received 0"),
        ({"head_dim": 0}, "head_dim: expected at least 1, received 0"),
    ],
)
def test_sizes_that_are_none(options, words):
    for run in (bench.kernels, bench.distributed):
        with pytest.raises(ValueError, match=words):
            run(**options)
    with pytest.raises(ValueError, match="tokens: expected at least 1"):
        bench.kernels([0])
    with pytest.raises(ValueError, match="timeout: expected more than 0 seconds"):
        bench.distributed(timeout=0)
    with pytest.raises(TypeError, match="tokens: expected an integer, received float"):
        bench.distributed(tokens=1e3)  # type: ignore[arg-type]
