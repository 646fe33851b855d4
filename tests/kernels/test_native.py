"""The native kernel beyond what every kernel is tested for: block edges, instruction sets, threads, NaN, extremes."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_cases import Case, assert_accurate, assert_typically_accurate, cases
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import regard
from regard.kernels import native, reference
from regard.kernels import native_library as library
from regard.masks import Causal, Documents, Keep, Mask, Padding, Prefix, Window
from regard.measures import Heatmap, Offsets
from regard.positions import Alibi, RelativeBias

pytestmark = pytest.mark.skipif(
    library.load() is None, reason=f"the native kernel is not here: {library.why_not() or ''}"
)

EXAMPLES = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
STRIDES = st.sampled_from(["plain", "transposed", "gaps", "columns"])
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EVERY = ["entropy", "peak", "distance", "offset", Offsets(5, 3), "received", "on_first", Heatmap(7, 5)]

loaded = library.load()
SETS = [] if loaded is None else loaded.usable


@pytest.fixture(
    params=[
        name if loaded is not None and name == loaded.best else pytest.param(name, marks=pytest.mark.slow)
        for name in SETS
    ]
)
def instruction_set(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each that this CPU has: the same source, compiled for it."""
    monkeypatch.setattr(library, "instruction_set", library.INSTRUCTION_SETS.index(request.param))
    return request.param


