"""The GPU kernels where there is no GPU: they are refused in words, and nothing imports Triton. `tests/gpu` tests what
they compute."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import regard
from regard import doctor
from regard.kernels import KERNELS, available, triton
from regard.kernels.triton import availability, launch, self_check
from regard.kernels.triton.blocks import blocks_for
from regard.kernels.triton.lowered import _where_equal, lower
from regard.masks import Causal, Documents, Padding, Window

Q = torch.randn(1, 2, 5, 8)


@pytest.fixture(autouse=True)
def no_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the environment says."""
    monkeypatch.setattr(availability, "interpreting", lambda: False)


def test_it_is_refused_on_a_cpu_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(availability, "installed", lambda: True)
    words = r"kernel 'triton': .*for GPUs, and the tensors are on cpu \(.*TRITON_INTERPRET=1 before Python starts\)"
    with pytest.raises(ValueError, match=words):
        regard.attend(Q, Q, Q, kernel="triton")
    assert "triton: no, it is for GPUs" in regard.explain(Q, Q, Q)


def test_where_triton_is_missing_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(availability, "installed", lambda: False)
    assert availability.why_not_on("cuda") == "Triton is not installed; remedy: pip install 'regard[gpu]'"
    assert "triton" not in available("cuda")
    monkeypatch.setattr(availability, "interpreting", lambda: True)
    with pytest.raises(ValueError, match=r"Triton is not installed; remedy: pip install 'regard\[gpu\]'"):
        regard.attend(Q, Q, Q, kernel="triton")
    assert availability.version() is None


def test_other_devices_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(availability, "installed", lambda: True)
    assert availability.why_not_on("mps") == "Triton has no compiler for mps"
    assert availability.why_not_on("cuda") is None
    monkeypatch.setattr(availability, "interpreting", lambda: True)
    assert "the interpreter is for CPUs" in (availability.why_not_on("cuda") or "")
    assert availability.why_not_on("cpu") is None


def test_it_is_available_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(availability, "installed", lambda: True)
    assert "triton" not in available()
    assert available("cuda") == ["fused", "triton", "blockwise", "reference"]
    assert available("meta") == ["fused", "blockwise", "reference"]
    assert [kernel.name for kernel in KERNELS] == ["native", "fused", "triton", "blockwise", "reference"]


def test_importing_regard_does_not_import_triton() -> None:
    code = "import sys, regard, regard.kernels.triton.launch; print([m for m in sys.modules if m.startswith('triton')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda q: (q.double(),) * 3, "accumulates in float32, too little for torch.float64"),
        (lambda q: (q[:, :, :0], q, q), "a size is zero"),
        (lambda q: (torch.randn(1, 1, 2, 257),) * 3, "heads are wider than 256"),
    ],
)
def test_what_it_cannot_serve_is_said(change: Any, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "why_not_on", lambda device: None)
    assert words in (triton.why_not(regard.attention.prepare(*change(Q))) or "")


class OnCuda:
    """A call whose tensors are said to be on a GPU."""

    class q:
        device = torch.device("cuda", 0)


def test_auto_asks_for_the_self_check_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.device] = []
    monkeypatch.setattr(triton, "traced", lambda *tensors: False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(self_check, "trusted", lambda device: asked.append(device) or len(asked) == 1)
    call: Any = OnCuda()
    assert triton.worth(call)
    assert not triton.worth(call)
    assert asked == [call.q.device] * 2
    assert not triton.worth(regard.attention.prepare(Q, Q, Q))  # on a CPU nothing is asked
    assert len(asked) == 2


def test_what_is_traced_runs_no_self_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "traced", lambda *tensors: True)
    monkeypatch.setattr(self_check, "trusted", lambda device: pytest.fail("it ran"))
    monkeypatch.setattr(self_check, "passed", lambda device: True)
    assert triton.worth(OnCuda())  # type: ignore[arg-type]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_fake_tensors_on_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in an export for another machine."""
    monkeypatch.setattr(availability, "installed", lambda: True)
    with FakeTensorMode():
        q = torch.empty(1, 2, 5, 8, device="cuda")
        out, lse = regard.attend(q, q, q, return_lse=True)
        assert "self-check has not run on this device" in regard.explain(q, q, q, softcap=2.0)
    assert (out.shape, lse.shape, out.device.type) == (q.shape, q.shape[:3], "cuda")


