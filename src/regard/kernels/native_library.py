"""The native library as Python sees it: where it is, what CPU it runs on, and its functions.

`native/args.h` describes the calls. They are packed as C lays them out, in one step: a ctypes structure filled name by
name would take longer than a small attention.
"""

from __future__ import annotations

import ctypes
import functools
import os
import struct
import warnings
from pathlib import Path
from typing import NamedTuple

import torch  # first: it brings the OpenMP runtime, and the library takes whichever is there

from regard.errors import bad_value

__all__ = [
    "CALL",
    "COPIES",
    "DTYPES",
    "FACTOR",
    "GRADIENTS",
    "NORM",
    "PRODUCT",
    "SEGMENT",
    "Library",
    "load",
    "raise_for",
    "say_once",
    "why_not",
]

FILE = Path(os.environ.get("REGARD_LIBRARY") or Path(__file__).with_name("libregard_native.so"))
INSTRUCTION_SETS = ("auto", "portable", "avx2", "avx512", "avx512_bf16", "amx")  # in the order of `regard_isa`
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # as `regard_dtype`

# struct regard_args, line by line; P is a pointer, q an int64, i an int32, f a float.
CALL = struct.Struct(
    "Qiiii"  # size, isa, threads, dtype, causal
    "7q"  # batch, heads, groups, queries, keys, width, value_width
    "5P"  # q, k, v, out, lse
    "15q"  # their strides
    "ffq"  # scale, softcap, q_start
    "2q"  # before, after
    "2P"  # key_start, key_end
    "2P2q"  # q_docs, k_docs, their strides
    "P4qP4qP2q"  # mask, bias, sinks, each with its strides
    "2P3q2qif"  # drop_rows, drop_cols, their strides, threshold, kept
    "Pq"  # segments, their count
    "2PP2PPPP2q"  # entropy, peak, target, distance, offset, on_first, received, offsets with before and after
    "P2q"  # heatmap, rows, cols
    "P2P2q"  # uncounted; q_positions, k_positions, their strides
    "2P3q"  # columns, column_factors; their count, strides
    "4P2q"  # lists, list_keys, list_begin, list_end; their count, stride
    "2Pq"  # link_weights, link_keys, their count
    "P4q"  # crop, its first row, rows, first column, columns
)
# struct regard_segment: k, v, their scales, the count of keys, the strides of all four
SEGMENT = struct.Struct("4Pq12q")
# struct regard_gradients
GRADIENTS = struct.Struct(
    "Q2P6q"  # size, d_out, d_lse, their strides
    "3P9q"  # d_q, d_k, d_v, their strides
    "P4qP"  # d_bias with its strides, d_sinks
)
# struct regard_product: size, isa, threads, dtype, after; rows, width, factors; x, its stride
PRODUCT = struct.Struct("Qiiii3qPq")
# struct regard_factor: weight, bias, out, other; outs, the strides of weight, out and other
FACTOR = struct.Struct("4P4q")
# struct regard_norm: size, isa, threads, dtype, eps, more; rows, width; x, weight, out; the stride of x
NORM = struct.Struct("QiiiffqqPPPq")
# struct regard_copies_args: size; ids, after; items, tokens, kinds; keys, begin, end
COPIES = struct.Struct("Q2P3q3P")

_STATUS = {
    1: "the library was built from another version of its source; remedy: install regard again",
    2: "a size is out of range",
    3: "the CPU lacks the instructions asked for",
}


class Library(NamedTuple):
    """The library's functions. Each call releases the GIL."""

    handle: ctypes.CDLL
    best: str  # of INSTRUCTION_SETS, on this CPU

    @property
    def usable(self) -> list[str]:
        """The instruction sets that it was compiled for and this CPU has."""
        return [name for i, name in enumerate(INSTRUCTION_SETS) if i and self.handle.regard_has_isa(i)]

    def attention(self, call: bytes) -> None:
        """Forward, and statistics."""
        raise_for(self.handle.regard_attention(call))

    def backward(self, call: bytes, gradients: bytes) -> None:
        """Gradients."""
        raise_for(self.handle.regard_attention_backward(call, gradients))

    def multiply(self, product: bytes, factors: bytes) -> None:
        """Projections."""
        raise_for(self.handle.regard_multiply(product, factors))

    def rms_norm(self, norm: bytes) -> None:
        """Rows divided by their root mean square."""
        raise_for(self.handle.regard_rms_norm(norm))

    def copies(self, arguments: bytes) -> None:
        """For each token of a text the lists of its earlier copies."""
        raise_for(self.handle.regard_copies(arguments))


def raise_for(status: int) -> None:
    """Raise where a call gave anything but 0."""
    if status == 4:
        raise MemoryError("native kernel: no memory for its working space")
    if status:
        raise RuntimeError(f"native kernel: {_STATUS.get(status, f'status {status}')}")


