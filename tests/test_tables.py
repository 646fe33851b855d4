"""The tables of figures in the README and in docs/ are what benchmarks/results says."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "benchmarks" / "tables.py"
PAGES = ("README.md", "docs/tour.md", "docs/performance.md", "docs/kernel.md", "docs/heads.md")
MACHINE = {"cpu": "A Fine CPU", "processor": "x86_64", "instructions": "AVX2", "threads": 2, "torch": "2.13.0"}


def tables(root: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), "--root", str(root), *options]
    return subprocess.run(command, capture_output=True, text=True, encoding="utf-8")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Pages without a table, and no results."""
    for name in PAGES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("No figures.\n", encoding="utf-8")
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    return tmp_path


def result(root: Path, file: str, rows: list[dict[str, Any]], **machine: Any) -> None:
    path = root / "benchmarks" / "results" / f"{file}.json"
    path.write_text(json.dumps({"machine": MACHINE | machine, "rows": rows}), encoding="utf-8")


def table_of(root: Path, name: str) -> list[str]:
    """The lines that are written for one table."""
    page = root / "README.md"
    page.write_text(f"Before.\n\n<!-- table: {name} -->\nold\n<!-- /table -->\n\nAfter.\n", encoding="utf-8")
    done = tables(root)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    lines = page.read_text(encoding="utf-8").splitlines()
    assert [*lines[:3], *lines[-3:]] == ["Before.", "", f"<!-- table: {name} -->", "<!-- /table -->", "", "After."]
    assert tables(root, "--check").returncode == 0
    return lines[3:-3]


def test_the_same_table_of_another_machine(root: Path) -> None:
    row = {"dtype": "float32", "rows": 16, "width": 3, "outs": 5, "after": None}
    result(root, "products", [row | {"times": {"nn.Linear": 2.0, "regard": 1.0}}])
    (root / "benchmarks" / "results" / "other").mkdir()
    result(root, "other/products", [row | {"times": {"nn.Linear": 3.0, "regard": 1.0}}], cpu="Another CPU")
    here, there = table_of(root, "products"), table_of(root, "products@other")
    assert ("A Fine CPU" in here[0], "Another CPU" in there[0]) == (True, True)
    assert ("2.00" in here[-1], "3.00" in there[-1]) == (True, True)


def test_no_table_is_stale() -> None:
    done = tables(ROOT, "--check")
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_stale_table_is_named_and_left_alone(root: Path) -> None:
    for name in PAGES:
        shutil.copy(ROOT / name, root / name)
    for folder in ("benchmarks/results", "src/regard/heads/analysis/atlases"):
        shutil.copytree(ROOT / folder, root / folder, dirs_exist_ok=True)
    assert tables(root, "--check").returncode == 0
    path = root / "benchmarks" / "results" / "endless.json"
    found = json.loads(path.read_text(encoding="utf-8"))
    found["rows"][0]["perplexity"]["KVCache"] = 99.0
    path.write_text(json.dumps(found), encoding="utf-8")
    done = tables(root, "--check")
    assert done.returncode == 1
    assert done.stdout.splitlines()[0] == "docs/performance.md: table endless is not what its file says"
    for name in PAGES:
        assert (root / name).read_bytes() == (ROOT / name).read_bytes()
    assert tables(root).returncode == 0
    assert "| 0 - 4,096 | 11.4 | 99.0 |" in (root / "docs" / "performance.md").read_text(encoding="utf-8")


def test_markers_that_are_wrong(root: Path) -> None:
    page = root / "README.md"
    for text, message in (
        ("<!-- table: watching -->\n<!-- /table -->\n", "watching.json, which is not there; remedy: run the benchmark"),
        ("<!-- table: nothing -->\n<!-- /table -->\n", "table nothing: expected one of kernels, "),
        ("<!-- table: layer -->\nno end\n", "received one without the other"),
    ):
        page.write_text(text, encoding="utf-8")
        for options in ((), ("--check",)):
            done = tables(root, *options)
            assert done.returncode == 1
            assert message in done.stderr
        assert page.read_text(encoding="utf-8") == text


