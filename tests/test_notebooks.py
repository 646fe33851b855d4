"""The notebooks in examples/notebooks run from top to bottom; what is stored in them is small."""

from __future__ import annotations

import importlib.util
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from regard.models import EMBEDDED

FOLDER = Path(__file__).parent.parent / "examples" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
SOURCE = str(FOLDER.parent.parent / "src")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_its_outputs_are_stored_and_small(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text) < 300_000
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))  # run once, in order
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert outputs
    assert not [output for output in outputs if output["output_type"] == "error" or output.get("name") == "stderr"]
    assert not re.search(r"/(?:home|tmp|root|work|Users)/", text)  # no paths of one machine


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("nbclient", "ipykernel", "matplotlib"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed (the extra notebooks)")
    text = path.read_text(encoding="utf-8")
    for model in EMBEDDED:
        if f'load(\\"{model}\\")' in text and EMBEDDED[model].installed() is None:
            pytest.skip(f"the weights of {model} are not installed")
    import nbclient  # pyright: ignore[reportMissingImports]
    import nbformat  # pyright: ignore[reportMissingImports]

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([SOURCE, os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = nbformat.reads(text, as_version=4)
    nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    for ran, before in zip(notebook.cells, json.loads(text)["cells"], strict=True):  # it shows what is stored
        assert _shown(ran) == _shown(before)


def _shown(cell: Any) -> list[list[str]]:
    """The kinds of what a cell shows: text, HTML, pictures."""
    return [sorted(output["data"]) for output in cell.get("outputs", []) if "data" in output]