@pytest.fixture
def threads():
    """Sets the number of threads; the former one comes back."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


# --- the same answers as every kernel -------------------------------------------------------------------------------


@EXAMPLES
@given(cases(), st.sampled_from(DTYPES), STRIDES)
def test_as_good_as_plain_pytorch(case: Case, dtype: torch.dtype, strides: str) -> None:
    case = case.to(dtype, strides)
    out, lse = native.forward(case.call())
    assert lse.dtype == torch.float32
    assert_accurate(case, case.with_gradients(out), "native")


@EXAMPLES
@given(cases(), STRIDES)
def test_log_sum_exp_and_its_gradient(case: Case, strides: str) -> None:
    case, precise = case.to(torch.float32, strides), case.to(torch.float64)
    out, lse = native.forward(case.call())
    right_lse = reference.forward(precise.call())[1]
    torch.testing.assert_close(lse.double(), right_lse, rtol=2e-6, atol=2e-6)
    assert_accurate(case, case.with_gradients(out, lse), "native", lse=True)


MASKS: dict[str, Any] = {
    "none": lambda b, h, n, m: None,
    "causal": lambda b, h, n, m: Causal(),
    "window": lambda b, h, n, m: Causal() & Window(21),
    "both ways": lambda b, h, n, m: Window(before=9, after=30),
    "padding": lambda b, h, n, m: Padding(lengths=torch.arange(b) * 31 % (m + 1)),
    "holes": lambda b, h, n, m: Padding(keep=torch.arange(b * m).view(b, m) % 7 > 1),
    "left": lambda b, h, n, m: Causal() & Padding(keep=torch.arange(m)[None] >= torch.arange(b)[:, None] * 5),
    "documents": lambda b, h, n, m: Causal() & Documents(torch.arange(n) // 37, torch.arange(m) // 37),
    "dense": lambda b, h, n, m: Keep(torch.arange(n * m).view(n, m) % 5 != 0),
    "per head": lambda b, h, n, m: Keep(torch.arange(h * n * m).view(1, h, n, m) % 3 != 0),
    "prefix": lambda b, h, n, m: Causal() | Prefix(19),
}
EDGES = [1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 67, 127, 129]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sizes_around_every_edge(dtype: torch.dtype, mask: str, instruction_set: str) -> None:
    generator = torch.Generator().manual_seed(0)
    pairs = list(zip(EDGES, EDGES[::-1], strict=True)) + [(n, n) for n in EDGES] + [(1, 517), (300, 3), (65, 577)]
    for i, (n, m) in enumerate(pairs):
        d, e = [(1, 1), (3, 5), (16, 16), (17, 31), (64, 64), (33, 129), (128, 7)][i % 7]
        b, g, r = [(1, 1, 1), (2, 1, 3), (1, 2, 2), (3, 1, 1)][i % 4]
        q, k, v = (torch.randn(*s, generator=generator) for s in ((b, g * r, n, d), (b, g, m, d), (b, g, m, e)))
        made = MASKS[mask](b, g * r, n, m)
        case = Case(q, k, v, {} if made is None else {"mask": made})
        case = case.to(dtype, ["plain", "transposed", "gaps"][i % 3])
        assert_accurate(case, case.with_gradients(case.attend("native")), f"{n} x {m}, {d}, {e}")


@pytest.mark.parametrize("width", [1, 2, 7, 15, 16, 47, 48, 95, 96, 97, 127, 192, 193, 255, 256])
@pytest.mark.parametrize("dtype", DTYPES)
def test_widths(width: int, dtype: torch.dtype, instruction_set: str) -> None:
    generator = torch.Generator().manual_seed(width)
    for d, e in ((width, width), (width, 256 - width + 1), (3, width)):
        q, k, v = (torch.randn(1, 2, 23, x, generator=generator) for x in (d, d, e))
        case = Case(q, k, v, {"mask": Causal()}).to(dtype)
        assert_accurate(case, case.with_gradients(case.attend("native")), f"{d}, {e}")


@pytest.mark.parametrize("queries", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask", ["none", "causal", "window", "padding", "holes", "left", "dense", "per head"])
def test_few_queries_against_many_keys(queries: int, dtype: torch.dtype, mask: str, instruction_set: str) -> None:
    generator = torch.Generator().manual_seed(queries)
    for m, (b, g, r), (d, e) in [(1031, (1, 2, 4), (64, 64)), (257, (3, 1, 1), (16, 24)), (67, (2, 3, 2), (5, 3))]:
        q, k, v = (torch.randn(*s, generator=generator) for s in ((b, g * r, queries, d), (b, g, m, d), (b, g, m, e)))
        made = MASKS[mask](b, g * r, queries, m)
        options: dict[str, Any] = {} if made is None else {"mask": made}
        options |= {"sinks": torch.randn(g * r, generator=generator)} if d == 16 else {}
        options |= {"softcap": 3.0, "bias": [torch.randn(1, g * r, queries, m, generator=generator)]} if d == 5 else {}
        case = Case(q, k, v, options).to(dtype, "transposed")
        assert_accurate(case, case.with_gradients(case.attend("native")), f"{queries} x {m}")


def test_biases_by_distance_need_no_plane(instruction_set: str) -> None:
    torch.manual_seed(0)
    n, m = 70, 131
    relative = RelativeBias(4, num_buckets=8, max_distance=40)
    q, k, v = torch.randn(2, 4, n, 16), torch.randn(2, 2, m, 16), torch.randn(2, 2, m, 16)
    for bias in ([relative], [Alibi(4)], [relative, Alibi(4)], [relative, torch.randn(1, 1, n, m)]):
        case = Case(q, k, v, {"bias": bias, "mask": Causal()}).to(torch.float32)
        assert_accurate(case, case.with_gradients(case.attend("native")), str(bias))


# --- what only large sizes show -------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"mask": Causal()}, {"mask": Causal() & Window(300)}, {"dropout": 0.3}])
@pytest.mark.parametrize("dtype", DTYPES)
def test_longer_than_the_caches(options: dict[str, Any], dtype: torch.dtype, instruction_set: str) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 2, 131, 64), torch.randn(1, 1, 2503, 64), torch.randn(1, 1, 2503, 64)
    case = Case(q, k, v, options).to(dtype, "transposed")
    assert_accurate(case, case.with_gradients(case.attend("native")), str(options))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n, m, d", [(211, 211, 64), (127, 2, 64), (150, 700, 128), (300, 300, 16), (3, 1031, 64)])
def test_typical_errors(n: int, m: int, d: int, dtype: torch.dtype, instruction_set: str) -> None:
    """No luck with a single number: output and gradients as a whole."""
    generator = torch.Generator().manual_seed(n)
    q, k, v = (torch.randn(2, 4, x, d, generator=generator) for x in (n, m, m))
    for options in ({}, {"mask": Causal()}, {"softcap": 2.0, "sinks": torch.randn(4, generator=generator)}):
        case = Case(q, k, v, options).to(dtype, "transposed")
        assert_typically_accurate(case, case.with_gradients(case.attend("native")), f"{options}")


@pytest.mark.parametrize("mask", MASKS)
def test_statistics_are_those_of_the_formula(mask: str, instruction_set: str) -> None:
    generator = torch.Generator().manual_seed(1)
    for n, m, (b, g, r), d in [(131, 131, (2, 1, 2), 16), (67, 577, (1, 2, 1), 64), (200, 50, (1, 1, 3), 7)]:
        q, k, v = (torch.randn(*s, generator=generator) * 2 for s in ((b, g * r, n, d), (b, g, m, d), (b, g, m, d)))
        made = MASKS[mask](b, g * r, n, m)
        for more in ({}, {"sinks": torch.randn(g * r)}, {"softcap": 2.0, "bias": Alibi(g * r)}):
            ours = regard.measure(q, k, v, mask=made, measures=EVERY, kernel="native", **more)
            assert_same_measures(ours, right_of(q, k, v, mask=made, **more))


def right_of(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> regard.measures.Measurements:
    options = {name: x.double() if isinstance(x, Tensor) else x for name, x in options.items()}
    return regard.measure(q.double(), k.double(), v.double(), measures=EVERY, kernel="reference", **options)


def assert_same_measures(ours: Any, right: Any) -> None:
    assert torch.equal(ours.seen, right.seen)
    for name in ("entropy", "peak", "distance", "offset", "offsets", "received", "on_first", "heatmap"):
        scale = max(1.0, right[name].abs().max().item())
        error = (ours[name].double() - right[name]).abs().max().item() / scale
        assert error < 3e-6, f"{name} is off by {error}"
    assert (ours.target == right.target).float().mean() > 0.999  # (equals, to rounding, may change places)
    torch.testing.assert_close(ours.output.double(), right.output, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(ours.lse.double(), right.lse, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_threads_change_nothing_and_repeats_are_the_same_bits(
    dtype: torch.dtype, count: int, threads: Any, instruction_set: str
) -> None:
    threads(count)
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 6, 331, 32), torch.randn(2, 2, 331, 32), torch.randn(2, 2, 331, 32)
    bias = torch.randn(1, 6, 331, 331)
    case = Case(q, k, v, {"mask": Causal(), "dropout": 0.2, "bias": [bias]}).to(dtype)
    first = case.with_gradients(case.attend("native"))
    assert_accurate(case, first, f"{count} threads")
    for _ in range(3):
        assert all(map(torch.equal, first, case.with_gradients(case.attend("native"))))
    found = [regard.measure(q, k, v, mask=Causal(), measures=EVERY, kernel="native") for _ in range(3)]
    for name, other in itertools.product(found[0].values, found[1:]):
        assert torch.equal(found[0][name], other[name]), name


def test_decode_repeats_the_same_bits(threads: Any) -> None:
    q, k, v = torch.randn(1, 8, 1, 64), torch.randn(1, 2, 4099, 64), torch.randn(1, 2, 4099, 64)
    for count in (1, 2, 5):
        threads(count)
        first = regard.attend(q, k, v, kernel="native")
        assert all(torch.equal(first, regard.attend(q, k, v, kernel="native")) for _ in range(5))


# --- numbers that are none, and numbers that are large --------------------------------------------------------------


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("where", ["k", "v"])
@pytest.mark.parametrize("n", [1, 5, 70])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_hidden_does_not_leak(dtype: torch.dtype, bad: float, where: str, n: int, instruction_set: str) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, h, m, 8).to(dtype).requires_grad_() for h, m in ((4, n), (2, 97), (2, 97)))
    lengths = torch.tensor([90, 51])
    clean = regard.attend(q, k, v, mask=Padding(lengths=lengths), kernel="native")
    right = torch.autograd.grad(clean.square().sum(), [q, k, v])
    dirty = {"k": k.detach().clone(), "v": v.detach().clone()}
    dirty[where][0, :, 90:] = bad
    dirty[where][1, :, 51:, 3] = bad
    leaves = [q, dirty["k"].requires_grad_(), dirty["v"].requires_grad_()]
    # (Weights are not rounded where values are no numbers, so outputs, of about 1, may differ by a rounding; on
    # tiles by several, for numbers that are none are not multiplied there.)
    eps = torch.finfo(dtype).eps
    rounding = {"rtol": 10 * eps, "atol": (4 if instruction_set == "amx" else 1) * eps}
    for mask in (Padding(lengths=lengths), Keep(torch.arange(97) < lengths[:, None, None])):
        out = regard.attend(*leaves, mask=mask, kernel="native")
        torch.testing.assert_close(out, clean, **rounding)
        for grad, expected in zip(torch.autograd.grad(out.square().sum(), leaves), right, strict=True):
            torch.testing.assert_close(grad, expected, **rounding)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", [8, 33, 200])
def test_one_visible_key_leaves_no_gradient_of_scores(dtype: torch.dtype, d: int, instruction_set: str) -> None:
    """Its weight is 1, whatever the score; and v's gradient is the sum of all that comes down."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, h, n, d).to(dtype).requires_grad_() for h, n in ((6, 67), (3, 1), (3, 1)))
    d_out = torch.randn(2, 6, 67, d).to(dtype)
    d_q, d_k, d_v = torch.autograd.grad(regard.attend(q, k, v, kernel="native"), (q, k, v), d_out)
    assert (d_q == 0).all()
    assert (d_k == 0).all()
    right = d_out.double().unflatten(1, (3, 2)).sum((2, 3))[:, :, None]
    torch.testing.assert_close(d_v, right.to(dtype))


