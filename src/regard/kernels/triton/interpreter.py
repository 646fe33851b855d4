"""Triton's interpreter (TRITON_INTERPRET=1) made right for bfloat16, and quicker. It runs device code on a CPU, in
numpy.

It multiplies the bit patterns of bfloat16 numbers in `tl.dot`, and cuts float32 off where a GPU rounds to the nearest
even; both without a word. `repair` mends these two, and patches the language once per launch in place of once per call
of a device function, which takes most of the time of small tests. Device code does no other arithmetic in bfloat16.
"""

from __future__ import annotations

import functools
import os
import types
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

__all__ = ["interpreting", "quiet_numpy", "repair"]


def interpreting() -> bool:
    """Whether Triton interprets in this process. (It reads the variable when it is imported.)"""
    return os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def repair() -> None:
    """Mend the interpreter, once per process."""
    import triton.language as tl
    from triton.runtime import interpreter

    builder: Any = interpreter.InterpreterBuilder
    handle_of: Any = interpreter.TensorHandle
    cast, dot = builder.cast_impl, builder.create_dot

    def cast_rounding(self: Any, source: Any, kind: Any) -> Any:
        from_kind, to_kind = source.dtype.scalar, kind.scalar
        if to_kind == tl.bfloat16 and from_kind == tl.float32:
            return handle_of(_to_bfloat16(source.data), tl.bfloat16)
        if from_kind == tl.bfloat16 and to_kind == tl.float32:
            return handle_of(_to_float32(source.data), tl.float32)
        return cast(self, source, kind)

    def dot_of_numbers(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        a, b = (handle_of(_to_float32(x.data), tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
        return dot(self, a, b, d, *options)

    def call(self: Any, *args: Any, **options: Any) -> Any:
        return self.rewrite()(*args, **options)  # (the launch has patched the language)

    def patch_all(_: Any) -> Any:
        return patch(types.SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))

    patch = interpreter._patch_lang
    interpreter._patch_lang = patch_all
    builder.cast_impl, builder.create_dot = cast_rounding, dot_of_numbers
    interpreter.InterpretedFunction.__call__ = call


def quiet_numpy() -> AbstractContextManager[Any]:
    """A context in which numpy computes with NaN and inf without warnings, as a GPU does."""
    import numpy as np

    return np.errstate(all="ignore")


def _to_float32(bits: np.ndarray) -> np.ndarray:
    """bfloat16 is the upper half of float32."""
    import numpy as np

    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _to_bfloat16(numbers: np.ndarray) -> np.ndarray:
    """To the nearest, of two equally near to the even one."""
    import numpy as np

    bits = np.ascontiguousarray(numbers, dtype=np.float32).view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)
    quiet = (bits >> np.uint32(16)) | np.uint32(0x40)  # NaN stays NaN
    return np.where(np.isnan(numbers), quiet, rounded).astype(np.uint16)
