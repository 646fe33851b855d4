"""The examples run as scripts; their printed figures are as claimed, and their pictures are not empty."""

from __future__ import annotations

import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from regard.models import EMBEDDED

EXAMPLES = Path(__file__).parent.parent / "examples"
WITH = {
    name: pytest.mark.skipif(EMBEDDED[name].installed() is None, reason=f"the weights of {name} are not installed")
    for name in ("minilm", "smollm2")
}


@pytest.fixture
def matplotlib() -> None:
    pytest.importorskip("matplotlib", reason="matplotlib, which draws the figures, is not installed")


def run(folder: Path, name: str, *options: str, processes: int = 0, **environment: str) -> str:
    """The output of an example that runs in `folder`, in its own process or in several, with warnings as errors."""
    several = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), "--no-python"]
    result = subprocess.run(
        [*([sys.executable, *several] if processes else []), sys.executable, "-W", "error", str(EXAMPLES / name)]
        + list(options),
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8", **environment},
        capture_output=True,
        text=True,
        encoding="utf-8",
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def numbers(pattern: str, out: str) -> tuple[float, ...]:
    """The groups of a pattern that is printed once, as numbers."""
    found = re.findall(pattern, out)
    assert len(found) == 1, f"{pattern!r} is {len(found)} times in\n{out}"
    groups = found[0] if isinstance(found[0], tuple) else (found[0],)
    return tuple(float(group.replace(",", "")) for group in groups)


def assert_picture(path: Path, width: int, height: int) -> None:
    """A PNG of this size that is not empty: a single colour would take fewer bytes."""
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", data[16:24]) == (width, height)
    assert len(data) > 30_000


def test_every_example_is_run_here() -> None:
    here = Path(__file__).read_text(encoding="utf-8")
    assert [path.name for path in EXAMPLES.glob("*.py") if f'"{path.name}"' not in here] == []


@WITH["minilm"]
def test_look(tmp_path) -> None:
    out = run(tmp_path, "look.py", "--html", "page.html")
    assert "  blocks.0.attention head 2: rests on the first token 0.13; else: the token before 1.00 (uniform" in out
    assert (tmp_path / "page.html").read_text(encoding="utf-8").lstrip().lower().startswith("<!doctype html>")


@WITH["minilm"]
@pytest.mark.slow
def test_own_model(tmp_path) -> None:
    pytest.importorskip("transformers", reason="transformers, whose models these are, is not installed")
    out = run(tmp_path, "own_model.py", "--html", "page.html")
    assert "The sharpest heads: encoder.layer.0.attention.self head 2, " in out
    assert (tmp_path / "page.html").exists()


@WITH["smollm2"]
@pytest.mark.slow
def test_induction(tmp_path) -> None:
    out = run(tmp_path, "induction.py", "--texts", "1", "--draws", "1", "--length", "25")
    found = re.findall(r"^  (blocks\.\d+\.attention \d)  (\d\.\d+)  (\d\.\d+)$", out, re.MULTILINE)
    assert found[0][0] == "blocks.18.attention 6"
    assert float(found[0][1]) > 0.8
    assert [score for _, score, _ in found] == sorted((score for _, score, _ in found), reverse=True)
    assert {head for head, _, _ in found[:5]} == {
        "blocks.18.attention 6",
        "blocks.18.attention 7",
        "blocks.17.attention 3",
        "blocks.17.attention 4",
        "blocks.17.attention 5",
    }
    assert all(float(equal) < 0.05 for _, _, equal in found)
    assert f"{len(found)} of 270 heads" in out

    first, second = numbers(r"with all heads +(\S+) +(\S+)", out)
    assert second < first - 5  # it foresees what it has read before
    first_without, second_without = numbers(r"without the 5 best +(\S+) +(\S+)", out)
    assert abs(first_without - first) < 0.5
    assert second_without > second + 4
    for words in ("without 5 others", "without 5 others, same layers"):
        _, others = numbers(rf"{words}  +(\S+) +(\S+)", out)
        assert others < second + 2


@WITH["minilm"]
@pytest.mark.slow
def test_prune(tmp_path) -> None:
    out = run(tmp_path, "prune.py", "--count", "12", "--file", "small.safetensors")
    listed = re.findall(r"^  blocks\.\d\.attention: ([\d, ]+)$", out, re.MULTILINE)
    assert sum(len(heads.split(",")) for heads in listed) == 12
    before, after = numbers(r"Parameters: (\S+) before, (\S+) after", out)
    per_head = (4 * 384 + 3) * 32  # rows of q, k and v with their biases, columns of out
    assert before - after == 12 * per_head
    (rounding,) = numbers(r"heads set to zero: (\S+) at most", out)
    assert rounding < 1e-5
    pairs = re.findall(r"^ +(-?\d\.\d+) +(-?\d\.\d+)  .+ \| ", out, re.MULTILINE)
    cosines = [(float(whole), float(pruned)) for whole, pruned in pairs]
    assert len(cosines) == 6
    assert all(abs(whole - pruned) < 0.1 for whole, pruned in cosines)
    assert min(pruned for _, pruned in cosines[:4]) > 0.4 > 0.2 > max(pruned for _, pruned in cosines[4:])
    assert "loaded again, it gives the same embeddings: True" in out
    assert (tmp_path / "small.safetensors").stat().st_size == pytest.approx(4 * after, rel=0.01)


@pytest.mark.usefixtures("matplotlib")
@pytest.mark.slow
def test_training(tmp_path) -> None:
    out = run(tmp_path, "training.py", "--steps", "400", "--figure", "heads.png")
    looks = re.findall(r"^ +(\d+) +(\d\.\d\d)  ((?:0\.\d\d +){7}0\.\d\d)$", out, re.MULTILINE)
    assert [int(step) for step, _, _ in looks] == [0, 200, 400]
    losses = [float(loss) for _, loss, _ in looks]
    assert losses[0] > 4
    assert losses[-1] < 0.5
    assert all(float(score) < 0.2 for score in looks[0][2].split())
    score, since = numbers(r"best induction head: layer 1 head \d, score (\S+), over 0.5 from step (\d+) on", out)
    assert score > 0.5
    assert 200 < since < 400
    score, since = numbers(r"best previous-token head: layer 0 head \d, score (\S+), over 0.5 from step (\d+) on", out)
    assert score > 0.5
    assert 200 < since < 400
    assert_picture(tmp_path / "heads.png", 1725, 540)


@pytest.mark.usefixtures("matplotlib")
@pytest.mark.slow
def test_why_many_heads(tmp_path) -> None:
    out = run(tmp_path, "why_many_heads.py", "--steps", "160", "--seeds", "1")
    few, one = numbers(r"one head +(\S+) parameters +(\S+)% of the answers right", out)
    many, eight = numbers(r"eight heads +(\S+) parameters +(\S+)% of the answers right", out)
    assert few == many
    assert one < 70
    assert eight > 99
    first, second = numbers(r"The one head has (\d+)% of its weight on the first place and (\d+)% on the second", out)
    assert max(first, second) < 75  # it looks at both
    first, second = numbers(r"Of the eight, head \d has (\d+)% on the first, and head \d has (\d+)% on the second", out)
    assert min(first, second) > 75  # one looks at one, another at the other
    assert_picture(tmp_path / "why_many_heads.png", 1950, 555)


@WITH["minilm"]
@pytest.mark.usefixtures("matplotlib")
@pytest.mark.slow
def test_if_one_head_fails(tmp_path) -> None:
    out = run(tmp_path, "if_one_head_fails.py", "--every", "24", "--draws", "1")
    whole, none = numbers(r"all 72 heads find (\S+)% of the paraphrases, no head at all (\S+)%", out)
    assert whole > 85
    assert none < 60
    removed = "first below 90% of that with (\\d+) heads removed"
    (least,), (most,) = (numbers(f"{order} important first: +{removed}", out) for order in ("least", "most"))
    assert most < least
    numbers(f"random: +{removed}", out)
    assert_picture(tmp_path / "if_one_head_fails.png", 1200, 675)


@pytest.mark.parametrize("processes, options", [(2, ()), (4, ("--method", "both"))])
@pytest.mark.slow
def test_distributed(tmp_path, processes, options) -> None:
    out = run(tmp_path, "distributed.py", "--steps", "3", *options, processes=processes)
    assert out.splitlines()[0] == f"{options[-1] if options else 'ring'}, {processes} processes"
    losses = re.findall(r"^ +(\d) +(\d\.\d+) +(\d\.\d+)$", out, re.MULTILINE)
    assert [int(step) for step, _, _ in losses] == [0, 2]
    assert numbers(r"largest difference: (\S+)", out) < (1e-5,)
    assert len(numbers(r"best induction head: layer (\d) head (\d), score (\S+)", out)) == 3
    assert numbers(r"its logits differ by (\S+) at most", out) < (1e-4,)


@pytest.mark.slow
def test_without_matplotlib_there_is_no_figure_and_it_is_said(tmp_path) -> None:
    (tmp_path / "matplotlib.py").write_text("raise ImportError")
    out = run(tmp_path, "why_many_heads.py", "--steps", "0", "--seeds", "1", PYTHONPATH=str(tmp_path))
    assert out.endswith("\nno figure: matplotlib is not installed\n")
    assert not (tmp_path / "why_many_heads.png").exists()


@pytest.mark.usefixtures("matplotlib")
@pytest.mark.slow
def test_diverging(tmp_path) -> None:
    out = run(tmp_path, "diverging.py")
    assert "scores grow: head " in out
    warned = numbers(r"without qk_clip: step (\d+): ", out)[0]
    assert warned < 16
    pattern = r"{} +loss (\S+) at step 16, lowest \S+ at step \d+, in the end (\S+); largest score (\S+)"
    early, late, score = numbers(pattern.format("without qk_clip:"), out)
    assert early < 2.5  # (it was 2.87 at first: the loss fell when it warned)
    assert late > 0.5
    assert score > 1000
    _, late, score = numbers(pattern.format("with qk_clip:"), out)
    assert late < 0.3
    assert score < 200
    assert_picture(tmp_path / "diverging.png", 900, 360)