@pytest.mark.parametrize("where", ["q", "k", "v"])
@pytest.mark.parametrize("n", [1, 5, 70])
def test_what_is_seen_and_no_number_gives_none(where: str, n: int, instruction_set: str) -> None:
    torch.manual_seed(0)
    x = {"q": torch.randn(1, 2, n, 8), "k": torch.randn(1, 1, 97, 8), "v": torch.randn(1, 1, 97, 8)}
    x[where][0, 0, 0, 0] = float("nan")
    out = regard.attend(x["q"], x["k"], x["v"], mask=Causal(), kernel="native")
    right = regard.attend(x["q"], x["k"], x["v"], mask=Causal(), kernel="reference")
    assert torch.equal(out.isnan(), right.isnan())
    assert out.isnan().any()


@pytest.mark.parametrize("size", [1e2, 1e4, 1e18])
@pytest.mark.parametrize("n", [3, 150])
def test_extreme_scores(size: float, n: int, instruction_set: str) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 2, n, 8) * size, torch.randn(1, 2, 150, 8), torch.randn(1, 2, 150, 8)
    if size == 1e18:  # the largest score has it all
        best = (q.double() @ k.double().mT).argmax(-1, keepdim=True).expand(-1, -1, -1, 8)
        assert torch.equal(regard.attend(q, k, v, kernel="native"), v.gather(2, best))
        return
    case = Case(q, k, v).to(torch.float32)
    assert_accurate(case, case.with_gradients(case.attend("native")), f"scores of {size}")


