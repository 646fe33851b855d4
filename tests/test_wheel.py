"""The wheel: its tag, what is in it, and that it runs where it is unpacked, with its native kernel."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata  # (to look for pip itself makes setuptools fail to import)
from pathlib import Path

import pytest

from regard.kernels import available

ROOT = Path(__file__).parent.parent
LIBRARY = "regard/kernels/libregard_native.so"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not all(any(metadata.distributions(name=name)) for name in ("pip", "setuptools")),
        reason="pip and setuptools, which build the wheel, are not installed",
    ),
]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that nothing of an earlier build gets in. (A library that is newer than its source is
    taken as it is.)"""
    folder = tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy2(ROOT / name, folder)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", "dist", "."]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (built,) = (folder / "dist").glob("*.whl")
    return built


def test_it_has_what_the_package_reads(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    source = ROOT / "src"
    wanted = [source / "regard" / "py.typed", *source.glob("regard/heads/analysis/atlases/*.json")]
    wanted += [path for kind in ("html", "css", "js") for path in source.glob(f"regard/draw/page/**/*.{kind}")]
    wanted += source.glob("regard/**/*.py")
    assert len(wanted) > 100
    assert not {path.relative_to(source).as_posix() for path in wanted} - names
    assert not [name for name in names if not name.startswith(("regard/", "regard-"))]


@pytest.mark.skipif("native" not in available(), reason="the native kernel is not compiled here")
def test_its_tag_is_the_glibc_that_its_library_needs(wheel: Path, tmp_path: Path) -> None:
    library = Path(zipfile.ZipFile(wheel).extract(LIBRARY, tmp_path))
    assert wheel.name.split("-")[2:4] == ["py3", "none"]
    platform = wheel.stem.split("-")[-1]
    if not platform.startswith("manylinux"):
        pytest.skip(f"the compiler here uses a libstdc++ that is too new, or there is no glibc: {platform}")
    claimed = int(re.fullmatch(r"manylinux_2_(\d+)_\w+", platform)[1])
    if shutil.which("readelf") is None:
        pytest.skip("readelf is not installed")
    needs = subprocess.run(["readelf", "-VdW", str(library)], capture_output=True, text=True, check=True).stdout
    assert max(int(minor) for minor in re.findall(r"GLIBC_2\.(\d+)", needs)) == claimed
    # nothing beyond what every such system has; in particular no OpenMP, which torch brings
    brought = {"libstdc++", "libm", "libgcc_s", "libc", "libpthread", "ld-linux-x86-64", "ld-linux-aarch64"}
    assert set(re.findall(r"NEEDED.*\[([^.]+)\.so", needs)) <= brought


def test_it_runs_where_it_is_unpacked(wheel: Path, tmp_path: Path) -> None:
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", "site", str(wheel)]
    done = subprocess.run(install, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    program = (
        "import sys; sys.path.insert(0, 'site')\n"
        "import regard, torch\n"
        "print(regard.__file__)\n"
        "print(regard.explain(*torch.randn(3, 1, 2, 5, 8)))\n"
        "print(regard.atlas('minilm')[2, 8][0].role)\n"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env={"PATH": ""})
    assert done.returncode == 0, done.stderr
    where, *explained = done.stdout.splitlines()
    assert "site" in where
    assert str(ROOT) not in where
    if "native" in available():
        assert explained[0] == "native: chosen"
