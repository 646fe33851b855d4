"""The device "other": a kind of its own in the CPU's memory, compiled in half a minute from `other_device.cpp`.

Values, gradients and views are real; what assumes a CPU fails as it would on a GPU: tensors of two devices in one
operator, `.numpy()`, a generator of the CPU. `pytest --device other` runs the tests that are marked `on_device` on it.
(Gradients of complex numbers crash on it.)
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import subprocess
import tempfile
import types
from pathlib import Path

import torch

__all__ = ["register"]

SOURCE = Path(__file__).with_name("other_device.cpp")


@functools.cache
def register() -> None:
    """Make `torch.device("other")` known in this process."""
    torch.ops.load_library(_compiled())
    torch.utils.rename_privateuse1_backend("other")
    module = types.ModuleType("torch.other")
    for name, value in {
        "is_available": True,
        "is_initialized": True,
        "device_count": 1,
        "current_device": 0,
        "_is_in_bad_fork": False,
        "manual_seed_all": None,
        "get_amp_supported_dtype": [torch.float16, torch.bfloat16],
    }.items():
        setattr(module, name, lambda *_, value=value: value)
    module.device = lambda index: contextlib.nullcontext()  # type: ignore[attr-defined]
    torch._register_device_module("other", module)


def _compiled() -> str:
    """The library, compiled where it was not before: for this source, this torch and this user."""
    known = hashlib.sha256(SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    library = Path(tempfile.gettempdir()) / f"regard-other-device-{os.getuid()}-{known}.so"
    if not library.exists():
        from torch.utils import cpp_extension

        unfinished = library.with_suffix(f".{os.getpid()}")  # (another process may be at it)
        folders = [f"-I{path}" for path in cpp_extension.include_paths()]
        where = cpp_extension.library_paths()[0]
        linked = [f"-L{where}", "-ltorch", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{where}"]
        compiler = os.environ.get("CXX", "g++")
        command = [compiler, "-std=c++20", "-O1", "-fPIC", "-shared", *folders, str(SOURCE), *linked]
        subprocess.run([*command, "-o", str(unfinished)], check=True)
        unfinished.replace(library)
    return str(library)
