"""Run compiled models eagerly while they are captured: compiled code calls no torch functions that could be seen."""

from __future__ import annotations

import sys
import threading
from contextlib import ExitStack

import torch
from torch import nn

from regard.heads.capture.huggingface import uses_flex_attention

__all__ = ["eager_mode"]

_DISABLE_FLEX_COMPILE = "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG"  # `flex_attention` compiles itself unless this is set


class _EagerMode:
    """Disables torch.compile, and the compilation of `flex_attention`, while at least one capture is active. Both
    switches are process-wide, so active captures are counted."""

    def __init__(self) -> None:
        self.lock, self.count, self.undo = threading.Lock(), 0, ExitStack()
        self.compile_disabled = False

    def start(self, modules: list[nn.Module]) -> None:
        """Count one more capture, of a model with these modules."""
        with self.lock:
            self.count += 1
            flex = sys.modules.get("torch.nn.attention.flex_attention")
            if self.count == 1 and hasattr(flex, _DISABLE_FLEX_COMPILE):
                self.undo.callback(setattr, flex, _DISABLE_FLEX_COMPILE, getattr(flex, _DISABLE_FLEX_COMPILE))
                setattr(flex, _DISABLE_FLEX_COMPILE, True)
            # If nothing was compiled yet, and nothing will be, the compiler is not imported.
            if not self.compile_disabled and ("torch._dynamo" in sys.modules or uses_flex_attention(modules)):
                self.undo.enter_context(torch.compiler.set_stance("force_eager"))
                self.compile_disabled = True

    def stop(self) -> None:
        """Count one capture less; the last one puts both switches back."""
        with self.lock:
            self.count -= 1
            if not self.count:
                self.undo.close()
                self.compile_disabled = False


eager_mode = _EagerMode()