# Looked for at first use, not at import.
_found: tuple[Library | None, str | None] | None = None  # the library, or why there is none
instruction_set: int | None = None  # which one to use, as the library counts them


def isa() -> int:
    """The instruction set to use: the best of this CPU (0), or the one that REGARD_ISA names."""
    global instruction_set
    if instruction_set is None:
        name = os.environ.get("REGARD_ISA", "auto")
        if name not in INSTRUCTION_SETS:
            raise bad_value("REGARD_ISA", expected=f"one of {', '.join(INSTRUCTION_SETS)}", received=repr(name))
        instruction_set = INSTRUCTION_SETS.index(name)
    return instruction_set


def _find_once() -> tuple[Library | None, str | None]:
    global _found
    if _found is None:
        _found = find(FILE)
    return _found


def load() -> Library | None:
    """The library, or None where there is none, or where REGARD_NATIVE=0 turned it off before it was first used."""
    return _find_once()[0]


def why_not() -> str | None:
    """In words, where `load` gives None."""
    return _find_once()[1]


@functools.lru_cache(1)
def say_once() -> None:
    """That there is no library, where nobody turned it off: all works, but slower than it might."""
    if load() is None and os.environ.get("REGARD_NATIVE") != "0":
        warnings.warn(
            f"regard runs without its native kernel, on PyTorch's own: {why_not()}. `regard doctor` tells more; "
            "REGARD_NATIVE=0 in the environment says that this is meant",
            RuntimeWarning,
            stacklevel=2,
        )


def find(file: Path) -> tuple[Library | None, str | None]:
    """The library in a file, or why not."""
    if os.environ.get("REGARD_NATIVE") == "0":
        return None, "REGARD_NATIVE=0 turns it off"
    if not file.exists():
        return None, "it was not compiled: no C++17 compiler was found when regard was installed"
    try:
        handle = ctypes.CDLL(str(file))
    except OSError as error:
        try:  # a torch without OpenMP leaves its functions open
            ctypes.CDLL("libgomp.so.1", ctypes.RTLD_GLOBAL)
            handle = ctypes.CDLL(str(file))
        except OSError:
            return None, f"it does not load: {error}"
    if not all(_fits(handle, name, layout) for name, layout in _SIZES.items()):
        return None, "it was compiled from another version of its source: install regard again"
    handle.regard_attention.argtypes = [ctypes.c_char_p]
    handle.regard_attention_backward.argtypes = [ctypes.c_char_p, ctypes.c_char_p]
    handle.regard_multiply.argtypes = [ctypes.c_char_p, ctypes.c_char_p]
    handle.regard_rms_norm.argtypes = [ctypes.c_char_p]
    handle.regard_copies.argtypes = [ctypes.c_char_p]
    return Library(handle, INSTRUCTION_SETS[handle.regard_best_isa()]), None


_SIZES = {
    "regard_args_size": CALL,
    "regard_gradients_size": GRADIENTS,
    "regard_product_size": PRODUCT,
    "regard_norm_size": NORM,
    "regard_copies_args_size": COPIES,
}


def _fits(handle: ctypes.CDLL, name: str, layout: struct.Struct) -> bool:
    """Whether the library has a structure of ours, in our size."""
    size = getattr(handle, name, None)
    if size is None:
        return False
    size.restype = ctypes.c_uint64
    return size() == layout.size


@functools.cache
def _cpu_info() -> str:
    """What the system says of the first core; nothing where it does not say."""
    try:
        with open("/proc/cpuinfo") as lines:
            return lines.read(8192)
    except OSError:
        return ""


def has_amx() -> bool:
    """Whether the CPU has tiles for products of bfloat16."""
    return "amx_bf16" in _cpu_info()


def uses_tiles() -> bool:
    """Whether our own attention multiplies on them, which it does only where REGARD_ISA=amx asks for it."""
    return INSTRUCTION_SETS[isa()] == "amx"


def is_intel() -> bool:
    """Whether the CPU is Intel's, for which MKL is written."""
    return "GenuineIntel" in _cpu_info()


def is_zen5() -> bool:
    """Whether the CPU is AMD's, Zen 5 or later: 512 bits wide, of which MKL uses half. (Mobile ones: not measured.)"""
    return "AuthenticAMD" in _cpu_info() and "avx512_vp2intersect" in _cpu_info()


# Compilers ask these and take the answer for a constant, instead of tracing into ctypes and files: this mark is
# what `torch.compiler.assume_constant_result` sets, without its import of the compiler.
for _constant in (why_not, has_amx, is_zen5, uses_tiles):
    _constant._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]
