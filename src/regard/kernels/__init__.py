"""Ways to compute the same thing. `reference` says what is right; the others are faster or smaller.

To add a kernel: one file with `name`, `why_not`, `worth`, `forward`, `output` (see `call.py`), and a line in `KERNELS`.
"""

from __future__ import annotations

from regard.errors import bad_value
from regard.kernels import blockwise, fused, native, reference
from regard.kernels import native_library as library
from regard.kernels.call import Call, Kernel

__all__ = ["KERNELS", "Call", "Kernel", "available", "choose", "explain"]

# In the order in which "auto" asks: the fastest first, the one that serves everything last.
KERNELS: tuple[Kernel, ...] = (native, fused, blockwise, reference)


def available() -> list[str]:
    """The names of the kernels on this machine, in the order in which "auto" asks them.

    >>> available()[-3:]  # before them "native", where it was compiled
    ['fused', 'blockwise', 'reference']
    """
    return [kernel.name for kernel in KERNELS if kernel is not native or library.load() is not None]


def choose(kernel: str, call: Call) -> Kernel:
    """The kernel for a call: the first that can serve for "auto"; the one named, or an error that says why not."""
    if kernel == "auto":
        for candidate in KERNELS:
            if candidate.why_not(call) is None and candidate.worth(call):
                return candidate
        raise AssertionError("reference serves every call")
    for candidate in KERNELS:
        if candidate.name == kernel:
            reason = candidate.why_not(call)
            if reason is not None:
                raise bad_value(
                    f"kernel {kernel!r}",
                    expected="a call that it can serve",
                    received=f"one it cannot: {reason}",
                    remedy='kernel="auto" chooses one that can',
                )
            return candidate
    raise bad_value("kernel", expected=f'"auto" or one of {available()}', received=repr(kernel))


def explain(kernel: str, call: Call) -> str:
    """Which kernel serves a call, and why not the others, in words."""
    chosen = choose(kernel, call)
    lines = []
    for candidate in KERNELS:
        reason = candidate.why_not(call)
        if candidate is chosen:
            lines.append(f"{candidate.name}: chosen")
        elif reason is not None:
            lines.append(f"{candidate.name}: no, {reason}")
        else:
            lines.append(
                f"{candidate.name}: could serve, but {chosen.name} "
                + ("was named" if kernel != "auto" else "is faster")
            )
    return "\n".join(lines)
