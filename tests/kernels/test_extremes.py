"""Numbers that are none, infinite, or as large or small as a dtype holds: one answer in every kernel."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard.attention import prepare
from regard.kernels import available, reference
from regard.kernels import native_library as library
from regard.masks import Causal, Documents, Keep, Mask, Padding, Window

KERNELS = available()
LOOPS = [name for name in KERNELS if name != "fused"]  # (torch's own lets a hidden NaN through, and so is not asked)
SETS = [] if (loaded := library.load()) is None else loaded.usable
NAN, INF = math.nan, math.inf


@pytest.fixture(params=[name for name in KERNELS if name != "native"] + [f"native {name}" for name in SETS])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each kernel, and the native one with each instruction set."""
    name, _, chosen = request.param.partition(" ")
    if chosen:
        monkeypatch.setattr(library, "instruction_set", library.INSTRUCTION_SETS.index(chosen))
    return name


def skip_what_refuses(kernel: str) -> None:
    if kernel == "triton":
        pytest.skip("with a mask it refuses keys and values of NaN and inf, and says so (tests/gpu)")


def same(ours: Tensor, right: Tensor, **near: float) -> None:
    torch.testing.assert_close(ours, right.to(ours.dtype), equal_nan=True, **(near or {"rtol": 1e-4, "atol": 1e-5}))


# --- values that are NaN or inf --------------------------------------------------------------------------------------

SEES_ALL: dict[str, Any] = {
    "no mask": None,
    "causal": Causal(),
    "dense": Keep(torch.ones(1, 97, dtype=torch.bool)),
    "window": Window(before=2000, after=0),
    "padding": Padding(lengths=torch.tensor([97])),
    "documents": Documents(torch.zeros(1, dtype=torch.int64), torch.zeros(97, dtype=torch.int64)),
}


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("score", [0.0, -1e4])  # its weight: as large as others', or 0 after underflow
def test_a_visible_value_counts_whatever_its_weight_and_the_mask(bad: float, score: float, kernel: str) -> None:
    """As plain PyTorch has it: w * NaN is NaN, w * inf is inf, and 0 * inf is NaN. A mask that hides nothing changes
    nothing."""
    skip_what_refuses(kernel)
    for n, dtype in ((1, torch.float32), (5, torch.bfloat16), (70, torch.float32), (70, torch.bfloat16)):
        visible_value(bad, score, n, dtype, kernel)


def visible_value(bad: float, score: float, n: int, dtype: torch.dtype, kernel: str) -> None:
    q, k, v = torch.ones(1, 2, n, 3) / 3, torch.zeros(1, 2, 97, 3), torch.randn(1, 2, 97, 3)
    k[0, :, 11], v[0, :, 11, 1] = score, bad
    q, k, v = (x.to(dtype) for x in (q, k, v))
    plain = (q.float() @ k.float().mT).softmax(-1) @ v.float()
    assert plain[..., 1].isnan().all() if score else plain[0, 0, 0, 1].item() == bad or math.isnan(bad)
    for name, mask in SEES_ALL.items():
        if name == "documents":
            mask = Documents(torch.zeros(n, dtype=torch.int64), torch.zeros(97, dtype=torch.int64))
        if mask is not None and kernel == "fused":
            continue  # it says that it cannot serve
        out = regard.attend(q, k, v, scale=1.0, mask=mask, positions=torch.full((n,), 1000), kernel=kernel)
        same(out, plain.to(dtype), rtol=1e-2, atol=1e-2)
        with torch.no_grad():
            seen = regard.measure(q, k, v, scale=1.0, mask=mask, positions=torch.full((n,), 1000), kernel=kernel)
        same(seen.output, plain.to(dtype), rtol=1e-2, atol=1e-2)


def in_documents(n: int, bad: float) -> tuple[list[Tensor], Mask, int]:
    """Two documents side by side; the second has a value that is no number. Where it begins."""
    generator = torch.Generator().manual_seed(n)
    q, k, v = (torch.randn(1, 2, n, 3, generator=generator) for _ in range(3))
    cut = n // 2 + 1
    v[0, :, cut, 1] = bad
    return [q, k, v], Documents((torch.arange(n) >= cut).long()), cut