def test_the_doctor_says_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(availability, "installed", lambda: False)
    assert doctor.examine()["kernels"]["triton"] == "no: torch finds no GPU, and Triton is not installed"
    with pytest.raises(
        ValueError, match="GPU kernels: expected a GPU that Triton compiles for, received none: Triton is"
    ):
        doctor.check_gpus()
    monkeypatch.setattr(availability, "installed", lambda: True)
    with pytest.raises(ValueError, match=r"received none: torch .* finds no GPU"):
        doctor.check_gpus()


def test_the_doctor_tells_the_verdict_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "A GPU")
    monkeypatch.setattr(availability, "installed", lambda: True)
    verdicts = [
        None,
        self_check.Verdict(False, 3, ["window: output is off"], 2.0),
        self_check.Verdict(True, 3, [], 2.0),
    ]
    expected = [
        "A GPU: by its name alone; its self-check has not run on this device; remedy: regard doctor --gpu",
        "A GPU: by its name alone; its self-check failed on this device: 1 of 3 comparisons failed; the first: window: "
        "output is off",
        "A GPU: available (3 comparisons with `reference` passed in 2 s)",
    ]
    for verdict, words in zip(verdicts, expected, strict=True):
        monkeypatch.setattr(self_check, "remembered", lambda device, verdict=verdict: verdict)
        assert doctor.examine()["kernels"]["triton"] == words


# --- what is handed to device code ----------------------------------------------------------------------------------


def test_masks_become_ranges() -> None:
    q, k = torch.randn(2, 2, 5, 8), torch.randn(2, 1, 9, 8)
    mask = Causal() & Window(3) & Padding(lengths=torch.tensor([9, 4]))
    seen = lower(regard.attention.prepare(q, k, k, mask=mask)).seen
    assert (seen.before, seen.after) == (2, 0)
    assert seen.key_end is not None
    assert seen.key_end.tolist() == [9, 4]
    assert seen.documents is None
    assert seen.dense is None


def test_documents_are_found_between_their_first_and_last_key() -> None:
    ids, keys = torch.tensor([[3, 1, 9]]), torch.tensor([[1, 3, 3, 1, 2], [9, 9, 0, 3, 1]])
    first, last = _where_equal(ids, keys)
    assert first.tolist() == [[1, 0, 0], [3, 4, 0]]
    assert last.tolist() == [[3, 4, 0], [4, 5, 2]]
    call = regard.attention.prepare(Q, Q, Q, mask=Documents(torch.tensor([0, 0, 1, 1, 1])))
    documents = lower(call).seen.documents
    assert documents is not None
    assert documents.first_key.tolist() == documents.first_query.tolist() == [[0, 0, 2, 2, 2]]
    assert documents.last_key.tolist() == [[2, 2, 5, 5, 5]]


def test_scale_and_base_are_one_multiplication_where_nothing_stands_between() -> None:
    def numbers(**options: Any) -> Any:
        return lower(regard.attention.prepare(Q, Q, Q, scale=0.5, **options)).numbers

    assert numbers()[:2] == pytest.approx((1.0, 0.5 * 1.4426950408889634))
    assert numbers(softcap=2.0)[:3] == pytest.approx((0.25, 1.4426950408889634, 2.0))
    assert numbers(bias=torch.zeros(5, 5))[:2] == pytest.approx((0.5, 1.4426950408889634))


def test_every_kernel_has_blocks_on_every_target() -> None:
    names = ("forward", "seeing", "decode", "d_queries", "d_keys", "d_scores", "received", "columns", "lists", "links")
    for name in names:
        for target in ("cuda:80", "cuda:90", "cuda:100", "hip:gfx942"):
            for width in (16, 64, 128, 256):
                for itemsize in (2, 4):
                    for plain in (True, False):
                        blocks = blocks_for(name, target, itemsize, width, plain)
                        assert all(side >= 16 and side & (side - 1) == 0 for side in blocks[:2])
                        assert blocks.warps in (4, 8)


def test_float32_is_multiplied_exactly_on_every_target() -> None:
    low, wide = (lower(regard.attention.prepare(*[torch.randn(1, 1, 2, width)] * 3)) for width in (128, 192))
    nvidia, amd = launch.Target("cuda:90", 132), launch.Target("hip:gfx942", 304)
    assert launch.precision_for(low, nvidia) == "tf32x3"
    assert launch.precision_for(wide, nvidia) == "ieee"
    assert launch.precision_for(low, amd) == "ieee"  # (AMD's compiler has no tf32x3)