@pytest.mark.parametrize("n", [20, 100])
def test_weights_of_the_backward_pass_where_scores_are_large(n: int, instruction_set: str) -> None:
    """It takes them from lse: the two must agree to the last bit on scores in the hundred thousands."""
    torch.manual_seed(n)
    q, k, v = (torch.randn(1, 2, m, 8) for m in (n, 70, 70))
    case = Case(q * 3e4, k, v, {"scale": 0.7}).to(torch.float32)
    precise = case.to(torch.float64)
    ours = case.with_gradients(case.attend("native"))
    right = precise.with_gradients(reference.output(precise.call()))
    for name, i in (("output", 0), ("gradient of v", 3)):
        torch.testing.assert_close(ours[i].double(), right[i], rtol=1e-5, atol=1e-5, msg=lambda t, n=name: f"{n}: {t}")


@pytest.mark.parametrize("n", [1, 3, 64, 100])
def test_rows_that_see_nothing(n: int, instruction_set: str) -> None:
    q, k, v = (torch.randn(2, 2, m, 8, requires_grad=True) for m in (n, 40, 40))
    mask = Padding(lengths=torch.tensor([0, 40])) & Keep(torch.arange(n)[:, None] != 0)
    call = regard.attention.prepare(q, k, v, mask=mask)
    out, lse = native.forward(call)
    assert (out[0] == 0).all()
    assert (out[:, :, 0] == 0).all()
    assert lse[0].isneginf().all()
    assert lse[:, :, 0].isneginf().all()
    assert lse[1, :, 1:].isfinite().all()
    for grad in torch.autograd.grad(out.sum(), [q, k, v]):
        assert (grad[0] == 0).all()
        assert grad.isfinite().all()


def test_subnormal_numbers_are_as_before() -> None:
    """Workers flush them to zero; the caller's own arithmetic must not."""
    q = torch.randn(1, 2, 100, 8)
    tiny = torch.full((1000,), 1e-40)
    regard.attend(q * 1e4, q, q, kernel="native")
    assert (tiny * 0.5 > 0).all()


# --- threads, processes, switches -----------------------------------------------------------------------------------


def test_several_python_threads_at_once() -> None:
    torch.manual_seed(0)
    inputs = [[torch.randn(1, 3, 70 + i, 16, requires_grad=True) for _ in range(3)] for i in range(8)]

    def both(x: list[Tensor]) -> list[Tensor]:
        out = regard.attend(*x, mask=Causal(), kernel="native")
        return [out.detach(), *torch.autograd.grad(out.square().sum(), x)]

    expected = [both(x) for x in inputs]
    wrong: list[int] = []

    def work(i: int) -> None:
        for _ in range(20):
            if not all(torch.allclose(a, b, atol=1e-5) for a, b in zip(both(inputs[i]), expected[i], strict=True)):
                wrong.append(i)

    pool = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in pool:
        thread.start()
    for thread in pool:
        thread.join()
    assert not wrong


