"""The README's Python blocks run, in order, as one program; what it says they print is what they print."""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path

from regard.kernels import available

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
BLOCK = re.compile(r"```(\w+(?: \w+)?)\n(.*?)```", re.DOTALL)


def test_the_readme_runs_and_prints_what_it_says(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)  # it writes files
    blocks = BLOCK.findall(README.read_text(encoding="utf-8"))
    assert [language for language, _ in blocks].count("python") >= 4
    names: dict[str, object] = {}
    printed = ""
    for language, text in blocks:
        if language == "python":
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                exec(compile(text, str(README), "exec"), names)
            printed = out.getvalue()
        elif language == "text" and ("native" in available() or not text.startswith("native: chosen")):
            assert printed.strip() == text.strip()


def test_its_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", README.read_text(encoding="utf-8")):
        assert (README.parent / target).exists(), target


def test_the_block_for_several_processes_runs_in_two(tmp_path) -> None:
    (block,) = [text for language, text in BLOCK.findall(README.read_text(encoding="utf-8")) if "torchrun" in language]
    (tmp_path / "block.py").write_text(block + "\ndist.destroy_process_group()\n")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "block.py"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