@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("n", [5, 150])
def test_gradients_of_what_sees_no_number_are_none_and_all_others_are_right(bad: float, n: int, kernel: str) -> None:
    skip_what_refuses(kernel)
    if kernel == "fused":
        pytest.skip("it says that it cannot serve")
    x, mask, cut = in_documents(n, bad)
    leaves = [y.requires_grad_() for y in x]
    out = regard.attend(*leaves, mask=mask, kernel=kernel)
    d_q, d_k, d_v = torch.autograd.grad((out * torch.linspace(-1, 1, 3)).sum(), leaves)
    clean = [y.detach()[:, :, :cut].clone().requires_grad_() for y in x]
    right = regard.attend(*clean, kernel="reference")
    grads = torch.autograd.grad((right * torch.linspace(-1, 1, 3)).sum(), clean)
    same(out[:, :, :cut], right)
    for ours, wanted in zip((d_q, d_k, d_v), grads, strict=True):
        same(ours[:, :, :cut], wanted)
    assert not out[:, :, cut:, 1].isfinite().any()
    assert d_q[:, :, cut:].isnan().all()
    assert d_k[:, :, cut:].isnan().all()
    assert d_v[:, :, cut + 1 :].isfinite().all()


@pytest.mark.parametrize("n", [1, 70])
def test_a_visible_key_of_nan_reaches_those_that_see_it(n: int, kernel: str) -> None:
    skip_what_refuses(kernel)
    if kernel == "fused":
        pytest.skip("it says that it cannot serve")
    q, k, v = (torch.randn(1, 2, m, 3) for m in (n, 97, 97))
    k[0, 0, 96, 0] = NAN
    out, weights = regard.attend(q, k, v, mask=Causal(), kernel=kernel), regard.attention_weights(q, k, mask=Causal())
    assert out[0, 0, -1].isnan().all()
    assert out[0, 0, :-1].isfinite().all()
    assert out[0, 1].isfinite().all()
    assert weights[0, 0, -1].isnan().all()
    same(out, regard.attend(q, k, v, mask=Causal(), kernel="reference"))
    if n > 1:  # hidden from all but the last query, whose row has no weight for what it does not see
        assert (regard.attention_weights(q, k, mask=Window(3))[0, 0, -1, :-3] == 0).all()


# --- scales and softcaps ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 70])
def test_softcaps_of_any_size(n: int, kernel: str) -> None:
    if kernel == "fused":
        pytest.skip("it has no softcap")
    for softcap in (1e-300, 1e-46, 1e-40, 1e-38, 1e-20, 1e20, 1e30, 1e37, 1e38, 3e38, 1e39, 1e300):
        softcap_of(softcap, n, kernel)


def softcap_of(softcap: float, n: int, kernel: str) -> None:
    generator = torch.Generator().manual_seed(n)
    q, k, v = (torch.randn(1, 2, m, 3, generator=generator).requires_grad_() for m in (n, 97, 97))
    q.data[..., 0, :] = 0.0  # a score of 0 stays one
    precise = [x.detach().double().requires_grad_() for x in (q, k, v)]
    q64, k64, v64 = precise
    capped = softcap * torch.tanh(q64 @ k64.mT / softcap) if 1e-30 < softcap < 1e30 else q64 @ k64.mT
    capped = capped * 0 if softcap < 1e-10 else capped
    right = capped.softmax(-1) @ v64
    out = regard.attend(q, k, v, scale=1.0, softcap=softcap, kernel=kernel)
    same(out, right)
    same(regard.measure(q.detach(), k, v, scale=1.0, softcap=softcap, kernel=kernel).output, right)
    ours, wanted = (torch.autograd.grad(y.square().sum(), z) for y, z in ((out, [q, k, v]), (right, precise)))
    same(ours[2], wanted[2])
    if softcap > 1:
        same(ours[0], wanted[0])
        same(ours[1], wanted[1])
    assert all(grad.isfinite().all() for grad in ours)