def run_python(code: str, **env: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env={**os.environ, **env}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_after_a_fork() -> None:
    """A child has none of its parent's threads: the kernel must not wait for them."""
    code = """
import os, torch, regard
torch.set_num_threads(3)
q = torch.randn(1, 4, 200, 16)
before = regard.attend(q, q, q, kernel="native")
child = os.fork()
if child == 0:
    for _ in range(3):
        again = regard.attend(q, q, q, kernel="native")
    os._exit(0 if torch.equal(before, again) else 1)
print(os.waitpid(child, 0)[1], torch.equal(before, regard.attend(q, q, q, kernel="native")))
"""
    assert run_python(code, OMP_NUM_THREADS="3").split() == ["0", "True"]


def test_it_can_be_turned_off() -> None:
    code = """
import torch, regard
q = torch.randn(1, 2, 300, 8)
print(regard.kernels.available())
print(regard.explain(q, q, q).splitlines()[0])
"""
    first, second = run_python(code, REGARD_NATIVE="0").splitlines()
    assert first == "['fused', 'blockwise', 'reference']"
    assert second == "native: no, REGARD_NATIVE=0 turns it off"


def test_without_the_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    q = torch.randn(1, 2, 300, 8)
    monkeypatch.setattr(library, "_found", library.find(tmp_path / "nothing.so"))
    library.say_once.cache_clear()
    with (
        pytest.warns(RuntimeWarning, match="runs without its native kernel.*not compiled.*regard doctor"),
        pytest.raises(ValueError, match=r"kernel 'native': .* it was not compiled: no C\+\+17 compiler"),
    ):
        regard.attend(q, q, q, kernel="native")
    assert "native" not in regard.kernels.available()
    assert "it was not compiled" in regard.explain(q, q, q)  # (and no second warning)
    (tmp_path / "nothing.so").write_text("no library")
    monkeypatch.setattr(library, "_found", library.find(tmp_path / "nothing.so"))
    assert "it does not load" in regard.explain(q, q, q)


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("float64", {"dtype": torch.float64}),
    ("wider than 1024", {"width": 1025}),
    ("a size is zero", {"queries": 0}),
    ("a large one", {"mask": ~Causal() | Prefix(3), "queries": 5000}),
]


@pytest.mark.parametrize("words, made", REFUSED)
def test_it_says_why_not(words: str, made: dict[str, Any]) -> None:
    n, mask = made.get("queries", 3), made.get("mask")
    q = torch.randn(1, 1, n, made.get("width", 4), dtype=made.get("dtype", torch.float32))
    with pytest.raises(ValueError, match=words):
        regard.attend(q, q, q, mask=mask, kernel="native")


@pytest.mark.system
def test_memory_is_linear() -> None:
    """8,192 tokens, forward, backward and statistics; the plane of one head alone would be 256 MB."""
    code = """
import resource, torch, regard
from regard.masks import Causal
torch.set_num_threads(2)
q = torch.randn(1, 2, 8192, 16, requires_grad=True)
regard.attend(q[:, :, :64], q[:, :, :64], q[:, :, :64], kernel="native").sum().backward()
start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
regard.attend(q, q, q, mask=Causal(), dropout=0.1, kernel="native").sum().backward()
with torch.no_grad():
    regard.measure(q, q, q, mask=Causal(), kernel="native")
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start) / 1024)
"""
    assert float(run_python(code)) < 150


def test_keys_that_are_not_the_first_of_their_text() -> None:
    """As in a cache that slides: targets count by the text, and its first token may have gone."""
    q, k = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 9, 8)
    call = regard.attention.prepare(q, k, k)
    for first in (0, 4):
        plane = replace(regard.attention.plane_of(call), numbers=torch.arange(first, first + 9))
        ours, right = (
            regard.attention.measure_call(call, regard.measures.as_measures(None), plane=plane, kernel=kernel)
            for kernel in ("native", "reference")
        )
        for name in ("on_first", "target", "entropy", "received"):
            torch.testing.assert_close(ours[name], right[name], rtol=1e-5, atol=1e-5)


def documents(n: int) -> Mask:
    return Documents(torch.arange(n) // 5 + 2**40)


def test_documents_with_large_numbers() -> None:
    q = torch.randn(1, 2, 37, 8)
    ours = regard.attend(q, q, q, mask=documents(37), kernel="native")
    torch.testing.assert_close(ours, regard.attend(q, q, q, mask=documents(37), kernel="reference"))
