"""The README's Python blocks run, in order, as one program; what it says they print is what they print."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

from regard.kernels import available

README = Path(__file__).parent.parent / "README.md"
BLOCK = re.compile(r"```(\w+)\n(.*?)```", re.DOTALL)


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
