"""What `blockwise` promises beyond the right answer: O(N) memory, and no work on what is hidden."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from regard import tuning
from regard.attention import prepare
from regard.kernels import blockwise
from regard.masks import Causal, Documents, Mask, Padding, Prefix, Window

pytestmark = pytest.mark.on_device

MEASURE = """
import sys, torch
import regard
n = int(sys.argv[1])
torch.set_num_threads(2)
def peak():  # the most memory this process ever held, in MB; getrusage would count its parent's too
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) / 1024
def train(n, h=12):
    q, k, v = (torch.randn(1, n, h, 64).transpose(1, 2).requires_grad_() for _ in range(3))
    before = peak()
    out = regard.attend(q, k, v, dropout=0.1)
    out.backward(torch.ones_like(out))
    return peak() - before
train(64, 1)  # what torch loads once
print(train(n))
"""


def extra_megabytes(n: int) -> float:
    done = subprocess.run([sys.executable, "-c", MEASURE, str(n)], capture_output=True, text=True, check=True)
    return float(done.stdout)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc, which is not here")
@pytest.mark.slow
@pytest.mark.system
def test_training_with_dropout_takes_memory_in_proportion_to_the_length() -> None:
    """N = 4096, H = 12, D = 64, forward and backward; the plain path needs over 2 GB."""
    half, whole = extra_megabytes(2048), extra_megabytes(4096)
    assert whole < 150
    assert whole < 2.2 * half


def scores_computed(mask: Mask | None, n: int, m: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many scores the forward pass computes, counted at the matrix product."""
    counted = []
    scores = blockwise._Chunk.scores

    def spy(self, strip, q):
        s, capped = scores(self, strip, q)
        counted.append(s.numel())
        return s, capped

    monkeypatch.setattr(blockwise._Chunk, "scores", spy)
    q, k = torch.zeros(1, 1, n, 4), torch.zeros(1, 1, m, 4)
    blockwise.differentiable_forward(prepare(q, k, k, mask=mask), 16, 16)
    return sum(counted)


@pytest.mark.parametrize(
    "mask, share",
    [
        (None, 1.0),
        (Causal(), (16 + 1) / 32),
        (Window(16), 31 / 256),
        (Causal() & Documents(torch.arange(256) // 64), 40 / 256),
        (Window(16) | Causal() & Prefix(16), 45 / 256),
        (Padding(lengths=torch.tensor([32])), 2 / 16),
        (~Prefix(128), 0.5),
    ],
)
def test_what_is_hidden_is_not_computed(mask: Mask | None, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    assert scores_computed(mask, 256, 256, monkeypatch) == round(share * 256 * 256)


def test_padding_is_skipped_item_by_item(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "STRIP", 256)
    seen = []
    scores = blockwise._Chunk.scores
    monkeypatch.setattr(
        blockwise._Chunk,
        "scores",
        lambda self, strip, q: seen.append((self.batch.start, strip.width)) or scores(self, strip, q),
    )
    q = torch.randn(3, 1, 16, 4)
    blockwise.differentiable_forward(prepare(q, q, q, mask=Padding(lengths=torch.tensor([16, 3, 0]))), 0, 4)
    assert seen == [(0, 16), (1, 4)]
