"""The Python blocks of the README, the tour and some pages run, in order, as one program each; what is said
that they print is what they print."""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from regard.kernels import available

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
BLOCK = re.compile(r"```(\w+(?: \w+)?)\n(.*?)```", re.DOTALL)


@pytest.mark.parametrize(
    "page", [README, *(ROOT / "docs" / f"{name}.md" for name in ("tour", "from_torch", "latent"))], ids=lambda x: x.name
)
def test_a_page_runs_and_prints_what_it_says(page, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)  # it writes files
    blocks = BLOCK.findall(page.read_text(encoding="utf-8"))
    assert [language for language, _ in blocks].count("python") >= 4
    names: dict[str, object] = {}
    printed = ""
    for language, text in blocks:
        if language == "python":
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                exec(compile(text, str(page), "exec"), names)
            printed = out.getvalue()
        elif language == "text" and ("native" in available() or not text.startswith("native: chosen")):
            assert printed.strip() == text.strip()


@pytest.mark.parametrize("page", [README, ROOT / "docs" / "tour.md"], ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


def test_the_readme_is_short() -> None:
    text = re.sub(
        r"```.*?```|<!--.*?-->|^\|.*?$", "", README.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE
    )
    assert len(text.split()) < 800


@pytest.mark.parametrize(
    "page, processes", [("docs/tour.md", 2), pytest.param("docs/scaling.md", 4, marks=pytest.mark.slow)]
)
def test_the_blocks_for_several_processes_run(page: str, processes: int, tmp_path: Path) -> None:
    blocks = BLOCK.findall((ROOT / page).read_text(encoding="utf-8"))
    program = "\n".join(text for language, text in blocks if language == "python torchrun")
    if "destroy_process_group" not in program:
        program += "\ndist.barrier()\ndist.destroy_process_group()\n"
    (tmp_path / "program.py").write_text(program)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, "program.py"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
