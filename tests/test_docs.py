"""The pages of docs: links lead to files and headings that exist, code runs, and the site builds without a warning."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import pkgutil
import re
import runpy
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

import pytest

import regard
from regard.kernels import available
from regard.models import EMBEDDED

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted(DOCS.rglob("*.md"))]
WITH_CODE = [DOCS / "quickstart.md", *sorted((DOCS / "guides").glob("*.md"))]
BLOCK = re.compile(r"```(\w+(?: \w+)?)\n(.*?)```", re.DOTALL)
LINK = re.compile(r"\]\(([^()\s]+)\)")
QUICK = {"layer", "masks", "training"}  # (of the others, each takes seconds)


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def prose(page: Path) -> str:
    """Its text without code."""
    return re.sub(r"`[^`\n]*`", "", re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL))


def anchors(page: Path) -> set[str]:
    """What can be linked to in it: its headings, in lower case, with hyphens for spaces, without punctuation."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(prose(page)):
        if re.match(r"[a-z]+:", link):  # (an address elsewhere)
            continue
        path, _, anchor = unquote(link).partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{name(page)} links to {link}, which is not there"
        if anchor:
            assert anchor in anchors(target), f"{name(page)} links to {link}: there is no such heading"


def test_every_page_is_on_the_site() -> None:
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    listed = set(re.findall(r": ([\w/]+\.md)$", nav, re.MULTILINE))
    assert listed == {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}


def test_what_the_reference_names_exists() -> None:
    named = [line for page in (DOCS / "api").glob("*.md") for line in re.findall(r"^::: (.+)$", page.read_text(), re.M)]
    assert len(named) == len(set(named)) > 50
    for path in named:
        # (the import of others' libraries takes seconds; the site has them)
        if not path.startswith(("regard.integrations.transformers", "regard.integrations.diffusers")):
            assert pkgutil.resolve_name(path).__doc__, path


def test_the_whole_surface_is_in_the_reference() -> None:
    pages = "\n".join(page.read_text() for page in (DOCS / "api").glob("*.md"))
    missing = [name for name in regard.__all__ if not re.search(rf"^::: regard\.{name}\b", pages, re.MULTILINE)]
    assert not missing


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=[] if page.stem in QUICK else pytest.mark.slow) for page in WITH_CODE],
    ids=lambda page: page.stem,
)
def test_a_page_runs_and_prints_what_it_says(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = page.read_text(encoding="utf-8")
    for model in EMBEDDED:
        if f'load("{model}")' in text and EMBEDDED[model].installed() is None:
            pytest.skip(f"the weights of {model} are not installed")
    for package in ("transformers", "diffusers"):
        if f"import {package}" in text:
            pytest.importorskip(package, reason=f"{package} is not installed")
    monkeypatch.chdir(tmp_path)  # it writes files
    names: dict[str, object] = {}
    printed = ""
    for language, code in BLOCK.findall(text):
        if language == "python":
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                exec(compile(code, str(page), "exec"), names)
            printed = out.getvalue()
        elif language == "text" and ("native" in available() or not code.startswith("native: chosen")):
            assert printed.strip() == code.strip()


def test_what_the_site_changes_in_a_page() -> None:
    change = runpy.run_path(str(DOCS / "site_hooks.py"))["on_page_markdown"]
    assert change("[a file](../src/regard/layer/a.py), [a page](kernel.md)") == "a file, [a page](kernel.md)"
    assert change("Text\n- one\n  more\n- two\n") == "Text\n\n- one\n    more\n- two\n"
    code = "```python\n  x\n- y\n```\n"
    assert change(code) == code
    assert change(code.replace("python", "python torchrun")) == code


@pytest.mark.slow
@pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("mkdocs", "material", "mkdocstrings")),
    reason="mkdocs-material and mkdocstrings, which build the site, are not installed (the extra docs)",
)
def test_the_site_builds_and_asks_nobody(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) > 20
    for page in pages:
        html = page.read_text(encoding="utf-8")
        loads = re.findall(r"<(?:script|img|iframe)[^>]*\ssrc=\"?(https?:[^\s\">]+)", html)
        loads += re.findall(r"<link[^>]*rel=\"?(?:stylesheet|icon|preconnect)\"?[^>]*href=\"?(https?:[^\s\">]+)", html)
        assert not loads, page.name
    reference = (tmp_path / "site" / "api" / "attention.html").read_text(encoding="utf-8")
    assert 'id="regard.attend"' in reference
    assert "<blockquote>" not in reference  # examples of docstrings are code