@pytest.mark.parametrize("n", [1, 70])
def test_scales_of_any_size(n: int, kernel: str) -> None:
    generator = torch.Generator().manual_seed(n)
    q, k, v = (torch.randint(1, 9, (1, 1, m, 1), generator=generator).float() * 2**-9 for m in (n, 97, 97))
    for scale in (0.0, 1e-300, 1e-46, 1e-40, 1e-20, 1e20, 1.5e38):
        right = (q.double() @ k.double().mT * scale).softmax(-1) @ v.double()
        if scale or kernel != "fused":  # (which says that it cannot serve)
            same(regard.attend(q, k, v, scale=scale, kernel=kernel), right)


@pytest.mark.parametrize("scale", [NAN, INF, 1e39])
def test_a_scale_that_is_none_is_refused(scale: float) -> None:
    q = torch.zeros(1, 1, 3, 2)
    with pytest.raises(ValueError, match=r"scale: expected a number of at most 1\.7e\+38, received"):
        regard.attend(q, q, q, scale=scale)
    if scale == 1e39:
        regard.attend(q.double(), q.double(), q.double(), scale=scale)


# --- sinks that outweigh everything ----------------------------------------------------------------------------------


@pytest.mark.parametrize("sink", [50.0, 90.0, 100.0, 110.0, 200.0])
@pytest.mark.parametrize("n", [1, 70])
def test_rows_that_a_sink_outweighs_are_seen_alike(sink: float, n: int, kernel: str) -> None:
    if kernel == "fused":
        pytest.skip("it has no sinks")
    q, k, v = torch.zeros(1, 2, n, 3), torch.zeros(1, 2, 97, 3), torch.randn(1, 2, 97, 3)
    k[:, :, 7] = 1.0
    q[:] = 1.0
    options: dict[str, Any] = {"sinks": torch.tensor([sink, 0.0]), "scale": 1.0, "mask": Causal()}
    ours = regard.measure(q, k, v, kernel=kernel, **options)
    right = regard.measure(q, k, v, kernel="reference", **options)
    assert torch.equal(ours.seen, right.seen)
    assert torch.equal(ours.target, right.target)
    assert ours.seen[0, 0].all().item() == (sink < 105)
    for name in ("entropy", "peak", "received", "on_first", "offsets"):
        same(ours[name], right[name])
    for name in ("distance", "offset"):  # (quotients of numbers that have a few bits left)
        same(ours[name], right[name], rtol=0.3, atol=1.0)
        assert ours[name].isfinite().all()
    same(ours.lse, right.lse)


# --- sizes -----------------------------------------------------------------------------------------------------------


def test_more_keys_than_32_bits_count_are_left_to_others() -> None:
    q, k = torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1, 1).expand(1, 1, 2**30, 1)
    if library.load() is not None:
        assert regard.explain(q, k, k).startswith("native: no, there are more than 1073741823 queries or keys")
        with pytest.raises(ValueError, match=r"kernel 'native': .* there are more than 1073741823 queries or keys"):
            regard.attend(q, k, k, kernel="native")
    assert reference.why_not(prepare(q, k, k)) is None


RETAINED = """
import torch, regard
def memory():
    return int(next(l for l in open("/proc/self/status") if l.startswith("VmRSS")).split()[1]) / 1024
torch.set_num_threads(2)
small = torch.randn(1, 2, 64, 16, requires_grad=True)
regard.measure(small.detach(), small.detach(), small.detach(), kernel="native")
regard.attend(small, small, small, kernel="native").sum().backward()
def measure():
    q, k = torch.randn(1, 1, 64, 8), torch.randn(1, 1, 300_000, 8)
    regard.measure(q, k, k, kernel="native", measures=["entropy", "received"])
def train():
    q = torch.randn(1, 2, 64, 32, requires_grad=True)
    k = torch.randn(1, 100_000, 2, 32, requires_grad=True).transpose(1, 2)
    regard.attend(q, k, k, kernel="native").sum().backward()
before = memory()
measure()
train()
print(memory() - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.skipif(library.load() is None, reason="the native kernel is not here")
@pytest.mark.system
def test_scratch_memory_is_given_back() -> None:
    """A strip of 300,000 keys is 77 MB for each thread, gradients of 100,000 keys 51 MB."""
    ran = subprocess.run(
        [sys.executable, "-c", RETAINED], capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "2"}
    )
    assert ran.returncode == 0, ran.stderr
    assert float(ran.stdout) < 60