def test_watching(root: Path) -> None:
    row = {"model": "bert-base sizes, transformers sdpa", "tokens": 2048, "blind": 2.0, "watched": 2.2}
    rows = [row | {"exact": 3.0, "eager": 8.5, "roles": 1.0, "other": {}, "difference": 0.0}]
    rows += [row | {"tokens": 8192, "exact": None, "eager": None, "other": {}, "difference": 0.0}]
    rows += [row | {"model": "ours", "torch": 2.75, "peer": 4.4}, row | {"model": "ours"}]
    result(root, "watching", rows)
    assert table_of(root, "watching") == [
        "Measured on: A Fine CPU with AVX2, 2 threads, torch 2.13.0.",
        "",
        "| model | tokens | watched / blind | watched / blind with PyTorch's attention "
        "| watched / blind in transformers | `exact=True` / blind "
        "| eager with maps / blind | `seen.roles()` alone / blind |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
        "| bert-base sizes, transformers sdpa | 2,048 | 1.10 | 1.10 | 1.10 | 1.50 | 4.25 | 0.50 |",
        "| bert-base sizes, transformers sdpa | 8,192 | 1.10 | 1.10 | 1.10 | not run | not run | not run |",
        "| ours | 2,048 | 1.10 | 0.80 | 0.50 | not run | not run | not run |",
        "| ours | 2,048 | 1.10 | not run | not run | not run | not run | not run |",
    ]


def test_diffusers_backend(root: Path) -> None:
    rows = [{"model": "a DiT", "what": "forward", "tokens": 1024, "difference": 0.0, "native": 3.0, "regard": 2.0}]
    result(root, "diffusers_backend", rows)
    assert table_of(root, "diffusers-backend")[2:] == [
        "| model | what | tokens | native / regard |",
        "| --- | --- | --- | --- |",
        "| a DiT | forward | 1,024 | 1.50 |",
    ]


def test_products(root: Path) -> None:
    row = {"width": 3, "outs": 5, "after": None}
    rows: list[dict[str, Any]] = [
        row | {"dtype": dtype, "rows": count, "times": {"nn.Linear": 3.0, "regard": ours}}
        for dtype in ("float32", "float16")
        for count, ours in ((1, 2.0), (1, 1.0), (2048, 4.0))
    ]
    result(root, "products", rows)
    assert table_of(root, "products")[2:] == [
        "| nn.Linear's time / ours, rows | float32 | float16 |",
        "| --- | --- | --- |",
        "| 1 | 1.50 - 3.00 | 1.50 - 3.00 |",
        "| 2,048 | 0.75 - 0.75 | 0.75 - 0.75 |",
    ]


def test_small_calls(root: Path) -> None:
    seconds = {"regard": 12.5e-6, "SDPA": 10e-6}
    rows: list[dict[str, Any]] = [{"case": "attend 1x2", "mode": "inference", "seconds": seconds}]
    rows += [{"case": "layer 1x16", "mode": "training", "seconds": {"regard": 1e-3, "SDPA": 2e-3, "nn.MHA": 4e-3}}]
    result(root, "small_calls", rows, threads=1)
    assert table_of(root, "small-calls") == [
        "Measured on: A Fine CPU with AVX2, 1 thread, torch 2.13.0.",
        "",
        "| our time / theirs | ours | SDPA | nn.MHA |",
        "| --- | --- | --- | --- |",
        "| attend 1 x 2, inference | 12.5 us | 1.25 |  |",
        "| layer 1 x 16, training | 1,000.0 us | 0.50 | 0.25 |",
    ]


def test_headline(root: Path) -> None:
    times = {"SDPA": 3.0, "SDPA apart": 2.0, "attend": 0.8, "looking": 1.0, "dense": 7.04}
    of = {"what": "headline", "width": 64}
    rows: list[dict[str, Any]] = [of | {"causal": True, "tokens": 512, "seconds": times | {"looking": 4.0}}]
    rows += [of | {"causal": False, "tokens": 512, "seconds": times}]
    del (short := dict(times))["dense"]
    rows += [of | {"causal": causal, "tokens": 8192, "seconds": short} for causal in (False, True)]
    result(root, "headline", rows)
    assert table_of(root, "headline")[4:] == [
        "| D = 64, 512 tokens: full, causal | 2.00, 0.50 | 1.25, 5.00 | 7.0, 1.8 |",
        "| D = 64, 8,192 tokens: full, causal | 2.00, 2.00 | 1.25, 1.25 | not run |",
    ]


