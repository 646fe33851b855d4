"""The self-check, here in the interpreter: what it compares, remembers and says."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

import regard
from regard.kernels import triton
from regard.kernels.triton import comparisons, self_check

HERE = torch.device("cpu")


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing is known before, and nothing stays."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(self_check, "_known", {})


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first comparisons only."""
    every = comparisons.every
    monkeypatch.setattr(comparisons, "every", lambda device: itertools.islice(every(device), 3))


def test_it_passes_and_is_remembered(few: None) -> None:
    assert self_check.remembered(HERE) is None
    assert "has not run on this device; remedy: regard doctor --gpu" in (self_check.doubt(HERE) or "")
    told: list[str] = []
    verdict = self_check.check(HERE, told.append)
    assert verdict.passed
    assert told == ["plain, gradients: right", "plain, statistics: right", "causal, gradients: right"]
    assert "3 comparisons" in str(verdict)
    self_check._known.clear()  # as in a new process
    assert self_check.remembered(HERE) == verdict
    assert self_check.doubt(HERE) is None
    assert self_check.passed(HERE)


def test_it_runs_within_anything_and_disturbs_nothing(few: None) -> None:
    """Its first use may be in the midst of inference that is watched."""
    torch.manual_seed(4)
    expected = torch.rand(3)
    torch.manual_seed(4)
    layer = regard.MultiHeadAttention(8, 2).eval()
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16), regard.watch(layer) as seen:
        torch.manual_seed(4)
        assert self_check.check(HERE).passed
        assert torch.equal(torch.rand(3), expected)
        layer(torch.randn(1, 3, 8))
    assert len(seen.by_name) == 1  # the layer's own attention alone


def test_other_versions_are_checked_again(few: None, monkeypatch: pytest.MonkeyPatch) -> None:
    self_check.check(HERE)
    monkeypatch.setattr("regard.kernels.triton.availability.version", lambda: "another")
    assert self_check.remembered(HERE) is None


def test_a_wrong_kernel_is_found_and_left_alone(few: None, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = triton.forward

    def wrong(call: Any) -> Any:
        out, lse = forward(call)
        return out * 1.01, lse

    monkeypatch.setattr(triton, "forward", wrong)
    with pytest.warns(RuntimeWarning) as told:
        assert not self_check.trusted(HERE)
    assert "once (about a minute)" in str(told[0].message)
    assert "leaves its GPU kernels alone" in str(told[1].message)
    assert "plain, gradients: output is off by" in str(told[1].message)
    assert "its self-check failed on this device: 2 of 3 comparisons failed" in (self_check.doubt(HERE) or "")
    assert not self_check.trusted(HERE)  # (remembered: no warning)


def test_a_kernel_that_does_not_compile_is_found(few: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(call: Any) -> Any:
        raise RuntimeError("PTX: no such instruction\nmore")

    monkeypatch.setattr(triton, "forward", broken)
    assert self_check.check(HERE).failures[0] == "plain, gradients: RuntimeError: PTX: no such instruction"


def test_a_verdict_that_cannot_be_kept_is_no_error(
    few: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert self_check.check(HERE).passed
    assert "is not kept" in capsys.readouterr().err
    (tmp_path / "regard").mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    self_check.verdict_file().write_text("no json")
    self_check._known.clear()
    assert self_check.remembered(HERE) is None


def test_auto_leaves_the_interpreter_alone() -> None:
    q = torch.randn(1, 2, 5, 8)
    assert "triton: could serve, but the interpreter is for tests" in regard.explain(q, q, q)
    assert "triton: chosen" in regard.explain(q, q, q, kernel="triton")


def test_the_command_tells_each_comparison_and_the_verdict(few: None) -> None:
    testing = pytest.importorskip("typer.testing", reason="the command needs the extra cli")
    from regard.cli import app

    result = testing.CliRunner().invoke(app, ["doctor", "--gpu"], catch_exceptions=False)
    assert result.exit_code == 0
    assert "causal, gradients: right" in result.output
    assert "3 comparisons with `reference` passed" in " ".join(result.output.split())


@pytest.mark.slow
def test_every_comparison_is_right() -> None:
    assert self_check.check(HERE).failures == []
