"""docs/variants.md says what `regard.presets` says."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
from pathlib import Path
from types import ModuleType

import pytest

from regard.presets import CONFIGURATIONS, configuration

pytestmark = pytest.mark.on_device

DOCS = Path(__file__).parent.parent / "docs"


@pytest.fixture(scope="module")
def variants() -> ModuleType:
    spec = importlib.util.spec_from_file_location("variants", DOCS / "variants.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_is_the_generated_one(variants: ModuleType) -> None:
    found = variants.MARKED.search((DOCS / "variants.md").read_text(encoding="utf-8"))
    assert found is not None
    assert found[2] == variants.table(), "run: python docs/variants.py"


def test_every_model_is_in_it_with_its_year(variants: ModuleType) -> None:
    names = [name for name, _ in variants.by_year()]
    assert sorted(names) == sorted(CONFIGURATIONS)
    years = [configuration(name).year for name in names]
    assert years == sorted(years)
    assert min(years) >= 2017


def test_bytes(variants: ModuleType) -> None:
    """In bfloat16: DeepSeek-V3 keeps 61 layers of 512 + 64 numbers; Gemma 3 keeps 5 layers for good."""
    deepseek, gemma, mistral = (configuration(name) for name in ("deepseek-v3", "gemma3-4b", "mistral-7b"))
    assert variants.in_all_layers(deepseek) == 61 * (512 + 64) * 2
    assert variants.with_all_heads(deepseek) == 61 * 128 * (192 + 128) * 2
    assert variants.in_all_layers(gemma) == 34 * 2 * 4 * 256 * 2
    assert variants.in_unbounded_layers(gemma) == 5 * 2 * 4 * 256 * 2
    assert variants.in_unbounded_layers(mistral) == 0
    assert variants.row("mistral-7b", mistral)[-2] == "0"
    assert variants.row("bert-base", configuration("bert-base"))[6:11] == [""] * 5


def test_parts_in_words(variants: ModuleType) -> None:
    words = variants.parts_of(configuration("llama4-scout"))
    assert words.startswith("grouped kv heads, rotary, none in every 4th layer, chunks of 8192 in 36 of 48 layers")
    assert variants.parts_of(configuration("deepseek-v3")) == "latent of 512 + 64, rotary"
    assert variants.parts_of(configuration("gpt2")) == "learned positions"


def test_its_example_runs() -> None:
    page = (DOCS / "variants.md").read_text(encoding="utf-8")
    (_, program), (_, printed) = re.findall(r"```(\w+)\n(.*?)```", page, re.DOTALL)
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(program, "variants.md", "exec"), {})
    assert out.getvalue().strip() == printed.strip()


def test_links_and_the_picture(variants: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra `draw` is not installed")
    for target in re.findall(r"\]\(([^)#:]+)\)", (DOCS / "variants.md").read_text(encoding="utf-8")):
        assert (DOCS / target).exists(), target
    variants.picture(tmp_path / "variants.png")
    assert (tmp_path / "variants.png").read_bytes().startswith(b"\x89PNG")