def test_memory(root: Path) -> None:
    held = {"SDPA": 8e6, "default": 9e6, "every": 25e6, "all": 56e6}
    estimated = {"dense": {"seconds": 1.0, "bytes": 28e9}}
    rows: list[dict[str, Any]] = [{"what": "layer", "case": "causal", "tokens": 16384, "bytes": held}]
    result(root, "looking", [rows[0] | {"estimated": estimated}, {"what": "model", "case": "", "tokens": 1}])
    assert table_of(root, "memory")[4:] == ["| 16,384 | 8.0 MB | 9.0 MB | 25.0 MB | 56.0 MB | about 28.0 GB |"]


def test_latent(root: Path) -> None:
    times = {"absorbed": 0.004, "plain": 0.03, "transformers": 0.0344}
    result(root, "latent", [{"length": 4096, "seconds": times, "bytes_per_token": {"latent": 2304}}])
    assert table_of(root, "latent")[4:] == ["| 4,096 | 7.5 | 8.6 |"]


def test_the_machine_of_an_older_file(root: Path) -> None:
    result(root, "endless", [{"begin": 0, "end": 4096, "perplexity": {"KVCache": 10.84}}], cpu=None)
    assert table_of(root, "endless")[0] == "Measured on: x86_64 with AVX2, 2 threads, torch 2.13.0."


def test_prune(root: Path) -> None:
    result(root, "prune", json.loads((ROOT / "benchmarks/results/prune.json").read_text(encoding="utf-8"))["rows"])
    assert table_of(root, "prune")[2].startswith("| time (parameters) / whole | 1/4 removed |")


def test_pages_of_long_texts(root: Path) -> None:
    row: dict[str, Any] = {"tokens": 4096, "bytes": 6.8e6, "forward peak bytes": 1.8e9, "peak bytes": 3.3e9}
    for kind, times in {"seconds": (30.0, 40.0, 20.0, 2.0), "cpu seconds": (32.0, 36.0, 17.0, 1.66)}.items():
        row |= {
            f"{name} {kind}": time for name, time in zip(("forward", "watched", "page", "ratio"), times, strict=True)
        }
    result(root, "pages_long", [row])
    assert table_of(root, "pages-long")[4:] == [
        "| 4,096 | 6.8 MB | 32 s | 36 s | 17 s | 1.66 | 2.00 | 1.8 GB | 3.3 GB |"
    ]


def test_compiled_gpu_kernels(root: Path) -> None:
    row = {"target": "cuda:80", "dtype": "bfloat16", "width": 64, "features": "plain", "kernel": "forward"}
    rows = [row | {"registers": 218, "spills": 0, "shared": 32768}]
    rows += [row | {"kernel": "d_keys", "registers": 248, "spills": 8, "shared": 24832}]
    rows += [row | {"target": "hip:gfx942", "registers": 160, "spills": 0, "shared": 100}]
    result(root, "compile_gpu", rows, compiler="Triton 3.7.1")
    assert table_of(root, "compile-gpu") == [
        "Compiled by Triton 3.7.1, without a GPU; torch 2.13.0.",
        "",
        "| kernels: most registers / spilled bytes / shared bytes | cuda:80 | hip:gfx942 |",
        "| --- | --- | --- |",
        "| plain, bfloat16, 64 | 2: 248 / 8 / 32,768 | 1: 160 / 0 / 100 |",
    ]


def test_gpu(root: Path) -> None:
    row = {"queries": 1, "tokens": 4096, "dtype": "bfloat16", "width": 64, "feature": "causal"}
    times = {name: {"median": seconds} for name, seconds in (("ours", 1.0), ("SDPA", 0.5), ("blockwise", 8.0))}
    seen = {name: {"median": seconds} for name, seconds in (("blind", 1.0), ("rows", 1.25), ("every", 2.0))}
    result(root, "gpu", [row | {"what": "forward", "times": times}, row | {"what": "seeing", "times": seen}])
    assert table_of(root, "gpu")[4:] == [
        "| forward, causal, 1 x 4096, bfloat16, 64 | 0.50 |  | 8.00 |  |  |",
        "| seeing, causal, 1 x 4096, bfloat16, 64 |  |  |  | 1.25 | 2.00 |",
    ]
