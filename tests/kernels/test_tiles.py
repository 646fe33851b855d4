"""Attention on AMX tiles (`native/tiles.h`). Most CPUs have none: there these tests are skipped where they stand, and
`test_in_the_emulator` runs them in another process, in which `tiles_emulator.c` executes the instructions."""

from __future__ import annotations

import ctypes
import math
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from attention_cases import Case, assert_accurate, assert_typically_accurate, plain
from torch import Tensor

import regard
from regard.kernels import native
from regard.kernels import native_library as library
from regard.masks import Causal, Documents, Keep, Mask, Padding, Window
from regard.measures import Heatmap, Offsets
from regard.positions import Alibi

HERE = Path(__file__).parent
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
AMX = library.INSTRUCTION_SETS.index("amx")

usable = [] if (loaded := library.load()) is None else loaded.usable
on_tiles = pytest.mark.skipif(
    "amx" not in usable, reason="this CPU has no tiles: `test_in_the_emulator` runs this in another process"
)
needs_library = pytest.mark.skipif(loaded is None, reason=f"the native kernel is not here: {library.why_not() or ''}")


def tile_products() -> int | None:
    """How many products of tiles the emulator has computed; None where the CPU does it."""
    process = ctypes.CDLL(None)
    if not hasattr(process, "regard_tile_products"):
        return None
    process.regard_tile_products.restype = ctypes.c_uint64
    return process.regard_tile_products()


@pytest.fixture
def tiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Attention is asked to multiply on tiles; that it does is checked afterwards, as far as that can be known."""
    monkeypatch.setattr(library, "instruction_set", AMX)
    before = tile_products()
    yield
    assert before is None or tile_products() > before, "no tile was multiplied"


@pytest.fixture
def threads() -> Iterator[Any]:
    """Sets the number of threads; the former one comes back."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def normal(*shapes: tuple[int, ...], seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator) for shape in shapes]


def case_of(n: int, m: int, d: int, e: int, **options: Any) -> Case:
    """Three query heads to each of two kv heads."""
    return Case(*normal((1, 6, n, d), (1, 2, m, d), (1, 2, m, e), seed=n + d), options)


def check(case: Case, what: str) -> None:
    assert_accurate(case, case.with_gradients(case.attend("native")), what)


# --- as good as plain PyTorch ----------------------------------------------------------------------------------------

OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"mask": Causal()},
    "window": {"mask": Causal() & Window(21)},
    "both ways": {"mask": Window(before=9, after=30)},
    "padding": {"mask": Padding(lengths=torch.tensor([71]))},
    "holes": {"mask": Padding(keep=torch.arange(97)[None] % 7 > 1)},
    "documents": {"mask": Causal() & Documents(torch.arange(67) // 19, torch.arange(97) // 19)},
    "dense": {"mask": Keep(torch.arange(67 * 97).view(67, 97) % 5 != 0)},
    "bias": {"bias": normal((1, 6, 67, 97)), "mask": Causal()},
    "alibi": {"bias": [Alibi(6)], "mask": Causal()},
    "softcap": {"softcap": 0.7},
    "sinks": {"sinks": normal((6,))[0], "mask": Window(21)},
    "scale": {"scale": -0.3},
    "dropout": {"dropout": 0.3},
    "everything": {
        "bias": normal((1, 6, 67, 97)),
        "sinks": normal((6,))[0],
        "softcap": 3.0,
        "dropout": 0.1,
        "mask": Causal() & Window(29),
    },
}


@on_tiles
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_as_good_as_plain_pytorch(dtype: torch.dtype, options: str, tiles: None) -> None:
    check(case_of(67, 97, 37, 19, **OPTIONS[options]).to(dtype, "transposed"), options)


@on_tiles
@pytest.mark.parametrize("strides", ["plain", "gaps", "columns"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_strides(dtype: torch.dtype, strides: str, tiles: None) -> None:
    for d, e in [(37, 19), (64, 64)]:  # (bfloat16 of whole tiles is read where it lies)
        check(case_of(67, 97, d, e, mask=Causal()).to(dtype, strides), f"{strides}, {d}, {e}")


@on_tiles
@pytest.mark.parametrize("dtype", DTYPES)
def test_widths_around_those_of_tiles(dtype: torch.dtype, tiles: None) -> None:
    for d, e in [(1, 1), (2, 15), (15, 16), (16, 17), (31, 33), (32, 32), (33, 31), (64, 2), (65, 64), (97, 129)]:
        check(case_of(43, 47, d, e, mask=Causal()).to(dtype), f"{d}, {e}")


@on_tiles
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask", [None, Causal(), Causal() & Window(23)])
def test_sizes_around_those_of_tiles(mask: Mask | None, dtype: torch.dtype, tiles: None) -> None:
    for n, m in [(31, 1), (17, 15), (33, 16), (47, 17), (64, 31), (65, 32), (129, 33), (63, 65), (41, 577)]:
        check(case_of(n, m, 5, 3, **({} if mask is None else {"mask": mask})).to(dtype), f"{n} x {m}")


@on_tiles
@pytest.mark.parametrize("dtype", DTYPES)
def test_typical_errors(dtype: torch.dtype, tiles: None) -> None:
    """As a whole, too, which does not hang on a single number: float32 is multiplied in parts that make it up."""
    case = case_of(131, 211, 64, 64).to(dtype)
    assert_typically_accurate(case, case.with_gradients(case.attend("native")), str(dtype))


# --- statistics ------------------------------------------------------------------------------------------------------


@on_tiles
@pytest.mark.parametrize("mask", [None, Causal(), Causal() & Window(21), Padding(lengths=torch.tensor([71]))])
def test_statistics_are_those_of_the_formula(mask: Mask | None, tiles: None) -> None:
    q, k, v = normal((1, 6, 67, 37), (1, 2, 97, 37), (1, 2, 97, 19))
    names = ["entropy", "peak", "distance", "offset", "received", "on_first", "offsets", "heatmap"]
    every = [*names[:-2], Offsets(5, 3), Heatmap(7, 5)]
    ours = regard.measure(q, k, v, mask=mask, measures=every, kernel="native")
    right = regard.measure(q.double(), k.double(), v.double(), mask=mask, measures=every, kernel="reference")
    assert torch.equal(ours.seen, right.seen)
    assert torch.equal(ours.target, right.target)
    for name in [*names, "output", "lse"]:
        scale = max(1.0, right[name].abs().max().item()) if name in names else 1.0
        wrong = (getattr(ours, name).double() - getattr(right, name)).abs().max().item() / scale
        assert wrong < 3e-6, f"{name} is off by {wrong}"


@on_tiles
@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_and_repeats_change_no_bit(dtype: torch.dtype, threads: Any, tiles: None) -> None:
    case = case_of(131, 151, 37, 19, mask=Causal()).to(dtype)
    found = []
    for count in (1, 2, 2):  # (enough blocks for both, so that their rows are the same)
        threads(count)
        with torch.no_grad():
            measured = regard.measure(*case.leaves(), **case.options, measures=["entropy"], kernel="native")
        found.append([case.attend("native"), measured.output, measured["entropy"]])
    for others in found[1:]:
        assert all(map(torch.equal, found[0], others))


# --- numbers that are none, and numbers that are large or small -------------------------------------------------------


@on_tiles
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_value_that_is_no_number_is_for_those_who_see_it(bad: float, tiles: None) -> None:
    q, k, v = (x.bfloat16() for x in normal((2, 4, 67, 7), (2, 2, 97, 7), (2, 2, 97, 5)))
    hidden, seen = v.clone(), v.clone()
    hidden[0, :, 89:] = bad
    hidden[1, :, 51:, 3] = bad
    seen[0, 0, 53, 0] = bad
    mask = Padding(lengths=torch.tensor([89, 51]))
    clean = regard.attend(q, k, v, mask=mask, kernel="native")
    # (Weights are not rounded where values are no numbers, so outputs, of about 1, may differ by a rounding.)
    for same in (mask, Keep(torch.arange(97) < torch.tensor([89, 51])[:, None, None])):
        out = regard.attend(q, k, hidden, mask=same, kernel="native")
        torch.testing.assert_close(out, clean, rtol=10 * 2**-7, atol=2**-7)
    out, right = (regard.attend(q, k, seen, mask=Causal(), kernel=kernel) for kernel in ("native", "reference"))
    assert not right.isfinite().all()
    torch.testing.assert_close(out, right, rtol=10 * 2**-7, atol=2**-7, equal_nan=True)


@on_tiles
def test_rows_that_see_nothing(tiles: None) -> None:
    q, k, v = normal((2, 2, 67, 7), (2, 2, 41, 7), (2, 2, 41, 5))
    mask = Padding(lengths=torch.tensor([0, 41])) & Keep(torch.arange(67)[:, None] != 0)
    for dtype in DTYPES:
        out, lse = native.forward(regard.attention.prepare(*(x.to(dtype) for x in (q, k, v)), mask=mask))
        assert (out[0] == 0).all()
        assert (out[:, :, 0] == 0).all()
        assert lse[0].isneginf().all()
        assert lse[1, :, 1:].isfinite().all()


@on_tiles
@pytest.mark.parametrize("values", [2.0**-39, 2.0**50])
@pytest.mark.parametrize("share", [0.0, 0.5])
def test_numbers_of_a_large_range(share: float, values: float, tiles: None) -> None:
    """Scores in the hundreds; and values of which some are far below the others."""
    case = case_of(67, 97, 37, 19)
    small = torch.rand(case.v.shape, generator=torch.Generator().manual_seed(1)) < share
    v = torch.where(small, case.v * 2.0**-30, case.v) * values
    check(Case(case.q * 100, case.k, v).to(torch.float32), f"values of {values}, {share} of them small")


@on_tiles
def test_all_parts_of_float32_are_multiplied(tiles: None) -> None:
    """Numbers of 24 bits each: one product that is left out shows up in the last of them."""
    q, k, v = (x * (1 + 2**-9 + 2**-17) for x in normal((1, 6, 67, 64), (1, 2, 97, 64), (1, 2, 97, 64)))
    ours, right = regard.attend(q, k, v, kernel="native"), regard.attend(q.double(), k.double(), v.double())
    error, theirs = ((x - right).square().mean().sqrt().item() for x in (ours, plain(Case(q, k, v))))
    assert error <= 2 * theirs  # (without the smallest of the six products 10 times)


NAN, INF = float("nan"), float("inf")
NOT_FOR_TILES = [
    *((which, size, torch.float32) for which in "qkv" for size in (2.0**-60, 2.0**-120, 2.0**-140, 2.0**61, NAN, INF)),
    *((which, size, torch.bfloat16) for which in "qk" for size in (2.0**12, NAN, INF)),
    *((which, 2.0**12, torch.float32) for which in "qk"),
    ("q", NAN, torch.float16),
]


@on_tiles
@pytest.mark.parametrize("which, size, dtype", NOT_FOR_TILES)
def test_numbers_that_are_not_for_tiles(
    which: str, size: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose parts are subnormal, whose scores differ where they are summed in another order, and those that are none:
    other instructions serve."""
    before = tile_products()
    case = case_of(67, 97, 37, 19)
    if math.isfinite(size):
        setattr(case, which, getattr(case, which) * size)
    else:
        getattr(case, which)[0, 1, 53, 0] = size
    outs = []
    for name in ("amx", "avx512_bf16"):
        monkeypatch.setattr(library, "instruction_set", library.INSTRUCTION_SETS.index(name))
        outs.append(case.to(dtype).attend("native").detach())
    assert tile_products() == before
    torch.testing.assert_close(*outs, rtol=0, atol=0, equal_nan=True)


# --- who uses them ---------------------------------------------------------------------------------------------------


@needs_library
def test_tiles_are_for_those_who_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    """No time was measured with them: where a CPU has them, torch's own kernel computes bfloat16 in bulk."""
    assert loaded is not None
    assert loaded.best != "amx"
    monkeypatch.setattr(library, "has_amx", lambda: True)
    q = torch.randn(1, 2, 67, 8)
    for name, dtype, ours in [
        ("auto", torch.bfloat16, False),
        ("auto", torch.float32, True),
        ("amx", torch.bfloat16, True),
        ("amx", torch.float32, True),
    ]:
        monkeypatch.setattr(library, "instruction_set", library.INSTRUCTION_SETS.index(name))
        assert native.worth(regard.attention.prepare(*[q.to(dtype)] * 3)) == ours, (name, dtype)


@needs_library
@pytest.mark.skipif("amx" in usable, reason="this CPU has tiles, or an emulator runs them")
def test_asked_for_and_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "instruction_set", AMX)
    q = torch.randn(1, 2, 67, 8)
    with pytest.raises(RuntimeError, match="the CPU lacks the instructions asked for"):
        regard.attend(q, q, q, kernel="native")


# --- where there are none --------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The emulator as a library to be loaded first."""
    if "amx" in usable:
        pytest.skip("this CPU has tiles, so the other tests ran on them; or this is the emulator's process")
    if not (sys.platform == "linux" and platform.machine() == "x86_64" and "avx512_bf16" in usable):
        pytest.skip("the emulator is for Linux on CPUs with AVX-512 and products of bfloat16")
    compiler = os.environ.get("CC") or next((name for name in ("cc", "gcc", "clang") if shutil.which(name)), None)
    if compiler is None:
        pytest.skip("no C compiler was found")
    target = tmp_path_factory.mktemp("emulator") / "tiles_emulator.so"
    flags = ["-O2", "-mavx512f", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    subprocess.run([compiler, *flags, "-o", str(target), str(HERE / "tiles_emulator.c")], check=True)
    return target


@pytest.mark.slow
def test_in_the_emulator(emulator: Path) -> None:
    """All tests of this file, in another process."""
    options = ["-q", "-p", "no:faulthandler", "-p", "no:cacheprovider", "-p", "no:xdist"]  # (the first takes SIGILL)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(HERE / "test_tiles.py")],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=HERE.parent.parent,
        env={**os.environ, "LD_PRELOAD": str(emulator), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert "this CPU has no tiles" not in done.stdout
